"""What the parts of bench/gpu.py share: where they run, operands, comparison of bits, timing.

Time of one call = median by CUDA events (triton.testing.do_bench, which clears the L2 cache between calls). Times that
are compared are taken in turns, A B A B, and each is the median of its turns, so that a clock that drifts meets both.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LARGE = ((1024, 6144, 2048), (2048, 4096, 4096), (2048, 25600, 5120), (8192, 8192, 8192))  # M, K, N
FEW_ROWS = tuple((m, 4096, 4096) for m in (1, 8, 16, 64))
TINY = ((17, 32, 18), (1, 32, 18))
LEAVES = 8
TURNS = 5


class Setting:
    """Where the parts run, and with which sizes."""

    def __init__(self, is_dry: bool) -> None:
        import torch

        self.is_dry = is_dry
        if is_dry:
            use_tests()
            import interpreter  # noqa: F401  (mends triton 3.6's)
        self.device = "cpu" if is_dry else "cuda"
        self.shapes = TINY if is_dry else (*LARGE, *FEW_ROWS)
        self.leaves = 2 if is_dry else LEAVES
        if is_dry:
            self.architecture = "sm_90"
        else:
            major, minor = torch.cuda.get_device_capability()
            self.architecture = f"sm_{major}{minor}"
        self.leaf = f"mma:{self.architecture}"

    def tile(self) -> Any:
        """None: the table's. In the interpreter a small one, which has the same leaves."""
        from tbik.kernels.tiles import Tile

        return Tile(16, 16, 16, 4, 1, 1) if self.is_dry else None

    def operands(self, m: int, k: int, n: int) -> tuple[Any, Any]:
        import torch

        generator = torch.Generator().manual_seed(m + k + n)
        return tuple(torch.randn(shape, generator=generator).bfloat16().to(self.device) for shape in ((m, k), (n, k)))

    def time_ms(self, work: Callable[[], Any]) -> float:
        if self.is_dry:
            start = time.perf_counter()
            work()
            return (time.perf_counter() - start) * 1e3
        import triton

        return float(triton.testing.do_bench(work, return_mode="median"))

    def times_ms(self, works: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Per name the median over turns; in a turn each has its own median, one after the other."""
        turns = [{name: self.time_ms(work) for name, work in works.items()} for _ in range(1 if self.is_dry else TURNS)]
        return {name: statistics.median(turn[name] for turn in turns) for name in works}


class PartFailed(AssertionError):
    """Some checks of a part failed; `rows` are all of them, the equal ones too."""

    def __init__(self, message: str, rows: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.rows = rows


def matmul(setting: Setting, x: Any, w: Any, **options: Any) -> Any:
    """The tree matmul of x [M, K] and w [N, K] by the kernel, leaves of the table's tile."""
    import torch

    from tbik import TreePlan
    from tbik.kernels import matmul as kernel

    plan = TreePlan(leaves=setting.leaves)
    options = {"leaf": setting.leaf, "out_dtype": torch.bfloat16, "tile": setting.tile(), **options}
    return kernel.contract([x], [w], [plan.cuts(x.shape[1])], root_schedule(setting.leaves), **options)


schedules: dict[int, Any] = {}  # one object per schedule: tables are kept by it


def root_schedule(leaves: int) -> Any:
    from tbik import _C

    return schedules.setdefault(leaves, _C.run_schedule(0, leaves, leaves, True, False))


def require_equal(what: str, actual: Any, expected: Any) -> None:
    """Errors: AssertionError with the number of elements whose bits differ."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{what}: {actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"
        )
    differing = int((actual.cpu().contiguous().view(bits) != expected.cpu().contiguous().view(bits)).sum())
    if differing:
        raise AssertionError(f"{what}: {differing} of {actual.numel()} elements differ in bits")


def in_graph(work: Callable[[], Any]) -> Any:
    """What `work` returns when it is replayed from a CUDA graph."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # compiles, and puts the tables on the device
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    graph.replay()
    torch.cuda.synchronize()
    return out


def randn(setting: Setting, *shape: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
    import torch

    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    return x.to(getattr(torch, dtype)).to(setting.device)


def beside(
    setting: Setting, name: str, shape: list[int], ours: Callable[[], Any], torchs: Callable[[], Any], moved: int
) -> dict[str, Any]:
    """One row: both times, taken in turns, GB/s of the bytes that must move."""
    times = setting.times_ms({"ms": ours, "torch_ms": torchs})
    row: dict[str, Any] = {"operator": name, "shape": shape, **times}
    return {**row, "speed_of_torch": row["torch_ms"] / row["ms"], "GB_per_s": moved / row["ms"] / 1e6}


def use_tests() -> None:
    """Lets the parts import the helpers of tests/ (data, comparison, the interpreter's fma)."""
    folder = str(ROOT / "tests")
    if folder not in sys.path:
        sys.path.append(folder)


def finish(rows: Iterable[dict[str, Any]], key: str = "result") -> list[dict[str, Any]]:
    """The rows. Errors: PartFailed, with all rows, where one's result begins with "FAILED"."""
    rows = list(rows)
    failed = [row for row in rows if str(row.get(key, "")).startswith("FAILED")]
    if failed:
        named = {k: v for k, v in failed[0].items() if k != key}
        raise PartFailed(f"{len(failed)} of {len(rows)} checks failed, first {named}: {failed[0][key]}", rows)
    return rows
