"""tbik.fsdp: gradients, norms, losses and weights of a training run have one set of bits in every layout.

The model is a small Qwen3 with tied embeddings, fp32 master weights and bf16 products; the samples have different
lengths, some without a target. The reference of a run is one process with each sample alone (m = 1), the oracle of its
gradient the tree of tbik.reference over the samples. Stock torch, on the same data, has other bits in each layout.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bitwise_equal
from spawn import Pool
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

import tbik
from tbik import TreePlan, fsdp, reference
from tbik.gradients import upstream
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
    model = tbik.parallelize(qwen3(), tp, plan, compute_dtype=torch.bfloat16)
    if layout.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    data = layout.world // layout.tp
    return fsdp.apply(
        model,
        mesh,
        plan,
        samples_per_step=samples_per_step,
        micro_steps=samples_per_step // data // layout.m,
        strategy=layout.strategy,  # type: ignore[arg-type]
        accumulation=layout.accumulation,  # type: ignore[arg-type]
    )


def train(layout: Layout, steps: int, max_norm: float = 1.0) -> Run:
    tree = start(layout)
    optimizer = torch.optim.AdamW(tree.model.parameters(), lr=0.02)
    gradients: Named = {}
    norms, losses, digests = [], [], []
    for step in range(steps):
        for _ in range(BATCH // (layout.world // layout.tp) // layout.m):
            with tree.micro_step() as micro:
                loss = tree.model(**batch_of(step, micro.samples).packed()).loss
                micro.report(loss)
                micro.backward(loss, upstream(TOTAL_TOKENS))
        tree.finish()
        if step == 0:
            gradients = whole_state(tree, gradient=True)
        norms.append(tree.clip_grad_norm(max_norm))
        assert tree.loss_sum is not None
        losses.append(tree.loss_sum / TOTAL_TOKENS)
        optimizer.step()
        optimizer.zero_grad()
        digests.append(tbik.fingerprint(whole_state(tree)))
    return Run(gradients, norms, losses, digests, whole_state(tree), tree.most_buffers, tree.buffer_limit)


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
