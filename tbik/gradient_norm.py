"""The norm of all gradients as one exact sum, and clipping by it (ORDER.md S5).

    norm = sqrt(RN64(sum of g^2))            the sum exact, in integers of 2^-298; RN64: one rounding to fp64
    coef = fp32(min(1, max_norm/(norm + 1e-6)))   norm and quotient in fp64;   g := g coef, always multiplied

A square of an fp32 number has 48 bits, so sums of integers per exponent are exact, and ranks add integers: no order, no
layout. inf or NaN among the elements gives inf or NaN. Letters: g a gradient, fp32, any shape.
Gradients on CUDA are copied to the CPU. Errors: PlanError for other dtypes.
Bits: layout-invariant (tests/test_fsdp.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tbik import _C
from tbik.collectives import all_gather_bytes
from tbik.errors import PlanError

UNIT_EXPONENT = -298
"""Sums are integers of 2^-298: the square of the smallest fp32 number."""

_BYTES = 96  # 2^63 squares below 2^256, in units of 2^-298, take 617 bits
_NAN, _INFINITE = 1, 2


def square_sum(gradients: Iterable[Tensor], groups: Sequence[dist.ProcessGroup | None] = ()) -> float:
    """RN64(sum of g^2) over the elements of all gradients of all ranks of `groups`, each element given once.

    groups: ranks that hold different elements; with several, every combination of them (data ranks, then
    tensor-parallel ranks). Collective. Errors: PlanError, TransportTimeout, TransportError.
    """
    total, flags = 0, 0
    for gradient in gradients:
        if gradient.dtype != torch.float32:
            raise PlanError(f"gradient_norm: expected fp32 gradients, got {gradient.dtype}")
        part, part_flags = _exact_squares(gradient.detach())
        total, flags = total + part, flags | part_flags
    for group in groups:
        message = torch.frombuffer(bytearray(total.to_bytes(_BYTES, "little") + bytes([flags])), dtype=torch.uint8)
        total, flags = 0, 0
        for row in all_gather_bytes(message, group, "gradient_norm"):
            data = bytes(row.tolist())
            total, flags = total + int.from_bytes(data[:_BYTES], "little"), flags | data[_BYTES]
    if flags:
        return math.nan if flags & _NAN else math.inf
    return total / (1 << -UNIT_EXPONENT)  # the quotient of two integers is rounded once


def norm(gradients: Iterable[Tensor], groups: Sequence[dist.ProcessGroup | None] = ()) -> float:
    """sqrt(square_sum(...))."""
    return math.sqrt(square_sum(gradients, groups))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """fp32(min(1, max_norm / (norm + 1e-6))); NaN if the norm is."""
    if not max_norm >= 0:
        raise PlanError(f"gradient_norm: max_norm is a number >= 0, got {max_norm!r}")
    quotient = max_norm / (norm + 1e-6)
    return float(torch.tensor(quotient if math.isnan(quotient) else min(1.0, quotient), dtype=torch.float32))


def _exact_squares(x: Tensor) -> tuple[int, int]:
    """(sum of x^2 in units of 2^-298, flags)."""
    # on the CPU, the only place with the kernel: an exact sum is the same wherever it is made
    low, high, has_nan, has_infinite = _C.square_sum(x.cpu().contiguous())
    total = sum(
        (low_half | high_half << 64) << 2 * (exponent - 1)
        for exponent, (low_half, high_half) in enumerate(zip(low, high))
        if low_half or high_half
    )
    return total, _NAN * has_nan | _INFINITE * has_infinite
