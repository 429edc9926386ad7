"""What bench/gpu.py keeps: one JSON with a record per part, a table of it, and which part need not run again.

record = {rows, seconds, gpu, driver, torch, triton, commit, sources}, and `error`, the last line, where it failed.
A part is done where a record without an error is of the same device, versions and code. `sources` is a digest of every
file that can change a result: it tells apart what a commit with changes on top, or a copy without .git, does not.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SOURCES = ("setup.py", "tbik/**/*.py", "csrc/**/*", "integrations/**/*.py", "bench/gpu*.py", "tests/*.py")
SAME = ("gpu", "driver", "torch", "triton", "commit", "sources")
"""What must not have changed for a record to stand."""


def sources(root: Path = ROOT) -> str:
    """Digest of the files of SOURCES, their names included."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted({path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()}):
        if path.suffix != ".pyc":
            digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def smi() -> dict[str, str]:
    """Name, driver, memory and clocks of device 0 by nvidia-smi; {} where it is not."""
    fields = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = answer.stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) if answer.returncode == 0 and len(values) == len(fields) else {}


def versions(is_dry: bool) -> dict[str, str]:
    """The device and the versions that a record names. Imports torch and triton, not tbik: that may not be built."""
    import torch
    import triton

    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "gpu": "none (dry run, interpreter)" if is_dry else torch.cuda.get_device_name(),
        "driver": "none" if is_dry else smi().get("driver_version", "unknown"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": head or "unknown",
        "sources": sources(),
    }


def is_done(record: Mapping[str, Any] | None, now: Mapping[str, Any]) -> bool:
    """Whether the part of this record need not run again."""
    if record is None or record.get("error") is not None or "rows" not in record:
        return False
    return all(record.get(name) == now[name] for name in SAME)


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"parts": {}}


def save(output: str, result: dict[str, Any]) -> None:
    """Both files, each whole or not at all: a run may be killed at any time."""
    for name, text in ((output + ".json", json.dumps(result, indent=1) + "\n"), (output + ".md", as_table(result))):
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(path.suffix + ".new").write_text(text)
        os.replace(path.with_suffix(path.suffix + ".new"), path)


def as_table(result: Mapping[str, Any]) -> str:
    """Markdown: a section per part, with its error where it failed; parts of other code or devices say so."""
    now = result.get("versions", {})
    text = ["# One GPU", "", "`python bench/gpu.py`; " + ", ".join(f"{k} {v}" for k, v in now.items()), ""]
    for name, part in result["parts"].items():
        text += [f"## {name}", ""]
        others = [f"{k} {part[k]}" for k in SAME if k in now and k in part and part[k] != now[k]]
        text += [f"Of another run: {', '.join(others)}.", ""] if others else []
        text += [f"**FAILED**: {cell(part['error'])}", ""] if part.get("error") is not None else []
        columns = list(dict.fromkeys(column for row in part["rows"] for column in row))
        if columns:
            text += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        text += ["| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in part["rows"]]
        text.append("")
    return "\n".join(text)


def cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")
