"""A few trials of tests/fault_sweep.py; the hundreds are in bench/results/faults.json, made by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
COUNT = os.environ.get("TBIK_FAULTS", "2")

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.skipif(sys.platform != "linux", reason="the backend's shared memory is for Linux"),
]


def test_verify_faults_at_random_moments_end_in_time_and_leave_nothing() -> None:
    """SIGKILL, SIGSTOP, a missing rank, another shape: in time, named, inputs unchanged, nothing left."""
    words = [sys.executable, str(ROOT / "tests" / "fault_sweep.py"), "--count", COUNT, "--others", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, timeout=1200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 12 and all(row["live_ranks"] >= row["trials"] for row in rows), rows
    assert all(row["naming_the_culprit"] == row["live_ranks"] for row in rows if row["transport"] != "gloo"), rows
