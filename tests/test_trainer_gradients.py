"""tbik.trainer_gradients: one digest of a step's gradients over TP and micro-batches; what makes the claim false."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tbik import models, trainer_gradients
from tbik.errors import PlanError
from tbik.verify import Options, make_job, run
from tbik.verify_job import Job

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = models.random_model("qwen3", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1, vocab_size=256)
    return make_job(folder, tp_sizes=[1, 2, 3], batch_sizes=[1, 3, 8], new_tokens=1, gradients=True)[0]


@pytest.fixture(scope="module")
def result(job: Job) -> dict[str, Any]:
    return run(job)


@pytest.mark.long
def test_verify_gradients_have_one_digest_and_stock_several(result: dict[str, Any]) -> None:
    gradients = json.loads(json.dumps(result))["gradients"]
    assert gradients["samples"] == 8 and gradients["unique"]["tbik"] == 1 and gradients["unique"]["stock"] > 1
    assert result["claim"], result["reasons"]
    records = [r for r in gradients["records"] if r["mode"] == "tbik"]
    assert [(r["tp"], r["micro_steps"], r["samples_per_micro_step"]) for r in records] == [
        (tp, 8 // m, m) for tp in (1, 2, 3) for m in (1, 2, 8)
    ]
    assert all(r["ranks_agree"] for r in records)
    assert {r["tp"] for r in gradients["records"] if r["mode"] == "stock"} == {1}


def test_verify_report_shows_gradients(result: dict[str, Any]) -> None:
    from tbik import report

    page = report.build(result)
    assert result["gradients"]["records"][0]["gradients"] in page and "--gradients" in report.command(result)


@pytest.mark.parametrize("broken", ["digest", "rank", "control"])
def test_verify_judge_finds(job: Job, result: dict[str, Any], broken: str) -> None:
    good = {"gradients": "a", "loss": "b"}
    found = {
        c: {rank: {**good, "loss": f"{c.batch}"} if c.mode == "stock" else dict(good) for rank in range(c.tp)}
        for c in trainer_gradients.configurations_of(job)
    }
    assert not trainer_gradients.reasons_against(trainer_gradients.judge(job, found))
    wrong = copy.deepcopy(found)
    for configuration, ranks in wrong.items():
        if broken == "digest" and configuration[:2] == ("tbik", 2):
            ranks.update({rank: {**good, "gradients": "other"} for rank in ranks})
        if broken == "rank" and configuration[:2] == ("tbik", 3):
            ranks[2]["loss"] = "other"
        if broken == "control" and configuration.mode == "stock":
            ranks[0]["loss"] = "one"
    reasons = {"digest": "unique digests", "rank": "ranks disagree", "control": "could not have found"}
    (reason,) = trainer_gradients.reasons_against(trainer_gradients.judge(job, wrong))
    assert reasons[broken] in reason


def test_verify_engines_have_no_gradients(tmp_path: Path) -> None:
    folder = models.random_model("qwen3", tmp_path, num_hidden_layers=1, vocab_size=256)
    with pytest.raises(PlanError, match="an engine has none"):
        make_job(folder, tp_sizes=[1], batch_sizes=[1], gradients=True, engine=Options("vllm"))
    assert trainer_gradients.micro_samples(7) == 4 and trainer_gradients.micro_samples(8) == 8
