"""How a row is cut for the kernels that sum over it (ORDER.md A9): all 16 lanes of all its blocks at once.

One program takes `rows` rows; lane l of block b stands at element l + 16 b of a register vector of `width` and adds its
(up to 32) elements ascending. Tiles depend on K alone, never on the number of rows. No triton here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tbik.errors import PlanError
from tbik.reference import LANES, ROW_BLOCK

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 8192  # lanes in registers: rows of up to 512 blocks of 512
_LANES_PER_PROGRAM = 512


class RowTile(NamedTuple):
    rows: int
    width: int  # lanes of all blocks, a power of two
    levels: int  # width = 2^levels
    steps: int  # elements per lane
    num_warps: int

    def constants(self) -> dict[str, Any]:
        return {"ROWS": self.rows, "WIDTH": self.width, "LEVELS": self.levels, "num_warps": self.num_warps}


def row_tile(where: str, length: int) -> RowTile:
    """The tile of rows of `length` elements. Errors: PlanError for rows that do not fit."""
    num_blocks = max(1, -(-length // ROW_BLOCK))
    levels = (LANES * num_blocks - 1).bit_length()
    width = 1 << levels
    if width > MAX_WIDTH:
        raise PlanError(f"{where}: rows have up to {MAX_WIDTH // LANES * ROW_BLOCK} elements on CUDA, got {length}")
    rows = max(1, _LANES_PER_PROGRAM // width)
    return RowTile(rows, width, levels, min(ROW_BLOCK // LANES, -(-length // LANES)), 8 if width > 1024 else 4)


def require_rows(where: str, *tensors: Tensor | None) -> None:
    """PlanError unless all are dense rows [..., K] in bf16, fp16 or fp32."""
    for t in tensors:
        if t is not None and (t.dtype not in DTYPES or t.dim() < 1 or not t.is_contiguous()):
            raise PlanError(
                f"{where}: expected contiguous rows [..., K] in bfloat16, float16 or float32, "
                f"got {t.dtype} {list(t.shape)} with strides {t.stride()}"
            )


def dense(t: Tensor) -> Tensor:
    """t, contiguous, as its numbers read."""
    return t.resolve_neg().contiguous()


def dense_rows(t: Tensor) -> Tensor:
    """t [..., K] as [T, K] with elements side by side: a view where the strides allow it."""
    rows = t.resolve_neg().reshape(-1, t.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] <= 1 else rows.contiguous()


@lru_cache(maxsize=1024)
def device_integers(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 values on the device. Kept: a copy in every call would cost more, and a CUDA graph captures none."""
    return torch.tensor(values, dtype=torch.int64, device=device)
