"""Reductions over memory that all ranks of one host have mapped: segments, handles, offsets, deadlines.

    peers = Peers(library, device, rank, size, exchange)     one segment per rank, opened by all
    peers.all_reduce(x)                                       x = cast(node(0, W) of the ranks' x)      (ORDER.md B1)
    peers.fold(rows, order, out, ...)                         out = cast(node(0, L) / divisor + bias)   (T4, T5, A7)

    segment   Header | staging of even calls | of odd calls | results of even calls | of odd calls

What a kernel does with it is written in csrc/cuda/peer_reduce.h; here is who gives it which addresses and elements. The
placement is chosen by size and cannot change a bit: one_shot (everybody reads all rows, folds everything) up to
ONE_SHOT_BYTES, two_shot (fold my chunk, read the others' results) above; longer messages take several launches.

Segments: CUDA IPC (also where ranks share a GPU), or torch's symmetric memory where a segment cannot be exported
(TBIK_PEER_MEMORY=auto | ipc | symmetric). The ranks exchange handles once, through `exchange`, and decide alike.

A launch goes to the caller's current stream and returns at once. CUDA graphs may capture it: call numbers are counted
on the device. The launches of a group must run one after another on each rank; a launch on another stream than the one
before waits for it. Deadlines: waits on the device end after timeout_s; the rank that met the limit, its peer, phase,
expected and seen number are in a Status that the host reads before each call, in check() and in synchronize().
Errors: PlanError at construction and for calls that cannot be served, at once; TransportTimeout, TransportError
afterwards: the output of that call and of later ones is undefined, and the group is not usable any more. Inputs that
are not outputs are never written.

close() gives everything back, on all ranks and after the group's last launch (peer_reductions has the agreement); a
group that is dropped without it gives back what no other rank can be reading (_Held.release).

Suffixes: W ranks, K rows of a rank, N elements. dtypes: float32, float64, bfloat16, float16, int32, int64.
Bits: those of tbik.collectives and of the "tbik" backend on the CPU (tests/test_peer_memory.py).
"""

from __future__ import annotations

import hashlib
import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tbik import _C, __version__, tree
from tbik.errors import PlanError, TransportError, TransportTimeout
from tbik.peer_library import (
    ELEMENTS,
    GAVE_UP,
    GRANULE,
    MAX_BLOCKS,
    MAX_RANKS,
    MISMATCH,
    OPS,
    PHASES,
    PLACEMENTS,
    Call,
    Library,
)
from tbik.tree import ORDER_VERSION

STAGING_BYTES = 16 << 20
"""Of one rank's rows in one launch; a segment has four such areas."""

ONE_SHOT_BYTES = 256 << 10
"""Largest message of a rank that more than two ranks read whole."""

BLOCK_BYTES = 16 << 10
"""What one block of threads is given at least."""

_KINDS = ("auto", "ipc", "symmetric")
_COLLECTIVES = ("all_reduce", "reduce_scatter")
_DIFFERENT_PER_RANK = ("rank", "pid", "start_time", "device", "address", "handle", "failure")
_KNOWN_CALLS = 256

Exchange = Callable[[str, dict[str, Any]], list[dict[str, Any]]]
"""(key, this rank's record) -> the records of all ranks; blocks, with a limit of its own."""


class Order(NamedTuple):
    """Which additions: input i of the schedule is row sources[i][1] of rank sources[i][0]."""

    sources: tuple[tuple[int, int], ...]
    schedule: Any


class _Launch(NamedTuple):
    """A prepared call and where its elements begin in x and out."""

    call: Call
    first_in: int
    first_out: int


@dataclass
class _Segment:
    """This rank's memory and everybody's addresses in this process."""

    own: int
    addresses: list[int]
    opened: list[int]
    keep: Any = None  # a tensor of symmetric memory and its handle


@dataclass
class _Held:
    """What a Peers has to give back; no reference to it, so that its finalizer can."""

    driver: Library
    device: int
    pid: int
    segment: _Segment | None = None
    status: Any = None
    may_be_read: bool = False  # others read the own segment, where freeing it takes it from under them

    def release(self, frees_own: bool) -> list[str]:
        """Waits for this rank's device, then tries every step; what failed, in words. The second time: nothing.

        frees_own: no other rank reads this rank's segment any more. Not known to a finalizer: then the segment stays
        until the process ends where `may_be_read`, since CUDA leaves undefined what importers see of freed memory.
        """
        segment, self.segment = self.segment, None
        status, self.status = self.status, None
        if os.getpid() != self.pid or (segment is None and status is None):  # after a fork all of it is the parent's
            return []
        steps: list[Callable[[], None]] = [lambda: self.driver.synchronize(self.device)]
        if segment is not None:
            steps += [lambda address=address: self.driver.close(self.device, address) for address in segment.opened]  # type: ignore[misc]
            if segment.keep is None and (frees_own or not self.may_be_read):
                steps.append(lambda: self.driver.free(self.device, segment.own))
        if status is not None:
            steps.append(lambda: self.driver.free_status(self.device, status))
        failures = []
        for step in steps:
            try:
                step()
            except TransportError as error:
                failures.append(str(error))
        return failures

    def drop(self) -> None:
        """The finalizer's part."""
        keeps = self.segment is not None and self.segment.keep is None and self.may_be_read
        failures = self.release(frees_own=False)
        if keeps and os.getpid() == self.pid:
            failures.append("its own segment stays allocated until the process ends")
        if failures:
            text = f"peer memory: a group was dropped without close() on all its ranks: {'; '.join(failures)}"
            warnings.warn(text, ResourceWarning, stacklevel=2)


class Peers:
    """The segments of one group. One thread at a time."""

    def __init__(
        self,
        library: Library,
        device: int,
        rank: int,
        size: int,
        exchange: Exchange,
        *,
        timeout_s: float,
        host: str = "",
        group: Any = None,
        staging_bytes: int = STAGING_BYTES,
        memory: str | None = None,
    ) -> None:
        """host: what tells this host from others, its boot id by default. group: for symmetric memory.

        Errors: PlanError on all ranks where they run on several hosts, disagree, or one cannot open a segment.
        """
        self.driver, self.device, self.rank, self.size = library, device, rank, size
        self.timeout_s, self.staging_bytes = timeout_s, staging_bytes
        self.memory = os.environ.get("TBIK_PEER_MEMORY", "auto") if memory is None else memory
        self.calls = 0
        self._broken = ""
        self._failure: TransportError | None = None
        self._known: dict[tuple[Any, ...], list[_Launch]] = {}
        self._last: tuple[int, Any] | None = None
        self._held = _Held(library, device, os.getpid())
        # Not at the end of the process, which gives everything back by itself and must not wait for kernels.
        self._finalizer = weakref.finalize(self, self._held.drop)
        self._finalizer.atexit = False
        refusal = self._refusal(staging_bytes)
        self.segment_bytes = library.header_bytes + 4 * staging_bytes
        try:
            records = exchange("peer memory", self._offer(host, refusal))
            _require_same(records)
        except BaseException:
            self._give_back(frees_own=True)  # nobody has opened it
            raise
        self._pids = [(int(record["pid"]), str(record["start_time"])) for record in records]
        shares_process = sum(pid == self._pids[rank] for pid in self._pids) > 1
        self._held.may_be_read = size > 1 and (library.device_type == "cuda" or shares_process)
        failure = ""
        try:
            self._held.segment = self._open(records, group)
            self._held.status, self._status_address = library.allocate_status(device)
        except (TransportError, RuntimeError) as error:
            failure = f"rank {rank}: {error}"
        try:
            failures = [record["failure"] for record in exchange("peer memory opened", {"failure": failure})]
        finally:
            if self._segment is not None and self._segment.keep is None:
                library.seal(device, self._segment.own)
        if any(failures):
            self._give_back(frees_own=True)  # no kernel of any rank has it
            raise PlanError(
                "peer memory: the ranks cannot open each other's segments: "
                + "; ".join(text for text in failures if text)
                + ". The devices of all ranks must be able to read each other (NVLink or PCIe peer access, one host)"
            )

    # --- segments and handles ---------------------------------------------------------------------------------------

    def _refusal(self, staging_bytes: int) -> str:
        if self.memory not in _KINDS:
            return f"TBIK_PEER_MEMORY: expected one of {_KINDS}, got {self.memory!r}"
        if not 1 <= self.size <= MAX_RANKS:
            return f"expected 1 to {MAX_RANKS} ranks, got {self.size}"
        if staging_bytes < 4096 or staging_bytes % 4096:
            return f"expected staging_bytes to be a multiple of 4096, got {staging_bytes}"
        return ""

    def _offer(self, host: str, refusal: str) -> dict[str, Any]:
        """What this rank tells the others; the segment is made here, so that its handle can travel."""
        handle, name = "", ""
        try:
            name = self.driver.device_name(self.device)
            if not refusal and self.memory != "symmetric":
                own, raw = self.driver.allocate(self.device, self.segment_bytes)
                self._held.segment = _Segment(own, [], [])
                handle = raw.hex()
        except TransportError as error:
            refusal = refusal or (str(error) if self.memory == "ipc" else "")
        return {
            "rank": self.rank,
            "tbik": __version__,
            "order_version": ORDER_VERSION,
            "world_size": self.size,
            "host": host or _boot_id(),
            "device": name,
            "device type": self.driver.device_type,
            "staging_bytes": self.staging_bytes,
            "memory": self.memory,
            "pid": os.getpid(),
            "start_time": _process(os.getpid())[1],
            "address": 0 if self._segment is None else self._segment.own,
            "handle": handle,
            "failure": refusal,
        }

    def _open(self, records: Sequence[dict[str, Any]], group: Any) -> _Segment:
        if any(not record["handle"] for record in records):  # alike on all ranks
            segment, self._held.segment = self._segment, None
            if segment is not None:
                self.driver.free(self.device, segment.own)
            return _symmetric(group, self.device, self.segment_bytes, self.size)
        segment = self._segment
        assert segment is not None
        ordinals = {self.driver.device_name(device): device for device in range(self.driver.device_count())}
        for record in records:
            peer = ordinals.get(record["device"])  # None: hidden from this process, so only opening shows
            if peer is not None and not self.driver.can_access(self.device, peer):
                raise TransportError(f"its device cannot read {record['device']}, the device of rank {record['rank']}")
            if (record["pid"], record["start_time"]) == (os.getpid(), _process(os.getpid())[1]):
                address = int(record["address"])  # a process cannot open what it exports
            else:
                address = self.driver.open(self.device, bytes.fromhex(record["handle"]), self.segment_bytes)
                segment.opened.append(address)
            segment.addresses.append(address)
        return segment

    @property
    def _segment(self) -> _Segment | None:
        return self._held.segment

    @property
    def is_closed(self) -> bool:
        return self._held.segment is None

    def close(self, *, peers_left: bool = True) -> None:
        """Give everything back: the peers' segments, this rank's own, the Status. The second time: nothing.

        No launch of any rank may be under way or follow, nor the replay of a graph: kernels of all ranks read all
        segments. peers_left=False: not known of the others, as for a group that is dropped; the own segment then stays
        where they might read it. Later calls: TransportError; check() tells what kernels had met before.
        Errors: TransportError that names the steps that failed; the others are done.
        """
        if self.is_closed:
            return
        failures = self._give_back(frees_own=peers_left)
        if failures:
            raise TransportError(f"peer memory: close, rank {self.rank} of {self.size}: {'; '.join(failures)}")

    def give_up(self, reason: str) -> None:
        """Refuse all later calls; nothing is waited for or given back."""
        self._broken = self._broken or reason

    def _give_back(self, frees_own: bool) -> list[str]:
        self._finalizer.detach()
        failures = []
        if self._held.status is not None and os.getpid() == self._held.pid:
            try:  # what kernels have met is in the Status, which is given back
                self.driver.synchronize(self.device)
            except TransportError as error:
                failures.append(str(error))
            self._look()
        failures += [text for text in self._held.release(frees_own) if text not in failures]
        self._broken = self._broken or "it was closed"
        return failures

    # --- calls ------------------------------------------------------------------------------------------------------

    def all_reduce(
        self, x: Tensor, *, op: str = "sum", factor: float = 1.0, placement: str = "auto", out: Tensor | None = None
    ) -> Tensor:
        """out = cast(node(0, W)) of the ranks' x, on every rank; x itself where out is None.

        op: sum, avg, product, min, max, premul_sum (with `factor`). Integers have no avg and premul_sum.
        """
        out = x if out is None else out
        self._require(x, "all_reduce", op)
        self.fold(x.view(1, -1), _ranks_order(self.size), out, op=op, factor=factor, placement=placement)
        return out

    def reduce_scatter(self, out: Tensor, x: Tensor, *, op: str = "sum", factor: float = 1.0) -> Tensor:
        """out = elements [rank * N/W, (rank + 1) * N/W) of all_reduce(x), N = x.numel()."""
        self._require(x, "reduce_scatter", op)
        self.fold(x.view(1, -1), _ranks_order(self.size), out, op=op, factor=factor, scatter=True)
        return out

    def fold(
        self,
        rows_KN: Tensor,
        order: Order,
        out: Tensor,
        *,
        counts: Sequence[int] | None = None,
        op: str = "sum",
        factor: float = 1.0,
        divisor: int = 1,
        bias: Tensor | None = None,
        rounds: bool = False,
        placement: str = "auto",
        scatter: bool = False,
        agreed: str = "",
    ) -> None:
        """out = cast(node(0, L) of all ranks' rows / divisor + bias), whole or (scatter) this rank's W-th.

        rows_KN: this rank's rows, each contiguous; counts: rows of every rank, 1 by default. bias [C], C divides N, in
        the accumulation dtype. rounds: the tree is one of a bfloat16 wire. agreed: more that must be alike.
        Errors: PlanError; TransportTimeout, TransportError of earlier calls.
        """
        collective = "reduce_scatter" if scatter else "all_reduce"
        self.check()
        if self._broken:
            raise TransportError(f"peer memory: {collective}, rank {self.rank} of {self.size}: {self._broken}")
        n = rows_KN.shape[1]
        self._require(rows_KN, collective, op, is_matrix=True)
        if not self._is_ours(out) or not out.is_contiguous() or out.numel() != (n // self.size if scatter else n):
            raise PlanError(
                f"peer memory: {collective}: expected a contiguous out of {n // self.size if scatter else n} elements "
                f"on this rank's device, got {out.dtype} {list(out.shape)} on {out.device}"
            )
        if scatter and n % self.size:
            raise PlanError(f"peer memory: {collective}: {self.size} ranks do not divide {n} elements")
        if n == 0:
            return
        divisor = self.size if op == "avg" else divisor
        columns = 0 if bias is None else bias.numel()
        row_stride = rows_KN.stride(0) if rows_KN.shape[0] > 1 else n
        key = (
            *(n, rows_KN.shape[0], row_stride, rows_KN.dtype, out.dtype, order, tuple(counts or ()), op, divisor),
            *(columns, rounds, placement, scatter, agreed),
        )
        launches = self._known.get(key)
        if launches is None:
            counts = [1] * self.size if counts is None else list(counts)
            if len(self._known) >= _KNOWN_CALLS:
                self._known.clear()
            launches = self._known[key] = self._prepare(
                rows_KN, row_stride, order, out, counts, op, divisor, columns, rounds, placement, scatter, agreed
            )
        stream = self._follow_last()
        for call, first_in, first_out in launches:
            call.x = rows_KN.data_ptr() + first_in * rows_KN.element_size()
            call.out = out.data_ptr() + first_out * out.element_size()
            call.bias = 0 if bias is None else bias.data_ptr()
            call.factor = factor
            self.driver.launch(self.device, call, stream)
            self.calls += 1

    def _prepare(
        self,
        rows_KN: Tensor,
        row_stride: int,
        order: Order,
        out: Tensor,
        counts: Sequence[int],
        op: str,
        divisor: int,
        columns: int,
        rounds: bool,
        placement: str,
        scatter: bool,
        agreed: str,
    ) -> list[_Launch]:
        """The launches of one message, all but the addresses."""
        assert self._segment is not None
        if len(counts) != self.size or counts[self.rank] != rows_KN.shape[0]:
            raise PlanError(f"peer memory: expected one count of rows per rank, {rows_KN.shape[0]} here, got {counts}")
        n, item = rows_KN.shape[1], rows_KN.element_size()
        placement = choose_placement(n * max(1, *counts) * item, self.size, placement, scatter)
        program = Call(rank=self.rank, size=self.size)
        self.driver.set_program(program, order.schedule.steps, order.sources, rounds)
        text = repr((order.sources, order.schedule.steps, list(counts), rounds, divisor, columns, placement, agreed))
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        areas = [self.driver.header_bytes + area * self.staging_bytes for area in range(4)]
        launches = []
        for piece in pieces(n, max(1, *counts) * item, self.size, placement, self.staging_bytes):
            call = Call.from_buffer_copy(program)
            call.segments[: self.size] = self._segment.addresses
            call.status = self._status_address
            call.staging[:], call.results[:] = areas[:2], areas[2:]
            call.count, call.width, call.num_chunks = piece.num_elements, piece.width, piece.num_chunks
            call.chunk_stride, call.row_stride = piece.chunk_stride, row_stride
            call.pitch = piece.num_chunks * _round_up(piece.width, GRANULE)
            call.columns, call.bias_first, call.divisor = columns or 1, piece.first, divisor
            call.limit_ns = int(self.timeout_s * 1e9)
            call.rows = rows_KN.shape[0]
            call.op, call.placement = OPS[op], PLACEMENTS[placement]
            call.element, call.out_element = ELEMENTS[rows_KN.dtype], ELEMENTS[out.dtype]
            call.blocks = min(MAX_BLOCKS, -(-piece.width * item // BLOCK_BYTES))
            call.what = _what(scatter, op, call.element, call.out_element, piece.num_elements)
            call.order = digest
            launches.append(_Launch(call, piece.first, piece.first))
        return launches

    def _require(self, x: Tensor, collective: str, op: str, is_matrix: bool = False) -> None:
        if not self._is_ours(x) or x.dtype not in ELEMENTS:
            raise PlanError(
                f"peer memory: {collective}: expected a dense tensor of float32, float64, bfloat16, float16, int32 or "
                f"int64 on this rank's device ({self.driver.device_type} {self.device}), got {x.dtype} on {x.device}"
            )
        if op not in OPS or (op in ("avg", "premul_sum") and not x.is_floating_point()):
            raise PlanError(f"peer memory: {collective}: {op} of {x.dtype} is not defined; expected one of {list(OPS)}")
        dense = x.dim() == 2 and (x.shape[1] < 2 or x.stride(1) == 1) if is_matrix else x.is_contiguous()
        if not dense:
            raise PlanError(f"peer memory: {collective}: expected contiguous elements, got strides {list(x.stride())}")

    def _is_ours(self, x: Tensor) -> bool:
        is_cuda = self.driver.device_type == "cuda"
        return x.device.type == self.driver.device_type and (not is_cuda or x.device.index == self.device)

    def _follow_last(self) -> int:
        """The current stream, behind this group's last launch."""
        stream = self.driver.stream(self.device)
        if self.driver.device_type == "cuda" and not torch.cuda.is_current_stream_capturing():
            if self._last is not None and self._last[0] != stream:
                torch.cuda.current_stream(self.device).wait_stream(self._last[1])
            self._last = (stream, torch.cuda.current_stream(self.device))
        return stream

    # --- what went wrong --------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Everything of this device has ended; then check()."""
        self.driver.synchronize(self.device)
        self.check()

    def check(self) -> None:
        """Raise what a kernel has met. Does not wait; also sees failures of replayed graphs."""
        self._look()
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    def _look(self) -> None:
        """The first failure that the Status shows; kept."""
        if self._failure is not None or self._held.status is None or self._held.status.contents.failure == 0:
            return
        self._failure = self._failure_of(self._held.status.contents)

    def _failure_of(self, status: Any) -> TransportError:
        self._broken = f"call {status.expected} of this group failed"
        where = (
            f"peer memory, call {status.expected} of this group, rank {self.rank} of {self.size}, phase "
            f"'{PHASES[status.phase]}', block {status.block}"
        )
        end = (
            " The output of that call and of all later ones is undefined. Destroy the group and make a new one; look "
            "for the rank that failed first"
        )
        peer = status.peer
        if status.failure == MISMATCH:
            return TransportError(
                f"{where}: rank {peer} makes another call than this rank, there: {_spell(status.what)}, additions "
                f"#{status.order % 100000}. The ranks must make the same calls in the same order.{end}"
            )
        waited = f"waited {status.waited_ns / 1e9:.2f} s (limit {self.timeout_s:.2f} s, the timeout of this group)"
        if status.failure == GAVE_UP:
            return TransportError(f"{where}: rank {peer} has given up: its own error says why.{end}")
        return TransportTimeout(
            f"{where}: {waited} for rank {peer}, expected its number {status.expected}, got {status.seen}. "
            f"{self._state_of(peer)}.{end}"
        )

    def _state_of(self, peer: int) -> str:
        pid, start_time = self._pids[peer]
        state, start = _process(pid)
        if not state or state in "ZX" or start != start_time:
            return f"Its process {pid} is gone: look at the log of rank {peer}"
        if state in "Tt":
            return f"Its process {pid} is stopped (SIGSTOP or a debugger)"
        return f"Its process {pid} lives: see what rank {peer} is doing; perhaps it makes other calls, or fewer"


class Piece(NamedTuple):
    """The elements of one launch: chunk c begins at first + c * chunk_stride and has min(width, count - c * width)."""

    first: int
    num_elements: int
    width: int
    num_chunks: int
    chunk_stride: int


def choose_placement(num_bytes: int, size: int, asked: str, scatter: bool) -> str:
    """one_shot, two_shot or scatter for a message of num_bytes per rank. Cannot change a bit. Errors: PlanError."""
    if asked not in ("auto", "one_shot", "two_shot"):
        raise PlanError(f"peer memory: placement must be 'auto', 'one_shot' or 'two_shot', got {asked!r}")
    if scatter:
        return "scatter"
    if asked != "auto" and size > 1:
        return asked
    # Of two ranks each reads as much in both placements, and one_shot meets once.
    return "one_shot" if size <= 2 or num_bytes <= ONE_SHOT_BYTES else "two_shot"


def pieces(n: int, bytes_per_element: int, size: int, placement: str, staging_bytes: int) -> list[Piece]:
    """n elements of a root in launches whose staging holds all chunks; bytes_per_element: of the longest rank's rows.

    Errors: PlanError.
    """
    most = staging_bytes // bytes_per_element // GRANULE * GRANULE
    chunks = 1 if placement == "one_shot" else size
    most = most // chunks // GRANULE * GRANULE * chunks
    if most < 1:
        raise PlanError(
            f"peer memory: {bytes_per_element} bytes per element and {chunks} chunks do not fit into {staging_bytes} "
            "bytes of staging"
        )
    if placement == "scatter":
        width = n // size
        step = most // size
        return [
            Piece(at, min(step, width - at) * size, min(step, width - at), size, width) for at in range(0, width, step)
        ]
    result = []
    for at in range(0, n, most):
        count = min(most, n - at)
        width = count if chunks == 1 else _round_up(-(-count // chunks), GRANULE)
        result.append(Piece(at, count, width, chunks, width))
    return result


@lru_cache(maxsize=1024)
def order_of_runs(runs: tuple[tuple[int, int], ...], leaves: int, rounds: bool) -> tuple[Order, tuple[int, ...]]:
    """The additions above the covers of the ranks' runs of leaves, and how many rows each rank has."""
    held = [(node.lo, node, rank, row) for rank, run in enumerate(runs) for row, node in enumerate(tree.cover(*run))]
    held.sort()
    schedule = _C.nodes_schedule([node for _, node, _, _ in held], leaves, rounds)
    counts = tuple(len(tree.cover(*run)) for run in runs)
    return Order(tuple((rank, row) for _, _, rank, row in held), schedule), counts


def _ranks_order(size: int) -> Order:
    """One leaf per rank (B1)."""
    if size not in _orders:
        sources = tuple((rank, 0) for rank in range(size))
        _orders[size] = Order(sources, _C.run_schedule(0, size, size, True))
    return _orders[size]


_orders: dict[int, Order] = {}


def _symmetric(group: Any, device: int, num_bytes: int, size: int) -> _Segment:
    """The segments as torch's symmetric memory. Errors: TransportError, RuntimeError of torch."""
    if group is None or not torch.cuda.is_available():
        raise TransportError("a rank has no exportable segment, and there is no group for symmetric memory")
    from torch.distributed import _symmetric_memory as symmetric

    tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=torch.device("cuda", device))
    tensor.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(tensor, group)
    addresses = [int(address) for address in handle.buffer_ptrs]
    if len(addresses) != size:
        raise TransportError(f"symmetric memory has {len(addresses)} segments, expected {size}")
    return _Segment(addresses[handle.rank], addresses, [], (tensor, handle))


def _require_same(records: Sequence[dict[str, Any]]) -> None:
    """PlanError naming what each rank said, on all ranks, unless all said the same and none refuses."""
    lines = [f"rank {record['rank']}: {record['failure']}" for record in records if record["failure"]]
    for name in records[0]:
        if name in _DIFFERENT_PER_RANK:
            continue
        ranks_of: dict[str, list[int]] = {}
        for record in records:
            ranks_of.setdefault(str(record.get(name)), []).append(int(record["rank"]))
        if len(ranks_of) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_of.items()))
    if [record["rank"] for record in records] != list(range(len(records))):
        lines.append(f"the ranks call themselves {[record['rank'] for record in records]}")
    if lines:
        raise PlanError("peer memory: the ranks cannot form a group together. " + ". ".join(lines))


def _what(scatter: bool, op: str, element: int, out_element: int, count: int) -> int:
    """Collective, operator, dtypes and elements of a launch in 64 bits."""
    return int(scatter) | OPS[op] << 4 | element << 8 | out_element << 12 | count << 16


def _spell(what: int) -> str:
    names = {number: str(dtype).removeprefix("torch.") for dtype, number in ELEMENTS.items()}
    ops = {number: name for name, number in OPS.items()}
    return (
        f"{_COLLECTIVES[what & 1]}, op {ops.get(what >> 4 & 15, '?')}, dtype {names.get(what >> 8 & 15, '?')} to "
        f"{names.get(what >> 12 & 15, '?')}, {what >> 16} elements"
    )


def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename


def _process(pid: int) -> tuple[str, str]:
    """(state letter, start time) of /proc/<pid>/stat; empty where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
