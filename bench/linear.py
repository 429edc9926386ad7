"""Time of the tree GEMM against torch.nn.functional.linear, on one machine, in one run.

    python bench/linear.py --threads 1 --json bench/results/linear.json
    python bench/linear.py --train
    python bench/linear.py --baseline-isa AVX512_CORE_BF16

y_MN = x_MK W_NK^T, L = 8 leaves, frozen weights (packed once); with --train: forward, dX and dW by tbik.ops.linear, the
weight changed in place before every iteration, so packing is inside the timed region, dW over 1, 8 and 64 samples.

Calls alternate (ours, torch, ours, torch, ...): two runs on a shared machine differ by more than the methods do;
a ratio is the median of torch/ours over the pairs (above 1: ours is faster). Before anything is timed: rows alone equal
rows in the batch, every path gives the same bits, and errors against exact sums are compared with torch's.

On machines with AMX, stock torch multiplies bf16 on AMX tiles, whose accumulation order is not an ascending chain and
cannot be made one; --leaf amx times the order that they do have (ORDER.md A14).
Therefore two baselines: torch as it comes, and torch without AMX (oneDNN limited by
ONEDNN_MAX_CPU_ISA in a process of its own, in which ours runs too). fp32 uses neither. Where the CPU has no AMX the two
are the same thing, and the second is left out (unless --baseline-isa asks for it).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from tbik import _C
from tbik.ops.linear import linear
from tbik.plan import TreePlan

LEAVES = 8
SHAPES = ((4096, 4096), (2048, 2048), (4096, 14336), (14336, 4096))  # (K, N)
ROWS = (1, 8, 64, 256, 512)
SAMPLES = (1, 8, 64)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NO_AMX = "AVX512_CORE_BF16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--train", action="store_true", help="forward and backward, weights packed in every iteration")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="M; with --train the first is taken")
    parser.add_argument("--shapes", nargs="+", default=[f"{k}x{n}" for k, n in SHAPES], help="KxN")
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--leaf", choices=("fma", "amx"), default="fma", help="order inside a leaf (ORDER.md A14)")
    parser.add_argument("--pairs", type=int, default=9, help="measured pairs of calls, at least")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time per cell that cheap cells fill with more pairs"
    )
    parser.add_argument(
        "--baseline-isa", help=f"second baseline: ONEDNN_MAX_CPU_ISA, '' for none; by default {NO_AMX} if there is AMX"
    )
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: of one thread, on a busy machine"
    )
    parser.add_argument("--json", type=Path, help="write machine and rows")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts the calling thread only; use --threads 1")
    if options.baseline_isa is None:
        options.baseline_isa = NO_AMX if "amx_bf16" in cpu()[1] else ""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    shapes = [tuple(int(part) for part in shape.split("x")) for shape in options.shapes]

    if not options.child:
        check_bits(options.leaf)
    rows = [row for shape in shapes for name in options.dtypes for row in measure(shape, name, options)]
    if options.child:
        print(json.dumps(rows))
        return
    if options.baseline_isa:
        for row, other in zip(rows, rows_with_isa(options.baseline_isa)):
            assert all(row[key] == other[key] for key in ("k", "n", "m", "dtype", "samples"))
            row["ratio_isa"], row["torch_isa_ms"] = other["ratio"], other["torch_ms"]
    report = {"machine": machine(options), "accuracy": accuracy(options.leaf), "rows": rows}
    show(report, options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def rows_with_isa(isa: str) -> list[dict[str, Any]]:
    """The same measurement in a process whose oneDNN may use `isa` and nothing newer."""
    command = [sys.executable, *sys.argv, "--child", "--baseline-isa", ""]
    done = subprocess.run(command, env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the run with ONEDNN_MAX_CPU_ISA={isa} failed:\n{done.stderr}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def measure(shape: tuple[int, int], name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    k, n = shape
    dtype = DTYPES[name]
    w_NK = torch.randn(n, k).to(dtype)
    if options.train:
        return [train_row(w_NK, name, options.rows[-1], samples, options) for samples in SAMPLES]
    cuts, root = [_C.cuts(k, LEAVES)], _C.run_schedule(0, LEAVES, LEAVES, True)
    packed = _C.pack([w_NK], False, cuts, name)
    rows = []
    for m in options.rows:
        x_MK = torch.randn(m, k).to(dtype)

        def ours(x_MK: torch.Tensor = x_MK) -> None:
            _C.gemm([x_MK], False, packed, False, cuts, root, name, None, dtype, leaf=options.leaf)

        def torchs(x_MK: torch.Tensor = x_MK) -> None:
            F.linear(x_MK, w_NK)

        memory = (w_NK.nbytes + packed.nbytes) / w_NK.nbytes
        rows.append({"k": k, "n": n, "m": m, "dtype": name, "samples": None, "memory": memory})
        rows[-1] |= compare(ours, torchs, lambda: None, 2 * m * n * k, options)
    return rows


def train_row(w_NK: torch.Tensor, name: str, m: int, samples: int, options: argparse.Namespace) -> dict[str, Any]:
    """Forward, dX and dW; ours returns dW in fp32 (S2), torch in the weight's dtype."""
    n, k = w_NK.shape
    plan = TreePlan(leaves=LEAVES, leaf=options.leaf)
    offsets = [m * i // samples for i in range(samples + 1)]
    x_MK = torch.randn(m, k).to(w_NK.dtype).requires_grad_()
    dy_MN = torch.randn(m, n).to(w_NK.dtype)
    weight = torch.nn.Parameter(w_NK.clone())

    def change() -> None:
        x_MK.grad = weight.grad = None
        with torch.no_grad():
            weight.mul_(-1)

    def ours() -> None:
        linear(x_MK, weight, plan=plan, sample_offsets=offsets).backward(dy_MN)

    def torchs() -> None:
        F.linear(x_MK, weight).backward(dy_MN)

    row = {"k": k, "n": n, "m": m, "dtype": name, "samples": samples, "memory": None}
    return row | compare(ours, torchs, change, 6 * m * n * k, options)


def compare(
    ours: Callable[[], None],
    torchs: Callable[[], None],
    before: Callable[[], None],
    operations: int,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Medians over alternating calls; which of the two goes first alternates as well."""

    clock = time.thread_time if options.clock == "cpu" else time.perf_counter

    def seconds(call: Callable[[], None]) -> float:
        before()
        start = clock()
        call()
        return clock() - start

    warm = seconds(ours) + seconds(torchs)
    warm = min(warm, seconds(ours) + seconds(torchs))
    pairs = max(options.pairs, min(200, int(options.seconds / warm)))
    mine, theirs = [], []
    for i in range(pairs):
        for call, times in ((ours, mine), (torchs, theirs))[:: 1 if i % 2 else -1]:
            times.append(seconds(call))
    ratio = statistics.median(b / a for a, b in zip(mine, theirs))
    tbik_s, torch_s = statistics.median(mine), statistics.median(theirs)
    return {
        "pairs": pairs,
        "tbik_ms": 1e3 * tbik_s,
        "torch_ms": 1e3 * torch_s,
        "gflops": operations / tbik_s / 1e9,
        "ratio": ratio,
    }


def check_bits(leaf: str) -> None:
    """Refuses to time kernels whose bits are wrong: rows alone = batch, every path the same."""
    for name, dtype in DTYPES.items():
        x_MK, w_NK = torch.randn(70, 1000).to(dtype), torch.randn(130, 1000).to(dtype)
        cuts, root = [_C.cuts(1000, LEAVES)], _C.run_schedule(0, LEAVES, LEAVES, True)
        packed = _C.pack([w_NK], False, cuts, name)
        batch = _C.gemm([x_MK], False, packed, False, cuts, root, name, None, torch.float32, leaf=leaf)
        for path in _C.amx_paths() if leaf == "amx" and name == "bfloat16" else _C.cpu_paths():
            if path == "avx512_bf16" and name != "bfloat16":
                continue
            again = _C.gemm([x_MK], False, packed, False, cuts, root, name, None, torch.float32, path, leaf)
            if not again.view(torch.int32).equal(batch.view(torch.int32)):
                raise RuntimeError(f"bench/linear.py: path {path} and the default differ in bits for {name}")
        for row in range(70):
            one = x_MK[row : row + 1]
            alone = _C.gemm([one], False, packed, False, cuts, root, name, None, torch.float32, leaf=leaf)
            if not alone.view(torch.int32).equal(batch[row : row + 1].view(torch.int32)):
                raise RuntimeError(f"bench/linear.py: row {row} alone differs from the batch in bits for {name}")


def accuracy(leaf: str) -> dict[str, dict[str, float]]:
    """Root mean square error against the fp64 product of the same operands, relative to the rms of the product.

    bf16 and fp32: ours with the leaves of the timed calls and with 32, torch's, and what one rounding of the exact
    value costs. A leaf is one chain, so shorter leaves round less.
    """
    result = {}
    for name, dtype in DTYPES.items():
        x_MK, w_NK = torch.randn(256, 4096).to(dtype), torch.randn(256, 4096).to(dtype)
        exact = x_MK.double() @ w_NK.double().T

        def ours(leaves: int, name: str = name, x_MK: torch.Tensor = x_MK, w_NK: torch.Tensor = w_NK) -> torch.Tensor:
            cuts, root = [_C.cuts(4096, leaves)], _C.run_schedule(0, leaves, leaves, True)
            return _C.gemm([x_MK], False, [w_NK], False, cuts, root, name, None, x_MK.dtype, leaf=leaf)

        def error(y: torch.Tensor, exact: torch.Tensor = exact) -> float:
            return float((y.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())

        result[name] = {
            "tbik": error(ours(LEAVES)),
            "tbik, 32 leaves": error(ours(32)),
            "torch": error(F.linear(x_MK, w_NK)),
            "rounding": error(exact.to(dtype)),
        }
    return result


def cpu() -> tuple[str, set[str]]:
    """Name and feature flags."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    flags: set[str] = set()
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
            if key.strip() == "flags":
                flags = set(value.split())
    return name, flags


def machine(options: argparse.Namespace) -> dict[str, Any]:
    name, flags = cpu()
    here = Path(__file__).resolve().parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here).stdout.strip()
    return {
        "cpu": name,
        "cpus": os.cpu_count(),
        "flags": sorted(flags & {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}),
        "load": os.getloadavg()[0],
        "threads": options.threads,
        "paths": {name: _C.default_path(name) for name in DTYPES},
        "torch": torch.__version__,
        "commit": commit,
        "baseline_isa": options.baseline_isa,
        "clock": options.clock,
    }


def show(report: dict[str, Any], options: argparse.Namespace) -> None:
    here = report["machine"]
    console = Console(width=120)
    flags = " ".join(here["flags"])
    console.print(f"{here['cpu']} ({flags}), {here['threads']} thread(s) of {here['cpus']}")
    console.print(f"load {here['load']:.1f}, {here['clock']} clock")
    console.print(f"torch {here['torch']}, commit {here['commit'][:12]}, paths {here['paths']}")
    title = "forward + dX + dW, packing included" if options.train else "frozen weights"
    table = Table(title=f"{title}: ratio = torch time / tbik time, median over pairs")
    second = f"torch {options.baseline_isa}" if options.baseline_isa else "-"
    columns = ("K", "N", "M", "dtype", "samples", "tbik ms", "GFLOP/s", "torch as it comes", second, "memory")
    for column in columns:
        table.add_column(column, justify="right")
    for row in report["rows"]:
        table.add_row(
            str(row["k"]),
            str(row["n"]),
            str(row["m"]),
            row["dtype"],
            str(row["samples"] or "-"),
            f"{row['tbik_ms']:.2f}",
            f"{row['gflops']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_isa']:.2f}" if "ratio_isa" in row else "-",
            f"{row['memory']:.2f}" if row["memory"] else "-",
        )
    console.print(table)
    for name, errors in report["accuracy"].items():
        console.print(f"relative rms error {name}: " + ", ".join(f"{who} {e:.3e}" for who, e in errors.items()))
    console.print("memory = (weight + packed copy) / weight; the packed copy replaces the weight where it is frozen")


if __name__ == "__main__":
    main()
