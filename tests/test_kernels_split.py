"""kernels/primitives.py and kernels/split.py: roundings are torch's, the split is lossless, twins agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit, uint16, uint32

from lightning_tieroffload.errors import TierOffloadError
from lightning_tieroffload.kernels import primitives, split
from tests.kernel_cases import assert_same_bits, structured_bits


def split_arrays(numel: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Filled with ones, so that a bit which is not written shows."""
    return (
        np.full(numel, 0xFFFF, np.uint16),
        np.full(numel, 0xFFFF, np.uint16),
        np.full(split.num_tie_bytes(numel), 0xFF, np.uint8),
    )


def torch_bf16_bits(values_f32: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values_f32).to(torch.bfloat16).view(torch.uint16).numpy()


def check_split(values_f32: np.ndarray) -> None:
    """High half as torch rounds, and everything comes back, by the kernel and by the twin."""
    hi, lo, ties = split_arrays(values_f32.size)
    split.split_f32(values_f32, hi, lo, ties)
    is_nan = np.isnan(values_f32)
    hi_values = (hi.astype(np.uint32) << np.uint32(16)).view(np.float32)
    assert np.array_equal(np.isnan(hi_values), is_nan)
    assert np.array_equal(hi[~is_nan], torch_bf16_bits(values_f32)[~is_nan])
    merged = np.empty_like(values_f32)
    split.merge_f32(hi, lo, ties, merged)
    assert_same_bits({"merged": values_f32}, {"merged": merged})


def test_split_is_lossless_where_rounding_turns() -> None:
    check_split(structured_bits().view(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_split_is_lossless_for_every_pattern(part: int) -> None:
    """All 2**32 patterns, in 16 parts of 16 slices."""
    for sixteenth in range(16):
        begin = (part * 16 + sixteenth) << 24
        check_split(np.arange(begin, begin + (1 << 24), dtype=np.uint64).astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 511, 512, 513, 4096, 5003])
def test_split_and_its_twin_write_the_same_bytes(numel: int) -> None:
    bits = np.resize(structured_bits()[3::7], numel)
    kernel, twin = split_arrays(numel), split_arrays(numel)
    split.split_f32(bits.view(np.float32), *kernel)
    split.split_f32_numpy(bits.view(np.float32), *twin)
    for have, want in zip(kernel, twin, strict=True):
        assert np.array_equal(want, have)
    out, out_twin = np.empty(numel, np.float32), np.empty(numel, np.float32)
    split.merge_f32(*kernel, out)
    split.merge_f32_numpy(*kernel, out_twin)
    assert np.array_equal(out_twin.view(np.uint32), out.view(np.uint32))


def test_only_exact_ties_rounded_up_set_a_bit() -> None:
    """The tie bit is set for 0x…18000 and nothing else, and bits past the end are clear."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F818001, 0x3F817FFF, 0xBF838000, 0, 0, 0, 0x3F818000], np.uint32)
    hi, lo, ties = split_arrays(bits.size)
    split.split_f32(bits.view(np.float32), hi, lo, ties)
    assert ties.tolist() == [0b00010010, 0b00000001]


def test_slices_at_multiples_of_eight_do_not_touch_each_others_bits() -> None:
    bits = np.full(4096, 0x3F818000, np.uint32)
    hi, lo, ties = split_arrays(bits.size)
    ties[:] = 0
    split.split_slice.prepare(bits.view(np.float32), hi, lo, ties)
    split.split_slice(1024, 2048, bits.view(np.float32), hi, lo, ties)
    assert set(ties[128:256]) == {0xFF}
    assert not ties[:128].any()
    assert not ties[256:].any()


def test_split_master_shows_true_values() -> None:
    values = structured_bits()[::11].view(np.float32).copy()
    master = split.SplitMaster.empty(values.size)
    assert not master.to_f32().any()
    split.split_f32(values, master.hi_u16, master.lo_u16, master.ties_u8)
    assert_same_bits({"values": values}, {"values": master.to_f32()})
    nbytes = master.hi_u16.nbytes + master.lo_u16.nbytes + master.ties_u8.nbytes
    assert nbytes / values.size == pytest.approx(4.125, abs=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("lo", "lo_u16 must be a contiguous 1-D uint16 array of 64 elements"),
        ("ties", "ties_u8 must be a contiguous 1-D uint8 array of 8 elements"),
        ("stride", "hi_u16 must be a contiguous"),
        ("dtype", "master_f32 must be a contiguous 1-D float32"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(wrong: str, message: str) -> None:
    """Compiled code would write past the end of a short array."""
    master = np.zeros(64, np.float64 if wrong == "dtype" else np.float32)
    hi, lo, ties = split_arrays(64)
    if wrong == "lo":
        lo = lo[:-1]
    if wrong == "ties":
        ties = ties[:-1]
    if wrong == "stride":
        hi = split_arrays(128)[0][::2]
    with pytest.raises(TierOffloadError, match=message):
        split.split_f32(master, hi, lo, ties)


@njit(nogil=True, error_model="numpy")
def narrow_to_f16(values_f32, out_u16):
    for i in range(out_u16.size):
        out_u16[i] = uint16(primitives.f16_bits(primitives.bits_of(values_f32[i])))


@njit(nogil=True, error_model="numpy")
def widen_from_f16(bits_u16, out_f32):
    for i in range(out_f32.size):
        out_f32[i] = primitives.f32_of_f16(uint32(bits_u16[i]))


@njit(nogil=True, error_model="numpy")
def fma_of(a, b, c, out):
    for i in range(out.size):
        out[i] = primitives.fma(a[i], b[i], c[i])


def check_f16(values_f32: np.ndarray) -> None:
    out = np.empty(values_f32.size, np.uint16)
    narrow_to_f16(values_f32, out)
    want = torch.from_numpy(values_f32).to(torch.float16).view(torch.uint16).numpy()
    is_nan = np.isnan(values_f32)
    assert np.array_equal(out[~is_nan], want[~is_nan])
    assert np.isnan(out[is_nan].view(np.float16)).all()
    assert np.array_equal(primitives.f16_bits_numpy(values_f32)[~is_nan], want[~is_nan])


def test_half_rounding_is_torchs() -> None:
    check_f16(structured_bits().view(np.float32))
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    half = half[np.isfinite(half)]
    around = half.view(np.uint32)[:, None] + np.array([-0x1001, -0x1000, -0xFFF, -1, 0, 1, 0xFFF, 0x1000, 0x1001])
    check_f16(around.astype(np.uint32).reshape(-1).view(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_half_rounding_is_torchs_for_every_pattern(part: int) -> None:
    for sixteenth in range(16):
        begin = (part * 16 + sixteenth) << 24
        check_f16(np.arange(begin, begin + (1 << 24), dtype=np.uint64).astype(np.uint32).view(np.float32))


def test_half_widening_is_exact_for_every_pattern() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(bits.size, np.float32)
    widen_from_f16(bits, out)
    assert_same_bits({"values": bits.view(np.float16).astype(np.float32)}, {"values": out})


def test_fma_twin_has_one_rounding() -> None:
    """Against the machine's instruction, on patterns that include overflow, subnormals and cancellation."""
    rng = np.random.default_rng(1)
    n = 1 << 20
    a, b, c = (rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32).view(np.float32) for _ in range(3))
    with np.errstate(all="ignore"):
        near = (a * b).astype(np.float32)
    c = np.where(rng.random(n) < 0.5, -near * rng.choice([1, 0.5, 1 + 2**-23], n).astype(np.float32), c)
    out = np.empty(n, np.float32)
    fma_of(a, b, c, out)
    assert_same_bits({"fma": primitives.fma_numpy(a, b, c)}, {"fma": out})
    with np.errstate(all="ignore"):
        twice_rounded = (a * b + c).view(np.uint32)
    assert (twice_rounded != out.view(np.uint32)).mean() > 0.01  # so the test can tell the two apart
