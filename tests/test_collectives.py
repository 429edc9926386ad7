"""Collectives against the oracle: any world, cover, placement and size, the same bits; and what they refuse."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import leaf_partitions, wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from long_cases import long_cases
from spawn import Outcome, Pool, RankDied, outcomes, run_ranks
from torch import Tensor

from tbik import collectives, reference, tree
from tbik.collectives import Cover, Op, Placement, all_reduce, bytes_sent, reduce, reduce_scatter, reset_bytes_sent
from tbik.errors import PlanError, TransportError, TransportTimeout
from tbik.plan import TreePlan, leaf_runs
from tbik.tree import Node

pytestmark = pytest.mark.multiprocess

MAX_WORLD = 9
WORLDS = range(1, MAX_WORLD + 1)
OPS: tuple[Op, ...] = ("sum", "avg")
PLACEMENTS: tuple[Placement, ...] = ("one_shot", "two_shot")  # "auto" is one of them; see the prefix test
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SHAPES = ((), (0,), (1,), (7,), (4, 0, 3), (10, 100))
LONG = (100_003,)
TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    with Pool(MAX_WORLD) as pool:
        yield pool


class Case(NamedTuple):
    """L leaves of one shape, dealt to the ranks by `owners[leaf]`."""

    leaves: int
    owners: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    seed: int = 0
    op: Op = "sum"
    out_dtype: torch.dtype | None = None
    bias: bool = False
    narrow: bool = False
    runs: tuple[tuple[int, int], ...] | None = None

    @property
    def plan(self) -> TreePlan:
        name = str(self.dtype).removeprefix("torch.")
        return TreePlan(leaves=self.leaves, acc_dtype=name, wire_dtype="bfloat16" if self.narrow else None)

    def leaf_values(self) -> list[Tensor]:
        # Across the leaves the exponents vary and pairs cancel, element by element.
        numel = torch.Size(self.shape).numel()
        values = wide_exponents((numel, self.leaves), self.dtype, self.seed).t().contiguous()
        leaves = [value.view(self.shape) for value in values]
        return [reference.round_wire(leaf) for leaf in leaves] if self.narrow else leaves

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        total = reference.add(left, right)
        return reference.round_wire(total) if self.narrow else total

    def cover(self, rank: int) -> Cover:
        values = self.leaf_values()
        held = [leaf for leaf, owner in enumerate(self.owners) if owner == rank]
        program = tree.schedule([Node(0, leaf) for leaf in held])
        nodes = tree.run(program, [values[leaf] for leaf in held], self.add)
        stacked = torch.stack(nodes) if nodes else torch.empty(0, *self.shape, dtype=self.dtype)
        return Cover(stacked, program.outputs, self.leaves)

    def bias_values(self) -> Tensor | None:
        return wide_exponents(self.shape[-1:], torch.bfloat16, self.seed + 1) if self.bias else None

    def root(self, world: int) -> Tensor:
        root = tree.root(self.leaf_values(), self.add)
        avg = world if self.op == "avg" else 1
        return reference.epilogue(root, self.bias_values(), avg, self.out_dtype)


def cover_job(group: dist.ProcessGroup, case: Case, threshold: int | None = None) -> dict[str, Tensor]:
    """The root by every placement, and put together again from reduce_scatter's and reduce's parts."""
    cover = case.cover(group.rank())
    before = cover.values.clone()
    options: dict[str, Any] = {
        "plan": case.plan,
        "op": case.op,
        "out_dtype": case.out_dtype,
        "bias": case.bias_values(),
        "wire": case.narrow,
        "runs": case.runs,
    }
    segment = collectives.SEGMENT_BYTES
    collectives.SEGMENT_BYTES = threshold or segment
    try:
        results: dict[str, Tensor] = {p: all_reduce(cover, group, placement=p, **options) for p in PLACEMENTS}
        if case.shape and case.shape[0] % group.size() == 0:
            results["reduce_scatter"] = reduce_scatter(cover, group, **options)
        dst = case.seed % group.size()
        root = reduce(cover, dst, group, **options)
    finally:
        collectives.SEGMENT_BYTES = segment
    assert (root is not None) == (group.rank() == dst)
    if root is not None:
        results["reduce"] = root
    assert_bitwise_equal(cover.values, before, "the input")
    return results


def cover_jobs(group: dist.ProcessGroup, cases: list[Case]) -> list[dict[str, Tensor]]:
    return [cover_job(group, case) for case in cases]


def check_cover_case(ranks: Pool, world: int, case: Case, threshold: int | None = None) -> None:
    check_cover_results(ranks.run(cover_job, world, case, threshold), world, case)


def check_cover_cases(ranks: Pool, world: int, cases: list[Case]) -> None:
    by_case = zip(*ranks.run(cover_jobs, world, cases), strict=True)
    for case, results in zip(cases, by_case, strict=True):
        check_cover_results(results, world, case)


def check_cover_results(results: Sequence[dict[str, Tensor]], world: int, case: Case) -> None:
    expected = case.root(world)
    for rank, result in enumerate(results):
        for placement in PLACEMENTS:
            assert_bitwise_equal(result[placement], expected, f"{placement}, rank {rank} of {world}, {case}")
    assert sum("reduce" in result for result in results) == 1
    for result in results:
        if "reduce" in result:
            assert_bitwise_equal(result["reduce"], expected, f"reduce, world {world}, {case}")
    if "reduce_scatter" in results[0]:
        parts = torch.cat([result["reduce_scatter"] for result in results])
        assert_bitwise_equal(parts, expected, f"reduce_scatter, world {world}, {case}")


# --- plain tensors --------------------------------------------------------------------------------------------------


@cache  # the slow part of these tests; the values do not depend on the world, and nobody writes them
def plain_value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return wide_exponents(shape, dtype, seed=rank)
    generator = torch.Generator().manual_seed(rank)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, dtype=dtype, generator=generator)


def plain_values(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [plain_value(rank, shape, dtype) for rank in range(world)]


def plain_job(group: dist.ProcessGroup, shapes: Any, dtypes: Any) -> list[Tensor]:
    results = []
    for shape in shapes:
        for dtype in dtypes:
            x = plain_value(group.rank(), shape, dtype)
            for op in OPS if dtype.is_floating_point else OPS[:1]:
                one_shot, two_shot = (all_reduce(x, group, op=op, placement=p) for p in PLACEMENTS)
                assert_bitwise_equal(two_shot, one_shot, "placements")
                results.append(one_shot)
    return results


@pytest.mark.parametrize("world", [2, 3, 5, 9, *long_cases(set(WORLDS) - {2, 3, 5, 9})])
def test_verify_all_reduce_equals_reference(ranks: Pool, world: int) -> None:
    for shapes, dtypes in ((SHAPES, FLOATS + INTEGERS), ((LONG,), (torch.float32, torch.bfloat16))):
        results = ranks.run(plain_job, world, shapes, dtypes)
        expected = []
        for shape in shapes:
            for dtype in dtypes:
                values = plain_values(world, shape, dtype)
                for op in OPS if dtype.is_floating_point else OPS[:1]:
                    expected.append(reference.all_reduce(values, op))
        for rank, result in enumerate(results):
            assert len(result) == len(expected)
            for got, want in zip(result, expected, strict=True):
                assert_bitwise_equal(got, want, f"rank {rank} of {world}, {want.dtype} {list(want.shape)}")


def control_job(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, list[Tensor]]:
    x = plain_value(group.rank(), LONG, torch.float32)
    gloo = x.clone()
    dist.all_reduce(gloo, group=group)
    lengths = (1, 7, 1000, 20_000, 65_536, 65_537)  # 256 KiB is where the placement changes
    return gloo, all_reduce(x, group), [all_reduce(x[:length], group) for length in lengths]


@pytest.mark.parametrize("world", [3, 4])
def test_verify_prefix_of_a_message(world: int) -> None:
    """An element's bits do not depend on the length of the message; gloo's order differs, so the data can tell."""
    gloo, whole, prefixes = run_ranks(control_job, world)[0]
    assert_bitwise_equal(whole, reference.all_reduce(plain_values(world, LONG, torch.float32)))
    assert_bits_differ(whole, gloo, f"gloo's own sum over {world} ranks")
    for prefix in prefixes:
        assert_bitwise_equal(prefix, whole[: len(prefix)], f"prefix of {len(prefix)}")


# --- covers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [3, 8, *long_cases(set(WORLDS) - {3, 8})])
def test_verify_placements_agree(ranks: Pool, world: int) -> None:
    """Every L from 1 to 33 with the runs of the plan (uneven, node lists of different lengths), known or exchanged."""
    cases = []
    for leaves in range(1, 34):
        if leaves < world:
            runs = tuple((min(rank, leaves), min(rank + 1, leaves)) for rank in range(world))
        else:
            runs = leaf_runs(leaves, leaves, world)
        owners = tuple(rank for rank, (lo, hi) in enumerate(runs) for _ in range(hi - lo))
        shape = (world, 3) if leaves % 2 else (5,)
        cases.append(Case(leaves, owners, shape, seed=leaves, runs=runs if leaves % 3 else None))
    check_cover_cases(ranks, world, cases)


@pytest.mark.long
@given(
    partition=leaf_partitions(max_leaves=33, max_parts=6),
    shape=st.sampled_from([(), (0,), (1,), (7,), (6, 5), (60,), (3, 2, 4)]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
    op=st.sampled_from(OPS),
    narrow=st.booleans(),
    bias=st.booleans(),
    low=st.booleans(),
    threshold=st.sampled_from([None, 8, 64]),
)
@settings(max_examples=60)
def test_verify_any_partition(
    ranks: Pool,
    partition: tuple[int, tuple[int, ...]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
    op: Op,
    narrow: bool,
    bias: bool,
    low: bool,
    threshold: int | None,
) -> None:
    """Any leaves on any rank, contiguous or not; every epilogue; messages cut in segments of a few elements."""
    leaves, owners = partition
    single = dtype == torch.float32
    out_dtype = (torch.bfloat16 if seed % 2 else torch.float16) if single else torch.float32
    case = Case(
        leaves,
        owners,
        shape,
        dtype,
        seed,
        op,
        out_dtype if low else None,
        bias and bool(shape),
        narrow and single,
    )
    check_cover_case(ranks, 1 + max(owners), case, threshold)


def test_verify_world_size_and_sharding(ranks: Pool) -> None:
    """Twelve leaves over 1..9 ranks: one result (layout-invariance); the rank-by-rank sum is another."""
    for narrow in (False, True):
        roots = []
        for world in WORLDS:
            runs = leaf_runs(12, 12, world)
            owners = tuple(rank for rank, (lo, hi) in enumerate(runs) for _ in range(hi - lo))
            case = Case(12, owners, (20_000,), seed=3, runs=runs, narrow=narrow, bias=True, out_dtype=torch.bfloat16)
            results = ranks.run(cover_job, world, case)
            roots += [result[placement] for result in results for placement in PLACEMENTS]
        for root in roots:
            assert_bitwise_equal(root, roots[0])
        assert_bitwise_equal(roots[0], case.root(1))
    wide = Case(12, (0,) * 12, (20_000,), seed=3)
    in_order = wide.leaf_values()[0]
    for leaf in wide.leaf_values()[1:]:
        in_order = in_order + leaf
    assert_bits_differ(wide.root(1), in_order, "summing leaves one after the other")


def subnormals(dtype: torch.dtype) -> Tensor:
    """1000 times a third of the bit pattern of the smallest normal number: twice that is subnormal too."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    smallest = torch.full((1000,), torch.finfo(dtype).smallest_normal, dtype=dtype)
    return smallest.view(bits).div(3, rounding_mode="floor").view(dtype)


def flush_job(group: dist.ProcessGroup) -> tuple[bool, list[Tensor]]:
    flushes = torch.set_flush_denormal(True)
    try:
        results = []
        for dtype in FLOATS:
            x = subnormals(dtype)
            results += [all_reduce(x, group, op=op) for op in OPS]
        subnormal = torch.full((2, 8), 3 << 16, dtype=torch.int32).view(torch.float32)  # also in bf16
        cover = Cover(subnormal[group.rank() :][:1], (Node(0, group.rank()),), 2)
        plan = TreePlan(leaves=2, wire_dtype="bfloat16")
        results.append(all_reduce(cover, group, plan=plan, wire=True, out_dtype=torch.bfloat16))
        return flushes, results
    finally:
        torch.set_flush_denormal(False)


def test_verify_subnormals_survive(ranks: Pool) -> None:
    """A process that flushes subnormals gets the bits of one that does not (A3)."""
    flushes, results = ranks.run(flush_job, 2)[0]
    if not flushes:
        pytest.skip("this CPU has no flush-to-zero mode that torch can set")
    expected = []
    for dtype in FLOATS:
        x = subnormals(dtype)
        expected += [reference.all_reduce([x, x], op) for op in OPS]
        assert (expected[-1] != 0).all()
    expected.append(torch.full((8,), 6, dtype=torch.int16).view(torch.bfloat16))
    for got, want in zip(results, expected, strict=True):
        assert_bitwise_equal(got, want)


# --- forms of input and output --------------------------------------------------------------------------------------


def forms_job(group: dist.ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    values = plain_values(world, (6, 10), torch.float32)
    expected = reference.all_reduce(values)
    x = values[rank]
    transposed = torch.empty(10, 6).t().copy_(x)
    assert not transposed.is_contiguous()
    assert_bitwise_equal(all_reduce(transposed, group), expected, "transposed")
    sliced = torch.zeros(6, 30)[:, ::3].copy_(x)
    assert_bitwise_equal(all_reduce(sliced, group, placement="two_shot"), expected, "strided")
    expanded = x[:1].expand(6, 10)
    assert_bitwise_equal(
        all_reduce(expanded, group), reference.all_reduce([v[:1].expand(6, 10) for v in values]), "expanded"
    )
    leaf = x.clone().requires_grad_()
    result = all_reduce(leaf, group)
    assert not result.requires_grad
    assert_bitwise_equal(result, expected, "requires_grad")
    for dtype in (torch.float32, torch.int32):
        own = torch.ones(3, dtype=dtype)
        all_reduce(own, group).zero_()
        assert (own == 1).all(), "the result is the input's memory"
    out = torch.empty(10, 6).t()
    assert all_reduce(x, group, out=out) is out
    assert_bitwise_equal(out, expected, "out")
    inplace = x.clone()
    assert all_reduce(inplace, group, out=inplace) is inplace
    assert_bitwise_equal(inplace, expected, "in place")
    rows = torch.empty(6 // world, 10)
    assert reduce_scatter(x, group, out=rows) is rows
    assert_bitwise_equal(rows, expected.chunk(world)[rank].clone(), "reduce_scatter out")
    assert_bitwise_equal(all_reduce(x, group, out_dtype=torch.bfloat16), expected.bfloat16(), "out_dtype")
    nan = torch.tensor([float("nan"), float("inf"), -0.0])
    nan.view(torch.int32)[0] = -1  # a NaN with sign and payload
    want = torch.tensor([float("nan"), float("inf"), -0.0])
    want.view(torch.int32)[0] = 0x7FC00000
    assert_bitwise_equal(all_reduce(nan, group), want, "NaN, infinity, -0")


@pytest.mark.parametrize("world", [1, 2, 3])
def test_verify_forms_of_input_and_output(ranks: Pool, world: int) -> None:
    ranks.run(forms_job, world)


class SumOfRanks(torch.autograd.Function):
    """As in tbik.nn: the result of a collective is an output of a function with a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, placement: Placement) -> Tensor:
        return all_reduce(x, group, placement=placement)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy, None, None


def editable_job(group: dist.ProcessGroup) -> None:
    """Results own their memory: autograd lets the caller edit them, as it does with every operator's."""
    world = group.size()
    x, weight = torch.ones(world, 6), torch.full((), 3.0, requires_grad=True)
    cover = Cover(x[None], (Node(0, group.rank()),), world)
    segment = collectives.SEGMENT_BYTES
    for collectives.SEGMENT_BYTES in (segment, 16):
        for result in (
            *(all_reduce(x, group, placement=placement) for placement in PLACEMENTS),
            all_reduce(x.int(), group),
            all_reduce(cover, group, bias=torch.zeros(6)),
            reduce_scatter(x, group),
            reduce_scatter(cover, group),
            reduce(x, 0, group),
        ):
            if result is None:
                continue
            assert not result._is_view()
            assert result.is_contiguous()
            if result.is_floating_point():
                result.mul_(weight).sum().backward()
                assert weight.grad is not None
                assert weight.grad == world * result.numel()
                weight.grad = None
        for placement in PLACEMENTS:
            leaf = x.clone().requires_grad_()
            y = SumOfRanks.apply(leaf, group, placement)  # type: ignore[no-untyped-call]
            y += 1.0
            y.mul_(2.0).sum().backward()
            assert_bitwise_equal(leaf.grad, torch.full_like(x, 2.0))  # type: ignore[arg-type]
    collectives.SEGMENT_BYTES = segment


@pytest.mark.parametrize("world", [1, 3])
def test_verify_results_can_be_edited_in_place(ranks: Pool, world: int) -> None:
    ranks.run(editable_job, world)


def bytes_job(group: dist.ProcessGroup) -> list[int]:
    plan, narrow = TreePlan(leaves=8), TreePlan(leaves=8, wire_dtype="bfloat16")
    run = ((0, 2), (2, 4), (4, 6), (6, 8))
    cover = Cover(torch.ones(1, 4000), tree.cover(*run[group.rank()]), 8)
    sent = []
    for placement in PLACEMENTS:
        for which in (plan, narrow):
            for _ in range(2):  # the first call also compares the plans
                reset_bytes_sent(group)
                all_reduce(cover, group, plan=which, runs=run, placement=placement, wire=True)
            sent.append(bytes_sent(group))
    return sent


def test_verify_bytes_sent(ranks: Pool) -> None:
    header = 16
    expected = [
        3 * (4000 * 4 + header),
        3 * (4000 * 2 + header),
        3 * (1000 * 4 + header) + 3 * 1000 * 4,
        3 * (1000 * 2 + header) + 3 * 1000 * 4,  # the results travel in the output dtype, fp32 here
    ]
    assert ranks.run(bytes_job, 4) == [expected] * 4


def test_verify_a_world_of_one_needs_no_group() -> None:
    case = Case(7, (0,) * 7, (33,), bias=True, out_dtype=torch.bfloat16)
    options: dict[str, Any] = {"plan": case.plan, "bias": case.bias_values(), "out_dtype": torch.bfloat16}
    assert_bitwise_equal(all_reduce(case.cover(0), **options), case.root(1))
    assert_bitwise_equal(reduce_scatter(case.cover(0), **options), case.root(1))
    with pytest.raises(PlanError, match="there is no process group"):
        all_reduce(torch.ones(3))
    with pytest.raises(PlanError, match=r"no rank holds leaves \[4, 8\)"):
        all_reduce(Cover(torch.ones(1, 3), (Node(2, 0),), 8))


# --- refusals: on all ranks, without waiting --------------------------------------------------------------------------


def refused(results: list[Outcome], *patterns: str) -> None:
    """Every rank raised a PlanError that says all of `patterns`, long before the group's timeout of 30 s."""
    for rank, result in enumerate(results):
        assert isinstance(result.error, PlanError), f"rank {rank}: {result}"
        assert result.elapsed < 10.0, f"rank {rank} took {result.elapsed:.1f} s"
        for pattern in patterns:
            assert pattern in str(result.error), f"rank {rank}: {pattern!r} not in {result.error}"


def refusal_of(group: dist.ProcessGroup, job: Callable[..., None], *args: Any) -> Outcome:
    """What job(group, *args) is refused with, as if it made the group's first calls; the rank lives on."""
    collectives._states.pop(group, None)
    start = time.monotonic()
    try:
        job(group, *args)
    except PlanError as error:
        return Outcome(error=error, elapsed=time.monotonic() - start)
    return Outcome()


def odd_one_out_job(
    group: dist.ProcessGroup, usual: dict[str, Any], odd: dict[str, Any], warm: bool, env: bool
) -> None:
    """Rank 1 makes the `odd` call where the others make the usual one; `warm`: after one call in common."""
    if env:
        os.environ["TBIK_CHECK"] = "1"
    try:
        arguments: dict[str, Any] = {"x": torch.ones(4), "plan": TreePlan()} | usual
        if warm:
            all_reduce(group=group, **arguments)
        try:
            all_reduce(group=group, **(arguments | (odd if group.rank() == 1 else {})))
        except PlanError:
            all_reduce(torch.ones(4), group)  # refused by all, so the ranks are still in step
            raise
    finally:
        os.environ.pop("TBIK_CHECK", None)


ODD = {
    "plan": ({"plan": TreePlan(leaves=16)}, ("plan:", "on ranks 0, 2", "on rank 1", '"leaves":16')),
    "shape": ({"x": torch.ones(5)}, ("shape: [4] on ranks 0, 2; [5] on rank 1",)),
    "dtype": ({"x": torch.ones(4).bfloat16()}, ("dtype: torch.float32 on ranks 0, 2; torch.bfloat16 on rank 1",)),
    "op": ({"op": "avg"}, ("op: sum on ranks 0, 2; avg on rank 1",)),
    "placement": ({"placement": "two_shot"}, ("placement: auto on ranks 0, 2; two_shot on rank 1",)),
    "out_dtype": ({"out_dtype": torch.bfloat16}, ("out_dtype: torch.float32 on ranks 0, 2; torch.bfloat16 on rank 1",)),
    "bias": ({"bias": torch.ones(4)}, ("bias: no on ranks 0, 2; torch.float32 on rank 1",)),
    "digest of the bias": (
        {"bias": torch.tensor([0.0, 0.0, -0.0, 0.0])},
        ("digest of the bias: none on ranks 0, 2; ", " on rank 1"),
    ),
    "complex": ({"x": torch.ones(4, dtype=torch.complex64)}, ("rank 1 refuses", "complex64", "view_as_real")),
    "bool": ({"x": torch.ones(4, dtype=torch.bool)}, ("rank 1 refuses", "torch.bool", "float32")),
    "cover": (
        {"x": Cover(torch.ones(1, 4), (Node(0, 1),), 8)},
        ("input: plain tensor on ranks 0, 2; cover on rank 1",),
    ),
}


def test_verify_plan_mismatch_is_refused() -> None:
    odd, patterns = ODD["plan"]
    refused(outcomes(odd_one_out_job, 3, {}, odd, False, False), *patterns)


@pytest.mark.parametrize("name", [name for name in ODD if name != "plan"])
def test_verify_first_call_mismatch_is_refused(ranks: Pool, name: str) -> None:
    odd, patterns = ODD[name]
    refused(ranks.run(refusal_of, 3, odd_one_out_job, {}, odd, False, False), *patterns)


@pytest.mark.parametrize("name", list(ODD))
def test_verify_checked_call_mismatch_is_refused(ranks: Pool, name: str) -> None:
    odd, patterns = ODD[name]
    refused(ranks.run(refusal_of, 3, odd_one_out_job, {}, odd, True, True), *patterns)


@pytest.mark.parametrize("name", ["op", "out_dtype", "bias", "digest of the bias"])
def test_verify_later_mismatch_is_seen_in_the_messages(ranks: Pool, name: str) -> None:
    """Messages of equal size begin with a digest of the call, so no check has to be switched on."""
    odd, patterns = ODD[name]
    refused(ranks.run(refusal_of, 3, odd_one_out_job, {}, odd, True, False), *patterns)
    refused(ranks.run(refusal_of, 3, odd_one_out_job, {"placement": "two_shot"}, odd, True, False), *patterns)


def other_bias_job(group: dist.ProcessGroup) -> None:
    """Biases of one dtype and other bits (here the sign of a zero) are noticed in any call, first or later."""
    x, bias = torch.ones(4), torch.zeros(4)
    odd = bias.clone()
    odd[2] = -0.0
    for _ in range(2):
        for placement in PLACEMENTS:
            for call in (all_reduce, reduce_scatter):
                options: dict[str, Any] = {"placement": placement} if call is all_reduce else {}
                with pytest.raises(PlanError, match=r"digest of the bias: \w+ on ranks 0, 2, 3; \w+ on rank 1"):
                    call(x, group, bias=odd if group.rank() == 1 else bias, **options)
        assert_bitwise_equal(all_reduce(x, group, bias=bias.clone()), torch.full((4,), 4.0))


def test_verify_other_bits_of_the_bias_are_refused() -> None:
    run_ranks(other_bias_job, 4)


def threads_job(group: dist.ProcessGroup) -> None:
    """While one thread is in a call, another thread's call on the group is refused, and the first one succeeds."""
    rank = group.rank()
    all_reduce(torch.ones(4), group)
    entered = threading.Event()
    results = []

    def first() -> None:
        entered.set()
        results.append(all_reduce(torch.ones(4), group))  # rank 0 waits here for rank 1

    if rank == 0:
        thread = threading.Thread(target=first)
        thread.start()
        entered.wait()
        end = time.monotonic() + 10.0
        while not collectives._states[group].lock.locked():
            assert time.monotonic() < end
            time.sleep(0.001)
        for x in (torch.ones(4), Cover(torch.ones(1, 4), (Node(0, 0),), 2), "x"):
            with pytest.raises(PlanError, match="another call on this group has not ended"):
                all_reduce(x, group)  # type: ignore[arg-type]
        dist.send(torch.ones(1), 1)
        thread.join()
    else:
        dist.recv(torch.ones(1), 0)
        results.append(all_reduce(torch.ones(4), group))
    assert_bitwise_equal(results[0], torch.full((4,), 2.0))
    assert_bitwise_equal(all_reduce(torch.ones(4), group), torch.full((4,), 2.0))


def test_verify_a_second_thread_is_refused() -> None:
    run_ranks(threads_job, 2, timeout=15.0)


def other_runs_job(group: dist.ProcessGroup, odd: bool) -> None:
    rank = group.rank()
    all_reduce(torch.ones(4), group, plan=TreePlan(leaves=3))
    runs = [(0, 1), (1, 2), (2, 3)]
    cover = Cover(torch.ones(1, 4), (Node(0, rank),), 3)
    all_reduce(cover, group, plan=TreePlan(leaves=3), runs=runs[::-1] if odd and rank == 1 else runs)


def test_verify_runs_mismatch_is_refused(ranks: Pool) -> None:
    assert ranks.run(refusal_of, 3, other_runs_job, False) == [Outcome()] * 3
    results = ranks.run(refusal_of, 3, other_runs_job, True)
    refused(results, "runs: ((0, 1), (1, 2), (2, 3)) on ranks 0, 2; ((2, 3), (1, 2), (0, 1))")


def all_refuse_job(group: dist.ProcessGroup, what: str) -> None:
    rank = group.rank()
    if what == "avg":
        all_reduce(torch.ones(4, dtype=torch.int64), group, op="avg")
    elif what == "overlap":
        all_reduce(Cover(torch.ones(1, 4), (Node(0, min(rank, 1)),), 3), group)
    elif what == "missing":
        all_reduce(Cover(torch.ones(1, 4), (Node(0, rank),), 4), group)
    elif what == "runs":
        all_reduce(Cover(torch.ones(1, 4), (Node(0, rank),), 3), group, runs=[(0, 1), (1, 2), (1, 3)])
    elif what == "shape of runs":
        all_reduce(Cover(torch.ones(1, 4), (Node(0, rank),), 3), group, runs=[0, 1, 2])  # type: ignore[list-item]
    elif what == "my run":
        all_reduce(Cover(torch.ones(1, 4), (Node(0, rank),), 3), group, runs=[(1, 2), (2, 3), (0, 1)])
    elif what == "scatter":
        reduce_scatter(torch.ones(4, 2), group)
    elif what == "acc_dtype":
        all_reduce(Cover(torch.ones(1, 4).double(), (Node(0, rank),), 3), group, plan=TreePlan(leaves=3))
    elif what == "leaves":
        all_reduce(Cover(torch.ones(1, 4), (Node(0, rank),), 3), group, plan=TreePlan(leaves=6))
    elif what == "wire":
        values = torch.full((1, 4), 1.0 if rank else 1.0 + 2**-20)
        plan = TreePlan(leaves=3, wire_dtype="bfloat16")
        all_reduce(Cover(values, (Node(0, rank),), 3), group, plan=plan, wire=True)
    elif what == "out":
        all_reduce(torch.ones(4), group, out=torch.ones(5))
    elif what == "bias":
        all_reduce(torch.ones(4, 2), group, bias=torch.ones(4))
    elif what == "dst":
        reduce(torch.ones(4), 3, group)


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("avg", "the average of torch.int64 is not defined; use op='sum' or convert"),
        ("overlap", "leaf 1 of 3 is held twice, by ranks 1 and 2"),
        ("missing", "no rank holds leaves [3, 4) of 4"),
        ("runs", "leaf 1 of 3 is held twice, by ranks 1 and 2"),
        ("shape of runs", "expected one (lo, hi) of leaves per rank, in integers, got [0, 1, 2]"),
        ("my run", "rank 0 holds [(0, 0)], but its run says [(0, 1)]"),
        ("scatter", "3 ranks do not divide dimension 0 of the root, [4, 2]"),
        ("acc_dtype", "the plan's acc_dtype is float32, the cover holds torch.float64"),
        ("leaves", "the plan has 6 leaves, the cover is of 3"),
        ("wire", "rank 0 refuses: all_reduce: wire=True needs node values that are bf16 values already"),
        ("out", "expected out of torch.float32 [4]"),
        ("bias", "expected a dense floating-point bias of [2] on cpu"),
        ("dst", "dst must be a rank of the group, 0..2, got 3"),
    ],
)
def test_verify_unsupported_calls_are_refused(ranks: Pool, what: str, pattern: str) -> None:
    refused(ranks.run(refusal_of, 3, all_refuse_job, what), pattern)


class Unreadable:
    """An argument that no check of types expects."""

    def __eq__(self, other: object) -> bool:
        raise OSError("unreadable")

    __hash__ = None  # type: ignore[assignment]


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(4)])


UNTYPED: list[tuple[str, Any, str]] = [
    ("plan", "x", "plan must be a TreePlan or None, got 'x'"),
    ("plan", [], "plan must be a TreePlan or None, got []"),
    ("op", [], "op must be 'sum' or 'avg', got []"),
    ("op", Unreadable(), "cannot read the arguments: OSError: unreadable"),
    ("placement", None, "placement must be"),
    ("wire", "no", "wire must be True or False, got 'no'"),
    ("bias", [1.0] * 4, "expected a dense floating-point bias of [4] on cpu for a floating-point root"),
    ("bias", torch.ones(4, device="meta"), "on meta"),
    ("bias", torch.ones(4).to_sparse(), "torch.sparse_coo on cpu"),
    ("bias", nested, "got a nested tensor"),
    ("out_dtype", "float32", "got out_dtype='float32'"),
    ("out_dtype", 0, "got out_dtype=0"),
    ("out", [0.0] * 4, "expected out of torch.float32 [4], dense and on cpu, got list"),
    ("out", torch.ones(4).to_sparse(), "torch.sparse_coo on cpu"),
    ("out", torch.ones(4, device="meta"), "on meta"),
    ("x", "x", "expected a dense CPU or CUDA tensor or a Cover, got str"),
    ("x", [1.0], "expected a dense CPU or CUDA tensor or a Cover, got list"),
    ("x", None, "expected a dense CPU or CUDA tensor or a Cover, got NoneType"),
    ("x", torch.ones(4, device="meta"), "on meta"),
    ("x", nested, "got a nested tensor"),
    ("x", torch.ones(4).to(torch.float8_e4m3fn), "torch.float8_e4m3fn has no sum here"),
    ("runs", 5, "runs: expected one (lo, hi) of leaves per rank, in integers, got 5"),
    ("runs", [(0, 1)], "runs belong to covers"),
    ("runs", [(0.5, 3.5)] * 3, "in integers, got [(0.5, 3.5)"),
    ("runs", ["01"] * 3, "in integers, got ['01'"),
    ("runs", [(False, True)] * 3, "in integers, got [(False, True)"),
    ("dst", "0", "dst must be a rank of the group, 0..2, got '0'"),
    ("dst", None, "dst must be a rank of the group, 0..2, got None"),
    ("dst", True, "dst must be a rank of the group, 0..2, got True"),
    ("dst", 1.0, "dst must be a rank of the group, 0..2, got 1.0"),
]


def untyped_job(group: dist.ProcessGroup) -> None:
    """Rank 1 passes something of another type in the first call; every rank hears what, and is still in step."""
    for name, value, pattern in UNTYPED:
        usual: dict[str, Any] = {"x": torch.ones(4)} | ({"dst": 0} if name == "dst" else {})
        odd = {name: value() if value is nested else value} if group.rank() == 1 else {}
        call: Any = reduce if name == "dst" else all_reduce
        with pytest.raises(PlanError) as caught:
            call(group=group, **(usual | odd))
        assert pattern in str(caught.value), f"{name}: {pattern!r} not in {caught.value}"
        assert "rank 1 refuses" in str(caught.value)
    assert_bitwise_equal(all_reduce(torch.ones(4), group), torch.full((4,), 3.0))


def test_verify_untyped_arguments_are_refused_on_all_ranks() -> None:
    run_ranks(untyped_job, 3, timeout=5.0)


def test_verify_out_needs_its_own_memory() -> None:
    """Refused unless the strides show that no two elements of `out` share memory."""
    cover = Cover(torch.ones(1, 3, 3), (Node(1, 0),), 2)
    for strides in ((1, 1), (0, 1), (1, 2), (2, 1)):
        with pytest.raises(PlanError, match="give each element its own memory"):
            all_reduce(cover, out=torch.zeros(9).as_strided((3, 3), strides))
    for strides in ((3, 1), (1, 3), (7, 2), (1, 5)):
        out = torch.zeros(19).as_strided((3, 3), strides)
        assert_bitwise_equal(all_reduce(cover, out=out), torch.ones(3, 3), str(strides))
    empty = Cover(torch.ones(1, 0, 3), (Node(1, 0),), 2)
    all_reduce(empty, out=torch.zeros(9).as_strided((0, 3), (0, 0)))
    single = Cover(torch.ones(1, 1, 3), (Node(1, 0),), 2)
    all_reduce(single, out=torch.zeros(9).as_strided((1, 3), (0, 2)))
    with torch.inference_mode():
        inference = torch.zeros(3, 3)
    with pytest.raises(PlanError, match="inference mode"):
        all_reduce(cover, out=inference)


def test_verify_pending_negations_are_resolved() -> None:
    negated = torch.complex(torch.zeros(3), torch.tensor([1.0, -2.0, 0.0])).conj().imag
    assert negated.is_neg()
    want = torch.tensor([-1.0, 2.0, -0.0])
    cover = Cover(negated[None], (Node(1, 0),), 2)
    assert_bitwise_equal(all_reduce(cover), want)
    plan = TreePlan(leaves=2, wire_dtype="bfloat16")
    resolved = Cover(want[None], cover.nodes, 2)
    assert_bitwise_equal(all_reduce(cover, plan=plan, wire=True), all_reduce(resolved, plan=plan, wire=True))
    zeros = Cover(torch.full((1, 3), -0.0), (Node(1, 0),), 2)
    assert_bitwise_equal(all_reduce(zeros, bias=negated), want)


def test_verify_a_tensor_of_a_transform_is_refused() -> None:
    def total(value: Tensor) -> Tensor:
        return all_reduce(Cover(value, (Node(1, 0),), 2))

    with pytest.raises(PlanError, match="inside a torch.func transform"):
        torch.func.vmap(total)(torch.ones(2, 1, 3))


def test_verify_cover_is_checked_at_construction() -> None:
    for values, nodes, leaves, pattern in (
        (torch.ones(2, 3), (Node(0, 0), Node(0, 1)), 4, "without siblings"),
        (torch.ones(2, 3), (Node(0, 2), Node(0, 1)), 4, "ascend"),
        (torch.ones(2, 3), (Node(1, 0), Node(0, 1)), 4, "overlap"),
        (torch.ones(1, 3), (Node(2, 1),), 7, "below leaf 7"),
        (torch.ones(2, 3), (Node(0, 0),), 4, "one value per node"),
        (torch.ones(1, 3).bfloat16(), (Node(0, 0),), 4, "float32 or float64"),
        (torch.ones(1, 3), (Node(0, 0),), 0, ">= 1"),
        (torch.ones(1, 3), (Node(0, 0),), 2.0, "an integer >= 1"),
        (torch.ones(1, 3), (Node(0, 0),), 2**70, "an integer >= 1 and <="),
        ([1.0], (Node(0, 0),), 4, "expected a tensor, got list"),
        (torch.ones(1, 3), 3, 4, "in integers, got 3"),
        (torch.ones(1, 3), (3,), 4, "in integers"),
        (torch.ones(1, 3), ((0, 0, 0),), 4, "in integers"),
        (torch.ones(1, 3), ((0.5, 0),), 4, "in integers"),
        (torch.ones(1, 3), (("a", []),), 4, "in integers"),
        (torch.ones(1, 3), ((10**12, 0),), 4, "below leaf 4"),
        (torch.ones(1, 3), ((-1, 0),), 4, "below leaf 4"),
    ):
        with pytest.raises(PlanError, match=pattern):
            Cover(values, nodes, leaves)  # type: ignore[arg-type]


# --- failures: an error within the timeout, the input as it was -------------------------------------------------------


def failing_job(group: dist.ProcessGroup, how: str, placement: Placement) -> tuple[str, float, bool, str]:
    x = torch.arange(30_000.0)
    all_reduce(x, group, placement=placement)
    if group.rank() == 1:
        if how == "killed":
            os._exit(1)
        return "", 0.0, True, ""  # its process lives on
    mine = x.clone()
    start = time.monotonic()
    try:
        all_reduce(mine, group, placement=placement, out=mine)
    except TransportError as error:
        elapsed = time.monotonic() - start
        try:
            all_reduce(mine, group)
        except TransportError as again:
            return f"{type(error).__name__}: {error}", elapsed, bool((mine == x).all()), str(again)
    raise AssertionError("a collective without rank 1 succeeded")


@pytest.mark.parametrize("placement", ["one_shot", "two_shot"])
@pytest.mark.parametrize("how", ["killed", "absent"])
def test_verify_failed_call_leaves_input_unchanged(how: str, placement: str) -> None:
    results = outcomes(failing_job, 3, how, placement, timeout=TIMEOUT_S)
    assert isinstance(results[1].error, RankDied) == (how == "killed")
    for rank in (0, 2):
        text, elapsed, unchanged, again = results[rank].value
        assert elapsed < TIMEOUT_S + 1.0
        assert unchanged
        for part in ("all_reduce, call 2", f"rank {rank} of 3", "phase 'all-", f"limit {TIMEOUT_S:.2f} s", "unchanged"):
            assert part in text, text
        assert "an earlier call on this group failed" in again
    if how == "absent":
        assert any(results[rank].value[0].startswith(TransportTimeout.__name__) for rank in (0, 2))


def lifetime_job(group: dist.ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    for _ in range(2):
        other = dist.new_group(list(range(world)))
        assert bytes_sent(other) == 0
        all_reduce(torch.ones(4), other)
        assert bytes_sent(other) > 0
        alive = weakref.ref(other)
        states = len(collectives._states)
        dist.destroy_process_group(other)
        del other
        gc.collect()
        assert alive() is None
        assert len(collectives._states) == states - 1
    case = Case(5, (0,) * 5, (3,), runs=((0, 5),))  # one run: this rank alone, though there is a default group
    assert_bitwise_equal(all_reduce(case.cover(0), plan=case.plan, runs=case.runs), case.root(1))
    single = dist.new_group([0])
    if rank == 0:
        assert_bitwise_equal(all_reduce(torch.ones(4), single), torch.ones(4))
    else:
        with pytest.raises(PlanError, match="this rank belongs to"):
            all_reduce(torch.ones(4), single)


def test_verify_state_dies_with_the_group() -> None:
    run_ranks(lifetime_job, 2)
