"""The roundings that all kernels share, as jitted functions (ORDER.md A1, A2, A6, A7).

    fma_flushed:  one step of a leaf chain, fp32, subnormal inputs and results replaced by zero of their sign
    narrow:       RN_bf16(x) + (+0.0)                 cast: one rounding, NaN canonical

Triton's own conversion to bf16 gives another NaN and is wrong in the interpreter for some versions, hence integers.
No operation here or in any kernel may be fused: everything is launched with enable_fp_fusion=False (OPTIONS).
Bits: those of tbik.reference (tests/test_kernels_arithmetic.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

OPTIONS = {"enable_fp_fusion": False}


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """tl.float32 for torch.float32, and so on."""
    return getattr(tl, str(dtype).removeprefix("torch."))


_MIN_NORMAL = tl.constexpr(2.0**-126)
_SCALE = tl.constexpr(2.0**64)
_SCALED_LIMIT = tl.constexpr(2.0**-62)
_SIGN = tl.constexpr(-0x80000000)
_NAN_F32 = tl.constexpr(0x7FC00000)
_NAN_F64 = tl.constexpr(0x7FF8000000000000)


@triton.jit
def zero_of_sign(x):
    """+0 or -0, as x is signed."""
    return (x.to(tl.int32, bitcast=True) & _SIGN).to(tl.float32, bitcast=True)


@triton.jit
def flush(x):
    """x, or zero of its sign where x is subnormal (A2); NaN stays."""
    return tl.where(tl.abs(x) < _MIN_NORMAL, zero_of_sign(x), x)


@triton.jit
def fma_flushed(a, b, c):
    """fma(a, b, c) with the flush rule A2; a and b have passed `flush`, c is a result of this function or +0.

    The second fma tells results that were tiny before they were rounded up to 2^-126 from those that were not.
    """
    r = tl.fma(a, b, c)
    a_is_smaller = tl.abs(a) < tl.abs(b)
    small = tl.where(a_is_smaller, a, b) * _SCALE
    large = tl.where(a_is_smaller, b, a)
    scaled = tl.fma(small, large, c * _SCALE)
    magnitude = tl.abs(r)
    is_tiny = (magnitude < _MIN_NORMAL) | ((magnitude == _MIN_NORMAL) & (tl.abs(scaled) < _SCALED_LIMIT))
    return tl.where(is_tiny, zero_of_sign(r), r)


@triton.jit
def bfloat16_bits(x):
    """RN_bf16(x) as the low half of an int32; NaN canonical."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FC0, rounded)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """cast(x, dtype), in fp32. Not by way of a bf16 number, whose subnormals the interpreter reads wrongly."""
    return (bfloat16_bits(x) << 16).to(tl.float32, bitcast=True) if dtype == tl.bfloat16 else x.to(dtype).to(tl.float32)


@triton.jit
def negative_zero_where(condition, x):
    """-0.0 where the condition holds, else x: a literal -0.0 would become +0 when compiled."""
    return tl.where(condition, _SIGN, x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def narrow(x):
    """RN_bf16(x) + (+0.0) in fp32 (A6)."""
    return (bfloat16_bits(x) << 16).to(tl.float32, bitcast=True) + 0.0


@triton.jit
def cast(x, dtype: tl.constexpr):
    """One rounding of fp32 to fp32, bf16 or fp16, or of fp64 to fp64 or fp32; NaN canonical (A7)."""
    if dtype == tl.bfloat16:
        y = bfloat16_bits(x).to(tl.int16).to(dtype, bitcast=True)
    elif dtype == tl.float16:
        bits = x.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        y = tl.where(x != x, 0x7E00, bits).to(tl.int16).to(dtype, bitcast=True)
    elif dtype == tl.float32:
        y = tl.where(x != x, _NAN_F32, x.to(dtype).to(tl.int32, bitcast=True)).to(dtype, bitcast=True)
    else:
        y = tl.where(x != x, _NAN_F64, x.to(dtype).to(tl.int64, bitcast=True)).to(dtype, bitcast=True)
    return y
