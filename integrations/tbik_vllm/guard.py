"""What this plug-in relies on inside vLLM, checked when it is loaded: version and signatures.

Errors: PlanError naming the symbol, what was expected and what is there.
"""

from __future__ import annotations

import inspect
import itertools
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
_ATTENTION = "vllm.v1.attention.backend."
_SAMPLING = "vllm.v1.sample.ops.topk_topp_sampler."
_COMMUNICATORS = "vllm.distributed.device_communicators."
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
    "vllm.v1.attention.backends.registry.register_backend": "backend class_path is_mamba",
    _MOE
    + "unquantized_fused_moe_method.UnquantizedFusedMoEMethod.apply_monolithic": "self layer x router_logits input_ids",
    _MOE + "router.gate_linear.GateLinear.forward": "self x",
    "vllm.v1.sample.sampler.Sampler.compute_logprobs": "logits",
    "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model": "self vllm_config model_config prefix",
}
"""Symbol -> names of its parameters, in order; of every platform."""

CPU_SIGNATURES: Mapping[str, str] = {
    _CPU_ATTENTION + "CPUAttentionBackendImpl.__init__": (
        "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name sinks"
    ),
    _CPU_ATTENTION + "CPUAttentionBackendImpl.forward": (
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    ),
    _CPU_ATTENTION + "CPUAttentionBackendImpl.do_kv_cache_update": "self layer key value kv_cache slot_mapping",
    _CPU_ATTENTION + "CPUAttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata fast_build",
    _COMMUNICATORS + "cpu_communicator.CpuCommunicator.all_reduce": "self input_",
}

CUDA_SIGNATURES: Mapping[str, str] = {
    "vllm.platforms.cuda.CudaPlatformBase.check_and_update_config": "vllm_config",
    "vllm.platforms.cuda.CudaPlatformBase.get_attn_backend_cls": "selected_backend attn_selector_config num_heads",
    "vllm.platforms.interface.Platform.apply_config_platform_defaults": "vllm_config",
    "vllm.platforms.interface.Platform.get_device_capability": "device_id",
    _ATTENTION + "AttentionBackend.validate_configuration": (
        "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix "
        "use_per_head_quant_scales device_capability attn_type has_sliding_window use_non_causal use_batch_invariant "
        "use_kv_connector use_pcp use_adaptive_verification use_dcp use_rswa"
    ),
    _ATTENTION + "AttentionBackend.supports_combination": (
        "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix device_capability"
    ),
    _ATTENTION + "AttentionImpl.__init__": (
        "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap "
        "attn_type kv_sharing_target_layer_name"
    ),
    _ATTENTION + "AttentionImpl.forward": (
        "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
    ),
    _ATTENTION + "AttentionMetadataBuilder.__init__": "self kv_cache_spec layer_names vllm_config device",
    _ATTENTION + "AttentionMetadataBuilder.build": "self common_prefix_len common_attn_metadata fast_build",
    _ATTENTION + "CommonAttentionMetadata.__init__": (
        "self query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len "
        "block_table_tensor slot_mapping causal logits_indices_padded num_logits_indices max_logits_per_req "
        "encoder_seq_lens encoder_seq_lens_cpu dcp_local_seq_lens dcp_local_seq_lens_cpu_upper_bound positions "
        "is_prefilling seq_lens_cpu_upper_bound req_idx mm_req_doc_ranges rswa_prefix_lens replayssm_decode_base_cpu "
        "_num_computed_tokens_cache _token_to_req_indices_cache"
    ),
    "vllm.v1.kv_cache_interface.create_kv_cache_views": (
        "raw spec num_blocks layout kv_cache_tensor kernel_block_size"
    ),
    "vllm.model_executor.layers.attention.attention.unified_kv_cache_update": "key value layer_name",
    _SAMPLING + "TopKTopPSampler.forward_native": "self logits generators k p",
    _SAMPLING + "TopKTopPSampler.forward_cuda": "self logits generators k p",
    _SAMPLING + "random_sample": "probs generators use_fp64_gumbel",
    _COMMUNICATORS + "cuda_communicator.CudaCommunicator.all_reduce": "self input_",
    _COMMUNICATORS + "cuda_communicator.CudaCommunicator.reduce_scatter": "self input_ dim",
    _COMMUNICATORS + "cuda_communicator.CudaCommunicator.reduce_scatterv": "self input_ dim sizes",
    "vllm.model_executor.determinism.batch_invariant.init_batch_invariance": "",
}


def require_known_vllm(is_cpu: bool = True) -> None:
    """PlanError unless vLLM's version was tested and every symbol of the platform is as it was then."""
    version = import_module("vllm").__version__
    if version.split("+")[0] not in TESTED_VERSIONS:
        raise PlanError(
            f"tbik_vllm: vLLM {version} is untested; expected {' or '.join(TESTED_VERSIONS)}. "
            "Install a tested version, or run without TBIK=1"
        )
    platform = CPU_SIGNATURES if is_cpu else CUDA_SIGNATURES
    for name, expected in itertools.chain(SIGNATURES.items(), platform.items()):
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
