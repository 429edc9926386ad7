"""The same communicator for CUDA: NCCL moves, torch adds, in the canonical order. NOT RUN ON A GPU by its authors.

    small    all-gather of x, everyone folds                   large    all-to-all of chunks, fold mine, all-gather

Additions are fp32 `torch.add` of two tensors, one IEEE rounding each, in the order of tree.root; so the bits do not
depend on NCCL's algorithm. All additions are on the current stream: CUDA graphs may capture them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from tbik import PlanError, tree
from tbik_vllm.communicator import RankSums, TreeCommunicator
from tbik_vllm.sharding import Shard

GATHER_BYTES = 256 * 1024
"""Largest message of a rank that is sent to everybody. Cannot change a bit."""


class CudaRankSums:
    def __init__(self, group: Any, size: int) -> None:
        self.group, self.size, self.bytes_sent = group, size, 0

    def sum_plain(self, x: Tensor) -> Tensor:
        flat = x.contiguous().view(-1)
        self.bytes_sent += flat.nbytes
        if flat.numel() * flat.element_size() <= GATHER_BYTES:
            gathered = flat.new_empty(self.size, flat.numel())
            dist.all_gather_into_tensor(gathered.view(-1), flat, group=self.group)
            return _root(gathered).view(x.shape)
        width = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, width * self.size - flat.numel()))
        mine = self._fold_mine(padded)
        whole = flat.new_empty(width * self.size)
        dist.all_gather_into_tensor(whole, mine, group=self.group)
        return whole[: flat.numel()].view(x.shape)

    def scatter_plain(self, x: Tensor) -> Tensor:
        self.bytes_sent += x.nbytes
        return self._fold_mine(x.contiguous().view(-1)).view(x.shape[0] // self.size, *x.shape[1:])

    def sum_cover(self, values: Tensor, shard: Shard, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if not shard.is_node_per_rank or shard.plan.wire_dtype is not None:
            raise PlanError("tbik_vllm: on CUDA a rank's leaves are one node and the wire is float32; use equal shards")
        root = self.sum_plain(values[0])
        return (root if bias is None else root + bias.float()).to(out_dtype)

    def _fold_mine(self, flat: Tensor) -> Tensor:
        received = torch.empty_like(flat)
        dist.all_to_all_single(received, flat, group=self.group)
        return _root(received.view(self.size, -1))


def _root(rows: Tensor) -> Tensor:
    """cast(node(0, W)) of rows [W, n]."""
    narrow = rows.dtype in (torch.bfloat16, torch.float16)
    parts = [row.float() if narrow else row for row in rows]
    return tree.root(parts, torch.add).to(rows.dtype)


class TbikCudaCommunicator(TreeCommunicator, CudaCommunicator):
    def _open_sums(self, ranks: list[int], rank: int) -> RankSums:
        return CudaRankSums(self.device_group, len(ranks))
