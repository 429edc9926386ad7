"""The tree of a parameter gradient from its chains (S1): blocks of 512 tokens, heads, samples, runs of samples.

    g = node over samples s of ( node over heads h of ( node over blocks b of chain[s, h, b] ) )

A sample is an entry of the global batch; offsets are rows. `narrow`: plan.grad_wire_dtype is bfloat16 and rounds sample
leaves, nodes and root (A6), never inside a sample. Suffixes: C nodes of a cover, S samples, H heads, D elements.
Bits: layout-invariant.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tbik import tree
from tbik.devices import kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import CoverRun, _is_int, _kind, _run_schedule, _sample_schedule
from tbik.plan import TreePlan


def bounds(lead: Sequence[int], sample_offsets: Sequence[int] | None) -> list[int]:
    """Row offsets of the samples. lead [B, T]: B samples of T rows; [T] or []: one sample."""
    if sample_offsets is not None:
        return list(sample_offsets)
    if len(lead) == 2:
        return [sample * lead[1] for sample in range(lead[0] + 1)]
    return [0, math.prod(lead)]


def require_samples(where: str, lead: Sequence[int], sample_offsets: Sequence[int] | None) -> None:
    """PlanError unless the leading axes and sample_offsets say where each sample begins."""
    if sample_offsets is None:
        if len(lead) > 2:
            raise PlanError(
                f"{where}: leading axes {list(lead)} do not say what a sample is; expected [], [T] (one sample), "
                "[B, T] (B samples) or sample_offsets"
            )
        return
    if not isinstance(sample_offsets, (list, tuple)) or not all(_is_int(o) for o in sample_offsets):
        raise PlanError(f"{where}: sample_offsets is a list or tuple of integers, got {_kind(sample_offsets)}")
    rows = math.prod(lead)
    ascending = all(a <= b for a, b in itertools.pairwise(sample_offsets))
    if not sample_offsets or not ascending or sample_offsets[0] != 0 or sample_offsets[-1] != rows:
        raise PlanError(
            f"{where}: sample_offsets ascend from 0 to the {rows} rows, got {list(sample_offsets[:8])}"
            f"{'...' if len(sample_offsets) > 8 else ''}; padding rows are dropped before the call"
        )


def is_narrow(where: str, plan: TreePlan | None) -> bool:
    """Whether gradients are rounded from the sample leaf upwards. PlanError for a plan these operators do not serve."""
    if plan is None:
        return False
    if not isinstance(plan, TreePlan):
        raise PlanError(f"{where}: plan is a tbik.TreePlan or None, got {_kind(plan)}")
    if plan.acc_dtype != "float32":
        raise PlanError(f"{where}: this operator computes in float32, the plan says {plan.acc_dtype}")
    return plan.grad_wire_dtype == "bfloat16"


def fold_samples(leaves: Tensor, num_blocks: tuple[int, ...], narrow: bool, first_sample: int | None = None) -> Tensor:
    """leaves [chains, D], num_blocks[s] of them per sample -> the root [D].

    first_sample: the number of the first sample in the batch; then the cover [C, D] of these samples, the nodes of
    tree.cover(first_sample, first_sample + S).
    """
    if first_sample is None:
        if not num_blocks:
            return leaves.new_zeros(leaves.shape[1:])
        return kernels_of(leaves).fold(leaves, _sample_schedule(num_blocks, narrow))
    chains = [0, *itertools.accumulate(num_blocks)]
    nodes = tree.cover(first_sample, first_sample + len(num_blocks))
    values = []
    for node in nodes:
        lo, hi = node.lo - first_sample, node.hi - first_sample
        values.append(
            kernels_of(leaves).fold(leaves[chains[lo] : chains[hi]], _sample_schedule(num_blocks[lo:hi], narrow))
        )
    return torch.stack(values) if values else leaves.new_zeros((0, *leaves.shape[1:]))


def fold_heads(leaves: Tensor, num_blocks: tuple[int, ...], run: CoverRun | None = None) -> Tensor:
    """leaves [chains, H, D] -> per sample the root over its H heads, [S, D].

    run: the heads are [run.lo, run.hi) of run.length; then [S, C, D], per sample the nodes of
    tree.cover(run.lo, run.hi).
    """
    num_heads, dim = leaves.shape[1:]
    nodes: tuple[int, ...] = ()
    if run is None:
        program = _run_schedule(0, num_heads, num_heads, True, False)
    else:
        program = _run_schedule(run.lo, run.hi, run.length, False, False)
        nodes = (len(tree.cover(run.lo, run.hi)),)
    out = leaves.new_empty((len(num_blocks), *nodes, dim))
    first = 0
    for sample, count in enumerate(num_blocks):
        blocks = list(leaves[first : first + count].flatten(1))
        per_head = kernels_of(leaves).fold(blocks, _run_schedule(0, count, count, True, False)).reshape(num_heads, dim)
        out[sample] = kernels_of(leaves).fold(list(per_head), program)
        first += count
    return out


def fold_sample_leaves(leaves: Tensor, narrow: bool, first_sample: int | None = None) -> Tensor:
    """leaves [S, D], one value per sample, not yet rounded -> the root [D], or the cover [C, D] as in fold_samples."""
    return fold_samples(leaves, (1,) * leaves.shape[0], narrow, first_sample)
