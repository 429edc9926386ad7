"""Log-probabilities of given ids, the k most likely ids and the most likely one (ORDER.md A10, V).

    logp(id) = x_id - lse                          dx_j = cast(-g * (exp(x_j - lse) - [j == id])),  g = dlogp, fp32
    top_k: the first k of a row by (value descending, NaN before everything, -0 = +0; then id ascending)

Suffixes: V the vocabulary, n ids per row. Log-probabilities are fp32, whatever the dtype of the logits.
Memory of a call beside logits and result: 4 bytes per row, and k entries per thread; no [T, V] tensor.
Bits: deterministic, batch-invariant, layout-invariant (tests/test_logprobs.py). CPU, meta and
CUDA tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tbik.devices import kernels_of
from tbik.errors import PlanError
from tbik.ops.cross_entropy import _cross_entropy_backward, require_ids, require_range
from tbik.ops.linear import _LIBRARY as LIBRARY
from tbik.ops.linear import _fake, _is_int, _operator, _require_one_device, _require_same_device, _shape
from tbik.ops.softmax import per_row, refuse_transforms, require_leaves, require_rows

NO_INDEX = -1  # no id is ignored


class TopLogprobs(NamedTuple):
    """logprobs: fp32 [..., k], descending. ids: int64 [..., k]."""

    logprobs: Tensor
    ids: Tensor


class TopK(NamedTuple):
    """values: fp32 [..., k], descending. ids: int64 [..., k]."""

    values: Tensor
    ids: Tensor


def logprobs(logits: Tensor, ids: Tensor, leaves: int = 1) -> Tensor:
    """logp = x_id - lse in fp32, lse = m + log s over `leaves` leaves of the vocabulary.

    logits [..., V] bf16, fp16 or fp32; ids int64 in 0..V-1, [...] (differentiable once, gradient in the logits' dtype)
    or [..., n] (no derivative) -> fp32, shaped as ids. Errors: PlanError. Bits: those of log_softmax of fp32 logits;
    layout-invariant and batch-invariant.
    """
    where = "ops.logprobs"
    require_rows(where, logits, leaves, "logits")
    require_ids(where, "ids", ids)
    _require_same_device(where, "logits", logits, "ids", ids)
    many = ids.dim() == logits.dim()
    if ids.shape[: logits.dim() - 1] != logits.shape[:-1] or ids.dim() not in (logits.dim() - 1, logits.dim()):
        lead = list(logits.shape[:-1])
        raise PlanError(
            f"{where}: expected ids {lead} or {[*lead, 'n']} for logits {_shape(logits)}, got {_shape(ids)}"
        )
    if many and logits.requires_grad and torch.is_grad_enabled():
        raise PlanError(f"{where}: several ids per row have no derivative; call it once per id, or use logits.detach()")
    logp: Tensor = _logprobs(logits, ids, leaves)[0]
    return logp


def top_logprobs(logits: Tensor, k: int, leaves: int = 1) -> TopLogprobs:
    """The k ids with the highest logits, ties to the lower id, and x_id - lse in fp32, descending. No derivative.

    logits [..., V], 1 <= k <= V. A row with a NaN has NaN log-probabilities; its NaN ids come first. Two logits that
    differ may have equal log-probabilities; the higher logit comes first. Bits: layout-invariant and batch-invariant.
    """
    where = "ops.top_logprobs"
    require_rows(where, logits, leaves, "logits")
    require_k(where, k, logits.shape[-1])
    return TopLogprobs(*_top_logprobs(logits, k, leaves))


def top_k(x: Tensor, k: int) -> TopK:
    """The k highest of each row of x [..., V], 1 <= k <= V, descending, ties to the lower index, NaN first.

    bf16, fp16 or fp32 -> fp32 values (NaN canonical) and int64 ids [..., k]. No derivative. Bits: no arithmetic.
    """
    where = "ops.top_k"
    require_rows(where, x, 1)
    require_k(where, k, x.shape[-1])
    return TopK(*_top_k(x, k))


def argmax(x: Tensor) -> Tensor:
    """The lowest index of the maximum of each row of x [..., V] (the first NaN if there is one): int64 [...]."""
    require_rows("ops.argmax", x, 1)
    ids: Tensor = _top_k(x, 1)[1]
    return ids[..., 0]


# --- any columns of a vocabulary: one rank's part; no autograd -------------------------------------------------------


def top_k_of(x: Tensor, k: int, first: int) -> TopK:
    """top_k of the columns first, first + 1, ...; where there are fewer than k, the rest is (-inf, -1)."""
    require_rows("ops.top_k_of", x, 1)
    return TopK(*kernels_of(x).vocab_top_k(x.detach().resolve_neg(), None, first, k))


def merge_top_k(values: Tensor, ids: Tensor, k: int) -> TopK:
    """The k first of candidates [..., n] in the same order; a negative id is no candidate."""
    return TopK(*kernels_of(values).vocab_top_k(values, ids, 0, k))


# --- operators -------------------------------------------------------------------------------------------------------


@_operator("logprobs", "(Tensor logits, Tensor ids, int leaves) -> (Tensor, Tensor)", cuda=True)
def _logprobs(logits: Tensor, ids: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    require_range("ops.logprobs", "ids", ids, logits.shape[-1], None)
    require_leaves("ops.logprobs", leaves)
    kernels = kernels_of(logits)
    lse = kernels.vocab_log_sum_exp(logits, leaves)
    ids_n = ids if ids.dim() == logits.dim() else ids[..., None]
    logp = kernels.vocab_log_softmax_of(kernels.vocab_pick(logits, ids_n, 0), lse)
    return torch.ops.aten._unsafe_view.default(logp, ids.shape), lse


@_fake(_logprobs)
def _logprobs_fake(logits: Tensor, ids: Tensor, leaves: int) -> tuple[Tensor, Tensor]:
    _require_one_device(logits, ids)
    return logits.new_empty(ids.shape, dtype=torch.float32), per_row(logits)


def _logprobs_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, ids, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, ids, output[1])


def _logprobs_gradient(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    logits, ids, lse = ctx.saved_tensors
    if ids.dim() == logits.dim():
        raise PlanError("ops.logprobs: several ids per row have no derivative; call it once per id")
    return None if g is None else _cross_entropy_backward(-g, logits, ids, lse, NO_INDEX), None, None


torch.library.register_autograd(_logprobs, _logprobs_gradient, setup_context=_logprobs_setup, lib=LIBRARY)


@_operator("top_logprobs", "(Tensor logits, int k, int leaves) -> (Tensor, Tensor)", cuda=True)
def _top_logprobs(logits: Tensor, k: int, leaves: int) -> tuple[Tensor, Tensor]:
    require_leaves("ops.top_logprobs", leaves)
    kernels = kernels_of(logits)
    values, ids = kernels.vocab_top_k(logits, None, 0, k)
    return kernels.vocab_log_softmax_of(values, kernels.vocab_log_sum_exp(logits, leaves)), ids


@_fake(_top_logprobs)
def _top_logprobs_fake(logits: Tensor, k: int, leaves: int) -> tuple[Tensor, Tensor]:
    return _k_per_row(logits, k)


@_operator("top_k", "(Tensor x, int k) -> (Tensor, Tensor)", cuda=True)
def _top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return kernels_of(x).vocab_top_k(x, None, 0, k)


@_fake(_top_k)
def _top_k_fake(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return _k_per_row(x, k)


def _k_per_row(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], k)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


refuse_transforms((_logprobs,), (_top_logprobs, _top_k))


def require_k(where: str, k: int, vocab: int) -> None:
    if not _is_int(k) or not 1 <= k <= vocab:
        raise PlanError(f"{where}: k is an integer 1..{vocab} (the vocabulary), got {k!r}")
