"""Updates on the device, where state and gradients stay: the CPU kernels' bits, whatever is at home where."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactness import SLOW, Recording, Variant, assert_exact, attach, delay_seed, one_thread, run, seed_all, take_down
from fakes import Block, batches
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import lightning_tieroffload
from lightning_tieroffload.concepts import Tier
from lightning_tieroffload.config import TierOffloadConfig
from lightning_tieroffload.engine import offload_engine
from lightning_tieroffload.engine import optimizer as engine_optimizer
from lightning_tieroffload.engine.offload_engine import OffloadEngine, engine_of
from lightning_tieroffload.engine.optimizer import Updates
from lightning_tieroffload.engine.unit_state import Part
from lightning_tieroffload.errors import UnsupportedError
from lightning_tieroffload.kernels.pool import KernelPool
from lightning_tieroffload.planning.cost_model import UpdatePlace


class Net(nn.Module):
    """Blocks, a weight used twice, a norm, a frozen weight, and one that takes part only sometimes."""

    def __init__(self, width: int = 32, depth: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width, width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.sometimes = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.is_on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        x = self.frozen(self.norm(x))
        return self.sometimes(x) if self.is_on else x


def build(cls: Any = torch.optim.AdamW, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        model = Net()
        return model, cls(model.parameters(), lr=1e-2, **options)

    return make


def loop(amp: bool, accumulate: int = 1, clip: float | None = 0.5, set_to_none: bool = True) -> Any:
    def train(model: Any, optimizer: Any, look: Any) -> None:
        data = batches(6 * accumulate, 4, 32)
        for step in range(6):
            model.is_on = step % 3 != 1
            for x in data[step * accumulate : (step + 1) * accumulate]:
                with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                    loss = model(x).float().square().mean()
                (loss / accumulate).backward()
            norm = clip_grad_norm_(model.parameters(), clip) if clip else torch.zeros(())
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            look(loss=loss, norm=norm)

    return train


VARIANTS = [
    Variant(budget="all"),
    Variant(SLOW, prefetch=2, seed=1, every_look=False, budget="all"),
    Variant(SLOW, prefetch=2, seed=2, every_look=False, budget=60_000),
    Variant(budget=90_000, every_look=False),
    Variant(SLOW, prefetch=1, seed=3, every_look=True, budget=90_000),
]


def num_on_device(recording: Recording) -> int:
    return sum(unit["update_on"] == "device" for unit in recording.reports[0]["plan"]["units"])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("amp", "accumulate", "clip", "set_to_none"),
    [(False, 1, 0.5, True), (True, 1, 0.5, True), (True, 3, 0.5, True), (True, 1, None, False), (False, 2, 1e9, False)],
)
def test_the_same_bits_as_updates_on_the_cpu(
    variant: Variant, amp: bool, accumulate: int, clip: float | None, set_to_none: bool
) -> None:
    train = loop(amp, accumulate, clip, set_to_none)
    kernels = {"optimizer_kernel": "numba", "profile_steps": 0}  # the planner would choose for itself
    reference = run(build(), train, Variant(), num_expected=6, update_on="cpu", **kernels)
    ours = run(build(), train, variant, num_expected=6, update_on="device", **kernels)
    assert_exact(reference, ours, str(variant))
    assert num_on_device(reference) == 0
    assert reference.reports[0]["num_unit_updates"]["device"] == 0
    assert ours.reports[0]["num_unit_updates"]["device"] >= (20 if variant.budget == "all" else 4)
    assert num_on_device(ours) >= (5 if variant.budget == "all" else 1)


@pytest.fixture
def two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights first, moments in a second pass: what the engine does beside a GPU."""
    made = Updates.__init__

    def init(self: Updates, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.defer_moments = True

    monkeypatch.setattr(Updates, "__init__", init)


@pytest.mark.parametrize("variant", [*VARIANTS[:3], *VARIANTS[4:]], ids=str)
@pytest.mark.parametrize(("amp", "accumulate"), [(False, 1), (True, 1), (True, 2)])
@pytest.mark.parametrize(("cls", "options"), [(torch.optim.AdamW, {}), (torch.optim.Adam, {"weight_decay": 0.1})])
def test_two_passes_have_the_bits_of_one(
    request: pytest.FixtureRequest, variant: Variant, amp: bool, accumulate: int, cls: Any, options: dict[str, Any]
) -> None:
    train = loop(amp, accumulate)
    kernels = {"optimizer_kernel": "numba", "update_on": "cpu"}
    reference = run(build(cls, **options), train, Variant(), num_expected=6, **kernels)
    request.getfixturevalue("two_passes")
    ours = run(build(cls, **options), train, variant, num_expected=6, **kernels)
    assert_exact(reference, ours, str(variant))


def test_two_steps_in_a_row_wait_for_the_second_pass(two_passes: None) -> None:
    with one_thread():
        results = []
        for repeat in (1, 2):
            seed_all(0)
            model, optimizer = build()()
            engine = attach(model, optimizer, Variant(budget="all"), optimizer_kernel="numba", io_timeout_s=20)
            for x in batches(3, 4, 32):
                model(x).square().mean().backward()
                for _ in range(2 // repeat):
                    for _ in range(repeat):
                        optimizer.step()
                optimizer.zero_grad()
            results.append(Recording(looks=[take_down(model, [optimizer])]))
            engine.close()
        assert_exact(*results)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.Adam, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {}),
        (torch.optim.RMSprop, {}),  # no kernel of ours: the CPU runs torch's class
    ],
)
def test_every_kind_of_optimizer(cls: Any, options: dict[str, Any]) -> None:
    train = loop(True)
    reference = run(build(cls, **options), train, Variant(), num_expected=6, optimizer_kernel="numba")
    for variant in VARIANTS[:2]:
        ours = run(build(cls, **options), train, variant, num_expected=6, update_on="device", optimizer_kernel="numba")
        assert_exact(reference, ours, str(variant))


def pair(amp: bool = True) -> list[tuple[Any, Any, OffloadEngine, Any]]:
    """The same model twice: (model, optimizer, engine, one step), updated on the CPU and on the device."""
    result = []
    for update_on in ("cpu", "device"):
        seed_all(0)
        model, optimizer = build()()
        engine = attach(
            model,
            optimizer,
            Variant(SLOW, budget="all"),
            optimizer_kernel="numba",
            update_on=update_on,
            profile_steps=0,
        )
        data = iter(batches(64, 4, 32))

        def step(model: Any = model, optimizer: Any = optimizer, data: Any = data) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = model(next(data)).float().square().mean()
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

        result.append((model, optimizer, engine, step))
    return result


def agree(runs: list[tuple[Any, Any, OffloadEngine, Any]]) -> None:
    states = [take_down(model, [optimizer]) for model, optimizer, _, _ in runs]
    recordings = [Recording(looks=[state]) for state in states]
    assert_exact(*recordings)


Meddle = Callable[[Any, Any], None]


def write_state(model: Any, optimizer: Any) -> None:
    for p in model.blocks[1].parameters():
        optimizer.state[p]["exp_avg"].mul_(0.5)


def replace_state(model: Any, optimizer: Any) -> None:
    for p in model.blocks[2].parameters():
        optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"] * 2


def clear_state(model: Any, optimizer: Any) -> None:
    optimizer.state.clear()


def reload(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model.load_state_dict({k: v * 1.25 for k, v in model.state_dict().items()})


def write_weights(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.75)


def replace_data(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.75


def read_everything(model: Any, optimizer: Any) -> None:
    sum(p.sum() for p in model.parameters())
    [v.clone() for entry in optimizer.state.values() for v in entry.values()]


def freeze(model: Any, optimizer: Any) -> None:
    for p in model.blocks[0].parameters():
        p.requires_grad_(False)


@pytest.mark.parametrize(
    "meddle",
    [write_state, replace_state, clear_state, reload, write_weights, replace_data, read_everything, freeze],
)
@pytest.mark.parametrize("amp", [False, True])
def test_what_user_code_does_between_steps_counts(meddle: Meddle, amp: bool) -> None:
    with one_thread():
        runs = pair(amp)
        try:
            for _ in range(3):
                for *_, step in runs:
                    step()
            for _ in range(2):
                for model, optimizer, _, step in runs:
                    meddle(model, optimizer)
                    step()
                    step()
            agree(runs)
        finally:
            for _, _, engine, _ in runs:
                engine.close()
        agree(runs)


@pytest.mark.parametrize("hold", ["tensor", "view", "entry"])
def test_held_state_shows_every_later_step(hold: str) -> None:
    """See [Note: looked-at state]: as in the plain run, a tensor that was read once is the live one."""
    with one_thread():
        runs = pair()
        try:
            held = []
            for model, optimizer, _, step in runs:
                for _ in range(3):
                    step()
                entry = optimizer.state[
                    model.blocks[1].first.weight
                    if hasattr(model.blocks[1], "first")
                    else next(model.blocks[1].parameters())
                ]
                held.append(
                    {
                        "tensor": lambda e=entry: e["exp_avg"],
                        "view": lambda e=entry: e["exp_avg"].view(-1),
                        "entry": lambda e=entry: e,
                    }[hold]()
                )
                del entry
                for _ in range(2):
                    step()
            values = [each["exp_avg"] if hold == "entry" else each for each in held]
            assert torch.equal(values[0], values[1])
            del values, held
            gc.collect()
            for *_, step in runs:
                step()
            agree(runs)
        finally:
            for _, _, engine, _ in runs:
                engine.close()


def test_clip_functions_imported_before_the_engine_leave_gradients_where_they_are() -> None:
    """``from torch.nn.utils import ...`` at the top of a script: as this file does it."""
    for clip in (
        lambda params: clip_grad_norm_(params, 0.5),
        lambda params: clip_grad_value_(params, 0.01),
        lambda params: clip_grads_with_norm_(params, 0.5, get_total_norm([p.grad for p in params[:1]])),
    ):
        with one_thread():
            grads = []
            for is_ours in (False, True):
                seed_all(0)
                model, optimizer = build()()
                engine = attach(model, optimizer, Variant(budget="all")) if is_ours else None
                params = [p for p in model.parameters() if p.requires_grad]
                model(next(iter(batches(1, 4, 32)))).square().mean().backward()
                params = [p for p in params if p.grad is not None] if engine is None else params[1:]
                clip(params)
                if engine is not None:
                    slots = [slot for unit in engine.units for slot in unit.slots if slot.param in set(params[1:])]
                    down = [engine.gradients.is_down(slot) for slot in slots if engine.gradients.has_grad(slot)]
                    assert len(down) > 10
                    assert all(down), "a clip brought gradients back to the device"
                grads.append([p.grad.clone() for p in params if p.grad is not None])
                if engine is not None:
                    engine.close()
            assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert clip_grad_norm_.__closure__[0].cell_contents.__module__ == "torch.nn.utils.clip_grad"
    assert "lightning_tieroffload" not in clip_grad_norm_.__closure__[0].cell_contents.__code__.co_filename


def test_two_optimizers_over_the_same_parameters_have_states_of_their_own() -> None:
    with one_thread():
        results = []
        for update_on in ("cpu", "device"):
            seed_all(0)
            model = Net()
            optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for lr in (1e-2, 1e-3)]
            engine = attach(model, optimizers, Variant(budget="all"), optimizer_kernel="numba", update_on=update_on)
            for step, x in enumerate(batches(6, 4, 32)):
                model(x).square().mean().backward()
                optimizers[step % 2].step()
                optimizers[step % 2].zero_grad()
            results.append(Recording(looks=[take_down(model, optimizers)]))
            engine.close()
        assert_exact(*results)


def test_an_exception_in_the_loop_loses_nothing() -> None:
    with one_thread():
        runs = pair()
        try:
            for model, _, engine, step in runs:
                step()
                step()
                step()
                handle = model.blocks[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    step()
                handle.remove()
                engine.reset()
                model.zero_grad()
                step()
            agree(runs)
            assert runs[1][2].report()["tiers"]["device"]["used_nbytes"] <= 1 << 30
        finally:
            for _, _, engine, _ in runs:
                engine.close()


def test_budget_is_kept_and_settings_that_exclude_each_other_are_refused() -> None:
    with one_thread(), delay_seed(0):
        seed_all(0)
        model, optimizer = build()()
        engine = attach(model, optimizer, Variant(budget=90_000), optimizer_kernel="numba", update_on="device")
        for x in batches(5, 4, 32):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        report = engine.report()["tiers"]["device"]
        assert 0 < report["peak_nbytes"] <= 90_000
        engine.close()
        assert engine_of(model) is None
    with pytest.raises(UnsupportedError, match="update_on"):
        OffloadEngine.attach(
            Net(), TierOffloadConfig(update_on="device", optimizer_kernel="torch"), torch.device("cpu")
        )


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_the_models_own_checkpoints_save_between_units_is_offloaded(use_reentrant: bool) -> None:
    """Of a checkpointed model that is nearly all that autograd saves; no window of a unit is open around it."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(32, 32) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1.5
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    def make() -> tuple[nn.Module, Any]:
        model = Checkpointed()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    held: list[int] = []

    def train(model: Any, optimizer: Any, look: Any) -> None:
        for x in batches(3, 8, 32):
            loss = model(x.requires_grad_()).square().mean()
            if look.engine is not None:
                held.append(look.engine.core.activations.leased_nbytes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            look(loss=loss)

    plain = run(make, train, None, num_expected=3)
    ours = run(make, train, Variant(SLOW, prefetch=2, seed=1), num_expected=3, activations="offload")
    assert_exact(plain, ours)
    assert min(held) >= 4 * 8 * 32 * 4, "the input of each checkpoint"


@pytest.mark.parametrize("update_on", ["cpu", "device"])
@pytest.mark.parametrize("kernel", ["numba", "torch"])
@pytest.mark.parametrize("hold", ["tensor", "view", "entry", "step"])
def test_a_held_tensor_of_state_is_up_to_date_when_step_returns(update_on: str, kernel: str, hold: str) -> None:
    """Nobody is asked when it is read: as in the plain run it holds what step() computed, and takes what is written."""
    if (update_on, kernel) == ("device", "torch"):
        pytest.skip("excluded by the settings")
    with one_thread():
        results = []
        for is_ours in (False, True):
            seed_all(0)
            model, optimizer = build()()
            engine = attach(model, optimizer, Variant(SLOW, budget="all"), optimizer_kernel=kernel, update_on=update_on)
            numbers, held = [], []
            for x in batches(5, 4, 32):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if not is_ours:
                    engine.flush()  # what the plain run's step() has always done
                for each in held:
                    tensor = each["exp_avg"] if hold == "entry" else each
                    numbers.append(tensor.clone())
                    tensor.add_(1)
                if not held:
                    entries = [optimizer.state[p] for p in model.blocks[1].parameters()]
                    held = {
                        "tensor": lambda entries=entries: [e["exp_avg"] for e in entries],
                        "view": lambda entries=entries: [e["exp_avg"].view(-1) for e in entries],
                        "entry": lambda entries=entries: entries,
                        "step": lambda entries=entries: [e["step"] for e in entries],
                    }[hold]()
                    del entries
            engine.close()
            results.append(
                Recording(looks=[take_down(model, [optimizer]), {f"log/{i}": n for i, n in enumerate(numbers)}])
            )
        assert_exact(*results)


@pytest.mark.parametrize("looks", [False, True])
def test_close_leaves_the_state_of_the_last_step(looks: bool) -> None:
    """Also where nobody has looked at it since it was last computed on the device."""
    with one_thread():
        runs = pair()
        for model, optimizer, engine, step in runs:
            for _ in range(4):
                step()
            if looks:
                take_down(model, [optimizer])
            step()
            engine.close()
        agree(runs)


@pytest.mark.parametrize("way", ["in place", "data", "numpy"])
def test_what_is_written_to_state_counts_by_whatever_way(way: str) -> None:
    with one_thread():
        runs = pair(amp=False)
        for model, optimizer, _, step in runs:
            for _ in range(4):
                step()
            for p in model.blocks[1].parameters():
                tensor = optimizer.state[p]["exp_avg"]
                {"in place": tensor, "data": tensor.data, "numpy": torch.from_numpy(tensor.numpy())}[way].mul_(0.5)
            del tensor
            step()
            step()
        agree(runs)
        for _, _, engine, _ in runs:
            assert engine.report()["num_unit_updates"]["device"] > 0 or engine is runs[0][2]
            engine.close()


def test_memory_of_replaced_state_is_used_again() -> None:
    """Loads and clears, again and again, take no more memory than one state."""
    with one_thread():
        _model, optimizer, engine, step = pair()[1]
        try:
            for _ in range(3):
                step()
            counts = []
            for turn in range(6):
                if turn % 2:
                    optimizer.state.clear()
                else:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                before = engine.report()["num_unit_updates"]["device"]
                step()
                step()
                assert engine.report()["num_unit_updates"]["device"] > before, "loaded state keeps units off the device"
                parts = {part for unit in engine.units for parts in unit.state_parts.values() for part in parts}
                counts.append(sum(part.nbytes for part in parts))
            assert len(set(counts)) == 1, counts
        finally:
            engine.close()


def test_clip_by_value_with_some_gradients_down_and_the_others_missing() -> None:
    """torch's own function must not be asked about the parameters that have none."""
    with one_thread():
        model, _optimizer, engine, _ = pair()[1]
        try:
            model.is_on = False
            model(next(iter(batches(1, 4, 32)))).square().mean().backward()
            clip_grad_value_(model.parameters(), 1e-4)
            assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) <= 1e-4
            assert model.sometimes.weight.grad is None
        finally:
            engine.close()


def test_a_failure_while_an_update_is_ordered_leaves_no_state_that_nobody_wrote(monkeypatch: Any) -> None:
    with one_thread():
        runs = pair()
        for _, optimizer, engine, step in runs[1:]:
            step()  # on the CPU: the plan comes at its end
            optimizer.state.clear()

            def fail(*args: Any, **kwargs: Any) -> bool:
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(engine.space, "update_on_device", fail)
                with pytest.raises(KeyboardInterrupt):
                    step()
            engine.reset()
            made = [entry for entry in optimizer.state.values() if entry]
            assert all(float(entry["step"]) > 0 for entry in made), "moments of a step that never was"
        for _, _, engine, _ in runs:
            engine.close()


def test_unscaling_after_a_step_waits_for_the_update_that_reads_the_gradient() -> None:
    """Two optimizers of the same parameters, each stepped through the scaler, which unscales once for each."""
    with one_thread():
        results = []
        for debug in (frozenset({"poison"}), SLOW):
            seed_all(0)
            model = Net()
            optimizers = [torch.optim.AdamW(model.parameters(), lr=lr) for lr in (1e-2, 1e-3)]
            engine = attach(model, optimizers, Variant(debug, budget="all"), optimizer_kernel="numba")
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for x in batches(4, 4, 32):
                scaler.scale(model(x).square().mean()).backward()
                for optimizer in optimizers:
                    scaler.step(optimizer)
                    if debug != SLOW:
                        engine.flush()
                scaler.update()
                for optimizer in optimizers:
                    optimizer.zero_grad()
            results.append(Recording(looks=[take_down(model, optimizers)]))
            engine.close()
        assert_exact(*results)


@pytest.mark.parametrize("kernel", ["numba", "torch"])
@pytest.mark.parametrize("is_deferred", [False, True])
def test_state_that_nobody_holds_makes_no_step_wait(kernel: str, is_deferred: bool, monkeypatch: Any) -> None:
    """What the engine itself refers to is not counted: before, during and after looks, loads and snapshots."""
    found: list[bool] = []
    asked = engine_optimizer.is_state_held

    def is_held(*args: Any) -> bool:
        found.append(asked(*args))
        return found[-1]

    monkeypatch.setattr(engine_optimizer, "is_state_held", is_held)
    with one_thread():
        seed_all(0)
        model, optimizer = build()()
        engine = attach(model, optimizer, Variant(SLOW, budget="all"), optimizer_kernel=kernel, update_on="cpu")
        engine.updates.defer_moments = is_deferred
        for step, x in enumerate(batches(8, 4, 32)):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 3:
                read_everything(model, optimizer)
            elif step == 4:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif step == 5:
                replace_state(model, optimizer)
        engine.close()
    assert len(found) >= 5 * 8
    assert not any(found)


@pytest.mark.parametrize("is_deferred", [False, True])
def test_weights_that_are_needed_first_go_first_through_the_kernels(is_deferred: bool, monkeypatch: Any) -> None:
    """Two updates are under way at a time, and either may come to the kernels' threads before the other."""
    submitted: list[int] = []
    submit = KernelPool.submit

    def noted(self: KernelPool, *args: Any, **kwargs: Any) -> Any:
        submitted.append(kwargs["priority"])
        return submit(self, *args, **kwargs)

    monkeypatch.setattr(KernelPool, "submit", noted)
    with one_thread():
        seed_all(0)
        model, optimizer = build()()
        engine = attach(model, optimizer, Variant(SLOW, budget="all"), optimizer_kernel="numba", update_on="cpu")
        engine.updates.defer_moments = is_deferred
        for x in batches(4, 4, 32):
            submitted.clear()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            engine.flush()
        engine.close()
    weights = [priority for priority in submitted if priority < engine_optimizer._MOMENTS_PRIORITY]
    assert len(set(weights)) > 1
    assert len(submitted) == len(weights) * (2 if is_deferred else 1)


@pytest.mark.parametrize("autocast", [True, False])
def test_units_that_are_kept_have_room_for_their_sums(autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients accumulate, sums are kept in full width, newborn ones beside them, and no state makes way."""
    monkeypatch.setattr(offload_engine, "_HOST_STREAMED_SHARE", 0.0)  # what passes through would be counted too
    numel, num_steps = 128 * 128 + 128, 6
    num_kept = set()
    for budget in range(2_000_000, 7_000_000, 1_000_000):
        with one_thread():
            seed_all(0)
            model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(24)])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            engine = attach(
                model, optimizer, Variant(budget=budget), optimizer_kernel="numba", update_on="split", profile_steps=0
            )
            down_nbytes = []
            for x in batches(num_steps, 8, 128):
                for part in x.chunk(2):
                    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                        loss = model(part).float().square().mean()
                    loss.backward()
                on_cpu = [unit for unit in engine.units if unit.choice.update_on is not UpdatePlace.DEVICE]
                optimizer.step()
                optimizer.zero_grad()
                engine.flush()
                down_nbytes.append(engine.space.moved_nbytes["d2h"])
            num_kept.add(len(on_cpu))
            # A first gradient, in 16 bits under autocast, and the sum.
            assert down_nbytes[-1] - down_nbytes[-2] == len(on_cpu) * numel * (6 if autocast else 8), budget
            assert engine.report()["tiers"]["device"]["peak_nbytes"] <= budget
            engine.close()
    assert len(num_kept) == 5


def test_what_is_on_its_way_down_makes_room_before_what_stays_here_leaves() -> None:
    """Gradients that leave a GPU are gone in milliseconds; weights and state at home there would come up again."""
    seed_all(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model, optimizer = lightning_tieroffload.offload(
        model, torch.optim.AdamW(model.parameters()), device_budget="4MiB", optimizer_kernel="numba", update_on="device"
    )
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.flush()
    space, account = engine.space, engine.space.ledger[Tier.DEVICE]
    stays = [part for unit in space.units for part in unit.all_parts if part.is_pinned and part.is_resident]
    assert len(stays) >= 12  # weights and two moments of every layer
    leaving = [account.headroom_nbytes // 4] * 4
    before = space.on_pressure

    def land(must: bool) -> bool:
        if not leaving:
            return before(must)
        space.ledger.release(Tier.DEVICE, leaving.pop())
        return True

    for nbytes in leaving:
        space.ledger.charge(Tier.DEVICE, nbytes)
    space.on_pressure = land
    with space.lock:
        assert space.make_room(2 * leaving[0], keep=None, what="a gradient")
    assert all(part.is_resident for part in stays)
    assert len(leaving) == 2  # and no more was waited for than it took
    with space.lock:
        assert space.make_room(account.budget_nbytes, keep=None, what="everything")
    assert not leaving
    assert not any(part.is_resident for part in stays)
    engine.close()


def test_state_that_comes_up_again_is_page_locked_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from pageable memory takes eight times as long, and the host waits for it. What comes once is not."""
    locked: list[str] = []
    monkeypatch.setattr(Part, "pin_home", lambda part: locked.append(part.name))
    seed_all(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model, optimizer = lightning_tieroffload.offload(
        model, torch.optim.AdamW(model.parameters()), device_budget="4MiB", optimizer_kernel="numba", update_on="device"
    )
    engine = engine_of(model)
    moments = sorted(f"{kind} of {index}" for kind in ("exp_avg", "exp_avg_sq") for index in range(2))
    for expected in ([], [], moments):  # made here, came once, came again
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.flush()
        assert sorted(locked) == expected
        with engine.space.lock:
            assert engine.space.make_room(engine.space.ledger[Tier.DEVICE].budget_nbytes, keep=None, what="everything")
    engine.close()
