"""DistributedDataParallel in the canonical order: its communication hook folds a bucket's gradients by samples.

Each rank keeps 1/D of the elements of the covers; the last micro-step's buckets get the roots, gathered.

Bits: layout-invariant (tests/test_fsdp.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tbik.fsdp import MicroStep, Settings
from tbik.gradient_covers import fan_in
from tbik.gradient_ranks import Ranks
from tbik.gradients import DIRECT, UseKey
from tbik_fsdp.data_ranks import group_of, require_same_weights
from tbik_fsdp.hooked import HookedTree, calling


class ReplicatedTree(HookedTree):
    """A DataParallel around DistributedDataParallel."""

    def __init__(self, model: torch.nn.Module, mesh: DeviceMesh | dist.ProcessGroup, settings: Settings) -> None:
        ranks = Ranks(group_of(mesh, "ddp"))
        require_same_weights(model, ranks)
        self._reduces = ranks.size > 1 and settings.accumulation == "sharded"
        wrapped: Any = DistributedDataParallel(model, process_group=ranks.group, init_sync=False)
        super().__init__(model, wrapped, ranks, settings, "ddp")
        if self._reduces:
            fold = calling(self, ReplicatedTree._fold_bucket)

            def hook(state: None, bucket: Any) -> torch.futures.Future[Tensor]:  # DDP reads the names
                result: torch.futures.Future[Tensor] = fold(bucket)
                return result

            # the annotations as DDP compares them
            bucket_type: Any = dist.GradBucket  # type: ignore[attr-defined]
            hook.__annotations__ = {"bucket": bucket_type, "return": torch.futures.Future[Tensor]}
            wrapped.register_comm_hook(None, hook)
            self._expected = self._names

    @contextlib.contextmanager
    def micro_step(self, num_samples: int | None = None) -> Iterator[MicroStep]:
        """As GradientTree.micro_step."""
        wrapped: Any = self.model
        quiet = contextlib.nullcontext() if self._reduces else wrapped.no_sync()
        with quiet, super().micro_step(num_samples) as step:
            yield step

    def _fold_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        gradients = bucket.gradients()
        keys = [self._key_of(parameter) for parameter in bucket.parameters()]
        rows_CSN = self._rows([[gradient] for gradient in gradients], keys)
        parts: dict[UseKey, list[Any]] = {key: [] for key in keys}
        for node, value in self.fold("", rows_CSN[0]):
            for key, part in zip(keys, torch.split(value, self._widths(keys)), strict=True):
                parts[key].append((node, part))
        for key in keys:
            self._covers.absorb(key, parts[key])
            self._folded.add(self._names[key.parameter])
        if self._is_last:
            roots: list[Any] = [self._covers.root(key) for key in keys]
            for gradient, root in zip(gradients, self._gather([k.parameter for k in keys], roots), strict=True):
                gradient.copy_(root)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def _key_of(self, parameter: Tensor) -> UseKey:
        first_use = UseKey(self._positions[id(parameter)], 0)
        return first_use if first_use in self._watched else UseKey(first_use.parameter, DIRECT)

    def _deliver(self, shards: bool) -> None:
        if not self._reduces:
            super()._deliver(shards)
            return
        for position, parameter in enumerate(self._parameters.values()):
            uses = self._use_roots(position)
            if uses:
                assert parameter.grad is not None
                (later,) = self._gather([position], [fan_in(uses)])
                parameter.grad = fan_in([parameter.grad, later])

    def _shard_groups(self) -> list[dist.ProcessGroup | None]:
        return []  # every rank has the whole gradients
