"""Triton kernels without a GPU: where and how the tests of tbik.kernels run them.

With a CUDA device the kernels run there. Without one, TRITON_INTERPRET=1 (set in conftest.py, before anything imports
triton) executes them in numpy on the CPU. Its arithmetic is IEEE but for the fused multiply-add, which it rounds twice:
`exact_fma` puts the correctly rounded one in its place. Its dot is numpy's, in no fixed order: bits are compared where
a leaf is exact, or where the leaf is the fma chain.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any

import numpy as np
import pytest
import torch

from tbik import reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None

needs_triton = pytest.mark.skipif(
    not HAS_TRITON, reason='needs triton, which runs its kernels on the CPU here: pip install "tbik[cuda]"'
)


def mend_index() -> None:
    """Scalars as loop bounds: triton 3.6 takes int() of an array of one element, which numpy >= 2.4 refuses."""
    from triton.runtime import interpreter

    stock = interpreter._patch_lang_tensor
    if "squeeze" in inspect.getsource(stock):
        return

    def patch(tensor: Any, scope: Any) -> None:
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch


if HAS_TRITON and DEVICE == "cpu":
    mend_index()


def rounded_once(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """RN(a*b + c) in the dtype of c, gradual underflow."""
    x, y, z = (torch.from_numpy(np.array(np.broadcast_to(v, c.shape))) for v in (a, b, c))
    if z.dtype == torch.float64:
        return reference.fma64(x, y, z).numpy()
    exact = reference._sum_to_odd(x.double() * y.double(), z.double())
    return exact.to(torch.float32).numpy()


def exact_builder() -> tuple[type, Any]:
    """The class that interprets operations, and a create_fma for it that rounds once, as the device does."""
    from triton.runtime import interpreter

    def create_fma(self: object, x: interpreter.TensorHandle, y: object, z: object) -> object:
        with np.errstate(all="ignore"):
            return interpreter.TensorHandle(rounded_once(x.data, y.data, z.data), z.dtype.scalar)

    return interpreter.InterpreterBuilder, create_fma


@pytest.fixture
def exact_fma(monkeypatch: pytest.MonkeyPatch) -> None:
    """fma in the interpreter with one rounding, as on the device."""
    if DEVICE == "cpu":
        builder, create_fma = exact_builder()
        monkeypatch.setattr(builder, "create_fma", create_fma)
