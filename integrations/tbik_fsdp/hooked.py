"""A DataParallel whose gradients are folded by torch's own calls, during backward.

What all strategies share: when the ranks agree (before the first call of a backward), what has been folded, and the
gradients that torch has no call for, which are collected as a GradientTree does: those of the second and later uses of
a tied parameter (S4), and all of them on one rank or with accumulation="unsharded".

Suffixes: S shards, N elements of a shard. Bits: layout-invariant.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from tbik.errors import PlanError
from tbik.fsdp import DataParallel
from tbik.gradients import UseKey, node_of
from tbik.tree import Node

T = TypeVar("T", bound="HookedTree")


class HookedTree(DataParallel):
    """A DataParallel around one of torch's wrappers."""

    _reduces: bool  # by torch's call; else everything is collected
    _expected: Iterable[str] = ()  # what torch must have asked to fold in each micro-step

    def _begin(self, num_samples: int | None) -> range:
        samples = super()._begin(num_samples)
        self._micro_m = len(samples)
        self._folded: set[str] = set()
        return samples

    def watch(self, outputs: Tensor | Sequence[Tensor]) -> None:
        """As GradientTree.watch; the ranks agree here, before the first exchange of gradients. Collective."""
        super().watch(outputs)
        if self._reduces:
            self._agreed = self._agree(self._micro_m, sorted(filter(self._keeps, self._watched)))

    def _keeps(self, key: UseKey) -> bool:
        return not self._reduces or key.use > 0

    def _agreed_keys(self, m: int) -> list[UseKey]:
        return self._agreed if self._reduces else super()._agreed_keys(m)

    def _tell(self, error: BaseException) -> None:
        if not (self._reduces and self._watched):  # the others may exchange gradients by now: their wait has an end
            super()._tell(error)

    @property
    def _is_last(self) -> bool:
        """Whether this micro-step completes the step."""
        return self._position + self._micro_m * self._ranks.size == self.samples_per_step

    def fold(self, name: str, rows_SN: Tensor) -> list[tuple[Node, Tensor]]:
        """The nodes of this micro-step of what torch calls `name`, [N] each."""
        if not self._active or not self._watched:
            raise PlanError(
                f"tbik.fsdp: gradients of {name or 'the model'} are exchanged outside a micro-step; start the backward "
                "by step.backward(...)"
            )
        runs = self._runs(self._micro_m)
        node = node_of(runs[self._ranks.rank][0], self._micro_m)
        self._folded.add(name)
        return self._ranks.fold(rows_SN[None], (node,), runs, self._narrow)

    def fold_flat(self, name: str, rows_SN: Tensor, output_N: Tensor) -> None:
        """Flat gradients that keep their layout, into their cover; the root into `output_N` if the step is whole."""
        key: Hashable = name
        self._covers.absorb(key, self.fold(name, rows_SN))
        if self._is_last:
            root = self._covers.root(key)
            assert root is not None  # every rank has brought its node
            output_N.copy_(root)

    def _commit(self, m: int) -> None:
        if self._reduces:
            missing = [name or "the model" for name in self._expected if name not in self._folded]
            if missing:
                raise PlanError(
                    f"tbik.fsdp: the gradients of {', '.join(missing[:4])} were not exchanged by tbik in this "
                    "micro-step: the communication was replaced or switched off (a communication hook, "
                    "set_custom_reduce_scatter, set_requires_gradient_sync, no_sync); leave it to tbik.fsdp"
                )
        super()._commit(m)
        if self._reduces and self._position < self.samples_per_step:
            for parameter in self._parameters.values():
                parameter.grad = None  # unspecified before the last micro-step

    def _require_none_left(self) -> None:
        if not self._reduces:
            super()._require_none_left()

    def _shard_groups(self) -> list[dist.ProcessGroup | None]:
        return [self._ranks.group] if self._ranks.shards > 1 else []


def calling(tree: T, method: Callable[..., Any]) -> Callable[..., Any]:
    """method(tree, ...) without keeping the tree alive: torch's wrappers outlive it."""
    reference = weakref.ref(tree)

    def call(*arguments: Any) -> Any:
        found = reference()
        if found is None:
            raise PlanError("tbik.fsdp: the DataParallel of this model is gone; keep it as long as you train")
        return method(found, *arguments)

    return call
