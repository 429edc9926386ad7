"""TreePlan: everything that can change a bit and is not fixed by ORDER_VERSION, and the shards a model gets under it.

    plan  = (leaves, acc_dtype, wire_dtype, grad_wire_dtype, leaf kind)          fingerprint = hash(plan, ORDER_VERSION)
    shard = run of leaves [lo, hi) per rank and contraction; rows [cut(lo), cut(hi)) of that contraction

Standard library only; dtypes are strings. Specification: ORDER.md, T6, T7, P1.
Bits: a plan is layout-invariant, i.e. no field depends on a world size (tests/test_plan.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tbik import tree
from tbik.errors import PlanError

Run = tuple[int, int]
"""Leaves [lo, hi)."""

ACC_DTYPES = ("float32", "float64")
LEAF_KINDS = ("fma", "amx", "mma:sm_80", "mma:sm_90", "mma:sm_100")
MAX_LEAVES = 4096
CANDIDATE_LEAVES = range(8, 65)
PREFERRED_GRANULE = 16
IMBALANCE_LIMIT = 1.5
ROUTED_MODELS = ("qwen3_moe",)
"""model_type of the mixtures of experts whose layers are laid out: `intermediate` is the length of one expert."""
FOREIGN_FIELDS = ("kv_lora_rank", "num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


@dataclass(frozen=True)
class TreePlan:
    """What two runs must share to give the same bits.

    leaves: number of leaves L of every contraction; any L >= 1, independent of the world size.
    acc_dtype: dtype of leaves and nodes; "float32" for bf16/fp16/fp32 operands, "float64" for fp64 operands.
    wire_dtype: None (= acc_dtype) or "bfloat16": rounds every leaf, node and root of trees that may cross ranks.
    grad_wire_dtype: the same for weight gradients, from the sample leaf upwards.
    leaf: "fma", the ascending chain of fused multiply-adds; "amx", for bf16 the order of Intel's AMX tiles (A14): the
        same bits on every CPU, fast on those; or "mma:<architecture>", tensor cores (ORDER.md A13): the same bits on
        that architecture only.

    Errors: PlanError for a value that no kernel obeys.
    """

    leaves: int = 8
    acc_dtype: str = "float32"
    wire_dtype: str | None = None
    grad_wire_dtype: str | None = None
    leaf: str = "fma"

    def __post_init__(self) -> None:
        if isinstance(self.leaves, bool) or not isinstance(self.leaves, int) or not 1 <= self.leaves <= MAX_LEAVES:
            raise PlanError(f"TreePlan.leaves: expected an integer 1..{MAX_LEAVES}, got {self.leaves!r}")
        if self.acc_dtype not in ACC_DTYPES:
            raise PlanError(f"TreePlan.acc_dtype: expected one of {ACC_DTYPES}, got {self.acc_dtype!r}")
        for name in ("wire_dtype", "grad_wire_dtype"):
            value = getattr(self, name)
            allowed = (None, self.acc_dtype) + (("bfloat16",) if self.acc_dtype == "float32" else ())
            if value not in allowed:
                raise PlanError(
                    f"TreePlan.{name}: expected one of {allowed} with acc_dtype={self.acc_dtype!r}, got {value!r}"
                )
            if value == self.acc_dtype:  # one spelling, so that equal plans compare equal
                object.__setattr__(self, name, None)
        if self.leaf not in LEAF_KINDS:
            raise PlanError(
                f"TreePlan.leaf: expected one of {LEAF_KINDS}, got {self.leaf!r}; tensor-core leaves name the "
                "architecture that they are promised for"
            )
        if self.leaf != "fma" and self.acc_dtype != "float32":
            raise PlanError(f"TreePlan.leaf: {self.leaf!r} accumulates in float32, got acc_dtype={self.acc_dtype!r}")

    def key(self) -> str:
        """The canonical text of the plan; `TreePlan.from_key` reads it back."""
        return json.dumps({"order_version": tree.ORDER_VERSION, **asdict(self)}, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_key(cls, key: str) -> TreePlan:
        """Inverse of `key`; refuses another ORDER_VERSION, unknown fields and text that is no key."""
        return _from_key(key)

    def fingerprint(self) -> str:
        """16 hexadecimal digits of SHA-256(key): equal if and only if the plans promise the same bits."""
        return hashlib.sha256(self.key().encode()).hexdigest()[:16]

    def cuts(self, length: int) -> tuple[int, ...]:
        """Leaf boundaries of a contraction of `length` (tree.cuts)."""
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise PlanError(f"TreePlan.cuts: length: expected an integer >= 0, got {length!r}")
        return tree.cuts(length, self.leaves)

    @classmethod
    def for_model(
        cls,
        config: ModelShape | Mapping[str, Any] | str | Path | Any,
        tp_sizes: Iterable[int],
        equal: bool = False,
        **fields: Any,
    ) -> TreePlan:
        """The plan whose L serves every TP size (ORDER.md T7); `fields` are passed on to the plan.

        config: a ModelShape, a Hugging Face config (object, mapping, folder or config.json).
        equal: every rank holds exactly K/W rows of each contraction (vLLM).
        Errors: PlanError naming, per TP size and contraction, the cut that fails.
        """
        shape = ModelShape.from_config(config)
        if not isinstance(tp_sizes, Iterable) or isinstance(tp_sizes, str):
            raise PlanError(f"TreePlan.for_model: tp_sizes: expected integers such as (1, 2, 4), got {tp_sizes!r}")
        unknown = set(fields) - {"acc_dtype", "wire_dtype", "grad_wire_dtype", "leaf"}
        if unknown:
            raise PlanError(f"TreePlan.for_model: it chooses leaves; unknown or fixed fields {sorted(unknown)}")
        sizes = sorted({_positive_int("TreePlan.for_model: TP size", tp) for tp in tp_sizes})
        if not sizes:
            raise PlanError("TreePlan.for_model: expected at least one TP size, got none")
        best: tuple[bool, int, int] | None = None
        for leaves in CANDIDATE_LEAVES:
            try:
                layouts = [model_layout(shape, leaves, tp, equal) for tp in sizes]
            except PlanError:
                continue
            if any(max(hi - lo for lo, hi in x.heads) > IMBALANCE_LIMIT * -(-shape.heads // x.tp) for x in layouts):
                continue
            coarse = all(tree.granule(length, leaves) >= PREFERRED_GRANULE for length in shape.contractions().values())
            # a single rank folds its root and sends no cover, so TP=1 does not count
            num_nodes = max((len(tree.cover(*run)) for x in layouts if x.tp > 1 for run in x.attention), default=1)
            key = (not coarse, num_nodes, leaves)
            best = key if best is None else min(best, key)
        if best is None:
            raise PlanError(_explain_no_leaves(shape, sizes, equal))
        return cls(leaves=best[2], **fields)

    def layout(self, config: ModelShape | Mapping[str, Any] | str | Path | Any, tp: int, equal: bool = False) -> Layout:
        """Which leaves, heads and rows each of `tp` ranks holds. Errors: PlanError naming the cut that fails."""
        _positive_int("TreePlan.layout: TP size", tp)
        return model_layout(ModelShape.from_config(config), self.leaves, tp, equal)


@dataclass(frozen=True)
class ModelShape:
    """The lengths of a decoder's contractions."""

    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _positive_int(f"ModelShape.{name}", value)
        if self.heads % self.kv_heads:
            raise PlanError(f"ModelShape: expected kv_heads to divide heads, got heads={self.heads}, {self.kv_heads=}")

    @classmethod
    def from_config(cls, config: ModelShape | Mapping[str, Any] | str | Path | Any) -> ModelShape:
        """Reads a Hugging Face config: an object, a mapping, a model folder or a config.json.

        Errors: PlanError for a missing or impossible length and for models whose attention or MLP is shaped otherwise.
        """
        if isinstance(config, ModelShape):
            return config
        where = "ModelShape.from_config"
        fields = _config_fields(where, config)
        if fields.get("text_config") is not None:
            fields = _config_fields(where, fields["text_config"])
        inner = "intermediate_size"
        if fields.get("model_type") in ROUTED_MODELS:
            inner = "moe_intermediate_size"
            if fields.get("mlp_only_layers") or fields.get("decoder_sparse_step", 1) != 1:
                raise PlanError(
                    f"{where}: mlp_only_layers={fields.get('mlp_only_layers')!r}, "
                    f"decoder_sparse_step={fields.get('decoder_sparse_step')!r}: some layers have a dense MLP, which "
                    "is not laid out by this version; expected experts in every layer"
                )
        for name in FOREIGN_FIELDS:
            if fields.get(name) and inner == "intermediate_size":
                raise PlanError(
                    f"{where}: {name}={fields[name]!r}: latent attention and mixtures of experts other than "
                    f"{', '.join(ROUTED_MODELS)} are not laid out by this version; expected a decoder such as Llama or "
                    "Qwen"
                )
        names = ("num_attention_heads", "hidden_size", inner, "vocab_size")
        missing = [name for name in names if fields.get(name) is None]
        if missing:
            raise PlanError(f"{where}: the config lacks {missing}; expected a decoder such as Llama or Qwen")
        for name in names:
            _positive_int(f"{where}: {name}", fields[name])
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        head_dim = fields.get("head_dim")
        if head_dim is None and hidden % heads:
            raise PlanError(f"{where}: without head_dim, heads must divide hidden_size, got {heads} and {hidden}")
        kv_heads = fields.get("num_key_value_heads")
        return cls(
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=hidden // heads if head_dim is None else head_dim,
            hidden=hidden,
            intermediate=fields[inner],
            vocab=fields["vocab_size"],
        )

    def contractions(self) -> dict[str, int]:
        """Every length that some tree reduces over, forward or backward."""
        return {
            "attention output": self.heads * self.head_dim,
            "keys/values": self.kv_heads * self.head_dim,
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "vocabulary": self.vocab,
        }


class Layout(NamedTuple):
    """What each rank of one TP size holds: half-open ranges, one per rank."""

    tp: int
    attention: tuple[Run, ...]  # leaves of the attention contractions (q/k/v rows, o columns)
    heads: tuple[Run, ...]  # query heads
    kv_heads: tuple[Run, ...]  # KV heads, replicated where two ranks need one
    mlp: tuple[Run, ...]  # leaves of gate/up rows, down columns
    vocab: tuple[Run, ...]  # leaves of embedding and lm_head rows


@lru_cache(maxsize=4096)
def model_layout(shape: ModelShape, leaves: int, tp: int, equal: bool = False) -> Layout:
    """ORDER.md T6 for the attention, MLP and vocabulary contractions of one TP size.

    With equal=True the vocabulary keeps the general split: engines with equal shards gather their logits.
    Errors: PlanError naming the contraction and the cut.
    """
    _positive_int("model_layout: TP size", tp)
    attention = _attention_runs(shape, leaves, tp, equal)
    q_cuts = tree.cuts(shape.heads * shape.head_dim, leaves)
    heads = tuple((q_cuts[lo] // shape.head_dim, q_cuts[hi] // shape.head_dim) for lo, hi in attention)
    return Layout(
        tp=tp,
        attention=attention,
        heads=heads,
        kv_heads=tuple(_kv_heads_of(shape, run) for run in heads),
        mlp=_plain_runs("intermediate", shape.intermediate, leaves, tp, equal),
        vocab=_plain_runs("vocabulary", shape.vocab, leaves, tp, equal=False),
    )


def leaf_runs(length: int, leaves: int, tp: int) -> tuple[Run, ...]:
    """The runs of a contraction without heads: smallest largest number of leaves, then fewest cover nodes, then T6."""
    return _plain_runs("contraction", length, leaves, tp, equal=False)


@lru_cache(maxsize=1024)
def is_node_per_rank(runs: tuple[Run, ...]) -> bool:
    """Whether every rank holds one node, all of one level, in the order of the ranks: the tree above is the ranks' own.

    node(0, L) splits at the largest power of two below L = W * 2^s, which is 2^s times the one below W (T2). So these
    nodes are added as one leaf per rank is (B1; tests/test_plan.py::test_verify_nodes_of_one_level).
    """
    width = runs[0][1] - runs[0][0]
    is_node = width > 0 and width & (width - 1) == 0
    return is_node and all(run == (i * width, (i + 1) * width) for i, run in enumerate(runs))


def best_split(
    points: Sequence[int], parts: int, size: Callable[[int, int], int], legal: Callable[[int, int], bool]
) -> tuple[Run, ...] | None:
    """The legal split of [points[0], points[-1]) into `parts` runs between points (ORDER.md T6), None if there is none.

    Order of preference: smallest largest size, fewest cover nodes on any rank, lexicographically largest sizes.
    size(lo, hi) grows with hi and shrinks with lo. O(points^2) steps per part at worst.
    """
    n = len(points)
    bounds = [-1, -1]  # largest size, largest number of nodes; -1 = not yet known

    def allowed(i: int, j: int) -> bool:
        lo, hi = points[i], points[j]
        if size(lo, hi) <= 0 or not legal(lo, hi):
            return False
        return bounds[1] < 0 or len(tree.cover(lo, hi)) <= bounds[1]

    costs: tuple[Callable[[int, int], int], ...] = (size, lambda lo, hi: len(tree.cover(lo, hi)))
    for which, cost in enumerate(costs):
        bound = _smallest_largest(points, parts, cost, size, bounds[0], allowed)
        if bound is None:
            return None
        bounds[which] = bound
    can_end: list[set[int]] = [{n - 1}]  # can_end[r]: points from which r runs reach the end
    for _ in range(parts - 1):
        goals = can_end[-1]
        can_end.append(
            {i for i in range(n) if any(j in goals and allowed(i, j) for j in _ends(points, i, size, bounds[0]))}
        )
    split, start = [], 0
    for remaining in range(parts - 1, -1, -1):
        ends = [j for j in _ends(points, start, size, bounds[0]) if j in can_end[remaining] and allowed(start, j)]
        end = max(ends, key=lambda j: size(points[start], points[j]))
        split.append((points[start], points[end]))
        start = end
    return tuple(split)


def _ends(points: Sequence[int], i: int, size: Callable[[int, int], int], limit: int) -> Iterable[int]:
    """The points after i whose run from i is no larger than `limit` (-1 = no limit)."""
    for j in range(i + 1, len(points)):
        if limit >= 0 and size(points[i], points[j]) > limit:
            return
        yield j


def _smallest_largest(
    points: Sequence[int],
    parts: int,
    cost: Callable[[int, int], int],
    size: Callable[[int, int], int],
    limit: int,
    allowed: Callable[[int, int], bool],
) -> int | None:
    reach: dict[int, int] = {0: 0}  # point -> smallest possible largest cost of the runs so far
    for part in range(parts):
        following: dict[int, int] = {}
        for i, so_far in reach.items():
            last = [len(points) - 1] if part == parts - 1 else None
            for j in last or _ends(points, i, size, limit):
                if limit >= 0 and size(points[i], points[j]) > limit:
                    continue
                worst = max(so_far, cost(points[i], points[j]))
                if worst < following.get(j, worst + 1) and allowed(i, j):
                    following[j] = worst
        reach = following
    return reach.get(len(points) - 1)


def _kv_heads_of(shape: ModelShape, heads: Run) -> Run:
    group = shape.heads // shape.kv_heads
    return heads[0] // group, -(-heads[1] // group)


def _attention_runs(shape: ModelShape, leaves: int, tp: int, equal: bool) -> tuple[Run, ...]:
    q_length, kv_length = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    q_cuts, kv_cuts = tree.cuts(q_length, leaves), tree.cuts(kv_length, leaves)
    where = f"TP={tp}, L={leaves}: attention ({shape.heads} query heads, {shape.kv_heads} KV heads of {shape.head_dim})"
    if tp > shape.heads:
        raise PlanError(f"{where}: expected TP <= {shape.heads}, one query head per rank at least")

    def size(lo: int, hi: int) -> int:
        return (q_cuts[hi] - q_cuts[lo]) // shape.head_dim

    def kv_present(lo: int, hi: int) -> bool:
        first, last = _kv_heads_of(shape, (q_cuts[lo] // shape.head_dim, q_cuts[hi] // shape.head_dim))
        if kv_cuts[lo] == kv_cuts[hi]:
            return True
        return first * shape.head_dim <= kv_cuts[lo] and kv_cuts[hi] <= last * shape.head_dim

    if equal:
        runs = _equal_runs(f"{where}, equal shards", q_cuts, tp)
        for rank, (lo, hi) in enumerate(runs):
            if q_cuts[lo] % shape.head_dim or q_cuts[hi] % shape.head_dim:
                raise PlanError(
                    f"{where}: rank {rank} would hold q rows [{q_cuts[lo]}, {q_cuts[hi]}), which cut a head"
                )
            if not kv_present(lo, hi):
                raise PlanError(
                    f"{where}: rank {rank} holds leaves [{lo}, {hi}), whose k/v rows [{kv_cuts[lo]}, {kv_cuts[hi]}) "
                    "leave the KV heads present there"
                )
        return runs
    points = [i for i in range(leaves + 1) if q_cuts[i] % shape.head_dim == 0]
    split = best_split(points, tp, size, kv_present)
    if split is None:
        head_cuts = _shorten([q_cuts[p] // shape.head_dim for p in points[1:-1]]) or "none"
        raise PlanError(
            f"{where}: no legal split; q cuts {_shorten(q_cuts[1:-1])}; at whole heads: {head_cuts}; "
            f"k/v cuts at {_shorten(kv_cuts[1:-1])} must stay inside the KV heads of the rank. "
            "TreePlan.for_model(config, tp_sizes) finds an L that fits"
        )
    return split


def _plain_runs(name: str, length: int, leaves: int, tp: int, equal: bool) -> tuple[Run, ...]:
    where = f"TP={tp}, L={leaves}: {name} ({length})"
    if equal:
        return _equal_runs(f"{where}, equal shards", tree.cuts(length, leaves), tp)
    split = best_split(range(leaves + 1), tp, lambda lo, hi: hi - lo, lambda lo, hi: True)
    if split is None:
        raise PlanError(f"{where}: expected TP <= {leaves}, one leaf per rank at least")
    return split


def _equal_runs(where: str, cuts: Sequence[int], tp: int) -> tuple[Run, ...]:
    length = cuts[-1]
    if length % tp:
        raise PlanError(f"{where}: {length} rows do not divide by {tp}")
    leaf_at = {cut: i for i, cut in enumerate(cuts)}
    for rank in range(1, tp):
        if length // tp * rank not in leaf_at:
            raise PlanError(f"{where}: row {length // tp * rank} (rank {rank}) is no leaf cut; cuts: {_shorten(cuts)}")
    ends = [0, *(leaf_at[length // tp * rank] for rank in range(1, tp)), len(cuts) - 1]
    return tuple(itertools.pairwise(ends))


def _explain_no_leaves(shape: ModelShape, sizes: Sequence[int], equal: bool) -> str:
    lines = [f"TreePlan.for_model: no L in 8..64 serves TP sizes {list(sizes)} at once. One by one:"]
    for tp in sizes:
        served, reason = [], ""
        for leaves in CANDIDATE_LEAVES:
            try:
                layout = model_layout(shape, leaves, tp, equal)
            except PlanError as error:
                reason = reason or str(error)
                continue
            largest, limit = max(hi - lo for lo, hi in layout.heads), IMBALANCE_LIMIT * -(-shape.heads // tp)
            if largest > limit:
                reason = reason or f"TP={tp}, L={leaves}: largest shard {largest} heads, limit {limit:g}"
            else:
                served.append(leaves)
        lines.append(f"  TP={tp}: " + (f"served by L in {_shorten(served)}" if served else f"by no L; first: {reason}"))
    return "\n".join(lines)


def _config_fields(where: str, config: Any) -> Mapping[str, Any]:
    if isinstance(config, (str, Path)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise PlanError(f"{where}: expected a model folder or a config.json, found no file {path}")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise PlanError(f"{where}: {path} is no JSON text: {error}") from error
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "__dict__") and not isinstance(config, type):
        # model_type stands in the class of a Hugging Face config
        return {"model_type": getattr(config, "model_type", None), **vars(config)}
    raise PlanError(f"{where}: expected a config object, a mapping, a folder or a file, got {type(config).__name__}")


def _shorten(values: Sequence[int]) -> str:
    text = [str(v) for v in values]
    return ", ".join(text if len(text) <= 12 else [*text[:10], "...", text[-1]])


def _positive_int(where: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{where}: expected an integer >= 1, got {value!r}")
    return value


@lru_cache(maxsize=256)
def _from_key(key: str) -> TreePlan:
    try:
        fields = json.loads(key)
        version = fields.pop("order_version")
        if version != tree.ORDER_VERSION:
            raise PlanError(
                f"TreePlan.from_key: ORDER_VERSION {version} differs from this library's {tree.ORDER_VERSION}; "
                "use the tbik version that wrote the plan"
            )
        return TreePlan(**fields)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"TreePlan.from_key: expected the text of TreePlan.key(), got {key!r} ({error})") from error
