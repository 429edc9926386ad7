"""Log-probabilities of ids and the highest of a row (csrc/vocab.h, tbik/ops/logprobs.py): ORDER.md A10, V9, V10."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import logits, wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from row_checks import assert_machine_independent, assert_rows_independent, cpu_path, far_apart, spread
from torch import Tensor

from tbik import _C, ops, reference
from tbik.errors import PlanError
from tbik.ops.logprobs import merge_top_k, top_k_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ids_for(x: Tensor, seed: int, *n: int) -> Tensor:
    return torch.randint(0, x.shape[-1], (*x.shape[:-1], *n), generator=torch.Generator().manual_seed(seed))


def logprobs_and_gradient(leaves: int) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    def run(x: Tensor, ids: Tensor, g: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        logp = ops.logprobs(leaf, ids, leaves)
        return [logp.detach(), torch.autograd.grad(logp, leaf, g)[0]]

    return run


def highest(leaves: int, k: int) -> Callable[[Tensor], list[Tensor]]:
    return lambda x: [*ops.top_logprobs(x, k, leaves), *ops.top_k(x, k), ops.argmax(x)]


@settings(max_examples=200)
@given(
    rows=st.integers(1, 3),
    vocab=st.one_of(st.integers(1, 40), st.integers(500, 1600)),
    leaves=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(_C.cpu_paths()),
    seed=st.integers(0, 10**6),
    strided=st.booleans(),
)
def test_verify_logprobs_equal_reference(
    rows: int, vocab: int, leaves: int, dtype: torch.dtype, path: str, seed: int, strided: bool
) -> None:
    x, g = logits((rows, vocab), dtype, seed, special=True), wide_exponents((rows,), torch.float32, seed)
    ids, several = ids_for(x, seed), ids_for(x, seed + 1, 5)
    given_x, given_ids, given_g = (spread(t) if strided else t for t in (x, ids, g))
    with cpu_path(path):
        logp, dx = logprobs_and_gradient(leaves)(given_x, given_ids, given_g)
        many = ops.logprobs(given_x, several, leaves)
    assert_bitwise_equal(logp, reference.logprobs(x, ids, leaves), path)
    assert_bitwise_equal(many, reference.logprobs(x, several, leaves), f"several, {path}")
    assert_bitwise_equal(dx, reference.cross_entropy_dx(-g, x, ids, leaves, None), f"dx, {path}")


@settings(max_examples=200)
@given(
    rows=st.integers(1, 3),
    vocab=st.one_of(st.integers(1, 40), st.integers(100, 900)),
    share=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(_C.cpu_paths()),
    seed=st.integers(0, 10**6),
    strided=st.booleans(),
    coarse=st.booleans(),
)
def test_verify_top_k_equals_reference(
    rows: int, vocab: int, share: float, dtype: torch.dtype, path: str, seed: int, strided: bool, coarse: bool
) -> None:
    """Ties (coarse: many of them), signed zeros, NaN, infinities, k from 1 to V."""
    x = logits((rows, vocab), dtype, seed, special=True)
    if coarse:
        x = (x / 8).round()  # half of the entries equal, +0 and -0 among them
    k = max(1, round(share * share * vocab))
    with cpu_path(path):
        values, ids = ops.top_k(spread(x) if strided else x, k)
        top = ops.top_logprobs(x, k, 3)
        index = ops.argmax(x)
    expected_values, expected_ids = reference.top_k(x, k)
    assert_bitwise_equal(ids, expected_ids, path)
    assert_bitwise_equal(values, expected_values, path)
    assert_bitwise_equal(top.ids, expected_ids, path)
    assert_bitwise_equal(top.logprobs, reference.logprobs(x, expected_ids, 3), path)
    assert_bitwise_equal(index, expected_ids[..., 0], path)


@settings(max_examples=200)
@given(
    bounds=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    k=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
)
def test_verify_merged_top_k(bounds: list[int], k: int, dtype: torch.dtype, seed: int) -> None:
    """The k first of each part hold the k first of the whole, parts with fewer than k columns too."""
    x = (logits((2, sum(bounds)), dtype, seed, special=True) / 8).round()
    k = min(k, x.shape[-1])
    parts, first = [], 0
    for part in x.split(bounds, -1):
        parts.append(top_k_of(part, k, first))
        first += part.shape[-1]
    values, ids = (torch.cat(pieces, -1) for pieces in zip(*parts))
    order = torch.randperm(values.shape[-1], generator=torch.Generator().manual_seed(seed))
    for permuted in (torch.arange(values.shape[-1]), order):
        merged = merge_top_k(values[..., permuted], ids[..., permuted], k)
        for value, expected in zip(merged, ops.top_k(x, k), strict=True):
            assert_bitwise_equal(value, expected)


def test_corroborate_top_k_with_a_stable_sort() -> None:
    x = (logits((5, 3000), torch.float32, 1, special=True) / 4).round()
    values, ids = ops.top_k(x, 50)
    expected = torch.sort(x, descending=True, stable=True).indices[:, :50]
    assert_bitwise_equal(ids, expected)
    assert torch.equal(torch.nan_to_num(values, nan=7e7), torch.nan_to_num(x.gather(-1, expected), nan=7e7))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_verify_logprobs_row_alone_equals_row_in_batch(dtype: torch.dtype) -> None:
    x, g = logits((128, 1237), dtype, 2), wide_exponents((128,), torch.float32, 3, spread=8)
    assert_rows_independent(logprobs_and_gradient(6), x, ids_for(x, 4), g)
    assert_rows_independent(highest(6, 9), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_logprobs_paths_and_threads(dtype: torch.dtype) -> None:
    x, g = logits((33, 2051), dtype, 5, special=True), wide_exponents((33,), torch.float32, 6, spread=8)
    assert_machine_independent(logprobs_and_gradient(5), x, ids_for(x, 7), g)
    assert_machine_independent(highest(5, 20), x)


def test_verify_logprobs_are_those_of_log_softmax(flush_denormal: None) -> None:
    x = logits((4, 5000), torch.float32, 8)
    ids = ids_for(x, 9, 7)
    assert_bitwise_equal(ops.logprobs(x, ids, 8), ops.log_softmax(x, 8).gather(-1, ids))
    top = ops.top_logprobs(x, 5, 8)
    assert_bitwise_equal(top.logprobs, ops.log_softmax(x, 8).gather(-1, top.ids))
    # bf16 logits lose nothing: their log-probabilities are fp32
    narrow = x.bfloat16()
    assert_bitwise_equal(ops.logprobs(narrow, ids, 8), ops.logprobs(narrow.float(), ids, 8))
    assert_bits_differ(ops.logprobs(narrow, ids, 8), ops.log_softmax(narrow, 8).gather(-1, ids).float(), "rounded")


def test_verify_logprobs_strides_beyond_32_bits() -> None:
    near = logits((2, 700), torch.bfloat16, 10)
    far = far_apart(near)
    ids, g = torch.tensor([3, 699]), torch.tensor([1.0, -2.0])
    for value, expected in zip(logprobs_and_gradient(3)(far, ids, g), logprobs_and_gradient(3)(near, ids, g)):
        assert_bitwise_equal(value, expected)
    for value, expected in zip(highest(3, 5)(far), highest(3, 5)(near)):
        assert_bitwise_equal(value, expected)
    assert_bitwise_equal(ops.argmax(far.T), ops.argmax(near.T.contiguous()))
    turned = torch.tensor([1, 0]).repeat(350)
    assert_bitwise_equal(ops.logprobs(far.T, turned), ops.logprobs(near.T.contiguous(), turned))


def test_verify_stock_top_k_breaks_ties_its_own_way() -> None:
    """Negative control: torch.topk does not promise which of equal logits it returns, and here it returns others."""
    x = torch.zeros(4, 3000)
    x[:, ::7] = 1.0
    assert ops.top_k(x, 3).ids.tolist() == [[0, 7, 14]] * 4
    stock = torch.topk(x, 300).indices
    assert_bits_differ(stock, ops.top_k(x, 300).ids, "torch.topk")
    y = logits((16, 49_152), torch.float32, 11)
    ids = ids_for(y, 12, 5)
    assert_bits_differ(torch.log_softmax(y, -1).gather(-1, ids), ops.logprobs(y, ids, 8), "torch's log_softmax")


def test_validate_logprobs_accuracy() -> None:
    x = logits((64, 8192), torch.bfloat16, 13, shift=0)
    ids = ids_for(x, 14, 9)
    exact = torch.log_softmax(x.double(), -1).gather(-1, ids)
    theirs = torch.log_softmax(x.float(), -1).gather(-1, ids)
    error, allowed = (float((t.double() - exact).square().mean().sqrt()) for t in (ops.logprobs(x, ids, 8), theirs))
    assert error <= 1.02 * allowed, (error, allowed)


L = logits((2, 3, 40), torch.bfloat16, 1)
CALLS = {
    "logprobs": (torch.ops.tbik.logprobs, (L, ids_for(L, 1), 3)),
    "logprobs_several": (torch.ops.tbik.logprobs, (L, ids_for(L, 1, 4), 3)),
    "top_logprobs": (torch.ops.tbik.top_logprobs, (L, 5, 3)),
    "top_k": (torch.ops.tbik.top_k, (L, 5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_verify_logprobs_opcheck(name: str) -> None:
    operator, arguments = CALLS[name]
    torch.library.opcheck(operator.default, arguments)
    if name == "logprobs":
        torch.library.opcheck(operator.default, (L.clone().requires_grad_(), *arguments[1:]))


def test_verify_logprobs_compiled_equals_eager() -> None:
    def function(x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return ops.logprobs(x, ids, 3), *ops.top_logprobs(x.detach(), 4, 3), ops.argmax(x.detach())

    def run(function: Callable[..., tuple[Tensor, ...]]) -> list[Tensor]:
        x = logits((4, 300), torch.bfloat16, 15).requires_grad_()
        logp, *others = function(x, ids_for(x, 16))
        logp.backward(torch.tensor([1.0, -0.5, 0.25, 3.0]))
        return [logp.detach(), *others, x.grad]  # type: ignore[list-item]

    torch._dynamo.reset()
    for value, expected in zip(run(torch.compile(function, backend="aot_eager", fullgraph=True)), run(function)):
        assert_bitwise_equal(value, expected)
    torch._dynamo.reset()


X, IDS = torch.ones(2, 8), torch.tensor([1, 7])
GRAD = X.clone().requires_grad_()
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "id too large": (lambda: ops.logprobs(X, torch.tensor([1, 8])), r"ids\[1\] = 8 is outside the vocabulary of 8"),
    "id -100": (lambda: ops.logprobs(X, torch.tensor([-100, 1])), r"ids\[0\] = -100 is outside"),
    "ids int32": (lambda: ops.logprobs(X, IDS.int()), "ids is int64, got torch.int32"),
    "ids too few": (lambda: ops.logprobs(X, torch.tensor([1])), r"expected ids \[2\] or \[2, 'n'\]"),
    "ids of other rows": (lambda: ops.logprobs(X, torch.zeros(3, 1).long()), r"expected ids \[2\]"),
    "ids of three axes": (lambda: ops.logprobs(X, torch.zeros(2, 1, 1).long()), r"expected ids \[2\]"),
    "several with a gradient": (
        lambda: ops.logprobs(GRAD, torch.zeros(2, 3).long()),
        "several ids per row have no deri",
    ),
    "float64": (lambda: ops.logprobs(X.double(), IDS), "got torch.float64"),
    "leaves": (lambda: ops.logprobs(X, IDS, -1), "leaves is an integer"),
    "empty vocabulary": (lambda: ops.logprobs(torch.ones(2, 0), IDS), "V >= 1"),
    "k of 0": (lambda: ops.top_logprobs(X, 0), r"k is an integer 1..8 .*got 0"),
    "k of 9": (lambda: ops.top_k(X, 9), r"k is an integer 1..8 .*got 9"),
    "k of text": (lambda: ops.top_k(X, "3"), "got '3'"),  # type: ignore[arg-type]
    "k of a bool": (lambda: ops.top_k(X, True), "got True"),
    "top of float64": (lambda: ops.top_k(X.double(), 1), "got torch.float64"),
    "argmax of integers": (lambda: ops.argmax(X.int()), "got torch.int32"),
    "argmax of nothing": (lambda: ops.argmax(torch.ones(2, 0)), "V >= 1"),
    "argmax of a scalar": (lambda: ops.argmax(torch.tensor(1.0)), "V >= 1"),
    "meta ids": (lambda: ops.logprobs(X, IDS.to("meta")), "logits is on cpu, ids on meta"),
    "vmap": (lambda: torch.func.vmap(ops.argmax)(X), "no torch.func"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_verify_logprobs_refuses(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        call()


def test_verify_top_k_has_no_derivative() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    with pytest.raises(PlanError, match="no derivative"):
        ops.top_logprobs(x, 2).logprobs.sum().backward()
