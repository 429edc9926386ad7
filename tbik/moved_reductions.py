"""Reductions whose bytes another backend of torch.distributed moves: NCCL for CUDA tensors. It adds nothing itself.

    all_reduce(op, factor, [x, ...])                    x = cast(node(0, W) of the ranks' x)        (ORDER.md B1)
    reduce(op, factor, [x], root)                       the same on rank `root` alone
    reduce_scatter(op, factor, [out, ...], [x, ...])    out = elements [rank * N/W, (rank + 1) * N/W) of it
    reduce_scatter_list(op, factor, [out], [[x, ...]])  out = node(0, W) of the ranks' x[rank]

    one_shot   all-gather, everybody folds everything                                         (W-1) n elements sent
    two_shot   chunk p of every rank to rank p, who folds it; results to all (or to the root)    2 n (W-1)/W
    scatter    two_shot's first half                                                               n (W-1)/W

Who folds which elements is decided here, which pairs are added in tbik.device_fold, how bytes travel in Movement. A
message longer than SEGMENT_BYTES is reduced segment by segment, so that what is gathered is a segment and not W
messages. Extra memory: about two segments, four for 16-bit floats, and one copy of a tensor that is not contiguous.

Work goes to the caller's current stream; nothing waits for the host but what the moving backend does. dtypes and ops:
tbik.device_fold. All ranks make the same calls in the same order. Errors: those of the moving backend; the output is
then undefined. Bits: deterministic; W is in them (tests/test_moved_reductions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from tbik.device_fold import fold

ONE_SHOT_BYTES = 64 << 10
"""Largest message of a rank that placement "auto" sends to everybody."""

SEGMENT_BYTES = 64 << 20
"""Of one rank's message that travel and are folded at once."""


class Movement:
    """Bytes between the ranks of a c10d backend. After each call the current stream waits for what arrives."""

    def __init__(self, backend: Any, rank: int, size: int) -> None:
        self.backend, self.rank, self.size = backend, rank, size
        self.timeout: timedelta | None = None  # of a call; the backend's own by default

    def all_to_all(self, out: Tensor, x: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        """out, x [N]: runs of receive[p] and send[p] elements, from and to rank p, in the order of the ranks."""
        options = self._limited(c10d.AllToAllOptions())
        item = x.element_size()
        # As bytes: NCCL knows no int16, and nothing on the way may look at a value.
        sizes = [n * item for n in receive], [n * item for n in send]
        self.backend.alltoall_base(out.view(torch.uint8), x.view(torch.uint8), *sizes, options).wait()

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """out [W * N] = x [N] of rank 0, of rank 1, ..."""
        options = self._limited(c10d.AllgatherOptions())
        self.backend._allgather_base(out.view(torch.uint8), x.view(torch.uint8), options).wait()

    def _limited(self, options: Any) -> Any:
        if self.timeout is not None:
            options.timeout = self.timeout
        return options


class MovedReductions:
    """The reductions of one group. One thread at a time."""

    def __init__(self, movement: Movement, placement: str = "auto", segment_bytes: int = SEGMENT_BYTES) -> None:
        """placement: two_level is two_shot, since NCCL knows the nodes; cannot change a bit, as segment_bytes."""
        self.movement, self.placement, self.segment_bytes = movement, placement, segment_bytes
        self.rank, self.size = movement.rank, movement.size

    # --- what is asked ----------------------------------------------------------------------------------------------

    def all_reduce(self, op: str, factor: float, tensors: Sequence[Tensor]) -> None:
        """Tensors of one dtype travel as one message."""
        for members in _by_dtype(tensors):
            flat = _flat(members[0]) if len(members) == 1 else torch.cat([_flat(t) for t in members])
            fold_rows = self._fold(op, factor, flat)
            place = self._one_shot if self._is_short(flat) else self._two_shot
            for segment in self._segments(flat):
                place(segment, segment, fold_rows)
            for tensor, result in zip(members, torch.split(flat, [t.numel() for t in members]), strict=True):
                _store(tensor, result)

    def reduce(self, op: str, factor: float, tensors: Sequence[Tensor], root: int) -> None:
        (tensor,) = tensors
        flat = _flat(tensor)
        fold_rows = self._fold(op, factor, flat)
        for segment in self._segments(flat):
            self._to_root(segment, root, fold_rows)
        if self.rank == root:
            _store(tensor, flat)

    def reduce_scatter(self, op: str, factor: float, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        for output, x in zip(outputs, inputs, strict=True):
            flat = _flat(x)
            self._scatter(op, factor, output, list(flat.view(self.size, -1) if flat.numel() else [flat] * self.size))

    def reduce_scatter_list(
        self, op: str, factor: float, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]]
    ) -> None:
        """The chunks may differ in size, alike on all ranks."""
        (output,), (chunks,) = outputs, inputs
        self._scatter(op, factor, output, [_flat(chunk) for chunk in chunks])

    # --- who folds what ---------------------------------------------------------------------------------------------

    def _one_shot(self, x_N: Tensor, out_N: Tensor, fold_rows: Callable[[Tensor], Tensor]) -> None:
        out_N.copy_(fold_rows(self._gather(x_N)))

    def _two_shot(self, x_N: Tensor, out_N: Tensor, fold_rows: Callable[[Tensor], Tensor]) -> None:
        width = -(-x_N.numel() // self.size)
        mine = fold_rows(self._chunks(x_N, width))
        if self.size == 1:
            out_N.copy_(mine)
            return
        if mine.numel() < width:  # an all-gather wants equal pieces
            mine = torch.cat([mine, mine.new_zeros(width - mine.numel())])
        is_whole = self.size * width == x_N.numel()
        results = out_N if is_whole else x_N.new_empty(self.size * width)
        self.movement.all_gather(results, mine)
        if not is_whole:
            out_N.copy_(results[: x_N.numel()])

    def _to_root(self, x_N: Tensor, root: int, fold_rows: Callable[[Tensor], Tensor]) -> None:
        if self._is_short(x_N) or self.size == 1:
            rows = self._gather(x_N)
            if self.rank == root:
                x_N.copy_(fold_rows(rows))
            return
        width = -(-x_N.numel() // self.size)
        mine = fold_rows(self._chunks(x_N, width))
        receive = _chunk_sizes(x_N.numel(), width, self.size) if self.rank == root else [0] * self.size
        send = [mine.numel() if rank == root else 0 for rank in range(self.size)]
        self.movement.all_to_all(x_N if self.rank == root else x_N[:0], mine, receive, send)

    def _scatter(self, op: str, factor: float, output: Tensor, chunks: list[Tensor]) -> None:
        own = chunks[self.rank]
        others = (chunk for rank, chunk in enumerate(chunks) if rank != self.rank)
        # A segment of the result may lie where the same segment was, which has been sent, and nowhere else.
        may_write = not any(_overlap(output, chunk) for chunk in others)
        may_write = may_write and (output.data_ptr() == own.data_ptr() or not _overlap(output, own))
        is_direct = output.is_contiguous() and may_write
        out = output.view(-1) if is_direct else output.new_empty(output.numel())
        fold_rows = self._fold(op, factor, out)
        width = max(1, self.segment_bytes // out.element_size() // self.size)
        for lo in range(0, max(chunk.numel() for chunk in chunks), width):
            parts = [chunk[lo : lo + width] for chunk in chunks]
            mine = parts[self.rank].numel()
            if self.size == 1:
                rows = parts[0].view(1, -1)
            else:
                rows = out.new_empty(self.size, mine)
                sizes = [part.numel() for part in parts]
                self.movement.all_to_all(rows.view(-1), torch.cat(parts), [mine] * self.size, sizes)
            out[lo : lo + mine] = fold_rows(rows)
        if not is_direct:
            _store(output, out)

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _gather(self, x_N: Tensor) -> Tensor:
        """[W, N]: everybody's x."""
        if self.size == 1:
            return x_N.view(1, -1)
        rows = x_N.new_empty(self.size, x_N.numel())
        self.movement.all_gather(rows.view(-1), x_N)
        return rows

    def _chunks(self, x_N: Tensor, width: int) -> Tensor:
        """[W, n]: the chunk of this rank, of everybody's x."""
        if self.size == 1:
            return x_N.view(1, -1)
        sizes = _chunk_sizes(x_N.numel(), width, self.size)
        rows = x_N.new_empty(self.size, sizes[self.rank])
        self.movement.all_to_all(rows.view(-1), x_N, [sizes[self.rank]] * self.size, sizes)
        return rows

    def _fold(self, op: str, factor: float, like: Tensor) -> Callable[[Tensor], Tensor]:
        """What turns rows into a result; the ranks' factors travel beside the values, on the device."""
        if op != "premul_sum":
            return lambda rows: fold(rows, op)
        own = torch.full((1,), factor, dtype=torch.float64, device=like.device)
        factors = self._gather(own).view(-1)
        return lambda rows: fold(rows, op, factors)

    def _is_short(self, x: Tensor) -> bool:
        if self.placement == "auto":
            return x.nbytes <= ONE_SHOT_BYTES
        return self.placement == "one_shot"

    def _segments(self, flat: Tensor) -> Iterator[Tensor]:
        """Of one_shot, whose gather is W-fold, W times shorter."""
        step = self.segment_bytes // flat.element_size()
        if self._is_short(flat):
            step //= self.size
        step = max(self.size, step // self.size * self.size)
        return (flat[lo : lo + step] for lo in range(0, flat.numel(), step))


def _flat(x: Tensor) -> Tensor:
    """x [N] in one run of memory: its own, where it is one."""
    return x.contiguous().view(-1)


def _chunk_sizes(n: int, width: int, size: int) -> list[int]:
    return [max(0, min(width, n - rank * width)) for rank in range(size)]


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _store(tensor: Tensor, result: Tensor) -> None:
    """Nothing where the result lies in the tensor already."""
    if result.data_ptr() != tensor.data_ptr() or not tensor.is_contiguous():
        tensor.copy_(result.view(tensor.shape))


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors may share memory; of one that is not contiguous only its storage is looked at."""
    if a.numel() == 0 or b.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
        return False
    if not (a.is_contiguous() and b.is_contiguous()):
        return True
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
