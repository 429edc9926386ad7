"""The contraction of a linear layer as a tree: chains over leaves of K, folded by a schedule (ORDER.md A1-A7, L1, L2).

    leaf_i[m, n] = chain over members s, then k in member s's leaf i, of a_s[m, k] b_s[n, k]
    out = cast(root of the leaves + bias), or the nodes of a cover [C, M, N] in acc_dtype

Suffixes: M rows, N columns, K contraction, S members (linears that share dX).
Two forms, same bits: *whole*, one program per tile and all leaves (persistent; what the tree leaves pending waits in
registers up to `register_levels`, above that in a scratch buffer of the program, which stays in L2), and *split*, one
program per (tile, leaf) with partials in acc_dtype, then `combine`. *described* is whole with operands that come by
tensor descriptors (TMA, sm_90 and above): one member, K side by side, leaves of whole K steps. Inside a leaf both read
the same elements for the same instructions in the same order, and a descriptor's +0 past the last row or column is
never stored: equal by construction, and compared. Not chosen on its own before it has been measured.
Leaves: "fma" is the ascending chain of the CPU, with its flush rule, slow, for audits; "mma" is one tensor-core dot per
K step, ascending, fp32 accumulation, never tf32. Bits: fma as tbik.reference, mma of one architecture; both
batch-invariant and layout-invariant (tests/test_kernels_matmul.py). Not yet measured on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tbik.errors import PlanError
from tbik.kernels import arithmetic, combine, folding
from tbik.kernels.tiles import FMA, Tile, tiles_for

GROUP_M = 8  # tiles of M that share the columns they read, one after the other
MAX_GRANULE = 64
DESCRIBED_LEAVES = ("mma:sm_90", "mma:sm_100")

Form = Literal["auto", "whole", "split", "described"]


@triton.jit
def _chain(
    acc,
    a_ptr,
    b_ptr,
    rows,
    cols,
    first,
    end,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    a_desc,
    b_desc,
    LEAF: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDENS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """acc, continued by a[m, k] b[n, k] for k = first .. end - 1."""
    length = (end - first).to(tl.int32)
    if DESCRIBED:  # rows and cols are the tile's first ones
        start = first.to(tl.int32)
        for k in range(0, length, BLOCK_K):
            a = a_desc.load([rows, start + k])
            b = b_desc.load([cols, start + k])
            if WIDENS:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
    elif LEAF == "mma":
        steps = tl.arange(0, BLOCK_K)
        k_at = first + steps
        a_at = a_ptr + (rows[:, None] * stride_am + k_at[None, :] * stride_ak)
        b_at = b_ptr + (cols[None, :] * stride_bn + k_at[:, None] * stride_bk)
        for k in range(0, length, BLOCK_K):
            if EVEN_K:
                a = tl.load(a_at)
                b = tl.load(b_at)
            else:
                is_live = steps < length - k
                a = tl.load(a_at, mask=is_live[None, :], other=0.0)
                b = tl.load(b_at, mask=is_live[:, None], other=0.0)
            if WIDENS:  # the interpreter multiplies bf16 as integers
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, b, acc, input_precision="ieee")
            a_at += BLOCK_K * tl.cast(stride_ak, tl.int64)
            b_at += BLOCK_K * tl.cast(stride_bk, tl.int64)
    else:
        a_at = a_ptr + (rows * stride_am + first * stride_ak)
        b_at = b_ptr + (cols * stride_bn + first * stride_bk)
        for _ in range(0, length):
            a = tl.load(a_at).to(acc.dtype)[:, None]
            b = tl.load(b_at).to(acc.dtype)[None, :]
            if acc.dtype == tl.float32:
                acc = arithmetic.fma_flushed(arithmetic.flush(a), arithmetic.flush(b), acc)
            else:
                acc = tl.fma(a, b, acc)
            a_at += tl.cast(stride_ak, tl.int64)
            b_at += tl.cast(stride_bk, tl.int64)
    return acc


@triton.jit
def _leaf(
    spans_ptr,
    rows,
    cols,
    a_ptrs,
    b_ptrs,
    strides_am,
    strides_ak,
    strides_bn,
    strides_bk,
    a_desc,
    b_desc,
    GRANULE: tl.constexpr,
    LEAF: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDENS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One leaf: a single accumulator that all members continue, then + (+0.0)."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), ACC)
    for s in tl.static_range(len(a_ptrs)):
        # in units of the granule, so that the compiler knows how far the addresses are aligned
        first = tl.load(spans_ptr + tl.cast(2 * s, tl.int64)) * GRANULE
        end = tl.load(spans_ptr + tl.cast(2 * s + 1, tl.int64)) * GRANULE
        acc = _chain(
            acc,
            a_ptrs[s],
            b_ptrs[s],
            rows,
            cols,
            first,
            end,
            strides_am[s],
            strides_ak[s],
            strides_bn[s],
            strides_bk[s],
            a_desc,
            b_desc,
            LEAF,
            EVEN_K,
            WIDENS,
            DESCRIBED,
            BLOCK_K,
        )
    return acc + 0.0


@triton.jit
def _tile_of(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of a tile; GROUP_M tiles of M stand after each other and share their columns in L2."""
    tiles_n = tl.cdiv(n, BLOCK_N)
    per_group = GROUP_M * tiles_n
    first_m = tile // per_group * GROUP_M
    group_m = tl.minimum(tl.cdiv(m, BLOCK_M) - first_m, GROUP_M)
    inside = tile % per_group
    return (first_m + inside % group_m) * BLOCK_M, inside // group_m * BLOCK_N


@triton.jit
def whole_kernel(
    a_ptrs,
    b_ptrs,
    bias_ptr,
    out_ptr,
    scratch_ptr,
    pushes_ptr,
    spans_ptr,
    m,
    n,
    num_groups,
    num_outputs,
    strides_am,
    strides_ak,
    strides_bn,
    strides_bk,
    scratch_slots,
    a_desc,
    b_desc,
    INNER_ADDS: tl.constexpr,
    NARROW: tl.constexpr,
    IS_ROOT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GRANULE: tl.constexpr,
    LEAF: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDENS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """Persistent: a program takes every num_programs-th tile and folds all leaves of each."""
    GROUP: tl.constexpr = len(INNER_ADDS)
    MEMBERS: tl.constexpr = len(a_ptrs)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    in_tile = (tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]).to(tl.int64)
    scratch_at = scratch_ptr + tl.cast(tl.program_id(0), tl.int64) * tl.cast(scratch_slots, tl.int64) * TILE + in_tile
    plane = tl.cast(m, tl.int64) * tl.cast(n, tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N), tl.num_programs(0)):
        first_m, first_n = _tile_of(tile, m, n, BLOCK_M, BLOCK_N, GROUP_M)
        rows = first_m + tl.arange(0, BLOCK_M)
        cols = first_n + tl.arange(0, BLOCK_N)
        is_inside = (rows < m)[:, None] & (cols < n)[None, :]
        # rows and columns past the end read the last one again and are never stored
        a_rows = tl.minimum(rows, m - 1).to(tl.int64)
        b_cols = tl.minimum(cols, n - 1).to(tl.int64)
        if DESCRIBED:
            a_rows = first_m
            b_cols = first_n
        value = tl.zeros((BLOCK_M, BLOCK_N), ACC)
        for group in range(0, num_groups):
            slot = tl.load(pushes_ptr + tl.cast(3 * group, tl.int64)).to(tl.int32)
            adds = tl.load(pushes_ptr + tl.cast(3 * group + 1, tl.int64)).to(tl.int32)
            plain = tl.load(pushes_ptr + tl.cast(3 * group + 2, tl.int64)).to(tl.int32)
            if slot > 0:  # what stood on top waits below the new value
                tl.store(scratch_at + tl.cast(slot - 1, tl.int64) * TILE, value)
            stack = ()
            for push in tl.static_range(GROUP):
                value = _leaf(
                    spans_ptr + tl.cast(group * GROUP + push, tl.int64) * (2 * MEMBERS),
                    a_rows,
                    b_cols,
                    a_ptrs,
                    b_ptrs,
                    strides_am,
                    strides_ak,
                    strides_bn,
                    strides_bk,
                    a_desc,
                    b_desc,
                    GRANULE,
                    LEAF,
                    EVEN_K,
                    WIDENS,
                    DESCRIBED,
                    ACC,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                )
                if NARROW == "always":
                    value = arithmetic.narrow(value)
                if NARROW == "some":  # noqa: SIM102  (decided when compiled, then when run)
                    if plain == 0:
                        value = arithmetic.narrow(value)
                for _ in tl.static_range(tl.constexpr(INNER_ADDS[push])):
                    value = stack[len(stack) - 1] + value
                    stack = stack[: len(stack) - 1]
                    if NARROW == "always":
                        value = arithmetic.narrow(value)
                stack = stack + (value,)  # noqa: RUF005  (triton has no starred tuples)
            tl.debug_barrier()  # whoever stored a value in scratch may be another thread than who loads it
            for add in range(0, adds):
                value = tl.load(scratch_at + tl.cast(slot - 1 - add, tl.int64) * TILE) + value
                if NARROW == "always":
                    value = arithmetic.narrow(value)
                if NARROW == "some":  # noqa: SIM102
                    if add + 1 >= plain:
                        value = arithmetic.narrow(value)
            tl.debug_barrier()
        out_at = out_ptr + (rows.to(tl.int64)[:, None] * n + cols[None, :])
        if IS_ROOT:
            if HAS_BIAS:
                value = value + tl.load(bias_ptr + cols.to(tl.int64), mask=cols < n, other=0.0).to(ACC)[None, :]
            tl.store(out_at, arithmetic.cast(value, out_ptr.dtype.element_ty), mask=is_inside)
        else:
            for node in range(0, num_outputs - 1):
                below = tl.load(scratch_at + tl.cast(node, tl.int64) * TILE)
                tl.store(out_at + tl.cast(node, tl.int64) * plane, below, mask=is_inside)
            tl.store(out_at + tl.cast(num_outputs - 1, tl.int64) * plane, value, mask=is_inside)
            tl.debug_barrier()


@triton.jit
def split_kernel(
    a_ptrs,
    b_ptrs,
    out_ptr,
    spans_ptr,
    m,
    n,
    strides_am,
    strides_ak,
    strides_bn,
    strides_bk,
    GRANULE: tl.constexpr,
    LEAF: tl.constexpr,
    EVEN_K: tl.constexpr,
    WIDENS: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One program per (tile, push): the leaf, as it is, to out[push]."""
    push = tl.program_id(1).to(tl.int64)
    first_m, first_n = _tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = first_m + tl.arange(0, BLOCK_M)
    cols = first_n + tl.arange(0, BLOCK_N)
    value = _leaf(
        spans_ptr + push * (2 * len(a_ptrs)),
        tl.minimum(rows, m - 1).to(tl.int64),
        tl.minimum(cols, n - 1).to(tl.int64),
        a_ptrs,
        b_ptrs,
        strides_am,
        strides_ak,
        strides_bn,
        strides_bk,
        out_ptr,
        out_ptr,
        GRANULE,
        LEAF,
        EVEN_K,
        WIDENS,
        False,
        ACC,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    plane = tl.cast(m, tl.int64) * tl.cast(n, tl.int64)
    out_at = out_ptr + push * plane + (rows.to(tl.int64)[:, None] * n + cols[None, :])
    tl.store(out_at, value, mask=(rows < m)[:, None] & (cols < n)[None, :])


# --- launch ---------------------------------------------------------------------------------------------------------


def contract(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    cuts: Sequence[Sequence[int]],
    schedule: Any,
    *,
    leaf: str,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    a_k_major: bool = False,
    b_k_major: bool = False,
    form: Form = "auto",
    tile: Tile | None = None,
) -> Tensor:
    """out[m, n] = cast(fold of the leaves of sum_s a_s[m, k] b_s[n, k] + bias[n]), or the nodes of a cover [C, M, N].

    a_s [M, k_s] (a_k_major: [k_s, M]), b_s [N, k_s] (b_k_major: [k_s, N]), any strides, one dtype: bf16 or fp16 for
    leaf "mma:<architecture>", also fp32 or fp64 for leaf "fma". cuts: offsets of the leaves in each member.
    schedule: a tbik._C.Schedule of those leaves. form, tile: for tests and measurements; they change no bit.
    Errors: PlanError. Batch-invariant, layout-invariant.
    """
    acc = torch.float64 if a[0].dtype == torch.float64 else torch.float32
    m, n = a[0].shape[1 if a_k_major else 0], b[0].shape[1 if b_k_major else 0]
    _require(a, b, schedule, leaf, acc, out_dtype)
    fold = folding.fold_of(schedule)
    out = a[0].new_empty((m, n) if schedule.is_root else (fold.num_outputs, m, n), dtype=out_dtype)
    if out.numel() == 0:
        return out
    strides_a = [t.stride()[::-1] if a_k_major else t.stride() for t in a]
    strides_b = [t.stride()[::-1] if b_k_major else t.stride() for t in b]
    spans = tuple(tuple(member) for member in cuts)
    tiles = tiles_for(leaf, "float64" if acc == torch.float64 else "float32")
    whole = tiles.dw if a_k_major else tiles.group if len(a) > 1 else tiles.dx if b_k_major else tiles.whole
    num_programs = _num_programs(out.device)
    is_split = _is_split(form, fold, whole, m, n, num_programs)
    if tile is None:
        tile = tiles.split if is_split else whole
        if not _is_aligned([*a, *b], [*strides_a, *strides_b], spans):
            tile = tiles.unaligned
    table = _table(schedule, spans, 0 if is_split else tile.register_levels, tile.block_k, out.device)
    shared: dict[str, Any] = {
        "strides_am": tuple(s[0] for s in strides_a),
        "strides_ak": tuple(s[1] for s in strides_a),
        "strides_bn": tuple(s[0] for s in strides_b),
        "strides_bk": tuple(s[1] for s in strides_b),
        "GRANULE": table.granule,
        "LEAF": FMA if leaf == FMA else "mma",
        "EVEN_K": table.is_even,
        "WIDENS": is_interpreted() and a[0].dtype != torch.float64,
        "ACC": arithmetic.triton_dtype(acc),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": GROUP_M,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **arithmetic.OPTIONS,
    }
    num_tiles = triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
    if is_split:
        partials = out.new_empty((len(fold.pushes), m, n), dtype=acc)
        split_kernel[(num_tiles, len(fold.pushes))](tuple(a), tuple(b), partials, table.spans, m, n, **shared)
        return combine.combine_pushes(partials, fold, schedule.is_root, bias=bias, out_dtype=out_dtype)
    descriptors: tuple[Any, Any] = (out, out)
    if form == "described":
        _require_described(a, b, strides_a, strides_b, table.is_even, leaf)
        descriptors = (_descriptor(a[0], tile.block_m, tile.block_k), _descriptor(b[0], tile.block_n, tile.block_k))
    grid = min(num_tiles, num_programs)
    scratch = out.new_empty((grid, max(table.num_slots - 1, 1), tile.block_m, tile.block_n), dtype=acc)
    whole_kernel[(grid,)](
        tuple(a),
        tuple(b),
        out if bias is None else bias,
        out,
        scratch,
        table.pushes,
        table.spans,
        m,
        n,
        table.num_pushes,
        fold.num_outputs,
        scratch_slots=scratch.shape[1],
        a_desc=descriptors[0],
        b_desc=descriptors[1],
        DESCRIBED=form == "described",
        INNER_ADDS=table.inner,
        NARROW=fold.narrow,
        IS_ROOT=schedule.is_root,
        HAS_BIAS=bias is not None,
        **shared,
    )
    return out


def is_interpreted() -> bool:
    """Whether TRITON_INTERPRET was set when this file was imported: kernels then run on the CPU, in numpy."""
    return not isinstance(whole_kernel, triton.runtime.JITFunction)


def _descriptor(t: Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, columns])


def _require_described(
    a: Sequence[Tensor], b: Sequence[Tensor], strides_a: Any, strides_b: Any, is_even: bool, leaf: str
) -> None:
    """PlanError unless tensor descriptors read the same elements as pointers."""
    lies = all(strides[1] == 1 and strides[0] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
               for strides, t in ((strides_a[0], a[0]), (strides_b[0], b[0])))  # fmt: skip
    if len(a) != 1 or not is_even or not lies or leaf not in DESCRIBED_LEAVES:
        raise PlanError(
            f"kernels.matmul: tensor descriptors need one member with K side by side, rows at multiples of 16 bytes, "
            f"leaves of whole K steps and a leaf of {DESCRIBED_LEAVES}, got {len(a)} members, strides {strides_a[0]} "
            f"and {strides_b[0]}, leaf {leaf!r}; use form='whole'"
        )


class _Table(NamedTuple):
    pushes: Tensor  # int64 [pushes, 3]: slot, adds, plain
    spans: Tensor  # int64 [leaves, members, 2], in granules
    num_pushes: int
    num_slots: int
    inner: tuple[int, ...]
    granule: int
    is_even: bool


@lru_cache(maxsize=1024)
def _table(
    schedule: Any, cuts: tuple[tuple[int, ...], ...], register_levels: int, block_k: int, device: torch.device
) -> _Table:
    """What the kernels read of a schedule, on the device. Kept: a copy to the device in every call would cost more."""
    fold = folding.fold_of(schedule)
    groups = next(g for g in (folding.group(fold, r) for r in range(register_levels, -1, -1)) if g is not None)
    leaves = folding.spans(groups.sources, cuts)
    offsets = [offset for spans in leaves for span in spans for offset in span]
    granule = math.gcd(MAX_GRANULE, *offsets)
    return _Table(
        torch.tensor([push[1:] for push in groups.pushes], dtype=torch.int64, device=device),
        torch.tensor([offset // granule for offset in offsets], dtype=torch.int64, device=device),
        len(groups.pushes),
        groups.num_slots,
        groups.inner,
        granule,
        all((end - first) % block_k == 0 for spans in leaves for first, end in spans),
    )


def _is_aligned(
    operands: Sequence[Tensor], strides: Sequence[tuple[int, ...]], cuts: tuple[tuple[int, ...], ...]
) -> bool:
    """Whether every operand has 16 bytes in a row along one axis, from every leaf's first element on."""
    width = 16 // operands[0].element_size()
    if any(cut % width for member in cuts for cut in member):
        return False
    return all(
        t.data_ptr() % 16 == 0 and any(inner == 1 and outer % width == 0 for inner, outer in (pair, pair[::-1]))
        for t, pair in zip(operands, strides, strict=True)
    )


def _is_split(form: Form, fold: folding.Fold, whole: Tile, m: int, n: int, num_programs: int) -> bool:
    if form != "auto":
        return form == "split"
    # By the number of tiles, so by M: allowed because both forms have the same leaves.
    num_tiles = triton.cdiv(m, whole.block_m) * triton.cdiv(n, whole.block_n)
    return len(fold.pushes) <= combine.MAX_INPUTS and 2 * num_tiles <= num_programs


@lru_cache(maxsize=16)
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _require(a: Sequence[Tensor], b: Sequence[Tensor], schedule: Any, leaf: str, acc: Any, out_dtype: Any) -> None:
    where = "kernels.matmul"
    dtypes = {t.dtype for t in (*a, *b)}
    if len(dtypes) != 1 or len(a) != len(b):
        raise PlanError(
            f"{where}: expected one a and one b per member, all in one dtype, got {sorted(map(str, dtypes))}"
        )
    if leaf != FMA and not dtypes <= {torch.bfloat16, torch.float16}:
        raise PlanError(
            f"{where}: tensor-core leaves ({leaf!r}) multiply bfloat16 or float16, got {dtypes.pop()}; use leaf='fma'"
        )
    if not schedule.is_root and out_dtype != acc:
        raise PlanError(f"{where}: a cover leaves in {acc}, got out_dtype {out_dtype}")
