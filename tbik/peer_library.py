"""The C interface of csrc/cuda/shim.h in ctypes: one class for both libraries that have it.

    cuda()    tbik/_C_cuda.so     memory of CUDA devices, CUDA IPC; built where nvcc is (TBIK_CUDA, setup.py)
    host()    tbik._C             the same kernel source on the CPU, ranks as threads or processes; tests, dry runs

Sizes of the structures are compared when a library is loaded. Errors: PlanError where a library is missing or of
another build, TransportError with the library's own text where one of its functions fails. No arithmetic here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint8, c_uint64
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tbik.errors import PlanError, TransportError

MAX_RANKS, MAX_BLOCKS, MAX_INPUTS = 16, 64, 64
GRANULE = 16  # elements: chunks and the shares of blocks begin at multiples of it
HANDLE_BYTES = 64

ELEMENTS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.int32: 7,
    torch.int64: 8,
}
OPS = {"sum": 0, "avg": 1, "product": 2, "min": 3, "max": 4, "premul_sum": 8}
PLACEMENTS = {"one_shot": 0, "two_shot": 1, "scatter": 2}
PHASES = ("inputs", "results")
TIMEOUT, MISMATCH, GAVE_UP = 1, 2, 3  # Status.failure


class Push(Structure):
    _fields_ = [(name, c_uint8) for name in ("rank", "row", "adds", "unused")]


class Call(Structure):
    """csrc/cuda/call.h."""

    _fields_ = [
        ("segments", c_uint64 * MAX_RANKS),
        *((name, c_uint64) for name in ("status", "x", "out", "bias")),
        ("staging", c_int64 * 2),
        ("results", c_int64 * 2),
        *((name, c_int64) for name in ("count", "width", "num_chunks", "chunk_stride", "row_stride", "pitch")),
        *((name, c_int64) for name in ("columns", "bias_first", "divisor")),
        ("factor", c_double),
        ("limit_ns", c_int64),
        *((name, c_uint64) for name in ("what", "order")),
        *((name, c_int32) for name in ("rank", "size", "rows", "placement", "op", "element", "out_element")),
        *((name, c_int32) for name in ("blocks", "num_pushes", "rounds", "is_tree_of_ranks", "unused")),
        ("pushes", Push * MAX_INPUTS),
    ]


class Status(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("failure", "peer", "phase", "block")),
        *((name, c_uint64) for name in ("expected", "seen")),
        ("waited_ns", c_int64),
        *((name, c_uint64) for name in ("what", "order")),
    ]


class Library:
    """One loaded library. device: an ordinal of this process; addresses are integers."""

    def __init__(self, path: str, device_type: str) -> None:
        self.path, self.device_type = path, device_type
        try:
            self._library: Any = ctypes.CDLL(path)
            self._library.tbik_peer_error.restype = c_char_p
        except (OSError, AttributeError) as error:
            raise PlanError(f"peer memory: {path} cannot be loaded: {error}") from error
        sizes = (c_int64 * 6)()
        self._library.tbik_peer_sizes(sizes)
        self.header_bytes = int(sizes[2])
        expected = [ctypes.sizeof(Call), ctypes.sizeof(Status), self.header_bytes, MAX_RANKS, MAX_BLOCKS, MAX_INPUTS]
        if list(sizes) != expected:
            raise PlanError(f"peer memory: {path} has structures of {list(sizes)}, expected {expected}; rebuild it")

    def device_count(self) -> int:
        count = c_int()
        self._call("tbik_peer_device_count", byref(count))
        return count.value

    def device_name(self, device: int) -> str:
        """Of the physical device, alike in every process that sees it."""
        name = (c_char * HANDLE_BYTES)()
        self._call("tbik_peer_device_name", c_int(device), name)
        return bytes(name.value).decode()

    def can_access(self, device: int, peer: int) -> bool:
        can = c_int()
        self._call("tbik_peer_can_access", c_int(device), c_int(peer), byref(can))
        return can.value != 0

    def allocate(self, device: int, num_bytes: int) -> tuple[int, bytes]:
        """(address, handle) of zeros that other processes can open."""
        address, handle = c_uint64(), (c_char * HANDLE_BYTES)()
        self._call("tbik_peer_allocate", c_int(device), c_int64(num_bytes), byref(address), handle)
        return address.value, bytes(handle.raw)

    def seal(self, device: int, address: int) -> None:
        """Nobody else will open it."""
        self._call("tbik_peer_seal", c_int(device), c_uint64(address))

    def free(self, device: int, address: int) -> None:
        self._call("tbik_peer_free", c_int(device), c_uint64(address))

    def open(self, device: int, handle: bytes, num_bytes: int) -> int:
        address = c_uint64()
        self._call("tbik_peer_open", c_int(device), handle, c_int64(num_bytes), byref(address))
        return address.value

    def close(self, device: int, address: int) -> None:
        self._call("tbik_peer_close", c_int(device), c_uint64(address))

    def allocate_status(self, device: int) -> tuple[Any, int]:
        """(pointer to a Status that this process reads, its address on the device)."""
        host, address = POINTER(Status)(), c_uint64()
        self._call("tbik_peer_status_allocate", c_int(device), byref(host), byref(address))
        return host, address.value

    def free_status(self, device: int, host: Any) -> None:
        self._call("tbik_peer_status_free", c_int(device), host)

    def set_program(
        self, call: Call, steps: Sequence[tuple[str, int, int]], sources: Sequence[tuple[int, int]], rounds: bool
    ) -> None:
        """The additions of a schedule of tbik.tree; sources[i]: (rank, row) of its input i. Errors: PlanError."""
        kinds = {"load": 0, "add": 1}
        flat_steps = [number for kind, slot, source in steps for number in (kinds[kind], slot, source)]
        flat_sources = [number for source in sources for number in source]
        try:
            self._call(
                "tbik_peer_set_program",
                byref(call),
                (c_int64 * len(flat_steps))(*flat_steps),
                c_int64(len(steps)),
                (c_int64 * len(flat_sources))(*flat_sources),
                c_int64(len(sources)),
                c_int(rounds),
            )
        except TransportError as error:
            raise PlanError(str(error)) from None

    def launch(self, device: int, call: Call, stream: int) -> None:
        self._call("tbik_peer_launch", c_int(device), byref(call), c_uint64(stream))

    def synchronize(self, device: int) -> None:
        self._call("tbik_peer_synchronize", c_int(device))

    def stream(self, device: int) -> int:
        """Where the caller's work of this device goes."""
        return int(torch.cuda.current_stream(device).cuda_stream) if self.device_type == "cuda" else 0

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)  # ctypes lets other threads run meanwhile
        if error != 0:
            text = self._library.tbik_peer_error(c_int(error)).decode(errors="replace")
            raise TransportError(f"peer memory: {name.removeprefix('tbik_peer_')}: {text} (error {error})")


@lru_cache(maxsize=1)
def cuda() -> Library:
    """Errors: PlanError where this installation was built without it."""
    path = Path(__file__).with_name("_C_cuda.so")
    if not path.exists():
        raise PlanError(
            "peer memory: this installation has no tbik/_C_cuda.so; build it where nvcc is: TBIK_CUDA=1 pip install -e "
            ". --no-build-isolation"
        )
    return Library(str(path), "cuda")


@lru_cache(maxsize=1)
def host() -> Library:
    from tbik import _C

    return Library(str(_C.__file__), "cpu")
