"""Rotary position embedding (ORDER.md C5, R4).

    y1 = x1 cos - x2 sin,  y2 = x2 cos + x1 sin        pairs (i, i + R/2), interleaved (2i, 2i + 1); the rest stays
    sin, cos = of fp32(position) inv_freq, in fp32     backward: the same with -sin

Suffixes: H heads, D head_dim, R <= D rotated elements. One rounding per returned value. CPU, meta and
CUDA tensors (tbik.kernels; not yet measured on a GPU).
Bits: deterministic, batch-invariant (tests/test_rope.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from tbik import _C
from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import (
    _fake,
    _name,
    _operator,
    _require_dense,
    _require_flag,
    _require_one_device,
    _require_same_device,
    _shape,
)
from tbik.ops.rowwise import (
    DTYPES,
    MAX_FLOAT32,
    differentiable,
    is_direct,
    is_number,
    is_simple,
    is_simple_pair,
    refuse_derivative,
    refuse_vmap,
    require_rows,
)


class RopeFrequencies(NamedTuple):
    """inv_freq fp32 [R/2]; the tables of sin and cos are multiplied by `scale` (1 but for yarn)."""

    inv_freq: Tensor
    scale: float = 1.0


def rope(
    x: Tensor, sin: Tensor, cos: Tensor, *, interleaved: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin   (R4): two products and one sum in fp32, one cast.

    x [..., H, D]; sin, cos fp32 [..., R/2] that broadcast to the leading axes of x; R <= D, the other D - R elements
    of a head pass -> [..., H, D] in out_dtype (x.dtype). interleaved: pairs (2i, 2i + 1) in place of (i, i + R/2).
    The tables get no gradient. Errors: PlanError. Batch-invariant.
    """
    plain = out_dtype is None and type(interleaved) is bool and is_simple(x) and is_simple_pair(sin, cos)
    plain = plain and sin.dtype == torch.float32 and sin.dim() == x.dim() - 1 >= 1 and sin.shape[:-1] == x.shape[:-2]
    if plain and 2 * sin.shape[-1] <= x.shape[-1]:
        return _C.rope(x, sin, cos, interleaved, False, x.dtype)
    where = "ops.rope"
    out = _require_rope(where, x, sin, cos, interleaved, out_dtype)
    if sin.requires_grad or cos.requires_grad:
        raise PlanError(f"{where}: the tables get no gradient; use sin.detach() and cos.detach()")
    if is_direct(x, sin, cos):
        return _C.rope(x, sin, cos, interleaved, False, out)
    y: Tensor = _rope(x, sin, cos, interleaved, False, out)
    return y


def rope_backward_f32(
    dy: Tensor, sin: Tensor, cos: Tensor, *, interleaved: bool = False, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """dx1 = dy1 cos + dy2 sin, dx2 = dy2 cos - dy1 sin, not rounded (out_dtype fp32); no autograd. As `rope`."""
    out = _require_rope("ops.rope_backward_f32", dy, sin, cos, interleaved, out_dtype)
    dx: Tensor = _rope(dy.detach(), sin.detach(), cos.detach(), interleaved, True, out)
    return dx


def rope_tables(positions: Tensor, inv_freq: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """(sin(a), cos(a)), a = fp32(position) inv_freq (C5); each times fp32(scale), rounded, unless scale is 1.

    positions [...] integers below 2^24, inv_freq fp32 [R/2] -> two fp32 [..., R/2]. Errors: PlanError, and ValueError
    for a position beyond 2^24 or an angle beyond 2^20 (on CUDA NaN in its entries: the host does not see the numbers).
    Batch-invariant: a position's entries ignore the others.
    """
    where = "ops.rope_tables"
    if not isinstance(positions, Tensor) or positions.dtype not in (torch.int64, torch.int32):
        raise PlanError(f"{where}: positions is an int64 or int32 tensor, got {getattr(positions, 'dtype', positions)}")
    if not isinstance(inv_freq, Tensor) or inv_freq.dtype != torch.float32 or inv_freq.dim() != 1:
        raise PlanError(f"{where}: inv_freq is a float32 tensor [R/2]")
    _require_dense(where, "inv_freq", inv_freq, CPU_AND_CUDA)
    if positions.layout != torch.strided or positions.is_nested:
        raise PlanError(f"{where}: positions is a dense tensor, got layout {positions.layout}")
    _require_same_device(where, "positions", positions, "inv_freq", inv_freq)
    if not is_number(scale) or not 0 < scale <= MAX_FLOAT32:
        raise PlanError(f"{where}: scale is finite and positive, got {scale!r}")
    sin, cos = _rope_tables(positions.to(torch.int64), inv_freq.detach(), float(scale))
    return sin, cos


def inverse_frequencies(config: Mapping[str, Any]) -> RopeFrequencies:
    """theta^(-2i/R), i < R/2, rescaled as config.json says: default, linear, llama3, yarn.

    config: the fields of a Hugging Face config.json (head_dim or hidden_size / num_attention_heads, rope_theta,
    partial_rotary_factor, rope_scaling or rope_parameters, max_position_embeddings). Computed in fp64 and rounded once
    to fp32, which hides the last bits of the platform's pow. Errors: PlanError, by field; dynamic and longrope depend
    on the length of the sequence and are refused: their tables would make a position's bits depend on later tokens.
    """
    if not isinstance(config, Mapping):
        _refuse(f"config is a mapping, the fields of a config.json, got {type(config).__name__}")
    parameters: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        _refuse(f"rope_parameters and rope_scaling are mappings, got {parameters!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = _number({"rope_theta": parameters.get("rope_theta", config.get("rope_theta", 10000.0))}, "rope_theta")
    dim = _rotary_dim(config, parameters)
    frequencies = [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    scale = 1.0
    if kind == "linear":
        factor = _number(parameters, "factor")
        frequencies = [frequency / factor for frequency in frequencies]
    elif kind == "llama3":
        frequencies = _llama3(frequencies, parameters)
    elif kind == "yarn":
        frequencies, scale = _yarn(frequencies, parameters, config, theta, dim)
    elif kind != "default":
        _refuse(f"rope_type {kind!r} is not supported; expected default, linear, llama3 or yarn")
    return RopeFrequencies(torch.tensor(frequencies, dtype=torch.float64).to(torch.float32), scale)


def _refuse(message: str) -> NoReturn:
    raise PlanError(f"ops.inverse_frequencies: {message}")


def _number(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    if value is None and default is not None:
        return default
    if not is_number(value) or not 0 < value <= MAX_FLOAT32:
        _refuse(f"{name} is a finite number above 0, got {value!r}")
    return float(value)


def _rotary_dim(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> int:
    dim = config.get("head_dim")
    if dim is None:
        sizes = config.get("hidden_size"), config.get("num_attention_heads")
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            _refuse(f"expected head_dim, or hidden_size and num_attention_heads, integers above 0; got {sizes}")
        dim = config["hidden_size"] // config["num_attention_heads"]
    if not isinstance(dim, int):
        _refuse(f"head_dim is an integer, got {dim!r}")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotary = int(
        dim * (1.0 if partial is None else _number({"partial_rotary_factor": partial}, "partial_rotary_factor"))
    )
    if rotary < 2 or rotary % 2 or rotary > dim:
        _refuse(f"the rotated part of head_dim {dim} is an even number of elements, got {rotary}")
    return rotary


def _llama3(frequencies: Sequence[float], parameters: Mapping[str, Any]) -> list[float]:
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, length = (_number(parameters, name) for name in names)
    if low >= high:
        _refuse(f"low_freq_factor is below high_freq_factor, got {low} and {high}")
    scaled = []
    for frequency in frequencies:
        smooth = min(1.0, max(0.0, (length * frequency / (2 * math.pi) - low) / (high - low)))
        scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return scaled


def _yarn(
    frequencies: Sequence[float], parameters: Mapping[str, Any], config: Mapping[str, Any], theta: float, dim: int
) -> tuple[list[float], float]:
    """Peng et al., "YaRN: efficient context window extension of large language models" (2023)."""
    factor = _number(parameters, "factor")
    trained = "original_max_position_embeddings"
    given = parameters if parameters.get(trained) is not None else {trained: config.get("max_position_embeddings")}
    length = _number(given, trained)
    if theta <= 1:
        _refuse(f"rope_theta of yarn is above 1, got {theta}")

    def correction(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = correction(_number(parameters, "beta_fast", 32.0))
    high = correction(_number(parameters, "beta_slow", 1.0))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    scaled = []
    for i, frequency in enumerate(frequencies):
        extrapolated = 1 - min(1.0, max(0.0, (i - low) / (high - low)))
        scaled.append(frequency / factor * (1 - extrapolated) + frequency * extrapolated)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = parameters.get("attention_factor")
    if scale is None:
        if parameters.get("mscale") and parameters.get("mscale_all_dim"):
            scale = magnitude(_number(parameters, "mscale")) / magnitude(_number(parameters, "mscale_all_dim"))
        else:
            scale = magnitude(1.0)
        return scaled, scale
    return scaled, _number(parameters, "attention_factor")


def _require_rope(
    where: str, x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool, out_dtype: torch.dtype | None
) -> torch.dtype:
    require_rows(where, "x", x, 2, served=CPU_AND_CUDA)
    _require_flag(where, "interleaved", interleaved)
    for name, table in (("sin", sin), ("cos", cos)):
        if not isinstance(table, Tensor) or table.dtype != torch.float32 or table.dim() < 1:
            raise PlanError(f"{where}: {name} is a float32 tensor [..., R/2]; ops.rope_tables makes it")
        _require_dense(where, name, table, CPU_AND_CUDA)
        _require_same_device(where, "x", x, name, table)
    lead, given = x.shape[:-2], sin.shape[:-1]
    fits = len(given) <= len(lead) and all(
        a in (1, b) for a, b in zip(given, lead[len(lead) - len(given) :], strict=True)
    )
    if sin.shape != cos.shape or not fits or not 0 < 2 * sin.shape[-1] <= x.shape[-1]:
        raise PlanError(
            f"{where}: expected x [..., H, D] and sin, cos [..., R/2] with R <= D, got {_shape(x)}, {_shape(sin)} and "
            f"{_shape(cos)}"
        )
    out = x.dtype if out_dtype is None else out_dtype
    if out not in DTYPES:
        raise PlanError(f"{where}: out_dtype is one of {[_name(d) for d in DTYPES]}, got {out!r}")
    return out


# --- operators ------------------------------------------------------------------------------------------------------


@_operator(
    "rope",
    "(Tensor x, Tensor sin, Tensor cos, bool interleaved, bool backward, ScalarType out_dtype) -> Tensor",
    cuda=True,
)
def _rope(x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool, backward: bool, out_dtype: torch.dtype) -> Tensor:
    return kernels_of(x).rope(x, sin, cos, interleaved, backward, out_dtype)


@_fake(_rope)
def _rope_fake(
    x: Tensor, sin: Tensor, cos: Tensor, interleaved: bool, backward: bool, out_dtype: torch.dtype
) -> Tensor:
    _require_one_device(x, sin, cos)
    return x.new_empty(x.shape, dtype=out_dtype)


def _rope_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, sin, cos, ctx.interleaved, ctx.backward, _ = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(sin, cos)


def _rope_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    sin, cos = ctx.saved_tensors
    return _rope(dy, sin, cos, ctx.interleaved, not ctx.backward, ctx.x_dtype), None, None, None, None, None


differentiable(_rope, _rope_backward, _rope_setup)


@_operator("rope_tables", "(Tensor positions, Tensor inv_freq, float scale) -> (Tensor, Tensor)", cuda=True)
def _rope_tables(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return kernels_of(positions).rope_tables(positions, inv_freq, scale)


@_fake(_rope_tables)
def _rope_tables_fake(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _require_one_device(positions, inv_freq)
    shape = (*positions.shape, inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


refuse_vmap(_rope, _rope_tables)
refuse_derivative(_rope_tables)
