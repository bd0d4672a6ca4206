"""Floor 4. A unit at run time: its flat storages on the device, its homes in DRAM, its gradients. Owns that memory.

[Note: one storage for life] A group's device storage is one object for as long as the engine lives. Between uses it is
resized to 0 bytes and back, so every view of it (the parameters, ``weight.t()`` saved by autograd) stays valid and sees
the bytes of the moment. Nobody reads it while it is released: see [Note: parameter classes].

Each parameter's home is a tensor with a storage of its own in the arena, so that saving one never writes another.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import nn

from lightning_tieroffload.concepts import Role, Shard
from lightning_tieroffload.engine.params import ParamSlot, set_raw_data
from lightning_tieroffload.engine.streams import LANDED, CopyTicket
from lightning_tieroffload.memory.arena import Block, PinnedArena
from lightning_tieroffload.sizes import round_up

__all__ = ["DtypeGroup", "GradPlace", "GradRecord", "UnitState", "align_nbytes", "storage_owners"]


def align_nbytes(device: torch.device) -> int:
    """Matmul heuristics on CUDA look at alignment: 512 bytes there, a cache line on the host."""
    return 512 if device.type == "cuda" else 64


def storage_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects refer to this storage."""
    return torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined,no-any-return]


class GradPlace(enum.Enum):
    """Where a parameter's gradient is between backward and zero_grad."""

    NONE = "none"  # p.grad is None
    LIVE = "live"  # in autograd's own field on the device: just born, or touched by the user and then authoritative
    HOST = "host"  # in the unit's DRAM gradient block


class GradRecord:
    """One parameter's gradient: its place, and factors that were ordered but not multiplied in yet.

    Each factor is one rounded multiplication in the gradient's dtype, in order, as ``p.grad.mul_(factor)`` would do.
    """

    __slots__ = ("factors", "norms", "place", "ticket", "touched")

    def __init__(self) -> None:
        self.place = GradPlace.NONE
        self.factors: list[torch.Tensor] = []
        self.norms: dict[float, torch.Tensor] = {}
        self.ticket: CopyTicket = LANDED
        self.touched = False  # the user has seen or set it: it stays where it is

    def clear(self) -> None:
        self.place = GradPlace.NONE
        self.factors = []
        self.norms = {}
        self.touched = False


class DtypeGroup:
    """All of a unit's parameters of one dtype: one flat device storage, one flat home block."""

    def __init__(self, unit: UnitState, dtype: torch.dtype, slots: list[ParamSlot], device: torch.device) -> None:
        self.unit = unit
        self.dtype = dtype
        self.slots = slots
        self.device = device
        self.nbytes = self._lay_out(device)
        with torch.inference_mode(False):
            # One view over everything; created at full size, then released.
            self.flat = torch.empty(self.nbytes // dtype.itemsize, dtype=dtype, device=device)
        self.storage = self.flat.untyped_storage()
        self.key = self.storage._cdata
        self.is_materialised = True
        self.home_block: Block
        self.home_flat: torch.Tensor
        self.num_own_refs = 0

    def _lay_out(self, device: torch.device) -> int:
        alignment, offset_nbytes = align_nbytes(device), 0
        for slot in self.slots:
            offset_nbytes = round_up(offset_nbytes, max(alignment, self.dtype.itemsize))
            slot.offset = offset_nbytes // self.dtype.itemsize
            slot.group = self
            offset_nbytes += slot.nbytes
        return round_up(offset_nbytes, self.dtype.itemsize)

    def device_view(self, slot: ParamSlot) -> torch.Tensor:
        return self.flat.as_strided(slot.shape, slot.stride, slot.offset)

    def take_home(self, arena: PinnedArena) -> None:
        self.home_block = arena.take(self.nbytes)
        for slot in self.slots:
            slot.home = _strided(self.home_block, slot, slot.offset)
        # The padding between parameters travels too; give it a value once.
        self.home_flat = self.home_block.tensor(self.dtype, (self.nbytes // self.dtype.itemsize,))

    def adopt(self) -> None:
        """Copy the parameters' values home and make them views of the device storage. Leaves it materialised."""
        with torch.inference_mode(False), torch.no_grad():
            self.home_flat.zero_()
            for slot in self.slots:
                slot.home.copy_(slot.param.detach())
                set_raw_data(slot.param, self.device_view(slot))
        self.release()
        self.num_own_refs = storage_owners(self.storage)

    def num_aliases(self) -> int:
        """Tensors outside the unit that share the storage. See [Note: handed-out tensors]."""
        return storage_owners(self.storage) - self.num_own_refs

    def materialise(self, *, poison: bool) -> None:
        with torch.inference_mode(False):
            self.storage.resize_(self.nbytes)
            if poison:
                torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage, 0, (self.nbytes,)).fill_(255)
        self.is_materialised = True

    def release(self) -> None:
        self.storage.resize_(0)
        self.is_materialised = False

    def slot_at(self, offset: int) -> ParamSlot:
        """The slot that holds element ``offset`` of the flat storage."""
        best = self.slots[0]
        for slot in self.slots:
            if slot.offset > offset:
                break
            best = slot
        return best


def _strided(block: Block, slot: ParamSlot, offset: int) -> torch.Tensor:
    """A tensor of the slot's shape and strides with a storage of its own of exactly the slot's bytes."""
    flat = block.tensor(slot.dtype, (slot.numel,), offset_nbytes=offset * slot.dtype.itemsize)
    return flat.as_strided(slot.shape, slot.stride)


class UnitState:
    """One unit under an engine. Every field is read and written under the residency lock."""

    def __init__(
        self,
        *,
        name: str,
        index: int,
        params: list[tuple[str, nn.Parameter]],
        device: torch.device,
        pin: bool,
        poison: bool,
        is_compiled: bool,
    ) -> None:
        self.name = name
        self.index = index
        self.device = device
        self._pin = pin
        self._poison = poison
        self.is_compiled = is_compiled
        self._arenas: list[PinnedArena] = []
        self._grad_arena: PinnedArena | None = None
        self.num_watched = -1
        self.slots = [ParamSlot(name=n, param=p, index=i, offset=0) for i, (n, p) in enumerate(params)]
        by_dtype: dict[torch.dtype, list[ParamSlot]] = {}
        for slot in self.slots:
            slot.unit = self
            by_dtype.setdefault(slot.dtype, []).append(slot)
        self.groups = [DtypeGroup(self, dtype, slots, device) for dtype, slots in by_dtype.items()]
        self.nbytes = sum(group.nbytes for group in self.groups)
        self.shard = Shard(name, Role.PARAM, self.nbytes)
        self.num_leases = 0
        self.num_windows = 0
        self.is_resident = False
        self.charged_nbytes = 0  # of the device budget; 0 while tensors that the user holds keep it here
        self.is_handed_out = False
        self.versions = [0] * len(self.slots)  # p._version when last known to equal the device copy's truth
        self.upload: CopyTicket = LANDED
        self.download: CopyTicket = LANDED
        self.update: Any = None  # ticket of the update that writes the home next, or None
        self.last_use_s = 0.0
        # gradients
        self.grads = [GradRecord() for _ in self.slots]
        self.grad_blocks: dict[int, Block] = {}
        self.host_grads: list[torch.Tensor | None] = [None] * len(self.slots)
        self.host_params: dict[int, nn.Parameter] = {}
        self.born: list[ParamSlot] = []  # gradients that autograd has finished but that have not left yet
        self.grad_reserve_nbytes = 0

    @property
    def max_grad_nbytes(self) -> int:
        return max((s.nbytes for s in self.slots if s.param.requires_grad), default=0)

    @property
    def grad_nbytes(self) -> int:
        return sum(s.nbytes for s in self.slots if s.param.requires_grad)

    def num_aliases(self) -> int:
        return sum(max(0, group.num_aliases()) for group in self.groups)

    @staticmethod
    def laid_out_nbytes(params: list[nn.Parameter], device: torch.device) -> int:
        """Device bytes of a unit with these parameters, padding included."""
        by_dtype: dict[torch.dtype, int] = {}
        for p in params:
            start_nbytes = round_up(by_dtype.get(p.dtype, 0), max(align_nbytes(device), p.itemsize))
            by_dtype[p.dtype] = start_nbytes + p.numel() * p.itemsize
        return sum(by_dtype.values())

    def _new_arena(self, nbytes: int, label: str) -> PinnedArena:
        arena = PinnedArena(nbytes, pin=self._pin, label=f"{label} of {self.name}", poison=self._poison)
        self._arenas.append(arena)
        return arena

    def take_homes(self) -> None:
        """Map the unit's home memory, copy the parameters' values there and make them views of the device storage."""
        arena = self._new_arena(sum(round_up(group.nbytes, 64) for group in self.groups), "parameters")
        for group in self.groups:
            group.take_home(arena)
            group.adopt()

    def host_grad(self, slot: ParamSlot) -> torch.Tensor:
        """The slot's place in the unit's DRAM gradient memory, which is mapped when first asked for."""
        grad = self.host_grads[slot.index]
        if grad is None:
            if self._grad_arena is None or self._grad_arena.largest_free_nbytes < round_up(slot.nbytes, 64):
                missing = [s for s in self.slots if self.host_grads[s.index] is None and s.param.requires_grad]
                missing = missing if slot in missing else [*missing, slot]
                self._grad_arena = self._new_arena(sum(round_up(s.nbytes, 64) for s in missing), "gradients")
            block = self._grad_arena.take(slot.nbytes)
            self.grad_blocks[slot.index] = block
            grad = self.host_grads[slot.index] = _strided(block, slot, 0)
        return grad

    def dram_nbytes(self) -> int:
        """Bytes of host memory mapped for the unit's homes and gradients (pages are touched as they are used)."""
        return sum(arena.used_nbytes for arena in self._arenas)

    def close(self) -> None:
        """Give the host memory back once nothing refers to it."""
        self.host_params.clear()
        self.host_grads = [None] * len(self.slots)
        for arena in self._arenas:
            arena.close()

    def pairs_to_device(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(group.flat, group.home_flat) for group in self.groups]

    def pairs_to_home(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(group.home_flat, group.flat) for group in self.groups]
