"""Linear layers whose bits do not depend on how they are sharded: the place where operators and collectives meet.

    RowParallelLinear     y = cast(all-reduce of the ranks' covers over K + bias)     dX, dW local
    ColumnParallelGroup   y_g = x W_g^T + bias_g, local     dX = cast(ONE all-reduce of covers over N)     dW local

    x -> [column group: q, k, v] -> heads of this rank -> [row: o] -> all-reduce -> y
         backward: one all-reduce of dX                    backward: none

A rank owns a run of leaves of the sharded contraction (ORDER.md T6), its rows or columns [cut(lo), cut(hi)). `group`
None is one rank that owns all leaves: the same order, the same bits. Every rank of the group makes the same calls in
the same order; the first call compares plan and runs. Sharded modules are eager: torch.compile breaks its graph there,
and fullgraph=True refuses.

Suffixes: M rows, K input features, N output features, k and n this rank's share of them. Weights may be fp32 masters of
a bf16 or fp16 `compute_dtype`; their gradients then are fp32 (S2). CPU and CUDA tensors.
Errors: PlanError at construction; in a call those of tbik.ops and tbik.collectives.
Bits: layout-invariant and batch-invariant, forward and backward (tests/test_nn.py::test_verify_tensor_parallel_worlds).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tbik import ops, tree
from tbik.collectives import Cover, all_reduce
from tbik.errors import PlanError
from tbik.ops.linear import (
    CoverRun,
    PackedWeight,
    Parallel,
    acc_dtype,
    bias_grad,
    linear_cover,
    linear_dw,
    linear_dx,
    require_bias,
    require_layer,
    require_linear,
    require_members,
)
from tbik.packing import Packable, PackSpec
from tbik.plan import Run, TreePlan, leaf_runs

Rows = tuple[int, int]
"""Rows [first, end) of a full weight."""


class Linear(Packable):
    """y = cast(x W^T + bias), on one rank or data-parallel ranks. Arguments as in ops.linear.

    weight [N, K], initialised as torch.nn.Linear does. compute_dtype: the weight's dtype by default.
    parallel: the place of this linear in a sharded model, "row", "column" or None: plan.wire_dtype applies at every
    world size, so a run on one rank says what the sharded run is. Bits: layout-invariant and batch-invariant.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        plan: TreePlan,
        compute_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        parallel: Parallel | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        where = "nn.Linear"
        _require_plan(where, plan)
        for name, features in (("in_features", in_features), ("out_features", out_features)):
            if not _is_int(features) or features < 0:
                raise PlanError(f"{where}: {name} is an integer >= 0, got {features!r}")
        stored = torch.get_default_dtype() if dtype is None else dtype
        require_layer(where, stored, plan, compute_dtype, out_dtype, parallel)
        self.in_features, self.out_features = in_features, out_features
        self.plan, self.compute_dtype, self.out_dtype, self.parallel = plan, compute_dtype, out_dtype, parallel
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=dtype, device=device))
        self.bias = torch.nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_full(cls, weight: Tensor, bias: Tensor | None = None, **arguments: Any) -> Linear:
        """The layer that multiplies by weight [N, K]; a Parameter is kept as it is."""
        _require_matrix("nn.Linear", "weight", weight)
        layer = cls(weight.shape[1], weight.shape[0], bias=False, device="meta", dtype=weight.dtype, **arguments)
        layer.weight = _parameter(weight)
        if bias is not None:
            require_bias("nn.Linear", bias, weight.shape[0], layer.plan)
            layer.bias = _parameter(bias)
        return layer

    def reset_parameters(self) -> None:
        """Weight and bias uniform in +-1/sqrt(K), as torch.nn.Linear starts."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        for parameter in self._parameters.values():
            if parameter is not None:
                torch.nn.init.uniform_(parameter, -bound, bound)

    def pack_specs(self) -> dict[str, PackSpec]:
        run = CoverRun(self.in_features, 0, self.plan.leaves)
        return {"weight": PackSpec(self.plan, _compute(self.compute_dtype, self.weight), self.parallel, run)}

    def forward(self, x: Tensor, sample_offsets: Sequence[int] | None = None) -> Tensor:
        return ops.linear(
            x,
            self.weight_of("weight"),
            self.bias,
            plan=self.plan,
            compute_dtype=_compute(self.compute_dtype, self.weight),
            out_dtype=self.out_dtype,
            sample_offsets=sample_offsets,
            parallel=self.parallel,
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, leaves={self.plan.leaves}"


class RowParallelLinear(Packable):
    """y = cast(root over K of the ranks' covers + bias): each rank holds columns [cut(lo), cut(hi)) of W.

    weight [N, k] of this rank; bias [N], the same on all ranks, added once after the root. x [..., k] -> y [..., N] on
    every rank. runs: leaf run of every rank, plan.leaf_runs by default; Layout.attention or Layout.mlp of a model.
    Bits: those of Linear(parallel="row") on one rank.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        in_features: int,
        plan: TreePlan,
        group: dist.ProcessGroup | None = None,
        runs: Sequence[Run] | None = None,
        compute_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        head_dim: int | None = None,
    ) -> None:
        super().__init__()
        where = "nn.RowParallelLinear"
        self.sharding = _sharding(where, plan, group, runs, in_features)
        rows = _rows_of_runs(where, "in_features", in_features, self.sharding, head_dim)
        _require_matrix(where, "weight", weight)
        require_layer(where, weight.dtype, plan, compute_dtype, out_dtype, "row")
        first, end = rows[self.sharding.rank]
        if weight.shape[1] != end - first:
            raise PlanError(
                f"{where}: rank {self.sharding.rank} of {self.sharding.size} holds columns [{first}, {end}) of "
                f"{in_features}; expected weight [N, {end - first}], got {list(weight.shape)}"
            )
        self.in_features, self.out_features = in_features, weight.shape[0]
        self.compute_dtype, self.out_dtype = compute_dtype, out_dtype
        self.weight = _parameter(weight)
        if bias is not None:
            require_bias(where, bias, weight.shape[0], plan)
        self.bias = None if bias is None else _parameter(bias)

    @classmethod
    def from_full(cls, weight: Tensor, bias: Tensor | None = None, **arguments: Any) -> RowParallelLinear:
        """Takes the full weight [N, K] and keeps a copy of this rank's columns."""
        where = "nn.RowParallelLinear"
        _require_matrix(where, "weight", weight)
        sharding = _sharding(
            where, arguments.get("plan"), arguments.get("group"), arguments.get("runs"), weight.shape[1]
        )
        rows = _rows_of_runs(where, "in_features", weight.shape[1], sharding, arguments.get("head_dim"))
        return cls(_share(weight, rows[sharding.rank], 1), bias, in_features=weight.shape[1], **arguments)

    @property
    def plan(self) -> TreePlan:
        return self.sharding.plan

    def pack_specs(self) -> dict[str, PackSpec]:
        run = CoverRun(self.in_features, *self.sharding.run)
        return {"weight": PackSpec(self.plan, _compute(self.compute_dtype, self.weight), "row", run)}

    def forward(self, x: Tensor, sample_offsets: Sequence[int] | None = None) -> Tensor:
        weight, compute = self.weight_of("weight"), _compute(self.compute_dtype, self.weight)
        if self.sharding.size == 1:
            return ops.linear(
                x,
                weight,
                self.bias,
                plan=self.plan,
                compute_dtype=compute,
                out_dtype=self.out_dtype,
                sample_offsets=sample_offsets,
                parallel="row",
            )
        y: Tensor = _row_parallel(self, x, weight, compute, sample_offsets)
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.sharding.describe()}"


class ColumnParallelGroup(Packable):
    """y_g = cast(x W_g^T + bias_g) for linears that share x (q, k, v; gate, up); dX is ONE tree, one all-reduce (L2).

    weights: this rank's rows [n_g, K] of each member; out_features: N_g of each. x [..., K], the same on every rank
    -> y_g [..., n_g] of this rank.
    runs: leaf run of every rank, common to all members; plan.leaf_runs by default.
    held_rows: per member None, or the rows [first, end) that every rank holds, if they are more than its run: KV heads
        that several ranks need. Each of these ranks computes them and must be given their complete dY; only the rows of
        the run enter dX, so that each counts once.
    head_dim: if given, a rank that would hold part of a head is refused.
    Bits: forward those of the full linears, row by row; dX those of ops.linear_group on one rank.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] | None = None,
        *,
        out_features: Sequence[int],
        plan: TreePlan,
        group: dist.ProcessGroup | None = None,
        runs: Sequence[Run] | None = None,
        held_rows: Sequence[Sequence[Rows] | None] | None = None,
        head_dim: int | None = None,
        names: Sequence[str] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        biases = require_members(f"nn.{where}", weights, biases)
        names = [str(g) for g in range(len(weights))] if names is None else names
        for what, values in (("out_features", out_features), ("names", names)):
            if not isinstance(values, (list, tuple)) or len(values) != len(weights):
                raise PlanError(
                    f"nn.{where}: {what} is a list with an entry per weight, {len(weights)}, got {values!r}"
                )
        if not all(_is_int(length) and length >= 0 for length in out_features):
            raise PlanError(f"nn.{where}: out_features are integers >= 0, got {list(out_features)}")
        for g, weight in enumerate(weights):
            _require_matrix(f"nn.{where}", f"weights[{g}]", weight)
        self._require_names(names)
        self.sharding = _sharding(f"nn.{where}", plan, group, runs, out_features[0])
        self.held = _held_rows(f"nn.{where}", out_features, self.sharding, held_rows, head_dim)
        self.in_features = weights[0].shape[1]
        self.out_features, self.compute_dtype = tuple(out_features), compute_dtype
        self.weight_names = [self._name("weight", name) for name in names]
        self.bias_names = [self._name("bias", name) for name in names]
        if compute_dtype is None and len({weight.dtype for weight in weights}) > 1:
            dtypes = [str(weight.dtype) for weight in weights]
            raise PlanError(f"nn.{where}: the weights are {', '.join(dtypes)}; say compute_dtype")
        for g, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            require_layer(f"nn.{where}", weight.dtype, plan, self._compute_of(weights[0]), None, "column")
            first, end = self.held[g]
            if weight.shape[0] != end - first or weight.shape[1] != self.in_features:
                raise PlanError(
                    f"nn.{where}: rank {self.sharding.rank} of {self.sharding.size} holds rows [{first}, {end}) of the "
                    f"{out_features[g]} of {names[g]}; expected weight [{end - first}, {self.in_features}], got "
                    f"{list(weight.shape)}"
                )
            if bias is not None:
                require_bias(f"nn.{where}", bias, end - first, plan)
            self.register_parameter(self.weight_names[g], _parameter(weight))
            self.register_parameter(self.bias_names[g], None if bias is None else _parameter(bias))
        self._agreed = self.sharding.size == 1

    @classmethod
    def from_full(
        cls, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, **arguments: Any
    ) -> ColumnParallelGroup:
        """Takes the full weights [N_g, K] and biases [N_g] and keeps a copy of this rank's rows."""
        where = f"nn.{cls.__name__}"
        biases = require_members(where, weights, biases)
        for g, weight in enumerate(weights):
            _require_matrix(where, f"weights[{g}]", weight)
        out_features = [weight.shape[0] for weight in weights]
        sharding = _sharding(
            where, arguments.get("plan"), arguments.get("group"), arguments.get("runs"), sum(out_features)
        )
        held = _held_rows(where, out_features, sharding, arguments.get("held_rows"), arguments.get("head_dim"))
        for bias, n in zip(biases, out_features, strict=True):
            if bias is not None:
                require_bias(where, bias, n, sharding.plan)
        biases = [None if bias is None else _share(bias, rows, 0) for bias, rows in zip(biases, held, strict=True)]
        shares = [_share(weight, rows, 0) for weight, rows in zip(weights, held, strict=True)]
        return cls(shares, biases, out_features=out_features, **arguments)

    @property
    def plan(self) -> TreePlan:
        return self.sharding.plan

    def pack_specs(self) -> dict[str, PackSpec]:
        run = CoverRun(self.in_features, 0, self.plan.leaves)
        compute = self._compute_of(getattr(self, self.weight_names[0]))
        return {name: PackSpec(self.plan, compute, None, run) for name in self.weight_names}

    def forward(self, x: Tensor, sample_offsets: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        weights = [self.weight_of(name) for name in self.weight_names]
        biases = [getattr(self, name) for name in self.bias_names]
        compute = self._compute_of(getattr(self, self.weight_names[0]))
        if self.sharding.size > 1:  # as the operators do, but before any message
            where = f"nn.{type(self).__name__}"
            for weight, bias in zip(weights, biases, strict=True):
                require_linear(where, x, weight, bias, self.plan, compute, sample_offsets=sample_offsets)
        if not self._agreed:
            _compare_ranks(self.sharding)
            self._agreed = True
        tensors = [w for w in weights if not isinstance(w, PackedWeight)]
        if len(tensors) != len(weights):  # frozen: no gradient, so the members are linears of their own
            return tuple(
                ops.linear(x, w, b, plan=self.plan, compute_dtype=compute, sample_offsets=sample_offsets)
                for w, b in zip(weights, biases, strict=True)
            )
        if self.sharding.size == 1:
            return ops.linear_group(
                x, tensors, biases, plan=self.plan, compute_dtype=compute, sample_offsets=sample_offsets
            )
        outputs: tuple[Tensor, ...] = _column_parallel(self, x, tensors, biases, compute, sample_offsets)
        return outputs

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.sharding.describe()}"

    def _compute_of(self, first_weight: Tensor) -> torch.dtype:
        return _compute(self.compute_dtype, first_weight)

    def _name(self, kind: str, member: str) -> str:
        return f"{kind}_{member}"

    def _require_names(self, names: Sequence[str]) -> None:
        where = f"nn.{type(self).__name__}"
        if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
            raise PlanError(f"{where}: names are strings, all different, got {list(names)}")
        taken = set(vars(self)) | set(dir(type(self))) | {"weight_names", "bias_names"}
        for attribute in (self._name(kind, name) for name in names for kind in ("weight", "bias")):
            if not attribute.isidentifier() or attribute in taken:
                raise PlanError(f"{where}: a parameter cannot be called {attribute!r}; choose other names")


class ColumnParallelLinear(ColumnParallelGroup):
    """y = cast(x W^T + bias): each rank holds rows [cut(lo), cut(hi)) of W; a group of one. Arguments as there.

    weight [n, K] of this rank; x [..., K] -> y [..., n]. Bits: those of Linear(parallel="column"), for these features.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, out_features: int, **arguments: Any) -> None:
        super().__init__([weight], [bias], out_features=[out_features], names=[""], **arguments)

    @classmethod
    def from_full(  # type: ignore[override]
        cls, weight: Tensor, bias: Tensor | None = None, **arguments: Any
    ) -> ColumnParallelLinear:
        """Takes the full weight [N, K] and bias [N] and keeps a copy of this rank's rows."""
        where = "nn.ColumnParallelLinear"
        _require_matrix(where, "weight", weight)
        sharding = _sharding(
            where, arguments.get("plan"), arguments.get("group"), arguments.get("runs"), weight.shape[0]
        )
        head_dim = arguments.get("head_dim")
        (rows,) = _held_rows(where, [weight.shape[0]], sharding, arguments.get("held_rows"), head_dim)
        if bias is not None:
            require_bias(where, bias, weight.shape[0], sharding.plan)
            bias = _share(bias, rows, 0)
        return cls(_share(weight, rows, 0), bias, out_features=weight.shape[0], **arguments)

    def forward(self, x: Tensor, sample_offsets: Sequence[int] | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, sample_offsets)[0]

    def _name(self, kind: str, member: str) -> str:
        return kind


def runs_of_rows(plan: TreePlan, length: int, bounds: Sequence[int]) -> tuple[Run, ...]:
    """The leaf runs of ranks that hold rows [0, bounds[0]), [bounds[0], bounds[1]), ... of a contraction of `length`.

    For engines that fix the rows: equal shards are bounds = [K/W, 2K/W, ..., K]. Errors: PlanError where a bound cuts a
    leaf.
    """
    _require_plan("nn.runs_of_rows", plan)
    if not isinstance(bounds, (list, tuple)) or not all(_is_int(bound) for bound in bounds):
        raise PlanError(f"nn.runs_of_rows: bounds is a list or tuple of integers, got {bounds!r}")
    cuts = plan.cuts(length)
    leaf_at = {cut: leaf for leaf, cut in enumerate(cuts[:-1])}
    leaf_at[length] = plan.leaves
    if not bounds or bounds[-1] != length or any(a >= b for a, b in itertools.pairwise((0, *bounds))):
        raise PlanError(f"nn.runs_of_rows: expected ascending bounds that end at {length}, got {list(bounds)}")
    for bound in bounds:
        if bound not in leaf_at:
            raise PlanError(
                f"nn.runs_of_rows: row {bound} cuts a leaf; {plan.leaves} leaves of {length} are cut at {list(cuts)}"
            )
    return tuple(itertools.pairwise((0, *(leaf_at[bound] for bound in bounds))))


# --- sharding: checked once, at construction ------------------------------------------------------------------------


class _Sharding(NamedTuple):
    """Who holds which leaves."""

    plan: TreePlan
    group: dist.ProcessGroup | None
    rank: int
    runs: tuple[Run, ...]

    @property
    def size(self) -> int:
        return len(self.runs)

    @property
    def run(self) -> Run:
        return self.runs[self.rank]

    def __deepcopy__(self, memo: Any) -> _Sharding:
        return self  # a process group has no copy

    def describe(self) -> str:
        lo, hi = self.run
        return f"leaves [{lo}, {hi}) of {self.plan.leaves} on rank {self.rank} of {self.size}"

    def cover(self, values: Tensor) -> Cover:
        return Cover(values, tree.cover(*self.run), self.plan.leaves)


def _sharding(
    where: str, plan: TreePlan | None, group: dist.ProcessGroup | None, runs: Sequence[Run] | None, length: int
) -> _Sharding:
    plan = _require_plan(where, plan)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise PlanError(
            f"{where}: group is a ProcessGroup this rank belongs to, or None for one rank, got {group!r}; of a "
            "DeviceMesh pass mesh.get_group(), the default group is torch.distributed.group.WORLD"
        )
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    if runs is None:
        return _Sharding(plan, group, rank, leaf_runs(length, plan.leaves, size))
    runs = _require_pairs(where, "runs", runs)
    if len(runs) != size:
        raise PlanError(f"{where}: expected one run of leaves per rank, {size}, got {len(runs)}: {list(runs)}")
    ends = [0, *itertools.chain.from_iterable(runs), plan.leaves]
    if any(lo >= hi for lo, hi in runs) or any(a != b for a, b in zip(ends[::2], ends[1::2], strict=True)):
        raise PlanError(
            f"{where}: the runs {list(runs)} do not cover the {plan.leaves} leaves once each, in ascending rank order "
            "and at least one per rank"
        )
    return _Sharding(plan, group, rank, runs)


def _rows_of_runs(
    where: str, name: str, length: int, sharding: _Sharding, head_dim: int | None
) -> tuple[tuple[int, int], ...]:
    """The rows of each rank's run; PlanError where one cuts a head."""
    cuts = sharding.plan.cuts(length)
    rows = tuple((cuts[lo], cuts[hi]) for lo, hi in sharding.runs)
    _require_heads(where, name, length, rows, head_dim)
    return rows


def _held_rows(
    where: str,
    out_features: Sequence[int],
    sharding: _Sharding,
    held_rows: Sequence[Sequence[Rows] | None] | None,
    head_dim: int | None,
) -> list[Rows]:
    """This rank's rows of each member; every rank checks the rows of all ranks, so all refuse together."""
    if held_rows is not None and (not isinstance(held_rows, (list, tuple)) or len(held_rows) != len(out_features)):
        raise PlanError(
            f"{where}: held_rows is a list with rows (or None) per member, {len(out_features)}, got {held_rows!r}"
        )
    mine = []
    for g, length in enumerate(out_features):
        given = None if held_rows is None else held_rows[g]
        if given is None:
            mine.append(_rows_of_runs(where, f"member {g}", length, sharding, head_dim)[sharding.rank])
            continue
        rows = _require_pairs(where, f"held_rows[{g}]", given)
        needed = _rows_of_runs(where, f"member {g}", length, sharding, None)
        if len(rows) != sharding.size:
            raise PlanError(f"{where}: member {g}: expected held rows of {sharding.size} ranks, got {len(rows)}")
        for rank, ((first, end), (lo, hi)) in enumerate(zip(rows, needed, strict=True)):
            if not (0 <= first <= end <= length) or (lo < hi and not (first <= lo and hi <= end)):
                raise PlanError(
                    f"{where}: member {g}: rank {rank} would hold rows [{first}, {end}) of {length}, but its leaves "
                    f"need [{lo}, {hi})"
                )
        _require_heads(where, f"member {g}", length, rows, head_dim)
        mine.append(rows[sharding.rank])
    return mine


def _require_heads(where: str, name: str, length: int, rows: Sequence[Rows], head_dim: int | None) -> None:
    if head_dim is None:
        return
    if not _is_int(head_dim) or head_dim < 1:
        raise PlanError(f"{where}: head_dim is an integer >= 1, got {head_dim!r}")
    for rank, (first, end) in enumerate(rows):
        if first % head_dim or end % head_dim:
            raise PlanError(
                f"{where}: {name}: rank {rank} would hold rows [{first}, {end}) of {length}, which cut a head of "
                f"{head_dim}; TreePlan.layout(config, tp) gives runs of whole heads"
            )


def _require_pairs(where: str, name: str, pairs: Any) -> tuple[tuple[int, int], ...]:
    """Half-open ranges, one per rank; nothing is rounded to an integer."""
    if not isinstance(pairs, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(_is_int(end) for end in pair) for pair in pairs
    ):
        raise PlanError(f"{where}: {name} is a list of pairs of integers, one per rank, got {pairs!r}")
    return tuple((first, end) for first, end in pairs)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_plan(where: str, plan: TreePlan | None) -> TreePlan:
    if not isinstance(plan, TreePlan):
        raise PlanError(f"{where}: plan is a tbik.TreePlan, got {type(plan).__name__}")
    return plan


def _require_matrix(where: str, name: str, weight: Tensor) -> None:
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        shape = list(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise PlanError(f"{where}: expected {name} [N, K], got {shape}")


def _parameter(value: Tensor) -> torch.nn.Parameter:
    return value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value.detach().resolve_neg())


def _share(full: Tensor, rows: Rows, dim: int) -> torch.nn.Parameter:
    # a copy: a view would keep the full weight alive on every rank
    part = full.detach().resolve_neg().narrow(dim, rows[0], rows[1] - rows[0]).contiguous().clone()
    return torch.nn.Parameter(part, requires_grad=full.requires_grad or not isinstance(full, torch.nn.Parameter))


def _compute(compute_dtype: torch.dtype | None, weight: Tensor) -> torch.dtype:
    return weight.dtype if compute_dtype is None else compute_dtype


# --- operators and collectives joined -------------------------------------------------------------------------------


def _compare_ranks(sharding: _Sharding) -> None:
    """PlanError on all ranks unless they share plan and runs: a sum of nothing, whose call the ranks compare.

    Without it a group whose dX nobody asks for would never notice ranks that differ.
    """
    # on the CPU, wherever the weights are: what is compared are records, which travel over the CPU backend
    nothing = torch.zeros(len(tree.cover(*sharding.run)), 1, dtype=acc_dtype(sharding.plan))
    all_reduce(sharding.cover(nothing), sharding.group, plan=sharding.plan, runs=sharding.runs)


class _Context(NamedTuple):
    """What the backward of a sharded layer needs beside its tensors."""

    sharding: _Sharding
    compute: torch.dtype
    out_dtype: torch.dtype | None
    sample_offsets: Sequence[int] | None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _row_parallel(
    layer: RowParallelLinear,
    x: Tensor,
    weight: Tensor | PackedWeight,
    compute: torch.dtype,
    sample_offsets: Sequence[int] | None,
) -> Tensor:
    run = CoverRun(layer.in_features, *layer.sharding.run)
    # as on one rank, and before any message, so that no rank waits for one that has refused
    _, out = require_linear(
        "nn.RowParallelLinear",
        x,
        weight,
        layer.bias,
        layer.plan,
        compute,
        out_dtype=layer.out_dtype,
        sample_offsets=sample_offsets,
        parallel="row",
        run=run,
    )
    context = _Context(layer.sharding, compute, out, sample_offsets)
    if isinstance(weight, PackedWeight):
        return _row_forward(context, run, x, weight, layer.bias)
    y: Tensor = _RowParallel.apply(context, run, x, weight, layer.bias)  # type: ignore[no-untyped-call]
    return y


def _row_forward(
    context: _Context, run: CoverRun, x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None
) -> Tensor:
    plan = context.sharding.plan
    values = linear_cover(x, weight, run, plan=plan, compute_dtype=context.compute, parallel=True)
    y = all_reduce(
        context.sharding.cover(values),
        context.sharding.group,
        plan=plan,
        runs=context.sharding.runs,
        wire=True,
        bias=None if bias is None else bias.detach().resolve_neg(),
        out_dtype=context.out_dtype,
    )
    # not a view: autograd forbids in-place edits of a view that a Function returns
    return torch.ops.aten._unsafe_view.default(y, y.shape) if y._is_view() else y


class _Refuse(torch.autograd.Function):
    """The first argument, whose derivative with respect to the others is refused."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> NoReturn:
        raise PlanError("nn: a sharded layer has no second derivative; it is differentiable once")


def _differentiable_once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward(ctx, saved_tensors, *dY) whose results raise PlanError if differentiated (create_graph=True)."""

    @wraps(backward)
    def wrapped(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing allows no second look
        # no dispatcher stands before our kernels here that would resolve a lazy sign
        grad_outputs = tuple(g if g is None else g.resolve_neg() for g in grad_outputs)
        with torch.no_grad():
            gradients = backward(ctx, saved, *grad_outputs)
        sources = [t for t in (*grad_outputs, *saved) if t is not None and t.requires_grad]
        if not torch.is_grad_enabled() or not sources:
            return gradients
        return tuple(None if g is None else _Refuse.apply(g, *sources) for g in gradients)  # type: ignore[no-untyped-call]

    return wrapped


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, context: _Context, run: CoverRun, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.context = context
        ctx.x_dtype = x.dtype
        ctx.save_for_backward(x, weight)
        return _row_forward(context, run, x, weight, bias)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Any, ...]:
        x, weight = saved
        plan, compute, offsets = ctx.context.sharding.plan, ctx.context.compute, ctx.context.sample_offsets
        _, _, needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = dw = db = None
        if needs_x:
            # each rank's input features are its own: the tree over N is whole here and never on a wire
            dx = linear_dx([dy], [weight], plan=plan, compute_dtype=compute, out_dtype=ctx.x_dtype, parallel=False)
        if needs_weight:
            dw = linear_dw(dy, x, plan=plan, compute_dtype=compute, sample_offsets=offsets)
        if needs_bias:
            db = bias_grad(dy, plan=plan, sample_offsets=offsets)
        return None, None, dx, dw, db


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _column_parallel(
    layer: ColumnParallelGroup,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    compute: torch.dtype,
    sample_offsets: Sequence[int] | None,
) -> tuple[Tensor, ...]:
    context = _Context(layer.sharding, compute, None, sample_offsets)
    slices = []
    for (first, _), length in zip(layer.held, layer.out_features, strict=True):
        cuts = layer.plan.cuts(length)
        lo, hi = layer.sharding.run
        # a run without rows of this member (an empty leaf) may lie outside the rows that the rank holds
        slices.append(slice(cuts[lo] - first, cuts[hi] - first) if cuts[lo] < cuts[hi] else slice(0, 0))
    outputs: tuple[Tensor, ...] = _ColumnParallel.apply(  # type: ignore[no-untyped-call]
        context, layer.out_features, slices, x, *weights, *biases
    )
    return outputs


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        context: _Context,
        lengths: tuple[int, ...],
        slices: list[slice],
        x: Tensor,
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(lengths)], parameters[len(lengths) :]
        ctx.context, ctx.lengths, ctx.slices = context, lengths, slices
        ctx.save_for_backward(x, *weights)
        return tuple(
            ops.linear(
                x,
                w,  # type: ignore[arg-type]
                b,
                plan=context.sharding.plan,
                compute_dtype=context.compute,
                sample_offsets=context.sample_offsets,
            )
            for w, b in zip(weights, biases, strict=True)
        )

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], *grad_outputs: Tensor) -> tuple[Any, ...]:
        x, *weights = saved
        sharding, compute, offsets = ctx.context.sharding, ctx.context.compute, ctx.context.sample_offsets
        _, _, _, needs_x, *needs = ctx.needs_input_grad
        dx = None
        if needs_x:
            values = linear_dx(
                [dy[..., rows] for dy, rows in zip(grad_outputs, ctx.slices, strict=True)],
                [w[rows] for w, rows in zip(weights, ctx.slices, strict=True)],
                [CoverRun(length, *sharding.run) for length in ctx.lengths],
                plan=sharding.plan,
                compute_dtype=compute,
                parallel=True,
            )
            dx = all_reduce(
                sharding.cover(values),
                sharding.group,
                plan=sharding.plan,
                runs=sharding.runs,
                wire=True,
                out_dtype=x.dtype,
            )
        dw = [
            linear_dw(dy, x, plan=sharding.plan, compute_dtype=compute, sample_offsets=offsets) if need else None
            for dy, need in zip(grad_outputs, needs[: len(weights)], strict=True)
        ]
        db = [
            bias_grad(dy, plan=sharding.plan, sample_offsets=offsets) if need else None
            for dy, need in zip(grad_outputs, needs[len(weights) :], strict=True)
        ]
        return None, None, None, dx, *dw, *db
