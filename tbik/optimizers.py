"""Which optimizers keep training layout-invariant, and in which form they run.

    element-wise: new(p_i, g_i, s_i) depends on element i alone; so a shard has the bits of the whole tensor

loop, foreach and fused do the same arithmetic in other orders of rounding: each agrees with itself over shards, not
with the others, so the form belongs to the run and is stored with it. What mixes elements of a tensor (a norm, a mean,
an orthogonalisation, a dot product) needs a tree of its own and is refused, and so is what is not known.

    OptimizerForm.of(torch.optim.AdamW(model.parameters(), foreach=True))      AdamW, foreach

Errors: PlanError. Guarantee: layout-invariant, for each form of FORMS (tests/test_optimizers.py runs every one of them
on shards of uneven sizes).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from tbik.errors import PlanError

FORMS: dict[str, tuple[str, ...]] = {
    "Adadelta": ("loop", "foreach"),
    "Adagrad": ("loop", "foreach", "fused"),
    "Adam": ("loop", "foreach", "fused"),
    "AdamW": ("loop", "foreach", "fused"),
    "Adamax": ("loop", "foreach"),
    "ASGD": ("loop", "foreach"),
    "NAdam": ("loop", "foreach"),
    "RAdam": ("loop", "foreach"),
    "RMSprop": ("loop", "foreach"),
    "Rprop": ("loop", "foreach"),
    "SGD": ("loop", "foreach"),
}
"""torch.optim classes that are element-wise, and their forms that have the same bits on shards."""

MIXING = {
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it takes means over rows and columns, and norms",
    "LBFGS": "it takes dot products over all parameters",
    "SparseAdam": "it takes sparse gradients, which have no tree",
    "LAMB": "it takes norms of whole tensors",
    "LARS": "it takes norms of whole tensors",
    "Shampoo": "it multiplies whole matrices",
    "SOAP": "it rotates whole matrices",
    "ZeroRedundancyOptimizer": "it hides its optimizer; FSDP2 or HSDP shard the state too",
}
"""Optimizers known by name that put elements of a tensor together."""

_SUPPORTED = ", ".join(FORMS)
_declared: dict[type[Optimizer], tuple[str, ...]] = {}


class OptimizerForm(NamedTuple):
    """name: the class. form: loop, foreach or fused."""

    name: str
    form: str

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerForm:
        """The form of an optimizer. PlanError, by name, for one that mixes elements or is unknown."""
        where = "optimizer"
        if not isinstance(optimizer, Optimizer):
            raise PlanError(f"{where}: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
        kind = type(optimizer)
        name = kind.__name__
        if name in MIXING:
            raise PlanError(f"{where}: {name} is not element-wise ({MIXING[name]}); supported: {_SUPPORTED}")
        known = kind is getattr(torch.optim, name, None) and name in FORMS
        if not known and kind not in _declared:
            raise PlanError(
                f"{where}: {kind.__module__}.{name} is not known to be element-wise; supported: {_SUPPORTED}. If each "
                "element of its update depends on that element's parameter, gradient and state alone: "
                f"tbik.optimizers.declare_elementwise({name})"
            )
        forms = {_form_of(where, name, optimizer, group) for group in optimizer.param_groups}
        if len(forms) > 1:
            raise PlanError(f"{where}: the groups of {name} have the forms {sorted(forms)}; expected one")
        form = forms.pop()
        allowed = FORMS[name] if known else _declared[kind]
        if form not in allowed:
            raise PlanError(
                f"{where}: {form} {name} has other bits on a shard than on the whole tensor (the ends of its vector "
                f"loops round otherwise); expected {' or '.join(allowed)}"
            )
        return cls(name, form)

    def __str__(self) -> str:
        return f"{self.name}, {self.form}"


def declare_elementwise(kind: type[Optimizer], forms: tuple[str, ...] = ("loop",)) -> None:
    """Your word that each element of the update of `kind` depends on that element alone. Errors: PlanError."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise PlanError(f"declare_elementwise: expected a class of optimizers, got {kind!r}")
    if kind.__name__ in MIXING:
        raise PlanError(f"declare_elementwise: {kind.__name__} mixes elements: {MIXING[kind.__name__]}")
    if not forms or set(forms) - {"loop", "foreach", "fused"}:
        raise PlanError(f"declare_elementwise: forms are some of loop, foreach, fused, got {forms!r}")
    _declared[kind] = tuple(forms)


def _form_of(where: str, name: str, optimizer: Optimizer, group: dict[str, Any]) -> str:
    if group.get("fused"):
        return "fused"
    foreach = group.get("foreach")
    if foreach is None and "foreach" in group:
        elsewhere = [p.device.type for p in group["params"] if p.device.type != "cpu"]
        if elsewhere:
            raise PlanError(
                f"{where}: {name} on {elsewhere[0]} chooses foreach or loop by the kind of its parameters, so that "
                "sharded and whole ones would differ; say foreach=True or foreach=False"
            )
    return "foreach" if foreach else "loop"
