"""silu and gelu, alone and gated, and the soft-cap, forward and backward (ORDER.md R5, R6, R10, C3, C7).

    y = cast(f(gate) up)        dup = cast(dy f(gate)),  dgate = cast((dy up) f'(gate))          alone: up = 1
    y = cast(c tanh(x / c))     dx = cast(dy (1 - t t)),  t = tanh(x / c)

Suffixes: T rows, K elements. fp32, every product rounded, none fused, one cast per result. Rows may lie any distance
apart, so the halves of a packed [T, 2 K] are read and written in place. Bits: those of the CPU, batch-invariant
(tests/test_kernels_rows.py). Not yet measured on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.errors import PlanError
from tbik.kernels import arithmetic, elementary
from tbik.kernels.rows import DTYPES, require_rows

BLOCK = 1024
KINDS = ("silu", "gelu_tanh")


@triton.jit
def activation_kernel(
    gate_ptr,
    up_ptr,
    dy_ptr,
    y_ptr,
    dup_ptr,
    length,
    stride_gate,
    stride_up,
    stride_dy,
    stride_y,
    KIND: tl.constexpr,
    HAS_UP: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = k < length
    gate = tl.load(gate_ptr + (row * stride_gate + k), mask=is_live, other=0.0).to(tl.float32)
    a, slope = elementary.activation_and_slope(gate, KIND)
    y = a
    if HAS_UP:
        up = tl.load(up_ptr + (row * stride_up + k), mask=is_live, other=0.0).to(tl.float32)
        y = a * up
    if BACKWARD:
        dy = tl.load(dy_ptr + (row * stride_dy + k), mask=is_live, other=0.0).to(tl.float32)
        y = dy * slope
        if HAS_UP:
            y = (dy * up) * slope
            dup = arithmetic.cast(dy * a, dup_ptr.dtype.element_ty)
            tl.store(dup_ptr + (row * stride_y + k), dup, mask=is_live)
    tl.store(y_ptr + (row * stride_y + k), arithmetic.cast(y, y_ptr.dtype.element_ty), mask=is_live)


def activation(gate: Tensor, up: Tensor | None, kind: str, out: Tensor) -> None:
    """out = cast(f(gate) up). gate, up, out [T, K], each with elements side by side. Batch-invariant."""
    _launch("kernels.activation", gate, up, None, kind, out, out)


def activation_dx(dy: Tensor, gate: Tensor, up: Tensor | None, kind: str, dgate: Tensor, dup: Tensor | None) -> None:
    """dgate, dup [T, K] like gate, one distance between rows for both. Batch-invariant."""
    _launch("kernels.activation_dx", gate, up, dy, kind, dgate, dgate if dup is None else dup)


def _launch(
    where: str, gate: Tensor, up: Tensor | None, dy: Tensor | None, kind: str, out: Tensor, dup: Tensor
) -> None:
    if kind not in KINDS:
        raise PlanError(f"{where}: expected one of {KINDS}, got {kind!r}")
    tensors = [t for t in (gate, up, dy, out, dup) if t is not None]
    for t in tensors:
        if t.shape != gate.shape or t.dim() != 2 or t.dtype not in DTYPES or (t.shape[1] > 1 and t.stride(1) != 1):
            raise PlanError(
                f"{where}: expected rows [T, K] like gate {list(gate.shape)} with elements side by side, "
                f"got {t.dtype} {list(t.shape)} with strides {t.stride()}"
            )
    if out.stride(0) != dup.stride(0):
        raise PlanError(f"{where}: expected dgate and dup with one distance between rows")
    if gate.numel() == 0:
        return
    length = gate.shape[1]
    block = min(BLOCK, triton.next_power_of_2(length))
    activation_kernel[(gate.shape[0], triton.cdiv(length, block))](
        gate,
        gate if up is None else up,
        gate if dy is None else dy,
        out,
        dup,
        length,
        gate.stride(0),
        gate.stride(0) if up is None else up.stride(0),
        0 if dy is None else dy.stride(0),
        out.stride(0),
        KIND=kind,
        HAS_UP=up is not None,
        BACKWARD=dy is not None,
        BLOCK=block,
        num_warps=4,
        **arithmetic.OPTIONS,
    )


@triton.jit
def softcap_kernel(x_ptr, dy_ptr, y_ptr, num_elements, cap, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_live = at < num_elements
    x = tl.load(x_ptr + at, mask=is_live, other=0.0).to(tl.float32)
    t = elementary.tanh(tl.div_rn(x, tl.zeros((BLOCK,), tl.float32) + cap))
    y = t * cap
    if BACKWARD:
        dy = tl.load(dy_ptr + at, mask=is_live, other=0.0).to(tl.float32)
        y = dy * (1.0 - t * t)
    tl.store(y_ptr + at, arithmetic.cast(y, y_ptr.dtype.element_ty), mask=is_live)


def softcap(x: Tensor, cap: float, dy: Tensor | None = None) -> Tensor:
    """cast(cap tanh(x / cap)), or with dy its gradient. x, dy contiguous, alike in shape. Batch-invariant."""
    require_rows("kernels.softcap", x, dy)
    y = torch.empty_like(x)
    if x.numel():
        softcap_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x,
            x if dy is None else dy,
            y,
            x.numel(),
            float(cap),
            BACKWARD=dy is not None,
            BLOCK=BLOCK,
            **arithmetic.OPTIONS,
        )
    return y
