"""Time of tbik.all_reduce over gloo against gloo's own all_reduce, on one machine.

    python bench/all_reduce.py --world 2 4 --rounds 7 --output bench/results/all_reduce.json

One message = n fp32 elements per rank, plain tensors (one leaf per rank). Before a size is timed, the result is
compared with the oracle bit by bit. Rounds are interleaved (tbik, gloo, tbik, gloo, ...), because two runs on a shared
machine differ by more than the two methods; a round's time is the slowest rank's mean over its calls. Reported: the
median time of each in microseconds, the median of the rounds' ratios gloo/tbik (above 1: tbik is faster), bytes sent.
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
from torch.multiprocessing.spawn import spawn

import tbik
from tbik import reference
from tbik.collectives import bytes_sent, reset_bytes_sent

SIZES = (1024, 16_384, 262_144, 4_194_304)  # elements: 4 KiB, 64 KiB, 1 MiB, 16 MiB
SECONDS_PER_ROUND = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="elements of float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="write the rows as JSON")
    options = parser.parse_args()
    rows = []
    print(f"{'ranks':>5} {'bytes':>10} {'tbik us':>10} {'gloo us':>10} {'gloo/tbik':>10} {'sent/rank':>11}")
    for world in options.world:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world, folder, options.sizes, options.rounds)
            spawn(measure, arguments, nprocs=world)  # type: ignore[no-untyped-call]
            rows += json.loads((Path(folder) / "rows.json").read_text())
        for row in rows[-len(options.sizes) :]:
            print(
                f"{row['ranks']:>5} {row['bytes']:>10} {row['tbik_us']:>10.0f} {row['gloo_us']:>10.0f} "
                f"{row['ratio']:>10.2f} {row['bytes_sent']:>11}"
            )
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }
        options.output.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def measure(rank: int, world: int, folder: str, sizes: list[int], rounds: int) -> None:
    """One rank. Rank 0 writes rows.json."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    rows = [_measure_size(rank, world, size, rounds) for size in sizes]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure_size(rank: int, world: int, size: int, rounds: int) -> dict[str, Any]:
    values = [torch.randn(size, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    x, scratch = values[rank], torch.empty(size)

    def own() -> None:
        tbik.all_reduce(x)

    def gloo() -> None:
        scratch.copy_(x)  # gloo sums in place; tbik writes a new tensor
        dist.all_reduce(scratch)

    expected = reference.all_reduce(values)
    if not torch.equal(tbik.all_reduce(x).view(torch.int32), expected.view(torch.int32)):
        raise tbik.IntegrityError(f"all_reduce of {size} elements over {world} ranks differs from the oracle")
    del values
    reset_bytes_sent()
    own()
    sent = bytes_sent()
    calls = _agreed_calls(own)
    times: dict[str, list[float]] = {"tbik": [], "gloo": []}
    for _ in range(rounds):
        times["tbik"].append(_slowest(own, calls))
        times["gloo"].append(_slowest(gloo, calls))
    return {
        "ranks": world,
        "bytes": size * 4,
        "tbik_us": 1e6 * statistics.median(times["tbik"]),
        "gloo_us": 1e6 * statistics.median(times["gloo"]),
        "ratio": statistics.median(g / t for g, t in zip(times["gloo"], times["tbik"], strict=True)),
        "bytes_sent": sent,
        "rounds": rounds,
        "calls_per_round": calls,
    }


def _agreed_calls(action: Callable[[], None]) -> int:
    """Calls that fill SECONDS_PER_ROUND, the same number on all ranks."""
    seconds = max(_slowest(action, 3), 1e-6)
    return max(1, min(200, int(SECONDS_PER_ROUND / seconds)))


def _slowest(action: Callable[[], None], calls: int) -> float:
    """Seconds per call on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        action()
    seconds = torch.tensor([(time.perf_counter() - start) / calls], dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


if __name__ == "__main__":
    main()
