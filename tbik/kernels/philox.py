"""Philox4x32-10 in integers, as a jitted function, and dropout by it (ORDER.md R9).

    word = philox(counter, key)[f mod 4], counter = (f div 4, position, sample, head)
    y = cast(x * scale) where word >= floor(p*2^32), else +0

Suffixes: T rows, K features. Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
Bits: those of the CPU; an element's ignore the others (tests/test_kernels_operators.py). Not yet measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik import _C
from tbik.kernels import arithmetic
from tbik.kernels.rows import device_integers, require_rows

_A = tl.constexpr(0xD2511F53)
_B = tl.constexpr(0xCD9E8D57)
_WEYL_A = tl.constexpr(0x9E3779B9)
_WEYL_B = tl.constexpr(0xBB67AE85)
_LOW = 2**32 - 1


@triton.jit
def word_of(number, c1, c2, c3, k0, k1):
    """Word number mod 4 (uint32) of the counter (number div 4, c1, c2, c3); int64 values that broadcast to one shape.

    Values stay in their own shapes until a round mixes them: a row and a column cost less than all their pairs.
    """
    which = (number % 4).to(tl.int32)
    c0 = (number // 4).to(tl.uint32)
    c1 = c1.to(tl.uint32)
    c2 = c2.to(tl.uint32)
    c3 = c3.to(tl.uint32)
    k0 = k0.to(tl.uint32)
    k1 = k1.to(tl.uint32)
    for _ in tl.static_range(10):
        n0 = tl.umulhi(c2, _B) ^ c1 ^ k0
        n2 = tl.umulhi(c0, _A) ^ c3 ^ k1
        c1 = c2 * _B
        c3 = c0 * _A
        c0 = n0
        c2 = n2
        k0 = k0 + _WEYL_A
        k1 = k1 + _WEYL_B
    return tl.where(which == 0, c0, tl.where(which == 1, c1, tl.where(which == 2, c2, c3)))


@triton.jit
def is_kept(word, threshold):
    """word >= threshold, for a threshold of 0 .. 2^32 in int64; 32 bits suffice to compare with."""
    return (word >= threshold.to(tl.uint32)) & (threshold <= 0xFFFFFFFF)


@triton.jit
def dropout_kernel(
    x_ptr,
    y_ptr,
    offsets_ptr,
    key_ptr,
    length,
    num_samples,
    scale,
    threshold,
    first_sample,
    first_position,
    first_feature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    low = 0
    high = num_samples - 1
    while low < high:  # the last sample that begins at or before this row
        middle = (low + high + 1) // 2
        begins = tl.load(offsets_ptr + tl.cast(middle, tl.int64)) <= row
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    position = row - tl.load(offsets_ptr + tl.cast(low, tl.int64)) + first_position
    sample = low + tl.cast(first_sample, tl.int64)
    word = word_of(k + first_feature, position, sample, k * 0, tl.load(key_ptr), tl.load(key_ptr + 1))
    x = tl.load(x_ptr + (row * length + k), mask=k < length, other=0.0).to(tl.float32)
    y = tl.where(is_kept(word, tl.cast(threshold, tl.int64)), x * scale, 0.0)
    tl.store(y_ptr + (row * length + k), arithmetic.cast(y, y_ptr.dtype.element_ty), mask=k < length)


def key_of(seed: int, step: int, name: int) -> tuple[int, int]:
    """(k0, k1): the key of a module at a step (R9)."""
    counter = [step & _LOW, step >> 32, name & _LOW, name >> 32]
    k0, k1, *_ = _C.philox(counter, [seed & _LOW, seed >> 32])
    return k0, k1


def dropout(
    x: Tensor,
    p: float,
    key: tuple[int, int],
    sample_offsets: Sequence[int],
    first_sample: int,
    first_position: int,
    first_feature: int,
) -> Tensor:
    """y [..., K] like x contiguous. sample_offsets: rows where samples begin. Layout-invariant."""
    require_rows("kernels.dropout", x)
    y = torch.empty_like(x)
    if x.numel() == 0:
        return y
    length = x.shape[-1]
    block = min(1024, triton.next_power_of_2(length))
    dropout_kernel[(x.numel() // length, triton.cdiv(length, block))](
        x,
        y,
        device_integers(tuple(sample_offsets), x.device),
        device_integers(key, x.device),
        length,
        len(sample_offsets) - 1,
        1.0 / (1.0 - p) if p < 1 else 0.0,
        math.floor(p * 2**32),
        first_sample,
        first_position,
        first_feature,
        BLOCK=block,
        **arithmetic.OPTIONS,
    )
    return y
