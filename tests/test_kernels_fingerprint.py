"""The fingerprint kernel: the digests of csrc/fingerprint.cpp, in any strides and parts."""

from __future__ import annotations

import pytest
import torch
from interpreter import DEVICE, needs_triton

from tbik import _C, devices
from tbik.errors import PlanError
from tbik.integrity.fingerprint import KEY, SECOND_KEY
from tbik.integrity.fingerprint import fingerprint as digest_of

pytestmark = needs_triton


def fingerprint(x: torch.Tensor, first: int, index_strides: list[int], key: int = KEY) -> int:
    from tbik.kernels import fingerprint as kernel

    return kernel.fingerprint(x.to(DEVICE), first, index_strides, key)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    count = int(torch.Size(shape).numel())
    data = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    return data.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str)
def test_verify_digest_equals_cpu(dtype: torch.dtype) -> None:
    """Every element size, more than one block and program, both keys, a first index beyond 2^63."""
    x = random_bits((2, 1031), dtype)
    for first, key in ((0, KEY), (2**63 + 12345, SECOND_KEY)):
        assert fingerprint(x, first, [1031, 1], key) == _C.fingerprint(x, first, [1031, 1], key)
    swapped = x.clone()
    swapped[0, 0], swapped[0, 1] = x[0, 1], x[0, 0]
    assert fingerprint(swapped, 0, [1031, 1]) != fingerprint(x, 0, [1031, 1])


def test_verify_strides_and_parts() -> None:
    """Transposed, every second column, halves that add up, axes of one element, nothing."""
    x = random_bits((6, 5, 8), torch.bfloat16)
    whole = _C.fingerprint(x, 0, [40, 8, 1], KEY)
    assert fingerprint(x.transpose(0, 2), 0, [1, 8, 40]) == whole
    even, odd = x[:, :, ::2], x[:, :, 1::2]
    assert (fingerprint(even, 0, [40, 8, 2]) + fingerprint(odd, 1, [40, 8, 2])) % 2**64 == whole
    assert fingerprint(x[3:4, 2:3, 1:2], 137, [40, 8, 1]) == _C.fingerprint(x[3:4, 2:3, 1:2], 137, [40, 8, 1], KEY)
    assert fingerprint(x[:0], 0, [40, 8, 1]) == 0


def test_verify_offsets_beyond_2_31() -> None:
    """Rows lie 2^31 elements apart; only the touched pages exist."""
    x = torch.empty(2**31 + 64, dtype=torch.uint8, device=DEVICE).as_strided((2, 16), (2**31, 1))
    x.copy_(random_bits((2, 16), torch.uint8))
    assert fingerprint(x, 7, [2**33, 1]) == _C.fingerprint(x.cpu(), 7, [2**33, 1], KEY)


def test_verify_state_dicts_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": random_bits((3, 7), torch.bfloat16), "step": 3}
    expected = digest_of(state)
    if DEVICE == "cpu":
        monkeypatch.setattr(devices, "is_cuda", lambda t: True)
    assert digest_of({**state, "w": state["w"].to(DEVICE)}) == expected


def test_verify_refusals() -> None:
    with pytest.raises(PlanError, match="an odd key"):
        fingerprint(torch.zeros(2), 0, [1], 2)
    with pytest.raises(PlanError, match="expected real numbers"):
        fingerprint(torch.zeros(2, dtype=torch.complex64), 0, [1])
