"""A parallelized model against Hugging Face's own in fp32: logits, greedy texts, gradients. Figures, not bits.

    python bench/model_accuracy.py --json bench/results/model_accuracy.json

logits: largest |ours - theirs| over every position of every prompt. text: prompts whose --new-tokens greedy tokens are
the same. gradients: per tensor |a - b| / |b| in the 2-norm, of the loss of all prompts in one micro-step, largest of
all tensors; ours against theirs, and both against Hugging Face in fp64 (with the fp32 tables of rope and the fp32 norms
it always has, but the loss in fp64: its own is computed in fp32 whatever the weights are).
frequencies: the same with rope's frequencies as Hugging Face rounds them, in fp32; ours are rounded once, from fp64.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

KINDS = ("logits", "text", "gradients", "frequencies")
PROMPTS = (
    "How do bees make honey?",
    "The capital of France is",
    "def fibonacci(n):",
    "2 + 2 =",
    "Once upon a time, in a small harbour town,",
    "Translate into German: good morning.",
    "Water boils at",
    "The opposite of cold is",
    "My favourite season is",
    "A triangle has",
    "To bake bread you need",
    "The moon goes round",
    "In the year 1492,",
    "Rain falls because",
    "A good night's sleep",
    "for i in range(10):",
    "Roses are red,",
    "The quick brown fox",
    "Dear Sir or Madam,",
    "List three fruits:",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--json", type=Path, help="write the figures; those of other kinds that the file has stay")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import transformers
    from models import commit
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    import tbik
    from tbik import _C, models

    folder = models.smollm2()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [torch.tensor(tokenizer.encode(text).ids)[None] for text in PROMPTS]
    ours = tbik.load_checkpoint(folder, dtype=torch.float32)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    figures: dict[str, Any] = {"model": "SmolLM2-135M-Instruct, fp32", "torch": torch.__version__}
    figures |= {"transformers": transformers.__version__, "path": _C.default_path("float32"), "commit": commit()}
    figures["prompts"] = len(prompts)
    if "logits" in options.kinds:
        with torch.no_grad():
            differences = [float((ours(ids).logits - theirs(ids).logits).abs().max()) for ids in prompts]
        figures["max_abs_logit_difference"] = max(differences)
    if "text" in options.kinds:
        same = sum(torch.equal(greedy(ours, ids, options), greedy(theirs, ids, options)) for ids in prompts)
        figures |= {"new_tokens": options.new_tokens, "equal_greedy_texts": same}
    if "gradients" in options.kinds:
        figures |= gradients(ours, theirs, prompts)
    if "frequencies" in options.kinds:
        figures["with_their_frequencies"] = with_their_frequencies(ours, theirs, prompts)
    Console().print(figures)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(before | figures, indent=1) + "\n")


def greedy(model: Any, ids: torch.Tensor, options: argparse.Namespace) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=options.new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return tokens


def gradients(ours: Any, theirs: Any, prompts: list[torch.Tensor]) -> dict[str, Any]:
    from tbik.huggingface.checkpoint import pieces
    from tbik.huggingface.rows import SampleBatch

    batch = SampleBatch([ids[0] for ids in prompts])
    ours.train()
    theirs.train()
    ours(**batch.packed()).loss.backward()
    theirs(**batch.padded("right"), use_cache=False).loss.backward()
    truth = copy.deepcopy(theirs).double()
    truth.zero_grad()
    arguments = batch.padded("right")
    targets = torch.nn.functional.pad(arguments.pop("labels")[:, 1:], (0, 1), value=-100)
    logits = truth(**arguments, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    found = {
        "ours": {name: piece.local for name, piece in pieces(ours, gradients=True).items()},
        "theirs": {name: parameter.grad for name, parameter in theirs.named_parameters()},
        "fp64": {name: parameter.grad for name, parameter in truth.named_parameters()},
    }

    def worst(a: str, b: str) -> float:
        return max(relative(found[a][name], found[b][name]) for name in found[b])

    return {
        "gradients": len(found["theirs"]),
        "max_relative_gradient_difference": worst("ours", "theirs"),
        "ours_against_fp64": worst("ours", "fp64"),
        "theirs_against_fp64": worst("theirs", "fp64"),
    }


def with_their_frequencies(ours: Any, theirs: Any, prompts: list[torch.Tensor]) -> dict[str, float]:
    from tbik.huggingface.checkpoint import pieces
    from tbik.huggingface.rows import SampleBatch

    (kind, mine), *_ = ours.setting.frequencies.items()
    ours.setting.frequencies = {kind: mine._replace(inv_freq=theirs.model.rotary_emb.inv_freq.clone())}
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        logits = max(float((ours(ids).logits - theirs(ids).logits).abs().max()) for ids in prompts)
    for model in (ours, theirs):
        model.train()
        model.zero_grad()
    batch = SampleBatch([ids[0] for ids in prompts])
    ours(**batch.packed()).loss.backward()
    theirs(**batch.padded("right"), use_cache=False).loss.backward()
    found = pieces(ours, gradients=True)
    gradient = max(relative(found[name].local, parameter.grad) for name, parameter in theirs.named_parameters())
    return {"max_abs_logit_difference": logits, "max_relative_gradient_difference": gradient}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


if __name__ == "__main__":
    main()
