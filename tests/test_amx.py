"""Leaf "amx" (ORDER.md A14) on every path against the oracle, and through the operators. Only AMX tiles need AMX."""

from __future__ import annotations

import itertools

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import SHAPES, wide_exponents
from torch import Tensor

from tbik import _C, PlanError, TreePlan, ops, reference, reference_experts, tree
from tbik.ops.experts import PackedExperts, Routing, experts, experts_backward, route
from tbik.ops.linear import CoverRun, linear_cover

BF16, FP32 = torch.bfloat16, torch.float32
PATHS = _C.amx_paths()
PLAN = TreePlan(leaf="amx")


def linear(x: Tensor, w: Tensor, leaves: int, path: str = "", leaf: str = "amx", rounds: bool = False) -> Tensor:
    cuts, program = [_C.cuts(x.shape[1], leaves)], _C.run_schedule(0, leaves, leaves, True, rounds)
    return _C.gemm([x], False, [w], False, cuts, program, "bfloat16", None, FP32, path, leaf)


@pytest.mark.parametrize("path", PATHS)
def test_verify_every_path_equals_reference(path: str) -> None:
    """Full and short blocks, odd leaves, empty ones, one and several tiles of rows, panels that are not full."""
    shapes = [(p.m, p.n, p.k, p.leaves) for p in SHAPES] + [(33, 70, 203, 8), (17, 65, 97, 3), (16, 2, 64, 2)]
    for m, n, k, leaves in shapes:
        x, w = wide_exponents((m, k), BF16, seed=1), wide_exponents((n, k), BF16, seed=2)
        expected = reference.linear(x, w, TreePlan(leaves=leaves, leaf="amx"))
        assert_bitwise_equal(linear(x, w, leaves, path), expected, f"{path} M={m} N={n} K={k} L={leaves}")


def test_verify_the_order_shows_in_the_bits() -> None:
    """Negative controls: A1's chain, one flat leaf, blocks that begin elsewhere."""
    x, w = wide_exponents((8, 512), BF16, seed=1), wide_exponents((64, 512), BF16, seed=2)
    blocks = linear(x, w, 8)
    assert_bits_differ(blocks, linear(x, w, 8, leaf="fma"), "A14 and A1")
    assert_bits_differ(blocks, linear(x, w, 1), "L = 8 and L = 1")
    shifted = [torch.nn.functional.pad(t, (16, 0)) for t in (x, w)]
    assert_bits_differ(linear(*shifted, 1), linear(x, w, 1), "16 zeros first")


@pytest.mark.parametrize("path", PATHS)
def test_verify_company_packs_and_threads(path: str) -> None:
    """M = 1..70 and 300, in the call and packed before, 1 and 2 threads, NaN in the neighbours: a row's own bits."""
    before = torch.get_num_threads()
    for n, k, leaves in ((64, 97, 8), (1, 33, 4), (130, 640, 6)):
        x, w = wide_exponents((300, k), BF16, seed=4), wide_exponents((n, k), BF16, seed=5)
        cuts, program = [_C.cuts(k, leaves)], _C.run_schedule(0, leaves, leaves, True)
        packed = _C.pack([w], False, cuts, "bfloat16")
        whole = linear(x, w, leaves, PATHS[-1])
        for m, threads in itertools.product((*range(1, 71, 1 if path != "portable" else 23), 300), (1, 2)):
            torch.set_num_threads(threads)
            out = _C.gemm([x[:m]], False, packed, False, cuts, program, "bfloat16", None, FP32, path, "amx")
            assert_bitwise_equal(out, whole[:m], f"{path} M={m} N={n} K={k}, {threads} threads")
        torch.set_num_threads(before)
        assert_bitwise_equal(linear(x[299:], w, leaves, path), whole[299:], f"{path} the last row alone")
        x[::2] = torch.nan
        x[2::4] = torch.inf
        assert_bitwise_equal(linear(x, w, leaves, path)[1::2], whole[1::2], "NaN and Inf in the neighbours")


@pytest.mark.parametrize("path", PATHS)
def test_verify_flush_and_special_values(path: str) -> None:
    """Sums about 2^-126 (even, odd, their sum, the accumulator), subnormal operands, infinities, NaN, overflow, -0."""
    generator = torch.Generator().manual_seed(0)
    for seed, scale in itertools.product(range(6), (2.0**-62, 2.0**-63, 2.0**-64)):
        x, w = (wide_exponents((16, 96), BF16, seed=2 * seed + i, spread=6).float() * scale for i in (0, 1))
        x, w = x.bfloat16(), w.bfloat16()
        expected = reference.linear(x, w, TreePlan(leaves=2, leaf="amx"))
        assert_bitwise_equal(linear(x, w, 2, path), expected, f"{path} seed {seed}, scale {scale}")
    special = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, float("inf"), float("nan"), 1.0, -1.0]).bfloat16()
    for keep in (6, 10):  # without infinities, then all
        x, w = (special[torch.randint(keep, shape, generator=generator)] for shape in ((17, 75), (66, 75)))
        expected = reference.linear(x, w, TreePlan(leaves=3, leaf="amx"))
        assert_bitwise_equal(linear(x, w, 3, path), expected, f"{path} {keep} special values")
    zeros = torch.full((3, 40), -0.0).bfloat16()
    assert_bitwise_equal(linear(zeros, -zeros, 1, path), torch.zeros(3, 3), "-0 leaves as +0")


@pytest.mark.parametrize("path", PATHS)
def test_verify_the_mode_of_the_process(path: str) -> None:
    x, w = (wide_exponents((5, 70), BF16, seed=i, spread=6).float().mul(2.0**-63).bfloat16() for i in (1, 2))
    expected = linear(x, w, 2, path)
    torch.set_flush_denormal(True)
    try:
        assert_bitwise_equal(linear(x, w, 2, path), expected, path)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("path", PATHS)
def test_verify_gradients_of_a_group(path: str) -> None:
    """dX of two members with odd leaves, whose pairs and blocks run on; dW by samples; k-major, fp32 masters."""
    for n1, n2, k, m in ((21, 13, 66, 35), (70, 70, 5, 3), (1, 2, 65, 17)):
        grads = [wide_exponents((m, n), BF16, seed=n) for n in (n1, n2)]
        weights = [wide_exponents((n, k), FP32, seed=n + 1) for n in (n1, n2)]
        cuts, program = [_C.cuts(n, 3) for n in (n1, n2)], _C.run_schedule(0, 3, 3, True)
        found = _C.gemm(grads, False, weights, True, cuts, program, "bfloat16", None, FP32, path, "amx")
        expected = reference.linear_dx(grads, [w.bfloat16() for w in weights], TreePlan(leaves=3, leaf="amx"))
        assert_bitwise_equal(found, expected, f"{path} dX {n1}, {n2}, {k}")
        x, dy, offsets = wide_exponents((m, k), BF16, seed=9), grads[0], [0, 1, m // 2, m // 2, m]
        found = _C.gemm(
            [dy], True, [x], True, [offsets], _C.sample_schedule([1] * 4), "bfloat16", None, FP32, path, "amx"
        )
        expected = reference.linear_dw(dy, x, offsets, PLAN)
        assert_bitwise_equal(found, expected, f"{path} dW {n1}, {k}")


@pytest.mark.parametrize("wire", [None, "bfloat16"])
def test_verify_operators(wire: str | None) -> None:
    """y, dX, dW, db of ops.linear and of a group, samples of 3, 0 and 514 tokens; an fp32 dY is A1's; compiled too."""
    plan = TreePlan(leaves=5, leaf="amx", wire_dtype=wire, grad_wire_dtype=wire)
    offsets = [0, 3, 3, 517]
    x, w = wide_exponents((517, 50), BF16, seed=1), wide_exponents((9, 50), FP32, seed=2)
    bias, dy = wide_exponents((9,), BF16, seed=3), wide_exponents((517, 9), BF16, seed=4)
    for out_dtype in (None, FP32):
        x_, w_, bias_ = (t.clone().requires_grad_() for t in (x, w, bias))
        y = ops.linear(x_, w_, bias_, plan=plan, compute_dtype=BF16, sample_offsets=offsets, out_dtype=out_dtype)
        assert_bitwise_equal(y.detach(), reference.linear(x, w.bfloat16(), plan, bias, y.dtype), "y")
        y.backward(dy.to(y.dtype))
        assert_bitwise_equal(x_.grad, reference.linear_dx([dy.to(y.dtype)], [w.bfloat16()], plan, BF16), "dX")
        assert_bitwise_equal(w_.grad, reference.linear_dw(dy.to(y.dtype), x, offsets, plan), "dW")
        assert_bitwise_equal(bias_.grad, reference.bias_grad(dy, offsets, plan).to(BF16), "db")


def test_verify_covers_packs_and_compilation() -> None:
    """Every split of the leaves over 1 to 5 ranks folds to the same root; packs; torch.compile."""
    plan = TreePlan(leaves=5, leaf="amx")
    x, w = wide_exponents((7, 90), BF16, seed=1), wide_exponents((6, 90), BF16, seed=2)
    expected = ops.linear(x, w, plan=plan, out_dtype=FP32)
    cuts = plan.cuts(90)
    for world in range(1, 6):
        values: dict[tuple[int, int], Tensor] = {}
        for rank in range(world):
            lo, hi = 5 * rank // world, 5 * (rank + 1) // world
            part = slice(cuts[lo], cuts[hi])
            run = CoverRun(90, lo, hi)
            cover = linear_cover(x[:, part], w[:, part], run, plan=plan, compute_dtype=BF16, parallel=True)
            values |= dict(zip(tree.cover(lo, hi), cover, strict=True))
        assert_bitwise_equal(reference.fold_covers([values], 5), expected, f"{world} ranks")
    with torch.no_grad():
        packed = ops.linear(x, ops.pack_weight(w, plan=plan), plan=plan, out_dtype=FP32)
    assert_bitwise_equal(packed, expected, "packed")
    compiled = torch.compile(lambda x, w: ops.linear(x, w, plan=plan, out_dtype=FP32), fullgraph=True)
    assert_bitwise_equal(compiled(x, w), expected, "compiled")


def test_verify_experts() -> None:
    """The chain over slots is A1's, the products are A14's; a parameter's chain counts the tokens of the expert."""
    x, logits = (
        wide_exponents((70, 20), BF16, 1, spread=6),
        torch.randn(70, 3, generator=torch.Generator().manual_seed(0)),
    )
    gate_up, down = wide_exponents((3, 48, 20), BF16, 3, spread=8), wide_exponents((3, 20, 24), BF16, 4, spread=8)
    dy, plan, offsets = wide_exponents((70, 20), BF16, 5, spread=8), TreePlan(leaves=3, leaf="amx"), [0, 40, 70]
    routing = Routing(*(t for t in route(logits, 2)))
    assert_bitwise_equal(
        experts(x, routing, gate_up, down, plan=plan), reference_experts.experts(x, *routing, gate_up, down, plan), "y"
    )
    run = CoverRun(24, 0, 3)
    found = experts_backward(dy, x, routing, gate_up, down, run, plan=plan, sample_offsets=offsets)
    expected = reference_experts.experts_backward(dy, x, *routing, gate_up, down, plan, offsets)
    assert_bitwise_equal(found.gate_up, expected.gate_up, "dW of gate and up")
    assert_bitwise_equal(found.down, expected.down, "dW of down")
    dx = reference.fold_covers([dict(zip(tree.cover(0, 3), found.x, strict=True))], 3)
    assert_bitwise_equal(dx, expected.x, "dX")


def test_verify_what_is_no_product_of_bf16_is_as_for_fma() -> None:
    """fp32, fp16 and attention."""
    for dtype in (FP32, torch.float16):
        x, w = wide_exponents((3, 80), dtype, 1), wide_exponents((4, 80), dtype, 2)
        expected = ops.linear(x, w, plan=TreePlan())
        assert_bitwise_equal(ops.linear(x, w, plan=PLAN), expected, f"{dtype}")
    q, k, v = (wide_exponents((5, 2, 16), BF16, i, spread=4) for i in (1, 2, 3))
    cu = torch.tensor([0, 5])
    expected, found = (ops.attention(q, k, v, cu, plan=plan) for plan in (TreePlan(), PLAN))
    assert_bitwise_equal(found, expected, "attention")


def test_verify_what_another_leaf_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor-core leaves on the CPU, compiled too, and packs of experts."""
    mma, x = TreePlan(leaves=2, leaf="mma:sm_90"), torch.zeros(3, 8, dtype=BF16)
    q, cu = torch.zeros(3, 2, 16, dtype=BF16), torch.tensor([0, 3])
    calls = {
        "linear": lambda: ops.linear(x, x, plan=mma),
        "attention": lambda: ops.attention(q, q, q, cu, plan=mma),
        "pack": lambda: ops.pack_weight(x, plan=mma),
        "experts": lambda: PackedExperts(torch.zeros(2, 4, 8, dtype=BF16), CoverRun(8, 0, 2), mma, BF16),
    }
    for name, call in calls.items():
        with pytest.raises(PlanError, match="sm_90"):
            call()
        if name in ("linear", "attention"):
            with pytest.raises(
                (PlanError, torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported), match="sm_90"
            ):
                torch.compile(call, fullgraph=True, backend="eager")()


def test_verify_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="accumulates in float32"):
        TreePlan(leaf="amx", acc_dtype="float64")
    x = torch.zeros(2, 8, dtype=BF16)
    with pytest.raises(ValueError, match="leaf: expected 'fma' or 'amx', got 'mma:sm_90'"):
        linear(x, x, 2, leaf="mma:sm_90")
    if "amx" in PATHS:
        with pytest.raises(ValueError, match="computes the leaf 'amx' of bfloat16 only"):
            linear(x, x, 2, "amx", leaf="fma")
    else:
        with pytest.raises(ValueError, match="no AMX tiles"):
            linear(x, x, 2, "amx")
    if "avx512_bf16" in _C.cpu_paths():
        assert_bitwise_equal(
            linear(x + 1, x + 1, 2, "avx512_bf16"), linear(x + 1, x + 1, 2, "avx512f"), "by its fp32 chains"
        )
    else:
        with pytest.raises(ValueError, match="not available"):
            linear(x, x, 2, "avx512_bf16")
    monkeypatch.setenv("TBIK_CPU_PATH", "portable")
    expected = linear(x + 1, x + 1, 2)
    monkeypatch.setenv("TBIK_CPU_PATH", PATHS[0])
    assert_bitwise_equal(linear(x + 1, x + 1, 2), expected, PATHS[0])
    assert_bitwise_equal(linear(x + 1, x + 1, 2, leaf="fma"), expected, f"TBIK_CPU_PATH={PATHS[0]}, leaf fma")
