"""Faults at random moments in torch.distributed calls of the tbik backend, by the hundred, and what every rank saw.

    python tests/fault_sweep.py --count 100 --output bench/results/faults.json      writes faults.log beside it

A trial: 2 to 4 forked ranks make a group and loop over reductions of random kind and size; at a random moment one rank
is killed or stopped, or at a random call it does not come or brings another shape. Required of every live rank: the
first error within the limit + 1 s after its call began, naming the culprit ("shm", "tcp"; gloo cannot know it), the
input bit for bit as it was. Required of the trial: no rank hangs, no process is left, nothing in /dev/shm, no memory
file open.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tbik

FAULTS = ("SIGKILL", "SIGSTOP", "missing", "mismatched")
LIMIT_S = 0.5
HANG_S = 20.0  # far above limit + 1 s: a rank that has said nothing by then hangs
MAKING_S = 60.0
_PR_SET_PDEATHSIG = 1


@dataclass
class Trial:
    """One fault and what came of it; `wrong` is empty if all that is required holds."""

    fault: str
    transport: str
    seed: int
    world: int
    culprit: int
    slowest_s: float = 0.0
    named: int = 0
    live: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run_trial(fault: str, transport: str, seed: int) -> Trial:
    """Forks; the process that calls this must have done nothing with torch but import it."""
    rng = random.Random(f"{fault} {transport} {seed}")
    world = rng.randint(2, 4)
    trial = Trial(fault, transport, seed, world, rng.randrange(world))
    at_call, moment_s = rng.randrange(30), rng.random() * 0.03
    with tempfile.TemporaryDirectory(prefix="tbik-faults-") as folder:
        pipes, pids = [], []
        for rank in range(world):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                for pipe in pipes:
                    os.close(pipe)
                os.close(read)
                _rank_life(trial, rank, folder, at_call, write)
            os.close(write)
            pipes.append(read)
            pids.append(pid)
        try:
            _watch(trial, pipes, pids, moment_s)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)
            for pipe in pipes:
                os.close(pipe)
    try:
        os.waitpid(-1, os.WNOHANG)
        trial.wrong.append("a process is left")
    except ChildProcessError:
        pass
    left = [name for name in os.listdir("/dev/shm") if "tbik" in name and not _of_others(name)]
    left += [link for link in map(_link, Path("/proc/self/fd").iterdir()) if "memfd:tbik" in link]
    if left:
        trial.wrong.append(f"left behind: {left}")
    return trial


def _of_others(name: str) -> bool:
    """A file that names a living process, which no rank of the trial is any more: tests that run beside this one."""
    return any(Path("/proc", number).exists() for number in re.findall(r"\d+", name))


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _watch(trial: Trial, pipes: list[int], pids: list[int], moment_s: float) -> None:
    """The parent's side: the fault, then every live rank's report."""
    for rank, pipe in enumerate(pipes):
        text = _line(pipe, MAKING_S)
        if text != "ready":
            trial.wrong.append(f"rank {rank} did not start: {text}")
            return
    if trial.fault in ("SIGKILL", "SIGSTOP"):
        time.sleep(moment_s)
        os.kill(pids[trial.culprit], getattr(signal, trial.fault))
    end = time.monotonic() + HANG_S
    for rank, pipe in enumerate(pipes):
        if rank == trial.culprit and trial.fault != "mismatched":
            continue
        text = _line(pipe, end - time.monotonic())
        if not text.startswith("{"):
            trial.wrong.append(f"rank {rank} hangs" if text is None or text == "" else f"rank {rank}: {text}")
            continue
        report = json.loads(text)
        trial.live += 1
        trial.slowest_s = max(trial.slowest_s, report["seconds"])
        trial.errors.append(f"rank {rank}: {report['error']}")
        named = f"rank {trial.culprit}" in report["error"]
        trial.named += named
        if not named and trial.transport != "gloo":
            trial.wrong.append(f"rank {rank} does not name rank {trial.culprit}: {report['error']}")
        if report["seconds"] > LIMIT_S + 1:
            trial.wrong.append(f"rank {rank}: after {report['seconds']:.2f} s: {report['error']}")
        if not report["unchanged"]:
            trial.wrong.append(f"rank {rank}: input changed: {report['error']}")


def _line(pipe: int, seconds: float) -> str:
    """The next line of a rank; what there is of it when the time or the rank ends."""
    data, end = b"", time.monotonic() + seconds
    while not data.endswith(b"\n"):
        if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
            break
        part = os.read(pipe, 1)  # no byte of the line after it
        if not part:
            break
        data += part
    return data.decode().strip()


def _rank_life(trial: Trial, rank: int, folder: str, at_call: int, write: int) -> None:
    """A forked rank: never returns."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()  # a process group that loses its shell is continued by the kernel, and then nobody is stopped
        gc.disable()
        torch.set_num_threads(1)
        text = _loop(trial, rank, folder, at_call, write)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
    os.write(write, (text + "\n").encode())
    time.sleep(2 * HANG_S)  # its sockets and its memory stay; the parent ends it
    os._exit(0)


def _loop(trial: Trial, rank: int, folder: str, at_call: int, write: int) -> str:
    os.environ |= {"TBIK_TRANSPORT": trial.transport, "TBIK_CHECK": "1", "GLOO_SOCKET_IFNAME": "lo"}
    store = dist.FileStore(os.path.join(folder, "store"), trial.world)  # type: ignore[attr-defined]
    dist.init_process_group("tbik", store=store, rank=rank, world_size=trial.world, timeout=timedelta(seconds=MAKING_S))
    group = dist.group.WORLD
    assert group is not None
    dist.barrier()
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=LIMIT_S))
    sizes = random.Random(trial.seed)  # the same on all ranks
    os.write(write, b"ready\n")
    call = 0
    while True:
        count = sizes.choice([sizes.randrange(1, 2000), sizes.randrange(1, 60_000), sizes.randrange(1, 900_000)])
        kind = sizes.choice(["all_reduce", "all_reduce", "asynchronous", "reduce_scatter"])
        if trial.fault == "missing" and rank == trial.culprit and call == at_call:
            time.sleep(HANG_S)
        count = count // trial.world * trial.world + trial.world
        if trial.fault == "mismatched" and rank == trial.culprit and call == at_call:
            count += trial.world
        before = torch.arange(count, dtype=torch.float32).mul_(1.7 + rank)
        x = before.clone()
        start = time.monotonic()
        try:
            if kind == "reduce_scatter":
                group._reduce_scatter_base(torch.empty(count // trial.world), x).wait()
            else:
                work = dist.all_reduce(x, async_op=kind == "asynchronous")
                if work is not None:
                    work.wait()
        except dist.DistBackendError as error:
            seconds = time.monotonic() - start
            unchanged = torch.equal(x.view(torch.int32), before.view(torch.int32))
            return json.dumps({"seconds": seconds, "error": str(error).replace("\n", " "), "unchanged": unchanged})
        call += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2, help="trials of each fault over shm")
    parser.add_argument("--others", type=int, help="trials of each fault over tcp and gloo (default: a quarter)")
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp", "gloo"])
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    others = max(1, options.count // 4) if options.others is None else options.others
    trials: list[Trial] = []
    rows: list[dict[str, Any]] = []
    for transport in options.transports:
        for fault in options.faults:
            number = options.count if transport == "shm" else others
            some = [run_trial(fault, transport, options.seed + i) for i in range(number)]
            trials += some
            row = {
                "transport": transport,
                "fault": fault,
                "trials": number,
                "live_ranks": sum(t.live for t in some),
                "naming_the_culprit": sum(t.named for t in some),
                "slowest_error_s": round(max(t.slowest_s for t in some), 3),
                "wrong": sum(bool(t.wrong) for t in some),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
            for t in some:
                if t.wrong:
                    print(f"  seed {t.seed}, world {t.world}, culprit {t.culprit}: {'; '.join(t.wrong)}", flush=True)
    if options.output:
        git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        about = {
            "commit": git.stdout.strip(),
            "tbik": tbik.__version__,
            "torch": torch.__version__,
            "limit_s": LIMIT_S,
            "allowed_s": LIMIT_S + 1,
            "load_average": os.getloadavg(),
        }
        options.output.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        lines = [f"{json.dumps(about)}\n"] + [json.dumps(asdict(t)) + "\n" for t in trials]
        options.output.with_suffix(".log").write_text("".join(lines))
    sys.exit(any(t.wrong for t in trials))


if __name__ == "__main__":
    main()
