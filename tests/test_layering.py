"""Who may import whom. Read from the sources, so that a lazy import inside a function counts too."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path.relative_to(ROOT).as_posix() for top in ("tbik", "integrations") for path in (ROOT / top).rglob("*.py")
)

# The base of the house: these files may import the standard library and what is listed, nothing else.
ALLOWED = {
    "tbik/tree.py": set(),
    "tbik/errors.py": set(),
    "tbik/plan.py": {"tbik.tree", "tbik.errors"},
    "tbik/reference.py": {"tbik.tree", "tbik.plan", "tbik.errors", "torch"},
}
# A product -> the only places that may name it.
CONFINED = {
    "triton": ("tbik/kernels/",),
    "mpi4py": ("tbik/launch.py",),
    "vllm": ("integrations/",),
    "tbik.cli": ("tbik/cli.py", "tbik/__main__.py"),
}
KERNELS = ("tbik/kernels/", "tbik/ops/")
COLLECTIVES = (
    *("tbik/collectives.py", "tbik/backend.py", "tbik/launch.py", "tbik/mpi_movement.py"),
    *("tbik/peer_library.py", "tbik/peer_memory.py", "tbik/peer_reductions.py"),
    *("tbik/moved_reductions.py", "tbik/device_reductions.py", "tbik/device_fold.py"),
)


def imports_of(source: str) -> set[str]:
    """Every module that a file names, absolute; `from tbik import tree` is tbik.tree, `from .x import y` too."""
    package = source.removesuffix("/__init__.py").removesuffix(".py").split("/")
    if not source.endswith("/__init__.py"):
        package = package[:-1]
    names = set()
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names |= {
                f"{module}.{alias.name}" if module == "tbik" or (node.level and not node.module) else module
                for alias in node.names
            }
    return names


def inside(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def is_standard_library(name: str) -> bool:
    return name.split(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("source", ALLOWED)
def test_verify_base_imports_only_what_lies_below(source: str) -> None:
    foreign = {
        name
        for name in imports_of(source)
        if not is_standard_library(name) and not any(inside(name, module) for module in ALLOWED[source])
    }
    assert not foreign, f"{source} may import only {sorted(ALLOWED[source])} and the standard library"


@pytest.mark.parametrize("module", CONFINED)
def test_verify_products_are_confined(module: str) -> None:
    offenders = [
        source
        for source in SOURCES
        if not source.startswith(CONFINED[module]) and any(inside(name, module) for name in imports_of(source))
    ]
    assert not offenders, f"only {CONFINED[module]} may import {module}"


def test_verify_kernels_and_collectives_do_not_meet() -> None:
    """They meet in nn."""
    for source in SOURCES:
        names = imports_of(source)
        if source.startswith(KERNELS):
            assert not any(inside(name, f"tbik.{m}") for name in names for m in ("collectives", "backend", "launch")), (
                source
            )
        if source in COLLECTIVES:
            assert not any(inside(name, f"tbik.{m}") for name in names for m in ("kernels", "ops")), source


def test_verify_library_does_not_import_integrations() -> None:
    """By name at most, when asked for (tbik.fsdp.apply)."""
    folders = {path.name for path in (ROOT / "integrations").iterdir() if path.is_dir()}
    for source in SOURCES:
        if source.startswith("tbik/"):
            assert not any(name.split(".")[0] in folders for name in imports_of(source)), source


def test_verify_the_check_sees_imports() -> None:
    """Negative control: the reader of imports finds those that are known to be there."""
    assert {"torch", "tbik.tree", "tbik.plan", "tbik.errors"} <= imports_of("tbik/reference.py")
    assert imports_of("tbik/tree.py") and not any(inside(name, "tbik") for name in imports_of("tbik/tree.py"))
