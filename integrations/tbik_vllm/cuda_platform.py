"""What the plug-in asks of vLLM on CUDA beside its own classes: environment, configuration, attention backend.

    environment       read by vLLM before it makes a configuration: set where unset, refused where set otherwise
    TBIK_VLLM=full    eager; attention backend CUSTOM; no pass, stream or runner that adds numbers elsewhere
    allreduce         the operators are vLLM's, in its batch-invariant mode; no pass that hides a sum in a kernel

NOT RUN ON A GPU: tests/test_vllm_cuda.py runs it with vLLM's own CUDA platform class on a machine without one.
Errors: PlanError naming the setting. Bits: none here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from tbik import PlanError
from tbik_vllm import refusals

BACKEND = "CUSTOM"
"""Name of our attention backend in vLLM's registry."""

BATCH_INVARIANT = {
    "VLLM_BATCH_INVARIANT": ("1", "the operators that are not tbik's need vLLM's batch-invariant mode"),
}
FULL = BATCH_INVARIANT | {
    "VLLM_USE_V2_MODEL_RUNNER": ("0", "the V2 model runner's sampler has a log-softmax of its own"),
    "VLLM_USE_BREAKABLE_CUDAGRAPH": ("0", "the engine runs eagerly"),
    "VLLM_USE_FLASHINFER_SAMPLER": ("0", "FlashInfer adds probabilities in an order of its own"),
}
"""Variable -> what it must be, and why."""

Say = Callable[[str, str], None]


def set_environment(wanted: dict[str, tuple[str, str]], say: Say) -> None:
    for name, (value, reason) in wanted.items():
        if os.environ.setdefault(name, value) != value:
            raise PlanError(
                f"tbik_vllm: {name} is {os.environ[name]!r}; on CUDA {reason}: leave it unset, or set it to {value}"
            )
        say(name, value)


def architecture(platform: Any) -> str:
    """sm_90 of a GPU of capability 9.0, as a plan's leaf names it."""
    capability = platform.get_device_capability()
    if capability is None:
        raise PlanError("tbik_vllm: vLLM finds no CUDA device whose architecture it can ask for")
    return f"sm_{capability.major}{capability.minor}"


# --- TBIK_VLLM=full ---------------------------------------------------------------------------------------------------


def register_attention(say: Say) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    ours = "tbik_vllm.attention_cuda.TbikCudaAttentionBackend"
    if AttentionBackendEnum.CUSTOM.is_overridden():
        raise PlanError(
            f"tbik_vllm: another plug-in has the attention backend CUSTOM ({AttentionBackendEnum.CUSTOM.get_path()}); "
            "unload it"
        )
    register_backend(AttentionBackendEnum.CUSTOM, ours)
    say(f"attention backend {BACKEND}", ours)


def replace_sampling(say: Say) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from tbik_vllm.sampling_cuda import sample

    TopKTopPSampler.forward_native = TopKTopPSampler.forward_cuda = sample
    say("TopKTopPSampler.forward_native, forward_cuda", "tbik_vllm.sampling_cuda.sample")


def wrap_defaults(platform: Any, say: Say) -> None:
    """Ahead of vLLM's own defaults, which follow from these: eager, our attention, no fused sums."""
    stock = platform.apply_config_platform_defaults.__func__

    @wraps(stock)
    def apply_config_platform_defaults(cls: Any, vllm_config: Any) -> None:
        if vllm_config.model_config is not None:
            settle(vllm_config)
        stock(cls, vllm_config)

    platform.apply_config_platform_defaults = classmethod(apply_config_platform_defaults)
    say(f"{platform.__name__}.apply_config_platform_defaults", "tbik's settings, then the same")


def settle(vllm_config: Any) -> None:
    """PlanError where the user asked for what changes a sum; else what TBIK_VLLM=full needs."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    passes = vllm_config.compilation_config.pass_config
    asked = [name for name in refusals.FUSED_SUMS if getattr(passes, name, None)]
    if asked:
        raise PlanError(
            f"tbik_vllm: compilation_config.pass_config.{asked[0]} is True, expected False: the sum and what follows "
            "it are separate"
        )
    for name in refusals.FUSED_SUMS:
        if hasattr(passes, name):
            setattr(passes, name, False)
    attention = vllm_config.attention_config
    if attention.backend not in (None, AttentionBackendEnum.CUSTOM) or attention.backend_per_kind:
        found = attention.backend_per_kind or attention.backend.name
        raise PlanError(
            f"tbik_vllm: the attention backend is {found}, expected {BACKEND} or none: TBIK_VLLM=full brings its own "
            "(tbik_vllm.attention_cuda); leave attention_backend unset"
        )
    attention.backend = AttentionBackendEnum.CUSTOM
    # vLLM's own consequences of enforce_eager come before this hook
    vllm_config.model_config.enforce_eager = True
    vllm_config.compilation_config.mode = CompilationMode.NONE
    vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    vllm_config.kernel_config.enable_jit_warmup = False
    vllm_config.parallel_config.disable_custom_all_reduce = True  # no sum of ours goes there: it need not be opened


# --- TBIK_VLLM=allreduce ----------------------------------------------------------------------------------------------


def keep_stock_apart(platform: Any, say: Say) -> None:
    """The operators are vLLM's: no pass that hides a sum in a kernel, before and after vLLM's own settings."""
    stock = platform.check_and_update_config.__func__

    @wraps(stock)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        keep_sums_apart(vllm_config, say)  # before vLLM derives anything from them
        stock(cls, vllm_config)
        keep_sums_apart(vllm_config, say)

    platform.check_and_update_config = classmethod(check_and_update_config)
    say(f"{platform.__name__}.check_and_update_config", "the same, without fused and scattered sums")


def keep_sums_apart(vllm_config: Any, say: Say) -> None:
    """No fused all-reduce and norm, no sequence parallelism, no fused GEMM and collective."""
    passes = vllm_config.compilation_config.pass_config
    for name in refusals.FUSED_SUMS:
        if getattr(passes, name, None):
            say(f"compilation_config.pass_config.{name}: True", "False")
        if hasattr(passes, name):
            setattr(passes, name, False)
