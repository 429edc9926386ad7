"""Time of all-reduce in place, blocking: the "tbik" backend against gloo and MPI, on one machine, in one job.

    python bench/all_reduce.py --world 2 4                                       against gloo
    mpiexec -n 2 python bench/all_reduce.py --output results.json                and against that MPI, with mpi4py

tbik: torch.distributed.all_reduce on a "tbik" group. launch: tbik.launch.allreduce(comm, a, out=a). gloo:
torch.distributed.all_reduce on a gloo group. mpi: comm.Allreduce(MPI.IN_PLACE, a); not every MPI can sum bfloat16, so
there it sums as many uint16: less work. dispatch: torch.distributed.all_reduce on torch's "fake" backend, which
does nothing, on all ranks at once: what a call costs in torch, whatever the backend. Before a size is timed, tbik's and
launch's results are compared with the oracle, bit by bit.

Rounds interleave the methods; a round's time is the slowest rank's mean over its calls. Reported: the median time, and
the median of the rounds' ratios with the lowest and highest (above 1: tbik is faster).

    algbw = bytes / time                busbw = algbw * 2 (W-1)/W, GB/s, W ranks (as in nccl-tests)

--transport gloo (or another of TBIK_TRANSPORT) forces what tbik's bytes move over. --covers adds tbik.all_reduce (the
Python collectives for covers), with the bytes that a rank sends.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

import tbik
from tbik import launch, reference
from tbik.backend import TRANSPORTS, group_info
from tbik.collectives import bytes_sent, reset_bytes_sent
from tbik.verify import commit

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes
DTYPES = ("float32", "bfloat16")
MAX_CALLS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4], help="without mpiexec")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of the message")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.05, help="of one method in one round, about")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto", help="of the tbik group")
    parser.add_argument("--covers", action="store_true", help="time tbik.all_reduce over gloo too")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    os.environ["TBIK_TRANSPORT"] = options.transport
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    load = os.getloadavg()
    if any(name in os.environ for name in launch._MPI_STARTED):
        launch.init()
        from mpi4py import MPI

        rows, rank, mpi = _measure(options, MPI), MPI.COMM_WORLD.rank, MPI.Get_library_version()
        dist.destroy_process_group()
        if rank != 0:
            return
    else:
        rows, mpi = [], ""
        for world in options.world:
            with tempfile.TemporaryDirectory() as folder:
                spawn(_spawned, (world, folder, options), nprocs=world)  # type: ignore[no-untyped-call]
                rows += json.loads((Path(folder) / "rows.json").read_text())
    Console(width=150).print(_table(rows))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load_average_before": load,
            "load_average_after": os.getloadavg(),
            "torch": torch.__version__,
            "commit": commit(),
            "tbik": tbik.__version__,
            "mpi": mpi.splitlines()[0].strip("\0 ") if mpi else "",
            "command": " ".join(["python", "bench/all_reduce.py", *sys.argv[1:]]),
        }
        options.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def _spawned(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """One rank without MPI. Rank 0 writes rows.json."""
    store = dist.FileStore(os.path.join(folder, "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("tbik", store=store, rank=rank, world_size=world)
    rows = _measure(options, None)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure(options: argparse.Namespace, mpi: Any) -> list[dict[str, Any]]:
    """On every rank of the default group, which is tbik's."""
    torch.set_num_threads(1)
    gloo = dist.new_group(backend="gloo")
    fake = dist.new_group(backend="fake")
    assert isinstance(gloo, dist.ProcessGroup) and isinstance(fake, dist.ProcessGroup)
    return [
        _measure_size(gloo, fake, mpi, size, getattr(torch, dtype), options)
        for dtype in options.dtypes
        for size in options.sizes
    ]


def _measure_size(
    gloo: dist.ProcessGroup,
    fake: dist.ProcessGroup,
    mpi: Any,
    size: int,
    dtype: torch.dtype,
    options: argparse.Namespace,
) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    count = size // dtype.itemsize
    values = [torch.randn(count, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    x = values[rank].clone()
    array: Any = x.view(bits).numpy().view(np.uint16) if dtype == torch.bfloat16 else x.numpy()
    hint: Any = "bfloat16" if dtype == torch.bfloat16 else None

    def own() -> None:
        dist.all_reduce(x)

    def by_launch() -> None:
        launch.allreduce(mpi.COMM_WORLD, array, out=array, dtype=hint)

    def by_gloo() -> None:
        dist.all_reduce(x, group=gloo)

    def dispatch() -> None:
        dist.all_reduce(x, group=fake)

    def by_mpi() -> None:
        mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array)

    def covers() -> None:
        x.copy_(tbik.all_reduce(x, group=gloo))

    actions: dict[str, Callable[[], None]] = {"tbik": own, "gloo": by_gloo, "dispatch": dispatch}
    actions |= {"launch": by_launch, "mpi": by_mpi} if mpi else {}
    actions |= {"covers": covers} if options.covers else {}
    expected = reference.all_reduce(values).view(bits)
    for name in [name for name in ("tbik", "launch", "covers") if name in actions]:
        x.copy_(values[rank])
        actions[name]()
        if not torch.equal(x.view(bits), expected):
            raise tbik.IntegrityError(f"{name} of {count} {dtype} elements over {world} ranks differs from the oracle")
    del values, expected
    x.zero_()  # stays zero, however often it is summed

    calls = {name: _agreed_calls(action, gloo, options.seconds) for name, action in actions.items()}
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(options.rounds):
        for name, action in actions.items():
            times[name].append(_slowest(action, calls[name], gloo))
    own_s = statistics.median(times["tbik"])
    info = group_info()
    row: dict[str, Any] = {
        "ranks": world,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": size,
        "transport": info["transport"],
        "algbw_gb_s": 1e-9 * size / own_s,
        "busbw_gb_s": 1e-9 * size / own_s * 2 * (world - 1) / world,
        "rounds": options.rounds,
        "calls_per_round": calls,
    }
    for name in actions:
        row[f"{name}_us"] = 1e6 * statistics.median(times[name])
    pairs = [("gloo", "tbik")] + ([("mpi", "tbik"), ("mpi", "launch")] if mpi else [])
    for slow, fast in pairs:
        ratios = sorted(s / f for s, f in zip(times[slow], times[fast], strict=True))
        row[f"{slow}/{fast}"] = statistics.median(ratios)
        row[f"{slow}/{fast} lowest..highest"] = [ratios[0], ratios[-1]]
    if options.covers:
        reset_bytes_sent()
        covers()
        row |= {"covers_bytes_sent": bytes_sent()}
    return row


def _agreed_calls(action: Callable[[], None], gloo: dist.ProcessGroup, seconds: float) -> int:
    """Calls that fill so many seconds, the same number on all ranks."""
    _slowest(action, 2, gloo)
    once = max(_slowest(action, 2, gloo), 1e-6)
    return max(1, min(MAX_CALLS, int(seconds / once)))


def _slowest(action: Callable[[], None], calls: int, gloo: dist.ProcessGroup) -> float:
    """Seconds per call on the slowest rank."""
    dist.barrier(group=gloo)
    start = time.perf_counter()
    for _ in range(calls):
        action()
    seconds = torch.tensor([(time.perf_counter() - start) / calls], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=gloo)
    return float(seconds)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="all_reduce in place, slowest rank, medians of interleaved rounds; GB/s of tbik")
    texts: dict[str, Callable[[dict[str, Any]], str]] = {
        "ranks": lambda row: str(row["ranks"]),
        "dtype": lambda row: row["dtype"],
        "bytes": lambda row: str(row["bytes"]),
        "via": lambda row: row["transport"],
    }
    for key in ("tbik_us", "dispatch_us", "launch_us", "gloo_us", "mpi_us", "covers_us"):
        texts[key.replace("_", " ")] = lambda row, key=key: f"{row[key]:.1f}"  # type: ignore[misc]
    for key in ("algbw_gb_s", "busbw_gb_s", "gloo/tbik", "mpi/tbik", "mpi/launch"):
        texts[key.removesuffix("_gb_s")] = lambda row, key=key: f"{row[key]:.2f}"  # type: ignore[misc]
    present = {key.removesuffix("_gb_s").replace("_us", " us") for key in rows[0]} | {"via"}
    for name in [name for name in texts if name in present]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(text(row) for name, text in texts.items() if name in present))
    return table


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
