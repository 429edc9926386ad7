"""One digest of every parameter gradient of a step, per TP size and micro-batch size; the control is stock's.

    step     = the first B prompts, B the largest power of two that a batch size reaches; loss = token sum / all targets
    record   = digest of all gradients (tbik.fingerprint, of whole tensors) and of the token sum's bits
    batch b  -> micro-batches of m samples, m the largest power of two <= b

"tbik": the parallelized Hugging Face model at every TP size, its micro-batches in a GradientTree: one record.
"stock": the model as transformers gives it on one rank, its micro-batches added by autograd: several, else the run
could not have found a difference. Weights in the dtype of the run; tbik's gradients are fp32.
Needs transformers; runs in processes of its own (tbik.workers). Errors: PlanError for a model that parallelize refuses.
Bits: layout-invariant (tests/test_parallelize.py, tests/test_trainer_gradients.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tbik.decoder import DTYPES
from tbik.verify_job import Configuration, Job, Progress
from tbik.workers import COLLECTIVE_S, SILENCE_S, Link, Workers


def samples_of(job: Job) -> int:
    """B: samples of a step."""
    return micro_samples(min(max(job.batch_sizes), len(job.prompts)))


def micro_samples(batch: int) -> int:
    """m: the largest power of two <= batch."""
    return 1 << (batch.bit_length() - 1)


def configurations_of(job: Job) -> list[Configuration]:
    """tbik at every TP size, stock on one rank."""
    return [c for c in job.configurations if c.mode == "tbik" or c.tp == job.tp_sizes[0]]


def compare(
    job: Job, progress: Progress, silence_s: float = SILENCE_S, collective_s: float = COLLECTIVE_S
) -> dict[str, Any]:
    """The content of "gradients" in --json."""
    found: dict[Configuration, dict[int, dict[str, str]]] = {}
    world = max(job.tp_sizes)
    with Workers(world, _task, job, sizes=job.tp_sizes, silence_s=silence_s, collective_s=collective_s) as workers:
        waiting = list(job.tp_sizes)
        unfinished = _start_next(workers, waiting)
        for rank, (configuration, record) in workers.messages():
            if configuration is not None:
                found.setdefault(configuration, {})[rank] = record
                if rank == 0:
                    progress(f"gradients, {configuration.mode}, TP={configuration.tp}", 0)
                continue
            unfinished -= {rank}
            if not unfinished:
                unfinished = _start_next(workers, waiting)
    return judge(job, found)


def judge(job: Job, found: Mapping[Configuration, Mapping[int, Mapping[str, str]]]) -> dict[str, Any]:
    """Records, and how many are unique by mode."""
    records = []
    for configuration in configurations_of(job):
        by_rank = found[configuration]
        m = min(micro_samples(configuration.batch), samples_of(job))
        records.append(
            {
                **configuration._asdict(),
                "tp": configuration.tp if configuration.mode == "tbik" else 1,
                "micro_steps": samples_of(job) // m,
                "samples_per_micro_step": m,
                **by_rank[0],
                "ranks_agree": all(record == by_rank[0] for record in by_rank.values()),
            }
        )
    unique = {mode: len({(r["gradients"], r["loss"]) for r in records if r["mode"] == mode}) for mode in job.modes}
    return {"samples": samples_of(job), "unique": unique, "records": records}


def reasons_against(gradients: Mapping[str, Any]) -> list[str]:
    """Why the gradients do not show the claim; nothing if they do."""
    reasons = []
    if gradients["unique"].get("tbik", 1) != 1:
        reasons.append(f"the gradients have {gradients['unique']['tbik']} unique digests with tbik layers")
    if not all(record["ranks_agree"] for record in gradients["records"]):
        reasons.append("the ranks disagree about the gradients")
    if gradients["unique"].get("stock") == 1:
        reasons.append("stock gradients have one digest too: this run could not have found a difference")
    return reasons


def _start_next(workers: Workers, waiting: list[int]) -> set[int]:
    """Tells the ranks of the next TP size to begin; returns them."""
    tp = waiting.pop(0) if waiting else None
    ranks = range(workers.world_size if tp is None else tp)
    for rank in ranks:
        workers.tell(rank, tp)
    return set() if tp is None else set(ranks)


# --- on the ranks -----------------------------------------------------------------------------------------------------


def _task(rank: int, link: Link, job: Job) -> None:
    while (tp := link.receive()) is not None:
        for mode in job.modes:
            chosen = [c for c in configurations_of(job) if (c.mode, c.tp) == (mode, tp)]
            if mode == "stock" and rank:
                continue
            for configuration, record in _records(job, chosen, link.group(tp)):
                link.send((configuration, record))
        link.send((None, None))


def _records(job: Job, chosen: Sequence[Configuration], group: Any) -> list[tuple[Configuration, dict[str, str]]]:
    if not chosen:
        return []
    import torch

    step = _stock_step if chosen[0].mode == "stock" else _tbik_step
    if chosen[0].mode == "stock":
        from tbik.trainer_logprobs import stock_model

        model: Any = stock_model(job.folder, DTYPES[job.dtype]).train()
    else:
        from tbik.huggingface.parallelize import load_checkpoint

        model = load_checkpoint(job.folder, group, job.plan, dtype=DTYPES[job.dtype]).train()
    ids = [torch.tensor(prompt) for prompt in job.prompts[: samples_of(job)]]
    records = []
    for configuration in chosen:
        m = min(micro_samples(configuration.batch), len(ids))
        records.append((configuration, step(model, ids, m, group)))
    return records


def _tbik_step(model: Any, ids: Sequence[Any], m: int, group: Any) -> dict[str, str]:
    import torch

    from tbik.gradients import GradientTree, upstream
    from tbik.huggingface.checkpoint import pieces
    from tbik.huggingface.rows import SampleBatch
    from tbik.integrity.fingerprint import fingerprint

    tree = GradientTree(model, samples_per_step=len(ids), micro_steps=len(ids) // m, plan=model.setting.plan)
    scale = upstream(SampleBatch(ids).num_targets)
    nodes: list[Any] = []
    with tree:
        while len(nodes) * m < len(ids):
            with tree.micro_step() as step:
                # the token sum itself is a node over these samples; 1/targets is the gradient that enters
                loss = model(**SampleBatch([ids[s] for s in step.samples], total_tokens=1).packed()).loss
                step.backward(loss, scale)
            nodes.append(loss.detach())
    while len(nodes) > 1:
        nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
    digest = fingerprint(pieces(model, gradients=True), group)
    model.zero_grad(set_to_none=True)
    tree.close()
    return {"gradients": f"{digest:016x}", "loss": f"{int(nodes[0].view(torch.int32)) & 0xFFFFFFFF:08x}"}


def _stock_step(model: Any, ids: Sequence[Any], m: int, group: Any) -> dict[str, str]:
    import torch

    from tbik.huggingface.rows import SampleBatch
    from tbik.integrity.fingerprint import fingerprint

    total = SampleBatch(ids).num_targets
    model.zero_grad(set_to_none=True)
    loss = torch.zeros(())
    for first in range(0, len(ids), m):
        output = model(**SampleBatch(ids[first : first + m], total_tokens=total).padded("right"), use_cache=False)
        output.loss.backward()
        loss += output.loss.detach()
    digest = fingerprint({name: parameter.grad for name, parameter in model.named_parameters()})
    model.zero_grad(set_to_none=True)
    return {"gradients": f"{digest:016x}", "loss": f"{int(loss.view(torch.int32)) & 0xFFFFFFFF:08x}"}
