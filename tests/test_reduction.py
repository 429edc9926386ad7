"""tbik.ops.sum and mean of rows, whole and by covers."""

from __future__ import annotations

import itertools
import mmap
import tempfile
from collections.abc import Callable

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcases import DTYPES, check_rows, compiled_equals_eager, run_with_flush
from torch import Tensor

from tbik import _C, ops, reference, tree
from tbik.errors import PlanError
from tbik.ops.linear import CoverRun
from tbik.ops.reduction import sum_cover


def rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return wide_exponents(shape, dtype, seed, 12 if dtype == torch.float16 else 60)


@settings(max_examples=200, deadline=None)
@given(
    m=st.integers(1, 3),
    k=st.one_of(st.integers(1, 70), st.sampled_from([511, 512, 513, 1537])),
    leaves=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_verify_sum_and_mean_equal_reference(m: int, k: int, leaves: int, dtype: torch.dtype, seed: int) -> None:
    x = rows((m, k), dtype, seed).requires_grad_()
    dy = rows((m,), dtype, seed + 1)
    total, mean = ops.sum(x, leaves=leaves), ops.mean(x, leaves=leaves)
    wide = reference.row_sum(x.detach(), leaves)
    assert_bitwise_equal(total.detach(), reference.epilogue(wide, out_dtype=dtype), "sum")
    assert_bitwise_equal(mean.detach(), reference.row_mean(x.detach(), leaves), "mean")
    assert_bitwise_equal(ops.sum(x.detach(), leaves=leaves, out_dtype=torch.float32), wide, "fp32")
    assert_bitwise_equal(torch.autograd.grad(total, x, dy)[0], dy[:, None].expand(m, k), "dx of sum")
    expected = reference.epilogue(dy.float(), avg=k, out_dtype=dtype)[:, None].expand(m, k)
    assert_bitwise_equal(torch.autograd.grad(mean, x, dy)[0], expected, "dx of mean")


def test_verify_covers_of_a_sharded_axis() -> None:
    length, leaves = 1000, 12
    x = rows((5, length), torch.bfloat16, 1)
    cuts = tree.cuts(length, leaves)
    whole = ops.sum(x, leaves=leaves, out_dtype=torch.float32)
    for bounds in ((0, 12), (0, 5, 12), (0, 4, 8, 12), (0, 1, 2, 12)):
        covers = []
        for lo, hi in itertools.pairwise(bounds):
            values = sum_cover(x[:, cuts[lo] : cuts[hi]], CoverRun(length, lo, hi), leaves=leaves)
            covers.append(dict(zip(tree.cover(lo, hi), values, strict=True)))
        assert_bitwise_equal(reference.fold_covers(covers, leaves), whole, f"{bounds}")
    assert_bits_differ(whole, ops.sum(x, out_dtype=torch.float32), "one leaf")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_rows_alone_equal_rows_in_company(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = rows((128, 700), dtype, 1), rows((128, 1), dtype, 2)

    def run(x: Tensor, dy: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        total, mean = ops.sum(x, leaves=8), ops.mean(x)
        grads = [torch.autograd.grad(y, x, dy[:, 0])[0] for y in (total, mean)]
        return [total.detach(), mean.detach(), *grads]

    check_rows(run, (x, dy), monkeypatch)


def everything() -> Callable[[], list[Tensor]]:
    inputs = []
    for dtype in DTYPES:
        tiny = 2.0**-20 if dtype == torch.float16 else 2.0**-130
        x, dy = ((rows(s, dtype, 1).float() * tiny).to(dtype) for s in ((3, 700), (3,)))
        inputs.append((x.requires_grad_(), dy))

    def call() -> list[Tensor]:
        results = []
        for x, dy in inputs:
            for y in (ops.sum(x), ops.mean(x, leaves=3)):
                results += [y.detach(), torch.autograd.grad(y, x, dy)[0]]
        return results

    return call


def test_verify_flush_mode_of_the_process() -> None:
    run_with_flush("test_reduction", "everything")


def test_validate_data_shows_the_order() -> None:
    x = rows((64, 1000), torch.float32, 1)
    assert_bits_differ(ops.sum(x), x.sum(-1), "torch's sum")
    assert_bits_differ(ops.mean(x), x.mean(-1), "torch's mean")


def test_verify_strides_beyond_32_bits() -> None:
    stride = 2**31 + 5
    size = 2 * (2 * stride + 16)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    far = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2).as_strided((3, 8), (stride, 1))
    near = rows((3, 8), torch.bfloat16, 1)
    far.copy_(near)
    assert_bitwise_equal(ops.sum(far), ops.sum(near))


def test_verify_opcheck_and_compile() -> None:
    o = torch.ops.tbik
    x = torch.randn(3, 8, requires_grad=True)
    torch.library.opcheck(o.row_sum.default, (x, 4, True, torch.float32))
    torch.library.opcheck(o.row_sum_dx.default, (torch.randn(3), 8, True, torch.bfloat16))
    compiled_equals_eager(
        lambda x: (ops.sum(x), ops.mean(x, leaves=2)), [rows((3, 8), torch.bfloat16, 1).requires_grad_()]
    )


def test_verify_bad_calls_are_refused() -> None:
    x = torch.ones(3, 8)
    for match, call in {
        "leaves is an integer": lambda: ops.sum(x, leaves=0),
        r"leaves is an integer 1\.\.4096, got 4294967296": lambda: ops.mean(x, leaves=2**32),
        "got torch.int64": lambda: ops.sum(x.long()),
        "out_dtype is one of": lambda: ops.mean(x, out_dtype=torch.float64),
        "are 4 long, x has 8": lambda: sum_cover(x, CoverRun(8, 0, 2), leaves=4),
        "expected leaves within": lambda: sum_cover(x, CoverRun(8, 0, 5), leaves=4),
    }.items():
        with pytest.raises(PlanError, match=match):
            call()
    assert _C.cpu_paths()


@pytest.mark.parametrize("leaves", [0, -1, 4097, 2**33])
def test_verify_raw_operators_check_their_leaves(leaves: int) -> None:
    """Called by their schema too: no loop over 2**33 leaves."""
    x, ids, o = torch.ones(3, 8), torch.zeros(3, dtype=torch.int64), torch.ops.tbik
    rows = torch.ones(3)
    for call in (
        lambda: o.row_sum(x, leaves, False, torch.float32),
        lambda: o.softmax(x, leaves),
        lambda: o.softmax_backward(x, x, rows, rows, leaves),
        lambda: o.log_softmax(x, leaves),
        lambda: o.log_softmax_backward(x, x, rows, leaves),
        lambda: o.cross_entropy(x, ids, leaves, -100),
        lambda: o.logprobs(x, ids, leaves),
        lambda: o.top_logprobs(x, 2, leaves),
    ):
        with pytest.raises(PlanError, match=r"leaves is an integer 1\.\.4096"):
            call()
