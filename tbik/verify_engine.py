"""The configurations of `tbik verify --engine`: another product serves, its switch on ("tbik") and off ("stock").

    record(mode, TP, batch) = per prompt and step: token, its fp32 logprob bits, top 5 ids and bits      digest of all

One process per TP size and mode serves all batch sizes; every prompt is served, in groups of `batch`. Refused are ranks
that run under another plan than the job's and log-probabilities that are not raw ones.
Errors: PlanError, IntegrityError; those of tbik.engines.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tbik.engines import Answer, EngineProcess, EngineSettings
from tbik.errors import IntegrityError, PlanError
from tbik.verify_job import Configuration, Job, Message, describe, first_difference

TOP = 5
RAW = "raw_logprobs"


def serve(job: Job, silence_s: float) -> Iterator[Message]:
    """Every configuration with an engine; one process per TP size and mode serves all batch sizes."""
    assert job.engine is not None
    longest = max(map(len, job.prompts)) + job.new_tokens
    options = {option.name: getattr(job.engine, option.name) for option in fields(job.engine)}
    for tp in job.tp_sizes:
        for mode in job.modes:
            yield 0, "loading", Configuration(mode, tp, job.batch_sizes[0]), None
            settings = EngineSettings(
                folder=job.folder, tp=tp, mode=mode, plan=job.plan, dtype=job.dtype, longest=longest, **options
            )
            with EngineProcess(settings, reply_s=silence_s) as engine:
                _require_comparable(job, Configuration(mode, tp, 0), engine.ranks)
                for report in engine.ranks:
                    yield report["rank"], "environment", Configuration(mode, tp, 0), report["environment"]
                    if mode == job.modes[0]:
                        yield report["rank"], "shards", Configuration(mode, tp, 0), report["shards"]
                for batch in job.batch_sizes:
                    yield from _serve_batch(job, Configuration(mode, tp, batch), engine)


def _serve_batch(job: Job, configuration: Configuration, engine: EngineProcess) -> Iterator[Message]:
    answers: list[Answer] = []
    for first in range(0, len(job.prompts), configuration.batch):
        group = job.prompts[first : first + configuration.batch]
        answers += engine.generate(group, job.new_tokens, TOP, seeds=range(first, first + len(group)))[0]
    yield 0, "step", configuration, job.new_tokens
    yield 0, "answers", configuration, answers
    record = _record_of_answers(answers)
    for report in engine.report():
        sent = report["bytes_sent"] if configuration.mode == "tbik" else 0
        yield report["rank"], "record", configuration, {**record, "bytes_sent": sent}


def _require_comparable(job: Job, configuration: Configuration, ranks: Sequence[Mapping[str, Any]]) -> None:
    """One plan on all ranks, the job's, and raw log-probabilities. Errors: PlanError, IntegrityError."""
    where = describe(configuration)
    expected = job.plan.fingerprint() if configuration.mode == "tbik" else None
    for report in ranks:
        if report["plan"] != expected:
            raise IntegrityError(
                f"{where}: rank {report['rank']} runs under plan {report['plan'] or 'none'}, expected "
                f"{expected or 'none, its switch being off'}; outputs under two plans are not comparable"
            )
        if report["logprobs_mode"] != RAW:
            raise PlanError(
                f"{where}: rank {report['rank']} reports {report['logprobs_mode']}, expected {RAW}: log-probabilities "
                "after temperature, top-k and top-p are renormalised over the tokens that stay"
            )


def _record_of_answers(answers: Sequence[Answer]) -> dict[str, Any]:
    """As _record of prompt 0, with row digests over its top entries; the digest covers the answers to all prompts."""
    contents = [[a.tokens, a.bits, a.top_ids, a.top_bits] for a in answers]
    first = answers[0]
    return {
        "tokens": first.tokens,
        "top_ids": first.top_ids,
        "top_bits": first.top_bits,
        "row_digests": [_digest(list(row)) for row in zip(first.top_ids, first.top_bits)],
        "answer_digests": [_digest(content) for content in contents],
        "cached_tokens": sum(a.cached for a in answers),
        "digest": _digest(contents),
    }


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def compare(answers: Sequence[Answer], others: Sequence[Answer]) -> tuple[list[float], int | None]:
    """(largest |delta logprob| of ids both list, per position while tokens agree; first position of another token)."""
    deltas: list[float] = []
    differences = []
    for answer, expected in zip(answers, others, strict=True):
        common = first_difference(answer.tokens, expected.tokens)
        differences += [] if common is None else [common]
        for step in range(len(answer.tokens) if common is None else common + 1):
            theirs = dict(zip(expected.top_ids[step], expected.top_bits[step], strict=True))
            mine = zip(answer.top_ids[step], answer.top_bits[step], strict=True)
            delta = max((distance(bits, theirs[i]) for i, bits in mine if i in theirs), default=0.0)
            deltas += [0.0] if step == len(deltas) else []
            deltas[step] = max(deltas[step], delta)
    return deltas, min(differences, default=None)


def value_of(bits: str) -> float:
    value: float = struct.unpack(">f", bytes.fromhex(bits))[0]
    return value


def distance(bits: str, others: str) -> float:
    return 0.0 if bits == others else abs(value_of(bits) - value_of(others))
