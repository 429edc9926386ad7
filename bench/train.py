"""Time of a training step under FSDP2: tbik against torch's own fully_shard, on the same ranks, in one run.

    python bench/train.py --json bench/results/train.json          2 ranks, a Qwen3 of 37 M parameters, bf16 compute
    python bench/train.py --isa AVX512_CORE_BF16                    torch without AMX (ONEDNN_MAX_CPU_ISA)
    python bench/train.py --ours gloo                               our policy on torch's movement as well

A step: A micro-steps of m samples per rank, forward, backward, reduce-scatter, norm and clipping, AdamW. Both sides
keep 1/D of the gradients between micro-steps (a reduce-scatter in each), or with --accumulation unsharded both keep
whole ones (torch: set_requires_gradient_sync, ours: accumulation="unsharded") and exchange once. Steps
alternate (ours, torch in bf16, torch in fp32, ours, ...) in the same processes; ratio = median over the rounds of
ours/torch (below 1: ours is faster). fp32 master weights everywhere; torch's bf16 run has MixedPrecisionPolicy(bf16,
reduce_dtype=fp32). torch has no fast bf16 product on a CPU without bf16 instructions, so that there its fp32 run is
the one to compare with; ours computes in bf16.
Torch runs on gloo, its backend for CPUs; ours on "tbik" (--ours gloo: on gloo as well), with the same policy and bits.
--clock cpu: CPU seconds of rank 0, all its threads, which a loaded machine leaves comparable; waiting does not count.
Memory: the bytes of the sharded gradients (covers) that ours held at most, beside the bound: so many times the rank's
own gradients, each use of a parameter counted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tbik.fsdp
from tbik import models
from tbik.gradients import upstream
from tbik.huggingface.parallelize import parallelize
from tbik.huggingface.rows import SampleBatch
from tbik.verify import environment
from tbik.workers import Link, Workers

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "tie_word_embeddings": True,
}
MAX_NORM = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="B, of a step")
    parser.add_argument("--micro-steps", type=int, default=2, help="A")
    parser.add_argument("--accumulation", choices=("sharded", "unsharded"), default="sharded")
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    parser.add_argument("--pairs", type=int, default=7, help="measured rounds of steps, after one that is not")
    parser.add_argument("--bf16-rounds", type=int, help="of these, how many with torch's bf16 too; by default all")
    parser.add_argument("--isa", help="ONEDNN_MAX_CPU_ISA for torch's own products, e.g. AVX512_CORE_BF16")
    parser.add_argument("--ours", choices=("tbik", "gloo"), default="tbik", help="backend of our side")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.isa:
        os.environ["ONEDNN_MAX_CPU_ISA"] = options.isa
    with tempfile.TemporaryDirectory() as folder:
        models.random_model("qwen3", folder, dtype="float32", **SIZES)
        argument = {**vars(options), "folder": folder}
        with Workers(options.ranks, _task, argument, silence_s=1800.0, collective_s=900.0, backend="gloo") as workers:
            result = next(content for rank, content in workers.messages() if rank == 0)
    result |= {
        "options": {key: value for key, value in vars(options).items() if key != "json"},
        "sizes": SIZES,
        "environment": environment() | {"load": os.getloadavg()[0]},
    }
    console = Console()
    bf16 = "not run"
    if result["ratios"]:
        bf16 = (
            f"{result['torch_s']:.3f} s, ratio {result['ratio']:.3f} ({min(result['ratios']):.3f} to "
            f"{max(result['ratios']):.3f})"
        )
    console.print(
        f"{result['parameters'] / 1e6:.0f} M parameters, {options.ranks} ranks, {options.clock} clock: tbik "
        f"{result['tbik_s']:.3f} s a step, "
        f"torch in bf16 {bf16}; torch in fp32 {result['torch_fp32_s']:.3f} s, ratio "
        f"{result['ratio_fp32']:.3f} ({min(result['ratios_fp32']):.3f} to {max(result['ratios_fp32']):.3f}); covers "
        f"{result['cover_bytes'] / 2**20:.1f} MiB, bound {result['cover_bytes_limit'] / 2**20:.1f} MiB"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _task(rank: int, link: Link, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (options["ranks"],))
    group = dist.new_group(backend=options["ours"])
    our_mesh = DeviceMesh.from_group(group, "cpu")
    generator = torch.Generator().manual_seed(0)
    shape = (options["samples"], options["tokens"])
    ids = list(torch.randint(0, SIZES["vocab_size"], shape, generator=generator))
    sides = [
        _Ours(our_mesh, ids, options, rank),
        _Torch(mesh, ids, options, rank, torch.bfloat16),
        _Torch(mesh, ids, options, rank, torch.float32),
    ]
    clock = time.process_time if options["clock"] == "cpu" else time.perf_counter
    times: list[list[float]] = []
    most = options["pairs"] if options["bf16_rounds"] is None else options["bf16_rounds"]
    for pair in range(options["pairs"] + 1):
        taken = []
        for number, side in enumerate(sides):
            if number == 1 and (pair > most or not most):
                taken.append(math.nan)
                continue
            dist.barrier()
            start = clock()
            side.step()
            dist.barrier()
            taken.append(clock() - start)
        if pair:
            times.append(taken)
    ours, theirs, theirs_fp32 = ([pair[i] for pair in times] for i in range(3))
    theirs = theirs[:most]
    ratios, ratios_fp32 = ([a / b for a, b in zip(ours, of)] for of in (theirs, theirs_fp32))
    tree: Any = sides[0].tree
    held = [p if tree._unsharded else p.to_local() for p in sides[0].model.parameters()]
    local = sum(p.numel() * 4 for p in held)
    tied = held[0].numel() * 4  # the embedding has two uses, and a tree for each
    if rank == 0:
        link.send(
            {
                "parameters": sum(p.numel() for p in sides[0].model.parameters()),
                "tbik_s": statistics.median(ours),
                "torch_s": statistics.median(theirs) if theirs else None,
                "torch_fp32_s": statistics.median(theirs_fp32),
                "ratio": statistics.median(ratios) if ratios else None,
                "ratios": ratios,
                "ratio_fp32": statistics.median(ratios_fp32),
                "ratios_fp32": ratios_fp32,
                "most_buffers": tree.most_buffers,
                "buffer_limit": tree.buffer_limit,
                "gradient_bytes": local,
                "cover_bytes": sides[0].cover_bytes,
                "cover_bytes_limit": tree.buffer_limit * (local + tied),
            }
        )


class _Side:
    def __init__(self, ids: list[torch.Tensor], options: dict[str, Any], rank: int) -> None:
        self.ids, self.micro_steps, self.rank, self.ranks = ids, options["micro_steps"], rank, options["ranks"]
        self.total = sum(len(of) - 1 for of in ids)
        transformers.utils.logging.disable_progress_bar()
        self.stock: Any = transformers.AutoModelForCausalLM.from_pretrained(options["folder"], dtype=torch.float32)

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)


class _Ours(_Side):
    def __init__(self, mesh: Any, ids: list[torch.Tensor], options: dict[str, Any], rank: int) -> None:
        super().__init__(ids, options, rank)
        model = parallelize(self.stock.train(), compute_dtype=torch.bfloat16)
        self.tree = tbik.fsdp.apply(
            model,
            mesh,
            samples_per_step=len(ids),
            micro_steps=self.micro_steps,
            accumulation=options["accumulation"],
        )
        self.model = self.tree.model
        self.optimizer = self.make_optimizer(self.model)
        self.cover_bytes = 0

    def step(self) -> None:
        for _ in range(self.micro_steps):
            with self.tree.micro_step() as micro:
                batch = SampleBatch([self.ids[s] for s in micro.samples], total_tokens=1).packed()
                micro.backward(self.model(**batch).loss, upstream(self.total))
            covers: Any = self.tree._covers._covers.values()
            held = sum(value.nbytes for cover in covers for value in cover.values() if value is not None)
            self.cover_bytes = max(self.cover_bytes, held)
        self.tree.finish()
        self.tree.clip_grad_norm(MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Torch(_Side):
    def __init__(
        self, mesh: Any, ids: list[torch.Tensor], options: dict[str, Any], rank: int, dtype: torch.dtype
    ) -> None:
        super().__init__(ids, options, rank)
        mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        self.model = self.stock.train()
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=mixed)
        fully_shard(self.model, mesh=mesh, mp_policy=mixed)
        self.optimizer = self.make_optimizer(self.model)
        self.sharded = options["accumulation"] == "sharded"

    def step(self) -> None:
        m = len(self.ids) // self.ranks // self.micro_steps
        for a in range(self.micro_steps):
            first = (a * self.ranks + self.rank) * m
            batch = torch.stack(self.ids[first : first + m])
            self.model.set_requires_gradient_sync(self.sharded or a == self.micro_steps - 1)
            logits = self.model(input_ids=batch, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="sum"
            )
            torch.autograd.backward(loss * (self.ranks / self.total))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


if __name__ == "__main__":
    main()
