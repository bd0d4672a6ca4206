"""Floor 2. The one configuration class, and the only door through which settings come in.

Owns: reading keyword arguments, mappings, YAML and JSON files and the environment; checking types and ranges; turning
"auto" budgets into numbers (`resolve_budgets`). Nothing else in the package reads the environment. Does not import
torch, so that a launcher can check a file without waiting for it.

[Note: margins] What "auto" leaves free. Memory that is measured as free is not all ours: libraries allocate later
(cuBLAS workspaces, data loading, the page cache that keeps the file system quick), and a budget met to the last byte
ends in the kernel's out-of-memory killer, which says nothing. So
    host   min(what cgroups, Slurm and the host have free) / processes on this host, minus max(10 %, 512 MiB),
           but the margin is never more than half;
    CUDA   min(free + what torch's allocator holds unused, the per-process fraction's rest), minus max(5 %, 512 MiB),
           but the margin is never more than half; two fifths of that, since activations, autocast's copies and the
           loss are the script's own memory, and nobody has measured them at the start;
    flash  free bytes of each file system once / processes on this host, minus 10 %.
Without a GPU the DEVICE tier is a quarter of the host part and DRAM the other three quarters: one number of bytes
must never be promised to both. Memory that already belongs to what the engine will adopt (the model's parameters)
counts as free, since it changes hands.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_tieroffload.errors import ConfigError, UnsupportedError
from lightning_tieroffload.host_limits import cgroup_limits, host_available_nbytes
from lightning_tieroffload.sizes import GiB, KiB, MiB, format_nbytes, parse_nbytes, shown

if TYPE_CHECKING:
    import torch

__all__ = [
    "CONFIG_ENVIRONMENT_KEY",
    "CUDA_DEVICE_FRAC",
    "MOST_PREFETCH_UNITS",
    "ResolvedBudgets",
    "TierOffloadConfig",
    "cuda_allocator_is_tuned",
    "local_world_size",
    "malloc_is_tuned",
    "refuse_repeated_keys",
    "refuse_what_is_not_there",
    "resolve_budgets",
    "visible_devices",
]

_log = logging.getLogger("lightning_tieroffload")

CONFIG_ENVIRONMENT_KEY = "TIEROFFLOAD_CONFIG"

Auto = Literal["auto"]

_HOST_MARGIN_FRAC = 0.10
_CUDA_MARGIN_FRAC = 0.05
CUDA_DEVICE_FRAC = 0.4
MOST_PREFETCH_UNITS = 1024
_NVME_MARGIN_FRAC = 0.10
_LEAST_MARGIN_NBYTES = 512 * MiB
_CPU_DEVICE_FRAC = 0.25

_TRAINER_OWNED = frozenset(
    """
    accumulate_grad_batches accumulation_steps adam_beta1 adam_beta2 adam_epsilon amp amp_backend amp_level autocast
    batch_size betas bf16 clip clip_grad clip_grad_norm clip_grad_value clip_norm dataloader_num_workers devices dtype
    epochs eps epsilon eval_batch_size fp16 grad_accum grad_accum_steps grad_accumulation grad_clip grad_clip_norm
    gradient_accumulation gradient_accumulation_steps gradient_clip_algorithm gradient_clip_val gradient_clipping
    learning_rate loss_scale lr lr_scheduler lr_scheduler_type max_epochs max_grad_norm max_steps micro_batch_size
    mixed_precision momentum num_devices num_epochs num_nodes num_processes num_train_epochs optimizer optimizers
    per_device_eval_batch_size per_device_train_batch_size precision scheduler seed tf32 train_batch_size
    train_micro_batch_size_per_gpu warmup_ratio warmup_steps weight_decay zero_optimization
    """.split()
)

# ---------------------------------------------------------------- reading one value


def _refuse(key: str, value: object, allowed: str, hint: str = "") -> ConfigError:
    return ConfigError(f"{key}={shown(value)} is not allowed. Allowed: {allowed}.{hint}")


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() == "auto"


def _budget(key: str, value: object) -> int | Auto:
    if _is_auto(value):
        return "auto"
    return parse_nbytes(value, key=key)  # type: ignore[arg-type]  # it refuses other types itself, naming the key


def _optional_budget(key: str, value: object) -> int | None:
    if isinstance(value, str) and value.strip().lower() == "none":
        return None
    return parse_nbytes(value, key=key)  # type: ignore[arg-type]


def _integer(key: str, value: object, least: int, most: int, *, auto: bool = False) -> int:
    allowed = f"a whole number from {least} to {most}" + (' or "auto"' if auto else "")
    number: object = value
    if isinstance(value, str):
        # Environment variables and command lines bring numbers as strings.
        try:
            number = int(value.strip())
        except ValueError:
            raise _refuse(key, value, allowed) from None
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
        raise _refuse(key, value, allowed)
    return number


def _integer_reader(least: int, most: int) -> Callable[[str, object], int]:
    return lambda key, value: _integer(key, value, least, most)


def _auto_integer_reader(least: int, most: int) -> Callable[[str, object], int | Auto]:
    return lambda key, value: "auto" if _is_auto(value) else _integer(key, value, least, most, auto=True)


def _block_nbytes(key: str, value: object) -> int | Auto:
    if _is_auto(value):
        return "auto"
    nbytes = parse_nbytes(value, key=key)  # type: ignore[arg-type]
    if not 4 * KiB <= nbytes <= GiB or nbytes % (4 * KiB):
        raise _refuse(key, value, '4 KiB to 1 GiB in multiples of 4 KiB, or "auto"')
    return nbytes


def _seconds(key: str, value: object) -> float:
    allowed = "a number of seconds greater than 0"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _refuse(key, value, allowed)
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        raise _refuse(key, value, allowed) from None
    if not 0 < seconds < math.inf:
        raise _refuse(key, value, allowed)
    return seconds


def _flag(key: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
    word = str(value).strip().lower()
    if isinstance(value, (str, int)) and word in words:
        return words[word]
    raise _refuse(key, value, "true or false")


def _choice_reader(
    *choices: str, aliases: Mapping[str, str] | None = None, meant: Mapping[str, str] | None = None
) -> Callable[[str, object], str]:
    """Aliases are taken; a word in ``meant`` is refused, and the message names what it stands for."""

    def read(key: str, value: object) -> str:
        word = str(value).strip().lower()
        word = (aliases or {}).get(word, word)
        if word in choices and not isinstance(value, bool):
            return word
        nearest = [meant[word]] if meant and word in meant else difflib.get_close_matches(word, choices, n=1)
        hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
        raise _refuse(key, value, ", ".join(f'"{choice}"' for choice in choices), hint)

    return read


def _path(key: str, value: object) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise _refuse(key, value, "a path")
    text = os.fspath(value)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise _refuse(key, value, "a path that is not empty")
    expanded = os.path.expanduser(os.path.expandvars(text))
    if unset := re.search(r"\$\{?(\w+)", expanded):
        raise _refuse(key, value, f"a path whose variables are set; {unset[1]} is not in the environment")
    if "://" in expanded:
        raise _refuse(key, value, "a path of the file system; addresses of other stores mean nothing here")
    # Made absolute here, once: a process that is started in another folder must mean the same place.
    return os.path.abspath(expanded)


def _optional_path(key: str, value: object) -> str | None:
    return None if isinstance(value, str) and value.strip().lower() == "none" else _path(key, value)


def _optional_directory(key: str, value: object) -> str | None:
    path = _optional_path(key, value)
    if path is not None and os.path.exists(path) and not os.path.isdir(path):
        raise _refuse(key, value, "a directory, or one that can be made; this is a file")
    return path


def _paths(key: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (str, os.PathLike)):
        return (_path(key, value),)
    if not isinstance(value, (list, tuple)):
        raise _refuse(key, value, "a path or a list of paths")
    paths = tuple(_path(f"{key}[{index}]", entry) for index, entry in enumerate(value))
    for index, path in enumerate(paths):
        if path in paths[:index]:
            raise _refuse(key, path, "each path once: striping over one folder twice gains nothing")
    return paths


def _names(key: str, value: object, allowed: str) -> tuple[str, ...]:
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, (list, tuple, set, frozenset)):
        raise _refuse(key, value, allowed)
    names: list[str] = []
    for entry in sorted(entries, key=str) if isinstance(entries, (set, frozenset)) else entries:
        if not isinstance(entry, str) or not entry.strip():
            raise _refuse(key, value, allowed)
        names.append(entry.strip())
    if not names:
        raise _refuse(key, value, allowed)
    return tuple(dict.fromkeys(names))


def _units(key: str, value: object) -> Auto | tuple[str, ...]:
    return "auto" if _is_auto(value) else _names(key, value, '"auto" or a list of class names, such as ["GPT2Block"]')


_DEBUG_CHOICES = ("delays", "no_overlap", "poison")
_DEBUG_ALLOWED = ", ".join(f'"{choice}"' for choice in _DEBUG_CHOICES)


def _debug(key: str, value: object) -> frozenset[str]:
    if (isinstance(value, str) and value.strip().lower() in ("", "none")) or value is False:
        return frozenset()
    if isinstance(value, (list, tuple, set, frozenset)) and not value:
        return frozenset()
    read = _choice_reader(*_DEBUG_CHOICES)
    return frozenset(read(key, name) for name in _names(key, value, f"any of {_DEBUG_ALLOWED}"))


# ---------------------------------------------------------------- the configuration


@dataclass(frozen=True, slots=True, kw_only=True, init=False)
class TierOffloadConfig:
    """All settings, checked and frozen. `None` for any of them means its default.

    Sizes are `int` bytes or strings such as "22GiB"; "auto" is measured at the start (`resolve_budgets`).

    Raises:
        ConfigError: an unknown key (it suggests the nearest), a key that the trainer owns, a wrong type or range.
    """

    device_budget: int | Auto = "auto"
    dram_budget: int | Auto = "auto"
    nvme_budget: int | Auto = "auto"
    nvme_paths: tuple[str, ...] = ()
    units: Auto | tuple[str, ...] = "auto"
    activations: str = "auto"
    optimizer_kernel: str = "auto"
    master_weights: str = "as_given"
    update_on: str = "auto"
    state_dtype: str = "fp32"
    state_home: str = "auto"
    planner: str = "ilp"
    plan_file: str | None = None
    profile_steps: int | Auto = "auto"
    verify_reads: bool = True
    prefetch_units: int | Auto = "auto"
    io_threads: int | Auto = "auto"
    block_nbytes: int | Auto = "auto"
    nvme_write_budget: int | None = None
    io_timeout_s: float = 30.0
    checkpoint_format: str = "full"
    debug: frozenset[str] = frozenset()
    trace_path: str | None = None
    trace_steps: int = 3
    # Which settings somebody chose; `merged_over` must tell a chosen "auto" from one that nobody mentioned.
    _chosen: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        device_budget: int | str | None = None,
        dram_budget: int | str | None = None,
        nvme_budget: int | str | None = None,
        nvme_paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
        units: str | Iterable[str] | None = None,
        activations: str | None = None,
        optimizer_kernel: str | None = None,
        master_weights: str | None = None,
        update_on: str | None = None,
        state_dtype: str | None = None,
        state_home: str | None = None,
        planner: str | None = None,
        plan_file: str | os.PathLike[str] | None = None,
        profile_steps: int | Auto | None = None,
        verify_reads: bool | None = None,
        prefetch_units: int | str | None = None,
        io_threads: int | str | None = None,
        block_nbytes: int | str | None = None,
        nvme_write_budget: int | str | None = None,
        io_timeout_s: float | None = None,
        checkpoint_format: str | None = None,
        debug: str | Iterable[str] | None = None,
        trace_path: str | os.PathLike[str] | None = None,
        trace_steps: int | str | None = None,
        **unknown: object,
    ) -> None:
        # The signature is for people and editors; `_READERS` is the schema, and a test holds the two together.
        given: dict[str, object] = {key: value for key, value in locals().items() if key in _READERS}
        _refuse_unknown(unknown)
        chosen = frozenset(key for key, value in given.items() if value is not None)
        for key in _READERS:
            value = _READERS[key](key, given[key]) if key in chosen else _DEFAULTS[key]
            object.__setattr__(self, key, value)
        object.__setattr__(self, "_chosen", chosen)

    @classmethod
    def from_kwargs(cls, **kw: Any) -> TierOffloadConfig:
        """The configuration that these keyword arguments make."""
        return cls(**kw)

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any], *, where: str = "configuration") -> TierOffloadConfig:
        """The configuration in a mapping, as YAML and JSON give it. `where` is for the error message."""
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{where} must be a mapping of settings, not {shown(settings)}.")
        not_names = [key for key in settings if not isinstance(key, str)]
        if not_names:
            raise ConfigError(f"{where}: the key {not_names[0]!r} is not a name. Allowed: {', '.join(_READERS)}.")
        try:
            return cls(**settings)
        except ConfigError as error:
            if where == "configuration":
                raise
            raise ConfigError(f"{where}: {error}") from None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> TierOffloadConfig:
        """The configuration in `TIEROFFLOAD_CONFIG` (JSON); defaults where it is not set."""
        text = (os.environ if environ is None else environ).get(CONFIG_ENVIRONMENT_KEY, "")
        if not text.strip():
            return cls()
        try:
            settings = json.loads(text, object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"The environment variable {CONFIG_ENVIRONMENT_KEY} is not JSON: {error}.") from None
        return cls.from_mapping(settings, where=f"environment variable {CONFIG_ENVIRONMENT_KEY}")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> TierOffloadConfig:
        """The configuration in a YAML or JSON file, either alone or as its `tieroffload_config:` block."""
        content = _yaml_in(path)
        settings = {} if content is None else content
        if isinstance(settings, Mapping) and "tieroffload_config" in settings:
            settings = settings["tieroffload_config"] or {}
        return cls.from_mapping(settings, where=os.fspath(path))

    def merged_over(self, base: TierOffloadConfig) -> TierOffloadConfig:
        """What was chosen here, and from `base` what was not."""
        return TierOffloadConfig(**{**base.chosen(), **self.chosen()})

    def replaced(self, **kw: Any) -> TierOffloadConfig:
        """A copy with these settings changed."""
        return TierOffloadConfig(**kw).merged_over(self)

    def to_dict(self) -> dict[str, Any]:
        """Every setting, defaults too, as JSON knows types. `from_mapping` reads it back equal."""
        return {key: _as_json(getattr(self, key)) for key in _READERS}

    def to_json(self) -> str:
        """The chosen settings as JSON, for `TIEROFFLOAD_CONFIG`: a child process must still see what was not chosen."""
        return json.dumps({key: _as_json(value) for key, value in self.chosen().items()}, sort_keys=True)

    def chosen(self) -> dict[str, Any]:
        """The settings that somebody chose, as they were understood."""
        return {key: getattr(self, key) for key in _READERS if key in self._chosen}


_Reader = Callable[[str, object], object]
_READERS: dict[str, _Reader] = {
    "device_budget": _budget,
    "dram_budget": _budget,
    "nvme_budget": _budget,
    "nvme_paths": _paths,
    "units": _units,
    "activations": _choice_reader("auto", "keep", "recompute", "offload"),
    "optimizer_kernel": _choice_reader("auto", "numba", "torch"),
    "master_weights": _choice_reader("as_given", "fp32"),
    "update_on": _choice_reader("auto", "cpu", "device", "split", meant={"gpu": "device", "cuda": "device"}),
    "state_dtype": _choice_reader(
        "fp32",
        "bf16",
        "fp8",
        aliases={
            "float32": "fp32",
            "torch.float32": "fp32",
            "bfloat16": "bf16",
            "torch.bfloat16": "bf16",
            "float8": "fp8",
        },
    ),
    "state_home": _choice_reader("auto", "nvme"),
    "planner": _choice_reader("ilp", "greedy", "lifetime"),
    "plan_file": _optional_path,
    "profile_steps": _auto_integer_reader(0, 1000),
    "verify_reads": _flag,
    "prefetch_units": _auto_integer_reader(0, MOST_PREFETCH_UNITS),
    "io_threads": _auto_integer_reader(1, 256),
    "block_nbytes": _block_nbytes,
    "nvme_write_budget": _optional_budget,
    "io_timeout_s": _seconds,
    "checkpoint_format": _choice_reader("full", "sharded"),
    "debug": _debug,
    "trace_path": _optional_directory,
    "trace_steps": _integer_reader(0, 1000),
}
_DEFAULTS: dict[str, object] = {entry.name: entry.default for entry in dataclasses.fields(TierOffloadConfig)}


def _as_json(value: object) -> object:
    if isinstance(value, frozenset):
        return sorted(value)
    return list(value) if isinstance(value, tuple) else value


def _refuse_unknown(unknown: Mapping[str, object]) -> None:
    for key, value in unknown.items():
        if key.lower() in _TRAINER_OWNED:
            raise ConfigError(
                f"{key}={shown(value)} belongs to the training loop, not to tieroffload: set it in the Trainer "
                "(or in the script's own arguments, or at the top level of the Accelerate file), and remove it here."
            )
        nearest = difflib.get_close_matches(key.lower(), _READERS, n=1, cutoff=0.5)
        # difflib ranks by length too; what starts alike is what people mean ("prefetch" for "prefetch_units").
        nearest = nearest or [name for name in _READERS if name.startswith(key.lower()) and key]
        hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
        raise ConfigError(
            f"Unknown setting {key!r} (value {shown(value)}).{hint} Known settings: {', '.join(_READERS)}."
        )


# ---------------------------------------------------------------- files
# YAML and JSON keep the last of two equal keys and say nothing, so that the first is a setting that is ignored.


def _yaml_in(path: str | os.PathLike[str]) -> Any:
    import yaml

    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file)
        try:
            node = loader.get_single_node()
            _refuse_repeats(node, name)
            return None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"The configuration file {name} cannot be read: {error.strerror}.") from error
    except RecursionError:
        raise ConfigError(f"The configuration file {name} is not one of settings: it is nested too deeply.") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no text, numbers of thousands of digits
        raise ConfigError(f"The configuration file {name} is not YAML: {error}.") from None


def refuse_repeated_keys(path: str | os.PathLike[str], block: str) -> None:
    """For a file that somebody else reads: refuse a key that is there twice in its mapping ``block``, or that itself.

    What else is in the file, and whether it is YAML at all, is its reader's business.

    Raises:
        ConfigError: names the key, the file and both lines.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            node = yaml.compose(file, yaml.SafeLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return
    if not isinstance(node, yaml.MappingNode):
        return
    ours = [pair for pair in node.value if pair[0].value == block]
    _refuse_repeats(yaml.MappingNode(node.tag, ours), os.fspath(path))


def _refuse_repeats(node: Any, name: str) -> None:
    left, seen = [node], set()
    while left:
        one = left.pop()
        if id(one) in seen:  # by an alias
            continue
        seen.add(id(one))
        entries = one.value if one is not None and isinstance(one.value, list) else []
        lines: dict[tuple[str, str], int] = {}
        for entry in entries:
            if not isinstance(entry, tuple):  # of a sequence
                left.append(entry)
                continue
            key, value = entry
            left.append(value)
            if not isinstance(key.value, str) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if (first := lines.get((key.tag, key.value))) is not None:
                raise ConfigError(
                    f"{name}, line {line}: the key {key.value!r} is there twice, first in line {first}. Leave one out."
                )
            lines[key.tag, key.value] = line


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        twice = next(key for key in settings if sum(key == other for other, _ in pairs) > 1)
        raise ConfigError(
            f"The environment variable {CONFIG_ENVIRONMENT_KEY} has the key {twice!r} twice. Leave one out."
        )
    return settings


# ---------------------------------------------------------------- "auto" budgets


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedBudgets:
    """Most bytes that the engine may hold on each tier, and for each ("device", "dram", "nvme") where that is from."""

    device_nbytes: int
    dram_nbytes: int
    nvme_nbytes: int
    sources: dict[str, str]


def visible_devices(environ: Mapping[str, str] | None = None) -> str | None:
    """`CUDA_VISIBLE_DEVICES` as it is, None where it is not set: which GPU of the host device 0 of this process is."""
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")


def cuda_allocator_is_tuned() -> bool:
    """Whether the environment sets CUDA's allocator up, so that this is not ours to do."""
    return any(os.environ.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))


def malloc_is_tuned() -> bool:
    """Whether the user has set the C library's thresholds for large blocks."""
    return "MALLOC_MMAP_THRESHOLD_" in os.environ or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")


def local_world_size(environ: Mapping[str, str] | None = None) -> int:
    """Processes of this job on this host, as the launcher says; 1 where nobody says."""
    environ = os.environ if environ is None else environ
    for key in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE"):
        digits = environ.get(key, "").split("(")[0]
        if digits.isdigit() and int(digits) > 0:
            return int(digits)
    return 1


def _slurm_limit(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """What Slurm promised this job on this host. It counts MiB, or names a unit; 0 means all of the node."""

    def mebibytes(key: str) -> int | None:
        text = environ.get(key, "").strip()
        if not text or text.strip("KMGTkmgt").strip() in ("", "0"):
            return None
        try:
            return parse_nbytes(text if text[-1].isalpha() else f"{text}MiB", key=key)
        except ConfigError:
            return None  # not ours to judge: an unreadable variable of the scheduler is no limit

    if (per_node := mebibytes("SLURM_MEM_PER_NODE")) is not None:
        return per_node, "SLURM_MEM_PER_NODE"
    for key, counts in (("SLURM_MEM_PER_CPU", ("SLURM_CPUS_ON_NODE",)), ("SLURM_MEM_PER_GPU", ("SLURM_GPUS_ON_NODE",))):
        per_item = mebibytes(key)
        count = next((int(environ[name]) for name in counts if environ.get(name, "").isdigit()), None)
        if per_item is not None and count:
            return per_item * count, f"{key} x {counts[0]}"
    return None


def _own_resident_nbytes() -> int:
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.Process().memory_info().rss)


def _less_margin(nbytes: int, margin_frac: float) -> int:
    # [Note: margins]
    margin_nbytes = min(max(int(nbytes * margin_frac), _LEAST_MARGIN_NBYTES), nbytes // 2)
    return nbytes - margin_nbytes


def _host_free(root: Path, environ: Mapping[str, str], num_local: int) -> tuple[int, str]:
    """Host bytes that this process may still take, and which limit is the tightest."""
    candidates = [(host_available_nbytes() // num_local, "memory available on the host")]
    candidates += [(limit.free_nbytes // num_local, limit.source) for limit in cgroup_limits(root)]
    if (slurm := _slurm_limit(environ)) is not None:
        # Other processes of the job are not visible from here, so each is held to its share less what it has.
        candidates.append((max(0, slurm[0] // num_local - _own_resident_nbytes()), slurm[1]))
    for nbytes, source in candidates:
        _log.debug("host memory: %s free by %s", format_nbytes(nbytes), source)
    return min(candidates)


def _cuda_free(device: torch.device) -> tuple[int, str]:
    import torch

    free_nbytes, total_nbytes = torch.cuda.mem_get_info(device)
    reserved_nbytes = torch.cuda.memory_reserved(device)
    allocated_nbytes = torch.cuda.memory_allocated(device)
    usable_nbytes = free_nbytes + reserved_nbytes - allocated_nbytes
    fraction = float(torch.cuda.get_per_process_memory_fraction(device))
    capped_nbytes = max(0, int(fraction * total_nbytes) - allocated_nbytes)
    return min(
        (usable_nbytes, f"free memory of {device}"), (capped_nbytes, f"memory fraction {fraction:g} of {device}")
    )


def _nvme_free(paths: tuple[str, ...], num_local: int) -> tuple[int, str]:
    free_by_device: dict[int, int] = {}
    for path in paths:
        existing = path
        while not os.path.exists(existing):
            existing = os.path.dirname(existing)
        stat = os.statvfs(existing)
        free_by_device[os.stat(existing).st_dev] = stat.f_bavail * stat.f_frsize
    nbytes = int(sum(free_by_device.values()) / num_local * (1 - _NVME_MARGIN_FRAC))
    return nbytes, f"free space of {len(free_by_device)} file system(s)"


_THERE: dict[str, tuple[str, ...]] = {
    "activations": ("auto", "keep", "offload", "recompute"),
    "update_on": ("auto", "cpu", "device", "split"),
    "state_dtype": ("fp32",),
    "master_weights": ("as_given",),
}


def refuse_what_is_not_there(config: TierOffloadConfig) -> None:
    """UnsupportedError for a setting that would be ignored: it is known and not there yet."""
    for key, there in _THERE.items():
        value = getattr(config, key)
        if value not in there:
            raise UnsupportedError(
                f"{key}={value!r} is not supported by this version (it takes {' or '.join(map(repr, there))}). "
                f"Leave {key} out."
            )


def resolve_budgets(
    config: TierOffloadConfig,
    device: torch.device | str,
    *,
    adopted_host_nbytes: int = 0,
    adopted_device_nbytes: int = 0,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> ResolvedBudgets:
    """Turn every budget into a number of bytes. See [Note: margins] for what "auto" leaves free.

    `adopted_*_nbytes` are bytes in use now that become the engine's own (the model's parameters and optimizer state).
    `environ` and `root` are for tests. Logs one line at INFO with every number and where it is from.
    """
    environ = os.environ if environ is None else environ
    is_cuda = str(device).startswith("cuda")
    num_local = local_world_size(environ)
    sources: dict[str, str] = {}

    host_free_nbytes, host_source = _host_free(root, environ, num_local)
    host_free_nbytes += adopted_host_nbytes
    host_part_nbytes = _less_margin(host_free_nbytes, _HOST_MARGIN_FRAC)
    shared = f", {num_local} processes share the host" if num_local > 1 else ""

    dram_chosen = None if config.dram_budget == "auto" else config.dram_budget
    if config.device_budget != "auto":
        device_nbytes = config.device_budget
        sources["device"] = "device_budget"
    elif is_cuda:
        import torch

        cuda_free_nbytes, cuda_source = _cuda_free(torch.device(device))
        device_nbytes = int(
            _less_margin(cuda_free_nbytes + adopted_device_nbytes, _CUDA_MARGIN_FRAC) * CUDA_DEVICE_FRAC
        )
        sources["device"] = f"auto: two fifths of {cuda_source}, less a margin; the rest is for activations"
    else:
        left_nbytes = host_part_nbytes if dram_chosen is None else max(0, host_part_nbytes - dram_chosen)
        device_nbytes = int(host_part_nbytes * _CPU_DEVICE_FRAC)
        device_nbytes = min(device_nbytes, left_nbytes)
        sources["device"] = f"auto: a quarter of host memory, by {host_source}, less a margin{shared}"
        if device_nbytes == left_nbytes:
            sources["device"] = (
                f"auto: {host_source}, less a margin{shared}, less dram_budget, {format_nbytes(dram_chosen or 0)}"
            )

    if dram_chosen is not None:
        dram_nbytes = dram_chosen
        sources["dram"] = "dram_budget"
    else:
        # Without a GPU the DEVICE tier is host memory too, whoever chose its budget.
        dram_nbytes = host_part_nbytes if is_cuda else max(0, host_part_nbytes - device_nbytes)
        sources["dram"] = f"auto: {host_source}, less a margin{shared}"
        if not is_cuda and config.device_budget != "auto":
            sources["dram"] += f", less device_budget, {format_nbytes(device_nbytes)}: it is host memory without a GPU"

    if not config.nvme_paths:
        nvme_nbytes = 0
        sources["nvme"] = "no nvme_paths"
        if config.nvme_budget not in ("auto", 0):
            _log.warning(
                "nvme_budget %s means nothing without nvme_paths: name a directory on flash, or leave it out.",
                format_nbytes(int(config.nvme_budget)),
            )
    elif config.nvme_budget != "auto":
        nvme_nbytes = config.nvme_budget
        sources["nvme"] = "nvme_budget"
    else:
        nvme_nbytes, nvme_source = _nvme_free(config.nvme_paths, num_local)
        sources["nvme"] = f"auto: {nvme_source}, less a margin{shared}"

    _log.info(
        "budgets: device %s (%d bytes; %s), dram %s (%d bytes; %s), nvme %s (%d bytes; %s)",
        format_nbytes(device_nbytes),
        device_nbytes,
        sources["device"],
        format_nbytes(dram_nbytes),
        dram_nbytes,
        sources["dram"],
        format_nbytes(nvme_nbytes),
        nvme_nbytes,
        sources["nvme"],
    )
    wanted_nbytes = dram_nbytes + (0 if is_cuda else device_nbytes)
    if wanted_nbytes > host_free_nbytes:
        _log.warning(
            "budgets ask for %s of host memory, %s is free (%s). The run may be killed when it gets there: "
            "lower dram_budget%s.",
            format_nbytes(wanted_nbytes),
            format_nbytes(host_free_nbytes),
            host_source,
            "" if is_cuda else " or device_budget",
        )
    return ResolvedBudgets(
        device_nbytes=device_nbytes, dram_nbytes=dram_nbytes, nvme_nbytes=nvme_nbytes, sources=sources
    )
