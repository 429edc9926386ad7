"""LayerCast: weights stored in bf16, everything else in fp32, and no fp32 copy of a weight in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from torch import Tensor

from tbik import TreePlan, ops, reference
from tbik.ops.linear import linear_dx

F32 = torch.float32


def test_verify_stored_bf16_computes_as_its_fp32_copy() -> None:
    """bf16 weights beside fp32 activations give the bits of fp32 weights, forward and backward."""
    plan, eps = TreePlan(leaves=6), 1e-6
    stored = {
        "table": wide_exponents((11, 96), torch.bfloat16, 1, 20),
        "norm": wide_exponents((96,), torch.bfloat16, 2, 20),
        "gate": wide_exponents((64, 96), torch.bfloat16, 3, 20),
        "down": wide_exponents((96, 64), torch.bfloat16, 4, 20),
    }

    def run(w: dict[str, Tensor]) -> list[Tensor]:
        w = {name: t.clone().requires_grad_() for name, t in w.items()}
        x = ops.embedding(torch.tensor([[1, 5, 10], [0, 5, 5]]), w["table"], out_dtype=F32)
        y, h = ops.add_rms_norm(x, x.detach() * 3, w["norm"], eps)
        gate, up = ops.linear_group(y, (w["gate"], w["gate"]), plan=plan, compute_dtype=F32)
        z = ops.linear(ops.silu_and_mul(gate, up), w["down"], plan=plan, compute_dtype=F32) + h
        assert {t.dtype for t in (x, y, h, gate, z)} == {F32}
        return [z.detach(), *torch.autograd.grad(z, x, torch.ones_like(z))]

    for got, expected in zip(run(stored), run({k: t.float() for k, t in stored.items()}), strict=True):
        assert_bitwise_equal(got, expected)
    x = wide_exponents((3, 96), F32, 5, 20)
    y = ops.linear(x, stored["gate"], plan=plan, compute_dtype=F32)
    assert_bitwise_equal(y, reference.linear(x, stored["gate"], plan), "oracle")
    rounded = ops.linear(x.bfloat16(), stored["gate"], plan=plan, out_dtype=F32)
    assert_bits_differ(y, rounded, "bf16 activations")
    dy = wide_exponents((3, 64), F32, 6, 20)
    dx = linear_dx([dy], [stored["gate"]], plan=plan, compute_dtype=F32, parallel=False)
    assert_bitwise_equal(dx, reference.linear_dx([dy], [stored["gate"]], plan), "dX")


MEMORY = """
import sys, torch
from tbik import TreePlan, ops
def peak():  # of this program: ru_maxrss begins with that of the process that started it
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) / 1024
torch.set_num_threads(1)
plan = TreePlan(leaves=8)
w = torch.zeros(4096, 8192, dtype=torch.bfloat16).fill_(1)
x = torch.ones(4, 8192)
ops.linear(x[:, :64], w[:, :64], plan=plan, compute_dtype=torch.float32)
before = peak()
if sys.argv[1] == "copy":
    torch.nn.functional.linear(x, w.float())
else:
    y = ops.linear(x.requires_grad_(), w, plan=plan, compute_dtype=torch.float32)
    y.backward(torch.ones_like(y))
print(peak() - before)
"""


def grown_mib(what: str) -> float:
    done = subprocess.run([sys.executable, "-c", MEMORY, what], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.long
def test_validate_no_fp32_copy_in_memory() -> None:
    """Forward and dX by a bf16 weight of 64 MiB need far less than its fp32 copy, 128 MiB, as the control shows."""
    if not sys.platform.startswith("linux"):
        pytest.skip("/proc/self/status is Linux'")
    assert grown_mib("copy") >= 120
    assert grown_mib("ours") <= 32
