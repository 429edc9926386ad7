"""The table of bench/gpu_operators.py: every public operator of tbik.ops, with data on which another order shows.

tests/cases.py makes the data: exponents over many powers of two, a quarter of each row cancels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from gpu_setting import use_tests
from torch import Tensor

from tbik import TreePlan, ops

use_tests()
from cases import wide_exponents  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
Run = Callable[..., Any]

NOT_HERE = {
    "inverse_frequencies": "a list of numbers, computed by the host",
    "pack_weight": "refuses CUDA tensors: packs are of the CPU's kernels",
    "experts_cover": "a check of contractions: ranks of experts",
    "attention_forward": "a check of contractions: ranks of attention",
    "attention_backward": "a check of contractions: ranks of attention",
    "paged_attention": "a check of attention: prefill = decoding",
    "store_kv": "a check of attention: prefill = decoding",
}
"""Operators that the table does not name, and where they are."""


class Case(NamedTuple):
    """An operator and its operands, on the CPU. Gradients are taken of every floating-point operand."""

    name: str
    covers: tuple[str, ...]
    """names in tbik.ops"""
    operator: Run
    tensors: tuple[Tensor | None, ...]
    rows: tuple[int, ...] = ()
    """operands whose leading axis is the rows of every result; none: a row alone is not a call of this operator"""
    alone: Callable[[int], Run] | None = None
    """the operator of row `at` alone, where it must be told its position"""
    no_graph: str = ""
    """why the forward is not captured"""
    no_backward_graph: str = ""
    backward: bool = True
    leaf: str = "fma"


def rows_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int, spread: int = 10) -> Tensor:
    return wide_exponents(shape, dtype, seed, spread=spread)


def logits(shape: tuple[int, ...], seed: int) -> Tensor:
    """Differences on which exp neither vanishes nor overflows, and sums of it round."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 6).to(BF16)


def sizes(is_dry: bool) -> tuple[int, int, int]:
    """Tokens, hidden, vocabulary."""
    return (4, 16, 40) if is_dry else (67, 1000, 5003)


def element_cases(is_dry: bool) -> Iterator[Case]:
    """Norms, activations, rope, soft-cap, dropout, embedding, sums."""
    tokens, hidden, _ = sizes(is_dry)
    x, residual = (rows_of((tokens, hidden), BF16, i) for i in (1, 2))
    w, b = (rows_of((hidden,), FP32, i) for i in (3, 4))
    yield Case("rms_norm", ("rms_norm",), lambda x, w: ops.rms_norm(x, w, 1e-6, offset=True), (x, w), (0,))
    added: Run = lambda x, r, w: ops.add_rms_norm(x, r, w, 1e-6)  # noqa: E731
    yield Case("add_rms_norm", ("add_rms_norm",), added, (x, residual, w), (0, 1))
    yield Case("layer_norm", ("layer_norm",), lambda x, w, b: ops.layer_norm(x, w, b, 1e-5), (x, w, b), (0,))
    narrow = TreePlan(grad_wire_dtype="bfloat16")
    long = tokens if is_dry else 517  # a sample of two blocks of 512
    samples = [0, 1, 1, long]
    by_samples: Run = lambda x, w: ops.rms_norm(x, w, 1e-6, sample_offsets=samples, plan=narrow)  # noqa: E731
    few = (rows_of((long, 8), FP32, 5), rows_of((8,), FP32, 6))
    yield Case("rms_norm, samples, bf16 wire", ("rms_norm",), by_samples, few)
    for name in ("silu", "gelu"):
        alone, gated = getattr(ops, name), getattr(ops, f"{name}_and_mul")
        wide = rows_of((tokens, hidden), BF16, 7, 60)
        yield Case(name, (name,), alone, (wide.float(),), (0,))
        yield Case(f"{name}_and_mul", (f"{name}_and_mul",), gated, (wide, residual), (0, 1))
        packed = torch.cat([wide, residual], -1)
        yield Case(f"{name}_and_mul, packed", (f"{name}_and_mul",), gated, (packed,), (0,))
    positions = torch.randint(0, 2**20, (tokens,), generator=torch.Generator().manual_seed(1))
    heads = rows_of((tokens, 2, 20), BF16, 8)
    frequencies = torch.logspace(-0.1, -3, 6)

    def rope(x: Tensor, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, ...]:
        sin, cos = ops.rope_tables(positions, frequencies.detach(), scale=1.25)
        return sin, cos, ops.rope(x, sin, cos, out_dtype=FP32)

    yield Case("rope_tables, rope", ("rope_tables", "rope"), rope, (heads, positions, frequencies), (0, 1))
    yield Case("softcap", ("softcap",), lambda x: ops.softcap(x, 30.0), (x,), (0,))
    yield Case("sum", ("sum",), lambda x: ops.sum(x, leaves=3), (x,), (0,))
    yield Case("mean", ("mean",), lambda x: ops.mean(x, out_dtype=FP32), (x,), (0,))
    yield Case("fanout", ("fanout",), lambda x: tuple(y * 3 for y in ops.fanout(x, 3)), (x,), (0,))

    def dropout(x: Tensor, at: int = 0) -> Tensor:
        places: Any = {"first_sample": 5, "first_position": at, "first_feature": 2**33}
        return ops.dropout(x, 0.4, seed=2**40 + 7, step=3, name="mlp", **places)

    alone_at: Callable[[int], Run] = lambda at: functools.partial(dropout, at=at)  # noqa: E731
    yield Case("dropout", ("dropout", "DropoutKey"), dropout, (x,), (0,), alone_at)
    ids = torch.randint(0, 12, (5 * tokens,), generator=torch.Generator().manual_seed(3))
    at = [0, 1, 1, tokens, 5 * tokens]

    def embedding(ids: Tensor, w: Tensor, offsets: list[int] | None = at) -> Tensor:
        return ops.embedding(ids, w, first_row=3, vocabulary=12, sample_offsets=offsets, out_dtype=BF16)

    whole: Callable[[int], Run] = lambda at: functools.partial(embedding, offsets=None)  # noqa: E731
    host = "the host counts the tokens of a row"
    tables = (ids, rows_of((6, hidden), FP32, 9))
    yield Case("embedding", ("embedding",), embedding, tables, (0,), whole, no_backward_graph=host)


def vocabulary_cases(is_dry: bool) -> Iterator[Case]:
    """Softmax, log-softmax, losses, log-probabilities, the largest."""
    tokens, _, vocab = sizes(is_dry)
    x = logits((tokens, vocab), 1)
    targets = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(2))
    targets[1] = -100
    for name in ("softmax", "log_softmax"):
        yield Case(name, (name,), functools.partial(getattr(ops, name), leaves=6), (x,), (0,))
    host = "the host looks at the ids, to refuse wrong ones"
    losses: Run = lambda x, t: ops.token_losses(x, t, leaves=6)  # noqa: E731
    yield Case("token_losses", ("token_losses",), losses, (x, targets), (0, 1), no_graph=host)
    at = [0, 1, 1, tokens]
    entropy: Run = lambda x, t: ops.cross_entropy(x, t, leaves=6, sample_offsets=at)  # noqa: E731
    yield Case("cross_entropy", ("cross_entropy", "TokenSum"), entropy, (x, targets), no_graph=host)
    logp: Run = lambda x, ids: ops.logprobs(x, ids, 6)  # noqa: E731
    yield Case("logprobs", ("logprobs",), logp, (x, targets.abs() % vocab), (0, 1), no_graph=host)

    def first(x: Tensor) -> tuple[Tensor, ...]:
        return *ops.top_logprobs(x, 5, 6), *ops.top_k(x, 7), ops.argmax(x)

    names = ("top_logprobs", "TopLogprobs", "top_k", "TopK", "argmax")
    yield Case("top_logprobs, top_k, argmax", names, first, (x,), (0,), backward=False)
    values = rows_of((tokens if is_dry else 1200,), FP32, 4, 30)
    ends = [0, 2, 2, len(values)]

    def sums(losses: Tensor) -> tuple[Tensor, ...]:
        return ops.sample_sums(losses, ends), ops.token_sum(losses, ends), ops.sample_cover(losses.detach()[:3], 1)

    yield Case("sample_sums, token_sum", ("sample_sums", "token_sum", "sample_cover"), sums, (values,))


def contraction_cases(is_dry: bool, leaf: str) -> Iterator[Case]:
    """Linears and experts, by one leaf. bf16 products of fp32 master weights."""
    tokens, hidden, _ = (3, 12, 0) if is_dry else (67, 1000, 0)
    n = 5 if is_dry else 520
    plan = TreePlan(leaves=4 if is_dry else 8, leaf=leaf)
    options: Any = {"plan": plan, "compute_dtype": BF16}
    spread = 12 if leaf == "fma" else 6
    x, w = rows_of((tokens, hidden), BF16, 1, spread), rows_of((n, hidden), FP32, 2, spread)
    bias = rows_of((n,), FP32, 3)
    linear: Run = lambda x, w, b: ops.linear(x, w, b, **options)  # noqa: E731
    yield Case("linear", ("linear",), linear, (x, w, bias), (0,), leaf=leaf)
    second = rows_of((n + 3, hidden), FP32, 4, spread)
    group: Run = lambda x, w, v, b: ops.linear_group(x, [w, v], [b, None], **options)  # noqa: E731
    yield Case("linear_group", ("linear_group",), group, (x, w, second, bias), (0,), leaf=leaf)
    long = tokens if is_dry else 600
    offsets = [0, 1, 1, long]
    narrow: Any = {**options, "plan": TreePlan(leaves=plan.leaves, leaf=leaf, grad_wire_dtype="bfloat16")}
    by_samples: Run = lambda x, w, b: ops.linear(x, w, b, sample_offsets=offsets, **narrow)  # noqa: E731
    many = rows_of((long, hidden), BF16, 5, spread)
    yield Case("linear, samples, bf16 wire", ("linear",), by_samples, (many, w, bias), leaf=leaf)
    inner, experts = (4, 2) if is_dry else (256, 8)
    width = 6 if is_dry else hidden
    router = wide_exponents((experts, width), FP32, 6, spread=6).div(40)
    gate_up = rows_of((experts, 2 * inner, width), FP32, 7, 6)
    down = rows_of((experts, width, inner), FP32, 8, 6)

    def routed(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        from tbik.routed_experts import RoutedExperts

        given = (router, gate_up, down)
        module = RoutedExperts(
            *(t.detach() for t in given), intermediate=inner, slots=2, normalize=True, **options
        )  # fmt: skip
        names = [name for name, _ in module.named_parameters()]
        y: Tensor = torch.func.functional_call(module, dict(zip(names, given, strict=True)), (x,))
        return y

    host = "the host counts the tokens of an expert"
    names = ("experts", "route", "Routing")
    tensors = (x[:2, :width].contiguous() if is_dry else x, router, gate_up, down)
    yield Case("experts", names, routed, tensors, (0,), no_graph=host, leaf=leaf)


def attention_cases(is_dry: bool, leaf: str) -> Iterator[Case]:
    """Packed sequences and the fused form, by one leaf. A row alone is the check "prefill = decoding"."""
    heads, groups, dim = (2, 1, 4) if is_dry else (8, 2, 64)
    first, total = (2, 3) if is_dry else (70, 200)
    plan = TreePlan(leaf=leaf)
    generator = torch.Generator().manual_seed(5)

    def of(count: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(total, count, dim, generator=generator).to(dtype)

    q, k, v = of(heads), of(groups), of(groups)
    cu = torch.tensor([0, first, first, total], dtype=torch.int32)
    packed: Run = lambda q, k, v, cu: ops.attention(q, k, v, cu, plan=plan)  # noqa: E731
    names = ("attention", "HeadRun", "AttentionState")
    yield Case("attention", names, packed, (q, k, v, cu), leaf=leaf)
    sinks = torch.linspace(-1, 1, heads)

    def masked(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, sinks: Tensor) -> Tensor:
        dropout = ops.AttentionDropout(0.3, 11, 2**33 + 5, "layers.0")
        more: Any = {"window": 5, "softcap": 4.0, "dropout": dropout}
        return ops.attention(q, k, v, cu, sinks=sinks, plan=plan, **more)

    host = "the host reads where the samples begin"
    covers = ("attention", "AttentionDropout")
    name = "attention, window, soft-cap, sinks, dropout"
    yield Case(name, covers, masked, (q, k, v, cu, sinks), no_backward_graph=host, leaf=leaf)
    w = torch.linspace(0.5, 2, dim)
    angles = torch.arange(total)[:, None] * torch.logspace(0, -2, dim // 2)
    sin, cos = angles.sin(), angles.cos()

    def fused(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, w: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        norms: Any = {"q_norm": w, "k_norm": w.detach() * 0.5}
        return ops.rope_attention(q, k, v, sin.detach(), cos.detach(), cu, eps=1e-6, plan=plan, **norms)

    tensors = (q, k, v, cu, w, sin, cos)
    yield Case("rope_attention", ("rope_attention",), fused, tensors, no_backward_graph=host, leaf=leaf)


def all_cases(is_dry: bool, leaves: tuple[str, ...]) -> list[Case]:
    """leaves: "fma" and, on a GPU, its tensor cores'."""
    cases = [*element_cases(is_dry), *vocabulary_cases(is_dry)]
    for leaf in leaves:
        cases += [*contraction_cases(is_dry, leaf), *attention_cases(is_dry, leaf)]
    return cases
