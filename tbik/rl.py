"""On-policy reinforcement learning whose trainer computes the sampler's own log-probabilities: `tbik demo rl`.

    per step: publish bf16 weights -> sample groups of answers at TP=4 -> rewards -> one GRPO update, FSDP2 on 2 ranks
    advantage of answer i of a group = (r_i - mean r) / (deviation of r + 1e-4)
    gradient = sum over tokens of -advantage * exp(logp - logp_sampler) * grad logp, / number of tokens
    differing = #{tokens : bits(trainer's logp) != bits(sampler's logp)}        tbik: 0 in every step; stock: more
    KL        = mean over tokens of exp(d) - 1 - d, d = logp - logp_sampler          0 if they agree

The task is a toy: an answer's reward is the share of its tokens that are below a quarter of the vocabulary. What is
shown is not the task but that importance weights are exactly 1. Weights go from trainer to sampler as a checkpoint
folder; the fingerprint of what the sampler holds then has to be that of the trainer's weights, rounded to bf16.
Stock is the same loop on torch's own modules: fully_shard with its reduce-scatter, the engine with its switch off.
Engines: "builtin" (tbik.decoder) or a product of tbik.engines ("vllm").
Errors: PlanError before anything starts; TransportError naming a rank that died.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tbik.fsdp
from tbik import ops, weights
from tbik.decoder import Decoder, KVCache, Mode
from tbik.engines import EngineProcess, EngineSettings
from tbik.errors import IntegrityError, PlanError
from tbik.gradients import upstream
from tbik.huggingface.parallelize import parallelize
from tbik.huggingface.rows import SampleBatch
from tbik.integrity.fingerprint import fingerprint
from tbik.plan import ModelShape, TreePlan
from tbik.verify import Progress, environment
from tbik.verify_job import MODES
from tbik.workers import Link, Workers

BUILTIN = "builtin"
MICRO_SAMPLES = 8
SILENCE_S = 600.0
START_S = 900.0


@dataclass(frozen=True)
class Job:
    """One demonstration. A step has prompts * group answers of new_tokens tokens."""

    folder: str
    steps: int = 20
    prompts: int = 4
    group: int = 8
    prompt_tokens: int = 6
    new_tokens: int = 12
    learning_rate: float = 1e-3
    max_norm: float = 1.0
    tp: int = 4
    trainer_ranks: int = 2
    engine: str = BUILTIN
    seed: int = 0
    modes: tuple[Mode, ...] = MODES
    plan: TreePlan = field(default_factory=TreePlan)

    @property
    def answers(self) -> int:
        return self.prompts * self.group


class Rollout(NamedTuple):
    """An answer: the sampler's tokens, the bits of their log-probabilities, and its advantage in its group."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    bits: tuple[str, ...]
    advantage: float


def make_job(folder: Path, **options: Any) -> Job:
    """Errors: PlanError for what cannot run."""
    job = Job(str(folder), **options)
    if job.steps < 1:
        raise PlanError(f"--steps: expected at least 1, got {job.steps}")
    share = job.answers // job.trainer_ranks
    if job.answers % job.trainer_ranks or share % MICRO_SAMPLES:
        raise PlanError(f"demo rl: {job.answers} answers do not make micro-batches of {MICRO_SAMPLES} on the trainer")
    plan = TreePlan.for_model(ModelShape.from_config(folder), (1, 2, 4), equal=job.engine != BUILTIN)
    return Job(str(folder), **options, plan=plan)


def run(job: Job, *, model: str = "", progress: Progress = lambda text, steps: None) -> dict[str, Any]:
    """Runs the loop in each mode and judges: the content of --json. model: its name there, by default the folder."""
    start, where = time.monotonic(), environment()
    rows = {mode: _run_mode(job, mode, progress) for mode in job.modes}
    reasons = judge(rows)
    return {
        "kind": "rl",
        "claim": not reasons,
        "reasons": reasons,
        "model": model or job.folder,
        "steps": rows,
        "job": {key: value for key, value in asdict(job).items() if key not in ("folder", "plan")},
        "plan": {"key": job.plan.key(), "fingerprint": job.plan.fingerprint()},
        "seconds": round(time.monotonic() - start, 1),
        "environment": where,
    }


def judge(rows: dict[Mode, list[dict[str, Any]]]) -> list[str]:
    """Why the claim does not hold; empty if it does."""
    reasons = []
    for row in rows.get("tbik", []):
        if row["differing_bit_patterns"]:
            reasons.append(
                f"tbik: step {row['step']}: {row['differing_bit_patterns']} of {row['tokens']} values differ"
            )
        if row["trainer_weights"] != row["sampler_weights"]:
            reasons.append(f"tbik: step {row['step']}: the sampler's weights are not the trainer's")
    if "tbik" not in rows:
        reasons.append("tbik was not run")
    elif len({row["trainer_weights"] for row in rows["tbik"]}) != len(rows["tbik"]):
        reasons.append("tbik: a step left the weights as they were")
    if "stock" in rows and not rows["stock"][0]["differing_bit_patterns"]:
        reasons.append("stock: no value differs in the first step: this run could not have found a difference")
    return reasons


def reward(tokens: Sequence[int], vocab: int) -> float:
    """The share of tokens below a quarter of the vocabulary."""
    return sum(token < vocab // 4 for token in tokens) / len(tokens)


def advantages(rewards: Sequence[float]) -> list[float]:
    """Of one group: (r - mean) / (deviation + 1e-4)."""
    mean = math.fsum(rewards) / len(rewards)
    deviation = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (deviation + 1e-4) for r in rewards]


# --- the loop ---------------------------------------------------------------------------------------------------------


def _run_mode(job: Job, mode: Mode, progress: Progress) -> list[dict[str, Any]]:
    vocab = ModelShape.from_config(job.folder).vocab
    rows = []
    folder = Path(tempfile.mkdtemp(prefix="tbik-rl-"))
    progress(f"{mode}: starting", 0)
    try:
        with _Trainer(job, mode) as trainer, _make_sampler(job, mode) as sampler:
            for step in range(job.steps):
                start = time.monotonic()
                published = folder / f"step-{step}"
                mine = trainer.publish(published)
                theirs = sampler.load(published)
                shutil.rmtree(published)
                if mode == "tbik" and mine != theirs:
                    raise IntegrityError(f"step {step}: the sampler holds weights {theirs}, the trainer {mine}")
                prompts = _prompts(job, step, vocab)
                seeds = [job.seed + step * job.answers + i for i in range(job.answers)]
                answers = sampler.sample(prompts, seeds)
                rewards = [reward(tokens, vocab) for tokens, _ in answers]
                gains = [g for i in range(0, job.answers, job.group) for g in advantages(rewards[i : i + job.group])]
                rollouts = [
                    Rollout(tuple(prompt), tuple(tokens), tuple(bits), gain)
                    for prompt, (tokens, bits), gain in zip(prompts, answers, gains, strict=True)
                ]
                bits, norm = trainer.update(rollouts)
                rows.append(
                    _compare(rollouts, bits)
                    | {
                        "step": step,
                        "reward": math.fsum(rewards) / len(rewards),
                        "grad_norm": norm,
                        "trainer_weights": mine,
                        "sampler_weights": theirs,
                        "seconds": round(time.monotonic() - start, 2),
                    }
                )
                row = rows[-1]
                progress(
                    f"{mode} {step:3}: {row['differing_bit_patterns']} of {row['tokens']} log-probabilities differ, "
                    f"KL {row['kl']:.3g}, reward {row['reward']:.3f}",
                    1,
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def _compare(rollouts: Sequence[Rollout], bits: Sequence[Sequence[str]]) -> dict[str, Any]:
    pairs = [(a, b) for rollout, of in zip(rollouts, bits, strict=True) for a, b in zip(rollout.bits, of, strict=True)]
    differences = [_value(b) - _value(a) for a, b in pairs]
    return {
        "tokens": len(pairs),
        "differing_bit_patterns": sum(a != b for a, b in pairs),
        "kl": math.fsum(math.exp(d) - 1 - d for d in differences) / len(pairs),
        "max_abs_dlogprob": max(map(abs, differences)),
    }


def _prompts(job: Job, step: int, vocab: int) -> list[list[int]]:
    """The prompts of a step, each `group` times."""
    generator = torch.Generator().manual_seed(job.seed * 10_007 + step)
    ids = torch.randint(0, vocab, (job.prompts, job.prompt_tokens), generator=generator).tolist()
    return [prompt for prompt in ids for _ in range(job.group)]


def _value(bits: str) -> float:
    value: float = struct.unpack(">f", bytes.fromhex(bits))[0]
    return value


def _bits_of(logp: Tensor) -> list[str]:
    return [struct.pack(">f", value).hex() for value in logp.tolist()]


# --- the sampler ------------------------------------------------------------------------------------------------------

Answers = list[tuple[list[int], list[str]]]


class Sampler(Protocol):
    """Something that serves: load gives the digest of the weights that it then holds."""

    def load(self, folder: Path) -> str: ...

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Answers: ...

    def __enter__(self) -> Sampler: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _make_sampler(job: Job, mode: Mode) -> Sampler:
    return _Builtin(job, mode) if job.engine == BUILTIN else _Engine(job, mode)


class _Ranks(AbstractContextManager["_Ranks"]):
    """Worker ranks that do what they are told, one thing after the other."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._messages = workers.messages()

    def ask(self, message: Any) -> list[Any]:
        """The answer of every rank."""
        for rank in range(self._workers.world_size):
            self._workers.tell(rank, message)
        answers: dict[int, Any] = {}
        while len(answers) < self._workers.world_size:
            rank, content = next(self._messages)
            answers[rank] = content
        return [answers[rank] for rank in sorted(answers)]

    def __exit__(self, *_: object) -> None:
        self._workers.close()


class _Builtin(_Ranks):
    def __init__(self, job: Job, mode: Mode) -> None:
        super().__init__(Workers(job.tp, _serve, (job, mode), silence_s=SILENCE_S))

    def __enter__(self) -> _Builtin:
        return self

    def load(self, folder: Path) -> str:
        digests = set(self.ask(("load", str(folder))))
        assert len(digests) == 1
        return str(digests.pop())

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Answers:
        answers: Answers = self.ask(("sample", (prompts, seeds)))[0]
        return answers


def _serve(rank: int, link: Link, argument: tuple[Job, Mode]) -> None:
    job, mode = argument
    group = link.group(job.tp)
    decoder: Decoder | None = None
    while (message := link.receive()) is not None:
        kind, content = message
        if kind == "load":
            decoder = Decoder(content, plan=job.plan, group=group, mode=mode, keep_pieces=True)
            link.send(f"{fingerprint(decoder.pieces, group):016x}")
        else:
            assert decoder is not None
            prompts, seeds = content
            link.send(_sample(decoder, prompts, seeds, job.new_tokens))


def _sample(decoder: Decoder, prompts: Sequence[Sequence[int]], seeds: Sequence[int], new_tokens: int) -> Answers:
    """Answers drawn from the model's distribution (the Gumbel trick), and the fp32 bits of each token's logp.

    Every rank draws the same token: its logits are the same, and the noise is a function of seed and position.
    """
    caches = [decoder.new_cache() for _ in prompts]
    chunks: list[tuple[KVCache, Sequence[int]]] = list(zip(caches, prompts))
    answers: Answers = [([], []) for _ in prompts]
    for position in range(new_tokens):
        logp = decoder.log_softmax(decoder.forward(chunks))
        chosen = []
        for row, seed in zip(logp, seeds, strict=True):
            generator = torch.Generator().manual_seed(seed * new_tokens + position)
            noise = -torch.rand(len(row), generator=generator, dtype=torch.float64).clamp_min(1e-300).log()
            chosen.append(int((row.double() - noise.log()).argmax()))
        for (tokens, bits), token, row in zip(answers, chosen, logp, strict=True):
            tokens.append(token)
            bits += _bits_of(row[token : token + 1])
        chunks = [(cache, [token]) for cache, token in zip(caches, chosen)]
    return answers


class _Engine(AbstractContextManager["_Engine"]):
    """An engine of another product; weights are reloaded in place."""

    def __init__(self, job: Job, mode: Mode) -> None:
        self._job = job
        settings = EngineSettings(
            job.engine,
            job.folder,
            tp=job.tp,
            mode=mode,
            plan=job.plan,
            longest=job.prompt_tokens + job.new_tokens + 1,
            max_sequences=job.answers,
            temperature=1.0,
        )
        self._process = EngineProcess(settings, start_s=START_S)

    def load(self, folder: Path) -> str:
        self._process.call("reload_weights", None, str(folder))
        digests = set(self._process.call("tbik_weights"))
        assert len(digests) == 1
        return str(digests.pop())

    def sample(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Answers:
        answers, _ = self._process.generate(prompts, self._job.new_tokens, top=1, seeds=seeds)
        return [(answer.tokens, answer.bits) for answer in answers]

    def __exit__(self, *_: object) -> None:
        self._process.close()


# --- the trainer ------------------------------------------------------------------------------------------------------


class _Trainer(_Ranks):
    def __init__(self, job: Job, mode: Mode) -> None:
        super().__init__(Workers(job.trainer_ranks, _train, (job, mode), silence_s=SILENCE_S, backend="gloo"))

    def __enter__(self) -> _Trainer:
        return self

    def publish(self, folder: Path) -> str:
        """Write the weights, rounded to bf16, as a checkpoint; their digest."""
        return str(self.ask(("publish", str(folder)))[0])

    def update(self, rollouts: Sequence[Rollout]) -> tuple[list[list[str]], float]:
        """One step; per answer the bits of the trainer's log-probabilities before it, and the gradient's norm."""
        found: dict[int, list[str]] = {}
        answers = self.ask(("update", list(rollouts)))
        for bits, _ in answers:
            found |= bits
        return [found[i] for i in range(len(rollouts))], answers[0][1]


def _train(rank: int, link: Link, argument: tuple[Job, Mode]) -> None:
    job, mode = argument
    policy: Any = (_TbikPolicy if mode == "tbik" else _StockPolicy)(job, rank)
    while (message := link.receive()) is not None:
        kind, content = message
        link.send(policy.publish(Path(content)) if kind == "publish" else policy.update(content))


class _Policy:
    model: Any

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        quiet: Any = transformers.utils.logging
        quiet.disable_progress_bar()
        transformers.set_seed(job.seed)
        self.mesh = init_device_mesh("cpu", (job.trainer_ranks,))
        self.stock: Any = transformers.AutoModelForCausalLM.from_pretrained(job.folder, dtype=torch.float32).train()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=self.job.learning_rate, weight_decay=0.0, foreach=False)

    def publish(self, folder: Path) -> str:
        from safetensors.torch import save_file

        tensors = {}
        for name, place in weights.places(self.model).items():
            value: Any = place.parameter.detach()
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            if self.rank == 0:
                tensors[name] = whole.to(torch.bfloat16)
        if self.rank == 0:
            folder.mkdir(parents=True)
            save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
            config = json.loads((Path(self.job.folder) / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
        dist.barrier()
        return weights.digest(self.model, dist.group.WORLD, dtype=torch.bfloat16)


def _rows(rollouts: Sequence[Rollout], starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows of the flattened logits that predict the answers' tokens, those tokens, sampler's logp, advantages)."""
    rows = [s + len(r.prompt) - 1 + i for r, s in zip(rollouts, starts, strict=True) for i in range(len(r.tokens))]
    tokens = [token for r in rollouts for token in r.tokens]
    logp = [_value(bits) for r in rollouts for bits in r.bits]
    gains = [r.advantage for r in rollouts for _ in r.tokens]
    return torch.tensor(rows), torch.tensor(tokens), torch.tensor(logp), torch.tensor(gains)


def _sequence(rollout: Rollout) -> Tensor:
    return torch.tensor([*rollout.prompt, *rollout.tokens])


def _by_answer(samples: range, rollouts: Sequence[Rollout], logp: Tensor) -> dict[int, list[str]]:
    parts = torch.split(logp.detach(), [len(r.tokens) for r in rollouts])
    return {sample: _bits_of(part) for sample, part in zip(samples, parts, strict=True)}


class _TbikPolicy(_Policy):
    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank)
        model = parallelize(self.stock, None, job.plan, compute_dtype=torch.bfloat16)
        self.micro_steps = job.answers // job.trainer_ranks // MICRO_SAMPLES
        self.tree = tbik.fsdp.apply(
            model, self.mesh, job.plan, samples_per_step=job.answers, micro_steps=self.micro_steps
        )
        self.model = self.tree.model
        self.optimizer = self.make_optimizer()

    def update(self, rollouts: Sequence[Rollout]) -> tuple[dict[int, list[str]], float]:
        scale = upstream(sum(len(r.tokens) for r in rollouts))
        found: dict[int, list[str]] = {}
        for _ in range(self.micro_steps):
            with self.tree.micro_step() as micro:
                mine = [rollouts[i] for i in micro.samples]
                batch = SampleBatch([_sequence(r) for r in mine]).packed()
                logits = self.model(input_ids=batch["input_ids"], sample_offsets=batch["sample_offsets"]).logits[0]
                rows, tokens, sampled, gains = _rows(mine, batch["sample_offsets"][:-1])
                logp = ops.logprobs(logits[rows], tokens, self.job.plan.leaves)
                ratio = torch.exp(logp.detach() - sampled)  # 1 where the bits agree
                micro.backward(logp, -(gains * ratio) * scale)
                found |= _by_answer(micro.samples, mine, logp)
        self.tree.finish()
        norm = self.tree.clip_grad_norm(self.job.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found, norm


class _StockPolicy(_Policy):
    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank)
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model = self.stock
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=mixed)
        fully_shard(self.model, mesh=self.mesh, mp_policy=mixed)
        self.optimizer = self.make_optimizer()

    def update(self, rollouts: Sequence[Rollout]) -> tuple[dict[int, list[str]], float]:
        total = sum(len(r.tokens) for r in rollouts)
        share = len(rollouts) // self.job.trainer_ranks
        found: dict[int, list[str]] = {}
        for first in range(self.rank * share, (self.rank + 1) * share, MICRO_SAMPLES):
            samples = range(first, first + MICRO_SAMPLES)
            mine = [rollouts[i] for i in samples]
            batch = SampleBatch([_sequence(r) for r in mine]).padded()
            width = batch["input_ids"].shape[1]
            logits = self.model(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
            ).logits.flatten(0, 1)
            rows, tokens, sampled, gains = _rows(mine, [width * i for i in range(len(mine))])
            logp = logits[rows].float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
            self.model.set_requires_gradient_sync(samples.stop == (self.rank + 1) * share)
            loss = -(gains * torch.exp(logp - sampled)).sum() * (self.job.trainer_ranks / total)
            torch.autograd.backward(loss)
            found |= _by_answer(samples, mine, logp)
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found, float(norm.full_tensor())
