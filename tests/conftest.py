"""What every test shares: no network, one hypothesis profile, markers, a process that flushes subnormals."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: its kernels run on the CPU (interpreter.py)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("ci")


def pytest_configure(config: pytest.Config) -> None:
    for marker in (
        "slow: takes more than ten seconds",
        "cuda: needs a CUDA device",
        "multiprocess: starts other processes",
        "mpi: needs mpi4py and an MPI runtime",
        "vllm: needs vLLM",
        "cpu_flag(name): needs a CPU flag, as listed in /proc/cpuinfo",
    ):
        config.addinivalue_line("markers", marker)


@pytest.fixture
def flush_denormal() -> Iterator[None]:
    """torch.set_flush_denormal(True) inside the test (skipped where the CPU cannot), off afterwards."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-to-zero mode that torch can set")
    yield
    torch.set_flush_denormal(False)
