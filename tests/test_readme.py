"""README.md: its example runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from spawn import run_ranks

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def _run(group: dist.ProcessGroup, code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.multiprocess
def test_verify_example_runs_on_three_ranks() -> None:
    (code,) = [block for block in BLOCKS if "three ranks" in block]
    assert len(run_ranks(_run, 3, code.replace('dist.init_process_group("gloo")\n', ""))) == 3


@pytest.mark.long
@pytest.mark.multiprocess
def test_verify_backend_example_runs_under_torchrun(tmp_path: Path) -> None:
    (code,) = [block for block in BLOCKS if 'init_process_group("tbik")' in block]
    rest = """
import torch
x = torch.full((5,), 0.5 + dist.get_rank())
dist.all_reduce(x)
assert x.tolist() == [2.0] * 5 and dist.get_backend() == "tbik"
dist.destroy_process_group()
"""
    (tmp_path / "train.py").write_text(code + rest)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def _train(group: dist.ProcessGroup, code: str, folder: str) -> str:
    names: dict[str, object] = {}
    exec(compile(code.replace('"run"', repr(folder)), "README.md", "exec"), names)
    return str(names["digest"])


@pytest.mark.long
@pytest.mark.multiprocess
def test_verify_training_example_runs_on_two_and_three_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (code,) = [block for block in BLOCKS if "tbik.fsdp.apply" in block]
    code = code.replace('dist.init_process_group("gloo")\n', "")
    digests = {
        d
        for ranks in (2, 3)
        for d in run_ranks(_train, ranks, code, str(tmp_path / f"run-{ranks}"), timeout=120.0, deadline=240.0)
    }
    assert len(digests) == 1


def test_verify_links_and_targets_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"(?:`|^)make ([a-z]+)", TEXT, flags=re.MULTILINE)):
        assert f"\n{name}: " in makefile or f"\n{name}:\n" in makefile, name
