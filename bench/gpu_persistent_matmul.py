"""y[m, n] = cast(sum over k ascending, by K steps of one tile, of x[m, k] w[n, k]): a matmul to compare with.

What one would write who wants a row's bits not to depend on the batch, and no more: one accumulator over all of K, so
that there is no tree, no leaf, no split of K; a tile that (architecture, dtype) choose and M never does. It is
batch-invariant, not layout-invariant: a K that is cut over ranks is another sum. What the tree costs on top of that is
the ratio of the two in the part "linear" of bench/gpu.py. Not measured on a GPU yet.

x [M, K], w [N, K], bf16 or fp16, K side by side in both -> y [M, N] in their dtype.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.kernels.matmul import is_interpreted


class Tile(NamedTuple):
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# By (architecture, dtype) alone. No spills: python bench/gpu_persistent_matmul.py
TILES = {
    ("sm_80", torch.bfloat16): Tile(128, 128, 64, 8, 3),
    ("sm_80", torch.float16): Tile(128, 128, 64, 8, 3),
    ("sm_90", torch.bfloat16): Tile(128, 256, 64, 8, 3),
    ("sm_90", torch.float16): Tile(128, 256, 64, 8, 3),
    ("sm_100", torch.bfloat16): Tile(128, 256, 64, 8, 3),
    ("sm_100", torch.float16): Tile(128, 256, 64, 8, 3),
}
# Where K is no whole number of steps: loads of single elements pass registers. K is the layer's, not the batch's.
RAGGED = Tile(128, 64, 64, 8, 2)
GROUP_M = 8  # tiles of w's columns that are taken before the next rows: they lie in the L2 cache then


@triton.jit
def persistent_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    m,
    n,
    k,
    row_x,
    row_w,
    row_y,
    EVEN_K: tl.constexpr,
    WIDENS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    down, across = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    for tile in range(tl.program_id(0), down * across, tl.num_programs(0)):
        band = tile // (GROUP_M * across)
        height = tl.minimum(down - band * GROUP_M, GROUP_M)
        inside = tile % (GROUP_M * across)
        rows = (band * GROUP_M + inside % height) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = (inside // height) * BLOCK_N + tl.arange(0, BLOCK_N)
        # rows past the end read the last one: what they give is not stored
        x_row = x_ptr + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * row_x
        w_row = w_ptr + tl.minimum(cols, n - 1).to(tl.int64)[None, :] * row_w
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, k, BLOCK_K):
            at = first + tl.arange(0, BLOCK_K)
            if EVEN_K:
                x = tl.load(x_row + at[None, :])
                w = tl.load(w_row + at[:, None])
            else:
                x = tl.load(x_row + at[None, :], mask=at[None, :] < k, other=0.0)
                w = tl.load(w_row + at[:, None], mask=at[:, None] < k, other=0.0)
            if WIDENS:  # numpy has no bfloat16
                x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, w, acc)
        y_at = y_ptr + rows.to(tl.int64)[:, None] * row_y + cols[None, :]
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(rows < m)[:, None] & (cols < n)[None, :])


def persistent_matmul(x: Tensor, w: Tensor, architecture: str, tile: Tile | None = None) -> Tensor:
    """Errors: ValueError for another layout or dtype. tile: a small one for the interpreter."""
    m, k = x.shape
    n = w.shape[0]
    if x.dtype != w.dtype or (architecture, x.dtype) not in TILES or x.stride(1) != 1 or w.stride(1) != 1:
        raise ValueError(
            f"persistent_matmul: expected bf16 or fp16 with K side by side on {sorted({a for a, _ in TILES})}, got "
            f"{x.dtype} {x.stride()}, {w.dtype} {w.stride()} on {architecture}"
        )
    if tile is None:
        tile = TILES[architecture, x.dtype]
        tile = tile if k % tile.block_k == 0 else RAGGED
    y = x.new_empty(m, n)
    tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
    on_cuda = x.device.type == "cuda"
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if on_cuda else 2
    persistent_kernel[(min(tiles, programs),)](
        x,
        w,
        y,
        m,
        n,
        k,
        x.stride(0),
        w.stride(0),
        y.stride(0),
        EVEN_K=k % tile.block_k == 0,
        WIDENS=is_interpreted(),
        GROUP_M=GROUP_M,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def compile_all() -> list[dict[str, Any]]:
    """Registers, spills and instructions of every tile, by ptxas, without a GPU."""
    import re

    from gpu_compile import ARCHITECTURES, Capture, resources

    rows = []
    for architecture in ARCHITECTURES:
        for dtype in (torch.bfloat16, torch.float16):
            for k in (1024, 1000):
                x, w = (torch.empty(256, k, dtype=dtype) for _ in range(2))
                work = lambda x=x, w=w, architecture=architecture: persistent_matmul(x, w, architecture)  # noqa: E731
                for _, kernel in Capture(architecture).run(work):
                    ptx = kernel.asm["ptx"]
                    used = sorted(set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", ptx)))
                    row = {"architecture": architecture, "dtype": str(dtype), "k": k, "shared": kernel.metadata.shared}
                    rows.append(row | resources(ptx) | {"instructions": used})
    return rows


if __name__ == "__main__":
    for line in compile_all():
        print(line)
