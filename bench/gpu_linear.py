"""The part "linear" of bench/gpu.py: the tree matmul beside cuBLAS and a batch-invariant matmul without a tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_setting import Setting, in_graph, matmul, randn, require_equal, root_schedule


def check_persistent(setting: Setting, m: int, k: int, n: int) -> None:
    """The matmul to compare with is right, and batch-invariant: else its time would say nothing.

    |y - exact| <= one rounding of y + 2^-16 of the sum of magnitudes, exact in fp64. Errors: AssertionError.
    """
    x, w = setting.operands(m, k, n)
    y = persistent(setting, x, w)
    rows = slice(0, 64)
    exact = x[rows].double() @ w.double().t()
    rounding = 2.0 ** (-7 if setting.is_dry else -8)  # the interpreter's cast to bfloat16 truncates
    bound = exact.abs() * rounding + (x[rows].double().abs() @ w.double().abs().t()) * 2.0**-16
    wrong = int(((y[rows].double() - exact).abs() > bound).sum())
    if wrong or not bool(torch.isfinite(y.float()).all()):
        raise AssertionError(f"persistent matmul at {m}x{k}x{n}: {wrong} elements too far from the exact product")
    if not setting.is_dry:  # the interpreter's dot has no fixed order
        require_equal(f"persistent matmul, row alone at {m}x{k}x{n}", persistent(setting, x[-1:], w), y[-1:])
        require_equal(f"persistent matmul, graph at {m}x{k}x{n}", in_graph(partial(persistent, setting, x, w)), y)


def persistent(setting: Setting, x: Any, w: Any) -> Any:
    from gpu_persistent_matmul import Tile, persistent_matmul

    return persistent_matmul(x, w, setting.architecture, Tile(16, 16, 16, 4, 1) if setting.is_dry else None)


def part_linear(setting: Setting) -> list[dict[str, Any]]:
    """Times, by turns: the tree matmul and its forms, cuBLAS (torch.mm), the persistent matmul; dX, dW, leaf fma.

    It proves nothing about bits but that the persistent matmul, written for this comparison, is right and
    batch-invariant. speed_of_torch = torch's time / ours; speed_of_persistent likewise: what the tree costs.
    """
    from tbik.kernels.tiles import MMA_TILES

    rows = []
    for shape in setting.shapes:
        check_persistent(setting, *shape)
        x, w = setting.operands(*shape)
        works: dict[str, Callable[[], Any]] = {
            "tree_ms": partial(matmul, setting, x, w),
            "torch_ms": partial(torch.mm, x, w.t()),
            "persistent_ms": partial(persistent, setting, x, w),
        }
        if setting.architecture in ("sm_90", "sm_100"):
            works["described_ms"] = partial(matmul, setting, x, w, form="described")
        for levels in (1,) if setting.is_dry else (0, 1, 2):  # the candidates of the register question, measured
            tile = (setting.tile() or MMA_TILES[setting.architecture].whole)._replace(register_levels=levels)
            works[f"whole_{levels}_levels_ms"] = partial(matmul, setting, x, w, form="whole", tile=tile)
        rows.append(compared(setting, "y", shape, works))
    return rows + gradients(setting) + [fma(setting)]


def gradients(setting: Setting) -> list[dict[str, Any]]:
    """dX = dY W, dX of three members in one chain, dW = dY^T x by samples of two blocks; beside torch.mm of each."""
    from tbik import _C, TreePlan
    from tbik.kernels import matmul as kernel

    tokens, k, n = (17, 12, 16) if setting.is_dry else (2048, 4096, 4096)
    plan = TreePlan(leaves=setting.leaves)
    bf16 = torch.bfloat16
    options: dict[str, Any] = {"leaf": setting.leaf, "tile": setting.tile(), "b_k_major": True}
    lengths = (n, n // 4, n // 4)  # q, k, v of grouped-query attention
    dys = [randn(setting, tokens, length, seed=i) for i, length in enumerate(lengths)]
    ws = [randn(setting, length, k, seed=i) for i, length in enumerate(lengths)]
    joined = torch.cat(dys, 1), torch.cat(ws, 0)  # torch's: one merged weight
    x = randn(setting, tokens, k, seed=9)
    step = 6 if setting.is_dry else 512
    cuts = [*range(0, tokens, step), tokens]
    blocks = len(cuts) - 1
    samples = _C.sample_schedule([2] * (blocks // 2) + [1] * (blocks % 2), False)

    def dx(members: int) -> Any:
        spans = [plan.cuts(length) for length in lengths[:members]]
        schedule = root_schedule(setting.leaves)
        return kernel.contract(dys[:members], ws[:members], spans, schedule, out_dtype=bf16, **options)

    def dw() -> Any:
        return kernel.contract([dys[0]], [x], [cuts], samples, a_k_major=True, out_dtype=torch.float32, **options)

    works = {
        "dX": (partial(dx, 1), partial(torch.mm, dys[0], ws[0]), (tokens, n, k)),
        "dX of a group of 3": (partial(dx, 3), partial(torch.mm, *joined), (tokens, sum(lengths), k)),
        "dW, samples of 2 blocks": (dw, partial(torch.mm, dys[0].t(), x), (n, tokens, k)),
    }
    rows = []
    for name, (ours, torchs, shape) in works.items():
        actual, expected = ours().float(), torchs().float()
        far = float((actual - expected).abs().max() / expected.abs().max())
        if not far < 2.0**-6:  # two bf16 roundings of numbers of that size; bits are the part "operators"
            raise AssertionError(f"{name}: {far:.3g} of the largest element away from torch's")
        rows.append(compared(setting, name, shape, {"tree_ms": ours, "torch_ms": torchs}))
    return rows


def fma(setting: Setting) -> dict[str, Any]:
    """Leaf "fma" needs no tensor cores, so that CPU and GPU agree: a proof, not a fast path. bf16 beside cuBLAS."""
    shape = (3, 12, 5) if setting.is_dry else (256, 1024, 1024)
    x, w = setting.operands(*shape)
    works: dict[str, Callable[[], Any]] = {
        "tree_ms": partial(matmul, setting, x, w, leaf="fma"),
        "torch_ms": partial(torch.mm, x, w.t()),
    }
    return compared(setting, "y by leaf fma", shape, works)


def compared(
    setting: Setting, name: str, shape: tuple[int, ...], works: dict[str, Callable[[], Any]]
) -> dict[str, Any]:
    m, k, n = shape
    times = setting.times_ms(works)
    row: dict[str, Any] = {"operator": name, "shape": list(shape)}
    row["tree_TFLOPS"] = 2e-9 * m * n * k / times["tree_ms"]
    row["speed_of_torch"] = times["torch_ms"] / times["tree_ms"]
    if "persistent_ms" in times:
        row["speed_of_persistent"] = times["persistent_ms"] / times["tree_ms"]
    return row | times
