"""Dropout whose mask is a function of logical coordinates (ORDER.md R9).

    y = x fp32(1 / (1 - p)) if word >= floor(p 2^32), else +0
    word = word f % 4 of Philox4x32-10, counter (f // 4, position, sample, 0),
           key = the first two words of Philox4x32-10, counter (step low, step high, name low, name high), key seed

f: feature, position: in the sample, sample: in the global batch. There is no call counter: batch size, packing, shards,
accumulation and recomputation cannot change a mask. Bits: layout-invariant (tests/test_dropout.py).
Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tbik.devices import CPU_AND_CUDA, kernels_of
from tbik.errors import PlanError
from tbik.ops.linear import _fake, _is_int, _operator
from tbik.ops.rowwise import differentiable, is_direct, is_number, refuse_vmap, require_rows
from tbik.ops.samples import bounds, require_samples

LIMIT = 2**63


class DropoutKey(NamedTuple):
    """What a training call's masks are functions of, beside the module's name and the coordinates in a sample (R9, K5).

    seed, step: integers within [0, 2^63). first_sample: global number of the first sample of the call.
    """

    seed: int
    step: int
    first_sample: int = 0


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def name_key(name: str) -> int:
    """The 63 low bits of the little-endian blake2b-64 of the module's name in UTF-8."""
    return _cached_name_key(name)


@lru_cache(maxsize=4096)
def _cached_name_key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") & (LIMIT - 1)


def dropout(
    x: Tensor,
    p: float,
    *,
    seed: int,
    step: int,
    name: str,
    sample_offsets: Sequence[int] | None = None,
    first_sample: int = 0,
    first_position: int = 0,
    first_feature: int = 0,
) -> Tensor:
    """y = x / (1 - p) where the word of the element's coordinates is at least p 2^32, else +0   (R9).

    x [..., K] -> alike; one product in fp32, one cast. seed, step: integers within [0, 2^63). name: of the module; two
    modules with one name drop the same elements. sample_offsets: as in rms_norm. first_sample: the global number of the
    first sample; first_position, first_feature: of the first row of every sample and of the first column, for shards of
    those axes. dx = the same function of dy. Errors: PlanError; ValueError where a row or the last sample is numbered
    2^32 or more.
    Layout-invariant.
    """
    where = "ops.dropout"
    require_rows(where, "x", x, served=CPU_AND_CUDA)
    firsts = {"first_sample": first_sample, "first_position": first_position, "first_feature": first_feature}
    require_coordinates(where, p, seed, step, name, **firsts)
    require_samples(where, x.shape[:-1], sample_offsets)
    key = name_key(name)
    offsets = None if sample_offsets is None else list(sample_offsets)
    arguments = (x, float(p), seed, step, key, offsets, first_sample, first_position, first_feature)
    if is_direct(x):
        return _kernel(*arguments)
    y: Tensor = _dropout(*arguments)
    return y


def require_coordinates(where: str, p: float, seed: int, step: int, name: str, **firsts: int) -> None:
    """PlanError unless p, seed, step and name make a key and the numbers of firsts fit into a counter (R9, K5)."""
    if not is_number(p) or not 0 <= p <= 1:
        raise PlanError(f"{where}: p is a number within [0, 1], got {p!r}")
    if not isinstance(name, str) or not name or any(0xD800 <= ord(letter) < 0xE000 for letter in name):
        raise PlanError(f"{where}: name is the module's name, a non-empty string that UTF-8 holds, got {name!r}")
    for what, value in {"seed": seed, "step": step, **firsts}.items():
        bits = 63 if what in ("seed", "step") else 34 if what == "first_feature" else 32
        if not _is_int(value) or not 0 <= value < 2**bits:
            raise PlanError(f"{where}: {what} is an integer within [0, 2^{bits}), got {value!r}")


def _kernel(
    x: Tensor,
    p: float,
    seed: int,
    step: int,
    key: int,
    sample_offsets: list[int] | None,
    first_sample: int,
    first_position: int,
    first_feature: int,
) -> Tensor:
    offsets = bounds(x.shape[:-1], sample_offsets)
    return kernels_of(x).dropout(x, p, seed, step, key, offsets, first_sample, first_position, first_feature)


_dropout = _operator(
    "dropout",
    "(Tensor x, float p, SymInt seed, SymInt step, int key, SymInt[]? sample_offsets, SymInt first_sample, "
    "SymInt first_position, SymInt first_feature) -> Tensor",
    cuda=True,
)(_kernel)


@_fake(_dropout)
def _dropout_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


def _dropout_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.coordinates = inputs


def _dropout_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return (_dropout(dy, *ctx.coordinates), *(None,) * len(ctx.coordinates))


differentiable(_dropout, _dropout_backward, _dropout_setup)
refuse_vmap(_dropout)
