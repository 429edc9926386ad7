"""A Triton kernel that applies one function of tbik.kernels to every element, for tests. Imported after conftest.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from interpreter import DEVICE

from tbik.kernels import arithmetic


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
