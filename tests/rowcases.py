"""What every row operator must survive: companies, positions, strides, threads, paths, flush mode (acceptance 1).

check_rows(run, x)      run(rows) -> tensors whose leading axis is the rows'; a row alone is the row in any company
"""

from __future__ import annotations

import atexit
import functools
import itertools
import subprocess
import sys
import threading
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


# Reads lines "module function", answers each by "ok" or the traceback in one line. One process for all test files:
# importing torch costs more than the tests.
SERVER = """
import sys, importlib, traceback, torch
sys.path.insert(0, sys.argv[1])
from assertions import assert_bitwise_equal
from tbik import _C
torch.set_num_threads(1)
for line in sys.stdin:
    module, name = line.split()
    try:
        torch.set_flush_denormal(False)
        function = getattr(importlib.import_module(module), name)()
        expected = function()
        assert torch.set_flush_denormal(True)
        mode = _C.fp_mode()
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for a, b in zip(function(), expected, strict=True):
                assert_bitwise_equal(a, b, f'{threads} threads')
            assert _C.fp_mode() == mode != 0
        answer = 'ok'
    except BaseException:
        answer = repr(traceback.format_exc())
    torch.set_num_threads(1)
    print(answer, flush=True)
"""


@functools.cache
def _flush_server() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER, str(Path(__file__).resolve().parent)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.kill)
    return server


def run_with_flush(module: str, function: str) -> None:
    """module.function() makes inputs and returns a function of nothing; that one must give the same tensors under
    set_flush_denormal(True), on 1 and 2 threads, and leave the mode as it was. Not in the process of the tests."""
    server = _flush_server()
    assert server.stdin is not None and server.stdout is not None
    watch = threading.Timer(200, server.kill)  # no unbounded wait: a killed server answers with an empty line
    watch.start()
    try:
        server.stdin.write(f"{module} {function}\n")
        server.stdin.flush()
        answer = server.stdout.readline()
    finally:
        watch.cancel()
    assert answer == "ok\n", answer


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
