"""tbik.ops.rms_norm, add_rms_norm, layer_norm against the oracle, and under every change that may not matter."""

from __future__ import annotations

import itertools
import math
import mmap
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcases import DTYPES, PATHS, check_rows, compiled_equals_eager, run_with_flush, threads
from torch import Tensor

from tbik import _C, TreePlan, ops, reference, tree
from tbik.errors import PlanError
from tbik.ops import norm
from tbik.ops.linear import CoverRun
from tbik.ops.norm import fold_head_covers, norm_weight_grad, norm_weight_head_covers, rms_norm_backward_f32

EPS = 1e-6
NARROW = TreePlan(grad_wire_dtype="bfloat16")


def spread_of(dtype: torch.dtype) -> int:
    return 10 if dtype == torch.float16 else 24


def rows(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    return wide_exponents(shape, dtype, seed, spread_of(dtype))


LENGTHS = st.one_of(st.integers(1, 70), st.sampled_from([128, 511, 512, 513, 576, 1024, 1100]))
PROBLEMS = {
    "k": LENGTHS,
    "m": st.integers(1, 3),
    "dtype": st.sampled_from(DTYPES),
    "w_dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 2**20),
    "path": st.sampled_from(PATHS),
}


@settings(max_examples=200, deadline=None)
@given(**PROBLEMS, offset=st.booleans())
def test_verify_rms_norm_equals_reference(
    k: int, m: int, dtype: torch.dtype, w_dtype: torch.dtype, seed: int, path: str, offset: bool
) -> None:
    x, w, dy = rows((m, k), dtype, seed), rows((k,), w_dtype, seed + 1), rows((m, k), dtype, seed + 2)
    y = _C.norm(x, None, w, None, EPS, False, offset, dtype, path)[0]
    assert_bitwise_equal(y, reference.rms_norm(x, w, EPS, offset), f"{path} y")
    dx = _C.norm_dx(dy, x, w, None, EPS, False, offset, dtype, dtype, path)
    assert_bitwise_equal(dx, reference.norm_dx(dy, x, w, EPS, offset=offset), f"{path} dx")
    wide = _C.norm_dx(dy.float(), x, w, None, EPS, False, offset, dtype, torch.float32, path)
    expected = reference.norm_dx(dy, x, w, EPS, offset=offset, out_dtype=torch.float32)
    assert_bitwise_equal(wide, expected, f"{path} dx unrounded")
    leaves = _C.column_leaves(dy, x, 1, EPS, False, [0, m], path)
    assert_bitwise_equal(leaves[0] + 0.0, reference.norm_dw(dy, x, EPS, [0, m]), f"{path} dw")


@settings(max_examples=200, deadline=None)
@given(**PROBLEMS)
def test_verify_add_rms_norm_equals_reference(
    k: int, m: int, dtype: torch.dtype, w_dtype: torch.dtype, seed: int, path: str
) -> None:
    x, residual, w = rows((m, k), dtype, seed), rows((m, k), dtype, seed + 1), rows((k,), w_dtype, seed + 2)
    dy, dh = rows((m, k), dtype, seed + 3), rows((m, k), dtype, seed + 4)
    y, h = _C.norm(x, residual, w, None, EPS, False, False, dtype, path)
    expected = reference.add_rms_norm(x, residual, w, EPS)
    assert_bitwise_equal(y, expected[0], f"{path} y")
    assert_bitwise_equal(h, expected[1], f"{path} h")
    both = _C.norm_dx(dy, h, w, dh, EPS, False, False, dtype, dtype, path)
    assert_bitwise_equal(both, reference.norm_dx(dy, h, w, EPS, residual=dh), f"{path} gradient")


@settings(max_examples=200, deadline=None)
@given(**PROBLEMS, with_bias=st.booleans())
def test_verify_layer_norm_equals_reference(
    k: int, m: int, dtype: torch.dtype, w_dtype: torch.dtype, seed: int, path: str, with_bias: bool
) -> None:
    x, w, dy = rows((m, k), dtype, seed), rows((k,), w_dtype, seed + 1), rows((m, k), dtype, seed + 2)
    bias = rows((k,), w_dtype, seed + 3) if with_bias else None
    y = _C.norm(x, None, w, bias, EPS, True, False, dtype, path)[0]
    assert_bitwise_equal(y, reference.layer_norm(x, w, bias, EPS), f"{path} y")
    dx = _C.norm_dx(dy, x, w, None, EPS, True, False, dtype, dtype, path)
    assert_bitwise_equal(dx, reference.norm_dx(dy, x, w, EPS, centered=True), f"{path} dx")
    leaves = _C.column_leaves(dy, x, 1, EPS, True, [0, m], path)
    dw = reference.norm_dw(dy, x, EPS, [0, m], centered=True)
    assert_bitwise_equal(leaves[0] + 0.0, dw, f"{path} dw")
    both = _C.norm_gradients(dy, x, w, None, EPS, True, False, dtype, dtype, True, True, True, 1, [0, m], path)
    assert_bitwise_equal(both[0], dx, f"{path} dx at once")
    assert_bitwise_equal(both[1][0] + 0.0, dw, f"{path} dw at once")
    assert_bitwise_equal(both[2][0] + 0.0, reference.norm_dw(dy, None, EPS, [0, m]), f"{path} dbias at once")


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 5]), min_size=1, max_size=5),
    k=st.integers(1, 20),
    heads=st.sampled_from([0, 1, 2, 3, 5]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
    narrow=st.booleans(),
    path=st.sampled_from(PATHS),
)
def test_verify_parameter_gradients_equal_reference(
    sizes: list[int], k: int, heads: int, dtype: torch.dtype, seed: int, narrow: bool, path: str
) -> None:
    """Samples of any size, none included, with and without heads; root and covers of runs of samples."""
    offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    shape = (offsets[-1], heads, k) if heads else (offsets[-1], k)
    if not offsets[-1]:
        return
    dy, x = rows(shape, dtype, seed), rows(shape, dtype, seed + 1)
    plan = NARROW if narrow else None
    kwargs = {"heads": bool(heads), "sample_offsets": offsets, "plan": plan}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TBIK_CPU_PATH", path)
        dw = norm_weight_grad(dy, x, EPS, **kwargs)  # type: ignore[arg-type]
        db = norm_weight_grad(dy, None, **kwargs)  # type: ignore[arg-type]
        covers = norm_weight_grad(dy, x, EPS, first_sample=3, **kwargs)  # type: ignore[arg-type]
    expected = reference.norm_dw(dy, x, EPS, offsets, heads=bool(heads), narrow=narrow)
    assert_bitwise_equal(dw, expected, f"dw {sizes} {heads}")
    expected = reference.norm_dw(dy, None, EPS, offsets, heads=bool(heads), narrow=narrow)
    assert_bitwise_equal(db, expected, f"dbias {sizes} {heads}")
    shifted = [0, 0, 0, *offsets]  # three samples before these
    expected = reference.norm_dw(dy, x, EPS, shifted, heads=bool(heads), narrow=narrow, leaf_range=(3, 3 + len(sizes)))
    assert len(covers) == len(expected)
    for value, node in zip(covers, expected, strict=True):
        assert_bitwise_equal(value, reference.epilogue(expected[node]), f"cover {node}")


def test_verify_blocks_of_512_tokens() -> None:
    """Long samples: a tree over blocks counted from the sample's first position, inside it a chain."""
    offsets = [0, 3, 1033]
    dy, x = rows((1033, 2, 5), torch.float32, 1), rows((1033, 2, 5), torch.float32, 2)
    for path in PATHS:
        leaves = _C.column_leaves(dy, x, 2, EPS, False, [0, 3, 515, 1027, 1033], path).unflatten(1, (2, 5))
        per_head = [leaves[0], tree.root(list(leaves[1:]), reference.add)]
        expected = tree.root([tree.root(list(heads), reference.add) for heads in per_head], reference.add)
        dw = norm_weight_grad(dy, x, EPS, heads=True, sample_offsets=offsets)
        assert_bitwise_equal(dw, expected, path)
    assert_bitwise_equal(dw, reference.norm_dw(dy, x, EPS, offsets, heads=True), "oracle")
    assert_bits_differ(dw, norm_weight_grad(dy, x, EPS, heads=True), "one sample, other blocks")


def test_verify_head_covers() -> None:
    """Ranks that hold 4 and 5 of 9 heads: their covers per sample merge into the gradient of one rank."""
    dtype, offsets = torch.bfloat16, [0, 3, 3, 520]
    dy, x = rows((520, 9, 6), dtype, 1), rows((520, 9, 6), dtype, 2)
    for plan in (None, NARROW):
        whole = norm_weight_grad(dy, x, EPS, heads=True, sample_offsets=offsets, plan=plan)
        expected = reference.norm_dw(dy, x, EPS, offsets, heads=True, narrow=plan is not None)
        assert_bitwise_equal(whole, expected, "one rank")
        for bounds in ([0, 4, 9], [0, 5, 9], [0, 1, 3, 9], [0, 9]):
            runs = [CoverRun(9, lo, hi) for lo, hi in itertools.pairwise(bounds)]
            covers = [
                norm_weight_head_covers(dy[:, r.lo : r.hi], x[:, r.lo : r.hi], EPS, r, sample_offsets=offsets)
                for r in runs
            ]
            assert [c.shape[1] for c in covers] == [len(tree.cover(r.lo, r.hi)) for r in runs]
            assert_bitwise_equal(fold_head_covers(covers, runs, plan=plan), whole, f"heads {bounds}")
    flat = norm_weight_grad(dy.flatten(0, 1), x.flatten(0, 1), EPS)
    assert_bits_differ(whole, flat, "heads as tokens")


SPECIAL = (math.inf, -math.inf, math.nan, 3e38, -3e38, 1e19, 1e-19, 1e-38, 1e-42, 0.0, -0.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_special_values(dtype: torch.dtype, path: str) -> None:
    """Rows with one special value each, rows of one value, beside ordinary rows; then special weights. eps 0: r is Inf
    or huge where squares vanish. The kernels skip their tests for NaN where none can occur."""
    k = 72
    alone = torch.stack([torch.full((k,), value) for value in SPECIAL])
    among = torch.randn(len(SPECIAL), k, generator=torch.Generator().manual_seed(1))
    among[:, 40] = torch.tensor(SPECIAL)
    tiny = among[3:5] * 1e-30
    x = torch.cat([among, alone, tiny, among[:2].nan_to_num(1.0, 1.0, 1.0)]).to(dtype)
    ones = torch.ones(k, dtype=dtype)
    special = torch.cat([torch.tensor(SPECIAL), torch.ones(k - len(SPECIAL))]).to(dtype)
    dy = rows(x.shape, dtype, 5)
    special_dy = dy.clone()
    special_dy[:, 7] = x[:, 40]
    for eps, (w, bias), up in itertools.product(
        (0.0, EPS), ((ones, ones), (special, ones), (ones, special)), (dy, special_dy)
    ):
        for centered in (False, True):
            expected = reference.layer_norm(x, w, bias, eps) if centered else reference.rms_norm(x, w, eps)
            y = _C.norm(x, None, w, bias if centered else None, eps, centered, False, dtype, path)[0]
            assert_bitwise_equal(y, expected, f"{path} y, eps {eps}, centered {centered}")
            got = _C.norm_gradients(
                up, x, w, None, eps, centered, False, dtype, dtype, True, True, True, 1, [0, len(x)], path
            )
            assert_bitwise_equal(got[0], reference.norm_dx(up, x, w, eps, centered), f"{path} dx, eps {eps}")
            for leaf, n in zip(got[1:], (x, None)):
                wanted = reference.norm_dw(up, n, eps, [0, len(x)], centered)
                assert_bitwise_equal(leaf[0].where(~leaf[0].isnan(), torch.nan), wanted, f"{path} leaf, eps {eps}")


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.sampled_from([1, 5, 40]),
    heads=st.sampled_from([1, 3]),
    k=st.sampled_from([8, 33, 300, 1100]),
    chains=st.integers(0, 5),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 4),
    centered=st.booleans(),
    count=st.integers(1, 3),
    seed=st.integers(0, 2**20),
    path=st.sampled_from(PATHS),
)
def test_verify_gradients_ignore_threads_and_company(
    tokens: int,
    heads: int,
    k: int,
    chains: int,
    dtypes: tuple[torch.dtype, ...],
    centered: bool,
    count: int,
    seed: int,
    path: str,
) -> None:
    """All gradients at once, in any number of threads, equal dx, dw and dbias asked for alone; operands of several
    types, also where the chains do not cover the tokens."""
    x_type, dy_type, w_type, out = dtypes
    x, dy = rows((tokens, heads, k), x_type, seed), rows((tokens, heads, k), dy_type, seed + 1)
    w = rows((k,), w_type, seed + 2)
    cuts = sorted(torch.randint(0, tokens + 1, (chains + 1,), generator=torch.Generator().manual_seed(seed)).tolist())
    arguments = (EPS, centered, False, x_type, out)
    dx = torch.cat(
        [_C.norm_dx(d[None], t[None], w, None, *arguments, path) for d, t in zip(dy.flatten(0, 1), x.flatten(0, 1))]
    )
    dw = _C.column_leaves(dy, x, heads, EPS, centered, cuts, path)
    dbias = _C.column_leaves(dy, None, heads, EPS, centered, cuts, path)
    with threads(count):
        got = _C.norm_gradients(dy, x, w, None, *arguments, True, True, True, heads, cuts, path)
        assert got[0] is not None
        assert_bitwise_equal(got[0].flatten(0, 1), dx, f"{path} dx, {count} threads")
        assert_bitwise_equal(got[1], dw, f"{path} dw, {count} threads")
        assert_bitwise_equal(got[2], dbias, f"{path} dbias, {count} threads")
        pair = _C.norm_gradients(dy, x, w, None, *arguments, False, True, True, heads, cuts, path)
        assert pair[0] is None
        assert_bitwise_equal(pair[1], dw, f"{path} dw without dx")
        assert_bitwise_equal(_C.column_leaves(dy, x, heads, EPS, centered, cuts, path), dw, f"{path} dw alone")
    for head, token in ((0, 0), (heads - 1, tokens - 1)):
        chain = next((c for c in range(chains) if cuts[c] <= token < cuts[c + 1]), None)
        if chain is None:
            continue
        part = slice(cuts[chain], cuts[chain + 1])
        wanted = reference.norm_dw(dy[part, head], x[part, head], EPS, [0, part.stop - part.start], centered)
        assert_bitwise_equal(dw[chain].reshape(heads, k)[head] + 0.0, wanted, f"{path} dw of head {head}")


@pytest.mark.parametrize("centered", [False, True])
def test_verify_results_larger_than_the_caches(centered: bool) -> None:
    """They are written past the caches: the same bits as a few rows at a time, which are not."""
    size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
    kibibytes = int(size.read_text().strip().removesuffix("K")) if size.exists() else 0
    if not 0 < kibibytes <= 64 << 10:
        pytest.skip("the last cache is of unknown size, or larger than 64 MiB")
    k = 4096
    x = rows((kibibytes // 16 + 5, k), torch.float32, 3)
    dy, w = rows(x.shape, torch.float32, 4), rows((k,), torch.float32, 5)
    bias = rows((k,), torch.float32, 6) if centered else None
    arguments = (w, None, EPS, centered, False, torch.float32, torch.float32)
    for path, count in itertools.product(PATHS, (1, 2)):
        with threads(count):
            y = _C.norm(x, None, w, bias, EPS, centered, False, torch.float32, path)[0]
            dx = _C.norm_gradients(dy, x, *arguments, True, True, centered, 1, [0, 512, len(x)], path)[0]
            assert dx is not None
            for first in (0, len(x) // 2, len(x) - 3):
                part = slice(first, first + 3)
                few = _C.norm(x[part], None, w, bias, EPS, centered, False, torch.float32, path)[0]
                assert_bitwise_equal(y[part], few, f"{path} y, {count} threads")
                few = _C.norm_dx(dy[part], x[part], *arguments, path)
                assert_bitwise_equal(dx[part], few, f"{path} dx, {count} threads")
            assert torch.equal(y.isnan(), torch.zeros_like(y, dtype=torch.bool))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_rows_alone_equal_rows_in_company(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    k = 520
    x, residual, w, bias = (rows(s, dtype, i) for i, s in enumerate(((128, k), (128, k), (k,), (k,))))
    dy, dh = rows((128, k), dtype, 7), rows((128, k), dtype, 8)

    def run(x: Tensor, residual: Tensor, dy: Tensor, dh: Tensor) -> list[Tensor]:
        x, residual = (t.detach().requires_grad_() for t in (x, residual))
        outputs = [
            ops.rms_norm(x, w, EPS, offset=True),
            ops.layer_norm(x, w, bias, EPS),
            *ops.add_rms_norm(x, residual, w, EPS),
        ]
        gradients = []
        for y, upstream in ((outputs[0], (dy,)), (outputs[1], (dy,)), (tuple(outputs[2:]), (dy, dh))):
            gradients += torch.autograd.grad(y, (x, residual), upstream, allow_unused=True)
        return [*(y.detach() for y in outputs), *(g for g in gradients if g is not None)]

    check_rows(run, (x, residual, dy, dh), monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_parameter_gradient_ignores_micro_batches(dtype: torch.dtype) -> None:
    """Eight samples at once = four nodes of two samples, folded; packing and padding change nothing."""
    x, dy = rows((8, 33, 64), dtype, 1), rows((8, 33, 64), dtype, 2)
    w = rows((64,), torch.float32, 3).requires_grad_()
    ops.rms_norm(x, w, EPS).backward(dy)
    parts = [norm_weight_grad(dy[i : i + 2], x[i : i + 2], EPS) for i in range(0, 8, 2)]
    assert_bitwise_equal(w.grad, tree.root(parts, reference.add), "micro-batches of two")
    packed = norm_weight_grad(dy.flatten(0, 1), x.flatten(0, 1), EPS, sample_offsets=[33 * i for i in range(9)])
    assert_bitwise_equal(w.grad, packed, "packed rows")
    assert_bits_differ(w.grad, norm_weight_grad(dy.flatten(0, 1), x.flatten(0, 1), EPS), "one sample")
    assert_bits_differ(w.grad, norm_weight_grad(dy.roll(1, 0), x.roll(1, 0), EPS), "samples in another order")


def test_verify_one_gradient_for_both_inputs() -> None:
    """x and residual get one tensor's bits: dnorm + dh in fp32, one cast; not autograd's two roundings."""
    x, residual = (rows((40, 96), torch.bfloat16, i).requires_grad_() for i in (1, 2))
    w, dy, dh = (rows(s, torch.bfloat16, i) for i, s in ((3, (96,)), (4, (40, 96)), (5, (40, 96))))
    y, h = ops.add_rms_norm(x, residual, w, EPS)
    torch.autograd.backward((y, h), (dy, dh))
    expected = reference.norm_dx(dy, h.detach(), w, EPS, residual=dh)
    assert_bitwise_equal(x.grad, expected, "x")
    assert_bitwise_equal(residual.grad, expected, "residual")
    twice = reference.norm_dx(dy, h.detach(), w, EPS) + dh
    assert_bits_differ(expected, twice, "rounded before the addition")
    # the graph: one node makes both gradients, none adds
    assert y.grad_fn is h.grad_fn
    assert [type(f).__name__ for f, _ in y.grad_fn.next_functions if f is not None] == ["AccumulateGrad"] * 2


def test_verify_fused_equals_unfused() -> None:
    x, residual, w = rows((5, 96), torch.bfloat16, 1), rows((5, 96), torch.bfloat16, 2), rows((96,), torch.bfloat16, 3)
    y, h = ops.add_rms_norm(x, residual, w, EPS)
    assert_bitwise_equal(h, x + residual, "h is torch's sum")
    assert_bitwise_equal(y, ops.rms_norm(h, w, EPS), "y is the norm of what left")


def test_verify_compute_dtype() -> None:
    """A master weight acts as its bf16 copy; bf16 weights meet fp32 rows exactly; compute_dtype decides."""
    x, master = rows((4, 96), torch.bfloat16, 1), rows((96,), torch.float32, 2)
    y = ops.rms_norm(x, master, EPS)
    assert_bitwise_equal(y, ops.rms_norm(x, master.bfloat16(), EPS), "master weight")
    exact = ops.rms_norm(x, master, EPS, compute_dtype=torch.float32)
    assert_bitwise_equal(exact, reference.rms_norm(x, master, EPS, compute_dtype=torch.float32), "fp32 weight")
    assert_bits_differ(y, exact, "the weight's rounding shows")
    wide, stored = x.float(), master.bfloat16()
    layercast = ops.rms_norm(wide, stored, EPS)
    assert layercast.dtype == torch.float32
    assert_bitwise_equal(layercast, ops.rms_norm(wide, stored.float(), EPS), "LayerCast")
    weight = master.clone().requires_grad_()
    ops.rms_norm(x, weight, EPS).backward(torch.ones_like(x))
    assert weight.grad.dtype == torch.float32


def everything() -> Callable[[], list[Tensor]]:
    """For the flush mode: subnormal inputs, weights and gradients."""
    calls: list[Callable[[str], list[Tensor]]] = []
    for dtype in DTYPES:
        tiny = 2.0**-20 if dtype == torch.float16 else 2.0**-120
        x, dy, w = rows((3, 530), dtype, 1), rows((3, 530), dtype, 2), rows((530,), dtype, 3)
        x[0], dy[1] = (x[0].float() * tiny).to(dtype), (dy[1].float() * tiny).to(dtype)
        w[:100] = (w[:100].float() * tiny).to(dtype)

        def call(path: str, dtype: torch.dtype = dtype, x: Tensor = x, dy: Tensor = dy, w: Tensor = w) -> list[Tensor]:
            return [
                *_C.norm(x, dy, w, None, EPS, False, False, dtype, path),
                _C.norm(x, None, w, w, EPS, True, False, dtype, path)[0],
                _C.norm_dx(dy, x, w, dy, EPS, False, False, dtype, dtype, path),
                _C.norm_dx(dy, x, w, None, EPS, True, False, dtype, torch.float32, path),
                _C.column_leaves(dy, x, 1, EPS, False, [0, 2, 3], path),
            ]

        calls.append(call)
    return lambda: [y for call in calls for path in PATHS for y in call(path)]


@pytest.mark.long
def test_verify_flush_mode_of_the_process() -> None:
    run_with_flush("test_norm", "everything")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_validate_data_shows_the_order(dtype: torch.dtype) -> None:
    """Negative control: torch's norms have other bits, and its parameter gradient depends on the batch."""
    x, w, dy = rows((64, 1000), torch.float32, 1).to(dtype), rows((1000,), dtype, 2), rows((64, 1000), dtype, 3)
    assert_bits_differ(ops.rms_norm(x.float(), w.float(), EPS), F.rms_norm(x.float(), (1000,), w.float(), EPS), "rms")
    assert_bits_differ(ops.layer_norm(x, w, None, EPS), F.layer_norm(x, (1000,), w, None, EPS), "layer norm")
    weight = w.float().requires_grad_()
    F.rms_norm(x.float(), (1000,), weight, EPS).backward(dy.float())
    assert_bits_differ(weight.grad, norm_weight_grad(dy.float(), x.float(), EPS), "dw")


def test_validate_accuracy() -> None:
    """fp32: mean error within 10 % of torch's own; bf16: within 2 % of one rounding of the exact value."""
    generator = torch.Generator().manual_seed(1)
    x, w, b = (
        torch.randn(64, 1024, generator=generator),
        torch.randn(1024, generator=generator),
        torch.randn(1024, generator=generator),
    )
    exact = F.layer_norm(x.double(), (1024,), w.double(), b.double(), EPS)
    ours, torchs = ops.layer_norm(x, w, b, EPS), F.layer_norm(x, (1024,), w, b, EPS)
    # torch fuses (x - m) r and w, b into two multiply-adds; the order has four roundings (A5)
    assert (ours - exact).abs().mean() <= 1.10 * (torchs - exact).abs().mean()
    exact = F.rms_norm(x.double(), (1024,), w.double(), EPS)
    ours, torchs = ops.rms_norm(x, w, EPS), F.rms_norm(x, (1024,), w, EPS)
    assert (ours - exact).abs().mean() <= 1.10 * (torchs - exact).abs().mean()
    xb, wb = x.bfloat16(), w.bfloat16()
    exact = F.rms_norm(xb.double(), (1024,), wb.double(), EPS)
    error = (ops.rms_norm(xb, wb, EPS).double() - exact).abs().mean()
    assert error <= 1.02 * (exact.bfloat16().double() - exact).abs().mean()


def test_verify_strides_beyond_32_bits() -> None:
    """Rows more than 2^31 elements apart, in memory that is reserved but hardly touched."""
    stride = 2**31 + 5
    size = 2 * (2 * stride + 16)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    sparse = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2)
    far, near = sparse.as_strided((3, 8), (stride, 1)), rows((3, 8), torch.bfloat16, 1)
    far.copy_(near)
    w = rows((8,), torch.bfloat16, 2)
    assert_bitwise_equal(ops.rms_norm(far, w, EPS), ops.rms_norm(near, w, EPS), "rms_norm")
    for a, b in zip(ops.add_rms_norm(far, far, w, EPS), ops.add_rms_norm(near, near, w, EPS), strict=True):
        assert_bitwise_equal(a, b, "add_rms_norm")
    assert_bitwise_equal(rms_norm_backward_f32(far, far, w, EPS), rms_norm_backward_f32(near, near, w, EPS), "dx")
    assert_bitwise_equal(norm_weight_grad(far, far, EPS), norm_weight_grad(near, near, EPS), "dw")


def operator_calls() -> dict[str, tuple[object, tuple[object, ...]]]:
    def t(*shape: int) -> Tensor:
        return torch.randn(*shape)

    def g(*shape: int) -> Tensor:
        return t(*shape).requires_grad_()

    o, f32 = torch.ops.tbik, torch.float32
    return {
        "rms_norm": (o.rms_norm, (g(2, 3, 8), g(8), EPS, True, False, f32, None, True)),
        "rms_norm of heads": (o.rms_norm, (g(5, 3, 8), g(8), EPS, False, True, f32, [0, 2, 5], False)),
        "add_rms_norm": (o.add_rms_norm, (g(3, 8), g(3, 8), g(8), EPS, False, f32, None, False)),
        "layer_norm": (o.layer_norm, (g(3, 8), g(8), g(8), EPS, f32, None, False)),
        "layer_norm without bias": (o.layer_norm, (g(3, 8), g(8), None, EPS, f32, None, False)),
        "norm_dx": (o.norm_dx, (t(3, 8), t(3, 8), t(8), t(3, 8), EPS, False, False, f32, torch.bfloat16)),
        "norm_gradients": (
            o.norm_gradients,
            (t(5, 8), t(5, 8), t(8), None, EPS, True, False, False, f32, [True, True, True], [0, 2, 5], False),
        ),
        "norm_gradients of heads": (
            o.norm_gradients,
            (t(5, 3, 8), t(5, 3, 8), t(8), None, EPS, False, True, True, f32, [False, True, False], None, True),
        ),
        "column_grad": (o.column_grad, (t(3, 8), t(3, 8), EPS, True, False, [0, 1, 3], False)),
    }


@pytest.mark.parametrize("name", list(operator_calls()))
def test_verify_opcheck(name: str) -> None:
    operator, arguments = operator_calls()[name]
    torch.library.opcheck(operator.default, arguments)  # type: ignore[attr-defined]


def test_verify_compiled_equals_eager() -> None:
    def block(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y, h = ops.add_rms_norm(x, residual, w, EPS)
        z = ops.rms_norm(y.unflatten(-1, (4, 8)), w[:8], EPS, heads=True, plan=NARROW)
        return h, ops.layer_norm(z.flatten(-2), w, b, EPS)

    inputs = [rows(s, torch.bfloat16, i) for i, s in enumerate(((2, 5, 32), (2, 5, 32)))]
    parameters = [rows((32,), torch.float32, i) for i in (5, 6)]
    compiled_equals_eager(block, [t.requires_grad_() for t in (*inputs, *parameters)])


def test_verify_bad_calls_are_refused() -> None:
    x, w = torch.ones(3, 8), torch.ones(8)
    cases = {
        "bfloat16, float16 or float32, got float64": lambda: ops.rms_norm(x.double(), w, EPS),
        r"expected x \[..., K\] and w \[K\]": lambda: ops.rms_norm(x, w[:7], EPS),
        "eps is a finite number": lambda: ops.rms_norm(x, w, -1.0),
        "eps is a finite number >= 0, got 1e": lambda: ops.rms_norm(x, w, 1e39),
        "eps is a finite number >= 0, got 2": lambda: ops.layer_norm(x, w, eps=2 * 10**400),
        "ops.rms_norm: w is a tensor, got NoneType": lambda: ops.rms_norm(x, None, EPS),  # type: ignore[arg-type]
        "ops.add_rms_norm: w is a tensor": lambda: ops.add_rms_norm(x, x, None, EPS),  # type: ignore[arg-type]
        "ops.layer_norm: w is a tensor": lambda: ops.layer_norm(x, None),  # type: ignore[arg-type]
        "non-empty last axis": lambda: ops.rms_norm(torch.ones(3, 0), w, EPS),
        "must be alike": lambda: ops.add_rms_norm(x, x.bfloat16(), w, EPS),
        "do not say what a sample is": lambda: ops.rms_norm(torch.ones(2, 2, 2, 8), w, EPS),
        "sample_offsets ascend": lambda: ops.rms_norm(x, w, EPS, sample_offsets=[0, 2]),
        r"\[..., H, D\]": lambda: ops.rms_norm(w, w, EPS, heads=True),
        "computes in float32, the plan says float64": lambda: ops.rms_norm(
            x, w, EPS, plan=TreePlan(acc_dtype="float64")
        ),
        "compute_dtype is one of": lambda: ops.layer_norm(x, w, compute_dtype=torch.int8),
        "offset is True or False": lambda: ops.rms_norm(x, w, EPS, offset=1),  # type: ignore[arg-type]
        "no torch.func": lambda: torch.func.vmap(lambda x: ops.rms_norm(x, w, EPS))(x),
    }
    for match, call in cases.items():
        with pytest.raises(PlanError, match=match):
            call()
    y = torch.autograd.grad(ops.rms_norm(x.requires_grad_(), w, EPS).sum(), x, create_graph=True)[0]
    with pytest.raises(PlanError, match="differentiable once"):
        y.sum().backward()
    assert norm.__doc__
