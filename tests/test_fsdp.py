"""tbik.fsdp: gradients, norms, losses and weights of a training run have one set of bits in every layout.

The model is a small Qwen3 with tied embeddings, fp32 master weights and bf16 products; the samples have different
lengths, some without a target. The reference of a run is one process with each sample alone (m = 1), the oracle of its
gradient the tree of tbik.reference over the samples. Stock torch, on the same data, has other bits in each layout.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bits_differ, assert_bitwise_equal
from cases import wide_exponents
from spawn import Pool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

pytest.importorskip("transformers")

import tbik
from tbik import TreePlan, fsdp, gradient_norm, reference
from tbik.errors import PlanError
from tbik.gradients import upstream
from tbik.ops import DropoutKey
from tbik.tree import Node

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
PLAN = TreePlan(leaves=12)
NARROW = TreePlan(leaves=12, grad_wire_dtype="bfloat16")
LENGTHS = (9, 1, 14, 6, 3, 2, 11, 5, 1, 7, 4, 12, 2, 8, 6, 3, 10, 1, 5, 13, 2, 4, 7, 3)
BATCH = len(LENGTHS)
Named = dict[str, Tensor]


class Layout(NamedTuple):
    """world ranks = replicas x shards x tp; each rank takes m samples at a time."""

    strategy: str = "single"
    world: int = 1
    m: int = 1
    tp: int = 1
    replicas: int = 1
    accumulation: str = "sharded"
    narrow: bool = False
    checkpointing: bool = False
    dropout: float = 0.0
    frozen: bool = False  # the first layer, and every norm
    bfloat16_parameters: bool = False  # gathered in bf16: fully_shard's MixedPrecisionPolicy

    def __str__(self) -> str:
        others = [
            f"{k}={v}" for k, v in self._asdict().items() if k not in ("strategy", "world", "m") and v != _PLAIN[k]
        ]
        return " ".join([f"{self.strategy} {self.world}", f"m={self.m}", *others])


_PLAIN = Layout()._asdict()


class Run(NamedTuple):
    """What a layout may not change: the first step's gradients, then per step norm, loss and weights."""

    gradients: Named
    norms: list[float]
    losses: list[float]
    digests: list[int]
    weights: Named
    most_buffers: int
    buffer_limit: int
    stored: int  # the most elements of covers after a micro-step
    own: int  # elements of this rank's shards, each use of a parameter counted


@functools.lru_cache(maxsize=2)
def _qwen3() -> Any:
    import transformers

    torch.manual_seed(7)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # livelier than the initial 0.02
            parameter.normal_(0, 0.3)
            if name.endswith("norm.weight"):
                parameter.add_(1)
    return model


def qwen3() -> Any:
    return copy.deepcopy(_qwen3()).train()


def batch_of(step: int, samples: range) -> Any:
    """Samples of the global batch of a step."""
    from tbik.huggingface.rows import SampleBatch

    ids = []
    for sample in samples:
        generator = torch.Generator().manual_seed(1000 * step + sample)
        length = LENGTHS[(sample + step) % BATCH]
        ids.append(torch.randint(0, SIZES["vocab_size"], (length,), generator=generator))
    return SampleBatch(ids, first_sample=samples.start, total_tokens=1)


TOTAL_TOKENS = sum(LENGTHS) - BATCH


def mesh_of(layout: Layout) -> tuple[Any, Any]:
    """(data mesh, tensor-parallel group)."""
    data = layout.world // layout.tp
    if layout.world == 1:
        return (None if layout.strategy == "single" else init_device_mesh("cpu", (1,))), None
    shape = {"dp": data, "tp": layout.tp}
    if layout.replicas > 1:
        shape = {"replicate": layout.replicas, "shard": data // layout.replicas, "tp": layout.tp}
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    names = tuple(name for name in shape if name != "tp")
    group = mesh["tp"].get_group() if layout.tp > 1 else None
    return mesh[names if len(names) > 1 else names[0]], group


def whole_state(tree: fsdp.DataParallel, gradient: bool = False) -> Named:
    """Weights or gradients by stock name, put together."""
    from tbik.huggingface.checkpoint import whole

    inner: Any = tree.inner
    if tree.strategy == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(tree.model, with_grads=gradient):
            return {name: whole(inner, name, gradient=gradient).clone() for name in inner.tbik_parts}
    return {name: whole(inner, name, gradient=gradient).clone() for name in inner.tbik_parts}


def start(layout: Layout, samples_per_step: int = BATCH) -> fsdp.DataParallel:
    mesh, tp = mesh_of(layout)
    plan = NARROW if layout.narrow else PLAN
    loaded = qwen3()
    loaded.config.attention_dropout = layout.dropout
    model = tbik.parallelize(loaded, tp, plan, compute_dtype=torch.bfloat16, residual_dropout=layout.dropout)
    if layout.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.0." not in name and "norm" not in name)
    if layout.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    data = layout.world // layout.tp
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if layout.bfloat16_parameters else None
    return fsdp.apply(
        model,
        mesh,
        plan,
        samples_per_step=samples_per_step,
        micro_steps=samples_per_step // data // layout.m,
        strategy=layout.strategy,  # type: ignore[arg-type]
        accumulation=layout.accumulation,  # type: ignore[arg-type]
        mp_policy=policy,
    )


def train(layout: Layout, steps: int, max_norm: float = 1.0) -> Run:
    tree = start(layout)
    optimizer = torch.optim.AdamW(tree.model.parameters(), lr=0.02)
    gradients: Named = {}
    norms, losses, digests = [], [], []
    stored = 0
    for step in range(steps):
        for _ in range(BATCH // (layout.world // layout.tp) // layout.m):
            with tree.micro_step() as micro:
                key = DropoutKey(seed=5, step=step, first_sample=micro.samples.start) if layout.dropout else None
                loss = tree.model(**batch_of(step, micro.samples).packed(), dropout=key).loss
                micro.report(loss)
                micro.backward(loss, upstream(TOTAL_TOKENS))
            covers = tree._covers._covers.values()
            stored = max(stored, sum(v.numel() for cover in covers for v in cover.values() if v is not None))
        tree.finish()
        if step == 0 and not layout.frozen:
            gradients = whole_state(tree, gradient=True)
        norms.append(tree.clip_grad_norm(max_norm))
        assert tree.loss_sum is not None
        losses.append(tree.loss_sum / TOTAL_TOKENS)
        optimizer.step()
        optimizer.zero_grad()
        digests.append(tbik.fingerprint(whole_state(tree)))
    buffers = (tree.most_buffers, tree.buffer_limit, stored, own_elements(tree))
    return Run(gradients, norms, losses, digests, whole_state(tree), *buffers)


def own_elements(tree: fsdp.DataParallel) -> int:
    uses = {name: 1 + (name == "model.embed_tokens.weight") for name in tree._names}
    if tree._unsharded:
        return sum(n * math.prod(tree._shards[i].shape) for i, n in enumerate(uses.values()))
    return sum(n * tree._shards[i].width for i, n in enumerate(uses.values()))


def train_on_rank(group: dist.ProcessGroup, layout: Layout, steps: int) -> Run:
    return train(layout, steps)


def require_same(found: Run, expected: Run, what: str) -> None:
    for name, value in expected.gradients.items():
        assert_bitwise_equal(found.gradients[name], value, f"{what}: gradient of {name}")
    assert [n.hex() for n in found.norms] == [n.hex() for n in expected.norms], what
    assert [n.hex() for n in found.losses] == [n.hex() for n in expected.losses], what
    for name, value in expected.weights.items():
        assert_bitwise_equal(found.weights[name], value, f"{what}: {name}")
    assert found.digests == expected.digests, what
    assert found.most_buffers <= found.buffer_limit, what
    assert found.stored <= found.buffer_limit * found.own, what


STEPS = 2


@pytest.fixture(scope="module")
def expected() -> Run:
    return train(Layout(), STEPS)


def test_verify_run_is_a_run(expected: Run) -> None:
    """Digests change every step, and the loss falls."""
    assert len(set(expected.digests)) == STEPS
    assert expected.losses[-1] < expected.losses[0]
    assert max(expected.norms) > 1.0  # so that clipping clips


def test_verify_first_gradient_is_the_oracle_tree(expected: Run) -> None:
    """node(0, B) over gradients of single samples, the two uses of the tied weight apart."""
    from tbik.gradients import GradientTree

    leaves: dict[str, list[Tensor]] = {}
    for sample in range(BATCH):
        model = tbik.parallelize(qwen3(), None, PLAN, compute_dtype=torch.bfloat16)
        with GradientTree(model, samples_per_step=1, micro_steps=1, plan=PLAN) as tree, tree.micro_step() as step:
            loss = model(**batch_of(0, range(sample, sample + 1)).packed()).loss
            step.backward(loss, upstream(TOTAL_TOKENS))
            for key, value in tree._arrived.items():
                name = tree._names[key.parameter]
                leaves.setdefault(name if key.use < 0 else f"{name}.{key.use}", []).append(value)
    roots = {
        name: reference.fold_covers([{Node(0, s): value} for s, value in enumerate(values)], BATCH)
        for name, values in leaves.items()
    }
    tied = "model.embed_tokens.weight"
    roots[tied] = reference.fan_in([roots.pop(f"{tied}.1"), roots.pop(f"{tied}.0")])
    flat_differs = 0
    model = tbik.parallelize(qwen3(), None, PLAN, compute_dtype=torch.bfloat16)
    for stock, part in model.tbik_parts.items():
        assert_bitwise_equal(expected.gradients[stock], roots[part.parameter], stock)
        if part.parameter in leaves:
            flat_differs += int((functools.reduce(torch.add, leaves[part.parameter]) != roots[part.parameter]).sum())
    assert flat_differs > 0  # negative control: one sample after the other is another sum


@pytest.mark.parametrize("m", [2, 4, 8])
def test_verify_micro_batches_on_one_rank(expected: Run, m: int) -> None:
    require_same(train(Layout(m=m), STEPS), expected, f"m={m}")


# --- ranks ------------------------------------------------------------------------------------------------------------


class Pools:
    """A pool of lasting ranks per world size and backend: a mesh needs a group of all ranks of its processes."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], Pool] = {}

    def run(self, function: Any, world: int, *args: Any, backend: str = "gloo", deadline: float = 240) -> list[Any]:
        key = (world, backend)
        if key not in self._pools:
            self.close()  # two cores: one pool at a time
            self._pools[key] = Pool(world, timeout=60.0, backend=backend)
        return self._pools[key].run(function, world, *args, deadline=deadline)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools = {}


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


# Ordered by world and backend, so that a pool serves several.
QUICK = [
    Layout("fsdp2", 1, 4),
    Layout("fsdp2", 2, 4),
    Layout("ddp", 2, 2, accumulation="unsharded"),
    Layout("fsdp1", 2, 2),
    Layout("fsdp2", 3, 2),
    Layout("fsdp1", 3, 4),
    Layout("fsdp2", 3, 4, accumulation="unsharded"),
    Layout("ddp", 3, 4),
    Layout("collected", 3, 4),
    Layout("fsdp2", 4, 2, tp=2),
    Layout("fsdp2", 4, 2, replicas=2),
]
LONG = [
    *(Layout("fsdp2", 2, m) for m in (1, 2)),
    Layout("fsdp2", 2, 4, tp=2),
    Layout("fsdp2", 3, 1),
    Layout("fsdp2", 4, 1),
    Layout("fsdp2", 4, 2),
    Layout("fsdp2", 4, 2, replicas=4),
    Layout("fsdp2", 4, 1, accumulation="unsharded", replicas=2),
    Layout("fsdp1", 4, 1),
    Layout("ddp", 4, 2),
    Layout("ddp", 4, 2, tp=2),
    Layout("collected", 4, 1, tp=2),
    Layout("collected", 4, 2, accumulation="unsharded"),
    Layout("fsdp2", 6, 4),
    Layout("fsdp2", 6, 2, replicas=3),
    Layout("fsdp2", 6, 2, accumulation="unsharded"),
    Layout("fsdp2", 6, 2, tp=2),
    Layout("fsdp2", 8, 1),
    Layout("fsdp2", 8, 1, tp=2),
    Layout("fsdp2", 8, 2, tp=4),
    Layout("fsdp2", 8, 1, tp=2, replicas=2),
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "layout", [*QUICK, *(pytest.param(layout, marks=pytest.mark.long) for layout in LONG)], ids=str
)
def test_verify_layouts(pools: Pools, expected: Run, layout: Layout) -> None:
    for rank, found in enumerate(pools.run(train_on_rank, layout.world, layout, STEPS)):
        require_same(found, expected, f"{layout}, rank {rank}")


@pytest.mark.multiprocess
@pytest.mark.parametrize("layout", [Layout("fsdp2", 4, 2, replicas=2), Layout("ddp", 4, 2)], ids=str)
def test_verify_tbik_backend(pools: Pools, expected: Run, layout: Layout) -> None:
    for rank, found in enumerate(pools.run(train_on_rank, layout.world, layout, STEPS, backend="tbik")):
        require_same(found, expected, f"{layout} under tbik, rank {rank}")


# --- what stock torch does --------------------------------------------------------------------------------------------


def stock_gradient(world: int, m: int, mesh: Any = None) -> Named:
    """The first step's gradients of the stock model under stock FSDP2, or under nothing on one rank."""
    from torch.distributed.fsdp import fully_shard

    model = qwen3()
    if mesh is not None:
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    rank = 0 if mesh is None else mesh.get_local_rank()
    for a in range(BATCH // world // m):
        first = (a * world + rank) * m
        batch = batch_of(0, range(first, first + m)).padded("right")
        del batch["num_items_in_batch"]
        labels = batch.pop("labels")
        logits = model(**batch).logits[:, :-1]
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        (total / TOTAL_TOKENS).backward()
    found = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        found[name] = grad.clone() if mesh is None else grad.full_tensor()
    return found


def stock_on_rank(group: dist.ProcessGroup, m: int) -> Named:
    return stock_gradient(group.size(), m, init_device_mesh("cpu", (group.size(),)))


@pytest.mark.multiprocess
def test_verify_stock_differs_in_each_layout(pools: Pools) -> None:
    """Negative control: the same data on the stock model; no two of these layouts have one set of bits."""
    runs = {
        "1 rank, m=1": stock_gradient(1, 1),
        "1 rank, m=4": stock_gradient(1, 4),
        "2 ranks, m=4": pools.run(stock_on_rank, 2, 4)[0],
        "3 ranks, m=4": pools.run(stock_on_rank, 3, 4)[0],
    }
    name = "model.layers.0.self_attn.q_proj.weight"
    for first, second in itertools.combinations(runs, 2):
        assert_bits_differ(runs[first][name], runs[second][name], f"{first} and {second}")


# --- scalars ----------------------------------------------------------------------------------------------------------


def exact_norm(gradients: Named) -> float:
    """sqrt of the exact sum of squares, by rational numbers and math.fsum."""
    squares = [value * value for g in gradients.values() for value in g.to(torch.float64).flatten().tolist()]
    by_fsum = math.fsum(squares)  # each square of an fp32 value is exact in fp64
    assert by_fsum == float(sum(map(Fraction, squares)))
    return math.sqrt(by_fsum)


def test_verify_norm_is_the_exact_sum(expected: Run) -> None:
    """Of this very run, and of wide exponents, subnormals, signed zeros and more elements than one chunk."""
    gradients = dict(expected.gradients)
    del gradients["lm_head.weight"]  # the same elements as the embedding
    assert expected.norms[0].hex() == exact_norm(gradients).hex()
    generator = torch.Generator().manual_seed(0)
    for seed in range(3):
        wide = wide_exponents((3, 1001), torch.float32, seed, 60)
        tiny = torch.randint(0, 1 << 24, (99,), generator=generator, dtype=torch.int32).view(torch.float32)
        cases = {"wide": wide, "tiny": tiny, "zeros": torch.tensor([0.0, -0.0]), "none": torch.empty(0)}
        assert gradient_norm.norm(cases.values()).hex() == exact_norm(cases).hex()
        assert gradient_norm.norm([tiny]).hex() == exact_norm({"tiny": tiny}).hex()
    long = wide_exponents((300_001,), torch.float32, 9, 20)  # several blocks of the kernel
    assert gradient_norm.norm([long]).hex() == exact_norm({"long": long}).hex()
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        assert gradient_norm.norm([torch.full(((1 << 22) + 7,), 3.0)]) == 3.0 * math.sqrt((1 << 22) + 7)
        torch.set_num_threads(before)
    large = torch.full((4,), torch.finfo(torch.float32).max)
    assert gradient_norm.norm([large]) == 2.0 * torch.finfo(torch.float32).max
    assert gradient_norm.norm([torch.tensor([1.0, math.inf])]) == math.inf
    assert math.isnan(gradient_norm.norm([torch.tensor([1.0, math.nan]), torch.tensor([math.inf])]))
    with pytest.raises(PlanError, match="fp32"):
        gradient_norm.norm([torch.ones(2, dtype=torch.bfloat16)])


def test_verify_fp32_norm_differs() -> None:
    """Negative control: torch's norm of the same gradients is another number, and depends on how they are cut."""
    wide = wide_exponents((4096,), torch.float32, 1, 4)
    exact = torch.tensor(gradient_norm.norm([wide]), dtype=torch.float64)
    flat = torch.linalg.vector_norm(wide).double()
    assert_bits_differ(exact, flat, "one norm in fp32")
    cut = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in wide.split(100)])).double()
    assert_bits_differ(flat, cut, "a norm of norms")


@pytest.mark.parametrize(("norm", "max_norm"), [(3.0, 1.0), (0.25, 1.0), (0.0, 0.0), (1e-9, 1e-9), (math.inf, 1.0)])
def test_verify_clip_coefficient(norm: float, max_norm: float) -> None:
    exact = min(1.0, max_norm / (norm + 1e-6))
    assert gradient_norm.clip_coefficient(norm, max_norm) == float(torch.tensor(exact, dtype=torch.float32))
    assert math.isnan(gradient_norm.clip_coefficient(math.nan, 1.0))
    with pytest.raises(PlanError, match="max_norm"):
        gradient_norm.clip_coefficient(1.0, -1.0)


def test_verify_clip_multiplies_every_gradient() -> None:
    tree = start(Layout(m=8), 8)
    with tree.micro_step() as micro:
        micro.backward(tree.model(**batch_of(0, micro.samples).packed()).loss, upstream(TOTAL_TOKENS))
    tree.finish()
    assert tree.loss_sum is None  # nothing was reported
    before = {name: p.grad.clone() for name, p in tree.inner.named_parameters() if p.grad is not None}
    norm = tree.clip_grad_norm(0.5)
    coefficient = gradient_norm.clip_coefficient(norm, 0.5)
    assert 0 < coefficient < 1
    for name, parameter in tree.inner.named_parameters():
        assert_bitwise_equal(parameter.grad, before[name] * torch.tensor(coefficient), name)


def test_verify_loss_is_a_token_mean() -> None:
    """Two tokens of loss 4 and eight of loss 1, in two micro-steps of unequal size: 1.6, not the mean of means 2.5."""

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, total: float) -> Tensor:
            return (self.weight * total).sum()

    tree = fsdp.apply(Scale(), samples_per_step=2, micro_steps=2, strategy="single")
    for total in (2 * 4.0, 8 * 1.0):
        with tree.micro_step() as micro:
            loss = tree.model(total)
            micro.report(loss)
            micro.backward(loss, upstream(10))
    tree.finish()
    assert tree.loss_sum is not None and tree.loss_sum / 10 == 1.6


def test_verify_unequal_token_counts_are_the_big_batch() -> None:
    """Eight samples of 1 to 14 tokens, one without a target: together, or in micro-steps of other token counts."""

    def gradients(m: int) -> tuple[float | None, Named]:
        tree = start(Layout(m=m), 8)
        for _ in range(8 // m):
            with tree.micro_step() as micro:
                loss = tree.model(**batch_of(0, micro.samples).packed()).loss
                micro.report(loss)
                micro.backward(loss, upstream(sum(LENGTHS[:8]) - 8))
        tree.finish()
        return tree.loss_sum, whole_state(tree, gradient=True)

    assert len({sum(LENGTHS[a : a + 2]) for a in range(0, 8, 2)}) == 4
    big = gradients(8)
    for m in (1, 2, 4):
        loss_sum, found = gradients(m)
        assert loss_sum == big[0]
        for name, value in big[1].items():
            assert_bitwise_equal(found[name], value, f"m={m}: {name}")
    # negative control: the mean of the micro-steps' means, which weighs their tokens unequally
    model = small()
    for first in range(0, 8, 2):
        batch = batch_of(0, range(first, first + 2)).packed()
        del batch["num_items_in_batch"]
        (model(**batch).loss / 4).backward()
    name = "model.layers.0.mlp.down_proj.weight"
    assert_bits_differ(dict(model.named_parameters())[name].grad, big[1][name], "mean of means")


# --- checkpointing, wire ----------------------------------------------------------------------------------------------


@pytest.mark.multiprocess
def test_verify_checkpointing(pools: Pools, expected: Run) -> None:
    require_same(train(Layout(m=8, checkpointing=True), STEPS), expected, "checkpointed, one rank")
    layout = Layout("fsdp2", 2, 4, checkpointing=True)
    for rank, found in enumerate(pools.run(train_on_rank, 2, layout, STEPS)):
        require_same(found, expected, f"{layout}, rank {rank}")


@pytest.mark.multiprocess
def test_verify_bfloat16_wire(pools: Pools, expected: Run) -> None:
    """grad_wire_dtype changes bits on one rank as on many."""
    narrow = train(Layout(m=2, narrow=True), STEPS)
    name = "model.layers.0.mlp.down_proj.weight"
    assert_bits_differ(narrow.gradients[name], expected.gradients[name], "grad_wire_dtype")
    for layout in (Layout("fsdp2", 2, 4, narrow=True), Layout("ddp", 3, 4, narrow=True)):
        for rank, found in enumerate(pools.run(train_on_rank, layout.world, layout, STEPS)):
            require_same(found, narrow, f"{layout}, rank {rank}")


@pytest.mark.long
@pytest.mark.multiprocess
def test_verify_dropout(pools: Pools, expected: Run) -> None:
    """Masks are functions of sample, position, feature and head: one run in every layout, recomputed layers too."""
    dropped = train(Layout(m=1, dropout=0.1), STEPS)
    name = "model.layers.1.mlp.up_proj.weight"
    assert_bits_differ(dropped.gradients[name], expected.gradients[name], "dropout")
    require_same(train(Layout(m=8, dropout=0.1, checkpointing=True), STEPS), dropped, "m=8, checkpointed")
    for layout in (
        Layout("fsdp2", 2, 4, dropout=0.1, checkpointing=True),
        Layout("fsdp1", 2, 2, dropout=0.1),
        Layout("ddp", 3, 4, dropout=0.1),
        Layout("fsdp2", 4, 2, tp=2, dropout=0.1),
    ):
        for rank, found in enumerate(pools.run(train_on_rank, layout.world, layout, STEPS)):
            require_same(found, dropped, f"{layout}, rank {rank}")
    tree = start(Layout(m=8, dropout=0.1), 8)
    with pytest.raises(PlanError, match="with dropout needs dropout=ops.DropoutKey"):
        tree.model(**batch_of(0, range(1)).packed())
    tree.model.eval()(**batch_of(0, range(1)).packed())  # nothing to drop


@pytest.mark.long
@pytest.mark.multiprocess
def test_verify_parameters_gathered_in_bfloat16(pools: Pools, expected: Run) -> None:
    """MixedPrecisionPolicy(param_dtype=bfloat16): gradients in fp32, the run of compute_dtype=bfloat16 in bits."""
    layouts = [Layout("fsdp2", world, m, bfloat16_parameters=True) for world, m in ((1, 1), (1, 8), (2, 4), (3, 2))]
    runs = [pools.run(train_on_rank, layout.world, layout, STEPS)[0] for layout in layouts]
    for layout, found in zip(layouts, runs):
        require_same(found, expected, str(layout))


@pytest.mark.multiprocess
def test_verify_frozen_parameters(pools: Pools, expected: Run) -> None:
    """What requires no gradient stays as it is, and the rest has one set of bits, in units frozen whole or in part."""
    alone = train(Layout(m=8, frozen=True), STEPS)
    before = whole_state(start(Layout()))
    moved = {name for name, value in alone.weights.items() if not torch.equal(value, before[name])}
    assert moved and not any("layers.0." in name or "norm" in name for name in moved)
    assert alone.norms != expected.norms and len(set(alone.digests)) == STEPS
    for layout in (
        Layout("fsdp2", 2, 4, frozen=True),
        Layout("fsdp2", 2, 2, frozen=True, accumulation="unsharded"),
        Layout("fsdp1", 2, 4, frozen=True),
        Layout("ddp", 2, 2, frozen=True),
    ):
        for rank, found in enumerate(pools.run(train_on_rank, layout.world, layout, STEPS)):
            require_same(found, alone, f"{layout}, rank {rank}")


def order_of_events(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """What arrives and what is exchanged in a backward, in time."""
    tree = start(Layout("fsdp2", group.size(), 4), 8)
    events = []
    arrive, fold = tree.arrive, tree.fold  # type: ignore[attr-defined]

    def record_arrival(parameter: Tensor, use_index: int, grad: Tensor) -> Tensor | None:
        events.append(("arrives", tree._names[tree._positions[id(parameter)]]))
        return arrive(parameter, use_index, grad)

    def record_exchange(name: str, rows: Tensor) -> Any:
        events.append(("is exchanged", name))
        return fold(name, rows)

    tree.arrive, tree.fold = record_arrival, record_exchange  # type: ignore[method-assign,attr-defined]
    with tree.micro_step() as micro:
        micro.backward(tree.model(**batch_of(0, micro.samples).packed()).loss, upstream(TOTAL_TOKENS))
    return events


@pytest.mark.multiprocess
def test_verify_exchange_overlaps_backward(pools: Pools) -> None:
    """The last layer's gradients are exchanged before the first layer's arrive, and each rank stores its part only."""
    for events in pools.run(order_of_events, 2):
        exchanged = events.index(("is exchanged", "model.layers.1"))
        first_layer = [i for i, (what, name) in enumerate(events) if what == "arrives" and "layers.0" in name]
        assert first_layer and exchanged < min(first_layer)
        assert events[-1] == ("is exchanged", "")


# --- refusals ---------------------------------------------------------------------------------------------------------


def small() -> Any:
    return tbik.parallelize(qwen3(), None, PLAN, compute_dtype=torch.bfloat16)


def test_verify_refusals_at_construction() -> None:
    apply = functools.partial(fsdp.apply, samples_per_step=8, strategy="single")
    with pytest.raises(PlanError, match="whose sums are not in the canonical order; use tbik.parallelize"):
        apply(torch.nn.Sequential(torch.nn.Linear(4, 4)))
    with pytest.raises(PlanError, match="m must be a power of two.*micro_steps that work: 3, 6, 12, 24"):
        apply(small(), samples_per_step=24, micro_steps=4)
    with pytest.raises(PlanError, match="strategy is one of"):
        apply(small(), strategy="zero3")
    with pytest.raises(PlanError, match="needs a mesh"):
        apply(small(), strategy="fsdp2")
    with pytest.raises(PlanError, match="the model was parallelized with"):
        apply(small(), None, TreePlan(leaves=6))
    with pytest.raises(PlanError, match="compute_dtype is for a Hugging Face model as loaded"):
        apply(small(), compute_dtype=torch.bfloat16)
    with pytest.raises(PlanError, match="accumulation"):
        apply(small(), accumulation="later")
    hooked = small()
    hooked.lm_head.weight.register_hook(lambda grad: grad)
    with pytest.raises(PlanError, match="gradient hook of somebody else"):
        apply(hooked)
    stock = qwen3().to(torch.float32)
    assert fsdp.apply(
        stock, None, PLAN, samples_per_step=8, strategy="single", compute_dtype=torch.bfloat16
    ).inner.setting


def refusals_on_rank(group: dist.ProcessGroup) -> dict[str, str]:
    """What -> the message, or "" if nothing was refused."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (group.size(),))
    found = {}

    def attempt(what: str, action: Any) -> None:
        try:
            action()
            found[what] = ""
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"

    def apply(model: Any = None, **arguments: Any) -> fsdp.DataParallel:
        model = small() if model is None else model
        return fsdp.apply(model, mesh, **{"samples_per_step": 8, "micro_steps": 4, **arguments})

    def step(tree: fsdp.DataParallel, m: int | None = None, step: int = 0) -> None:
        with tree.micro_step(m) as micro:
            micro.backward(tree.model(**batch_of(step, micro.samples).packed()).loss, upstream(TOTAL_TOKENS))

    attempt("reduce dtype", lambda: apply(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)))
    attempt("wrapped", lambda: apply(fully_shard(small(), mesh=mesh)))
    attempt("wrapped ddp", lambda: apply(DistributedDataParallel(small()), strategy="ddp"))
    compiled = small()
    compiled.model.layers[0].compile(backend="eager")
    bfloat16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    attempt("compiled bf16", lambda: apply(compiled, mp_policy=bfloat16))
    other = small()
    if group.rank():
        with torch.no_grad():
            other.model.norm.weight[3] += 1
    attempt("weights", lambda: apply(other))
    attempt("unequal micro-batches", lambda: step(apply(micro_steps=None), 1 + group.rank()))

    def foreign() -> None:
        tree = apply()
        tree.model.model.layers[0].set_requires_gradient_sync(False)
        step(tree)

    attempt("foreign", foreign)

    def foreign_reduce_scatter() -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        tree = apply()
        tree.model.model.layers[1].set_custom_reduce_scatter(DefaultReduceScatter())
        step(tree)

    attempt("foreign reduce-scatter", foreign_reduce_scatter)

    def foreign_hook(strategy: str) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        tree = apply(strategy=strategy)
        tree.model.register_comm_hook(None, allreduce_hook)
        step(tree)

    attempt("foreign ddp hook", lambda: foreign_hook("ddp"))
    attempt("foreign fsdp1 hook", lambda: foreign_hook("fsdp1"))
    tensor_parallel = tbik.parallelize(qwen3(), group, PLAN, compute_dtype=torch.bfloat16)
    attempt("fsdp1 tensor parallelism", lambda: apply(tensor_parallel, strategy="fsdp1"))
    attempt("fsdp1 accumulation", lambda: apply(strategy="fsdp1", accumulation="unsharded"))

    def compiled_later() -> None:
        tree = apply(mp_policy=bfloat16)
        tree.model.compile(backend="eager")
        step(tree)

    attempt("compiled later", compiled_later)
    dist.barrier()
    return found


@pytest.mark.multiprocess
def test_verify_refusals_on_ranks(pools: Pools) -> None:
    expected = {
        "reduce dtype": "PlanError.*reduce_dtype torch.bfloat16 would round every partial sum",
        "wrapped": "PlanError.*is wrapped already",
        "wrapped ddp": "PlanError.*is wrapped already",
        "compiled bf16": "PlanError.*compiled model with param_dtype=bfloat16",
        "weights": "IntegrityError.*model.norm.weight",
        "unequal micro-batches": "PlanError.*disagree about the samples of each rank.*1 on rank 0; 2 on rank 1",
        "foreign": "PlanError.*were not exchanged by tbik.*communication was replaced",
        "foreign reduce-scatter": "PlanError.*layers.1 were not exchanged by tbik.*communication was replaced",
        "foreign ddp hook": "RuntimeError.*register_comm_hook.*once",
        "foreign fsdp1 hook": "AssertionError.*communication hook is already registered",
        "fsdp1 tensor parallelism": 'PlanError.*"fsdp1" has no tensor parallelism',
        "fsdp1 accumulation": 'PlanError.*"fsdp1" has no unsharded accumulation',
        "compiled later": "PlanError.*compiled model with param_dtype=bfloat16",
    }
    for found in pools.run(refusals_on_rank, 2):
        assert found.keys() == expected.keys()
        for what, pattern in expected.items():
            assert re.match(pattern, found[what], re.DOTALL), f"{what}: {found[what] or 'not refused'}"
