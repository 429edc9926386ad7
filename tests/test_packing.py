"""Packs are never stale: an unfrozen module caches nothing, a frozen weight can be neither written nor trained."""

from __future__ import annotations

import copy
import functools
import gc
import io
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from spawn import run_ranks
from torch import Tensor

import tbik
from tbik import TreePlan, nn, ops
from tbik.errors import PlanError
from tbik.ops import linear as linear_function
from tbik.ops.linear import CoverRun, linear_cover
from tbik.packing import FrozenWeight

PLAN = TreePlan(leaves=6, wire_dtype="bfloat16")


def model(compute: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        nn.Linear(24, 12, plan=PLAN, compute_dtype=compute),
        torch.nn.ReLU(),
        nn.Linear(12, 5, bias=False, plan=PLAN, compute_dtype=compute, parallel="row"),
    )


def infer(module: torch.nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Tensor = module(x)
        return y


def uncached(module: torch.nn.Sequential, x: Tensor) -> Tensor:
    """What the module's present parameters give, by the operator on fresh copies."""
    first, _, last = module
    with torch.no_grad():
        h = ops.linear(x, first.weight.clone(), first.bias.clone(), plan=PLAN).relu()
        return ops.linear(h, last.weight.clone(), plan=PLAN, parallel="row")


X = wide_exponents((3, 24), torch.float32, 1, spread=8)


# --- same bits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("parallel", [None, "row"])
def test_verify_packed_equals_unpacked(compute: torch.dtype, parallel: str | None) -> None:
    double = compute == torch.float64
    plan = TreePlan(leaves=7, acc_dtype="float64") if double else TreePlan(leaves=7, wire_dtype="bfloat16")
    x = wide_exponents((5, 130), compute, 1, spread=12)
    master = wide_exponents((70, 130), torch.float64 if double else torch.float32, 2, spread=12)
    bias = wide_exponents((70,), torch.float32, 3, spread=12)
    packed = ops.pack_weight(master, plan=plan, compute_dtype=compute, parallel=parallel)
    for out_dtype in (None, torch.float32):
        arguments = {"plan": plan, "out_dtype": out_dtype, "parallel": parallel}
        expected = ops.linear(x, master, bias, **arguments)
        assert_bitwise_equal(ops.linear(x, packed, bias, **arguments), expected, f"{out_dtype}")
    run = CoverRun(130, 2, 6)
    part = slice(plan.cuts(130)[2], plan.cuts(130)[6])
    packed = ops.pack_weight(master[:, part], plan=plan, compute_dtype=compute, parallel=parallel, run=run)
    arguments = {"plan": plan, "compute_dtype": compute, "parallel": parallel == "row"}
    expected = linear_cover(x[:, part], master[:, part], run, **arguments)
    assert_bitwise_equal(linear_cover(x[:, part], packed, run, **arguments), expected, "cover")


def test_verify_a_pack_serves_only_its_own_use() -> None:
    w = torch.randn(4, 24)
    packed = ops.pack_weight(w, plan=PLAN)
    x = torch.randn(2, 24)
    for arguments, text in (
        ({"plan": TreePlan(leaves=5)}, "packed for"),
        ({"plan": PLAN, "parallel": "row"}, "packed for"),
    ):
        with pytest.raises(PlanError, match=text):
            ops.linear(x, packed, **arguments)
    with pytest.raises(PlanError, match="packed for"):
        ops.linear(x.bfloat16(), packed, plan=PLAN)
    with pytest.raises(PlanError, match=r"x \[..., 24\]"):
        ops.linear(x[:, :20], packed, plan=PLAN)
    with pytest.raises(PlanError, match="packed for"):
        linear_cover(x[:, :20], packed, CoverRun(24, 0, 5), plan=PLAN, compute_dtype=torch.float32, parallel=False)
    with pytest.raises(PlanError, match="no backward"):
        ops.linear(x.requires_grad_(), packed, plan=PLAN)
    handle = packed.handle
    del packed
    with pytest.raises(PlanError, match="is gone"):
        torch.ops.tbik.linear_packed(x.detach(), handle, None, 4, 0, torch.float32)
    assert ops.pack_weight(w, plan=PLAN).handle > handle, "a handle is never used twice"
    with pytest.raises(PlanError, match="not saved"):
        torch.save(ops.pack_weight(w, plan=PLAN), io.BytesIO())


# --- unfrozen: nothing is cached ------------------------------------------------------------------------------------


def test_verify_unfrozen_modules_see_every_write() -> None:
    module = model()
    first = module[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    seen = [infer(module, X)]

    def in_place() -> None:
        with torch.no_grad():
            first.weight.mul_(1.5)

    def data_copy() -> None:
        version = first.weight._version
        first.weight.data.copy_(torch.randn(12, 24))
        assert first.weight._version == version, "a write that the version counter does not see"

    def numpy_write() -> None:
        first.weight.detach().numpy()[0] = 3.0

    def data_swap() -> None:
        first.weight.data = torch.randn(12, 24)

    def optimizer_step() -> None:
        module(X).sum().backward()
        optimizer.step()

    def new_parameter() -> None:
        first.weight = torch.nn.Parameter(torch.randn(12, 24))

    for write in (in_place, data_copy, numpy_write, data_swap, optimizer_step, new_parameter):
        write()
        seen.append(infer(module, X))
        assert_bitwise_equal(seen[-1], uncached(module, X), write.__name__)
        assert_bits_differ(seen[-1], seen[-2], f"{write.__name__} must have changed something")


def run_fsdp(group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor], str]:
    """Three FSDP2 steps: outputs on this rank, the full weights at the end, and what freeze() says to sharded ones."""
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore")
    module = model(torch.bfloat16)
    mesh = dist.device_mesh.init_device_mesh("cpu", (group.size(),))
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=2.0**-4, foreach=False)
    outputs = []
    for step in range(3):
        y = module(fsdp_batch(step, group.rank()))
        outputs.append(y.detach())
        y.float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    try:
        tbik.freeze(module)
        message = "no error"
    except PlanError as error:
        message = str(error)
    return outputs, [p.full_tensor().detach() for p in module.parameters()], message


def fsdp_batch(step: int, rank: int) -> Tensor:
    return wide_exponents((4, 24), torch.bfloat16, 10 * step + rank, spread=6)


@pytest.mark.multiprocess
def test_verify_fsdp2_steps_are_not_stale() -> None:
    """FSDP2 refills its unsharded weights behind the version counter: three steps at W=2 = the same without FSDP."""
    results = run_ranks(run_fsdp, 2, deadline=120.0)
    module = model(torch.bfloat16)
    parameters = list(module.parameters())
    for step in range(3):
        gradients = []
        for rank in range(2):
            y = module(fsdp_batch(step, rank))
            assert_bitwise_equal(results[rank][0][step], y.detach(), f"output of step {step}, rank {rank}")
            gradients.append(torch.autograd.grad(y.float().square().sum(), parameters))
        with torch.no_grad():
            for parameter, a, b in zip(parameters, *gradients, strict=True):
                parameter.add_((a + b) / 2, alpha=-(2.0**-4))
    for rank in range(2):
        for value, parameter in zip(results[rank][1], parameters, strict=True):
            assert_bitwise_equal(value, parameter.detach(), f"weights at the end, rank {rank}")
        assert "is a DTensor; expected a plain parameter" in results[rank][2]
    assert_bits_differ(results[0][0][2], infer(model(torch.bfloat16), fsdp_batch(2, 0)), "the steps must do something")


# --- frozen: no write is lost in silence ----------------------------------------------------------------------------


def test_verify_frozen_module_same_bits() -> None:
    module = model()
    expected = infer(module, X)
    weight = module[0].weight
    assert tbik.freeze(module) is module
    assert isinstance(module[0].weight, FrozenWeight) and isinstance(module[0].weight, torch.nn.Parameter)
    assert module[0].weight is weight, "the same Python object, so that all who hold it are told"
    assert weight.shape == (12, 24) and weight.numel() == 288 and not weight.requires_grad
    assert_bitwise_equal(infer(module, X), expected, "frozen")
    assert tbik.freeze(module) is module
    assert_bitwise_equal(infer(copy.deepcopy(module), X), expected, "a copy")
    assert "FrozenWeight([12, 24]" in repr(weight) and "in_features=24" in repr(module)
    tbik.unfreeze(tbik.unfreeze(module))
    assert type(module[0].weight) is torch.nn.Parameter and module[0].weight is weight and weight.requires_grad
    assert_bitwise_equal(infer(module, X), expected, "thawed")
    module(X).sum().backward()
    assert weight.grad is not None


USES: dict[str, Callable[[torch.nn.Module, Tensor], object]] = {
    "data.copy_": lambda m, w: w.data.copy_(torch.zeros(12, 24)),
    "data =": lambda m, w: setattr(w, "data", torch.zeros(12, 24)),
    "copy_": lambda m, w: w.copy_(torch.zeros(12, 24)),
    "add_": lambda m, w: w.add_(1),
    "index": lambda m, w: w.__setitem__(0, 1.0),
    "foreach": lambda m, w: torch._foreach_mul_([w], 2.0),
    "aten": lambda m, w: torch.ops.aten.mul_(w, 2.0),
    "read": lambda m, w: w + 1,
    "detach": lambda m, w: w.detach(),
    "view": lambda m, w: w.view(-1),
    "numpy": lambda m, w: w.numpy(),
    "storage": lambda m, w: w.untyped_storage(),
    "data_ptr": lambda m, w: w.data_ptr(),
    "requires_grad_": lambda m, w: w.requires_grad_(),
    "grad": lambda m, w: setattr(w, "grad", torch.zeros(12, 24)),
    "linear": lambda m, w: ops.linear(X, w, plan=PLAN),
    "state_dict": lambda m, w: m.state_dict(),
    "save": lambda m, w: torch.save(m, io.BytesIO()),
    "norm": lambda m, w: torch.nn.utils.parameters_to_vector(m.parameters()),
    "init": lambda m, w: torch.nn.init.zeros_(w),
}


@pytest.mark.parametrize("use", list(USES))
def test_verify_frozen_weight_refuses(use: str) -> None:
    module = model()
    expected = infer(module, X)
    weight = module[0].weight
    tbik.freeze(module)
    with pytest.raises(PlanError, match=r"frozen weight (has no values|is not saved)"):
        USES[use](module, weight)
    assert_bitwise_equal(infer(module, X), expected, f"after {use}")


def test_verify_frozen_module_refuses_training() -> None:
    module = tbik.freeze(model())
    with pytest.raises(PlanError, match="frozen.*has no backward"):
        module(X)
    module = tbik.freeze(model().requires_grad_(False))
    infer(module, X)
    module(X)  # nothing asks for a gradient
    with pytest.raises(PlanError, match="frozen.*has no backward"):
        module(X.clone().requires_grad_())


def test_verify_no_packed_route_loses_a_gradient() -> None:
    """x, the weight and the bias: who wants a gradient of any of them through a pack is told."""
    plan = TreePlan(leaves=6)
    w = torch.randn(4, 24)

    def routes(which: str) -> dict[str, Callable[[], object]]:
        """Each packed route where only x, only the weight or only the bias requires grad."""
        x, bias = X.clone().requires_grad_(which == "x"), torch.randn(4).requires_grad_(which == "bias")
        weight = w.clone().requires_grad_(which == "weight")
        packed = ops.pack_weight(weight, plan=plan)

        def frozen(layer: torch.nn.Module) -> torch.nn.Module:
            for parameter in layer.parameters():
                parameter.requires_grad_(which == ("weight" if parameter.dim() == 2 else "bias"))
            return tbik.freeze(layer)

        layers = {
            "Linear": nn.Linear.from_full(w.clone(), bias.detach().clone(), plan=plan),
            "row": nn.RowParallelLinear.from_full(w, bias.detach().clone(), plan=plan),
            "column": nn.ColumnParallelLinear.from_full(w, bias.detach().clone(), plan=plan),
            "group": nn.ColumnParallelGroup.from_full([w, w], [None, bias.detach().clone()], plan=plan),
        }
        calls: dict[str, Callable[[], object]] = {n: functools.partial(frozen(m), x) for n, m in layers.items()}
        calls["operator"] = lambda: ops.linear(x, packed, bias, plan=plan)
        return calls

    for which in ("x", "weight", "bias"):
        for name, call in routes(which).items():
            with torch.no_grad():
                call()
            with pytest.raises(PlanError, match="has no backward"):
                call()
                raise AssertionError(f"{name}: the gradient of {which} is lost")
    for call in routes("nothing").values():
        call()


def test_verify_observers_see_the_packed_operator() -> None:
    module = tbik.freeze(nn.Linear(24, 12, plan=PLAN).requires_grad_(False))
    other = wide_exponents((3, 24), torch.float32, 2, spread=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, X)
    assert_bitwise_equal(traced(other), module(other), "a trace replayed on other values")

    seen: list[str] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))  # type: ignore[operator]

    with Record():
        module(X)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(X)
    assert "tbik.linear_packed.default" in seen
    assert "tbik::linear_packed" in {event.name for event in profile.events()}
    graph = torch.fx.experimental.proxy_tensor.make_fx(module)(X)
    assert_bitwise_equal(graph(other), module(other), "make_fx")


def test_verify_lazily_negated_and_zero_tensors() -> None:
    def negated(*shape: int) -> Tensor:
        value = torch.complex(torch.zeros(shape), wide_exponents(shape, torch.float32, 5, spread=8)).conj().imag
        assert value.is_neg()
        return value

    w, bias, x = negated(4, 24), negated(4), negated(3, 24)
    expected = ops.linear(x.clone(), w.clone(), bias.clone(), plan=PLAN)
    assert_bitwise_equal(ops.linear(x, ops.pack_weight(w, plan=PLAN), bias, plan=PLAN), expected, "packed")
    for layer in (
        nn.Linear.from_full(w, bias, plan=PLAN),
        nn.Linear.from_full(torch.nn.Parameter(w), torch.nn.Parameter(bias), plan=PLAN),
        nn.ColumnParallelLinear.from_full(w, bias, plan=PLAN),
    ):
        assert_bitwise_equal(infer(tbik.freeze(layer), x), expected, "frozen")
    zero = torch._efficientzerotensor(3, 24)
    packed = ops.pack_weight(w, plan=PLAN)
    assert_bitwise_equal(ops.linear(zero, packed, bias, plan=PLAN), bias.expand(3, 4).contiguous(), "zero tensor")


def test_verify_failed_freeze_changes_nothing() -> None:
    """Whatever freeze() refuses, at whichever module: the tree is as it was."""
    first, held, last = (nn.Linear(24, 24, plan=PLAN) for _ in range(3))
    module = torch.nn.ModuleList([first, held, last])
    tbik.freeze(last)
    packs = dict(last.weight._packs)
    view = held.weight.view(-1)  # keeps the weight in use: swap_tensors refuses
    last.parallel = "row"  # another use, hence another pack
    with pytest.raises(PlanError, match="still in use"):
        tbik.freeze(module)
    assert type(first.weight) is type(held.weight) is torch.nn.Parameter
    assert last.weight._packs == packs
    first(X).sum().backward()
    assert first.weight.grad is not None and view.shape == (576,)
    del view
    tbik.freeze(module)
    assert all(isinstance(layer.weight, FrozenWeight) for layer in module)
    tbik.unfreeze(module)
    tbik.freeze(last, release=True)
    last.parallel = None
    with pytest.raises(PlanError, match="released"):
        tbik.freeze(module)
    assert type(first.weight) is torch.nn.Parameter
    # a wrong dtype, found while packing, after a tied weight has been accepted
    tied = Tied()
    wrong = nn.Linear(24, 24, plan=PLAN)
    wrong.compute_dtype = torch.float64
    with pytest.raises(PlanError, match="float64"):
        tbik.freeze(torch.nn.ModuleList([tied, wrong]), allow_tied=True)
    assert tied.head.weight is tied.embedding.weight


def test_verify_gradients_come_back() -> None:
    module = model()
    module(X).sum().backward()
    gradient = module[0].weight.grad.clone()
    tbik.freeze(module)
    assert module[0].weight.grad is None
    tbik.unfreeze(module)
    assert_bitwise_equal(module[0].weight.grad, gradient, "the gradient of before freeze()")


def test_verify_optimizer_cannot_move_a_frozen_weight() -> None:
    """An optimizer made before freeze() holds the Parameter object itself, hence the FrozenWeight."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    module(X).sum().backward()
    tbik.freeze(module)
    expected = infer(module, X)
    module[0].bias.grad = None
    optimizer.step()  # the gradients of the weights are gone
    assert_bitwise_equal(infer(module, X), expected, "after step")
    optimizer.param_groups[0]["params"][0].requires_grad  # noqa: B018  # metadata is readable
    with pytest.raises(PlanError, match="no values"):
        optimizer.param_groups[0]["params"][0].data.mul_(2)
    tbik.unfreeze(module)
    module(X).sum().backward()
    optimizer.step()
    assert_bits_differ(infer(module, X), expected, "thawed, the same optimizer trains the weight")


def test_verify_alias_written_while_frozen() -> None:
    module = model()
    alias, data = module[0].weight.detach(), module[0].weight.data
    tbik.freeze(module)
    expected = infer(module, X)
    data.mul_(2)  # an alias without a version counter: the pack keeps the values of the time of freeze()
    assert_bitwise_equal(infer(module, X), expected, "written through .data taken before")
    alias.mul_(2)
    with pytest.raises(PlanError, match="written to while frozen"):
        infer(module, X)
    tbik.unfreeze(module)
    assert_bitwise_equal(infer(module, X), uncached(module, X), "thawed")
    assert_bits_differ(infer(module, X), expected, "the writes")


def test_verify_packs_are_dropped_on_reload() -> None:
    module = model()
    fresh = {name: torch.randn_like(value) for name, value in module.state_dict().items()}

    def check(what: str) -> None:
        assert type(module[0].weight) is torch.nn.Parameter, what
        assert_bitwise_equal(infer(module, X), uncached(module, X), what)

    before = infer(tbik.freeze(module), X)
    module.load_state_dict(fresh)
    check("load_state_dict")
    assert_bits_differ(infer(module, X), before, "other weights")
    tbik.freeze(module).load_state_dict({k: v.clone() for k, v in fresh.items()}, assign=True)
    check("load_state_dict(assign=True)")
    tbik.freeze(module).load_state_dict({"0.weight": fresh["0.weight"] * 2}, strict=False)
    check("a part of the weights")
    tbik.freeze(module)
    module[0].weight = torch.nn.Parameter(torch.randn(12, 24))
    assert_bitwise_equal(infer(module[0], X), ops.linear(X, module[0].weight, module[0].bias, plan=PLAN).detach())
    tbik.freeze(module).to(torch.bfloat16)
    assert module[0].weight.dtype == torch.bfloat16 and type(module[0].weight) is torch.nn.Parameter
    tbik.freeze(module.float()).share_memory()
    check("_apply")


def test_verify_released_weights() -> None:
    module = model()
    state = {name: value.clone() for name, value in module.state_dict().items()}
    expected = infer(module, X)
    tbik.freeze(module, release=True)
    assert_bitwise_equal(infer(module, X), expected, "released")
    for refused in (lambda: tbik.unfreeze(module), lambda: module.double()):
        with pytest.raises(PlanError, match="released"):
            refused()
    assert_bitwise_equal(infer(module, X), expected, "still frozen")
    module.load_state_dict(state)
    assert type(module[0].weight) is torch.nn.Parameter
    assert_bitwise_equal(infer(module, X), expected, "loaded again")
    tbik.freeze(module, release=True).load_state_dict({"0.weight": state["0.weight"]}, strict=False)
    assert module[2].weight.isnan().all(), "a weight that the state dict lacks cannot pass for a loaded one"


def test_verify_conversion_of_released_tree_is_atomic() -> None:
    """.half(), .to(dtype) and so on ask the whole tree before the first module is converted."""

    def build() -> torch.nn.Module:
        inner = torch.nn.Sequential(torch.nn.LayerNorm(24), nn.Linear(24, 12, plan=PLAN), torch.nn.Linear(12, 12))
        return torch.nn.Sequential(torch.nn.Embedding(5, 24), inner, torch.nn.BatchNorm1d(12)).eval()

    module, tokens = build(), torch.tensor([1, 4, 2])
    state = {name: value.clone() for name, value in module.state_dict().items()}
    expected = infer(module, tokens)
    tbik.freeze(module, release=True)
    copied = copy.deepcopy(module)
    conversions: tuple[Callable[[torch.nn.Module], object], ...] = (
        lambda m: m.half(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.double(),
        lambda m: m.to("meta"),
        lambda m: m.share_memory(),
        tbik.unfreeze,
    )
    for convert in conversions:
        for tree in (module, module[1], module[1][1], copied, copied[1]):
            with pytest.raises(PlanError, match=r"weight \(Linear\) was released.*Nothing was changed"):
                convert(tree)
            for part in (module, copied):
                assert {str(p.dtype) + str(p.device) for p in part.parameters()} == {"torch.float32cpu"}
                assert all(b.dtype != torch.half for b in part.buffers())
                assert_bitwise_equal(infer(part, tokens), expected, "unchanged")
    module[0].half()  # beside the released weight
    assert module[0].weight.dtype == torch.half
    module[0].float()
    module.load_state_dict(state)
    assert_bitwise_equal(infer(module, tokens), expected, "loaded")
    module.double()
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    module.float()
    assert_bitwise_equal(infer(module, tokens), expected, "there and back")
    with pytest.raises(PlanError, match="released"):
        copied.half()
    copy.deepcopy(module)
    torch.save(module, io.BytesIO())


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 24)
        self.head = nn.Linear(24, 30, bias=False, plan=PLAN)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(tokens))
        return y


def test_verify_tied_weights() -> None:
    module, tokens = Tied(), torch.tensor([3, 7])
    expected = infer(module, tokens)
    with pytest.raises(PlanError, match=r"tied to embedding.weight.*allow_tied"):
        tbik.freeze(module)
    with pytest.raises(PlanError, match="tied"):
        tbik.freeze(module, allow_tied=True, release=True)
    tbik.freeze(module, allow_tied=True)
    assert_bitwise_equal(infer(module, tokens), expected, "tied")
    with torch.no_grad():
        module.embedding.weight.mul_(2)
    with pytest.raises(PlanError, match="written to while frozen"):
        infer(module, tokens)
    tbik.unfreeze(module)
    assert module.head.weight is module.embedding.weight
    twins = torch.nn.ModuleList([nn.Linear(24, 30, plan=PLAN), nn.Linear(24, 30, plan=PLAN, parallel="row")])
    twins[1].weight = twins[0].weight
    results = [infer(layer, X) for layer in twins]
    tbik.freeze(twins)
    assert twins[1].weight is twins[0].weight
    for layer, result in zip(twins, results, strict=True):
        assert_bitwise_equal(infer(layer, X), result, "two uses of one weight, two packs")


def test_verify_freeze_refuses_what_it_cannot_pack() -> None:
    with pytest.raises(PlanError, match="no module of tbik.nn"):
        tbik.freeze(torch.nn.Linear(3, 4))
    module = model()
    torch.nn.utils.parametrizations.weight_norm(module[0])
    with pytest.raises(PlanError, match="parametrized|expected a plain parameter"):
        tbik.freeze(module)
    assert type(module[2].weight) is torch.nn.Parameter, "nothing is frozen if something is refused"


def test_verify_compiled_frozen_module_follows_the_weights() -> None:
    """A graph made for one pack must not serve the next."""
    torch._dynamo.reset()
    module = model().requires_grad_(False)
    compiled = torch.compile(module, backend="aot_eager")
    seen = []
    for _ in range(2):
        seen.append(infer(compiled, X))
        assert_bitwise_equal(seen[-1], infer(module, X), "live")
        torch._dynamo.reset()  # a compiled function holds the parameter, and what is held cannot be swapped
        gc.collect()
        tbik.freeze(module)
        assert_bitwise_equal(infer(compiled, X), seen[-1], "frozen")
        tbik.unfreeze(module)
        module[0].weight.data.mul_(-2)
        assert_bitwise_equal(infer(compiled, X), infer(module, X), "thawed and written to")
    assert_bits_differ(seen[0], seen[1], "the write")
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        infer(torch.compile(tbik.freeze(module), backend="aot_eager", fullgraph=True), X)
    torch._dynamo.reset()


def test_verify_compiled_packed_weight_is_guarded() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: linear_function(x, w, plan=PLAN) * 2, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        packed = ops.pack_weight(wide_exponents((4, 24), torch.float32, seed), plan=PLAN)
        with torch.no_grad():
            assert_bitwise_equal(compiled(X, packed), ops.linear(X, packed, plan=PLAN) * 2, f"pack {seed}")
    torch._dynamo.reset()
