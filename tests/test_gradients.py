"""tbik.gradients: the gradients of a step have one value, whatever the micro-batches, ranks and transport.

The model shares parameters on purpose: E is embedding and lm_head, W, b and g belong to a layer that runs three times.
Samples have different lengths, some none. The oracle is tbik.reference over the samples' leaves.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from spawn import Pool, _plain_group
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tbik
from tbik import nn, ops, reference
from tbik.errors import PlanError
from tbik.gradients import GradientTree, upstream, use
from tbik.tree import Node

PLAN = tbik.TreePlan(leaves=4)
NARROW = tbik.TreePlan(leaves=4, grad_wire_dtype="bfloat16")
VOCABULARY, WIDTH, LOOPS = 13, 16, 3
LENGTHS = (3, 0, 5, 1, 2, 4, 3, 6, 0, 0, 1, 3, 0, 2, 5, 4, 1, 1, 0, 7, 2, 3, 0, 2)
Run = tuple[int, int]
Named = dict[str, Tensor]

needs_ranks = pytest.mark.skipif(
    sys.platform != "linux" or not dist.is_gloo_available(), reason="the ranks are Linux processes in a gloo group"
)


class Model(torch.nn.Module):
    """loss = sum over tokens of logits * r, r wide: the terms of a gradient differ by many binary orders."""

    def __init__(self, plan: tbik.TreePlan = PLAN, alias: Callable[[Tensor, int], Tensor] = use) -> None:
        super().__init__()
        self.plan, self.alias = plan, alias
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator))

        self.E, self.W = parameter(VOCABULARY, WIDTH), parameter(WIDTH, WIDTH)
        self.b, self.g = parameter(WIDTH), parameter(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, plan=plan, compute_dtype=torch.bfloat16)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator))
            self.head.bias.copy_(torch.randn(WIDTH, generator=generator))
        self.unused = parameter(5)
        self.checkpoint = False

    def forward(self, samples: Sequence[int]) -> Tensor:
        """The token-sum loss of these samples, packed."""
        tokens, weights, offsets = batch(samples)
        arguments: dict[str, Any] = {"plan": self.plan, "sample_offsets": offsets}
        h = ops.embedding(tokens, self.alias(self.E, 0), out_dtype=torch.bfloat16, **arguments)

        def layer(h: Tensor, i: int) -> Tensor:
            h = ops.linear(h, self.alias(self.W, i), self.alias(self.b, i), compute_dtype=torch.bfloat16, **arguments)
            return ops.rms_norm(h, self.alias(self.g, i), 1e-6, **arguments)

        for i in range(LOOPS):
            h = checkpoint(layer, h, i, use_reentrant=False) if self.checkpoint else layer(h, i)
        h = self.head(h, offsets)
        logits = ops.linear(
            h, self.alias(self.E, 1), compute_dtype=torch.bfloat16, out_dtype=torch.float32, **arguments
        )
        return (logits * weights).sum()


def batch(samples: Sequence[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Tokens, weights of the logits and row offsets of these samples of the data set."""
    tokens, weights, offsets = [], [], [0]
    for sample in samples:
        length = LENGTHS[sample]
        generator = torch.Generator().manual_seed(sample)
        tokens.append(torch.randint(0, VOCABULARY, (length,), generator=generator))
        weights.append(wide_exponents((length, VOCABULARY), torch.float32, 100 + sample, 24))
        offsets.append(offsets[-1] + length)
    return torch.cat(tokens), torch.cat(weights), offsets


TOTAL_TOKENS = 77  # no power of two, so that its reciprocal rounds


def step(model: Model, num_samples: int, micro_steps: int, group: Any = None, **arguments: Any) -> Named:
    """The gradients of one step by a GradientTree."""
    tree = GradientTree(model, samples_per_step=num_samples, micro_steps=micro_steps, group=group, plan=model.plan)
    for _ in range(micro_steps):
        with tree.micro_step() as micro:
            micro.backward(model(micro.samples), upstream(TOTAL_TOKENS))
    shards = tree.finish(**arguments)
    size = 1 if group is None else group.size()
    steps = micro_steps * size
    assert 1 <= tree.most_buffers <= tree.buffer_limit
    if steps & (steps - 1) == 0:
        assert tree.most_buffers <= 1 + int(math.log2(micro_steps))
    tree.close()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()} if shards is None else shards
    for parameter in model.parameters():
        parameter.grad = None
    return grads


def sample_leaves(sample: int, plan: tbik.TreePlan = PLAN) -> Named:
    """The gradients of one sample, each use of a parameter apart ("E.1"), by plain autograd: nothing is added."""
    uses: Named = {}
    model = Model(plan)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def alias(parameter: Tensor, index: int) -> Tensor:
        return uses.setdefault(f"{names[id(parameter)]}.{index}", parameter.detach().clone().requires_grad_())

    model.alias = alias
    model([sample]).backward(upstream(TOTAL_TOKENS))
    grads = {name: leaf.grad for name, leaf in uses.items()}
    grads |= {f"{name}.0": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad for name, grad in grads.items() if grad is not None}


def oracle(num_samples: int, plan: tbik.TreePlan = PLAN) -> Named:
    """node(0, B) of each use by the reference, then ((u_n + u_(n-1)) + ...) + u_1."""
    leaves = [sample_leaves(sample, plan) for sample in range(num_samples)]
    narrow = plan.grad_wire_dtype is not None
    roots: dict[str, list[Tensor]] = {}
    for name in sorted(leaves[0], reverse=True):
        cover = {Node(0, sample): leaves[sample][name] for sample in range(num_samples)}
        root = reference.fold_covers([{node: value} for node, value in cover.items()], num_samples, narrow)
        roots.setdefault(name.rsplit(".", 1)[0], []).append(root)
    return {name: reference.fan_in(uses) for name, uses in roots.items()} | {"unused": torch.zeros(5)}


def require_same(actual: Named, expected: Named, what: str) -> None:
    assert actual.keys() == expected.keys(), what
    for name in expected:
        assert_bitwise_equal(actual[name], expected[name], f"{what}: {name}")


@pytest.fixture(scope="module")
def expected() -> Named:
    return oracle(8)


# --- what a wrong form would change -----------------------------------------------------------------------------------


def test_verify_wrong_forms_differ(expected: Named) -> None:
    """Negative control: each shortcut changes bits of this very data."""
    leaves = [sample_leaves(sample) for sample in range(8)]

    def tree_of(values: list[Tensor]) -> Tensor:
        return reference.fold_covers([{Node(0, s): value} for s, value in enumerate(values)], 8)

    values = [leaf["head.weight.0"] for leaf in leaves]  # one use
    assert_bitwise_equal(tree_of(values), expected["head.weight"])
    running = torch.zeros_like(values[0])
    for value in values:
        running = running + value
    assert_bits_differ(running, expected["head.weight"], "+= over micro-steps")
    rounded = [tree_of([value.bfloat16().float() for value in values])]
    pairs = [values[i] + values[i + 1] for i in range(0, 8, 2)]
    rounded.append(reference.fold_covers([{Node(1, i): v.bfloat16().float()} for i, v in enumerate(pairs)], 8))
    assert_bits_differ(rounded[0], expected["head.weight"], "rounded to bf16 per micro-batch")
    assert_bits_differ(rounded[0], rounded[1], "rounded per micro-batch, m = 1 and m = 2")
    for name, count in (("E", 2), ("W", 3), ("g", 3)):
        per_micro_batch = [reference.fan_in([leaf[f"{name}.{i}"] for i in reversed(range(count))]) for leaf in leaves]
        assert_bits_differ(tree_of(per_micro_batch), expected[name], f"{name}: uses added per micro-batch")


def test_verify_plain_autograd_differs(expected: Named) -> None:
    """Negative control: the same model without a tree, two micro-batches against eight."""
    grads = []
    for micro_steps in (2, 8):
        model = Model(alias=lambda parameter, index: parameter)
        for a in range(micro_steps):
            m = 8 // micro_steps
            model(range(a * m, a * m + m)).backward(upstream(TOTAL_TOKENS))
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name in ("E", "W", "g", "head.weight"):
        assert_bits_differ(grads[0][name], grads[1][name], f"{name}: 2 and 8 micro-steps")
        assert_bits_differ(grads[1][name], expected[name], name)


# --- one value --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_steps", [1, 2, 4, 8])
def test_verify_gradients_ignore_micro_batches(expected: Named, micro_steps: int) -> None:
    """Packed eight, packed four, ... one by one: the oracle's bits."""
    require_same(step(Model(), 8, micro_steps), expected, f"A={micro_steps}")


@pytest.mark.parametrize("plan", [PLAN, NARROW], ids=["float32", "bfloat16"])
def test_verify_any_number_of_samples(plan: tbik.TreePlan) -> None:
    """B = 12: the root has a ragged edge."""
    expected = oracle(12, plan)
    for micro_steps in (3, 6, 12):
        require_same(step(Model(plan), 12, micro_steps), expected, f"A={micro_steps}")
    if plan is NARROW:
        assert_bits_differ(expected["head.weight"], oracle(12)["head.weight"], "grad_wire_dtype")


def test_verify_unequal_micro_steps(expected: Named) -> None:
    for sizes in ((4, 2, 1, 1), (1, 1, 2, 4), (2, 2, 4), (1, 1, 1, 1, 4)):
        model = Model()
        tree = GradientTree(model, samples_per_step=8, plan=PLAN)
        with tree:
            for m in sizes:
                with tree.micro_step(m) as micro:
                    micro.backward(model(micro.samples), upstream(TOTAL_TOKENS))
        require_same({name: p.grad for name, p in model.named_parameters()}, expected, f"{sizes}")
        assert tree.most_buffers <= tree.buffer_limit


def test_verify_checkpointing_and_second_step(expected: Named) -> None:
    """Recomputed layers ask for the same uses again; a tree serves many steps."""
    model = Model()
    model.checkpoint = True
    tree = GradientTree(model, samples_per_step=8, micro_steps=4, plan=PLAN)
    for _ in range(2):
        with tree:
            for _ in range(4):
                with tree.micro_step() as micro:
                    micro.backward(model(micro.samples), upstream(TOTAL_TOKENS))
        require_same({name: p.grad for name, p in model.named_parameters()}, expected, "checkpointed")
        model.zero_grad(set_to_none=True)


def test_verify_linear_against_reference_contraction() -> None:
    """One layer: dW and dbias over all samples by reference.linear_dw, not by leaves of ours."""
    lengths = [513, 0, 7, 1025, 1, 64, 30, 2]
    offsets = [sum(lengths[:i]) for i in range(9)]
    x, dy = (wide_exponents((offsets[-1], 6), torch.bfloat16, seed, 20) for seed in (1, 2))
    weights = reference.linear_dw(dy, x, offsets, PLAN), reference.bias_grad(dy, offsets, PLAN)
    for micro_steps in (1, 2, 8):
        layer = nn.Linear(6, 6, plan=PLAN, compute_dtype=torch.bfloat16)
        tree = GradientTree(layer, samples_per_step=8, micro_steps=micro_steps)
        for _ in range(micro_steps):
            with tree.micro_step() as micro:
                first, end = offsets[micro.samples.start], offsets[micro.samples.stop]
                own = [offset - first for offset in offsets[micro.samples.start : micro.samples.stop + 1]]
                micro.backward(layer(x[first:end], own), dy[first:end])
        tree.finish()
        for parameter, expected in zip(layer.parameters(), weights, strict=True):
            assert_bitwise_equal(parameter.grad, expected, f"A={micro_steps}")


def test_verify_absent_gradients_are_zero() -> None:
    """v is reached by samples 2 and 6 only, so many a micro-step brings no gradient at all: +0 then."""
    rows = {sample: wide_exponents((64,), torch.float32, sample, 12) for sample in range(8)}
    expected = reference.fold_covers([{Node(0, s): rows[s] if s in (2, 6) else rows[s] * 0} for s in range(8)], 8)
    for sizes in ((2, 2, 2, 2), (1,) * 8, (2, 1, 1, 4)):
        w, v = (torch.nn.Parameter(torch.ones(64)) for _ in range(2))
        tree = GradientTree([w, v], samples_per_step=8)
        for m in sizes:
            with tree.micro_step(m) as micro:
                loss = (w * rows[0]).sum()
                present = [rows[s] for s in micro.samples if s in (2, 6)]
                if present:
                    loss = loss + (v * present[0]).sum()
                micro.backward(loss)
        tree.finish()
        assert_bitwise_equal(v.grad, expected + 0.0, f"{sizes}")


def test_verify_narrow_parameters_get_wide_gradients() -> None:
    """A stored bf16 weight: its gradient is fp32, not rounded per micro-batch by autograd."""
    if not hasattr(Tensor, "grad_dtype"):
        pytest.skip("this torch rounds gradients to the parameter's dtype")
    x, dy = (wide_exponents((8, 3, 6), torch.bfloat16, seed, 20) for seed in (1, 2))
    expected = reference.linear_dw(dy, x, range(0, 25, 3), PLAN)
    assert_bits_differ(expected, expected.bfloat16().float(), "rounding")
    for micro_steps in (1, 4):
        layer = nn.Linear(6, 6, bias=False, plan=PLAN, dtype=torch.bfloat16)
        tree = GradientTree(layer, samples_per_step=8, micro_steps=micro_steps)
        for _ in range(micro_steps):
            with tree.micro_step() as micro:
                micro.backward(layer(x[micro.samples]), dy[micro.samples])
        tree.finish()
        assert_bitwise_equal(layer.weight.grad, expected, f"A={micro_steps}")
        layer.weight.grad = None
        tree.close()
        assert layer.weight.grad_dtype == torch.bfloat16


def test_verify_uses_of_a_narrow_parameter() -> None:
    """A bf16 weight used twice: each use has a tree, the gradient is that of an fp32 master of it."""
    if not hasattr(Tensor, "grad_dtype"):
        pytest.skip("this torch rounds gradients to the parameter's dtype")
    x, dy = (wide_exponents((8, 3, 6), torch.bfloat16, seed, 6) for seed in (1, 2))
    values = wide_exponents((6, 6), torch.bfloat16, 3, 6)

    def gradient(dtype: torch.dtype, micro_steps: int) -> Tensor:
        w = torch.nn.Parameter(values.to(dtype))
        with GradientTree([w], samples_per_step=8, micro_steps=micro_steps) as tree:
            for _ in range(micro_steps):
                with tree.micro_step() as micro:
                    h = x[micro.samples].clone().requires_grad_()
                    for index in range(2):
                        h = ops.linear(h, use(w, index), plan=PLAN, compute_dtype=torch.bfloat16)
                    micro.backward(h, dy[micro.samples])
        assert w.grad is not None and w.grad.dtype == torch.float32
        return w.grad

    expected = gradient(torch.float32, 1)
    assert_bits_differ(expected, expected.bfloat16().float(), "rounding")
    for micro_steps in (1, 2, 8):
        assert_bitwise_equal(gradient(torch.bfloat16, micro_steps), expected, f"A={micro_steps}")
    w = torch.nn.Parameter(values)
    tree = GradientTree([w], samples_per_step=8, micro_steps=1)
    with pytest.raises(PlanError, match="used twice as use 0"), tree.micro_step() as micro:
        y = ops.linear(ops.linear(x[micro.samples], use(w, 0), plan=PLAN), use(w, 0), plan=PLAN)
        micro.backward(y, dy[micro.samples])
    tree.reset()
    y = ops.linear(x, use(w, 0), plan=PLAN)
    tree.close()
    with pytest.raises(PlanError, match="after its GradientTree was closed"):
        y.backward(dy)


def test_verify_flush_mode_of_the_process(flush_denormal: None) -> None:
    """Nodes keep subnormals (A3), also where torch's own addition would not."""
    w = torch.nn.Parameter(torch.zeros(4, 4))
    tree = GradientTree([w], samples_per_step=2, micro_steps=2)
    tiny = torch.full((16,), 3, dtype=torch.int32).view(torch.float32)
    for _ in range(2):
        with tree.micro_step() as micro:
            micro.backward(w.view(16), tiny)
    tree.finish()
    assert w.grad.view(torch.int32).tolist() == [[6] * 4] * 4
    assert (tiny + tiny).view(torch.int32).tolist() == [0] * 16  # the process does flush


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout=30) as pool:
        yield pool


_groups: dict[int, Any] = {}


def group_of(group: Any, folder: str) -> Any:
    """folder: of the store of a "tbik" group of the same ranks; empty: the pool's own group, gloo."""
    size = group.size()
    if folder and size not in _groups:
        store = dist.FileStore(f"{folder}/{size}", size)
        _groups[size] = _plain_group(store, group.rank(), size, timedelta(seconds=30), "tbik")
        assert _groups[size]._get_backend(torch.device("cpu")).name() == "tbik"
    return _groups[size] if folder else group


def rank_steps(group: Any, folder: str, num_samples: int, micro_steps: list[int], narrow: bool = False) -> list[Named]:
    group = group_of(group, folder)
    return [step(Model(NARROW if narrow else PLAN), num_samples, a, group) for a in micro_steps]


def rank_shards(group: Any, folder: str) -> Named:
    return step(Model(), 24, 24 // group.size(), group_of(group, folder), shards=True)


@pytest.mark.parametrize("backend", ["gloo", "tbik"])
@pytest.mark.multiprocess
@needs_ranks
def test_verify_gradients_ignore_data_ranks(pool: Pool, backend: str, tmp_path: Path) -> None:
    """D = 1, 2, 4 with B = 8 and D = 2, 3, 4 with B = 24, also rounded on the wire: one value, on every rank."""
    folder = str(tmp_path) if backend == "tbik" else ""
    eight, whole, narrow = oracle(8), oracle(24), oracle(24, NARROW)
    for size, num_samples, micro_steps in (
        (1, 8, [8]),
        (2, 8, [1, 2, 4]),
        (4, 8, [1, 2]),
        (2, 24, [3]),
        (3, 24, [1, 2, 4, 8]),
        (4, 24, [3, 6]),
    ):
        for rank, results in enumerate(pool.run(rank_steps, size, folder, num_samples, micro_steps)):
            for a, grads in zip(micro_steps, results, strict=True):
                require_same(grads, eight if num_samples == 8 else whole, f"B={num_samples} D={size} A={a} rank {rank}")
    for results in pool.run(rank_steps, 3, folder, 24, [4], True):
        require_same(results[0], narrow, "rounded, D=3")
    for size in (3, 4):
        shards = pool.run(rank_shards, size, folder)
        require_same({name: torch.cat([rank[name] for rank in shards]) for name in whole}, whole, f"shards, D={size}")


def rank_failures(group: Any, folder: str) -> list[str]:
    """Every rank refuses where one does, and the group can be used afterwards."""
    model, messages = Model(), []
    group = group_of(group, folder)
    tree = GradientTree(model, samples_per_step=8, micro_steps=2, group=group)

    def attempt(action: Callable[[], object]) -> None:
        try:
            action()
            messages.append("no error")
        except (PlanError, ZeroDivisionError) as error:
            messages.append(str(error))
        tree.reset()

    def one_fails() -> None:
        with tree.micro_step() as micro:
            if group.rank() == 1:
                raise ZeroDivisionError("rank 1 has an accident")
            micro.backward(model(micro.samples))

    def one_between() -> None:
        with tree:
            with tree.micro_step() as micro:
                micro.backward(model(micro.samples))
            if group.rank() == 1:
                raise ZeroDivisionError("rank 1 has an accident")
            with tree.micro_step() as micro:
                micro.backward(model(micro.samples))

    def different_sizes() -> None:
        with tree.micro_step(2 if group.rank() else 1) as micro:
            micro.backward(model(micro.samples))

    def stale_gradient() -> None:
        for _ in range(2):
            with tree.micro_step() as micro:
                micro.backward(model(micro.samples))
        if group.rank() == 1:
            model.W.grad = torch.zeros_like(model.W)
        tree.finish()

    for action in (one_fails, one_between, different_sizes, stale_gradient):
        attempt(action)
    for _ in range(2):
        with tree.micro_step() as micro:
            micro.backward(model(micro.samples), upstream(TOTAL_TOKENS))
    tree.finish()
    assert model.W.grad is not None
    return messages


@pytest.mark.parametrize("backend", ["gloo", "tbik"])
@pytest.mark.multiprocess
@needs_ranks
def test_verify_ranks_fail_together(pool: Pool, backend: str, tmp_path: Path) -> None:
    folder = str(tmp_path) if backend == "tbik" else ""
    for rank, messages in enumerate(pool.run(rank_failures, 2, folder)):
        assert "accident" in messages[0] and "accident" in messages[1], (rank, messages)
        assert "disagree about the samples of each rank in this micro-step: 1 on rank 0; 2 on rank 1" in messages[2]
        assert "W.grad holds a gradient" in messages[3]


# --- refusals ---------------------------------------------------------------------------------------------------------


def run(tree: GradientTree, loss: Callable[[range], Tensor], times: int = 1) -> None:
    for _ in range(times):
        with tree.micro_step() as micro:
            micro.backward(loss(micro.samples))


def test_verify_shared_parameters_without_use_are_refused() -> None:
    w = torch.nn.Parameter(torch.randn(4, 4))
    x = torch.randn(3, 4)
    linear = lambda x, w: ops.linear(x, w, plan=PLAN)  # noqa: E731
    cast = lambda w: w.to(torch.float64).to(torch.float32)  # noqa: E731

    def through_one_view() -> Tensor:
        v = w.t()
        return linear(linear(x, v), v)

    def through_one_cast() -> Tensor:
        v = cast(w)
        return linear(linear(x, v), v)

    def through_one_alias() -> Tensor:
        v = use(w, 0)
        return linear(linear(x, v), v)

    def reentrant() -> Tensor:
        return checkpoint(lambda x: linear(x, w), x.clone().requires_grad_(), use_reentrant=True)

    for match, make in {
        "used twice without use": lambda: linear(linear(x, w), w),
        "used twice as use 1": lambda: linear(linear(x, use(w, 1)), use(w, 1)),
        "both by gradients.use and without": lambda: linear(linear(x, w), use(w, 1)),
        "one view, cast or alias of it has 2 consumers": through_one_view,
        "one view, cast or alias of it has 2 ": through_one_cast,
        "one view, cast or alias of it has 2": through_one_alias,
        "use_reentrant=True": reentrant,
    }.items():
        tree = GradientTree([w], samples_per_step=1, micro_steps=1)
        with pytest.raises(PlanError, match=match):
            run(tree, lambda _, make=make: make().sum())
        assert w.grad is None
        tree.close()


def test_verify_accumulation_is_refused() -> None:
    w = torch.nn.Parameter(torch.randn(4, 4))
    loss = lambda _=None: (w * 3.3).sum()  # noqa: E731
    tree = GradientTree([w], samples_per_step=2, micro_steps=2)
    with pytest.raises(PlanError, match="outside a micro-step"):
        loss().backward()
    with pytest.raises(PlanError, match="a graph that was not looked at"), tree.micro_step():
        loss().backward()
    tree.reset()
    with pytest.raises(PlanError, match="has had its backward"), tree.micro_step() as micro:
        micro.backward(loss())
        micro.backward(loss())
    tree.reset()
    with pytest.raises(PlanError, match="a second gradient"), tree.micro_step() as micro:
        micro.backward(loss())
        loss().backward()
    tree.reset()
    w.grad = torch.zeros(4, 4)
    with pytest.raises(PlanError, match="grad holds a gradient"):
        run(tree, loss)
    tree.reset()
    with pytest.raises(PlanError, match="no gradient arrived"), tree.micro_step():
        pass
    tree.reset()
    with pytest.raises(PlanError, match="do not nest"), tree.micro_step(), tree.micro_step():
        pass
    tree.reset()
    embedding = torch.nn.Embedding(4, 4, sparse=True)
    sparse = GradientTree(embedding, samples_per_step=1, micro_steps=1)
    with pytest.raises(PlanError, match="sparse"):
        run(sparse, lambda _: embedding(torch.tensor([1])).sum())


def test_verify_numbering_is_refused() -> None:
    w = torch.nn.Parameter(torch.randn(4, 4))
    loss = lambda _=None: (w * 3.3).sum()  # noqa: E731
    with pytest.raises(PlanError, match=r"m = 12 samples .* micro_steps that work: 3, 6, 12, 24"):
        GradientTree([w], samples_per_step=24, micro_steps=2)
    tree = GradientTree([w], samples_per_step=8)
    for match, m in {"say num_samples": None, "power of two": 3, "but 8 are left": 16}.items():
        with pytest.raises(PlanError, match=match), tree.micro_step(m):
            pass
        tree.reset()
    with pytest.raises(PlanError, match="does not begin a node of 4 samples"):
        with tree.micro_step(2) as micro:
            micro.backward(loss())
        with tree.micro_step(4):
            pass
    tree.reset()
    with tree.micro_step(4) as micro:
        micro.backward(loss())
    with pytest.raises(PlanError, match="a step has 8 samples, its micro-steps brought 4"):
        tree.finish()
    with tree.micro_step(4) as micro:
        micro.backward(loss())
    with pytest.raises(PlanError, match="all 8 samples of the step have come"), tree.micro_step(4):
        pass


def test_verify_failure_needs_reset() -> None:
    class Accident(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ZeroDivisionError("accident")

    model = Model()
    tree = GradientTree(model, samples_per_step=8, micro_steps=2, plan=PLAN)
    run(tree, model)
    with pytest.raises(ZeroDivisionError):
        run(tree, lambda samples: Accident.apply(model(samples)))
    for action in (lambda: run(tree, model), tree.finish, tree.__enter__):
        with pytest.raises(PlanError, match="cannot go on after 'ZeroDivisionError: accident'"):
            action()
    tree.reset()
    assert all(parameter.grad is None for parameter in model.parameters())
    for _ in range(2):
        with tree.micro_step() as micro:
            micro.backward(model(micro.samples), upstream(TOTAL_TOKENS))
    tree.finish()
    require_same({name: p.grad for name, p in model.named_parameters()}, oracle(8), "after reset")


def test_verify_rounded_gradients_are_refused() -> None:
    """The guard of the first step: a cast outside the operator rounds each micro-batch's gradient to bf16."""
    w = torch.nn.Parameter(torch.randn(8, 8))
    x = torch.randn(4, 5, 8).bfloat16()
    outside = lambda samples: ops.linear(x[samples], w.bfloat16(), plan=PLAN).float().pow(2).sum()  # noqa: E731

    def inside(samples: range) -> Tensor:
        return ops.linear(x[samples], w, plan=PLAN, compute_dtype=torch.bfloat16).float().pow(2).sum()

    tree = GradientTree([w], samples_per_step=4, micro_steps=2)
    run(tree, outside, 2)
    with pytest.raises(PlanError, match="rounded per micro-batch"):
        tree.finish()
    assert w.grad is None
    tree.reset()
    run(tree, inside, 2)
    tree.finish()
    w.grad = None
    tree.close()
    unguarded = GradientTree([w], samples_per_step=4, micro_steps=2, guard=False)
    run(unguarded, outside, 2)
    unguarded.finish()
    w.grad = None
    unguarded.close()
    # a look-up multiplies nothing: where each token comes once its gradient is a bf16 value, and right
    table = torch.nn.Parameter(torch.randn(20, 8))
    tree = GradientTree([table], samples_per_step=2, micro_steps=2)
    run(tree, lambda _: ops.embedding(torch.arange(20), table, out_dtype=torch.bfloat16).sum(), 2)
    tree.finish()
    # a plan that rounds, and operators that do not know it
    tree = GradientTree([w], samples_per_step=4, micro_steps=2, plan=NARROW)
    with pytest.raises(PlanError, match="give the operators the same plan"):
        run(tree, inside)


def test_verify_bad_arguments_are_refused() -> None:
    w = torch.nn.Parameter(torch.randn(4, 4))
    narrow = torch.nn.Parameter(torch.randn(4, 4).double())
    for match, make in {
        "samples_per_step is an integer": lambda: GradientTree([w], samples_per_step=0),
        "micro_steps is an integer": lambda: GradientTree([w], samples_per_step=8, micro_steps=True),
        "guard is True or False": lambda: GradientTree([w], samples_per_step=8, guard=1),
        "plan is a tbik.TreePlan": lambda: GradientTree([w], samples_per_step=8, plan="fp32"),
        "at least one parameter": lambda: GradientTree([], samples_per_step=8),
        "expected a parameter, got int": lambda: GradientTree([3], samples_per_step=8),
        "expected torch.float32": lambda: GradientTree([narrow], samples_per_step=8),
        "a dense CPU or CUDA parameter": lambda: GradientTree([w * 2], samples_per_step=8),
        "expected a parameter, got a tensor that some": lambda: use(w * 2, 0),
        "an integer >= 0": lambda: use(w, -1),
        "total_tokens is an integer": lambda: upstream(0),
    }.items():
        with pytest.raises(PlanError, match=match):
            make()
    tree = GradientTree([w], samples_per_step=8)
    with pytest.raises(PlanError, match="belongs to another GradientTree"):
        GradientTree([w], samples_per_step=8)
    tree.close()
    with pytest.raises(PlanError, match="it was closed"), tree.micro_step(8):
        pass
    with pytest.raises(PlanError, match="was closed"):
        tree.reset()
    other = GradientTree([w], samples_per_step=8)
    del other  # a tree that is gone gives its parameters back
    (w * 2).sum().backward()
    assert w.grad is not None


# --- use and upstream -------------------------------------------------------------------------------------------------


def test_verify_use_without_a_tree() -> None:
    """One backward: autograd adds two uses, which has one order; a third is refused. No gradient, no alias."""
    w = torch.nn.Parameter(torch.randn(4, 4))
    x = wide_exponents((3, 4), torch.float32, 1, 20)
    ops.linear(ops.linear(x, use(w, 0), plan=PLAN), use(w, 1), plan=PLAN).sum().backward()
    leaves = [w.detach().clone().requires_grad_() for _ in range(2)]
    ops.linear(ops.linear(x, leaves[0], plan=PLAN), leaves[1], plan=PLAN).sum().backward()
    assert_bitwise_equal(w.grad, reference.fan_in([leaves[1].grad, leaves[0].grad]))
    with pytest.raises(PlanError, match=r"Collect the gradients by tbik.GradientTree"):
        (use(w, 0) + use(w, 1) + use(w, 2)).sum().backward()
    with torch.no_grad():
        assert use(w, 0) is w
    assert use(w.detach(), 0).requires_grad is False
    assert use(w, 0).data_ptr() == w.data_ptr()


def test_verify_upstream_is_rounded_once() -> None:
    for n in (1, 2, 3, 7, 77, 1000, 2**24 + 1, 2**40 - 3, 123456789012345, 2**62 + 1):
        g = upstream(n)
        assert g.dtype == torch.float32 and g.dim() == 0
        exact = Fraction(1, n)
        below, above = (torch.nextafter(g, torch.tensor(end)).item() for end in (0.0, 1e30))
        error = abs(Fraction(g.item()) - exact)
        assert error <= abs(Fraction(below) - exact) and error <= abs(Fraction(above) - exact), n
