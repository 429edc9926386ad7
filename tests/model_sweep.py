"""Whole models in every layout: one set of bits for logits, loss and every gradient. A log that a reader can follow.

    python tests/model_sweep.py --output bench/results/models_sweep.json           writes models_sweep.log beside it
    python tests/model_sweep.py --families qwen3-moe --tp 1 3 --output out.json

Per family and dtype the reference is one rank with each of the 8 samples alone: 8 micro-steps of one sample, packed, no
checkpointing. Against it: (micro-steps, m) x form (packed, padded left, padded right) x gradient checkpointing, all
combinations on one rank; at the other TP sizes every split packed, and padded with checkpointing (--all: everything).
Compared are digests (tbik.fingerprint, of whole tensors whatever the sharding) of the logits of every
sample, of the token sum (nodes of the micro-steps, folded) and of every gradient of the step (GradientTree).
Negative control, per family and dtype: autograd's own sum over the micro-batches differs over m.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from spawn import Pool
from torch import Tensor

import tbik
from tbik import TreePlan

SAMPLES = 8
LENGTHS = (9, 1, 14, 6, 3, 11, 2, 7)
SPLITS = ((1, 8), (2, 4), (8, 1))
FORMS = ("packed", "left", "right")
TP_SIZES = (1, 2, 3, 4, 8)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gemma2": ("Gemma2", {**SLIDING, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", {**SLIDING, "tie_word_embeddings": True}),
}
SMOLLM2 = "smollm2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Layout(NamedTuple):
    """What may not change a bit, beside TP."""

    micro_steps: int
    form: str
    checkpointing: bool

    def __str__(self) -> str:
        split = f"({self.micro_steps}, {SAMPLES // self.micro_steps})"
        return f"{split} {self.form:6} {'checkpointing' if self.checkpointing else 'plain':13}"


ALONE = Layout(SAMPLES, "packed", False)


def layouts(tp: int, every: bool = False) -> list[Layout]:
    """On one rank (or `every`) all combinations; on several each split packed, and padded with checkpointing."""
    if tp == 1 or every:
        return [Layout(a, form, c) for a, _ in SPLITS for form in FORMS for c in (False, True)]
    padded = itertools.cycle(FORMS[1:])
    return [Layout(a, form, c) for a, _ in SPLITS for form, c in (("packed", False), (next(padded), True))]


def _chosen(tp: int, at_least: int, every: bool) -> list[Layout]:
    return layouts(max(tp, at_least), every)


@functools.lru_cache(maxsize=4)
def _stock(family: str, dtype: torch.dtype) -> Any:
    import transformers

    prefix, fields = FAMILIES[family]
    config = getattr(transformers, f"{prefix}{'Text' if prefix == 'Gemma3' else ''}Config")(**{**SIZES, **fields})
    torch.manual_seed(7)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # livelier than the initial 0.02
            parameter.normal_(0, 0.2)
            if name.endswith("norm.weight") and not family.startswith("gemma"):
                parameter.add_(1)
    return model.to(dtype).eval()


def plan_of(family: str, leaf: str = "fma") -> TreePlan:
    """One plan for every TP size."""
    from tbik import models

    source = models.smollm2() if family == SMOLLM2 else _stock(family, torch.float32).config
    return TreePlan.for_model(source, TP_SIZES, leaf=leaf)


def build(family: str, dtype: torch.dtype, group: dist.ProcessGroup | None, leaf: str = "fma") -> Any:
    """The parallelized model; in bf16 the products are bf16 and the gradients fp32 (GradientTree)."""
    import copy

    from tbik import models

    if family == SMOLLM2:
        return tbik.load_checkpoint(models.smollm2(), group, plan_of(family, leaf), dtype=dtype)
    return tbik.parallelize(copy.deepcopy(_stock(family, dtype)), group, plan_of(family, leaf))


def samples_of(model: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, model.config.vocab_size, (n,), generator=generator) for n in LENGTHS]


def digest(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def observe(model: Any, layout: Layout, group: dist.ProcessGroup | None) -> dict[str, str]:
    """Digests of logits, token sum and gradients of one step in this layout."""
    from tbik.huggingface.checkpoint import pieces
    from tbik.huggingface.rows import SampleBatch
    from tbik.integrity.fingerprint import fingerprint_each

    ids = samples_of(model)
    total = SampleBatch(ids).num_targets
    if layout.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()

    def arguments(samples: range, total_tokens: int) -> dict[str, Any]:
        batch = SampleBatch([ids[s] for s in samples], total_tokens=total_tokens)
        return batch.packed() if layout.form == "packed" else batch.padded(layout.form, pad_token_id=5)

    logits: list[Tensor] = []
    nodes: list[Tensor] = []
    m = SAMPLES // layout.micro_steps
    model.eval()
    with torch.no_grad():
        for first in range(0, SAMPLES, m):
            call = arguments(range(first, first + m), 1)
            output = model(**call)
            live = call["attention_mask"].bool() if "attention_mask" in call else slice(None)
            logits.append(output.logits[live].reshape(-1, output.logits.shape[-1]))
            nodes.append(output.loss)
    while len(nodes) > 1:
        nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
    model.train()
    model.zero_grad(set_to_none=True)
    tree = tbik.GradientTree(model, samples_per_step=SAMPLES, micro_steps=layout.micro_steps, plan=model.setting.plan)
    with tree:
        for _ in range(layout.micro_steps):
            with tree.micro_step() as step:
                step.backward(model(**arguments(step.samples, total)).loss)
    gradients = fingerprint_each(pieces(model, gradients=True), group)
    model.zero_grad(set_to_none=True)
    tree.close()
    return {
        "logits": digest(torch.cat(logits)),
        "loss": digest(nodes[0]),
        **{name: f"{value:016x}" for name, value in gradients.items()},
    }


def control(model: Any) -> int:
    """Gradients whose bits change when autograd itself adds the micro-batches (+=): must not be 0."""
    from tbik.huggingface.rows import SampleBatch

    ids = samples_of(model)
    total = SampleBatch(ids).num_targets
    found = []
    model.train()
    model.gradient_checkpointing_disable()
    for m in (1, SAMPLES):
        model.zero_grad(set_to_none=True)
        for first in range(0, SAMPLES, m):
            batch = SampleBatch(ids[first : first + m], total_tokens=total)
            model(**batch.packed()).loss.backward()
        found.append([digest(p.grad) for p in model.parameters()])
    model.zero_grad(set_to_none=True)
    return sum(a != b for a, b in zip(*found, strict=True))


def on_rank(
    group: dist.ProcessGroup | None, family: str, dtype: torch.dtype, chosen: list[Layout], leaf: str
) -> list[dict[str, str]]:
    model = build(family, dtype, group, leaf)
    return [observe(model, layout, group) for layout in chosen]


def sweep(
    pool: Pool,
    family: str,
    name: str,
    tp_sizes: Sequence[int],
    layouts_of: Callable[[int], list[Layout]],
    leaf: str = "fma",
) -> Iterator[dict[str, Any]]:
    """One record per configuration: whether every rank has every digest of the reference."""
    dtype = DTYPES[name]
    reference = build(family, dtype, None, leaf)
    expected = observe(reference, ALONE, None)
    differing = control(reference)
    del reference
    yield {"family": family, "dtype": name, "reference": expected, "control": differing}
    for tp in tp_sizes:
        start, chosen = time.perf_counter(), layouts_of(tp)
        ranks = pool.run(on_rank, tp, family, dtype, chosen, leaf, deadline=3600)
        seconds = time.perf_counter() - start
        for index, layout in enumerate(chosen):
            wrong = sorted({key for rank in ranks for key, value in rank[index].items() if expected.get(key) != value})
            complete = all(rank[index].keys() == expected.keys() for rank in ranks)
            yield {
                "family": family,
                "dtype": name,
                "tp": tp,
                **layout._asdict(),
                "equal": complete and not wrong,
                "wrong": wrong[:8],
                "tensors": len(expected),
                "digest": hashlib.sha256(json.dumps(ranks[0][index], sort_keys=True).encode()).hexdigest()[:16],
                "seconds": round(seconds / len(chosen), 2),
            }


def commit() -> str:
    """The commit of the working tree, with + if it was changed."""
    here = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed.stdout.strip() else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=[*FAMILIES, SMOLLM2])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--tp", nargs="+", type=int, default=list(TP_SIZES), choices=TP_SIZES)
    parser.add_argument("--all", action="store_true", help="every combination at every TP size")
    parser.add_argument("--leaf", choices=("fma", "amx"), default="fma", help="leaf kind of the plans")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = []
    log = options.output.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as lines, Pool(max(options.tp), timeout=900.0) as pool:

        def say(text: str) -> None:
            print(text, flush=True)
            lines.write(text + "\n")
            lines.flush()

        say(f"commit {commit()}, torch {torch.__version__}, {len(LENGTHS)} samples of {LENGTHS} tokens")
        for family in options.families:
            say(f"{family}: {plan_of(family, options.leaf).key()}")
            # SmolLM2 is a thousand times larger: on one rank too as on several
            chosen = functools.partial(_chosen, at_least=2 if family == SMOLLM2 else 1, every=options.all)
            for name in options.dtypes:
                for record in sweep(pool, family, name, options.tp, chosen, options.leaf):
                    records.append(record)
                    if "control" in record:
                        say(
                            f"{family:10} {name:8} reference: logits {record['reference']['logits']}, loss "
                            f"{record['reference']['loss']}, {len(record['reference']) - 2} gradients; plain "
                            f"autograd: {record['control']} parameters depend on m"
                        )
                    else:
                        layout = Layout(record["micro_steps"], record["form"], record["checkpointing"])
                        verdict = "equal" if record["equal"] else f"DIFFERS: {record['wrong']}"
                        say(f"{family:10} {name:8} TP {record['tp']} {layout} {record['digest']} {verdict}")
        configurations = [record for record in records if "tp" in record]
        equal = sum(record["equal"] for record in configurations)
        controls = [record["control"] for record in records if "control" in record]
        say(
            f"{equal} of {len(configurations)} configurations equal; controls that differ: "
            f"{sum(map(bool, controls))} of {len(controls)}"
        )
    options.output.write_text(
        json.dumps({"commit": commit(), "torch": torch.__version__, "records": records}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
