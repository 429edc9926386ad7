"""The position-keyed digest of raw bits (ORDER.md F1): partial sums per program, added as integers.

    F = sum over elements of M(M(key * (index + 1)) + bits)  mod 2^64        index = first + sum_d c_d index_stride_d

Integers only: no rounding, no order, no atomics. The number is that of csrc/fingerprint.cpp for every stride and
partition (tests/test_kernels_fingerprint.py). Not yet measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.errors import PlanError

BLOCK = 1024
MAX_PROGRAMS = 1024
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_STORAGE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _FIRST
    x = (x ^ (x >> 27)) * _SECOND
    return x ^ (x >> 31)


@triton.jit
def _zero_extended(x):
    if x.dtype == tl.int16:
        x = x.to(tl.uint16, bitcast=True)
    elif x.dtype == tl.int32:
        x = x.to(tl.uint32, bitcast=True)
    elif x.dtype == tl.int64:
        x = x.to(tl.uint64, bitcast=True)
    return x.to(tl.uint64)


@triton.jit
def fingerprint_kernel(x_ptr, out_ptr, num_elements, first_ptr, sizes, strides, index_strides, BLOCK: tl.constexpr):
    """out[program] = the sum over every num_programs-th block of the elements of a strided box."""
    first = tl.load(first_ptr).to(tl.uint64, bitcast=True)
    key = tl.load(first_ptr + 1).to(tl.uint64, bitcast=True)
    total = tl.zeros((BLOCK,), tl.uint64)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, num_elements, step):
        at = start + tl.arange(0, BLOCK).to(tl.int64)
        is_live = at < num_elements
        rest = at
        offset = tl.zeros((BLOCK,), tl.int64)
        index = tl.zeros((BLOCK,), tl.int64)
        for d in tl.static_range(len(sizes)):
            coordinate = rest % sizes[d]
            rest = rest // sizes[d]
            offset += coordinate * strides[d]
            index += coordinate * index_strides[d]
        bits = _zero_extended(tl.load(x_ptr + offset, mask=is_live, other=0))
        position = key * (index.to(tl.uint64, bitcast=True) + first + 1)
        total += tl.where(is_live, _mix(_mix(position) + bits), 0).to(tl.uint64)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64), tl.sum(total.to(tl.int64, bitcast=True), axis=0))


def fingerprint(x: Tensor, first: int, index_strides: Sequence[int], key: int) -> int:
    """F of the box x, whose element at coordinates 0 has index `first`; any strides. Waits for the device.

    Errors: PlanError. Layout-invariant: the sums of disjoint parts add up.
    """
    where = "kernels.fingerprint"
    if x.is_complex() or x.is_quantized or x.element_size() not in _STORAGE:
        raise PlanError(f"{where}: expected real numbers of 1, 2, 4 or 8 bytes, got {x.dtype}")
    if len(index_strides) != x.dim() or key % 2 == 0:
        raise PlanError(f"{where}: expected one index stride per axis and an odd key, got {index_strides} and {key}")
    if x.numel() == 0:
        return 0
    stored = x.detach().resolve_neg().view(_STORAGE[x.element_size()])
    dims = _merged([*zip(stored.shape, stored.stride(), index_strides, strict=True)])
    programs = min(MAX_PROGRAMS, triton.cdiv(x.numel(), BLOCK))
    partial = torch.empty(programs, dtype=torch.int64, device=x.device)
    fingerprint_kernel[(programs,)](
        stored,
        partial,
        x.numel(),
        torch.tensor([_signed(first), _signed(key)], device=x.device),
        *(tuple(dim[i] for dim in dims) for i in range(3)),
        BLOCK=BLOCK,
        num_warps=4,
    )
    return sum(partial.tolist()) % 2**64


def _merged(dims: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(size, stride, index stride) of the axes, the last one first; neighbours that make one line are one."""
    merged: list[tuple[int, int, int]] = []
    for size, stride, index_stride in reversed(dims):
        if size == 1:
            continue
        if merged:
            inner = merged[-1]
            if stride == inner[0] * inner[1] and index_stride == inner[0] * inner[2]:
                merged[-1] = (inner[0] * size, inner[1], inner[2])
                continue
        merged.append((size, stride, index_stride))
    return merged or [(2, 1, 1)]


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value
