"""tbik_trainer: transformers' Trainer, whose weights ignore the split of a step; stock's do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="transformers.Trainer needs accelerate")
import transformers
from tbik_trainer import Trainer, collate

import tbik
from tbik import models
from tbik.errors import PlanError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96, "num_hidden_layers": 1}
    return models.random_model("qwen3", tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=True, **sizes)


@pytest.fixture(scope="module")
def dataset() -> list[dict[str, Any]]:
    return samples()


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (21,), generator=generator).tolist()
    return [{"input_ids": torch.randint(0, 96, (n,), generator=generator).tolist()} for n in lengths]


def trained(
    kind: Any, folder: Path, dataset: Any, out: Path, micro_samples: int, micro_steps: int, **options: Any
) -> tuple[int, list[float]]:
    arguments = {"max_steps": 4, "seed": 3, "learning_rate": 1e-3, "warmup_steps": 2, "max_grad_norm": 1.0, **options}
    args = transformers.TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=micro_samples,
        gradient_accumulation_steps=micro_steps,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        **arguments,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = kind(model, args, train_dataset=dataset, data_collator=collate)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return tbik.fingerprint(dict(trainer.model.named_parameters())), norms


@pytest.mark.long
def test_verify_trainer_ignores_the_split_of_a_step(folder: Path, dataset: Any, tmp_path: Path) -> None:
    results = [trained(Trainer, folder, dataset, tmp_path, m, 8 // m) for m in (1, 4, 8)]
    assert results[0] == results[1] == results[2]
    assert len(set(results[0][1])) == 4, "every step has another gradient"
    stock = {trained(transformers.Trainer, folder, dataset, tmp_path, m, 8 // m)[0] for m in (1, 8)}
    assert len(stock) == 2, "the control: stock sums depend on the split"


@pytest.mark.long
@pytest.mark.multiprocess
def test_verify_trainer_ignores_the_number_of_processes(folder: Path, dataset: Any, tmp_path: Path) -> None:
    """Two ranks of torchrun, two samples at a time, twice: the weights and norms of one process with eight samples."""
    program, out = Path(__file__).with_name("trainer_program.py"), tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    places = [str(program.parent), str(program.parent.parent / "integrations"), str(program.parent.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([*command, program, folder, out, "2", "2"], env=environment, check=True, timeout=250)
    assert tuple(json.loads(out.read_text())) == trained(Trainer, folder, dataset, tmp_path, 8, 1)


@pytest.mark.long
def test_verify_trainer_without_clipping_and_over_epochs(folder: Path, dataset: Any, tmp_path: Path) -> None:
    options = {"max_steps": -1, "num_train_epochs": 2, "max_grad_norm": 0.0}
    results = [trained(Trainer, folder, dataset, tmp_path, m, 8 // m, **options) for m in (2, 8)]
    assert results[0] == results[1] and len(results[0][1]) == 2 * 21 // 8


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bf16": True}, "bf16"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing"),
        ({"optim": "adafactor"}, "Adafactor is not element-wise"),
        ({"neftune_noise_alpha": 5.0}, "neftune"),
    ],
)
def test_verify_trainer_refuses(
    options: dict[str, Any], named: str, folder: Path, dataset: Any, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=named):
        trained(Trainer, folder, dataset, tmp_path, 4, 2, **options)


def test_verify_trainer_refuses_micro_batches_that_are_no_nodes(folder: Path, dataset: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="m must be a power of two"):
        trained(Trainer, folder, dataset, tmp_path, 3, 2)
