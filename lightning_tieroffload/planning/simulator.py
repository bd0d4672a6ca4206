"""Floor 4. A plan's step on a virtual clock: the same lanes, priorities and back-pressure as the real scheduler.

Pure and deterministic: the clock is a number, nothing sleeps and nothing is random. Owns the forecast (seconds of a
step in its steady state, what it is bound by, stalls by lane) and the ranking of candidate plans by it.

[Note: shared rates]
A job alone runs at its lane's rate. Jobs that run at once slow each other down where they share something: both PCIe
directions, reads and writes of one disk, all DRAM traffic, and compute with updates on the device. Each such resource
divides its capacity in proportion to what its jobs would use alone; a job runs at the lowest of its shares. On top,
running transfers and CPU updates slow compute by ``overlap_loss_frac`` each and ``update_loss_frac``.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_tieroffload.planning.cost_model import Choice, CostTables, Instance
from lightning_tieroffload.planning.plan import Forecast, Plan
from lightning_tieroffload.planning.timeline import Job, Lane, jobs_of_steps

__all__ = ["Span", "StepForecast", "rank_plans", "simulate", "simulate_jobs", "with_forecast"]

_NUM_STEPS = 3
_STAGING = 2
_TRANSFERS = (Lane.H2D, Lane.D2H, Lane.READ, Lane.WRITE)
_STALL_SHARE = 0.03
"""Below this share of the step, stalls are not worth naming: the step is bound by compute."""


@dataclass(frozen=True, slots=True)
class Span:
    """When one job ran on the virtual clock."""

    job: Job
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class StepForecast:
    """The last simulated step. ``stall_s``: seconds that compute waited, by the lane that it waited for."""

    step_s: float
    bottleneck: str
    busy_s: Mapping[str, float]
    stall_s: Mapping[str, float]
    spans: tuple[Span, ...]


class _Clock:
    """The event loop: at each event finished jobs free others, idle lanes start their most urgent ready job."""

    def __init__(self, instance: Instance, jobs: Sequence[Job]) -> None:
        self.machine = instance.machine
        self.jobs = jobs
        self.now_s = 0.0
        self.waits = [len(job.needs) for job in jobs]
        self.after: list[list[int]] = [[] for _ in jobs]
        for index, job in enumerate(jobs):
            for need in job.needs:
                self.after[need].append(index)
        self.ready: dict[Lane, list[tuple[int, int]]] = {lane: [] for lane in Lane}
        self.left: dict[Lane, tuple[int, float]] = {}
        self.free = {"device staging": _STAGING, "flash staging": _STAGING}
        self.start_s = [0.0] * len(jobs)
        self.end_s = [0.0] * len(jobs)
        self.done = [False] * len(jobs)
        self.busy: list[tuple[int, str, float]] = []
        self.stalls: list[tuple[int, str, float]] = []
        self.compute_jobs = [index for index, job in enumerate(jobs) if job.lane is Lane.COMPUTE]
        self.next_compute = 0
        for index, job in enumerate(jobs):
            if not job.needs:
                heapq.heappush(self.ready[job.lane], (job.priority, index))

    def run(self) -> None:
        num_left = len(self.jobs)
        while num_left:
            for lane in Lane:
                if lane not in self.left:
                    self._start(lane)
            speeds = self._speeds()
            dt = min(left / speeds[lane] for lane, (_, left) in self.left.items())
            self._account(dt, speeds)
            self.now_s += dt
            for lane in Lane:
                if lane not in self.left:
                    continue
                index, left = self.left[lane]
                left -= dt * speeds[lane]
                if left <= 1e-12 * max(1.0, self.jobs[index].seconds):
                    del self.left[lane]
                    self._finish(index)
                    num_left -= 1
                else:
                    self.left[lane] = (index, left)

    def _start(self, lane: Lane) -> None:
        queue, passed = self.ready[lane], []
        while queue:
            entry = heapq.heappop(queue)
            job = self.jobs[entry[1]]
            if job.takes and not self.free[job.takes]:
                passed.append(entry)  # no staging free: less urgent work may go by
                continue
            if job.takes:
                self.free[job.takes] -= 1
            self.left[lane] = (entry[1], job.seconds)
            self.start_s[entry[1]] = self.now_s
            break
        for entry in passed:
            heapq.heappush(queue, entry)

    def _finish(self, index: int) -> None:
        job = self.jobs[index]
        self.done[index] = True
        self.end_s[index] = self.now_s
        if job.gives:
            self.free[job.gives] += 1
        if job.lane is Lane.COMPUTE:
            self.next_compute += 1
        for waiting in self.after[index]:
            self.waits[waiting] -= 1
            if not self.waits[waiting]:
                heapq.heappush(self.ready[self.jobs[waiting].lane], (self.jobs[waiting].priority, waiting))

    def _speeds(self) -> dict[Lane, float]:
        """Share of its own rate at which each running job proceeds; see [Note: shared rates]."""
        machine, running = self.machine, self.left
        host = {lane: self._host_rate(index) for lane, (index, _) in running.items()}
        dram = min(1.0, machine.dram_bytes_per_s / max(sum(host.values()), 1e-9))
        pcie = disk = device = 1.0
        if Lane.H2D in running and Lane.D2H in running:
            pcie = min(1.0, machine.pcie_bytes_per_s / (machine.h2d_bytes_per_s + machine.d2h_bytes_per_s))
        if Lane.READ in running and Lane.WRITE in running:
            disk = min(1.0, machine.disk_bytes_per_s / (machine.read_bytes_per_s + machine.write_bytes_per_s))
        if Lane.COMPUTE in running and Lane.DEVICE_UPDATE in running:
            device = 0.5
        loss = machine.overlap_loss_frac * sum(lane in _TRANSFERS for lane in running)
        loss += machine.update_loss_frac * (Lane.CPU_UPDATE in running)
        own = {
            Lane.COMPUTE: device / (1.0 + loss),
            Lane.DEVICE_UPDATE: device,
            Lane.H2D: pcie,
            Lane.D2H: pcie,
            Lane.READ: disk,
            Lane.WRITE: disk,
            Lane.CPU_UPDATE: 1.0,
        }
        return {lane: min(own[lane], dram if host[lane] > 0 else 1.0) for lane in running}

    def _host_rate(self, index: int) -> float:
        job = self.jobs[index]
        return job.host_nbytes / job.seconds if job.seconds > 0 else 0.0

    def _account(self, dt: float, speeds: Mapping[Lane, float]) -> None:
        for lane, (index, _) in self.left.items():
            self.busy.append((self.jobs[index].step, lane.value, dt))
        if Lane.COMPUTE not in self.left and self.next_compute < len(self.compute_jobs):
            blocked = self.compute_jobs[self.next_compute]
            self.stalls.append((self.jobs[blocked].step, self._blame(blocked, speeds), dt))

    def _blame(self, index: int, speeds: Mapping[Lane, float]) -> str:
        """The lane that the job waits for: follow unfinished needs down to one that runs or queues."""
        while True:
            lane = self.jobs[index].lane
            running = self.left.get(lane)
            if running is not None and running[0] == index:
                return "dram" if speeds[lane] < 0.9 and lane is Lane.CPU_UPDATE else lane.value
            pending = [need for need in self.jobs[index].needs if not self.done[need]]
            if not pending:
                return lane.value
            index = min(pending, key=lambda need: (self.jobs[need].priority, need))


def simulate_jobs(instance: Instance, jobs: Sequence[Job], ends: Sequence[int]) -> StepForecast:
    """Run ``jobs`` and report the last step, from the end of its predecessor's backward to the end of its own."""
    clock = _Clock(instance, jobs)
    clock.run()
    last = len(ends) - 1
    begin = clock.end_s[ends[last - 1]] if last > 0 else 0.0
    step_s = clock.end_s[ends[last]] - begin
    busy: dict[str, float] = {lane.value: 0.0 for lane in Lane}
    stall: dict[str, float] = {lane.value: 0.0 for lane in Lane} | {"dram": 0.0}
    for records, totals in ((clock.busy, busy), (clock.stalls, stall)):
        for step, lane, seconds in records:
            if step == last:
                totals[lane] += seconds
    worst = max(stall, key=lambda lane: stall[lane])
    bottleneck = worst if sum(stall.values()) > _STALL_SHARE * step_s else Lane.COMPUTE.value
    spans = tuple(Span(job, clock.start_s[i], clock.end_s[i]) for i, job in enumerate(jobs) if job.step == last)
    return StepForecast(step_s, bottleneck, busy, stall, spans)


def simulate(instance: Instance, choices: Sequence[Choice], prefetch_units: int) -> StepForecast:
    """The steady-state step of these choices: three steps are run and the third is reported."""
    jobs, ends = jobs_of_steps(instance, choices, prefetch_units, _NUM_STEPS)
    return simulate_jobs(instance, jobs, ends)


def with_forecast(instance: Instance, plan: Plan) -> Plan:
    """The plan with the simulator's step time and bottleneck in its forecast."""
    result = simulate(instance, [line.choice for line in plan.units], plan.prefetch_units)
    tables = CostTables(instance, plan.prefetch_units)
    peak = round(tables.cost(plan.picks()).device_peak_nbytes)
    return replace(plan, forecast=Forecast(result.step_s, peak, result.bottleneck))


def rank_plans(plans: Iterable[Plan]) -> list[Plan]:
    """Fastest forecast first; of forecasts within 0.1 % the one that the cost model likes better, then fewer bytes."""

    def key(plan: Plan) -> tuple[float, float, int]:
        return (plan.forecast.step_s, plan.step_s, plan.peak_nbytes)

    ranked = sorted(plans, key=key)
    if ranked:
        near = [plan for plan in ranked if plan.forecast.step_s <= 1.001 * ranked[0].forecast.step_s]
        near.sort(key=lambda plan: (plan.step_s, plan.peak_nbytes))
        ranked = near + ranked[len(near) :]
    return ranked
