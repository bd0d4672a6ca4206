"""Floor 5. GPUDirect Storage through kvikio: shards between flash and device memory, past host memory.

Optional (``pip install lightning-tieroffload[gds]``), and used only when the driver really does it. In three ways bytes
go through host memory all the same: by kvikio's compatibility mode, by cuFile's own one (``allow_compat_mode`` of its
cufile.json, on unless switched off), and by kvikio's shortcut for transfers below its ``gds_threshold``. None of them
is GDS, none is called so, and our own path through the pinned arena is better: the first two are obstacles, and the
threshold is 1 byte for as long as a mover lives.

Bytes that go straight to the device are not seen by the CPU, so their checksum cannot be checked: a store with
``verify_reads`` on is refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lightning_tieroffload.concepts import Ticket
from lightning_tieroffload.errors import TierIOError, UnsupportedError
from lightning_tieroffload.io.extent_store import ExtentStore, Piece
from lightning_tieroffload.io.scheduler import Scheduler, TransferTicket

__all__ = ["GdsMover", "gds_obstacle"]

_DRIVER_PATH = "/proc/driver/nvidia-fs"


def gds_obstacle(*, driver_path: str = _DRIVER_PATH) -> str | None:
    """Why GPUDirect Storage is not there, in words; None when it really is. Imports kvikio only if the driver is."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not os.path.exists(driver_path):
        return f"the nvidia-fs kernel module is not loaded ({driver_path} is missing)"
    try:
        driver = importlib.import_module("kvikio.cufile_driver")
        defaults = importlib.import_module("kvikio.defaults")
    except ImportError as error:
        return f"kvikio cannot be imported ({error}): pip install 'lightning-tieroffload[gds]'"
    try:
        if not driver.get("is_gds_available"):
            return "kvikio's driver says that GPUDirect Storage is not available"
        if driver.get("allow_compat_mode"):
            return (
                "cuFile may go through host memory by its own compatibility mode, file by file and unsaid: set "
                '"allow_compat_mode": false in its cufile.json'
            )
        mode = defaults.get("compat_mode")
    except Exception as error:  # other versions of kvikio, or a driver that does not open: not there, whatever it says
        return f"kvikio cannot ask its driver ({type(error).__name__}: {error})"
    if getattr(mode, "name", str(mode)).upper() in ("ON", "TRUE"):
        return "kvikio is set to its compatibility mode, which copies through host memory"
    return None


class GdsMover:
    """Reads and writes of whole shards between flash and CUDA tensors, as tickets, on the lanes of `NvmeMover`.

    Unlike `NvmeMover` it does not order the transfers of one shard: the caller says what comes after what.
    Raises ``UnsupportedError`` where `gds_obstacle` has a reason, or the store verifies what it reads. The tensor
    belongs to the transfer until its ticket is done; the work blocks until the bytes are there, and does not wait for
    any stream: submit after what wrote the tensor has completed.
    """

    def __init__(self, scheduler: Scheduler, store: ExtentStore) -> None:
        self._files: dict[str, Any] = {}
        self._settings = contextlib.ExitStack()
        obstacle = gds_obstacle()
        if obstacle is not None:
            raise UnsupportedError(f"GPUDirect Storage cannot be used: {obstacle}. The path through host memory can.")
        if store.verify_reads:
            raise UnsupportedError(
                "GPUDirect Storage cannot check what it reads: the bytes do not pass the CPU. Set verify_reads to off, "
                "or leave GPUDirect Storage off."
            )
        self._scheduler = scheduler
        self._store = store
        kvikio = importlib.import_module("kvikio")
        defaults = importlib.import_module("kvikio.defaults")
        off = getattr(getattr(kvikio, "CompatMode", None), "OFF", False)
        # With the mode off, opening fails where a file cannot do GDS, instead of going through host memory unsaid.
        self._settings.enter_context(defaults.set({"gds_threshold": 1}))
        with defaults.set({"compat_mode": off}):
            for state_path, directory in zip(store.paths, store.directories, strict=True):
                path = os.path.join(directory, "data-0")
                try:
                    self._files[path] = kvikio.CuFile(path, "r+")
                except Exception as error:
                    self.close()
                    raise UnsupportedError(f"{state_path} cannot do GPUDirect Storage: {error}") from error

    def read(
        self, name: str, target: torch.Tensor, *, priority: int = 0, after: Sequence[Ticket] = ()
    ) -> TransferTicket[None]:
        """Fill ``target`` (contiguous, on a CUDA device, exactly the shard's bytes) from flash."""
        flat = self._flat(name, target)

        def read_piece(piece: Piece) -> None:
            version = self._store.begin_read(name)
            self._move("pread", name, version.pieces[piece.index], flat)

        return self._submit("read", name, read_piece, priority, after, None)

    def write(
        self, name: str, source: torch.Tensor, *, priority: int = 0, after: Sequence[Ticket] = ()
    ) -> TransferTicket[None]:
        """Write ``source`` (contiguous, on a CUDA device, exactly the shard's bytes) and make it current."""
        flat = self._flat(name, source)
        version = self._store.begin_write(name)

        def write_piece(piece: Piece) -> None:
            version.write_piece_with(piece.index, lambda: self._move("pwrite", name, version.pieces[piece.index], flat))

        try:
            ticket = self._submit("write", name, write_piece, priority, after, version.commit)
        except BaseException as error:  # the scheduler refuses more: none of its pieces is under way any more
            version.abort(error)
            raise
        ticket.add_done_callback(lambda done: version.abort(done.error) if done.error is not None else None)
        return ticket

    def close(self) -> None:
        """Close kvikio's files and give it back its settings. Idempotent; no transfer may be under way."""
        self._settings.close()
        while self._files:
            self._files.popitem()[1].close()

    def _flat(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        nbytes = self._store.nbytes_of(name)
        if not tensor.is_contiguous() or tensor.numel() * tensor.element_size() != nbytes:
            raise ValueError(f"{name} has {nbytes} bytes; a contiguous tensor of exactly these is needed")
        return tensor.detach().reshape(-1).view(torch.uint8)

    def _move(self, verb: str, name: str, piece: Piece, flat: torch.Tensor) -> None:
        extent = piece.extent
        part = flat[piece.start_nbytes : piece.start_nbytes + extent.nbytes]
        try:
            moved_nbytes = getattr(self._files[extent.path], verb)(part, extent.nbytes, extent.offset_nbytes).get()
        except Exception as error:
            raise TierIOError(
                f"{verb} of {extent.nbytes} bytes at offset {extent.offset_nbytes} of {extent.path} ({name}) by "
                f"GPUDirect Storage failed: {error}",
                errno=getattr(error, "errno", None),
                path=extent.path,
                offset_nbytes=extent.offset_nbytes,
                nbytes=extent.nbytes,
                shard=name,
            ) from error
        if moved_nbytes != extent.nbytes:
            raise TierIOError(
                f"{verb} at offset {extent.offset_nbytes} of {extent.path} ({name}) by GPUDirect Storage moved "
                f"{moved_nbytes} of {extent.nbytes} bytes.",
                path=extent.path,
                offset_nbytes=extent.offset_nbytes,
                nbytes=extent.nbytes,
                shard=name,
            )

    def _submit(
        self,
        verb: str,
        name: str,
        work: Callable[[Piece], None],
        priority: int,
        after: Sequence[Ticket],
        finish: Callable[[], None] | None,
    ) -> TransferTicket[None]:
        pieces: list[TransferTicket[None]] = []
        try:
            for piece in self._store.pieces_of(name):
                pieces.append(
                    self._scheduler.submit(
                        f"{verb}{piece.path_index}",
                        functools.partial(work, piece),
                        label=f"{verb} {name} piece {piece.index} at {piece.extent.path} (GPUDirect Storage)",
                        priority=priority,
                        nbytes=piece.extent.nbytes,
                        after=after,
                        owner=name,
                        may_fail=True,
                    )
                )
        except BaseException:
            self._scheduler.abandon(pieces)
            raise
        return self._scheduler.when_all(
            pieces, label=f"{verb} {name} (GPUDirect Storage)", finish=finish, nbytes=self._store.nbytes_of(name)
        )
