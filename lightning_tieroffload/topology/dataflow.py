"""Floor 1. How often an operator goes to external memory, by what it keeps inside: output, weight or input.

An operator is a matrix product (m, k) x (k, n) on one die after tensor parallelism has cut it; ``m`` counts tokens.
One operand stays in SRAM as a tile while the others stream past:

    output-stationary   inputs m*k*ceil(n/tn) + weights k*n*ceil(m/tm) + outputs m*n, each once
    weight-stationary   weights k*n + inputs m*k*ceil(n/tn) + partial sums (below)
    input-stationary    inputs m*k + weights k*n*ceil(m/tm) + partial sums (below)

Partial sums of m*n are written by every pass over k but the last, and read back by the next one: 2*(ceil(k/tk) - 1)
transfers at the accumulator's precision, then the result once. The three names are those of Chen, Krishna, Emer, Sze,
"Eyeriss" (ISCA 2016); the counts are passes over the tiled loop nest, as in Samajdar et al., "SCALE-Sim" (2018).
Choosing by external-memory access per operator is WATOS's rule (arXiv 2512.12279). No choice of tile can go below
2*m*n*k/sqrt(S) - 2*S words with S words inside (Hong and Kung, STOC 1981; constant by Smith et al. 2019).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, get_args

from lightning_tieroffload.errors import ConfigError

__all__ = ["DATAFLOWS", "Access", "Dataflow", "best_dataflow", "external_access"]

Dataflow = Literal["output", "weight", "input"]
DATAFLOWS: tuple[Dataflow, ...] = get_args(Dataflow)

OPERAND_NBYTES = 2  # bf16
ACCUMULATOR_NBYTES = 4  # fp32


class Access(NamedTuple):
    """Bytes to and from external memory under ``dataflow`` with its best tile (rows, columns of what stays)."""

    dataflow: Dataflow
    nbytes: int
    tile: tuple[int, int]


def external_access(m: int, k: int, n: int, sram_nbytes: int, dataflow: Dataflow) -> Access:
    """Least bytes for this product when one operand stays; the tile's shape is searched over powers of two.

    Raises ``ConfigError`` if not even one element per side fits into ``sram_nbytes``.
    """
    if min(m, k, n) < 1:
        raise ConfigError(f"an operator of {m} x {k} x {n} has no work: every side must be 1 or more.")
    if dataflow not in DATAFLOWS:
        raise ConfigError(f"dataflow={dataflow!r} is not known. Use one of {', '.join(DATAFLOWS)}.")
    rows, columns = {"output": (m, n), "weight": (k, n), "input": (m, k)}[dataflow]
    kept_nbytes = ACCUMULATOR_NBYTES if dataflow == "output" else OPERAND_NBYTES
    room = sram_nbytes // kept_nbytes
    if room < 1:
        raise ConfigError(f"sram={sram_nbytes} bytes hold no element of an operator. Give the die's SRAM.")
    best: Access | None = None
    # The tallest tile, the widest one and powers of two between them; the square one is what the bound asks for.
    heights = {min(rows, 1 << e) for e in range(rows.bit_length() + 1)} | {min(rows, max(1, math.isqrt(room)))}
    heights.add(min(rows, max(1, room // columns)))
    for height in sorted(heights):
        width = min(columns, room // height)
        if width < 1:
            continue
        nbytes = _count(m, k, n, dataflow, height, width)
        if best is None or nbytes < best.nbytes:
            best = Access(dataflow, nbytes, (height, width))
    if best is None:
        raise ConfigError(f"sram={sram_nbytes} bytes hold no tile of an operator of {m} x {k} x {n}.")
    return best


def _count(m: int, k: int, n: int, dataflow: Dataflow, height: int, width: int) -> int:
    if dataflow == "output":
        inputs = m * k * -(-n // width)
        weights = k * n * -(-m // height)
        return OPERAND_NBYTES * (inputs + weights + m * n)
    if dataflow == "weight":
        passes = -(-k // height)
        streamed = k * n + m * k * -(-n // width)
    else:
        passes = -(-k // width)
        streamed = m * k + k * n * -(-m // height)
    return OPERAND_NBYTES * (streamed + m * n) + ACCUMULATOR_NBYTES * 2 * (passes - 1) * m * n


def best_dataflow(m: int, k: int, n: int, sram_nbytes: int) -> Access:
    """The dataflow of least external access for this operator; equals are settled in the order of ``DATAFLOWS``."""
    return min((external_access(m, k, n, sram_nbytes, kind) for kind in DATAFLOWS), key=lambda access: access.nbytes)
