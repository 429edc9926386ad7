"""tbik.vocabulary over gloo and over the tbik backend: the bits of one rank at every number of shards (ORDER.md V11).

Every rank takes its columns of the same logits, made from a seed; the test compares with one rank's operators, which
test_softmax.py, test_cross_entropy.py and test_logprobs.py compare with the oracle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import logits, wide_exponents
from long_cases import long_cases
from spawn import Pool
from torch import Tensor

from tbik import TreePlan, ops
from tbik.collectives import all_gather, bytes_sent, reset_bytes_sent
from tbik.errors import PlanError
from tbik.plan import Run
from tbik.vocabulary import VocabParallel

PLAN = TreePlan(leaves=12)
VOCABS = (49_152, 128_256, 151_936)
UNEVEN: dict[int, tuple[tuple[Run, ...], ...]] = {
    2: (((0, 1), (1, 12)),),
    3: (((0, 2), (2, 9), (9, 12)),),
    4: (((0, 5), (5, 6), (6, 7), (7, 12)),),
}


@pytest.fixture(scope="module", params=["gloo", "tbik"])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(4, backend=request.param) as ranks:
        yield ranks


def problem(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [2, 2, V] (two samples), targets with one ignored, upstream gradients [2, 2, V] and [2, 2]."""
    x = logits((2, 2, vocab), dtype, 1)
    targets = torch.tensor([[0, vocab - 1], [-100, vocab // 3]])
    return x, targets, wide_exponents((2, 2, vocab), dtype, 2, spread=8), wide_exponents((2, 2), torch.float32, 3)


def results(shards: Any, x: Tensor, targets: Tensor, dy: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Everything, forward and backward; `shards` has the operators, x and dy its columns."""
    found: dict[str, Tensor] = {}

    def differentiate(name: str, function: Callable[[Tensor], Tensor], upstream: Tensor) -> None:
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        found[name], found[f"d {name}"] = y.detach(), torch.autograd.grad(y, leaf, upstream)[0]

    ids = targets.clamp(min=0)
    differentiate("log_softmax", shards.log_softmax, dy)
    differentiate("softmax", shards.softmax, dy)
    differentiate("losses", lambda t: shards.token_losses(t, targets), g)
    differentiate("total", lambda t: shards.cross_entropy(t, targets).total, torch.tensor(1 / 3))
    differentiate("logprobs", lambda t: shards.logprobs(t, ids), g)
    found["num_tokens"] = shards.cross_entropy(x, targets).num_tokens
    found["top"], found["top ids"] = shards.top_logprobs(x, 5)
    found["argmax"] = shards.argmax(x)
    return found


class OneRank:
    """The operators of tbik.ops, with the names of VocabParallel."""

    softmax = staticmethod(lambda x: ops.softmax(x, PLAN.leaves))
    log_softmax = staticmethod(lambda x: ops.log_softmax(x, PLAN.leaves))
    token_losses = staticmethod(lambda x, t: ops.token_losses(x, t, plan=PLAN))
    cross_entropy = staticmethod(lambda x, t: ops.cross_entropy(x, t, plan=PLAN))
    logprobs = staticmethod(lambda x, i: ops.logprobs(x, i, PLAN.leaves))
    top_logprobs = staticmethod(lambda x, k: ops.top_logprobs(x, k, PLAN.leaves))
    argmax = staticmethod(ops.argmax)


COLUMNS = ("log_softmax", "d log_softmax", "softmax", "d softmax", "d losses", "d total", "d logprobs")


def run_sharded(
    group: dist.ProcessGroup, vocab: int, dtype: torch.dtype, runs: tuple[Run, ...] | None
) -> dict[str, Any]:
    torch.set_num_threads(1)
    x, targets, dy, g = problem(vocab, dtype)
    shards = VocabParallel(vocab, plan=PLAN, group=group, runs=runs)
    part = slice(*shards.columns)
    reset_bytes_sent(group)
    found: dict[str, Any] = results(shards, x[..., part].clone(), targets, dy[..., part], g)
    return {**found, "bytes": bytes_sent(group), "columns": shards.columns}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [*((v, torch.bfloat16) for v in VOCABS), *long_cases((v, torch.float32) for v in VOCABS)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_verify_vocabulary_worlds(pool: Pool, vocab: int, dtype: torch.dtype) -> None:
    expected = results(OneRank, *problem(vocab, dtype))
    for world in (1, 2, 3, 4):
        for runs in (None, *UNEVEN.get(world, ())):
            ranks = pool.run(run_sharded, world, vocab, dtype, runs)
            what = f"V={vocab}, {world} ranks, runs {runs}"
            for name in expected:
                if name in COLUMNS:
                    whole = torch.cat([rank[name] for rank in ranks], -1)
                    assert_bitwise_equal(whole, expected[name], f"{name}, {what}")
                    continue
                for rank in ranks:
                    assert_bitwise_equal(rank[name], expected[name], f"{name}, {what}")
            # it really was sharded, and no logits travelled: 4 rows, some hundred bytes each
            assert [rank["columns"][0] for rank in ranks[1:]] == [rank["columns"][1] for rank in ranks[:-1]]
            assert all((0 < rank["bytes"] < 60_000) == (world > 1) for rank in ranks), what


def run_wrong_sums(group: dist.ProcessGroup, vocab: int) -> Tensor:
    """The sum of exponentials added up by torch: each rank's flat sum, then dist.all_reduce."""
    x, _, _, _ = problem(vocab, torch.float32)
    shards = VocabParallel(vocab, plan=PLAN, group=group)
    local = torch.exp(x - x.amax(-1, keepdim=True))[..., slice(*shards.columns)].sum(-1)
    dist.all_reduce(local, group=group)
    return local


@pytest.mark.multiprocess
def test_verify_flat_sums_depend_on_the_world(pool: Pool) -> None:
    """Negative control."""
    one, three = pool.run(run_wrong_sums, 1, VOCABS[0])[0], pool.run(run_wrong_sums, 3, VOCABS[0])[0]
    assert_bits_differ(one, three, "flat sums on 1 and 3 ranks")


def run_special(group: dist.ProcessGroup) -> dict[str, Any]:
    """Small shards: NaN, infinities, ties across shards, k beyond a shard's columns."""
    x = (logits((24, 37), torch.float32, 5, special=True) / 4).round()
    shards = VocabParallel(37, plan=PLAN, group=group)
    part = x[:, slice(*shards.columns)]
    return {
        "log_softmax": shards.log_softmax(part),
        "top": torch.cat([t.double() for t in shards.top_logprobs(part, 30)]),
        "argmax": shards.argmax(part),
    }


@pytest.mark.multiprocess
def test_verify_vocabulary_special_values(pool: Pool) -> None:
    x = (logits((24, 37), torch.float32, 5, special=True) / 4).round()
    for world in (1, 2, 3, 4):
        ranks = pool.run(run_special, world)
        whole = torch.cat([rank["log_softmax"] for rank in ranks], -1)
        assert_bitwise_equal(whole, ops.log_softmax(x, PLAN.leaves), f"{world} ranks")
        for rank in ranks:
            assert_bitwise_equal(rank["top"], torch.cat([t.double() for t in ops.top_logprobs(x, 30, PLAN.leaves)]))
            assert_bitwise_equal(rank["argmax"], ops.argmax(x))


def run_disagreement(group: dist.ProcessGroup, what: str) -> str:
    rank = group.rank()
    os.environ["TBIK_CHECK"] = "1" if what == "k" else "0"  # messages of other sizes show in a checked call only
    shards = VocabParallel(48, plan=PLAN, group=group)
    x = torch.ones(2, shards.columns[1] - shards.columns[0])
    try:
        if what == "targets":
            shards.token_losses(x, torch.tensor([1, 2 + rank]))
        elif what == "k":
            shards.top_logprobs(x, 2 + rank)
        else:
            all_gather(torch.ones(2) if rank else torch.ones(2, dtype=torch.int32), group)
    except PlanError as error:
        return str(error)
    finally:
        del os.environ["TBIK_CHECK"]
    return "no error"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("what", "message"), [("targets", "digest of the ids"), ("k", "k: 2 on rank 0; 3 on rank 1"), ("dtype", "dtype")]
)
def test_verify_ranks_that_disagree_are_refused(pool: Pool, what: str, message: str) -> None:
    for text in pool.run(run_disagreement, 2, what):
        assert message in text


def test_verify_one_rank_without_a_group() -> None:
    x, targets, dy, g = problem(1000, torch.bfloat16)
    found = results(VocabParallel(1000, plan=PLAN), x, targets, dy, g)
    for name, value in results(OneRank, x, targets, dy, g).items():
        assert_bitwise_equal(found[name], value, name)
    losses = VocabParallel(1000, plan=PLAN).token_losses(x.clone().requires_grad_(), targets)
    losses.mul_(2)  # no view


X, T = torch.ones(2, 48), torch.tensor([0, 47])
ONE = VocabParallel(48, plan=PLAN)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no plan": (lambda: VocabParallel(48, plan=None), "plan is a tbik.TreePlan"),  # type: ignore[arg-type]
    "no vocabulary": (lambda: VocabParallel(0, plan=PLAN), "vocab is an integer >= 1, got 0"),
    "vocab of text": (lambda: VocabParallel("48", plan=PLAN), "vocab is an integer"),  # type: ignore[arg-type]
    "fp64 plan": (lambda: VocabParallel(48, plan=TreePlan(acc_dtype="float64")), "reduced in float32"),
    "runs that leave a gap": (lambda: VocabParallel(48, plan=PLAN, runs=[(0, 5)]), "do not cover the 12 leaves"),
    "group of text": (lambda: VocabParallel(48, plan=PLAN, group="world"), "group is a ProcessGroup"),  # type: ignore[arg-type]
    "columns": (lambda: ONE.log_softmax(X[:, :40]), r"holds columns \[0, 48\) of 48; expected logits \[..., 48\]"),
    "float64": (lambda: ONE.softmax(X.double()), "got torch.float64"),
    "target": (lambda: ONE.token_losses(X, torch.tensor([0, 48])), r"targets\[1\] = 48 is outside"),
    "target shape": (lambda: ONE.token_losses(X, T[:1]), r"expected targets \[2\], got \[1\]"),
    "target dtype": (lambda: ONE.cross_entropy(X, T.int()), "targets is int64"),
    "ids": (lambda: ONE.logprobs(X, torch.tensor([-1, 0])), r"ids\[0\] = -1 is outside"),
    "offsets": (lambda: ONE.cross_entropy(X, T, sample_offsets=[0, 3]), "ascend from 0 to the 2 rows"),
    "k": (lambda: ONE.top_logprobs(X, 49), r"k is an integer 1..48 .*got 49"),
    "meta logits": (lambda: ONE.softmax(X.to("meta")), "logits is on meta, kernels exist for cpu and cuda"),
    "meta targets": (lambda: ONE.cross_entropy(X, T.to("meta")), "logits is on cpu, targets on meta"),
    "ignored id of 65 bits": (lambda: ONE.token_losses(X, T, 2**64), "ignore_index is an integer of 64 bits"),
    "gather of a list": (lambda: all_gather([1.0]), "all_gather: expected a dense CPU or CUDA tensor"),  # type: ignore[arg-type]
    "gather of bools": (lambda: all_gather(X > 0), "all_gather: expected a dense CPU or CUDA tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_verify_vocabulary_refuses(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        call()


def test_verify_lazily_negated_gradients() -> None:
    """A gradient whose sign autograd has not applied yet (torch's neg bit) is that gradient."""
    for function in (ONE.softmax, ONE.log_softmax, lambda x: ONE.logprobs(x, T), lambda x: ONE.token_losses(x, T)):
        x = logits((2, 48), torch.float32, 1).requires_grad_()
        y = function(x)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        (lazy,) = torch.autograd.grad(y, x, torch._neg_view(dy), retain_graph=True)
        assert_bitwise_equal(lazy, torch.autograd.grad(y, x, -dy)[0])


def test_verify_vocabulary_has_one_derivative() -> None:
    x = X.clone().requires_grad_()
    (dx,) = torch.autograd.grad(ONE.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(PlanError, match="no second derivative"):
        dx.sum().backward()
