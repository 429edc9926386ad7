"""Builds tests/test_transport.cpp, plain and with sanitizers, and runs it: transports, collective, reduce_ops."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("combine", "gemm_portable", "reduce_ops", "collective", "transport_shm", "transport_tcp")
FLAGS = ["-std=c++20", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-pthread"]
VARIANTS = {
    "plain": ["-O2"],
    "thread": ["-O1", "-fsanitize=thread", "-fno-omit-frame-pointer"],
    "address": ["-O1", "-fsanitize=address,undefined", "-fno-omit-frame-pointer"],
}
COMPILER = os.environ.get("CXX") or shutil.which("c++")

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="the shared-memory transport is for Linux"),
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
]


def build(variant: str) -> Path:
    """Path of the program, built if a source is newer."""
    target = ROOT / "tests" / ".build" / f"test_transport-{variant}"
    sources = [*(ROOT / "csrc" / f"{name}.cpp" for name in SOURCES), ROOT / "tests" / "test_transport.cpp"]
    newest = max(path.stat().st_mtime for path in [*sources, *(ROOT / "csrc").glob("*.h"), Path(__file__)])
    if not target.exists() or target.stat().st_mtime < newest:
        target.parent.mkdir(exist_ok=True)
        command = [
            str(COMPILER),
            *FLAGS,
            *VARIANTS[variant],
            f"-I{ROOT / 'csrc'}",
            *map(str, sources),
            "-o",
            str(target),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
    return target


def run(variant: str, *arguments: str, timeout: float = 240) -> str:
    done = subprocess.run([build(variant), *arguments], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.long
def test_verify_placements_equal_a_recursive_fold() -> None:
    assert run("plain", "bits", "1", "2").count("results equal") == 3


@pytest.mark.long
def test_verify_processes_attach_and_leave_nothing_behind() -> None:
    run("plain", "processes")


@pytest.mark.long
def test_verify_faults_end_in_time_and_name_the_rank() -> None:
    """SIGKILL, SIGSTOP, missing participant, mismatched count: limit + 1 s, culprit named, input unchanged."""
    out = run("plain", "faults", os.environ.get("TBIK_FAULTS", "5"), timeout=3000)
    assert len(out.splitlines()) == 12, out


@pytest.mark.sanitize
@pytest.mark.parametrize("variant", ["thread", "address"])
def test_verify_sanitizers_find_nothing(variant: str) -> None:
    run(variant, "bits", "2", "12", timeout=280)
    run(variant, "processes")
