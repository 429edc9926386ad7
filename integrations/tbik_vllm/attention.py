"""vLLM's CPU attention by tbik's operators (paged.py), over vLLM's own KV cache.

cache of a layer [P, G, N, 2 D]: per page and KV head N rows of keys, then N rows of values
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from tbik_vllm.paged import PagedAttention, require_causal


class TbikAttentionBackend(CPUAttentionBackend):
    """Registered under the name CPU_ATTN, which the CPU platform asks for."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return TbikAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return TbikAttentionMetadataBuilder


class TbikAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """What of a step's metadata ops.paged_attention reads; no schedule of vLLM's kernel."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        common = common_attn_metadata
        require_causal(common)
        return CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            causal=True,
        )


class TbikAttentionImpl(PagedAttention, CPUAttentionBackendImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start(None if self.sliding_window < 0 else self.sliding_window)

    @staticmethod
    def split(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        pages, heads, slots, _ = kv_cache.shape
        keys, values = kv_cache.view(pages, heads, 2 * slots, -1).chunk(2, dim=2)
        return keys.transpose(1, 2), values.transpose(1, 2)
