"""Tile tables by (architecture, dtype), never by the number of rows: a table that looked at M could change the leaf.

Both forms of the matmul use the same instruction and the same K step (`block_k`), so that a leaf has the same bits in
both; bench/gpu.py compares them. The numbers come from what compiles without spills (bench/results/gpu_compile.md),
not from measurements. No triton here.
"""

from __future__ import annotations

from typing import NamedTuple

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
    """One compiled form of attention: rows = queries x query heads of a KV head; keys of a program of dK and dV."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def attention_tile(leaf: str, head_dim: int) -> AttentionTile:
    """The tile by (architecture, head_dim), for any number of queries: prefill and decoding have the same bits."""
    if leaf == FMA:
        return AttentionTile(16, 16, 4, 1)
    architecture = leaf.removeprefix("mma:")
    if architecture not in MMA_TILES:
        raise PlanError(f"kernels.tiles: tensor-core leaves exist for {ARCHITECTURES}, got {leaf!r}; use leaf='fma'")
    # 64 rows are the least for wgmma; sm_80 needs none, and with 32 keys dK and dV stay in registers
    keys = 32 if architecture == "sm_80" else 64
    return AttentionTile(64, keys, 8, 2 if head_dim <= 128 else 1)
