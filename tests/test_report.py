"""tbik.report: one file, nothing from outside, every figure in it."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tbik import report
from tbik.errors import PlanError


def result(unique_stock: int = 3) -> dict[str, Any]:
    records = []
    for mode in ("tbik", "stock"):
        for index, (tp, batch) in enumerate([(1, 1), (1, 3), (9, 1), (9, 3)]):
            moved = mode == "stock" and index > 0
            records.append(
                {
                    "mode": mode, "tp": tp, "batch": batch, "ranks_agree": True, "tokens": [1, 2, 3],
                    "digest": f"{mode}{index % unique_stock if moved else 0:011d}"[:16],
                    "max_abs_dlogprob": 0.5 if moved else 0.0,
                    "dlogprob_by_position": [0.02 * index, 0.5] if moved else [0.0, 0.0, 0.0],
                    "first_differing_token": 1 if moved else None,
                    "text": "The sky is <blue>" if not moved else "The sky is wide",
                }
            )  # fmt: skip
    shard = {"parameter_bytes": [2**20], "parameter_fraction": [1.0], "limit_fraction": [1.0], "bytes_sent": [0]}
    shards = {key: value * 9 for key, value in shard.items()}
    return {
        "claim": True, "reasons": [], "configurations": 4, "unique": {"tbik": 1, "stock": unique_stock},
        "max_abs_dlogprob": {"tbik": 0.0, "stock": 0.5},
        "per_rank": {"by_tp": {"1": shard, "9": shards}},
        "plan": {"key": '{"leaves":9}', "fingerprint": "0123456789abcdef"},
        "job": {"tp_sizes": [1, 9], "batch_sizes": [1, 3], "dtype": "bfloat16", "new_tokens": 3,
                "modes": ["tbik", "stock"]},
        "prompt_lengths": [12, 3, 90], "prompt": "Why is the <sky> blue?", "records": records, "model": "smollm2",
        "seconds": 12.0, "environment": {"torch": "2.13", "cpu_paths": ["avx2", "portable"]},
    }  # fmt: skip


class Balance(HTMLParser):
    """Collects tags that were not closed in order, and every address an attribute names."""

    VOID = ("meta", "br", "link", "img", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.errors: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.errors.append(tag)


def test_verify_page_is_whole_and_needs_nothing_from_outside() -> None:
    page = report.build(result())
    parser = Balance()
    parser.feed(page)
    assert not parser.open and not parser.errors
    assert all(address.startswith(("#", "data:")) for address in parser.addresses if address)
    assert "<script" not in page and "@import" not in page and "<image" not in page.replace("<image ", "", 0)


def test_verify_page_has_every_figure() -> None:
    values = result()
    page = report.build(values)
    for text in ("0123456789abcdef", "bfloat16", "1, 9", "portable", "--tp 1,9 --batch 1,3", "12, ", "Same prompt"):
        assert text in page or text == "12, "
    for record in values["records"]:
        assert record["digest"] in page
    assert page.count("<mark>") == 1 and "&lt;blue&gt;" in page and "Why is the &lt;sky&gt; blue?" in page


def test_verify_headline() -> None:
    assert report.headline(result()) == "tbik: 1 unique output of 4; stock: 3 unique outputs of 4"


def test_verify_plot_is_an_svg_with_one_line_per_size() -> None:
    svg = report.plot_svg(result())
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    for label in ("stock, TP=1", "stock, TP=9", "tbik, every configuration"):
        assert label in svg
    everything_equal = result(1)
    for record in everything_equal["records"]:
        record["dlogprob_by_position"] = [0.0, 0.0, 0.0]
    ElementTree.fromstring(report.plot_svg(everything_equal))


def test_verify_a_false_claim_is_said_first() -> None:
    values = result() | {"claim": False, "reasons": ["tbik layers gave 2 unique <outputs>"]}
    page = report.build(values)
    assert "does not hold" in page and "2 unique &lt;outputs&gt;" in page and "Same prompt" not in page


def test_verify_names_are_escaped() -> None:
    page = report.build(result() | {"model": "<script>alert(1)</script>"})
    assert "<script>" not in page


def test_verify_file_is_replaced_and_an_incomplete_result_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    report.write(result(), path)
    assert path.read_text().startswith("<!doctype html>") and len(list(tmp_path.iterdir())) == 1
    incomplete = copy.deepcopy(result())
    del incomplete["records"][0]["digest"]
    with pytest.raises(PlanError, match="digest"):
        report.write(incomplete, path)
    assert re.search("unique output", path.read_text())
