"""A mesh or a group as the data ranks of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import tbik
from tbik.errors import PlanError
from tbik.gradient_ranks import Ranks


def refuse(message: str) -> NoReturn:
    raise PlanError(f"fsdp.apply: {message}")


def shard_mesh_of(mesh: DeviceMesh | dist.ProcessGroup) -> tuple[DeviceMesh, Ranks]:
    """(the 1-D mesh over which parameters are sharded, the ranks); of a 2-D mesh the last dimension shards."""
    if isinstance(mesh, dist.ProcessGroup):
        return DeviceMesh.from_group(mesh, "cpu"), Ranks(mesh)
    if not isinstance(mesh, DeviceMesh):
        refuse(f"mesh is a DeviceMesh or a ProcessGroup of the data ranks, got {type(mesh).__name__}")
    if mesh.device_type != "cpu":
        refuse(f"the mesh is on {mesh.device_type}; this version has CPU kernels only")
    if mesh.ndim == 1:
        return mesh, Ranks(mesh.get_group())
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        refuse(
            f"mesh has {mesh.ndim} dimensions named {mesh.mesh_dim_names}; expected 1 (shard) or 2 with names "
            "(replicate, shard). Leave the tensor-parallel dimension out: mesh['dp']"
        )
    replicate, shard = mesh.mesh_dim_names
    return mesh[shard], Ranks(mesh[shard].get_group(), mesh[replicate].get_group())


def require_same_weights(model: torch.nn.Module, ranks: Ranks) -> None:
    """IntegrityError where the data ranks hold different weights: each keeps a part of its own."""
    for group in (ranks.group, ranks.replicas):
        if group is not None and group.size() > 1:
            tbik.fingerprint({name: parameter.detach() for name, parameter in model.named_parameters()}, group)


def group_of(mesh: DeviceMesh | dist.ProcessGroup, strategy: str) -> dist.ProcessGroup:
    """The ranks of a strategy that knows one group."""
    shard_mesh, ranks = shard_mesh_of(mesh)
    if ranks.replicas is not None:
        refuse(
            f'strategy "{strategy}" has one dimension of data ranks, the mesh has {shard_mesh.mesh_dim_names} inside'
        )
    assert ranks.group is not None
    return ranks.group


def default_units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a parallelized model, embedding and head where they are two parameters."""
    inner: Any = getattr(model, "model", None)
    layers = getattr(inner, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return []
    head: Any = getattr(model, "lm_head", None)
    ends = [] if head is None or head.weight is inner.embed_tokens.weight else [inner.embed_tokens, head]
    return [*layers, *ends]


def require_units(model: torch.nn.Module, units: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """PlanError unless the units are modules inside the model."""
    inside = {id(module) for module in model.modules()} - {id(model)}
    for unit in units:
        if id(unit) not in inside:
            refuse(f"units are modules inside the model, got a {type(unit).__name__} that is none")
    return list(units)
