"""vLLM's CPU attention by ops.paged_attention (ORDER.md K1, K2), over vLLM's own KV cache.

    cache of a layer [P, G, N, 2 D]: per page and KV head N rows of keys, then N rows of values

A query's bits ignore the batch, chunks of the prompt, prefix-cache hits, pages and threads.
Suffixes: T query tokens, H query heads and G KV heads of this rank, D head_dim, P pages of N slots, B sequences.
Errors: PlanError at construction, naming what is not supported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from tbik import PlanError, ops

CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32")


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
        if common.causal is not True:
            raise PlanError(f"tbik_vllm: attention is causal here, vLLM asks for causal={common.causal!r}")
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


class TbikAttentionImpl(CPUAttentionBackendImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for refused, what in (
            (self.attn_type != AttentionType.DECODER, f"attn_type {self.attn_type!r}; expected a causal decoder"),
            (self.alibi_slopes is not None, "alibi slopes"),
            (self.kv_sharing_target_layer_name is not None, "keys shared with another layer"),
            (self.kv_cache_dtype not in CACHE_DTYPES, f"a KV cache in {self.kv_cache_dtype}"),
            (self.num_heads % self.num_kv_heads != 0, f"{self.num_heads} heads over {self.num_kv_heads} KV heads"),
        ):
            if refused:
                raise PlanError(f"tbik_vllm: attention with {what} is not supported")
        self.tbik_window = None if self.sliding_window < 0 else self.sliding_window
        self.tbik_softcap = self.logits_soft_cap or None
        self.tbik_pages: tuple[Tensor, Tensor, Tensor] | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, H, D] -> output [T, H, D], over the keys that do_kv_cache_update has stored."""
        if output_scale is not None or output_block_scale is not None:
            raise PlanError("tbik_vllm: attention with a quantised output is not supported")
        if attn_metadata is None:  # vLLM warms up
            return output
        tokens = attn_metadata.num_actual_tokens
        keys, values = self._pages(kv_cache)
        output[:tokens] = ops.paged_attention(
            query[:tokens],
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            scale=self.scale,
            window=self.tbik_window,
            softcap=self.tbik_softcap,
            sinks=self.sinks,
        )
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        tokens = slot_mapping.shape[0]
        ops.store_kv(key[:tokens], value[:tokens], *self._pages(kv_cache), slot_mapping)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The same views for as long as the layer's cache is the same tensor."""
        if self.tbik_pages is None or self.tbik_pages[0] is not kv_cache:
            self.tbik_pages = (kv_cache, *_pages(kv_cache))
        return self.tbik_pages[1:]


def _pages(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [P, N, G, D] of a cache [P, G, N, 2 D]."""
    pages, heads, slots, _ = kv_cache.shape
    keys, values = kv_cache.view(pages, heads, 2 * slots, -1).chunk(2, dim=2)
    return keys.transpose(1, 2), values.transpose(1, 2)
