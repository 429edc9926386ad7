"""What the data-parallel ranks of a GradientTree say to each other: gradients by nodes, and whether all is well.

    fold(g_CSN, nodes, runs)   = the cover of all ranks' samples, elements N of this rank
    gather(g_n)                = [S, n], every shard's elements

Letters: D = R*S data ranks, S shards of a gradient, R replicas of each (1 unless HSDP), rank = replica*S + shard,
N elements of a gradient that one rank keeps, C nodes of its cover. Bytes travel and tbik.collectives folds; where every
rank has one node of one level, the backend "tbik" does both.
Errors: PlanError on all ranks where one refuses; TransportTimeout, TransportError. Bits: layout-invariant.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tbik import tree
from tbik.collectives import Cover, all_gather_bytes, all_reduce, reduce_scatter
from tbik.errors import PlanError, TransportError
from tbik.gradient_covers import moved
from tbik.plan import Run, TreePlan, is_node_per_rank
from tbik.tree import Node


class Ranks:
    """The data-parallel ranks: `group` shares the elements of a gradient, each rank of `replicas` holds the same ones.

    None is this rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None = None) -> None:
        self.group, self.replicas = group, replicas
        self.shards, self.shard = (1, 0) if group is None else (group.size(), group.rank())
        self.num_replicas, self.replica = (1, 0) if replicas is None else (replicas.size(), replicas.rank())
        self.size = self.num_replicas * self.shards
        self.rank = self.replica * self.shards + self.shard

    def speak(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """The record of every rank. PlanError on all of them where one has failed or is elsewhere (other keys)."""
        if self.size == 1:
            return [record]
        records: list[dict[str, Any]] = [json.loads(text) for text in self._exchange(json.dumps(record))]
        failed = [f"rank {rank}: {other['error']}" for rank, other in enumerate(records) if "error" in other]
        if failed:
            raise PlanError(f"GradientTree: {len(failed)} of {self.size} ranks failed. {'; '.join(failed)}")
        if any(other.keys() != record.keys() for other in records):
            places = [f"rank {rank} at {', '.join(sorted(other))}" for rank, other in enumerate(records)]
            raise PlanError(f"GradientTree: the ranks are at different places: {'; '.join(places)}")
        return records

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks, which wait at the end of their micro-step or in finish, that this one has failed."""
        told = isinstance(error, Exception) and not isinstance(error, TransportError)
        if self.size > 1 and told:
            with contextlib.suppress(Exception):  # the error in hand matters more
                self._exchange(json.dumps({"error": f"{type(error).__name__}: {str(error)[:400]}"}))

    def fold(
        self, values_CSN: Tensor, nodes: Sequence[Node], runs: Sequence[Run], narrow: bool
    ) -> list[tuple[Node, Tensor]]:
        """values_CSN[c]: this rank's node c, cut into the elements of each shard -> the nodes of all runs, [N] each.

        runs: the samples of every rank, ascending, without gaps; `nodes` is the cover of this rank's. Where the cover
        of all of them has several nodes, each is a reduce-scatter of its own, to which the ranks outside the node bring
        nothing. narrow: bf16 nodes (A6).
        """
        replica_runs = [
            (runs[first][0], runs[first + self.shards - 1][1]) for first in range(0, self.size, self.shards)
        ]
        mine = runs[self.replica * self.shards : (self.replica + 1) * self.shards]
        found = []
        for node in tree.cover(*replica_runs[self.replica]):
            if self.shards == 1:
                found += [(n, values_CSN[c, 0]) for c, n in enumerate(nodes) if node.lo <= n.lo < node.hi]
                continue
            cover, cuts = _inside(values_CSN, nodes, mine, node)
            if not narrow and is_node_per_rank(tuple(cuts)) and _adds(self.group, values_CSN):
                part = values_CSN.new_empty(values_CSN.shape[2])
                dist.reduce_scatter_tensor(part, cover.values.reshape(-1), group=self.group)
            else:
                part = reduce_scatter(
                    cover, self.group, plan=_wire_plan(cover.leaves) if narrow else None, runs=cuts, wire=narrow
                )
            found.append((node, part.view(-1)))
        if self.num_replicas == 1:
            return found
        values = torch.stack([value for _, value in found])
        held = [node for node, _ in found]
        result = []
        for node in tree.cover(runs[0][0], runs[-1][1]):
            cover, cuts = _inside(values, held, replica_runs, node)
            if not narrow and is_node_per_rank(tuple(cuts)) and _adds(self.replicas, values):
                root = cover.values[0].clone()
                dist.all_reduce(root, group=self.replicas)
            else:
                root = all_reduce(
                    cover, self.replicas, plan=_wire_plan(cover.leaves) if narrow else None, runs=cuts, wire=narrow
                )
            result.append((node, root))
        return result

    def gather(self, part: Tensor) -> Tensor:
        """[n] of this rank -> [S, n] of its replica's ranks."""
        if self.shards == 1:
            return part[None]
        received = all_gather_bytes(part.contiguous().view(torch.uint8), self.group, "GradientTree.finish")
        return received.view(part.dtype)

    def _exchange(self, text: str) -> list[str]:
        """The text of every rank, by rank."""
        texts = _texts(text, self.group) if self.shards > 1 else [text]
        if self.num_replicas == 1:
            return texts
        return [text for row in _texts(json.dumps(texts), self.replicas) for text in json.loads(row)]


def _adds(group: dist.ProcessGroup | None, values: Tensor) -> bool:
    """Whether the group's own reductions are ours, without a detour by covers: the backend "tbik", CPU tensors."""
    if group is None or values.device.type != "cpu":
        return False
    try:
        backend: Any = group._get_backend(values.device)
    except RuntimeError:  # it has none for the CPU
        return False
    return bool(backend.name() == "tbik")


def _texts(text: str, group: dist.ProcessGroup | None) -> list[str]:
    """The text of every rank of the group; one short message where all are the same."""
    data = text.encode()
    head = hashlib.blake2b(data, digest_size=32).digest() + len(data).to_bytes(8, "little")
    heads = all_gather_bytes(_bytes(head), group, "GradientTree")
    if bool((heads == heads[0]).all()):
        return [text] * len(heads)
    lengths = [int.from_bytes(bytes(row[32:].tolist()), "little") for row in heads]
    rows = all_gather_bytes(_bytes(data.ljust(max(lengths))), group, "GradientTree")
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


def _inside(values: Tensor, nodes: Sequence[Node], runs: Sequence[Run], node: Node) -> tuple[Cover, list[Run]]:
    """What this rank has of `node` and the runs of all ranks in it, counted from its first leaf."""
    leaves = node.hi - node.lo
    held = [c for c, n in enumerate(nodes) if node.lo <= n.lo < node.hi]
    rows = values if len(held) == len(nodes) else values[held] if held else values[:0]
    cuts = [tuple(min(max(end - node.lo, 0), leaves) for end in run) for run in runs]
    return Cover(rows, moved([nodes[c] for c in held], node), leaves), [(lo, hi) for lo, hi in cuts]


class Shard(NamedTuple):
    """How a gradient is cut over S ranks: whole rows of dimension 0, as many on each, padded at the end."""

    shape: torch.Size
    num_rows: int
    rows_per_rank: int

    @classmethod
    def of(cls, parameter: Tensor, size: int) -> Shard:
        num_rows = parameter.shape[0] if parameter.dim() else 1
        return cls(parameter.shape, num_rows, -(-num_rows // size))

    @property
    def width(self) -> int:
        """Elements of each rank."""
        return self.rows_per_rank * math.prod(self.shape[1:])

    def scatter(self, grad: Tensor, rows_SN: Tensor) -> None:
        """rows_SN[r] = rank r's rows of the gradient, flat, +0 behind the last one."""
        flat = grad.reshape(-1)
        for rank, row in enumerate(rows_SN):
            piece = flat[rank * self.width : (rank + 1) * self.width]
            row[: piece.numel()].copy_(piece)
            row[piece.numel() :].zero_()

    def whole(self, rows_SN: Tensor) -> Tensor:
        """The gradient from every rank's elements."""
        grad = rows_SN.new_empty(self.shape)
        grad.view(-1).copy_(rows_SN.reshape(-1)[: grad.numel()])
        return grad

    def rows(self, part: Tensor, rank: int) -> Tensor:
        """This rank's rows, without padding."""
        count = max(0, min(self.rows_per_rank, self.num_rows - rank * self.rows_per_rank))
        return part.view(self.rows_per_rank, *self.shape[1:])[:count].clone()


@lru_cache(maxsize=256)
def _wire_plan(leaves: int) -> TreePlan:
    return TreePlan(leaves=leaves, wire_dtype="bfloat16")


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
