"""The same communicator for CUDA, over peer memory. NOT RUN ON A GPU by its authors.

    sum_plain   out = cast(node(0, W) of the ranks' x)          one kernel of tbik.peer_memory on the current stream
    sum_cover   root = cast(node(0, L) + bias)                  any runs of leaves, bfloat16 wire

Where the ranks cannot be peers (several hosts, devices without peer access, no tbik/_C_cuda.so, more than 16 ranks)
NCCL moves and torch adds: all-gather and fold below GATHER_BYTES, else all-to-all of chunks, fold mine, all-gather.
fp32 `torch.add` of two tensors, one IEEE rounding each, in the order of tree.root; so both ways have the same bits,
which do not depend on NCCL's algorithm. All ranks take the same way: one that cannot tells all (tbik.peer_memory).
All work is on the current stream: CUDA graphs may capture it. Errors of captured launches are raised by the next call
that Python makes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from tbik import PlanError, peer_memory, peer_reductions, tree
from tbik_vllm.communicator import TIMEOUT, RankSums, TreeCommunicator
from tbik_vllm.sharding import Shard

GATHER_BYTES = 256 * 1024
"""Largest message of a rank that is sent to everybody. Cannot change a bit."""


class PeerRankSums:
    """Over memory that all ranks have mapped. bytes_sent: of values that this rank gave to the sums."""

    def __init__(self, peers: peer_memory.Peers) -> None:
        self.peers, self.bytes_sent = peers, 0

    def sum_plain(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self.bytes_sent += x.nbytes
        return self.peers.all_reduce(x, out=torch.empty_like(x))

    def scatter_plain(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self.bytes_sent += x.nbytes
        out = x.new_empty(x.shape[0] // self.peers.size, *x.shape[1:])
        return self.peers.reduce_scatter(out, x)

    def sum_cover(self, values: Tensor, shard: Shard, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        rounds = shard.plan.wire_dtype == "bfloat16"
        order, counts = peer_memory.order_of_runs(shard.runs, shard.plan.leaves, rounds)
        rows = values.contiguous().view(values.shape[0], -1)
        if rounds:
            rows = rows.bfloat16()  # exact: the layer has rounded every node
        self.bytes_sent += rows.nbytes
        out = values.new_empty(values.shape[1:], dtype=out_dtype)
        bias = None if bias is None else bias.float().contiguous()
        self.peers.fold(rows, order, out, counts=counts, bias=bias, rounds=rounds)
        return out


class NcclRankSums:
    """NCCL moves, torch adds."""

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
            raise PlanError(
                "tbik_vllm: without peer memory a rank's leaves are one node and the wire is float32; use equal shards"
            )
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


def open_sums(
    device_type: str, device: int, rank: int, size: int, records_group: Any, device_group: Any, say: Any
) -> RankSums:
    """Peer memory where all ranks can, else NCCL's; all ranks alike. records_group: moves Python objects."""

    def exchange(key: str, record: dict[str, Any]) -> list[dict[str, Any]]:
        records: list[Any] = [None] * size
        dist.all_gather_object(records, record, group=records_group)
        return records

    try:
        reductions = peer_reductions.make(
            device_type,
            device,
            rank,
            size,
            exchange,
            timeout_s=TIMEOUT.total_seconds(),
            group=device_group,
        )
    except PlanError as error:
        say("tensor-parallel sums", f"NCCL and torch.add, since {error}")
        return NcclRankSums(device_group, size)
    say("tensor-parallel sums", "tbik.peer_memory")
    return PeerRankSums(reductions.peers)


class TbikCudaCommunicator(TreeCommunicator, CudaCommunicator):
    def _open_sums(self, ranks: list[int], rank: int) -> RankSums:
        from tbik_vllm.plugin import _say

        device = torch.cuda.current_device()
        return open_sums("cuda", device, rank, len(ranks), self.cpu_group, self.device_group, _say)
