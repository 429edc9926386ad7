"""Operators whose bits do not depend on the layout: one file per operator = schema, CPU kernel, backward, fake."""

from tbik.ops.attention import (
    AttentionState,
    HeadRun,
    attention,
    attention_backward,
    attention_forward,
    paged_attention,
    store_kv,
)
from tbik.ops.linear import PackedWeight, linear, linear_group, pack_weight

__all__ = [
    "AttentionState",
    "HeadRun",
    "PackedWeight",
    "attention",
    "attention_backward",
    "attention_forward",
    "linear",
    "linear_group",
    "pack_weight",
    "paged_attention",
    "store_kv",
]
