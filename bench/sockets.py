"""Time of dist.all_reduce between ranks that share no memory: sockets of our own and gloo's movement, against gloo.

    python bench/sockets.py --world 2 4 --rounds 9 --output bench/results/sockets.json

In place, blocking, fp32, over the loopback; groups of transport "tcp" and "gloo" and a plain gloo group in one job.
Before a size is timed, the results are compared with the oracle, bit by bit. Rounds alternate the methods; a round's
time is the slowest rank's mean over its calls. Reported: the median time of each in microseconds, the median, lowest
and highest of the rounds' ratios gloo/tbik (above 1: tbik is faster), and the processor time of one call of one rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import tbik
from tbik import reference
from tbik.backend import group_info
from tbik.verify import cpu_name

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes
SECONDS_PER_ROUND = 0.1
MAX_CALLS = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of the message")
    parser.add_argument("--transports", nargs="+", default=["tcp", "gloo"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = []
    for world in options.world:
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, (world, folder, options), nprocs=world)  # type: ignore[no-untyped-call]
            rows += json.loads((Path(folder) / "rows.json").read_text())
    for row in rows:
        print(
            f"{row['ranks']} ranks {row['bytes']:>9} B {row['transport']:>5}: {row['tbik_us']:>9.1f} us, gloo "
            f"{row['gloo_us']:>9.1f} us, gloo/tbik {row['ratio']:.2f} "
            f"({row['ratio_lowest']:.2f}..{row['ratio_highest']:.2f}), "
            f"processor {row['tbik_cpu_us']:.0f} / {row['gloo_cpu_us']:.0f} us"
        )
    if options.output:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        about = {
            "commit": commit,
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "torch": torch.__version__,
            "tbik": tbik.__version__,
        }
        options.output.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


def measure(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """One rank. Rank 0 writes rows.json."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(os.path.join(folder, "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    groups = {}
    for transport in options.transports:
        os.environ["TBIK_TRANSPORT"] = transport
        groups[transport] = dist.new_group(backend="tbik")
        assert group_info(groups[transport])["transport"] == transport
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        rows += _measure_size(rank, world, groups, size, options.rounds)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure_size(rank: int, world: int, groups: dict[str, Any], size: int, rounds: int) -> list[dict[str, Any]]:
    values = [torch.randn(size // 4, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    expected = reference.all_reduce(values)
    x = torch.empty(0)
    for name, group in groups.items():
        x = values[rank].clone()
        dist.all_reduce(x, group=group)
        if not torch.equal(x.view(torch.int32), expected.view(torch.int32)):
            raise tbik.IntegrityError(f"all_reduce of {size} bytes over {name} differs from the oracle")
    del values, expected
    x.zero_()  # stays zero, however often it is summed
    actions: dict[str, Callable[[], Any]] = {
        name: lambda group=group: dist.all_reduce(x, group=group)  # type: ignore[misc]
        for name, group in groups.items()
    }
    actions["plain gloo"] = lambda: dist.all_reduce(x)
    calls = {}
    for name, action in actions.items():
        _slowest(action, 2)
        calls[name] = max(1, min(MAX_CALLS, int(SECONDS_PER_ROUND / max(_slowest(action, 2)[0], 1e-6))))
    times: dict[str, list[float]] = {name: [] for name in actions}
    cpu: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            wall, processor = _slowest(action, calls[name])
            times[name].append(wall)
            cpu[name].append(processor)
    rows = []
    for name in groups:
        ratios = sorted(g / t for g, t in zip(times["plain gloo"], times[name], strict=True))
        rows.append(
            {
                "ranks": world,
                "bytes": size,
                "transport": name,
                "tbik_us": 1e6 * statistics.median(times[name]),
                "gloo_us": 1e6 * statistics.median(times["plain gloo"]),
                "ratio": statistics.median(ratios),
                "ratio_lowest": ratios[0],
                "ratio_highest": ratios[-1],
                "tbik_cpu_us": 1e6 * statistics.median(cpu[name]),
                "gloo_cpu_us": 1e6 * statistics.median(cpu["plain gloo"]),
                "rounds": rounds,
            }
        )
    return rows


def _slowest(action: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Seconds per call on the slowest rank, and processor seconds per call of the rank that used most."""
    dist.barrier()
    start, processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        action()
    seconds = torch.tensor(
        [(time.perf_counter() - start) / calls, (time.process_time() - processor) / calls], dtype=torch.float64
    )
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds[0]), float(seconds[1])


if __name__ == "__main__":
    main()
