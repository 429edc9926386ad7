"""torch's data-parallel wrappers in the canonical order; the public face is tbik.fsdp.

fsdp2.py            fully_shard: gradients of a module by reduce-scatter on covers, in backward; HSDP
reduce_scatter.py   what FSDP2 calls for it
fsdp1.py            FullyShardedDataParallel: gradients of a unit, by its communication hook
ddp.py              DistributedDataParallel: gradients of a bucket, by its communication hook
hooked.py           what they share
data_ranks.py       meshes and groups; which modules are units
"""

from __future__ import annotations

from typing import Any

from tbik.fsdp import DataParallel, Settings
from tbik.gradient_ranks import Ranks
from tbik_fsdp.data_ranks import group_of, require_same_weights


def make(model: Any, mesh: Any, settings: Settings, strategy: str, reshard_after_forward: bool) -> DataParallel:
    """What tbik.fsdp.apply returns for a strategy that torch has a wrapper for."""
    if strategy == "fsdp2":
        from tbik_fsdp.fsdp2 import FullyShardedTree

        return FullyShardedTree(model, mesh, settings, reshard_after_forward)
    if strategy == "fsdp1":
        from tbik_fsdp.fsdp1 import FlatShardedTree

        return FlatShardedTree(model, mesh, settings)
    if strategy == "collected":
        ranks = Ranks(group_of(mesh, strategy))
        require_same_weights(model, ranks)
        return DataParallel(model, model, ranks, settings, strategy)
    from tbik_fsdp.ddp import ReplicatedTree

    return ReplicatedTree(model, mesh, settings)
