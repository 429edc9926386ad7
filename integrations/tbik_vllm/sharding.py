"""Which leaves each tensor-parallel rank of vLLM holds: equal shards, K/W rows of every contraction (ORDER.md T6).

Integers only. Errors: PlanError naming the layer and the row that cuts a leaf.
"""

from __future__ import annotations

from dataclasses import dataclass

from tbik import PlanError, TreePlan
from tbik.nn import runs_of_rows
from tbik.ops.linear import CoverRun
from tbik.plan import Run, is_node_per_rank


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
        """Whether the tree above the ranks' leaves is the canonical tree over ranks."""
        return is_node_per_rank(self.runs)


def equal_shard(where: str, plan: TreePlan, length: int, rank: int, size: int) -> Shard:
    """The shard of a rank that holds columns [rank * K/W, (rank + 1) * K/W)."""
    if length % size:
        raise PlanError(f"tbik_vllm: {where}: {length} input features do not divide by {size} ranks")
    try:
        runs = runs_of_rows(plan, length, [length // size * (r + 1) for r in range(size)])
    except PlanError as error:
        raise PlanError(f"tbik_vllm: {where}: {size} equal shards of {length} input features: {error}") from error
    return Shard(plan, length, rank, runs)
