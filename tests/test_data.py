"""tbik.data: one order of samples for every layout, exact resume, refusals."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tbik import data
from tbik.data import StepSampler, TokenBlocks, require_loader
from tbik.errors import PlanError
from tbik.gradients import GradientTree
from tbik.integrity.fingerprint import mix


def split_of(samples_per_step: int, data_ranks: int, micro_steps: int, steps: int, **more: Any) -> list[list[int]]:
    """Per step, its items in the order of the global numbers, put together from all ranks."""
    ranks = [
        StepSampler(
            10, samples_per_step=samples_per_step, data_ranks=data_ranks, rank=r, micro_steps=micro_steps, **more
        )
        for r in range(data_ranks)
    ]
    result = []
    for step in range(steps):
        found = {g: s.item(g) for s in ranks for run in s.global_samples(step) for g in run}
        result.append([found[g] for g in sorted(found)])
        assert sorted(found) == list(range(step * samples_per_step, (step + 1) * samples_per_step))
    return result


LAYOUTS = [(D, A) for D in (1, 2, 3, 4, 6, 8) for A in data.numbering.micro_steps_that_work(24, D)]


@pytest.mark.parametrize(("data_ranks", "micro_steps"), LAYOUTS)
def test_verify_a_step_holds_the_same_samples_in_every_layout(data_ranks: int, micro_steps: int) -> None:
    assert split_of(24, data_ranks, micro_steps, 3, seed=5) == split_of(24, 1, 24, 3, seed=5)


def test_verify_the_numbering_is_that_of_the_gradient_tree() -> None:
    """The tree says which samples its micro-steps hold; the sampler hands out the same."""
    weight = torch.nn.Parameter(torch.zeros(3))
    sampler = StepSampler(100, samples_per_step=12, micro_steps=3, shuffle=False)
    tree = GradientTree([weight], samples_per_step=12, micro_steps=3)
    for run in sampler.global_samples(0):
        with tree.micro_step() as step:
            assert step.samples == run
            step.backward((weight * 0.3).sum())
    tree.finish()


@given(st.integers(1, 40), st.integers(0, 2**40), st.integers(0, 5))
def test_verify_every_epoch_is_a_permutation_of_the_dataset(size: int, seed: int, epoch: int) -> None:
    sampler = StepSampler(size, samples_per_step=1, seed=seed)
    items = [sampler.item(epoch * size + i) for i in range(size)]
    assert sorted(items) == list(range(size))


def test_verify_the_permutation_is_written_down() -> None:
    """The order of the items is part of the bits: it may change with no library version."""
    sampler = StepSampler(8, samples_per_step=8, seed=1)
    head = mix(mix(1 + 1) + 1)
    assert [sampler.item(g) for g in range(8)] == sorted(range(8), key=lambda i: mix(head + i))
    other = StepSampler(8, samples_per_step=8, seed=2)
    orders = {tuple(s.item(e * 8 + i) for i in range(8)) for s in (sampler, other) for e in range(3)}
    assert len(orders) == 6, "another seed or epoch has another order"


@pytest.mark.parametrize("workers", [0, 2])
def test_verify_resume_goes_on_exactly_on_another_layout(workers: int) -> None:
    """What a loader has read ahead does not count; only finish_step moves the position."""

    def trained(sampler: StepSampler, steps: int) -> list[int]:
        loader = DataLoader(list(range(50)), batch_sampler=sampler, collate_fn=list, num_workers=workers)
        batches = iter(loader)
        items = []
        for _ in range(steps):
            for _ in range(sampler.micro_steps):
                items += next(batches)
            sampler.finish_step()
        return items

    straight = trained(StepSampler(50, samples_per_step=12, micro_steps=12), 9)
    first = StepSampler(50, samples_per_step=12, micro_steps=3)
    items = trained(first, 4)
    second = StepSampler(50, samples_per_step=12, micro_steps=6)
    second.load_state_dict(first.state_dict())
    assert second.step == 4 and items + trained(second, 5) == straight


def test_verify_iteration_ends_where_it_is_told_to() -> None:
    sampler = StepSampler(10, samples_per_step=4, micro_steps=2, steps=3)
    assert len(sampler) == len(list(sampler)) == 6
    sampler.finish_step()
    assert len(sampler) == len(list(sampler)) == 4
    assert len(list(itertools.islice(StepSampler(3, samples_per_step=4), 50))) == 50


@pytest.mark.parametrize("field", ["next_sample", "dataset_size", "samples_per_step", "seed", "shuffle"])
def test_verify_a_state_without_a_field_or_with_another_value_is_refused(field: str) -> None:
    sampler = StepSampler(10, samples_per_step=4)
    state = sampler.state_dict()
    wrong = {**state, field: 3} if field != "shuffle" else {**state, field: False}
    with pytest.raises(PlanError, match=field):
        sampler.load_state_dict(wrong)
    del state[field]
    with pytest.raises(PlanError, match=field):
        sampler.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"data_ranks": 5}, "Nearest that work: 20, 25"),
        ({"micro_steps": 2}, "micro_steps that work: 3, 6, 12, 24"),
        ({"data_ranks": 2, "rank": 2}, "rank is one of 0..1"),
        ({"micro_steps": 0}, "micro_steps"),
        ({"seed": -1}, "seed"),
        ({"shuffle": 1}, "shuffle"),
    ],
)
def test_verify_layouts_without_whole_nodes_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanError, match=named):
        StepSampler(100, **{"samples_per_step": 24, **arguments})


def test_verify_token_balanced_micro_batches_are_refused_with_an_alternative() -> None:
    class ByTokens(BatchSampler):
        """As many samples as fit into 100 tokens."""

    loader = DataLoader(list(range(8)), batch_sampler=ByTokens(SequentialSampler(range(8)), 2, False))
    with pytest.raises(PlanError, match=r"(?s)ByTokens.*TokenBlocks"):
        require_loader(loader)
    with pytest.raises(PlanError, match="TokenBlocks"):
        require_loader([1, 2])
    sampler = StepSampler(8, samples_per_step=2)
    assert require_loader(DataLoader(list(range(8)), batch_sampler=sampler)) is sampler


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 7))
def test_verify_token_blocks_are_the_joined_documents(lengths: list[int], tokens: int) -> None:
    joined = torch.arange(sum(lengths))
    documents = list(torch.split(joined, lengths))
    if sum(lengths) < tokens:
        with pytest.raises(PlanError, match="not one sample"):
            TokenBlocks(documents, tokens)
        return
    blocks = TokenBlocks(documents, tokens)
    assert len(blocks) == sum(lengths) // tokens
    for j in range(len(blocks)):
        assert blocks[j].tolist() == joined[j * tokens : (j + 1) * tokens].tolist()
    with pytest.raises(IndexError):
        blocks[len(blocks)]
    with pytest.raises(PlanError, match="lengths"):
        TokenBlocks(documents, tokens, lengths=[1] * (len(lengths) + 1))
