"""Fan-in of activation gradients in our order (ORDER.md L3).

    x_1 = ... = x_n = x        dx = cast((dx_1 + dx_2) + ... + dx_n), in fp32, in index order

Autograd adds the gradients of several consumers in the reversed order of creation and rounds after every addition.
Bits: deterministic, batch-invariant (tests/test_fanout.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import _fake, _is_int, _operator, _require_one_device
from tbik.ops.rowwise import refuse_derivative, refuse_vmap, require_rows


def fanout(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """n views of x, one per consumer; dx = cast of the sum of their gradients in fp32, in index order (L3).

    x [...] in bf16, fp16 or fp32. A consumer without a gradient counts as +0. Errors: PlanError. Batch-invariant.
    """
    where = "ops.fanout"
    require_rows(where, "x", x, served=CPU_AND_CUDA)
    if not _is_int(n) or n < 1:
        raise PlanError(f"{where}: n is an integer >= 1, got {n!r}")
    views: tuple[Tensor, ...] = _Fanout.apply(x, n)  # type: ignore[no-untyped-call]
    return views


class _Fanout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, n: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(n))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _sum_inputs(list(grads)), None


@_operator("sum_inputs", "(Tensor[] inputs) -> Tensor", cuda=True)
def _sum_inputs(inputs: list[Tensor]) -> Tensor:
    return kernels_of(inputs[0]).sum_inputs(inputs)


@_fake(_sum_inputs)
def _sum_inputs_fake(inputs: list[Tensor]) -> Tensor:
    _require_one_device(*inputs)
    return inputs[0].new_empty(inputs[0].shape)


refuse_vmap(_sum_inputs)
refuse_derivative(_sum_inputs)
