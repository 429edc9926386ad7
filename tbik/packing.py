"""freeze(module) packs weights once; a frozen weight cannot be read, written or trained, so that no pack is ever stale.

    frozen:    module.weight is a FrozenWeight = shape, dtype and the packs of the values at the time of freeze()
    otherwise: nothing is cached; every call packs the weight it is given

Why so. A cache beside a live weight needs a key that changes with every write. There is none: the version counter
misses `param.data.copy_` and FSDP2's all-gather, the address is reused, and a digest of all values costs what packing
costs. So there is no cache beside a live weight. freeze() instead swaps the content of the Parameter object
(torch.utils.swap_tensors): all who hold the object (the module, an optimizer, a tied module) hold a FrozenWeight from
then on, and whatever they do with it raises PlanError instead of being lost. unfreeze() swaps the content back.

What remains is an alias of the storage made before freeze(): a write through a view or `detach()` bumps the version
counter and is noticed at the next forward; a write through `.data` or numpy is not seen by the pack, which keeps the
values of the time of freeze() until unfreeze(). freeze(release=True) keeps no storage, so there is nothing to write to.

Packs are dropped, i.e. the module is unfrozen, by load_state_dict, by .to() and everything else that goes through
Module._apply, and by assigning another weight. state_dict() of a frozen module is refused. torch.compile breaks its
graph at a frozen weight (fullgraph=True refuses); a compiled function that holds the parameter stands in freeze()'s way
(torch._dynamo.reset() ends that).
Bits: those of the module before freeze() (tests/test_packing.py::test_verify_packed_equals_unpacked).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from tbik.errors import PlanError
from tbik.ops.experts import PackedExperts
from tbik.ops.linear import CoverRun, PackedWeight, Parallel, pack_weight
from tbik.plan import TreePlan

M = TypeVar("M", bound=torch.nn.Module)


Pack = PackedWeight | PackedExperts


class PackSpec(NamedTuple):
    """How a module multiplies by one of its weights: a matrix, or a stack of experts [E, N, k], one pack for each."""

    plan: TreePlan
    compute_dtype: torch.dtype
    parallel: Parallel | None
    run: CoverRun


class Packable(torch.nn.Module):
    """Base of the modules whose weights freeze() packs (tbik.nn).

    pack_specs() names the parameters; weight_of(name) is what forward multiplies x by.
    """

    def pack_specs(self) -> dict[str, PackSpec]:
        """{parameter name: how forward multiplies by it}."""
        raise NotImplementedError

    def weight_of(self, name: str) -> Any:
        """The parameter `name`, or its pack (PackedWeight, PackedExperts) if it is frozen."""
        weight: Tensor = getattr(self, name)
        if isinstance(weight, FrozenWeight):
            pack: Pack = weight.pack_for(self.pack_specs()[name], f"{type(self).__name__}.{name}")
            return pack
        return weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        _require_values(self)
        _unfreeze_own(self)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        _unfreeze_own(self, for_loading=True)
        super()._load_from_state_dict(*args, **kwargs)


class FrozenWeight(Tensor):
    """A parameter without values: shape, dtype and packs. Any operation on it raises PlanError."""

    _packs: dict[PackSpec, Pack]
    _original: Tensor | None  # carries the values, None after release
    _stamp: tuple[int, int | None]
    _trainable: bool
    _swapped: bool  # the original's Python object is this one (else it lives on beside it, in a tied module)

    @staticmethod
    def __new__(cls, weight: Tensor) -> FrozenWeight:
        frozen: FrozenWeight = Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=weight.dtype, device=weight.device, requires_grad=False
        )
        frozen._is_param = True  # isinstance(frozen, torch.nn.Parameter)
        frozen._packs = {}
        frozen._trainable = weight.requires_grad
        frozen._stamp = _stamp(weight)
        return frozen

    # Dynamo would guard what it reads here only in part, and a pack that a guard misses would be a stale one.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pack_for(self, spec: PackSpec, name: str) -> Pack:
        if self._original is not None and _stamp(self._original) != self._stamp:
            raise PlanError(f"{name} was written to while frozen; call tbik.unfreeze(module), then tbik.freeze again")
        pack = self._packs.get(spec)
        if pack is None:
            raise PlanError(f"{name} was frozen for another use; call tbik.unfreeze(module), then tbik.freeze again")
        return pack

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packs."""
        return sum(pack.nbytes for pack in self._packs.values())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FrozenWeight({list(self.shape)}, {self.dtype}, {self.packed_bytes} bytes packed)"

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenWeight:
        if id(self) not in memo:
            original = copy.deepcopy(self._original, memo)
            clone = FrozenWeight(self if original is None else original)
            clone._packs, clone._original, clone._trainable = dict(self._packs), original, self._trainable
            clone._swapped = self._swapped
            memo[id(self)] = clone
        copied: FrozenWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise PlanError("a frozen weight is not saved; call tbik.unfreeze(module) first")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in _METADATA:
            _refuse_use(getattr(func, "__self__", func) if getattr(func, "__name__", "") == "__get__" else func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        _refuse_use(func)


def freeze(module: M, *, release: bool = False, allow_tied: bool = False) -> M:
    """Packs every weight of the tbik modules in `module`, once; forward then uses the packs. Returns `module`.

    release: give the unpacked values back (memory = packs; else packs + weights). The values then come back only by
        load_state_dict, and unfreeze() is refused. Gradients go with the values; without release, unfreeze() brings
        both back. .to(), .half() and so on are refused by `module` and all modules in it, before anything is
        converted. A module that `module` is made a part of is not asked first: torch goes child by child, and what
        comes before the released weight is converted when that raises. So release the outermost module.
    allow_tied: accept a weight that a module outside tbik.nn (an embedding) uses too. That module keeps the live
        parameter; the pack keeps the values of now.
    For inference: a forward that would need a gradient of x, a weight or a bias raises.
    Errors: PlanError; nothing is changed then.
    """
    _require_module("freeze", module)
    packables = [sub for sub in module.modules() if isinstance(sub, Packable)]
    if not packables:
        raise PlanError(f"freeze: {type(module).__name__} holds no module of tbik.nn, so there is nothing to pack")
    packable_names = {id(sub): set(sub.pack_specs()) for sub in packables}
    outside: dict[int, str] = {}  # parameters that something else reads, which a swap would break
    for path, sub in module.named_modules():
        for name, parameter in sub._parameters.items():
            if parameter is not None and name not in packable_names.get(id(sub), ()):
                outside[id(parameter)] = f"{path}.{name}" if path else name
    for sub in packables:
        for name in packable_names[id(sub)]:
            weight = getattr(sub, name)
            if isinstance(weight, FrozenWeight):
                continue
            if weight.device.type == "cuda":
                raise PlanError(
                    f"freeze: {type(sub).__name__}.{name} is on {weight.device}, and packs are for the CPU's kernels; "
                    "CUDA's read weights as they are, so leave the model as it is, or model.cpu() first"
                )
            if type(weight) not in (Tensor, torch.nn.Parameter):
                raise PlanError(
                    f"freeze: {type(sub).__name__}.{name} is a {type(weight).__name__}; expected a plain parameter. "
                    "Gather a sharded weight (FSDP2: module.unshard()) into a module of its own first"
                )
            if name not in sub._parameters:
                raise PlanError(f"freeze: {type(sub).__name__}.{name} is computed (parametrized); remove that first")
            if id(weight) in outside and not (allow_tied and not release):
                raise PlanError(
                    f"freeze: {type(sub).__name__}.{name} is tied to {outside[id(weight)]}, which is no tbik weight. "
                    "freeze(module, allow_tied=True) packs its present values and leaves the other module the parameter"
                )
    packs: dict[int, dict[PackSpec, Pack]] = {}  # by weight: a tied one may have several uses
    for sub in packables:
        for name, spec in sub.pack_specs().items():
            weight = getattr(sub, name)
            made = packs.setdefault(id(weight), {})
            if spec in made or (isinstance(weight, FrozenWeight) and spec in weight._packs):
                continue
            values = weight._original if isinstance(weight, FrozenWeight) else weight
            if values is None:
                raise PlanError(f"freeze: the values of {type(sub).__name__}.{name} were released")
            made[spec] = _pack(values, spec)
    undo: list[Callable[[], object]] = []
    try:
        for sub in packables:
            for name in packable_names[id(sub)]:
                weight = getattr(sub, name)
                undo.append(_install(sub, name, packs.get(id(weight), {}), tied=id(weight) in outside))
    except BaseException:
        for step in reversed(undo):
            step()
        raise
    if release:
        for _, frozen in _frozen_of(packables):
            frozen._original = None
        for sub in module.modules():
            if not isinstance(sub, Packable):
                vars(sub)["_apply"] = functools.partial(_apply_if_not_released, sub)
    return module


def unfreeze(module: M) -> M:
    """Drops all packs in `module` and puts the weights back. Returns `module`; without frozen weights, does nothing.

    Errors: PlanError after freeze(release=True), before anything is changed.
    """
    _require_module("unfreeze", module)
    _require_values(module)
    for sub in module.modules():
        if isinstance(sub, Packable):
            _unfreeze_own(sub)
    return module


def _require_values(module: torch.nn.Module) -> None:
    """PlanError if a weight in `module` was released."""
    for path, sub in module.named_modules():
        if not isinstance(sub, Packable):
            continue
        for name, weight in sub._parameters.items():
            if isinstance(weight, FrozenWeight) and weight._original is None:
                where = ".".join(part for part in (path, name) if part)
                raise PlanError(
                    f"{where} ({type(sub).__name__}) was released; only load_state_dict brings its values back. "
                    "Nothing was changed"
                )


def _apply_if_not_released(module: torch.nn.Module, fn: Callable[..., Any], recurse: bool = True) -> Any:
    """Stands in an instance's `_apply`: torch converts child by child, so the tree is asked before the first."""
    if recurse:
        _require_values(module)
        vars(module).pop("_apply", None)
    return type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]


def _install(module: Packable, name: str, packs: dict[PackSpec, Pack], tied: bool) -> Callable[[], object]:
    """Puts the packs in the weight's place; gives what undoes it."""
    weight: Tensor = module._parameters[name]  # type: ignore[assignment]
    if isinstance(weight, FrozenWeight):
        before = weight._packs
        weight._packs = before | packs
        return lambda: setattr(weight, "_packs", before)
    frozen = FrozenWeight(weight)
    frozen._packs, frozen._swapped = dict(packs), not tied
    if tied:
        frozen._original = weight
        module._parameters[name] = frozen  # type: ignore[assignment]
        return lambda: module._parameters.update({name: weight})  # type: ignore[dict-item]
    swapped = frozen
    try:
        torch.utils.swap_tensors(weight, swapped)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise PlanError(
            f"freeze: {type(module).__name__}.{name} is still in use (a graph that waits for backward, a compiled "
            f"function): {error}"
        ) from error
    assert isinstance(weight, FrozenWeight)
    weight._original = swapped
    return lambda: _swap_back(weight)


def _swap_back(weight: FrozenWeight) -> None:
    original, weight._original = weight._original, None
    torch.utils.swap_tensors(weight, original)  # type: ignore[no-untyped-call]


def _unfreeze_own(module: Packable, for_loading: bool = False) -> None:
    for name, weight in list(module._parameters.items()):
        if not isinstance(weight, FrozenWeight):
            continue
        original = weight._original
        if original is None:
            if not for_loading:
                raise PlanError(
                    f"{type(module).__name__}.{name} was released; only load_state_dict brings its values back"
                )
            # NaN, so that a state dict without this weight cannot pass for one that has it
            values = torch.full(weight.shape, float("nan"), dtype=weight.dtype, device=weight.device)
            original = torch.nn.Parameter(values, requires_grad=weight._trainable)
        if weight._swapped:
            weight._original = original
            _swap_back(weight)
        else:
            module._parameters[name] = original


def _require_module(where: str, module: object) -> None:
    if not isinstance(module, torch.nn.Module):
        raise PlanError(f"{where}: expected a torch.nn.Module, got {type(module).__name__}")


def _pack(weight: Tensor, spec: PackSpec) -> Pack:
    with torch.no_grad():
        if weight.dim() == 3:
            return PackedExperts(weight, spec.run, spec.plan, spec.compute_dtype)
        return pack_weight(
            weight, plan=spec.plan, compute_dtype=spec.compute_dtype, parallel=spec.parallel, run=spec.run
        )


def _frozen_of(modules: list[Packable]) -> Iterator[tuple[Packable, FrozenWeight]]:
    for module in modules:
        for weight in module._parameters.values():
            if isinstance(weight, FrozenWeight):
                yield module, weight


def _stamp(weight: Tensor) -> tuple[int, int | None]:
    """Changes with most writes, not with all: a second line of defence behind the swap."""
    if isinstance(weight, FrozenWeight):
        return 0, None
    return weight.data_ptr(), None if weight.is_inference() else weight._version


def _refuse_use(func: Any) -> NoReturn:
    raise PlanError(
        f"a frozen weight has no values to use ({getattr(func, '__name__', func)}); call tbik.unfreeze(module) first"
    )


# What modules, optimizers and people ask of a parameter without touching its values.
_PROPERTIES = (
    "shape dtype device layout requires_grad is_leaf grad grad_fn ndim "
    "is_cuda is_cpu is_meta is_sparse is_quantized is_nested"
)
_METADATA: set[Any] = {getattr(Tensor, name).__get__ for name in _PROPERTIES.split()} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    Tensor.__hash__,
    Tensor.__repr__,
}
