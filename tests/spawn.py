"""Run a function on n ranks: real processes, a fresh gloo group on the loopback, a hard deadline, no orphans.

    run_ranks(function, world, *args)            -> [function(group, *args) of rank 0, ..., of rank world - 1]
    with Pool(world) as pool: pool.run(function, n, *args)    the same on the first n of `world` lasting ranks

`function` is a module-level function (it travels by name); `group` is the process group, `group.rank()` the rank.
Results travel pickled. Processes come from a fork server that has imported torch once and never ran anything: forking
the test process itself would copy its OpenMP threads and a used autograd engine, and neither works in a child.
Every rank uses one torch thread. A rank dies with its parent (prctl), at the latest at the deadline (SIGKILL).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import datetime
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

DEADLINE_S = 60.0
_GRACE_S = 5.0  # for the others once one rank has failed
_PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
# tbik.huggingface is left out by the server where transformers is missing
_context.set_forkserver_preload(
    ["pytest", "hypothesis", "torch", "torch.distributed", "tbik.nn", "tbik.huggingface.parallelize"]
)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a value, an exception with its traceback, or a dead process (error is a RankDied)."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""
    elapsed: float = 0.0


class RankDied(Exception):
    """A rank ended without a result, or was killed at the deadline."""


class RankFailed(Exception):
    """A rank raised; the message is its traceback, the cause its exception."""


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 30.0,
    deadline: float = DEADLINE_S,
) -> list[Any]:
    """[function(group, *args)] of ranks 0..world-1; raises RankFailed with the first failing rank's traceback.

    timeout, deadline: seconds; of the group's collectives, and of the whole run.
    """
    return _values(outcomes(function, world, *args, timeout=timeout, deadline=deadline))


def outcomes(
    function: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 30.0,
    deadline: float = DEADLINE_S,
) -> list[Outcome]:
    """As run_ranks, but what each rank raised is part of the result; for tests of failure."""
    with Pool(world, timeout=timeout) as pool:
        return pool.outcomes(function, world, *args, deadline=deadline, grace=deadline)


class Pool:
    """`world` lasting ranks; a job runs on the first n of them, in a group of those n.

    After a failed job the groups may be out of step, so the next job starts new processes.
    """

    def __init__(
        self, world: int, timeout: float = 30.0, backend: str = "gloo", environment: dict[str, str] | None = None
    ) -> None:
        self.world, self.timeout = world, timeout
        self.backend, self.environment = backend, environment or {}
        self._ranks: list[tuple[Any, connection.Connection]] = []
        self._folder = ""

    def __enter__(self) -> Pool:
        atexit.register(self.close)
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], world: int, *args: Any, deadline: float = DEADLINE_S) -> list[Any]:
        """[function(group, *args)] of ranks 0..world-1, in a group of these ranks."""
        return _values(self.outcomes(function, world, *args, deadline=deadline))

    def outcomes(
        self,
        function: Callable[..., Any],
        world: int,
        *args: Any,
        deadline: float = DEADLINE_S,
        grace: float = _GRACE_S,
    ) -> list[Outcome]:
        """As run, but what each rank raised is part of the result. grace: seconds for the others after a failure."""
        if not 1 <= world <= self.world:
            raise ValueError(f"Pool: expected 1..{self.world} ranks, got {world}")
        if not self._ranks:
            self._start()
        end = time.monotonic() + deadline
        job = pickle.dumps((function, world, args))
        results: list[Outcome | None] = [None] * world
        pending: dict[connection.Connection, int] = {}
        for rank, (_, pipe) in enumerate(self._ranks[:world]):
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(job)
            pending[pipe] = rank
        while pending:
            ready = connection.wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                for rank in pending.values():
                    results[rank] = Outcome(error=RankDied(f"rank {rank}: no result within {deadline:.0f} s, killed"))
                break
            for pipe in [pipe for pipe in pending if pipe in ready]:
                rank = pending.pop(pipe)
                result = results[rank] = _receive(pipe, rank)
                if result.error is not None:
                    end = min(end, time.monotonic() + grace)
        done = [result for result in results if result is not None]
        if any(result.error is not None for result in done):
            self.close()
        return done

    def close(self) -> None:
        """Kill all ranks and wait for them."""
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []
        atexit.unregister(self.close)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="tbik-ranks-")
        for rank in range(self.world):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve,
                args=(
                    theirs,
                    rank,
                    self.world,
                    self._folder,
                    self.timeout,
                    list(sys.path),
                    self.backend,
                    self.environment,
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _receive(pipe: connection.Connection, rank: int) -> Outcome:
    try:
        outcome = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return Outcome(error=RankDied(f"rank {rank} died"))
    assert isinstance(outcome, Outcome)
    return outcome


def _values(results: Sequence[Outcome]) -> list[Any]:
    failed = [(rank, result) for rank, result in enumerate(results) if result.error is not None]
    if failed:
        # A rank that raised by itself explains more than the ranks that lost it.
        rank, first = min(failed, key=lambda item: item[1].elapsed if item[1].traceback else float("inf"))
        raise RankFailed(f"rank {rank} of {len(results)}:\n{first.traceback or first.error}") from first.error
    return [result.value for result in results]


def _serve(
    pipe: connection.Connection,
    rank: int,
    world: int,
    folder: str,
    timeout: float,
    path: list[str],
    backend: str,
    environment: dict[str, str],
) -> None:
    """A rank's life: jobs come in, outcomes go out, until the pipe closes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path[:] = path
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(environment)
    groups: dict[int, dist.ProcessGroup] = {}
    while True:
        try:
            job = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        start = time.monotonic()
        try:
            function, size, args = pickle.loads(job)
            group = _group(groups, rank, size, world, folder, timeout, backend)
            start = time.monotonic()
            outcome = Outcome(value=function(group, *args), elapsed=time.monotonic() - start)
        except BaseException as error:
            outcome = Outcome(error=error, traceback=traceback.format_exc(), elapsed=time.monotonic() - start)
        try:
            answer = pickle.dumps(outcome)
            pickle.loads(answer)  # some exceptions pickle but do not come back
        except Exception as error:
            text = outcome.traceback or traceback.format_exc()
            answer = pickle.dumps(Outcome(error=RankDied(f"unpicklable outcome: {error}"), traceback=text))
        pipe.send_bytes(answer)


def _group(
    groups: dict[int, dist.ProcessGroup], rank: int, size: int, world: int, folder: str, timeout: float, backend: str
) -> dist.ProcessGroup:
    """The group of ranks 0..size-1. A full-size group is also the default group, so that group=None means it."""
    if size not in groups:
        limit = datetime.timedelta(seconds=timeout)
        store = FileStore(os.path.join(folder, f"store-{size}"), size)
        if size == world:
            if backend == "tbik":
                import tbik.backend  # noqa: F401
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            assert dist.group.WORLD is not None
            groups[size] = dist.group.WORLD
        else:
            groups[size] = _plain_group(store, rank, size, limit, backend)
    return groups[size]


def _plain_group(store: Store, rank: int, size: int, limit: datetime.timedelta, name: str) -> dist.ProcessGroup:
    """A group that needs no default group, so that the other ranks of the pool need not take part."""
    group = dist.ProcessGroup(PrefixStore(f"{size}/", store), rank, size)
    if name == "tbik":
        from tbik.backend import make

        custom = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(custom)
        group._register_backend(
            torch.device("cpu"), custom, make(PrefixStore(f"{size}/tbik/", store), rank, size, limit)
        )
        return group
    backend = dist.ProcessGroupGloo(PrefixStore(f"{size}/gloo/", store), rank, size, limit)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
