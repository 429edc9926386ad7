"""The order itself. Values are strings such as "((0+1)+2)", so that equal means the same tree, not a lucky rounding."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import pytest
from cases import leaf_partitions
from hypothesis import given
from hypothesis import strategies as st

from tbik import tree
from tbik.tree import Node

Cover = Mapping[Node, str]


def join(left: str, right: str) -> str:
    return f"({left}+{right})"


def canonical(lo: int, hi: int) -> str:
    """T2, by search: the split is the largest power of two that is smaller than the length."""
    if hi - lo == 1:
        return str(lo)
    half = max(2**e for e in range(20) if 2**e < hi - lo)
    return join(canonical(lo, lo + half), canonical(lo + half, hi))


def leaves_of(cover: Sequence[Node] | Cover) -> list[int]:
    return sorted(leaf for node in cover for leaf in range(node.lo, node.hi))


def are_siblings(a: Node, b: Node) -> bool:
    return a.level == b.level and a.index // 2 == b.index // 2 and a != b


def merge_all(covers: Sequence[Cover]) -> Cover:
    return functools.reduce(lambda left, right: tree.merge(left, right, join), covers, {})


def root_of(cover: Cover, leaves: int) -> str:
    nodes = sorted(cover, key=lambda node: node.lo)
    return tree.run(tree.schedule(nodes, leaves), [cover[node] for node in nodes], join)[0]


def test_verify_cuts() -> None:
    for length, leaves in itertools.product([*range(200), 576, 1536, 3072, 4096, 12288, 49152, 50257], range(1, 41)):
        two_part = max(2**e for e in range(7) if leaves % 2**e == 0)
        granules = [q for q in (64, 32, 16, 8, 4, 2) if length % (q * two_part) == 0 and length / q >= leaves]
        q = granules[0] if granules else 1
        expected = tuple(q * ((length // q) * i // leaves) for i in range(leaves + 1))
        assert tree.granule(length, leaves) == q
        assert tree.cuts(length, leaves) == expected
        assert expected[0] == 0 and expected[-1] == length and list(expected) == sorted(expected)
    assert tree.cuts(576, 12) == tuple(range(0, 577, 48))
    assert tree.cuts(3, 8) == (0, 0, 0, 1, 1, 1, 2, 2, 3)  # empty leaves


def test_verify_equal_shards_are_cuts() -> None:
    all_leaves = (1, 2, 3, 4, 6, 8, 9, 12, 16, 24)
    worlds = {leaves: [w for w in range(2, leaves + 1) if leaves % w == 0] for leaves in all_leaves}
    for length in range(20001):
        for leaves in all_leaves:
            dividing = [w for w in worlds[leaves] if length % w == 0]
            if not dividing:
                continue
            cuts = tree.cuts(length, leaves)
            for world in dividing:
                shard = length // world
                assert cuts[:: leaves // world] == tuple(range(0, length + 1, shard) if shard else [0] * (world + 1))


def test_verify_canonical_tree() -> None:
    assert canonical(0, 8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert canonical(0, 6) == "(((0+1)+(2+3))+(4+5))"
    assert canonical(0, 7) == "(((0+1)+(2+3))+((4+5)+6))"
    for leaves in range(1, 200):
        assert tree.root([str(i) for i in range(leaves)], join) == canonical(0, leaves)
    for lo, hi in itertools.combinations(range(40), 2):
        if hi - lo > 1:
            middle = tree.middle(lo, hi)
            assert canonical(lo, hi) == join(canonical(lo, middle), canonical(middle, hi))


def test_verify_cover_is_unique() -> None:
    nodes = [Node(level, index) for level in range(4) for index in range(8 >> level)]
    found: dict[tuple[int, ...], list[tuple[Node, ...]]] = {}
    for size in range(len(nodes) + 1):
        for chosen in itertools.combinations(nodes, size):
            leaves = leaves_of(chosen)
            if len(leaves) != len(set(leaves)) or any(are_siblings(a, b) for a, b in itertools.combinations(chosen, 2)):
                continue
            found.setdefault(tuple(leaves), []).append(tuple(sorted(chosen, key=lambda node: node.lo)))
    assert len(found) == 2**8
    for leaf_set, covers in found.items():
        assert len(covers) == 1
        merged = merge_all([{Node(0, leaf): str(leaf)} for leaf in leaf_set])
        assert tuple(sorted(merged, key=lambda node: node.lo)) == covers[0]
        assert all(value == canonical(node.lo, node.hi) for node, value in merged.items())
        if leaf_set and leaf_set == tuple(range(leaf_set[0], leaf_set[-1] + 1)):
            assert tree.cover(leaf_set[0], leaf_set[-1] + 1) == covers[0]


def test_verify_cover_of_every_run() -> None:
    for lo, hi in itertools.combinations_with_replacement(range(70), 2):
        cover = tree.cover(lo, hi)
        assert leaves_of(cover) == list(range(lo, hi))
        assert not any(are_siblings(a, b) for a, b in itertools.pairwise(cover))
        assert cover == tree.schedule(tree.leaf_nodes(lo, hi)).outputs


@given(leaf_partitions(), st.randoms(use_true_random=False))
def test_verify_merge_any_order(partition: tuple[int, tuple[int, ...]], rng: random.Random) -> None:
    """Any owner of any leaf, merged in any bracketing and any order, gives one cover and one root."""
    leaves, owners = partition
    covers = [
        merge_all([{Node(0, leaf): str(leaf)} for leaf in range(leaves) if owners[leaf] == owner])
        for owner in sorted(set(owners))
    ]
    expected = merge_all(covers)
    assert tuple(sorted(expected, key=lambda node: node.lo)) == tree.cover(0, leaves)
    pool = list(covers)
    while len(pool) > 1:
        left = pool.pop(rng.randrange(len(pool)))
        right = pool.pop(rng.randrange(len(pool)))
        assert tree.merge(left, right, join) == tree.merge(right, left, join)  # commutative
        pool.append(tree.merge(left, right, join))  # associative: every bracketing is drawn
    assert pool[0] == expected
    assert root_of(pool[0], leaves) == canonical(0, leaves)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_verify_merge_along_a_ring(world: int) -> None:
    leaves = 12
    bounds = [leaves * rank // world for rank in range(world + 1)]
    covers = [merge_all([{Node(0, i): str(i)} for i in range(lo, hi)]) for lo, hi in itertools.pairwise(bounds)]
    for start in range(world):
        assert root_of(merge_all(covers[start:] + covers[:start]), leaves) == canonical(0, leaves)


def test_verify_root_equals_canonical_tree() -> None:
    for leaves in range(1, 200):
        cover = {node: canonical(node.lo, node.hi) for node in tree.cover(0, leaves)}
        assert root_of(cover, leaves) == canonical(0, leaves)
        *first, last = cover.values()
        assert functools.reduce(lambda right, left: join(left, right), reversed(first), last) == canonical(0, leaves)


def test_verify_counter_slots() -> None:
    for leaves in sorted({*range(1, 200), *(2**e + d for e in range(8, 13) for d in (-1, 0, 1)), 3000}):
        slots = tree.schedule(tree.leaf_nodes(0, leaves)).num_slots
        assert slots == len(bin(leaves)) - 2  # floor(log2 L) + 1
        assert tree.schedule(tree.leaf_nodes(0, leaves), leaves).num_slots == slots


def test_verify_counter_keyed_by_level_alone_is_wrong() -> None:
    """Negative control for T5: leaves 1 and 2 have one level but are no siblings."""

    def fold_by_level(leaves: range) -> list[str]:
        slots: dict[int, str] = {}
        for leaf in leaves:
            level, value = 0, str(leaf)
            while level in slots:
                value = join(slots.pop(level), value)
                level += 1
            slots[level] = value
        return sorted(slots.values())

    def fold_by_node(leaves: range) -> list[str]:
        return sorted(tree.run(tree.schedule(tree.leaf_nodes(leaves[0], leaves[-1] + 1)), [*map(str, leaves)], join))

    assert fold_by_level(range(6)) == fold_by_node(range(6))
    assert fold_by_node(range(1, 3)) == ["1", "2"]
    assert fold_by_level(range(1, 3)) == ["(1+2)"]


@pytest.mark.parametrize(
    "call",
    [
        lambda: tree.merge({Node(1, 0): "a"}, {Node(0, 1): "b"}, join),
        lambda: tree.merge({Node(0, 1): "a"}, {Node(1, 0): "b"}, join),
        lambda: tree.merge({Node(0, 0): "a", Node(0, 1): "b"}, {Node(1, 0): "c"}, join),
        lambda: tree.merge({Node(0, 3): "a"}, {Node(0, 3): "b"}, join),
        lambda: tree.schedule([Node(0, 0), Node(1, 0)]),
        lambda: tree.schedule([Node(0, 1), Node(0, 0)]),
        lambda: tree.schedule([Node(0, 0), Node(0, 2)], 3),
        lambda: tree.schedule([Node(0, 0)], 2),
        lambda: tree.schedule(tree.leaf_nodes(0, 4), 3),
        lambda: tree.schedule([], 0),
        lambda: tree.cuts(-1, 2),
        lambda: tree.cuts(4, 0),
        lambda: tree.cover(3, 2),
        lambda: tree.middle(3, 4),
    ],
    ids=itertools.count(),
)
def test_verify_refusals(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="tree"):
        call()
