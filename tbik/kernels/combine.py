"""out = epilogue(fold of R buffers), or the nodes of a cover: the additions above the leaves, on their own.

    value = tree over the inputs (tbik.kernels.folding); out = cast(value / divisor + bias)   (A4, A6, A7)

Suffixes: R inputs, C outputs, E elements, N the last axis (of the bias). Up to 64 inputs the fold is unrolled at
compile time, one input in flight after the other, pending values in registers: at most log2 R + 1 of them. Above, the
same pushes come from a table and pending values wait in a scratch buffer.
Bits: layout-invariant (tests/test_kernels_combine.py).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.errors import PlanError
from tbik.kernels import arithmetic
from tbik.kernels.folding import Fold, fold_of
from tbik.kernels.rows import device_integers

BLOCK = 1024
TABLE_BLOCK = 512
NUM_WARPS = 4
MAX_INPUTS = 64  # unrolled


@triton.jit
def _epilogue(
    value,
    bias_ptr,
    out_ptr,
    at,
    is_live,
    last_axis,
    divisor,
    HAS_BIAS: tl.constexpr,
    DIVIDES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """cast(value / divisor + bias) (A7)."""
    if DIVIDES:
        if value.dtype == tl.float32:
            value = tl.div_rn(value, tl.full((BLOCK,), divisor, tl.float32))
        else:
            value = value / tl.full((BLOCK,), divisor, tl.float64)  # IEEE in fp64, div.full in fp32
    if HAS_BIAS:
        value = value + tl.load(bias_ptr + at % last_axis, mask=is_live, other=0.0).to(value.dtype)
    return arithmetic.cast(value, out_ptr.dtype.element_ty)


@triton.jit
def combine_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    num_elements,
    last_axis,
    divisor,
    stride_input,
    SOURCES: tl.constexpr,
    ADDS: tl.constexpr,
    PLAIN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DIVIDES: tl.constexpr,
    IS_ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = at < num_elements
    stack = ()
    for push in tl.static_range(len(ADDS)):
        if SOURCES[push] < 0:
            value = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
        else:
            value = tl.load(x_ptr + SOURCES[push] * tl.cast(stride_input, tl.int64) + at, mask=is_live, other=0.0)
        if PLAIN[push] == 0:
            value = arithmetic.narrow(value)
        for add in tl.static_range(tl.constexpr(ADDS[push])):
            value = stack[len(stack) - 1] + value
            stack = stack[: len(stack) - 1]
            if add + 1 >= PLAIN[push]:
                value = arithmetic.narrow(value)
        stack = stack + (value,)  # noqa: RUF005  (triton has no starred tuples)
    for node in tl.static_range(len(stack)):
        value = stack[node]
        if IS_ROOT:
            value = _epilogue(value, bias_ptr, out_ptr, at, is_live, last_axis, divisor, HAS_BIAS, DIVIDES, BLOCK)
        tl.store(out_ptr + node * tl.cast(num_elements, tl.int64) + at, value, mask=is_live)


@triton.jit
def table_kernel(
    x_ptr,
    bias_ptr,
    out_ptr,
    scratch_ptr,
    pushes_ptr,
    num_elements,
    num_pushes,
    num_slots,
    num_outputs,
    last_axis,
    divisor,
    stride_input,
    NARROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DIVIDES: tl.constexpr,
    IS_ROOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As combine_kernel; the value on top of the stack is in registers, those below in scratch."""
    in_block = tl.arange(0, BLOCK).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + in_block
    is_live = at < num_elements
    scratch_at = scratch_ptr + (tl.program_id(0).to(tl.int64) * tl.cast(num_slots, tl.int64) * BLOCK + in_block)
    value = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
    for push in range(0, num_pushes):
        entry = pushes_ptr + tl.cast(4 * push, tl.int64)
        source = tl.load(entry)
        slot = tl.load(entry + 1).to(tl.int32)
        adds = tl.load(entry + 2).to(tl.int32)
        plain = tl.load(entry + 3).to(tl.int32)
        if slot > 0:
            tl.store(scratch_at + tl.cast(slot - 1, tl.int64) * BLOCK, value)
        value = tl.load(
            x_ptr + (tl.maximum(source, 0) * tl.cast(stride_input, tl.int64) + at),
            mask=is_live & (source >= 0),
            other=0.0,
        )
        if NARROWS:  # noqa: SIM102  (decided when compiled, then when run)
            if plain == 0:
                value = arithmetic.narrow(value)
        tl.debug_barrier()
        for add in range(0, adds):
            value = tl.load(scratch_at + tl.cast(slot - 1 - add, tl.int64) * BLOCK) + value
            if NARROWS:  # noqa: SIM102
                if add + 1 >= plain:
                    value = arithmetic.narrow(value)
        tl.debug_barrier()
    if IS_ROOT:
        value = _epilogue(value, bias_ptr, out_ptr, at, is_live, last_axis, divisor, HAS_BIAS, DIVIDES, BLOCK)
        tl.store(out_ptr + at, value, mask=is_live)
    else:
        for node in range(0, num_outputs - 1):
            below = tl.load(scratch_at + tl.cast(node, tl.int64) * BLOCK)
            tl.store(out_ptr + (tl.cast(node, tl.int64) * num_elements + at), below, mask=is_live)
        tl.store(out_ptr + (tl.cast(num_outputs - 1, tl.int64) * num_elements + at), value, mask=is_live)


def combine(
    x_RE: Tensor,
    schedule: Any,
    *,
    bias: Tensor | None = None,
    avg: int = 1,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """out = cast(fold(x) / avg + bias), or the C nodes of a cover in x.dtype.

    x [R, ..., N] contiguous in acc_dtype, the inputs of `schedule`; bias [N]; avg: divisor at the root
    -> [..., N] in out_dtype (x.dtype by default), or [C, ..., N]. Errors: PlanError. Layout-invariant.
    """
    _require(x_RE, schedule)
    return combine_pushes(
        x_RE, fold_of(schedule), schedule.is_root, bias=bias, avg=avg, out_dtype=out_dtype, pushes_are_inputs=False
    )


def combine_pushes(
    x_RE: Tensor,
    fold: Fold,
    is_root: bool,
    *,
    bias: Tensor | None = None,
    avg: int = 1,
    out_dtype: torch.dtype | None = None,
    pushes_are_inputs: bool = True,
) -> Tensor:
    """The same for a fold. pushes_are_inputs: x holds one value per push, also for those that are +0."""
    _require_epilogue(x_RE, fold, is_root, bias, avg, out_dtype)
    shape = x_RE.shape[1:]
    out = x_RE.new_empty(shape if is_root else (fold.num_outputs, *shape), dtype=out_dtype or x_RE.dtype)
    num_elements = math.prod(shape)
    if out.numel() == 0:
        return out
    sources = [push.source for push in fold.pushes]
    if pushes_are_inputs:
        sources = list(range(len(fold.pushes)))
    if len(fold.pushes) > MAX_INPUTS:
        _fold_by_table(x_RE, fold, sources, is_root, bias, avg, out)
        return out
    combine_kernel[(triton.cdiv(num_elements, BLOCK),)](
        x_RE,
        x_RE if bias is None else bias,
        out,
        num_elements,
        shape[-1] if shape else 1,
        float(avg),
        num_elements,
        SOURCES=tuple(-1 if source is None else source for source in sources),
        ADDS=tuple(push.adds for push in fold.pushes),
        PLAIN=tuple(push.plain for push in fold.pushes),
        HAS_BIAS=bias is not None,
        DIVIDES=avg != 1,
        IS_ROOT=is_root,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **arithmetic.OPTIONS,
    )
    return out


def _fold_by_table(
    x_RE: Tensor, fold: Fold, sources: list[int | None], is_root: bool, bias: Tensor | None, avg: int, out: Tensor
) -> None:
    shape = x_RE.shape[1:]
    num_elements = math.prod(shape)
    entries = [
        (-1 if source is None else source, push.slot, push.adds, push.plain)
        for source, push in zip(sources, fold.pushes, strict=True)
    ]
    blocks = triton.cdiv(num_elements, TABLE_BLOCK)
    num_slots = max(1, fold.num_slots - 1)
    table_kernel[(blocks,)](
        x_RE,
        x_RE if bias is None else bias,
        out,
        x_RE.new_empty((blocks, num_slots, TABLE_BLOCK)),
        device_integers(tuple(number for entry in entries for number in entry), x_RE.device),
        num_elements,
        len(entries),
        num_slots,
        fold.num_outputs,
        shape[-1] if shape else 1,
        float(avg),
        num_elements,
        NARROWS=fold.narrow != "never",
        HAS_BIAS=bias is not None,
        DIVIDES=avg != 1,
        IS_ROOT=is_root,
        BLOCK=TABLE_BLOCK,
        num_warps=NUM_WARPS,
        **arithmetic.OPTIONS,
    )


def _require(x: Tensor, schedule: Any) -> None:
    if x.dim() < 1 or x.shape[0] != schedule.num_inputs:
        raise PlanError(
            f"kernels.combine: expected the {schedule.num_inputs} inputs of the schedule [R, ...], got {list(x.shape)}"
        )


def _require_epilogue(x: Tensor, fold: Fold, is_root: bool, bias: Tensor | None, avg: int, out_dtype: Any) -> None:
    where = "kernels.combine"
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        raise PlanError(f"{where}: expected contiguous inputs [R, ..., N] in float32 or float64, got {x.dtype}")
    if not fold.pushes:
        raise PlanError(f"{where}: expected at least one input")
    if not is_root and (bias is not None or avg != 1 or out_dtype not in (None, x.dtype)):
        raise PlanError(f"{where}: a cover leaves in {x.dtype}; bias, avg and out_dtype belong to the root")
    if bias is not None and (bias.shape != x.shape[-1:] or x.dim() < 2 or not bias.is_contiguous()):
        raise PlanError(f"{where}: expected a contiguous bias [{x.shape[-1]}], got {list(bias.shape)}")
