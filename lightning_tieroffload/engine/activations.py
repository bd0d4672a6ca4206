"""Floor 5. Activation offload: tensors saved for backward wait in DRAM. Owns their DRAM blocks until the graph lets go.

``ActivationStore`` serves an engine (``activations="offload"``); ``offload_activations()`` serves any code.

[Note: saved activations] A saved tensor is keyed by storage, offset, shape, stride, dtype and version: two views of one
storage are two copies, the same view saved twice is one. Parameters, buffers and small tensors stay where they are. A
tensor that user code still holds when backward wants it is handed back without a round trip. The version counter is
kept by an alias whose storage was taken away, so an in-place edit after saving fails as in plain torch, and costs
nothing. A block is freed when its last handle dies, whichever way the graph ends.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_tieroffload.engine.streams import LANDED, CopyTicket, Pairs, Streams, make_streams
from lightning_tieroffload.errors import CapacityError
from lightning_tieroffload.memory.arena import Block, PinnedArena
from lightning_tieroffload.sizes import MiB, format_nbytes, round_up

__all__ = ["ActivationStore", "Offloaded", "offload_activations", "version_error"]

LEAST_NBYTES = 4096  # a smaller tensor costs more to move than it frees
_SEGMENT_NBYTES = 32 * MiB
_LEAVING_NBYTES = 512 * MiB  # most that may be on its way down at a time, or two tensors


def version_error(name: str, shape: Any, saved: int, current: int, hint: str = "") -> RuntimeError:
    """Autograd's own error for a saved tensor that was modified in place; hooks switch its check off."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{name} {list(shape)}] is at version {current}; expected version {saved} instead. Hint: a step, "
        f"load or in-place edit between forward and backward changes what backward needs.{hint}"
    )


class _Saved:
    """One offloaded tensor: its DRAM copy, and what is needed to make it again."""

    __slots__ = (
        "__weakref__", "block", "counter", "device", "download", "dtype", "host", "label", "nbytes", "original",
        "place", "requested", "shape", "stride", "upload", "version",
    )  # fmt: skip

    def __init__(self, tensor: torch.Tensor, block: Block, nbytes: int, place: int) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.device, self.version, self.nbytes, self.place = tensor.device, tensor._version, nbytes, place
        self.block = block
        self.original = weakref.ref(tensor)
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            self.counter = tensor.detach()
            self.counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.host: torch.Tensor
        self.label = "activation"
        self.download: CopyTicket = LANDED
        self.upload: CopyTicket = LANDED
        self.requested: torch.Tensor | None = None  # on its way back, or back already


class Offloaded:
    """What autograd's graph holds in place of a tensor. Dropping it gives the DRAM back."""

    __slots__ = ("saved",)

    def __init__(self, saved: _Saved) -> None:
        self.saved = saved


def _is_parameter(tensor: torch.Tensor) -> bool:
    base = tensor._base
    return (
        isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
    )


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last of a strided tensor, gaps included; so copies keep the strides."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


class ActivationStore:
    """Saved tensors in DRAM. Called from the training thread and from autograd's threads.

    Args:
        streams: who copies. Copies back are ordered two handles ahead, in reverse order of saving.
        headroom_nbytes: asked before host memory grows: bytes left of dram_budget; None where there is no budget.
        must_fit: whether a tensor that has no room is an error; else it stays on the device.
        unit_now: the name of the unit that computes.
        is_excluded: whether a storage (by ``untyped_storage()._cdata``) must stay: buffers, parameters.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        pin: bool,
        headroom_nbytes: Callable[[], int] | None = None,
        must_fit: bool = True,
        is_excluded: Callable[[int], bool] = lambda _: False,
        on_moved: Callable[[str, int], None] = lambda *_: None,
        unit_now: Callable[[], str] = lambda: "",
        num_ahead: int = 2,
        poison: bool = False,
    ) -> None:
        self._streams = streams
        self._pin = pin
        self._poison = poison
        self._headroom_nbytes = headroom_nbytes
        self._must_fit = must_fit
        self._is_excluded = is_excluded
        self._on_moved = on_moved
        self._unit_now = unit_now
        self._num_ahead = num_ahead
        self._lock = threading.RLock()
        self._arenas: list[PinnedArena] = []
        self._by_key: weakref.WeakValueDictionary[Any, _Saved] = weakref.WeakValueDictionary()
        self._in_order: weakref.WeakValueDictionary[int, _Saved] = weakref.WeakValueDictionary()
        self._next_place = 0
        self._leaving: deque[tuple[CopyTicket, int]] = deque()
        self._leaving_nbytes = 0
        self.leased_nbytes = 0
        self.num_packed = 0
        self.num_forwarded = 0

    # ------------------------------------------------------------------------------------------------- pack
    def pack(self, tensor: torch.Tensor) -> Offloaded | None:
        """Send a saved tensor to DRAM; None where it is to stay on the device."""
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or _is_parameter(tensor):
            return None
        span = _span(tensor)
        nbytes = span * tensor.itemsize
        if nbytes < LEAST_NBYTES or span > 2 * tensor.numel():
            return None  # small, or a sparse window onto a larger storage
        storage = tensor.untyped_storage()._cdata
        if self._is_excluded(storage):
            return None
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        with self._lock:
            saved = self._by_key.get(key)
            original = saved.original() if saved is not None else None
            # A storage address may be given out again; only a tensor that still lives proves that it is the same one.
            if saved is None or original is None or original.untyped_storage()._cdata != storage:
                block = self._take(nbytes, must_fit=self._must_fit)
                if block is None:
                    return None
                saved = self._send(tensor, block, span, nbytes)
                self._by_key[key] = saved
            self.num_packed += 1
            return Offloaded(saved)

    def _send(self, tensor: torch.Tensor, block: Block, span: int, nbytes: int) -> _Saved:
        saved = _Saved(tensor, block, nbytes, self._next_place)
        self._next_place += 1
        saved.host = block.tensor(tensor.dtype, (span,))
        flat = tensor.detach().as_strided((span,), (1,))
        saved.label = f"activation ({self._unit_now()})"
        self._make_way(nbytes)
        saved.download = self._streams.download([(saved.host, flat)], saved.label)
        if saved.download is not LANDED:
            self._leaving.append((saved.download, nbytes))
            self._leaving_nbytes += nbytes
        self._on_moved("d2h", nbytes)
        self._in_order[saved.place] = saved
        self.leased_nbytes += nbytes
        weakref.finalize(saved, self._give_back, block, nbytes, saved.download).atexit = False
        return saved

    def _make_way(self, nbytes: int) -> None:
        """Memory on its way down is held until the copy has landed, and the host runs ahead of both: it waits here.

        Else every activation of a forward that the host has enqueued in no time would be on the device at once.
        """
        while self._leaving and (
            self._leaving[0][0].done() or (len(self._leaving) > 1 and self._leaving_nbytes + nbytes > _LEAVING_NBYTES)
        ):
            download, landed_nbytes = self._leaving.popleft()
            self._leaving_nbytes -= landed_nbytes
            download.wait()
        if not self._leaving:
            self._leaving_nbytes = 0  # Ctrl-C may have struck between the two of them

    def _give_back(self, block: Block, nbytes: int, download: CopyTicket) -> None:
        # The graph may die while the copy still writes the block.
        download.wait()
        block.free()
        self.leased_nbytes -= nbytes

    def lend(self, nbytes: int) -> Block | None:
        """DRAM for something else that waits for backward, until its ``free``. None where there is no room."""
        with self._lock:
            return self._take(nbytes, must_fit=False)

    def _take(self, nbytes: int, *, must_fit: bool) -> Block | None:
        wanted = round_up(nbytes, 64)
        for arena in self._arenas:
            if arena.largest_free_nbytes >= wanted:
                return arena.take(nbytes)
        wanted = round_up(wanted, mmap.PAGESIZE)  # whole pages are mapped, and count
        left_nbytes = self._headroom_nbytes() if self._headroom_nbytes is not None else wanted
        if left_nbytes < wanted:
            if not must_fit:
                return None
            raise CapacityError(
                f"an activation of {format_nbytes(nbytes)} does not fit into dram_budget: {format_nbytes(left_nbytes)} "
                'is free. Raise dram_budget, lower the batch size, or set activations="keep".'
            )
        whole_nbytes = left_nbytes - left_nbytes % mmap.PAGESIZE
        nbytes_to_map = max(wanted, min(_SEGMENT_NBYTES, whole_nbytes)) if self._pin else wanted
        arena = PinnedArena(nbytes_to_map, pin=self._pin, label="activations", poison=self._poison)
        self._arenas.append(arena)
        return arena.take(nbytes)

    # ------------------------------------------------------------------------------------------------- unpack
    def unpack(self, packed: Offloaded) -> torch.Tensor:
        """The tensor again, with its strides, on its device, readable by everything that compute does from here on."""
        saved = packed.saved
        if saved.counter._version != saved.version:
            raise version_error("a saved tensor", saved.shape, saved.version, saved.counter._version)
        with self._lock:
            original = saved.original()
            if original is not None:
                self.num_forwarded += 1
                return original.detach()
            self._request(saved)
            for place in range(saved.place - 1, saved.place - 1 - self._num_ahead, -1):
                ahead = self._in_order.get(place)
                if ahead is not None and ahead.original() is None:
                    self._request(ahead)
            saved.upload.before_compute()
            flat = saved.requested
            assert flat is not None
            saved.requested = None  # a second backward over a retained graph fetches again
            return flat.as_strided(saved.shape, saved.stride)

    def _request(self, saved: _Saved) -> None:
        if saved.requested is None:
            saved.download.wait()
            with torch._C._InferenceMode(False):
                saved.requested = torch.empty(saved.host.numel(), dtype=saved.dtype, device=saved.device)
            pairs: Pairs = [(saved.requested, saved.host)]
            saved.upload = self._streams.upload(pairs, saved.label)
            self._on_moved("h2d", saved.nbytes)

    def mapped_nbytes(self) -> int:
        """Host memory that the store has mapped; it is kept for the next step until ``close``."""
        return sum(arena.nbytes for arena in self._arenas)

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


class _Hooks:
    """The context manager's pair of hooks."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = self._store.pack(tensor)
        if packed is not None:
            return packed
        # An output saved as itself would own the node that owns it; a detached alias shares the version counter.
        return (tensor if tensor.is_leaf else tensor.detach()), tensor._version

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Offloaded):
            return self._store.unpack(packed)
        tensor, version = packed
        if tensor._version != version:
            raise version_error("a saved tensor", tensor.shape, version, tensor._version)
        return tensor  # type: ignore[no-any-return]


@contextmanager
def offload_activations(
    model: nn.Module | None = None, *, device: torch.device | str | None = None
) -> Iterator[ActivationStore]:
    """Tensors that autograd saves inside wait in DRAM until backward wants them. For any code.

    Parameters are never taken; with ``model`` its buffers neither. Without an accelerator the "device" is host memory,
    and the copies only show that the numbers are right. Backward may run inside or after the context.

    Yields:
        The store: ``leased_nbytes`` is what is in DRAM now.
    """
    where = torch.device(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
    excluded = {b.untyped_storage()._cdata for b in model.buffers()} if model is not None else set()
    store = ActivationStore(
        make_streams(where, on_stall=lambda *_: None), pin=where.type == "cuda", is_excluded=excluded.__contains__
    )
    hooks = _Hooks(store)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        yield store
