"""Tensors that say they are on cuda:0 and are the CPU's: what makes its helper tensors elsewhere is seen without a GPU.

    with pretend():
        model.to("cuda"); model(ids.to("cuda"))      every operation on tensors of both devices raises Mixed

A tensor of `OnCuda` holds a CPU tensor. Operators, torch's and tbik's, run on what is held: values are real, bits are
the CPU kernels', and autograd works. As on CUDA a scalar (0-d) of the CPU's may meet tensors of the device, and indices
may be the CPU's. Factories with device="cuda" give `OnCuda`; tbik.devices gives the CPU's kernels, which take the same
arguments; reductions over ranks get what is held. Not shown: the kernels of tbik.kernels, which CUDA tensors get in
truth, peer memory, and streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from tbik import _C, collectives, devices, gradients
from tbik.ops.linear import _contract as contract

CUDA = torch.device("cuda", 0)
_ENGINE = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
_DENSE = collectives._is_dense
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class Mixed(RuntimeError):
    """One operation, tensors on two devices."""


class OnCuda(Tensor):
    """A CPU tensor, `held`, that says it is on cuda:0."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCuda:
        made: OnCuda = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=held.device,
        )
        made.held = held
        return made

    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnCuda({self.held!r})"

    def tolist(self) -> Any:
        return self.held.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        require_one_device(func, (args[:1] if func in _INDEXING else args, kwargs))
        out = func(*held_of(args), **held_of(kwargs))
        return return_and_correct_aliasing(func, args, kwargs, tree_map(there, out))


def require_one_device(func: Any, arguments: Any) -> None:
    tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    elsewhere = [t for t in tensors if not isinstance(t, OnCuda) and t.dim()]
    if elsewhere and len(elsewhere) < len(tensors):
        raise Mixed(f"{func}: tensors on cuda:0, and {[list(t.shape) for t in elsewhere]} on the CPU")


def there(x: Any) -> Any:
    """On the device, if it is a tensor."""
    return OnCuda(x) if isinstance(x, Tensor) and not isinstance(x, OnCuda) else x


def held_of(arguments: Any) -> Any:
    """The same with CPU tensors."""
    return tree_map(lambda t: t.held if isinstance(t, OnCuda) else t, arguments)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to_cuda: bool) -> Tensor:
        ctx.back = isinstance(x, OnCuda)
        plain = held_of(x.detach())
        return there(plain.clone()) if to_cuda else plain.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return (there(dy) if ctx.back else held_of(dy)), None


class AbsentGradients(TorchDispatchMode):
    """The zeros that autograd itself makes for an absent gradient: on the device that C++ sees, so moved here."""

    asked = False  # by Python: then they are where the caller said

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        unasked = func is torch.ops.aten.zeros.default and not self.asked
        return there(out) if unasked and torch._C._current_graph_task_id() != -1 else out


class Factories(TorchFunctionMode):
    """torch.arange(..., device="cuda"), x.to("cuda"), x.cpu()."""

    def __init__(self, absent: AbsentGradients) -> None:
        super().__init__()
        self.absent = absent

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.absent.asked = self.absent.asked, True
        try:
            return self._call(func, args, dict(kwargs or {}))
        finally:
            self.absent.asked = before

    def during_backward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """The engine with this mode on: while it handles Tensor.backward it is off, and a backward makes tensors."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self.absent.asked = self.absent.asked, False
            try:
                with self:
                    return real(*args, **kwargs)
            finally:
                self.absent.asked = before

        return run

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in (Tensor.cpu, Tensor.cuda, Tensor.to):
            return self._move(func, args, kwargs)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        on_cuda = torch.device(device).type == "cuda"
        out = func(*args, **(kwargs | {"device": "cpu"} if on_cuda else kwargs))
        return there(out) if on_cuda else out

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, rest = args[0], list(args[1:])
        device: Any = {Tensor.cpu: "cpu", Tensor.cuda: "cuda"}.get(func, kwargs.pop("device", None))
        if func is not Tensor.to:
            rest = []
        for place, value in enumerate(rest):
            if isinstance(value, (str, torch.device)):
                device = rest.pop(place)
                break
            if isinstance(value, Tensor):
                device, rest[place] = value.device, value.dtype
                break
        if device is not None and (torch.device(device).type == "cuda") != isinstance(x, OnCuda):
            x = _Move.apply(x, torch.device(device).type == "cuda")
        rest = [value for value in rest if value is not None]
        return x.to(*rest, **kwargs) if rest or kwargs else x


class _Kernels:
    """tbik.kernels.on_cuda and .matmul, by the CPU's kernels: one device, the same arguments."""

    def __getattr__(self, name: str) -> Any:
        kernel: Callable[..., Any] = _contract if name == "contract" else getattr(_C, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            require_one_device(name, (args, kwargs))
            return tree_map(there, kernel(*held_of(args), **held_of(kwargs)))

        return call


def _contract(a: list[Tensor], b: list[Tensor], cuts: Any, schedule: Any, **options: Any) -> Tensor:
    return contract(a, b, cuts, schedule, a[0].dtype, **options)


def _perform(real: Callable[..., Any]) -> Callable[..., Any]:
    def perform(call: Any, x: Any, group: Any, out_dtype: Any, bias: Any, runs: Any, out: Any) -> Any:
        values = x.values if isinstance(x, collectives.Cover) else x
        require_one_device(call.collective, (values, bias, out))
        alone = group is None or group.size() == 1  # folded here, by the device's kernels
        if not isinstance(values, OnCuda) or alone:
            return real(call, x, group, out_dtype, bias, runs, out)
        plain = collectives.Cover(values.held, x.nodes, x.leaves) if isinstance(x, collectives.Cover) else values.held
        root, link = real(call, plain, group, out_dtype, held_of(bias), runs, held_of(out))
        return there(root), link

    return perform


def _own(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda flat, shape: there(real(flat.held, shape)) if isinstance(flat, OnCuda) else real(flat, shape)


def _is_dense(real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor: real(held_of(tensor))


@contextlib.contextmanager
def pretend() -> Iterator[None]:
    """Within, "cuda" is a device of this process."""
    with (
        mock.patch.object(devices, "cuda_module", lambda name: _Kernels()),
        mock.patch.object(collectives, "_perform", _perform(collectives._perform)),
        mock.patch.object(collectives, "_own", _own(collectives._own)),
        mock.patch.object(collectives, "_is_dense", _is_dense(_DENSE)),
        mock.patch.object(gradients, "_is_dense", _is_dense(_DENSE)),
        AbsentGradients() as absent,
        Factories(absent) as factories,
        mock.patch.object(torch.autograd, "_engine_run_backward", factories.during_backward(_ENGINE)),
    ):
        yield


def move(module: torch.nn.Module) -> torch.nn.Module:
    """module.to("cuda"), which for these tensors would part tied parameters."""
    moved: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                new = moved.get(id(parameter))
                if new is None:
                    new = torch.nn.Parameter(OnCuda(parameter.detach().clone()), parameter.requires_grad)
                    moved[id(parameter)] = new
                part._parameters[name] = new
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = OnCuda(value.clone())
    return module
