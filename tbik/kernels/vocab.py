"""Rows over the vocabulary: maximum, sums by leaves, softmax, log-softmax, cross-entropy (ORDER.md A8-A10, V1-V9).

    m = maximum     leaf_i = row sum of x, of exp(x - m) or of p*dp over leaf i, p = exp(x - m) / s       (sum_kernel)
    p = exp(x - m) / s                 dx = p * (dp - d)                                                  (map_kernel)
    y = x - lse                        dx = dy - exp(x - lse)*t            dx_j = g * (exp(x_j - lse) - [j == target])

Suffixes: T rows, V columns (the vocabulary, or a rank's part of it), L leaves. One program per row, or per (row, leaf):
few rows still fill a GPU. The additions above the leaves are tbik.kernels.combine's. fp32, nothing fused, one cast.
Bits: those of the CPU, batch-invariant and layout-invariant (tests/test_kernels_operators.py). Not yet measured on a
GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.errors import PlanError
from tbik.kernels import arithmetic, elementary
from tbik.kernels.rows import device_integers, row_tile

BLOCK = 2048
_LEAST_KEY = tl.constexpr(-0x7F800001)  # order_key(-inf)
_NAN_BITS = tl.constexpr(0x7FC00000)

Terms = Literal["x", "exp", "dots"]
Map = Literal["softmax", "softmax_dx", "log_softmax", "log_softmax_dx", "cross_entropy_dx"]


@triton.jit
def max_kernel(x_ptr, m_ptr, length, stride_row, BLOCK: tl.constexpr):
    """m[row] by integers that ascend with the numbers: exact, so without an order (A8)."""
    row = tl.program_id(0).to(tl.int64)
    highest = tl.full((BLOCK,), _LEAST_KEY, tl.int32)
    for start in range(0, length, BLOCK):
        k = start + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(x_ptr + (row * stride_row + k), mask=k < length, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, elementary.order_key(x))
    tl.store(m_ptr + row, elementary.of_order_key(tl.max(highest, axis=0)))


@triton.jit
def sum_kernel(
    x_ptr,
    dp_ptr,
    m_ptr,
    s_ptr,
    cuts_ptr,
    out_ptr,
    num_rows,
    stride_row,
    stride_dp,
    TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """out[leaf, row]: one leaf of one row, all its blocks and lanes at once (A9)."""
    rows = tl.cast(tl.program_id(0), tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = (rows < num_rows)[:, None]
    leaf = tl.program_id(1).to(tl.int64)
    first = tl.load(cuts_ptr + leaf)
    end = tl.load(cuts_ptr + leaf + 1)
    lanes = tl.arange(0, WIDTH)
    at = first + (lanes // elementary.LANES * elementary.ROW_BLOCK + lanes % elementary.LANES).to(tl.int64)[None, :]
    m = tl.zeros((ROWS,), tl.float32)
    s = tl.full((ROWS,), 1.0, tl.float32)
    if TERMS != "x":
        m = tl.load(m_ptr + rows, mask=rows < num_rows, other=0.0)
    if TERMS == "dots":
        s = tl.load(s_ptr + rows, mask=rows < num_rows, other=1.0)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for step in range(0, STEPS):
        k = at + step * elementary.LANES
        is_live = is_row & (k < end)
        term = tl.load(x_ptr + (rows[:, None] * stride_row + k), mask=is_live, other=0.0).to(tl.float32)
        if TERMS != "x":
            term = elementary.exp(term - m[:, None])
        if TERMS == "dots":
            dp = tl.load(dp_ptr + (rows[:, None] * stride_dp + k), mask=is_live, other=0.0).to(tl.float32)
            term = tl.div_rn(term, tl.broadcast_to(s[:, None], term.shape)) * dp
        total += tl.where(is_live, term, 0.0)
    value = elementary.fold_lanes(total, ROWS, WIDTH, LEVELS)
    tl.store(out_ptr + (leaf * num_rows + rows), value, mask=rows < num_rows)


@triton.jit
def map_kernel(
    x_ptr,
    dy_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    targets_ptr,
    y_ptr,
    length,
    first,
    ignored,
    stride_row,
    stride_dy,
    MAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Columns of one row whose statistics are known: a, b, c = (m, s, d), (lse, t) or (lse, g) of the row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = k < length
    x = tl.load(x_ptr + (row * stride_row + k), mask=is_live, other=0.0).to(tl.float32)
    difference = x - tl.load(a_ptr + row)
    y = difference
    if MAP != "log_softmax":
        y = elementary.exp(difference)
    if MAP == "softmax" or MAP == "softmax_dx":
        y = tl.div_rn(y, tl.full((BLOCK,), 1.0, tl.float32) * tl.load(b_ptr + row))
    if MAP == "softmax_dx" or MAP == "log_softmax_dx":
        dy = tl.load(dy_ptr + (row * stride_dy + k), mask=is_live, other=0.0).to(tl.float32)
        y = y * (dy - tl.load(c_ptr + row)) if MAP == "softmax_dx" else dy - y * tl.load(b_ptr + row)
    if MAP == "cross_entropy_dx":
        target = tl.load(targets_ptr + row)
        y = tl.where(k + first == target, y - 1.0, y)
        y = tl.load(b_ptr + row) * y
        y = tl.where(target == ignored, 0.0, y)
    tl.store(y_ptr + (row * length + k), arithmetic.cast(y, y_ptr.dtype.element_ty), mask=is_live)


@triton.jit
def finish_kernel(m_ptr, s_ptr, lse_ptr, num_rows, BLOCK: tl.constexpr):
    """lse = m + log s, -inf where m is -inf (V1)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = row < num_rows
    m = tl.load(m_ptr + row, mask=is_live, other=0.0)
    lse = arithmetic.cast(m + elementary.log(tl.load(s_ptr + row, mask=is_live, other=1.0)), tl.float32)
    tl.store(lse_ptr + row, tl.where(m == float("-inf"), m, lse), mask=is_live)


@triton.jit
def loss_kernel(lse_ptr, picked_ptr, targets_ptr, loss_ptr, num_rows, ignored, BLOCK: tl.constexpr):
    """loss = lse - x_t, +0 where the target is ignored (V6)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = row < num_rows
    lse = tl.load(lse_ptr + row, mask=is_live, other=0.0)
    loss = arithmetic.cast(lse - tl.load(picked_ptr + row, mask=is_live, other=0.0), tl.float32)
    target = tl.load(targets_ptr + row, mask=is_live, other=0)
    tl.store(loss_ptr + row, tl.where(target == ignored, 0.0, loss), mask=is_live)


@triton.jit
def pick_kernel(x_ptr, ids_ptr, picked_ptr, num_picks, per_row, columns, first, stride_row, BLOCK: tl.constexpr):
    """picked = x[row, id - first] in fp32, -0.0 where that is no column (A8)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = at < num_picks
    column = tl.load(ids_ptr + at, mask=is_live, other=0) - first
    is_here = is_live & (column >= 0) & (column < columns)
    x = tl.load(x_ptr + (at // per_row * stride_row + column), mask=is_here, other=0.0).to(tl.float32)
    tl.store(
        picked_ptr + at, arithmetic.negative_zero_where(is_here == 0, arithmetic.cast(x, tl.float32)), mask=is_live
    )


# --- launch ---------------------------------------------------------------------------------------------------------


def row_max(x_TV: Tensor) -> Tensor:
    """m[T] fp32: NaN wins (canonical), +0 > -0 (A8). x [T, V], elements side by side. Exact."""
    m = torch.empty(x_TV.shape[0], dtype=torch.float32, device=x_TV.device)
    if m.numel():
        block = min(BLOCK, triton.next_power_of_2(x_TV.shape[1]))
        max_kernel[(x_TV.shape[0],)](x_TV, m, x_TV.shape[1], x_TV.stride(0), BLOCK=block, **arithmetic.OPTIONS)
    return m


def leaf_sums(
    terms: Terms,
    x_TV: Tensor,
    cuts: Sequence[int],
    *,
    m: Tensor | None = None,
    s: Tensor | None = None,
    dp: Tensor | None = None,
) -> Tensor:
    """fp32 [leaves, T]: the row sum of each leaf [cuts[i], cuts[i + 1]) of x, of exp(x - m), or of exp(x - m)/s * dp.

    x, dp [T, V], elements side by side; m, s fp32 [T]. Errors: PlanError for leaves beyond 262144 columns.
    Layout-invariant: a leaf ignores the others.
    """
    where = "kernels.vocab"
    num_rows, leaves = x_TV.shape[0], len(cuts) - 1
    if cuts[-1] - cuts[0] != x_TV.shape[1] or (dp is not None and dp.shape != x_TV.shape):
        raise PlanError(f"{where}: expected {cuts[-1] - cuts[0]} columns, got x {list(x_TV.shape)}")
    out = torch.empty((leaves, num_rows), dtype=torch.float32, device=x_TV.device)
    if out.numel() == 0:
        return out
    tile = row_tile(where, max(1, *(end - first for first, end in itertools.pairwise(cuts))))
    sum_kernel[(triton.cdiv(num_rows, tile.rows), leaves)](
        x_TV,
        x_TV if dp is None else dp,
        out if m is None else m,
        out if s is None else s,
        device_integers(tuple(cut - cuts[0] for cut in cuts), x_TV.device),
        out,
        num_rows,
        x_TV.stride(0),
        0 if dp is None else dp.stride(0),
        TERMS=terms,
        STEPS=tile.steps,
        **tile.constants(),
        **arithmetic.OPTIONS,
    )
    return out


def map_rows(
    kind: Map,
    x_TV: Tensor,
    out: Tensor,
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    dy: Tensor | None = None,
    targets: Tensor | None = None,
    first: int = 0,
    ignored: int = 0,
) -> None:
    """out [T, V] contiguous, from x and the statistics a, b, c fp32 [T] of its rows. Batch-invariant."""
    num_rows, length = x_TV.shape
    if out.numel() == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(length))
    map_kernel[(num_rows, triton.cdiv(length, block))](
        x_TV,
        x_TV if dy is None else dy,
        a,
        a if b is None else b,
        a if c is None else c,
        a if targets is None else targets,
        out,
        length,
        first,
        ignored,
        x_TV.stride(0),
        0 if dy is None else dy.stride(0),
        MAP=kind,
        BLOCK=block,
        **arithmetic.OPTIONS,
    )


def finish_log_sum_exp(m: Tensor, s: Tensor) -> Tensor:
    """lse = m + log s, -inf where m is -inf. fp32 [T] each, contiguous."""
    lse = torch.empty_like(m)
    if lse.numel():
        finish_kernel[(triton.cdiv(m.numel(), 256),)](m, s, lse, m.numel(), BLOCK=256, **arithmetic.OPTIONS)
    return lse


def losses(lse: Tensor, picked: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """lse - picked, +0 where the target is ignored. fp32 and int64 [T], contiguous."""
    loss = torch.empty_like(lse)
    if loss.numel():
        grid = (triton.cdiv(lse.numel(), 256),)
        loss_kernel[grid](lse, picked, targets, loss, lse.numel(), ignored, BLOCK=256, **arithmetic.OPTIONS)
    return loss


def pick(x_TV: Tensor, ids_Tn: Tensor, first: int) -> Tensor:
    """fp32 [T, n]: x[t, ids[t, i] - first], -0.0 where that is no column."""
    picked = torch.empty(ids_Tn.shape, dtype=torch.float32, device=x_TV.device)
    if picked.numel():
        pick_kernel[(triton.cdiv(picked.numel(), 256),)](
            x_TV,
            ids_Tn,
            picked,
            picked.numel(),
            ids_Tn.shape[1],
            x_TV.shape[1],
            first,
            x_TV.stride(0),
            BLOCK=256,
            **arithmetic.OPTIONS,
        )
    return picked


def top_k(x_TV: Tensor, ids_TV: Tensor | None, first: int, k: int) -> tuple[Tensor, Tensor]:
    """The k first of each row (V10): fp32 values and int64 ids [T, k]; fewer candidates: (-inf, -1).

    Integers alone, all different, so that any way of sorting them gives the same: (order of the value, -id).
    """
    x = x_TV.float()
    bits = (x + 0.0).contiguous().view(torch.int32)  # -0 = +0
    keys = torch.where(x.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ids = torch.arange(first, first + x.shape[1], device=x.device).expand(x.shape) if ids_TV is None else ids_TV
    keys = (keys << 32) | (0xFFFFFFFF - ids)
    keys = torch.where(ids < 0, torch.iinfo(torch.int64).min, keys)
    count = min(k, x.shape[1])
    best, at = keys.topk(count, dim=1)
    is_none = best == torch.iinfo(torch.int64).min
    picked = x.gather(1, at)
    picked = picked.masked_fill(is_none, float("-inf"))
    values = torch.where(picked.isnan(), torch.full_like(picked, float("nan")), picked)
    numbers = ids.gather(1, at).masked_fill(is_none, -1)
    if count == k:
        return values, numbers
    rest = (x.shape[0], k - count)
    return torch.cat([values, values.new_full(rest, float("-inf"))], 1), torch.cat(
        [numbers, numbers.new_full(rest, -1)], 1
    )
