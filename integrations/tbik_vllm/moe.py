"""vLLM's mixture of experts by ops.route and ops.experts (ORDER.md section M), as the trainer calls them.

    logits = x W_gate^T in fp32        y = cast(root over the leaves of the experts' intermediate axis)

Every rank holds a run of leaves of every expert and routes every token itself; the covers are summed over the ranks,
so vLLM's runner is told that nothing is left to reduce. Suffixes: T tokens, E experts, H hidden.
Errors: PlanError at construction, naming what is not supported. Bits: layout-invariant and batch-invariant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import ReplicatedLinear

from tbik import PlanError, ops
from tbik_vllm.communicator import tensor_parallel_sums
from tbik_vllm.linear import take_over
from tbik_vllm.settings import plan_for
from tbik_vllm.sharding import equal_shard


class TbikGateLinear(GateLinear):
    """Router logits [T, E] in fp32."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over(self, None, out_dtype=torch.float32)
        self.out_dtype = torch.float32

    def forward(self, x: Tensor) -> Any:
        """Past the stock forward, which on CUDA takes a GEMM of its own by architecture and number of tokens."""
        return ReplicatedLinear.forward(self, x.to(self.tbik_spec.compute_dtype))


def refuse_experts(moe: Any) -> None:
    """PlanError for a mixture of experts (vLLM's FusedMoEConfig) that is laid out or computed otherwise."""
    parallel = moe.moe_parallel_config
    for refused, what in (
        (moe.has_bias, "biases"),
        (moe.activation != MoEActivation.SILU, f"activation {moe.activation}; expected silu"),
        (parallel.use_ep, "expert parallelism"),
        (parallel.dp_size > 1 or moe.is_sequence_parallel, "data or sequence parallelism"),
    ):
        if refused:
            raise PlanError(f"tbik_vllm: a mixture of experts with {what} is not supported")


class _Reduced:
    """In the place of vLLM's expert kernel: what its runner asks about it."""

    can_overlap_shared_experts = False
    is_monolithic = True

    class prepare_finalize:
        @staticmethod
        def topk_indices_dtype() -> None:
            return None

    class fused_experts:
        consumes_expert_mask = False

    def output_is_reduced(self) -> bool:
        return True


class TbikMoEMethod(UnquantizedFusedMoEMethod):
    """Routes and multiplies; keeps vLLM's weights w13 [E, 2i, H] and w2 [E, H, i] and their loaders."""

    def __init__(self, moe: Any) -> None:
        super().__init__(moe)
        refuse_experts(moe)
        self.tbik_plan = plan_for(get_current_vllm_config())
        self.tbik_sums = tensor_parallel_sums() if moe.moe_parallel_config.tp_size > 1 else None

    @property
    def is_monolithic(self) -> bool:
        return True

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *options: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def process_weights_after_loading(self, layer: Any) -> None:
        for refused, what in (
            (layer.scoring_func != "softmax", f"scores by {layer.scoring_func}; expected softmax"),
            (layer.use_grouped_topk, "grouped top-k"),
            (layer.custom_routing_function is not None, "a routing function of its own"),
            (layer.e_score_correction_bias is not None, "score corrections"),
            (layer.routed_scaling_factor != 1.0, f"a scaling factor {layer.routed_scaling_factor}"),
            (layer.apply_router_weight_on_input, "weights on the input"),
            (
                any(getattr(layer, f"swiglu_{name}") is not None for name in ("limit", "alpha", "beta")),
                "a clamped gate",
            ),
        ):
            if refused:
                raise PlanError(f"tbik_vllm: {layer.layer_name}: routing with {what} is not supported")
        parallel = self.moe.moe_parallel_config
        length = layer.w2_weight.shape[2] * parallel.tp_size
        layer.tbik_shard = equal_shard(layer.layer_name, self.tbik_plan, length, parallel.tp_rank, parallel.tp_size)
        self.moe_kernel = _Reduced()

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """x [T, H], the same on every rank -> alike, summed over the ranks."""
        routing = ops.route(router_logits, layer.top_k, normalize=layer.renormalize)
        weights = (layer.w13_weight, layer.w2_weight)
        if self.tbik_sums is None:
            return ops.experts(x, routing, *weights, plan=self.tbik_plan)
        shard = layer.tbik_shard
        values = ops.experts_cover(x, routing, *weights, shard.run, plan=self.tbik_plan)
        return self.tbik_sums.sum_cover(values, shard, None, x.dtype)
