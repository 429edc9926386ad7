"""The tokens of a call that exist, in order: padded batches, packed rows, and what a cache already holds.

    rows = the real tokens, sequence after sequence        position = index in its own sequence (ORDER.md K1)

Padding is removed before the first layer, so it takes part in no sum; a sequence has the bits it has alone. A sequence
is a sample: a leaf of every parameter gradient (S1).
Suffixes: B rows of the batch, T tokens of the call, P tokens in the cache, R real tokens of the call, S = P + T.
Errors: PlanError. Bits: integers only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tbik.errors import PlanError

IGNORE_INDEX = -100


@dataclass(frozen=True)
class Rows:
    """batch, width: B, T. index int64 [R]: places of the real tokens in [B * T], None if all are. positions int64 [R].

    samples: rows where sequences begin, 0 first, R last. live bool [B, S]: real tokens of cache and call, None if all.
    """

    batch: int
    width: int
    past: int
    index: Tensor | None
    positions: Tensor
    samples: tuple[int, ...]
    live: Tensor | None

    def pack(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [R, ...]."""
        flat = x.reshape(self.batch * self.width, *x.shape[2:])
        return flat if self.index is None else flat.index_select(0, self.index)

    def unpack(self, x: Tensor) -> Tensor:
        """[R, ...] -> [B, T, ...], 0 where there is padding."""
        if self.index is not None:
            flat = x.new_zeros(self.batch * self.width, *x.shape[1:])
            x = flat.index_copy(0, self.index, x)
        return x.reshape(self.batch, self.width, *x.shape[1:])

    def keep(self, logits_to_keep: int | Tensor) -> tuple[Tensor | None, int, Tensor | None]:
        """(rows to keep, new width, their places in [B * width]) of the last columns, or of those listed.

        Errors: PlanError unless it is a number >= 0 (0: all) or an integer tensor of columns.
        """
        device = self.positions.device
        columns = torch.arange(self.width, device=device)
        if isinstance(logits_to_keep, Tensor):
            listed = logits_to_keep
            if listed.dim() != 1 or not _is_integral(listed) or not bool((listed.abs() < max(self.width, 1)).all()):
                raise PlanError(
                    f"parallelize: logits_to_keep lists columns below {self.width} in a 1-D integer tensor, got "
                    f"{listed.dtype} {list(listed.shape)}"
                )
            kept = columns[listed.to(device)]  # a choice of the host's: wherever it stands
        elif isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise PlanError(
                f"parallelize: logits_to_keep is a number >= 0 (0: all) or a tensor of columns, got {logits_to_keep!r}"
            )
        elif logits_to_keep == 0:
            return None, self.width, self.index
        else:
            kept = columns[-logits_to_keep:]
        places = torch.full((self.batch * self.width,), -1, dtype=torch.int64, device=device)
        numbers = torch.arange(len(self.positions), device=device)
        places[numbers if self.index is None else self.index] = numbers
        chosen = places.view(self.batch, self.width)[:, kept].reshape(-1)
        real = (chosen >= 0).nonzero()[:, 0]
        return chosen[real], len(kept), None if len(real) == len(chosen) else real

    def targets(self, labels: Tensor) -> Tensor:
        """int64 [R]: the label after each token of its sequence, IGNORE_INDEX after the last. labels [B, T].

        Errors: PlanError for a label at a place of padding, which no token of the sequence predicts.
        """
        where = "parallelize: labels"
        _require_integral(where, labels)
        if tuple(labels.shape) != (self.batch, self.width):
            raise PlanError(f"{where}: expected {[self.batch, self.width]}, as the ids, got {list(labels.shape)}")
        _require_device(where, labels, self.positions.device)
        if self.index is not None:
            padded = torch.ones(labels.numel(), dtype=torch.bool, device=labels.device)
            padded[self.index] = False
            if bool((labels.reshape(-1)[padded] != IGNORE_INDEX).any()):
                raise PlanError(
                    f"{where}: a label other than {IGNORE_INDEX} stands at padding; use "
                    f"labels.masked_fill(attention_mask == 0, {IGNORE_INDEX})"
                )
        mine = self.pack(labels).to(torch.int64)
        shifted = torch.full_like(mine, IGNORE_INDEX)
        shifted[:-1] = mine[1:]
        ends = [end - 1 for first, end in itertools.pairwise(self.samples) if end > first]
        shifted[ends] = IGNORE_INDEX
        return shifted


def rows_of(
    batch: int,
    width: int,
    past: int = 0,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    sample_offsets: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> Rows:
    """What the arguments of a call say about its tokens.

    attention_mask [B, P + T], 1 for a real token; left, right or any padding. position_ids [B, T] or [1, T]: must be
    the index of each token in its own sequence; where they restart at 0 (without a mask and a cache) a new sequence
    begins. sample_offsets: the same said directly, of the flattened ids. device: that of the ids (default: the CPU),
    where the rows' tensors are made; mask and position_ids must be there.
    """
    where = "parallelize"
    device = torch.device("cpu") if device is None else device
    if not batch:
        raise PlanError(f"{where}: expected ids [B, T] of one row at least, got {[batch, width]}")
    if not width and sample_offsets is None and attention_mask is None:
        raise PlanError(
            f"{where}: expected ids [B, T] of one token at least, got {[batch, width]}; that samples have no "
            "tokens is said by sample_offsets or attention_mask (SampleBatch)"
        )
    if position_ids is not None:
        _require_integral(f"{where}: position_ids", position_ids)
        _require_device(f"{where}: position_ids", position_ids, device)
    if sample_offsets is not None:
        return _packed(batch, width, past, attention_mask, position_ids, sample_offsets, device)
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or tuple(attention_mask.shape) != (batch, past + width):
            shape = list(getattr(attention_mask, "shape", [])) or type(attention_mask).__name__
            raise PlanError(
                f"{where}: attention_mask is [B, cached + T] = {[batch, past + width]}, 1 for a real token, got "
                f"{shape}; masks of other forms are not supported (packed rows: sample_offsets)"
            )
        _require_device(f"{where}: attention_mask", attention_mask, device)
        live = attention_mask != 0
        if not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
            raise PlanError(f"{where}: attention_mask holds 0 and 1 only")
        if not bool(live.all()):
            return _masked(batch, width, past, live, position_ids)
    if position_ids is not None and attention_mask is None and not past:
        starts = _restarts(batch, width, position_ids)
        if starts is not None:
            return _packed(batch, width, past, None, position_ids, starts, device)
    positions = torch.arange(past, past + width, device=device)
    _require_positions(position_ids, positions.expand(batch, width), None)
    samples = tuple(range(0, batch * width + 1, width)) if width else (0,) * (batch + 1)
    return Rows(batch, width, past, None, positions.repeat(batch), samples, None)


def _masked(batch: int, width: int, past: int, live: Tensor, position_ids: Tensor | None) -> Rows:
    positions = (live.cumsum(1) - 1)[:, past:]
    now = live[:, past:]
    _require_positions(position_ids, positions, now)
    index = now.reshape(-1).nonzero()[:, 0]
    samples = tuple(itertools.accumulate(now.sum(1).tolist(), initial=0))
    whole = bool(now.all())
    return Rows(batch, width, past, None if whole else index, positions.reshape(-1)[index], samples, live)


def _packed(
    batch: int,
    width: int,
    past: int,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    sample_offsets: Sequence[int],
    device: torch.device,
) -> Rows:
    where = "parallelize: sample_offsets"
    if past:
        raise PlanError(f"{where}: packed rows and a cache do not go together; generate from a padded batch")
    if attention_mask is not None:
        raise PlanError(f"{where}: packed rows have no padding; give sample_offsets or attention_mask")
    if isinstance(sample_offsets, Tensor) and sample_offsets.dim() == 1 and _is_integral(sample_offsets):
        sample_offsets = sample_offsets.tolist()
    if not isinstance(sample_offsets, (list, tuple)) or not all(_is_int(o) for o in sample_offsets):
        raise PlanError(f"{where}: a list of integers or a 1-D integer tensor, got {sample_offsets!r:.80}")
    offsets = list(sample_offsets)
    ascending = all(a <= b for a, b in itertools.pairwise(offsets))
    if not offsets or offsets[0] != 0 or offsets[-1] != batch * width or not ascending:
        raise PlanError(f"{where}: ascend from 0 to the {batch * width} tokens of the call, got {offsets[:8]}")
    lengths = torch.tensor([end - first for first, end in itertools.pairwise(offsets)], dtype=torch.int64)
    firsts = torch.tensor(offsets[:-1], dtype=torch.int64)
    # of offsets, which the host has: made there and sent once
    positions = (torch.arange(batch * width) - firsts.repeat_interleave(lengths)).to(device)
    _require_positions(position_ids, positions.reshape(batch, width), None)
    return Rows(batch, width, 0, None, positions, tuple(offsets), None)


def _restarts(batch: int, width: int, position_ids: Tensor) -> list[int] | None:
    """Where sequences begin if position_ids restart inside a row, else None."""
    one = tuple(position_ids.shape) == (1, width)
    given = position_ids.expand(batch, width) if one else position_ids
    if given.shape != (batch, width) or not width or not bool((given[:, 0] == 0).all()):
        return None
    starts = (given.reshape(-1) == 0).nonzero()[:, 0].tolist()
    return [*starts, batch * width] if len(starts) > batch else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_integral(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _require_integral(where: str, x: Any) -> None:
    if not isinstance(x, Tensor) or not _is_integral(x):
        raise PlanError(f"{where}: expected an integer tensor, got {getattr(x, 'dtype', type(x).__name__)}")


def _require_device(where: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise PlanError(
            f"{where}: expected on {device}, where the ids are, got on {x.device}; use .to({str(device)!r})"
        )


def _require_positions(given: Tensor | None, expected: Tensor, real: Tensor | None) -> None:
    if given is None:
        return
    if given.dim() != 2 or given.shape[1] != expected.shape[1] or given.shape[0] not in (1, expected.shape[0]):
        raise PlanError(f"parallelize: position_ids are {list(expected.shape)}, got {list(given.shape)}")
    wrong = given != expected
    if real is not None:
        wrong &= real
    if bool(wrong.any()):
        raise PlanError(
            "parallelize: position_ids are the index of each token in its own sequence, padding not counted; got other "
            "numbers. Leave them out"
        )


# --- batches of samples -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleBatch:
    """Samples [first_sample, first_sample + len(ids)) of the global batch, as arguments of a parallelized model.

    ids: per sample int64 [T_s]. labels: alike, the token itself by default; IGNORE_INDEX is no target. total_tokens:
    number of targets of the whole global batch; fp32(1 / total_tokens) multiplies the gradient that enters (S4).

        model(**batch.packed())           one row without padding
        model(**batch.padded("left"))     the same bits
    """

    ids: Sequence[Tensor]
    labels: Sequence[Tensor] | None = None
    first_sample: int = 0
    total_tokens: int | None = None

    def __post_init__(self) -> None:
        where = "SampleBatch"
        if not isinstance(self.ids, (list, tuple)) or not self.ids:
            raise PlanError(f"{where}: ids is a non-empty list of int64 [T_s] tensors, one per sample")
        labels = self.ids if self.labels is None else self.labels
        if len(labels) != len(self.ids):
            raise PlanError(f"{where}: expected labels of {len(self.ids)} samples, got {len(labels)}")
        for s, (ids, of) in enumerate(zip(self.ids, labels)):
            for name, t in (("ids", ids), ("labels", of)):
                if not isinstance(t, Tensor) or t.dim() != 1 or t.dtype != torch.int64 or t.shape != ids.shape:
                    raise PlanError(f"{where}: {name}[{s}] is an int64 tensor [T_s] as long as ids[{s}]")
        if isinstance(self.first_sample, bool) or not isinstance(self.first_sample, int) or self.first_sample < 0:
            raise PlanError(f"{where}: first_sample is an integer >= 0, got {self.first_sample!r}")
        if self.total_tokens is not None and (
            isinstance(self.total_tokens, bool) or not isinstance(self.total_tokens, int) or self.total_tokens < 1
        ):
            raise PlanError(f"{where}: total_tokens is an integer >= 1, got {self.total_tokens!r}")

    @property
    def num_targets(self) -> int:
        """Targets of these samples: every label but the first of its sample, unless it is IGNORE_INDEX."""
        labels = self.ids if self.labels is None else self.labels
        return sum(int((of[1:] != IGNORE_INDEX).sum()) for of in labels)

    def packed(self) -> dict[str, Any]:
        """input_ids and labels [1, R], sample_offsets; num_items_in_batch if total_tokens is known."""
        labels = self.ids if self.labels is None else self.labels
        offsets = list(itertools.accumulate((len(ids) for ids in self.ids), initial=0))
        arguments = {
            "input_ids": torch.cat(list(self.ids))[None],
            "labels": torch.cat(list(labels))[None],
            "sample_offsets": offsets,
        }
        return arguments | self._scale()

    def padded(self, side: str = "right", pad_token_id: int = 0) -> dict[str, Any]:
        """input_ids, labels and attention_mask [B, T], padded on the left or right."""
        if side not in ("left", "right"):
            raise PlanError(f"SampleBatch.padded: side is 'left' or 'right', got {side!r}")
        labels = self.ids if self.labels is None else self.labels
        width = max(len(ids) for ids in self.ids)
        shape = (len(self.ids), width)
        arguments = {
            "input_ids": torch.full(shape, pad_token_id, dtype=torch.int64),
            "labels": torch.full(shape, IGNORE_INDEX, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
        }
        for s, (ids, of) in enumerate(zip(self.ids, labels)):
            place = slice(width - len(ids), width) if side == "left" else slice(0, len(ids))
            arguments["input_ids"][s, place], arguments["labels"][s, place] = ids, of
            arguments["attention_mask"][s, place] = 1
        return arguments | self._scale()

    def _scale(self) -> dict[str, Any]:
        return {} if self.total_tokens is None else {"num_items_in_batch": self.total_tokens}
