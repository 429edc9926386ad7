"""TRL's SFTTrainer by integrations/tbik_trainer: its weights ignore the split of a step; stock's do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: pip install -e '.[hf,trl]'")
import datasets
import transformers
import trl
from long_cases import long_cases
from tbik_trainer import ForTrainer

import tbik
from tbik import models
from tbik.errors import PlanError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96, "num_hidden_layers": 1}


class SFTTrainer(ForTrainer, trl.SFTTrainer):
    """As in the README of tbik_trainer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.random_model("qwen3", tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=True, **SIZES)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({"<unk>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 96)}}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<eos>"
    )


def texts(number: int = 21) -> list[str]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (number,), generator=generator).tolist()
    return [" ".join(f"w{i}" for i in torch.randint(2, 96, (n,), generator=generator).tolist()) for n in lengths]


def trained(kind: Any, folder: Path, data: Any, tokenizer: Any, out: Path, m: int, **options: Any) -> tuple[int, list]:
    """Three steps of eight samples."""
    others = {name: options.pop(name) for name in ("compute_loss_func", "peft_config") if name in options}
    settings = {"bf16": False, "max_steps": 3, "seed": 3, "learning_rate": 1e-3, "logging_steps": 1} | options
    args = trl.SFTConfig(
        str(out),
        per_device_train_batch_size=m,
        gradient_accumulation_steps=8 // m,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        **settings,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    trainer = kind(model, args, train_dataset=data, processing_class=tokenizer, **others)
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return tbik.fingerprint(dict(trainer.model.named_parameters())), norms


@pytest.mark.parametrize("form", [*long_cases(["text", "prompt and completion"]), "ids"])
def test_verify_sft_ignores_the_split_of_a_step(form: str, folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Text that TRL tokenizes in two processes, ids, and losses on the completion alone."""
    if form == "ids":
        data = datasets.Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in texts()]})
    elif form == "text":
        data = datasets.Dataset.from_dict({"text": texts()})
    else:
        data = datasets.Dataset.from_dict({"prompt": texts(), "completion": [f" {text}" for text in texts()]})
    options = {"dataset_num_proc": 2} if form == "text" else {}
    results = [trained(SFTTrainer, folder, data, tokenizer, tmp_path, m, **options) for m in (1, 8)]
    assert results[0] == results[1] and len(set(results[0][1])) == 3
    if form == "ids":
        stock = {trained(trl.SFTTrainer, folder, data, tokenizer, tmp_path, m)[0] for m in (1, 8)}
        assert len(stock) == 2, "the control: stock sums depend on the split"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bf16": True}, "bf16"),
        ({"loss_type": "dft"}, "loss_type = 'dft'"),
        ({"compute_loss_func": lambda *arguments, **others: None}, "compute_loss_func"),
        ({"peft_config": object()}, "peft_config"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
    ],
)
def test_verify_sft_refuses(options: Any, named: str, folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"text": texts(8)})
    with pytest.raises(PlanError, match=named):
        trained(SFTTrainer, folder, data, tokenizer, tmp_path, 4, **options)


def test_verify_sft_refuses_a_routers_loss(tokenizer: Any, tmp_path: Path) -> None:
    mixture = models.random_model("qwen3_moe", tmp_path / "model", **SIZES)
    data = datasets.Dataset.from_dict({"text": texts(8)})
    with pytest.raises(PlanError, match="router_aux_loss_coef"):
        trained(SFTTrainer, mixture, data, tokenizer, tmp_path, 4, router_aux_loss_coef=0.01)


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_verify_other_trainers_of_trl_are_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    """Their losses are functions of log-probabilities that this one would not call."""
    trainer = type(kind, (ForTrainer, getattr(trl, f"{kind}Trainer")), {})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with pytest.raises(PlanError, match=f"tbik_trainer.{kind}: loss_type"):
        trainer(model, getattr(trl, f"{kind}Config")(str(tmp_path), bf16=False, use_cpu=True))


def test_verify_packing_is_refused_by_trl(folder: Path, tokenizer: Any, tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"text": texts(8)})
    with pytest.raises(ValueError, match="custom data collator is not supported"):
        trained(SFTTrainer, folder, data, tokenizer, tmp_path, 4, packing=True, max_length=64)
