"""bench/gpu.py without a GPU: every part runs in triton's interpreter, and it refuses what it cannot do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreter import needs_triton

ROOT = Path(__file__).parent.parent


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.long
@needs_triton
@pytest.mark.slow
def test_verify_dry_run_goes_through_every_part() -> None:
    result = run("--dry-run")
    assert result.returncode == 0, result.stdout + result.stderr
    parts = {"bits", "combine", "linear", "rows", "vocabulary", "attention", "fingerprint"}
    parts |= {"collective_bits", "collectives"}
    assert result.stdout.rstrip().endswith(f"{len(parts)} parts passed, failed: none")
    assert {line.split()[0] for line in result.stdout.splitlines()[:-1]} == parts


def test_verify_refusals() -> None:
    assert "unknown parts ['nothing']" in run("--parts", "nothing").stderr
    if not torch.cuda.is_available():
        assert "no CUDA device; --dry-run" in run().stderr
