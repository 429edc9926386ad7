"""The claim on a real model: prompt 0's bits ignore the tensor-parallel size and the batch it is served in.

    record(mode, TP, batch) = per step: token, top 5 ids and fp32 logprob bits, digest of the whole fp32 logprob row
    unique(mode)            = |{record(mode, TP, batch)}|                         tbik: 1; stock: more
    delta(mode, TP, batch)  = max |logp - logp of the first configuration| while the tokens before are the same

Stock layers (torch's linear and all-reduce) are the control: a verification whose control also has one record shows
nothing, and its claim is false. Sharding is part of the claim: on every rank of every TP size
parameter bytes / all bytes <= (share + replicated) * 1.1 and, for TP > 1, bytes sent > 0; share = 1/TP, or the share of
ceil(heads/TP) heads where heads do not divide; replicated = what this rank holds and another one too.
Ranks are processes on this machine over gloo; they do not import transformers.
With an engine (Options.product) another product serves, its switch on ("tbik") and off ("stock"): then every prompt is
served, in groups of `batch`; a record holds the top 5 (engines report no whole rows) and its digest covers all prompts.
gradients: a training step at every TP and micro-batch size, tbik.trainer_gradients.
against = "hf": the trainer's log-probabilities of the sampled tokens, tbik.trainer_logprobs, under the same plan.
Errors: PlanError for sizes the model cannot serve; TransportError naming a rank that died.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tbik import __version__, ops, verify_engine
from tbik.decoder import Decoder, Mode, greedy
from tbik.engines import Answer
from tbik.plan import ModelShape
from tbik.verify_engine import TOP
from tbik.verify_job import (
    MODES,
    Configuration,
    Job,
    Message,
    Options,
    Progress,
    describe,
    first_difference,
    make_job,
    tokenizer_of,
)
from tbik.workers import COLLECTIVE_S, SILENCE_S, Link, Workers

__all__ = ["MODES", "Configuration", "Job", "Options", "Progress", "first_difference", "judge", "make_job", "run"]

BYTES_TOLERANCE = 1.1


def run(
    job: Job,
    *,
    texts: Sequence[str] | None = None,
    model: str = "",
    progress: Progress = lambda text, steps: None,
    silence_s: float = SILENCE_S,
    collective_s: float = COLLECTIVE_S,
) -> dict[str, Any]:
    """Runs every configuration and judges: the content of --json, see `judge`."""
    start, where = time.monotonic(), environment()
    gathered = _Gathered(job)
    messages = (
        _decode(job, progress, silence_s, collective_s) if job.engine is None else verify_engine.serve(job, silence_s)
    )
    for rank, kind, configuration, content in messages:
        if kind == "step":
            progress(describe(configuration), content or 1)
        elif kind == "loading":
            progress(f"{describe(configuration)}: loading", 0)
        else:
            gathered.add(rank, kind, configuration, content)
    tokenizer = tokenizer_of(Path(job.folder))
    report = judge(job, gathered)
    if job.against is not None:
        from tbik import trainer_logprobs

        progress("the trainer's log-probabilities", 0)
        report["against"] = trainer_logprobs.compare(job, gathered.answers)
        report["reasons"] += trainer_logprobs.reasons_against(report["against"])
        report["claim"] = not report["reasons"]
    if job.gradients:
        from tbik import trainer_gradients

        progress("gradients: starting", 0)
        report["gradients"] = trainer_gradients.compare(job, progress, silence_s, collective_s)
        report["reasons"] += trainer_gradients.reasons_against(report["gradients"])
        report["claim"] = not report["reasons"]
    report |= {
        "model": model or job.folder,
        "seconds": round(time.monotonic() - start, 1),
        "prompt": None if texts is None else texts[0],
        "environment": where | gathered.environment,
    }
    if tokenizer is not None:
        for entry in report["records"]:
            entry["text"] = tokenizer.decode(entry["tokens"])
    return report


def _decode(job: Job, progress: Progress, silence_s: float, collective_s: float) -> Iterator[Message]:
    """Every configuration with tbik.decoder, all TP sizes in one world of processes."""
    world = max(job.tp_sizes)
    progress(f"starting {world} rank{'s' if world > 1 else ''}", 0)
    with Workers(world, _task, job, sizes=job.tp_sizes, silence_s=silence_s, collective_s=collective_s) as workers:
        waiting = list(job.tp_sizes)
        unfinished = _start_next(workers, waiting)
        for rank, (kind, configuration, content) in workers.messages():
            if kind != "finished":
                yield rank, kind, configuration, content
                continue
            unfinished -= {rank}
            if not unfinished:
                unfinished = _start_next(workers, waiting)


def _start_next(workers: Workers, waiting: list[int]) -> set[int]:
    """Tells the ranks of the next TP size to begin; returns them. The others stay idle, outside any collective."""
    if not waiting:
        for rank in range(workers.world_size):
            workers.tell(rank, None)
        return set()
    tp = waiting.pop(0)
    for rank in range(tp):
        workers.tell(rank, tp)
    return set(range(tp))


# --- on the ranks -----------------------------------------------------------------------------------------------------


def _task(rank: int, link: Link, job: Job) -> None:
    """What one rank does: the TP sizes the parent names, until it names none."""
    while (tp := link.receive()) is not None:
        for mode in job.modes:
            _run_mode(rank, link, job, tp, mode)
        link.send(("finished", Configuration(job.modes[0], tp, 0), None))


def _run_mode(rank: int, link: Link, job: Job, tp: int, mode: Mode) -> None:
    from tbik.collectives import bytes_sent, reset_bytes_sent

    group = link.group(tp)
    if rank == 0:
        link.send(("loading", Configuration(mode, tp, job.batch_sizes[0]), None))
    decoder = Decoder(job.folder, plan=job.plan, group=group, mode=mode, dtype=job.dtype)
    if mode == job.modes[0]:
        link.send(("shards", Configuration(mode, tp, 0), decoder.loaded_bytes))
    for batch in job.batch_sizes:
        configuration = Configuration(mode, tp, batch)
        if group is not None:
            reset_bytes_sent(group)
        rows = []
        for row in _serve_prompt(decoder, job, batch):
            rows.append(row)
            if rank == 0:
                link.send(("step", configuration, None))
        record = _record(rows)
        if rank == 0:
            link.send(("rows", configuration, torch.stack([row for _, row in rows]).numpy()))
        sent = 0 if group is None or mode != "tbik" else bytes_sent(group)
        link.send(("record", configuration, {**record, "bytes_sent": sent}))


def _serve_prompt(decoder: Decoder, job: Job, batch: int) -> Iterator[tuple[int, Tensor]]:
    """Per step: prompt 0's token and fp32 logprob row [V]."""
    companions = list(job.prompts[1:batch])
    index = len(companions) // 2
    prompts = [*companions[:index], job.prompts[0], *companions[index:]]
    for tokens, logits in greedy(decoder, prompts, job.new_tokens):
        yield tokens[index], decoder.log_softmax(logits[index])


def _record(rows: Iterable[tuple[int, Tensor]]) -> dict[str, Any]:
    """Tokens, top ids, top logprob bits (hexadecimal), digest of each row, and one digest of all of it."""
    record: dict[str, Any] = {"tokens": [], "top_ids": [], "top_bits": [], "row_digests": []}
    for token, row in rows:
        top = ops.top_k(row, min(TOP, len(row))).ids  # ties to the lower id
        record["tokens"].append(token)
        record["top_ids"].append(top.tolist())
        record["top_bits"].append([f"{bits & 0xFFFFFFFF:08x}" for bits in row[top].view(torch.int32).tolist()])
        record["row_digests"].append(hashlib.sha256(row.contiguous().numpy().tobytes()).hexdigest()[:16])
    record["digest"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
    return record


# --- in the parent ----------------------------------------------------------------------------------------------------


class _Gathered:
    """What the ranks reported. Logprob rows are compared as they arrive; only the first configuration's are kept.

    deltas: per position; differences: the first position with another token. Both against the mode's first
    configuration; over all prompts where an engine answered, else of prompt 0. answers: of engines only.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.records: dict[Configuration, dict[int, dict[str, Any]]] = {}
        self.shards: dict[int, dict[int, Mapping[str, Any]]] = {}
        self.deltas: dict[Configuration, list[float]] = {}
        self.differences: dict[Configuration, int | None] = {}
        self.answers: dict[Configuration, list[Answer]] = {}
        self.environment: dict[str, Any] = {}
        self._rows: dict[Configuration, Tensor] = {}
        self._first: dict[Mode, tuple[Configuration, Tensor]] = {}

    def add(self, rank: int, kind: str, configuration: Configuration, content: Any) -> None:
        if kind == "shards":
            self.shards.setdefault(configuration.tp, {})[rank] = content
        elif kind == "rows":
            self._rows[configuration] = torch.from_numpy(content)
        elif kind == "environment":
            self.environment = dict(content)
        elif kind == "answers":
            self.answers[configuration] = content
            self._compare_answers(configuration)
        elif kind == "record":
            self.records.setdefault(configuration, {})[rank] = content
            if rank == 0 and configuration in self._rows:
                self._compare(configuration, self._rows.pop(configuration))

    def _compare(self, configuration: Configuration, rows: Tensor) -> None:
        reference, expected = self._first.setdefault(configuration.mode, (configuration, rows))
        common = first_difference(self.records[configuration][0]["tokens"], self.records[reference][0]["tokens"])
        # the step that chooses another token still has the same tokens before it
        steps = len(rows) if common is None else common + 1
        delta = torch.where(rows == expected, 0.0, (rows - expected).abs())
        self.deltas[configuration] = delta[:steps].amax(dim=1).tolist()
        self.differences[configuration] = common

    def _compare_answers(self, configuration: Configuration) -> None:
        reference = next(c for c in self.answers if c.mode == configuration.mode)
        deltas, difference = verify_engine.compare(self.answers[configuration], self.answers[reference])
        self.deltas[configuration], self.differences[configuration] = deltas, difference


def judge(job: Job, gathered: _Gathered) -> dict[str, Any]:
    """claim = tbik has one record, on all ranks; it really shards; the control has several. `reasons` if not."""
    records, reasons = [], []
    extra = ("answer_digests", "cached_tokens") if job.engine is not None else ()
    for configuration in job.configurations:
        by_rank = gathered.records[configuration]
        mine = by_rank[0]
        agree = all(by_rank[rank]["digest"] == mine["digest"] for rank in range(configuration.tp))
        if not agree and configuration.mode == "tbik":
            reasons.append(f"{describe(configuration)}: the ranks disagree")
        records.append(
            {
                **configuration._asdict(),
                **{key: mine[key] for key in ("digest", "tokens", "top_ids", "top_bits", "row_digests", *extra)},
                "ranks_agree": agree,
                "max_abs_dlogprob": max(gathered.deltas[configuration]),
                "dlogprob_by_position": gathered.deltas[configuration],
                "first_differing_token": gathered.differences[configuration],
            }
        )
    unique = {mode: len({r["digest"] for r in records if r["mode"] == mode}) for mode in job.modes}
    deltas = {mode: max(r["max_abs_dlogprob"] for r in records if r["mode"] == mode) for mode in job.modes}
    if unique.get("tbik", 1) != 1:
        reasons.append(f"tbik layers gave {unique['tbik']} unique outputs")
    if "tbik" not in job.modes:
        reasons.append("tbik layers were not run")
    if unique.get("stock") == 1:
        reasons.append("stock layers gave one unique output too: this run could not have found a difference")
    if job.engine is not None and job.engine.prefix_cache and not any(r["cached_tokens"] for r in records):
        reasons.append("the prefix cache was never hit; its blocks may be longer than these prompts (--prompt-tokens)")
    shape = ModelShape.from_config(job.folder)
    by_tp = {tp: _sharding(job, gathered, shape, tp) for tp in job.tp_sizes}
    for tp, entry in by_tp.items():
        if not entry["sharded"]:
            reasons.append(f"TP={tp}: not really sharded, see per_rank.by_tp")
    largest = by_tp[max(job.tp_sizes)]
    return {
        "claim": not reasons,
        "reasons": reasons,
        "configurations": len(records) // len(job.modes),
        "unique": unique,
        "max_abs_dlogprob": deltas,
        "per_rank": {
            "tp": max(job.tp_sizes),
            "parameter_bytes": largest["parameter_bytes"],
            "bytes_sent": largest["bytes_sent"],
            "by_tp": {str(tp): entry for tp, entry in by_tp.items()},
        },
        "plan": {"key": job.plan.key(), "fingerprint": job.plan.fingerprint()},
        "job": {key: value for key, value in asdict(job).items() if key not in ("plan", "prompts")},
        "prompt_lengths": [len(prompt) for prompt in job.prompts],
        "records": records,
    }


def _sharding(job: Job, gathered: _Gathered, shape: ModelShape, tp: int) -> dict[str, Any]:
    """Per rank of one TP size: bytes held, bytes sent, the limit, and whether every rank keeps to it."""
    shards = [gathered.shards[tp][rank] for rank in range(tp)]
    held = [sum(size for _, size in shard.values()) for shard in shards]
    total, replicated = 0.0, [0.0] * tp
    for name in shards[0]:
        (lo, hi), size = shards[0][name]
        unit = size / (hi - lo)
        holders: dict[int, list[int]] = {}
        for rank, shard in enumerate(shards):
            for piece in range(*shard[name][0]):
                holders.setdefault(piece, []).append(rank)
        total += unit * len(holders)
        for ranks in holders.values():
            if len(ranks) > 1:
                for rank in ranks:
                    replicated[rank] += unit
    share = max(1 / tp, math.ceil(shape.heads / tp) / shape.heads)
    limits = [(share + extra / total) * BYTES_TOLERANCE if tp > 1 else 1.0 for extra in replicated]
    sent = [
        sum(gathered.records[c][rank]["bytes_sent"] for c in job.configurations if c.tp == tp) for rank in range(tp)
    ]
    fits = all(size / total <= limit for size, limit in zip(held, limits))
    return {
        "parameter_bytes": held,
        "parameter_fraction": [size / total for size in held],
        "limit_fraction": limits,
        "replicated_fraction": [extra / total for extra in replicated],
        "bytes_sent": sent,
        "sharded": fits and (tp == 1 or "tbik" not in job.modes or min(sent) > 0),
    }


# --- surroundings ----------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Versions and the machine, for the reader of a report."""
    from tbik import _C

    return {
        "tbik": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cpu_paths": list(_C.cpu_paths()),
        "transport": "gloo",
    }


def commit() -> str | None:
    """The commit of the checkout that this package lies in, with + if its files were changed; None outside of one."""
    folder = Path(__file__).parent
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
        inside = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if head.returncode or inside.returncode or changed.returncode:
        return None
    return head.stdout.strip() + ("+" if changed.stdout else "")


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
