"""exp, log, sigmoid, tanh, silu, gelu and the fold of a row's lanes, as jitted functions (ORDER.md A9, section C).

    exp, log, sigmoid, tanh: fp32 -> fp32, the polynomials of csrc/elementary.h in its order of operations
    fold_lanes: the canonical tree over a power of two of lanes

fp32, every operation rounded once, none fused, gradual underflow. NaN in gives a NaN out, which `arithmetic.cast` makes
canonical. Bits: those of the oracle (tests/test_kernels_arithmetic.py, tests/test_kernels_rows.py).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tbik import reference

LANES = tl.constexpr(reference.LANES)
ROW_BLOCK = tl.constexpr(reference.ROW_BLOCK)

_LOG2_E = tl.constexpr(reference.LOG2_E)
_LN2_HIGH = tl.constexpr(reference.LN2_HIGH)
_LN2_LOW = tl.constexpr(reference.LN2_LOW)
_EXP_HIGHEST = tl.constexpr(reference.EXP_HIGHEST)
_EXP_LOWEST = tl.constexpr(reference.EXP_LOWEST)
# one name per coefficient: a jitted function takes no tuple from outside in every version
_EXP0, _EXP1, _EXP2, _EXP3, _EXP4, _EXP5 = map(tl.constexpr, reference.EXP)
_LOG0, _LOG1, _LOG2, _LOG3, _LOG4, _LOG5, _LOG6, _LOG7, _LOG8 = map(tl.constexpr, reference.LOG)
_LOG_SQRT_HALF_BITS = tl.constexpr(reference.LOG_SQRT_HALF_BITS)
_MIN_NORMAL = tl.constexpr(2.0**-126)
_TANH0, _TANH1, _TANH2, _TANH3, _TANH4 = map(tl.constexpr, reference.TANH)
_TANH_SMALL = tl.constexpr(reference.TANH_SMALL)
_GELU_TWICE = tl.constexpr(reference.GELU_TWICE)
_GELU_CUBIC = tl.constexpr(reference.GELU_CUBIC)
_GELU_SLOPE = tl.constexpr(reference.GELU_SLOPE)
_GELU_CAP = tl.constexpr(reference.GELU_CAP)
_SIN0, _SIN1, _SIN2, _SIN3 = map(tl.constexpr, reference.SIN)
_COS0, _COS1, _COS2 = map(tl.constexpr, reference.COS)
_TWO_OVER_PI = tl.constexpr(reference.TWO_OVER_PI)
_PI_2_HIGH = tl.constexpr(reference.PI_2_HIGH)
_PI_2_LOW = tl.constexpr(reference.PI_2_LOW)
_INF = tl.constexpr(float("inf"))
_SIGN = tl.constexpr(-0x80000000)


@triton.jit
def fold_lanes(lanes, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, WIDTH = 2^LEVELS] -> [ROWS]: neighbours, then neighbours of those, left + right (A9).

    Lanes of a block lie beside each other and blocks after each other, so this is the canonical tree over 16 lanes and
    then over blocks; blocks past the end are +0, which changes no node.
    """
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(lanes, (ROWS, WIDTH >> (level + 1), 2)))
        lanes = left + right
    return tl.reshape(lanes, (ROWS,))


@triton.jit
def _floor(x):
    """floor of |x| < 2^31. Through integers: the device's own instruction is compiled with a flush."""
    n = x.to(tl.int32).to(tl.float32)
    return tl.where(n > x, n - 1.0, n)


@triton.jit
def _power_of_two(n):
    """2^n for a whole n in -126..127."""
    return ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    """C1. A comparison with NaN is false, so NaN becomes a bound, and NaN again at the end."""
    t = tl.where(x < _EXP_HIGHEST, x, _EXP_HIGHEST)
    t = tl.where(t > _EXP_LOWEST, t, _EXP_LOWEST)
    n = _floor(t * _LOG2_E + 0.5)
    high = t - n * _LN2_HIGH
    low = n * _LN2_LOW
    r = high - low
    c = (high - r) - low
    h = 1.0 + r
    d = r - (h - 1.0)
    p = r * _EXP5 + _EXP4
    p = p * r + _EXP3
    p = p * r + _EXP2
    p = p * r + _EXP1
    p = p * r + _EXP0
    y = h + (d + (c + (r * r) * p))
    half = _floor(n * 0.5)
    y = (y * _power_of_two(half)) * _power_of_two(n - half)
    return tl.where(x == x, y, float("nan"))


@triton.jit
def log(x):
    """C2."""
    is_tiny = x < _MIN_NORMAL  # also zeros and negative numbers, replaced at the end
    b = tl.where(is_tiny, x * 8388608.0, x).to(tl.int32, bitcast=True) - _LOG_SQRT_HALF_BITS
    e = (tl.where(is_tiny, -23, 0) + (b >> 23)).to(tl.float32)
    f = ((b & 0x7FFFFF) + _LOG_SQRT_HALF_BITS).to(tl.float32, bitcast=True) - 1.0
    z = f * f
    p = f * _LOG8 + _LOG7
    p = p * f + _LOG6
    p = p * f + _LOG5
    p = p * f + _LOG4
    p = p * f + _LOG3
    p = p * f + _LOG2
    p = p * f + _LOG1
    p = p * f + _LOG0
    t = (f * z) * p
    t = (t + e * _LN2_LOW) - 0.5 * z
    y = (t + f) + e * _LN2_HIGH
    y = tl.where(x == _INF, _INF, y)
    y = tl.where(x == 0.0, -_INF, y)
    return tl.where(x >= 0.0, y, float("nan"))


@triton.jit
def sigmoid(x):
    """C3."""
    e = exp(-tl.abs(x))
    d = 1.0 + e
    c = e - (d - 1.0)
    q = tl.div_rn(tl.where(x < 0.0, e, 1.0), d)
    return q - q * c


@triton.jit
def tanh(x):
    """C4."""
    a = tl.abs(x)
    z = a * a
    p = z * _TANH4 + _TANH3
    p = p * z + _TANH2
    p = p * z + _TANH1
    p = p * z + _TANH0
    small = a + a * (z * p)
    e = exp(a + a)
    large = 1.0 - tl.div_rn(tl.full(e.shape, 2.0, tl.float32), e + 1.0)
    y = tl.where(a < _TANH_SMALL, small, large)
    sign = x.to(tl.int32, bitcast=True) & _SIGN
    return tl.where(x == x, (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr):
    """(a, slope) of silu (R5) or of the tanh form of gelu (C7)."""
    if KIND == "silu":
        s = sigmoid(x)
        a = x * s
        slope = s + a * (1.0 - s)
    else:
        square = x * x
        z = tl.where(square > _GELU_CAP, _GELU_CAP, square)
        s = sigmoid((x + (x * z) * _GELU_CUBIC) * _GELU_TWICE)
        a = x * s
        slope = s + (a * (1.0 - s)) * (z * _GELU_SLOPE + _GELU_TWICE)
    return a, slope


@triton.jit
def sin_cos(angle):
    """C5, of an angle of at most 2^20 in magnitude."""
    a = angle.to(tl.float64)
    n = tl.floor(a * _TWO_OVER_PI + 0.5)
    r = ((a - n * _PI_2_HIGH) - n * _PI_2_LOW).to(tl.float32)
    z = r * r
    p = z * _SIN3 + _SIN2
    p = p * z + _SIN1
    p = p * z + _SIN0
    s = r + r * (z * p)
    q = z * _COS2 + _COS1
    q = q * z + _COS0
    c = 1.0 + ((z * z) * q - 0.5 * z)
    quadrant = n.to(tl.int32) & 3
    is_odd = (quadrant & 1) == 1
    sine = tl.where(is_odd, c, s).to(tl.int32, bitcast=True)
    cosine = tl.where(is_odd, s, c).to(tl.int32, bitcast=True)
    sine = sine ^ tl.where(quadrant >= 2, _SIGN, 0)
    cosine = cosine ^ tl.where((quadrant == 1) | (quadrant == 2), _SIGN, 0)
    return sine.to(tl.float32, bitcast=True), cosine.to(tl.float32, bitcast=True)


@triton.jit
def order_key(x):
    """int32 that ascends with x: NaN above everything, +0 above -0 (A8)."""
    b = x.to(tl.int32, bitcast=True)
    key = b ^ ((b >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, key, 0x7FFFFFFF)


@triton.jit
def of_order_key(key):
    """The number whose order_key this is; NaN canonical."""
    b = key ^ ((key >> 31) & 0x7FFFFFFF)
    return tl.where(key == 0x7FFFFFFF, 0x7FC00000, b).to(tl.float32, bitcast=True)
