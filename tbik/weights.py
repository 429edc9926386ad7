"""Where the parameters of a model stand in the whole ones, whatever holds them: one rank, FSDP2, TP, several of them.

    box: local view [sizes], offset        whole[offset + j] = view[j]          views share memory with the tensor

    places(model)            {name in a stock checkpoint: Place}, each parameter once (a tied one under its first name)
    Place.boxes(tensor)      of the parameter, or of any tensor like it (a gradient, an optimizer's state)
    pieces(model)            for tbik.fingerprint: the same number in every layout

What several ranks hold counts once: KV heads by the range that each rank answers for, equal boxes as replicas.
Errors: PlanError. Bits: bytes are addressed, nothing is computed; layout-invariant (tests/test_weights.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from tbik.errors import PlanError
from tbik.integrity.fingerprint import fingerprint
from tbik.integrity.pieces import Piece, is_dtensor, split_dtensor
from tbik.packing import FrozenWeight

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Box(NamedTuple):
    """view shares memory with this rank's tensor; its first element is whole[offset]."""

    view: Tensor
    offset: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """What this rank holds of a tensor of `shape`: rows [offset, ...) of `axis`, or from `flat_start` on if it is flat.

    counted: of the range along `axis`, in rows of the whole, what this rank answers for; None: all it holds.
    stretches: the axis is so many equal stretches (gate before up), and offset and counted are those within each.
    """

    parameter: Tensor
    shape: tuple[int, ...]
    axis: int = 0
    offset: int = 0
    counted: tuple[int, int] | None = None
    flat_start: int | None = None
    stretches: int = 1

    def boxes(self, tensor: Tensor | None = None, *, counted: bool = False) -> Iterator[Box]:
        """The boxes of `tensor`, one shaped and sharded like the parameter (by default itself); none may be empty.

        counted: only what this rank answers for.
        """
        tensor = self.parameter if tensor is None else tensor
        if self.flat_start is not None:
            flat = tensor.detach()
            for offset, sizes, first in flat_boxes(self.flat_start, self.flat_start + flat.numel(), self.shape):
                yield Box(flat[first : first + math.prod(sizes)].view(sizes), offset)
            return
        parts: Iterator[tuple[Tensor, tuple[int, ...]]]
        if is_dtensor(tensor):
            parts = split_dtensor(cast(Any, tensor), "weights")
        else:
            parts = iter([(tensor.detach(), (0,) * tensor.dim())])
        for view, offset in parts:
            if not self.shape:
                yield Box(view, ())
                continue
            for at, first, count in self._ranges(offset[self.axis], view.shape[self.axis], tensor.shape, counted):
                part = view.narrow(self.axis, at, count)
                if part.numel():
                    yield Box(part, (*offset[: self.axis], first, *offset[self.axis + 1 :]))

    def _ranges(self, start: int, count: int, held: Sequence[int], counted: bool) -> Iterator[tuple[int, int, int]]:
        """(first in the view, first in the whole, how many) of a view of [start, start + count) of this rank's axis."""
        mine, whole = (shape[self.axis] // self.stretches for shape in (held, self.shape))
        for stretch in range(self.stretches):
            lo, hi = 0, mine
            if counted and self.counted is not None:
                lo, hi = (edge - self.offset for edge in self.counted)
            lo, hi = (min(max(stretch * mine + edge, start), start + count) for edge in (lo, hi))
            if lo < hi or self.stretches == 1:
                yield lo - start, lo + stretch * (whole - mine) + self.offset, hi - lo


def places(model: torch.nn.Module) -> dict[str, Place]:
    """{stock name: where this rank's parameter stands}, in the order of the model. Errors: PlanError."""
    module = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    _refuse_flat_shards(module)
    parts: Mapping[str, Any] | None = getattr(module, "tbik_parts", None)
    named = {_plain(name): parameter for name, parameter in module.named_parameters()}
    for name, parameter in named.items():
        if isinstance(parameter, FrozenWeight):
            raise PlanError(f"weights: {name} is frozen; call tbik.unfreeze(model) first")
    found: dict[str, Place] = {}
    if parts is None:
        for name, parameter in named.items():
            found[name] = Place(parameter, tuple(parameter.shape))
        return found
    rank = cast(Any, module).setting.rank
    seen: set[int] = set()
    for name, part in parts.items():
        parameter = named.get(part.parameter)
        if parameter is None:  # tied: it stands under its first name
            continue
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        if part.held is None or part.counted is None:
            found[name] = Place(parameter, tuple(part.shape), part.axis)
        else:
            held, counted = part.held[rank], part.counted[rank]
            found[name] = Place(parameter, tuple(part.shape), part.axis, held[0], counted, stretches=part.stretches)
    return found


def _refuse_flat_shards(module: torch.nn.Module) -> None:
    """FSDP1 keeps elements of many parameters as one row; outside of summon_full_params no parameter has its shape."""
    for inner in module.modules():
        state: Any = getattr(inner, "training_state", None)
        if type(inner).__name__ == "FullyShardedDataParallel" and getattr(state, "name", "") != "SUMMON_FULL_PARAMS":
            raise PlanError(
                "weights: FSDP1 (FullyShardedDataParallel) keeps flat shards, which have no place in a checkpoint; use "
                'tbik.fsdp.apply(..., strategy="fsdp2"), or read the weights inside '
                "FullyShardedDataParallel.summon_full_params(model, writeback=False)"
            )


def pieces(model: torch.nn.Module, value: Callable[[str, Tensor], Tensor] | None = None) -> dict[str, list[Piece]]:
    """{stock name: this rank's pieces}; tbik.fingerprint(pieces(model), group) is the same in every layout.

    value: (name, parameter) -> the tensor to take instead, sharded like the parameter: a gradient, a cast.
    group: all ranks that train together, data and tensor parallel.
    """
    return {
        name: as_pieces(place, None if value is None else value(name, place.parameter))
        for name, place in places(model).items()
    }


def as_pieces(place: Place, tensor: Tensor | None = None) -> list[Piece]:
    """The boxes that this rank answers for as Pieces; an empty one where there are none, so that the name counts."""
    of = place.parameter if tensor is None else tensor
    found = [Piece.box(view, place.shape, offset) for view, offset in place.boxes(of, counted=True)]
    if not found:
        sizes = (0,) * len(place.shape)
        found = [Piece.box(torch.empty(sizes, dtype=of.dtype), place.shape, sizes)]
    return found


def digest(model: torch.nn.Module, group: dist.ProcessGroup | None = None, *, dtype: torch.dtype | None = None) -> str:
    """16 hexadecimal digits: the fingerprint of all weights, of their values rounded to `dtype` if it is given.

    Collective over `group`. Layout-invariant; equal to that of a sampler that holds these weights in `dtype`.
    """
    value = None if dtype is None else lambda _, parameter: parameter.detach().to(dtype)
    return f"{fingerprint(pieces(model, value), group):016x}"


def flat_boxes(first: int, end: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """(offset, sizes, elements before) of the boxes that make up row-major elements [first, end) of `shape`."""
    if end <= first:
        return
    if len(shape) <= 1:
        yield (first,) if shape else (), (end - first,) if shape else (), 0
        return
    row = math.prod(shape[1:])
    at = first
    while at < end:
        number, inside = divmod(at, row)
        if inside or end - at < row:
            stop = min(end, (number + 1) * row)
            for offset, sizes, before in flat_boxes(inside, inside + stop - at, shape[1:]):
                yield (number, *offset), (1, *sizes), at - first + before
        else:
            rows = (end - at) // row
            stop = at + rows * row
            yield (number, *(0,) * (len(shape) - 1)), (rows, *shape[1:]), at - first
        at = stop


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
