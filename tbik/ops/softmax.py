"""softmax and log_softmax over the last axis, forward and backward (ORDER.md A9, A10, section V).

    m = maximum     s = row sum of exp(x - m)     lse = m + log s
    softmax      p = cast(exp(x - m) / s)         dx = cast(p * (dp - row sum of p*dp)), p unrounded
    log_softmax  y = cast(x - lse)                dx = cast(dy - exp(x - lse) * row sum of dy)

Suffixes: V the vocabulary (or a rank's part of it), C nodes of a cover. fp32 inside, one rounding per returned value.
The functions on a run of leaves are what a rank of a sharded vocabulary computes; tbik.vocabulary joins the ranks.

Memory of a call beside its input and result: 8 bytes per row, and per thread one row in fp32 (softmax of bf16 and fp16,
and its backward). Saved for the backward: x, and 8 (log_softmax: 4) bytes per row.
Bits: deterministic, batch-invariant, layout-invariant (tests/test_softmax.py). CPU, meta and CUDA tensors
(tbik.kernels; not yet measured on a GPU).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tbik import tree
from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import _LIBRARY as LIBRARY
from tbik.ops.linear import CoverRun, _fake, _is_int, _kind, _operator, _refuser, _require_dense, _shape

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_LEAVES = 4096

# --- public functions ------------------------------------------------------------------------------------------------


def softmax(x: Tensor, leaves: int = 1) -> Tensor:
    """p = cast(exp(x - m) / s), m the maximum of the row, s the row sum of exp(x - m) over `leaves` leaves (C6).

    x [..., V] bf16, fp16 or fp32 -> [..., V] in x's dtype. leaves: plan.leaves over an axis that some layout shards
    (the vocabulary), 1 over any other. Differentiable once. Errors: PlanError.
    Bits: layout-invariant and batch-invariant.
    """
    require_rows("ops.softmax", x, leaves)
    p: Tensor = _softmax(x, leaves)[0]
    return p


def log_softmax(x: Tensor, leaves: int = 1) -> Tensor:
    """y = cast(x - lse), lse = m + log s as in `softmax` (A10). Arguments, errors and guarantees as there."""
    require_rows("ops.log_softmax", x, leaves)
    y: Tensor = _log_softmax(x, leaves)[0]
    return y


# --- a run of leaves: one rank's part of a sharded vocabulary; no autograd -------------------------------------------


def row_max(x: Tensor) -> Tensor:
    """m[...] = IEEE 754-2019 maximum of x [..., V] in fp32: NaN wins, +0 > -0 (A8). Exact, so without an order."""
    require_rows("ops.row_max", x, 1)
    return kernels_of(x).vocab_max(x.detach().resolve_neg())


def row_sum_cover(x: Tensor, run: CoverRun, leaves: int) -> Tensor:
    """The cover of the leaves [run.lo, run.hi) of the row sum of x over a vocabulary of run.length (A9, T3).

    x [..., v], v = cut(hi) - cut(lo) -> fp32 [C, ...], the nodes of tree.cover(lo, hi). Bits: layout-invariant.
    """
    require_run("ops.row_sum_cover", x, run, leaves)
    return kernels_of(x).vocab_sums(x.detach().resolve_neg(), None, run.length, leaves, run.lo, run.hi)


def exp_sum_cover(x: Tensor, m: Tensor, run: CoverRun, leaves: int) -> Tensor:
    """The same of exp(x - m), m [...] the maximum over the whole vocabulary. Bits: layout-invariant."""
    require_run("ops.exp_sum_cover", x, run, leaves)
    return kernels_of(x).vocab_sums(x.detach().resolve_neg(), m, run.length, leaves, run.lo, run.hi)


def log_sum_exp_of(m: Tensor, s: Tensor) -> Tensor:
    """lse = m + log s, -inf where m is -inf (A10). fp32 [...] each."""
    return kernels_of(m).vocab_finish(m, s)


def softmax_of(x: Tensor, m: Tensor, s: Tensor) -> Tensor:
    """p = cast(exp(x - m) / s) of any columns of a row whose m and s are known."""
    require_rows("ops.softmax_of", x, 1)
    return kernels_of(x).vocab_softmax_of(x.detach().resolve_neg(), m, s)


def softmax_dots_cover(dp: Tensor, x: Tensor, m: Tensor, s: Tensor, run: CoverRun, leaves: int) -> Tensor:
    """The cover of the row sum of p*dp, p = exp(x - m) / s in fp32 -> fp32 [C, ...]. Bits: layout-invariant."""
    require_run("ops.softmax_dots_cover", x, run, leaves)
    return kernels_of(x).vocab_softmax_dots(dp, x.detach().resolve_neg(), m, s, run.length, leaves, run.lo, run.hi)


def softmax_dx_of(dp: Tensor, x: Tensor, m: Tensor, s: Tensor, dots: Tensor) -> Tensor:
    """dx = cast(p * (dp - dots)) of any columns of a row whose m, s and row sum of p*dp are known."""
    require_rows("ops.softmax_dx_of", x, 1)
    return kernels_of(x).vocab_softmax_dx(dp, x.detach().resolve_neg(), m, s, dots, 1)


def log_softmax_of(x: Tensor, lse: Tensor) -> Tensor:
    """y = cast(x - lse) of any columns of a row whose lse is known."""
    require_rows("ops.log_softmax_of", x, 1)
    return kernels_of(x).vocab_log_softmax_of(x.detach().resolve_neg(), lse)


def log_softmax_dx_of(dy: Tensor, x: Tensor, lse: Tensor, total: Tensor) -> Tensor:
    """dx = cast(dy - exp(x - lse) * total) of any columns of a row whose lse and row sum of dy are known."""
    require_rows("ops.log_softmax_dx_of", x, 1)
    return kernels_of(x).vocab_log_softmax_dx(dy, x.detach().resolve_neg(), lse, total, 1)


# --- operators -------------------------------------------------------------------------------------------------------


@_operator("softmax", "(Tensor x, int leaves) -> (Tensor, Tensor, Tensor)", cuda=True)
def _softmax(x: Tensor, leaves: int) -> tuple[Tensor, Tensor, Tensor]:
    require_leaves("ops.softmax", leaves)
    return kernels_of(x).vocab_softmax(x, leaves)


@_fake(_softmax)
def _softmax_fake(x: Tensor, leaves: int) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), per_row(x), per_row(x)


@_operator("softmax_backward", "(Tensor dp, Tensor x, Tensor m, Tensor s, int leaves) -> Tensor", cuda=True)
def _softmax_backward(dp: Tensor, x: Tensor, m: Tensor, s: Tensor, leaves: int) -> Tensor:
    require_leaves("ops.softmax", leaves)
    return kernels_of(x).vocab_softmax_dx(dp, x, m, s, None, leaves)


@_fake(_softmax_backward)
def _softmax_backward_fake(dp: Tensor, x: Tensor, m: Tensor, s: Tensor, leaves: int) -> Tensor:
    return x.new_empty(x.shape)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ctx.leaves = inputs
    _, m, s = output
    ctx.mark_non_differentiable(m, s)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, m, s)


def _softmax_gradient(ctx: Any, dp: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, m, s = ctx.saved_tensors
    return None if dp is None else _softmax_backward(dp, x, m, s, ctx.leaves), None


@_operator("log_softmax", "(Tensor x, int leaves) -> (Tensor, Tensor)", cuda=True)
def _log_softmax(x: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    require_leaves("ops.log_softmax", leaves)
    return kernels_of(x).vocab_log_softmax(x, leaves)


@_fake(_log_softmax)
def _log_softmax_fake(x: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), per_row(x)


@_operator("log_softmax_backward", "(Tensor dy, Tensor x, Tensor lse, int leaves) -> Tensor", cuda=True)
def _log_softmax_backward(dy: Tensor, x: Tensor, lse: Tensor, leaves: int) -> Tensor:
    require_leaves("ops.log_softmax", leaves)
    return kernels_of(x).vocab_log_softmax_dx(dy, x, lse, None, leaves)


@_fake(_log_softmax_backward)
def _log_softmax_backward_fake(dy: Tensor, x: Tensor, lse: Tensor, leaves: int) -> Tensor:
    return x.new_empty(x.shape)


def _log_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, ctx.leaves = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[1])


def _log_softmax_gradient(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, lse = ctx.saved_tensors
    return None if dy is None else _log_softmax_backward(dy, x, lse, ctx.leaves), None


torch.library.register_autograd(_softmax, _softmax_gradient, setup_context=_softmax_setup, lib=LIBRARY)
torch.library.register_autograd(_log_softmax, _log_softmax_gradient, setup_context=_log_softmax_setup, lib=LIBRARY)


def refuse_transforms(differentiable: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    """No vmap for any of these operators, no derivative for `others`."""
    for op in (*differentiable, *others):
        message = f"{op}: no torch.func.vmap; pass the batch as leading axes"
        torch.library.register_vmap(op, _refuser(message), lib=LIBRARY)
    for op in others:
        message = f"{op}: no derivative; the operator it belongs to is differentiable once"
        torch.library.register_autograd(op, _refuser(message), lib=LIBRARY)


refuse_transforms((_softmax, _log_softmax), (_softmax_backward, _log_softmax_backward))

# --- what the vocabulary operators share -----------------------------------------------------------------------------


def per_row(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=dtype)


def require_rows(where: str, x: Tensor, leaves: int, name: str = "x") -> None:
    """PlanError unless x is [..., V], V >= 1, in bf16, fp16 or fp32, and leaves a number of leaves."""
    _require_dense(where, name, x, CPU_AND_CUDA)
    if x.dtype not in DTYPES:
        raise PlanError(f"{where}: {name} is bfloat16, float16 or float32, got {x.dtype}; convert it first")
    if x.dim() < 1 or x.shape[-1] < 1:
        raise PlanError(f"{where}: expected {name} [..., V] with V >= 1, got {_shape(x)}")
    require_leaves(where, leaves)


def require_leaves(where: str, leaves: int) -> None:
    if not _is_int(leaves) or not 1 <= leaves <= MAX_LEAVES:
        raise PlanError(f"{where}: leaves is an integer 1..{MAX_LEAVES} (plan.leaves), got {leaves!r}")


def require_run(where: str, x: Tensor, run: CoverRun, leaves: int) -> None:
    """PlanError unless x [..., v] holds just the leaves of the run."""
    require_rows(where, x, leaves)
    if not isinstance(run, CoverRun) or not all(_is_int(value) for value in run) or run.length < 1:
        raise PlanError(f"{where}: a run is a CoverRun(length, lo, hi) of integers, got {_kind(run)} {run!r}")
    if not 0 <= run.lo <= run.hi <= leaves:
        raise PlanError(f"{where}: expected leaves within [0, {leaves}], got [{run.lo}, {run.hi})")
    cuts = tree.cuts(run.length, leaves)
    if x.shape[-1] != cuts[run.hi] - cuts[run.lo]:
        raise PlanError(
            f"{where}: leaves [{run.lo}, {run.hi}) of a vocabulary of {run.length} are "
            f"{cuts[run.hi] - cuts[run.lo]} columns, got x {_shape(x)}"
        )
