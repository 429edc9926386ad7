"""Proves and times the CUDA side on one GPU, part by part; each part stays below 10 minutes and can be run again alone.

    python bench/gpu.py                          # all parts; bench/results/gpu.json and gpu.md
    python bench/gpu.py --parts linear --output ""
    python bench/gpu.py --dry-run                # no GPU: tiny sizes in triton's interpreter, no figure means anything

bits:      the tests of tbik.kernels (on the GPU where there is one), whole form = split form of the tensor-core leaf,
           a row alone = the row in a batch, CUDA graph = eager, fma leaf = the CPU's kernel
combine:   folds of R buffers, GB/s
linear:    tree matmul beside torch.mm (cuBLAS), the four large shapes and M = 1, 8, 16, 64
Not written yet: all-reduce over peer memory, attention, norms, fingerprint, a batch-invariant persistent matmul beside.

Timings are medians by CUDA events (triton.testing.do_bench). A part that fails is reported and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "gpu"
LARGE = ((1024, 6144, 2048), (2048, 4096, 4096), (2048, 25600, 5120), (8192, 8192, 8192))  # M, K, N
FEW_ROWS = tuple((m, 4096, 4096) for m in (1, 8, 16, 64))
TINY = ((17, 32, 18), (1, 32, 18))
LEAVES = 8


class Setting:
    """Where the parts run, and with which sizes."""

    def __init__(self, is_dry: bool) -> None:
        import torch

        self.is_dry = is_dry
        self.device = "cpu" if is_dry else "cuda"
        self.shapes = TINY if is_dry else (*LARGE, *FEW_ROWS)
        self.leaves = 2 if is_dry else LEAVES
        if is_dry:
            self.architecture = "sm_90"
        else:
            major, minor = torch.cuda.get_device_capability()
            self.architecture = f"sm_{major}{minor}"
        self.leaf = f"mma:{self.architecture}"

    def tile(self) -> Any:
        """None: the table's. In the interpreter a small one, which has the same leaves."""
        from tbik.kernels.tiles import Tile

        return Tile(16, 16, 16, 4, 1, 1) if self.is_dry else None

    def operands(self, m: int, k: int, n: int) -> tuple[Any, Any]:
        import torch

        generator = torch.Generator().manual_seed(m + k + n)
        return tuple(torch.randn(shape, generator=generator).bfloat16().to(self.device) for shape in ((m, k), (n, k)))

    def time_ms(self, work: Callable[[], Any]) -> float:
        if self.is_dry:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e3
        import triton

        return float(triton.testing.do_bench(work, return_mode="median"))


def matmul(setting: Setting, x: Any, w: Any, **options: Any) -> Any:
    import torch

    from tbik import _C, TreePlan
    from tbik.kernels import matmul as kernel

    plan = TreePlan(leaves=setting.leaves)
    schedule = schedules.setdefault(setting.leaves, _C.run_schedule(0, setting.leaves, setting.leaves, True, False))
    options = {"leaf": setting.leaf, "out_dtype": torch.bfloat16, "tile": setting.tile(), **options}
    return kernel.contract([x], [w], [plan.cuts(x.shape[1])], schedule, **options)


schedules: dict[int, Any] = {}  # one object per schedule: tables are kept by it


def require_equal(what: str, actual: Any, expected: Any) -> None:
    import torch

    bits = {2: torch.int16, 4: torch.int32}[actual.element_size()]
    differing = int((actual.cpu().view(bits) != expected.cpu().view(bits)).sum())
    if differing:
        raise AssertionError(f"{what}: {differing} of {actual.numel()} elements differ in bits")


def part_bits(setting: Setting) -> list[dict[str, Any]]:
    import torch

    rows = []
    for m, k, n in setting.shapes if setting.is_dry else (*LARGE[:2], *FEW_ROWS):
        x, w = setting.operands(m, k, n)
        whole = matmul(setting, x, w, form="whole")
        require_equal(f"whole = split at {m}x{k}x{n}", matmul(setting, x, w, form="split"), whole)
        require_equal(f"row alone at {m}x{k}x{n}", matmul(setting, x[-1:], w), whole[-1:])
        if not setting.is_dry:
            require_equal(f"CUDA graph at {m}x{k}x{n}", in_graph(lambda x=x, w=w: matmul(setting, x, w)), whole)
        rows.append({"check": "whole = split = row alone" + ("" if setting.is_dry else " = graph"), "shape": [m, k, n]})
    x, w = setting.operands(3, 12, 5) if setting.is_dry else setting.operands(33, 257, 65)
    if not setting.is_dry:  # the interpreter's fma rounds twice; the tests put the correct one in its place
        from tbik import TreePlan, ops

        actual = matmul(setting, x, w, leaf="fma")
        require_equal("fma = CPU", actual, ops.linear(x.cpu(), w.cpu(), plan=TreePlan(leaves=setting.leaves)))
        rows.append({"check": "fma leaf = CPU", "shape": [33, 257, 65]})
        tests = sorted(str(path) for path in (ROOT / "tests").glob("test_kernels_*.py"))
        subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], check=True, timeout=540, cwd=ROOT)
        rows.append({"check": "tests of tbik.kernels", "shape": []})
    assert torch.isfinite(whole.float()).all()
    return rows


def in_graph(work: Callable[[], Any]) -> Any:
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles, and puts the tables on the device
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    graph.replay()
    torch.cuda.synchronize()
    return out


def part_combine(setting: Setting) -> list[dict[str, Any]]:
    import torch

    from tbik import _C
    from tbik.kernels import combine

    rows = []
    elements = 256 if setting.is_dry else 2**24
    for buffers in (2,) if setting.is_dry else (2, 4, 8):
        x = torch.randn(buffers, elements, device=setting.device)
        schedule = _C.run_schedule(0, buffers, buffers, True, False)
        ms = setting.time_ms(lambda x=x, schedule=schedule: combine.combine(x, schedule, out_dtype=torch.bfloat16))
        moved = x.numel() * 4 + elements * 2
        rows.append({"buffers": buffers, "elements": elements, "ms": ms, "GB_per_s": moved / ms / 1e6})
    return rows


def part_linear(setting: Setting) -> list[dict[str, Any]]:
    import torch

    rows = []
    for m, k, n in setting.shapes:
        x, w = setting.operands(m, k, n)
        ms = setting.time_ms(lambda x=x, w=w: matmul(setting, x, w))
        row: dict[str, Any] = {"shape": [m, k, n], "tree_ms": ms, "tree_TFLOPS": 2e-9 * m * n * k / ms}
        row["torch_ms"] = setting.time_ms(lambda x=x, w=w: torch.mm(x, w.t()))
        row["speed_of_torch"] = row["torch_ms"] / ms
        for levels in (0, 1, 2):  # the candidates of the register question, measured
            from tbik.kernels.tiles import MMA_TILES

            tile = (setting.tile() or MMA_TILES[setting.architecture].whole)._replace(register_levels=levels)
            work = lambda x=x, w=w, tile=tile: matmul(setting, x, w, form="whole", tile=tile)  # noqa: E731
            row[f"whole_{levels}_levels_ms"] = setting.time_ms(work)
        rows.append(row)
    return rows


PARTS: dict[str, Callable[[Setting], list[dict[str, Any]]]] = {
    "bits": part_bits,
    "combine": part_combine,
    "linear": part_linear,
}


def versions(setting: Setting) -> dict[str, Any]:
    import torch
    import triton

    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    gpu = "none (dry run, interpreter)" if setting.is_dry else torch.cuda.get_device_name()
    return {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__, "commit": commit}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU, in triton's interpreter")
    parser.add_argument("--output", default=str(RESULTS), help="path without suffix for .json and .md; empty: none")
    args = parser.parse_args()
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; expected some of {list(PARTS)}")
    if args.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
        args.output = ""
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run goes through every part on the CPU")
    setting = Setting(args.dry_run)
    path = Path(args.output + ".json") if args.output else None
    result: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {"parts": {}}
    result["versions"] = versions(setting)
    failed = []
    for name in args.parts.split(","):
        start = time.perf_counter()
        try:
            rows = PARTS[name](setting)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        for row in rows:
            print(name, json.dumps(row), flush=True)
        result["parts"][name] = {"rows": rows, "seconds": time.perf_counter() - start, **result["versions"]}
        if path:  # after every part, so that a run can be continued
            path.write_text(json.dumps(result, indent=1) + "\n")
            Path(args.output + ".md").write_text(as_table(result))
    print(f"{len(args.parts.split(',')) - len(failed)} parts passed, failed: {failed or 'none'}")
    return 1 if failed else 0


def as_table(result: dict[str, Any]) -> str:
    text = [
        "# One GPU",
        "",
        "`python bench/gpu.py`; " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()),
        "",
    ]
    for name, part in result["parts"].items():
        columns = list(dict.fromkeys(column for row in part["rows"] for column in row))
        text += [f"## {name}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in part["rows"]:
            cells = (f"{row[c]:.4g}" if isinstance(row.get(c), float) else str(row.get(c, "")) for c in columns)
            text.append("| " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


if __name__ == "__main__":
    sys.exit(main())
