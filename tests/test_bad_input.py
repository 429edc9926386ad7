"""What the linear operators and layers are not made for: a clear error that says what would work, or the right bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import assert_bitwise_equal
from cases import wide_exponents
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tbik
from tbik import TreePlan, nn, ops, reference
from tbik.errors import PlanError
from tbik.ops.linear import CoverRun, bias_grad, linear_cover, linear_dw, linear_dx

PLAN = TreePlan(leaves=6)
AMX = TreePlan(leaves=6, leaf="amx")
PLAN64 = TreePlan(leaves=6, acc_dtype="float64")
X, W, B = torch.ones(4, 12), torch.ones(5, 12), torch.ones(5)
X3 = X.view(2, 2, 12)
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def linear(x: Any = X, w: Any = W, bias: Any = None, plan: Any = PLAN, **arguments: Any) -> Callable[[], object]:
    return lambda: ops.linear(x, w, bias, plan=plan, **arguments)


def group(x: Any = X, weights: Any = (W,), biases: Any = None, **arguments: Any) -> Callable[[], object]:
    return lambda: ops.linear_group(x, weights, biases, **{"plan": PLAN, **arguments})


def on_cuda() -> object:
    with FakeTensorMode():
        return ops.linear(torch.empty(4, 12, device="cuda"), torch.empty(5, 12, device="cuda"), plan=AMX)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 12), torch.ones(1, 12)], layout=torch.jagged)


def dtensor() -> object:
    class Sharded(torch.Tensor):
        device_mesh = "mesh of two ranks"

    return ops.linear(X.as_subclass(Sharded), W, plan=PLAN)


def cover(run: CoverRun, x: Tensor = X) -> Callable[[], object]:
    return lambda: linear_cover(x, W, run, plan=PLAN, compute_dtype=F32, parallel=False)


def dx(dy: Any = None, w: Any = W, runs: Any = None, **arguments: Any) -> Callable[[], object]:
    dy = torch.ones(4, 5) if dy is None else dy
    return lambda: linear_dx([dy], [w], runs, **{"plan": PLAN, "compute_dtype": F32, "parallel": False, **arguments})


def dw(dy: Any = X, x: Any = X, **arguments: Any) -> Callable[[], object]:
    return lambda: linear_dw(dy, x, **{"plan": PLAN, "compute_dtype": F32, **arguments})


def columns(weights: Any = (W, W), **arguments: Any) -> Callable[[], object]:
    sizes = [5] * len(weights)
    return lambda: nn.ColumnParallelGroup(list(weights), **{"out_features": sizes, "plan": PLAN, **arguments})


def row(**arguments: Any) -> Callable[[], object]:
    return lambda: nn.RowParallelLinear.from_full(W, **{"plan": PLAN, **arguments})


def operator_on_two_devices(name: str) -> Callable[[], object]:
    key, meta = PLAN.key(), W.to("meta")
    dy = torch.ones(4, 5)
    calls = {
        "linear": lambda o: o.linear(X, meta, None, key, F32, F32, None, False, False),
        "linear_group": lambda o: o.linear_group(X, [W, meta], [], [False, False], key, F32, None, False),
        "linear_packed": lambda o: o.linear_packed(X, 1, B.to("meta"), 5, 0, F32),
        "linear_cover": lambda o: o.linear_cover(X, meta, key, F32, 12, 0, 6, False),
        "linear_dx": lambda o: o.linear_dx([dy], [meta], key, F32, F32, False),
        "linear_dx_cover": lambda o: o.linear_dx_cover([dy], [meta], key, F32, [5], 0, 6, False),
        "linear_dw": lambda o: o.linear_dw(dy, X.to("meta"), None, key, F32),
    }
    return lambda: calls[name](torch.ops.tbik)


PAIRS = "list of pairs of integers, one per rank, got"

REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    # shapes
    "wrong K": (linear(x=torch.ones(4, 11)), r"x \[4, 11\] and w \[5, 12\]"),
    "scalar x": (linear(x=torch.tensor(1.0)), "got a scalar"),
    "1-D w": (linear(w=torch.ones(12)), r"w \[N, K\], got shape \[12\].*w\[None\]"),
    "3-D w": (linear(w=torch.ones(1, 5, 12)), r"w \[N, K\], got shape \[1, 5, 12\]"),
    "bias of another length": (linear(bias=torch.ones(4)), r"bias \[5\], got shape \[4\]"),
    "2-D bias": (linear(bias=torch.ones(1, 5)), r"bias \[5\], got shape \[1, 5\]"),
    "scalar bias": (linear(bias=torch.tensor(1.0)), r"bias \[5\], got shape \[\]"),
    "4-D x": (linear(x=torch.ones(2, 2, 2, 12)), "does not say what a sample is.*sample_offsets"),
    "group with another K": (group(weights=[W, torch.ones(5, 11)]), r"weights\[1\] \[N, K\]"),
    # dtypes
    "x and compute differ": (linear(x=X.bfloat16(), compute_dtype=F32), "x is bfloat16, compute_dtype float32"),
    "x fp32, compute bf16": (linear(compute_dtype=BF16), r"x\.to\(torch\.bfloat16\)"),
    "x bf16, w fp16": (linear(x=X.bfloat16(), w=W.half()), "w is float16, compute_dtype bfloat16.*master weight"),
    "x fp32, w fp64": (linear(w=W.double()), "w is float64, compute_dtype float32"),
    "bias fp64 under fp32": (linear(bias=B.double()), r"bias is float64.*bias\.float\(\)"),
    "fp64 under an fp32 plan": (linear(x=X.double(), w=W.double()), r"TreePlan\(acc_dtype='float64'\)"),
    "fp32 under an fp64 plan": (linear(plan=PLAN64), r"TreePlan\(acc_dtype='float32'\)"),
    "out fp64 from fp32": (linear(out_dtype=F64), "out_dtype is one of.*got torch.float64"),
    "out bf16 from fp64": (linear(X.double(), W.double(), plan=PLAN64, out_dtype=BF16), "out_dtype is one of"),
    "out int": (linear(out_dtype=torch.int32), "out_dtype is one of"),
    "compute int8": (linear(compute_dtype=torch.int8), "compute_dtype is one of"),
    "compute is text": (linear(compute_dtype="bfloat16"), "compute_dtype is one of.*got 'bfloat16'"),
    "int x": (linear(x=X.int()), "got torch.int32; convert it first"),
    "int w": (linear(w=W.long()), "w is bfloat16.*got torch.int64"),
    "bool x": (linear(x=X.bool()), "got torch.bool"),
    "int bias": (linear(bias=B.int()), "bias is bfloat16.*got torch.int32"),
    "complex x": (linear(x=X.to(torch.complex64)), "got torch.complex64"),
    "fp8 w": (linear(w=W.to(torch.float8_e4m3fn)), "got torch.float8_e4m3fn"),
    "quantised w": (linear(w=torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)), "got torch.qint8"),
    # kinds of tensor
    "sparse x": (linear(x=X.to_sparse()), r"layout torch.sparse_coo; use x\.to_dense\(\)"),
    "sparse CSR w": (linear(w=W.to_sparse_csr()), r"layout torch.sparse_csr; use w\.to_dense\(\)"),
    "nested x": (lambda: ops.linear(nested(), W, plan=PLAN), "dense tensor, got layout torch.jagged"),
    "x is a list": (linear(x=[[1.0]]), "x is a tensor, got list"),
    "w is None": (linear(w=None), "w is a tensor, got NoneType"),
    "DTensor": (dtensor, r"DTensor; use x\.to_local\(\) or tbik\.nn"),
    "cuda": (on_cuda, r"leaf 'amx' has kernels on the CPU only, the tensors are on cuda"),
    "meta w": (linear(w=W.to("meta")), "x is on cpu, w on meta"),
    "meta bias": (linear(bias=B.to("meta")), "x is on cpu, bias on meta"),
    # plan
    "plan is a dict": (linear(plan={"leaves": 6}), "tbik.TreePlan, got dict"),
    "plan is a key": (linear(plan=PLAN.key()), "tbik.TreePlan, got {"),
    "plan is None": (linear(plan=None), "tbik.TreePlan, got NoneType"),
    "unknown leaf kind": (lambda: TreePlan(leaf="mma"), "tensor-core leaves"),
    "no leaves": (lambda: TreePlan(leaves=0), "integer 1..4096, got 0"),
    "wire fp16": (lambda: TreePlan(wire_dtype="float16"), "TreePlan.wire_dtype"),
    "unknown parallel": (linear(parallel="tp"), "'row', 'column' or None, got 'tp'"),
    "group in a row": (group(parallel="row"), "a row-parallel linear stands alone"),
    "other order version": (
        lambda: TreePlan.from_key(PLAN.key().replace('"order_version":1', '"order_version":2')),
        "ORDER_VERSION 2 differs",
    ),
    # samples
    "offsets too short": (linear(sample_offsets=[0, 3]), "ascend from 0 to the 4 rows"),
    "offsets too long": (linear(sample_offsets=[0, 5]), "ascend from 0 to the 4 rows"),
    "offsets start late": (linear(sample_offsets=[1, 4]), "ascend from 0"),
    "offsets descend": (linear(sample_offsets=[0, 3, 2, 4]), r"got \[0, 3, 2, 4\]"),
    "no offsets": (linear(sample_offsets=[]), "ascend from 0"),
    "offsets as floats": (linear(sample_offsets=[0.0, 4.0]), "list or tuple of integers"),
    "offsets as a tensor": (linear(sample_offsets=torch.tensor([0, 4])), "list or tuple of integers, got Tensor"),
    "negative offsets": (linear(x=X3, sample_offsets=[0, -1, 4]), "ascend from 0"),
    "offsets of a group": (group(sample_offsets=[0, 9]), "ops.linear_group: sample_offsets ascend"),
    "offsets of dW": (lambda: linear_dw(X, X, plan=PLAN, compute_dtype=F32, sample_offsets=[0, 1]), "ops.linear_dw"),
    # groups
    "empty group": (group(weights=[]), "non-empty list"),
    "group of a tensor": (group(weights=W), "list or tuple of .* got Parameter|list or tuple of .* got Tensor"),
    "biases too few": (group(weights=[W, W], biases=[B]), "one bias .or None. per weight, got 1 for 2"),
    "group bias shape": (group(biases=[torch.ones(6)]), r"bias \[5\], got shape \[6\]"),
    "group dtype mix": (group(weights=[W, W.half()], x=X.bfloat16()), r"weights\[1\] is float16"),
    # runs of leaves
    "run beyond the leaves": (cover(CoverRun(12, 0, 7)), r"leaves within \[0, 6\], got \[0, 7\)"),
    "run backwards": (cover(CoverRun(12, 4, 2)), r"got \[4, 2\)"),
    "slice cuts a leaf": (cover(CoverRun(24, 0, 2)), r"leaves \[0, 2\) of a contraction of 24 are 8 long, x has 12"),
    "dX without members": (lambda: linear_dx([], [], plan=PLAN, compute_dtype=F32, parallel=True), "one grad_output"),
    "dX of another N": (lambda: linear_dx([X], [W], plan=PLAN, compute_dtype=F32, parallel=True), "member 0"),
    "dW of other rows": (lambda: linear_dw(X, X3, plan=PLAN, compute_dtype=F32), r"got \[4, 12\] and \[2, 2, 12\]"),
    "dW of ints": (lambda: linear_dw(X.int(), X, plan=PLAN, compute_dtype=F32), "dy is bfloat16.*got torch.int32"),
    "dX in int8": (lambda: linear_dx([X], [W.T], plan=PLAN, compute_dtype=torch.int8, parallel=True), "compute_dtype"),
    "dX of differing runs": (
        lambda: linear_dx(
            [torch.ones(4, 1)] * 2,
            [torch.ones(1, 12)] * 2,
            [CoverRun(6, 0, 1), CoverRun(6, 1, 2)],
            plan=PLAN,
            compute_dtype=F32,
            parallel=True,
        ),
        "all with the same leaves",
    ),
    "dX float64 under fp32": (dx(compute_dtype=F64), r"TreePlan\(acc_dtype='float64'\)"),
    "dX fp32 under float64": (dx(plan=PLAN64), r"TreePlan\(acc_dtype='float32'\)"),
    "dX compute None": (dx(compute_dtype=None), "ops.linear_dx: compute_dtype is one of"),
    "dX of a float64 dY": (dx(torch.ones(4, 5, dtype=F64)), r"grad_outputs\[0\] is float64, which this plan rounds"),
    "dX of a float64 w": (dx(w=W.double()), r"weights\[0\] is float64, compute_dtype float32"),
    "dX of fp16 w in bf16": (dx(w=W.half(), compute_dtype=BF16), r"weights\[0\] is float16"),
    "dX out int": (dx(out_dtype=torch.int32), "ops.linear_dx: out_dtype is one of"),
    "dX out float64": (dx(out_dtype=F64), "ops.linear_dx: out_dtype is one of"),
    "dX meta w": (dx(w=W.to("meta")), r"grad_outputs\[0\] is on cpu, weights\[0\] on meta"),
    "dX meta dY": (dx(torch.ones(4, 5, device="meta")), r"on meta, weights\[0\] on cpu"),
    "dX scalar dY": (dx(torch.tensor(1.0)), r"member 0: expected dY \[\.\.\., N\]"),
    "dX dY is a list": (dx([1.0]), r"grad_outputs\[0\] is a tensor, got list"),
    "dX w is None": (dx(w=None), r"weights\[0\] is a tensor, got NoneType"),
    "dX of a tensor": (
        lambda: linear_dx(X[None], W[None], plan=PLAN, compute_dtype=F32, parallel=False),
        "grad_outputs is a list or tuple, got Tensor",
    ),
    "dX other rows": (
        lambda: linear_dx([torch.ones(4, 5), torch.ones(3, 5)], [W, W], plan=PLAN, compute_dtype=F32, parallel=False),
        "member 1",
    ),
    "dX run is a tuple": (dx(runs=[(5, 0, 6)]), r"a run is a CoverRun\(length, lo, hi\)"),
    "dX runs is one run": (dx(runs=5), "runs is a list or tuple, got int"),
    "dX cover with out_dtype": (dx(runs=[CoverRun(5, 0, 6)], out_dtype=BF16), "a cover leaves in float32"),
    "dX parallel is text": (dx(parallel="bogus"), "parallel is True or False, got 'bogus'"),
    "dW float64 under fp32": (dw(X.double(), X.double(), compute_dtype=F64), r"TreePlan\(acc_dtype='float64'\)"),
    "dW fp32 under float64": (dw(plan=PLAN64), r"TreePlan\(acc_dtype='float32'\)"),
    "dW of a float64 dY": (dw(X.double()), "dy is float64, which this plan rounds"),
    "dW x of another dtype": (dw(x=X.bfloat16()), "x is bfloat16, compute_dtype float32"),
    "dW of scalars": (dw(torch.tensor(1.0), torch.tensor(1.0)), "got a scalar"),
    "dW meta dY": (dw(X.to("meta")), "is on cpu, dy on meta"),
    "dW dY is a list": (dw([1.0]), "dy is a tensor, got list"),
    "dW x is None": (dw(x=None), "x is a tensor, got NoneType"),
    "dW sparse": (dw(X.to_sparse()), r"use dy\.to_dense\(\)"),
    "dbias of float64 under fp32": (lambda: bias_grad(X.double(), plan=PLAN), "dy is float64, which this plan rounds"),
    "dbias of ints": (lambda: bias_grad(X.int(), plan=PLAN), "got torch.int32"),
    "dbias of None": (lambda: bias_grad(None, plan=PLAN), "dy is a tensor, got NoneType"),
    "dbias of a scalar": (lambda: bias_grad(torch.tensor(1.0), plan=PLAN), "got a scalar"),
    "cover run is a tuple": (cover((12, 0, 6)), r"a run is a CoverRun\(length, lo, hi\)"),
    "cover run of floats": (cover(CoverRun(12, 0, 6.0)), "CoverRun.* of integers"),
    "cover x is None": (cover(CoverRun(12, 0, 6), None), "x is a tensor, got NoneType"),
    "cover parallel is text": (
        lambda: linear_cover(X, W, CoverRun(12, 0, 6), plan=PLAN, compute_dtype=F32, parallel="row"),
        "parallel is True or False",
    ),
    "two devices, linear": (operator_on_two_devices("linear"), "on cpu and meta"),
    "two devices, linear_group": (operator_on_two_devices("linear_group"), "on cpu and meta"),
    "two devices, linear_packed": (operator_on_two_devices("linear_packed"), "on cpu and meta"),
    "two devices, linear_cover": (operator_on_two_devices("linear_cover"), "on cpu and meta"),
    "two devices, linear_dx": (operator_on_two_devices("linear_dx"), "on cpu and meta"),
    "two devices, linear_dx_cover": (operator_on_two_devices("linear_dx_cover"), "on cpu and meta"),
    "two devices, linear_dw": (operator_on_two_devices("linear_dw"), "on cpu and meta"),
    # packs and layers
    "pack for no place": (lambda: ops.pack_weight(W, plan=PLAN, parallel="bogus"), "'row', 'column' or None"),
    "pack run is a tuple": (lambda: ops.pack_weight(W, plan=PLAN, run=(12, 0, 6)), "a run is a CoverRun"),
    "pack float64 under fp32": (
        lambda: ops.pack_weight(W.double(), plan=PLAN),
        r"TreePlan\(acc_dtype='float64'\)",
    ),
    "pack: 4-D x": (
        lambda: ops.linear(torch.ones(2, 2, 2, 12), ops.pack_weight(W, plan=PLAN), plan=PLAN),
        "does not say what a sample is",
    ),
    "pack: offsets": (
        lambda: ops.linear(X, ops.pack_weight(W, plan=PLAN), plan=PLAN, sample_offsets=[0, 9]),
        "ascend from 0 to the 4 rows",
    ),
    "freeze None": (lambda: tbik.freeze(None), "freeze: expected a torch.nn.Module, got NoneType"),
    "unfreeze a list": (lambda: tbik.unfreeze([]), "unfreeze: expected a torch.nn.Module, got list"),
    "layer of text": (lambda: nn.Linear("a", 5, plan=PLAN), "in_features is an integer >= 0, got 'a'"),
    "layer of -1": (lambda: nn.Linear(5, -1, plan=PLAN), "out_features is an integer >= 0, got -1"),
    "layer of ints": (lambda: nn.Linear(3, 5, plan=PLAN, dtype=torch.int32), "got torch.int32"),
    "layer of an int weight": (lambda: nn.Linear.from_full(W.int(), plan=PLAN), "got torch.int32"),
    "layer, compute int": (lambda: nn.Linear(3, 5, plan=PLAN, compute_dtype=torch.int32), "compute_dtype is one of"),
    "layer, out text": (lambda: nn.Linear(3, 5, plan=PLAN, out_dtype="x"), "out_dtype is one of.*got 'x'"),
    "layer, fp64 under fp32": (lambda: nn.Linear(3, 5, plan=PLAN, dtype=F64), r"TreePlan\(acc_dtype='float64'\)"),
    "layer, fp16 in bf16": (lambda: nn.Linear.from_full(W.half(), plan=PLAN, compute_dtype=BF16), "float16"),
    "row layer, fp64 under fp32": (
        lambda: nn.RowParallelLinear.from_full(W.double(), plan=PLAN),
        r"TreePlan\(acc_dtype='float64'\)",
    ),
    "row layer, out fp64": (row(out_dtype=F64), "out_dtype is one of"),
    "row layer, compute text": (row(compute_dtype="bf16"), "compute_dtype is one of"),
    "head of 0": (row(head_dim=0), "head_dim is an integer >= 1, got 0"),
    "head of text": (row(head_dim="4"), "head_dim is an integer >= 1, got '4'"),
    "runs is a number": (row(runs=5), f"runs is a {PAIRS} 5"),
    "runs of numbers": (row(runs=[5]), f"runs is a {PAIRS}"),
    "runs of floats": (row(runs=[(0.2, 6.7)]), f"runs is a {PAIRS}"),
    "held rows of numbers": (columns([W], held_rows=[5]), rf"held_rows\[0\] is a {PAIRS} 5"),
    "held rows of floats": (columns([W], held_rows=[[(0, 5.5)]]), rf"held_rows\[0\] is a {PAIRS}"),
    "held rows is a number": (columns([W], held_rows=5), "held_rows is a list"),
    "bounds are None": (lambda: nn.runs_of_rows(PLAN, 12, None), "bounds is a list or tuple of integers"),
    "bounds of floats": (lambda: nn.runs_of_rows(PLAN, 12, [2.0, 12]), "bounds is a list or tuple of integers"),
    "full biases too few": (
        lambda: nn.ColumnParallelGroup.from_full([W, W], [B], plan=PLAN),
        "one bias .or None. per weight, got 1 for 2",
    ),
    "columns of a tensor": (lambda: nn.ColumnParallelGroup.from_full(W[None], plan=PLAN), "list or tuple of"),
    "columns of a scalar": (columns([torch.tensor(1.0)]), r"weights\[0\] \[N, K\], got \[\]"),
    "columns of ints": (columns([W.int()]), "got torch.int32"),
    "columns of two dtypes": (columns([W.bfloat16(), W]), "bfloat16, torch.float32; say compute_dtype"),
    "names twice": (columns(names=["a", "a"]), r"all different, got \['a', 'a'\]"),
    "name with a dot": (columns(names=["a.b", "c"]), "cannot be called 'weight_a.b'"),
    "name that is no text": (columns(names=[1, 2]), "names are strings"),
    "name of a method": (columns(names=["of", "b"]), "cannot be called 'weight_of'"),
    "name of an attribute": (columns(names=["names", "b"]), "cannot be called 'weight_names'"),
    "names too few": (columns(names=["a"]), "names is a list with an entry per weight"),
    "sizes too few": (columns(out_features=[5]), "out_features is a list with an entry per weight"),
    "sizes of text": (columns(out_features=["5", "5"]), "out_features are integers"),
    "pack of a vector": (lambda: ops.pack_weight(W[0], plan=PLAN), r"expected w \[N, K\]"),
    "pack on meta": (lambda: ops.pack_weight(W.to("meta"), plan=PLAN), "expected a CPU tensor, got meta"),
    "pack of int": (lambda: ops.pack_weight(W.int(), plan=PLAN), "got torch.int32"),
    "layer without plan": (lambda: nn.Linear(3, 4, plan=None), "nn.Linear: plan is a tbik.TreePlan"),
    "layer, fp64 bias": (lambda: nn.Linear.from_full(W, B.double(), plan=PLAN), "bias is float64"),
    "row layer, fp64 bias": (lambda: nn.RowParallelLinear.from_full(W, B.double(), plan=PLAN), "bias is float64"),
    "layer, wrong x dtype": (lambda: nn.Linear(12, 4, plan=PLAN)(X.bfloat16()), "x is bfloat16, compute_dtype float32"),
    "row that cuts a leaf": (lambda: nn.runs_of_rows(PLAN, 12, [5, 12]), "row 5 cuts a leaf"),
    "TP that cuts a head": (
        lambda: nn.ColumnParallelLinear.from_full(torch.ones(12, 3), plan=PLAN, head_dim=8),
        "cut a head of 8",
    ),
    "runs of another plan": (
        lambda: nn.RowParallelLinear.from_full(W, plan=PLAN, runs=[(0, 8)]),
        "do not cover the 6 leaves",
    ),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_verify_refused(case: str) -> None:
    call, text = REFUSED[case]
    with pytest.raises(PlanError, match=text) as caught:
        call()
    assert len(str(caught.value)) < 400, "a message, not a dump"


# --- odd, but right -------------------------------------------------------------------------------------------------


def test_verify_fake_cuda_tensors_stay_on_cuda() -> None:
    """torch.compile traces an operator with CUDA kernels on a machine that has no GPU."""
    with FakeTensorMode():
        y = ops.rms_norm(torch.empty(4, 12, device="cuda"), torch.empty(12, device="cuda"), 1e-6)
    assert (y.shape, y.dtype, y.device.type) == ((4, 12), F32, "cuda")


def pair(m: int, n: int, k: int, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor]:
    return wide_exponents((m, k), dtype, 1), wide_exponents((n, k), dtype, 2)


def strided() -> tuple[Tensor, Tensor]:
    x, w = pair(8, 10, 24)
    return x[::2, ::2], w.T.contiguous().T[1::3, ::2]


def non_finite(*values: float) -> tuple[Tensor, Tensor]:
    x, w = pair(4, 3, 12)
    x[1, 5], w[2, 7] = values[0], values[-1]
    return x, w


ODD: dict[str, tuple[Tensor, Tensor]] = {
    "K = 0": pair(3, 4, 0),
    "M = 0": pair(0, 4, 12),
    "N = 0": pair(3, 0, 12),
    "nothing at all": pair(0, 0, 0),
    "K = 1 < leaves": pair(3, 4, 1),
    "K < leaves": pair(3, 4, 5),
    "K prime": pair(3, 4, 127),
    "one row": (pair(1, 4, 12)[0][0], pair(1, 4, 12)[1]),
    "strided": strided(),
    "expanded": (pair(3, 4, 12)[0][:, :1].expand(3, 12), pair(3, 4, 12)[1]),
    "Inf": non_finite(float("inf")),
    "-Inf and NaN": non_finite(float("-inf"), float("nan")),
    "NaN": non_finite(float("nan")),
    "Inf times zero": (torch.tensor([[float("inf"), 1.0]]), torch.tensor([[0.0, 1.0]])),
    "Inf minus Inf": (torch.full((1, 12), float("inf")), torch.tensor([[1.0, -1.0] * 6])),
    "overflow": (torch.full((1, 12), 3e38), torch.full((1, 12), 2.0)),
    "subnormal": (torch.full((2, 12), 1e-40), torch.ones(3, 12)),
    "product subnormal": (torch.full((2, 12), 1e-30), torch.full((3, 12), 1e-12)),
    "-0": (torch.full((2, 12), -0.0), torch.ones(3, 12)),
    "fp16 subnormal": (torch.full((2, 12), 6e-8, dtype=F16), torch.ones(3, 12, dtype=F16)),
    "fp16 overflow": (torch.full((1, 12), 6e4, dtype=F16), torch.ones(1, 12, dtype=F16)),
    "bf16 NaN payload": (torch.tensor([[0x7FA5] * 12], dtype=torch.int16).view(BF16), torch.ones(2, 12, dtype=BF16)),
    "unaligned storage": (torch.randn(49)[1:].view(4, 12), torch.randn(37)[1:].view(3, 12)),
}


@pytest.mark.parametrize("case", list(ODD))
def test_verify_odd_input_has_the_right_bits(case: str) -> None:
    x, w = ODD[case]
    for bias in (None, torch.ones(w.shape[0])):
        y = ops.linear(x, w, bias, plan=PLAN)
        assert_bitwise_equal(y, reference.linear(x, w, PLAN, bias, out_dtype=x.dtype), case)
    a, b, c = (t.detach().clone().requires_grad_() for t in (x, w, torch.ones(w.shape[0])))
    y = ops.linear(a, b, c, plan=PLAN)
    dy = torch.ones_like(y)
    y.backward(dy)
    offsets = [0, x.shape[0] if x.dim() > 1 else 1]
    assert_bitwise_equal(a.grad, reference.linear_dx([dy], [w], PLAN, out_dtype=x.dtype), f"{case}, dX")
    rows = [t if t.dim() > 1 else t[None] for t in (dy, x)]
    dw = reference.linear_dw(*rows, offsets, PLAN)
    assert_bitwise_equal(linear_dw(dy, x, plan=PLAN, compute_dtype=x.dtype), dw, f"{case}, dW")
    assert c.grad is not None and c.grad.shape == (w.shape[0],)


def test_verify_bias_in_every_dtype() -> None:
    x, w = pair(3, 4, 12)
    for dtype in (F32, BF16, F16):
        bias = torch.randn(4).to(dtype)
        assert_bitwise_equal(ops.linear(x, w, bias, plan=PLAN), reference.linear(x, w, PLAN, bias), str(dtype))


def test_verify_meta_tensors_give_shapes() -> None:
    x, w = torch.empty(2, 3, 12, device="meta", requires_grad=True), torch.empty(5, 12, device="meta")
    y = ops.linear(x, w.requires_grad_(), plan=PLAN, out_dtype=F32)
    assert y.device.type == "meta" and y.shape == (2, 3, 5)
    y.backward(torch.empty_like(y))
    assert x.grad.shape == x.shape and w.grad.shape == w.shape
    assert [y.shape for y in ops.linear_group(x, [w, w], plan=PLAN)] == [(2, 3, 5)] * 2


def test_verify_a_batch_without_samples() -> None:
    x, w, b = torch.ones(0, 7, 12, requires_grad=True), W.clone().requires_grad_(), B.clone().requires_grad_()
    y = ops.linear(x, w, b, plan=PLAN)
    assert y.shape == (0, 7, 5)
    y.sum().backward()
    assert_bitwise_equal(w.grad, torch.zeros(5, 12))
    assert_bitwise_equal(b.grad, torch.zeros(5))
    empty = ops.linear(torch.ones(0, 12), w, plan=PLAN, sample_offsets=[0])
    assert empty.shape == (0, 5)


def test_verify_at_least_forty_cases() -> None:
    assert len(REFUSED) + len(ODD) >= 40
