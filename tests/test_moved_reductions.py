"""Reductions moved by another backend (tbik/moved_reductions.py): gloo and CPU tensors here, NCCL and CUDA on GPUs.

Ranks are processes of tests/spawn.py. Through the backend: tests/test_device_reductions.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from long_cases import long_cases
from spawn import Pool
from test_backend import FLOATS, INTEGERS, folded, maximum, premultiplied, values_of
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from tbik import reference
from tbik.moved_reductions import MovedReductions, Movement

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
]

SIZES = (0, 1, 2, 7, 1000, 20_011)
PLACEMENTS = ("auto", "one_shot", "two_shot", "two_level")
SHORT = 4096  # bytes of a segment, so that messages have many


@pytest.fixture(scope="module")
def five() -> Iterator[Pool]:
    with Pool(5) as pool:
        yield pool


class Counted(Movement):
    """Remembers the most elements that one movement has brought to this rank, and that it sent."""

    most = 0
    sent = 0

    def all_to_all(self, out: Tensor, x: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        self.most = max(self.most, out.numel())
        self.sent += sum(send) - send[self.rank]
        super().all_to_all(out, x, receive, send)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self.most = max(self.most, out.numel())
        self.sent += x.numel() * (self.size - 1)
        super().all_gather(out, x)


_movements: dict[int, Counted] = {}


def movement_of(group: dist.ProcessGroup) -> Counted:
    """One of gloo's own, as NCCL's is the device's own."""
    size = group.size()
    if size not in _movements:
        store = PrefixStore("moved/", group.get_group_store())
        backend = dist.ProcessGroupGloo(store, group.rank(), size, timedelta(seconds=30))
        _movements[size] = Counted(backend, group.rank(), size)
    return _movements[size]


def check_all_reduce(group: dist.ProcessGroup, dtypes: Sequence[torch.dtype]) -> None:
    rank, world = group.rank(), group.size()
    ways = [MovedReductions(movement_of(group), placement) for placement in PLACEMENTS]
    ways += [MovedReductions(movement_of(group), placement, SHORT) for placement in PLACEMENTS[1:3]]
    for dtype in dtypes:
        for size in SIZES:
            values = values_of(world, size, dtype, seed=size)
            for op in ("sum", "avg") if dtype.is_floating_point else ("sum",):
                expected = reference.all_reduce(values, op)  # type: ignore[arg-type]
                for way in ways:
                    x = values[rank].clone()
                    way.all_reduce(op, 1.0, [x])
                    what = f"{op} {dtype} {size} {way.placement} {way.segment_bytes}, rank {rank} of {world}"
                    assert_bitwise_equal(x, expected, what)


@pytest.mark.parametrize("world", [1, 2, 3, 5, *long_cases([4])])
def test_verify_all_reduce_equals_reference(five: Pool, world: int) -> None:
    five.run(check_all_reduce, world, FLOATS + INTEGERS)


def check_forms(group: dist.ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    movement = movement_of(group)
    for way in (MovedReductions(movement), MovedReductions(movement, "two_shot", SHORT)):
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool):
            check_reduce(way, rank, world, dtype)
            check_scatter(way, rank, world, dtype)
    check_operators(MovedReductions(movement, "two_shot", SHORT), rank, world)


def whole_of(values: list[Tensor]) -> Tensor:
    return folded(values, torch.logical_or) if values[0].dtype == torch.bool else reference.all_reduce(values)


def check_reduce(way: MovedReductions, rank: int, world: int, dtype: torch.dtype) -> None:
    for size in (0, 3, 5003):
        values = values_of(world, size, dtype, seed=size)
        whole = whole_of(values)
        for root in {0, world - 1}:
            x = values[rank].clone()
            way.reduce("sum", 1.0, [x], root)
            assert_bitwise_equal(x, whole if rank == root else values[rank], f"reduce to {root} {dtype} {size}")
            x = torch.stack([values[rank], values[rank]], dim=1)
            way.reduce("sum", 1.0, [x[:, 1]], root)
            assert_bitwise_equal(x[:, 1], whole if rank == root else values[rank], f"strided reduce {dtype} {size}")
            assert_bitwise_equal(x[:, 0], values[rank], "what lies between its elements")
        strided = torch.stack([values[rank], values[rank]], dim=1)[:, 0]
        way.all_reduce("sum", 1.0, [strided, values[rank][:7].clone(), first := values[rank].clone()])
        assert_bitwise_equal(strided, whole, f"strided {dtype} {size}")
        assert_bitwise_equal(first, whole, f"one of three {dtype} {size}")


def check_scatter(way: MovedReductions, rank: int, world: int, dtype: torch.dtype) -> None:
    for chunk in (0, 1, 700):
        values = values_of(world, chunk * world, dtype, seed=chunk)
        mine = whole_of(values)[rank * chunk : (rank + 1) * chunk]
        what = f"{dtype} {chunk} rank {rank} of {world}"
        out = torch.empty(chunk, dtype=dtype)
        way.reduce_scatter("sum", 1.0, [out], [values[rank].clone()])
        assert_bitwise_equal(out, mine, f"reduce_scatter {what}")
        way.reduce_scatter_list("sum", 1.0, [out.zero_()], [list(values[rank].view(world, chunk))])
        assert_bitwise_equal(out, mine, f"reduce_scatter_list {what}")
        x = values[rank].clone()
        way.reduce_scatter("sum", 1.0, [x[rank * chunk : (rank + 1) * chunk]], [x])
        assert_bitwise_equal(x[rank * chunk : (rank + 1) * chunk], mine, f"in place {what}")
        if world > 1:
            x = values[rank].clone()
            across = x[chunk // 2 : chunk // 2 + chunk]
            way.reduce_scatter("sum", 1.0, [across], [x])
            assert_bitwise_equal(across, mine, f"across the chunks of its input {what}")
        wide = torch.empty(chunk, 2, dtype=dtype)
        way.reduce_scatter("sum", 1.0, [wide[:, 1]], [values[rank].view(world * chunk, 1).expand(-1, 2)[:, 0]])
        assert_bitwise_equal(wide[:, 1], mine, f"strided {what}")
    sizes = [0 if r == 1 else 150 + 1001 * r for r in range(world)]
    values = values_of(world, sum(sizes), dtype, seed=9)
    out = torch.empty(sizes[rank], dtype=dtype)
    way.reduce_scatter_list("sum", 1.0, [out], [list(values[rank].split(sizes))])
    assert_bitwise_equal(out, whole_of(values).split(sizes)[rank], f"chunks of several sizes {dtype}")


def check_operators(way: MovedReductions, rank: int, world: int) -> None:
    values = values_of(world, 5003, torch.float16, seed=3)
    for op, factor, expected in (
        ("max", 1.0, folded(values, maximum)),
        ("product", 1.0, folded(values, torch.mul)),
        ("premul_sum", 1.5 + rank, premultiplied(values)),
    ):
        x = values[rank].clone()
        way.all_reduce(op, factor, [x])
        assert_bitwise_equal(x, expected, f"{op} of {world}")


@pytest.mark.parametrize("world", [1, 3, 5, *long_cases([2, 4])])
def test_verify_every_form_equals_reference(five: Pool, world: int) -> None:
    five.run(check_forms, world)


def flat_sum(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    values = values_of(group.size(), 20_011, torch.float32)
    x = values[group.rank()].clone()
    MovedReductions(movement_of(group)).all_reduce("sum", 1.0, [x])
    flat = values[0].clone()
    for value in values[1:]:
        flat += value
    return x, flat


def test_verify_order_shows(five: Pool) -> None:
    """Negative control: a flat sum of the same data has other bits."""
    assert_bits_differ(*five.run(flat_sum, 5)[0], "a flat sum")


def gathered(group: dist.ProcessGroup) -> dict[str, tuple[int, int]]:
    movement = movement_of(group)
    results = {}
    for placement in ("one_shot", "two_shot"):
        movement.most = movement.sent = 0
        MovedReductions(movement, placement, SHORT).all_reduce("sum", 1.0, [torch.ones(20_000)])
        results[placement] = (movement.most, movement.sent)
    return results


def test_no_more_than_a_segment_is_gathered(five: Pool) -> None:
    """Also by one_shot; two_shot sends 2 n (W-1)/W elements, rounded up to whole chunks."""
    (most, _), (most_two, sent) = five.run(gathered, 5)[0].values()
    assert most <= SHORT // 4 and most_two <= SHORT // 4
    assert 2 * 20_000 * 4 / 5 <= sent <= 2 * 20_000 * 4 / 5 * 1.01


def unchanged(group: dist.ProcessGroup) -> Any:
    """A rank that a reduction does not end on keeps its tensor, in bits."""
    x = values_of(group.size(), 3001, torch.float32)[group.rank()]
    kept = x.clone()
    out = torch.empty(0)
    MovedReductions(movement_of(group)).reduce_scatter("sum", 1.0, [out], [torch.empty(0)])
    MovedReductions(movement_of(group)).reduce("sum", 1.0, [x], 2)
    return group.rank() == 2 or torch.equal(x, kept)


def test_inputs_that_are_no_outputs_stay(five: Pool) -> None:
    assert all(five.run(unchanged, 3))
