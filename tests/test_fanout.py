"""tbik.ops.fanout: the gradient of a value with several consumers."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcases import DTYPES, PATHS, check_rows, compiled_equals_eager, run_with_flush
from torch import Tensor

from tbik import _C, ops, reference
from tbik.errors import PlanError


def rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return wide_exponents(shape, dtype, seed, 14)


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 5),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
    path=st.sampled_from(PATHS),
)
def test_verify_fan_in_equals_reference(n: int, shape: list[int], dtype: torch.dtype, seed: int, path: str) -> None:
    grads = [rows(tuple(shape), dtype, seed + i) for i in range(n)]
    assert_bitwise_equal(_C.sum_inputs(grads, path), reference.fan_in(grads), path)


def test_verify_fan_in_is_in_index_order() -> None:
    """Not autograd's order (reversed creation, a rounding per addition), whichever branch is built first."""
    x = rows((64, 40), torch.bfloat16, 1)
    grads = [rows((64, 40), torch.bfloat16, 10 + i) for i in range(4)]
    expected = reference.fan_in(grads)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        leaf = x.clone().requires_grad_()
        views = ops.fanout(leaf, 4)
        outputs = {i: views[i] * 1 for i in order}
        torch.autograd.backward([outputs[i] for i in order], [grads[i] for i in order])
        assert_bitwise_equal(leaf.grad, expected, f"branches built {order}")
    leaf = x.clone().requires_grad_()
    torch.autograd.backward([leaf * 1 for _ in range(4)], grads)
    assert_bits_differ(leaf.grad, expected, "autograd's own fan-in")
    wide = [rows((64, 40), torch.float32, 20 + i) for i in range(4)]
    assert_bits_differ(reference.fan_in(wide), reference.fan_in(wide[::-1]), "reversed")
    # the graph: x has one consumer, so the engine adds nothing
    leaf = x.clone().requires_grad_()
    views = ops.fanout(leaf, 4)
    assert len({view.grad_fn for view in views}) == 1
    assert [type(f).__name__ for f, _ in views[0].grad_fn.next_functions if f is not None] == ["AccumulateGrad"]


def test_verify_unused_consumer_is_zero() -> None:
    leaf = rows((3, 8), torch.float32, 1).requires_grad_()
    first, _ = ops.fanout(leaf, 2)
    dy = rows((3, 8), torch.float32, 2)
    first.backward(dy)
    assert_bitwise_equal(leaf.grad, dy + 0.0)


def test_verify_values_are_views() -> None:
    x = torch.randn(3, 4)
    assert all(view.data_ptr() == x.data_ptr() for view in ops.fanout(x, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_rows_alone_equal_rows_in_company(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = [rows((128, 300), dtype, i) for i in range(3)]

    def run(*grads: Tensor) -> list[Tensor]:
        x = torch.zeros_like(grads[0]).requires_grad_()
        torch.autograd.backward(ops.fanout(x, 3), grads)
        return [x.grad]

    check_rows(run, grads, monkeypatch)


def everything() -> Callable[[], list[Tensor]]:
    inputs = []
    for dtype in DTYPES:
        tiny = 2.0**-20 if dtype == torch.float16 else 2.0**-130
        inputs.append([(rows((4, 50), dtype, i).float() * tiny).to(dtype) for i in range(3)])
    return lambda: [_C.sum_inputs(grads, path) for grads in inputs for path in PATHS]


def test_verify_flush_mode_of_the_process() -> None:
    run_with_flush("test_fanout", "everything")


def test_verify_strides_beyond_32_bits() -> None:
    stride = 2**31 + 5
    size = 2 * (2 * stride + 16)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    far = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2).as_strided((3, 8), (stride, 1))
    near = rows((3, 8), torch.bfloat16, 1)
    far.copy_(near)
    assert_bitwise_equal(_C.sum_inputs([far, far]), _C.sum_inputs([near, near]))


def test_verify_opcheck_and_compile() -> None:
    torch.library.opcheck(torch.ops.tbik.sum_inputs.default, ([torch.randn(2, 3), torch.randn(2, 3)],))

    def function(x: Tensor) -> tuple[Tensor, ...]:
        a, b = ops.fanout(x, 2)
        return (a * 3, b + 1)

    compiled_equals_eager(function, [rows((3, 4), torch.bfloat16, 1).requires_grad_()])


def test_verify_bad_calls_are_refused() -> None:
    for match, call in {
        "n is an integer": lambda: ops.fanout(torch.ones(2), 0),
        "got torch.int64": lambda: ops.fanout(torch.ones(2).long(), 2),
        "got float64": lambda: ops.fanout(torch.ones(2).double(), 2),
    }.items():
        with pytest.raises(PlanError, match=match):
            call()
