"""tbik.ops.rope, its tables and frequencies against the oracle and against transformers."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcases import DTYPES, PATHS, check_rows, compiled_equals_eager, run_with_flush
from torch import Tensor

from tbik import _C, ops, reference
from tbik.errors import PlanError
from tbik.ops.rope import rope_backward_f32


def tables(tokens: int, half: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    positions = torch.randint(0, 9000, (tokens,), generator=torch.Generator().manual_seed(seed))
    return ops.rope_tables(positions, torch.tensor([10000.0 ** (-i / half) for i in range(half)]))


def rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return wide_exponents(shape, dtype, seed, 12 if dtype == torch.float16 else 30)


@settings(max_examples=250, deadline=None)
@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 20),
    half=st.integers(1, 40),
    rest=st.sampled_from([0, 0, 1, 7, 32]),
    interleaved=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
    path=st.sampled_from(PATHS),
)
def test_verify_rope_equals_reference(
    tokens: int, heads: int, half: int, rest: int, interleaved: bool, dtype: torch.dtype, seed: int, path: str
) -> None:
    sin, cos = tables(tokens, half, seed)
    x = rows((tokens, heads, 2 * half + rest), dtype, seed)
    for backward in (False, True):
        for out in {dtype, torch.float32}:
            y = _C.rope(x, sin, cos, interleaved, backward, out, path)
            expected = reference.rope(x, sin, cos, interleaved, backward, out)
            assert_bitwise_equal(y, expected, f"{path} backward {backward}")


@settings(max_examples=200, deadline=None)
@given(
    positions=st.lists(st.integers(0, 2**20), min_size=1, max_size=9),
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    half=st.integers(1, 40),
    scale=st.sampled_from([1.0, 1.1386]),
    path=st.sampled_from(PATHS),
)
def test_verify_tables_equal_reference(positions: list[int], theta: float, half: int, scale: float, path: str) -> None:
    inv_freq = torch.tensor([theta ** (-i / half) for i in range(half)])
    ids = torch.tensor(positions)
    expected = reference.sin_cos_tables(ids, inv_freq)
    factor = torch.tensor(scale, dtype=torch.float64).float()
    for got, table in zip(_C.rope_tables(ids, inv_freq, scale, path), expected, strict=True):
        assert_bitwise_equal(got, table * factor, path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_verify_rows_alone_equal_rows_in_company(
    dtype: torch.dtype, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sin, cos = tables(128, 20)
    x, dy = rows((128, 5, 48), dtype, 1), rows((128, 5, 48), dtype, 2)

    def run(x: Tensor, dy: Tensor, sin: Tensor, cos: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = ops.rope(x, sin, cos, interleaved=interleaved)
        return [y.detach(), *torch.autograd.grad(y, x, dy), rope_backward_f32(dy, sin, cos, interleaved=interleaved)]

    check_rows(run, (x, dy, sin, cos), monkeypatch)


def test_verify_heads_and_merged_projections() -> None:
    """A head alone, heads inside a merged qkv row, a batch axis, tables broadcast over the batch: the same bits."""
    sin, cos = tables(6, 16)
    merged = rows((2, 6, 12, 40), torch.bfloat16, 1)
    whole = ops.rope(merged, sin, cos)
    for lo, hi in ((0, 4), (4, 6), (11, 12)):
        assert_bitwise_equal(ops.rope(merged[:, :, lo:hi], sin, cos), whole[:, :, lo:hi], f"heads [{lo}, {hi})")
    assert_bitwise_equal(ops.rope(merged[1], sin, cos), whole[1], "one sequence")
    apart = merged.transpose(1, 2).contiguous().transpose(1, 2)
    assert_bitwise_equal(ops.rope(apart, sin, cos), whole, "heads before tokens in memory")
    expanded = sin.expand(2, 6, 16), cos.expand(2, 6, 16)
    assert_bitwise_equal(ops.rope(merged, *expanded), whole, "tables per sequence")


def everything() -> Callable[[], list[Tensor]]:
    sin, cos = tables(3, 30)
    tiny = {dtype: 2.0**-20 if dtype == torch.float16 else 2.0**-125 for dtype in DTYPES}
    inputs = [(rows((3, 4, 64), dtype, 1).float() * tiny[dtype]).to(dtype) for dtype in DTYPES]
    frequencies = torch.tensor([1.0, 2.0**-149, 2.0**-130])

    def call() -> list[Tensor]:
        results: list[Tensor] = []
        for x in inputs:
            for path in PATHS:
                results += [_C.rope(x, sin, cos, i, b, x.dtype, path) for i in (False, True) for b in (False, True)]
                results += _C.rope_tables(torch.arange(40), frequencies, 1.5, path)
        return results

    return call


def test_verify_flush_mode_of_the_process() -> None:
    run_with_flush("test_rope", "everything")


def test_validate_data_shows_the_roundings() -> None:
    """Negative control: the formula in bf16, rounded after every operation as eager models do, has other bits."""
    sin, cos = tables(64, 32)
    x = rows((64, 4, 64), torch.bfloat16, 1)
    wide_sin, wide_cos = (torch.cat([t, t], -1)[:, None].bfloat16() for t in (sin, cos))
    stock = x * wide_cos + torch.cat([-x[..., 32:], x[..., :32]], -1) * wide_sin
    assert_bits_differ(ops.rope(x, sin, cos), stock, "rope")


CONFIG = {"head_dim": 64, "rope_theta": 500000.0, "max_position_embeddings": 8192, "hidden_size": 256}
SCALED: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
}


@pytest.mark.parametrize("name", SCALED)
def test_corroborate_frequencies_of_transformers(name: str) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama")
    parameters = {"rope_theta": 500000.0, "rope_type": "default", **SCALED[name]}
    config = llama.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=8192, rope_parameters=parameters
    )
    if name == "default":
        theirs, scale = torch.tensor([500000.0 ** (-2 * i / 64) for i in range(32)]), 1.0
    else:
        theirs, scale = utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    ours = ops.inverse_frequencies({**CONFIG, "rope_scaling": SCALED[name]})
    assert ours.inv_freq.dtype == torch.float32
    torch.testing.assert_close(ours.inv_freq, theirs.float(), rtol=2e-6, atol=0)
    assert ours.scale == pytest.approx(scale)
    again = ops.inverse_frequencies({"head_dim": 64, "max_position_embeddings": 8192, "rope_parameters": parameters})
    assert_bitwise_equal(again.inv_freq, ours.inv_freq, "rope_parameters")


def test_verify_partial_rotation() -> None:
    whole = ops.inverse_frequencies({"head_dim": 32, "rope_theta": 10000.0})
    part = ops.inverse_frequencies({"hidden_size": 256, "num_attention_heads": 4, "partial_rotary_factor": 0.5})
    assert_bitwise_equal(whole.inv_freq, part.inv_freq, "32 of 64")
    sin, cos = ops.rope_tables(torch.arange(7), part.inv_freq)
    x = rows((7, 2, 64), torch.bfloat16, 1)
    y = ops.rope(x, sin, cos)
    assert_bitwise_equal(y[..., 32:], x[..., 32:], "the part that passes")
    assert_bitwise_equal(y[..., :32], ops.rope(x[..., :32], sin, cos), "the part that turns")


def test_verify_strides_beyond_32_bits() -> None:
    stride = 2**31 + 5
    size = 2 * (2 * stride + 64)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    far = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2).as_strided((3, 2, 8), (stride, 16, 1))
    near = rows((3, 2, 8), torch.bfloat16, 1)
    far.copy_(near)
    sin, cos = tables(3, 4)
    assert_bitwise_equal(ops.rope(far, sin, cos), ops.rope(near, sin, cos))
    heads = far.transpose(0, 1)  # heads far apart
    head_sin, head_cos = tables(2, 4)
    expected = ops.rope(near.transpose(0, 1).contiguous(), head_sin, head_cos)
    assert_bitwise_equal(ops.rope(heads, head_sin, head_cos), expected)


def test_verify_opcheck() -> None:
    sin, cos = tables(5, 4)
    x = torch.randn(5, 3, 10, requires_grad=True)
    torch.library.opcheck(torch.ops.tbik.rope.default, (x, sin, cos, True, False, torch.float32))
    torch.library.opcheck(torch.ops.tbik.rope_tables.default, (torch.arange(5), torch.ones(3), 2.0))


def test_verify_compiled_equals_eager() -> None:
    inv_freq = torch.tensor([1.0, 0.1, 0.01])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        sin, cos = ops.rope_tables(torch.arange(5), inv_freq)
        return (ops.rope(ops.rope(x, sin, cos), sin, cos, interleaved=True),)

    compiled_equals_eager(function, [rows((5, 2, 8), torch.bfloat16, 1).requires_grad_()])


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "config",
    [
        None,
        "config.json",
        {},
        {"hidden_size": None, "num_attention_heads": 4},
        {"hidden_size": 64, "num_attention_heads": 0},
        {"head_dim": "64"},
        *({"head_dim": 64, "rope_theta": theta} for theta in (0, -1.0, None, "1e4", True, float("nan"), float("inf"))),
        *({"head_dim": 64, "partial_rotary_factor": part} for part in (0, 2, float("nan"), "all")),
        {"head_dim": 64, "rope_scaling": "linear"},
        *({"head_dim": 64, "rope_scaling": {"type": "linear", "factor": factor}} for factor in (0, float("nan"), "2")),
        *({"head_dim": 64, "rope_scaling": LLAMA3 | change} for change in ({"factor": 0}, {"high_freq_factor": 1.0})),
        {"head_dim": 64, "rope_theta": 1.0, "rope_scaling": YARN},
        {"head_dim": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        *(
            {"head_dim": 64, "rope_scaling": YARN | change}
            for change in (
                {"factor": 0},
                {"original_max_position_embeddings": 0},
                {"beta_fast": 0},
                {"attention_factor": "a"},
                {"mscale": "a", "mscale_all_dim": 1.0},
            )
        ),
    ],
)
def test_verify_bad_configurations_are_refused(config: object) -> None:
    """A field that would make infinite or absent frequencies is named, not computed with."""
    with pytest.raises(PlanError, match=r"ops\.inverse_frequencies: "):
        ops.inverse_frequencies(config)  # type: ignore[arg-type]


def test_verify_bad_calls_are_refused() -> None:
    sin, cos = tables(3, 4)
    x = torch.ones(3, 2, 8)
    dynamic = {"head_dim": 8, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    linear = {"head_dim": 8, "rope_scaling": {"type": "linear"}}
    cases = {
        "R <= D": lambda: ops.rope(x[..., :6], sin, cos),
        r"expected x \[..., H, D\] and sin": lambda: ops.rope(x[:2], sin, cos),
        "float32 tensor": lambda: ops.rope(x, sin.bfloat16(), cos),
        "interleaved is True or False": lambda: ops.rope(x, sin, cos, interleaved=None),  # type: ignore[arg-type]
        "get no gradient": lambda: ops.rope(x, sin.clone().requires_grad_(), cos),
        "positions is an int64": lambda: ops.rope_tables(torch.ones(3), torch.ones(2)),
        "rope_type 'dynamic' is not supported": lambda: ops.inverse_frequencies(dynamic),
        "rope_type 'longrope'": lambda: ops.inverse_frequencies({"head_dim": 8, "rope_scaling": {"type": "longrope"}}),
        "factor is a finite number above 0": lambda: ops.inverse_frequencies(linear),
        "an even number": lambda: ops.inverse_frequencies({"head_dim": 7}),
        "expected head_dim": lambda: ops.inverse_frequencies({}),
    }
    for match, call in cases.items():
        with pytest.raises(PlanError, match=match):
            call()
    for scale in (0, -1.0, True, None, "1", float("nan"), 1e39):
        with pytest.raises(PlanError, match="scale is finite and positive"):
            ops.rope_tables(torch.arange(3), torch.ones(2), scale=scale)  # type: ignore[arg-type]
    for table in (sin.to_sparse(), [1.0]):
        with pytest.raises(PlanError, match=r"ops\.rope: sin is a"):
            ops.rope(x, table, cos)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="below 2"):
        ops.rope_tables(torch.tensor([2**24]), torch.ones(1) * 1e-3)
    with pytest.raises(ValueError, match="at most 2"):
        ops.rope_tables(torch.tensor([2**21]), torch.ones(1))
