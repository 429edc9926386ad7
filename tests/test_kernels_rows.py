"""Row kernels (norms, rope) against the oracle, in bits; a row alone equals a row in a batch.

Their arithmetic is IEEE operation by operation, also in the interpreter. Suffixes: T rows, K elements.
"""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from interpreter import DEVICE, needs_triton

from tbik import reference
from tbik.errors import PlanError

pytestmark = [
    pytest.mark.long,
    needs_triton,
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def here(*tensors: torch.Tensor | None) -> list:
    return [None if t is None else t.to(DEVICE) for t in tensors]


# --- norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "length"), [(BF16, 520), (FP32, 40), (FP16, 100)], ids=str)
def test_verify_rms_norm(dtype: torch.dtype, length: int) -> None:
    """Tails of a lane and of a block, fp32 master weights rounded to the compute dtype, h = cast(x + residual)."""
    from tbik.kernels import norm

    x, residual = (wide_exponents((3, length), dtype, seed, spread=10) for seed in (1, 2))
    w = wide_exponents((length,), FP32, 3, spread=4)
    y, h = norm.norm(*here(x, residual, w), None, 1e-6, False, length == 40, dtype)
    expected, expected_h = reference.add_rms_norm(x, residual, w, 1e-6, offset=length == 40)
    assert_bitwise_equal(h.cpu(), expected_h, "h")
    assert_bitwise_equal(y.cpu(), expected, "y")
    alone, _ = norm.norm(*here(x[2:], residual[2:], w), None, 1e-6, False, length == 40, dtype)
    assert_bitwise_equal(alone.cpu(), expected[2:], "row alone")


def test_verify_layer_norm() -> None:
    from tbik.kernels import norm

    x, w, bias = wide_exponents((2, 70), BF16, 4, spread=10), torch.randn(70).bfloat16(), torch.randn(70).bfloat16()
    y, _ = norm.norm(*here(x, None, w, bias), 1e-5, True, False, BF16)
    assert_bitwise_equal(y.cpu(), reference.layer_norm(x, w, bias, 1e-5), "layer norm")


@pytest.mark.parametrize("centered", [False, True])
def test_verify_norm_dx(centered: bool) -> None:
    from tbik.kernels import norm

    x, dh = wide_exponents((2, 70), BF16, 5, spread=10), wide_exponents((2, 70), BF16, 6, spread=10)
    dy, w = wide_exponents((2, 70), FP32, 7, spread=10), wide_exponents((70,), BF16, 8, spread=4)
    actual = norm.norm_dx(*here(dy, x, w), 1e-6, centered, False, dh.to(DEVICE), BF16)
    assert_bitwise_equal(actual.cpu(), reference.norm_dx(dy, x, w, 1e-6, centered, residual=dh), "dx")


def test_verify_data_shows_the_order() -> None:
    """Negative control: summed from the first element to the last, such rows have other norms."""
    x = torch.randn(4, 520, generator=torch.Generator().manual_seed(2))
    total = torch.zeros(4)
    for k in range(520):
        total = total + x[:, k] * x[:, k]
    in_order = x * (1 / torch.sqrt(total / 520 + 1e-6))[:, None]
    assert_bits_differ(in_order, reference.rms_norm(x, torch.ones(520), 1e-6), "another order")


# --- rope ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_verify_rope(interleaved: bool, backward: bool) -> None:
    """12 of 20 elements turn, the rest passes."""
    from tbik.kernels import rope

    x = wide_exponents((3, 2, 20), BF16, 11, spread=20)
    sin, cos = reference.sin_cos_tables(torch.arange(3) * 1000, torch.logspace(0, -3, 6))
    actual = rope.rope(*here(x, sin, cos), interleaved, backward)
    assert_bitwise_equal(actual.cpu(), reference.rope(x, sin, cos, interleaved, backward), "rope")


def test_verify_refusals() -> None:
    from tbik.kernels import norm, rope

    x = torch.zeros(2, 8, device=DEVICE)
    with pytest.raises(PlanError, match="expected contiguous rows"):
        norm.norm(x.double(), None, x[0], None, 1e-6, False, False, FP32)
    with pytest.raises(PlanError, match=r"expected w \[8\]"):
        norm.norm(x, None, x[0, :4], None, 1e-6, False, False, FP32)
    with pytest.raises(PlanError, match="up to 262144 elements"):
        norm.norm(
            torch.zeros(1, 2**18 + 1, device=DEVICE), None, torch.zeros(2**18 + 1), None, 1e-6, False, False, FP32
        )
    with pytest.raises(PlanError, match="expected x"):
        rope.rope(x, x, x, False, False)
