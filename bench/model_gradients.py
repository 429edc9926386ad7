"""Where the error of a whole model's fp32 gradients comes from: one kind of operator at a time, the rest in fp64.

    python bench/model_gradients.py --json bench/results/model_gradients.json

SmolLM2, the loss of some prompts in one micro-step. Truth: the Llama of transformers with every operator in fp64 (its
own norms would compute in fp32), and the fp32 tables of rope that it always has. Then, for each kind of operator, the
same model with that kind alone in fp32, forward and backward: torch's, and tbik's. Also tbik's lm_head with other
numbers of leaves, and forms of a gradient that are the same number: D in dS = P (dP - D) of attention as rowsum(dO O)
or rowsum(P dP), the probabilities of a loss as exp(x - lse) or exp(x - max) / sum. `lm_head` is also taken apart into
its three products: y = x W^T, dX = dY W, dW = dY^T x. `transformers itself`: the same fp32 model called in other ways
that mean the same (eager attention, two threads, another order, one prompt per call), against the call that the rows
above compare with; what two ways of one library differ by. `plans`: all of tbik with other leaves.

The loss of transformers is fp32 whatever the weights are, so the truth takes its own. torch's fp32 sum of exponentials
over this vocabulary is up to 2.5e-5 too small on AVX2: its softmax adds up to 1 + 2.5e-5, tbik's to 1 within 2e-6. The
dX of tbik's lm_head is chains of V / leaves terms, which lose terms that are small against the sum.

b is the truth, or what a row names after "against". Per run:
relative: largest |a - b| / |b| in the 2-norm, a number per tensor. median: of these numbers. tensors: how many exceed
1e-4. absolute: largest max|a - b| / max|b| of a tensor. whole: |a - b| / |b| of all tensors as one vector. elements:
share of all elements with |a - b| > 1e-4 |b|.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from model_accuracy import PROMPTS
from models import commit
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama

import tbik
import tbik.huggingface.attention
from tbik import _C, TreePlan, models, ops
from tbik.huggingface.checkpoint import pieces
from tbik.huggingface.parallelize import default_plan
from tbik.huggingface.rows import SampleBatch
from tbik.verify import cpu_name

Named = dict[str, Tensor]
LEAVES = (1, 9, 12, 64, 512)
PLANS = (9, 18, 36, 63)
TARGET = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--leaves", type=int, nargs="*", default=list(LEAVES), help="of tbik's lm_head")
    parser.add_argument("--plans", type=int, nargs="*", default=list(PLANS), help="leaves of all of tbik")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=("all", "transformers itself", "plans", *KINDS, *LOSSES, *ATTENTION, "leaves"),
        help="which rows; all of them by default",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = models.smollm2()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    batch = SampleBatch([torch.tensor(tokenizer.encode(text).ids) for text in PROMPTS[: options.prompts]])
    stock: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plan = default_plan(stock.config)
    model = copy.deepcopy(stock).double()
    rows: list[dict[str, Any]] = []
    console = Console(width=180)

    def note(what: str, found: Named, against: Named | None = None) -> None:
        rows.append({"what": what, **errors(found, truth if against is None else against)})
        console.print(f"{what}: {rows[-1]['relative']:.1e} relative, {rows[-1]['tensor']}")
        if options.json:  # a long run that is cut short keeps what it has
            write(options, plan, rows)

    def wanted(*kinds: str) -> bool:
        return not options.kinds or any(kind in options.kinds for kind in kinds)

    with exact():
        truth = gradients(model, batch)
    if wanted("all", "plans", "transformers itself"):
        theirs = gradients(stock, batch, "sdpa", "torch's loss")
        calm = gradients(stock, batch, "sdpa", "exact")
    if wanted("all"):
        note("all of transformers", theirs)
        found = whole(folder, batch, None)
        note("all of tbik", found)
        note("all of tbik against transformers", found, theirs)
        note("all of transformers but its loss", calm)
        note("all of tbik against transformers with its loss in fp64", found, calm)
    if wanted("transformers itself"):
        for what, found in by_other_calls(stock, batch, options.threads):
            note(f"transformers, {what}", found)
            note(f"transformers, {what}, against transformers", found, theirs)
    for leaves in options.plans if wanted("plans") else ():
        found = whole(folder, batch, TreePlan(leaves=leaves))
        note(f"all of tbik, {leaves} leaves", found)
        note(f"all of tbik, {leaves} leaves, against transformers", found, theirs)
        note(f"all of tbik, {leaves} leaves, against transformers with its loss in fp64", found, calm)
    for kind, change in KINDS.items():
        for by_tbik in (False, True) if wanted(kind) else ():
            with exact(), change(model, plan if by_tbik else None):
                note(f"{kind}, {'tbik' if by_tbik else 'torch'}", gradients(model, batch))
    for implementation in ATTENTION:
        if wanted(implementation):
            with exact():
                note(implementation, gradients(model, batch, implementation))
    for loss in LOSSES:
        if wanted(loss):
            with exact():
                note(loss, gradients(model, batch, loss=loss))
    for leaves in options.leaves if wanted("leaves") else ():
        with exact(), lm_head(model, TreePlan(leaves=leaves)):
            note(f"lm_head, tbik, {leaves} leaves", gradients(model, batch))
    table = Table(title=f"{options.prompts} prompts, {plan.leaves} leaves")
    for column in ("in fp32", "relative", "of", "median", "tensors", "absolute", "whole", "elements"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = {name: f"{row[name]:.1e}" for name in ("relative", "median", "absolute", "whole", "elements")}
        table.add_row(row["what"], numbers["relative"], row["tensor"], numbers["median"], str(row["tensors"]),
                      numbers["absolute"], numbers["whole"], numbers["elements"])  # fmt: skip
    console.print(table)


def write(options: argparse.Namespace, plan: TreePlan, rows: list[dict[str, Any]]) -> None:
    """Rows of other kinds that the file has for as many prompts stay, each with the commit that it is from."""
    machine = {
        "prompts": options.prompts, "threads": options.threads, "cpu": cpu_name(),
        "path": _C.default_path("float32"), "commit": commit(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    mine = [{**row, **machine} for row in rows]
    names = {(row["what"], row["prompts"]) for row in mine}
    before = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    kept = [row for row in before if (row["what"], row["prompts"]) not in names]
    figures = {"model": "SmolLM2-135M-Instruct", "plan": plan.key(), "target": TARGET, "rows": kept + mine}
    options.json.write_text(json.dumps(figures, indent=1) + "\n")


def whole(folder: Path, batch: SampleBatch, plan: TreePlan | None) -> Named:
    ours = tbik.load_checkpoint(folder, plan=plan, dtype=torch.float32).train()
    ours(**batch.packed()).loss.backward()
    return {name: piece.local.double() for name, piece in pieces(ours, gradients=True).items()}


def by_other_calls(stock: Any, batch: SampleBatch, threads: int) -> Iterator[tuple[str, Named]]:
    """The gradients of the same loss by calls of the same fp32 model that differ in what they add first."""
    loss = "torch's loss"
    yield "eager attention", gradients(stock, batch, "eager", loss)
    torch.set_num_threads(3 - threads)
    yield f"{3 - threads} threads", gradients(stock, batch, "sdpa", loss)
    torch.set_num_threads(threads)
    yield "order reversed", gradients(stock, SampleBatch(batch.ids[::-1]), "sdpa", loss)
    total: Named = {}
    for ids in batch.ids:
        share = (len(ids) - 1) / batch.num_targets
        for name, gradient in gradients(stock, SampleBatch([ids]), "sdpa", loss).items():
            total[name] = total.get(name, 0) + share * gradient
    yield "one prompt per call", total


def gradients(model: Any, batch: SampleBatch, implementation: str = "exact", loss: str = "exact") -> Named:
    model.set_attn_implementation(implementation)
    model.train()
    model.zero_grad()
    arguments = batch.padded("right")
    labels = torch.nn.functional.pad(arguments.pop("labels")[:, 1:], (0, 1), value=-100)
    logits = model(**arguments, use_cache=False).logits.flatten(0, 1)
    live = labels.flatten() != -100
    LOSSES[loss](logits[live], labels.flatten()[live]).backward()
    found = {name: parameter.grad.double().clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def errors(found: Named, truth: Named) -> dict[str, Any]:
    relative = {name: float((found[name] - t).norm() / t.norm()) for name, t in truth.items()}
    worst = max(relative, key=lambda name: relative[name])
    squares = {name: (float((found[name] - t).square().sum()), float(t.square().sum())) for name, t in truth.items()}
    differ, square = (sum(pair[i] for pair in squares.values()) for i in range(2))
    beyond = sum(int(((found[name] - t).abs() > TARGET * t.abs()).sum()) for name, t in truth.items())
    return {
        "relative": relative[worst],
        "tensor": worst,
        "median": statistics.median(relative.values()),
        "tensors": sum(error > TARGET for error in relative.values()),
        "absolute": max(float((found[name] - t).abs().max() / t.abs().max()) for name, t in truth.items()),
        "whole": (differ / square) ** 0.5,
        "elements": beyond / sum(t.numel() for t in truth.values()),
    }


# --- one kind of operator in fp32 -------------------------------------------------------------------------------------


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def exact() -> contextlib.AbstractContextManager[None]:
    """The norms of transformers compute in fp32 whatever they are given."""

    def norm(self: Any, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        y: Tensor = self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))
        return y

    return replaced(llama.LlamaRMSNorm, "forward", norm)


def norms(model: Any, plan: TreePlan | None) -> contextlib.AbstractContextManager[None]:
    def norm(self: Any, x: Tensor) -> Tensor:
        x, w = x.float(), self.weight.float()
        if plan is not None:
            return ops.rms_norm(x, w, self.variance_epsilon, plan=plan).double()
        y: Tensor = w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))
        return y.double()

    return replaced(llama.LlamaRMSNorm, "forward", norm)


def product(x: Tensor, w: Tensor, plan: TreePlan | None) -> Tensor:
    x, w = x.float(), w.float()
    return (torch.nn.functional.linear(x, w) if plan is None else ops.linear(x, w, plan=plan)).double()


def lm_head(model: Any, plan: TreePlan | None) -> contextlib.AbstractContextManager[None]:
    return replaced(model.lm_head, "forward", lambda x: product(x, model.lm_head.weight, plan))


class Product(torch.autograd.Function):
    """y = x W^T in fp64 but for one of y, dX and dW."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, plan: TreePlan | None, part: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.plan, ctx.part = plan, part
        return product(x, w, plan) if part == "y" else x @ w.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (dy,) = grads
        x, w = ctx.saved_tensors
        dx, dw = dy @ w, dy.flatten(0, -2).mT @ x.flatten(0, -2)
        if ctx.part != "y":
            with torch.enable_grad():
                x, w = (t.detach().float().requires_grad_() for t in (x, w))
                narrow = torch.autograd.grad(product(x, w, ctx.plan), (x, w), dy)
            dx, dw = (narrow[0].double(), dw) if ctx.part == "dX" else (dx, narrow[1].double())
        return dx, dw, None, None


def part_of_lm_head(part: str) -> Callable[[Any, TreePlan | None], contextlib.AbstractContextManager[None]]:
    def change(model: Any, plan: TreePlan | None) -> contextlib.AbstractContextManager[None]:
        def forward(x: Tensor) -> Tensor:
            y: Tensor = Product.apply(x, model.lm_head.weight, plan, part)  # type: ignore[no-untyped-call]
            return y

        return replaced(model.lm_head, "forward", forward)

    return change


def linears(model: Any, plan: TreePlan | None) -> contextlib.AbstractContextManager[None]:
    exactly = torch.nn.Linear.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return exactly(self, x) if self is model.lm_head else product(x, self.weight, plan)

    return replaced(torch.nn.Linear, "forward", forward)


def rope(model: Any, plan: TreePlan | None) -> contextlib.AbstractContextManager[None]:
    stock = llama.apply_rotary_pos_emb

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **others: Any) -> tuple[Tensor, ...]:
        if plan is None:
            return tuple(y.double() for y in stock(q.float(), k.float(), cos.float(), sin.float(), **others))
        sin, cos = (t[0, :, : t.shape[-1] // 2].float().contiguous() for t in (sin, cos))

        def of(x: Tensor) -> Tensor:
            return torch.stack([ops.rope(row.transpose(0, 1).float().contiguous(), sin, cos) for row in x])

        return tuple(of(x).transpose(1, 2).double() for x in (q, k))

    return replaced(llama, "apply_rotary_pos_emb", turned)


def activation(model: Any, plan: TreePlan | None) -> contextlib.AbstractContextManager[None]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).float(), self.up_proj(x).float()
        y = torch.nn.functional.silu(gate) * up if plan is None else ops.silu_and_mul(gate, up)
        return self.down_proj(y.double())  # type: ignore[no-any-return]

    return replaced(llama.LlamaMLP, "forward", forward)


KINDS: dict[str, Callable[[Any, TreePlan | None], contextlib.AbstractContextManager[None]]] = {
    "norms": norms, "lm_head": lm_head, "other linears": linears, "rope": rope, "activation": activation,
    **{f"lm_head's {part}": part_of_lm_head(part) for part in ("y", "dX", "dW")},
}  # fmt: skip

# --- loss -------------------------------------------------------------------------------------------------------------


def tbik_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return ops.cross_entropy(logits.float(), targets, plan=TreePlan(leaves=12)).total / len(targets)


class Loss(torch.autograd.Function):
    """Its gradient by p = exp(x - max) / sum, tbik's softmax."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits, targets)
        return ops.cross_entropy(logits, targets, plan=TreePlan(leaves=12)).total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, targets = ctx.saved_tensors
        p = ops.softmax(logits, leaves=12)
        p[torch.arange(len(targets)), targets] -= 1
        return p * grads[0], None


def loss_by_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    total: Tensor = Loss.apply(logits.float(), targets)  # type: ignore[no-untyped-call]
    return total / len(targets)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exact": lambda logits, targets: torch.nn.functional.cross_entropy(logits.double(), targets),
    "torch's loss": lambda logits, targets: torch.nn.functional.cross_entropy(logits.float(), targets),
    "tbik's loss": tbik_loss,
    "tbik's loss, by exp(x - max) / sum": loss_by_softmax,
}

# --- attention --------------------------------------------------------------------------------------------------------


class Attention(torch.autograd.Function):
    """The backward by hand: D = rowsum(dO O), or rowsum(P dP), which is the same number."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, by_values: bool) -> Tensor:
        dead = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        p = (q @ k.mT * scale).masked_fill(dead, -torch.inf).softmax(-1)
        out = p @ v
        ctx.save_for_backward(q, k, v, p, out)
        ctx.scale, ctx.by_values = scale, by_values
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (dout,) = grads
        q, k, v, p, out = ctx.saved_tensors
        dp = dout @ v.mT
        d = (dout * out if ctx.by_values else p * dp).sum(-1, keepdim=True)
        ds = p * (dp - d) * ctx.scale
        return ds @ k, ds.mT @ q, p.mT @ dout, None, None


def registered(name: str, dtype: torch.dtype, by_values: bool | None) -> None:
    """An attention in this dtype; by_values None: autograd's backward."""

    def attention(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        groups = module.num_key_value_groups
        q, k, v = (t.to(dtype) for t in (q, llama.repeat_kv(k, groups), llama.repeat_kv(v, groups)))
        if by_values is None:
            dead = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            out = (q @ k.mT * scaling).masked_fill(dead, -torch.inf).softmax(-1) @ v
        else:
            out = Attention.apply(q, k, v, scaling, by_values)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2).double(), None

    ALL_ATTENTION_FUNCTIONS.register(name, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, flash_attention_mask)


def by_tbik(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **others: Any) -> tuple[Tensor, None]:
    out, _ = tbik.huggingface.attention.attention_forward(module, q.float(), k.float(), v.float(), mask, **others)
    return out.double(), None


registered("exact", torch.float64, None)
registered("torch's attention", torch.float32, None)
registered("attention, D by dO O", torch.float32, True)
registered("attention, D by P dP", torch.float32, False)
ALL_ATTENTION_FUNCTIONS.register("tbik's attention", by_tbik)
ALL_MASK_ATTENTION_FUNCTIONS.register("tbik's attention", flash_attention_mask)
ATTENTION = ("torch's attention", "tbik's attention", "attention, D by dO O", "attention, D by P dP")


if __name__ == "__main__":
    main()
