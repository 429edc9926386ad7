"""FSDP2's reduce-scatter of one module, on covers.

    output = node(0, B) of this rank's elements           in the last micro-step; unspecified, and dropped, before it

FSDP2 hands over the flat gradients of a module as [S, N], one row per shard, during backward, module after module. The
sum over the ranks' samples joins the module's cover; FSDP2's own sums and divisions never see a partial value.
Suffixes: S shards, N elements of a shard. Bits: layout-invariant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from tbik.errors import PlanError

Fold = Callable[[str, Tensor, Tensor], None]
"""(module, rows [S, N], output [N])."""


class CoverReduceScatter(ReduceScatter):
    """name: of the module whose gradients these are. fold: where they go."""

    def __init__(self, name: str, group: dist.ProcessGroup, fold: Fold) -> None:
        self.name, self.group, self.fold = name, group, fold

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        where = f"tbik.fsdp: reduce-scatter of {self.name or 'the model'}"
        if group.group_name != self.group.group_name:
            raise PlanError(f"{where}: called for the group {group.group_name}, expected {self.group.group_name}")
        if op != dist.ReduceOp.SUM:
            raise PlanError(f"{where}: expected a sum (force_sum_reduction_for_comms, divide factor 1), got {op}")
        if input_tensor.dtype != torch.float32:
            raise PlanError(
                f"{where}: expected fp32 gradients, got {input_tensor.dtype}: reduce_dtype against the plan"
            )
        self.fold(self.name, input_tensor.view(group.size(), -1), output_tensor)
