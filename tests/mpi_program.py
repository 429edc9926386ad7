"""What tests/test_launch.py runs on every rank: `mpiexec -n W python -m mpi4py tests/mpi_program.py NAME`.

Rank 0 prints "passed NAME" after all ranks have come through; a rank that raises ends the job (-m mpi4py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from torch import Tensor

import tbik
from tbik import PlanError, TransportError, TransportTimeout, backend, launch, reference

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
SIZES = (0, 1, 3, 5, 1000, 4097, 70_001)
LARGE = 1_000_007  # several segments
LIMIT_S = 1.0
GRACE_S = 1.0


def values_of(world: int, shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """One tensor per rank, the same on every rank that asks."""
    if dtype.is_floating_point:
        return [wide_exponents(tuple(shape), dtype, 1000 * seed + rank) for rank in range(world)]
    generator = torch.Generator().manual_seed(seed)
    info = torch.iinfo(dtype)
    return [torch.randint(info.min, info.max, tuple(shape), generator=generator).to(dtype) for _ in range(world)]


def to_numpy(x: Tensor) -> Any:
    """bfloat16 as uint16, with the same memory."""
    return x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()


def to_torch(array: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array.view(np.int16)).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(array)


def require(comm: Any, values: Sequence[Tensor], what: str, op: Any = "sum", array: Any = None) -> None:
    """allreduce(this rank's value) == reference, and the value is as it was; the same in place."""
    dtype = values[0].dtype
    hint: Any = "bfloat16" if dtype == torch.bfloat16 else None
    mine = to_numpy(values[comm.rank].clone()) if array is None else array
    before = mine.copy()
    got = launch.allreduce(comm, mine, op, dtype=hint)
    expected = reference.all_reduce(list(values), op)
    what = f"{what} {op}, rank {comm.rank} of {comm.size}"
    assert got.dtype == mine.dtype and got.shape == mine.shape
    assert_bitwise_equal(to_torch(got, dtype), expected, what)
    assert mine.tobytes() == before.tobytes()
    if mine.flags.writeable:
        assert launch.allreduce(comm, mine, op, out=mine, dtype=hint) is mine
        assert_bitwise_equal(
            to_torch(np.ascontiguousarray(mine).reshape(mine.shape), dtype), expected, f"{what}, in place"
        )


@contextlib.contextmanager
def settings(comm: Any, **values: Any) -> Iterator[Any]:
    """A communicator with the ranks of comm whose calls here use these settings of tbik.launch."""
    before = {name: getattr(launch, name) for name in values}
    for name, value in values.items():
        setattr(launch, name, value)
    part = comm.Dup()
    try:
        yield part
    finally:
        for name, value in before.items():
            setattr(launch, name, value)
        part.Free()


def bits(comm: Any) -> None:
    """Every dtype, uneven sizes, every placement and transport, strides, special values; as dist.all_reduce."""
    everywhere: list[dict[str, Any]] = [
        {},
        {"ONE_SHOT_BYTES": 0, "SEGMENT_BYTES": 1 << 16},
        {"ONE_SHOT_BYTES": 1 << 30},
        {"TRANSPORT": "mpi"},
        {"TRANSPORT": "mpi", "ONE_SHOT_BYTES": 0, "MPI_SEGMENT_BYTES": 1 << 20},
    ]
    for chosen in everywhere:
        with settings(comm, **chosen) as part:
            for dtype in (*FLOATS, *INTEGERS) if "MPI_SEGMENT_BYTES" not in chosen else FLOATS[:1]:
                for size in SIZES if not chosen else SIZES[3:]:
                    values = values_of(comm.size, (size,), dtype, seed=size)
                    require(part, values, f"{dtype} {size} {chosen}")
                    if dtype.is_floating_point:
                        require(part, values, f"{dtype} {size} {chosen}", "avg")
            if "ONE_SHOT_BYTES" in chosen:
                require(part, values_of(comm.size, (LARGE,), torch.float32), f"{LARGE} {chosen}")
    require(comm, values_of(comm.size, (LARGE,), torch.bfloat16), f"bfloat16 {LARGE}")
    for dtype in (*FLOATS, *INTEGERS):
        for size in SIZES[-2:]:
            values = values_of(comm.size, (size,), dtype, seed=size)
            x = values[comm.rank].clone()
            dist.all_reduce(x)
            hint: Any = "bfloat16" if dtype == torch.bfloat16 else None
            got = launch.allreduce(comm, to_numpy(values[comm.rank]), dtype=hint)
            assert_bitwise_equal(to_torch(got, dtype), x, f"dist.all_reduce {dtype} {size}")
    mine = values_of(comm.size, (LARGE,), torch.float32)[comm.rank].numpy()
    whole = launch.allreduce(comm, mine)
    for size in (1, 1000, 16_384, 16_385, 300_001):  # a prefix has the bits of the whole
        assert launch.allreduce(comm, mine[:size].copy()).tobytes() == whole[:size].tobytes()
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
    refused("out shares memory with array; in place", ones, out=ones[:])
    refused("writeable out", readonly, out=readonly)
    refused("dtype must be None, or 'bfloat16' .*float32", ones, dtype="bfloat16")
    refused("dtype must be None", ones.astype("u2"), dtype="float16")
    refused("timeout_s must be a number", ones, timeout_s=-1)
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
        differ("dtype: float32 on .*int32 on", np.ones(8, "i4"))
        differ("dtype: float32 on .*bfloat16 on", np.ones(8, "u2"), dtype="bfloat16")

    from mpi4py import MPI

    for not_a_comm in (None, MPI.COMM_NULL, dist.group.WORLD):
        with pytest.raises(PlanError, match="expected an mpi4py intracommunicator"):
            launch.allreduce(not_a_comm, ones)
    part = comm.Split(comm.rank % 2)  # another communicator has its own ranks and its own world
    got = launch.allreduce(part, values_of(comm.size, (500,), torch.float32)[comm.rank].numpy())
    members = values_of(comm.size, (500,), torch.float32)[comm.rank % 2 :: 2]
    assert_bitwise_equal(torch.from_numpy(got), reference.all_reduce(members), "half of the ranks")


def refusals_mpi(comm: Any) -> None:
    with settings(comm, TRANSPORT="mpi") as part:
        refusals(part)


def deadline(comm: Any) -> None:
    """A rank that does not come is named by all others within the limit and a second; nothing is written."""
    last = comm.size - 1

    def absent(part: Any, call: str) -> None:
        values = values_of(comm.size, (5000,), torch.float32)
        x = to_numpy(values[comm.rank].clone())
        start = time.monotonic()
        if comm.rank != last:
            # The first to find out raises TransportTimeout; a rank that it tells, TransportError with the same words.
            kind = TransportTimeout if comm.size == 2 or call == "first" else TransportError
            with pytest.raises(kind, match=rf"waited .* for .*rank.* {last}") as caught:
                launch.allreduce(part, x, out=x, timeout_s=LIMIT_S)
            elapsed = time.monotonic() - start
            assert LIMIT_S / 2 < elapsed < LIMIT_S + GRACE_S, (elapsed, caught.value)
            assert x.tobytes() == to_numpy(values[comm.rank]).tobytes()
        time.sleep(max(0.0, LIMIT_S + GRACE_S - (time.monotonic() - start)))
        if call == "first" and comm.rank == last:  # comes too late: the others have left
            with pytest.raises(TransportTimeout):
                launch.allreduce(part, x, timeout_s=LIMIT_S)

    for transport in ("auto", "mpi"):
        with settings(comm, TRANSPORT=transport) as part:
            launch.allreduce(part, np.ones(3, "f4"))
            absent(part, "second")
            if comm.rank != last:
                with pytest.raises(TransportError, match="earlier call|given up"):
                    launch.allreduce(part, np.ones(3, "f4"))
    absent(comm.Dup(), "first")  # not freed: MPI still has the calls that nobody answered


def killed(comm: Any, transport: str = "auto") -> None:
    """The others learn that a rank's process is gone, long before the limit. Ends the job without MPI_Finalize."""
    launch.TRANSPORT = transport  # type: ignore[assignment]
    launch.allreduce(comm, np.ones(3, "f4"))
    last = comm.size - 1
    if comm.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    x = values_of(comm.size, (3_000_001,), torch.float32)[comm.rank].numpy()
    before = x.copy()
    start = time.monotonic()
    with pytest.raises(TransportError, match=rf"(rank {last}|has given up)") as caught:
        launch.allreduce(comm, x, out=x, timeout_s=90)
    assert "gone" in str(caught.value) and time.monotonic() - start < 10, caught.value
    assert x.tobytes() == before.tobytes()
    print("passed killed", transport, "on rank", comm.rank, flush=True)
    os._exit(0)


def movement(comm: Any) -> None:
    """movement="mpi": reductions and everything else by MPI, with the bits of the reference."""
    rank, size = comm.rank, comm.size
    dist.destroy_process_group()
    os.environ["TBIK_TRANSPORT"] = "mpi"
    with pytest.raises(PlanError, match="TBIK_TRANSPORT=mpi, but"):
        launch.init(timeout_s=30)
    with pytest.raises(PlanError, match="movement must be"):
        launch.init("gloo", movement="mpi")
    launch.init(timeout_s=30, movement="mpi")
    assert backend.group_info()["transport"] == "mpi"
    for dtype in (*FLOATS, torch.int32):
        for n in (0, 1, 4097, 70_001, *((3_000_001,) if dtype == torch.float32 else ())):
            values = values_of(size, (n,), dtype)
            x = values[rank].clone()
            dist.all_reduce(x)
            assert_bitwise_equal(x, reference.all_reduce(values), f"all_reduce {dtype} {n}")
    values = values_of(size, (size * 1001,), torch.float32, seed=3)
    expected = reference.all_reduce(values)
    out = torch.empty(1001)
    dist.reduce_scatter_tensor(out, values[rank])
    assert_bitwise_equal(out, expected[rank * 1001 :][:1001], "reduce_scatter_tensor")
    move(rank, size)
    assert_bitwise_equal(tbik.all_reduce(values[rank]), expected, "tbik.all_reduce")
    if size > 1:
        part = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            x = values[rank].clone()
            dist.all_reduce(x, group=part)
            assert_bitwise_equal(x, reference.all_reduce([values[0], values[-1]]), "new_group")
        with pytest.raises(RuntimeError, match=r"0\.\.1023"):
            dist.send(torch.ones(1), size - 1, tag=1024) if rank == 0 else dist.recv(torch.ones(1), 0, tag=1024)
        missing(rank, size)
    dist.destroy_process_group()
    del os.environ["TBIK_TRANSPORT"]
    comm.Barrier()
    launch.init(timeout_s=30, movement="mpi")  # reductions in shared memory, the rest by MPI
    assert backend.group_info()["transport"] == "shm"
    x = values[rank].clone()
    dist.all_reduce(x)
    assert_bitwise_equal(x, expected, "all_reduce")
    move(rank, size)
    dist.destroy_process_group()
    launch.init(timeout_s=30)


def move(rank: int, size: int) -> None:
    """What is delegated arrives whole, from and into memory of any strides."""

    def own(r: int, n: int = 30) -> Tensor:
        return wide_exponents((n, 3), torch.bfloat16, r)

    def same(got: Tensor, expected: Tensor, what: str) -> None:
        assert_bitwise_equal(got, expected, f"{what}, rank {rank} of {size}")

    for root in (0, size - 1):
        x = own(rank).t().contiguous().t()  # not contiguous
        dist.broadcast(x, root)
        same(x, own(root), "broadcast")
        gathered = [torch.empty(30, 3, dtype=torch.bfloat16) for _ in range(size)] if rank == root else None
        dist.gather(own(rank), gathered, dst=root)
        for r, got in enumerate(gathered or ()):
            same(got, own(r), "gather")
        scattered = torch.empty(30, 3, dtype=torch.bfloat16)
        dist.scatter(scattered, [own(r) for r in range(size)] if rank == root else None, src=root)
        same(scattered, own(rank), "scatter")
    everything = [torch.empty(3, 30, dtype=torch.bfloat16).t() for _ in range(size)]
    dist.all_gather(everything, own(rank))
    flat = torch.empty(30 * size, 3, dtype=torch.bfloat16)
    work = dist.all_gather_into_tensor(flat, own(rank), async_op=True)
    assert work is not None
    work.wait()
    for r in range(size):
        same(everything[r], own(r), "all_gather")
        same(flat[30 * r :][:30], own(r), "all_gather_into_tensor")
    mine = torch.arange(size * (size + 1) // 2, dtype=torch.int64) + 100 * rank  # r + 1 values for rank r
    got = torch.empty(size * (rank + 1), dtype=torch.int64)
    dist.all_to_all_single(got, mine, [rank + 1] * size, [r + 1 for r in range(size)])
    begin = rank * (rank + 1) // 2
    assert got.tolist() == [100 * r + begin + i for r in range(size) for i in range(rank + 1)]
    if size > 1:
        right, left = (rank + 1) % size, (rank - 1) % size
        x, y = own(left), own(left)
        works = [dist.isend(own(rank), right, tag=3), dist.isend(own(rank, 7), right, tag=5)]
        z = own(left, 7).zero_()
        dist.recv(z, left, tag=5)  # the later tag first
        dist.recv(x.zero_(), left, tag=3)
        for one in works:
            assert one is not None
            one.wait()
        same(x, y, "recv")
        same(z, own(left, 7), "recv")
        if rank == 0:
            sources = {dist.recv(torch.empty(2)) for _ in range(size - 1)}
            assert sources == set(range(1, size))
        else:
            dist.send(torch.ones(2), 0)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    dist.barrier()
    backend.monitored_barrier()


def missing(rank: int, size: int) -> None:
    """A rank that does not come: the others' errors name it, within the limit and a second."""
    last = size - 1
    dist.barrier()
    for reduces in (True, False):
        part = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
        start = time.monotonic()
        if rank != last:
            with pytest.raises(dist.DistBackendError, match=rf"waited .* for rank.*{last}"):
                if reduces:
                    dist.all_reduce(torch.ones(5), group=part)
                else:
                    dist.all_gather([torch.empty(5) for _ in range(size)], torch.ones(5), group=part)
            assert time.monotonic() - start < LIMIT_S + GRACE_S
        time.sleep(max(0.0, LIMIT_S + GRACE_S - (time.monotonic() - start)))
    dist.barrier()


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

    programs: dict[str, Callable[[Any], None]] = {
        "bits": bits,
        "refusals": refusals,
        "refusals_mpi": refusals_mpi,
        "deadline": deadline,
        "movement": movement,
        "killed": killed,
        "killed_mpi": lambda comm: killed(comm, "mpi"),
        "world": world,
    }
    for name in sys.argv[1:]:
        programs[name](MPI.COMM_WORLD)
        MPI.COMM_WORLD.Barrier()
        if MPI.COMM_WORLD.rank == 0:
            print("passed", name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
