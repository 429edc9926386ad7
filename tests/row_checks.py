"""What every row-wise operator must survive: batches, positions, strides, threads, CPU paths, the flush mode."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from assertions import assert_bitwise_equal
from torch import Tensor

from tbik import _C

BATCHES = (1, 2, 7, 16, 17, 33, 128)
Run = Callable[..., Sequence[Tensor]]
"""rows of the operands, alike in their leading axis -> results with the same leading axis."""


@contextlib.contextmanager
def cpu_path(name: str) -> Iterator[None]:
    before = os.environ.get("TBIK_CPU_PATH")
    os.environ["TBIK_CPU_PATH"] = name
    try:
        yield
    finally:
        os.environ.pop("TBIK_CPU_PATH")
        if before is not None:
            os.environ["TBIK_CPU_PATH"] = before


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def assert_rows_independent(run: Run, *operands: Tensor) -> None:
    """run(row alone) = the row of run(batch), for batches of BATCHES at any position, contiguous and strided."""
    total = operands[0].shape[0]
    alone = run(*(t[:1].clone() for t in operands))
    for batch in BATCHES:
        assert batch <= total
        for at in {0, batch // 2, batch - 1}:
            rows = torch.arange(1, batch + 1) % total
            rows[at] = 0
            chosen = [t[rows] for t in operands]
            for what, given in (("contiguous", chosen), ("strided", [spread(t) for t in chosen])):
                for i, (value, expected) in enumerate(zip(run(*given), alone, strict=True)):
                    assert_bitwise_equal(value[at : at + 1], expected, f"result {i}, row {at} of {batch}, {what}")


def assert_machine_independent(run: Run, *operands: Tensor) -> None:
    """The same bits on every CPU path, with 1 and 2 threads."""
    expected = [t.clone() for t in run(*operands)]
    for path in _C.cpu_paths():
        for count in (1, 2):
            with cpu_path(path), threads(count):
                for i, (value, other) in enumerate(zip(run(*operands), expected, strict=True)):
                    assert_bitwise_equal(value, other, f"result {i}, {path}, {count} threads")


def spread(t: Tensor) -> Tensor:
    """The same values with gaps between rows and, where there are columns, between columns."""
    padded = t.new_zeros(*(2 * n + 1 for n in t.shape))
    view = padded[tuple(slice(0, 2 * n, 2) for n in t.shape)]
    view.copy_(t)
    return view


def far_apart(near: Tensor) -> Tensor:
    """The rows of near [2, V] more than 2^31 elements apart, in memory that is reserved but hardly touched."""
    stride = 2**31 + 5
    count = stride + near.shape[1]
    with tempfile.TemporaryFile() as file:
        try:
            file.truncate(count * near.element_size())  # a hole: no space is taken
            memory = mmap.mmap(file.fileno(), count * near.element_size())
        except OSError as error:
            pytest.skip(f"no sparse file of {count * near.element_size() >> 30} GiB: {error}")
    far = torch.frombuffer(memory, dtype=near.dtype, count=count).as_strided(near.shape, (stride, 1))
    far.copy_(near)
    return far
