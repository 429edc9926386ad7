"""vLLM's CUDA attention by tbik's operators (paged.py): a backend of our own under the name CUSTOM. NOT RUN ON A GPU.

    cache of a layer [P, G, N, 2 D]: the keys, then the values of a slot and KV head; any of vLLM's physical layouts

Views of the cache go to the kernels by their strides, 64-bit there; nothing is copied. No cascade attention (vLLM has
none left), no CUDA graph: vLLM is told NEVER and the engine runs eagerly, as on the CPU. On CUDA the host sees neither
lengths nor pages; what they make wrong is NaN. Suffixes and errors as in paged.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from tbik import PlanError
from tbik_vllm.paged import PagedAttention, require_causal

LARGEST_HEAD = 256
"""The largest head_dim that bench/results/gpu_compile.md has compiled."""
LEAST_CAPABILITY = (8, 0)


class TbikCudaAttentionBackend(AttentionBackend):
    """Registered under the name CUSTOM, which cuda_platform.py makes every engine ask for."""

    forward_includes_kv_cache_update: bool = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return TbikCudaAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return TbikCudaAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 0 < head_size <= LARGEST_HEAD

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool((capability.major, capability.minor) >= LEAST_CAPABILITY)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *others: Any, **named: Any
    ) -> str | None:
        if kv_cache_dtype in (None, "auto") or kv_cache_dtype == str(dtype).removeprefix("torch."):
            return None
        return f"a KV cache in {kv_cache_dtype} under {dtype}: keys would be rounded; expected kv_cache_dtype 'auto'"


@dataclass
class TbikCudaAttentionMetadata(AttentionMetadata):
    """What of a step ops.paged_attention reads: block_table [B, pages], seq_lens [B], query_start_loc [B + 1]."""

    num_actual_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor


class TbikCudaAttentionMetadataBuilder(AttentionMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TbikCudaAttentionMetadata:
        common = common_attn_metadata
        require_causal(common)
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens", "encoder_seq_lens", "dcp_local_seq_lens"):
            if getattr(common, name) is not None:
                raise PlanError(f"tbik_vllm: attention with {name} is not supported; expected a causal text decoder")
        return TbikCudaAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
        )


class TbikCudaAttentionImpl(PagedAttention, AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes, self.sliding_window, self.sinks = alibi_slopes, sliding_window, sinks
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.logits_soft_cap = logits_soft_cap or 0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._start(sliding_window)

    @staticmethod
    def split(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        return keys, values
