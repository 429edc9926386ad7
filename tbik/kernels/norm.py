"""rms norm and layer norm, with the residual addition before it, and their gradients (ORDER.md A10, R1-R3, S1).

    h = cast(x + residual);  r = 1/sqrt(row_sum(h*h)/K + eps);  n = h*r;  y = n*w
    centered: h - m in place of h, m = row_sum(h)/K
    dx = ((g - c1) - n*c) * r + dh,  g = dy*w,  c = row_sum(g*n)/K,  c1 = row_sum(g)/K (centered only)
    leaf of dw = chain over tokens of dy*n, of dbias: of dy*1          (the trees over blocks and samples: combine.py)

Suffixes: T rows, K elements, C chains, H heads. IEEE division and square root, nothing fused outside the chains, one
cast. Bits: those of the CPU, batch-invariant (tests/test_kernels_rows.py). Not yet measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.errors import PlanError
from tbik.kernels import arithmetic, elementary
from tbik.kernels.rows import device_integers, require_rows, row_tile

_COLUMNS = 128


@triton.jit
def _parameter(w_ptr, at, is_live, COMPUTE: tl.constexpr, OFFSET: tl.constexpr):
    """w rounded to the compute dtype where that has fewer bits, then in fp32; 1 + w for Gemma's norms."""
    w = tl.load(w_ptr + at, mask=is_live, other=0.0)
    if w.dtype == tl.float32 and tl.float32 != COMPUTE:
        w = arithmetic.cast(w, COMPUTE)
    w = w.to(tl.float32)
    if OFFSET:
        w = 1.0 + w
    return w


@triton.jit
def _load(x_ptr, residual_ptr, at, is_live, HAS_RESIDUAL: tl.constexpr):
    """x, or cast(x + residual), in fp32; +0 outside."""
    x = tl.load(x_ptr + at, mask=is_live, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x = x + tl.load(residual_ptr + at, mask=is_live, other=0.0).to(tl.float32)
        x = arithmetic.cast(x, x_ptr.dtype.element_ty).to(tl.float32)
    return x


@triton.jit
def norm_kernel(
    x_ptr,
    residual_ptr,
    w_ptr,
    bias_ptr,
    dy_ptr,
    dh_ptr,
    y_ptr,
    h_ptr,
    statistics_ptr,
    num_rows,
    length,
    count,
    eps,
    steps,
    BACKWARD: tl.constexpr,
    HAS_Y: tl.constexpr,
    HAS_STATISTICS: tl.constexpr,
    CENTERED: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_DH: tl.constexpr,
    COMPUTE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
):
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    row_at = (rows * length)[:, None]
    is_row = (rows < num_rows)[:, None]
    lanes = tl.arange(0, WIDTH)
    # lane l of block b starts at element 512 b + l
    first = (lanes // elementary.LANES * elementary.ROW_BLOCK + lanes % elementary.LANES).to(tl.int64)[None, :]
    divisor = tl.full((ROWS,), count, tl.float32)
    mean = tl.zeros((ROWS,), tl.float32)
    if CENTERED:
        total = tl.zeros((ROWS, WIDTH), tl.float32)
        for step in range(0, steps):
            k = first + step * elementary.LANES
            total += _load(x_ptr, residual_ptr, row_at + k, is_row & (k < length), HAS_RESIDUAL)
        mean = tl.div_rn(elementary.fold_lanes(total, ROWS, WIDTH, LEVELS), divisor)
    squares = tl.zeros((ROWS, WIDTH), tl.float32)
    for step in range(0, steps):
        k = first + step * elementary.LANES
        is_live = is_row & (k < length)
        x = _load(x_ptr, residual_ptr, row_at + k, is_live, HAS_RESIDUAL)
        if CENTERED:
            x = tl.where(is_live, x - mean[:, None], 0.0)
        squares += x * x
    variance = tl.div_rn(elementary.fold_lanes(squares, ROWS, WIDTH, LEVELS), divisor) + eps
    r = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance))
    if HAS_STATISTICS:
        tl.store(statistics_ptr + rows, r, mask=rows < num_rows)
        tl.store(statistics_ptr + (tl.cast(num_rows, tl.int64) + rows), mean, mask=rows < num_rows)
    c = tl.zeros((ROWS,), tl.float32)
    c1 = tl.zeros((ROWS,), tl.float32)
    if BACKWARD:
        products = tl.zeros((ROWS, WIDTH), tl.float32)
        gradients = tl.zeros((ROWS, WIDTH), tl.float32)
        for step in range(0, steps):
            k = first + step * elementary.LANES
            is_live = is_row & (k < length)
            n = (_load(x_ptr, residual_ptr, row_at + k, is_live, HAS_RESIDUAL) - mean[:, None]) * r[:, None]
            g = tl.load(dy_ptr + row_at + k, mask=is_live, other=0.0).to(tl.float32)
            g = g * _parameter(w_ptr, k, k < length, COMPUTE, OFFSET)
            products += tl.where(is_live, g * n, 0.0)
            if CENTERED:
                gradients += tl.where(is_live, g, 0.0)
        c = tl.div_rn(elementary.fold_lanes(products, ROWS, WIDTH, LEVELS), divisor)
        if CENTERED:
            c1 = tl.div_rn(elementary.fold_lanes(gradients, ROWS, WIDTH, LEVELS), divisor)
    for step in range(0, steps if HAS_Y else 0):
        k = first + step * elementary.LANES
        is_live = is_row & (k < length)
        x = _load(x_ptr, residual_ptr, row_at + k, is_live, HAS_RESIDUAL)
        w = _parameter(w_ptr, k, k < length, COMPUTE, OFFSET)
        if HAS_RESIDUAL and not BACKWARD:
            tl.store(h_ptr + row_at + k, arithmetic.cast(x, h_ptr.dtype.element_ty), mask=is_live)
        if CENTERED:
            x = x - mean[:, None]
        n = x * r[:, None]
        if BACKWARD:
            g = tl.load(dy_ptr + row_at + k, mask=is_live, other=0.0).to(tl.float32) * w
            if CENTERED:
                g = g - c1[:, None]
            y = (g - n * c[:, None]) * r[:, None]
            if HAS_DH:
                y = y + tl.load(dh_ptr + row_at + k, mask=is_live, other=0.0).to(tl.float32)
        else:
            y = n * w
            if HAS_BIAS:
                y = y + _parameter(bias_ptr, k, k < length, COMPUTE, False)
        tl.store(y_ptr + row_at + k, arithmetic.cast(y, y_ptr.dtype.element_ty), mask=is_live)


def norm(
    x: Tensor,
    residual: Tensor | None,
    w: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    offset: bool,
    compute: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(y, h) of R1 (R3 if centered) on h = cast(x + residual); without a residual h is x. As tbik._C.norm.

    x, residual [..., K] alike and contiguous; w, bias [K]; compute: what w and bias are rounded to. Batch-invariant.
    """
    where = "kernels.norm"
    require_rows(where, x, residual, w, bias)
    y = torch.empty_like(x)
    h = x if residual is None else torch.empty_like(x)
    _launch(where, x, residual, w, bias, None, None, y, h, eps, centered, offset, compute)
    return y, h


def norm_dx(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    eps: float,
    centered: bool,
    offset: bool,
    dh: Tensor | None,
    compute: torch.dtype,
    out_dtype: torch.dtype | None = None,
    statistics: Tensor | None = None,
) -> Tensor:
    """dx of R1 or R3, plus dh (R2), one cast to out_dtype (x.dtype). dy, dh [..., K]. Batch-invariant.

    statistics: fp32 [2, T] to write r and the mean into.
    """
    where = "kernels.norm_dx"
    require_rows(where, dy, x, w, dh)
    if dy.shape != x.shape or (dh is not None and dh.shape != x.shape):
        raise PlanError(f"{where}: expected dy and dh like x {list(x.shape)}, got {list(dy.shape)}")
    dx = torch.empty_like(x, dtype=out_dtype)
    _launch(where, x, None, w, None, dy, dh, dx, x, eps, centered, offset, compute, statistics)
    return dx


def norm_statistics(x: Tensor, eps: float, centered: bool, statistics: Tensor) -> None:
    """r and the mean (+0 unless centered) of each row of x [..., K] into fp32 [2, T]. Batch-invariant."""
    where = "kernels.norm_statistics"
    require_rows(where, x)
    w = x.new_empty((x.shape[-1],))  # not read
    _launch(where, x, None, w, None, None, None, None, x, eps, centered, False, x.dtype, statistics)


def _launch(
    where: str,
    x: Tensor,
    residual: Tensor | None,
    w: Tensor,
    bias: Tensor | None,
    dy: Tensor | None,
    dh: Tensor | None,
    y: Tensor | None,
    h: Tensor,
    eps: float,
    centered: bool,
    offset: bool,
    compute: torch.dtype,
    statistics: Tensor | None = None,
) -> None:
    length = x.shape[-1]
    num_rows = math.prod(x.shape[:-1])
    if x.numel() == 0:
        return
    if w.shape != (length,) or (residual is not None and residual.shape != x.shape):
        raise PlanError(f"{where}: expected w [{length}] and a residual like x, got {list(w.shape)}")
    tile = row_tile(where, length)
    norm_kernel[(triton.cdiv(num_rows, tile.rows),)](
        x,
        x if residual is None else residual,
        w,
        w if bias is None else bias,
        x if dy is None else dy,
        x if dh is None else dh,
        x if y is None else y,
        h,
        x if statistics is None else statistics,
        num_rows,
        length,
        float(length),
        float(eps),
        tile.steps,
        BACKWARD=dy is not None,
        HAS_Y=y is not None,
        HAS_STATISTICS=statistics is not None,
        CENTERED=centered,
        OFFSET=offset,
        HAS_RESIDUAL=residual is not None,
        HAS_BIAS=bias is not None,
        HAS_DH=dh is not None,
        COMPUTE=arithmetic.triton_dtype(compute),
        **tile.constants(),
        **arithmetic.OPTIONS,
    )


# --- gradients of parameters ----------------------------------------------------------------------------------------


@triton.jit
def column_kernel(
    dy_ptr,
    x_ptr,
    statistics_ptr,
    cuts_ptr,
    order_ptr,
    out_ptr,
    num_rows,
    num_heads,
    length,
    HAS_X: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chain over tokens for BLOCK columns (h, k) of [T, H, K]."""
    chain = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    columns = tl.cast(num_heads, tl.int64) * length
    is_live = column < columns
    head = column // length
    first = tl.load(cuts_ptr + chain)
    tokens = (tl.load(cuts_ptr + chain + 1) - first).to(tl.int32)
    acc = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, tokens):
        token = first + step
        if HAS_ORDER:
            token = tl.load(order_ptr + token)
        dy = tl.load(dy_ptr + (token * columns + column), mask=is_live, other=0.0).to(tl.float32)
        n = tl.full((BLOCK,), 1.0, tl.float32)
        if HAS_X:
            x = tl.load(x_ptr + (token * columns + column), mask=is_live, other=0.0).to(tl.float32)
            row = token * num_heads + head
            r = tl.load(statistics_ptr + row, mask=is_live, other=0.0)
            mean = tl.load(statistics_ptr + (tl.cast(num_rows, tl.int64) + row), mask=is_live, other=0.0)
            n = (x - mean) * r
        acc = arithmetic.fma_flushed(arithmetic.flush(dy), arithmetic.flush(n), acc)
    tl.store(out_ptr + (chain * columns + column), acc + 0.0, mask=is_live)


def column_leaves(
    dy: Tensor, x: Tensor | None, statistics: Tensor | None, num_heads: int, cuts: Sequence[int]
) -> Tensor:
    """leaf[c, (h, k)] = chain over the tokens [cuts[c], cuts[c + 1]) of dy[t, h, k] n[t, h, k], n = 1 without x (S1).

    dy, x [..., H, K] (H = num_heads; [..., K] for one head) contiguous; statistics fp32 [2, T H] of x -> fp32 [C, H K].
    Layout-invariant: a chain ignores the others.
    """
    where = "kernels.column_leaves"
    require_rows(where, dy, x)
    length = dy.shape[-1]
    columns = num_heads * length
    chains = len(cuts) - 1
    out = torch.empty((chains, columns), dtype=torch.float32, device=dy.device)
    if out.numel() == 0:
        return out
    if dy.numel() != cuts[-1] * columns or (x is not None and x.shape != dy.shape):
        raise PlanError(f"{where}: expected dy and x of {cuts[-1]} tokens x {columns}, got {list(dy.shape)}")
    _launch_columns(dy, x, statistics, num_heads, device_integers(tuple(cuts), dy.device), None, out, cuts[-1])
    return out


def chains_of_tokens(dy_TD: Tensor, tokens: Tensor, cuts: Tensor) -> Tensor:
    """leaf[c] = chain over i in [cuts[c], cuts[c + 1]) of dy[tokens[i]] -> fp32 [C, D]. int64, on the device (R7)."""
    out = torch.empty((cuts.shape[0] - 1, dy_TD.shape[1]), dtype=torch.float32, device=dy_TD.device)
    if out.numel():
        _launch_columns(dy_TD, None, None, 1, cuts, tokens, out, dy_TD.shape[0])
    return out


def _launch_columns(
    dy: Tensor,
    x: Tensor | None,
    statistics: Tensor | None,
    num_heads: int,
    cuts: Tensor,
    order: Tensor | None,
    out: Tensor,
    tokens: int,
) -> None:
    columns = out.shape[1]
    block = min(_COLUMNS, triton.next_power_of_2(columns))
    column_kernel[(out.shape[0], triton.cdiv(columns, block))](
        dy,
        dy if x is None else x,
        out if statistics is None else statistics,
        cuts,
        cuts if order is None else order,
        out,
        tokens * num_heads,
        num_heads,
        columns // num_heads,
        HAS_X=x is not None,
        HAS_ORDER=order is not None,
        BLOCK=block,
        num_warps=4 if block >= 128 else 1,
        **arithmetic.OPTIONS,
    )
