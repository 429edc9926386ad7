"""Attention as torch operators: packed sequences (trainer) and paged keys (sampler), forward and backward.

    s[t, k] = scale root(q[t] . k[k]), then cap tanh(s / cap)           live keys k of query t only
    out[t]  = cast(sum over live k of p[k] v[k] / sum of p[k]),  p[k] = exp(s[k] - max)     blocks of 64 keys ascending

Suffixes: T query tokens, S key tokens, H query heads, G KV heads, D head_dim, B sequences, P pages, N slots of a page,
C nodes of covers. Position = index in the sequence; the queries of a sequence are its last positions.
Specification: ORDER.md K1-K6. The operators live in torch.ops.tbik, are functional (store_kv writes into the caches)
and know the CPU, CUDA (tbik.kernels; not yet measured on a GPU) and, shapes only, the meta device. They have no
autocast rule: autocast changes nothing.

Bits: deterministic and batch-invariant: a query's bits and every gradient ignore the other rows, the packing, the
pages, chunks of the prompt and the number of heads (tests/test_attention.py); layout-invariant over heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tbik import _C, devices
from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.dropout import name_key, require_coordinates
from tbik.ops.linear import _is_int, _require_leaf, bias_grad
from tbik.ops.samples import is_narrow
from tbik.plan import TreePlan

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 512


class HeadRun(NamedTuple):
    """The query heads [lo, hi) of the `size` heads that share a KV head, as one rank holds them."""

    size: int
    lo: int
    hi: int


class Mask(NamedTuple):
    """What decides the score of a pair: scale, soft-cap (0: none), causal, window (0: all keys)."""

    scale: float
    softcap: float
    causal: bool
    window: int


class AttentionDropout(NamedTuple):
    """Which pairs of query and key are dropped (K5): a function of these and of sample, positions and head.

    p: probability to drop, within [0, 1]. seed, step: integers within [0, 2^63). name: the module's.
    first_sample: global number of the first sequence. first_head: number of the first query head, on a rank that
    holds some of them.
    """

    p: float
    seed: int
    step: int
    name: str
    first_sample: int = 0
    first_head: int = 0


# --- public functions: every refusal that does not need the numbers happens here ------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sharing: Sequence[HeadRun] | None = None,
    dropout: AttentionDropout | None = None,
    plan: TreePlan | None = None,
) -> Tensor:
    """out[t, h] = sum over live keys of p v / sum of p: packed sequences that do not see each other (K1, K2).

    q [T, H, D]; k, v [S, G, D], one dtype -> [T, H, D] in it. cu_q, cu_k: int32 or int64 [B + 1], rows where each
        sequence begins, 0 first and T, S last; one sequence by default, cu_k = cu_q by default. A sequence may have no
        query. With fewer queries than keys they are the last ones (a chunk of a prompt, one decoded token).
    scale: D^-0.5 by default. causal: a query sees the keys up to its own position.
    window: it sees the last `window` of them, its own included (and as many to the right if not causal).
    softcap: s = softcap tanh(s / softcap). sinks [H]: exp(sink - max) enters the sum of exponentials.
    sharing: the query heads that use each KV head; H / G heads each by default.
    dropout: K5; the sum of exponentials takes every pair, the values the kept ones. plan: the leaf (K6) and the
    grad_wire_dtype of dsinks; TreePlan() by default.

    Gradients: dq, dk, dv rounded once to the inputs' dtype, dsinks by sample leaves (a sequence is a sample) in fp32
    (K3). Where `sharing` holds a part of a KV head's query heads, dk and dv are parts too: refused, use
    `attention_backward` and merge the covers (K4). Second and forward-mode derivatives and torch.func are refused.
    Errors: PlanError. Bits: batch-invariant, layout-invariant over heads.
    """
    where = "ops.attention"
    mask = _require_mask(where, q, scale, causal, window, softcap)
    runs = _require_packed(where, q, k, v, cu_q, cu_k, sinks, sharing)
    drop = _require_dropout(where, dropout)
    partial = [run for run in runs if run.hi - run.lo != run.size]
    if partial and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise PlanError(
            f"{where}: {partial[0]} is a part of a KV head's query heads, so dk and dv are parts of a sum over ranks; "
            "use ops.attention_forward and ops.attention_backward, whose covers merge, or torch.no_grad()"
        )
    starts_q = _whole(q) if cu_q is None else cu_q
    starts_k = (_whole(k) if cu_q is None else cu_q) if cu_k is None else cu_k
    offsets = _head_offsets(runs)
    leaf = _leaf_of(where, plan, q)
    wire = is_narrow(where, plan)
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, sinks))
    out: Tensor = _attention(q, k, v, starts_q, starts_k, sinks, offsets, *mask, wire, train, *drop, leaf)[0]
    return out


class AttentionState(NamedTuple):
    """out [T, H, D]; m, total fp32 [T, H]: a row's maximum and sum of exponentials; rest: what rounding took of out.

    rest [T, H, D] in out's dtype, empty for fp32 (K3).
    """

    out: Tensor
    m: Tensor
    total: Tensor
    rest: Tensor


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sharing: Sequence[HeadRun] | None = None,
    dropout: AttentionDropout | None = None,
    plan: TreePlan | None = None,
) -> AttentionState:
    """`attention` with what its backward needs; no autograd.

    lse = m + log(total). The arguments are `attention`'s; of the plan only the leaf matters. Bits: batch-invariant,
    layout-invariant over heads.
    """
    where = "ops.attention_forward"
    mask = _require_mask(where, q, scale, causal, window, softcap)
    runs = _require_packed(where, q, k, v, cu_q, cu_k, sinks, sharing)
    starts_q = _whole(q) if cu_q is None else cu_q
    starts_k = (_whole(k) if cu_q is None else cu_q) if cu_k is None else cu_k
    offsets = _head_offsets(runs)
    drop = _require_dropout(where, dropout)
    leaf = _leaf_of(where, plan, q)
    with torch.no_grad():
        return AttentionState(*_attention(q, k, v, starts_q, starts_k, sinks, offsets, *mask, False, True, *drop, leaf))


class Gradients(NamedTuple):
    """fp32, unrounded: dq [T, H, D]; dk, dv [S, C, D], the nodes of all KV heads; rows of dsinks [T, H] or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    d_sink_rows: Tensor | None


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: AttentionState,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sharing: Sequence[HeadRun] | None = None,
    dropout: AttentionDropout | None = None,
    plan: TreePlan | None = None,
) -> Gradients:
    """The gradients of `attention_forward` in fp32, before any rounding (K3); no autograd.

    grad_out [T, H, D]; state: the forward's. A KV head all of whose query heads are here gives one
    node, the root; a part [lo, hi) of them gives the nodes tree.cover(lo, hi), which other ranks' nodes merge with
    (K4). Without `sharing` C = G. Bits: batch-invariant, layout-invariant over heads.
    """
    where = "ops.attention_backward"
    mask = _require_mask(where, q, scale, causal, window, softcap)
    runs = _require_packed(where, q, k, v, cu_q, cu_k, sinks, sharing)
    out, m, total, rest = state
    for name, t in (("grad_out", grad_out), ("out", out)):
        _require_tensor(where, name, t)
        if t.shape != q.shape:
            raise PlanError(f"{where}: expected {name} {_shape(q)} as q, got {_shape(t)}")
    for name, t in (("m", m), ("total", total)):
        _require_tensor(where, name, t)
        if t.shape != q.shape[:2] or t.dtype != torch.float32:
            raise PlanError(f"{where}: expected {name} float32 {_shape(q)[:2]}, got {t.dtype} {_shape(t)}")
    if rest.shape != (q.shape if q.dtype != torch.float32 else (0,)):
        raise PlanError(f"{where}: expected rest {_shape(q)} as q (empty for fp32), got {_shape(rest)}")
    starts_q = _whole(q) if cu_q is None else cu_q
    starts_k = (_whole(k) if cu_q is None else cu_q) if cu_k is None else cu_k
    flat = [number for run in runs for number in run]
    drop = _require_dropout(where, dropout)
    leaf = _leaf_of(where, plan, q)
    with torch.no_grad():
        dq, dk, dv, rows = _attention_backward(
            grad_out, q, k, v, *state, starts_q, starts_k, sinks, flat, *mask, *drop, leaf
        )
    return Gradients(dq, dk, dv, rows if sinks is not None else None)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sharing: Sequence[HeadRun] | None = None,
    plan: TreePlan | None = None,
) -> Tensor:
    """`attention` over keys in pages, same bits; inference only.

    q [T, H, D]: the last query_start_loc[b + 1] - query_start_loc[b] positions of each sequence b, whose keys up to
    seq_lens[b] are already stored (`store_kv`). key_cache, value_cache [P, N, G, D] with any strides: a head-major
    cache [P, G, N, D] (vLLM on CPU) is passed as cache.transpose(1, 2). block_table int32 or int64 [B, pages]: position
    s is slot s % N of page block_table[b, s // N]. seq_lens [B], query_start_loc [B + 1]: int32 or int64. plan: its
    leaf (K6); TreePlan() by default.
    Errors: PlanError; on CUDA, where the host does not see lengths and pages, what they make wrong is NaN. Bits:
    batch-invariant; N, the order of the pages and stale slots change nothing.
    """
    where = "ops.paged_attention"
    mask = _require_mask(where, q, scale, causal, window, softcap)
    for name, t in (("key_cache", key_cache), ("value_cache", value_cache)):
        _require_operand(where, name, t, q, 4, "[P, N, G, D]")
    if key_cache.shape != value_cache.shape:
        raise PlanError(f"{where}: key_cache is {_shape(key_cache)}, value_cache {_shape(value_cache)}; expected alike")
    runs = _require_heads(where, q, key_cache.shape[2], sinks, sharing)
    if q.shape[2] != key_cache.shape[3]:
        raise PlanError(f"{where}: q has head_dim {q.shape[2]}, the caches {key_cache.shape[3]}")
    _require_integers(where, "query_start_loc", query_start_loc, 1, q)
    _require_integers(where, "seq_lens", seq_lens, 1, q)
    _require_integers(where, "block_table", block_table, 2, q)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, key_cache, value_cache, sinks)):
        raise PlanError(f"{where}: paged keys have no backward; use ops.attention to train, or torch.no_grad()")
    offsets = _head_offsets(runs)
    leaf = _leaf_of(where, plan, q)
    arguments = (q, key_cache, value_cache, block_table, seq_lens, query_start_loc, sinks, offsets, *mask, leaf)
    # Straight to the kernel where the dispatcher has nothing to do: it would cost more than a short sequence.
    if not torch.compiler.is_compiling() and _C.is_direct(*arguments[:7]):
        return _paged_attention_kernel(*arguments)
    out: Tensor = _paged_attention(*arguments)
    return out


def store_kv(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot // N, slot % N] = k[t], v[t] for slot = slot_mapping[t]; a negative slot stores nothing.

    k, v [T, G, D]; caches [P, N, G, D] with any strides; slot_mapping int32 or int64 [T], no slot twice. In place.
    Errors: PlanError. Bits: bytes move, nothing is computed.
    """
    where = "ops.store_kv"
    for name, t, dims, form in (
        ("k", k, 3, "[T, G, D]"),
        ("v", v, 3, "[T, G, D]"),
        ("key_cache", key_cache, 4, "[P, N, G, D]"),
        ("value_cache", value_cache, 4, "[P, N, G, D]"),
    ):
        _require_operand(where, name, t, k, dims, form)
    _require_integers(where, "slot_mapping", slot_mapping, 1, k)
    arguments = (k, v, key_cache, value_cache, slot_mapping)
    with torch.no_grad():
        # Straight to the kernel where the dispatcher has nothing to do: it would cost more than to store a few tokens.
        if not torch.compiler.is_compiling() and _C.is_direct(*arguments):
            _store_kv_kernel(*arguments)
        else:
            _store_kv(*arguments)


# --- operators ------------------------------------------------------------------------------------------------------
# head_offsets [G + 1]: KV head g serves the query heads [head_offsets[g], head_offsets[g + 1]).

_LIBRARY = torch.library.Library("tbik", "FRAGMENT")  # type: ignore[no-untyped-call]
_DROPOUT = 'float dropout, int[] coordinates, str leaf="fma"'  # p; seed, step, name, first sample, first head
_MASK = "float scale, float softcap, bool causal, int window"


def _operator(name: str, schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Defines torch.ops.tbik.<name> with the decorated function as its CPU and CUDA kernel; gives the operator."""

    def define(kernel: Callable[..., Any]) -> Any:
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        return getattr(torch.ops.tbik, name).default

    return define


def _fake(operator: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as what gives the operator's output shapes."""
    register: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(operator, lib=_LIBRARY)
    return register


@_operator(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, Tensor? sinks, int[] head_offsets, "
    f"{_MASK}, bool narrow_sinks, bool train, {_DROPOUT}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    sinks: Tensor | None,
    head_offsets: list[int],
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    narrow_sinks: bool,
    train: bool,
    dropout: float,
    coordinates: list[int],
    leaf: str = "fma",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if devices.is_cuda(q):
        on_device: tuple[Tensor, Tensor, Tensor, Tensor] = kernels_of(q).attention(
            q, k, v, cu_q, cu_k, None, sinks, head_offsets, scale, softcap, causal, window, dropout, coordinates, leaf,
            True, train,
        )  # fmt: skip
        return on_device
    splits = train and q.dtype != torch.float32
    dtype = q.dtype
    if splits:  # fp32 operands have the same bits and leave the output unrounded
        q, k, v = q.float(), k.float(), v.float()
    out, m, total = _refusing(
        _C.attention, q, k, v, cu_q, cu_k, None, sinks, head_offsets, scale, softcap, causal, window, dropout,
        coordinates,
    )  # fmt: skip
    if not splits:
        return out, m, total, out.new_empty(0)
    rounded = _C.fold([out], _inputs(1), out_dtype=dtype)
    return rounded, m, total, _C.fold([out, rounded.float().neg()], _inputs(2), out_dtype=dtype)


@_fake(_attention)
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    sinks: Tensor | None,
    head_offsets: list[int],
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    narrow_sinks: bool,
    train: bool,
    *rest: Any,  # an argument that has its default is not passed
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _require_one_device(q, k, v, cu_q, cu_k, sinks)
    row = q.new_empty(q.shape[:2], dtype=torch.float32)
    taken = q.new_empty(q.shape if train and q.dtype != torch.float32 else 0)
    return q.new_empty(q.shape), row, torch.empty_like(row), taken


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_q, cu_k, sinks, ctx.head_offsets, *mask, ctx.narrow_sinks, _, dropout, coordinates, leaf = inputs
    ctx.mask = (*mask, dropout, coordinates, leaf)  # as the backward takes them
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, cu_q, cu_k, sinks, *output)


def _attention_grad(ctx: Any, grad_out: Tensor, *unused: Tensor) -> tuple[Any, ...]:
    q, k, v, cu_q, cu_k, sinks, *state = ctx.saved_tensors
    sizes = [hi - lo for lo, hi in zip(ctx.head_offsets[:-1], ctx.head_offsets[1:], strict=True)]
    flat = [number for size in sizes for number in (size, 0, size)]
    dq, dk, dv, rows = _attention_backward(grad_out, q, k, v, *state, cu_q, cu_k, sinks, flat, *ctx.mask)
    dsinks = _sinks_grad(rows, cu_q, ctx.narrow_sinks) if sinks is not None and ctx.needs_input_grad[5] else None
    dq, dk, dv = _round(dq, q.dtype), _round(dk, k.dtype), _round(dv, v.dtype)
    return dq, dk, dv, None, None, dsinks, *(None,) * 10


torch.library.register_autograd(_attention, _attention_grad, setup_context=_attention_setup, lib=_LIBRARY)


@_operator(
    "attention_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor m, Tensor total, Tensor rest, Tensor cu_q, "
    f"Tensor cu_k, Tensor? sinks, int[] runs, {_MASK}, {_DROPOUT}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    m: Tensor,
    total: Tensor,
    rest: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    sinks: Tensor | None,
    runs: list[int],
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    dropout: float,
    coordinates: list[int],
    leaf: str = "fma",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if rest.numel() and not devices.is_cuda(q):
        out = _C.fold([out, rest], _inputs(2), out_dtype=torch.float32)
    head_runs = _runs_of(runs)
    offsets = _head_offsets(head_runs)
    if q.dim() != 3 or offsets[-1] != q.shape[1]:
        raise PlanError(f"tbik.attention_backward: {offsets[-1]} query heads in the runs, q is {_shape(q)}")
    programs = [_head_schedule(run) for run in head_runs]
    if devices.is_cuda(q):
        on_device = kernels_of(q).attention_backward(
            grad_out, q, k, v, (out, m, total, rest), cu_q, cu_k, sinks, offsets, scale, softcap, causal, window,
            programs, dropout, coordinates, leaf,
        )  # fmt: skip
        dq, dk, dv, d_sink_rows = on_device
        return dq, dk, dv, m.new_empty((0, 0)) if d_sink_rows is None else d_sink_rows
    result = _refusing(
        _C.attention_backward, grad_out, q, k, v, out, m, total, cu_q, cu_k, sinks, offsets, scale, softcap,
        causal, window, programs, dropout, coordinates,
    )  # fmt: skip
    dq, dk, dv, *rows = result
    return dq, dk, dv, rows[0] if rows else m.new_empty((0, 0))


@_fake(_attention_backward)
def _attention_backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    m: Tensor,
    total: Tensor,
    rest: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    sinks: Tensor | None,
    runs: list[int],
    *mask: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _require_one_device(grad_out, q, k, v, out, m, total, rest, cu_q, cu_k, sinks)
    nodes = sum(num_nodes(run) for run in _runs_of(runs))
    dq = q.new_empty(q.shape, dtype=torch.float32)
    dk = k.new_empty((k.shape[0], nodes, k.shape[2]), dtype=torch.float32)
    rows = m.new_empty((0, 0) if sinks is None else q.shape[:2])
    return dq, dk, torch.empty_like(dk), rows


@_operator("attention_round", "(Tensor x, ScalarType dtype) -> Tensor")
def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding of an fp32 gradient, NaN canonical, whatever mode the process is in."""
    rounded: Tensor = kernels_of(x).fold([x], _inputs(1), out_dtype=dtype)
    return rounded


@_fake(_round)
def _round_fake(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@_operator("attention_sinks_grad", "(Tensor rows, Tensor cu_q, bool narrow) -> Tensor")
def _sinks_grad(rows: Tensor, cu_q: Tensor, narrow: bool) -> Tensor:
    """dsinks[h] = root over samples of the root over blocks of 512 tokens of the chain of rows[t, h] * 1 (S1)."""
    plan = TreePlan(grad_wire_dtype="bfloat16") if narrow else TreePlan()
    return bias_grad(rows, plan=plan, sample_offsets=cu_q.tolist())


@_fake(_sinks_grad)
def _sinks_grad_fake(rows: Tensor, cu_q: Tensor, narrow: bool) -> Tensor:
    _require_one_device(rows, cu_q)
    return rows.new_empty(rows.shape[1:])


def _paged_attention_kernel(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    sinks: Tensor | None,
    head_offsets: list[int],
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    leaf: str = "fma",
) -> Tensor:
    if devices.is_cuda(q):
        on_device: Tensor = kernels_of(q).attention(
            q, key_cache, value_cache, query_start_loc, seq_lens, block_table, sinks, head_offsets, scale, softcap,
            causal, window, 0.0, [], leaf, False, False,
        )[0]  # fmt: skip
        return on_device
    out: Tensor = _refusing(
        _C.attention, q, key_cache, value_cache, query_start_loc, seq_lens, block_table, sinks, head_offsets, scale,
        softcap, causal, window,
    )[0]  # fmt: skip
    return out


_paged_attention = _operator(
    "paged_attention",
    "(Tensor q, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
    f'Tensor? sinks, int[] head_offsets, {_MASK}, str leaf="fma") -> Tensor',
)(_paged_attention_kernel)


@_fake(_paged_attention)
def _paged_attention_fake(q: Tensor, *rest: Any) -> Tensor:
    _require_one_device(q, *(t for t in rest if isinstance(t, Tensor)))
    return q.new_empty(q.shape)


def _store_kv_kernel(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    _refusing(kernels_of(k).store_kv, k, v, key_cache, value_cache, slot_mapping)
    # a backward that saved a cache must notice the write
    written = [cache for cache in (key_cache, value_cache) if not cache.is_inference()]
    if written:
        torch.autograd.graph.increment_version(written)


_store_kv = _operator(
    "store_kv",
    "(Tensor k, Tensor v, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()",
)(_store_kv_kernel)


@_fake(_store_kv)
def _store_kv_fake(k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    _require_one_device(k, v, key_cache, value_cache, slot_mapping)


def _refuser(message: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise PlanError(message)

    return refuse


for _op in (_attention_backward, _round, _sinks_grad, _paged_attention):
    _message = f"{_op}: no derivative; ops.attention is differentiable once"
    torch.library.register_autograd(_op, _refuser(_message), lib=_LIBRARY)
for _op in (_attention, _attention_backward, _round, _sinks_grad, _paged_attention):
    _message = f"{_op}: no torch.func.vmap; pack the batch (cu_q, cu_k)"
    torch.library.register_vmap(_op, _refuser(_message), lib=_LIBRARY)


def _refusing(kernel: Callable[..., Any], *args: Any) -> Any:
    try:
        return kernel(*args)
    except ValueError as error:  # what only the numbers show: offsets, lengths, pages, slots
        raise PlanError(f"tbik.{error}") from None


def _whole(x: Tensor) -> Tensor:
    """One sequence: [0, number of rows]."""
    return torch.tensor([0, x.shape[0]], device=x.device)


def _head_offsets(runs: Sequence[HeadRun]) -> list[int]:
    offsets = [0]
    for run in runs:
        offsets.append(offsets[-1] + run.hi - run.lo)
    return offsets


def _runs_of(flat: Sequence[int]) -> list[HeadRun]:
    return [HeadRun(*flat[i : i + 3]) for i in range(0, len(flat), 3)]


@lru_cache(maxsize=1024)
def _head_schedule(run: HeadRun) -> _C.Schedule:
    return _C.run_schedule(run.lo, run.hi, run.size, run.hi - run.lo == run.size, False)


def num_nodes(run: HeadRun) -> int:
    """Nodes of dk and dv that a KV head gives: the root, or the cover of a part of its query heads."""
    return len(_head_schedule(run).outputs)


@lru_cache(maxsize=2)
def _inputs(count: int) -> _C.Schedule:
    return _C.run_schedule(0, count, count, True, False)


# --- refusals -------------------------------------------------------------------------------------------------------


def _require_tensor(where: str, name: str, t: Tensor) -> None:
    if not torch.compiler.is_compiling() and forward_ad._current_level < 0 and _C.is_direct(t):
        return  # dense CPU memory that nobody watches
    if not isinstance(t, Tensor):
        raise PlanError(f"{where}: {name} is a tensor, got {type(t).__name__}")
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            raise PlanError(f"{where}: no torch.func transform (vmap, grad, jvp, ...); use backward()")
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
            raise PlanError(f"{where}: {name} has a tangent; forward-mode derivatives have no kernel, use backward()")
    if t.layout != torch.strided or t.is_nested:
        raise PlanError(f"{where}: {name} is a dense tensor, got layout {t.layout}; pack the sequences (cu_q, cu_k)")
    if type(t) not in (Tensor, torch.nn.Parameter) and hasattr(t, "device_mesh"):
        raise PlanError(f"{where}: {name} is a plain tensor, got a DTensor; use {name}.to_local()")
    if t.device.type not in CPU_AND_CUDA:
        raise PlanError(
            f"{where}: {name} is on {t.device}, kernels exist for {' and '.join(CPU_AND_CUDA)}; use {name}.cpu()"
        )


def _leaf_of(where: str, plan: TreePlan | None, q: Tensor) -> str:
    if plan is None:
        return "fma"
    if not isinstance(plan, TreePlan):
        raise PlanError(f"{where}: plan is a TreePlan or None, got {type(plan).__name__}")
    _require_leaf(where, plan, q)
    return "fma" if plan.leaf == "amx" else plan.leaf  # A14 is of products with weights


def _require_operand(where: str, name: str, t: Tensor, q: Tensor, dims: int, form: str) -> None:
    _require_tensor(where, name, t)
    if t.dtype not in DTYPES:
        raise PlanError(f"{where}: {name} is bfloat16, float16 or float32, got {t.dtype}; convert it first")
    if t.dim() != dims:
        raise PlanError(f"{where}: expected {name} {form}, got shape {_shape(t)}")
    if t.dtype != q.dtype or t.device != q.device:
        raise PlanError(f"{where}: {name} is {t.dtype} on {t.device}, q {q.dtype} on {q.device}; they must agree")


def _require_integers(where: str, name: str, t: Tensor, dims: int, q: Tensor) -> None:
    _require_tensor(where, name, t)
    if t.device != q.device:
        raise PlanError(f"{where}: {name} is on {t.device}, the other tensors on {q.device}; move one")
    if t.dtype not in (torch.int32, torch.int64) or t.dim() != dims:
        raise PlanError(f"{where}: {name} is an int32 or int64 tensor of {dims} axes, got {t.dtype} {_shape(t)}")


def _require_one_device(*tensors: Tensor | None) -> None:
    devices = sorted({str(t.device) for t in tensors if t is not None})
    if len(devices) > 1:
        raise PlanError(f"tbik: the tensors of one operator are on {' and '.join(devices)}; move them to one device")


def _require_mask(
    where: str, q: Tensor, scale: float | None, causal: bool, window: int | None, softcap: float | None
) -> Mask:
    _require_tensor(where, "q", q)
    _require_operand(where, "q", q, q, 3, "[T, H, D]")
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise PlanError(f"{where}: head_dim is 1 to {MAX_HEAD_DIM}, got {q.shape[2]}")
    if not isinstance(causal, bool):
        raise PlanError(f"{where}: causal is True or False, got {causal!r}")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise PlanError(f"{where}: window is a number of keys >= 1 or None, got {window!r}")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        # the kernel works with the fp32 neighbour
        if not number or abs(value) > 3e38 or (name == "softcap" and value < 1e-30):
            raise PlanError(f"{where}: {name} is a finite number{' > 0' if name == 'softcap' else ''}, got {value!r}")
    factor = q.shape[2] ** -0.5 if scale is None else float(scale)
    # a window beyond 2^62 sees all keys, as 2^62 does: an integer of 64 bits for the kernel
    return Mask(factor, 0.0 if softcap is None else float(softcap), causal, 0 if window is None else min(window, 2**62))


def _require_dropout(where: str, dropout: AttentionDropout | None) -> tuple[float, list[int]]:
    if dropout is None:
        return 0.0, []
    if not isinstance(dropout, AttentionDropout):
        raise PlanError(f"{where}: dropout is an ops.AttentionDropout(p, seed, step, name) or None, got {dropout!r}")
    p, seed, step, name, first_sample, first_head = dropout
    require_coordinates(f"{where}: dropout", p, seed, step, name, first_sample=first_sample, first_head=first_head)
    return float(p), [seed, step, name_key(name), first_sample, first_head]


def _require_packed(
    where: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    sinks: Tensor | None,
    sharing: Sequence[HeadRun] | None,
) -> list[HeadRun]:
    for name, t in (("k", k), ("v", v)):
        _require_operand(where, name, t, q, 3, "[S, G, D]")
    if k.shape != v.shape:
        raise PlanError(f"{where}: expected k and v alike, got k {_shape(k)} and v {_shape(v)}")
    if k.shape[2] != q.shape[2]:
        raise PlanError(f"{where}: q has head_dim {q.shape[2]}, k {k.shape[2]}")
    if cu_q is None and cu_k is not None:
        raise PlanError(f"{where}: cu_k is given, cu_q is not; expected both, cu_q alone (then cu_k = cu_q) or neither")
    for name, starts in (("cu_q", cu_q), ("cu_k", cu_k)):
        if starts is not None:
            _require_integers(where, name, starts, 1, q)
    return _require_heads(where, q, k.shape[1], sinks, sharing)


def _require_heads(
    where: str, q: Tensor, kv_heads: int, sinks: Tensor | None, sharing: Sequence[HeadRun] | None
) -> list[HeadRun]:
    heads = q.shape[1]
    if sinks is not None:
        _require_tensor(where, "sinks", sinks)
        if sinks.device != q.device:
            raise PlanError(f"{where}: sinks is on {sinks.device}, q on {q.device}; move one")
        if sinks.dim() != 1 or sinks.shape[0] != heads or sinks.dtype not in DTYPES:
            raise PlanError(f"{where}: sinks is bf16, fp16 or fp32 [{heads}], got {sinks.dtype} {_shape(sinks)}")
    if sharing is None:
        if kv_heads < 1 or heads < 1 or heads % kv_heads:
            raise PlanError(
                f"{where}: {heads} query heads do not divide into {kv_heads} KV heads; pass sharing, one HeadRun per "
                "KV head"
            )
        size = heads // kv_heads
        return [HeadRun(size, 0, size)] * kv_heads
    is_list = isinstance(sharing, (list, tuple)) and len(sharing) == kv_heads
    if not is_list or not all(_is_head_run(run) for run in sharing):
        raise PlanError(
            f"{where}: sharing has one HeadRun(size, lo, hi), 0 <= lo < hi <= size, for each of {kv_heads} KV heads, "
            f"got {sharing!r}"
        )
    runs = [HeadRun(*run) for run in sharing]
    if sum(run.hi - run.lo for run in runs) != heads:
        raise PlanError(f"{where}: sharing names {sum(r.hi - r.lo for r in runs)} query heads, q has {heads}")
    return runs


def _is_head_run(run: Any) -> bool:
    if not isinstance(run, (list, tuple)) or len(run) != 3 or not all(_is_int(number) for number in run):
        return False
    size, lo, hi = run
    return bool(0 <= lo < hi <= size < 2**62)


def _shape(t: Tensor) -> list[int]:
    return list(t.shape)
