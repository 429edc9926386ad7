"""Which kernels serve a tensor: tbik._C on the CPU, tbik.kernels.on_cuda on CUDA. Same names, arguments and results."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor

from tbik import _C
from tbik.errors import PlanError

CPU_AND_CUDA = ("cpu", "meta", "cuda")


def is_cuda(t: Tensor) -> bool:
    """Whether the kernels of tbik.kernels serve t; tests replace it to run them in triton's interpreter."""
    return t.device.type == "cuda"


def kernels_of(t: Tensor) -> Any:
    """The module whose functions take t. Errors: PlanError for a CUDA tensor without triton."""
    return cuda_module("on_cuda") if is_cuda(t) else _C


def cuda_module(name: str) -> Any:
    """tbik.kernels.<name>. Errors: PlanError where triton is missing."""
    try:
        return importlib.import_module(f"tbik.kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise PlanError("tbik: CUDA tensors need triton, which is not here: pip install 'tbik[cuda]'") from error
