"""Floor 5. What is in DRAM of the blocks whose home is flash: reads ahead, writes behind, evictions, the budget.

DRAM is to flash what the device is to DRAM: room for copies, kept by the predicted order of uses. Units tell this of
their blocks ([Note: host blocks] in unit_state.py); ``DeviceSpace``, ``Gradients`` and ``Updates`` ask for one before
they touch it. Also the one place that decides which blocks are at home on flash (``assign_homes``).

[Note: ordered, not waited for] Nothing here waits for a disk unless its bytes are needed by the calling thread now. An
update of a unit is ordered as tickets: evictions that make its room, reads behind them, the update behind those, writes
behind the update. Every ticket waits only for tickets that were ordered before it, so no two can wait for each other,
whatever the budget is. A unit's blocks get their room together, in one step, under the residency lock; works hold room
and never ask for any. What the table says of a block is what holds behind those tickets.

[Note: locked while they are there] Memory that comes and goes can be page-locked only while its pages are there: a copy
of the device from pageable memory takes eight times as long and holds the host up. So what the device copies
(parameters, gradients; not state) is registered once a stay, by the thread that ends its read, and unregistered when it
leaves: 0.03 s a GiB against half a second or more for the read.

[Note: room] A block that leaves gives its room to those that come when it is ordered to leave, and its bytes behind the
ticket that gives the pages back. So whoever takes that room comes behind that ticket: pages that are really there are
never more than the budget.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_tieroffload.concepts import READ, WRITE, Role, Ticket, Tier
from lightning_tieroffload.engine.unit_state import HostBlock, OtherCopy, Segment, UnitState
from lightning_tieroffload.errors import CapacityError, InfeasiblePlanError, TierIOError
from lightning_tieroffload.io.extent_store import ExtentStore
from lightning_tieroffload.io.nvme_mover import NvmeMover
from lightning_tieroffload.io.scheduler import LaneSpec, Scheduler
from lightning_tieroffload.memory.arena import PinnedArena
from lightning_tieroffload.planning.cost_model import Choice
from lightning_tieroffload.residency import Ledger, ResidencyTable
from lightning_tieroffload.sizes import format_nbytes

__all__ = ["PAGES_LANE", "HostNeed", "HostSpace", "assign_homes", "least_room_nbytes"]

_log = logging.getLogger(__name__)

PAGES_LANE = LaneSpec(name="pages")  # gives pages back and takes them again, behind the works that use them
_WANTED_UNITS = 3  # units in flight between flash and DRAM: one is read, one updated, one written
_FAR = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNeed:
    """Host bytes of one unit by role, rounded as the engine maps them, and its line of the plan so far."""

    name: str
    param_nbytes: int
    state_nbytes: int
    grad_nbytes: int
    choice: Choice
    stays: frozenset[Role] = frozenset()  # what is in DRAM for good: flash did not give it back once
    grad_spare_nbytes: int = 0  # what gradients take more while some come in another width than before
    is_whole: bool = False  # an optimizer reads the parameters and gradients of all such units at one time

    def nbytes_on(self, tier: Tier) -> int:
        """Host bytes on ``tier``, DRAM or NVME. What is at home on the device has its place in DRAM all the same."""
        choice = self.choice
        is_flash = tier is Tier.NVME
        return (
            ((choice.param_home is Tier.NVME) is is_flash) * self.param_nbytes
            + ((choice.state_home is Tier.NVME) is is_flash) * self.state_nbytes
            + ((choice.grad_home is Tier.NVME) is is_flash) * (self.grad_nbytes + is_flash * self.grad_spare_nbytes)
        )


def assign_homes(needs: Sequence[HostNeed], budget_nbytes: int, *, fixed_nbytes: int = 0) -> list[Choice]:
    """Homes for every unit such that DRAM holds what is at home there, and the units in flight of what is not.

    Only as much goes to flash as must: optimizer state first, as it is used once a step; then parameters; gradients
    last. Of each, the units that run last in forward come first. Updates run in the order of the next forward, so what
    the last ones wait for has all of that forward to come; and their parameters are used by forward and backward in one
    go. What is on flash already stays there.

    Args:
        needs: in the order of the forward pass.
        fixed_nbytes: DRAM that is taken by what has no choice.

    Raises:
        InfeasiblePlanError: not even with everything on flash.
    """
    needs = list(needs)

    def in_flight_nbytes() -> int:
        return least_room_nbytes(needs)

    def at_home_nbytes() -> int:
        return fixed_nbytes + sum(need.nbytes_on(Tier.DRAM) for need in needs)

    for role in (Role.STATE, Role.PARAM, Role.GRAD):
        for index in reversed(range(len(needs))):
            if at_home_nbytes() + _WANTED_UNITS * in_flight_nbytes() <= budget_nbytes:
                return [need.choice for need in needs]
            if role in needs[index].stays:
                continue
            choice = _with_home(needs[index].choice, role, Tier.NVME)
            needs[index] = dataclasses.replace(needs[index], choice=choice)
    least_nbytes = at_home_nbytes() + in_flight_nbytes()
    if least_nbytes > budget_nbytes:
        largest = max(needs, key=lambda need: need.nbytes_on(Tier.NVME))
        who = "an optimizer that steps over all parameters at once" if largest.is_whole else f"unit {largest.name}"
        raise InfeasiblePlanError(
            f"dram_budget is {format_nbytes(budget_nbytes)} ({budget_nbytes} bytes), but with everything at home on "
            f"flash {who} still needs {format_nbytes(in_flight_nbytes())} of DRAM at one time (parameters, gradients "
            f"and optimizer state){_beside(fixed_nbytes)}. The smallest dram_budget that works is {least_nbytes} "
            f"bytes.",
            tier="dram",
            least_budget_nbytes=least_nbytes,
        )
    return [need.choice for need in needs]


def least_room_nbytes(needs: Iterable[HostNeed]) -> int:
    """DRAM that must be there at one time for what is at home on flash."""
    needs = list(needs)
    whole_nbytes = sum(need.nbytes_on(Tier.NVME) for need in needs if need.is_whole)
    return max([whole_nbytes, *(need.nbytes_on(Tier.NVME) for need in needs)])


def _with_home(choice: Choice, role: Role, home: Tier) -> Choice:
    if role is Role.PARAM:
        return dataclasses.replace(choice, param_home=home)
    if role is Role.STATE:
        return dataclasses.replace(choice, state_home=home)
    return dataclasses.replace(choice, grad_home=home)


def _beside(fixed_nbytes: int) -> str:
    return f", beside {format_nbytes(fixed_nbytes)} of what cannot leave" if fixed_nbytes else ""


class _Leaving:
    """An eviction under way, and how much of its room nobody has taken yet. See [Note: room]."""

    __slots__ = ("left_nbytes", "ticket")

    def __init__(self, ticket: Any, nbytes: int) -> None:
        self.ticket = ticket
        self.left_nbytes = nbytes


class HostSpace:
    """The blocks of every unit of a device space. Called under the residency lock; workers never call it.

    Without ``open_flash`` every block is at home in DRAM, and nothing here does anything.

    Args:
        next_uses: unit index to its position among the coming uses, as predicted.
        next_updates: unit index to its position among the updates of the coming step, as predicted.
        add_stall: told of seconds that the calling thread waited, and for what.
        moved_nbytes: where bytes are counted.
    """

    def __init__(
        self,
        table: ResidencyTable,
        ledger: Ledger,
        *,
        next_uses: Callable[[], dict[int, int]],
        next_updates: Callable[[], dict[int, int]],
        add_stall: Callable[[str, float, str], None],
        moved_nbytes: dict[str, int],
        no_overlap: bool,
    ) -> None:
        self._table = table
        self._account = ledger[Tier.DRAM]
        self._next_uses = next_uses
        self._next_updates = next_updates
        self._add_stall = add_stall
        self._moved_nbytes = moved_nbytes
        self._no_overlap = no_overlap
        self._scheduler: Scheduler
        self._mover: NvmeMover
        self.store: ExtentStore | None = None
        self.room_nbytes = 0  # for blocks whose home is flash
        self.pass_nbytes = 0  # of it, what one unit's passes need at one time
        self.forward_nbytes = 0  # and its forward alone
        self.least_nbytes = 0  # of it, what must be there at one time
        # Who else holds what a segment on flash holds. Asked before it is read.
        self.find_copy: Callable[[HostBlock, Segment], OtherCopy | None] = lambda block, segment: None
        self.used_nbytes = 0  # of it
        self.beside_nbytes = 0  # what DRAM holds beside it, when somebody last looked
        self.num_walks = 0  # see ``BlockKeeper``
        self.peak_nbytes = 0  # of both together
        self._paged: list[HostBlock] = []
        self._shown: list[HostBlock] = []
        self._leaving: collections.deque[_Leaving] = collections.deque()
        self._leases: list[HostBlock] = []
        self._num_step = 0
        self._num_ordered = 0
        self._reserved: dict[str, int] = {}  # space on flash of gradients that have not come yet
        self.locks_pages = False  # there is a device whose copies want page-locked memory
        self.is_stuck = False  # flash does not answer: what is under way counts as lost, and nobody waits for it

    # ------------------------------------------------------------------------------------------------- life
    def open_flash(self, scheduler: Scheduler, store: ExtentStore, mover: NvmeMover) -> None:
        """From now on blocks may be at home on flash."""
        self._scheduler, self.store, self._mover = scheduler, store, mover

    def home_nbytes(self) -> int:
        """Bytes of what is at home on flash."""
        return sum(block.nbytes for block in self._paged)

    def add(self, unit: UnitState) -> None:
        """Blocks of a new unit, before anything is mapped for them."""
        for block in unit.blocks:
            if block.is_paged:
                self._list(block, Tier.NVME)

    def _list(self, block: HostBlock, valid_on: Tier) -> None:
        self._table.add(block.shard, Tier.NVME, valid_on=[valid_on])
        self._paged.append(block)

    def reserve(self, block: HostBlock, nbytes: int) -> None:
        """Set space on flash aside for what the block will hold, so that a full disk shows now."""
        if self.store is not None and block.is_paged and nbytes and block.shard not in self._reserved:
            self.store.allocate(f"{block.shard}:reserved", nbytes)
            self._reserved[block.shard] = nbytes

    def remove(self, unit: UnitState) -> None:
        """Forget a unit's blocks; their memory is the caller's again."""
        for block in unit.blocks:
            if not block.is_paged:
                continue
            for ticket in self._pending(block):
                try:
                    self._wait(ticket, "write")
                except Exception as error:  # whoever closes has seen the first one
                    _log.debug("%s: %s", block.shard, error)
            self._unlist(block)
            self._table.remove(block.shard)
            if self.store is not None and not self.store.closed:
                if self._reserved.pop(block.shard, 0):
                    self.store.free(f"{block.shard}:reserved")
                for segment in block.segments:
                    self._forget(segment)

    def _unlist(self, block: HostBlock) -> None:
        self._uncharge(block, block.charged_nbytes)
        for blocks in (self._paged, self._shown, self._leases):
            while block in blocks:
                blocks.remove(block)

    def let_go(self, block: HostBlock) -> None:
        """Bring the block in for good: its memory is the user's from now on, whatever the budget is."""
        if block.is_paged:
            self.bring_in_for_user(block)
            self._unlist(block)

    def _forget(self, segment: Segment) -> None:
        if self.store is not None and segment.name in self.store and not self.is_stuck:
            self._mover.forget(segment.name)

    def rehome(self, unit: UnitState, choice: Choice) -> None:
        """Follow a new line of the plan. What leaves DRAM is written out; what stays there now is brought in."""
        for block, home in zip(unit.blocks, (choice.param_home, choice.state_home, choice.grad_home), strict=True):
            if home is not block.home and Tier.NVME in (home, block.home):
                (self._to_flash if home is Tier.NVME else self.hold)(block)
        unit.choice = choice

    def _to_flash(self, block: HostBlock) -> None:
        assert self.store is not None
        for segment in block.segments:
            self.store.allocate(segment.name, segment.arena.nbytes)
        block.home = Tier.NVME
        if not block.segments:
            self._list(block, Tier.NVME)  # nothing is there yet, as in a new unit
            return
        self._list(block, Tier.DRAM)
        block.is_resident = block.is_dirty = True
        self._wait_all(self._claim(block.nbytes, [block], block.shard), "write")
        self.beside_nbytes = max(0, self.beside_nbytes - block.nbytes)  # where it was until now
        self._charge(block, block.nbytes)
        self.write_behind(block)

    def hold(self, block: HostBlock) -> None:
        """Bring the block in and keep it in DRAM from now on, outside the room of those that come and go."""
        self.bring_in(block, to_write=True)
        self.room_nbytes -= block.nbytes
        self._unlist(block)
        self.beside_nbytes += block.nbytes
        self._table.remove(block.shard)
        for segment in block.segments:
            self._forget(segment)
            segment.is_on_flash = False
        block.home, block.is_dirty, block.is_resident, block.is_shown = Tier.DRAM, False, False, False
        block.read = block.write = block.gone = None
        block.unit.choice = _with_home(block.unit.choice, block.role, Tier.DRAM)

    def hold_served(self, *, may_wait: bool = True) -> None:
        """Blocks that flash did not give back, and another copy did, are at home in DRAM from now on, if there is room.

        Without ``may_wait`` those alone that are there and not under way.
        """
        served = self._mover.served_elsewhere if self.store is not None else {}
        for block in [block for block in self._paged if served and not block.stays]:
            if not any(segment.name in served for segment in block.segments) or self._is_dead(block):
                continue
            if not may_wait and (not block.is_resident or self._pending(block)):
                continue
            block.stays = True
            if self.room_nbytes - block.nbytes < self.least_nbytes:
                _log.warning(
                    "%s is not held in DRAM, though flash did not give it back: dram_budget (%s) has no room for %s "
                    "more. Check the disk, or raise dram_budget.",
                    block.shard,
                    format_nbytes(self._account.budget_nbytes),
                    format_nbytes(block.nbytes),
                )
                continue
            self.hold(block)
            _log.warning("%s is held in DRAM from now on, since flash did not give it back.", block.shard)

    # ------------------------------------------------------------------------------------------------- mappings
    def grow(self, block: HostBlock, arena: PinnedArena) -> None:
        """A mapping is about to be used for the block, whose other ones it may hold already."""
        segment = Segment(arena, f"{block.shard}:{block.num_grown}")
        block.num_grown += 1
        if not block.is_paged:
            block.segments.append(segment)
            return
        assert self.store is not None
        if self._reserved.pop(block.shard, 0):
            self.store.free(f"{block.shard}:reserved")
        self.store.allocate(segment.name, arena.nbytes)
        if block.role is Role.STATE and not block.is_resident:
            block.segments.append(segment)  # filled by the first update, which asks for the room
            return
        self.bring_in(block, to_write=True)
        self._wait_all(self._claim(arena.nbytes, [block], block.shard), "write")
        self._charge(block, arena.nbytes)
        block.segments.append(segment)
        self._lock(block, [segment])
        self.note_written(block)

    def shrink(self, block: HostBlock, arena: PinnedArena) -> None:
        """A mapping of the block is about to be closed."""
        segment = next(each for each in block.segments if each.arena is arena)
        if block.is_paged:
            self.bring_in(block, to_write=True)
        block.segments.remove(segment)  # before it leaves the store, wherever Ctrl-C strikes: what is listed is written
        if block.is_paged:
            self._forget(segment)
            self._uncharge(block, arena.nbytes)

    def drop(self, block: HostBlock, used: Iterable[PinnedArena]) -> None:
        """Every work has ended, and of the block's mappings only these are used: the others go, and their extents."""
        if self.is_stuck:
            return
        kept = {id(arena) for arena in used}
        for segment in [each for each in block.segments if id(each.arena) not in kept]:
            block.segments.remove(segment)
            if block.is_paged:
                self._uncharge(block, segment.arena.nbytes)
            segment.arena.close()
        if self.store is None:
            return
        listed = {segment.name for segment in block.segments}
        for name in (f"{block.shard}:{index}" for index in range(block.num_grown)):
            if name not in listed and name in self.store:
                self._mover.forget(name)
        if block.shard not in self._reserved and f"{block.shard}:reserved" in self.store:
            self.store.free(f"{block.shard}:reserved")

    # ------------------------------------------------------------------------------------------------- room
    def _charge(self, block: HostBlock, nbytes: int) -> None:
        block.charged_nbytes += nbytes
        self.used_nbytes += nbytes
        self._note_peak()

    def _note_peak(self) -> None:
        self.peak_nbytes = max(self.peak_nbytes, self.used_nbytes + self.beside_nbytes)

    def note_beside(self, nbytes: int) -> None:
        """What DRAM holds now beside the blocks that come and go."""
        self.beside_nbytes = nbytes
        self._note_peak()

    def _uncharge(self, block: HostBlock, nbytes: int) -> None:
        nbytes = min(nbytes, block.charged_nbytes)
        block.charged_nbytes -= nbytes
        self.used_nbytes -= nbytes

    @staticmethod
    def _pending(block: HostBlock) -> list[Any]:
        """What still uses the block's pages, the read that fills them included."""
        block.uses = [ticket for ticket in block.uses if not ticket.done()]
        return [*block.uses, *(t for t in (block.read, block.write) if t is not None and not t.done())]

    def _distance(self, block: HostBlock) -> int:
        """How far the block's next use is. Parameters are used by passes, the rest by the updates that follow them."""
        if block.role is Role.PARAM:
            return self._next_uses().get(block.unit.index, _FAR // 8)
        position = self._next_updates().get(block.unit.index, _FAR // 8)
        return position + (_FAR if block.num_step == self._num_step else _FAR // 2)

    def _victims(self, keep: Sequence[HostBlock], *, only_idle: bool = False, beyond: int = -1) -> list[HostBlock]:
        found: list[tuple[tuple[int, int], int, HostBlock]] = []
        for order, block in enumerate(self._paged):
            if not block.is_resident or not block.charged_nbytes or block in keep or block in self._leases:
                continue
            if block.is_shown:
                continue
            distance = self._distance(block)
            if distance <= beyond:
                continue
            if self._pending(block):
                if only_idle:
                    continue
                # The one that ends first; parameters, which the next pass wants, last.
                rank = (3, -distance) if block.role is Role.PARAM else (2, block.num_ordered)
            elif self._is_dead(block):
                rank = (0, 0)
            elif block.is_dirty:
                if only_idle:
                    continue
                rank = (4, -distance)
            else:
                rank = (1, -distance)
            found.append((rank, order, block))
        return [block for _, _, block in sorted(found, key=lambda item: item[:2])]

    @staticmethod
    def _is_dead(block: HostBlock) -> bool:
        return block.role is Role.GRAD and not block.unit.has_host_grads()

    def _claim(self, nbytes: int, keep: Sequence[HostBlock], what: str, *, spare_nbytes: int = 0) -> list[Ticket]:
        """Make room; what comes into it must come behind the tickets. To be charged at once.

        ``spare_nbytes`` of the room are left to others, where something can leave for them.
        """
        if nbytes <= 0:
            return []
        self._reclaim_shown(keep)
        if self.room_nbytes - self.used_nbytes < nbytes + spare_nbytes:
            for victim in self._victims(keep):
                self._evict(victim)
                if self.room_nbytes - self.used_nbytes >= nbytes + spare_nbytes:
                    break
        for block in self._shown:  # tensors that user code holds: those bytes are the user's
            if self.room_nbytes - self.used_nbytes >= nbytes:
                break
            self._uncharge(block, block.charged_nbytes)
        if self.room_nbytes - self.used_nbytes < nbytes:
            held = sorted({b.shard for b in self._paged if b.charged_nbytes and b not in keep})
            raise CapacityError(
                f"{what} needs {format_nbytes(nbytes)} of DRAM, {format_nbytes(self.room_nbytes - self.used_nbytes)} "
                f"is free of the {format_nbytes(self.room_nbytes)} that dram_budget "
                f"({format_nbytes(self._account.budget_nbytes)}) leaves for what is at home on flash; in use at the "
                f"same time: {', '.join(held) or 'other mappings of the same unit'}. Raise dram_budget."
            )
        return self._behind(nbytes, min(spare_nbytes, self.room_nbytes - self.used_nbytes - nbytes))

    def give_room(self, nbytes: int) -> bool:
        """Leave so much of the room to others for good. False where what must be there at one time needs it."""
        if self.room_nbytes - nbytes < self.least_nbytes:
            return False
        for ticket in self._claim(nbytes, (), "what waits for backward"):
            ticket.wait()
        self.room_nbytes -= nbytes
        return True

    def _behind(self, nbytes: int, spare_nbytes: int = 0) -> list[Ticket]:
        """Evictions under way whose room ``nbytes`` more bytes take, beside ``spare_nbytes``. See [Note: room]."""
        while self._leaving and self._leaving[0].ticket.done():
            self._leaving.popleft()
        pending_nbytes = sum(each.left_nbytes for each in self._leaving if not each.ticket.done())
        short_nbytes = nbytes - (self.room_nbytes - spare_nbytes - self.used_nbytes - pending_nbytes)
        behind: list[Ticket] = []
        for each in self._leaving:
            if short_nbytes <= 0:
                break
            if each.ticket.done() or not each.left_nbytes:
                continue
            taken_nbytes = min(each.left_nbytes, short_nbytes)
            each.left_nbytes -= taken_nbytes
            short_nbytes -= taken_nbytes
            behind.append(each.ticket)
        return behind

    def _evict(self, block: HostBlock) -> None:
        """Order that the block leaves DRAM, behind its write and whatever uses its pages."""
        if self._is_dead(block):
            self._discard(block)
        else:
            self.write_behind(block)
        pending = self._pending(block)

        def leaves(gone: Any) -> None:
            # Before it can run, and all or nothing: where it cannot be ordered, the block stays.
            self._note_write_ended(block, is_ordered=True)
            self._table.drop(block.shard, Tier.DRAM)
            nbytes = block.charged_nbytes
            block.is_resident, block.gone, block.read, block.uses = False, gone, None, []
            self._uncharge(block, nbytes)
            if gone is not None:
                self._note_move(block, Tier.NVME, gone)
                self._leaving.append(_Leaving(gone, nbytes))

        if pending:
            label = f"evict {block.shard}"
            self._scheduler.submit(PAGES_LANE.name, block.give_pages_back, label=label, after=pending, announce=leaves)
        else:
            leaves(None)
            block.give_pages_back()

    @staticmethod
    def _note_move(block: HostBlock, to: Tier, ticket: Any) -> None:
        block.moves = [(t, each) for t, each in block.moves if not each.done() or each.error is not None]
        block.moves.append((to, ticket))

    def _discard(self, block: HostBlock) -> None:
        """Nobody will ask for what the block holds."""
        block.is_dirty = False
        for segment in block.segments:
            segment.is_on_flash = False
        self._relist(block, Tier.NVME)

    def drop_content(self, block: HostBlock) -> None:
        """Nobody needs what flash has of the block: it is not read again, and what comes into its pages is new."""
        if block.is_paged and not block.is_resident and any(segment.is_on_flash for segment in block.segments):
            self._discard(block)

    # ------------------------------------------------------------------------------------------------- reads
    def _start(
        self,
        block: HostBlock,
        behind: Sequence[Ticket],
        *,
        priority: int = 0,
        urgent: bool = False,
        is_users: bool = False,
    ) -> None:
        """Order that the block's newest bytes come into its pages, behind ``behind``."""
        if self._is_dead(block):
            self._discard(block)
        block.read = _Failed()  # until it is ordered: Ctrl-C may strike anywhere
        self._charge(block, 0 if is_users else block.nbytes)
        block.is_resident = True
        behind = [ticket for ticket in behind if not ticket.done()]
        if block.gone is not None and not block.gone.done():
            behind.append(block.gone)
        on_flash = [segment for segment in block.segments if segment.is_on_flash]
        fresh = [segment for segment in block.segments if not segment.is_on_flash]

        def take_pages() -> None:
            block.take_pages()
            self._lock(block, fresh)

        opened: list[Any] = []
        if behind:
            label = f"make room for {block.shard}"
            opened.append(self._scheduler.submit(PAGES_LANE.name, take_pages, label=label, after=behind))
        else:
            take_pages()
        if on_flash:
            self._table.begin(block.shard, READ)
            try:
                reads = []
                for segment in on_flash:
                    copy = self.find_copy(block, segment)
                    reads.append(
                        self._mover.read(
                            segment.name,
                            segment.arena.memory(),
                            priority=priority,
                            urgent=urgent,
                            after=opened,
                            otherwise=None if copy is None else copy.fill,
                        )
                    )
                    if copy is not None:
                        copy.read = reads[-1]
                block.read = self._scheduler.when_all(
                    reads, label=f"read {block.shard}", finish=lambda: self._lock(block, on_flash, is_fresh=False)
                )
                self._note_move(block, Tier.DRAM, block.read)
            except BaseException:
                self._table.failed(block.shard, READ)
                raise
            # Whoever uses the pages comes behind the ticket.
            self._table.landed(block.shard, READ)
            nbytes = sum(segment.arena.nbytes for segment in on_flash)
            self._moved_nbytes["read"] += nbytes
            if self._no_overlap:
                self._wait(block.read, "read")
        else:
            block.read = opened[0] if opened else None
            if block.read is not None:
                self._note_move(block, Tier.DRAM, block.read)
            self._table.wrote(block.shard, Tier.DRAM)
            block.is_dirty = True

    def _lock(self, block: HostBlock, segments: Iterable[Segment], *, is_fresh: bool = True) -> None:
        """Page-lock what the device will copy, from any thread. See [Note: locked while they are there]."""
        if self.locks_pages and block.role is not Role.STATE and not block.lock_pages(segments, is_fresh=is_fresh):
            self.locks_pages = False  # refused once, the rest stays pageable: no thread sets it back

    def bring_in(self, block: HostBlock, *, to_write: bool = False) -> None:
        """The block's newest bytes are in DRAM, readable by this thread now; with ``to_write`` writable as well.

        Updates and copies that use the block are the caller's to wait for.
        """
        if not block.is_paged:
            return
        if not block.is_resident:
            self._start(block, self._claim(block.nbytes, [block], block.shard), urgent=True)
        if block.read is not None:
            self._wait(block.read, "read")
            block.read = None
        if to_write and block.write is not None:
            self._wait(block.write, "write")
            self._note_write_ended(block)

    def open_unread(self, block: HostBlock, *, may_wait: bool) -> bool:
        """Take pages for a block whose bytes the caller has, and fills in at once. False where it would have to wait.

        What it fills in must be what flash holds.
        """
        is_going = block.gone is not None and not block.gone.done()
        if may_wait:
            self._wait_all(self._claim(block.nbytes, [block], block.shard), "write")
            if is_going:
                self._wait(block.gone, "write")
        else:
            leaving_nbytes = sum(each.left_nbytes for each in self._leaving if not each.ticket.done())
            if is_going or self.room_nbytes - self.used_nbytes - leaving_nbytes < block.nbytes:
                return False
        self._table.begin(block.shard, READ)
        block.read = _Failed()
        self._charge(block, block.nbytes)
        block.is_resident = True
        block.take_pages()
        self._lock(block, block.segments)
        self._table.landed(block.shard, READ)
        block.read = None
        return True

    def is_ready(self, block: HostBlock) -> bool:
        """Whether ``bring_in`` would not wait."""
        return not block.is_paged or (block.is_resident and (block.read is None or block.read.done()))

    @staticmethod
    def is_lost(block: HostBlock) -> bool:
        """Whether ``bring_in`` has failed, so that what the block held cannot be had."""
        return block.is_paged and bool(block.segments) and not (block.is_resident and block.read is None)

    def read_ahead(self, blocks: Iterable[HostBlock]) -> None:
        """Start reading blocks that are used soon, nearest first, while there is room that nobody needs sooner."""
        for block in blocks:
            if not block.is_paged or block.is_resident or not block.segments:
                continue
            nbytes = block.nbytes
            if self.room_nbytes - self.used_nbytes < nbytes:
                for victim in self._victims([block], only_idle=True, beyond=self._distance(block)):
                    self._evict(victim)
                    if self.room_nbytes - self.used_nbytes >= nbytes:
                        break
            if self.room_nbytes - self.used_nbytes < nbytes:
                return
            self._start(block, self._behind(nbytes), priority=self._distance(block))

    def read_states_ahead(self, units: Iterable[UnitState]) -> None:
        """Start reading the state that the coming step updates first, while backward leaves the disk alone.

        Only into room that neither this pass nor state that is needed sooner wants.
        """
        for unit in units:
            block = unit.state_block
            if not block.is_paged or block.is_resident or not any(segment.is_on_flash for segment in block.segments):
                continue
            nbytes = block.nbytes
            if self.room_nbytes - self.used_nbytes - self.pass_nbytes < nbytes:
                distance = self._distance(block)
                for victim in self._victims([block], only_idle=True, beyond=distance):
                    if victim.role is Role.STATE:
                        self._evict(victim)
                        if self.room_nbytes - self.used_nbytes - self.pass_nbytes >= nbytes:
                            break
            if self.room_nbytes - self.used_nbytes - self.pass_nbytes < nbytes:
                return
            self._start(block, self._behind(nbytes), priority=self._distance(block))

    def lease(self, blocks: Iterable[HostBlock]) -> list[HostBlock]:
        """Bring blocks in together and keep them until ``end_lease``. CapacityError where they do not fit."""
        leased = [block for block in blocks if block.is_paged]
        self._leases.extend(leased)
        try:
            for block in leased:
                self.bring_in(block, to_write=True)
        except BaseException:
            self.end_lease(leased)
            raise
        return leased

    @contextlib.contextmanager
    def staying(self, block: HostBlock) -> Iterator[None]:
        """Meanwhile the block does not leave, if it is there."""
        self._leases.append(block)
        try:
            yield
        finally:
            self.end_lease([block])

    def end_lease(self, blocks: Iterable[HostBlock]) -> None:
        for block in blocks:
            if block in self._leases:  # ``reset`` ends all
                self._leases.remove(block)

    # ------------------------------------------------------------------------------------------------- writes
    def note_use(self, block: HostBlock, ticket: Any) -> None:
        """A copy or an update uses the pages until the ticket is complete."""
        if block.is_paged:
            block.uses = [each for each in block.uses if not each.done()]
            block.uses.append(ticket)

    def note_written(self, block: HostBlock) -> None:
        """The pages were written to, or will be by something that was noted as a use. ``write_behind`` must follow."""
        if block.is_paged:
            self._table.wrote(block.shard, Tier.DRAM)
            block.is_dirty = True

    def write_behind(self, block: HostBlock) -> None:
        """Order a write of what is newer in DRAM, behind what is still being done to the pages."""
        if not block.is_paged or not block.is_dirty or block.is_shown or not block.is_resident:
            return
        if self._is_dead(block):
            return
        self._note_write_ended(block, is_ordered=True)
        behind = [ticket for ticket in self._pending(block) if ticket is not block.write]
        self._table.begin(block.shard, WRITE)
        try:
            writes = [
                self._mover.write(segment.name, segment.arena.memory(), after=behind) for segment in block.segments
            ]
            block.write = self._scheduler.when_all(writes, label=f"write {block.shard}")
        except BaseException:
            self._table.failed(block.shard, WRITE)
            raise
        block.is_dirty = False
        self._num_ordered += 1
        block.num_ordered = self._num_ordered
        for segment in block.segments:
            segment.is_on_flash = True
        self._moved_nbytes["write"] += block.nbytes
        if self._no_overlap:
            self._wait(block.write, "write")

    def _note_write_ended(self, block: HostBlock, *, is_ordered: bool = False) -> None:
        """Tell the table of a write that is complete, or that every later reader is ordered behind."""
        ticket = block.write
        if ticket is None or not (is_ordered or ticket.done()):
            return
        if WRITE in self._table.in_flight(block.shard):
            self._table.landed(block.shard, WRITE)
        if ticket.done():
            block.write = None

    # ------------------------------------------------------------------------------------------------- updates
    def begin_step(self) -> None:
        """An optimizer is about to order its updates."""
        self._num_step += 1

    def order_update(self, unit: UnitState, priority: int) -> list[Ticket]:
        """Order that all that an update of the unit needs is in DRAM together. It must run after the tickets."""
        self._reclaim_shown()
        blocks = [block for block in unit.blocks if block.is_paged and block.segments]
        missing = [block for block in blocks if not block.is_resident]
        nbytes = sum(block.nbytes for block in missing)
        # The next forward must not wait behind all updates for room for its first parameters.
        spare_nbytes = max(0, min(self.forward_nbytes, self.room_nbytes - sum(block.nbytes for block in blocks)))
        behind = self._claim(nbytes, blocks, f"the update of {unit.name}", spare_nbytes=spare_nbytes) if missing else []
        for block in missing:
            self._start(block, behind, priority=priority)
        tickets = [ticket for block in blocks for ticket in (block.read, block.write) if ticket is not None]
        return [ticket for ticket in tickets if not ticket.done()]

    def update_ordered(self, unit: UnitState, ticket: Ticket) -> None:
        """The update has its ticket, and may run from now on: what it uses and writes is listed."""
        for block in unit.blocks:
            if not block.is_paged or not block.segments:
                continue
            self.note_use(block, ticket)
            block.num_step = self._num_step
            self._num_ordered += 1
            block.num_ordered = self._num_ordered
            if block.role is not Role.GRAD:
                self.note_written(block)

    def write_updated(self, unit: UnitState) -> None:
        """Order that what the update writes goes to flash behind it."""
        self.write_behind(unit.param_block)
        self.write_behind(unit.state_block)

    # ------------------------------------------------------------------------------------------------- users
    def show(self, block: HostBlock) -> None:
        """User code is about to see the block's tensors: it comes in, and stays while anything refers to them.

        It counts as written to. Where the budget has no room for it, its bytes are the user's.
        """
        if not block.is_paged or not block.segments:
            return
        self.bring_in_for_user(block)
        if not block.is_shown:
            block.is_shown = True
            self._shown.append(block)

    def bring_in_for_user(self, block: HostBlock) -> None:
        """``bring_in`` to be written, beyond the budget where it has no room: those bytes are the user's."""
        if block.is_paged and not block.is_resident:
            try:
                behind = self._claim(block.nbytes, [block], block.shard)
            except CapacityError:
                self._start(block, [], urgent=True, is_users=True)
            else:
                self._start(block, behind, urgent=True)
        self.bring_in(block, to_write=True)

    def _reclaim_shown(self, keep: Sequence[HostBlock] = ()) -> None:
        """What user code has let go of is like any other block again."""
        for block in list(self._shown):
            if block in keep or block in self._leases or self._pending(block) or block.is_held():
                continue
            self._shown.remove(block)
            block.is_shown = False
            self.note_written(block)
            if block.charged_nbytes < block.nbytes:
                self._evict(block)  # it came in as the user's memory, beyond the room
            else:
                self.write_behind(block)

    # ------------------------------------------------------------------------------------------------- faults
    def reset(self) -> None:
        """Every work has ended, some badly: what each block holds is what really happened to it."""
        if self.is_stuck:  # not every one, so what is under way stays lost
            return
        for block in self._paged:
            failed = next((to for to, ticket in block.moves if ticket.done() and ticket.error is not None), None)
            if failed is Tier.NVME:
                # Its pages never left, so they hold the newest bytes, whatever was ordered after.
                block.take_pages()
                block.is_resident = block.is_dirty = True
                self._relist(block, Tier.DRAM)
            elif failed is Tier.DRAM or isinstance(block.read, _Failed):
                # Its bytes never came, so nothing has written to them.
                block.is_resident = block.is_dirty = False
                block.give_pages_back()
                self._relist(block, Tier.NVME)
                for segment in block.segments if block.role is Role.STATE and not block.tensors else ():
                    segment.is_on_flash = False  # its first write was ordered, and there was nothing to write
            elif block.write is not None and block.write.done() and block.write.error is not None:
                block.is_dirty = True
                self._relist(block, Tier.DRAM)
            else:
                self._note_write_ended(block)
            block.moves = []
            block.read = block.write = block.gone = None
            block.uses = []
            if not block.is_shown or block.charged_nbytes:
                block.charged_nbytes = block.nbytes if block.is_resident else 0
        self.used_nbytes = sum(block.charged_nbytes for block in self._paged)
        self._leaving.clear()
        self._leases.clear()

    def _relist(self, block: HostBlock, valid_on: Tier) -> None:
        self._table.remove(block.shard)
        self._table.add(block.shard, Tier.NVME, valid_on=[valid_on])

    def _wait(self, ticket: Any, kind: str) -> None:
        if ticket.done():
            ticket.wait()
            return
        if kind == "read":
            self._scheduler.expedite(ticket)
        start_s = time.perf_counter()
        ticket.wait(0.0 if self.is_stuck else None)
        self._add_stall(kind, time.perf_counter() - start_s, getattr(ticket, "label", ""))

    def _wait_all(self, tickets: Iterable[Any], kind: str) -> None:
        for ticket in tickets:
            self._wait(ticket, kind)


class _Failed:
    """Stands for a read that was not ordered, or not to the end."""

    error = TierIOError("a read from flash was given up before it was ordered. Call engine.reset() to go on.")

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        raise self.error
