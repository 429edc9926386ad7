"""What an engine under TBIK_VLLM=full may not do, said before it starts and again of the model that was built.

Errors: PlanError naming option or layer, what was found and what would work.
"""

from __future__ import annotations

from typing import Any

import torch

from tbik import PlanError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Gemma3ForCausalLM",
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FUSED_SUMS = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
"""Compilation passes that merge a sum over the ranks with what stands before or after it."""
CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32")


def refuse_config(vllm_config: Any) -> None:
    """PlanError listing every option of the engine that changes a sum and is not ours."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    passes = vllm_config.compilation_config.pass_config
    found = []

    def refuse(name: str, value: Any, expected: str) -> None:
        found.append(f"{name} is {value!r}, expected {expected}")

    for architecture in model.architectures or ["none"]:
        if architecture not in ARCHITECTURES:
            refuse("the architecture", architecture, f"one of {', '.join(ARCHITECTURES)}")
    if model.quantization is not None or vllm_config.quant_config is not None:
        refuse("quantization", model.quantization, "None: plain weights")
    if model.dtype not in DTYPES:
        refuse("dtype", model.dtype, "bfloat16, float16 or float32")
    if vllm_config.cache_config.cache_dtype not in CACHE_DTYPES:
        refuse("kv_cache_dtype", vllm_config.cache_config.cache_dtype, "'auto'")
    if vllm_config.lora_config is not None:
        refuse("enable_lora", True, "False; merge the adapter into the checkpoint")
    if vllm_config.speculative_config is not None:
        refuse("speculative_config", vllm_config.speculative_config.method, "None: no speculative decoding")
    for name in (
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
    ):
        if getattr(parallel, name) != 1:
            refuse(name, getattr(parallel, name), "1")
    for name in ("enable_expert_parallel", "enable_eplb", "enable_dbo", "enable_elastic_ep"):
        if getattr(parallel, name):
            refuse(name, True, "False")
    if getattr(parallel, "ubatch_size", 0) > 1:
        refuse("ubatch_size", parallel.ubatch_size, "0: one batch at a time")
    for name in FUSED_SUMS:
        if getattr(passes, name, None):
            refuse(f"compilation_config.pass_config.{name}", True, "False: the sum and what follows it are separate")
    if model.runner_type != "generate":
        refuse("runner", model.runner_type, "'generate'")
    if vllm_config.use_v2_model_runner:
        refuse("VLLM_USE_V2_MODEL_RUNNER", 1, "0: its sampler has a log-softmax of its own")
    if found:
        raise PlanError("tbik_vllm: this engine cannot keep its bits at every TP size. " + ". ".join(found))


def refuse_model(model: torch.nn.Module, replaced: dict[str, type]) -> None:
    """PlanError for a layer of vLLM that is in the model in its stock form."""
    for name, module in model.named_modules():
        kind = type(module)
        backend = getattr(module, "attn_backend", None)
        if isinstance(backend, type) and not backend.__module__.startswith("tbik_vllm."):
            raise PlanError(
                f"tbik_vllm: {name} has the attention backend {backend.__module__}.{backend.__name__}; expected tbik's"
            )
        if not kind.__module__.startswith("vllm.model_executor.layers."):
            continue
        if kind.__name__ in _STRUCTURAL:
            continue
        instead = replaced.get(kind.__name__)
        reason = "another plug-in replaced it first" if instead else "there is no tbik form of it"
        raise PlanError(f"tbik_vllm: {name} is a {kind.__module__}.{kind.__name__}: {reason}. Not supported")


_STRUCTURAL = ("Attention", "ApplyRotaryEmb", "MoERunner", "RoutedExperts")
"""Layers that add nothing themselves: attention is its backend's, experts are their method's."""
