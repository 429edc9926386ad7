"""PyTorch's own suite of torch.distributed, from the wheel, on groups of one backend; results as JSON.

    python tests/torch_suite_program.py --backend tbik --world 3 --out result.json
    python tests/torch_suite_program.py --record                 both backends, both world sizes -> the committed table

`DistributedTest._DistTestBase` (torch/testing/_internal/distributed/distributed_test.py) decides by a backend's *name*,
read when it is imported, which tests exist, and in some bodies by its name again. So every test is run in up to three
passes, each a process of its own:

    gloo     the fences of gloo, bodies see the name of the backend
    mpi      the fences of MPI: opens what is closed to gloo (all_to_all); only tests that the first pass has skipped
    renamed  the fences and the bodies of gloo, the groups of the backend, and tbik.backend.monitored_barrier in the
             place of torch's; only the tests of NAME_CHECKS that this can help

Ranks are forked (a spawned rank imports torch for five seconds). A test passes if torch says so and no rank ended by a
signal. Result: {name: {"outcome": "pass" | "fail" | "skip", "pass": which, "reason": text, "seconds": float}}.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any

FENCES = {"gloo": "gloo", "mpi": "mpi", "renamed": "gloo"}
WORLDS = (3, 4)
TABLE = Path(__file__).with_name("torch_suite.json")
DOCUMENT = Path(__file__).with_name("torch_suite.md")

_SUITE = "torch/testing/_internal/distributed/distributed_test.py"
_NO_SYNC = (_SUITE, 'if BACKEND == "mpi" or BACKEND == "gloo":', "makes no model under any other name", True)
_MONITORED = (
    "torch/distributed/distributed_c10d.py",
    'raise ValueError("monitored_barrier is only implemented for GLOO backend.")',
    "asks for gloo by name; use tbik.backend.monitored_barrier",
    True,
)
NAME_CHECKS = {
    "test_accumulate_gradients_no_sync": _NO_SYNC,
    "test_accumulate_gradients_no_sync_allreduce_hook": _NO_SYNC,
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook": _NO_SYNC,
    "test_accumulate_gradients_no_sync_grad_is_view": _NO_SYNC,
    "test_monitored_barrier_failure_order": _MONITORED,
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
    "test_monitored_barrier_wait_all_ranks": _MONITORED,
    "test_ddp_logging_data_cpu": (
        _SUITE,
        'ddp_logging_data.get("backend_name"), dist.get_backend(group_id)',
        "DDP's log calls every backend from outside torch 'custom'",
        False,
    ),
}
"""Tests that fail by a name alone: (file in the wheel, the line, why, whether the pass "renamed" can show the rest)."""


def suite_class(which: str, backend: str, world: int, folder: str) -> Any:
    """The suite as a unittest class. Import order matters: the fences are read when the module is imported."""
    tempfile.tempdir = folder  # torch leaves its files behind
    os.environ.update(
        BACKEND=FENCES[which],
        WORLD_SIZE=str(world),
        TEMP_DIR=folder,
        INIT_METHOD=f"file://{folder}/again",  # of the one test that makes the default group anew
        MASTER_ADDR="127.0.0.1",
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    import torch
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    if not torch.cuda.is_available():
        # torch's decorator starts all ranks to find out; the reason is the same.
        common_distributed.skip_if_no_gpu = unittest.skip("CUDA is not available.")
        common_distributed.skip_if_lt_x_gpu = lambda n, **_: unittest.skip(f"Need at least {n} CUDA devices")
    from torch.testing._internal.distributed import distributed_test

    name = backend
    if backend == "tbik":
        import tbik._C_dist

        import tbik.backend

        for feature in ("ddp", "subgroup", "plugin"):
            common_distributed.DistTestCases.backend_feature[feature].add(backend)
    if which == "renamed":
        name = "gloo"
        stock = dist.init_process_group
        dist.init_process_group = lambda *args, **kwargs: stock(*args, **kwargs | {"backend": backend})
        dist.monitored_barrier = tbik.backend.monitored_barrier
    distributed_test.BACKEND = name
    os.environ["BACKEND"] = "mpi"  # read when a test starts: fences of world size, which do not hold for MPI

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)
            if fn not in self.skip_return_code_checks:
                signals = {rank: p.exitcode for rank, p in enumerate(self.processes) if p.exitcode < 0}
                self.assertFalse(signals, "ranks that ended by a signal")

    return Suite


class Result(unittest.TestResult):
    """Collects outcomes by test name."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which = which
        self.rows: dict[str, dict[str, Any]] = {}

    def startTest(self, test: Any) -> None:
        self.started = time.monotonic()
        super().startTest(test)

    def _add(self, test: Any, outcome: str, reason: str) -> None:
        name = test.id().split(".")[-1]
        seconds = round(time.monotonic() - self.started, 2)
        self.rows[name] = {"outcome": outcome, "pass": self.which, "reason": reason, "seconds": seconds}
        print(f"{self.which:8s}{outcome:5s}{seconds:7.2f} s  {name}", file=sys.stderr, flush=True)

    def addSuccess(self, test: Any) -> None:
        self._add(test, "pass", "")

    def addSkip(self, test: Any, reason: str) -> None:
        self._add(test, "skip", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self._add(test, "fail", self._exc_info_to_string(err, test)[-6000:])

    addError = addFailure


def run_pass(which: str, backend: str, world: int, folder: str, names: list[str] | None) -> dict[str, dict[str, Any]]:
    """One pass in this process, over `names` or all tests."""
    suite = suite_class(which, backend, world, folder)
    result = Result(which)
    for name in unittest.TestLoader().getTestCaseNames(suite):
        if names is None or name in names:
            suite(name).run(result)
    return result.rows


def forked_pass(which: str, backend: str, world: int, names: list[str] | None) -> dict[str, dict[str, Any]]:
    """As run_pass, in a child process: the fences of a pass are fixed by its imports."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                logging.disable(logging.ERROR)
                answer.write_text(json.dumps(run_pass(which, backend, world, folder, names)))
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(pid, 0)[1] != 0:
            raise RuntimeError(f"pass {which} of {backend} at world size {world} ended without results")
        rows: dict[str, dict[str, Any]] = json.loads(answer.read_text())
        return rows


def run_suite(backend: str, world: int, only: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """All passes of one backend at one world size; tests of the pass "renamed" as "name [renamed]"."""
    rows = forked_pass("gloo", backend, world, only)
    closed = [name for name, row in rows.items() if row["outcome"] == "skip"]
    opened = forked_pass("mpi", backend, world, closed)
    rows |= {name: row for name, row in opened.items() if row["outcome"] != "skip"}
    if backend != "gloo":
        names = [name for name, (*_, helps) in NAME_CHECKS.items() if helps and name in rows]
        again = forked_pass("renamed", backend, world, names)
        rows |= {f"{name} [renamed]": row for name, row in again.items()}
    return rows


def summary(row: dict[str, Any]) -> str:
    """One line: what the table holds of a result."""
    if row["outcome"] == "skip":
        return f"skip: {row['reason']}"
    if row["outcome"] == "pass":
        return f"pass, fences of {FENCES[row['pass']]}"
    lines = [line.strip() for line in row["reason"].splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
    return f"fail: {lines[-1][:200] if lines else 'see the log'}"


def record() -> None:
    """Run everything and write the table."""
    import torch

    tests: dict[str, dict[str, dict[str, str]]] = {}
    for backend in ("gloo", "tbik"):
        for world in WORLDS:
            for name, row in run_suite(backend, world).items():
                tests.setdefault(name, {}).setdefault(backend, {})[str(world)] = summary(row)
    TABLE.write_text(
        json.dumps({"torch": torch.__version__.split("+")[0], "tests": tests}, indent=1, sort_keys=True) + "\n"
    )
    DOCUMENT.write_text(document(json.loads(TABLE.read_text())))


def document(table: dict[str, Any]) -> str:
    """tests/torch_suite.md: what the table says."""
    tests: dict[str, dict[str, dict[str, str]]] = table["tests"]
    lines = [
        f"# PyTorch's own tests of torch.distributed under `tbik` (torch {table['torch']})",
        "",
        "`DistributedTest._DistTestBase` from the wheel, ranks forked, on CPU. Written by",
        "`python tests/torch_suite_program.py --record`; `tests/test_torch_suite.py` compares every run with it. The",
        "passes (whose fences are in force) are described in `tests/torch_suite_program.py`.",
        "",
        "| world size | backend | pass | of these opened by MPI's fences | fail | skip |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for world in map(str, WORLDS):
        for backend in ("gloo", "tbik"):
            results = [row[backend][world] for name, row in tests.items() if "[" not in name]
            counts = [
                sum(r.startswith(kind) for r in results) for kind in ("pass", "pass, fences of mpi", "fail", "skip")
            ]
            lines.append(f"| {world} | {backend} | " + " | ".join(map(str, counts)) + " |")
    lines += [
        "",
        "## Tests that fail under the name `tbik`",
        "",
        "Each fails by a comparison of names in torch. Where the last column says so, the same test passes on groups",
        'of tbik when it is told that the backend is called "gloo" (pass "renamed").',
        "",
        "| test | where torch compares names | why | renamed |",
        "|---|---|---|---|",
    ]
    for name, (file, text, why, helps) in sorted(NAME_CHECKS.items()):
        if name not in tests:
            continue
        again = tests.get(f"{name} [renamed]", {}).get("tbik", {})
        verdict = ", ".join(f"{kind.split(',')[0]} at {world}" for world, kind in sorted(again.items()))
        lines.append(f"| `{name}` | `{file}:{line_of(file, text)}` | {why} | {verdict if helps else 'cannot help'} |")
    lines += ["", "## Tests that fail on gloo", "", "| test | gloo | tbik |", "|---|---|---|"]
    for name, row in sorted(tests.items()):
        if any(r.startswith("fail") for r in row.get("gloo", {}).values()):
            lines.append("| `" + name + "` | " + " | ".join(_both(row[b]) for b in ("gloo", "tbik")) + " |")
    lines += ["", "## Skipped in every pass, on both backends", "", "| reason | tests |", "|---|---|"]
    reasons: dict[str, list[str]] = {}
    for name, row in sorted(tests.items()):
        kinds = {r for results in row.values() for r in results.values()}
        if all(kind.startswith("skip: ") for kind in kinds):
            reasons.setdefault("; ".join(sorted(kind.removeprefix("skip: ") for kind in kinds)), []).append(name)
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        lines.append(f"| {reason} | {len(names)}: " + ", ".join(f"`{name}`" for name in names) + " |")
    lines += ["", "## Skipped at one world size only", "", "| test | tbik |", "|---|---|"]
    for name, row in sorted(tests.items()):
        kinds = {r.split(":")[0] for r in row["tbik"].values()}
        if "skip" in kinds and len(kinds) > 1:
            lines.append(f"| `{name}` | {_both(row['tbik'])} |")
    return "\n".join(lines) + "\n"


def _both(results: dict[str, str]) -> str:
    kinds = set(results.values())
    if len(kinds) == 1:
        return kinds.pop().replace("|", "/")
    return "; ".join(f"{world} ranks: {kind}" for world, kind in sorted(results.items())).replace("|", "/")


def line_of(file: str, text: str) -> int:
    """The first line of a file of the installed torch that says `text`. Error: ValueError."""
    import torch

    for number, line in enumerate((Path(torch.__file__).parent.parent / file).read_text().splitlines(), 1):
        if text in line:
            return number
    raise ValueError(f"{file}: no line says {text!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["tbik", "gloo"], default="tbik")
    parser.add_argument("--world", type=int, default=4)
    parser.add_argument("--only", help="only these tests, separated by commas")
    parser.add_argument("--out", type=Path, help="where the results go")
    parser.add_argument("--record", action="store_true", help="run everything and write the committed table")
    options = parser.parse_args()
    if options.record:
        record()
    elif options.out is None:
        parser.error("--out or --record is needed")
    else:
        rows = run_suite(options.backend, options.world, options.only.split(",") if options.only else None)
        options.out.write_text(json.dumps(rows, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
