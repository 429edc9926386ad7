"""Reductions over peer memory (csrc/cuda, tbik/peer_memory.py) on the CPU: the kernels' own source, ranks as threads.

The device is the host's memory (csrc/cuda/shim_host.cpp): the same additions, offsets, messages, numbers and deadlines
as on a GPU, one thread per block. What only a GPU can show (visibility of writes between devices, CUDA IPC, graphs) is
bench/gpu.py's.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given
from hypothesis import strategies as st
from spawn import Pool
from torch import Tensor

from tbik import _C, PlanError, TransportError, TransportTimeout, peer_library, peer_memory, reference, tree
from tbik.peer_memory import Order, Peers
from tbik.peer_reductions import PeerReductions

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SIZES = (1, 64, 5003)
PLACEMENTS = ("one_shot", "two_shot", "auto")


class Meeting:
    """Where the threads of one group exchange their records."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.records: list[Any] = [None] * size

    def exchange(self, rank: int) -> peer_memory.Exchange:
        def meet(key: str, record: dict[str, Any]) -> list[dict[str, Any]]:
            self.records[rank] = record
            self.barrier.wait(30)
            records = list(self.records)
            self.barrier.wait(30)
            return records

        return meet


def run(
    size: int,
    function: Callable[[Peers], Any],
    timeout_s: float = 20.0,
    library: peer_library.Library | None = None,
    meeting: Meeting | None = None,
    **options: Any,
) -> list[Any]:
    """[function(peers of rank r)]; an exception in the place of its result."""
    meeting = Meeting(size) if meeting is None else meeting
    library = peer_library.host() if library is None else library
    results: list[Any] = [None] * size
    made: list[Peers] = []

    def play(rank: int) -> None:
        own = {key: value[rank] if isinstance(value, list) else value for key, value in options.items()}
        try:
            peers = Peers(library, rank, rank, size, meeting.exchange(rank), timeout_s=timeout_s, **own)
            made.append(peers)
            results[rank] = function(peers)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # a rank whose kernel has ended waits for the interpreter's lock
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sys.setswitchinterval(interval)
    for peers in made:
        peers.close()
    return results


def values_of(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def inputs(size: int, n: int, dtype: torch.dtype) -> list[Tensor]:
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        generator = torch.Generator().manual_seed(n)
        return [torch.randint(limits.min, limits.max, (n,), dtype=dtype, generator=generator) for _ in range(size)]
    return [wide_exponents((n,), dtype, seed=100 * size + rank) for rank in range(size)]


# --- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64], ids=str)
def test_verify_all_reduce(size: int, dtype: torch.dtype) -> None:
    """Both placements, sum and average, every tail of a pack; the oracle's bits on every rank (B1)."""

    ops = ("sum", "avg") if dtype.is_floating_point else ("sum",)
    cases = []
    for n, op in itertools.product(SIZES, ops):
        values = inputs(size, n, dtype)
        cases += [(values, op, placement, reference.all_reduce(values, op)) for placement in PLACEMENTS]

    def job(peers: Peers) -> None:
        for values, op, placement, expected in cases:
            x = values[peers.rank].clone()
            out = torch.empty_like(x)
            peers.all_reduce(x, op=op, placement=placement, out=out)
            assert_bitwise_equal(x, values[peers.rank], "an input that is no output")
            peers.all_reduce(x, op=op, placement=placement)
            what = f"{dtype} W={size} n={len(x)} {placement} {op} rank {peers.rank}"
            assert_bitwise_equal(out, expected, what)
            assert_bitwise_equal(x, expected, f"in place, {what}")

    values_of(run(size, job))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_verify_order_shows(size: int) -> None:
    """Negative control: for W > 2 a flat sum and a tree of exchanged ranks differ; for W = 2 a sum in bf16 does."""
    values = inputs(size, 4000, torch.float32)
    result = values_of(run(size, lambda peers: peers.all_reduce(values[peers.rank].clone())))[0]
    flat = values[0].clone()
    for value in values[1:]:
        flat += value
    if size > 2:
        assert_bits_differ(result, flat, "a flat sum")
        assert_bits_differ(result, reference.all_reduce(values[1:] + values[:1]), "the ranks in another order")
    else:
        assert_bits_differ(result, (values[0].bfloat16() + values[1].bfloat16()).float(), "a sum in bfloat16")


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_verify_unrolled_kernel_is_the_program(size: int, dtype: torch.dtype) -> None:
    """The kernel with all leaves in registers and the stack machine are one order; the second is forced here."""

    def job(peers: Peers) -> Tensor:
        x = inputs(size, 3001, dtype)[peers.rank]
        unrolled, program = torch.empty_like(x), torch.empty_like(x)
        peers.all_reduce(x, out=unrolled)
        (launches,) = peers._known.values()
        assert [launch.call.is_tree_of_ranks for launch in launches] == [1]
        launches[0].call.is_tree_of_ranks = 0
        peers.all_reduce(x, out=program)
        assert_bitwise_equal(program, unrolled)
        return unrolled

    assert_bitwise_equal(values_of(run(size, job))[0], reference.all_reduce(inputs(size, 3001, dtype)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_verify_minimum_and_maximum(dtype: torch.dtype) -> None:
    """NaN wins and is canonical, +0 > -0 (A8)."""
    special = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan")], dtype=torch.float64)
    grids = [grid.reshape(-1).to(dtype) for grid in torch.meshgrid(special, special, special, indexing="ij")]

    acc = torch.float64 if dtype == torch.float64 else torch.float32

    def pair(op: str, left: Tensor, right: Tensor) -> Tensor:
        best = torch.minimum(left, right) if op == "min" else torch.maximum(left, right)
        negative = left.signbit() | right.signbit() if op == "min" else left.signbit() & right.signbit()
        return torch.where((left == 0) & (right == 0), torch.where(negative, -0.0, 0.0).to(acc), best)

    def expected(op: str) -> Tensor:
        root = tree.root([grid.to(acc) for grid in grids], lambda left, right: pair(op, left, right))
        return reference.epilogue(root, out_dtype=dtype)

    for op in ("min", "max"):
        job = lambda peers, op=op: peers.all_reduce(grids[peers.rank].clone(), op=op)  # noqa: E731
        for result in values_of(run(3, job)):
            assert_bitwise_equal(result, expected(op), f"{op} of {dtype}")


def test_verify_integers_and_products() -> None:
    """Modulo 2^bits; products of floats round at every node."""
    for dtype in (torch.int32, torch.int64):
        values = inputs(3, 500, dtype)
        for op, fold in (("min", torch.minimum), ("max", torch.maximum), ("product", torch.mul)):
            job = lambda peers, op=op, values=values: peers.all_reduce(values[peers.rank].clone(), op=op)  # noqa: E731
            assert_bitwise_equal(values_of(run(3, job))[0], tree.root(values, fold), f"{op} of {dtype}")
    generator = torch.Generator().manual_seed(0)
    floats = [1 + torch.rand(500, generator=generator) for _ in range(4)]
    result = values_of(run(4, lambda peers: peers.all_reduce(floats[peers.rank].clone(), op="product")))[0]
    assert_bitwise_equal(result, tree.root(floats, torch.mul))
    assert_bits_differ(result, floats[0] * floats[1] * floats[2] * floats[3], "a flat product")


@pytest.mark.parametrize("factors", [(0.3, 0.3, 0.3), (0.3, 0.7, -1.1)])
def test_verify_premultiplied_sums(factors: tuple[float, ...]) -> None:
    """One factor of all ranks: at the root; else at each leaf, rounded (A7)."""
    for dtype in FLOATS:
        values = inputs(3, 700, dtype)
        acc = torch.float64 if dtype == torch.float64 else torch.float32
        if len(set(factors)) == 1:
            root = tree.root([value.to(acc) for value in values], torch.add) * torch.tensor(factors[0], dtype=acc)
        else:
            leaves = [value.to(acc) * torch.tensor(f, dtype=acc) for value, f in zip(values, factors)]
            root = tree.root(leaves, torch.add)

        def job(peers: Peers, values: list[Tensor] = values) -> Tensor:
            x = values[peers.rank].clone()
            return peers.all_reduce(x, op="premul_sum", factor=factors[peers.rank], placement="two_shot")

        for result in values_of(run(3, job)):
            assert_bitwise_equal(result, reference.epilogue(root, out_dtype=dtype), f"{dtype} {factors}")


def covers(runs: list[tuple[int, int]], leaves: int, n: int, rounds: bool) -> tuple[list[Tensor], Order, list[Any]]:
    """Each rank's rows [k, n], the additions, and {node: value} of every rank for the oracle."""
    values = [wide_exponents((n,), torch.float32, seed=leaf) for leaf in range(leaves)]
    rows, held, maps = [], [], []
    for rank, (lo, hi) in enumerate(runs):
        program = _C.run_schedule(lo, hi, leaves, False, rounds)
        cover = _C.fold(values[lo:hi], program) if hi > lo else torch.empty(0, n)
        rows.append(cover)
        nodes = [tree.Node(*node) for node in program.outputs]
        maps.append(dict(zip(nodes, cover)))
        held += [(node.lo, node, rank, row) for row, node in enumerate(nodes)]
    held.sort()
    schedule = _C.nodes_schedule([node for _, node, _, _ in held], leaves, rounds)
    return rows, Order(tuple((rank, row) for _, _, rank, row in held), schedule), maps


RUNS = (
    (8, [(0, 4), (4, 8)]),  # one node per rank
    (12, [(0, 5), (5, 6), (6, 12)]),
    (9, [(0, 4), (4, 4), (4, 9)]),  # a rank without leaves
    (7, [(3, 7), (0, 3)]),  # not in rank order
    (64, [(0, 31), (31, 33), (33, 64)]),
)


@pytest.mark.parametrize("leaves,runs", RUNS)
@pytest.mark.parametrize("rounds", [False, True])
def test_verify_covers(leaves: int, runs: list[tuple[int, int]], rounds: bool) -> None:
    """Any runs of leaves, average, bias, narrower results, a bfloat16 wire: the oracle's bits, whole and scattered."""
    n, columns = 6 * 130, 130
    rows, order, maps = covers(runs, leaves, n, rounds)
    bias = wide_exponents((columns,), torch.float32, seed=1)
    counts = [len(part) for part in rows]
    root = reference.fold_covers(maps, leaves, rounds)

    def job(peers: Peers) -> None:
        mine = rows[peers.rank]
        if rounds:
            mine = mine.bfloat16()  # exact: the wire holds bfloat16 values
        for out_dtype, with_bias, placement in itertools.product(
            (torch.float32, torch.bfloat16, torch.float16), (False, True), ("one_shot", "two_shot", "scatter")
        ):
            expected = reference.epilogue(
                root.view(6, columns), bias if with_bias else None, avg=3, out_dtype=out_dtype
            ).view(-1)
            scatter = placement == "scatter"
            if scatter and n % peers.size:
                continue
            part = n // peers.size if scatter else n
            out = torch.empty(part, dtype=out_dtype)
            peers.fold(
                mine,
                order,
                out,
                counts=counts,
                divisor=3,
                bias=bias if with_bias else None,
                rounds=rounds,
                scatter=scatter,
                placement="auto" if scatter else placement,
            )
            if scatter:
                expected = expected[peers.rank * part : (peers.rank + 1) * part]
            assert_bitwise_equal(out, expected, f"L={leaves} {runs} {out_dtype} {placement} rank {peers.rank}")

    values_of(run(len(runs), job, staging_bytes=4 * 4096))


def test_verify_double_covers() -> None:
    rows = [wide_exponents((2, 50), torch.float64, seed=rank) for rank in range(2)]
    order = Order(((0, 0), (0, 1), (1, 0), (1, 1)), _C.run_schedule(0, 4, 4, True))
    expected = tree.root([rows[0][0], rows[0][1], rows[1][0], rows[1][1]], torch.add)

    def job(peers: Peers) -> None:
        for dtype in (torch.float64, torch.float32):
            out = torch.empty(50, dtype=dtype)
            peers.fold(rows[peers.rank], order, out, counts=[2, 2])
            assert_bitwise_equal(out, reference.epilogue(expected, out_dtype=dtype))

    values_of(run(2, job))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_verify_reduce_scatter(size: int) -> None:
    """Rows of the all-reduce, in several launches, in place of the own chunk, from and to any address."""
    n = size * 3001

    def job(peers: Peers) -> None:
        for dtype in FLOATS:
            expected = reference.all_reduce(inputs(size, n, dtype)).view(size, -1)[peers.rank]
            x = inputs(size, n, dtype)[peers.rank]
            out = torch.empty(3002, dtype=dtype)[1:]
            peers.reduce_scatter(out, x)
            assert_bitwise_equal(out, expected)
            shifted = torch.empty(n + 1, dtype=dtype)[1:].copy_(x)
            peers.reduce_scatter(shifted.view(size, -1)[peers.rank], shifted)
            assert_bitwise_equal(shifted.view(size, -1)[peers.rank], expected)
            if size > 2 and dtype == torch.float32:
                first, *rest = inputs(size, n, dtype)
                other = reference.all_reduce([*rest, first])
                assert_bits_differ(out, other.view(size, -1)[peers.rank], "the ranks in another order")

    values_of(run(size, job, staging_bytes=4096))


@pytest.mark.parametrize("seed", range(3))
def test_verify_consecutive_calls_do_not_meet(seed: int) -> None:
    """Sizes, placements and dtypes in turn, ranks that dawdle at random: every call its own bits (double buffers)."""
    size, calls = 3, 40
    generator = random.Random(seed)
    plan = []
    for number in range(calls):
        n, dtype = generator.choice((5, 900, 4001, 9000)), generator.choice(FLOATS)
        values = [wide_exponents((n,), dtype, seed=1000 * number + rank) for rank in range(size)]
        plan.append((values, generator.choice(("one_shot", "two_shot")), reference.all_reduce(values)))

    def job(peers: Peers) -> None:
        pauses = random.Random(seed * 10 + peers.rank)
        for number, (values, placement, expected) in enumerate(plan):
            if pauses.random() < 0.3:
                time.sleep(pauses.random() * 2e-3)
            out = torch.empty_like(expected)
            peers.all_reduce(values[peers.rank], placement=placement, out=out)
            assert_bitwise_equal(out, expected, f"call {number} of {len(out)} {out.dtype} {placement}")

    values_of(run(size, job, staging_bytes=8192))


def test_verify_a_launch_can_be_replayed() -> None:
    """As a CUDA graph does: the same arguments again and again, the numbers are counted on the device."""

    def job(peers: Peers) -> None:
        x, out = torch.empty(300), torch.empty(300)
        for number in range(5):
            values = [wide_exponents((300,), torch.float32, seed=10 * number + rank) for rank in range(2)]
            x.copy_(values[peers.rank])
            if number == 0:
                peers.all_reduce(x, out=out)
                ((launch,),) = peers._known.values()
            else:
                peers.driver.launch(peers.device, launch.call, 0)
            assert_bitwise_equal(out, reference.all_reduce(values), f"replay {number}")
        assert peers.calls == 1

    values_of(run(2, job))


# --- placement: integers only ---------------------------------------------------------------------------------------


@given(
    n=st.integers(1, 1 << 40),
    item=st.sampled_from([2, 4, 8, 12, 24]),
    size=st.integers(2, 16),
    placement=st.sampled_from(["one_shot", "two_shot", "scatter"]),
)
def test_verify_pieces(n: int, item: int, size: int, placement: str) -> None:
    """Each element of the root once, chunks in staging, everything in 64 bits."""
    staging = max(4096 * size, n // 50 // 4096 * 4096)
    if placement == "scatter":
        n = max(1, n // size) * size
    covered = 0
    for piece in peer_memory.pieces(n, item, size, placement, staging):
        chunk = -(-piece.width // peer_library.GRANULE) * peer_library.GRANULE
        assert piece.num_chunks * chunk * item <= staging
        sizes = [max(0, min(piece.width, piece.num_elements - c * piece.width)) for c in range(piece.num_chunks)]
        assert sum(sizes) == piece.num_elements
        if placement == "scatter":
            assert piece.first == covered // size and set(sizes) == {piece.width}
        else:
            assert piece.first == covered
        assert piece.first + (piece.num_chunks - 1) * piece.chunk_stride + sizes[-1] <= n or sizes[-1] == 0
        covered += piece.num_elements
    assert covered == n < 1 << 63


def test_verify_placement_by_size() -> None:
    choose = peer_memory.choose_placement
    assert choose(peer_memory.ONE_SHOT_BYTES, 8, "auto", False) == "one_shot"
    assert choose(peer_memory.ONE_SHOT_BYTES + 1, 8, "auto", False) == "two_shot"
    assert choose(1 << 40, 2, "auto", False) == "one_shot"
    assert choose(8, 4, "auto", True) == "scatter"
    with pytest.raises(PlanError, match="placement must be"):
        choose(8, 4, "ring", False)
    with pytest.raises(PlanError, match="do not fit into 4096 bytes"):
        peer_memory.pieces(10, 8, 64, "two_shot", 4096)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_verify_a_rank_that_does_not_come_is_named() -> None:
    """The device's wait ends; the host says who, which number, which phase; the group stays refused."""

    def job(peers: Peers) -> list[Any]:
        peers.all_reduce(torch.ones(10))
        if peers.rank == 1:
            time.sleep(0.6)
            return []
        found: list[Any] = []
        start = time.monotonic()
        peers.all_reduce(torch.ones(10))
        found.append(time.monotonic() - start)
        for call in (peers.check, lambda: peers.all_reduce(torch.ones(10)), peers.synchronize):
            with pytest.raises(TransportTimeout) as caught:
                call()
            found.append(str(caught.value))
        return found

    results = values_of(run(3, job, timeout_s=0.3))
    for rank in (0, 2):
        elapsed, *texts = results[rank]
        assert 0.25 < elapsed < 10.0
        assert len(set(texts)) == 1
        assert f"call 2 of this group, rank {rank} of 3, phase 'inputs', block 0: waited " in texts[0]
        assert "(limit 0.30 s, the timeout of this group)" in texts[0]
        assert "for rank 1, expected its number 2, got 0" in texts[0]  # of this parity
        assert f"Its process {os.getpid()} lives" in texts[0] and "undefined. Destroy the group" in texts[0]


def test_verify_a_rank_that_gave_up_ends_the_others_waits() -> None:
    """What a rank writes into its peers' headers when a wait of its own fails: they need not wait for their limits."""

    def waits_for_zero(peers: Peers) -> Any:
        if peers.rank == 0:
            given_up = ctypes.c_uint32.from_address(peers._segment.addresses[1] + 4)  # Header::given_up[0]
            time.sleep(0.2)
            given_up.value = 1
            return None
        start = time.monotonic()
        peers.all_reduce(torch.ones(10))
        with pytest.raises(TransportError, match="rank 0 has given up: its own error says why"):
            peers.check()
        return time.monotonic() - start

    assert values_of(run(2, waits_for_zero))[1] < 5.0


def test_verify_calls_that_differ_are_named() -> None:
    """Another count, dtype, operator, order: found before any data is read, on both sides."""
    cases = [
        (
            lambda peers: peers.all_reduce(torch.ones(10 + peers.rank)),
            "all_reduce, op sum, dtype float32 to float32, 1",
        ),
        (lambda peers: peers.all_reduce(torch.ones(10, dtype=FLOATS[peers.rank])), "dtype float"),
        (lambda peers: peers.all_reduce(torch.ones(10), op=("min", "max")[peers.rank]), "op m"),
        (lambda peers: peers.all_reduce(torch.ones(10), placement=("one_shot", "two_shot")[peers.rank]), "additions #"),
        (lambda peers: peers.all_reduce(torch.ones(100000 * (1 + peers.rank))), "00000 elements"),
    ]
    for call, text in cases:

        def job(peers: Peers, call: Any = call) -> str:
            call(peers)
            with pytest.raises(TransportError) as caught:
                peers.check()
            return str(caught.value)

        for rank, message in enumerate(values_of(run(2, job, timeout_s=5.0))):
            assert text in message and f"rank {1 - rank} makes another call" in message, message


def test_verify_refusals_at_construction() -> None:
    nothing = lambda peers: None  # noqa: E731
    for options, text in (
        ({"staging_bytes": [4096, 8192]}, "staging_bytes: 4096 on ranks .0.; 8192 on ranks .1."),
        ({"host": ["a", "b"]}, "host: a on ranks .0.; b on ranks .1."),
        ({"staging_bytes": 100}, "multiple of 4096, got 100"),
        ({"memory": "nvlink"}, "TBIK_PEER_MEMORY: expected one of"),
        ({"memory": "symmetric"}, "no group for symmetric memory"),
    ):
        for result in run(2, nothing, **options):
            assert isinstance(result, PlanError)
            with pytest.raises(PlanError, match=text):
                raise result


def test_verify_refusals_of_calls() -> None:
    def job(peers: Peers) -> None:
        x = torch.ones(6)
        for call, text in (
            (lambda: peers.all_reduce(torch.ones(6, dtype=torch.int8)), "expected a dense tensor of float32"),
            (lambda: peers.all_reduce(torch.ones(6, dtype=torch.int32), op="avg"), "avg of torch.int32 is not defined"),
            (lambda: peers.all_reduce(x, op="bxor"), "bxor of torch.float32"),
            (lambda: peers.all_reduce(x[::2]), "contiguous"),
            (lambda: peers.all_reduce(x, out=torch.empty(5)), "contiguous out of 6"),
            (lambda: peers.reduce_scatter(torch.empty(2), torch.ones(5)), "expected a contiguous out of 2|divide"),
        ):
            with pytest.raises(PlanError, match=text):
                call()
        assert_bitwise_equal(peers.all_reduce(x.clone()), x * 2)  # a refusal is no call

    values_of(run(2, job))


def test_verify_programs_that_kernels_cannot_run() -> None:
    library, call = peer_library.host(), peer_library.Call(size=2)
    with pytest.raises(PlanError, match="expected loads onto a stack"):
        library.set_program(call, [("load", 0, 0), ("load", 2, 1)], [(0, 0), (1, 0)], False)
    with pytest.raises(PlanError, match="expected a root, got 2"):
        library.set_program(call, [("load", 0, 0), ("load", 1, 1)], [(0, 0), (1, 0)], False)
    with pytest.raises(PlanError, match="65 nodes of all ranks"):
        schedule = _C.run_schedule(0, 65, 65, True)
        library.set_program(call, schedule.steps, [(0, leaf) for leaf in range(65)], False)
    exchanged = [("load", 0, 1), ("load", 1, 0), ("add", 0, 1)]
    library.set_program(call, exchanged, [(0, 0), (1, 0)], False)
    assert call.is_tree_of_ranks == 0  # a stack machine's program, whatever it is
    library.set_program(call, exchanged, [(1, 0), (0, 0)], False)
    assert call.is_tree_of_ranks == 1


# --- giving back ------------------------------------------------------------------------------------------------------


class Ledger(peer_library.Library):
    """The host's library, with a list of what is held and of what was asked; some functions can fail."""

    def __init__(self, device_type: str = "cpu", failing: str = "") -> None:
        super().__init__(peer_library.host().path, "cpu")
        self.device_type, self.failing = device_type, failing
        self.held: list[tuple[str, int]] = []
        self.asked: list[str] = []

    def _note(self, name: str, takes: str = "", value: int = 0) -> None:
        self.asked.append(name)
        if takes:
            self.held.remove((takes, value))  # ValueError: given back twice, or never had
        if name == self.failing:
            raise TransportError(f"peer memory: {name}: made to fail")

    def allocate(self, device: int, num_bytes: int) -> tuple[int, bytes]:
        address, handle = super().allocate(device, num_bytes)
        self.held.append(("segment", address))
        return address, handle

    def open(self, device: int, handle: bytes, num_bytes: int) -> int:
        address = super().open(device, handle, num_bytes)
        self.held.append(("mapping", address))
        return address

    def allocate_status(self, device: int) -> tuple[Any, int]:
        host, address = super().allocate_status(device)
        self.held.append(("status", ctypes.addressof(host.contents)))
        return host, address

    def free(self, device: int, address: int) -> None:
        self._note("free", "segment", address)
        super().free(device, address)

    def close(self, device: int, address: int) -> None:
        self._note("close", "mapping", address)
        super().close(device, address)

    def free_status(self, device: int, host: Any) -> None:
        self._note("free_status", "status", ctypes.addressof(host.contents))
        super().free_status(device, host)

    def synchronize(self, device: int) -> None:
        self._note("synchronize")


class FarMeeting(Meeting):
    """Every rank takes the others for ranks of other processes, so that it opens their segments."""

    def exchange(self, rank: int) -> peer_memory.Exchange:
        meet = super().exchange(rank)

        def meet_strangers(key: str, record: dict[str, Any]) -> list[dict[str, Any]]:
            records = [dict(one) for one in meet(key, record)]
            for other, one in enumerate(records):
                if other != rank and "start_time" in one:
                    one["start_time"] += " of another process"
            return records

        return meet_strangers


def mapped_segments() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/tbik-peer-" in line for line in maps)


def test_verify_close_gives_everything_back() -> None:
    """Mappings of the peers' segments, the own segment, the Status: once; later calls are refused."""
    before, library, size = mapped_segments(), Ledger(), 3
    everybody = threading.Barrier(size)
    during: list[int] = []

    def job(peers: Peers) -> None:
        assert_bitwise_equal(peers.all_reduce(torch.ones(70000)), torch.full((70000,), 3.0))
        everybody.wait(30)
        during.append(mapped_segments() - before)
        everybody.wait(30)
        peers.close()
        asked = len(library.asked)
        everybody.wait(30)
        assert peers.is_closed and len(library.asked) > 0
        everybody.wait(30)
        peers.close()
        peers.close(peers_left=False)
        assert len(library.asked) >= asked  # of the other ranks at most: Ledger refuses what is given back twice
        peers.check()
        for call in (
            lambda: peers.all_reduce(torch.ones(3)),
            lambda: peers.reduce_scatter(torch.empty(1), torch.ones(3)),
        ):
            with pytest.raises(TransportError, match=f"rank {peers.rank} of 3: it was closed"):
                call()

    values_of(run(size, job, library=library, meeting=FarMeeting(size)))
    assert during == [size * size] * size  # every rank maps every segment: an own one or another's
    assert library.held == [] and mapped_segments() == before
    assert sorted(name for name in library.asked if name != "synchronize") == sorted(
        ["free"] * size + ["free_status"] * size + ["close"] * size * (size - 1)
    )


def test_verify_a_failure_is_told_after_close_too() -> None:
    """The Status is given back, what it said is not lost; nothing becomes a success."""

    def job(peers: Peers) -> str:
        if peers.rank == 1:
            time.sleep(0.6)
            return ""
        peers.all_reduce(torch.ones(10))
        peers.close()
        texts = []
        for call in (peers.check, peers.synchronize, lambda: peers.all_reduce(torch.ones(10))):
            with pytest.raises(TransportTimeout) as caught:
                call()
            texts.append(str(caught.value))
        assert len(set(texts)) == 1
        return texts[0]

    assert "call 1 of this group, rank 0 of 2" in values_of(run(2, job, timeout_s=0.2))[0]


def test_verify_every_step_of_close_is_tried() -> None:
    """One that fails is named, and the others are done."""
    for failing, left in (("close", 0), ("free_status", 0), ("synchronize", 0), ("free", 0)):
        library, size = Ledger(failing=failing), 2
        everybody = threading.Barrier(size)

        def job(peers: Peers, failing: str = failing, everybody: threading.Barrier = everybody) -> None:
            everybody.wait(30)
            with pytest.raises(TransportError, match=f"close, rank {peers.rank} of 2: .*{failing}: made to fail"):
                peers.close()
            peers.close()

        values_of(run(size, job, library=library, meeting=FarMeeting(size)))
        assert len(library.held) == left, failing
        assert {"close", "free", "free_status", "synchronize"} == set(library.asked)


def _dropped(library: Ledger, meeting: Meeting) -> list[str]:
    """A group that nobody closes; the warnings."""
    size = len(meeting.records)
    made: list[Peers] = []

    def play(rank: int) -> None:
        made.append(Peers(library, rank, rank, size, meeting.exchange(rank), timeout_s=5.0))

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(made) == size and len(library.held) > 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.clear()
        gc.collect()
    return [str(one.message) for one in caught if issubclass(one.category, ResourceWarning)]


def test_verify_a_dropped_group_gives_back_what_nobody_reads() -> None:
    """Host memory of other processes stays with those who mapped it: everything. Freed CUDA memory does not, nor does
    that of ranks of one process: all but the own segment, and a warning."""
    library = Ledger()
    assert _dropped(library, FarMeeting(2)) == []
    assert library.held == []
    for library, meeting in ((Ledger("cuda"), FarMeeting(2)), (Ledger(), Meeting(2))):
        texts = _dropped(library, meeting)
        assert [kind for kind, _ in library.held] == ["segment"] * 2 == ["segment"] * len(texts)
        assert all("dropped without close() on all its ranks: its own segment stays" in text for text in texts)
        for _, address in list(library.held):
            library.free(0, address)
    library = Ledger("cuda")
    assert _dropped(library, FarMeeting(1)) == []  # of one rank alone nobody reads
    assert library.held == []


def test_verify_groups_that_cannot_be_made_hold_nothing() -> None:
    library = Ledger()
    for result in run(2, lambda peers: None, library=library, host=["a", "b"]):
        assert isinstance(result, PlanError)
    for result in run(2, lambda peers: None, library=library, memory="symmetric"):
        assert isinstance(result, PlanError)
    del result
    gc.collect()
    assert library.held == []


def test_verify_a_forked_child_gives_nothing_back() -> None:
    """It has the parent's objects, not the parent's rights to them: a child that ends or drops them frees nothing."""
    library = Ledger()
    peers = Peers(library, 0, 0, 1, lambda key, record: [record], timeout_s=5.0)
    held = list(library.held)
    child = os.fork()
    if child == 0:
        peers.close()
        os._exit(0 if library.held == held and not library.asked else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert_bitwise_equal(peers.all_reduce(torch.ones(5)), torch.ones(5))
    peers.close()
    assert library.held == []


def test_verify_reductions_leave_before_they_give_back() -> None:
    """Own kernels end, every rank says so, then segments go; where one does not say so, the own segment stays."""
    library, size = Ledger("cuda"), 2
    everybody = threading.Barrier(size)

    def leave() -> None:
        assert "synchronize" in library.asked and "free" not in library.asked and "close" not in library.asked
        everybody.wait(30)

    def closes(peers: Peers) -> None:
        reductions = PeerReductions(peers, leave)
        reductions.close()
        reductions.close()

    values_of(run(size, closes, library=library, meeting=FarMeeting(size)))
    assert library.held == []

    def nobody_comes() -> None:
        raise TransportTimeout("nobody came")

    def cannot_close(peers: Peers) -> None:
        with pytest.raises(TransportTimeout, match="nobody came"):
            PeerReductions(peers, nobody_comes).close()
        assert peers.is_closed

    values_of(run(size, cannot_close, library=library, meeting=FarMeeting(size)))
    assert [kind for kind, _ in library.held] == ["segment"] * size
    for _, address in list(library.held):
        library.free(0, address)


# --- processes ------------------------------------------------------------------------------------------------------


def _exchange_over(group: Any) -> peer_memory.Exchange:
    def exchange(key: str, record: dict[str, Any]) -> list[dict[str, Any]]:
        records: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(records, record, group=group)
        return records

    return exchange


def _in_processes(group: Any, kill: int, n: int) -> Any:
    size, rank = group.size(), group.rank()
    peers = Peers(peer_library.host(), rank, rank, size, _exchange_over(group), timeout_s=2.0)
    values = inputs(size, n, torch.bfloat16)
    x = values[rank].clone()
    peers.all_reduce(x)
    if rank == kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if kill < 0:
        return x
    time.sleep(0.2)  # the killed one has been waited for by its parent
    peers.all_reduce(x.clone(), placement="two_shot")
    try:
        peers.check()
    except TransportTimeout as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_verify_processes() -> None:
    """Segments opened by name in other processes; a killed peer is named as gone, within the limit."""
    with Pool(3) as pool:
        n = 70001
        results = pool.run(_in_processes, 3, -1, n)
        for result in results:
            assert_bitwise_equal(result, reference.all_reduce(inputs(3, n, torch.bfloat16)))
        outcomes = pool.outcomes(_in_processes, 3, 1, 100, grace=20.0)
        for rank in (0, 2):
            assert "for rank 1, expected its number 2" in outcomes[rank].value
            assert "is gone: look at the log of rank 1" in outcomes[rank].value
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"tbik-peer-{os.getpid()}-")]


def test_verify_wide_offsets() -> None:
    """A message beyond 2^31 elements is cut in 64 bits (integers only; nothing of that size is allocated)."""
    n = 3 * 2**31 + 5
    cut = peer_memory.pieces(n, 2, 8, "two_shot", peer_memory.STAGING_BYTES)
    assert cut[-1].first + cut[-1].num_elements == n and cut[-1].first > 2**32
    assert len(cut) == math.ceil(n / cut[0].num_elements)
