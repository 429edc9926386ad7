"""The attention kernels: the fma leaf in the CPU's bits, packed, paged, forward and backward; the mma leaf by values.

Without a GPU they run in triton's interpreter, with the correctly rounded fma. Suffixes: T query tokens, S key tokens,
H query heads, G KV heads, D head_dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from interpreter import DEVICE, exact_fma, needs_triton  # noqa: F401
from torch import Tensor

from tbik import _C, TreePlan, devices, ops, reference
from tbik.errors import PlanError
from tbik.ops import AttentionDropout, HeadRun

pytestmark = [
    pytest.mark.long,
    needs_triton,
    pytest.mark.usefixtures("exact_fma"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero|underflow):RuntimeWarning"),
]

BF16, FP32 = torch.bfloat16, torch.float32
MMA = f"mma:sm_{torch.cuda.get_device_capability()[0]}0" if DEVICE == "cuda" else "mma:sm_90"


def heads(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """run(function, *tensors): the function with its tensors on CUDA, or with the interpreter in the CPU's place."""
    from tbik.kernels import attention
    from tbik.kernels.tiles import AttentionTile

    def tile(leaf: str, head_dim: int, kernel: str, **masks: bool) -> AttentionTile:
        shares = head_dim == 3  # those of some tests in parts, those of others whole
        return AttentionTile(4, 64, 4, 1, parts=2 if shares else 1, is_divided=shares)

    def run(function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        with monkeypatch.context() as patch:
            if DEVICE == "cpu":
                patch.setattr(devices, "is_cuda", lambda t: True)
                patch.setattr(attention, "attention_tile", tile)
            moved = [None if t is None else t.to(DEVICE) for t in tensors]
            return [None if t is None else t.cpu() for t in function(*moved)]

    return run


def forward_backward(grad_out: Tensor, plan: TreePlan | None = None, **options: Any) -> Callable[..., list[Tensor]]:
    """out, state and all gradients of packed sequences."""

    def run(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, sinks: Tensor | None = None) -> list[Tensor]:
        given = {**options, "sinks": sinks, "plan": plan}
        state = ops.attention_forward(q, k, v, cu_q, cu_k, **given)
        gradients = ops.attention_backward(grad_out.to(q.device), q, k, v, state, cu_q, cu_k, **given)
        return [*state, *gradients]

    return run


CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "causal": (BF16, {}),
    "window, softcap, sinks": (FP32, {"window": 5, "softcap": 4.0}),
    "dropout": (BF16, {"dropout": AttentionDropout(0.3, 11, 2**33 + 5, "layers.0", first_sample=3, first_head=2)}),
}


@pytest.mark.parametrize("case", CASES)
def test_verify_packed_equals_cpu(case: str, on_cuda: Callable[..., Any]) -> None:
    """Two query heads to a KV head, or one to each; sequences of 2 queries at 66 keys (two blocks), of none, 1 at 2."""
    dtype, options = CASES[case]
    groups = 1 if case == "causal" else 2
    q, k, v = heads((3, 2, 3), dtype, 1), heads((68, groups, 3), dtype, 2), heads((68, groups, 3), dtype, 3)
    k[65], v[0, 0, 1] = k[65] * 40, float("inf") if case == "causal" else 1.0
    cu_q, cu_k = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 66, 66, 68])
    sinks = torch.tensor([0.5, float("-inf")]) if "sinks" in case else None
    grad_out = heads((3, 2, 3), dtype, 4)
    sharing = [HeadRun(2, 0, 2)] if groups == 1 else [HeadRun(1, 0, 1), HeadRun(2, 1, 2)]  # part of a larger model's
    options = {**options, "sharing": sharing}
    run = forward_backward(grad_out, **options)
    names = ("out", "m", "total", "rest", "dq", "dk", "dv", "rows of dsinks")
    for name, actual, expected in zip(
        names, on_cuda(run, q, k, v, cu_q, cu_k, sinks), run(q, k, v, cu_q, cu_k, sinks), strict=True
    ):
        assert (actual is None) == (expected is None)
        if expected is not None:
            assert_bitwise_equal(actual, expected, f"{case}: {name}")


def test_verify_autograd_equals_cpu(on_cuda: Callable[..., Any]) -> None:
    """ops.attention and ops.rope_attention with norms, through autograd: rounded gradients, those of norms."""
    x = heads((3, 1, 4), BF16, 5)
    w = heads((4,), FP32, 6).abs()
    sin, cos = reference.sin_cos_tables(torch.arange(3), torch.logspace(0, -2, 2))

    def run(q: Tensor, w: Tensor, sin: Tensor, cos: Tensor) -> list[Tensor]:
        results: list[Tensor] = []
        for fused in (False, True):
            leaves = [t.detach().clone().requires_grad_() for t in (q, q * 0.5, q - 1, w)]
            if fused:
                *qkv, norm = leaves
                y = ops.rope_attention(*qkv, sin, cos, q_norm=norm, k_norm=norm.detach(), eps=1e-6)
            else:
                y = ops.attention(*leaves[:3])
            y.backward(torch.ones_like(y))
            results += [y.detach(), *(t.grad for t in leaves if t.grad is not None)]
        return results

    for i, (actual, expected) in enumerate(zip(on_cuda(run, x, w, sin, cos), run(x, w, sin, cos), strict=True)):
        assert_bitwise_equal(actual, expected, f"result {i}")


@pytest.mark.parametrize("page_size", [16, 5])
def test_verify_pages_equal_packed(page_size: int, on_cuda: Callable[..., Any]) -> None:
    """Keys stored through slots into shuffled pages with stale slots: the bits of the packed call on the CPU."""
    lengths = [70, 3]
    q = heads((3, 2, 4), BF16, 1)
    k, v = heads((73, 1, 4), BF16, 2), heads((73, 1, 4), BF16, 3)
    cu_q, cu_k = torch.tensor([0, 2, 3]), torch.tensor([0, 70, 73])
    pages = -(-70 // page_size)
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(7)).view(2, pages)
    slots = torch.cat([order[b][torch.arange(n) // page_size] * page_size + torch.arange(n) % page_size
                       for b, n in enumerate(lengths)])  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, cu_q: Tensor, slots: Tensor) -> Any:
        caches = [torch.full((2 * pages, page_size, 1, 4), float("nan"), dtype=BF16, device=q.device) for _ in "kv"]
        ops.store_kv(k, v, *caches, slots)
        with torch.no_grad():
            arguments = (q, *caches, table, lengths, cu_q, None, [0, 2], 0.4, 0.0, True, 0)
            return [torch.ops.tbik.paged_attention(*arguments), *caches]

    arguments = (q, k, v, order, torch.tensor(lengths), cu_q, slots)
    actual, key_cache, _ = on_cuda(run, *arguments)
    with torch.no_grad():
        expected = ops.attention(q, k, v, cu_q, cu_k, scale=0.4)
    assert_bitwise_equal(actual, expected, "pages = packed")
    assert_bitwise_equal(key_cache.view(-1, 4)[slots], k.view(-1, 4), "stored keys")
    late = ops.attention(q, k.roll(1, 0), v.roll(1, 0), cu_q, cu_k, scale=0.4).detach()
    assert_bits_differ(actual, late, "keys one further")


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, leaf: str, rows: int = 16, **options: Any
) -> Any:
    from tbik.kernels import attention
    from tbik.kernels.tiles import AttentionTile

    pairs = attention.Pairs(q.shape[2] ** -0.5, 0.0, True, 0)
    tensors = [t.to(DEVICE) for t in (q, k, v, cu_q, cu_k)]
    per_kv = max(1, q.shape[1] // k.shape[1])
    offsets = list(range(0, q.shape[1] + 1, per_kv))
    tile = AttentionTile(rows, 16, 4, 1) if DEVICE == "cpu" else None
    state = attention.forward(*tensors, None, None, offsets, pairs, leaf=leaf, tile=tile, **options)
    return [t.cpu() for t in state]


def test_verify_live_pairs_of_rows_and_of_keys() -> None:
    """The keys of a query and the queries of a key, as columns of a block, are K2's pairs: causal or not, windows of
    both sides, more queries than keys, blocks before the first and behind the last position."""
    import kernels_of_tests

    counts = set()
    for queries, keys in ((20, 20), (5, 30), (30, 5), (0, 9), (9, 0)):
        for causal, window, first in itertools.product((True, False), (0, 1, 7), (-12, 0, 8, 24)):
            i = torch.arange(first, first + 16)[:, None]
            j = torch.arange(8, 24)[None, :] if first != -12 else torch.arange(16)[None, :]
            position = keys - queries + i
            live = (i >= 0) & (i < queries) & (j < keys)
            live &= (j <= position) if causal else True
            live &= ((j > position - window) & (j < position + window)) if window else True
            found, counted = kernels_of_tests.live_pairs(queries, keys, first, int(j[0, 0]), window, causal)
            what = f"{queries} queries, {keys} keys, causal {causal}, window {window}, from {first}"
            assert torch.equal(found[0], live) and torch.equal(found[1], live), what
            # rows and columns without a live pair are told by these counts
            assert torch.equal(counted, torch.stack([live.sum(1), live.sum(0)]).int()), what
            counts.add(int(live.sum()))
    assert len(counts) > 10  # not only all or nothing


def test_verify_blocks_of_64_are_in_the_bits() -> None:
    """Negative control: one block of all keys in place of blocks of 64 has other bits."""
    q, k, v = heads((1, 1, 16), FP32, 1), heads((150, 1, 16), FP32, 2), heads((150, 1, 16), FP32, 3)
    out = forward(q, k, v, torch.tensor([0, 1]), torch.tensor([0, 150]), "fma", rows=1)[0]
    s = reference.chain(q[0], k[:, 0]) * torch.tensor(16**-0.5)
    p = reference.exp(s - s.max())
    one_block = reference.chain(p, v[:, 0].T) / reference.chain(p, torch.ones(1, 150))
    torch.testing.assert_close(out[0], one_block, rtol=1e-5, atol=1e-5)
    assert_bits_differ(out[0], one_block, "one block of 150 keys")


@pytest.mark.parametrize("leaf", ["fma", MMA] if DEVICE == "cuda" else ["fma"])  # numpy's dot has no fixed order
def test_verify_row_alone_equals_row_in_batch(leaf: str) -> None:
    """The last query of a prompt alone (decoding), and with another sequence before it."""
    q, k, v = heads((4, 2, 4), BF16, 1), heads((68, 1, 4), BF16, 2), heads((68, 1, 4), BF16, 3)
    batch = forward(q, k, v, torch.tensor([0, 1, 4]), torch.tensor([0, 2, 68]), leaf)[0]
    alone = forward(q[3:], k[2:], v[2:], torch.tensor([0, 1]), torch.tensor([0, 66]), leaf)[0]
    assert_bitwise_equal(alone, batch[3:], "decoded token")
    longer = forward(q[1:], k[2:], v[2:], torch.tensor([0, 3]), torch.tensor([0, 66]), leaf, rows=32)[0]
    assert_bitwise_equal(longer, batch[1:], "another tile")


def test_verify_mma_forward_equals_its_definition() -> None:
    """Chains that are exact in any order: small integers, p within 2^-6..1, one key of each block per element of v."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(-1, 2, (1, 1, 16), generator=generator).bfloat16()
    q[..., 8:] = 0
    k = torch.randint(-1, 2, (100, 1, 16), generator=generator).bfloat16()
    v = torch.zeros(100, 1, 16, dtype=BF16)
    picked = torch.arange(16) * 2
    for block, d in itertools.product(range(2), range(16)):
        v[64 * block + picked[d], 0, d] = 1.0
    out, m, total, _ = forward(q, k, v, torch.tensor([0, 1]), torch.tensor([0, 100]), MMA)
    s = (q[0].float() @ k[:, 0].float().T)[0] * 0.25
    acc, sums, highest = torch.zeros(16), torch.zeros(()), torch.tensor(float("-inf"))
    unrounded = torch.zeros(())
    for x in s.split(64):
        new = torch.maximum(highest, x.max())
        factor, p = reference.exp(highest - new), reference.exp(x - new)
        rounded = p.bfloat16().float()
        sums, unrounded = sums * factor + rounded.sum(), unrounded * factor + p.sum()
        acc, highest = acc * factor + rounded[picked], new
    assert_bitwise_equal(m[0, 0], highest, "maximum")
    if DEVICE == "cpu":  # a tensor core may round the continued chain in its own way
        assert_bitwise_equal(total[0, 0], sums, "sum of exponentials")
        assert_bits_differ(total[0, 0], unrounded, "sum of unrounded exponentials")
        assert_bitwise_equal(out[0, 0], (acc / sums).bfloat16(), "out")
    torch.testing.assert_close(total[0, 0], sums, rtol=1e-6, atol=0)
    torch.testing.assert_close(out[0, 0].float(), acc / sums, rtol=1e-2, atol=0)


def test_validate_mma_values() -> None:
    """Forward and backward on ordinary data, close to float64's."""
    q, k, v, grad_out = (heads((20, n, 16), BF16, n + i) for i, n in enumerate((2, 1, 1, 2)))
    cu = torch.tensor([0, 20])
    from tbik.kernels import attention
    from tbik.kernels.tiles import AttentionTile

    tile = AttentionTile(16, 16, 4, 1) if DEVICE == "cpu" else None
    pairs = attention.Pairs(0.25, 0.0, True, 0)
    q_, k_, v_, g_, cu_ = (t.to(DEVICE) for t in (q, k, v, grad_out, cu))
    state = attention.forward(q_, k_, v_, cu_, cu_, None, None, [0, 2], pairs, leaf=MMA, with_rest=True, tile=tile)
    program = [_C.run_schedule(0, 2, 2, True, False)]
    dq, dk, dv, _ = attention.backward(
        g_, q_, k_, v_, state, cu_, cu_, None, [0, 2], program, pairs, leaf=MMA, tile=tile
    )
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    scores = torch.einsum("thd,shd->hts", wide[0], wide[1].expand(-1, 2, -1)) * 0.25
    scores = scores.masked_fill(torch.ones(20, 20).triu(1).bool(), float("-inf"))
    y = torch.einsum("hts,shd->thd", scores.softmax(-1), wide[2].expand(-1, 2, -1))
    y.backward(grad_out.double())
    for actual, expected in ((state.out, y), (dq, wide[0].grad), (dk, wide[1].grad), (dv, wide[2].grad)):
        torch.testing.assert_close(actual.cpu().double(), expected.detach(), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("queries, keys, window", [(100, 150, 0), (150, 150, 70), (90, 70, 0)])
def test_verify_what_reaches_a_row_ignores_the_tile(queries: int, keys: int, window: int) -> None:
    """K6: a NaN at a masked pair reaches the rows of the blocks that count, whatever the tile: out, dQ, dK, dV."""
    from tbik.kernels import attention
    from tbik.kernels.tiles import AttentionTile

    ahead = keys - queries
    counted = max(ahead, 0)  # of the first query
    pairs = attention.Pairs(0.25, 0.0, True, window)
    cu_q, cu_k = (torch.tensor([0, n], device=DEVICE) for n in (queries, keys))
    program = [_C.run_schedule(0, 1, 1, True, False)]
    spoilt_key, spoilt_query = 66, 40
    ordinary = [heads((n, 1, 16), BF16, i).to(DEVICE) for i, n in enumerate((queries, keys, keys, queries))]

    def run(tile: AttentionTile | None) -> list[Tensor]:
        """Which rows of out, dq, dk and dv are NaN, with a NaN in v, k, q and dO."""
        spoilt = [t.clone() for t in ordinary]
        for t, at in zip(spoilt, (spoilt_query, spoilt_key, spoilt_key, spoilt_query), strict=True):
            t[at] = float("nan")
        q, k, v, grad = ordinary
        options: dict[str, Any] = {"leaf": MMA, "tile": tile}
        out = attention.forward(q, k, spoilt[2], cu_q, cu_k, None, None, [0, 1], pairs, **options).out
        state = attention.forward(q, k, v, cu_q, cu_k, None, None, [0, 1], pairs, with_rest=True, **options)
        last = (state, cu_q, cu_k, None, [0, 1], program, pairs)
        dq = attention.backward(grad, q, spoilt[1], v, *last, **options).dq
        dk = attention.backward(grad, spoilt[0], k, v, *last, **options).dk
        dv = attention.backward(spoilt[3], q, k, v, *last, **options).dv
        return [t.isnan().any(-1).cpu().flatten() for t in (out, dq, dk, dv)]

    def sees(position: int, key: int) -> bool:
        return key <= position and not (window and key <= position - window)

    def block_of_query(i: int) -> range:  # positions
        start = (counted + i) // 64 * 64 - counted + ahead
        return range(start, start + 64)

    def block(key: int) -> range:
        return range(key // 64 * 64, key // 64 * 64 + 64)

    real = [key for key in block(spoilt_key) if key < keys]
    of_keys = [
        any(sees(t, key) for t in block_of_query(spoilt_query) for key in block(s) if 0 <= t - ahead < queries)
        for s in range(keys)
    ]
    expected = [
        [ahead + i < 0 or any(sees(ahead + i, key) for key in real) for i in range(queries)],  # no key at all: NaN
        [any(sees(t, key) for t in block_of_query(i) for key in real) for i in range(queries)],
        of_keys,
        of_keys,
    ]
    tiles = [AttentionTile(16, 16, 4, 1, 2, True), AttentionTile(64, 64, 4, 1)]
    for tile in tiles if DEVICE == "cpu" else [None]:
        for name, actual, rows in zip(("out", "dq", "dk", "dv"), run(tile), expected, strict=True):
            assert actual.tolist() == rows, (name, tile)
    assert all(any(rows) for rows in expected) and not all(all(rows) for rows in expected)


@pytest.mark.skipif(DEVICE == "cuda", reason="asks the interpreter")
def test_verify_what_the_cpu_refuses_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page outside the cache, more keys than pages, queries without keys: NaN, and no memory beyond the tensors."""
    monkeypatch.setattr(devices, "is_cuda", lambda t: True)
    q, cache = heads((1, 1, 4), FP32, 1), heads((3, 4, 1, 4), FP32, 2)

    def paged(table: list[int], length: int) -> Tensor:
        arguments = (
            torch.tensor([table]),
            torch.tensor([length]),
            torch.tensor([0, 1]),
            None,
            [0, 1],
            1.0,
            0.0,
            True,
            0,
        )
        return torch.ops.tbik.paged_attention(q, cache, cache, *arguments)

    assert bool(paged([2, 0], 6).isfinite().all())
    for table, length in (([2, 3], 6), ([-1, 0], 6), ([2, 0], 9), ([2, 0], 0)):
        assert bool(paged(table, length).isnan().all()), (table, length)


def test_verify_offsets_beyond_2_31() -> None:
    """Tokens of q and of the keys lie 2^31 elements apart; only the touched pages exist."""
    memory = torch.empty(2**31 + 64, dtype=BF16, device=DEVICE)
    far = memory.as_strided((2, 1, 8), (2**31, 8, 1))
    far.copy_(heads((2, 1, 8), BF16, 1))
    near = far.clone()
    cu = torch.tensor([0, 2], device=DEVICE)
    assert_bitwise_equal(forward(far, far, far, cu, cu, "fma")[0], forward(near, near, near, cu, cu, "fma")[0], "far")


def test_verify_refusals() -> None:
    q = heads((2, 2, 8), FP32, 1)
    cu = torch.tensor([0, 2])
    with pytest.raises(PlanError, match="must add up to 2"):
        forward(q, q[:, :, :4].repeat(1, 2, 2)[:, :3], q[:, :1], cu, cu, "fma")
    with pytest.raises(PlanError, match="has its bits on sm_90 only"):
        ops.attention(q.bfloat16(), q.bfloat16(), q.bfloat16(), plan=TreePlan(leaf="mma:sm_90"))
    with pytest.raises(PlanError, match="tensor-core leaves exist for"):
        from tbik.kernels.tiles import attention_tile

        attention_tile("mma:sm_75", 64, "forward")


OPERATORS = ["attention", "attention_backward", "paged_attention", "store_kv", "rope_attention", "attention_round"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_verify_operators_serve_cuda(operator: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tbik::{operator}", "CUDA")
