"""Hugging Face's Trainer with gradients that ignore per_device_train_batch_size and gradient_accumulation_steps.

    trainer = tbik_trainer.Trainer(model, args, train_dataset=dataset)         otherwise transformers.Trainer
    trainer.train()

    samples of a step   B = per_device_train_batch_size * gradient_accumulation_steps; equal B, equal weights, in bits
    what is replaced    the model's operators (tbik.parallelize), the order of samples (tbik.data.StepSampler), backward
                        (tbik.fsdp, one tree over the samples), gradient norm and clipping (exact)

The weights are fp32, products in compute_dtype. Under torchrun on CPU ranks B counts all of them, every rank holds the
whole model (no DDP around it: the tree exchanges), and the weights are those of one process; what shards a model is the
loop of tbik.fsdp. ForTrainer is the same for a class that extends transformers.Trainer and learns by the next token's
log-probability, such as TRL's SFTTrainer (README.md, tests/test_trl.py).

dataset: items with "input_ids" (and "labels", or the ids are), padded on the right here. One epoch is the whole run:
max_steps, or num_train_epochs * len(dataset) // B steps.
Refused by name: several GPUs, autocast (bf16, fp16), torch_compile, group_by_length and other samplers, label
smoothing and other losses, adapters, deepspeed, FSDP by arguments, optimizers that mix elements.
Errors: PlanError, at construction. Bits: layout-invariant over the split of B and the number of ranks
(tests/test_trainer.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

import tbik.fsdp
from tbik.data import WHY_NOT_TOKEN_BALANCED, StepSampler, require_loader
from tbik.errors import PlanError
from tbik.huggingface.modules import CausalModel
from tbik.huggingface.parallelize import parallelize
from tbik.huggingface.rows import SampleBatch
from tbik.optimizers import OptimizerForm
from tbik.plan import TreePlan

REFUSED = {
    "bf16": "keep fp32 weights; compute_dtype=torch.bfloat16 is the default here",
    "fp16": "keep fp32 weights; compute_dtype says what products are computed in",
    "torch_compile": "the operators are compiled already",
    "deepspeed": "the loop of tbik.fsdp shards a model",
    "fsdp": "the loop of tbik.fsdp shards a model",
    "label_smoothing_factor": "its loss is not a sum over tokens",
    "auto_find_batch_size": "the samples of a step would depend on the memory",
    "neftune_noise_alpha": "its noise depends on the micro-batch",
    "use_liger_kernel": "it replaces the operators",
}
REFUSED_ARGUMENTS = {
    "compute_loss_func": "the loss is the model's own, the token sum over the whole step",
    "peft_config": "adapters are layers without a tree; merge them first",
}
LOSSES = (None, "nll")
"""What `loss_type` of a class's own arguments may be; others are functions of the log-probabilities, which would not be
called."""


class ForTrainer:
    """Before a class that extends transformers.Trainer. plan, compute_dtype: as in tbik.parallelize.

    The loss is the model's: the token sum over the targets of the whole step, on all ranks. What the class computes a
    loss from besides is not called.
    """

    def __init__(
        self,
        model: Any,
        args: transformers.TrainingArguments,
        *,
        plan: TreePlan | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
        data_collator: Any = None,
        **others: Any,
    ) -> None:
        where = f"tbik_trainer.{type(self).__name__}"
        if args.n_gpu > 1:
            raise PlanError(f"{where}: {args.n_gpu} GPUs in one process; this version has CPU kernels only")
        for name, instead in REFUSED.items():
            if getattr(args, name, None):
                raise PlanError(f"{where}: {name} = {getattr(args, name)!r} is not supported: {instead}")
        for name, instead in REFUSED_ARGUMENTS.items():
            if others.get(name) is not None:
                raise PlanError(f"{where}: {name} is not supported: {instead}")
        if getattr(args, "loss_type", None) not in LOSSES:
            raise PlanError(f"{where}: loss_type = {args.loss_type!r} is not supported; expected 'nll'")
        if getattr(args, "train_sampling_strategy", "random") not in ("random", "sequential"):
            raise PlanError(
                f"{where}: train_sampling_strategy = {args.train_sampling_strategy!r}: {WHY_NOT_TOKEN_BALANCED}"
            )
        if args.group_by_length if hasattr(args, "group_by_length") else False:
            raise PlanError(f"{where}: group_by_length: {WHY_NOT_TOKEN_BALANCED}")
        if not isinstance(model, torch.nn.Module):
            raise PlanError(f"{where}: model is a loaded model, got {type(model).__name__}")
        if any(p.dtype != torch.float32 for p in model.parameters()):
            raise PlanError(f"{where}: expected fp32 weights (from_pretrained(..., dtype=torch.float32))")
        if not isinstance(model, CausalModel):
            model = parallelize(model, None, plan, compute_dtype=compute_dtype)
        self._ranks = args.world_size
        if self._ranks > 1:
            args.average_tokens_across_devices = False  # the loss would be multiplied by the number of ranks
        self._samples_per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * self._ranks
        host: Any = super()
        host.__init__(model=model, args=args, data_collator=data_collator or collate, **others)
        trainer: Any = self
        if getattr(trainer, "aux_loss_enabled", False):  # of TRL, where the config has a router
            raise PlanError(
                f"{where}: router_aux_loss_coef = {trainer.router_aux_loss_coef!r} adds a loss that is a mean over the "
                "micro-batch; set it to 0.0"
            )
        if self._ranks > 1:
            # no DistributedDataParallel around the model: the tree exchanges
            trainer.accelerator.prepare_model = partial(trainer.accelerator.prepare_model, evaluation_mode=True)
        self.tree = tbik.fsdp.apply(
            model,
            dist.group.WORLD if self._ranks > 1 else None,
            strategy="collected" if self._ranks > 1 else "single",
            samples_per_step=self._samples_per_step,
            micro_steps=args.gradient_accumulation_steps,
        )
        self._finished = False
        trainer.add_callback(_StepEnd(self))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader over StepSampler: the samples of a step are those of their global numbers."""
        trainer: Any = self
        dataset, args = trainer.train_dataset, trainer.args
        if dataset is None or not hasattr(dataset, "__len__"):
            raise PlanError(
                "tbik_trainer.Trainer: expected a train_dataset with a length, so that samples have numbers"
            )
        steps = args.max_steps
        if steps <= 0:
            steps = int(args.num_train_epochs * len(dataset)) // self._samples_per_step
        self.sampler = StepSampler(
            len(dataset),
            samples_per_step=self._samples_per_step,
            data_ranks=self._ranks,
            rank=args.process_index,
            micro_steps=args.gradient_accumulation_steps,
            seed=args.data_seed if args.data_seed is not None else args.seed,
            shuffle=getattr(args, "train_sampling_strategy", "random") == "random",
            steps=steps,
        )
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self.sampler,
            collate_fn=trainer.data_collator,
            num_workers=args.dataloader_num_workers,
        )
        require_loader(loader)
        return loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As transformers', refused if it mixes elements."""
        host: Any = super()
        optimizer: torch.optim.Optimizer = host.create_optimizer(*args, **kwargs)
        OptimizerForm.of(optimizer)
        return optimizer

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        """The targets of the step, on all ranks."""
        host: Any = super()
        number = host._get_num_items_in_batch(*args, **kwargs)
        if number is not None and self._ranks > 1:
            number = torch.as_tensor(number)
            dist.all_reduce(number)  # integers
        return number

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **others: Any
    ) -> Any:
        """The model's own loss, whatever the class makes of it."""
        host: Any = transformers.Trainer
        return host.compute_loss(self, model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """One micro-step; its gradients go into the tree."""
        trainer: Any = self
        model.train()
        self._finished = False
        inputs = trainer._prepare_inputs(inputs)
        if num_items_in_batch is None:
            raise PlanError("tbik_trainer.Trainer: the number of targets of the step is unknown; batches need labels")
        with self.tree.micro_step(len(inputs["input_ids"])) as micro:
            loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            micro.backward(loss)
        return loss.detach() * self._ranks  # what is logged is the mean over the ranks

    def _clip_grad_norm(self, model: Any) -> float:
        trainer: Any = self
        self._finish()
        return self.tree.clip_grad_norm(trainer.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: float | None = None) -> float:
        self._finish()
        return self.tree.grad_norm() if grad_norm is None else grad_norm

    def _finish(self) -> None:
        if not self._finished:
            self.tree.finish()
            self._finished = True


class Trainer(ForTrainer, transformers.Trainer):
    """See the module."""


class _StepEnd(transformers.TrainerCallback):
    def __init__(self, trainer: ForTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer.sampler.finish_step()


def collate(features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Items with input_ids (and labels) -> a batch padded on the right; bits do not depend on the padding."""
    ids = [torch.as_tensor(f["input_ids"], dtype=torch.int64) for f in features]
    labels = [torch.as_tensor(f.get("labels", f["input_ids"]), dtype=torch.int64) for f in features]
    return SampleBatch(ids, labels).padded("right")
