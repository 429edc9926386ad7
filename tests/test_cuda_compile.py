"""bench/cuda_compile.py: nvcc takes the sources, its checks hold and see what they look for."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "bench" / "cuda_compile.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cuda_compile", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_verify_sources_compile_without_a_gpu() -> None:
    """The sums of float32 and the C interface, sm_90; `make cuda-check` looks at all sources and architectures."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on the PATH: CUDA sources are not compiled here")
    options = ["--sources", "kernels_float32,shim_cuda", "--architectures", "sm_90", "--output", ""]
    run = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [row["ranks"] for row in rows if row.get("element") == "float32"] == [0, 8, 4, 2]
    assert {"source": "shim_cuda.cu", "kernels": 0, "failures": []} in rows


def test_verify_the_checks_see() -> None:
    """Negative control: PTX that must be refused, and PTX without the messages' order."""
    script = load_script()
    good = "st.release.sys.global.u64 [%rd1], %rd2;\nld.acquire.sys.global.u64 %rd1, [%rd2];\nadd.rn.f32 %f1, %f2, %f3;"
    assert script.problems(good) == []
    for line, name in (
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", "fused multiply-add"),
        ("div.full.f32 %f1, %f2, %f3;", "approximation"),
        ("add.rn.ftz.f32 %f1, %f2, %f3;", "flushing"),
        ("atom.global.add.f32 %f1, [%rd1], %f2;", "floating-point atomic"),
        ("red.global.add.f64 [%rd1], %fd2;", "floating-point atomic"),
        ("ld.global.nc.v2.u64 {%rd1, %rd2}, [%rd3];", "read-only cache"),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "tensor core"),
    ):
        assert script.problems(good + "\n" + line) == [name]
    assert script.problems("add.rn.f32 %f1, %f2, %f3;") == ["no release", "no acquire"]
    assert script.problems(good + "\natom.global.cas.b32 %r1, [%rd1], 0, 1;") == []  # integers: on the way of an error


def test_verify_names_of_kernels() -> None:
    describe = load_script().describe
    assert describe("_ZN4tbik4peer18peer_reduce_kernelIfLi8EEEvNS0_4CallE") == ("float32", 8)
    bf16 = "_ZN4tbik4peer18peer_reduce_kernelINS0_48_GLOBAL__N__0_kernels_bfloat16_cu_4Bf16ELi0EEEvNS0_4CallE"
    assert describe(bf16) == ("bfloat16", 0)
    assert describe(bf16.replace("4Bf16", "3F16").replace("bfloat16", "float16")) == ("float16", 0)
