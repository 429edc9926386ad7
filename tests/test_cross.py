"""The torch-free kernels on another architecture: cross-compiled, run in an emulator, the same bits (ORDER.md P2)."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from assertions import assert_bitwise_equal
from cases import wide_exponents

from tbik import _C

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["gemm", "gemm_portable", "gemm_avx2", "gemm_avx512f", "gemm_avx512_bf16", "gemm_amx", "memory"]
CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
SHAPES = ((1, 65, 40, 4), (9, 3, 97, 8), (7, 70, 3, 5))


def operands(dtype: torch.dtype, m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Exponents around the square root of the smallest normal number, so that steps underflow, and some subnormals."""
    shift = {torch.float16: -6, torch.float64: -511}.get(dtype, -63)
    x, w = (wide_exponents((rows, k), dtype, seed, 24).double() * 2.0**shift for rows, seed in ((m, 1), (n, 2)))
    x[:, ::7] *= 2.0**-66
    w[:, 2::7] *= 2.0**66
    return x.to(dtype), w.to(dtype)


@pytest.mark.slow
def test_verify_aarch64_same_bits(tmp_path: Path) -> None:
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("needs aarch64-linux-gnu-g++ and qemu-aarch64 (g++-aarch64-linux-gnu and qemu-user)")
    program = tmp_path / "gemm_vectors"
    flags = ["-O2", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-static", "-Wall"]
    sources = [str(ROOT / "csrc" / f"{name}.cpp") for name in SOURCES] + [str(ROOT / "tests" / "gemm_vectors.cpp")]
    build = [compiler, *flags, "-Werror", *sources, "-o", str(program)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, expected = b"", []
    for dtype, code in CODES.items():
        for m, n, k, leaves in SHAPES:
            x, w = operands(dtype, m, n, k)
            text += struct.pack("<5q", m, n, k, leaves, code)
            text += b"".join(bytes(t.contiguous().view(torch.uint8).flatten().tolist()) for t in (x, w))
            name = str(dtype).removeprefix("torch.")
            out = torch.float64 if dtype == torch.float64 else torch.float32
            root = _C.run_schedule(0, leaves, leaves, True)
            expected.append(_C.gemm([x], False, [w], False, [_C.cuts(k, leaves)], root, name, None, out, "portable"))
    run = subprocess.run([emulator, str(program)], input=text, capture_output=True)
    assert run.returncode == 0, run.stderr
    at = 0
    for value in expected:
        actual = torch.frombuffer(bytearray(run.stdout[at : at + value.nbytes]), dtype=value.dtype).view(value.shape)
        assert_bitwise_equal(actual, value, f"aarch64, shape {tuple(value.shape)}")
        at += value.nbytes
    assert at == len(run.stdout)
