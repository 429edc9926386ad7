"""Time of a whole model against stock Hugging Face, on one machine, in one run: prefill, decode, training step.

    python bench/models.py --threads 1 --json bench/results/models.json
    python bench/models.py --isa AVX512_CORE_BF16           torch without AMX (ONEDNN_MAX_CPU_ISA), its own process
    python bench/models.py --leaf amx                       ours in the order of AMX (ORDER.md A14)
    python bench/models.py --clock cpu                      (one thread, a busy machine: seconds of the processor)

Both models have the same bf16 weights; ours is frozen for prefill and decode (packed once), thawed to train. Calls
alternate: ours, stock, ours, stock, ...; a ratio is the median of stock/ours over the pairs (above 1: ours is faster).
prefill: one prompt, logits of its last token, with a cache. decode: one token of each sequence after `context`.
training: forward and backward of one micro-step, `samples x tokens`; stock's gradients are bf16 sums.
Memory: resident set of a process that does one thing with one of the models, at its highest.
"""

from __future__ import annotations

import argparse
import dataclasses
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

from rich.console import Console
from rich.table import Table

PREFILL_TOKENS = (128, 512)
DECODE = ((1, 128), (8, 128))  # sequences, context
TRAINING = ((8, 64),)  # samples, tokens
KINDS = ("prefill", "decode", "training")

Call = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint folder; SmolLM2 by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5, help="measured pairs of calls")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--isa", help="ONEDNN_MAX_CPU_ISA for torch's own products, e.g. AVX512_CORE_BF16")
    parser.add_argument("--leaf", choices=("fma", "amx"), default="fma", help="order inside a leaf (ORDER.md A14)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread, on a busy machine")
    parser.add_argument("--no-memory", action="store_true", help="leave the resident sets out")
    parser.add_argument("--json", type=Path, help="write machine and rows")
    parser.add_argument("--only", nargs=2, metavar=("WHO", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts the calling thread only; use --threads 1")
    if options.isa and os.environ.get("ONEDNN_MAX_CPU_ISA") != options.isa:  # read once, when torch is loaded
        os.environ["ONEDNN_MAX_CPU_ISA"] = options.isa
        os.execv(sys.executable, [sys.executable, *sys.argv])
    import torch

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.only:
        print(json.dumps(resident_set(options)))
        return
    ours, stock = models_of(options)
    rows = []
    for kind in ("prefill", "decode"):
        if kind in options.kinds:
            for label, tokens, mine, theirs in inference_calls(kind, ours, stock):
                rows.append(compare(kind, label, tokens, mine, theirs, options))
    if "training" in options.kinds:
        import tbik

        tbik.unfreeze(ours)
        ours.train(), stock.train()
        for samples, length in TRAINING:
            mine, theirs = (training_call(model, samples, length) for model in (ours, stock))
            rows.append(compare("training", f"{samples} x {length}", samples * length, mine, theirs, options))
    memory = {} if options.no_memory else {kind: both_resident_sets(kind, options) for kind in options.kinds}
    import transformers

    from tbik import _C
    from tbik.verify import cpu_name

    machine = {
        "cpu": cpu_name(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "threads": options.threads,
        "clock": options.clock, "leaf": options.leaf, "path": _C.default_path("bfloat16"), "torch": torch.__version__,
        "onednn_isa": options.isa or "as it comes", "python": platform.python_version(),
        "transformers": transformers.__version__, "commit": commit(),
    }  # fmt: skip
    show(machine, rows, memory)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": rows, "memory": memory}, indent=1) + "\n")


def commit() -> str:
    here = Path(__file__).parent
    name = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=here).stdout.strip()
    changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, cwd=here).stdout
    return name + ("+" if changed.strip() else "")


def folder_of(options: argparse.Namespace) -> Path:
    from tbik import models

    return Path(options.model) if options.model else models.smollm2()


def our_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoConfig

    import tbik
    from tbik.huggingface.parallelize import default_plan

    folder = folder_of(options)
    plan = dataclasses.replace(default_plan(AutoConfig.from_pretrained(folder)), leaf=options.leaf)
    return tbik.load_checkpoint(folder, plan=plan, dtype=torch.bfloat16)


def stock_model(options: argparse.Namespace) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    stock: Any = AutoModelForCausalLM.from_pretrained(folder_of(options), dtype=torch.bfloat16)
    return stock.eval()


def models_of(options: argparse.Namespace) -> tuple[Any, Any]:
    import tbik

    return tbik.freeze(our_model(options), allow_tied=True), stock_model(options)


def prefill_call(model: Any, tokens: int) -> Call:
    import torch

    ids = torch.arange(tokens)[None] * 37 % 40000

    def call() -> Any:
        with torch.no_grad():
            return model(ids, use_cache=True, logits_to_keep=1)

    return call


def decode_call(model: Any, sequences: int, context: int) -> Call:
    """One step; the cache is cut back to the context after each."""
    import torch

    ids = torch.arange(sequences * context).view(sequences, context) * 37 % 40000
    with torch.no_grad():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    token = torch.ones(sequences, 1, dtype=torch.int64)

    def call() -> Any:
        with torch.no_grad():
            output = model(token, past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return output

    return call


def training_call(model: Any, samples: int, length: int) -> Call:
    import torch

    ids = torch.arange(samples * length).view(samples, length) * 37 % 40000

    def call() -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids, use_cache=False).loss.backward()

    return call


def inference_calls(kind: str, ours: Any, stock: Any) -> list[tuple[str, int, Call, Call]]:
    if kind == "prefill":
        return [(str(n), n, prefill_call(ours, n), prefill_call(stock, n)) for n in PREFILL_TOKENS]
    return [
        (f"{b} after {context}", b, decode_call(ours, b, context), decode_call(stock, b, context))
        for b, context in DECODE
    ]


def compare(kind: str, label: str, tokens: int, ours: Call, stock: Call, options: argparse.Namespace) -> dict[str, Any]:
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    repeats = 8 if kind == "decode" else 1

    def seconds(call: Call) -> float:
        start = clock()
        for _ in range(repeats):
            call()
        return (clock() - start) / repeats

    ours(), stock()
    pairs = [(seconds(ours), seconds(stock)) for _ in range(options.pairs)]
    mine, theirs = (statistics.median(pair[i] for pair in pairs) for i in range(2))
    return {
        "kind": kind,
        "what": label,
        "ours_tokens_per_s": tokens / mine,
        "stock_tokens_per_s": tokens / theirs,
        "ratio": statistics.median(b / a for a, b in pairs),
    }


# --- memory -----------------------------------------------------------------------------------------------------------


def both_resident_sets(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    return {who: in_a_process(who, kind, options) for who in ("ours", "stock")}


def in_a_process(who: str, kind: str, options: argparse.Namespace) -> Any:
    command = [sys.executable, __file__, "--threads", str(options.threads), "--only", who, kind]
    command += ["--model", options.model] if options.model else []
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def resident_set(options: argparse.Namespace) -> dict[str, float]:
    """MiB after loading, and at its highest after the calls."""
    import tbik

    who, kind = options.only
    model = our_model(options) if who == "ours" else stock_model(options)
    if kind == "training":
        model.train()
        training_call(model, *TRAINING[-1])()
    else:
        if who == "ours":
            tbik.freeze(model, allow_tied=True)
        loaded = highest_mib()
        call = prefill_call(model, PREFILL_TOKENS[-1]) if kind == "prefill" else decode_call(model, *DECODE[-1])
        call()
        return {"loaded_mib": loaded, "highest_mib": highest_mib()}
    return {"highest_mib": highest_mib()}


def highest_mib() -> int:
    """Of this program; ru_maxrss would begin with that of the process that started it."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) // 1024


def show(machine: dict[str, Any], rows: list[dict[str, Any]], memory: dict[str, Any]) -> None:
    table = Table(title=", ".join(f"{name} {value}" for name, value in machine.items()))
    for column in ("what", "", "ours tokens/s", "stock tokens/s", "stock time/our time"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = (f"{row[name]:.1f}" for name in ("ours_tokens_per_s", "stock_tokens_per_s"))
        table.add_row(row["kind"], row["what"], *numbers, f"{row['ratio']:.2f}")
    Console().print(table)
    for kind, sets in memory.items():
        Console().print(
            f"{kind}: highest resident set " + ", ".join(f"{w} {s['highest_mib']} MiB" for w, s in sets.items())
        )


if __name__ == "__main__":
    main()
