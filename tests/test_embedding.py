"""tbik.ops.embedding, whole and sharded, and its gradient by sample leaves."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcases import DTYPES, PATHS, compiled_equals_eager, run_with_flush, threads
from torch import Tensor

from tbik import _C, TreePlan, ops, reference, tree
from tbik.errors import PlanError
from tbik.ops.embedding import embedding_cover, embedding_row_gradients

NARROW = TreePlan(grad_wire_dtype="bfloat16")


def rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return wide_exponents(shape, dtype, seed, 12 if dtype == torch.float16 else 30)


def some_ids(shape: tuple[int, ...], vocabulary: int, seed: int) -> Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 2, 3, 9]), min_size=1, max_size=5),
    vocabulary=st.integers(1, 12),
    dim=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
    narrow=st.booleans(),
    path=st.sampled_from(PATHS),
)
def test_verify_gradient_equals_reference(
    sizes: list[int], vocabulary: int, dim: int, dtype: torch.dtype, seed: int, narrow: bool, path: str
) -> None:
    offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    ids, dy = some_ids((offsets[-1],), vocabulary, seed), rows((offsets[-1], dim), dtype, seed)
    found, values = _C.embedding_rows(dy, ids, 0, vocabulary, vocabulary, offsets, narrow, path)
    expected = reference.embedding_dw(dy, ids, vocabulary, offsets, narrow)
    assert found.tolist() == sorted(set(ids.tolist()))
    assert_bitwise_equal(values, expected[found], f"{path} {sizes}")
    absent = torch.ones(vocabulary, dtype=torch.bool)
    absent[found] = False
    assert_bitwise_equal(expected[absent], torch.zeros_like(expected[absent]), "rows without a token")


def test_verify_gradient_of_long_samples() -> None:
    """Blocks of 512 tokens of the sample; rows that are in some of them only."""
    offsets, ids = [0, 5, 5, 1605], some_ids((1605,), 300, 3)
    ids[::3] = 7
    dy = rows((1605, 6), torch.bfloat16, 4)
    expected = reference.embedding_dw(dy, ids, 300, offsets)
    for path in PATHS:
        found, values = _C.embedding_rows(dy, ids, 0, 300, 300, offsets, False, path)
        assert_bitwise_equal(values, expected[found], path)
    assert_bits_differ(values, _C.embedding_rows(dy, ids, 0, 300, 300, [0, 1605], False)[1], "one sample")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_lookup_in_any_company(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    w, ids = rows((50, 70), dtype, 1), some_ids((128,), 50, 2)
    for out in DTYPES:
        expected = reference.embedding(ids, w, out)
        for path in PATHS:
            monkeypatch.setenv("TBIK_CPU_PATH", path)
            for count in (1, 2):
                with threads(count):
                    assert_bitwise_equal(ops.embedding(ids, w, out_dtype=out), expected, f"{path}, {count} threads")
    for m in (1, 2, 7, 16, 17, 33, 128):
        assert_bitwise_equal(
            ops.embedding(ids[-m:], w, out_dtype=torch.float32), reference.embedding(ids[-m:], w, torch.float32)
        )
    apart = torch.full((100, 75), torch.nan, dtype=dtype)
    apart[::2, 5:] = w
    assert_bitwise_equal(ops.embedding(ids.int(), apart[::2, 5:]), reference.embedding(ids, w), "strided rows")
    assert_bitwise_equal(ops.embedding(ids[::2], w.t().contiguous().t()), reference.embedding(ids[::2], w), "columns")


def test_verify_gradient_ignores_batches_threads_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, dy = some_ids((8, 33), 20, 1), rows((8, 33, 24), torch.bfloat16, 2)
    w = rows((20, 24), torch.float32, 3).requires_grad_()
    y = ops.embedding(ids, w, out_dtype=torch.bfloat16)
    assert_bitwise_equal(
        y.detach(), reference.embedding(ids, w.detach(), torch.bfloat16), "master weight, rounded once"
    )
    y.backward(dy)
    offsets = [33 * i for i in range(9)]
    assert_bitwise_equal(w.grad, reference.embedding_dw(dy.flatten(0, 1), ids.flatten(), 20, offsets), "dw")

    def dense(dy: Tensor, ids: Tensor) -> Tensor:
        found, values = embedding_row_gradients(dy, ids, 20)
        return torch.zeros(20, 24).index_copy(0, found, values)

    for path in PATHS:
        monkeypatch.setenv("TBIK_CPU_PATH", path)
        for count in (1, 2):
            with threads(count):
                assert_bitwise_equal(dense(dy, ids), w.grad, f"{path}, {count} threads")
                parts = [dense(dy[i : i + 2], ids[i : i + 2]) for i in range(0, 8, 2)]
                assert_bitwise_equal(tree.root(parts, reference.add), w.grad, "micro-batches of two samples")
    # a row's gradient ignores the other rows: the vocabulary in shards, one row alone
    for lo, hi in ((0, 7), (7, 20), (3, 4)):
        found, values = embedding_row_gradients(dy, ids, hi - lo, first_row=lo, vocabulary=20)
        assert_bitwise_equal(values, w.grad[lo:hi][found], f"rows [{lo}, {hi})")
    strided = dy.transpose(0, 2).contiguous().transpose(0, 2)
    assert_bitwise_equal(dense(strided, ids), w.grad, "strided dy")


def test_verify_covers_of_samples() -> None:
    ids, dy = some_ids((5, 40), 20, 1), rows((5, 40, 6), torch.bfloat16, 2)
    offsets = [0, 0, 0, 0, *(40 * i for i in range(1, 6))]  # three empty samples before
    for plan in (None, NARROW):
        nodes = embedding_cover(dy, ids, 20, 3, plan=plan)
        expected = reference.embedding_dw(
            dy.flatten(0, 1), ids.flatten(), 20, offsets, plan is not None, leaf_range=(3, 8)
        )
        assert len(nodes) == len(expected)
        for (found, values), node in zip(nodes, expected, strict=True):
            assert_bitwise_equal(values, expected[node][found], f"{node}")


def test_verify_absent_rows_change_no_bit() -> None:
    """Ranks hold parts of the vocabulary; an absent row is -0.0, so that adding the ranks gives the whole look-up."""
    w, ids = rows((30, 16), torch.bfloat16, 1), some_ids((4, 25), 30, 2)
    w[3], w[4] = 0.0, -0.0
    ids[0, :2] = torch.tensor([3, 4])
    whole = ops.embedding(ids, w)
    total = None
    for lo, hi in ((0, 4), (4, 21), (21, 30)):
        part = ops.embedding(ids, w[lo:hi], first_row=lo, vocabulary=30)
        assert_bitwise_equal(part, reference.embedding(ids, w, rows=(lo, hi)), f"rows [{lo}, {hi})")
        total = part if total is None else total + part
    assert_bitwise_equal(total, whole, "sum of the ranks")
    zeros = reference.embedding(ids, w, rows=(0, 4))
    assert_bits_differ(zeros, zeros + 0.0, "-0.0, not +0.0")


def everything() -> Callable[[], list[Tensor]]:
    ids = some_ids((40,), 5, 1)
    inputs = []
    for dtype in DTYPES:
        tiny = 2.0**-20 if dtype == torch.float16 else 2.0**-132
        inputs.append([(rows(s, dtype, 2).float() * tiny).to(dtype) for s in ((5, 24), (40, 24))])

    def call() -> list[Tensor]:
        results = []
        for w, dy in inputs:
            for path in PATHS:
                results += [_C.embedding(ids, w, 0, 5, out, path) for out in DTYPES]
                results.append(_C.embedding_rows(dy, ids, 0, 5, 5, [0, 3, 40], False, path)[1])
        return results

    return call


def test_verify_flush_mode_of_the_process() -> None:
    run_with_flush("test_embedding", "everything")


def test_validate_data_shows_the_order() -> None:
    """Negative control: torch's dense gradient adds a row's tokens flat, in bf16 after every one."""
    ids, dy = some_ids((8, 100), 5, 1), rows((8, 100, 24), torch.bfloat16, 2)
    w = rows((5, 24), torch.bfloat16, 3).requires_grad_()
    F.embedding(ids, w).backward(dy)
    values = embedding_row_gradients(dy, ids, 5).values
    assert_bits_differ(w.grad.float(), values, "torch in bf16")
    wide = w.detach().float().requires_grad_()
    F.embedding(ids, wide).backward(dy.float())
    assert_bits_differ(wide.grad, values, "torch in fp32")
    one = embedding_row_gradients(dy, ids, 5, sample_offsets=[0, 800]).values
    assert_bits_differ(values, one, "all tokens as one sample")


def test_verify_strides_beyond_32_bits() -> None:
    stride = 2**31 + 5
    size = 2 * (2 * stride + 16)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    far = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2).as_strided((3, 8), (stride, 1))
    near, ids = rows((3, 8), torch.bfloat16, 1), torch.tensor([2, 0, 2])
    far.copy_(near)
    assert_bitwise_equal(ops.embedding(ids, far), ops.embedding(ids, near))
    for a, b in zip(embedding_row_gradients(far, ids, 3), embedding_row_gradients(near, ids, 3), strict=True):
        assert_bitwise_equal(a, b)


def test_verify_opcheck() -> None:
    ids, w = some_ids((2, 5), 7, 1), torch.randn(7, 4, requires_grad=True)
    o = torch.ops.tbik
    torch.library.opcheck(o.embedding.default, (ids, w, 0, 7, torch.bfloat16, None, False))
    torch.library.opcheck(o.embedding_dw.default, (torch.randn(2, 5, 4), ids, 7, 0, 7, [0, 3, 10], True))


def test_verify_compiled_equals_eager() -> None:
    ids = some_ids((3, 7), 11, 1)

    def function(w: Tensor) -> tuple[Tensor, ...]:
        return (ops.embedding(ids, w, out_dtype=torch.bfloat16, plan=NARROW),)

    compiled_equals_eager(function, [rows((11, 6), torch.float32, 2).requires_grad_()])


def test_verify_bad_calls_are_refused() -> None:
    w, ids = torch.ones(4, 3), torch.tensor([0, 3])
    cases = {
        "ids is an int64": lambda: ops.embedding(ids.float(), w),
        "ids is an int64 or int32 tensor, got None": lambda: ops.embedding(None, w),  # type: ignore[arg-type]
        "ids is a dense tensor": lambda: ops.embedding(ids.to_sparse(), w),
        "got first_row 18446744073709551616": lambda: ops.embedding(ids, w, first_row=2**64, vocabulary=2**65),
        r"expected w \[V, D\]": lambda: ops.embedding(ids, w[0]),
        "within the vocabulary": lambda: ops.embedding(ids, w, first_row=2, vocabulary=5),
        "out_dtype is one of": lambda: ops.embedding(ids, w, out_dtype=torch.float64),
        "do not say what a sample is": lambda: ops.embedding(ids.reshape(1, 1, 2), w),
        r"dy \[..., D\] and ids": lambda: embedding_row_gradients(torch.ones(3, 3), ids, 4),
    }
    for match, call in cases.items():
        with pytest.raises(PlanError, match=match):
            call()
    for bad in (-1, 4):
        with pytest.raises(ValueError, match=r"within \[0, 4\)"):
            ops.embedding(torch.tensor([bad]), w)
