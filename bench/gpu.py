"""Proves and times the CUDA side on one GPU, part by part; each part stays below 10 minutes.

    python bench/gpu.py                          # all parts; bench/results/gpu.json and gpu.md
    python bench/gpu.py --parts linear --output ""
    python bench/gpu.py --stop-after 500         # begin no part after 500 s; the next call takes the others
    python bench/gpu.py --dry-run                # no GPU: tiny sizes in triton's interpreter, no figure means anything

build:         python setup.py build_ext, what the machine is
bits:          forms of the tree matmul, row alone, CUDA graph, fma leaf = the CPU's
tests:         tests/test_kernels_*.py on the device
operators:     every operator of tbik.ops on CUDA tensors, forward and backward: fma = CPU, row alone = row in the
               batch, graph = eager; contractions: covers of 2, 3, 4 ranks = whole; prefill = decoding
collective_bits: all-reduce over peer memory by 2, 4, 8 processes on this GPU, against the oracle
model:         a small model at TP 1, 2, 4, every rank a process on this GPU: log-probabilities and gradients
combine:       folds of R buffers, GB/s
linear:        tree matmul beside torch.mm (cuBLAS) and a batch-invariant persistent matmul; dX, dW, fma leaf
rows:          norms, rope, silu and mul, beside torch's; bits of the CPU
vocabulary:    log-softmax, cross-entropy, their gradients, beside torch's; bits of the CPU
attention:     prefill, decoding and backward beside torch's SDPA; a query alone = in its prompt, pages = packed, graph
attention_tiles: the tiles of attention that the compile table leaves open, in bits and in time
experts:       a mixture of experts beside a loop over experts in torch
fingerprint:   GB/s; the CPU's digest
collectives:   times of the all-reduce over peer memory

What a part proves stands in the docstring of its function. Timings are medians by CUDA events, of turns A B A B where
they are compared (gpu_setting.py). Each part is a process of its own, so that a fault of the device ends one part only,
and has PART_LIMIT_S seconds. A part already recorded without an error for this device, these versions and this code is
skipped (gpu_records.py), unless --again. A part that fails is recorded with the last line of its error and makes the
exit status 1; parts left by --stop-after make it 3. Not run on a GPU yet.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import gpu_records
from gpu_setting import ROOT, PartFailed, Setting

RESULTS = ROOT / "bench" / "results" / "gpu"
PART_LIMIT_S = 590
PARTS = {
    "build": "gpu_build:part_build",
    "bits": "gpu_kernels:part_bits",
    "tests": "gpu_kernels:part_tests",
    "operators": "gpu_operators:part_operators",
    "collective_bits": "gpu_collectives:part_collective_bits",
    "model": "gpu_model:part_model",
    "combine": "gpu_kernels:part_combine",
    "linear": "gpu_linear:part_linear",
    "rows": "gpu_kernels:part_rows",
    "vocabulary": "gpu_kernels:part_vocabulary",
    "attention": "gpu_kernels:part_attention",
    "attention_tiles": "gpu_attention_tiles:part_attention_tiles",
    "experts": "gpu_experts:part_experts",
    "fingerprint": "gpu_kernels:part_fingerprint",
    "collectives": "gpu_collectives:part_collectives",
}
LEFT = 3  # exit status where --stop-after left parts


def run_here(name: str, setting: Setting) -> dict[str, Any]:
    """{rows, error}: error None, or the last line of what the part raised; its traceback goes to stderr."""
    module, function = PARTS[name].split(":")
    try:
        return {"rows": getattr(importlib.import_module(module), function)(setting), "error": None}
    except Exception as error:
        traceback.print_exc()
        rows = error.rows if isinstance(error, PartFailed) else []
        return {"rows": rows, "error": last_line("".join(traceback.format_exception_only(error)))}


def run_apart(name: str, limit_s: float = PART_LIMIT_S) -> dict[str, Any]:
    """As run_here, in a process of its own; a process that dies or takes longer than limit_s is an error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcome.json"
        command = [sys.executable, __file__, "--alone", name, "--outcome", str(path)]
        try:
            done = subprocess.run(command, timeout=limit_s, stdout=sys.stderr)
        except subprocess.TimeoutExpired:
            return {"rows": [], "error": f"no end within {limit_s:.0f} s"}
        if path.exists():
            outcome: dict[str, Any] = json.loads(path.read_text())
            return outcome
        return {"rows": [], "error": f"the process of the part ended with {done.returncode} and left nothing"}


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


def run(args: argparse.Namespace) -> int:
    """All parts asked for, in order; records are written after each."""
    names = args.parts.split(",")
    now = gpu_records.versions(args.dry_run)
    path = Path(args.output + ".json") if args.output else None
    result = gpu_records.load(path) if path else {"parts": {}}
    result["versions"] = now
    setting = Setting(True) if args.dry_run else None
    begin, failed, skipped, left = time.perf_counter(), [], [], []
    for name in names:
        is_there = name != "build" or any(ROOT.glob("tbik/_C.*so"))  # a record does not bring what was built
        if is_there and not args.again and gpu_records.is_done(result["parts"].get(name), now):
            skipped.append(name)
            continue
        start = time.perf_counter()
        if args.stop_after and start - begin > args.stop_after:
            left.append(name)
            continue
        outcome = run_here(name, setting) if setting else run_apart(name)
        for row in outcome["rows"]:
            print(name, json.dumps(row), flush=True)
        if outcome["error"] is not None:
            failed.append(name)
            print(name, "FAILED:", outcome["error"], flush=True)
        result["parts"][name] = {**outcome, "seconds": round(time.perf_counter() - start, 1), **now}
        result["parts"] = {part: result["parts"][part] for part in PARTS if part in result["parts"]}
        if path:
            gpu_records.save(args.output, result)
    if skipped:
        print(f"recorded already: {', '.join(skipped)} (--again runs them)")
    if left:
        print(f"left for the next call: {', '.join(left)}")
    passed = len(names) - len(failed) - len(skipped) - len(left)
    print(f"{passed} parts passed, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else LEFT if left else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--again", action="store_true", help="also the parts that are recorded already")
    parser.add_argument("--stop-after", type=float, default=0, metavar="SECONDS", help="begin no part after that")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, in triton's interpreter")
    parser.add_argument("--output", help="path without suffix for .json and .md; empty: none (default of a dry run)")
    for name in ("--alone", "--outcome"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; expected some of {list(PARTS)}")
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    if args.output is None:
        args.output = "" if args.dry_run else str(RESULTS)
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run goes through every part on the CPU")
    if args.alone:
        Path(args.outcome).write_text(json.dumps(run_here(args.alone, Setting(False))))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
