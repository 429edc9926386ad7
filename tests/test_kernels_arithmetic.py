"""The roundings of tbik.kernels.arithmetic against the oracle, element by element."""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from interpreter import exact_fma, needs_triton  # noqa: F401

from tbik import reference

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")]


def floats(size: int, seed: int) -> torch.Tensor:
    """Every kind of fp32 number: random bits, many subnormal, many close to 2^-126, NaN, infinities, zeros."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (size,), generator=generator)
    sign = bits & -0x80000000
    bits[: size // 4] = sign[: size // 4] | (bits[: size // 4] & 0x00FFFFFF)
    bits[:6] = torch.tensor([0, -0x80000000, 0x7F800000, -0x00800000, 0x7FC00001, 0x00800000])
    return bits.to(torch.int32).view(torch.float32)


def apply(function_name: str, *operands: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    import kernels_of_tests

    return kernels_of_tests.elementwise(function_name, *operands, dtype=dtype)


@pytest.mark.usefixtures("exact_fma")
def test_verify_fma_with_flush() -> None:
    """A2 on products and sums around the smallest normal number, and on anything else."""
    size = 4096
    a, b, c = (floats(size, seed) for seed in range(3))
    # half of the products land near 2^-126, where rounding and flushing meet
    near = torch.arange(size // 2, size)
    b[near] = 2.0**-126 * (1 - 2.0**-24) / a[near].abs().clamp(2.0**-100, 2.0**100)
    c[near] = c[near] * torch.where(near % 2 == 0, 0.0, 1.0)
    expected = reference.fma32(a, b, c)
    actual = apply("fma", a, b, c)
    is_number = ~expected.isnan()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_bitwise_equal(actual[is_number], expected[is_number], "fma with flush")
    plain = (a.double() * b.double() + c.double()).float()
    assert_bits_differ(actual[is_number], plain[is_number], "without the flush rule")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_verify_cast(dtype: torch.dtype) -> None:
    x = floats(4096, 7)
    assert_bitwise_equal(apply("cast", x, dtype=dtype), reference.epilogue(x, out_dtype=dtype), "cast")


def test_verify_narrow() -> None:
    x = floats(4096, 8)
    x = x[~x.isnan()]
    assert_bitwise_equal(apply("narrow", x), reference.round_wire(x), "narrow")
