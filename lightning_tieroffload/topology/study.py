"""Floor 3. The wafer-scale study: a model on a mesh, with and without borrowed DRAM. A simulation from end to end.

Stages of ``tensor_parallel`` dies in a row are laid out in a serpentine. Five ways to live with stages that overflow:

    none      nobody borrows: a stage that overflows recomputes, cheapest seconds per byte first
    nearest   the overflow goes to helpers in the published order, senders by index
    regret    the same placement, paired by the allocator's default order
    placed    positions and pairs by the genetic optimiser, recompute as above; bytes paired die by die as above
    genetic   recompute bits as well

Pipeline traffic (stage to stage) is routed by dimension. Balancing traffic (borrowed bytes, out in forward and back in
backward) is routed apart from it, around what the pipeline has booked. A period is one micro-batch in steady state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tieroffload.errors import CapacityError, ConfigError
from lightning_tieroffload.sizes import format_nbytes
from lightning_tieroffload.topology.allocator import allocate_by_distance
from lightning_tieroffload.topology.exact import transport_optimum_by_distance
from lightning_tieroffload.topology.flows import Flow
from lightning_tieroffload.topology.genetic import Optimised, PlacementProblem, optimise
from lightning_tieroffload.topology.mesh import Mesh
from lightning_tieroffload.topology.pipeline import ModelSpec, StageNeed, stage_needs
from lightning_tieroffload.topology.routing import LinkLoads, Message, route

__all__ = ["VARIANTS", "Outcome", "Study", "die_groups", "placement_problem", "run_study", "study_table"]

VARIANTS = ("none", "nearest", "regret", "placed", "genetic")
# A helper with less than this free is pressed (and a sender keeps as much), so it is not lent out.
MIN_FREE_FRAC = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One variant. Bytes and links are per die and per direction; ``flows`` are between site numbers.

    ``fits`` is False where the stages do not fit that way; then ``reason`` says why and the other figures are those of
    the attempt. ``optimum_gap_frac`` is the distance of the borrowed bytes' cost from the transport LP.
    """

    variant: str
    fits: bool
    reason: str
    positions: tuple[int, ...]
    recompute: tuple[bool, ...]
    flows: list[Flow]
    used_nbytes: npt.NDArray[np.float64]
    global_cost_s: float
    borrowed_cost_s: float
    optimum_gap_frac: float
    slot_s: float
    tokens_per_s: float
    pipeline_loads: LinkLoads
    balancing_loads: LinkLoads
    peak_link_frac: float
    mean_link_frac: float

    @property
    def peak_nbytes(self) -> float:
        return float(self.used_nbytes.max())

    @property
    def borrowed_nbytes(self) -> int:
        return sum(flow.nbytes for flow in self.flows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A model on a mesh. ``overflow_peak_nbytes`` is the fullest die's need when nobody borrows or recomputes."""

    mesh: Mesh
    model: ModelSpec
    tensor_parallel: int
    num_stages: int
    micro_batch: int
    num_micro_batches: int
    needs: list[StageNeed]
    groups: list[list[int]]
    overflow_peak_nbytes: float
    capacity_nbytes: float
    outcomes: list[Outcome]
    optimised: Optimised | None

    @property
    def overflows(self) -> bool:
        return self.overflow_peak_nbytes > self.capacity_nbytes

    def lowered_frac(self, variant: str) -> float:
        """By how much this variant lowers the peak memory per die against keeping everything where it arises."""
        return 1.0 - self.outcome(variant).peak_nbytes / self.overflow_peak_nbytes

    def outcome(self, variant: str) -> Outcome:
        for outcome in self.outcomes:
            if outcome.variant == variant:
                return outcome
        raise ConfigError(f"variant {variant!r} is not in this study. It has: {[o.variant for o in self.outcomes]}.")


def die_groups(mesh: Mesh, tensor_parallel: int) -> list[list[int]]:
    """Site numbers of each group of ``tensor_parallel`` dies in a row, in serpentine order, defect groups left out.

    Raises ``ConfigError`` if not even two groups fit.
    """
    at = {(site.x, site.y): number for number, site in enumerate(mesh.sites) if site.dram_nbytes > 0}
    if not at:
        raise ConfigError(f"mesh {mesh.name!r} has no site with DRAM.")
    width, height = max(x for x, _ in at) + 1, max(y for _, y in at) + 1
    if tensor_parallel < 1:
        raise ConfigError(f"tensor_parallel={tensor_parallel} must be 1 or more.")
    groups = []
    for column in range(width // tensor_parallel):
        rows = range(height) if column % 2 == 0 else range(height - 1, -1, -1)
        for y in rows:
            places = [(column * tensor_parallel + k, y) for k in range(tensor_parallel)]
            if all(place in at for place in places):
                groups.append([at[place] for place in places])
    if len(groups) < 2:
        raise ConfigError(
            f"mesh {mesh.name!r} ({width} x {height}) has {len(groups)} rows of tensor_parallel={tensor_parallel} "
            f"dies; a pipeline needs two or more. Lower tensor_parallel."
        )
    return groups


def placement_problem(
    mesh: Mesh, groups: Sequence[Sequence[int]], needs: Sequence[StageNeed], usable_nbytes: float
) -> PlacementProblem:
    """The genetic optimiser's view: one site per group, bytes per die, pipeline and borrowed bytes per micro-batch.

    Borrowed bytes count in full, as the published cost does, though a micro-batch moves only its share of them twice.
    """
    table = mesh.distance_table().astype(np.float64)
    firsts = [group[0] for group in groups]
    options = [(need.stage, option) for need in needs for option in need.options]
    return PlacementProblem(
        distance=table[np.ix_(firsts, firsts)],
        capacity_nbytes=np.full(len(groups), np.floor(usable_nbytes)),
        stage_nbytes=np.array([need.nbytes for need in needs], np.float64),
        stage_s=np.array([need.seconds for need in needs]),
        bit_stage=np.array([stage for stage, _ in options], np.int64),
        bit_saved_nbytes=np.array([option.saved_nbytes for _, option in options], np.float64),
        bit_extra_s=np.array([option.extra_s for _, option in options]),
        pipe_nbytes=np.array([2.0 * need.pipe_nbytes for need in needs[:-1]]),
        link_bytes_per_s=mesh.link_bytes_per_s(),
    )


def run_study(
    mesh: Mesh,
    model: ModelSpec,
    *,
    tensor_parallel: int = 4,
    num_stages: int | None = None,
    micro_batch: int | None = None,
    num_micro_batches: int | None = None,
    fill_frac: float = 1.0,
    variants: Sequence[str] = VARIANTS,
    seed: int = 0,
    population: int = 50,
    num_generations: int = 2000,
) -> Study:
    """Place ``model`` on ``mesh`` in each of ``variants``.

    ``micro_batch`` (sequences) defaults to the largest with which all stages together, nothing recomputed, fill at
    most ``fill_frac`` of the mesh's usable DRAM; 1 if even that is too much. ``num_micro_batches`` defaults to four per
    stage.
    Raises ``ConfigError`` for settings that do not work out, ``CapacityError`` if the state alone does not fit.
    """
    unknown = [variant for variant in variants if variant not in VARIANTS]
    if unknown:
        raise ConfigError(f"variant {unknown[0]!r} is not known. Known: {', '.join(VARIANTS)}.")
    groups = die_groups(mesh, tensor_parallel)
    stages = min(len(groups), model.num_layers) if num_stages is None else num_stages
    if not 2 <= stages <= len(groups):
        raise ConfigError(f"num_stages={stages} must be 2 to {len(groups)}, the groups of {tensor_parallel} dies.")
    batches = 4 * stages if num_micro_batches is None else num_micro_batches
    die = mesh.sites[groups[0][0]]
    capacity = float(die.dram_nbytes)
    usable = capacity * (1 - MIN_FREE_FRAC)

    def needs_of(sequences: int) -> list[StageNeed]:
        return stage_needs(
            model,
            num_stages=stages,
            tensor_parallel=tensor_parallel,
            micro_batch=sequences,
            num_micro_batches=batches,
            die=die,
            link_bytes_per_s=mesh.link_bytes_per_s(),
        )

    room = usable * len(groups)
    if micro_batch is None:
        micro_batch = 1
        while sum(need.nbytes for need in needs_of(micro_batch + 1)) <= fill_frac * room:
            micro_batch += 1
    elif micro_batch < 1:
        raise ConfigError(f"micro_batch={micro_batch} must be 1 or more sequences.")
    needs = needs_of(micro_batch)
    state = sum(need.state_nbytes for need in needs)
    if state > room:
        raise CapacityError(
            f"{model.name} has {format_nbytes(state * tensor_parallel)} of state, but {len(groups) * tensor_parallel} "
            f"dies of mesh {mesh.name!r} may hold {format_nbytes(room * tensor_parallel)} (5 % of each kept free). "
            f"Use a mesh with more DRAM or a smaller model."
        )
    problem = placement_problem(mesh, groups, needs, usable)
    maker = _Maker(mesh, model, groups, needs, problem, usable, micro_batch, batches)
    outcomes = []
    optimised = None
    for variant in variants:
        if variant == "none":
            outcomes.append(maker.alone())
        elif variant in ("placed", "genetic"):
            bits = maker.bits_until_all_fit()
            searched = problem if variant == "genetic" else _with_bits(problem, bits)
            try:
                optimised = optimise(searched, seed=seed, population=population, num_generations=num_generations)
            except CapacityError as error:
                outcomes.append(replace(maker.alone(), variant=variant, fits=False, reason=str(error)))
                continue
            bits = optimised.recompute if variant == "genetic" else bits
            outcomes.append(maker.borrowing(variant, optimised.positions, bits, "regret"))
        else:
            bits = maker.bits_until_all_fit()
            outcomes.append(maker.borrowing(variant, tuple(range(stages)), bits, variant))
    return Study(
        mesh=mesh,
        model=model,
        tensor_parallel=tensor_parallel,
        num_stages=stages,
        micro_batch=micro_batch,
        num_micro_batches=batches,
        needs=needs,
        groups=groups,
        overflow_peak_nbytes=float(max(need.nbytes for need in needs)),
        capacity_nbytes=capacity,
        outcomes=outcomes,
        optimised=optimised,
    )


def _with_bits(problem: PlacementProblem, bits: Sequence[bool]) -> PlacementProblem:
    """The same problem with these activations recomputed and nothing left to decide about it."""
    on = np.asarray(bits, np.float64)
    num_stages = problem.num_stages
    none: npt.NDArray[np.float64] = np.zeros(0)
    return replace(
        problem,
        stage_nbytes=problem.stage_nbytes - np.bincount(problem.bit_stage, problem.bit_saved_nbytes * on, num_stages),
        stage_s=problem.stage_s + np.bincount(problem.bit_stage, problem.bit_extra_s * on, num_stages),
        bit_stage=none,
        bit_saved_nbytes=none,
        bit_extra_s=none,
    )


class _Maker:
    """Turns decisions (positions, bits, order) into an outcome."""

    def __init__(
        self,
        mesh: Mesh,
        model: ModelSpec,
        groups: list[list[int]],
        needs: list[StageNeed],
        problem: PlacementProblem,
        usable_nbytes: float,
        micro_batch: int,
        num_micro_batches: int,
    ) -> None:
        self._mesh = mesh
        self._groups = groups
        self._needs = needs
        self._problem = problem
        self._usable = usable_nbytes
        self._tokens = micro_batch * num_micro_batches * model.seq
        self._periods = num_micro_batches + len(needs) - 1
        self._table = mesh.distance_table()

    def alone(self) -> Outcome:
        """Nobody borrows: recompute in every stage that overflows."""
        bits = np.zeros(self._problem.num_bits, np.bool_)
        reason = ""
        for need in self._needs:
            self._recompute_until(bits, [need.stage], self._usable, float(need.nbytes))
            left = self._stage_nbytes(bits)[need.stage] - self._usable
            if left > 0 and not reason:
                reason = f"stage {need.stage} overflows by {format_nbytes(left)} with everything recomputed"
        return self._outcome("none", tuple(range(len(self._needs))), tuple(bits.tolist()), [], not reason, reason, 0.0)

    def bits_until_all_fit(self) -> tuple[bool, ...]:
        """Nothing recomputed if all stages together fit; else as much as it takes, cheapest first."""
        bits = np.zeros(self._problem.num_bits, np.bool_)
        room = self._usable * len(self._groups)
        total = float(sum(need.nbytes for need in self._needs))
        self._recompute_until(bits, range(len(self._needs)), room, total)
        return tuple(bits.tolist())

    def _recompute_until(
        self, bits: npt.NDArray[np.bool_], stages: Sequence[int], room: float, need_nbytes: float
    ) -> None:
        problem = self._problem
        mine = [
            r for r in range(problem.num_bits) if problem.bit_stage[r] in stages and problem.bit_saved_nbytes[r] > 0
        ]
        for r in sorted(mine, key=lambda r: problem.bit_extra_s[r] / problem.bit_saved_nbytes[r]):
            if need_nbytes <= room:
                return
            bits[r] = True
            need_nbytes -= problem.bit_saved_nbytes[r]

    def _stage_nbytes(self, bits: npt.ArrayLike) -> npt.NDArray[np.float64]:
        problem = self._problem
        saved = np.bincount(
            problem.bit_stage, problem.bit_saved_nbytes * np.asarray(bits, np.float64), len(self._needs)
        )
        return np.asarray(problem.stage_nbytes - saved, np.float64)

    def borrowing(self, variant: str, positions: tuple[int, ...], bits: tuple[bool, ...], order: str) -> Outcome:
        """Pair die by die in ``order``."""
        need = np.zeros(len(self._mesh.sites))
        lends = np.zeros(len(self._mesh.sites))
        for group in self._groups:
            lends[group] = self._usable
        for stage, nbytes in enumerate(self._stage_nbytes(bits)):
            for site in self._groups[positions[stage]]:
                need[site] = max(0.0, np.ceil(nbytes - self._usable))
                lends[site] = max(0.0, np.floor(self._usable - nbytes))
        senders, helpers = np.flatnonzero(need), np.flatnonzero(lends)
        table = self._table[np.ix_(senders, helpers)]
        demand, supply = need[senders].astype(np.int64), lends[helpers].astype(np.int64)
        try:
            allocation = allocate_by_distance(table, demand, supply, order)  # type: ignore[arg-type]
        except CapacityError as error:
            return self._outcome(variant, positions, bits, [], False, str(error), 0.0)
        optimum = transport_optimum_by_distance(table, demand, supply).global_cost
        gap = allocation.global_cost / optimum - 1 if optimum else 0.0
        flows = [Flow(int(senders[f.sender]), int(helpers[f.helper]), f.nbytes) for f in allocation.flows]
        return self._outcome(variant, positions, bits, flows, True, "", gap)

    def _outcome(
        self,
        variant: str,
        positions: tuple[int, ...],
        bits: tuple[bool, ...],
        flows: list[Flow],
        fits: bool,
        reason: str,
        gap: float,
    ) -> Outcome:
        mesh, problem = self._mesh, self._problem
        used = np.zeros(len(mesh.sites))
        in_flight: dict[int, int] = {}
        for stage, nbytes in enumerate(self._stage_nbytes(bits)):
            for site in self._groups[positions[stage]]:
                used[site] = nbytes
                in_flight[site] = self._needs[stage].num_in_flight
        for flow in flows:
            used[flow.sender] -= flow.nbytes
            used[flow.helper] += flow.nbytes
        pipeline = []
        for stage, need in enumerate(self._needs[:-1]):
            ends = self._groups[positions[stage]], self._groups[positions[stage + 1]]
            for here, there in zip(*ends, strict=True):
                pipeline += [Message(here, there, need.pipe_nbytes), Message(there, here, need.pipe_nbytes)]
        balancing = []
        for flow in flows:
            share = flow.nbytes / in_flight[flow.sender]
            balancing += [Message(flow.sender, flow.helper, share), Message(flow.helper, flow.sender, share)]
        pipeline_loads, _ = route(mesh, pipeline, "dimension")
        balancing_loads, _ = route(mesh, balancing, "congestion", booked=pipeline_loads)
        together = pipeline_loads + balancing_loads
        extra = np.bincount(problem.bit_stage, problem.bit_extra_s * np.asarray(bits, np.float64), len(self._needs))
        slot_s = max(float((problem.stage_s + extra).max()), together.busiest_s)
        speed = mesh.link_bytes_per_s()
        borrowed = sum(flow.nbytes * float(self._table[flow.sender, flow.helper]) for flow in flows) / speed
        piped = sum(m.nbytes * float(self._table[m.source, m.target]) for m in pipeline) / speed
        peak, mean = together.peak_and_mean(slot_s)
        return Outcome(
            variant=variant,
            fits=fits,
            reason=reason,
            positions=positions,
            recompute=bits,
            flows=flows,
            used_nbytes=used,
            global_cost_s=borrowed + piped,
            borrowed_cost_s=borrowed,
            optimum_gap_frac=gap,
            slot_s=slot_s,
            tokens_per_s=self._tokens / (self._periods * slot_s) if fits else 0.0,
            pipeline_loads=pipeline_loads,
            balancing_loads=balancing_loads,
            peak_link_frac=peak,
            mean_link_frac=mean,
        )


def study_table(study: Study) -> list[dict[str, Any]]:
    """One JSON-able row per variant, for tables and logs."""
    rows = []
    for outcome in study.outcomes:
        dies = [site for group in study.groups for site in group]
        rows.append(
            {
                "mesh": study.mesh.name,
                "model": study.model.name,
                "variant": outcome.variant,
                "fits": outcome.fits,
                "reason": outcome.reason,
                "micro_batch": study.micro_batch,
                "num_stages": study.num_stages,
                "tensor_parallel": study.tensor_parallel,
                "num_recompute_bits": sum(outcome.recompute),
                "overflow_peak_nbytes": int(study.overflow_peak_nbytes),
                "peak_nbytes": int(outcome.peak_nbytes),
                "lowered_frac": study.lowered_frac(outcome.variant),
                "dram_used_frac": float(outcome.used_nbytes[dies].sum() / (study.capacity_nbytes * len(dies))),
                "borrowed_nbytes": outcome.borrowed_nbytes,
                "global_cost_s": outcome.global_cost_s,
                "borrowed_cost_s": outcome.borrowed_cost_s,
                "optimum_gap_frac": outcome.optimum_gap_frac,
                "tokens_per_s": outcome.tokens_per_s,
                "peak_link_frac": outcome.peak_link_frac,
                "mean_link_frac": outcome.mean_link_frac,
                "pipeline_hop_nbytes": outcome.pipeline_loads.hop_nbytes,
                "balancing_hop_nbytes": outcome.balancing_loads.hop_nbytes,
                "simulated": True,
            }
        )
    return rows
