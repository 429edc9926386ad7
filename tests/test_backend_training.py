"""What trains, shards, pipelines and checkpoints under "tbik": bits against the oracle, gloo's numbers to rounding.

The ranks' gradients spread over many binary orders, so that another order of addition shows; divisors are powers of
two, so that a division before the sum and one after it round alike.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from spawn import Pool
from torch import Tensor, nn

from tbik import reference

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.skipif(sys.platform != "linux", reason="the backend's shared memory is for Linux"),
]

ROOT = Path(__file__).parent.parent
WORLD = 4
Results = dict[str, Tensor]


@pytest.fixture(scope="module")
def tbik() -> Iterator[Pool]:
    with Pool(WORLD, backend="tbik", timeout=60, environment={"TBIK_TRANSPORT": "shm"}) as pool:
        yield pool


@pytest.fixture(scope="module")
def gloo() -> Iterator[Pool]:
    with Pool(WORLD, timeout=60) as pool:
        yield pool


def is_tbik() -> bool:
    return str(dist.get_backend()) == "tbik"


def require_reference(got: Tensor, leaves: list[Tensor], what: str, op: str = "sum") -> None:
    """Under tbik the sum of the leaves has the oracle's bits."""
    if is_tbik():
        assert_bitwise_equal(got, reference.all_reduce(leaves, op), what)  # type: ignore[arg-type]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def batch(rank: int, step: int = 0) -> Tensor:
    """Each rank's own, of its own magnitude."""
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    return x * 10.0 ** (rank - 1)


def loss_of(y: Tensor) -> Tensor:
    return y.pow(2).sum()


def gradients(rank: int, steps: int = 1, build: Callable[[], nn.Module] = model) -> list[Tensor]:
    """Gradients of one rank's batches on the plain model, accumulated over `steps`; zeros where there is none."""
    m = build()
    for step in range(steps):
        loss_of(m(batch(rank, step))).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in m.parameters()]


def leaves_of(steps: int = 1) -> list[list[Tensor]]:
    """[parameter][rank]"""
    return [list(leaf) for leaf in zip(*(gradients(rank, steps) for rank in range(WORLD)), strict=True)]


# --- data parallel ----------------------------------------------------------------


def named(tensors: list[Tensor]) -> Results:
    return {f"gradient {i}": t.detach().clone() for i, t in enumerate(tensors)}


def require_gradients(m: nn.Module, leaves: list[list[Tensor]], what: str) -> list[Tensor]:
    found = []
    for parameter, leaf in zip(m.parameters(), leaves, strict=True):
        assert parameter.grad is not None
        require_reference(parameter.grad, [x / WORLD for x in leaf], what)
        found.append(parameter.grad)
    return found


def ddp_buckets(group: dist.ProcessGroup) -> Results:
    m = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.0005)
    loss_of(m(batch(group.rank()))).backward()
    first = require_gradients(m, leaves_of(), "DDP, many buckets")
    m.zero_grad()
    loss_of(m(batch(group.rank()))).backward()  # buckets in their final order
    require_gradients(m, leaves_of(), "DDP, rebuilt buckets")
    return named(first)


def ddp_no_sync(group: dist.ProcessGroup) -> Results:
    m = nn.parallel.DistributedDataParallel(model(), gradient_as_bucket_view=True)
    with m.no_sync():
        loss_of(m(batch(group.rank(), 0))).backward()
    loss_of(m(batch(group.rank(), 1))).backward()
    return named(require_gradients(m, leaves_of(steps=2), "DDP, no_sync"))


def ddp_static_graph(group: dist.ProcessGroup) -> Results:
    m = nn.parallel.DistributedDataParallel(model(), static_graph=True)
    for _ in range(3):
        m.zero_grad()
        loss_of(m(batch(group.rank()))).backward()
    return named(require_gradients(m, leaves_of(), "DDP, static graph"))


class Branches(nn.Module):
    """Uses one of two layers; a third one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.even, self.odd, self.never = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        y: Tensor = self.odd(x) if odd else self.even(x)
        return y


def ddp_find_unused(group: dist.ProcessGroup) -> Results:
    m = nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
    loss_of(m(batch(group.rank()), group.rank() % 2 == 1)).backward()
    expected: list[list[Tensor]] = []
    for rank in range(WORLD):
        plain = Branches()
        loss_of(plain(batch(rank), rank % 2 == 1)).backward()
        expected.append([torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()])
    found = []
    for (name, parameter), leaf in zip(m.module.named_parameters(), zip(*expected, strict=True), strict=True):
        if name.startswith("never"):
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        require_reference(parameter.grad, [x / WORLD for x in leaf], f"DDP, unused parameters: {name}")
        found.append(parameter.grad)
    return named(found)


def ddp_hooks(group: dist.ProcessGroup) -> Results:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    found = []
    for name in ("allreduce_hook", "fp16_compress_hook"):
        m = nn.parallel.DistributedDataParallel(model())
        m.register_comm_hook(None, getattr(default_hooks, name))
        loss_of(m(0.01 * batch(group.rank()))).backward()
        expected = []
        for rank in range(WORLD):
            plain = model()
            loss_of(plain(0.01 * batch(rank))).backward()
            expected.append([p.grad for p in plain.parameters() if p.grad is not None])
        for parameter, leaf in zip(m.parameters(), zip(*expected, strict=True), strict=True):
            assert parameter.grad is not None
            if is_tbik():
                half = name == "fp16_compress_hook"
                parts = [(x.half() if half else x) / WORLD for x in leaf]
                assert_bitwise_equal(parameter.grad, reference.all_reduce(parts).float(), f"DDP, {name}")
            found.append(parameter.grad)
    return named(found)


# --- sharded ----------------------------------------------------------------


def fsdp1(group: dist.ProcessGroup) -> Results:
    from torch.distributed.fsdp import FullyShardedDataParallel

    m = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    loss_of(m(batch(group.rank()))).backward()
    found = []
    with FullyShardedDataParallel.summon_full_params(m, with_grads=True):
        for parameter, leaf in zip(m.parameters(), leaves_of(), strict=True):
            assert parameter.grad is not None
            require_reference(parameter.grad, leaf, "FSDP1", "avg")
            found.append(parameter.grad.clone())
    m.clip_grad_norm_(1.0)
    torch.optim.SGD(m.parameters(), 0.1).step()
    with FullyShardedDataParallel.summon_full_params(m):
        stepped = {f"parameter {i}": p.detach().clone() for i, p in enumerate(m.parameters())}
    return named(found) | stepped


def fsdp2_on(mesh: Any, rank: int, what: str) -> Results:
    from torch.distributed.fsdp import fully_shard

    m = model()
    for layer in (m[0], m[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh)
    fully_shard(m, mesh=mesh)
    loss_of(m(batch(rank))).backward()
    found = []
    for parameter, leaf in zip(m.parameters(), leaves_of(), strict=True):
        full = parameter.grad.full_tensor()  # type: ignore[union-attr]
        require_reference(full, leaf, what, "avg")
        found.append(full)
    nn.utils.clip_grad_norm_(m.parameters(), 1.0)
    torch.optim.AdamW(m.parameters(), 0.1).step()
    stepped = {f"parameter {i}": p.full_tensor().detach() for i, p in enumerate(m.parameters())}  # type: ignore[attr-defined]
    return named(found) | stepped


def fsdp2(group: dist.ProcessGroup) -> Results:
    return fsdp2_on(dist.device_mesh.init_device_mesh("cpu", (WORLD,)), group.rank(), "FSDP2")


def hsdp(group: dist.ProcessGroup) -> Results:
    """Shards are pairs (0, 1), (2, 3), so the two stages are the two levels of the tree of four leaves."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fsdp2_on(mesh, group.rank(), "HSDP")


# --- tensor parallel, pipeline ----------------------------------------------------------------


def tensor_parallel(group: dist.ProcessGroup) -> Results:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank = group.rank()
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(24, 64, bias=False), nn.Tanh(), nn.Linear(64, 24, bias=False))
    x = wide_exponents((6, 24), torch.float32, 5).clamp(-100, 100)
    first, second = (plain[i].weight.detach() for i in (0, 2))  # type: ignore[union-attr]
    partials = []
    for w1, w2 in zip(first.chunk(WORLD, 0), second.chunk(WORLD, 1), strict=True):
        own = x.clone().requires_grad_(True)
        y = nn.functional.linear(nn.functional.linear(own, w1.clone()).tanh(), w2.clone())
        y.backward(torch.ones_like(y))
        assert own.grad is not None
        partials.append((y.detach(), own.grad))
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    m = parallelize_module(plain, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    own = x.clone().requires_grad_(True)
    y = m(own)
    y.backward(torch.ones_like(y))
    assert own.grad is not None
    require_reference(y.detach(), [p[0] for p in partials], f"row-parallel output, rank {rank}")
    require_reference(own.grad, [p[1] for p in partials], f"column-parallel input gradient, rank {rank}")
    return {"output": y.detach(), "input gradient": own.grad}


def pipeline(group: dist.ProcessGroup) -> Results:
    """Two stages, each on two data-parallel ranks, whose gradients are then summed."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, index = mesh["dp"].get_local_rank(), mesh["pp"].get_local_rank()
    pp, dp = mesh["pp"].get_group(), mesh["dp"].get_group()

    def stages() -> list[nn.Module]:
        torch.manual_seed(3)
        return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 16)]

    x, target = batch(replica), torch.ones(8, 16)
    module = stages()[index]
    stage = PipelineStage(module, index, 2, torch.device("cpu"), group=pp)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda a, b: loss_of(a - b), scale_grads=False)
    losses: list[Tensor] = []
    if index == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=losses)
    expected = []
    for r in range(2):
        plain = stages()
        for micro, wanted in zip(batch(r).chunk(4), target.chunk(4), strict=True):
            loss_of(plain[1](plain[0](micro)) - wanted).backward()
        expected.append([p.grad for p in plain[index].parameters() if p.grad is not None])
    found = []
    for parameter, leaf in zip(module.parameters(), zip(*expected, strict=True), strict=True):
        assert parameter.grad is not None
        assert_bitwise_equal(parameter.grad, leaf[replica], f"pipeline, stage {index}: the same micro-batches")
        dist.all_reduce(parameter.grad, group=dp)
        require_reference(parameter.grad, list(leaf), f"pipeline, stage {index}")
        found.append(parameter.grad)
    return named(found)


SCENARIOS: list[Callable[[dist.ProcessGroup], Results]] = [
    ddp_buckets,
    ddp_no_sync,
    ddp_static_graph,
    ddp_find_unused,
    ddp_hooks,
    fsdp1,
    fsdp2,
    hsdp,
    tensor_parallel,
    pipeline,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_verify_training_on_the_backend(tbik: Pool, gloo: Pool, scenario: Callable[..., Results]) -> None:
    """Sums: the oracle's bits (asserted on every rank). Everything: gloo's numbers to rounding."""
    ours = tbik.run(scenario, WORLD, deadline=200)
    theirs = gloo.run(scenario, WORLD, deadline=200)
    for rank, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert got.keys() == expected.keys() and got
        for name, value in got.items():
            scale = float(expected[name].abs().max())
            bound = 2e-3 if scenario is ddp_hooks else 1e-5
            assert float((value - expected[name]).abs().max()) <= bound * scale, f"{name}, rank {rank}"


def gloo_gradients(group: dist.ProcessGroup) -> tuple[list[Tensor], list[Tensor]]:
    m = nn.parallel.DistributedDataParallel(model())
    loss_of(m(batch(group.rank()))).backward()
    expected = [reference.all_reduce([x / WORLD for x in leaf]) for leaf in leaves_of()]
    return [p.grad for p in m.parameters() if p.grad is not None], expected


def test_verify_negative_control_gloo_trains_in_another_order(gloo: Pool) -> None:
    got, expected = gloo.run(gloo_gradients, WORLD, deadline=100)[0]
    flat = [torch.cat([t.flatten() for t in tensors]) for tensors in (got, expected)]
    assert_bits_differ(flat[0], flat[1], "DDP over gloo")


# --- checkpoints ----------------------------------------------------------------


def sharded(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    m = model()
    fully_shard(m)
    optimizer = torch.optim.AdamW(m.parameters(), 0.1)
    for s in range(step):
        loss_of(m(0.01 * batch(0, s))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return m, optimizer


def full_state(m: nn.Module, optimizer: torch.optim.Optimizer) -> Results:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, moments = get_state_dict(m, optimizer, options=StateDictOptions(full_state_dict=True))
    flat = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    for name, state in moments.get("state", {}).items():
        flat |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return flat


def save(group: dist.ProcessGroup, folder: str) -> Results:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict

    m, optimizer = sharded(step=2)
    weights, moments = get_state_dict(m, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/now")
    pending = checkpoint.async_save({"model": weights, "optimizer": moments}, checkpoint_id=f"{folder}/later")
    pending.result()  # type: ignore[union-attr]
    return full_state(m, optimizer)


def load(group: dist.ProcessGroup, folder: str) -> Results:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    m, optimizer = sharded(step=1)
    weights, moments = get_state_dict(m, optimizer)
    state = {"model": weights, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(m, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return full_state(m, optimizer)


def test_verify_checkpoint_saved_on_two_ranks_loads_on_four_and_one(tbik: Pool, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as checkpoint

    with Pool(2, backend="tbik", timeout=60) as two:
        saved = two.run(save, 2, str(tmp_path), deadline=150)[0]
    assert saved
    for kind in ("now", "later"):
        loaded = tbik.run(load, WORLD, str(tmp_path / kind), deadline=150)[0]
        assert loaded.keys() == saved.keys()
        for name, value in loaded.items():
            assert_bitwise_equal(value, saved[name], f"{kind}: {name}")
    plain = {"model": {name: torch.zeros_like(p) for name, p in model().state_dict().items()}}
    checkpoint.load(plain, checkpoint_id=str(tmp_path / "now"), no_dist=True)
    for name, value in plain["model"].items():
        assert_bitwise_equal(value, saved[name], f"one process: {name}")


# --- functional collectives, compiled ----------------------------------------------------------------


def compiled_collectives(group: dist.ProcessGroup, backend: str) -> None:
    import torch.distributed._functional_collectives as functional

    rank = group.rank()
    values = [wide_exponents((WORLD * 6, 5), torch.float32, r) for r in range(WORLD)]
    halves = [v.to(torch.bfloat16) for v in values]

    def program(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        total = functional.all_reduce(x * 2, "sum", group)
        mean = functional.all_reduce(h, "avg", group)
        shard = functional.reduce_scatter_tensor(x, "sum", 0, group)
        again = functional.all_gather_tensor(shard, 0, group)
        both = functional.all_reduce_coalesced([x, x * 0.5], "sum", group)
        return total * 0.5, mean, shard, again, both[1] * 2

    eager = [t + 0 for t in program(values[rank], halves[rank])]
    compiled = [t + 0 for t in torch.compile(program, backend=backend, fullgraph=True)(values[rank], halves[rank])]
    whole = reference.all_reduce(values)
    expected = [whole, reference.all_reduce(halves, "avg"), whole.chunk(WORLD)[rank], whole, whole]
    for i, (a, b, c) in enumerate(zip(eager, compiled, expected, strict=True)):
        assert_bitwise_equal(a, c, f"eager result {i}")
        assert_bitwise_equal(b, c, f"{backend}, result {i}")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_verify_compiled_functional_collectives(tbik: Pool, backend: str, tmp_path: Path) -> None:
    tbik.run(compiled_collectives, WORLD, backend, deadline=280)


# --- groups, objects, ends ----------------------------------------------------------------


def objects(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    gathered: list[Any] | None = [None] * WORLD if rank == 1 else None
    dist.gather_object({"rank": rank}, gathered, dst=1)
    assert gathered is None or [o["rank"] for o in gathered] == list(range(WORLD))
    received: list[Any] = [None]
    dist.scatter_object_list(received, [("to", r) for r in range(WORLD)] if rank == 2 else None, src=2)
    assert received == [("to", rank)]
    if rank == 0:
        dist.send_object_list(["x", {"y": 1}], dst=3)
    elif rank == 3:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, src=0)
        assert got == ["x", {"y": 1}]
    parts = [torch.full((3,), float(r)) for r in range(WORLD)] if rank == 0 else None
    mine = torch.empty(3)
    dist.scatter(mine, parts, src=0)
    assert mine[0] == rank
    rows = [torch.empty(3) for _ in range(WORLD)] if rank == 3 else None
    dist.gather(mine, rows, dst=3)
    assert rows is None or [r[0].item() for r in rows] == list(range(WORLD))
    # uneven all_to_all_single: rank r sends r + p + 1 elements to p
    send = [rank + p + 1 for p in range(WORLD)]
    out = torch.empty(sum(send))
    dist.all_to_all_single(out, torch.full((sum(send),), float(rank)), send, send)
    assert out.tolist() == [float(p) for p in range(WORLD) for _ in range(rank + p + 1)]
    any_source = torch.empty(1)
    if rank == 0:
        assert {dist.recv(any_source) for _ in range(WORLD - 1)} == {1, 2, 3}
    else:
        dist.send(torch.ones(1), 0)


def subgroups(group: dist.ProcessGroup) -> None:
    rank = group.rank()
    mine, all_of_them = dist.new_subgroups(2)
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=mine)
    assert x[0] == (1 if rank < 2 else 5) and len(all_of_them) == 2
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "cp"))
    y = torch.tensor([float(rank)])
    dist.all_reduce(y, group=mesh["dp", "cp"]._flatten("flat").get_group())
    assert y[0] == (2 if rank % 2 == 0 else 4)
    z = torch.tensor([float(rank)])
    odd = dist.new_group([1, 3], timeout=timedelta(seconds=20), group_desc="odd")
    if rank % 2:
        dist.all_reduce(z, group=odd)
        assert z[0] == 4
        dist.destroy_process_group(odd)
    work = dist.barrier(async_op=True)
    assert work is not None
    future = work.get_future().then(lambda _: "after the barrier")
    work.wait()
    assert future.wait() == "after the barrier"


def leave_and_come_back(group: dist.ProcessGroup, folder: str) -> None:
    """The default group destroyed and made again, twice; a work that failed hands its error to its future."""
    rank = group.rank()
    for attempt in range(2):
        dist.destroy_process_group()
        place, limit = f"file://{folder}/again-{attempt}", timedelta(seconds=30)
        dist.init_process_group("tbik", init_method=place, rank=rank, world_size=WORLD, timeout=limit)
        x = torch.full((100_000,), 1.0)
        dist.all_reduce(x)
        assert x[-1] == WORLD
    lonely = dist.new_group(backend="tbik", timeout=timedelta(seconds=1))
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), group=lonely, async_op=True)
        assert work is not None
        with pytest.raises(dist.DistBackendError, match="rank 1"):
            work.wait()
        with pytest.raises(RuntimeError, match="rank 1"):
            work.get_future().wait()
        assert not work.is_success() and work.exception() is not None
    dist.barrier()
    dist.distributed_c10d._abort_process_group(lonely)
    other = dist.new_group(backend="tbik")
    other.shutdown()
    with pytest.raises(dist.DistBackendError, match="shut down or aborted"):
        dist.all_reduce(torch.ones(3), group=other)
    dist.barrier()


@pytest.mark.parametrize("check", [objects, subgroups], ids=lambda check: check.__name__)
def test_corroborate_other_collectives(tbik: Pool, check: Callable[[dist.ProcessGroup], None]) -> None:
    tbik.run(check, WORLD, deadline=100)


def test_groups_end_and_begin_again(tmp_path: Path) -> None:
    with Pool(WORLD, backend="tbik", timeout=30) as pool:
        pool.run(leave_and_come_back, WORLD, str(tmp_path), deadline=150)


ELASTIC = """
    import os, sys, torch, tbik, torch.distributed as dist
    dist.init_process_group("tbik")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    x = torch.full((300_000,), float(rank + 1))
    dist.all_reduce(x)
    if attempt == 0 and rank == 1:
        os._exit(17)
    y = torch.ones(300_000)
    dist.all_reduce(y)  # first attempt: rank 1 never comes
    open(os.path.join(sys.argv[1], f"done-{attempt}-{rank}"), "w").write(f"{x[0].item()} {y[-1].item()} {os.getpid()}")
    dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.slow
def test_torchrun_restarts_after_a_rank_has_died(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(ELASTIC))
    shared = set(os.listdir("/dev/shm"))
    options = ["--standalone", "--nproc-per-node=3", "--max-restarts=1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = sorted(path.name for path in tmp_path.glob("done-*"))
    assert found == ["done-1-0", "done-1-1", "done-1-2"], done.stderr[-2000:]
    for path in tmp_path.glob("done-*"):
        first, second, pid = path.read_text().split()
        assert (float(first), float(second)) == (6.0, 3.0)
        assert not os.path.exists(f"/proc/{pid}")
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "tbik" in name]
