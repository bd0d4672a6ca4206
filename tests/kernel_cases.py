"""Inputs that the kernels' tests share: hard numbers, and one call of a kernel from named parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_tieroffload.kernels.primitives import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    NO_F32,
    NO_U8,
    NO_U16,
    bf16_bits_numpy,
    f16_bits_numpy,
)
from lightning_tieroffload.kernels.split import SplitMaster, split_f32_numpy

FORMATS = {"f32": FLOAT32, "bf16": BFLOAT16, "f16": FLOAT16}


def structured_bits(rng: np.random.Generator | None = None, num_random: int = 1 << 18) -> np.ndarray:
    """float32 bit patterns: every high half against the low halves where rounding turns, plus random ones."""
    low = np.array([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)
    grid = ((np.arange(1 << 16, dtype=np.uint32) << np.uint32(16))[:, None] | low[None, :]).reshape(-1)
    rng = rng or np.random.default_rng(0)
    return np.concatenate([grid, rng.integers(0, 1 << 32, num_random, dtype=np.uint64).astype(np.uint32)])


def spread(rng: np.random.Generator, numel: int, low: int, high: int) -> np.ndarray:
    """float32 values whose magnitudes range over 10**low to 10**high, a few zeros of both signs among them."""
    values = (rng.standard_normal(numel) * 10.0 ** rng.integers(low, high, numel)).astype(np.float32)
    values[::97] = 0.0
    values[::193] = -0.0
    return values


@dataclass
class KernelCase:
    """All arrays of one update, built from a seed, so that two equal ones can be made and compared."""

    numel: int
    master_form: str = "plain"
    grad_format: str = "f32"
    scales: tuple[float, ...] = ()
    scale_format: str = "f32"
    copy_format: str | None = None
    num_states: int = 2
    seed: int = 0
    hostile: bool = False
    ties: str = "some"  # "some" before the update, "none", or those that an AdamW step with ``decay`` makes: "born"
    decay: float = 1 - 1.3e-3 * 0.1
    arrays: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        master = spread(rng, self.numel, -8, 4)
        first = spread(rng, self.numel, -9, 1)
        second = spread(rng, self.numel, -9, 1) ** 2
        grad = spread(rng, self.numel, -7, 3)
        if self.hostile:
            for array in (master, first, second, grad):
                values = [np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-40, -1e-45]
                array[rng.integers(0, self.numel, self.numel // 20)] = rng.choice(values, self.numel // 20)
            second = np.abs(second)
        if self.ties == "some":
            master[:: self.numel // 50 + 1] = np.float32(1.00390625)  # 0x3F808000: ties for the split form
        elif self.ties == "born":  # where gradient and moments are zero, the step is the decay alone
            places = np.arange(5, self.numel, self.numel // 6)
            master[places] = self._values_that_decay_to_ties(rng, places.size)
            for array in (first, second, grad):
                array[places] = 0
        split = SplitMaster.empty(self.numel)
        split_f32_numpy(master, split.hi_u16, split.lo_u16, split.ties_u8)
        is_split = self.master_form == "split"
        narrow = f16_bits_numpy if self.grad_format == "f16" else bf16_bits_numpy
        is_f32 = self.grad_format == "f32"
        self.arrays = {
            "master": NO_F32 if is_split else master,
            "hi": split.hi_u16 if is_split else NO_U16,
            "lo": split.lo_u16 if is_split else NO_U16,
            "ties": split.ties_u8 if is_split else NO_U8,
            "grad_f32": grad if is_f32 else NO_F32,
            "grad_u16": NO_U16 if is_f32 else narrow(grad),
            "first": first if self.num_states > 0 else NO_F32,
            "second": second if self.num_states > 1 else NO_F32,
            "copy": NO_U16 if self.copy_format is None else np.zeros(self.numel, np.uint16),
        }

    def _values_that_decay_to_ties(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Of 2**20 values about eight decay to a tie that the split form raises (low 17 bits 0x18000)."""
        found = np.empty(0, np.float32)
        while found.size < count:
            values = rng.uniform(0.5, 2, 1 << 20).astype(np.float32)
            bits = (values * np.float32(self.decay)).view(np.uint32)
            found = np.concatenate([found, values[(bits & np.uint32(0x1FFFF)) == 0x18000]])
        return found[:count]

    def args(self, scalars: Any) -> tuple[Any, ...]:
        a = self.arrays
        return (
            a["master"], a["hi"], a["lo"], a["ties"], a["grad_f32"], a["grad_u16"], FORMATS[self.grad_format],
            np.array(self.scales, np.float32), FORMATS[self.scale_format], a["first"], a["second"], a["copy"],
            FORMATS[self.copy_format or "bf16"], scalars,
        )  # fmt: skip


def assert_same_bits(expected: dict[str, np.ndarray], actual: dict[str, np.ndarray]) -> None:
    """Equal bits in every array, but that any NaN equals any other, in a split master too."""
    is_nan = np.zeros(0, bool)
    if expected.get("hi", NO_U16).size:
        is_nan = ((expected["hi"] & 0x7FFF) > 0x7F80) & ((actual["hi"] & 0x7FFF) > 0x7F80)
    for name, want in expected.items():
        have = actual[name]
        differs = want.view(f"u{want.itemsize}") != have.view(f"u{have.itemsize}")
        if want.dtype == np.float32:
            differs &= ~(np.isnan(want) & np.isnan(have))
        if name in ("hi", "lo") and is_nan.size:
            differs &= ~is_nan
        where = np.flatnonzero(differs)
        assert where.size == 0, (
            f"{name}: {where.size} of {want.size} differ, first at {where[0]}: {want[where[0]]!r} != {have[where[0]]!r}"
        )
