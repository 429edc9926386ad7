"""Triton kernels that apply functions of tbik.kernels, for tests. Imported after conftest.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from interpreter import DEVICE

from tbik.kernels import arithmetic, attention


@triton.jit
def elementwise_kernel(a_ptr, b_ptr, c_ptr, out_ptr, size, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = at < size
    a = tl.load(a_ptr + at, mask=is_live, other=0.0)
    if FUNCTION == "fma":
        b = tl.load(b_ptr + at, mask=is_live, other=0.0)
        c = tl.load(c_ptr + at, mask=is_live, other=0.0)
        y = arithmetic.fma_flushed(arithmetic.flush(a), arithmetic.flush(b), arithmetic.flush(c))
    elif FUNCTION == "cast":
        y = arithmetic.cast(a, out_ptr.dtype.element_ty)
    else:
        y = arithmetic.narrow(a)
    tl.store(out_ptr + at, y, mask=is_live)


def elementwise(function: str, *operands: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    a, b, c = (operands[min(i, len(operands) - 1)].to(DEVICE) for i in range(3))
    out = torch.empty_like(a, dtype=dtype)
    elementwise_kernel[(triton.cdiv(a.numel(), 1024),)](
        a, b, c, out, a.numel(), FUNCTION=function, BLOCK=1024, **arithmetic.OPTIONS
    )
    return out.cpu()


@triton.jit
def live_pairs_kernel(
    by_key_ptr, by_query_ptr, queries, keys, first_query, first_key, window, CAUSAL: tl.constexpr, SIZE: tl.constexpr
):
    """Which of SIZE x SIZE pairs [query, key] are live, as the forward kernel asks (keys of a row) and as dkv does."""
    column = tl.arange(0, SIZE)
    query = tl.cast(first_query, tl.int64) + column.to(tl.int64)
    key = tl.cast(first_key, tl.int64) + column.to(tl.int64)
    ahead = tl.cast(keys, tl.int64) - queries
    at = column[:, None] * SIZE + column[None, :]

    lo, hi = attention._live_keys(ahead + query, tl.cast(keys, tl.int64), window, CAUSAL)
    hi = tl.where((query >= 0) & (query < queries), hi, 0)
    lo = attention._column_of(lo, tl.cast(first_key, tl.int64), SIZE)
    hi = attention._column_of(hi, tl.cast(first_key, tl.int64), SIZE)
    tl.store(by_key_ptr + at, ((column[None, :] >= lo[:, None]) & (column[None, :] < hi[:, None])).to(tl.int8))

    lo, hi = attention._live_queries(key, ahead, tl.cast(0, tl.int64), window, CAUSAL)
    hi = tl.where((key >= 0) & (key < keys), tl.minimum(hi, queries), 0)
    lo = attention._column_of(lo, tl.cast(first_query, tl.int64), SIZE)
    hi = attention._column_of(hi, tl.cast(first_query, tl.int64), SIZE)
    tl.store(by_query_ptr + at, ((column[:, None] >= lo[None, :]) & (column[:, None] < hi[None, :])).to(tl.int8))


def live_pairs(queries: int, keys: int, first_query: int, first_key: int, window: int, causal: bool) -> torch.Tensor:
    """[2, 16, 16]: by both ways."""
    out = torch.zeros(2, 16, 16, dtype=torch.int8, device=DEVICE)
    live_pairs_kernel[(1,)](
        *(out[0], out[1], queries, keys, first_query, first_key, window), CAUSAL=causal, SIZE=16, **arithmetic.OPTIONS
    )
    return out.cpu() > 0
