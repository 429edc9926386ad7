"""Rate of tbik.fingerprint, on one thread, beside a read of the same memory and other digests, in one run.

    python bench/fingerprint.py --json bench/results/fingerprint.json

GiB/s of the tensor's bytes, medians over rounds; in a round every method runs once on the same 64 MiB, so that all of
them see the machine in the same state. read: torch's sum of the bytes as int64. hash_tensor: torch.hash_tensor (XOR).
l1: the fp64 sum of magnitudes. "of read": median over the rounds of (rate / rate of the read in that round).
Layouts: contiguous, a column shard of a quarter (rows of 1024 elements out of 4096), and a transposed view.
Before anything is timed every path must give the same number.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tbik import _C
from tbik.integrity.fingerprint import KEY

DTYPES = {
    name: getattr(torch, name) for name in ("uint8", "float8_e4m3fn", "bfloat16", "float16", "float32", "float64")
}
PATHS = [path for path in _C.cpu_paths() if path != "avx512_bf16"]  # which computes bf16 products only
COLUMNS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of each tensor")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: time of the thread, on a busy machine"
    )
    parser.add_argument("--json", type=Path, help="write machine and rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in options.dtypes for row in measure(name, options)]
    report = {"machine": machine(options), "rows": rows}
    show(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    dtype = DTYPES[name]
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (options.mib << 20,), dtype=torch.uint8, generator=generator)
    data[dtype.itemsize - 1 :: dtype.itemsize] &= 0x3F  # no NaN, so that the l1 norm is a number
    x = data.view(dtype).view(-1, COLUMNS)
    words, raw = data.view(torch.int64), data.numpy()

    def digest(view: torch.Tensor, strides: list[int], path: str = "") -> Callable[[], object]:
        return lambda: _C.fingerprint(view, 0, strides, KEY, path)

    values = {digest(x, [COLUMNS, 1], path)() for path in PATHS} | {digest(x.t(), [1, COLUMNS])()}
    if len(values) != 1:
        raise RuntimeError(f"bench/fingerprint.py: the paths {PATHS} give {len(values)} numbers for {name}")
    quarter = x[:, COLUMNS // 4 : COLUMNS // 2].contiguous()
    # method -> (call, bytes it reads)
    methods: dict[str, tuple[Callable[[], object], int]] = {"read": (lambda: words.sum(), data.nbytes)}
    for path in PATHS:
        methods[f"tbik {path}"] = (digest(x, [COLUMNS, 1], path), data.nbytes)
    methods["tbik, column shard"] = (digest(quarter, [COLUMNS, 1]), quarter.nbytes)
    methods["tbik, transposed view"] = (digest(x.t(), [1, COLUMNS]), data.nbytes)
    if name in ("bfloat16", "float32"):
        methods["hash_tensor"] = (lambda: torch.hash_tensor(x), data.nbytes)
        methods["l1"] = (lambda: x.double().abs().sum(), data.nbytes)
    if name == "uint8":
        methods["sha256"] = (lambda: hashlib.sha256(raw).digest(), data.nbytes)
        methods["blake2b"] = (lambda: hashlib.blake2b(raw).digest(), data.nbytes)
        methods["crc32"] = (lambda: zlib.crc32(raw), data.nbytes)
    clock = time.thread_time if options.clock == "cpu" else time.perf_counter
    rates: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(options.rounds):
        for method, (call, size) in methods.items():
            start = clock()
            call()
            rates[method].append(size / (clock() - start) / 2**30)
    return [
        {
            "dtype": name,
            "method": method,
            "gib_per_s": statistics.median(rate),
            "of_read": statistics.median(a / b for a, b in zip(rate, rates["read"])),
        }
        for method, rate in rates.items()
    ]


def machine(options: argparse.Namespace) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                cpu = value.strip()
    here = Path(__file__).resolve().parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here).stdout.strip()
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": 1,
        "paths": PATHS,
        "clock": options.clock,
        "mib": options.mib,
        "rounds": options.rounds,
        "torch": torch.__version__,
        "commit": commit,
    }


def show(report: dict[str, Any]) -> None:
    here = report["machine"]
    console = Console(width=120)
    console.print(f"{here['cpu']}, 1 thread of {here['cpus']}, load {here['load']:.1f}, {here['clock']} clock")
    console.print(f"torch {here['torch']}, commit {here['commit'][:12]}")
    table = Table(title=f"digests of {here['mib']} MiB")
    for column in ("dtype", "method", "GiB/s", "of read"):
        table.add_column(column, justify="right")
    for row in report["rows"]:
        table.add_row(row["dtype"], row["method"], f"{row['gib_per_s']:.2f}", f"{row['of_read']:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
