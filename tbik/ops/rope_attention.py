"""norm, rotary embedding and attention as one differentiable operator: dq and dk are rounded once (ORDER.md A12).

    out = attention(rope(rms_norm(q)), rope(rms_norm(k)), v)     cast points: those of the separate operators
    dq, dk = cast(norm'(rope'(fp32 gradient of attention)))      fp32 all the way; dq_norm, dk_norm by sample leaves

Suffixes: T tokens, H query heads, G KV heads, D head_dim, R <= D rotated elements.
Bits: forward equal to the separate operators', so a sampler that calls those has the trainer's bits; gradients
deterministic, batch- and layout-invariant like theirs (tests/test_rope_attention.py).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from tbik.errors import PlanError
from tbik.ops.attention import (
    _DROPOUT,
    _MASK,
    AttentionDropout,
    _attention,
    _attention_backward,
    _fake,
    _head_offsets,
    _leaf_of,
    _operator,
    _refuser,
    _require_dropout,
    _require_mask,
    _require_one_device,
    _require_packed,
    _round,
    _sinks_grad,
    _whole,
)
from tbik.ops.linear import _require_flag
from tbik.ops.norm import norm_weight_grad, rms_norm, rms_norm_backward_f32
from tbik.ops.rope import _require_rope, rope, rope_backward_f32
from tbik.ops.rowwise import require_eps, require_parameter
from tbik.ops.samples import is_narrow
from tbik.plan import TreePlan

_LIBRARY = torch.library.Library("tbik", "FRAGMENT")  # type: ignore[no-untyped-call]


def rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sin: Tensor,
    cos: Tensor,
    cu: Tensor | None = None,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    offset: bool = False,
    interleaved: bool = False,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: AttentionDropout | None = None,
    plan: TreePlan | None = None,
) -> Tensor:
    """out = attention(rope(rms_norm(q)), rope(rms_norm(k)), v), every intermediate cast to q's dtype as if alone.

    q [T, H, D], k and v [T, G, D]; sin, cos fp32 [T, R/2], the rows of each token's position; cu [B + 1]: rows where
        sequences begin, one by default. q_norm, k_norm [D] or None: per-head norms with eps, offset: 1 + w.
    The rest as in ops.attention, dropout too.

    Gradients: dq and dk stay in fp32 through rope and norm and are rounded once, dv once; dq_norm, dk_norm and dsinks
    in fp32 by sample leaves (a sequence is a sample; inside it the tree over heads, S1). The tables get none.
    Errors: PlanError. Bits: batch-invariant; gradients layout-invariant over samples.
    """
    where = "ops.rope_attention"
    mask = _require_mask(where, q, scale, causal, window, softcap)
    runs = _require_packed(where, q, k, v, cu, cu, sinks, None)
    drop = _require_dropout(where, dropout)
    if q.shape[0] != k.shape[0]:
        raise PlanError(f"{where}: expected k of the {q.shape[0]} tokens of q, got {k.shape[0]}")
    _require_rope(where, q, sin, cos, interleaved, None)
    for name, table in (("sin", sin), ("cos", cos)):
        if table.dim() != 2:
            raise PlanError(f"{where}: {name} is a float32 tensor [T, R/2]")
        if table.shape[0] != q.shape[0] or table.requires_grad:
            raise PlanError(f"{where}: {name} has {q.shape[0]} rows and needs no gradient, got {list(table.shape)}")
    for name, w in (("q_norm", q_norm), ("k_norm", k_norm)):
        if w is not None:
            require_parameter(where, name, w, q)
    require_eps(where, eps)
    _require_flag(where, "offset", offset)
    starts = _whole(q) if cu is None else cu
    leaf = _leaf_of(where, plan, q)
    wire = is_narrow(where, plan)
    offsets = _head_offsets(runs)
    leaves = (q, k, v, q_norm, k_norm, sinks)
    train = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in leaves)
    out: Tensor = _rope_attention(
        q,
        k,
        v,
        sin,
        cos,
        starts,
        q_norm,
        k_norm,
        float(eps),
        offset,
        interleaved,
        sinks,
        offsets,
        *mask,
        wire,
        train,
        *drop,
        leaf,
    )[0]
    return out


@_operator(
    "rope_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor sin, Tensor cos, Tensor cu, Tensor? q_norm, Tensor? k_norm, float eps, "
    f"bool offset, bool interleaved, Tensor? sinks, int[] head_offsets, {_MASK}, bool narrow, bool train, "
    f"{_DROPOUT}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _rope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sin: Tensor,
    cos: Tensor,
    cu: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    offset: bool,
    interleaved: bool,
    sinks: Tensor | None,
    head_offsets: list[int],
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    narrow: bool,
    train: bool,
    dropout: float,
    coordinates: list[int],
    leaf: str = "fma",
) -> tuple[Tensor, ...]:
    turned = []
    for x, w in ((q, q_norm), (k, k_norm)):
        y = x if w is None else rms_norm(x, w, eps, offset=offset, heads=True)
        turned.append(rope(y, sin, cos, interleaved=interleaved))
    mask = (scale, softcap, causal, window)
    state = _attention(*turned, v, cu, cu, sinks, head_offsets, *mask, narrow, train, dropout, coordinates, leaf)
    return (*state, *turned)


@_fake(_rope_attention)
def _rope_attention_fake(q: Tensor, k: Tensor, *options: Any) -> tuple[Tensor, ...]:
    _require_one_device(q, k, *(t for t in options if isinstance(t, Tensor)))
    row = q.new_empty(q.shape[:2], dtype=torch.float32)
    train = options[16]  # counted from the front: an argument that has its default is not passed
    rest = q.new_empty(q.shape if train and q.dtype != torch.float32 else 0)
    return q.new_empty(q.shape), row, torch.empty_like(row), rest, q.new_empty(q.shape), k.new_empty(k.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *rest, narrow, _, dropout, coordinates, leaf = inputs
    q, k, v, sin, cos, cu, q_norm, k_norm, eps, offset, interleaved, sinks, head_offsets, *mask = rest
    ctx.settings = (eps, offset, interleaved, head_offsets, *mask, narrow, dropout, coordinates, leaf)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(q, k, v, sin, cos, cu, q_norm, k_norm, sinks, *output)


def _backward(ctx: Any, grad_out: Tensor, *unused: Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    dq, dk, dv, dq_norm, dk_norm, dsinks = _rope_attention_backward(grad_out, *tensors, *ctx.settings)
    q_norm, k_norm, sinks = tensors[6:9]
    return (
        dq, dk, dv, None, None, None, dq_norm if q_norm is not None else None, dk_norm if k_norm is not None else None,
        None, None, None, dsinks if sinks is not None else None, *(None,) * 10,
    )  # fmt: skip


torch.library.register_autograd(_rope_attention, _backward, setup_context=_setup, lib=_LIBRARY)


@_operator(
    "rope_attention_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor sin, Tensor cos, Tensor cu, Tensor? q_norm, "
    "Tensor? k_norm, Tensor? sinks, Tensor out, Tensor m, Tensor total, Tensor rest, Tensor q_turned, Tensor k_turned, "
    f"float eps, bool offset, bool interleaved, int[] head_offsets, {_MASK}, bool narrow, {_DROPOUT}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _rope_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sin: Tensor,
    cos: Tensor,
    cu: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    m: Tensor,
    total: Tensor,
    rest: Tensor,
    q_turned: Tensor,
    k_turned: Tensor,
    eps: float,
    offset: bool,
    interleaved: bool,
    head_offsets: list[int],
    scale: float,
    softcap: float,
    causal: bool,
    window: int,
    narrow: bool,
    dropout: float,
    coordinates: list[int],
    leaf: str = "fma",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    sizes = [hi - lo for lo, hi in itertools.pairwise(head_offsets)]
    flat = [number for size in sizes for number in (size, 0, size)]
    wide_q, wide_k, dv, rows = _attention_backward(
        grad_out, q_turned, k_turned, v, out, m, total, rest, cu, cu, sinks, flat, scale, softcap, causal, window,
        dropout, coordinates, leaf,
    )  # fmt: skip
    plan = TreePlan(grad_wire_dtype="bfloat16") if narrow else TreePlan()
    samples = cu.tolist()
    results = []
    for dy, x, w in ((wide_q, q, q_norm), (wide_k, k, k_norm)):
        rounded = x.dtype if w is None else torch.float32
        dy = rope_backward_f32(dy, sin, cos, interleaved=interleaved, out_dtype=rounded)
        if w is None:
            results.append((dy, dv.new_empty(0)))
            continue
        dw = norm_weight_grad(dy, x, eps, heads=True, sample_offsets=samples, plan=plan)
        results.append((rms_norm_backward_f32(dy, x, w, eps, offset=offset, out_dtype=x.dtype), dw))
    (dq, dq_norm), (dk, dk_norm) = results
    dsinks = dv.new_empty(0) if sinks is None else _sinks_grad(rows, cu, narrow)
    return dq, dk, _round(dv, v.dtype), dq_norm, dk_norm, dsinks


@_fake(_rope_attention_backward)
def _rope_attention_backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sin: Tensor,
    cos: Tensor,
    cu: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _require_one_device(grad_out, q, k, v, sin, cos, cu, q_norm, k_norm, sinks)

    def vector(w: Tensor | None) -> Tensor:
        return q.new_empty(0 if w is None else w.shape, dtype=torch.float32)

    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), vector(q_norm), vector(k_norm), vector(sinks)
    )  # fmt: skip


torch.library.register_autograd(
    _rope_attention_backward,
    _refuser(f"{_rope_attention_backward}: no derivative; ops.rope_attention is differentiable once"),
    lib=_LIBRARY,
)
for _op in (_rope_attention, _rope_attention_backward):
    torch.library.register_vmap(_op, _refuser(f"{_op}: no torch.func.vmap; pack the batch (cu)"), lib=_LIBRARY)
