"""tbik: the same sum has the same bits, whatever the layout.

The public names are loaded when they are first used, so that `import tbik` costs nothing. The order: ORDER.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tbik.errors import IntegrityError, PlanError, TbikError, TransportError, TransportTimeout
from tbik.plan import TreePlan
from tbik.registration import register as _register
from tbik.tree import ORDER_VERSION

if TYPE_CHECKING:
    import tbik.gradients as gradients
    import tbik.launch as launch
    import tbik.nn as nn
    import tbik.ops as ops
    from tbik.collectives import Cover, all_reduce, reduce_scatter
    from tbik.gradients import GradientTree
    from tbik.huggingface.parallelize import load_checkpoint, parallelize
    from tbik.integrity.fingerprint import fingerprint
    from tbik.packing import freeze, unfreeze

__version__ = "0.1.0"

_register()  # torch.distributed.init_process_group("tbik"), without importing torch here

_LAZY = {
    "Cover": "tbik.collectives",
    "GradientTree": "tbik.gradients",
    "all_reduce": "tbik.collectives",
    "reduce_scatter": "tbik.collectives",
    "fingerprint": "tbik.integrity.fingerprint",
    "freeze": "tbik.packing",
    "gradients": "tbik.gradients",
    "unfreeze": "tbik.packing",
    "launch": "tbik.launch",
    "load_checkpoint": "tbik.huggingface.parallelize",
    "nn": "tbik.nn",
    "ops": "tbik.ops",
    "parallelize": "tbik.huggingface.parallelize",
}

__all__ = [
    "ORDER_VERSION",
    "Cover",
    "GradientTree",
    "IntegrityError",
    "PlanError",
    "TbikError",
    "TransportError",
    "TransportTimeout",
    "TreePlan",
    "all_reduce",
    "fingerprint",
    "freeze",
    "gradients",
    "launch",
    "load_checkpoint",
    "nn",
    "ops",
    "parallelize",
    "reduce_scatter",
    "unfreeze",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tbik' has no attribute {name!r}; public names: {', '.join(__all__)}")
    module = importlib.import_module(_LAZY[name])
    return module if _LAZY[name] == f"tbik.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
