"""Where the error of a whole model's fp32 gradients comes from: one kind of operator at a time, the rest in fp64.

    python bench/model_gradients.py --json bench/results/model_gradients.json

SmolLM2, the loss of some prompts in one micro-step. Truth: the Llama of transformers with every operator in fp64 (its
own norms would compute in fp32), and the fp32 tables of rope that it always has. Then, for each kind of operator, the
same model with that kind alone in fp32, forward and backward: torch's, and tbik's. Also tbik's lm_head with other
numbers of leaves, and forms of a gradient that are the same number: D in dS = P (dP - D) of attention as rowsum(dO O)
or rowsum(P dP), the probabilities of a loss as exp(x - lse) or exp(x - max) / sum. Per run, over all tensors:
relative: largest |a - b| / |b| in the 2-norm. absolute: largest max|a - b| / max|b|. median: of the first.
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
from tbik import TreePlan, models, ops
from tbik.huggingface.checkpoint import pieces
from tbik.huggingface.parallelize import default_plan
from tbik.huggingface.rows import SampleBatch

Named = dict[str, Tensor]
LEAVES = (1, 12, 64, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--leaves", type=int, nargs="*", default=list(LEAVES), help="of tbik's lm_head")
    parser.add_argument("--kinds", nargs="+", choices=("all", *KINDS, *LOSSES, *ATTENTION, "leaves"))
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
    rows = []
    console = Console()

    def note(what: str, found: Named) -> None:
        rows.append({"what": what, **errors(found, truth)})
        console.print(rows[-1])

    def wanted(*kinds: str) -> bool:
        return not options.kinds or any(kind in options.kinds for kind in kinds)

    with exact():
        truth = gradients(model, batch)
    if wanted("all"):
        note("all of transformers", gradients(stock, batch, "sdpa", "torch's loss"))
        ours = tbik.load_checkpoint(folder, dtype=torch.float32).train()
        ours(**batch.packed()).loss.backward()
        found = {name: piece.local for name, piece in pieces(ours, gradients=True).items()}
        note("all of tbik", {name: found[name].double() for name in truth})
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
    figures = {
        "model": "SmolLM2-135M-Instruct", "prompts": options.prompts, "plan": plan.key(), "torch": torch.__version__,
        "transformers": transformers.__version__, "commit": commit(), "rows": rows,
    }  # fmt: skip
    table = Table(title=f"{options.prompts} prompts, {plan.leaves} leaves")
    for column in ("in fp32", "relative", "of", "absolute", "median"):
        table.add_column(column, justify="right")
    for row in rows:
        numbers = {name: f"{row[name]:.1e}" for name in ("relative", "absolute", "median")}
        table.add_row(row["what"], numbers["relative"], row["tensor"], numbers["absolute"], numbers["median"])
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


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
    return {
        "relative": relative[worst],
        "tensor": worst,
        "absolute": max(float((found[name] - t).abs().max() / t.abs().max()) for name, t in truth.items()),
        "median": statistics.median(relative.values()),
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
