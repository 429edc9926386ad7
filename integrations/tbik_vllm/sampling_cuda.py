"""vLLM's sampling on CUDA in an order that the batch cannot change (its own kernels choose theirs by the batch).

    p = softmax(logits) over the plan's leaves (V1, V2)      token = argmax of p / noise, noise from the request's seed
    top-k keeps every logit >= the k-th largest
    top-p keeps every token of which the more probable ones have less than p together

Stock on CUDA: FlashInfer, or Triton kernels, or a sorted cumulative sum in floating point whose parts depend on the
number of rows. Here probabilities are added as integers, floor(p 2^40), which has no order. Tokens of equal
probability stay or go together. On the CPU vLLM's own sampler runs.
Suffixes: T requests, V vocabulary. Bits: batch-invariant (tests/test_vllm_cuda.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tbik import ops
from tbik_vllm.settings import active_plan

ONE = 2.0**40
"""Of integer probabilities: V < 2^22 of them stay within 63 bits."""


def keep_top(logits: Tensor, k: Tensor | None, p: Tensor | None, leaves: int) -> Tensor:
    """logits fp32 [T, V] with -inf where top-k [T] or top-p [T] drops a token; new memory."""
    if k is not None:
        largest = logits.sort(dim=-1, descending=True).values
        last = largest.gather(1, k.long().clamp(1, logits.shape[1])[:, None] - 1)
        logits = logits.masked_fill(logits < last, -torch.inf)
    if p is not None:
        probability = ops.softmax(logits.contiguous(), leaves)
        largest = probability.sort(dim=-1, descending=True).values
        weights = (largest.double() * ONE).long()  # exact: a power of two; then floor
        before = weights.cumsum(-1) - weights
        total = weights.sum(-1)
        # one rounding per row; the first token has nothing before it and stays; 1 drops nothing, as without top-p
        share = (p.double() * total.double()).ceil().long().clamp(min=1)
        share = torch.where(p < 1, share, total + 1)[:, None]
        count = (before < share).sum(-1, keepdim=True)
        logits = logits.masked_fill(probability < largest.gather(1, count - 1), -torch.inf)
    return logits


def sample(
    self: Any, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """In place of TopKTopPSampler.forward_native and forward_cuda: (tokens [T], processed logits or None)."""
    from vllm.v1.sample.ops.topk_topp_sampler import random_sample

    leaves = active_plan().leaves
    logits = keep_top(logits.float().contiguous(), k, p, leaves)
    processed = None
    if self.logprobs_mode == "processed_logits":
        processed = logits
    elif self.logprobs_mode == "processed_logprobs":
        processed = ops.log_softmax(logits, leaves)
    return random_sample(ops.softmax(logits, leaves), generators, self.use_fp64_gumbel), processed
