"""tbik.decoder: bits that ignore the batch, the chunking and the world size; values that transformers agrees with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from safetensors.torch import load_file, save_file
from spawn import Pool

from tbik import models
from tbik.decoder import Decoder, DecoderConfig, greedy, inverse_frequencies
from tbik.errors import IntegrityError, PlanError
from tbik.plan import TreePlan

SIZES = {
    "llama": {"hidden_size": 144, "intermediate_size": 288, "num_hidden_layers": 2, "num_attention_heads": 9,
              "num_key_value_heads": 3, "head_dim": 16, "vocab_size": 330},
    "qwen2": {"hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 6,
              "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 257},
    "qwen3": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
              "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True},
}  # fmt: skip
WORLDS = {"llama": (1, 2, 3), "qwen2": (1, 2, 3), "qwen3": (1, 2, 4, 8)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("checkpoints")
    return {kind: models.random_model(kind, base / kind, dtype="float32", **sizes) for kind, sizes in SIZES.items()}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(8) as pool:
        yield pool


def tokens(*lengths: int, vocab: int = 250) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def plan_of(kind: str, folder: Path) -> TreePlan:
    return TreePlan.for_model(folder, WORLDS[kind])


def make(kind: str, folders: dict[str, Path], dtype: str = "bfloat16", mode: Any = "tbik") -> Decoder:
    return Decoder(folders[kind], plan=plan_of(kind, folders[kind]), dtype=dtype, mode=mode)


# --- batch invariance -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, "bfloat16") for kind in SIZES), ("llama", "float32"), ("qwen2", "float16")]
)
def test_verify_prefill_equals_decode(kind: str, dtype: str, folders: dict[str, Path]) -> None:
    """One call, chunks of 64 + 1 + 5, and one token at a time: the same logits at every position."""
    decoder = make(kind, folders, dtype)
    (prompt,) = tokens(70)
    whole = decoder.forward([(decoder.new_cache(), prompt)], every_position=True)
    for cuts in ([0, 64, 65, 70], [0, 3, 70], list(range(71))):
        cache = decoder.new_cache()
        parts = [decoder.forward([(cache, prompt[lo:hi])], every_position=True) for lo, hi in itertools.pairwise(cuts)]
        assert_bitwise_equal(torch.cat(parts), whole, f"{kind} in chunks {cuts[:5]}")


@pytest.mark.parametrize("kind", SIZES)
def test_verify_sequence_ignores_its_companions(kind: str, folders: dict[str, Path]) -> None:
    """Alone, first, last, beside longer and shorter ones, some of them in the middle of decoding."""
    decoder = make(kind, folders)
    prompt, *others = tokens(20, 90, 3, 64, 1, 33)
    alone = [row.clone() for _, logits in greedy(decoder, [prompt], 4) for row in logits]
    for batch, index in (([prompt, *others], 0), ([*others, prompt], 5), ([others[0], prompt, others[1]], 1)):
        together = [logits[index] for _, logits in greedy(decoder, batch, 4)]
        assert_bitwise_equal(torch.stack(together), torch.stack(alone), f"{kind}, batch of {len(batch)}")
    early = decoder.new_cache()
    decoder.forward([(early, others[0])])
    cache = decoder.new_cache()
    joined = decoder.forward([(early, [7]), (cache, prompt), (decoder.new_cache(), others[2])])[1]
    assert_bitwise_equal(joined, alone[0], f"{kind} joins a running batch")


def test_verify_stock_layers_do_depend_on_the_batch_or_world(folders: dict[str, Path], pool: Pool) -> None:
    """The negative control: with torch's linear and all-reduce, some configuration has other bits."""
    plan = plan_of("llama", folders["llama"])
    runs = [pool.run(_logits, world, folders["llama"], plan, "bfloat16", "stock")[0] for world in WORLDS["llama"]]
    assert_bits_differ(runs[0], runs[2], "stock at TP=1 and TP=3")


# --- layout invariance ------------------------------------------------------------------------------------------------


def _logits(group: dist.ProcessGroup, folder: Path, plan: TreePlan, dtype: str, mode: Any) -> torch.Tensor:
    """Prefill of three sequences, then three greedy steps: fp32 logits [steps, 3, V]."""
    decoder = Decoder(folder, plan=plan, group=group if group.size() > 1 else None, dtype=dtype, mode=mode)
    return torch.stack([logits for _, logits in greedy(decoder, tokens(20, 3, 66), 3)])


@pytest.mark.multiprocess
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", SIZES)
def test_verify_tensor_parallel_worlds(kind: str, dtype: str, folders: dict[str, Path], pool: Pool) -> None:
    plan = plan_of(kind, folders[kind])
    expected = None
    for world in WORLDS[kind]:
        results = pool.run(_logits, world, folders[kind], plan, dtype, "tbik")
        expected = results[0] if expected is None else expected
        for rank, actual in enumerate(results):
            assert_bitwise_equal(actual, expected, f"{kind} {dtype}, TP={world}, rank {rank}")


@pytest.mark.multiprocess
def test_verify_wire_dtype_at_every_world(folders: dict[str, Path], pool: Pool) -> None:
    """A bf16 wire has its own bits, and the same ones at every world size."""
    plan = TreePlan.for_model(folders["llama"], WORLDS["llama"], wire_dtype="bfloat16")
    runs = [pool.run(_logits, world, folders["llama"], plan, "bfloat16", "tbik")[0] for world in WORLDS["llama"]]
    for world, actual in zip(WORLDS["llama"], runs, strict=True):
        assert_bitwise_equal(actual, runs[0], f"bf16 wire, TP={world}")


def _embedding_rows(group: dist.ProcessGroup, folder: Path, plan: TreePlan) -> torch.Tensor:
    decoder = Decoder(folder, plan=plan, group=group, dtype="float32")
    return decoder._embed(torch.arange(decoder.config.shape.vocab))


@pytest.mark.multiprocess
def test_verify_embedding_of_absent_rows(folders: dict[str, Path], pool: Pool, tmp_path: Path) -> None:
    """Ranks without the row contribute -0.0, so that a row keeps every bit, -0.0 included."""
    tensors = load_file(folders["llama"] / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    table[::7] = -0.0
    table[3::7] = 0.0
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    plan = plan_of("llama", folders["llama"])
    for rank, rows in enumerate(pool.run(_embedding_rows, 3, tmp_path, plan)):
        assert_bitwise_equal(rows, table, f"embedding on rank {rank}")


def _shard_bytes(group: dist.ProcessGroup, folder: Path, plan: TreePlan) -> dict[str, tuple[tuple[int, int], int]]:
    return Decoder(folder, plan=plan, group=group, dtype="bfloat16").loaded_bytes


@pytest.mark.multiprocess
def test_verify_each_rank_reads_its_shard_only(folders: dict[str, Path], pool: Pool) -> None:
    plan = plan_of("llama", folders["llama"])
    by_rank = pool.run(_shard_bytes, 3, folders["llama"], plan)
    config = json.loads((folders["llama"] / "config.json").read_text())
    for name, shape in models.parameter_shapes(config, biased=False, normed=False):
        total = 2 * torch.Size(shape).numel()
        expected = total * 3 if "norm" in name else total
        assert sum(loaded[name][1] for loaded in by_rank) == expected, name


# --- agreement with others --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["tbik", "stock"])
@pytest.mark.parametrize("kind", [*SIZES, "llama3-rope"])
def test_corroborate_transformers(kind: str, mode: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    """fp32 logits within 2e-4 of transformers' own forward, at every position."""
    transformers = pytest.importorskip("transformers")
    folder = folders.get(kind) or models.random_model("llama", tmp_path, dtype="float32", **SIZES["llama"], **LLAMA3)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    decoder = Decoder(folder, plan=TreePlan.for_model(folder, [1]), dtype="float32", mode=mode)
    for prompt in tokens(5, 90):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        actual = decoder.forward([(decoder.new_cache(), prompt)], every_position=True)
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


LLAMA3: dict[str, Any] = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def test_corroborate_llama3_frequencies(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = models.random_model("llama", tmp_path, **{**SIZES["llama"], "head_dim": 64}, **LLAMA3)
    config = transformers.AutoConfig.from_pretrained(folder)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    actual = torch.tensor(inverse_frequencies(DecoderConfig.from_folder(folder)), dtype=torch.float32)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


def test_validate_bf16_is_near_fp32(folders: dict[str, Path]) -> None:
    (prompt,) = tokens(40)
    narrow, wide = (
        decoder.forward([(decoder.new_cache(), prompt)], every_position=True)
        for decoder in (make("qwen3", folders, "bfloat16"), make("qwen3", folders, "float32"))
    )
    assert (narrow - wide).abs().max() < 0.03 * wide.abs().max()


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_experts": 8}, "num_experts"),
        ({"sliding_window": 128, "use_sliding_window": True}, "sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"num_attention_heads": 7}, "kv_heads"),
    ],
)
def test_verify_unsupported_configurations_are_refused(
    changes: dict[str, Any], named: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["llama"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(PlanError, match=named):
        Decoder(tmp_path, plan=TreePlan())


@pytest.mark.parametrize("changes", ["missing", "unknown", "shape", "dtype"])
def test_verify_wrong_tensors_are_refused(changes: str, folders: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(folders["llama"] / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if changes == "missing":
        del tensors[name]
    if changes == "unknown":
        name = "model.layers.0.self_attn.q_proj.bias"
        tensors[name] = torch.zeros(144)
    if changes == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    if changes == "dtype":
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders["llama"] / "config.json").read_text())
    with pytest.raises(PlanError, match=name):
        make("llama", {"llama": tmp_path})


def test_verify_wrong_calls_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    plan = plan_of("llama", folders["llama"])
    with pytest.raises(PlanError, match="mode"):
        Decoder(folders["llama"], plan=plan, mode="other")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="dtype"):
        Decoder(folders["llama"], plan=plan, dtype="float64")
    with pytest.raises(PlanError, match="no file"):
        Decoder(tmp_path, plan=plan)
    decoder = make("llama", folders)
    cache = decoder.new_cache()
    calls: Sequence[tuple[list[Any], str]] = [
        ([], "at least one token"),
        ([(cache, [])], "at least one token"),
        ([(cache, [1]), (cache, [2])], "once per call"),
        ([(cache, [330])], "vocabulary"),
        ([(cache, [0] * 2049)], "positions"),
    ]
    for chunks, named in calls:
        with pytest.raises(PlanError, match=named):
            decoder.forward(chunks)


def test_verify_greedy_takes_the_lowest_of_equal_tokens_and_refuses_nan(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make("llama", folders)
    logits = torch.zeros(1, 330)
    logits[0, [17, 200, 329]] = 5.0
    monkeypatch.setattr(decoder, "forward", lambda chunks: logits)
    assert next(greedy(decoder, [[1]], 1))[0] == [17]
    logits[0, 3] = float("nan")
    with pytest.raises(IntegrityError, match="NaN"):
        next(greedy(decoder, [[1]], 1))
