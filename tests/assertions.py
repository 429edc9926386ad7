"""Comparison of bits. -0.0 differs from +0.0, and every NaN payload counts."""

from __future__ import annotations

import torch

from tbik.errors import IntegrityError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """bits(actual) == bits(expected), same shape, same dtype; else IntegrityError at the first differing coordinate."""
    _require_comparable(actual, expected, what)
    actual_bits, expected_bits = _bits(actual), _bits(expected)
    differing = (actual_bits != expected_bits).nonzero()
    if len(differing) == 0:
        return
    at = tuple(differing[0].tolist())
    raise IntegrityError(
        f"{what or 'tensors'}: {len(differing)} of {actual.numel()} elements differ in bits (dtype {actual.dtype}, "
        f"shape {tuple(actual.shape)}); first at {at}: actual {_describe(actual, actual_bits, at)}, "
        f"expected {_describe(expected, expected_bits, at)}"
    )


def assert_bits_differ(actual: torch.Tensor, other: torch.Tensor, what: str) -> None:
    """bits(actual) != bits(other) somewhere: the negative control, without which an equality test shows nothing."""
    if count_differing_bits_patterns(actual, other) == 0:
        raise IntegrityError(f"{what}: expected different bits, but all {actual.numel()} elements are the same")


def count_differing_bits_patterns(actual: torch.Tensor, other: torch.Tensor) -> int:
    """|{i : bits(actual_i) != bits(other_i)}| for two tensors of one shape and dtype."""
    _require_comparable(actual, other, "count_differing_bits_patterns")
    return int((_bits(actual) != _bits(other)).sum())


def _require_comparable(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise IntegrityError(
            f"{what or 'tensors'}: expected {expected.dtype} {tuple(expected.shape)}, "
            f"got {actual.dtype} {tuple(actual.shape)}"
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(_BITS[tensor.element_size()])


def _describe(tensor: torch.Tensor, bits: torch.Tensor, at: tuple[int, ...]) -> str:
    width = 2 * tensor.element_size()
    pattern = int(bits[at]) & ((1 << (4 * width)) - 1)
    return f"0x{pattern:0{width}x} ({tensor.detach().cpu()[at].item()!r})"
