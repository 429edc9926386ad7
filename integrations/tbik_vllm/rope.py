"""vLLM's rotary embeddings by ops.rope (ORDER.md C5, R4), with the tables of the trainer.

    inv_freq = ops.inverse_frequencies(the layer's own numbers)        sin, cos [P, R/2] fp32, one row per position

Suffixes: T tokens, P positions, D head_dim, R <= D rotated elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from tbik import PlanError, ops


class _Turning(RotaryEmbedding):
    """forward(positions, query, key) of the classes below."""

    tables: tuple[Tensor, Tensor]
    last: tuple[Any, Tensor, tuple[Tensor, Tensor]] | None = None

    def _start(self, parameters: Mapping[str, Any]) -> None:
        fields = {"head_dim": self.rotary_dim, "rope_parameters": {"rope_theta": self.base, **parameters}}
        inv_freq, scale = ops.inverse_frequencies(fields)
        model = get_current_vllm_config().model_config
        count = self.max_position_embeddings if model is None else model.max_model_len
        # no buffers: vLLM's reload moves those to the meta device and back. On the CPU, whatever device vLLM builds on
        self.tables = ops.rope_tables(torch.arange(count, device="cpu"), inv_freq.cpu(), scale=scale)

    def _rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """sin, cos of each token; looked up once per step, whose positions stay what they are."""
        if not is_forward_context_available():
            return self._look_up(positions)
        step = get_forward_context()
        if self.last is None or self.last[0] is not step or self.last[1] is not positions:
            self.last = (step, positions, self._look_up(positions))
        return self.last[2]

    def _look_up(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        sin, cos = self.tables
        if sin.device != positions.device:  # the first step on a device
            sin, cos = self.tables = sin.to(positions.device), cos.to(positions.device)
        return sin.index_select(0, positions), cos.index_select(0, positions)

    def _compute_cos_sin_cache(self) -> Tensor:
        return torch.empty(0)  # the stock table, which nobody reads

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """query, key [T, heads * D] -> alike, turned by the rows of positions [T]."""
        if positions.dim() != 1:
            raise PlanError(f"tbik_vllm: rope takes positions [T], got {list(positions.shape)} (multimodal rope)")
        sin, cos = self._rows(positions)
        turned = [
            None
            if x is None
            else ops.rope(x.view(x.shape[0], -1, self.head_size), sin, cos, interleaved=not self.is_neox_style).view(
                x.shape
            )
            for x in (query, key)
        ]
        return turned[0], turned[1]  # type: ignore[return-value]

    forward_native = forward_cuda = forward


class TbikRotaryEmbedding(_Turning):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start({"rope_type": "default"})


class TbikLinearScalingRotaryEmbedding(_Turning, LinearScalingRotaryEmbedding):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if len(self.scaling_factors) != 1:
            raise PlanError(f"tbik_vllm: linear rope takes one factor, got {self.scaling_factors}")
        self._start({"rope_type": "linear", "factor": self.scaling_factors[0]})


class TbikLlama3RotaryEmbedding(_Turning, Llama3RotaryEmbedding):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start(
            {
                "rope_type": "llama3",
                "factor": self.scaling_factor,
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.orig_max_position,
            }
        )


class TbikYaRNScalingRotaryEmbedding(_Turning, YaRNScalingRotaryEmbedding):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start(
            {
                "rope_type": "yarn",
                "factor": self.scaling_factor,
                "beta_fast": self.beta_fast,
                "beta_slow": self.beta_slow,
                "truncate": self.truncate,
                "attention_factor": self.mscale,
                "original_max_position_embeddings": self.max_position_embeddings,
            }
        )
