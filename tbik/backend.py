"""The "tbik" backend of torch.distributed: every reduction in the canonical order, every other collective by gloo.

    import tbik
    dist.init_process_group("tbik")              "cpu:tbik,cuda:nccl" keeps CUDA tensors with NCCL
    dist.all_reduce(x)                           x = cast(node(0, W) of the ranks' values)            (ORDER.md B1)

`all_reduce` of a plain tensor has one leaf per rank: deterministic, independent of its size, of the transport and of
the placement; the world size is in its bits. Layout-invariant results need covers (tbik.all_reduce) or leaves that are
nodes of a larger tree: this backend alone does not make training or inference independent of the number of ranks.

Transport of the reductions, chosen when a group is made, by all ranks together, and never changed: shared memory where
all ranks of the group run on one host, else "tcp+shm": shared memory between the ranks of a host, sockets of our own to
the others ("tcp" where no host has several ranks, or shared memory cannot be made). Two ranks are of one host if boot
id, pid namespace, network namespace and host name are equal *and* each rank has mapped the other's region and found its
nonce there; so containers or namespaces with a network of their own count as hosts. None of the settings below can
change a bit; all ranks must have the same.

    TBIK_TRANSPORT   auto | shm | tcp | gloo | mpi shm: refuse other hosts; tcp: no shared memory;
                     gloo: by gloo's own connections (GLOO_DEVICE_TRANSPORT=TCP_TLS encrypts them), slower;
                     mpi: no shared memory, only after tbik.launch.init(movement="mpi")
    TBIK_PLACEMENT   auto | one_shot | two_shot | two_level
    TBIK_NODE_SIZE   ranks per node (contiguous) for two_level; by default what the hosts show if each has as many
    TBIK_CHECK       1: over gloo, compare (call, op, dtype, shape) of every call before its data moves; without it only
                     those of a group's first call, later ones together with the data. Ranks that disagree raise in
                     either case, and no input is changed
    TBIK_PEER_MEMORY     auto | ipc | symmetric | off: how ranks read each other's CUDA memory; off: not at all
    GLOO_SOCKET_IFNAME   the interface of gloo's connections and of ours

CUDA tensors: moved by NCCL. Their reductions are made by one kernel over peer memory where all ranks run on one host
and their devices can read each other, else NCCL moves the values and the device folds them: device_reductions.py has
the ways, the streams, the agreement of the ranks and the limits. The bits are those of the CPU. **Not yet measured on a
GPU**: all of it but the device itself is tested on the CPU. On an error there the output is undefined, and the message
says so.
Errors: PlanError when a group is made on ranks that disagree; TransportError where a rank does not come; afterwards
DistBackendError (a peer is gone, too late, or made another call or refused this one) and ValueError (unsupported dtype,
operator, device: at once on the rank that asks). A call that torch itself or gloo refuses on one rank only leaves the
others to the group's timeout. A wait of an asynchronous call that ends first gives the call up: DistBackendError, its
input as it was, the group not usable any more (the peers learn it at once over shm and tcp, over gloo by their own
timeout); if the result is being written, the wait ends with it. A store that torchrun's
restarts hand out again does no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tbik import __version__, device_reductions, registration, sockets
from tbik.errors import PlanError, TransportError, TransportTimeout
from tbik.tree import ORDER_VERSION

logger = logging.getLogger(__name__)

TRANSPORTS = ("auto", "shm", "tcp", "gloo", "mpi")
PLACEMENTS = ("auto", "one_shot", "two_shot", "two_level")

ONE_SHOT_BYTES = 64 * 1024
"""Largest message that placement "auto" sends to every rank."""

SEGMENT_BYTES = {"shm": 1 << 18, "tcp+shm": 1 << 19, "tcp": 1 << 19, "gloo": 4 << 20, "mpi": 4 << 20}
"""What travels in one round of a large message: it should stay in the caches."""

SOCKET_MESSAGE_BYTES = 8 << 20
"""Largest message of one rank in one round where no host has shared memory."""

_REGION_BYTES = 32 << 20  # of shared memory per group, at most; two messages per rank
_DIFFERENT_PER_RANK = ("rank", "host", "identity", "pid", "nonce", "mover")

_movers: Any = None


@dataclass(frozen=True)
class _Settings:
    """What the environment asks for."""

    transport: str = "auto"
    placement: str = "auto"
    node_size: int = 0
    check: bool = False
    peer_memory: str = "auto"

    @classmethod
    def from_environment(cls) -> _Settings:
        transport = os.environ.get("TBIK_TRANSPORT", "auto")
        placement = os.environ.get("TBIK_PLACEMENT", "auto")
        node_size = os.environ.get("TBIK_NODE_SIZE", "0")
        peer_memory = os.environ.get("TBIK_PEER_MEMORY", "auto")
        if transport not in TRANSPORTS:
            raise PlanError(f"TBIK_TRANSPORT: expected one of {TRANSPORTS}, got {transport!r}")
        if placement not in PLACEMENTS:
            raise PlanError(f"TBIK_PLACEMENT: expected one of {PLACEMENTS}, got {placement!r}")
        if not node_size.isdecimal():
            raise PlanError(f"TBIK_NODE_SIZE: expected an integer >= 0, got {node_size!r}")
        if peer_memory not in device_reductions.PEER_MEMORY:
            raise PlanError(f"TBIK_PEER_MEMORY: expected one of {device_reductions.PEER_MEMORY}, got {peer_memory!r}")
        return cls(transport, placement, int(node_size), os.environ.get("TBIK_CHECK") == "1", peer_memory)


def use_movers(movers: Any) -> None:
    """What carries the bytes of the groups made from now on: tbik.launch's MPI, or None for gloo."""
    global _movers
    _movers = movers


def create(options: Any, backend_options: Any = None) -> Any:
    """The backend object for one group; torch.distributed calls this (extended_api).

    options: store, group_rank, group_size, timeout. backend_options: none are known; use the environment.
    Errors: PlanError, TransportError, TransportTimeout on all ranks that came.
    """
    if backend_options is not None and type(backend_options).__name__ != "Options":
        raise PlanError(f"tbik: pg_options are not used, got {backend_options!r}; see TBIK_* in tbik/backend.py")
    return make(options.store, options.group_rank, options.group_size, options.timeout)


def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """As torch.distributed.monitored_barrier, which asks for gloo by name: an error that names the missing ranks.

    Nothing happens on a rank outside the group. timeout: the group's where None. Errors: RuntimeError, PlanError.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise PlanError("tbik.backend.monitored_barrier: there is no process group")
    limit = _backend_of(group).options._timeout if timeout is None else timeout
    group.monitored_barrier(limit, wait_all_ranks=wait_all_ranks)


def group_info(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """What a group is made of: world size, rank, transport, placement, node size, versions, ranks' hosts and pids.

    devices: the way that reductions take on each device that has had one (tbik/device_reductions.py).
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise PlanError("tbik.backend.group_info: there is no process group")
    backend = _backend_of(group)
    info: dict[str, Any] = json.loads(backend.info)
    reductions = backend.device_reductions
    return info | {"calls": backend.calls, "devices": {} if reductions is None else reductions.info()}


def bytes_per_link(
    collective: Literal["all_reduce", "reduce", "reduce_scatter_tensor"],
    num_elements: int,
    dtype: torch.dtype = torch.float32,
    *,
    world_size: int,
    node_size: int = 0,
    placement: str = "auto",
    transport: str = "tcp+shm",
) -> list[dict[str, int]]:
    """What each rank would send in one call, without a group and without moving a byte.

    num_elements: of the message of one rank (reduce_scatter_tensor: of its input). node_size: ranks per node, 0 = one
    node. transport: as group_info names it; decides how a message is cut into segments.
    Returns, per rank, payload bytes `within_node` and `between_nodes`, `largest_link` (payload to one rank) and
    `rounds`: one frame to every peer in each, with a header of 88 bytes over sockets. Errors: PlanError.
    """
    if isinstance(num_elements, bool) or not isinstance(num_elements, int) or num_elements < 0:
        raise PlanError(f"bytes_per_link: num_elements must be an integer >= 0, got {num_elements!r}")
    if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise PlanError(f"bytes_per_link: expected float32, float64, bfloat16 or float16, got {dtype}")
    if world_size < 1 or node_size < 0 or (node_size > 0 and world_size % node_size):
        raise PlanError(f"bytes_per_link: node_size must divide world_size {world_size}, got {node_size}")
    if placement not in PLACEMENTS:
        raise PlanError(f"bytes_per_link: placement must be one of {PLACEMENTS}, got {placement!r}")
    if transport not in SEGMENT_BYTES:
        raise PlanError(f"bytes_per_link: transport must be one of {tuple(SEGMENT_BYTES)}, got {transport!r}")
    shared = transport in ("shm", "tcp+shm")
    capacity = (
        _region_capacity(world_size if transport == "shm" else node_size or 2) if shared else SOCKET_MESSAGE_BYTES
    )
    try:
        rows: list[dict[str, int]] = _compiled().dry_run(
            collective,
            placement,
            world_size,
            node_size,
            num_elements,
            dtype.itemsize,
            _segment_bytes(transport, world_size),
            capacity,
        )
    except ValueError as error:
        raise PlanError(f"bytes_per_link: {error}") from error
    return rows


def _segment_bytes(transport: str, size: int) -> int:
    return max(SEGMENT_BYTES[transport] // (max(1, size // 2) if transport == "shm" else 1), 1 << 16)


def _region_capacity(ranks: int) -> int:
    """Bytes of a message in the shared memory of a host of so many ranks."""
    return min(3 << 19, max(_REGION_BYTES // (2 * ranks), 1 << 17))


def bytes_sent(group: dist.ProcessGroup | None = None) -> list[int]:
    """Payload bytes that this rank's reductions have sent to each rank of the group, by transports with sockets.

    Errors: PlanError where the transport does not count (shm, gloo).
    """
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise PlanError("tbik.backend.bytes_sent: there is no process group")
    backend = _backend_of(group)
    counted: list[int] = backend.bytes_sent
    if not counted:
        raise PlanError(f"tbik.backend.bytes_sent: the transport {backend.transport} does not count its bytes")
    return counted


def _backend_of(group: dist.ProcessGroup) -> Any:
    backend = group._get_backend(torch.device("cpu"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not hasattr(backend, "info"):
        raise PlanError(f"tbik: expected a group of the tbik backend, got {backend!r}")
    return backend


def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """The backend object for `size` ranks that share `store`, whose keys belong to this group. Errors: as `create`."""
    compiled = _compiled()
    settings = _Settings.from_environment()
    identity = compiled.host_identity()
    own = {
        "rank": rank,
        "tbik": __version__,
        "order_version": ORDER_VERSION,
        "torch": torch.__version__,
        "world_size": size,
        "host": socket.gethostname(),
        "identity": identity,
        "pid": os.getpid(),
        "nonce": secrets.token_hex(8),
        "movement": "gloo" if _movers is None else _movers.name,
        "mover": None if _movers is None else _movers.offer(),
        **asdict(settings),
    }
    store, texts = _meet(store, rank, size, json.dumps(own), timeout)
    records = [json.loads(text) for text in texts]
    try:
        _require_same(records)
        _require_movement(settings)
    except PlanError:
        _part(store, rank, size, timeout)
        raise
    hosts = [record["identity"] or f"rank {record['rank']}" for record in records]
    nodes = list(dict.fromkeys(hosts))
    wires = _wires(compiled, store, rank, size, timeout, settings, hosts)
    transport, reason = wires.name, wires.reason
    node_size = _node_size(settings, hosts)
    movement, worker, move = None, None, None
    if _movers is not None:
        mover = _movers.open([record["mover"] for record in records])
        movement = compiled.Movement(mover, rank, size, timeout)
        move = mover.move if transport == "mpi" else None
    else:
        movement = dist.ProcessGroupGloo(PrefixStore("movement/", store), rank, size, timeout=timeout)
    if transport == "gloo":
        worker = dist.ProcessGroupGloo(PrefixStore("reductions/", store), rank, size, timeout=timeout)
    info = {
        "world_size": size,
        "rank": rank,
        "transport": transport,
        "reason": reason,
        "placement": settings.placement,
        "node_size": node_size,
        "check": settings.check,
        "tbik": __version__,
        "order_version": ORDER_VERSION,
        "torch": torch.__version__,
        "ranks": [
            {key: record[key] for key in ("rank", "host", "pid")} | {"node": nodes.index(host)}
            for record, host in zip(records, hosts, strict=True)
        ],
    }
    ((device_type, open_movement),) = device_reductions.DEVICES.items()
    device_movement = lru_cache(lambda: open_movement(store, rank, size, timeout))
    meeting = _Meeting(store, rank, size, timeout)
    backend = compiled.ProcessGroupTbik(
        movement=movement,
        worker=worker,
        region=wires.region,
        sockets=wires.sockets,
        local=wires.local,
        capacity=wires.capacity,
        move=move,
        rank=rank,
        size=size,
        timeout=timeout,
        placement=settings.placement,
        node_size=node_size,
        one_shot_bytes=ONE_SHOT_BYTES,
        segment_bytes=_segment_bytes(transport, size),
        check=settings.check,
        split=make,
        device_type=device_type,
        device_movement=device_movement,
        device_reductions=lambda: device_reductions.DeviceReductions(
            rank, size, device_movement, meeting, hosts, settings, timeout
        ),
        info=json.dumps(info),
    )
    logger.info(
        "rank %d of %d: reductions over %s (%s), placement %s, node size %s, ORDER_VERSION %d",
        rank,
        size,
        transport,
        reason,
        settings.placement,
        node_size or "world",
        ORDER_VERSION,
    )
    return backend


def _require_movement(settings: _Settings) -> None:
    moves = _movers is not None
    if settings.transport in (("gloo", "tcp") if moves else ("mpi",)):
        raise PlanError(
            f"tbik: TBIK_TRANSPORT={settings.transport}, but the groups of this process move bytes by "
            f"{_movers.name if moves else 'gloo'}; tbik.launch.init(movement=...) chooses"
        )


@dataclass
class _Wires:
    """What the reductions of a group move over; the name is the transport's."""

    name: str
    reason: str
    region: Any = None
    sockets: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    capacity: int = 0


def _wires(
    compiled: Any, store: Any, rank: int, size: int, timeout: timedelta, settings: _Settings, hosts: list[str]
) -> _Wires:
    """The regions that all ranks have attached and the sockets between hosts. All ranks decide alike."""
    if settings.transport == "gloo":
        return _Wires("gloo", "TBIK_TRANSPORT=gloo")
    if settings.transport == "mpi":
        return _Wires("mpi", "TBIK_TRANSPORT=mpi")
    count = len(set(hosts))
    if settings.transport == "shm" and count > 1:
        raise PlanError(f"tbik: TBIK_TRANSPORT=shm, but the ranks run on {count} hosts")
    if _movers is not None and count > 1:
        return _Wires("mpi", f"the ranks run on {count} hosts")
    reason = "TBIK_TRANSPORT=tcp" if settings.transport == "tcp" else f"the ranks run on {count} hosts"
    largest = max(hosts.count(host) for host in hosts)
    region, capacity = None, SOCKET_MESSAGE_BYTES
    shared = settings.transport != "tcp" and (largest > 1 or size == 1)
    if shared:
        region, capacity, failures = _region(compiled, store, rank, size, timeout, hosts)
        if failures and settings.transport == "shm":
            raise TransportError("tbik: TBIK_TRANSPORT=shm, but " + "; ".join(failures))
        if failures:
            logger.warning("rank %d of %d: no shared memory, only sockets: %s", rank, size, "; ".join(failures))
            shared, region, capacity, reason = False, None, SOCKET_MESSAGE_BYTES, failures[0]
            if _movers is not None:
                return _Wires("mpi", reason)
        elif count == 1:
            return _Wires("shm", "all ranks on one host", region)
    local = [r for r in range(size) if hosts[r] == hosts[rank]] if shared else [rank]
    listener = sockets.Listener()
    try:
        offers = [json.loads(o) for o in _exchange(store, "offers", rank, size, json.dumps(listener.offer), timeout)]
        peers = [r for r in range(size) if r not in local]
        descriptors = sockets.connect(listener, offers, rank, peers, timeout.total_seconds())
    finally:
        listener.close()
    name = "tcp+shm" if shared else "tcp"
    return _Wires(name, reason, region, descriptors, local if region is not None else [], capacity)


def _region(
    compiled: Any, store: Any, rank: int, size: int, timeout: timedelta, hosts: list[str]
) -> tuple[Any, int, list[str]]:
    """This host's region (None where the rank is alone on its host), bytes of its messages, why ranks have none."""
    local = [r for r in range(size) if hosts[r] == hosts[rank]]
    # One capacity for all hosts: that of the fullest one.
    capacity = _region_capacity(max(hosts.count(host) for host in hosts))
    region, failure = None, ""
    if len(local) > 1 or size == 1:
        key, first = f"region/{local[0]}", rank == local[0]
        try:
            if first:
                region = compiled.ShmRegion.create(len(local), capacity)
            token = _publish(store, key, rank, region.token if region is not None else None, timeout)
            if not first:
                region = compiled.ShmRegion.attach(token, len(local))
        except RuntimeError as error:
            failure = f"rank {rank}: {error}"
            if first:
                _publish(store, key, rank, "none", timeout)
    answers = _exchange(store, "attached", rank, size, failure, timeout)
    if region is not None:
        region.close_file()
    return region, capacity, [answer for answer in answers if answer]


def _node_size(settings: _Settings, hosts: list[str]) -> int:
    """Ranks per node, 0 for one node: as asked, else what the hosts show if they are alike and contiguous."""
    size = len(hosts)
    asked = settings.node_size
    if asked == 0:
        count = hosts.count(hosts[0])
        contiguous = all(hosts[i] == hosts[i - i % count] for i in range(size))
        alike = size % count == 0 and len(set(hosts)) == size // count
        asked = count if contiguous and alike else 0
    if asked >= size or asked < 2 or size % asked:
        return 0
    return asked


def _meet(store: Any, rank: int, size: int, value: str, timeout: timedelta) -> tuple[Any, list[str]]:
    """(a store of keys that nobody has used, every rank's value); `value` differs in every process.

    torchrun's restarts may hand out the store of the attempt before, in which dead ranks have left their values. Each
    rank publishes a digest of the values it sees: all ranks publish the same one only if it is made of the values of
    living ranks, since a dead one cannot know the others'. Errors: TransportTimeout naming the ranks that did not come.
    """
    end = time.monotonic() + timeout.total_seconds()
    values = _exchange(store, "ranks", rank, size, value, timeout)
    pause_s = 0.005
    while True:
        view = hashlib.sha256("\n".join(values).encode()).hexdigest()[:24]
        views = _exchange(store, "views", rank, size, view, timeout)
        if all(other == view for other in views):
            return PrefixStore(f"{view}/", store), values
        if time.monotonic() > end:
            absent = [r for r in range(size) if views[r] != view]
            raise TransportTimeout(
                f"tbik: making a group, phase 'views', rank {rank} of {size}: waited {timeout.total_seconds():.1f} s "
                f"for ranks {absent}, whose keys in the store are those of an earlier attempt. Every rank of the group "
                "must make it, in the same order"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
        values = _exchange(store, "ranks", rank, size, value, timeout)


class _Meeting:
    """tbik.device_reductions.Meet: the ranks' records over the group's store, for what is agreed after it was made."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self._store: Any = PrefixStore("device/", store)
        self._rank, self._size, self._timeout = rank, size, timeout
        self._count = 0
        self._written: list[str] = []

    def exchange(self, key: str, record: dict[str, Any], limit_s: float | None = None) -> list[dict[str, Any]]:
        """Every rank's record. Errors: TransportTimeout naming the ranks that did not come; TransportError."""
        self._count += 1
        limit = self._timeout if limit_s is None else min(self._timeout, timedelta(seconds=limit_s))
        where = f"{key}, number {self._count} of this group"
        texts = _exchange(
            *(self._store, str(self._count), self._rank, self._size, json.dumps([key, record]), limit),
            activity=f"comparison of calls, {where}",
            advice="No tensor was changed. Every rank of the group must make the same calls, in the same order",
        )
        # Every rank has come here, so none of them still reads what was written before.
        for name in self._written:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(name)
        self._written = [f"{self._count}/{self._rank}"]
        answers = [json.loads(text) for text in texts]
        others = {rank: answer[0] for rank, answer in enumerate(answers) if answer[0] != key}
        if others:
            raise TransportError(
                f"tbik: {where}, rank {self._rank} of {self._size}: the ranks do not make the same call: rank "
                + ", rank ".join(f"{rank} is at '{other}'" for rank, other in others.items())
                + ". No tensor was changed. Make the calls alike on all ranks"
            )
        return [answer[1] for answer in answers]

    def publish(self, key: str, record: dict[str, Any]) -> None:
        """This rank's part of an exchange whose answers it does not need."""
        self._count += 1
        name = f"{self._count}/{self._rank}"
        with contextlib.suppress(RuntimeError):  # the others then say that it did not come
            self._store.set(name, json.dumps([key, record]).encode() + b".")
        self._written.append(name)


def _exchange(
    store: Any,
    key: str,
    rank: int,
    size: int,
    value: str,
    timeout: timedelta,
    activity: str = "",
    advice: str = "Every rank of the group must make it, in the same order",
) -> list[str]:
    """Every rank's value. Errors: TransportTimeout naming the ranks that did not come; TransportError: no store."""
    activity = activity or f"making a group, phase '{key}'"
    names = [f"{key}/{r}" for r in range(size)]
    try:
        store.set(names[rank], value.encode() + b".")
        store.wait(names, timeout)
        return [bytes(store.get(name))[:-1].decode() for name in names]
    except RuntimeError as error:  # DistStoreError: too late; DistNetworkError: no store
        try:
            missing = [r for r in range(size) if not store.check([names[r]])]
        except RuntimeError as lost:
            raise TransportError(
                f"tbik: {activity}, rank {rank} of {size}: the store cannot be reached any more "
                f"({str(lost).splitlines()[0]}). The rank that serves it has ended, perhaps at its own limit: look at "
                "its log"
            ) from error
        raise TransportTimeout(
            f"tbik: {activity}, rank {rank} of {size}: waited {timeout.total_seconds():.1f} s for "
            f"rank{'s' if len(missing) != 1 else ''} {missing}. {advice}"
        ) from error


def _part(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """Waits, at most 5 s, until every rank has met: the one that serves the store would end it under the others."""
    with contextlib.suppress(TransportError):
        _exchange(store, "refused", rank, size, "", min(timeout, timedelta(seconds=5)))


def _publish(store: Any, key: str, rank: int, value: str | None, timeout: timedelta) -> str:
    """Rank 0's value on every rank."""
    if value is not None:
        store.set(key, value)
        return value
    store.wait([key], timeout)
    return bytes(store.get(key)).decode()


def _require_same(records: list[dict[str, Any]]) -> None:
    """PlanError naming what each rank said, on all ranks, unless all said the same."""
    lines = []
    for name in records[0]:
        if name in _DIFFERENT_PER_RANK:
            continue
        ranks_of: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            ranks_of.setdefault(str(record.get(name)), []).append(rank)
        if len(ranks_of) > 1:
            lines.append(f"{name}: " + "; ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_of.items()))
    if [record["rank"] for record in records] != list(range(len(records))):
        lines.append(f"the ranks call themselves {[record['rank'] for record in records]}")
    if lines:
        raise PlanError("tbik: the ranks cannot form a group together. " + ". ".join(lines))


def _compiled() -> Any:
    """tbik._C_dist. Errors: PlanError where it is missing or was built for another torch."""
    if _torchcomms():
        raise PlanError(
            "tbik: torchcomms is on (TORCH_DISTRIBUTED_USE_TORCHCOMMS or torch.distributed.config.use_torchcomms); it "
            "routes every backend past this one. Turn it off to use the tbik backend"
        )
    try:
        from tbik import _C_dist as compiled
    except ImportError as error:
        raise PlanError(
            f"tbik: the process-group module does not load with torch {torch.__version__}: {error}. It is tied to one "
            "torch minor version; rebuild it: pip install -e . --no-build-isolation"
        ) from error
    built = compiled.torch_version_built_against()
    if built.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise PlanError(f"tbik: built against torch {built}, running with {torch.__version__}; rebuild it")
    return compiled


def _torchcomms() -> bool:
    if os.environ.get("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "0").lower() not in ("", "0", "false"):
        return True
    return bool(getattr(getattr(dist, "config", None), "use_torchcomms", False))


if _torchcomms():
    _compiled()
registration.register()
