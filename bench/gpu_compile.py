"""What the compilers make of every Triton kernel, without a GPU: registers, spills, shared memory, instructions.

    python bench/gpu_compile.py                                     # sm_80, sm_90, sm_100; bench/results/gpu_compile.*
    python bench/gpu_compile.py --architectures sm_90 --cases matmul     # these rows anew, the others stay

The host code of each kernel runs on small CPU tensors with a driver that compiles for an architecture and launches
nothing, so what is compiled is what would be launched. Checked of every kernel, exit status 1 otherwise:
PTX: no atomics, no tf32, no approximate arithmetic, no flushing, no fused multiply-add that the source did not ask for
(fma.rn count = the count of fma in Triton's own IR), and the tensor-core instruction that the plan's leaf names.
Triton IR: every address is a pointer plus 64-bit offsets. Shared memory: no more than a block can have.
Registers and spills are ptxas's; a spill is reported, not refused. Nothing here is a measurement of speed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "gpu_compile"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
MMA = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
MATMULS = ("whole_kernel", "split_kernel", "forward_kernel", "dq_kernel", "dkv_kernel")
# of a block at most, with opt-in (CUDA programming guide, compute capabilities)
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
FORBIDDEN = {
    "atomics": r"\b(atom|red)\.(?!async)",
    "tf32": r"\.tf32",
    "approximations": r"\b(div\.full|\w+\.approx)",
    "flushing": r"\.ftz\b",
}


HEAD = """# What compiles, without a GPU

`python bench/gpu_compile.py`, triton {version}. Registers and spilled bytes are per thread (ptxas). Every row has
passed the checks of that file; `--stale` names rows of older kernels. No figure here is a measurement of speed.

"""


class Capture:
    """Compiles what is launched for one architecture, keeps it, launches nothing."""

    def __init__(self, architecture: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
        self.kernels: list[tuple[Any, Any]] = []

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # a device per architecture: triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def run(self, work: Callable[[], Any]) -> list[tuple[Any, Any]]:
        from triton.runtime import JITFunction, driver

        plain_run = JITFunction.run

        def compile_only(function: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = plain_run(function, *args, warmup=True, **kwargs)
            if all(kernel is not other for _, other in self.kernels):  # launched once more: one row
                self.kernels.append((function, kernel))
            return kernel

        self.kernels = []
        JITFunction.run = compile_only
        driver.set_active(self)
        try:
            work()
        finally:
            JITFunction.run = plain_run
        return self.kernels


def matmul_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik import _C, TreePlan
    from tbik.kernels import matmul

    def product(m: int, n: int, k: int, dtype: Any, leaf: str, leaves: int = 8, **options: Any) -> Any:
        plan = TreePlan(leaves=leaves)
        members, is_dx = options.pop("members", 1), options.pop("is_dx", False)
        a = [torch.empty(m, k, dtype=dtype) for _ in range(members)]
        b = [torch.empty(k, n, dtype=dtype) if is_dx else torch.empty(n, k, dtype=dtype) for _ in range(members)]
        schedule = options.pop("schedule", _C.run_schedule(0, leaves, leaves, True, False))
        cuts = [plan.cuts(k)] * members
        return matmul.contract(a, b, cuts, schedule, leaf=leaf, out_dtype=dtype, b_k_major=is_dx, **options)

    def gradient(tokens: int, n: int, k: int, dtype: Any, leaf: str) -> Any:
        dy, x = torch.empty(tokens, n, dtype=dtype), torch.empty(tokens, k, dtype=dtype)
        blocks = tokens // 512
        schedule = _C.sample_schedule([2] * (blocks // 2), False)
        cuts = [range(0, tokens + 1, 512)]
        options: Any = {"a_k_major": True, "b_k_major": True, "out_dtype": torch.float32, "form": "whole"}
        return matmul.contract([dy], [x], cuts, schedule, leaf=leaf, **options)

    mma = f"mma:{architecture}"
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    yield "prefill bf16", lambda: product(256, 256, 1024, bf16, mma, form="whole")
    if architecture != "sm_80":
        yield "prefill bf16, descriptors", lambda: product(256, 256, 1024, bf16, mma, form="described")
    yield "prefill fp16", lambda: product(256, 256, 1024, fp16, mma, form="whole")
    yield "prefill bf16, 12 leaves of 48", lambda: product(256, 256, 576, bf16, mma, 12, form="whole")
    yield "prefill bf16, leaves of 125", lambda: product(256, 256, 1000, bf16, mma, form="whole")
    yield "decode bf16", lambda: product(16, 256, 1024, bf16, mma, form="split")
    yield "decode bf16, leaves of 125", lambda: product(16, 256, 1000, bf16, mma, form="split")
    yield "dX bf16", lambda: product(256, 256, 1024, bf16, mma, is_dx=True, form="whole")
    yield "dX of a group of 3 bf16", lambda: product(256, 256, 1024, bf16, mma, members=3, is_dx=True, form="whole")
    yield "dW bf16", lambda: gradient(2048, 256, 256, bf16, mma)
    yield "fma of bf16", lambda: product(64, 64, 128, bf16, "fma", form="whole")
    yield "fma of fp32", lambda: product(64, 64, 128, fp32, "fma", form="whole")
    yield "fma of fp64", lambda: product(64, 64, 128, torch.float64, "fma", form="whole")


def combine_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik import _C
    from tbik.kernels import combine

    def fold(leaves: int, narrow: bool, **options: Any) -> Any:
        x = torch.empty(leaves, 64, 64)
        return combine.combine(x, _C.run_schedule(0, leaves, leaves, True, narrow), **options)

    yield "8 leaves to bf16", lambda: fold(8, False, out_dtype=torch.bfloat16)
    yield "8 leaves, bf16 wire, bias", lambda: fold(8, True, out_dtype=torch.bfloat16, bias=torch.empty(64))
    yield "64 leaves to fp32", lambda: fold(64, False)
    yield "100 leaves by table", lambda: fold(100, True)


def row_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik.kernels import activation, embedding, norm, philox, rope

    bf16 = torch.bfloat16
    x, w = torch.empty(64, 4096, dtype=bf16), torch.empty(4096)
    statistics = torch.empty(2, 64)
    yield "add and rms norm, 4096", lambda: norm.norm(x, x, w, None, 1e-6, False, False, bf16)
    yield "rms norm dX, 4096", lambda: norm.norm_dx(x, x, w, 1e-6, False, False, x, bf16, bf16, statistics)
    yield "layer norm, 4096", lambda: norm.norm(x, None, w, w, 1e-6, True, False, bf16)
    yield "chains of dw, 4096", lambda: norm.column_leaves(x, x, statistics, 1, [0, 64])
    heads, table = torch.empty(16, 32, 128, dtype=bf16), torch.empty(16, 64)
    yield "rope, 128", lambda: rope.rope(heads, table, table, False, False)
    yield "rope tables", lambda: rope.rope_tables(torch.empty(64, dtype=torch.int64), torch.empty(64), 1.0)
    packed, y = torch.empty(64, 22016, dtype=bf16), torch.empty(64, 11008, dtype=bf16)
    halves = packed[:, :11008], packed[:, 11008:]
    yield "silu and mul of a packed row", lambda: activation.activation(*halves, "silu", y)
    yield "gradient of silu and mul", lambda: activation.activation_dx(y, *halves, "silu", *halves)
    yield "gelu", lambda: activation.activation(y, None, "gelu_tanh", y)
    yield "soft-cap", lambda: activation.softcap(y, 30.0)
    yield "gradient of soft-cap", lambda: activation.softcap(y, 30.0, y)
    yield "dropout", lambda: philox.dropout(y, 0.1, (1, 2), [0, 64], 0, 0, 0)
    ids = torch.zeros(16, dtype=torch.int64)
    yield "embedding", lambda: embedding.look_up(ids, x, 0, 64, bf16)
    yield "chains of an embedding's gradient", lambda: norm.chains_of_tokens(x, ids, ids[:3])


def expert_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik.kernels import experts

    rows, values = torch.zeros(64, 8, dtype=torch.int64), torch.empty(8, 512, 4096)
    yield "weighted chains over slots", lambda: experts.combine_slots(values, rows, torch.empty(64, 8))
    yield "chains over slots", lambda: experts.combine_slots(values, rows, None)
    x = torch.empty(64, 4096, dtype=torch.bfloat16)
    yield "products", lambda: experts.multiply(x, torch.empty(64, 4096), torch.float32)
    yield "products by rows", lambda: experts.multiply(x, torch.empty(64), torch.bfloat16)


def vocab_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik import TreePlan
    from tbik.kernels import vocab

    x = torch.empty(16, 128256, dtype=torch.bfloat16)
    cuts, one = TreePlan(leaves=8).cuts(128256), torch.empty(16)
    targets = torch.empty(16, dtype=torch.int64)
    yield "maximum", lambda: vocab.row_max(x)
    yield "sums of exp by leaves", lambda: vocab.leaf_sums("exp", x, cuts, m=one)
    yield "sums of exp, one leaf", lambda: vocab.leaf_sums("exp", x, [0, 128256], m=one)
    yield "sums of p*dp by leaves", lambda: vocab.leaf_sums("dots", x, cuts, m=one, s=one, dp=x)
    yield "softmax", lambda: vocab.map_rows("softmax", x, x, one, one)
    yield "softmax dx", lambda: vocab.map_rows("softmax_dx", x, x, one, one, one, dy=x)
    yield "log-softmax", lambda: vocab.map_rows("log_softmax", x, x, one)
    yield "log-softmax dx", lambda: vocab.map_rows("log_softmax_dx", x, x, one, one, dy=x)
    yield "cross-entropy dx", lambda: vocab.map_rows("cross_entropy_dx", x, x, one, one, targets=targets)
    yield "log-sum-exp", lambda: vocab.finish_log_sum_exp(one, one)
    yield "losses", lambda: vocab.losses(one, one, targets, -100)
    yield "pick", lambda: vocab.pick(x, targets[:, None], 0)


def fingerprint_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik.kernels import fingerprint

    key = 0x9E3779B97F4A7C15
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.zeros(64, 4096, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        yield f"{name}, contiguous", lambda x=x: fingerprint.fingerprint(x, 0, [4096, 1], key)
        yield f"{name}, strided", lambda x=x: fingerprint.fingerprint(x.t(), 0, [1, 4096], key)


def attention_cases(architecture: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    from tbik import _C
    from tbik.kernels import attention

    mma = f"mma:{architecture}"
    starts = torch.zeros(3, dtype=torch.int32)
    offsets = list(range(0, 33, 4))
    programs = [_C.run_schedule(0, 4, 4, True, False)] * 8
    plain = attention.Pairs(0.09, 0.0, True, 0)
    masked = attention.Pairs(0.09, 30.0, True, 4096)
    dropout = attention.Dropout(torch.zeros(5, dtype=torch.int64), 1.25)

    def packed(dim: int, leaf: str, pairs: Any, dtype: Any = torch.bfloat16, **options: Any) -> Any:
        q, k = torch.empty(64, 32, dim, dtype=dtype), torch.empty(64, 8, dim, dtype=dtype)
        return attention.forward(q, k, k, starts, starts, None, None, offsets, pairs, leaf=leaf, **options)

    def paged(dim: int, leaf: str) -> Any:
        q, cache = torch.empty(4, 32, dim, dtype=torch.bfloat16), torch.empty(9, 16, 8, dim, dtype=torch.bfloat16)
        table = torch.zeros(2, 8, dtype=torch.int32)
        return attention.forward(
            q, cache, cache, starts, starts[:2], table, None, offsets, plain, leaf=leaf, with_state=False
        )

    def gradients(dim: int, leaf: str, pairs: Any, dtype: Any = torch.bfloat16, **options: Any) -> Any:
        q, k = torch.empty(64, 32, dim, dtype=dtype), torch.empty(64, 8, dim, dtype=dtype)
        row = torch.empty(64, 32)
        state = attention.State(q, row, row, q if dtype != torch.float32 else q[:0])
        return attention.backward(
            q, q, k, k, state, starts, starts, None, offsets, programs, pairs, leaf=leaf, **options
        )

    yield "mma, packed, 128", lambda: packed(128, mma, plain, with_rest=True)
    yield "mma, packed, 64, window, soft-cap, dropout", lambda: packed(64, mma, masked, dropout=dropout)
    yield "mma, packed, 64", lambda: packed(64, mma, plain, with_rest=True)
    yield "mma, packed, 256", lambda: packed(256, mma, plain)
    yield "mma, packed, 256, window, soft-cap", lambda: packed(256, mma, masked)
    yield "mma, paged, 64", lambda: paged(64, mma)
    yield "mma, paged, 128", lambda: paged(128, mma)
    yield "mma, paged, 256", lambda: paged(256, mma)
    yield "mma, backward, 64", lambda: gradients(64, mma, plain)
    yield "mma, backward, 128", lambda: gradients(128, mma, plain)
    yield "mma, backward, 256", lambda: gradients(256, mma, plain)
    yield "mma, backward, 64, window, soft-cap, dropout", lambda: gradients(64, mma, masked, dropout=dropout)
    yield "fma of bf16, packed, 128", lambda: packed(128, "fma", plain, with_rest=True)
    yield "fma of bf16, paged, 128", lambda: paged(128, "fma")
    yield "fma of fp32, backward, 128", lambda: gradients(128, "fma", plain, torch.float32)
    caches = torch.empty(9, 16, 8, 128, dtype=torch.bfloat16)
    yield (
        "store keys",
        lambda: attention.store_kv(caches[0], caches[0], caches, caches, torch.zeros(16, dtype=torch.int64)),
    )


CASES: dict[str, Callable[[str], Iterator[tuple[str, Callable[[], Any]]]]] = {
    "matmul": matmul_cases,
    "combine": combine_cases,
    "rows": row_cases,
    "experts": expert_cases,
    "vocabulary": vocab_cases,
    "fingerprint": fingerprint_cases,
    "attention": attention_cases,
}


def report(architecture: str, operator: str, case: str, kernel_name: str, kernel: Any) -> dict[str, Any]:
    """One row: what ptxas says, and which checks failed."""
    ptx, ttir = kernel.asm["ptx"], kernel.asm["ttir"]
    # fma calls of the source, as LLVM vectors of the elements that a thread holds
    calls = re.findall(r"call .*@llvm\.fma\.(?:v(\d+))?f", kernel.asm["llir"])
    asked = sum(int(lanes or 1) for lanes in calls)
    found = len(re.findall(r"\bfma\.rn", ptx)) + len(re.findall(r"\bfma\.rn\.f32x2", ptx))  # x2: two in one
    failures = [
        f"{name}: {next(line.strip() for line in ptx.splitlines() if re.search(pattern, line))}"
        for name, pattern in FORBIDDEN.items()
        if re.search(pattern, ptx)
    ]
    if found != asked:
        failures.append(f"fused multiply-adds: {found} in PTX, {asked} asked for")
    instructions = sorted(set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*", ptx)))
    expected = {MMA[architecture]} if kernel_name in MATMULS and "fma" not in case else set()
    if {name.split(".sync")[0].split(".cta")[0] for name in instructions} != {e.split(".sync")[0] for e in expected}:
        failures.append(f"expected tensor-core instructions {sorted(expected)}")
    if kernel.metadata.shared > SHARED_BYTES[architecture]:
        failures.append(f"{kernel.metadata.shared} bytes of shared memory, there are {SHARED_BYTES[architecture]}")
    narrow = narrow_offsets(ttir)
    if narrow:
        failures.append(f"{len(narrow)} addresses with 32-bit offsets, first: {narrow[0]}")
    row = {
        "architecture": architecture,
        "operator": operator,
        "case": case,
        "kernel": kernel_name,
        **resources(ptx),
        "shared_bytes": kernel.metadata.shared,
        "num_warps": kernel.metadata.num_warps,
        "fma": found,
        "instructions": instructions,
        "failures": failures,
    }
    return row


def narrow_offsets(ttir: str) -> list[str]:
    """Lines of Triton IR that add a 32-bit offset to a pointer; constants of the source (a table's next entry) are no
    product of sizes."""
    added = [line.strip() for line in ttir.splitlines() if "tt.addptr" in line]
    return [
        line for line in added if re.search(r", (tensor<.*x)?i32", line) and not re.search(r", %c\d+_i32\S* :", line)
    ]


def resources(ptx: str) -> dict[str, int]:
    """Registers and spilled bytes per thread, by the ptxas that triton brings."""
    import triton

    found = re.search(r"\.target (sm_\w+)", ptx)
    assert found
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    blackwell = folder / "ptxas-blackwell"
    ptxas = blackwell if found[1].startswith("sm_1") and blackwell.exists() else folder / "ptxas"
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(ptxas), "-v", "--fmad=false", f"--gpu-name={found[1]}", str(source), "-o", f"{scratch}/cubin"]
        log = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
    used, spilled = re.search(r"Used (\d+) registers", log), re.search(r"(\d+) bytes spill stores", log)
    assert used and spilled, log
    return {"registers": int(used[1]), "spilled_bytes": int(spilled[1])}


def save(output: str, done: list[dict[str, Any]], parts: Sequence[str]) -> int:
    """Write the table: what was not compiled this time keeps its rows, so that it can be made in parts, also by a run
    that is ended. parts: the columns that name what `done` replaces. Returns the number of rows."""
    import triton

    names = {tuple(row[part] for part in parts) for row in done}
    before = Path(output + ".json")
    kept = json.loads(before.read_text())["rows"] if before.exists() else []
    rows = done + [row for row in kept if tuple(row[part] for part in parts) not in names]
    rows.sort(key=lambda row: (ARCHITECTURES.index(row["architecture"]), list(CASES).index(row["operator"])))
    before.write_text(json.dumps({"triton": triton.__version__, "rows": rows}, indent=1) + "\n")
    Path(output + ".md").write_text(HEAD.format(version=triton.__version__) + as_table(rows) + "\n")
    return len(rows)


def source_of(module_name: str) -> str:
    """Digest of a module of tbik.kernels and of those that it names, and so on: a row with another one is of an older
    kernel (or of a comment of it)."""
    names, waiting = set(), [module_name]
    while waiting:
        name = waiting.pop()
        if name not in names:
            names.add(name)
            found = vars(importlib.import_module(name)).values()
            named = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in found}
            waiting += [other for other in named if isinstance(other, str) and other.startswith("tbik.kernels.")]
    digest = hashlib.blake2b(digest_size=6)
    for name in sorted(names):
        digest.update((ROOT / (name.replace(".", "/") + ".py")).read_bytes())
    return digest.hexdigest()


def stale(rows: list[dict[str, Any]]) -> list[str]:
    """The kernels with rows of other sources than the present ones. Compiles nothing."""
    return sorted(
        {
            f"{row['architecture']} {row['operator']} {row['kernel']}"
            for row in rows
            if row.get("source") != source_of(row.get("module", "tbik.kernels.matmul"))
        }
    )


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| architecture | operator | case | kernel | warps | registers | spilled bytes | shared bytes | instruction |",
        "|---|---|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        columns = (
            "architecture",
            "operator",
            "case",
            "kernel",
            "num_warps",
            "registers",
            "spilled_bytes",
            "shared_bytes",
        )
        instruction = ", ".join(f"`{name}`" for name in row["instructions"]) or "-"
        lines.append("| " + " | ".join(str(row[column]) for column in columns) + f" | {instruction} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architectures", default=",".join(ARCHITECTURES))
    parser.add_argument("--cases", default=",".join(CASES), help="operators, comma-separated")
    parser.add_argument("--match", default="", help="only the cases that this regular expression finds")
    parser.add_argument("--output", default=str(RESULTS), help="path without suffix for .json and .md; empty: none")
    parser.add_argument("--stale", action="store_true", help="only name the kernels with rows of older sources")
    args = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)
    if args.stale:
        old = stale(json.loads(Path(args.output + ".json").read_text())["rows"])
        print("\n".join(old) or "all rows are of the present sources")
        return 1 if old else 0
    rows: list[dict[str, Any]] = []
    for architecture in args.architectures.split(","):
        capture = Capture(architecture)
        for operator in args.cases.split(","):
            for case, work in CASES[operator](architecture):
                if not re.search(args.match, case):
                    continue
                for function, kernel in capture.run(work):
                    module = function.fn.__module__
                    origin = {"module": module, "source": source_of(module)}
                    rows.append(report(architecture, operator, case, function.__name__, kernel) | origin)
                    print(json.dumps(rows[-1]), flush=True)
                if args.output:
                    save(args.output, rows, ("architecture", "operator", "case"))
    failures = [row for row in rows if row["failures"]]
    count = len(rows)
    if args.output:
        count = save(args.output, rows, ("architecture", "operator") + (("case",) if args.match else ()))
    for row in failures:
        print(f"FAILED {row['architecture']} {row['operator']} {row['case']} {row['kernel']}: {row['failures']}")
    print(f"{count} kernels, {len(failures)} with failed checks")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
