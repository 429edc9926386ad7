"""Embedding, lm_head and log-probabilities of vLLM by tbik.ops (ORDER.md A8, A10, V4).

    x = cast(W[ids]): -0.0 from ranks without the row        logits = x W^T, fp32, this rank's rows of the vocabulary
    logp = logits - lse, over the plan's leaves

Suffixes: T tokens, V vocabulary, v this rank's rows of it. Errors: PlanError at construction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from tbik import PlanError, ops
from tbik.ops.linear import CoverRun
from tbik.packing import PackSpec
from tbik_vllm.communicator import tensor_parallel_sums
from tbik_vllm.linear import operand_of
from tbik_vllm.settings import active_plan, plan_for
from tbik_vllm.weights import Watch, plain_values, wants_packs


class TbikEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Rows looked up (embedding), and logits in fp32 (lm_head)."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer._parameters["weight"]
        assert weight is not None
        plan, length = layer.tbik_plan, weight.shape[1]
        layer.tbik_spec = PackSpec(plan, weight.dtype, None, CoverRun(length, 0, plan.leaves))
        layer.tbik_watch = None
        if not wants_packs(weight):
            return
        layer.tbik_watch = Watch.of(weight)
        layer.tbik_watch.drop()
        if isinstance(layer, ParallelLMHead):
            layer.tbik_watch.pack(layer.tbik_spec)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, v] in fp32: the root goes into the log-softmax unrounded (A7)."""
        return ops.linear(
            x,
            operand_of(layer),
            bias,
            plan=layer.tbik_plan,
            compute_dtype=layer.tbik_spec.compute_dtype,
            out_dtype=torch.float32,
        )

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        shard = layer.shard_indices
        return ops.embedding(
            input_,
            _values_of(layer)[: shard.num_org_elements],
            first_row=shard.org_vocab_start_index,
            vocabulary=layer.org_vocab_size,
        )


def _values_of(layer: Any) -> Tensor:
    parameter, watch = layer._parameters["weight"], layer.tbik_watch
    if watch is None:
        return plain_values(parameter)
    if watch.parameter is not parameter:  # replaced
        watch = layer.tbik_watch = Watch.of(parameter)
    values: Tensor = watch.values
    return values


def _take_over(layer: VocabParallelEmbedding) -> None:
    name = f"{type(layer).__name__} {layer.prefix!r}"
    if type(layer.quant_method) is not UnquantizedEmbeddingMethod:
        raise PlanError(
            f"tbik_vllm: {name} is quantised ({type(layer.quant_method).__name__}); expected plain bfloat16, float16 "
            "or float32 weights"
        )
    if layer.num_added_embeddings:
        raise PlanError(f"tbik_vllm: {name} has {layer.num_added_embeddings} added rows (LoRA); not supported")
    if layer.parallel_group is not None:
        raise PlanError(f"tbik_vllm: {name} is sharded over a group of its own; expected the tensor-parallel group")
    layer.tbik_plan = plan_for(get_current_vllm_config())
    layer.quant_method = TbikEmbeddingMethod()


class TbikVocabParallelEmbedding(VocabParallelEmbedding):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.reduce_results:
            raise PlanError(f"tbik_vllm: VocabParallelEmbedding {self.prefix!r} has reduce_results=False")
        _take_over(self)
        self.tbik_sums = tensor_parallel_sums() if self.tp_size > 1 else None

    def forward(self, input_: Tensor) -> Tensor:
        rows = self.quant_method.embedding(self, input_.long())
        return rows if self.tbik_sums is None else self.tbik_sums.sum_plain(rows)


class TbikParallelLMHead(ParallelLMHead):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _take_over(self)


class TbikLogitsProcessor(LogitsProcessor):
    """Logits in fp32, gathered by vLLM; a rank's padding rows are cut off there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.soft_cap is not None or self.scale != 1.0 or self.logits_as_input:
            raise PlanError(
                f"tbik_vllm: LogitsProcessor with soft_cap={self.soft_cap}, scale={self.scale}, "
                f"logits_as_input={self.logits_as_input}; expected plain logits (torch's tanh has other bits in a "
                "vector's tail)"
            )

    def _apply_head(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
        if self.head_dtype not in (None, hidden_states.dtype, torch.float32):
            raise PlanError(f"tbik_vllm: head_dtype is {self.head_dtype}; logits are float32 here")
        logits: Tensor = lm_head.quant_method.apply(lm_head, hidden_states, bias=embedding_bias)
        return logits


def compute_logprobs(logits: Tensor) -> Tensor:
    """In place of Sampler.compute_logprobs: logp = x - lse in fp32. logits [T, V] whole."""
    return ops.log_softmax(logits.to(torch.float32).contiguous(), active_plan().leaves)
