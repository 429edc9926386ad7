"""The fold of a row's lanes, as a jitted function (ORDER.md A9).

fp32, every operation rounded once, none fused. Bits: those of the oracle (tests/test_kernels_rows.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tbik import reference

LANES = tl.constexpr(reference.LANES)
ROW_BLOCK = tl.constexpr(reference.ROW_BLOCK)


@triton.jit
def fold_lanes(lanes, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, WIDTH = 2^LEVELS] -> [ROWS]: neighbours, then neighbours of those, left + right (A9).

    Lanes of a block lie beside each other and blocks after each other, so this is the canonical tree over 16 lanes and
    then over blocks; blocks past the end are +0, which changes no node.
    """
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(lanes, (ROWS, WIDTH >> (level + 1), 2)))
        lanes = left + right
    return tl.reshape(lanes, (ROWS,))
