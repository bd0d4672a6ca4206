"""The pinned arena on a real device: registered in place, copied asynchronously, refused without a trace."""

from __future__ import annotations

import logging

import pytest
import torch

from lightning_tieroffload.memory import arena as arena_module
from lightning_tieroffload.memory.arena import PinnedArena
from lightning_tieroffload.sizes import MiB

pytestmark = pytest.mark.gpu


def test_views_are_pinned_and_copies_are_exact() -> None:
    with PinnedArena(64 * MiB, pin=True) as arena:
        assert arena.pinned
        block = arena.take(16 * MiB, align_nbytes=4096)
        host = block.tensor(torch.float32, (4 * MiB,))
        assert host.is_pinned()
        host.copy_(torch.randn(4 * MiB))
        device = host.to("cuda", non_blocking=True)
        back = block.tensor(torch.float32, (4 * MiB,))
        torch.cuda.synchronize()
        expected = host.clone()
        host.zero_()
        back.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(back, expected)
        del host, back
    assert not arena.mapped


def test_memory_can_be_registered_again_after_close() -> None:
    for _ in range(3):
        with PinnedArena(32 * MiB, pin=True) as arena:
            assert arena.pinned


def test_mem_02_refusal_by_the_driver_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Registering the same range twice is refused by the real driver; the next kernel must not hear of it."""

    class Twice:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            first = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flags))
            assert first == 0
            second = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flags))
            torch.cuda.cudart().cudaHostUnregister(address)
            return second

    monkeypatch.setattr(arena_module, "_cudart", Twice)
    with caplog.at_level(logging.WARNING), PinnedArena(8 * MiB, pin=True) as arena:
        assert not arena.pinned
        assert len(caplog.records) == 1
        assert torch.ones(4, device="cuda").sum().item() == 4.0
        pageable = arena.take(4096).tensor(torch.float32, (1024,))
        pageable.fill_(2.0)
        assert pageable.cuda().sum().item() == 2048.0
