"""Where the elements of a local tensor stand in the whole one. Integers; no value is read and no rank is asked.

    index(j_0, j_1, ...) = first + sum_d j_d * index_strides[d]          row-major, in the unsharded, unpadded tensor

    Piece.box(local, shape, offset, step)   local[j] = whole[offset + step*j]         rows, columns, every n-th row
    Piece.flat(local, shape, start)         local[j] = whole.flatten()[start + j]     flat shards (FSDP1, ZeRO)
    Piece(local, shape, first, index_strides)                                         any other strided box
    split_dtensor(x)                        the local part of a DTensor as boxes

Padding is no part of a piece: hand over the unpadded view. Errors: PlanError at construction.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from tbik.errors import PlanError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MAX_NUMEL = 2**63 - 1


class Box(NamedTuple):
    """local elements and their indices in a whole tensor: first + sum_d j_d * index_strides[d]."""

    local: Tensor
    first: int
    index_strides: tuple[int, ...]

    def numel(self) -> int:
        return self.local.numel()

    def index_sum(self) -> int:
        """Sum of the indices of all elements, an exact integer."""
        n = self.numel()
        spread = sum(stride * (size - 1) for stride, size in zip(self.index_strides, self.local.shape))
        return n * self.first + n * spread // 2 if n else 0

    def canonical(self) -> tuple[tuple[int, int], ...]:
        """The set of indices, the same for two boxes that hold the same elements in whatever dimensions."""
        if not self.numel():
            return ()
        dims = sorted((stride, size) for stride, size in zip(self.index_strides, self.local.shape) if size > 1)
        merged: list[tuple[int, int]] = []
        for stride, size in dims:
            if merged and stride == merged[-1][0] * merged[-1][1]:
                merged[-1] = (merged[-1][0], merged[-1][1] * size)
            else:
                merged.append((stride, size))
        return ((self.first, 1), *merged)


@dataclass(frozen=True, eq=False)
class Piece:
    """This rank's part of a tensor of `shape`: local[j_0, ...] has row-major index first + sum_d j_d*index_strides[d].

    local: a tensor, or a DTensor that holds the piece over a mesh of its own (FSDP over a TP shard). May be empty.
    Errors: PlanError unless every element has an index of its own below the size of `shape`.
    """

    local: Tensor
    shape: tuple[int, ...]
    first: int
    index_strides: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.local, Tensor):
            raise PlanError(f"Piece.local: expected a tensor, got {type(self.local).__name__}")
        object.__setattr__(self, "shape", _integers("Piece.shape", self.shape))
        object.__setattr__(self, "index_strides", _integers("Piece.index_strides", self.index_strides))
        (first,) = _integers("Piece.first", (self.first,))
        object.__setattr__(self, "first", first)
        if len(self.index_strides) != self.local.dim():
            raise PlanError(
                f"Piece.index_strides: expected one per dimension of local, {self.local.dim()}, got "
                f"{len(self.index_strides)}"
            )
        if not self.local.numel():
            return
        highest = self.first
        for stride, size in sorted(zip(self.index_strides, self.local.shape)):
            if size > 1 and stride <= highest - self.first:
                raise PlanError(
                    f"Piece: two elements of local {list(self.local.shape)} would have one index with index strides "
                    f"{list(self.index_strides)}; each stride must exceed the span of the smaller ones"
                )
            highest += stride * (size - 1)
        if highest >= _numel(self.shape):
            raise PlanError(
                f"Piece: local {list(self.local.shape)} would reach index {highest} of a tensor of {list(self.shape)} "
                f"with {_numel(self.shape)} elements; padding must be cut off before"
            )

    @classmethod
    def box(
        cls, local: Tensor, shape: Sequence[int], offset: Sequence[int], step: Sequence[int] | None = None
    ) -> Piece:
        """local[j_0, j_1, ...] = whole[offset_0 + step_0*j_0, offset_1 + step_1*j_1, ...]; step: 1 everywhere."""
        shape, offset = _integers("Piece.box: shape", shape), _integers("Piece.box: offset", offset)
        step = _integers("Piece.box: step", (1,) * len(shape) if step is None else step)
        if not isinstance(local, Tensor) or not local.dim() == len(shape) == len(offset) == len(step):
            raise PlanError(
                f"Piece.box: expected local, offset and step of as many dimensions as shape {list(shape)}, got local "
                f"{list(getattr(local, 'shape', []))}, offset {list(offset)}, step {list(step)}"
            )
        for d, size in enumerate(local.shape):
            if local.numel() and (step[d] < 1 or offset[d] + step[d] * (size - 1) >= shape[d]):
                raise PlanError(
                    f"Piece.box: dimension {d}: {size} elements from {offset[d]} in steps of {step[d]} do not lie in a "
                    f"dimension of {shape[d]}; padding must be cut off before"
                )
        strides = _row_major(shape)
        first = sum(map(operator.mul, offset, strides)) if local.numel() else 0
        return cls(local, shape, first, tuple(map(operator.mul, step, strides)))

    @classmethod
    def flat(cls, local: Tensor, shape: Sequence[int], start: int) -> Piece:
        """local [n] = whole.flatten()[start : start + n]."""
        if not isinstance(local, Tensor) or local.dim() != 1:
            raise PlanError(f"Piece.flat: expected a tensor of one dimension, got {list(getattr(local, 'shape', []))}")
        return cls(local, tuple(shape), start, (1,))


def whole(x: Tensor) -> Piece:
    """x is the whole tensor."""
    return Piece(x, tuple(x.shape), 0, _row_major(tuple(x.shape)))


def is_dtensor(x: object) -> bool:
    """Without importing torch.distributed.tensor where nobody uses it."""
    return isinstance(x, Tensor) and any(base.__name__ == "DTensor" for base in type(x).__mro__)


def boxes_of(piece: Piece, where: str) -> list[Box]:
    """The plain tensors of a piece on this rank."""
    if not is_dtensor(piece.local):
        return [Box(piece.local.detach(), piece.first, piece.index_strides)]
    boxes = []
    for local, offset in split_dtensor(cast("DTensor", piece.local), where):
        first = piece.first + sum(map(operator.mul, offset, piece.index_strides))
        boxes.append(Box(local, first, piece.index_strides))
    return boxes


def split_dtensor(x: DTensor, where: str) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """(local box, coordinates of its first element in x), for each contiguous box of this rank; none outside the mesh.

    Shard(d) over W ranks cuts what is there into chunks of ceil(n/W); _StridedShard(d, f) cuts into f chunks first,
    each of these into W, and takes the r-th of each; mesh dimensions from left to right.
    Errors: PlanError for Partial and placements of other kinds.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor.placement_types import _StridedShard

    order = getattr(x._spec, "shard_order", None)
    if order is not None and order != DTensorSpec.compute_default_shard_order(x.placements):
        raise PlanError(f"{where}: a DTensor sharded from left to right is supported, got the order {order}")
    coordinate = x.device_mesh.get_coordinate()
    if coordinate is None:
        return
    runs = [[range(size)] for size in x.shape]
    for mesh_dim, placement in enumerate(x.placements):
        if type(placement) not in (Shard, Replicate, _StridedShard):
            hint = "; redistribute it first: a partial sum has no value yet" if placement.is_partial() else ""
            raise PlanError(f"{where}: expected Shard, Replicate or _StridedShard, got {placement}{hint}")
        if type(placement) is Replicate:
            continue
        rank, ranks = coordinate[mesh_dim], x.device_mesh.size(mesh_dim)
        split = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        dim = cast(Shard, placement).dim
        parts = [_chunk(runs[dim], split, i) for i in range(split)]
        runs[dim] = [run for part in parts for run in _chunk(part, ranks, rank)]
    local = x._local_tensor.detach()
    expected = [sum(map(len, of_dim)) for of_dim in runs]
    if list(local.shape) != expected:
        raise PlanError(
            f"{where}: the placements {x.placements} give this rank {expected} of {list(x.shape)}, its local tensor is "
            f"{list(local.shape)}"
        )
    for box in itertools.product(*(_placed(of_dim) for of_dim in runs)):
        part = local
        for dim, (start, run) in enumerate(box):
            part = part.narrow(dim, start, len(run))
        yield part, tuple(run.start for _, run in box)


def _chunk(runs: Sequence[range], chunks: int, index: int) -> list[range]:
    """The index-th of `chunks` parts of ceil(n/chunks) elements, as torch.chunk cuts; neighbours are joined."""
    length = -(-sum(map(len, runs)) // chunks)
    skip, take = index * length, length
    result: list[range] = []
    for run in runs:
        part = run[min(skip, len(run)) :][:take]
        skip -= min(skip, len(run))
        take -= len(part)
        if len(part) and result and result[-1].stop == part.start:
            result[-1] = range(result[-1].start, part.stop)
        elif len(part):
            result.append(part)
    return result


def _placed(runs: Sequence[range]) -> list[tuple[int, range]]:
    """Each run with its place in the local tensor."""
    starts = itertools.accumulate(map(len, runs), initial=0)
    return list(zip(starts, runs))


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _integers(what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        result = tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise PlanError(f"{what}: expected integers, got {values!r}") from error
    if any(not 0 <= value <= _MAX_NUMEL for value in result):
        raise PlanError(f"{what}: expected integers from 0 to 2**63 - 1, got {list(result)}")
    return result
