"""What ``tests/gpu/test_faces_gpu.py`` does with 3.2 G parameters, with a tiny model on the CPU: there bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from faces import FACES, run_face

from lightning_tieroffload.sizes import MiB


@pytest.mark.slow
@pytest.mark.parametrize("model", ["shape", "hf"])
@pytest.mark.parametrize("face", FACES)
def test_a_script_that_does_not_know_us_gives_the_same_losses(face: str, model: str, tmp_path: Path) -> None:
    tiny = ("--model", model, "--size", "tiny", "--batch", "2", "--seq", "128", "--steps", "6", "--lr", "1e-3")
    plain = run_face(face, *tiny, folder=tmp_path, cpu=True)
    ours = run_face(face, *tiny, folder=tmp_path, cpu=True, settings={"device_budget": "4MiB"})
    assert ours["losses"] == plain["losses"]
    assert ours["losses"][-1] < ours["losses"][0] - 0.1
    assert 0 < ours["report"]["tiers"]["device"]["peak_nbytes"] <= 4 * MiB
