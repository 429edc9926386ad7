"""silu and gelu, alone and gated (ORDER.md C3, C7, R5, R6).

    silu(g) = g s, s = sigmoid(g)                          silu'(g) = s + a (1 - s), a = g s
    gelu(g) = g s, s = sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)), which is 0.5 g (1 + tanh(...)), the tanh form
    y = f(gate) up                                         dup = dy f(gate), dgate = (dy up) f'(gate)

Everything in fp32, every product rounded; one cast per returned value. CPU, meta and CUDA tensors (tbik.kernels; not
yet measured on a GPU). Bits: deterministic, batch-invariant (tests/test_activation.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tbik import _C
from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import _fake, _operator, _require_one_device, _shape
from tbik.ops.rowwise import (
    differentiable,
    is_direct,
    is_simple_pair,
    refuse_derivative,
    refuse_vmap,
    require_alike,
    require_rows,
)


def silu(x: Tensor) -> Tensor:
    """y = x sigmoid(x), two roundings in fp32 (C3), one cast. x [..., K] -> alike. Batch-invariant."""
    return _apply("ops.silu", x, None, "silu")


def gelu(x: Tensor, *, approximate: str = "tanh") -> Tensor:
    """y = x sigmoid(u), u = 2 sqrt(2/pi) (x + 0.044715 x^3) (C7), one cast. x [..., K] -> alike. Batch-invariant."""
    return _apply("ops.gelu", x, None, _gelu_kind("ops.gelu", approximate))


def silu_and_mul(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """y = cast(silu(gate) up)   (R5).

    gate, up [..., I] alike, or one tensor [..., 2 I] that holds gate before up -> [..., I]. Gradients in the dtype of
    the inputs, packed like them. Errors: PlanError. Batch-invariant; both forms have the same bits.
    """
    return _gated("ops.silu_and_mul", gate, up, "silu")


def gelu_and_mul(gate: Tensor, up: Tensor | None = None, *, approximate: str = "tanh") -> Tensor:
    """y = cast(gelu(gate) up)   (R6), the tanh form; the erf form is refused. The rest as in silu_and_mul."""
    where = "ops.gelu_and_mul"
    return _gated(where, gate, up, _gelu_kind(where, approximate))


def _gelu_kind(where: str, approximate: str) -> str:
    if approximate != "tanh":
        raise PlanError(
            f"{where}: approximate is 'tanh', got {approximate!r}; the erf form has no polynomial in ORDER.md section C"
        )
    return "gelu_tanh"


def _apply(where: str, x: Tensor, up: Tensor | None, kind: str) -> Tensor:
    if is_simple_pair(x, up):
        return _C.activation(x, up, kind)
    require_rows(where, "x" if up is None else "gate", x, served=CPU_AND_CUDA)
    if up is not None:
        require_alike(where, "up", up, "gate", x)
    if is_direct(x, up):
        return _C.activation(x, up, kind)
    y: Tensor = _activation(x, up, kind)
    return y


def _gated(where: str, gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    if up is not None:
        return _apply(where, gate, up, kind)
    require_rows(where, "the packed input", gate, served=CPU_AND_CUDA)
    if gate.shape[-1] % 2:
        raise PlanError(f"{where}: expected [..., 2 I], gate before up, got {_shape(gate)}")
    if is_direct(gate):
        return _packed(gate, kind)
    y: Tensor = _activation_packed(gate, kind)
    return y


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _packed(x: Tensor, kind: str) -> Tensor:
    return kernels_of(x).activation(*_halves(x), kind)


# --- operators ------------------------------------------------------------------------------------------------------


@_operator("activation", "(Tensor gate, Tensor? up, str kind) -> Tensor", cuda=True)
def _activation(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    return kernels_of(gate).activation(gate, up, kind)


@_fake(_activation)
def _activation_fake(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    _require_one_device(gate, up)
    return gate.new_empty(gate.shape)


def _activation_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _activation_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gate, up = ctx.saved_tensors
    grads = _activation_dx(dy, gate, up, ctx.kind)
    return grads[0], grads[1] if up is not None else None, None


differentiable(_activation, _activation_backward, _activation_setup)


@_operator("activation_dx", "(Tensor dy, Tensor gate, Tensor? up, str kind) -> Tensor[]", cuda=True)
def _activation_dx(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> list[Tensor]:
    return kernels_of(gate).activation_dx(dy, gate, up, kind, False)


@_fake(_activation_dx)
def _activation_dx_fake(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str) -> list[Tensor]:
    _require_one_device(dy, gate, up)
    return [gate.new_empty(gate.shape) for _ in range(1 if up is None else 2)]


@_operator("activation_packed", "(Tensor x, str kind) -> Tensor", cuda=True)
def _activation_packed(x: Tensor, kind: str) -> Tensor:
    return _packed(x, kind)


@_fake(_activation_packed)
def _activation_packed_fake(x: Tensor, kind: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _activation_packed_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _activation_packed_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return _activation_packed_dx(dy, x, ctx.kind), None


differentiable(_activation_packed, _activation_packed_backward, _activation_packed_setup)


@_operator("activation_packed_dx", "(Tensor dy, Tensor x, str kind) -> Tensor", cuda=True)
def _activation_packed_dx(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    return kernels_of(x).activation_dx(dy, *_halves(x), kind, True)[0]


@_fake(_activation_packed_dx)
def _activation_packed_dx_fake(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    _require_one_device(dy, x)
    return x.new_empty(x.shape)


refuse_vmap(_activation, _activation_dx, _activation_packed, _activation_packed_dx)
refuse_derivative(_activation_dx, _activation_packed_dx)
