"""Floor 4. A unit at run time: its storages on the device, its homes in DRAM, its gradients. Owns that memory.

[Note: parts] A unit's parameters are held on the device in *parts*: one flat storage each, fetched and evicted as a
whole. There is one full part per dtype, and fp32 weights that autocast may cast (``Linear`` and its like) have a full
part of their own, beside which a *wire* part can stand: the same weights in the 16 bits that autocast would make of
them. Compute leases the full parts, or the wire part instead of its full one. See [Note: wire precision] in wire.py.

[Note: one storage for life] A part's device storage is one object for as long as the engine lives. Between uses it is
resized to 0 bytes and back, so every view of it (the parameters, ``weight.t()`` saved by autograd) stays valid and sees
the bytes of the moment. Nobody reads it while it is released: see [Note: parameter classes].

Each parameter's home is a tensor with a storage of its own in an arena, so that saving one never writes another. Where
a bf16 wire part exists the home is the split master: the wire copy, the low halves, the tie bits (kernels/split.py).

[Note: host blocks] A unit's host memory is three blocks: homes of parameters, gradients, optimizer state. A block is a
few mappings whose addresses are for life. Where its home is DRAM, its pages are there from the first touch on; where it
is flash, they are there while ``HostSpace`` says so, and everything that reads or writes them asks it first.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import enum
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lightning_tieroffload.concepts import Role, Tier
from lightning_tieroffload.engine.params import ParamSlot, managed_slot, set_raw_data
from lightning_tieroffload.engine.streams import LANDED, CopyTicket, Pairs
from lightning_tieroffload.errors import CapacityError, ResidencyError
from lightning_tieroffload.kernels.split import SplitMaster, merge_f32, num_tie_bytes, split_f32
from lightning_tieroffload.memory.arena import Block, PinnedArena
from lightning_tieroffload.planning.cost_model import ActivationChoice, Choice, UpdatePlace
from lightning_tieroffload.sizes import round_up
from lightning_tieroffload.snapshots import snapshot_items

__all__ = [
    "CAUTIOUS",
    "BlockKeeper",
    "Factor",
    "FactorScales",
    "Form",
    "GradPlace",
    "GradRecord",
    "HostBlock",
    "Loan",
    "OtherCopy",
    "Part",
    "Segment",
    "UnitState",
    "WireState",
    "align_nbytes",
    "flat_numpy",
    "flat_view",
    "most_refs",
    "number_format",
    "storage_owners",
]

_GRAIN_NBYTES = 64  # what an arena rounds a block to
CAUTIOUS = Choice(Tier.DRAM, Tier.DRAM, Tier.DRAM, UpdatePlace.CPU, ActivationChoice.KEEP)


def _low_nbytes(numel: int) -> int:
    """Bytes of a split master's low halves and tie bits: the latter begin at a cache line."""
    return round_up(2 * numel, _GRAIN_NBYTES) + num_tie_bytes(numel)


def align_nbytes(device: torch.device) -> int:
    """Matmul heuristics on CUDA look at alignment: 512 bytes there, a cache line on the host."""
    return 512 if device.type == "cuda" else 64


def storage_owners(storage: torch.UntypedStorage) -> int:
    """How many tensors and storage objects refer to this storage."""
    return torch._C._storage_Use_Count(storage._cdata)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory as one dimension."""
    return tensor.as_strided((tensor.numel(),), (1,))


def number_format(dtype: torch.dtype) -> str:
    """How update kernels call the type of a gradient."""
    return "bf16" if dtype == torch.bfloat16 else "f16" if dtype == torch.float16 else "f32"


def flat_numpy(tensor: torch.Tensor) -> Any:
    """A dense host tensor's memory as a 1-D NumPy array (16-bit floats as uint16)."""
    flat = flat_view(tensor)
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.view(torch.uint16)
    return flat.numpy()


class Form(enum.Enum):
    """What a part holds: the parameters as they are, autocast's 16-bit copies of them, or what only updates need."""

    FULL = "full"
    WIRE = "wire"
    LOW = "low"  # of split masters: per parameter the low halves, then the tie bits
    STATE = "state"  # one kind of optimizer state, fp32
    OLD = "old"  # 16-bit copies as they were before the weights changed, which backward still wants


class WireState(enum.Enum):
    """Whether a unit's castable weights travel in 16 bits."""

    WATCHING = "watching"  # what compute leases is full; casts are made from it on the device, and uses noted
    READY = "ready"
    REFUSED = "refused"  # something other than autocast's own cast reads them


class GradPlace(enum.Enum):
    """Where a parameter's gradient is between backward and zero_grad."""

    NONE = "none"  # p.grad is None
    LIVE = "live"  # in autograd's own field on the device: just born, or touched by the user and then authoritative
    HOST = "host"  # in the unit's DRAM gradient block
    KEPT = "kept"  # on the device, outside autograd's field: it waits there for an update on the device

    @property
    def is_ours(self) -> bool:
        """Whether the engine holds it, out of autograd's field."""
        return self in (GradPlace.HOST, GradPlace.KEPT)


class Factor:
    """A number that gradients are multiplied by, made on the compute device. Any thread may ask for its value.

    ``host`` is a 0-dim host tensor that holds the value once ``landed`` is complete.
    """

    __slots__ = ("_host", "_landed", "tensor")

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, landed: CopyTicket) -> None:
        self.tensor = tensor
        self._host = host
        self._landed = landed

    def value(self) -> float:
        self._landed.wait()
        return float(self._host)

    def on_host(self) -> torch.Tensor:
        self._landed.wait()
        return self._host


class FactorScales:
    """Factors as one tensor on the device, as update kernels take it: the same one serves every parameter of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._found: tuple[list[Factor], torch.Tensor] | None = None  # of those that were asked for last

    def of(self, factors: Sequence[Factor]) -> torch.Tensor | Sequence[float]:
        """fp32, one element each; made by what compute enqueues now where it is not there yet. Empty for no factors."""
        if not factors:
            return ()
        if self._found is None or [id(f) for f in self._found[0]] != [id(f) for f in factors]:
            values = [factor.tensor.to(device=self._device, dtype=torch.float32) for factor in factors]
            self._found = (list(factors), torch.stack(values))
        return self._found[1]


class GradRecord:
    """One parameter's gradient: its place, and factors that were ordered but not multiplied in yet.

    Each factor is one rounded multiplication in the gradient's dtype, in order, as ``p.grad.mul_(factor)`` would do.
    """

    __slots__ = ("factors", "is_wire", "is_zero", "kept", "norms", "norms_ticket", "place", "ticket", "touched")

    def __init__(self) -> None:
        self.place = GradPlace.NONE
        self.factors: list[Factor] = []
        self.norms: dict[float, torch.Tensor] = {}
        self.norms_ticket: CopyTicket = LANDED  # what compute reads them behind
        self.ticket: CopyTicket = LANDED
        self.touched = False  # the user has seen or set it: it stays where it is
        self.is_wire = False  # what is stored is 16 bits wide and stands for the fp32 gradient that it equals
        self.is_zero = False  # cleared by filling it with zeros, and nothing was added since
        self.kept: torch.Tensor | None = None  # the gradient where its place is KEPT

    def forget_update(self) -> None:
        """Every update has ended: nothing is to be waited for any more."""
        if getattr(self.ticket, "is_update", False):
            self.ticket = LANDED

    def clear(self) -> None:
        self.place = GradPlace.NONE
        self.factors = []
        self.norms = {}
        self.touched = False
        self.is_wire = False
        self.is_zero = False


class BlockKeeper(Protocol):
    """Who decides where a block's pages are (``HostSpace``). Called under the residency lock."""

    num_walks: int  # of the engine's own over optimizer state, under way: they refer to it as a user would

    def grow(self, block: HostBlock, arena: PinnedArena) -> None: ...
    def shrink(self, block: HostBlock, arena: PinnedArena) -> None: ...
    def drop(self, block: HostBlock, used: Iterable[PinnedArena]) -> None: ...


class OtherCopy:
    """Parts on the device that hold what a segment on flash holds, for a read that fails meanwhile.

    ``fill`` runs in a lane's thread, ``end`` in one that holds the residency lock; neither waits for a disk.
    """

    def __init__(self, parts: Sequence[Part], download: Callable[[Pairs, str], CopyTicket]) -> None:
        self.parts = tuple(parts)
        self.read: Any = None  # the read that may need it
        self._download = download
        self._lock = threading.Lock()
        self._is_off = False
        for part in self.parts:
            part.serves.append(self)

    def is_over(self) -> bool:
        return self._is_off or (self.read is not None and self.read.done())

    def fill(self) -> None:
        """Copy what the device holds to the home."""
        with self._lock:
            if self._is_off:
                raise ResidencyError(f"{self.parts[0].name}: the device does not hold it any more.")
            for part in self.parts:
                part.home_read.wait()  # compute is ordered behind the upload, and this thread is not
                pairs, landing = part.download_pairs()
                self._download(pairs, f"home ({part.name})").wait()
                if landing is not None:
                    part.finish_download(landing)

    def end(self) -> None:
        """The device's memory goes."""
        with self._lock:
            self._is_off = True


class Segment:
    """One mapping of a block; one shard of the store where its home is flash."""

    __slots__ = ("arena", "is_on_flash", "name")

    def __init__(self, arena: PinnedArena, name: str) -> None:
        self.arena = arena
        self.name = name
        self.is_on_flash = False  # a write of it was ordered: it can be read back


class _StateTensor:
    """One tensor of optimizer state in a block, and how many refer to its memory as long as no user does."""

    __slots__ = ("num_owners", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.num_owners = storage_owners(tensor.untyped_storage())

    def num_refs(self) -> int:
        tensor = self.tensor
        return sys.getrefcount(tensor)

    def is_held(self, num_keepers: int) -> bool:
        """Whether anybody beside ``num_keepers`` known ones refers to the tensor, or to its memory by another one."""
        return (
            self.num_refs() > _OWN_TENSOR_REFS + num_keepers
            or storage_owners(self.tensor.untyped_storage()) > self.num_owners
        )


def most_refs(objects: Mapping[int, Any]) -> int:
    """The most references that any of the mapping's values has."""
    most = 0
    for each in list(objects.values()):
        most = max(most, sys.getrefcount(each))
    return most


# What an object has that nobody else refers to: it differs from one interpreter to the next.
_OWN_TENSOR_REFS = _StateTensor(torch.empty(1, device="cpu")).num_refs()
_OWN_ENTRY_REFS = most_refs({0: {}})


_LONGEST_WALK_S, _WALK_LOOK_S = 1.0, 1e-4


def _refs_in_entry(entry: dict[str, Any], name: str) -> tuple[int, int]:
    """References to one of an entry's tensors, and tensors on its memory."""
    return sys.getrefcount(entry[name]), storage_owners(entry[name].untyped_storage())


_OWN_REFS_IN_ENTRY = _refs_in_entry({"moment": torch.empty(1, device="cpu")}, "moment")


def _is_users(entry: dict[str, Any], name: str) -> bool:
    """Whether anybody but the entry refers to its tensor of that name, or to that tensor's memory."""
    num_refs, num_owners = _refs_in_entry(entry, name)
    return num_refs > _OWN_REFS_IN_ENTRY[0] or num_owners > _OWN_REFS_IN_ENTRY[1]


def _fits_slot(slot: ParamSlot, value: Any) -> bool:
    """Whether the state block has a place for such an entry of the slot's state."""
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.shape == slot.shape
        and value.stride() == slot.stride
        and not value.requires_grad
    )


class HostBlock:
    """A unit's host memory of one role. See [Note: host blocks]. ``HostSpace`` writes all but the layout."""

    def __init__(self, unit: UnitState, role: Role, home: Tier) -> None:
        self.unit = unit
        self.role = role
        self.home = home
        self.shard = f"{unit.index}/{unit.name}:{role.value}"
        self.segments: list[Segment] = []
        self.num_grown = 0
        # Where the home is flash; under the residency lock.
        self.is_resident = False  # its pages are there, or ordered to be
        self.is_dirty = False  # the pages hold what no ordered write has taken to flash
        self.is_shown = False  # a user may hold its tensors and have written to them
        self.stays = False  # flash did not give it back once, and another copy served: at home in DRAM for good
        self.charged_nbytes = 0
        self.read: Any = None  # what the pages' content comes with
        self.write: Any = None  # the last write to flash
        self.gone: Any = None  # gives the pages back
        self.moves: list[tuple[Tier, Any]] = []  # (to which tier, ticket) in order, those that have gone well left out
        self.uses: list[Any] = []  # updates and copies that read or write the pages
        self.num_step = -1  # of the last update that used it
        self.num_ordered = 0  # position of the last work on it among all that were ordered
        # Optimizer state: which mappings a slot's tensors lie in, tensors by (slot, name), and whose entries they are.
        self.allotted: dict[int, list[PinnedArena]] = {}
        self.allotted_nbytes: dict[int, int] = {}  # in all its mappings
        self.tensors: dict[tuple[int, str], _StateTensor] = {}
        self.entries: dict[int, dict[str, Any]] = {}

    @property
    def is_paged(self) -> bool:
        return self.home is Tier.NVME

    @property
    def nbytes(self) -> int:
        return sum(segment.arena.nbytes for segment in self.segments)

    @property
    def dram_nbytes(self) -> int:
        """What is used of it in DRAM now."""
        return self.charged_nbytes if self.is_paged else sum(s.arena.used_nbytes for s in self.segments)

    def allotted_arenas(self) -> list[PinnedArena]:
        """Of optimizer state: every mapping that some slot was allotted, once for each of these."""
        return [arena for arenas in self.allotted.values() for arena in arenas]

    def give_pages_back(self) -> None:
        with self._on_device():
            for segment in self.segments:
                segment.arena.unpin()
                segment.arena.give_pages_back()

    def lock_pages(self, segments: Iterable[Segment], *, is_fresh: bool) -> bool:
        """Page-lock segments whose pages are there; False where it was refused. From any thread."""
        with self._on_device():
            return all([segment.arena.pin(is_fresh=is_fresh) for segment in segments])

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        # In a thread that has never used CUDA a call of its runtime would set up the first device.
        device = self.unit.device
        return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()

    def take_pages(self) -> None:
        for segment in self.segments:
            segment.arena.take_pages()

    def take_state(self, slot: ParamSlot, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """A tensor of the slot's shape and strides in the block, content undefined; None where there is no room."""
        key = (slot.index, name)
        before = self.tensors.get(key)
        if before is not None:
            # Its entry was taken out or exchanged, else nobody would ask again.
            if before.tensor.dtype != dtype or before.is_held(0):
                return None
            return before.tensor
        for arena in self.allotted.get(slot.index, ()):
            try:
                memory = arena.take(slot.numel * dtype.itemsize)
            except CapacityError:
                continue
            tensor = memory.tensor(dtype, (slot.numel,)).as_strided(slot.shape, slot.stride)
            self.tensors[key] = _StateTensor(tensor)
            return tensor
        return self._take_over(key, dtype)

    def _take_over(self, key: tuple[int, str], dtype: torch.dtype) -> torch.Tensor | None:
        """What an optimizer of another class kept of the slot and nobody refers to; None where there is no such.

        None too for more than its class was known to keep: that stays in memory of its own.
        """
        for other, held in snapshot_items(self.tensors):
            if other[0] == key[0] and held.tensor.dtype == dtype and not held.is_held(0):
                self.tensors[key] = self.tensors.pop(other)
                return held.tensor
        return None

    def names_in(self, slot: ParamSlot, entry: Any) -> set[str]:
        """Names in a slot's entry whose tensors lie in the block. Then ``entries`` has the entry too."""
        if self.entries.get(slot.index) is not entry or entry is None:
            return set()
        held = {name: self.tensors.get((slot.index, name)) for name in entry}
        return {name for name, each in held.items() if each is not None and each.tensor is entry[name]}

    def is_in_use(self, entries: Mapping[ParamSlot, Any]) -> bool:
        """Whether anybody needs the state that the block holds, given what these slots' entries are now."""
        indices = {slot.index for slot in entries}
        return (
            not self.entries.keys() <= indices
            or any(self.names_in(slot, entry) for slot, entry in entries.items())
            or any(held.is_held(self.keepers_of(*key)) for key, held in snapshot_items(self.tensors))
        )

    def keepers_of(self, index: int, name: str) -> int:
        """How many of the block's entries refer to a tensor of it."""
        held = self.tensors[index, name].tensor
        return int(self.entries.get(index, {}).get(name) is held)

    def is_held(self) -> bool:
        """Whether user code refers to an entry of the state or to one of its tensors."""
        if most_refs(self.entries) > _OWN_ENTRY_REFS + 1:  # the optimizer's own mapping
            return True
        for (index, name), held in snapshot_items(self.tensors):
            keeps = self.entries.get(index, {}).get(name) is held.tensor
            if held.is_held(1 if keeps else 0):
                return True
        return False


def _set_all(changes: Iterable[tuple[Any, str, Any]]) -> None:
    """Assign (owner, name, value) all in one call of C, so that Ctrl-C finds either all done or nothing."""
    owners, names, values = zip(*changes, strict=True)
    collections.deque(map(setattr, owners, names, values), maxlen=0)


class Loan:
    """DRAM that an old part has from the activations' memory. It goes back when the part dies."""

    __slots__ = ("block", "ticket")

    def __init__(self) -> None:
        self.block: Block | None = None
        self.ticket: CopyTicket = LANDED  # the last upload out of it

    def end(self) -> None:
        if self.block is not None:
            self.ticket.wait()
            self.block.free()


class Part:
    """Some parameters of a unit in one form: one flat device storage, fetched and evicted as a whole."""

    def __init__(
        self,
        unit: UnitState,
        form: Form,
        dtype: torch.dtype,
        slots: list[ParamSlot],
        *,
        castable: bool,
        kind: str = "",
        copy: int = 0,
    ) -> None:
        self.unit = unit
        self.form = form
        self.dtype = dtype
        self.slots = slots
        self.castable = castable
        self.kind = kind  # of state: its key in ``optimizer.state[p]``
        self.num_home_owners = 0  # of state: what refers to its DRAM memory while no optimizer has any of it
        # Of state: the DRAM tensor that an optimizer got, by slot.
        self.given: dict[int, weakref.ref[torch.Tensor]] = {}
        self.device = unit.device
        self.offsets: list[int] = []  # of each slot, in elements from the start of the storage
        self.nbytes = self._lay_out()
        self.name = {
            Form.FULL: unit.name,
            Form.WIRE: f"{unit.name} ({str(dtype).removeprefix('torch.')})",
            Form.LOW: f"low halves of {unit.name}",
            Form.STATE: f"{kind} of {unit.name}",
            Form.OLD: f"old {str(dtype).removeprefix('torch.')} weights of {unit.name}",
        }[form]
        self.shard = f"{unit.index}/{unit.name}:{form.value}:{kind or dtype}:{castable}:{slots[0].index}:{copy}"
        self._num_own_refs = 0
        self._kept: dict[int, int] = {}  # tensors over the storage that the engine keeps: how often each refers to it
        if self.is_for_compute:
            self._new_storage()
        self.home_arena: PinnedArena | None = None
        self.home_flat: torch.Tensor | None = None  # None where the homes are split, or cast at each upload
        # residency; under the residency lock
        self.is_resident = False
        self.charge = [0]  # what is charged to the device budget, for who takes the part's death down
        self.is_handed_out = False
        self.num_leases = 0
        self.versions = [0] * len(slots)  # p._version when last known to be what the newest copy says
        self.upload: CopyTicket = LANDED
        self.download: CopyTicket = LANDED
        # The last upload, landed or not: landing orders compute behind it, and the host runs ahead of both. So who
        # writes the home on the host waits for it. See [Note: happens-before] in streams.py.
        self.home_read: CopyTicket = LANDED
        self.serves: list[OtherCopy] = []  # reads from flash that may fail
        self.saved: weakref.WeakSet[Any] = weakref.WeakSet()  # of a wire part: what autograd's graphs have of it
        self.loan: Loan | None = None  # of an old part: its home
        self.num_fetches = 0  # of state: how often it has come from DRAM

    @property
    def is_serving(self) -> bool:
        """Whether a read from flash, under way, may have to be served from what the device holds."""
        if self.serves:
            self.serves = [copy for copy in self.serves if not copy.is_over()]
        return bool(self.serves)

    @property
    def charged_nbytes(self) -> int:
        """Bytes of the device budget; 0 while tensors that the user holds keep the part here."""
        return self.charge[0]

    @charged_nbytes.setter
    def charged_nbytes(self, nbytes: int) -> None:
        self.charge[0] = nbytes

    def _new_storage(self) -> None:
        with torch._C._InferenceMode(False):
            self.flat = torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
        self.storage = self.flat.untyped_storage()
        self.key = self.storage._cdata

    def renew_storage(self) -> None:
        """Leave the storage to whoever made it unresizable and take a fresh, released one."""
        self._new_storage()
        if self.form is Form.FULL:
            for index, slot in enumerate(self.slots):
                if managed_slot(slot.param) is slot:  # else it was made ordinary already
                    set_raw_data(slot.param, self.device_view(index))
        self.seal()

    def _lay_out(self) -> int:
        alignment, offset_nbytes = align_nbytes(self.device), 0
        for slot in self.slots:
            offset_nbytes = round_up(offset_nbytes, max(alignment, self.dtype.itemsize))
            self.offsets.append(offset_nbytes // self.dtype.itemsize)
            offset_nbytes += _low_nbytes(slot.numel) if self.form is Form.LOW else slot.numel * self.dtype.itemsize
        return offset_nbytes

    def seal(self) -> None:
        """The storage has all the views that are the unit's own; from here on any other is an alias. Released."""
        self.release()
        self._num_own_refs = storage_owners(self.storage)
        self._kept.clear()

    def device_view(self, index: int) -> torch.Tensor:
        slot = self.slots[index]
        return self.flat.as_strided(slot.shape, slot.stride, self.offsets[index])

    def home_address(self, slot: ParamSlot) -> int:
        """Where the slot's tensor lies in DRAM."""
        assert self.home_flat is not None
        return self.home_flat.data_ptr() + self.offsets[self.slots.index(slot)] * self.dtype.itemsize

    def pin_home(self) -> None:
        """Page-lock what the part's copy in DRAM lies in; what is refused stays pageable, with a warning."""
        if self.home_arena is not None and self.device.type == "cuda":
            with torch.cuda.device(self.device):
                self.home_arena.pin(is_fresh=False)

    def home_view(self, slot: ParamSlot) -> torch.Tensor:
        """The slot's tensor in DRAM, with its shape and strides."""
        assert self.home_flat is not None
        return self.home_flat.as_strided(slot.shape, slot.stride, self.offsets[self.slots.index(slot)])

    def fresh_view(self, slot: ParamSlot) -> torch.Tensor:
        """The slot's tensor in this part as one that is no view for autograd (what a custom Function may return)."""
        offset = self.offsets[self.slots.index(slot)]
        # Nobody's modes see it made.
        with torch._C._InferenceMode(False), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            view = torch.empty(0, dtype=self.dtype, device=self.device)
            return view.set_(self.storage, offset, slot.shape, slot.stride)

    def num_aliases(self) -> int:
        """Tensors outside the unit that share the storage. See [Note: handed-out tensors]."""
        if not self.is_for_compute:
            return 0
        return storage_owners(self.storage) - self._num_own_refs - sum(self._kept.values())

    def keep(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor over the storage that the engine itself keeps: no alias until ``forget``, which must come."""
        before = storage_owners(self.storage)
        tensor = make()
        key, num_refs = id(tensor), storage_owners(self.storage) - before
        self._kept[key] = num_refs
        return tensor

    def forget(self, tensor: torch.Tensor) -> None:
        """It counts as an alias while it lives. Again, or where the storage was left to others since: nothing."""
        self._kept.pop(id(tensor), None)

    def materialise(self, *, poison: bool) -> None:
        with torch._C._InferenceMode(False):
            if self.is_for_compute:
                self.storage.resize_(self.nbytes)
            else:  # no view of it outlives a stay on the device
                self._new_storage()
                self._num_own_refs = storage_owners(self.storage)
            if poison:
                raw = torch.empty(0, dtype=torch.uint8, device=self.device)
                raw.set_(self.storage, 0, (self.nbytes,), (1,)).fill_(255)

    def give(self, slot: ParamSlot) -> torch.Tensor:
        """Of state: the slot's DRAM tensor, for an optimizer to keep."""
        tensor = self.home_view(slot)
        self.given[slot.index] = weakref.ref(tensor)
        return tensor

    def given_tensors(self) -> dict[int, torch.Tensor]:
        """Of state: those that optimizers got and that are alive, by slot."""
        return {index: tensor for index, ref in snapshot_items(self.given) if (tensor := ref()) is not None}

    def can_give(self, slot: ParamSlot) -> bool:
        """Of state: whether nothing refers to the slot's DRAM memory any more (its entry was taken out or replaced)."""
        given = self.given.get(slot.index)
        return given is None or (given() is None and self.num_home_aliases() == 0)

    def num_home_aliases(self) -> int:
        """Of state: tensors over its DRAM memory beside the ones that optimizers got."""
        assert self.home_flat is not None
        num_given = len(self.given_tensors())
        return storage_owners(self.home_flat.untyped_storage()) - self.num_home_owners - num_given

    def release(self) -> None:
        if self.is_for_compute:
            self.storage.resize_(0)
        else:
            del self.flat, self.storage

    @property
    def has_memory(self) -> bool:
        """Whether the device memory is there, whatever ``is_resident`` says after an interruption."""
        if not self.is_for_compute:
            return "storage" in self.__dict__
        return self.storage.nbytes() >= self.nbytes > 0

    @property
    def is_pinned(self) -> bool:
        """The plan keeps the part on the device: it leaves only where nothing else makes room."""
        choice = self.unit.choice
        return choice.update_on is UpdatePlace.DEVICE and choice.state_home is Tier.DEVICE

    @property
    def home_block(self) -> HostBlock:
        """The host memory that the part's copy in DRAM lies in."""
        return self.unit.state_block if self.form is Form.STATE else self.unit.param_block

    @property
    def is_for_compute(self) -> bool:
        return self.form in (Form.FULL, Form.WIRE, Form.OLD)

    def slot_at(self, offset: int) -> ParamSlot:
        """The slot that holds element ``offset`` of the storage."""
        return self.slots[max(0, bisect.bisect_right(self.offsets, offset) - 1)]

    # ------------------------------------------------------------------------------------------------- homes
    def take_home(self) -> None:
        """Map home memory of the part's layout, copy the parameters' values there, make them views of the device."""
        arena = self.unit.new_arena(self.nbytes, f"parameters of {self.unit.name}", self.unit.param_block)
        block = arena.take(self.nbytes)
        self.home_arena = arena
        self.home_flat = block.tensor(self.dtype, (self.nbytes // self.dtype.itemsize,))
        with torch._C._InferenceMode(False):
            torch._C._set_grad_enabled(False)
            self.home_flat.zero_()  # the padding travels too
            for index, slot in enumerate(self.slots):
                flat = block.tensor(slot.dtype, (slot.numel,), offset_nbytes=self.offsets[index] * self.dtype.itemsize)
                slot.home = flat.as_strided(slot.shape, slot.stride)
                slot.home.copy_(slot.param.detach())
                slot.part = self
                set_raw_data(slot.param, self.device_view(index))
        self.seal()

    def upload_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(device, DRAM) tensors whose copies make the part. May make the DRAM side first, where it is not kept."""
        if self.home_flat is not None:
            return [(self.flat, self.home_flat)]
        source = self._new_host_flat().zero_()  # the padding travels too
        for index, slot in enumerate(self.slots):
            source.as_strided(slot.shape, slot.stride, self.offsets[index]).copy_(self.unit.read_home(slot))
        return [(self.flat, source)]

    def download_pairs(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor | None]:
        """((DRAM, device) tensors, a DRAM tensor to hand to ``finish_download`` once the copy has landed, or None)."""
        if self.home_flat is not None:
            return [(self.home_flat, self.flat)], None
        landing = self._new_host_flat()
        return [(landing, self.flat)], landing

    def _new_host_flat(self) -> torch.Tensor:
        """Host memory of the part's layout, which copies may write wherever inference mode is on."""
        with torch._C._InferenceMode(False):
            return torch.empty(self.nbytes // self.dtype.itemsize, dtype=self.dtype, device="cpu")

    def finish_download(self, landing: torch.Tensor) -> None:
        for index, slot in enumerate(self.slots):
            self.unit.write_home(slot, landing.as_strided(slot.shape, slot.stride, self.offsets[index]))


def _split_layout(wire: Part, low: Part, index: int) -> tuple[int, int, int, int]:
    """Of castable slot ``index``: elements, where its high halves begin (in elements), its low halves, its tie bits."""
    numel, low_at = wire.slots[index].numel, low.offsets[index]
    return numel, wire.offsets[index], low_at, low_at + round_up(2 * numel, _GRAIN_NBYTES)


class UnitState:
    """One unit under an engine. Every field is read and written under the residency lock.

    Args:
        params: (name, parameter), in the model's order.
        place: called with (address, nbytes) of each mapping before its first touch: binds pages to NUMA nodes.
        castable: names of fp32 parameters that autocast may cast and that one module of a known class owns.
        choice: homes per role, where the update runs, what becomes of activations. The plan's line for this unit.
        keeper: told of every mapping before its first touch.
        root: the module whose forward is the unit's use; None where no single module stands for it.
    """

    def __init__(
        self,
        *,
        name: str,
        index: int,
        params: list[tuple[str, nn.Parameter]],
        castable: frozenset[str],
        device: torch.device,
        pin: bool,
        poison: bool,
        is_compiled: bool,
        place: Callable[[int, int], Any] | None = None,
        choice: Choice = CAUTIOUS,
        keeper: BlockKeeper,
        root: nn.Module | None = None,
    ) -> None:
        self.name = name
        self.index = index
        self.choice = choice
        self.param_block = HostBlock(self, Role.PARAM, choice.param_home)
        self.state_block = HostBlock(self, Role.STATE, choice.state_home)
        self.grad_block = HostBlock(self, Role.GRAD, choice.grad_home)
        self.blocks = (self.param_block, self.state_block, self.grad_block)
        self._keeper = keeper
        self.root = root
        self.device = device
        self._pin = pin
        self._poison = poison
        self._place = place
        self.is_compiled = is_compiled
        self._arenas: list[PinnedArena] = []
        self.num_watched = -1
        self.slots = [ParamSlot(name=n, param=p, index=i) for i, (n, p) in enumerate(params)]
        kinds: dict[tuple[torch.dtype, bool], list[ParamSlot]] = {}
        for slot in self.slots:
            slot.unit = self
            slot.castable = slot.name in castable
            kinds.setdefault((slot.dtype, slot.castable), []).append(slot)
        self.full_parts = [
            Part(self, Form.FULL, dtype, slots, castable=is_castable) for (dtype, is_castable), slots in kinds.items()
        ]
        self.nbytes = sum(part.nbytes for part in self.full_parts)
        self.wire: Part | None = None
        self.low: Part | None = None  # beside a bfloat16 wire part, whose home is the split masters' high half
        # Calls of it that have dropped their activations and wait for backward.
        self.folded: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_made = 0  # parts that came later
        # Weak: an old part lives as long as something that a graph has saved of it.
        self._old_parts: weakref.WeakValueDictionary[int, Part] = weakref.WeakValueDictionary()
        # By kind of state and slot: several slots share one, and a slot of several optimizers has several. Whoever
        # updates the unit makes them, in its thread; those that have ever been asked onto the device are listed.
        self.state_parts: dict[tuple[str, int], list[Part]] = {}
        self._state_nbytes_of: dict[int, int] = {}  # what optimizers will keep of each slot, by index
        self.device_state: list[Part] = []
        self.wire_state = WireState.WATCHING if any(p.castable for p in self.full_parts) else WireState.REFUSED
        self.is_wire_refused = False  # it was read otherwise, and so travels in full from the next step on
        self.has_casts = False  # stand-ins for autocast's casts are alive
        self.has_old_casts = False  # some of them, or of those that were not kept, are of weights that have changed
        self.num_windows = 0
        self.window_threads: dict[int, int] = {}  # thread to how many of the open windows are its own
        self.open_parts: list[Part] | None = None  # what the outermost open window leased
        self.is_closed = False  # the parameters are ordinary again
        self.is_spanning = False  # in use while others are
        self.update: Any = None  # ticket of the last ordered update: home, state and use of the gradient; or None
        self.home_update: Any = None  # ticket of what of it writes the home
        # gradients
        self.grads = [GradRecord() for _ in self.slots]
        self.has_accumulated = False  # gradients were added up
        self._host_grads: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._grad_arenas: dict[tuple[int, torch.dtype], PinnedArena] = {}
        self.born: list[ParamSlot] = []  # gradients that autograd has finished but that have not left yet
        self.grad_nbytes = 0
        self.max_grad_nbytes = 0
        self.refresh_trainable()

    @property
    def parts(self) -> list[Part]:
        """What holds parameters."""
        return self.full_parts if self.wire is None else [*self.full_parts, self.wire]

    @property
    def is_paged(self) -> bool:
        """Whether anything of the unit is at home on flash."""
        return any(block.is_paged for block in self.blocks)

    @property
    def all_parts(self) -> list[Part]:
        """Those, and what only updates need."""
        low = () if self.low is None else (self.low,)
        return [*self.parts, *low, *self.device_state, *list(self._old_parts.values())]

    @property
    def home_parts(self) -> list[Part]:
        """What has a share in the parameters' homes."""
        return self.parts if self.low is None else [*self.parts, self.low]

    def parts_for(self, wire_dtype: torch.dtype | None) -> list[Part]:
        """What compute needs: the wire part in place of its full one where ``wire_dtype`` is what it holds."""
        if self.wire is None or self.wire_state is not WireState.READY or self.wire.dtype != wire_dtype:
            return self.full_parts
        return [self.wire if part.castable else part for part in self.full_parts]

    def refresh_trainable(self) -> None:
        """Take down what needs a gradient now; called when the unit opens for a pass with gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            sizes_nbytes = [slot.nbytes for slot in self.slots if slot.param.requires_grad]
        self.grad_nbytes = sum(sizes_nbytes)
        self.max_grad_nbytes = max(sizes_nbytes, default=0)

    def new_state(self, slot: ParamSlot, kind: str) -> torch.Tensor:
        """The DRAM tensor, fp32, of the slot's shape and strides, for one kind of optimizer state. Undefined at first.

        One mapping for all of the unit's tensors of that kind: huge pages, and touched first by who fills it.
        """
        if (state := self.state_block.take_state(slot, kind, torch.float32)) is not None:
            return state
        parts = self.state_parts.setdefault((kind, slot.index), [])
        part = next((part for part in parts if part.can_give(slot)), None)
        if part is None:
            slots = [slot] if parts else [
                s for s in self.slots
                if s is slot
                or (s.param.requires_grad and s.dtype == slot.dtype and (kind, s.index) not in self.state_parts)
            ]  # fmt: skip
            part = Part(self, Form.STATE, torch.float32, slots, castable=False, kind=kind, copy=len(parts))
            arena = PinnedArena(round_up(part.nbytes, _GRAIN_NBYTES), pin=False, label=part.name, place=self._place)
            part.home_flat = arena.take(part.nbytes).tensor(torch.float32, (part.nbytes // 4,))
            part.num_home_owners = storage_owners(part.home_flat.untyped_storage())
            part.home_arena = arena
            for s in slots:
                self.state_parts.setdefault((kind, s.index), []).append(part)
        return part.give(slot)

    def find_state(self, slot: ParamSlot, kind: str, tensor: torch.Tensor) -> Part | None:
        """The part whose DRAM tensor ``tensor`` is."""
        if tensor.dtype != torch.float32 or tensor.shape != slot.shape or tensor.stride() != slot.stride:
            return None
        for part in self.state_parts.get((kind, slot.index), ()):
            # By address: a view would be an operation, and give the interpreter's lock to whoever waits for it.
            if tensor.data_ptr() == part.home_address(slot):
                part.given[slot.index] = weakref.ref(tensor)  # another one, where somebody put a view in its place
                return part
        return None

    def allot_state(self, nbytes_of: dict[int, int]) -> None:
        """Map what the optimizer will keep of these slots (by index), where the home of the state is flash.

        Where it is not, that is remembered until it is.
        """
        self._state_nbytes_of.update(nbytes_of)
        have_nbytes = self.state_block.allotted_nbytes
        wanted = {  # one that was allotted something may get more: another optimizer keeps more of it
            i: nbytes - have_nbytes.get(i, 0)
            for i, nbytes in self._state_nbytes_of.items()
            if i not in have_nbytes or nbytes > have_nbytes[i]
        }
        if not self.state_block.is_paged or not any(wanted.values()):
            return
        # Untouched, so it takes no memory yet.
        arena = PinnedArena(
            sum(wanted.values()), pin=False, label=f"state of {self.name}", poison=self._poison, place=self._place
        )
        self._keeper.grow(self.state_block, arena)
        for i, nbytes in wanted.items():
            self.state_block.allotted.setdefault(i, []).append(arena)
            have_nbytes[i] = have_nbytes.get(i, 0) + nbytes

    def hold_state(self, slot: ParamSlot, entry: Any) -> None:
        """Move dense tensors of an optimizer's entry into the state block, where there is one. Called by the update.

        One that somebody else refers to stays where he has it until he lets go. See [Note: looked-at state].
        """
        block = self.state_block
        if slot.index not in block.allotted or not isinstance(entry, dict):
            return
        if block.entries.get(slot.index) is not entry:
            block.entries.pop(slot.index, None)  # exchanged (a load): what it held may be used again
        for name in list(entry):
            held = block.tensors.get((slot.index, name))
            if held is not None and held.tensor is entry[name]:
                block.entries[slot.index] = entry
            elif _fits_slot(slot, entry[name]) and not self._is_users(entry, name):
                target = block.take_state(slot, name, entry[name].dtype)
                if target is not None:
                    entry[name] = target.copy_(entry[name])
                    block.entries[slot.index] = entry

    def _is_users(self, entry: dict[str, Any], name: str) -> bool:
        """Asked once more when the engine itself, in another thread, has stopped looking at state."""
        deadline_s = time.monotonic() + _LONGEST_WALK_S
        while _is_users(entry, name):
            if not self._keeper.num_walks or time.monotonic() > deadline_s:
                return _is_users(entry, name)
            time.sleep(_WALK_LOOK_S)
        return False

    def loose_state(self, slot: ParamSlot, entry: Any) -> dict[str, bool]:
        """Names of an entry's tensors that ``hold_state`` has not moved, and whether that is because of a user."""
        block = self.state_block
        if slot.index not in block.allotted or not isinstance(entry, dict):
            return {}
        in_block = block.names_in(slot, entry)
        return {
            name: _is_users(entry, name)
            for name in list(entry)
            if name not in in_block and _fits_slot(slot, entry[name])
        }

    def lose_state(self) -> None:
        """Flash did not give the state back: no number is better than a wrong one."""
        block = self.state_block
        for (index, name), held in block.tensors.items():
            entry = block.entries.get(index)
            if entry is not None and entry.get(name) is held.tensor:
                entry[name] = torch.full(held.tensor.shape, float("nan"), dtype=held.tensor.dtype, device="cpu")

    def has_host_grads(self) -> bool:
        return any(record.place is GradPlace.HOST for record in self.grads)

    def running_dram_nbytes(self, *, are_grads_narrow: bool = False) -> int:
        """Host bytes of homes and gradients, state apart, once every gradient has been down.

        ``are_grads_narrow``: those that may come in 16 bits are taken to come so.
        """
        held_nbytes = self.dram_nbytes() - self.state_block.dram_nbytes - self._mapped_grads_nbytes()
        if are_grads_narrow and self.low is None:  # weights will be split masters, which have a bit more each
            castable = [slot for slot in self.slots if slot.castable]
            held_nbytes += sum(
                round_up(num_tie_bytes(slot.numel), _GRAIN_NBYTES) + 2 * _GRAIN_NBYTES for slot in castable
            )
        return held_nbytes + sum(self._grads_nbytes(are_grads_narrow))

    def _grads_nbytes(self, are_grads_narrow: bool) -> Iterator[int]:
        mapped: dict[int, int] = {}
        for (index, _), grad in self._host_grads.items():
            mapped[index] = mapped.get(index, 0) + grad.nbytes
        for slot in self.slots:
            itemsize = 2 if are_grads_narrow and slot.castable else slot.dtype.itemsize
            wanted_nbytes = round_up(slot.numel * itemsize, _GRAIN_NBYTES) if slot.param.requires_grad else 0
            yield max(wanted_nbytes, mapped.get(slot.index, 0))

    @staticmethod
    def laid_out_nbytes(params: list[tuple[str, nn.Parameter]], castable: frozenset[str], device: torch.device) -> int:
        """Device bytes of a unit with these parameters in full, padding included."""
        by_kind: dict[tuple[torch.dtype, bool], int] = {}
        for name, p in params:
            kind = (p.dtype, name in castable)
            start_nbytes = round_up(by_kind.get(kind, 0), max(align_nbytes(device), p.itemsize))
            by_kind[kind] = start_nbytes + p.numel() * p.itemsize
        return sum(by_kind.values())

    # ------------------------------------------------------------------------------------------------- homes
    def new_arena(self, nbytes: int, label: str, block: HostBlock) -> PinnedArena:
        arena = PinnedArena(
            nbytes, pin=self._pin and not block.is_paged, label=label, poison=self._poison, place=self._place
        )
        self._keeper.grow(block, arena)
        self._arenas.append(arena)
        return arena

    def _close_arena(self, arena: PinnedArena, block: HostBlock) -> None:
        self._keeper.shrink(block, arena)
        self._arenas.remove(arena)
        arena.close()  # an update under way may still use it: the mapping lives as long as a tensor on it does

    def drop_strays(self) -> None:
        """Close mappings that Ctrl-C kept from what they were made for, or from their end.

        Under the residency lock; every work has ended.
        """
        for key in [key for key in self._grad_arenas if key not in self._host_grads]:
            del self._grad_arenas[key]
        homes = [part.home_arena for part in self.all_parts if part.home_arena is not None]
        states = self.state_block.allotted_arenas()
        grads = list(self._grad_arenas.values())
        for block, used in ((self.param_block, homes), (self.state_block, states), (self.grad_block, grads)):
            self._keeper.drop(block, used)
        kept = {id(arena) for arena in [*homes, *grads]}
        strays = [arena for arena in self._arenas if id(arena) not in kept]
        self._arenas = [segment.arena for block in (self.param_block, self.grad_block) for segment in block.segments]
        for arena in strays:
            arena.close()

    def take_homes(self) -> None:
        for part in self.full_parts:
            part.take_home()

    def read_home(self, slot: ParamSlot) -> torch.Tensor:
        """The home's value: the home tensor itself, or for a split master a fresh fp32 tensor.

        The caller has settled the home (no update pending, no dirty device copy).
        """
        if slot.split is None:
            return slot.home
        result = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device="cpu")
        merge_f32(slot.split.hi_u16, slot.split.lo_u16, slot.split.ties_u8, flat_numpy(result))
        return result

    def write_home(self, slot: ParamSlot, values: torch.Tensor) -> None:
        """Overwrite the home. ``values`` may have any dtype that ``copy_`` converts."""
        if slot.split is None:
            slot.home.copy_(values)
            return
        dense = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device="cpu").copy_(values)
        split_f32(flat_numpy(dense), slot.split.hi_u16, slot.split.lo_u16, slot.split.ties_u8)

    def home_address(self, slot: ParamSlot) -> int:
        return slot.home.data_ptr() if slot.split is None else int(slot.split.hi_u16.ctypes.data)

    @property
    def castable_part(self) -> Part:
        """The castable weights in full."""
        return next(part for part in self.full_parts if part.castable)

    def _make_part(self, form: Form, dtype: torch.dtype, slots: list[ParamSlot], *, castable: bool) -> Part:
        """One that comes later. Its name is its own: an earlier one may not have died yet that Ctrl-C kept from use."""
        self._num_made += 1
        return Part(self, form, dtype, slots, castable=castable, copy=self._num_made)

    def make_wire(self, dtype: torch.dtype) -> Part:
        """A wire part of the castable weights. Their home stays as it is; what is uploaded is cast from it.

        The caller lists it before it becomes ``wire``.
        """
        wire = self._make_part(Form.WIRE, dtype, self.castable_part.slots, castable=True)
        wire.seal()
        return wire

    def wire_home(self, slot: ParamSlot) -> torch.Tensor:
        """What the slot's tensor of the wire part is copied from; the caller has settled the home."""
        wire = self.wire
        assert wire is not None
        return wire.home_view(slot) if wire.home_flat is not None else self.read_home(slot)

    def make_old(self, slots: list[ParamSlot], lend: Callable[[int], Block | None]) -> Part | None:
        """A part for the bits of the wire part of now; None where DRAM has no room for them. ``fill_old`` follows."""
        wire = self.wire
        assert wire is not None
        old = self._make_part(Form.OLD, wire.dtype, slots, castable=False)
        loan = old.loan = Loan()
        weakref.finalize(old, loan.end).atexit = False
        loan.block = block = lend(old.nbytes)
        if block is None:
            return None
        old.home_flat = block.tensor(old.dtype, (old.nbytes // old.dtype.itemsize,))
        old.seal()
        return old

    def fill_old(self, old: Part) -> None:
        """The caller has settled the home."""
        assert old.home_flat is not None
        old.home_flat.zero_()  # the padding travels too
        for slot in old.slots:
            old.home_view(slot).copy_(self.wire_home(slot))
        self._old_parts[id(old)] = old

    def make_low(self) -> Part:
        """The part for ``split_home``."""
        return self._make_part(Form.LOW, torch.uint8, self.castable_part.slots, castable=True)

    def split_home(self, low: Part) -> None:
        """Make a settled home the split master, whose high half is the home of the bf16 wire part, the low one of this.

        Not for fp16: 16 more bits would not give the fp32 weight back.
        """
        full, wire = self.castable_part, self.wire
        assert wire is not None
        assert wire.dtype == torch.bfloat16
        arena = self.new_arena(
            round_up(wire.nbytes, _GRAIN_NBYTES) + round_up(low.nbytes, _GRAIN_NBYTES),
            f"split masters of {self.name}",
            self.param_block,
        )
        high_block, low_block = arena.take(wire.nbytes), arena.take(low.nbytes)
        high_flat = high_block.tensor(wire.dtype, (wire.nbytes // 2,))
        low_flat = low_block.tensor(torch.uint8, (low.nbytes,))
        high_flat.zero_()
        changes: list[tuple[Any, str, Any]] = [
            (wire, "home_arena", arena), (wire, "home_flat", high_flat), (low, "home_arena", arena),
            (low, "home_flat", low_flat), (full, "home_arena", None), (full, "home_flat", None), (self, "low", low),
        ]  # fmt: skip
        for index, slot in enumerate(full.slots):
            split = self._split_views(wire, low, index, high_flat, low_flat)
            split_f32(flat_numpy(slot.home), split.hi_u16, split.lo_u16, split.ties_u8)
            # An optimizer's clone is a view of the old home, which it would keep mapped.
            changes += (slot, "split", split), (slot, "home", None), (slot, "host_param", None)
        old_arena = full.home_arena
        _set_all(changes)
        if old_arena is not None:
            self._close_arena(old_arena, self.param_block)

    def split_views(self, index: int, wire_flat: torch.Tensor, low_flat: torch.Tensor) -> SplitMaster:
        """The split master of the castable slot ``index`` in host tensors with the layout of the wire and low parts."""
        wire, low = self.wire, self.low
        assert wire is not None
        assert low is not None
        return self._split_views(wire, low, index, wire_flat, low_flat)

    @staticmethod
    def _split_views(wire: Part, low: Part, index: int, wire_flat: torch.Tensor, low_flat: torch.Tensor) -> SplitMaster:
        numel, high_at, low_at, ties_at = _split_layout(wire, low, index)
        return SplitMaster(
            flat_numpy(wire_flat)[high_at : high_at + numel],
            low_flat.numpy()[low_at : low_at + 2 * numel].view("uint16"),
            low_flat.numpy()[ties_at : ties_at + num_tie_bytes(numel)],
        )

    def split_tensors(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(high halves, low halves, tie bits) of the castable slot ``index`` on the device; int16, int16, uint8."""
        wire, low = self.wire, self.low
        assert wire is not None
        assert low is not None
        numel, high_at, low_at, ties_at = _split_layout(wire, low, index)
        return (
            wire.flat[high_at : high_at + numel].view(torch.int16),
            low.flat[low_at : low_at + 2 * numel].view(torch.int16),
            low.flat[ties_at : ties_at + num_tie_bytes(numel)],
        )

    def split_offsets(self, slot: ParamSlot) -> tuple[int, int, int]:
        """Bytes at which the slot's high halves begin in the wire part, and low halves and tie bits in the low part."""
        wire, low = self.wire, self.low
        assert wire is not None
        assert low is not None
        _, high_at, low_at, ties_at = _split_layout(wire, low, wire.slots.index(slot))
        return high_at * wire.dtype.itemsize, low_at, ties_at

    # ------------------------------------------------------------------------------------------------- gradients
    def host_grad(self, slot: ParamSlot, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The slot's DRAM gradient in ``dtype`` (the parameter's own by default), mapped when first asked for."""
        dtype = dtype or slot.dtype
        if dtype != slot.dtype and (slot.index, slot.dtype) in self._host_grads:
            if self.has_accumulated:
                return self._narrow_view(slot, dtype)
            self._drop_wide_grads(slot)
        grad = self._host_grads.get((slot.index, dtype))
        if grad is None:
            # One mapping for all gradients of the kind: page-rounding and page-locking are per mapping.
            missing = self._missing_grads(slot, dtype)
            arena = self.new_arena(
                sum(round_up(s.numel * dtype.itemsize, _GRAIN_NBYTES) for s in missing),
                f"gradients of {self.name}",
                self.grad_block,
            )
            grads = {}
            for s in missing:
                flat = arena.take(s.numel * dtype.itemsize).tensor(dtype, (s.numel,))
                grads[s.index, dtype] = flat.as_strided(s.shape, s.stride)
            self._grad_arenas.update(dict.fromkeys(grads, arena))  # first: ``drop_strays`` asks both
            self._host_grads.update(grads)
            grad = self._host_grads[slot.index, dtype]
        return grad

    def _missing_grads(self, slot: ParamSlot, dtype: torch.dtype) -> list[ParamSlot]:
        return [
            s for s in self.slots
            if (s.index, dtype) not in self._host_grads and s.dtype == slot.dtype
            and (s is slot or (s.param.requires_grad and s.castable == slot.castable))
        ]  # fmt: skip

    def missing_grads_nbytes(self) -> list[int]:
        """Bytes of each mapping that comes with the first gradients of trainable parameters that have had none yet."""
        have = {index for index, _ in self._host_grads}
        nbytes_of: dict[tuple[torch.dtype, bool], int] = {}
        for slot in self.slots:
            if slot.param.requires_grad and slot.index not in have:
                kind = (slot.dtype, slot.castable)
                nbytes_of[kind] = nbytes_of.get(kind, 0) + round_up(slot.numel * slot.dtype.itemsize, _GRAIN_NBYTES)
        return list(nbytes_of.values())

    def more_for_wide_grad_nbytes(self, slot: ParamSlot) -> int:
        """What ``running_dram_nbytes`` grows by when the slot's gradient, expected in 16 bits, comes in full width."""
        if (slot.index, slot.dtype) in self._host_grads:
            return 0
        missing = self._missing_grads(slot, slot.dtype)
        wide_nbytes = sum(round_up(s.numel * s.dtype.itemsize, _GRAIN_NBYTES) for s in missing)
        unmapped_nbytes = sum(self._grads_nbytes(True)) - self._mapped_grads_nbytes()
        return wide_nbytes - unmapped_nbytes

    def _mapped_grads_nbytes(self) -> int:
        return sum(grad.nbytes for grad in self._host_grads.values())

    def _narrow_view(self, slot: ParamSlot, dtype: torch.dtype) -> torch.Tensor:
        """Where sums come in full width, the 16-bit gradient of a first micro-batch stands at their block's beginning.

        The narrow block from before the first sum goes, once nothing is in it.
        """
        record, key = self.grads[slot.index], (slot.index, dtype)
        if key in self._host_grads:
            if record.place is GradPlace.HOST and record.is_wire:
                return self._host_grads[key]
            del self._host_grads[key]
            arena = self._grad_arenas.pop(key)
            if arena not in self._grad_arenas.values():
                self._close_arena(arena, self.grad_block)
        wide = self._host_grads[slot.index, slot.dtype]
        flat = flat_view(wide).view(dtype)
        return flat.as_strided(slot.shape, slot.stride, wide.storage_offset() * slot.dtype.itemsize // dtype.itemsize)

    def _drop_wide_grads(self, slot: ParamSlot) -> None:
        """Gradients travel in 16 bits from now on: give back the memory of those that came before in full width."""
        arena = self._grad_arenas[slot.index, slot.dtype]
        inside = [key for key, other in self._grad_arenas.items() if other is arena]
        if any(self.grads[i].place is GradPlace.HOST and not self.grads[i].is_wire for i, _ in inside):
            return  # an accumulation window that began in full width
        for key in inside:
            del self._grad_arenas[key], self._host_grads[key]
        self._close_arena(arena, self.grad_block)

    def dram_nbytes(self) -> int:
        """Bytes of host memory mapped for the unit's homes and gradients (pages are touched as they are used).

        Of what is at home on flash, what is in DRAM now.
        """
        return sum(block.dram_nbytes for block in self.blocks)

    def close(self) -> None:
        """Give the host memory back once nothing refers to it."""
        self.is_closed = True
        self._host_grads.clear()
        self._grad_arenas.clear()
        self.state_parts.clear()
        self.device_state.clear()
        for slot in self.slots:
            slot.split = None
        for arena in [*self._arenas, *self.state_block.allotted_arenas()]:
            arena.close()
        for block in self.blocks:
            block.tensors.clear()
            block.entries.clear()
