"""Tokens per second of vLLM with tbik's plug-in over stock vLLM, both engines alive, rounds interleaved.

    python bench/serve.py --json bench/results/serve.json         smollm2 at TP 1, a wide random Qwen3 at TP 1 and 2
    python bench/serve.py --only all_reduce                       vLLM's tensor-parallel all-reduce alone, TP 2
    python bench/serve.py --clock cpu --tp 1                      processor seconds, on a machine that others use too

ratio = stock's seconds / tbik's seconds of one round (above 1: tbik is faster); reported: the median of the rounds, and
the lowest and highest. Loads: "prefill" = 8 prompts of 256 tokens, 4 new tokens each, counted in prompt tokens;
"decode" = 8 prompts of 16 tokens, 64 new tokens each, counted in new tokens. No log-probabilities are asked for. The
tokens are compared as they come: tbik's must be the same in every round and at TP 1 and 2.
An engine that does not serve is stopped (SIGSTOP): the ranks of an idle vLLM go on polling.
all_reduce: what TBIK_VLLM=allreduce calls against vLLM's own shared-memory all-reduce, bf16, in place; two ranks that
have no engine call both in turn.
Needs vLLM (make vllm).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

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
    parser.add_argument("--leaf", choices=("fma", "amx"), default="fma", help="of our plan (ORDER.md A14)")
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
            rows += all_reduce(options)
    _print(rows)
    if options.json:
        facts = {
            **where,
            "clock": options.clock,
            "load": os.getloadavg()[0],
            "loads": [asdict(load) for load in options.loads],
        }
        facts |= {"leaf": options.leaf, "threads": options.threads, "rounds": options.rounds, "dtype": options.dtype}
        options.json.write_text(json.dumps({"environment": facts, "rows": rows}, indent=1) + "\n")


def settings(folder: Path, tp: int, mode: str, options: argparse.Namespace) -> EngineSettings:
    plan = TreePlan.for_model(folder, (1, 2) if tp > 1 else (tp,), equal=True, leaf=options.leaf)
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
                        with _alone(engines[mode], engines.values()):
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


def all_reduce(options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_DIST_IDENT"] = Path(folder).name  # names vLLM's shared memory
        spawn(_time_all_reduce, (folder, options), nprocs=2)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows").read_text())
    return rows


def _time_all_reduce(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One of two ranks that call both all-reduces in turn, each on a processor of its own, as vLLM binds them."""
    from tbik_vllm.communicator import CpuRankSums
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    # the extension's operators are loaded by the platform
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) > 1:
        os.sched_setaffinity(0, {processors[rank]})
    torch.set_num_threads(options.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    stock = CpuCommunicator(group, torch.device("cpu"), group, "tp:0")
    assert stock.supports_tensor_dict, "vLLM does not use its shared memory here"
    own = CpuRankSums([0, 1], rank)
    actions = {"tbik": own.sum_plain, "stock": stock.all_reduce}
    rows = []
    for size in ALL_REDUCE_BYTES:
        calls = max(10, min(1000, (32 << 20) // size))
        x = torch.zeros(size // 2, dtype=torch.bfloat16)
        seconds: dict[str, list[float]] = {mode: [] for mode in actions}
        for number in range(options.rounds + 1):
            for mode in sorted(actions, reverse=bool(number % 2)):
                for _ in range(3):
                    actions[mode](x)
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    actions[mode](x)
                taken = torch.tensor([(time.perf_counter() - start) / calls])
                dist.all_reduce(taken, dist.ReduceOp.MAX)
                if number:
                    seconds[mode].append(taken.item())
        ratios = [stock_s / tbik_s for stock_s, tbik_s in zip(seconds["stock"], seconds["tbik"], strict=True)]
        rows.append(
            {
                "what": f"all-reduce, {size >> 10} KiB",
                "tp": 2,
                "unit": "us",
                **{mode: 1e6 * statistics.median(values) for mode, values in seconds.items()},
                **_spread(ratios),
            }
        )
    if rank == 0:
        (Path(folder) / "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


@contextmanager
def _alone(engine: EngineProcess, engines: Iterable[EngineProcess]) -> Iterator[None]:
    """The others are stopped meanwhile: the ranks of an idle vLLM poll for seconds after their last step."""
    idle = [other.pid for other in engines if other is not engine]
    for pid in idle:
        os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in idle:
            os.killpg(pid, signal.SIGCONT)


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
