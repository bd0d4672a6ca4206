"""The pinned arena: exact size, no overlap, deterministic, lives as long as its last view (MEM-01, MEM-02, MEM-11)."""

from __future__ import annotations

import gc
import io
import logging
import os
import random
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tieroffload.errors import CapacityError, ResidencyError, TierOffloadError, UnsupportedError
from lightning_tieroffload.memory import arena as arena_module
from lightning_tieroffload.memory.arena import Block, PinnedArena
from lightning_tieroffload.memory.free_runs import FreeRuns
from lightning_tieroffload.sizes import KiB, MiB


class FakeCudart:
    """Registers up to a limit, as a driver does that may lock only so much."""

    def __init__(self, limit_nbytes: int | None = None, raises: bool = False) -> None:
        self.limit_nbytes = limit_nbytes
        self.raises = raises
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.raises:
            raise RuntimeError("CUDA error: out of memory")
        if self.limit_nbytes is not None and nbytes > self.limit_nbytes:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def resident_nbytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields[key].split()[0]) * KiB for key in ("RssAnon", "RssShmem"))


def test_mem_01_no_power_of_two_rounding() -> None:
    """33 MiB, touched, grow the process by 33 MiB and not by 64."""
    before_nbytes = resident_nbytes()
    with PinnedArena(33 * MiB, pin=True) as arena:
        assert arena.nbytes == 33 * MiB
        assert resident_nbytes() - before_nbytes <= 1.02 * 33 * MiB
        assert resident_nbytes() - before_nbytes >= 0.9 * 33 * MiB


def test_mem_01_planned_bytes_are_allocated_bytes() -> None:
    """100 blocks just past powers of two fill an arena of exactly the sum of their 64-byte-rounded lengths."""
    wanted = [int(1.04 * 2 ** (10 + i % 11)) for i in range(100)]
    planned_nbytes = sum(-(-nbytes // 64) * 64 for nbytes in wanted)
    with PinnedArena(planned_nbytes, pin=False) as arena:
        blocks = [arena.take(nbytes) for nbytes in wanted]
        assert arena.used_nbytes == planned_nbytes == arena.peak_nbytes
        assert arena.nbytes - planned_nbytes < 4096
        for block in blocks:
            block.free()
        assert arena.used_nbytes == 0
        assert arena.largest_free_nbytes == arena.nbytes


def test_mem_02_refused_page_lock_falls_back_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cleared = []
    monkeypatch.setattr(arena_module, "_cudart", lambda: FakeCudart(limit_nbytes=1 * MiB))
    monkeypatch.setattr(arena_module, "_clear_cuda_error", lambda: cleared.append(True))
    with caplog.at_level(logging.WARNING), PinnedArena(8 * MiB, pin=True, label="dram arena") as arena:
        assert not arena.pinned
        tensor = arena.take(4 * MiB).tensor(torch.float32, (MiB,))
        tensor.fill_(3.0)
        assert tensor.sum().item() == 3.0 * MiB
    assert cleared == [True]
    (record,) = caplog.records
    for part in ("dram arena", "8 MiB", "limit on locked memory", "ulimit -l unlimited", "dram_budget", "error 2"):
        assert part in record.getMessage()


def test_mem_02_registration_that_raises_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_cudart", lambda: FakeCudart(raises=True))
    monkeypatch.setattr(arena_module, "_clear_cuda_error", lambda: None)
    with PinnedArena(1 * MiB, pin=True) as arena:
        assert not arena.pinned


def test_clearing_a_cuda_error_without_cuda_is_harmless() -> None:
    arena_module._clear_cuda_error()


def test_registration_ends_with_the_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart()
    monkeypatch.setattr(arena_module, "_cudart", lambda: cudart)
    arena = PinnedArena(1 * MiB, pin=True)
    assert arena.pinned
    assert cudart.registered == {arena.address: 1 * MiB}
    tensor = arena.take(4096).tensor(torch.int32, (1024,))
    arena.close()
    assert cudart.registered  # a copy may be under way into the tensor
    tensor.fill_(7)
    del tensor
    assert cudart.registered == {}
    assert not arena.mapped


def test_without_pin_nothing_is_registered_or_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_cudart", lambda: pytest.fail("must not ask for CUDA"))
    before_nbytes = resident_nbytes()
    with PinnedArena(256 * MiB, pin=False) as arena:
        assert resident_nbytes() - before_nbytes < 8 * MiB
        assert arena.mapped


def test_views_outlive_the_arena() -> None:
    arena = PinnedArena(1 * MiB, pin=False)
    block = arena.take(4096)
    tensor = block.tensor(torch.float32, (1024,))
    part = tensor[100:200].view(10, 10)
    array = block.numpy("float32")
    memory = block.memory()
    arena.close()
    arena.close()
    assert arena.closed
    for view in (tensor, array, memory):
        assert arena.mapped
        del view
    del tensor, array, memory
    part.fill_(2.0)
    assert part.sum().item() == 200.0
    assert arena.mapped
    del part
    assert not arena.mapped
    with pytest.raises(TierOffloadError, match="closed"):
        arena.take(1)
    with pytest.raises(TierOffloadError, match="closed"):
        block.tensor(torch.uint8, (1,))


def test_unmapped_without_close_when_nothing_refers_to_it() -> None:
    arena = PinnedArena(1 * MiB, pin=False)
    is_mapped = arena._is_mapped
    gone = weakref.ref(arena)
    del arena
    gc.collect()
    assert gone() is None
    assert not is_mapped()


def test_each_tensor_has_a_storage_of_exactly_its_own_bytes() -> None:
    with PinnedArena(8 * MiB, pin=False) as arena:
        block = arena.take(1 * MiB, align_nbytes=512)
        first = block.tensor(torch.bfloat16, (3, 5), offset_nbytes=512)
        second = block.tensor(torch.bfloat16, (3, 5), offset_nbytes=512)
        assert first.untyped_storage().nbytes() == 30
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        assert first.data_ptr() == second.data_ptr() == block.address + 512
        first.fill_(1.5)
        assert torch.equal(first, second)
        saved = io.BytesIO()
        torch.save(first, saved)
        assert saved.tell() < 4 * KiB
        assert torch.equal(torch.load(io.BytesIO(saved.getvalue())), second)


def test_safetensors_accepts_neighbours(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    with PinnedArena(1 * MiB, pin=False) as arena:
        block = arena.take(4096)
        pair = {name: block.tensor(torch.float32, (16,), offset_nbytes=64 * i) for i, name in enumerate("ab")}
        pair["a"].fill_(1)
        pair["b"].fill_(2)
        safetensors.save_file(pair, str(tmp_path / "x.safetensors"))
        loaded = safetensors.load_file(str(tmp_path / "x.safetensors"))
        assert all(torch.equal(loaded[name], pair[name]) for name in pair)
        assert (tmp_path / "x.safetensors").stat().st_size < 1024


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64])
def test_tensors_are_ordinary(dtype: torch.dtype) -> None:
    with PinnedArena(1 * MiB, pin=False) as arena:
        block = arena.take(64 * KiB)
        with torch.inference_mode():
            tensor = block.tensor(dtype, (2, 0, 3))
            full = block.tensor(dtype, (7, 11))
            scalar = block.tensor(dtype, ())
        assert tensor.shape == (2, 0, 3)
        assert scalar.shape == ()
        assert full.is_contiguous()
        assert not full.is_inference()
        assert not scalar.is_inference()
        full.copy_(torch.ones(7, 11))
        assert full.sum().item() == 77


def test_views_outside_of_the_block_are_refused() -> None:
    with PinnedArena(1 * MiB, pin=False) as arena:
        block = arena.take(100, align_nbytes=4096)
        assert block.nbytes == 100
        assert block.capacity_nbytes == 4096
        assert len(block.memory()) == 100
        assert len(block.memory(0, 4096)) == 4096  # a padded tail may land there
        assert block.numpy("uint16").shape == (50,)
        with pytest.raises(ValueError, match="4096"):
            block.tensor(torch.float32, (1025,))
        with pytest.raises(ValueError, match="outside"):
            block.memory(4000, 97)
        with pytest.raises(ValueError, match="outside"):
            block.memory(-1, 5)


@pytest.mark.parametrize("align_nbytes", [1, 64, 512, 4096])
def test_addresses_are_aligned(align_nbytes: int) -> None:
    with PinnedArena(1 * MiB, pin=False) as arena:
        arena.take(65)
        for nbytes in (1, 63, 4097):
            assert arena.take(nbytes, align_nbytes=align_nbytes).address % max(64, align_nbytes) == 0
        for wrong in (0, 3, 8192):
            with pytest.raises(ValueError, match="power of two"):
                arena.take(1, align_nbytes=wrong)


def test_full_arena_names_the_budget_and_the_numbers() -> None:
    with PinnedArena(1 * MiB, pin=False, label="staging") as arena:
        blocks = [arena.take(256 * KiB) for _ in range(4)]
        blocks[0].free()
        blocks[2].free()
        with pytest.raises(CapacityError, match="dram_budget") as info:
            arena.take(300 * KiB)
        for part in ("staging", "300 KiB", "512 KiB of 1 MiB is free", "longest free run is 256 KiB", "prefetch_units"):
            assert part in str(info.value)
        assert arena.used_nbytes == 512 * KiB
        arena.take(256 * KiB)
    with pytest.raises(CapacityError, match="dram_budget"):
        PinnedArena(0, pin=False)


def test_address_space_refused_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="refused to map"):
        PinnedArena(1 << 62, pin=False)


def test_freed_blocks_are_not_handed_out_again_by_mistake() -> None:
    with PinnedArena(1 * MiB, pin=False) as arena:
        block = arena.take(128)
        block.free()
        with pytest.raises(ResidencyError, match="freed twice"):
            block.free()
        with pytest.raises(ResidencyError, match="was freed"):
            block.tensor(torch.uint8, (1,))


def test_poison_turns_early_and_late_use_into_nan() -> None:
    with PinnedArena(1 * MiB, pin=False, poison=True) as arena:
        block = arena.take(4096)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            assert block.tensor(dtype, (8,)).isnan().all()
        late = block.tensor(torch.float32, (1024,))
        late.fill_(1.0)
        block.free()
        assert late.isnan().all()


def test_failing_placement_leaves_nothing_mapped() -> None:
    seen = []

    def place(address: int, nbytes: int) -> None:
        seen.append((address, nbytes))
        raise OSError("mbind: not permitted")

    with pytest.raises(OSError, match="mbind"):
        PinnedArena(1 * MiB, pin=False, place=place)
    ((address, nbytes),) = seen
    assert nbytes == 1 * MiB
    assert not any(line.startswith(f"{address:x}-") for line in Path("/proc/self/maps").read_text().splitlines())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["random", "rising", "falling"]))
def test_mem_11_no_overlap_and_same_calls_same_offsets(seed: int, order: str) -> None:
    """Random take/free traces: live blocks never overlap, alignment holds, and a replay gives the same offsets."""
    offsets_of_runs = []
    for _ in range(2):
        rng = random.Random(seed)
        with PinnedArena(1 * MiB, pin=False) as arena:
            live: list[Block] = []
            offsets = []
            for i in range(150):
                if live and rng.random() < 0.45:
                    live.pop(rng.randrange(len(live))).free()
                    continue
                length = {"random": rng.randint(1, 30_000), "rising": 1 + 100 * i, "falling": 20_000 - 100 * i}[order]
                align_nbytes = rng.choice([64, 512, 4096])
                try:
                    block = arena.take(length, align_nbytes=align_nbytes)
                except CapacityError:
                    continue
                assert block.offset_nbytes % align_nbytes == 0
                for other in live:
                    assert (
                        block.offset_nbytes + block.capacity_nbytes <= other.offset_nbytes
                        or other.offset_nbytes + other.capacity_nbytes <= block.offset_nbytes
                    )
                live.append(block)
                offsets.append(block.offset_nbytes)
            assert arena.used_nbytes == sum(block.capacity_nbytes for block in live)
            for block in live:
                block.free()
            assert arena.largest_free_nbytes == arena.nbytes
        offsets_of_runs.append(offsets)
    assert offsets_of_runs[0] == offsets_of_runs[1]


def test_threads_never_share_bytes() -> None:
    failures = []
    with PinnedArena(4 * MiB, pin=False) as arena:

        def work(mark: int) -> None:
            rng = random.Random(mark)
            for _ in range(300):
                block = arena.take(rng.randint(1, 50_000))
                view = block.numpy("uint8")
                view[:] = mark
                if not (view == mark).all():
                    failures.append(mark)
                block.free()

        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert arena.used_nbytes == 0
        assert arena.largest_free_nbytes == arena.nbytes


def test_free_from_a_finaliser_inside_take_does_not_deadlock() -> None:
    """A collection can run a finaliser that frees a block while the same thread is inside take."""
    with PinnedArena(1 * MiB, pin=False) as arena:
        block = arena.take(64 * KiB)
        with arena._lock:  # as if this thread were inside take
            block.free()
        assert arena.used_nbytes == 0
        assert arena.largest_free_nbytes == 1 * MiB


def test_forked_child_gets_an_error_and_does_no_harm() -> None:
    """The child has no pages there: named error, no crash, and its clean-up leaves the parent's mapping alone."""
    arena = PinnedArena(16 * MiB, pin=False)
    block = arena.take(4096)
    tensor = block.tensor(torch.float32, (1024,))
    tensor.fill_(5.0)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try:
                arena.take(1)
            except UnsupportedError:
                block.free()
                del tensor, block
                arena.close()
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tensor.sum().item() == 5 * 1024
    block.free()
    arena.close()


def test_clean_interpreter_exit_with_live_views() -> None:
    code = (
        "import torch; from lightning_tieroffload.memory.arena import PinnedArena\n"
        "arena = PinnedArena(1 << 20, pin=True); kept = arena.take(4096).tensor(torch.float32, (1024,)); kept.fill_(1)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_numpy_and_torch_see_the_same_bytes() -> None:
    with PinnedArena(1 * MiB, pin=False) as arena:
        block = arena.take(400)
        block.numpy("float32")[:] = np.arange(100)
        assert torch.equal(block.tensor(torch.float32, (10, 10)), torch.arange(100.0).view(10, 10))
        del block


def test_mem_11_ten_thousand_traces_of_the_free_list() -> None:
    """No overlap, nothing lost: what is cut and what is free add up to the region, and all merges back into one run."""
    for seed in range(10_000):
        rng = random.Random(seed)
        runs = FreeRuns(1000)
        live: list[tuple[int, int]] = []
        for _ in range(rng.randrange(1, 16)):
            if live and rng.random() < 0.4:
                runs.give(*live.pop(rng.randrange(len(live))))
                continue
            nbytes, align_nbytes = rng.randrange(1, 200), rng.choice([1, 8, 64])
            start = (runs.cut if rng.random() < 0.5 else runs.cut_from_top)(nbytes, align_nbytes)
            if start is None:
                assert runs.longest_nbytes < nbytes + align_nbytes - 1
                continue
            assert start % align_nbytes == 0
            assert start + nbytes <= 1000
            assert all(start + nbytes <= other or other + length <= start for other, length in live)
            live.append((start, nbytes))
        assert runs.free_nbytes == 1000 - sum(length for _, length in live)
        for one in live:
            runs.give(*one)
        assert runs.longest_nbytes == runs.free_nbytes == 1000


GPT_TINY_LAYER = [32, 32, 32 * 96, 96, 32 * 32, 32, 32, 32, 32 * 128, 128, 128 * 32, 32]
GPT_TINY_NUMELS = [97 * 32, 32 * 32, *GPT_TINY_LAYER, *GPT_TINY_LAYER, 32, 32]


@pytest.mark.parametrize("order", ["as they come", "rising", "falling", "alternating"])
@pytest.mark.parametrize("window", [2, 4, 6, 10])
def test_mem_11_model_traces_fit_into_a_quarter_more_than_what_lives(order: str, window: int) -> None:
    """A small GPT's parameters streamed forwards and backwards through a window, with odd tails, three steps."""
    rising = sorted(GPT_TINY_NUMELS)
    numels = {
        "as they come": GPT_TINY_NUMELS,
        "rising": rising,
        "falling": rising[::-1],
        "alternating": [numel for pair in zip(rising, rising[::-1], strict=True) for numel in pair],
    }[order]
    capacities = [-(-4 * numel // 64) * 64 for numel in numels]
    walk = [*range(len(numels)), *reversed(range(len(numels)))] * 3
    lives = [sum(capacities[i] for i in walk[at : at + window]) for at in range(len(walk))]
    with PinnedArena(int(1.25 * max(lives)), pin=False) as arena:
        held: list[Block] = []
        for index in walk:
            if len(held) == window:
                held.pop(0).free()
            held.append(arena.take(4 * numels[index]))
        assert arena.peak_nbytes <= max(lives)
