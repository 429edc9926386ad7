"""A Hugging Face decoder becomes the same model on tbik operators, in place, whole or sharded over a group.

    tbik.parallelize(model, group, plan)      every rank passes the same loaded model and keeps its shard
    tbik.load_checkpoint(folder, group)       every rank reads its shard only

Families: Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2, Gemma 3 text (...ForCausalLM). What would change a sum or
is not understood is refused by name before anything is changed: other classes (adapters, quantised or parametrized
layers), hooks, replaced forwards, other kinds of rope, dropout, a plan without whole heads at this TP size.

    q, k, v -> self_attn.qkv_proj     gate, up -> mlp.gate_up_proj     the rest, experts included, keeps its name
    shards: TreePlan.layout, i.e. whole query heads (KV heads replicated where needed), leaf runs of MLP and vocabulary

Errors: PlanError; nothing is changed then. Bits: layout-invariant and batch-invariant, forward and backward
(tests/test_parallelize.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from tbik import ops
from tbik.devices import CPU_AND_CUDA
from tbik.errors import PlanError
from tbik.head_parallel import HeadOptions
from tbik.huggingface.modules import (
    MLP,
    Attention,
    CausalModel,
    DecoderLayer,
    DecoderModel,
    RMSNorm,
    SandwichLayer,
    Setting,
    VocabEmbedding,
    VocabHead,
)
from tbik.nn import ColumnParallelGroup, RowParallelLinear
from tbik.plan import ModelShape, Run, TreePlan
from tbik.routed_experts import RoutedExperts

M = TypeVar("M", bound=torch.nn.Module)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEFAULT_TP_SIZES = ((1, 2, 3, 4, 8), (1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 4), (1, 2, 3), (1, 2), (1,))


class Family(NamedTuple):
    """The classes of one architecture, exactly; a subclass is something else. gemma: norms by 1 + w, four per layer."""

    causal: type
    base: type
    layer: type
    attention: type
    mlp: type
    norm: type
    rotary: type
    embedding: type = torch.nn.Embedding
    routed: tuple[type, ...] = ()  # block, experts, router
    gemma: bool = False

    @property
    def activation(self) -> str:
        return "gelu_pytorch_tanh" if self.gemma else "silu"


def _family_of(module: Any, name: str, **others: Any) -> Family:
    parts = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
    return Family(*(getattr(module, f"{name}{part}") for part in parts), **others)


GEMMA2 = _family_of(gemma2, "Gemma2", embedding=gemma2.Gemma2TextScaledWordEmbedding, gemma=True)
GEMMA3 = _family_of(gemma3, "Gemma3", embedding=gemma3.Gemma3TextScaledWordEmbedding, gemma=True)._replace(
    base=gemma3.Gemma3TextModel
)
QWEN3_MOE = _family_of(
    qwen3_moe,
    "Qwen3Moe",
    routed=(qwen3_moe.Qwen3MoeSparseMoeBlock, qwen3_moe.Qwen3MoeExperts, qwen3_moe.Qwen3MoeTopKRouter),
)
FAMILIES = (
    *(
        _family_of(module, name)
        for module, name in ((llama, "Llama"), (mistral, "Mistral"), (qwen2, "Qwen2"), (qwen3, "Qwen3"))
    ),
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
)
SUPPORTED = ", ".join(family.causal.__name__ for family in FAMILIES)


@dataclass(frozen=True)
class Part:
    """Where a parameter of the checkpoint is: `parameter` of the model holds, on rank r, [lo, hi) = held[r] of `axis`.

    held None: the whole tensor, on every rank. counted: of what several ranks hold, the range each answers for.
    stretches: the axis is so many equal stretches, gate before up, and the ranges are those of each of them.
    """

    parameter: str
    shape: tuple[int, ...]
    axis: int = 0
    held: tuple[Run, ...] | None = None
    counted: tuple[Run, ...] | None = None
    stretches: int = 1

    def apart(self, value: Tensor) -> Tensor:
        """A tensor of this shape, or a rank's share of it, with the stretches along an axis of their own."""
        shape, axis = value.shape, self.axis
        sizes = (self.stretches, shape[axis] // self.stretches)
        return value.view(*shape[:axis], *sizes, *shape[axis + 1 :]) if self.stretches > 1 else value

    @property
    def apart_axis(self) -> int:
        return self.axis + (self.stretches > 1)


Read = Callable[[str, Part, int], torch.nn.Parameter]
"""(name in the checkpoint, its part, rank) -> the rank's parameter."""


def parallelize(
    model: M,
    group: dist.ProcessGroup | None = None,
    plan: TreePlan | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    residual_dropout: float = 0.0,
) -> M:
    """The model, in place, on tbik operators; this rank keeps its shard of the weights. Returns `model`.

    group: the tensor-parallel group, None for one rank. All ranks pass the same model and make the same calls.
    plan: decides the bits; by default the one stored in the config (`tbik_plan`), else `default_plan(config)`, which
        does not depend on the group.
    compute_dtype: dtype of activations and products, by default that of the weights. bfloat16 with fp32 weights: master
        weights whose gradients leave in fp32 (S2). float32 with bf16 weights: LayerCast.
    residual_dropout: p of dropout on what attention and MLP add to the residual stream (R9). The config's
        attention_dropout is that of attention (K5). In training mode each call then takes
        dropout=ops.DropoutKey(seed, step, first_sample).
    Logits are fp32. Errors: PlanError. Bits: layout-invariant and batch-invariant.
    """
    family = _family(model)
    _refuse_changed(model, family)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        _require_parameter(name, parameter)
    _require_apart(parameters)
    if any(parameter.device.type == "meta" for parameter in parameters.values()):
        _refuse("the model's weights are on the meta device; tbik.load_checkpoint(folder) reads them, each its shard")
    found = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(found) > 1:
        _refuse(f"the model's weights are on {', '.join(found)}; move all of it to one device, model.to({found[0]!r})")

    def read(name: str, part: Part, rank: int) -> torch.nn.Parameter:
        whole = parameters[name]
        if tuple(whole.shape) != part.shape:
            _refuse(f"{name} has shape {list(whole.shape)}, the config says {list(part.shape)}")
        if part.held is None or len(part.held) == 1:
            return whole
        lo, hi = part.held[rank]
        share = part.apart(whole.detach()).narrow(part.apart_axis, lo, hi - lo)
        if part.stretches > 1:
            share = share.flatten(part.axis, part.apart_axis)
        return torch.nn.Parameter(share.contiguous().clone(), requires_grad=whole.requires_grad)

    _convert(model, family, group, plan, compute_dtype, read, residual_dropout)
    return model


def default_plan(config: Any) -> TreePlan:
    """The plan of a model whose maker named none: it serves as many of TP 1, 2, 3, 4, 8 as one L can.

    A function of the config alone, so that two runs agree whatever their layout. For other sizes or a wire dtype:
    TreePlan.for_model(config, tp_sizes).
    """
    stored = getattr(config, "tbik_plan", None)
    if stored:
        return TreePlan.from_key(stored)
    for sizes in DEFAULT_TP_SIZES[:-1]:
        try:
            return TreePlan.for_model(config, sizes)
        except PlanError:
            continue
    return TreePlan.for_model(config, DEFAULT_TP_SIZES[-1])


def load_checkpoint(
    folder: Path | str,
    group: dist.ProcessGroup | None = None,
    plan: TreePlan | None = None,
    *,
    dtype: torch.dtype | None = None,
    compute_dtype: torch.dtype | None = None,
) -> Any:
    """The parallelized model of a folder with config.json and *.safetensors; each rank reads its shard only.

    dtype: of the weights, that of the config by default; weights stored in another one are rounded once. The rest as
    in parallelize, whose bits these are. In eval mode, like from_pretrained. Errors: PlanError.
    """
    from tbik.decoder import Checkpoint

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        _refuse(f"expected a checkpoint folder, found no file {folder / 'config.json'}")
    fields = json.loads((folder / "config.json").read_text())
    architectures = fields.get("architectures") or [None]
    causal = {family.causal.__name__: family.causal for family in FAMILIES}.get(architectures[0])
    if causal is None or len(architectures) != 1:
        _refuse(f"{folder / 'config.json'}: architectures = {architectures}; supported: {SUPPORTED}")
    config = transformers.AutoConfig.from_pretrained(folder)
    stored = getattr(config, "dtype", None)
    wanted = dtype if dtype is not None else stored if isinstance(stored, torch.dtype) else torch.float32
    if wanted not in DTYPES:
        _refuse(f"dtype is bfloat16, float16 or float32, got {wanted}")
    with torch.device("meta"):
        model = causal(config)
    checkpoint = Checkpoint(folder, wanted)

    def read(name: str, part: Part, rank: int) -> torch.nn.Parameter:
        held = None if part.held is None else part.held[rank]
        if name.endswith(EXPERT_NAMES) and name not in checkpoint:
            return torch.nn.Parameter(_read_experts(checkpoint, name, part, held))
        if len(part.shape) == 3:
            value = part.apart(checkpoint.read(name, part.shape))
            value = value if held is None else value.narrow(part.apart_axis, held[0], held[1] - held[0])
            value = value.flatten(part.axis, part.apart_axis) if part.stretches > 1 else value
            return torch.nn.Parameter(value.contiguous())
        return torch.nn.Parameter(checkpoint.read(name, part.shape, held, part.axis))

    family = _family(model)
    _refuse_changed(model, family)
    with torch.no_grad():
        _convert(model, family, group, plan, compute_dtype, read)
    checkpoint.close(ignored=("lm_head.weight",) if config.tie_word_embeddings else ())
    model.config.dtype = wanted
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


EXPERT_NAMES = ("experts.gate_up_proj", "experts.down_proj")


def expert_tensors(name: str) -> tuple[str, ...]:
    """The names, {} for the expert, that files have for the matrices in a stack of experts, in order of its rows."""
    prefix, _, member = name.rpartition(".")
    members = ("gate", "up") if member == "gate_up_proj" else ("down",)
    return tuple(f"{prefix}.{{}}.{which}_proj.weight" for which in members)


def _read_experts(checkpoint: Any, name: str, part: Part, held: Run | None) -> Tensor:
    """A rank's share of a stack, expert by expert: files hold a matrix for each."""
    count, rows, columns = part.shape
    shape = (rows // part.stretches, columns)
    experts = [
        torch.cat([checkpoint.read(of.format(expert), shape, held, part.axis - 1) for of in expert_tensors(name)])
        for expert in range(count)
    ]
    return torch.stack(experts)


# --- refusals ---------------------------------------------------------------------------------------------------------


def _refuse(message: str) -> NoReturn:
    raise PlanError(f"parallelize: {message}")


def _family(model: Any) -> Family:
    if not isinstance(model, torch.nn.Module):
        _refuse(f"model is a Hugging Face model, got {type(model).__name__}")
    if isinstance(model, (CausalModel, DecoderModel)):
        _refuse("the model is parallelized already")
    for family in FAMILIES:
        if type(model) is family.causal:
            return family
    if type(model).__module__.split(".")[0] == "peft" or hasattr(model, "peft_config"):
        _refuse("the model has LoRA/PEFT adapters; merge them first (merge_and_unload())")
    _refuse(f"{type(model).__name__} is not a supported family; supported: {SUPPORTED}")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
          "_load_state_dict_pre_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks")  # fmt: skip


def _refuse_changed(model: Any, family: Family) -> None:
    """Everything between the stock model and what is found."""
    config = model.config
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        _refuse("the model has LoRA/PEFT adapters; merge them first (merge_and_unload())")
    if getattr(config, "quantization_config", None) or getattr(model, "is_quantized", False):
        _refuse("the model is quantised; load it in bfloat16, float16 or float32")
    if getattr(model, "_tp_size", None) not in (None, 1) or getattr(model, "_device_mesh", None) is not None:
        _refuse("the model is tensor-parallel already (tp_plan); load it without")
    spread = sorted({str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()})
    if len(spread) > 1 or "disk" in spread:  # of one device it leaves no hooks
        _refuse(
            f"the model is spread over devices (device_map: {', '.join(spread)}); load it without, or for one device"
        )
    expected = _expected_types(family)
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in expected:
            _refuse(
                f"{name} is a {kind.__module__}.{kind.__name__}, which is no part of {family.causal.__name__}: "
                "adapters (LoRA), quantised and parametrized layers are not supported; merge or remove them first"
            )
        for kind_of_hook in _HOOKS:
            if getattr(module, kind_of_hook, None):
                _refuse(f"{name or 'the model'} has hooks ({kind_of_hook}), which would not be called; remove them")
        if "forward" in vars(module) or hasattr(module, "_hf_hook"):
            _refuse(f"{name or 'the model'} has a forward of its own (a wrapper); remove it first")
    _refuse_config(config, family)


def _expected_types(family: Family) -> set[type]:
    activation = type(transformers.activations.ACT2FN[family.activation])
    return {*family[:8], *family.routed, torch.nn.Linear, torch.nn.ModuleList, activation}


def _refuse_config(config: Any, family: Family) -> None:
    capped = family is GEMMA2
    for name, supported in (
        ("hidden_activation" if family.gemma else "hidden_act", (family.activation, "swish")[: 1 + (not family.gemma)]),
        ("final_logit_softcapping", (config.final_logit_softcapping,) if capped else (None,)),
        ("attn_logit_softcapping", (config.attn_logit_softcapping,) if capped else (None,)),
        ("use_bidirectional_attention", (False, None)),
        ("pretraining_tp", (1, None)),
        ("output_router_logits", (False, None)),
    ):
        value = getattr(config, name, None)
        if value is not None and value not in supported:
            _refuse(f"{name} = {value!r} is not supported; expected {supported[0]!r}")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        _refuse(f"layer_types {sorted(kinds)} are not supported; expected full_attention or sliding_attention")


def _require_apart(parameters: dict[str, torch.nn.Parameter]) -> None:
    """No parameter at two places, whose gradients autograd would add in every micro-batch; tied embeddings know how."""
    first: dict[int, str] = {}
    for name, parameter in parameters.items():
        other = first.setdefault(id(parameter), name)
        if other != name and {other, name} != {"model.embed_tokens.weight", "lm_head.weight"}:
            _refuse(f"{other} and {name} are one parameter; only lm_head may share one, with the embedding")


def _require_parameter(name: str, parameter: Tensor) -> None:
    if type(parameter) is not torch.nn.Parameter:
        _refuse(f"{name} is a {type(parameter).__name__}, expected a plain parameter (no DTensor, no quantised tensor)")
    if parameter.dtype not in DTYPES:
        _refuse(f"{name} is {parameter.dtype}; expected bfloat16, float16 or float32")
    if parameter.device.type not in CPU_AND_CUDA:
        _refuse(f"{name} is on {parameter.device}; kernels exist for cpu and cuda, use model.cpu() or model.cuda()")
    if getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None):
        _refuse(f"{name} has gradient hooks, which would be lost; register them after parallelize")


# --- conversion -------------------------------------------------------------------------------------------------------


class _Builder:
    """Makes the modules of one model and notes where each parameter of the checkpoint went."""

    def __init__(self, setting: Setting, read: Read, biases: Callable[[str], bool], family: Family) -> None:
        self.family, self.gemma = family, family.gemma
        self.setting, self._read, self._has_bias = setting, read, biases
        self.parts: dict[str, Part] = {}
        shape, layout, plan = setting.shape, setting.layout, setting.plan
        dim = shape.head_dim

        def scaled(runs: Sequence[Run]) -> tuple[Run, ...]:
            return tuple((lo * dim, hi * dim) for lo, hi in runs)

        self.q_rows, self.kv_rows = scaled(layout.heads), scaled(layout.kv_heads)
        self.own_kv_rows = scaled(setting.heads.own_kv)
        mlp_cuts = plan.cuts(shape.intermediate)
        self.mlp_rows = tuple((mlp_cuts[lo], mlp_cuts[hi]) for lo, hi in layout.mlp)

    def take(self, name: str, part: Part) -> torch.nn.Parameter:
        self.parts[name] = part
        return self._read(name, part, self.setting.rank)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        weight = self.take(f"{name}.weight", Part(f"{name}.weight", (size,)))
        return RMSNorm(self.setting, weight, eps, self.gemma)

    def group(
        self,
        prefix: str,
        place: str,
        members: Sequence[tuple[str, Sequence[Run], Sequence[Run]]],
        runs: Sequence[Run],
        head_dim: int | None = None,
    ) -> ColumnParallelGroup:
        """members: name, rows each rank holds, rows each rank answers for."""
        weights, biases, lengths = [], [], []
        for name, held, counted in members:
            length = held[-1][1]
            source, target = f"{prefix}.{name}_proj", f"{prefix}.{place}"
            shape, runs_of = (length, self.setting.shape.hidden), (tuple(held), tuple(counted))
            weights.append(self.take(f"{source}.weight", Part(f"{target}.weight_{name}", shape, 0, *runs_of)))
            bias = None
            if self._has_bias(source):
                bias = self.take(f"{source}.bias", Part(f"{target}.bias_{name}", (length,), 0, *runs_of))
            biases.append(bias)
            lengths.append(length)
        return ColumnParallelGroup(
            weights,
            biases,
            out_features=lengths,
            plan=self.setting.plan,
            group=self.setting.group,
            runs=runs,
            held_rows=[list(held) for _, held, _ in members],
            head_dim=head_dim,
            names=[name for name, _, _ in members],
            compute_dtype=self.setting.compute_dtype,
        )

    def row(self, name: str, columns: Sequence[Run], runs: Sequence[Run], head_dim: int | None) -> RowParallelLinear:
        hidden, length = self.setting.shape.hidden, columns[-1][1]
        part = Part(f"{name}.weight", (hidden, length), 1, tuple(columns), tuple(columns))
        weight = self.take(f"{name}.weight", part)
        bias = self.take(f"{name}.bias", Part(f"{name}.bias", (hidden,))) if self._has_bias(name) else None
        return RowParallelLinear(
            weight,
            bias,
            in_features=length,
            plan=self.setting.plan,
            group=self.setting.group,
            runs=runs,
            head_dim=head_dim,
            compute_dtype=self.setting.compute_dtype,
        )

    def vocabulary(self, name: str) -> torch.nn.Parameter:
        rows = self.setting.vocabulary.bounds
        shape = (self.setting.shape.vocab, self.setting.shape.hidden)
        return self.take(name, Part(name, shape, 0, rows, rows))

    def routed(self, prefix: str, config: Any) -> RoutedExperts:
        shape, count, rows = self.setting.shape, config.num_experts, self.mlp_rows
        gate_up, down = (f"{prefix}.{name}" for name in EXPERT_NAMES)
        router = f"{prefix}.gate.weight"
        return RoutedExperts(
            self.take(router, Part(router, (count, shape.hidden))),
            self.take(gate_up, Part(gate_up, (count, 2 * shape.intermediate, shape.hidden), 1, rows, rows, 2)),
            self.take(down, Part(down, (count, shape.hidden, shape.intermediate), 2, rows, rows)),
            intermediate=shape.intermediate,
            slots=config.num_experts_per_tok,
            normalize=bool(config.norm_topk_prob),
            plan=self.setting.plan,
            group=self.setting.group,
            runs=self.setting.layout.mlp,
            compute_dtype=self.setting.compute_dtype,
        )

    def layer(self, prefix: str, old: Any, config: Any) -> DecoderLayer | SandwichLayer:
        setting, shape, layout = self.setting, self.setting.shape, self.setting.layout
        attention = old.self_attn
        eps, name = config.rms_norm_eps, f"{prefix}.self_attn"
        qkv = self.group(
            name,
            "qkv_proj",
            [
                ("q", self.q_rows, self.q_rows),
                ("k", self.kv_rows, self.own_kv_rows),
                ("v", self.kv_rows, self.own_kv_rows),
            ],
            layout.attention,
            shape.head_dim,
        )
        q_norm: torch.nn.Parameter | None = None
        k_norm: torch.nn.Parameter | None = None
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = (
                self.take(f"{name}.{n}_norm.weight", Part(f"{name}.{n}_norm", (shape.head_dim,))) for n in ("q", "k")
            )
        new_attention = Attention(
            setting,
            attention.layer_idx,
            qkv,
            self.row(f"{name}.o_proj", self.q_rows, layout.attention, shape.head_dim),
            HeadOptions(
                eps,
                attention.scaling,
                _window(attention, config),
                self.gemma,
                getattr(attention, "attn_logit_softcapping", None),
            ),
            q_norm,
            k_norm,
            rope_kind=attention.layer_type if self.family is GEMMA3 else "",
        )
        if self.family.routed:
            norms = [self.norm(f"{prefix}.{n}_layernorm", shape.hidden, eps) for n in ("input", "post_attention")]
            return DecoderLayer(new_attention, self.routed(f"{prefix}.mlp", config), *norms)
        gate_up = self.group(
            f"{prefix}.mlp", "gate_up_proj", [(n, self.mlp_rows, self.mlp_rows) for n in ("gate", "up")], layout.mlp
        )
        gated = ops.gelu_and_mul if self.gemma else ops.silu_and_mul
        mlp = MLP(gate_up, self.row(f"{prefix}.mlp.down_proj", self.mlp_rows, layout.mlp, None), gated)
        if self.gemma:
            places = ("input", "post_attention", "pre_feedforward", "post_feedforward")
            gemma_norms = [self.norm(f"{prefix}.{place}_layernorm", shape.hidden, eps) for place in places]
            return SandwichLayer(new_attention, mlp, *gemma_norms)
        return DecoderLayer(
            new_attention,
            mlp,
            self.norm(f"{prefix}.input_layernorm", shape.hidden, eps),
            self.norm(f"{prefix}.post_attention_layernorm", shape.hidden, eps),
        )


def _window(attention: Any, config: Any) -> int | None:
    window = attention.sliding_window if hasattr(attention, "sliding_window") else None
    if isinstance(attention, mistral.MistralAttention):
        window = config.sliding_window
    return None if window is None else int(window)


def _convert(
    model: Any,
    family: Family,
    group: dist.ProcessGroup | None,
    plan: TreePlan | None,
    compute_dtype: torch.dtype | None,
    read: Read,
    residual_dropout: float = 0.0,
) -> None:
    config = model.config
    attention_dropout = getattr(config, "attention_dropout", None) or 0.0
    for what, p in (("config.attention_dropout", attention_dropout), ("residual_dropout", residual_dropout)):
        if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p < 1:
            _refuse(f"{what} is a number within [0, 1), got {p!r}")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        _refuse(f"group is a ProcessGroup this rank belongs to, or None for one rank, got {group!r}")
    if compute_dtype not in (None, *DTYPES):
        _refuse(f"compute_dtype is bfloat16, float16 or float32, got {compute_dtype!r}")
    if plan is not None and not isinstance(plan, TreePlan):
        _refuse(f"plan is a tbik.TreePlan, got {type(plan).__name__}")
    plan = default_plan(config) if plan is None else plan
    if plan.acc_dtype != "float32":
        _refuse(f"a whole model accumulates in float32, the plan says {plan.acc_dtype}")
    shape = ModelShape.from_config(config)
    size = 1 if group is None else group.size()
    try:
        layout = plan.layout(shape, size)
    except PlanError as error:
        _refuse(f"{plan.leaves} leaves do not serve TP={size}: {error}; TreePlan.for_model(config, tp_sizes) finds L")
    fields = config.to_dict()
    frequencies = (
        {"": ops.inverse_frequencies(fields)}
        if family is not GEMMA3
        else {
            kind: ops.inverse_frequencies({**fields, "rope_parameters": fields["rope_parameters"][kind]})
            for kind in sorted(set(config.layer_types))
        }
    )
    if len(model.model.layers) != config.num_hidden_layers:
        _refuse(f"the model has {len(model.model.layers)} layers, the config says {config.num_hidden_layers}")
    tied = bool(config.tie_word_embeddings)
    if not tied and model.lm_head.weight is model.model.embed_tokens.weight:
        _refuse("lm_head and the embedding share a weight, but the config says tie_word_embeddings=False")
    if tied and model.lm_head.weight is not model.model.embed_tokens.weight and not model.lm_head.weight.is_meta:
        _refuse("the config says tie_word_embeddings=True, but lm_head has a weight of its own; model.tie_weights()")
    setting = Setting(
        shape, plan, layout, group, compute_dtype, frequencies, float(attention_dropout), float(residual_dropout)
    )
    present = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    build = _Builder(setting, read, lambda name: f"{name}.bias" in present, family)
    new_layers = [build.layer(f"model.layers.{index}", layer, config) for index, layer in enumerate(model.model.layers)]
    norm = build.norm("model.norm", shape.hidden, config.rms_norm_eps)
    scale = float(model.model.embed_tokens.scalar_embed_scale) if family.gemma else None
    cap = config.final_logit_softcapping if family is GEMMA2 else None
    embedding = VocabEmbedding(setting, build.vocabulary("model.embed_tokens.weight"), config.pad_token_id, tied, scale)
    if tied:
        head = VocabHead(setting, embedding.weight, tied, cap)
        build.parts["lm_head.weight"] = build.parts["model.embed_tokens.weight"]
    else:
        head = VocabHead(setting, build.vocabulary("lm_head.weight"), softcap=cap)
    unplaced = sorted(present - set(build.parts))
    if unplaced:
        _refuse(f"the model has parameters that {family.causal.__name__} does not have: {unplaced[:6]}")
    # from here on nothing is refused
    for new, old in zip(new_layers, model.model.layers, strict=True):
        _keep_checkpointing(new, old)
        new.train(old.training)
    model.model.layers = torch.nn.ModuleList(new_layers)
    model.model.embed_tokens, model.model.norm, model.lm_head = embedding, norm, head
    for name in ("embed_tokens", "norm"):
        getattr(model.model, name).train(model.training)
    head.train(model.training)
    del model.model.rotary_emb
    model.model.setting = model.setting = setting
    model.tbik_parts = build.parts
    model.model.__class__ = _derived(DecoderModel, family.base)
    model.__class__ = _derived(CausalModel, family.causal)
    # a copy: the plan is this model's, and other models may hold the same config
    model.config = model.model.config = copy.deepcopy(config)
    model.config.tbik_plan = plan.key()


def _keep_checkpointing(new: DecoderLayer | SandwichLayer, old: Any) -> None:
    new.gradient_checkpointing = old.gradient_checkpointing
    if hasattr(old, "_gradient_checkpointing_func"):
        new._gradient_checkpointing_func = old._gradient_checkpointing_func


@lru_cache(maxsize=64)
def _derived(mixin: type, stock: type) -> type:
    """The stock class with the mixin's forward; it keeps its name, which is what checkpoints say."""
    return type(stock.__name__, (mixin, stock), {"__module__": __name__, "__doc__": mixin.__doc__})


def __getattr__(name: str) -> type:
    """The classes of parallelized models, for pickle, which finds classes by name."""
    for family in FAMILIES:
        for mixin, stock in ((CausalModel, family.causal), (DecoderModel, family.base)):
            if stock.__name__ == name:
                return _derived(mixin, stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
