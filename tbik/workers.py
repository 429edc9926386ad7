"""Ranks on this machine: n processes, one world on the loopback, one task, messages back; no orphans, no hanging.

    with Workers(n, task, argument) as workers:
        workers.tell(rank, message)
        for rank, message in workers.messages(): ...        ends when every rank's task has returned

`task(rank, link, argument)` is a module-level function; link.group(size) is the group of ranks 0..size-1 (None for 1),
link.send(message) and link.receive() talk to the parent. A rank waits for others in a collective only as long as the
group's timeout, so the parent should tell it to start when the others are ready.
A rank that raises, exits or is killed ends the run: TransportError naming the rank (PlanError and IntegrityError keep
their class). A rank dies with its parent. Every rank has one torch thread.
Errors: TransportTimeout if no rank says anything for `silence_s` seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from tbik.errors import IntegrityError, PlanError, TransportError, TransportTimeout


class Link:
    """A rank's way to its groups and to the parent."""

    def __init__(self, groups: dict[int, Any], pipe: connection.Connection) -> None:
        self._groups, self._pipe = groups, pipe

    def group(self, size: int) -> Any:
        return self._groups[size]

    def send(self, message: Any) -> None:
        self._pipe.send(("message", message))

    def receive(self) -> Any:
        return self._pipe.recv()


Task = Callable[[int, Link, Any], None]

SILENCE_S = 300.0
COLLECTIVE_S = 120.0
_SETTLE_S = 1.0  # how long another rank may take to show that it failed first
_LOST_A_PEER = ("RuntimeError", "DistBackendError", "DistNetworkError", "TransportError", "TransportTimeout")
_KEPT_CLASSES = {"PlanError": PlanError, "IntegrityError": IntegrityError}


class Workers:
    """The processes. sizes: the group sizes that the task will ask for. silence_s, collective_s: deadlines.

    backend: of torch.distributed. None: gloo where there are several ranks, and no world for one alone.
    """

    def __init__(
        self,
        world_size: int,
        task: Task,
        argument: Any,
        *,
        sizes: Sequence[int] = (),
        silence_s: float = SILENCE_S,
        collective_s: float = COLLECTIVE_S,
        backend: str | None = None,
    ) -> None:
        self.world_size, self._silence_s = world_size, silence_s
        self._folder = tempfile.mkdtemp(prefix="tbik-ranks-")
        self._processes: list[BaseProcess] = []
        self._pipes: list[connection.Connection] = []
        context = _context(task.__module__)
        settings = (world_size, sorted({*sizes, world_size}), self._folder, collective_s, backend)
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, theirs, task, argument, settings), daemon=True)
                self._pipes.append(ours)
                self._processes.append(process)
                process.start()
                theirs.close()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int | None]:
        return [process.pid for process in self._processes]

    def tell(self, rank: int, message: Any) -> None:
        """Where that rank is gone, `messages` says so."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipes[rank].send(message)

    def messages(self) -> Iterator[tuple[int, Any]]:
        """(rank, message) as they arrive, until every task has returned."""
        running = set(range(self.world_size))
        while running:
            pipes = {self._pipes[rank]: rank for rank in running}
            ends = {self._processes[rank].sentinel: rank for rank in running}
            ready = connection.wait([*pipes, *ends], timeout=self._silence_s)
            if not ready:
                raise TransportTimeout(
                    f"workers: no word from ranks {sorted(running)} for {self._silence_s:.0f} s; stopped all of them"
                )
            for pipe in [item for item in ready if isinstance(item, connection.Connection)]:
                rank = pipes[pipe]
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    self._raise_for_the_dead(rank)
                if kind == "returned":
                    running.discard(rank)
                elif kind == "raised":
                    self._raise(rank, *content)
                else:
                    yield rank, content
            for sentinel in [item for item in ready if item in ends]:
                rank = ends[sentinel]
                if rank in running and not self._pipes[rank].poll():
                    self._raise_for_the_dead(rank)

    def close(self) -> None:
        """Ends every process and waits for it."""
        for pipe in self._pipes:
            pipe.close()
        started = [process for process in self._processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _raise_for_the_dead(self, rank: int) -> None:
        self._processes[rank].join(_SETTLE_S)
        code = self._processes[rank].exitcode
        how = "ended without a word" if code is None else f"exited with code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory?)" if -code == signal.SIGKILL else ""
        raise TransportError(f"workers: rank {rank} of {self.world_size} {how}; stopped the other ranks")

    def _raise(self, rank: int, name: str, text: str, trace: str) -> None:
        """The error of the rank that failed first: a rank that lost a peer says so a moment after the peer was lost."""
        if name in _LOST_A_PEER:
            spoken = {rank}
            deadline = time.monotonic() + _SETTLE_S
            while time.monotonic() < deadline:
                for other in set(range(self.world_size)) - spoken:
                    kind, content = self._last_word(other)
                    if kind == "dead":
                        self._raise_for_the_dead(other)
                    if kind == "raised":
                        spoken.add(other)
                        if content[0] not in _LOST_A_PEER:
                            self._raise(other, *content)
                time.sleep(0.02)
        if name in _KEPT_CLASSES:
            raise _KEPT_CLASSES[name](text)
        raise TransportError(f"workers: rank {rank} of {self.world_size} raised {name}: {text}\n{trace}")

    def _last_word(self, rank: int) -> tuple[str, Any]:
        """("raised", ...) if that is in its pipe, ("dead", None) if it is gone without, else ("", None)."""
        try:
            while self._pipes[rank].poll():
                kind, content = self._pipes[rank].recv()
                if kind == "raised":
                    return kind, content
        except (EOFError, OSError):
            return "dead", None
        return ("", None) if self._processes[rank].is_alive() else ("dead", None)


def _context(module: str) -> Any:
    """Forks of a server that has imported `module` once and never ran anything: torch is not imported n times."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def _serve(rank: int, pipe: connection.Connection, task: Task, argument: Any, settings: tuple[Any, ...]) -> None:
    threading.Thread(target=_die_with_parent, daemon=True).start()
    # Ctrl-C reaches the whole process group; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        groups = _join_world(rank, *settings)
        task(rank, Link(groups, pipe), argument)
        pipe.send(("returned", None))
        # Stay until the parent ends it: a rank that leaves early breaks the connections of the others
        pipe.recv()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)
    except BaseException as error:
        pipe.send(("raised", (type(error).__name__, str(error), traceback.format_exc())))
        pipe.close()
        time.sleep(_SETTLE_S)
        os._exit(1)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _join_world(
    rank: int, world_size: int, sizes: Sequence[int], folder: str, collective_s: float, backend: str | None
) -> dict[int, Any]:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    if Path("/sys/class/net/lo").exists():  # the name of this host need not resolve
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if world_size == 1 and backend is None:
        return {1: None}
    limit = datetime.timedelta(seconds=collective_s)
    store = FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group(backend or "gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
    # every rank makes every group, in one order
    made = {size: dist.new_group(list(range(size)), timeout=limit) for size in sizes if size > 1}
    return {1: None, **made}
