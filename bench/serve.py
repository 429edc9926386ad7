"""Tokens per second of vLLM with tbik's plug-in over stock vLLM, both engines alive, rounds interleaved.

    python bench/serve.py --json bench/results/serve.json         smollm2 at TP 1, a wide random Qwen3 at TP 1 and 2
    python bench/serve.py --only all_reduce                       vLLM's tensor-parallel all-reduce alone, TP 2
    python bench/serve.py --clock cpu --tp 1                      processor seconds, on a machine that others use too

ratio = stock's seconds / tbik's seconds of one round (above 1: tbik is faster); reported: the median of the rounds, and
the lowest and highest. Loads: "prefill" = 8 prompts of 256 tokens, 4 new tokens each, counted in prompt tokens;
"decode" = 8 prompts of 16 tokens, 64 new tokens each, counted in new tokens. No log-probabilities are asked for. The
tokens are compared as they come: tbik's must be the same in every round and at TP 1 and 2.
all_reduce: TBIK_VLLM=allreduce against vLLM's own shared-memory all-reduce, bf16, in place, called as the layers do.
Needs vLLM (make vllm).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tbik import models
from tbik.engines import EngineProcess, EngineSettings
from tbik.plan import TreePlan
from tbik.verify import environment

WIDE = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 4096,
}
ALL_REDUCE_BYTES = (4 << 10, 24 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)


@dataclass(frozen=True)
class Load:
    name: str
    prompts: int
    prompt_tokens: int
    new_tokens: int

    @property
    def counted(self) -> int:
        return self.prompts * (self.prompt_tokens if self.name == "prefill" else self.new_tokens)


LOADS = (Load("prefill", 8, 256, 4), Load("decode", 8, 16, 64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="OpenMP threads of a rank")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="sizes for the wide model")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: of the engine's process, at TP 1 with one thread"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the prompts and answers of both loads")
    parser.add_argument("--only", nargs="+", choices=("smollm2", "wide", "all_reduce"), default=None)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    wanted = options.only or ("smollm2", "wide", "all_reduce")
    if options.clock == "cpu" and (options.tp != [1] or options.threads != 1 or "all_reduce" in wanted):
        parser.error("--clock cpu sees one thread of one process: --tp 1 --only smollm2 wide")
    os.environ["HF_HUB_OFFLINE"] = "1"
    options.loads = [
        replace(
            load,
            **{name: max(1, round(getattr(load, name) * options.scale)) for name in ("prompt_tokens", "new_tokens")},
        )
        for load in LOADS
    ]
    rows: list[dict[str, Any]] = []
    where = environment()
    with tempfile.TemporaryDirectory() as scratch:
        wide = models.random_model("qwen3", Path(scratch) / "wide", **WIDE)
        if "smollm2" in wanted:
            rows += serve("smollm2", models.smollm2(), (1,), options)
        if "wide" in wanted:
            rows += serve("wide Qwen3", wide, tuple(options.tp), options)
        if "all_reduce" in wanted:
            rows += all_reduce(wide, options)
    _print(rows)
    if options.json:
        facts = {
            **where,
            "clock": options.clock,
            "load": os.getloadavg()[0],
            "loads": [asdict(load) for load in options.loads],
        }
        facts |= {"threads": options.threads, "rounds": options.rounds, "dtype": options.dtype}
        options.json.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")


def settings(folder: Path, tp: int, mode: str, options: argparse.Namespace) -> EngineSettings:
    plan = TreePlan.for_model(folder, (1, 2) if tp > 1 else (tp,), equal=True)
    return EngineSettings(
        "vllm", str(folder), tp=tp, mode=mode, plan=plan, dtype=options.dtype, longest=320, threads=options.threads
    )


def serve(name: str, folder: Path, sizes: tuple[int, ...], options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    served: dict[str, Any] = {}
    for tp in sizes:
        with ExitStack() as stack:
            engines = {
                mode: stack.enter_context(EngineProcess(settings(folder, tp, mode, options)))
                for mode in ("tbik", "stock")
            }
            for load in options.loads:
                vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
                generator = torch.Generator().manual_seed(1)
                prompts = torch.randint(vocab, (load.prompts, load.prompt_tokens), generator=generator).tolist()
                seconds: dict[str, list[float]] = {mode: [] for mode in engines}
                for number in range(options.rounds + 1):
                    # whoever goes first in one round goes last in the next; round 0 warms up
                    for mode in sorted(engines, reverse=bool(number % 2)):
                        answers, taken = engines[mode].generate(prompts, load.new_tokens, top=0)
                        taken = engines[mode].processor_s if options.clock == "cpu" else taken
                        if number:
                            seconds[mode].append(taken)
                        if mode == "tbik":
                            tokens = [answer.tokens for answer in answers]
                            assert served.setdefault(load.name, tokens) == tokens, f"{name}, TP={tp}: other tokens"
                ratios = [stock / tbik for stock, tbik in zip(seconds["stock"], seconds["tbik"], strict=True)]
                rows.append(
                    {
                        "what": f"{name}, {load.name}",
                        "tp": tp,
                        "unit": "tokens/s",
                        **{mode: load.counted / statistics.median(values) for mode, values in seconds.items()},
                        **_spread(ratios),
                    }
                )
    return rows


def all_reduce(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with ExitStack() as stack:
        engines = {
            mode: stack.enter_context(EngineProcess(settings(folder, 2, switch, options)))
            for mode, switch in (("tbik", "allreduce"), ("stock", "stock"))
        }
        for size in ALL_REDUCE_BYTES:
            calls = max(10, min(1000, (32 << 20) // size))
            seconds: dict[str, list[float]] = {mode: [] for mode in engines}
            for number in range(options.rounds + 1):
                for mode in sorted(engines, reverse=bool(number % 2)):
                    taken = max(engines[mode].call("tbik_time_all_reduce", str(size // 2), str(calls)))
                    if number:
                        seconds[mode].append(taken)
            ratios = [stock / tbik for stock, tbik in zip(seconds["stock"], seconds["tbik"], strict=True)]
            rows.append(
                {
                    "what": f"all-reduce, {size >> 10} KiB",
                    "tp": 2,
                    "unit": "us",
                    **{mode: 1e6 * statistics.median(values) for mode, values in seconds.items()},
                    **_spread(ratios),
                }
            )
    return rows


def _spread(ratios: list[float]) -> dict[str, float]:
    return {"ratio": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for name in ("", "TP", "tbik", "stock", "unit", "ratio", "lowest", "highest"):
        table.add_column(name, justify="left" if name in ("", "unit") else "right")
    for row in rows:
        numbers = [f"{row[key]:.1f}" for key in ("tbik", "stock")]
        ratios = [f"{row[key]:.2f}" for key in ("ratio", "lowest", "highest")]
        table.add_row(row["what"], str(row["tp"]), *numbers, row["unit"], *ratios)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
