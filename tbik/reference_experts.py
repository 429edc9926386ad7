"""The oracle of ORDER.md section M: experts pair by pair, in the reference's arithmetic, without any sorting.

Suffixes: T tokens, E experts, S slots, H hidden, I intermediate. Slow. Layout-invariant.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tbik import tree
from tbik.plan import TreePlan
from tbik.reference import (
    TOKENS_PER_BLOCK,
    add,
    chain,
    epilogue,
    fma32,
    gated,
    gated_dx,
    linear,
    linear_dw,
    linear_dx,
    plain_arithmetic,
    round_wire,
    row_sum,
    softmax,
    softmax_dx,
    top_k,
)


def route(logits: Tensor, slots: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """weights fp32 [T, S] and ids [T, S]: the largest logits, ties to the lower index (M1)."""
    values, ids = top_k(logits, slots)
    return (softmax(values) if normalize else softmax(logits).gather(1, ids)), ids


def route_dx(dweights: Tensor, logits: Tensor, ids: Tensor, normalize: bool) -> Tensor:
    """dlogits fp32 [T, E] (M1)."""
    if normalize:
        return torch.zeros_like(logits).scatter(1, ids, softmax_dx(dweights, logits.gather(1, ids)))
    return softmax_dx(torch.zeros_like(logits).scatter(1, ids, dweights), logits)


@plain_arithmetic()
def experts(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, plan: TreePlan) -> Tensor:
    """y [T, H] in the dtype of x: the root over the leaves of I of the chain over slots (M2)."""
    cuts = plan.cuts(down.shape[2])
    rows = []
    for t in range(x.shape[0]):
        hidden = [_inner(x[t : t + 1], gate_up[e], plan)[2] for e in ids[t].tolist()]
        leaves = []
        for lo, hi in itertools.pairwise(cuts):
            acc = torch.zeros(1, x.shape[1])
            for s, e in enumerate(ids[t].tolist()):
                acc = fma32(weights[t, s], chain(hidden[s][:, lo:hi], down[e][:, lo:hi], plan.leaf), acc)
            leaves.append(acc + 0.0)
        rows.append(_root(leaves, plan))
    return epilogue(torch.cat(rows), out_dtype=x.dtype)


class ExpertGradients(NamedTuple):
    """All fp32: x [T, H] before its cast, weights [T, S], gate_up and down like the parameters."""

    x: Tensor
    weights: Tensor
    gate_up: Tensor
    down: Tensor


@plain_arithmetic()
def experts_backward(
    dy: Tensor,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    plan: TreePlan,
    sample_offsets: Sequence[int],
) -> ExpertGradients:
    """The gradients of `experts` (M3)."""
    tokens, slots = ids.shape
    inner = down.shape[2]
    cuts = plan.cuts(inner)
    dx, dweights = [], torch.zeros(tokens, slots)
    # per expert and token: the operands of the parameters' chains
    touched: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
    for t in range(tokens):
        dgates = []
        for s, e in enumerate(ids[t].tolist()):
            gate, up, h = _inner(x[t : t + 1], gate_up[e], plan)
            u = linear_dx([dy[t : t + 1]], [down[e]], plan, out_dtype=torch.float32)
            dweights[t, s] = row_sum(h.float() * u, plan.leaves)[0]
            dh = epilogue(weights[t, s] * u, out_dtype=x.dtype)
            dgate, dup = gated_dx(dh, gate, up, "silu")
            assert dup is not None
            dgates.append((dgate, dup))
            do = epilogue(weights[t, s] * dy[t : t + 1].float(), out_dtype=dy.dtype)
            touched[e, t] = (torch.cat([dgate, dup], 1), do, h)
        leaves = []
        for lo, hi in itertools.pairwise(cuts):
            acc = torch.zeros(1, x.shape[1])
            for (dgate, dup), e in zip(dgates, ids[t].tolist()):
                operand = torch.cat([dgate[:, lo:hi], dup[:, lo:hi]], 1)
                w = torch.cat([gate_up[e][lo:hi], gate_up[e][inner + lo : inner + hi]])
                acc = fma32(torch.ones(()), chain(operand, w.T, plan.leaf), acc)
            leaves.append(acc + 0.0)
        dx.append(_root(leaves, plan))
    dgate_up, ddown = torch.zeros(gate_up.shape), torch.zeros(down.shape)
    for e in range(down.shape[0]):
        first, second = [], []
        for begin, end in itertools.pairwise(sample_offsets):
            blocks = []
            for start in range(begin, end, TOKENS_PER_BLOCK) or [begin]:
                here = [t for t in range(start, min(start + TOKENS_PER_BLOCK, end)) if (e, t) in touched]
                if not here:
                    blocks.append((torch.zeros(dgate_up.shape[1:]), torch.zeros(ddown.shape[1:])))
                    continue
                a, b, h = (torch.cat([touched[e, t][i] for t in here]) for i in range(3))
                blocks.append((chain(a.T, x[here].T, plan.leaf), chain(b.T, h.T, plan.leaf)))
            first.append(tree.root([block[0] for block in blocks], add))
            second.append(tree.root([block[1] for block in blocks], add))
        dgate_up[e], ddown[e] = _sample_root(first, plan), _sample_root(second, plan)
    return ExpertGradients(torch.cat(dx), dweights, dgate_up, ddown)


class BlockGradients(NamedTuple):
    """x in its own dtype; router, gate_up, down fp32."""

    x: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor


def block(
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, slots: int, normalize: bool, plan: TreePlan
) -> Tensor:
    """y of the whole block: router and experts."""
    weights, ids = route(linear(x, router, plan, out_dtype=torch.float32), slots, normalize)
    return experts(x, weights, ids, gate_up, down, plan)


def block_backward(
    dy: Tensor,
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    slots: int,
    normalize: bool,
    plan: TreePlan,
    sample_offsets: Sequence[int],
) -> BlockGradients:
    """Its gradients: dx = cast(root of the experts + root of the router) (M4)."""
    logits = linear(x, router, plan, out_dtype=torch.float32)
    weights, ids = route(logits, slots, normalize)
    found = experts_backward(dy, x, weights, ids, gate_up, down, plan, sample_offsets)
    dlogits = route_dx(found.weights, logits, ids, normalize)
    router_x = linear_dx([dlogits], [router.float()], plan, out_dtype=torch.float32)
    dx = epilogue(add(found.x, router_x), out_dtype=x.dtype)
    drouter = linear_dw(dlogits, x.float(), sample_offsets, plan)
    return BlockGradients(dx, drouter, found.gate_up, found.down)


def _inner(x: Tensor, w: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor, Tensor]:
    """gate, up and cast(silu(gate) up) of one expert."""
    gate, up = torch.chunk(linear(x, w, plan, out_dtype=x.dtype), 2, dim=-1)
    return gate, up, gated(gate, up, "silu")


def _root(leaves: list[Tensor], plan: TreePlan) -> Tensor:
    if plan.wire_dtype is None:
        return tree.root(leaves, add)
    return tree.root([round_wire(leaf) for leaf in leaves], _add_rounded)


def _sample_root(leaves: list[Tensor], plan: TreePlan) -> Tensor:
    if plan.grad_wire_dtype is None:
        return tree.root(leaves, add)
    return tree.root([round_wire(leaf) for leaf in leaves], _add_rounded)


def _add_rounded(left: Tensor, right: Tensor) -> Tensor:
    return round_wire(add(left, right))
