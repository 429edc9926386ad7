"""Rows of an embedding and their gradient (ORDER.md A8, R7, S1).

    y[t] = cast(w[ids[t] - first_row]), -0.0 where that is no row
    dw[v] = tree over samples, over blocks of 512 tokens, of the chain of dy[t] over the tokens with ids[t] = v

Suffixes: T tokens, D elements, V rows. Chains run in the kernel of norm.py's parameter gradients; a block or sample
without a token is +0 and is skipped, so the tree over what is present goes level by level: two neighbours with one
parent become left + right. Bits: those of the CPU, layout-invariant (tests/test_kernels_operators.py). Not yet measured
on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.kernels import arithmetic, norm
from tbik.kernels.rows import device_integers
from tbik.reference import TOKENS_PER_BLOCK


@triton.jit
def look_up_kernel(ids_ptr, w_ptr, y_ptr, num_rows, vocabulary, first_row, length, stride_row, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    number = tl.load(ids_ptr + token)
    row = number - first_row
    is_here = (row >= 0) & (row < num_rows)
    x = tl.load(w_ptr + (row * stride_row + d), mask=(d < length) & is_here, other=0.0).to(tl.float32)
    x = arithmetic.negative_zero_where(is_here == 0, x)
    # the host does not see the ids: what the CPU refuses becomes NaN
    x = tl.where((number >= 0) & (number < vocabulary), x, float("nan"))
    tl.store(y_ptr + (token * length + d), arithmetic.cast(x, y_ptr.dtype.element_ty), mask=d < length)


def look_up(ids: Tensor, w_VD: Tensor, first_row: int, vocabulary: int, out_dtype: torch.dtype) -> Tensor:
    """[..., D] in out_dtype; ids int64 contiguous, w with elements side by side. An id outside the vocabulary: NaN."""
    length = w_VD.shape[1]
    y = torch.empty((*ids.shape, length), dtype=out_dtype, device=w_VD.device)
    if y.numel():
        block = min(1024, triton.next_power_of_2(length))
        look_up_kernel[(ids.numel(), triton.cdiv(length, block))](
            ids,
            w_VD,
            y,
            w_VD.shape[0],
            vocabulary,
            first_row,
            length,
            w_VD.stride(0),
            BLOCK=block,
            **arithmetic.OPTIONS,
        )
    return y


def row_gradients(
    dy_TD: Tensor, ids_T: Tensor, first_row: int, num_rows: int, offsets: Sequence[int], narrow: bool
) -> tuple[Tensor, Tensor]:
    """(rows that occur, ascending; their gradients fp32 [n, D]). Waits for the device (their number is data).

    dy contiguous; offsets: rows where samples begin. narrow: bf16 from the sample leaf upwards (A6).
    """
    rows = ids_T - first_row
    tokens = ((rows >= 0) & (rows < num_rows)).nonzero()[:, 0]
    rows, order = rows[tokens].sort(stable=True)
    tokens = tokens[order]
    starts = device_integers(tuple(offsets), dy_TD.device)
    sample = torch.searchsorted(starts, tokens, right=True) - 1  # the last that begins there: not an empty one
    block = (tokens - starts[sample]) // TOKENS_PER_BLOCK
    if not tokens.numel():
        return rows, dy_TD.new_zeros((0, dy_TD.shape[1]), dtype=torch.float32)
    keys = torch.stack([rows, sample, block], 1)
    keys, counts = torch.unique_consecutive(keys, return_counts=True, dim=0)
    cuts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    values = norm.chains_of_tokens(dy_TD, tokens, cuts)
    keys, values = _fold(keys, values, 2, False)
    if narrow:
        values = _narrow(values)
    keys, values = _fold(keys[:, :2], values, 1, narrow)
    return keys[:, 0], torch.where(values.isnan(), float("nan"), values)


def _fold(keys: Tensor, values: Tensor, column: int, narrow: bool) -> tuple[Tensor, Tensor]:
    """The canonical tree over the last key, absent leaves skipped, for each set of the other keys."""
    keys = keys.clone()
    while int(keys[:, column].max()) > 0:
        keys[:, column] >>= 1
        keys, counts = torch.unique_consecutive(keys, return_counts=True, dim=0)
        first = counts.cumsum(0) - counts
        pairs = (counts == 2).nonzero()[:, 0]
        sums = values[first[pairs]] + values[first[pairs] + 1]
        values = values[first]
        values[pairs] = _narrow(sums) if narrow else sums
    return keys, values


def _narrow(x: Tensor) -> Tensor:
    """RN_bf16(x) + (+0.0); NaN canonical."""
    return torch.where(x.isnan(), float("nan"), x.to(torch.bfloat16).float() + 0.0)
