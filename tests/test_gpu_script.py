"""bench/gpu.py without a GPU: every part runs in triton's interpreter, records let a run go on, wrong results fail."""

from __future__ import annotations

import argparse
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
