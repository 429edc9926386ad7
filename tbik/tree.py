"""The one order: which pairs of values are added. Integers only; every kernel and every collective asks this file.

    node(lo, hi) = leaf(lo)                            if hi - lo == 1
                 = node(lo, mid) (+) node(mid, hi)     mid = lo + largest power of two < hi - lo

    L = 8, four ranks of two leaves each           L = 6: the ragged edge (1,2) joins only at the root
             .---- (3,0) ----.                               .--- root ---.
        . (2,0) .       . (2,1) .                        . (2,0) .        |
      (1,0)   (1,1)   (1,2)   (1,3)                    (1,0)   (1,1)    (1,2)
      0   1   2   3   4   5   6   7                    0   1   2   3    4   5

Node (s, j) holds the leaves [j*2^s, (j+1)*2^s). The C++ twin is csrc/tree.h. Specification: ORDER.md, section T.
Bits: layout-invariant (tests/test_tree.py, tests/test_order_agreement.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

ORDER_VERSION = 1
MAX_GRANULE = 64

T = TypeVar("T")
Add = Callable[[T, T], T]


class Node(NamedTuple):
    """The leaves [index * 2^level, (index + 1) * 2^level)."""

    level: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which a node does not need

    @property
    def lo(self) -> int:
        return self.index << self.level

    @property
    def hi(self) -> int:
        return (self.index + 1) << self.level


class Step(NamedTuple):
    """One step of a schedule: load input `source` into slot `slot`, or slot = slot (+) source slot (left, right)."""

    kind: Literal["load", "add"]
    slot: int
    source: int


class Schedule(NamedTuple):
    """A straight-line program over a stack of slots; `outputs[i]` is the node left in slot i at the end."""

    steps: tuple[Step, ...]
    num_slots: int
    outputs: tuple[Node, ...]


def granule(length: int, leaves: int) -> int:
    """q = largest power of two <= 64 with length % (q*p) == 0 and length/q >= leaves, else 1; p = 2-part of leaves."""
    _require_leaves(leaves)
    if length < 0:
        raise ValueError(f"tree.granule: length must be >= 0, got {length}")
    two_part = leaves & -leaves
    q = MAX_GRANULE
    while q > 1 and (length % (q * two_part) or length // q < leaves):
        q //= 2
    return q


def cuts(length: int, leaves: int) -> tuple[int, ...]:
    """cut(i) = q * ((length/q) * i // leaves), i = 0..leaves; leaf i = [cut(i), cut(i+1)), possibly empty."""
    q = granule(length, leaves)
    return tuple(q * (length // q * i // leaves) for i in range(leaves + 1))


def middle(lo: int, hi: int) -> int:
    """Where node(lo, hi) splits: lo + the largest power of two strictly below hi - lo."""
    if hi - lo < 2:
        raise ValueError(f"tree.middle: a leaf does not split, got [{lo}, {hi})")
    return lo + (1 << ((hi - lo - 1).bit_length() - 1))


def cover(lo: int, hi: int) -> tuple[Node, ...]:
    """The fewest whole nodes that make up the leaves [lo, hi), in ascending order."""
    if not 0 <= lo <= hi:
        raise ValueError(f"tree.cover: expected 0 <= lo <= hi, got [{lo}, {hi})")
    nodes = []
    while lo < hi:
        level = min((lo & -lo).bit_length() - 1 if lo else hi.bit_length(), (hi - lo).bit_length() - 1)
        nodes.append(Node(level, lo >> level))
        lo += 1 << level
    return tuple(nodes)


def leaf_nodes(lo: int, hi: int) -> tuple[Node, ...]:
    """The leaves [lo, hi) as level-0 nodes: the inputs of a rank's own schedule."""
    return tuple(Node(0, i) for i in range(lo, hi))


def merge(left: Mapping[Node, T], right: Mapping[Node, T], add: Add[T]) -> dict[Node, T]:
    """Union of two disjoint covers, siblings (s, 2j), (s, 2j+1) become (s+1, j) = left (+) right, repeatedly."""
    merged = dict(left)
    for node, value in right.items():
        while True:
            sibling = Node(node.level, node.index ^ 1)
            if any(node.lo < n.hi and n.lo < node.hi for n in merged):
                raise ValueError(f"tree.merge: the covers overlap at {node}; each leaf may be counted once")
            if sibling not in merged:
                break
            other = merged.pop(sibling)
            value = add(value, other) if node.index % 2 == 0 else add(other, value)
            node = Node(node.level + 1, node.index // 2)
        merged[node] = value
    return merged


def schedule(inputs: Iterable[Node], leaves: int | None = None) -> Schedule:
    """The additions that turn ascending disjoint nodes into a cover or, if `leaves` is given, into node(0, leaves).

    Input i of the schedule is the i-th node. Every fold in tbik (kernels, collectives, oracle) runs such a schedule.
    """
    stack: list[Node] = []
    steps: list[Step] = []
    num_slots = 0
    for source, node in enumerate(inputs):
        if stack and node.lo < stack[-1].hi:
            raise ValueError(f"tree.schedule: nodes must ascend and not overlap, got {node} after {stack[-1]}")
        stack.append(node)
        steps.append(Step("load", len(stack) - 1, source))
        num_slots = max(num_slots, len(stack))
        while len(stack) > 1 and _are_siblings(stack[-2], stack[-1]):
            right = stack.pop()
            steps.append(Step("add", len(stack) - 1, len(stack)))
            stack[-1] = Node(right.level + 1, right.index // 2)
    if leaves is not None:
        _require_leaves(leaves)
        if tuple(stack) != cover(0, leaves):
            raise ValueError(f"tree.schedule: the root of {leaves} leaves needs all of them, got {stack}")
        steps += [Step("add", slot, slot + 1) for slot in range(len(stack) - 2, -1, -1)]
        stack = stack[:1]
    return Schedule(tuple(steps), num_slots, tuple(stack))


def run(program: Schedule, inputs: Sequence[T], add: Add[T]) -> list[T]:
    """Execute a schedule on values; returns one value per node of `program.outputs`."""
    slots: list[T | None] = [None] * program.num_slots
    for kind, slot, source in program.steps:
        if kind == "load":
            slots[slot] = inputs[source]
        else:
            left, right = slots[slot], slots[source]
            assert left is not None and right is not None
            slots[slot] = add(left, right)
    return [value for value in slots[: len(program.outputs)] if value is not None]


def root(leaf_values: Sequence[T], add: Add[T]) -> T:
    """node(0, L) of L leaf values."""
    return run(schedule(leaf_nodes(0, len(leaf_values)), len(leaf_values)), leaf_values, add)[0]


def fold_present(values: Mapping[int, T], leaves: int, add: Add[T]) -> T:
    """node(0, leaves) where only the leaves in `values` differ from +0: adding +0 changes no node, so it is skipped.

    values: {leaf: value}, at least one. Errors: ValueError for a leaf outside [0, leaves). Layout-invariant.
    """
    if not values or min(values) < 0 or max(values) >= leaves:
        raise ValueError(f"tree.fold_present: expected leaves within [0, {leaves}), got {sorted(values)[:8]}")

    def node(lo: int, hi: int) -> T | None:
        if hi - lo == 1:
            return values.get(lo)
        mid = middle(lo, hi)
        left, right = node(lo, mid), node(mid, hi)
        return right if left is None else left if right is None else add(left, right)

    result = node(0, leaves)
    assert result is not None
    return result


def _are_siblings(left: Node, right: Node) -> bool:
    return left.level == right.level and left.index % 2 == 0 and right.index == left.index + 1


def _require_leaves(leaves: int) -> None:
    if leaves < 1:
        raise ValueError(f"tree: the number of leaves must be >= 1, got {leaves}")
