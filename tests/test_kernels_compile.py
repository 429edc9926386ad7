"""bench/gpu_compile.py on a few kernels: its checks hold, they see what they look for; the committed table agrees.

In a process of its own, because this one runs kernels in triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import needs_triton

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "gpu_compile.py"
RESULTS = ROOT / "bench" / "results" / "gpu_compile"


def load_script():
    spec = importlib.util.spec_from_file_location("gpu_compile", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@needs_triton
@pytest.mark.slow
def test_verify_kernels_compile_without_a_gpu() -> None:
    """sm_90: no spills in the default tiles, wgmma, 64-bit offsets, no atomics, no tf32, no stray fma."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    options = [
        "--architectures",
        "sm_90",
        "--cases",
        "combine,matmul",
        "--match",
        "8 leaves|prefill bf16$|decode bf16$",
    ]
    command = [sys.executable, str(SCRIPT), *options, "--output", ""]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert {row["kernel"] for row in rows} == {"whole_kernel", "split_kernel", "combine_kernel"}
    assert all(row["spilled_bytes"] == 0 for row in rows)
    matmuls = [row for row in rows if row["kernel"] != "combine_kernel"]
    shapes = [name.split(".")[4] for row in matmuls for name in row["instructions"]]
    assert len(matmuls) == len(shapes) and all(s.startswith("m64n") and s.endswith("k16") for s in shapes), shapes


def test_verify_committed_table() -> None:
    """Every kernel is in it for every architecture, no check failed, and what spills is listed here with its reason."""
    rows = json.loads(RESULTS.with_suffix(".json").read_text())["rows"]
    sources = "\n".join(path.read_text() for path in (ROOT / "tbik" / "kernels").glob("*.py"))
    kernels = set(re.findall(r"^@triton.jit\ndef (\w+_kernel)\(", sources, re.MULTILINE))
    assert len(kernels) > 20
    for architecture in ("sm_80", "sm_90", "sm_100"):
        assert {row["kernel"] for row in rows if row["architecture"] == architecture} == kernels
    assert {row["architecture"] for row in rows} == {"sm_80", "sm_90", "sm_100"}
    assert not [row for row in rows if row["failures"]]
    # elements of 2 bytes pass registers on their way to shared memory, to be timed against a copy with aligned rows
    # (leaves of 125), and so do 64-bit addresses with long strides on both sides (dW; to be timed against descriptors)
    excused = {("sm_100", "prefill bf16, leaves of 125"), ("sm_100", "dW bf16")}
    # Attention with head_dim 256, or with window, soft-cap and dropout at once: some registers more than there are, in
    # programs of 64 rows, the least for wgmma. To be timed on the first GPU against the other tiles that
    # bench/gpu_attention_tiles.py times (stages, parts of head_dim, dK and dV by a program each).
    masked = "64, window, soft-cap, dropout"
    attention = {("sm_80", "mma, paged, 256"), ("sm_90", "mma, paged, 256"), ("sm_90", "mma, backward, 256")}
    attention |= {("sm_90", f"mma, packed, {masked}"), ("sm_90", f"mma, backward, {masked}")}
    attention |= {("sm_90", "mma, packed, 256, window, soft-cap")}
    # the audits' kernel, slow in any case
    attention |= {(name, "fma of fp32, backward, 128") for name in ("sm_80", "sm_90", "sm_100")}
    excused |= attention
    assert max(row["spilled_bytes"] for row in rows if row["operator"] == "attention") <= 80
    assert {(row["architecture"], row["case"]) for row in rows if row["spilled_bytes"]} <= excused
    assert load_script().as_table(rows) in RESULTS.with_suffix(".md").read_text()


def test_verify_the_checks_see() -> None:
    """Negative control: PTX and IR that must be refused."""
    script = load_script()
    seen = {
        name
        for name, pattern in script.FORBIDDEN.items()
        for text in (
            "atom.global.add.f32 %f1;",
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
            "div.full.f32 %f1, %f2",
            "add.rn.ftz.f32 %f1",
        )
        if script.re.search(pattern, text)
    }
    assert seen == set(script.FORBIDDEN)
    assert not script.narrow_offsets("%1 = tt.addptr %0, %2 : tensor<8x!tt.ptr<f32>>, tensor<8xi64>")
    assert script.narrow_offsets("%1 = tt.addptr %0, %2 : tensor<8x!tt.ptr<f32>>, tensor<8xi32>")
