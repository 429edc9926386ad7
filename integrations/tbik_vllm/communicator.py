"""vLLM's device communicators with the tensor-parallel sums in the canonical order (ORDER.md B1, T4).

    sum_cover   root = cast(node(0, L) of the ranks' covers + bias)       of this plug-in's own layers
    all_reduce  x = cast(node(0, W) of the ranks' values)                 TBIK_VLLM=allreduce; one leaf per rank
    reduce_scatter                                                        the rows of it that this rank keeps

Every group of vLLM (tp, pp, dp, ep, ...) gets this class; only the tensor-parallel one is changed. Everything that
only moves bytes (gather, all_gather, broadcast) stays vLLM's own. With TBIK_VLLM=full a floating-point sum that none of
the plug-in's layers asked for is refused: nobody would know its leaves.

CPU: a group of the "tbik" backend beside vLLM's (shared memory on one host). Covers of which every rank holds one node
of one level are summed there, as plain fp32 tensors; others by tbik.all_reduce.
Errors: PlanError; those of the tbik backend. Bits: sum_cover layout-invariant, the others deterministic.
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from tbik import _C, Cover, PlanError, all_reduce, tree
from tbik_vllm.settings import Settings
from tbik_vllm.sharding import Shard

TIMEOUT = timedelta(seconds=600)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64)


class RankSums(Protocol):
    """How the ranks of one group add: what a device brings."""

    bytes_sent: int

    def sum_plain(self, x: Tensor) -> Tensor:
        """cast(node(0, W) of the ranks' x); may write to x."""

    def scatter_plain(self, x: Tensor) -> Tensor:
        """Rows [rank * D/W, (rank + 1) * D/W) of sum_plain(x), D = x.shape[0]."""

    def sum_cover(self, values: Tensor, shard: Shard, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """cast(node(0, L) + bias) of the ranks' covers; values [C, ..., N] fp32, this rank's nodes."""


class CpuRankSums:
    """Over the tbik backend of torch.distributed. bytes_sent: of values that this rank gave to the sums."""

    def __init__(self, ranks: list[int], rank: int) -> None:
        self.bytes_sent = 0
        self.group = dist.new_group(ranks, timeout=TIMEOUT, backend="tbik", use_local_synchronization=True)
        self.size, self.rank = len(ranks), rank
        assert isinstance(self.group, dist.ProcessGroup)
        self.backend: Any = self.group._get_backend(torch.device("cpu"))  # called without torch's dispatcher
        self.blocking = dist.AllreduceOptions()
        self.blocking.asyncOp = False  # on this thread: a worker thread would have to be woken for every call

    def sum_plain(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self.bytes_sent += x.nbytes
        self.backend.allreduce([x], self.blocking).wait()
        return x

    def scatter_plain(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        self.bytes_sent += x.nbytes
        dist.reduce_scatter_tensor(out, x.contiguous(), group=self.group)
        return out

    def sum_cover(self, values: Tensor, shard: Shard, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if shard.is_node_per_rank and shard.plan.wire_dtype is None:
            return _finish(self.sum_plain(values[0]), bias, out_dtype)
        self.bytes_sent += values.nbytes
        cover = Cover(values, tree.cover(*shard.runs[self.rank]), shard.plan.leaves)
        return all_reduce(
            cover, self.group, plan=shard.plan, runs=shard.runs, wire=True, bias=bias, out_dtype=out_dtype
        )


def _finish(root: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The epilogue of A7."""
    if bias is None and out_dtype == root.dtype:
        return root
    return _C.fold([root], _one_input(), 1, bias, out_dtype)


@lru_cache(maxsize=1)
def _one_input() -> Any:
    return _C.run_schedule(0, 1, 1, True)


class TreeCommunicator:
    """Mixin before a device communicator of vLLM."""

    sums: RankSums | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        me: Any = self
        if me.unique_name.split(":")[0] == "tp" and me.world_size > 1:
            self.is_alone = Settings.from_environment().mode == "allreduce"
            self.sums = self._open_sums(list(me.ranks), me.rank_in_group)

    def _open_sums(self, ranks: list[int], rank: int) -> RankSums:
        raise NotImplementedError

    def all_reduce(self, input_: Tensor) -> Tensor:
        if self.sums is None or input_.dtype not in DTYPES:
            reduced: Tensor = super().all_reduce(input_)  # type: ignore[misc]
            return reduced
        self._require_owner("all_reduce", input_)
        return self.sums.sum_plain(input_)

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        if self.sums is None or input_.dtype not in DTYPES:
            part: Tensor = super().reduce_scatter(input_, dim)  # type: ignore[misc]
            return part
        self._require_owner("reduce_scatter", input_)
        size = self.world_size  # type: ignore[attr-defined]
        if input_.shape[dim] % size:
            raise PlanError(
                f"tbik_vllm: reduce_scatter over {size} ranks of dimension {dim} of {list(input_.shape)}, which they "
                "do not divide"
            )
        return self.sums.scatter_plain(input_.movedim(dim, 0)).movedim(0, dim).contiguous()

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
        if self.sums is None:
            part: Tensor = super().reduce_scatterv(input_, dim, sizes)  # type: ignore[misc]
            return part
        raise PlanError("tbik_vllm: reduce_scatterv (sequence or expert parallel) is not supported; turn it off")

    def _require_owner(self, name: str, x: Tensor) -> None:
        if x.is_floating_point() and not self.is_alone:
            raise PlanError(
                f"tbik_vllm: {name} of {x.dtype} {list(x.shape)} over the tensor-parallel ranks, which no layer of "
                "tbik asked for: the model adds partial sums itself, and their leaves are unknown. Not supported with "
                "TBIK_VLLM=full; TBIK_VLLM=allreduce replaces the collectives alone, without equal TP sizes"
            )


class TbikCpuCommunicator(TreeCommunicator, CpuCommunicator):
    def _open_sums(self, ranks: list[int], rank: int) -> RankSums:
        return CpuRankSums(ranks, rank)


def tensor_parallel_sums() -> RankSums:
    """The sums of this process's tensor-parallel group."""
    from vllm.distributed import get_tp_group

    communicator = get_tp_group().device_communicator
    if not isinstance(communicator, TreeCommunicator) or communicator.sums is None:
        raise PlanError(
            f"tbik_vllm: the tensor-parallel group's communicator is {type(communicator).__name__}, not tbik's; it was "
            "made before the plug-in was loaded, or another plug-in replaced it"
        )
    return communicator.sums
