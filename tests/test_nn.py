"""tbik.nn over gloo: forward, dX, dW and dbias have one set of bits at every tensor-parallel size.

Every rank builds its layers from the same full weights, the test puts the ranks' shares together and compares them with
one rank's operators, which tests/test_linear.py compares with the oracle. That the test could see a wrong product is
shown too: the ranks hold less, they send bytes, and sums in other orders differ.

Suffixes: M rows, K input features, N output features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from spawn import Pool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tbik
from tbik import TreePlan, nn, ops, reference, tree
from tbik.collectives import Cover, all_reduce, bytes_sent, reset_bytes_sent
from tbik.errors import PlanError
from tbik.ops.linear import CoverRun, linear_cover
from tbik.plan import ModelShape, leaf_runs

WORLDS = (1, 2, 4, 8, 3, 6)
M, K, N, OUT = 6, 20, 56, 10


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(8) as ranks:
        yield ranks


class Data(NamedTuple):
    """A gated MLP: y = ((x gate^T + b) * (x up^T)) down^T + b, in compute dtype, with fp32 master weights."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor
    down_bias: Tensor
    dy: Tensor


def mlp_data(compute: torch.dtype) -> Data:
    # Products of two wide values are wider still: 20 powers of two each keep the sums finite and the order visible.
    return Data(
        x=wide_exponents((2, M // 2, K), compute, 1, spread=20),
        gate=wide_exponents((N, K), torch.float32, 2, spread=20),
        up=wide_exponents((N, K), torch.float32, 3, spread=20),
        down=wide_exponents((OUT, N), torch.float32, 4, spread=20),
        gate_bias=wide_exponents((N,), torch.float32, 5, spread=20),
        down_bias=wide_exponents((OUT,), torch.float32, 6, spread=20),
        dy=wide_exponents((2, M // 2, OUT), compute, 7, spread=20),
    )


def run_sharded(group: dist.ProcessGroup, plan: TreePlan, compute: torch.dtype) -> dict[str, Any]:
    """Forward and backward on this rank; `rank` results are shares."""
    data = mlp_data(compute)
    reset_bytes_sent(group)
    columns = nn.ColumnParallelGroup.from_full(
        [data.gate, data.up],
        [data.gate_bias, None],
        plan=plan,
        group=group,
        names=["gate", "up"],
        compute_dtype=compute,
    )
    row = nn.RowParallelLinear.from_full(data.down, data.down_bias, plan=plan, group=group, compute_dtype=compute)
    x = data.x.clone().requires_grad_()
    gate, up = columns(x)
    y = row(gate * up)
    y.backward(data.dy)
    return {
        "y": y.detach(),
        "dx": x.grad,
        "gate": columns.weight_gate.grad,
        "up": columns.weight_up.grad,
        "gate_bias": columns.bias_gate.grad,
        "down": row.weight.grad,
        "down_bias": row.bias.grad,
        "weight_bytes": sum(w.numel() * w.element_size() for w in (columns.weight_gate, columns.weight_up, row.weight)),
        "bytes_sent": bytes_sent(group),
    }


def run_alone(plan: TreePlan, compute: torch.dtype) -> dict[str, Tensor]:
    """The same by the operators alone, no nn and no collectives."""
    data = Data(*(t.clone() for t in mlp_data(compute)))
    x, dy = data.x.requires_grad_(), data.dy
    parameters = [t.requires_grad_() for t in data[1:6]]
    gate_w, up_w, down_w, gate_b, down_b = parameters
    gate, up = ops.linear_group(x, [gate_w, up_w], [gate_b, None], plan=plan, compute_dtype=compute)
    y = ops.linear(gate * up, down_w, down_b, plan=plan, compute_dtype=compute, parallel="row")
    y.backward(dy)
    names = ("gate", "up", "down", "gate_bias", "down_bias")
    return {"y": y.detach(), "dx": x.grad, **{n: p.grad for n, p in zip(names, parameters, strict=True)}}


@pytest.mark.multiprocess
@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16], ids=str)
def test_verify_tensor_parallel_worlds(pool: Pool, compute: torch.dtype, wire: str | None) -> None:
    plan = TreePlan(leaves=8, wire_dtype=wire, grad_wire_dtype=wire)
    expected = run_alone(plan, compute)
    assert all(torch.isfinite(value).all() for value in expected.values())
    data = mlp_data(compute)
    full_bytes = sum(w.numel() * w.element_size() for w in (data.gate, data.up, data.down))
    for world in WORLDS:
        ranks = pool.run(run_sharded, world, plan, compute)
        for rank, result in enumerate(ranks):
            for name in ("y", "dx", "down_bias"):
                assert_bitwise_equal(result[name], expected[name], f"{name}, rank {rank} of {world}")
        for name, dim in (("gate", 0), ("up", 0), ("gate_bias", 0), ("down", 1)):
            whole = torch.cat([result[name] for result in ranks], dim)
            assert whole.dtype == torch.float32
            assert_bitwise_equal(whole, expected[name], f"d{name}, W={world}")
        # it really was sharded
        assert sum(result["weight_bytes"] for result in ranks) == full_bytes
        largest = max(hi - lo for lo, hi in leaf_runs(N, plan.leaves, world))
        assert all(result["weight_bytes"] <= full_bytes * largest / plan.leaves for result in ranks)
        assert all((result["bytes_sent"] > 0) == (world > 1) for result in ranks)


def run_wrong_sums(group: dist.ProcessGroup, plan: TreePlan) -> dict[str, Tensor]:
    """The product of RowParallelLinear, and two wrong ones."""
    data = mlp_data(torch.float32)
    h, w = wide_exponents((M, N), torch.float32, 9), data.down
    runs = leaf_runs(N, plan.leaves, group.size())
    lo, hi = runs[group.rank()]
    part = slice(plan.cuts(N)[lo], plan.cuts(N)[hi])
    run, nodes = CoverRun(N, lo, hi), tree.cover(lo, hi)
    values = linear_cover(h[:, part], w[:, part], run, plan=plan, compute_dtype=h.dtype, parallel=True)

    def reduced(values: Tensor) -> Tensor:
        return all_reduce(Cover(values, nodes, plan.leaves), group, plan=plan, runs=runs)

    flat = reference.chain(h[:, part], w[:, part])
    parts = [torch.empty_like(flat) for _ in range(group.size())]
    dist.all_gather(parts, flat, group=group)
    total = parts[0]
    for value in parts[1:]:
        total = total + value
    layer = nn.RowParallelLinear.from_full(w, plan=plan, group=group)
    return {
        "layer": layer(h[:, part]).detach(),
        "covers": reduced(values),
        "rounded": reduced(values.bfloat16().float()),
        "flat": total,
    }


@pytest.mark.multiprocess
@pytest.mark.parametrize("world", [2, 3, 8])
def test_verify_wrong_sums_are_seen(pool: Pool, world: int) -> None:
    """The negative control: rounding before the all-reduce, and one flat sum per rank, give other bits."""
    plan = TreePlan(leaves=8)
    expected = reference.linear(wide_exponents((M, N), torch.float32, 9), mlp_data(torch.float32).down, plan)
    for result in pool.run(run_wrong_sums, world, plan):
        assert_bitwise_equal(result["layer"], expected, "layer")
        assert_bitwise_equal(result["covers"], expected, "covers")
        assert_bits_differ(result["rounded"], expected, "rounded to bf16 before the all-reduce")
        assert_bits_differ(result["flat"], expected, "flat sum per rank, ranks in order")


SHAPE = ModelShape(heads=9, kv_heads=3, head_dim=4, hidden=20, intermediate=24, vocab=16)


def run_attention_group(group: dist.ProcessGroup, plan: TreePlan) -> dict[str, Any]:
    x, weights, dys = attention_data()
    layout = plan.layout(SHAPE, group.size())
    d = SHAPE.head_dim
    kv_rows = [(lo * d, hi * d) for lo, hi in layout.kv_heads]
    layer = nn.ColumnParallelGroup.from_full(
        weights, plan=plan, group=group, runs=layout.attention, held_rows=[None, kv_rows, kv_rows], head_dim=d
    )
    rows = [layer.held[g] for g in range(3)]
    x.requires_grad_()
    ys = layer(x)
    torch.autograd.backward(ys, [dy[:, a:b] for dy, (a, b) in zip(dys, rows, strict=True)])
    return {
        "rows": rows,
        "y": [y.detach() for y in ys],
        "dx": x.grad,
        "dw": [getattr(layer, name).grad for name in layer.weight_names],
    }


def attention_data() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    sizes = [SHAPE.heads * SHAPE.head_dim, *[SHAPE.kv_heads * SHAPE.head_dim] * 2]
    x = wide_exponents((5, SHAPE.hidden), torch.float32, 1, spread=20)
    weights = [wide_exponents((n, SHAPE.hidden), torch.float32, 2 + g) for g, n in enumerate(sizes)]
    return x, weights, [wide_exponents((5, n), torch.float32, 5 + g) for g, n in enumerate(sizes)]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("leaves", "worlds", "shared"), [(12, (1, 2, 3), False), (9, (2, 3, 5, 6), True)], ids=["L=12", "L=9"]
)
def test_verify_replicated_kv_heads(pool: Pool, leaves: int, worlds: tuple[int, ...], shared: bool) -> None:
    """q, k, v sharded by query heads, KV heads on every rank that needs them: dX counts each row once."""
    plan = TreePlan(leaves=leaves)
    x, weights, dys = attention_data()
    dx = reference.linear_dx(dys, weights, plan)
    ys = [reference.linear(x, w, plan) for w in weights]
    dws = [reference.linear_dw(dy, x, [0, 5], plan) for dy in dys]
    replicated = False
    for world in worlds:
        results = pool.run(run_attention_group, world, plan)
        for rank, result in enumerate(results):
            assert_bitwise_equal(result["dx"], dx, f"dX, rank {rank} of {world}")
            for g, (first, end) in enumerate(result["rows"]):
                assert_bitwise_equal(result["y"][g], ys[g][:, first:end], f"member {g}, rank {rank} of {world}")
                assert_bitwise_equal(result["dw"][g], dws[g][first:end], f"dW of member {g}, rank {rank} of {world}")
        held = sum(end - first for result in results for first, end in result["rows"][1:2])
        replicated |= held > weights[1].shape[0]
    assert replicated == shared, "whether a world of this test replicates a KV head"


def run_lm_head(group: dist.ProcessGroup, plan: TreePlan) -> dict[str, Any]:
    x = wide_exponents((2, 3, K), torch.bfloat16, 1, spread=20).requires_grad_()
    w = wide_exponents((16, K), torch.float32, 2, spread=20)
    b = wide_exponents((16,), torch.float32, 3, spread=20)
    layer = nn.ColumnParallelLinear.from_full(w, b, plan=plan, group=group, compute_dtype=torch.bfloat16)
    y = layer(x, sample_offsets=[0, 1, 6])
    (first, end) = layer.held[0]
    dy = wide_exponents((2, 3, 16), torch.bfloat16, 4, spread=20)
    y.backward(dy[..., first:end])
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad, "db": layer.bias.grad}


@pytest.mark.multiprocess
def test_verify_column_parallel_linear(pool: Pool) -> None:
    plan = TreePlan(leaves=8)
    results = {world: pool.run(run_lm_head, world, plan) for world in (1, 3, 4)}
    x = wide_exponents((2, 3, K), torch.bfloat16, 1, spread=20)
    w = wide_exponents((16, K), torch.float32, 2, spread=20).bfloat16()
    b = wide_exponents((16,), torch.float32, 3, spread=20)
    dy = wide_exponents((2, 3, 16), torch.bfloat16, 4, spread=20)
    expected = {
        "y": reference.linear(x, w, plan, b, out_dtype=torch.bfloat16),
        "dx": reference.linear_dx([dy], [w], plan, out_dtype=torch.bfloat16),
        "dw": reference.linear_dw(dy, x, [0, 1, 6], plan),
        "db": reference.bias_grad(dy, [0, 1, 6], plan),
    }
    for world, ranks in results.items():
        for rank in ranks:
            assert_bitwise_equal(rank["dx"], expected["dx"], f"dX, W={world}")
        for name, dim in (("y", -1), ("dw", 0), ("db", 0)):
            assert_bitwise_equal(torch.cat([r[name] for r in ranks], dim), expected[name], f"{name}, W={world}")


def run_row_head(group: dist.ProcessGroup, plan: TreePlan) -> dict[str, Any]:
    """A row-parallel layer whose y leaves in fp32, over two samples."""
    x, w, b, dy = row_head_data()
    layer = nn.RowParallelLinear.from_full(
        w, b, plan=plan, group=group, compute_dtype=torch.bfloat16, out_dtype=torch.float32
    )
    lo, hi = layer.sharding.run
    part = x[..., plan.cuts(N)[lo] : plan.cuts(N)[hi]].clone().requires_grad_()
    y = layer(part, sample_offsets=[0, 1, 6])
    y.backward(dy)
    return {"y": y.detach(), "dx": part.grad, "dw": layer.weight.grad, "db": layer.bias.grad}


def row_head_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        wide_exponents((2, 3, N), torch.bfloat16, 1, spread=20),
        wide_exponents((OUT, N), torch.float32, 2, spread=20),
        wide_exponents((OUT,), torch.float32, 3, spread=20),
        wide_exponents((2, 3, OUT), torch.float32, 4, spread=20),
    )


@pytest.mark.multiprocess
def test_verify_row_parallel_samples_and_out_dtype(pool: Pool) -> None:
    plan = TreePlan(leaves=8)
    x, w, b, dy = row_head_data()
    w16, offsets = w.bfloat16(), [0, 1, 6]
    expected = {
        "y": reference.linear(x, w16, plan, b, out_dtype=torch.float32),
        "dx": reference.linear_dx([dy], [w16], plan, out_dtype=torch.bfloat16),
        "dw": reference.linear_dw(dy, x, offsets, plan),
        "db": reference.bias_grad(dy, offsets, plan),
    }
    other = [0, 3, 6]  # what the shape of x would say
    assert_bits_differ(expected["dw"], reference.linear_dw(dy, x, other, plan), "dW of other samples")
    assert_bits_differ(expected["db"], reference.bias_grad(dy, other, plan), "dbias of other samples")
    for world in (1, 2, 3):
        ranks = pool.run(run_row_head, world, plan)
        for rank in ranks:
            assert_bitwise_equal(rank["y"], expected["y"], f"y, W={world}")
            assert_bitwise_equal(rank["db"], expected["db"], f"dbias, W={world}")
        for name, dim in (("dx", -1), ("dw", 1)):
            assert_bitwise_equal(torch.cat([r[name] for r in ranks], dim), expected[name], f"{name}, W={world}")


def run_calls(group: dist.ProcessGroup, plan: TreePlan) -> dict[str, str]:
    """What a row-parallel and a column-parallel layer say to wrong calls; the layers work afterwards."""
    forward_ad = torch.autograd.forward_ad
    row = nn.RowParallelLinear.from_full(torch.ones(OUT, N), torch.ones(OUT), plan=plan, group=group)
    column = nn.ColumnParallelLinear.from_full(torch.ones(N, K), torch.ones(N), plan=plan, group=group)
    sizes = {"row": row.weight.shape[1], "column": K}

    def with_bias(layer: torch.nn.Module, bias: Tensor, x: Tensor) -> object:
        return torch.func.functional_call(layer, {"bias": bias}, (x,))

    def dual(layer: torch.nn.Module, x: Tensor, weight: bool) -> object:
        with forward_ad.dual_level():
            if not weight:
                return layer(forward_ad.make_dual(x, x))
            w = forward_ad.make_dual(layer.weight.detach().clone(), layer.weight.detach().clone())
            return torch.func.functional_call(layer, {"weight": w}, (x,))

    def twice(layer: torch.nn.Module, x: Tensor) -> None:
        a = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(layer(a).pow(2).sum(), a, create_graph=True)
        g.sum().backward()

    def frozen_with_trainable_bias(layer: torch.nn.Module, x: Tensor) -> object:
        layer = type(layer).from_full(  # type: ignore[attr-defined]
            torch.ones(OUT, N) if layer is row else torch.ones(N, K),
            torch.ones(OUT if layer is row else N),
            plan=plan,
            group=group,
        )
        layer.weight.requires_grad_(False)
        return tbik.freeze(layer)(x)

    def calls(layer: torch.nn.Module, x: Tensor, bias: Tensor) -> dict[str, Callable[[], object]]:
        return {
            "4-D x": lambda: layer(x.view(2, 1, 2, -1)),
            "offsets": lambda: layer(x, [0, 9]),
            "offsets, text": lambda: layer(x, "abc"),
            "fp64 bias": lambda: with_bias(layer, bias.double(), x),
            "bias length": lambda: with_bias(layer, torch.ones(3), x),
            "x dtype": lambda: layer(x.bfloat16()),
            "x width": lambda: layer(torch.ones(4, 3)),
            "vmap": lambda: torch.func.vmap(layer)(x),
            "jvp": lambda: dual(layer, x, False),
            "jvp of the weight": lambda: dual(layer, x, True),
            "second derivative": lambda: twice(layer, x),
            "frozen, trainable bias": lambda: frozen_with_trainable_bias(layer, x),
        }

    messages = {}
    for kind, layer in (("row", row), ("column", column)):
        x = torch.ones(4, sizes[kind])
        for name, call in calls(layer, x, layer.bias.detach()).items():
            try:
                call()
                messages[f"{kind}: {name}"] = "no error"
            except Exception as error:
                messages[f"{kind}: {name}"] = f"{type(error).__name__} {error}"
        y = layer(x)
        assert_bitwise_equal(layer(x.view(2, 1, 2, -1), [0, 1, 4]).flatten(0, 2), y, "4-D x with sample_offsets")
    return messages


@pytest.mark.multiprocess
def test_verify_wrong_calls_are_refused_at_every_world_size(pool: Pool) -> None:
    for world in (1, 2):
        for messages in pool.run(run_calls, world, TreePlan(leaves=8)):
            assert len(messages) == 24
            for name, message in messages.items():
                assert message.startswith("PlanError"), f"W={world}: {name}: {message}"


def run_edits(group: dist.ProcessGroup, plan: TreePlan) -> list[tuple[Tensor, Tensor]]:
    """Outputs edited in place and checkpointed, and gradients through them, beside those of plain calls."""
    pairs = []
    x, w = wide_exponents((4, N), torch.float32, 1, spread=20), wide_exponents((OUT, N), torch.float32, 2, spread=20)
    negated = torch.complex(torch.zeros(OUT), wide_exponents((OUT,), torch.float32, 3, spread=20)).conj().imag
    assert negated.is_neg()
    row = nn.RowParallelLinear.from_full(w, torch.nn.Parameter(negated), plan=plan, group=group)
    column = nn.ColumnParallelGroup.from_full([w.T.contiguous(), w.T.contiguous()], plan=plan, group=group)
    lo, hi = row.sharding.run
    inputs = {"row": (row, x[:, plan.cuts(N)[lo] : plan.cuts(N)[hi]]), "column": (column, x[:, :OUT])}
    for layer, part in inputs.values():
        plain = edited(layer, part, torch.relu)
        for again in (
            edited(layer, part, torch.relu_),
            edited(functools.partial(checkpoint, layer, use_reentrant=False), part, torch.relu),
            edited(functools.partial(checkpoint, layer, use_reentrant=True), part, torch.relu),
        ):
            pairs += zip(again, plain, strict=True)
    return pairs


def edited(layer: Callable[[Tensor], Any], part: Tensor, relu: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = part.clone().requires_grad_()
    ys = layer(x)
    ys = [relu(y) for y in (ys if isinstance(ys, tuple) else [ys])]
    sum(y.sum() for y in ys).backward()
    module = layer if isinstance(layer, torch.nn.Module) else layer.args[0]
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return [*(y.detach() for y in ys), *gradients]


@pytest.mark.multiprocess
def test_verify_in_place_edits_and_checkpoints(pool: Pool) -> None:
    for world in (1, 2, 3):
        for pairs in pool.run(run_edits, world, TreePlan(leaves=8)):
            for value, expected in pairs:
                assert_bitwise_equal(value, expected, f"W={world}")
    layers = torch.nn.Sequential(nn.Linear(8, 4, plan=TreePlan(leaves=4)), torch.nn.ReLU(inplace=True))
    layers(torch.ones(2, 8)).sum().backward()
    assert layers[0].weight.grad is not None


def run_frozen(group: dist.ProcessGroup, plan: TreePlan) -> dict[str, Tensor]:
    from tbik import freeze

    data = mlp_data(torch.float32)
    columns = nn.ColumnParallelGroup.from_full([data.gate, data.up], plan=plan, group=group)
    row = nn.RowParallelLinear.from_full(data.down, data.down_bias, plan=plan, group=group)
    both = torch.nn.ModuleList([columns, row])

    def forward() -> Tensor:
        gate, up = columns(data.x)
        y: Tensor = row(gate * up)
        return y

    with torch.no_grad():
        live = forward()
        freeze(both)
        return {"live": live, "frozen": forward()}


@pytest.mark.multiprocess
def test_verify_frozen_layers_over_ranks(pool: Pool) -> None:
    plan = TreePlan(leaves=8, wire_dtype="bfloat16")
    results = [result for world in (1, 3) for result in pool.run(run_frozen, world, plan)]
    for result in results:
        assert_bitwise_equal(result["frozen"], results[0]["live"], "frozen")
        assert_bitwise_equal(result["live"], results[0]["live"], "live")


def test_verify_linear_is_the_operator() -> None:
    plan = TreePlan(leaves=6, wire_dtype="bfloat16")
    data = mlp_data(torch.bfloat16)
    for parallel in (None, "row", "column"):
        layer = nn.Linear.from_full(
            data.gate, data.gate_bias, plan=plan, compute_dtype=torch.bfloat16, parallel=parallel
        )
        expected = ops.linear(
            data.x, data.gate, data.gate_bias, plan=plan, compute_dtype=torch.bfloat16, parallel=parallel
        )
        assert_bitwise_equal(layer(data.x).detach(), expected, f"parallel={parallel}")
    head = nn.Linear.from_full(data.gate, plan=plan, compute_dtype=torch.bfloat16, out_dtype=torch.float32)
    assert_bitwise_equal(head(data.x), ops.linear(data.x, data.gate.bfloat16(), plan=plan, out_dtype=torch.float32))
    fresh = nn.Linear(12, 5, plan=plan)
    assert fresh.weight.abs().max() <= 12**-0.5 and fresh.bias is not None
    assert nn.Linear(12, 5, bias=False, plan=plan).bias is None
    assert "leaves=6" in repr(fresh)


def test_verify_runs_of_rows() -> None:
    plan = TreePlan(leaves=8)
    for world in (1, 2, 4, 8):
        bounds = [N // world * (rank + 1) for rank in range(world)]
        runs = nn.runs_of_rows(plan, N, bounds)
        assert [hi for _, hi in runs] == [8 // world * (rank + 1) for rank in range(world)]
    plan_4 = TreePlan(leaves=4)
    assert plan_4.cuts(2) == (0, 0, 1, 1, 2)  # an empty leaf belongs to the rank below the bound
    assert nn.runs_of_rows(plan_4, 2, [1, 2]) == ((0, 3), (3, 4))
    with pytest.raises(PlanError, match="row 20 cuts a leaf"):
        nn.runs_of_rows(plan, N, [20, N])


# --- refusals at construction ---------------------------------------------------------------------------------------

LAYOUT_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "gap": ({"runs": [(0, 3), (4, 8)]}, "do not cover"),
    "overlap": ({"runs": [(0, 5), (4, 8)]}, "do not cover"),
    "short": ({"runs": [(0, 3), (3, 7)]}, "do not cover"),
    "empty run": ({"runs": [(0, 8), (8, 8)]}, "do not cover"),
    "descending": ({"runs": [(4, 8), (0, 4)]}, "do not cover"),
    "too few runs": ({"runs": [(0, 8)]}, "one run of leaves per rank, 2, got 1"),
    "head cut": ({"head_dim": 16}, "cut a head of 16"),
    "more ranks than leaves": ({"plan": TreePlan(leaves=1)}, "one leaf per rank at least"),
    "held rows too few": ({"held_rows": [[(0, 20), (28, 56)]]}, r"leaves need \[0, 28\)"),
    "held rows of one rank": ({"held_rows": [[(0, 56)]]}, "held rows of 2 ranks"),
    "held rows outside": ({"held_rows": [[(0, 28), (28, 60)]]}, r"\[28, 60\) of 56"),
    "no plan": ({"plan": None}, "tbik.TreePlan"),
    "group of another kind": ({"group": "tp"}, "ProcessGroup"),
}


def run_layout_errors(group: dist.ProcessGroup) -> dict[str, str]:
    messages = {}
    weight = torch.zeros(N, K)
    for name, (arguments, _) in LAYOUT_ERRORS.items():
        try:
            nn.ColumnParallelGroup.from_full([weight], **{"plan": TreePlan(leaves=8), "group": group, **arguments})
            messages[name] = "no error"
        except PlanError as error:
            messages[name] = str(error)
    for name, build in {
        "local rows": lambda: nn.ColumnParallelLinear(weight, out_features=N, plan=TreePlan(leaves=8), group=group),
        "local columns": lambda: nn.RowParallelLinear(
            weight, in_features=K, plan=TreePlan(leaves=8), group=group, runs=[(0, 4), (4, 8)]
        ),
        "row head cut": lambda: nn.RowParallelLinear.from_full(
            weight, plan=TreePlan(leaves=8), group=group, head_dim=4
        ),
    }.items():
        try:
            build()
            messages[name] = "no error"
        except PlanError as error:
            messages[name] = str(error)
    return messages


@pytest.mark.multiprocess
def test_verify_layouts_are_refused_at_construction(pool: Pool) -> None:
    expected = {name: text for name, (_, text) in LAYOUT_ERRORS.items()} | {
        "local rows": r"holds rows \[\d+, \d+\) of the 56",
        "local columns": r"holds columns \[\d+, \d+\) of 20",
        "row head cut": "cut a head of 4",
    }
    for messages in pool.run(run_layout_errors, 2):
        for name, text in expected.items():
            with pytest.raises(PlanError, match=text):
                raise PlanError(f"{messages[name]}") from None


def run_plan_mismatch(group: dist.ProcessGroup, layer: str) -> str:
    plan = TreePlan(leaves=7, wire_dtype="bfloat16" if group.rank() else None)
    x = torch.zeros(2, K)
    try:
        if layer == "row":
            part = nn.RowParallelLinear.from_full(torch.zeros(OUT, K), plan=plan, group=group)
            part(x[:, : part.weight.shape[1]])
        else:
            nn.ColumnParallelLinear.from_full(torch.zeros(N, K), plan=plan, group=group)(x)
    except PlanError as error:
        return str(error)
    return "no error"


@pytest.mark.multiprocess
@pytest.mark.parametrize("layer", ["row", "column"])
def test_verify_plan_mismatch_between_ranks(pool: Pool, layer: str) -> None:
    """Seen at the first forward, also where the forward itself sends nothing."""
    for message in pool.run(run_plan_mismatch, 2, layer):
        assert "plan:" in message and "wire_dtype" in message, message


def test_verify_group_arguments() -> None:
    plan = TreePlan(leaves=4)
    w = torch.zeros(8, 4)
    cases = [
        (lambda: nn.ColumnParallelGroup([], out_features=[], plan=plan), "non-empty list"),
        (lambda: nn.ColumnParallelGroup([w, w], out_features=[8], plan=plan), "an entry per weight, 2"),
        (lambda: nn.ColumnParallelGroup([w, w], [None], out_features=[8, 8], plan=plan), "got 1 for 2 weights"),
        (lambda: nn.ColumnParallelGroup([w, w[:, :3]], out_features=[8, 8], plan=plan), r"expected weight \[8, 4\]"),
        (lambda: nn.ColumnParallelGroup([w], [torch.zeros(3)], out_features=[8], plan=plan), r"bias \[8\]"),
        (lambda: nn.ColumnParallelGroup([w[0]], out_features=[8], plan=plan), r"\[N, K\], got \[4\]"),
        (lambda: nn.RowParallelLinear(w, torch.zeros(3), in_features=4, plan=plan), r"bias \[8\], got shape \[3\]"),
        (lambda: nn.RowParallelLinear(w, in_features=5, plan=plan), r"columns \[0, 5\)"),
        (lambda: nn.Linear.from_full(w, torch.zeros(9), plan=plan), r"bias \[8\], got shape \[9\]"),
        (lambda: nn.Linear(4, 8, plan=plan, parallel="tp"), "'row', 'column' or None"),
        (lambda: nn.Linear(4, 8, plan="8 leaves"), "TreePlan, got str"),
    ]
    for build, text in cases:
        with pytest.raises(PlanError, match=text):
            build()
