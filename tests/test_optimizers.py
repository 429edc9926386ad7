"""tbik.optimizers: every accepted form has the same bits on shards; what mixes elements is refused by name."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents

from tbik.errors import PlanError
from tbik.optimizers import FORMS, OptimizerForm, declare_elementwise

SIZE = 70_001  # more than two ranges of a parallel loop, and no multiple of a vector
CUTS = (0, 1, 8, 77, 4096, 40_003, 65_536, SIZE)
STEPS = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01},
    "Rprop": {"lr": 1e-3},
    "AdamW": {"lr": 1e-3, "weight_decay": 0.1},
}


def trained(kind: type, form: str, cuts: tuple[int, ...], **options: Any) -> torch.Tensor:
    """The parameter after STEPS, held as shards [cuts[i], cuts[i + 1])."""
    whole = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    shards = [torch.nn.Parameter(whole[lo:hi].clone()) for lo, hi in itertools.pairwise(cuts)]
    flags = {"foreach": form == "foreach", "fused": form == "fused"}
    if "fused" not in kind.__init__.__code__.co_varnames:
        del flags["fused"]
    optimizer = kind(shards, **flags, **options)
    for step in range(STEPS):
        grad = wide_exponents((SIZE,), torch.float32, seed=step, spread=40)
        for shard, lo, hi in zip(shards, cuts, cuts[1:]):
            shard.grad = grad[lo:hi].clone()
        optimizer.step()
    return torch.cat([shard.detach() for shard in shards])


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_verify_accepted_optimizers_have_the_same_bits_on_shards(name: str, form: str) -> None:
    kind, options = getattr(torch.optim, name), OPTIONS.get(name, {"lr": 1e-3})
    whole = trained(kind, form, (0, SIZE), **options)
    assert_bitwise_equal(trained(kind, form, CUTS, **options), whole, f"{form} {name}")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert_bitwise_equal(trained(kind, form, (0, SIZE), **options), whole, f"{form} {name}, other threads")
    finally:
        torch.set_num_threads(threads)


def test_verify_fused_sgd_is_refused_and_the_forms_of_adamw_are_three() -> None:
    """Why the form is recorded: the same optimizer in another form has other bits."""
    options = OPTIONS["AdamW"]
    loop, fused = (trained(torch.optim.AdamW, form, (0, SIZE), **options) for form in ("loop", "fused"))
    assert_bits_differ(loop, fused, "loop and fused AdamW")
    weight = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(PlanError, match="fused SGD"):
        OptimizerForm.of(torch.optim.SGD([weight], lr=0.1, fused=True))


def test_verify_the_form_is_recorded() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    assert str(OptimizerForm.of(torch.optim.AdamW([weight]))) == "AdamW, loop"
    assert OptimizerForm.of(torch.optim.AdamW([weight], foreach=True)).form == "foreach"
    assert OptimizerForm.of(torch.optim.Adam([weight], fused=True)) == OptimizerForm("Adam", "fused")


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


class Adafactor(Lion):
    """transformers has one of this name too."""


class MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, Adafactor, Lion, MyAdam])
def test_verify_other_optimizers_are_refused_by_name(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(PlanError, match=rf"{kind.__name__} is not (known to be )?element-wise"):
        OptimizerForm.of(kind([weight]))


def test_verify_a_declared_optimizer_is_taken_at_the_word() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))

    class Mine(Lion):
        pass

    declare_elementwise(Mine)
    assert OptimizerForm.of(Mine([weight])) == OptimizerForm("Mine", "loop")
    for wrong in (Adafactor, int):
        with pytest.raises(PlanError, match="declare_elementwise"):
            declare_elementwise(wrong)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="forms"):
        declare_elementwise(Mine, ("fast",))


def test_verify_groups_of_several_forms_and_what_is_no_optimizer_are_refused() -> None:
    a, b = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    with pytest.raises(PlanError, match="foreach.*loop"):
        OptimizerForm.of(torch.optim.AdamW([{"params": [a], "foreach": True}, {"params": [b]}]))
    with pytest.raises(PlanError, match="expected a torch.optim.Optimizer"):
        OptimizerForm.of("AdamW")


def test_verify_a_form_that_depends_on_the_kind_of_parameter_is_refused() -> None:
    """On a GPU torch takes foreach for plain tensors and the loop for DTensors."""
    weight = torch.nn.Parameter(torch.zeros(3, device="meta"))
    with pytest.raises(PlanError, match="say foreach=True"):
        OptimizerForm.of(torch.optim.AdamW([weight]))
