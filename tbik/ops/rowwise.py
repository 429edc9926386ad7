"""What the row-wise operators share: their dtypes, their refusals, and the short way to a kernel.

x [..., K] in bf16, fp16 or fp32; computed in fp32, rounded once to the dtype of x (A12). A parameter is
rounded to compute_dtype (x.dtype by default) where it has more bits, and converted exactly where it has fewer: an fp32
master weight meets bf16 activations as its bf16 copy would, and bf16 weights meet fp32 activations without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tbik import _C
from tbik.devices import CPU_AND_CUDA
from tbik.errors import PlanError
from tbik.ops.linear import (
    _LIBRARY,
    DEVICES,
    _name,
    _refuser,
    _require_dense,
    _require_same_device,
    _shape,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_FLOAT32 = torch.finfo(torch.float32).max


def require_rows(
    where: str,
    name: str,
    x: Tensor,
    min_dim: int = 1,
    length: int | None = None,
    served: tuple[str, ...] = DEVICES,
) -> None:
    """PlanError unless x is a dense [..., K] tensor, K >= 1, of a dtype and on a device that the operator takes."""
    _require_dense(where, name, x, served)
    if x.dtype not in DTYPES:
        raise PlanError(f"{where}: {name} is bfloat16, float16 or float32, got {_name(x.dtype)}; use {name}.float()")
    if x.dim() < min_dim or x.shape[-1] < 1:
        expected = "[..., H, D]" if min_dim == 2 else "[..., K]"
        raise PlanError(f"{where}: expected {name} {expected} with a non-empty last axis, got {_shape(x)}")
    if length is not None and x.shape[-1] != length:
        raise PlanError(f"{where}: expected {name} [..., {length}], got {_shape(x)}")


def require_alike(where: str, name: str, t: Tensor, other: str, x: Tensor) -> None:
    """PlanError unless t has the shape, the dtype and the device of x."""
    require_rows(where, name, t, served=CPU_AND_CUDA)  # x decides
    _require_same_device(where, other, x, name, t)
    if t.shape != x.shape or t.dtype != x.dtype:
        raise PlanError(
            f"{where}: {name} is {_name(t.dtype)} {_shape(t)}, {other} {_name(x.dtype)} {_shape(x)}; they must be alike"
        )


def require_parameter(where: str, name: str, w: Tensor, x: Tensor) -> None:
    """PlanError unless w is [K] beside x [..., K]."""
    _require_dense(where, name, w, CPU_AND_CUDA)  # x decides
    _require_same_device(where, "x", x, name, w)
    if w.dtype not in DTYPES:
        raise PlanError(f"{where}: {name} is bfloat16, float16 or float32, got {_name(w.dtype)}")
    if w.shape != x.shape[-1:]:
        raise PlanError(f"{where}: expected x [..., K] and {name} [K], got {_shape(x)} and {_shape(w)}")


def require_compute(where: str, compute_dtype: torch.dtype | None, x: Tensor) -> torch.dtype:
    """The dtype that parameters are rounded to."""
    compute = x.dtype if compute_dtype is None else compute_dtype
    if compute not in DTYPES:
        raise PlanError(f"{where}: compute_dtype is one of {[_name(d) for d in DTYPES]}, got {compute!r}")
    return compute


def require_eps(where: str, eps: float) -> None:
    if not is_number(eps) or not 0 <= eps <= MAX_FLOAT32:
        raise PlanError(f"{where}: eps is a finite number >= 0, got {eps!r}")


def is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_direct(*tensors: Tensor | None) -> bool:
    """Whether a kernel may be called without the dispatcher: nobody watches, nothing needs a gradient."""
    return not torch.compiler.is_compiling() and _C.is_direct(*tensors)


def is_simple(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether x [..., K] and the parameters [K] need no further check, which would cost more than a small row."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    return _C.is_simple(x, *parameters)


def is_simple_pair(a: Tensor, b: Tensor | None) -> bool:
    """Whether a [..., K] and b, alike or None, need no further check."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return False
    return _C.is_simple_pair(a, b)


def refuse_vmap(*operators: Any) -> None:
    for operator in operators:
        message = f"{operator}: no torch.func.vmap; pass the batch as leading axes"
        torch.library.register_vmap(operator, _refuser(message), lib=_LIBRARY)


def refuse_derivative(*operators: Any) -> None:
    for operator in operators:
        message = f"{operator}: no derivative; the operators of tbik.ops are differentiable once"
        torch.library.register_autograd(operator, _refuser(message), lib=_LIBRARY)


def differentiable(operator: Any, backward: Callable[..., Any], setup: Callable[..., None]) -> None:
    torch.library.register_autograd(operator, backward, setup_context=setup, lib=_LIBRARY)
