"""Cross-entropy (csrc/vocab.h, tbik/ops/cross_entropy.py) against the oracle: ORDER.md A10, S1, S4, V6 to V8."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import logits, wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from row_checks import assert_machine_independent, assert_rows_independent, cpu_path, far_apart, spread
from torch import Tensor

from tbik import _C, TreePlan, ops, reference, tree
from tbik.collectives import Cover, all_reduce
from tbik.errors import PlanError
from tbik.ops.cross_entropy import cross_entropy_dx, losses_of, pick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def targets_for(x: Tensor, seed: int, ignore_index: int = -100) -> Tensor:
    """An id per row; about one in five is ignored."""
    generator = torch.Generator().manual_seed(seed)
    t = torch.randint(0, x.shape[-1], x.shape[:-1], generator=generator)
    return torch.where(torch.rand(t.shape, generator=generator) < 0.2, ignore_index, t)


def losses_and_gradient(leaves: int, ignore_index: int = -100) -> Callable[[Tensor, Tensor, Tensor], list[Tensor]]:
    def run(x: Tensor, targets: Tensor, g: Tensor) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        loss = ops.token_losses(leaf, targets, leaves=leaves, ignore_index=ignore_index)
        return [loss.detach(), torch.autograd.grad(loss, leaf, g)[0]]

    return run


@settings(max_examples=200)
@given(
    rows=st.integers(1, 4),
    vocab=st.one_of(st.integers(1, 40), st.integers(500, 1600)),
    leaves=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(_C.cpu_paths()),
    ignore_index=st.sampled_from([-100, 0, -1, 7]),
    seed=st.integers(0, 10**6),
    strided=st.booleans(),
)
def test_verify_cross_entropy_equals_reference(
    rows: int, vocab: int, leaves: int, dtype: torch.dtype, path: str, ignore_index: int, seed: int, strided: bool
) -> None:
    x, g = logits((rows, vocab), dtype, seed, special=True), wide_exponents((rows,), torch.float32, seed)
    targets = targets_for(x, seed, ignore_index)
    given_x, given_t, given_g = (spread(t) if strided else t for t in (x, targets, g))
    with cpu_path(path):
        loss, dx = losses_and_gradient(leaves, ignore_index)(given_x, given_t, given_g)
    assert_bitwise_equal(loss, reference.cross_entropy(x, targets, leaves, ignore_index), f"loss, {path}")
    assert_bitwise_equal(dx, reference.cross_entropy_dx(g, x, targets, leaves, ignore_index), f"dx, {path}")
    assert not dx[targets == ignore_index].view(torch.uint8).any(), "ignored rows are +0, whatever their logits"


@settings(max_examples=200)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9),
    seed=st.integers(0, 10**6),
    tiny=st.booleans(),
)
def test_verify_token_sum_equals_reference(lengths: list[int], seed: int, tiny: bool) -> None:
    """Per sample and in total, flushed as a chain is (A2). Blocks: the next test, the oracle being slow."""
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    losses = wide_exponents((offsets[-1],), torch.float32, seed) * (2.0**-120 if tiny else 1.0)
    assert_bitwise_equal(ops.sample_sums(losses, offsets), reference.sample_sums(losses, offsets), "samples")
    assert_bitwise_equal(ops.token_sum(losses, offsets), reference.token_sum(losses, offsets), "total")


def test_verify_token_sum_blocks() -> None:
    """Blocks of 512 tokens from the start of each sample."""
    offsets = [0, 511, 511, 1024, 2054]
    losses = wide_exponents((offsets[-1],), torch.float32, 20)
    assert_bitwise_equal(ops.sample_sums(losses, offsets), reference.sample_sums(losses, offsets), "samples")
    assert_bits_differ(
        ops.sample_sums(losses[:1030], [0, 1030]),
        ops.sample_sums(losses[1:1030], [0, 1029]) + losses[0],
        "blocks elsewhere",
    )


def test_verify_token_sum_flushes_as_a_chain(flush_denormal: None) -> None:
    """Subnormal terms and sums inside a chain are +-0 (A2), nodes above it are not flushed (A3)."""
    tiny = 2.0**-127
    losses = torch.tensor([2 * tiny, -1.5 * 2 * tiny, tiny, 1.0])
    assert ops.sample_sums(losses, [0, 2, 3, 4]).tolist() == [0.0, 0.0, 1.0]
    two = torch.tensor([3 * tiny, -2 * tiny])
    assert_bitwise_equal(ops.token_sum(two, [0, 1, 2]), reference.token_sum(two, [0, 1, 2]))
    assert ops.token_sum(two, [0, 1, 2]).view(torch.int32).item() == 0x00400000


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_verify_cross_entropy_row_alone_equals_row_in_batch(dtype: torch.dtype) -> None:
    x, g = logits((128, 1237), dtype, 1), wide_exponents((128,), torch.float32, 2, spread=8)
    x[5] = float("nan")  # a neighbour
    assert_rows_independent(losses_and_gradient(6), x, targets_for(x, 3).abs().clamp_(max=1236), g)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_verify_cross_entropy_paths_and_threads(dtype: torch.dtype) -> None:
    x, g = logits((33, 2051), dtype, 4, special=True), wide_exponents((33,), torch.float32, 5, spread=8)
    assert_machine_independent(losses_and_gradient(5), x, targets_for(x, 6), g)


def test_verify_cross_entropy_flush_mode_of_the_process(flush_denormal: None) -> None:
    x, targets, g = torch.tensor([[0.0, -88.0, -100.0, -3.0]]), torch.tensor([1]), torch.tensor([0.5])
    loss, dx = losses_and_gradient(2)(x, targets, g)
    assert_bitwise_equal(loss, reference.cross_entropy(x, targets, 2))
    assert_bitwise_equal(dx, reference.cross_entropy_dx(g, x, targets, 2))
    assert 0 < dx.view(torch.int32)[0, 2].item() < 0x00800000, "the data has a subnormal gradient"


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_verify_cross_entropy_ignores_micro_batches(dtype: torch.dtype) -> None:
    """A global batch of 8 samples in micro-batches of 1, 2, 4, 8: one total, one gradient, by covers over the batch."""
    tokens, vocab = 515, 33
    x = logits((8, tokens, vocab), dtype, 7)
    targets = targets_for(x, 8)
    scale = torch.tensor(1.0) / (targets != -100).sum()
    leaf = x.clone().requires_grad_()
    total, count = ops.cross_entropy(leaf, targets, leaves=4)
    (total * scale).backward()
    expected = reference.token_sum(reference.cross_entropy(x, targets, 4), [tokens * i for i in range(9)])
    assert_bitwise_equal(total.detach(), expected)
    assert count.item() == int((targets != -100).sum())
    g = scale.expand(8, tokens).contiguous()
    assert_bitwise_equal(leaf.grad, reference.cross_entropy_dx(g, x, targets, 4))
    losses = reference.cross_entropy(x, targets, 4)
    assert abs(float(losses.double().sum()) - float(total.detach())) < 1e-5 * abs(float(total.detach()))
    chains = torch.stack([part.flatten().cumsum(0)[-1] for part in losses.split([1, 3, 4])])
    trees = torch.stack([ops.token_sum(part) for part in losses.split([1, 3, 4])])
    assert_bits_differ(chains, trees, "flat chains")
    for m in (1, 2, 4):
        covers: dict[tree.Node, Tensor] = {}
        for first in range(0, 8, m):
            part = slice(first, first + m)
            micro = x[part].clone().requires_grad_()
            losses = ops.token_losses(micro, targets[part], leaves=4)
            sums = ops.sample_sums(losses)
            (ops.token_sum(losses) * scale).backward()
            assert_bitwise_equal(micro.grad, leaf.grad[part], f"gradient, micro-batches of {m}")  # type: ignore[index]
            values = ops.sample_cover(sums, first)
            nodes = tree.cover(first, first + m)
            covers = tree.merge(covers, dict(zip(nodes, values, strict=True)), torch.add)
        merged = torch.stack([covers[n] for n in sorted(covers, key=lambda n: n.lo)])
        nodes = tuple(sorted(covers, key=lambda n: n.lo))
        assert_bitwise_equal(all_reduce(Cover(merged[:, None], nodes, 8))[0], total.detach(), f"micro-batches of {m}")


def test_verify_sample_covers_start_anywhere() -> None:
    sums = wide_exponents((7,), torch.float32, 9)
    whole = ops.sample_cover(sums, 0)
    for cut in range(1, 7):
        left, right = ops.sample_cover(sums[:cut], 0), ops.sample_cover(sums[cut:], cut)
        covers = [
            dict(zip(tree.cover(lo, hi), values, strict=True)) for lo, hi, values in ((0, cut, left), (cut, 7, right))
        ]
        assert_bitwise_equal(
            reference.fold_covers(covers, 7),
            reference.fold_covers([dict(zip(tree.cover(0, 7), whole, strict=True))], 7),
        )


@pytest.mark.parametrize("vocab", [49_152, 128_256, 151_936])
def test_verify_cross_entropy_of_shards(vocab: int) -> None:
    """Given lse, each run of columns gives its own part of dlogits, and the owner of the target its logit."""
    x, g = logits((3, vocab), torch.bfloat16, 10), torch.tensor([1.0, 0.3, 0.25])
    targets = torch.tensor([0, vocab - 1, vocab // 3])
    cuts = tree.cuts(vocab, 12)
    loss, dx = losses_and_gradient(12)(x, targets, g)
    lse = reference.log_sum_exp(x, 12)
    for ends in ([0, 12], [0, 5, 12], [0, 1, 6, 12], [0, 2, 3, 7, 12]):
        parts = [slice(cuts[lo], cuts[hi]) for lo, hi in itertools.pairwise(ends)]
        pieces = [cross_entropy_dx(g, x[:, part], targets, lse, part.start, -100) for part in parts]
        assert_bitwise_equal(torch.cat(pieces, -1), dx, f"V={vocab}, cut at {ends}")
        picked = torch.stack([pick(x[:, part], targets[:, None], part.start)[:, 0] for part in parts])
        assert (picked.view(torch.int32) == -(2**31)).sum() == 3 * (len(parts) - 1), "-0.0 from those that lack it"
        assert_bitwise_equal(losses_of(lse, picked.sum(0), targets, -100), loss)


def test_verify_cross_entropy_strides_beyond_32_bits() -> None:
    near, targets, g = logits((2, 700), torch.bfloat16, 11), torch.tensor([3, 699]), torch.tensor([1.0, -2.0])
    far = far_apart(near)
    for value, expected in zip(losses_and_gradient(3)(far, targets, g), losses_and_gradient(3)(near, targets, g)):
        assert_bitwise_equal(value, expected)


def test_verify_stock_cross_entropy_depends_on_the_batch() -> None:
    """Negative control: torch's summed loss changes with the micro-batch, and its losses are not ours."""
    x = logits((8, 600, 33), torch.float32, 12)
    targets = targets_for(x, 13)
    stock = torch.nn.functional.cross_entropy
    whole = stock(x.flatten(0, 1), targets.flatten(), reduction="sum")
    parts = sum(stock(a, b, reduction="sum") for a, b in zip(x, targets))
    assert_bits_differ(whole, parts, "torch, micro-batches of one")  # type: ignore[arg-type]
    ours = ops.token_losses(x, targets, leaves=4)
    theirs = stock(x.flatten(0, 1), targets.flatten(), reduction="none").view(ours.shape)
    assert_bits_differ(ours, theirs, "torch's losses")
    assert_bits_differ(ops.token_losses(x, targets, leaves=4), ops.token_losses(x, targets, leaves=3), "three leaves")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_validate_cross_entropy_accuracy(dtype: torch.dtype) -> None:
    """Against float64: losses, total and gradient no worse than torch's own (bf16 losses of torch are in bf16)."""
    x = logits((1024, 8192), dtype, 14, shift=0)  # of 256 rows torch's own figure moves by 8 % from seed to seed
    targets = targets_for(x, 15)
    stock = torch.nn.functional.cross_entropy

    def stock_run(t: Tensor) -> list[Tensor]:
        leaf = t.detach().requires_grad_()
        loss = stock(leaf, targets, reduction="none")
        return [loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]]

    truth = stock_run(x.double())
    theirs = stock_run(x)
    ours = losses_and_gradient(8)(x, targets, torch.ones(1024))
    for what, value, other, exact in zip(("loss", "dx"), ours, theirs, truth):
        error, allowed = (float((t.double() - exact).square().mean().sqrt()) for t in (value, other))
        assert error <= 1.02 * allowed, (what, error, allowed)
    total = float(ops.cross_entropy(x, targets, leaves=8).total)
    exact_total, stock_total = float(truth[0].sum()), float(stock(x, targets, reduction="sum"))
    # a chain of up to 512 losses rounds once per token; torch adds pairwise
    assert abs(total - exact_total) <= 1e-6 * abs(exact_total), (total, exact_total, stock_total)


MEMORY = """
import sys, torch
from tbik import ops
torch.set_num_threads(1)
x = torch.randn(192, 49152).to(getattr(torch, sys.argv[1])).requires_grad_()
t = torch.randint(0, 49152, (192,))
ops.cross_entropy(x[:1], t[:1], leaves=8)
def peak():  # of this program: ru_maxrss begins with that of the process that started it
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
start = peak()
total, _ = ops.cross_entropy(x, t, leaves=8)
forward = peak()
total.backward()
print(forward - start, peak() - forward, x.numel() * x.element_size())
"""


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_verify_cross_entropy_memory(dtype: str) -> None:
    """The forward holds no [T, V] tensor; the backward holds dlogits and nothing of that size beside."""
    run = subprocess.run([sys.executable, "-c", MEMORY, dtype], check=True, capture_output=True, text=True, timeout=60)
    forward, backward, size = map(int, run.stdout.split())
    assert forward < size / 8, (forward, size)
    assert backward < size * 9 / 8, (backward, size)


CALLS = {
    "cross_entropy": (
        torch.ops.tbik.cross_entropy,
        (logits((2, 3, 40), torch.bfloat16, 1), torch.tensor([[1, 2, -100], [0, 39, 5]]), 3, -100),
    ),
    "cross_entropy_backward": (
        torch.ops.tbik.cross_entropy_backward,
        (torch.ones(2), torch.ones(2, 7), torch.tensor([1, -100]), torch.ones(2), -100),
    ),
    "sample_sums": (torch.ops.tbik.sample_sums, (torch.ones(2, 7), None)),
    "sample_sums_offsets": (torch.ops.tbik.sample_sums, (torch.ones(2, 7), [0, 3, 3, 14])),
    "sample_sums_backward": (torch.ops.tbik.sample_sums_backward, (torch.ones(3), torch.ones(2, 7), [0, 3, 3, 14])),
    "sample_root": (torch.ops.tbik.sample_root, (torch.ones(5),)),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_verify_cross_entropy_opcheck(name: str, requires_grad: bool) -> None:
    operator, arguments = CALLS[name]
    if requires_grad and not name.endswith("backward"):
        arguments = (arguments[0].clone().requires_grad_(), *arguments[1:])
    torch.library.opcheck(operator.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_verify_cross_entropy_compiled_equals_eager(dtype: torch.dtype, dynamic: bool) -> None:
    def function(x: Tensor, targets: Tensor) -> Tensor:
        total, count = ops.cross_entropy(x, targets, plan=TreePlan(leaves=4))
        return total * (1.0 / count)

    def run(function: Callable[[Tensor, Tensor], Tensor], batch: int) -> list[Tensor]:
        x = logits((batch, 5, 300), dtype, 16).requires_grad_()
        loss = function(x, targets_for(x, 17))
        loss.backward()
        return [loss.detach(), x.grad]  # type: ignore[list-item]

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for batch in (2, 3) if dynamic else (2,):
        for value, expected in zip(run(compiled, batch), run(function, batch), strict=True):
            assert_bitwise_equal(value, expected, f"{batch} samples")
    torch._dynamo.reset()


def test_verify_cross_entropy_has_one_derivative() -> None:
    x, targets = torch.randn(2, 5, requires_grad=True), torch.tensor([1, 2])
    (dx,) = torch.autograd.grad(ops.cross_entropy(x, targets, leaves=1).total, x, create_graph=True)
    with pytest.raises(PlanError, match="no derivative"):
        dx.sum().backward()


def test_verify_cross_entropy_of_no_tokens() -> None:
    x = torch.ones(0, 5, requires_grad=True)
    total, count = ops.cross_entropy(x, torch.zeros(0, dtype=torch.int64), leaves=2)
    total.backward()
    assert (total.item(), count.item(), list(x.grad.shape)) == (0.0, 0, [0, 5])  # type: ignore[union-attr]
    all_ignored = ops.cross_entropy(torch.full((3, 5), float("nan")), torch.full((3,), -100), leaves=2)
    assert all_ignored.total.view(torch.int32).item() == 0 and all_ignored.num_tokens.item() == 0


X, T = torch.ones(2, 8), torch.tensor([1, 7])


def entropy(x: object = X, t: object = T, **arguments: object) -> Callable[[], object]:
    return lambda: ops.cross_entropy(x, t, **{"leaves": 2, **arguments})  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "target too large": (entropy(t=torch.tensor([1, 8])), r"targets\[1\] = 8 is outside the vocabulary of 8"),
    "target negative": (entropy(t=torch.tensor([-1, 1])), r"targets\[0\] = -1 .*or ignore_index = -100"),
    "the other ignored id": (entropy(t=torch.tensor([-100, 1]), ignore_index=-1), r"targets\[0\] = -100"),
    "targets int32": (entropy(t=T.int()), r"targets is int64, got torch.int32; use targets.long"),
    "targets fp32": (entropy(t=torch.ones(2, 8)), "class probabilities: no"),
    "targets too few": (entropy(t=torch.tensor([1])), r"expected targets \[2\] for logits \[2, 8\], got \[1\]"),
    "targets per logit": (entropy(t=torch.ones(2, 8, dtype=torch.int64)), r"expected targets \[2\]"),
    "targets are a list": (entropy(t=[1, 7]), "targets is a tensor, got list"),
    "logits float64": (entropy(X.double()), "logits is bfloat16, float16 or float32, got torch.float64"),
    "logits int": (entropy(X.int()), "got torch.int32"),
    "logits scalar": (entropy(torch.tensor(1.0), torch.tensor(0)), r"V >= 1, got \[\]"),
    "empty vocabulary": (entropy(torch.ones(2, 0)), r"V >= 1, got \[2, 0\]"),
    "logits None": (entropy(None), "logits is a tensor, got NoneType"),
    "neither plan nor leaves": (entropy(leaves=None), "say plan .* or leaves"),
    "plan and leaves": (entropy(plan=TreePlan()), "say plan .* or leaves"),
    "plan is a dict": (entropy(leaves=None, plan={"leaves": 2}), "tbik.TreePlan, got dict"),
    "no leaves": (entropy(leaves=0), "leaves is an integer 1..4096"),
    "ignore_index None": (entropy(ignore_index=None), "ignore_index is an integer of 64 bits, got None"),
    "ignore_index of 2^63": (entropy(ignore_index=2**63), "ignore_index is an integer of 64 bits"),
    "plan of float64": (entropy(leaves=None, plan=TreePlan(acc_dtype="float64")), "reduced in float32"),
    "cover from 2^62": (lambda: ops.sample_cover(torch.ones(2), 2**62), "an integer 0..2.48 - 1"),
    "ignore_index of text": (entropy(ignore_index="-100"), "ignore_index is an integer"),
    "offsets too short": (entropy(sample_offsets=[0, 1]), "ascend from 0 to the 2 rows"),
    "offsets descend": (entropy(sample_offsets=[0, 2, 1, 2]), "ascend from 0"),
    "offsets as a tensor": (entropy(sample_offsets=torch.tensor([0, 2])), "list or tuple of integers"),
    "four axes without offsets": (entropy(torch.ones(1, 1, 2, 8), T.view(1, 1, 2)), "does not say what a sample is"),
    "meta targets": (entropy(t=T.to("meta")), "logits is on cpu, targets on meta"),
    "losses in bf16": (lambda: ops.token_sum(torch.ones(3).bfloat16()), "losses are never rounded"),
    "sums of two axes": (lambda: ops.sample_cover(torch.ones(2, 2), 0), r"expected sums \[B\]"),
    "cover from -1": (lambda: ops.sample_cover(torch.ones(2), -1), "an integer 0.* got -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_verify_cross_entropy_refuses(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        call()
