"""Floor 3. One step in order: what runs and moves when, how long each shard lies idle, and which lanes are booked.

Three pure views: ``jobs_of_steps`` (every computation and transfer of a placement with what it waits for: the
simulator's input), ``lifetimes`` (when each shard is used, and how long it is not) and ``BandwidthTimeline`` (a step
cut into slices with each lane's free seconds, that the greedy planner books).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_tieroffload.concepts import Role, Tier
from lightning_tieroffload.planning.cost_model import ActivationChoice, Choice, Instance, UpdatePlace

__all__ = ["BandwidthTimeline", "Job", "Lane", "Lifetime", "jobs_of_steps", "lifetimes"]


class Lane(enum.Enum):
    """Where a job runs; each lane does one job at a time, the ready one with the lowest priority number."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    READ = "read"
    WRITE = "write"
    CPU_UPDATE = "cpu_update"
    DEVICE_UPDATE = "device_update"


@dataclass(frozen=True, slots=True)
class Job:
    """One computation or transfer. ``seconds`` is how long it takes alone; ``needs`` are indices of earlier jobs.

    ``host_nbytes`` is its DRAM traffic. ``takes`` and ``gives`` name a bounded kind of staging that the job occupies
    from its start, or frees at its end: the back-pressure of the real scheduler. ``step`` counts from 0.
    """

    name: str
    lane: Lane
    seconds: float
    needs: tuple[int, ...]
    priority: int
    step: int
    host_nbytes: float = 0.0
    takes: str = ""
    gives: str = ""


@dataclass(frozen=True, slots=True)
class Lifetime:
    """One shard in one step. Seconds count from the start of the first forward on the compute-only timeline."""

    unit: str
    role: Role
    nbytes: int
    first_use_s: float
    last_use_s: float
    num_uses: int
    idle_s: float
    """The longest time in a row that nothing needs it (for weights and state: across the step's end)."""


def lifetimes(instance: Instance) -> tuple[Lifetime, ...]:
    """When each shard is used in a step that waits for nothing. State is used at the step's end, in its update."""
    units, num_micro = instance.units, instance.num_micro_batches
    forward = np.array([u.forward_s for u in units])
    backward = np.array([u.backward_s for u in units])
    total_f, total_b = float(forward.sum()), float(backward.sum())
    step_s = num_micro * (total_f + total_b)
    starts_f = np.concatenate([[0.0], np.cumsum(forward)])
    ends_b = total_f + total_b - np.concatenate([[0.0], np.cumsum(backward)])
    found = []
    for i, unit in enumerate(units):
        up = float(ends_b[i + 1]) - float(starts_f[i + 1])  # end of forward i to start of backward i
        down = total_f + total_b - float(ends_b[i]) + float(starts_f[i])  # end of backward i to the next forward i
        last = step_s - (total_f + total_b) + float(ends_b[i])
        first = float(starts_f[i])
        found.append(
            Lifetime(unit.name, Role.PARAM, unit.param_nbytes, first, last, 2 * num_micro, max(up, down)),
        )
        if unit.activation_nbytes:
            found.append(
                Lifetime(unit.name, Role.ACTIVATION, unit.activation_nbytes, first, first + up, 2 * num_micro, up)
            )
        if unit.trained_numel:
            idle = down if num_micro == 1 else max(up + float(forward[i]), down)
            found.append(
                Lifetime(unit.name, Role.GRAD, unit.grad_nbytes, last - unit.backward_s, last, num_micro, idle)
            )
            found.append(Lifetime(unit.name, Role.STATE, unit.state_nbytes, last, last, 1, step_s))
    return tuple(found)


class BandwidthTimeline:
    """Free seconds of every lane over one step, in equal slices. Booking is first come, first served.

    Not thread-safe; a planner owns it for one solve.
    """

    def __init__(self, step_s: float, num_slices: int = 256) -> None:
        self.step_s = step_s
        self.slice_s = step_s / num_slices if step_s > 0 else 1.0
        self._free: dict[str, npt.NDArray[np.float64]] = {}
        self._num_slices = num_slices
        self._late_s: dict[str, float] = {}

    def _lane(self, lane: str) -> npt.NDArray[np.float64]:
        return self._free.setdefault(lane, np.full(self._num_slices, self.slice_s))

    def quote(self, lane: str, start_s: float, end_s: float, seconds: float) -> float:
        """Seconds from ``start_s`` until ``seconds`` of work are done in the lane, given what is booked.

        The window is ``start_s`` to ``end_s``, modulo the step if it wraps; work that the window has no room for is
        added at its end, behind all other such work of the lane.
        """
        return self._place(lane, start_s, end_s, seconds, book=False)

    def book(self, lane: str, start_s: float, end_s: float, seconds: float) -> float:
        """As ``quote``, and the lane's time is taken."""
        return self._place(lane, start_s, end_s, seconds, book=True)

    def busy_frac(self, lane: str) -> float:
        """Share of the step that the lane is booked, above 1 when work did not fit its windows."""
        if lane not in self._free:
            return 0.0
        booked = self.slice_s * self._num_slices - float(self._free[lane].sum()) + self._late_s.get(lane, 0.0)
        return booked / (self.slice_s * self._num_slices)

    def _place(self, lane: str, start_s: float, end_s: float, seconds: float, *, book: bool) -> float:
        if seconds <= 0:
            return 0.0
        free = self._lane(lane)
        first = int(start_s / self.slice_s)
        count = max(0, min(self._num_slices, int(end_s / self.slice_s) - first))
        slots = np.arange(first, first + count) % self._num_slices
        room = np.cumsum(free[slots])
        inside = int(np.searchsorted(room, seconds, side="left"))
        if inside < count:
            if book:
                left = seconds - (float(room[inside - 1]) if inside else 0.0)
                free[slots[:inside]] = 0.0
                free[slots[inside]] -= left
            return (inside + 1) * self.slice_s
        late = seconds - (float(room[-1]) if count else 0.0)
        queued = self._late_s.get(lane, 0.0) + late
        if book:
            free[slots] = 0.0
            self._late_s[lane] = queued
        return count * self.slice_s + queued


def jobs_of_steps(
    instance: Instance, choices: Sequence[Choice], prefetch_units: int, num_steps: int
) -> tuple[tuple[Job, ...], tuple[int, ...]]:
    """Every job of ``num_steps`` steps, and the index of each step's last backward.

    A fetch may start once its unit is among the ``prefetch_units`` next ones; two activations, two gradients and two
    updates' state may be on their way through the device at a time. Transfers are prioritised by their next use.
    """
    return _Jobs(instance, choices, prefetch_units).build(num_steps)


class _Jobs:
    def __init__(self, instance: Instance, choices: Sequence[Choice], prefetch_units: int) -> None:
        self.instance, self.choices, self.prefetch = instance, choices, prefetch_units
        self.machine, self.units, self.n = instance.machine, instance.units, len(instance.units)
        self.num_micro = instance.num_micro_batches
        self.jobs: list[Job] = []
        self.uses: list[int] = []  # compute jobs in order
        self.param_ready: dict[int, int] = {}  # unit -> job after which its new values may be fetched or used
        self.grad_done: dict[int, int] = {}
        self.state_done: dict[int, int] = {}
        self.moments_done: dict[int, int] = {}  # unit -> second pass of its update, which still reads the gradient
        self.rate = {
            Lane.H2D: self.machine.h2d_bytes_per_s,
            Lane.D2H: self.machine.d2h_bytes_per_s,
            Lane.READ: self.machine.read_bytes_per_s,
            Lane.WRITE: self.machine.write_bytes_per_s,
        }

    def build(self, num_steps: int) -> tuple[tuple[Job, ...], tuple[int, ...]]:
        ends = []
        for step in range(num_steps):
            for micro in range(self.num_micro):
                downs = self._forward(step, micro)
                self._backward(step, micro, downs)
            ends.append(self.uses[-1])
            self._updates(step)
        return tuple(self.jobs), tuple(ends)

    # ------------------------------------------------------------------------------------------------ small parts
    def _add(self, job: Job) -> int:
        self.jobs.append(job)
        return len(self.jobs) - 1

    def _move(self, lane: Lane, what: str, i: int, nbytes: float, needs: Sequence[int | None], step: int,
              priority: int, takes: str = "", gives: str = "") -> int:  # fmt: skip
        known = tuple(j for j in needs if j is not None)
        name = f"{what} ({self.units[i].name})"
        return self._add(Job(name, lane, nbytes / self.rate[lane], known, priority, step, nbytes, takes, gives))

    def _use_before(self, distance: int) -> int | None:
        """The compute job ``distance`` uses before the one that is about to be added."""
        index = len(self.uses) - distance
        return self.uses[index] if index >= 0 else None

    def _streams(self, i: int) -> bool:
        return self.choices[i].param_home is not Tier.DEVICE

    def _offload(self, i: int) -> bool:
        return self.choices[i].activation.is_offloaded

    def _grad_down(self, i: int) -> bool:
        return self.choices[i].grad_home is Tier.DRAM and self.units[i].trained_numel > 0

    def _fetch_param(self, i: int, step: int) -> int | None:
        if not self._streams(i):
            return None
        slot = self._use_before(self.prefetch + 1)
        ready = self.param_ready.get(i)
        nbytes, order = self.units[i].param_nbytes, len(self.uses)
        if self.choices[i].param_home is Tier.NVME:
            ahead = self._use_before(self.prefetch + 3)
            ready = self._move(Lane.READ, "read param", i, nbytes, (ahead, ready), step, order)
        return self._move(Lane.H2D, "fetch param", i, nbytes, (slot, ready), step, order)

    def _compute(self, name: str, i: int, seconds: float, needs: Sequence[int | None], step: int) -> int:
        known = tuple(j for j in (self._use_before(1), *needs) if j is not None)
        job = self._add(Job(f"{name} ({self.units[i].name})", Lane.COMPUTE, seconds, known, len(self.uses), step))
        self.uses.append(job)
        return job

    # -------------------------------------------------------------------------------------------------- one pass
    def _forward(self, step: int, micro: int) -> dict[int, int]:
        downs: dict[int, int] = {}
        landed: dict[int, int] = {}
        for i, unit in enumerate(self.units):
            stays = i <= self.prefetch and (micro > 0 or (step > 0 and unit.trained_numel == 0))
            fetch = None if stays else self._fetch_param(i, step)
            # A weight at home on the device must have its update behind it.
            updated = None if self._streams(i) else self.param_ready.get(i)
            run = self._compute("forward", i, unit.forward_s, (fetch, updated, landed.get(i - 2)), step)
            if self._offload(i):
                order, nbytes = len(self.uses), unit.activation_nbytes
                bounce = downs.get(i - 2) if self.choices[i].activation is ActivationChoice.OFFLOAD_NVME else None
                down = self._move(Lane.D2H, "offload activation", i, nbytes, (run, bounce), step, order)
                landed[i] = down
                if self.choices[i].activation is ActivationChoice.OFFLOAD_NVME:
                    down = self._move(Lane.WRITE, "write activation", i, nbytes, (down,), step, order)
                downs[i] = down
        return downs

    def _backward(self, step: int, micro: int, downs: dict[int, int]) -> None:
        for i in reversed(range(self.n)):
            unit, choice, order = self.units[i], self.choices[i], len(self.uses)
            fetch = None if i >= self.n - 1 - self.prefetch else self._fetch_param(i, step)
            back = None
            if self._offload(i):
                source: int | None = downs[i]
                if choice.activation is ActivationChoice.OFFLOAD_NVME:
                    ahead = (source, self._use_before(4))
                    source = self._move(Lane.READ, "read activation", i, unit.activation_nbytes, ahead, step, order)
                needs = (source, self._use_before(2))
                back = self._move(Lane.H2D, "fetch activation", i, unit.activation_nbytes, needs, step, order)
            sums = None
            if micro and self._grad_down(i):
                needs = (self.grad_done[i], self._use_before(2))
                sums = self._move(Lane.H2D, "fetch gradient sums", i, unit.grad_nbytes, needs, step, order)
            seconds = unit.backward_s + (unit.rerun_s if choice.activation is ActivationChoice.RECOMPUTE else 0.0)
            drained = self.grad_done.get(i + 2) if i + 2 < self.n and self._grad_down(i + 2) else None
            run = self._compute("backward", i, seconds, (fetch, back, sums, drained), step)
            if self._grad_down(i):
                needs = (run, self.moments_done.get(i))
                run = self._move(Lane.D2H, "gradient down", i, unit.grad_nbytes, needs, step, order)
            self.grad_done[i] = run

    # --------------------------------------------------------------------------------------------------- updates
    def _updates(self, step: int) -> None:
        norm = self.uses[-1] if self.instance.clip else None
        first_use = len(self.uses)
        for i in range(self.n):
            if self.units[i].trained_numel:
                gate = (norm, self.grad_done[i])
                if self.choices[i].update_on is UpdatePlace.CPU:
                    self._update_on_cpu(i, step, gate, first_use + i)
                else:
                    self._update_on_device(i, step, gate, first_use + i)

    def _flash_nbytes(self, i: int) -> int:
        unit, choice = self.units[i], self.choices[i]
        total = unit.param_nbytes if choice.param_home is Tier.NVME else 0
        if choice.state_home is Tier.NVME:
            total += unit.state_nbytes
            total += unit.param_nbytes if choice.update_on is UpdatePlace.CPU and not self._streams(i) else 0
        return total

    def _read_state(self, i: int, step: int, gate: Sequence[int | None], order: int) -> int | None:
        if not self._flash_nbytes(i):
            return None
        needs = (*gate, self.state_done.get(i))
        return self._move(Lane.READ, "read state", i, self._flash_nbytes(i), needs, step, order, takes="flash staging")

    def _update_on_cpu(self, i: int, step: int, gate: Sequence[int | None], order: int) -> None:
        unit = self.units[i]
        read = self._read_state(i, step, gate, order)
        seconds = unit.trained_numel / self.machine.cpu_update_numel_per_s
        traffic = unit.trained_numel * self.machine.cpu_update_bytes_per_numel
        needs = tuple(j for j in (*gate, read) if j is not None)
        update = self._add(Job(f"update ({unit.name})", Lane.CPU_UPDATE, seconds, needs, order, step, traffic))
        ready = update
        if not self._streams(i):
            ready = self._move(Lane.H2D, "new param up", i, unit.param_nbytes, (update,), step, order)
        self.param_ready[i] = ready
        later = self.machine.moments_later_frac
        if later:  # behind every first pass, and in the order of the next backward
            behind = order + 2 * (self.n - i)
            job = Job(
                f"moments ({unit.name})", Lane.CPU_UPDATE, seconds * later, (update,), behind, step, traffic * later
            )
            self.moments_done[i] = update = self._add(job)
        self._write_state(i, step, update, order)

    def _update_on_device(self, i: int, step: int, gate: Sequence[int | None], order: int) -> None:
        unit, choice = self.units[i], self.choices[i]
        passing = unit.state_nbytes if choice.state_home is not Tier.DEVICE else 0
        passing += unit.param_nbytes if self._streams(i) else 0
        coming = passing + (unit.grad_nbytes if self._grad_down(i) else 0)
        needs: tuple[int | None, ...] = (*gate, self._read_state(i, step, gate, order))
        if coming:
            needs = (*needs, self._move(Lane.H2D, "state up", i, coming, needs, step, order, takes="device staging"))
        seconds = unit.trained_numel / self.machine.device_update_numel_per_s
        known = tuple(j for j in needs if j is not None)
        frees = "device staging" if coming and not passing else ""
        update = self._add(
            Job(f"update ({unit.name})", Lane.DEVICE_UPDATE, seconds, known, order, step, gives=frees)
        )  # fmt: skip
        down = update
        if passing:
            down = self._move(Lane.D2H, "state down", i, passing, (update,), step, order, gives="device staging")
        self.param_ready[i] = down if self._streams(i) else update
        self._write_state(i, step, down, order)

    def _write_state(self, i: int, step: int, after: int, order: int) -> None:
        nbytes = self._flash_nbytes(i)
        if nbytes:
            self.state_done[i] = self._move(
                Lane.WRITE, "write state", i, nbytes, (after,), step, order, gives="flash staging"
            )
            if self.choices[i].param_home is Tier.NVME:
                self.param_ready[i] = self.state_done[i]
