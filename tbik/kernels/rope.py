"""Rotary embedding of heads (ORDER.md R4).

    y1 = x1*cos - x2*sin, y2 = x2*cos + x1*sin          backward: the same with -sin

Suffixes: T tokens, H heads, D head_dim, R rotated elements. Pairs (i, i + R/2), interleaved: (2i, 2i + 1); the other
D - R elements pass. fp32, four products and two sums, none fused, one cast. The tables come from the CPU's polynomials
(C5). Bits: those of the CPU, batch-invariant (tests/test_kernels_rows.py). Not yet measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.errors import PlanError
from tbik.kernels import arithmetic
from tbik.kernels.rows import require_rows


@triton.jit
def rope_kernel(
    x_ptr,
    sin_ptr,
    cos_ptr,
    y_ptr,
    num_heads,
    head_dim,
    half,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    token = tl.cast(tl.program_id(0), tl.int64)
    row = (token * num_heads + tl.program_id(1)) * head_dim
    i = tl.arange(0, PAIRS).to(tl.int64)
    is_pair = i < half
    sin = tl.load(sin_ptr + token * half + i, mask=is_pair, other=0.0)
    cos = tl.load(cos_ptr + token * half + i, mask=is_pair, other=0.0)
    first, second = i, i + half
    if INTERLEAVED:
        first, second = 2 * i, 2 * i + 1
    x1 = tl.load(x_ptr + row + first, mask=is_pair, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + row + second, mask=is_pair, other=0.0).to(tl.float32)
    if BACKWARD:
        y1 = x1 * cos + x2 * sin
        y2 = x2 * cos - x1 * sin
    else:
        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin
    tl.store(y_ptr + row + first, arithmetic.cast(y1, y_ptr.dtype.element_ty), mask=is_pair)
    tl.store(y_ptr + row + second, arithmetic.cast(y2, y_ptr.dtype.element_ty), mask=is_pair)
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST).to(tl.int64)
        x = tl.load(x_ptr + row + rest, mask=rest < head_dim, other=0.0).to(tl.float32)
        tl.store(y_ptr + row + rest, arithmetic.cast(x, y_ptr.dtype.element_ty), mask=rest < head_dim)


def rope(
    x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool, backward: bool, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x [T, H, D] contiguous, sin and cos fp32 [T, R/2] contiguous -> [T, H, D] in out_dtype. Batch-invariant."""
    where = "kernels.rope"
    require_rows(where, x, sin, cos)
    if x.dim() != 3 or sin.shape != cos.shape or sin.dim() != 2 or sin.shape[0] != x.shape[0]:
        raise PlanError(f"{where}: expected x [T, H, D] and tables [T, R/2], got {list(x.shape)} and {list(sin.shape)}")
    if sin.dtype != torch.float32 or not 0 < 2 * sin.shape[1] <= x.shape[2]:
        raise PlanError(f"{where}: expected float32 tables of at most D/2 = {x.shape[2] // 2}, got {list(sin.shape)}")
    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    half, rest = sin.shape[1], x.shape[2] - 2 * sin.shape[1]
    rope_kernel[(x.shape[0], x.shape[1])](
        x,
        sin,
        cos,
        y,
        x.shape[1],
        x.shape[2],
        half,
        INTERLEAVED=interleaved,
        BACKWARD=backward,
        PAIRS=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=1,
        **arithmetic.OPTIONS,
    )
    return y
