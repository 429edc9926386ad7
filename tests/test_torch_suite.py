"""PyTorch's own suite under "tbik" against the committed table (tests/torch_suite.json, torch_suite.md).

TBIK_TORCH_SUITE_GLOO=1     run gloo too, instead of taking its outcomes from the table
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch_suite_program import DOCUMENT, NAME_CHECKS, TABLE, WORLDS, document, line_of, summary

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.skipif(sys.platform != "linux", reason="the backend's shared memory is for Linux"),
]

PROGRAM = Path(__file__).with_name("torch_suite_program.py")


def table() -> dict[str, Any]:
    result: dict[str, Any] = json.loads(TABLE.read_text())
    return result


def is_table_of_this_torch() -> bool:
    return bool(table()["torch"] == torch.__version__.split("+")[0] and not torch.cuda.is_available())


def run(backend: str, world: int, folder: Path) -> dict[str, str]:
    """{test: one line} of a run in a process of its own."""
    answer = folder / f"{backend}.json"
    command = [sys.executable, str(PROGRAM), "--backend", backend, "--world", str(world), "--out", str(answer)]
    with open(folder / "log.txt", "w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, timeout=1500, check=False)
    assert done.returncode == 0, (folder / "log.txt").read_text()[-4000:]
    rows = json.loads(answer.read_text())
    for name, row in rows.items():
        if row["outcome"] == "fail":
            print(f"--- {backend}, {world} ranks: {name}\n{row['reason'][-2500:]}")
    return {name: summary(row) for name, row in rows.items()}


def require_no_test_lost(gloo: dict[str, str], tbik: dict[str, str]) -> None:
    """What passes on gloo passes on tbik, or fails by a name and passes when that name is lent to it."""
    for name, outcome in gloo.items():
        if not outcome.startswith("pass") or tbik[name].startswith("pass"):
            continue
        assert name in NAME_CHECKS, f"{name}: passes on gloo, under tbik: {tbik[name]}"
        if NAME_CHECKS[name][-1]:
            assert tbik[f"{name} [renamed]"].startswith("pass"), f"{name}: {tbik[f'{name} [renamed]']}"


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", WORLDS)
def test_corroborate_torch_suite(world: int, tmp_path: Path) -> None:
    recorded = table()["tests"]
    tbik = run("tbik", world, tmp_path)
    gloo = {name: row["gloo"][str(world)] for name, row in recorded.items() if "gloo" in row}
    if os.environ.get("TBIK_TORCH_SUITE_GLOO") == "1" or not is_table_of_this_torch():
        gloo = run("gloo", world, tmp_path)
    require_no_test_lost(gloo, tbik)
    if not is_table_of_this_torch():
        return
    expected = {name: row["tbik"][str(world)] for name, row in recorded.items()}
    assert set(tbik) == set(expected)
    different = {
        name: (line, expected[name])
        for name, line in tbik.items()
        if line != expected[name] and not (line.startswith("fail") and expected[name].startswith("fail"))
    }
    assert not different, f"(now, table): {different}"


def test_table_of_the_torch_suite_keeps_the_promise() -> None:
    recorded = table()["tests"]
    assert len(recorded) > 280
    for world in map(str, WORLDS):
        tbik = {name: row["tbik"][world] for name, row in recorded.items()}
        require_no_test_lost({name: row["gloo"][world] for name, row in recorded.items() if "gloo" in row}, tbik)
        assert sum(line.startswith("pass") for line in tbik.values()) > 100
        failed = {name for name, line in tbik.items() if line.startswith("fail") and "[" not in name}
        assert failed <= set(NAME_CHECKS)


def test_document_of_the_torch_suite_is_the_tables() -> None:
    for file, text, *_ in NAME_CHECKS.values():
        assert line_of(file, text) > 0
    if not is_table_of_this_torch():
        pytest.skip(f"the table is of torch {table()['torch']}; the lines it names move")
    assert DOCUMENT.read_text() == document(table())
