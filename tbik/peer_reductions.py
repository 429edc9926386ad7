"""Reductions of CUDA tensors as a torch.distributed backend asks for them, in terms of tbik.peer_memory.

    all_reduce(op, factor, [x, ...])                    x = cast(node(0, W) of the ranks' x)        (ORDER.md B1)
    reduce(op, factor, [x], root)                       the same on rank `root` alone
    reduce_scatter(op, factor, [out, ...], [x, ...])    out = elements [rank * N/W, (rank + 1) * N/W) of it
    reduce_scatter_list(op, factor, [out], [[x, ...]])  out = node(0, W) of the ranks' x[rank]

For the "tbik" backend by way of tbik.device_reductions; `make` serves tbik.collectives, too. Work goes to the caller's
current stream. Complex tensors are summed as pairs of reals. Errors: PlanError, TransportTimeout, TransportError. Bits:
deterministic; W is in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tbik import peer_library
from tbik.errors import PlanError, TransportError
from tbik.peer_library import Library
from tbik.peer_memory import Exchange, Peers

LIBRARIES: dict[str, Callable[[], Library]] = {"cuda": peer_library.cuda}
"""Device type -> what reduces its tensors. Tests add the CPU's."""


class PeerReductions:
    """The peers of one group and one device."""

    def __init__(self, peers: Peers, leave: Callable[[], None] | None) -> None:
        """leave: returns when every rank has called it; TransportError where one does not come. None: no such way."""
        self.peers, self.leave = peers, leave

    def all_reduce(self, op: str, factor: float, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            x = _real(tensor, op)
            flat = x.contiguous()
            self.peers.all_reduce(flat, op=op, factor=factor)
            if flat.data_ptr() != x.data_ptr():
                x.copy_(flat)

    def reduce(self, op: str, factor: float, tensors: Sequence[Tensor], root: int) -> None:
        """By an all-reduce: as many bytes as two_shot sends, and the others' tensors stay as they are."""
        (tensor,) = tensors
        if not 0 <= root < self.peers.size:
            raise PlanError(f"reduce: expected a root from 0 to {self.peers.size - 1}, got {root}")
        x = _real(tensor, op)
        out = self.peers.all_reduce(x.contiguous(), op=op, factor=factor, out=torch.empty_like(x).contiguous())
        if self.peers.rank == root:
            x.copy_(out)

    def reduce_scatter(self, op: str, factor: float, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        if len(outputs) != len(inputs):
            raise PlanError("reduce_scatter: as many outputs as inputs are expected")
        for output, x in zip(outputs, inputs):
            out = _real(output, op)
            if out.dtype != _real(x, op).dtype or x.numel() != output.numel() * self.peers.size:
                raise PlanError(
                    f"reduce_scatter: expected an input of {output.numel() * self.peers.size} elements of the output's "
                    f"dtype ({self.peers.size} ranks), got {x.numel()} of {x.dtype}"
                )
            self._scatter(op, factor, out, _real(x, op).contiguous())

    def reduce_scatter_list(
        self, op: str, factor: float, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]]
    ) -> None:
        """Chunks of one size by reduce_scatter, of different sizes by one all-reduce."""
        (output,), (chunks,) = outputs, inputs
        out, parts = _real(output, op), [_real(chunk, op) for chunk in chunks]
        rank, size = self.peers.rank, self.peers.size
        if len(parts) != size or any(part.dtype != out.dtype for part in parts) or parts[rank].numel() != out.numel():
            raise PlanError(
                f"reduce_scatter: expected {size} tensors of {out.dtype}, that of this rank with {out.numel()} "
                f"elements, got {[(part.dtype, part.numel()) for part in parts]}"
            )
        flat = torch.cat([part.reshape(-1) for part in parts])
        if len({part.numel() for part in parts}) == 1:
            self._scatter(op, factor, out, flat)
        else:
            self.peers.all_reduce(flat, op=op, factor=factor)
            out.copy_(torch.split(flat, [part.numel() for part in parts])[rank].view(out.shape))

    def _scatter(self, op: str, factor: float, out: Tensor, x: Tensor) -> None:
        direct = out if out.is_contiguous() and not _straddles(out, x) else torch.empty_like(out).contiguous()
        self.peers.reduce_scatter(direct, x, op=op, factor=factor)
        if direct is not out:
            out.copy_(direct)

    def close(self) -> None:
        """On all ranks, after their last call: nobody reads a segment once every rank has waited for its own kernels.
        The second time: nothing. Errors: TransportError where a rank did not leave; then the own segment may stay.
        """
        if self.peers.is_closed:
            return
        failure: TransportError | None = None
        try:
            self.peers.driver.synchronize(self.peers.device)
            if self.leave is not None:
                self.leave()
        except TransportError as error:
            failure = error
        self.peers.close(peers_left=self.leave is not None and failure is None)
        if failure is not None:
            raise failure


def make(
    device_type: str,
    device: int,
    rank: int,
    size: int,
    exchange: Exchange,
    leave: Callable[[], None] | None = None,
    **options: Any,
) -> PeerReductions:
    """options: as for Peers. Errors: PlanError on all ranks where one lacks the library or they cannot be peers."""
    library, failure = None, ""
    try:
        library = LIBRARIES[device_type]()
    except PlanError as error:
        failure = f"rank {rank}: {error}"
    failures = [record["failure"] for record in exchange("peer memory library", {"failure": failure})]
    if library is None or any(failures):
        raise PlanError(
            f"tbik: reductions of {device_type} tensors go through peer memory. "
            + ". ".join(text for text in failures if text)
            + '. A group of "cpu:tbik,cuda:nccl" reduces CUDA tensors in NCCL\'s order'
        )
    return PeerReductions(Peers(library, device, rank, size, exchange, **options), leave)


def _real(x: Tensor, op: str) -> Tensor:
    """Sums of complex tensors are sums of their parts."""
    if not x.is_complex():
        return x.detach()
    if op not in ("sum", "avg", "premul_sum"):
        raise PlanError(f"tbik: {op} has no meaning for complex numbers")
    return torch.view_as_real(x.detach())


def _straddles(out: Tensor, x: Tensor) -> bool:
    """Whether out shares memory with x otherwise than as one of its chunks."""
    start, length = out.data_ptr() - x.data_ptr(), out.nbytes
    overlaps = -length < start < x.nbytes
    return overlaps and start % length != 0
