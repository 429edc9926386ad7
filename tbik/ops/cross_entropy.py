"""Cross-entropy of logits and target ids: losses per token, their sum per sample and over the batch (ORDER.md A10, V).

    loss = lse - x_t                                  dx_j = cast(g * (exp(x_j - lse) - [j == t])),  g = dloss, fp32
    sample = tree over blocks of 512 tokens of the chain over its losses        total = node(0, B) over the samples

Suffixes: V the vocabulary, B samples, T tokens, C nodes of a cover. A token whose target is `ignore_index` has loss +0
and gradient +0. Samples are the leaves of the token sum as they are of every parameter gradient (S1): micro-batches and
data-parallel ranks change no bit; 1/total_tokens multiplies the gradient that enters (S4), never the sum. There is
no label smoothing and no z-loss.

Memory of a call beside logits and result: the forward 8 bytes per token (no [T, V] tensor); the backward writes dlogits
once, in the logits' dtype, and holds nothing else. Saved for the backward: the logits and 4 bytes per token.
Bits: deterministic, batch-invariant, layout-invariant (tests/test_cross_entropy.py). CPU, meta and CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import _LIBRARY as LIBRARY
from tbik.ops.linear import (
    _fake,
    _is_int,
    _kind,
    _offsets,
    _operator,
    _require_dense,
    _require_one_device,
    _require_same_device,
    _run_schedule,
    _shape,
    require_samples,
)
from tbik.ops.softmax import per_row, refuse_transforms, require_leaves, require_rows
from tbik.plan import TreePlan

IGNORE_INDEX = -100
MAX_SAMPLES = 2**48


class TokenSum(NamedTuple):
    """total: fp32 scalar, the sum of the losses. num_tokens: int64 scalar, the tokens that are not ignored."""

    total: Tensor
    num_tokens: Tensor


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    plan: TreePlan | None = None,
    leaves: int | None = None,
    ignore_index: int = IGNORE_INDEX,
    sample_offsets: Sequence[int] | None = None,
) -> TokenSum:
    """(total, num_tokens): total = node(0, B) over the samples of the sums of lse - x_t over their tokens, in fp32.

    logits [..., V] bf16, fp16 or fp32; targets [...] int64 in 0..V-1 or ignore_index. plan or leaves: into how many
    leaves the vocabulary is cut. sample_offsets: row offsets of the samples, 0 first, the number of rows last; by
    default logits [B, T, V] are B samples, [T, V] or [V] one. For the mean write `total * (1 / num_tokens)` with the
    number of the whole global batch: the factor then multiplies the gradient in fp32.

    Gradient: of the logits, in their dtype, rounded once. Differentiable once. Errors: PlanError, also for a target
    outside the vocabulary. Bits: layout-invariant and batch-invariant; the total of 2^j samples that start at a
    multiple of 2^j is a node of the tree over the batch (`sample_cover`).
    """
    where = "ops.cross_entropy"
    losses = _losses(where, logits, targets, plan, leaves, ignore_index, sample_offsets)
    total = _sample_root(_sample_sums(losses, None if sample_offsets is None else list(sample_offsets)))
    return TokenSum(total, (targets != ignore_index).sum())


def token_losses(
    logits: Tensor,
    targets: Tensor,
    *,
    plan: TreePlan | None = None,
    leaves: int | None = None,
    ignore_index: int = IGNORE_INDEX,
) -> Tensor:
    """loss[...] = lse - x_t in fp32, +0 for ignored tokens: the losses that `cross_entropy` adds up."""
    return _losses("ops.token_losses", logits, targets, plan, leaves, ignore_index, [0])


def sample_sums(losses: Tensor, sample_offsets: Sequence[int] | None = None) -> Tensor:
    """sums[b] = tree over blocks of 512 tokens of the chain over sample b's losses (S1, b_k = 1); +0 without tokens.

    losses fp32: [B, T] are B samples, [T] or a scalar one, or any shape with sample_offsets -> fp32 [B]. Differentiable
    once. Bits: a sample's sum ignores the other samples.
    """
    where = "ops.sample_sums"
    _require_float32(where, "losses", losses)
    require_samples(where, losses.unsqueeze(-1), sample_offsets)
    sums: Tensor = _sample_sums(losses, None if sample_offsets is None else list(sample_offsets))
    return sums


def token_sum(losses: Tensor, sample_offsets: Sequence[int] | None = None) -> Tensor:
    """total = node(0, B) over `sample_sums`, an fp32 scalar; +0 without samples. Bits: layout-invariant."""
    total: Tensor = _sample_root(sample_sums(losses, sample_offsets))
    return total


def sample_cover(sums: Tensor, first: int) -> Tensor:
    """The cover of the samples [first, first + B) of a global batch: fp32 [C], nodes of tree.cover(first, first + B).

    sums [B] of `sample_sums`. tbik.all_reduce(Cover(values, nodes, samples of the global batch)) then is the total of
    all ranks, and tree.merge that of all micro-batches. No derivative. Bits: layout-invariant.
    """
    where = "ops.sample_cover"
    _require_float32(where, "sums", sums)
    if sums.dim() != 1:
        raise PlanError(f"{where}: expected sums [B], got {_shape(sums)}")
    if not _is_int(first) or not 0 <= first < MAX_SAMPLES:
        raise PlanError(f"{where}: first is the global number of sums[0], an integer 0..2^48 - 1, got {first!r}")
    if not sums.numel():
        return sums.detach().clone()
    end = first + sums.numel()
    return kernels_of(sums).fold(sums.detach()[:, None], _run_schedule(first, end, end, False, False)).view(-1)


# --- any columns of a vocabulary: one rank's part; no autograd -------------------------------------------------------


def pick(x: Tensor, ids: Tensor, first: int) -> Tensor:
    """picked[..., i] = x[..., ids[..., i] - first] in fp32, -0.0 where that is no column of x (A8)."""
    require_rows("ops.pick", x, 1)
    return kernels_of(x).vocab_pick(x.detach().resolve_neg(), ids, first)


def losses_of(lse: Tensor, picked: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """loss = lse - picked, +0 where the target is ignored; all [...]."""
    return kernels_of(lse).vocab_losses(lse, picked, targets, ignore_index)


def cross_entropy_dx(g: Tensor, x: Tensor, targets: Tensor, lse: Tensor, first: int, ignore_index: int) -> Tensor:
    """dx = cast(g * (exp(x - lse) - [j + first == t])) of the columns first, first + 1, ... of the vocabulary."""
    require_rows("ops.cross_entropy_dx", x, 1)
    return kernels_of(x).vocab_cross_entropy_dx(g, x.detach().resolve_neg(), targets, lse, first, ignore_index)


# --- operators -------------------------------------------------------------------------------------------------------


@_operator(
    "cross_entropy", "(Tensor logits, Tensor targets, int leaves, int ignore_index) -> (Tensor, Tensor)", cuda=True
)
def _cross_entropy(logits: Tensor, targets: Tensor, leaves: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    require_range("ops.cross_entropy", "targets", targets, logits.shape[-1], ignore_index)
    require_leaves("ops.cross_entropy", leaves)
    kernels = kernels_of(logits)
    lse = kernels.vocab_log_sum_exp(logits, leaves)
    kept = targets.masked_fill(targets == ignore_index, 0)
    picked = kernels.vocab_pick(logits, kept[..., None], 0).view(lse.shape)
    return kernels.vocab_losses(lse, picked, targets, ignore_index), lse


@_fake(_cross_entropy)
def _cross_entropy_fake(logits: Tensor, targets: Tensor, leaves: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    _require_one_device(logits, targets)
    return per_row(logits), per_row(logits)


@_operator(
    "cross_entropy_backward",
    "(Tensor g, Tensor logits, Tensor targets, Tensor lse, int ignore_index) -> Tensor",
    cuda=True,
)
def _cross_entropy_backward(g: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    return kernels_of(logits).vocab_cross_entropy_dx(g, logits, targets, lse, 0, ignore_index)


@_fake(_cross_entropy_backward)
def _cross_entropy_backward_fake(g: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, ignore_index: int) -> Tensor:
    return logits.new_empty(logits.shape)


def _cross_entropy_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, _, ctx.ignore_index = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, output[1])


def _cross_entropy_gradient(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    logits, targets, lse = ctx.saved_tensors
    dx = None if g is None else _cross_entropy_backward(g, logits, targets, lse, ctx.ignore_index)
    return dx, None, None, None


@_operator("sample_sums", "(Tensor losses, SymInt[]? sample_offsets) -> Tensor", cuda=True)
def _sample_sums(losses: Tensor, sample_offsets: list[int] | None) -> Tensor:
    return kernels_of(losses).token_sums(losses, _offsets(losses[..., None], sample_offsets))


@_fake(_sample_sums)
def _sample_sums_fake(losses: Tensor, sample_offsets: list[int] | None) -> Tensor:
    return losses.new_empty((len(_offsets(losses[..., None], sample_offsets)) - 1,))


@_operator("sample_sums_backward", "(Tensor g, Tensor losses, SymInt[]? sample_offsets) -> Tensor", cuda=True)
def _sample_sums_backward(g: Tensor, losses: Tensor, sample_offsets: list[int] | None) -> Tensor:
    offsets = torch.tensor(_offsets(losses[..., None], sample_offsets), device=g.device)
    return g.repeat_interleave(offsets.diff(), output_size=losses.numel()).reshape(losses.shape)


@_fake(_sample_sums_backward)
def _sample_sums_backward_fake(g: Tensor, losses: Tensor, sample_offsets: list[int] | None) -> Tensor:
    return losses.new_empty(losses.shape)


def _sample_sums_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    losses, ctx.sample_offsets = inputs
    ctx.save_for_backward(losses)


def _sample_sums_gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    return _sample_sums_backward(g, ctx.saved_tensors[0], ctx.sample_offsets), None


@_operator("sample_root", "(Tensor sums) -> Tensor", cuda=True)
def _sample_root(sums: Tensor) -> Tensor:
    if not sums.numel():
        return sums.new_zeros(())
    count = sums.numel()
    root = kernels_of(sums).fold(sums.reshape(count, 1), _run_schedule(0, count, count, True, False))
    # not a view: autograd forbids in-place edits of a view that an operator returns
    scalar: Tensor = torch.ops.aten._unsafe_view.default(root, ())
    return scalar


@_fake(_sample_root)
def _sample_root_fake(sums: Tensor) -> Tensor:
    return sums.new_empty(())


def _sample_root_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _sample_root_gradient(ctx: Any, g: Tensor) -> Tensor:
    return g.expand(ctx.shape).contiguous()  # every leaf of a sum has the gradient of the sum


for _op, _gradient, _setup in (
    (_cross_entropy, _cross_entropy_gradient, _cross_entropy_setup),
    (_sample_sums, _sample_sums_gradient, _sample_sums_setup),
    (_sample_root, _sample_root_gradient, _sample_root_setup),
):
    torch.library.register_autograd(_op, _gradient, setup_context=_setup, lib=LIBRARY)

refuse_transforms((_cross_entropy, _sample_sums, _sample_root), (_cross_entropy_backward, _sample_sums_backward))

# --- refusals --------------------------------------------------------------------------------------------------------


def _losses(
    where: str,
    logits: Tensor,
    targets: Tensor,
    plan: TreePlan | None,
    leaves: int | None,
    ignore_index: int,
    sample_offsets: Sequence[int] | None,
) -> Tensor:
    number = leaves_of(where, plan, leaves)
    require_targets(where, logits, targets, number, ignore_index)
    if where == "ops.cross_entropy":
        require_samples(where, logits, sample_offsets)
    losses: Tensor = _cross_entropy(logits, targets, number, ignore_index)[0]
    return losses


def leaves_of(where: str, plan: TreePlan | None, leaves: int | None) -> int:
    """The number of leaves of the vocabulary, said in exactly one of two ways."""
    if (plan is None) == (leaves is None):
        raise PlanError(
            f"{where}: say plan (the model's TreePlan) or leaves, one of them: the number of leaves of the vocabulary "
            f"is in the bits; got plan={plan!r}, leaves={leaves!r}"
        )
    if plan is not None:
        if not isinstance(plan, TreePlan):
            raise PlanError(f"{where}: plan is a tbik.TreePlan, got {_kind(plan)}")
        if plan.acc_dtype != "float32":
            raise PlanError(f"{where}: the vocabulary is reduced in float32, the plan says {plan.acc_dtype}")
        return plan.leaves
    assert leaves is not None
    require_leaves(where, leaves)
    return leaves


def require_targets(where: str, logits: Tensor, targets: Tensor, leaves: int, ignore_index: int) -> None:
    """PlanError unless logits [..., V] and int64 targets [...] belong together; the operator looks at their values."""
    require_rows(where, logits, leaves, "logits")
    require_ids(where, "targets", targets)
    _require_same_device(where, "logits", logits, "targets", targets)
    if targets.shape != logits.shape[:-1]:
        raise PlanError(
            f"{where}: expected targets {list(logits.shape[:-1])} for logits {_shape(logits)}, got {_shape(targets)}"
        )
    require_ignored(where, ignore_index)


def require_ignored(where: str, ignore_index: int) -> None:
    if not _is_int(ignore_index) or not -(2**63) <= ignore_index < 2**63:
        raise PlanError(f"{where}: ignore_index is an integer of 64 bits, got {ignore_index!r}")


def require_ids(where: str, name: str, ids: Tensor) -> None:
    if not isinstance(ids, Tensor):
        raise PlanError(f"{where}: {name} is a tensor, got {_kind(ids)}")
    if ids.dtype != torch.int64:
        raise PlanError(f"{where}: {name} is int64, got {ids.dtype}; use {name}.long() (class probabilities: no)")
    if ids.layout != torch.strided or ids.is_nested:
        raise PlanError(f"{where}: {name} is a dense tensor, got layout {ids.layout}")


def require_range(where: str, name: str, ids: Tensor, vocab: int, ignore_index: int | None) -> None:
    """PlanError naming the first id outside 0..vocab-1 that is not ignore_index."""
    wrong = (ids < 0) | (ids >= vocab)
    if ignore_index is not None:
        wrong &= ids != ignore_index
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        ignoring = "" if ignore_index is None else f" or ignore_index = {ignore_index}"
        raise PlanError(
            f"{where}: {name}{list(at)} = {int(ids[at])} is outside the vocabulary of {vocab}; expected 0..{vocab - 1}"
            + ignoring
        )


def _require_float32(where: str, name: str, t: Tensor) -> None:
    _require_dense(where, name, t, CPU_AND_CUDA)
    if t.dtype != torch.float32:
        raise PlanError(f"{where}: {name} is float32, got {t.dtype}: losses are never rounded")
