"""tbik.verify_train: one digest over layouts and restarts, what makes the claim false, what is refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tbik import models, report
from tbik.errors import PlanError
from tbik.verify_train import Layout, configurations, documents, judge, make_job, run

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96, "num_hidden_layers": 1}
    return models.random_model("qwen3", path, tie_word_embeddings=True, **sizes)


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    """Two layouts and their stock runs; each layout killed after step 2 and resumed on the other."""
    job = make_job(folder, ["single", "fsdp2:m2"], steps=3, samples_per_step=8, kill_after=2, dropout=0.1)
    steps = []
    outcome = run(job, progress=lambda text, n: steps.append(n))
    assert sum(steps) == 4 * 3 + 2 * (3 + 1)
    return outcome


def test_verify_one_digest_over_layouts_and_restarts(result: dict[str, Any]) -> None:
    assert result["claim"], result["reasons"]
    assert result["unique"]["tbik"] == 1 and result["unique"]["stock"] > 1
    tbik = [r for r in result["records"] if r["mode"] == "tbik"]
    resumed = [(r["resumed_from"], r["layout"]) for r in tbik if r["resumed_from"]]
    assert resumed == [("single", "fsdp2:m2"), ("fsdp2:m2", "single")]
    assert len({tuple(r["digests"]) for r in tbik}) == 1, "every step has one digest, not the last one alone"
    assert len({tuple(r["losses"]) for r in tbik}) == len({tuple(r["grad_norms"]) for r in tbik}) == 1
    assert result["max_abs_dloss"]["tbik"] == 0 < result["max_abs_dloss"]["stock"]


def test_verify_the_result_is_plain_json_with_the_keys_of_verify(result: dict[str, Any]) -> None:
    again = json.loads(json.dumps(result))
    keys = {"claim", "reasons", "configurations", "unique", "per_rank", "plan", "job", "records", "environment"}
    assert keys <= set(again) and again["configurations"] == 4
    assert again["plan"]["fingerprint"] and again["records"][0]["optimizer"] == "AdamW, loop"
    assert re.fullmatch(r"[0-9a-f]{40}\+?", again["environment"]["commit"]), "the tests run in a checkout"
    assert report.headline(again) == "tbik: 1 unique digest of 4; stock: 2 unique digests of 2"
    page = report.build(again)
    assert "fsdp2:m2, killed, then single" in page and "<svg" in page and again["plan"]["fingerprint"] in page


def test_verify_ranks_hold_their_share_only(result: dict[str, Any]) -> None:
    whole = result["per_rank"]["single"]["parameter_bytes"][0]
    held = result["per_rank"]["fsdp2:m2"]["parameter_bytes"]
    assert len(held) == 2 and sum(held) == whole and max(held) < 0.55 * whole


@pytest.mark.parametrize("broken", ["digest", "still", "ranks", "bytes", "loss", "control"])
def test_verify_judge_finds(broken: str, result: dict[str, Any], folder: Path) -> None:
    job = make_job(folder, ["single", "fsdp2:m2"], steps=3, samples_per_step=8)
    records = copy.deepcopy(result["records"][:4])
    assert [r["mode"] for r in records] == ["tbik", "tbik", "stock", "stock"] and judge(job, records)["claim"]
    if broken == "digest":
        records[1]["digest"] = records[1]["digests"][-1] = "other"
    if broken == "still":
        for record in records[:2]:
            record["digests"][1] = record["digests"][0]
    if broken == "ranks":
        records[1]["ranks_agree"] = False
    if broken == "bytes":
        records[1]["parameter_bytes"][0] *= 2
    if broken == "loss":
        records[0]["losses"] = records[0]["losses"][::-1]
    if broken == "control":
        records[3]["digest"] = records[2]["digest"]
    named = {
        "digest": "2 unique weights", "still": "left the weights", "ranks": "disagree", "bytes": "not really sharded",
        "loss": "did not fall", "control": "could not have found",
    }  # fmt: skip
    outcome = judge(job, records)
    assert not outcome["claim"] and named[broken] in "; ".join(outcome["reasons"])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("single", ("single", 1, 1, 1, 8, "gloo")),
        ("tp4", ("single", 1, 1, 4, 8, "gloo")),
        ("fsdp3", ("fsdp2", 1, 3, 1, 8, "gloo")),
        ("fsdp4xtp2:m2", ("fsdp2", 1, 4, 2, 2, "gloo")),
        ("hsdp2x3", ("fsdp2", 2, 3, 1, 4, "gloo")),
        ("flat2@tbik", ("fsdp1", 1, 2, 1, 4, "tbik")),
        ("ddp4:m1@gloo", ("ddp", 4, 1, 1, 1, "gloo")),
    ],
)
def test_verify_layouts_are_read(name: str, expected: tuple[Any, ...]) -> None:
    layout = Layout.parse(name, 24)
    found = (layout.strategy, layout.replicas, layout.shards, layout.tp, layout.micro_samples, layout.backend)
    assert found == expected
    assert layout.data_ranks * layout.tp == layout.world_size


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"layouts": ["fsdp"]}, "expected single, tpN"),
        ({"layouts": [""]}, "expected single, tpN"),
        ({"layouts": ["fsdp5"]}, "5 data ranks do not divide 24"),
        ({"layouts": ["fsdp2:m8"]}, "m that work: 1, 2, 4"),
        ({"layouts": ["ddp2xtp2"]}, "goes with fsdpN"),
        ({"layouts": ["fsdp0"]}, "at least one rank"),
        ({"layouts": ["tp16"]}, "TP=16"),
        ({"layouts": ["single", "single"]}, "distinct"),
        ({"layouts": ["flat2"], "kill_after": 1}, "FSDP1 has no checkpoint"),
        ({"kill_after": 2}, "--kill-after"),
        ({"control": ["fsdp2"]}, "--control"),
        ({"dropout": 1.0}, "--dropout"),
        ({"steps": 0}, "--steps"),
        ({"modes": ["fast"]}, "--layers"),
        ({"dtype": "float16"}, "--dtype"),
    ],
)
def test_verify_wrong_jobs_are_refused(arguments: dict[str, Any], named: str, folder: Path) -> None:
    with pytest.raises(PlanError, match=named):
        make_job(folder, **{"layouts": ["single"], "steps": 2, **arguments})


def test_verify_the_samples_are_ragged_and_stock_has_no_tensor_parallel_layout(folder: Path) -> None:
    job = make_job(folder, ["single", "fsdp1xtp2"], steps=2)
    lengths = {len(document) for document in documents(job)}
    assert len(lengths) > 20 and min(lengths) >= 2
    assert [str(c) for c in configurations(job)] == ["tbik: single", "tbik: fsdp1xtp2", "stock: single"]
