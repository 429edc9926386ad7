"""README.md: its example runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from spawn import run_ranks

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def _run(group: dist.ProcessGroup, code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.multiprocess
def test_verify_example_runs_on_three_ranks() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    assert len(run_ranks(_run, 3, code.replace('dist.init_process_group("gloo")\n', ""))) == 3


def test_verify_links_and_targets_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for name in set(re.findall(r"(?:`|^)make ([a-z]+)", TEXT, flags=re.MULTILINE)):
        assert f"\n{name}: " in makefile or f"\n{name}:\n" in makefile, name
