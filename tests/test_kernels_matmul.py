"""The matmul kernels: values and bits against the oracle and the CPU's kernel, in both forms.

The fma leaf is compared in bits on any data. The tensor-core leaf is compared in bits on data whose leaves are exact,
whatever adds them up, while their sums are not: there the tree alone decides.
Suffixes: M rows, N columns, K contraction.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from interpreter import DEVICE, exact_fma, needs_triton  # noqa: F401

from tbik import _C, TreePlan, devices, ops, reference, tree
from tbik.errors import PlanError
from tbik.kernels.tiles import Tile

pytestmark = [
    needs_triton,
    pytest.mark.usefixtures("exact_fma"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning"),
]

MMA = f"mma:sm_{torch.cuda.get_device_capability()[0]}0" if DEVICE == "cuda" else "mma:sm_90"
# Tensor cores have a least size; the interpreter has a least patience.
SMALL = Tile(64, 64, 64, 4, 2, 1) if DEVICE == "cuda" else Tile(16, 16, 16, 4, 1, 1)
FORMS = [("whole", 0), ("whole", 1), ("whole", 2), ("split", 0)]


def contract(a: Any, b: Any, cuts: Any, schedule: Any, form: str = "whole", level: int = 1, **options: Any) -> Any:
    from tbik.kernels import matmul

    a, b = ([t.to(DEVICE) for t in ([operand] if isinstance(operand, torch.Tensor) else operand)] for operand in (a, b))
    if options.get("bias") is not None:
        options["bias"] = options["bias"].to(DEVICE)
    tile = SMALL._replace(register_levels=level)
    return matmul.contract(a, b, cuts, schedule, form=form, tile=tile, **options).cpu()


def root(leaves: int, narrow: bool = False) -> _C.Schedule:
    return _C.run_schedule(0, leaves, leaves, True, narrow)


# --- the fma leaf: any data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_verify_fma_equals_reference(dtype: torch.dtype) -> None:
    """K = 19 in 6 leaves, tails of both tiles, bias, every form."""
    plan = TreePlan(leaves=6, acc_dtype="float64" if dtype == torch.float64 else "float32")
    x, w = wide_exponents((5, 19), dtype, 1, spread=12), wide_exponents((18, 19), dtype, 2, spread=12)
    bias = wide_exponents((18,), dtype, 3, spread=12)
    expected = reference.linear(x, w, plan, bias, out_dtype=dtype)
    forms = FORMS if dtype == torch.bfloat16 else FORMS[1::2]
    for form, level in forms:
        actual = contract(x, w, [plan.cuts(19)], root(6), form, level, leaf="fma", bias=bias, out_dtype=dtype)
        assert_bitwise_equal(actual, expected, f"{form}, {level} levels in registers")


def test_verify_fma_equals_cpu_kernel() -> None:
    """Subnormal products, infinities and NaN included: the same bits as the kernel that CPUs run."""
    x, w = wide_exponents((6, 24), torch.float32, 5, spread=150), wide_exponents((7, 24), torch.float32, 6, spread=150)
    x[0, 3], x[1, 5], w[2, 7], x[3] = float("inf"), float("nan"), float("-inf"), x[3] * 1e-30
    plan = TreePlan(leaves=3)
    expected = _C.gemm([x], False, [w], False, [list(plan.cuts(24))], root(3), "float32", None, out_dtype=torch.float32)
    actual = contract(x, w, [plan.cuts(24)], root(3), leaf="fma", out_dtype=torch.float32)
    assert_bitwise_equal(actual, expected, "GPU fma = CPU fma")


@pytest.mark.parametrize("form", ["whole", "split"])
def test_verify_row_alone_equals_row_in_batch(form: str) -> None:
    plan = TreePlan(leaves=4)
    x, w = wide_exponents((18, 20), torch.bfloat16, 7), wide_exponents((3, 20), torch.bfloat16, 8)
    options = {"leaf": "fma", "out_dtype": torch.float32}
    batch = contract(x, w, [plan.cuts(20)], root(4), form, **options)
    assert_bitwise_equal(contract(x[17:], w, [plan.cuts(20)], root(4), form, **options), batch[17:], "last row alone")


def test_verify_group_dx_is_one_chain() -> None:
    """Three members of different lengths, one accumulator per leaf; W is read along its rows."""
    plan, lengths = TreePlan(leaves=4), (12, 6, 5)
    dys = [wide_exponents((5, n), torch.bfloat16, 10 + n) for n in lengths]
    ws = [wide_exponents((n, 17), torch.bfloat16, 20 + n) for n in lengths]
    expected = reference.linear_dx(dys, ws, plan)
    cuts = [plan.cuts(n) for n in lengths]
    for form in ("whole", "split"):
        actual = contract(dys, ws, cuts, root(4), form, leaf="fma", b_k_major=True, out_dtype=torch.float32)
        assert_bitwise_equal(actual, expected, form)
    apart = [reference.linear_dx([dy], [w], plan) for dy, w in zip(dys, ws, strict=True)]
    assert_bits_differ(expected, (apart[0] + apart[1]) + apart[2], "the sum of three trees")


@pytest.mark.parametrize("narrow", [False, True])
def test_verify_dw_samples(narrow: bool) -> None:
    """Samples of 2, 0, 3 and 1 blocks, rounded from the sample leaf upwards: the CPU's kernel, in bits."""
    tokens, cuts = 23, [0, 5, 9, 9, 12, 17, 20, 23]  # short blocks, as for 512
    schedule = _C.sample_schedule([2, 0, 4, 1], narrow)
    dy, x = wide_exponents((tokens, 6), torch.bfloat16, 30, 30), wide_exponents((tokens, 18), torch.bfloat16, 31, 30)
    expected = _C.gemm([dy], True, [x], True, [cuts], schedule, "bfloat16", None, out_dtype=torch.float32)
    options: Any = {"leaf": "fma", "a_k_major": True, "b_k_major": True, "out_dtype": torch.float32}
    for form in ("whole", "split"):
        assert_bitwise_equal(contract(dy, x, [cuts], schedule, form, **options), expected, form)


@pytest.mark.parametrize(("lo", "hi"), [(0, 4), (1, 6), (5, 6)])
@pytest.mark.parametrize("narrow", [False, True])
def test_verify_covers(lo: int, hi: int, narrow: bool) -> None:
    """The cover of a run of leaves, as a rank of a row-parallel linear computes it."""
    plan = TreePlan(leaves=6, wire_dtype="bfloat16" if narrow else None)
    x, w = wide_exponents((3, 24), torch.bfloat16, 40), wide_exponents((5, 24), torch.bfloat16, 41)
    cuts = plan.cuts(24)
    expected = reference.linear(x, w, plan, leaf_range=(lo, hi), round_wire=narrow)
    slices = x[:, cuts[lo] : cuts[hi]], w[:, cuts[lo] : cuts[hi]]
    local = [[cut - cuts[lo] for cut in cuts[lo : hi + 1]]]
    for form in ("whole", "split"):
        schedule = _C.run_schedule(lo, hi, 6, False, narrow)
        actual = contract(*slices, local, schedule, form, leaf="fma", out_dtype=torch.float32)
        for value, node in zip(actual, tree.cover(lo, hi), strict=True):
            assert_bitwise_equal(value, expected[node], f"{form} {node}")


# --- the tensor-core leaf -------------------------------------------------------------------------------------------


def exact_leaves(dtype: torch.dtype, leaves: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [5, K], w [17, K] of small integers times a power of two per leaf: every leaf is exact, their sums are not."""
    generator = torch.Generator().manual_seed(leaves)
    k = leaves * length
    x = torch.randint(-127, 128, (5, k), generator=generator).double()
    w = torch.randint(-127, 128, (17, k), generator=generator).double()
    exponents = torch.tensor([3, -5, 5, -2, 4, -4, 1, 2], dtype=torch.float64)[:leaves]
    scale = 2.0 ** exponents.repeat_interleave(length)
    return (x * scale).to(dtype), (w * scale).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("leaves", "length"), [(6, 8), (8, 20)])
def test_verify_mma_tree(dtype: torch.dtype, leaves: int, length: int) -> None:
    """Leaves shorter and longer than the K step, every form: the canonical tree, and no other order."""
    x, w = exact_leaves(dtype, leaves, length)
    cuts = list(range(0, leaves * length + 1, length))
    values = [x[:, a:b].float() @ w[:, a:b].float().T + 0.0 for a, b in itertools.pairwise(cuts)]
    exact = [x[:, a:b].double() @ w[:, a:b].double().T + 0.0 for a, b in itertools.pairwise(cuts)]
    assert all(torch.equal(value.double(), truth) for value, truth in zip(values, exact, strict=True))
    expected = tree.root(values, reference.add)
    for form, level in FORMS if dtype == torch.bfloat16 else FORMS[1:2]:
        actual = contract(x, w, [cuts], root(leaves), form, level, leaf=MMA, out_dtype=torch.float32)
        assert_bitwise_equal(actual, expected, f"{form}, {level} levels in registers")
    in_order, from_the_end = (functools.reduce(reference.add, order) for order in (values, values[::-1]))
    assert_bits_differ(expected, in_order, "leaves in order")
    assert_bits_differ(expected, from_the_end, "leaves from the end")
    assert_bits_differ(expected, tree.root(values[::2] + values[1::2], reference.add), "even leaves before odd ones")
    assert_bits_differ(expected, tree.root(values[1:] + values[:1], reference.add), "leaves one further")
    assert_bits_differ(expected, sum(exact).float(), "one rounding of the exact sum")


@pytest.mark.skipif(MMA == "mma:sm_80", reason="tensor descriptors begin with sm_90")
@pytest.mark.parametrize("leaves", [2, 3])
def test_verify_descriptors_equal_pointers(leaves: int) -> None:
    """Operands by tensor descriptors: the same bits as by pointers, also past the last row and column."""
    step = SMALL.block_k
    k = leaves * 2 * step
    x, w = wide_exponents((19, k), torch.bfloat16, 1, spread=20), wide_exponents((21, k), torch.bfloat16, 2, spread=20)
    options: Any = {"leaf": MMA, "out_dtype": torch.float32}
    cuts = [list(range(0, k + 1, 2 * step))]
    expected = contract(x, w, cuts, root(leaves), "whole", **options)
    assert_bitwise_equal(contract(x, w, cuts, root(leaves), "described", **options), expected, "described = whole")
    ragged = [[0, step + 1, *cuts[0][2:]]]
    with pytest.raises(PlanError, match="leaves of whole K steps"):
        contract(x, w, ragged, root(leaves), "described", **options)


def test_verify_mma_forward_and_backward_values() -> None:
    """y, dX and dW of a linear layer on ordinary data, against float64."""
    generator = torch.Generator().manual_seed(3)
    plan = TreePlan(leaves=4)
    x, w, dy = (torch.randn(shape, generator=generator).bfloat16() for shape in ((19, 40), (24, 40), (19, 24)))
    options: Any = {"leaf": MMA, "out_dtype": torch.float32}
    y = contract(x, w, [plan.cuts(40)], root(4), **options)
    dx = contract(dy, w, [plan.cuts(24)], root(4), b_k_major=True, **options)
    dw = contract(dy, x, [[0, 12, 19]], _C.sample_schedule([1, 1]), a_k_major=True, b_k_major=True, **options)
    torch.testing.assert_close(y.double(), x.double() @ w.double().T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dx.double(), dy.double() @ w.double(), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dw.double(), dy.double().T @ x.double(), rtol=1e-5, atol=1e-4)


# --- behind the operators -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operator", ["linear", "linear_group", "linear_cover", "linear_dx", "linear_dx_cover", "linear_dw", "bias_grad"]
)
def test_verify_operators_serve_cuda(operator: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tbik::{operator}", "CUDA")


def test_verify_operators_reach_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of two with fp32 master weights, forward and backward, through the kernels: the bits of the CPU."""
    plan = TreePlan(leaves=4)
    x = wide_exponents((2, 3, 12), torch.bfloat16, 60, spread=12)
    ws = [wide_exponents((n, 12), torch.float32, 61 + n, spread=12) for n in (6, 5)]
    bias = wide_exponents((6,), torch.float32, 70, spread=12)

    def step(device: str) -> list[torch.Tensor]:
        inputs = [t.detach().to(device).requires_grad_() for t in (x, *ws, bias)]
        y = ops.linear_group(inputs[0], inputs[1:3], [inputs[3], None], plan=plan, compute_dtype=torch.bfloat16)
        torch.autograd.backward(list(y), [out.detach() * 0.5 for out in y])
        return [t.detach().cpu() for t in (*y, *(t.grad for t in inputs))]

    expected = step("cpu")
    calls = []
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "is_cuda", lambda t: calls.append(t) or True)
    for actual, wanted in zip(step(DEVICE), expected, strict=True):
        assert_bitwise_equal(actual, wanted, "CUDA operators = CPU operators")
    assert DEVICE == "cuda" or len(calls) == 6


def test_verify_a_leaf_of_another_device_is_refused() -> None:
    x, w = torch.zeros(2, 8).bfloat16(), torch.zeros(3, 8).bfloat16()
    with pytest.raises(PlanError, match="has its bits on sm_90 only, the tensors are on cpu"):
        ops.linear(x, w, plan=TreePlan(leaves=2, leaf="mma:sm_90"))
    assert ops.linear(x.to("meta"), w.to("meta"), plan=TreePlan(leaves=2, leaf="mma:sm_90")).shape == (2, 3)


# --- addresses, refusals --------------------------------------------------------------------------------------------


def test_verify_offsets_beyond_2_31() -> None:
    """Rows of x lie 2^31 elements apart; only the touched pages exist."""
    memory = torch.empty(2**31 + 64, dtype=torch.bfloat16, device=DEVICE)
    x = memory.as_strided((2, 16), (2**31, 1))
    x.copy_(wide_exponents((2, 16), torch.bfloat16, 50))
    w = wide_exponents((3, 16), torch.bfloat16, 51)
    plan = TreePlan(leaves=2)
    for form in ("whole", "split"):
        actual = contract(x, w, [plan.cuts(16)], root(2), form, leaf="fma", out_dtype=torch.float32)
        assert_bitwise_equal(actual, reference.linear(x.cpu().clone(), w, plan), form)


def test_verify_refusals() -> None:
    x, w, cuts = torch.zeros(2, 8), torch.zeros(3, 8), [[0, 4, 8]]
    with pytest.raises(PlanError, match="multiply bfloat16 or float16"):
        contract(x, w, cuts, root(2), leaf=MMA, out_dtype=torch.float32)
    with pytest.raises(PlanError, match="all in one dtype"):
        contract(x, w.bfloat16(), cuts, root(2), leaf="fma", out_dtype=torch.float32)
    with pytest.raises(PlanError, match="a cover leaves in"):
        contract(x, w, cuts, _C.run_schedule(0, 2, 4, False, False), leaf="fma", out_dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="tensor-core leaves exist for"):
        contract(x.half(), w.half(), cuts, root(2), leaf="mma:sm_75", out_dtype=torch.float32)


def test_verify_empty_operands() -> None:
    plan = TreePlan(leaves=2)
    nothing = contract(
        torch.zeros(0, 8), torch.zeros(3, 8), [plan.cuts(8)], root(2), leaf="fma", out_dtype=torch.float32
    )
    assert nothing.shape == (0, 3)
    y = contract(torch.zeros(2, 0), torch.zeros(3, 0), [plan.cuts(0)], root(2), leaf="fma", out_dtype=torch.float32)
    assert_bitwise_equal(y, torch.zeros(2, 3), "no products")
