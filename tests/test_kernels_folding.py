"""tbik.kernels.folding: pushes and groups of a schedule against the canonical tree, on symbols. No triton, no GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tbik import _C, tree
from tbik.kernels import folding


def canonical(lo: int, hi: int) -> folding.Expression:
    if hi - lo == 1:
        return lo
    mid = tree.middle(lo, hi)
    return canonical(lo, mid), canonical(mid, hi)


@given(st.integers(1, 70))
def test_verify_pushes_are_the_canonical_tree(leaves: int) -> None:
    fold = folding.fold_of(_C.run_schedule(0, leaves, leaves, True, False))
    assert folding._execute(fold) == [canonical(0, leaves)]
    assert fold == folding.fold_of(tree.schedule(tree.leaf_nodes(0, leaves), leaves))


@given(st.integers(1, 70), st.integers(0, 3))
def test_verify_groups_are_the_canonical_tree(leaves: int, level: int) -> None:
    """Every root can be grouped, whatever its ragged edge."""
    groups = folding.group(folding.fold_of(_C.run_schedule(0, leaves, leaves, True, False)), level)
    assert groups is not None
    assert folding._execute_groups(groups) == [canonical(0, leaves)]
    assert groups.inner == folding.adds_of(tree.schedule(tree.leaf_nodes(0, 1 << level)))
    assert groups.num_slots <= max(1, (leaves - 1).bit_length() - level + 1)


@given(st.data(), st.integers(0, 3))
def test_verify_covers(data: st.DataObject, level: int) -> None:
    """A run that does not start at a group is not grouped; where it is, its nodes are those of the cover."""
    leaves = data.draw(st.integers(1, 40))
    lo = data.draw(st.integers(0, leaves - 1))
    hi = data.draw(st.integers(lo + 1, leaves))
    fold = folding.fold_of(_C.run_schedule(lo, hi, leaves, False, False))
    expected = [canonical(node.lo - lo, node.hi - lo) if lo == 0 else None for node in tree.cover(lo, hi)]
    groups = folding.group(fold, level)
    if level == 0:
        assert groups is not None
    if groups is not None and lo == 0:
        assert folding._execute_groups(groups) == expected
    elif groups is not None:
        assert folding._execute_groups(groups) == folding._execute(fold)


def test_verify_a_wrong_grouping_is_refused() -> None:
    """Negative control: pairs (0,1), (2,3) are no nodes of a run that starts at leaf 1."""
    fold = folding.fold_of(_C.run_schedule(1, 5, 8, False, False))
    assert folding.group(fold, 0) is not None
    assert folding.group(fold, 1) is None


@pytest.mark.parametrize(("blocks", "narrow"), [([2, 1, 0, 3], True), ([1, 1], False), ([0, 0], True), ([5], True)])
def test_verify_samples(blocks: list[int], narrow: bool) -> None:
    """Pushes repeat the steps of the schedule, and round what it rounds."""
    schedule = _C.sample_schedule(blocks, narrow)
    fold = folding.fold_of(schedule)
    kinds = [step[0] for step in schedule.steps]
    assert sum(push.source is not None for push in fold.pushes) == kinds.count("load") == sum(blocks)
    assert sum(push.source is None for push in fold.pushes) == kinds.count("zero") == blocks.count(0)
    assert sum(push.adds for push in fold.pushes) == kinds.count("add")
    rounded = sum(1 + push.adds - push.plain for push in fold.pushes if push.source is not None)
    zeros_below = sum(push.adds for push in fold.pushes if push.source is None)
    if narrow:
        assert rounded <= sum(schedule.rounds) <= rounded + zeros_below
    else:
        assert fold.narrow == "never"
    groups = folding.group(fold, 0)
    assert groups is not None and [push[1:] for push in groups.pushes] == [push[1:] for push in fold.pushes]


def test_verify_spans() -> None:
    assert folding.spans([0, 1, None], [(0, 3, 5), (0, 0, 2)]) == [[(0, 3), (0, 0)], [(3, 5), (0, 2)], [(0, 0), (0, 0)]]
