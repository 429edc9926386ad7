"""The committed vectors, whose expected bits come from tests/oracle.c, against this package (ORDER.md A1-A7, T1-T5)."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tbik import _C, reference, tree
from tbik.errors import PlanError
from tbik.plan import TreePlan
from tbik.tree import Node

VECTORS = Path(__file__).resolve().parent / "vectors"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
WIRES = {"none": None, "bf16": "bfloat16"}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

# linear(x [M, K], w [N, K], plan, bias [N] or None, out_dtype, round_wire) -> [M, N]. A kernel joins by one line here.
LINEARS: dict[str, Callable[..., Tensor]] = {
    "reference": lambda x, w, plan, bias, out, wire: reference.linear(x, w, plan, bias, out, round_wire=wire),
}


@functools.cache
def load(file: str, table: str) -> list[dict[str, Any]]:
    """The cases of one table; an empty table is an error, for a test over no cases shows nothing."""
    content = json.loads((VECTORS / f"{file}.json").read_text())
    assert content["order_version"] == tree.ORDER_VERSION
    assert content[table]
    return content[table]


def to_tensor(bits: Any, dtype: str) -> Tensor:
    """A hexadecimal string, or nested lists of them, as a tensor with exactly these bits ("nan": any NaN)."""
    size = DTYPES[dtype].itemsize

    def to_signed(item: Any) -> Any:
        if isinstance(item, list):
            return [to_signed(part) for part in item]
        quiet_nan = {"fp32": "0x7fc00000", "fp64": "0x7ff8000000000000"}
        return int.from_bytes(int(quiet_nan[dtype] if item == "nan" else item, 16).to_bytes(size, "big"), signed=True)

    return torch.tensor(to_signed(bits), dtype=_INTEGERS[size]).view(DTYPES[dtype])


def to_bits(value: Tensor, any_nan: bool) -> Any:
    """The inverse of to_tensor: nested lists of hexadecimal strings; NaN as "nan" if every NaN is as good."""
    if value.dim():
        return [to_bits(part, any_nan) for part in value]
    if any_nan and bool(torch.isnan(value)):
        return "nan"
    size = value.element_size()
    return f"0x{value.contiguous().view(_INTEGERS[size]).item() & (1 << 8 * size) - 1:0{2 * size}x}"


class Mismatches:
    """Collects differences over all cases, so that one run shows what they have in common."""

    def __init__(self) -> None:
        self.cases = 0
        self.found: list[str] = []

    def compare(self, actual: Any, expected: Any, case: Any) -> None:
        self.cases += 1
        if actual != expected:
            self.found.append(f"actual {actual}, expected {expected}: {str(case)[:400]}")

    def require_none(self) -> None:
        assert self.cases > 0
        assert not self.found, f"{len(self.found)} of {self.cases} cases differ:\n" + "\n".join(self.found[:8])


def compare_chains(groups: tuple[str, ...], dtype: str) -> None:
    mismatches = Mismatches()
    for case in load("chains", "chains"):
        if case["group"] in groups and case["dtype"] == dtype:
            a, b = to_tensor([case["a"]], dtype), to_tensor([case["b"]], dtype)
            mismatches.compare(to_bits(reference.chain(a, b)[0, 0], any_nan=True), case["leaf"], case)
    mismatches.require_none()


@pytest.mark.parametrize("dtype", DTYPES)
def test_verify_chain_vectors(dtype: str) -> None:
    compare_chains(("special", "length", "random"), dtype)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_verify_flush_vectors(dtype: str) -> None:
    cases = [case for case in load("chains", "chains") if case["group"] == "flush" and case["dtype"] == dtype]
    # Without a flush, or with one that looks at |r| < 2^-126 only, these cases must fail.
    assert sum(case["leaf"] != case["gradual"] for case in cases) >= len(cases) // 3
    compare_chains(("flush",), dtype)


def test_verify_flush_steps() -> None:
    """Single steps r = fma(a, b, c), which also reach a subnormal c and show the sign of a flushed result."""
    cases = load("chains", "steps")
    a, b, c = (to_tensor([case[name] for case in cases], "fp32") for name in "abc")
    mismatches = Mismatches()
    for case, actual in zip(cases, to_bits(reference.fma32(a, b, c), any_nan=True), strict=True):
        mismatches.compare(actual, case["r"], case)
    mismatches.require_none()


def test_verify_node_vectors() -> None:
    mismatches = Mismatches()
    for acc in ("fp32", "fp64"):
        cases = [case for case in load("nodes", "nodes") if case["acc"] == acc]
        left, right = (to_tensor([case[name] for case in cases], acc) for name in ("left", "right"))
        for case, actual in zip(cases, to_bits(reference.add(left, right), any_nan=True), strict=True):
            mismatches.compare(actual, case["node"], case)
    mismatches.require_none()


def test_verify_wire_vectors() -> None:
    mismatches = Mismatches()
    cases = load("nodes", "wires")
    rounded = to_bits(reference.round_wire(to_tensor([case["x"] for case in cases], "fp32")), any_nan=True)
    for case, actual in zip(cases, rounded, strict=True):
        mismatches.compare(actual, case["rounded"], case)
    mismatches.require_none()


def test_verify_root_vectors() -> None:
    """Covers of ranks, merged in ascending and in descending order of ranks, with and without wire rounding."""
    mismatches = Mismatches()
    for case in load("nodes", "roots"):
        rounds = case["wire"] == "bf16"
        covers = []
        for rank, expected in enumerate(case["covers"]):
            run = range(case["L"] * rank // case["W"], case["L"] * (rank + 1) // case["W"])
            cover: dict[Node, Tensor] = {}
            for i in run:
                leaf = to_tensor(case["leaves"][i], case["acc"])
                leaf = reference.round_wire(leaf) if rounds else leaf
                cover = tree.merge(cover, {Node(0, i): leaf}, lambda x, y, rounds=rounds: add_nodes(x, y, rounds))
            actual = [[*node, to_bits(cover[node], any_nan=True)] for node in sorted(cover, key=lambda node: node.lo)]
            mismatches.compare(actual, expected, case)
            covers.append({Node(s, j): to_tensor(value, case["acc"]) for s, j, value in expected})
        for arrival in (covers, covers[::-1]):
            root = reference.fold_covers(arrival, case["L"], rounds)
            mismatches.compare(to_bits(root, any_nan=True), case["root"], case)
    mismatches.require_none()


def add_nodes(left: Tensor, right: Tensor, rounds: bool) -> Tensor:
    total = reference.add(left, right)
    return reference.round_wire(total) if rounds else total


@pytest.mark.parametrize("group", ["cast", "avg", "bias", "combined"])
def test_verify_epilogue_vectors(group: str) -> None:
    mismatches = Mismatches()
    for case in load("epilogues", "epilogues"):
        if case["group"] != group:
            continue
        root = to_tensor([case["root"]], case["acc"])
        bias = None if case["bias"] is None else to_tensor([case["bias"]], case["bias_dtype"])
        try:
            actual = reference.epilogue(root, bias, case["W"] or 1, DTYPES[case["out"]])
        except PlanError:  # torch rounds fp64 to half precision by way of fp32: a refusal is right, other bits are not
            assert case["acc"] == "fp64" and case["out"] in ("bf16", "fp16")
            continue
        mismatches.compare(to_bits(actual[0], any_nan=False), case["expected"], case)
    mismatches.require_none()


def test_verify_cut_vectors() -> None:
    mismatches = Mismatches()
    for case in load("cuts", "cuts"):
        mismatches.compare(tree.granule(case["K"], case["L"]), case["q"], case)
        mismatches.compare(list(tree.cuts(case["K"], case["L"])), case["cuts"], case)
    mismatches.require_none()


def test_verify_tree_vectors() -> None:
    mismatches = Mismatches()
    for case in load("trees", "trees"):
        leaves = case["L"]
        spans = tree.root([(i, None, i + 1, ()) for i in range(leaves)], _join_spans)
        mismatches.compare([list(triple) for triple in spans[3]], case["nodes"], case)
        for lo, mid, hi in case["nodes"]:
            mismatches.compare(tree.middle(lo, hi), mid, case)
    for case in load("trees", "covers"):
        runs = [(case["L"] * r // case["W"], case["L"] * (r + 1) // case["W"]) for r in range(case["W"])]
        mismatches.compare([[list(node) for node in tree.cover(lo, hi)] for lo, hi in runs], case["ranks"], case)
        folded = [tree.schedule(tree.leaf_nodes(lo, hi)).outputs for lo, hi in runs]
        mismatches.compare([[list(node) for node in nodes] for nodes in folded], case["ranks"], case)
    mismatches.require_none()


def _join_spans(left: tuple, right: tuple) -> tuple:
    """An addition that records itself: (lo, mid, hi, the additions below it and itself, left subtree first)."""
    triple = (left[0], right[0], right[2])
    return (*triple, (*left[3], *right[3], triple))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", LINEARS)
def test_verify_linear_vectors(implementation: str, dtype: str) -> None:
    mismatches, order_shows = Mismatches(), 0
    for case in load("linears", "linears"):
        if case["dtype"] != dtype:
            continue
        x, w, bias = (to_tensor(case[name], dtype) for name in ("x", "w", "bias"))
        for variant in case["variants"]:
            acc_dtype = "float64" if dtype == "fp64" else "float32"
            plan = TreePlan(leaves=case["L"], acc_dtype=acc_dtype, wire_dtype=WIRES[variant["wire"]])
            wire = variant["wire"] != "none"
            actual = LINEARS[implementation](
                x, w, plan, bias if variant["bias"] else None, DTYPES[variant["out"]], wire
            )
            shape = {name: case[name] for name in ("kind", "dtype", "L", "M", "N", "K")}
            about = {**shape, **{name: variant[name] for name in ("bias", "out", "wire")}}
            mismatches.compare(to_bits(actual, any_nan=False), variant["y"], about)
            order_shows += variant["y"] != variant["flat"]
    mismatches.require_none()
    assert order_shows > mismatches.cases // 3, "the data would not show a sum in another order"


def amx_linear(path: str, x: Tensor, w: Tensor, plan: TreePlan, bias: Tensor | None, out: torch.dtype) -> Tensor:
    if path == "reference":
        return reference.linear(x, w, plan, bias, out, round_wire=plan.wire_dtype is not None)
    leaves, rounds = plan.leaves, plan.wire_dtype is not None
    cuts, program = [_C.cuts(x.shape[1], leaves)], _C.run_schedule(0, leaves, leaves, True, rounds)
    return _C.gemm([x], False, [w], False, cuts, program, "bfloat16", bias, out_dtype=out, path=path, leaf="amx")


@pytest.mark.parametrize("path", ["reference", *_C.amx_paths()])
def test_verify_amx_vectors(path: str) -> None:
    mismatches, order_shows = Mismatches(), 0
    for case in load("amx", "linears"):
        x, w, bias = (to_tensor(case[name], "bf16") for name in ("x", "w", "bias"))
        for variant in case["variants"]:
            plan = TreePlan(leaves=case["L"], wire_dtype=WIRES[variant["wire"]], leaf="amx")
            actual = amx_linear(path, x, w, plan, bias if variant["bias"] else None, DTYPES[variant["out"]])
            mismatches.compare(to_bits(actual, any_nan=False), variant["y"], {**case, **variant})
            order_shows += variant["y"] != variant["flat"]
    mismatches.require_none()
    assert order_shows > mismatches.cases // 3, "the data would not show a sum in another order"


def test_verify_oracle_regenerates_vectors() -> None:
    if not any(name and shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang")):
        pytest.skip("no C compiler to build tests/oracle.c with")
    command = [sys.executable, str(VECTORS.parent / "make_vectors.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
