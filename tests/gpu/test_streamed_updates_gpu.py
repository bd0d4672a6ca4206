"""Streamed updates on a CUDA device: the bits of updates on the CPU and of those where state lives on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_engine_gpu import build, train

from lightning_tieroffload.engine import offload_engine, streamed_updates
from lightning_tieroffload.sizes import MiB

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("amp", [None, torch.bfloat16], ids=str)
def test_a_streamed_update_gives_the_bits_of_any_other(
    monkeypatch: pytest.MonkeyPatch, amp: torch.dtype | None, accumulate: int
) -> None:
    seen: list[Any] = []
    # All on the device; the CPU updates all; half; all that can be, in whole and in slices.
    for share, slot_nbytes in ((None, 0), (0.0, 0), (0.5, 384 * MiB), (1.0, 384 * MiB), (1.0, MiB // 4)):
        with monkeypatch.context() as patch:
            if share is not None:
                patch.setattr("lightning_tieroffload.engine.device_updates.choose_device_units", lambda *_: set())
                patch.setattr(offload_engine._Core, "_streamed_share", lambda _, share=share: share)
                patch.setattr(streamed_updates, "_MOST_SLOT_NBYTES", slot_nbytes)
            offload = {"device_budget": 1024 * MiB if share is None else 128 * MiB, "profile_steps": 0}
            losses, state, report = train(build(), amp=amp, accumulate=accumulate, offload=offload)
        assert report is not None
        counts = report["num_unit_updates"]
        assert (counts["device"] > 0) == (share is None), counts
        assert (counts["streamed"] > 0) == bool(share), counts
        seen.append((losses, state))
    for losses, state in seen[1:]:
        assert losses == seen[0][0]
        for name, value in state.items():
            assert torch.equal(value, seen[0][1][name]), name
