"""TreePlan and shards: ORDER.md T6, T7, P1."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tbik import _C, tree
from tbik.errors import PlanError
from tbik.plan import ModelShape, TreePlan, best_split, is_node_per_rank, leaf_runs, model_layout

SMOLLM2 = ModelShape(heads=9, kv_heads=3, head_dim=64, hidden=576, intermediate=1536, vocab=49152)
LLAMA3_8B = ModelShape(heads=32, kv_heads=8, head_dim=128, hidden=4096, intermediate=14336, vocab=128256)
QWEN3_06B = ModelShape(heads=16, kv_heads=8, head_dim=128, hidden=1024, intermediate=3072, vocab=151936)


def brute_force_split(points, parts, size, legal):
    """Every split, ranked by the words of ORDER.md T6."""
    best = None
    for interior in itertools.combinations(points[1:-1], parts - 1):
        ends = (points[0], *interior, points[-1])
        runs = tuple(itertools.pairwise(ends))
        if not all(size(*run) > 0 and legal(*run) for run in runs):
            continue
        sizes = [size(*run) for run in runs]
        key = (max(sizes), max(len(tree.cover(*run)) for run in runs), [-s for s in sizes])
        if best is None or key < best[0]:
            best = (key, runs)
    return None if best is None else best[1]


def brute_force_attention(shape: ModelShape, leaves: int, tp: int):
    q = tree.cuts(shape.heads * shape.head_dim, leaves)
    kv = tree.cuts(shape.kv_heads * shape.head_dim, leaves)
    group = shape.heads // shape.kv_heads

    def legal(lo, hi):
        if q[lo] % shape.head_dim or q[hi] % shape.head_dim:
            return False
        present = {h // group for h in range(q[lo] // shape.head_dim, q[hi] // shape.head_dim)}
        return all(row // shape.head_dim in present for row in range(kv[lo], kv[hi]))

    return brute_force_split(range(leaves + 1), tp, lambda lo, hi: (q[hi] - q[lo]) // shape.head_dim, legal)


# the last shape has more leaves than q rows: empty leaves
@pytest.mark.parametrize(
    "shape",
    [SMOLLM2, ModelShape(8, 2, 32, 256, 512, 1000), ModelShape(6, 2, 16, 96, 250, 331), ModelShape(2, 1, 2, 4, 8, 8)],
)
@pytest.mark.parametrize("leaves", [8, 9, 12, 14])
def test_verify_shards_against_brute_force(shape, leaves):
    found = 0
    for tp in range(1, 5):
        expected = brute_force_attention(shape, leaves, tp)
        if expected is None:
            with pytest.raises(PlanError, match=f"TP={tp}, L={leaves}: attention"):
                model_layout(shape, leaves, tp)
            continue
        layout = model_layout(shape, leaves, tp)
        assert layout.attention == expected
        plain = brute_force_split(range(leaves + 1), tp, lambda lo, hi: hi - lo, lambda lo, hi: True)
        assert layout.mlp == layout.vocab == leaf_runs(shape.intermediate, leaves, tp) == plain
        found += 1
    assert found, "the sweep must contain legal splits"


@settings(max_examples=60)
@given(st.integers(1, 11), st.integers(1, 5), st.lists(st.integers(0, 3), min_size=12, max_size=12))
def test_verify_best_split_with_uneven_sizes(leaves, parts, weights):
    starts = list(itertools.accumulate(weights, initial=0))

    def size(lo, hi):
        return starts[hi] - starts[lo]

    def legal(lo, hi):
        return (lo + hi) % 5 != 4

    points = range(leaves + 1)
    assert best_split(points, parts, size, legal) == brute_force_split(points, parts, size, legal)


def test_verify_for_model_examples():
    plan = TreePlan.for_model(SMOLLM2, (1, 2, 3))
    assert plan.leaves == 12
    assert plan.layout(SMOLLM2, 2).heads == ((0, 6), (6, 9))
    plan = TreePlan.for_model(SMOLLM2, (1, 2, 3, 9))
    assert plan.leaves == 9
    assert plan.layout(SMOLLM2, 2).heads == ((0, 4), (4, 9))
    assert plan.layout(SMOLLM2, 2).kv_heads == ((0, 2), (1, 3)), "KV head 1 is replicated"
    assert plan.layout(SMOLLM2, 9).kv_heads == tuple((i // 3, i // 3 + 1) for i in range(9))
    for shape in (LLAMA3_8B, QWEN3_06B):
        for equal in (False, True):
            assert TreePlan.for_model(shape, (1, 2, 4, 8), equal=equal).leaves == 8


def test_verify_layout_covers_every_leaf_once():
    for tp in (1, 2, 3, 9):
        layout = TreePlan(leaves=9).layout(SMOLLM2, tp)
        for runs, end in ((layout.attention, 9), (layout.mlp, 9), (layout.vocab, 9), (layout.heads, 9)):
            assert [i for lo, hi in runs for i in range(lo, hi)] == list(range(end))


def test_verify_equal_shards():
    layout = TreePlan(leaves=8).layout(LLAMA3_8B, 8, equal=True)
    assert layout.heads == tuple((4 * r, 4 * r + 4) for r in range(8))
    assert layout.attention == layout.mlp == tuple((r, r + 1) for r in range(8))
    with pytest.raises(PlanError, match=r"rank 0 would hold q rows \[0, 288\), which cut a head"):
        TreePlan.for_model(SMOLLM2, (2,), equal=True)
    # 2 KV heads on 4 ranks: each rank's k/v rows are half of a head that is present there
    assert TreePlan(leaves=8).layout(ModelShape(8, 2, 32, 256, 512, 1000), 4, equal=True).kv_heads[1] == (0, 1)


def test_verify_fingerprint_covers_every_field():
    plan = TreePlan()
    others = {
        "leaves": replace(plan, leaves=9),
        "acc_dtype": replace(plan, acc_dtype="float64"),
        "wire_dtype": replace(plan, wire_dtype="bfloat16"),
        "grad_wire_dtype": replace(plan, grad_wire_dtype="bfloat16"),
        "leaf": replace(plan, leaf="mma:sm_90"),
    }
    assert {f.name for f in fields(plan)} == set(others)
    prints = [plan.fingerprint(), *(p.fingerprint() for p in others.values())]
    assert len(set(prints)) == len(prints)
    key = json.loads(plan.key())
    assert set(key) == {"order_version", *others}
    for p in (plan, *others.values()):
        assert TreePlan.from_key(p.key()) == p
    assert TreePlan(wire_dtype="float32") == plan, "one spelling of the default"


def test_verify_fingerprint_is_pinned():
    """A change here is a change of the order: raise ORDER_VERSION and say so under Bits in the CHANGELOG."""
    assert TreePlan().fingerprint() == "b1f80be28076eb13"


@pytest.mark.parametrize(
    ("fields_", "message"),
    [
        ({"leaves": 0}, r"leaves: expected an integer 1\.\.4096, got 0"),
        ({"leaves": 8.0}, "leaves: expected an integer"),
        ({"leaves": True}, "leaves: expected an integer"),
        ({"leaves": 5000}, "leaves: expected an integer"),
        ({"acc_dtype": "bfloat16"}, "acc_dtype: expected one of"),
        ({"wire_dtype": "float16"}, "wire_dtype: expected one of"),
        ({"acc_dtype": "float64", "wire_dtype": "bfloat16"}, "wire_dtype: expected one of"),
        ({"grad_wire_dtype": "int8"}, "grad_wire_dtype: expected one of"),
        ({"leaf": "mma"}, "tensor-core leaves name the architecture"),
        ({"leaf": "mma:sm_90", "acc_dtype": "float64"}, "accumulates in float32"),
        ({"leaf": "dot"}, "leaf: expected one of"),
    ],
)
def test_verify_bad_plans_are_refused(fields_, message):
    with pytest.raises(PlanError, match=message):
        TreePlan(**fields_)


@pytest.mark.parametrize(
    "key", ["", "{}", "[" * 100000, "8", '{"order_version":2,"leaves":8}', '{"order_version":1,"leafs":8}', "[1]"]
)
def test_verify_bad_keys_are_refused(key):
    with pytest.raises(PlanError, match=r"TreePlan\.from_key"):
        TreePlan.from_key(key)


def test_verify_for_model_names_the_cut_that_fails():
    with pytest.raises(
        PlanError, match=r"TP=16: by no L; first: TP=16, L=8: attention \(9 query heads.*expected TP <= 9"
    ) as error:
        TreePlan.for_model(SMOLLM2, (2, 16))
    assert "TP=2: served by L in" in str(error.value)
    with pytest.raises(PlanError, match="q cuts 72, 144"):
        TreePlan(leaves=8).layout(SMOLLM2, 2)
    with pytest.raises(PlanError, match="at least one TP size"):
        TreePlan.for_model(SMOLLM2, ())
    for sizes in (8, None, "12"):
        with pytest.raises(PlanError, match="tp_sizes: expected integers"):
            TreePlan.for_model(SMOLLM2, sizes)
    with pytest.raises(PlanError, match=r"it chooses leaves; .* \['leaves'\]"):
        TreePlan.for_model(SMOLLM2, (1,), leaves=8)
    for call in (lambda: TreePlan().cuts(1.5), lambda: TreePlan().layout(LLAMA3_8B, True)):
        with pytest.raises(PlanError, match="expected an integer"):
            call()
    with pytest.raises(PlanError, match="TP size: expected an integer >= 1"):
        TreePlan.for_model(SMOLLM2, (0,))


def test_verify_model_shape_reads_configs(tmp_path):
    config = {
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (config, tmp_path, str(tmp_path / "config.json"), {"text_config": config}):
        assert ModelShape.from_config(source) == SMOLLM2
    with pytest.raises(PlanError, match="lacks"):
        ModelShape.from_config({"hidden_size": 4})
    with pytest.raises(PlanError, match="found no file"):
        ModelShape.from_config(tmp_path / "nowhere")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "text.json").write_text("{")
    bad = [None, 7, object, [1], tmp_path / "list.json", tmp_path / "text.json", {**config, "num_attention_heads": 0}]
    bad += [{**config, "head_dim": 0}, {**config, "hidden_size": 577}, {**config, "num_key_value_heads": 0}]
    bad += [{**config, "num_experts": 8}, {**config, "kv_lora_rank": 512}, {**config, "vocab_size": 1.5}]
    for source in bad:
        with pytest.raises(PlanError, match="ModelShape"):
            ModelShape.from_config(source)

    class Config:
        def __init__(self, **fields):
            self.__dict__.update(fields)

    assert ModelShape.from_config(Config(text_config=Config(**config))) == SMOLLM2
    with pytest.raises(PlanError, match="kv_heads to divide heads"):
        ModelShape(9, 2, 64, 576, 1536, 49152)


def test_verify_empty_leaves_belong_to_a_run():
    """More leaves than q rows: the runs still cover every leaf."""
    tiny = ModelShape(heads=2, kv_heads=1, head_dim=2, hidden=4, intermediate=8, vocab=8)
    for leaves in range(1, 40):
        for tp in (1, 2):
            try:
                layout = TreePlan(leaves=leaves).layout(tiny, tp)
            except PlanError:
                assert tp == 2
                continue
            assert layout.attention[0][0] == 0 and layout.attention[-1][1] == leaves
    assert TreePlan(leaves=600).layout(SMOLLM2, 1).attention == ((0, 600),)


def test_verify_nodes_of_one_level() -> None:
    """One node of one level per rank: the tree over the leaves adds them as the tree over the ranks does (hashes)."""
    for world, level in itertools.product(range(1, 10), range(4)):
        width = 1 << level
        runs = [(rank * width, (rank + 1) * width) for rank in range(world)]
        assert is_node_per_rank(tuple(runs))
        nodes = [node for run in runs for node in tree.cover(*run)]
        values = [1000003 * rank + 17 for rank in range(world)]
        over_leaves = _C.hash_fold(values, _C.nodes_schedule([tuple(node) for node in nodes], world * width))
        assert over_leaves == _C.hash_fold(values, _C.run_schedule(0, world, world, True)), (world, level)
    for other in (
        [(0, 2), (2, 3)],
        [(0, 3), (3, 6)],
        [(0, 0), (0, 2)],
        [(2, 4), (0, 2)],
        [(1, 2), (2, 3)],
        [(0, 0)] * 2,
    ):
        assert not is_node_per_rank(tuple(other)), other
