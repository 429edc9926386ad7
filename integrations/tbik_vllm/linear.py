"""vLLM's linear layers by ops.linear: leaves and tree over the input features, whatever the shard (ORDER.md L1).

    replicated, column, merged, qkv    y = cast(x W^T + bias), this rank's rows of W
    row                                y = cast(root over the ranks' covers of K + bias), this rank's columns

The classes replace vLLM's by name at construction (register_oot), keep its weights and loaders, and swap the linear
method. Suffixes: K input features. Errors: PlanError at construction, naming the layer.
Bits: those of tbik.nn's layers, hence of the trainer's (tests/test_vllm_plugin.py::test_verify_layers_equal_nn).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
    split_tensor_along_last_dim,
)

from tbik import PlanError, TreePlan, ops
from tbik.ops.linear import CoverRun, Parallel, linear_cover
from tbik.packing import PackSpec
from tbik_vllm.communicator import tensor_parallel_sums
from tbik_vllm.settings import plan_for
from tbik_vllm.sharding import Shard, equal_shard
from tbik_vllm.weights import Watch, plain_values, wants_packs


class TbikLinearMethod(UnquantizedLinearMethod):
    """How a layer multiplies by its weight: packed once, again after every write; on CUDA as it lies."""

    def __init__(
        self, plan: TreePlan, run: CoverRun, parallel: Parallel | None, out_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.plan, self.run, self.parallel, self.out_dtype = plan, run, parallel, out_dtype

    def spec(self, layer: Any) -> PackSpec:
        dtype = layer._parameters["weight"].dtype
        return PackSpec(self.plan, dtype, self.parallel, self.run)

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer._parameters["weight"]
        assert weight is not None
        layer.tbik_spec = self.spec(layer)
        layer.tbik_watch = None
        if wants_packs(weight):
            layer.tbik_watch = Watch.of(weight)
            layer.tbik_watch.drop()
            layer.tbik_watch.pack(layer.tbik_spec)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return ops.linear(
            x,
            operand_of(layer),
            bias,
            plan=self.plan,
            compute_dtype=layer.tbik_spec.compute_dtype,
            out_dtype=self.out_dtype,
            parallel=self.parallel,
        )


def operand_of(layer: Any) -> Tensor | ops.PackedWeight:
    """What the kernels of the layer's device multiply by: its weight as it is now, or the pack of that."""
    if layer.tbik_watch is None:
        return plain_values(layer._parameters["weight"])
    return pack_of(layer)


def pack_of(layer: Any) -> ops.PackedWeight:
    """The pack of the layer's weight as it is now."""
    weight = layer._parameters["weight"]
    watch = layer.tbik_watch
    if watch.parameter is not weight:  # replaced
        watch = layer.tbik_watch = Watch.of(weight)
    pack: ops.PackedWeight = watch.pack(layer.tbik_spec)
    return pack


def take_over(layer: LinearBase, shard: Shard | None, out_dtype: torch.dtype | None = None) -> None:
    """Swap the linear method. shard: of a row-parallel layer. out_dtype: that of the input by default."""
    name = f"{type(layer).__name__} {layer.prefix!r}"
    if type(layer.quant_method) is not UnquantizedLinearMethod:
        raise PlanError(
            f"tbik_vllm: {name} is quantised ({type(layer.quant_method).__name__}); expected plain bfloat16, float16 "
            "or float32 weights"
        )
    plan = shard.plan if shard is not None else plan_for(get_current_vllm_config())
    whole = CoverRun(layer.input_size, 0, plan.leaves)
    run = whole if shard is None else shard.run
    layer.quant_method = TbikLinearMethod(plan, run, None if shard is None else "row", out_dtype)


class TbikReplicatedLinear(ReplicatedLinear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over(self, None)


class TbikColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over(self, None)


class TbikMergedColumnParallelLinear(MergedColumnParallelLinear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over(self, None)


class TbikQKVParallelLinear(QKVParallelLinear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        take_over(self, None)


class TbikRowParallelLinear(RowParallelLinear):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        name = f"RowParallelLinear {self.prefix!r}"
        if not self.reduce_results:
            raise PlanError(
                f"tbik_vllm: {name} has reduce_results=False: the model adds its partial sums to others before the "
                "ranks are added, which is another tree at every TP size (parallel blocks, shared experts, fused "
                "all-reduce and norm). Not supported"
            )
        if self.skip_bias_add and self.bias is not None:
            raise PlanError(f"tbik_vllm: {name} hands its bias to the model (skip_bias_add); it belongs to the root")
        plan = plan_for(get_current_vllm_config())
        self.tbik_shard = equal_shard(name, plan, self.input_size, self.tp_rank, self.tp_size)
        take_over(self, self.tbik_shard)
        self.tbik_sums = tensor_parallel_sums() if self.tp_size > 1 else None

    def forward(self, input_: Tensor) -> Any:
        x = input_
        if not self.input_is_parallel:
            x = split_tensor_along_last_dim(input_, num_partitions=self.tp_size)[self.tp_rank].contiguous()
        if self.tbik_sums is None:
            y = self.quant_method.apply(self, x, self.bias)
        else:
            shard = self.tbik_shard
            values = linear_cover(
                x,
                operand_of(self),
                shard.run,
                plan=shard.plan,
                compute_dtype=self.tbik_spec.compute_dtype,
                parallel=True,
            )
            y = self.tbik_sums.sum_cover(values, shard, self.bias, x.dtype)
        return (y, None) if self.return_bias else y
