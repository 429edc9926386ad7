"""The elementary functions and the row reductions of the kernels, on every CPU path (ORDER.md A8, A9, C)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tbik import _C, reference

PATHS = _C.cpu_paths()
FUNCTIONS = ("exp", "log", "sigmoid", "tanh", "silu")


def every_exponent(mantissas: int, seed: int) -> Tensor:
    """All 512 combinations of sign and exponent (NaN, inf and subnormals among them), random and extreme mantissas."""
    generator = torch.Generator().manual_seed(seed)
    low = torch.randint(0, 2**23, (512, mantissas), generator=generator)
    low[:, :4] = torch.tensor([0, 1, 2**22, 2**23 - 1])
    return ((torch.arange(512)[:, None] << 23) | low).to(torch.int32).view(torch.float32).reshape(-1)


def boundaries() -> Tensor:
    """The neighbours of every constant at which a formula changes."""
    centres = torch.tensor(
        [
            reference.EXP_HIGHEST,
            reference.EXP_LOWEST,
            88.7228394,
            -87.3365448,
            reference.TANH_SMALL,
            0.70710678,
            1.0,
            9.0,
        ]
    )
    bits = centres.view(torch.int32)[:, None] + torch.arange(-200, 201, dtype=torch.int32)
    return torch.cat([bits.reshape(-1).view(torch.float32), -bits.reshape(-1).view(torch.float32)])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_verify_elementary_functions_equal_reference(name: str, path: str) -> None:
    x = torch.cat([every_exponent(260, seed=1), boundaries(), torch.linspace(-110, 110, 100_001)])
    assert_bitwise_equal(getattr(_C, name)(x, path), getattr(reference, name)(x), f"{name} on {path}")


@pytest.mark.parametrize("path", PATHS)
def test_verify_elementary_functions_ignore_position(path: str) -> None:
    """Vector body and tail are one polynomial: every alignment and length gives the element's bits."""
    x = wide_exponents((80,), torch.float32, seed=3, spread=12)
    for name in FUNCTIONS:
        whole = getattr(_C, name)(x, path)
        for first in range(0, 20):
            for count in (1, 2, 7, 15, 17, 33, 60):
                part = getattr(_C, name)(x[first : first + count], path)
                assert_bitwise_equal(part, whole[first : first + count], f"{name} {path} [{first}, +{count})")


@pytest.mark.parametrize("path", PATHS)
def test_verify_sin_cos_equals_reference(path: str) -> None:
    generator = torch.Generator().manual_seed(4)
    positions = torch.cat([torch.arange(300), torch.randint(0, 2**20, (200,), generator=generator)])
    inv_freq = torch.tensor([1.0, 0.75, 0.1, 1e-2, 1e-4, 1e-7, 2.0**-40, 0.0])
    angle = positions.float()[:, None] * inv_freq
    sine, cosine = _C.sin_cos(angle, path)
    expected = reference.sin_cos_tables(positions, inv_freq)
    assert_bitwise_equal(sine, expected[0], f"sin on {path}")
    assert_bitwise_equal(cosine, expected[1], f"cos on {path}")
    sine, cosine = _C.sin_cos(-angle, path)
    expected = reference.sin_cos_tables(positions, -inv_freq)
    assert_bitwise_equal(sine, expected[0], f"sin on {path}")
    assert_bitwise_equal(cosine, expected[1], f"cos on {path}")
    with pytest.raises(ValueError, match="at most 2"):
        _C.sin_cos(torch.tensor([2.0**20 + 1]), path)


LENGTHS = (0, 1, 2, 15, 16, 17, 31, 128, 511, 512, 513, 576, 1024, 1537, 2048, 2560, 4096 + 33, 12 * 512 + 7)


@pytest.mark.parametrize("path", PATHS)
def test_verify_row_sum_equals_reference(path: str) -> None:
    for length in LENGTHS:
        x = wide_exponents((3, length), torch.float32, seed=length)
        for leaves in (1, 3, 8):
            assert_bitwise_equal(_C.row_sum(x, leaves, path), reference.row_sum(x, leaves), f"{length} / {leaves}")


@settings(max_examples=200, deadline=None)
@given(length=st.integers(0, 2100), leaves=st.integers(1, 12), seed=st.integers(0, 2**20), spread=st.integers(2, 200))
def test_verify_row_sum_of_any_row(length: int, leaves: int, seed: int, spread: int) -> None:
    x = wide_exponents((2, length), torch.float32, seed, spread)
    expected = reference.row_sum(x, leaves)
    for path in PATHS:
        assert_bitwise_equal(_C.row_sum(x, leaves, path), expected, f"{path} {length} / {leaves}")


def test_validate_row_sum_shows_the_order() -> None:
    x = wide_exponents((64, 1537), torch.float32, seed=5)
    total = _C.row_sum(x)
    assert_bits_differ(total, x.sum(-1), "torch's sum")
    assert_bits_differ(total, _C.row_sum(x, 8), "eight leaves")
    assert_bits_differ(total, _C.row_sum(x.flip(-1)), "the row backwards")


@pytest.mark.parametrize("path", PATHS)
def test_verify_row_max_equals_reference(path: str) -> None:
    inf, nan = float("inf"), float("nan")
    minus_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32).item()
    special = [0.0, -0.0, inf, -inf, nan, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, -1.0, minus_nan]
    generator = torch.Generator().manual_seed(6)
    for length in (0, 1, 2, 3, 7, 16, 17, 40, 100):
        values = [torch.tensor(special[:n])[torch.randint(0, n, (60, length), generator=generator)] for n in (2, 4, 12)]
        x = torch.cat([*values, wide_exponents((20, length), torch.float32, seed=length, spread=250)])
        assert_bitwise_equal(_C.row_max(x, path), reference.row_max(x), f"{path} {length}")
    negative = torch.full((1,), -1, dtype=torch.int32).view(torch.float32)
    assert_bitwise_equal(_C.row_max(negative[None], path), torch.tensor([nan]), "a NaN with its sign bit set")


FLUSH = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from assertions import assert_bitwise_equal
from test_rows import FUNCTIONS, PATHS, every_exponent
from tbik import _C, reference
assert torch.set_flush_denormal(True)
mode = _C.fp_mode()
x = every_exponent(70, seed=8)
row = torch.full((2, 5000), 2.0**-130)
for threads in (1, 2):
    torch.set_num_threads(threads)
    for path in PATHS:
        for name in FUNCTIONS:
            assert_bitwise_equal(getattr(_C, name)(x, path), getattr(reference, name)(x), name)
        assert_bitwise_equal(_C.row_sum(row, 1, path), reference.row_sum(row), "row_sum")
        assert _C.fp_mode() == mode != 0
"""


def test_verify_flush_mode_of_the_process_and_threads() -> None:
    command = [sys.executable, "-c", FLUSH, str(Path(__file__).resolve().parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
