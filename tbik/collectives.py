"""Sums over the ranks of any torch.distributed process group, in the one order of ORDER.md.

    all_reduce(x)[e]      = cast(node(0, L)[e] / avg + bias)         on every rank
    reduce_scatter(x)[e]  = all_reduce(x)[r*D/W + e]                 rank r of W keeps its rows of dimension 0
    reduce(x, dst)        = all_reduce(x) on rank dst                None elsewhere

    Cover         L leaves of a contraction; each rank brings the nodes it has, all ranks together each leaf once
    plain tensor  L = W, rank r brings leaf r (ORDER.md B1)

    one_shot   all-gather the covers, everyone folds everything         (W-1) * k*n elements sent per rank
    two_shot   all-to-all of element chunks, fold mine, all-gather      (W-1)/W * (k*n + n) elements sent per rank

Suffixes: W ranks, L leaves, k nodes of a rank, n elements of the root. Three kinds of function that never mix:
*order* (which additions: tbik.tree), *placement* (who folds which elements), *movement* (bytes of the process group:
all_gather and all_to_all, never one of its reductions).

dtypes: covers fp32 or fp64. Plain bf16, fp16 and fp32 are summed in fp32, fp64 in fp64, rounded once at the root;
int8..int64 and uint8 modulo 2^bits. Not differentiable: a requires_grad input is read as if detached.

CPU tensors; CUDA tensors of one rank, whose device folds, and of ranks that all run on one host and whose devices can
read each other (tbik.peer_memory): the same additions in one kernel on the caller's stream, int32 and int64 of the
integers; on an error there the output is undefined, and the next call raises. The ranks' records and the bytes of
all_gather always travel over the group's CPU backend. A bias on a device is not compared between the ranks, nor are
node values there looked at before they are narrowed (wire=True).

Errors: PlanError where a call is unsupported or the ranks disagree about it; raised on all ranks in the first call of a
(group, plan, runs), whenever node lists are exchanged (`runs` absent), where equal-sized messages show it, and in every
call with TBIK_CHECK=1. Without it, ranks whose messages differ in size in a later call of a known agreement are not
found before the data moves: gloo ends the process of a rank that is sent more bytes than it expects, and the others
raise when its connections close. (The "tbik" backend receives into room for the largest message, so its ranks all
raise; here that would need an all-to-all in every placement and would hold for gloo only.)
TransportTimeout, TransportError where bytes do not arrive; each wait ends after the group's timeout. A call that raises
leaves the input and `out` unchanged.

Bits: covers are layout-invariant and batch-invariant. A plain tensor is deterministic and independent of size and
placement, but W is in its bits (tests/test_collectives.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, SupportsIndex, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from tbik import _C, __version__, devices, peer_reductions, tree
from tbik.errors import PlanError, TransportError, TransportTimeout
from tbik.peer_memory import Order, Peers
from tbik.plan import Run, TreePlan
from tbik.tree import ORDER_VERSION, Node

Pair = TypeVar("Pair")
Op = Literal["sum", "avg"]
Placement = Literal["auto", "one_shot", "two_shot"]

ONE_SHOT_BYTES = 256 * 1024
"""Largest cover (bytes of one rank) that placement="auto" sends to everybody: over gloo, where both placements cost the
same on one machine. No choice here can change a bit."""

SEGMENT_BYTES = 1 << 26
"""A longer message travels in segments of this many bytes per rank: bounds the buffers and every transport's counts."""

_HEADER_BYTES = 16
_RECORD_BYTES = 40  # 32 bytes of digest, 8 of length
_KNOWN_AGREEMENTS = 256
_PEER_LIMIT_S = 600.0  # of waits on a device, where the group does not tell its timeout
_MAX_COVER_LEAVES = 2**31 - 1
_ALIGNMENT = 8
_ROOT_DTYPES = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.float64: (torch.float64, torch.float32),
}
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_SUPPORTED = ", ".join(str(dtype).removeprefix("torch.") for dtype in (*_FLOATS, *_INTEGERS))

# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, eq=False)
class Cover:
    """Node values of one rank: values[i] = node nodes[i] of a contraction of `leaves` leaves (ORDER.md T3).

    values: [num_nodes, ...] fp32 or fp64. nodes: disjoint, ascending, no two siblings, below `leaves`; may be empty.
    Errors: PlanError at construction.
    """

    values: Tensor
    nodes: tuple[Node, ...]
    leaves: int

    def __post_init__(self) -> None:
        leaves = self.leaves
        if isinstance(leaves, bool) or not isinstance(leaves, int) or not 1 <= leaves <= _MAX_COVER_LEAVES:
            raise PlanError(f"Cover.leaves: expected an integer >= 1 and <= {_MAX_COVER_LEAVES}, got {leaves!r}")
        object.__setattr__(self, "nodes", _pairs("Cover.nodes", "(level, index) per node value", Node, self.nodes))
        if not isinstance(self.values, Tensor):
            raise PlanError(f"Cover.values: expected a tensor, got {type(self.values).__name__}")
        if self.values.dtype not in _ROOT_DTYPES:
            raise PlanError(f"Cover.values: expected float32 or float64 node values, got {self.values.dtype}")
        if self.values.dim() < 1 or self.values.shape[0] != len(self.nodes):
            raise PlanError(
                f"Cover.values: expected [{len(self.nodes)}, ...], one value per node, got {list(self.values.shape)}"
            )
        _require_cover(self.nodes, self.leaves)


def all_reduce(
    x: Tensor | Cover,
    group: dist.ProcessGroup | None = None,
    *,
    plan: TreePlan | None = None,
    op: Op = "sum",
    placement: Placement = "auto",
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    runs: Sequence[Run] | None = None,
    wire: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """root = cast(node(0, L) / avg + bias) on every rank.

    x: a Cover [k, ...], or a plain tensor [...] as leaf r of W.
    plan: compared between the ranks once per group and runs. A cover has plan.leaves leaves and dtype plan.acc_dtype.
    op: "avg" divides the root by W, once.
    placement: who adds; cannot change a bit.
    out_dtype: of the root; by default x's own. bias: [N], N = last dimension of the root, the same bits on all ranks.
    group: None is the default group; for a cover with one run, or without a default group, this rank alone.
    runs: leaf run of every rank (Layout.mlp and so on); saves the exchange of node lists that a cover otherwise needs.
    wire: the tree is one that plan.wire_dtype narrows (ORDER.md A6); the cover then holds bf16 values already.
    out: receives the root after everything succeeded, and is returned; out=x is the in-place form of a plain tensor.

    Errors: PlanError, TransportTimeout, TransportError, see the module. Covers: layout-invariant, batch-invariant.
    Plain tensors: deterministic.
    """
    call = _Call("all_reduce", op=op, plan=plan, placement=placement, wire=wire)
    return _finish(_perform(call, x, group, out_dtype, bias, runs, out), out)


def reduce_scatter(
    x: Tensor | Cover,
    group: dist.ProcessGroup | None = None,
    *,
    plan: TreePlan | None = None,
    op: Op = "sum",
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    runs: Sequence[Run] | None = None,
    wire: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """chunk = all_reduce(x)[r*D/W : (r+1)*D/W] on rank r, D = dimension 0 of the root. Arguments as for all_reduce.

    Errors: PlanError where W does not divide D, and those of all_reduce. Bits: those of all_reduce.
    """
    call = _Call("reduce_scatter", op=op, plan=plan, placement="two_shot", wire=wire)
    return _finish(_perform(call, x, group, out_dtype, bias, runs, out), out)


def reduce(
    x: Tensor | Cover,
    dst: int,
    group: dist.ProcessGroup | None = None,
    *,
    plan: TreePlan | None = None,
    op: Op = "sum",
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    runs: Sequence[Run] | None = None,
    wire: bool = False,
) -> Tensor | None:
    """root = all_reduce(x) on rank `dst` of the group (a rank of the group, not of the world), None on the others."""
    call = _Call("reduce", op=op, plan=plan, placement="two_shot", wire=wire, dst=dst)
    root, link = _perform(call, x, group, out_dtype, bias, runs, None)
    return root if link.rank == dst else None


def all_gather(x: Tensor, group: dist.ProcessGroup | None = None, *, same: Mapping[str, str] | None = None) -> Tensor:
    """gathered[r] = x of rank r, on every rank: bytes move, nothing is added.

    x [...] dense, on the CPU or CUDA, alike in dtype and shape on all ranks -> [W, ...] there; it travels over the
    group's CPU backend. same: what else the ranks must agree on, by name. group: as for all_reduce of a cover; None
    without a default group is this rank alone.
    Errors: PlanError on all ranks where they disagree, TransportTimeout, TransportError.
    """
    if not _is_dense(x) or x.dtype not in (*_FLOATS, *_INTEGERS):
        raise PlanError(f"all_gather: expected a dense CPU or CUDA tensor of {_SUPPORTED}, got {_describe(x)}")
    with torch.no_grad():
        rows = x.detach().resolve_neg().reshape(1, -1)
        alone = group is None and not _has_default_group()
        link = _Link(None, 0, 1, _State(), "all_gather") if alone else _Link.open(group, "all_gather")
        if link.size == 1:
            return rows.clone().view(1, *x.shape)
        terms = (
            ("ORDER_VERSION", str(ORDER_VERSION)),
            ("tbik version", __version__),
            ("collective", "all_gather"),
            ("dtype", str(x.dtype)),
            ("shape", str(list(x.shape))),
            *(same or {}).items(),
        )
        with link.call():
            first = ("all_gather", None) not in link.state.compared
            if first or os.environ.get("TBIK_CHECK") == "1":
                number = ("call number", str(link.state.calls + 1))
                _require_same("all_gather", link.exchange({"terms": [*terms, number], "nodes": [], "refusal": ""}))
                link.state.compared.add(("all_gather", None))
            link.sign(terms, (), "")
            parts = _gather_covers(link, rows.cpu(), [1] * link.size)
            link.require_one_call("")
            return torch.cat(parts).view(link.size, *x.shape).to(x.device)


def bytes_sent(group: dist.ProcessGroup | None = None) -> int:
    """Bytes that this rank addressed to other ranks of the group in collectives of this file, headers included."""
    return _Link.open(group, "bytes_sent").state.bytes_sent


def reset_bytes_sent(group: dist.ProcessGroup | None = None) -> None:
    """bytes_sent(group) = 0 on this rank."""
    _Link.open(group, "reset_bytes_sent").state.bytes_sent = 0


def all_gather_bytes(send: Tensor, group: dist.ProcessGroup | None, collective: str) -> Tensor:
    """[n] bytes (uint8) of this rank -> [W, n], the bytes of every rank; n is the same on all ranks.

    collective: who asks, for the messages. Errors: TransportTimeout, TransportError; PlanError for a foreign group.
    """
    link = _Link.open(group, collective)
    with link.call(), torch.no_grad():
        link.count()
        # over the group's CPU backend, wherever the bytes are
        return link.all_gather(send.cpu(), "exchange of bytes").to(send.device)


# --- what is asked --------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """What the caller chose, before any tensor is looked at."""

    collective: str
    op: str
    plan: TreePlan | None
    placement: str
    wire: bool
    dst: int | None = None


class _Request(NamedTuple):
    """A call that this rank can serve. rows: [k, n], k node values as they travel."""

    rows: Tensor
    shape: torch.Size
    nodes: tuple[Node, ...]
    leaves: int
    nodes_by_rank: tuple[tuple[Node, ...], ...] | None  # None: only this rank's are known
    acc_dtype: torch.dtype
    out_dtype: torch.dtype
    bias: Tensor | None
    average: int
    narrow: bool
    loss: str  # why the values do not fit the wire; empty if they do
    terms: tuple[tuple[str, str], ...]  # what must be the same on all ranks


def _request(
    call: _Call,
    link: _Link,
    x: Tensor | Cover,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    runs: tuple[Run, ...] | None,
    out: Tensor | None,
) -> _Request:
    where = call.collective
    plan = call.plan
    if call.op not in ("sum", "avg"):
        raise PlanError(f"{where}: op must be 'sum' or 'avg', got {call.op!r}")
    if call.placement not in ("auto", "one_shot", "two_shot"):
        raise PlanError(f"{where}: placement must be 'auto', 'one_shot' or 'two_shot', got {call.placement!r}")
    if plan is not None and not isinstance(plan, TreePlan):
        raise PlanError(f"{where}: plan must be a TreePlan or None, got {plan!r}")
    if not isinstance(call.wire, bool):
        raise PlanError(f"{where}: wire must be True or False, got {call.wire!r}")
    dst = call.dst
    ranks = range(link.size)
    if where == "reduce" and (isinstance(dst, bool) or not isinstance(dst, SupportsIndex) or dst not in ranks):
        raise PlanError(f"{where}: dst must be a rank of the group, 0..{link.size - 1}, got {dst!r}")
    tensor = x.values if isinstance(x, Cover) else x
    if not _is_dense(tensor):
        raise PlanError(f"{where}: expected a dense CPU or CUDA tensor or a Cover, got {_describe(tensor)}")
    tensor = tensor.detach().resolve_neg()  # a pending negation is no part of the memory that the kernels read
    if isinstance(x, Cover):
        shape, nodes, leaves, acc_dtype = tensor.shape[1:], x.nodes, x.leaves, tensor.dtype
        nodes_by_rank = None if runs is None else _nodes_of_runs(runs, leaves)
        if nodes_by_rank is not None and len(nodes_by_rank) != link.size:
            raise PlanError(f"{where}: expected one run per rank, {link.size}, got {len(nodes_by_rank)}")
        if nodes_by_rank is not None and nodes_by_rank[link.rank] != nodes:
            raise PlanError(
                f"{where}: rank {link.rank} holds {_spell(nodes)}, but its run says {_spell(nodes_by_rank[link.rank])}"
            )
        if plan is not None and leaves != plan.leaves:
            raise PlanError(f"{where}: the plan has {plan.leaves} leaves, the cover is of {leaves}")
        if plan is not None and acc_dtype != getattr(torch, plan.acc_dtype):
            raise PlanError(f"{where}: the plan's acc_dtype is {plan.acc_dtype}, the cover holds {acc_dtype}")
    else:
        if tensor.dtype not in (*_FLOATS, *_INTEGERS):
            hint = "; sum real and imaginary parts as a view_as_real tensor" if tensor.is_complex() else ""
            raise PlanError(f"{where}: {tensor.dtype} has no sum here; expected one of {_SUPPORTED}{hint}")
        if runs is not None:
            raise PlanError(f"{where}: runs belong to covers; a plain tensor is one leaf per rank")
        shape, nodes, leaves = tensor.shape, (Node(0, link.rank),), link.size
        nodes_by_rank = tuple((Node(0, rank),) for rank in range(link.size))
        narrower = tensor.dtype in (torch.bfloat16, torch.float16)
        acc_dtype = torch.float32 if narrower else tensor.dtype
        tensor = tensor.unsqueeze(0)
    integer = acc_dtype in _INTEGERS
    if integer and call.op == "avg":
        raise PlanError(f"{where}: the average of {acc_dtype} is not defined; use op='sum' or convert to float32 first")
    default = tensor.dtype
    out_dtype = default if out_dtype is None else out_dtype
    allowed = (acc_dtype,) if integer else _ROOT_DTYPES[acc_dtype]
    if out_dtype not in allowed:
        raise PlanError(f"{where}: a root in {acc_dtype} leaves as one of {allowed}, got out_dtype={out_dtype!r}")
    if bias is not None:
        fits = _is_dense(bias) and bias.dtype in _FLOATS and list(bias.shape) == list(shape[-1:])
        fits = fits and bias.device == tensor.device
        if integer or not shape or not fits:
            raise PlanError(
                f"{where}: expected a dense floating-point bias of {list(shape[-1:])} on {tensor.device} for a "
                f"floating-point root of {list(shape)}, got {_describe(bias)}"
            )
        bias = bias.detach().resolve_neg() if shape[-1] else None  # of an empty root
    if where == "reduce_scatter" and (not shape or shape[0] % link.size):
        raise PlanError(f"{where}: {link.size} ranks do not divide dimension 0 of the root, {list(shape)}")
    if out is not None:
        rows = shape if where == "all_reduce" else torch.Size([shape[0] // link.size, *shape[1:]])
        if not _is_dense(out) or out.dtype != out_dtype or out.shape != rows or out.device != tensor.device:
            raise PlanError(
                f"{where}: expected out of {out_dtype} {list(rows)}, dense and on {tensor.device}, got {_describe(out)}"
            )
        if not _is_injective(out):
            raise PlanError(
                f"{where}: expected out with strides that give each element its own memory, got strides "
                f"{list(out.stride())} of {list(out.shape)}"
            )
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise PlanError(f"{where}: out was made in inference mode and can only be written there")
    if call.wire and (plan is None or not isinstance(x, Cover)):
        raise PlanError(f"{where}: wire=True needs a plan and a Cover; the plan says what the wire is")
    narrow = call.wire and plan is not None and plan.wire_dtype == "bfloat16"
    rows_kn = tensor.reshape(len(nodes), shape.numel())
    loss = ""
    if narrow:
        rows_kn, loss = _narrow(rows_kn.contiguous(), where)
    terms = (
        ("ORDER_VERSION", str(ORDER_VERSION)),
        ("tbik version", __version__),
        ("plan", "none" if plan is None else f"{plan.fingerprint()} {plan.key()}"),
        ("collective", where if call.dst is None else f"{where} to rank {call.dst}"),
        ("input", "cover" if isinstance(x, Cover) else "plain tensor"),
        ("dtype", str(default)),
        ("shape", str(list(shape))),
        ("leaves", str(leaves)),
        ("op", call.op),
        ("placement", call.placement),
        ("out_dtype", str(out_dtype)),
        ("bias", "no" if bias is None else str(bias.dtype)),
        ("digest of the bias", "none" if bias is None or link.size == 1 else _digest(bias)),
        ("wire", "bfloat16" if narrow else "as it is"),
        ("runs", "exchanged" if runs is None else str(runs)),
    )
    return _Request(
        rows_kn,
        shape,
        nodes,
        leaves,
        nodes_by_rank,
        acc_dtype,
        out_dtype,
        bias,
        link.size if call.op == "avg" else 1,
        narrow,
        loss,
        terms,
    )


def _is_dense(tensor: object) -> TypeGuard[Tensor]:
    """One block of memory, of the CPU or a device whose ranks can be peers, with strides, which the kernels can read:
    no subclass that stands for other tensors."""
    return (
        isinstance(tensor, Tensor)
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not is_functorch_wrapped_tensor(tensor)
        and not tensor.is_nested
        and tensor.layout == torch.strided
        and (tensor.device.type == "cpu" or tensor.device.type in peer_reductions.LIBRARIES)
    )


def _describe(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    if tensor.is_nested or is_functorch_wrapped_tensor(tensor):
        return "a nested tensor" if tensor.is_nested else "a tensor inside a torch.func transform"
    kind = "" if _is_dense(tensor) else f", {type(tensor).__name__} with {tensor.layout} on {tensor.device}"
    return f"{tensor.dtype} {list(tensor.shape)}{kind}"


def _digest(tensor: Tensor) -> str:
    """Of the bits. Cheap beside a message: a bias is short. A device's would have to be waited for."""
    if tensor.device.type != "cpu":
        return f"on {tensor.device.type}"
    return hashlib.blake2b(tensor.contiguous().view(torch.uint8).numpy().data, digest_size=8).hexdigest()


def _is_injective(tensor: Tensor) -> bool:
    """Whether the strides show that no two elements share memory: each exceeds the reach of all smaller ones."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride <= reach:
            return tensor.numel() == 0
        reach += stride * (size - 1)
    return True


def _narrow(rows: Tensor, where: str) -> tuple[Tensor, str]:
    """The bf16 halves of fp32 values, and what is wrong if their low halves are not zero.

    By bit patterns (little-endian): a conversion instruction may flush subnormals.
    """
    halves = rows.view(torch.int16)
    loss = ""
    if rows.device.type == "cpu" and bool(halves[:, 0::2].any()):
        loss = f"{where}: wire=True needs node values that are bf16 values already; round every leaf and node (A6)"
    return halves[:, 1::2].contiguous().view(torch.bfloat16), loss


# --- order: which additions -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _order(nodes_by_rank: tuple[tuple[Node, ...], ...], leaves: int, narrow: bool) -> Order:
    """The additions that make node(0, L) of all ranks' nodes. PlanError where a leaf comes twice or never."""
    held = sorted(
        (node.lo, node, rank, row) for rank, nodes in enumerate(nodes_by_rank) for row, node in enumerate(nodes)
    )
    end, owner = 0, -1
    for lo, node, rank, _ in held:
        if lo < end:
            raise PlanError(
                f"covers: leaf {lo} of {leaves} is held twice, by ranks {owner} and {rank}; each counts once"
            )
        if lo > end:
            raise PlanError(f"covers: no rank holds leaves [{end}, {lo}) of {leaves}")
        end, owner = node.hi, rank
    if end != leaves:
        raise PlanError(f"covers: no rank holds leaves [{end}, {leaves}) of {leaves}")
    program = _C.nodes_schedule([node for _, node, _, _ in held], leaves, narrow)
    return Order(tuple((rank, row) for _, _, rank, row in held), program)


def _runs(runs: Any) -> tuple[Run, ...]:
    return _pairs("runs", "(lo, hi) of leaves per rank", lambda lo, hi: (lo, hi), runs)


def _pairs(name: str, meaning: str, make: Callable[[int, int], Pair], pairs: Any) -> tuple[Pair, ...]:
    """make(a, b) of each pair of integers; what would have to be rounded or parsed is refused."""
    made = []
    try:
        for first, second in pairs:
            if isinstance(first, bool) or isinstance(second, bool):
                raise TypeError("a bool is no integer here")
            made.append(make(int(operator.index(first)), int(operator.index(second))))
    except Exception as error:
        raise PlanError(f"{name}: expected one {meaning}, in integers, got {pairs!r}") from error
    return tuple(made)


@lru_cache(maxsize=1024)
def _nodes_of_runs(runs: tuple[Run, ...], leaves: int) -> tuple[tuple[Node, ...], ...]:
    """The cover of each rank's run. PlanError unless the runs hold each leaf once."""
    if any(not 0 <= lo <= hi <= leaves for lo, hi in runs):
        raise PlanError(f"runs: expected 0 <= lo <= hi <= {leaves}, got {list(runs)}")
    nodes_by_rank = tuple(tree.cover(lo, hi) for lo, hi in runs)
    _order(nodes_by_rank, leaves, False)
    return nodes_by_rank


@lru_cache(maxsize=1024)
def _require_cover(nodes: tuple[Node, ...], leaves: int) -> None:
    if any(not 0 <= node.level <= leaves.bit_length() or node.index < 0 or node.hi > leaves for node in nodes):
        raise PlanError(f"Cover.nodes: expected nodes below leaf {leaves}, got {_spell(nodes)}")
    try:
        merged = tree.schedule(nodes).outputs
    except ValueError as error:
        raise PlanError(f"Cover.nodes: {error}") from error
    if merged != nodes:
        raise PlanError(f"Cover.nodes: expected a cover without siblings, {_spell(merged)}, got {_spell(nodes)}")


def _fold(order: Order, parts: Sequence[Tensor], request: _Request, bounds: Run) -> Tensor:
    """out[lo:hi] of the root. parts[r]: rank r's rows of these elements, [k_r, hi - lo], in the dtype of the wire."""
    inputs = [parts[rank][row] for rank, row in order.sources]
    if request.acc_dtype in _INTEGERS:
        return tree.root(inputs, torch.add).clone()  # exact modulo 2^bits in any order, so no rule has to fix one
    bias = request.bias
    if bias is not None:
        bias = bias.contiguous()
        if bounds[0] % bias.numel() == 0 and bounds[1] % bias.numel() == 0:
            inputs = [value.view(-1, bias.numel()) for value in inputs]
        else:
            bias = _periodic(bias, *bounds)
    fold = devices.kernels_of(inputs[0]).fold
    root: Tensor = fold(inputs, order.schedule, request.average, bias, request.out_dtype)
    return root.view(-1)


def _periodic(bias: Tensor, lo: int, hi: int) -> Tensor:
    """bias of the flat elements [lo, hi) of a root whose last dimension is the bias'."""
    if hi == lo:
        return bias.new_empty(0)
    length = bias.numel()
    return bias.roll(-(lo % length)).repeat(-(-(hi - lo) // length))[: hi - lo]


# --- placement: who folds which elements -----------------------------------------------------------------------------


def _perform(
    call: _Call,
    x: Tensor | Cover,
    group: dist.ProcessGroup | None,
    out_dtype: torch.dtype | None,
    bias: Tensor | None,
    runs: Sequence[Run] | None,
    out: Tensor | None,
) -> tuple[Tensor, _Link]:
    with torch.no_grad():
        # A cover shows whether it is all there, so it may do without a group; runs say how many ranks there are.
        known_runs: tuple[Run, ...] | None = None
        request: _Request | None = None
        refusal: PlanError | None = None
        try:
            known_runs = None if runs is None else _runs(runs)
        except Exception as error:
            refusal = _refusal(call, error)
        one_run = known_runs is not None and len(known_runs) == 1
        alone = group is None and isinstance(x, Cover) and (one_run or not _has_default_group())
        link = _Link(None, 0, 1, _State(), call.collective) if alone else _Link.open(group, call.collective)
        try:
            if refusal is None:
                request = _request(call, link, x, out_dtype, bias, known_runs, out)
        except Exception as error:
            refusal = _refusal(call, error)
        if link.size == 1:
            if refusal is not None or request is None:
                raise refusal or AssertionError
            if request.loss:
                raise PlanError(request.loss)
            order = _order((request.nodes,), request.leaves, request.narrow)
            root = _fold(order, [request.rows], request, (0, request.shape.numel()))
            return _own(root, request.shape), link
        with link.call():
            nodes_by_rank = _agree(call, link, x, known_runs, request, refusal)
            assert request is not None  # else _agree raised
            order = _order(nodes_by_rank, request.leaves, request.narrow)
            if request.rows.device.type in peer_reductions.LIBRARIES:
                return _on_peers(call, link, order, request, [len(nodes) for nodes in nodes_by_rank]), link
            link.sign(request.terms, nodes_by_rank, request.loss)
            counts = [len(nodes) for nodes in nodes_by_rank]
            step = max(1, SEGMENT_BYTES // max(1, max(counts) * request.rows.element_size()))
            if call.collective == "all_reduce":
                return _own(_everywhere(call, link, order, request, counts, step), request.shape), link
            n = request.shape.numel()
            if call.dst is None:
                bounds = [(n // link.size * rank, n // link.size * (rank + 1)) for rank in range(link.size)]
                shape = [request.shape[0] // link.size, *request.shape[1:]]
            else:
                bounds = [(0, n if rank == call.dst else 0) for rank in range(link.size)]
                shape = list(request.shape) if link.rank == call.dst else [0]
            return _own(_my_chunk(link, order, request, counts, bounds, step), shape), link


def _on_peers(call: _Call, link: _Link, order: Order, request: _Request, counts: Sequence[int]) -> Tensor:
    """The root, or with reduce_scatter this rank's rows of it, by the ranks' devices. What the calls must agree on
    travels as a digest with the kernels' messages."""
    rows = request.rows if request.rows.stride(-1) == 1 else request.rows.contiguous()
    scatter = call.collective == "reduce_scatter"
    shape = [request.shape[0] // link.size, *request.shape[1:]] if scatter else list(request.shape)
    out = torch.empty(shape, dtype=request.out_dtype, device=rows.device)
    link.peers(rows.device).fold(
        rows,
        order,
        out,
        counts=counts,
        divisor=request.average,
        bias=None if request.bias is None else request.bias.to(request.acc_dtype).contiguous(),
        rounds=request.narrow,
        placement=call.placement if call.collective == "all_reduce" else "auto",
        scatter=scatter,
        agreed=repr(request.terms),
    )
    return out


def _own(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """flat.view(shape), but no view: autograd forbids in-place edits of a view that was made under no_grad."""
    view = flat.view(shape)
    return view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def _refusal(call: _Call, error: Exception) -> PlanError:
    """Whatever is wrong with this rank's arguments as a PlanError, which the other ranks can hear of."""
    if isinstance(error, PlanError):
        return error
    refusal = PlanError(f"{call.collective}: cannot read the arguments: {type(error).__name__}: {error}")
    refusal.__cause__ = error
    return refusal


def _everywhere(call: _Call, link: _Link, order: Order, request: _Request, counts: Sequence[int], step: int) -> Tensor:
    """The flat root on every rank."""
    n = request.shape.numel()
    placement = call.placement
    if placement == "auto":
        small = max(counts) * n * request.rows.element_size() <= ONE_SHOT_BYTES
        placement = "one_shot" if small else "two_shot"
    segments = _segments(0, n, step)
    root = torch.empty(n if len(segments) > 1 else 0, dtype=request.out_dtype)
    for lo, hi in segments:
        if placement == "one_shot":
            parts = _gather_covers(link, request.rows[:, lo:hi], counts)
            link.require_one_call(request.loss)
            piece = _fold(order, parts, request, (lo, hi))
        else:
            bounds = _even_split(lo, hi, link.size)
            piece = _gather_chunks(link, _my_chunk(link, order, request, counts, bounds, step), bounds)
        if len(segments) == 1:
            return piece
        root[lo:hi] = piece
    return root


def _my_chunk(
    link: _Link, order: Order, request: _Request, counts: Sequence[int], bounds: Sequence[Run], step: int
) -> Tensor:
    """The flat elements bounds[rank] of the root, folded here."""
    pieces = []
    for start, stop in _segments(0, max(hi - lo for lo, hi in bounds), step):
        now = [(min(lo + start, hi), min(lo + stop, hi)) for lo, hi in bounds]
        parts = _exchange_chunks(link, request.rows, counts, now)
        link.require_one_call(request.loss)
        pieces.append(_fold(order, parts, request, now[link.rank]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _segments(lo: int, hi: int, step: int) -> list[Run]:
    """[lo, hi) in pieces of at most `step`; one empty piece if it is empty, so that the ranks still meet."""
    return [(start, min(start + step, hi)) for start in range(lo, hi, step)] or [(lo, hi)]


def _even_split(lo: int, hi: int, parts: int) -> list[Run]:
    """[lo, hi) in `parts` chunks of one width; the last ones may be shorter or empty."""
    width = -(-(hi - lo) // parts)
    return [(min(lo + width * i, hi), min(lo + width * (i + 1), hi)) for i in range(parts)]


# --- movement: bytes, no additions -----------------------------------------------------------------------------------


def _gather_covers(link: _Link, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """rows [k, m] of this rank -> [k_r, m] of every rank r."""
    m = rows.shape[1]
    size = _HEADER_BYTES + _aligned(max(counts) * m * rows.element_size())
    send = torch.zeros(size, dtype=torch.uint8)
    link.write(send, rows)
    received = link.all_gather(send, "all-gather of covers")
    return [link.read(received[rank], rank, (count, m), rows.dtype) for rank, count in enumerate(counts)]


def _exchange_chunks(link: _Link, rows: Tensor, counts: Sequence[int], bounds: Sequence[Run]) -> list[Tensor]:
    """rows [k, n] of this rank -> the elements bounds[rank] of every rank's rows, [k_r, hi - lo]."""
    item = rows.element_size()
    mine = bounds[link.rank][1] - bounds[link.rank][0]
    send_sizes = [_HEADER_BYTES + _aligned(len(rows) * (hi - lo) * item) for lo, hi in bounds]
    receive_sizes = [_HEADER_BYTES + _aligned(count * mine * item) for count in counts]
    send = torch.empty(sum(send_sizes), dtype=torch.uint8)
    for message, (lo, hi) in zip(torch.split(send, send_sizes), bounds, strict=True):
        link.write(message, rows[:, lo:hi])
    received = link.all_to_all(send, send_sizes, receive_sizes, "all-to-all of chunks")
    return [link.read(message, rank, (counts[rank], mine), rows.dtype) for rank, message in enumerate(received)]


def _gather_chunks(link: _Link, chunk: Tensor, bounds: Sequence[Run]) -> Tensor:
    """chunk = elements bounds[rank] (an even split) -> all elements. No header: the all-to-all before it agreed."""
    width = bounds[0][1] - bounds[0][0]
    if len(chunk) < width:
        chunk = torch.cat([chunk, chunk.new_zeros(width - len(chunk))])
    received = link.all_gather(chunk.contiguous().view(torch.uint8), "all-gather of results")
    return received.view(-1).view(chunk.dtype)[: bounds[-1][1] - bounds[0][0]]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(eq=False)
class _State:
    """What a process group remembers. Dies with the group."""

    calls: int = 0
    bytes_sent: int = 0
    broken: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)  # held during a call: messages have no other order
    compared: set[tuple[str, tuple[Run, ...] | None]] = field(default_factory=set)  # plan and runs
    agreements: dict[tuple[bytes, ...], list[dict[str, Any]]] = field(default_factory=dict)
    peers: dict[torch.device, Peers] = field(default_factory=dict)


_states_lock = threading.Lock()
_states: weakref.WeakKeyDictionary[dist.ProcessGroup, _State] = weakref.WeakKeyDictionary()


def _has_default_group() -> bool:
    return dist.is_available() and dist.is_initialized()


class _Link:
    """One collective's way to the other ranks: moves bytes, counts them, and says what went wrong."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int, state: _State, collective: str) -> None:
        self.group, self.rank, self.size, self.state, self.collective = group, rank, size, state, collective
        self.signature = bytes(_HEADER_BYTES)
        self.terms: tuple[tuple[str, str], ...] = ()
        self.signatures: list[bytes] = []
        self.counted = False

    @classmethod
    def open(cls, group: dist.ProcessGroup | None, collective: str) -> _Link:
        if group is None and not _has_default_group():
            raise PlanError(
                f"{collective}: there is no process group, and only a Cover can show that nothing is missing; call "
                "torch.distributed.init_process_group first, or pass group"
            )
        group = dist.group.WORLD if group is None else group
        if not isinstance(group, dist.ProcessGroup):
            raise PlanError(
                f"{collective}: expected a ProcessGroup that this rank belongs to, got {group!r} "
                "(of a DeviceMesh pass mesh.get_group())"
            )
        with _states_lock:
            state = _states.get(group)
            if state is None:
                try:
                    group._get_backend(torch.device("cpu"))
                except RuntimeError as error:
                    raise PlanError(
                        f"{collective}: the group moves no CPU tensors ({error}); add gloo for cpu"
                    ) from error
                state = _states[group] = _State()
        return cls(group, group.rank(), group.size(), state, collective)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Whatever breaks the call off between two messages leaves the ranks out of step: later calls are refused."""
        if not self.state.lock.acquire(blocking=False):
            raise PlanError(
                f"{self.collective} on rank {self.rank} of {self.size}: another call on this group has not ended; the "
                "ranks match calls by their order, so make them one after the other, or give each thread its own group"
            )
        try:
            if self.state.broken:
                raise TransportError(
                    f"{self.collective} on rank {self.rank} of {self.size}: an earlier call on this group failed "
                    f"({self.state.broken}). Destroy the group and make a new one"
                )
            yield
        except PlanError:
            raise  # agreed by all ranks between two messages: the group is still in step
        except BaseException as error:
            self.state.broken = self.state.broken or f"call {self.state.calls}: {type(error).__name__}"
            raise
        finally:
            self.state.lock.release()

    def sign(self, terms: tuple[tuple[str, str], ...], nodes_by_rank: tuple[tuple[Node, ...], ...], loss: str) -> None:
        """Every message of the call begins with this digest: ranks that disagree notice without an extra message."""
        self.count()
        self.terms = (*terms, ("call number", str(self.state.calls)), ("nodes of all ranks", str(hash(nodes_by_rank))))
        text = repr((terms, self.state.calls, nodes_by_rank, loss)).encode()
        self.signature = hashlib.blake2b(text, digest_size=_HEADER_BYTES).digest()
        self.signatures = [self.signature] * self.size

    def count(self) -> None:
        """Number the call when its first message goes out; a call refused before that was no call to the others."""
        if not self.counted:
            self.counted = True
            self.state.calls += 1

    def write(self, message: Tensor, rows: Tensor) -> None:
        message[:_HEADER_BYTES] = torch.frombuffer(bytearray(self.signature), dtype=torch.uint8)
        size = rows.numel() * rows.element_size()
        message[_HEADER_BYTES : _HEADER_BYTES + size].view(rows.dtype).view(rows.shape).copy_(rows)

    def read(self, message: Tensor, rank: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        self.signatures[rank] = bytes(message[:_HEADER_BYTES].tolist())
        size = shape[0] * shape[1] * dtype.itemsize
        return message[_HEADER_BYTES : _HEADER_BYTES + size].view(dtype).view(shape)

    def require_one_call(self, loss: str) -> None:
        """PlanError on all ranks unless all signed the same call. All ranks see all signatures, so all decide alike."""
        if any(signature != self.signature for signature in self.signatures) or loss:
            records = self.exchange({"terms": self.terms, "refusal": loss})
            _require_same(self.collective, records)
            raise PlanError(f"{self.collective}: the ranks' messages differ though their calls agree; bytes were lost")

    def all_gather(self, send: Tensor, phase: str) -> Tensor:
        """[size] bytes of each rank -> [W, size]."""
        received = torch.empty(self.size, send.numel(), dtype=torch.uint8)
        self.move(lambda: _all_gather_single(received.view(-1), send, group=self.group), phase)
        self.state.bytes_sent += send.numel() * (self.size - 1)
        return received

    def all_to_all(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int], phase: str) -> Sequence[Tensor]:
        """send split by send_sizes, piece r to rank r -> the pieces that arrived."""
        received = torch.empty(sum(receive_sizes), dtype=torch.uint8)
        self.move(
            lambda: dist.all_to_all_single(received, send, receive_sizes, send_sizes, group=self.group),
            phase,
        )
        self.state.bytes_sent += sum(send_sizes) - send_sizes[self.rank]
        return torch.split(received, receive_sizes)

    def exchange(self, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's record. Records that were exchanged before cost one short message."""
        self.count()
        text = json.dumps(record, sort_keys=True).encode()
        head = hashlib.blake2b(text, digest_size=32).digest() + len(text).to_bytes(8, "little")
        heads = [
            bytes(row.tolist())
            for row in self.all_gather(torch.frombuffer(bytearray(head), dtype=torch.uint8), "comparison of calls")
        ]
        key = tuple(heads)
        # All ranks have seen the same heads in the same order, so all find the agreement or none does.
        known = self.state.agreements.get(key)
        if known is None:
            lengths = [int.from_bytes(head[32:], "little") for head in heads]
            send = torch.zeros(max(lengths), dtype=torch.uint8)
            send[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            rows = self.all_gather(send, "comparison of calls")
            known = [
                json.loads(bytes(row[:length].numpy().tobytes())) for row, length in zip(rows, lengths, strict=True)
            ]
            if len(self.state.agreements) >= _KNOWN_AGREEMENTS:
                self.state.agreements.clear()
            self.state.agreements[key] = known
        return known

    def move(self, action: Callable[[], Any], phase: str) -> None:
        """Run one torch collective; its failure becomes a TransportTimeout or a TransportError that says where."""
        start = time.monotonic()
        try:
            action()
        except RuntimeError as error:  # DistBackendError and the backends' own errors derive from it
            elapsed, limit = time.monotonic() - start, self.limit()
            reason = str(error).splitlines()[0][:300]
            late = "timed out" in reason.lower() or "timeout" in reason.lower()
            text = (
                f"{self.collective}, call {self.state.calls}, on rank {self.rank} of {self.size}: "
                f"{'no answer' if late else 'a peer is gone'} in phase '{phase}' after {elapsed:.2f} s "
                f"(limit {'unknown' if limit is None else f'{limit:.2f} s'}). The input is unchanged; the group is not "
                "usable any more. Look for the rank that failed first; if all live, set TBIK_CHECK=1 to see whether "
                f"they make the same calls. The transport says: {reason}"
            )
            raise (TransportTimeout if late else TransportError)(text) from error

    def peers(self, device: torch.device) -> Peers:
        """The group's segments on its ranks' devices, made in its first call there. Errors: PlanError on all ranks."""
        held = self.state.peers
        if device not in held:
            limit = self.limit()
            held[device] = peer_reductions.make(
                device.type,
                device.index or 0,
                self.rank,
                self.size,
                lambda key, record: self.exchange({"key": key, **record}),
                timeout_s=_PEER_LIMIT_S if limit is None else limit,
                group=self.group,
            ).peers
        return held[device]

    def limit(self) -> float | None:
        """The group's timeout in seconds, where the backend tells."""
        try:
            assert self.group is not None
            backend = self.group._get_backend(torch.device("cpu"))
            return float(backend.options._timeout.total_seconds())
        except (AssertionError, AttributeError, RuntimeError):
            return None


# --- agreement -------------------------------------------------------------------------------------------------------


def _agree(
    call: _Call,
    link: _Link,
    x: Tensor | Cover,
    runs: tuple[Run, ...] | None,
    request: _Request | None,
    refusal: PlanError | None,
) -> tuple[tuple[Node, ...], ...]:
    """The nodes of every rank. PlanError on all ranks where one refuses or two disagree, if an exchange is due."""
    plan = "" if call.plan is None else call.plan.fingerprint() if isinstance(call.plan, TreePlan) else "no plan"
    key = (plan, runs)  # after a refusal never among those compared, unless both parts were valid
    check = os.environ.get("TBIK_CHECK") == "1"
    if key in link.state.compared and not check and not (isinstance(x, Cover) and runs is None):
        if refusal is not None:
            raise refusal
        assert request is not None and request.nodes_by_rank is not None
        return request.nodes_by_rank
    record: dict[str, Any] = {"terms": [], "nodes": [], "refusal": "" if refusal is None else str(refusal)}
    if request is not None:
        number = (("call number", str(link.state.calls + 1)),) if check else ()
        record |= {"terms": [*request.terms, *number], "nodes": [list(node) for node in request.nodes]}
    records = link.exchange(record)
    _require_same(call.collective, records, refusal)
    link.state.compared.add(key)
    assert request is not None
    if request.nodes_by_rank is not None:
        return request.nodes_by_rank
    return tuple(tuple(Node(*node) for node in record["nodes"]) for record in records)


def _require_same(collective: str, records: Sequence[dict[str, Any]], refusal: PlanError | None = None) -> None:
    """PlanError naming what each rank said, unless nobody refuses and all terms are equal."""
    refusals = [(rank, record["refusal"]) for rank, record in enumerate(records) if record["refusal"]]
    lines = [f"rank {rank} refuses: {text}" for rank, text in refusals]
    served = [(rank, dict(record["terms"])) for rank, record in enumerate(records) if record["terms"]]
    for name in dict.fromkeys(name for _, terms in served for name in terms):
        ranks_of: dict[str, list[int]] = {}
        for rank, terms in served:
            ranks_of.setdefault(terms.get(name, "nothing"), []).append(rank)
        if len(ranks_of) > 1:
            said = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"{name}: {said}")
    if lines:
        raise PlanError(f"{collective}: the ranks cannot make this call together. " + ". ".join(lines)) from refusal


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _spell(nodes: Iterable[Node]) -> str:
    return "[" + ", ".join(f"({node.level}, {node.index})" for node in nodes) + "]"


def _finish(performed: tuple[Tensor, _Link], out: Tensor | None) -> Tensor:
    """Commit: nothing of the caller's is written before this line."""
    root = performed[0]
    if out is None:
        return root
    with torch.no_grad():
        out.copy_(root)
    return out
