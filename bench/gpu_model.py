"""The part "model" of bench/gpu.py: one small random model at TP 1, 2, 4, every rank a process, all on one GPU.

Llama's shape (grouped queries, rope, gated MLP, two norms a layer), of the layers that tbik.parallelize puts into a
model: ColumnParallelGroup, RowParallelLinear, ops.rope_attention, add_rms_norm, silu_and_mul, embedding. The model is
written here from those layers, so that the part needs no transformers; the head is whole on every rank. fp32 master
weights, products in bf16. Sums of ranks: covers over CUDA IPC, in groups of the backend "tbik"; in a dry run CPU
tensors over its CPU transport, at TP 1 and 2.

Compared in bits: log-probabilities of every token, and after backward every parameter's gradient, put together from the
ranks' shards; TP W = TP 1, by leaf fma and by mma; fma at TP 1 also = the CPU. Beside it the same shards in plain torch
with an all-reduce of bf16 (by the same backend): it must differ, else the data would show nothing. Not run on a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gpu_collectives import run_ranks
from gpu_setting import Setting, finish, require_equal
from torch import Tensor
from torch.nn import functional

from tbik import TreePlan, nn, ops
from tbik.plan import leaf_runs

WORLDS = (1, 2, 4)
DRY_WORLDS = (1, 2)
STOCK = "stock"
Axis = int | None
"""The axis in which ranks hold shards of a parameter; None: each has all of it."""


class Sizes(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    leaves: int
    samples: tuple[int, ...]


SIZES = Sizes(2, 256, 8, 4, 32, 704, 1000, 8, (70, 1, 133))
DRY_SIZES = Sizes(1, 32, 4, 2, 8, 40, 24, 4, (5, 1))


def full_weights(s: Sizes) -> dict[str, Tensor]:
    """fp32, on the CPU; the same everywhere."""
    generator = torch.Generator().manual_seed(0)

    def of(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    weights = {"embed": of(s.vocab, s.hidden) * 4, "head": of(s.vocab, s.hidden), "norm": 1 + 0.1 * of(s.hidden)}
    for layer in range(s.layers):
        rows = {"q": s.heads * s.dim, "k": s.kv_heads * s.dim, "v": s.kv_heads * s.dim, "gate": s.inner, "up": s.inner}
        weights |= {f"{layer}.{name}": of(count, s.hidden) for name, count in rows.items()}
        weights |= {f"{layer}.o": of(s.hidden, s.heads * s.dim), f"{layer}.down": of(s.hidden, s.inner)}
        weights |= {f"{layer}.norm{i}": 1 + 0.1 * of(s.hidden) for i in (1, 2)}
    return weights


AXES: dict[str, Axis] = {"q": 0, "k": 0, "v": 0, "gate": 0, "up": 0, "o": 1, "down": 1}


class Tokens:
    """ids [R] of all samples in one row, where they begin, the token after each (the last one's is itself)."""

    def __init__(self, s: Sizes, device: str) -> None:
        total = sum(s.samples)
        ids = torch.randint(0, s.vocab, (total,), generator=torch.Generator().manual_seed(1))
        self.offsets = [sum(s.samples[:i]) for i in range(len(s.samples) + 1)]
        self.ids, self.targets = ids.to(device), ids.roll(-1).to(device)
        self.positions = torch.cat([torch.arange(n) for n in s.samples]).to(device)
        self.cu = torch.tensor(self.offsets, dtype=torch.int32, device=device)
        self.frequencies = torch.logspace(0, -3, s.dim // 2).to(device)


class TbikModel(torch.nn.Module):
    def __init__(self, s: Sizes, weights: dict[str, Tensor], plan: TreePlan, group: Any, device: str) -> None:
        super().__init__()
        self.s, self.plan = s, plan
        whole = {name: w.to(device) for name, w in weights.items()}
        options: dict[str, Any] = {"plan": plan, "group": group, "compute_dtype": torch.bfloat16}
        self.whole = torch.nn.ParameterDict(
            {name.replace(".", "_"): w.clone() for name, w in whole.items() if name.split(".")[-1] not in AXES}
        )
        self.layers = torch.nn.ModuleList()
        for layer in range(s.layers):
            of = {name: whole[f"{layer}.{name}"] for name in AXES}
            runs = leaf_runs(s.heads * s.dim, plan.leaves, 1 if group is None else group.size())
            qkv = [of[name] for name in "qkv"]
            self.layers.append(
                torch.nn.ModuleDict(
                    {
                        "qkv": nn.ColumnParallelGroup.from_full(
                            qkv, names=["q", "k", "v"], runs=runs, head_dim=s.dim, **options
                        ),
                        "o": nn.RowParallelLinear.from_full(of["o"], runs=runs, **options),
                        "gate_up": nn.ColumnParallelGroup.from_full(
                            [of["gate"], of["up"]], names=["gate", "up"], **options
                        ),
                        "down": nn.RowParallelLinear.from_full(of["down"], **options),
                    }
                )
            )

    def forward(self, t: Tokens) -> Tensor:
        """Log-probabilities [R] of the targets."""
        s, plan, at = self.s, self.plan, t.offsets
        sin, cos = ops.rope_tables(t.positions, t.frequencies)
        x = ops.embedding(t.ids, self.whole["embed"], out_dtype=torch.bfloat16, sample_offsets=at, plan=plan)
        residual = torch.full_like(x, -0.0)
        for layer, of in enumerate(self.layers):
            x, residual = self.normed(x, residual, f"{layer}_norm1", at)
            q, k, v = (y.unflatten(1, (-1, s.dim)) for y in of["qkv"](x, at))
            x = of["o"](ops.rope_attention(q, k, v, sin, cos, t.cu, plan=plan).flatten(1), at)
            x, residual = self.normed(x, residual, f"{layer}_norm2", at)
            x = of["down"](ops.silu_and_mul(*of["gate_up"](x, at)), at)
        y, _ = self.normed(x, residual, "norm", at)
        options: dict[str, Any] = {"plan": plan, "compute_dtype": torch.bfloat16, "out_dtype": torch.float32}
        logits = ops.linear(y, self.whole["head"], sample_offsets=at, **options)
        return ops.logprobs(logits, t.targets, plan.leaves)

    def normed(self, x: Tensor, residual: Tensor, name: str, at: list[int]) -> tuple[Tensor, Tensor]:
        y, h = ops.add_rms_norm(x, residual, self.whole[name], 1e-6, sample_offsets=at, plan=self.plan)
        return y, h

    def gradients(self) -> dict[str, Tensor]:
        """By the names of full_weights: this rank's shards."""
        found = {name.replace("_", "."): p.grad for name, p in self.whole.items()}
        for layer, of in enumerate(self.layers):
            for module in of.values():
                for name, p in module.named_parameters():
                    own = name.removeprefix("weight_")
                    key = own if own in AXES else next(n for n in ("o", "down") if of[n] is module)
                    found[f"{layer}.{key}"] = p.grad
        return {name: grad.detach().cpu() for name, grad in found.items()}


class _AddRanks(torch.autograd.Function):
    """The sum over ranks forward (row-parallel) or of the gradient backward (column-parallel), by dist.all_reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool) -> Tensor:
        ctx.forward_sums = forward
        return summed(x) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy if ctx.forward_sums else summed(dy), None


def summed(x: Tensor) -> Tensor:
    x = x.contiguous().clone()
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def stock_step(s: Sizes, weights: dict[str, Tensor], rank: int, world: int, device: str) -> dict[str, Tensor]:
    """The same shards in plain torch, in bf16: log-probabilities, and the gradient of the embedding."""
    t = Tokens(s, device)
    w = {}
    for name, full in weights.items():
        axis = AXES.get(name.split(".")[-1])
        share = full if axis is None else full.chunk(world, axis)[rank]
        w[name] = share.to(device).bfloat16().requires_grad_()
    angles = t.positions[:, None] * t.frequencies
    sin, cos = angles.sin()[:, None], angles.cos()[:, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    x = functional.embedding(t.ids, w["embed"])
    for layer in range(s.layers):
        y = _AddRanks.apply(functional.rms_norm(x, (s.hidden,), w[f"{layer}.norm1"], 1e-6), False)
        q, k, v = (functional.linear(y, w[f"{layer}.{n}"]).unflatten(1, (-1, s.dim)) for n in "qkv")
        q, k = turned(q), turned(k)
        outs = []
        for lo, hi in zip(t.offsets[:-1], t.offsets[1:], strict=True):
            part = [p[lo:hi].transpose(0, 1)[None] for p in (q, k, v)]
            out = functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
            outs.append(out[0].transpose(0, 1).flatten(1))
        x = x + _AddRanks.apply(functional.linear(torch.cat(outs), w[f"{layer}.o"]), True)
        y = _AddRanks.apply(functional.rms_norm(x, (s.hidden,), w[f"{layer}.norm2"], 1e-6), False)
        gated = functional.silu(functional.linear(y, w[f"{layer}.gate"])) * functional.linear(y, w[f"{layer}.up"])
        x = x + _AddRanks.apply(functional.linear(gated, w[f"{layer}.down"]), True)
    logits = functional.linear(functional.rms_norm(x, (s.hidden,), w["norm"], 1e-6), w["head"]).float()
    logp = torch.log_softmax(logits, -1).gather(1, t.targets[:, None])[:, 0]
    (-logp.sum()).backward()
    return {"logprobs": logp.detach().cpu(), "embed": w["embed"].grad.cpu()}


def steps(s: Sizes, leaves: Sequence[str], group: Any, device: str) -> dict[str, dict[str, Tensor]]:
    """{leaf or STOCK: log-probabilities and gradients of this rank}."""
    rank, world = (0, 1) if group is None else (group.rank(), group.size())
    weights = full_weights(s)
    found = {}
    for leaf in leaves:
        if leaf == STOCK:
            found[leaf] = stock_step(s, weights, rank, world, device)
            continue
        model = TbikModel(s, weights, TreePlan(leaves=s.leaves, leaf=leaf), group, device)
        logp = model(Tokens(s, device))
        (-logp.sum()).backward()
        found[leaf] = {"logprobs": logp.detach().cpu(), **model.gradients()}
    return found


def put_together(ranks: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole tensors of the ranks' shards. Errors: AssertionError where what all ranks hold is not the same."""
    whole = {}
    for name, value in ranks[0].items():
        axis = AXES.get(name.split(".")[-1])
        if axis is not None:
            whole[name] = torch.cat([rank[name] for rank in ranks], axis)
            continue
        for number, rank in enumerate(ranks):
            require_equal(f"{name} of rank {number} = of rank 0", rank[name], value)
        whole[name] = value
    return whole


def compared(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    """Elements in all, and the result."""
    elements = sum(value.numel() for value in expected.values())
    row: dict[str, Any] = {"tensors": len(expected), "elements": elements}
    try:
        if set(found) != set(expected):
            raise AssertionError(f"expected {sorted(expected)}, got {sorted(found)}")
        for name, value in expected.items():
            require_equal(name, found[name], value)
    except AssertionError as error:
        return {**row, "result": f"FAILED: {error}"}
    return {**row, "result": "equal"}


def part_model(setting: Setting) -> list[dict[str, Any]]:
    """Proves, of a whole model on the device: TP 2, 4 = TP 1 in log-probabilities and all gradients; fma = CPU.

    Errors: AssertionError with a rank's output; PartFailed where bits differ, or where the control's do not.
    """
    s = DRY_SIZES if setting.is_dry else SIZES
    leaves = ("fma",) if setting.is_dry else ("fma", setting.leaf)
    results: dict[int, dict[str, list[dict[str, Tensor]]]] = {}
    for world in DRY_WORLDS if setting.is_dry else WORLDS:
        if world == 1:
            results[1] = {leaf: [found] for leaf, found in steps(s, [*leaves, STOCK], None, setting.device).items()}
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--world", str(world), "--folder", folder]
            command += ["--leaves", ",".join([*leaves, STOCK])] + (["--dry-run"] if setting.is_dry else [])
            run_ranks(command, world, "model", Path(folder))
            ranks = [torch.load(Path(folder) / f"rank{rank}.pt") for rank in range(world)]
        results[world] = {leaf: [rank[leaf] for rank in ranks] for leaf in ranks[0]}
    return finish(judge(setting, s, results, leaves))


def judge(
    setting: Setting, s: Sizes, results: dict[int, dict[str, list[dict[str, Tensor]]]], leaves: Sequence[str]
) -> list[dict[str, Any]]:
    """Rows: each world against TP 1, the control, the CPU."""
    rows: list[dict[str, Any]] = []
    for world in list(results)[1:]:
        for leaf in leaves:
            row = {"world": world, "leaf": leaf, "check": f"TP {world} = TP 1, log-probabilities and gradients"}
            try:
                rows.append(row | compared(put_together(results[world][leaf]), results[1][leaf][0]))
            except AssertionError as error:
                rows.append({**row, "result": f"FAILED: {error}"})
        found, expected = (results[n][STOCK][0]["logprobs"] for n in (world, 1))
        count = int((found.view(torch.int32) != expected.view(torch.int32)).sum())
        result = f"{count} of {found.numel()} differ" if count else "FAILED: the same bits: the data shows no order"
        check = f"TP {world} differs from TP 1, log-probabilities"
        rows.append({"world": world, "leaf": STOCK, "check": check, "elements": found.numel(), "result": result})
    row = {"world": 1, "leaf": "fma", "check": "CUDA = CPU, log-probabilities and gradients"}
    if setting.is_dry:
        return [*rows, {**row, "result": "not made: no CUDA device in a dry run"}]
    return [*rows, row | compared(results[1]["fma"][0], steps(s, ("fma",), None, "cpu")["fma"])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true")
    for name in ("--world", "--rank", "--folder", "--leaves"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    import tbik.backend  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    device = "cpu" if args.dry_run else "cuda"
    if not args.dry_run:
        os.environ.setdefault("TBIK_PEER_MEMORY", "ipc")  # nothing else may stand in for it
        torch.cuda.set_device(0)
    rank, world = int(args.rank), int(args.world)
    store = dist.FileStore(str(Path(args.folder) / "store"), world)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("tbik", store=store, rank=rank, world_size=world, timeout=limit)
    sizes = DRY_SIZES if args.dry_run else SIZES
    found = steps(sizes, args.leaves.split(","), dist.group.WORLD, device)
    torch.save(found, Path(args.folder) / f"rank{rank}.pt")
    # not dist.barrier: of CUDA's tensors NCCL would make it, which refuses ranks that share a device
    store.set(f"done{rank}", "1")
    store.wait([f"done{other}" for other in range(world)], limit)  # a peer may still read this rank's memory
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
