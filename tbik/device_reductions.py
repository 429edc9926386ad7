"""Reductions of CUDA tensors for the "tbik" backend: which way they go, on which stream, and what the ranks agree on.

    x = cast(node(0, W) of the ranks' x)                                                            (ORDER.md B1)

    peer memory   tbik.peer_reductions, one kernel: all ranks on one host, devices that read each other, at most 16
                  ranks, float32, float64, bfloat16, float16, int32, int64; sum, avg, product, min, max, premul_sum
    moved         tbik.moved_reductions, everything else: NCCL moves, the device folds

Both have the same bits, those of the CPU (tests/test_device_reductions.py). The way is chosen in a group's first
reduction on a device, by all ranks together; TBIK_PEER_MEMORY=off takes peer memory out.

A call returns at once. It runs on the caller's current stream, or, if it is asynchronous, on a stream of the group
behind it; the Work's wait makes the stream then current wait, and the host only under TORCH_NCCL_BLOCKING_WAIT=1. CUDA
graphs may capture it after the first call of the group on the device, which makes what later ones need.

Agreement: the first reduction of a group on a device, and with TBIK_CHECK=1 every one, compares collective, operator,
dtypes and sizes over the store before anything moves; ranks that differ all raise and no tensor is changed. Later calls
that differ are found by peer memory's kernels, and otherwise end with NCCL's watchdog.

Errors: PlanError before anything moves; TransportError, TransportTimeout: no tensor was changed where the text says
so, else **the output is undefined** and the group not usable any more. Guarantee: deterministic; W is in the bits.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from tbik import peer_reductions
from tbik.errors import PlanError, TransportError, TransportTimeout
from tbik.moved_reductions import MovedReductions, Movement
from tbik.peer_library import ELEMENTS, MAX_RANKS, OPS

logger = logging.getLogger(__name__)

PEER_MEMORY = ("auto", "ipc", "symmetric", "off")

LEAVE_LIMIT_S = 5.0
"""How long a rank that gives the group up waits for the others to stop reading its memory."""


def nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """What moves CUDA tensors, or None where torch has no NCCL."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(PrefixStore("cuda/", store), rank, size, options)


DEVICES: dict[str, Callable[[Any, int, int, timedelta], Any]] = {"cuda": nccl}
"""The device type whose tensors are reduced here -> what moves them. Tests put the CPU's, and gloo, in its place."""


class Meet(Protocol):
    """Records of all ranks, over the store: one exchange after another, each with the number of those before."""

    def exchange(self, key: str, record: dict[str, Any], limit_s: float | None = None) -> list[dict[str, Any]]:
        """Every rank's record. Errors: TransportTimeout naming the ranks that did not come, TransportError."""
        ...

    def publish(self, key: str, record: dict[str, Any]) -> None:
        """This rank's part of an exchange, without waiting for the others'."""
        ...


class Settings(Protocol):
    """What all ranks have alike (tbik.backend)."""

    @property
    def placement(self) -> str: ...
    @property
    def check(self) -> bool: ...
    @property
    def peer_memory(self) -> str: ...


class DeviceReductions:
    """The reductions of one group. csrc/process_group.cpp calls run, refuse, abort and close, nothing else."""

    def __init__(
        self,
        rank: int,
        size: int,
        movement: Callable[[], Any],
        meet: Meet,
        hosts: Sequence[str],
        settings: Settings,
        timeout: timedelta,
    ) -> None:
        """movement: what moves the tensors, or None. hosts: one name per rank, equal for ranks of one host."""
        self.rank, self.size, self.hosts, self.settings, self.timeout = rank, size, hosts, settings, timeout
        self._movement, self._meet = movement, meet
        self._moved: MovedReductions | None = None
        self._peers: dict[torch.device, peer_reductions.PeerReductions | None] = {}
        self._reasons: dict[torch.device, str] = {}
        self._streams: dict[torch.device, Any] = {}
        self._calls = 0
        self._broken = ""

    def run(
        self,
        collective: str,
        op: str,
        factor: float,
        root: int,
        outputs: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        is_async: bool,
        timeout: timedelta,
        complete: Callable[[], None],
    ) -> Callable[[], None] | None:
        """One collective. complete: called once the result is enqueued, with its stream as the current one.

        outputs: the tensors of all_reduce, all_reduce_coalesced and reduce; inputs: [] there, [the input of each
        output] of reduce_scatter_tensor(_coalesced), [the chunks] of reduce_scatter. Dense, real, on one device.
        Returns what tells, without waiting, whether a kernel has failed; None: nothing does.
        """
        device = outputs[0].device
        where = f"{collective} of {device.type} tensors, rank {self.rank} of {self.size}"
        if self._broken:
            raise TransportError(f"{where}: {self._broken}. Destroy the group and make a new one")
        self._calls += 1
        self._agree(where, _signature(collective, op, root, outputs, inputs), device)
        peers = self._peers[device] if _served_by_peers(op, outputs) else None
        way: Any = peers
        if way is None:
            way = self._moved_reductions(where, device)
            way.movement.timeout = timeout
        try:
            with torch.no_grad(), self._stream(device, is_async, [*outputs, *(x for row in inputs for x in row)]):
                _serve(way, collective, op, factor, root, outputs, inputs)
                complete()
        except Exception as error:
            raise self._failed(where, "peer memory" if peers is not None else "moved", error) from error
        except BaseException:  # interrupted: the ranks are out of step all the same
            self.abort(f"an earlier call was interrupted ({where})")
            raise
        return None if peers is None else peers.peers.check

    def refuse(self, collective: str, reason: str, device: torch.device) -> None:
        """This rank cannot make a call that the others may: where they compare it, they learn the reason."""
        self._calls += 1
        if not self._broken and self.size > 1 and (device not in self._peers or self.settings.check):
            self._meet.publish("device call", {"refusal": f"{collective}: {reason}"})

    def info(self) -> dict[str, str]:
        """Device -> the way of its reductions, and why."""
        return {str(device): reason for device, reason in self._reasons.items()}

    def abort(self, reason: str) -> None:
        """Later calls are refused; nothing is waited for."""
        self._broken = self._broken or reason
        for peers in self._peers.values():
            if peers is not None:
                peers.peers.give_up(reason)

    def close(self) -> None:
        """Give the devices' memory back, after this rank's last call. The second time: nothing.

        Nor at the end of the process, which gives it back by itself and must not wait for other ranks.
        """
        if sys.is_finalizing():
            return
        held, self._peers = [peers for peers in self._peers.values() if peers is not None], {}
        for peers in held:
            if self._broken:
                peers.leave = None  # the others may not come
            try:
                peers.close()
            except TransportError as error:
                logger.warning("rank %d of %d: %s", self.rank, self.size, error)
        self._broken = self._broken or "the group was shut down"

    # --- which way --------------------------------------------------------------------------------------------------

    def _agree(self, where: str, signature: dict[str, Any], device: torch.device) -> None:
        """All ranks make this call; in the first one on a device, the way of its reductions. Errors: TransportError."""
        is_first = device not in self._peers
        if not is_first and not self.settings.check:
            return
        record = {**signature, "call number": self._calls, "refusal": ""}
        if is_first:
            record["moved by"] = type(self._movement()).__name__
        try:
            records = self._exchange("device call", record)
        except TransportError:
            self.abort(f"the ranks did not come together ({where})")
            raise
        _require_one_call(where, records)
        if is_first:
            self._peers[device] = self._make_peers(device)
            logger.info("rank %d of %d: reductions on %s: %s", self.rank, self.size, device, self._reasons[device])

    def _make_peers(self, device: torch.device) -> peer_reductions.PeerReductions | None:
        """None, with the reason, where all ranks know that they cannot; alike on all of them."""
        reason = ""
        if self.settings.peer_memory == "off":
            reason = "TBIK_PEER_MEMORY=off"
        elif len(set(self.hosts)) > 1:
            reason = f"the ranks run on {len(set(self.hosts))} hosts"
        elif self.size > MAX_RANKS:
            reason = f"peer memory serves at most {MAX_RANKS} ranks"
        if not reason:
            try:
                peers = peer_reductions.make(
                    *(device.type, device.index or 0, self.rank, self.size, self._exchange),
                    leave=self._leave,
                    timeout_s=self.timeout.total_seconds(),
                    memory=self.settings.peer_memory,
                )
            except PlanError as error:
                reason = str(error)
            else:
                self._reasons[device] = "peer memory"
                return peers
        self._reasons[device] = f"moved: {reason}"
        return None

    def _exchange(self, key: str, record: dict[str, Any]) -> list[dict[str, Any]]:
        return self._meet.exchange(key, record) if self.size > 1 else [record]

    def _leave(self) -> None:
        if self.size > 1:
            self._meet.exchange("device leave", {}, LEAVE_LIMIT_S)

    def _moved_reductions(self, where: str, device: torch.device) -> MovedReductions:
        if self._moved is None:
            backend = self._movement()
            if backend is None and self.size > 1:
                raise PlanError(
                    f"{where}: {device.type} tensors are moved by NCCL, which this torch ({torch.__version__}) does "
                    f"not have; without it only peer memory reduces them: {self._reasons[device]}. Install a torch "
                    "with NCCL, or reduce CPU tensors"
                )
            self._moved = MovedReductions(Movement(backend, self.rank, self.size), self.settings.placement)
        return self._moved

    # --- streams and failures ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _stream(self, device: torch.device, is_async: bool, tensors: Sequence[Tensor]) -> Iterator[None]:
        """The caller's current stream, or the group's behind it."""
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            current, own = torch.cuda.current_stream(device), self._streams.get(device)
            if not is_async:
                # Behind the calls under way, as those of one communicator; a captured stream has its own order.
                if own is not None and not torch.cuda.is_current_stream_capturing():
                    current.wait_stream(own)
                yield
                return
            if own is None:
                own = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            own.wait_stream(current)
            for tensor in tensors:
                tensor.record_stream(own)  # the caller may drop it before the wait
            with torch.cuda.stream(own):
                yield

    def _failed(self, where: str, way: str, error: Exception) -> TransportError:
        """What a call that failed half way raises; the ranks are out of step from here on."""
        self.abort(f"an earlier call failed ({where}: {type(error).__name__})")
        text = str(error).strip()
        is_late = isinstance(error, TransportTimeout) or "timed out" in text.lower() or "timeout" in text.lower()
        return (TransportTimeout if is_late else TransportError)(
            f"{where}, {way}: {type(error).__name__}: {text[:2000]}. The output of this call is undefined. Destroy the "
            "group and make a new one; look for the rank that failed first"
        )


def _serve(
    way: Any,
    collective: str,
    op: str,
    factor: float,
    root: int,
    outputs: Sequence[Tensor],
    inputs: Sequence[Sequence[Tensor]],
) -> None:
    if collective in ("all_reduce", "all_reduce_coalesced"):
        way.all_reduce(op, factor, outputs)
    elif collective == "reduce":
        way.reduce(op, factor, outputs, root)
    elif collective == "reduce_scatter":
        way.reduce_scatter_list(op, factor, outputs, inputs)
    else:
        (xs,) = inputs
        # Of several results those that may lie in an input wait until the last one is there.
        memories = {x.untyped_storage().data_ptr() for x in xs}
        waits = [len(outputs) > 1 and out.untyped_storage().data_ptr() in memories for out in outputs]
        results = [torch.empty_like(out) if wait else out for out, wait in zip(outputs, waits, strict=True)]
        way.reduce_scatter(op, factor, results, xs)
        for out, result, wait in zip(outputs, results, waits, strict=True):
            if wait:
                out.copy_(result)


def _served_by_peers(op: str, outputs: Sequence[Tensor]) -> bool:
    """Alike on all ranks that make the same call."""
    return op in OPS and all(out.dtype in ELEMENTS for out in outputs)


def _signature(
    collective: str, op: str, root: int, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]]
) -> dict[str, Any]:
    """What must be the same on all ranks. Of reduce_scatter's list the chunks decide, and outputs may differ."""
    sizes = [x.numel() for row in inputs for x in row] or [out.numel() for out in outputs]
    return {
        "collective": collective,
        "op": op,
        "root": root,
        "dtypes": [str(out.dtype).removeprefix("torch.") for out in outputs],
        "elements": sizes,
    }


def _require_one_call(where: str, records: Sequence[dict[str, Any]]) -> None:
    """TransportError on all ranks where one refuses or two differ; they stay in step."""
    lines = [f"rank {rank}: refused there, {r['refusal']}" for rank, r in enumerate(records) if r["refusal"]]
    served = [(rank, record) for rank, record in enumerate(records) if not record["refusal"]]
    for name in dict.fromkeys(name for _, record in served for name in record):
        ranks_of: dict[str, list[int]] = {}
        for rank, record in served:
            ranks_of.setdefault(str(record.get(name, "nothing")), []).append(rank)
        if len(ranks_of) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_of.items()))
    if lines:
        raise TransportError(
            f"{where}: the ranks do not make the same call: {'. '.join(lines)}. No tensor was changed. Make the calls "
            "alike (order, size, dtype, op) on all ranks"
        )
