"""tbik.ops.rope_attention: the separate operators' forward, gradients that are rounded once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from torch import Tensor

from tbik import ops, reference
from tbik.errors import PlanError
from tbik.ops.norm import norm_weight_grad, rms_norm, rms_norm_backward_f32
from tbik.ops.rope import rope, rope_backward_f32, rope_tables
from tbik.plan import TreePlan


def problem(tokens: int, dim: int = 16, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = {"q": 4, "k": 2, "v": 2}
    values = {name: torch.randn(tokens, h, dim, generator=generator).bfloat16() for name, h in heads.items()}
    values["grad"] = torch.randn(tokens, 4, dim, generator=generator).bfloat16()
    frequencies = torch.logspace(0, -3, dim // 2)
    values["sin"], values["cos"] = rope_tables(torch.arange(tokens), frequencies)
    for name in ("q_norm", "k_norm"):
        values[name] = torch.rand(dim, generator=generator) + 0.5
    values["sinks"] = torch.randn(4, generator=generator)
    return values


def cu(*lengths: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


NAMES = ("q", "k", "v", "q_norm", "k_norm", "sinks")


def run(x: dict[str, Tensor], starts: Tensor | None, normed: bool, **options: Any) -> dict[str, Tensor]:
    leaves = {name: x[name].clone().requires_grad_() for name in NAMES if normed or name in ("q", "k", "v")}
    rest = {name: t for name, t in leaves.items() if name not in ("q", "k", "v")}
    out = ops.rope_attention(leaves["q"], leaves["k"], leaves["v"], x["sin"], x["cos"], starts, **rest, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), x["grad"])
    return {"out": out.detach(), **dict(zip(leaves, grads))}


@pytest.mark.parametrize("dropout", [None, ops.AttentionDropout(0.3, seed=1, step=2, name="attention")])
@pytest.mark.parametrize("normed", [False, True])
def test_verify_equals_the_separate_operators(normed: bool, dropout: ops.AttentionDropout | None) -> None:
    """Forward: rms_norm, rope, attention one after the other. Backward: their fp32 formulas, one rounding."""
    x = problem(75)
    actual = run(x, None, normed, dropout=dropout)
    sin, cos = x["sin"], x["cos"]
    q, k = (rms_norm(x[n], x[f"{n}_norm"], 1e-6) if normed else x[n] for n in ("q", "k"))
    q, k = rope(q, sin, cos), rope(k, sin, cos)
    sinks = x["sinks"] if normed else None
    state = ops.attention_forward(q, k, x["v"], sinks=sinks, dropout=dropout)
    assert_bitwise_equal(actual["out"], state[0], "out")
    wide = ops.attention_backward(x["grad"], q, k, x["v"], state, sinks=sinks, dropout=dropout)
    assert_bitwise_equal(actual["v"], reference.epilogue(wide.dv, out_dtype=torch.bfloat16), "dv")
    for name, dy in (("q", wide.dq), ("k", wide.dk)):
        dy = rope_backward_f32(dy, sin, cos)
        if normed:
            w = x[f"{name}_norm"]
            dw = norm_weight_grad(dy, x[name], 1e-6, heads=True, sample_offsets=[0, 75])
            assert_bitwise_equal(actual[f"{name}_norm"], dw, f"d{name}_norm")
            dy = rms_norm_backward_f32(dy, x[name], w, 1e-6)
        assert_bitwise_equal(actual[name], reference.epilogue(dy, out_dtype=torch.bfloat16), f"d{name}")
    if normed:
        assert wide.d_sink_rows is not None
        assert_bitwise_equal(actual["sinks"], reference.bias_grad(wide.d_sink_rows, [0, 75], TreePlan()), "dsinks")


def test_verify_one_rounding_differs_from_three() -> None:
    """The negative control: rounding after each separate operator gives other bits."""
    x = problem(40)
    once = run(x, None, normed=True)
    leaves = {name: x[name].clone().requires_grad_() for name in NAMES}
    q, k = (rms_norm(leaves[n], leaves[f"{n}_norm"], 1e-6, heads=True) for n in ("q", "k"))
    q, k = (rope(t, x["sin"], x["cos"]) for t in (q, k))
    out = ops.attention(q, k, leaves["v"], sinks=leaves["sinks"])
    assert_bitwise_equal(out.detach(), once["out"], "out")
    grads = dict(zip(NAMES, torch.autograd.grad(out, list(leaves.values()), x["grad"])))
    assert_bits_differ(grads["q"], once["q"], "dq")
    assert_bits_differ(grads["k"], once["k"], "dk")
    assert_bitwise_equal(grads["v"], once["v"], "dv")


def test_verify_packed_equals_alone() -> None:
    """Output and activation gradients of a sequence ignore the others; dq_norm, dk_norm, dsinks add up by samples."""
    lengths = (66, 0, 3, 20)
    x = problem(sum(lengths), seed=3)
    packed = run(x, cu(*lengths), normed=True, window=50, softcap=6.0)
    alone = []
    for lo, hi in itertools.pairwise(cu(*lengths).tolist()):
        part = {name: t[lo:hi] if len(t) == sum(lengths) else t for name, t in x.items()}
        alone.append(run(part, None, normed=True, window=50, softcap=6.0))
        for name in ("out", "q", "k", "v"):
            assert_bitwise_equal(alone[-1][name], packed[name][lo:hi], f"{name} of rows {lo}..{hi}")
    for name in ("q_norm", "k_norm", "sinks"):
        leaves = [result[name] for result in alone]
        expected = reference.add(reference.add(*leaves[:2]), reference.add(*leaves[2:]))
        assert_bitwise_equal(packed[name], expected, f"d{name}")


def test_verify_opcheck_and_compiled() -> None:
    x = problem(20)
    eager = run(x, cu(15, 5), normed=True)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.rope_attention(
            q, k, v, x["sin"], x["cos"], cu(15, 5), q_norm=x["q_norm"], k_norm=x["k_norm"], sinks=x["sinks"]
        )

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = [x[name].clone().requires_grad_() for name in ("q", "k", "v")]
    out = compiled(*leaves)
    assert_bitwise_equal(out.detach(), eager["out"], "out")
    for name, got in zip(("q", "k", "v"), torch.autograd.grad(out, leaves, x["grad"])):
        assert_bitwise_equal(got, eager[name], f"d{name}")
    arguments = [x[name].clone().requires_grad_() for name in NAMES]
    q, k, v, q_norm, k_norm, sinks = arguments
    torch.library.opcheck(
        torch.ops.tbik.rope_attention.default,
        (q, k, v, x["sin"], x["cos"], cu(15, 5), q_norm, k_norm, 1e-6, False, False, sinks, [0, 2, 4], 0.25, 0.0, True,
         0, False, True, 0.5, [1, 2, 3, 4, 5]),
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"sin": torch.zeros(4, 8)},
        {"cos": torch.zeros(20, 8, dtype=torch.float64)},
        {"sin": torch.zeros(20, 8, requires_grad=True)},
        {"q_norm": torch.ones(8)},
        {"q_norm": torch.ones(16, device="meta")},
        {"q_norm": torch.ones(16, dtype=torch.int32)},
        {"q_norm": [1.0]},
        {"sin": torch.zeros(20, 8, device="meta"), "cos": torch.zeros(20, 8, device="meta")},
        {"cu": torch.tensor([0, 20], device="meta")},
        {"sin": torch.zeros(20, 8).to_sparse()},
        {"sin": torch.zeros(20, 4)},
        {"eps": -1.0},
        {"eps": None},
        {"offset": "no"},
        {"interleaved": 1},
        {"plan": {"leaves": 6}},
        {"plan": TreePlan(acc_dtype="float64")},
        {"k": torch.zeros(19, 2, 16).bfloat16(), "v": torch.zeros(19, 2, 16).bfloat16()},
        {"q": torch.zeros(20, 3, 16).bfloat16()},
    ],
)
def test_verify_bad_input_is_refused(changes: dict[str, object]) -> None:
    x = problem(20)
    arguments = {name: x[name] for name in ("q", "k", "v", "sin", "cos", "q_norm", "k_norm")} | changes
    with pytest.raises(PlanError, match=r"ops\.rope_attention"):
        ops.rope_attention(**arguments)  # type: ignore[arg-type]
