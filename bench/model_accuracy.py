"""A parallelized model against Hugging Face's own in fp32: logits, greedy texts, gradients. Figures, not bits.

    python bench/model_accuracy.py --json bench/results/model_accuracy.json

logits: largest |ours - theirs| over every position of every prompt. text: prompts whose --new-tokens greedy tokens are
the same. gradients: per tensor, largest |ours - theirs| / largest |theirs|, of the loss of all prompts, one micro-step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

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
    parser.add_argument("--json", type=Path, help="write the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    import tbik
    from tbik import models

    folder = models.smollm2()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [torch.tensor(tokenizer.encode(text).ids)[None] for text in PROMPTS]
    ours = tbik.load_checkpoint(folder, dtype=torch.float32)
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    with torch.no_grad():
        logits = max(float((ours(ids).logits - theirs(ids).logits).abs().max()) for ids in prompts)
    same = sum(torch.equal(greedy(ours, ids, options), greedy(theirs, ids, options)) for ids in prompts)
    figures = {
        "model": "SmolLM2-135M-Instruct, fp32",
        "torch": torch.__version__,
        "prompts": len(prompts),
        "max_abs_logit_difference": logits,
        "new_tokens": options.new_tokens,
        "equal_greedy_texts": same,
        **gradients(ours, theirs, prompts),
    }
    Console().print(figures)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


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
    mine = pieces(ours, gradients=True)
    relative = {
        name: float((mine[name].local - parameter.grad).abs().max() / parameter.grad.abs().max())
        for name, parameter in theirs.named_parameters()
    }
    worst = max(relative, key=lambda name: relative[name])
    return {"gradients": len(relative), "max_relative_gradient_difference": relative[worst], "of": worst}


if __name__ == "__main__":
    main()
