"""What the data-parallel ranks of a GradientTree say to each other: gradients by nodes, and whether all is well.

    fold(g_DN, first)  = the cover of leaves [first, first + D), leaf first + r from rank r, elements N of this rank
    gather(g_n)        = [D, n], every rank's elements

Letters: D ranks, N elements of a gradient that one rank keeps. Only bytes travel; tbik.collectives folds.
Errors: PlanError on all ranks where one refuses; TransportTimeout, TransportError. Bits: layout-invariant.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tbik import tree
from tbik.collectives import Cover, all_gather_bytes, reduce_scatter
from tbik.errors import PlanError, TransportError
from tbik.plan import TreePlan
from tbik.tree import Node


class Ranks:
    """The data-parallel group; None is this rank alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()

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

    def fold(self, rows_DN: Tensor, first: int, narrow: bool) -> list[tuple[Node, Tensor]]:
        """rows_DN: leaf `first + rank`, cut into the elements of each rank -> the nodes of the run, [N] each.

        Where D is no power of two, or `first` is not a multiple of it, the cover has several nodes; each is a
        reduce-scatter of its own, to which the ranks outside the node bring nothing. narrow: bf16 nodes (A6).
        """
        nodes = []
        for node in tree.cover(first, first + self.size):
            leaves = node.hi - node.lo
            cuts = [min(max(leaf - node.lo, 0), leaves) for leaf in range(first, first + self.size + 1)]
            lo, hi = cuts[self.rank : self.rank + 2]
            values = rows_DN[None] if hi > lo else rows_DN.new_empty((0, *rows_DN.shape))
            part = reduce_scatter(
                Cover(values, tree.cover(lo, hi), leaves),
                self.group,
                plan=_wire_plan(leaves) if narrow else None,
                runs=list(itertools.pairwise(cuts)),
                wire=narrow,
            )
            nodes.append((node, part.view(-1)))
        return nodes

    def gather(self, part: Tensor) -> Tensor:
        """[n] of this rank -> [D, n] of all."""
        received = all_gather_bytes(part.contiguous().view(torch.uint8), self.group, "GradientTree.finish")
        return received.view(part.dtype)

    def _exchange(self, text: str) -> list[str]:
        """The text of every rank; one short message where all are the same."""
        data = text.encode()
        head = hashlib.blake2b(data, digest_size=32).digest() + len(data).to_bytes(8, "little")
        heads = all_gather_bytes(_bytes(head), self.group, "GradientTree")
        if bool((heads == heads[0]).all()):
            return [text] * self.size
        lengths = [int.from_bytes(bytes(row[32:].tolist()), "little") for row in heads]
        rows = all_gather_bytes(_bytes(data.ljust(max(lengths))), self.group, "GradientTree")
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]


class Shard(NamedTuple):
    """How a gradient is cut over D ranks: whole rows of dimension 0, as many on each, padded at the end."""

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

    def scatter(self, grad: Tensor, rows_DN: Tensor) -> None:
        """rows_DN[r] = rank r's rows of the gradient, flat; padding is left as it is."""
        flat = grad.reshape(-1)
        for rank, row in enumerate(rows_DN):
            piece = flat[rank * self.width : (rank + 1) * self.width]
            row[: piece.numel()].copy_(piece)

    def whole(self, rows_DN: Tensor) -> Tensor:
        """The gradient from every rank's elements."""
        grad = rows_DN.new_empty(self.shape)
        grad.view(-1).copy_(rows_DN.reshape(-1)[: grad.numel()])
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
