"""One 64-bit number of a tensor, a state dict or a model: equal bits give equal numbers, whatever the sharding.

    F(T)   = sum_i M(M(K*(i + 1)) + b(i))  mod 2^64                                          ORDER.md F1
    digest = sum over tensors of M(H(name, dtype, shape) + F)  mod 2^64                      ORDER.md F2

b(i) = raw storage bits of element i, zero-extended (-0.0 is not +0.0, NaN payloads count, bf16 is hashed as
bf16); i = row-major index in the unsharded, unpadded tensor; M = 64-bit bijection of SplitMix64; K = key, odd.

    fingerprint(x)               F of a tensor, DTensor or pieces; digest of a state dict or module
    fingerprint(x, key=SECOND_KEY)   another 64 bits: the pair is a 128-bit digest
    fingerprint_each(state)      {name: F}

Ranks. A DTensor (FSDP2, DTensor TP) is summed over its mesh. A `Piece` says where a plain local tensor stands; pieces
are summed over `group`. What several ranks hold (Replicate dimensions, replicated KV heads, plain tensors if a `group`
is given) is compared and counts once. Ranks may hold different names (pipeline stages): with `group` the digest is that
of the union. A rank sends 64 bytes per piece and receives everybody's; partial sums are added as integers modulo 2^64,
never by a collective's reduction, so that replicas can be told apart.

dtypes: bool, integers of 8 to 64 bits, float8, float16, bfloat16, float32, float64; any strides; CPU and CUDA
(tbik.kernels; not yet measured on a GPU). Complex numbers, packed sub-byte, quantized, sparse, meta and fake tensors
are refused.

Errors: PlanError for what is refused, on all ranks of the groups of that tensor, and where the pieces of all ranks do
not make up the tensor. IntegrityError where replicas differ (names tensor and ranks). TransportTimeout, TransportError
as in tbik.collectives: each wait ends after the group's timeout.

A difference is missed with probability 2^-64. Not tamper-proof: whoever chooses the data can make two tensors collide.
Guarantee: deterministic, layout-invariant (tests/test_fingerprint.py).
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from tbik import _C, devices
from tbik.collectives import all_gather_bytes
from tbik.errors import IntegrityError, PlanError
from tbik.integrity.pieces import Box, Piece, boxes_of, is_dtensor, whole

KEY = 0x9E3779B97F4A7C15
"""K: the increment of SplitMix64, so that M(K*(i+1)) is that generator's output i+1 from seed 0."""

SECOND_KEY = 0xD1342543DE82EF95
"""A second K for 128 bits."""

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)

Leaf: TypeAlias = "Tensor | Piece | Sequence[Piece] | bool | int | float | str | None"

_MASK = 2**64 - 1
_REFUSED = _MASK  # as a count: the piece could not be read, its rank says why
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile, activation checkpointing
_KNOWN = (0xFDCD84BD2A8DEFF5, 0xEE5BB53966FE97E2, 0x0C1DD72938211410, 0x8C453EA8485BBD2D)
"""F of the bytes 0, 1, ..., 255 as elements of 1, 2, 4 and 8 bytes, little-endian."""
_RECORD = struct.Struct("<8Q")


def fingerprint(
    x: Leaf | Mapping[Any, Any] | torch.nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    key: int = KEY,
) -> int:
    """F(T) of a tensor, DTensor, Piece or list of Pieces of one tensor; the digest of a nested state dict or a module.

    Names: keys joined by dots, positions in lists as numbers; of a module those of its state_dict() (parameters and
    persistent buffers, a tied parameter under each of its names), without the prefixes of DDP, torch.compile and
    activation checkpointing; of a model that tbik.parallelize made, with its group, those and the value of the stock
    model. Python numbers, strings and None in a state dict count by type and value.
    group: ranks over which pieces are summed and whole tensors compared; None: this rank, and a DTensor's own mesh.
    key: an odd 64-bit number, the same on all ranks. Returns a number below 2^64, the same on all ranks.
    Errors: see the module. deterministic, layout-invariant.
    """
    if isinstance(x, (torch.nn.Module, Mapping)):
        terms = _summed(_leaves_of(x), group, key)
        if not terms:
            raise PlanError("fingerprint: no rank of the group (without one: this rank) has a tensor in its state dict")
        return sum(mix(term + value) for term, value in terms.items()) & _MASK
    if not isinstance(x, (Tensor, Piece)) and not _is_pieces(x):
        raise PlanError(
            "fingerprint: expected a tensor, a DTensor, a Piece, a list of Pieces, a state dict or a module, got "
            f"{type(x).__name__}"
        )
    (value,) = _summed({"": x}, group, key).values()
    return value


def fingerprint_each(
    x: Mapping[Any, Any] | torch.nn.Module, group: dist.ProcessGroup | None = None, *, key: int = KEY
) -> dict[str, int]:
    """{name: F} of the tensors and numbers whose names this rank has; arguments and errors as for fingerprint."""
    if not isinstance(x, (torch.nn.Module, Mapping)):
        raise PlanError(f"fingerprint_each: expected a state dict or a module, got {type(x).__name__}")
    leaves = _leaves_of(x)
    terms = _summed(leaves, group, key)
    return {name: terms[_described(name, leaf).term] for name, leaf in leaves.items()}


def mix(x: int) -> int:
    """M(x): a bijection of the integers modulo 2^64."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def text_hash(text: str) -> int:
    """The first 8 bytes of SHA-256 of the UTF-8 text, read as a big-endian number."""
    try:
        encoded = text.encode()
    except UnicodeEncodeError:
        raise PlanError(f"fingerprint: expected text that UTF-8 holds, got {text!r}") from None
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "big")


# --- names -----------------------------------------------------------------------------------------------------------


def _leaves_of(x: Mapping[Any, Any] | torch.nn.Module) -> dict[str, Leaf]:
    """{name: leaf}. PlanError where two leaves would have one name."""
    pairs: Iterable[tuple[str, Any]]
    if isinstance(x, torch.nn.Module):
        module = x.module if isinstance(x, torch.nn.parallel.DistributedDataParallel) else x
        of_checkpoint = getattr(module, "checkpoint_pieces", None)
        if of_checkpoint is None:
            pairs = (
                (".".join(part for part in name.split(".") if part not in _WRAPPERS), leaf)
                for name, leaf in _flat("", module.state_dict())
            )
        else:
            pairs = of_checkpoint().items()
    else:
        pairs = _flat("", x)
    leaves: dict[str, Leaf] = {}
    for name, leaf in pairs:
        if name in leaves:
            raise PlanError(f"fingerprint: two values are named {name!r}; keys are joined by dots, rename one of them")
        if "\n" in name:
            raise PlanError(f"fingerprint: expected a name without line breaks, got {name!r}")
        leaves[name] = leaf
    return leaves


def _flat(prefix: str, x: Any, around: tuple[int, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(name, leaf) of a nested state dict; around: the identities of the containers that x is in."""
    if id(x) in around:
        raise PlanError(f"fingerprint: {prefix}: expected a tree of mappings and lists, got one that contains itself")
    around = (*around, id(x))
    if isinstance(x, Mapping):
        for key, value in x.items():
            if not isinstance(key, (str, int)) or isinstance(key, bool):
                raise PlanError(f"fingerprint: {prefix or 'state dict'}: expected keys of str or int, got {key!r}")
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), value, around)
    elif isinstance(x, (list, tuple)) and not _is_pieces(x):
        for position, value in enumerate(x):
            yield from _flat(f"{prefix}.{position}" if prefix else str(position), value, around)
    else:
        yield prefix, x


def _is_pieces(x: object) -> bool:
    return isinstance(x, (list, tuple)) and len(x) > 0 and all(isinstance(item, Piece) for item in x)


# --- one leaf --------------------------------------------------------------------------------------------------------


class _Described(NamedTuple):
    """term = H(name, dtype, shape)."""

    name: str
    term: int
    numel: int


class _Record(NamedTuple):
    """What a rank says about one set of elements of one tensor."""

    name: int
    term: int
    box: int
    partial: int
    held: int
    index_sum: int
    numel: int
    rank: int

    @classmethod
    def of_all(cls, described: _Described, partial: int, rank: int) -> _Record:
        """All elements of the tensor."""
        n = described.numel
        return cls(text_hash(described.name), described.term, _box_hash(n), partial, n, _index_sum(n), n, rank)


def _described(name: str, leaf: Leaf) -> _Described:
    if isinstance(leaf, Tensor):
        leaf = whole(leaf)
    if isinstance(leaf, Piece):
        leaf = [leaf]
    if isinstance(leaf, (list, tuple)):
        shape, dtype = leaf[0].shape, leaf[0].local.dtype
        for piece in leaf[1:]:
            if piece.shape != shape or piece.local.dtype != dtype:
                raise PlanError(
                    f"fingerprint: {name or 'pieces'}: one piece is of a {dtype} tensor of {list(shape)}, another of a "
                    f"{piece.local.dtype} tensor of {list(piece.shape)}"
                )
        text, numel = str(dtype).removeprefix("torch."), torch.Size(shape).numel()
    else:
        shape, text, numel = (), f"python {type(leaf).__name__}", 1
    return _Described(name, text_hash(f"{name}\n{text}\n{','.join(map(str, shape))}"), numel)


def _scalar(name: str, leaf: object) -> int:
    """F of a Python value: text_hash of an integer in decimal, float.hex(), the string itself, True, False, None."""
    if isinstance(leaf, float):
        return text_hash(leaf.hex())
    if leaf is None or isinstance(leaf, (bool, int, str)):
        return text_hash(str(leaf))
    raise PlanError(
        f"fingerprint: {name}: expected a tensor, a Piece, bool, int, float, str or None, got {type(leaf).__name__}"
    )


def _require_readable(x: Tensor, where: str) -> None:
    plain = type(x) in (Tensor, torch.nn.Parameter) and not is_functorch_wrapped_tensor(x)
    if not plain or x.layout != torch.strided or x.device.type not in ("cpu", "cuda") or x.dtype not in DTYPES:
        hint = "; take view_as_real" if x.is_complex() else ""
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise PlanError(
            f"{where}: expected a dense CPU or CUDA tensor of {names}, got "
            f"{type(x).__name__} of {x.dtype}, {x.layout}, on {x.device}{hint}"
        )


def _sum_of_box(box: Box, key: int, where: str, path: str = "") -> int:
    _require_readable(box.local, where)
    if devices.is_cuda(box.local):
        return int(devices.cuda_module("fingerprint").fingerprint(box.local, box.first, box.index_strides, key))
    return _C.fingerprint(box.local.resolve_neg(), box.first, box.index_strides, key, path)


def _mesh_groups(x: Tensor) -> tuple[dist.ProcessGroup, ...]:
    mesh = x.device_mesh  # type: ignore[attr-defined]
    if mesh.get_coordinate() is None:
        return ()
    return tuple(mesh.get_group(dim) for dim in range(mesh.ndim))


def _box_hash(canonical: int | tuple[tuple[int, int], ...]) -> int:
    if isinstance(canonical, int):  # all of n elements
        canonical = () if canonical == 0 else ((0, 1),) if canonical == 1 else ((0, 1), (1, canonical))
    return text_hash(str(canonical))


def _index_sum(numel: int) -> int:
    return (numel * (numel - 1) // 2) & _MASK


# --- all leaves, all ranks -------------------------------------------------------------------------------------------


def _summed(leaves: Mapping[str, Leaf], group: dist.ProcessGroup | None, key: int) -> dict[int, int]:
    """{term: F} of this rank's tensors and, with a group, of all its ranks'."""
    if isinstance(key, bool) or not isinstance(key, int) or not 0 < key <= _MASK or key % 2 == 0:
        raise PlanError(f"fingerprint: expected an odd key below 2**64, got {key!r}")
    _self_test()
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else group.rank() if group else 0
    names: dict[int, str] = {}
    refusals: list[PlanError] = []
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[_Record]] = {}
    for name, leaf in sorted(leaves.items()):  # so that all ranks of a mesh meet in one order
        for part in leaf if isinstance(leaf, (list, tuple)) else [leaf]:
            local = part.local if isinstance(part, Piece) else part
            groups = _mesh_groups(local) if isinstance(local, Tensor) and is_dtensor(local) else ()
            records = by_groups.setdefault(groups, [])
            names[text_hash(name)] = name
            try:
                records += _records(name, leaf, part, key, rank)
            except PlanError as error:
                refusals.append(error)
                records.append(_Record(text_hash(name), 0, 0, 0, _REFUSED, 0, 0, rank))
    everything: list[_Record] = []
    for groups, records in by_groups.items():
        for mesh_group in groups:
            records = _settled(_exchange(records, mesh_group))
        everything += records
    everything = _settled(everything)
    if group is not None:
        everything = _settled(_exchange(everything, group))
    _require_whole(everything, names, refusals)
    return {record.term: record.partial for record in everything}


def _records(name: str, leaf: Leaf, part: Any, key: int, rank: int) -> list[_Record]:
    """What this rank has of `leaf` in `part`: the leaf, or one of its pieces."""
    where = f"fingerprint: {name or 'tensor'}"
    local = part.local if isinstance(part, Piece) else part
    if isinstance(local, Tensor) and not is_dtensor(local):
        _require_readable(local, where)
    described = _described(name, leaf)
    if not isinstance(local, Tensor):
        return [_Record.of_all(described, _scalar(name, leaf), rank)]
    piece = part if isinstance(part, Piece) else whole(part)
    head = (text_hash(described.name), described.term)
    records = [
        _Record(
            *head,
            _box_hash(box.canonical()),
            _sum_of_box(box, key, where),
            box.numel(),
            box.index_sum() & _MASK,
            described.numel,
            rank,
        )
        for box in boxes_of(piece, where)
        if box.numel()
    ]
    # a rank without elements, or a tensor without: the name counts
    return records or [_Record(*head, _box_hash(()), 0, 0, 0, described.numel, rank)]


def _exchange(records: Sequence[_Record], group: dist.ProcessGroup) -> list[_Record]:
    """The records of all ranks."""
    if group.size() == 1:
        return list(records)
    send = bytearray(b"".join(_RECORD.pack(*record) for record in records))
    size = torch.tensor([len(send)]).view(torch.uint8)
    sizes = all_gather_bytes(size, group, "fingerprint").view(torch.int64).flatten().tolist()
    longest = max(sizes)
    if longest == 0:
        return []
    message = torch.frombuffer(send + bytes(longest - len(send)), dtype=torch.uint8)
    rows = all_gather_bytes(message, group, "fingerprint")
    return [
        _Record(*fields)
        for row, length in zip(rows, sizes)
        for fields in _RECORD.iter_unpack(row[:length].numpy().tobytes())
    ]


def _rank(record: _Record) -> int:
    return record.rank


def _settled(records: Iterable[_Record]) -> list[_Record]:
    """Replicas that agree become one record, a tensor that is all there becomes one record of all its elements."""
    by_term: dict[tuple[int, int], list[_Record]] = {}
    for record in records:
        by_term.setdefault((record.name, record.term), []).append(record)
    result = []
    for (name, term), of_term in sorted(by_term.items()):
        of_box: dict[int, _Record] = {}
        agree = True
        for record in sorted(of_term, key=_rank):
            first = of_box.setdefault(record.box, record)
            agree = agree and (first.partial, first.held) == (record.partial, record.held)
        kept = list(of_box.values()) if agree else of_term  # who differs is named at the end, on all ranks
        if agree and _is_whole(kept):
            n, partial = kept[0].numel, sum(record.partial for record in kept) & _MASK
            rank = min(record.rank for record in kept)
            kept = [_Record(name, term, _box_hash(n), partial, n, _index_sum(n), n, rank)]
        result += kept
    return result


def _is_whole(records: Sequence[_Record]) -> bool:
    """Each element once. Count and sum of the indices: what two overlapping pieces hide from one, the other sees."""
    n = records[0].numel
    if any(record.held == _REFUSED for record in records) or sum(record.held for record in records) != n:
        return False
    return (sum(record.index_sum for record in records) & _MASK) == _index_sum(n)


def _require_whole(records: Sequence[_Record], names: Mapping[int, str], refusals: Sequence[PlanError]) -> None:
    """IntegrityError or PlanError unless there is one record of all elements of each name."""
    if refusals:
        raise refusals[0]
    by_name: dict[int, list[_Record]] = {}
    for record in records:
        by_name.setdefault(record.name, []).append(record)
    for hashed, of_name in by_name.items():
        name = names.get(hashed, f"name with hash {hashed:#018x}")
        where = f"fingerprint: {name}" if name else "fingerprint"
        refusing = [record.rank for record in of_name if record.held == _REFUSED]
        if refusing:
            raise PlanError(f"{where}: rank {refusing[0]} refuses its part; its own error says why")
        if len({record.term for record in of_name}) > 1:
            ranks = sorted({record.rank for record in of_name})
            raise PlanError(f"{where}: ranks {ranks} do not agree about dtype and shape (or the type of a number)")
        by_box: dict[int, list[_Record]] = {}
        for record in of_name:
            by_box.setdefault(record.box, []).append(record)
        for same in by_box.values():
            if len(same) > 1:
                values = ", ".join(
                    f"{record.partial:#018x} on rank {record.rank}" for record in sorted(same, key=_rank)
                )
                raise IntegrityError(
                    f"{where}: replicas differ: {values}, for the same {same[0].held} of {same[0].numel} elements"
                )
        if not _is_whole(of_name):
            count = sum(record.held for record in of_name)
            raise PlanError(
                f"{where}: the pieces hold {count} elements (each replica once), the tensor has {of_name[0].numel}; "
                "every element must be there once: give the group over which it is sharded, and every rank its piece"
            )


@functools.lru_cache(maxsize=1)
def _self_test() -> None:
    """IntegrityError if the kernels of this machine miss a known answer: nothing they say could be trusted."""
    data = torch.arange(256).to(torch.uint8)
    views = (data, data.view(torch.int16), data.view(torch.int32), data.view(torch.int64))
    got = tuple(_C.fingerprint(x, 0, [1], KEY) for x in views)
    if got != _KNOWN:
        raise IntegrityError(f"fingerprint: this CPU computes {got} for a vector whose digests are {_KNOWN}")
