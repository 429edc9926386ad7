"""attn_implementation="tbik": tbik's attention in a model that is otherwise Hugging Face's, for a trainer without TP.

    import tbik.huggingface.attention          registers the name
    AutoModelForCausalLM.from_pretrained(folder, attn_implementation="tbik")

Only the attention then follows the order; norms, rope and linears are still torch's, so whole rows keep no promise:
`tbik.parallelize` is the model that does. Masks are 2-D (1 for a real token) or packed rows by position_ids or
cu_seq_lens_q; a query is one of the last tokens of its row. Padding gets 0 and gives no gradient.
Suffixes: B rows, H query heads, G KV heads, T queries, S keys, D head_dim. Errors: PlanError. Batch-invariant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tbik import ops
from tbik.errors import PlanError
from tbik.huggingface.rows import rows_of

NAME = "tbik"


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key and value [B, G, S, D] -> [B, T, H, D]; S - T tokens were cached."""
    where = 'attn_implementation="tbik"'
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise PlanError(f"{where}: causal attention only")
    if dropout:
        raise PlanError(f"{where}: attention dropout {dropout} has no kernel; set config.attention_dropout = 0.0")
    if others.get("output_attentions"):
        raise PlanError(f"{where}: attention weights are never formed; output_attentions=False")
    batch, _, width, _ = query.shape
    length = key.shape[2]
    mask = None if attention_mask is None else attention_mask.to(torch.int64)
    offsets = None
    if cu_seq_lens_q is not None:
        if cu_seq_lens_k is not None and not torch.equal(cu_seq_lens_q, cu_seq_lens_k):
            raise PlanError(f"{where}: expected the same sequences for queries and keys (cu_seq_lens_q, _k)")
        offsets = cu_seq_lens_q.tolist()
    # positions are known to the caller's rope; here they only say where packed sequences begin
    packs = position_ids if mask is None and length == width and offsets is None else None
    rows = rows_of(batch, width, length - width, mask, packs, offsets, query.device)
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    q = rows.pack(q)
    starts_q = torch.tensor(rows.samples, device=q.device)
    if rows.live is None:
        k, v = (t.reshape(batch * length, *t.shape[2:]) for t in (k, v))
        starts_k = torch.arange(batch + 1, device=q.device) * length if length != width else starts_q
    else:
        places = rows.live.reshape(-1).nonzero()[:, 0]
        k, v = (t.reshape(batch * length, *t.shape[2:]).index_select(0, places) for t in (k, v))
        starts_k = torch.nn.functional.pad(rows.live.sum(1).cumsum(0), (1, 0))
    out = ops.attention(
        q,
        k,
        v,
        starts_q,
        starts_k,
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return rows.unpack(out), None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, flash_attention_mask)
