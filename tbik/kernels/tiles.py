"""Tile tables by (architecture, dtype), never by the number of rows: a table that looked at M could change the leaf.

Both forms of the matmul use the same instruction and the same K step (`block_k`), so that a leaf has the same bits in
both; bench/gpu.py compares them. The numbers come from what compiles without spills (bench/results/gpu_compile.md),
not from measurements. No triton here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from tbik.errors import PlanError

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
FMA = "fma"


class Tile(NamedTuple):
    """One compiled form of a matmul."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    register_levels: int
    """Levels of the tree whose pending values stay in registers; those above wait in a scratch buffer."""


class Tiles(NamedTuple):
    """Forms with one program per tile and all leaves, then `split`. Operands in an order that has long strides along K
    take more registers for their addresses, hence other tiles; none changes a bit."""

    whole: Tile
    dx: Tile  # b [k, N]
    group: Tile  # the same with several members
    dw: Tile  # a [k, M], b [k, N]
    split: Tile  # one program per (tile, leaf): few rows
    unaligned: Tile  # any form where 16 bytes along K do not lie together: loads of single elements pass registers


# Which m16n8k16, wgmma or tcgen05 instruction a tile becomes is checked in bench/gpu_compile.py. 64 rows are the least
# for wgmma: fewer would be another instruction.
MMA_TILES = {
    "sm_80": Tiles(
        whole=Tile(128, 64, 64, 8, 3, 1),
        dx=Tile(128, 64, 64, 8, 3, 1),
        group=Tile(64, 64, 64, 4, 3, 0),
        dw=Tile(64, 64, 64, 8, 3, 0),
        split=Tile(64, 64, 64, 4, 3, 0),
        unaligned=Tile(64, 64, 64, 8, 2, 0),
    ),
    "sm_90": Tiles(
        whole=Tile(128, 128, 64, 8, 4, 1),
        dx=Tile(128, 128, 64, 8, 4, 0),
        group=Tile(128, 64, 64, 8, 4, 1),
        dw=Tile(128, 64, 64, 8, 4, 0),
        split=Tile(64, 64, 64, 4, 4, 0),
        unaligned=Tile(64, 64, 64, 8, 2, 0),
    ),
    "sm_100": Tiles(
        whole=Tile(128, 128, 64, 8, 4, 1),
        dx=Tile(128, 128, 64, 8, 4, 1),
        group=Tile(128, 64, 64, 8, 4, 1),
        dw=Tile(128, 64, 64, 8, 4, 0),
        split=Tile(128, 64, 64, 8, 4, 0),
        unaligned=Tile(128, 64, 64, 8, 1, 0),
    ),
}
_FMA = Tile(32, 32, 1, 4, 1, 0)
FMA_TILES = Tiles(_FMA, _FMA, _FMA, _FMA, _FMA, _FMA)


def tiles_for(leaf: str, acc_dtype: str) -> Tiles:
    """leaf: "fma" or "mma:<architecture>"; acc_dtype: "float32" or "float64"."""
    if leaf == FMA:
        return FMA_TILES
    architecture = leaf.removeprefix("mma:")
    if architecture not in MMA_TILES or acc_dtype != "float32":
        raise PlanError(
            f"kernels.tiles: tensor-core leaves exist for {ARCHITECTURES} with acc_dtype float32, "
            f"got {leaf!r} with {acc_dtype}; use leaf='fma'"
        )
    return MMA_TILES[architecture]


class AttentionTile(NamedTuple):
    """One compiled form of attention. None changes a bit."""

    rows: int
    """Queries x query heads of a KV head in a program of the forward and of dQ."""
    keys: int
    """Keys in a program of dK and dV; at most the 64 of a block."""
    num_warps: int
    num_stages: int
    parts: int = 1
    """Programs of the forward and of dQ that share head_dim of their outputs; each computes the scores."""
    is_divided: bool = False
    """dK and dV by a program each, which both compute the scores, in place of one."""


_FMA_ATTENTION = AttentionTile(16, 16, 4, 1)


def attention_tile(
    leaf: str,
    head_dim: int,
    kernel: Literal["forward", "dq", "dkv", "dk", "dv"],
    *,
    has_window: bool = False,
    drops: bool = False,
) -> AttentionTile:
    """The tile of a kernel by architecture, head_dim and masks, for any number of queries: prefill and decoding have
    the same bits. "dk" and "dv" are the two programs of a "dkv" that is_divided."""
    if leaf == FMA:
        return _FMA_ATTENTION
    architecture = leaf.removeprefix("mma:")
    if architecture not in MMA_TILES:
        raise PlanError(f"kernels.tiles: tensor-core leaves exist for {ARCHITECTURES}, got {leaf!r}; use leaf='fma'")
    is_wide = head_dim > 128
    if architecture == "sm_80":
        stages = 1 if drops and kernel in ("forward", "dq") else 2
        if kernel == "forward":
            return AttentionTile(64, 32, 4, stages, parts=2 if is_wide else 1)
        return AttentionTile(64, 32, 4 if kernel == "dq" and not is_wide else 8, stages, is_divided=is_wide)
    # 64 rows are the least for wgmma. With a window a block's sums wait beside the former ones in registers
    tile = AttentionTile(64, 64, 8, 2, parts=2 if is_wide and has_window and kernel == "forward" else 1)
    if architecture == "sm_90" and is_wide:
        return tile._replace(num_stages=1 if kernel == "dv" else 2, is_divided=True)
    if architecture == "sm_100" and is_wide and kernel == "dkv":
        return tile._replace(num_stages=1)  # two would take more shared memory than there is
    return tile
