"""The samples of each optimizer step, for any split over data ranks and micro-steps, and exact resume.

    global sample g:   dataset item perm_e[g mod N],  e = g div N                     N items, epoch e
    step s:            global samples [s*B, (s+1)*B)                                  B fixed
    micro-step a, data rank r:   samples [(a*D + r)*m, ...+ m) of the step            ORDER.md S3

perm_e is a function of (seed, e, N) alone: items sorted by SplitMix64. So which samples a step holds, and in which
order, ignores D, A and m, and the whole position of a run is one integer, `next_sample`.

    sampler = StepSampler(len(dataset), samples_per_step=24, data_ranks=W, rank=r, micro_steps=A, seed=1)
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=list)      A batches of m samples per step
    ... optimizer.step(); sampler.finish_step()                               what has been trained, not what was read

Micro-batches whose size depends on token counts are refused (`require_loader`); `TokenBlocks` balances tokens by the
global index instead. Errors: PlanError. Bits: integers only; layout-invariant.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from tbik import numbering
from tbik.errors import PlanError

WHY_NOT_TOKEN_BALANCED = (
    "micro-batches balanced by tokens have as many samples as fit, so that the ranks' samples are no aligned nodes of "
    "the tree and the split depends on D and on a sample's company. Layout-free alternative: tbik.data.TokenBlocks "
    "cuts the documents, joined in the order of their global index, into samples of equally many tokens; or "
    "SampleBatch.packed(), which packs the m samples of a micro-batch without padding"
)


class StepSampler(Sampler[list[int]]):
    """A batch sampler: dataset indices of the m samples of each micro-step of this rank, steps without end.

    dataset_size: N items. samples_per_step: B, on all data ranks and micro-steps together. data_ranks, rank: D and r.
    micro_steps: A. seed, shuffle: the order of the items; without shuffle that of the dataset. steps: end the
    iteration before step number `steps` (counted from the beginning of the run). B need not divide N: a step may hold
    the last items of one epoch and the first of the next.
    Errors: PlanError; layouts whose m is no power of two are refused, naming the micro_steps that work.
    """

    next_sample: int
    """The global number of the first sample that has not been trained."""

    def __init__(
        self,
        dataset_size: int,
        *,
        samples_per_step: int,
        data_ranks: int = 1,
        rank: int = 0,
        micro_steps: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        steps: int | None = None,
    ) -> None:
        where = "StepSampler"
        for name, value in (
            ("dataset_size", dataset_size),
            ("samples_per_step", samples_per_step),
            ("data_ranks", data_ranks),
            ("micro_steps", micro_steps),
        ):
            _require_integer(where, name, value, 1)
        _require_integer(where, "rank", rank, 0)
        _require_integer(where, "seed", seed, 0)
        if rank >= data_ranks:
            raise PlanError(f"{where}: rank is one of 0..{data_ranks - 1}, got {rank}")
        if not isinstance(shuffle, bool):
            raise PlanError(f"{where}: shuffle is True or False, got {shuffle!r}")
        if steps is not None:
            _require_integer(where, "steps", steps, 0)
        self.micro_samples = numbering.equal_share(where, samples_per_step, data_ranks, micro_steps)
        self.dataset_size, self.samples_per_step = dataset_size, samples_per_step
        self.data_ranks, self.rank, self.micro_steps = data_ranks, rank, micro_steps
        self.seed, self.shuffle, self.steps = seed, shuffle, steps
        self.next_sample = 0

    @property
    def step(self) -> int:
        """Number of the step that comes next."""
        return self.next_sample // self.samples_per_step

    def finish_step(self) -> None:
        """The optimizer has stepped: resume goes on behind this step. Batches that a loader read ahead do not count."""
        self.next_sample += self.samples_per_step

    def global_samples(self, step: int) -> Iterator[range]:
        """Per micro-step of a step, the global numbers of this rank's samples."""
        first = step * self.samples_per_step
        for a in range(self.micro_steps):
            yield numbering.run_of(first + a * self.data_ranks * self.micro_samples, self.rank, self.micro_samples)

    def item(self, global_sample: int) -> int:
        """The dataset index of a global sample."""
        epoch, place = divmod(global_sample, self.dataset_size)
        return int(_permutation(self.dataset_size, self.seed, epoch)[place]) if self.shuffle else place

    def __iter__(self) -> Iterator[list[int]]:
        steps = itertools.count(self.step) if self.steps is None else range(self.step, self.steps)
        for step in steps:
            for samples in self.global_samples(step):
                yield [self.item(g) for g in samples]

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("a StepSampler without `steps` has no end")
        return max(0, self.steps - self.step) * self.micro_steps

    def state_dict(self) -> dict[str, Any]:
        """The position and what gives it a meaning; no D, A, m, r: another layout goes on from it."""
        return {
            "next_sample": self.next_sample,
            "dataset_size": self.dataset_size,
            "samples_per_step": self.samples_per_step,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. PlanError where dataset, B, seed or shuffle are others, naming the field."""
        where = "StepSampler.load_state_dict"
        mine = self.state_dict()
        if set(state) != set(mine):
            raise PlanError(f"{where}: expected the fields {sorted(mine)}, got {sorted(state)}")
        for name in ("dataset_size", "samples_per_step", "seed", "shuffle"):
            if state[name] != mine[name]:
                raise PlanError(
                    f"{where}: {name} = {state[name]!r} was saved, this sampler has {mine[name]!r}; its samples would "
                    "be others"
                )
        _require_integer(where, "next_sample", state["next_sample"], 0)
        if state["next_sample"] % self.samples_per_step:
            raise PlanError(
                f"{where}: next_sample = {state['next_sample']} is not the beginning of a step of "
                f"{self.samples_per_step} samples"
            )
        self.next_sample = state["next_sample"]


def require_loader(loader: Any) -> StepSampler:
    """The StepSampler of a DataLoader. PlanError, with the reason and an alternative, for any other way to batch."""
    where = "data.require_loader"
    if not isinstance(loader, DataLoader):
        raise PlanError(f"{where}: expected a torch DataLoader, got {type(loader).__name__}; {WHY_NOT_TOKEN_BALANCED}")
    sampler = loader.batch_sampler
    if not isinstance(sampler, StepSampler):
        kind = "no batch sampler" if sampler is None else type(sampler).__name__
        raise PlanError(
            f"{where}: expected DataLoader(..., batch_sampler=tbik.data.StepSampler(...)), got {kind}: its samples per "
            f"micro-batch are not numbered over the global batch; {WHY_NOT_TOKEN_BALANCED}"
        )
    return sampler


class TokenBlocks(Dataset[Tensor]):
    """Item j = tokens [j*T, (j+1)*T) of all documents joined in dataset order; the rest at the end is left out.

    documents: a map-style dataset of int64 [n] tensors. tokens: T. lengths: of all documents, else each is read once.
    Every sample has T tokens, so every rank and micro-batch has the same work, and item j is a function of the
    documents and T alone. Attention reaches over the ends of documents within an item; put a separator into them.
    """

    def __init__(self, documents: Any, tokens: int, lengths: Sequence[int] | None = None) -> None:
        where = "TokenBlocks"
        _require_integer(where, "tokens", tokens, 1)
        count = len(documents)
        lengths = [len(documents[i]) for i in range(count)] if lengths is None else list(lengths)
        if len(lengths) != count or any(n < 0 for n in lengths):
            raise PlanError(f"{where}: lengths are {count} integers >= 0, one per document, got {len(lengths)}")
        self._documents, self._tokens = documents, tokens
        self._ends = list(itertools.accumulate(lengths))
        if not self._ends or self._ends[-1] < tokens:
            have = self._ends[-1] if self._ends else 0
            raise PlanError(f"{where}: {count} documents hold {have} tokens, not one sample of {tokens}")

    def __len__(self) -> int:
        return self._ends[-1] // self._tokens

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"TokenBlocks: item {index} of {len(self)}")
        first, end = index * self._tokens, (index + 1) * self._tokens
        parts = []
        for d in range(bisect.bisect_right(self._ends, first), len(self._ends)):
            begin = self._ends[d - 1] if d else 0
            if begin >= end:
                break
            document = torch.as_tensor(self._documents[d], dtype=torch.int64)
            if len(document) != self._ends[d] - begin:
                raise PlanError(
                    f"TokenBlocks: document {d} has {len(document)} tokens, its length was {self._ends[d] - begin}"
                )
            parts.append(document[max(first - begin, 0) : end - begin])
        return torch.cat(parts)


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """0..size-1 sorted by M(M(M(seed + 1) + epoch + 1) + item): integers that no library version changes (F1's M)."""
    one, number = np.array([1], dtype=np.uint64), np.array([epoch], dtype=np.uint64)
    with np.errstate(over="ignore"):
        head = _mix(np.add(_mix(np.add(np.array([seed], dtype=np.uint64), one)), np.add(number, one)))
        keys = _mix(np.add(head, np.arange(size, dtype=np.uint64)))
    return np.argsort(keys, kind="stable")


def _mix(x: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """tbik.integrity.fingerprint.mix of every element (a test compares the two)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _require_integer(where: str, name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**62:
        raise PlanError(f"{where}: {name} is an integer >= {least}, got {value!r}")
