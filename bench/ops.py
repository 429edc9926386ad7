"""Time of the row operators against what torch runs in eager mode, on one machine, in one run.

    python bench/ops.py --threads 1 --json bench/results/ops.json
    python bench/ops.py --only rms_norm rope

Calls alternate (ours, torch, ours, torch, ...); a ratio is the median of torch/ours over the pairs (above 1: ours is
faster). Torch's side: its own operator where it has one, else the lines of transformers' Llama. A case is a function
(dtype) -> (ours, torch's) under @case, which lists it in CASES.
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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from tbik import ops
from tbik.verify import commit

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
EPS = 1e-6
Call = Callable[[], Any]


class Case(NamedTuple):
    name: str
    shape: str
    dtypes: tuple[str, ...]
    make: Callable[[torch.dtype], tuple[Call, Call]]
    target: float


CASES: list[Case] = []


def case(
    name: str, shape: str, dtypes: tuple[str, ...] = tuple(DTYPES), target: float = 1.0
) -> Callable[[Callable[[torch.dtype], tuple[Call, Call]]], Callable[[torch.dtype], tuple[Call, Call]]]:
    """Adds a case: a function of the dtype that gives our call and torch's. target: the ratio to reach."""

    def add(make: Callable[[torch.dtype], tuple[Call, Call]]) -> Callable[[torch.dtype], tuple[Call, Call]]:
        CASES.append(Case(name, shape, dtypes, make, target))
        return make

    return add


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[], help="names of cases, or parts of them")
    parser.add_argument("--pairs", type=int, default=15, help="measured pairs of calls, at least")
    parser.add_argument("--seconds", type=float, default=0.5, help="time that cheap cases fill with more pairs")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: one thread, on a busy machine")
    parser.add_argument("--json", type=Path, help="write machine and rows")
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts the calling thread only; use --threads 1")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    chosen = [c for c in CASES if not options.only or any(part in c.name for part in options.only)]
    rows = [measure(c, name, options) for c in chosen for name in c.dtypes]
    report = {"machine": machine(options), "rows": rows}
    show(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(c: Case, name: str, options: argparse.Namespace) -> dict[str, Any]:
    ours, torchs = c.make(DTYPES[name])
    clock = time.perf_counter if options.clock == "wall" else time.thread_time

    def seconds(call: Call) -> float:
        start = clock()
        call()
        return clock() - start

    warm = min(seconds(ours) + seconds(torchs) for _ in range(3))
    pairs = max(options.pairs, min(400, int(options.seconds / warm)))
    mine: list[float] = []
    theirs: list[float] = []
    for i in range(pairs):
        for call, times in ((ours, mine), (torchs, theirs))[:: 1 if i % 2 else -1]:
            times.append(seconds(call))
    return {
        "case": c.name,
        "shape": c.shape,
        "dtype": name,
        "pairs": pairs,
        "tbik_us": 1e6 * statistics.median(mine),
        "torch_us": 1e6 * statistics.median(theirs),
        "ratio": statistics.median(b / a for a, b in zip(mine, theirs)),
        "target": c.target,
    }


def machine(options: argparse.Namespace) -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
    return {
        "cpu": cpu,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "threads": options.threads,
        "clock": options.clock,
        "commit": commit(),
        "torch": torch.__version__,
    }


def show(report: dict[str, Any]) -> None:
    here, console = report["machine"], Console(width=120)
    console.print(
        f"{here['cpu']}, {here['threads']} thread(s) of {here['cpus']}, load {here['load']:.1f}, {here['clock']} clock"
    )
    table = Table(title=f"torch {here['torch']} eager: ratio = torch time / tbik time, median over pairs")
    for column in ("case", "shape", "dtype", "tbik us", "torch us", "ratio"):
        table.add_column(column, justify="left" if column in ("case", "shape", "dtype") else "right")
    for row in report["rows"]:
        colour = "green" if row["ratio"] >= row["target"] else "red"
        ratio = f"[{colour}]{row['ratio']:.2f}[/{colour}]"
        table.add_row(row["case"], row["shape"], row["dtype"], f"{row['tbik_us']:.1f}", f"{row['torch_us']:.1f}", ratio)
    console.print(table)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def with_backward(function: Callable[..., Any], inputs: list[Tensor], upstream: list[Tensor]) -> Call:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]

    def call() -> None:
        outputs = function(*leaves)
        torch.autograd.grad(outputs, leaves, upstream)

    return call


def llama_rms_norm(x: Tensor, w: Tensor) -> Tensor:
    """transformers' LlamaRMSNorm."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(x.dtype)


def llama_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """transformers' apply_rotary_pos_emb for one tensor, tables in the model dtype."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


NORMS = ((512, 4096), (2048, 1024), (8, 4096))

for _tokens, _hidden in NORMS:
    _shape = f"{_tokens} x {_hidden}"

    @case("rms_norm, F.rms_norm", _shape)
    def _rms_norm(dtype: torch.dtype, m: int = _tokens, k: int = _hidden) -> tuple[Call, Call]:
        x, w = normal(m, k, dtype=dtype), normal(k, dtype=dtype)
        return lambda: ops.rms_norm(x, w, EPS), lambda: F.rms_norm(x, (k,), w, EPS)

    @case("rms_norm, Llama's lines", _shape)
    def _rms_norm_lines(dtype: torch.dtype, m: int = _tokens, k: int = _hidden) -> tuple[Call, Call]:
        x, w = normal(m, k, dtype=dtype), normal(k, dtype=dtype)
        return lambda: ops.rms_norm(x, w, EPS), lambda: llama_rms_norm(x, w)

    @case("add_rms_norm", _shape)
    def _add_rms_norm(dtype: torch.dtype, m: int = _tokens, k: int = _hidden) -> tuple[Call, Call]:
        x, residual, w = normal(m, k, dtype=dtype), normal(m, k, dtype=dtype), normal(k, dtype=dtype)
        return lambda: ops.add_rms_norm(x, residual, w, EPS), lambda: F.rms_norm(x + residual, (k,), w, EPS)

    @case("layer_norm", _shape)
    def _layer_norm(dtype: torch.dtype, m: int = _tokens, k: int = _hidden) -> tuple[Call, Call]:
        x, w, b = normal(m, k, dtype=dtype), normal(k, dtype=dtype), normal(k, dtype=dtype)
        return lambda: ops.layer_norm(x, w, b, EPS), lambda: F.layer_norm(x, (k,), w, b, EPS)


@case("rms_norm, forward + backward", "512 x 4096")
def _rms_norm_training(dtype: torch.dtype) -> tuple[Call, Call]:
    x, w, dy = normal(512, 4096, dtype=dtype), normal(4096, dtype=dtype), normal(512, 4096, dtype=dtype)
    ours = with_backward(lambda x, w: ops.rms_norm(x, w, EPS), [x, w], [dy])
    return ours, with_backward(lambda x, w: F.rms_norm(x, (4096,), w, EPS), [x, w], [dy])


@case("layer_norm, forward + backward", "512 x 4096")
def _layer_norm_training(dtype: torch.dtype) -> tuple[Call, Call]:
    x, dy = normal(512, 4096, dtype=dtype), normal(512, 4096, dtype=dtype)
    w, b = normal(4096, dtype=dtype), normal(4096, dtype=dtype)
    ours = with_backward(lambda x, w, b: ops.layer_norm(x, w, b, EPS), [x, w, b], [dy])
    return ours, with_backward(lambda x, w, b: F.layer_norm(x, (4096,), w, b, EPS), [x, w, b], [dy])


@case("rms_norm of heads", "512 x 32 x 128")
def _head_norm(dtype: torch.dtype) -> tuple[Call, Call]:
    x, w = normal(512, 32, 128, dtype=dtype), normal(128, dtype=dtype)
    return lambda: ops.rms_norm(x, w, EPS, heads=True), lambda: F.rms_norm(x, (128,), w, EPS)


for _tokens, _hidden in ((512, 4096), (8, 14336)):
    _shape = f"{_tokens} x {_hidden}"

    @case("silu_and_mul", _shape)
    def _silu(dtype: torch.dtype, m: int = _tokens, k: int = _hidden) -> tuple[Call, Call]:
        gate, up = normal(m, k, dtype=dtype), normal(m, k, dtype=dtype)
        return lambda: ops.silu_and_mul(gate, up), lambda: F.silu(gate) * up

    @case("gelu_and_mul", _shape)
    def _gelu(dtype: torch.dtype, m: int = _tokens, k: int = _hidden) -> tuple[Call, Call]:
        gate, up = normal(m, k, dtype=dtype), normal(m, k, dtype=dtype)
        return lambda: ops.gelu_and_mul(gate, up), lambda: F.gelu(gate, approximate="tanh") * up


@case("silu_and_mul, forward + backward", "512 x 4096")
def _silu_training(dtype: torch.dtype) -> tuple[Call, Call]:
    gate, up, dy = (normal(512, 4096, dtype=dtype) for _ in range(3))
    ours = with_backward(ops.silu_and_mul, [gate, up], [dy])
    return ours, with_backward(lambda gate, up: F.silu(gate) * up, [gate, up], [dy])


for _tokens in (512, 8):

    @case("rope", f"{_tokens} x 32 x 128")
    def _rope(dtype: torch.dtype, m: int = _tokens) -> tuple[Call, Call]:
        x = normal(m, 32, 128, dtype=dtype)
        frequencies = ops.inverse_frequencies({"head_dim": 128, "rope_theta": 500000.0})
        sin, cos = ops.rope_tables(torch.arange(m), frequencies.inv_freq)
        wide_sin, wide_cos = (torch.cat([t, t], -1)[:, None].to(dtype) for t in (sin, cos))
        return lambda: ops.rope(x, sin, cos), lambda: llama_rope(x, wide_cos, wide_sin)


@case("rope, forward + backward", "512 x 32 x 128")
def _rope_training(dtype: torch.dtype) -> tuple[Call, Call]:
    x, dy = normal(512, 32, 128, dtype=dtype), normal(512, 32, 128, dtype=dtype)
    sin, cos = ops.rope_tables(torch.arange(512), torch.tensor([500000.0 ** (-i / 64) for i in range(64)]))
    wide_sin, wide_cos = (torch.cat([t, t], -1)[:, None].to(dtype) for t in (sin, cos))
    ours = with_backward(lambda x: ops.rope(x, sin, cos), [x], [dy])
    return ours, with_backward(lambda x: llama_rope(x, wide_cos, wide_sin), [x], [dy])


@case("embedding", "512 of 49152 x 576")
def _embedding(dtype: torch.dtype) -> tuple[Call, Call]:
    w, ids = normal(49152, 576, dtype=dtype), torch.randint(0, 49152, (512,))
    return lambda: ops.embedding(ids, w), lambda: F.embedding(ids, w)


@case("mean", "512 x 4096")
def _mean(dtype: torch.dtype) -> tuple[Call, Call]:
    x = normal(512, 4096, dtype=dtype)
    return lambda: ops.mean(x), lambda: x.mean(-1)


@case("dropout", "512 x 4096")
def _dropout(dtype: torch.dtype) -> tuple[Call, Call]:
    x = normal(512, 4096, dtype=dtype)
    return lambda: ops.dropout(x, 0.1, seed=1, step=1, name="bench"), lambda: F.dropout(x, 0.1)


VOCABULARY = (1024, 49_152)
LEAVES = 8
_shape = "1024 x 49152"


@case("cross_entropy, forward + backward", _shape)
def _cross_entropy_training(dtype: torch.dtype) -> tuple[Call, Call]:
    x, t = normal(*VOCABULARY, dtype=dtype), torch.randint(0, VOCABULARY[1], VOCABULARY[:1])
    one = torch.ones(())
    ours = with_backward(lambda x: ops.cross_entropy(x, t, leaves=LEAVES).total, [x], [one])
    return ours, with_backward(lambda x: F.cross_entropy(x, t, reduction="sum"), [x], [one.to(dtype)])


@case("cross_entropy, forward", _shape)
def _cross_entropy(dtype: torch.dtype) -> tuple[Call, Call]:
    x, t = normal(*VOCABULARY, dtype=dtype), torch.randint(0, VOCABULARY[1], VOCABULARY[:1])
    return lambda: ops.cross_entropy(x, t, leaves=LEAVES), lambda: F.cross_entropy(x, t, reduction="sum")


@case("log_softmax", _shape)
def _log_softmax(dtype: torch.dtype) -> tuple[Call, Call]:
    x = normal(*VOCABULARY, dtype=dtype)
    return lambda: ops.log_softmax(x, LEAVES), lambda: torch.log_softmax(x, -1)


@case("log_softmax, forward + backward", _shape)
def _log_softmax_training(dtype: torch.dtype) -> tuple[Call, Call]:
    x, dy = normal(*VOCABULARY, dtype=dtype), normal(*VOCABULARY, dtype=dtype)
    return with_backward(lambda x: ops.log_softmax(x, LEAVES), [x], [dy]), with_backward(
        lambda x: torch.log_softmax(x, -1), [x], [dy]
    )


@case("softmax", _shape)
def _softmax(dtype: torch.dtype) -> tuple[Call, Call]:
    x = normal(*VOCABULARY, dtype=dtype)
    return lambda: ops.softmax(x, LEAVES), lambda: torch.softmax(x, -1)


@case("softmax, forward + backward", _shape)
def _softmax_training(dtype: torch.dtype) -> tuple[Call, Call]:
    x, dy = normal(*VOCABULARY, dtype=dtype), normal(*VOCABULARY, dtype=dtype)
    return with_backward(lambda x: ops.softmax(x, LEAVES), [x], [dy]), with_backward(
        lambda x: torch.softmax(x, -1), [x], [dy]
    )


@case("logprobs of one id", _shape)
def _logprobs(dtype: torch.dtype) -> tuple[Call, Call]:
    x, t = normal(*VOCABULARY, dtype=dtype), torch.randint(0, VOCABULARY[1], VOCABULARY[:1])
    return lambda: ops.logprobs(x, t, LEAVES), lambda: torch.log_softmax(x.float(), -1).gather(-1, t[:, None])


@case("top 20 logprobs", _shape)
def _top_logprobs(dtype: torch.dtype) -> tuple[Call, Call]:
    x = normal(*VOCABULARY, dtype=dtype)
    return lambda: ops.top_logprobs(x, 20, LEAVES), lambda: torch.log_softmax(x.float(), -1).topk(20)


@case("top 20", _shape)
def _top_k(dtype: torch.dtype) -> tuple[Call, Call]:
    x = normal(*VOCABULARY, dtype=dtype)
    return lambda: ops.top_k(x, 20), lambda: torch.topk(x, 20)


@case("argmax", _shape)
def _argmax(dtype: torch.dtype) -> tuple[Call, Call]:
    x = normal(*VOCABULARY, dtype=dtype)
    return lambda: ops.argmax(x), lambda: torch.argmax(x, -1)


if __name__ == "__main__":
    main()
