"""The trainer's log-probabilities of tokens that a sampler chose, against the sampler's own, by bit patterns.

    logp_i    = log_softmax(model(prompt, t_0 .. t_(i-1)))[t_i]          one forward over prompt and answer, no cache
    differing = #{i : bits(trainer's logp_i) != bits(sampler's logp_i)}

Two trainers: "tbik", the parallelized Hugging Face model on one rank, and "stock", the model as transformers gives it,
the control. Both take batches of whole sequences, padded on the right.
Raw log-probabilities are compared, those of the logits. A sampler with a temperature or top-p may report others,
renormalised over the tokens that stay; `renormalised` counts how many would differ for that reason alone.
Needs transformers; runs in a process of its own (tbik.workers). Errors: PlanError for a model that parallelize refuses.
Bits: "tbik" is batch-invariant and layout-invariant, so padding, company and order of the sequences do not matter
(tests/test_parallelize.py, tests/test_vllm_engine.py).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tbik.decoder import DTYPES, Mode
from tbik.engines import Answer
from tbik.errors import IntegrityError
from tbik.plan import TreePlan
from tbik.verify_engine import RAW, distance
from tbik.verify_job import Configuration, Job
from tbik.workers import Link, Workers

LOGITS_BYTES = 1 << 28
"""Of one batch, about."""


class Sampled(NamedTuple):
    """One answer of a sampler: its prompt, its tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Scoring:
    """What the trainer scores. dtype: of activations; where weights are stored in bf16 and it is fp32: LayerCast."""

    folder: str
    plan: TreePlan
    dtype: str
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def stored_dtype(self) -> str:
        """Of the checkpoint's weights, as its config.json says."""
        config = json.loads((Path(self.folder) / "config.json").read_text())
        return str(config.get("dtype") or config.get("torch_dtype") or "float32")

    @property
    def layercast(self) -> bool:
        return self.dtype == "float32" and self.stored_dtype == "bfloat16"


class Scores(NamedTuple):
    """bits: per answer and token, of the fp32 log-probability. plan: fingerprint of the model's plan, None for stock.

    renormalised: tokens whose log-probability differs from the raw one after temperature and top-p; 0 if greedy.
    """

    bits: dict[Sampled, list[str]]
    plan: str | None
    renormalised: int


def score(scoring: Scoring, answers: dict[Mode, Sequence[Sampled]], silence_s: float = 600.0) -> dict[Mode, Scores]:
    """Scores each mode's answers with the trainer of that mode. Equal answers are scored once."""
    scores: dict[Mode, Scores] = {}
    wanted = {mode: sorted(set(sampled)) for mode, sampled in answers.items()}
    with Workers(1, _task, (scoring, wanted), silence_s=silence_s) as workers:
        for _, (mode, *content) in workers.messages():
            scores[mode] = Scores(*content)
    return scores


def _task(rank: int, link: Link, argument: tuple[Scoring, dict[Mode, list[Sampled]]]) -> None:
    scoring, wanted = argument
    for mode, answers in wanted.items():
        link.send((mode, *_score(scoring, mode, answers)))


def _score(scoring: Scoring, mode: Mode, answers: Sequence[Sampled]) -> Scores:
    import torch

    model, plan = _load(scoring, mode)
    bits: dict[Sampled, list[str]] = {}
    renormalised = 0
    with torch.no_grad():
        for batch in _batches(answers, int(model.config.vocab_size)):
            width = max(len(prompt) + len(tokens) for prompt, tokens in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.int64)
            mask = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, (prompt, tokens) in enumerate(batch):
                ids[row, : len(prompt) + len(tokens)] = torch.tensor([*prompt, *tokens])
                mask[row, : len(prompt) + len(tokens)] = 1
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            for row, answer in enumerate(batch):
                first = len(answer.prompt) - 1
                chosen = torch.tensor(answer.tokens)
                mine = logits[row, first : first + len(chosen)]
                logp = _logprobs(mine, chosen, plan)
                bits[answer] = _bits(logp)
                if scoring.temperature > 0:
                    kept = _renormalise(mine.float(), scoring.temperature, scoring.top_p)
                    processed = _logprobs(kept, chosen, plan)
                    renormalised += int((processed.view(torch.int32) != logp.view(torch.int32)).sum())
    return Scores(bits, None if plan is None else plan.fingerprint(), renormalised)


def _load(scoring: Scoring, mode: Mode) -> tuple[Any, TreePlan | None]:
    """The model, and the plan that it really runs under."""
    dtype = DTYPES[scoring.dtype]
    if mode == "tbik":
        from tbik.huggingface.parallelize import load_checkpoint

        stored = DTYPES["bfloat16"] if scoring.layercast else dtype
        model = load_checkpoint(scoring.folder, None, scoring.plan, dtype=stored, compute_dtype=dtype)
        return model, model.setting.plan
    return stock_model(scoring.folder, dtype).eval(), None


def stock_model(folder: str, dtype: Any) -> Any:
    """The model as transformers gives it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()  # its lock would outlive the process, and be complained of
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _batches(answers: Sequence[Sampled], vocab: int) -> list[list[Sampled]]:
    """Answers of like length together, as many as LOGITS_BYTES allow."""
    batches: list[list[Sampled]] = []
    for answer in sorted(answers, key=lambda a: len(a.prompt) + len(a.tokens)):
        width = len(answer.prompt) + len(answer.tokens)
        if batches and (len(batches[-1]) + 1) * width * vocab * 4 <= LOGITS_BYTES:
            batches[-1].append(answer)
        else:
            batches.append([answer])
    return batches


def _logprobs(logits: Any, ids: Any, plan: TreePlan | None) -> Any:
    """fp32 [T] of logits [T, V], ids [T]; plan None: torch's own."""
    if plan is None:
        return logits.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    from tbik import ops

    return ops.logprobs(logits, ids, plan.leaves)


def _renormalise(logits: Any, temperature: float, top_p: float) -> Any:
    """What a sampler draws from: logits / temperature, and -inf outside the smallest set of probability top_p."""
    import torch

    scaled = logits / temperature
    if top_p < 1:
        values, order = scaled.sort(dim=-1, descending=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_p)
        scaled = scaled.masked_fill(dropped, -torch.inf)
    return scaled


def _bits(logp: Any) -> list[str]:
    return [struct.pack(">f", value).hex() for value in logp.tolist()]


# --- against an engine ------------------------------------------------------------------------------------------------


def compare(job: Job, answers: Mapping[Configuration, Sequence[Answer]]) -> dict[str, Any]:
    """The trainer's log-probabilities beside the engine's, mode by mode: `differing_bit_patterns` is tbik's."""
    assert job.engine is not None
    scoring = Scoring(job.folder, job.plan, job.dtype, job.engine.temperature, job.engine.top_p)

    def sampled(configuration: Configuration) -> list[Sampled]:
        return [Sampled(p, tuple(a.tokens)) for p, a in zip(job.prompts, answers[configuration])]

    scores = score(
        scoring, {mode: [s for c in job.configurations if c.mode == mode for s in sampled(c)] for mode in job.modes}
    )
    rows: list[dict[str, Any]] = []
    for configuration in job.configurations:
        trainer = scores[configuration.mode]
        if configuration.mode == "tbik" and trainer.plan != job.plan.fingerprint():
            raise IntegrityError(
                f"--against {job.against}: the trainer runs under plan {trainer.plan}, the engine under "
                f"{job.plan.fingerprint()}; outputs under two plans are not comparable"
            )
        pairs = [
            (mine, theirs)
            for s, answer in zip(sampled(configuration), answers[configuration], strict=True)
            for mine, theirs in zip(trainer.bits[s], answer.bits, strict=True)
        ]
        rows.append(
            {
                **configuration._asdict(),
                "tokens": len(pairs),
                "differing_bit_patterns": sum(mine != theirs for mine, theirs in pairs),
                "max_abs_dlogprob": max(distance(mine, theirs) for mine, theirs in pairs),
            }
        )
    sums = {mode: _sum_of([row for row in rows if row["mode"] == mode]) for mode in job.modes}
    for mode, entry in sums.items():
        entry["renormalised_would_differ"] = scores[mode].renormalised
    return {
        "trainer": job.against,
        "plan": job.plan.fingerprint(),
        "logprobs": RAW,
        "layercast": scoring.layercast,
        **sums.get("tbik", {"differing_bit_patterns": None}),
        **({"stock": sums["stock"]} if "stock" in sums else {}),
        "by_configuration": rows,
    }


def _sum_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "tokens": sum(row["tokens"] for row in rows),
        "differing_bit_patterns": sum(row["differing_bit_patterns"] for row in rows),
        "max_abs_dlogprob": max(row["max_abs_dlogprob"] for row in rows),
    }


def reasons_against(against: Mapping[str, Any]) -> list[str]:
    reasons = []
    if against["differing_bit_patterns"]:
        reasons.append(
            f"trainer and sampler differ in {against['differing_bit_patterns']} of {against['tokens']} values"
        )
    if "stock" in against and against["stock"]["differing_bit_patterns"] == 0:
        reasons.append("stock trainer and sampler agree too: this run could not have found a difference")
    return reasons
