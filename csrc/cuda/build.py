"""nvcc for csrc/cuda: what setup.py builds and bench/cuda_compile.py looks at, with the same flags.

Every .cu is compiled to PTX of the oldest architecture once; ptxas makes machine code of it for each architecture of
ARCHITECTURES. The PTX stays in the library, for GPUs to come. -fmad=false: nothing is fused unless a source says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
VIRTUAL = "compute_80"
ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
FLAGS = ("-std=c++20", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")


def find_nvcc() -> str | None:
    """CUDA_HOME's, else the PATH's."""
    home = os.environ.get("CUDA_HOME", "")
    candidate = Path(home) / "bin" / "nvcc"
    return str(candidate) if home and candidate.exists() else shutil.which("nvcc")


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cu"))


def ptx_command(nvcc: str, source: Path, output: Path) -> list[str]:
    return [nvcc, *FLAGS, f"-arch={VIRTUAL}", "-ptx", str(source), "-o", str(output)]


def build(nvcc: str, library: Path, folder: Path, jobs: int) -> None:
    """Compile and link. The CUDA runtime is linked in. Errors: CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    code = ",".join([*ARCHITECTURES, VIRTUAL])
    options = [*FLAGS, f"--generate-code=arch={VIRTUAL},code=[{code}]", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    objects = [folder / (source.stem + ".o") for source in sources()]
    commands = [[nvcc, *options, "-c", str(source), "-o", str(output)] for source, output in zip(sources(), objects)]
    run(commands, jobs)
    run([[nvcc, "-shared", "-cudart=static", "-o", str(library), *map(str, objects)]], 1)


def run(commands: Sequence[Sequence[str]], jobs: int) -> None:
    """All commands, `jobs` at a time."""
    waiting, running = list(commands), []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append((waiting[0], subprocess.Popen(waiting.pop(0))))
            command, process = running.pop(0)
            if process.wait() != 0:
                raise subprocess.CalledProcessError(process.returncode, list(command))
    finally:
        for _, process in running:
            process.kill()
            process.wait()
