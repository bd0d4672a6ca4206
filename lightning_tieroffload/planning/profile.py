"""Floor 1. What was measured or estimated about a machine and a model's units: frozen values and their JSON.

Owns the words ``UnitProfile``, ``MachineProfile`` and ``Profile`` (``tieroffload_profile.json``). Decides nothing and
measures nothing: the profiler fills these in, the cost model reads them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from lightning_tieroffload.errors import ConfigError
from lightning_tieroffload.whole_file import parse_json, write_whole

__all__ = [
    "PROFILE_FILE_NAME",
    "REFERENCE_MACHINE",
    "MachineProfile",
    "Profile",
    "UnitProfile",
    "is_quantity",
    "model_key",
]

PROFILE_FILE_NAME = "tieroffload_profile.json"
_FORMAT_VERSION = 1


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


_LARGEST = 1e30


def is_quantity(value: object) -> bool:
    """Whether ``value`` is a finite number, 0 or more, of which sums and quotients are finite too; no flag is."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= _float(value) <= _LARGEST


_MAY_BE_NONE = ("recompute_s", "update_numel", "newborn_grad_nbytes")


def _shown(value: object) -> str:
    return textwrap.shorten(repr(value), 60, placeholder=" ...") if not isinstance(value, int) else f"{_float(value):g}"


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON's integers have no end
        return math.inf


def _from_mapping(cls: type[Any], raw: Mapping[str, Any], where: str) -> Any:
    """Build the dataclass ``cls`` from a JSON object; unknown or missing keys are named, never ignored."""
    _require(isinstance(raw, Mapping), f"{where} must be a JSON object, not {type(raw).__name__}.")
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(raw) - known)
    _require(not unknown, f"{where} has unknown keys {unknown}; known are {sorted(known)}.")
    try:
        return cls(**raw)
    except TypeError as error:
        raise ConfigError(f"{where} is incomplete: {error}.") from error


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """One unit of the model, in execution order, as one micro-batch of one rank sees it.

    ``param_nbytes`` is what a pass needs on the device (the compute copy), ``state_nbytes`` everything else that the
    update reads and writes (low halves or masters, moments). ``activation_nbytes`` is what autograd saves inside the
    unit, ``boundary_nbytes`` the part of it that a recomputed unit must still keep (its input), ``workspace_nbytes``
    the most bytes that are live only while the unit computes. Seconds are of the compute device alone, with no
    transfer beside them, for one micro-batch.
    """

    name: str
    param_numel: int
    param_nbytes: int
    grad_nbytes: int
    state_nbytes: int
    activation_nbytes: int
    forward_s: float
    backward_s: float
    recompute_s: float | None = None
    """Seconds of running forward again inside backward; ``None`` means ``forward_s``."""
    boundary_nbytes: int = 0
    workspace_nbytes: int = 0
    update_numel: int | None = None
    """Trainable elements; ``None`` means all of ``param_numel`` if the unit has gradients, else 0."""
    newborn_grad_nbytes: int | None = None
    """The gradients as autograd makes them, where they are kept and moved in fewer bytes; ``None``: ``grad_nbytes``."""
    can_stream_param: bool = True
    can_move_state: bool = True
    can_recompute: bool = True
    can_offload_activation: bool = True

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if name == "name":
                _require(isinstance(value, str), f"a unit's name is {value!r}; it must be a string.")
                continue
            if name.startswith("can_"):
                _require(isinstance(value, bool), f"unit {self.name}: {name} is {value!r}; it must be true or false.")
                continue
            _require(
                is_quantity(value) or (value is None and name in _MAY_BE_NONE),
                f"unit {self.name}: {name} is {_shown(value)}; it must be a finite number, 0 or more.",
            )

    @property
    def rerun_s(self) -> float:
        """Seconds that recomputing this unit adds to its backward."""
        return self.forward_s if self.recompute_s is None else self.recompute_s

    @property
    def trained_numel(self) -> int:
        """Elements that the optimizer updates each step."""
        if self.update_numel is not None:
            return self.update_numel
        return self.param_numel if self.grad_nbytes > 0 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """Rates of one machine, as one rank gets them. The defaults are the reference machine's, measured 2026-11-29.

    Sources of the defaults (one H200, 16 cores, one disk; docs/log.md holds the tables):
    ``h2d``/``d2h``: page-locked copies of 16 MiB and more. ``pcie``: both directions at once, in total.
    ``dram``: what the prototype moved while the CPU updated two thirds of the layers (28 bytes an element) and the
    device streamed the rest, 73 GB in 0.5 s. A triad's 99e9 leaves its write-allocate reads out, and a CPU update alone
    (4.3e9 elements/s) does not reach the limit. ``disk``: read and write at once, in total.
    ``compute``: 8 N T flop in 1.02 s for the 3.21e9-parameter shape at 16,384 tokens with full recompute; it is a
    training step's rate, not the matmul peak (7.9e14).
    """

    name: str = "reference-h200"
    h2d_bytes_per_s: float = 55.3e9
    d2h_bytes_per_s: float = 55.3e9
    pcie_bytes_per_s: float = 100e9
    dram_bytes_per_s: float = 146e9
    read_bytes_per_s: float = 2.2e9
    write_bytes_per_s: float = 3.1e9
    disk_bytes_per_s: float = 2.2e9
    compute_flop_per_s: float = 4.1e14
    cpu_update_numel_per_s: float = 4.3e9
    device_update_numel_per_s: float = 122e9
    cpu_update_bytes_per_numel: float = 28.0
    """DRAM traffic of one CPU update: 16-bit gradient, fp32 weight and moments in; fp32 and 16-bit copies out."""
    moments_later_frac: float = 0.0
    """Seconds of a second pass, which writes the moments under the next backward, as a share of those of the first; 0
    where one pass writes everything. Rate and traffic above are then the first pass's, which the next forward waits
    for."""
    overlap_loss_frac: float = 0.02
    """Share of a hidden transfer's seconds that shows up in the step all the same (contention for memory, launch
    gaps). Streaming 26 of 28 layers, 0.2 s of copies, cost the prototype less than 0.005 s."""
    update_loss_frac: float = 0.05
    """The same for CPU updates, whose threads also compete with the one that launches kernels. The prototype without a
    clip lost 0.12 s to 0.75 s of hidden updates and 0.2 s of copies; some of it is the first units' wait."""
    allocator_slack_frac: float = 0.03
    """Device memory that the allocator loses to rounding and fragments, as a share of what is asked of it."""
    device_memory_nbytes: int = 139 * 1024**3
    dram_nbytes: int = 126 * 1024**3

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "name":
                _require(isinstance(value, str), f"a machine's name is {value!r}; it must be a string.")
                continue
            may_be_0 = f.name.endswith(("_frac", "_nbytes"))
            _require(
                is_quantity(value) and (may_be_0 or value > 0),
                f"machine {self.name}: {f.name} is {_shown(value)}; it must be a finite number"
                f"{', 0 or more' if may_be_0 else ' above 0'}.",
            )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> MachineProfile:
        """Inverse of ``to_json``; keys left out take the reference machine's figure."""
        machine: MachineProfile = _from_mapping(cls, raw, "machine profile")
        return machine

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MachineProfile:
        """Read a machine profile, or the machine part of a ``tieroffload_profile.json``."""
        raw = _read_json(path)
        return cls.from_json(raw["machine"] if isinstance(raw, Mapping) and "machine" in raw else raw)


REFERENCE_MACHINE = MachineProfile()


def model_key(units: Sequence[UnitProfile]) -> str:
    """A short fingerprint of the model's shape: names, counts and bytes of parameters, no measured figure."""
    shape = [(u.name, u.param_numel, u.param_nbytes, u.grad_nbytes, u.state_nbytes) for u in units]
    return hashlib.sha256(json.dumps(shape).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What ``tieroffload_profile.json`` holds: a machine, the units, and the batch that they were measured with."""

    machine: MachineProfile
    units: tuple[UnitProfile, ...]
    batch_key: str = ""
    """Micro-batch shape as text, e.g. ``"8x2048"``; activation bytes and seconds hold for this shape only."""
    source: str = "measured"
    """``"measured"`` by the profiler, or ``"estimated"`` from a configuration with no run."""
    device_fixed_nbytes: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)

    def unit(self, name: str) -> UnitProfile | None:
        """The line of the unit called ``name``, if there is one."""
        return next((unit for unit in self.units if unit.name == name), None)

    def grown(self, growth: float) -> Profile:
        """The profile of batches ``growth`` times as large: bytes of activations and seconds in proportion."""
        lines = (
            dataclasses.replace(
                unit,
                activation_nbytes=round(unit.activation_nbytes * growth),
                boundary_nbytes=round(unit.boundary_nbytes * growth),
                workspace_nbytes=round(unit.workspace_nbytes * growth),
                forward_s=unit.forward_s * growth,
                backward_s=unit.backward_s * growth,
                recompute_s=None if unit.recompute_s is None else unit.recompute_s * growth,
            )
            for unit in self.units
        )
        return dataclasses.replace(self, units=tuple(lines))

    @property
    def model_key(self) -> str:
        return model_key(self.units)

    @property
    def key(self) -> tuple[str, str, str]:
        """(model shape, batch shape, machine): a profile is reused only where all three are equal."""
        return (self.model_key, self.batch_key, self.machine.name)

    def matches(self, units: Sequence[UnitProfile], batch_key: str, machine_name: str) -> bool:
        """Whether this profile may stand in for measuring ``units`` at ``batch_key`` on ``machine_name``."""
        return self.key == (model_key(units), batch_key, machine_name)

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": _FORMAT_VERSION,
            "key": list(self.key),
            "batch_key": self.batch_key,
            "source": self.source,
            "device_fixed_nbytes": self.device_fixed_nbytes,
            "machine": self.machine.to_json(),
            "units": [dataclasses.asdict(unit) for unit in self.units],
            "notes": dict(self.notes),
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Profile:
        """Inverse of ``to_json``. Raises ``ConfigError`` on another format or on a key that its contents contradict."""
        _require(isinstance(raw, Mapping), "a profile must be a JSON object.")
        version = raw.get("format_version")
        _require(
            version == _FORMAT_VERSION,
            f"profile has format_version {version!r}; this library reads {_FORMAT_VERSION}. Measure again.",
        )
        missing = sorted({"machine", "units"} - set(raw))
        _require(not missing, f"profile lacks {missing}. Measure again.")
        for name, kind, shown in (
            ("units", list, "a list"),
            ("notes", Mapping, "an object"),
            ("batch_key", str, "text"),
            ("source", str, "text"),
        ):
            _require(
                name not in raw or isinstance(raw[name], kind), f"the profile's {name} must be {shown}. Measure again."
            )
        fixed = raw.get("device_fixed_nbytes", 0)
        _require(
            is_quantity(fixed),
            f"the profile's device_fixed_nbytes is {_shown(fixed)}; it must be a finite number, 0 or more.",
        )
        profile = cls(
            machine=MachineProfile.from_json(raw["machine"]),
            units=tuple(_from_mapping(UnitProfile, unit, f"units[{i}]") for i, unit in enumerate(raw["units"])),
            batch_key=raw.get("batch_key", ""),
            source=raw.get("source", "measured"),
            device_fixed_nbytes=fixed,
            notes=dict(raw.get("notes", {})),
        )
        key = raw.get("key")
        _require(
            key is None or key == list(profile.key),
            f"profile says its key is {key}, its contents say {list(profile.key)}: it was edited. Measure again.",
        )
        return profile

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write atomically: a reader sees the old profile or the new one, never half of one."""
        write_whole(path, json.dumps(self.to_json(), indent=1), is_synced=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        return cls.from_json(_read_json(path))


def _read_json(path: str | os.PathLike[str]) -> Any:
    try:
        with open(path, encoding="utf-8") as stream:
            return parse_json(stream.read())
    except OSError as error:
        raise ConfigError(f"cannot read {os.fspath(path)}: {error.strerror or error}.") from error
    except ValueError as error:
        raise ConfigError(f"{os.fspath(path)} is not JSON: {error}.") from error
