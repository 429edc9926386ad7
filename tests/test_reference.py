"""The oracle against exact arithmetic, against its own written definition, and in every layout."""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import mpmath
import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import SHAPES, Problem, problems, wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tbik import reference, tree
from tbik.errors import PlanError
from tbik.plan import TreePlan
from tbik.tree import Node

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INF, NAN = float("inf"), float("nan")
MIN_NORMAL = 2.0**-126


def plan_for(dtype: torch.dtype, leaves: int, **fields: str) -> TreePlan:
    return TreePlan(leaves=leaves, acc_dtype="float64" if dtype == torch.float64 else "float32", **fields)


def fp32(value: float) -> float:
    """RN24 of a double. Rounding a sum, product, quotient or root of two floats twice like this is rounding it once."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(INF, value)


def random_floats(count: int, lowest: int, highest: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exponents uniform in [lowest, highest] (-127: subnormal); half of the mantissas lie next to a power of two."""
    bits, bias, integer = (23, 127, torch.int32) if dtype == torch.float32 else (52, 1023, torch.int64)
    generator = torch.Generator().manual_seed(seed)

    def draw(first: int, end: int) -> Tensor:
        return torch.randint(first, end, (count,), generator=generator)

    mantissa = torch.stack([draw(0, 2**bits), draw(0, 2**bits), draw(0, 3), 2**bits - 1 - draw(0, 3)])
    mantissa = mantissa.gather(0, draw(0, 4)[None])[0]
    magnitude = (draw(lowest + bias, highest + bias + 1) << bits) | mantissa
    values = magnitude.to(integer).view(dtype)
    return torch.where(draw(0, 2) == 1, -values, values)


# --- fused multiply-add against rational numbers --------------------------------------------------------------------


def round_to_24_bits(exact: Fraction) -> Fraction:
    """RN24 with an unbounded exponent."""
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(exact / unit) * unit


def exact_fma32(a: float, b: float, c: float) -> float:
    """A1 and A2 in rational numbers: x86 FTZ+DAZ, i.e. tininess is detected after rounding with unbounded exponent."""
    a, b, c = (math.copysign(0.0, v) if abs(v) < MIN_NORMAL else v for v in (a, b, c))
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    rounded = round_to_24_bits(exact)
    sign = -1.0 if exact < 0 else 1.0
    if abs(rounded) < Fraction(2) ** -126:
        return sign * 0.0
    return sign * INF if abs(rounded) >= Fraction(2) ** 128 else float(rounded)


def exact_fma64(a: float, b: float, c: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c  # not a*b + c: a finite product may overflow in a double
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return c + math.copysign(0.0, a) * math.copysign(1.0, b) if a == 0 or b == 0 else 0.0
    try:
        return float(exact)
    except OverflowError:
        return -INF if exact < 0 else INF


def assert_same_but_nan(actual: Tensor, expected: Tensor, what: str) -> None:
    """Same bits; inside a chain every NaN is as good as another (A7 makes it canonical at the root)."""
    assert_bitwise_equal(torch.isnan(actual), torch.isnan(expected), what)
    assert_bitwise_equal(torch.nan_to_num(actual, 0.0, INF, -INF), torch.nan_to_num(expected, 0.0, INF, -INF), what)


SPECIAL32 = (
    0.0,
    2.0**-149,
    2.0**-127,
    MIN_NORMAL,
    MIN_NORMAL * (2 - 2**-23),
    2.0**-63,
    1.0,
    3.0,
    2.0**64,
    fp32(3.4e38),
    INF,
)
SPECIAL64 = (0.0, 2.0**-1074, 2.0**-1022, 2.0**-511, 1.0, 3.0, 2.0**512, 1.7e308, INF)


def triples(specials: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    signed = [*specials, *(-v for v in specials), NAN]
    a, b, c = zip(*itertools.product(signed, repeat=3), strict=True)
    return torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), torch.tensor(c, dtype=dtype)


def check_fma(
    fma: Callable[..., Tensor], exact: Callable[..., float], abc: tuple[Tensor, Tensor, Tensor], what: str
) -> None:
    expected = torch.tensor(
        [exact(*values) for values in zip(*(t.tolist() for t in abc), strict=True)], dtype=abc[0].dtype
    )
    assert_same_but_nan(fma(*abc), expected, what)


@pytest.mark.parametrize(
    ("factors", "addend"),
    [
        ((-64, -61), (-127, -125)),  # product and addend at the flush boundary
        ((-65, -62), (-130, -120)),
        ((-127, 0), (-127, -100)),  # subnormal operands
        ((-30, 30), (-60, 60)),
        ((-13, 13), (-51, 51)),  # far apart: the sticky bit decides
        ((50, 70), (110, 127)),  # overflow
    ],
)
def test_verify_fma32_against_rational_numbers(factors: tuple[int, int], addend: tuple[int, int]) -> None:
    count = 8000
    a, b = random_floats(count, *factors, seed=1), random_floats(count, *factors, seed=2)
    c = random_floats(count, max(addend[0], -127), addend[1], seed=3)
    check_fma(reference.fma32, exact_fma32, (a, b, c), f"fma32 {factors} {addend}")


def test_verify_fma32_at_the_flush_boundary() -> None:
    """a*b + c within a few units of 2^-126 on both sides: where rounding decides about the flush."""
    count = 8000
    a, b = random_floats(count, -64, -62, seed=4), random_floats(count, -64, -62, seed=5)
    target = MIN_NORMAL * (1 + torch.randint(-4, 5, (count,), generator=torch.Generator().manual_seed(6)) * 2.0**-26)
    c = (target - a.double() * b.double()).to(torch.float32)
    results = reference.fma32(a, b, c)
    assert 0.05 < (results == 0).double().mean() < 0.95 and bool((results.abs() == MIN_NORMAL).any())
    check_fma(reference.fma32, exact_fma32, (a, b, c), "fma32 at the boundary")


def test_verify_fma32_special_values() -> None:
    check_fma(reference.fma32, exact_fma32, triples(SPECIAL32, torch.float32), "fma32 of special values")


@pytest.mark.parametrize(
    ("factors", "addend"),
    [
        ((-30, 30), (-60, 60)),
        ((-30, 30), (-140, 140)),
        ((-540, -500), (-1023, -990)),  # subnormal results
        ((-460, -440), (-1023, -880)),
        ((480, 520), (1000, 1023)),  # overflow
        ((-1023, 1023), (-1023, 1023)),
    ],
)
def test_verify_fma64_against_rational_numbers(factors: tuple[int, int], addend: tuple[int, int]) -> None:
    count = 4000
    a, b = (random_floats(count, *factors, seed=s, dtype=torch.float64) for s in (1, 2))
    c = random_floats(count, *addend, seed=3, dtype=torch.float64)
    check_fma(reference.fma64, exact_fma64, (a, b, c), f"fma64 {factors} {addend}")
    cancelling = -(a * b) + c * 2.0**-60
    check_fma(reference.fma64, exact_fma64, (a, b, cancelling), f"fma64 {factors}, cancelling")


def test_verify_fma64_special_values() -> None:
    check_fma(reference.fma64, exact_fma64, triples(SPECIAL64, torch.float64), "fma64 of special values")


# --- chain, wire, epilogue ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_chain_definition(dtype: torch.dtype) -> None:
    a, b = wide_exponents((3, 50), dtype, seed=1), wide_exponents((2, 50), dtype, seed=2)
    exact_fma = exact_fma64 if dtype == torch.float64 else exact_fma32
    expected = torch.zeros(3, 2, dtype=torch.float64)
    for m, n in itertools.product(range(3), range(2)):
        acc = 0.0
        for k in range(50):
            acc = exact_fma(a[m, k].item(), b[n, k].item(), acc)
        expected[m, n] = acc + 0.0
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    assert_bitwise_equal(reference.chain(a, b), expected.to(acc_dtype), "chain")
    assert_bits_differ(reference.chain(a.flip(1), b.flip(1)), expected.to(acc_dtype), "reversed chain")


@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_chain_has_no_negative_zero(dtype: torch.dtype) -> None:
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    a, b = torch.tensor([[-0.0, -0.0]], dtype=dtype), torch.tensor([[1.0, 2.0]], dtype=dtype)
    zero = torch.zeros(1, 1, dtype=acc_dtype)
    assert_bitwise_equal(reference.chain(a, b), zero, "-0")
    assert_bitwise_equal(reference.chain(a[:, :0], b[:, :0]), zero, "empty")
    if acc_dtype == torch.float32:  # the flush makes -0 out of a tiny negative product
        tiny = torch.full((1, 1), -MIN_NORMAL)
        assert_bitwise_equal(reference.chain(tiny, -tiny), zero, "flushed")
        assert reference.fma32(tiny, -tiny, torch.full((1, 1), -0.0)).view(torch.int32).item() == -(2**31)


def test_verify_round_wire() -> None:
    upper = torch.arange(2**16, dtype=torch.int32) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    x = (upper[:, None] + lower).view(torch.float32)
    rounded = reference.round_wire(x)
    number = ~torch.isnan(x)
    assert_bitwise_equal(rounded[number], (x.to(torch.bfloat16).float() + 0.0)[number], "ties to even, no -0")
    assert bool(torch.isnan(rounded[~number]).all())
    assert not bool(((rounded == 0) & torch.signbit(rounded)).any())
    assert bool(((rounded.abs() > 0) & (rounded.abs() < MIN_NORMAL)).any()), "bf16 subnormals survive"


def test_verify_epilogue_order_and_nan() -> None:
    root, bias = wide_exponents((4, 9), torch.float32, 1), wide_exponents((9,), torch.bfloat16, 2)
    expected = (root / torch.full_like(root, 3.0) + bias.float()).to(torch.bfloat16)
    assert_bitwise_equal(reference.epilogue(root, bias, avg=3, out_dtype=torch.bfloat16), expected, "epilogue")
    odd_nans = torch.tensor([0x7F800001, -1, 0x7FFFFFFF, -0x400000], dtype=torch.int32).view(torch.float32)
    canonical = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
    for dtype, pattern in canonical.items():
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        values = reference.epilogue(odd_nans, out_dtype=dtype)
        assert_bitwise_equal(values.view(integer), torch.full((4,), pattern, dtype=integer), f"NaN as {dtype}")
    wide = reference.epilogue(torch.full((1,), -NAN, dtype=torch.float64))
    assert wide.view(torch.int64).item() == 0x7FF8000000000000
    with pytest.raises(PlanError, match="integers"):
        reference.epilogue(torch.ones(2, dtype=torch.int32), avg=2)
    with pytest.raises(PlanError, match="round"):
        reference.epilogue(torch.ones(2, dtype=torch.float64), out_dtype=torch.bfloat16)


# --- linear layers in every layout ----------------------------------------------------------------------------------


def partitions(leaves: int, seed: int) -> list[tuple[int, int]]:
    """Some split of [0, leaves) into runs, some of them empty."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(0, leaves + 1, (3,), generator=generator).sort().values.tolist()
    return [*itertools.pairwise([0, *inner, leaves])]


def folded(covers: list[dict[Node, Tensor]], leaves: int, seed: int, rounds: bool = False) -> Tensor:
    """The root of covers that arrive in some order."""
    order = torch.randperm(len(covers), generator=torch.Generator().manual_seed(seed)).tolist()
    return reference.fold_covers([covers[i] for i in order], leaves, rounds)


def check_linear_layouts(problem: Problem, seed: int) -> None:
    m, n, k, leaves, dtype = problem
    x, w = wide_exponents((m, k), dtype, seed), wide_exponents((n, k), dtype, seed + 1)
    plan = plan_for(dtype, leaves)
    whole = reference.linear(x, w, plan)
    covers = [reference.linear(x, w, plan, leaf_range=run) for run in partitions(leaves, seed)]
    assert_bitwise_equal(folded(covers, leaves, seed), whole, f"linear {problem}")
    cuts = plan.cuts(k)
    leaf_values = [reference.chain(x[:, lo:hi], w[:, lo:hi]) for lo, hi in itertools.pairwise(cuts)]
    assert_bitwise_equal(canonical_sum(leaf_values), whole, f"linear {problem}, by the recursion of T2")


def canonical_sum(values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    half = max(2**e for e in range(20) if 2**e < len(values))
    return canonical_sum(values[:half]) + canonical_sum(values[half:])


@pytest.mark.parametrize("problem", SHAPES[:8], ids=str)
def test_verify_linear_layouts(problem: Problem) -> None:
    for dtype in DTYPES[:2]:
        check_linear_layouts(problem._replace(dtype=dtype), seed=problem.k)


@given(problems(max_k=40), st.integers(0, 1000))
@settings(max_examples=40)
def test_verify_linear_any_problem(problem: Problem, seed: int) -> None:
    check_linear_layouts(problem, seed)


def test_verify_linear_leading_dimensions_bias_and_cast() -> None:
    x, w, bias = (wide_exponents(s, torch.bfloat16, i) for i, s in enumerate([(2, 3, 40), (5, 40), (5,)]))
    plan = TreePlan(leaves=4)
    y = reference.linear(x, w, plan, bias, torch.bfloat16)
    root = reference.linear(x.reshape(6, 40), w, plan)
    assert_bitwise_equal(y.reshape(6, 5), (root + bias.float()).to(torch.bfloat16), "bias in fp32, one cast")
    assert_bitwise_equal(reference.linear(x[1, 2], w, plan), root[5], "a row alone")


def test_verify_wire_rounds_leaves_nodes_and_root() -> None:
    x, w = wide_exponents((4, 96), torch.float32, 1), wide_exponents((5, 96), torch.float32, 2)
    plan = TreePlan(leaves=6, wire_dtype="bfloat16")
    rounded = reference.linear(x, w, plan, round_wire=True)
    for runs in ([(0, 6)], [(0, 3), (3, 6)], [(0, 1), (1, 5), (5, 6)]):
        covers = [reference.linear(x, w, plan, leaf_range=run, round_wire=True) for run in runs]
        assert all(bool((v.view(torch.int32) & 0xFFFF == 0).all()) for cover in covers for v in cover.values())
        assert_bitwise_equal(folded(covers, 6, 3, rounds=True), rounded, f"wire {runs}")
    assert_bits_differ(rounded, reference.linear(x, w, plan), "wire_dtype changes bits")
    exact = TreePlan(leaves=6)
    assert_bitwise_equal(
        reference.linear(x, w, exact, round_wire=True), reference.linear(x, w, exact), "no wire_dtype, no rounding"
    )


def test_verify_linear_dx_is_one_chain_per_leaf() -> None:
    plan = TreePlan(leaves=5)
    dys = [wide_exponents((4, n), torch.bfloat16, n) for n in (20, 15, 11)]
    ws = [wide_exponents((n, 7), torch.bfloat16, 100 + n) for n in (20, 15, 11)]
    whole = reference.linear_dx(dys, ws, plan)
    leaf_values = []
    for i in range(5):
        acc = torch.zeros(4, 7)
        for dy, w in zip(dys, ws, strict=True):
            for n in range(*plan.cuts(w.shape[0])[i : i + 2]):
                acc = reference.fma32(dy[:, n, None].float(), w[None, n, :].float(), acc)
        leaf_values.append(acc + 0.0)
    assert_bitwise_equal(whole, canonical_sum(leaf_values), "group dX")
    covers = [reference.linear_dx(dys, ws, plan, leaf_range=run) for run in ((3, 5), (0, 3))]
    assert_bitwise_equal(folded(covers, 5, 1), whole, "sharded group dX")
    apart = [reference.linear_dx([dy], [w], plan) for dy, w in zip(dys, ws, strict=True)]
    assert_bits_differ(apart[0] + apart[1] + apart[2], whole, "one tree per member is another order")
    assert_bitwise_equal(apart[0], reference.linear(dys[0], ws[0].T, plan), "a group of one is a linear over N")


def test_verify_linear_dw_samples_and_blocks() -> None:
    plan = TreePlan(leaves=8)
    offsets = [2, 2, 515, 515 + 1030, 515 + 1031]  # tokens 0 and 1 are padding, sample 0 has no token
    dy, x = wide_exponents((1550, 3), torch.bfloat16, 1), wide_exponents((1550, 4), torch.bfloat16, 2)
    dw = reference.linear_dw(dy, x, offsets, plan)

    def block(lo: int, hi: int) -> Tensor:
        acc = torch.zeros(3, 4)
        for t in range(lo, hi):
            acc = reference.fma32(dy[t, :, None].float(), x[t, None, :].float(), acc)
        return acc + 0.0

    samples = [
        torch.zeros(3, 4),
        block(2, 514) + block(514, 515),
        (block(515, 1027) + block(1027, 1539)) + block(1539, 1545),
        block(1545, 1546),
    ]
    assert_bitwise_equal(dw, (samples[0] + samples[1]) + (samples[2] + samples[3]), "dW")
    covers = [reference.linear_dw(dy, x, offsets, plan, run) for run in ((1, 3), (0, 1), (3, 4))]
    assert_bitwise_equal(folded(covers, 4, 1), dw, "dW in micro-batches")
    assert_bits_differ(reference.chain(dy.T, x.T), dw, "one flat chain over all tokens")
    ones = torch.ones(1550, 1, dtype=torch.bfloat16)
    assert_bitwise_equal(
        reference.bias_grad(dy, offsets, plan), reference.linear_dw(dy, ones, offsets, plan)[:, 0], "bias: b_k = 1"
    )
    rounded = reference.linear_dw(dy, x, offsets, TreePlan(leaves=8, grad_wire_dtype="bfloat16"))
    once = [reference.round_wire(sample) for sample in samples]
    left, right = reference.round_wire(once[0] + once[1]), reference.round_wire(once[2] + once[3])
    assert_bitwise_equal(rounded, reference.round_wire(left + right), "grad_wire_dtype rounds from the sample upwards")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_verify_all_reduce(dtype: torch.dtype, world: int) -> None:
    values = [wide_exponents((200,), dtype, rank, spread=24) for rank in range(world)]
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    root = canonical_sum([v.to(acc_dtype) for v in values])
    assert_bitwise_equal(reference.all_reduce(values), root.to(dtype), "sum")
    average = (root / torch.full_like(root, world)).to(dtype)
    assert_bitwise_equal(reference.all_reduce(values, "avg"), average, "average")
    if world > 3 and dtype in (torch.float32, torch.float64):
        assert_bits_differ(reference.all_reduce(values[1:] + values[:1]), root, "ranks numbered from another start")


def test_verify_all_reduce_of_integers() -> None:
    values = [torch.tensor([2**31 - 1, 5], dtype=torch.int32), torch.tensor([1, -7], dtype=torch.int32)]
    assert reference.all_reduce(values).tolist() == [-(2**31), -2]
    with pytest.raises(PlanError, match="avg"):
        reference.all_reduce(values, "avg")


def test_validate_data_shows_the_order() -> None:
    """Negative control of this file: on its data, in-order, reversed and tree sums have different bits."""
    x, w = wide_exponents((16, 257), torch.float32, 1), wide_exponents((16, 257), torch.float32, 2)
    in_order, backwards = reference.chain(x, w), reference.chain(x.flip(1), w.flip(1))
    assert_bits_differ(in_order, backwards, "in order and reversed")
    assert_bits_differ(in_order, reference.linear(x, w, TreePlan(leaves=8)), "in order and tree")
    assert_bits_differ(in_order, reference.linear(x, w, TreePlan(leaves=4)), "in order and another tree")


@pytest.mark.parametrize(
    "call",
    [
        lambda: reference.linear(torch.ones(2, 3), torch.ones(2, 4), TreePlan()),
        lambda: reference.linear(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64), TreePlan()),
        lambda: reference.linear(torch.ones(2, 3).double(), torch.ones(2, 3).double(), TreePlan()),
        lambda: reference.linear(torch.ones(2, 3), torch.ones(2, 3), TreePlan(acc_dtype="float64")),
        lambda: reference.linear(torch.ones(2, 3), torch.ones(2, 3), TreePlan(leaves=2), leaf_range=(1, 3)),
        lambda: reference.linear(torch.ones(2, 3), torch.ones(2, 3), TreePlan(), torch.ones(2), leaf_range=(0, 1)),
        lambda: reference.linear(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3), TreePlan()),
        lambda: reference.linear_dx([torch.ones(2, 3)], [], TreePlan()),
        lambda: reference.linear_dx([torch.ones(2, 3)], [torch.ones(2, 3)], TreePlan()),
        lambda: reference.linear_dw(torch.ones(4, 3), torch.ones(5, 3), [0, 4], TreePlan()),
        lambda: reference.linear_dw(torch.ones(4, 3), torch.ones(4, 3), [0, 5], TreePlan()),
        lambda: reference.linear_dw(torch.ones(4, 3), torch.ones(4, 3), [3, 2], TreePlan()),
        lambda: reference.all_reduce([torch.ones(2), torch.ones(3)]),
        lambda: reference.round_wire(torch.ones(2, dtype=torch.float64)),
        lambda: reference.row_sum(torch.ones(2, dtype=torch.float64)),
        lambda: reference.rms_norm(torch.ones(2, 3), torch.ones(2), 1e-6),
        lambda: reference.sin_cos_tables(torch.tensor([2**23]), torch.ones(1)),
        lambda: reference.sin_cos_tables(torch.tensor([1.0]), torch.ones(1)),
    ],
    ids=itertools.count(),
)
def test_verify_refusals(call: Callable[[], object]) -> None:
    with pytest.raises(PlanError, match="reference"):
        call()


# --- row operators --------------------------------------------------------------------------------------------------


def row_sum_by_definition(values: list[float], leaves: int) -> float:
    """A9, one number at a time."""

    def add(left: float, right: float) -> float:
        return fp32(left + right)

    def fold(nodes: list[float]) -> float:
        if len(nodes) == 1:
            return nodes[0]
        half = max(2**e for e in range(20) if 2**e < len(nodes))
        return add(fold(nodes[:half]), fold(nodes[half:]))

    def leaf(elements: list[float]) -> float:
        blocks = []
        for start in range(0, len(elements), 512):
            lanes = [0.0] * 16
            for i, element in enumerate(elements[start : start + 512]):
                lanes[i % 16] = add(lanes[i % 16], element)
            blocks.append(fold(lanes))
        return fold(blocks) if blocks else 0.0

    cuts = tree.cuts(len(values), leaves)
    return fold([leaf(values[lo:hi]) for lo, hi in itertools.pairwise(cuts)])


@pytest.mark.parametrize("leaves", [1, 3, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 15, 16, 17, 511, 512, 513, 576, 1537, 4000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_row_sum_definition(dtype: torch.dtype, length: int, leaves: int) -> None:
    x = wide_exponents((3, length), dtype, seed=length)
    expected = torch.tensor([row_sum_by_definition(row, leaves) for row in x.tolist()])
    assert_bitwise_equal(reference.row_sum(x, leaves), expected, f"row_sum of {length} in {leaves} leaves")


def test_validate_row_sum_shows_the_order() -> None:
    x = wide_exponents((8, 1000), torch.float32, 1)
    assert_bits_differ(reference.row_sum(x), reference.row_sum(x.flip(1)), "reversed row")
    assert_bits_differ(reference.row_sum(x), reference.row_sum(x, 4), "other leaves")
    assert_bits_differ(reference.row_sum(x), x.cumsum(1)[:, -1], "flat sum")


def test_verify_row_max() -> None:
    x = wide_exponents((50, 37), torch.float32, 1)
    assert_bitwise_equal(reference.row_max(x), x.max(1).values, "maximum")
    rows = torch.tensor([[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0], [-0.0, -0.0, -1.0], [NAN, INF, 1.0], [INF, 1.0, -NAN]])
    expected = torch.tensor([0.0, 0.0, -0.0, NAN, NAN])
    assert_bitwise_equal(reference.row_max(rows), expected, "NaN wins, +0 > -0")
    assert_bitwise_equal(reference.row_max(rows[:, :0]), torch.full((5,), -INF), "empty rows")


def check_batch_invariant(op: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """A row alone, permuted, padded, chunked or at another address has the bits it has in the batch."""
    together = op(x)
    for i in range(len(x)):
        assert_bitwise_equal(op(x[i : i + 1])[0], together[i], f"row {i} alone")
        assert_bitwise_equal(op(x[i]), together[i], f"row {i} without a batch dimension")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert_bitwise_equal(op(x[order]), together[order], "permuted")
    assert_bitwise_equal(torch.cat([op(x[:3]), op(x[3:])]), together, "chunked")
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert_bitwise_equal(op(shifted), together, "unaligned")
    strided = torch.stack([x, x], dim=-1)[..., 0]
    assert_bitwise_equal(op(strided), together, "strided")
    poisoned = torch.cat([torch.full_like(x[:2], NAN), x, torch.full_like(x[:1], INF)])
    assert_bitwise_equal(op(poisoned)[2:-1], together, "among NaN and Inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leaves", [1, 8])
def test_verify_log_softmax_batch_invariant(dtype: torch.dtype, leaves: int) -> None:
    x = (torch.randn(7, 1500, generator=torch.Generator().manual_seed(1)) * 6).to(dtype)
    check_batch_invariant(lambda rows: reference.log_softmax(rows, leaves), x)
    check_batch_invariant(lambda rows: reference.softmax(rows, leaves), x)
    wide = x.double()
    exact = torch.log_softmax(wide, -1)
    error = (reference.log_softmax(x.float(), leaves).double() - exact).abs().max()
    assert error < 4e-6, "far off: a wrong formula, not a rounding"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verify_rms_norm_batch_invariant(dtype: torch.dtype) -> None:
    x, w = wide_exponents((7, 576), dtype, 1, spread=12), wide_exponents((576,), dtype, 2, spread=4)
    check_batch_invariant(lambda rows: reference.rms_norm(rows, w, 1e-5), x)
    for row, y in zip(x, reference.rms_norm(x, w, 1e-5), strict=True):
        values = row.tolist()
        root = row_sum_by_definition([fp32(v * v) for v in values], 1)
        r = fp32(1.0 / fp32(math.sqrt(fp32(fp32(root / 576) + fp32(1e-5)))))
        expected = torch.tensor([fp32(fp32(v * r) * g) for v, g in zip(values, w.tolist(), strict=True)])
        assert_bitwise_equal(y, expected.to(dtype), "the formula of A10")


def test_verify_log_sum_exp_of_infinite_rows() -> None:
    rows = torch.tensor([[-INF, -INF], [INF, 1.0], [NAN, 1.0], [-INF, 2.0], [NAN, INF]])
    expected = torch.tensor([-INF, NAN, NAN, 2.0, NAN])
    assert_bitwise_equal(reference.log_sum_exp(rows), expected, "log-sum-exp")
    assert_bitwise_equal(reference.log_softmax(rows)[3], torch.tensor([-INF, 0.0]), "a masked element")


# --- transcendentals ------------------------------------------------------------------------------------------------


def arguments(seed: int, *ranges: tuple[float, float]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([lo + (hi - lo) * torch.rand(1200, generator=generator) for lo, hi in ranges])


def every_exponent(seed: int) -> Tensor:
    return random_floats(1500, -127, 127, seed)


# name -> (function, exact function, finite arguments)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[mpmath.mpf], mpmath.mpf], Tensor]] = {
    "exp": (
        reference.exp,
        mpmath.exp,
        torch.cat([arguments(1, (-104.5, -86.0), (-88, 89), (-1, 1)), every_exponent(2), torch.arange(-105.0, 90.0)]),
    ),
    "log": (
        reference.log,
        mpmath.log,
        torch.cat([arguments(3, (0.5, 2), (0.98, 1.02)), every_exponent(4).abs(), random_floats(500, -127, -127, 5)]),
    ),
    "sigmoid": (
        reference.sigmoid,
        lambda x: 1 / (1 + mpmath.exp(-x)),
        torch.cat([arguments(6, (-8, -1), (-1, 20), (-104.5, -80)), every_exponent(7), torch.tensor([-6.2376990])]),
    ),
    "tanh": (
        reference.tanh,
        mpmath.tanh,
        torch.cat([arguments(8, (-0.7, 0.7), (-10, 10), (0.62, 0.65)), every_exponent(9), torch.tensor([0.625])]),
    ),
}  # fmt: skip


def ulps(actual: Tensor, exact: list[mpmath.mpf]) -> list[float]:
    """|actual - exact| in units of the last place of fp32 at exact; an overflow must be an infinity and the reverse."""
    errors = []
    for value, true in zip(actual.tolist(), exact, strict=True):
        exponent = -126 if true == 0 else min(max(mpmath.frexp(abs(true))[1] - 1, -126), 127)
        unit = mpmath.mpf(2) ** (exponent - 23)
        largest = mpmath.mpf(2) ** 128 - unit
        true = max(min(true, largest + unit), -largest - unit)
        value = max(min(value, largest + unit), -largest - unit)
        errors.append(float(abs(value - true) / unit))
    return errors


@pytest.mark.parametrize("name", FUNCTIONS)
def test_validate_transcendentals(name: str) -> None:
    function, exact, x = FUNCTIONS[name]
    x = x[x > 0] if name == "log" else x
    with mpmath.workprec(100):
        errors = ulps(function(x), [exact(mpmath.mpf(v)) for v in x.tolist()])
        worst = max(range(len(errors)), key=errors.__getitem__)
        assert errors[worst] <= 2.0, f"{name}({x[worst].item()!r}): {errors[worst]} ulp"


def test_validate_sin_cos_tables() -> None:
    inv_freq = torch.tensor([1.0, 0.7498942, 0.1, 3.3e-4, 0.9999999])
    generator = torch.Generator().manual_seed(1)
    positions = torch.cat(
        [torch.arange(300), torch.randint(0, 2**20, (500,), generator=generator), torch.tensor([2**20])]
    )
    sines, cosines = reference.sin_cos_tables(positions, inv_freq)
    angles = (positions.float()[:, None] * inv_freq).flatten().tolist()
    with mpmath.workprec(120):
        assert max(ulps(sines.flatten(), [mpmath.sin(mpmath.mpf(a)) for a in angles])) <= 2.0
        assert max(ulps(cosines.flatten(), [mpmath.cos(mpmath.mpf(a)) for a in angles])) <= 2.0
    assert_bitwise_equal(sines[0], torch.zeros(5), "sin(0)")
    assert_bitwise_equal(cosines[0], torch.ones(5), "cos(0)")
    alone = reference.sin_cos_tables(positions[401:402], inv_freq)
    assert_bitwise_equal(torch.stack(alone)[:, 0], torch.stack([sines[401], cosines[401]]), "a position alone")


def test_verify_transcendental_special_values() -> None:
    largest = fp32(3.4028235e38)
    x = torch.tensor([INF, -INF, NAN, -NAN, 0.0, -0.0, 2.0**-149, -(2.0**-149), largest, -largest])
    tiny = 2.0**-149
    expected = {
        reference.exp: [INF, 0.0, NAN, NAN, 1.0, 1.0, 1.0, 1.0, INF, 0.0],
        reference.log: [INF, NAN, NAN, NAN, -INF, -INF, fp32(-103.27893), NAN, fp32(88.72284), NAN],
        reference.sigmoid: [1.0, 0.0, NAN, NAN, 0.5, 0.5, 0.5, 0.5, 1.0, 0.0],
        reference.tanh: [1.0, -1.0, NAN, NAN, 0.0, -0.0, tiny, -tiny, 1.0, -1.0],
        reference.silu: [INF, NAN, NAN, NAN, 0.0, -0.0, 0.0, -0.0, largest, -0.0],
    }
    for function, values in expected.items():
        assert_bitwise_equal(function(x), torch.tensor(values), function.__name__)
    edges = torch.tensor([88.72283, 88.72284, 88.7229, -103.97207, -103.97209, -87.33655])
    assert_bitwise_equal(torch.isinf(reference.exp(edges)), torch.tensor([False, True, True] + [False] * 3), "overflow")
    assert reference.exp(edges)[3].item() == tiny and reference.exp(edges)[4].item() == 0.0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_verify_transcendentals_ignore_position(name: str) -> None:
    """The same value at every place of a vector and in its tail."""
    function, _, x = FUNCTIONS[name]
    together = function(x)
    for length in (1, 3, 7, 17):
        assert_bitwise_equal(function(x[-length:]), together[-length:], f"{name}, {length} elements")
    assert_bitwise_equal(function(x.flip(0)).flip(0), together, f"{name}, reversed")
    narrow = x[:64].to(torch.bfloat16)
    assert_bitwise_equal(function(narrow), function(narrow.float()), f"{name} of bf16 is exact in its argument")


# --- the process's floating-point mode ------------------------------------------------------------------------------


def is_flushing() -> bool:
    return bool((torch.full((4,), MIN_NORMAL) * 0.5).view(torch.int32).eq(0).all())


# Built before the mode changes: torch.tensor(2.0**-149) itself gives 0 under it.
SMALL = torch.tensor([[1.5 * MIN_NORMAL, -MIN_NORMAL, 2.0**-130, 2.0**-149]])
SMALL_NEGATIVE = SMALL * -0.75
SMALL_FP16 = SMALL * 2.0**108
SMALL_FP64 = SMALL.double() * 2.0**-900
WIDE = random_floats(40, -127, -120, 1).view(4, 10)


def everything() -> list[Tensor]:
    """One result of each function whose bits flushing would change, and of the chain, which flushes by rule."""
    return [
        reference.add(SMALL, SMALL_NEGATIVE),
        # Larger than the grain at which torch hands parts to other threads, whose mode is their own.
        reference.exp(torch.full((100_000,), -100.0)),
        reference.round_wire(SMALL),
        reference.epilogue(SMALL, avg=3, out_dtype=torch.bfloat16),
        reference.epilogue(SMALL_FP16, out_dtype=torch.float16),
        reference.linear(WIDE, torch.full((4, 10), 2.0**20), TreePlan(leaves=2)),
        reference.fma64(SMALL_FP64, torch.full((1, 4), 2.0**-120, dtype=torch.float64), SMALL_FP64 * 0),
        reference.all_reduce([SMALL, SMALL_NEGATIVE]),
        reference.row_sum(SMALL),
        reference.rms_norm(WIDE, torch.ones(10), 0.0),
        reference.log(torch.tensor([1.0, 2.0]) * 2.0**-126),
        reference.log(SMALL[:, 2:]),
        reference.sigmoid(torch.tensor([-90.0, -103.0])),
        reference.tanh(SMALL),
        reference.silu(SMALL),
        reference.softmax(torch.tensor([[0.0, -90.0]])),
    ]


def test_verify_flush_mode_of_the_process_changes_nothing() -> None:
    expected = everything()
    assert not is_flushing()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode that torch can set")
    try:
        threads = torch.get_num_threads()
        assert is_flushing()
        actual = everything()
        assert is_flushing() and torch.get_num_threads() == threads, "the caller's modes are restored"
    finally:
        torch.set_flush_denormal(False)
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise_equal(a, e, f"result {i} under set_flush_denormal(True)")
    assert bool(((expected[0].abs() > 0) & (expected[0].abs() < MIN_NORMAL)).any()), "subnormals survive"
    assert bool((expected[1] > 0).all()), "exp(-100) is subnormal, not zero"


def test_verify_modes_are_restored_after_an_error(flush_denormal: None) -> None:
    with pytest.raises(PlanError):
        reference.round_wire(torch.ones(2, dtype=torch.float64))
    assert is_flushing()


# --- the document ---------------------------------------------------------------------------------------------------


def test_verify_order_document_coefficients() -> None:
    """Every constant of ORDER.md section C is the one in reference.py, and the reverse."""
    text = (Path(reference.__file__).parent / "ORDER.md").read_text()
    section = text.split("\n## C. Coefficients\n")[1].split("\n## ")[0]
    written = {
        name: [float.fromhex(word) if "p" in word else int(word, 16) for word in words.split()]
        for name, words in re.findall(
            r"^([A-Z][A-Z0-9_]+) = ((?:-?0x[0-9a-f.]+(?:p[+-]?\d+)?\s+)+)", section, re.MULTILINE
        )
    }
    sizes = {"TOKENS_PER_BLOCK": 512, "ROW_BLOCK": 512, "LANES": 16, "KEYS_PER_BLOCK": 64, "QUERIES_PER_BLOCK": 64}
    sizes |= {"AMX_BLOCK": 32}
    ours = {
        name: list(value) if isinstance(value, tuple) else [value]
        for name, value in vars(reference).items()
        if name.isupper() and not name.startswith("_") and name not in sizes
    }
    assert len(written) == 20 and written == ours
    in_float64 = {"TWO_OVER_PI", "PI_2_HIGH", "PI_2_LOW"}
    for name, values in written.items():
        exact = name in in_float64 or all(isinstance(v, int) or fp32(v) == v for v in values)
        assert exact, f"{name} is not exact in fp32"
    assert {name: getattr(reference, name) for name in sizes} == sizes
