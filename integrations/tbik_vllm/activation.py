"""vLLM's gated activations by ops.silu_and_mul and ops.gelu_and_mul (ORDER.md R5, R6)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul

from tbik import PlanError, ops


class TbikSiluAndMul(SiluAndMul):
    """y = cast(silu(gate) up); x [..., 2 I] holds gate before up."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.silu_and_mul(x)

    forward_native = forward_cuda = forward


class TbikGeluAndMul(GeluAndMul):
    """y = cast(gelu(gate) up), the tanh form."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.approximate != "tanh":
            raise PlanError(
                f"tbik_vllm: GeluAndMul(approximate={self.approximate!r}) has no kernel here; only the tanh form has"
            )

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu_and_mul(x)

    forward_native = forward_cuda = forward
