"""The part "experts" of bench/gpu.py: a mixture of experts and its gradients beside a loop over experts in torch."""

from __future__ import annotations

from typing import Any

import torch
from gpu_setting import Setting, randn
from torch import Tensor
from torch.nn import functional


def loop(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, slots: int) -> Tensor:
    """What one writes in torch: the tokens of each expert together, weights of the chosen logits sum to one."""
    values, ids = torch.topk(functional.linear(x.float(), router.float()), slots)
    weights = values.softmax(-1)
    y = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[token], gate_up[expert]).chunk(2, -1)
        of = functional.linear(functional.silu(gate) * up, down[expert]).float()
        y = y.index_add(0, token, of * weights[token, slot, None])
    return y.to(x.dtype)


def part_experts(setting: Setting) -> list[dict[str, Any]]:
    """Times the block by the tensor-core leaf, forward alone and with all gradients. Bits are the part "operators".

    Checked: values close to the loop's, so that the times are of the same work. In a dry run the leaf is fma: CPU
    tensors have no other, and the CPU's kernels serve them.
    """
    from tbik import TreePlan
    from tbik.routed_experts import RoutedExperts

    tokens, hidden, inner, experts, slots = (5, 16, 8, 3, 2) if setting.is_dry else (4096, 2048, 768, 32, 4)
    plan = TreePlan(leaves=setting.leaves, leaf="fma" if setting.is_dry else setting.leaf)
    shapes = ((experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
    router, gate_up, down = (randn(setting, *shape, seed=i) * shape[-1] ** -0.5 for i, shape in enumerate(shapes))
    module = RoutedExperts(router, gate_up, down, intermediate=inner, slots=slots, normalize=True, plan=plan)
    parameters = list(module.parameters())
    stock = [t.detach().clone().requires_grad_() for t in (router, gate_up, down)]
    rows = []
    for count in (1, tokens):
        x, dy = (randn(setting, count, hidden, seed=9 + i).requires_grad_(i == 0) for i in range(2))
        with torch.no_grad():
            ours, torchs = module(x).float(), loop(x, *stock, slots).float()
            times = setting.times_ms({"ms": lambda x=x: module(x), "torch_ms": lambda x=x: loop(x, *stock, slots)})
        # a token of which two logits are close may choose otherwise: such tokens are counted, few are allowed
        far = ((ours - torchs).abs() > 2.0**-5 * torchs.abs().max()).any(-1).float().mean()
        if not float(far) <= (0.0 if count == 1 else 0.01):
            raise AssertionError(f"experts: {float(far):.2%} of {count} tokens are far from the loop's")
        shape = [count, hidden, inner, experts, slots]
        rows.append({"operator": "experts", "shape": shape, **times, "speed_of_torch": times["torch_ms"] / times["ms"]})
    works = {
        "ms": lambda: torch.autograd.grad(module(x), [x, *parameters], dy),
        "torch_ms": lambda: torch.autograd.grad(loop(x, *stock, slots), [x, *stock], dy),
    }
    times = setting.times_ms(works)
    row = {"operator": "experts and gradients", "shape": shape, **times}
    return [*rows, {**row, "speed_of_torch": times["torch_ms"] / times["ms"]}]
