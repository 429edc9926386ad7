"""The tree GEMM (csrc/gemm.h) on every path against the oracle: ORDER.md A1-A3, A6, A7, T2-T5, L2, S1, P2."""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import SHAPES, wide_exponents
from long_cases import long_cases
from torch import Tensor

from tbik import _C, reference, tree
from tbik.plan import TreePlan

NAMES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.float64: "float64",
}
PATHS = [
    pytest.param(path, dtype, id=f"{path}-{NAMES[dtype]}")
    for path in _C.cpu_paths()
    for dtype in NAMES
    if path != "avx512_bf16" or dtype == torch.bfloat16
]
FAST = {name: _C.default_path(name) for name in NAMES.values()}


def acc(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def plan_of(leaves: int, dtype: torch.dtype, wire: str | None = None) -> TreePlan:
    return TreePlan(leaves=leaves, acc_dtype="float64" if dtype == torch.float64 else "float32", wire_dtype=wire)


def linear(
    x_MK: Tensor,
    w_NK: Tensor,
    leaves: int,
    path: str,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    rounds: bool = False,
) -> Tensor:
    """x W^T by the kernel, one root."""
    name = NAMES[x_MK.dtype]
    program = _C.run_schedule(0, leaves, leaves, True, rounds)
    cuts = [_C.cuts(x_MK.shape[1], leaves)]
    out = out_dtype or acc(x_MK.dtype)
    return _C.gemm([x_MK], False, [w_NK], False, cuts, program, name, bias, out, path)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("path", "dtype"), PATHS)
def test_verify_gemm_equals_reference(path: str, dtype: torch.dtype) -> None:
    shapes = [(p.m, p.n, p.k, p.leaves) for p in SHAPES] + [(13, 70, 203, 8), (8, 65, 97, 3), (3, 2, 7, 12)]
    for m, n, k, leaves in shapes:
        x, w = wide_exponents((m, k), dtype, seed=1), wide_exponents((n, k), dtype, seed=2)
        bias = wide_exponents((n,), dtype, seed=3)
        plan = plan_of(leaves, dtype)
        what = f"{path} {dtype} M={m} N={n} K={k} L={leaves}"
        root = reference.linear(x, w, plan)
        assert_bitwise_equal(linear(x, w, leaves, path), root, what)
        outs = (torch.float64, torch.float32) if dtype == torch.float64 else (torch.float32, dtype, torch.bfloat16)
        for out in outs:
            expected = reference.epilogue(root, bias, out_dtype=out)
            assert_bitwise_equal(linear(x, w, leaves, path, bias, out), expected, f"{what} bias {out}")


def test_verify_order_shows_in_the_bits() -> None:
    """Negative control: one flat chain differs from the tree, other leaf counts differ, on the same data."""
    for dtype, name in NAMES.items():
        x, w = wide_exponents((8, 512), dtype, seed=1), wide_exponents((64, 512), dtype, seed=2)
        tree_sum = linear(x, w, 8, FAST[name])
        assert_bits_differ(tree_sum, linear(x, w, 1, FAST[name]), f"{dtype}: L = 8 and L = 1")
        assert_bits_differ(tree_sum, reference.chain(x, w), f"{dtype}: tree and flat chain")


@pytest.mark.parametrize("dtype", list(NAMES))
def test_verify_every_path_same_bits(dtype: torch.dtype) -> None:
    """M = 1..70, N around the panel width, odd K: the same bits on every path, packed before or in the call."""
    name = NAMES[dtype]
    paths = [path for path in _C.cpu_paths() if path != "avx512_bf16" or name == "bfloat16"]
    for n, k, leaves in ((64, 97, 8), (1, 33, 4), (65, 40, 6), (127, 19, 3)):
        x, w = wide_exponents((70, k), dtype, seed=4), wide_exponents((n, k), dtype, seed=5)
        cuts, program = [_C.cuts(k, leaves)], _C.run_schedule(0, leaves, leaves, True)
        packed = _C.pack([w], False, cuts, name)
        assert (packed.n, packed.num_chains, packed.compute) == (n, leaves, name)
        whole = linear(x, w, leaves, paths[-1])
        for path, m in itertools.product(paths, range(1, 71)):
            if path == "portable" and m % 9 != 1:  # slow
                continue
            out = _C.gemm([x[:m]], False, packed, False, cuts, program, name, None, acc(dtype), path)
            assert_bitwise_equal(out, whole[:m], f"{path} {dtype} M={m} N={n} K={k}")


@pytest.mark.parametrize("dtype", list(NAMES))
def test_verify_blocking_every_path(dtype: torch.dtype) -> None:
    """Chains longer and shorter than a run, one and several row blocks, large and small blocks of A: the same bits."""
    name = NAMES[dtype]
    paths = [path for path in _C.cpu_paths() if path != "avx512_bf16" or name == "bfloat16"]
    for m, n, k, leaves in ((100, 70, 1500, 2), (13, 81, 2100, 3), (210, 17, 160, 40), (31, 150, 700, 90)):
        x, w = wide_exponents((m, k), dtype, seed=14), wide_exponents((n, k), dtype, seed=15)
        flat = linear(x, w, 1, paths[-1])
        whole = linear(x, w, leaves, paths[-1])
        assert_bits_differ(whole, flat, f"{dtype} K={k}: tree and flat chain")
        for path in paths[:-1]:
            assert_bitwise_equal(linear(x, w, leaves, path), whole, f"{path} {dtype} M={m} N={n} K={k} L={leaves}")
            assert_bitwise_equal(linear(x, w, 1, path), flat, f"{path} {dtype} M={m} N={n} K={k} L=1")


@pytest.mark.parametrize(("path", "dtype"), PATHS)
def test_verify_row_alone_equals_row_in_batch(path: str, dtype: torch.dtype) -> None:
    """A row's bits ignore the other rows, its position, and NaN or Inf in its neighbours."""
    x, w = wide_exponents((111, 131), dtype, seed=6), wide_exponents((66, 131), dtype, seed=7)
    batch = linear(x, w, 5, path)
    for row in (0, 1, 5, 6, 63, 95, 96, 110):
        assert_bitwise_equal(linear(x[row : row + 1], w, 5, path), batch[row : row + 1], f"row {row} alone")
    shuffled = torch.randperm(111, generator=torch.Generator().manual_seed(0))
    assert_bitwise_equal(linear(x[shuffled], w, 5, path), batch[shuffled], "rows exchanged")
    poisoned = x.clone()
    poisoned[1::2] = torch.nan
    poisoned[3::4] = torch.inf
    assert_bitwise_equal(linear(poisoned, w, 5, path)[::2], batch[::2], "NaN and Inf in the neighbours")


def test_verify_threads() -> None:
    """1, 2 and 3 threads: the same bits for the product, the packing and a k-major product."""
    before = torch.get_num_threads()
    root = _C.run_schedule(0, 8, 8, True)
    try:
        for dtype, name in NAMES.items():
            w = wide_exponents((333, 300), dtype, seed=8)
            for m in (1, 8, 70, 200):
                x = wide_exponents((m, 300), dtype, seed=9)
                results = []
                for count in (1, 2, 3):
                    torch.set_num_threads(count)
                    results.append(linear(x, w, 8, FAST[name]))
                    args = ([x.t().contiguous()], True, [w.t().contiguous()], True, [_C.cuts(300, 8)], root, name)
                    assert_bitwise_equal(_C.gemm(*args, None, acc(dtype)), results[-1], f"{dtype} M={m}, k-major")
                    packed = _C.pack([w.t().contiguous()], True, [_C.cuts(300, 8)], name)
                    args = ([x], False, packed, False, [_C.cuts(300, 8)], root, name)
                    assert_bitwise_equal(_C.gemm(*args, None, acc(dtype)), results[-1], f"{dtype} M={m}, packed")
                assert_bitwise_equal(results[1], results[0], f"{dtype} M={m}, 2 threads")
                assert_bitwise_equal(results[2], results[0], f"{dtype} M={m}, 3 threads")
    finally:
        torch.set_num_threads(before)


# Run in a process of its own: OpenMP's workers inherit the mode of the thread that creates them. Prints nothing.
FLUSH = """
import sys, torch
tests, flush = sys.argv[1:]
sys.path[:0] = [tests, tests + "/.."]
torch.set_num_threads(2)
from tbik import _C, reference
from tbik.plan import TreePlan
from assertions import assert_bitwise_equal
from cases import wide_exponents
names = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}
def data(dtype, shape, seed, spread):
    # exponents around the square root of the smallest normal number, so that products and sums straddle it
    x = wide_exponents(shape, dtype, seed, spread)
    shift = {torch.float16: -8, torch.float64: -511}.get(dtype, -63)
    x = (x.double() * 2.0**shift).to(dtype)
    if shape[1] == 4:
        return x
    x[:, ::7] = (x[:, ::7].double() * 2.0**-70).to(dtype)                     # subnormal operands
    x[:, 3::7] = (x[:, 3::7].double() * 2.0**(60 if dtype != torch.float16 else 0)).to(dtype)
    return x
cases = []
for dtype, name in names.items():
    # The last one: one product per leaf, all near the smallest normal number, so that nodes become subnormal.
    for m, n, k, leaves, spread in ((1, 65, 96, 4, 24), (7, 64, 50, 8, 24), (13, 130, 33, 3, 24), (13, 65, 4, 4, 3)):
        x, w = data(dtype, (m, k), 1, spread), data(dtype, (n, k), 2, spread)
        bias = torch.full((n,), 2.0**-140)
        plan = TreePlan(leaves=leaves, acc_dtype="float64" if dtype == torch.float64 else "float32")
        root = reference.linear(x, w, plan)
        out = torch.float32
        cases.append((dtype, x, w, bias.to(root.dtype), leaves, root, reference.epilogue(root, bias, out_dtype=out)))
# A node whose result is subnormal: leaves 1.5 * 2^-126 and -2^-126, and a chain whose step is subnormal: flushed.
x = torch.tensor([[1.5 * 2.0**-63, 2.0**-63], [2.0**-63, 2.0**-64]])
w = torch.tensor([[2.0**-63, -(2.0**-63)]])
node, chain = torch.tensor([[0x00400000], [0x00400000]], dtype=torch.int32), None
assert torch.set_flush_denormal(flush == "on") or flush == "off"
mode = _C.fp_mode()
assert (mode != 0) == (flush == "on")
subnormal_nodes = 0
for dtype, x_, w_, bias, leaves, root, expected in cases:
    if root.dtype == torch.float32:
        magnitude = root.view(torch.int32) & 0x7fffffff
        subnormal_nodes += int(((magnitude > 0) & (magnitude < 0x800000)).sum())
    for path in _C.cpu_paths():
        if path == "avx512_bf16" and dtype != torch.bfloat16:
            continue
        for threads in (1, 2):
            torch.set_num_threads(threads)
            program = _C.run_schedule(0, leaves, leaves, True)
            cuts = [_C.cuts(x_.shape[1], leaves)]
            out = _C.gemm([x_], False, [w_], False, cuts, program, names[dtype], None, root.dtype, path)
            assert_bitwise_equal(out, root, f"{path} {dtype} threads={threads}")
            out = _C.gemm([x_], False, [w_], False, cuts, program, names[dtype], bias, torch.float32, path)
            assert_bitwise_equal(out, expected, f"{path} {dtype} threads={threads} bias")
            assert _C.fp_mode() == mode
assert subnormal_nodes > 100, subnormal_nodes
for path in _C.cpu_paths():
    for dtype in (torch.bfloat16, torch.float32):
        if path == "avx512_bf16" and dtype != torch.bfloat16:
            continue
        args = ([x.to(dtype)], False, [w.to(dtype)], False)
        tree = _C.gemm(*args, [[0, 1, 2]], _C.run_schedule(0, 2, 2, True), names[dtype], None, torch.float32, path)
        # row 0: 1.5 * 2^-126 - 2^-126; row 1: 2^-126 - (2^-127 flushed to 0)
        assert tree.view(torch.int32).tolist() == [[0x00400000], [0x00800000]], (path, tree)
        flat = _C.gemm(*args, [[0, 2]], _C.run_schedule(0, 1, 1, True), names[dtype], None, torch.float32, path)
        # row 0: the step 0.5 * 2^-126 is flushed; row 1: 2^-126 - 2^-127 is flushed
        assert flat.view(torch.int32).tolist() == [[0], [0]], (path, flat)
try:
    _C.gemm([x], False, [w], False, [[0, 3]], _C.run_schedule(0, 1, 1, True), "float32", None, torch.float32)
    raise AssertionError("not refused")
except ValueError:
    assert _C.fp_mode() == mode
"""


@pytest.mark.parametrize("flush", ["on", *long_cases(["off"])])
def test_verify_flush_mode_of_the_process(flush: str) -> None:
    """Chains flush, nodes, epilogues and fp64 do not, on every path and in every thread, and the mode is restored."""
    command = [sys.executable, "-c", FLUSH, str(Path(__file__).resolve().parent), flush]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("path", "dtype"), PATHS)
def test_verify_empty_contractions(path: str, dtype: torch.dtype) -> None:
    """K = 0 gives +0 (plus the bias); M = 0 and N = 0 give empty results; empty leaves are +0."""
    bias = torch.arange(5.0).to(dtype)
    empty, w = torch.empty(3, 0, dtype=dtype), torch.empty(5, 0, dtype=dtype)
    assert_bitwise_equal(linear(empty, w, 4, path), torch.zeros(3, 5, dtype=acc(dtype)))
    assert_bitwise_equal(linear(empty, w, 1, path, bias), bias.to(acc(dtype)).expand(3, 5))
    assert linear(torch.empty(0, 7, dtype=dtype), torch.empty(5, 7, dtype=dtype), 2, path).shape == (0, 5)
    assert linear(torch.empty(3, 7, dtype=dtype), torch.empty(0, 7, dtype=dtype), 2, path).shape == (3, 0)
    minus = torch.full((1, 1), -1.0, dtype=dtype)
    zero = linear(minus, torch.zeros(1, 1, dtype=dtype), 8, path)  # -1 * 0 = -0, the leaf is +0
    assert_bitwise_equal(zero, torch.zeros(1, 1, dtype=acc(dtype)))


@pytest.mark.parametrize("dtype", list(NAMES))
@pytest.mark.parametrize("rounds", [False, True])
def test_verify_covers_of_uneven_runs(dtype: torch.dtype, rounds: bool) -> None:
    """Each run [lo, hi) leaves a cover in acc_dtype; any set of covers folds to the root of the whole."""
    if rounds and dtype == torch.float64:
        return  # refused: test_verify_bad_calls_are_refused
    name = NAMES[dtype]
    for leaves, k in ((8, 203), (6, 96), (7, 5), (12, 577)):
        x, w = wide_exponents((5, k), dtype, seed=10), wide_exponents((66, k), dtype, seed=11)
        cuts = _C.cuts(k, leaves)
        whole = linear(x, w, leaves, FAST[name], rounds=rounds)
        plan = plan_of(leaves, dtype, "bfloat16" if rounds else None)
        assert_bitwise_equal(whole, reference.linear(x, w, plan, round_wire=rounds), f"{dtype} L={leaves}")
        for lo, hi in ((0, 1), (0, 3), (1, 4), (2, leaves), (leaves, leaves)):
            runs, nodes, values = [(0, lo), (lo, hi), (hi, leaves)], [], []
            for first, end in runs:
                program = _C.run_schedule(first, end, leaves, False, rounds)
                args = ([x], False, [w], False, [cuts[first : end + 1]], program, name, None, acc(dtype))
                cover = _C.gemm(*args)
                assert cover.shape == (len(program.outputs), 5, 66) and cover.dtype == acc(dtype)
                nodes += program.outputs
                values += list(cover)
            root = _C.fold(values, _C.nodes_schedule(nodes, leaves, rounds))
            assert_bitwise_equal(root, whole, f"{dtype} L={leaves} K={k} runs {runs} rounds={rounds}")


def views(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values under other strides."""
    rows, columns = x.shape
    yield "transposed storage", x.t().contiguous().t()
    wide = torch.full((rows, 2 * columns + 3), torch.nan, dtype=x.dtype)
    wide[:, 3::2] = x
    yield "every second column", wide[:, 3::2]
    tall = torch.full((3 * rows + 1, columns + 5), torch.nan, dtype=x.dtype)
    tall[1::3, 5:] = x
    yield "every third row, offset", tall[1::3, 5:]


@pytest.mark.parametrize(("path", "dtype"), PATHS)
def test_verify_strides_and_k_major(path: str, dtype: torch.dtype) -> None:
    name = NAMES[dtype]
    for m, n, k in ((9, 70, 45), (1, 64, 64), (14, 5, 130)):
        x, w = wide_exponents((m, k), dtype, seed=12), wide_exponents((n, k), dtype, seed=13)
        cuts, program = [_C.cuts(k, 3)], _C.run_schedule(0, 3, 3, True)
        expected = linear(x, w, 3, path)
        pairs = itertools.chain(((what, v, w) for what, v in views(x)), ((what, x, v) for what, v in views(w)))
        for what, a, b in pairs:
            out = _C.gemm([a], False, [b], False, cuts, program, name, None, acc(dtype), path)
            assert_bitwise_equal(out, expected, f"{path} {dtype} {what}")
        for a_k, b_k in ((True, False), (False, True), (True, True)):
            a, b = (x.t().contiguous() if a_k else x), (w.t().contiguous() if b_k else w)
            out = _C.gemm([a], a_k, [b], b_k, cuts, program, name, None, acc(dtype), path)
            assert_bitwise_equal(out, expected, f"{path} {dtype} k-major {a_k} {b_k}")
    repeated = wide_exponents((1, 40), dtype, seed=14).expand(6, 40)
    assert_bitwise_equal(linear(repeated, repeated, 4, path), linear(repeated.clone(), repeated.clone(), 4, path))


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_verify_strides_beyond_32_bits(name: str) -> None:
    """Offsets of more than 2^31 elements, in memory that is reserved but hardly touched."""
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    stride = 2**31 + 5
    size = (2 * stride + 8) * dtype.itemsize
    with tempfile.TemporaryFile() as file:
        try:
            file.truncate(size)  # a hole: no space is taken
            memory = mmap.mmap(file.fileno(), size)
        except OSError as error:
            pytest.skip(f"no sparse file of {size >> 30} GiB: {error}")
    sparse = torch.frombuffer(memory, dtype=dtype, count=2 * stride + 8)
    for shape, strides in (((3, 5), (stride, 1)), ((5, 3), (1, stride))):
        far = sparse.as_strided(shape, strides)
        near = wide_exponents(shape, dtype, seed=15)
        far.copy_(near)
        w = wide_exponents((4, shape[1]), dtype, seed=16)
        assert_bitwise_equal(linear(far, w, 2, ""), linear(near, w, 2, ""), f"a, strides {strides}")
        assert_bitwise_equal(linear(w, far, 2, ""), linear(w, near, 2, ""), f"b, strides {strides}")
        for path in _C.amx_paths() if dtype == torch.bfloat16 else ():
            options = ([_C.cuts(shape[1], 2)], _C.run_schedule(0, 2, 2, True), NAMES[dtype], None, torch.float32)
            for left, right, plain in ((far, w, (near, w)), (w, far, (w, near))):
                out, expected = (
                    _C.gemm([a], False, [b], False, *options, path, "amx") for a, b in ((left, right), plain)
                )
                assert_bitwise_equal(out, expected, f"{path}, leaf amx, strides {strides}")


@pytest.mark.parametrize(("path", "dtype"), PATHS)
def test_verify_group_dx_is_one_chain_per_leaf(path: str, dtype: torch.dtype) -> None:
    """Several sources: leaf i is one chain: source 0's leaf i, then source 1's, ... (L2), odd lengths too."""
    for widths, leaves, m, k in (((9, 3, 3), 3, 5, 66), ((33, 7, 7), 4, 8, 10), ((5, 0, 2), 3, 2, 70)):
        grads = [wide_exponents((m, n), dtype, seed=20 + n) for n in widths]
        weights = [wide_exponents((n, k), dtype, seed=30 + n) for n in widths]
        cuts = [_C.cuts(n, leaves) for n in widths]
        program = _C.run_schedule(0, leaves, leaves, True)
        expected = reference.linear_dx(grads, weights, plan_of(leaves, dtype))
        out = _C.gemm(grads, False, weights, True, cuts, program, NAMES[dtype], None, acc(dtype), path)
        assert_bitwise_equal(out, expected, f"{path} {dtype} {widths}")
        packed = _C.pack(weights, True, cuts, NAMES[dtype])
        out = _C.gemm(grads, False, packed, True, cuts, program, NAMES[dtype], None, acc(dtype), path)
        assert_bitwise_equal(out, expected, f"{path} {dtype} {widths}, packed")


def sample_cuts(offsets: Sequence[int]) -> tuple[list[int], list[int]]:
    """(cuts of all blocks of 512 tokens, blocks per sample)."""
    cuts, counts = [offsets[0]], []
    for first, end in itertools.pairwise(offsets):
        blocks = range(first, end, reference.TOKENS_PER_BLOCK)
        counts.append(len(blocks))
        cuts += [min(start + reference.TOKENS_PER_BLOCK, end) for start in blocks]
    return cuts, counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounds", [False, True])
def test_verify_dw_samples_and_blocks(dtype: torch.dtype, rounds: bool) -> None:
    """Leaves are samples, each a tree over its blocks; a bf16 wire rounds from the sample leaf up (S1)."""
    for offsets in ([0, 3], [2, 5, 5, 9, 12], [0, 600, 1700, 1701, 1701], [0, 1, 2, 3, 4, 5, 6, 7, 8]):
        tokens, n, k = offsets[-1] + 3, 7, 66
        dy, x = wide_exponents((tokens, n), dtype, seed=40), wide_exponents((tokens, k), dtype, seed=41)
        plan = TreePlan(leaves=8, grad_wire_dtype="bfloat16" if rounds else None)
        cuts, counts = sample_cuts(offsets)
        program = _C.sample_schedule(counts, rounds)
        expected = reference.linear_dw(dy, x, offsets, plan)
        for path in _C.cpu_paths():
            if path == "avx512_bf16" and dtype != torch.bfloat16:
                continue
            out = _C.gemm([dy], True, [x], True, [cuts], program, NAMES[dtype], None, torch.float32, path)
            assert_bitwise_equal(out, expected, f"{path} {dtype} {offsets} rounds={rounds}")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_verify_master_weights_are_rounded_once(name: str) -> None:
    """fp32 operands of a 16-bit product: RNE, subnormals kept, as if cast before; also on the left, in any layout."""
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float16
    x, w = wide_exponents((9, 70), torch.float32, 50, 24), wide_exponents((70, 70), torch.float32, 51, 24)
    w[:, :3] *= 2.0**-24  # subnormal in fp16
    w[0, 4], w[1, 4] = torch.inf, torch.nan
    x16, w16 = reference.epilogue(x, out_dtype=dtype), reference.epilogue(w, out_dtype=dtype)
    cuts, program = [_C.cuts(70, 4)], _C.run_schedule(0, 4, 4, True)
    for path in _C.cpu_paths():
        if path == "avx512_bf16" and name != "bfloat16":
            continue
        expected = linear(x16, w16, 4, path)
        for a_k, b_k in itertools.product((False, True), repeat=2):
            a, b = (x.t().contiguous() if a_k else x), (w.t().contiguous() if b_k else w)
            out = _C.gemm([a], a_k, [b], b_k, cuts, program, name, None, torch.float32, path)
            assert_bitwise_equal(out, expected, f"{path} {name} k-major {a_k} {b_k}")
    mixed = _C.gemm([x16], False, [w], False, cuts, program, "float32", None, torch.float32)
    assert_bitwise_equal(mixed, linear(x16.float(), w, 4, ""), "16-bit values in an fp32 product are exact")


@pytest.mark.parametrize(("path", "dtype"), PATHS)
def test_verify_nan_leaves_as_the_canonical_one(path: str, dtype: torch.dtype) -> None:
    """Inf - Inf, 0 * Inf and any NaN payload come out as one pattern, from roots and covers."""
    x = torch.ones(2, 40, dtype=dtype)
    x[0, 5] = torch.inf
    w = torch.ones(65, 40, dtype=dtype)
    w[0, 5], w[1, 5], w[2, 20] = 0.0, -torch.inf, torch.nan
    w[3, 6] = -torch.inf
    bits, pattern = {torch.float64: (torch.int64, 0x7FF8 << 48)}.get(dtype, (torch.int32, 0x7FC00000))
    for to_root in (True, False):
        program = _C.run_schedule(0, 4, 4, to_root)
        cuts = [_C.cuts(40, 4)]
        out = _C.gemm([x], False, [w], False, cuts, program, NAMES[dtype], None, acc(dtype), path).reshape(2, 65)
        nan = torch.isnan(out)
        assert nan[0, [0, 2, 3]].all() and nan[1, 2] and nan.sum() == 4
        assert (out.view(bits)[nan] == pattern).all()
        assert out[0, 1] == -torch.inf and out[0, 4] == torch.inf


def test_verify_path_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in _C.cpu_paths():
        monkeypatch.setenv("TBIK_CPU_PATH", path)
        assert _C.default_path("bfloat16") == path
        assert _C.default_path("float32") == (path if path != "avx512_bf16" else "avx512f")
    monkeypatch.setenv("TBIK_CPU_PATH", "sse9")
    with pytest.raises(ValueError, match="TBIK_CPU_PATH 'sse9' is not available on this CPU; available: "):
        linear(torch.ones(1, 1), torch.ones(1, 1), 1, "")
    assert os.environ["TBIK_CPU_PATH"] == "sse9"


def test_verify_bad_calls_are_refused() -> None:
    x, w = torch.ones(2, 8), torch.ones(3, 8)
    one, two = _C.run_schedule(0, 1, 1, True), _C.run_schedule(0, 2, 2, True)
    packed = _C.pack([w], False, [[0, 3, 8]], "float32")
    out = torch.float32
    cases = {
        "the schedule loads 2": lambda: _C.gemm([x], False, [w], False, [[0, 8]], two, "float32", None, out),
        r"a\[0\].*ends at 9": lambda: _C.gemm([x], False, [w], False, [[0, 9]], one, "float32", None, out),
        "must not descend": lambda: _C.gemm([x], False, [w], False, [[0, 5, 3]], two, "float32", None, out),
        "expected 2 dimensions": lambda: _C.gemm([x[0]], False, [w], False, [[0, 8]], one, "float32", None, out),
        r"the other operand has 8": lambda: _C.gemm([x], False, [w[:, :7]], False, [[0, 7]], one, "float32", None, out),
        "compute 'bfloat16' takes bfloat16, float32": lambda: _C.pack([w.half()], False, [[0, 8]], "bfloat16"),
        "compute 'float32' takes": lambda: _C.pack([w.double()], False, [[0, 8]], "float32"),
        "compute: expected": lambda: _C.pack([w], False, [[0, 8]], "int8"),
        "packed for compute": lambda: _C.gemm([x], False, packed, False, [[0, 3, 8]], two, "bfloat16", None, out),
        "where b was packed": lambda: _C.gemm([x], False, packed, False, [[0, 4, 8]], two, "float32", None, out),
        "with 1 sources and 2 chains": lambda: _C.gemm([x], False, packed, False, [[0, 8]], one, "float32", None, out),
        "2 sources, cuts has 1": lambda: _C.gemm([x, x], False, [w, w], False, [[0, 8]], one, "float32", None, out),
        "bias: expected shape": lambda: _C.gemm([x], False, [w], False, [[0, 8]], one, "float32", torch.ones(2), out),
        "a bias is added at the root only": lambda: _C.gemm(
            [x], False, [w], False, [[0, 8]], _C.run_schedule(0, 1, 2, False), "float32", torch.ones(3), out
        ),
        "out_dtype: expected float32": lambda: _C.gemm(
            [x], False, [w], False, [[0, 8]], one, "float32", None, torch.int32
        ),
        "leaves as float64 or float32": lambda: _C.gemm(
            [x], False, [w], False, [[0, 8]], one, "float64", None, torch.bfloat16
        ),
        "bfloat16 wire needs float32": lambda: _C.gemm(
            [x], False, [w], False, [[0, 8]], _C.run_schedule(0, 1, 1, True, True), "float64", None, torch.float64
        ),
        "path 'neon' is not available": lambda: linear(x, w, 1, "neon"),
        "expected a dense CPU tensor": lambda: linear(x.to("meta"), w, 1, ""),
    }
    if "avx512_bf16" in _C.cpu_paths():
        cases["computes bfloat16 only"] = lambda: linear(x, w, 1, "avx512_bf16")
    for match, call in cases.items():
        with pytest.raises(ValueError, match=match):
            call()


def test_validate_cuts_outside_are_not_read() -> None:
    """Indices outside [cuts[0], cuts[-1]) may hold anything: a rank's run of leaves in a whole tensor."""
    x, w = wide_exponents((4, 64), torch.float32, 60), wide_exponents((8, 64), torch.float32, 61)
    inner = tree.cuts(32, 4)
    cuts = [16 + cut for cut in inner]
    expected = linear(x[:, 16:48].contiguous(), w[:, 16:48].contiguous(), 4, "")
    x[:, :16], x[:, 48:], w[:, :16], w[:, 48:] = torch.nan, torch.inf, torch.nan, torch.inf
    out = _C.gemm([x], False, [w], False, [cuts], _C.run_schedule(0, 4, 4, True), "float32", None, torch.float32)
    assert_bitwise_equal(out, expected)
