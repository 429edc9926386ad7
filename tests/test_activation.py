"""tbik.ops.silu, gelu, silu_and_mul, gelu_and_mul against the oracle and against torch."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcases import DTYPES, PATHS, check_rows, compiled_equals_eager, run_with_flush
from test_rows import every_exponent
from torch import Tensor

from tbik import _C, ops, reference
from tbik.errors import PlanError

KINDS = ("silu", "gelu_tanh")


def rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return wide_exponents(shape, dtype, seed, 12)


@settings(max_examples=250, deadline=None)
@given(
    m=st.integers(1, 4),
    length=st.one_of(st.integers(1, 70), st.sampled_from([1023, 1024, 1025, 2100])),
    kind=st.sampled_from(KINDS),
    gated=st.booleans(),
    near=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
    path=st.sampled_from(PATHS),
)
def test_verify_gated_equals_reference(
    m: int, length: int, kind: str, gated: bool, near: bool, dtype: torch.dtype, seed: int, path: str
) -> None:
    gate, dy = rows((m, length), dtype, seed), rows((m, length), dtype, seed + 1)
    if near:  # no |gate| above 8: the kernels have a shorter way for such chunks of a row
        gate = gate * 2.0**-10
    up = rows((m, length), dtype, seed + 2) if gated else None
    y = _C.activation(gate, up, kind, path)
    assert_bitwise_equal(y, reference.gated(gate, up, kind), f"{path} y")  # type: ignore[arg-type]
    expected = reference.gated_dx(dy, gate, up, kind)  # type: ignore[arg-type]
    grads = _C.activation_dx(dy, gate, up, kind, False, path)
    assert_bitwise_equal(grads[0], expected[0], f"{path} dgate")
    if up is not None:
        assert_bitwise_equal(grads[1], expected[1], f"{path} dup")
        packed = _C.activation_dx(dy, gate, up, kind, True, path)[0]
        assert_bitwise_equal(packed, torch.cat([expected[0], expected[1]], -1), f"{path} packed")


@pytest.mark.parametrize("path", PATHS)
def test_verify_every_exponent(path: str) -> None:
    x = every_exponent(66, seed=2)
    ones = torch.ones_like(x)
    assert_bitwise_equal(_C.gelu(x, path), reference.gelu(x), "gelu")
    for kind in KINDS:
        assert_bitwise_equal(_C.activation(x, None, kind, path), reference.gated(x, None, kind), kind)  # type: ignore[arg-type]
        slope = _C.activation_dx(ones, x, None, kind, False, path)[0]
        assert_bitwise_equal(slope, reference.gated_dx(ones, x, None, kind)[0], kind)  # type: ignore[arg-type]
        finite = torch.isfinite(x)
        assert torch.isfinite(slope[finite]).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_verify_small_values_beside_an_infinity(kind: str, path: str) -> None:
    """A chunk of small values takes a shorter way through the kernel; an infinity among them must not change a bit."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    limit = 87.0 if kind == "silu" else 9.0
    small = patterns[patterns.abs() <= limit]
    small = small[torch.arange(small.numel()) % 256 != 0]
    fp32 = torch.cat([small.float(), torch.tensor([limit, -limit]), every_exponent(8, 3)])
    fp32 = fp32[fp32.abs() <= limit]
    for x in (small, fp32, small.half()):
        beside = x.clone()
        beside[::200] = torch.inf
        keep = torch.arange(x.numel()) % 200 != 0
        ones = torch.ones_like(x)
        up = ones * 1.75
        near, far = (_C.activation(t, up, kind, path) for t in (x, beside))
        assert_bitwise_equal(near[keep], far[keep], f"{x.dtype} forward")
        grads = (_C.activation_dx(ones, t, up, kind, False, path) for t in (x, beside))
        for near, far in zip(*grads, strict=True):
            assert_bitwise_equal(near[keep], far[keep], f"{x.dtype} backward")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_rows_alone_equal_rows_in_company(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up, dy = (rows((128, 1100), dtype, i) for i in range(3))

    def run(gate: Tensor, up: Tensor, dy: Tensor) -> list[Tensor]:
        gate, up = (t.detach().requires_grad_() for t in (gate, up))
        results = []
        for y in (ops.silu_and_mul(gate, up), ops.gelu_and_mul(gate, up), ops.silu(gate), ops.gelu(gate)):
            grads = torch.autograd.grad(y, (gate, up), dy, allow_unused=True)
            results += [y.detach(), *(g for g in grads if g is not None)]
        return results

    check_rows(run, (gate, up, dy), monkeypatch)


@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_verify_packed_equals_two_tensors(kind: str) -> None:
    function = getattr(ops, f"{kind}_and_mul")
    packed = rows((9, 140), torch.bfloat16, 1).requires_grad_()
    gate, up = (t.detach().clone().requires_grad_() for t in packed.chunk(2, -1))
    dy = rows((9, 70), torch.bfloat16, 2)
    y, two = function(packed), function(gate, up)
    assert_bitwise_equal(y, two, "forward")
    assert_bitwise_equal(function(packed.detach()), two.detach(), "forward without autograd")
    y.backward(dy)
    two.backward(dy)
    assert_bitwise_equal(packed.grad, torch.cat([gate.grad, up.grad], -1), "gradients")


def everything() -> Callable[[], list[Tensor]]:
    inputs = [torch.cat([every_exponent(4, 1)[None].to(d), rows((1, 2048), d, 2)]) for d in DTYPES]

    def call() -> list[Tensor]:
        results: list[Tensor] = []
        for x in inputs:
            for path in PATHS:
                for kind in KINDS:
                    results.append(_C.activation(x, x.flip(0), kind, path))
                    results += _C.activation_dx(x.flip(1), x, x.flip(0), kind, False, path)
        return results

    return call


def test_verify_flush_mode_of_the_process() -> None:
    run_with_flush("test_activation", "everything")


def test_validate_data_shows_the_roundings() -> None:
    """Negative control: torch rounds silu to bf16 before the product, and its exp is another polynomial."""
    gate, up = rows((64, 300), torch.bfloat16, 1), rows((64, 300), torch.bfloat16, 2)
    assert_bits_differ(ops.silu_and_mul(gate, up), F.silu(gate) * up, "silu_and_mul")
    assert_bits_differ(ops.gelu_and_mul(gate, up), F.gelu(gate, approximate="tanh") * up, "gelu_and_mul")
    assert_bits_differ(ops.silu(gate.float()), F.silu(gate.float()), "silu in fp32")


def test_validate_accuracy_and_gradients() -> None:
    """Against float64 the largest and the mean error, of values and slopes, are no larger than torch's in fp32."""
    x = torch.linspace(-12, 12, 20001)

    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def both(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaf)]

    for function, stock in ((ops.silu, F.silu), (ops.gelu, gelu)):
        for ours, torchs, exact in zip(both(function, x), both(stock, x), both(stock, x.double()), strict=True):
            error, baseline = (ours - exact).abs(), (torchs - exact).abs()
            assert error.max() <= baseline.max() and error.mean() <= 1.02 * baseline.mean()


def test_verify_strides_beyond_32_bits() -> None:
    stride = 2**31 + 5
    size = 2 * (2 * stride + 16)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    far = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2).as_strided((3, 8), (stride, 1))
    near = rows((3, 8), torch.bfloat16, 1)
    far.copy_(near)
    assert_bitwise_equal(ops.silu_and_mul(far, far), ops.silu_and_mul(near, near))
    for a, b in zip(
        _C.activation_dx(far, far, far, "silu", False), _C.activation_dx(near, near, near, "silu", False), strict=True
    ):
        assert_bitwise_equal(a, b)


def operator_calls() -> dict[str, tuple[object, tuple[object, ...]]]:
    def g(*shape: int) -> Tensor:
        return torch.randn(*shape).requires_grad_()

    o, t = torch.ops.tbik, torch.randn
    return {
        "activation": (o.activation, (g(3, 8), g(3, 8), "silu")),
        "activation alone": (o.activation, (g(3, 8), None, "gelu_tanh")),
        "activation_packed": (o.activation_packed, (g(3, 8), "silu")),
        "activation_dx": (o.activation_dx, (t(3, 8), t(3, 8), t(3, 8), "silu")),
        "activation_packed_dx": (o.activation_packed_dx, (t(3, 4), t(3, 8), "silu")),
    }


@pytest.mark.parametrize("name", list(operator_calls()))
def test_verify_opcheck(name: str) -> None:
    operator, arguments = operator_calls()[name]
    torch.library.opcheck(operator.default, arguments)  # type: ignore[attr-defined]


def test_verify_compiled_equals_eager() -> None:
    def function(x: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (ops.gelu_and_mul(ops.silu_and_mul(x), up),)

    inputs = [rows((5, 12), torch.bfloat16, 1).requires_grad_(), rows((5, 6), torch.bfloat16, 2).requires_grad_()]
    compiled_equals_eager(function, inputs)


def test_verify_bad_calls_are_refused() -> None:
    x = torch.ones(3, 8)
    cases = {
        "gate before up": lambda: ops.silu_and_mul(x[:, :7]),
        "must be alike": lambda: ops.silu_and_mul(x, x.half()),
        "the erf form has no polynomial": lambda: ops.gelu_and_mul(x, approximate="none"),
        "got float64": lambda: ops.silu(x.double()),
    }
    for match, call in cases.items():
        with pytest.raises(PlanError, match=match):
            call()
