"""A schedule of tree.h as the kernels execute it: push a leaf on a stack, then add the values at its top.

    push p:  stack[slot_p] = leaf_p;  adds_p times:  top two values become  left (+) right

Any schedule of tbik (a root, the cover of a run, samples of blocks) is such a list of pushes, because tree.h works on a
stack. Kernels read the list from a table in memory, or, where it is short, unrolled at compile time; they hold no
pair of their own. Integers only, no triton. Bits: layout-invariant (tests/test_kernels_folding.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from tbik import tree
from tbik.errors import PlanError

Expression = int | tuple["Expression", "Expression"] | None
"""What a stack slot holds: an input, a sum of two expressions, or +0 (None)."""


class Push(NamedTuple):
    """One leaf: input `source` (None: +0) to stack[slot], then `adds` additions.

    plain: how many of the 1 + adds values (the leaf and the sums, in order) are not rounded to bfloat16 (A6); the
    others are.
    """

    source: int | None
    slot: int
    adds: int
    plain: int


class Fold(NamedTuple):
    """All pushes of a schedule; at the end slots 0..num_outputs-1 hold its outputs."""

    pushes: tuple[Push, ...]
    num_slots: int
    num_outputs: int

    @property
    def narrow(self) -> str:
        """Which values are rounded to bfloat16: "never", "always", or "some" (from the sample leaf upwards)."""
        if all(push.plain == 1 + push.adds for push in self.pushes):
            return "never"
        return "always" if all(push.plain == 0 for push in self.pushes) else "some"


class Groups(NamedTuple):
    """A fold in aligned groups of 2^level pushes, each folded in registers by `inner`, then pushed as one value.

    sources: one per leaf, groups after each other, None for the absent leaves (+0) that fill up the last group.
    pushes: one per group; `source` counts groups, `adds` are the additions above the group.
    """

    level: int
    inner: tuple[int, ...]
    sources: tuple[int | None, ...]
    pushes: tuple[Push, ...]
    num_slots: int
    num_outputs: int


@lru_cache(maxsize=1024)
def fold_of(schedule: Any) -> Fold:
    """The pushes of a schedule (tbik._C.Schedule or tree.Schedule)."""
    rounds = getattr(schedule, "rounds", None) or [False] * len(schedule.steps)
    rounds_zeros = any(rounds)  # a zero stays what it is, and counts as rounded where the sums above it are
    pushes: list[list[Any]] = []
    for (kind, slot, source), is_rounded in zip(schedule.steps, rounds, strict=True):
        if kind == "add":
            last = pushes[-1]
            if (slot, source) != (last[1] - last[2] - 1, last[1] - last[2]):
                raise PlanError(f"kernels.folding: a schedule adds the top of its stack, got slots {slot} and {source}")
            last[2] += 1
        else:
            pushes.append([source if kind == "load" else None, slot, 0, 0])
            last = pushes[-1]
            is_rounded = is_rounded if kind == "load" else rounds_zeros
        if not is_rounded:
            if last[3] != last[2]:
                raise PlanError("kernels.folding: a schedule rounds from some node upwards, got a plain sum above one")
            last[3] += 1
    return Fold(tuple(Push(*push) for push in pushes), schedule.num_slots, len(schedule.outputs))


@lru_cache(maxsize=1024)
def group(fold: Fold, level: int) -> Groups | None:
    """The same fold with its lowest `level` levels in groups, or None where its leaves do not pair up that way.

    Proven for each fold, not assumed: both are executed on symbols, with x (+) +0 = x (a leaf is never -0, A1).
    """
    size = 1 << level
    if level and fold.narrow == "some":
        return None
    inner = adds_of(tree.schedule(tree.leaf_nodes(0, size)))
    sources: list[int | None] = []
    pushes: list[Push] = []
    depth = 0
    for first in range(0, len(fold.pushes), size):
        members = fold.pushes[first : first + size]
        adds = sum(push.adds for push in members) - (len(members) - 1)
        if adds < 0 or adds > depth:
            return None
        sources += [push.source for push in members] + [None] * (size - len(members))
        plain = {"never": 1 + adds, "always": 0}.get(fold.narrow, members[-1].plain)
        pushes.append(Push(len(pushes), depth, adds, plain))
        depth += 1 - adds
    grouped = Groups(
        level,
        inner,
        tuple(sources),
        tuple(pushes),
        max((push.slot + 1 for push in pushes), default=0),
        fold.num_outputs,
    )
    return grouped if _execute_groups(grouped) == _execute(fold) else None


def adds_of(schedule: Any) -> tuple[int, ...]:
    """How many additions follow each load."""
    return tuple(push.adds for push in fold_of(schedule).pushes)


def _execute(fold: Fold) -> list[Expression]:
    return _run([(push.source, push.adds) for push in fold.pushes])


def _execute_groups(groups: Groups) -> list[Expression]:
    size = 1 << groups.level
    values: list[tuple[Expression, int]] = []
    for number, push in enumerate(groups.pushes):
        leaves = groups.sources[number * size : (number + 1) * size]
        (value,) = _run(list(zip(leaves, groups.inner, strict=True)))
        values.append((value, push.adds))
    return _run(values)


def _run(pushes: Sequence[tuple[Expression, int]]) -> list[Expression]:
    stack: list[Expression] = []
    for value, adds in pushes:
        stack.append(value)
        for _ in range(adds):
            right = stack.pop()
            left = stack.pop()
            stack.append(right if left is None else left if right is None else (left, right))
    return stack


def spans(sources: Sequence[int | None], cuts: Sequence[Sequence[int]]) -> list[list[tuple[int, int]]]:
    """[first, end) of every leaf in each member of the contraction; absent leaves are empty."""
    pairs = [list(itertools.pairwise(member)) for member in cuts]
    return [[(0, 0) if leaf is None else member[leaf] for member in pairs] for leaf in sources]
