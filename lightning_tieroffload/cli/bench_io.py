"""Floor 8. `tieroffload bench io PATH`: what the disk under a path can do, and how near the store comes to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lightning_tieroffload.cli.options import print_json
from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.io.direct_file import filesystem_of
from lightning_tieroffload.io.endurance import read_health
from lightning_tieroffload.io.probe import PathProbe, StoreComparison, compare_store, probe_path
from lightning_tieroffload.sizes import MiB, format_nbytes, parse_nbytes

__all__ = ["bench_io", "measure_io"]


def measure_io(
    path: Path,
    *,
    block_nbytes: tuple[int, ...] = (1 * MiB, 4 * MiB, 16 * MiB),
    depths: tuple[int, ...] = (1, 2, 4, 8),
    file_nbytes: int = 256 * MiB,
    cell_s: float = 0.15,
) -> tuple[PathProbe, StoreComparison]:
    """The table of a path, and the store beside the bare loop at the row that the engine would use."""
    probe = probe_path(path, block_nbytes=block_nbytes, depths=depths, file_nbytes=file_nbytes, cell_s=cell_s)
    store = compare_store(path, block_nbytes=probe.block_nbytes, depth=probe.io_threads, nbytes=file_nbytes)
    return probe, store


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option}={text!r} must be whole numbers from 1 on, separated by commas, such as 1,4,8.")
    return numbers


def _gb_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f}"


def _render(console: Console, result: dict[str, Any], probe: PathProbe, store: StoreComparison) -> None:
    table = Table(title=f"{probe.path} ({probe.filesystem}, {probe.device or 'no local disk'}, {probe.mode} I/O), GB/s")
    for column in ("block", "depth", "read", "write", "both at once"):
        table.add_column(column, justify="right")
    for row in probe.rows:
        is_chosen = (row.block_nbytes, row.depth) == (probe.block_nbytes, probe.io_threads)
        table.add_row(
            format_nbytes(row.block_nbytes),
            str(row.depth),
            _gb_per_s(row.read_bytes_per_s),
            _gb_per_s(row.write_bytes_per_s),
            _gb_per_s(row.mixed_bytes_per_s),
            style="bold" if is_chosen else None,
        )
    console.print(table)
    console.print(
        f"The engine would use block_nbytes={format_nbytes(probe.block_nbytes)}, io_threads={probe.io_threads}.\n"
        f"The store at that row, checksums on: read {_gb_per_s(store.store_read_bytes_per_s)}, write "
        f"{_gb_per_s(store.store_write_bytes_per_s)} GB/s; a bare O_DIRECT loop in the same run: read "
        f"{_gb_per_s(store.bare_read_bytes_per_s)}, write {_gb_per_s(store.bare_write_bytes_per_s)} GB/s "
        f"({store.read_frac:.0%} and {store.write_frac:.0%})."
    )
    if result["warning"] is not None:
        console.print(f"Warning: {probe.path} {result['warning']}")


def bench_io(
    path: Annotated[Path, typer.Argument(help="A directory on the disk to measure; made if it is missing.")],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    blocks: Annotated[str, typer.Option(help="Block lengths, separated by commas.")] = "1MiB,4MiB,16MiB",
    depths: Annotated[str, typer.Option(help="Calls under way at a time, separated by commas.")] = "1,2,4,8",
    file_size: Annotated[str, typer.Option(help="Length of the scratch file.")] = "256MiB",
    cell_seconds: Annotated[float, typer.Option(help="Seconds for each figure.")] = 0.15,
) -> None:
    """Measure a path on flash: read, write and both, by block length and depth; and the store beside a bare loop."""
    block_nbytes = tuple(parse_nbytes(part, key="--blocks") for part in blocks.split(","))
    if any(nbytes < 4096 or nbytes % 4096 for nbytes in block_nbytes):
        raise ConfigError(f"--blocks={blocks!r}: direct I/O needs multiples of 4KiB.")
    probe, store = measure_io(
        path,
        block_nbytes=block_nbytes,
        depths=_numbers(depths, "--depths"),
        file_nbytes=parse_nbytes(file_size, key="--file-size"),
        cell_s=cell_seconds,
    )
    health = None if probe.device is None else read_health(probe.device)
    result = {
        **probe.to_json(),
        "store": store.to_json(),
        "warning": filesystem_of(probe.path).warning,
        "drive": None
        if health is None
        else {
            "device": health.device,
            "used_frac": health.used_frac,
            "written_nbytes": health.written_nbytes,
            "source": health.source,
        },
    }
    if json_:
        print_json(result)
    else:
        _render(Console(), result, probe, store)
