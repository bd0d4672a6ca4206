"""Floor 5. Cutting a model into units: the modules that are fetched and released together.

Owns one pure function, `find_units`, and the two values it returns. Looks at modules and parameters, changes nothing,
and does not know about tiers, budgets or devices.

[Note: units] The rules, in order:
1. Named classes (`units=[...]`, or HF's `_no_split_modules` of the model or of any module in it): the outermost
   modules of these classes are units.
2. With "auto", what no class covered: children of ModuleList, ModuleDict and Sequential. Such a container inside
   another is entered instead of being a unit when it has no forward of its own (lists and dicts), when it is a stage
   (all its children that hold parameters are of one class, which has children in turn: ResNet's `layer3`), or when it
   holds more than a quarter of all parameter bytes. Any other child that holds more than a quarter is entered if there
   is a stage somewhere inside it (an encoder and a decoder in one list).
3. What is left goes by owner, a module that holds parameters directly: an owner with at least 1/8 of the largest
   unit's bytes is a unit of its own (an embedding, a head), the rest together is one unit.
4. A parameter held by several modules belongs to one unit: the one that all its holders are in, or else one of its
   own, named after the first holder, that every holder needs.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lightning_tieroffload.errors import ConfigError

__all__ = ["UnitMap", "UnitSpec", "find_units", "reason_unmanaged"]

_LARGE_FRAC = 1 / 4
_OWN_UNIT_FRAC = 1 / 8
_NUM_CLASSES_LISTED = 12

# These have no forward: whoever holds them reads their parameters.
_READ_BY_THEIR_PARENT = (nn.ParameterList, nn.ParameterDict)
# Reads the parameters of its `out_proj` without calling it, so it has to be there as a whole.
_READS_ITS_CHILDREN = (nn.MultiheadAttention,)
# Wrappers that stand for one module; their own class name says nothing.
_INNER_NAMES = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitSpec:
    """One unit. Compared by identity, since it holds modules.

    `root` is the module whose forward is the unit's use, or None where no single module stands for it (the rest of the
    model, parameters tied across units). `owners` are all modules that hold any of `params` directly, in or out of
    `root`: whoever runs one of them needs the unit. `params` are in the order of `model.named_parameters()`.
    """

    name: str
    root: nn.Module | None
    owners: tuple[nn.Module, ...]
    params: tuple[tuple[str, nn.Parameter], ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitMap:
    """Every parameter of a model, once: in one of `units`, or in `unmanaged` as (name, parameter, why)."""

    units: tuple[UnitSpec, ...]
    unmanaged: tuple[tuple[str, nn.Parameter, str], ...]


def _param_nbytes(param: nn.Parameter) -> int:
    return param.numel() * param.element_size()


def _is_dense_without_overlap(tensor: torch.Tensor) -> bool:
    """Every element has one place and there are no gaps, in whatever order of dimensions (transposed is fine)."""
    expected_stride = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected_stride:
            return False
        expected_stride *= extent
    return True


def reason_unmanaged(param: nn.Parameter) -> str | None:
    """Why one parameter has to be left where it is, or None. Sharing of storage shows only in the whole model."""
    if type(param) is not nn.Parameter:
        return f"its class is {type(param).__name__}, not torch.nn.Parameter"
    if type(param.data) is not torch.Tensor:
        return f"it wraps a {type(param.data).__name__}"
    if param.layout != torch.strided:
        return f"its layout is {param.layout}, not torch.strided"
    if param.is_quantized:
        return f"it is quantized ({param.dtype})"
    if param.numel() == 0:
        return "it has no elements"
    if not _is_dense_without_overlap(param):
        return f"its elements overlap or have gaps (shape {tuple(param.shape)}, strides {param.stride()})"
    return None


def _storage_key(tensor: torch.Tensor) -> int | None:
    # A meta tensor or an empty storage has address 0: that says nothing about sharing.
    if type(tensor) not in (nn.Parameter, torch.Tensor) or tensor.layout != torch.strided:
        return None
    return tensor.untyped_storage().data_ptr() or None


def _split_managed(
    model: nn.Module,
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter, str]]]:
    named = list(model.named_parameters())
    names_by_storage: defaultdict[int, list[str]] = defaultdict(list)
    for name, tensor in [*named, *model.named_buffers()]:
        if (key := _storage_key(tensor)) is not None:
            names_by_storage[key].append(name)
    scripted = tuple(
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, torch.jit.ScriptModule)
    )
    managed: list[tuple[str, nn.Parameter]] = []
    unmanaged: list[tuple[str, nn.Parameter, str]] = []
    for name, param in named:
        reason = reason_unmanaged(param)
        if name.startswith(scripted):
            reason = "it belongs to a TorchScript module, whose code runs past every hook"
        if reason is None and (key := _storage_key(param)) is not None and len(names_by_storage[key]) > 1:
            others = ", ".join(other for other in names_by_storage[key] if other != name)
            reason = f"it shares its storage with {others}"
        if reason is None:
            managed.append((name, param))
        else:
            unmanaged.append((name, param, reason))
    return managed, unmanaged


# ---------------------------------------------------------------- rules 1 and 2: unit roots


def _class_name(module: nn.Module) -> str:
    for inner_name in _INNER_NAMES if not isinstance(module, torch.jit.ScriptModule) else ():
        inner = module._modules.get(inner_name)
        if inner is not None:
            return _class_name(inner)
    return type(module).__name__


def _no_split_names(model: nn.Module) -> frozenset[str]:
    names: set[str] = set()
    for module in model.modules():
        declared = getattr(module, "_no_split_modules", None)
        if isinstance(declared, str):
            names.add(declared)
        elif isinstance(declared, Iterable):
            names.update(name for name in declared if isinstance(name, str))
    return frozenset(names)


class _Cutter:
    """Walks a model once and collects unit roots, outermost first. Lives for one call of `find_units`."""

    def __init__(self, model: nn.Module, managed: Iterable[nn.Parameter], names: frozenset[str], *, auto: bool) -> None:
        self._managed = {id(param): _param_nbytes(param) for param in managed}
        self._names = names
        self._auto = auto
        self._total_nbytes = sum(self._managed.values())
        self._seen: set[int] = set()
        self.roots: list[tuple[str, nn.Module]] = []
        self._walk("", model, is_child_of_container=False)

    def nbytes(self, module: nn.Module) -> int:
        return sum(self._managed.get(id(param), 0) for param in module.parameters())

    def _walk(self, name: str, module: nn.Module, *, is_child_of_container: bool) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        if self.nbytes(module) == 0:
            return
        if _class_name(module) in self._names:
            self.roots.append((name, module))
            return
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        enter = not (self._auto and is_child_of_container) or self._holds_a_named_class(module) or self._enter(module)
        if not enter:
            self.roots.append((name, module))
            return
        for child_name, child in module.named_children():
            self._walk(f"{name}.{child_name}" if name else child_name, child, is_child_of_container=is_container)

    def _holds_a_named_class(self, module: nn.Module) -> bool:
        return bool(self._names) and any(_class_name(inner) in self._names for inner in module.modules())

    def _enter(self, module: nn.Module) -> bool:
        """Whether a container's child is opened instead of being a unit. See [Note: units]."""
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return True
        is_large = self.nbytes(module) > _LARGE_FRAC * self._total_nbytes
        if isinstance(module, nn.Sequential):
            return is_large or self._is_stage(module)
        return is_large and any(self._is_stage(inner) for inner in module.modules())

    def _is_stage(self, module: nn.Module) -> bool:
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            return False
        children = [child for child in module.children() if self.nbytes(child)]
        has_one_class = len({_class_name(child) for child in children}) == 1
        return len(children) >= 2 and has_one_class and any(True for _ in children[0].children())


def _check_names(model: nn.Module, names: Sequence[str]) -> None:
    nbytes_by_class: Counter[str] = Counter()
    for module in model.modules():
        nbytes_by_class[_class_name(module)] += sum(
            param.numel() * param.element_size() for param in module.parameters() if type(param) is nn.Parameter
        )
    for name in names:
        if name in nbytes_by_class:
            continue
        nearest = difflib.get_close_matches(name, nbytes_by_class, n=1)
        hint = f' Did you mean "{nearest[0]}"?' if nearest else ""
        top = _class_name(model)
        candidates = [c for c, nbytes in nbytes_by_class.most_common() if nbytes and c != top][:_NUM_CLASSES_LISTED]
        raise ConfigError(
            f"units={list(names)!r}: the model ({top}) holds no module of class {name!r}.{hint} "
            f"Classes that hold parameters in it: {', '.join(candidates) or 'none'}."
        )


# ---------------------------------------------------------------- rules 3 and 4: who owns what is left


@dataclass(slots=True)
class _Owner:
    """A module that holds parameters directly, with the name and root that a unit of its own would have."""

    name: str
    module: nn.Module
    reader_name: str
    reader: nn.Module


def _iter_owners(model: nn.Module) -> Iterator[_Owner]:
    """Owners in model order. The reader is the module whose forward reads the parameters: nearly always the owner."""
    seen: set[int] = set()

    def walk(name: str, module: nn.Module, reader_name: str, reader: nn.Module, within: bool) -> Iterator[_Owner]:
        if id(module) in seen:
            return
        seen.add(id(module))
        if not within and not isinstance(module, _READ_BY_THEIR_PARENT):
            reader_name, reader = name, module
        within = within or isinstance(module, _READS_ITS_CHILDREN)
        if any(param is not None for param in module._parameters.values()):
            yield _Owner(name, module, reader_name, reader)
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child, reader_name, reader, within)

    yield from walk("", model, "", model, False)


@dataclass(slots=True)
class _Draft:
    """A unit in the making. `places` are indices into `model.named_parameters()`."""

    name: str
    root: nn.Module | None
    places: list[int]
    owners: list[nn.Module]

    def add(self, place: int, owners: Iterable[nn.Module]) -> None:
        self.places.append(place)
        for owner in owners:
            if not any(owner is known for known in self.owners):
                self.owners.append(owner)


def find_units(model: nn.Module, units: Literal["auto"] | Sequence[str] = "auto") -> UnitMap:
    """Cut a model into units. Pure: the model is read, never changed. See [Note: units] for the rules.

    `units` is "auto" or class names. Every parameter is in exactly one unit or in `unmanaged`; units are in the order
    in which their first parameter appears in `model.named_parameters()`, and so are the parameters of each.

    Raises:
        ConfigError: a class name that no module of the model has; lists those that hold parameters.
    """
    managed, unmanaged = _split_managed(model)
    if units == "auto":
        names, auto = _no_split_names(model), True
    else:
        explicit = (units,) if isinstance(units, str) else tuple(units)
        _check_names(model, explicit)
        names, auto = frozenset(explicit), False
    cutter = _Cutter(model, (param for _, param in managed), names, auto=auto)
    roots = _without_small_leaves(cutter, names)

    # Which unit roots is each module inside? A module that is registered twice can be inside several.
    inside: defaultdict[int, set[int]] = defaultdict(set)
    for index, (_, root) in enumerate(roots):
        for module in root.modules():
            inside[id(module)].add(index)

    owners_of: defaultdict[int, list[_Owner]] = defaultdict(list)
    for owner in _iter_owners(model):
        for param in {id(param): param for param in owner.module._parameters.values() if param is not None}.values():
            owners_of[id(param)].append(owner)

    repeated = [_Draft(name or "(root)", root, [], []) for name, root in roots]
    # Keyed by the readers: what several modules hold together (a shared weight and its bias) stays together.
    across: dict[tuple[int, ...], _Draft] = {}
    left: dict[tuple[int, ...], _Draft] = {}
    for place, (_, param) in enumerate(managed):
        owners = owners_of[id(param)]
        modules = _distinct([owner.module for owner in owners] + [owner.reader for owner in owners])
        where = {index for owner in owners for index in inside.get(id(owner.module), {-1})}
        if len(where) == 1 and where != {-1}:
            repeated[where.pop()].add(place, [owner.module for owner in owners])
            continue
        readers = _distinct(owner.reader for owner in owners)
        key = tuple(id(reader) for reader in readers)
        drafts = left if where == {-1} else across
        draft = drafts.setdefault(
            key, _Draft(owners[0].reader_name or "(root)", readers[0] if len(readers) == 1 else None, [], [])
        )
        draft.add(place, modules)

    nbytes_of = [_param_nbytes(param) for _, param in managed]
    finished = [draft for draft in repeated if draft.places] + list(across.values())
    finished += _settle_rest(model, list(left.values()), repeated, nbytes_of)
    finished.sort(key=lambda draft: draft.places[0])
    _make_names_unique(finished)
    return UnitMap(
        units=tuple(
            UnitSpec(
                name=draft.name,
                root=draft.root,
                owners=tuple(draft.owners),
                params=tuple(managed[place] for place in draft.places),
                nbytes=sum(nbytes_of[place] for place in draft.places),
            )
            for draft in finished
        ),
        unmanaged=tuple(unmanaged),
    )


def _distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())


def _without_small_leaves(cutter: _Cutter, names: frozenset[str]) -> list[tuple[str, nn.Module]]:
    """A BatchNorm in a Sequential is not worth a transfer of its own: it goes with what is left."""
    largest_nbytes = max((cutter.nbytes(root) for _, root in cutter.roots), default=0)
    return [
        (name, root)
        for name, root in cutter.roots
        if _class_name(root) in names
        or any(True for _ in root.children())
        or cutter.nbytes(root) >= _OWN_UNIT_FRAC * largest_nbytes
    ]


def _settle_rest(
    model: nn.Module, left: list[_Draft], repeated: list[_Draft], nbytes_of: Sequence[int]
) -> list[_Draft]:
    """Large owners become units of their own, the others one unit together, no larger than the largest unit."""

    def nbytes(draft: _Draft) -> int:
        return sum(nbytes_of[place] for place in draft.places)

    drafts = sorted(left, key=nbytes, reverse=True)
    largest_nbytes = max((nbytes(draft) for draft in repeated if draft.places), default=0)
    if not largest_nbytes:
        largest_nbytes = nbytes(drafts[0]) if drafts else 0
    num_own = sum(nbytes(draft) >= _OWN_UNIT_FRAC * largest_nbytes for draft in drafts)
    # Many small owners can add up to more than any unit; the budget is planned by the largest, so promote some more.
    while sum(nbytes(draft) for draft in drafts[num_own:]) > largest_nbytes:
        num_own += 1
    own, small = drafts[:num_own], drafts[num_own:]
    if not small:
        return own
    places = sorted(place for draft in small for place in draft.places)
    owners = _distinct(owner for draft in sorted(small, key=lambda d: d.places[0]) for owner in draft.owners)
    name = "(root)" if any(owner is model for owner in owners) else "root"
    if name in model._modules:  # a user's module is called "root", and a unit of its own may be
        name = "root#rest"
    root = small[0].root if len(small) == 1 else None
    return [*own, _Draft(name, root, places, owners)]


def _make_names_unique(drafts: list[_Draft]) -> None:
    counts: Counter[str] = Counter()
    taken = {draft.name for draft in drafts}
    for draft in drafts:
        counts[draft.name] += 1
        if counts[draft.name] > 1:
            # Two groups of tied parameters can have the same first holder.
            base = draft.name
            while draft.name in taken:
                draft.name = f"{base}#{counts[base]}"
                counts[base] += 1
            taken.add(draft.name)
