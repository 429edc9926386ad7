"""The "tbik" backend: bits against the oracle, what the users of torch.distributed call, and failures.

Ranks are processes of tests/spawn.py, in groups of the tbik backend over shared memory ("shm"),
sockets ("tcp") and gloo ("gloo"). Both at once need hosts: tests/test_two_hosts.py, tests/test_transport.cpp.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from long_cases import long_cases
from spawn import Pool, RankDied
from torch import Tensor, nn

from tbik import PlanError, reference, tree

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.skipif(sys.platform != "linux", reason="the backend's shared memory is for Linux"),
]

ROOT = Path(__file__).parent.parent
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SIZES = (0, 1, 5, 1000, 4097, 70_001)
LARGE = 1_000_007
WORLDS = range(1, 10)
SETTINGS = {
    "shm": {"TBIK_TRANSPORT": "shm"},
    "shm, one_shot": {"TBIK_TRANSPORT": "shm", "TBIK_PLACEMENT": "one_shot"},
    "shm, two_shot": {"TBIK_TRANSPORT": "shm", "TBIK_PLACEMENT": "two_shot"},
    "shm, two_level": {"TBIK_TRANSPORT": "shm", "TBIK_PLACEMENT": "two_level", "TBIK_NODE_SIZE": "2"},
    "tcp": {"TBIK_TRANSPORT": "tcp"},
    "tcp, two_level": {"TBIK_TRANSPORT": "tcp", "TBIK_PLACEMENT": "two_level", "TBIK_NODE_SIZE": "3"},
    "gloo": {"TBIK_TRANSPORT": "gloo"},
}


@pytest.fixture(scope="module", params=SETTINGS)
def nine(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Nine ranks; groups of any smaller size."""
    with Pool(9, backend="tbik", environment=SETTINGS[request.param]) as pool:
        yield pool


@pytest.fixture(scope="module", params=["shm", "tcp", "gloo"])
def four(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Four ranks whose default group is of the tbik backend."""
    with Pool(4, backend="tbik", environment=SETTINGS[request.param]) as pool:
        yield pool


def values_of(world: int, size: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """One tensor per rank, the same on every rank that asks."""
    if dtype.is_floating_point:
        return [wide_exponents((size,), dtype, 1000 * seed + rank) for rank in range(world)]
    generator = torch.Generator().manual_seed(seed)
    low, high = (0, 2) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return [torch.randint(low, high, (size,), generator=generator).to(dtype) for _ in range(world)]


def folded(values: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """cast(node(0, W)) of the ranks' values under any operator; 16-bit floats in fp32."""
    dtype = values[0].dtype
    wide = [v.float() if dtype in (torch.bfloat16, torch.float16) else v for v in values]
    with reference.plain_arithmetic():
        root = tree.root(wide, combine)
        return reference.epilogue(root, out_dtype=dtype) if dtype.is_floating_point else root


# --- bits ----------------------------------------------------------------


def check_sums(group: dist.ProcessGroup, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    rank, world = group.rank(), group.size()
    for dtype in dtypes:
        for size in sizes:
            values = values_of(world, size, dtype, seed=size)
            for name, op in (("sum", dist.ReduceOp.SUM), ("avg", dist.ReduceOp.AVG)):
                if name == "avg" and not dtype.is_floating_point:
                    continue
                expected = reference.all_reduce(values, name)  # type: ignore[arg-type]
                x = values[rank].clone()
                dist.all_reduce(x, op, group=group)
                assert_bitwise_equal(x, expected, f"all_reduce {name} {dtype} {size}, rank {rank} of {world}")


@pytest.mark.parametrize("world", [3, 9, *long_cases(set(WORLDS) - {3, 9})])
def test_verify_all_reduce_equals_reference(nine: Pool, world: int) -> None:
    nine.run(check_sums, world, SIZES, FLOATS + INTEGERS)


@pytest.mark.parametrize("world", [3, *long_cases([8])])
def test_verify_large_all_reduce_equals_reference(nine: Pool, world: int) -> None:
    nine.run(check_sums, world, [LARGE], (torch.float32, torch.bfloat16))


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """IEEE 754-2019 maximum: NaN wins, +0 > -0 (ORDER.md A8)."""
    if not a.is_floating_point():
        return torch.maximum(a, b)
    return torch.where((a == 0) & (b == 0), a + b, torch.maximum(a, b))


def minimum(a: Tensor, b: Tensor) -> Tensor:
    return -maximum(-a, -b) if a.is_floating_point() else torch.minimum(a, b)


def check_operators(group: dist.ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    op = dist.ReduceOp
    size = 3001
    ordered: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        op.PRODUCT: torch.mul,
        op.MIN: minimum,
        op.MAX: maximum,
    }
    bitwise: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
        op.BAND: torch.bitwise_and,
        op.BOR: torch.bitwise_or,
        op.BXOR: torch.bitwise_xor,
    }
    for dtype in FLOATS + INTEGERS + (torch.bool,):
        values = values_of(world, size, dtype, seed=7)
        if dtype.is_floating_point:
            for v, special in zip(values, (float("nan"), 0.0, -0.0, float("inf"), -float("inf")), strict=False):
                v[:100:7] = special
                v[1:100:9] = -0.0
        for which, combine in (ordered | ({} if dtype.is_floating_point else bitwise)).items():
            x = values[rank].clone()
            dist.all_reduce(x, which, group=group)
            if dtype == torch.bool and which == op.PRODUCT:
                combine = torch.logical_and
            if dtype == torch.bool and which in (op.MIN, op.MAX):
                combine = torch.logical_and if which == op.MIN else torch.logical_or
            expected = folded(values, combine)
            assert_bitwise_equal(x, expected, f"{which} {dtype} world {world}")
    x = torch.tensor([rank == 1, False, True])
    dist.all_reduce(x, group=group)
    assert x.tolist() == [world > 1, False, True]
    # PREMUL_SUM: at the root if all ranks bring one factor, else at the leaves, rounded
    for dtype in FLOATS:
        values = values_of(world, size, dtype, seed=8)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        for factors in ([0.3] * world, [0.3 + 0.1 * r for r in range(world)]):
            x = values[rank].clone()
            dist.all_reduce(x, dist._make_nccl_premul_sum(factors[rank]), group=group)
            scales = [torch.tensor(f, dtype=acc) for f in factors]
            with reference.plain_arithmetic():
                if len(set(factors)) == 1:
                    root = tree.root([v.to(acc) for v in values], reference.add) * scales[0]
                else:
                    root = tree.root([v.to(acc) * s for v, s in zip(values, scales, strict=True)], reference.add)
                expected = reference.epilogue(root, out_dtype=dtype)
            assert_bitwise_equal(x, expected, f"premul_sum {dtype} world {world} {factors}")


@pytest.mark.parametrize("world", [1, 3, 6])
def test_verify_operators_equal_their_definition(nine: Pool, world: int) -> None:
    nine.run(check_operators, world)


def check_forms(group: dist.ProcessGroup) -> None:
    """Every other form of a reduction gives all_reduce's bits."""
    rank, world = group.rank(), group.size()
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        for chunk in (1, 1000, 40_003):
            values = values_of(world, chunk * world, dtype, seed=chunk)
            whole = reference.all_reduce(values)
            mine = whole[rank * chunk : (rank + 1) * chunk]
            what = f"{dtype} {chunk} rank {rank} of {world}"

            x = values[rank].clone()
            group.reduce([x], _reduce_options(world - 1)).wait()
            assert_bitwise_equal(x, whole if rank == world - 1 else values[rank], f"reduce {what}")

            out = torch.empty(chunk, dtype=dtype)
            dist.reduce_scatter_tensor(out, values[rank].clone(), group=group)
            assert_bitwise_equal(out, mine, f"reduce_scatter_tensor {what}")
            dist.reduce_scatter(out.zero_(), list(values[rank].split(chunk)), group=group)
            assert_bitwise_equal(out, mine, f"reduce_scatter {what}")
            x = values[rank].clone()
            dist.reduce_scatter_tensor(x[rank * chunk : (rank + 1) * chunk], x, group=group)  # in place
            assert_bitwise_equal(x[rank * chunk : (rank + 1) * chunk], mine, f"reduce_scatter_tensor in place {what}")

            parts = [values[rank][:7].clone(), values[rank][7:].clone().double().to(dtype), torch.ones(3)]
            group.allreduce_coalesced(parts).wait()
            assert_bitwise_equal(torch.cat(parts[:2]), whole, f"all_reduce_coalesced {what}")
            assert parts[2].tolist() == [world] * 3

            strided = torch.stack([values[rank], values[rank]], dim=1)[:, 0]
            dist.all_reduce(strided, group=group)
            assert_bitwise_equal(strided, whole, f"strided {what}")


def _reduce_options(root: int) -> Any:
    options = dist.ReduceOptions()
    options.rootRank = root
    return options


@pytest.mark.parametrize("world", [6, *long_cases([2, 3, 5, 9])])  # 6 and 9: two levels, with nodes of 2 and of 3 ranks
def test_verify_every_form_equals_reference(nine: Pool, world: int) -> None:
    nine.run(check_forms, world)


def check_large_forms(group: dist.ProcessGroup) -> None:
    """Several segments, chunks of unequal length (one of them empty), factors that differ."""
    rank, world = group.rank(), group.size()
    for dtype in (torch.float32, torch.float16):
        sizes = [0 if r == 1 else 280_000 // world + 1_234 * r for r in range(world)]
        values = values_of(world, sum(sizes), dtype, seed=9)
        whole = reference.all_reduce(values)
        for op, expected in (
            (dist.ReduceOp.SUM, whole),
            (dist.ReduceOp.AVG, reference.all_reduce(values, "avg")),
            (dist.ReduceOp.MAX, folded(values, maximum)),
            (dist._make_nccl_premul_sum(1.5 + rank), premultiplied(values)),
        ):
            out = torch.empty(sizes[rank], dtype=dtype)
            dist.reduce_scatter(out, list(values[rank].clone().split(sizes)), op, group=group)
            mine = expected.split(sizes)[rank]
            assert_bitwise_equal(out, mine, f"reduce_scatter {op} {dtype} rank {rank} of {world}")
            for root in (0, world - 1) if op == dist.ReduceOp.SUM else (1,):
                x = values[rank].clone()
                options = _reduce_options(root)
                options.reduceOp = op
                group.reduce([x], options).wait()
                what = f"reduce {op} to {root} {dtype} rank {rank} of {world}"
                assert_bitwise_equal(x, expected if rank == root else values[rank], what)


def premultiplied(values: list[Tensor]) -> Tensor:
    with reference.plain_arithmetic():
        root = tree.root([v.float() * (1.5 + r) for r, v in enumerate(values)], reference.add)
        return reference.epilogue(root, out_dtype=values[0].dtype)


@pytest.mark.parametrize("world", [4, *long_cases([6, 9])])
def test_verify_large_forms_equal_reference(nine: Pool, world: int) -> None:
    nine.run(check_large_forms, world, deadline=120)


def check_prefix(group: dist.ProcessGroup) -> None:
    values = values_of(group.size(), 300_000, torch.float32, seed=3)
    whole = values[group.rank()].clone()
    dist.all_reduce(whole, group=group)
    for size in (3, 1024, 20_000, 299_999):
        x = values[group.rank()][:size].clone()
        dist.all_reduce(x, group=group)
        assert_bitwise_equal(x, whole[:size], f"prefix of {size}")


def test_verify_bits_do_not_depend_on_size_or_history(nine: Pool) -> None:
    nine.run(check_prefix, 7)


def gloo_result(group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    values = values_of(group.size(), 100_003, torch.float32, seed=4)
    x = values[group.rank()].clone()
    dist.all_reduce(x, group=group)
    return x, reference.all_reduce(values)


def test_verify_negative_control_gloo_differs() -> None:
    """On the same data another order shows: without this, equality would prove nothing."""
    with Pool(4) as pool:
        got, expected = pool.run(gloo_result, 4)[0]
    assert_bits_differ(got, expected, "gloo's all_reduce over 4 ranks")


def check_flush(group: dist.ProcessGroup) -> None:
    x = torch.full((1000,), 1e-40)
    torch.set_flush_denormal(True)
    try:
        dist.all_reduce(x, group=group)
    finally:
        torch.set_flush_denormal(False)
    expected = reference.all_reduce([torch.full((1000,), 1e-40)] * group.size())
    assert_bitwise_equal(x, expected, "subnormals")
    assert bool((x > 0).all())


def test_verify_subnormals_survive_a_flushing_process(nine: Pool) -> None:
    nine.run(check_flush, 3)


def check_negated(group: dist.ProcessGroup) -> None:
    """By the backend itself: torch's dispatcher hands it a copy and drops what any backend writes there."""
    world, rank = group.size(), group.rank()
    backend: Any = group._get_backend(torch.device("cpu"))
    values = [wide_exponents((6 * world,), torch.float32, seed=r) for r in range(world)]

    def negated(x: Tensor) -> Tensor:
        lazy = torch.complex(torch.zeros(x.numel()), -x).conj().imag
        assert lazy.is_neg()
        return lazy

    whole = reference.all_reduce(values)
    own = whole.view(world, 6)[rank]
    x = negated(values[rank])
    backend.allreduce([x]).wait()
    assert_bitwise_equal(x.resolve_neg(), whole, "all_reduce")
    x = negated(values[rank])
    backend.allreduce_coalesced([x]).wait()
    assert_bitwise_equal(x.resolve_neg(), whole, "all_reduce_coalesced")
    x = negated(values[rank])
    backend.reduce([x], _reduce_options(1)).wait()
    assert_bitwise_equal(x.resolve_neg(), whole if rank == 1 else values[rank], "reduce")
    for out in (torch.zeros(6), negated(torch.zeros(6))):
        backend._reduce_scatter_base(out, negated(values[rank])).wait()
        assert_bitwise_equal(out.resolve_neg(), own, "reduce_scatter_tensor")
        out.zero_()
        backend.reduce_scatter([out], [list(negated(values[rank]).chunk(world))]).wait()
        assert_bitwise_equal(out.resolve_neg(), own, "reduce_scatter")


def test_verify_pending_negations_are_resolved(four: Pool) -> None:
    four.run(check_negated, 3)


# --- what users of torch.distributed call ----------------------------------------------------------------


def check_work(group: dist.ProcessGroup) -> None:
    world = group.size()
    tensors = [torch.full((n,), 1.0) for n in (3, 50_000, 400_000)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in tensors]
    future = works[1].get_future().then(lambda f: f.value()[0][0].item())
    for work in works:
        assert work is not None and work.wait() and work.is_completed() and work.is_success()
    assert [x[0].item() for x in tensors] == [world] * 3
    assert future.wait() == world
    assert works[2].result()[0] is not None
    assert works[0].get_future().value()[0][0].item() == world  # asked for after the end
    # a blocking call behind asynchronous ones keeps its place
    first = torch.ones(200_000)
    second = torch.ones(10)
    work = dist.all_reduce(first, group=group, async_op=True)
    dist.all_reduce(second, group=group)
    work.wait()
    assert first[0] == second[0] == world


def test_asynchronous_work_and_futures(four: Pool) -> None:
    four.run(check_work, 4)


def check_movement(group: dist.ProcessGroup) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    rank, world = group.rank(), group.size()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == list(range(world))
    data = [rank]
    dist.broadcast_object_list(data, 0)
    assert data == [0]
    x = torch.full((5,), float(rank))
    dist.broadcast(x, 1)
    assert x[0] == 1
    outs = [torch.empty(2) for _ in range(world)]
    dist.all_to_all(outs, [torch.full((2,), float(rank * world + r)) for r in range(world)])
    assert [o[0].item() for o in outs] == [r * world + rank for r in range(world)]
    ops = [
        dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % world),
        dist.P2POp(dist.irecv, received := torch.empty(3), (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert received[0] == (rank - 1) % world
    tensors = [torch.ones(3), torch.ones(4)]
    with _coalescing_manager(async_ops=True) as manager:
        for t in tensors:
            dist.all_reduce(t)
    manager.wait()
    assert tensors[0][0] == world == tensors[1][0]
    outputs = [torch.empty(3), torch.empty(3)]
    with _coalescing_manager(async_ops=True) as manager:
        for t in outputs:
            dist.reduce_scatter_tensor(t, torch.ones(3 * world))
    manager.wait()
    assert outputs[0][0] == world == outputs[1][0]
    dist.barrier()


def test_movement_objects_coalescing_and_pipes(four: Pool) -> None:
    four.run(check_movement, 4)


def check_groups(group: dist.ProcessGroup) -> None:
    from tbik.backend import group_info, monitored_barrier

    rank, world = group.rank(), group.size()
    half = dist.new_group([0, 1])
    x = torch.ones(4)
    if rank < 2:
        dist.all_reduce(x, group=half)
        assert x[0] == 2
        assert group_info(half)["world_size"] == 2
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    y = torch.full((2,), float(rank))
    dist.all_reduce(y, group=mesh["tp"].get_group())
    assert y[0] == (1 if rank < 2 else 5)
    made: list[logging.LogRecord] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = made.append  # type: ignore[method-assign]
    logger = logging.getLogger("tbik.backend")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    split = group.split_group([0, 1] if rank < 2 else [2, 3], timeout=timedelta(seconds=30), group_name=f"s{rank // 2}")
    logger.removeHandler(handler)
    # once, not for each device type: a second one that torch drops would close its connections under the others
    assert sum("reductions over" in record.getMessage() for record in made) == 1
    assert split is not None
    z = torch.ones(2)
    split.allreduce([z]).wait()
    assert z[0] == 2
    monitored_barrier(timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))
    info = group_info()
    assert info["world_size"] == world and len(info["ranks"]) == world and info["calls"] > 0
    assert info["transport"] == os.environ["TBIK_TRANSPORT"]
    assert dist.get_backend() == "tbik"
    if rank < 2:
        dist.destroy_process_group(half)


def test_groups_meshes_splits_and_information(four: Pool) -> None:
    four.run(check_groups, 4)


def check_refusals(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    with pytest.raises(ValueError, match="complex|no reduction"):
        group.allreduce_coalesced([torch.ones(2, dtype=torch.complex32)], _product()).wait()
    with pytest.raises(ValueError, match="avg of int32 is not defined"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG)
    with pytest.raises(ValueError, match="band of float32 is not defined"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match=r"expected an input of 8 elements"):
        group._reduce_scatter_base(torch.empty(2), torch.ones(6)).wait()
    # the group is still in step
    z = torch.complex(torch.ones(3), torch.full((3,), float(rank)))
    dist.all_reduce(z)
    assert z[0] == complex(4, 6)


def _product() -> Any:
    options = dist.AllreduceCoalescedOptions()
    options.reduceOp = dist.ReduceOp.PRODUCT
    return options


def test_unsupported_calls_are_refused_before_anything_moves(four: Pool) -> None:
    four.run(check_refusals, 4)


DIFFERENT: dict[str, Callable[[Tensor], Any]] = {
    "fewer": lambda x: dist.all_reduce(x[:-1]),
    "many fewer": lambda x: dist.all_reduce(x[:10]),
    "many more": lambda x: dist.all_reduce(x.repeat(4)),
    "dtype": lambda x: dist.all_reduce(x.double()),
    "operator": lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
    "reduce": lambda x: dist.reduce(x, 0),
    "reduce_scatter": lambda x: dist.reduce_scatter_tensor(x[:100], x[:400]),
    "barrier": lambda _: dist.barrier(),
    "refused": lambda x: dist.all_reduce(x, dist.ReduceOp.BAND),
    "refused dtype": lambda _: dist.all_reduce(torch.ones(2, dtype=torch.uint16)),
    "refused scatter": lambda x: dist.reduce_scatter_tensor(x[:100], x[:300]),
}


def check_different_calls(group: dist.ProcessGroup, size: int) -> None:
    """Rank 2 makes another call than the others: an error on all ranks at once, inputs unchanged, the group usable."""
    rank, world = group.rank(), group.size()
    values = values_of(world, size, torch.float32, seed=11)
    dist.all_reduce(torch.ones(3))
    for name, call in DIFFERENT.items():
        x = values[rank].clone()
        start = time.monotonic()
        # a refusal says its own reason where it is made
        error = ValueError if rank == 2 and name.startswith("refused") else dist.DistBackendError
        match = "rank 2.*refused there" if name.startswith("refused") else "do not make the same call.*rank 2"
        with pytest.raises(error, match=match if error is dist.DistBackendError else None):
            call(x) if rank == 2 else dist.all_reduce(x)
        assert time.monotonic() - start < 10, name
        assert_bitwise_equal(x, values[rank], f"input after '{name}'")
        dist.all_reduce(x)
        assert_bitwise_equal(x, reference.all_reduce(values), f"the call after '{name}'")


@pytest.mark.parametrize("size", [1000, 400_000])
def test_verify_other_calls_raise_on_all_ranks_and_leave_the_group_usable(four: Pool, size: int) -> None:
    """Without TBIK_CHECK, after the group's first call."""
    four.run(check_different_calls, 4, size, deadline=100)


def check_sparse(group: dist.ProcessGroup) -> None:
    world, rank = group.size(), group.rank()
    rows = [wide_exponents((6, 3), torch.float32, r) for r in range(world)]
    keep = [[0, 2, 5], [1, 2], [], [2, 3, 5]]
    dense = []
    for r in range(world):
        x = torch.zeros(6, 3)
        x[keep[r]] = rows[r][keep[r]]
        dense.append(x)
    x = dense[rank].to_sparse(1)
    dist.all_reduce(x)
    assert_bitwise_equal(x.to_dense(), reference.all_reduce(dense), "sparse all_reduce")


def test_verify_sparse_all_reduce_equals_dense(four: Pool) -> None:
    four.run(check_sparse, 4)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def leaf_gradients(world: int) -> list[list[Tensor]]:
    """Gradients of every rank's own batch on the plain model."""
    result = []
    for rank in range(world):
        m = model()
        m(torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))).pow(2).sum().backward()
        result.append([p.grad for p in m.parameters() if p.grad is not None])
    return result


def batch(rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(rank))


def check_ddp(group: dist.ProcessGroup) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel

    world, rank = group.size(), group.rank()
    m = DistributedDataParallel(model(), bucket_cap_mb=0.001)
    m(batch(rank)).pow(2).sum().backward()
    for parameter, *leaves in zip(m.parameters(), *leaf_gradients(world), strict=True):
        scaled = [leaf / world for leaf in leaves]  # DDP divides before it sums; world is a power of two
        assert parameter.grad is not None
        assert_bitwise_equal(parameter.grad, reference.all_reduce(scaled), "DDP gradient")
    hooked = DistributedDataParallel(model())
    hooked.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    hooked(batch(rank)).pow(2).sum().backward()
    from torch.distributed.algorithms.join import Join

    with Join([m]):
        for _ in range(rank + 1):
            m(batch(rank)).sum().backward()


def check_fsdp2(group: dist.ProcessGroup) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    world, rank = group.size(), group.rank()
    m = model()
    fully_shard(m)
    m(batch(rank)).pow(2).sum().backward()
    for parameter, *leaves in zip(m.parameters(), *leaf_gradients(world), strict=True):
        full = parameter.grad.full_tensor()  # type: ignore[union-attr]
        assert_bitwise_equal(full, reference.all_reduce(leaves, "avg"), "FSDP2 gradient")
    m = fully_shard(model(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    m.set_gradient_divide_factor(3.0)  # PREMUL_SUM
    m(batch(rank)).sum().backward()
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    m = fully_shard(model(), mesh=mesh)
    m(batch(rank)).sum().backward()


def check_fsdp1(group: dist.ProcessGroup) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    m = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    for _ in range(2):
        m(batch(group.rank())).sum().backward()
        m.clip_grad_norm_(1.0)
        optimizer.step()


def check_dtensor(group: dist.ProcessGroup) -> None:
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    world, rank = group.size(), group.rank()
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    values = values_of(world, 64, torch.float32, seed=5)
    partial = DTensor.from_local(values[rank].view(8, 8), mesh, [Partial()])
    assert_bitwise_equal(partial.full_tensor().flatten(), reference.all_reduce(values), "Partial to Replicate")
    scattered = partial.redistribute(placements=[Shard(0)]).full_tensor()
    assert_bitwise_equal(scattered.flatten(), reference.all_reduce(values), "Partial to Shard")
    distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)]).redistribute(placements=[Shard(1)]).full_tensor()
    m = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    y = m(batch(0))
    torch.testing.assert_close(y, model()(batch(0)))
    y.sum().backward()


def check_functional(group: dist.ProcessGroup) -> None:
    import torch.distributed._functional_collectives as functional

    world = group.size()
    f = torch.compile(lambda x: functional.all_reduce(x * 2, "sum", group) + 1, backend="aot_eager")
    assert f(torch.ones(3))[0] == 2 * world + 1
    t = torch.ones(4 * world)
    assert (functional.reduce_scatter_tensor(t, "sum", 0, group) + 0)[0] == world
    assert (functional.all_to_all_single(t, None, None, group) + 0)[0] == 1
    assert [(x + 0)[0] for x in functional.all_reduce_coalesced([t, t], "avg", group)] == [1, 1]


def check_pipeline(group: dist.ProcessGroup) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    world, rank = group.size(), group.rank()
    stage = PipelineStage(nn.Linear(8, 8), rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda a, b: ((a - b) ** 2).mean())
    x = torch.randn(8, 8)
    if rank == 0:
        schedule.step(x)
    elif rank == world - 1:
        schedule.step(target=x)
    else:
        schedule.step()


def check_checkpoint(group: dist.ProcessGroup, folder: str) -> None:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    m = fully_shard(model())
    state = m.state_dict()
    checkpoint.save(state, checkpoint_id=folder)
    checkpoint.load(state, checkpoint_id=folder)


@pytest.mark.parametrize(
    "check", [check_ddp, check_fsdp1, check_fsdp2, check_dtensor, check_functional, check_pipeline]
)
def test_corroborate_users_of_the_backend(four: Pool, check: Callable[[dist.ProcessGroup], None]) -> None:
    four.run(check, 4, deadline=180)


def test_corroborate_distributed_checkpoint(four: Pool, tmp_path: Path) -> None:
    four.run(check_checkpoint, 4, str(tmp_path), deadline=180)


# --- construction ----------------------------------------------------------------


def test_importing_tbik_registers_the_backend_without_importing_torch() -> None:
    code = (
        "import sys, tbik; assert 'torch' not in sys.modules; import torch.distributed as dist; "
        "assert 'TBIK' in dist.Backend._plugins; assert 'tbik.backend' not in sys.modules; "
        "import inspect; inspect.getsource(dist.distributed_c10d); print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.stdout.strip() == "ok", done.stderr[-2000:]


def meet(store: Any, attempt: int, present: Sequence[int], timeout_s: float = 20.0) -> list[Any]:
    """What each of three ranks gets from backend._meet, or its error; the later ranks come later."""
    from concurrent.futures import ThreadPoolExecutor

    from tbik import backend

    def rank_meets(rank: int) -> Any:
        time.sleep(0.1 * rank)
        try:
            made, values = backend._meet(store, rank, 3, f"{rank} of {attempt}", timedelta(seconds=timeout_s))
        except Exception as error:
            return error
        made.set(f"mine/{rank}", f"{attempt}")
        return values, made.get("mine/0")  # waits: the store is common to all and to nobody else

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(rank_meets, present))


def test_a_store_with_the_keys_of_an_earlier_attempt_does_no_harm() -> None:
    """torchrun restarts with the same store: what dead ranks left there is not taken for the living."""
    from tbik.errors import TransportTimeout

    store = dist.HashStore()
    for attempt in range(3):
        results = meet(store, attempt, range(3))
        assert results == [([f"{r} of {attempt}" for r in range(3)], f"{attempt}".encode())] * 3
    for error in meet(store, 3, [0, 1], timeout_s=1.0):
        assert isinstance(error, TransportTimeout) and "ranks [2], whose keys" in str(error)
    fresh = dist.HashStore()
    for error in meet(fresh, 0, [0, 1], timeout_s=1.0):
        assert isinstance(error, TransportTimeout) and "for rank [2]" in str(error)


def two_groups(group: dist.ProcessGroup, name: str, values: list[str]) -> str:
    os.environ[name] = values[group.rank()]
    try:
        dist.new_group(backend="tbik", timeout=timedelta(seconds=20))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del os.environ[name]
    return "no error"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("TBIK_PLACEMENT", ["auto", "two_shot"], r"PlanError.*placement: auto on ranks \[0\]; two_shot on ranks \[1\]"),
        ("TBIK_TRANSPORT", ["ipc", "ipc"], r"PlanError: TBIK_TRANSPORT: expected one of"),
        ("TORCH_DISTRIBUTED_USE_TORCHCOMMS", ["1", "1"], r"PlanError: tbik: torchcomms is on"),
    ],
)
def test_disagreement_is_refused_on_all_ranks(name: str, values: list[str], message: str) -> None:
    with Pool(2) as pool:
        for text in pool.run(two_groups, 2, name, values):
            assert re.search(message, text), text


def test_two_level_puts_one_eighth_on_the_network() -> None:
    """64 nodes x 8 ranks: between nodes, n/8 per rank out in each of the two phases; flat two_shot: almost 2n."""
    from tbik.backend import bytes_per_link

    n = 1 << 22
    num_bytes = 4 * n
    rows = bytes_per_link("all_reduce", n, world_size=512, node_size=8)
    assert all(row["between_nodes"] <= 2 * num_bytes / 8 * 1.02 for row in rows)
    assert min(row["between_nodes"] for row in rows) > 2 * num_bytes / 8 * 63 / 64 * 0.95
    flat = bytes_per_link("all_reduce", n, world_size=512, node_size=8, placement="two_shot")
    assert min(row["between_nodes"] for row in flat) > 1.9 * num_bytes
    scattered = bytes_per_link("reduce_scatter_tensor", n, world_size=512, node_size=8, placement="two_level")
    assert {row["between_nodes"] for row in scattered} == {num_bytes // 8 * 63 // 64}
    flat = bytes_per_link("reduce_scatter_tensor", n, world_size=512, node_size=8, placement="two_shot")
    assert {row["between_nodes"] for row in flat} == {num_bytes // 64 * 63}
    reduced = bytes_per_link("reduce", n, world_size=512, node_size=8, placement="two_level")
    assert max(row["between_nodes"] for row in reduced) <= (num_bytes / 8 + num_bytes / 512) * 1.02
    with pytest.raises(PlanError, match="node_size must divide world_size 512, got 7"):
        bytes_per_link("all_reduce", n, world_size=512, node_size=7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter_tensor"])
def test_two_level_is_chosen_only_where_it_spares_the_network(collective: Any, dtype: torch.dtype) -> None:
    """Placement auto sends as few bytes between nodes as the better one of two_level and two_shot."""
    from tbik.backend import bytes_per_link

    flat = 0
    for node_size in range(2, 10):
        for nodes in (2, 3, 5):
            world = node_size * nodes

            def between(placement: str, world: int = world, node_size: int = node_size) -> int:
                n = 65_536 * world  # every chunk as long as the others
                rows = bytes_per_link(
                    collective, n, dtype, world_size=world, node_size=node_size, placement=placement, transport="tcp"
                )
                return max(row["between_nodes"] for row in rows)

            best = min(between("two_level"), between("two_shot"))
            assert between("auto") <= 1.01 * best, (node_size, nodes)  # chunks are whole cache lines
            flat += between("auto") != between("two_level")
    assert (flat > 0) == (dtype == torch.bfloat16 and collective != "all_reduce")


def moved_and_predicted(group: dist.ProcessGroup) -> list[tuple[str, int, int]]:
    """(what, bytes that the sockets took, bytes that the dry run says) for calls of this group."""
    from tbik.backend import bytes_per_link, bytes_sent, group_info

    world, rank = group.size(), group.rank()
    node_size = group_info(group)["node_size"]
    placement = group_info(group)["placement"]
    result = []
    for dtype in (torch.float32, torch.bfloat16):
        for size in (0, 5, 4096, 70_001, LARGE):
            for collective in ("all_reduce", "reduce_scatter_tensor"):
                count = size if collective == "all_reduce" else size // world * world
                x = torch.ones(count, dtype=dtype)
                before = sum(bytes_sent(group))
                if collective == "all_reduce":
                    dist.all_reduce(x, group=group)
                else:
                    dist.reduce_scatter_tensor(torch.empty(count // world, dtype=dtype), x, group=group)
                moved = sum(bytes_sent(group)) - before
                row = bytes_per_link(
                    collective,  # type: ignore[arg-type]
                    count,
                    dtype,
                    world_size=world,
                    node_size=node_size,
                    placement=placement,
                    transport="tcp",
                )[rank]
                result.append(
                    (f"{collective} {dtype} {size} {placement}", moved, row["within_node"] + row["between_nodes"])
                )
    return result


@pytest.mark.parametrize("settings", ["tcp", "tcp, two_level"])
def test_verify_dry_run_equals_the_bytes_that_move(settings: str) -> None:
    with Pool(6, backend="tbik", environment=SETTINGS[settings]) as pool:
        for rows in pool.run(moved_and_predicted, 6):
            assert any(moved > 1_000_000 for _, moved, _ in rows)
            for what, moved, predicted in rows:
                assert moved == predicted, (what, moved, predicted)


# --- failures ----------------------------------------------------------------

LIMIT_S = 2.0


def fail_at(group: dist.ProcessGroup, kind: str, culprit: int) -> tuple[float, str, bool]:
    """(seconds, error, input unchanged) of a rank that meets another rank's failure."""
    rank = group.rank()
    for _ in range(3):
        dist.all_reduce(torch.ones(300_000), group=group)
    x = values_of(group.size(), 300_000, torch.float32, seed=6)[rank]
    before = x.clone()
    if rank == culprit and kind in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, kind))
    if rank == culprit and kind == "missing":
        time.sleep(LIMIT_S + 1.5)
        return 0.0, "culprit", True
    if rank == culprit and kind == "mismatched":
        x, before = x[:-1], before[:-1]
    start = time.monotonic()
    try:
        dist.all_reduce(x, group=group)
    except dist.DistBackendError as error:
        return time.monotonic() - start, str(error), torch.equal(x.view(torch.int32), before.view(torch.int32))
    return time.monotonic() - start, "no error", False


@pytest.mark.parametrize("kind", ["SIGKILL", "missing", "mismatched", *long_cases(["SIGSTOP"])])
@pytest.mark.parametrize("transport", ["shm", *long_cases(["tcp", "gloo"])])
def test_verify_failed_call_leaves_input_unchanged(transport: str, kind: str) -> None:
    """Error within the limit + 1 s on every live rank, naming the culprit (shared memory), the input as it was."""
    culprit = 1
    environment = SETTINGS[transport] | {"TBIK_CHECK": "1"}
    with Pool(3, timeout=LIMIT_S, backend="tbik", environment=environment) as pool:
        pool.run(check_prefix, 3)
        outcomes = pool.outcomes(fail_at, 3, kind, culprit, deadline=25, grace=25)
    for rank, outcome in enumerate(outcomes):
        if rank == culprit and kind != "mismatched":
            continue
        assert outcome.error is None, f"{outcome.error} {outcome.traceback}"
        seconds, text, unchanged = outcome.value
        assert text != "no error" and unchanged, text
        assert seconds < LIMIT_S + 1, text
        if transport != "gloo" or kind == "mismatched":
            assert f"rank {culprit}" in text, text
    if kind in ("SIGKILL", "SIGSTOP"):
        assert isinstance(outcomes[culprit].error, RankDied)
    assert not [name for name in os.listdir("/dev/shm") if "tbik" in name]


def input_after_giving_up(group: dist.ProcessGroup, moment: str) -> None:
    """Rank 0 waits for less time than its peers take, at three moments of a call of many segments."""
    from tbik.backend import group_info

    rank, world = group.rank(), group.size()
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    mine = dist.new_group(backend="tbik", timeout=timedelta(seconds=5))
    named = "" if group_info(mine)["transport"] == "gloo" else "rank 0"  # over gloo its peers learn it by their limit
    dist.all_reduce(torch.ones(3), group=mine)
    x = values_of(world, 300_000, torch.float32, seed=8)[rank].repeat(1 if moment != "partly written" else 20)
    before = x.clone()
    if rank != 0:
        if moment != "partly written":
            dist.barrier(group)  # rank 0 has given up before its peers come
        if moment == "queued":
            dist.all_reduce(torch.ones(1000), group=mine)
        with pytest.raises(dist.DistBackendError, match=named):
            dist.all_reduce(x, group=mine)
            dist.all_reduce(x, group=mine)
        assert_bitwise_equal(x, before, f"the input of rank {rank}")
        return
    earlier = dist.all_reduce(torch.ones(1000), group=mine, async_op=True) if moment == "queued" else None
    work = dist.all_reduce(x, group=mine, async_op=True)
    if moment == "partly written":
        while x[0] == before[0] and not work.is_completed():
            pass
        os.kill(pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(dist.DistBackendError, match="not finished after 200 ms.*Its input is unchanged"):
            work.wait(timedelta(milliseconds=200))
        assert_bitwise_equal(x, before, "the input of the rank that gave up")
    finally:
        os.kill(pids[1], signal.SIGCONT)
    if moment != "partly written":
        dist.barrier(group)
    if earlier is not None:
        earlier.wait()  # what was called before is not given up
    for again in (work.wait, lambda: dist.all_reduce(torch.ones(3), group=mine)):
        with pytest.raises(dist.DistBackendError, match="given|earlier call"):
            again()
    assert_bitwise_equal(x, before, "the input of the rank that gave up, later")


@pytest.mark.parametrize("moment", ["not begun", "queued", "partly written"])
@pytest.mark.parametrize("transport", ["shm", *long_cases(["tcp", "gloo"])])
def test_verify_wait_that_gives_up_leaves_input_unchanged(transport: str, moment: str) -> None:
    with Pool(2, timeout=10, backend="tbik", environment=SETTINGS[transport]) as pool:
        pool.run(input_after_giving_up, 2, moment)


def wait_for_a_commit(group: dist.ProcessGroup) -> None:
    """A wait whose time is up while the result is being written ends with the result."""
    x = torch.ones(1000, 2000).t()  # written back element by element
    work = dist.all_reduce(x, group=group, async_op=True)
    while x[0, 0] == 1 and not work.is_completed():
        pass
    assert work.wait(timedelta(milliseconds=1))
    assert_bitwise_equal(x.contiguous(), torch.full((2000, 1000), float(group.size())), "all_reduce")
    dist.all_reduce(torch.ones(3), group=group)


def test_verify_wait_that_ends_while_the_result_is_written_has_it(four: Pool) -> None:
    four.run(wait_for_a_commit, 2)


def in_a_fork(group: dist.ProcessGroup) -> str:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            dist.all_reduce(torch.ones(2), group=group)
            text = "no error"
        except Exception as error:
            text = str(error)
        os.write(write, text.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    dist.all_reduce(torch.ones(2), group=group)
    return os.read(read, 4000).decode()


def test_a_forked_child_may_not_use_the_group(four: Pool) -> None:
    assert all("forked" in text for text in four.run(in_a_fork, 4))


def reuse(group: dist.ProcessGroup) -> None:
    """Many groups made and destroyed; abort."""
    for _ in range(3):
        g = dist.new_group(backend="tbik")
        dist.all_reduce(torch.ones(3), group=g)
        dist.destroy_process_group(g)
    g = dist.new_group(backend="tbik")
    dist.barrier(group)
    if group.rank() == 0:
        g._get_backend(torch.device("cpu")).abort()
    else:
        with pytest.raises(dist.DistBackendError, match=r"abort\(\) was called"):
            dist.all_reduce(torch.ones(3), group=g)


def test_groups_come_and_go_and_abort_wakes_everyone() -> None:
    with Pool(3, backend="tbik", environment=SETTINGS["shm"]) as pool:
        pool.run(reuse, 3)
