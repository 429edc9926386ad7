"""Norms over the last axis, forward and backward (ORDER.md R1, R2, R3, S1).

    rms:    y = (x r) w                     r = 1 / sqrt(row_sum(x x) / K + eps)
    layer:  y = ((x - m) r) w + b           m = row_sum(x) / K, r = 1 / sqrt(row_sum((x - m)(x - m)) / K + eps)
    dx:     ((g - c1) - n c) r              g = dy w, n = the normalised row, c = row_sum(g n) / K, c1 = row_sum(g) / K
                                            (rms: no c1)

Suffixes: K elements of a row, T tokens, H heads, D head_dim. Everything in fp32, one rounding per returned value.
CPU, meta and CUDA tensors (tbik.kernels; not yet measured on a GPU).
Bits: deterministic, batch-invariant; gradients of parameters layout-invariant (tests/test_norm.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tbik import _C, tree
from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import CoverRun, _fake, _is_int, _operator, _require_flag, _require_one_device
from tbik.ops.linear import _token_blocks as token_blocks
from tbik.ops.rowwise import (
    differentiable,
    is_direct,
    is_simple,
    is_simple_pair,
    refuse_derivative,
    refuse_vmap,
    require_alike,
    require_compute,
    require_eps,
    require_parameter,
    require_rows,
)
from tbik.ops.samples import bounds, fold_heads, fold_sample_leaves, fold_samples, is_narrow, require_samples
from tbik.plan import TreePlan


def rms_norm(
    x: Tensor,
    w: Tensor,
    eps: float,
    *,
    offset: bool = False,
    heads: bool = False,
    compute_dtype: torch.dtype | None = None,
    sample_offsets: Sequence[int] | None = None,
    plan: TreePlan | None = None,
) -> Tensor:
    """y = (x r) w, r = 1 / sqrt(row_sum(x x) / K + eps)   (R1).

    x [..., K], w [K] -> [..., K] in x.dtype. eps is rounded to fp32. offset: 1 + w in place of w (Gemma).
    heads: x is [..., H, D], w [D] is shared by the heads (q_norm, k_norm); the forward is the same, a sample's leaf of
    dw is the tree over its heads. sample_offsets: rows (heads: tokens) where samples begin; by default [B, T, ...] is
    B samples. plan: of it only grad_wire_dtype matters, for dw.
    Gradients: dx in x.dtype, dw in fp32. Errors: PlanError. Batch-invariant; dw layout-invariant.
    """
    plain = compute_dtype is None and sample_offsets is None and plan is None and heads is False and w is not None
    if plain and type(eps) is float and 0 <= eps < 1 and type(offset) is bool and is_simple(x, w) and x.dim() < 4:
        return _C.norm(x, None, w, None, eps, False, offset, x.dtype)[0]
    where = "ops.rms_norm"
    require_rows(where, "x", x, 2 if heads else 1, served=CPU_AND_CUDA)
    require_parameter(where, "w", w, x)
    require_eps(where, eps)
    _require_flag(where, "offset", offset)
    _require_flag(where, "heads", heads)
    compute = require_compute(where, compute_dtype, x)
    require_samples(where, x.shape[: -2 if heads else -1], sample_offsets)
    narrow = is_narrow(where, plan)
    if is_direct(x, w):
        return _C.norm(x, None, w, None, eps, False, offset, compute)[0]
    offsets = None if sample_offsets is None else list(sample_offsets)
    y: Tensor = _rms_norm(x, w, eps, offset, heads, compute, offsets, narrow)
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    w: Tensor,
    eps: float,
    *,
    offset: bool = False,
    compute_dtype: torch.dtype | None = None,
    sample_offsets: Sequence[int] | None = None,
    plan: TreePlan | None = None,
) -> tuple[Tensor, Tensor]:
    """h = cast(x + residual), y = rms_norm(h, w); returns (y, h)   (R2).

    x, residual [..., K] alike. Backward: one gradient for both, cast(dx of the norm + dh) (L3). The rest as in
    rms_norm, whose bits these are on h. Batch-invariant.
    """
    plain = compute_dtype is None and sample_offsets is None and plan is None and type(eps) is float and 0 <= eps < 1
    plain = plain and type(offset) is bool and is_simple_pair(x, residual) and residual is not None and w is not None
    if plain and is_simple(x, w) and x.dim() < 4:
        return _C.norm(x, residual, w, None, eps, False, offset, x.dtype)
    where = "ops.add_rms_norm"
    require_rows(where, "x", x, served=CPU_AND_CUDA)
    require_alike(where, "residual", residual, "x", x)
    require_parameter(where, "w", w, x)
    require_eps(where, eps)
    _require_flag(where, "offset", offset)
    compute = require_compute(where, compute_dtype, x)
    require_samples(where, x.shape[:-1], sample_offsets)
    narrow = is_narrow(where, plan)
    if is_direct(x, residual, w):
        return _C.norm(x, residual, w, None, eps, False, offset, compute)
    offsets = None if sample_offsets is None else list(sample_offsets)
    y, h = _add_rms_norm(x, residual, w, eps, offset, compute, offsets, narrow)
    return y, h


def layer_norm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    compute_dtype: torch.dtype | None = None,
    sample_offsets: Sequence[int] | None = None,
    plan: TreePlan | None = None,
) -> Tensor:
    """y = ((x - m) r) w + bias, m = row_sum(x) / K, r = 1 / sqrt(row_sum((x - m)(x - m)) / K + eps)   (R3).

    x [..., K], w and bias [K] -> [..., K] in x.dtype. The rest as in rms_norm. Batch-invariant.
    """
    plain = compute_dtype is None and sample_offsets is None and plan is None and w is not None
    if plain and type(eps) is float and 0 <= eps < 1 and is_simple(x, w, bias) and x.dim() < 4:
        return _C.norm(x, None, w, bias, eps, True, False, x.dtype)[0]
    where = "ops.layer_norm"
    require_rows(where, "x", x, served=CPU_AND_CUDA)
    require_parameter(where, "w", w, x)
    if bias is not None:
        require_parameter(where, "bias", bias, x)
    require_eps(where, eps)
    compute = require_compute(where, compute_dtype, x)
    require_samples(where, x.shape[:-1], sample_offsets)
    narrow = is_narrow(where, plan)
    if is_direct(x, w, bias):
        return _C.norm(x, None, w, bias, eps, True, False, compute)[0]
    offsets = None if sample_offsets is None else list(sample_offsets)
    y: Tensor = _layer_norm(x, w, bias, eps, compute, offsets, narrow)
    return y


def rms_norm_backward_f32(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    eps: float,
    *,
    offset: bool = False,
    compute_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """dx of rms_norm, not rounded (out_dtype fp32) or rounded once; no autograd.

    dy [..., K] in any dtype that is exact in fp32; x, w, eps, offset, compute_dtype as in the forward. Batch-invariant.
    """
    where = "ops.rms_norm_backward_f32"
    require_rows(where, "x", x, served=CPU_AND_CUDA)
    require_rows(where, "dy", dy, served=CPU_AND_CUDA)
    if dy.shape != x.shape:
        raise PlanError(f"{where}: expected dy and x alike in shape, got {list(dy.shape)} and {list(x.shape)}")
    require_parameter(where, "w", w, x)
    require_eps(where, eps)
    compute = require_compute(where, compute_dtype, x)
    dx: Tensor = _norm_dx(dy, x, w, None, eps, False, offset, compute, out_dtype)
    return dx


def norm_weight_grad(
    dy: Tensor,
    x: Tensor | None,
    eps: float = 0.0,
    *,
    centered: bool = False,
    heads: bool = False,
    sample_offsets: Sequence[int] | None = None,
    plan: TreePlan | None = None,
    first_sample: int | None = None,
) -> Tensor:
    """dw[j] = tree over samples (heads) and blocks of 512 tokens of the chain of dy[t, j] n[t, j] (S1); no autograd.

    n: the normalised x (centered: layer norm), 1 for x = None (the gradient of a bias). dy, x [..., K], heads:
    [..., H, D] -> fp32 [K] ([D]). first_sample: return the cover [C, K] of the samples [first_sample, ...) instead.
    Layout-invariant.
    """
    where = "ops.norm_weight_grad"
    narrow = is_narrow(where, plan)
    offsets = _require_gradient(where, dy, x, heads, sample_offsets)
    if first_sample is None:
        given = None if sample_offsets is None else list(sample_offsets)
        dw: Tensor = _column_grad(dy, x, eps, centered, heads, given, narrow)
        return dw
    if not _is_int(first_sample) or first_sample < 0:
        raise PlanError(f"{where}: first_sample is an integer >= 0, got {first_sample!r}")
    return _fold_columns(dy, x, eps, centered, heads, offsets, narrow, first_sample)


def norm_weight_head_covers(
    dy: Tensor, x: Tensor, eps: float, run: CoverRun, *, sample_offsets: Sequence[int] | None = None
) -> Tensor:
    """Per sample the cover over the heads [run.lo, run.hi) of run.length of a per-head norm weight's gradient.

    dy, x [..., H, D], the heads of this rank -> fp32 [S, C, D], the nodes of tree.cover(run.lo, run.hi). Ranks merge
    them per sample; fold_head_covers then gives dw. Never rounded: grad_wire_dtype acts from the sample leaf upwards.
    Layout-invariant.
    """
    where = "ops.norm_weight_head_covers"
    offsets = _require_gradient(where, dy, x, True, sample_offsets)
    if not 0 <= run.lo <= run.hi <= run.length or run.hi - run.lo != dy.shape[-2]:
        raise PlanError(f"{where}: expected heads [lo, hi) of the {dy.shape[-2]} heads in dy, got {run}")
    cuts, num_blocks = token_blocks(offsets)
    leaves = kernels_of(dy).column_leaves(dy, x, dy.shape[-2], eps, False, cuts)
    return fold_heads(leaves.reshape(-1, dy.shape[-2], dy.shape[-1]), num_blocks, run)


def fold_head_covers(
    covers: Sequence[Tensor],
    runs: Sequence[CoverRun],
    *,
    plan: TreePlan | None = None,
    first_sample: int | None = None,
) -> Tensor:
    """dw from norm_weight_head_covers of runs that make up all heads: per sample the root over heads, then samples.

    covers [S, C_i, D], in ascending order of heads -> fp32 [D], or the cover [C, D] of the samples. Layout-invariant.
    """
    where = "ops.fold_head_covers"
    if not covers or len(covers) != len(runs):
        raise PlanError(f"{where}: expected one run per cover, got {len(covers)} and {len(runs)}")
    nodes = [(node.level, node.index) for run in runs for node in tree.cover(run.lo, run.hi)]
    program = _C.nodes_schedule(nodes, runs[0].length)
    values = torch.cat(list(covers), dim=1)
    per_sample = [kernels_of(sample).fold(list(sample), program) for sample in values]
    return fold_sample_leaves(torch.stack(per_sample), is_narrow(where, plan), first_sample)


def _require_gradient(
    where: str, dy: Tensor, x: Tensor | None, heads: bool, sample_offsets: Sequence[int] | None
) -> list[int]:
    require_rows(where, "dy", dy, 2 if heads else 1, served=CPU_AND_CUDA)
    if x is not None:
        require_rows(where, "x", x, served=CPU_AND_CUDA)
        if dy.shape != x.shape:
            raise PlanError(f"{where}: expected dy and x alike in shape, got {list(dy.shape)} and {list(x.shape)}")
    lead = dy.shape[: -2 if heads else -1]
    require_samples(where, lead, sample_offsets)
    return bounds(lead, sample_offsets)


# --- operators ------------------------------------------------------------------------------------------------------


def _gradients(
    ctx: Any,
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    residual: Tensor | None,
    wanted: tuple[bool, ...],
    *,
    centered: bool,
    offset: bool = False,
    heads: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dw, dbias), None where not wanted."""
    arguments = (ctx.eps, centered, offset, heads, ctx.compute, list(wanted), ctx.sample_offsets, ctx.narrow)
    results = iter(_norm_gradients(dy, x, w, residual, *arguments))
    dx, dw, dbias = (next(results) if want else None for want in wanted)
    return dx, dw, dbias


@_operator(
    "norm_gradients",
    "(Tensor dy, Tensor x, Tensor w, Tensor? residual, float eps, bool centered, bool offset, bool heads, "
    "ScalarType compute, bool[] wanted, SymInt[]? sample_offsets, bool narrow) -> Tensor[]",
    cuda=True,
)
def _norm_gradients(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    residual: Tensor | None,
    eps: float,
    centered: bool,
    offset: bool,
    heads: bool,
    compute: torch.dtype,
    wanted: list[bool],
    sample_offsets: list[int] | None,
    narrow: bool,
) -> list[Tensor]:
    """Those of dx, dw and dbias that are wanted, from one set of statistics and one reading of dy for dw and dbias."""
    lead = dy.shape[: -2 if heads else -1]
    cuts, num_blocks = token_blocks(bounds(lead, sample_offsets))
    num_heads = dy.shape[-2] if heads else 1
    with_dx, with_dw, with_dbias = wanted
    dx, *leaves = kernels_of(x).norm_gradients(
        dy, x, w, residual, eps, centered, offset, compute, x.dtype, with_dx, with_dw, with_dbias, num_heads, cuts
    )
    results = [] if dx is None else [dx]
    results += [_root(leaf, num_blocks, num_heads, heads, narrow, None) for leaf in leaves if leaf is not None]
    return results


@_fake(_norm_gradients)
def _norm_gradients_fake(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    residual: Tensor | None,
    eps: float,
    centered: bool,
    offset: bool,
    heads: bool,
    compute: torch.dtype,
    wanted: list[bool],
    *rest: Any,
) -> list[Tensor]:
    _require_one_device(dy, x, w, residual)
    dx = [x.new_empty(x.shape)] if wanted[0] else []
    return dx + [dy.new_empty((dy.shape[-1],), dtype=torch.float32) for want in wanted[1:] if want]


@_operator(
    "rms_norm",
    "(Tensor x, Tensor w, float eps, bool offset, bool heads, ScalarType compute, SymInt[]? sample_offsets, "
    "bool narrow) -> Tensor",
    cuda=True,
)
def _rms_norm(
    x: Tensor,
    w: Tensor,
    eps: float,
    offset: bool,
    heads: bool,
    compute: torch.dtype,
    sample_offsets: list[int] | None,
    narrow: bool,
) -> Tensor:
    return kernels_of(x).norm(x, None, w, None, eps, False, offset, compute)[0]


@_fake(_rms_norm)
def _rms_norm_fake(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    _require_one_device(x, w)
    return x.new_empty(x.shape)


def _rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.eps, ctx.offset, ctx.heads, ctx.compute, ctx.sample_offsets, ctx.narrow = inputs
    ctx.save_for_backward(x, w)


def _rms_norm_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w = ctx.needs_input_grad[:2]
    dx, dw, _ = _gradients(
        ctx, dy, x, w, None, (needs_x, needs_w, False), centered=False, offset=ctx.offset, heads=ctx.heads
    )
    return dx, dw, None, None, None, None, None, None


differentiable(_rms_norm, _rms_norm_backward, _rms_norm_setup)


@_operator(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor w, float eps, bool offset, ScalarType compute, SymInt[]? sample_offsets, "
    "bool narrow) -> (Tensor, Tensor)",
    cuda=True,
)
def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    w: Tensor,
    eps: float,
    offset: bool,
    compute: torch.dtype,
    sample_offsets: list[int] | None,
    narrow: bool,
) -> tuple[Tensor, Tensor]:
    return kernels_of(x).norm(x, residual, w, None, eps, False, offset, compute)


@_fake(_add_rms_norm)
def _add_rms_norm_fake(x: Tensor, residual: Tensor, w: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _require_one_device(x, residual, w)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _add_rms_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, w, ctx.eps, ctx.offset, ctx.compute, ctx.sample_offsets, ctx.narrow = inputs
    ctx.save_for_backward(output[1], w)


def _add_rms_norm_backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Any, ...]:
    h, w = ctx.saved_tensors
    needs_x, needs_residual, needs_w = ctx.needs_input_grad[:3]
    wanted = (needs_x or needs_residual, needs_w, False)
    both, dw, _ = _gradients(ctx, dy, h, w, dh, wanted, centered=False, offset=ctx.offset)
    return both if needs_x else None, both if needs_residual else None, dw, None, None, None, None, None


differentiable(_add_rms_norm, _add_rms_norm_backward, _add_rms_norm_setup)


@_operator(
    "layer_norm",
    "(Tensor x, Tensor w, Tensor? bias, float eps, ScalarType compute, SymInt[]? sample_offsets, bool narrow) "
    "-> Tensor",
    cuda=True,
)
def _layer_norm(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    eps: float,
    compute: torch.dtype,
    sample_offsets: list[int] | None,
    narrow: bool,
) -> Tensor:
    return kernels_of(x).norm(x, None, w, bias, eps, True, False, compute)[0]


@_fake(_layer_norm)
def _layer_norm_fake(x: Tensor, w: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    _require_one_device(x, w, bias)
    return x.new_empty(x.shape)


def _layer_norm_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.eps, ctx.compute, ctx.sample_offsets, ctx.narrow = inputs
    ctx.save_for_backward(x, w)


def _layer_norm_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    dx, dw, db = _gradients(ctx, dy, x, w, None, tuple(ctx.needs_input_grad[:3]), centered=True)
    return dx, dw, db, None, None, None, None


differentiable(_layer_norm, _layer_norm_backward, _layer_norm_setup)


@_operator(
    "norm_dx",
    "(Tensor dy, Tensor x, Tensor w, Tensor? residual, float eps, bool centered, bool offset, ScalarType compute, "
    "ScalarType out_dtype) -> Tensor",
    cuda=True,
)
def _norm_dx(
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
    return kernels_of(x).norm_dx(dy, x, w, residual, eps, centered, offset, compute, out_dtype)


@_fake(_norm_dx)
def _norm_dx_fake(
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
    _require_one_device(dy, x, w, residual)
    return x.new_empty(x.shape, dtype=out_dtype)


@_operator(
    "column_grad",
    "(Tensor dy, Tensor? x, float eps, bool centered, bool heads, SymInt[]? sample_offsets, bool narrow) -> Tensor",
    cuda=True,
)
def _column_grad(
    dy: Tensor,
    x: Tensor | None,
    eps: float,
    centered: bool,
    heads: bool,
    sample_offsets: list[int] | None,
    narrow: bool,
) -> Tensor:
    offsets = bounds(dy.shape[: -2 if heads else -1], sample_offsets)
    return _fold_columns(dy, x, eps, centered, heads, offsets, narrow, None)


def _fold_columns(
    dy: Tensor,
    x: Tensor | None,
    eps: float,
    centered: bool,
    heads: bool,
    offsets: list[int],
    narrow: bool,
    first_sample: int | None,
) -> Tensor:
    cuts, num_blocks = token_blocks(offsets)
    if not num_blocks:
        shape = (dy.shape[-1],) if first_sample is None else (0, dy.shape[-1])
        return dy.new_zeros(shape, dtype=torch.float32)
    num_heads = dy.shape[-2] if heads else 1
    leaves = kernels_of(dy).column_leaves(dy, x, num_heads, eps, centered, cuts)
    return _root(leaves, num_blocks, num_heads, heads, narrow, first_sample)


def _root(
    leaves: Tensor, num_blocks: tuple[int, ...], num_heads: int, heads: bool, narrow: bool, first_sample: int | None
) -> Tensor:
    if not num_blocks:
        shape = leaves.shape[-1] // num_heads
        return leaves.new_zeros((shape,) if first_sample is None else (0, shape))
    if not heads:
        return fold_samples(leaves, num_blocks, narrow, first_sample)
    leaves = leaves.reshape(-1, num_heads, leaves.shape[-1] // num_heads)
    return fold_sample_leaves(fold_heads(leaves, num_blocks), narrow, first_sample)


@_fake(_column_grad)
def _column_grad_fake(dy: Tensor, x: Tensor | None, *rest: Any) -> Tensor:
    _require_one_device(dy, x)
    return dy.new_empty((dy.shape[-1],), dtype=torch.float32)


refuse_vmap(_rms_norm, _add_rms_norm, _layer_norm, _norm_dx, _column_grad, _norm_gradients)
refuse_derivative(_norm_dx, _column_grad, _norm_gradients)
