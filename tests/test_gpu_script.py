"""bench/gpu.py without a GPU: every part runs in triton's interpreter, records let a run go on, wrong results fail."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import needs_triton

ROOT = Path(__file__).parent.parent
NOW = {"gpu": "H", "driver": "1", "torch": "2", "triton": "3", "commit": "c", "sources": "s"}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of bench/<name>.py."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return importlib.import_module


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.long
@needs_triton
@pytest.mark.slow
def test_verify_dry_run_goes_through_every_part(bench: Any, tmp_path: Path) -> None:
    output = tmp_path / "gpu"
    result = run("--dry-run", "--output", str(output))
    assert result.returncode == 0, result.stdout + result.stderr
    parts = set(bench("gpu").PARTS)
    assert result.stdout.rstrip().endswith(f"{len(parts)} parts passed, failed: none")
    assert {line.split()[0] for line in result.stdout.splitlines()[:-1]} == parts
    records = json.loads(output.with_suffix(".json").read_text())["parts"]
    assert set(records) == parts and all(record["error"] is None and record["rows"] for record in records.values())
    table = output.with_suffix(".md").read_text()
    assert all(f"## {part}\n" in table for part in parts) and "FAILED" not in table


def test_verify_refusals() -> None:
    assert "unknown parts ['nothing']" in run("--parts", "nothing").stderr
    if not torch.cuda.is_available():
        assert "no CUDA device; --dry-run" in run().stderr


# --- records --------------------------------------------------------------------------------------------------------


def test_verify_a_record_stands_for_the_same_device_versions_and_code_only(bench: Any) -> None:
    is_done = bench("gpu_records").is_done
    record = {"rows": [], "error": None, **NOW}
    assert is_done(record, NOW)
    assert not is_done(None, NOW) and not is_done({**record, "error": "x"}, NOW)
    assert not is_done({"error": None, **NOW}, NOW)
    for name in NOW:
        assert not is_done(record, {**NOW, name: "other"}), name
        assert not is_done({k: v for k, v in record.items() if k != name}, NOW), name


def test_verify_the_digest_of_sources_sees_every_change(bench: Any, tmp_path: Path) -> None:
    sources = bench("gpu_records").sources
    seen = {sources(tmp_path)}
    for name in ("setup.py", "tbik/a.py", "tbik/b/c.py", "csrc/cuda/d.cu", "bench/gpu_e.py", "tests/f.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for text in ("1", "2"):
            path.write_text(text)
            seen.add(sources(tmp_path))
    assert len(seen) == 13
    (tmp_path / "bench" / "results").mkdir()
    (tmp_path / "bench" / "results" / "gpu.json").write_text("a result changes no result")
    assert sources(tmp_path) in seen


def arguments(tmp_path: Path, parts: str, **options: Any) -> argparse.Namespace:
    given = {"parts": parts, "again": False, "stop_after": 0, "dry_run": True, "output": str(tmp_path / "gpu")}
    return argparse.Namespace(**{**given, **options})


@pytest.fixture
def script(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """bench/gpu.py with two parts, of which "wrong" fails; `calls` counts them."""
    gpu = bench("gpu")
    module = type(sys)("planted_parts")
    module.calls = []  # type: ignore[attr-defined]

    def right(setting: Any) -> list[dict[str, Any]]:
        module.calls.append("right")
        return [{"check": "a|b", "ms": 1 / 3}]

    def wrong(setting: Any) -> list[dict[str, Any]]:
        module.calls.append("wrong")
        return bench("gpu_setting").finish(
            [{"operator": "x", "result": "equal"}, {"operator": "y", "result": "FAILED: 3 bits"}]
        )

    module.right, module.wrong = right, wrong  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "planted_parts", module)
    monkeypatch.setattr(gpu, "PARTS", {"right": "planted_parts:right", "wrong": "planted_parts:wrong"})
    monkeypatch.setattr(bench("gpu_records"), "versions", lambda is_dry: dict(NOW))
    gpu.calls = module.calls
    return gpu


def test_verify_a_run_goes_on_where_it_stopped(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.run(arguments(tmp_path, "right,wrong")) == 1
    assert script.run(arguments(tmp_path, "right,wrong")) == 1
    assert script.calls == ["right", "wrong", "wrong"], "a failed part runs again, a passed one does not"
    assert "recorded already: right" in capsys.readouterr().out
    assert script.run(arguments(tmp_path, "right", again=True)) == 0 and script.calls[-1] == "right"
    assert script.run(arguments(tmp_path, "right,wrong", again=True, stop_after=1e-9)) == script.LEFT
    assert len(script.calls) == 4 and "left for the next call: right, wrong" in capsys.readouterr().out


def test_verify_a_failure_is_recorded_with_its_rows(script: Any, tmp_path: Path) -> None:
    assert script.run(arguments(tmp_path, "right,wrong")) == 1
    result = json.loads((tmp_path / "gpu.json").read_text())
    record = result["parts"]["wrong"]
    assert record["error"].endswith("1 of 2 checks failed, first {'operator': 'y'}: FAILED: 3 bits")
    assert [row["operator"] for row in record["rows"]] == ["x", "y"] and record["commit"] == "c"
    table = (tmp_path / "gpu.md").read_text()
    assert "| a\\|b | 0.3333 |" in table and "**FAILED**: " in table
    other = {**result, "versions": {**NOW, "gpu": "another"}}
    assert "Of another run: gpu H." in script.gpu_records.as_table(other)


def test_verify_a_part_that_dies_or_hangs_is_a_failure(bench: Any) -> None:
    gpu = bench("gpu")
    if not torch.cuda.is_available():  # the process refuses to begin: it leaves no outcome
        assert "ended with 2 and left nothing" in gpu.run_apart("combine")["error"]
    assert gpu.run_apart("combine", limit_s=0.01) == {"rows": [], "error": "no end within 0 s"}


# --- operators ------------------------------------------------------------------------------------------------------


def test_verify_every_public_operator_has_a_case(bench: Any) -> None:
    """Of tbik.ops.__all__ each name is in the table, or stands beside it with the check that has it."""
    from tbik import ops

    table = bench("gpu_operator_cases")
    named = {name for case in table.all_cases(True, ("fma",)) for name in case.covers}
    elsewhere = set(table.NOT_HERE) | {"PackedWeight"}
    assert named | elsewhere == set(ops.__all__) and not named & elsewhere


@pytest.mark.long
@needs_triton
def test_verify_a_wrong_operator_fails_the_part(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: one bit of a result, of one row only, of a gradient only; a part whose fold takes another order."""
    operators, setting = bench("gpu_operators"), bench("gpu_setting").Setting(True)
    from tbik import ops

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))

    def results(operator: Any, rows: tuple[int, ...] = (0,)) -> dict[str, str]:
        case = bench("gpu_operator_cases").Case("planted", (), operator, (x,), rows)
        return {row["check"].split(",")[0]: row["result"] for row in operators.rows_of_case(setting, case)}

    assert set(results(ops.silu).values()) == {"equal", operators.NO_GRAPHS}
    from tbik import devices

    def of_device(x: torch.Tensor) -> torch.Tensor:
        y = ops.silu(x)
        return y * 1.0000001 if devices.is_cuda(x) else y

    assert results(of_device)["fma = CPU"].startswith("FAILED: AssertionError: result 0")
    of_batch = results(lambda x: ops.silu(x) * (1 + 1e-6 * (len(x) == 1)))
    assert of_batch["fma = CPU"] == "equal"
    assert of_batch["row alone = row in the batch"].startswith("FAILED: AssertionError: row 2, result 0")
    with pytest.raises(bench("gpu_setting").PartFailed, match="1 of 1 checks failed"):
        bench("gpu_setting").finish([{"result": of_batch["row alone = row in the batch"]}])
    assert results(lambda x: x * 2)["call"] == "FAILED: AssertionError: no kernel was asked for"
    flat = lambda program, values, add: [functools.reduce(add, values)]  # noqa: E731
    monkeypatch.setattr(operators.tree, "run", flat)
    with operators.on_device(setting):
        assert operators.outcome(operators.check_linear_ranks, setting, "fma", 3).startswith("FAILED")


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_verify_a_wrong_model_fails_the_part(bench: Any) -> None:
    """Planted: one bit of one rank's shard, ranks that disagree about what all hold, a control that does not differ."""
    model, setting = bench("gpu_model"), bench("gpu_setting").Setting(True)
    one = {"logprobs": torch.tensor([1.0, 2.0]), "0.o": torch.arange(6.0).view(1, 6), "norm": torch.ones(2)}
    shards = [{**one, "0.o": part} for part in one["0.o"].chunk(2, 1)]
    other = {**one, "logprobs": torch.tensor([1.0, 2.5])}

    def rows(found: list[Any], control: Any = other) -> list[str]:
        results = {1: {"fma": [one], model.STOCK: [one]}, 2: {"fma": found, model.STOCK: [control] * 2}}
        return [row["result"] for row in model.judge(setting, model.DRY_SIZES, results, ("fma",))]

    assert rows(shards)[:2] == ["equal", "1 of 2 differ"]
    assert rows(shards, one)[1].startswith("FAILED: the same bits")
    planted = [shards[0], {**shards[1], "0.o": shards[1]["0.o"] + 1e-6}]
    assert rows(planted)[0] == "FAILED: 0.o: 3 of 6 elements differ in bits"
    planted = [shards[0], {**shards[1], "norm": torch.tensor([1.0, 1.5])}]
    assert rows(planted)[0].startswith("FAILED: norm of rank 1 = of rank 0: 1 of 2")
    assert rows([{"logprobs": one["logprobs"]}])[0].startswith("FAILED: expected")


@pytest.mark.multiprocess
def test_verify_a_rank_that_fails_or_hangs_ends_the_part(bench: Any, tmp_path: Path) -> None:
    run_ranks = bench("gpu_collectives").run_ranks
    code = "import sys, time; rank = sys.argv[-1]; print('rank', rank, flush=True); "
    assert run_ranks([sys.executable, "-c", code], 2, "job", tmp_path) == ["rank 0\n", "rank 1\n"]
    failing = code + "sys.exit('so it is') if rank == '1' else time.sleep(60)"
    with pytest.raises(AssertionError, match=r"(?s)job, rank 1 of 2 ended with 1:.*so it is"):
        run_ranks([sys.executable, "-c", failing], 2, "job", tmp_path)
    with pytest.raises(AssertionError, match=r"job, ranks \[0, 1\] of 2: no end within 1 s"):
        run_ranks([sys.executable, "-c", code + "time.sleep(60)"], 2, "job", tmp_path, limit_s=1)
