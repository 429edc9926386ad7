"""A vocabulary in shards: softmax, cross-entropy and log-probabilities without gathering logits.

    rank r holds the logits [..., v] of a run of leaves of V (the rows of lm_head it owns, ORDER.md T6, V11)

    m    = maximum over the ranks' maxima            all-gather of one value per row (exact, so without an order)
    s    = root of the ranks' covers of exp(x - m)   all-reduce of at most log2 L nodes per row
    lse  = m + log s                                 the same bits on every rank, and those of one rank

    function                 forward sends per row                backward sends per row
    log_softmax              m, s                                 row sum of dy
    softmax                  m, s                                 row sum of p*dp
    cross_entropy, logprobs  m with x_t (from its owner), s       nothing
    top_logprobs, argmax     k candidates, s (argmax: 1)          no derivative

Suffixes: V the whole vocabulary, v this rank's columns. Every rank of the group makes the same calls in the same order
with the same rows, k and targets (a digest of the targets is compared; another number of rows or another k shows with
TBIK_CHECK=1, see tbik.collectives); results per row are the same on every rank. The upstream gradient of a result that
all ranks hold is taken from this rank alone: it is one value, not one per rank.
Eager: torch.compile breaks its graph here. CPU and CUDA tensors.
Errors: PlanError at construction or before a message; TransportTimeout and TransportError as in tbik.collectives.
Bits: layout-invariant and batch-invariant (tests/test_vocabulary.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tbik.collectives import all_gather, all_reduce
from tbik.errors import PlanError
from tbik.nn import _differentiable_once, _is_int, _sharding
from tbik.ops.cross_entropy import (
    IGNORE_INDEX,
    TokenSum,
    cross_entropy_dx,
    losses_of,
    pick,
    require_ids,
    require_ignored,
    require_range,
    token_sum,
)
from tbik.ops.linear import CoverRun, _require_same_device, require_samples
from tbik.ops.logprobs import NO_INDEX, TopLogprobs, merge_top_k, require_k, top_k_of
from tbik.ops.softmax import (
    exp_sum_cover,
    log_softmax_dx_of,
    log_softmax_of,
    log_sum_exp_of,
    require_rows,
    row_max,
    row_sum_cover,
    softmax_dots_cover,
    softmax_dx_of,
    softmax_of,
)
from tbik.plan import Run, TreePlan


class VocabParallel:
    """The operators of a vocabulary that the ranks of a group hold in shards.

    vocab: V. group: None is one rank that holds all of it: the same order, the same bits. runs: leaf run of every rank,
    plan.leaf_runs by default (Layout.vocab of a model). `columns` = [first, end) of this rank.
    """

    def __init__(
        self,
        vocab: int,
        *,
        plan: TreePlan,
        group: dist.ProcessGroup | None = None,
        runs: Sequence[Run] | None = None,
    ) -> None:
        where = "VocabParallel"
        if not _is_int(vocab) or vocab < 1:
            raise PlanError(f"{where}: vocab is an integer >= 1, got {vocab!r}")
        self.vocab = vocab
        self.sharding = _sharding(where, plan, group, runs, vocab)
        if plan.acc_dtype != "float32":
            raise PlanError(f"{where}: the vocabulary is reduced in float32, the plan says {plan.acc_dtype}")
        cuts = plan.cuts(vocab)
        bounds = [(cuts[lo], cuts[hi]) for lo, hi in self.sharding.runs]
        for rank, (first, end) in enumerate(bounds):
            if first == end:
                raise PlanError(
                    f"{where}: rank {rank} of {len(bounds)} would hold no column of {vocab} (leaves "
                    f"{list(self.sharding.runs[rank])} are empty); use fewer ranks or other runs"
                )
        self.bounds = tuple(bounds)
        self.columns = self.bounds[self.sharding.rank]
        self.run = CoverRun(vocab, *self.sharding.run)

    # --- operators ---------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def log_softmax(self, logits: Tensor) -> Tensor:
        """y = cast(x - lse) of this rank's columns: logits [..., v] -> [..., v] in their dtype. Differentiable once."""
        self._require("log_softmax", logits)
        y: Tensor = _LogSoftmax.apply(self, logits)  # type: ignore[no-untyped-call]
        return y

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def softmax(self, logits: Tensor) -> Tensor:
        """p = cast(exp(x - m) / s) of this rank's columns: logits [..., v] -> [..., v]. Differentiable once."""
        self._require("softmax", logits)
        p: Tensor = _Softmax.apply(self, logits)  # type: ignore[no-untyped-call]
        return p

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def token_losses(self, logits: Tensor, targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """loss[...] = lse - x_t in fp32, on every rank; targets [...] are ids of the whole vocabulary."""
        where = "token_losses"
        self._require_ids(where, logits, targets, "targets", ignore_index)
        losses: Tensor = _TokenLosses.apply(self, logits, targets, ignore_index)  # type: ignore[no-untyped-call]
        return losses

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = IGNORE_INDEX,
        sample_offsets: Sequence[int] | None = None,
    ) -> TokenSum:
        """(total, num_tokens) of ops.cross_entropy, on every rank; arguments as there, logits [..., v] of this rank."""
        self._require("cross_entropy", logits)
        require_samples("VocabParallel.cross_entropy", logits, sample_offsets)
        losses = self.token_losses(logits, targets, ignore_index)
        return TokenSum(token_sum(losses, sample_offsets), (targets != ignore_index).sum())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def logprobs(self, logits: Tensor, ids: Tensor) -> Tensor:
        """logp[...] = x_id - lse in fp32, on every rank; ids [...] of the whole vocabulary. Differentiable once."""
        self._require_ids("logprobs", logits, ids, "ids", None)
        logp: Tensor = _Logprobs.apply(self, logits, ids)  # type: ignore[no-untyped-call]
        return logp

    @torch.no_grad()
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def top_logprobs(self, logits: Tensor, k: int) -> TopLogprobs:
        """ops.top_logprobs of the whole vocabulary, on every rank: each sends k candidates per row."""
        self._require("top_logprobs", logits)
        require_k("VocabParallel.top_logprobs", k, self.vocab)
        logits = logits.detach()
        values, ids = self._top_k(logits, k)
        m = row_max(values)
        return TopLogprobs(log_softmax_of(values, log_sum_exp_of(m, self._exp_sum(logits, m))), ids)

    @torch.no_grad()
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def argmax(self, logits: Tensor) -> Tensor:
        """ops.argmax of the whole vocabulary, on every rank: int64 [...]."""
        self._require("argmax", logits)
        return self._top_k(logits.detach(), 1)[1][..., 0]

    # --- joined over the ranks ----------------------------------------------------------------------------------------

    def _top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, ids = top_k_of(logits, k, self.columns[0])
        if self.sharding.size == 1:
            return values, ids
        moved = torch.stack([values.view(torch.int32), ids.to(torch.int32)], dim=-1)
        gathered = all_gather(moved, self.sharding.group, same={"k": str(k)}).movedim(0, -3)
        candidates = gathered.reshape(*logits.shape[:-1], self.sharding.size * k, 2)
        values = candidates[..., 0].contiguous().view(torch.float32)
        return merge_top_k(values, candidates[..., 1].long(), k)

    def _maximum(self, logits: Tensor) -> Tensor:
        local = row_max(logits)
        if self.sharding.size == 1:
            return local
        return row_max(all_gather(local, self.sharding.group).movedim(0, -1))

    def _maximum_and_pick(self, logits: Tensor, ids: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
        """m, and the logit of each id from the rank that owns it; anything for ignored ids."""
        first = self.columns[0]
        local, picked = row_max(logits), pick(logits, ids[..., None], first)[..., 0]
        if self.sharding.size == 1:
            return local, picked
        digest = hashlib.blake2b(ids.cpu().contiguous().view(torch.uint8).numpy().data, digest_size=8).hexdigest()
        same = {"digest of the ids": digest, "ignored id": str(ignored)}
        gathered = all_gather(torch.stack([local, picked]), self.sharding.group, same=same)
        ends = torch.tensor([end for _, end in self.bounds], device=ids.device)
        owner = torch.bucketize(ids, ends, right=True).clamp_(max=self.sharding.size - 1)
        return row_max(gathered[:, 0].movedim(0, -1)), gathered[:, 1].gather(0, owner[None])[0]

    def _exp_sum(self, logits: Tensor, m: Tensor) -> Tensor:
        return self._root(exp_sum_cover(logits, m, self.run, self.sharding.plan.leaves))

    def _root(self, values: Tensor) -> Tensor:
        sharding = self.sharding
        return all_reduce(sharding.cover(values), sharding.group, plan=sharding.plan, runs=sharding.runs)

    # --- refusals -----------------------------------------------------------------------------------------------------

    def _require(self, name: str, logits: Tensor) -> None:
        where = f"VocabParallel.{name}"
        require_rows(where, logits, self.sharding.plan.leaves, "logits")
        if logits.device.type not in ("cpu", "cuda"):
            raise PlanError(f"{where}: logits is on {logits.device}, kernels exist for cpu and cuda; use logits.cpu()")
        first, end = self.columns
        if logits.shape[-1] != end - first:
            raise PlanError(
                f"{where}: rank {self.sharding.rank} holds columns [{first}, {end}) of {self.vocab}; expected logits "
                f"[..., {end - first}], got {list(logits.shape)}"
            )

    def _require_ids(self, name: str, logits: Tensor, ids: Tensor, what: str, ignore_index: int | None) -> None:
        self._require(name, logits)
        where = f"VocabParallel.{name}"
        require_ids(where, what, ids)
        _require_same_device(where, "logits", logits, what, ids)
        if ids.shape != logits.shape[:-1]:
            raise PlanError(f"{where}: expected {what} {list(logits.shape[:-1])}, got {list(ids.shape)}")
        if ignore_index is not None:
            require_ignored(where, ignore_index)
        require_range(where, what, ids, self.vocab, ignore_index)


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: VocabParallel, logits: Tensor) -> Tensor:
        m = shards._maximum(logits)
        lse = log_sum_exp_of(m, shards._exp_sum(logits, m))
        ctx.shards = shards
        ctx.save_for_backward(logits, lse)
        return log_softmax_of(logits, lse)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Any, ...]:
        logits, lse = saved
        total = ctx.shards._root(row_sum_cover(dy, ctx.shards.run, ctx.shards.sharding.plan.leaves))
        return None, log_softmax_dx_of(dy, logits, lse, total)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: VocabParallel, logits: Tensor) -> Tensor:
        m = shards._maximum(logits)
        s = shards._exp_sum(logits, m)
        ctx.shards = shards
        ctx.save_for_backward(logits, m, s)
        return softmax_of(logits, m, s)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], dp: Tensor) -> tuple[Any, ...]:
        logits, m, s = saved
        cover = softmax_dots_cover(dp, logits, m, s, ctx.shards.run, ctx.shards.sharding.plan.leaves)
        return None, softmax_dx_of(dp, logits, m, s, ctx.shards._root(cover))


def _token_losses(shards: VocabParallel, logits: Tensor, targets: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    m, picked = shards._maximum_and_pick(logits, targets, ignore_index)
    lse = log_sum_exp_of(m, shards._exp_sum(logits, m))
    return lse, picked


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: VocabParallel, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        lse, picked = _token_losses(shards, logits, targets, ignore_index)
        ctx.first, ctx.ignore_index = shards.columns[0], ignore_index
        ctx.save_for_backward(logits, targets, lse)
        return losses_of(lse, picked, targets, ignore_index)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], g: Tensor) -> tuple[Any, ...]:
        logits, targets, lse = saved
        return None, cross_entropy_dx(g, logits, targets, lse, ctx.first, ctx.ignore_index), None, None


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: VocabParallel, logits: Tensor, ids: Tensor) -> Tensor:
        lse, picked = _token_losses(shards, logits, ids, NO_INDEX)
        ctx.first = shards.columns[0]
        ctx.save_for_backward(logits, ids, lse)
        # not a view: autograd forbids in-place edits of a view that a Function returns
        logp: Tensor = torch.ops.aten._unsafe_view.default(log_softmax_of(picked[..., None], lse), lse.shape)
        return logp

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], g: Tensor) -> tuple[Any, ...]:
        logits, ids, lse = saved
        return None, cross_entropy_dx(-g, logits, ids, lse, ctx.first, NO_INDEX), None
