"""tbik.rl: the trainer under FSDP2 computes the bits of the sampler at TP=4, and a loop of stock parts does not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tbik import engines, models, report, rl
from tbik.errors import PlanError

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96, "num_hidden_layers": 1}
    return models.random_model("qwen3", tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=True, **sizes)


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    job = rl.make_job(folder, steps=2, prompts=2, new_tokens=5)
    said = []
    outcome = rl.run(job, progress=lambda text, n: said.append(n))
    assert sum(said) == 4
    return outcome


def test_verify_the_trainer_has_the_samplers_bits_in_every_step(result: dict[str, Any]) -> None:
    assert result["claim"], result["reasons"]
    for row in result["steps"]["tbik"]:
        assert row["tokens"] == 16 * 5 and row["differing_bit_patterns"] == 0 and row["kl"] == 0
        assert row["trainer_weights"] == row["sampler_weights"]
    first = result["steps"]["stock"][0]
    assert first["differing_bit_patterns"] > 0 and first["kl"] > 0, "the control"
    assert len({row["trainer_weights"] for row in result["steps"]["tbik"]}) == 2, "each step changes the weights"
    assert len(result["environment"]["commit"].removesuffix("+")) == 40


def test_verify_report_of_the_loop(result: dict[str, Any]) -> None:
    page = report.build(json.loads(json.dumps(result)))
    assert page.count("<svg") == 3 and result["steps"]["tbik"][0]["trainer_weights"] in page
    assert report.headline(result).startswith("tbik: 0 of 160 log-probabilities differ; stock: ")


@pytest.mark.parametrize("broken", ["bits", "weights", "still", "control"])
def test_verify_judge_finds(broken: str, result: dict[str, Any]) -> None:
    rows = copy.deepcopy(result["steps"])
    assert rl.judge(rows) == []
    if broken == "bits":
        rows["tbik"][1]["differing_bit_patterns"] = 1
    if broken == "weights":
        rows["tbik"][1]["sampler_weights"] = "other"
    if broken == "still":
        for row in rows["tbik"]:
            row["trainer_weights"] = row["sampler_weights"] = "same"
    if broken == "control":
        rows["stock"][0]["differing_bit_patterns"] = 0
    named = {"bits": "1 of 80", "weights": "not the trainer's", "still": "as they were", "control": "could not have"}
    assert named[broken] in "; ".join(rl.judge(rows))


def test_verify_rewards_and_advantages() -> None:
    assert rl.reward([0, 10, 23, 24], 96) == 0.75
    gains = rl.advantages([0.0, 1.0, 1.0, 0.0])
    assert gains[0] == gains[3] == -gains[1] and sum(gains) == 0
    assert rl.advantages([0.5, 0.5]) == [0.0, 0.0]


def test_verify_jobs_that_cannot_run_are_refused(folder: Path) -> None:
    with pytest.raises(PlanError, match="--steps"):
        rl.make_job(folder, steps=0)
    with pytest.raises(PlanError, match="micro-batches"):
        rl.make_job(folder, prompts=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_verify_vllm_holds_what_the_trainer_published(tmp_path: Path) -> None:
    """Real engines at TP=2 as samplers: the trainer's bits, and its weights after each reload."""
    try:
        engines.interpreter("vllm")
    except PlanError as error:
        pytest.skip(str(error))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 2}
    folder = models.random_model("qwen3", tmp_path, tie_word_embeddings=True, **sizes)
    result = rl.run(rl.make_job(folder, steps=2, prompts=2, new_tokens=5, tp=2, engine="vllm"))
    assert result["claim"], result["reasons"]
    for row in result["steps"]["tbik"]:
        assert row["differing_bit_patterns"] == 0 and row["trainer_weights"] == row["sampler_weights"]
    assert result["steps"]["stock"][0]["differing_bit_patterns"] > 0, "the control"
