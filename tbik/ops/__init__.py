"""Operators whose bits do not depend on the layout: one file per operator = schema, CPU kernel, backward, fake."""

from tbik.ops.activation import gelu, gelu_and_mul, silu, silu_and_mul
from tbik.ops.attention import (
    AttentionDropout,
    AttentionState,
    HeadRun,
    attention,
    attention_backward,
    attention_forward,
    paged_attention,
    store_kv,
)
from tbik.ops.cross_entropy import TokenSum, cross_entropy, sample_cover, sample_sums, token_losses, token_sum
from tbik.ops.dropout import DropoutKey, dropout
from tbik.ops.embedding import embedding
from tbik.ops.experts import Routing, experts, experts_cover, route
from tbik.ops.fanout import fanout
from tbik.ops.linear import PackedWeight, linear, linear_group, pack_weight
from tbik.ops.logprobs import TopK, TopLogprobs, argmax, logprobs, top_k, top_logprobs
from tbik.ops.norm import add_rms_norm, layer_norm, rms_norm
from tbik.ops.reduction import mean, sum
from tbik.ops.rope import inverse_frequencies, rope, rope_tables
from tbik.ops.rope_attention import rope_attention
from tbik.ops.softcap import softcap
from tbik.ops.softmax import log_softmax, softmax

__all__ = [
    "AttentionDropout",
    "AttentionState",
    "DropoutKey",
    "HeadRun",
    "PackedWeight",
    "Routing",
    "TokenSum",
    "TopK",
    "TopLogprobs",
    "add_rms_norm",
    "argmax",
    "attention",
    "attention_backward",
    "attention_forward",
    "cross_entropy",
    "dropout",
    "embedding",
    "experts",
    "experts_cover",
    "fanout",
    "gelu",
    "gelu_and_mul",
    "inverse_frequencies",
    "layer_norm",
    "linear",
    "linear_group",
    "log_softmax",
    "logprobs",
    "mean",
    "pack_weight",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_attention",
    "rope_tables",
    "route",
    "sample_cover",
    "sample_sums",
    "silu",
    "silu_and_mul",
    "softcap",
    "softmax",
    "store_kv",
    "sum",
    "token_losses",
    "token_sum",
    "top_k",
    "top_logprobs",
]
