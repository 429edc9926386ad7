"""A weight that vLLM may write to at any time, and its packs, which must never be older than the weight.

    watch = Watch.of(parameter)         watch.pack(spec)         the pack of the values as they are now

Loaders write through `param.data.copy_`, which no version counter sees. So every torch function that is handed the
parameter drops the packs: it may write, or give out an alias that is written to. And while such an alias lives (the
storage has more owners than the parameter and this watch), nothing is kept. What is left is a write by an address that
never passed through torch.

A layer asks for its parameter's watch in every call, so a parameter that was replaced brings its own.

Only the CPU's kernels want packs. Those of CUDA read a weight as it lies, so there is nothing to keep or to watch:
a layer takes `plain_values(parameter)` in every call.
Bits: those of the values at the time of the call
(tests/test_vllm_plugin.py::test_verify_written_weights_are_packed_again).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tbik import devices, ops
from tbik.ops.linear import PackedWeight
from tbik.packing import PackSpec


def wants_packs(parameter: Tensor) -> bool:
    """Whether the kernels of the parameter's device take it packed."""
    return not devices.is_cuda(parameter)


def plain_values(parameter: Tensor) -> Tensor:
    """The values of the parameter as they are now: a plain tensor on its storage."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach()


class Watch:
    """The values of one parameter (`values`, a plain tensor on its storage) and the packs made of them."""

    __slots__ = ("_packs", "_storage", "parameter", "values")

    def __init__(self, parameter: Tensor) -> None:
        self.values = plain_values(parameter)
        self.parameter = parameter
        self._storage = self.values.untyped_storage()
        self._packs: dict[PackSpec, PackedWeight] = {}

    @classmethod
    def of(cls, parameter: Tensor) -> Watch:
        """The watch of a parameter; its class becomes one that tells the watch of every use."""
        watch = vars(parameter).get("_tbik_watch")
        if watch is None or watch.parameter is not parameter:  # vLLM's reload copies attributes to other tensors
            if not issubclass(type(parameter), _Watched):
                parameter.__class__ = _watched(type(parameter))  # type: ignore[assignment]
            watch = cls(parameter)
            vars(parameter)["_tbik_watch"] = watch
        made: Watch = watch
        return made

    def pack(self, spec: PackSpec) -> PackedWeight:
        if self.is_shared():
            return self._make(spec)
        pack = self._packs.get(spec)
        if pack is None:
            pack = self._packs[spec] = self._make(spec)
        return pack

    def is_shared(self) -> bool:
        """Whether somebody else holds the storage and may write to it unseen."""
        count: int = torch._C._storage_Use_Count(self._storage._cdata)  # type: ignore[attr-defined]
        return count > _own_count()

    def drop(self) -> None:
        self._packs.clear()

    def renew(self) -> None:
        """After the parameter was given other storage."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.parameter.data_ptr() != self.values.data_ptr() or self.parameter.shape != self.values.shape:
                self.values = self.parameter.detach()
                self._storage = self.values.untyped_storage()

    def _make(self, spec: PackSpec) -> PackedWeight:
        self.renew()
        return ops.pack_weight(
            self.values, plan=spec.plan, compute_dtype=spec.compute_dtype, parallel=spec.parallel, run=spec.run
        )


class _Watched:
    """Mixin of a parameter class: any torch function drops the packs of the parameters it is handed."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        _drop_packs((args, tuple(kwargs.values())))
        return result


def _drop_packs(value: Any) -> None:
    if isinstance(value, _Watched):
        watch = vars(value).get("_tbik_watch")
        if watch is not None:
            watch.drop()
            watch.renew()
    elif isinstance(value, (list, tuple)):
        for part in value:
            _drop_packs(part)


@lru_cache(maxsize=64)
def _watched(kind: type) -> type:
    """The parameter class with the mixin before it; isinstance and loaders see what they saw before."""
    return type(kind.__name__, (_Watched, kind), {"__module__": kind.__module__})


@lru_cache(maxsize=1)
def _own_count() -> int:
    """Owners of a storage that nobody but parameter and watch holds; counted, not assumed."""
    parameter = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    watch = Watch(parameter)
    count: int = torch._C._storage_Use_Count(watch._storage._cdata)  # type: ignore[attr-defined]
    return count
