"""Time of torch.distributed.all_reduce on the "tbik" backend against gloo, on one machine.

    python bench/all_reduce.py --world 2 4 --rounds 9 --output bench/results/all_reduce.json

In place, blocking, through dist.all_reduce. Before a size is timed, the result is compared with the oracle bit by bit.
In place, blocking, through dist.all_reduce. Before a size is timed, the result is compared with the oracle, bit by bit.
the two methods; a round's time is the slowest rank's mean over its calls. Reported: the median time of each in
microseconds, and the median, lowest and highest of the rounds' ratios gloo/tbik (above 1: tbik is faster).

--covers adds tbik.all_reduce (the Python collectives for covers) over gloo, with the bytes that a rank sends.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.spawn import spawn

import tbik
from tbik import reference
from tbik.backend import group_info
from tbik.collectives import bytes_sent, reset_bytes_sent

SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)  # bytes
DTYPES = ("float32", "bfloat16")
SECONDS_PER_ROUND = 0.1
MAX_CALLS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of the message")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--covers", action="store_true", help="time tbik.all_reduce over gloo too")
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = []
    for world in options.world:
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, (world, folder, options), nprocs=world)  # type: ignore[no-untyped-call]
            rows += json.loads((Path(folder) / "rows.json").read_text())
    Console(width=120).print(_table(rows, options.covers))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "torch": torch.__version__,
            "tbik": tbik.__version__,
        }
        options.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def measure(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """One rank. Rank 0 writes rows.json."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    group = dist.new_group(backend="tbik")
    assert isinstance(group, dist.ProcessGroup)
    rows = [
        _measure_size(rank, world, group, size, getattr(torch, dtype), options)
        for dtype in options.dtypes
        for size in options.sizes
    ]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure_size(
    rank: int, world: int, group: dist.ProcessGroup, size: int, dtype: torch.dtype, options: argparse.Namespace
) -> dict[str, Any]:
    count = size // dtype.itemsize
    values = [torch.randn(count, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
    x = values[rank].clone()
    dist.all_reduce(x, group=group)
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16 if dtype.itemsize == 2 else torch.int64
    if not torch.equal(x.view(bits), reference.all_reduce(values).view(bits)):
        raise tbik.IntegrityError(f"all_reduce of {count} {dtype} elements over {world} ranks differs from the oracle")
    del values
    x.zero_()  # stays zero, however often it is summed

    def own() -> None:
        dist.all_reduce(x, group=group)

    def gloo() -> None:
        dist.all_reduce(x)

    def covers() -> None:
        tbik.all_reduce(x)

    actions = {"tbik": own, "gloo": gloo} | ({"covers": covers} if options.covers else {})
    calls = {name: _agreed_calls(action) for name, action in actions.items()}
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(options.rounds):
        for name, action in actions.items():
            times[name].append(_slowest(action, calls[name]))
    ratios = sorted(g / t for g, t in zip(times["gloo"], times["tbik"], strict=True))
    row = {
        "ranks": world,
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": size,
        "transport": group_info(group)["transport"],
        "tbik_us": 1e6 * statistics.median(times["tbik"]),
        "gloo_us": 1e6 * statistics.median(times["gloo"]),
        "ratio": statistics.median(ratios),
        "ratio_lowest": ratios[0],
        "ratio_highest": ratios[-1],
        "rounds": options.rounds,
        "calls_per_round": calls,
    }
    if options.covers:
        reset_bytes_sent()
        covers()
        row |= {"covers_us": 1e6 * statistics.median(times["covers"]), "covers_bytes_sent": bytes_sent()}
    return row


def _agreed_calls(action: Callable[[], None]) -> int:
    """Calls that fill SECONDS_PER_ROUND, the same number on all ranks."""
    _slowest(action, 3)
    seconds = max(_slowest(action, 3), 1e-6)
    return max(1, min(MAX_CALLS, int(SECONDS_PER_ROUND / seconds)))


def _slowest(action: Callable[[], None], calls: int) -> float:
    """Seconds per call on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        action()
    seconds = torch.tensor([(time.perf_counter() - start) / calls], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _table(rows: list[dict[str, Any]], covers: bool) -> Table:
    table = Table(title="all_reduce in place, slowest rank, median of interleaved rounds")
    names = ["ranks", "dtype", "bytes", "transport", "tbik us", "gloo us", "gloo/tbik", "lowest..highest"]
    for name in names + (["covers us", "covers sent"] if covers else []):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [
            f"{row['ranks']}",
            row["dtype"],
            f"{row['bytes']}",
            row["transport"],
            f"{row['tbik_us']:.1f}",
            f"{row['gloo_us']:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_lowest']:.2f}..{row['ratio_highest']:.2f}",
        ]
        table.add_row(*cells, *([f"{row['covers_us']:.1f}", f"{row['covers_bytes_sent']}"] if covers else []))
    return table


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    main()
