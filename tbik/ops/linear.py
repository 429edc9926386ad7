"""The contractions of a linear layer as torch operators, forward and backward by the canonical tree.

    y  = cast(root over the leaves of K of x W^T + bias)          dX = cast(root over the leaves of N of dY W)
    dW = root over samples of the root over blocks of 512 tokens of dY^T x          dbias: the same with x = 1

Suffixes: M rows (tokens), K input features, N output features, C nodes of a cover. `lead` = the axes of x before K.
Specification: ORDER.md, A1-A7, A13, L1-L4, S1, S2. The operators live in torch.ops.tbik; they take the plan as its key,
are functional, and know the CPU, CUDA (tbik.kernels; not yet measured on a GPU) and, shapes only, the meta device.
They have no autocast rule: autocast changes nothing.

Bits: deterministic, batch-invariant and layout-invariant (tests/test_linear.py); `torch.compile` keeps them
(tests/test_linear.py::test_verify_compiled_equals_eager). What Inductor makes of the code around an operator is its
own: in bf16 it keeps fp32 between fused operations unless torch._inductor.config.emulate_precision_casts is True.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tbik import _C, devices, tree
from tbik.errors import PlanError
from tbik.plan import TreePlan

TOKENS_PER_BLOCK = 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_NARROW = DTYPES[:3]
DEVICES = ("cpu", "meta")
LINEAR_DEVICES = devices.CPU_AND_CUDA

Parallel = Literal["row", "column"]

# --- public functions: every refusal happens here, before any arithmetic --------------------------------------------


def linear(
    x: Tensor,
    w: Tensor | PackedWeight,
    bias: Tensor | None = None,
    *,
    plan: TreePlan,
    compute_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    sample_offsets: Sequence[int] | None = None,
    parallel: Parallel | None = None,
) -> Tensor:
    """y = cast(x W^T + bias): one tree over K; dX is one tree over N, dW and dbias are trees over samples.

    x [..., K] in compute_dtype; w [N, K]; bias [N], added in acc_dtype after the root -> y [..., N] in out_dtype.
    compute_dtype: dtype the products are formed from, x.dtype by default. w may be an fp32 master weight (rounded to
        compute_dtype inside, ties to even) or hold fewer bits than compute_dtype (converted exactly).
    out_dtype: x.dtype by default; float32 for lm_head. A dY in another dtype than compute_dtype is not rounded: the
        backward chains then take dY, x and the weight rounded to compute_dtype, all converted exactly to acc_dtype.
    sample_offsets: row offsets of the samples, 0 first, the number of rows last, empty samples allowed. By default
        x [B, T, K] is B samples and x [M, K] or [K] one. Only dW and dbias depend on it.
    parallel: "row" if some layout puts the forward tree on a wire, "column" if it does so with the tree of dX, None if
        neither: plan.wire_dtype rounds that tree, with and without ranks (A6).

    Gradients: dX in x.dtype; dW and dbias in acc_dtype, unrounded. The autograd engine casts them to a parameter that
    is not in acc_dtype: keep an fp32 master weight where micro-batches are added up. Second and forward-mode
    derivatives and torch.func are refused.
    Errors: PlanError. Bits: layout-invariant and batch-invariant.
    """
    if type(w) is PackedWeight and sample_offsets is None and _is_simple_packed(x, w, bias, plan, compute_dtype):
        out = x.dtype if out_dtype is None else out_dtype
        simple = w.whole and out in _NARROW and parallel in (None, "row", "column")
        if simple and w.rounds == _rounds(plan, parallel == "row"):
            return _packed_root(x, _packs[w.handle], bias, w.shape[0], out)
    where = "ops.linear"
    key = _plan_key(where, plan)
    compute, out = require_linear(
        where, x, w, bias, plan, compute_dtype, out_dtype=out_dtype, sample_offsets=sample_offsets, parallel=parallel
    )
    if isinstance(w, PackedWeight):
        return _call_packed(x, w, bias, 0, out)
    offsets = None if sample_offsets is None else list(sample_offsets)
    y: Tensor = _linear(x, w, bias, key, compute, out, offsets, parallel == "row", parallel == "column")
    return y


def linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    plan: TreePlan,
    compute_dtype: torch.dtype | None = None,
    sample_offsets: Sequence[int] | None = None,
    parallel: Parallel | None = "column",
) -> tuple[Tensor, ...]:
    """y_g = cast(x W_g^T + bias_g) for the linears g that share x; dX = cast(ONE tree over all of them) (L2).

    x [..., K]; weights [N_g, K]; biases [N_g] or None -> y_g [..., N_g] in x.dtype. Leaf i of dX is one chain: leaf i
    of member 0, then of member 1, ..., each cut by its own N_g. parallel: "column" if some layout puts that tree on a
    wire, else None. The rest as in `linear`, whose forward bits these are. Bits: layout-invariant and batch-invariant.
    """
    where = "ops.linear_group"
    key = _plan_key(where, plan)
    compute, _ = _require_dtypes(where, x, plan, compute_dtype, None)
    if parallel not in (None, "column"):
        raise PlanError(f"{where}: parallel is 'column' or None, got {parallel!r}; a row-parallel linear stands alone")
    biases = require_members(where, weights, biases)
    for g, (w, bias) in enumerate(zip(weights, biases, strict=True)):
        _require_weight(where, f"weights[{g}]", w, x, compute)
        _require_bias_beside(where, bias, w.shape[0], x, plan)
    require_samples(where, x, sample_offsets)
    present = [bias for bias in biases if bias is not None]
    has_bias = [bias is not None for bias in biases]
    offsets = None if sample_offsets is None else list(sample_offsets)
    outputs = _linear_group(x, list(weights), present, has_bias, key, compute, offsets, parallel == "column")
    return tuple(outputs)


class CoverRun(NamedTuple):
    """The leaves [lo, hi) of a contraction of `length`, as one rank holds them."""

    length: int
    lo: int
    hi: int


def linear_cover(
    x: Tensor, w: Tensor | PackedWeight, run: CoverRun, *, plan: TreePlan, compute_dtype: torch.dtype, parallel: bool
) -> Tensor:
    """The cover of the leaves [lo, hi) of y = x W^T over run.length input features; no bias, no cast, no autograd.

    x [..., k], w [N, k] with k = cut(hi) - cut(lo), the slice this rank holds -> [C, ..., N] in acc_dtype, the nodes of
    tree.cover(lo, hi). parallel: plan.wire_dtype rounds leaves and nodes. Bits: layout-invariant.
    """
    if type(w) is PackedWeight and type(parallel) is bool and type(run) is CoverRun and run == w.run:
        simple = _is_simple_packed(x, w, None, plan, compute_dtype)
        if simple and w.rounds == _rounds(plan, parallel):
            return _packed_kernel(x, w.handle, None, w.shape[0], w.num_nodes, torch.float32)
    where = "ops.linear_cover"
    key = _plan_key(where, plan)
    compute, _ = _require_dtypes(where, x, plan, compute_dtype, None)
    _require_flag(where, "parallel", parallel)
    _require_run(where, plan, run, "x", x.shape[-1])
    if isinstance(w, PackedWeight):
        _require_pack(where, w, x, None, plan, compute, run, parallel)
        return _call_packed(x, w, None, _num_nodes(run), acc_dtype(plan))
    _require_weight(where, "w", w, x, compute)
    cover: Tensor = _linear_cover(x, w, key, compute, *run, parallel)
    return cover


def linear_dx(
    grad_outputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    runs: Sequence[CoverRun] | None = None,
    *,
    plan: TreePlan,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype | None = None,
    parallel: bool,
) -> Tensor:
    """dX = cast(ONE tree over the leaves of all members of dY_g W_g), or the cover of a run of its leaves; no autograd.

    grad_outputs [..., N_g], weights [N_g, K] -> [..., K] in out_dtype (compute_dtype by default). With runs, one per
    member, all with the same leaves: the slices [..., n_g] and [n_g, K] this rank holds -> [C, ..., K] in acc_dtype.
    Bits: layout-invariant.
    """
    where = "ops.linear_dx"
    key = _plan_key(where, plan)
    for name, value in (("grad_outputs", grad_outputs), ("weights", weights)):
        _require_list(where, name, value)
    if not weights or len(weights) != len(grad_outputs):
        raise PlanError(f"{where}: expected one grad_output per weight, got {len(grad_outputs)} and {len(weights)}")
    _require_compute(where, compute_dtype, plan)
    _require_flag(where, "parallel", parallel)
    for g, (dy, w) in enumerate(zip(grad_outputs, weights, strict=True)):
        _require_operand(where, f"grad_outputs[{g}]", dy, grad_outputs[0], plan)
        _require_dense(where, f"weights[{g}]", w, LINEAR_DEVICES)
        _require_same_device(where, "grad_outputs[0]", grad_outputs[0], f"weights[{g}]", w)
        _require_weight_dtype(where, f"weights[{g}]", w.dtype, compute_dtype)
        lead = grad_outputs[0].shape[:-1]
        if w.dim() != 2 or dy.shape != (*lead, w.shape[0]) or w.shape[1] != weights[0].shape[1]:
            raise PlanError(f"{where}: member {g}: expected dY [..., N] and W [N, K], got {_shape(dy)} and {_shape(w)}")
    if runs is None:
        out = _require_out(where, compute_dtype if out_dtype is None else out_dtype, plan)
        dx: Tensor = _linear_dx(list(grad_outputs), list(weights), key, compute_dtype, out, parallel)
        return dx
    if out_dtype is not None:
        raise PlanError(f"{where}: a cover leaves in {plan.acc_dtype}; out_dtype belongs to a whole dX, without runs")
    _require_list(where, "runs", runs)
    if len(runs) != len(weights):
        raise PlanError(f"{where}: expected one run per member, all with the same leaves, got {list(runs)}")
    for g, (run, w) in enumerate(zip(runs, weights, strict=True)):
        _require_run(where, plan, run, f"weights[{g}]", w.shape[0])
    if any(run[1:] != runs[0][1:] for run in runs):
        raise PlanError(f"{where}: expected one run per member, all with the same leaves, got {list(runs)}")
    lengths = [run.length for run in runs]
    lo, hi = runs[0][1:]
    dx = _linear_dx_cover(list(grad_outputs), list(weights), key, compute_dtype, lengths, lo, hi, parallel)
    return dx


def linear_dw(
    dy: Tensor, x: Tensor, *, plan: TreePlan, compute_dtype: torch.dtype, sample_offsets: Sequence[int] | None = None
) -> Tensor:
    """dW = root over samples, blocks of 512 tokens, tokens of dY^T x (S1); no autograd.

    dy [..., N], x [..., K] -> [N, K] in acc_dtype, rounded by plan.grad_wire_dtype from the sample leaf upwards.
    Bits: layout-invariant; dW of 2^j samples that start at a multiple of 2^j is a node of the tree over the batch.
    """
    where = "ops.linear_dw"
    key = _plan_key(where, plan)
    _require_dtypes(where, x, plan, compute_dtype, None)
    _require_operand(where, "dy", dy, x, plan)
    if dy.dim() < 1 or dy.shape[:-1] != x.shape[:-1]:
        raise PlanError(f"{where}: expected dy [..., N] and x [..., K], got {_shape(dy)} and {_shape(x)}")
    require_samples(where, x, sample_offsets)
    offsets = None if sample_offsets is None else list(sample_offsets)
    dw: Tensor = _linear_dw(dy, x, offsets, key, compute_dtype)
    return dw


def bias_grad(dy: Tensor, *, plan: TreePlan, sample_offsets: Sequence[int] | None = None) -> Tensor:
    """dbias[n] = dW[n] for x = 1 (S1). dy [..., N] -> [N] in acc_dtype; no autograd. Bits: layout-invariant."""
    where = "ops.bias_grad"
    key = _plan_key(where, plan)
    _require_operand(where, "dy", dy, dy, plan)
    if dy.dim() < 1:
        raise PlanError(f"{where}: expected dy [..., N], got a scalar")
    require_samples(where, dy, sample_offsets)
    offsets = None if sample_offsets is None else list(sample_offsets)
    db: Tensor = _bias_grad(dy, offsets, key)
    return db


# --- packed weights: inference only ---------------------------------------------------------------------------------


class PackedWeight:
    """W [N, k] in the kernel's own layout, for one plan, one compute_dtype and one run of leaves. Immutable.

    It holds a copy of the values: writes to the tensor it was made of do not reach it. Who hands it out must see to
    that (tbik.packing). Operators name it by `handle`, a number that is never used twice.
    """

    __slots__ = (
        "__weakref__",
        "compute_dtype",
        "handle",
        "nbytes",
        "num_nodes",
        "plan",
        "rounds",
        "run",
        "shape",
        "trainable",
        "whole",
    )

    def __init__(self, w: Tensor, run: CoverRun, plan: TreePlan, compute_dtype: torch.dtype, rounds: bool) -> None:
        cuts = _local_cuts(plan, run)
        packed = _C.pack([w.detach().resolve_neg()], False, [cuts], _name(compute_dtype))
        self.whole, self.num_nodes = run == CoverRun(w.shape[1], 0, plan.leaves), _num_nodes(run)
        root = _run_schedule(run.lo, run.hi, plan.leaves, True, rounds) if self.whole else None
        of_kernel = ([cuts], _name(compute_dtype), plan.leaf)
        entry = _Pack(packed, cuts, compute_dtype, plan.leaves, run, rounds, root, of_kernel)
        self.handle = next(_handles)
        self.shape, self.nbytes = w.shape, int(packed.nbytes)
        self.plan, self.run, self.compute_dtype, self.rounds = plan, run, compute_dtype, rounds
        self.trainable = w.requires_grad
        _packs[self.handle] = entry
        weakref.finalize(self, _packs.pop, self.handle, None).atexit = False

    def __repr__(self) -> str:
        return (
            f"PackedWeight({list(self.shape)}, leaves [{self.run.lo}, {self.run.hi}) of {self.plan.leaves}, "
            f"{self.compute_dtype}, {self.nbytes} bytes)"
        )

    def __deepcopy__(self, memo: Any) -> PackedWeight:
        return self  # immutable

    def __reduce__(self) -> NoReturn:
        raise PlanError("PackedWeight: a pack is not saved; save the weight (tbik.unfreeze first) and pack it again")


def pack_weight(
    w: Tensor,
    *,
    plan: TreePlan,
    compute_dtype: torch.dtype | None = None,
    parallel: Parallel | None = None,
    run: CoverRun | None = None,
) -> PackedWeight:
    """Packs W [N, K], or the slice [N, k] of a run of leaves, once; `linear` takes it in place of the tensor.

    compute_dtype: w.dtype by default. parallel: as in `linear`, which must be called with the same. Same bits as the
    tensor (tests/test_packing.py::test_verify_packed_equals_unpacked). A pack has no backward: where x, the bias or w
    itself would need a gradient, the call raises.
    """
    where = "ops.pack_weight"
    _plan_key(where, plan)
    _require_dense(where, "w", w, LINEAR_DEVICES)
    if w.device.type != "cpu":
        raise PlanError(f"{where}: expected a CPU tensor, got {w.device}")
    _require_leaf(where, plan, w)
    if w.dim() != 2:
        raise PlanError(f"{where}: expected w [N, K], got {_shape(w)}")
    compute = w.dtype if compute_dtype is None else compute_dtype
    _require_compute(where, compute, plan)
    _require_weight_dtype(where, "w", w.dtype, compute)
    _require_parallel(where, parallel)
    run = CoverRun(w.shape[1], 0, plan.leaves) if run is None else run
    _require_run(where, plan, run, "w", w.shape[1])
    return PackedWeight(w, run, plan, compute, _rounds(plan, parallel == "row"))


class _Pack(NamedTuple):
    packed: _C.Packed
    cuts: list[int]
    compute: torch.dtype
    leaves: int
    run: CoverRun
    rounds: bool
    root: _C.Schedule | None
    """Of a whole weight."""
    of_kernel: tuple[list[list[int]], str, str]
    """Cuts, compute dtype and leaf kind as the kernel takes them."""


_handles = itertools.count(1)
_packs: dict[int, _Pack] = {}


def _is_simple_packed(
    x: Tensor, w: PackedWeight, bias: Tensor | None, plan: TreePlan, compute_dtype: torch.dtype | None
) -> bool:
    """Whether x, pack and bias go straight to the kernel: the checks would cost more than a small product."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0 or not _C.is_direct(x, bias):
        return False
    if w.trainable and torch.is_grad_enabled():
        return False
    compute = w.compute_dtype
    if x.dtype is not compute or compute not in _NARROW or (compute_dtype is not None and compute_dtype is not compute):
        return False
    if not (plan is w.plan or plan == w.plan) or not 1 <= x.dim() <= 3 or x.shape[-1] != w.shape[1]:
        return False
    return bias is None or (bias.dim() == 1 and bias.shape[0] == w.shape[0] and bias.dtype in _NARROW)


def _call_packed(x: Tensor, w: PackedWeight, bias: Tensor | None, num_nodes: int, out_dtype: torch.dtype) -> Tensor:
    # Straight to the kernel where the dispatcher has nothing to do: it would cost more than a small product.
    if not torch.compiler.is_compiling() and not _is_observed():
        tensors = (x,) if bias is None else (x, bias)
        if all(type(t) in (Tensor, torch.nn.Parameter) and _is_plain(t) for t in tensors):
            return _packed_kernel(x, w.handle, bias, w.shape[0], num_nodes, out_dtype)
    y: Tensor = _linear_packed(x, w.handle, bias, w.shape[0], num_nodes, out_dtype)
    return y


def _key_bits(*names: str) -> int:
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


_PLAIN_TENSOR = _key_bits("CPU", "ADInplaceOrView", "AutogradCPU", "AutocastCPU")
_PLAIN_THREAD = _key_bits("BackendSelect", "ADInplaceOrView")


def _is_observed() -> bool:
    """Whether someone sees or changes the operators this thread calls: a trace, a mode, a transform, a profiler."""
    return (
        bool(torch._C._dispatch_tls_local_include_set().raw_repr() & ~_PLAIN_THREAD)
        or torch._C._len_torch_function_stack() > 0
        or torch._C._autograd._profiler_enabled()
    )


def _is_plain(t: Tensor) -> bool:
    """Whether t is dense CPU memory as it stands: no meta, lazily negated, zero or wrapped tensor."""
    return not torch._C._dispatch_keys(t).raw_repr() & ~_PLAIN_TENSOR


# --- operators ------------------------------------------------------------------------------------------------------
# narrow, narrow_y, narrow_dx: this tree may cross ranks in some layout, so plan.wire_dtype rounds it (A6).
# sample_offsets None: from the shape of x, so that a compiled graph stays free of the batch size.
# Not torch.library.custom_op: its wrapper costs more than a small product, and a decode step makes hundreds of them.

_LIBRARY = torch.library.Library("tbik", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operator(name: str, schema: str, *, cuda: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Defines torch.ops.tbik.<name> with the decorated function as its CPU kernel; gives the operator.

    cuda: the function looks at the device of its tensors and serves CUDA too.
    """

    def define(kernel: Callable[..., Any]) -> Any:
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        for key in ("CPU", "CUDA") if cuda else ("CPU",):
            _LIBRARY.impl(name, kernel, key)  # type: ignore[no-untyped-call]
        return getattr(torch.ops.tbik, name).default

    return define


def _fake(operator: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers the decorated function as what gives the operator's output shapes."""
    register: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(operator, lib=_LIBRARY)
    return register


@_operator(
    "linear",
    "(Tensor x, Tensor w, Tensor? bias, str plan, ScalarType compute, ScalarType out_dtype, "
    "SymInt[]? sample_offsets, bool narrow_y, bool narrow_dx) -> Tensor",
    cuda=True,
)
def _linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: str,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    sample_offsets: list[int] | None,
    narrow_y: bool,
    narrow_dx: bool,
) -> Tensor:
    p = TreePlan.from_key(plan)
    y_MN = _contract(
        [_rows(x)],
        [w],
        [_cuts(p, w.shape[1])],
        _run_schedule(0, p.leaves, p.leaves, True, _rounds(p, narrow_y)),
        compute,
        out_dtype,
        leaf=p.leaf,
        bias=bias,
    )
    return _shaped(y_MN, *x.shape[:-1], w.shape[0])


@_fake(_linear)
def _linear_fake(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    plan: str,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    sample_offsets: list[int] | None,
    narrow_y: bool,
    narrow_dx: bool,
) -> Tensor:
    _require_one_device(x, w, bias)
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, ctx.plan, ctx.compute, _, ctx.sample_offsets, _, ctx.narrow_dx = inputs
    ctx.x_dtype = x.dtype
    needs_x, needs_w = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None)


def _linear_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    dx = _linear_dx([dy], [w], ctx.plan, ctx.compute, ctx.x_dtype, ctx.narrow_dx) if needs_x else None
    dw = _linear_dw(dy, x, ctx.sample_offsets, ctx.plan, ctx.compute) if needs_w else None
    db = _bias_grad(dy, ctx.sample_offsets, ctx.plan) if needs_bias else None
    return dx, dw, db, None, None, None, None, None, None


torch.library.register_autograd(_linear, _linear_backward, setup_context=_linear_setup, lib=_LIBRARY)


@_operator(
    "linear_group",
    # a list of optional tensors is not differentiable, hence the flags
    "(Tensor x, Tensor[] weights, Tensor[] biases, bool[] has_bias, str plan, ScalarType compute, "
    "SymInt[]? sample_offsets, bool narrow_dx) -> Tensor[]",
    cuda=True,
)
def _linear_group(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    plan: str,
    compute: torch.dtype,
    sample_offsets: list[int] | None,
    narrow_dx: bool,
) -> list[Tensor]:
    rest = iter(biases)
    return [
        _linear(x, w, next(rest) if has else None, plan, compute, x.dtype, sample_offsets, False, narrow_dx)
        for w, has in zip(weights, has_bias, strict=True)
    ]


@_fake(_linear_group)
def _linear_group_fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    plan: str,
    compute: torch.dtype,
    sample_offsets: list[int] | None,
    narrow_dx: bool,
) -> list[Tensor]:
    _require_one_device(x, *weights, *biases)
    return [x.new_empty((*x.shape[:-1], w.shape[0])) for w in weights]


def _linear_group_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, ctx.has_bias, ctx.plan, ctx.compute, ctx.sample_offsets, ctx.narrow_dx = inputs
    ctx.save_for_backward(x, *weights)


def _linear_group_backward(ctx: Any, grad_outputs: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    dx = None
    if needs_x:
        dx = _linear_dx(list(grad_outputs), weights, ctx.plan, ctx.compute, x.dtype, ctx.narrow_dx)
    dw = [
        _linear_dw(dy, x, ctx.sample_offsets, ctx.plan, ctx.compute) if needs else None
        for dy, needs in zip(grad_outputs, needs_w, strict=True)
    ]
    with_bias = [dy for dy, has in zip(grad_outputs, ctx.has_bias, strict=True) if has]
    db = [
        _bias_grad(dy, ctx.sample_offsets, ctx.plan) if needs else None
        for dy, needs in zip(with_bias, needs_bias, strict=True)
    ]
    return dx, dw, db, None, None, None, None, None


torch.library.register_autograd(_linear_group, _linear_group_backward, setup_context=_linear_group_setup, lib=_LIBRARY)


def _packed_kernel(x: Tensor, pack: int, bias: Tensor | None, n: int, num_nodes: int, out_dtype: torch.dtype) -> Tensor:
    """num_nodes 0: the root with its epilogue; else that many nodes of the pack's cover."""
    entry = _packs.get(pack)
    if entry is None:
        raise PlanError(f"tbik::linear_packed: pack {pack} is gone; pack the weight again")
    schedule = _run_schedule(entry.run.lo, entry.run.hi, entry.leaves, num_nodes == 0, entry.rounds)
    leaf = entry.of_kernel[2]
    out = _contract(
        [_rows(x)], entry.packed, [entry.cuts], schedule, entry.compute, out_dtype, leaf=leaf, bias=bias, n=n
    )
    return _shaped(out, *((num_nodes,) if num_nodes else ()), *x.shape[:-1], n)


def _packed_root(x: Tensor, entry: _Pack, bias: Tensor | None, n: int, out_dtype: torch.dtype) -> Tensor:
    """_packed_kernel of a root, for operands that _is_simple_packed has looked at."""
    cuts, compute, leaf = entry.of_kernel
    assert entry.root is not None
    rows = [x if x.dim() == 2 else _rows(x)]
    out = _C.gemm(rows, False, entry.packed, False, cuts, entry.root, compute, bias, out_dtype=out_dtype, leaf=leaf)
    return out if x.dim() == 2 else _shaped(out, *x.shape[:-1], n)


_linear_packed = _operator(
    "linear_packed",
    "(Tensor x, int pack, Tensor? bias, int n, int num_nodes, ScalarType out_dtype) -> Tensor",
)(_packed_kernel)


@_fake(_linear_packed)
def _linear_packed_fake(
    x: Tensor, pack: int, bias: Tensor | None, n: int, num_nodes: int, out_dtype: torch.dtype
) -> Tensor:
    _require_one_device(x, bias)
    return x.new_empty((*((num_nodes,) if num_nodes else ()), *x.shape[:-1], n), dtype=out_dtype)


@_operator(
    "linear_cover",
    "(Tensor x, Tensor w, str plan, ScalarType compute, int length, int lo, int hi, bool narrow) -> Tensor",
    cuda=True,
)
def _linear_cover(
    x: Tensor, w: Tensor, plan: str, compute: torch.dtype, length: int, lo: int, hi: int, narrow: bool
) -> Tensor:
    p, run = TreePlan.from_key(plan), CoverRun(length, lo, hi)
    schedule = _run_schedule(lo, hi, p.leaves, False, _rounds(p, narrow))
    out = _contract([_rows(x)], [w], [_local_cuts(p, run)], schedule, compute, acc_dtype(p), leaf=p.leaf)
    return _shaped(out, _num_nodes(run), *x.shape[:-1], w.shape[0])


@_fake(_linear_cover)
def _linear_cover_fake(
    x: Tensor, w: Tensor, plan: str, compute: torch.dtype, length: int, lo: int, hi: int, narrow: bool
) -> Tensor:
    _require_one_device(x, w)
    dtype = acc_dtype(TreePlan.from_key(plan))
    return x.new_empty((_num_nodes(CoverRun(length, lo, hi)), *x.shape[:-1], w.shape[0]), dtype=dtype)


@_operator(
    "linear_dx",
    "(Tensor[] grad_outputs, Tensor[] weights, str plan, ScalarType compute, ScalarType out_dtype, bool narrow) "
    "-> Tensor",
    cuda=True,
)
def _linear_dx(
    grad_outputs: list[Tensor],
    weights: list[Tensor],
    plan: str,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    narrow: bool,
) -> Tensor:
    p = TreePlan.from_key(plan)
    dx_MK = _contract(
        [_rows(dy) for dy in grad_outputs],
        weights,
        [_cuts(p, w.shape[0]) for w in weights],
        _run_schedule(0, p.leaves, p.leaves, True, _rounds(p, narrow)),
        compute,
        out_dtype,
        leaf=p.leaf,
        b_k_major=True,
    )
    return _shaped(dx_MK, *grad_outputs[0].shape[:-1], weights[0].shape[1])


@_fake(_linear_dx)
def _linear_dx_fake(
    grad_outputs: list[Tensor],
    weights: list[Tensor],
    plan: str,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    narrow: bool,
) -> Tensor:
    _require_one_device(*grad_outputs, *weights)
    dy = grad_outputs[0]
    return dy.new_empty((*dy.shape[:-1], weights[0].shape[1]), dtype=out_dtype)


@_operator(
    "linear_dx_cover",
    "(Tensor[] grad_outputs, Tensor[] weights, str plan, ScalarType compute, int[] lengths, int lo, int hi, "
    "bool narrow) -> Tensor",
    cuda=True,
)
def _linear_dx_cover(
    grad_outputs: list[Tensor],
    weights: list[Tensor],
    plan: str,
    compute: torch.dtype,
    lengths: list[int],
    lo: int,
    hi: int,
    narrow: bool,
) -> Tensor:
    p = TreePlan.from_key(plan)
    runs = [CoverRun(length, lo, hi) for length in lengths]
    out = _contract(
        [_rows(dy) for dy in grad_outputs],
        weights,
        [_local_cuts(p, run) for run in runs],
        _run_schedule(lo, hi, p.leaves, False, _rounds(p, narrow)),
        compute,
        acc_dtype(p),
        leaf=p.leaf,
        b_k_major=True,
    )
    return _shaped(out, _num_nodes(runs[0]), *grad_outputs[0].shape[:-1], weights[0].shape[1])


@_fake(_linear_dx_cover)
def _linear_dx_cover_fake(
    grad_outputs: list[Tensor],
    weights: list[Tensor],
    plan: str,
    compute: torch.dtype,
    lengths: list[int],
    lo: int,
    hi: int,
    narrow: bool,
) -> Tensor:
    _require_one_device(*grad_outputs, *weights)
    dy, num_nodes = grad_outputs[0], _num_nodes(CoverRun(lengths[0], lo, hi))
    return dy.new_empty((num_nodes, *dy.shape[:-1], weights[0].shape[1]), dtype=acc_dtype(TreePlan.from_key(plan)))


@_operator(
    "linear_dw",
    "(Tensor dy, Tensor x, SymInt[]? sample_offsets, str plan, ScalarType compute) -> Tensor",
    cuda=True,
)
def _linear_dw(dy: Tensor, x: Tensor, sample_offsets: list[int] | None, plan: str, compute: torch.dtype) -> Tensor:
    p = TreePlan.from_key(plan)
    cuts, num_blocks = _token_blocks(_offsets(x, sample_offsets))
    if not num_blocks:  # a batch without samples
        return dy.new_zeros((dy.shape[-1], x.shape[-1]), dtype=acc_dtype(p))
    schedule = _sample_schedule(num_blocks, p.grad_wire_dtype == "bfloat16")
    options: dict[str, Any] = {"leaf": p.leaf, "a_k_major": True, "b_k_major": True}
    return _contract([_rows(dy)], [_rows(x)], [cuts], schedule, compute, acc_dtype(p), **options)


@_fake(_linear_dw)
def _linear_dw_fake(dy: Tensor, x: Tensor, sample_offsets: list[int] | None, plan: str, compute: torch.dtype) -> Tensor:
    _require_one_device(dy, x)
    return dy.new_empty((dy.shape[-1], x.shape[-1]), dtype=acc_dtype(TreePlan.from_key(plan)))


@_operator(
    "bias_grad",
    "(Tensor dy, SymInt[]? sample_offsets, str plan) -> Tensor",
    cuda=True,
)
def _bias_grad(dy: Tensor, sample_offsets: list[int] | None, plan: str) -> Tensor:
    # the chain is acc_dtype's, whatever dtype dY leaves the forward in
    compute = torch.float64 if acc_dtype(TreePlan.from_key(plan)) == torch.float64 else dy.dtype
    ones = dy.new_ones((*dy.shape[:-1], 1))
    plain = dataclasses.replace(TreePlan.from_key(plan), leaf="fma").key()  # one column is nothing for tensor cores
    db: Tensor = _linear_dw(dy, ones, sample_offsets, plain, compute)
    return _shaped(db, db.shape[0])


@_fake(_bias_grad)
def _bias_grad_fake(dy: Tensor, sample_offsets: list[int] | None, plan: str) -> Tensor:
    return dy.new_empty((dy.shape[-1],), dtype=acc_dtype(TreePlan.from_key(plan)))


def _refuser(message: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise PlanError(message)

    return refuse


_NOT_DIFFERENTIABLE = (_linear_packed, _linear_cover, _linear_dx, _linear_dx_cover, _linear_dw, _bias_grad)
for _op in (_linear, _linear_group, *_NOT_DIFFERENTIABLE):
    _message = f"{_op}: no torch.func.vmap; pass the batch as leading axes of x, samples by sample_offsets"
    torch.library.register_vmap(_op, _refuser(_message), lib=_LIBRARY)
for _op in _NOT_DIFFERENTIABLE:
    _message = f"{_op}: no derivative; ops.linear and ops.linear_group are differentiable once"
    torch.library.register_autograd(_op, _refuser(_message), lib=_LIBRARY)

# --- one kernel for all of them -------------------------------------------------------------------------------------


def _contract(
    a: list[Tensor],
    b: list[Tensor] | _C.Packed,
    cuts: list[list[int]],
    schedule: _C.Schedule,
    compute: torch.dtype,
    out_dtype: torch.dtype,
    *,
    leaf: str = "fma",
    bias: Tensor | None = None,
    a_k_major: bool = False,
    b_k_major: bool = False,
    n: int | None = None,
) -> Tensor:
    """out[m, n] = epilogue(fold of the leaves of sum_s a_s[m, k] b_s[n, k]), or the nodes of a cover [C, M, N].

    b: activations in `compute`, or weights, which are rounded to `compute`; or a pack. Operands that differ from
    `compute` (an fp32 dY of an lm_head) are not rounded: the chain then takes all of them converted exactly to acc.
    leaf: of bf16 and fp16 chains; those of fp32 and fp64 are always "fma" (A13, A14).
    """
    acc = torch.float64 if compute == torch.float64 else torch.float32
    chain = compute if all(t.dtype == compute for t in a) else acc
    if isinstance(b, list) and chain != compute:
        b = [t.to(compute) for t in b]  # the kernel widens exactly, and rounds an fp32 master weight to `compute`
    if devices.is_cuda(a[0]):
        assert isinstance(b, list), "packs are made of CPU tensors"
        on_device: Tensor = devices.cuda_module("matmul").contract(
            [t.to(chain) for t in a],
            [t.to(chain) for t in b],
            cuts,
            schedule,
            leaf=leaf if chain in DTYPES[:2] else "fma",
            bias=None if bias is None else bias.contiguous(),
            out_dtype=out_dtype,
            a_k_major=a_k_major,
            b_k_major=b_k_major,
        )
        return on_device
    return _C.gemm(a, a_k_major, b, b_k_major, cuts, schedule, _name(chain), bias, out_dtype=out_dtype, leaf=leaf)


def _shaped(out: Tensor, *shape: int) -> Tensor:
    # not a view: autograd forbids in-place edits of a view that an operator returns
    return out if out.shape == shape else torch.ops.aten._unsafe_view.default(out, shape)


def _rows(t: Tensor) -> Tensor:
    if t.dim() == 2:
        return t
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


@lru_cache(maxsize=1024)
def _run_schedule(lo: int, hi: int, leaves: int, to_root: bool, rounds: bool) -> _C.Schedule:
    return _C.run_schedule(lo, hi, leaves, to_root, rounds)


@lru_cache(maxsize=256)
def _sample_schedule(num_blocks: tuple[int, ...], rounds: bool) -> _C.Schedule:
    return _C.sample_schedule(list(num_blocks), rounds)


def _token_blocks(offsets: Sequence[int]) -> tuple[list[int], tuple[int, ...]]:
    """Cuts of the token axis into blocks of 512 from each sample's start, and the number of blocks per sample.

    An empty sample is one empty block, worth +0: a zero-token sample still is a leaf.
    """
    cuts: list[int] = []
    num_blocks: list[int] = []
    for first, end in itertools.pairwise(offsets):
        starts = range(first, end, TOKENS_PER_BLOCK) or [first]
        cuts.extend(starts)
        num_blocks.append(len(starts))
    return [*cuts, offsets[-1]], tuple(num_blocks)


def _offsets(x: Tensor, sample_offsets: Sequence[int] | None) -> list[int]:
    if sample_offsets is not None:
        return list(sample_offsets)
    if x.dim() == 3:
        samples, tokens = x.shape[:2]
        return [sample * tokens for sample in range(samples + 1)]
    return [0, math.prod(x.shape[:-1])]


@lru_cache(maxsize=4096)
def _cuts(plan: TreePlan, length: int) -> list[int]:
    return list(plan.cuts(length))


@lru_cache(maxsize=4096)
def _local_cuts(plan: TreePlan, run: CoverRun) -> list[int]:
    """Offsets of the leaves [lo, hi) inside the slice that holds just them."""
    cuts = plan.cuts(run.length)
    return [cut - cuts[run.lo] for cut in cuts[run.lo : run.hi + 1]]


def _num_nodes(run: CoverRun) -> int:
    return len(tree.cover(run.lo, run.hi))


def _rounds(plan: TreePlan, crosses: bool) -> bool:
    return crosses and plan.wire_dtype == "bfloat16"


def acc_dtype(plan: TreePlan) -> torch.dtype:
    """torch dtype of plan.acc_dtype."""
    return torch.float64 if plan.acc_dtype == "float64" else torch.float32


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- refusals -------------------------------------------------------------------------------------------------------


def _plan_key(where: str, plan: TreePlan) -> str:
    if not isinstance(plan, TreePlan):
        raise PlanError(f"{where}: plan is a tbik.TreePlan, got {_kind(plan)}; TreePlan() has the default fields")
    key: str = _key_of(plan)
    return key


# Dynamo cannot trace json: it guards the fields of the (frozen) plan and takes the text as a constant.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _key_of(plan: TreePlan) -> str:
    return _cached_key(plan)


@lru_cache(maxsize=256)
def _cached_key(plan: TreePlan) -> str:
    return plan.key()


def require_linear(
    where: str,
    x: Tensor,
    w: Tensor | PackedWeight,
    bias: Tensor | None,
    plan: TreePlan,
    compute_dtype: torch.dtype | None,
    *,
    out_dtype: torch.dtype | None = None,
    sample_offsets: Sequence[int] | None = None,
    parallel: Parallel | None = None,
    run: CoverRun | None = None,
) -> tuple[torch.dtype, torch.dtype]:
    """compute and output dtype of y = x W^T + bias; PlanError for everything that `linear` does not do.

    run: the leaves that this rank holds of the contraction; all of them by default.
    """
    compute, out = _require_dtypes(where, x, plan, compute_dtype, out_dtype)
    _require_parallel(where, parallel)
    if run is not None:
        _require_run(where, plan, run, "x", x.shape[-1])
    if isinstance(w, PackedWeight):
        whole = CoverRun(w.shape[1], 0, plan.leaves)
        _require_pack(where, w, x, bias, plan, compute, whole if run is None else run, parallel == "row")
    else:
        _require_weight(where, "w", w, x, compute)
    _require_bias_beside(where, bias, w.shape[0], x, plan)
    require_samples(where, x, sample_offsets)
    return compute, out


def require_layer(
    where: str,
    stored: torch.dtype,
    plan: TreePlan,
    compute_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    parallel: Parallel | None,
) -> None:
    """PlanError unless a layer with a weight in dtype `stored` has an input that `linear` takes."""
    _require_dtype(where, "the weight", stored)
    compute = stored if compute_dtype is None else compute_dtype
    _require_compute(where, compute, plan)
    _require_weight_dtype(where, "the weight", stored, compute)
    _require_out(where, compute if out_dtype is None else out_dtype, plan)
    _require_parallel(where, parallel)


def _require_pack(
    where: str,
    w: PackedWeight,
    x: Tensor,
    bias: Tensor | None,
    plan: TreePlan,
    compute: torch.dtype,
    run: CoverRun,
    row: bool,
) -> None:
    """Every product by a pack passes here: no gradient is lost, and no pack serves another use."""
    wanted = w.trainable or x.requires_grad or (isinstance(bias, Tensor) and bias.requires_grad)
    if wanted and torch.is_grad_enabled():
        raise PlanError(
            f"{where}: a packed (frozen) weight has no backward, and x, the weight or the bias requires grad; use "
            "torch.no_grad() to infer, or the weight itself (tbik.unfreeze(module)) to train"
        )
    if x.device.type not in DEVICES:
        raise PlanError(f"{where}: a packed weight multiplies CPU tensors, x is on {x.device}; use the weight itself")
    given = (plan, run, compute, _rounds(plan, row))
    made = (w.plan, w.run, w.compute_dtype, w.rounds)
    if given != made:
        raise PlanError(
            f"{where}: the weight was packed for (plan, run, compute_dtype, rounds) = {made}, got {given}; "
            "pack it again"
        )
    if x.shape[-1] != w.shape[1]:
        raise PlanError(
            f"{where}: expected x [..., {w.shape[1]}] for the packed weight {list(w.shape)}, got {_shape(x)}"
        )


def _require_dense(where: str, name: str, t: Tensor, served: tuple[str, ...] = DEVICES) -> None:
    if not isinstance(t, Tensor):
        raise PlanError(f"{where}: {name} is a tensor, got {_kind(t)}")
    if not torch.compiler.is_compiling():
        _require_plain_autograd(where, name, t)
    if t.layout != torch.strided or t.is_nested:
        raise PlanError(f"{where}: {name} is a dense tensor, got layout {t.layout}; use {name}.to_dense()")
    _require_dtype(where, name, t.dtype)
    if type(t) not in (Tensor, torch.nn.Parameter) and hasattr(t, "device_mesh"):
        raise PlanError(f"{where}: {name} is a plain tensor, got a DTensor; use {name}.to_local() or tbik.nn")
    if t.device.type not in served:
        raise PlanError(f"{where}: {name} is on {t.device}, kernels exist for {' and '.join(served)}; use {name}.cpu()")


def _require_leaf(where: str, plan: TreePlan, t: Tensor) -> None:
    """PlanError where a leaf meets a device that does not have it."""
    here = t.device.type
    if plan.leaf == "fma" or here == "meta":
        return
    if here == "cuda" and plan.leaf != "amx" and torch.compiler.is_compiling():
        return  # Dynamo cannot ask for the architecture: the kernel does
    if plan.leaf == "amx":
        if here == "cpu":
            return
        raise PlanError(
            f"{where}: leaf 'amx' has kernels on the CPU only, the tensors are on {here}; TreePlan(leaf='fma') has one "
            "set of bits on all devices"
        )
    if here == "cuda":
        here = "sm_{}{}".format(*torch.cuda.get_device_capability(t.device))
    if plan.leaf != f"mma:{here}":
        raise PlanError(
            f"{where}: leaf {plan.leaf!r} has its bits on {plan.leaf.removeprefix('mma:')} only, the tensors are on "
            f"{here}; TreePlan(leaf='fma') has one set of bits on all devices"
        )


def _require_dtype(where: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise PlanError(f"{where}: {name} is bfloat16, float16, float32 or float64, got {dtype}; convert it first")


def _require_plain_autograd(where: str, name: str, t: Tensor) -> None:
    """An operator drops tangents without a word, so what carries them is refused here."""
    if torch._C._are_functorch_transforms_active():
        raise PlanError(f"{where}: no torch.func transform (vmap, grad, jvp, ...); use backward() or autograd.grad")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
        raise PlanError(f"{where}: {name} has a tangent; forward-mode derivatives have no kernel, use backward()")


def _require_compute(where: str, compute: torch.dtype, plan: TreePlan) -> None:
    if compute not in DTYPES:
        raise PlanError(f"{where}: compute_dtype is one of {[_name(d) for d in DTYPES]}, got {compute!r}")
    if (compute == torch.float64) != (plan.acc_dtype == "float64"):
        wanted = "float64" if compute == torch.float64 else "float32"
        raise PlanError(
            f"{where}: compute_dtype {_name(compute)} accumulates in {wanted}, the plan says {plan.acc_dtype}; "
            f"use TreePlan(acc_dtype={wanted!r})"
        )


def _require_dtypes(
    where: str, x: Tensor, plan: TreePlan, compute_dtype: torch.dtype | None, out_dtype: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    _require_dense(where, "x", x, LINEAR_DEVICES)
    _require_leaf(where, plan, x)
    if x.dim() < 1:
        raise PlanError(f"{where}: expected x [..., K], got a scalar")
    compute = x.dtype if compute_dtype is None else compute_dtype
    _require_compute(where, compute, plan)
    if x.dtype != compute:
        raise PlanError(
            f"{where}: x is {_name(x.dtype)}, compute_dtype {_name(compute)}; they must agree: use x.to({compute})"
        )
    return compute, _require_out(where, x.dtype if out_dtype is None else out_dtype, plan)


def _require_out(where: str, out: torch.dtype, plan: TreePlan) -> torch.dtype:
    allowed = (torch.float64, torch.float32) if plan.acc_dtype == "float64" else DTYPES[:3]
    if out not in allowed:
        raise PlanError(f"{where}: out_dtype is one of {[_name(d) for d in allowed]} under this plan, got {out!r}")
    return out


def _require_parallel(where: str, parallel: Parallel | None) -> None:
    if parallel not in (None, "row", "column"):
        raise PlanError(f"{where}: parallel is 'row', 'column' or None, got {parallel!r}")


def _require_flag(where: str, name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise PlanError(f"{where}: {name} is True or False, got {value!r}")


def _require_list(where: str, name: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)):
        raise PlanError(f"{where}: {name} is a list or tuple, got {_kind(value)}")


def require_members(
    where: str, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
) -> list[Tensor | None]:
    """One bias (or None) for each weight of a group; PlanError where they do not match."""
    if not isinstance(weights, (list, tuple)) or not weights:
        raise PlanError(f"{where}: weights is a non-empty list or tuple of [N, K] tensors, got {_kind(weights)}")
    if biases is None:
        return [None] * len(weights)
    _require_list(where, "biases", biases)
    if len(biases) != len(weights):
        raise PlanError(
            f"{where}: expected one bias (or None) per weight, got {len(biases)} for {len(weights)} weights"
        )
    return list(biases)


def _require_operand(where: str, name: str, t: Tensor, beside: Tensor, plan: TreePlan) -> None:
    """A dY: any dtype that converts exactly to acc_dtype."""
    _require_dense(where, name, t, LINEAR_DEVICES)
    _require_leaf(where, plan, t)
    _require_same_device(where, "the first operand", beside, name, t)
    if t.dtype == torch.float64 and plan.acc_dtype != "float64":
        raise PlanError(
            f"{where}: {name} is float64, which this plan rounds; use {name}.float() or TreePlan(acc_dtype='float64')"
        )


def _require_same_device(where: str, first: str, a: Tensor, second: str, b: Tensor) -> None:
    if a.device != b.device:
        raise PlanError(f"{where}: {first} is on {a.device}, {second} on {b.device}; move one")


def _require_one_device(*tensors: Tensor | None) -> None:
    places = sorted({str(t.device) for t in tensors if t is not None})
    if len(places) > 1:
        raise PlanError(f"tbik: the tensors of one operator are on {' and '.join(places)}; move them to one device")


def _require_weight(where: str, name: str, w: Tensor, x: Tensor, compute: torch.dtype) -> None:
    _require_dense(where, name, w, LINEAR_DEVICES)
    if w.dim() != 2:
        raise PlanError(f"{where}: expected {name} [N, K], got shape {_shape(w)}; a vector is w[None]")
    if w.shape[1] != x.shape[-1]:
        raise PlanError(f"{where}: expected x [..., K] and {name} [N, K], got x {_shape(x)} and {name} {_shape(w)}")
    _require_same_device(where, "x", x, name, w)
    _require_weight_dtype(where, name, w.dtype, compute)


def _require_weight_dtype(where: str, name: str, stored: torch.dtype, compute: torch.dtype) -> None:
    narrower = {torch.float32: DTYPES[:2], torch.float64: DTYPES[:3]}
    if stored not in (compute, *narrower.get(compute, (torch.float32,))):
        raise PlanError(
            f"{where}: {name} is {_name(stored)}, compute_dtype {_name(compute)}; a weight is in compute_dtype, "
            f"an fp32 master weight, or narrower than compute_dtype: use {name}.to({compute})"
        )


def require_bias(where: str, bias: Tensor, n: int, plan: TreePlan) -> None:
    """PlanError unless bias is [n] and converts exactly to acc_dtype."""
    _require_dense(where, "bias", bias, LINEAR_DEVICES)
    if bias.dim() != 1 or bias.shape[0] != n:
        raise PlanError(f"{where}: expected bias [{n}], got shape {_shape(bias)}")
    if bias.dtype == torch.float64 and plan.acc_dtype != "float64":
        raise PlanError(f"{where}: bias is float64, the root float32; use bias.float()")


def _require_bias_beside(where: str, bias: Tensor | None, n: int, x: Tensor, plan: TreePlan) -> None:
    if bias is None:
        return
    require_bias(where, bias, n, plan)
    _require_same_device(where, "x", x, "bias", bias)


def require_samples(where: str, x: Tensor, sample_offsets: Sequence[int] | None) -> None:
    """PlanError unless x and sample_offsets say where each sample begins."""
    num_rows = math.prod(x.shape[:-1])
    if sample_offsets is None:
        if x.dim() > 3:
            raise PlanError(
                f"{where}: x {_shape(x)} does not say what a sample is; expected [K], [M, K] (one sample), [B, T, K] "
                "(B samples) or sample_offsets"
            )
        return
    if not isinstance(sample_offsets, (list, tuple)) or not all(_is_int(o) for o in sample_offsets):
        raise PlanError(f"{where}: sample_offsets is a list or tuple of integers, got {_kind(sample_offsets)}")
    ascending = all(a <= b for a, b in itertools.pairwise(sample_offsets))
    if not sample_offsets or not ascending or sample_offsets[0] != 0 or sample_offsets[-1] != num_rows:
        shown = list(sample_offsets[:8])
        raise PlanError(
            f"{where}: sample_offsets ascend from 0 to the {num_rows} rows of x, got {shown}"
            f"{'...' if len(sample_offsets) > 8 else ''}; padding rows are dropped before the call"
        )


def _require_run(where: str, plan: TreePlan, run: CoverRun, name: str, rows: int) -> None:
    if not isinstance(run, CoverRun) or not all(_is_int(value) for value in run) or run.length < 0:
        raise PlanError(f"{where}: a run is a CoverRun(length, lo, hi) of integers, got {run!r}")
    if not 0 <= run.lo <= run.hi <= plan.leaves:
        raise PlanError(f"{where}: expected leaves within [0, {plan.leaves}], got [{run.lo}, {run.hi})")
    expected = _local_cuts(plan, run)[-1]
    if rows != expected:
        raise PlanError(
            f"{where}: leaves [{run.lo}, {run.hi}) of a contraction of {run.length} are {expected} long, "
            f"{name} has {rows}"
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def _shape(t: Tensor) -> list[int]:
    return list(t.shape)
