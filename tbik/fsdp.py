"""Data-parallel training whose gradients, norm and weights have one set of bits on 1 rank or many.

    grad = node(0, B) over the samples of the step             D data ranks, A micro-steps, m samples each: B = D*A*m

    tbik.parallelize(model, tp_group, plan, compute_dtype=torch.bfloat16)        fp32 master weights
    tree = tbik.fsdp.apply(model, mesh, plan, samples_per_step=B, micro_steps=A)
    for _ in range(A):
        with tree.micro_step() as step:                          # step.samples: numbers of this rank's samples, 0..B-1
            loss = tree.model(**batch(step.samples)).loss        # a sum over tokens (num_items_in_batch=1)
            step.report(loss)                                    # for tree.loss_sum
            step.backward(loss, tbik.gradients.upstream(total_tokens))
    tree.finish()                                                # param.grad, as usual
    norm = tree.clip_grad_norm(1.0)
    optimizer.step(); optimizer.zero_grad()

    strategy   what torch does                              what is changed
    single     nothing, one rank                            gradients are collected by samples (tbik.GradientTree)
    fsdp2      fully_shard; mesh (shard) or                 reduce-scatter of covers, module after module in backward;
               (replicate, shard) for HSDP                  HSDP adds an all-reduce of covers
    fsdp1      FullyShardedDataParallel, use_orig_params    its communication hook
    ddp        DistributedDataParallel                      its communication hook
    collected  nothing, whole parameters on every rank      as "single"; ranks exchange at the end of each micro-step

The mesh holds the data ranks only; tensor parallelism is tbik.parallelize's. Letters: ORDER.md S.
Needs the folder integrations/ (tbik_fsdp) for every strategy but "single". CPU tensors.
Errors: PlanError at construction, naming what would work; in a step as tbik.GradientTree, TransportTimeout,
TransportError. Where one rank fails during backward, the others' wait ends after the group's timeout.
Bits: layout-invariant over strategy, mesh, micro_steps, accumulation, checkpointing (tests/test_fsdp.py).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tbik import _C, gradient_norm, gradients
from tbik.errors import PlanError
from tbik.gradient_covers import schedule
from tbik.gradient_ranks import Ranks
from tbik.gradients import Accumulation, GradientTree
from tbik.plan import TreePlan
from tbik.tree import Node

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

Strategy = Literal["fsdp2", "fsdp1", "ddp", "collected", "single"]
STRATEGIES = ("fsdp2", "fsdp1", "ddp", "collected", "single")


def apply(
    model: torch.nn.Module,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    plan: TreePlan | None = None,
    *,
    samples_per_step: int,
    micro_steps: int | None = None,
    strategy: Strategy = "fsdp2",
    accumulation: Accumulation = "sharded",
    compute_dtype: torch.dtype | None = None,
    units: Sequence[torch.nn.Module] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool = True,
    guard: bool = True,
) -> DataParallel:
    """The model under a data-parallel strategy, as a DataParallel; train through its `.model`.

    model: on tbik operators throughout (tbik.parallelize, tbik.nn), fp32 parameters, the same bits on every data rank.
        A Hugging Face model is parallelized first, on one tensor-parallel rank, with plan and compute_dtype.
    mesh: the D data ranks: a group, a 1-D mesh, for "fsdp2" also (replicate, shard). None for "single".
    plan: that of the model, which is the default; its grad_wire_dtype rounds gradients on the wire.
    samples_per_step, micro_steps, accumulation, guard: as in tbik.GradientTree.
    units: modules that are sharded and gathered as one; by default the layers of a parallelized model, its embedding
        and head if they are not tied, and the rest.
    mp_policy: of fully_shard; param_dtype None or bfloat16 (eager only; parameters are then gathered in bfloat16, and
        the run is that of compute_dtype=bfloat16 in bits), reduce_dtype None or float32. Inputs are not cast.
    Errors: PlanError; IntegrityError where the ranks' weights differ. Layout-invariant.
    """
    where = "fsdp.apply"
    if strategy not in STRATEGIES:
        _refuse(f"strategy is one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if not isinstance(model, torch.nn.Module):
        _refuse(f"model is a module, got {type(model).__name__}")
    if plan is not None and not isinstance(plan, TreePlan):
        _refuse(f"plan is a tbik.TreePlan or None, got {type(plan).__name__}")
    _refuse_wrapped(model)
    model = _on_tbik_operators(model, plan, compute_dtype)
    plan = _plan_of(model, plan)
    if any(p.is_meta for p in model.parameters()):
        _refuse("the model has weights on the meta device; load them first")
    settings = Settings(samples_per_step, micro_steps, plan, accumulation, guard, units, mp_policy)
    if strategy == "single":
        if mesh is not None and _size(mesh) != 1:
            _refuse(f'strategy "single" is one rank without a mesh, got {_size(mesh)} ranks; use fsdp2, fsdp1 or ddp')
        if mp_policy is not None:
            _refuse("mp_policy belongs to fsdp2")
        return DataParallel(model, model, Ranks(None), settings)
    if mesh is None:
        _refuse(f'strategy "{strategy}" needs a mesh or a group of data ranks; one rank alone is "single"')
    if mp_policy is not None and strategy != "fsdp2":
        _refuse(f"mp_policy belongs to fsdp2, not to {strategy}; use fp32 parameters and compute_dtype")
    try:
        integration = importlib.import_module("tbik_fsdp")
    except ModuleNotFoundError as error:
        raise PlanError(
            f'{where}: strategy "{strategy}" needs the package tbik_fsdp: install tbik, or add the folder integrations '
            "to PYTHONPATH"
        ) from error
    made: DataParallel = integration.make(model, mesh, settings, strategy, reshard_after_forward)
    return made


class Settings(NamedTuple):
    """What apply() was asked, checked as far as it does not depend on the strategy."""

    samples_per_step: int
    micro_steps: int | None
    plan: TreePlan | None
    accumulation: Accumulation
    guard: bool
    units: Sequence[torch.nn.Module] | None
    mp_policy: MixedPrecisionPolicy | None


class MicroStep(gradients.MicroStep):
    """What a micro-step's `with` gives. samples: numbers, in the global batch, of the samples of this rank."""

    tree: DataParallel

    def report(self, loss_sum: Tensor) -> None:
        """The sum of the token losses of these samples, in fp32 and not scaled: a node of tree.loss_sum (V8)."""
        self.tree._report(self.samples, loss_sum)


class DataParallel(GradientTree):
    """A GradientTree around a model under a data-parallel strategy; apply() makes one.

    model: what to call. loss_sum: of the last finished step, if every micro-step reported its part.
    """

    loss_sum: float | None

    def __init__(
        self, inner: torch.nn.Module, model: torch.nn.Module, ranks: Ranks, settings: Settings, strategy: str = "single"
    ) -> None:
        self.inner, self.model, self.strategy = inner, model, strategy
        self.loss_sum = None
        self._reported: dict[Node, float] = {}
        super().__init__(
            self._trainable(),
            samples_per_step=settings.samples_per_step,
            micro_steps=settings.micro_steps,
            group=ranks,
            plan=settings.plan,
            guard=settings.guard,
            accumulation=settings.accumulation,
        )

    def _trainable(self) -> dict[str, Tensor]:
        return dict(self.inner.named_parameters())

    @contextlib.contextmanager
    def micro_step(self, num_samples: int | None = None) -> Iterator[MicroStep]:
        """As GradientTree.micro_step."""
        with super().micro_step(num_samples) as step:
            yield MicroStep(*step)

    def finish(self, *, shards: bool = False) -> None:
        """param.grad = node(0, B) as the strategy keeps gradients; loss_sum. Collective. As GradientTree.finish."""
        if shards:
            raise PlanError("DataParallel.finish: param.grad is as the strategy shards it; call finish()")
        super().finish()

    # --- scalars ------------------------------------------------------------------------------------------------------

    def grad_norm(self) -> float:
        """sqrt(RN64(exact sum of g^2)) over all parameters, each logical element once (S5); collective."""
        return gradient_norm.norm(self._counted_gradients(), self._norm_groups())

    def clip_grad_norm(self, max_norm: float) -> float:
        """g := g fp32(min(1, max_norm/(norm + 1e-6))), in place; returns the norm. Collective. Layout-invariant."""
        norm = self.grad_norm()
        coefficient = gradient_norm.clip_coefficient(norm, max_norm)
        local = [grad for grad in self._local_gradients().values() if grad.numel()]
        with torch.no_grad():
            torch._foreach_mul_(local, coefficient)
        return norm

    def _local_gradients(self) -> dict[str, Tensor]:
        """name -> what this rank holds of param.grad."""
        found = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                raise PlanError(f"DataParallel.grad_norm: {name}.grad is None; call it after finish()")
            found[name] = parameter.grad
        return found

    def _counted_gradients(self) -> Iterator[Tensor]:
        """Of what this rank holds, the elements that it answers for among the tensor-parallel ranks."""
        counted = self._counted_rows()
        for name, grad in self._local_gradients().items():
            if name in counted:
                first = self._first_row(name)
                lo, hi = (min(max(row - first, 0), grad.shape[0]) for row in counted[name])
                grad = grad[lo:hi]
            yield grad

    def _first_row(self, name: str) -> int:
        """Of the rows (dimension 0) of a parameter, the first that this rank's gradient holds."""
        return 0

    def _counted_rows(self) -> dict[str, tuple[int, int]]:
        """The rows that this tensor-parallel rank answers for, of parameters that several ranks may hold."""
        setting = getattr(self.inner, "setting", None)
        if setting is None or setting.size == 1:
            return {}
        from tbik.huggingface.checkpoint import counted_range

        rows = {}
        parts: Any = self.inner.tbik_parts
        for part in parts.values():
            if part.axis == 0 and part.parameter in self._parameters:
                rows[part.parameter] = counted_range(setting, part)[:2]
        return rows

    def _norm_groups(self) -> list[dist.ProcessGroup | None]:
        """The groups over which gradients are in pieces."""
        setting = getattr(self.inner, "setting", None)
        tensor_parallel = [] if setting is None or setting.size == 1 else [setting.group]
        return [*self._shard_groups(), *tensor_parallel]

    def _shard_groups(self) -> list[dist.ProcessGroup | None]:
        return []

    def _report(self, samples: range, loss_sum: Tensor) -> None:
        if not self._active:
            raise PlanError("DataParallel.report: expected to be inside the micro-step")
        if not isinstance(loss_sum, Tensor) or loss_sum.numel() != 1 or loss_sum.dtype != torch.float32:
            raise PlanError("DataParallel.report: loss_sum is an fp32 scalar, the sum of the token losses")
        node = gradients.node_of(samples.start, len(samples))
        if node in self._reported:
            raise PlanError("DataParallel.report: this micro-step has reported its loss")
        self._reported[node] = float(loss_sum.detach())

    def _agree_to_finish(self) -> None:
        super()._agree_to_finish()
        mine = [[node.level, node.index, value.hex()] for node, value in self._reported.items()]
        records = self._ranks.speak({"loss": mine})
        leaves = sorted(
            (Node(level, index), float.fromhex(value)) for record in records for level, index, value in record["loss"]
        )
        leaves.sort(key=lambda item: item[0].lo)
        self._reported, self.loss_sum = {}, None
        if sum(node.hi - node.lo for node, _ in leaves) == self.samples_per_step:
            values = [torch.tensor([value]) for _, value in leaves]
            root = _C.fold(values, schedule(tuple(node for node, _ in leaves), self.samples_per_step, False))
            self.loss_sum = float(root)

    def _clear(self) -> None:
        super()._clear()
        self._reported = {}


# --- refusals ---------------------------------------------------------------------------------------------------------


def _refuse(message: str) -> NoReturn:
    raise PlanError(f"fsdp.apply: {message}")


def _size(mesh: Any) -> int:
    return int(mesh.size())


def _refuse_wrapped(model: torch.nn.Module) -> None:
    wrappers = ("FullyShardedDataParallel", "DistributedDataParallel", "FSDPModule", "DataParallel", "DeepSpeedEngine")
    for name, module in model.named_modules():
        found = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in wrappers), None)
        if found is not None:
            _refuse(
                f"{name or 'the model'} is wrapped already ({found}): its communication is not in the order. "
                "Pass the plain model; apply() wraps it"
            )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or parameter._backward_hooks:
            _refuse(f"{name} has a gradient hook of somebody else, which would see parts of a gradient; remove it")


def _on_tbik_operators(
    model: torch.nn.Module, plan: TreePlan | None, compute_dtype: torch.dtype | None
) -> torch.nn.Module:
    """The model, parallelized if it is a Hugging Face model as loaded; refuses sums that torch would order."""
    if type(model).__module__.startswith("transformers.") and not hasattr(model, "setting"):
        from tbik.huggingface.parallelize import parallelize

        model = parallelize(model, None, plan, compute_dtype=compute_dtype)
    elif compute_dtype is not None:
        _refuse("compute_dtype is for a Hugging Face model as loaded; this one has its own (tbik.parallelize, tbik.nn)")
    for name, module in model.named_modules():
        own = any(parameter is not None for parameter in module._parameters.values())
        if own and type(module).__module__.split(".")[0] == "torch":
            _refuse(
                f"{name or 'the model'} is a {type(module).__module__}.{type(module).__name__}, whose sums are not in "
                "the canonical order; use tbik.parallelize, or the modules of tbik.nn"
            )
    return model


def _plan_of(model: torch.nn.Module, plan: TreePlan | None) -> TreePlan | None:
    setting: Any = getattr(model, "setting", None)
    if setting is None:
        return plan
    if plan is not None and plan.key() != setting.plan.key():
        _refuse(
            f"the model was parallelized with {setting.plan.key()}, the plan given is {plan.key()}; pass the same one "
            "or none"
        )
    own: TreePlan = setting.plan
    return own
