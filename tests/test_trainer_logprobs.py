"""tbik.trainer_logprobs: the trainer's bits are the sampler's; a sampler that is wrong by one bit is counted.

The sampler is tbik.decoder, token by token with a cache; engines are in test_vllm_engine.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tbik import models
from tbik.decoder import Decoder, greedy
from tbik.engines import Answer
from tbik.errors import IntegrityError
from tbik.plan import TreePlan
from tbik.trainer_logprobs import Sampled, Scoring, _renormalise, compare, reasons_against, score
from tbik.verify import Configuration, Options, make_job

pytestmark = pytest.mark.multiprocess
SIZES = {"num_hidden_layers": 2, "vocab_size": 512}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.random_model("qwen3", tmp_path_factory.mktemp("qwen3"), **SIZES)


def decoded(folder: Path, job: Any, mode: Any = "tbik") -> list[Answer]:
    """What tbik.decoder answers to the job's prompts, all in one batch."""
    decoder = Decoder(folder, plan=job.plan, group=None, mode=mode, dtype=job.dtype)
    tokens: list[list[int]] = [[] for _ in job.prompts]
    bits: list[list[str]] = [[] for _ in job.prompts]
    for chosen, logits in greedy(decoder, job.prompts, job.new_tokens):
        logp = decoder.log_softmax(logits)
        for i, token in enumerate(chosen):
            tokens[i].append(token)
            bits[i].append(f"{logp[i, token].view(torch.int32).item() & 0xFFFFFFFF:08x}")
    return [Answer(t, b, [], [], 0) for t, b in zip(tokens, bits, strict=True)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_verify_trainer_has_the_bits_of_the_sampler(dtype: str, folder: Path) -> None:
    """fp32 on bf16 weights: LayerCast. The decoder reads the same weights as fp32 copies, which has the same bits."""
    job = job_of(folder, dtype=dtype)
    answers = {Configuration(mode, 1, 8): decoded(folder, job, mode) for mode in ("tbik", "stock")}
    against = compare(job, answers)
    assert against["tokens"] == 8 * 6 and against["differing_bit_patterns"] == 0 and against["max_abs_dlogprob"] == 0
    assert against["layercast"] == (dtype == "float32") and against["plan"] == job.plan.fingerprint()
    assert against["stock"]["differing_bit_patterns"] > 0 and not reasons_against(against)


def job_of(folder: Path, **changes: Any) -> Any:
    arguments = {"tp_sizes": [1], "batch_sizes": [8], "new_tokens": 6, "engine": Options("vllm"), "against": "hf"}
    return make_job(folder, **{**arguments, **changes})[0]


def test_verify_one_wrong_bit_and_a_silent_control_are_found(folder: Path) -> None:
    job = job_of(folder, modes=["tbik"])
    answers = decoded(folder, job)
    wrong = f"{int(answers[3].bits[2], 16) ^ 1:08x}"
    answers[3].bits[2] = wrong
    against = compare(job, {Configuration("tbik", 1, 8): answers})
    assert against["differing_bit_patterns"] == 1 and 0 < against["max_abs_dlogprob"] < 1e-5
    assert "differ in 1 of 48" in reasons_against(against)[0]
    assert "could not have found" in reasons_against({**against, "stock": {"differing_bit_patterns": 0}})[1]


@pytest.mark.long
def test_verify_another_plan_of_the_trainer_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tbik import trainer_logprobs

    job = job_of(folder, modes=["tbik"])
    answers = decoded(folder, job)

    def elsewhere(scoring: Scoring, wanted: Any) -> Any:
        other = Scoring(scoring.folder, TreePlan(leaves=16), scoring.dtype)
        return score(other, wanted)

    monkeypatch.setattr(trainer_logprobs, "score", elsewhere)
    with pytest.raises(IntegrityError, match="two plans"):
        compare(job, {Configuration("tbik", 1, 8): answers})


def test_verify_renormalisation_is_told_apart(folder: Path) -> None:
    """Raw log-probabilities ignore temperature and top-p; how many would not is counted."""
    answers = [Sampled((1, 2, 3), (4, 5)), Sampled((7,), (8,))]
    plan = TreePlan()
    raw = score(Scoring(str(folder), plan, "bfloat16"), {"tbik": answers})["tbik"]
    drawn = score(Scoring(str(folder), plan, "bfloat16", temperature=0.7, top_p=0.9), {"tbik": answers})["tbik"]
    assert raw.bits == drawn.bits and raw.renormalised == 0 and drawn.renormalised == 3
    kept = _renormalise(torch.tensor([[3.0, 1.0, 2.0, -9.0]]), 1.0, 0.7)
    assert kept.isinf().tolist() == [[False, True, False, True]]  # 0.66 alone is not enough, 0.66 + 0.24 is
