"""Floor 0. Exact float operations and roundings in compiled code, and how compiled code is built, kept and loaded.

Owns the scalar building blocks and their NumPy twins; knows no optimizer, no memory layout and no thread.

[Note: exact arithmetic] No fastmath anywhere. A fused multiply-add happens exactly where ``fma`` is written, sqrt and
division are IEEE's (correctly rounded), so every result is a function of the element alone: slices, threads, vector
width and machine do not show. NaN stays NaN; which NaN is not promised.

[Note: vector loops] Two things keep a Numba loop scalar, at a tenth of the speed: an error model that may raise on
division, and an index that may be negative (Numba then wraps it around). So: ``error_model="numpy"``, and loops run
over ``range(view.size)`` of a slice taken beforehand, never over ``range(begin, end)``. A third one halves its speed:
Numba widens uint32 arithmetic to 64 bits, so every result is taken back by ``uint32(...)`` where it arises.
"""

from __future__ import annotations

import _thread
import queue
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import float32, njit, types, uint32
from numba.extending import intrinsic

__all__ = [
    "BFLOAT16",
    "FLOAT16",
    "FLOAT32",
    "NO_F32",
    "NO_U8",
    "NO_U16",
    "LazyKernel",
    "bf16_bits",
    "bf16_bits_numpy",
    "bits_of",
    "block_step",
    "f16_bits",
    "f16_bits_numpy",
    "f32_of_bf16",
    "f32_of_f16",
    "f32_of_numpy",
    "float_of",
    "fma",
    "fma_numpy",
    "inlined",
    "rounded_numpy",
]

# What the bits of a gradient or of a copy mean. Plain integers, because they cross into compiled code.
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2

# Absent arguments: empty arrays rather than None, so that a kernel has one signature and is compiled once.
NO_F32, NO_U16, NO_U8 = np.empty(0, np.float32), np.empty(0, np.uint16), np.empty(0, np.uint8)

_BOUNDS = (types.int64, types.int64)  # ``begin`` and ``end``
_OPTIONS: Any = {"nogil": True, "error_model": "numpy"}


def block_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a building block. Not stored on disk by itself: the kernel that calls it contains its code."""
    compiled: Any = njit(**_OPTIONS)(function)
    return cast(Callable[..., Any], compiled)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a building block that Numba copies into its callers: no call, and arguments that are not passed."""
    compiled: Any = njit(inline="always", **_OPTIONS)(function)
    return cast(Callable[..., Any], compiled)


class LazyKernel:
    """A kernel over slices, ``kernel(begin, end, *arrays_and_scalars)``, compiled when it is first used.

    ``build(digest)`` returns the Python function and must close over ``digest``, a checksum of all sources beside this
    one: Numba notices only a change of the file where the function itself stands, and
    would go on using old machine code when one of its building blocks changed. Machine code is stored beside the
    module or in the user's cache directory; where neither can be written, or what is stored cannot be read, it lives
    in memory only. Any thread may call.
    """

    def __init__(self, build: Callable[[int], Callable[..., None]]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._compiled: Any = None

    def prepare(self, *args: Any) -> None:
        """Compile for arguments of these types, by running over no elements.

        By another thread than the main one: Ctrl-C ends the wait, not the compiler. Numba loads its own modules when it
        first compiles, and cut off in the middle of that it compiles nothing any more while the process lives.
        """
        if threading.current_thread() is not threading.main_thread():
            self._prepare(args)
            return
        compiled = self._compiled
        if compiled is not None and (*_BOUNDS, *map(compiled.typeof_pyval, args)) in compiled.overloads:
            return
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def run() -> None:
            failure = None
            try:
                self._prepare(args)
            except Exception as error:
                failure = error
            ended.put(failure)

        _thread.start_new_thread(run, ())  # not `Thread.start`, which Ctrl-C may strike in the middle
        failure = ended.get()
        if failure is not None:
            raise failure

    def _prepare(self, args: tuple[Any, ...]) -> None:
        compiled = self._compiled or self._start()
        try:
            compiled(0, 0, *args)
        except Exception:  # whatever is wrong with stored machine code (rights, disk full, damaged), we can do without
            with self._lock:
                self._compiled = njit(**_OPTIONS)(self._function())
            self._compiled(0, 0, *args)

    def __call__(self, begin: int, end: int, *args: Any) -> None:
        """Run over elements ``begin`` to ``end`` of the arrays. The interpreter lock is free meanwhile."""
        (self._compiled or self._start())(begin, end, *args)

    def assembly(self, *args: Any) -> str:
        """The machine code for arguments of these types, compiled anew (what is stored has no text)."""
        compiled = njit(**_OPTIONS)(self._function())
        compiled(0, 0, *args)
        return "\n".join(compiled.inspect_asm().values())

    def _function(self) -> Callable[..., None]:
        digest = 0
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest = zlib.crc32(path.read_bytes(), digest)
        return self._build(digest)

    def _start(self) -> Any:
        with self._lock:
            if self._compiled is None:
                function = self._function()
                try:
                    self._compiled = njit(cache=True, **_OPTIONS)(function)
                except RuntimeError:  # Numba found no directory that it may write to
                    self._compiled = njit(**_OPTIONS)(function)
            return self._compiled


# --- exact scalar operations -----------------------------------------------------------------------------------------


@intrinsic
def _fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` of float32 with one rounding."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def _bits_of(typing_context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@intrinsic
def _float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


# Seen as plain callables by type checkers: the intrinsics' own first argument is the compiler's.
fma: Any = _fma
bits_of: Any = _bits_of
float_of: Any = _float_of


@inlined
def bf16_bits(bits: Any) -> Any:
    """bfloat16 bits (in a uint32) of float32 bits, to nearest, ties to even. A NaN keeps sign and high payload."""
    high = uint32(bits >> uint32(16))
    rounded = uint32(uint32(bits + uint32(uint32(0x7FFF) + uint32(high & uint32(1)))) >> uint32(16))
    quiet = uint32(high | uint32(0x40))
    return quiet if uint32(bits & uint32(0x7FFFFFFF)) > uint32(0x7F800000) else rounded


@inlined
def f16_bits(bits: Any) -> Any:
    """IEEE half bits (in a uint32) of float32 bits, to nearest, ties to even; 65520 and above become infinite.

    Integer arithmetic rather than the conversion instruction: LLVM calls a library function where the machine has no
    such instruction, and just-in-time code may find none.
    """
    magnitude = uint32(bits & uint32(0x7FFFFFFF))
    # Exponent rebased by 127 - 15, then rounded at bit 13 (0xC8000FFF is (-112 << 23) + 0xFFF).
    odd = uint32(uint32(magnitude >> uint32(13)) & uint32(1))
    normal = uint32(uint32(magnitude + uint32(uint32(0xC8000FFF) + odd)) >> uint32(13))
    # One half has the spacing of half's subnormals as its last bit: the addition rounds for us.
    subnormal = uint32(bits_of(float_of(magnitude) + float32(0.5)) - uint32(0x3F000000))
    result = subnormal if magnitude < uint32(0x38800000) else normal
    result = uint32(0x7C00) if magnitude >= uint32(0x477FF000) else result
    result = uint32(0x7E00) if magnitude > uint32(0x7F800000) else result
    return uint32(result | uint32(uint32(bits >> uint32(16)) & uint32(0x8000)))


@inlined
def f32_of_f16(half: Any) -> Any:
    """The float32 of IEEE half bits (in a uint32); exact."""
    magnitude = uint32(uint32(half & uint32(0x7FFF)) << uint32(13))
    # 2**112 rebases the exponent; the product is exact for subnormals too.
    finite = bits_of(float_of(magnitude) * float32(5.192296858534828e33))
    result = uint32(magnitude | uint32(0x7F800000)) if magnitude >= uint32(0x0F800000) else finite
    return float_of(uint32(result | uint32(uint32(half & uint32(0x8000)) << uint32(16))))


@inlined
def f32_of_bf16(bits: Any) -> Any:
    """The float32 of bfloat16 bits (in a uint32); exact."""
    return float_of(uint32(bits << uint32(16)))


# --- NumPy twins: the same bits, slowly -------------------------------------------------------------------------------


def fma_numpy(a: Any, b: Any, c: Any) -> np.ndarray:
    """``a * b + c`` of float32 with one rounding.

    The product is exact in float64. The sum is rounded to odd there (its last bit set when it is inexact), which the
    final rounding to float32 cannot mistake for a tie.
    """
    with np.errstate(all="ignore"):
        product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
        addend = np.asarray(c, np.float64)
        total = np.asarray(product + addend)
        back = total - product
        error = (product - (total - back)) + (addend - back)
        inexact = np.isfinite(total) & (error != 0)
        bits = total.view(np.int64)
        # An even last bit moves one step towards the exact sum, which lies between two neighbours: the odd one is near.
        step = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(inexact & (bits & 1 == 0), bits + step, bits).view(np.float64)
        return odd.astype(np.float32)


def bf16_bits_numpy(values_f32: np.ndarray) -> np.ndarray:
    """bfloat16 bits (uint16) of float32 values, to nearest, ties to even."""
    bits = np.ascontiguousarray(values_f32).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values_f32), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def f16_bits_numpy(values_f32: np.ndarray) -> np.ndarray:
    """IEEE half bits (uint16) of float32 values, to nearest, ties to even."""
    with np.errstate(over="ignore", under="ignore"):
        return values_f32.astype(np.float16).view(np.uint16)


def f32_of_numpy(bits_u16: np.ndarray, number_format: int) -> np.ndarray:
    if number_format == BFLOAT16:
        return (bits_u16.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(bits_u16).view(np.float16).astype(np.float32)


def rounded_numpy(values_f32: np.ndarray, number_format: int) -> np.ndarray:
    if number_format == FLOAT32:
        return values_f32
    narrow = bf16_bits_numpy if number_format == BFLOAT16 else f16_bits_numpy
    return f32_of_numpy(narrow(values_f32), number_format)
