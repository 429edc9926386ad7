"""Embedding look-up, whole or of a vocabulary shard, and its gradient by sample leaves (ORDER.md A8, R7, S1).

    y[t] = cast(w[ids[t]])         a row that this rank does not hold: -0.0, so that adding the ranks changes no bit
    dw[v] = tree over samples, blocks of 512 tokens of the chain (b_k = 1) of dy[t] over the tokens t with ids[t] = v

Suffixes: V rows of the vocabulary, D columns. CPU, meta and CUDA tensors (tbik.kernels; not yet measured on a GPU).
Bits: batch-invariant; gradients layout-invariant (tests/test_embedding.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tbik import _C, tree
from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import _fake, _is_int, _name, _operator, _require_dense, _require_one_device, _require_same_device
from tbik.ops.linear import _shape as shape_of
from tbik.ops.rowwise import DTYPES, differentiable, is_direct, is_simple, refuse_derivative, refuse_vmap, require_rows
from tbik.ops.samples import bounds, is_narrow, require_samples
from tbik.plan import TreePlan


class RowGradients(NamedTuple):
    """Rows that occur, ascending (int64 [n], counted from the shard's first row), and their gradients fp32 [n, D]."""

    rows: Tensor
    values: Tensor


def embedding(
    ids: Tensor,
    w: Tensor,
    *,
    first_row: int = 0,
    vocabulary: int | None = None,
    out_dtype: torch.dtype | None = None,
    sample_offsets: Sequence[int] | None = None,
    plan: TreePlan | None = None,
) -> Tensor:
    """y[t] = cast(w[ids[t] - first_row]), -0.0 where this rank does not hold the row (A8).

    ids [...] integers within [0, vocabulary); w [V, D], the rows [first_row, first_row + V) of `vocabulary` (all, by
    default) -> [..., D] in out_dtype (w.dtype): an fp32 master weight is rounded once, a bf16 one widened exactly.
    sample_offsets, plan: as in rms_norm, for the gradient; ids [B, T] are B samples.
    Gradient: dw fp32 [V, D], dense; embedding_row_gradients gives the rows alone. Errors: PlanError, ValueError for an
    id outside the vocabulary (on CUDA NaN in its row: the host does not see the ids). Batch-invariant; dw
    layout-invariant.
    """
    plain = vocabulary is None and out_dtype is None and sample_offsets is None and plan is None
    plain = plain and first_row == 0 and type(first_row) is int and is_simple(w) and is_direct(ids) and w.dim() == 2
    plain = plain and ids is not None
    if plain and ids.dtype == torch.int64 and ids.dim() < 3:
        return _C.embedding(ids, w, 0, w.shape[0], w.dtype)
    where = "ops.embedding"
    total = _require_ids(where, ids, w.shape[0] if isinstance(w, Tensor) and w.dim() else 0, first_row, vocabulary)
    _require_dense(where, "w", w, CPU_AND_CUDA)
    if w.dim() != 2 or w.dtype not in DTYPES or w.shape[1] < 1:
        raise PlanError(f"{where}: expected w [V, D] in bfloat16, float16 or float32, got {w.dtype} {shape_of(w)}")
    _require_same_device(where, "ids", ids, "w", w)
    out = w.dtype if out_dtype is None else out_dtype
    if out not in DTYPES:
        raise PlanError(f"{where}: out_dtype is one of {[_name(d) for d in DTYPES]}, got {out!r}")
    require_samples(where, ids.shape, sample_offsets)
    narrow = is_narrow(where, plan)
    if is_direct(ids, w):
        return _C.embedding(ids, w, first_row, total, out)
    offsets = None if sample_offsets is None else list(sample_offsets)
    y: Tensor = _embedding(ids, w, first_row, total, out, offsets, narrow)
    return y


def embedding_row_gradients(
    dy: Tensor,
    ids: Tensor,
    num_rows: int,
    *,
    first_row: int = 0,
    vocabulary: int | None = None,
    sample_offsets: Sequence[int] | None = None,
    plan: TreePlan | None = None,
) -> RowGradients:
    """The rows of dw that some token touches; the others are +0. No autograd. Layout-invariant.

    dy [..., D], ids [...]; num_rows: V of this rank's shard. The rest as in embedding.
    """
    where = "ops.embedding_row_gradients"
    total, offsets = _require_row_gradients(where, dy, ids, num_rows, first_row, vocabulary, sample_offsets)
    narrow = is_narrow(where, plan)
    return RowGradients(*kernels_of(dy).embedding_rows(dy, ids, first_row, num_rows, total, offsets, narrow))


def embedding_cover(
    dy: Tensor,
    ids: Tensor,
    num_rows: int,
    first_sample: int,
    *,
    first_row: int = 0,
    vocabulary: int | None = None,
    sample_offsets: Sequence[int] | None = None,
    plan: TreePlan | None = None,
) -> list[RowGradients]:
    """Per node of tree.cover(first_sample, first_sample + S) the rows of its value. No autograd. Layout-invariant."""
    where = "ops.embedding_cover"
    if not _is_int(first_sample) or first_sample < 0:
        raise PlanError(f"{where}: first_sample is an integer >= 0, got {first_sample!r}")
    total, offsets = _require_row_gradients(where, dy, ids, num_rows, first_row, vocabulary, sample_offsets)
    narrow = is_narrow(where, plan)
    dy_TD, ids_T = dy.reshape(-1, dy.shape[-1]), ids.reshape(-1)
    nodes = []
    for node in tree.cover(first_sample, first_sample + len(offsets) - 1):
        part = offsets[node.lo - first_sample : node.hi - first_sample + 1]
        tokens = slice(part[0], part[-1])
        own = [offset - part[0] for offset in part]
        rows = kernels_of(dy).embedding_rows(dy_TD[tokens], ids_T[tokens], first_row, num_rows, total, own, narrow)
        nodes.append(RowGradients(*rows))
    return nodes


def _require_ids(where: str, ids: Tensor, num_rows: int, first_row: int, vocabulary: int | None) -> int:
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise PlanError(f"{where}: ids is an int64 or int32 tensor, got {getattr(ids, 'dtype', ids)}")
    if ids.layout != torch.strided or ids.is_nested:
        raise PlanError(f"{where}: ids is a dense tensor, got layout {ids.layout}")
    total = num_rows if vocabulary is None else vocabulary
    fits = _is_int(first_row) and _is_int(total) and 0 <= first_row <= first_row + num_rows <= total < 2**63
    if not fits:
        raise PlanError(
            f"{where}: expected rows [first_row, first_row + V) within the vocabulary, got first_row {first_row!r}, "
            f"V {num_rows}, vocabulary {total!r}"
        )
    return total


def _require_row_gradients(
    where: str,
    dy: Tensor,
    ids: Tensor,
    num_rows: int,
    first_row: int,
    vocabulary: int | None,
    sample_offsets: Sequence[int] | None,
) -> tuple[int, list[int]]:
    total = _require_ids(where, ids, num_rows, first_row, vocabulary)
    require_rows(where, "dy", dy, served=CPU_AND_CUDA)
    if dy.shape[:-1] != ids.shape:
        raise PlanError(f"{where}: expected dy [..., D] and ids [...], got {shape_of(dy)} and {shape_of(ids)}")
    require_samples(where, ids.shape, sample_offsets)
    return total, bounds(ids.shape, sample_offsets)


# --- operators ------------------------------------------------------------------------------------------------------


@_operator(
    "embedding",
    "(Tensor ids, Tensor w, int first_row, SymInt vocabulary, ScalarType out_dtype, SymInt[]? sample_offsets, "
    "bool narrow) -> Tensor",
    cuda=True,
)
def _embedding(
    ids: Tensor,
    w: Tensor,
    first_row: int,
    vocabulary: int,
    out_dtype: torch.dtype,
    sample_offsets: list[int] | None,
    narrow: bool,
) -> Tensor:
    return kernels_of(w).embedding(ids, w, first_row, vocabulary, out_dtype)


@_fake(_embedding)
def _embedding_fake(
    ids: Tensor, w: Tensor, first_row: int, vocabulary: int, out_dtype: torch.dtype, *rest: Any
) -> Tensor:
    _require_one_device(ids, w)
    return w.new_empty((*ids.shape, w.shape[1]), dtype=out_dtype)


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ids, w, ctx.first_row, ctx.vocabulary, _, ctx.sample_offsets, ctx.narrow = inputs
    ctx.num_rows = w.shape[0]
    ctx.save_for_backward(ids)


def _embedding_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    dw = _embedding_dw(dy, ids, ctx.num_rows, ctx.first_row, ctx.vocabulary, ctx.sample_offsets, ctx.narrow)
    return None, dw, None, None, None, None, None


differentiable(_embedding, _embedding_backward, _embedding_setup)


@_operator(
    "embedding_dw",
    "(Tensor dy, Tensor ids, SymInt num_rows, int first_row, SymInt vocabulary, SymInt[]? sample_offsets, bool narrow) "
    "-> Tensor",
    cuda=True,
)
def _embedding_dw(
    dy: Tensor,
    ids: Tensor,
    num_rows: int,
    first_row: int,
    vocabulary: int,
    sample_offsets: list[int] | None,
    narrow: bool,
) -> Tensor:
    offsets = bounds(ids.shape, sample_offsets)
    rows, values = kernels_of(dy).embedding_rows(dy, ids, first_row, num_rows, vocabulary, offsets, narrow)
    dw = dy.new_zeros((num_rows, dy.shape[-1]), dtype=torch.float32)
    dw[rows] = values
    return dw


@_fake(_embedding_dw)
def _embedding_dw_fake(dy: Tensor, ids: Tensor, num_rows: int, *rest: Any) -> Tensor:
    _require_one_device(dy, ids)
    return dy.new_empty((num_rows, dy.shape[-1]), dtype=torch.float32)


refuse_vmap(_embedding, _embedding_dw)
refuse_derivative(_embedding_dw)
