"""The fold of a rank's chunk (tbik/device_fold.py): bits against the canonical tree, by the kernel and pair by pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from interpreter import needs_triton
from test_backend import FLOATS, INTEGERS, folded, maximum, minimum, values_of
from torch import Tensor

from tbik import device_fold, devices, reference, tree
from tbik.errors import PlanError

WORLDS = (1, 2, 3, 5, 8)
SIZES = (0, 1, 33, 1029)
SPECIAL = (float("nan"), 0.0, -0.0, float("inf"), -float("inf"))
FLOAT_PAIRS = {"product": torch.mul, "min": minimum, "max": maximum}
INTEGER_PAIRS = {
    **FLOAT_PAIRS,
    "sum": torch.add,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
BOOL_PAIRS = {
    **dict.fromkeys(("sum", "max", "bor"), torch.logical_or),
    **dict.fromkeys(("product", "min", "band"), torch.logical_and),
    "bxor": torch.logical_xor,
}


@pytest.fixture(params=["kernel", "pairs"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sums by the device's kernel (here the CPU's), or in torch's operations, as without triton."""
    if request.param == "pairs":
        monkeypatch.setattr(device_fold, "_kernel", lambda rows: None)
    return str(request.param)


def special_values(world: int, size: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    values = values_of(world, size, dtype, seed)
    if dtype.is_floating_point:
        for value, special in zip(values, SPECIAL, strict=False):
            value[:100:7] = special
            value[1:100:9] = -0.0
    return values


def fold(values: list[Tensor], op: str, factors: Tensor | None = None) -> Tensor:
    return device_fold.fold(torch.stack(values), op, factors)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_verify_sums_equal_reference(way: str, dtype: torch.dtype) -> None:
    for world in WORLDS:
        for size in SIZES:
            values = special_values(world, size, dtype, seed=world)
            for op in ("sum", "avg"):
                expected = reference.all_reduce(values, op)  # type: ignore[arg-type]
                assert_bitwise_equal(fold(values, op), expected, f"{op} of {world} x {size} {dtype}, {way}")


def test_verify_order_shows(way: str) -> None:
    """Negative control: on these data another order has other bits."""
    values = values_of(5, 4001, torch.float32)
    actual = fold(values, "sum")
    flat = values[0]
    for value in values[1:]:
        flat = flat + value
    assert_bits_differ(actual, flat, "a flat sum")
    assert_bits_differ(actual, reference.all_reduce(values[1:] + values[:1]), "the ranks in another order")


@pytest.mark.parametrize("world", [1, 3, 5])
def test_verify_other_operators(world: int) -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        values = special_values(world, 501, dtype, seed=2)
        pairs: dict[str, Callable[[Tensor, Tensor], Tensor]] = (
            FLOAT_PAIRS if dtype.is_floating_point else BOOL_PAIRS if dtype == torch.bool else INTEGER_PAIRS
        )
        for op, pair in pairs.items():
            assert_bitwise_equal(fold(values, op), folded(values, pair), f"{op} of {world} x {dtype}")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_verify_zeros_and_nans_of_minimum_and_maximum(dtype: torch.dtype) -> None:
    """Every triple of special values: NaN wins and is canonical, +0 > -0 (A8)."""
    special = torch.tensor([1.0, -1.0, *SPECIAL], dtype=torch.float64)
    values = [grid.reshape(-1).to(dtype) for grid in torch.meshgrid(special, special, special, indexing="ij")]
    for op, pair in (("min", minimum), ("max", maximum)):
        assert_bitwise_equal(fold(values, op), folded(values, pair), f"{op} of {dtype}")


def test_verify_any_byte_but_zero_is_true() -> None:
    rows = torch.tensor([[0, 2, 0], [4, 1, 0]], dtype=torch.uint8).view(torch.bool)
    assert device_fold.fold(rows, "band").view(torch.uint8).tolist() == [0, 1, 0]
    assert device_fold.fold(rows, "sum").view(torch.uint8).tolist() == [1, 1, 0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_verify_premultiplied_sums(dtype: torch.dtype) -> None:
    """One factor of all ranks multiplies the root, different ones the leaves, each rounded (A7)."""
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    for world in (1, 3, 5):
        values = special_values(world, 777, dtype, seed=4)
        for factors in ([0.3] * world, [0.3 + 0.1 * rank for rank in range(world)]):
            scales = [torch.tensor(factor, dtype=torch.float64).to(acc) for factor in factors]
            with reference.plain_arithmetic():
                leaves = [value.to(acc) for value in values]
                if len(set(factors)) == 1:
                    root = tree.root(leaves, reference.add) * scales[0]
                else:
                    root = tree.root([leaf * s for leaf, s in zip(leaves, scales, strict=True)], reference.add)
                expected = reference.epilogue(root, out_dtype=dtype)
            actual = fold(values, "premul_sum", torch.tensor(factors, dtype=torch.float64))
            assert_bitwise_equal(actual, expected, f"premul_sum of {world} {dtype} {factors}")


@needs_triton
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_verify_by_the_cuda_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """In triton's interpreter, where there is no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(devices, "is_cuda", lambda tensor: True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in FLOATS:
        values = special_values(5, 1029, dtype, seed=6)
        for op in ("sum", "avg"):
            rows = torch.stack(values).to(device)
            expected = reference.all_reduce(values, op)  # type: ignore[arg-type]
            assert_bitwise_equal(device_fold.fold(rows, op), expected, f"{op} of {dtype}")


def test_the_result_shares_no_memory_with_the_rows() -> None:
    for dtype, op in ((torch.float32, "sum"), (torch.float32, "max"), (torch.int32, "sum"), (torch.bool, "bor")):
        rows = torch.ones(1, 5).to(dtype)
        assert device_fold.fold(rows, op).untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("dtype", "op", "match"),
    [
        (torch.float32, "band", "band of torch.float32 is not defined"),
        (torch.int32, "avg", "avg of torch.int32 is not defined"),
        (torch.complex64, "sum", "sum of torch.complex64 is not defined"),
        (torch.float32, "premul_sum", "one factor per row"),
    ],
)
def test_what_has_no_meaning_is_refused(dtype: torch.dtype, op: str, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        device_fold.fold(torch.zeros(2, 3, dtype=dtype), op)
    with pytest.raises(PlanError, match="contiguous rows"):
        device_fold.fold(torch.zeros(3, 2).t(), "sum")
