"""The uses of a shared parameter, kept apart: an alias per use, and a look at the graph for uses that have none.

    grad = ((u_n + u_(n-1)) + ...) + u_1         u_i: the root over the samples of use i (ORDER.md S4)

The autograd engine adds the gradients of several consumers before any hook sees them, so they must not meet there.
Public through tbik.gradients. Bits: layout-invariant.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tbik.errors import PlanError

DIRECT = -1
"""The use number of a parameter that is used without use()."""

# What hands the gradient of its output on to the parameter: several consumers of such a node are uses of the parameter.
_PASSES_ON = {"ToCopyBackward0", "TBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"}
_PASSES_ON |= {"AliasBackward0", "TransposeBackward0", "PermuteBackward0", "CloneBackward0", "SqueezeBackward0"}
_PASSES_ON |= {"UnsqueezeBackward0", "SliceBackward0"}


def use(parameter: Tensor, index: int) -> Tensor:
    """The parameter, for its use number `index` (0, 1, ... in forward order): an alias with a gradient of its own.

        tied embeddings:  embedding(ids, use(w, 0)) ... linear(h, use(w, 1))         a layer called in a loop: use(w, i)

    A GradientTree records the gradients of the uses apart, one tree each, and adds the roots at the end of the step:
    ((u_n + u_(n-1)) + ...) + u_1. Without one, autograd adds them: two uses have the same bits that way in a step of
    one backward; a third needs the tree and its backward raises PlanError. Where no gradient is asked for, the
    parameter itself. Errors: PlanError. Layout-invariant.
    """
    where = "gradients.use"
    if not isinstance(parameter, Tensor) or not (parameter.is_leaf or collector_of(parameter) is not None):
        kind = "a tensor that some operation made" if isinstance(parameter, Tensor) else type(parameter).__name__
        raise PlanError(f"{where}: expected a parameter, got {kind}")
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise PlanError(f"{where}: index is the number of the use in forward order, an integer >= 0, got {index!r}")
    if not (torch.is_grad_enabled() and parameter.requires_grad):
        return parameter
    alias: Tensor = _use(parameter, index)
    return alias


class _Alias(NamedTuple):
    """What a leaf of the graph stands for: use `number` of a parameter."""

    parameter: weakref.ref[Tensor]
    number: int


# --- what autograd calls ----------------------------------------------------------------------------------------------

_collectors: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""parameter -> weak reference to its Collector"""


class Collector(Protocol):
    """What takes gradients: a GradientTree. `arrive` returns what it leaves to autograd."""

    def arrive(self, parameter: Tensor, use_index: int, grad: Tensor) -> Tensor | None: ...


def collect(parameter: Tensor, collector: Collector) -> Callable[[], None]:
    """From now on the gradients of the parameter go to the collector; returns what ends it."""
    _collectors[parameter] = weakref.ref(collector)
    handle = parameter.register_post_accumulate_grad_hook(_take_out)  # type: ignore[no-untyped-call]

    def end() -> None:
        handle.remove()
        _collectors.pop(parameter, None)  # type: ignore[no-untyped-call]

    return end


def collect_uses(alias: Tensor, collector: Collector) -> None:
    """As collect, for a tensor that stands for a parameter and is no leaf: its numbered uses, as long as it lives."""
    _collectors[alias] = weakref.ref(collector)


def collector_of(parameter: Tensor) -> Collector | None:
    reference: weakref.ref[Collector] | None = _collectors.get(parameter)  # type: ignore[no-untyped-call]
    return None if reference is None else reference()


def _take_out(parameter: Tensor) -> None:
    """Hook: the gradient goes to the collector, and what it does not keep stays in param.grad."""
    collector = collector_of(parameter)
    grad = parameter.grad
    if collector is not None and grad is not None:
        parameter.grad = None
        parameter.grad = collector.arrive(parameter, DIRECT, grad)


_aliases: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""leaf -> its _Alias"""


def _leaf_use(parameter: Tensor, index: int) -> Tensor:
    """An alias that is a leaf: only a leaf may have a gradient in another dtype than its own (Tensor.grad_dtype).

    The engine would round the gradient of an alias inside the graph to the bf16 of the parameter, in every micro-batch.
    """
    alias = parameter.detach().requires_grad_()
    alias.grad_dtype = parameter.grad_dtype
    _aliases[alias] = _Alias(weakref.ref(parameter), index)
    alias.register_post_accumulate_grad_hook(_take_alias_out)  # type: ignore[no-untyped-call]
    return alias


def _take_alias_out(alias: Tensor) -> None:
    """Hook: the gradient of a leaf alias goes to the collector of its parameter."""
    of: _Alias = _aliases[alias]
    parameter, grad = of.parameter(), alias.grad
    alias.grad = None
    collector = None if parameter is None else collector_of(parameter)
    if collector is None or grad is None:
        raise PlanError(
            f"gradients.use: a gradient of use {of.number} of a parameter arrived after its GradientTree was closed; "
            "close the tree after the backward"
        )
    assert parameter is not None
    if collector.arrive(parameter, of.number, grad) is not None:
        raise PlanError(
            f"gradients.use: use {of.number} of a parameter in {parameter.dtype} is left to what wraps the model, and "
            "that would not see it; keep an fp32 master weight and give the operators compute_dtype"
        )


class _Use(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, index: int) -> Tensor:
        ctx.parameter, ctx.index = weakref.ref(parameter), index
        return parameter.view_as(parameter)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        parameter = ctx.parameter()
        collector = None if parameter is None else collector_of(parameter)
        if collector is not None:
            return collector.arrive(parameter, ctx.index, grad), None  # of one use at most, so autograd adds nothing
        if ctx.index > 1:
            raise PlanError(
                f"gradients.use: use {ctx.index} of a parameter outside a GradientTree: autograd would add three uses "
                "in the order in which the graph was built. Collect the gradients by tbik.GradientTree"
            )
        return grad, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _use(parameter: Tensor, index: int) -> Tensor:
    collected_leaf = parameter.is_leaf and collector_of(parameter) is not None  # else a view in a parameter's place
    if collected_leaf and getattr(parameter, "grad_dtype", parameter.dtype) != parameter.dtype:
        return _leaf_use(parameter, index)
    alias: Tensor = _Use.apply(parameter, index)  # type: ignore[no-untyped-call]
    return alias


class Graph:
    """The nodes that a backward from `outputs` reaches, and who consumes what."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.consumers: dict[Any, list[Any]] = {}
        seen = {output.grad_fn for output in outputs if output.grad_fn is not None}
        stack = list(seen)
        while stack:
            node = stack.pop()
            if node.name() == "CheckpointFunctionBackward":
                raise PlanError(
                    "GradientTree.watch: a checkpoint with use_reentrant=True hides its uses of the parameters; "
                    "checkpoint(..., use_reentrant=False)"
                )
            for source, _ in node.next_functions:
                if source is not None:
                    self.consumers.setdefault(source, []).append(node)
                    if source not in seen:
                        seen.add(source)
                        stack.append(source)

    def parameters(self) -> Iterator[tuple[Tensor, int, list[Any]]]:
        """Every leaf: the parameter, DIRECT or the number of the use that an alias stands for, its consumers."""
        for node, consumers in self.consumers.items():
            if node.name() == "torch::autograd::AccumulateGrad":
                of: _Alias | None = _aliases.get(node.variable)  # type: ignore[no-untyped-call]
                parameter = None if of is None else of.parameter()
                if of is None or parameter is None:
                    yield node.variable, DIRECT, consumers
                else:
                    yield parameter, of.number, consumers

    def uses(self, name: str, number: int, consumers: list[Any]) -> Iterator[tuple[int, bool]]:
        """Per use: its number, and whether it is a look-up, which multiplies nothing and so may have bf16 values."""
        for node in consumers:
            use_index = node.index if node.name() == "_UseBackward" else number
            inside = node.name() == "_UseBackward" or node.name() in _PASSES_ON
            while inside:
                above = self.consumers.get(node, [])
                if len(above) > 1:
                    raise PlanError(
                        f"GradientTree.watch: {name}: one view, cast or alias of it has {len(above)} consumers, whose "
                        "gradients autograd would add in every micro-batch; make one per use: "
                        "gradients.use(parameter, i)"
                    )
                if not above:
                    break
                node = above[0]
                inside = node.name() in _PASSES_ON
            yield use_index, "tbik_embedding" in node.name()
