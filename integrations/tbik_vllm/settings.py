"""What the environment asks for, and the one plan of a process.

    plan = TBIK_PLAN, else the checkpoint's own, else derived from the config alone      never from the TP size

Errors: PlanError.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Literal

from tbik import PlanError, TreePlan
from tbik.plan import LEAF_KINDS, ModelShape

MODES = ("full", "allreduce")

EQUAL_TP_SIZES = ((1, 2, 3, 4, 8), (1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 4), (1, 2, 3), (1, 2), (1, 3), (1,))
"""A derived plan serves the first of these that equal shards allow, so it is a function of the config."""


TENSOR_CORES = tuple(kind.removeprefix("mma:") for kind in LEAF_KINDS if kind.startswith("mma:"))
"""Architectures of which a plan can name the tensor cores."""


@dataclass(frozen=True)
class Settings:
    mode: Literal["full", "allreduce"] = "full"
    plan: TreePlan | None = None

    @classmethod
    def from_environment(cls) -> Settings:
        mode = os.environ.get("TBIK_VLLM", "full")
        if mode not in MODES:
            raise PlanError(f"TBIK_VLLM: expected one of {MODES}, got {mode!r}")
        text = os.environ.get("TBIK_PLAN", "")
        return cls(mode, plan_from_text(text) if text else None)  # type: ignore[arg-type]


def plan_from_text(text: str) -> TreePlan:
    """The plan that TBIK_PLAN spells: fields of TreePlan in JSON, or the text of TreePlan.key()."""
    try:
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise TypeError("no object")
        return TreePlan.from_key(text) if "order_version" in fields else TreePlan(**fields)
    except (TypeError, json.JSONDecodeError) as error:
        raise PlanError(
            f'TBIK_PLAN: expected JSON fields of a TreePlan, such as {{"leaves": 8}}, got {text!r} ({error})'
        ) from error


def derived_plan(config: Any) -> TreePlan:
    """The plan of a checkpoint that names none: the first sizes of EQUAL_TP_SIZES that one L serves."""
    shape = ModelShape.from_config(config)
    for sizes in EQUAL_TP_SIZES[:-1]:
        try:
            return TreePlan.for_model(shape, sizes, equal=True)
        except PlanError:
            continue
    return TreePlan.for_model(shape, EQUAL_TP_SIZES[-1], equal=True)


def require_leaf(plan: TreePlan, here: str) -> None:
    """PlanError where the devices do not have the plan's leaf. here: "cpu", or a GPU's architecture such as "sm_90"."""
    has = plan.leaf == "fma" or plan.leaf == ("amx" if here == "cpu" else f"mma:{here}")
    if not has:
        choices = ["fma"] + ["amx"] * (here == "cpu") + [f"mma:{here}"] * (here in TENSOR_CORES)
        raise PlanError(
            f"tbik_vllm: the plan's leaf is {plan.leaf!r}, the devices are {here}, which do not have it; expected "
            f"{' or '.join(choices)}. Leaf 'fma' has one set of bits on all devices"
        )


def explain_leaf(plan: TreePlan, here: str) -> str:
    """What to know about a leaf that is slow on these devices, else an empty text."""
    if here == "cpu" or plan.leaf != "fma":
        return ""
    slow = f"leaf 'fma' has the CPU's bits and is slow on {here}: an audit, not a way to serve"
    if here not in TENSOR_CORES:
        return f"{slow}; tensor-core leaves exist for {', '.join(TENSOR_CORES)}"
    fast = json.dumps({"leaves": plan.leaves, "leaf": f"mma:{here}"})
    return f"{slow}. For tensor cores, with bits of that architecture alone: TBIK_PLAN='{fast}'"


_active: TreePlan | None = None


def plan_for(vllm_config: Any) -> TreePlan:
    """The plan of this engine. Errors: PlanError where the TP size cuts a leaf or a head, naming the cut."""
    settings = Settings.from_environment()
    config = vllm_config.model_config.hf_text_config
    plan = settings.plan
    if plan is None:
        stored = getattr(config, "tbik_plan", None) or getattr(vllm_config.model_config.hf_config, "tbik_plan", None)
        plan = TreePlan.from_key(stored) if stored else derived_plan(config)
    if plan.acc_dtype != "float32":
        raise PlanError(f"tbik_vllm: vLLM's models compute in float32 at most, the plan says {plan.acc_dtype}")
    plan.layout(config, vllm_config.parallel_config.tensor_parallel_size, equal=True)
    return plan


def activate(plan: TreePlan) -> None:
    """Make `plan` the process's; what has no config at hand (the sampler) reads it. One plan per process."""
    global _active
    if _active is not None and _active != plan:
        raise PlanError(
            f"tbik_vllm: this process already runs an engine under plan {_active.fingerprint()}, now asked for "
            f"{plan.fingerprint()}; start the second engine in a process of its own"
        )
    _active = plan


def active_plan() -> TreePlan:
    if _active is None:
        raise PlanError("tbik_vllm: no engine of this process has a plan yet")
    return _active
