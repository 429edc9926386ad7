"""Which leaves each tensor-parallel rank of vLLM holds: equal shards, K/W rows of every contraction (ORDER.md T6).

Integers only. Errors: PlanError naming the layer and the row that cuts a leaf.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tbik import PlanError, TreePlan, tree
from tbik.nn import runs_of_rows
from tbik.ops.linear import CoverRun
from tbik.plan import Run


@dataclass(frozen=True)
class Shard:
    """One rank's leaves of a contraction of `length`, and everybody's."""

    plan: TreePlan
    length: int
    rank: int
    runs: tuple[Run, ...]

    @property
    def run(self) -> CoverRun:
        return CoverRun(self.length, *self.runs[self.rank])

    @property
    def is_node_per_rank(self) -> bool:
        """Whether every rank holds one node, all of one level: the tree above them is the canonical tree over ranks.

        node(0, L) splits at the largest power of two below L = W * 2^s, which is 2^s times the one below W (T2).
        """
        return _is_node_per_rank(self.runs)


def equal_shard(where: str, plan: TreePlan, length: int, rank: int, size: int) -> Shard:
    """The shard of a rank that holds columns [rank * K/W, (rank + 1) * K/W)."""
    if length % size:
        raise PlanError(f"tbik_vllm: {where}: {length} input features do not divide by {size} ranks")
    try:
        runs = runs_of_rows(plan, length, [length // size * (r + 1) for r in range(size)])
    except PlanError as error:
        raise PlanError(f"tbik_vllm: {where}: {size} equal shards of {length} input features: {error}") from error
    return Shard(plan, length, rank, runs)


@lru_cache(maxsize=1024)
def _is_node_per_rank(runs: tuple[Run, ...]) -> bool:
    covers = [tree.cover(*run) for run in runs]
    return all(len(cover) == 1 for cover in covers) and len({cover[0].level for cover in covers}) == 1
