"""Sum and mean of the last axis by the row rule (ORDER.md A9, R8).

    s = cast(root over leaves of blocks of 512 of 16 lanes of x)        mean: cast(root / K)
    dx[k] = dy, mean: cast(dy / K)

Bits: deterministic, batch-invariant; layout-invariant over a sharded axis with leaves > 1 (tests/test_reduction.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tbik import _C
from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import CoverRun, _fake, _is_int, _name, _operator, _run_schedule
from tbik.ops.rowwise import DTYPES, differentiable, is_direct, is_simple, refuse_derivative, refuse_vmap, require_rows
from tbik.ops.softmax import MAX_LEAVES

MAX_LENGTH = 2**24


def sum(x: Tensor, *, leaves: int = 1, out_dtype: torch.dtype | None = None) -> Tensor:
    """s = cast(row_sum(x)) over the last axis (A9).

    x [..., K] -> [...] in out_dtype (x.dtype). leaves > 1 only over an axis that some layout shards; sum_cover gives a
    rank's part of it. Gradient in x.dtype. Errors: PlanError. Batch-invariant.
    """
    return _reduce("ops.sum", x, leaves, False, out_dtype)


def mean(x: Tensor, *, leaves: int = 1, out_dtype: torch.dtype | None = None) -> Tensor:
    """m = cast(row_sum(x) / K), an IEEE division in fp32. The rest as in `sum`."""
    return _reduce("ops.mean", x, leaves, True, out_dtype)


def sum_cover(x: Tensor, run: CoverRun, *, leaves: int) -> Tensor:
    """The cover of the leaves [run.lo, run.hi) of the sum over run.length elements; no autograd.

    x [..., k], this rank's elements -> fp32 [C, ...], the nodes of tree.cover(run.lo, run.hi). Layout-invariant.
    """
    where = "ops.sum_cover"
    require_rows(where, "x", x, served=CPU_AND_CUDA)
    _require_leaves(where, leaves)
    if not isinstance(run, CoverRun) or not 0 <= run.lo <= run.hi <= leaves:
        raise PlanError(f"{where}: expected leaves within [0, {leaves}), got {run!r}")
    cuts = _C.cuts(run.length, leaves)
    own = [cut - cuts[run.lo] for cut in cuts[run.lo : run.hi + 1]]
    if x.shape[-1] != own[-1]:
        raise PlanError(f"{where}: leaves [{run.lo}, {run.hi}) of {run.length} are {own[-1]} long, x has {x.shape[-1]}")
    return kernels_of(x).row_nodes(
        x.detach(), own, _run_schedule(run.lo, run.hi, leaves, False, False), 1, torch.float32
    )


def _require_leaves(where: str, leaves: int) -> None:
    if not _is_int(leaves) or not 1 <= leaves <= MAX_LEAVES:
        raise PlanError(f"{where}: leaves is an integer 1..{MAX_LEAVES}, got {leaves!r}")


def _reduce(where: str, x: Tensor, leaves: int, mean: bool, out_dtype: torch.dtype | None) -> Tensor:
    if out_dtype is None and leaves == 1 and type(leaves) is int and is_simple(x) and x.shape[-1] <= MAX_LENGTH:
        return _kernel(x, 1, mean, x.dtype)
    require_rows(where, "x", x, served=CPU_AND_CUDA)
    _require_leaves(where, leaves)
    if x.shape[-1] > MAX_LENGTH:
        raise PlanError(f"{where}: rows of at most 2**24 elements, got {x.shape[-1]}")
    out = x.dtype if out_dtype is None else out_dtype
    if out not in DTYPES:
        raise PlanError(f"{where}: out_dtype is one of {[_name(d) for d in DTYPES]}, got {out!r}")
    if is_direct(x):
        return _kernel(x, leaves, mean, out)
    y: Tensor = _row_sum(x, leaves, mean, out)
    return y


def _kernel(x: Tensor, leaves: int, mean: bool, out_dtype: torch.dtype) -> Tensor:
    length = x.shape[-1]
    root = _run_schedule(0, leaves, leaves, True, False)
    return kernels_of(x).row_nodes(x, _C.cuts(length, leaves), root, length if mean else 1, out_dtype)


# --- operators ------------------------------------------------------------------------------------------------------


@_operator("row_sum", "(Tensor x, int leaves, bool mean, ScalarType out_dtype) -> Tensor", cuda=True)
def _row_sum(x: Tensor, leaves: int, mean: bool, out_dtype: torch.dtype) -> Tensor:
    _require_leaves("ops.mean" if mean else "ops.sum", leaves)
    return _kernel(x, leaves, mean, out_dtype)


@_fake(_row_sum)
def _row_sum_fake(x: Tensor, leaves: int, mean: bool, out_dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=out_dtype)


def _row_sum_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, _, ctx.mean, _ = inputs
    ctx.length, ctx.dtype = x.shape[-1], x.dtype


def _row_sum_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return _row_sum_dx(dy, ctx.length, ctx.mean, ctx.dtype), None, None, None


differentiable(_row_sum, _row_sum_backward, _row_sum_setup)


@_operator("row_sum_dx", "(Tensor dy, SymInt length, bool mean, ScalarType dtype) -> Tensor", cuda=True)
def _row_sum_dx(dy: Tensor, length: int, mean: bool, dtype: torch.dtype) -> Tensor:
    value = kernels_of(dy).fold([dy], _run_schedule(0, 1, 1, True, False), length if mean else 1, None, dtype)
    return value[..., None].expand(*value.shape, length).contiguous()


@_fake(_row_sum_dx)
def _row_sum_dx_fake(dy: Tensor, length: int, mean: bool, dtype: torch.dtype) -> Tensor:
    return dy.new_empty((*dy.shape, length), dtype=dtype)


refuse_vmap(_row_sum, _row_sum_dx)
refuse_derivative(_row_sum_dx)
