"""softmax and log_softmax (csrc/vocab.h, tbik/ops/softmax.py) against the oracle: ORDER.md A9, A10, C6, V1 to V5."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import logits, wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from row_checks import assert_machine_independent, assert_rows_independent, cpu_path, far_apart, spread
from torch import Tensor

from tbik import _C, ops, reference, tree
from tbik.errors import PlanError
from tbik.ops.linear import CoverRun
from tbik.ops.softmax import (
    exp_sum_cover,
    log_softmax_dx_of,
    log_softmax_of,
    log_sum_exp_of,
    row_max,
    row_sum_cover,
    softmax_dots_cover,
    softmax_dx_of,
    softmax_of,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPERATORS: dict[str, tuple[Any, Any, Any]] = {
    "softmax": (ops.softmax, reference.softmax, reference.softmax_dx),
    "log_softmax": (ops.log_softmax, reference.log_softmax, reference.log_softmax_dx),
}


def forward_backward(operator: Any, leaves: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def run(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = operator(leaf, leaves)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        return y.detach(), dx

    return run


@pytest.mark.parametrize("name", OPERATORS)
@settings(max_examples=200)
@given(
    rows=st.integers(1, 3),
    vocab=st.one_of(st.integers(1, 40), st.integers(500, 1600)),
    leaves=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(_C.cpu_paths()),
    seed=st.integers(0, 10**6),
    strided=st.booleans(),
    wide=st.booleans(),
)
def test_verify_softmax_equals_reference(
    name: str, rows: int, vocab: int, leaves: int, dtype: torch.dtype, path: str, seed: int, strided: bool, wide: bool
) -> None:
    operator, expected_y, expected_dx = OPERATORS[name]
    make = wide_exponents if wide else logits
    x = wide_exponents((rows, vocab), dtype, seed, spread=12) if wide else logits((rows, vocab), dtype, seed, True)
    dy = make((rows, vocab), dtype, seed + 1)
    given_x, given_dy = (spread(x), spread(dy)) if strided else (x, dy)
    with cpu_path(path):
        y, dx = forward_backward(operator, leaves)(given_x, given_dy)
    assert_bitwise_equal(y, expected_y(x, leaves), f"{name} {path}")
    assert_bitwise_equal(dx, expected_dx(dy, x, leaves), f"dx of {name} {path}")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_verify_softmax_row_alone_equals_row_in_batch(name: str, dtype: torch.dtype) -> None:
    x, dy = logits((128, 1237), dtype, 1), wide_exponents((128, 1237), dtype, 2, spread=8)
    x[5] = float("nan")  # a neighbour
    assert_rows_independent(forward_backward(OPERATORS[name][0], 6), x, dy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_verify_softmax_paths_and_threads(name: str, dtype: torch.dtype) -> None:
    x, dy = logits((33, 2051), dtype, 3, special=True), wide_exponents((33, 2051), dtype, 4, spread=8)
    assert_machine_independent(forward_backward(OPERATORS[name][0], 5), x, dy)


@pytest.mark.parametrize("name", OPERATORS)
def test_verify_softmax_flush_mode_of_the_process(name: str, flush_denormal: None) -> None:
    """Probabilities below 2^-126 survive a process that flushes."""
    operator, expected_y, expected_dx = OPERATORS[name]
    x = torch.tensor([[0.0, -88.0, -100.0, -103.0, -3.0] * 3])
    dy = torch.tensor([[1.0, 2.0**-20, 3.0, -1.0, 2.0**-126] * 3])
    y, dx = forward_backward(operator, 2)(x, dy)
    assert_bitwise_equal(y, expected_y(x, 2), name)
    assert_bitwise_equal(dx, expected_dx(dy, x, 2), f"dx of {name}")
    if name == "softmax":
        bits = y.view(torch.int32)
        assert bool(((bits > 0) & (bits < 0x00800000)).any()), "the data has subnormal probabilities"


def test_verify_softmax_special_rows() -> None:
    """-inf has no weight; a row of -inf, or with +inf or NaN, is NaN; one entry is certain; NaN is canonical."""
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, -inf, 1.0], [-inf] * 3, [inf, 0, 0], [nan, 0, 0], [0.0, -0.0, -inf], [3.0, -inf, -inf]])
    x[3, 0] = torch.tensor(-4194303, dtype=torch.int32).view(torch.float32)  # a NaN with sign and payload
    p, y = ops.softmax(x, 2), ops.log_softmax(x, 2)
    assert_bitwise_equal(p, reference.softmax(x, 2))
    assert_bitwise_equal(y, reference.log_softmax(x, 2))
    assert torch.isnan(p[1:4]).all() and torch.isnan(y[1:4]).all()
    assert set(p[torch.isnan(p)].view(torch.int32).tolist()) == {0x7FC00000}
    assert p[0].tolist() == [0.5, 0, 0.5] and p[5].tolist() == [1, 0, 0] and y[5].tolist() == [0, -inf, -inf]
    assert_bitwise_equal(row_max(x), reference.row_max(x))


@pytest.mark.parametrize("vocab", [49_152, 128_256, 151_936])
@pytest.mark.parametrize("leaves", [8, 12])
def test_verify_vocabulary_shards(vocab: int, leaves: int) -> None:
    """1 to 4 shards, uneven ones too, with maximum and sums as covers: the bits of the whole, forward and backward."""
    x, dy = logits((2, vocab), torch.bfloat16, 5), wide_exponents((2, vocab), torch.bfloat16, 6, spread=8)
    whole = {name: forward_backward(operator, leaves)(x, dy) for name, (operator, _, _) in OPERATORS.items()}
    cuts = tree.cuts(vocab, leaves)
    splits = [[0, leaves], [0, 3, leaves], [0, 1, 4, leaves], [0, 2, 3, 7, leaves]]
    for ends in splits:
        runs = [CoverRun(vocab, lo, hi) for lo, hi in itertools.pairwise(ends)]
        parts = [slice(cuts[run.lo], cuts[run.hi]) for run in runs]
        xs, dys = [x[:, part] for part in parts], [dy[:, part] for part in parts]
        m = row_max(torch.stack([row_max(t) for t in xs], dim=-1))

        def root(function: Callable[..., Tensor], *operands: Any, runs: list[CoverRun] = runs) -> Tensor:
            covers = []
            for i, run in enumerate(runs):
                values = function(*(t[i] if isinstance(t, list) else t for t in operands), run, leaves)
                covers.append(dict(zip(tree.cover(run.lo, run.hi), values, strict=True)))
            return reference.fold_covers(covers, leaves)

        s = root(exp_sum_cover, xs, m)
        lse = log_sum_exp_of(m, s)
        dots, total = root(softmax_dots_cover, dys, xs, m, s), root(row_sum_cover, dys)
        got = {
            "softmax": (
                [softmax_of(t, m, s) for t in xs],
                [softmax_dx_of(d, t, m, s, dots) for d, t in zip(dys, xs, strict=True)],
            ),
            "log_softmax": (
                [log_softmax_of(t, lse) for t in xs],
                [log_softmax_dx_of(d, t, lse, total) for d, t in zip(dys, xs, strict=True)],
            ),
        }
        for name, results in got.items():
            for what, pieces, expected in zip(("y", "dx"), results, whole[name], strict=True):
                assert_bitwise_equal(torch.cat(pieces, -1), expected, f"{name} {what}, V={vocab}, cut at {ends}")
    # no agreement by chance: five leaves have other bits (one leaf may pair its blocks as twelve leaves do)
    rows = logits((16, vocab), torch.float32, 9)
    sums = [torch.ops.tbik.softmax(rows, number)[2] for number in (leaves, 5)]
    assert_bits_differ(*sums, f"V={vocab}")


def test_verify_covers_equal_reference() -> None:
    x, leaves = logits((3, 5000), torch.float16, 7), 6
    for lo, hi in ((0, 6), (1, 5), (5, 6), (2, 2)):
        cuts = tree.cuts(5000, leaves)
        values = row_sum_cover(x[:, cuts[lo] : cuts[hi]], CoverRun(5000, lo, hi), leaves) if lo < hi else None
        if values is not None:
            expected = torch.stack(list(reference.row_sum_cover(x, leaves, (lo, hi)).values()))
            assert_bitwise_equal(values, expected, f"leaves [{lo}, {hi})")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_verify_softmax_strides_beyond_32_bits(dtype: torch.dtype) -> None:
    near = logits((2, 700), dtype, 8)
    far = far_apart(near)
    for operator, _, _ in OPERATORS.values():
        assert_bitwise_equal(operator(far, 3), operator(near, 3))
    turned = far.T  # columns far apart
    assert_bitwise_equal(ops.softmax(turned, 2), ops.softmax(near.T.contiguous(), 2))


def test_verify_stock_softmax_depends_on_the_shards() -> None:
    """Negative control: on this data a flat sum and torch's own sums of shards give other bits than the whole."""
    x = logits((16, 49_152), torch.float32, 9)
    y = ops.log_softmax(x, 8)
    e = torch.exp(x - x.amax(-1, keepdim=True))
    whole = e.sum(-1)
    assert_bits_differ(sum(part.sum(-1) for part in e.split(16_384, -1)), whole, "torch, three shards")  # type: ignore[arg-type]
    assert_bits_differ(torch.log_softmax(x, -1), y, "torch's log_softmax")
    flat = reference.exp(x - reference.row_max(x)[:, None]).flip(-1)
    assert_bits_differ(reference.row_sum(flat, 8), reference.row_sum(flat.flip(-1), 8), "the row reversed")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_validate_softmax_accuracy(name: str, dtype: torch.dtype) -> None:
    """Against float64: no worse than torch's own, forward and backward (rows around zero, as logits are)."""
    x, dy = (
        logits((64, 8192), dtype, 10, shift=0),
        torch.randn(64, 8192, generator=torch.Generator().manual_seed(1)).to(dtype),
    )
    stock = getattr(torch, name)
    wide = x.double().requires_grad_()
    exact = stock(wide, -1)
    (exact_dx,) = torch.autograd.grad(exact, wide, dy.double())
    ours = forward_backward(OPERATORS[name][0], 8)(x, dy)
    theirs = forward_backward(lambda t, _: stock(t, -1), 8)(x, dy)
    for what, value, other, truth in zip(("y", "dx"), ours, theirs, (exact.detach(), exact_dx), strict=True):
        error, allowed = (float((t.double() - truth).square().mean().sqrt()) for t in (value, other))
        assert error <= 1.02 * allowed, (what, error, allowed)


def test_validate_log_softmax_of_shifted_rows() -> None:
    """x - (m + log s) costs a rounding of lse: at most 1 ulp of |lse|, here below 128, which torch's order avoids."""
    x = logits((64, 8192), torch.float32, 14)
    exact = torch.log_softmax(x.double(), -1)
    assert float((ops.log_softmax(x, 8).double() - exact).abs().max()) <= 2.0**-17


CALLS = {
    "softmax": (torch.ops.tbik.softmax, (logits((2, 3, 40), torch.bfloat16, 1), 3)),
    "log_softmax": (torch.ops.tbik.log_softmax, (logits((2, 3, 40), torch.float32, 1), 3)),
    "softmax_backward": (
        torch.ops.tbik.softmax_backward,
        (torch.ones(2, 7), torch.ones(2, 7), torch.ones(2), torch.full((2,), 7.0), 2),
    ),
    "log_softmax_backward": (
        torch.ops.tbik.log_softmax_backward,
        (torch.ones(2, 7), torch.ones(2, 7), torch.ones(2), 2),
    ),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_verify_softmax_opcheck(name: str, requires_grad: bool) -> None:
    operator, arguments = CALLS[name]
    if requires_grad and not name.endswith("backward"):
        arguments = (arguments[0].clone().requires_grad_(), *arguments[1:])
    torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_verify_softmax_compiled_equals_eager(dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        return ops.softmax(x, 3) + ops.log_softmax(x, 3)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    x, dy = logits((4, 300), dtype, 11), wide_exponents((4, 300), dtype, 12, spread=8)
    for value, expected in zip(
        forward_backward(lambda t, _: compiled(t), 3)(x, dy), forward_backward(lambda t, _: function(t), 3)(x, dy)
    ):
        assert_bitwise_equal(value, expected)
    torch._dynamo.reset()


def test_verify_softmax_has_one_derivative() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    (dx,) = torch.autograd.grad(ops.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(PlanError, match="no derivative"):
        dx.sum().backward()


X = torch.ones(2, 8)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "float64": (lambda: ops.softmax(X.double()), "bfloat16, float16 or float32, got torch.float64"),
    "integers": (lambda: ops.log_softmax(X.int()), "got torch.int32"),
    "scalar": (lambda: ops.softmax(torch.tensor(1.0)), r"\[\.\.\., V\] with V >= 1, got \[\]"),
    "empty vocabulary": (lambda: ops.softmax(torch.ones(2, 0)), r"V >= 1, got \[2, 0\]"),
    "no leaves": (lambda: ops.softmax(X, 0), "leaves is an integer 1..4096 .*got 0"),
    "leaves of text": (lambda: ops.log_softmax(X, "8"), "got '8'"),  # type: ignore[arg-type]
    "leaves of a bool": (lambda: ops.softmax(X, True), "got True"),
    "a list": (lambda: ops.softmax([1.0]), "x is a tensor, got list"),  # type: ignore[arg-type]
    "sparse": (lambda: ops.softmax(X.to_sparse()), "dense tensor"),
    "vmap": (lambda: torch.func.vmap(ops.softmax)(X), "no torch.func"),
    "run is a tuple": (lambda: row_sum_cover(X, (8, 0, 2), 2), "a run is a CoverRun"),  # type: ignore[arg-type]
    "run beyond the leaves": (lambda: row_sum_cover(X, CoverRun(8, 0, 3), 2), r"within \[0, 2\], got \[0, 3\)"),
    "slice cuts a leaf": (lambda: row_sum_cover(X, CoverRun(32, 0, 1), 2), "are 16 columns"),
    "m of another shape": (lambda: exp_sum_cover(X, torch.ones(3), CoverRun(8, 0, 2), 2), "one value per row"),
    "lse in bf16": (lambda: log_softmax_of(X, torch.ones(2).bfloat16()), "expected Float, one value per row"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_verify_softmax_refuses(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
