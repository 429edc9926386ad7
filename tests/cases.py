"""Test data on which the order of a sum shows in its bits, and the shapes to try it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st

# Bits behind the leading one, and the smallest and largest exponent of a normal number.
_FORMAT = {
    torch.float16: (10, -14, 15),
    torch.bfloat16: (7, -126, 127),
    torch.float32: (23, -126, 127),
    torch.float64: (52, -1022, 1023),
}


class Problem(NamedTuple):
    """x [M, K] times w [N, K]^T, cut into L leaves."""

    m: int
    n: int
    k: int
    leaves: int
    dtype: torch.dtype = torch.float32


# Empty leaves, one leaf, a prime K, K that L does not divide, tails of every block size, SmolLM2's shapes.
SHAPES = (
    Problem(1, 1, 1, 1),
    Problem(1, 1, 0, 4),
    Problem(2, 3, 5, 8),
    Problem(3, 5, 17, 4),
    Problem(1, 17, 64, 8),
    Problem(7, 9, 127, 6),
    Problem(5, 33, 192, 12),
    Problem(4, 8, 576, 9),
    Problem(17, 3, 513, 7),
    Problem(1, 2, 1536, 12),
)


def wide_exponents(shape: Sequence[int], dtype: torch.dtype, seed: int, spread: int = 60) -> torch.Tensor:
    """x = +-(1 + mantissa) * 2^e, e uniform over `spread` powers of two around 1; a quarter of each row cancels.

    Cancelling pairs are x and -x*(1 + a few ulp), shuffled along the last axis, so that a sum in another order rounds
    differently and a small remainder decides. The spread is narrowed where the dtype has fewer exponents (float16).
    """
    bits, lowest, highest = _FORMAT[dtype]
    first = max(-(spread // 2), lowest)
    last = min(first + spread - 1, highest)
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(shape)
    exponent = torch.randint(first, last + 1, shape, generator=generator)
    # Leaves room for "a few ulp" above, so that the partner stays in the same binade.
    mantissa = torch.randint(0, 2**bits - 8, shape, generator=generator)
    negative = torch.randint(0, 2, shape, generator=generator)
    length = shape[-1] if shape else 1
    pairs = length // 8
    if pairs:
        exponent[..., pairs : 2 * pairs] = exponent[..., :pairs]
        ulps = torch.randint(0, 8, mantissa[..., :pairs].shape, generator=generator)
        mantissa[..., pairs : 2 * pairs] = mantissa[..., :pairs] + ulps
        negative[..., pairs : 2 * pairs] = 1 - negative[..., :pairs]
    # Built from bits: every value is exact in the dtype, and no library function takes part.
    pattern = (negative << 63) | ((exponent + 1023) << 52) | (mantissa << (52 - bits))
    values = pattern.view(torch.float64).to(dtype)
    return values[..., torch.randperm(length, generator=generator)] if shape else values


def problems(
    max_m: int = 5,
    max_n: int = 5,
    max_k: int = 80,
    max_leaves: int = 16,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16, torch.float64),
) -> st.SearchStrategy[Problem]:
    """Any M, N >= 1, K >= 0 (so also K < L), L >= 1, dtype."""
    return st.builds(
        Problem,
        st.integers(1, max_m),
        st.integers(1, max_n),
        st.integers(0, max_k),
        st.integers(1, max_leaves),
        st.sampled_from(tuple(dtypes)),
    )


def leaf_partitions(max_leaves: int = 40, max_parts: int = 8) -> st.SearchStrategy[tuple[int, tuple[int, ...]]]:
    """(L, owner of each leaf): any assignment of leaves to ranks, contiguous or not."""
    return st.integers(1, max_leaves).flatmap(
        lambda leaves: st.tuples(
            st.just(leaves),
            st.tuples(*[st.integers(0, max_parts - 1)] * leaves),
        )
    )


def logits(shape: Sequence[int], dtype: torch.dtype, seed: int, special: bool = False, shift: int = 60) -> torch.Tensor:
    """Rows of which thousands of entries share the probability, so that the order of their sum shows in its bits.

    Normal with deviation 3, shifted by up to `shift` per row; special: a quarter of the rows are -inf in places, or
    hold a NaN, a +inf, or nothing but -inf, or equal entries.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator) * 3
    x += torch.randint(-shift, shift + 1, (*shape[:-1], 1), generator=generator)
    if special and x.numel():
        for row in x.view(-1, shape[-1]):
            kind = int(torch.randint(0, 24, (), generator=generator))
            at = torch.randint(0, shape[-1], (max(1, shape[-1] // 3),), generator=generator)
            if kind == 0:
                row[at] = float("-inf")
            elif kind in (1, 2):
                row[at[0]] = float("nan") if kind == 1 else float("inf")
            elif kind == 3:
                row[:] = float("-inf")
            elif kind in (4, 5):
                row[at] = row.max() if kind == 4 else 0.0
                row[at[0]] = -0.0 if kind == 5 else row[at[0]]
    return x.to(dtype)
