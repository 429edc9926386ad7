"""Fingerprints: equal for every sharding, different for every corruption, the same on every CPU path.

The oracle `slow` is ORDER.md F1 in plain Python integers. `python tests/test_fingerprint.py` writes
tests/vectors/fingerprint.json from it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import wide_exponents
from spawn import Pool, outcomes
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import tbik
from tbik import _C
from tbik.errors import IntegrityError, PlanError, TransportError
from tbik.integrity import fingerprint as module
from tbik.integrity.fingerprint import DTYPES, KEY, SECOND_KEY, fingerprint, fingerprint_each
from tbik.integrity.pieces import Piece, boxes_of, whole

VECTORS = Path(__file__).parent / "vectors" / "fingerprint.json"
PATHS = [path for path in _C.cpu_paths() if path != "avx512_bf16"]  # which computes bf16 products only
MASK = 2**64 - 1
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


# --- the oracle ------------------------------------------------------------------------------------------------------


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def storage_bits(x: Tensor) -> list[int]:
    """Zero-extended bits of the elements in row-major order."""
    data = x.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    size = x.element_size()
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def slow(bits: list[int], indices: Any = None, key: int = KEY) -> int:
    indices = range(len(bits)) if indices is None else indices
    return sum(mix((mix(key * (i + 1) % 2**64) + b) % 2**64) for i, b in zip(indices, bits)) % 2**64


def head(name: str, dtype: str, shape: list[int]) -> int:
    text = name + "\n" + dtype + "\n" + ",".join(str(n) for n in shape)
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return (data % 2).squeeze(-1).bool() if dtype == torch.bool else data.view(dtype).reshape(shape)


# --- known answers ---------------------------------------------------------------------------------------------------


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def vectors() -> dict[str, Any]:
    def described(name: str, x: Tensor) -> dict[str, Any]:
        width = 2 * x.element_size()
        words = [f"0x{b:0{width}x}" for b in storage_bits(x)]
        return {"name": name, "dtype": name_of(x.dtype), "shape": list(x.shape), "bits": words}

    tensors = []
    for dtype, shape in itertools.product(DTYPES, ((), (0, 3), (1,), (7,), (5, 13))):
        x = random_bits(shape, dtype, seed=len(tensors))
        for key in (KEY, SECOND_KEY):
            digest = slow(storage_bits(x), key=key)
            tensors.append({**described("", x), "key": f"{key:#018x}", "fingerprint": f"{digest:#018x}"})
    entries = [
        described("layers.0.weight", random_bits((4, 6), torch.bfloat16, 1)),
        described("layers.0.bias", random_bits((4,), torch.float32, 2)),
        described("größe", random_bits((), torch.int64, 3)),
        described("empty", random_bits((2, 0), torch.float32)),
    ]
    digest = sum(
        mix((head(e["name"], e["dtype"], e["shape"]) + slow([int(b, 16) for b in e["bits"]])) % 2**64) for e in entries
    )
    return {
        "order_version": 1,
        "mix": [[f"{x:#018x}", f"{mix(x):#018x}"] for x in (0, 1, KEY, 2 * KEY % 2**64, MASK)],
        "tensors": tensors,
        "models": [{"entries": entries, "digest": f"{digest % 2**64:#018x}"}],
    }


def tensor_of(entry: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, entry["dtype"])
    data = b"".join(int(word, 16).to_bytes(dtype.itemsize, "little") for word in entry["bits"])
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(entry["shape"])


def write_vectors() -> None:
    made = vectors()
    lines = [f'"order_version": {made["order_version"]}']
    for key in ("mix", "tensors", "models"):
        lines.append(f'"{key}": [\n' + ",\n".join(json.dumps(case, ensure_ascii=False) for case in made[key]) + "\n]")
    VECTORS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def test_verify_vector_file_is_what_the_oracle_says() -> None:
    assert json.loads(VECTORS.read_text()) == vectors()


@pytest.mark.parametrize("path", PATHS)
def test_verify_vectors(path: str) -> None:
    """Every CPU path gives the committed numbers, in both keys, for every dtype."""
    for entry in json.loads(VECTORS.read_text())["tensors"]:
        x, key = tensor_of(entry), int(entry["key"], 16)
        strides = whole(x).index_strides
        assert _C.fingerprint(x, 0, strides, key, path) == int(entry["fingerprint"], 16), entry
        assert fingerprint(x, key=key) == int(entry["fingerprint"], 16)


def test_verify_model_vectors() -> None:
    known = json.loads(VECTORS.read_text())
    for model in known["models"]:
        state = {entry["name"]: tensor_of(entry) for entry in model["entries"]}
        assert fingerprint(state) == int(model["digest"], 16)
    for x, mixed in known["mix"]:
        assert module.mix(int(x, 16)) == int(mixed, 16)


def test_corroborate_splitmix64() -> None:
    """The inner M is the published SplitMix64 generator: its first outputs from seed 0."""
    first = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
    assert tuple(mix(KEY * (i + 1) % 2**64) for i in range(4)) == first


# --- shapes, strides, paths, threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", (torch.uint8, torch.bfloat16, torch.float32, torch.float64), ids=name_of)
def test_verify_any_length_and_alignment(path: str, dtype: torch.dtype) -> None:
    data = random_bits((200,), dtype)
    for start, n in itertools.product((0, 1, 3), (*range(35), 127)):
        x = data[start : start + n]
        assert _C.fingerprint(x, 5, [3], KEY, path) == slow(storage_bits(x), range(5, 5 + 3 * n, 3))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", (torch.int8, torch.float16, torch.int32, torch.int64), ids=name_of)
def test_verify_strides_do_not_matter(path: str, dtype: torch.dtype) -> None:
    base = random_bits((6, 40, 34), dtype)
    views = {
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "sliced": base[1::2, ::3, 5:],
        "narrow rows": base[:, :, :2],
        "expanded": base[:, :1, :].expand(6, 9, 34),
        "expanded scalar": base[0, 0, 0].expand(70, 3),
        "short rows of a long tensor": base.transpose(0, 1)[:, :3],
        "0-d": base[0, 0, 0],
        "empty": base[:, :0],
        "channels last": base.unsqueeze(0).contiguous(memory_format=torch.channels_last),
    }
    for name, view in views.items():
        assert _C.fingerprint(view, 0, whole(view).index_strides, KEY, path) == slow(storage_bits(view)), name


def test_verify_threads() -> None:
    x = random_bits((257, 1031), torch.bfloat16)
    expected = slow(storage_bits(x))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert fingerprint(x) == expected
            assert fingerprint(x.t().contiguous().t()) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("path", PATHS)
def test_verify_huge_strides_and_indices(path: str) -> None:
    """Offsets and indices beyond 2^31 and 2^32; only the touched pages of the buffer exist."""
    buffer = torch.empty(2**31 + 2**10, dtype=torch.int16)
    view = buffer.as_strided((2, 5), (2**31 + 7, 3))
    view.copy_(random_bits((2, 5), torch.int16))
    assert _C.fingerprint(view, 0, [5, 1], KEY, path) == slow(storage_bits(view))
    x = random_bits((3, 5), torch.float32)
    indices = [2**40 + 2**35 * i + (2**31 + 1) * j for i in range(3) for j in range(5)]
    assert _C.fingerprint(x, 2**40, [2**35, 2**31 + 1], KEY, path) == slow(storage_bits(x), indices)
    narrow = [(2**31 * i) % 2**32 for i in range(5)]
    assert slow(storage_bits(x[0]), narrow) != slow(storage_bits(x[0]), [2**31 * i for i in range(5)])


def test_verify_bits_not_values() -> None:
    zero = torch.zeros(3)
    assert fingerprint(zero) != fingerprint(-zero)
    nan = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint(nan[:1]) != fingerprint(nan[1:])
    x = wide_exponents((64,), torch.bfloat16, seed=3)
    assert fingerprint(x) == slow(storage_bits(x)) == fingerprint(x.view(torch.int16))
    assert fingerprint(x) != fingerprint(x.float())  # equal values, other bits
    assert fingerprint(x._neg_view()) == fingerprint(-x)
    assert fingerprint(x.requires_grad_()) == fingerprint(x.detach())


def test_verify_subnormals_under_flush(flush_denormal: None) -> None:
    x = torch.tensor([1, 2, 0x80000001 - 2**32], dtype=torch.int32).view(torch.float32)
    assert fingerprint(x) == slow([1, 2, 0x80000001])


# --- shards ----------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 46, 120


def runs(n: int, parts: int, seed: int = 0) -> list[tuple[int, int]]:
    """Uneven runs that make up [0, n)."""
    generator = torch.Generator().manual_seed(seed + parts)
    cuts = sorted((torch.randperm(n - 1, generator=generator)[: parts - 1] + 1).tolist())
    return list(itertools.pairwise([0, *cuts, n]))


def shardings(x: Tensor) -> dict[str, list[Piece]]:
    """The list of integrity checks: each value makes up x."""
    shape, flat = tuple(x.shape), x.flatten()
    cases: dict[str, list[Piece]] = {}
    for parts in (2, 5, 8):
        cases[f"{parts} uneven row shards"] = [Piece.box(x[a:b], shape, (a, 0)) for a, b in runs(ROWS, parts)]
    for parts in (2, 3, 4, 8):
        cut = COLUMNS // parts
        cases[f"{parts} column shards"] = [Piece.box(x[:, a : a + cut], shape, (0, a)) for a in range(0, COLUMNS, cut)]
    cases["2 x 4 blocks"] = [
        Piece.box(x[a:b, c : c + 30].clone(), shape, (a, c)) for a, b in runs(ROWS, 2) for c in range(0, COLUMNS, 30)
    ]
    cases["7 flat shards"] = [Piece.flat(flat[a:b], shape, a) for a, b in runs(ROWS * COLUMNS, 7)]
    padded = torch.cat([flat, torch.full((9,), 7).to(x.dtype)]).chunk(7)
    length = padded[0].numel()
    cases["7 flat shards, padded"] = [
        Piece.flat(part[: max(0, ROWS * COLUMNS - i * length)], shape, i * length) for i, part in enumerate(padded)
    ]
    cases["FSDP x TP strided"] = [  # TP cuts the rows into 2 halves, FSDP each half into 3: of every half the f-th part
        Piece.box(x[start:end], shape, (start, 0))
        for f in range(3)
        for half in range(2)
        for start, end in [(23 * half + min(8 * f, 23), 23 * half + min(8 * f + 8, 23))]
    ]
    cases["interleaved rows"] = [Piece.box(x[r::4], shape, (r, 0), (4, 1)) for r in range(4)]
    cases["interleaved both"] = [Piece.box(x[r::3, c::5], shape, (r, c), (3, 5)) for r in range(3) for c in range(5)]
    cases["an empty shard"] = [Piece.box(x, shape, (0, 0)), Piece.box(x[:0], shape, (0, 0))]
    cases["any strides"] = [Piece(x.t(), shape, 0, (1, COLUMNS))]
    return cases


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.uint8), ids=name_of)
def test_verify_every_sharding_is_the_unsharded_value(dtype: torch.dtype) -> None:
    x = random_bits((ROWS, COLUMNS), dtype)
    expected = slow(storage_bits(x))
    assert fingerprint(x) == expected
    for name, pieces in shardings(x).items():
        assert fingerprint(pieces) == expected, name
        assert fingerprint(pieces[::-1]) == expected, name
        assert fingerprint({"w": pieces}) == fingerprint({"w": x}), name
    # negative control: ranks that count from 0, as a hash of local shards does
    locals_only = sum(fingerprint(piece.local) for piece in shardings(x)["2 column shards"]) & MASK
    assert locals_only != expected


def test_verify_incomplete_and_overlapping_pieces_are_refused() -> None:
    x = random_bits((8,), torch.float32)
    for parts in (
        [(0, 4)],
        [(0, 4), (3, 8)],
        [(0, 8), (2, 3)],
        [(0, 4), (5, 8)],
        [(0, 5), (2, 5)],  # 8 elements, one of them twice
    ):
        with pytest.raises(PlanError, match="every element must be there once"):
            fingerprint([Piece.flat(x[a:b], (8,), a) for a, b in parts])
    assert fingerprint([Piece.flat(x[:5], (8,), 0), Piece.flat(x[5:], (8,), 5), Piece.flat(x[:5].clone(), (8,), 0)])
    other = x.clone()
    other[2] = -other[2]
    with pytest.raises(IntegrityError, match="replicas differ"):
        fingerprint([Piece.flat(x, (8,), 0), Piece.flat(other, (8,), 0)])
    for make in (
        lambda: Piece.flat(x, (7,), 0),
        lambda: Piece.flat(x, (8,), 1),
        lambda: Piece.box(x.view(2, 4), (2, 4), (0, 1)),
        lambda: Piece.box(x.view(2, 4), (4, 4), (1, 0), (3, 1)),
        lambda: Piece.box(x, (4, 4), (0, 0)),
        lambda: Piece(x.view(2, 4), (100,), 0, (3, 1)),  # two elements with one index
        lambda: Piece(x, (8,), 0, (0,)),
        lambda: Piece(x, (8,), -1, (1,)),
        lambda: Piece(x, (8,), 0, (1, 1)),
    ):
        with pytest.raises(PlanError):
            make()
    with pytest.raises(PlanError, match="one piece is of"):
        fingerprint([Piece.flat(x[:4], (8,), 0), Piece.flat(x[4:].to(torch.float64), (8,), 4)])


# --- corruption ------------------------------------------------------------------------------------------------------


def corruptions(x: Tensor) -> dict[str, Tensor]:
    """The structured list; x [rows, columns] of floats, no zeros."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    cases = {}
    swapped = x.clone()
    swapped[[3, 17]] = x[[17, 3]]
    cases["row swap"] = swapped
    twice = x.clone()
    twice.view(integers)[2, 5] ^= 1 << 6
    twice.view(integers)[9, 31] ^= 1 << 6
    cases["same bit in two elements"] = twice
    sign = x.clone()
    sign[4, 7] = -sign[4, 7]
    cases["sign flip"] = sign
    lsb = x.clone()
    lsb.view(integers)[20, 1] ^= 1
    cases["1-LSB flip"] = lsb
    cases["negate all"] = -x
    return cases


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_verify_structured_corruptions_are_seen(dtype: torch.dtype) -> None:
    x = random_bits((ROWS, COLUMNS), dtype, seed=5)
    clean = fingerprint(x)
    for name, bad in corruptions(x).items():
        assert fingerprint(bad) != clean, name


def test_verify_random_corruptions_are_seen() -> None:
    """10^4 corruptions of 1 to 32 bits, anywhere."""
    x = random_bits((23, 40), torch.bfloat16, seed=6)
    words, clean = x.view(torch.int16).flatten(), fingerprint(x)
    generator = random.Random(7)
    seen = set()
    for _ in range(10_000):
        bad = words.numpy().copy()
        for flip in generator.sample(range(16 * len(bad)), generator.randint(1, 32)):
            bad.view("uint16")[flip // 16] ^= 1 << (flip % 16)
        seen.add(_C.fingerprint(torch.from_numpy(bad).view(23, 40), 0, [40, 1], KEY))
    assert clean not in seen
    assert len(seen) > 9_900  # single flips repeat


def test_verify_xor_and_l1_miss_some() -> None:
    """Negative control: what PyTorch's debug mode compares does not see these."""
    x = wide_exponents((ROWS, COLUMNS), torch.float32, seed=8, spread=8)
    bad = corruptions(x)
    xor = {name for name, y in bad.items() if torch.hash_tensor(y).item() == torch.hash_tensor(x).item()}
    l1 = {name for name, y in bad.items() if y.double().abs().sum() == x.double().abs().sum()}
    assert {"row swap", "same bit in two elements", "negate all"} <= xor
    assert {"sign flip", "negate all"} <= l1
    assert all(fingerprint(y) != fingerprint(x) for y in bad.values())


# --- state dicts and modules -----------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 6)
        self.block = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 6))
        self.head = torch.nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("scratch", torch.randn(4), persistent=False)


def tied(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def test_verify_module_is_its_state_dict() -> None:
    model = tied()
    state = model.state_dict()
    expected = sum(
        mix((head(name, name_of(x.dtype), list(x.shape)) + slow(storage_bits(x))) % 2**64) for name, x in state.items()
    )
    digest = fingerprint(model)
    assert digest == fingerprint(state) == expected % 2**64
    assert digest == fingerprint(dict(reversed(state.items()))) == tbik.fingerprint(model)
    assert fingerprint_each(model) == {name: fingerprint(x) for name, x in state.items()}
    assert "head.weight" in state and "embedding.weight" in state  # tied: once per name
    model.scratch.zero_()
    assert fingerprint(model) == digest
    assert fingerprint(torch.nn.ModuleDict({"_orig_mod": model})) == digest
    model.steps += 1
    assert fingerprint(model) != digest


def test_verify_names_dtypes_and_shapes_count() -> None:
    x = random_bits((4, 6), torch.bfloat16)
    digest = fingerprint({"w": x})
    for other in ({"v": x}, {"w": x.view(torch.float16)}, {"w": x.view(6, 4)}, {"w": x, "b": x[:0]}):
        assert fingerprint(other) != digest
    a, b = random_bits((5,), torch.float32, 1), random_bits((5,), torch.float32, 2)
    assert fingerprint({"a": a, "b": b}) != fingerprint({"a": b, "b": a})
    assert fingerprint({"m": {"w": x}, "n": [a, {"b": b}]}) == fingerprint({"m.w": x, "n.0": a, "n.1.b": b})
    assert fingerprint({0: x}) == fingerprint({"0": x})


def test_verify_optimizer_state() -> None:
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.block(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    digest = fingerprint(optimizer.state_dict())
    assert digest == fingerprint(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.2
    assert fingerprint(optimizer.state_dict()) != digest
    values = [1, 1.0, True, "1", None, -0.0, 0.0]
    assert len({fingerprint({"v": value}) for value in values}) == len(values)


def test_verify_refusals() -> None:
    x = torch.zeros(4)
    for bad in (
        torch.zeros(3, dtype=torch.complex64),
        torch.empty(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.nn.UninitializedParameter(),
    ):
        for form in (bad, {"w": bad}):
            with pytest.raises(PlanError, match="expected a dense CPU or CUDA tensor"):
                fingerprint(form)
    with pytest.raises(PlanError, match="expected a dense CPU or CUDA tensor"):
        torch.func.vmap(lambda row: row * fingerprint(row))(torch.zeros(2, 3))
    inside: dict[str, object] = {"w": x}
    inside["itself"] = [inside]
    with pytest.raises(PlanError, match="contains itself"):
        fingerprint(inside)
    assert fingerprint({"a": (shared := [x]), "b": shared}) == fingerprint({"a": [x], "b": [x]})
    for form in ({"\ud800": x}, {"w": "\ud800"}):
        with pytest.raises(PlanError, match="UTF-8"):
            fingerprint(form)
    for form in ([x], 3, None, "w", {"w": object()}, {"a.b": x, "a": {"b": x}}, {1.5: x}, {}, {"a\nb": x}):
        with pytest.raises(PlanError):
            fingerprint(form)  # type: ignore[arg-type]
    for key in (0, 2, -1, 2**64 + 1, 1.0, True):
        with pytest.raises(PlanError, match="odd key"):
            fingerprint(x, key=key)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="index stride per dimension"):
        _C.fingerprint(x, 0, [1, 1], KEY)
    with pytest.raises(ValueError, match="odd key"):
        _C.fingerprint(x, 0, [1], 4)
    with pytest.raises(ValueError, match="not available"):
        _C.fingerprint(x, 0, [1], KEY, "abacus")


def test_verify_self_test_refuses_a_wrong_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KNOWN", (1, 2, 3, 4))
    module._self_test.cache_clear()
    with pytest.raises(IntegrityError, match="this CPU computes"):
        fingerprint(torch.zeros(1))
    monkeypatch.undo()
    module._self_test.cache_clear()
    assert fingerprint(torch.zeros(0)) == 0


# --- DTensor placements, all ranks in one process ---------------------------------------------------------------------


@pytest.fixture
def as_rank() -> Iterator[Any]:
    """as_rank(rank, world): this process is that rank of a group that moves nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, world: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def test_verify_dtensor_placements(as_rank: Any) -> None:
    """Every rank's boxes, as torch cuts them, add up to the unsharded value."""
    x = random_bits((11, 6, 5), torch.float32)
    expected = slow(storage_bits(x))
    cases: list[tuple[tuple[int, ...], tuple[Any, ...]]] = [
        *(((w,), (Shard(d),)) for w in (2, 3, 4, 8) for d in (0, 1, 2)),
        ((2, 4), (Shard(0), Shard(1))),
        ((2, 4), (Shard(0), Shard(0))),
        ((2, 4), (Replicate(), Shard(2))),
        ((4, 2), (Shard(1), Replicate())),
        ((2, 4), (_StridedShard(0, split_factor=4), Shard(0))),
        ((4, 2), (_StridedShard(0, split_factor=2), Shard(0))),
        ((2, 2, 2), (Replicate(), _StridedShard(1, split_factor=2), Shard(1))),
        ((3, 2), (Shard(2), Shard(0))),
        ((4,), (_StridedShard(0, split_factor=2),)),
        ((2, 2), (_StridedShard(1, split_factor=3), Shard(0))),
    ]
    several = 0
    for mesh_shape, placements in cases:
        world = torch.Size(mesh_shape).numel()
        records = []
        for rank in range(world):
            as_rank(rank, world)
            mesh = DeviceMesh("cpu", torch.arange(world).view(mesh_shape))
            shard = distribute_tensor(x, mesh, placements, src_data_rank=None)
            piece = whole(shard)
            boxes = boxes_of(piece, "test")
            several += len(boxes) > 1
            for box in boxes:  # each element is where the box says it is
                indices = torch.full(box.local.shape, box.first)
                for dim, stride in enumerate(box.index_strides):
                    view = [-1 if d == dim else 1 for d in range(3)]
                    indices += stride * torch.arange(box.local.shape[dim]).view(view)
                assert torch.equal(x.flatten()[indices].view(torch.int32), box.local.view(torch.int32))
            records += module._records("", shard, shard, KEY, rank)
        (record,) = module._settled(records)
        assert (record.partial, record.held) == (expected, x.numel()), (mesh_shape, placements)
    assert several > 0  # a strided shard alone is several boxes


def test_verify_partial_and_padded_dtensors_are_refused(as_rank: Any) -> None:
    as_rank(0, 2)
    mesh = DeviceMesh("cpu", torch.arange(2))
    partial = DTensor.from_local(torch.zeros(4), mesh, [Partial()], run_check=False)
    with pytest.raises(PlanError, match="partial sum has no value yet"):
        boxes_of(whole(partial), "test")
    shard = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
    padded = DTensor(torch.zeros(3), shard._spec, requires_grad=False)
    with pytest.raises(PlanError, match="its local tensor is"):
        boxes_of(whole(padded), "test")


# --- real ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4) as ranks:
        yield ranks


def on_ranks(group: dist.ProcessGroup) -> dict[str, int]:
    """The digests of one tensor and one model in many layouts; asserts nothing."""
    rank = group.rank()
    x = random_bits((11, 6), torch.bfloat16, seed=9)
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = {}
    for name, mesh, placements in (
        ("rows", line, [Shard(0)]),
        ("columns", line, [Shard(1)]),
        ("blocks", square, [Shard(0), Shard(1)]),
        ("hybrid", square, [Replicate(), Shard(0)]),
        ("replicated", line, [Replicate()]),
    ):
        results[name] = fingerprint(distribute_tensor(x, mesh, placements))
    cuts = [0, 1, 4, 4, 11]
    mine = Piece.box(x[cuts[rank] : cuts[rank + 1]], (11, 6), (cuts[rank], 0))
    results["pieces"] = fingerprint(mine, group)
    results["plain replicas"] = fingerprint(x, group)
    results["replicated pieces"] = fingerprint(Piece.box(x[:, rank % 2 :: 2], (11, 6), (0, rank % 2), (1, 2)), group)
    # FSDP over a TP shard that DTensor does not know of: columns by rank // 2, and rows over the pair of ranks
    pair = square["tp"]
    half = distribute_tensor(x[:, 3 * (rank // 2) :][:, :3].contiguous(), pair, [Shard(0)])
    results["FSDP over pieces"] = fingerprint(Piece.box(half, (11, 6), (0, 3 * (rank // 2))), group)
    return results


def models_on_ranks(group: dist.ProcessGroup) -> dict[str, int]:
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = {"plain": fingerprint(tied())}
    fsdp = tied()
    fully_shard(fsdp, mesh=init_device_mesh("cpu", (4,)))
    results["FSDP2"] = fingerprint(fsdp)
    both = tied()
    parallelize_module(both.block, square["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(both.block, mesh=square["dp"])
    kinds = {type(p).__name__ for q in both.block.parameters() for p in q.placements}  # type: ignore[attr-defined]
    results["FSDP2 x TP"] = fingerprint(both)
    results["strided"] = int("_StridedShard" in kinds)
    state = tied().state_dict()
    stage = {name: value for i, (name, value) in enumerate(sorted(state.items())) if i % 4 == group.rank()}
    results["stages"] = fingerprint(stage, group)
    return results


def failures_on_ranks(group: dist.ProcessGroup) -> dict[str, str]:
    """What each of these calls raised."""
    rank = group.rank()
    x = random_bits((8, 6), torch.float32, seed=9)
    flipped = x.clone()
    flipped.view(torch.int32)[5, 1] ^= 1
    square = init_device_mesh("cpu", (2, 2))
    part = Piece.box(x[2 * rank : 2 * rank + 2], (8, 6), (2 * rank, 0))
    local = (flipped if rank == 3 else x)[4 * (rank % 2) : 4 * (rank % 2) + 4].clone()
    replicas = DTensor.from_local(local, square, [Replicate(), Shard(0)], run_check=False)
    calls = {
        "replica": lambda: fingerprint({"w": flipped if rank == 2 else x}, group),
        "mesh": lambda: fingerprint({"w": replicas}),
        "missing": lambda: fingerprint({"w": part} if rank != 1 else {"w": Piece.box(x[:0], (8, 6), (0, 0))}, group),
        "refused": lambda: fingerprint({"w": part if rank else part.local.to(torch.complex64)}, group),
        "shape": lambda: fingerprint({"w": x if rank else x.view(6, 8)}, group),
        "number": lambda: fingerprint({"lr": 0.1 if rank else 0.2}, group),
    }
    said = {}
    for name, call in calls.items():
        try:
            said[name] = f"value {call()}"
        except (PlanError, IntegrityError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    said["afterwards"] = str(fingerprint(part, group) == fingerprint(x))
    return said


@pytest.mark.multiprocess
def test_verify_ranks_agree_with_the_unsharded_value(pool: Pool) -> None:
    expected = fingerprint(random_bits((11, 6), torch.bfloat16, seed=9))
    for results in pool.run(on_ranks, 4):
        assert results == dict.fromkeys(results, expected)


@pytest.mark.multiprocess
def test_verify_sharded_models(pool: Pool) -> None:
    expected = fingerprint(tied())
    for results in pool.run(models_on_ranks, 4):
        assert results.pop("strided") == 1
        assert results == dict.fromkeys(results, expected)


@pytest.mark.multiprocess
def test_verify_ranks_fail_together(pool: Pool) -> None:
    """All ranks raise, the message names tensor and ranks, and the group can be used afterwards."""
    for rank, said in enumerate(pool.run(failures_on_ranks, 4)):
        assert said["replica"].startswith("IntegrityError: fingerprint: w: replicas differ")
        assert all(f"on rank {other}" in said["replica"] for other in range(4))
        assert said["mesh"].startswith("IntegrityError: fingerprint: w: replicas differ")
        assert "on rank 1" in said["mesh"] and "on rank 3" in said["mesh"] and "on rank 0" not in said["mesh"]
        assert "the pieces hold 36 elements" in said["missing"]
        assert ("rank 0 refuses" in said["refused"]) == (rank != 0) and said["refused"].startswith("PlanError")
        assert "do not agree about dtype and shape" in said["shape"]
        assert said["number"].startswith("IntegrityError: fingerprint: lr")
        assert said["afterwards"] == "True"


def late(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        fingerprint(torch.zeros(3), group)


@pytest.mark.multiprocess
def test_verify_a_missing_rank_is_no_hang() -> None:
    first, _ = outcomes(late, 2, timeout=2.0)
    assert isinstance(first.error, TransportError), first
    assert first.elapsed < 20


if __name__ == "__main__":
    sys.exit(write_vectors())
