"""All-reduce over peer memory: bits and timings of TP 2, 4, 8, every rank a process; on one GPU they share it.

    python bench/gpu_collectives.py                   # bits, then timings; needs a CUDA device and tbik/_C_cuda.so
    python bench/gpu_collectives.py --dry-run         # no GPU: the host's memory in its place, tiny sizes

bits:     all_reduce (both placements, five dtypes, sum, average, minimum, premultiplied), reduce_scatter, covers with a
          ragged edge, consecutive calls of changing size, a CUDA graph replayed, a rank that does not come: all ranks'
          results against tbik.reference on the CPU, a flat sum must differ
timings:  medians over calls of the time between two CUDA events, of one_shot and two_shot, and of NCCL's all-reduce
          where each rank has a GPU of its own (NCCL refuses ranks that share one). Ranks that share a GPU take turns:
          their times say nothing about a wire, and the rows say "shared".

Also the parts "collective_bits" and "collectives" of bench/gpu.py. A rank that fails makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORLDS = (2, 4, 8)
SIZES = (8192, 1 << 20, 1 << 24, 1 << 26)  # elements of bfloat16
DRY_SIZES = (512, 5000)
RANK_LIMIT_S = 180  # three worlds of a part stay below its limit
GRACE_S = 5.0
WAIT_S = 30.0


def start(worlds: tuple[int, ...], job: str, is_dry: bool) -> list[dict[str, Any]]:
    """Rows of every rank 0. Errors: AssertionError with a rank's output."""
    rows: list[dict[str, Any]] = []
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--job", job, "--world", str(world), "--folder", folder]
            command += ["--dry-run"] if is_dry else []
            outputs = run_ranks(command, world, job, Path(folder))
        rows += [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]
    return rows


def run_ranks(command: list[str], world: int, what: str, folder: Path, limit_s: float = RANK_LIMIT_S) -> list[str]:
    """The outputs of `command --rank 0`, ... as processes; all have ended when this returns or raises.

    Errors: AssertionError with the end of the output of the rank that failed first, or of those that did not end.
    """
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "PYTHONPATH": path}
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    ranks: list[subprocess.Popen[bytes]] = []
    ended: list[int] = []  # in this order
    try:
        for rank, log in enumerate(logs):
            with open(log, "wb") as out:
                ranks.append(subprocess.Popen([*command, "--rank", str(rank)], env=environment, stdout=out, stderr=out))
        end = time.monotonic() + limit_s
        while len(ended) < world and time.monotonic() < end:
            ended += [rank for rank, process in enumerate(ranks) if rank not in ended and process.poll() is not None]
            if any(ranks[rank].returncode for rank in ended):
                end = min(end, time.monotonic() + GRACE_S)  # the others only wait for it
            time.sleep(0.02)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    outputs = [log.read_text(errors="replace") for log in logs]
    failed = next((rank for rank in ended if ranks[rank].returncode), None)
    if failed is not None:
        code = ranks[failed].returncode
        raise AssertionError(f"{what}, rank {failed} of {world} ended with {code}:\n{outputs[failed][-3000:]}")
    if len(ended) < world:
        late = [rank for rank in range(world) if rank not in ended]
        raise AssertionError(
            f"{what}, ranks {late} of {world}: no end within {limit_s:.0f} s:\n{outputs[late[0]][-3000:]}"
        )
    return outputs


class Rank:
    """One process: its peers, its device, what it compares with."""

    def __init__(self, rank: int, world: int, folder: str, is_dry: bool) -> None:
        import datetime

        import torch
        import torch.distributed as dist

        from tbik import peer_library
        from tbik.peer_memory import Peers

        self.rank, self.world, self.is_dry = rank, world, is_dry
        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder) / "store"), world)
        limit = datetime.timedelta(seconds=RANK_LIMIT_S)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        self.shared = not is_dry and torch.cuda.device_count() < world
        ordinal = 0 if is_dry or self.shared else rank
        self.device = torch.device("cpu") if is_dry else torch.device("cuda", ordinal)
        if not is_dry:
            torch.cuda.set_device(ordinal)
        library = peer_library.host() if is_dry else peer_library.cuda()
        self.make = lambda **options: Peers(library, ordinal, rank, world, self.exchange, **options)
        self.peers = self.make(timeout_s=WAIT_S)

    def exchange(self, key: str, record: dict[str, Any]) -> list[dict[str, Any]]:
        import torch.distributed as dist

        records: list[Any] = [None] * self.world
        dist.all_gather_object(records, record)
        return records

    def values(self, n: int, dtype: Any, seed: int = 0) -> list[Any]:
        """Every rank's, on the CPU: exponents over 2^40, so that the order of a sum shows."""
        import torch

        values = []
        for rank in range(self.world):
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            spread = 8 if dtype == torch.float16 else 40
            exponent = torch.randint(-spread // 2, spread // 2, (n,), generator=generator)
            values.append((torch.randn(n, generator=generator) * 2.0**exponent).to(dtype))
        return values

    def synchronize(self) -> None:
        self.peers.synchronize()

    def report(self, **row: Any) -> None:
        if self.rank == 0:
            print(json.dumps({"world": self.world, **row}), flush=True)


def require_equal(what: str, actual: Any, expected: Any) -> None:
    import torch

    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    differing = int((actual.cpu().view(bits) != expected.view(bits)).sum())
    if differing:
        raise AssertionError(f"{what}: {differing} of {expected.numel()} elements differ in bits")


def job_bits(me: Rank) -> None:
    import torch

    from tbik import _C, reference, tree
    from tbik.peer_memory import order_of_runs

    rank, world, peers = me.rank, me.world, me.peers
    sizes = (1, 513, 20000) if me.is_dry else (1, 513, 65536 * world, (1 << 23) + 77)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for n in sizes:
            values = me.values(n, torch.float32).copy() if not dtype.is_floating_point else me.values(n, dtype)
            values = [value.to(dtype) for value in values]
            expected = reference.all_reduce(values)
            for placement in ("one_shot", "two_shot"):
                x = values[rank].clone().to(me.device)
                peers.all_reduce(x, placement=placement)
                me.synchronize()
                require_equal(f"{dtype} n={n} {placement}", x, expected)
            if dtype == torch.float32 and n > 1 and world > 2:
                flat = values[-1].clone()  # from the last rank down: for three ranks the tree is the flat sum upwards
                for value in values[-2::-1]:
                    flat += value
                assert not torch.equal(flat, expected), "a flat sum has the same bits: the data shows no order"
            if n % world == 0:
                out = torch.empty(n // world, dtype=dtype, device=me.device)
                peers.reduce_scatter(out, values[rank].to(me.device))
                me.synchronize()
                require_equal(f"reduce_scatter {dtype} n={n}", out, expected.view(world, -1)[rank])
    me.report(check="all_reduce, reduce_scatter", sizes=list(sizes))

    values = me.values(5001, torch.float32)
    for op, expected in (
        ("avg", reference.all_reduce(values, "avg")),
        ("min", tree.root(values, torch.minimum)),
        ("premul_sum", tree.root([v * torch.tensor(0.1 * (r + 1)) for r, v in enumerate(values)], torch.add)),
    ):
        x = values[rank].clone().to(me.device)
        peers.all_reduce(x, op=op, factor=0.1 * (rank + 1))
        me.synchronize()
        require_equal(op, x, expected)
    me.report(check="avg, min, premul_sum")

    leaves = 3 * world + 1  # a ragged edge: the last rank has one leaf more
    runs = tuple((3 * r, 3 * r + 3 + (r == world - 1)) for r in range(world))
    parts = [torch.randn(40, 33, generator=torch.Generator().manual_seed(i)) * 10.0 ** (i % 5) for i in range(leaves)]
    lo, hi = runs[rank]
    rows = torch.stack(tree.run(tree.schedule(tree.leaf_nodes(lo, hi)), parts[lo:hi], torch.add)).view(-1, 40 * 33)
    bias = torch.randn(33, generator=torch.Generator().manual_seed(99))
    order, counts = order_of_runs(runs, leaves, False)
    expected = reference.epilogue(tree.root(parts, torch.add), bias, avg=world, out_dtype=torch.bfloat16)
    out = torch.empty(40, 33, dtype=torch.bfloat16, device=me.device)
    for placement in ("one_shot", "two_shot"):
        peers.fold(
            rows.to(me.device),
            order,
            out,
            counts=counts,
            divisor=world,
            bias=bias.to(me.device),
            placement=placement,
        )
        me.synchronize()
        require_equal(f"covers, {placement}", out, expected)
    me.report(check="covers with a ragged edge, bias, bfloat16")

    pending = []
    for call in range(24):  # no synchronisation in between: double buffers
        values = me.values(300 + 1777 * (call % 5), torch.bfloat16, seed=call)
        x = values[rank].clone().to(me.device)
        peers.all_reduce(x, placement=("one_shot", "two_shot")[call % 2])
        pending.append((x, reference.all_reduce(values)))
    me.synchronize()
    for call, (x, expected) in enumerate(pending):
        require_equal(f"consecutive call {call}", x, expected)
    me.report(check="24 calls without a wait of the host")

    x, out = (torch.zeros(40000, device=me.device) for _ in range(2))
    replay = capture(me, lambda: peers.all_reduce(x, out=out))
    for number in range(5):
        values = me.values(40000, torch.float32, seed=100 + number)
        x.copy_(values[rank])
        replay()
        me.synchronize()
        require_equal(f"replay {number}", out, reference.all_reduce(values))
    me.report(check="graph replayed 5 times" if not me.is_dry else "one launch repeated 5 times")

    late(me)
    assert _C.cpu_paths()


def capture(me: Rank, work: Callable[[], Any]) -> Callable[[], Any]:
    """`work` as a CUDA graph; in a dry run the last launch again."""
    import torch

    work()
    me.synchronize()
    if me.is_dry:
        launches = list(me.peers._known.values())[-1]

        def again() -> None:
            for launch in launches:
                me.peers.driver.launch(me.peers.device, launch.call, 0)

        return again
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def late(me: Rank) -> None:
    """In a group of its own: the last rank stays away, the others' kernels end at the limit and name it."""
    import torch
    import torch.distributed as dist

    from tbik import TransportError

    group = me.make(timeout_s=2.0)
    x = torch.ones(1000, device=me.device)
    group.all_reduce(x)
    group.synchronize()
    message = ""
    if me.rank != me.world - 1:
        group.all_reduce(x)
        try:
            group.synchronize()
        except TransportError as error:  # of several ranks one may hear of another's limit first
            message = str(error)
        assert f"for rank {me.world - 1}, expected its number 2" in message or "has given up" in message, message
    dist.barrier()
    me.report(check="a rank that does not come is named", message=message[:160])
    group.close()


def job_timings(me: Rank) -> None:
    import torch

    nccl = None
    if not me.is_dry and not me.shared:
        import torch.distributed as dist

        nccl = dist.new_group(list(range(me.world)), backend="nccl")
    for n in DRY_SIZES if me.is_dry else SIZES:
        x = torch.randn(n).bfloat16().to(me.device)
        out = torch.empty_like(x)
        row: dict[str, Any] = {"elements": n, "dtype": "bfloat16", "shared": me.shared}
        for placement in ("one_shot", "two_shot"):
            work = partial(me.peers.all_reduce, x, out=out, placement=placement)
            row[f"{placement}_us"] = median_us(me, work)
        if nccl is not None:
            import torch.distributed as dist

            row["nccl_us"] = median_us(me, partial(dist.all_reduce, x, group=nccl))
        best = min(row["one_shot_us"], row["two_shot_us"])
        row["GB_per_s"] = 2 * (me.world - 1) / me.world * x.nbytes / best / 1e3  # what a ring would have to send
        me.report(**row)
    me.synchronize()


def median_us(me: Rank, work: Callable[[], Any]) -> float:
    """Of single calls, by CUDA events; all ranks begin together."""
    import torch
    import torch.distributed as dist

    repeats = 3 if me.is_dry or me.shared else 50
    for _ in range(2):
        work()
    me.synchronize()
    dist.barrier()
    times = []
    for _ in range(repeats):
        if me.is_dry:
            start_s = time.perf_counter()
            work()
            times.append((time.perf_counter() - start_s) * 1e6)
            continue
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        work()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) * 1e3)
    return statistics.median(times)


JOBS = {"bits": job_bits, "timings": job_timings}


def part_collective_bits(setting: Any) -> list[dict[str, Any]]:
    """For bench/gpu.py."""
    return start((3,) if setting.is_dry else WORLDS, "bits", setting.is_dry)


def part_collectives(setting: Any) -> list[dict[str, Any]]:
    """For bench/gpu.py."""
    return start((2,) if setting.is_dry else WORLDS, "timings", setting.is_dry)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes over the host's memory")
    parser.add_argument("--worlds", default="2,4,8", help="comma-separated numbers of ranks")
    for name in ("--job", "--world", "--rank", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        me = Rank(int(args.rank), int(args.world), args.folder, args.dry_run)
        JOBS[args.job](me)
        import torch.distributed as dist

        dist.barrier()
        me.peers.close()
        dist.destroy_process_group()
        return 0
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device; --dry-run goes through everything over the host's memory")
    worlds = tuple(int(world) for world in args.worlds.split(","))
    for job in JOBS:
        for row in start(worlds, job, args.dry_run):
            print(job, json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
