"""What vLLM's attention is on every device: ops.store_kv and ops.paged_attention (ORDER.md K1, K2, K6) over its cache.

    out = softmax(scale q k^T) v over the keys of each query's own sequence         cache -> keys, values [P, N, G, D]

A query's bits ignore the batch, chunks of the prompt, prefix-cache hits, pages and threads. Leaf: the plan's (K6).
Suffixes: T query tokens, H query heads and G KV heads of this rank, D head_dim, P pages of N slots, B sequences.
Errors: PlanError at construction, naming what is not supported.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionType

from tbik import PlanError, ops
from tbik_vllm.refusals import CACHE_DTYPES
from tbik_vllm.settings import plan_for


def require_causal(common: Any) -> None:
    """PlanError for a step of vLLM (its CommonAttentionMetadata) with other pairs than causal ones."""
    if common.causal is not True:
        raise PlanError(f"tbik_vllm: attention is causal here, vLLM asks for causal={common.causal!r}")


class PagedAttention:
    """Mixin before vLLM's AttentionImpl; `_start` ends its __init__."""

    tbik_pages: tuple[Tensor, Tensor, Tensor] | None = None

    def _start(self, sliding_window: int | None) -> None:
        me: Any = self
        for refused, what in (
            (me.attn_type != AttentionType.DECODER, f"attn_type {me.attn_type!r}; expected a causal decoder"),
            (me.alibi_slopes is not None, "alibi slopes"),
            (me.kv_sharing_target_layer_name is not None, "keys shared with another layer"),
            (me.kv_cache_dtype not in CACHE_DTYPES, f"a KV cache in {me.kv_cache_dtype}"),
            (me.num_heads % me.num_kv_heads != 0, f"{me.num_heads} heads over {me.num_kv_heads} KV heads"),
        ):
            if refused:
                raise PlanError(f"tbik_vllm: attention with {what} is not supported")
        self.tbik_plan = plan_for(get_current_vllm_config())
        self.tbik_window = sliding_window
        self.tbik_softcap = me.logits_soft_cap or None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, H, D] -> output [T, H, D], over the keys that do_kv_cache_update has stored."""
        if output_scale is not None or output_block_scale is not None:
            raise PlanError("tbik_vllm: attention with a quantised output is not supported")
        if attn_metadata is None:  # vLLM warms up
            return output.fill_(0)
        me: Any = self
        tokens = attn_metadata.num_actual_tokens
        keys, values = self._pages(kv_cache)
        output[:tokens] = ops.paged_attention(
            query[:tokens],
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            scale=me.scale,
            window=self.tbik_window,
            softcap=self.tbik_softcap,
            sinks=me.sinks,
            plan=self.tbik_plan,
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
            self.tbik_pages = (kv_cache, *self.split(kv_cache))
        return self.tbik_pages[1:]

    @staticmethod
    def split(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [P, N, G, D] of a layer's cache, views of it."""
        raise NotImplementedError
