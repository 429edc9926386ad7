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
    by_key_ptr,
    by_query_ptr,
    counts_ptr,
    queries,
    keys,
    first_query,
    first_key,
    window,
    CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Which of SIZE x SIZE pairs [query, key] are live, as the forward kernel asks (keys of a row) and as dkv does."""
    column = tl.arange(0, SIZE)
    first_query = tl.cast(first_query, tl.int64)
    first_key = tl.cast(first_key, tl.int64)
    queries = tl.cast(queries, tl.int64)
    keys = tl.cast(keys, tl.int64)
    query = first_query + column
    key = first_key + column
    ahead = keys - queries
    at = column[:, None] * SIZE + column[None, :]
    is_query = (query >= 0) & (query < queries)
    lo, hi = attention._live_columns(
        first_key, ahead + first_query, column, is_query, keys, window, CAUSAL, HAS_WINDOW, SIZE
    )
    tl.store(counts_ptr + column, tl.maximum(hi - lo, 0))
    tl.store(by_key_ptr + at, ((column[None, :] >= lo[:, None]) & (column[None, :] < hi[:, None])).to(tl.int8))
    is_key = (key >= 0) & (key < keys)
    lo, hi = attention._live_query_columns(
        first_query, first_key, column, is_key, queries * 0, queries, ahead, window, CAUSAL, HAS_WINDOW, SIZE
    )
    tl.store(counts_ptr + SIZE + column, tl.maximum(hi - lo, 0))
    tl.store(by_query_ptr + at, ((column[:, None] >= lo[None, :]) & (column[:, None] < hi[None, :])).to(tl.int8))


def live_pairs(
    queries: int, keys: int, first_query: int, first_key: int, window: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 16, 16], by both ways, and how many live pairs each says there are in a row and in a column [2, 16]."""
    out = torch.zeros(2, 16, 16, dtype=torch.int8, device=DEVICE)
    counts = torch.zeros(2, 16, dtype=torch.int32, device=DEVICE)
    live_pairs_kernel[(1,)](
        *(out[0], out[1], counts, queries, keys, first_query, first_key, window),
        CAUSAL=causal,
        HAS_WINDOW=window != 0,
        SIZE=16,
        **arithmetic.OPTIONS,
    )
    return out.cpu() > 0, counts.cpu()
