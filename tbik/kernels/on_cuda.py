"""The functions of tbik._C that the operators call, for CUDA tensors: same names, arguments, results and bits.

tbik.ops asks `tbik.devices.kernels_of(tensor)` and gets this module or tbik._C. Here tensors become the dense rows
that kernels take; nothing is computed here. Guarantees are those of the kernels. Errors: PlanError.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tbik import _C, tree
from tbik.kernels import activation as activation_kernels
from tbik.kernels import attention as attention_kernels
from tbik.kernels import combine, philox, vocab
from tbik.kernels import embedding as embedding_kernels
from tbik.kernels import experts as expert_kernels
from tbik.kernels import norm as norm_kernels
from tbik.kernels import rope as rope_kernels
from tbik.kernels.folding import Fold, Push
from tbik.kernels.rows import dense, dense_rows, device_integers
from tbik.reference import TOKENS_PER_BLOCK

# --- folds ----------------------------------------------------------------------------------------------------------


def fold(
    inputs: Tensor | Sequence[Tensor],
    schedule: Any,
    avg: int = 1,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The root, or the nodes of a cover, of the inputs [R, ...]; tbik.kernels.combine."""
    x = inputs if isinstance(inputs, Tensor) else torch.stack([t.resolve_neg() for t in inputs])
    out = x.dtype if out_dtype is None else out_dtype
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()  # exact; the root is rounded once
    return combine.combine(dense(x), schedule, bias=bias, avg=avg, out_dtype=out)


# --- norms ----------------------------------------------------------------------------------------------------------


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
    """(y, h) of R1, R2, R3."""
    residual, bias = (None if t is None else dense(t) for t in (residual, bias))
    return norm_kernels.norm(dense(x), residual, dense(w), bias, eps, centered, offset, compute)


def norm_dx(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    residual: Tensor | None,
    eps: float,
    centered: bool,
    offset: bool,
    compute: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    """dx of R1 or R3, plus the gradient `residual` of h."""
    dh = None if residual is None else dense(residual)
    return norm_kernels.norm_dx(dense(dy), dense(x), dense(w), eps, centered, offset, dh, compute, out_dtype)


def norm_gradients(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    residual: Tensor | None,
    eps: float,
    centered: bool,
    offset: bool,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    with_dx: bool,
    with_dw: bool,
    with_dbias: bool,
    num_heads: int,
    cuts: Sequence[int],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, leaves of dw, leaves of dbias), None where not wanted; the statistics of a row are computed once."""
    dy, x = dense(dy), dense(x)
    dx = dw = db = statistics = None
    if with_dw:
        statistics = torch.empty((2, math.prod(x.shape[:-1])), dtype=torch.float32, device=x.device)
    if with_dx:
        dh = None if residual is None else dense(residual)
        dx = norm_kernels.norm_dx(dy, x, dense(w), eps, centered, offset, dh, compute, out_dtype, statistics)
    elif statistics is not None:
        norm_kernels.norm_statistics(x, eps, centered, statistics)
    if with_dw:
        dw = norm_kernels.column_leaves(dy, x, statistics, num_heads, cuts)
    if with_dbias:
        db = norm_kernels.column_leaves(dy, None, None, num_heads, cuts)
    return dx, dw, db


def column_leaves(
    dy: Tensor, x: Tensor | None, num_heads: int, eps: float, centered: bool, cuts: Sequence[int]
) -> Tensor:
    """fp32 [chains, H K]: the chains of dy n over the tokens between two cuts, n = 1 without x."""
    dy = dense(dy)
    if x is None:
        return norm_kernels.column_leaves(dy, None, None, num_heads, cuts)
    x = dense(x)
    statistics = torch.empty((2, math.prod(x.shape[:-1])), dtype=torch.float32, device=x.device)
    norm_kernels.norm_statistics(x, eps, centered, statistics)
    return norm_kernels.column_leaves(dy, x, statistics, num_heads, cuts)


# --- activations, rope ----------------------------------------------------------------------------------------------


def activation(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """cast(f(gate) up) (R5, R6)."""
    y = gate.new_empty(gate.shape)
    if y.numel():
        other = None if up is None else dense_rows(up)
        activation_kernels.activation(dense_rows(gate), other, kind, y.view(-1, y.shape[-1]))
    return y


def activation_dx(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, packed: bool) -> list[Tensor]:
    """[dgate, dup], [dgate] without up, or packed: one [..., 2 K], dgate before dup."""
    length = gate.shape[-1]
    if packed:
        results = [gate.new_empty((*gate.shape[:-1], 2 * length))]
        both = results[0].view(-1, 2 * length)
        parts = [both[:, :length], both[:, length:]]
    else:
        results = [gate.new_empty(gate.shape) for _ in range(1 if up is None else 2)]
        parts = [t.view(-1, length) for t in results]
    if gate.numel():
        other = None if up is None else dense_rows(up)
        dup = parts[1] if len(parts) > 1 else None
        activation_kernels.activation_dx(dense_rows(dy), dense_rows(gate), other, kind, parts[0], dup)
    return results


def rope(x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool, backward: bool, out_dtype: torch.dtype) -> Tensor:
    """R4; the tables broadcast to the leading axes of x."""
    lead, half = x.shape[:-2], sin.shape[-1]
    sin_TD, cos_TD = (t.expand(*lead, half).reshape(-1, half).contiguous() for t in (sin, cos))
    y = rope_kernels.rope(dense(x).view(-1, *x.shape[-2:]), sin_TD, cos_TD, interleaved, backward, out_dtype)
    return y.view(x.shape)


def rope_tables(positions: Tensor, inv_freq: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(sin, cos) by C5."""
    return rope_kernels.rope_tables(positions, inv_freq, scale)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cast(cap tanh(x / cap)) (R10)."""
    return activation_kernels.softcap(dense(x), cap)


def softcap_dx(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    """cast(dy (1 - t t)), t = tanh(x / cap)."""
    return activation_kernels.softcap(dense(x), cap, dense(dy))


# --- experts --------------------------------------------------------------------------------------------------------


def combine_slots(values: Tensor, rows: Tensor, scale: Tensor | None) -> Tensor:
    """fp32 [L, T, H]: the chain over the slots of each token (M2, M3)."""
    return expert_kernels.combine_slots(dense(values), rows.contiguous(), None if scale is None else dense(scale))


def scale_rows(x: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """cast(x[row] * scale[row])."""
    return expert_kernels.multiply(dense(x), dense(scale), out_dtype)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """fp32 a * b, element by element."""
    return expert_kernels.multiply(dense(a), dense(b), torch.float32)


# --- sums of rows and of tensors, dropout, embedding ----------------------------------------------------------------


def row_nodes(x: Tensor, cuts: Sequence[int], schedule: Any, avg: int, out_dtype: torch.dtype) -> Tensor:
    """The root / avg, or the nodes of a cover, of the row sums of the leaves [cuts[i], cuts[i + 1]) (A9, R8)."""
    sums = vocab.leaf_sums("x", dense_rows(x), list(cuts))
    if not schedule.num_inputs:
        return sums.view(0, *x.shape[:-1])
    value = combine.combine(sums, schedule, avg=avg, out_dtype=out_dtype)
    return value.view(*((-1,) if not schedule.is_root else ()), *x.shape[:-1])


def sum_inputs(inputs: Sequence[Tensor]) -> Tensor:
    """cast(((x_1 + x_2) + ...) + x_n) in fp32, in index order (L3)."""
    wide = torch.stack([dense(t).float() for t in inputs])
    pushes = tuple(Push(i, min(i, 1), min(i, 1), 1 + min(i, 1)) for i in range(len(inputs)))
    return combine.combine_pushes(wide, Fold(pushes, min(len(inputs), 2), 1), True, out_dtype=inputs[0].dtype)


def dropout(
    x: Tensor,
    p: float,
    seed: int,
    step: int,
    name: int,
    sample_offsets: Sequence[int],
    first_sample: int,
    first_position: int,
    first_feature: int,
) -> Tensor:
    """R9."""
    key = philox.key_of(seed, step, name)
    return philox.dropout(dense(x), p, key, sample_offsets, first_sample, first_position, first_feature)


def embedding(ids: Tensor, w: Tensor, first_row: int, vocabulary: int, out_dtype: torch.dtype) -> Tensor:
    """cast(w[ids - first_row]), -0.0 where that is no row (A8)."""
    return embedding_kernels.look_up(ids.long().contiguous(), dense_rows(w), first_row, vocabulary, out_dtype)


def embedding_rows(
    dy: Tensor,
    ids: Tensor,
    first_row: int,
    num_rows: int,
    vocabulary: int,
    sample_offsets: Sequence[int],
    narrow: bool,
) -> tuple[Tensor, Tensor]:
    """(rows that occur, ascending; their gradients fp32 [n, D]) (R7)."""
    dy_TD = dense(dy).view(-1, dy.shape[-1])
    return embedding_kernels.row_gradients(dy_TD, ids.long().reshape(-1), first_row, num_rows, sample_offsets, narrow)


# --- rows over the vocabulary ---------------------------------------------------------------------------------------
# x [..., V]; statistics fp32 [...]; covers fp32 [C, ...].


def vocab_max(x: Tensor) -> Tensor:
    """m, the maximum of each row (A8)."""
    return vocab.row_max(dense_rows(x)).view(x.shape[:-1])


def vocab_sums(x: Tensor, m: Tensor | None, length: int, leaves: int, lo: int, hi: int) -> Tensor:
    """The cover of the leaves [lo, hi) of the row sum of x, or of exp(x - m)."""
    rows = dense_rows(x)
    cuts = tree.cuts(length, leaves)[lo : hi + 1]
    sums = vocab.leaf_sums("x" if m is None else "exp", rows, cuts, m=None if m is None else dense(m))
    return _cover(sums, leaves, lo, hi).view(-1, *x.shape[:-1])


def vocab_finish(m: Tensor, s: Tensor) -> Tensor:
    """lse = m + log s."""
    return vocab.finish_log_sum_exp(dense(m), dense(s))


def vocab_softmax(x: Tensor, leaves: int) -> tuple[Tensor, Tensor, Tensor]:
    """(p, m, s) (V1, V2)."""
    m = vocab_max(x)
    s = _root(vocab.leaf_sums("exp", dense_rows(x), tree.cuts(x.shape[-1], leaves), m=m), leaves).view(m.shape)
    return vocab_softmax_of(x, m, s), m, s


def vocab_softmax_of(x: Tensor, m: Tensor, s: Tensor) -> Tensor:
    """p = cast(exp(x - m) / s)."""
    p = x.new_empty(x.shape)
    vocab.map_rows("softmax", dense_rows(x), p, dense(m), dense(s))
    return p


def vocab_softmax_dots(
    dp: Tensor, x: Tensor, m: Tensor, s: Tensor, length: int, leaves: int, lo: int, hi: int
) -> Tensor:
    """The cover of the row sum of p*dp."""
    cuts = tree.cuts(length, leaves)[lo : hi + 1]
    sums = vocab.leaf_sums("dots", dense_rows(x), cuts, m=dense(m), s=dense(s), dp=dense_rows(dp))
    return _cover(sums, leaves, lo, hi).view(-1, *x.shape[:-1])


def vocab_softmax_dx(dp: Tensor, x: Tensor, m: Tensor, s: Tensor, dots: Tensor | None, leaves: int) -> Tensor:
    """dx = cast(p * (dp - dots)) (V3); dots None: computed here."""
    rows, m, s, dp = dense_rows(x), dense(m), dense(s), dense_rows(dp)
    if dots is None:
        sums = vocab.leaf_sums("dots", rows, tree.cuts(x.shape[-1], leaves), m=m, s=s, dp=dp)
        dots = _root(sums, leaves)
    dx = x.new_empty(x.shape)
    vocab.map_rows("softmax_dx", rows, dx, m, s, dense(dots), dy=dp)
    return dx


def vocab_log_sum_exp(x: Tensor, leaves: int) -> Tensor:
    """lse of whole rows (V1)."""
    m = vocab_max(x)
    s = _root(vocab.leaf_sums("exp", dense_rows(x), tree.cuts(x.shape[-1], leaves), m=m), leaves)
    return vocab_finish(m, s.view(m.shape))


def vocab_log_softmax(x: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    """(y, lse) (V4)."""
    lse = vocab_log_sum_exp(x, leaves)
    return vocab_log_softmax_of(x, lse), lse


def vocab_log_softmax_of(x: Tensor, lse: Tensor) -> Tensor:
    """y = cast(x - lse)."""
    y = x.new_empty(x.shape)
    vocab.map_rows("log_softmax", dense_rows(x), y, dense(lse))
    return y


def vocab_log_softmax_dx(dy: Tensor, x: Tensor, lse: Tensor, total: Tensor | None, leaves: int) -> Tensor:
    """dx = cast(dy - exp(x - lse) * total) (V5); total None: the row sum of dy, computed here."""
    rows, dy = dense_rows(x), dense_rows(dy)
    if total is None:
        total = _root(vocab.leaf_sums("x", dy, tree.cuts(x.shape[-1], leaves)), leaves)
    dx = x.new_empty(x.shape)
    vocab.map_rows("log_softmax_dx", rows, dx, dense(lse), dense(total), dy=dy)
    return dx


def vocab_losses(lse: Tensor, picked: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """loss = lse - x_t, +0 where ignored (V6)."""
    return vocab.losses(dense(lse), dense(picked), targets.contiguous(), ignore_index)


def vocab_cross_entropy_dx(g: Tensor, x: Tensor, targets: Tensor, lse: Tensor, first: int, ignore_index: int) -> Tensor:
    """dx_j = cast(g * (exp(x_j - lse) - [j + first == target])), +0 in ignored rows (V7)."""
    dx = x.new_empty(x.shape)
    vocab.map_rows(
        "cross_entropy_dx",
        dense_rows(x),
        dx,
        dense(lse),
        dense(g),
        targets=targets.contiguous(),
        first=first,
        ignored=ignore_index,
    )
    return dx


def vocab_pick(x: Tensor, ids: Tensor, first: int) -> Tensor:
    """fp32 [..., n]: x[..., ids[..., i] - first], -0.0 where that is no column (A8)."""
    n = ids.shape[-1]
    return vocab.pick(dense_rows(x), ids.reshape(-1, n).contiguous(), first).view(ids.shape)


def vocab_top_k(x: Tensor, ids: Tensor | None, first: int, k: int) -> tuple[Tensor, Tensor]:
    """The k first of each row (V10): fp32 values, int64 ids [..., k]."""
    given = None if ids is None else ids.reshape(-1, ids.shape[-1])
    values, numbers = vocab.top_k(dense_rows(x), given, first, k)
    return values.view(*x.shape[:-1], k), numbers.view(*x.shape[:-1], k)


def token_sums(loss: Tensor, offsets: Sequence[int]) -> Tensor:
    """sums[b]: the tree over blocks of 512 tokens of the chains over sample b's losses (V8); +0 without tokens."""
    sums = loss.new_zeros(len(offsets) - 1)
    starts = [range(first, end, TOKENS_PER_BLOCK) for first, end in itertools.pairwise(offsets)]
    cuts = [*itertools.chain(*starts), offsets[-1]]
    leaves = norm_kernels.column_leaves(dense(loss).view(-1, 1), None, None, 1, cuts)[:, 0]
    chains = [0, *itertools.accumulate(map(len, starts))]
    for count in sorted({len(blocks) for blocks in starts} - {0}):  # samples of as many blocks are folded together
        samples = [sample for sample, blocks in enumerate(starts) if len(blocks) == count]
        at = tuple(chains[sample] + block for block in range(count) for sample in samples)
        inputs = leaves[device_integers(at, loss.device)].view(count, len(samples))
        sums[device_integers(tuple(samples), loss.device)] = _root(inputs, count)
    return sums


@lru_cache(maxsize=256)
def _schedule(lo: int, hi: int, leaves: int, to_root: bool) -> Any:
    return _C.run_schedule(lo, hi, leaves, to_root, False)


def _root(sums: Tensor, leaves: int) -> Tensor:
    """[leaves, T] -> [T]: the canonical tree over the leaves."""
    return combine.combine(sums, _schedule(0, leaves, leaves, True))


def _cover(sums: Tensor, leaves: int, lo: int, hi: int) -> Tensor:
    """[hi - lo, T] -> [C, T]: the nodes of tree.cover(lo, hi)."""
    if lo == hi:
        return sums
    return combine.combine(sums, _schedule(lo, hi, leaves, False))


# --- attention ------------------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    extent: Tensor,
    table: Tensor | None,
    sinks: Tensor | None,
    head_offsets: list[int],
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    dropout: float,
    coordinates: list[int],
    leaf: str,
    with_state: bool,
    with_rest: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, m, total, rest) of K1; unlike tbik._C.attention it takes the leaf and gives the rest itself."""
    state = attention_kernels.forward(
        q.resolve_neg(),
        k.resolve_neg(),
        v.resolve_neg(),
        starts_q,
        extent,
        table,
        None if sinks is None else sinks.resolve_neg(),
        head_offsets,
        attention_kernels.Pairs(scale, softcap, causal, window),
        leaf=leaf,
        dropout=_dropout(dropout, coordinates, q.device),
        with_state=with_state,
        with_rest=with_rest,
    )
    return tuple(state)  # type: ignore[return-value]


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    starts_q: Tensor,
    starts_k: Tensor,
    sinks: Tensor | None,
    head_offsets: list[int],
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    programs: list[Any],
    dropout: float,
    coordinates: list[int],
    leaf: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(dq, dk, dv, rows of dsinks) of K3 and K4."""
    gradients = attention_kernels.backward(
        grad_out.resolve_neg(),
        q.resolve_neg(),
        k.resolve_neg(),
        v.resolve_neg(),
        attention_kernels.State(*state),
        starts_q,
        starts_k,
        None if sinks is None else sinks.resolve_neg(),
        head_offsets,
        programs,
        attention_kernels.Pairs(scale, softcap, causal, window),
        leaf=leaf,
        dropout=_dropout(dropout, coordinates, q.device),
    )
    return tuple(gradients)  # type: ignore[return-value]


def store_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot // N, slot % N] = k[t], v[t]."""
    attention_kernels.store_kv(k.resolve_neg(), v.resolve_neg(), key_cache, value_cache, slot_mapping)


def _dropout(p: float, coordinates: list[int], device: torch.device) -> attention_kernels.Dropout | None:
    """K5: the key of (seed, step, name), the first sample and head, floor(p 2^32), 1/(1 - p)."""
    if p == 0.0:
        return None
    seed, step, name, first_sample, first_head = coordinates
    key = philox.key_of(seed, step, name)
    numbers = device_integers((*key, first_sample, first_head, math.floor(p * 2**32)), device)
    return attention_kernels.Dropout(numbers, 1.0 / (1.0 - p) if p < 1 else 0.0)
