"""What nvcc makes of csrc/cuda, without a GPU: registers, spills, instructions. `make cuda-check` runs it.

    python bench/cuda_compile.py                                       # every source, sm_80, sm_90, sm_100
    python bench/cuda_compile.py --sources kernels_float32 --architectures sm_90 --output ""

Compiled with the flags of csrc/cuda/build.py, as setup.py does. Checked of every kernel, exit status 1 otherwise:
no spills; PTX without fused multiply-add, approximate division, flushing, floating-point atomics, loads through the
read-only cache (peers write what is read) and mma; with releases and acquires at system scope. No figure here is a
measurement of speed. Exit status 3 and the reason where there is no nvcc.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "cuda_compile"
NO_NVCC = 3
SOURCES = ("csrc/cuda", "csrc/tree.h", "csrc/extrema.h", "csrc/host_device.h", "csrc/convert_loops.h", __file__)
FORBIDDEN = {
    "fused multiply-add": r"\bfma\.rn\.|\bfma\.rz\.|\bmad\.f",
    "approximation": r"\bdiv\.(full|approx)|\brcp\.approx",
    "flushing": r"\.ftz\b",
    "floating-point atomic": r"\b(atom|red)\.\S*\.(f16|f16x2|bf16|f32|f64)\b",
    "read-only cache": r"\bld\.global\S*\.nc\b",
    "tensor core": r"\b(mma|wgmma|tcgen05)\b",
}
REQUIRED = {
    "release": r"\bst\.release\.sys\.global\.u64\b",
    "acquire": r"\bld\.acquire\.sys\.global\.u64\b",
}
TYPES = {"f": "float32", "d": "float64", "i": "int32", "l": "int64"}
HEAD = """# What nvcc makes of csrc/cuda, without a GPU

`python bench/cuda_compile.py`, {version}, commit {commit}.
Registers and spilled bytes are per thread (ptxas), blocks have 256 threads.
Every row has passed the checks of that file. ranks: 2, 4, 8 = sums of one row per rank in registers; 0 = everything
else. No figure here is a measurement of speed.

"""


def builder() -> Any:
    spec = importlib.util.spec_from_file_location("cuda_build", ROOT / "csrc" / "cuda" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries(ptx: str) -> dict[str, str]:
    """Mangled name -> body of every kernel."""
    parts = re.split(r"^(?=.*\.entry )", ptx, flags=re.MULTILINE)
    return {match[1]: part for part in parts if (match := re.search(r"\.entry (\w+)", part))}


def problems(body: str) -> list[str]:
    """What must not be in a kernel's PTX and is, and the reverse."""
    found = [name for name, pattern in FORBIDDEN.items() if re.search(pattern, body)]
    return found + [f"no {name}" for name, pattern in REQUIRED.items() if not re.search(pattern, body)]


def describe(name: str) -> tuple[str, int]:
    """(element type, ranks) of peer_reduce_kernel<S, ranks>, mangled."""
    match = re.search(r"peer_reduce_kernelI(.*?)Li(\d+)EE+v", name)
    assert match is not None, name
    kind = match[1]
    element = "bfloat16" if "Bf16" in kind else "float16" if "F16" in kind else TYPES[kind]
    return element, int(match[2])


def look_at(nvcc: str, source: Path, architectures: list[str], folder: Path) -> list[dict[str, Any]]:
    ptx = folder / (source.stem + ".ptx")
    subprocess.run(builder().ptx_command(nvcc, source, ptx), check=True)
    bodies = entries(ptx.read_text())
    rows = []
    for architecture in architectures if bodies else []:
        command = [
            str(Path(nvcc).resolve().with_name("ptxas")),
            "-v",
            "-O3",
            f"-arch={architecture}",
            str(ptx),
            "-o",
            "/dev/null",
        ]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        for part in report.split("Compiling entry function")[1:]:
            name = part.split("'")[1]
            element, ranks = describe(name)
            registers = int(re.search(r"Used (\d+) registers", part)[1])  # type: ignore[index]
            spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
            spilled = int(spills[1]) + int(spills[2]) if spills else 0
            failures = problems(bodies[name]) + (["spills"] if spilled else [])
            rows.append(
                {
                    "architecture": architecture,
                    "element": element,
                    "ranks": ranks,
                    "registers": registers,
                    "spilled_bytes": spilled,
                    "failures": failures,
                }
            )
    return rows


def commit() -> str:
    """Of the sources that are compiled; "+" where they or this file have changed since."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *SOURCES]).returncode
    return (head or "unknown") + ("+" if changed else "")


def as_table(rows: list[dict[str, Any]]) -> str:
    columns = ("architecture", "element", "ranks", "registers", "spilled_bytes")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    build = builder()
    parser.add_argument("--architectures", default=",".join(build.ARCHITECTURES), help="comma-separated")
    parser.add_argument("--sources", default="", help="names without .cu, comma-separated; all by default")
    parser.add_argument("--output", default=str(RESULTS), help="path without suffix for .json and .md; empty: none")
    args = parser.parse_args()
    nvcc = build.find_nvcc()
    if nvcc is None:
        print("cuda-check skipped: no nvcc in $CUDA_HOME/bin or on the PATH")
        return NO_NVCC
    asked = set(filter(None, args.sources.split(",")))
    unknown = asked - {source.stem for source in build.sources()}
    if unknown:
        parser.error(f"unknown sources {sorted(unknown)}; expected some of {[s.stem for s in build.sources()]}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for source in build.sources():
            if asked and source.stem not in asked:
                continue
            found = look_at(nvcc, source, args.architectures.split(","), Path(folder))
            for row in found or [{"source": source.name, "kernels": 0, "failures": []}]:
                print(json.dumps(row), flush=True)
            rows += found
    rows.sort(key=lambda row: (row["element"], row["ranks"], row["architecture"]))
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-2]
    if args.output:
        source = commit()
        result = {"nvcc": version, "commit": source, "rows": rows}
        Path(args.output + ".json").write_text(json.dumps(result, indent=1) + "\n")
        Path(args.output + ".md").write_text(HEAD.format(version=version, commit=source) + as_table(rows))
    failed = [row for row in rows if row["failures"]]
    print(f"{len(rows)} kernels compiled, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
