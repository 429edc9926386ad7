"""A mixture of experts over ranks: every rank holds a run of leaves of every expert, and routes every token itself.

    logits = x W_router^T, fp32          weights, ids = route(logits)        the same on every rank, nothing is sent
    y  = cast(all-reduce of the covers of ops.experts)                       one all-reduce
    dx = cast(all-reduce of the experts' covers + dlogits W_router)          one all-reduce: covers of dx, and beside
    dlogits = route_backward(all-reduce of the covers of dweights)           them those of the weights' gradients

    x is used twice, by the router and by the experts; both gradients are fp32 roots, added here and rounded once (M4).
Suffixes as in ops/experts.py. Errors: PlanError at construction; in a call those of tbik.ops and tbik.collectives.
Bits: layout-invariant and batch-invariant, forward and backward (tests/test_experts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tbik import devices
from tbik.collectives import all_reduce
from tbik.errors import PlanError
from tbik.nn import Rows, _differentiable_once, _parameter, _require_plan, _Sharding, _sharding
from tbik.ops.experts import (
    PackedExperts,
    Routing,
    experts_backward,
    experts_cover,
    packed_experts_cover,
    route,
    route_backward,
)
from tbik.ops.linear import CoverRun, _is_int, _run_schedule, linear, linear_dw, linear_dx, require_layer
from tbik.packing import Packable, PackSpec
from tbik.plan import Run, TreePlan


class _Held(Packable):
    """Parameters under the names that a checkpoint has for them, and the leaves of the axis each is multiplied over."""

    def __init__(self, plan: TreePlan, compute_dtype: torch.dtype | None, **held: tuple[Tensor, CoverRun]) -> None:
        super().__init__()
        self.plan, self.compute_dtype = plan, compute_dtype
        self.runs = {name: run for name, (_, run) in held.items()}
        for name, (value, _) in held.items():
            self.register_parameter(name, _parameter(value))

    def pack_specs(self) -> dict[str, PackSpec]:
        return {
            name: PackSpec(self.plan, self.compute_dtype or getattr(self, name).dtype, None, run)
            for name, run in self.runs.items()
        }


class RoutedExperts(torch.nn.Module):
    """y = sum over the experts that a token chose, weighted by its router, of down(silu(gate) up).

    router [E, H]; gate_up [E, 2i, H], gate before up, and down [E, H, i]: this rank's leaves of the intermediate axis
    of every expert, whose length is `intermediate`. slots: experts per token. normalize: their weights sum to one.
    runs: leaf run of every rank, plan.leaf_runs by default. compute_dtype: the router's dtype by default; parameters
    may be fp32 masters. Parameters: gate.weight, experts.gate_up_proj, experts.down_proj.
    """

    def __init__(
        self,
        router: Tensor,
        gate_up: Tensor,
        down: Tensor,
        *,
        intermediate: int,
        slots: int,
        normalize: bool,
        plan: TreePlan,
        group: dist.ProcessGroup | None = None,
        runs: Sequence[Run] | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = "RoutedExperts"
        _require_plan(where, plan)
        if plan.acc_dtype != "float32":
            raise PlanError(f"{where}: experts accumulate in float32, the plan says {plan.acc_dtype}")
        if router.dim() != 2 or not _is_int(slots) or not 1 <= slots <= router.shape[0]:
            raise PlanError(
                f"{where}: expected a router [E, H] and slots from 1 to E, got {list(router.shape)}, {slots!r}"
            )
        if not isinstance(normalize, bool):
            raise PlanError(f"{where}: normalize is True or False, got {normalize!r}")
        self.sharding = _sharding(where, plan, group, runs, intermediate)
        first, end = self.columns(intermediate, self.sharding)[self.sharding.rank]
        num_experts, hidden = router.shape
        expected = ([num_experts, 2 * (end - first), hidden], [num_experts, hidden, end - first])
        if [list(gate_up.shape), list(down.shape)] != list(expected) or first == end:
            raise PlanError(
                f"{where}: rank {self.sharding.rank} of {self.sharding.size} holds columns [{first}, {end}) of "
                f"{intermediate} (one at least); expected gate_up {expected[0]} and down {expected[1]}, got "
                f"{list(gate_up.shape)} and {list(down.shape)}"
            )
        for weight in (router, gate_up, down):
            require_layer(where, weight.dtype, plan, compute_dtype, None, "row")
        self.intermediate, self.slots, self.normalize, self.compute_dtype = (
            intermediate,
            slots,
            normalize,
            compute_dtype,
        )
        whole, run = CoverRun(hidden, 0, plan.leaves), CoverRun(intermediate, *self.sharding.run)
        self.gate = _Held(plan, compute_dtype, weight=(router, whole))
        self.experts = _Held(plan, compute_dtype, gate_up_proj=(gate_up, whole), down_proj=(down, run))

    @staticmethod
    def columns(intermediate: int, sharding: _Sharding) -> list[Rows]:
        """The columns of the intermediate axis of each rank."""
        cuts = sharding.plan.cuts(intermediate)
        return [(cuts[lo], cuts[hi]) for lo, hi in sharding.runs]

    def forward(self, x: Tensor, sample_offsets: Sequence[int] | None = None) -> Tensor:
        """x [T, H], the same on every rank -> alike. sample_offsets as in ops.linear, for the gradients."""
        router = self.gate.weight_of("weight")
        gate_up, down = (self.experts.weight_of(name) for name in ("gate_up_proj", "down_proj"))
        stored: Any = self.gate.weight
        compute: torch.dtype = stored.dtype if self.compute_dtype is None else self.compute_dtype
        run = CoverRun(self.intermediate, *self.sharding.run)
        samples = [0, x.shape[0]] if sample_offsets is None else list(sample_offsets)
        call = _Call(self.sharding, run, self.slots, self.normalize, compute, samples)
        packed = [isinstance(w, Tensor) for w in (router, gate_up, down)].count(False)
        y: Tensor = (_routed_by_packs if packed else _routed)(call, x, router, gate_up, down)
        return y

    def extra_repr(self) -> str:
        return f"slots={self.slots}, intermediate={self.intermediate}, {self.sharding.describe()}"


class _Call(NamedTuple):
    sharding: _Sharding
    run: CoverRun
    slots: int
    normalize: bool
    compute: torch.dtype
    samples: list[int]

    @property
    def plan(self) -> TreePlan:
        return self.sharding.plan


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _routed(call: _Call, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    y: Tensor = _Routed.apply(call, x, router, gate_up, down)  # type: ignore[no-untyped-call]
    return y


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _routed_by_packs(call: _Call, x: Tensor, router: Any, gate_up: Any, down: Any) -> Tensor:
    """Frozen: the bits of _Routed.forward; PlanError where a gradient would be wanted."""
    _, routing = _choose(call, x, router)
    if isinstance(gate_up, PackedExperts) and isinstance(down, PackedExperts):
        return _sum(call, x, packed_experts_cover(x, routing, gate_up, down))
    if torch.is_grad_enabled() and (x.requires_grad or gate_up.requires_grad or down.requires_grad):
        raise PlanError("RoutedExperts: the router is frozen, so there is no backward; tbik.unfreeze(module) to train")
    cover = experts_cover(x, routing, gate_up, down, call.run, plan=call.plan, compute_dtype=call.compute)
    return _sum(call, x, cover)


def _choose(call: _Call, x: Tensor, router: Any) -> tuple[Tensor, Routing]:
    logits = linear(x, router, plan=call.plan, compute_dtype=call.compute, out_dtype=torch.float32)
    return logits, route(logits, call.slots, normalize=call.normalize)


def _sum(call: _Call, x: Tensor, cover: Tensor) -> Tensor:
    sharding = call.sharding
    y: Tensor = all_reduce(
        sharding.cover(cover), sharding.group, plan=call.plan, runs=sharding.runs, wire=True, out_dtype=x.dtype
    )
    return y


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        logits, routing = _choose(call, x, router)
        cover = experts_cover(x, routing, gate_up, down, call.run, plan=call.plan, compute_dtype=call.compute)
        ctx.call = call
        ctx.save_for_backward(x, router, gate_up, down, logits, *routing)
        y = _sum(call, x, cover)
        # not a view: autograd forbids in-place edits of a view that a Function returns
        return torch.ops.aten._unsafe_view.default(y, y.shape) if y._is_view() else y

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Any, ...]:
        x, router, gate_up, down, logits, weights, ids = saved
        call: _Call = ctx.call
        _, needs_x, needs_router, *needs = ctx.needs_input_grad
        gradients = experts_backward(
            dy,
            x,
            Routing(weights, ids),
            gate_up,
            down,
            call.run,
            plan=call.plan,
            compute_dtype=call.compute,
            sample_offsets=call.samples,
            needs_parameters=(needs[0], needs[1]),
        )
        routed_x, dweights = _sum_over_ranks(call, gradients.x, gradients.weights)
        dlogits = route_backward(dweights, logits, ids, normalize=call.normalize)
        dx = drouter = None
        if needs_x:
            router_x = linear_dx(
                [dlogits],
                [router],
                plan=call.plan,
                compute_dtype=call.compute,
                out_dtype=torch.float32,
                parallel=False,
            )
            fold = devices.kernels_of(dlogits).fold
            dx = fold([routed_x, router_x], _run_schedule(0, 2, 2, True, False), out_dtype=x.dtype)
        if needs_router:
            drouter = linear_dw(dlogits, x, plan=call.plan, compute_dtype=call.compute, sample_offsets=call.samples)
        return None, dx, drouter, gradients.gate_up, gradients.down


def _sum_over_ranks(call: _Call, x_CTH: Tensor, weights_CTS: Tensor) -> tuple[Tensor, Tensor]:
    """The roots in fp32: in one message, unless the plan narrows the tree of x; that of weights it never narrows."""
    sharding = call.sharding

    def root(cover: Tensor, wire: bool) -> Tensor:
        return all_reduce(sharding.cover(cover), sharding.group, plan=call.plan, runs=sharding.runs, wire=wire)

    if call.plan.wire_dtype is not None:
        return root(x_CTH, True), root(weights_CTS, False)
    both = root(torch.cat([x_CTH, weights_CTS], dim=2), True)
    return both[:, : x_CTH.shape[2]].contiguous(), both[:, x_CTH.shape[2] :].contiguous()
