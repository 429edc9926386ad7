"""vLLM's RMSNorm layers by ops.rms_norm and ops.add_rms_norm (ORDER.md R1, R2), as the trainer calls them.

vLLM's custom operators choose among forward_native, forward_cuda, ... by platform and settings when they are made. The
classes here have one forward and answer to the other names with it, so that no setting leads past it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from tbik import PlanError, ops

Normed = Tensor | tuple[Tensor, Tensor]


class TbikRMSNorm(RMSNorm):
    """y = (x r) w; with a residual (y, h), h = cast(x + residual). x [..., K]."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.has_weight or self.variance_size_override is not None:
            raise PlanError("tbik_vllm: RMSNorm without a weight or over a part of the row has no kernel here")

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        return _norm(x, residual, self.weight, self.variance_epsilon, False)

    forward_native = forward_cuda = forward


class TbikGemmaRMSNorm(GemmaRMSNorm):
    """The same with 1 + w in place of w."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        return _norm(x, residual, self.weight, self.variance_epsilon, True)

    forward_native = forward_cuda = forward


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: bool) -> Normed:
    if residual is None:
        return ops.rms_norm(x, weight, eps, offset=offset)
    return ops.add_rms_norm(x, residual, weight, eps, offset=offset)
