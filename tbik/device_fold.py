"""root = cast(node(0, W) of W rows * factor / divisor): what a rank folds of its chunk, where the rows lie.

    sum, avg      left + right in fp32 (bf16, fp16, fp32) or fp64; avg: root / W                            (A4, A7)
    premul_sum    root * f, or the ranks' leaves * f_r, rounded, where the factors differ                   (A7)
    product       left * right; min, max: IEEE 754-2019 minimum, maximum                                    (A8)
    integers      sum and product modulo 2^bits; min, max, band, bor, bxor
    bool          sum = max = bor, product = min = band, bxor

Suffixes: W rows (one leaf each), N elements. dtypes: float32, float64, bfloat16, float16, int8, uint8, int16, int32,
int64, bool. Sums and averages of floats run in one kernel where the device has it (tbik.devices), all else pair by pair
in torch's element-wise operations; which pairs, tbik.tree says. On CUDA nothing here waits for the host.
Errors: PlanError. Bits: layout-invariant, those of tbik.reference (tests/test_device_fold.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch
from torch import Tensor

from tbik import _C, devices, tree
from tbik.errors import PlanError

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

_Pair = Callable[[Tensor, Tensor], Tensor]

# The canonical quiet NaN of each dtype, and the integers that have its bits.
_NAN = {
    torch.float32: (torch.int32, 0x7FC00000),
    torch.float64: (torch.int64, 0x7FF8000000000000),
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
}


def fold(rows_WN: Tensor, op: str, factors_W: Tensor | None = None) -> Tensor:
    """out [N] = cast(node(0, W) of the rows), in the rows' dtype.

    rows_WN: contiguous, row r of rank r. op: as reduce_ops.h names it. factors_W: float64, of premul_sum, beside the
    rows. The result shares no memory with the rows. Errors: PlanError. Layout-invariant.
    """
    dtype = rows_WN.dtype
    if rows_WN.dim() != 2 or rows_WN.shape[0] < 1 or not rows_WN.is_contiguous():
        raise PlanError(f"device_fold: expected contiguous rows [W, N], W >= 1, got {list(rows_WN.shape)}")
    if (op == "premul_sum") != (factors_W is not None):
        raise PlanError(f"device_fold: expected one factor per row for premul_sum and none for {op}")
    if dtype in FLOATS and op in _FLOAT_PAIRS:
        return rows_WN.new_empty(0) if rows_WN.shape[1] == 0 else _fold_floats(rows_WN, op, factors_W)
    if dtype in INTEGERS and op in _INTEGER_PAIRS:
        return tree.root(rows_WN.unbind(), _INTEGER_PAIRS[op]).clone()
    if dtype == torch.bool and op in _BOOL_PAIRS:
        # A bool of another program may be any byte but 0.
        return tree.root((rows_WN.view(torch.uint8) != 0).unbind(), _BOOL_PAIRS[op]).clone()
    raise PlanError(f"device_fold: {op} of {dtype} is not defined")


def _fold_floats(rows_WN: Tensor, op: str, factors_W: Tensor | None) -> Tensor:
    world, dtype = rows_WN.shape[0], rows_WN.dtype
    if op in ("sum", "avg") and (kernel := _kernel(rows_WN)) is not None:
        schedule = _C.run_schedule(0, world, world, True)
        return kernel(rows_WN, schedule, avg=world if op == "avg" else 1, out_dtype=dtype)
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    at_leaf, at_root = (None, None) if factors_W is None else _placed(factors_W, acc_dtype)
    root = tree.root(_Leaves(rows_WN, acc_dtype, at_leaf), _FLOAT_PAIRS[op])
    if at_root is not None:
        root = root * at_root
    if op == "avg":
        # Not by a number: CUDA's division by one multiplies by its reciprocal, which rounds twice.
        root = root / torch.full((1,), float(world), dtype=acc_dtype, device=root.device)
    return _cast(root, dtype)


def _kernel(rows_WN: Tensor) -> Callable[..., Tensor] | None:
    """The kernel that folds a schedule; None where a CUDA device is without triton."""
    try:
        fold_rows: Callable[..., Tensor] = devices.kernels_of(rows_WN).fold
    except PlanError:
        return None
    return fold_rows


class _Leaves(Sequence[Tensor]):
    """Leaf r = row r in the accumulation dtype, times its factor; made when the fold comes to it."""

    def __init__(self, rows_WN: Tensor, acc_dtype: torch.dtype, factors_W: Tensor | None) -> None:
        self._rows, self._acc_dtype, self._factors = rows_WN, acc_dtype, factors_W

    def __len__(self) -> int:
        return self._rows.shape[0]

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, at: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        leaf = self._rows[at].to(self._acc_dtype)
        return leaf if self._factors is None else leaf * self._factors[at]


def _placed(factors_W: Tensor, acc_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(factor of each leaf, factor of the root): one of the two is 1, and multiplying by 1 changes no value.

    Decided on the device, since the host need not know the other ranks' factors.
    """
    bits = factors_W.view(torch.int64)
    is_one_factor = (bits == bits[0]).all()
    one = torch.ones_like(factors_W)
    at_leaf = torch.where(is_one_factor, one, factors_W).to(acc_dtype)
    return at_leaf, torch.where(is_one_factor, factors_W, one)[:1].to(acc_dtype)


def _maximum(left: Tensor, right: Tensor) -> Tensor:
    """NaN wins; of two zeros +0, which their sum is unless both are -0."""
    return torch.where((left == 0) & (right == 0), left + right, torch.maximum(left, right))


def _minimum(left: Tensor, right: Tensor) -> Tensor:
    return -_maximum(-left, -right)


def _cast(root: Tensor, dtype: torch.dtype) -> Tensor:
    """One rounding, NaN canonical; a new tensor."""
    integer, pattern = _NAN[dtype]
    return torch.where(root.isnan(), pattern, root.to(dtype).view(integer)).view(dtype)


_FLOAT_PAIRS: dict[str, _Pair] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": _minimum,
    "max": _maximum,
}
_INTEGER_PAIRS: dict[str, _Pair] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_BOOL_PAIRS: dict[str, _Pair] = {
    "sum": torch.logical_or,
    "max": torch.logical_or,
    "bor": torch.logical_or,
    "product": torch.logical_and,
    "min": torch.logical_and,
    "band": torch.logical_and,
    "bxor": torch.logical_xor,
}
