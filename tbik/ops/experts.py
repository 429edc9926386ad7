"""Mixture of experts: routing, and the products of the experts that each token chose (ORDER.md section M).

    values, ids = the k largest logits, ties to the lower index      weights = softmax(values), or softmax(logits)[ids]
    h[t, s] = cast(silu(gate) up),  gate, up = rows of x[t] W_gate_up[e]^T,  e = ids[t, s]           s = 0 .. k-1: slots
    leaf i of y[t]:  acc = +0;  for s ascending: acc = fma(weights[t, s], leaf_i(h[t, s] W_down[e]^T), acc);  + (+0.0)
    y[t] = cast(root over the leaves)

The tree is over the experts' intermediate axis, which ranks share as in a dense MLP: every rank holds a run of leaves
of every expert. The k experts of a token meet inside a leaf, so neither ranks nor batches nor the order in which
experts are computed can show. What runs is one product per expert over the tokens that chose it, sorted by expert.

Suffixes: T tokens, E experts, S slots (k), P pairs (token, slot) that exist, sorted by expert then token, H hidden, I
intermediate size of an expert, i this rank's part of it, C nodes of a cover, L leaves of the plan.
gate_up [E, 2i, H] holds the gate's rows before those of up (as vLLM's w13 does), down [E, H, i].
Errors: PlanError. Bits: batch-invariant and layout-invariant, gradients too (tests/test_experts.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tbik import _C, devices
from tbik.errors import PlanError
from tbik.ops.linear import (
    CoverRun,
    _contract,
    _cuts,
    _fake,
    _local_cuts,
    _name,
    _num_nodes,
    _operator,
    _plan_key,
    _require_compute,
    _require_dense,
    _require_leaf,
    _require_one_device,
    _require_out,
    _require_run,
    _require_same_device,
    _require_weight_dtype,
    _rounds,
    _run_schedule,
    _sample_schedule,
    _shape,
    _token_blocks,
)
from tbik.ops.rowwise import refuse_derivative, refuse_vmap
from tbik.plan import TreePlan

SCRATCH_BYTES = 1 << 28
"""Leaves of pairs that are held at a time, in bytes, one leaf at least. No choice here can change a bit."""


class Routing(NamedTuple):
    """weights fp32 [T, S]; ids int64 [T, S], the slots in descending order of their logits, ties to the lower index."""

    weights: Tensor
    ids: Tensor


def route(logits: Tensor, slots: int, *, normalize: bool = True) -> Routing:
    """The experts of each token and their weights (M1); no autograd: `route_backward`.

    logits fp32 [T, E], 1 <= slots <= E. normalize: the weights of a token are the softmax of its chosen logits, so that
    they sum to one; else entries of the softmax over all E. Batch-invariant.
    """
    where = "ops.route"
    _require_logits(where, logits, slots)
    kernels = devices.kernels_of(logits)
    values, ids = kernels.vocab_top_k(logits, None, 0, slots)
    if normalize:
        return Routing(kernels.vocab_softmax(values, 1)[0], ids)
    return Routing(kernels.vocab_softmax(logits, 1)[0].gather(1, ids), ids)


def route_backward(grad_weights: Tensor, logits: Tensor, ids: Tensor, *, normalize: bool = True) -> Tensor:
    """dlogits fp32 [T, E] of `route`: V3 over the chosen logits (+0 elsewhere), or over all. Batch-invariant."""
    _require_logits("ops.route_backward", logits, ids.shape[-1])
    kernels = devices.kernels_of(logits)
    dlogits: Tensor
    if not normalize:
        dp = torch.zeros_like(logits).scatter(1, ids, grad_weights)
        _, m, s = kernels.vocab_softmax(logits, 1)
        dlogits = kernels.vocab_softmax_dx(dp, logits, m, s, None, 1)
        return dlogits
    values = logits.gather(1, ids)
    _, m, s = kernels.vocab_softmax(values, 1)
    return torch.zeros_like(logits).scatter(1, ids, kernels.vocab_softmax_dx(grad_weights, values, m, s, None, 1))


def experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    *,
    plan: TreePlan,
    compute_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y[t] = cast(root over I of the chain over slots of weights[t, s] * leaf of expert ids[t, s]) (M2); no autograd.

    x [T, H] in compute_dtype (x.dtype by default); gate_up [E, 2I, H] and down [E, H, I], fp32 masters are rounded to
    compute_dtype; an id of -1 is a slot that is not there -> [T, H] in out_dtype (x.dtype). plan.wire_dtype rounds the
    tree, at every world size (A6). Batch-invariant; the bits of the sharded sum of `experts_cover`.
    """
    where = "ops.experts"
    key = _plan_key(where, plan)
    compute = require_experts(where, x, routing, gate_up, down, plan, compute_dtype)
    out = _require_out(where, x.dtype if out_dtype is None else out_dtype, plan)
    y: Tensor = _experts(x, *routing, gate_up, down, key, compute, out)
    return y


def experts_cover(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    run: CoverRun,
    *,
    plan: TreePlan,
    compute_dtype: torch.dtype | None = None,
) -> Tensor:
    """The cover of the leaves [lo, hi) of `experts`, an intermediate axis of run.length -> fp32 [C, T, H]; no autograd.

    gate_up [E, 2i, H], down [E, H, i], i = cut(hi) - cut(lo). Layout-invariant.
    """
    where = "ops.experts_cover"
    key = _plan_key(where, plan)
    compute = require_experts(where, x, routing, gate_up, down, plan, compute_dtype, run)
    cover: Tensor = _experts_cover(x, *routing, gate_up, down, key, compute, *run)
    return cover


class PackedExperts:
    """The matrices W[e] [N, k] of a stack [E, N, k], each packed once for the leaves of `run`: values of that moment.

    As ops.linear.PackedWeight: it has no backward, and who hands it out must see to it that it is not stale.
    """

    def __init__(self, w: Tensor, run: CoverRun, plan: TreePlan, compute_dtype: torch.dtype) -> None:
        where = "ops.PackedExperts"
        _plan_key(where, plan)
        _require_dense(where, "w", w)
        _require_leaf(where, plan, w)
        _require_compute(where, compute_dtype, plan)
        _require_weight_dtype(where, "w", w.dtype, compute_dtype)
        if w.dim() != 3 or plan.acc_dtype != "float32":
            raise PlanError(
                f"{where}: expected a stack [E, N, k] and a plan that accumulates in float32, got {_shape(w)} and "
                f"{plan.acc_dtype}"
            )
        _require_run(where, plan, run, "w", w.shape[2])
        self.plan, self.run, self.compute_dtype = plan, run, compute_dtype
        self.shape, self.trainable, self.cuts = w.shape, w.requires_grad, _local_cuts(plan, run)
        self.packs = [_C.pack([of], False, [self.cuts], _name(compute_dtype)) for of in w.detach().resolve_neg()]
        self.nbytes = sum(int(pack.nbytes) for pack in self.packs)

    def __repr__(self) -> str:
        return f"PackedExperts({list(self.shape)}, {self.compute_dtype}, {self.nbytes} bytes)"

    def __deepcopy__(self, memo: object) -> PackedExperts:
        return self  # immutable


def packed_experts_cover(x: Tensor, routing: Routing, gate_up: PackedExperts, down: PackedExperts) -> Tensor:
    """`experts_cover` by packs, of the run that `down` was packed for -> fp32 [C, T, H]. Same bits; no gradient.

    Errors: PlanError where a gradient would be wanted. Layout-invariant (tests/test_experts.py).
    """
    where = "ops.packed_experts_cover"
    if torch.is_grad_enabled() and (x.requires_grad or gate_up.trainable or down.trainable):
        raise PlanError(
            f"{where}: packed (frozen) experts have no backward, and x or a weight requires grad; use "
            "torch.no_grad() to infer, or the weights themselves (tbik.unfreeze(module)) to train"
        )
    _require_dense(where, "x", x)
    _require_routing(where, x, routing, down.shape[0])
    plan, run, compute = down.plan, down.run, down.compute_dtype
    made, hidden = (gate_up.plan, gate_up.compute_dtype, *gate_up.shape), down.shape[1]
    wanted = (plan, compute, down.shape[0], 2 * down.shape[2], hidden)
    if made != wanted or x.dtype != compute or x.dim() != 2 or x.shape[1] != hidden:
        raise PlanError(
            f"{where}: expected x [T, {hidden}] in {compute} and gate_up packed for (plan, compute_dtype, E, 2i, H) = "
            f"{wanted}, got {x.dtype} {_shape(x)} and {made}"
        )
    # a token's bits ignore the others, so that the leaves of all slots are held for some tokens at a time
    each = max(1, SCRATCH_BYTES // max(1, 4 * (run.hi - run.lo) * routing.ids.shape[1] * hidden))
    if x.shape[0] <= each:
        return _forward(x, routing, gate_up, down, run, plan, compute, False, torch.float32)
    parts = [
        _forward(some, Routing(weights, ids), gate_up, down, run, plan, compute, False, torch.float32)
        for some, weights, ids in zip(*(torch.split(t, each) for t in (x, routing.weights, routing.ids)), strict=True)
    ]
    return torch.cat(parts, dim=1)


class ExpertGradients(NamedTuple):
    """x: cover fp32 [C, T, H]; weights: cover fp32 [C, T, S]; gate_up, down: like the parameters, fp32, or None."""

    x: Tensor
    weights: Tensor
    gate_up: Tensor | None
    down: Tensor | None


def experts_backward(
    dy: Tensor,
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    run: CoverRun,
    *,
    plan: TreePlan,
    compute_dtype: torch.dtype | None = None,
    sample_offsets: Sequence[int],
    needs_parameters: tuple[bool, bool] = (True, True),
) -> ExpertGradients:
    """The gradients of `experts` (M3), of this rank's leaves. The covers of x and weights are summed over the ranks.

    dy [T, H] in the dtype of x. With u[t, s] = root over H of dy W_down[e] in fp32, not rounded:
        dweights[t, s] = row sum over I, by leaves, of h * u            dh = cast(weights * u)
        leaf i of dx[t]: for s ascending: acc = fma(1, leaf_i(dgate W_gate[e], continued by dup W_up[e]), acc)
        dW_down[e]: S1 with a_k = cast(weights * dy), b_k = h;  dW_gate_up[e]: a_k = dgate, dup, b_k = x; only over
        the tokens that chose e.
    plan.wire_dtype rounds the tree of dx; that of the weights is never narrowed (A6). Layout-invariant.
    """
    where = "ops.experts_backward"
    compute = require_experts(where, x, routing, gate_up, down, plan, compute_dtype, run)
    pairs = _Pairs.of(routing.ids, gate_up.shape[0])
    rounds = _rounds(plan, True)
    inner = _local_cuts(plan, run)
    width = inner[-1]
    dy = dy.contiguous()
    kernels = devices.kernels_of(x)
    x_PH, dy_PH = x.index_select(0, pairs.token), dy.index_select(0, pairs.token)
    gates = _gate_up(x_PH, pairs, gate_up, plan, compute)
    h_Pi = kernels.activation(gates[:, :width], gates[:, width:], "silu")
    whole = _run_schedule(0, plan.leaves, plan.leaves, True, False)
    u_Pi = torch.empty(len(pairs.token), width, dtype=torch.float32, device=x.device)
    for expert, rows in pairs.each():
        u_Pi[rows] = _contract(
            [dy_PH[rows]],
            [down[expert]],
            [_cuts(plan, x.shape[1])],
            whole,
            compute,
            torch.float32,
            leaf=plan.leaf,
            b_k_major=True,
        )
    weights_P = routing.weights.reshape(-1).index_select(0, pairs.slot)
    products = kernels.row_nodes(
        kernels.multiply(h_Pi, u_Pi), inner, _run_schedule(*run[1:], plan.leaves, False, False), 1, torch.float32
    )  # [C, P]
    dweights = products.new_zeros(products.shape[0], routing.ids.numel())
    dweights[:, pairs.slot] = products
    dh_Pi = kernels.scale_rows(u_Pi, weights_P, x.dtype)
    del u_Pi
    (dgates,) = kernels.activation_dx(dh_Pi, gates[:, :width], gates[:, width:], "silu", True)
    members = [dgates[:, :width], dgates[:, width:]]

    def part(leaf: int, end: int) -> Tensor:
        cuts = [c - inner[leaf] for c in inner[leaf : end + 1]]
        columns = slice(inner[leaf], inner[end])
        values = torch.empty(end - leaf, len(pairs.token), x.shape[1], dtype=torch.float32, device=x.device)
        for expert, rows in pairs.each():
            w = gate_up[expert]
            values[:, rows] = _contract(
                [member[rows, columns] for member in members],
                [w[:width][columns], w[width:][columns]],
                [cuts, cuts],
                _apart(end - leaf),
                compute,
                torch.float32,
                leaf=plan.leaf,
                b_k_major=True,
            )
        return kernels.combine_slots(values, pairs.rows, None)

    dx = _fold_parts(part, pairs, x.shape[1], run, plan, False, rounds, torch.float32)
    dgate_up = ddown = None
    narrow = plan.grad_wire_dtype == "bfloat16"
    if any(needs_parameters):
        blocks = pairs.blocks(sample_offsets)
    if needs_parameters[0]:
        dgate_up = _parameter_gradient(dgates, x_PH, pairs, blocks, compute, narrow, gate_up.shape, plan.leaf)
    if needs_parameters[1]:
        do_PH = kernels.scale_rows(dy_PH, weights_P, dy.dtype)
        ddown = _parameter_gradient(do_PH, h_Pi, pairs, blocks, compute, narrow, down.shape, plan.leaf)
    return ExpertGradients(dx, dweights.view(products.shape[0], *routing.ids.shape), dgate_up, ddown)


# --- operators ------------------------------------------------------------------------------------------------------


@_operator(
    "experts",
    "(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor down, str plan, ScalarType compute, "
    "ScalarType out_dtype) -> Tensor",
    cuda=True,
)
def _experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    plan: str,
    compute: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    p = TreePlan.from_key(plan)
    run = CoverRun(down.shape[2], 0, p.leaves)
    return _forward(x, Routing(weights, ids), gate_up, down, run, p, compute, True, out_dtype)


@_fake(_experts)
def _experts_fake(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    plan: str,
    compute: torch.dtype,
    out_dtype: torch.dtype,
) -> Tensor:
    _require_one_device(x, weights, ids, gate_up, down)
    return x.new_empty(x.shape, dtype=out_dtype)


@_operator(
    "experts_cover",
    "(Tensor x, Tensor weights, Tensor ids, Tensor gate_up, Tensor down, str plan, ScalarType compute, int length, "
    "int lo, int hi) -> Tensor",
    cuda=True,
)
def _experts_cover(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    plan: str,
    compute: torch.dtype,
    length: int,
    lo: int,
    hi: int,
) -> Tensor:
    p, run = TreePlan.from_key(plan), CoverRun(length, lo, hi)
    return _forward(x, Routing(weights, ids), gate_up, down, run, p, compute, False, torch.float32)


@_fake(_experts_cover)
def _experts_cover_fake(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    plan: str,
    compute: torch.dtype,
    length: int,
    lo: int,
    hi: int,
) -> Tensor:
    _require_one_device(x, weights, ids, gate_up, down)
    return x.new_empty((_num_nodes(CoverRun(length, lo, hi)), *x.shape), dtype=torch.float32)


refuse_vmap(_experts, _experts_cover)
refuse_derivative(_experts, _experts_cover)

# --- pairs ----------------------------------------------------------------------------------------------------------


class _Pairs(NamedTuple):
    """The pairs (token, slot) sorted by expert, then token. token, slot: of each pair; slot counts through [T, S].

    rows [T, S]: the pair of each slot, -1 for none. bounds: pairs of expert e are [bounds[e], bounds[e + 1]).
    """

    token: Tensor
    slot: Tensor
    rows: Tensor
    bounds: list[int]
    num_tokens: int

    @classmethod
    def of(cls, ids: Tensor, num_experts: int) -> _Pairs:
        flat = ids.reshape(-1)
        counts = torch.bincount(flat + 1, minlength=num_experts + 1).tolist()
        slot = flat.argsort(stable=True)[counts[0] :]
        rows = torch.full_like(flat, -1)
        rows[slot] = torch.arange(len(slot), device=slot.device)
        bounds = [0]
        for count in counts[1:]:
            bounds.append(bounds[-1] + count)
        token = slot // ids.shape[1] if ids.shape[1] else slot
        return cls(token, slot, rows.view(ids.shape), bounds, ids.shape[0])

    def each(self) -> Iterator[tuple[int, slice]]:
        """(expert, its pairs) of the experts that some token chose."""
        for expert, (first, end) in enumerate(zip(self.bounds, self.bounds[1:])):
            if first < end:
                yield expert, slice(first, end)

    def blocks(self, sample_offsets: Sequence[int]) -> tuple[dict[int, list[int]], tuple[int, ...]]:
        """Per expert the cuts of its pairs into blocks of 512 positions of a sample, and the blocks of each sample."""
        starts, num_blocks = _token_blocks(sample_offsets)
        at = torch.tensor(starts, device=self.token.device)
        cuts = {expert: torch.searchsorted(self.token[rows], at).tolist() for expert, rows in self.each()}
        return cuts, num_blocks


# --- products -------------------------------------------------------------------------------------------------------


Weights = Tensor | PackedExperts


def _gate_up(x_PH: Tensor, pairs: _Pairs, gate_up: Weights, plan: TreePlan, compute: torch.dtype) -> Tensor:
    """[P, 2i] in compute: gate before up, each the root over H, rounded once."""
    whole = _run_schedule(0, plan.leaves, plan.leaves, True, False)
    cuts = [_cuts(plan, x_PH.shape[1])]
    out = torch.empty(len(pairs.token), gate_up.shape[1], dtype=compute, device=x_PH.device)
    for expert, rows in pairs.each():
        out[rows] = _by_expert(x_PH[rows], gate_up, expert, slice(None), cuts, whole, compute, compute, plan.leaf)
    return out


def _by_expert(
    x: Tensor,
    w: Weights,
    expert: int,
    columns: slice,
    cuts: list[list[int]],
    schedule: _C.Schedule,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    leaf: str,
) -> Tensor:
    """x W[expert][:, columns]^T; a pack is of all columns."""
    if isinstance(w, PackedExperts):
        return _contract([x], w.packs[expert], cuts, schedule, compute, out_dtype, leaf=leaf, n=w.shape[1])
    return _contract([x], [w[expert][:, columns]], cuts, schedule, compute, out_dtype, leaf=leaf)


def _forward(
    x: Tensor,
    routing: Routing,
    gate_up: Weights,
    down: Weights,
    run: CoverRun,
    plan: TreePlan,
    compute: torch.dtype,
    to_root: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    kernels = devices.kernels_of(x)
    pairs = _Pairs.of(routing.ids, gate_up.shape[0])
    inner = _local_cuts(plan, run)
    width = inner[-1]
    gates = _gate_up(x.index_select(0, pairs.token), pairs, gate_up, plan, compute)
    h_Pi = kernels.activation(gates[:, :width], gates[:, width:], "silu") if width else gates

    def part(leaf: int, end: int) -> Tensor:
        cuts = [c - inner[leaf] for c in inner[leaf : end + 1]]
        columns = slice(inner[leaf], inner[end])
        values = torch.empty(end - leaf, len(pairs.token), x.shape[1], dtype=torch.float32, device=x.device)
        for expert, rows in pairs.each():
            values[:, rows] = _by_expert(
                h_Pi[rows, columns],
                down,
                expert,
                columns,
                [cuts],
                _apart(end - leaf),
                compute,
                torch.float32,
                plan.leaf,
            )
        return kernels.combine_slots(values, pairs.rows, routing.weights)

    at_once = run.hi - run.lo if isinstance(down, PackedExperts) else None
    return _fold_parts(part, pairs, x.shape[1], run, plan, to_root, _rounds(plan, True), out_dtype, at_once)


def _fold_parts(
    part: Callable[[int, int], Tensor],
    pairs: _Pairs,
    hidden: int,
    run: CoverRun,
    plan: TreePlan,
    to_root: bool,
    rounds: bool,
    out_dtype: torch.dtype,
    at_once: int | None = None,
) -> Tensor:
    """The tree over the leaves [lo, hi) that part(leaf, end), counted from lo, gives as [end - leaf, T, hidden].

    at_once: leaves of a part; by default as many as SCRATCH_BYTES hold.
    """
    count = run.hi - run.lo
    if not count:
        return torch.zeros(0, pairs.num_tokens, hidden, dtype=torch.float32, device=pairs.token.device)
    if at_once is None:
        at_once = max(1, min(count, SCRATCH_BYTES // max(1, 4 * len(pairs.token) * hidden)))
    parts = [part(leaf, min(leaf + at_once, count)) for leaf in range(0, count, at_once)]
    leaves = [leaf for some in parts for leaf in some]
    schedule = _run_schedule(run.lo, run.hi, plan.leaves, to_root, rounds)
    folded: Tensor = devices.kernels_of(leaves[0]).fold(leaves, schedule, out_dtype=out_dtype)
    return folded


def _apart(count: int) -> _C.Schedule:
    """Every leaf by itself: nodes no two of which are siblings."""
    return _C.nodes_schedule([(0, 2 * leaf) for leaf in range(count)])


def _parameter_gradient(
    a: Tensor,
    b: Tensor,
    pairs: _Pairs,
    blocks: tuple[dict[int, list[int]], tuple[int, ...]],
    compute: torch.dtype,
    narrow: bool,
    shape: torch.Size,
    leaf: str,
) -> Tensor:
    """dW [E, N, K] fp32: of each expert the tree over samples and blocks of the pairs that chose it; +0 for no pair."""
    cuts, num_blocks = blocks
    dw = torch.zeros(shape, dtype=torch.float32, device=a.device)
    if num_blocks:
        schedule = _sample_schedule(num_blocks, narrow)
        for expert, rows in pairs.each():
            dw[expert] = _contract(
                [a[rows]],
                [b[rows]],
                [cuts[expert]],
                schedule,
                compute,
                torch.float32,
                leaf=leaf,
                a_k_major=True,
                b_k_major=True,
            )
    return dw


# --- refusals -------------------------------------------------------------------------------------------------------


def _require_logits(where: str, logits: Tensor, slots: int) -> None:
    _require_dense(where, "logits", logits, devices.CPU_AND_CUDA)
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise PlanError(f"{where}: expected fp32 logits [T, E], got {logits.dtype} {_shape(logits)}")
    if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= logits.shape[1]:
        raise PlanError(f"{where}: slots is an integer 1..{logits.shape[1]} (experts per token), got {slots!r}")


def require_experts(
    where: str,
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    plan: TreePlan,
    compute_dtype: torch.dtype | None,
    run: CoverRun | None = None,
) -> torch.dtype:
    """The compute dtype; PlanError for everything that these operators do not do."""
    _require_dense(where, "x", x, devices.CPU_AND_CUDA)
    _require_leaf(where, plan, x)
    compute = x.dtype if compute_dtype is None else compute_dtype
    _require_compute(where, compute, plan)
    if plan.acc_dtype != "float32" or x.dtype != compute or x.dim() != 2:
        raise PlanError(
            f"{where}: expected x [T, H] in compute_dtype {compute} and a plan that accumulates in float32, got "
            f"{x.dtype} {_shape(x)} and {plan.acc_dtype}"
        )
    for name, w in (("gate_up", gate_up), ("down", down)):
        _require_dense(where, name, w, devices.CPU_AND_CUDA)
        _require_same_device(where, "x", x, name, w)
        _require_weight_dtype(where, name, w.dtype, compute)
    inner = down.shape[-1]
    if down.dim() != 3 or gate_up.shape != (down.shape[0], 2 * inner, x.shape[1]) or down.shape[1] != x.shape[1]:
        raise PlanError(
            f"{where}: expected gate_up [E, 2i, H] (gate before up) and down [E, H, i] for x [T, {x.shape[1]}], got "
            f"{_shape(gate_up)} and {_shape(down)}"
        )
    if run is not None:
        _require_run(where, plan, run, "down", inner)
    _require_routing(where, x, routing, down.shape[0])
    return compute


def _require_routing(where: str, x: Tensor, routing: Routing, num_experts: int) -> None:
    weights, ids = routing
    shape = (x.shape[0], ids.shape[-1])
    if ids.dtype != torch.int64 or weights.dtype != torch.float32 or not ids.shape == weights.shape == shape:
        raise PlanError(
            f"{where}: expected fp32 weights and int64 ids [T, slots] for {x.shape[0]} tokens, got {weights.dtype} "
            f"{_shape(weights)} and {ids.dtype} {_shape(ids)}"
        )
    if ids.device.type != "meta" and ids.numel() and not bool(((ids >= -1) & (ids < num_experts)).all()):
        raise PlanError(f"{where}: ids are experts 0..{num_experts - 1}, or -1 for a slot that is not there")
