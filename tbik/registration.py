"""Makes `import tbik` enough for `torch.distributed.init_process_group("tbik")`, without importing torch.

If torch.distributed is loaded, the name "tbik" is registered at once; otherwise when it gets loaded. Only the first
group imports tbik.backend and the compiled module.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

_MODULE = "torch.distributed.distributed_c10d"
DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Register "tbik" now or as soon as torch.distributed is imported. Calling it again changes nothing."""
    module = sys.modules.get(_MODULE)
    if module is not None and hasattr(module, "Backend"):
        _register(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(module: ModuleType) -> None:
    backend = module.Backend
    if "TBIK" not in backend._plugins:
        backend.register_backend("tbik", _create, extended_api=True, devices=list(DEVICES))


def _create(options: Any, backend_options: Any) -> Any:
    from tbik.backend import create

    return create(options, backend_options)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and registers the backend after it has run."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:  # get_source and so on, for tracebacks and inspect
        return getattr(self._inner, name)
