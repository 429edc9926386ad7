"""The combine kernel: folds of node values, covers, epilogues. Bits against the canonical tree."""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from interpreter import DEVICE, needs_triton

from tbik import _C, reference, tree
from tbik.errors import PlanError

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")]


def combine(x: torch.Tensor, schedule: _C.Schedule, **options: object) -> torch.Tensor:
    from tbik.kernels import combine as kernel

    if isinstance(options.get("bias"), torch.Tensor):
        options["bias"] = options["bias"].to(DEVICE)
    return kernel.combine(x.to(DEVICE), schedule, **options).cpu()


@pytest.mark.parametrize("leaves", [1, 2, 6, 8, 13, 64, 65, 100])  # above 64: by a table, not unrolled
def test_verify_root_is_the_canonical_tree(leaves: int) -> None:
    x = wide_exponents((leaves, 5, 7), torch.float32, leaves, spread=24)
    actual = combine(x, _C.run_schedule(0, leaves, leaves, True, False))
    assert_bitwise_equal(actual, reference.epilogue(tree.root(list(x), reference.add)), f"root of {leaves}")
    if leaves >= 6:
        in_order = x[0]
        for value in x[1:]:
            in_order = in_order + value
        assert_bits_differ(actual, in_order, "leaves in order")
        assert_bits_differ(actual, tree.root(list(x.roll(1, 0)), reference.add), "leaves one further")


@pytest.mark.parametrize("narrow", [False, True])
def test_verify_epilogue_and_wire(narrow: bool) -> None:
    """bf16 wire, average, bias, cast: the order of A6 and A7."""
    x = wide_exponents((6, 4, 9), torch.float32, 1, spread=20)
    x[:, 0, 0] = torch.tensor([float("inf"), float("-inf"), 0, 0, 0, 0])  # NaN leaves canonical
    bias = wide_exponents((9,), torch.bfloat16, 2, spread=8)
    root = reference._root(list(x), narrow)
    expected = reference.epilogue(root, bias, avg=3, out_dtype=torch.bfloat16)
    actual = combine(x, _C.run_schedule(0, 6, 6, True, narrow), bias=bias, avg=3, out_dtype=torch.bfloat16)
    assert_bitwise_equal(actual, expected, "epilogue")


def test_verify_covers_of_ranks() -> None:
    """Three ranks' covers of 12 leaves, folded to the root: what an all-reduce does with R buffers."""
    leaves, runs = 12, ((0, 5), (5, 9), (9, 12))
    x = wide_exponents((leaves, 3, 6), torch.float32, 3, spread=24)
    nodes, values = [], []
    for lo, hi in runs:
        cover = combine(x[lo:hi].contiguous(), _C.run_schedule(lo, hi, leaves, False, False))
        nodes += [(node.level, node.index) for node in tree.cover(lo, hi)]
        values += list(cover)
    actual = combine(torch.stack(values), _C.nodes_schedule(nodes, leaves, False))
    assert_bitwise_equal(actual, tree.root(list(x), reference.add), "root over ranks")


def test_verify_float64() -> None:
    x = wide_exponents((5, 8), torch.float64, 4)
    actual = combine(x, _C.run_schedule(0, 5, 5, True, False), avg=3)
    assert_bitwise_equal(actual, reference.epilogue(tree.root(list(x), reference.add), avg=3), "fp64")


def test_verify_refusals() -> None:
    from tbik.kernels import combine as kernel

    x = torch.zeros(3, 4, device=DEVICE)
    cover = _C.run_schedule(1, 4, 4, False, False)
    with pytest.raises(PlanError, match="expected the 4 inputs"):
        kernel.combine(x, _C.run_schedule(0, 4, 4, True, False))
    with pytest.raises(PlanError, match="belong to the root"):
        kernel.combine(x, cover, avg=2)
    with pytest.raises(PlanError, match="contiguous inputs"):
        kernel.combine(x.half(), cover)
