"""Floor 2. What a placement costs: bytes at each point of the step and seconds in each lane. Nothing is decided here.

The only functions that turn bytes into seconds. ``CostTables`` holds, per unit and option, every coefficient; the ILP
reads them as a matrix, brute force and the baselines add them up with ``CostTables.evaluate``, and ``check_plan``
recomputes the same from the units one by one, without these tables.

[Note: order of a step]
Units 0..n-1 run forward, then n-1..0 backward, ``num_micro_batches`` times; then the updates, ordered by next use (unit
0 first). A step is cut into *phase 0*, the first forward, *phase 1*, all other passes, and *phase 2*, the updates. With
``clip`` the updates wait for the norm, so for the end of the last backward, and hide under the next step's phase 0.
Without, unit k's update starts when its last backward has ended, and must end before its next forward. Where the CPU
writes the moments in a second pass (``moments_later_frac``), that pass belongs to phase 1 of the next step: backward.

[Note: bytes on the device]
At forward i:  resident + kept(<= i) + late(>= i) + staged parameters + own_f(i) + draining activation(i-1) + update(i)
At backward i: resident + kept(<= i) + late(>= i) + staged parameters + own_b(i) + prefetched activation(i-1)
               + draining gradient(i+1) [+ update(i) without clip]
``resident``: parameters, state and (with accumulation) gradients at home on the device. ``kept``: what stays from a
unit's forward to its backward: all saved activations, or for a recomputed unit its input, or nothing if offloaded.
``late``: gradients that stay from a unit's backward to its update. Staged: ``prefetch_units + 1`` consecutive units,
the running one and those used next (at both turns of the step they stay, so they are not fetched again). ``own_b``:
workspace, the activations that recompute or fetch brings back, the gradient being made. ``update(i)``: two units' state
in flight through the device, of those not yet updated. All of it is raised by ``allocator_slack_frac``. Peak: the most
over all points. DRAM: homes, gradients going down, offloaded activations, the host's copy of a device-resident
parameter that the CPU updates, and twice the largest unit's bytes on the way to or from flash. NVME: homes.

[Note: seconds of a step]
step = max(T0 + T1, prefix rows, chain rows) + overlap_loss_frac * (seconds of all transfers) + update_loss_frac *
(seconds of CPU updates), where T0 and T1 are the largest lane's seconds in phases 0 (with phase 2 if ``clip``) and 1;
without ``clip`` also every lane's total is a bound, phase 2 included. Source: DESIGN, "the floor": every lane is a
lower bound, terms overlap, PCIe traffic counts against DRAM too, both PCIe directions together are slower than twice
one, a disk's mixed rate too.
Prefix rows: the updates of units 0..k, and fetching their parameters, must fit between the gradients' arrival and the
forward of k: step >= (compute outside that window) + (lane's seconds for units 0..k). Chain rows: the same for one
unit's own sequence of gradient down, state in, update, parameter up. Stalls, added to compute: what a fetch takes
longer than the units that it can hide under (the ``prefetch_units`` before it; one unit for activations, gradients).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.planning.profile import MachineProfile, Profile, UnitProfile

__all__ = [
    "ACTIVATION_CHOICES",
    "LANES",
    "OPTIONS",
    "OPTION_INDEX",
    "ActivationChoice",
    "Batch",
    "Choice",
    "Cost",
    "CostTables",
    "Instance",
    "UpdatePlace",
]

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class UpdatePlace(enum.Enum):
    """Where a unit's optimizer step runs. DEVICE streams state that is not at home there through the device."""

    CPU = "cpu"
    DEVICE = "device"


class ActivationChoice(enum.Enum):
    """What happens to what autograd saves in a unit between its forward and its backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD_DRAM = "offload-dram"
    OFFLOAD_NVME = "offload-nvme"

    @property
    def is_offloaded(self) -> bool:
        return self in (ActivationChoice.OFFLOAD_DRAM, ActivationChoice.OFFLOAD_NVME)


ACTIVATION_CHOICES = tuple(ActivationChoice)


@dataclass(frozen=True, slots=True)
class Choice:
    """One option of one unit: homes, where the update runs, and what becomes of the activations."""

    param_home: Tier
    state_home: Tier
    grad_home: Tier
    update_on: UpdatePlace
    activation: ActivationChoice

    @property
    def code(self) -> str:
        """``"dram/nvme/dram/cpu/recompute"``: param, state, gradient home, update, activation."""
        homes = (self.param_home, self.state_home, self.grad_home)
        return "/".join([*(h.name.lower() for h in homes), self.update_on.value, self.activation.value])


# Left out because another option is never worse: updating device-resident state on the CPU, or sending its gradient
# down; keeping on the device the gradient of a unit whose state comes all the way from flash.
_UPDATES = (
    (Tier.DEVICE, Tier.DEVICE, UpdatePlace.DEVICE),
    (Tier.DRAM, Tier.DRAM, UpdatePlace.CPU),
    (Tier.DRAM, Tier.DRAM, UpdatePlace.DEVICE),
    (Tier.DRAM, Tier.DEVICE, UpdatePlace.DEVICE),
    (Tier.NVME, Tier.DRAM, UpdatePlace.CPU),
    (Tier.NVME, Tier.DRAM, UpdatePlace.DEVICE),
)
OPTIONS: tuple[Choice, ...] = tuple(
    Choice(param, state, grad, place, activation)
    for param in Tier
    for state, grad, place in _UPDATES
    for activation in ActivationChoice
)
"""All 72 options of a unit; the first keeps everything on the device."""
OPTION_INDEX: Mapping[str, int] = {option.code: i for i, option in enumerate(OPTIONS)}

LANES = ("compute", "h2d", "d2h", "pcie", "read", "write", "disk", "cpu_update", "dram")
"""Resources with a rate. ``pcie`` is both directions together, ``disk`` reads and writes, ``dram`` all host traffic."""
_TRANSFERS = ("h2d", "d2h", "read", "write")
_PREFIX_LANES = ("h2d", "pcie", "read", "cpu_update", "dram")
NUM_STAGED_UPDATES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One planning problem: units in execution order, a machine, budgets, and what the settings allow.

    ``clip``: updates must wait for the gradient norm (also right when a scaler or the user's code may skip a step).
    ``prefetch_units``: the distances that may be chosen from. ``*_fixed_nbytes``: held by others than the units.
    ``options``: per unit the codes of the options allowed, or ``None`` for all that the other fields allow.
    Without NVMe paths ``nvme_budget_nbytes`` is 0 and no option uses that tier.
    """

    units: tuple[UnitProfile, ...]
    machine: MachineProfile
    device_budget_nbytes: int
    dram_budget_nbytes: int
    nvme_budget_nbytes: int = 0
    num_micro_batches: int = 1
    clip: bool = True
    prefetch_units: tuple[int, ...] = (2, 1)
    device_fixed_nbytes: int = 0
    dram_fixed_nbytes: int = 0
    update_places: tuple[UpdatePlace, ...] = tuple(UpdatePlace)
    activations: tuple[ActivationChoice, ...] = ACTIVATION_CHOICES
    options: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not self.units:
            raise ConfigError("an instance needs at least one unit.")
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names):
            raise ConfigError(
                f"unit names must differ; these repeat: {sorted({n for n in names if names.count(n) > 1})}."
            )
        if self.num_micro_batches < 1:
            raise ConfigError(f"num_micro_batches is {self.num_micro_batches}; it must be 1 or more.")
        if not self.prefetch_units or min(self.prefetch_units) < 0:
            raise ConfigError(f"prefetch_units is {self.prefetch_units}; give at least one distance, 0 or more.")
        if self.options is not None:
            if len(self.options) != len(self.units):
                raise ConfigError(f"options has {len(self.options)} entries for {len(self.units)} units.")
            unknown = sorted({code for codes in self.options for code in codes} - set(OPTION_INDEX))
            if unknown:
                raise ConfigError(f"options names unknown codes {unknown}.")

    @classmethod
    def from_profile(
        cls, profile: Profile, *, device_budget_nbytes: int, dram_budget_nbytes: int, **settings: Any
    ) -> Instance:
        """The instance of a measured or estimated profile; ``settings`` are this class's other fields."""
        fixed = settings.pop("device_fixed_nbytes", profile.device_fixed_nbytes)
        return cls(
            units=profile.units,
            machine=profile.machine,
            device_budget_nbytes=device_budget_nbytes,
            dram_budget_nbytes=dram_budget_nbytes,
            device_fixed_nbytes=fixed,
            **settings,
        )

    def budget_nbytes(self, tier: Tier) -> int:
        return (self.device_budget_nbytes, self.dram_budget_nbytes, self.nvme_budget_nbytes)[tier]

    def with_budget(self, tier: Tier, nbytes: int) -> Instance:
        """The same problem with another budget on one tier."""
        if tier is Tier.DEVICE:
            return dataclasses.replace(self, device_budget_nbytes=nbytes)
        if tier is Tier.DRAM:
            return dataclasses.replace(self, dram_budget_nbytes=nbytes)
        return dataclasses.replace(self, nvme_budget_nbytes=nbytes)

    def allowed(self) -> Bools:
        """(units, options): which options each unit may take. Raises ``ConfigError`` for a unit that has none."""
        mask = np.zeros((len(self.units), len(OPTIONS)), dtype=bool)
        for row, unit in enumerate(self.units):
            for column, option in enumerate(OPTIONS):
                if self.nvme_budget_nbytes == 0 and _uses_nvme(option):
                    continue
                if self.options is not None:
                    mask[row, column] = option.code in self.options[row]
                else:
                    mask[row, column] = self._permits(unit, option)
            if not mask[row].any():
                raise ConfigError(
                    f"unit {unit.name} has no option left: update_on allows {[p.value for p in self.update_places]}, "
                    f"activations {[a.value for a in self.activations]}, and NVMe is "
                    f"{'absent' if self.nvme_budget_nbytes == 0 else 'there'}."
                )
        return mask

    def _permits(self, unit: UnitProfile, option: Choice) -> bool:
        if option.param_home is not Tier.DEVICE and not (unit.can_stream_param and unit.param_nbytes):
            return False
        if unit.trained_numel == 0:  # nothing to update: one name for "no state"
            if (option.state_home, option.grad_home) != (Tier.DEVICE, Tier.DEVICE):
                return False
        elif option.update_on not in self.update_places or (option.state_home and not unit.can_move_state):
            return False
        if unit.activation_nbytes == 0 or not (unit.can_recompute or unit.can_offload_activation):
            return option.activation is ActivationChoice.KEEP
        if option.activation is ActivationChoice.KEEP:
            return option.activation in self.activations or not self._may_leave(unit)
        if option.activation not in self.activations:
            return False
        if option.activation is ActivationChoice.RECOMPUTE:
            return unit.can_recompute
        return unit.can_offload_activation

    def _may_leave(self, unit: UnitProfile) -> bool:
        """Whether ``activations`` names something other than keep that this unit can do."""
        recompute = unit.can_recompute and ActivationChoice.RECOMPUTE in self.activations
        offload = unit.can_offload_activation and (
            ActivationChoice.OFFLOAD_DRAM in self.activations
            or (self.nvme_budget_nbytes > 0 and ActivationChoice.OFFLOAD_NVME in self.activations)
        )
        return recompute or offload

    def to_json(self) -> dict[str, Any]:
        raw: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        raw["units"] = [dataclasses.asdict(unit) for unit in self.units]
        raw["machine"] = self.machine.to_json()
        raw["prefetch_units"] = list(self.prefetch_units)
        raw["update_places"] = [place.value for place in self.update_places]
        raw["activations"] = [activation.value for activation in self.activations]
        raw["options"] = None if self.options is None else [list(codes) for codes in self.options]
        return raw

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Instance:
        """Inverse of ``to_json``. Raises ``ConfigError`` for keys or values that it does not know."""
        fields = dict(raw)
        try:
            fields["units"] = tuple(UnitProfile(**unit) for unit in raw["units"])
            fields["machine"] = MachineProfile.from_json(raw["machine"])
            fields["prefetch_units"] = tuple(raw["prefetch_units"])
            fields["update_places"] = tuple(UpdatePlace(place) for place in raw["update_places"])
            fields["activations"] = tuple(ActivationChoice(a) for a in raw["activations"])
            options = raw["options"]
            fields["options"] = None if options is None else tuple(tuple(codes) for codes in options)
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a planning instance: {type(error).__name__}: {error}.") from error


def _uses_nvme(option: Choice) -> bool:
    return Tier.NVME in (option.param_home, option.state_home) or option.activation is ActivationChoice.OFFLOAD_NVME


@dataclass(frozen=True, slots=True)
class Cost:
    """What one assignment costs. Lane seconds are the whole step's; ``bottleneck`` is the binding bound's name."""

    step_s: float
    device_peak_nbytes: float
    dram_peak_nbytes: float
    nvme_peak_nbytes: float
    bottleneck: str
    lane_s: Mapping[str, float]

    def peak_nbytes(self, tier: Tier) -> float:
        return (self.device_peak_nbytes, self.dram_peak_nbytes, self.nvme_peak_nbytes)[tier]


@dataclass(frozen=True, slots=True)
class Batch:
    """``CostTables.evaluate`` of many assignments at once: one entry per assignment."""

    step_s: F64
    device_nbytes: F64
    dram_nbytes: F64
    nvme_nbytes: F64


def _option_flags(test: Any) -> F64:
    return np.array([[float(test(option))] for option in OPTIONS]).T  # (1, options)


class CostTables:
    """Every coefficient of one instance at one prefetch distance. Arrays are float64, (units, options).

    ``sec[lane, phase]`` seconds; ``resident`` … ``nvme`` bytes, see [Note: bytes on the device]; ``outside_s[k]``,
    ``recompute_s``, ``tail_s`` and ``chain_s`` make the prefix and chain rows. All coefficients are 0 or more and cost
    only grows with them, so an option whose every coefficient is at least another's is never needed.
    """

    def __init__(self, instance: Instance, prefetch_units: int) -> None:
        self.instance = instance
        self.prefetch_units = prefetch_units
        self.num_units = len(instance.units)
        self.allowed = instance.allowed()
        self._fill_flags()
        self._fill_bytes()
        self._fill_seconds()

    def _fill_flags(self) -> None:
        flag = _option_flags
        self._p_away = flag(lambda o: o.param_home is not Tier.DEVICE)
        self._p_dram = flag(lambda o: o.param_home is Tier.DRAM)
        self._p_nvme = flag(lambda o: o.param_home is Tier.NVME)
        self._s_away = flag(lambda o: o.state_home is not Tier.DEVICE)
        self._s_dram = flag(lambda o: o.state_home is Tier.DRAM)
        self._s_nvme = flag(lambda o: o.state_home is Tier.NVME)
        self._g_dram = flag(lambda o: o.grad_home is Tier.DRAM)
        self._on_cpu = flag(lambda o: o.update_on is UpdatePlace.CPU)
        self._keep = flag(lambda o: o.activation is ActivationChoice.KEEP)
        self._rerun = flag(lambda o: o.activation is ActivationChoice.RECOMPUTE)
        self._off_dram = flag(lambda o: o.activation is ActivationChoice.OFFLOAD_DRAM)
        self._off_nvme = flag(lambda o: o.activation is ActivationChoice.OFFLOAD_NVME)

    def _column(self, values: Iterable[float]) -> F64:
        return np.array(list(values), dtype=np.float64)[:, None]  # (units, 1)

    def _fill_bytes(self) -> None:
        units, column = self.instance.units, self._column
        num_micro, clip = self.instance.num_micro_batches, self.instance.clip
        param = column(u.param_nbytes for u in units)
        trained = column(float(u.trained_numel > 0) for u in units)
        grad = column(u.grad_nbytes for u in units) * trained
        state = column(u.state_nbytes for u in units)
        activation = column(u.activation_nbytes for u in units)
        boundary = column(min(u.boundary_nbytes, u.activation_nbytes) for u in units)
        workspace = column(u.workspace_nbytes for u in units)
        ones = np.ones((self.num_units, len(OPTIONS)))
        offloaded = self._off_dram + self._off_nvme
        grad_on_device = grad * (1 - self._g_dram)
        grad_down = grad * self._g_dram

        self.resident = param * (1 - self._p_away) + state * (1 - self._s_away)
        self.late = 0.0 * ones
        eager_grad = 0.0 * ones
        if num_micro > 1:
            self.resident = self.resident + grad_on_device
        elif clip:
            self.late = grad_on_device
        else:
            eager_grad = grad_on_device
        self.kept = activation * self._keep + boundary * self._rerun
        self.stage = param * self._p_away
        self.own_f = workspace + activation * offloaded
        incoming_sums = grad_down if num_micro > 1 else 0.0
        self.own_b = (
            workspace + (activation - boundary) * self._rerun + activation * offloaded
            + grad_down + incoming_sums + eager_grad
        )  # fmt: skip
        self.act_in_flight = activation * offloaded
        self.grad_in_flight = grad_down + eager_grad
        on_device = trained * (1 - self._on_cpu)
        self.update_stage = on_device * (state * self._s_away + param * self._p_away * ones + grad_down)
        self.update_stage = self.update_stage * (self._s_away + self._p_away > 0)
        # A CPU update reads and writes the 16-bit half of the weight too, so it needs a copy next to the state.
        copy = param * (1 - self._p_away) * self._on_cpu * trained
        self.dram = (
            param * self._p_dram + state * self._s_dram + copy * self._s_dram + grad_down + activation * self._off_dram
        )
        self.nvme = param * self._p_nvme + (state + copy) * self._s_nvme + activation * self._off_nvme
        self.dram_stage = NUM_STAGED_UPDATES * self.nvme
        self._param, self._grad_down, self._state, self._act = param * ones, grad_down, state * ones, activation * ones
        self._copy, self._trained = copy, trained * ones

    def _fill_seconds(self) -> None:
        instance, machine, n, p = self.instance, self.instance.machine, self.num_units, self.prefetch_units
        num_micro, units = instance.num_micro_batches, instance.units
        index = np.arange(n)[:, None]
        num_refetch_f = (num_micro - 1) * (index > p)
        num_refetch_b = num_micro * (index < n - 1 - p)
        param, state, act, grad, copy = self._param, self._state, self._act, self._grad_down, self._copy
        off_any = self._off_dram + self._off_nvme
        on_device = self._trained * (1 - self._on_cpu)
        num_refetch = num_refetch_f + num_refetch_b
        zero = np.zeros_like(param)
        params_on_nvme, acts_on_nvme = param * self._p_nvme, act * self._off_nvme
        to_nvme = state * self._s_nvme + copy * self._s_nvme + params_on_nvme * self._trained
        h2d = [
            param * self._p_away,
            param * self._p_away * num_refetch + num_micro * act * off_any + (num_micro - 1) * grad,
            on_device * (state * self._s_away + grad + param * self._p_away)
            + self._trained * self._on_cpu * param * (1 - self._p_away),
        ]
        d2h = [
            act * off_any,
            (num_micro - 1) * act * off_any + num_micro * grad,
            on_device * (state * self._s_away + param * self._p_away),
        ]
        read = [params_on_nvme, params_on_nvme * num_refetch + num_micro * acts_on_nvme, to_nvme]
        write = [acts_on_nvme, (num_micro - 1) * acts_on_nvme, to_nvme]
        numel = self._column(u.trained_numel for u in units) * np.ones_like(param)
        cpu = [zero, numel * self._on_cpu * machine.moments_later_frac, numel * self._on_cpu]

        forward = np.array([u.forward_s for u in units])
        backward = np.array([u.backward_s for u in units])
        rerun = self._column(u.rerun_s for u in units) * self._rerun
        fetch = np.maximum(param * self._p_away / machine.h2d_bytes_per_s, params_on_nvme / machine.read_bytes_per_s)
        stall_f = np.maximum(0.0, fetch - _window_before(forward, p)[:, None])
        stall_b = np.maximum(0.0, fetch - _window_before(backward[::-1], p)[::-1, None]) * (num_refetch_b > 0)
        stall_first = stall_f * ((index > p) | (p == 0))
        stall_again = stall_f * (index > p)
        act_down = np.maximum(act * off_any / machine.d2h_bytes_per_s, acts_on_nvme / machine.write_bytes_per_s)
        act_up = np.maximum(act * off_any / machine.h2d_bytes_per_s, acts_on_nvme / machine.read_bytes_per_s)
        stall_act_f = np.maximum(0.0, act_down - np.append(forward[1:], 0.0)[:, None])
        stall_act_b = np.maximum(0.0, act_up - np.append(backward[1:], 0.0)[:, None])
        grad_down_s = grad / machine.d2h_bytes_per_s
        stall_grad = np.maximum(0.0, grad_down_s - np.append(0.0, backward[:-1])[:, None]) * (index > 0)
        device_s = numel * (1 - self._on_cpu) / machine.device_update_numel_per_s
        compute = [
            forward[:, None] + stall_first + stall_act_f,
            (num_micro - 1) * (forward[:, None] + stall_again + stall_act_f)
            + num_micro * (backward[:, None] + rerun + stall_b + stall_act_b + stall_grad),
            device_s,
        ]
        rows: dict[str, list[F64]] = {"compute": compute}
        rows["h2d"] = [x / machine.h2d_bytes_per_s for x in h2d]
        rows["d2h"] = [x / machine.d2h_bytes_per_s for x in d2h]
        rows["pcie"] = [(x + y) / machine.pcie_bytes_per_s for x, y in zip(h2d, d2h, strict=True)]
        rows["read"] = [x / machine.read_bytes_per_s for x in read]
        rows["write"] = [x / machine.write_bytes_per_s for x in write]
        rows["disk"] = [(x + y) / machine.disk_bytes_per_s for x, y in zip(read, write, strict=True)]
        rows["cpu_update"] = [x / machine.cpu_update_numel_per_s for x in cpu]
        rows["dram"] = [
            (h2d[i] + d2h[i] + read[i] + write[i] + cpu[i] * machine.cpu_update_bytes_per_numel)
            / machine.dram_bytes_per_s
            for i in range(3)
        ]
        self.sec: F64 = np.array([[rows[lane][phase] for phase in range(3)] for lane in LANES])
        lane_s = {lane: self.sec[i].sum(axis=0) for i, lane in enumerate(LANES)}
        self.loss_s: F64 = machine.update_loss_frac * lane_s["cpu_update"]
        self.loss_s += machine.overlap_loss_frac * sum(lane_s[lane] for lane in _TRANSFERS)
        self.backward_s: F64 = backward[:, None] + rerun
        self.forward_s: F64 = forward
        up = np.where(self._p_away > 0, fetch, param / machine.h2d_bytes_per_s) * self._trained
        self.tail_s: F64 = up * self._on_cpu
        grads_first = grad_down_s if not instance.clip else grad_down_s * (index == 0)
        self.chain_s: F64 = self._trained * (
            grads_first
            + rows["read"][2]
            + rows["cpu_update"][2]
            + on_device * rows["h2d"][2]
            + device_s
            + self.tail_s
        )  # fmt: skip
        self.prefix_s: F64 = np.array(
            [self.sec[LANES.index(lane), 0] + self.sec[LANES.index(lane), 2] for lane in _PREFIX_LANES]
        )
        self.prefix_tail: tuple[bool, ...] = tuple(lane == "cpu_update" for lane in _PREFIX_LANES)

    @property
    def prefix_lanes(self) -> tuple[str, ...]:
        return _PREFIX_LANES

    def outside_forward_s(self) -> F64:
        """(units,): forward seconds of a step that lie outside unit k's update window."""
        total = float(self.forward_s.sum())
        suffix = total - np.concatenate([[0.0], np.cumsum(self.forward_s)[:-1]])
        result: F64 = suffix + (self.instance.num_micro_batches - 1) * total
        return result

    def evaluate(self, picks: I64) -> Batch:
        """Costs of assignments ``picks`` (assignments, units) of option indices. Slow twin: ``plan.check_plan``."""
        terms, *_ = self._bound_terms(picks)
        return Batch(terms.max(axis=0) + self._pick(self.loss_s, picks).sum(axis=1), *self.bytes_of(picks))

    def bytes_of(self, picks: I64) -> tuple[F64, F64, F64]:
        """Peak bytes on (device, DRAM, NVME), each (assignments,)."""
        points = self.device_points(picks).max(axis=1)
        slack = 1 + self.instance.machine.allocator_slack_frac
        return ((self.instance.device_fixed_nbytes + points) * slack, *self.host_bytes_of(picks))

    def host_bytes_of(self, picks: I64) -> tuple[F64, F64]:
        """Peak bytes on (DRAM, NVME), each (assignments,)."""
        pick = functools.partial(self._pick, picks=picks)
        dram = self.instance.dram_fixed_nbytes + pick(self.dram).sum(axis=1) + pick(self.dram_stage).max(axis=1)
        return dram, pick(self.nvme).sum(axis=1)

    def device_points(self, picks: I64) -> F64:
        """(assignments, 2 units): device bytes at forward 0..n-1, then backward 0..n-1; no slack, nothing fixed."""
        pick = functools.partial(self._pick, picks=picks)
        n, window = self.num_units, min(self.prefetch_units + 1, self.num_units)
        late = pick(self.late)
        base = pick(self.resident).sum(axis=1, keepdims=True) + np.cumsum(pick(self.kept), axis=1)
        base = base + np.cumsum(late[:, ::-1], axis=1)[:, ::-1]
        stage = np.cumsum(np.pad(pick(self.stage), ((0, 0), (1, 0))), axis=1)
        windows = stage[:, window:] - stage[:, :-window]
        staged_f = windows[:, np.minimum(np.arange(n), n - window)]
        staged_b = windows[:, np.maximum(np.arange(n) - window + 1, 0)]
        act = np.pad(pick(self.act_in_flight)[:, :-1], ((0, 0), (1, 0)))
        grad = np.pad(pick(self.grad_in_flight)[:, 1:], ((0, 0), (0, 1)))
        update = pick(self.update_stage)
        pair = update + np.pad(update[:, 1:], ((0, 0), (0, 1)))
        in_flight = np.maximum.accumulate(pair[:, ::-1], axis=1)[:, ::-1]
        at_forward = base + staged_f + pick(self.own_f) + act + in_flight
        at_backward = base + staged_b + pick(self.own_b) + act + grad
        if not self.instance.clip:
            at_backward = at_backward + in_flight
        return np.concatenate([at_forward, at_backward], axis=1)

    def cost(self, picks: Iterable[int]) -> Cost:
        """The cost of one assignment, with lane seconds and the name of what bounds it."""
        one = np.array([list(picks)], dtype=np.int64)
        batch = self.evaluate(one)
        terms, names, lane_total = self._bound_terms(one)
        return Cost(
            step_s=float(batch.step_s[0]),
            device_peak_nbytes=float(batch.device_nbytes[0]),
            dram_peak_nbytes=float(batch.dram_nbytes[0]),
            nvme_peak_nbytes=float(batch.nvme_nbytes[0]),
            bottleneck=names(int(terms[:, 0].argmax())),
            lane_s={lane: float(lane_total[i, 0]) for i, lane in enumerate(LANES)},
        )

    def _bound_terms(self, picks: I64) -> tuple[F64, Any, F64]:
        """Lower bounds on the step (bounds, assignments), a function from bound to its name, and lane totals."""
        clip, num_micro = self.instance.clip, self.instance.num_micro_batches
        units = np.arange(self.num_units)
        sec = self.sec[:, :, units, picks].sum(axis=-1)  # (lanes, 3, assignments)
        first = sec[:, 0] + (sec[:, 2] if clip else 0.0)
        phases = first.max(axis=0) + sec[:, 1].max(axis=0)
        backward = self._pick(self.backward_s, picks)
        if clip:
            outside = num_micro * backward.sum(axis=1, keepdims=True)
        else:
            later = np.cumsum(backward[:, ::-1], axis=1)[:, ::-1]
            outside = (num_micro - 1) * backward.sum(axis=1, keepdims=True) + later
        outside = outside + self.outside_forward_s()
        terms = [phases[None]]
        if not clip:
            terms.append(sec.sum(axis=1))
        tail = self._pick(self.tail_s, picks)
        for lane in range(len(_PREFIX_LANES)):
            done = np.cumsum(self._pick(self.prefix_s[lane], picks), axis=1)
            terms.append((outside + done + (tail if self.prefix_tail[lane] else 0.0)).T)
        terms.append((outside + self._pick(self.chain_s, picks)).T)
        stacked = np.concatenate(terms, axis=0)

        def name(bound: int) -> str:
            if bound == 0:
                top0, top1 = LANES[int(first[:, 0].argmax())], LANES[int(sec[:, 1, 0].argmax())]
                return top0 if top0 == top1 else (top0 if top0 != "compute" else top1)
            left = bound - 1
            if not clip:
                if left < len(LANES):
                    return LANES[left]
                left -= len(LANES)
            row = left // self.num_units
            return _PREFIX_LANES[row] if row < len(_PREFIX_LANES) else "update_chain"

        return stacked, name, sec.sum(axis=1)

    def _pick(self, table: F64, picks: I64) -> F64:
        result: F64 = table[np.arange(self.num_units), picks]
        return result

    def needed(self) -> Bools:
        """(units, options): allowed and not dominated by another allowed option of the same unit.

        Bytes on a tier whose budget holds every unit's largest option at once are not a reason to keep an option.
        """
        instance = self.instance
        most = (
            np.where(self.allowed, self.dram, 0.0).max(axis=1).sum()
            + np.where(self.allowed, self.dram_stage, 0.0).max()
        )
        counts_dram = float(instance.dram_fixed_nbytes + most > instance.dram_budget_nbytes)
        counts_nvme = float(np.where(self.allowed, self.nvme, 0.0).max(axis=1).sum() > instance.nvme_budget_nbytes)
        device = [self.resident, self.late, self.kept, self.stage, self.own_f, self.own_b, self.act_in_flight]
        device += [self.grad_in_flight, self.update_stage]
        host = [self.dram * counts_dram, self.dram_stage * counts_dram, self.nvme * counts_nvme]
        seconds = [self.loss_s, self.backward_s, self.tail_s, self.chain_s]
        lanes = self.sec.reshape(-1, self.num_units, len(OPTIONS))
        stacked = np.concatenate([lanes, self.prefix_s, np.array(device + host + seconds)])
        needed: Any = self.allowed.copy()
        seen: dict[bytes, Bools] = {}
        for unit in range(self.num_units):
            columns = np.flatnonzero(self.allowed[unit])
            values = stacked[:, unit, columns]
            key = values.tobytes() + columns.tobytes()
            if key not in seen:
                seen[key] = _undominated(values)
            needed[unit, columns] = seen[key]
        result: Bools = needed
        return result


def _undominated(values: F64) -> Bools:
    """(rows, options) -> which options no other one beats or equals in every row (of equals the first stays)."""
    num_options = values.shape[1]
    alive: Any = np.ones(num_options, dtype=bool)
    for candidate in range(num_options):
        no_worse: Any = (values <= values[:, [candidate]]).all(axis=0)
        equal = (values == values[:, [candidate]]).all(axis=0)
        no_worse[candidate] = False
        no_worse &= alive & (~equal | (np.arange(num_options) < candidate))
        alive[candidate] = not no_worse.any()
    result: Bools = alive
    return result


def _window_before(seconds: F64, width: int) -> F64:
    """Entry k: the sum of the ``width`` entries before k (fewer at the start)."""
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    ends = np.arange(len(seconds))
    result: F64 = total[ends] - total[np.maximum(0, ends - width)]
    return result
