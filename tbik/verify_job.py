"""What `tbik verify` runs: the model, the prompts, the configurations (layers, TP size, batch); what cannot be run.

    configurations = tp_sizes x modes x batch_sizes        plan = TreePlan.for_model(model, tp_sizes), one for all

With an engine (Options.product) shards are equal, so the plan is for equal shards. Prompts: texts where the checkpoint
has a tokenizer, else made-up ids. Errors: PlanError for what cannot run, before any process starts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tbik.decoder import DTYPES, DecoderConfig, Mode
from tbik.errors import PlanError
from tbik.plan import ModelShape, TreePlan

MODES: tuple[Mode, ...] = ("tbik", "stock")

TEXTS = (
    "How do bees make honey?",
    "Hello!",
    "List three uses of a prime number, then say which of them matters most for a bank and why it does.",
    "The capital of France is",
    "Once upon a time, in a small harbour town at the edge of a cold sea, there lived a clockmaker who was proud that "
    "none of her clocks ever disagreed. One winter a merchant brought her two clocks of her own making that showed "
    "different times, and asked her which of them was right. She took both apart, laid the wheels side by side on a "
    "linen cloth, and found that each wheel was the same as its twin, to the last tooth. What had differed was",
    "def fibonacci(n):",
    "Translate into German: the weather is fine today, so we walk to the lake and swim before lunch.",
    "2 + 2 =",
)
"""Prompt 0, after whose ninth token two continuations are almost equally likely, and its companions: shorter ones,
longer ones, one of more than 64 tokens.
"""


@dataclass(frozen=True)
class Options:
    """How a product's engines serve; fields as in EngineSettings."""

    product: str
    chunk: int | None = None
    prefix_cache: bool = False
    server: bool = False
    threads: int = 1
    max_sequences: int = 16
    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("chunk", self.chunk), ("threads", self.threads), ("max-sequences", self.max_sequences)):
            if value is not None and value < 1:
                raise PlanError(f"--{name}: expected at least 1, got {value}")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise PlanError(
                f"--temperature, --top-p: expected >= 0 and in (0, 1], got {self.temperature} and {self.top_p}"
            )
        if self.top_p < 1 and self.temperature == 0:
            raise PlanError("--top-p: greedy decoding does not use it; give --temperature too")


@dataclass(frozen=True)
class Job:
    """What is verified. prompts[0] is compared; batch b serves it with prompts 1..b-1, in the middle of them.

    engine: None for tbik.decoder. against: None or "hf". gradients: a training step too, tbik.trainer_gradients.
    """

    folder: str
    prompts: tuple[tuple[int, ...], ...]
    tp_sizes: tuple[int, ...] = (1, 2, 3, 9)
    batch_sizes: tuple[int, ...] = (1, 3, 8)
    dtype: str = "bfloat16"
    new_tokens: int = 12
    modes: tuple[Mode, ...] = MODES
    plan: TreePlan = field(default_factory=TreePlan)
    engine: Options | None = None
    against: str | None = None
    gradients: bool = False

    @property
    def configurations(self) -> list[Configuration]:
        return [Configuration(m, tp, b) for tp in self.tp_sizes for m in self.modes for b in self.batch_sizes]


class Configuration(NamedTuple):
    mode: Mode
    tp: int
    batch: int


def describe(configuration: Configuration) -> str:
    return f"{configuration.mode} layers, TP={configuration.tp}, batch {configuration.batch}"


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position where two token lists differ."""
    return next((i for i, (a, b) in enumerate(zip(tokens, others)) if a != b), None)


Progress = Callable[[str, int], None]
"""progress(what happens now, steps done since the last call)."""

Message = tuple[int, str, Configuration, Any]
"""(rank, kind, configuration, content): what a rank or an engine reports while it runs."""


def make_job(
    folder: Path,
    *,
    tp_sizes: Sequence[int],
    batch_sizes: Sequence[int],
    dtype: str = "bfloat16",
    new_tokens: int = 12,
    modes: Sequence[str] = MODES,
    prompts: Sequence[str] | None = None,
    prompt_tokens: tuple[int, int] | None = None,
    engine: Options | None = None,
    against: str | None = None,
    gradients: bool = False,
    leaf: str = "fma",
) -> tuple[Job, list[str] | None]:
    """The job and the texts of its prompts (None where the checkpoint has no tokenizer and ids are made up).

    prompt_tokens: (shortest, longest) prompt, made-up ids. Errors: PlanError for what cannot run, before any process.
    """
    shape, max_positions = _lengths(folder) if engine is not None else _lengths_of_decoder(folder)
    for name, values in (("--tp", tp_sizes), ("--batch", batch_sizes)):
        if not values or min(values) < 1 or len(set(values)) != len(values):
            raise PlanError(f"{name}: expected distinct integers >= 1, got {list(values)}")
    if dtype not in DTYPES:
        raise PlanError(f"--dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if new_tokens < 1:
        raise PlanError(f"--new-tokens: expected at least 1, got {new_tokens}")
    unknown = set(modes) - set(MODES)
    if unknown or not modes:
        raise PlanError(f"--layers: expected some of {', '.join(MODES)}, got {', '.join(modes) or 'none'}")
    if against not in (None, "hf") or (against is not None and engine is None):
        raise PlanError(f"--against: expected hf, together with --engine, got {against!r}")
    if gradients and engine is not None:
        raise PlanError("--gradients: an engine has none; leave --engine out")
    if engine is None:
        plan = TreePlan.for_model(shape, tp_sizes, leaf=leaf)
    else:
        plan = dataclasses.replace(_equal_plan(engine, shape, tp_sizes), leaf=leaf)
    if prompt_tokens is not None:
        if prompts is not None or not 1 <= prompt_tokens[0] <= prompt_tokens[1]:
            raise PlanError(
                f"--prompt-tokens: expected LOW-HIGH, 1 <= LOW <= HIGH, without --prompts, got {prompt_tokens}"
            )
        ids, texts = _made_up(shape, _spread(*prompt_tokens, max(batch_sizes))), None
    else:
        ids, texts = _prompt_ids(folder, shape, prompts, max(batch_sizes))
    longest = max(map(len, ids)) + new_tokens
    if longest > max_positions:
        raise PlanError(f"prompts: {longest} positions are needed, the model has {max_positions}")
    job = Job(
        folder=str(folder),
        prompts=tuple(ids),
        tp_sizes=tuple(tp_sizes),
        batch_sizes=tuple(batch_sizes),
        dtype=dtype,
        new_tokens=new_tokens,
        modes=tuple(m for m in MODES if m in modes),
        plan=plan,
        engine=engine,
        against=against,
        gradients=gradients,
    )
    return job, texts


def _lengths_of_decoder(folder: Path) -> tuple[ModelShape, int]:
    config = DecoderConfig.from_folder(folder)
    return config.shape, config.max_positions


def _lengths(folder: Path) -> tuple[ModelShape, int]:
    """Of a model that an engine serves: what it does not serve it refuses itself."""
    shape = ModelShape.from_config(folder)
    fields = json.loads((folder / "config.json").read_text())
    positions = (fields.get("text_config") or fields).get("max_position_embeddings")
    if not isinstance(positions, int):
        raise PlanError(f"{folder / 'config.json'}: expected max_position_embeddings, an integer, got {positions!r}")
    return shape, positions


def _equal_plan(engine: Options, shape: ModelShape, tp_sizes: Sequence[int]) -> TreePlan:
    """The plan for shards of equal size. Errors: PlanError naming the TP sizes that have none, and those that have."""

    def served(tp: int) -> bool:
        try:
            TreePlan.for_model(shape, [tp], equal=True)
        except PlanError:
            return False
        return True

    refused = [tp for tp in tp_sizes if not served(tp)]
    if not refused:
        return TreePlan.for_model(shape, tp_sizes, equal=True)
    working = [str(tp) for tp in range(1, shape.heads + 1) if served(tp)]
    lengths = ", ".join(f"{name} {length}" for name, length in shape.contractions().items() if name != "vocabulary")
    raise PlanError(
        f"--tp: {engine.product} gives every rank an equal shard, which TP={', '.join(map(str, refused))} cannot have: "
        f"{shape.heads} query heads, {shape.kv_heads} KV heads, {lengths}; TP sizes that work with it: "
        f"{', '.join(working)}. Without --engine uneven shards are served too"
    )


# --- prompts ----------------------------------------------------------------------------------------------------------


def tokenizer_of(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise PlanError(
            f"prompts: {folder} has a tokenizer, but the package tokenizers is not installed; "
            'install it with: pip install "tbik[hf]"'
        ) from error
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _prompt_ids(
    folder: Path, shape: ModelShape, prompts: Sequence[str] | None, needed: int
) -> tuple[list[tuple[int, ...]], list[str] | None]:
    tokenizer = tokenizer_of(folder)
    if prompts is not None and len(prompts) < needed:
        raise PlanError(f"--prompts: batch {needed} needs {needed} prompts, one a line, got {len(prompts)}")
    if tokenizer is None:
        if prompts is not None:
            raise PlanError(f"--prompts: {folder} has no tokenizer.json to read the prompts with")
        return _made_up(shape, [(24, 3, 40, 9, 90, 5, 31, 1)[i % 8] for i in range(needed)]), None
    texts = list(prompts) if prompts is not None else [TEXTS[i % len(TEXTS)] for i in range(needed)]
    if prompts is None and tokenizer.token_to_id("<|im_start|>") is not None:
        texts[0] = f"<|im_start|>user\n{texts[0]}<|im_end|>\n<|im_start|>assistant\n"
    ids = [tuple(tokenizer.encode(text).ids) for text in texts[:needed]]
    if any(not prompt for prompt in ids):
        raise PlanError("--prompts: a prompt has no tokens")
    return ids, texts[:needed]


def _made_up(shape: ModelShape, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(shape.vocab, (n,), generator=generator).tolist()) for n in lengths]


def _spread(low: int, high: int, count: int) -> list[int]:
    """`count` lengths from low to high, evenly."""
    return [low + (high - low) * i // max(1, count - 1) for i in range(count)]
