"""CUDA tensors of the "tbik" backend, with the CPU's in their place: C++ backend, agreement, both ways, streams aside.

device_reductions.DEVICES says which tensors are a device's and what moves them; here it is the CPU's and a gloo group
of its own, and the memory of peers is the host's (tests/test_peer_memory.py). So every step but the device itself is
the one of CUDA tensors. What only a GPU can show (streams, events, NCCL) test_verify_on_cuda_devices does where there
is one; it has not been run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import test_backend
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from long_cases import long_cases
from spawn import Pool
from test_backend import FLOATS, INTEGERS, _reduce_options, values_of
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from tbik import PlanError, TransportError, device_reductions, peer_library, peer_reductions, reference
from tbik.backend import group_info

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
]

WAYS = {"moved": "off", "peer memory": "auto"}
LIMIT = timedelta(seconds=30)

_groups: dict[tuple[int, str], dist.ProcessGroup] = {}


def gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """In the place of NCCL."""
    return dist.ProcessGroupGloo(PrefixStore("cuda/", store), rank, size, timeout)


def use_the_cpu_as_device(way: str) -> None:
    os.environ["TBIK_PEER_MEMORY"] = WAYS[way]
    device_reductions.DEVICES.clear()
    device_reductions.DEVICES["cpu"] = gloo
    peer_reductions.LIBRARIES.clear()
    peer_reductions.LIBRARIES["cpu"] = peer_library.host


def device_group(group: dist.ProcessGroup, way: str) -> dist.ProcessGroup:
    """A group of the tbik backend whose device is the CPU, of the same ranks; one for all jobs."""
    key = (group.size(), way)
    if key not in _groups:
        use_the_cpu_as_device(way)
        from tbik.backend import make

        store = PrefixStore(f"device {way}/", group.get_group_store())
        _groups[key] = group_of(make(store, group.rank(), group.size(), LIMIT), store)
    return _groups[key]


def group_of(backend: Any, store: Any) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, backend.rank(), backend.size())
    custom = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    group._register_backend(torch.device("cpu"), custom, backend)
    return group


def new_group(way: str) -> dist.ProcessGroup:
    """The same of all ranks of the pool, known to torch, whose errors look it up."""
    use_the_cpu_as_device(way)
    import tbik.backend  # noqa: F401

    return dist.new_group(backend="tbik", timeout=LIMIT)


def on_device(group: dist.ProcessGroup, way: str, check: Callable[..., None], *args: Any) -> dict[str, str]:
    own = device_group(group, way)
    check(own, *args)
    return dict(group_info(own)["devices"])


def as_default(group: dist.ProcessGroup, way: str, check: Callable[..., None], *args: Any) -> None:
    """The same with a default group, for what takes no other."""
    rank, world, store = group.rank(), group.size(), group.get_group_store()
    use_the_cpu_as_device(way)
    import tbik.backend  # noqa: F401

    dist.destroy_process_group()
    dist.init_process_group("tbik", store=PrefixStore("default/", store), rank=rank, world_size=world, timeout=LIMIT)
    assert dist.group.WORLD is not None
    check(dist.group.WORLD, *args)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def five() -> Iterator[Pool]:
    with Pool(5) as pool:
        yield pool


# --- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 3, 5, *long_cases([2, 4])])
def test_verify_all_reduce_equals_reference(five: Pool, way: str, world: int) -> None:
    sizes = (0, 1, 5, 4097, 70_001)
    (devices,) = {str(d) for d in five.run(on_device, world, way, test_backend.check_sums, sizes, FLOATS + INTEGERS)}
    assert way in devices


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 3, *long_cases([5])])
def test_verify_operators_equal_their_definition(five: Pool, way: str, world: int) -> None:
    """Where peer memory lacks the dtype or the operator, the group moves the call."""
    five.run(on_device, world, way, test_backend.check_operators)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [5, *long_cases([1, 2, 3, 4])])
def test_verify_every_form_equals_reference(five: Pool, way: str, world: int) -> None:
    five.run(on_device, world, way, test_backend.check_forms)


@pytest.mark.parametrize("way", WAYS)
def test_verify_large_forms_equal_reference(five: Pool, way: str) -> None:
    five.run(on_device, 4, way, test_backend.check_large_forms, deadline=120)


@pytest.mark.parametrize("way", WAYS)
def test_verify_bits_do_not_depend_on_size_or_history(five: Pool, way: str) -> None:
    five.run(on_device, 5, way, test_backend.check_prefix)


def coalesced(group: dist.ProcessGroup) -> None:
    """reduce_scatter of several tensors; one result lies in another's input."""
    rank, world = group.rank(), group.size()
    options = dist.ReduceScatterOptions()
    first, second = (values_of(world, 700 * world, torch.float32, seed) for seed in (1, 2))
    xs = [first[rank].clone(), second[rank].clone()]
    out = torch.empty(700)
    group.reduce_scatter_tensor_coalesced([xs[1][3:703], out], xs, options).wait()
    mine = slice(rank * 700, (rank + 1) * 700)
    assert_bitwise_equal(xs[1][3:703], reference.all_reduce(first)[mine], "a result in another's input")
    assert_bitwise_equal(out, reference.all_reduce(second)[mine], "the other result")


@pytest.mark.parametrize("way", WAYS)
def test_verify_coalesced_reduce_scatter(five: Pool, way: str) -> None:
    five.run(on_device, 3, way, coalesced)


def flat_and_ways(group: dist.ProcessGroup) -> list[Tensor]:
    values = values_of(group.size(), 20_011, torch.bfloat16)
    results = []
    for way in WAYS:
        x = values[group.rank()].clone()
        dist.all_reduce(x, group=device_group(group, way))
        results.append(x)
    flat = values[0].float()
    for value in values[1:]:
        flat += value.float()
    return [*results, flat.bfloat16()]


def test_verify_both_ways_agree_and_the_order_shows(five: Pool) -> None:
    moved, peers, flat = five.run(flat_and_ways, 5)[0]
    assert_bitwise_equal(moved, peers)
    assert_bits_differ(moved, flat, "a flat sum")


def on_cuda(group: dist.ProcessGroup, way: str) -> dict[str, str]:
    """The same on real devices: streams, events and NCCL, which nothing else here reaches."""
    rank, world = group.rank(), group.size()
    os.environ["TBIK_PEER_MEMORY"] = WAYS[way]
    import tbik.backend  # noqa: F401

    own = dist.new_group(backend="tbik", timeout=LIMIT)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    for dtype in (*FLOATS, *INTEGERS):
        for size in (0, 1, 5, 4097, 1_000_003):
            values = values_of(world, size, dtype, seed=size)
            expected = reference.all_reduce(values)
            for is_async in (False, True):
                x = values[rank].to(device)
                work = dist.all_reduce(x, group=own, async_op=is_async)
                if work is not None:
                    other = torch.cuda.Stream(device)  # the stream that waits is the one that sees the result
                    with torch.cuda.stream(other):
                        work.wait()
                        copy = x.clone()
                    other.synchronize()
                    assert_bitwise_equal(copy, expected, f"behind the wait, {dtype} {size}")
                    assert work.is_completed() and work.get_future().value()[0].data_ptr() == x.data_ptr()
                assert_bitwise_equal(x, expected, f"all_reduce {dtype} {size}, rank {rank} of {world}, {is_async}")
            out = torch.empty(size, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(out, values[rank].to(device).repeat(world), group=own)
            assert_bitwise_equal(out, expected, f"reduce_scatter_tensor {dtype} {size}")
    return dict(group_info(own)["devices"])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", WAYS)
def test_verify_on_cuda_devices(way: str) -> None:
    """Ranks may share a GPU over peer memory; NCCL wants one for each."""
    if torch.cuda.device_count() < 3:
        if way == "moved":
            pytest.skip("NCCL wants a device for each of three ranks")
        try:
            peer_library.cuda()
        except PlanError as error:
            pytest.skip(str(error))
    with Pool(3) as pool:
        pool.run(on_cuda, 3, way, deadline=200)


# --- what users of torch.distributed call ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_asynchronous_work_and_futures(five: Pool, way: str) -> None:
    five.run(on_device, 4, way, test_backend.check_work)


def check_users(group: dist.ProcessGroup) -> None:
    test_backend.check_groups(group)
    test_backend.check_refusals(group)
    test_backend.check_ddp(group)
    test_backend.check_fsdp2(group)
    check_coalescing(group)


def check_coalescing(group: dist.ProcessGroup) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    world = group.size()
    tensors = [torch.ones(3), torch.ones(4)]
    device = torch.device("cpu")
    for options in ({}, {"device": device}):
        with _coalescing_manager(async_ops=True, **options) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        manager.wait()
    assert tensors[0][0] == world**2 == tensors[1][0]
    # in a block of the group's own, reductions wait for its end, beside what is moved
    group._start_coalescing(device)
    work = group.allreduce([tensors[0]])
    if group.rank() == 0:
        with pytest.raises(dist.DistBackendError, match="its coalescing block has not ended"):
            work.wait()
    end = group._end_coalescing(device)
    end.wait()
    assert end.is_completed() and work.is_completed() and tensors[0][0] == world**3


@pytest.mark.parametrize("way", ["moved", *long_cases(["peer memory"])])
def test_groups_splits_refusals_and_training(way: str) -> None:
    with Pool(4, environment={"TBIK_TRANSPORT": "shm"}) as pool:
        pool.run(as_default, 4, way, check_users, deadline=120)


class FakeStream:
    """What a stream was told, in the list of all of them."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def wait_stream(self, other: FakeStream) -> None:
        self.told.append(f"{self.name} waits for {other.name}")


class FakeTensor:
    def __init__(self, told: list[str]) -> None:
        self.told = told

    def record_stream(self, stream: FakeStream) -> None:
        self.told.append(f"kept for {stream.name}")


def test_the_order_of_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous calls on the group's stream behind the caller's; others on the caller's, behind the group's."""
    told: list[str] = []
    capturing = [False]

    @contextlib.contextmanager
    def inside(what: str) -> Iterator[None]:
        told.append(f"in {what}")
        yield
        told.append(f"out of {what}")

    current = FakeStream("current", told)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("own", told))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: inside(stream.name))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    reductions = device_reductions.DeviceReductions(0, 1, lambda: None, None, ["host"], None, LIMIT)  # type: ignore[arg-type]
    device, tensors = torch.device("cuda", 0), [FakeTensor(told), FakeTensor(told)]

    def events(is_async: bool) -> list[str]:
        told.clear()
        with reductions._stream(device, is_async, tensors):  # type: ignore[arg-type]
            told.append("work")
        return list(told)

    assert events(False) == ["work"]
    asynchronous = ["own waits for current", "kept for own", "kept for own", "in own", "work", "out of own"]
    assert events(True) == asynchronous
    assert events(False) == ["current waits for own", "work"]
    capturing[0] = True
    assert events(False) == ["work"] and events(True) == asynchronous


def test_an_unknown_setting_is_refused_when_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbik.backend import make

    monkeypatch.setenv("TBIK_PEER_MEMORY", "nvlink")
    with pytest.raises(PlanError, match=r"TBIK_PEER_MEMORY: expected one of \('auto', .*got 'nvlink'"):
        make(HashStore(), 0, 1, LIMIT)


# --- disagreement and failure ---------------------------------------------------------------------------------------


def differ(group: dist.ProcessGroup, way: str) -> None:
    """Rank 2 makes another call first; then the group is as new. Later calls are compared with TBIK_CHECK=1."""
    rank, world = group.rank(), group.size()
    os.environ["TBIK_CHECK"] = "1"
    own = new_group(way)
    values = values_of(world, 400, torch.float32, seed=11)
    for _ in range(2):  # in the first call, then in a later one
        for name, call in test_backend.DIFFERENT.items():
            if name == "barrier":  # no call of the device
                continue
            x = values[rank].clone()
            error = ValueError if rank == 2 and name.startswith("refused") else dist.DistBackendError
            match = "rank 2: refused there" if name.startswith("refused") else "do not make the same call.*rank.*2"
            shown = match if error is dist.DistBackendError else None
            with pytest.raises(error, match=shown) as caught, default_group(own):
                call(x) if rank == 2 else dist.all_reduce(x)
            assert "undefined" not in str(caught.value), name
            assert_bitwise_equal(x, values[rank], f"input after '{name}'")
        x = values[rank].clone()
        dist.all_reduce(x, group=own)
        assert_bitwise_equal(x, reference.all_reduce(values), "the call after all of them")


class default_group:
    """`dist.all_reduce(x)` means this group inside."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __enter__(self) -> None:
        self.before = dist.GroupMember.WORLD
        dist.GroupMember.WORLD = self.group

    def __exit__(self, *exception: object) -> None:
        dist.GroupMember.WORLD = self.before


@pytest.mark.parametrize("way", WAYS)
def test_verify_ranks_that_differ_raise_before_anything_moves(way: str) -> None:
    with Pool(4) as pool:
        pool.run(differ, 4, way)


def lose_a_rank(group: dist.ProcessGroup, way: str) -> list[str]:
    own = new_group(way)
    x = torch.ones(50_000)
    dist.all_reduce(x, group=own)
    if group.rank() == 2:
        os._exit(1)
    texts = []
    for _ in range(2):
        try:
            dist.all_reduce(x, group=own)
            texts.append("no error")
        except dist.DistBackendError as error:
            texts.append(str(error))
    return texts


def test_a_lost_rank_leaves_the_output_undefined_and_the_group_unusable() -> None:
    with Pool(3) as pool:
        outcomes = pool.outcomes(lose_a_rank, 3, "moved", grace=30)
    for outcome in outcomes[:2]:
        first, second = outcome.value
        assert "The output of this call is undefined" in first and "all_reduce of cpu tensors" in first
        assert "an earlier call failed" in second and "Destroy the group" in second


def end_the_group(group: dist.ProcessGroup, way: str) -> list[str]:
    own = new_group(way)
    backend = own._get_backend(torch.device("cpu"))
    dist.all_reduce(torch.ones(5), group=own)
    held = backend.device_reductions
    backend.shutdown()
    assert all(peers.peers.is_closed for peers in held._peers.values() if peers is not None)
    aborted = new_group(way)
    dist.all_reduce(torch.ones(5), group=aborted)
    dist.barrier(group)
    aborted._get_backend(torch.device("cpu")).abort()
    texts = []
    for ended in (own, aborted):
        with pytest.raises(dist.DistBackendError, match="shut down or aborted") as caught:
            dist.all_reduce(torch.ones(5), group=ended)
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("way", WAYS)
def test_a_group_that_ends_gives_its_memory_back(five: Pool, way: str) -> None:
    five.run(end_the_group, 5, way)


def without_movement(group: dist.ProcessGroup) -> None:
    """As on a torch without NCCL, where no peer memory helps."""
    use_the_cpu_as_device("moved")
    device_reductions.DEVICES["cpu"] = lambda *arguments: None
    from tbik.backend import make

    backend = make(PrefixStore("nothing/", group.get_group_store()), group.rank(), group.size(), LIMIT)
    x = torch.ones(3)
    with pytest.raises(ValueError, match=r"tbik: broadcast: cpu tensors are moved by NCCL, which this torch does not"):
        backend.broadcast([x])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"moved by NCCL, which this torch .* does not have.*TBIK_PEER_MEMORY=off"):
            backend.allreduce([x])
    assert x.tolist() == [1, 1, 1]


def test_without_nccl_the_text_says_what_would_work() -> None:
    with Pool(2) as pool:
        pool.run(without_movement, 2)


# --- the hook of the C++ backend --------------------------------------------------------------------------------------


class Recorder:
    """In the place of DeviceReductions."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refused: list[tuple[Any, ...]] = []
        self.ended: list[str] = []
        self.error: Exception | None = None
        self.check: Callable[[], None] | None = None
        self.completes = True

    def run(self, *arguments: Any) -> Callable[[], None] | None:
        if self.error is not None:
            raise self.error
        self.calls.append(arguments[:-1])
        if self.completes:
            arguments[-1]()
        return self.check

    def refuse(self, *arguments: Any) -> None:
        self.refused.append(arguments)

    def abort(self, reason: str) -> None:
        self.ended.append(reason)

    def close(self) -> None:
        self.ended.append("closed")

    def info(self) -> dict[str, str]:
        return {"cpu": "recorded"}


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Recorder]:
    """A backend of one rank whose device is the CPU, and what it hands its reductions to."""
    from tbik.backend import make

    recorder = Recorder()
    monkeypatch.setattr(device_reductions, "DEVICES", {"cpu": gloo})
    monkeypatch.setattr(device_reductions, "DeviceReductions", lambda *arguments: recorder)
    return make(HashStore(), 0, 1, LIMIT), recorder


def test_the_backend_hands_every_reduction_to_the_hook(hooked: tuple[Any, Recorder]) -> None:
    backend, recorder = hooked
    x, y = torch.ones(4), torch.zeros(4)
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(0.25)
    options.asyncOp = False
    options.timeout = timedelta(seconds=7)
    work = backend.allreduce([x], options)
    assert work.wait() and work.is_completed() and work.is_success() and work.result()[0].data_ptr() == x.data_ptr()
    assert work.get_future().value()[0].data_ptr() == x.data_ptr()
    backend.allreduce_coalesced([x, y])
    backend.reduce([torch.ones(2, dtype=torch.complex64)], _reduce_options(0))
    backend.reduce_scatter([y], [[x]])
    backend._reduce_scatter_base(y, x)
    group_of(backend, HashStore()).reduce_scatter_tensor_coalesced([y, y], [x, x])
    shown = [
        (*call[:4], [list(out.shape) for out in call[4]], [[list(t.shape) for t in row] for row in call[5]], *call[6:])
        for call in recorder.calls
    ]
    assert shown == [
        ("all_reduce", "premul_sum", 0.25, 0, [[4]], [], False, timedelta(seconds=7)),
        ("all_reduce_coalesced", "sum", 1.0, 0, [[4], [4]], [], True, LIMIT),
        ("reduce", "sum", 1.0, 0, [[2, 2]], [], True, LIMIT),
        ("reduce_scatter", "sum", 1.0, 0, [[4]], [[[4]]], True, LIMIT),
        ("reduce_scatter_tensor", "sum", 1.0, 0, [[4]], [[[4]]], True, LIMIT),
        ("reduce_scatter_tensor_coalesced", "sum", 1.0, 0, [[4], [4]], [[[4], [4]]], True, LIMIT),
    ]
    assert recorder.calls[0][4][0].data_ptr() == x.data_ptr()  # the caller's tensor, no copy
    assert backend.device_reductions is recorder and backend.calls == 6
    backend.shutdown()
    assert recorder.ended == ["closed"]


def test_what_the_hook_raises_and_what_it_never_sees(hooked: tuple[Any, Recorder]) -> None:
    backend, recorder = hooked
    x = torch.ones(4)
    for call, match in (
        (lambda: backend.allreduce([x], _band()), "band of float32 is not defined"),
        (lambda: backend.allreduce([x.to(torch.uint16)]), "no reduction here"),
        (lambda: backend._reduce_scatter_base(x, torch.ones(5)), "expected an input of 4 elements"),
        (lambda: backend.reduce_scatter([x], [[torch.ones(4, device="meta")]]), "expected a tensor on cpu.*got .*meta"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    assert recorder.calls == []
    assert [(name, str(device)) for name, _, device in recorder.refused] == [
        ("all_reduce", "cpu"),
        ("all_reduce", "cpu"),
        ("reduce_scatter_tensor", "cpu"),
        ("reduce_scatter", "cpu"),
    ]
    assert "band of float32 is not defined" in recorder.refused[0][1]
    for error, expected in (
        (PlanError("no way"), ValueError),
        (TransportError("the output is undefined"), dist.DistBackendError),
        (RuntimeError("CUDA error"), dist.DistBackendError),
    ):
        recorder.error = error
        with pytest.raises(expected, match=f"tbik: {error}"):
            backend.allreduce([x])
    recorder.error = None
    recorder.check = lambda: raise_(TransportError("a kernel has failed"))
    work = backend.allreduce([x])
    with pytest.raises(dist.DistBackendError, match="tbik: a kernel has failed"):
        work.wait()
    recorder.check, recorder.completes = None, False
    with pytest.raises(dist.DistBackendError, match="the call was not made"):
        backend.allreduce([x]).wait()
    backend.abort()
    assert len(recorder.ended) == 1 and "abort() was called" in recorder.ended[0]


def raise_(error: Exception) -> None:
    raise error


def _band() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.BAND
    return options


def test_a_group_without_device_reductions_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    from tbik.backend import make

    monkeypatch.setattr(device_reductions, "DEVICES", {"cpu": gloo})
    monkeypatch.setattr(device_reductions, "DeviceReductions", lambda *arguments: None)
    backend = make(HashStore(), 0, 1, LIMIT)
    with pytest.raises(ValueError, match="nothing that reduces cpu tensors"):
        backend.allreduce([torch.ones(2)])


def test_the_device_is_cuda_unless_a_test_says_otherwise() -> None:
    """Nothing of the environment reaches it, and a CPU tensor never comes to the hook."""
    from tbik.backend import make

    assert list(device_reductions.DEVICES) == ["cuda"] and list(peer_reductions.LIBRARIES) == ["cuda"]
    backend = make(HashStore(), 0, 1, LIMIT)
    x = torch.ones(3)
    backend.allreduce([x]).wait()
    assert backend.device_reductions is None and x.tolist() == [1, 1, 1]
    if not torch.cuda.is_available():
        assert device_reductions.nccl(HashStore(), 0, 1, LIMIT) is None
