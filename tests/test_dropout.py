"""tbik.ops.dropout: a mask by logical coordinates."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcases import DTYPES, PATHS, check_rows, compiled_equals_eager, run_with_flush, threads
from torch import Tensor

from tbik import _C, ops, reference
from tbik.errors import PlanError
from tbik.ops.dropout import name_key

# The authors' known answers for philox4x32, 10 rounds (Random123, tests/kat_vectors): counter, key, result.
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)
KEY = {"seed": 7, "step": 3, "name": "model.layers.0.mlp"}


def rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return wide_exponents(shape, dtype, seed, 14)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_verify_philox_known_answers(counter: str, key: str, words: str) -> None:
    numbers = [[int(word, 16) for word in text.split()] for text in (counter, key, words)]
    assert _C.philox(numbers[0], numbers[1]) == numbers[2]
    assert reference.philox(numbers[0], numbers[1]) == numbers[2]


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    length=st.integers(1, 20),
    p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40),
    first=st.tuples(st.integers(0, 2**31), st.integers(0, 2**31), st.integers(0, 2**33)),
    dtype=st.sampled_from(DTYPES),
    path=st.sampled_from(PATHS),
)
def test_verify_dropout_equals_reference(
    sizes: list[int],
    length: int,
    p: float,
    seed: int,
    step: int,
    first: tuple[int, int, int],
    dtype: torch.dtype,
    path: str,
) -> None:
    offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    x, key = rows((offsets[-1], length), dtype, step % 1000), name_key("a module")
    y = _C.dropout(x, p, seed, step, key, offsets, *first, path)
    assert_bitwise_equal(y, reference.dropout(x, p, seed, step, key, offsets, *first), path)


def test_verify_key_of_a_name() -> None:
    """63 bits of blake2b, little-endian; part of the order."""
    assert name_key("model.layers.0.mlp") == 0x7F1F906D190D1EF7
    assert name_key("a") != name_key("b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verify_mask_ignores_the_layout(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = rows((6, 33, 600), dtype, 1), rows((6, 33, 600), dtype, 2)

    def run(x: Tensor, dy: Tensor, **where: object) -> tuple[Tensor, Tensor]:
        leaf = x.detach().requires_grad_()
        y = ops.dropout(leaf, 0.3, **KEY, **where)  # type: ignore[arg-type]
        return y.detach(), torch.autograd.grad(y, leaf, dy)[0]

    whole = run(x, dy)
    kept = whole[0] != 0
    assert 0.68 < kept.float().mean() < 0.72
    assert_bitwise_equal(whole[1], torch.where(kept, run(dy, dy)[0], torch.zeros_like(dy)), "the same mask backward")
    for path in PATHS:
        monkeypatch.setenv("TBIK_CPU_PATH", path)
        for count in (1, 2):
            with threads(count):
                for got, expected in zip(run(x, dy), whole, strict=True):
                    assert_bitwise_equal(got, expected, f"{path}, {count} threads")
    for i in range(6):
        for got, expected in zip(run(x[i], dy[i], first_sample=i), whole, strict=True):
            assert_bitwise_equal(got, expected[i], f"sample {i} alone")
    offsets = [0, 33, 33 + 10, 33 + 33]  # samples 2, 3 and 4; the second is cut short
    packed, upstream = (torch.cat([t[2], t[3, :10], t[4, :23]]) for t in (x, dy))
    got = run(packed, upstream, sample_offsets=offsets, first_sample=2)
    for value, expected in zip(got, whole, strict=True):
        assert_bitwise_equal(value, torch.cat([expected[2], expected[3, :10], expected[4, :23]]), "packed")
    got = run(x[:, 9:20, 70:333].contiguous(), dy[:, 9:20, 70:333], first_position=9, first_feature=70)
    for value, expected in zip(got, whole, strict=True):
        assert_bitwise_equal(value, expected[:, 9:20, 70:333], "shards of positions and features")
    for change in ({"seed": 8}, {"step": 4}, {"name": "model.layers.1.mlp"}):
        assert_bits_differ(whole[0], ops.dropout(x, 0.3, **{**KEY, **change}), f"{change}")  # type: ignore[arg-type]


def test_verify_rows_in_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone = the row in a batch: each row is a sample, numbered by its first element here."""
    x = rows((128, 70), torch.bfloat16, 1)
    number = torch.arange(128.0)[:, None].bfloat16()

    def run(x: Tensor, number: Tensor) -> list[Tensor]:
        results = [ops.dropout(row[None], 0.4, **KEY, first_sample=int(n)) for row, n in zip(x, number)]  # type: ignore[arg-type]
        return [torch.cat(results)]

    check_rows(run, (x, number), monkeypatch)


def everything() -> Callable[[], list[Tensor]]:
    inputs = []
    for dtype in DTYPES:
        tiny = 2.0**-20 if dtype == torch.float16 else 2.0**-130
        inputs.append((rows((3, 300), dtype, 1).float() * tiny).to(dtype))
    return lambda: [_C.dropout(x, 0.2, 1, 2, 3, [0, 3], 0, 0, 0, path) for x in inputs for path in PATHS]


def test_verify_flush_mode_of_the_process() -> None:
    run_with_flush("test_dropout", "everything")


def test_validate_stock_depends_on_the_batch() -> None:
    """Negative control: torch's mask of a row depends on the rows before it."""
    x = torch.ones(8, 100)
    torch.manual_seed(0)
    whole = F.dropout(x, 0.5)
    torch.manual_seed(0)
    alone = F.dropout(x[4:], 0.5)
    assert_bits_differ(whole[4:], alone, "torch's dropout")


def test_verify_strides_beyond_32_bits() -> None:
    stride = 2**31 + 5
    size = 2 * (2 * stride + 16)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        memory = mmap.mmap(file.fileno(), size)
    far = torch.frombuffer(memory, dtype=torch.bfloat16, count=size // 2).as_strided((3, 8), (stride, 1))
    near = rows((3, 8), torch.bfloat16, 1)
    far.copy_(near)
    assert_bitwise_equal(ops.dropout(far, 0.5, **KEY), ops.dropout(near, 0.5, **KEY))  # type: ignore[arg-type]


def test_verify_opcheck_and_compile() -> None:
    x = torch.randn(2, 3, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.tbik.dropout.default, (x, 0.5, 1, 2, 3, None, 0, 0, 0))
    compiled_equals_eager(
        lambda x: (ops.dropout(x, 0.5, **KEY),),  # type: ignore[arg-type]
        [rows((2, 3, 8), torch.bfloat16, 1).requires_grad_()],
    )


def test_verify_bad_calls_are_refused() -> None:
    x = torch.ones(3, 8)
    for match, call in {
        r"p is a number within \[0, 1\]": lambda: ops.dropout(x, 1.5, **KEY),  # type: ignore[arg-type]
        "a non-empty string": lambda: ops.dropout(x, 0.5, seed=1, step=1, name=""),
        "seed is an integer": lambda: ops.dropout(x, 0.5, seed=-1, step=1, name="a"),
        "UTF-8": lambda: ops.dropout(x, 0.5, seed=1, step=1, name="\ud800"),
        r"first_sample is an integer within \[0, 2\^32\)": lambda: ops.dropout(x, 0.5, **KEY, first_sample=2**63 - 1),  # type: ignore[arg-type]
        r"first_position is an integer within \[0, 2\^32\)": lambda: ops.dropout(x, 0.5, **KEY, first_position=2**32),  # type: ignore[arg-type]
        r"first_feature is an integer within \[0, 2\^34\)": lambda: ops.dropout(x, 0.5, **KEY, first_feature=2**63 - 4),  # type: ignore[arg-type]
        "step is an integer": lambda: ops.dropout(x, 0.5, seed=1, step=2**63, name="a"),
    }.items():
        with pytest.raises(PlanError, match=match):
            call()
    for first in ({"first_sample": 2**32}, {"first_position": 2**32 - 2}, {"first_feature": 2**34 - 7}):
        with pytest.raises(ValueError, match="below 2|within"):
            ops.dropout(x, 0.5, **KEY, **first)  # type: ignore[arg-type]
    for first in ("first_sample", "first_position", "first_feature"):
        offsets = [2**63 - 1 if first == name else 0 for name in ("first_sample", "first_position", "first_feature")]
        with pytest.raises(ValueError, match="below 2"):  # the sum of two large integers does not wrap around
            torch.ops.tbik.dropout(x, 0.5, 1, 1, 1, None, *offsets)
    # the last coordinates that a counter holds
    last = {"first_sample": 2**32 - 1, "first_position": 2**32 - 3, "first_feature": 2**34 - 8}
    assert ops.dropout(x, 0.5, **KEY, **last).shape == x.shape  # type: ignore[arg-type]
