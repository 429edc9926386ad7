"""Time of attention against torch's scaled_dot_product_attention, on one machine, in one run.

    python bench/attention.py --threads 1 --json bench/results/attention.json
    python bench/attention.py --clock cpu            (one thread, a busy machine: seconds of the processor)

Prefill (causal, one sequence), its backward, and decode (8 sequences, context 2,000, pages of 16). Calls alternate:
ours, torch, ours, torch, ...; a ratio is the median of torch/ours over the pairs (above 1: ours is faster). Torch gets
contiguous [B, H, T, D] tensors, keys of decode already gathered; ours reads packed tokens and shuffled pages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tbik import _C, ops
from tbik.verify import commit

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
HEADS = ((8, 2, 64), (8, 2, 128))  # query heads, KV heads, head_dim
LENGTHS = (512, 2048)
BATCH, CONTEXT, PAGE = 8, 2000, 16

Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bfloat16", "float32"])
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs of calls")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread, on a busy machine")
    parser.add_argument("--json", type=Path, help="write machine and rows")
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts the calling thread only; use --threads 1")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for name in options.dtypes:
        for heads in HEADS:
            for tokens in LENGTHS:
                rows.append(compare("prefill", name, heads, tokens, *prefill(DTYPES[name], heads, tokens), options))
                rows.append(compare("backward", name, heads, tokens, *backward(DTYPES[name], heads, tokens), options))
            rows.append(compare("decode", name, heads, CONTEXT, *decode(DTYPES[name], heads), options))
    machine = {
        "cpu": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "threads": options.threads,
        "clock": options.clock, "path": _C.default_path("float32"), "torch": torch.__version__,
        "commit": commit(),
        "python": platform.python_version(),
    }  # fmt: skip
    show(machine, rows)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def tokens_of(dtype: torch.dtype, heads: tuple[int, int, int], tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    query_heads, kv_heads, dim = heads
    q, k, v = (torch.randn(tokens, h, dim).to(dtype) for h in (query_heads, kv_heads, kv_heads))
    return q, k, v


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None].contiguous()


def prefill(dtype: torch.dtype, heads: tuple[int, int, int], tokens: int) -> tuple[Call, Call]:
    x = tokens_of(dtype, heads, tokens)
    y = [heads_first(t) for t in x]
    return lambda: ops.attention(*x), lambda: scaled_dot_product_attention(*y, is_causal=True, enable_gqa=True)


def backward(dtype: torch.dtype, heads: tuple[int, int, int], tokens: int) -> tuple[Call, Call]:
    x = [t.requires_grad_() for t in tokens_of(dtype, heads, tokens)]
    y = [heads_first(t.detach()).requires_grad_() for t in x]
    grad = torch.randn(x[0].shape).to(dtype)
    out = ops.attention(*x)
    stock = scaled_dot_product_attention(*y, is_causal=True, enable_gqa=True)
    stock_grad = heads_first(grad)
    return (
        lambda: torch.autograd.grad(out, x, grad, retain_graph=True),
        lambda: torch.autograd.grad(stock, y, stock_grad, retain_graph=True),
    )


def decode(dtype: torch.dtype, heads: tuple[int, int, int]) -> tuple[Call, Call]:
    query_heads, kv_heads, dim = heads
    pages = BATCH * CONTEXT // PAGE
    caches = [torch.randn(pages, PAGE, kv_heads, dim).to(dtype) for _ in range(2)]
    table = torch.randperm(pages).to(torch.int32).view(BATCH, -1)
    lengths, starts = torch.full((BATCH,), CONTEXT), torch.arange(BATCH + 1)
    q = torch.randn(BATCH, query_heads, dim).to(dtype)
    k, v = (cache[table.long()].reshape(BATCH, CONTEXT, kv_heads, dim).transpose(1, 2).contiguous() for cache in caches)
    q_BH1D = q[:, :, None]
    return (
        lambda: ops.paged_attention(q, *caches, table, lengths, starts),
        lambda: scaled_dot_product_attention(q_BH1D, k, v, enable_gqa=True),
    )


def compare(
    kind: str,
    dtype: str,
    heads: tuple[int, int, int],
    tokens: int,
    ours: Call,
    stock: Call,
    options: argparse.Namespace,
) -> dict[str, Any]:
    clock = time.perf_counter if options.clock == "wall" else time.thread_time

    def seconds(call: Call) -> float:
        start = clock()
        call()
        return clock() - start

    ours(), stock()
    pairs = [(seconds(ours), seconds(stock)) for _ in range(options.pairs)]
    return {
        "kind": kind,
        "dtype": dtype,
        "heads": heads,
        "tokens": tokens,
        "ours_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "torch_ms": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def show(machine: dict[str, Any], rows: list[dict[str, Any]], other: str = "torch") -> None:
    table = Table(title=", ".join(f"{name} {value}" for name, value in machine.items()))
    for column in ("what", "dtype", "heads, KV, D", "tokens", "ours ms", f"{other} ms", f"{other}/ours"):
        table.add_column(column, justify="right")
    for row in rows:
        times = (f"{row[name]:.2f}" for name in ("ours_ms", f"{other}_ms", "ratio"))
        table.add_row(row["kind"], row["dtype"], str(row["heads"]), str(row["tokens"]), *times)
    Console().print(table)


if __name__ == "__main__":
    main()
