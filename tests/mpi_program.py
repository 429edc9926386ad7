"""What tests/test_launch.py runs on every rank: `mpiexec -n W python -m mpi4py tests/mpi_program.py NAME`.

Rank 0 prints "passed NAME" after all ranks have come through; a rank that raises ends the job (-m mpi4py).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from torch import Tensor

from tbik import PlanError, TransportTimeout, launch, reference

FLOATS = (torch.float32, torch.float64, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SIZES = (0, 1, 3, 5, 1000, 4097, 70_001)


def values_of(world: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """One tensor per rank, the same on every rank that asks."""
    if dtype.is_floating_point:
        return [wide_exponents(tuple(shape), dtype, 1000 * seed + rank) for rank in range(world)]
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(dtype)
    return [torch.randint(info.min, info.max, tuple(shape), generator=generator).to(dtype) for _ in range(world)]


def require(comm: Any, values: Sequence[Tensor], what: str, op: Any = "sum", array: Any = None) -> None:
    """allreduce(this rank's value) == reference, and the value is as it was."""
    mine = values[comm.rank].numpy().copy() if array is None else array
    before = mine.copy()
    got = launch.allreduce(comm, mine, op)
    expected = reference.all_reduce(list(values), op)
    assert got.dtype == mine.dtype and got.shape == mine.shape
    assert_bitwise_equal(torch.from_numpy(got), expected, f"{what} {op}, rank {comm.rank} of {comm.size}")
    assert mine.tobytes() == before.tobytes()


def bits(comm: Any) -> None:
    """Every dtype, uneven sizes, every placement, strides, special values; the same as dist.all_reduce."""
    everywhere = [
        (launch.ONE_SHOT_BYTES, launch.SEGMENT_BYTES),
        (0, 1 << 26),
        (1 << 30, 1 << 26),
        (0, 1000),
        (9000, 80),
    ]
    for launch.ONE_SHOT_BYTES, launch.SEGMENT_BYTES in everywhere:
        placement = f"one-shot {launch.ONE_SHOT_BYTES}, segments {launch.SEGMENT_BYTES}"
        for dtype in (*FLOATS, *INTEGERS):
            for size in SIZES if launch.SEGMENT_BYTES > 1000 else SIZES[:5]:
                values = values_of(comm.size, (size,), dtype, seed=size)
                require(comm, values, f"{dtype} {size} {placement}")
                if dtype.is_floating_point:
                    require(comm, values, f"{dtype} {size} {placement}", "avg")
    launch.ONE_SHOT_BYTES, launch.SEGMENT_BYTES = everywhere[0]
    for dtype in (*FLOATS, *INTEGERS):
        for size in SIZES:
            values = values_of(comm.size, (size,), dtype, seed=size)
            x = values[comm.rank].clone()
            dist.all_reduce(x)
            got = launch.allreduce(comm, values[comm.rank].numpy())
            assert_bitwise_equal(torch.from_numpy(got), x, f"dist.all_reduce {dtype} {size}")
    for name in ("uint32", "uint64"):
        arrays = [np.random.default_rng(rank).integers(0, np.iinfo(name).max, 999, name) for rank in range(comm.size)]
        assert (launch.allreduce(comm, arrays[comm.rank]) == sum(arrays[1:], arrays[0].copy())).all()
    strides(comm)
    special_values(comm)
    if comm.size >= 3:  # negative control: these values tell the orders apart
        values = values_of(comm.size, (4097,), torch.float32)
        rotated = reference.all_reduce(values[1:] + values[:1])
        assert_bits_differ(reference.all_reduce(values), rotated, "sum of the ranks from rank 1 on")


def strides(comm: Any) -> None:
    def view(change: Callable[[Any], Any], shape: Sequence[int]) -> None:
        values = values_of(comm.size, shape, torch.float32, seed=7)
        changed = [torch.from_numpy(change(value.numpy()).copy()) for value in values]
        require(comm, changed, f"view of {shape}", array=change(values[comm.rank].numpy().copy()))

    view(lambda a: a[::2], (70_001,))
    view(lambda a: a[::-1], (1001,))
    view(lambda a: a.T, (37, 21))
    view(lambda a: a[:, 3:9, None], (12, 10))
    view(lambda a: a[5:5], (12, 10))
    view(lambda a: np.broadcast_to(a, (4, 33)), (33,))
    view(lambda a: a.reshape(()), (1,))
    assert type(launch.allreduce(comm, np.ones((2, 3), "f4").view(np.matrix))) is np.ndarray

    values = values_of(comm.size, (30, 7), torch.float64, seed=8)
    expected = reference.all_reduce(values)
    for out in (np.empty((30, 7)), np.empty((7, 30)).T, np.empty((60, 7))[::-2]):
        assert launch.allreduce(comm, values[comm.rank].numpy(), out=out) is out
        assert_bitwise_equal(torch.from_numpy(out.copy()), expected, "out")
    pair = np.zeros((100, 2), "f4")
    pair[:, 0] = np.arange(100)
    assert (launch.allreduce(comm, pair[:, 0], out=pair[:, 1]) == comm.size * np.arange(100)).all()  # interleaved


def special_values(comm: Any) -> None:
    for dtype in FLOATS:
        tiny = torch.finfo(dtype).tiny / 4
        odd = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), -float("inf"), tiny, -tiny], dtype=dtype)
        values = [odd if rank % 2 == 0 else odd.roll(rank) for rank in range(comm.size)]
        for op in ("sum", "avg"):
            require(comm, values, f"special values {dtype}", op)
            require(comm, [odd] * comm.size, f"equal special values {dtype}", op)


def refusals(comm: Any) -> None:
    """PlanError on all ranks, nothing written, and the ranks stay in step."""
    last = comm.rank == comm.size - 1
    ones = np.ones(8, "f4")
    wide = np.ones((8, 2), "f4")
    readonly = np.ones(8, "f4")
    readonly.flags.writeable = False
    twice = np.lib.stride_tricks.as_strided(np.zeros(8, "f4"), (8,), (0,))
    buffer = np.ones(12, "f4")

    def refused(match: str, array: Any, **options: Any) -> None:
        """The last rank's arguments are wrong; every rank hears of it."""
        mine, chosen = (array, options) if last else (ones, {})
        before = [np.array(x, copy=True, subok=True) for x in (mine, *chosen.values()) if isinstance(x, np.ndarray)]
        with pytest.raises(PlanError, match=match) as caught:
            launch.allreduce(comm, mine, **chosen)
        assert f"rank {comm.size - 1} refuses" in str(caught.value), caught.value
        after = [x for x in (mine, *chosen.values()) if isinstance(x, np.ndarray)]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(after, before, strict=True))
        assert (launch.allreduce(comm, ones) == comm.size).all()

    refused("op must be 'sum' or 'avg', got 'max'", ones, op="max")
    refused(r"op must be .*, got \['sum'\]", ones, op=["sum"])
    refused("expected a numpy array, got list", [1.0] * 8)
    refused("expected a numpy array, got float", 1.0)
    refused("expected a numpy array, got MaskedArray", np.ma.masked_array(ones, ones > 0))
    refused("no sum of uint16 .*bits of bfloat16", ones.astype("u2"))
    refused("no sum of bool here", ones.astype(bool))
    refused("no sum of complex64 here; sum real", ones.astype("c8"))
    refused("no sum of object here", ones.astype(object))
    refused(f"no sum of {np.dtype(np.longdouble).name} here", ones.astype(np.longdouble))
    refused("float32 of the other byte order here; convert", ones.astype(">f4"))
    refused("no average of int32", ones.astype("i4"), op="avg")
    refused("expected a writeable out of float32 .*got float32 .8., read-only", ones, out=readonly)
    refused(r"got float64 \[8\]", ones, out=np.zeros(8))
    refused(r"got float32 \[4, 2\]", ones, out=np.zeros((4, 2), "f4"))
    refused("got list", ones, out=[0.0] * 8)
    refused("out shares memory with array; in place", ones, out=ones)
    refused("out shares memory with array", buffer[:8], out=buffer[4:])
    refused("out shares memory with array", wide[:, 0], out=wide.reshape(-1)[::2])
    refused("two elements the same memory", ones, out=twice)

    if comm.size > 1:

        def differ(match: str, array: np.ndarray, **options: Any) -> None:
            with pytest.raises(PlanError, match=match):
                launch.allreduce(comm, array if last else ones, **(options if last else {}))
            assert (launch.allreduce(comm, ones) == comm.size).all()

        differ(f"dtype: float32 on .*float64 on rank {comm.size - 1}", np.ones(8))
        differ(rf"shape: \[8\] on .*\[9\] on rank {comm.size - 1}", np.ones(9, "f4"))
        differ(r"shape: \[8\] on .*\[2, 4\] on", np.ones((2, 4), "f4"))
        differ(r"shape: \[8\] on .*\[70000\] on", np.ones(70_000, "f4"))
        differ("op: sum on .*avg on", ones, op="avg")

    from mpi4py import MPI

    for not_a_comm in (None, MPI.COMM_NULL, dist.group.WORLD):
        with pytest.raises(PlanError, match="expected an mpi4py intracommunicator"):
            launch.allreduce(not_a_comm, ones)
    part = comm.Split(comm.rank % 2)  # another communicator has its own ranks and its own world
    got = launch.allreduce(part, values_of(comm.size, (500,), torch.float32)[comm.rank].numpy())
    members = values_of(comm.size, (500,), torch.float32)[comm.rank % 2 :: 2]
    assert_bitwise_equal(torch.from_numpy(got), reference.all_reduce(members), "half of the ranks")


def world(comm: Any) -> None:
    """The default group is MPI's world; it can be made again."""
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (comm.rank, comm.size, "tbik")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [os.environ[name] for name in names] == [str(n) for n in (comm.rank, comm.size) * 2]
    with pytest.raises(PlanError, match="a default process group already"):
        launch.init()
    check_default_group(comm.rank, comm.size)
    dist.destroy_process_group()
    for name in names:
        del os.environ[name]
    os.environ["TBIK_PLACEMENT"] = "elsewhere"
    with pytest.raises(PlanError, match="TBIK_PLACEMENT"):
        launch.init(timeout_s=30)
    del os.environ["TBIK_PLACEMENT"]
    assert not dist.is_initialized() and not any(name in os.environ for name in names)
    if comm.size == 2:  # one rank fails: no rank has a group afterwards
        if comm.rank == 1:
            os.environ["TBIK_PLACEMENT"] = "elsewhere"
        with pytest.raises(PlanError if comm.rank == 1 else TransportTimeout):
            launch.init(timeout_s=2)
        os.environ.pop("TBIK_PLACEMENT", None)
        assert not dist.is_initialized() and not any(name in os.environ for name in names)
    launch.init("cpu:gloo", timeout_s=30)
    assert dist.get_backend_config() == "cpu:gloo" and os.environ["RANK"] == str(comm.rank)
    dist.destroy_process_group()
    launch.init(timeout_s=30)
    check_default_group(comm.rank, comm.size)


def check_default_group(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values = values_of(size, (4097,), dtype)
        x = values[rank].clone()
        dist.all_reduce(x)
        assert_bitwise_equal(x, reference.all_reduce(values), f"dist.all_reduce {dtype}")


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphans
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if sys.argv[1] == "torchrun":
        launch.init(timeout_s=60)
        assert "mpi4py" not in sys.modules
        check_default_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        dist.destroy_process_group()
        print(f"rank {os.environ['RANK']} passed torchrun")
        return
    launch.init(timeout_s=60)
    from mpi4py import MPI

    for name in sys.argv[1:]:
        {"bits": bits, "refusals": refusals, "world": world}[name](MPI.COMM_WORLD)
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 0:
            print("passed", name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
