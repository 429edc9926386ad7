"""FSDP1 (FullyShardedDataParallel, use_orig_params) in the canonical order, by its communication hook.

The hook gets the flat gradients of a unit as [S, N]; its output is the root of the step, in the last micro-step. In a
forward FSDP1 puts views of the flat parameter in the place of parameters: of a tied one, the uses are taken from these.

Suffixes: S shards, N elements of a shard. Bits: layout-invariant (tests/test_fsdp.py).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy

from tbik.errors import PlanError
from tbik.fsdp import Settings
from tbik.gradient_covers import fan_in
from tbik.gradient_ranks import Ranks
from tbik.gradient_uses import Graph, collect_uses
from tbik.gradients import UseKey
from tbik_fsdp.data_ranks import default_units, group_of, refuse, require_same_weights, require_units
from tbik_fsdp.hooked import HookedTree, calling


class FlatShardedTree(HookedTree):
    """A DataParallel around FullyShardedDataParallel."""

    _reduces = True

    def __init__(self, model: torch.nn.Module, mesh: DeviceMesh | dist.ProcessGroup, settings: Settings) -> None:
        ranks = Ranks(group_of(mesh, "fsdp1"))
        if ranks.size == 1:
            refuse('strategy "fsdp1" shards over two ranks or more; one rank alone is "single" or "fsdp2"')
        if settings.accumulation == "unsharded":
            refuse('strategy "fsdp1" has no unsharded accumulation; use fsdp2 or ddp, or accumulation="sharded"')
        setting: Any = getattr(model, "setting", None)
        if setting is not None and setting.size > 1:
            refuse('strategy "fsdp1" has no tensor parallelism: its shards are no rows; use fsdp2')
        require_same_weights(model, ranks)
        self._views: dict[int, Tensor] = {}
        units = default_units(model) if settings.units is None else require_units(model, settings.units)
        super().__init__(model, model, ranks, settings, "fsdp1")
        chosen = {id(unit) for unit in units}
        wrapped: Any = FullyShardedDataParallel(
            model,
            process_group=ranks.group,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
        self.model = wrapped
        wrapped.register_comm_hook("", calling(self, HookedTree.fold_flat))
        handles: dict[str, Any] = {}
        for name, module in wrapped.named_modules():
            if isinstance(module, FullyShardedDataParallel) and module._handle is not None:
                module._comm_hook_state = name
                handles[name] = module._handle
        self._expected = sorted(name for name, handle in handles.items() if handle.flat_param.requires_grad)
        self._segments: dict[int, Any] = {
            id(parameter): segment
            for handle in handles.values()
            for parameter, segment in zip(handle.flat_param._params, handle.flat_param._shard_param_infos)
        }
        shared = {id(p) for p in self._parameters.values() if _count(model, p) > 1}
        places = [
            (module, attribute, position)
            for position, parameter in enumerate(self._parameters.values())
            if id(parameter) in shared
            for module in model.modules()
            for attribute, value in module._parameters.items()
            if value is parameter
        ]
        if places:
            self._undo.callback(model.register_forward_pre_hook(_Finder(self, places)).remove)

    def _attach(self) -> None:
        """Nothing to take from the parameters: their views are used in their place."""

    def found(self, view: Tensor, position: int) -> None:
        """FSDP1 has made the view that a tied parameter's modules use in this forward."""
        if self._views.get(position) is not view:
            old = self._views.pop(position, None)
            if old is not None:
                self._positions.pop(id(old), None)
            self._views[position] = view
            self._positions[id(view)] = position
            collect_uses(view, self)

    def _uses_in(self, graph: Graph) -> dict[UseKey, bool]:
        found = super()._uses_in(graph)
        for node, consumers in graph.consumers.items():
            if node.name() == "_UseBackward":
                position = self._positions.get(id(node.parameter()))
                if position is not None:
                    key = UseKey(position, node.index)
                    if key in found:
                        raise PlanError(
                            f"GradientTree.watch: {self._names[position]} is used twice as use {node.index} in this "
                            "graph; number the uses in forward order"
                        )
                    found[key] = True
            elif node.name() == "SplitWithSizesBackward0":
                for view in consumers:
                    readers = [reader.name() for reader in graph.consumers.get(view, [])]
                    if len(readers) > 1 and any(name != "_UseBackward" for name in readers):
                        raise PlanError(
                            "GradientTree.watch: a parameter is used twice without gradients.use in this graph, and "
                            f"autograd would add the two in every micro-batch ({', '.join(sorted(set(readers)))})"
                        )
        return found

    def _deliver(self, shards: bool) -> None:
        for position, parameter in enumerate(self._parameters.values()):
            uses = self._use_roots(position)
            if not uses:
                continue
            (later,) = self._gather([position], [fan_in(uses)])
            segment = self._segments[id(parameter)]
            if segment.in_shard:
                assert parameter.grad is not None
                own = later.view(-1)[segment.intra_param_start_idx : segment.intra_param_end_idx + 1]
                parameter.grad.copy_(fan_in([parameter.grad, own]))

    def _local_gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._parameters.items() if p.grad is not None and p.numel()}


class _Finder:
    """Forward pre-hook of the module inside FSDP1's wrapper: shows the tree the views of tied parameters."""

    def __init__(self, tree: FlatShardedTree, places: list[tuple[torch.nn.Module, str, int]]) -> None:
        self.tree, self.places = weakref.ref(tree), places

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        tree = self.tree()
        for place, attribute, position in self.places:
            view = getattr(place, attribute)
            if tree is not None and not isinstance(view, torch.nn.Parameter):
                tree.found(view, position)


def _count(model: torch.nn.Module, parameter: Tensor) -> int:
    return sum(value is parameter for module in model.modules() for value in module._parameters.values())
