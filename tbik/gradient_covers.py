"""The gradients of a step as covers over its samples, one cover per key, merged as nodes arrive (ORDER.md T4).

    absorb(key, nodes)   cover(key) := merge(cover(key), nodes)          a node absent (None) is +0
    root(key)            node(0, B) of the key; its cover is given up

A key is whatever is summed together: a use of a parameter, or the flat gradients of several parameters. At most
1 + ceil(log2(units)) values of a key are held, units the number of incoming nodes. Bits: layout-invariant.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tbik import _C, devices, tree
from tbik.tree import Node


class Covers:
    """leaves: B. narrow: nodes are rounded to bf16 (A6). start: the first sample of this rank's run."""

    most: int
    """The most values of one key that were held at a time, in all steps so far."""

    def __init__(self, leaves: int, narrow: bool, start: int = 0) -> None:
        self.leaves, self.narrow, self.start = leaves, narrow, start
        self.most = 0
        self.clear()

    def clear(self) -> None:
        """Drop everything; the next sample is `start`."""
        self._covers: dict[Hashable, dict[Node, Tensor | None]] = {}
        self._absorbed: set[Hashable] = set()
        self.position = self.start

    def __contains__(self, key: Hashable) -> bool:
        return key in self._covers

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._covers)

    def absorb(self, key: Hashable, incoming: Sequence[tuple[Node, Tensor | None]]) -> None:
        """Merge nodes of samples from `position` on into the cover of the key."""
        cover = self._covers.pop(key, None)
        if cover is None:
            cover = dict.fromkeys(tree.cover(self.start, self.position))
        held = sorted([*cover.items(), *incoming], key=lambda item: item[0].lo)
        self.most = max(self.most, sum(value is not None for _, value in held))
        merged: dict[Node, Tensor | None] = {}
        rest = iter(held)
        for node in tree.schedule([node for node, _ in held]).outputs:
            inside = [next(rest)]
            while inside[-1][0].hi < node.hi:
                inside.append(next(rest))
            merged[node] = (
                inside[0][1]
                if len(inside) == 1
                else self.fold([value for _, value in inside], moved([n for n, _ in inside], node), 1 << node.level)
            )
        self._covers[key] = merged
        self._absorbed.add(key)

    def advance(self, samples: int) -> None:
        """These samples have come; keys that absorbed nothing of them get +0."""
        for key in self._covers.keys() - self._absorbed:
            self.absorb(key, [(node, None) for node in tree.cover(self.position, self.position + samples)])
        self._absorbed = set()
        self.position += samples

    def fold(self, values: Sequence[Tensor | None], nodes: tuple[Node, ...], leaves: int) -> Tensor | None:
        """node(0, leaves) of the nodes; absent ones are +0."""
        like = next((value for value in values if value is not None), None)
        if like is None:
            return None
        present = [torch.zeros_like(like) if value is None else value for value in values]
        root: Tensor = devices.kernels_of(like).fold(present, schedule(nodes, leaves, self.narrow))
        return root

    def root(self, key: Hashable) -> Tensor | None:
        """node(0, B); None if no node of the key was present."""
        cover = self.take(key)
        return self.fold(list(cover.values()), tuple(cover), self.leaves)

    def take(self, key: Hashable) -> dict[Node, Tensor | None]:
        """The cover of the key, which is given up."""
        self._absorbed.discard(key)
        return self._covers.pop(key)


def moved(nodes: Sequence[Node], inside: Node) -> tuple[Node, ...]:
    """The nodes as they stand within `inside`, counted from its first leaf."""
    return tuple(Node(n.level, n.index - (inside.lo >> n.level)) for n in nodes)


def fan_in(uses: Sequence[Tensor]) -> Tensor:
    """((u_n + u_(n-1)) + ...) + u_1 of the roots u_1, u_2, ... u_n (S4)."""
    total = uses[-1]
    for use in reversed(uses[:-1]):
        total = devices.kernels_of(total).fold([total, use], schedule((Node(0, 0), Node(0, 1)), 2, False))
    return total


@lru_cache(maxsize=1024)
def schedule(nodes: tuple[Node, ...], leaves: int, narrow: bool) -> _C.Schedule:
    return _C.nodes_schedule(nodes, leaves, narrow)
