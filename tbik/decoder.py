"""A decoder (Llama, Qwen2, Qwen3) straight from config.json and safetensors, tensor-parallel, without transformers.

    x += o_proj(attention(rope(norm(q)), rope(norm(k)), v)),  q, k, v = qkv_proj(rms(x))
    x += down_proj(silu(gate) * up),                          gate, up = gate_up_proj(rms(x))
    logp = log_softmax(lm_head(rms(x)))                       the root of lm_head stays fp32

Two modes of the linear layers, everything else shared: "tbik" (the order, tbik.nn) and "stock" (torch's linear and
dist.all_reduce in the model dtype), so that a comparison of the two shows the linears and the all-reduce alone.
Sharding: TreePlan.layout, i.e. whole query heads, leaf runs of the MLP, leaf runs of the vocabulary. Two all-reduces
per layer, one for the embedding, one gather for the logits.

Suffixes: T tokens, H query heads, G KV heads, S keys, D head_dim, V vocabulary.
Specification: ORDER.md A8, A10, A12, K1.
Bits in mode "tbik": batch-invariant and layout-invariant (tests/test_decoder.py). Frozen weights, no backward.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tbik import nn, ops
from tbik.collectives import all_reduce
from tbik.errors import IntegrityError, PlanError
from tbik.integrity.pieces import Piece
from tbik.packing import freeze
from tbik.plan import Layout, ModelShape, Run, TreePlan

KEYS_PER_BLOCK = 64
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED_DTYPES = ("BF16", "F16", "F32")
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Mode = Literal["tbik", "stock"]
Linear = Callable[[Tensor], Tensor]
Group = Callable[[Tensor], Sequence[Tensor]]
Rows = Sequence[Run]
"""Rows [first, end) of a weight, one pair per rank."""


# --- the configuration ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecoderConfig:
    """What of a config.json decides the arithmetic. `from_folder` refuses, by name, everything it does not know."""

    architecture: str
    shape: ModelShape
    num_layers: int
    eps: float
    rope_theta: float
    rope_scaling: Mapping[str, float] | None
    """None, or the numbers of Llama 3's scaled tables."""
    max_positions: int
    tied: bool
    eos_token_ids: tuple[int, ...]

    @property
    def qkv_bias(self) -> bool:
        return self.architecture == "Qwen2ForCausalLM"

    @property
    def qk_norm(self) -> bool:
        return self.architecture == "Qwen3ForCausalLM"

    @classmethod
    def from_folder(cls, folder: Path | str) -> DecoderConfig:
        """Errors: PlanError naming the field that this decoder does not implement."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise PlanError(f"decoder: expected a checkpoint folder, found no file {path}")
        fields = json.loads(path.read_text())

        def refuse(name: str, expected: str) -> None:
            raise PlanError(f"decoder: {path}: {name} = {fields.get(name)!r} is not supported; expected {expected}")

        architectures = fields.get("architectures") or [None]
        if len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
            refuse("architectures", f"one of {', '.join(ARCHITECTURES)}")
        if fields.get("hidden_act", "silu") != "silu":
            refuse("hidden_act", "silu")
        for name in ("attention_bias", "mlp_bias"):
            if fields.get(name):
                refuse(name, "false (q/k/v biases are read for Qwen2ForCausalLM only)")
        for name in ("quantization_config", "num_local_experts", "num_experts"):
            if fields.get(name):
                refuse(name, "none of it")
        if fields.get("use_sliding_window", architectures[0] == "LlamaForCausalLM") and fields.get("sliding_window"):
            refuse("sliding_window", "full attention")
        if set(fields.get("layer_types") or ()) - {"full_attention"}:
            refuse("layer_types", "full_attention in every layer")
        theta, scaling = _rope(fields, refuse)
        shape = ModelShape.from_config(fields)
        if shape.head_dim % 2:
            raise PlanError(f"decoder: {path}: head_dim = {shape.head_dim}; expected an even number (rope)")
        numbers = {"num_hidden_layers": int, "rms_norm_eps": float, "max_position_embeddings": int}
        for name, kind in numbers.items():
            if not isinstance(fields.get(name), (int, kind)):
                refuse(name, f"a number ({kind.__name__})")
        eos = fields.get("eos_token_id")
        return cls(
            architecture=architectures[0],
            shape=shape,
            num_layers=fields["num_hidden_layers"],
            eps=fields["rms_norm_eps"],
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=fields["max_position_embeddings"],
            tied=bool(fields.get("tie_word_embeddings", False)),
            eos_token_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        )


def _rope(fields: Mapping[str, Any], refuse: Callable[[str, str], None]) -> tuple[float, Mapping[str, float] | None]:
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    parameters = fields.get(name) or {}
    theta = parameters.get("rope_theta", fields.get("rope_theta", 10000.0))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if (parameters.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0) != 1.0:
        refuse(name if name in fields else "partial_rotary_factor", "partial_rotary_factor 1.0")
    if kind == "default":
        return float(theta), None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind != "llama3" or any(not isinstance(parameters.get(key), (int, float)) for key in names):
        refuse(name, f"rope_type default, or llama3 with {', '.join(names)}")
    return float(theta), {key: float(parameters[key]) for key in names}


def inverse_frequencies(config: DecoderConfig) -> list[float]:
    """theta^(-2i/D) for i < D/2, and Llama 3's rescaling of the long wavelengths.

    Computed in fp64 and later rounded to fp32, which hides the last bits of the platform's pow.
    """
    dim = config.shape.head_dim
    frequencies = [config.rope_theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    if config.rope_scaling is None:
        return frequencies
    scaling = config.rope_scaling
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    scaled = []
    for frequency in frequencies:
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * 3.141592653589793)
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return scaled


# --- the checkpoint ---------------------------------------------------------------------------------------------------


class Checkpoint:
    """Memory-mapped safetensors; a rank touches the bytes of its own shard only. Errors: PlanError, by tensor."""

    def __init__(self, folder: Path | str, dtype: torch.dtype, pieces: dict[str, list[Piece]] | None = None) -> None:
        """pieces: takes every tensor that is read, if it is given."""
        from safetensors import safe_open

        self._pieces = pieces

        self._dtype = dtype
        self._stack = ExitStack()
        self._owner: dict[str, Any] = {}
        self._unread: set[str] = set()
        self.loaded_bytes: dict[str, tuple[Run, int]] = {}
        """Per tensor: the range of rows or columns that was read, and its bytes in the model dtype."""
        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise PlanError(f"decoder: expected *.safetensors in {folder}, found none")
        for file in files:
            opened = self._stack.enter_context(safe_open(str(file), framework="pt"))
            for name in opened.keys():  # noqa: SIM118  # a safe_open object is no mapping
                self._owner[name] = opened
        self._unread = set(self._owner)

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def read(self, name: str, shape: tuple[int, ...], part: Run | None = None, axis: int = 0) -> Tensor:
        """Rows (axis 0) or columns (axis 1) [lo, hi) of a tensor, in the model dtype and contiguous."""
        if name not in self._owner:
            raise PlanError(f"decoder: the checkpoint lacks the tensor {name}")
        view = self._owner[name].get_slice(name)
        if tuple(view.get_shape()) != shape:
            raise PlanError(f"decoder: {name} has shape {tuple(view.get_shape())}, config.json says {shape}")
        if view.get_dtype() not in STORED_DTYPES:
            raise PlanError(f"decoder: {name} is stored as {view.get_dtype()}; expected one of {STORED_DTYPES}")
        lo, hi = part or (0, shape[axis])
        value: Tensor = view[lo:hi] if axis == 0 else view[:, lo:hi]
        # a copy: the memory map is closed later, and a slice must not keep the whole file's pages alive
        value = torch.empty(value.shape, dtype=self._dtype).copy_(value)
        self._unread.discard(name)
        if self._pieces is not None:
            offset = [0] * len(shape)
            offset[axis] = lo
            self._pieces[name] = [Piece.box(value, shape, offset)]
        self.loaded_bytes[name] = ((lo, hi), value.numel() * value.element_size())
        return value

    def close(self, ignored: Sequence[str] = ()) -> None:
        """Unmap. Errors: PlanError if a tensor was left unread, which means another architecture."""
        self._stack.close()
        self._owner.clear()
        unread = sorted(n for n in self._unread if n not in ignored and not n.endswith("rotary_emb.inv_freq"))
        if unread:
            raise PlanError(f"decoder: the checkpoint has tensors that this decoder does not know: {unread[:6]}")


# --- the two modes of the linear layers -------------------------------------------------------------------------------


class Linears(Protocol):
    """How a mode makes its linear layers from this rank's shards; the shards are the same in both."""

    def group(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, runs: Sequence[Run], rows: Sequence[Rows]
    ) -> Group:
        """Linears of one input. rows: per member, the rows that each rank holds; the last rank's end is N."""

    def row(self, weight: Tensor, in_features: int, runs: Sequence[Run]) -> Linear:
        """Contracts the columns of this rank and adds the ranks."""

    def head(self, weight: Tensor) -> Linear:
        """The rows of lm_head on this rank; fp32 out."""

    def add_ranks(self, x: Tensor) -> Tensor:
        """Sum of x over the ranks."""


class StockLinears:
    """torch.nn.functional.linear and dist.all_reduce, both in the model dtype. Bits: deterministic at best."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group

    def group(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, runs: Sequence[Run], rows: Sequence[Rows]
    ) -> Group:
        merged, sizes = torch.cat(list(weights)), [w.shape[0] for w in weights]
        bias = torch.cat(list(biases)) if biases else None
        return lambda x: torch.split(functional.linear(x, merged, bias), sizes, dim=-1)

    def row(self, weight: Tensor, in_features: int, runs: Sequence[Run]) -> Linear:
        return lambda x: self.add_ranks(functional.linear(x, weight))

    def head(self, weight: Tensor) -> Linear:
        return lambda x: functional.linear(x, weight).float()

    def add_ranks(self, x: Tensor) -> Tensor:
        if self._group is not None:
            dist.all_reduce(x, group=self._group)
        return x


class TbikLinears:
    """tbik.nn's modules, frozen; covers cross the ranks. Bits: batch-invariant and layout-invariant."""

    def __init__(self, plan: TreePlan, group: dist.ProcessGroup | None) -> None:
        self._plan, self._group = plan, group

    def group(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, runs: Sequence[Run], rows: Sequence[Rows]
    ) -> Group:
        out_features = [by_rank[-1][1] for by_rank in rows]
        module = nn.ColumnParallelGroup(
            weights, biases, out_features=out_features, plan=self._plan, group=self._group, runs=runs, held_rows=rows
        )
        frozen: Callable[[Tensor], Any] = freeze(module, release=True)
        return frozen

    def row(self, weight: Tensor, in_features: int, runs: Sequence[Run]) -> Linear:
        module = nn.RowParallelLinear(weight, in_features=in_features, plan=self._plan, group=self._group, runs=runs)
        frozen: Callable[[Tensor], Any] = freeze(module, release=True)
        return frozen

    def head(self, weight: Tensor) -> Linear:
        module = nn.Linear.from_full(weight, plan=self._plan, out_dtype=torch.float32)
        frozen: Linear = freeze(module, release=True)
        return frozen

    def add_ranks(self, x: Tensor) -> Tensor:
        return x if self._group is None else all_reduce(x, self._group, plan=self._plan)


# --- attention --------------------------------------------------------------------------------------------------------


class KVCache:
    """The keys and values of one sequence on one rank: per layer [capacity, G, D] each, in the model dtype."""

    def __init__(self, num_layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.length = 0
        self._layers = [torch.empty(2, 0, kv_heads, head_dim, dtype=dtype) for _ in range(num_layers)]

    def append(self, layer: int, k_TGD: Tensor, v_TGD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens of a layer after `length`; returns the views that hold every key and value so far."""
        end = self.length + k_TGD.shape[0]
        stored = self._layers[layer]
        if end > stored.shape[1]:
            capacity = max(KEYS_PER_BLOCK, 2 * stored.shape[1], end)
            self._layers[layer] = stored.new_empty(2, capacity, *stored.shape[2:])
            self._layers[layer][:, : self.length] = stored[:, : self.length]
            stored = self._layers[layer]
        stored[0, self.length : end] = k_TGD
        stored[1, self.length : end] = v_TGD
        return stored[0, :end], stored[1, :end]


# --- the decoder ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Group
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Group
    down: Linear


class Decoder:
    """One rank of a decoder.

    folder: config.json and *.safetensors. plan: decides the bits (mode "tbik") and the shards (both modes).
    group: the tensor-parallel group, None for one rank. mode: "tbik" or "stock". dtype: the model dtype; weights stored
    in another one are rounded once when they are loaded. keep_pieces: hold on to the weights as they were read.
    Errors: PlanError at construction for whatever this decoder does not implement.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        plan: TreePlan,
        group: dist.ProcessGroup | None = None,
        mode: Mode = "tbik",
        dtype: str = "bfloat16",
        keep_pieces: bool = False,
    ) -> None:
        if mode not in ("tbik", "stock"):
            raise PlanError(f"Decoder.mode: expected 'tbik' or 'stock', got {mode!r}")
        if dtype not in DTYPES:
            raise PlanError(f"Decoder.dtype: expected one of {tuple(DTYPES)}, got {dtype!r}")
        self.config = DecoderConfig.from_folder(folder)
        self.plan, self.mode, self.dtype = plan, mode, DTYPES[dtype]
        self._group = group
        self.world_size = group.size() if group is not None else 1
        self.rank = group.rank() if group is not None else 0
        layout = plan.layout(self.config.shape, self.world_size)
        self._shards = _Shards(self.config.shape, plan, layout, self.rank)
        self.pieces: dict[str, list[Piece]] | None = {} if keep_pieces else None
        """With keep_pieces: the weights as they were read, for tbik.fingerprint over the group."""
        self._linears: Linears = TbikLinears(plan, group) if mode == "tbik" else StockLinears(group)
        with torch.no_grad():
            self._load(Path(folder))
        self._tables = torch.empty(0, 0), torch.empty(0, 0)

    def new_cache(self) -> KVCache:
        """An empty sequence."""
        return KVCache(self.config.num_layers, self._shards.num_kv_heads, self.config.shape.head_dim, self.dtype)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[tuple[KVCache, Sequence[int]]], every_position: bool = False) -> Tensor:
        """Append each chunk's tokens to its sequence; fp32 logits [chunks, V] after the last token of each.

        Chunks may be prompts, parts of prompts and single new tokens, all in one call; nothing is padded.
        every_position: [T, V], one row per token. All ranks must make the same call and get the same logits.
        """
        lengths = self._check(chunks)
        device = self._embedding.device
        ids_T = torch.tensor([token for _, tokens in chunks for token in tokens], device=device)
        positions_T = torch.cat(
            [torch.arange(cache.length, cache.length + n, device=device) for (cache, _), n in zip(chunks, lengths)]
        )
        sin_cos = self._rope_rows(positions_T)
        x = self._embed(ids_T)
        for index, layer in enumerate(self._layers):
            x = x + self._attend(index, layer, x, chunks, lengths, sin_cos)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm))
            x = x + layer.down(ops.silu_and_mul(gate, up))
        for (cache, _), n in zip(chunks, lengths):
            cache.length += n
        if not every_position:
            x = x[torch.tensor(lengths, device=device).cumsum(0) - 1]
        return self._gather_vocab(self._lm_head(self._norm(x, self._final_norm)))

    def log_softmax(self, logits: Tensor) -> Tensor:
        """fp32 log-probabilities of fp32 logits [..., V]; the sum over the vocabulary has the plan's leaves."""
        return ops.log_softmax(logits, self.plan.leaves)

    def _check(self, chunks: Sequence[tuple[KVCache, Sequence[int]]]) -> list[int]:
        lengths = [len(tokens) for _, tokens in chunks]
        if not lengths or min(lengths) < 1:
            raise PlanError(f"Decoder.forward: expected at least one token per chunk, got chunks of {lengths}")
        longest = max(cache.length + n for (cache, _), n in zip(chunks, lengths))
        if longest > self.config.max_positions:
            raise PlanError(f"Decoder.forward: {longest} positions, the model has {self.config.max_positions}")
        if len({id(cache) for cache, _ in chunks}) != len(chunks):
            raise PlanError("Decoder.forward: a sequence may appear once per call")
        vocab = self.config.shape.vocab
        wrong = [token for _, tokens in chunks for token in tokens if not 0 <= token < vocab]
        if wrong:
            raise PlanError(f"Decoder.forward: token {wrong[0]} is outside the vocabulary of {vocab}")
        return lengths

    def _embed(self, ids_T: Tensor) -> Tensor:
        """Row ids[t] of the embedding; a rank without the row contributes -0.0, the neutral element (ORDER.md A8)."""
        local = ids_T - self._shards.vocab_rows[self.rank][0]
        absent = (local < 0) | (local >= self._embedding.shape[0])
        rows = self._embedding[local.masked_fill(absent, 0)]
        rows[absent] = -0.0
        return self._linears.add_ranks(rows)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x: Tensor,
        chunks: Sequence[tuple[KVCache, Sequence[int]]],
        lengths: Sequence[int],
        sin_cos: tuple[Tensor, Tensor],
    ) -> Tensor:
        dim, num_tokens = self.config.shape.head_dim, x.shape[0]
        q, k, v = (y.reshape(num_tokens, -1, dim) for y in layer.qkv(self._norm(x, layer.input_norm)))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
        heads = q.shape[1]
        q, k = torch.split(ops.rope(torch.cat([q, k], dim=1), *sin_cos), [heads, k.shape[1]], dim=1)
        out, start = [], 0
        for (cache, _), n in zip(chunks, lengths):
            rows = slice(start, start + n)
            keys, values = cache.append(index, k[rows], v[rows])
            starts = (torch.tensor([0, length], device=q.device) for length in (n, keys.shape[0]))
            out.append(ops.attention(q[rows], keys, values, *starts, sharing=self._shards.sharing, plan=self.plan))
            start += n
        return layer.out(torch.cat(out).reshape(num_tokens, heads * dim))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self.config.eps)

    def _rope_rows(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        needed = int(positions_T.max()) + 1
        if needed > self._tables[0].shape[0]:  # an entry depends on its own position only: growing changes no bit
            size = min(self.config.max_positions, max(256, 2 * needed))
            device = positions_T.device
            frequencies = torch.tensor(inverse_frequencies(self.config), dtype=torch.float32, device=device)
            self._tables = ops.rope_tables(torch.arange(size, device=device), frequencies)
        sin, cos = self._tables
        return sin[positions_T], cos[positions_T]

    def _gather_vocab(self, local: Tensor) -> Tensor:
        if self._group is None:
            return local
        sizes = [end - first for first, end in self._shards.vocab_rows]
        padded = local.new_zeros(local.shape[0], max(sizes))
        padded[:, : local.shape[1]] = local
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes)], dim=1)

    def _load(self, folder: Path) -> None:
        config, shards, shape, rank = self.config, self._shards, self.config.shape, self.rank
        make, layout = self._linears, self._shards.layout
        checkpoint = Checkpoint(folder, self.dtype, self.pieces)
        hidden, dim = shape.hidden, shape.head_dim
        self._embedding = checkpoint.read("model.embed_tokens.weight", (shape.vocab, hidden), shards.vocab_rows[rank])
        self._layers = []
        for index in range(config.num_layers):
            prefix = f"model.layers.{index}"

            def vector(name: str, size: int, part: Run | None = None, prefix: str = prefix) -> Tensor:
                return checkpoint.read(f"{prefix}.{name}", (size,), part)

            def rows(name: str, by_rank: Rows, prefix: str = prefix) -> Tensor:
                return checkpoint.read(f"{prefix}.{name}.weight", (by_rank[-1][1], hidden), by_rank[rank])

            def columns(name: str, by_rank: Rows, prefix: str = prefix) -> Tensor:
                return checkpoint.read(f"{prefix}.{name}.weight", (hidden, by_rank[-1][1]), by_rank[rank], axis=1)

            members = (("q", shards.q_rows), ("k", shards.kv_rows), ("v", shards.kv_rows))
            qkv = [rows(f"self_attn.{name}_proj", by_rank) for name, by_rank in members]
            biases = None
            if config.qkv_bias:
                biases = [vector(f"self_attn.{n}_proj.bias", by_rank[-1][1], by_rank[rank]) for n, by_rank in members]
            out = columns("self_attn.o_proj", shards.q_rows)
            gate_up = [rows(f"mlp.{name}_proj", shards.mlp_rows) for name in ("gate", "up")]
            down = columns("mlp.down_proj", shards.mlp_rows)
            layer = _Layer(
                input_norm=vector("input_layernorm.weight", hidden),
                qkv=make.group(qkv, biases, layout.attention, [by_rank for _, by_rank in members]),
                q_norm=vector("self_attn.q_norm.weight", dim) if config.qk_norm else None,
                k_norm=vector("self_attn.k_norm.weight", dim) if config.qk_norm else None,
                out=make.row(out, shape.heads * dim, layout.attention),
                mlp_norm=vector("post_attention_layernorm.weight", hidden),
                gate_up=make.group(gate_up, None, layout.mlp, [shards.mlp_rows] * 2),
                down=make.row(down, shape.intermediate, layout.mlp),
            )
            self._layers.append(layer)
        self._final_norm = checkpoint.read("model.norm.weight", (hidden,))
        head = self._embedding
        if not config.tied:
            head = checkpoint.read("lm_head.weight", (shape.vocab, hidden), shards.vocab_rows[rank])
        self._lm_head = make.head(head)
        self.loaded_bytes = checkpoint.loaded_bytes
        checkpoint.close(ignored=("lm_head.weight",) if config.tied else ())


class _Shards:
    """The ranges of rows, columns and heads, one per rank."""

    def __init__(self, shape: ModelShape, plan: TreePlan, layout: Layout, rank: int) -> None:
        dim = shape.head_dim
        mlp_cuts, vocab_cuts = plan.cuts(shape.intermediate), plan.cuts(shape.vocab)
        self.layout = layout
        self.q_rows = [(lo * dim, hi * dim) for lo, hi in layout.heads]
        self.kv_rows = [(lo * dim, hi * dim) for lo, hi in layout.kv_heads]
        self.mlp_rows = [(mlp_cuts[lo], mlp_cuts[hi]) for lo, hi in layout.mlp]
        self.vocab_rows = [(vocab_cuts[lo], vocab_cuts[hi]) for lo, hi in layout.vocab]
        self.num_kv_heads = layout.kv_heads[rank][1] - layout.kv_heads[rank][0]
        first, end = layout.heads[rank]
        size = shape.heads // shape.kv_heads
        self.sharing = [
            ops.HeadRun(size, max(first - g * size, 0), min(end - g * size, size))
            for g in range(*layout.kv_heads[rank])
        ]
        """Per KV head of this rank, which of its query heads are here."""


# --- greedy decoding --------------------------------------------------------------------------------------------------


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int) -> Iterator[tuple[list[int], Tensor]]:
    """Decode all prompts together; yields, per step, the next token of each and the fp32 logits [prompts, V].

    The token is the lowest index among the largest logits. There are always `new_tokens` steps: no prompt stops at an
    end-of-text token. Errors: IntegrityError for NaN logits.
    """
    caches = [decoder.new_cache() for _ in prompts]
    chunks: list[tuple[KVCache, Sequence[int]]] = list(zip(caches, prompts))
    for _ in range(new_tokens):
        logits = decoder.forward(chunks)
        best = ops.argmax(logits)  # the lowest index of equal maxima, or the first NaN
        if bool(torch.isnan(logits.gather(-1, best[:, None])).any()):
            raise IntegrityError("greedy: the model's logits contain NaN")
        tokens = best.tolist()
        yield tokens, logits
        chunks = [(cache, [token]) for cache, token in zip(caches, tokens)]
