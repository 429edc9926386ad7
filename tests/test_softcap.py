"""Soft cap against the oracle and against the truth (ORDER.md R10)."""

from __future__ import annotations

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents

from tbik import _C, ops, reference
from tbik.errors import PlanError


@pytest.mark.parametrize("path", _C.cpu_paths())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_verify_softcap_equals_reference(dtype: torch.dtype, path: str) -> None:
    x = wide_exponents((3, 700), dtype, 0, spread=20)
    x[0, :6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 30.0]).to(dtype)
    dy = wide_exponents((3, 700), dtype, 1, spread=20)
    for cap in (30.0, 50.0, 0.7):
        assert_bitwise_equal(_C.softcap(x, cap, path), reference.softcap(x, cap), f"{cap}")
        assert_bitwise_equal(_C.softcap_dx(dy, x, cap, path), reference.softcap_dx(dy, x, cap), f"{cap}")
    assert_bits_differ(_C.softcap(x, 30.0, path), _C.softcap(x, 31.0, path), "another cap")


def test_verify_operator_and_its_gradient() -> None:
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).mul(40).requires_grad_()
    y = ops.softcap(x, 30.0)
    assert_bitwise_equal(y, _C.softcap(x.detach(), 30.0), "autograd")
    assert_bitwise_equal(ops.softcap(x[1:2].detach(), 30.0)[0], y[1].detach(), "a row alone")
    dy = torch.randn(4, 9, generator=torch.Generator().manual_seed(1))
    y.backward(dy)
    wide = x.detach().double().requires_grad_()
    (30.0 * torch.tanh(wide / 30.0)).backward(dy.double())
    assert x.grad is not None and wide.grad is not None
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)
    assert_bitwise_equal(x.grad, _C.softcap_dx(dy, x.detach(), 30.0), "gradient")


def test_verify_refusals() -> None:
    for cap in (0, -1.0, True, "30", float("inf"), 1e-46, 10**400):
        with pytest.raises(PlanError, match="cap is a number above 0"):
            ops.softcap(torch.ones(3), cap)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="bfloat16, float16 or float32"):
        ops.softcap(torch.ones(3, dtype=torch.float64), 30.0)
