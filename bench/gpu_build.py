"""The part "build" of bench/gpu.py. It imports nothing of tbik: that is what it builds."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from gpu_records import smi
from gpu_setting import ROOT, Setting

LIMIT_S = 570


def part_build(setting: Setting) -> list[dict[str, Any]]:
    """Proves that the sources build here (TBIK_CUDA=auto: _C_cuda.so where nvcc is) and load; says what the machine is.

    In a dry run the report only. Errors: RuntimeError with the end of the build's output.
    """
    import torch
    import triton

    rows: list[dict[str, Any]] = []
    if not setting.is_dry:
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        environment = {"TBIK_CUDA": "auto", **os.environ}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
            )
        warnings = [line for line in done.stderr.splitlines() if "built without" in line]
        rows.append({"fact": "build", "value": warnings[0] if warnings else "done"})
    for name in ("_C", "_C_dist", "_C_cuda"):
        files = [path.name for path in sorted((ROOT / "tbik").glob(f"{name}.*so"))]
        rows.append({"fact": f"tbik/{name}", "value": ", ".join(files) or "not built"})
    loads = [
        sys.executable,
        "-c",
        "import torch; from tbik import _C; import tbik.backend; print(', '.join(_C.cpu_paths()))",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(loads, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"what was built does not load:\n{done.stderr[-2000:]}")
    rows.append({"fact": "CPU paths", "value": done.stdout.strip()})
    facts = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    facts |= {"CUDA of torch": str(torch.version.cuda)}
    facts |= smi() or {"nvidia-smi": "not here"}
    if not setting.is_dry:
        facts |= {"compute capability": setting.architecture, "devices": str(torch.cuda.device_count())}
    return rows + [{"fact": name, "value": value} for name, value in facts.items()]
