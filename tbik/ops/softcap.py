"""Soft cap of logits (ORDER.md R10): y = cast(cap * tanh(x / cap)), dx = cast(dy * (1 - t*t)), t = tanh(x / cap).

fp32, every operation rounded, tanh of C4; one cast. Bits: deterministic, batch-invariant (tests/test_softcap.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tbik import _C
from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import _fake, _operator
from tbik.ops.rowwise import differentiable, is_direct, is_number, refuse_derivative, refuse_vmap, require_rows

SMALLEST = 2.0**-149  # of float32


def softcap(x: Tensor, cap: float) -> Tensor:
    """y = cast(cap tanh(x / cap)), cap rounded to fp32. x [..., K] -> alike. Errors: PlanError. Batch-invariant."""
    where = "ops.softcap"
    require_rows(where, "x", x, served=CPU_AND_CUDA)
    if not is_number(cap) or not SMALLEST <= cap < 1e38:
        raise PlanError(f"{where}: cap is a number above 0 and below 1e38 that float32 holds, got {cap!r}")
    if is_direct(x):
        return _C.softcap(x, cap)
    y: Tensor = _softcap(x, float(cap))
    return y


@_operator("softcap", "(Tensor x, float cap) -> Tensor", cuda=True)
def _softcap(x: Tensor, cap: float) -> Tensor:
    return kernels_of(x).softcap(x, cap)


@_fake(_softcap)
def _softcap_fake(x: Tensor, cap: float) -> Tensor:
    return x.new_empty(x.shape)


@_operator("softcap_backward", "(Tensor dy, Tensor x, float cap) -> Tensor", cuda=True)
def _softcap_backward(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    return kernels_of(x).softcap_dx(dy, x, cap)


@_fake(_softcap_backward)
def _softcap_backward_fake(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.cap = inputs
    ctx.save_for_backward(x)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return _softcap_backward(dy, x, ctx.cap), None


differentiable(_softcap, _gradient, _setup)
refuse_vmap(_softcap, _softcap_backward)
refuse_derivative(_softcap_backward)
