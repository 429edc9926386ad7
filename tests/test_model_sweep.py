"""A part of tests/model_sweep.py: TP 3 (uneven), three layouts per family; the whole is bench/results/models_sweep."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from long_cases import long_cases
from spawn import Pool

pytest.importorskip("transformers")

from model_sweep import FAMILIES, SAMPLES, Layout, layouts, sweep

pytestmark = pytest.mark.multiprocess
CHOSEN = [Layout(1, "left", True), Layout(2, "right", False), Layout(SAMPLES, "packed", True)]


CASES = [(family, "bfloat16" if index % 2 else "float32") for index, family in enumerate(FAMILIES)]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(3, timeout=120.0) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("family", "dtype"),
    [CASES[1], *long_cases(CASES[:1] + CASES[2:])],
)
def test_verify_every_layout_has_the_bits_of_samples_alone(pool: Pool, family: str, dtype: str) -> None:
    reference, *configurations = sweep(pool, family, dtype, [3], lambda tp: CHOSEN)
    assert len(configurations) == len(CHOSEN) and reference["control"] > 0
    assert all(record["equal"] for record in configurations), [record["wrong"] for record in configurations]


@pytest.mark.parametrize("family", [*long_cases(["qwen2", "qwen3-moe"])])
def test_verify_every_layout_under_leaf_amx(pool: Pool, family: str) -> None:
    """Logits, loss and gradients in the order of AMX (ORDER.md A14): other bits, as independent of the layout."""
    reference, *configurations = sweep(pool, family, "bfloat16", [3], lambda tp: CHOSEN, "amx")
    assert all(record["equal"] for record in configurations), [record["wrong"] for record in configurations]
    (plain, *_) = sweep(pool, family, "bfloat16", [], lambda tp: CHOSEN)
    assert reference["reference"]["logits"] != plain["reference"]["logits"]


def test_verify_the_sweep_is_complete() -> None:
    """Every split, form and checkpointing once."""
    assert len(set(layouts(1))) == len(set(layouts(8, every=True))) == 18
    some = layouts(3)
    assert len(set(some)) == 6 and {layout.micro_steps for layout in some} == {1, 2, 8}
    assert {layout.form for layout in some} == {"packed", "left", "right"}
