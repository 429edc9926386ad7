"""FSDP2 in the canonical order.

fully_shard gathers parameters and calls, per module and micro-step, for one reduce-scatter (reduce_scatter.py); what it
stores in param.grad is the root of the step, in the last micro-step. Of HSDP the replicas are ours: fully_shard knows
the shards only, and the fold goes on over the replicas.

Bits: layout-invariant (tests/test_fsdp.py).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tbik.errors import PlanError
from tbik.fsdp import Settings
from tbik.gradient_covers import fan_in
from tbik.gradients import UseKey
from tbik_fsdp.data_ranks import default_units, refuse, require_same_weights, require_units, shard_mesh_of
from tbik_fsdp.hooked import HookedTree, calling
from tbik_fsdp.reduce_scatter import CoverReduceScatter


class FullyShardedTree(HookedTree):
    """A DataParallel around fully_shard."""

    def __init__(
        self, model: torch.nn.Module, mesh: DeviceMesh | dist.ProcessGroup, settings: Settings, reshard: bool
    ) -> None:
        shard_mesh, ranks = shard_mesh_of(mesh)
        policy = _policy(settings.mp_policy)
        self._eager_only = policy.param_dtype is not None
        if self._eager_only:
            _refuse_compiled(model)
        # FSDP2 makes no call on one shard
        self._reduces = ranks.shards > 1 and settings.accumulation == "sharded"
        require_same_weights(model, ranks)
        units = default_units(model) if settings.units is None else require_units(model, settings.units)
        for module in (*units, model):
            fully_shard(module, mesh=shard_mesh, mp_policy=policy, reshard_after_forward=reshard)
        super().__init__(model, model, ranks, settings, "fsdp2")

    # --- what GradientTree asks ---------------------------------------------------------------------------------------

    def _require_parameter(self, name: str, parameter: Tensor) -> None:
        if not isinstance(parameter, DTensor) or tuple(parameter.placements) != (Shard(0),):
            refuse(f"{name}: expected a parameter that fully_shard has cut along dimension 0")
        if parameter.dtype != torch.float32:
            refuse(
                f"{name} is {parameter.dtype}; expected float32 master weights and compute_dtype, or "
                "MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32)"
            )

    def _attach(self) -> None:
        """From the first forward on, when FSDP2 has made the unsharded parameters."""
        positions = {id(parameter): i for i, parameter in enumerate(self._parameters.values())}
        modules = {name: module for name, module in self.inner.named_modules() if isinstance(module, FSDPModule)}
        owner: dict[int, str] = {}
        for name in sorted(modules, key=len, reverse=True):  # inner modules first
            module: Any = modules[name]
            places = []
            for place in module.modules():
                for attribute, parameter in place._parameters.items():
                    position = positions.get(id(parameter))
                    if position is not None and owner.setdefault(id(parameter), name) == name:
                        places.append((place, attribute, position))
            self._undo.callback(module.register_forward_pre_hook(_Finder(self, places)).remove)
            module.set_force_sum_reduction_for_comms(True)  # torch 2.13 divides twice on one rank, so never by FSDP2
            module.set_gradient_divide_factor(1.0)
            # zeros keep the flat layout the same; FSDP2 makes them in param_dtype, which fits float32 only
            module.set_reduce_scatter_unused_params(self._reduces and not self._eager_only, recurse=False)
            if self._reduces and self._ranks.group is not None:
                fold = calling(self, HookedTree.fold_flat)
                module.set_custom_reduce_scatter(CoverReduceScatter(name, self._ranks.group, fold))
        self._expected = sorted(set(owner.values()))

    def found(self, parameter: Tensor, position: int) -> None:
        """FSDP2 has made the unsharded parameter."""
        if id(parameter) not in self._positions:
            self._take_from(parameter, position)

    def _begin(self, num_samples: int | None) -> range:
        if self._eager_only:
            _refuse_compiled(self.model)
        return super()._begin(num_samples)

    def _keeps(self, key: UseKey) -> bool:
        # a use of a bfloat16 parameter is an alias with a gradient in fp32, which FSDP2 does not see
        return super()._keeps(key) or (self._eager_only and key.use >= 0)

    def _deliver(self, shards: bool) -> None:
        rank = self._ranks.shard
        for position, parameter in enumerate(self._parameters.values()):
            assert isinstance(parameter, DTensor)
            shard = self._shards[position]
            if self._reduces:
                collected = [shard.rows(root, rank) for root in self._use_roots(position)]
                grad: Any = parameter.grad
                if grad is not None:
                    if collected:
                        first_use = grad.to_local()
                        first_use.copy_(fan_in([first_use, *collected]))
                    continue
                local = fan_in(collected) if collected else shard.rows(self._root(position), rank)
            else:
                local = shard.rows(self._root(position), rank)
            parameter.grad = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )

    # --- scalars ------------------------------------------------------------------------------------------------------

    def _local_gradients(self) -> dict[str, Tensor]:
        gradients: dict[str, Any] = super()._local_gradients()
        return {name: grad.to_local() for name, grad in gradients.items()}

    def _first_row(self, name: str) -> int:
        return self._ranks.shard * self._shards[self._names.index(name)].rows_per_rank


class _Finder:
    """Forward pre-hook, after FSDP2's own: shows the tree the unsharded parameters of a module."""

    def __init__(self, tree: FullyShardedTree, places: list[tuple[torch.nn.Module, str, int]]) -> None:
        self.tree, self.places = weakref.ref(tree), places

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        tree = self.tree()
        if tree is None:
            return
        if tree._eager_only and torch.compiler.is_compiling():
            raise PlanError(_COMPILED)
        for place, attribute, position in self.places:
            parameter = place._parameters[attribute]
            if parameter is not None and not isinstance(parameter, DTensor):
                tree.found(parameter, position)


_COMPILED = (
    "fsdp.apply: a compiled model with param_dtype=bfloat16: the compiled backward rounds gradients to bfloat16 in "
    "every micro-batch. Leave mp_policy out and give tbik.parallelize compute_dtype=torch.bfloat16, or do not compile"
)


def _refuse_compiled(model: torch.nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise PlanError(_COMPILED)


def _policy(policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy:
    if policy is None:
        return MixedPrecisionPolicy()
    if not isinstance(policy, MixedPrecisionPolicy):
        refuse(f"mp_policy is a torch.distributed.fsdp.MixedPrecisionPolicy, got {type(policy).__name__}")
    if policy.param_dtype not in (None, torch.float32, torch.bfloat16):
        refuse(f"mp_policy: param_dtype is None or bfloat16, got {policy.param_dtype}")
    if policy.reduce_dtype not in (None, torch.float32):
        refuse(
            f"mp_policy: reduce_dtype {policy.reduce_dtype} would round every partial sum, by the number of ranks; "
            "gradients are summed in float32, and TreePlan(grad_wire_dtype='bfloat16') narrows what travels"
        )
    param_dtype = None if policy.param_dtype == torch.float32 else policy.param_dtype
    # the operators cast by themselves, and tables of positions stay fp32
    return MixedPrecisionPolicy(param_dtype, torch.float32, policy.output_dtype, cast_forward_inputs=False)
