"""CUDA tensors in tbik.collectives, with the host's memory in the place of a GPU's.

LIBRARIES says which device's tensors go to peers; here the CPU's do, in real processes: so the way from
covers to the kernels' source is the one of CUDA tensors, but for the device.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from spawn import Pool
from torch import Tensor

from tbik import (
    Cover,
    PlanError,
    TransportError,
    TreePlan,
    all_reduce,
    collectives,
    peer_library,
    peer_reductions,
    reference,
    tree,
)

WORLD = 3


def use_host_memory() -> None:
    peer_reductions.LIBRARIES.clear()
    peer_reductions.LIBRARIES["cpu"] = peer_library.host


def values(n: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    return [wide_exponents((n,), dtype, seed=seed + rank) for rank in range(WORLD)]


RUNS = ((0, 5), (5, 6), (6, 12))
PLAN = TreePlan(leaves=12)


def _covers(group: dist.ProcessGroup) -> None:
    use_host_memory()
    leaves = [wide_exponents((6, 20), torch.float32, seed=leaf) for leaf in range(12)]
    lo, hi = RUNS[group.rank()]
    program = tree.schedule(tree.leaf_nodes(lo, hi))
    rows = torch.stack(tree.run(program, leaves[lo:hi], torch.add))
    cover = Cover(rows, program.outputs, 12)
    bias = wide_exponents((20,), torch.bfloat16, seed=5)
    root = tree.root(leaves, torch.add)
    for runs in (RUNS, None):
        for out_dtype in (torch.float32, torch.bfloat16):
            expected = reference.epilogue(root, bias, avg=3, out_dtype=out_dtype)
            actual = all_reduce(cover, group, plan=PLAN, op="avg", bias=bias, out_dtype=out_dtype, runs=runs)
            assert_bitwise_equal(actual, expected, f"all_reduce {runs} {out_dtype}")
            part = collectives.reduce_scatter(
                cover, group, plan=PLAN, op="avg", bias=bias, out_dtype=out_dtype, runs=runs
            )
            assert_bitwise_equal(part, expected[2 * group.rank() : 2 * group.rank() + 2], "reduce_scatter")
    kept = collectives.reduce(cover, 2, group, plan=PLAN)
    assert (kept is None) == (group.rank() != 2)
    if kept is not None:
        assert_bitwise_equal(kept, root)
        assert_bits_differ(kept, sum(leaves[1:], leaves[0]), "a flat sum")
    peers = collectives._Link.open(group, "test").state.peers
    assert [held.calls for held in peers.values()] == [9]  # the kernels' way, not gloo's
    narrow = TreePlan(leaves=12, wire_dtype="bfloat16")
    wire = [reference.round_wire(leaf) for leaf in leaves]
    halves = reference.fold_covers([{tree.Node(0, i): leaf} for i, leaf in enumerate(wire)], 12, True)
    rounded = tree.run(program, wire[lo:hi], lambda left, right: reference.round_wire(left + right))
    cover = Cover(torch.stack(rounded), program.outputs, 12)
    assert_bitwise_equal(all_reduce(cover, group, plan=narrow, wire=True, runs=RUNS), halves, "bfloat16 wire")
    plain = values(50, torch.bfloat16)
    assert_bitwise_equal(all_reduce(plain[group.rank()], group), reference.all_reduce(plain))
    with pytest.raises(PlanError, match="the ranks cannot make this call together"):
        all_reduce(cover, group, plan=TreePlan(leaves=12, leaf=f"mma:sm_{(80, 90, 100)[group.rank()]}"), runs=RUNS)


def test_verify_a_cover_alone() -> None:
    """One rank without a group has no peers: the kernels of its device fold."""
    before = dict(peer_reductions.LIBRARIES)
    try:
        peer_reductions.LIBRARIES["cpu"] = lambda: pytest.fail("one rank asked for a library of peers")
        leaves = [wide_exponents((40,), torch.float32, seed=leaf) for leaf in range(7)]
        cover = Cover(
            torch.stack([tree.root(leaves[:4], torch.add), leaves[4] + leaves[5], leaves[6]]),
            ((2, 0), (1, 2), (0, 6)),
            7,
        )
        assert_bitwise_equal(all_reduce(cover), tree.root(leaves, torch.add))
    finally:
        peer_reductions.LIBRARIES.clear()
        peer_reductions.LIBRARIES.update(before)


@pytest.mark.slow
def test_verify_covers_of_three_ranks() -> None:
    with Pool(WORLD) as pool:
        pool.run(_covers, WORLD)


def test_verify_without_the_library_the_reason_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may have it")
    built = "device_name: no CUDA-capable device|driver version is insufficient"
    with pytest.raises((PlanError, TransportError), match=f"no tbik/_C_cuda.so; build it where nvcc is|{built}"):
        peer_library.cuda().device_name(0)
