"""The claim on training: the weights after N steps ignore how the ranks share data, weights and micro-batches.

    record(mode, layout) = the digest of all weights after each step, the losses and the gradient norms
    unique(mode)         = |{last digest of record(mode, layout)}|              tbik: 1; stock: more

Layouts, data ranks by tensor-parallel ranks (the latter vary fastest); B samples a step in all of them:
    single            no wrapper, one process        fsdp4        FSDP2 (fully_shard) on 4 ranks
    tp4               tensor parallel alone          fsdp2xtp2    FSDP2 on 2, each of them TP=2
    hsdp2x2           2 replicas of 2 shards         flat2        FSDP1 on 2 ranks          ddp4    DDP on 4 ranks
    ...:m2            m = 2 samples per rank and micro-step (default: as many as B allows, up to 8)
    ...@tbik          over the "tbik" backend (default: gloo)

Stock is torch's own way with the same model, data and layout: transformers' modules in bf16, gradients added by
autograd and averaged by the wrapper; it has no tensor-parallel layouts here, and no dropout. The run also has to show
that it trains (the digest changes in every step, the loss falls) and that it shards (parameter bytes of a rank).
Errors: PlanError for a layout that cannot run, before any process starts; TransportError naming a rank that died.
"""

from __future__ import annotations

import math
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import tbik.fsdp
from tbik import checkpoint, numbering, weights
from tbik.data import StepSampler
from tbik.decoder import Mode
from tbik.errors import PlanError, TransportError
from tbik.gradients import upstream
from tbik.huggingface.parallelize import parallelize
from tbik.huggingface.rows import SampleBatch
from tbik.ops import DropoutKey
from tbik.optimizers import OptimizerForm
from tbik.plan import ModelShape, TreePlan
from tbik.verify import MODES, Progress, environment
from tbik.workers import COLLECTIVE_S, SILENCE_S, Link, Workers

LARGEST_MICRO_BATCH = 8
BYTES_TOLERANCE = 1.1
CONTROL_LAYOUTS = 2  # fewer stock layouts cannot differ

Strategy = Literal["single", "fsdp2", "fsdp1", "ddp"]
_GRAMMAR = re.compile(
    r"(?:(?P<single>single)|(?P<kind>fsdp|flat|ddp)(?P<ranks>\d+)|hsdp(?P<replicas>\d+)x(?P<shards>\d+))?"
    r"(?:(?:(?<=\d)x)?tp(?P<tp>\d+))?(?::m(?P<m>\d+))?(?:@(?P<backend>gloo|tbik))?"
)
_STRATEGIES: dict[str | None, Strategy] = {None: "single", "fsdp": "fsdp2", "flat": "fsdp1", "ddp": "ddp"}
LAYOUTS = "single, tpN, fsdpN, fsdpNxtpM, hsdpRxS, flatN, ddpN, each with :mK and @tbik"


@dataclass(frozen=True)
class Layout:
    """One way to lay out a step. micro_samples: m."""

    name: str
    strategy: Strategy
    replicas: int = 1
    shards: int = 1
    tp: int = 1
    micro_samples: int = 1
    backend: str = "gloo"

    @property
    def data_ranks(self) -> int:
        return self.replicas * self.shards

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.tp

    @classmethod
    def parse(cls, name: str, samples_per_step: int) -> Layout:
        """Errors: PlanError for a name without meaning and for one whose ranks cannot share the samples."""
        where = f"--layouts: {name}"
        found = _GRAMMAR.fullmatch(name)
        if not found or not (found["single"] or found["kind"] or found["replicas"] or found["tp"]):
            raise PlanError(f"{where}: expected {LAYOUTS}")
        ranks, tp = int(found["ranks"] or found["shards"] or 1), int(found["tp"] or 1)
        replicas = int(found["replicas"] or 1)
        strategy: Strategy = "fsdp2" if found["replicas"] else _STRATEGIES[found["kind"]]
        if strategy == "ddp":
            ranks, replicas = 1, ranks
        if min(ranks, replicas, tp) < 1:
            raise PlanError(f"{where}: expected at least one rank of each kind")
        if tp > 1 and strategy in ("fsdp1", "ddp"):
            raise PlanError(f"{where}: tensor parallelism goes with fsdpN or alone")
        data_ranks = ranks * replicas
        work = numbering.micro_steps_that_work(samples_per_step, data_ranks)
        if not work:
            raise PlanError(numbering.explain_no_split(where, samples_per_step, data_ranks))
        per_rank = samples_per_step // data_ranks
        sizes = [per_rank // a for a in work]
        m = int(found["m"]) if found["m"] else max(size for size in sizes if size <= LARGEST_MICRO_BATCH)
        if m not in sizes:
            raise PlanError(
                f"{where}: {samples_per_step} samples on {data_ranks} data ranks cannot be had {m} at a time; m that "
                f"work: {', '.join(map(str, sorted(sizes)))}"
            )
        return cls(name, strategy, replicas, ranks, tp, m, found["backend"] or "gloo")


@dataclass(frozen=True)
class TrainJob:
    """What is trained: the model of a folder on made-up text, AdamW, the norm of the gradients clipped."""

    folder: str
    layouts: tuple[Layout, ...]
    steps: int = 20
    samples_per_step: int = 24
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    max_norm: float = 1.0
    form: str = "loop"
    dtype: str = "bfloat16"
    seed: int = 0
    vocab: int = 64
    longest: int = 48
    modes: tuple[Mode, ...] = MODES
    plan: TreePlan = field(default_factory=TreePlan)
    kill_after: int | None = None
    control: tuple[str, ...] | None = None
    dropout: float = 0.0


@dataclass(frozen=True)
class Configuration:
    """One run. resumed_from: the layout that was killed before, None for a run from the beginning."""

    mode: Mode
    layout: Layout
    resumed_from: Layout | None = None

    def __str__(self) -> str:
        before = "" if self.resumed_from is None else f"{self.resumed_from.name}, killed, then "
        return f"{self.mode}: {before}{self.layout.name}"


def make_job(
    folder: Path,
    layouts: Sequence[str],
    *,
    steps: int = 20,
    samples_per_step: int = 24,
    dtype: str = "bfloat16",
    modes: Sequence[str] = MODES,
    kill_after: int | None = None,
    control: Sequence[str] | None = None,
    leaf: str = "fma",
    **options: Any,
) -> TrainJob:
    """control: names of the layouts that stock runs too, by default all without tensor parallelism.

    Errors: PlanError for whatever cannot run, before any process starts.
    """
    unknown = set(modes) - set(MODES)
    if unknown or not modes:
        raise PlanError(f"--layers: expected some of {', '.join(MODES)}, got {', '.join(modes) or 'none'}")
    if dtype not in ("bfloat16", "float32"):
        raise PlanError(f"--dtype: training computes in bfloat16 or float32, got {dtype!r}")
    if steps < 1 or samples_per_step < 1:
        raise PlanError(f"--steps and the samples of a step are at least 1, got {steps} and {samples_per_step}")
    if not 0 <= options.get("dropout", 0.0) < 1:
        raise PlanError(f"--dropout: expected a probability within [0, 1), got {options['dropout']}")
    if kill_after is not None and not 1 <= kill_after < steps:
        raise PlanError(f"--kill-after: expected a step within 1..{steps - 1}, got {kill_after}")
    parsed = tuple(Layout.parse(name, samples_per_step) for name in layouts)
    if not parsed or len({layout.name for layout in parsed}) != len(parsed):
        raise PlanError(f"--layouts: expected distinct names, got {', '.join(layouts) or 'none'}")
    for name in control or ():
        if next((layout.tp for layout in parsed if layout.name == name), 0) != 1:
            raise PlanError(f"--control: expected some of --layouts without tensor parallelism, got {name!r}")
    for layout in parsed if kill_after is not None else ():
        if layout.strategy == "fsdp1":
            raise PlanError(f"--layouts: {layout.name}: FSDP1 has no checkpoint here; use fsdpN with --kill-after")
    plan = TreePlan.for_model(ModelShape.from_config(folder), sorted({layout.tp for layout in parsed}), leaf=leaf)
    return TrainJob(
        folder=str(folder),
        layouts=parsed,
        steps=steps,
        samples_per_step=samples_per_step,
        dtype=dtype,
        modes=tuple(mode for mode in MODES if mode in modes),
        plan=plan,
        kill_after=kill_after,
        control=None if control is None else tuple(control),
        **options,
    )


def configurations(job: TrainJob) -> list[Configuration]:
    """Every run: each layout in each mode; with kill_after, each layout killed and resumed on the next one."""
    control = [x for x in job.layouts if (x.tp == 1 if job.control is None else x.name in job.control)]
    found = [Configuration(mode, x) for mode in job.modes for x in (job.layouts if mode == "tbik" else control)]
    if job.kill_after is not None and "tbik" in job.modes:
        following = [*job.layouts[1:], job.layouts[0]]
        found += [Configuration("tbik", b, resumed_from=a) for a, b in zip(job.layouts, following, strict=True)]
    return found


def run(
    job: TrainJob,
    *,
    model: str = "",
    progress: Progress = lambda text, steps: None,
    silence_s: float = SILENCE_S,
    collective_s: float = COLLECTIVE_S,
) -> dict[str, Any]:
    """Runs every configuration and judges: the content of --json, see `judge`."""
    start, where = time.monotonic(), environment()
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tbik-train-") as folder:
        for number, configuration in enumerate(configurations(job)):
            saved = Path(folder) / f"run-{number}"
            before: list[list[dict[str, Any]]] = []
            if configuration.resumed_from is not None:
                killed = Configuration(configuration.mode, configuration.resumed_from)
                before = _run_one(job, killed, progress, saved, True, silence_s, collective_s)
            ranks = _run_one(job, configuration, progress, saved if before else None, False, silence_s, collective_s)
            if before:
                ranks = [before[0][: job.kill_after] + steps for steps in ranks]
            records.append(_record(configuration, ranks))
    report = judge(job, records)
    return report | {
        "model": model or job.folder,
        "seconds": round(time.monotonic() - start, 1),
        "environment": where,
    }


def _run_one(
    job: TrainJob,
    configuration: Configuration,
    progress: Progress,
    folder: Path | None,
    kill: bool,
    silence_s: float,
    collective_s: float,
) -> list[list[dict[str, Any]]]:
    """Per rank, what it said after each step. kill: the ranks save to `folder`, go on, and are killed a step later."""
    layout = configuration.layout
    progress(str(configuration), 0)
    order = _Order(job, configuration, None if folder is None else str(folder), kill)
    said: list[list[dict[str, Any]]] = [[] for _ in range(layout.world_size)]
    with Workers(
        layout.world_size, _task, order, silence_s=silence_s, collective_s=collective_s, backend=layout.backend
    ) as workers:
        try:
            for rank, step in workers.messages():
                said[rank].append(step)
                if rank == 0:
                    progress(str(configuration), 1)
        except TransportError:
            if not kill:
                raise
            assert job.kill_after is not None
            if folder is None or not folder.exists() or len(said[0]) < job.kill_after:
                raise
            return said
    if kill:
        raise TransportError(f"{configuration}: the ranks were to be killed and ended by themselves")
    return said


def _record(configuration: Configuration, ranks: list[list[dict[str, Any]]]) -> dict[str, Any]:
    steps = ranks[0]
    return {
        "mode": configuration.mode,
        "layout": configuration.layout.name,
        "resumed_from": None if configuration.resumed_from is None else configuration.resumed_from.name,
        "digest": steps[-1]["digest"],
        "digests": [step["digest"] for step in steps],
        "losses": [step["loss"] for step in steps],
        "grad_norms": [step["grad_norm"] for step in steps],
        "seconds_per_step": sorted(step["seconds"] for step in steps)[len(steps) // 2],
        "ranks_agree": all([s["digest"] for s in other] == [s["digest"] for s in steps] for other in ranks),
        "parameter_bytes": [said[-1]["parameter_bytes"] for said in ranks],
        "limit_bytes": [said[-1]["limit_bytes"] for said in ranks],
        "optimizer": steps[-1]["optimizer"],
    }


def judge(job: TrainJob, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """claim = tbik has one digest, on all ranks, it trains and it shards; the control has several. `reasons` if not."""
    reasons = []
    for record in records:
        name = f"{record['mode']}: {record['layout']}"
        if record["resumed_from"] is not None:
            name += f" after {record['resumed_from']}"
        if record["mode"] == "tbik":
            if not record["ranks_agree"]:
                reasons.append(f"{name}: the ranks disagree")
            if len(set(record["digests"])) != len(record["digests"]):
                reasons.append(f"{name}: a step left the weights as they were")
            if any(held > limit for held, limit in zip(record["parameter_bytes"], record["limit_bytes"])):
                reasons.append(f"{name}: not really sharded, see parameter_bytes")
        if len(record["losses"]) > 1 and not record["losses"][-1] < record["losses"][0]:
            reasons.append(f"{name}: the loss did not fall: {record['losses'][0]:.4f} to {record['losses'][-1]:.4f}")
        first = next(r for r in records if r["mode"] == record["mode"])
        record["max_abs_dloss"] = max(abs(a - b) for a, b in zip(record["losses"], first["losses"], strict=True))
        record["first_differing_step"] = next(
            (i for i, (a, b) in enumerate(zip(record["digests"], first["digests"])) if a != b), None
        )
    modes = [mode for mode in job.modes if any(r["mode"] == mode for r in records)]
    unique = {mode: len({r["digest"] for r in records if r["mode"] == mode}) for mode in modes}
    if "tbik" not in modes:
        reasons.append("tbik layers were not run")
    elif unique["tbik"] != 1:
        reasons.append(f"tbik gave {unique['tbik']} unique weights")
    if unique.get("stock") == 1:
        reasons.append("stock gave one digest too: this run could not have found a difference")
    settings = {key: value for key, value in asdict(job).items() if key not in ("folder", "plan", "layouts")}
    return {
        "claim": not reasons,
        "reasons": reasons,
        "kind": "training",
        "configurations": max(sum(r["mode"] == mode for r in records) for mode in modes),
        "configurations_by_mode": {mode: sum(r["mode"] == mode for r in records) for mode in modes},
        "unique": unique,
        "max_abs_dloss": {mode: max(r["max_abs_dloss"] for r in records if r["mode"] == mode) for mode in modes},
        "per_rank": {
            r["layout"]: {"parameter_bytes": r["parameter_bytes"], "limit_bytes": r["limit_bytes"]}
            for r in records
            if r["mode"] == "tbik" and r["resumed_from"] is None
        },
        "plan": {"key": job.plan.key(), "fingerprint": job.plan.fingerprint()},
        "job": settings | {"layouts": [asdict(layout) for layout in job.layouts]},
        "records": list(records),
    }


# --- on the ranks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    job: TrainJob
    configuration: Configuration
    folder: str | None
    kill: bool


def documents(job: TrainJob) -> list[Tensor]:
    """4 B samples of 2 to `longest` tokens, int64 [T]: a walk over `vocab` tokens with a little noise, to learn."""
    generator = torch.Generator().manual_seed(job.seed)
    found = []
    for _ in range(4 * job.samples_per_step):
        length = int(torch.randint(2, job.longest + 1, (), generator=generator))
        noise = torch.randint(0, 3, (length,), generator=generator)
        start = int(torch.randint(0, job.vocab, (), generator=generator))
        walk = [start]
        for step in noise[1:].tolist():
            walk.append((5 * walk[-1] + 3 + step) % job.vocab)
        found.append(torch.tensor(walk))
    return found


class _Training:
    """One rank of one run."""

    def __init__(self, order: _Order, rank: int) -> None:
        job, layout = order.job, order.configuration.layout
        self.job, self.layout, self.rank = job, layout, rank
        shape, names = (layout.replicas, layout.shards, layout.tp), ("replicate", "shard", "tp")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.tp_group = mesh["tp"].get_group() if layout.tp > 1 else None
        self.mesh: DeviceMesh = (
            mesh["replicate", "shard"]
            if layout.replicas > 1 and layout.shards > 1
            else (mesh["replicate"] if layout.replicas > 1 else mesh["shard"])
        )
        self.data_rank = rank // layout.tp
        self.micro_steps = job.samples_per_step // layout.data_ranks // layout.micro_samples
        self.documents = documents(job)
        self.sampler = StepSampler(
            len(self.documents),
            samples_per_step=job.samples_per_step,
            data_ranks=layout.data_ranks,
            rank=self.data_rank,
            micro_steps=self.micro_steps,
            seed=job.seed,
        )
        transformers.set_seed(job.seed)
        self.dtype: torch.dtype = getattr(torch, job.dtype)
        quiet: Any = transformers.utils.logging
        quiet.disable_progress_bar()
        # stock draws its masks from a generator, which would make every layout another one without any sum: it has none
        dropout = job.dropout if order.configuration.mode == "tbik" else 0.0
        model = transformers.AutoModelForCausalLM.from_pretrained(
            job.folder, dtype=torch.float32, attention_dropout=dropout
        )
        self.stock_model: Any = model.train()

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        job = self.job
        return torch.optim.AdamW(
            model.parameters(),
            lr=job.learning_rate,
            weight_decay=job.weight_decay,
            foreach=job.form == "foreach",
            fused=job.form == "fused",
        )

    def samples(self, numbers: range) -> list[Tensor]:
        """The documents of samples `numbers` of the coming step."""
        first = self.sampler.next_sample
        return [self.documents[self.sampler.item(first + s)] for s in numbers]

    def total_tokens(self) -> int:
        return sum(len(ids) - 1 for ids in self.samples(range(self.job.samples_per_step)))

    def parameter_bytes(self, model: torch.nn.Module) -> int:
        return sum(
            (p.to_local() if hasattr(p, "to_local") else p).numel() * p.element_size() for p in model.parameters()
        )


class _Tbik(_Training):
    def __init__(self, order: _Order, rank: int) -> None:
        super().__init__(order, rank)
        job, layout = self.job, self.layout
        model = parallelize(
            self.stock_model, self.tp_group, job.plan, compute_dtype=self.dtype, residual_dropout=job.dropout
        )
        self.whole_bytes = self.parameter_bytes(model)
        self.largest_row = max(p[0].numel() * p.element_size() for p in model.parameters())
        self.num_parameters = len(list(model.parameters()))
        self.tree = tbik.fsdp.apply(
            model,
            None if layout.strategy == "single" else self.mesh,
            job.plan,
            strategy=layout.strategy,
            samples_per_step=job.samples_per_step,
            micro_steps=self.micro_steps,
        )
        self.model = self.tree.model
        self.optimizer = self.make_optimizer(self.model)

    def step(self) -> tuple[float, float]:
        total = self.total_tokens()
        first = self.sampler.next_sample
        for _ in range(self.micro_steps):
            with self.tree.micro_step() as micro:
                batch = SampleBatch(self.samples(micro.samples), first_sample=first + micro.samples.start)
                key = DropoutKey(self.job.seed, self.sampler.step, batch.first_sample) if self.job.dropout else None
                loss = self.model(**batch.packed(), num_items_in_batch=1, dropout=key).loss  # a sum over tokens
                micro.report(loss)
                micro.backward(loss, upstream(total))
        self.tree.finish()
        norm = self.tree.clip_grad_norm(self.job.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        assert self.tree.loss_sum is not None
        return self.tree.loss_sum / total, norm

    def limit_bytes(self) -> float:
        """The share of a rank by rows, with 10 % and one row of padding for each parameter where rows do not divide."""
        if self.layout.strategy in ("single", "ddp") or self.layout.shards == 1:
            return float(self.whole_bytes)
        uneven = self.num_parameters * self.largest_row
        return float(self.whole_bytes / self.layout.shards * BYTES_TOLERANCE + uneven)


class _Stock(_Training):
    """torch's own way: bf16 modules, sums by autograd, means by the wrapper."""

    def __init__(self, order: _Order, rank: int) -> None:
        super().__init__(order, rank)
        model, layout = self.stock_model, self.layout
        mixed = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        self.autocast = layout.strategy in ("single", "ddp") and self.dtype != torch.float32
        if layout.strategy == "fsdp2":
            for layer in model.model.layers:
                fully_shard(layer, mesh=self.mesh, mp_policy=mixed)
            fully_shard(model, mesh=self.mesh, mp_policy=mixed)
        elif layout.strategy == "fsdp1":
            model = FullyShardedDataParallel(
                model,
                process_group=self.mesh.get_group(),
                mixed_precision=MixedPrecision(param_dtype=self.dtype, reduce_dtype=torch.float32),
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )
        elif layout.strategy == "ddp":
            model = DistributedDataParallel(model, process_group=self.mesh.get_group())
        self.model = model
        self.optimizer = self.make_optimizer(model)

    def step(self) -> tuple[float, float]:
        total, ranks = self.total_tokens(), self.layout.data_ranks
        sums = torch.zeros((), dtype=torch.float64)
        first = self.sampler.next_sample
        for number, run in enumerate(self.sampler.global_samples(self.sampler.step)):
            last = number == self.micro_steps - 1
            batch = SampleBatch(self.samples(range(run.start - first, run.stop - first))).padded()
            labels = batch.pop("labels")
            if self.layout.strategy == "fsdp2":
                self.model.set_requires_gradient_sync(last)
            with nullcontext() if last or not hasattr(self.model, "no_sync") else self.model.no_sync():
                with torch.autocast("cpu", self.dtype, enabled=self.autocast):
                    logits = self.model(**batch, use_cache=False).logits
                shifted = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
                )
                torch.autograd.backward(shifted * (ranks / total))
            sums += shifted.detach().double()
        if ranks > 1:
            dist.all_reduce(sums)
        if isinstance(self.model, FullyShardedDataParallel):
            norm: Any = self.model.clip_grad_norm_(self.job.max_norm)
        else:
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.max_norm)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(sums) / total, float(norm)

    def limit_bytes(self) -> float:
        return math.inf


def _digest(model: torch.nn.Module) -> str:
    group = dist.group.WORLD
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return weights.digest(model, group)
    return weights.digest(model, group)


def _task(rank: int, link: Link, order: _Order) -> None:
    """What one rank does: every step, then its digest; or to a checkpoint and into the kill."""
    job, mode = order.job, order.configuration.mode
    training: Any = (_Tbik if mode == "tbik" else _Stock)(order, rank)
    form = str(OptimizerForm.of(training.optimizer))
    first = 0
    state = None
    if order.folder is not None:
        state = checkpoint.Run(training.model, training.optimizer, job.plan, training.sampler, seed=job.seed)
        if not order.kill:
            first = checkpoint.load(order.folder, state, dist.group.WORLD)
    for number in range(first, job.steps):
        begin = time.monotonic()
        loss, norm = training.step()
        training.sampler.finish_step()
        seconds = time.monotonic() - begin
        link.send(
            {
                "digest": _digest(training.model),
                "loss": loss,
                "grad_norm": norm,
                "seconds": seconds,
                "parameter_bytes": training.parameter_bytes(training.model),
                "limit_bytes": training.limit_bytes(),
                "optimizer": form,
            }
        )
        if order.kill and number + 1 == job.kill_after:
            assert state is not None and order.folder is not None
            checkpoint.save(order.folder, state, dist.group.WORLD)
        elif order.kill and number == job.kill_after and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # in the middle of the run, one step behind the checkpoint
