"""The five classes of errors, and what a caller who knows only built-in ones may catch."""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal, count_differing_bits_patterns

from tbik import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.PlanError, ValueError),
        (errors.TransportError, RuntimeError),
        (errors.TransportTimeout, errors.TransportError),
        (errors.IntegrityError, AssertionError),
    ],
)
def test_verify_hierarchy(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, errors.TbikError)
    assert issubclass(error, builtin)


def test_verify_comparison_names_coordinate_values_and_count() -> None:
    expected = torch.zeros(2, 3)
    actual = expected.clone()
    actual[1, 2] = -0.0
    actual[1, 0] = 1.5
    with pytest.raises(
        errors.IntegrityError, match=r"sum: 2 of 6 .*\(1, 0\): actual 0x3fc00000 \(1.5\), .* 0x00000000"
    ):
        assert_bitwise_equal(actual, expected, "sum")
    assert count_differing_bits_patterns(actual, expected) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_verify_comparison_sees_signs_and_payloads(dtype: torch.dtype) -> None:
    zero, nan = torch.zeros(1, dtype=dtype), torch.full((1,), float("nan"), dtype=dtype)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    other_nan = (nan.view(integer) + 1).view(dtype)
    assert_bitwise_equal(nan, nan.clone(), "same payload")
    assert_bits_differ(nan, other_nan, "payload")
    assert_bits_differ(zero, -zero, "sign of zero")


def test_verify_comparison_refuses_unlike_tensors() -> None:
    with pytest.raises(errors.IntegrityError, match=r"expected torch\.float32"):
        assert_bitwise_equal(torch.zeros(2, dtype=torch.float64), torch.zeros(2), "dtype")
    with pytest.raises(errors.IntegrityError, match=r"got torch\.float32"):
        assert_bitwise_equal(torch.zeros(2), torch.zeros(1, 2), "shape")
    with pytest.raises(errors.IntegrityError, match="expected different bits"):
        assert_bits_differ(torch.zeros(2), torch.zeros(2), "negative control")
