"""Folds of node values (csrc/combine.h) against the oracle: ORDER.md T4, T5, A3, A4, A6, A7, A8, B1."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from torch import Tensor

from tbik import _C, reference, tree

LOOPS = [path for path in _C.cpu_paths() if path != "avx512_bf16"]  # that one has no loops of its own
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("path", LOOPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_all_reduce_folds(path: str, dtype: torch.dtype, threads: int) -> None:
    """One leaf per rank, sum and average, every tail of a vector and of a chunk."""
    for world, count in itertools.product((1, 2, 3, 5, 8), (1, 7, 33, 1023, 5000)):
        values = [wide_exponents((count,), dtype, seed=10 * world + rank) for rank in range(world)]
        program = _C.run_schedule(0, world, world, True)
        for op, avg in (("sum", 1), ("avg", world)):
            actual = _C.fold(values, program, avg, None, dtype, path)
            what = f"{path} {dtype} W={world} n={count} {op}"
            assert_bitwise_equal(actual, reference.all_reduce(values, op), what)
        assert_bitwise_equal(_C.fold(torch.stack(values), program, 1, None, dtype, path), reference.all_reduce(values))


@pytest.mark.parametrize("path", LOOPS)
@pytest.mark.parametrize("rounds", [False, True])
def test_verify_covers_fold_to_the_root(path: str, rounds: bool) -> None:
    """Leaves -> covers of a few runs -> root equals leaves -> root, with and without a bf16 wire; bias at the root."""
    bias = wide_exponents((37,), torch.bfloat16, seed=3)
    for leaves, splits in ((8, (3, 5)), (6, (1, 2)), (7, (0, 4)), (12, (5, 6)), (9, (4, 8)), (1, (0, 1))):
        values = [wide_exponents((3, 37), torch.float32, seed=leaf) for leaf in range(leaves)]
        root = _C.fold(values, _C.run_schedule(0, leaves, leaves, True, rounds), 1, bias, torch.bfloat16, path)
        bounds = (0, *splits, leaves)
        covers, nodes, parts = [], [], []
        for lo, hi in itertools.pairwise(bounds):
            if lo == hi:
                continue
            program = _C.run_schedule(lo, hi, leaves, False, rounds)
            cover = _C.fold(values[lo:hi], program, path=path)
            assert cover.dtype == torch.float32 and cover.shape == (len(program.outputs), 3, 37)
            covers.append({tree.Node(*node): value for node, value in zip(program.outputs, cover)})
            nodes += program.outputs
            parts += list(cover)
        folded = _C.fold(parts, _C.nodes_schedule(nodes, leaves, rounds), 1, bias, torch.bfloat16, path)
        assert_bitwise_equal(folded, root, f"{path} L={leaves} {splits} rounds={rounds}")
        expected = reference.epilogue(reference.fold_covers(covers, leaves, rounds), bias, out_dtype=torch.bfloat16)
        assert_bitwise_equal(root, expected, f"{path} L={leaves} against the oracle")


@pytest.mark.parametrize("path", LOOPS)
def test_verify_sums_of_every_bfloat16(path: str) -> None:
    """All bit patterns, NaN and subnormals included, against shuffled ones; 2 leaves and 3; a tail of every length."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(0)
    for tail in range(17):
        values = [every[tail:].view(torch.bfloat16)]
        values += [every[torch.randperm(1 << 16, generator=generator)[tail:]].view(torch.bfloat16) for _ in range(2)]
        for world in (2, 3):
            program = _C.run_schedule(0, world, world, True)
            actual = _C.fold(torch.stack(values[:world]), program, 1, None, torch.bfloat16, path)
            assert_bitwise_equal(actual, reference.all_reduce(values[:world]), f"{path} {world} leaves, from {tail}")


def test_verify_order_shows_in_the_bits() -> None:
    """Negative control: a flat sum in ascending order differs, and so does a wire in bf16."""
    values = [wide_exponents((200,), torch.float32, seed=rank) for rank in range(8)]
    flat = torch.zeros(200)
    for value in values:
        flat = flat + value
    root = _C.fold(values, _C.run_schedule(0, 8, 8, True))
    assert_bits_differ(root, flat, "tree and flat sum")
    assert_bits_differ(root, _C.fold(values, _C.run_schedule(0, 8, 8, True, True)), "fp32 and bf16 wire")


SUBNORMALS = """
import sys, torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(2)
torch.set_flush_denormal(sys.argv[2] == "on")  # before any worker thread exists: they inherit the mode
from tbik import _C
mode = _C.fp_mode()
tiny = torch.tensor([2**-127, 2**-149, -(2**-130), 0.0], dtype=torch.float64).repeat(5000)
assert _C.fold([tiny], _C.run_schedule(0, 1, 1, True)).equal(tiny)  # fp64: far from its own subnormals
bits = torch.tensor([0x00400000, 0x00000001, -0x7ff80000, 0], dtype=torch.int32).repeat(5000)  # the same as fp32
single = bits.view(torch.float32)
for path in _C.cpu_paths():
    root = _C.run_schedule(0, 2, 2, True)
    zero = torch.zeros(20000)
    assert _C.fold([single, zero], root, path=path).view(torch.int32).equal(bits), path           # node
    halves = _C.fold([single, single], root, 2, path=path)                                        # node, average
    assert halves.view(torch.int32).equal(bits), path
    small = torch.full((20000,), 1.5).mul_(2.0**-126)  # 1.5 - 1 = 0.5 * 2^-126
    one = torch.full((20000,), -(2.0**-126))
    difference = _C.fold([small, one], root, path=path)
    assert difference.view(torch.int32).eq(0x00400000).all(), path
    half = _C.fold([single, zero], root, out_dtype=torch.bfloat16, path=path)                     # cast down
    assert half.view(torch.int16)[:4].tolist() == [0x40, 0, -0x7ff8, 0], path
    back = _C.fold([half, half.clone().zero_()], root, path=path)                                 # cast up
    assert back.view(torch.int32)[:4].tolist() == [0x400000, 0, -0x7ff80000, 0], path
    wire = _C.fold([single, zero], _C.run_schedule(0, 2, 2, True, True), path=path)               # wire
    assert wire.view(torch.int32)[:4].tolist() == [0x400000, 0, -0x7ff80000, 0], path
    f16 = torch.tensor([1, 0x3ff, 0x400, -0x7fff], dtype=torch.int16).repeat(5000).view(torch.float16)
    same = _C.fold([f16], _C.run_schedule(0, 1, 1, True), out_dtype=torch.float16, path=path)     # fp16 subnormals
    assert same.view(torch.int16).equal(f16.view(torch.int16)), path
    bias = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    biased = _C.fold([zero.view(-1, 1)], _C.run_schedule(0, 1, 1, True), bias=bias, path=path)    # bias
    assert biased.view(torch.int32).eq(1).all(), path
    assert _C.fp_mode() == mode, path                                                             # restored
"""


@pytest.mark.parametrize("flush", ["on", "off"])
def test_verify_subnormals_survive(flush: str) -> None:
    """Nodes, averages, bias, casts and wires do not flush, in any thread, whatever mode the process is in."""
    command = [sys.executable, "-c", SUBNORMALS, str(Path(__file__).resolve().parent.parent), flush]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def float_bits() -> Tensor:
    """Every exponent with mantissas around the ties of bf16 and fp16, and random patterns."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (100_000,), generator=generator)
    high = torch.arange(2**16).repeat_interleave(3) << 16
    ties = high | torch.tensor([0x7FFF, 0x8000, 0x8001]).repeat(2**16)
    f16_ties = (torch.arange(0x38000000 - (13 << 23), 0x48000000, 0x1000)[:, None] + torch.tensor([-1, 0, 1])).flatten()
    return torch.cat([random, ties, f16_ties]).to(torch.int32)


@pytest.mark.parametrize("path", LOOPS)
def test_verify_casts(path: str) -> None:
    """Every fp16 and bf16 value widens exactly; fp32 rounds once, ties to even; NaN leaves as the canonical one."""
    one = _C.run_schedule(0, 1, 1, True)
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = patterns.view(dtype)
        assert_bitwise_equal(_C.fold([x], one, out_dtype=torch.float32, path=path), reference.epilogue(x.float()))
    x = float_bits().view(torch.float32)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        expected = reference.epilogue(x, out_dtype=dtype)
        assert_bitwise_equal(_C.fold([x], one, out_dtype=dtype, path=path), expected, f"fp32 -> {dtype}")
    double = wide_exponents((5000,), torch.float64, seed=1, spread=300)
    for dtype in (torch.float32, torch.float64):
        expected = reference.epilogue(double, out_dtype=dtype)
        assert_bitwise_equal(_C.fold([double], one, out_dtype=dtype, path=path), expected, f"fp64 -> {dtype}")


@pytest.mark.parametrize("path", LOOPS)
def test_verify_signed_zero_and_nan(path: str) -> None:
    """-0 survives a fold (A8: an absent row is -0), +0.0 is added only on a bf16 wire; NaN is canonical at the end."""
    minus = torch.full((5,), -0.0)
    two = _C.run_schedule(0, 2, 2, True)
    assert_bitwise_equal(_C.fold([minus, minus], two, path=path), minus)
    assert_bitwise_equal(_C.fold([minus], _C.run_schedule(0, 1, 1, True), path=path), minus)
    assert_bitwise_equal(_C.fold([minus], _C.run_schedule(0, 1, 1, True, True), path=path), torch.zeros(5))
    for dtype, pattern in ((torch.float32, 0x7FC00000), (torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)):
        x = torch.tensor([-1, 0x7F800001, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
        y = torch.tensor([1.0, 1.0, -torch.inf, torch.inf])
        out = _C.fold([x, y], two, out_dtype=dtype, path=path)
        assert (out.view(torch.int32 if dtype == torch.float32 else torch.int16) == pattern).all()


def test_verify_bad_calls_are_refused() -> None:
    x = torch.ones(3)
    one, two, cover = _C.run_schedule(0, 1, 1, True), _C.run_schedule(0, 2, 2, True), _C.run_schedule(1, 3, 4, False)
    for match, call in {
        "1 inputs, the schedule loads 2": lambda: _C.fold([x], two),
        r"inputs\[1\] is .*inputs\[0\] is": lambda: _C.fold([x, x.double()], two),
        "inputs.0.*expected float32, float64": lambda: _C.fold([x.int()], one),
        "avg: expected an integer": lambda: _C.fold([x], one, 0),
        "at the root only": lambda: _C.fold([x, x], cover, 2),
        "a cover leaves in float32": lambda: _C.fold([x, x], cover, out_dtype=torch.bfloat16),
        r"bias: expected shape \[3\]": lambda: _C.fold([x], one, bias=torch.ones(2)),
        "must convert exactly": lambda: _C.fold([x], one, bias=torch.ones(3, dtype=torch.float64)),
        "leaves as float64 or float32": lambda: _C.fold([x.double()], one, out_dtype=torch.bfloat16),
        "bfloat16 wire needs float32": lambda: _C.fold([x.double()], _C.run_schedule(0, 1, 1, True, True)),
        "expected a dense CPU tensor": lambda: _C.fold([x.to("meta")], one),
        "path 'fast' is not available": lambda: _C.fold([x], one, path="fast"),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
