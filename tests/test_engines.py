"""tbik.engines, and tbik.verify with an engine: deadlines, no orphans, one plan; a made-up product answers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tbik import engines, models, report
from tbik.engines import EngineProcess, EngineSettings, Product, interpreter
from tbik.errors import IntegrityError, PlanError, TransportError, TransportTimeout
from tbik.plan import TreePlan
from tbik.verify import Options, make_job, run

pytestmark = pytest.mark.multiprocess
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.random_model("qwen3", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=1, vocab_size=512)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.PRODUCTS, "fake", Product("fake_engine", "json", ".none", "nothing", "FAKE_PYTHON"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FAKE_PYTHON", sys.executable)


def settings(folder: Path, **changes: Any) -> EngineSettings:
    return EngineSettings(
        **{"product": "fake", "folder": str(folder), "tp": 2, "mode": "tbik", "plan": TreePlan(), **changes}
    )


# --- the process ------------------------------------------------------------------------------------------------------


def test_verify_engine_answers_and_is_gone_afterwards(folder: Path) -> None:
    with EngineProcess(settings(folder)) as engine:
        answers, seconds = engine.generate([[1, 2], [3]], new_tokens=3)
        assert [a.tokens for a in answers] == [[3, 4, 5], [3, 4, 5]] and seconds == 0.5
        assert engine.call("name", 1) == ["name", "name"]
        assert [r["rank"] for r in engine.report()] == [0, 1]
        pids = [engine.pid, child_of(engine)]
        assert all(alive(pid) for pid in pids)
    assert_gone(pids)


@pytest.mark.parametrize(
    ("behaviour", "kind", "named"),
    [
        ("exits", TransportError, "exited with code 3\nSomeError: the reason"),
        ("refuses", PlanError, "unsupported"),
        ("refuses in a child", PlanError, "model.layers.0.mlp: unsupported"),
        ("silent", TransportTimeout, "no word for 2 s"),
        ("dies", TransportError, "killed by SIGKILL"),
    ],
)
def test_verify_engine_that_fails_is_named_and_leaves_no_orphans(
    behaviour: str, kind: type[Exception], named: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", behaviour)
    pids: list[int] = []
    original = EngineProcess.close

    def close(self: EngineProcess) -> None:
        if self._process is not None:
            pids.extend([self._process.pid, *([child_of(self)] if "child" in self.log() else [])])
        original(self)

    monkeypatch.setattr(EngineProcess, "close", close)
    start_s = 2.0 if behaviour == "silent" else 60.0
    with pytest.raises(kind, match=re.escape(named)), EngineProcess(settings(folder), start_s=start_s) as engine:
        engine.generate([[1]], new_tokens=1)
    assert len(pids) == 2
    assert_gone(pids)


def test_verify_engine_dies_with_its_parent(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\nfrom tbik import engines, TreePlan\n"
        "engines.PRODUCTS['fake'] = engines.Product('fake_engine', 'json', '', '', 'FAKE_PYTHON')\n"
        f"engine = engines.EngineProcess(engines.EngineSettings('fake', {str(folder)!r}, 1, 'tbik', TreePlan()))\n"
        "print(engine.pid, engine.log().split()[1], flush=True)\ntime.sleep(60)\n"
    )
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert_gone(pids)


def test_verify_engine_interpreter_is_found_or_the_way_to_it_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert interpreter("fake") == sys.executable
    monkeypatch.setenv("FAKE_PYTHON", str(tmp_path / "none"))
    with pytest.raises(PlanError, match="FAKE_PYTHON"):
        interpreter("fake")
    monkeypatch.delenv("FAKE_PYTHON")
    assert interpreter("fake") == sys.executable  # this one has json
    monkeypatch.setitem(
        engines.PRODUCTS, "fake", Product("m", "no_such_package", ".no-venv", "make nothing", "FAKE_PYTHON")
    )
    with pytest.raises(PlanError, match="make nothing"):
        interpreter("fake")
    with pytest.raises(PlanError, match="expected one of vllm"):
        interpreter("other")


# --- verify -----------------------------------------------------------------------------------------------------------


def job_of(folder: Path, **changes: Any) -> Any:
    arguments = {"tp_sizes": [1, 2], "batch_sizes": [1, 3], "new_tokens": 4, "engine": Options("fake"), **changes}
    return make_job(folder, **arguments)[0]


def test_verify_engine_one_output_with_its_switch_on_and_several_without(folder: Path) -> None:
    result = json.loads(json.dumps(run(job_of(folder))))
    assert result["claim"], result["reasons"]
    assert result["unique"] == {"tbik": 1, "stock": 4} and result["configurations"] == 4
    assert result["max_abs_dlogprob"]["tbik"] == 0 < result["max_abs_dlogprob"]["stock"] < 1e-3
    assert result["per_rank"]["by_tp"]["2"]["bytes_sent"] == [10, 10]
    assert result["environment"]["engine"] == "fake 1.0"
    record = result["records"][0]
    assert len(record["answer_digests"]) == 3 and record["tokens"] and record["cached_tokens"] == 0
    page = report.build(result)
    assert "fake 1.0 served" in page and "--engine fake" in report.command(result)


@pytest.mark.parametrize(
    ("behaviour", "kind", "named"),
    [("other plan", IntegrityError, "not comparable"), ("processed", PlanError, "renormalised")],
)
def test_verify_engine_what_cannot_be_compared_is_refused(
    behaviour: str, kind: type[Exception], named: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", behaviour)
    with pytest.raises(kind, match=named):
        run(job_of(folder))


@pytest.mark.long
def test_verify_engine_a_prefix_cache_that_is_never_hit_makes_the_claim_false(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(folder, engine=Options("fake", prefix_cache=True))
    assert run(job)["claim"]
    monkeypatch.setenv("FAKE_ENGINE", "never cached")
    assert "never hit" in run(job)["reasons"][0]


def test_verify_engine_equal_shards_are_refused_by_name(tmp_path: Path) -> None:
    """The lengths of SmolLM2-135M: an engine with equal shards serves TP 1 and 3 only."""
    odd = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    folder = models.random_model("llama", tmp_path, num_hidden_layers=1, vocab_size=512, head_dim=64, **odd)
    with pytest.raises(PlanError, match=r"TP=2, 9 cannot have: 9 query heads.*work with it: 1, 3\."):
        job_of(folder, tp_sizes=[1, 2, 3, 9])
    assert make_job(folder, tp_sizes=[1, 2, 3, 9], batch_sizes=[1])[0].engine is None
    assert job_of(folder, tp_sizes=[1, 3]).plan.leaves % 3 == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"engine": None, "against": "hf"}, "--against"),
        ({"against": "other"}, "--against"),
        ({"prompt_tokens": (0, 5)}, "--prompt-tokens"),
        ({"prompt_tokens": (1, 5000)}, "positions"),
    ],
)
def test_verify_engine_wrong_jobs_are_refused(arguments: dict[str, Any], named: str, folder: Path) -> None:
    with pytest.raises(PlanError, match=named):
        job_of(folder, **arguments)


@pytest.mark.parametrize("wrong", [{"chunk": 0}, {"threads": 0}, {"temperature": -1.0}, {"top_p": 0.9}, {"top_p": 2.0}])
def test_verify_engine_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        Options("fake", **wrong)


def child_of(engine: EngineProcess) -> int:
    return int(re.search(r"child (\d+)", engine.log())[1])  # type: ignore[index]


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
