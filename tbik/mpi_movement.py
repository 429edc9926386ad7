"""Bytes over MPI, with a limit on every wait: what tbik.launch and the "tbik" backend move where memory is not shared.

Only nonblocking calls, tested in turn until all are done or the limit has passed; MPI adds nothing. `mpi` is the module
mpi4py.MPI, which tbik/launch.py imports. All communicators here are our own, so that no message meets the program's.

    duplicate   a communicator of our own
    Wire        one message to and from every rank, of any length       (csrc/transport_mover.h)
    Movers      what process groups use: one tag per group              (csrc/movement.h)

Errors: TransportTimeout naming the ranks that did not come; TransportError where MPI fails, a message has another size
or the process of a rank on this host is gone; PlanError where tags run out.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from tbik.errors import PlanError, TbikError, TransportError, TransportTimeout

_TEXT_BYTES = 8192
_YIELDS = 200
_PAIR_TAGS = 1024
_PIECE_BYTES = 1 << 30

_abandoned: list[Any] = []  # what MPI may still read or write after a wait that failed


def duplicate(mpi: Any, comm: Any, where: str, limit_s: float) -> Any:
    """A communicator of our own with the ranks of comm. Errors: TransportTimeout naming who has not been heard of."""
    rank, size = comm.Get_rank(), comm.Get_size()
    signs = [np.zeros(1, np.uint8) for _ in range(size)]  # one broadcast per rank: shows who has come
    arrivals = [comm.Ibcast([sign, mpi.BYTE], root=p) for p, sign in enumerate(signs)]
    private, request = comm.Idup()
    clock = Clock(limit_s)
    done = [False] * size
    while not request.Test() or not all(done):
        done = [before or arrival.Test() for before, arrival in zip(done, arrivals, strict=True)]
        if clock.is_over():
            _abandoned.append((signs, arrivals, private, request))
            missing = [p for p in range(size) if not done[p]] or [p for p in range(size) if p != rank]
            raise TransportTimeout(
                f"{where}, rank {rank} of {size}: waited {clock.elapsed_s():.2f} s (limit {limit_s:.2f} s) for the "
                f"first call of rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} on this "
                "communicator. All its ranks must make the same calls"
            )
        clock.pause()
    return private


class Clock:
    """Of one wait: lets other processes run, first at once, then in slices of up to a millisecond."""

    def __init__(self, limit_s: float) -> None:
        self.start, self.limit_s, self.turns = time.monotonic(), limit_s, 0

    def elapsed_s(self) -> float:
        return time.monotonic() - self.start

    def is_over(self) -> bool:
        return self.elapsed_s() > self.limit_s

    def pause(self) -> None:
        self.turns += 1
        if self.turns < _YIELDS:
            os.sched_yield()
        else:
            time.sleep(min(1e-3, 1e-5 * (self.turns - _YIELDS + 1)))


class Wire:
    """Messages between the ranks `members` of a communicator of our own, under one tag. One thread at a time."""

    def __init__(self, mpi: Any, comm: Any, members: list[int] | None = None, tag: int = 0) -> None:
        self.mpi, self.comm, self.tag = mpi, comm, tag
        self.members = list(range(comm.Get_size())) if members is None else members
        self.rank = self.members.index(comm.Get_rank())
        self.pids = [0] * len(self.members)  # 0: not on this host

    def move(self, to: list[Any], from_: list[Any], what: str, limit_s: float) -> None:
        """to[p] travels to rank p, p's message to from_[p]; None = nothing. A message that is longer is cut off.

        Errors: TransportTimeout, TransportError naming the ranks.
        """
        with moving_bytes(what):
            self._move(to, from_, what, limit_s)

    def _move(self, to: list[Any], from_: list[Any], what: str, limit_s: float) -> None:
        mpi, tag = self.mpi, self.tag
        sends = {
            p: self.comm.Isend([view, mpi.BYTE], self.members[p], tag) for p, view in enumerate(to) if view is not None
        }
        waiting = {p: view for p, view in enumerate(from_) if view is not None}
        arriving: dict[int, tuple[Any, Any, Any]] = {}
        clock = Clock(limit_s)
        try:
            self._finish(waiting, arriving, sends, what, clock)
        except BaseException:
            _abandoned.append((arriving, sends))
            raise

    def _finish(self, waiting: Any, arriving: Any, sends: Any, what: str, clock: Clock) -> None:
        mpi, tag, status = self.mpi, self.tag, self.mpi.Status()
        while waiting or arriving or sends:
            moved = False
            for p in list(waiting):
                message = self.comm.Improbe(self.members[p], tag, status)
                if message is None:
                    continue
                view, length = waiting.pop(p), status.Get_count(mpi.BYTE)
                room = view if length <= len(view) else bytearray(length)
                arriving[p] = (message.Irecv([room, length, mpi.BYTE]), room, view)
                moved = True
            for p, (request, room, view) in list(arriving.items()):
                if request.Test():
                    if room is not view:
                        view[:] = room[: len(view)]
                    del arriving[p]
                    moved = True
            for p in [p for p, request in sends.items() if request.Test()]:
                del sends[p]
                moved = True
            if not moved:
                self.require_alive(sorted({*waiting, *arriving, *sends}), clock, what)
                clock.pause()

    def require_alive(self, missing: list[int], clock: Clock, what: str) -> None:
        """Errors: TransportTimeout at the limit, TransportError where the process of one of the ranks is gone."""
        ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        if clock.is_over():
            raise TransportTimeout(
                f"mpi: {what}: waited {clock.elapsed_s():.2f} s (limit {clock.limit_s:.2f} s) for {ranks}: see what it "
                "is doing; perhaps it makes other calls, or fewer, than this rank"
            )
        if clock.turns > _YIELDS and clock.turns % 64 == 0:
            for p in missing:
                if self.pids[p] and not _lives(self.pids[p]):
                    raise TransportError(
                        f"mpi: {what}: waited {clock.elapsed_s():.2f} s for {ranks}; process {self.pids[p]} of rank "
                        f"{p} is gone: look at its log and for the kernel's out-of-memory messages"
                    )

    def gather(self, text: str, what: str, limit_s: float) -> list[str]:
        """Every rank's text. Errors: as move."""
        size = len(self.members)
        own = text.encode()[:_TEXT_BYTES]
        message = bytearray(len(own).to_bytes(8, "little") + own)
        rooms = [bytearray(8 + _TEXT_BYTES) for _ in range(size)]
        others = [p != self.rank for p in range(size)]
        self.move(
            [memoryview(message) if other else None for other in others],
            [memoryview(room) if other else None for room, other in zip(rooms, others, strict=True)],
            f"launch.allreduce, rank {self.rank} of {size}, {what}",
            limit_s,
        )
        rooms[self.rank] = message
        return [bytes(room[8 : 8 + int.from_bytes(room[:8], "little")]).decode() for room in rooms]


class Movers:
    """MPI for the process groups of this process: three communicators of our own, one tag per group."""

    name = "mpi"

    def __init__(self, mpi: Any, limit_s: float) -> None:
        self.mpi, self.next_tag = mpi, 0
        self.reductions, self.exchanges, self.pairs = (
            duplicate(mpi, mpi.COMM_WORLD, "launch.init", limit_s) for _ in range(3)
        )

    def offer(self) -> list[int]:
        """What a group's other members need: this process's rank in the world, the first tag it has not used."""
        return [self.mpi.COMM_WORLD.Get_rank(), self.next_tag]

    def open(self, offers: list[list[int]]) -> Mover:
        """For the group of these members. Two groups that share a rank never share a tag."""
        tag = max(offer[1] for offer in offers)
        highest = self.mpi.COMM_WORLD.Get_attr(self.mpi.TAG_UB)
        if (tag + 1) * _PAIR_TAGS > highest:
            raise PlanError(f"launch: movement 'mpi' has no tag left for group {tag}; this MPI has {highest}")
        self.next_tag = tag + 1
        return Mover(self, [offer[0] for offer in offers], tag)


class Mover:
    """What csrc/movement.h and csrc/transport_mover.h ask for, for one group."""

    name = "mpi"

    def __init__(self, movers: Movers, members: list[int], tag: int) -> None:
        self.mpi, self.movers, self.members, self.tag = movers.mpi, movers, members, tag
        self.move = Wire(movers.mpi, movers.reductions, members, tag).move

    def exchange(self, to: list[Any], from_: list[Any]) -> Request:
        request = Request(self)
        for p, tensor in enumerate(from_):
            request.receive(self.movers.exchanges, tensor, p, self.tag)
        for p, tensor in enumerate(to):
            request.send(self.movers.exchanges, tensor, p, self.tag)
        return request

    def send(self, tensor: Any, rank: int, tag: int) -> Request:
        request = Request(self)
        request.send(self.movers.pairs, tensor, rank, self._pair_tag(tag))
        return request

    def receive(self, tensor: Any, rank: int, tag: int) -> Request:
        request = Request(self)
        request.receive(self.movers.pairs, tensor, rank, self._pair_tag(tag))
        return request

    def _pair_tag(self, tag: int) -> int:
        if not 0 <= tag < _PAIR_TAGS:
            raise PlanError(f"movement 'mpi' carries tags 0..{_PAIR_TAGS - 1}, got {tag}")
        return self.tag * _PAIR_TAGS + tag


class Request:
    """Sends and receives under way."""

    def __init__(self, mover: Mover) -> None:
        self.mover, self.source = mover, -1
        self.open: list[tuple[Any, int, int]] = []  # request, rank, bytes to receive or -1

    def send(self, comm: Any, tensor: Any, rank: int, tag: int) -> None:
        for piece in _pieces(tensor):
            self.open.append((comm.Isend([piece, self.mover.mpi.BYTE], self.mover.members[rank], tag), rank, -1))

    def receive(self, comm: Any, tensor: Any, rank: int, tag: int) -> None:
        source = self.mover.mpi.ANY_SOURCE if rank < 0 else self.mover.members[rank]
        for piece in _pieces(tensor):
            self.open.append((comm.Irecv([piece, self.mover.mpi.BYTE], source, tag), rank, piece.nbytes))

    def test(self) -> bool:
        mpi, still = self.mover.mpi, []
        for request, rank, expected in self.open:
            status = mpi.Status()
            if not request.Test(status):
                still.append((request, rank, expected))
            elif expected >= 0:
                self.source = self.mover.members.index(status.Get_source())
                if status.Get_count(mpi.BYTE) != expected:
                    raise TransportError(
                        f"mpi: expected {expected} bytes from rank {self.source}, got {status.Get_count(mpi.BYTE)}: "
                        "the ranks make different calls"
                    )
        self.open = still
        return not still

    def wait(self, limit_s: float, what: str) -> None:
        clock = Clock(limit_s)
        with moving_bytes(what):
            while not self.test():
                if clock.is_over():
                    _abandoned.append(self)
                    ranks = sorted({rank for _, rank, _ in self.open})
                    raise TransportTimeout(
                        f"mpi: {what}, rank {self.mover.members.index(self.mover.movers.offer()[0])} of "
                        f"{len(self.mover.members)}: waited {clock.elapsed_s():.2f} s (limit {limit_s:.2f} s) for rank"
                        f"{'s' if len(ranks) > 1 else ''} {', '.join('any' if r < 0 else str(r) for r in ranks)}"
                    )
                clock.pause()


def _pieces(tensor: Any) -> Iterator[np.ndarray]:
    """A tensor of bytes in runs that every MPI's counts can hold; None has none."""
    if tensor is not None:
        flat = tensor.numpy()
        for at in range(0, flat.size, _PIECE_BYTES) if flat.size else (0,):
            yield flat[at : at + _PIECE_BYTES]


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@contextlib.contextmanager
def moving_bytes(what: str) -> Iterator[None]:
    """What MPI raises becomes a TransportError that says where."""
    try:
        yield
    except TbikError:
        raise
    except RuntimeError as error:  # MPI.Exception derives from it
        raise TransportError(f"mpi: {what}: MPI failed; the communicator is not usable any more: {error}") from error
