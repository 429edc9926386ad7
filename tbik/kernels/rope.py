"""Rotary embedding of heads (ORDER.md R4).

    y1 = x1*cos - x2*sin, y2 = x2*cos + x1*sin          backward: the same with -sin

Suffixes: T tokens, H heads, D head_dim, R rotated elements. Pairs (i, i + R/2), interleaved: (2i, 2i + 1); the other
D - R elements pass. fp32, four products and two sums, none fused, one cast. Tables: sin and cos of
fp32(position) * inv_freq by C5. Bits: those of the CPU, batch-invariant (tests/test_kernels_rows.py). Not yet measured
on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik import reference
from tbik.errors import PlanError
from tbik.kernels import arithmetic, elementary
from tbik.kernels.rows import require_rows

_MAX_ANGLE = tl.constexpr(reference.MAX_ANGLE)
_MAX_POSITION = tl.constexpr(2**24)


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


@triton.jit
def tables_kernel(
    positions_ptr, inv_freq_ptr, sin_ptr, cos_ptr, num_angles, half, scale, SCALES: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = at < num_angles
    position = tl.load(positions_ptr + at // half, mask=is_live, other=0)
    frequency = tl.load(inv_freq_ptr + at % half, mask=is_live, other=0.0)
    angle = position.to(tl.float32) * frequency
    # the host does not see the numbers: what the CPU refuses becomes NaN
    is_served = (tl.abs(angle) <= _MAX_ANGLE) & (position < _MAX_POSITION) & (position > -_MAX_POSITION)
    sin, cos = elementary.sin_cos(tl.where(is_served, angle, 0.0))
    if SCALES:
        sin = sin * scale
        cos = cos * scale
    tl.store(sin_ptr + at, tl.where(is_served, sin, float("nan")), mask=is_live)
    tl.store(cos_ptr + at, tl.where(is_served, cos, float("nan")), mask=is_live)


def rope_tables(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(sin, cos) fp32 [..., R/2] of positions int64 [...] and inv_freq fp32 [R/2] (C5), times scale unless it is 1.

    A position of 2^24 and above or an angle beyond 2^20 gives NaN here, since the host does not see the numbers.
    """
    where = "kernels.rope_tables"
    if positions.dtype != torch.int64 or inv_freq.dtype != torch.float32 or inv_freq.dim() != 1:
        raise PlanError(f"{where}: expected int64 positions and float32 inv_freq [R/2], got {positions.dtype}")
    half = inv_freq.shape[0]
    sin = torch.empty((*positions.shape, half), dtype=torch.float32, device=positions.device)
    cos = torch.empty_like(sin)
    if sin.numel() == 0:
        return sin, cos
    tables_kernel[(triton.cdiv(sin.numel(), 1024),)](
        positions.contiguous(),
        inv_freq.contiguous(),
        sin,
        cos,
        sin.numel(),
        half,
        float(scale),
        SCALES=scale != 1,
        BLOCK=1024,
        **arithmetic.OPTIONS,
    )
    return sin, cos
