"""What every row operator must survive: companies, positions, strides, threads, paths, flush mode (acceptance 1).

check_rows(run, x)      run(rows) -> tensors whose leading axis is the rows'; a row alone is the row in any company
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from assertions import assert_bitwise_equal
from torch import Tensor

from tbik import _C

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPANIES = (1, 2, 7, 16, 17, 33, 128)
PATHS = _C.cpu_paths()

Run = Callable[..., Sequence[Tensor]]


def strided(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values in other memory, NaN around them."""
    yield "contiguous", x
    wide = torch.full((2 * x.shape[0] + 1, *x.shape[1:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
    wide[1::2, ..., 2:-1] = x
    yield "every second row of a wider tensor", wide[1::2, ..., 2:-1]
    yield "last axis far apart", x.transpose(0, -1).contiguous().transpose(0, -1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_rows(run: Run, inputs: Sequence[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """run(*inputs) gives, per row, the bits that the row alone gives; inputs share a leading axis of 128 rows."""
    whole = run(*inputs)
    for path, count in itertools.product(PATHS, (1, 2)):
        monkeypatch.setenv("TBIK_CPU_PATH", path)
        with threads(count):
            for got, expected in zip(run(*inputs), whole, strict=True):
                assert_bitwise_equal(got, expected, f"{path}, {count} threads")
    monkeypatch.delenv("TBIK_CPU_PATH")
    for company in COMPANIES:
        for first in {0, (128 - company) // 2, 128 - company}:
            rows = slice(first, first + company)
            for got, expected in zip(run(*(x[rows] for x in inputs)), whole, strict=True):
                assert_bitwise_equal(got, expected[rows], f"rows [{first}, +{company})")
    backwards = torch.arange(127, -1, -1)
    for got, expected in zip(run(*(x[backwards] for x in inputs)), whole, strict=True):
        assert_bitwise_equal(got, expected[backwards], "another position")
    for views in zip(*(strided(x) for x in inputs), strict=True):
        for got, expected in zip(run(*(view for _, view in views)), whole, strict=True):
            assert_bitwise_equal(got, expected, views[0][0])


def run_with_flush(module: str, function: str) -> None:
    """module.function() makes inputs and returns a function of nothing; that one must give the same tensors under
    set_flush_denormal(True), on 1 and 2 threads, and leave the mode as it was. In a process of its own."""
    code = (
        "import sys, importlib, torch\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from assertions import assert_bitwise_equal\n"
        "from tbik import _C\n"
        f"function = importlib.import_module({module!r}).{function}()\n"
        "expected = function()\n"
        "assert torch.set_flush_denormal(True)\n"
        "mode = _C.fp_mode()\n"
        "for threads in (1, 2):\n"
        "    torch.set_num_threads(threads)\n"
        "    for a, b in zip(function(), expected, strict=True):\n"
        "        assert_bitwise_equal(a, b, f'{threads} threads')\n"
        "    assert _C.fp_mode() == mode != 0\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).resolve().parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def compiled_equals_eager(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    """Forward and gradients of torch.compile(function) under aot_eager, bits equal to eager."""

    def run(f: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        outputs = list(f(*leaves))
        torch.autograd.backward(
            outputs, [torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype) for y in outputs]
        )
        return [*outputs, *(x.grad for x in leaves if x.grad is not None)]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, expected in zip(run(compiled), run(function), strict=True):
        assert_bitwise_equal(got, expected, "compiled")
    torch._dynamo.reset()
