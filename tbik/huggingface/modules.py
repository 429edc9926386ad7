"""What takes the place of a Hugging Face decoder's modules: the same model on tbik operators, whole or sharded.

    (y, h) = add_rms_norm(d, h); a = o_proj(heads(qkv_proj(y)))         one layer: (d, h) -> (d, h)
    (y, h) = add_rms_norm(a, h); d = down_proj(silu(gate) up)           gate, up = gate_up_proj(y)
    logits = lm_head(add_rms_norm(d, h))                                fp32, rows of the vocabulary of each rank

A layer takes and returns what was last added and the residual stream beside it, so that every fan-in is add_rms_norm's
(L3) and the sum is rounded once. Between embedding and logits there are real tokens only (rows.py).

Suffixes: R real tokens, H heads, G KV heads of this rank, D head_dim, V vocabulary, v this rank's rows of it,
B batch, T tokens of the call, S cached and new tokens.
Errors: PlanError. Bits: batch-invariant and layout-invariant (tests/test_parallelize.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from tbik import ops
from tbik.collectives import all_gather_bytes, all_reduce
from tbik.errors import PlanError
from tbik.gradients import upstream, use
from tbik.head_parallel import HeadOptions, Heads, head_attention, normed_and_turned
from tbik.huggingface.rows import Rows, rows_of
from tbik.nn import ColumnParallelGroup, RowParallelLinear, _differentiable_once
from tbik.ops.linear import CoverRun, PackedWeight, linear_dw, linear_dx
from tbik.ops.rope import RopeFrequencies
from tbik.packing import Packable, PackSpec
from tbik.plan import Layout, ModelShape, TreePlan
from tbik.routed_experts import RoutedExperts
from tbik.vocabulary import VocabParallel


class Setting:
    """What all modules of one model share. compute_dtype None: the dtype the weights are stored in."""

    def __init__(
        self,
        shape: ModelShape,
        plan: TreePlan,
        layout: Layout,
        group: dist.ProcessGroup | None,
        compute_dtype: torch.dtype | None,
        frequencies: Mapping[str, RopeFrequencies],
        attention_dropout: float = 0.0,
        residual_dropout: float = 0.0,
    ) -> None:
        self.shape, self.plan, self.layout, self.group = shape, plan, layout, group
        self.compute_dtype, self.frequencies = compute_dtype, frequencies
        self.attention_dropout, self.residual_dropout = attention_dropout, residual_dropout
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.heads = Heads(shape, layout, plan, group)
        self.vocabulary = VocabParallel(shape.vocab, plan=plan, group=group, runs=layout.vocab)

    def __deepcopy__(self, memo: Any) -> Setting:
        return self  # immutable, and a process group has no copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.group is not None:
            raise PlanError(
                "a sharded model is not pickled, since its process group is this process's; save_pretrained writes a "
                "checkpoint, state_dict() this rank's tensors"
            )
        return super().__reduce_ex__(protocol)

    def compute(self, weight: Tensor) -> torch.dtype:
        return weight.dtype if self.compute_dtype is None else self.compute_dtype


@dataclass(frozen=True)
class Pass:
    """One call: its rows, per kind of rope the tables of their positions [R, D/2], the cache, its live slots."""

    rows: Rows
    tables: Mapping[str, tuple[Tensor, Tensor]]
    cache: Cache | None
    slots: Tensor | None
    lengths: Tensor | None
    dropout: ops.DropoutKey | None = None


# --- ends of the model ------------------------------------------------------------------------------------------------


class VocabEmbedding(torch.nn.Module):
    """x[r] = cast(W[ids[r]]): each rank holds rows of W [v, hidden] and adds -0.0 for the others (A8)."""

    def __init__(
        self,
        setting: Setting,
        weight: torch.nn.Parameter,
        padding_idx: int | None,
        tied: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.setting, self.weight, self.padding_idx = setting, weight, padding_idx
        self.num_embeddings, self.embedding_dim = setting.shape.vocab, setting.shape.hidden
        self.tied, self.scale = tied, scale

    def forward(self, ids: Tensor, sample_offsets: Sequence[int] | None = None) -> Tensor:
        setting = self.setting
        weight = use(self.weight, 0) if self.tied else self.weight  # a tree for each use (S4)
        x = ops.embedding(
            ids,
            weight,
            first_row=setting.vocabulary.columns[0],
            vocabulary=setting.shape.vocab,
            out_dtype=setting.compute(self.weight),
            sample_offsets=sample_offsets,
            plan=setting.plan,
        )
        if setting.size > 1:
            x = _AddRanks.apply(setting, x)  # type: ignore[no-untyped-call]
        # Gemma's factor, rounded to the dtype of x as there: one product per element
        return x if self.scale is None else x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)

    def extra_repr(self) -> str:
        first, end = self.setting.vocabulary.columns
        return f"{self.num_embeddings}, {self.embedding_dim}, rows [{first}, {end})"


class _AddRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, setting: Setting, x: Tensor) -> Tensor:
        return all_reduce(x, setting.group, plan=setting.plan)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Any, ...]:
        return None, dy  # each rank takes its own rows of it


class VocabHead(Packable):
    """logits [R, v] = x W^T, fp32: this rank's rows of the vocabulary; dX is one tree over V, never narrowed (A6).

    softcap c: then c tanh(logits / c) (R10).
    """

    def __init__(
        self, setting: Setting, weight: torch.nn.Parameter, tied: bool = False, softcap: float | None = None
    ) -> None:
        super().__init__()
        self.setting, self.weight, self.tied, self.softcap = setting, weight, tied, softcap
        self.in_features, self.out_features = setting.shape.hidden, setting.shape.vocab

    def pack_specs(self) -> dict[str, PackSpec]:
        run = CoverRun(self.in_features, 0, self.setting.plan.leaves)
        return {"weight": PackSpec(self.setting.plan, self.setting.compute(self.weight), None, run)}

    def forward(self, x: Tensor, sample_offsets: Sequence[int] | None = None) -> Tensor:
        logits = self._logits(x, sample_offsets)
        return logits if self.softcap is None else ops.softcap(logits, self.softcap)

    def _logits(self, x: Tensor, sample_offsets: Sequence[int] | None) -> Tensor:
        setting = self.setting
        weight, compute = self.weight_of("weight"), setting.compute(self.weight)
        if self.tied and not isinstance(weight, PackedWeight):
            weight = use(weight, 1)
        if setting.size == 1 or isinstance(weight, PackedWeight):
            return ops.linear(
                x,
                weight,
                plan=setting.plan,
                compute_dtype=compute,
                out_dtype=torch.float32,
                sample_offsets=sample_offsets,
            )
        logits: Tensor = _Head.apply(setting, compute, sample_offsets, x, weight)  # type: ignore[no-untyped-call]
        return logits

    def extra_repr(self) -> str:
        first, end = self.setting.vocabulary.columns
        return f"in_features={self.in_features}, out_features={self.out_features}, rows [{first}, {end})"


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        setting: Setting,
        compute: torch.dtype,
        sample_offsets: Sequence[int] | None,
        x: Tensor,
        weight: Tensor,
    ) -> Tensor:
        ctx.setting, ctx.compute, ctx.sample_offsets = setting, compute, sample_offsets
        ctx.save_for_backward(x, weight)
        return ops.linear(
            x,
            weight,
            plan=setting.plan,
            compute_dtype=compute,
            out_dtype=torch.float32,
            sample_offsets=sample_offsets,
        )

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Any, ...]:
        x, weight = saved
        setting, vocabulary = ctx.setting, ctx.setting.vocabulary
        dx = dw = None
        if ctx.needs_input_grad[3]:
            values = linear_dx(
                [dy], [weight], [vocabulary.run], plan=setting.plan, compute_dtype=ctx.compute, parallel=False
            )
            sharding = vocabulary.sharding
            dx = all_reduce(
                sharding.cover(values), sharding.group, plan=setting.plan, runs=sharding.runs, out_dtype=x.dtype
            )
        if ctx.needs_input_grad[4]:
            dw = linear_dw(dy, x, plan=setting.plan, compute_dtype=ctx.compute, sample_offsets=ctx.sample_offsets)
        return None, None, None, dx, dw


class _GatherVocabulary(torch.autograd.Function):
    """[R, v] of each rank -> [R, V] on every rank; backward: this rank's columns of a gradient that all ranks have."""

    @staticmethod
    def forward(ctx: Any, vocabulary: VocabParallel, local: Tensor) -> Tensor:
        ctx.columns = vocabulary.columns
        widths = [end - first for first, end in vocabulary.bounds]
        padded = local.new_zeros(local.shape[0], max(widths))
        padded[:, : local.shape[1]] = local
        message = padded.view(-1).view(torch.uint8)
        gathered = all_gather_bytes(message, vocabulary.sharding.group, "logits")
        parts = gathered.view(-1).view(local.dtype).view(len(widths), *padded.shape)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths)], dim=1)

    @staticmethod
    @_differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor, ...], dy: Tensor) -> tuple[Any, ...]:
        return None, dy[:, slice(*ctx.columns)].contiguous()


class RMSNorm(torch.nn.Module):
    """(y, h) = (rms_norm(h), h), h = cast(x + residual) (R2). offset: 1 + w in place of w (Gemma)."""

    def __init__(self, setting: Setting, weight: torch.nn.Parameter, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.setting, self.weight, self.eps, self.offset = setting, weight, eps, offset

    def forward(self, x: Tensor, residual: Tensor, sample_offsets: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(
            x,
            residual,
            self.weight,
            self.eps,
            offset=self.offset,
            sample_offsets=sample_offsets,
            plan=self.setting.plan,
        )

    def alone(self, x: Tensor, sample_offsets: Sequence[int] | None) -> Tensor:
        """rms_norm(x) (R1)."""
        return ops.rms_norm(
            x, self.weight, self.eps, offset=self.offset, sample_offsets=sample_offsets, plan=self.setting.plan
        )

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


# --- a layer ----------------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """q, k, v as one group, the heads of this rank, and the row-parallel output."""

    def __init__(
        self,
        setting: Setting,
        index: int,
        qkv_proj: ColumnParallelGroup,
        o_proj: RowParallelLinear,
        options: HeadOptions,
        q_norm: torch.nn.Parameter | None = None,
        k_norm: torch.nn.Parameter | None = None,
        rope_kind: str = "",
    ) -> None:
        super().__init__()
        self.rope_kind = rope_kind
        self.setting, self.layer_idx, self.options = setting, index, options
        self.qkv_proj, self.o_proj = qkv_proj, o_proj
        self.q_norm: torch.nn.Parameter | None
        self.k_norm: torch.nn.Parameter | None
        self.register_parameter("q_norm", q_norm)
        self.register_parameter("k_norm", k_norm)

    def forward(self, x: Tensor, call: Pass) -> Tensor:
        heads, dim, samples = self.setting.heads, self.setting.shape.head_dim, call.rows.samples
        q, k, v = (y.unflatten(1, (y.shape[1] // dim, dim)) for y in self.qkv_proj(x, samples))
        q_norm, k_norm = self.q_norm, self.k_norm
        sin, cos = call.tables[self.rope_kind]
        if call.cache is None:
            drop = self._dropout(call)
            out = head_attention(heads, q, k, v, sin, cos, samples, self.options, q_norm, k_norm, drop)
        else:
            q = normed_and_turned(q, q_norm, sin, cos, self.options)
            k = normed_and_turned(k, k_norm, sin, cos, self.options)
            out = self._with_cache(q, k, v, call, call.cache)
        y: Tensor = self.o_proj(out.flatten(1), samples)
        return y

    def _dropout(self, call: Pass) -> ops.AttentionDropout | None:
        setting, key = self.setting, call.dropout
        if key is None or not setting.attention_dropout:
            return None
        name, first_head = f"model.layers.{self.layer_idx}.self_attn", setting.heads.query[setting.rank][0]
        return ops.AttentionDropout(setting.attention_dropout, key.seed, key.step, name, key.first_sample, first_head)

    def dropped(self, x: Tensor, call: Pass, place: str) -> Tensor:
        """What a part of this layer adds to the residual stream, with dropout (R9)."""
        p, key = self.setting.residual_dropout, call.dropout
        if key is None or not p:
            return x
        return ops.dropout(
            x,
            p,
            seed=key.seed,
            step=key.step,
            name=f"model.layers.{self.layer_idx}.{place}",
            sample_offsets=call.rows.samples,
            first_sample=key.first_sample,
        )

    def _with_cache(self, q: Tensor, k: Tensor, v: Tensor, call: Pass, cache: Cache) -> Tensor:
        rows = call.rows
        stored = cache.update(
            rows.unpack(k).transpose(1, 2), rows.unpack(v).transpose(1, 2), self.layer_idx
        )  # [B, G, S, D]
        keys, values = (t if t.stride(3) == 1 else t.contiguous() for t in stored)
        batch, _, width, _ = keys.shape
        lengths = torch.full((batch,), width, device=q.device) if call.lengths is None else call.lengths
        if call.slots is None:
            table = torch.arange(batch, device=q.device)[:, None]
            key_pages, value_pages = keys.transpose(1, 2), values.transpose(1, 2)
        else:
            keys, values = (t if t.is_contiguous() else t.contiguous() for t in (keys, values))
            # slots of one token: page p begins p tokens after the first one, so a table may skip the padding
            key_pages, value_pages = _token_pages(keys), _token_pages(values)
            table = torch.arange(batch, device=q.device)[:, None] * (keys.shape[1] * width) + call.slots
        return ops.paged_attention(
            q,
            key_pages,
            value_pages,
            table,
            lengths,
            torch.tensor(rows.samples, device=q.device),
            scale=self.options.scale,
            window=self.options.window,
            softcap=self.options.softcap,
            sharing=self.setting.heads.sharing,
            plan=self.setting.heads.plan,
        )


def _token_pages(x_BGSD: Tensor) -> Tensor:
    batch, heads, width, dim = x_BGSD.shape
    count = (batch - 1) * heads * width + width
    return x_BGSD.as_strided((count, 1, heads, dim), (dim, dim, width * dim, 1))


class MLP(torch.nn.Module):
    """down_proj(f(gate) up); gated: ops.silu_and_mul or ops.gelu_and_mul."""

    def __init__(
        self,
        gate_up_proj: ColumnParallelGroup,
        down_proj: RowParallelLinear,
        gated: Callable[[Tensor, Tensor], Tensor] = ops.silu_and_mul,
    ) -> None:
        super().__init__()
        self.gated = gated
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj

    def forward(self, x: Tensor, sample_offsets: Sequence[int]) -> Tensor:
        gate, up = self.gate_up_proj(x, sample_offsets)
        y: Tensor = self.down_proj(self.gated(gate, up), sample_offsets)
        return y


class DecoderLayer(GradientCheckpointingLayer):
    """(d, h) -> (d, h): what was last added, and the residual stream without it."""

    def __init__(self, self_attn: Attention, mlp: MLP | RoutedExperts, before: RMSNorm, between: RMSNorm) -> None:
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm, self.post_attention_layernorm = before, between

    def forward(self, x: Tensor, residual: Tensor, call: Pass) -> tuple[Tensor, Tensor]:
        samples = call.rows.samples
        y, h = self.input_layernorm(x, residual, samples)
        a = self.self_attn.dropped(self.self_attn(y, call), call, "self_attn.o_proj")
        y, h = self.post_attention_layernorm(a, h, samples)
        d: Tensor = self.mlp(y, samples)
        return self.self_attn.dropped(d, call, "mlp.down_proj"), h


class SandwichLayer(GradientCheckpointingLayer):
    """Gemma 2 and 3: as DecoderLayer, and what is added is normed before."""

    def __init__(
        self, self_attn: Attention, mlp: MLP, before: RMSNorm, after: RMSNorm, before_mlp: RMSNorm, after_mlp: RMSNorm
    ) -> None:
        super().__init__()
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm, self.post_attention_layernorm = before, after
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = before_mlp, after_mlp

    def forward(self, x: Tensor, residual: Tensor, call: Pass) -> tuple[Tensor, Tensor]:
        samples = call.rows.samples
        y, h = self.input_layernorm(x, residual, samples)
        a = self.post_attention_layernorm.alone(self.self_attn(y, call), samples)
        y, h = self.pre_feedforward_layernorm(self.self_attn.dropped(a, call, "self_attn.o_proj"), h, samples)
        d = self.post_feedforward_layernorm.alone(self.mlp(y, samples), samples)
        return self.self_attn.dropped(d, call, "mlp.down_proj"), h


# --- the model --------------------------------------------------------------------------------------------------------


class DecoderModel:
    """Mixin before a Hugging Face base model: embed_tokens, layers and norm are the modules of this file."""

    setting: Setting

    def run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        inputs_embeds: Tensor | None,
        use_cache: bool | None,
        sample_offsets: Sequence[int] | None,
        others: dict[str, Any],
    ) -> tuple[Tensor, Rows, Cache | None]:
        """The normed rows [R, hidden]."""
        model: Any = self
        where = f"{type(self).__name__}.forward"
        dropout = self._dropout(where, others.pop("dropout", None))
        unknown = sorted(name for name, value in others.items() if value is not None and value is not False)
        if unknown:
            raise PlanError(f"{where}: {unknown} are not supported by a model that tbik.parallelize made")
        if (input_ids is None) == (inputs_embeds is None):
            raise PlanError(f"{where}: expected input_ids or inputs_embeds")
        given: Tensor = input_ids if input_ids is not None else inputs_embeds  # type: ignore[assignment]
        self._require_input(where, given, ids=input_ids is not None)
        training = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        cache = self._cache(where, past_key_values, use_cache, training)
        past = 0 if cache is None else cache.get_seq_length()
        rows = rows_of(given.shape[0], given.shape[1], past, attention_mask, position_ids, sample_offsets, given.device)
        if cache is not None:
            cache = self._cache_of(where, cache, rows, wanted=bool(use_cache) or past_key_values is not None)
        packed = rows.pack(given)
        if input_ids is not None:
            self._require_ids(where, packed)
        x = packed if input_ids is None else model.embed_tokens(packed, rows.samples)
        tables = {
            kind: ops.rope_tables(rows.positions, of.inv_freq.to(given.device), scale=of.scale)
            for kind, of in self.setting.frequencies.items()
        }
        slots = lengths = None
        if cache is not None and rows.live is not None:
            lengths = rows.live.sum(1)
            # the live slots first, in order; what follows them is never read
            slots = (~rows.live).to(torch.int8).argsort(dim=1, stable=True)[:, : int(lengths.max())]
        call = Pass(rows, tables, cache, slots, lengths, dropout)
        # -0.0 is the neutral element, -0.0 itself included
        residual = torch.full_like(x, -0.0, requires_grad=False)
        for layer in model.layers:
            x, residual = layer(x, residual, call=call)
        y, _ = model.norm(x, residual, rows.samples)
        return y, rows, cache

    def _require_input(self, where: str, given: Any, ids: bool) -> None:
        hidden = self.setting.shape.hidden
        if ids:
            if not isinstance(given, Tensor) or given.dim() != 2 or given.dtype not in (torch.int64, torch.int32):
                raise PlanError(f"{where}: expected input_ids int64 or int32 [B, T], got {_described(given)}")
            return
        compute = self.setting.compute(cast(Any, self).embed_tokens.weight)
        if not isinstance(given, Tensor) or given.shape[2:] != (hidden,) or given.dtype != compute:
            raise PlanError(f"{where}: expected inputs_embeds {compute} [B, T, {hidden}], got {_described(given)}")

    def _require_ids(self, where: str, ids: Tensor) -> None:
        vocabulary = self.setting.shape.vocab
        wrong = ((ids < 0) | (ids >= vocabulary)).nonzero()[:, 0]
        if len(wrong):
            raise PlanError(
                f"{where}: input_ids are numbers within [0, {vocabulary}), got {int(ids[wrong[0]])} as token "
                f"{int(wrong[0])} of the call (padding not counted)"
            )

    def _cache_of(self, where: str, cache: Cache, rows: Rows, wanted: bool) -> Cache | None:
        """The cache if it fits these rows; None if it was not asked for and cannot serve them."""
        empty = [] if rows.live is None else (~rows.live.any(1)).nonzero()[:, 0].tolist()
        reason = ""
        if len(rows.samples) != rows.batch + 1:
            reason = "packed rows have no cache; use_cache=False, or generate from a padded batch"
        elif empty or not rows.width:
            reason = f"rows {empty[:8]} have no token (attention_mask), and nothing can be generated from nothing"
        if reason:
            if wanted:
                raise PlanError(f"{where}: {reason}")
            return None
        setting = self.setting
        heads = setting.layout.kv_heads[setting.rank]
        compute = setting.compute(cast(Any, self).embed_tokens.weight)
        expected = (rows.batch, heads[1] - heads[0], rows.past, setting.shape.head_dim)
        for index, layer in enumerate(cache.layers):
            keys = cast(Any, layer).keys
            device = rows.positions.device
            if rows.past and (tuple(keys.shape) != expected or keys.dtype != compute or keys.device != device):
                raise PlanError(
                    f"{where}: layer {index} of the cache holds keys {keys.dtype} {list(keys.shape)} on {keys.device}, "
                    f"this call needs {compute} {list(expected)} on {device} (B, KV heads of this rank, cached tokens, "
                    "head_dim)"
                )
        if rows.live is not None:
            cache.tbik_has_padding = True  # type: ignore[attr-defined]
        elif rows.past and getattr(cache, "tbik_has_padding", False):
            raise PlanError(
                f"{where}: the cache holds padding, and without attention_mask it would be read as tokens; pass "
                f"attention_mask {[rows.batch, rows.past + rows.width]}"
            )
        return cache

    def _dropout(self, where: str, key: Any) -> ops.DropoutKey | None:
        model: Any = self
        if key is not None and not isinstance(key, ops.DropoutKey):
            raise PlanError(
                f"{where}: dropout is an ops.DropoutKey(seed, step, first_sample), got {type(key).__name__}"
            )
        if not model.training or not (self.setting.attention_dropout or self.setting.residual_dropout):
            return None
        if key is None:
            raise PlanError(
                f"{where}: a model in training mode with dropout needs dropout=ops.DropoutKey(seed, step, "
                "first_sample): masks are functions of coordinates, not of calls. Without: model.eval(), or p = 0"
            )
        return key

    def _cache(self, where: str, cache: Any, use_cache: bool | None, training: bool) -> Cache | None:
        model: Any = self
        if training:
            if cache is not None or use_cache:
                raise PlanError(
                    f"{where}: a cache has no backward; use torch.no_grad() to generate, use_cache=False to train"
                )
            return None
        if cache is None:
            wanted = model.config.use_cache if use_cache is None else use_cache
            return DynamicCache() if wanted else None
        offloading = getattr(cache, "offloading", False)
        if type(cache) is not DynamicCache or offloading:
            kind = f"{type(cache).__name__}{' with offloading' if offloading else ''}"
            raise PlanError(f"{where}: past_key_values is a DynamicCache, got {kind}")
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicSlidingWindowLayer and not layer.get_seq_length():
                # it would drop keys by slot, padding counted; the window is the mask's business
                cache.layers[index] = DynamicLayer()  # type: ignore[no-untyped-call]
            elif type(layer) is not DynamicLayer:
                raise PlanError(f"{where}: layer {index} of the cache is a {type(layer).__name__}, not a DynamicLayer")
        return cache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        sample_offsets: Sequence[int] | None = None,
        **others: Any,
    ) -> Any:
        """Last hidden states [B, T, hidden] after the norm, 0 at padding."""
        return_dict = others.pop("return_dict", None)
        y, rows, cache = self.run(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, sample_offsets, others
        )
        hidden: Any = rows.unpack(y)
        output = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=cache)
        return output.to_tuple() if return_dict is False else output


class CausalModel:
    """Mixin before a Hugging Face ...ForCausalLM whose base model is a DecoderModel and whose lm_head a VocabHead."""

    setting: Setting

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        sample_offsets: Sequence[int] | None = None,
        num_items_in_batch: int | Tensor | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """fp32 logits [B, T, V], 0 at padding; with labels the loss.

        labels [B, T], the ids or -100: loss = token sum * fp32(1 / num_items_in_batch), by default 1 / number of
        targets of this call; the factor multiplies the fp32 gradient that enters (S4). With labels the logits are given
        in eval mode only, and without a graph.
        """
        model: Any = self
        if others.pop("shift_labels", None) is not None:
            raise PlanError("parallelize: shift_labels is not supported; pass labels, which are shifted by sequence")
        y, rows, cache = model.model.run(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, sample_offsets, others
        )
        loss = None
        if labels is not None:
            if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
                raise PlanError("parallelize: labels need the logits of every token; leave logits_to_keep out")
            targets = rows.targets(labels)
            local = model.lm_head(y, rows.samples)
            total, count = self.setting.vocabulary.cross_entropy(local, targets, sample_offsets=list(rows.samples))
            scale = _reciprocal(count if num_items_in_batch is None else num_items_in_batch)
            loss = total * scale.to(total.device)
            logits = None if model.training else rows.unpack(self._gather(local.detach()))
        else:
            kept, width, places = rows.keep(logits_to_keep)
            if kept is None:
                logits = rows.unpack(self._gather(model.lm_head(y, rows.samples)))
            else:
                if torch.is_grad_enabled() and y.requires_grad:
                    raise PlanError(
                        "parallelize: logits_to_keep has no gradient by samples; use torch.no_grad() or all logits"
                    )
                logits = self._gather(model.lm_head(y.index_select(0, kept)))
                part = Rows(rows.batch, width, 0, places, kept, (0, len(kept)), None)
                logits = part.unpack(logits)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output.to_tuple() if return_dict is False else output

    def _gather(self, local: Tensor) -> Tensor:
        if self.setting.size == 1:
            return local
        whole: Tensor = _GatherVocabulary.apply(self.setting.vocabulary, local)  # type: ignore[no-untyped-call]
        return whole

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **arguments: Any) -> None:
        """An ordinary checkpoint that transformers loads; the ranks' shards are put together on rank 0.

        is_main_process: False where another replica writes (all ranks of the group still make this call).
        """
        from tbik.huggingface.checkpoint import save_checkpoint

        wanted = {"safe_serialization": (None, True), "save_peft_format": (None, False, True)}
        extra = sorted(n for n, value in arguments.items() if value not in wanted.get(n, (None, False)))
        if extra:
            raise PlanError(f"save_pretrained: {extra} are not supported by a parallelized model")
        save_checkpoint(self, save_directory, write=bool(is_main_process))  # type: ignore[arg-type]

    def checkpoint_pieces(self) -> dict[str, Any]:
        """{stock name: this rank's part}, which is what tbik.fingerprint reads."""
        from tbik.huggingface.checkpoint import pieces

        return dict(pieces(self))  # type: ignore[arg-type]

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError("resize_token_embeddings: the vocabulary is in shards; resize before tbik.parallelize")

    def set_input_embeddings(self, value: Any) -> None:
        raise PlanError("set_input_embeddings: the vocabulary is in shards; replace it before tbik.parallelize")

    def set_output_embeddings(self, value: Any) -> None:
        raise PlanError("set_output_embeddings: the vocabulary is in shards; replace it before tbik.parallelize")


def _reciprocal(count: int | Tensor) -> Tensor:
    """fp32(1 / count)."""
    number: Any = count
    if isinstance(count, Tensor):
        number = count.item() if count.numel() == 1 else None
    whole = isinstance(number, (int, float)) and not isinstance(number, bool) and 1 <= number < 2**63
    if not whole or int(number) != number:
        raise PlanError(
            "parallelize: the loss is divided by the number of targets (num_items_in_batch), expected one at least, "
            f"got {count!r:.60}"
        )
    return upstream(int(number))


def _described(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
