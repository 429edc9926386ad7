"""Per-head norm, rotary embedding and attention of the query heads that one rank holds.

    out = attention(rope(rms_norm(q)), rope(rms_norm(k)), v)     heads of this rank; nothing is sent
    dk, dv = root over the query heads of a KV head              gathered where ranks share one (K4)
    dq_norm, dk_norm = per sample the root over all heads        gathered if the model has them (R1)

Cast points are those of the separate operators in the forward; in the backward dq, dk and dv stay in fp32 through rope
and norm and are rounded once (A12). A KV head that several ranks hold has the same dk and dv on each; in dk_norm it
counts once, on the first of them.

Suffixes: T tokens, H query heads and G KV heads of this rank, S samples (sequences), C nodes of covers, D head_dim.
Errors: PlanError at construction or as in tbik.ops; those of tbik.collectives.
Bits: batch-invariant and layout-invariant (tests/test_parallelize.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tbik import _C, devices, tree
from tbik.collectives import all_gather_bytes
from tbik.errors import PlanError
from tbik.nn import _differentiable_once
from tbik.ops.attention import (
    AttentionDropout,
    AttentionState,
    HeadRun,
    _round,
    attention_backward,
    attention_forward,
    num_nodes,
)
from tbik.ops.linear import CoverRun
from tbik.ops.norm import fold_head_covers, norm_weight_head_covers, rms_norm, rms_norm_backward_f32
from tbik.ops.rope import rope, rope_backward_f32
from tbik.plan import Layout, ModelShape, Run, TreePlan


class Heads:
    """Who holds which heads of one model at one TP size."""

    def __init__(self, shape: ModelShape, layout: Layout, plan: TreePlan, group: dist.ProcessGroup | None) -> None:
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        if layout.tp != size:
            raise PlanError(f"head_parallel.Heads: the layout is for {layout.tp} ranks, the group has {size}")
        self.shape, self.plan, self.group, self.rank = shape, plan, group, rank
        self.query, self.kv = layout.heads, layout.kv_heads
        self.queries_per_kv = shape.heads // shape.kv_heads
        self.sharing = self._sharing(rank)
        # the KV heads of each rank that count on it: the first rank that holds one answers for it
        ends = [0, *(end for _, end in self.kv)]
        self.own_kv: tuple[Run, ...] = tuple((max(lo, ends[r]), hi) for r, (lo, hi) in enumerate(self.kv))
        self.shared = any(run.hi - run.lo != run.size for r in range(size) for run in self._sharing(r))

    def __deepcopy__(self, memo: Any) -> Heads:
        return self  # immutable, and a process group has no copy

    def _sharing(self, rank: int) -> list[HeadRun]:
        (first, end), size = self.query[rank], self.queries_per_kv
        return [HeadRun(size, max(first - g * size, 0), min(end - g * size, size)) for g in range(*self.kv[rank])]

    def join_kv(self, parts_NC: Tensor) -> Tensor:
        """[N, C, D], the nodes of this rank's KV heads -> [N, G, D], complete: ranks that share a head exchange."""
        if not self.shared:
            return parts_NC
        counts = [[num_nodes(run) for run in self._sharing(rank)] for rank in range(len(self.kv))]
        sent = [
            sum(n for n, run in zip(counts[rank], self._sharing(rank)) if run.hi - run.lo != run.size)
            for rank in range(len(self.kv))
        ]
        mine = counts[self.rank]
        columns = list(torch.split(parts_NC, mine, dim=1))
        partial = [c for c, run in zip(columns, self.sharing) if run.hi - run.lo != run.size]
        message = parts_NC.new_zeros(parts_NC.shape[0], max(sent), parts_NC.shape[2])
        if partial:
            message[:, : sent[self.rank]] = torch.cat(partial, dim=1)
        gathered = _all_gather(message, self.group)
        for index, run in enumerate(self.sharing):
            if run.hi - run.lo != run.size:
                columns[index] = self._fold_shared(gathered, counts, self.kv[self.rank][0] + index)
        return torch.cat(columns, dim=1)

    def _fold_shared(self, gathered: Tensor, counts: list[list[int]], head: int) -> Tensor:
        values: list[Tensor] = []
        nodes: list[tuple[int, int]] = []
        for rank, (lo, hi) in enumerate(self.kv):
            if not lo <= head < hi:
                continue
            runs = self._sharing(rank)
            start = sum(n for n, run in zip(counts[rank][: head - lo], runs) if run.hi - run.lo != run.size)
            for offset, node in enumerate(tree.cover(*runs[head - lo][1:])):
                values.append(gathered[rank, :, start + offset].contiguous())
                nodes.append((node.level, node.index))
        fold = devices.kernels_of(gathered).fold
        root: Tensor = fold(values, _C.nodes_schedule(nodes, self.queries_per_kv))
        return root[:, None]

    def norm_grad(
        self, dy: Tensor, x: Tensor, eps: float, samples: Sequence[int], runs: Sequence[Run], held: Run
    ) -> Tensor:
        """dw [D] of a per-head norm; dy fp32, x [T, heads of this rank, D]; runs: the heads that count, by rank."""
        total = runs[-1][1]
        lo, hi = runs[self.rank]
        covers = [CoverRun(total, *run) for run in runs]
        sizes = [len(tree.cover(*run)) for run in runs]
        part = dy.new_zeros(len(samples) - 1, max(sizes), dy.shape[-1], dtype=torch.float32)
        if hi > lo and len(samples) > 1:
            own = slice(lo - held[0], hi - held[0])
            part[:, : sizes[self.rank]] = norm_weight_head_covers(
                dy[:, own].contiguous(), x[:, own].contiguous(), eps, covers[self.rank], sample_offsets=samples
            )
        gathered = part[None] if len(runs) == 1 else _all_gather(part, self.group)
        present = [(gathered[r, :, :n], covers[r]) for r, n in enumerate(sizes) if n]
        if len(samples) == 1:
            return dy.new_zeros(dy.shape[-1], dtype=torch.float32)
        return fold_head_covers([values for values, _ in present], [run for _, run in present], plan=self.plan)


def _all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[W, ...], x of every rank; alike in shape."""
    gathered = all_gather_bytes(x.contiguous().view(-1).view(torch.uint8), group, "head_parallel")
    return gathered.view(-1).view(x.dtype).view(gathered.shape[0], *x.shape)


class HeadOptions(NamedTuple):
    """What a layer's attention knows beside its tensors.

    scale None: D^-0.5; window None: all keys; offset: 1 + w; softcap None: scores as they are.
    """

    eps: float
    scale: float | None = None
    window: int | None = None
    offset: bool = False
    softcap: float | None = None


def normed_and_turned(x: Tensor, norm: Tensor | None, sin: Tensor, cos: Tensor, options: HeadOptions) -> Tensor:
    """rope(rms_norm(x)) of x [T, H, D]; sin, cos [T, R/2]."""
    y = x if norm is None else rms_norm(x, norm, options.eps, offset=options.offset, heads=True)
    return rope(y, sin, cos)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def head_attention(
    heads: Heads,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sin: Tensor,
    cos: Tensor,
    samples: Sequence[int],
    options: HeadOptions,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """attention(rope(rms_norm(q)), rope(rms_norm(k)), v) of packed sequences, from the first position of each.

    q [T, H, D], k and v [T, G, D], one dtype; sin, cos fp32 [T, R/2] of each token's position; samples: rows where the
    sequences begin, 0 first, T last; q_norm, k_norm [D], the same on every rank. -> [T, H, D]. Differentiable once.
    """
    out: Tensor = _HeadAttention.apply(  # type: ignore[no-untyped-call]
        heads, list(samples), options, q, k, v, sin, cos, q_norm, k_norm, dropout
    )
    return out


class _HeadAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads: Heads,
        samples: list[int],
        options: HeadOptions,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sin: Tensor,
        cos: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        dropout: AttentionDropout | None,
    ) -> Tensor:
        ctx.heads, ctx.samples, ctx.options, ctx.dropout = heads, samples, options, dropout
        turned_q = normed_and_turned(q, q_norm, sin, cos, options)
        turned_k = normed_and_turned(k, k_norm, sin, cos, options)
        starts = torch.tensor(samples, device=q.device)
        state = attention_forward(
            turned_q,
            turned_k,
            v,
            starts,
            starts,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sharing=heads.sharing,
            plan=heads.plan,
            dropout=dropout,
        )
        ctx.save_for_backward(q, k, v, sin, cos, q_norm, k_norm, turned_q, turned_k, *state)
        return state.out

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad_out: Tensor) -> tuple[Any, ...]:
        q, k, v, sin, cos, q_norm, k_norm, turned_q, turned_k, *state = saved
        heads, samples, options = ctx.heads, ctx.samples, ctx.options
        starts = torch.tensor(samples, device=q.device)
        dq, dk, dv, _ = attention_backward(
            grad_out,
            turned_q,
            turned_k,
            v,
            AttentionState(*state),
            starts,
            starts,
            scale=options.scale,
            window=options.window,
            softcap=options.softcap,
            sharing=heads.sharing,
            plan=heads.plan,
            dropout=ctx.dropout,
        )
        if heads.shared:
            dk, dv = torch.chunk(heads.join_kv(torch.cat([dk, dv])), 2)
        dq, dq_norm = _input_gradient(heads, dq, q, q_norm, sin, cos, samples, options, heads.query, heads.query)
        dk, dk_norm = _input_gradient(heads, dk, k, k_norm, sin, cos, samples, options, heads.own_kv, heads.kv)
        return None, None, None, dq, dk, _round(dv, v.dtype), None, None, dq_norm, dk_norm, None


def _input_gradient(
    heads: Heads,
    dy: Tensor,
    x: Tensor,
    w: Tensor | None,
    sin: Tensor,
    cos: Tensor,
    samples: list[int],
    options: HeadOptions,
    counted: Sequence[Run],
    held: Sequence[Run],
) -> tuple[Tensor, Tensor | None]:
    """(dx, dw) through rope and norm; fp32 until dx is rounded once."""
    if w is None:
        return rope_backward_f32(dy, sin, cos, out_dtype=x.dtype), None
    dy = rope_backward_f32(dy, sin, cos)
    dw = heads.norm_grad(dy, x, options.eps, samples, counted, held[heads.rank])
    return rms_norm_backward_f32(dy, x, w, options.eps, offset=options.offset, out_dtype=x.dtype), dw
