"""Attention over packed sequences and paged keys, forward and backward (ORDER.md K1-K6).

    s[t, k] = scale chain(q[t] . k[k]), cap tanh(s / cap)       p = exp(s - m)       blocks of 64 keys ascending
    acc = acc*f + chain over live k of p*v,  l = l*f + chain of p,  f = exp(m_before - m)              out = acc / l
    dS = p w (dP - D) ... scale; dQ over key blocks, dK and dV over query blocks of 64 positions, block after block

Suffixes: R rows of a tile (query and query head), K keys of a tile, D head_dim, T query tokens, S key tokens, H query
heads, G KV heads, B sequences. A tile holds queries of one sequence, within a block of 64 positions, and query heads of
one KV head: without a window its rows take the same blocks.
Leaves: "fma" has the bits of the CPU; "mma" multiplies bf16 and fp16 with tensor cores (K6).
The host does not see the numbers (lengths, pages): what the CPU refuses by them reads no memory beyond the tensors and
gives NaN. Bits: batch-invariant, layout-invariant over heads (tests/test_kernels_attention.py). Not yet measured on a
GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.errors import PlanError
from tbik.kernels import arithmetic, combine, elementary, philox
from tbik.kernels.matmul import is_interpreted
from tbik.kernels.rows import DTYPES, device_integers
from tbik.kernels.tiles import FMA, AttentionTile, attention_tile

KEY_BLOCK = tl.constexpr(64)  # K1: a constant of the order
QUERY_BLOCK = tl.constexpr(64)  # K3
_LEAST_N = tl.constexpr(16)  # columns of the smallest product on every architecture
_MINUS_INF = tl.constexpr(float("-inf"))
_FAR = tl.constexpr(1 << 20)
_SPARE = tl.constexpr(2)  # tiles of a sequence beyond its length: its first one need not be full, nor its last


# --- where things lie -----------------------------------------------------------------------------------------------


@triton.jit
def _sequence_of(tile, starts_ptr, num_sequences, SIZE: tl.constexpr, SPARE: tl.constexpr):
    """The sequence that `tile` belongs to: sequence b has the tiles from starts[b] // SIZE + b * SPARE on."""
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = (tl.load(starts_ptr + tl.cast(middle, tl.int64)) // SIZE + middle * SPARE).to(tl.int32)
        low = tl.where(first <= tile, middle, low)
        high = tl.where(first <= tile, high, middle - 1)
    return low


@triton.jit
def _extent(sequence, starts_q_ptr, extent_ptr, IS_PAGED: tl.constexpr):
    """(first query row, queries, first key row, keys) of a sequence."""
    b = tl.cast(sequence, tl.int64)
    q_first = tl.load(starts_q_ptr + b).to(tl.int64)
    queries = tl.load(starts_q_ptr + b + 1).to(tl.int64) - q_first
    if IS_PAGED:
        k_first = q_first * 0
        keys = tl.load(extent_ptr + b).to(tl.int64)
    else:
        k_first = tl.load(extent_ptr + b).to(tl.int64)
        keys = tl.load(extent_ptr + b + 1).to(tl.int64) - k_first
    return q_first, queries, k_first, keys


@triton.jit
def _key_rows(position, k_first, table_ptr, page_size, num_rows, IS_PAGED: tl.constexpr):
    """(page or 0, row, whether it is there) of the keys at these positions of a sequence."""
    if IS_PAGED:
        page = tl.load(table_ptr + position // page_size).to(tl.int64)
        row = position % page_size
        is_there = (page >= 0) & (page < num_rows)
    else:
        page = position * 0
        row = k_first + position
        is_there = (row >= 0) & (row < num_rows)
    return page, row, is_there


@triton.jit
def _live_keys(position, keys, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """[lo, hi) of the key positions that the query at `position` sees (K2)."""
    lo = position * 0
    hi = lo + keys
    if CAUSAL:
        hi = tl.minimum(hi, position + 1)
    if HAS_WINDOW:
        lo = tl.maximum(lo, position - window + 1)
        hi = tl.minimum(hi, position + window)
    return lo, hi


@triton.jit
def _keys_of_positions(first, last, keys, window, is_any, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """[lo, hi) of the keys that any query at first .. last sees; 0, 0 unless is_any.

    Both bounds grow with the position, so the first and the last query have them. Scalars, not a reduction over rows:
    with bounds that threads exchange, no load is taken ahead of the loop and every use of them stays in registers.
    """
    lo, _ = _live_keys(first, keys, window, CAUSAL, HAS_WINDOW)
    _, hi = _live_keys(last, keys, window, CAUSAL, HAS_WINDOW)
    return tl.where(is_any, lo, 0), tl.where(is_any, tl.maximum(hi, 0), 0)


@triton.jit
def _near(distance):
    """A 64-bit distance from a block as int32: exact near it, else on the same side of it.

    Masks compare such columns of a block: rows then differ by what the compiler knows of a thread, where 64-bit
    bounds of every row would be held in registers all along the loop.
    """
    return tl.minimum(tl.maximum(distance, -_FAR), _FAR).to(tl.int32)


@triton.jit
def _live_columns(
    start, at, step, is_row, keys, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, SIZE: tl.constexpr
):
    """The live keys (K2) as columns [first, end) of the SIZE from `start` on, as _live_keys; none: first >= end.

    Rows stand at the positions at + step, 0 <= step < _FAR.
    """
    first = step * 0
    end = first + _near(keys - start)
    if CAUSAL:
        end = tl.minimum(end, step + _near(at + 1 - start))
    if HAS_WINDOW:
        first = tl.maximum(first, step + _near(at - window + 1 - start))
        end = tl.minimum(end, step + _near(at + window - start))
    return first, tl.where(is_row, tl.minimum(end, SIZE), 0)


@triton.jit
def _live_query_columns(
    start,
    lowest,
    step,
    is_key,
    least,
    end_query,
    ahead,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The queries in [least, end_query) that see the key at lowest + step, as columns [first, end) of the SIZE queries
    from `start` on: query i stands at position ahead + i. The inverse of _live_columns."""
    first = tl.maximum(step * 0, _near(least - start))
    end = step * 0 + _near(end_query - start)
    if CAUSAL:
        first = tl.maximum(first, step + _near(lowest - ahead - start))
    if HAS_WINDOW:
        first = tl.maximum(first, step + _near(lowest - window + 1 - ahead - start))
        end = tl.minimum(end, step + _near(lowest + window - ahead - start))
    return first, tl.where(is_key, tl.minimum(end, SIZE), 0)


# --- arithmetic -----------------------------------------------------------------------------------------------------


@triton.jit
def _score(chain, scale, cap, CAPPED: tl.constexpr):
    """(score, tanh of the capped score) of a chain q . k (K1, K2)."""
    x = (chain + 0.0) * scale
    t = x
    if CAPPED:
        t = elementary.tanh(tl.div_rn(x, tl.zeros(x.shape, tl.float32) + cap))
        x = cap * t
    return x, t


@triton.jit
def _is_kept(key, query, head, sample, drop_ptr):
    """Which pairs are not dropped (K5). int64 positions that broadcast to one shape."""
    sample = tl.load(drop_ptr + 2) + sample
    head = tl.load(drop_ptr + 3) + 1 + head
    word = philox.word_of(key, query, sample, head, tl.load(drop_ptr), tl.load(drop_ptr + 1))
    return philox.is_kept(word, tl.load(drop_ptr + 4))


@triton.jit
def _chain_of_products(a_at, b_at, a_mask, b_mask, stride_a, stride_b, dim, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """acc[r, c] = chain over d of a[r, d] b[c, d] (A1), without the final + 0.0."""
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, dim):
        a = tl.load(a_at, mask=a_mask, other=0.0).to(tl.float32)
        b = tl.load(b_at, mask=b_mask, other=0.0).to(tl.float32)
        acc = arithmetic.fma_flushed(arithmetic.flush(a)[:, None], arithmetic.flush(b)[None, :], acc)
        a_at += tl.cast(stride_a, tl.int64)
        b_at += tl.cast(stride_b, tl.int64)
    return acc


@triton.jit
def _column(x, columns, j):
    """x[:, j]: a sum of which all terms but one are +0."""
    return tl.sum(tl.where(columns[None, :] == j, x, 0.0), axis=1)


@triton.jit
def _row(x, rows, i):
    """x[i, :], in the same way."""
    return tl.sum(tl.where(rows[:, None] == i, x, 0.0), axis=0)


@triton.jit
def _continue(acc, factor, value, is_live):
    """acc, continued by factor*value where live; factor has passed `flush`."""
    longer = arithmetic.fma_flushed(factor[:, None], arithmetic.flush(value)[None, :], acc)
    return tl.where(is_live[:, None], longer, acc)


@triton.jit
def _operand(x, like_ptr, WIDENS: tl.constexpr):
    """fp32 rounded to the operands' dtype for tensor cores (K6)."""
    y = arithmetic.cast(x, like_ptr.dtype.element_ty)
    if WIDENS:  # the interpreter multiplies bf16 as integers
        y = y.to(tl.float32)
    return y


@triton.jit
def _load_tile(at, mask, WIDENS: tl.constexpr):
    x = tl.load(at, mask=mask, other=0.0)
    if WIDENS:
        x = x.to(tl.float32)
    return x


@triton.jit
def _part_of_head(BLOCK_D: tl.constexpr, PARTS: tl.constexpr):
    """The columns of the outputs that a program holds, where several share a wide head_dim."""
    columns = tl.arange(0, BLOCK_D // PARTS).to(tl.int64)
    if PARTS > 1:
        columns += tl.program_id(2).to(tl.int64) * (BLOCK_D // PARTS)
    return columns


# --- forward --------------------------------------------------------------------------------------------------------


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    starts_q_ptr,
    extent_ptr,
    table_ptr,
    heads_ptr,
    sinks_ptr,
    drop_ptr,
    out_ptr,
    rest_ptr,
    m_ptr,
    l_ptr,
    num_tokens,
    num_heads,
    num_sequences,
    num_chunks,
    num_key_rows,
    page_size,
    table_width,
    dim,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_kp,
    stride_ks,
    stride_kg,
    stride_kd,
    stride_vp,
    stride_vs,
    stride_vg,
    stride_vd,
    scale,
    cap,
    window,
    keep_scale,
    LEAF: tl.constexpr,
    WIDENS: tl.constexpr,
    IS_PAGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DROPS: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_REST: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    ROWS: tl.constexpr = QUERIES * HEADS
    sequence = _sequence_of(tl.program_id(0), starts_q_ptr, num_sequences, QUERIES, _SPARE)
    q_first, queries, k_first, keys = _extent(sequence, starts_q_ptr, extent_ptr, IS_PAGED)
    tile = tl.program_id(0).to(tl.int64) - (q_first // QUERIES + sequence * _SPARE)
    group = (tl.program_id(1) // num_chunks).to(tl.int64)
    first_head = tl.load(heads_ptr + group) + (tl.program_id(1) % num_chunks) * HEADS
    end_head = tl.load(heads_ptr + group + 1)
    r = tl.arange(0, ROWS)
    step = r // HEADS
    ahead = keys - queries
    first_query = tile * QUERIES - (ahead & (QUERIES - 1))  # at a multiple of QUERIES by position
    query = first_query + step
    head = first_head + r % HEADS
    token = q_first + query
    is_row = (query >= 0) & (query < queries) & (head < end_head) & (token >= 0) & (token < num_tokens)
    least = tl.maximum(tl.maximum(first_query, -q_first), 0)
    last = tl.minimum(tl.minimum(first_query + QUERIES, queries), num_tokens - q_first) - 1
    is_any = (least <= last) & (first_head < end_head)
    at = ahead + first_query
    lo, hi = _live_keys(at + step, keys, window, CAUSAL, HAS_WINDOW)
    first_key, end_key = _keys_of_positions(ahead + least, ahead + last, keys, window, is_any, CAUSAL, HAS_WINDOW)
    limit = keys
    is_served = keys >= 0
    if IS_PAGED:  # never beyond the sequence's row of the block table
        capacity = tl.cast(table_width, tl.int64) * page_size
        is_served = keys <= capacity
        hi = tl.minimum(hi, capacity)
        limit = tl.minimum(keys, capacity)
        end_key = tl.minimum(end_key, capacity)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    e = _part_of_head(BLOCK_D, PARTS)
    columns = tl.arange(0, KEY_BLOCK)
    table = table_ptr + tl.cast(sequence, tl.int64) * table_width
    q_at = q_ptr + (token * stride_qt + head * stride_qh)
    k_base = k_ptr + group * stride_kg
    v_base = v_ptr + group * stride_vg
    m = tl.full((ROWS,), _MINUS_INF, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if HAS_SINKS:
        m = tl.load(sinks_ptr + head, mask=is_row, other=_MINUS_INF).to(tl.float32)
        total = tl.where(m > _MINUS_INF, 1.0, 0.0)
    acc = tl.zeros((ROWS, BLOCK_D // PARTS), tl.float32)
    q = acc
    sums = tl.zeros((ROWS, _LEAST_N), tl.float32) + total[:, None]  # mma: the same sum in every column
    one = _operand(tl.full((KEY_BLOCK, _LEAST_N), 1.0, tl.float32), v_ptr, WIDENS)
    if LEAF == "mma":
        q = _load_tile(q_at[:, None] + d[None, :] * stride_qd, is_row[:, None] & (d < dim)[None, :], WIDENS)
    for block in range(first_key // KEY_BLOCK, (end_key + KEY_BLOCK - 1) // KEY_BLOCK):
        start = block * KEY_BLOCK
        position = start + columns.to(tl.int64)
        is_key = position < end_key
        page, row, is_there = _key_rows(
            tl.where(is_key, position, 0), k_first, table, page_size, num_key_rows, IS_PAGED
        )
        is_read = is_key & is_there
        k_at = k_base + (page * stride_kp + row * stride_ks)
        if LEAF == "mma":
            k = _load_tile(k_at[:, None] + d[None, :] * stride_kd, is_read[:, None] & (d < dim)[None, :], WIDENS)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            x = _chain_of_products(q_at, k_at, is_row, is_read, stride_qd, stride_kd, dim, ROWS, KEY_BLOCK)
        x, _ = _score(x, scale, cap, CAPPED)
        if IS_PAGED:
            is_missing = is_key & (is_there == 0)
        else:  # the same of a range of rows
            is_missing = (columns < _near(-k_first - start)) | (columns >= _near(num_key_rows - k_first - start))
            is_missing = is_missing & (columns < _near(end_key - start))
        x = tl.where(is_missing[None, :], float("nan"), x)
        first, end = _live_columns(start, at, step, is_row, limit, window, CAUSAL, HAS_WINDOW, KEY_BLOCK)
        live = (columns[None, :] >= first[:, None]) & (columns[None, :] < end[:, None])
        is_live_row = first < end
        highest = tl.max(elementary.order_key(tl.where(live, x, _MINUS_INF)), axis=1)
        m_new = elementary.of_order_key(tl.maximum(highest, elementary.order_key(m)))
        factor = elementary.exp(m - m_new)
        p = tl.where(live, elementary.exp(x - m_new[:, None]), 0.0)
        used = p
        if DROPS:
            is_kept = _is_kept(
                position[None, :], (tl.maximum(ahead, 0) + query)[:, None], head[:, None], sequence, drop_ptr
            )
            used = tl.where(live & is_kept, p * keep_scale, 0.0)
        if LEAF == "mma":
            v_at = v_base + (page * stride_vp + row * stride_vs)
            v = _load_tile(v_at[:, None] + e[None, :] * stride_vd, is_read[:, None] & (e < dim)[None, :], WIDENS)
            grown = tl.dot(_operand(used, v_ptr, WIDENS), v, acc * factor[:, None], input_precision="ieee")
            longer = tl.dot(_operand(p, v_ptr, WIDENS), one, sums * factor[:, None], input_precision="ieee")
            if HAS_WINDOW:
                longer = tl.where(is_live_row[:, None], longer, sums)
            sums = longer
        else:
            values = tl.zeros((ROWS, BLOCK_D // PARTS), tl.float32)
            ones = tl.zeros((ROWS,), tl.float32)
            p = arithmetic.flush(p)
            used = arithmetic.flush(used)
            for j in range(tl.maximum(first_key - start, 0), tl.minimum(end_key - start, KEY_BLOCK)):
                at_j = start + j
                is_there_j = at_j < end_key
                page_j, row_j, is_in_j = _key_rows(
                    tl.where(is_there_j, at_j, 0), k_first, table, page_size, num_key_rows, IS_PAGED
                )
                v_at = v_base + (page_j * stride_vp + row_j * stride_vs)
                v = tl.load(v_at + e * stride_vd, mask=(e < dim) & is_there_j & is_in_j, other=0.0).to(tl.float32)
                live_j = (at_j >= lo) & (at_j < hi)
                values = _continue(values, _column(used, columns, j), v, live_j)
                longer = arithmetic.fma_flushed(_column(p, columns, j), tl.full((ROWS,), 1.0, tl.float32), ones)
                ones = tl.where(live_j, longer, ones)
            grown = acc * factor[:, None] + (values + 0.0)
            total = tl.where(is_live_row, total * factor + (ones + 0.0), total)
        if LEAF == "fma" or HAS_WINDOW:
            grown = tl.where(is_live_row[:, None], grown, acc)
            m_new = tl.where(is_live_row, m_new, m)
        # else all rows of the tile, which lies within 64 positions, see every block: to keep both sums takes registers
        acc = grown
        m = m_new
    if LEAF == "mma":
        total = _column(sums, tl.arange(0, _LEAST_N), 0)
    y = tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))
    y = tl.where(is_served, y, float("nan"))
    out_at = (token * num_heads + head)[:, None] * dim + e[None, :]
    is_out = is_row[:, None] & (e < dim)[None, :]
    out = arithmetic.cast(y, out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at, out, mask=is_out)
    if HAS_REST:
        rest = arithmetic.cast(y - arithmetic.round_to(y, out_ptr.dtype.element_ty), rest_ptr.dtype.element_ty)
        tl.store(rest_ptr + out_at, rest, mask=is_out)
    if HAS_STATE:
        if PARTS > 1:
            is_row = is_row & (tl.program_id(2) == 0)
        tl.store(m_ptr + (token * num_heads + head), arithmetic.cast(m + 0.0, tl.float32), mask=is_row)
        tl.store(l_ptr + (token * num_heads + head), arithmetic.cast(total, tl.float32), mask=is_row)


# --- backward -------------------------------------------------------------------------------------------------------


@triton.jit
def mean_kernel(
    grad_ptr,
    out_ptr,
    rest_ptr,
    sinks_ptr,
    m_ptr,
    l_ptr,
    mean_ptr,
    w_ptr,
    rows_ptr,
    num_rows,
    num_heads,
    dim,
    stride_gt,
    stride_gh,
    stride_gd,
    steps,
    HAS_REST: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """D = row sum over d of dO*(out + rest) (A9), w = 1/l, and what each row adds to dsinks (K3)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    lanes = tl.arange(0, 16).to(tl.int64)
    grad_at = row // num_heads * stride_gt + row % num_heads * stride_gh
    total = tl.zeros((ROWS, 16), tl.float32)
    for step in range(0, steps):
        d = lanes + step * 16
        is_live = is_row[:, None] & (d < dim)[None, :]
        at = row[:, None] * dim + d[None, :]
        y = tl.load(out_ptr + at, mask=is_live, other=0.0).to(tl.float32)
        if HAS_REST:
            y = y + tl.load(rest_ptr + at, mask=is_live, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + (grad_at[:, None] + d[None, :] * stride_gd), mask=is_live, other=0.0)
        total += tl.where(is_live, grad.to(tl.float32) * y, 0.0)
    mean = elementary.fold_lanes(total, ROWS, 16, 4)
    tl.store(mean_ptr + row, mean, mask=is_row)
    w = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.load(l_ptr + row, mask=is_row, other=1.0))
    tl.store(w_ptr + row, w, mask=is_row)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row % num_heads, mask=is_row, other=_MINUS_INF).to(tl.float32)
        m = tl.load(m_ptr + row, mask=is_row, other=0.0)
        value = (elementary.exp(sink - m) * w) * (0.0 - mean)
        value = tl.where(sink == _MINUS_INF, 0.0, arithmetic.cast(value, tl.float32))
        tl.store(rows_ptr + row, value, mask=is_row)


@triton.jit
def _probabilities(chain, scale, cap, m, w, CAPPED: tl.constexpr):
    """(p, tanh of the capped score) from the chain q . k (K3). m, w broadcast to the pairs."""
    x, t = _score(chain, scale, cap, CAPPED)
    return elementary.exp(x - m) * w, t


@triton.jit
def _gradients_of_scores(
    p, t, d_chain, scale, mean, is_kept, keep_scale, live, CAPPED: tl.constexpr, DROPS: tl.constexpr
):
    """dS, +0 where not live, from p and the chain dO . v (K3). mean broadcasts to the pairs."""
    grad = d_chain + 0.0
    if DROPS:
        grad = tl.where(is_kept, grad * keep_scale, 0.0)
    ds = p * (grad - mean)
    if CAPPED:
        ds = ds * (1.0 - t * t)
    return tl.where(live, ds * scale, 0.0)


@triton.jit
def dq_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    starts_q_ptr,
    extent_ptr,
    heads_ptr,
    drop_ptr,
    m_ptr,
    w_ptr,
    mean_ptr,
    dq_ptr,
    num_tokens,
    num_heads,
    num_sequences,
    num_chunks,
    num_key_rows,
    dim,
    stride_gt,
    stride_gh,
    stride_gd,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_ks,
    stride_kg,
    stride_kd,
    stride_vs,
    stride_vg,
    stride_vd,
    scale,
    cap,
    window,
    keep_scale,
    LEAF: tl.constexpr,
    WIDENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    DROPS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    ROWS: tl.constexpr = QUERIES * HEADS
    sequence = _sequence_of(tl.program_id(0), starts_q_ptr, num_sequences, QUERIES, _SPARE)
    q_first, queries, k_first, keys = _extent(sequence, starts_q_ptr, extent_ptr, False)
    tile = tl.program_id(0).to(tl.int64) - (q_first // QUERIES + sequence * _SPARE)
    group = (tl.program_id(1) // num_chunks).to(tl.int64)
    first_head = tl.load(heads_ptr + group) + (tl.program_id(1) % num_chunks) * HEADS
    end_head = tl.load(heads_ptr + group + 1)
    r = tl.arange(0, ROWS)
    step = r // HEADS
    ahead = keys - queries
    counted = tl.maximum(ahead, 0)  # where blocks of queries count the first query (K3)
    first_query = tile * QUERIES - (counted & (QUERIES - 1))
    query = first_query + step
    head = first_head + r % HEADS
    token = q_first + query
    is_row = (query >= 0) & (query < queries) & (head < end_head) & (token >= 0) & (token < num_tokens)
    least = tl.maximum(tl.maximum(first_query, -q_first), 0)
    last = tl.minimum(tl.minimum(first_query + QUERIES, queries), num_tokens - q_first) - 1
    is_any = (least <= last) & (first_head < end_head)
    at = ahead + first_query
    lo, hi = _live_keys(at + step, keys, window, CAUSAL, HAS_WINDOW)
    # of all queries of the block of 64, here or not: what a row skips must not depend on its tile (K6)
    block_at = (counted + first_query) // QUERY_BLOCK * QUERY_BLOCK - counted + ahead
    first_key, end_key = _keys_of_positions(
        block_at, block_at + (QUERY_BLOCK - 1), keys, window, is_any, CAUSAL, HAS_WINDOW
    )
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    e = _part_of_head(BLOCK_D, PARTS)
    is_in = is_row[:, None] & (d < dim)[None, :]
    columns = tl.arange(0, KEY_BLOCK)
    q_at = q_ptr + (token * stride_qt + head * stride_qh)
    grad_at = grad_ptr + (token * stride_gt + head * stride_gh)
    state = token * num_heads + head
    m = tl.load(m_ptr + state, mask=is_row, other=0.0)
    w = tl.load(w_ptr + state, mask=is_row, other=1.0)
    mean = tl.load(mean_ptr + state, mask=is_row, other=0.0)
    dq = tl.zeros((ROWS, BLOCK_D // PARTS), tl.float32)
    q = dq
    grad = dq
    if LEAF == "mma":
        q = _load_tile(q_at[:, None] + d[None, :] * stride_qd, is_in, WIDENS)
        grad = _load_tile(grad_at[:, None] + d[None, :] * stride_gd, is_in, WIDENS)
    for block in range(first_key // KEY_BLOCK, (end_key + KEY_BLOCK - 1) // KEY_BLOCK):
        start = block * KEY_BLOCK
        position = start + columns.to(tl.int64)
        row = k_first + position
        is_read = (position < end_key) & (row >= 0) & (row < num_key_rows)
        k_at = k_ptr + (row * stride_ks + group * stride_kg)
        v_at = v_ptr + (row * stride_vs + group * stride_vg)
        if LEAF == "mma":
            is_kd = is_read[:, None] & (d < dim)[None, :]
            k = _load_tile(k_at[:, None] + d[None, :] * stride_kd, is_kd, WIDENS)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            x = _chain_of_products(q_at, k_at, is_row, is_read, stride_qd, stride_kd, dim, ROWS, KEY_BLOCK)
        p, t = _probabilities(x, scale, cap, m[:, None], w[:, None], CAPPED)
        if LEAF == "mma":  # behind p: fewer values wait in registers
            v = _load_tile(v_at[:, None] + d[None, :] * stride_vd, is_kd, WIDENS)
            dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        else:
            dp = _chain_of_products(grad_at, v_at, is_row, is_read, stride_gd, stride_vd, dim, ROWS, KEY_BLOCK)
        first, end = _live_columns(start, at, step, is_row, keys, window, CAUSAL, HAS_WINDOW, KEY_BLOCK)
        live = (columns[None, :] >= first[:, None]) & (columns[None, :] < end[:, None])
        is_kept = live
        if DROPS:
            is_kept = _is_kept(
                position[None, :], (tl.maximum(ahead, 0) + query)[:, None], head[:, None], sequence, drop_ptr
            )
        ds = _gradients_of_scores(p, t, dp, scale, mean[:, None], is_kept, keep_scale, live, CAPPED, DROPS)
        if LEAF == "mma":
            if PARTS > 1:
                k = _load_tile(k_at[:, None] + e[None, :] * stride_kd, is_read[:, None] & (e < dim)[None, :], WIDENS)
            grown = tl.dot(_operand(ds, k_ptr, WIDENS), k, dq, input_precision="ieee")
        else:
            sums = tl.zeros((ROWS, BLOCK_D // PARTS), tl.float32)
            ds = arithmetic.flush(ds)
            for j in range(tl.maximum(first_key - start, 0), tl.minimum(end_key - start, KEY_BLOCK)):
                row_j = k_first + start + j
                is_read_j = (start + j < end_key) & (row_j >= 0) & (row_j < num_key_rows)
                k_at_j = k_ptr + (row_j * stride_ks + group * stride_kg)
                k = tl.load(k_at_j + e * stride_kd, mask=(e < dim) & is_read_j, other=0.0).to(tl.float32)
                sums = _continue(sums, _column(ds, columns, j), k, (start + j >= lo) & (start + j < hi))
            grown = tl.where((first < end)[:, None], dq + (sums + 0.0), dq)
        dq = grown
    is_out = is_row[:, None] & (e < dim)[None, :]
    tl.store(dq_ptr + (state[:, None] * dim + e[None, :]), arithmetic.cast(dq, tl.float32), mask=is_out)


@triton.jit
def dkv_kernel(
    grad_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    starts_q_ptr,
    extent_ptr,
    group_ptr,
    drop_ptr,
    m_ptr,
    w_ptr,
    mean_ptr,
    dk_ptr,
    dv_ptr,
    num_tokens,
    num_heads,
    num_sequences,
    num_key_rows,
    dim,
    stride_gt,
    stride_gh,
    stride_gd,
    stride_qt,
    stride_qh,
    stride_qd,
    stride_ks,
    stride_kg,
    stride_kd,
    stride_vs,
    stride_vg,
    stride_vd,
    scale,
    cap,
    window,
    keep_scale,
    LEAF: tl.constexpr,
    WIDENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    DROPS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WANTS_DK: tl.constexpr,
    WANTS_DV: tl.constexpr,
):
    """dk, dv [H, S, D] of one query head, or one of them: KEYS keys of a sequence over blocks of 64 query positions."""
    sequence = _sequence_of(tl.program_id(0), extent_ptr, num_sequences, KEYS, 1)
    q_first, queries, k_first, keys = _extent(sequence, starts_q_ptr, extent_ptr, False)
    tile = tl.program_id(0).to(tl.int64) - (k_first // KEYS + sequence)
    head = tl.program_id(1).to(tl.int64)
    group = tl.load(group_ptr + head)
    step = tl.arange(0, KEYS)
    key = tile * KEYS + step
    row = k_first + key
    is_key = (key < keys) & (row >= 0) & (row < num_key_rows)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    is_in = is_key[:, None] & (d < dim)[None, :]
    columns = tl.arange(0, QUERY_BLOCK)
    k_at = k_ptr + (row * stride_ks + group * stride_kg)
    v_at = v_ptr + (row * stride_vs + group * stride_vg)
    # query i stands at position `ahead + i`; blocks are counted from `first + i`
    ahead = keys - queries
    first = tl.maximum(ahead, 0)
    lowest = tile * KEYS
    # of all keys of the block of 64: what a row skips must not depend on its tile (K6)
    block_at = lowest // KEY_BLOCK * KEY_BLOCK
    first_query = queries * 0
    end_query = queries
    if CAUSAL:
        first_query = tl.maximum(first_query, block_at - ahead)
    if HAS_WINDOW:
        first_query = tl.maximum(first_query, block_at - window + 1 - ahead)
        end_query = tl.minimum(end_query, block_at + KEY_BLOCK - 1 + window - ahead)
    least = tl.maximum(-q_first, 0)
    last = tl.minimum(queries, num_tokens - q_first)
    dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    dv = tl.zeros((KEYS, BLOCK_D), tl.float32)
    k = dk
    v = dk
    if LEAF == "mma":
        k = _load_tile(k_at[:, None] + d[None, :] * stride_kd, is_in, WIDENS)
    if LEAF == "mma" and WANTS_DK:
        v = _load_tile(v_at[:, None] + d[None, :] * stride_vd, is_in, WIDENS)
    end_block = (first + end_query + QUERY_BLOCK - 1) // QUERY_BLOCK
    if lowest >= keys:
        end_block = end_block * 0
    for block in range((first + first_query) // QUERY_BLOCK, end_block):
        start = block * QUERY_BLOCK - first
        query = start + columns.to(tl.int64)
        token = q_first + query
        is_query = (query >= 0) & (query < queries) & (token >= 0) & (token < num_tokens)
        # [query, key]: what belongs to a query is a number of a row then, which few threads hold
        lo, hi = _live_columns(lowest, ahead + start, columns, is_query, keys, window, CAUSAL, HAS_WINDOW, KEYS)
        live = (step[None, :] >= lo[:, None]) & (step[None, :] < hi[:, None])
        q_at = q_ptr + (token * stride_qt + head * stride_qh)
        grad_at = grad_ptr + (token * stride_gt + head * stride_gh)
        state = token * num_heads + head
        m = tl.load(m_ptr + state, mask=is_query, other=0.0)
        w = tl.load(w_ptr + state, mask=is_query, other=1.0)
        if LEAF == "mma":
            is_qd = is_query[:, None] & (d < dim)[None, :]
            q = _load_tile(q_at[:, None] + d[None, :] * stride_qd, is_qd, WIDENS)
            x = tl.dot(q, tl.trans(k), input_precision="ieee")
        else:
            x = _chain_of_products(q_at, k_at, is_query, is_key, stride_qd, stride_kd, dim, QUERY_BLOCK, KEYS)
        p, t = _probabilities(x, scale, cap, m[:, None], w[:, None], CAPPED)
        is_kept = live
        used = p
        if DROPS:
            is_kept = _is_kept(key[None, :], (first + query)[:, None], head, sequence, drop_ptr)
            used = tl.where(is_kept, p * keep_scale, 0.0)
        used = tl.where(live, used, 0.0)
        if LEAF == "mma":
            grad = _load_tile(grad_at[:, None] + d[None, :] * stride_gd, is_qd, WIDENS)
            if WANTS_DK:
                dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        else:
            dp = _chain_of_products(grad_at, v_at, is_query, is_key, stride_gd, stride_vd, dim, QUERY_BLOCK, KEYS)
        ds = used
        if WANTS_DK:
            mean = tl.load(mean_ptr + state, mask=is_query, other=0.0)
            ds = _gradients_of_scores(p, t, dp, scale, mean[:, None], is_kept, keep_scale, live, CAPPED, DROPS)
        if LEAF == "mma":
            if WANTS_DV:
                dv = tl.dot(tl.trans(_operand(used, q_ptr, WIDENS)), grad, dv, input_precision="ieee")
            if WANTS_DK:
                dk = tl.dot(tl.trans(_operand(ds, q_ptr, WIDENS)), q, dk, input_precision="ieee")
        else:
            sums_k = tl.zeros((KEYS, BLOCK_D), tl.float32)
            sums_v = tl.zeros((KEYS, BLOCK_D), tl.float32)
            ds = arithmetic.flush(ds)
            used = arithmetic.flush(used)
            for j in range(tl.maximum(first_query - start, 0), tl.minimum(end_query - start, QUERY_BLOCK)):
                i = start + j
                token_j = q_first + i
                is_query_j = (i >= 0) & (i < queries) & (token_j >= 0) & (token_j < num_tokens)
                q = tl.load(
                    q_ptr + (token_j * stride_qt + head * stride_qh) + d * stride_qd,
                    mask=(d < dim) & is_query_j,
                    other=0.0,
                ).to(tl.float32)
                grad = tl.load(
                    grad_ptr + (token_j * stride_gt + head * stride_gh) + d * stride_gd,
                    mask=(d < dim) & is_query_j,
                    other=0.0,
                ).to(tl.float32)
                lo_j, hi_j = _live_keys(ahead + i, keys, window, CAUSAL, HAS_WINDOW)
                live_j = (key >= lo_j) & (key < hi_j) & is_query_j
                sums_k = _continue(sums_k, _row(ds, columns, j), q, live_j)
                sums_v = _continue(sums_v, _row(used, columns, j), grad, live_j)
            lo, hi = _live_query_columns(
                start, lowest, step, is_key, least, last, ahead, window, CAUSAL, HAS_WINDOW, QUERY_BLOCK
            )
            dk = tl.where((lo < hi)[:, None], dk + (sums_k + 0.0), dk)
            dv = tl.where((lo < hi)[:, None], dv + (sums_v + 0.0), dv)
    at = (head * num_key_rows + row)[:, None] * dim + d[None, :]
    if WANTS_DK:
        tl.store(dk_ptr + at, arithmetic.cast(dk, tl.float32), mask=is_in)
    if WANTS_DV:
        tl.store(dv_ptr + at, arithmetic.cast(dv, tl.float32), mask=is_in)


# --- launch ---------------------------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """What decides a score besides q and k (K2): softcap 0 and window 0 are none."""

    scale: float
    softcap: float
    causal: bool
    window: int


class State(NamedTuple):
    """out [T, H, D]; m, total fp32 [T, H]; rest [T, H, D] in out's dtype, empty for fp32 or where not asked for."""

    out: Tensor
    m: Tensor
    total: Tensor
    rest: Tensor


class Dropout(NamedTuple):
    """K5 on the device: int64 [key, key, first sample, first head, threshold], and 1/(1 - p)."""

    numbers: Tensor
    scale: float


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    extent: Tensor,
    table: Tensor | None,
    sinks: Tensor | None,
    head_offsets: Sequence[int],
    pairs: Pairs,
    *,
    leaf: str,
    dropout: Dropout | None = None,
    with_state: bool = True,
    with_rest: bool = False,
    tile: AttentionTile | None = None,
) -> State:
    """K1 over packed keys [S, G, D] (extent: cu_k [B + 1]) or pages [P, N, G, D] (extent: seq_lens [B], table [B, W]).

    q [T, H, D], any strides; starts_q [B + 1]; sinks [H]. leaf "fma", or "mma:<architecture>" for bf16 and fp16
    (fp32 is always "fma"). tile: for tests and measurements; it changes no bit. Errors: PlanError. Batch-invariant.
    """
    where = "kernels.attention"
    _require(where, q, k, v, head_offsets)
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    m = torch.empty((tokens, heads), dtype=torch.float32, device=q.device) if with_state else out
    total = torch.empty_like(m) if with_state else out
    with_rest = with_rest and q.dtype != torch.float32
    rest = torch.empty_like(out) if with_rest else out.new_empty(0)
    if out.numel() == 0:
        return State(out, m, total, rest)
    leaf = leaf if q.dtype != torch.float32 else FMA
    if tile is None:
        tile = attention_tile(leaf, dim, "forward", has_window=pairs.window != 0, drops=dropout is not None)
    queries, heads_per_tile, chunks = _split_rows(where, head_offsets, tile)
    num_sequences = starts_q.shape[0] - 1
    paged = table is not None
    grid = (tokens // queries + 2 * num_sequences, (len(head_offsets) - 1) * chunks, tile.parts)
    numbers = starts_q if dropout is None else dropout.numbers
    forward_kernel[grid](
        q,
        k,
        v,
        starts_q.contiguous(),
        extent.contiguous(),
        starts_q if table is None else table.contiguous(),
        device_integers(tuple(head_offsets), q.device),
        q if sinks is None else sinks.contiguous(),
        numbers,
        out,
        rest if with_rest else out,
        m,
        total,
        tokens,
        heads,
        num_sequences,
        chunks,
        k.shape[0],
        k.shape[1] if paged else 1,
        table.shape[1] if table is not None else 1,
        dim,
        *q.stride(),
        *(k.stride() if paged else (0, *k.stride())),
        *(v.stride() if paged else (0, *v.stride())),
        pairs.scale,
        pairs.softcap,
        pairs.window,
        0.0 if dropout is None else dropout.scale,
        LEAF="fma" if leaf == FMA else "mma",
        WIDENS=is_interpreted(),
        IS_PAGED=paged,
        CAUSAL=pairs.causal,
        HAS_WINDOW=pairs.window != 0,
        CAPPED=pairs.softcap != 0,
        HAS_SINKS=sinks is not None,
        DROPS=dropout is not None,
        HAS_STATE=with_state,
        HAS_REST=with_rest,
        QUERIES=queries,
        HEADS=heads_per_tile,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        PARTS=tile.parts,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **arithmetic.OPTIONS,
    )
    return State(out, m, total, rest)


class Gradients(NamedTuple):
    """fp32, unrounded: dq [T, H, D]; dk, dv [S, C, D], the nodes of all KV heads; rows of dsinks [T, H] or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_sink_rows: Tensor | None


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: State,
    starts_q: Tensor,
    starts_k: Tensor,
    sinks: Tensor | None,
    head_offsets: Sequence[int],
    programs: Sequence[Any],
    pairs: Pairs,
    *,
    leaf: str,
    dropout: Dropout | None = None,
    tile: AttentionTile | None = None,
) -> Gradients:
    """K3, K4: dq over key blocks; dk, dv per query head over query blocks, then folded by programs[g] (a schedule of
    the query heads of KV head g). grad_out [T, H, D]; state of the forward, out and rest contiguous. Batch-invariant.
    """
    where = "kernels.attention_backward"
    _require(where, q, k, v, head_offsets)
    tokens, heads, dim = q.shape
    num_keys = k.shape[0]
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    dk = torch.empty((heads, num_keys, dim), dtype=torch.float32, device=q.device)
    dv = torch.empty_like(dk)
    leaf = leaf if q.dtype != torch.float32 else FMA

    def tile_of(kernel: Literal["dq", "dkv", "dk", "dv"]) -> AttentionTile:
        given = {"has_window": pairs.window != 0, "drops": dropout is not None}
        return attention_tile(leaf, dim, kernel, **given) if tile is None else tile

    mean = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    w = torch.empty_like(mean)
    rows = torch.empty_like(mean) if sinks is not None else None
    out, m, total, rest = (t.contiguous() for t in state)
    if tokens:
        mean_kernel[(triton.cdiv(tokens * heads, 32),)](
            grad_out,
            out,
            rest if rest.numel() else out,
            q if sinks is None else sinks.contiguous(),
            m,
            total,
            mean,
            w,
            mean if rows is None else rows,
            tokens * heads,
            heads,
            dim,
            *grad_out.stride(),
            triton.cdiv(dim, 16),
            HAS_REST=rest.numel() > 0,
            HAS_SINKS=sinks is not None,
            ROWS=32,
            num_warps=4,
            **arithmetic.OPTIONS,
        )
    numbers = starts_q if dropout is None else dropout.numbers
    strides = (*grad_out.stride(), *q.stride(), *k.stride(), *v.stride())
    scalars = (pairs.scale, pairs.softcap, pairs.window, 0.0 if dropout is None else dropout.scale)
    shared: dict[str, Any] = {
        "LEAF": "fma" if leaf == FMA else "mma",
        "WIDENS": is_interpreted(),
        "CAUSAL": pairs.causal,
        "HAS_WINDOW": pairs.window != 0,
        "CAPPED": pairs.softcap != 0,
        "DROPS": dropout is not None,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        **arithmetic.OPTIONS,
    }
    num_sequences = starts_q.shape[0] - 1
    starts_q, starts_k = starts_q.contiguous(), starts_k.contiguous()
    if dq.numel():
        dq_tile = tile_of("dq")
        queries, heads_per_tile, chunks = _split_rows(where, head_offsets, dq_tile)
        grid = (tokens // queries + 2 * num_sequences, (len(head_offsets) - 1) * chunks, dq_tile.parts)
        dq_kernel[grid](
            grad_out,
            q,
            k,
            v,
            starts_q,
            starts_k,
            device_integers(tuple(head_offsets), q.device),
            numbers,
            m,
            w,
            mean,
            dq,
            tokens,
            heads,
            num_sequences,
            chunks,
            num_keys,
            dim,
            *strides,
            *scalars,
            QUERIES=queries,
            HEADS=heads_per_tile,
            PARTS=dq_tile.parts,
            num_warps=dq_tile.num_warps,
            num_stages=dq_tile.num_stages,
            **shared,
        )
    if dk.numel():
        groups = tuple(g for g, (lo, hi) in enumerate(itertools.pairwise(head_offsets)) for _ in range(lo, hi))
        outputs: tuple[Literal["dkv", "dk", "dv"], ...] = ("dk", "dv") if tile_of("dkv").is_divided else ("dkv",)
        for name in outputs:
            dkv_tile = tile_of(name)
            if KEY_BLOCK.value % dkv_tile.keys:
                raise PlanError(f"{where}: keys of a tile must divide the {KEY_BLOCK.value} of a block, got {dkv_tile}")
            dkv_kernel[(num_keys // dkv_tile.keys + num_sequences, heads)](
                grad_out,
                q,
                k,
                v,
                starts_q,
                starts_k,
                device_integers(groups, q.device),
                numbers,
                m,
                w,
                mean,
                dk,
                dv,
                tokens,
                heads,
                num_sequences,
                num_keys,
                dim,
                *strides,
                *scalars,
                KEYS=dkv_tile.keys,
                WANTS_DK=name != "dv",
                WANTS_DV=name != "dk",
                num_warps=dkv_tile.num_warps,
                num_stages=dkv_tile.num_stages,
                **shared,
            )
    return Gradients(dq, _fold_heads(dk, head_offsets, programs), _fold_heads(dv, head_offsets, programs), rows)


def _fold_heads(per_head: Tensor, head_offsets: Sequence[int], programs: Sequence[Any]) -> Tensor:
    """[H, S, D] -> [S, C, D]: the nodes over the query heads of each KV head, in fp32 (K4)."""
    nodes: list[Tensor] = []
    for (lo, hi), program in zip(itertools.pairwise(head_offsets), programs, strict=True):
        value = per_head[lo:hi]
        if hi - lo > 1 and value.numel():
            value = combine.combine(value, program)
            value = value[None] if program.is_root else value
        nodes.append(value)
    return torch.cat(nodes).transpose(0, 1).contiguous()


def _split_rows(where: str, head_offsets: Sequence[int], tile: AttentionTile) -> tuple[int, int, int]:
    """(queries of a tile, query heads of one KV head in it, tiles that hold all of these heads)."""
    largest = max(hi - lo for lo, hi in itertools.pairwise(head_offsets))
    heads = min(triton.next_power_of_2(largest), tile.rows, 16)
    queries = tile.rows // heads
    if QUERY_BLOCK.value % queries:
        raise PlanError(f"{where}: queries of a tile must divide the {QUERY_BLOCK.value} of a block, got {queries}")
    return queries, heads, triton.cdiv(largest, heads)


def _require(where: str, q: Tensor, k: Tensor, v: Tensor, head_offsets: Sequence[int]) -> None:
    if q.dtype not in DTYPES or {k.dtype, v.dtype} != {q.dtype}:
        raise PlanError(f"{where}: expected q, k and v in one of {DTYPES}, got {q.dtype}, {k.dtype} and {v.dtype}")
    is_cut = head_offsets[0] == 0 and all(lo <= hi for lo, hi in itertools.pairwise(head_offsets))
    if not is_cut or head_offsets[-1] != q.shape[1] or len(head_offsets) != k.shape[-2] + 1:
        raise PlanError(f"{where}: the query heads of {k.shape[-2]} KV heads must add up to {q.shape[1]}")
    if k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise PlanError(f"{where}: expected k and v alike with head_dim {q.shape[-1]}, got {list(k.shape)}")


def store_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """cache[slot // N, slot % N] = k[t], v[t]; a slot below 0 or beyond the cache stores nothing. Bytes move."""
    tokens, groups, dim = k.shape
    if k.numel() == 0:
        return
    for x, cache in ((k, key_cache), (v, value_cache)):
        store_kernel[(tokens, groups)](
            x,
            cache,
            slots.contiguous(),
            cache.shape[0] * cache.shape[1],
            cache.shape[1],
            dim,
            *x.stride(),
            *cache.stride(),
            BLOCK_D=triton.next_power_of_2(dim),
            num_warps=1,
            **arithmetic.OPTIONS,
        )


@triton.jit
def store_kernel(
    x_ptr,
    cache_ptr,
    slots_ptr,
    num_slots,
    page_size,
    dim,
    stride_xt,
    stride_xg,
    stride_xd,
    stride_p,
    stride_n,
    stride_g,
    stride_d,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    is_live = (d < dim) & (slot >= 0) & (slot < num_slots)
    x = tl.load(x_ptr + (token * stride_xt + group * stride_xg) + d * stride_xd, mask=is_live, other=0.0)
    cache_at = cache_ptr + (slot // page_size * stride_p + slot % page_size * stride_n + group * stride_g)
    tl.store(cache_at + d * stride_d, x, mask=is_live)
