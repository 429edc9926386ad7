"""What the compilers make of every Triton kernel, without a GPU: registers, spills, shared memory, instructions.

    python bench/gpu_compile.py                                     # sm_80, sm_90, sm_100; bench/results/gpu_compile.*
    python bench/gpu_compile.py --architectures sm_90 --cases matmul --output ""

The host code of each kernel runs on small CPU tensors with a driver that compiles for an architecture and launches
nothing, so what is compiled is what would be launched. Checked of every kernel, exit status 1 otherwise:
PTX: no atomics, no tf32, no approximate arithmetic, no flushing, no fused multiply-add that the source did not ask for
(fma.rn count = the count of fma in Triton's own IR), and the tensor-core instruction that the plan's leaf names.
Triton IR: every address is a pointer plus 64-bit offsets.
Registers and spills are ptxas's; a spill is reported, not refused. Nothing here is a measurement of speed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "gpu_compile"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MMA = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
MATMULS = ("whole_kernel", "split_kernel")
FORBIDDEN = {
    "atomics": r"\b(atom|red)\.(?!async)",
    "tf32": r"\.tf32",
    "approximations": r"\b(div\.full|\w+\.approx)",
    "flushing": r"\.ftz\b",
}


HEAD = """# What compiles, without a GPU

`python bench/gpu_compile.py`, triton {version}. Registers and spilled bytes are per thread (ptxas). Every row has
passed the checks of that file. No figure here is a measurement of speed.

"""


class Capture:
    """Compiles what is launched for one architecture, keeps it, launches nothing."""

    def __init__(self, architecture: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
        self.kernels: list[tuple[str, Any]] = []

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # a device per architecture: triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def run(self, work: Callable[[], Any]) -> list[tuple[str, Any]]:
        from triton.runtime import JITFunction, driver

        plain_run = JITFunction.run

        def compile_only(function: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = plain_run(function, *args, warmup=True, **kwargs)
            self.kernels.append((function.__name__, kernel))
            return kernel

        self.kernels = []
        JITFunction.run = compile_only
        driver.set_active(self)
        try:
            work()
        finally:
            JITFunction.run = plain_run
        return self.kernels


def matmul_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik import _C, TreePlan
    from tbik.kernels import matmul

    def product(m: int, n: int, k: int, dtype: Any, leaf: str, leaves: int = 8, **options: Any) -> Any:
        plan = TreePlan(leaves=leaves)
        members, is_dx = options.pop("members", 1), options.pop("is_dx", False)
        a = [torch.empty(m, k, dtype=dtype) for _ in range(members)]
        b = [torch.empty(k, n, dtype=dtype) if is_dx else torch.empty(n, k, dtype=dtype) for _ in range(members)]
        schedule = options.pop("schedule", _C.run_schedule(0, leaves, leaves, True, False))
        cuts = [plan.cuts(k)] * members
        return matmul.contract(a, b, cuts, schedule, leaf=leaf, out_dtype=dtype, b_k_major=is_dx, **options)

    def gradient(tokens: int, n: int, k: int, dtype: Any, leaf: str) -> Any:
        dy, x = torch.empty(tokens, n, dtype=dtype), torch.empty(tokens, k, dtype=dtype)
        blocks = tokens // 512
        schedule = _C.sample_schedule([2] * (blocks // 2), False)
        cuts = [range(0, tokens + 1, 512)]
        options: Any = {"a_k_major": True, "b_k_major": True, "out_dtype": torch.float32, "form": "whole"}
        return matmul.contract([dy], [x], cuts, schedule, leaf=leaf, **options)

    mma = f"mma:{architecture}"
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    yield "prefill bf16", lambda: product(256, 256, 1024, bf16, mma, form="whole")
    yield "prefill fp16", lambda: product(256, 256, 1024, fp16, mma, form="whole")
    yield "prefill bf16, 12 leaves of 48", lambda: product(256, 256, 576, bf16, mma, 12, form="whole")
    yield "prefill bf16, leaves of 125", lambda: product(256, 256, 1000, bf16, mma, form="whole")
    yield "decode bf16", lambda: product(16, 256, 1024, bf16, mma, form="split")
    yield "decode bf16, leaves of 125", lambda: product(16, 256, 1000, bf16, mma, form="split")
    yield "dX bf16", lambda: product(256, 256, 1024, bf16, mma, is_dx=True, form="whole")
    yield "dX of a group of 3 bf16", lambda: product(256, 256, 1024, bf16, mma, members=3, is_dx=True, form="whole")
    yield "dW bf16", lambda: gradient(2048, 256, 256, bf16, mma)
    yield "fma of bf16", lambda: product(64, 64, 128, bf16, "fma", form="whole")
    yield "fma of fp32", lambda: product(64, 64, 128, fp32, "fma", form="whole")
    yield "fma of fp64", lambda: product(64, 64, 128, torch.float64, "fma", form="whole")


def combine_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik import _C
    from tbik.kernels import combine

    def fold(leaves: int, narrow: bool, **options: Any) -> Any:
        x = torch.empty(leaves, 64, 64)
        return combine.combine(x, _C.run_schedule(0, leaves, leaves, True, narrow), **options)

    yield "8 leaves to bf16", lambda: fold(8, False, out_dtype=torch.bfloat16)
    yield "8 leaves, bf16 wire, bias", lambda: fold(8, True, out_dtype=torch.bfloat16, bias=torch.empty(64))
    yield "64 leaves to fp32", lambda: fold(64, False)


def row_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik.kernels import norm, rope

    bf16 = torch.bfloat16
    x, w = torch.empty(64, 4096, dtype=bf16), torch.empty(4096)
    yield "add and rms norm, 4096", lambda: norm.norm(x, x, w, None, 1e-6, False, False, bf16)
    yield "rms norm dX, 4096", lambda: norm.norm_dx(x, x, w, 1e-6, False, False, x, bf16)
    yield "layer norm, 4096", lambda: norm.norm(x, None, w, w, 1e-6, True, False, bf16)
    heads, table = torch.empty(16, 32, 128, dtype=bf16), torch.empty(16, 64)
    yield "rope, 128", lambda: rope.rope(heads, table, table, False, False)


CASES: dict[str, Callable[[str], Iterator[tuple[str, Callable[[], Any]]]]] = {
    "matmul": matmul_cases,
    "combine": combine_cases,
    "rows": row_cases,
}


def report(architecture: str, operator: str, case: str, kernel_name: str, kernel: Any) -> dict[str, Any]:
    """One row: what ptxas says, and which checks failed."""
    ptx, ttir = kernel.asm["ptx"], kernel.asm["ttir"]
    # fma calls of the source, as LLVM vectors of the elements that a thread holds
    calls = re.findall(r"call .*@llvm\.fma\.(?:v(\d+))?f", kernel.asm["llir"])
    asked = sum(int(lanes or 1) for lanes in calls)
    found = len(re.findall(r"\bfma\.rn", ptx)) + len(re.findall(r"\bfma\.rn\.f32x2", ptx))  # x2: two in one
    failures = [name for name, pattern in FORBIDDEN.items() if re.search(pattern, ptx)]
    if found != asked:
        failures.append(f"fused multiply-adds: {found} in PTX, {asked} asked for")
    instructions = sorted(set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*", ptx)))
    expected = {MMA[architecture]} if operator == "matmul" and kernel_name in MATMULS and "fma" not in case else set()
    if {name.split(".sync")[0].split(".cta")[0] for name in instructions} != {e.split(".sync")[0] for e in expected}:
        failures.append(f"expected tensor-core instructions {sorted(expected)}")
    narrow = narrow_offsets(ttir)
    if narrow:
        failures.append(f"{len(narrow)} addresses with 32-bit offsets, first: {narrow[0]}")
    row = {
        "architecture": architecture,
        "operator": operator,
        "case": case,
        "kernel": kernel_name,
        **resources(ptx),
        "shared_bytes": kernel.metadata.shared,
        "num_warps": kernel.metadata.num_warps,
        "fma": found,
        "instructions": instructions,
        "failures": failures,
    }
    return row


def narrow_offsets(ttir: str) -> list[str]:
    """Lines of Triton IR that add a 32-bit offset to a pointer."""
    return [
        line.strip() for line in ttir.splitlines() if "tt.addptr" in line and re.search(r", (tensor<.*x)?i32", line)
    ]


def resources(ptx: str) -> dict[str, int]:
    """Registers and spilled bytes per thread, by the ptxas that triton brings."""
    import triton

    found = re.search(r"\.target (sm_\w+)", ptx)
    assert found
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    blackwell = folder / "ptxas-blackwell"
    ptxas = blackwell if found[1].startswith("sm_1") and blackwell.exists() else folder / "ptxas"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(ptxas), "-v", "--fmad=false", f"--gpu-name={found[1]}", str(source), "-o", f"{scratch}/cubin"]
        log = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
    used, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert used and spilled, log
    return {"registers": int(used[1]), "spilled_bytes": int(spilled[1])}


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| architecture | operator | case | kernel | warps | registers | spilled bytes | shared bytes | instruction |",
        "|---|---|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        columns = (
            "architecture",
            "operator",
            "case",
            "kernel",
            "num_warps",
            "registers",
            "spilled_bytes",
            "shared_bytes",
        )
        instruction = ", ".join(f"`{name}`" for name in row["instructions"]) or "-"
        lines.append("| " + " | ".join(str(row[column]) for column in columns) + f" | {instruction} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--cases", default=",".join(CASES), help="operators, comma-separated")
    parser.add_argument("--match", default="", help="only the cases that this regular expression finds")
    parser.add_argument("--output", default=str(RESULTS), help="path without suffix for .json and .md; empty: none")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    rows = []
    for architecture in args.architectures.split(","):
        capture = Capture(architecture)
        for operator in args.cases.split(","):
            for case, work in CASES[operator](architecture):
                if not re.search(args.match, case):
                    continue
                for kernel_name, kernel in capture.run(work):
                    rows.append(report(architecture, operator, case, kernel_name, kernel))
                    print(json.dumps(rows[-1]), flush=True)
    failures = [row for row in rows if row["failures"]]
    if args.output:
        result = {"triton": triton.__version__, "rows": rows}
        Path(args.output + ".json").write_text(json.dumps(result, indent=1) + "\n")
        Path(args.output + ".md").write_text(HEAD.format(version=triton.__version__) + as_table(rows) + "\n")
    for row in failures:
        print(f"FAILED {row['architecture']} {row['operator']} {row['case']} {row['kernel']}: {row['failures']}")
    print(f"{len(rows)} kernels, {len(failures)} with failed checks")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
