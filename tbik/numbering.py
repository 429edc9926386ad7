"""Which samples of the global batch a data rank holds in a micro-step. Integers only.

    B = D*A*m         micro-step a, data rank r: samples [(a*D + r)*m, (a*D + r)*m + m), one aligned node of the tree

Letters: B samples per step, D data ranks (replicate-major, shard-minor), A micro-steps, m samples, a power of two.
Specification: ORDER.md S3. Errors: PlanError naming the A that work. Bits: layout-invariant.
"""

from __future__ import annotations

from tbik.errors import PlanError


def micro_steps_that_work(samples_per_step: int, data_ranks: int) -> list[int]:
    """Every A for which m = B/(D*A) is a power of two, ascending; empty where D does not divide B."""
    per_rank, rest = divmod(samples_per_step, data_ranks)
    if rest:
        return []
    return [per_rank >> i for i in range(per_rank.bit_length()) if per_rank % (1 << i) == 0][::-1]


def explain_no_split(where: str, samples_per_step: int, data_ranks: int) -> str:
    """Why D ranks cannot share B samples, and what would work."""
    below = samples_per_step // data_ranks * data_ranks
    return (
        f"{where}: samples_per_step = D*A*m; {data_ranks} data ranks do not divide {samples_per_step} samples. Nearest "
        f"that work: {f'{below}, ' if below else ''}{below + data_ranks}"
    )


def equal_share(where: str, samples_per_step: int, data_ranks: int, micro_steps: int) -> int:
    """m = B/(D*A). PlanError unless it is a power of two."""
    work = micro_steps_that_work(samples_per_step, data_ranks)
    if not work:
        raise PlanError(explain_no_split(where, samples_per_step, data_ranks))
    if micro_steps not in work:
        m = samples_per_step / data_ranks / micro_steps
        raise PlanError(
            f"{where}: {samples_per_step} samples on {data_ranks} data ranks in {micro_steps} micro-steps give "
            f"m = {m:g} samples each; m must be a power of two, so that they are one node of the tree. micro_steps "
            f"that work: {', '.join(map(str, work))}"
        )
    return samples_per_step // data_ranks // micro_steps


def run_of(first: int, rank: int, m: int) -> range:
    """The samples of a rank in the micro-step that begins at sample `first`."""
    return range(first + rank * m, first + (rank + 1) * m)
