"""Floor 8. `tieroffload plan` and `tieroffload estimate`: what a job would take, from a configuration and no run.

Translation only: reads options, has the profile estimated (or takes a measured one), calls the planner, prints a table
or JSON. Every budget is an option; "auto" is the machine profile's memory less a margin, so that a plan can be made for
a machine that is not this one.

[Note: a budget for another machine] A ``device_budget`` that is given covers here what it covers in a run, see [Note:
what a budget covers]: what the engine holds, and activations where the plan may choose or sends them away, but neither
the loss nor any kernel's workspace. The forecast's peak is all of it, and has to fit the machine. ``auto`` is most of
the machine's memory and has to hold everything.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_tieroffload.cli.options import named_settings, print_json, refuse_rest, take_settings
from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import TierOffloadConfig, refuse_what_is_not_there
from lightning_tieroffload.errors import ConfigError, InfeasiblePlanError
from lightning_tieroffload.planning.cost_model import (
    ACTIVATION_CHOICES,
    OPTIONS,
    ActivationChoice,
    Instance,
    UpdatePlace,
)
from lightning_tieroffload.planning.plan import Plan, alive_peak_nbytes, check_plan, held_peak_nbytes, restated
from lightning_tieroffload.planning.profile import REFERENCE_MACHINE, MachineProfile, Profile
from lightning_tieroffload.report import format_seconds
from lightning_tieroffload.sizes import format_nbytes
from lightning_tieroffload.whole_file import parse_json

__all__ = ["estimate", "instance_from", "plan", "profile_from"]

_AUTO_DEVICE_FRAC = 0.9
_AUTO_DRAM_FRAC = 0.8
_PREFETCH_UNITS = (2, 1)
_ACTIVATIONS = {
    "auto": ACTIVATION_CHOICES,
    "keep": (ActivationChoice.KEEP,),
    "recompute": (ActivationChoice.RECOMPUTE,),
    "offload": (ActivationChoice.OFFLOAD_DRAM, ActivationChoice.OFFLOAD_NVME),
}
_MEANT = frozenset(
    """
    device_budget dram_budget nvme_budget nvme_paths units activations update_on state_home planner plan_file
    prefetch_units
    """.split()
)
"""The settings that a plan depends on; others mean something to a run only."""
_PLACES = {"cpu": (UpdatePlace.CPU,), "device": (UpdatePlace.DEVICE,)}

_Model = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG_OR_MODEL",
        help="A model directory, a config.json, a profile, or a size of bench train (its model with --no-recompute).",
    ),
]
_Batch = Annotated[int, typer.Option(min=1, max=2**20, help="Sequences a micro-batch.")]
_Seq = Annotated[int, typer.Option(min=1, max=2**24, help="Tokens a sequence.")]
_Accum = Annotated[int, typer.Option(min=1, max=2**20, help="Micro-batches a step.")]
_Clip = Annotated[
    float, typer.Option(min=0.0, help="Largest gradient norm; 0: no clipping, updates start in backward.")
]
_Machine = Annotated[
    str, typer.Option(help="A machine profile or tieroffload_profile.json; else the reference machine.")
]
_Precision = Annotated[str, typer.Option(help="bf16-mixed (fp32 weights), bf16-true or 32-true.")]
_Save = Annotated[str, typer.Option(help="Write the plan to this file, which --plan-file reads.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(frozen=True, slots=True)
class _Job:
    batch: int
    seq: int
    grad_accum: int
    clip: float
    precision: str

    @property
    def num_tokens(self) -> int:
        return self.batch * self.seq * self.grad_accum


def profile_from(source: str, machine: MachineProfile | None, job: Any, units: Any = "auto") -> Profile:
    """A measured profile if ``source`` is one, else an estimate from a model's configuration.

    Raises ``ConfigError`` for a profile of another batch shape than the job's.
    """
    path = Path(source)
    if os.path.isfile(path) and path.suffix == ".json":
        try:
            raw = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source} is not JSON: {error}.") from error
        if isinstance(raw, dict) and "units" in raw and "machine" in raw:
            try:
                profile = Profile.from_json(raw)
            except ConfigError as error:
                raise ConfigError(f"{source}: {error}") from None
            wanted = f"{job.batch}x{job.seq}"
            if profile.batch_key not in ("", wanted):
                raise ConfigError(
                    f"{source} was measured with a batch of {profile.batch_key}, not {wanted}. Ask for that batch with "
                    "--batch and --seq, or measure again."
                )
            return profile
    from lightning_tieroffload.planning.estimate import estimate_profile

    machine = machine or REFERENCE_MACHINE
    return estimate_profile(source, machine, batch=job.batch, seq=job.seq, precision=job.precision, units=units)


def instance_from(profile: Profile, config: TierOffloadConfig, *, grad_accum: int = 1, clip: bool = True) -> Instance:
    """The planning problem that these settings pose; "auto" budgets are the profile's machine's less a margin."""
    machine = profile.machine
    device = round(_AUTO_DEVICE_FRAC * machine.device_memory_nbytes)
    dram = round(_AUTO_DRAM_FRAC * machine.dram_nbytes)
    instance = Instance.from_profile(
        profile,
        device_budget_nbytes=device if config.device_budget == "auto" else int(config.device_budget),
        dram_budget_nbytes=dram if config.dram_budget == "auto" else int(config.dram_budget),
        nvme_budget_nbytes=0 if config.nvme_budget == "auto" else int(config.nvme_budget),
        num_micro_batches=grad_accum,
        clip=clip,
        prefetch_units=_PREFETCH_UNITS if config.prefetch_units == "auto" else (int(config.prefetch_units),),
        update_places=_PLACES.get(config.update_on, tuple(UpdatePlace)),
        activations=_ACTIVATIONS[config.activations],
    )
    if config.state_home == "nvme":
        instance = dataclasses.replace(instance, options=_options(instance, state_on_flash=True))
    return instance if config.device_budget == "auto" else _as_a_run_counts(instance, config.activations)


def _options(instance: Instance, *, state_on_flash: bool) -> tuple[tuple[str, ...], ...]:
    """Per unit what the settings allow; with ``state_on_flash`` without state elsewhere, where there is state."""
    found = []
    for unit, row in zip(instance.units, instance.allowed(), strict=True):
        allowed = [option for option, is_allowed in zip(OPTIONS, row, strict=True) if is_allowed]
        if state_on_flash and unit.trained_numel and unit.can_move_state:
            allowed = [option for option in allowed if option.state_home is Tier.NVME]
        if not allowed:
            raise ConfigError(f'unit {unit.name} has no option left with state_home="nvme" and the other settings.')
        found.append(tuple(option.code for option in allowed))
    return tuple(found)


def _as_a_run_counts(instance: Instance, activations: str) -> Instance:
    """What is not the engine's is beside its budget; see [Note: a budget for another machine]."""
    if activations == "recompute" and instance.options is None:
        # A unit without activations that count could not be recomputed by the rules, and is.
        instance = dataclasses.replace(instance, options=_options(instance, state_on_flash=False))
    counts = activations in ("auto", "offload")
    units = []
    for unit in instance.units:
        frac = int(counts and (unit.can_recompute or unit.can_offload_activation))  # the loss can do neither
        saved, boundary = frac * unit.activation_nbytes, frac * unit.boundary_nbytes
        units.append(dataclasses.replace(unit, workspace_nbytes=0, activation_nbytes=saved, boundary_nbytes=boundary))
    return dataclasses.replace(instance, units=tuple(units))


def _with_peak(instance: Instance, profile: Profile, config: TierOffloadConfig, made: Plan) -> Plan:
    """With a budget that is given the forecast's peak is what a run allocates in all, the budget filled."""
    if config.device_budget == "auto":
        return made
    choices = [line.choice for line in made.units]
    kept_nbytes = alive_peak_nbytes(instance.units, choices) if config.activations == "auto" else 0
    peak_nbytes = instance.device_fixed_nbytes + held_peak_nbytes(
        profile.units,
        choices,
        max(instance.device_budget_nbytes, made.peak_nbytes) - kept_nbytes,
        num_micro_batches=instance.num_micro_batches,
    )
    return dataclasses.replace(made, forecast=dataclasses.replace(made.forecast, device_peak_nbytes=peak_nbytes))


def _why_not_on_machine(instance: Instance, made: Plan) -> str:
    """Why a plan within its budgets does not fit the machine all the same; empty if it does."""
    machine, peak_nbytes = instance.machine, made.forecast.device_peak_nbytes
    if peak_nbytes <= machine.device_memory_nbytes:
        return ""
    return (
        f"the device would hold {format_nbytes(peak_nbytes)} at the peak, device_budget "
        f"{format_nbytes(instance.device_budget_nbytes)} and what compute allocates beside it, and {machine.name} has "
        f"{format_nbytes(machine.device_memory_nbytes)}. Lower device_budget, or take smaller batches."
    )


def _pose(ctx: typer.Context, source: str, machine: str, job: _Job) -> tuple[TierOffloadConfig, Instance, Profile]:
    config, rest = take_settings(list(ctx.args))
    refuse_rest(rest)
    refuse_what_is_not_there(config)
    _refuse_unmeant(config, ctx.args)
    if config.state_home == "nvme" and config.nvme_budget == "auto":
        raise ConfigError(
            'state_home="nvme" needs flash, and a plan for any machine needs how much: give nvme_budget too, for '
            "example --nvme-budget 500GiB."
        )
    if config.nvme_paths and config.nvme_budget == "auto":
        raise ConfigError(
            "nvme_paths says where flash is, and a plan for any machine needs how much: give nvme_budget too, for "
            "example --nvme-budget 500GiB."
        )
    loaded = MachineProfile.load(machine) if machine else None
    profile = profile_from(source, loaded, job, config.units)
    instance = instance_from(profile, config, grad_accum=job.grad_accum, clip=job.clip > 0)
    return config, instance, profile


def _refuse_unmeant(config: TierOffloadConfig, arguments: Sequence[str]) -> None:
    """Refuse options that change no plan; of a file's or the environment's settings, which are a run's too, say it."""
    unmeant = [key for key in config.chosen() if key not in _MEANT]
    if config.plan_file is not None and "planner" in config.chosen():
        unmeant.append("planner")
    if not unmeant:
        return
    named = [key for key in unmeant if key in named_settings(arguments)]
    rest = (
        "and plan_file is not planned anew"
        if named == ["planner"]
        else f"which depends on {', '.join(sorted(_MEANT))}, --machine and the job's own options"
    )
    if named:
        raise ConfigError(f"{', '.join(named)}: no part of a plan or an estimate, {rest}. Leave it out here.")
    print(f"tieroffload: not used by a plan or an estimate: {', '.join(unmeant)}.", file=sys.stderr)


@contextmanager
def _quiet_solver() -> Iterator[None]:
    """The solver's library writes lines for its own developers to file descriptor 2, past Python's ``sys.stderr``."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # closed: nothing can be written
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    ours, own = sys.stderr, os.fdopen(kept, "w", buffering=1, errors="backslashreplace", closefd=False)
    try:
        is_ours = ours.fileno() == 2
    except (OSError, ValueError):  # somebody's object
        is_ours = False
    os.dup2(nothing, 2)
    if is_ours:
        sys.stderr = own
    try:
        yield
    finally:
        if is_ours:
            sys.stderr = ours
        own.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _made(instance: Instance, config: TierOffloadConfig) -> Plan:
    """The plan of ``plan_file``, with what it comes to for this job; without one the planner's."""
    if config.plan_file is None:
        from lightning_tieroffload.planning.solver import best_plan

        with _quiet_solver():
            return best_plan(instance, config.planner)
    from lightning_tieroffload.planning.simulator import with_forecast

    saved = Plan.load(config.plan_file)
    try:
        saved = restated(instance, saved)
    except ConfigError as error:
        raise ConfigError(f"plan_file {config.plan_file}: {error}") from None
    check_plan(instance, saved)
    return with_forecast(instance, saved)


def _budgets(instance: Instance) -> dict[str, int]:
    return {
        "device": instance.device_budget_nbytes,
        "dram": instance.dram_budget_nbytes,
        "nvme": instance.nvme_budget_nbytes,
    }


def _document(instance: Instance, profile: Profile, made: Plan, job: _Job) -> dict[str, Any]:
    return {
        "model": {
            "num_units": len(instance.units),
            "param_numel": sum(unit.param_numel for unit in instance.units),
            "profile": profile.source,
        },
        "machine": profile.machine.name,
        "budget_nbytes": _budgets(instance),
        "peak_nbytes": {
            "device": made.peak_nbytes,
            "dram": made.dram_peak_nbytes,
            "nvme": made.nvme_peak_nbytes,
        },
        "forecast": made.forecast.to_json(),
        "tokens_per_s": job.num_tokens / made.forecast.step_s if made.forecast.step_s > 0 else None,
    }


def plan(
    ctx: typer.Context,
    config_or_model: _Model,
    batch: _Batch = 1,
    seq: _Seq = 1024,
    grad_accum: _Accum = 1,
    clip: _Clip = 1.0,
    machine: _Machine = "",
    precision: _Precision = "bf16-mixed",
    save: _Save = "",
    json_: _Json = False,
) -> None:
    """Make a plan for a model and these budgets, and show it, its forecast, and what one more GiB would buy."""
    from lightning_tieroffload.planning.solver import value_of_more

    job = _Job(batch, seq, grad_accum, clip, precision)
    config, instance, profile = _pose(ctx, config_or_model, machine, job)
    made = _with_peak(instance, profile, config, _made(instance, config))
    if save:
        try:
            made.save(save)
        except OSError as error:
            raise ConfigError(f"--save {save} cannot be written: {error.strerror}. Name a file that can.") from None
    with _quiet_solver():
        saved_s = value_of_more(instance, made, forecast=True)
    if json_:
        document = _document(instance, profile, made, job)
        print_json({**document, "plan": made.to_json(), "one_more_gib_saves_s": saved_s})
        return
    from rich.console import Console

    console = Console()
    console.print(made.as_table())
    tokens = job.num_tokens / made.forecast.step_s if made.forecast.step_s > 0 else 0.0
    basis = "" if profile.source == "measured" else " (estimated, nothing was run)"
    console.print(
        f"{format_seconds(made.forecast.step_s)} a step, {tokens:,.0f} tokens/s{basis} on {profile.machine.name}; "
        f"bound by {made.forecast.bottleneck}."
    )
    if config.device_budget != "auto":
        console.print(
            f"Device: about {format_nbytes(made.forecast.device_peak_nbytes)} in all, with what compute "
            "allocates beside device_budget."
        )
    if why := _why_not_on_machine(instance, made):
        console.print(f"Warning: {why}")
    gains = [f"{tier} {format_seconds(seconds)}" for tier, seconds in saved_s.items()]
    console.print(f"One more GiB would save, per step: {', '.join(gains)}.")
    if made.note:
        console.print(f"Note: {made.note}.")


def estimate(
    ctx: typer.Context,
    config_or_model: _Model,
    batch: _Batch = 1,
    seq: _Seq = 1024,
    grad_accum: _Accum = 1,
    clip: _Clip = 1.0,
    machine: _Machine = "",
    precision: _Precision = "bf16-mixed",
    json_: _Json = False,
) -> None:
    """Say whether a model with this batch fits a machine, with how many bytes per tier and at how many tokens/s."""
    job = _Job(batch, seq, grad_accum, clip, precision)
    config, instance, profile = _pose(ctx, config_or_model, machine, job)
    document: dict[str, Any]
    try:
        made = _with_peak(instance, profile, config, _made(instance, config))
        if why := _why_not_on_machine(instance, made):
            raise InfeasiblePlanError(why, tier=Tier.DEVICE.name)
    except InfeasiblePlanError as error:
        document = {
            "fits": False,
            "machine": profile.machine.name,
            "budget_nbytes": _budgets(instance),
            "tier": error.tier,
            "least_budget_nbytes": error.least_budget_nbytes,
            "why": str(error),
        }
        text = f"does not fit: {error}"
    else:
        document = {"fits": True, **_document(instance, profile, made, job)}
        on_tiers = ", ".join(f"{tier} {format_nbytes(n)}" for tier, n in document["peak_nbytes"].items() if n)
        text = (
            f"fits: {document['tokens_per_s'] or 0.0:,.0f} tokens/s, {format_seconds(made.forecast.step_s)} a step, "
            f"bound by {made.forecast.bottleneck}; {on_tiers}"
        )
        if config.device_budget != "auto":
            text += (
                f"; on the device about {format_nbytes(made.forecast.device_peak_nbytes)} in all, with what "
                "compute allocates beside device_budget"
            )
    if json_:
        print_json(document)
    else:
        print(f"{config_or_model}, {job.batch} x {job.seq} tokens x {job.grad_accum}, {profile.machine.name}: {text}")
