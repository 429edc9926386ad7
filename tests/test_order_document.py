"""ORDER.md names a test for every promise; each of those tests must exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "tbik" / "ORDER.md"
NAMED = sorted(set(re.findall(r"`(test_\w+\.py)::(\w+)`", DOCUMENT.read_text())))


def test_verify_document_names_tests() -> None:
    assert len(NAMED) > 30
    # no reference in another spelling, which the pattern above would overlook
    assert len(re.findall(r"::test_", DOCUMENT.read_text())) == len(
        re.findall(r"`test_\w+\.py::\w+`", DOCUMENT.read_text())
    )


@pytest.mark.parametrize(("file", "function"), NAMED, ids=[f"{file}::{function}" for file, function in NAMED])
def test_verify_named_test_exists(file: str, function: str) -> None:
    path = TESTS / file
    assert path.exists(), f"ORDER.md promises tests/{file}::{function}, and there is no such file"
    functions = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    assert function in functions, f"ORDER.md promises tests/{file}::{function}, and the file has no such test"


def test_verify_every_promise_names_a_test() -> None:
    """Each numbered paragraph names a test or says that no kernel exists yet (definitions without one are listed)."""
    paragraphs = re.split(r"\n(?=\*\*[A-Z]\d+\.)", DOCUMENT.read_text())[1:]
    silent = [
        re.match(r"\*\*([A-Z]\d+)\.", text)[1]  # type: ignore[index]
        for text in paragraphs
        if "::test_" not in text and not re.search(r"no (kernel|code)", text, re.IGNORECASE)
    ]
    in_section_c = [name for name in silent if name.startswith("C")]  # the section names its tests once, at its head
    assert silent == in_section_c
