"""The order in Python (tbik/tree.py) and in C++ (csrc/tree.h) is one order (ORDER.md T1-T5, S1).

    hash fold:  node = mix(3 * left + 5 * right + c) mod 2^64, neither associative nor commutative,
so two programs give the same hashes only if they combine the same pairs, left and right in the same places.
"""

from __future__ import annotations

import itertools
import random

import pytest

from tbik import _C, tree
from tbik.tree import Node

_MASK = (1 << 64) - 1


def mix(left: int, right: int) -> int:
    h = (3 * left + 5 * right + 0x9E3779B97F4A7C15) & _MASK
    h = ((h ^ (h >> 29)) * 0xBF58476D1CE4E5B9) & _MASK
    return h ^ (h >> 32)


def canonical(values: list[int], lo: int, hi: int) -> int:
    """node(lo, hi) straight from T2."""
    if hi - lo == 1:
        return values[lo]
    middle = tree.middle(lo, hi)
    return mix(canonical(values, lo, middle), canonical(values, middle, hi))


def assert_same_program(ours: _C.Schedule, python: tree.Schedule) -> None:
    assert ours.steps == [tuple(step) for step in python.steps]
    assert ours.num_slots == python.num_slots
    assert ours.outputs == [tuple(node) for node in python.outputs]
    assert ours.num_inputs == sum(step.kind == "load" for step in python.steps)


VALUES = [random.Random(seed).getrandbits(64) for seed in range(64)]


def test_verify_python_and_cpp_pairs() -> None:
    """Every run [lo, hi) of up to 64 leaves, every root, and roots from every pair of covers."""
    for lo, hi in itertools.combinations_with_replacement(range(65), 2):
        python = tree.schedule(tree.leaf_nodes(lo, hi))
        ours = _C.run_schedule(lo, hi, 64, False)
        assert_same_program(ours, python)
        assert not ours.is_root
        assert _C.cover(lo, hi) == [tuple(node) for node in tree.cover(lo, hi)]
        expected = [canonical(VALUES, node.lo, node.hi) for node in tree.cover(lo, hi)]
        assert _C.hash_fold(VALUES[lo:hi], ours) == expected == tree.run(python, VALUES[lo:hi], mix)
    for leaves in range(1, 65):
        python = tree.schedule(tree.leaf_nodes(0, leaves), leaves)
        ours = _C.run_schedule(0, leaves, leaves, True)
        assert_same_program(ours, python)
        assert ours.is_root
        assert _C.hash_fold(VALUES[:leaves], ours) == [canonical(VALUES, 0, leaves)]
        for split in range(leaves + 1):
            nodes = [*tree.cover(0, split), *tree.cover(split, leaves)]
            python = tree.schedule(nodes, leaves)
            ours = _C.nodes_schedule(nodes, leaves)
            assert_same_program(ours, python)
            partial = [canonical(VALUES, node.lo, node.hi) for node in nodes]
            assert _C.hash_fold(partial, ours) == [canonical(VALUES, 0, leaves)]


def test_verify_hash_sees_the_order() -> None:
    """Negative control: a flat chain, or a tree with exchanged operands, has another hash."""
    flat = VALUES[0]
    for value in VALUES[1:8]:
        flat = mix(flat, value)
    root = _C.hash_fold(VALUES[:8], _C.run_schedule(0, 8, 8, True))[0]
    assert root != flat
    assert root != tree.root(VALUES[:8], lambda left, right: mix(right, left))


def test_verify_cuts_agree() -> None:
    for length in [*range(300), 576, 1536, 4096, 14336, 49152, 151936]:
        for leaves in (1, 2, 3, 4, 6, 7, 8, 9, 12, 16, 33, 64):
            assert _C.cuts(length, leaves) == list(tree.cuts(length, leaves)), (length, leaves)
    # No product of the two may overflow 64 bits.
    for length in (2**60, 2**62 + 12345):
        assert _C.cuts(length, 1000) == list(tree.cuts(length, 1000))


def test_verify_sample_schedule() -> None:
    """Two levels: the tree over samples of the trees over blocks; a sample without blocks is +0 (hash value 0)."""
    for counts in ([1], [0], [3], [0, 0], [1, 1, 1], [2, 0, 1, 5], [7, 1, 0, 0, 2, 3, 1], [1] * 64):
        values = [random.Random(seed).getrandbits(64) for seed in range(sum(counts))]
        leaves, at = [], 0
        for count in counts:
            leaves.append(tree.root(values[at : at + count], mix) if count else 0)
            at += count
        for rounds in (False, True):
            program = _C.sample_schedule(counts, rounds)
            assert program.is_root and program.num_inputs == sum(counts)
            assert _C.hash_fold(values, program) == [tree.root(leaves, mix)]
            # Rounded: once per non-empty sample, and every node above the samples.
            expected = sum(c > 0 for c in counts) + len(counts) - 1 if rounds else 0
            assert sum(program.rounds) == expected


def test_verify_absent_leaves_are_skipped() -> None:
    """Twins again, and against T2 with an addition for which the absent leaf is neutral."""

    def skip(left: int | None, right: int | None) -> int | None:
        return right if left is None else left if right is None else mix(left, right)

    def expected(present: dict[int, int], lo: int, hi: int) -> int | None:
        if hi - lo == 1:
            return present.get(lo)
        return skip(expected(present, lo, tree.middle(lo, hi)), expected(present, tree.middle(lo, hi), hi))

    generator = random.Random(5)
    for leaves in range(1, 65):
        for count in {1, min(2, leaves), leaves // 2 or 1, leaves}:
            present = sorted(generator.sample(range(leaves), count))
            values = {leaf: VALUES[leaf] for leaf in present}
            ours = _C.hash_fold_present(list(values.values()), present, leaves)
            assert ours == tree.fold_present(values, leaves, mix) == expected(values, 0, leaves)
    for bad in ({}, {3: 1}, {-1: 1}):
        with pytest.raises(ValueError, match="fold_present"):
            tree.fold_present(bad, 3, mix)
        with pytest.raises(ValueError, match="fold_present"):
            _C.hash_fold_present(list(bad.values()), list(bad), 3)


def test_verify_bad_programs_are_refused() -> None:
    with pytest.raises(ValueError, match="ascend and not overlap"):
        _C.nodes_schedule([Node(0, 1), Node(0, 1)])
    with pytest.raises(ValueError, match="needs all of them"):
        _C.nodes_schedule([(0, 0), (0, 2)], 3)
    with pytest.raises(ValueError, match="the root needs all leaves"):
        _C.run_schedule(0, 3, 4, True)
    with pytest.raises(ValueError, match="0 <= lo <= hi <= leaves"):
        _C.run_schedule(2, 5, 4, False)
    with pytest.raises(ValueError, match="not a node"):
        _C.nodes_schedule([(-1, 0)])
    with pytest.raises(ValueError, match="number of leaves"):
        _C.cuts(8, 0)
    with pytest.raises(ValueError, match="negative number of blocks"):
        _C.sample_schedule([1, -1])
