"""tbik.ops.linear against the oracle, against itself under every change that may not matter, and against the truth.

Suffixes: M rows, N output features, K contraction, T tokens.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import SHAPES, Problem, problems, wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from long_cases import long_cases
from torch import Tensor

from tbik import TreePlan, ops, reference, tree
from tbik.errors import PlanError
from tbik.ops.linear import CoverRun, bias_grad, linear_cover, linear_dw, linear_dx

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WIRE = TreePlan(leaves=6, wire_dtype="bfloat16", grad_wire_dtype="bfloat16")


def plan_for(dtype: torch.dtype, leaves: int, **fields: str | None) -> TreePlan:
    return TreePlan(leaves=leaves, acc_dtype="float64" if dtype == torch.float64 else "float32", **fields)


def operands(p: Problem, seed: int = 0, spread: int = 60) -> tuple[Tensor, Tensor]:
    """x [M, K] and w [N, K] whose sum depends on the order."""
    spread = 12 if p.dtype == torch.float16 else spread  # the output has to fit float16
    return (
        wide_exponents((p.m, p.k), p.dtype, seed, spread),
        wide_exponents((p.n, p.k), p.dtype, seed + 1, spread),
    )


def in_order(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


# --- forward against the oracle -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_data_shows_the_order(dtype: torch.dtype) -> None:
    """The negative control of every equality below: on this data other orders give other bits."""
    p = Problem(5, 5, 80, 8, dtype)
    x, w = operands(p)
    plan = plan_for(dtype, p.leaves)
    cuts = plan.cuts(p.k)
    leaves = [reference.chain(x[:, a:b], w[:, a:b]) for a, b in itertools.pairwise(cuts)]
    root = tree.root(leaves, reference.add)
    assert_bits_differ(root, in_order(leaves), "leaves in order")
    assert_bits_differ(root, in_order(leaves[::-1]), "leaves in reversed order")
    assert_bits_differ(in_order(leaves), in_order(leaves[::-1]), "in order against reversed")
    assert_bits_differ(root, reference.chain(x, w), "one chain, i.e. a flat sum")
    assert_bits_differ(ops.linear(x, w, plan=plan, out_dtype=root.dtype), reference.chain(x, w), "kernel against flat")


@settings(max_examples=500)
@given(problem=problems(max_m=5, max_n=5, max_k=72), seed=st.integers(0, 2**20), with_bias=st.booleans())
def test_verify_linear_equals_reference(problem: Problem, seed: int, with_bias: bool) -> None:
    x, w = operands(problem, seed)
    plan = plan_for(problem.dtype, problem.leaves)
    bias = wide_exponents((problem.n,), problem.dtype, seed + 2, spread=12) if with_bias else None
    for out_dtype in {problem.dtype, getattr(torch, plan.acc_dtype)}:
        y = ops.linear(x, w, bias, plan=plan, out_dtype=out_dtype)
        assert_bitwise_equal(y, reference.linear(x, w, plan, bias, out_dtype=out_dtype), f"{problem}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_shapes_with_gradients(shape: Problem, dtype: torch.dtype) -> None:
    p = shape._replace(dtype=dtype)
    x, w = (t.requires_grad_() for t in operands(p, seed=7))
    plan = plan_for(dtype, p.leaves)
    bias = wide_exponents((p.n,), dtype, 9, spread=12).requires_grad_()
    dy = wide_exponents((p.m, p.n), dtype, 11, spread=12)
    ops.linear(x, w, bias, plan=plan).backward(dy)
    assert_bitwise_equal(x.grad, reference.linear_dx([dy], [w], plan, out_dtype=dtype), "dX")
    # autograd casts dW to the dtype of a parameter that is not in acc_dtype; the operator itself does not
    dw = reference.linear_dw(dy, x.detach(), [0, p.m], plan)
    assert_bitwise_equal(linear_dw(dy, x.detach(), plan=plan, compute_dtype=dtype), dw, "dW")
    assert_bitwise_equal(w.grad, dw.to(dtype), "dW in the parameter's dtype")
    db = reference.bias_grad(dy, [0, p.m], plan)
    assert_bitwise_equal(bias_grad(dy, plan=plan), db, "dbias")


@settings(max_examples=60)
@given(
    p=problems(max_m=4, max_n=40, max_k=8, dtypes=(torch.float32, torch.bfloat16)),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    seed=st.integers(0, 2**20),
)
def test_verify_group_equals_reference(p: Problem, sizes: list[int], seed: int) -> None:
    plan = plan_for(p.dtype, p.leaves)
    x = wide_exponents((p.m, p.k), p.dtype, seed).requires_grad_()
    weights = [wide_exponents((n, p.k), p.dtype, seed + g).requires_grad_() for g, n in enumerate(sizes)]
    dys = [wide_exponents((p.m, n), p.dtype, seed + 10 + g) for g, n in enumerate(sizes)]
    ys = ops.linear_group(x, weights, plan=plan)
    for y, w in zip(ys, weights, strict=True):
        assert_bitwise_equal(y, reference.linear(x.detach(), w.detach(), plan, out_dtype=p.dtype), "member")
    torch.autograd.backward(ys, dys)
    assert_bitwise_equal(x.grad, reference.linear_dx(dys, weights, plan, out_dtype=p.dtype), "dX of the group")


def test_verify_group_dx_is_one_tree() -> None:
    """q, k, v in one chain per leaf: not the sum of three trees, and the same however a merged weight is laid out."""
    plan = TreePlan(leaves=6)
    sizes, k, m = (48, 24, 24), 20, 7
    x = wide_exponents((m, k), torch.float32, 1).requires_grad_()
    weights = [wide_exponents((n, k), torch.float32, 2 + g) for g, n in enumerate(sizes)]
    biases = [torch.randn(sizes[0]), None, torch.randn(sizes[2]).requires_grad_()]
    dys = [wide_exponents((m, n), torch.float32, 5 + g) for g, n in enumerate(sizes)]
    ys = ops.linear_group(x, weights, biases, plan=plan)
    torch.autograd.backward(ys, dys)
    expected = reference.linear_dx(dys, weights, plan)
    assert_bitwise_equal(x.grad, expected, "dX of the group")
    assert_bitwise_equal(biases[2].grad, reference.bias_grad(dys[2], [0, m], plan), "dbias")

    apart = [reference.linear_dx([dy], [w], plan) for dy, w in zip(dys, weights, strict=True)]
    assert_bits_differ(expected, in_order(apart), "one tree per member, added")
    assert_bits_differ(expected, in_order(apart[::-1]), "one tree per member, added backwards as autograd does")
    assert_bits_differ(expected, reference.linear_dx(dys[::-1], weights[::-1], plan), "members in another order")

    # Merged in one storage: as blocks, and interleaved row by row where the sizes allow; views into it give the bits.
    merged = torch.cat(weights)
    assert_bitwise_equal(
        linear_dx(dys, list(merged.split(sizes)), plan=plan, compute_dtype=x.dtype, parallel=True), expected
    )
    woven = torch.empty(2 * sizes[1], k)
    woven[0::2], woven[1::2] = weights[1], weights[2]
    members = [weights[0], woven[0::2], woven[1::2]]
    assert_bitwise_equal(linear_dx(dys, members, plan=plan, compute_dtype=x.dtype, parallel=True), expected, "woven")


# --- what may not change a bit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_row_of_a_batch_equals_row_alone(dtype: torch.dtype) -> None:
    x, w = operands(Problem(70, 33, 130, 5, dtype), seed=3)
    plan = plan_for(dtype, 5)
    y = ops.linear(x, w, plan=plan)
    assert_bitwise_equal(y[:8], reference.linear(x[:8], w, plan, out_dtype=dtype))
    for m in range(1, 71):
        assert_bitwise_equal(ops.linear(x[:m], w, plan=plan), y[:m], f"first {m} rows")
        assert_bitwise_equal(ops.linear(x[m - 1], w, plan=plan), y[m - 1], f"row {m - 1} alone")
    backwards = torch.arange(69, -1, -1)
    assert_bitwise_equal(ops.linear(x[backwards], w, plan=plan), y[backwards], "another position")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_verify_any_split_of_n_and_k(dtype: torch.dtype) -> None:
    p = Problem(3, 70, 192, 12, dtype)
    x, w = operands(p, seed=4)
    plan = plan_for(dtype, p.leaves)
    acc = getattr(torch, plan.acc_dtype)
    y = ops.linear(x, w, plan=plan, out_dtype=acc)
    for lo, hi in [(0, 1), (1, 70), (13, 29), (64, 70), (30, 30)]:
        assert_bitwise_equal(ops.linear(x, w[lo:hi], plan=plan, out_dtype=acc), y[:, lo:hi], f"features [{lo}, {hi})")
    cuts = plan.cuts(p.k)
    for bounds in [(0, 12), (0, 6, 12), (0, 3, 6, 9, 12), (0, 5, 12), (0, 1, 2, 7, 12), tuple(range(13))]:
        covers = []
        for lo, hi in itertools.pairwise(bounds):
            run, part = CoverRun(p.k, lo, hi), slice(cuts[lo], cuts[hi])
            values = linear_cover(x[:, part], w[:, part], run, plan=plan, compute_dtype=dtype, parallel=True)
            covers.append(dict(zip(tree.cover(lo, hi), values, strict=True)))
            expected = reference.linear(x, w, plan, leaf_range=(lo, hi))
            for node, value in covers[-1].items():
                assert_bitwise_equal(value, expected[node], f"{node}")
        assert_bitwise_equal(reference.fold_covers(covers[::-1], plan.leaves), y, f"runs {bounds}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_verify_threads_and_flush_mode(dtype: torch.dtype) -> None:
    p = Problem(40, 130, 300, 8, dtype)
    x, w = operands(p, seed=5)
    x[0] *= 2.0**-70 if dtype != torch.float16 else 2.0**-12  # subnormal products and, in float16, operands
    w[0] *= 2.0**-50 if dtype != torch.float16 else 2.0**-12
    dy = wide_exponents((p.m, p.n), dtype, 8, spread=12)
    plan = plan_for(dtype, p.leaves)

    def everything() -> list[Tensor]:
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = ops.linear(a, b, plan=plan, out_dtype=torch.float32)
        dx = linear_dx([dy], [w], plan=plan, compute_dtype=dtype, parallel=False)
        return [y, dx, linear_dw(dy, x, plan=plan, compute_dtype=dtype)]

    threads = torch.get_num_threads()
    expected = everything()
    assert_bitwise_equal(expected[0][:2, :9], reference.linear(x[:2], w[:9], plan), "oracle")
    try:
        for count, flush in itertools.product((1, 2), (False, True)):
            torch.set_num_threads(count)
            torch.set_flush_denormal(flush)
            for value, other in zip(everything(), expected, strict=True):
                assert_bitwise_equal(value, other, f"{count} threads, flush {flush}")
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


def test_verify_strides_do_not_matter() -> None:
    plan = TreePlan(leaves=6)
    x, w = operands(Problem(6, 10, 48, 6), seed=6)
    y = ops.linear(x, w, plan=plan)
    wide = torch.zeros(12, 96)
    wide[::2, ::2] = x
    flipped = x.T.contiguous().T
    for name, a in {"transposed": flipped, "strided": wide[::2, ::2], "expanded": x[:1].expand(6, 48)}.items():
        expected = y if name != "expanded" else y[:1].expand(6, 10)
        assert_bitwise_equal(ops.linear(a, w, plan=plan), expected, name)
    assert_bitwise_equal(ops.linear(x, w.T.contiguous().T, plan=plan), y, "weight transposed")
    negated = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert negated.is_neg()
    assert_bitwise_equal(ops.linear(negated, w, plan=plan), y, "lazily negated view")
    a = flipped.detach().requires_grad_()
    dy = wide_exponents((10, 6), torch.float32, 7).T
    ops.linear(a, w, plan=plan).backward(dy)
    assert_bitwise_equal(a.grad, reference.linear_dx([dy], [w], plan), "dX of strided dY")


# --- wire dtypes ----------------------------------------------------------------------------------------------------


def test_verify_wire_dtype_at_every_world_size() -> None:
    """plan.wire_dtype rounds the trees some layout puts on a wire, at one rank as at eight, and no other tree."""
    p = Problem(4, 18, 96, WIRE.leaves)
    x, w = operands(p, seed=8)
    exact = TreePlan(leaves=WIRE.leaves)
    row = reference.linear(x, w, WIRE, round_wire=True)
    assert_bits_differ(row, reference.linear(x, w, WIRE), "rounded against unrounded")
    assert_bitwise_equal(ops.linear(x, w, plan=WIRE, parallel="row"), row, "row, W=1")
    for parallel in (None, "column"):
        assert_bitwise_equal(ops.linear(x, w, plan=WIRE, parallel=parallel), reference.linear(x, w, exact), "forward")

    cuts = WIRE.cuts(p.k)
    for world in (1, 2, 3, 4, 6):
        covers = []
        for rank in range(world):
            lo, hi = WIRE.leaves * rank // world, WIRE.leaves * (rank + 1) // world
            run, part = CoverRun(p.k, lo, hi), slice(cuts[lo], cuts[hi])
            values = linear_cover(x[:, part], w[:, part], run, plan=WIRE, compute_dtype=x.dtype, parallel=True)
            covers.append(dict(zip(tree.cover(lo, hi), values, strict=True)))
        assert_bitwise_equal(reference.fold_covers(covers, WIRE.leaves, rounds=True), row, f"row, W={world}")

    dys = [wide_exponents((p.m, n), x.dtype, n) for n in (18, 30)]
    weights = [w, wide_exponents((30, p.k), x.dtype, 12)]
    column = reference.linear_dx(dys, weights, WIRE, round_wire=True)
    plain = reference.linear_dx(dys, weights, exact)
    assert_bits_differ(column, plain, "dX rounded against unrounded")
    for parallel, expected in (("column", column), (None, plain)):
        a = x.clone().requires_grad_()
        torch.autograd.backward(ops.linear_group(a, weights, plan=WIRE, parallel=parallel), dys)
        assert_bitwise_equal(a.grad, expected, f"dX, parallel={parallel}")
    one = reference.linear_dx(dys[:1], weights[:1], WIRE, round_wire=True)
    for parallel, expected in (
        ("column", one),
        ("row", reference.linear_dx(dys[:1], weights[:1], exact)),
        (None, reference.linear_dx(dys[:1], weights[:1], exact)),
    ):
        a = x.clone().requires_grad_()
        ops.linear(a, w, plan=WIRE, parallel=parallel).backward(dys[0])
        assert_bitwise_equal(a.grad, expected, f"dX, linear, parallel={parallel}")
    for world in (1, 2, 3, 6):
        covers = []
        for rank in range(world):
            lo, hi = WIRE.leaves * rank // world, WIRE.leaves * (rank + 1) // world
            parts = [slice(WIRE.cuts(v.shape[0])[lo], WIRE.cuts(v.shape[0])[hi]) for v in weights]
            values = linear_dx(
                [dy[:, part] for dy, part in zip(dys, parts, strict=True)],
                [v[part] for v, part in zip(weights, parts, strict=True)],
                [CoverRun(v.shape[0], lo, hi) for v in weights],
                plan=WIRE,
                compute_dtype=x.dtype,
                parallel=True,
            )
            covers.append(dict(zip(tree.cover(lo, hi), values, strict=True)))
        assert_bitwise_equal(reference.fold_covers(covers, WIRE.leaves, rounds=True), column, f"dX, W={world}")


# --- parameter gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_wire", [None, "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_dw_samples_and_blocks(dtype: torch.dtype, grad_wire: str | None) -> None:
    lengths = (1, 0, 512, 1100, 0, 513, 3)
    offsets = [0, *itertools.accumulate(lengths)]
    plan = TreePlan(leaves=4, grad_wire_dtype=grad_wire)
    x = wide_exponents((offsets[-1], 5), dtype, 1).requires_grad_()
    w = wide_exponents((3, 5), torch.float32, 2, spread=8).requires_grad_()
    bias = torch.zeros(3, requires_grad=True)
    dy = wide_exponents((offsets[-1], 3), dtype, 3)
    ops.linear(x, w, bias, plan=plan, sample_offsets=offsets).backward(dy)
    dw = reference.linear_dw(dy, x.detach(), offsets, plan)
    assert_bitwise_equal(w.grad, dw, "dW")
    assert_bitwise_equal(bias.grad, reference.bias_grad(dy, offsets, plan), "dbias")
    # where samples and blocks begin is in the bits
    for name, other in {"one sample": [0, offsets[-1]], "no empty samples": [0, 1, 513, 1613, 2126, 2129]}.items():
        assert_bits_differ(linear_dw(dy, x.detach(), plan=plan, compute_dtype=dtype, sample_offsets=other), dw, name)
    chain = reference.chain(dy[:1100].T.contiguous(), x.detach()[:1100].T.contiguous())
    one = linear_dw(dy[:1100], x.detach()[:1100], plan=TreePlan(leaves=4), compute_dtype=dtype)
    assert_bits_differ(one, chain, "1100 tokens as one chain")


@pytest.mark.parametrize("grad_wire", [None, "bfloat16"])
def test_verify_dw_ignores_micro_batches(grad_wire: str | None) -> None:
    """m samples per call, their nodes folded by the tree = all samples in one call = packed = [B, T, K]."""
    B, T, N, K = 8, 9, 6, 10
    plan = TreePlan(leaves=4, grad_wire_dtype=grad_wire)
    x = wide_exponents((B, T, K), torch.bfloat16, 1)
    dy = wide_exponents((B, T, N), torch.bfloat16, 2)
    w = wide_exponents((N, K), torch.float32, 3, spread=8)

    def gradients(x: Tensor, dy: Tensor, **arguments: object) -> tuple[Tensor, Tensor]:
        weight, bias = w.clone().requires_grad_(), torch.zeros(N, requires_grad=True)
        ops.linear(x, weight, bias, plan=plan, compute_dtype=torch.bfloat16, **arguments).backward(dy)
        return weight.grad, bias.grad

    add = reference._add_rounded if grad_wire else reference.add
    whole = gradients(x, dy)
    offsets = [T * sample for sample in range(B + 1)]
    packed = gradients(x.reshape(-1, K), dy.reshape(-1, N), sample_offsets=offsets)
    for m in (1, 2, 4):
        parts = [gradients(x[i : i + m], dy[i : i + m]) for i in range(0, B, m)]
        for which, name in enumerate(("dW", "dbias")):
            values = [part[which] for part in parts]
            assert_bitwise_equal(tree.root(values, add), whole[which], f"{name}, m={m}")
            assert_bitwise_equal(packed[which], whole[which], f"{name}, packed")
            if m < 4:  # two values have one order
                assert_bits_differ(in_order(values), whole[which], f"{name}, m={m}, added in order")
    # rows split over micro-batches without regard to samples are another sum
    assert_bits_differ(gradients(x.reshape(-1, K), dy.reshape(-1, N))[0], whole[0], "one sample of B*T tokens")


def test_verify_master_weight_gradient_is_fp32() -> None:
    plan = TreePlan(leaves=4)
    x = wide_exponents((7, 24), torch.bfloat16, 1).requires_grad_()
    w = wide_exponents((6, 24), torch.float32, 2).requires_grad_()
    bias = torch.zeros(6, requires_grad=True)
    dy = wide_exponents((7, 6), torch.bfloat16, 3)
    y = ops.linear(x, w, bias, plan=plan, compute_dtype=torch.bfloat16)
    y.backward(dy)
    rounded = w.detach().bfloat16()
    assert not torch.equal(rounded.float(), w), "the weight must not fit bf16, else this shows nothing"
    assert_bitwise_equal(y, reference.linear(x.detach(), rounded, plan, out_dtype=torch.bfloat16), "y")
    assert_bitwise_equal(x.grad, reference.linear_dx([dy], [rounded], plan, out_dtype=torch.bfloat16), "dX")
    assert_bitwise_equal(w.grad, reference.linear_dw(dy, x.detach(), [0, 7], plan), "dW")
    assert w.grad.dtype == bias.grad.dtype == torch.float32
    assert_bits_differ(w.grad, w.grad.bfloat16().float(), "a bf16-rounded dW")


def test_verify_lm_head_in_fp32() -> None:
    """bf16 operands, fp32 logits: dY comes in fp32 and is not rounded on its way into dX and dW."""
    plan = TreePlan(leaves=6, wire_dtype="bfloat16")
    x = wide_exponents((4, 40), torch.bfloat16, 1).requires_grad_()
    w = wide_exponents((30, 40), torch.float32, 2).requires_grad_()
    dy = wide_exponents((4, 30), torch.float32, 3)
    y = ops.linear(x, w, plan=plan, out_dtype=torch.float32)
    y.backward(dy)
    rounded = w.detach().bfloat16()
    assert_bitwise_equal(y, reference.linear(x.detach(), rounded, plan), "y")
    assert_bitwise_equal(x.grad, reference.linear_dx([dy], [rounded], plan, out_dtype=torch.bfloat16), "dX")
    assert_bitwise_equal(w.grad, reference.linear_dw(dy, x.detach(), [0, 4], plan), "dW")
    assert_bits_differ(w.grad, reference.linear_dw(dy.bfloat16(), x.detach(), [0, 4], plan), "dY rounded to bf16")
    # fp32 activations, bf16 stored weights (LayerCast): converted exactly
    z = ops.linear(dy, rounded[:, :30].contiguous(), plan=plan)
    assert_bitwise_equal(z, reference.linear(dy, rounded[:, :30], plan), "bf16 weight under fp32 compute")


@pytest.mark.parametrize(
    ("compute", "out_dtype"),
    [
        (compute, out)
        for compute in DTYPES
        for out in DTYPES
        if (out != torch.float64 if compute != torch.float64 else out in (torch.float32, torch.float64))
    ],
    ids=str,
)
@pytest.mark.parametrize("parallel", [None, "row", "column"])
def test_verify_every_out_dtype_with_gradients(
    compute: torch.dtype, out_dtype: torch.dtype, parallel: str | None
) -> None:
    """y, dX, dW and dbias are sums in acc_dtype whatever dtype y leaves in, hence dY comes in."""
    plan = plan_for(compute, 5)
    acc = getattr(torch, plan.acc_dtype)
    M, N, K, offsets = 9, 6, 16, [0, 4, 9]
    x = wide_exponents((M, K), compute, 1, spread=8).requires_grad_()
    w = wide_exponents((N, K), compute, 2, spread=8).requires_grad_()
    bias = wide_exponents((N,), acc, 3, spread=8).requires_grad_()
    dy = wide_exponents((M, N), out_dtype, 4, spread=40 if out_dtype != torch.float16 else 20)
    if out_dtype in (torch.float32, torch.bfloat16):
        dy[:, 0] = 2.0**-133  # subnormal: a float32 chain flushes it, a float64 chain does not
    ops.linear(x, w, bias, plan=plan, out_dtype=out_dtype, sample_offsets=offsets, parallel=parallel).backward(dy)
    exact, a, b = dy.to(acc), x.detach(), w.detach()
    y = ops.linear(a, b, bias, plan=plan, out_dtype=out_dtype, parallel=parallel)
    assert_bitwise_equal(y.detach(), reference.linear(a, b, plan, bias.detach(), out_dtype=out_dtype), "y")
    assert_bitwise_equal(x.grad, reference.linear_dx([exact], [b.to(acc)], plan, out_dtype=compute), "dX")
    dw = reference.linear_dw(exact, a.to(acc), offsets, plan)
    assert_bitwise_equal(w.grad, dw.to(compute), "dW")
    assert_bitwise_equal(
        linear_dw(dy, a, plan=plan, compute_dtype=compute, sample_offsets=offsets), dw, "dW, the operator"
    )
    db = reference.bias_grad(exact, offsets, plan)
    assert_bitwise_equal(bias.grad, db, "dbias")
    assert_bitwise_equal(bias_grad(dy, plan=plan, sample_offsets=offsets), db, "dbias, the operator")
    assert (compute == torch.float64) == bool(db[0] != 0) or out_dtype in (torch.float16, torch.float64)


# --- torch machinery ------------------------------------------------------------------------------------------------


def operator_calls() -> dict[str, tuple[object, tuple[object, ...]]]:
    """Every operator with arguments that require grad wherever it is differentiable."""
    plan = TreePlan(leaves=6).key()
    f32 = torch.float32

    def t(*shape: int) -> Tensor:
        return torch.randn(*shape)

    def g(*shape: int, dtype: torch.dtype = f32) -> Tensor:
        return torch.randn(*shape, dtype=dtype).requires_grad_()

    o = torch.ops.tbik
    pack = ops.pack_weight(t(4, 8), plan=TreePlan(leaves=6))
    operator_calls.keep = pack  # type: ignore[attr-defined]  # an operator only knows its handle
    bf16 = torch.bfloat16
    return {
        "linear": (o.linear, (g(2, 3, 8), g(4, 8), g(4), plan, f32, f32, None, False, False)),
        "linear bf16": (o.linear, (g(3, 8, dtype=bf16), g(4, 8), None, plan, bf16, bf16, [0, 1, 3], False, True)),
        "linear_group": (o.linear_group, (g(6, 8), [g(4, 8), g(2, 8)], [g(2)], [False, True], plan, f32, None, True)),
        "linear_packed": (o.linear_packed, (t(3, 8), pack.handle, t(4), 4, 0, f32)),
        "linear_cover": (o.linear_cover, (t(3, 5), t(4, 5), plan, f32, 8, 1, 5, False)),
        "linear_dx": (o.linear_dx, ([t(3, 4), t(3, 2)], [t(4, 8), t(2, 8)], plan, f32, f32, False)),
        "linear_dx_cover": (o.linear_dx_cover, ([t(3, 2)], [t(2, 8)], plan, f32, [4], 2, 5, False)),
        "linear_dw": (o.linear_dw, (t(2, 3, 4), t(2, 3, 8), None, plan, f32)),
        "bias_grad": (o.bias_grad, (t(2, 3, 4), None, plan)),
    }


@pytest.mark.parametrize("name", list(operator_calls()))
def test_verify_opcheck(name: str) -> None:
    operator, arguments = operator_calls()[name]
    torch.library.opcheck(operator.default, arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", list(operator_calls()))
def test_verify_outputs_are_no_views(name: str) -> None:
    """Autograd forbids in-place edits of a view that an operator returns."""
    operator, arguments = operator_calls()[name]
    outputs = operator(*arguments)  # type: ignore[operator]
    for output in outputs if isinstance(outputs, list) else [outputs]:
        assert not output._is_view()
        output.mul_(2)


def test_verify_outputs_can_be_edited_in_place() -> None:
    plan = TreePlan(leaves=6)
    x, w = (wide_exponents(shape, torch.float32, 1, spread=8).requires_grad_() for shape in ((2, 3, 16), (5, 16)))

    def gradients(relu: object) -> list[Tensor]:
        y = relu(ops.linear(x, w, plan=plan))  # type: ignore[operator]
        a, b = (relu(y) for y in ops.linear_group(x, [w, w], plan=plan))  # type: ignore[operator]
        return list(torch.autograd.grad((y + a * b).sum(), (x, w)))

    for value, expected in zip(gradients(torch.relu_), gradients(torch.relu), strict=True):
        assert_bitwise_equal(value, expected, "relu_ on the output")


@pytest.mark.parametrize(
    ("backend", "dtype", "dynamic"),
    [
        ("aot_eager", torch.float32, False),
        ("aot_eager", torch.bfloat16, True),
        *long_cases([("inductor", torch.bfloat16, False)]),
    ],
    ids=str,
)
def test_verify_compiled_equals_eager(backend: str, dtype: torch.dtype, dynamic: bool) -> None:
    plan = TreePlan(leaves=6, wire_dtype="bfloat16")

    def block(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: Tensor, plan: TreePlan) -> Tensor:
        a, b = ops.linear_group(x, (gate, up), (bias, None), plan=plan, compute_dtype=dtype)
        return ops.linear(a * b + a, down, plan=plan, compute_dtype=dtype, parallel="row") * 0.5 + x

    def run(function: object, batch: int, plan: TreePlan) -> list[Tensor]:
        x = wide_exponents((batch, 5, 16), dtype, 1, spread=8).requires_grad_()
        weights = [
            wide_exponents(s, torch.float32, 2, spread=8).requires_grad_() for s in [(24, 16), (24, 16), (16, 24)]
        ]
        bias = wide_exponents((24,), torch.float32, 3, spread=8).requires_grad_()
        y = function(x, *weights, bias, plan)  # type: ignore[operator]
        y.backward(wide_exponents(y.shape, dtype, 4, spread=8))
        return [y, x.grad, *(w.grad for w in weights), bias.grad]

    torch._dynamo.reset()
    # without this switch Inductor keeps fp32 between a * b and + a, where eager rounds to bf16 twice
    with torch._inductor.config.patch(emulate_precision_casts=True):
        compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
        for batch in (2, 3) if dynamic else (2,):
            for value, expected in zip(run(compiled, batch, plan), run(block, batch, plan), strict=True):
                assert_bitwise_equal(value, expected, f"{backend}, {batch} samples")
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "change",
    [{"leaves": 5}, {"wire_dtype": None}, {"grad_wire_dtype": None}],
    ids=lambda change: next(iter(change)),
)
def test_verify_compiled_plan_is_guarded(change: dict[str, object]) -> None:
    """The plan is a constant of the graph: another plan, equal in all other arguments, must be another graph."""

    def function(x: Tensor, w: Tensor, plan: TreePlan) -> Tensor:
        return ops.linear(x, w, plan=plan, parallel="row")

    def gradient(function: object, plan: TreePlan) -> tuple[Tensor, Tensor]:
        x, w = wide_exponents((4, 3, 96), torch.float32, 1), wide_exponents((5, 96), torch.float32, 2).requires_grad_()
        y = function(x, w, plan)  # type: ignore[operator]
        y.backward(wide_exponents(y.shape, torch.float32, 3))
        return y.detach(), w.grad

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    first, second = WIRE, dataclasses.replace(WIRE, **change)
    eager = [gradient(function, plan) for plan in (first, second, first)]
    which = 1 if "grad_wire_dtype" in change else 0
    assert_bits_differ(eager[0][which], eager[1][which], f"the plans differ in {change}")
    for plan, expected in zip((first, second, first), eager, strict=True):
        for value, other in zip(gradient(compiled, plan), expected, strict=True):
            assert_bitwise_equal(value, other, f"{plan}")
    torch._dynamo.reset()


def test_verify_checkpointing_and_autocast_change_nothing() -> None:
    plan = TreePlan(leaves=6)

    def gradients(checkpointed: bool, autocast: bool) -> list[Tensor]:
        x, w = (t.requires_grad_() for t in operands(Problem(4, 8, 32, 6), seed=1))

        def function(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                return ops.linear(x, w, plan=plan)

        y = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False) if checkpointed else function(x)
        y.backward(wide_exponents((4, 8), torch.float32, 5))
        return [y, x.grad, w.grad]

    expected = gradients(False, False)
    for checkpointed, autocast in ((True, False), (False, True), (True, True)):
        for value, other in zip(gradients(checkpointed, autocast), expected, strict=True):
            assert_bitwise_equal(value, other, f"checkpointed {checkpointed}, autocast {autocast}")


def test_verify_only_needed_gradients() -> None:
    plan = TreePlan(leaves=6)
    for need_x, need_w, need_b in itertools.product((False, True), repeat=3):
        x, w = operands(Problem(4, 8, 32, 6), seed=1)
        b = torch.zeros(8)
        for t, need in ((x, need_x), (w, need_w), (b, need_b)):
            t.requires_grad_(need)
        y = ops.linear(x, w, b, plan=plan)
        assert y.requires_grad == (need_x or need_w or need_b)
        if y.requires_grad:
            y.sum().backward()
        assert [t.grad is not None for t in (x, w, b)] == [need_x, need_w, need_b]
    # a member nobody uses gives zeros, not an error
    x = torch.randn(3, 8, requires_grad=True)
    w = [torch.randn(4, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)]
    ops.linear_group(x, w, plan=plan)[0].sum().backward()
    expected = reference.linear_dx([torch.ones(3, 4), torch.zeros(3, 2)], w, plan)
    assert_bitwise_equal(x.grad, expected, "dX with one member used")


def test_verify_second_derivatives_and_transforms_are_refused() -> None:
    plan = TreePlan(leaves=2)
    x, w = torch.randn(3, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(ops.linear(x, w, plan=plan).sum(), x, create_graph=True)
    with pytest.raises(PlanError, match="differentiable once"):
        dx.sum().backward()
    dx = torch.autograd.grad(sum(y.sum() for y in ops.linear_group(x, [w], plan=plan)), x, create_graph=True)[0]
    with pytest.raises(PlanError, match="differentiable once"):
        dx.sum().backward()

    def f(x: Tensor) -> Tensor:
        return ops.linear(x, w.detach(), plan=plan)

    for transform in (torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum()), torch.func.jacrev):
        with pytest.raises(PlanError, match="torch.func"):
            transform(f)(torch.randn(3, 8))
    with pytest.raises(PlanError, match="torch.func"):
        torch.func.jvp(f, (torch.randn(3, 8),), (torch.randn(3, 8),))
    key = plan.key()
    with pytest.raises(PlanError, match=r"no torch.func.vmap"):
        torch.func.vmap(lambda x: torch.ops.tbik.linear_dw(x, x, None, key, torch.float32))(torch.randn(2, 3, 8))
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), pytest.raises(PlanError, match="tangent"):
        f(forward_ad.make_dual(torch.randn(3, 8), torch.randn(3, 8)))


# --- accuracy -------------------------------------------------------------------------------------------------------


def test_validate_accuracy_bf16() -> None:
    """Mean error <= 1.02 x that of one rounding of the exact sum, for y, dX and the bf16 copy of dW."""
    generator = torch.Generator().manual_seed(1)
    M, N, K = 64, 96, 1024
    x = torch.randn(M, K, generator=generator).bfloat16().requires_grad_()
    w = torch.randn(N, K, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(M, N, generator=generator).bfloat16()
    y = ops.linear(x, w, plan=TreePlan(leaves=8))
    y.backward(dy)
    exact = {
        "y": (y, x.double() @ w.double().T),
        "dX": (x.grad, dy.double() @ w.double()),
        "dW": (w.grad, dy.double().T @ x.double()),
    }
    for name, (value, truth) in exact.items():
        error = (value.double() - truth).abs().mean()
        one_rounding = (truth.bfloat16().double() - truth).abs().mean()
        assert error <= 1.02 * one_rounding, f"{name}: {error:.3e} against {one_rounding:.3e} of one rounding"


def test_validate_accuracy_fp32() -> None:
    """Mean error <= that of torch's own product, for y, dX and dW; float64 operands: <= 2^-50 of the sum of terms."""
    generator = torch.Generator().manual_seed(2)
    M, N, K = 64, 256, 1024
    x = torch.randn(M, K, generator=generator).requires_grad_()
    w = torch.randn(N, K, generator=generator).requires_grad_()
    dy = torch.randn(M, N, generator=generator)
    plan = TreePlan(leaves=32)
    y = ops.linear(x, w, plan=plan)
    y.backward(dy)
    exact = {
        "y": (y, x @ w.T, x.double() @ w.double().T),
        "dX": (x.grad, dy @ w, dy.double() @ w.double()),
        "dW": (w.grad, dy.T @ x, dy.double().T @ x.double()),
    }
    for name, (value, torchs, truth) in exact.items():
        error, baseline = ((v.double() - truth).abs().mean() for v in (value, torchs))
        assert error <= baseline, f"{name}: {error:.3e} against torch's {baseline:.3e}"
    x64, w64 = x.detach().double(), w.detach().double()
    error = (ops.linear(x64, w64, plan=TreePlan(leaves=32, acc_dtype="float64")) - x64 @ w64.T).abs()
    assert (error <= 2.0**-46 * (x64.abs() @ w64.abs().T)).all()
