"""What this plug-in relies on inside vLLM, checked when it is loaded: version and signatures.

Errors: PlanError naming the symbol, what was expected and what is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from tbik import PlanError

TESTED_VERSIONS = ("0.32.0",)

_LINEAR = "vllm.model_executor.layers.linear."
_VOCAB = "vllm.model_executor.layers.vocab_parallel_embedding."
_NORM = "vllm.model_executor.layers.layernorm."
_ROPE = "vllm.model_executor.layers.rotary_embedding."
_MOE = "vllm.model_executor.layers.fused_moe."
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn."

SIGNATURES: Mapping[str, str] = {
    "vllm.model_executor.custom_op.PluggableLayer.register_oot": "_decorated_layer_cls name",
    "vllm.model_executor.custom_op.CustomOp.register_oot": "_decorated_op_cls name",
    _LINEAR + "UnquantizedLinearMethod.apply": "self layer x bias",
    _LINEAR + "UnquantizedLinearMethod.process_weights_after_loading": "self layer",
    _LINEAR + "RowParallelLinear.forward": "self input_",
    _LINEAR + "RowParallelLinear.__init__": (
        "self input_size output_size bias input_is_parallel skip_bias_add params_dtype reduce_results quant_config "
        "prefix return_bias disable_tp"
    ),
    _LINEAR + "ColumnParallelLinear.forward": "self input_",
    _LINEAR + "ReplicatedLinear.forward": "self x",
    _VOCAB + "UnquantizedEmbeddingMethod.apply": "self layer x bias",
    _VOCAB + "UnquantizedEmbeddingMethod.embedding": "self layer input_",
    _VOCAB + "VocabParallelEmbedding.forward": "self input_",
    "vllm.model_executor.layers.logits_processor.LogitsProcessor._apply_head": (
        "self lm_head hidden_states embedding_bias"
    ),
    _NORM + "RMSNorm.forward_native": "self x residual",
    _NORM + "GemmaRMSNorm.forward_native": "self x residual",
    _ROPE + "base.RotaryEmbedding.forward_native": "self positions query key",
    "vllm.model_executor.layers.activation.SiluAndMul.forward_native": "x",
    "vllm.model_executor.layers.activation.GeluAndMul.forward_native": "self x",
    _CPU_ATTENTION + "CPUAttentionBackendImpl.__init__": (
        "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name sinks"
    ),
    _CPU_ATTENTION + "CPUAttentionBackendImpl.forward": (
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    ),
    _CPU_ATTENTION + "CPUAttentionBackendImpl.do_kv_cache_update": "self layer key value kv_cache slot_mapping",
    _CPU_ATTENTION + "CPUAttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata fast_build",
    _MOE
    + "unquantized_fused_moe_method.UnquantizedFusedMoEMethod.apply_monolithic": "self layer x router_logits input_ids",
    _MOE + "router.gate_linear.GateLinear.forward": "self x",
    "vllm.v1.sample.sampler.Sampler.compute_logprobs": "logits",
    "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator.all_reduce": "self input_",
    "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model": "self vllm_config model_config prefix",
}
"""Symbol -> names of its parameters, in order."""


def require_known_vllm() -> None:
    """PlanError unless vLLM's version was tested and every symbol is as it was then."""
    version = import_module("vllm").__version__
    if version.split("+")[0] not in TESTED_VERSIONS:
        raise PlanError(
            f"tbik_vllm: vLLM {version} is untested; expected {' or '.join(TESTED_VERSIONS)}. "
            "Install a tested version, or run without TBIK=1"
        )
    for name, expected in SIGNATURES.items():
        found = parameters_of(name)
        if found is None:
            raise PlanError(f"tbik_vllm: vLLM {version} has no such symbol as {name}, which this plug-in relies on")
        if found != expected:
            raise PlanError(
                f"tbik_vllm: {name} of vLLM {version} takes ({found.replace(' ', ', ')}), expected "
                f"({expected.replace(' ', ', ')}); another build, or another plug-in has replaced it"
            )


def parameters_of(name: str) -> str | None:
    """The parameter names of a symbol, separated by spaces; None if there is no such symbol."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = inspect.getattr_static(found, part, None) if isinstance(found, type) else getattr(found, part, None)
            if found is None:
                return None
        found = getattr(found, "__func__", found)
        names = list(inspect.signature(found).parameters)
        return " ".join(names[1:] if names[:1] == ["cls"] else names)
    return None
