"""Operators of tbik.ops on CUDA tensors against the same operators on the CPU, in bits, forward and backward.

Without a GPU the operators are told that CPU tensors are CUDA's: the kernels then run in triton's interpreter, with the
correctly rounded fma. On data of wide exponents that cancels, another order shows.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from interpreter import DEVICE, exact_fma, needs_triton  # noqa: F401
from torch import Tensor

from tbik import TreePlan, devices, ops

pytestmark = [
    pytest.mark.long,
    needs_triton,
    pytest.mark.usefixtures("exact_fma"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero|underflow):RuntimeWarning"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Run = Callable[..., Any]


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Tensor]]:
    """run(operator, *tensors): results and gradients of the same call on CUDA (or in the interpreter)."""

    def run(operator: Run, *tensors: Tensor | None) -> list[Tensor]:
        with monkeypatch.context() as patch:
            calls: list[Tensor] = []
            if DEVICE == "cpu":
                patch.setattr(devices, "is_cuda", lambda t: calls.append(t) or True)
            results = results_of(operator, *tensors, device=DEVICE)
            assert calls or DEVICE == "cuda", "no kernel was asked for"
            return results

    return run


def results_of(operator: Run, *tensors: Tensor | None, device: str = "cpu") -> list[Tensor]:
    """Outputs, then the gradients of all floating-point inputs for a fixed upstream gradient."""
    inputs = [
        None if t is None else t.to(device).detach().clone().requires_grad_(t.is_floating_point()) for t in tensors
    ]
    outputs = operator(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    live = [y for y in outputs if y.requires_grad]
    upstream = [
        wide_exponents(tuple(y.shape), y.dtype, 99 + i, spread=6).to(device) if y.dim() else torch.ones_like(y)
        for i, y in enumerate(live)
    ]
    torch.autograd.backward(live, upstream)
    grads = [t.grad for t in inputs if t is not None and t.grad is not None]
    return [t.detach().cpu() for t in (*outputs, *grads)]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
    assert len(actual) == len(expected) > 1
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise_equal(a, e, f"{what}, result {i}")


# --- rows: norms, activations, rope ---------------------------------------------------------------------------------


def rows(shape: Sequence[int], dtype: torch.dtype, seed: int, spread: int = 10) -> Tensor:
    return wide_exponents(tuple(shape), dtype, seed, spread=spread)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_verify_norms(dtype: torch.dtype, on_cuda: Callable[..., list[Tensor]]) -> None:
    """rms norm with an fp32 master weight, add and rms norm, layer norm with bias: y, dx, dw, dbias."""
    x, residual, w, b = (rows(s, t, i) for i, (s, t) in enumerate((((2, 5, 24), dtype),) * 2 + (((24,), FP32),) * 2))
    cases: dict[str, tuple[Run, tuple[Tensor | None, ...]]] = {
        "rms norm": (lambda x, w: ops.rms_norm(x, w, 1e-6, offset=True), (x, w)),
        "add and rms norm": (lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-6), (x, residual, w)),
        "layer norm": (lambda x, w, b: ops.layer_norm(x, w, b, 1e-5), (x, w, b)),
    }
    for name, (operator, tensors) in cases.items():
        assert_same(on_cuda(operator, *tensors), results_of(operator, *tensors), name)


def test_verify_norm_weight_gradients_by_samples_and_heads(on_cuda: Callable[..., list[Tensor]]) -> None:
    """Samples of 3, 0 and 514 tokens (two blocks of 512), a bf16 wire, three heads: the trees above the chains."""
    x, w = rows((517, 4), FP32, 1), rows((4,), FP32, 2)
    plan = TreePlan(grad_wire_dtype="bfloat16")

    def operator(x: Tensor, w: Tensor) -> Tensor:
        return ops.rms_norm(x, w, 1e-6, sample_offsets=[0, 3, 3, 517], plan=plan)

    if DEVICE == "cpu":
        x = x[-6:]
        operator = lambda x, w: ops.rms_norm(x, w, 1e-6, sample_offsets=[0, 3, 3, 6], plan=plan)  # noqa: E731
    assert_same(on_cuda(operator, x, w), results_of(operator, x, w), "samples")
    x, w = rows((2, 3, 3, 8), BF16, 3), rows((8,), BF16, 4)
    per_head: Run = lambda x, w: ops.rms_norm(x, w, 1e-6, heads=True)  # noqa: E731
    assert_same(on_cuda(per_head, x, w), results_of(per_head, x, w), "heads")


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_verify_activations(name: str, on_cuda: Callable[..., list[Tensor]]) -> None:
    """Alone, gated, gated and packed (rows of halves in place): every exponent, infinities, NaN."""
    alone, gated = getattr(ops, name), getattr(ops, f"{name}_and_mul")
    x, up = rows((3, 2, 40), BF16, 1, 60), rows((3, 2, 40), BF16, 2, 20)
    x[0, 0, :4] = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0])
    for operator, tensors in ((alone, (x.float(),)), (gated, (x, up)), (gated, (torch.cat([x, up], -1),))):
        assert_same(on_cuda(operator, *tensors), results_of(operator, *tensors), f"{name} of {len(tensors)}")
    assert_bits_differ(gated(x, up), (alone(x) * up), "rounded after the activation too")


def test_verify_rope_and_its_tables(on_cuda: Callable[..., list[Tensor]]) -> None:
    x, positions = rows((5, 2, 20), BF16, 1), torch.tensor([0, 1, 17, 4096, 1000003])
    frequencies = torch.logspace(-0.1, -3, 6)

    def operator(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        sin, cos = ops.rope_tables(positions, frequencies.to(x.device), scale=1.25)
        return sin, cos, ops.rope(x, sin, cos, out_dtype=FP32)

    assert_same(on_cuda(operator, x, positions), results_of(operator, x, positions), "rope")


@pytest.mark.skipif(DEVICE == "cuda", reason="asks the interpreter")
def test_verify_positions_that_the_cpu_refuses_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_cuda", lambda t: True)
    for position, frequency in ((2**24, 1e-3), (2**23, 1.0)):
        sin, cos = ops.rope_tables(torch.tensor([3, position]), torch.tensor([frequency]))
        assert bool(sin[1].isnan()) and bool(cos[1].isnan()) and bool(sin[0].isfinite())


# --- sums, dropout, embedding ----------------------------------------------------------------------------------------


def test_verify_soft_cap_sums_and_fan_in(on_cuda: Callable[..., list[Tensor]]) -> None:
    x = rows((2, 3, 40), BF16, 1)
    x[0, 0, :2] = torch.tensor([float("inf"), float("nan")])

    def fan(x: Tensor) -> Tensor:
        a, b, c = ops.fanout(x, 3)
        return (a.float() * 3).sum() + (b.float() * x.detach()).sum() + c.float().mul(1e-3).sum()

    def operators(x: Tensor) -> tuple[Tensor, ...]:
        return ops.softcap(x, 30.0), ops.sum(x, leaves=3), ops.mean(x, out_dtype=FP32)

    assert_same(on_cuda(operators, x), results_of(operators, x), "soft-cap, sum, mean")
    assert_bitwise_equal(on_cuda(fan, x[1])[1], results_of(fan, x[1])[1], "fan-in")


def test_verify_dropout(on_cuda: Callable[..., list[Tensor]]) -> None:
    x = rows((7, 10), BF16, 1)

    def operator(x: Tensor, first: int = 5) -> Tensor:
        places: Any = {"sample_offsets": [0, 2, 2, 7], "first_position": 1, "first_feature": 2**33}
        return ops.dropout(x, 0.4, seed=2**40 + 7, step=3, name="mlp", first_sample=first, **places)

    assert_same(on_cuda(operator, x), results_of(operator, x), "dropout")
    assert_bits_differ(operator(x), operator(x, 6), "another sample")


@pytest.mark.parametrize("narrow", [False, True])
def test_verify_embedding(narrow: bool, on_cuda: Callable[..., list[Tensor]]) -> None:
    """Rows 3..9 of 12 on this rank; five samples, one without tokens, one of two blocks of 512 with ids far apart."""
    plan, dtype = (TreePlan(grad_wire_dtype="bfloat16"), BF16) if narrow else (None, FP32)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 12, (545,), generator=generator)
    ids[12:530] = torch.where(torch.arange(518) % 170 < 2, ids[12:530], 0)
    w = rows((6, 5), FP32, 1)

    def operator(ids: Tensor, w: Tensor) -> Tensor:
        options: Any = {"first_row": 3, "vocabulary": 12, "sample_offsets": [0, 4, 4, 12, 530, 545], "plan": plan}
        return ops.embedding(ids, w, out_dtype=dtype, **options)

    actual, expected = on_cuda(operator, ids, w), results_of(operator, ids, w)
    assert_same(actual, expected, "embedding")
    flat = torch.zeros(6, 5)
    upstream = wide_exponents((545, 5), dtype, 99, spread=6).float()
    for t in range(545):
        if 3 <= ids[t] < 9:
            flat[ids[t] - 3] += upstream[t]
    assert_bits_differ(actual[1], flat, "one chain over all tokens")


# --- folds of more than 64 inputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("blocks", "narrow"), [([1] * 67, False), ([3, 0] * 30, True)])
def test_verify_long_folds(blocks: list[int], narrow: bool) -> None:
    """Many samples: the pushes come from a table, pending values wait in memory; the CPU's fold, in bits."""
    from tbik import _C
    from tbik.kernels import on_cuda as kernels

    x = wide_exponents((sum(blocks), 5), FP32, 1, spread=24)
    schedule = _C.sample_schedule(blocks, narrow)
    actual = kernels.fold(x.to(DEVICE), schedule).cpu()
    assert_bitwise_equal(actual, _C.fold(x, schedule), "fold by table")
    assert_bits_differ(actual, _C.fold(x.roll(1, 0), schedule), "leaves one further")
    cover = _C.run_schedule(1, 70, 80, False, False)
    x = wide_exponents((69, 5), FP32, 2, spread=24)
    assert_bitwise_equal(kernels.fold(x.to(DEVICE), cover).cpu(), _C.fold(x, cover), "cover by table")


# --- rows over the vocabulary ---------------------------------------------------------------------------------------


def logits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Differences on which exp neither vanishes nor overflows, and sums of it round."""
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * 6
    return x.to(dtype)


@pytest.mark.parametrize(("dtype", "leaves", "vocab"), [(BF16, 6, 1100), (FP32, 1, 530), (FP16, 8, 5)], ids=str)
def test_verify_softmax_and_log_softmax(
    dtype: torch.dtype, leaves: int, vocab: int, on_cuda: Callable[..., list[Tensor]]
) -> None:
    """Tails of lanes, blocks and leaves, empty leaves; rows of -inf, with +inf and NaN."""
    x = logits((2, 3, vocab), dtype, 1)
    x[0, 0, 1], x[0, 1] = float("-inf"), float("-inf")
    x[0, 2, 2], x[1, 0, 3] = float("inf"), float("nan")
    for name in ("softmax", "log_softmax"):
        operator = functools.partial(getattr(ops, name), leaves=leaves)
        assert_same(on_cuda(operator, x), results_of(operator, x), name)


def test_verify_sum_of_exponentials_shows_the_order(on_cuda: Callable[..., list[Tensor]]) -> None:
    x = logits((4, 1100), FP32, 2)
    (six,) = on_cuda(lambda x: (ops.softmax(x, 6), x.sum()), x)[:1]
    assert_bits_differ(six, ops.softmax(x, 1), "one leaf in place of six")


def test_verify_cross_entropy_and_logprobs(on_cuda: Callable[..., list[Tensor]]) -> None:
    """Samples of 3, 0 and 4 tokens, ignored ones among them; several ids per row; the k first with ties and NaN."""
    x, targets = logits((7, 100), BF16, 3), torch.tensor([5, 99, -100, 0, 17, -100, 3])

    def entropy(x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        return ops.cross_entropy(x, targets, leaves=4, sample_offsets=[0, 3, 3, 7])

    assert_same(on_cuda(entropy, x, targets), results_of(entropy, x, targets), "cross-entropy")
    ids = targets.abs() % 100
    logp: Run = lambda x, ids: ops.logprobs(x, ids, 4)  # noqa: E731
    assert_same(on_cuda(logp, x, ids), results_of(logp, x, ids), "logprobs")
    x[0, 7], x[1, 40:45], x[2, :3] = float("nan"), x[1].max() + 1, torch.tensor([-0.0, 0.0, -0.0])

    def first(x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach()
        return *ops.top_logprobs(x, 9, 4), *ops.top_k(x, 100), ops.argmax(x), ops.logprobs(x, ids[:, None] % 7, 4)

    with torch.no_grad():
        expected = first(x)
    patched = on_cuda(lambda x: (*(t.float() for t in first(x)), x.sum()), x)[:6]
    for a, e in zip(patched, expected, strict=True):
        assert_bitwise_equal(a, e.float(), "the k first")


def test_verify_token_sums_of_blocks(on_cuda: Callable[..., list[Tensor]]) -> None:
    """Samples of one block, of none and of two blocks of 512 tokens."""
    tokens = 516 if DEVICE == "cuda" else 6
    losses = wide_exponents((tokens,), FP32, 4, spread=30)
    operator: Run = lambda losses: ops.sample_sums(losses, [0, 2, 2, tokens])  # noqa: E731
    assert_same(on_cuda(operator, losses), results_of(operator, losses), "sums per sample")


def test_verify_covers_of_a_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's leaves [1, 5) of 6: nodes of exp sums and of p*dp, columns of softmax, gradients and picks."""

    from tbik.ops.linear import CoverRun

    s_ops, c_ops, l_ops = (importlib.import_module(f"tbik.ops.{n}") for n in ("softmax", "cross_entropy", "logprobs"))
    run = CoverRun(100, 1, 5)
    cuts = TreePlan(leaves=6).cuts(100)
    whole, dp = logits((3, 100), BF16, 5), logits((3, 100), BF16, 6)
    x, part = whole[:, cuts[1] : cuts[5]], dp[:, cuts[1] : cuts[5]]
    m, targets, g = s_ops.row_max(whole), torch.tensor([cuts[1], 2, 60]), torch.tensor([1.5, -2.0, 0.25])
    ids = torch.tensor([[0, cuts[1]], [cuts[5] - 1, cuts[5]], [50, 51]])

    def everything(device: str) -> list[Tensor]:
        a, b, m_, g_, t_, i_ = (t.to(device) for t in (x, part, m, g, targets, ids))
        s = s_ops.exp_sum_cover(a, m_, run, 6)
        lse = s_ops.log_sum_exp_of(m_, s[0].contiguous())
        dots = s_ops.softmax_dots_cover(b, a, m_, s[0].contiguous(), run, 6)
        values, numbers = l_ops.top_k_of(a, 5, cuts[1])
        results = [
            s_ops.row_max(a), s, lse, dots, s_ops.row_sum_cover(a, run, 6), s_ops.softmax_of(a, m_, s[0].contiguous()),
            s_ops.softmax_dx_of(b, a, m_, s[0].contiguous(), dots[0].contiguous()), s_ops.log_softmax_of(a, lse),
            s_ops.log_softmax_dx_of(b, a, lse, m_), c_ops.cross_entropy_dx(g_, a, t_, lse, cuts[1], 2),
            c_ops.pick(a, i_, cuts[1]), values, numbers.float(), *(l_ops.merge_top_k(values, numbers, 7)),
            c_ops.losses_of(lse, m_, t_, 60), c_ops.sample_cover(g_, 1),
        ]  # fmt: skip
        return [t.cpu() for t in results]

    expected = everything("cpu")
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "is_cuda", lambda t: True)
    for i, (actual, wanted) in enumerate(zip(everything(DEVICE), expected, strict=True)):
        assert_bitwise_equal(actual, wanted, f"result {i}")


# --- experts --------------------------------------------------------------------------------------------------------


def test_verify_chains_over_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results below the smallest normal number, absent slots, rows of more than a block; products, also per row."""
    from tbik import _C
    from tbik.kernels import on_cuda as kernels

    values, rows = (
        wide_exponents((2, 7, 1030), FP32, 0, spread=250),
        torch.tensor([[0, 3, 6], [6, -1, 0], [-1, -1, -1]]),
    )
    scale = wide_exponents((3, 3), FP32, 1, spread=40)
    given = [t.to(DEVICE) for t in (values, rows, scale)]
    for factors, at in ((scale, given[2]), (None, None)):
        actual = kernels.combine_slots(*given[:2], at).cpu()
        assert_bitwise_equal(actual, _C.combine_slots(values, rows, factors), f"scale {factors is not None}")
    flipped = kernels.combine_slots(given[0], given[1].flip(1), given[2].flip(1)).cpu()
    assert_bits_differ(flipped, _C.combine_slots(values, rows, scale), "descending slots")
    x, y = (wide_exponents((3, 530), t, i, spread=24) for i, t in enumerate((BF16, FP32)))
    x_, y_, f_ = (t.to(DEVICE) for t in (x, y, scale[:, 0].contiguous()))
    assert_bitwise_equal(kernels.multiply(x_, y_).cpu(), _C.multiply(x, y), "elements")
    for t, t_ in ((x, x_), (y, y_)):
        expected = _C.scale_rows(t, scale[:, 0].contiguous(), t.dtype)
        assert_bitwise_equal(kernels.scale_rows(t_, f_, t.dtype).cpu(), expected, f"rows of {t.dtype}")


@pytest.mark.parametrize(
    ("dtype", "normalize", "plan"),
    [(BF16, True, TreePlan(leaves=3)), (FP32, False, TreePlan(wire_dtype="bfloat16", grad_wire_dtype="bfloat16"))],
    ids=str,
)
def test_verify_experts(
    dtype: torch.dtype, normalize: bool, plan: TreePlan, on_cuda: Callable[..., list[Tensor]]
) -> None:
    """Router, experts, fan-in: y and the gradients of x, router, gate_up, down; samples of 3, 0 and 4 tokens."""
    from tbik.routed_experts import RoutedExperts

    hidden, inner, experts = 10, 12, 4
    x = wide_exponents((7, hidden), dtype, 1, spread=6)
    router = wide_exponents((experts, hidden), FP32, 2, spread=6).div(40)
    gate_up, down = (
        wide_exponents((experts, 2 * inner, hidden), FP32, 3),
        wide_exponents((experts, hidden, inner), FP32, 4),
    )

    def operator(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        parameters = (router, gate_up, down)
        module = RoutedExperts(
            *(t.detach() for t in parameters),
            intermediate=inner, slots=2, normalize=normalize, plan=plan, compute_dtype=dtype,
        )  # fmt: skip
        names = [name for name, _ in module.named_parameters()]
        y: Tensor = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x, [0, 3, 3, 7]))
        return y

    actual, expected = (run(operator, x, router, gate_up, down) for run in (on_cuda, results_of))
    assert_same(actual, expected, "experts")
    assert len(actual) == 5


def test_verify_covers_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of leaves, the whole root, and the same where a leaf is held at a time."""
    from tbik.ops.linear import CoverRun

    expert_ops = importlib.import_module("tbik.ops.experts")
    x, down = wide_exponents((5, 6), BF16, 1, spread=6), wide_exponents((3, 6, 9), BF16, 2)
    gate_up, logits = wide_exponents((3, 18, 6), BF16, 3), torch.randn(5, 3)
    plan, run = TreePlan(leaves=4), CoverRun(9, 1, 4)
    cuts = plan.cuts(9)
    columns = slice(cuts[1], cuts[4])
    part = (gate_up.view(3, 2, 9, 6)[:, :, columns].reshape(3, -1, 6), down[:, :, columns].contiguous())

    def everything(device: str) -> list[Tensor]:
        x_, l_, gate_up_, down_, part_gate, part_down = (t.to(device) for t in (x, logits, gate_up, down, *part))
        routing = expert_ops.route(l_, 2)
        cover = expert_ops.experts_cover(x_, routing, part_gate, part_down, run, plan=plan)
        return [t.cpu() for t in (*routing, cover, expert_ops.experts(x_, routing, gate_up_, down_, plan=plan))]

    expected = everything("cpu")
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "is_cuda", lambda t: True)
    for scratch in (expert_ops.SCRATCH_BYTES, 1):
        monkeypatch.setattr(expert_ops, "SCRATCH_BYTES", scratch)
        for i, (actual, wanted) in enumerate(zip(everything(DEVICE), expected, strict=True)):
            compare = torch.equal(actual, wanted) if wanted.dtype == torch.int64 else None
            assert compare is not False, f"result {i}"
            if compare is None:
                assert_bitwise_equal(actual, wanted, f"result {i}, scratch {scratch}")


OPERATORS = [
    "experts",
    "experts_cover",
    "softcap",
    "softcap_backward",
    "row_sum",
    "row_sum_dx",
    "sum_inputs",
    "dropout",
    "embedding",
    "embedding_dw",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "norm_dx",
    "norm_gradients",
    "column_grad",
    "activation",
    "activation_dx",
    "activation_packed",
    "activation_packed_dx",
    "rope",
    "rope_tables",
    "softmax",
    "softmax_backward",
    "log_softmax",
    "log_softmax_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "sample_sums",
    "sample_sums_backward",
    "sample_root",
    "logprobs",
    "top_logprobs",
    "top_k",
]


@pytest.mark.parametrize("operator", OPERATORS)
def test_verify_operators_serve_cuda(operator: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tbik::{operator}", "CUDA")
