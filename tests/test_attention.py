"""tbik.ops.attention against the oracle, and bits that ignore chunks, pages, company, packing, threads, paths."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from assertions import assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from long_cases import long_cases
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tbik import _C, ops, reference, tree
from tbik.errors import PlanError
from tbik.ops import HeadRun
from tbik.plan import TreePlan
from tbik.reference import Masking

module = importlib.import_module("tbik.ops.attention")  # ops.attention is the function

PATHS = [path for path in _C.cpu_paths() if path != "avx512_bf16"]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROMPT = 1800


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def inputs(queries: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Scores of a few units with many near ties; values of wide exponents that cancel."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads, dim, generator=generator) * 2
    k = torch.randn(keys, kv_heads, dim, generator=generator)
    v = wide_exponents((kv_heads, dim, keys), dtype, seed, spread=12).permute(2, 0, 1).contiguous()
    return Inputs(q.to(dtype), k.to(dtype), v)


def cu(*lengths: int) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def masking(dim: int, **options: Any) -> Masking:
    scale = options.get("scale")
    return Masking(
        dim**-0.5 if scale is None else scale,
        options.get("causal", True),
        options.get("window") or 0,
        options.get("softcap") or 0.0,
    )


def kernel(path: str, x: Inputs, options: dict[str, Any], sharing: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The C++ kernel of one path, one sequence."""
    offsets = [0, *itertools.accumulate(sharing)]
    m = masking(x.q.shape[2], **options)
    result: tuple[Tensor, Tensor, Tensor] = _C.attention(
        *x,
        cu(len(x.q)),
        cu(len(x.k)),
        None,
        options.get("sinks"),
        offsets,
        m.scale,
        m.softcap,
        m.causal,
        m.window,
        *options.get("drop", (0.0, [])),
        path,
    )
    return result


def kernel_backward(
    path: str, grad: Tensor, x: Inputs, state: Sequence[Tensor], options: dict[str, Any], sharing: Sequence[int]
) -> list[Tensor]:
    offsets = [0, *itertools.accumulate(sharing)]
    m = masking(x.q.shape[2], **options)
    programs = [_C.run_schedule(0, n, n, True) for n in sharing]
    result: list[Tensor] = _C.attention_backward(
        grad, *x, *state[:3], cu(len(x.q)), cu(len(x.k)), options.get("sinks"), offsets, m.scale, m.softcap, m.causal,
        m.window, programs, *options.get("drop", (0.0, [])), path,
    )  # fmt: skip
    return result


def gradients(function: Callable[..., Tensor], x: Inputs, grad: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) through autograd."""
    leaves = [t.detach().requires_grad_() for t in x]
    out = function(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


# --- the oracle -------------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    keys = draw(st.one_of(st.integers(1, 10), st.sampled_from([63, 64, 65, 70])))
    causal = draw(st.booleans())
    window = draw(st.sampled_from([None, None, 1, 3, 64]))
    longest = keys if causal or window else keys + 3
    return {
        "keys": keys,
        "queries": draw(st.integers(1, min(longest, 5))),
        "sharing": tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))),
        "dim": draw(st.sampled_from([1, 2, 8, 10, 17])),
        "causal": causal,
        "window": window,
        "softcap": draw(st.sampled_from([None, None, 2.5])),
        "scale": draw(st.sampled_from([None, 0.7])),
        "sinks": draw(st.sampled_from([None, None, 0.5, float("-inf")])),
        "drop": draw(st.sampled_from([None, None, 0.3, 1.0])),
        "special": draw(st.sampled_from([None, None, None, None, float("inf"), float("nan")])),
        "seed": draw(st.integers(0, 1000)),
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, *long_cases([torch.float16, torch.float32])], ids=str)
@settings(max_examples=70)
@given(problems())
def test_verify_attention_equals_reference(dtype: torch.dtype, problem: dict[str, Any]) -> None:
    """out, m, total and every gradient, on every path, with Inf and NaN among the keys and values."""
    heads, kv_heads = sum(problem["sharing"]), len(problem["sharing"])
    keys, dim, seed = problem["keys"], problem["dim"], problem["seed"]
    x = inputs(problem["queries"], keys, heads, kv_heads, dim, dtype, seed)
    grad = wide_exponents(x.q.shape, x.q.dtype, seed + 1, spread=10)
    if problem["special"] is not None:
        x.v[seed % keys, 0, 0] = problem["special"]
        x.k[(seed + 1) % keys, -1, 0] = problem["special"]
        grad[-1, 0, 0] = problem["special"]
    options = {name: problem[name] for name in ("causal", "window", "softcap", "scale")}
    sinks = None if problem["sinks"] is None else torch.linspace(problem["sinks"], 1.0, heads)
    if problem["sinks"] == float("-inf"):
        sinks = torch.full((heads,), float("-inf"))
    options["sinks"] = sinks
    rule = masking(dim, **options)
    keep = None
    if problem["drop"] is not None:
        coordinates = [seed, 2**40 + seed, 2**50 + 7, seed, 3]
        options["drop"] = (problem["drop"], coordinates)
        keep = reference.attention_keep((problem["queries"], heads, keys), problem["drop"], *coordinates)
    expected = reference.attention(*x, rule, problem["sharing"], sinks, keep)
    back = reference.attention_backward(grad, *x, expected, rule, problem["sharing"], sinks, keep)
    dk, dv = (reference.fold_heads(t, problem["sharing"]) for t in (back.dk_heads, back.dv_heads))
    for path in PATHS:
        state = kernel(path, x, options, problem["sharing"])
        for name, actual, wanted in zip(("out", "m", "total"), state, expected[:3]):
            assert_bitwise_equal(actual, wanted, f"{path} {name}")
        unrounded = expected.out.float() + expected.rest.float()
        actual = kernel_backward(path, grad, x, (unrounded, *state[1:]), options, problem["sharing"])
        for name, got, wanted in zip(("dq", "dk", "dv", "dsinks"), actual, (back.dq, dk, dv, back.d_sink_rows)):
            # an fp32 intermediate NaN has no canonical form: it leaves through the cast
            assert_bitwise_equal(got.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0), f"{path} {name}")


@pytest.mark.long
def test_verify_long_blocks_equal_reference() -> None:
    """More than one key block and more than one query block, heads of unequal groups, a few rows checked."""
    x = inputs(150, 150, 3, 2, 16, torch.bfloat16, 3)
    out = kernel("", x, {}, (2, 1))[0]
    for t in (0, 63, 64, 127, 149):
        alone = Inputs(x.q[t : t + 1], x.k[: t + 1], x.v[: t + 1])
        expected = reference.attention(*alone, masking(16), (2, 1))
        assert_bitwise_equal(out[t : t + 1], expected.out, f"row {t}")
    short = inputs(66, 130, 2, 1, 4, torch.bfloat16, 4)
    grad = torch.randn(short.q.shape).bfloat16()
    expected = reference.attention(*short, masking(4), (2,))
    state = ops.attention_forward(*short, cu(66), cu(130))
    for name, got, wanted in zip(state._fields, state, expected):
        assert_bitwise_equal(got, wanted, name)
    actual = ops.attention_backward(grad, *short, state, cu(66), cu(130))
    back = reference.attention_backward(grad, *short, expected, masking(4), (2,))
    assert_bitwise_equal(actual.dq, back.dq, "dq")
    assert_bitwise_equal(actual.dk, reference.fold_heads(back.dk_heads, (2,)), "dk")
    assert_bitwise_equal(actual.dv, reference.fold_heads(back.dv_heads, (2,)), "dv")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 40, 80, 224])
def test_verify_few_rows_equal_many(dim: int, dtype: torch.dtype) -> None:
    """A few query rows read keys in place: the bits of a chunk of nine queries, which packs them."""
    for (heads, queries), options in itertools.product(((1, 1), (1, 3), (2, 2), (5, 1), (8, 1)), ({}, {"window": 70})):
        x = inputs(150, 150, heads, 1, dim, dtype, heads)
        x.k[149], x.v[149], x.v[5] = float("inf"), float("nan"), float("-inf")  # 149: masked, or seen by one query
        for keys in (150, 149, 144):
            few = Inputs(x.q[keys - queries : keys], x.k[:keys], x.v[:keys])
            many = kernel("", few._replace(q=x.q[keys - 9 : keys]), options, (heads,))
            for path in PATHS:
                for got, wanted in zip(kernel(path, few, options, (heads,)), many):
                    assert_bitwise_equal(got, wanted[9 - queries :], f"{path}, {heads}, {queries}, {keys}, {options}")
            for page in (5, 8):
                out = run_paged(few._replace(q=x.q), paged([few], page), keys - queries, keys, **options)
                assert_bitwise_equal(out, many[0][9 - queries :], f"{heads}, {queries}, {keys}, pages of {page}")


# --- chunks, pages, company, heads ------------------------------------------------------------------------------------


class Paged(NamedTuple):
    keys: Tensor
    values: Tensor
    table: Tensor


def paged(sequences: Sequence[Inputs], page: int, seed: int = 0, head_major: bool = False) -> Paged:
    """The keys of all sequences in shuffled pages; stale slots hold NaN."""
    lengths = [len(x.k) for x in sequences]
    pages = [-(-n // page) for n in lengths]
    total = sum(pages) + 3
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    table = torch.zeros(len(sequences), max(pages), dtype=torch.int32)
    _, kv_heads, dim = sequences[0].k.shape
    shape = (total, kv_heads, page, dim) if head_major else (total, page, kv_heads, dim)
    caches = [torch.full(shape, float("nan"), dtype=sequences[0].k.dtype) for _ in range(2)]
    if head_major:
        caches = [cache.transpose(1, 2) for cache in caches]
    used = 0
    for b, x in enumerate(sequences):
        mine = order[used : used + pages[b]]
        used += pages[b]
        table[b, : pages[b]] = mine
        positions = torch.arange(lengths[b])
        slots = mine[positions // page] * page + positions % page
        ops.store_kv(x.k, x.v, *caches, slots)
    return Paged(caches[0], caches[1], table)


@pytest.fixture(scope="module")
def prompt() -> tuple[Inputs, Tensor]:
    x = inputs(PROMPT, PROMPT, 8, 2, 32, torch.bfloat16, 11)
    return x, ops.attention(*x)


def run_paged(x: Inputs, cache: Paged, lo: int, hi: int, row: int = 0, **options: Any) -> Tensor:
    """The queries [lo, hi) of a sequence whose keys [0, hi) are in row `row` of the block table."""
    lengths = torch.tensor([hi])
    return ops.paged_attention(x.q[lo:hi], *cache[:2], cache.table[row : row + 1], lengths, cu(hi - lo), **options)


@pytest.mark.parametrize("chunk", [1, 16, 100, 512])
def test_verify_prefill_equals_chunks(chunk: int, prompt: tuple[Inputs, Tensor]) -> None:
    """1,800 tokens: the whole prompt = chunks of 16, 100, 512 = one token at a time, in pages of 16."""
    x, whole = prompt
    cache = paged([x], 16)
    bounds = [*range(0, PROMPT, chunk), PROMPT]
    parts = [run_paged(x, cache, lo, hi) for lo, hi in itertools.pairwise(bounds)]
    assert_bitwise_equal(torch.cat(parts), whole, f"chunks of {chunk}")


@pytest.mark.parametrize("page", [8, 16, 32, 128])
@pytest.mark.parametrize("head_major", [False, True])
def test_verify_pages_change_nothing(page: int, head_major: bool, prompt: tuple[Inputs, Tensor]) -> None:
    x, whole = prompt
    cache = paged([x], page, seed=page, head_major=head_major)
    for lo, hi in ((0, 700), (700, 701), (1200, PROMPT)):
        assert_bitwise_equal(run_paged(x, cache, lo, hi), whole[lo:hi], f"pages of {page}, queries {lo}..{hi}")


def test_verify_company_changes_nothing(prompt: tuple[Inputs, Tensor]) -> None:
    """One request alone and among eight: decoding ones, a prefill, a chunk, one without a query."""
    x, whole = prompt
    others = [inputs(n, n, 8, 2, 32, torch.bfloat16, n) for n in (1, 7, 64, 65, 300, 33, 2)]
    sequences = [*others[:3], x, *others[3:]]
    cache = paged(sequences, 16, seed=5)
    new = [1, 7, 1, 90, 1, 0, 20, 1]
    lengths = torch.tensor([len(s.k) for s in sequences])
    lengths[3] = 1500
    q = torch.cat([s.q[n - new_tokens : n] for s, n, new_tokens in zip(sequences, lengths.tolist(), new)])
    together = ops.paged_attention(q, *cache, lengths, cu(*new))
    assert_bitwise_equal(together[9:99], whole[1410:1500], "in company")
    for b in (0, 1, 2, 4, 6, 7):
        start, n = sum(new[:b]), int(lengths[b])
        alone = ops.attention(sequences[b].q[n - new[b] :], sequences[b].k, sequences[b].v, cu(new[b]), cu(n))
        assert_bitwise_equal(together[start : start + new[b]], alone, f"request {b}")


def heads_of(state: ops.AttentionState, lo: int, hi: int) -> ops.AttentionState:
    return ops.AttentionState(*(t[:, lo:hi] for t in state))


def test_verify_heads_alone(prompt: tuple[Inputs, Tensor]) -> None:
    """One of eight query heads with its KV head, and an uneven cut of the heads, forward and backward."""
    x, whole = prompt
    small = Inputs(*(t[:200] for t in x))
    grad = torch.randn(small.q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    state = ops.attention_forward(*small)
    back = ops.attention_backward(grad, *small, state)
    for h in range(8):
        kv = slice(h // 4, h // 4 + 1)
        alone = Inputs(x.q[:, h : h + 1], x.k[:, kv], x.v[:, kv])
        assert_bitwise_equal(ops.attention(*alone), whole[:, h : h + 1], f"head {h}")
        one = Inputs(*(t[:200] for t in alone))
        again = ops.attention_backward(grad[:, h : h + 1], *one, heads_of(state, h, h + 1))
        assert_bitwise_equal(again.dq, back.dq[:, h : h + 1], f"dq of head {h}")


@pytest.mark.parametrize("sharing", [(4, 4), (5,), (1, 2, 3)])
def test_verify_kv_head_covers_merge(sharing: tuple[int, ...]) -> None:
    """Any cut of the query heads over ranks: the merged covers of dk and dv are the whole gradient (K4)."""
    heads = sum(sharing)
    x = inputs(70, 70, heads, len(sharing), 16, torch.bfloat16, 9)
    grad = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    groups = [HeadRun(n, 0, n) for n in sharing]
    state = ops.attention_forward(*x, sharing=groups)
    whole = ops.attention_backward(grad, *x, state, sharing=groups)
    starts = [0, *itertools.accumulate(sharing)]
    for cuts in ([0, 1, heads], [0, heads // 2, heads], [0, 2, 3, heads], list(range(heads + 1))):
        merged: list[list[dict[Any, Tensor]]] = [[{} for _ in sharing] for _ in range(2)]
        for lo, hi in itertools.pairwise(cuts):
            held = [g for g, n in enumerate(sharing) if starts[g] < hi and starts[g] + n > lo]
            runs = [HeadRun(sharing[g], max(lo - starts[g], 0), min(hi - starts[g], sharing[g])) for g in held]
            kv = slice(held[0], held[-1] + 1)
            part = Inputs(x.q[:, lo:hi], x.k[:, kv], x.v[:, kv])
            back = ops.attention_backward(grad[:, lo:hi], *part, heads_of(state, lo, hi), sharing=runs)
            assert_bitwise_equal(back.dq, whole.dq[:, lo:hi], f"dq of heads {lo}..{hi}")
            at = 0
            for g, run in zip(held, runs):
                complete = run.hi - run.lo == run.size
                nodes = [None] if complete else tree.cover(run.lo, run.hi)
                for i, t in enumerate((back.dk, back.dv)):
                    values = t[:, at : at + len(nodes)].unbind(1)
                    if complete:
                        assert_bitwise_equal(values[0], (whole.dk, whole.dv)[i][:, g], f"KV head {g}")
                    else:
                        merged[i][g] = tree.merge(merged[i][g], dict(zip(nodes, values)), reference.add)
                at += len(nodes)
        for i, t in enumerate((whole.dk, whole.dv)):
            for g, n in enumerate(sharing):
                if merged[i][g]:
                    assert_bitwise_equal(reference.fold_covers([merged[i][g]], n), t[:, g], f"KV head {g} from {cuts}")


# --- packing, threads, paths, modes, strides --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_packed_equals_alone(dtype: torch.dtype) -> None:
    """Several sequences in one call, empty ones among them: output and gradients of each as if alone."""
    lengths = (65, 0, 1, 130, 64, 0, 33)
    x = inputs(sum(lengths), sum(lengths), 4, 2, 24, dtype, 21)
    grad = wide_exponents(x.q.shape, dtype, 4, spread=8)
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0])
    options = {"window": 70, "softcap": 5.0, "sinks": sinks}
    packed = gradients(ops.attention, x, grad, cu_q=cu(*lengths), **options)
    for lo, hi in itertools.pairwise(cu(*lengths).tolist()):
        if lo == hi:
            continue
        alone = gradients(ops.attention, Inputs(*(t[lo:hi] for t in x)), grad[lo:hi], **options)
        for name, one, all_of_them in zip(("out", "dq", "dk", "dv"), alone, packed):
            assert_bitwise_equal(one, all_of_them[lo:hi], f"{name} of rows {lo}..{hi}")


def test_verify_threads_paths_and_modes(flush_denormal: None) -> None:
    """1 and 2 threads, every path, a process that flushes subnormals: the bits of one thread in IEEE mode."""
    x = inputs(130, 150, 4, 2, 40, torch.float32, 31)
    tiny = Inputs(x.q, x.k, x.v * 2.0**-120)  # products and outputs among the subnormals
    grad = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(3)) * 2.0**-30
    torch.set_flush_denormal(False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    first = kernel(PATHS[0], tiny, {}, (2, 2))
    expected = [*first, *kernel_backward(PATHS[0], grad, tiny, first, {}, (2, 2))]
    assert any(((t != 0) & (t.abs() < 2.0**-126)).any() for t in expected)
    try:
        for path, count, flush in itertools.product(PATHS, (1, 2), (False, True)):
            torch.set_num_threads(count)
            torch.set_flush_denormal(flush)
            state = kernel(path, tiny, {}, (2, 2))
            actual = [*state, *kernel_backward(path, grad, tiny, state, {}, (2, 2))]
            assert bool(_C.fp_mode()) == flush  # the kernels left the mode as it was
            torch.set_flush_denormal(False)
            for i, (got, wanted) in enumerate(zip(actual, expected)):
                assert_bitwise_equal(got, wanted, f"{path}, {count} threads, flush {flush}, result {i}")
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def test_verify_strided_inputs() -> None:
    """Heads first, slices of a merged qkv tensor, head_dim not adjacent, a broadcast gradient."""
    x = inputs(70, 70, 4, 2, 16, torch.bfloat16, 41)
    grad = torch.full(x.q.shape, 0.5).bfloat16()
    expected = gradients(ops.attention, x, grad)
    merged = torch.cat([x.q, x.k, x.v], dim=1)
    views = {
        "heads first": Inputs(*(t.transpose(0, 1).contiguous().transpose(0, 1) for t in x)),
        "slices": Inputs(*torch.split(merged, [4, 2, 2], dim=1)),
        "head_dim first": Inputs(*(t.permute(2, 0, 1).contiguous().permute(1, 2, 0) for t in x)),
    }
    for name, view in views.items():
        assert not all(t.is_contiguous() for t in view)
        for got, wanted in zip(gradients(ops.attention, view, grad), expected):
            assert_bitwise_equal(got, wanted, name)
    spread = torch.tensor(0.5).bfloat16().expand(x.q.shape)
    for got, wanted in zip(gradients(ops.attention, x, spread), expected):
        assert_bitwise_equal(got, wanted, "gradient of stride 0")


def test_verify_offsets_beyond_two_to_the_31() -> None:
    """Rows, heads and pages more than 2^31 elements apart (the memory in between is never touched)."""
    far = 2**31 + 64
    storage = torch.empty(2 * far + 4096, dtype=torch.bfloat16)  # untouched pages take no memory
    x = inputs(3, 3, 1, 1, 8, torch.bfloat16, 51)
    expected = ops.attention(*x)
    rows = storage.as_strided((3, 1, 8), (far, 8, 1))
    rows.copy_(x.k)
    assert_bitwise_equal(ops.attention(x.q, rows, x.v), expected, "rows of k")
    rows.copy_(x.q)
    assert_bitwise_equal(ops.attention(rows, x.k, x.v), expected, "rows of q")
    back = gradients(ops.attention, x, x.q)
    for got, wanted in zip(gradients(ops.attention, x, rows), back):
        assert_bitwise_equal(got, wanted, "rows of the gradient")
    pages = storage.as_strided((3, 1, 1, 8), (far, 8, 8, 1))
    ops.store_kv(x.k, x.v, pages, pages.new_empty(pages.shape), torch.tensor([2, 0, 1]))
    values = torch.empty(3, 1, 1, 8, dtype=torch.bfloat16)
    values[[2, 0, 1], 0] = x.v
    table = torch.tensor([[2, 0, 1]])
    out = ops.paged_attention(x.q, pages, values, table, torch.tensor([3]), cu(3))
    assert_bitwise_equal(out, expected, "pages")


# --- what must not be multiplied --------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_verify_masked_keys_are_never_multiplied(special: float) -> None:
    """Inf and NaN in keys, values and gradients reach the queries and keys that see them, and nothing else."""
    x = inputs(130, 130, 2, 1, 16, torch.bfloat16, 61)
    grad = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    clean = gradients(ops.attention, x, grad)
    wrong = Inputs(x.q.clone(), x.k.clone(), x.v.clone())
    wrong.k[100], wrong.v[100] = special, special
    out, dq, _, _ = gradients(ops.attention, wrong, grad)
    assert_bitwise_equal(out[:100], clean[0][:100], "queries before the key")
    assert_bitwise_equal(dq[:100], clean[1][:100], "dq before the key")
    assert not torch.isfinite(out[100:]).any()
    windowed = gradients(ops.attention, x, grad, window=10)
    out, dq, dk, dv = gradients(ops.attention, wrong, grad, window=10)
    for name, got, wanted in (("out", out, windowed[0]), ("dq", dq, windowed[1])):
        assert_bitwise_equal(got[110:], wanted[110:], f"{name} behind the window")
    bad = grad.clone()
    bad[50] = special
    _, dq, dk, dv = gradients(ops.attention, x, bad)
    for name, got, wanted in (("dq", dq, clean[1]), ("dk", dk, clean[2]), ("dv", dv, clean[3])):
        keep = torch.arange(130) > 50  # keys that query 50 does not see, queries that are not 50
        assert_bitwise_equal(got[keep], wanted[keep], f"{name} after the query")


def test_verify_zero_length_sequences() -> None:
    empty = inputs(0, 0, 2, 1, 8, torch.bfloat16)
    out, dq, dk, dv = gradients(ops.attention, empty, empty.q)
    assert out.shape == dq.shape == (0, 2, 8) and dk.shape == dv.shape == (0, 1, 8)
    x = inputs(0, 5, 2, 1, 8, torch.bfloat16)
    _, _, dk, dv = gradients(ops.attention, x, x.q, cu_q=cu(0), cu_k=cu(5))
    assert_bitwise_equal(dk, torch.zeros_like(dk), "dk without queries")
    assert_bitwise_equal(dv, torch.zeros_like(dv), "dv without queries")


# --- dropout ----------------------------------------------------------------------------------------------------------

DROP = ops.AttentionDropout(0.2, seed=5, step=7, name="layers.0.attention", first_sample=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_verify_dropout_ignores_packing_and_heads(dtype: torch.dtype) -> None:
    """Packed = alone = micro-batches at another first_sample; one head of four at first_head; chunks of queries."""
    lengths = (65, 0, 130, 33)
    x = inputs(sum(lengths), sum(lengths), 4, 2, 16, dtype, 22)
    grad = wide_exponents(x.q.shape, dtype, 5, spread=8)
    packed = gradients(ops.attention, x, grad, cu_q=cu(*lengths), dropout=DROP)
    for sample, (lo, hi) in enumerate(itertools.pairwise(cu(*lengths).tolist())):
        part, rows = Inputs(*(t[lo:hi] for t in x)), grad[lo:hi]
        alone = DROP._replace(first_sample=DROP.first_sample + sample)
        for name, one, all_of_them in zip(
            ("out", "dq", "dk", "dv"), gradients(ops.attention, part, rows, dropout=alone), packed
        ):
            assert_bitwise_equal(one, all_of_them[lo:hi], f"{name} of sample {sample}")
        for h in range(4):
            head = Inputs(part.q[:, h : h + 1], *(t[:, h // 2 : h // 2 + 1] for t in part[1:]))
            out, dq, _, _ = gradients(ops.attention, head, rows[:, h : h + 1], dropout=alone._replace(first_head=h))
            assert_bitwise_equal(out, packed[0][lo:hi, h : h + 1], f"head {h} of sample {sample}")
            assert_bitwise_equal(dq, packed[1][lo:hi, h : h + 1], f"dq of head {h} of sample {sample}")
        if hi > lo:
            few = ops.attention(part.q[-1:], *part[1:], cu(1), cu(hi - lo), dropout=alone)
            assert_bitwise_equal(few, packed[0][hi - 1 : hi], f"last query of sample {sample}")


def test_verify_dropout_depends_on_every_coordinate() -> None:
    x = inputs(40, 40, 2, 1, 16, torch.bfloat16, 23)
    out = ops.attention(*x, dropout=DROP)
    assert torch.equal(out, ops.attention(*x, dropout=DROP))
    changes = (
        {"seed": 6},
        {"step": 8},
        {"name": "layers.1.attention"},
        {"first_sample": 4},
        {"first_head": 1},
        {"p": 0.0},
    )
    for change in changes:
        assert not torch.equal(out, ops.attention(*x, dropout=DROP._replace(**change))), change
    assert_bitwise_equal(ops.attention(*x, dropout=DROP._replace(p=0.0)), ops.attention(*x), "p = 0")


def test_validate_dropout_keeps_its_share() -> None:
    """Equal scores and v = 1: out is (kept pairs / all pairs) / (1 - p); 128 * 2048 pairs, five standard deviations."""
    q, k = torch.zeros(128, 1, 16), torch.zeros(2048, 1, 16)
    for p in (0.1, 0.5):
        out = ops.attention(q, k, torch.ones(k.shape), cu(128), cu(2048), causal=False, dropout=DROP._replace(p=p))
        share = out[:, 0, 0].double().mean().item() * (1 - p)
        assert abs(share - (1 - p)) < 5 * (p * (1 - p) / (128 * 2048)) ** 0.5


# --- parameters -------------------------------------------------------------------------------------------------------


def test_verify_sinks_gradient_by_samples() -> None:
    """dsinks = the tree over samples of the tree over blocks of 512 tokens; micro-batches are its nodes."""
    lengths = (600, 3, 0, 70)
    x = inputs(sum(lengths), sum(lengths), 2, 1, 8, torch.bfloat16, 71)
    grad = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(5)).bfloat16()
    sinks = torch.tensor([0.25, 1.5], requires_grad=True)
    ops.attention(*x, cu(*lengths), sinks=sinks).backward(grad)
    assert sinks.grad is not None and sinks.grad.dtype == torch.float32
    starts = cu(*lengths).tolist()
    state = ops.attention_forward(*x, cu(*lengths), sinks=sinks)
    rows = ops.attention_backward(grad, *x, state, cu(*lengths), sinks=sinks).d_sink_rows
    assert rows is not None
    assert_bitwise_equal(sinks.grad, reference.bias_grad(rows, starts, TreePlan()), "dsinks")
    halves = []
    for samples in (slice(0, 3), slice(2, 5)):
        part = starts[samples]
        chunk = Inputs(*(t[part[0] : part[-1]] for t in x))
        again = sinks.detach().clone().requires_grad_()
        ops.attention(*chunk, torch.tensor(part) - part[0], sinks=again).backward(grad[part[0] : part[-1]])
        assert again.grad is not None
        halves.append(again.grad)
    assert_bitwise_equal(reference.add(*halves), sinks.grad, "two micro-batches")


# --- accuracy and agreement -------------------------------------------------------------------------------------------


def test_verify_stock_attention_depends_on_the_chunk() -> None:
    """The negative control: torch's attention gives a prompt's last queries other bits than a chunk of the prompt."""
    differing = 0
    for seed in range(3):
        x = inputs(700, 700, 4, 4, 64, torch.float32, seed)
        q, k, v = (t.transpose(0, 1)[None] for t in x)
        whole = scaled_dot_product_attention(q, k, v, is_causal=True)
        alone = scaled_dot_product_attention(q[:, :, -1:], k, v)
        if not torch.equal(whole[:, :, -1:], alone):
            differing += 1
        part = ops.attention(x.q[-1:], x.k, x.v, cu(1), cu(700))
        assert_bitwise_equal(part, ops.attention(*x)[-1:], "ours")
    assert differing > 0


def exact(x: Inputs, grad: Tensor) -> list[Tensor]:
    """out, dq, dk, dv in float64."""
    leaves = [t.double().requires_grad_() for t in x]
    q, k, v = (t.transpose(0, 1) for t in leaves)
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    s = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    s = s.masked_fill(torch.ones(s.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    out = (s.softmax(-1) @ v).transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_validate_accuracy_against_float64(dtype: torch.dtype) -> None:
    """Output and gradients: the error of torch's math attention in the same dtype, within 2 % (16 bits: both are one
    rounding of a nearly exact value) or 10 % (fp32: dq by its D, see the next test)."""
    ours, theirs = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = Inputs(*(torch.randn(200, h, 64, generator=generator).to(dtype) for h in (4, 2, 2)))
        grad = torch.randn(x.q.shape, generator=generator).to(dtype)
        wanted = exact(x, grad)
        for errors, function in ((ours, ops.attention), (theirs, stock)):
            for i, got in enumerate(gradients(function, x, grad)):
                errors[i] += (got.double() - wanted[i]).square().mean().sqrt()
    margin = 1.1 if dtype == torch.float32 else 1.02
    assert (ours <= theirs * margin).all(), f"{dtype}: out, dq, dk, dv: {ours.tolist()} against {theirs.tolist()}"


def test_validate_dq_in_float32_loses_by_its_row_products() -> None:
    """Where fp32 dq is less accurate than torch's: D = row_sum(dO O) of K3. Torch sums p dP over the keys, and what p
    and dP lost to rounding then cancels in dS = p (dP - D); an exact D does not help. Everything else alike."""
    squares = {"rows": 0.0, "keys": 0.0, "exact": 0.0}
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        x = [torch.randn(4, 200, 64, generator=generator) for _ in range(4)]
        future = torch.ones(200, 200, dtype=torch.bool).triu(1)

        def parts(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, future: Tensor = future) -> list[Tensor]:
            p = (q @ k.transpose(1, 2) * 0.125).masked_fill(future, float("-inf")).softmax(-1)
            dp = grad @ v.transpose(1, 2)
            return [p, dp, (grad * (p @ v)).sum(-1, keepdim=True)]

        p, dp, d = parts(*x)
        exact_p, exact_dp, exact_d = parts(*(t.double() for t in x))
        wanted = (exact_p * (exact_dp - exact_d) * 0.125) @ x[1].double()
        for name, of_row in (("rows", d), ("keys", (p * dp).sum(-1, keepdim=True)), ("exact", exact_d.float())):
            squares[name] += float(((p * (dp - of_row) * 0.125) @ x[1] - wanted).square().mean())
    assert squares["keys"] * 1.1 < min(squares["rows"], squares["exact"]), f"squared errors of dq by D: {squares}"


def test_corroborate_softcap_window_and_sinks() -> None:
    """Against a plain float64 formula through autograd."""
    x = inputs(90, 90, 2, 1, 16, torch.float32, 81)
    sinks = torch.tensor([0.5, -0.25])
    leaves = [t.double().requires_grad_() for t in (*x, sinks)]
    q, k, v = (t.transpose(0, 1) for t in leaves[:3])
    s = q @ k.expand(2, -1, -1).transpose(1, 2) * 0.25
    s = 3.0 * torch.tanh(s / 3.0)
    row, column = torch.arange(90)[:, None], torch.arange(90)
    s = s.masked_fill((column > row) | (column <= row - 20), float("-inf"))
    s = torch.cat([s, leaves[3][:, None, None].expand(2, 90, 1)], dim=-1)
    wanted = (s.softmax(-1)[..., :-1] @ v.expand(2, -1, -1)).transpose(0, 1)
    grad = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(6))
    expected = torch.autograd.grad(wanted, leaves, grad.double())
    ours = [t.clone().requires_grad_() for t in (*x, sinks)]
    out = ops.attention(*ours[:3], scale=0.25, softcap=3.0, window=20, sinks=ours[3])
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
    for got, want in zip(torch.autograd.grad(out, ours, grad), expected):
        torch.testing.assert_close(got.double(), want, rtol=2e-3, atol=2e-3)


# --- the dispatcher ---------------------------------------------------------------------------------------------------


def test_verify_opcheck() -> None:
    x = inputs(20, 20, 4, 2, 8, torch.bfloat16, 91)
    options = (0.3, 0.0, True, 0)
    drop = (0.25, [1, 2, 3, 4, 5])
    sinks = torch.zeros(4)
    leaves = [t.clone().requires_grad_() for t in (*x, sinks)]
    starts = cu(12, 8)
    tail = ([0, 2, 4], *options, False, True, *drop)
    torch.library.opcheck(module._attention, (*leaves[:3], starts, starts, leaves[3], *tail))
    state = module._attention(*x, starts, starts, sinks, *tail)
    runs = [2, 0, 2, 2, 0, 2]
    torch.library.opcheck(module._attention_backward, (x.q, *x, *state, starts, starts, sinks, runs, *options, *drop))
    torch.library.opcheck(module._round, (state[1], torch.bfloat16))
    torch.library.opcheck(module._sinks_grad, (state[1], starts, False))
    cache = paged([x], 8)
    arguments = (x.q, *cache[:2], cache.table, torch.tensor([20]), cu(20), None, [0, 2, 4], *options)
    torch.library.opcheck(module._paged_attention, arguments)
    torch.library.opcheck(module._store_kv, (x.k, x.v, cache.keys, cache.values, torch.arange(20)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_verify_compiled_equals_eager(backend: str) -> None:
    x = inputs(40, 40, 4, 2, 16, torch.bfloat16, 92)
    grad = torch.randn(x.q.shape, generator=torch.Generator().manual_seed(7)).bfloat16()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, window=30, softcap=4.0, dropout=DROP)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for got, wanted in zip(gradients(compiled, x, grad), gradients(function, x, grad)):
        assert_bitwise_equal(got, wanted, "compiled")


# --- refusals ---------------------------------------------------------------------------------------------------------


def _bad_calls() -> dict[str, Callable[[], Any]]:
    x = inputs(6, 6, 4, 2, 8, torch.bfloat16)
    q, k, v = x
    cache = paged([x], 4)

    def page(**changes: Any) -> Callable[[], Any]:
        arguments = {
            "q": q, "key_cache": cache.keys, "value_cache": cache.values, "block_table": cache.table,
            "seq_lens": torch.tensor([6]), "query_start_loc": cu(6),
        }  # fmt: skip
        return lambda: ops.paged_attention(**(arguments | changes))

    def store(*arguments: Any) -> Callable[[], Any]:
        return lambda: ops.store_kv(*arguments)

    slots = torch.arange(6)
    return {
        "no tensor": lambda: ops.attention([1.0], k, v),  # type: ignore[arg-type]
        "float64": lambda: ops.attention(q.double(), k.double(), v.double()),
        "two axes": lambda: ops.attention(q[0], k, v),
        "another dtype": lambda: ops.attention(q, k.float(), v),
        "k and v unlike": lambda: ops.attention(q, k, v[:5]),
        "head_dim": lambda: ops.attention(q, k[..., :4], v[..., :4]),
        "head_dim beyond 512": lambda: ops.attention(*(torch.zeros(1, 1, 513) for _ in range(3))),
        "heads do not divide": lambda: ops.attention(q[:, :3], k, v),
        "sharing too short": lambda: ops.attention(q, k, v, sharing=[HeadRun(4, 0, 4)]),
        "sharing adds up": lambda: ops.attention(q, k, v, sharing=[HeadRun(2, 0, 2), HeadRun(2, 0, 1)]),
        "sharing of no head": lambda: ops.attention(q, k, v, sharing=[HeadRun(4, 0, 4), HeadRun(4, 2, 2)]),
        "sharing in part, with gradient": lambda: ops.attention(
            q, k.clone().requires_grad_(), v, sharing=[HeadRun(4, 0, 2), HeadRun(2, 0, 2)]
        ),
        "window": lambda: ops.attention(q, k, v, window=0),
        "window of True": lambda: ops.attention(q, k, v, window=True),
        "softcap": lambda: ops.attention(q, k, v, softcap=-1.0),
        "scale": lambda: ops.attention(q, k, v, scale=float("nan")),
        "causal": lambda: ops.attention(q, k, v, causal=None),  # type: ignore[arg-type]
        "dropout": lambda: ops.attention(q, k, v, dropout=0.1),  # type: ignore[arg-type]
        "dropout of 2": lambda: ops.attention(q, k, v, dropout=DROP._replace(p=2.0)),
        "dropout without a name": lambda: ops.attention(q, k, v, dropout=DROP._replace(name="")),
        "dropout of sample -1": lambda: ops.attention(q, k, v, dropout=DROP._replace(first_sample=-1)),
        "dropout beyond the samples": lambda: ops.attention(q, k, v, dropout=DROP._replace(first_sample=2**32)),
        "dropout of head 2^32": lambda: ops.attention(q, k, v, dropout=DROP._replace(first_head=2**63 - 1)),
        "dropout of a name without UTF-8": lambda: ops.attention(q, k, v, dropout=DROP._replace(name="\ud800")),
        "sharing of numbers": lambda: ops.attention(q, k, v, sharing=[5, 6]),  # type: ignore[list-item]
        "sharing is a number": lambda: ops.attention(q, k, v, sharing=5),  # type: ignore[arg-type]
        "sharing of floats": lambda: ops.attention(q, k, v, sharing=[HeadRun(2.0, 0.0, 2.0), HeadRun(2, 0, 2)]),  # type: ignore[arg-type]
        "sharing of four numbers": lambda: ops.attention(q, k, v, sharing=[(2, 0, 2, 1), (2, 0, 2)]),  # type: ignore[list-item]
        "plan is a dict": lambda: ops.attention(q, k, v, plan={"leaves": 6}),  # type: ignore[arg-type]
        "plan of float64": lambda: ops.attention(q, k, v, plan=TreePlan(acc_dtype="float64")),
        "cu_q on meta": lambda: ops.attention(q, k, v, cu(6).to("meta")),
        "sinks on meta": lambda: ops.attention(q, k, v, sinks=torch.zeros(4, device="meta")),
        "operator with cu_q on meta": lambda: torch.ops.tbik.attention(
            q, k, v, cu(6).to("meta"), cu(6), None, [0, 2, 4], 1.0, 0.0, True, 0, False, False, 0.0, []
        ),
        "backward of other heads": lambda: torch.ops.tbik.attention_backward(
            q,
            q,
            k,
            v,
            q,
            q[..., 0].float(),
            q[..., 0].float(),
            q,
            cu(6),
            cu(6),
            None,
            [2**40, 0, 2**40],
            1.0,
            0.0,
            True,
            0,
            0.0,
            [],
        ),
        "sinks": lambda: ops.attention(q, k, v, sinks=torch.zeros(3)),
        "sinks of integers": lambda: ops.attention(q, k, v, sinks=torch.zeros(4, dtype=torch.int64)),
        "cu_q of floats": lambda: ops.attention(q, k, v, torch.tensor([0.0, 6.0])),
        "cu_k alone": lambda: ops.attention(q, k, v, None, cu(6)),
        "cu_q does not end": lambda: ops.attention(q, k, v, cu(5)),
        "cu_q descends": lambda: ops.attention(q, k, v, torch.tensor([0, 4, 2, 6])),
        "cu_q starts late": lambda: ops.attention(q, k, v, torch.tensor([1, 6])),
        "cu_k of another batch": lambda: ops.attention(q, k, v, cu(3, 3), cu(6)),
        "more queries than keys": lambda: ops.attention(q, k, v, cu(4, 2), cu(2, 4)),
        "queries without keys": lambda: ops.attention(q, k, v, cu(4, 2), cu(0, 6), causal=False),
        "sparse": lambda: ops.attention(q.float().to_sparse(), k.float(), v.float()),
        "m of another shape": lambda: ops.attention_backward(
            q, q, k, v, ops.AttentionState(q, torch.zeros(6, 3), torch.zeros(6, 4), q)
        ),
        "grad_out of another shape": lambda: ops.attention_backward(
            q[:5], q, k, v, ops.AttentionState(q, torch.zeros(6, 4), torch.zeros(6, 4), q)
        ),
        "rest is missing": lambda: ops.attention_backward(
            q, q, k, v, ops.AttentionState(q, torch.zeros(6, 4), torch.zeros(6, 4), q[:0])
        ),
        "caches unlike": page(value_cache=cache.values[:1]),
        "cache of another dtype": page(key_cache=cache.keys.float(), value_cache=cache.values.float()),
        "cache head_dim": page(key_cache=cache.keys[..., :4], value_cache=cache.values[..., :4]),
        "page outside": page(block_table=cache.table + 100),
        "page below zero": page(block_table=cache.table - 100),
        "page beyond int32": page(block_table=cache.table.long() + 2**32),
        "page below int32": page(block_table=cache.table.long() - 2**32),
        "seq_lens of 2^63": page(seq_lens=torch.tensor([2**63 - 1])),
        "seq_lens on meta": page(seq_lens=torch.tensor([6]).to("meta")),
        "paged sinks with gradient": page(sinks=torch.zeros(4, requires_grad=True)),
        "table too narrow": page(block_table=cache.table[:, :1]),
        "table of another batch": page(block_table=cache.table.repeat(2, 1)),
        "seq_lens of another batch": page(seq_lens=torch.tensor([6, 6])),
        "seq_lens too short": page(seq_lens=torch.tensor([5])),
        "paged with gradient": page(q=q.clone().requires_grad_()),
        "slot twice": store(k, v, cache.keys, cache.values, torch.zeros(6, dtype=torch.int64)),
        "slot outside": store(k, v, cache.keys, cache.values, slots + 1000),
        "slots of another length": store(k, v, cache.keys, cache.values, slots[:4]),
        "store into an expanded cache": store(k, v, cache.keys[:1].expand_as(cache.keys), cache.values, slots),
        "store of both into one cache": store(k, v, cache.keys, cache.keys, slots),
        "store of both into views of one cache": store(k, v, cache.keys, cache.keys.view_as(cache.keys), slots),
        "store of a slice of the cache": store(cache.keys.flatten(0, 1)[:6], v, cache.keys, cache.values, slots + 1),
        "store of another dtype": store(k, v, cache.keys.float(), cache.values.float(), slots),
    }


@pytest.mark.parametrize("name", _bad_calls())
def test_verify_bad_input_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match=r"(ops|tbik)(\.\w+)?:"):
        _bad_calls()[name]()


@pytest.mark.parametrize("causal", [True, False])
def test_verify_windows_of_any_size(causal: bool) -> None:
    """A window beyond every key is no window, up to integers that position + window would not hold."""
    x = inputs(70, 70, 4, 2, 8, torch.float32)
    everything = ops.attention(x.q, x.k, x.v, causal=causal)
    for window in (70, 2**31, 2**62, 2**63 - 1, 2**63, 2**100):
        assert_bitwise_equal(ops.attention(x.q, x.k, x.v, causal=causal, window=window), everything, f"{window}")


def test_verify_pages_in_int64_and_garbage_beyond_the_sequence() -> None:
    x = inputs(6, 6, 4, 2, 8, torch.float32)
    cache = paged([x], 4)
    table = torch.cat([cache.table.long()[:, :2], torch.tensor([[-1, 2**40, -(2**63)]])], dim=1)
    lengths = torch.tensor([6])
    got = ops.paged_attention(x.q, cache.keys, cache.values, table, lengths, cu(6))
    assert_bitwise_equal(got, ops.attention(x.q, x.k, x.v))


def test_verify_a_write_to_a_saved_cache_is_noticed() -> None:
    """autograd sees store_kv, as it sees any write in place: no gradient from keys that have changed."""
    x = inputs(6, 6, 4, 2, 8, torch.float32)
    cache = paged([x], 4)
    factor = torch.ones((), requires_grad=True)
    product = factor * cache.keys
    ops.store_kv(x.k, x.v, cache.keys, cache.values, torch.arange(6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    with torch.inference_mode():
        copy = cache.keys.clone()
        ops.store_kv(x.k, x.v, copy, cache.values.clone(), torch.arange(6))


def test_verify_second_derivatives_are_refused() -> None:
    x = inputs(4, 4, 1, 1, 8, torch.float32)
    q = x.q.requires_grad_()
    (dq,) = torch.autograd.grad(ops.attention(q, x.k, x.v).sum(), q, create_graph=True)
    with pytest.raises(PlanError, match="no derivative"):
        dq.sum().backward()
