"""The oracle: ORDER.md in plain torch, one addition after the other. Slow and obvious; it never calls a kernel of ours.

    chain:    acc = +0; for k ascending: acc = fma(a_k, b_k, acc); leaf = acc + (+0.0)
    tree:     node(lo, hi) = node(lo, mid) + node(mid, hi)
    epilogue: out = cast(root / avg + bias)

Every value comes from element-wise + - * /, comparisons and bit patterns, which IEEE 754 fixes element by element: no
result depends on vector width, position in a tensor or threads. No torch.sum, matmul, exp, log or softmax.

Suffixes: M rows, N output features, K contraction, T tokens. Specification: ORDER.md; the numbers are its paragraphs.
Bits: layout-invariant by construction, it is the definition (tests/test_reference.py).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from tbik import tree
from tbik.errors import PlanError
from tbik.plan import TreePlan
from tbik.tree import Node

TOKENS_PER_BLOCK = 512
AMX_BLOCK = 32
ROW_BLOCK = 512
LANES = 16

_MIN_NORMAL = 2.0**-126
# What rounds to 24 bits below 2^-126: the midpoint 2^-126 - 2^-151 is a tie, and its even neighbour is 2^-126.
_FLUSHED_BELOW = 2.0**-126 - 2.0**-151

_hex = float.fromhex


def _hexes(text: str) -> tuple[float, ...]:
    return tuple(float.fromhex(word) for word in text.split())


# Section C of ORDER.md; tests/test_reference.py compares the two texts. Horner coefficients ascend: c_0 first.
LOG2_E = _hex("0x1.715476p+0")
LN2_HIGH = _hex("0x1.62e4p-1")
LN2_LOW = _hex("0x1.7f7d1cp-20")
EXP_HIGHEST = _hex("0x1.64p+6")
EXP_LOWEST = _hex("-0x1.a4p+6")
EXP = _hexes("0x1p-1 0x1.555554p-3 0x1.5554e8p-5 0x1.11131p-7 0x1.6d4ccep-10 0x1.9df7a8p-13")
LOG_SQRT_HALF_BITS = 0x3F3504F3
LOG = _hexes(
    "0x1.555548p-2 -0x1.000006p-2 0x1.99a478p-3 -0x1.555c4ep-3 0x1.233b78p-3 -0x1.fc26acp-4 0x1.e6c03ep-4 "
    "-0x1.de1004p-4 0x1.1484e8p-4"
)
TANH_SMALL = _hex("0x1.4p-1")
TANH = _hexes("-0x1.555532p-2 0x1.1106fcp-3 -0x1.b836f4p-5 0x1.5203f4p-6 -0x1.7547e2p-8")
TWO_OVER_PI = _hex("0x1.45f306dc9c883p-1")
PI_2_HIGH = _hex("0x1.921fb544p+0")
PI_2_LOW = _hex("0x1.0b4611a626331p-34")
MAX_ANGLE = _hex("0x1p+20")
SIN = _hexes("-0x1.555556p-3 0x1.111174p-7 -0x1.a05976p-13 0x1.7c3d9p-19")
COS = _hexes("0x1.55554ap-5 -0x1.6c0c2ap-10 0x1.99e90ap-16")
GELU_TWICE = _hex("0x1.988454p+0")
GELU_CUBIC = _hex("0x1.6e4e26p-5")
GELU_SLOPE = _hex("0x1.b6676cp-3")
GELU_CAP = _hex("0x1p+14")


@contextlib.contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Gradual underflow, one thread, no autograd inside; the caller's modes are restored afterwards.

    Flushing is a mode of each thread and torch can only change the caller's, hence one thread. torch tells nobody which
    mode is on, hence the multiplication.
    """
    threads = torch.get_num_threads()
    if threads != 1:
        torch.set_num_threads(1)
    flushes = (torch.full((), _MIN_NORMAL) * 0.5).view(torch.int32).item() == 0
    if flushes:
        torch.set_flush_denormal(False)
    try:
        with torch.no_grad():
            yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)
        if threads != 1:
            torch.set_num_threads(threads)


# --- one rounding: fused multiply-add -------------------------------------------------------------------------------


@plain_arithmetic()
def fma32(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """r = RN24(a*b + c), subnormal inputs and results (tiny after rounding) replaced by zero of their sign.

    a, b, c: float32, broadcastable. That is A1 with the flush rule A2, which equals x86 FTZ+DAZ. Layout-invariant.
    """
    _require_dtype("fma32", torch.float32, a, b, c)
    a, b, c = (_flush_subnormal(t).double() for t in (a, b, c))
    return _round_sum_to_float32(a * b, c)  # 24 + 24 bits and exponents of 10 bits: the product is exact


@plain_arithmetic()
def fma64(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """r = RN53(a*b + c) with gradual underflow, no flush (A2: an fp64 chain does not flush).

    a, b, c: float64, broadcastable. Method: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd" (2008), where the error of a*b is itself a double; else rational numbers.
    Layout-invariant.
    """
    _require_dtype("fma64", torch.float64, a, b, c)
    shape = (a + b + c).shape
    a, b, c = (t.expand(shape) for t in (a, b, c))
    # A finite product is finite, however large, and meets an infinite c as such.
    product = torch.where(torch.isfinite(a) & torch.isfinite(b) & ~torch.isfinite(c), 0.0, a * b)
    # With a zero, an infinity or a NaN there is nothing to round in the product, and one addition rounds the sum.
    trivial = (a == 0) | (b == 0) | ~torch.isfinite(a) | ~torch.isfinite(b) | ~torch.isfinite(c)
    # The product's last bit must be a normal number, and nothing may overflow on the way.
    safe = (product.abs() > 2.0**-900) & (product.abs() < 2.0**1000)
    safe &= (a.abs() < 2.0**990) & (b.abs() < 2.0**990) & (c.abs() < 2.0**1000)
    result = torch.where(trivial, product + c, _boldo_melquiond(a, b, c))
    hard = ~(trivial | safe)
    if hard.any():
        exact = [_fma_by_fractions(*abc) for abc in zip(a[hard].tolist(), b[hard].tolist(), c[hard].tolist())]
        result[hard] = torch.tensor(exact, dtype=torch.float64)
    return result


def _flush_subnormal(x: Tensor) -> Tensor:
    return torch.where(x.abs() < _MIN_NORMAL, x * 0.0, x)


def _two_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """s + e = x + y exactly, s = RN(x + y) (Knuth)."""
    s = x + y
    t = s - x
    return s, (x - (s - t)) + (y - t)


def _two_product(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """p + e = x * y exactly, p = RN(x * y) (Dekker, with Veltkamp's split into 26 + 27 bits)."""

    def split(v: Tensor) -> tuple[Tensor, Tensor]:
        t = v * 134217729.0  # 2^27 + 1
        high = t - (t - v)
        return high, v - high

    p = x * y
    (x1, x2), (y1, y2) = split(x), split(y)
    return p, x2 * y2 - (((p - x1 * y1) - x2 * y1) - x1 * y2)


def _sum_to_odd(x: Tensor, y: Tensor) -> Tensor:
    """x + y in float64, rounded to odd: an inexact sum becomes the one of its two neighbours whose last bit is 1.

    A later rounding to at most 51 bits then gives what one rounding of the exact sum gives.
    """
    s, error = _two_sum(x, y)
    bits = s.view(torch.int64)
    step_away = (error > 0) == (s > 0)
    to_odd = torch.isfinite(s) & (error != 0) & (bits & 1 == 0)
    return torch.where(to_odd, torch.where(step_away, bits + 1, bits - 1), bits).view(torch.float64)


def _round_sum_to_float32(x: Tensor, y: Tensor) -> Tensor:
    exact = _sum_to_odd(x, y)
    return torch.where(exact.abs() < _FLUSHED_BELOW, exact * 0.0, exact).to(torch.float32)


def _boldo_melquiond(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    product, product_error = _two_product(a, b)
    t, t_error = _two_sum(c, product_error)
    v, v_error = _two_sum(product, t)
    return v + _sum_to_odd(t_error, v_error)


def _fma_by_fractions(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return 0.0  # a*b and c are nonzero here, so they cancel: +0
    try:
        return float(exact)  # Python rounds int / int once, to nearest even, subnormal or not
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")


# --- leaf, node, wire, epilogue -------------------------------------------------------------------------------------


@plain_arithmetic()
def chain(a_MK: Tensor, b_NK: Tensor, leaf: str = "fma") -> Tensor:
    """leaf[m, n]: acc = +0; for k ascending: acc = fma(a[m, k], b[n, k], acc); leaf = acc + (+0.0)   (A1, A2).

    leaf "amx", bf16 operands: acc = acc + (chain over even k + chain over odd k) for blocks of 32 elements (A14).
    a [M, K], b [N, K] bf16, fp16 or fp32 -> fp32 [M, N]; fp64 -> fp64. Layout-invariant.
    """
    if leaf == "amx" and a_MK.dtype == b_NK.dtype == torch.bfloat16:
        return _amx_chain(a_MK, b_NK)
    acc_dtype = _acc_dtype("chain", a_MK, b_NK)
    if a_MK.dim() != 2 or b_NK.dim() != 2 or a_MK.shape[1] != b_NK.shape[1]:
        raise PlanError(f"reference.chain: expected [M, K] and [N, K], got {_shape(a_MK)} and {_shape(b_NK)}")
    a_MK, b_NK = a_MK.to(acc_dtype), b_NK.to(acc_dtype)
    return _accumulate(a_MK, b_NK) + 0.0  # -0 becomes +0


def _amx_chain(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    acc_MN = torch.zeros(a_MK.shape[0], b_NK.shape[0])
    for first in range(0, a_MK.shape[1], AMX_BLOCK):
        a, b = (t[:, first : first + AMX_BLOCK] for t in (a_MK, b_NK))
        even, odd = (_accumulate(a[:, half::2].float(), b[:, half::2].float()) for half in (0, 1))
        acc_MN = _flush_subnormal(acc_MN + _flush_subnormal(even + odd))
    return acc_MN + 0.0


def _accumulate(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """acc = +0; for k ascending: acc = fma(a[m, k], b[n, k], acc), in the dtype of a and b."""
    acc_MN = torch.zeros(a_MK.shape[0], b_NK.shape[0], dtype=a_MK.dtype)
    fma = fma64 if a_MK.dtype == torch.float64 else fma32
    for k in range(a_MK.shape[1]):
        acc_MN = fma(a_MK[:, k, None], b_NK[None, :, k], acc_MN)
    return acc_MN


@plain_arithmetic()
def add(left: Tensor, right: Tensor) -> Tensor:
    """node = left + right, round to nearest even, gradual underflow (A4). Same dtype and shape in and out."""
    if left.dtype != right.dtype or left.shape != right.shape:
        raise PlanError(
            f"reference.add: expected values alike, got {left.dtype} {_shape(left)} and {right.dtype} {_shape(right)}"
        )
    return left + right


@plain_arithmetic()
def round_wire(x: Tensor) -> Tensor:
    """x' = RN_bf16(x) + (+0.0): what wire_dtype="bfloat16" makes of a leaf, node or root (A6). fp32 in, fp32 out."""
    _require_dtype("round_wire", torch.float32, x)
    return _round_to_bfloat16(x).float() + 0.0


@plain_arithmetic()
def epilogue(root: Tensor, bias: Tensor | None = None, avg: int = 1, out_dtype: torch.dtype | None = None) -> Tensor:
    """out = cast(root / avg + bias), NaN as the canonical quiet NaN (A7).

    root: fp32, or fp64 for out_dtype fp64 or fp32. bias: broadcastable, converted to root's dtype. out_dtype: root's
    by default. Layout-invariant.
    """
    if root.dtype not in (torch.float32, torch.float64):
        raise PlanError(
            f"reference.epilogue: a root is float32 or float64, got {root.dtype} (integers have no average)"
        )
    if avg < 1:
        raise PlanError(f"reference.epilogue: avg divides by a number of ranks >= 1, got {avg}")
    if avg != 1:
        root = root / torch.full_like(root, avg)
    if bias is not None:
        root = root + bias.to(root.dtype)
    return _cast(root, out_dtype or root.dtype)


def _round_to_bfloat16(x: Tensor) -> Tensor:
    """RN_bf16 by integers: vcvtneps2bf16, which torch may use, would flush subnormals."""
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return torch.where(torch.isnan(x), 0x7FC0, rounded).to(torch.int16).view(torch.bfloat16)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding to `dtype`, canonical NaN."""
    if dtype == torch.bfloat16 and x.dtype == torch.float32:
        return _round_to_bfloat16(x)
    if dtype not in (x.dtype, torch.float32) and (x.dtype, dtype) != (torch.float32, torch.float16):
        raise PlanError(f"reference: cannot round {x.dtype} to {dtype} once; fp64 leaves as fp64 or fp32")
    y = x.to(dtype)
    return torch.where(torch.isnan(y), torch.full_like(y, float("nan")), y)


# --- contractions of a linear layer ---------------------------------------------------------------------------------


@overload
def linear(
    x: Tensor,
    w: Tensor,
    plan: TreePlan,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    leaf_range: None = None,
    round_wire: bool = False,
) -> Tensor: ...
@overload
def linear(
    x: Tensor,
    w: Tensor,
    plan: TreePlan,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    leaf_range: tuple[int, int],
    round_wire: bool = False,
) -> dict[Node, Tensor]: ...
@plain_arithmetic()
def linear(
    x: Tensor,
    w: Tensor,
    plan: TreePlan,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    leaf_range: tuple[int, int] | None = None,
    round_wire: bool = False,
) -> Tensor | dict[Node, Tensor]:
    """y = cast(root over K of x[..., k] * w[n, k] + bias), or the cover of the leaves [lo, hi) (L1).

    x [..., K] and w [N, K], both whole, also with leaf_range -> [..., N]. out_dtype: acc_dtype by default.
    leaf_range: return {node: value} in acc_dtype for these leaves, before any epilogue. round_wire: this tree may cross
    ranks in some layout, so plan.wire_dtype applies (A6). Layout-invariant.
    """
    acc_dtype = _acc_dtype("linear", x, w)
    _require_plan("linear", plan, acc_dtype)
    if x.dim() < 1 or w.dim() != 2 or x.shape[-1] != w.shape[1]:
        raise PlanError(f"reference.linear: expected x [..., K] and w [N, K], got {_shape(x)} and {_shape(w)}")
    x_MK = _rows(x)
    cuts = plan.cuts(w.shape[1])
    lo, hi = _leaf_range("linear", leaf_range, plan.leaves, bias)
    leaf_values = [
        chain(x_MK[:, cuts[i] : cuts[i + 1]], w[:, cuts[i] : cuts[i + 1]], plan.leaf).reshape(*x.shape[:-1], w.shape[0])
        for i in range(lo, hi)
    ]
    rounds = round_wire and plan.wire_dtype is not None
    if leaf_range is not None:
        return _cover(leaf_values, lo, rounds)
    return epilogue(_root(leaf_values, rounds), bias, out_dtype=out_dtype)


@overload
def linear_dx(
    grad_outputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    plan: TreePlan,
    out_dtype: torch.dtype | None = None,
    leaf_range: None = None,
    round_wire: bool = False,
) -> Tensor: ...
@overload
def linear_dx(
    grad_outputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    plan: TreePlan,
    out_dtype: torch.dtype | None = None,
    *,
    leaf_range: tuple[int, int],
    round_wire: bool = False,
) -> dict[Node, Tensor]: ...
@plain_arithmetic()
def linear_dx(
    grad_outputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    plan: TreePlan,
    out_dtype: torch.dtype | None = None,
    leaf_range: tuple[int, int] | None = None,
    round_wire: bool = False,
) -> Tensor | dict[Node, Tensor]:
    """dx = cast(root over leaves of the chain over members g, then n in member g's leaf, of dy_g[..., n] * w_g[n, k]).

    grad_outputs [..., N_g] and weights [N_g, K], one of each per member of the group (L2), in the group's order
    -> [..., K]. Leaf i is one accumulator that all members continue. The rest as in `linear`. Layout-invariant.
    """
    if len(grad_outputs) != len(weights) or not weights:
        raise PlanError(
            f"reference.linear_dx: expected one grad_output per weight, got {len(grad_outputs)} and {len(weights)}"
        )
    acc_dtype = _acc_dtype("linear_dx", *grad_outputs, *weights)
    _require_plan("linear_dx", plan, acc_dtype)
    lead = grad_outputs[0].shape[:-1]
    for dy, w in zip(grad_outputs, weights):
        if dy.shape != (*lead, w.shape[0]) or w.shape[1] != weights[0].shape[1]:
            raise PlanError(f"reference.linear_dx: expected [..., N] and [N, K], got {_shape(dy)} and {_shape(w)}")
    lo, hi = _leaf_range("linear_dx", leaf_range, plan.leaves)
    leaf_values = []
    for i in range(lo, hi):
        slices = [slice(*plan.cuts(w.shape[0])[i : i + 2]) for w in weights]
        # One accumulator that runs on through the members is the chain over their concatenation.
        # torch.cat converts to the widest dtype, exactly.
        dy_Mn = torch.cat([_rows(dy)[:, s] for dy, s in zip(grad_outputs, slices)], dim=1)
        w_nK = torch.cat([w[s] for w, s in zip(weights, slices)])
        leaf_values.append(chain(dy_Mn, w_nK.T, plan.leaf).reshape(*lead, w_nK.shape[1]))
    rounds = round_wire and plan.wire_dtype is not None
    if leaf_range is not None:
        return _cover(leaf_values, lo, rounds)
    return epilogue(_root(leaf_values, rounds), out_dtype=out_dtype)


@overload
def linear_dw(
    dy: Tensor, x: Tensor, sample_offsets: Sequence[int] | Tensor, plan: TreePlan, leaf_range: None = None
) -> Tensor: ...
@overload
def linear_dw(
    dy: Tensor, x: Tensor, sample_offsets: Sequence[int] | Tensor, plan: TreePlan, leaf_range: tuple[int, int]
) -> dict[Node, Tensor]: ...
@plain_arithmetic()
def linear_dw(
    dy: Tensor,
    x: Tensor,
    sample_offsets: Sequence[int] | Tensor,
    plan: TreePlan,
    leaf_range: tuple[int, int] | None = None,
) -> Tensor | dict[Node, Tensor]:
    """dw[n, k] = root over samples of the root over blocks of 512 tokens of the chain of dy[t, n] * x[t, k]   (S1).

    dy [..., N] and x [..., K] over T tokens in all; sample s is the tokens [sample_offsets[s], sample_offsets[s+1]),
    possibly none; tokens outside every sample are padding. -> acc_dtype [N, K] (S2). plan.grad_wire_dtype rounds sample
    leaves, nodes and root, never inside a sample (A6). leaf_range: the cover of samples [lo, hi). Layout-invariant.
    """
    acc_dtype = _acc_dtype("linear_dw", dy, x)
    _require_plan("linear_dw", plan, acc_dtype)
    if dy.shape[:-1] != x.shape[:-1]:
        raise PlanError(f"reference.linear_dw: expected dy [T, N] and x [T, K], got {_shape(dy)} and {_shape(x)}")
    dy_NT, x_KT = _rows(dy).T, _rows(x).T
    offsets = [int(o) for o in sample_offsets]
    if len(offsets) < 2 or offsets != sorted(offsets) or offsets[0] < 0 or offsets[-1] > dy_NT.shape[1]:
        raise PlanError(
            f"reference.linear_dw: expected ascending sample_offsets within [0, {dy_NT.shape[1]}], got {offsets}"
        )
    lo, hi = _leaf_range("linear_dw", leaf_range, len(offsets) - 1)
    leaf_values = []
    for first, end in zip(offsets[lo:hi], offsets[lo + 1 : hi + 1]):
        starts = range(first, end, TOKENS_PER_BLOCK)
        ends = [min(start + TOKENS_PER_BLOCK, end) for start in starts]
        blocks = [chain(dy_NT[:, s:e], x_KT[:, s:e], plan.leaf) for s, e in zip(starts, ends)]
        empty = torch.zeros(dy_NT.shape[0], x_KT.shape[0], dtype=acc_dtype)
        leaf_values.append(tree.root(blocks, add) if blocks else empty)
    rounds = plan.grad_wire_dtype is not None
    if leaf_range is not None:
        return _cover(leaf_values, lo, rounds)
    return epilogue(_root(leaf_values, rounds))


@overload
def bias_grad(
    dy: Tensor, sample_offsets: Sequence[int] | Tensor, plan: TreePlan, leaf_range: None = None
) -> Tensor: ...
@overload
def bias_grad(
    dy: Tensor, sample_offsets: Sequence[int] | Tensor, plan: TreePlan, leaf_range: tuple[int, int]
) -> dict[Node, Tensor]: ...
def bias_grad(
    dy: Tensor,
    sample_offsets: Sequence[int] | Tensor,
    plan: TreePlan,
    leaf_range: tuple[int, int] | None = None,
) -> Tensor | dict[Node, Tensor]:
    """db[n] = the gradient `linear_dw` gives for x[t] = 1 (S1: b_k = 1), also rounded by plan.grad_wire_dtype.

    dy [..., N] -> acc_dtype [N], or the cover of samples [lo, hi). Layout-invariant.
    """
    ones = torch.ones(*dy.shape[:-1], 1, dtype=dy.dtype)
    plan = replace(plan, leaf="fma")  # A13, A14
    if leaf_range is None:
        return linear_dw(dy, ones, sample_offsets, plan)[:, 0]
    return {node: value[:, 0] for node, value in linear_dw(dy, ones, sample_offsets, plan, leaf_range).items()}


# --- values of several ranks ----------------------------------------------------------------------------------------


@plain_arithmetic()
def all_reduce(values: Sequence[Tensor], op: Literal["sum", "avg"] = "sum") -> Tensor:
    """out = cast(node(0, W) of the ranks' values, / W for "avg"): one leaf per rank (B1).

    values: one tensor per rank, alike. bf16 and fp16 are added in fp32 and rounded once; integers are exact (modulo
    2^bits) and have no average. Deterministic, not layout-invariant: the number of ranks is the number of leaves.
    """
    if not values or any(v.dtype != values[0].dtype or v.shape != values[0].shape for v in values):
        raise PlanError(f"reference.all_reduce: expected tensors alike, got {[(v.dtype, _shape(v)) for v in values]}")
    if op not in ("sum", "avg"):
        raise PlanError(f"reference.all_reduce: expected 'sum' or 'avg', got {op!r}")
    dtype = values[0].dtype
    if not dtype.is_floating_point:
        if op == "avg" or dtype == torch.bool:
            raise PlanError(f"reference.all_reduce: {op!r} of {dtype} is not defined")
        return tree.root(list(values), add).clone()
    acc_dtype = _acc_dtype("all_reduce", values[0])
    total = tree.root([v.to(acc_dtype) for v in values], add)
    return epilogue(total, avg=len(values) if op == "avg" else 1, out_dtype=dtype)


@plain_arithmetic()
def fold_covers(covers: Sequence[Mapping[Node, Tensor]], leaves: int, rounds: bool = False) -> Tensor:
    """root = node(0, L) from disjoint covers that together hold every leaf (T4, T5).

    covers: {node: value} per rank, in any order. rounds: every new node and the root become bf16 values (A6).
    Errors: ValueError where covers overlap or a leaf is missing. Layout-invariant.
    """
    node_add = _add_rounded if rounds else add
    merged: dict[Node, Tensor] = {}
    for cover in covers:
        merged = tree.merge(merged, cover, node_add)
    nodes = sorted(merged, key=lambda node: node.lo)
    return tree.run(tree.schedule(nodes, leaves), [merged[node] for node in nodes], node_add)[0]


def _add_rounded(left: Tensor, right: Tensor) -> Tensor:
    return round_wire(add(left, right))


def _cover(leaf_values: list[Tensor], lo: int, rounds: bool) -> dict[Node, Tensor]:
    program = tree.schedule(tree.leaf_nodes(lo, lo + len(leaf_values)))
    if rounds:
        leaf_values = [round_wire(value) for value in leaf_values]
    return dict(zip(program.outputs, tree.run(program, leaf_values, _add_rounded if rounds else add)))


def _root(leaf_values: list[Tensor], rounds: bool) -> Tensor:
    if rounds:
        return tree.root([round_wire(value) for value in leaf_values], _add_rounded)
    return tree.root(leaf_values, add)


# --- row operators --------------------------------------------------------------------------------------------------
# Building blocks (sums, maxima, transcendentals) return fp32; norms and softmaxes round once to their input's dtype.


@plain_arithmetic()
def row_sum(x: Tensor, leaves: int = 1) -> Tensor:
    """s[...] = root over leaves, then over blocks of 512, then over 16 lanes of the lane's sum in ascending order (A9).

    x [..., D] bf16, fp16 or fp32 -> fp32 [...]. Lane j of a block: acc = +0; acc = acc + x[j], x[j + 16], ...
    leaves > 1 only over an axis that some layout shards (the vocabulary). Layout-invariant.
    """
    x = _float32("row_sum", x)
    cuts = tree.cuts(x.shape[-1], leaves)
    return tree.root([_row_leaf(x[..., lo:hi]) for lo, hi in itertools.pairwise(cuts)], add)


@plain_arithmetic()
def row_max(x: Tensor) -> Tensor:
    """m[...] = IEEE 754-2019 maximum of the row: NaN wins (canonical), +0 > -0; -inf for an empty row (A8).

    x [..., D] bf16, fp16 or fp32 -> fp32 [...]. The order of the comparisons cannot show. Layout-invariant.
    """
    x = _float32("row_max", x)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = torch.cat([_maximum(x[..., :half], x[..., half : 2 * half]), x[..., 2 * half :]], dim=-1)
    return _cast(x[..., 0] if x.shape[-1] else x.new_full(x.shape[:-1], float("-inf")), torch.float32)


@plain_arithmetic()
def exp(x: Tensor) -> Tensor:
    """y = ((1 + r) + r^2 q(r)) * 2^n, n = floor(x log2(e) + 1/2), r = x - n log(2)   (C1; at most 2 ulp).

    x bf16, fp16 or fp32 -> fp32, gradual underflow: 0 below -103.98, subnormal below -87.33, inf above 88.73, NaN
    canonical. Layout-invariant.
    """
    x = _float32("exp", x)
    t = torch.where(x > EXP_HIGHEST, EXP_HIGHEST, torch.where(x < EXP_LOWEST, EXP_LOWEST, x))
    t = torch.where(torch.isnan(x), 0.0, t)
    n = torch.floor(t * LOG2_E + 0.5)
    high = t - n * LN2_HIGH  # exact: LN2_HIGH has 15 bits, n has 8
    low = n * LN2_LOW
    r = high - low
    r_error = (high - r) - low
    one_plus_r = 1.0 + r
    sum_error = r - (one_plus_r - 1.0)
    y = one_plus_r + (sum_error + (r_error + (r * r) * _horner(EXP, r)))
    # Two factors, because 2^n alone may be subnormal or too large; only the second multiplication can round.
    half = torch.floor(n * 0.5)
    y = (y * _power_of_two(half)) * _power_of_two(n - half)
    return torch.where(torch.isnan(x), float("nan"), y)


@plain_arithmetic()
def log(x: Tensor) -> Tensor:
    """y = f - f^2/2 + f^3 p(f) + e log(2), x = (1 + f) 2^e, sqrt(1/2) <= 1 + f < sqrt(2)   (C2; at most 2 ulp).

    x bf16, fp16 or fp32 -> fp32: log(+-0) = -inf, log(+inf) = +inf, log(x < 0) = canonical NaN. Layout-invariant.
    """
    x = _float32("log", x)
    subnormal = x < _MIN_NORMAL
    bits = torch.where(subnormal, x * 8388608.0, x).view(torch.int32) - LOG_SQRT_HALF_BITS
    e = torch.where(subnormal, -23, 0) + (bits >> 23)
    f = ((bits & 0x7FFFFF) + LOG_SQRT_HALF_BITS).view(torch.float32) - 1.0
    e = e.to(torch.float32)
    z = f * f
    t = (f * z) * _horner(LOG, f)
    t = (t + e * LN2_LOW) - 0.5 * z
    y = (t + f) + e * LN2_HIGH
    y = torch.where(x == 0, float("-inf"), torch.where(x == float("inf"), x, y))
    return torch.where((x < 0) | torch.isnan(x), float("nan"), y)


@plain_arithmetic()
def sigmoid(x: Tensor) -> Tensor:
    """y = q - q c, q = n / d, d = 1 + e, c = e - (d - 1), e = exp(-|x|), n = 1 or, for x < 0, e   (C3; at most 2 ulp).

    x bf16, fp16 or fp32 -> fp32, NaN canonical. Layout-invariant.
    """
    x = _float32("sigmoid", x)
    e = exp(-x.abs())
    d = 1.0 + e
    d_error = e - (d - 1.0)  # exact; without it the error reaches 2.4 ulp
    q = torch.where(x < 0, e, torch.ones_like(e)) / d
    return _cast(q - q * d_error, torch.float32)


@plain_arithmetic()
def tanh(x: Tensor) -> Tensor:
    """y = sign(x) (a + a z p(z)) for a < 0.625, sign(x) (1 - 2 / (exp(2a) + 1)) above; a = |x|, z = a^2   (C4; 2 ulp).

    x bf16, fp16 or fp32 -> fp32, tanh(+-0) = +-0, NaN canonical. Layout-invariant.
    """
    x = _float32("tanh", x)
    a = x.abs()
    z = a * a
    small = a + a * (z * _horner(TANH, z))
    e = exp(a + a)
    large = 1.0 - torch.full_like(e, 2.0) / (e + 1.0)
    y = torch.where(a < TANH_SMALL, small, large)
    return _cast(torch.where(torch.signbit(x), -y, y), torch.float32)


@plain_arithmetic()
def silu(x: Tensor) -> Tensor:
    """y = x * sigmoid(x), two roundings; silu(-inf) is NaN, as -inf * 0 is.

    x bf16, fp16 or fp32 -> fp32, NaN canonical. Layout-invariant.
    """
    x = _float32("silu", x)
    return _cast(x * sigmoid(x), torch.float32)


@plain_arithmetic()
def sin_cos_tables(positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """(sin(a), cos(a)), a = fp32(position) * inv_freq rounded to fp32   (C5; at most 2 ulp for the rounded angle).

    positions [...] integers below 2^24, inv_freq [D] fp32 -> two fp32 [..., D]. The reduction by multiples of pi/2 is
    done in float64, the polynomials in fp32. Errors: PlanError for |a| > 2^20 or not finite. Layout-invariant.
    """
    _require_dtype("sin_cos_tables", torch.float32, inv_freq)
    if positions.dtype.is_floating_point or positions.dtype == torch.bool:
        raise PlanError(f"reference.sin_cos_tables: expected integer positions, got {positions.dtype}")
    if positions.numel() and int(positions.abs().max()) >= 2**24:
        raise PlanError("reference.sin_cos_tables: positions must stay below 2^24, where fp32 holds every integer")
    angle = positions.to(torch.float32)[..., None] * inv_freq
    if not bool((angle.abs() <= MAX_ANGLE).all()):
        raise PlanError(f"reference.sin_cos_tables: angles must be finite and at most {MAX_ANGLE}")
    wide = angle.double()
    n = torch.floor(wide * TWO_OVER_PI + 0.5)
    # n * PI_2_HIGH is exact: 20 + 32 bits.
    r = ((wide - n * PI_2_HIGH) - n * PI_2_LOW).to(torch.float32)
    z = r * r
    sin_r = r + r * (z * _horner(SIN, z))
    cos_r = 1.0 + ((z * z) * _horner(COS, z) - 0.5 * z)
    quadrant = n.to(torch.int64) & 3
    odd = (quadrant & 1) == 1
    sin_a, cos_a = torch.where(odd, cos_r, sin_r), torch.where(odd, sin_r, cos_r)
    return torch.where(quadrant >= 2, -sin_a, sin_a), torch.where((quadrant == 1) | (quadrant == 2), -cos_a, cos_a)


@plain_arithmetic()
def rms_norm(
    x: Tensor, w: Tensor, eps: float, offset: bool = False, compute_dtype: torch.dtype | None = None
) -> Tensor:
    """y = (x * r) * w, r = 1 / sqrt(row_sum(x * x) / K + eps), all in fp32 (A10, R1), one cast to x's dtype.

    x [..., K], w [K] bf16, fp16 or fp32 -> [..., K]. eps is rounded to fp32. offset: 1 + w. compute_dtype: what w is
    rounded to, x.dtype by default. Layout-invariant.
    """
    dtype = x.dtype
    w = _parameter("rms_norm", w, compute_dtype or dtype, offset)
    x = _float32("rms_norm", x)
    if w.shape != x.shape[-1:]:
        raise PlanError(f"reference.rms_norm: expected x [..., K] and w [K], got {_shape(x)} and {_shape(w)}")
    return _cast(_normalised(x, eps)[0] * w, dtype)


@plain_arithmetic()
def log_sum_exp(x: Tensor, leaves: int = 1) -> Tensor:
    """lse = m + log(row_sum(exp(x - m))), m = row_max(x); m = -inf gives -inf, m = +inf or NaN gives NaN (A10).

    x [..., D] bf16, fp16 or fp32 -> fp32 [...]. leaves as in row_sum. Layout-invariant.
    """
    x = _float32("log_sum_exp", x)
    m = row_max(x)
    lse = m + log(row_sum(exp(x - m[..., None]), leaves))
    return torch.where(m == float("-inf"), m, _cast(lse, torch.float32))


@plain_arithmetic()
def log_softmax(x: Tensor, leaves: int = 1) -> Tensor:
    """logp = x - log_sum_exp(x) in fp32 (A10), one cast to x's dtype, NaN canonical.

    x [..., D] bf16, fp16 or fp32 -> [..., D]. leaves as in row_sum. Layout-invariant.
    """
    wide = _float32("log_softmax", x)
    return _cast(wide - log_sum_exp(wide, leaves)[..., None], x.dtype)


@plain_arithmetic()
def softmax(x: Tensor, leaves: int = 1) -> Tensor:
    """p = e / row_sum(e), e = exp(x - row_max(x)) in fp32 (C6), one cast to x's dtype, NaN canonical.

    x [..., D] bf16, fp16 or fp32 -> [..., D]. leaves as in row_sum. Layout-invariant.
    """
    wide = _float32("softmax", x)
    e = exp(wide - row_max(wide)[..., None])
    return _cast(e / row_sum(e, leaves)[..., None], x.dtype)


# --- row operators: norms, activations, rope and their gradients (section R) ----------------------------------------


@plain_arithmetic()
def norm_dx(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    eps: float,
    centered: bool = False,
    offset: bool = False,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """dx = ((g - c1) - n*c) * r [+ residual], g = dy*w, c = row_sum(g*n) / K, c1 = row_sum(g) / K (centered only).

    n: the normalised row of the forward (R1; centered: R3); residual: dh of R2. One cast. Layout-invariant.
    """
    w = _parameter("norm_dx", w, compute_dtype or x.dtype, offset)
    out_dtype = out_dtype or x.dtype
    n, r = _normalised(_float32("norm_dx", x), eps, centered)
    g = _float32("norm_dx", dy) * w
    count = torch.full_like(r, x.shape[-1])
    c = (row_sum(g * n) / count)[..., None]
    if centered:
        g = g - (row_sum(g) / count)[..., None]
    dx = (g - n * c) * r[..., None]
    return _cast(dx if residual is None else dx + _float32("norm_dx", residual), out_dtype)


@plain_arithmetic()
def norm_dw(
    dy: Tensor,
    x: Tensor | None,
    eps: float,
    sample_offsets: Sequence[int],
    centered: bool = False,
    heads: bool = False,
    narrow: bool = False,
    leaf_range: tuple[int, int] | None = None,
) -> Tensor | dict[Node, Tensor]:
    """dw[j] = root over samples of the root over heads of the root over blocks of 512 of chain of dy[t, j] * n[t, j].

    x None: n = 1 (a bias). dy, x [T, K], heads: [T, H, D] -> fp32 [K] ([D]); leaf_range: the cover of samples [lo, hi).
    narrow: grad_wire_dtype is bfloat16. S1. Layout-invariant.
    """
    dy = _float32("norm_dw", dy)
    n = torch.ones_like(dy) if x is None else _normalised(_float32("norm_dw", x), eps, centered)[0]
    if not heads:
        dy, n = dy[:, None], n[:, None]
    lo, hi = leaf_range or (0, len(sample_offsets) - 1)
    leaf_values = []
    for first, end in zip(sample_offsets[lo:hi], sample_offsets[lo + 1 : hi + 1]):
        blocks = []
        for start in range(first, end, TOKENS_PER_BLOCK) or [first]:
            acc = torch.zeros(dy.shape[1:])
            for t in range(start, min(start + TOKENS_PER_BLOCK, end)):
                acc = fma32(dy[t], n[t], acc)
            blocks.append(acc + 0.0)
        per_head = tree.root(blocks, add)
        leaf_values.append(tree.root(list(per_head), add))
    if leaf_range is not None:
        return _cover(leaf_values, lo, narrow)
    return epilogue(_root(leaf_values, narrow))


@plain_arithmetic()
def layer_norm(
    x: Tensor, w: Tensor, bias: Tensor | None, eps: float, compute_dtype: torch.dtype | None = None
) -> Tensor:
    """y = ((x - m) * r) * w + bias, m = row_sum(x) / K, r = 1 / sqrt(row_sum((x - m)(x - m)) / K + eps) (R3)."""
    compute = compute_dtype or x.dtype
    y = _normalised(_float32("layer_norm", x), eps, True)[0] * _parameter("layer_norm", w, compute)
    return _cast(y if bias is None else y + _parameter("layer_norm", bias, compute), x.dtype)


@plain_arithmetic()
def add_rms_norm(x: Tensor, residual: Tensor, w: Tensor, eps: float, offset: bool = False) -> tuple[Tensor, Tensor]:
    """h = cast(x + residual), y = rms_norm(h, w) -> (y, h) (R2)."""
    h = _cast(_float32("add_rms_norm", x) + _float32("add_rms_norm", residual), x.dtype)
    return rms_norm(h, w, eps, offset), h


@plain_arithmetic()
def rope(
    x: Tensor,
    sin: Tensor,
    cos: Tensor,
    interleaved: bool = False,
    backward: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y1 = x1*cos - x2*sin, y2 = x2*cos + x1*sin (R4); backward: dx1 = dy1*cos + dy2*sin, dx2 = dy2*cos - dy1*sin.

    x [..., H, D], sin and cos [..., R/2]; pairs (i, i + R/2), interleaved: (2i, 2i + 1). One cast. Layout-invariant.
    """
    dtype = out_dtype or x.dtype
    x = _float32("rope", x)
    half = sin.shape[-1]
    sin, cos = sin[..., None, :], cos[..., None, :]
    x1 = x[..., 0 : 2 * half : 2] if interleaved else x[..., :half]
    x2 = x[..., 1 : 2 * half : 2] if interleaved else x[..., half : 2 * half]
    if backward:
        y1, y2 = x1 * cos + x2 * sin, x2 * cos - x1 * sin
    else:
        y1, y2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    turned = torch.stack([y1, y2], dim=-1).flatten(-2) if interleaved else torch.cat([y1, y2], dim=-1)
    return _cast(torch.cat([turned, x[..., 2 * half :]], dim=-1), dtype)


@plain_arithmetic()
def gelu(x: Tensor) -> Tensor:
    """y = x * sigmoid(u), u = c (x + k (x z)), z = min(x*x, 2^14): gelu's tanh form (C7). -> fp32, NaN canonical."""
    return _cast(_gelu(_float32("gelu", x))[0], torch.float32)


@plain_arithmetic()
def gated(gate: Tensor, up: Tensor | None, kind: Literal["silu", "gelu_tanh"]) -> Tensor:
    """y = cast(f(gate) * up), or cast(f(gate)) (R5, R6). Layout-invariant."""
    value = _ACTIVATIONS[kind](_float32("gated", gate))[0]
    return _cast(value if up is None else value * _float32("gated", up), gate.dtype)


@plain_arithmetic()
def gated_dx(
    dy: Tensor, gate: Tensor, up: Tensor | None, kind: Literal["silu", "gelu_tanh"]
) -> tuple[Tensor, Tensor | None]:
    """dgate = (dy * up) * f'(gate), dup = dy * f(gate); without up dgate = dy * f'(gate) (R5, R6). One cast each."""
    value, slope = _ACTIVATIONS[kind](_float32("gated_dx", gate))
    dy = _float32("gated_dx", dy)
    if up is None:
        return _cast(dy * slope, gate.dtype), None
    return _cast((dy * _float32("gated_dx", up)) * slope, gate.dtype), _cast(dy * value, gate.dtype)


@plain_arithmetic()
def softcap(x: Tensor, cap: float) -> Tensor:
    """y = cast(cap * tanh(x / cap)) (R10). Layout-invariant."""
    c = torch.tensor(cap, dtype=torch.float32)
    return _cast(c * tanh(_float32("softcap", x) / c), x.dtype)


@plain_arithmetic()
def softcap_dx(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    """dx = cast(dy * (1 - t*t)), t = tanh(x / cap) (R10)."""
    t = tanh(_float32("softcap_dx", x) / torch.tensor(cap, dtype=torch.float32))
    return _cast(_float32("softcap_dx", dy) * (1.0 - t * t), x.dtype)


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    s = sigmoid(x)
    a = x * s
    return a, s + a * (1.0 - s)


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    z = x * x
    z = torch.where(z > GELU_CAP, GELU_CAP, z)
    s = sigmoid(GELU_TWICE * (x + GELU_CUBIC * (x * z)))
    a = x * s
    return a, s + (a * (1.0 - s)) * (GELU_TWICE + GELU_SLOPE * z)


_ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu}


@plain_arithmetic()
def embedding(
    ids: Tensor, w: Tensor, out_dtype: torch.dtype | None = None, rows: tuple[int, int] | None = None
) -> Tensor:
    """y[t] = cast(w[ids[t]]), -0.0 for a row outside rows = [lo, hi); w whole (A8). Layout-invariant."""
    y = _float32("embedding", w[ids])
    if rows is not None:
        absent = (ids < rows[0]) | (ids >= rows[1])
        y = torch.where(absent[..., None], torch.full_like(y, -0.0), y)
    return _cast(y, out_dtype or w.dtype)


@plain_arithmetic()
def embedding_dw(
    dy: Tensor,
    ids: Tensor,
    num_rows: int,
    sample_offsets: Sequence[int],
    narrow: bool = False,
    leaf_range: tuple[int, int] | None = None,
) -> Tensor | dict[Node, Tensor]:
    """dw[v] = root over samples of the root over blocks of 512 tokens of the chain of dy[t] * 1 over ids[t] = v (R7).

    dy [T, D], ids [T] -> fp32 [V, D]; leaf_range: the cover of samples [lo, hi). Layout-invariant.
    """
    dy = _float32("embedding_dw", dy)
    lo, hi = leaf_range or (0, len(sample_offsets) - 1)
    leaf_values = []
    for first, end in zip(sample_offsets[lo:hi], sample_offsets[lo + 1 : hi + 1]):
        blocks = []
        for start in range(first, end, TOKENS_PER_BLOCK) or [first]:
            acc = torch.zeros(num_rows, dy.shape[1])
            for t in range(start, min(start + TOKENS_PER_BLOCK, end)):
                row = int(ids[t])
                acc[row] = fma32(dy[t], torch.ones_like(dy[t]), acc[row])
            blocks.append(acc + 0.0)
        leaf_values.append(tree.root(blocks, add))
    if leaf_range is not None:
        return _cover(leaf_values, lo, narrow)
    return epilogue(_root(leaf_values, narrow))


@plain_arithmetic()
def fan_in(grads: Sequence[Tensor]) -> Tensor:
    """dx = cast(((dx_1 + dx_2) + dx_3) + ...), in fp32 (L3)."""
    total = _float32("fan_in", grads[0])
    for grad in grads[1:]:
        total = total + _float32("fan_in", grad)
    return _cast(total, grads[0].dtype)


@plain_arithmetic()
def row_mean(x: Tensor, leaves: int = 1, out_dtype: torch.dtype | None = None) -> Tensor:
    """m = cast(row_sum(x) / K) (R8)."""
    return epilogue(row_sum(x, leaves), avg=x.shape[-1], out_dtype=out_dtype or x.dtype)


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Four words of Philox4x32-10 (R9), in Python integers."""
    c, (k0, k1), mask = list(counter), key, 2**32 - 1
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & mask, (p0 >> 32) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c


@plain_arithmetic()
def dropout(
    x: Tensor,
    p: float,
    seed: int,
    step: int,
    name_key: int,
    sample_offsets: Sequence[int],
    first_sample: int = 0,
    first_position: int = 0,
    first_feature: int = 0,
) -> Tensor:
    """y = cast(x * fp32(1 / (1 - p))) where the word of (feature, position, sample) is >= floor(p 2^32), else +0 (R9).

    x [T, K]; name_key: 63 bits of the module's name. Layout-invariant.
    """
    mask = 2**32 - 1
    key = philox([step & mask, step >> 32, name_key & mask, name_key >> 32], [seed & mask, seed >> 32])[:2]
    kept = torch.zeros(x.shape, dtype=torch.bool)
    for s, (first, end) in enumerate(itertools.pairwise(sample_offsets)):
        for t, f in itertools.product(range(first, end), range(x.shape[1])):
            feature = first_feature + f
            words = philox([feature // 4, first_position + t - first, first_sample + s, 0], key)
            kept[t, f] = words[feature % 4] >= math.floor(p * 2**32)
    scale = torch.tensor(1.0 / (1.0 - p) if p < 1 else 0.0, dtype=torch.float64).to(torch.float32)
    wide = _float32("dropout", x)
    return _cast(torch.where(kept, wide * scale, torch.zeros_like(wide)), x.dtype)


def _normalised(x: Tensor, eps: float, centered: bool = False) -> tuple[Tensor, Tensor]:
    """n = x * r (centered: (x - m) * r) and r [...], fp32."""
    count = torch.full_like(x[..., 0], x.shape[-1])
    if centered:
        x = x - (row_sum(x) / count)[..., None]
    mean = row_sum(x * x) / count + torch.full_like(count, eps)
    r = torch.ones_like(mean) / _sqrt(mean)
    return x * r[..., None], r


def _parameter(where: str, w: Tensor, compute_dtype: torch.dtype, offset: bool = False) -> Tensor:
    """w rounded to compute_dtype where that has fewer bits, then exactly in fp32; 1 + w if offset."""
    wide = _float32(where, w)
    if w.dtype == torch.float32 and compute_dtype != torch.float32:
        wide = _cast(wide, compute_dtype).to(torch.float32)
    return 1.0 + wide if offset else wide


def _row_leaf(x: Tensor) -> Tensor:
    """One leaf of A9. A missing element adds +0, which changes nothing: a lane starts at +0 and never becomes -0."""
    lead, length = x.shape[:-1], x.shape[-1]
    num_blocks = -(-length // ROW_BLOCK)
    if num_blocks == 0:
        return x.new_zeros(lead)
    padded = x.new_zeros(*lead, num_blocks * ROW_BLOCK)
    padded[..., :length] = x
    terms = padded.reshape(*lead, num_blocks, ROW_BLOCK // LANES, LANES)
    lanes = terms.new_zeros(*lead, num_blocks, LANES)
    for i in range(ROW_BLOCK // LANES):
        lanes = lanes + terms[..., i, :]
    blocks = tree.root(lanes.unbind(-1), add)
    return tree.root(blocks.unbind(-1), add)


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    same = (a.view(torch.int32) & b.view(torch.int32)).view(torch.float32)  # equal values differ only as +0 and -0
    larger = torch.where(a > b, a, torch.where(a == b, same, b))
    return torch.where(torch.isnan(a), a, larger)


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """p = c_0 + x (c_1 + x (c_2 + ...)), each product and each sum rounded to fp32."""
    p = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        p = p * x + c
    return p


def _power_of_two(n: Tensor) -> Tensor:
    return ((n.to(torch.int32) + 127) << 23).view(torch.float32)


def _sqrt(x: Tensor) -> Tensor:
    """RN24(sqrt(x)). 53 bits are more than twice 24, so rounding twice is rounding once."""
    return torch.sqrt(x.double()).to(torch.float32)


def _float32(where: str, x: Tensor) -> Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise PlanError(f"reference.{where}: expected bf16, fp16 or fp32, got {x.dtype}")
    return x.to(torch.float32)


# --- attention ------------------------------------------------------------------------------------------------------
# Suffixes here: T query tokens, S key tokens, H query heads, G KV heads, D head_dim; one sequence. Position = index in
# the sequence; the queries are its last T positions.

KEYS_PER_BLOCK = 64
QUERIES_PER_BLOCK = 64


class Masking(NamedTuple):
    """What decides a score besides q and k (K2). window 0 and softcap 0: none."""

    scale: float
    causal: bool = True
    window: int = 0
    softcap: float = 0.0


class AttentionState(NamedTuple):
    """out [T, H, D] in q's dtype; m, total fp32 [T, H]: the maximum and the sum of exponentials; rest as out (K3)."""

    out: Tensor
    m: Tensor
    total: Tensor
    rest: Tensor


def live_keys(query: int, num_queries: int, num_keys: int, masking: Masking) -> range:
    """The key positions that query `query` of a sequence sees (K2)."""
    position = num_keys - num_queries + query
    lo, hi = 0, position + 1 if masking.causal else num_keys
    if masking.window:
        lo, hi = max(0, position - masking.window + 1), min(hi, position + masking.window)
    return range(lo, hi)


@plain_arithmetic()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masking: Masking,
    heads_per_kv: Sequence[int],
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
) -> AttentionState:
    """out = acc / total, blocks of 64 keys in ascending position, only live keys (K1, K2).

    q [T, H, D], k and v [S, G, D] bf16, fp16 or fp32; heads_per_kv: G numbers that add up to H; sinks [H];
    keep [T, H, S]: `attention_keep`. Batch-invariant by construction: every query is computed alone.
    """
    kv_head = [g for g, count in enumerate(heads_per_kv) for _ in range(count)]
    out = torch.empty(q.shape)
    m, total = torch.empty(q.shape[:2]), torch.empty(q.shape[:2])
    for t, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        live = live_keys(t, q.shape[0], k.shape[0], masking)
        sink = torch.tensor(float("-inf")) if sinks is None else sinks[h].float()
        sums, total[t, h], m[t, h] = _attend(
            q[t, h], k[:, kv_head[h]], v[:, kv_head[h]], live, masking, sink, None if keep is None else keep[t, h]
        )
        out[t, h] = sums / total[t, h]
    rounded = _cast(out, q.dtype)
    rest = _cast(out - rounded.float(), q.dtype)
    return AttentionState(rounded, _cast(m + 0.0, torch.float32), _cast(total, torch.float32), rest)


def _attend(
    q_D: Tensor,
    k_SD: Tensor,
    v_SD: Tensor,
    live: range,
    masking: Masking,
    sink: Tensor,
    keep_S: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(acc [D], total, m) of one query: a sink is there before the first block, with a value of zero."""
    m, acc = sink, torch.zeros(q_D.shape)
    total = torch.where(sink > float("-inf"), 1.0, 0.0)
    for keys in _blocks(live, KEYS_PER_BLOCK):
        scores, _ = _scores(q_D[None], k_SD[keys], masking)
        m_new = _maximum(m, row_max(scores)[0])
        p, factor = exp(scores - m_new), exp(m - m_new)
        used = p if keep_S is None else _kept(p, keep_S[keys])
        acc = acc * factor + chain(used, v_SD[keys].float().T)[0]
        total = total * factor + chain(p, torch.ones(1, p.shape[1]))[0, 0]
        m = m_new
    return acc, total, m


def _kept(x: Tensor, keep: Tensor) -> Tensor:
    """x * keep where kept, +0 where dropped (K5)."""
    return torch.where(keep > 0, x * keep, torch.zeros_like(x))


def attention_keep(
    shape: tuple[int, int, int], p: float, seed: int, step: int, name_key: int, sample: int = 0, first_head: int = 0
) -> Tensor:
    """[T, H, S]: fp32(1 / (1 - p)) where the word of (key, query position, sample, 1 + head) is >= floor(p 2^32) (K5).

    shape: T queries, H query heads, S keys of the one sequence, whose global number is `sample`. Layout-invariant.
    """
    queries, _, keys = shape
    mask = 2**32 - 1
    key = philox([step & mask, step >> 32, name_key & mask, name_key >> 32], [seed & mask, seed >> 32])[:2]
    scale = torch.tensor(1.0 / (1.0 - p) if p < 1 else 0.0, dtype=torch.float64).to(torch.float32)
    keep = torch.zeros(shape)
    first = max(0, keys - queries)
    for t, h, s in itertools.product(*map(range, shape)):
        word = philox([s // 4, first + t, sample, 1 + first_head + h], key)[s % 4]
        keep[t, h, s] = scale if word >= math.floor(p * 2**32) else 0.0
    return keep


def _scores(q_TD: Tensor, k_SD: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
    """(s, tanh of the capped score or 0), both [T, S]."""
    s = chain(q_TD, k_SD) * torch.full((), masking.scale)
    if not masking.softcap:
        return s, torch.zeros_like(s)
    cap = torch.full((), masking.softcap)
    t = tanh(s / cap)
    return cap * t, t


def _blocks(positions: range, size: int) -> list[slice]:
    """Slices of `positions` cut at the multiples of `size`."""
    cuts = range(positions.start // size * size, positions.stop, size)
    return [slice(max(c, positions.start), min(c + size, positions.stop)) for c in cuts]


class AttentionGradients(NamedTuple):
    """fp32, before any rounding: dq [T, H, D]; dk, dv per query head [S, H, D]; rows of dsinks [T, H]."""

    dq: Tensor
    dk_heads: Tensor
    dv_heads: Tensor
    d_sink_rows: Tensor


@plain_arithmetic()
def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: AttentionState,
    masking: Masking,
    heads_per_kv: Sequence[int],
    sinks: Tensor | None = None,
    keep: Tensor | None = None,
) -> AttentionGradients:
    """p = exp(s - m) (1 / total), dS = p (dP - D) ... scale; dQ over key blocks, dK and dV over query blocks (K3).

    grad_out [T, H, D], the rest as in `attention`, whose result `state` is. dk, dv of a KV head are the canonical tree
    over its query heads (`fold_heads`). Batch-invariant by construction.
    """
    kv_head = [g for g, count in enumerate(heads_per_kv) for _ in range(count)]
    num_queries, num_keys = q.shape[0], k.shape[0]
    first = max(0, num_keys - num_queries)
    dq = torch.zeros(q.shape)
    dk, dv = torch.zeros(num_keys, q.shape[1], q.shape[2]), torch.zeros(num_keys, q.shape[1], q.shape[2])
    d_sinks = torch.zeros(q.shape[:2])
    mean = row_sum(grad_out.float() * (state.out.float() + state.rest.float()))
    live = [live_keys(t, num_queries, num_keys, masking) for t in range(num_queries)]
    seen_by = [[t for t in range(num_queries) if s in live[t]] for s in range(num_keys)]
    for h in range(q.shape[1]):
        q_h, k_h, v_h, do_h = (x.float() for x in (q[:, h], k[:, kv_head[h]], v[:, kv_head[h]], grad_out[:, h]))
        weight = 1.0 / state.total[:, h, None]
        s, t_cap = _scores(q_h, k_h, masking)
        p = exp(s - state.m[:, h, None]) * weight
        dp = chain(do_h, v_h)
        used = p
        if keep is not None:
            dp, used = _kept(dp, keep[:, h]), _kept(p, keep[:, h])
        ds = p * (dp - mean[:, h, None])
        if masking.softcap:
            ds = ds * (1.0 - t_cap * t_cap)
        ds = ds * torch.full((), masking.scale)
        for t in range(num_queries):
            for keys in _blocks(live[t], KEYS_PER_BLOCK):
                dq[t, h] = dq[t, h] + chain(ds[None, t, keys], k_h[keys].T)[0]
        for key in range(num_keys):
            if not seen_by[key]:
                continue
            # the live queries of a key are consecutive
            positions = range(first + seen_by[key][0], first + seen_by[key][-1] + 1)
            for block in _blocks(positions, QUERIES_PER_BLOCK):
                rows = slice(block.start - first, block.stop - first)
                dk[key, h] = dk[key, h] + chain(ds[None, rows, key], q_h[rows].T)[0]
                dv[key, h] = dv[key, h] + chain(used[None, rows, key], do_h[rows].T)[0]
        if sinks is not None:
            p_sink = exp(sinks[h].float() - state.m[:, h]) * weight[:, 0]
            d_sinks[:, h] = torch.where(sinks[h] == float("-inf"), 0.0, p_sink * (0.0 - mean[:, h]))
    return AttentionGradients(dq, dk, dv, d_sinks)


@plain_arithmetic()
def fold_heads(per_head: Tensor, heads_per_kv: Sequence[int]) -> Tensor:
    """dk or dv [S, G, D]: the canonical tree over the query heads of each KV head, fp32 (K3)."""
    parts = torch.split(per_head, list(heads_per_kv), dim=1)
    return torch.stack([tree.root(part.unbind(1), add) for part in parts], dim=1)


# --- vocabulary operators (section V) --------------------------------------------------------------------------------


@plain_arithmetic()
def row_sum_cover(x: Tensor, leaves: int, leaf_range: tuple[int, int]) -> dict[Node, Tensor]:
    """{node: value} of the leaves [lo, hi) of row_sum(x, leaves); x [..., V] whole (A9, T3). Layout-invariant."""
    x = _float32("row_sum_cover", x)
    lo, hi = _leaf_range("row_sum_cover", leaf_range, leaves)
    cuts = tree.cuts(x.shape[-1], leaves)
    return _cover([_row_leaf(x[..., cuts[i] : cuts[i + 1]]) for i in range(lo, hi)], lo, False)


@plain_arithmetic()
def softmax_dx(dp: Tensor, x: Tensor, leaves: int = 1) -> Tensor:
    """dx = p * (dp - d), d = row_sum(p * dp), p = exp(x - m) / s in fp32, unrounded (V3); one cast to x's dtype.

    dp, x [..., V] in one dtype -> [..., V]. leaves as in row_sum. Layout-invariant.
    """
    wide, gradient = _float32("softmax_dx", x), _float32("softmax_dx", dp)
    e = exp(wide - row_max(wide)[..., None])
    p = e / row_sum(e, leaves)[..., None]
    d = row_sum(p * gradient, leaves)
    return _cast(p * (gradient - d[..., None]), x.dtype)


@plain_arithmetic()
def log_softmax_dx(dy: Tensor, x: Tensor, leaves: int = 1) -> Tensor:
    """dx = dy - exp(x - lse) * row_sum(dy) in fp32 (V5); one cast to x's dtype.

    dy, x [..., V] in one dtype -> [..., V]. leaves as in row_sum. Layout-invariant.
    """
    wide, gradient = _float32("log_softmax_dx", x), _float32("log_softmax_dx", dy)
    p = exp(wide - log_sum_exp(wide, leaves)[..., None])
    return _cast(gradient - p * row_sum(gradient, leaves)[..., None], x.dtype)


@plain_arithmetic()
def cross_entropy(logits: Tensor, targets: Tensor, leaves: int = 1, ignore_index: int | None = -100) -> Tensor:
    """loss = lse - x_t per token in fp32, +0 where t = ignore_index (V6); NaN canonical.

    logits [..., V], targets [...] int64 -> fp32 [...]. leaves as in row_sum. Layout-invariant.
    """
    wide = _float32("cross_entropy", logits)
    ignored = _ignored(targets, ignore_index)
    picked = wide.gather(-1, targets.masked_fill(ignored, 0)[..., None])[..., 0]
    loss = _cast(log_sum_exp(wide, leaves) - picked, torch.float32)
    return torch.where(ignored, 0.0, loss)


@plain_arithmetic()
def cross_entropy_dx(
    grad: Tensor, logits: Tensor, targets: Tensor, leaves: int = 1, ignore_index: int | None = -100
) -> Tensor:
    """dx_j = g * (exp(x_j - lse) - [j = t]) in fp32, +0 in ignored rows (V7); one cast to the logits' dtype.

    grad [...] fp32, logits [..., V], targets [...] int64 -> [..., V]. leaves as in row_sum. Layout-invariant.
    """
    _require_dtype("cross_entropy_dx", torch.float32, grad)
    wide = _float32("cross_entropy_dx", logits)
    ignored = _ignored(targets, ignore_index)
    p = exp(wide - log_sum_exp(wide, leaves)[..., None])
    hit = torch.arange(logits.shape[-1]) == targets[..., None]
    dx = grad[..., None] * torch.where(hit, p - 1.0, p)
    return _cast(torch.where(ignored[..., None], torch.zeros_like(dx), dx), logits.dtype)


def sample_sums(losses: Tensor, sample_offsets: Sequence[int]) -> Tensor:
    """Per sample: the tree over blocks of 512 tokens of the chain over the losses (V8, S1 with b_k = 1).

    losses [...] fp32, T of them in order; sample s is tokens [sample_offsets[s], sample_offsets[s+1]) -> fp32 [B].
    """
    flat = losses.reshape(-1, 1)
    plan = TreePlan(leaves=1)
    sums = [bias_grad(flat[first:end], [0, end - first], plan)[0] for first, end in itertools.pairwise(sample_offsets)]
    return torch.stack(sums) if sums else torch.zeros(0)


def token_sum(losses: Tensor, sample_offsets: Sequence[int]) -> Tensor:
    """sum = node(0, B) over the samples' sums (V8): the gradient a bias of one element would get; +0 for no samples."""
    if len(sample_offsets) < 2:
        return torch.zeros(())
    return bias_grad(losses.reshape(-1, 1), list(sample_offsets), TreePlan(leaves=1))[0]


@plain_arithmetic()
def logprobs(logits: Tensor, ids: Tensor, leaves: int = 1) -> Tensor:
    """logp = x_id - lse in fp32, NaN canonical (V9). logits [..., V], ids [...] or [..., n] int64 -> as ids."""
    wide = _float32("logprobs", logits)
    lse = log_sum_exp(wide, leaves)
    if ids.dim() < logits.dim():
        return _cast(wide.gather(-1, ids[..., None])[..., 0] - lse, torch.float32)
    return _cast(wide.gather(-1, ids) - lse[..., None], torch.float32)


@plain_arithmetic()
def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k first of each row by (value descending, NaN before everything, -0 = +0; then index ascending) (V10).

    x [..., V] bf16, fp16 or fp32 -> values fp32 [..., k] (NaN canonical), indices int64 [..., k].
    """
    wide = _float32("top_k", x)
    values, indices = wide.new_empty(*x.shape[:-1], k), torch.empty(*x.shape[:-1], k, dtype=torch.int64)
    for row in itertools.product(*map(range, x.shape[:-1])):
        numbers = wide[row].tolist()
        order = sorted(range(len(numbers)), key=lambda i: (_descending(numbers[i]), i))[:k]
        indices[row] = torch.tensor(order, dtype=torch.int64)
        values[row] = wide[row][indices[row]]
    return _cast(values, torch.float32), indices


def _descending(value: float) -> tuple[bool, float]:
    return (True, -value + 0.0) if value == value else (False, 0.0)


def _ignored(targets: Tensor, ignore_index: int | None) -> Tensor:
    return torch.zeros_like(targets, dtype=torch.bool) if ignore_index is None else targets == ignore_index


# --- refusals -------------------------------------------------------------------------------------------------------


def _acc_dtype(where: str, *operands: Tensor) -> torch.dtype:
    """float64 if every operand is, float32 for any mixture of bf16, fp16 and fp32."""
    dtypes = {t.dtype for t in operands}
    if dtypes == {torch.float64}:
        return torch.float64
    if dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return torch.float32
    raise PlanError(
        f"reference.{where}: expected bf16, fp16 and fp32 operands, or fp64 alone, got {sorted(map(str, dtypes))}"
    )


def _require_plan(where: str, plan: TreePlan, acc_dtype: torch.dtype) -> None:
    if f"torch.{plan.acc_dtype}" != str(acc_dtype):
        raise PlanError(
            f"reference.{where}: these operands accumulate in {acc_dtype}, the plan says {plan.acc_dtype}; "
            "fp64 operands need TreePlan(acc_dtype='float64')"
        )


def _require_dtype(where: str, dtype: torch.dtype, *tensors: Tensor) -> None:
    if any(t.dtype != dtype for t in tensors):
        raise PlanError(f"reference.{where}: expected {dtype}, got {[t.dtype for t in tensors]}")


def _leaf_range(
    where: str, leaf_range: tuple[int, int] | None, leaves: int, bias: Tensor | None = None
) -> tuple[int, int]:
    lo, hi = leaf_range or (0, leaves)
    if not 0 <= lo <= hi <= leaves:
        raise PlanError(f"reference.{where}: expected a leaf_range within [0, {leaves}], got {leaf_range}")
    if leaf_range is not None and bias is not None:
        raise PlanError(f"reference.{where}: the bias is added at the root, so a cover has none")
    return lo, hi


def _rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K], also for K = 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
