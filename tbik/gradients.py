"""Parameter gradients as one tree over the samples of the global batch, whatever the micro-batches and ranks.

    grad = node(0, B)        micro-step a, data rank r brings node [(a*D + r)*m, (a*D + r)*m + m), one aligned node

    tree = GradientTree(model, samples_per_step=B, micro_steps=A, group=data_parallel)
    for batch in batches:                                     # A of them
        with tree.micro_step() as step:                       # step.samples: numbers of this rank's samples
            step.backward(model(batch[step.samples]), upstream(total_tokens))
    tree.finish()                                             # param.grad
    optimizer.step(); optimizer.zero_grad()

Autograd would add the micro-batches one after the other (`+=`) and the uses of a shared parameter in the order in which
the graph was built; both put the micro-batch into the bits. So no gradient is left to it: each one is taken out of
`param.grad` as it arrives and stored under its node (level, index). Data ranks fold theirs at the end of each
micro-step and keep 1/D of the elements. Several uses of one parameter (tied embeddings, a layer in a loop) have a tree
each; the roots are added once, in `finish`.

Letters: B samples per step, D data ranks, A micro-steps, m samples per rank and micro-step. Order: ORDER.md S1-S4.
CPU tensors; eager (a compiled model may be called inside; the tree itself is not compiled).
Errors: PlanError; over ranks also TransportTimeout and TransportError.
Bits: layout-invariant, where the operators give the root over the samples of a call (tbik.ops, tbik.nn).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tbik import numbering, tree
from tbik.collectives import _is_dense
from tbik.errors import PlanError
from tbik.gradient_covers import Covers, fan_in
from tbik.gradient_ranks import Ranks, Shard
from tbik.gradient_uses import DIRECT as DIRECT
from tbik.gradient_uses import Graph, collect, collector_of
from tbik.gradient_uses import use as use
from tbik.plan import Run, TreePlan
from tbik.tree import Node

BUCKET_BYTES = 1 << 25
"""Gradients travel together in messages of about this size; a larger one travels alone."""

Accumulation = Literal["sharded", "unsharded"]

_GUARD_ELEMENTS = 16  # fewer non-zero elements say nothing: one in 2^16 values is a bf16 value by chance


def upstream(total_tokens: int) -> Tensor:
    """g = fp32(1/total_tokens), a scalar: the gradient to start the backward of a token-sum loss with (S4).

    total_tokens: the tokens that count in the whole step, on all ranks. It scales every gradient on its way down, never
    a root. Errors: PlanError. Layout-invariant.
    """
    if isinstance(total_tokens, bool) or not isinstance(total_tokens, int) or not 0 < total_tokens < 2**63:
        raise PlanError(f"gradients.upstream: total_tokens is an integer > 0, got {total_tokens!r}")
    # Rounded once, by integers: the quotient has 24 bits before the rounding to an integer.
    shift = total_tokens.bit_length() + 23
    return torch.tensor(math.ldexp(round(Fraction(1 << shift, total_tokens)), -shift), dtype=torch.float32)


class MicroStep(NamedTuple):
    """What a micro-step's `with` gives. samples: numbers, in the global batch, of the samples of this rank."""

    tree: GradientTree
    samples: range

    def backward(self, outputs: Tensor | Sequence[Tensor], gradient: Tensor | Sequence[Tensor] | None = None) -> None:
        """torch.autograd.backward(outputs, gradient) after GradientTree.watch(outputs).

        A scalar gradient (`upstream`) is taken to the device of its output.
        """
        self.tree.watch(outputs)
        if isinstance(outputs, Tensor) and isinstance(gradient, Tensor) and not gradient.dim():
            gradient = gradient.to(outputs.device)
        torch.autograd.backward(outputs, gradient)


class GradientTree:
    """Collects the gradients of a step and folds them by covers; `finish` sets param.grad.

    parameters: a module, a mapping of names to parameters, or parameters; those that require no gradient are left out.
    samples_per_step: B, on all ranks and micro-steps together.
    group: the D data-parallel ranks (of HSDP: Ranks); None is this rank alone.
    micro_steps: A, so that m = B/(D*A); without it each micro_step says its own m, and they may differ.
    plan: its acc_dtype is that of the gradients, its grad_wire_dtype rounds them from the sample leaf upwards (the
    operators need the same plan); by default fp32, not rounded.
    guard: in the first step, refuse the gradient of a matrix that has been rounded to bf16 in every micro-step (an
    operator that casts outside).
    accumulation: "sharded" folds the ranks' nodes at the end of each micro-step and keeps 1/D of the elements.
    "unsharded" sends nothing before finish() and keeps whole gradients: rank r takes the run of samples
    [r*A*m, (r + 1)*A*m). Equal bits.

    A parameter in bf16 or fp16 gets its gradient in acc_dtype (torch >= 2.10: Tensor.grad_dtype).
    A parameter without any gradient in a step gets zeros: whether a rank's samples reach it must not matter.
    Memory: per parameter at most `buffer_limit` stored gradients, each of 1/D of the elements (sharded), and during a
    micro-step one whole gradient, as in plain training. An exception inside a micro-step leaves the tree unusable until
    reset().
    Errors: PlanError; where one rank refuses or fails at the end of a micro-step, all do. Layout-invariant.
    """

    _position: int  # samples of the micro-steps that have ended, on all ranks
    _failure: str  # why the step cannot go on
    _smallest: int | None  # m, of this step
    _covers: Covers
    _arrived: dict[UseKey, Tensor]  # in this micro-step
    _seen: set[UseKey]  # in this micro-step, those that were left to autograd included
    _uses: set[UseKey]  # in this step
    _watched: dict[UseKey, bool]  # uses in the graph of this backward -> exempt from the guard
    _rounded: dict[UseKey, tuple[bool, int]]  # bf16 values throughout so far, how many are not zero

    def __init__(
        self,
        parameters: torch.nn.Module | Mapping[str, Tensor] | Iterable[Tensor],
        *,
        samples_per_step: int,
        micro_steps: int | None = None,
        group: dist.ProcessGroup | Ranks | None = None,
        plan: TreePlan | None = None,
        guard: bool = True,
        accumulation: Accumulation = "sharded",
    ) -> None:
        where = "GradientTree"
        if plan is not None and not isinstance(plan, TreePlan):
            raise PlanError(f"{where}: plan is a tbik.TreePlan or None, got {type(plan).__name__}")
        for name, value in (("samples_per_step", samples_per_step), ("micro_steps", micro_steps)):
            if value is None and name == "micro_steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise PlanError(f"{where}: {name} is an integer >= 1, got {value!r}")
        if not isinstance(guard, bool):
            raise PlanError(f"{where}: guard is True or False, got {guard!r}")
        self.samples_per_step, self.plan = samples_per_step, plan
        self._acc_dtype: torch.dtype = getattr(torch, "float32" if plan is None else plan.acc_dtype)
        self._narrow = plan is not None and plan.grad_wire_dtype == "bfloat16"
        if accumulation not in ("sharded", "unsharded"):
            raise PlanError(f'{where}: accumulation is "sharded" or "unsharded", got {accumulation!r}')
        self._ranks = group if isinstance(group, Ranks) else Ranks(group)
        self._unsharded = accumulation == "unsharded" and self._ranks.size > 1
        self._micro_samples: int | None = None
        if micro_steps is not None:
            self._micro_samples = numbering.equal_share(where, samples_per_step, self._ranks.size, micro_steps)
        elif not self._micro_steps_that_work():
            raise PlanError(numbering.explain_no_split(where, samples_per_step, self._ranks.size))
        self._parameters = _named(where, parameters)
        for name, parameter in self._parameters.items():
            self._require_parameter(name, parameter)
        found = sorted({str(parameter.device) for parameter in self._parameters.values()})
        if self._ranks.size > 1 and len(found) > 1:
            raise PlanError(
                f"{where}: the parameters are on {', '.join(found)}, and the ranks send them together; move the whole "
                "model to one device"
            )
        self._names = list(self._parameters)
        self._positions: dict[int, int] = {}  # by id; kept alive by what takes their gradients
        self._shards = [Shard.of(parameter, self._ranks.shards) for parameter in self._parameters.values()]
        self._guard, self._first_step, self._active = guard, True, False
        start = self._ranks.rank * (samples_per_step // self._ranks.size) if self._unsharded else 0
        self._covers = Covers(samples_per_step, self._narrow, start)
        self._clear()
        self._undo = contextlib.ExitStack()
        self._closer = weakref.finalize(self, self._undo.close)
        self._closer.atexit = False
        self._attach()

    def _attach(self) -> None:
        """Take the gradients of the parameters from here on."""
        for position, parameter in enumerate(self._parameters.values()):
            self._take_from(parameter, position)

    def _take_from(self, parameter: Tensor, position: int) -> None:
        if parameter.dtype != self._acc_dtype:
            self._undo.callback(_restore_grad_dtype, parameter, parameter.grad_dtype)
            parameter.grad_dtype = self._acc_dtype
        self._positions[id(parameter)] = position
        self._undo.callback(collect(parameter, self))

    # --- a step -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def micro_step(self, num_samples: int | None = None) -> Iterator[MicroStep]:
        """One micro-step: one backward, started by MicroStep.backward. num_samples: m of this rank, a power of two.

        With ranks, its end is collective: they fold their nodes there. Errors: PlanError, on all ranks.
        """
        self._require_sound("micro_step")
        if self._active:
            raise PlanError("GradientTree.micro_step: the micro-step before has not ended; they do not nest")
        self._active = True
        try:
            samples = self._begin(num_samples)
            yield MicroStep(self, samples)
            if not self._seen:
                raise PlanError(
                    f"GradientTree.micro_step: no gradient arrived for samples [{samples.start}, {samples.stop}); call "
                    "backward inside the micro-step, also for samples without tokens"
                )
            self._refuse_mixed_uses()
        except BaseException as error:
            self._fail(error)
            self._tell(error)
            raise
        finally:
            self._active, self._watched = False, {}
        try:
            self._commit(len(samples))
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._uses |= self._seen
            self._seen = set()

    def watch(self, outputs: Tensor | Sequence[Tensor]) -> None:
        """Read the graph of a backward that is about to start from `outputs`: each use of a parameter must be apart.

        MicroStep.backward does it; call it where something else starts the backward. Errors: PlanError for a parameter
        that is used twice without use(), for a number that use() was given twice, for a reentrant checkpoint.
        """
        where = "GradientTree.watch"
        self._require_sound("watch")
        if not self._active:
            raise PlanError(f"{where}: expected to be inside `with tree.micro_step()`; a backward belongs to one")
        if self._watched or self._seen:
            raise PlanError(
                f"{where}: this micro-step has had its backward; a second one would be added to it. Open a micro-step "
                "for each, or add the losses"
            )
        self._watched = self._uses_in(Graph([outputs] if isinstance(outputs, Tensor) else list(outputs)))

    def _uses_in(self, graph: Graph) -> dict[UseKey, bool]:
        """The uses in the graph -> whether each is exempt from the guard."""
        where = "GradientTree.watch"
        watched: dict[UseKey, bool] = {}
        for parameter, number, consumers in graph.parameters():
            position = self._positions.get(id(parameter))
            if position is None:
                continue
            name = self._names[position]
            for use_index, exempt in graph.uses(name, number, consumers):
                key = UseKey(position, use_index)
                if key in watched:
                    what = "without use()" if use_index == DIRECT else f"as use {use_index}"
                    raise PlanError(
                        f"{where}: {name} is used twice {what} in this graph, and autograd would add the two in every "
                        "micro-batch. Write gradients.use(parameter, i), i = 0, 1, ... in forward order, at each use"
                    )
                watched[key] = exempt
        return watched

    def finish(self, *, shards: bool = False) -> dict[str, Tensor] | None:
        """param.grad = node(0, B), of several uses ((u_n + u_(n-1)) + ...) + u_1, in acc_dtype, on every rank.

        With ranks it is collective.

        shards: leave param.grad alone and return this rank's rows of each gradient, by name: rows
        [r*c, min((r + 1)*c, N)) of dimension 0, c = ceil(N/D), as FSDP2 shards them; nothing is gathered.
        Errors: PlanError where samples are missing. Layout-invariant.
        """
        where = "GradientTree.finish"
        self._require_sound("finish")
        if self._active:
            raise PlanError(f"{where}: the micro-step has not ended")
        if self._position != self.samples_per_step:
            raise PlanError(
                f"{where}: a step has {self.samples_per_step} samples, its micro-steps brought {self._position}; run "
                "the rest, or reset() to drop them"
            )
        try:
            self._agree_to_finish()
            if self._unsharded:
                self._fold_runs()
            result = self._deliver(shards)
        except BaseException as error:
            for parameter in self._parameters.values():
                parameter.grad = None
            self._fail(error)
            raise
        self._first_step = False
        self._clear()
        return result

    def _deliver(self, shards: bool) -> dict[str, Tensor] | None:
        """The roots of the step, to where they belong."""
        roots = [self._root(position) for position in range(len(self._names))]
        if shards:
            return {
                name: shard.rows(root, self._ranks.shard)
                for name, shard, root in zip(self._names, self._shards, roots, strict=True)
            }
        everywhere = self._gather(range(len(roots)), roots)
        for parameter, grad in zip(self._parameters.values(), everywhere, strict=True):
            parameter.grad = grad
        return None

    def reset(self) -> None:
        """Drop everything collected in this step, param.grad included; the next micro-step is the step's first."""
        if self._active:
            raise PlanError("GradientTree.reset: the micro-step has not ended")
        if not self._closer.alive:
            raise PlanError("GradientTree.reset: the tree was closed; make a new one")
        for parameter in self._parameters.values():
            parameter.grad = None
        self._clear()

    def close(self) -> None:
        """Give the parameters back to autograd. The tree is of no use afterwards."""
        self._closer()
        self._failure = self._failure or "it was closed"

    def __enter__(self) -> GradientTree:
        """`with tree:` is one step; it ends with finish()."""
        self._require_sound("step")
        if self._position:
            raise PlanError(
                f"GradientTree: the step before has not ended, at {self._position} samples; reset() or finish()"
            )
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.finish()
        elif not self._failure:  # else the other ranks know
            self._fail(error)
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        """Let the other ranks hear of the error, if they wait for this one's word."""
        self._ranks.tell(error)

    @property
    def most_buffers(self) -> int:
        """The most gradients of one parameter that were held at a time, in all steps so far."""
        return self._covers.most

    @property
    def buffer_limit(self) -> int:
        """1 + ceil(log2(A*D)) + the most nodes of any micro-step, A counted in the smallest m so far."""
        smallest = self._smallest or self._micro_samples or 1
        return _buffer_limit(self.samples_per_step // smallest, 1 if self._unsharded else self._ranks.size)

    # --- numbering ----------------------------------------------------------------------------------------------------

    def _micro_steps_that_work(self) -> list[int]:
        return numbering.micro_steps_that_work(self.samples_per_step, self._ranks.size)

    def _begin(self, num_samples: int | None) -> range:
        """The samples of this rank in the micro-step that begins. PlanError unless they are one node."""
        where = "GradientTree.micro_step"
        m = self._micro_samples if num_samples is None else num_samples
        if m is None:
            raise PlanError(f"{where}: say num_samples here, or micro_steps for the whole tree")
        work = f"micro_steps that work for equal ones: {', '.join(map(str, self._micro_steps_that_work()))}"
        if isinstance(m, bool) or not isinstance(m, int) or m < 1 or m & (m - 1):
            raise PlanError(f"{where}: num_samples is a power of two, so that they are one node, got {m!r}; {work}")
        ranks, left = self._ranks, self.samples_per_step - self._position
        first = self._covers.position if self._unsharded else self._position
        if not left:
            raise PlanError(
                f"{where}: all {self.samples_per_step} samples of the step have come; finish() ends the step. {work}"
            )
        if m * ranks.size > left:
            raise PlanError(f"{where}: {ranks.size} rank(s) times {m} samples, but {left} are left in the step; {work}")
        if first % m:
            raise PlanError(
                f"{where}: sample {first} does not begin a node of {m} samples; expected num_samples to divide it, "
                f"at most {first & -first}; {work}"
            )
        self._require_not_in_use(where)
        self._smallest = min(m, self._smallest or m)
        return range(first, first + m) if self._unsharded else range(*self._runs(m)[ranks.rank])

    def _runs(self, m: int) -> list[Run]:
        """The samples of each rank in this micro-step."""
        return [(first, first + m) for first in range(self._position, self._position + m * self._ranks.size, m)]

    def sample_indices(self, micro_step: int) -> range:
        """The samples of this rank in micro-step `micro_step` of micro_steps equal ones. Errors: PlanError."""
        m, size = self._micro_samples, self._ranks.size
        if m is None:
            raise PlanError("GradientTree.sample_indices: the micro-steps are equal only if micro_steps is given")
        count = self.samples_per_step // (m * size)
        if isinstance(micro_step, bool) or not isinstance(micro_step, int) or not 0 <= micro_step < count:
            raise PlanError(f"GradientTree.sample_indices: micro_step is within [0, {count}), got {micro_step!r}")
        unit = self._ranks.rank * count + micro_step if self._unsharded else micro_step * size + self._ranks.rank
        return range(unit * m, unit * m + m)

    # --- arrival ------------------------------------------------------------------------------------------------------

    def arrive(self, parameter: Tensor, use_index: int, grad: Tensor) -> Tensor | None:
        """A gradient of this micro-step; returns what is left to autograd. PlanError for what it would add or round."""
        where = "GradientTree"
        key = UseKey(self._positions[id(parameter)], use_index)
        name = self._describe(key)
        self._require_sound("backward")
        if not self._active:
            raise PlanError(
                f"{where}: a gradient of {name} arrived outside a micro-step; autograd would add it to param.grad. Run "
                "backward inside `with tree.micro_step() as step`"
            )
        if use_index == DIRECT and key not in self._watched and UseKey(key.parameter, 0) in self._seen:
            return grad  # use 0 once more, which was left to autograd
        if key in self._seen:
            raise PlanError(
                f"{where}: a second gradient of {name} in one micro-step: a second backward, or a checkpoint with "
                "use_reentrant=True. One backward per micro-step"
            )
        if key not in self._watched:
            raise PlanError(
                f"{where}: a gradient of {name} from a graph that was not looked at; start the backward by "
                "step.backward(loss, gradient), or call tree.watch(loss) before"
            )
        if grad.layout != torch.strided:
            raise PlanError(f"{where}: {name}: a {grad.layout} gradient has no tree; use a dense one (sparse=False)")
        if grad.dtype != self._acc_dtype:
            raise PlanError(
                f"{where}: {name}: the gradient arrives in {grad.dtype}, rounded by autograd to the parameter's dtype; "
                f"expected {self._acc_dtype}. Keep an fp32 master weight and give the operator compute_dtype"
            )
        if not _is_dense(grad) or grad.shape != parameter.shape:
            raise PlanError(f"{where}: {name}: expected a dense gradient like the parameter, got {grad.shape}")
        grad = grad.detach()
        if self._first_step:
            self._look_for_rounding(key, name, grad)
        self._seen.add(key)
        if not self._keeps(key):
            return grad
        self._arrived[key] = grad
        return None

    def _keeps(self, key: UseKey) -> bool:
        """Whether the gradient is taken out of param.grad; else something else folds it."""
        return True

    def _look_for_rounding(self, key: UseKey, name: str, grad: Tensor) -> None:
        if self._narrow:
            if not _is_bfloat16(grad):
                raise PlanError(
                    f"GradientTree: {name}: the plan's grad_wire_dtype is bfloat16, but the gradient is not rounded "
                    "(A6); give the operators the same plan"
                )
        elif self._guard and self._acc_dtype == torch.float32 and grad.dim() >= 2 and not self._watched[key]:
            rounded = _is_bfloat16(grad)
            seen = self._rounded.get(key, (True, 0))
            self._rounded[key] = (seen[0] and rounded, seen[1] + int(torch.count_nonzero(grad)) if rounded else 0)

    def _agree_to_finish(self) -> None:
        try:
            self._require_none_left()
            self._judge()
        except PlanError as error:
            self._ranks.tell(error)
            raise
        self._ranks.speak({"finish": True})

    def _require_none_left(self) -> None:
        self._require_not_in_use("GradientTree.finish")

    def _judge(self) -> None:
        """The guard of the first step: a gradient whose parts all were bf16 values has been rounded on its way."""
        bad = [self._describe(key) for key, (all_of, n) in self._rounded.items() if all_of and n >= _GUARD_ELEMENTS]
        if bad:
            raise PlanError(
                f"GradientTree.finish: the gradient of {', '.join(bad[:4])}{' ...' if bad[4:] else ''} is a bf16 value "
                "in every element of every micro-step: it was rounded per micro-batch, so the micro-batch is in its "
                "bits. Give the operator the fp32 master weight and compute_dtype=torch.bfloat16; guard=False if the "
                "values are bf16 by themselves"
            )

    def _refuse_mixed_uses(self) -> None:
        keys = self._seen | self._uses
        for key in keys:
            if key.use == DIRECT and any(other.parameter == key.parameter for other in keys if other != key):
                raise PlanError(
                    f"GradientTree: {self._names[key.parameter]} is used both by gradients.use and without it; "
                    "number all its uses"
                )

    # --- covers -------------------------------------------------------------------------------------------------------

    def _commit(self, m: int) -> None:
        """Fold what has arrived into the covers: this rank's node, or with ranks the nodes of all of them."""
        size = self._ranks.size
        if size == 1 or self._unsharded:
            node = node_of(self._covers.position, m)
            for key in sorted(self._arrived):
                self._covers.absorb(key, [(node, self._arrived.pop(key))])
            self._covers.advance(m)
        else:
            for bucket in self._buckets(self._agreed_keys(m)):
                self._fold_ranks(bucket, m)
            self._covers.advance(m * size)
        self._arrived = {}
        self._position += m * size

    def _agreed_keys(self, m: int) -> list[UseKey]:
        """The uses that some rank has a gradient of, ascending. PlanError on all ranks where one has failed."""
        return self._agree(m, sorted(self._arrived))

    def _agree(self, m: int, mine: list[UseKey]) -> list[UseKey]:
        state = {
            "samples per step": self.samples_per_step,
            "samples before this micro-step": self._position,
            "samples of each rank in this micro-step": m,
            "plan": "none" if self.plan is None else self.plan.key(),
            "parameters": _digest(
                [(name, list(s.shape), str(p.dtype)) for (name, p), s in zip(self._parameters.items(), self._shards)]
            ),
        }
        records = self._ranks.speak({"state": state, "keys": mine})
        for name in state:
            values = [str(record["state"][name]) for record in records]
            if len(set(values)) > 1:
                said = "; ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                raise PlanError(f"GradientTree.micro_step: the ranks disagree about the {name}: {said}")
        return sorted({UseKey(*key) for record in records for key in record["keys"]})

    def _root(self, position: int) -> Tensor:
        """The sum over samples and uses of one parameter, of this rank's elements."""
        uses = self._use_roots(position)
        if uses:
            return fan_in(uses)
        shard = self._shards[position]
        shape = shard.shape if self._ranks.size == 1 else (shard.width,)
        return torch.zeros(shape, dtype=self._acc_dtype, device=self._device(position))

    def _device(self, position: int) -> torch.device:
        """Where the parameter is now: a model may move between steps."""
        return list(self._parameters.values())[position].device

    def _use_roots(self, position: int) -> list[Tensor]:
        """The root of each use that had a gradient in this step, ascending."""
        keys = sorted(key for key in self._covers if isinstance(key, UseKey) and key.parameter == position)
        roots = [self._covers.root(key) for key in keys]
        return [root for root in roots if root is not None]

    # --- ranks --------------------------------------------------------------------------------------------------------

    def _buckets(self, keys: Iterable[UseKey]) -> Iterator[list[UseKey]]:
        bucket: list[UseKey] = []
        total = 0
        for key in keys:
            size = self._shards[key.parameter].width * self._ranks.shards * self._acc_dtype.itemsize
            if bucket and total + size > BUCKET_BYTES:
                yield bucket
                bucket, total = [], 0
            bucket.append(key)
            total += size
        if bucket:
            yield bucket

    def _fold_ranks(self, keys: list[UseKey], m: int) -> None:
        """Per use, the nodes of this micro-step's samples over all ranks, of this rank's elements, into its cover."""
        rows_CSN = self._rows([[self._arrived.pop(key, None)] for key in keys], keys)
        runs = self._runs(m)
        nodes: dict[UseKey, list[tuple[Node, Tensor | None]]] = {key: [] for key in keys}
        for node, value in self._ranks.fold(rows_CSN, (node_of(runs[self._ranks.rank][0], m),), runs, self._narrow):
            for key, part in zip(keys, torch.split(value, self._widths(keys)), strict=True):
                nodes[key].append((node, part))
        for key in keys:
            self._covers.absorb(key, nodes[key])

    def _widths(self, keys: list[UseKey]) -> list[int]:
        return [self._shards[key.parameter].width for key in keys]

    def _rows(self, values: list[list[Tensor | None]], keys: list[UseKey]) -> Tensor:
        """[C, S, N]: values[key][c], node c of each use, cut over the shards; absent ones are +0."""
        widths = self._widths(keys)
        shape = (len(values[0]), self._ranks.shards, sum(widths))
        rows_CSN = torch.empty(shape, dtype=self._acc_dtype, device=self._device(keys[0].parameter))
        for nodes, key, part_CSN in zip(values, keys, torch.split(rows_CSN, widths, 2), strict=True):
            for value, part_SN in zip(nodes, part_CSN, strict=True):
                if value is None:
                    part_SN.zero_()
                else:
                    self._shards[key.parameter].scatter(value, part_SN)
        return rows_CSN

    def _fold_runs(self) -> None:
        """Unsharded: the covers of all ranks' runs, into the root, of this rank's elements."""
        run = self.samples_per_step // self._ranks.size
        runs = [(first, first + run) for first in range(0, self.samples_per_step, run)]
        nodes = tree.cover(*runs[self._ranks.rank])
        here: list[UseKey] = sorted(key for key in self._covers if isinstance(key, UseKey))
        keys = self._agree(run, here)
        whole = Covers(self.samples_per_step, self._narrow)
        for bucket in self._buckets(keys):
            values: list[list[Tensor | None]] = [
                list(self._covers.take(key).values()) if key in self._covers else [None] * len(nodes) for key in bucket
            ]
            parts: dict[UseKey, list[tuple[Node, Tensor | None]]] = {key: [] for key in bucket}
            for node, value in self._ranks.fold(self._rows(values, bucket), nodes, runs, self._narrow):
                for key, part in zip(bucket, torch.split(value, self._widths(bucket)), strict=True):
                    parts[key].append((node, part))
            for key in bucket:
                whole.absorb(key, parts[key])
        whole.most = self._covers.most
        whole.start = self._covers.start
        self._covers = whole

    def _gather(self, positions: Iterable[int], roots: Iterable[Tensor]) -> Iterator[Tensor]:
        """The whole gradients of these parameters from all ranks' elements."""
        if self._ranks.size == 1:
            yield from roots
            return
        rest = iter(roots)
        for bucket in self._buckets(UseKey(position, DIRECT) for position in positions):
            parts = list(itertools.islice(rest, len(bucket)))
            received = self._ranks.gather(torch.cat(parts))
            for key, rows in zip(bucket, torch.split(received, [part.numel() for part in parts], 1), strict=True):
                yield self._shards[key.parameter].whole(rows)

    # --- state --------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._position, self._failure, self._smallest = 0, "", None
        self._covers.clear()
        self._arrived, self._watched, self._rounded = {}, {}, {}
        self._seen, self._uses = set(), set()

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or f"{type(error).__name__}: {str(error)[:200]}"
        self._covers.clear()
        self._arrived = {}

    def _require_sound(self, what: str) -> None:
        if self._failure:
            raise PlanError(
                f"GradientTree.{what}: the step cannot go on after {self._failure!r}; what has been collected is lost. "
                "reset() and begin the step again"
            )

    def _require_not_in_use(self, where: str) -> None:
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise PlanError(
                    f"{where}: {name}.grad holds a gradient, and autograd would add to it; call "
                    "optimizer.zero_grad(set_to_none=True) after optimizer.step()"
                )

    def _require_parameter(self, name: str, parameter: Tensor) -> None:
        where = "GradientTree"
        if not _is_dense(parameter) or not parameter.is_leaf:
            raise PlanError(
                f"{where}: {name}: expected a dense CPU or CUDA parameter, got {type(parameter).__name__} on "
                f"{parameter.device}"
            )
        narrower = parameter.dtype in (torch.bfloat16, torch.float16) and self._acc_dtype == torch.float32
        if parameter.dtype != self._acc_dtype and not (narrower and hasattr(Tensor, "grad_dtype")):
            raise PlanError(
                f"{where}: {name} is {parameter.dtype}; expected {self._acc_dtype}, the dtype of its gradient: "
                "autograd would round it in every micro-batch. Keep an fp32 master weight and give the "
                "operator compute_dtype"
            )
        if collector_of(parameter) is not None:
            raise PlanError(f"{where}: {name} belongs to another GradientTree; close() that one first")

    def _describe(self, key: UseKey) -> str:
        name = self._names[key.parameter]
        return name if key.use == DIRECT else f"use {key.use} of {name}"


class UseKey(NamedTuple):
    """A use of a parameter: its position in the tree's list, the number given to use() or DIRECT."""

    parameter: int
    use: int


# --- small things -----------------------------------------------------------------------------------------------------


def _restore_grad_dtype(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """A parameter that still holds its fp32 gradient keeps the dtype of it."""
    if parameter.grad is None or parameter.grad.dtype == dtype:
        parameter.grad_dtype = dtype


def _named(where: str, parameters: torch.nn.Module | Mapping[str, Tensor] | Iterable[Tensor]) -> dict[str, Tensor]:
    """Name -> parameter, each once, in the order given."""
    if isinstance(parameters, torch.nn.Module):
        pairs: list[tuple[str, Tensor]] = list(parameters.named_parameters())
    elif isinstance(parameters, Mapping):
        pairs = list(parameters.items())
    else:
        pairs = [(f"parameter {i}", parameter) for i, parameter in enumerate(parameters)]
    seen: set[int] = set()
    named: dict[str, Tensor] = {}
    for name, parameter in pairs:
        if not isinstance(parameter, Tensor):
            raise PlanError(f"{where}: {name}: expected a parameter, got {type(parameter).__name__}")
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            named[name] = parameter
    if not named:
        raise PlanError(f"{where}: expected at least one parameter that requires a gradient")
    return named


@lru_cache(maxsize=64)
def _buffer_limit(units: int, size: int) -> int:
    runs = range(0, units - size + 1, size)
    return 1 + (units - 1).bit_length() + max(len(tree.cover(first, first + size)) for first in runs)


def node_of(first: int, m: int) -> Node:
    """The m samples from `first` on."""
    return Node(m.bit_length() - 1, first // m)


def _is_bfloat16(x: Tensor) -> bool:
    """Whether every fp32 value is a bf16 value: its low half is zero."""
    return not bool((x.contiguous().view(torch.int32) & 0xFFFF).any())


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
