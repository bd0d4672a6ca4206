"""Floor 8. `tieroffload bench io PATH`: what the disk under a path can do, and how near the store comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_tieroffload.cli.options import print_json
from lightning_tieroffload.errors import ConfigError, TierOffloadError
from lightning_tieroffload.io.direct_file import filesystem_of
from lightning_tieroffload.io.endurance import forecast, rated_nbytes_of_tbw, read_health
from lightning_tieroffload.io.link_probe import LinkRates, probe_links
from lightning_tieroffload.io.probe import (
    BLOCKS_NBYTES,
    DEPTHS,
    PathProbe,
    StoreComparison,
    compare_store,
    kept_probes_file,
    probe_path,
)
from lightning_tieroffload.sizes import MiB, format_nbytes, parse_nbytes

__all__ = ["bench_io", "measure_io"]


def measure_io(
    path: Path,
    *,
    block_nbytes: tuple[int, ...] = BLOCKS_NBYTES,
    depths: tuple[int, ...] = DEPTHS,
    file_nbytes: int = 256 * MiB,
    cell_s: float = 0.15,
) -> tuple[PathProbe, StoreComparison]:
    """The table of a path, and the store beside the bare loop with the block and threads that an engine would use.

    The whole table is kept for engines to come, which ask for that one.
    """
    probe = probe_path(
        path,
        block_nbytes=block_nbytes,
        depths=depths,
        file_nbytes=file_nbytes,
        cell_s=cell_s,
        cache_file=kept_probes_file() if (block_nbytes, depths) == (BLOCKS_NBYTES, DEPTHS) else None,
        fresh=True,
        with_store=True,
    )
    store = compare_store(path, block_nbytes=probe.block_nbytes, io_threads=probe.io_threads, nbytes=file_nbytes)
    return probe, store


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > 256:
        raise ConfigError(f"{option}={text!r} must be whole numbers from 1 to 256, separated by commas, such as 1,4,8.")
    return numbers


def _gb_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f}"


def _links_text(links: Sequence[LinkRates]) -> str:
    if not links:
        return "Host to device: no CUDA device that torch can use, so there is no such link here."
    return "\n".join(
        f"{one.device} ({one.device_name}), {'page-locked' if one.is_page_locked else 'pageable'} memory: host to "
        f"device {_gb_per_s(one.h2d_bytes_per_s)}, device to host {_gb_per_s(one.d2h_bytes_per_s)}, both at once "
        f"{_gb_per_s(one.both_bytes_per_s)} GB/s."
        for one in links
    )


def _render(
    console: Console, result: dict[str, Any], probe: PathProbe, store: StoreComparison, links: Sequence[LinkRates]
) -> None:
    disk = probe.device or "no local disk"
    table = Table(title=Text(f"{probe.path} ({probe.filesystem}, {disk}, {probe.mode} I/O), GB/s"))
    for column in ("block", "depth", "bare read", "write", "both", "store read", "write", "both"):
        table.add_column(column, justify="right")
    for row, of_store in zip(probe.rows, probe.store_rows, strict=True):
        is_chosen = (row.block_nbytes, row.depth) == (probe.block_nbytes, probe.depth)
        table.add_row(
            format_nbytes(row.block_nbytes),
            str(row.depth),
            *(
                _gb_per_s(rate)
                for one in (row, of_store)
                for rate in (one.read_bytes_per_s, one.write_bytes_per_s, one.mixed_bytes_per_s)
            ),
            style="bold" if is_chosen else None,
        )
    console.print(table)
    beside = ", ".join(
        f"{verb} {_gb_per_s(rate)} of {_gb_per_s(bare)} GB/s ({rate / bare:.0%})"
        for verb, rate, bare in (
            ("read", store.read_bytes_per_s, store.bare_read_bytes_per_s),
            ("write", store.write_bytes_per_s, store.bare_write_bytes_per_s),
            ("both at once", store.mixed_bytes_per_s, store.bare_mixed_bytes_per_s),
        )
    )
    console.print(
        f"An engine would use block_nbytes={format_nbytes(probe.block_nbytes)}, io_threads={probe.io_threads}. "
        f"With these the store, checksums on, beside a bare O_DIRECT loop, {store.num_rounds} times in turn: {beside}."
    )
    console.print(f"Written without a pause: {result['endurance']['text']}")
    console.print(_links_text(links))
    if result["warning"] is not None:
        console.print(f"Warning: {probe.path} {result['warning']}")


def bench_io(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A directory on the disk to measure; made if it is missing.")
    ],
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    blocks: Annotated[str, typer.Option(help="Block lengths, separated by commas.")] = "1MiB,4MiB,16MiB",
    depths: Annotated[str, typer.Option(help="Calls under way at a time, separated by commas.")] = "1,2,4,8",
    file_size: Annotated[str, typer.Option(help="Length of the scratch file.")] = "256MiB",
    cell_seconds: Annotated[float, typer.Option(min=0.001, max=600, help="Seconds for each figure.")] = 0.15,
    rated_tbw: Annotated[
        float | None,
        typer.Option(min=0, help="Rated writes of the drive in terabytes (TBW), for how long it lasts at this rate."),
    ] = None,
) -> None:
    """Measure the links: host to device, and a path on flash by block length and depth, bare and through the store."""
    block_nbytes = tuple(parse_nbytes(part, key="--blocks") for part in blocks.split(","))
    if any(nbytes < 4096 or nbytes % 4096 for nbytes in block_nbytes):
        raise ConfigError(f"--blocks={blocks!r}: direct I/O needs multiples of 4KiB.")
    file_nbytes = parse_nbytes(file_size, key="--file-size")
    if not file_nbytes:
        raise ConfigError("--file-size=0: give the scratch file a length, such as 256MiB.")
    at_a_time = _numbers(depths, "--depths")
    try:
        probe, store = measure_io(
            path, block_nbytes=block_nbytes, depths=at_a_time, file_nbytes=file_nbytes, cell_s=cell_seconds
        )
    except OSError as error:
        if isinstance(error, TierOffloadError):
            raise
        raise ConfigError(
            f"{path} cannot be measured: {error.strerror or error}. Name another directory, or a smaller --file-size "
            f"than {file_size}."
        ) from error
    links = [probe_links(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    health = None if probe.device is None else read_health(probe.device)
    wear = forecast(
        probe.path,
        round(store.write_bytes_per_s),
        1.0,
        health=health,
        rated_nbytes=None if rated_tbw is None else rated_nbytes_of_tbw(rated_tbw),
    )
    result = {
        **probe.to_json(),
        "store": store.to_json(),
        "links": [one.to_json() for one in links],
        "endurance": wear.to_json(),
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
        _render(Console(markup=False, highlight=False), result, probe, store, links)
