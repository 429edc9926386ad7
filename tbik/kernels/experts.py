"""What experts need beside products and folds: chains over the slots of a token, products (ORDER.md M2, M3).

    leaf i of y[t]:  acc = +0;  for s ascending: acc = fma(p[t, s], v_i[row[t, s]], acc);  + (+0.0)      row -1: no slot
    z = cast(x * f)          f one number per row, or one per element

Suffixes: L leaves, T tokens, S slots, P pairs (rows of values), H elements of a row. The chain is A1's with the flush
of A2; a product is rounded once and never flushed. Bits: those of the CPU, batch-invariant
(tests/test_kernels_operators.py::test_verify_experts, test_verify_chains_over_slots). Not yet measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.errors import PlanError
from tbik.kernels import arithmetic
from tbik.kernels.rows import require_rows

BLOCK = 1024


@triton.jit
def slots_kernel(
    values_ptr,
    rows_ptr,
    factors_ptr,
    out_ptr,
    num_rows,
    num_tokens,
    num_slots,
    length,
    HAS_FACTORS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    leaf = tl.program_id(1).to(tl.int64)
    h = tl.program_id(2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = h < length
    acc = tl.zeros((BLOCK,), tl.float32)
    for slot in range(num_slots):
        row = tl.load(rows_ptr + (token * num_slots + slot))
        is_there = is_live & (row >= 0)
        value = tl.load(values_ptr + ((leaf * num_rows + row) * length + h), mask=is_there, other=0.0)
        factor = tl.zeros((BLOCK,), tl.float32)
        if HAS_FACTORS:
            factor += arithmetic.flush(tl.load(factors_ptr + (token * num_slots + slot)))
        else:
            factor += 1.0
        after = arithmetic.fma_flushed(factor, arithmetic.flush(value), acc)
        acc = tl.where(is_there, after, acc)
    tl.store(out_ptr + ((leaf * num_tokens + token) * length + h), acc + 0.0, mask=is_live)


def combine_slots(values_LPH: Tensor, rows_TS: Tensor, factors_TS: Tensor | None) -> Tensor:
    """fp32 [L, T, H]: the chain over the slots of each token. values fp32, rows int64 in -1..P-1, factors fp32 or 1.

    Errors: PlanError for another dtype or shape. Batch-invariant.
    """
    where = "kernels.combine_slots"
    leaves, num_rows, length = values_LPH.shape
    tokens, slots = rows_TS.shape
    for name, t, dtype in (("values", values_LPH, torch.float32), ("rows", rows_TS, torch.int64)):
        if t.dtype != dtype or not t.is_contiguous():
            raise PlanError(f"{where}: {name}: expected contiguous {dtype}, got {t.dtype} with strides {t.stride()}")
    if factors_TS is not None:
        require_rows(where, factors_TS)
        if factors_TS.shape != rows_TS.shape or factors_TS.dtype != torch.float32:
            raise PlanError(f"{where}: expected fp32 factors {list(rows_TS.shape)}, got {list(factors_TS.shape)}")
    out = values_LPH.new_empty(leaves, tokens, length)
    if out.numel() == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(length))
    slots_kernel[(tokens, leaves, triton.cdiv(length, block))](
        values_LPH,
        rows_TS,
        values_LPH if factors_TS is None else factors_TS,
        out,
        num_rows,
        tokens,
        slots,
        length,
        HAS_FACTORS=factors_TS is not None,
        BLOCK=block,
        num_warps=4,
        **arithmetic.OPTIONS,
    )
    return out


@triton.jit
def product_kernel(x_ptr, factors_ptr, out_ptr, length, PER_ROW: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = h < length
    x = tl.load(x_ptr + (row * length + h), mask=is_live, other=0.0).to(tl.float32)
    if PER_ROW:
        factor = tl.load(factors_ptr + row).to(tl.float32)
    else:
        factor = tl.load(factors_ptr + (row * length + h), mask=is_live, other=0.0).to(tl.float32)
    tl.store(out_ptr + (row * length + h), arithmetic.cast(x * factor, out_ptr.dtype.element_ty), mask=is_live)


def multiply(x: Tensor, factors: Tensor, out_dtype: torch.dtype) -> Tensor:
    """cast(x * factors) [..., H]; factors like x, or one per row. bf16, fp16 or fp32 each. Batch-invariant."""
    where = "kernels.multiply"
    require_rows(where, x, factors)
    if factors.shape not in (x.shape, x.shape[:-1]):
        raise PlanError(f"{where}: expected factors {list(x.shape)} or {list(x.shape[:-1])}, got {list(factors.shape)}")
    out = torch.empty_like(x, dtype=out_dtype)
    if x.numel():
        length = x.shape[-1]
        block = min(BLOCK, triton.next_power_of_2(length))
        product_kernel[(x.numel() // length, triton.cdiv(length, block))](
            x,
            factors,
            out,
            length,
            PER_ROW=factors.shape != x.shape,
            BLOCK=block,
            num_warps=4,
            **arithmetic.OPTIONS,
        )
    return out
