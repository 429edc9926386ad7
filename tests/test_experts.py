"""Mixture of experts against the oracle, over ranks, micro-batches and company (ORDER.md section M)."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from long_cases import long_cases
from spawn import Pool
from torch import Tensor, library

from tbik import _C, TreePlan, ops, reference, reference_experts
from tbik.errors import PlanError
from tbik.ops.experts import Routing
from tbik.ops.linear import CoverRun
from tbik.plan import leaf_runs
from tbik.routed_experts import RoutedExperts

expert_ops = importlib.import_module("tbik.ops.experts")  # the package has a function of that name
HIDDEN, INNER, EXPERTS, SLOTS = 20, 24, 5, 3
PLAN = TreePlan(leaves=8)
WIRE = TreePlan(leaves=8, wire_dtype="bfloat16", grad_wire_dtype="bfloat16")
OFFSETS = [0, 3, 3, 8, 9]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as ranks:
        yield ranks


class Data(NamedTuple):
    x: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor
    dy: Tensor


def data_of(dtype: torch.dtype, tokens: int = 9, master: bool = False) -> Data:
    stored = torch.float32 if master else dtype
    x = wide_exponents((tokens, HIDDEN), dtype, 1, spread=6)
    return Data(
        x=x,
        # logits of size one, so that no expert takes everything
        router=(wide_exponents((EXPERTS, HIDDEN), torch.float32, 2, spread=6) / 40).to(stored),
        gate_up=wide_exponents((EXPERTS, 2 * INNER, HIDDEN), stored, 3, spread=8),
        down=wide_exponents((EXPERTS, HIDDEN, INNER), stored, 4, spread=8),
        dy=wide_exponents((tokens, HIDDEN), dtype, 5, spread=8),
    )


def module_of(data: Data, plan: TreePlan, group: Any = None, normalize: bool = True) -> RoutedExperts:
    """This rank's share."""
    runs = leaf_runs(INNER, plan.leaves, 1 if group is None else group.size())
    cuts = plan.cuts(INNER)
    lo, hi = (cuts[leaf] for leaf in runs[0 if group is None else group.rank()])
    gate_up = data.gate_up.view(EXPERTS, 2, INNER, HIDDEN)[:, :, lo:hi].reshape(EXPERTS, -1, HIDDEN)
    return RoutedExperts(
        data.router.clone(), gate_up.clone(), data.down[:, :, lo:hi].contiguous(),
        intermediate=INNER, slots=SLOTS, normalize=normalize, plan=plan, group=group, compute_dtype=data.x.dtype,
    )  # fmt: skip


def train(module: RoutedExperts, data: Data, offsets: list[int]) -> dict[str, Tensor]:
    x = data.x.clone().requires_grad_()
    module.zero_grad()
    y = module(x, offsets)
    y.backward(data.dy)
    parameters = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **parameters}


# --- against the oracle -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", _C.cpu_paths())
def test_verify_chains_over_slots_equal_reference(path: str) -> None:
    """acc = fma(scale, value, acc) with its flush, slots ascending; -1 is no slot."""
    values = wide_exponents((2, 7, 33), torch.float32, 0, spread=250)
    rows = torch.tensor([[0, 3, 6], [6, -1, 0], [-1, -1, -1], [2, 2, 5]])
    scale = wide_exponents((4, 3), torch.float32, 1, spread=40)
    found = _C.combine_slots(values, rows, scale, path)
    for c, t in itertools.product(range(2), range(4)):
        acc = torch.zeros(33)
        for s, row in enumerate(rows[t].tolist()):
            if row >= 0:
                acc = reference.fma32(scale[t, s], values[c, row], acc)
        assert_bitwise_equal(found[c, t], acc + 0.0, f"{c}, {t}")
    one = _C.combine_slots(values, rows, None, path)
    assert_bitwise_equal(one, _C.combine_slots(values, rows, torch.ones(4, 3), path), "without a scale")
    # negative control: the other direction is another sum
    assert_bits_differ(found, _C.combine_slots(values, rows.flip(1), scale.flip(1), path), "descending slots")


@pytest.mark.parametrize("path", _C.cpu_paths())
def test_verify_elements_equal_reference(path: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = wide_exponents((3, 530), dtype, 0, spread=24)
        scale = wide_exponents((3,), torch.float32, 1, spread=24)
        with reference.plain_arithmetic():
            expected = reference.epilogue(x.float() * scale[:, None], out_dtype=dtype)
            products = x.float() * x.float().flip(0)
        assert_bitwise_equal(_C.scale_rows(x, scale, dtype, path), expected, f"{dtype}")
        assert_bitwise_equal(_C.multiply(x, x.flip(0), path), products, f"{dtype}")


@pytest.mark.parametrize("normalize", [True, False])
def test_verify_routing_equals_reference(normalize: bool) -> None:
    """Ties go to the lower index, in the weights too."""
    logits = torch.randn(12, 9, generator=torch.Generator().manual_seed(0)).mul(4).round().div(2)
    weights, ids = expert_ops.route(logits, 4, normalize=normalize)
    expected, expected_ids = reference_experts.route(logits, 4, normalize)
    assert torch.equal(ids, expected_ids)
    assert_bitwise_equal(weights, expected, "weights")
    tied = expert_ops.route(torch.zeros(2, 9), 3)
    assert tied.ids.tolist() == [[0, 1, 2]] * 2
    dweights = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    found = expert_ops.route_backward(dweights, logits, ids, normalize=normalize)
    assert_bitwise_equal(found, reference_experts.route_dx(dweights, logits, ids, normalize), "dlogits")
    x = logits.double().requires_grad_()
    probabilities = (x.gather(1, ids) if normalize else x).softmax(1)
    (probabilities if normalize else probabilities.gather(1, ids)).backward(dweights.double())
    assert x.grad is not None
    torch.testing.assert_close(found.double(), x.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("plan", [PLAN, WIRE], ids=["fp32", "wire"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *long_cases([torch.float32, torch.float16])], ids=str)
def test_verify_experts_equal_reference(dtype: torch.dtype, plan: TreePlan) -> None:
    """The whole block, forward and every gradient, at one rank; scratch for one leaf at a time is the same."""
    data = data_of(dtype)
    for normalize in (True, False):
        found = train(module_of(data, plan, normalize=normalize), data, OFFSETS)
        arguments = (*data[:4], SLOTS, normalize, plan)
        assert_bitwise_equal(found["y"], reference_experts.block(*arguments), "y")
        expected = reference_experts.block_backward(data.dy, *arguments, OFFSETS)
        assert_bitwise_equal(found["x"], expected.x, "dx")
        if dtype == torch.float32:
            assert_bitwise_equal(found["gate.weight"], expected.router, "router")
            assert_bitwise_equal(found["experts.gate_up_proj"], expected.gate_up, "gate_up")
            assert_bitwise_equal(found["experts.down_proj"], expected.down, "down")


@pytest.mark.parametrize("plan", [PLAN, WIRE], ids=["fp32", "wire"])
def test_verify_master_weights_equal_reference(plan: TreePlan) -> None:
    """fp32 masters of a bf16 computation: gradients leave in fp32."""
    data = data_of(torch.bfloat16, master=True)
    found = train(module_of(data, plan), data, OFFSETS)
    rounded = data._replace(**{name: getattr(data, name).bfloat16() for name in ("router", "gate_up", "down")})
    expected = reference_experts.block_backward(data.dy, *rounded[:4], SLOTS, True, plan, OFFSETS)
    for name, value in (
        ("gate.weight", expected.router),
        ("experts.gate_up_proj", expected.gate_up),
        ("experts.down_proj", expected.down),
    ):
        assert_bitwise_equal(found[name], value, name)


def test_verify_long_samples_have_blocks() -> None:
    """Blocks of 512 positions of a sample, counted over all its tokens, not over those that chose the expert."""
    data = data_of(torch.float32, tokens=1100)
    found = train(module_of(data, PLAN), data, [0, 30, 1100])
    with torch.no_grad():
        logits = ops.linear(data.x, data.router, plan=PLAN)
    weights, ids = expert_ops.route(logits, SLOTS)
    expert = 2
    tokens = (ids == expert).any(1).nonzero()[:, 0]
    assert len(tokens) > 300
    weight = weights[ids == expert]
    a = _C.scale_rows(data.dy[tokens], weight, torch.float32)
    gate, up = ops.linear(data.x[tokens], data.gate_up[expert], plan=PLAN).chunk(2, dim=1)
    h = ops.silu_and_mul(gate.contiguous(), up.contiguous())
    chains = []
    for lo, hi in ((0, 30), (30, 542), (542, 1054), (1054, 1100)):
        rows = (tokens >= lo) & (tokens < hi)
        chains.append(ops.linear(a[rows].T.contiguous(), h[rows].T.contiguous(), plan=TreePlan(leaves=1)))
    expected = chains[0] + ((chains[1] + chains[2]) + chains[3])
    assert_bitwise_equal(found["experts.down_proj"][expert], expected, "blocks")
    assert_bits_differ(expected, ((chains[0] + chains[1]) + chains[2]) + chains[3], "blocks in order")


# --- what may not matter ----------------------------------------------------------------------------------------------


def sharded(group: dist.ProcessGroup, dtype: torch.dtype, plan: TreePlan) -> dict[str, Tensor]:
    from tbik.collectives import bytes_sent, reset_bytes_sent

    data = data_of(dtype, master=True)
    module = module_of(data, plan, group)
    train(module, data, OFFSETS)
    calls: list[int] = []
    import tbik.routed_experts

    original = tbik.routed_experts.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return original(*args, **kwargs)

    tbik.routed_experts.all_reduce = counted
    reset_bytes_sent(group)
    try:
        found = train(module, data, OFFSETS)
    finally:
        tbik.routed_experts.all_reduce = original
    return {**found, "calls": torch.tensor(len(calls)), "sent": torch.tensor(bytes_sent(group))}


@pytest.mark.multiprocess
@pytest.mark.parametrize("plan", [PLAN, WIRE], ids=["fp32", "wire"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_tensor_parallel_worlds(pool: Pool, dtype: torch.dtype, plan: TreePlan) -> None:
    data = data_of(dtype, master=True)
    expected = train(module_of(data, plan), data, OFFSETS)
    for world in (2, 3, 4):
        ranks = pool.run(sharded, world, dtype, plan)
        for rank, found in enumerate(ranks):
            for name in ("y", "x", "gate.weight"):
                assert_bitwise_equal(found[name], expected[name], f"{name}, rank {rank} of {world}")
            # forward one, backward one: the gradients of the routing weights travel beside dx where nothing is narrowed
            assert found["calls"] == (2 if plan is PLAN else 3) and found["sent"] > 0
        down = torch.cat([found["experts.down_proj"] for found in ranks], 2)
        assert_bitwise_equal(down, expected["experts.down_proj"], f"down, W={world}")
        parts = [found["experts.gate_up_proj"].unflatten(1, (2, -1)) for found in ranks]
        gate_up = torch.cat(parts, 2).flatten(1, 2)
        assert_bitwise_equal(gate_up, expected["experts.gate_up_proj"], f"gate_up, W={world}")


def test_verify_company_and_scratch_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token alone, in a batch, in another order, with little scratch; micro-batches are nodes."""
    data = data_of(torch.bfloat16, master=True)
    module = module_of(data, PLAN)
    expected = train(module, data, OFFSETS)
    with torch.no_grad():
        for t in range(9):
            assert_bitwise_equal(module(data.x[t : t + 1])[0], expected["y"][t], f"token {t} alone")
        assert_bitwise_equal(module(data.x.flip(0)).flip(0), expected["y"], "in another order")
        assert module(data.x[:0]).shape == (0, HIDDEN)
    monkeypatch.setattr(expert_ops, "SCRATCH_BYTES", 1)
    for name, value in train(module, data, OFFSETS).items():
        assert_bitwise_equal(value, expected[name], f"{name}, one leaf at a time")
    monkeypatch.undo()
    first = train(module, Data(data.x[:3], *data[1:4], data.dy[:3]), [0, 3, 3])
    second = train(module, Data(data.x[3:], *data[1:4], data.dy[3:]), [0, 5, 6])
    alone = [
        train(module, Data(data.x[lo:hi], *data[1:4], data.dy[lo:hi]), [0, hi - lo])
        for lo, hi in itertools.pairwise(OFFSETS)
    ]
    differs = 0
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        assert_bitwise_equal(first[name] + second[name], expected[name], name)
        g = [found[name] for found in alone]
        assert_bitwise_equal((g[0] + g[1]) + (g[2] + g[3]), expected[name], name)
        differs += int(((g[0] + g[2]) + g[3] != expected[name]).sum())  # sample 1 is empty
    assert differs > 0  # negative control: one sample after the other is another sum


def test_verify_combining_whole_experts_differs() -> None:
    """Negative control: the sum of the experts' own outputs, each rounded or not, has other bits."""
    data = data_of(torch.float32)
    logits = ops.linear(data.x, data.router, plan=PLAN)
    routing = expert_ops.route(logits, SLOTS)
    y = ops.experts(data.x, routing, data.gate_up, data.down, plan=PLAN)
    plain = torch.zeros_like(y)
    for s in range(SLOTS):
        one = Routing(torch.ones(9, 1), routing.ids[:, s : s + 1].contiguous())
        plain += routing.weights[:, s, None] * ops.experts(data.x, one, data.gate_up, data.down, plan=PLAN)
    assert_bits_differ(y, plain, "whole experts")
    torch.testing.assert_close(y, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))


def test_verify_cover_is_the_sum() -> None:
    data = data_of(torch.float32)
    routing = expert_ops.route(ops.linear(data.x, data.router, plan=PLAN), SLOTS)
    whole = ops.experts(data.x, routing, data.gate_up, data.down, plan=PLAN)
    cover = ops.experts_cover(data.x, routing, data.gate_up, data.down, CoverRun(INNER, 0, 8), plan=PLAN)
    assert_bitwise_equal(cover[0], whole, "one node")
    called = torch.ops.tbik.experts(data.x, *routing, data.gate_up, data.down, PLAN.key(), torch.float32, torch.float32)
    assert_bitwise_equal(called, whole, "torch.ops.tbik.experts")
    library.opcheck(
        torch.ops.tbik.experts.default,
        (data.x, *routing, data.gate_up, data.down, PLAN.key(), torch.float32, torch.float32),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_verify_a_rank_without_columns() -> None:
    """More leaves than columns: a rank whose leaves are all empty has +0 for a cover, forward and backward."""
    x, run, plan = wide_exponents((4, 8), torch.float32, 1), CoverRun(2, 0, 1), TreePlan(leaves=4)
    assert plan.cuts(2)[:2] == (0, 0)
    routing = expert_ops.route(wide_exponents((4, 2), torch.float32, 2, spread=2), 1)
    weights = torch.zeros(2, 0, 8), torch.zeros(2, 8, 0)
    cover = expert_ops.experts_cover(x, routing, *weights, run, plan=plan)
    found = expert_ops.experts_backward(x, x, routing, *weights, run, plan=plan, sample_offsets=[0, 4])
    for value in (cover, found.x, found.weights):
        assert_bitwise_equal(value, torch.zeros_like(value), "an empty leaf")
    assert (found.gate_up.shape, found.down.shape) == ((2, 0, 8), (2, 8, 0))


def test_corroborate_gradients_against_autograd() -> None:
    data = data_of(torch.float32)
    found = train(module_of(data, PLAN), data, OFFSETS)
    wide = Data(*(t.double().requires_grad_() for t in data))
    ids = expert_ops.route(ops.linear(data.x, data.router, plan=PLAN), SLOTS).ids
    weights = (wide.x @ wide.router.T).gather(1, ids).softmax(1)
    y = torch.zeros_like(wide.x)
    for t, s in itertools.product(range(9), range(SLOTS)):
        gate, up = (wide.gate_up[ids[t, s]] @ wide.x[t]).chunk(2)
        row = weights[t, s] * (wide.down[ids[t, s]] @ (torch.nn.functional.silu(gate) * up))
        y = y + torch.nn.functional.one_hot(torch.tensor(t), 9)[:, None] * row
    y.backward(data.dy.double())
    pairs = {"y": y, "x": wide.x.grad, "gate.weight": wide.router.grad, "experts.gate_up_proj": wide.gate_up.grad}
    pairs["experts.down_proj"] = wide.down.grad
    for name, expected in pairs.items():
        assert expected is not None
        difference = (found[name].double() - expected).abs().max()
        assert difference <= 2e-5 * expected.abs().max(), name


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_verify_refusals() -> None:
    data = data_of(torch.float32)
    routing = Routing(torch.ones(9, 2), torch.zeros(9, 2, dtype=torch.int64))
    w = (data.gate_up, data.down)
    with pytest.raises(PlanError, match="fp32 logits"):
        ops.route(data.x.bfloat16(), 2)
    with pytest.raises(PlanError, match=r"slots is an integer 1\.\.20"):
        ops.route(data.x, 21)
    with pytest.raises(PlanError, match="expected fp32 weights and int64 ids"):
        ops.experts(data.x, Routing(routing.weights.double(), routing.ids), *w, plan=PLAN)
    with pytest.raises(PlanError, match="ids are experts"):
        ops.experts(data.x, Routing(routing.weights, routing.ids + EXPERTS), *w, plan=PLAN)
    with pytest.raises(PlanError, match="gate before up"):
        ops.experts(data.x, routing, data.gate_up[:, :-1], data.down, plan=PLAN)
    with pytest.raises(PlanError, match="accumulates in float32"):
        ops.experts(data.x, routing, *w, plan=TreePlan(acc_dtype="float64"))
    with pytest.raises(PlanError, match="are 3 long, down has 24"):
        ops.experts_cover(data.x, routing, *w, CoverRun(INNER, 0, 1), plan=PLAN)
    with pytest.raises(PlanError, match="expected gate_up"):
        RoutedExperts(*data[1:4], intermediate=INNER - 1, slots=2, normalize=True, plan=PLAN)
    with pytest.raises(PlanError, match="slots from 1 to E"):
        RoutedExperts(*data[1:4], intermediate=INNER, slots=6, normalize=True, plan=PLAN)
