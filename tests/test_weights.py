"""tbik.weights: where the parameters of a sharded model stand, in every layout of TP, FSDP2 and both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from assertions import assert_bitwise_equal
from cases import wide_exponents
from spawn import Pool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers")

import tbik
from tbik import TreePlan, weights
from tbik.errors import PlanError
from tbik.integrity.fingerprint import fingerprint, fingerprint_each, text_hash

pytestmark = pytest.mark.multiprocess

PLAN = TreePlan(leaves=12)
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 97,
    "tie_word_embeddings": False,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {}),
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    # 24 columns of 12 leaves: uneven over 4 ranks with 3 KV heads, each of which some ranks share
    "experts": ("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
}
LAYOUTS = ((0, 1), (0, 2), (0, 3), (0, 4), (2, 2), (4, 1), (1, 4))  # FSDP2 ranks, or 0 without it; TP


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, timeout=120.0) as ranks:
        yield ranks


@functools.lru_cache(maxsize=4)
def config_of(kind: str) -> Any:
    import transformers

    prefix, fields = KINDS[kind]
    return getattr(transformers, f"{prefix}Config")(**{**SIZES, **fields})


def stock(kind: str) -> Any:
    """A stock model whose weights are a function of their names."""
    import transformers

    model = getattr(transformers, f"{KINDS[kind][0]}ForCausalLM")(config_of(kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(wide_exponents(parameter.shape, torch.float32, seed=text_hash(name) % 2**31, spread=8))
    return model


def sharded(kind: str, group: dist.ProcessGroup | None, shards: int) -> Any:
    """Over the group, or over a mesh of all ranks: `shards` of FSDP2, the rest TP."""
    if not shards:
        return tbik.parallelize(stock(kind), group, PLAN)
    mesh = init_device_mesh("cpu", (shards, dist.get_world_size() // shards), mesh_dim_names=("shard", "tp"))
    model = tbik.parallelize(stock(kind), mesh["tp"].get_group(), PLAN)
    fully_shard(model.model.layers[0], mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def digests(group: dist.ProcessGroup, kind: str, shards: int) -> dict[str, int]:
    return fingerprint_each(weights.pieces(sharded(kind, group, shards)), group)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_pieces_are_the_stock_parameters_in_every_layout(kind: str, pool: Pool) -> None:
    """The digest of every parameter, on every rank, is that of the unsharded one under its stock name."""
    expected = {name: fingerprint(parameter.detach()) for name, parameter in stock(kind).named_parameters()}
    for shards, tp in LAYOUTS:
        for rank, found in enumerate(pool.run(digests, max(shards, 1) * tp, kind, shards, deadline=240)):
            assert found == expected, f"FSDP {shards} x TP {tp}, rank {rank}"


def fill(group: dist.ProcessGroup, kind: str, shards: int) -> None:
    """Boxes are views: what is written through them stands where the sharding has it, on every rank."""
    model, expected = sharded(kind, group, shards), sharded(kind, group, shards)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    source = dict(stock(kind).named_parameters())
    for name, place in weights.places(model).items():
        for box in place.boxes():
            part = tuple(slice(o, o + n) for o, n in zip(box.offset, box.view.shape, strict=True))
            box.view.copy_(source[name].detach()[part])
    for (name, of), like in zip(model.named_parameters(), expected.parameters(), strict=True):
        mine, theirs = (t.to_local() if hasattr(t, "to_local") else t for t in (of.detach(), like.detach()))
        assert_bitwise_equal(mine, theirs, f"{name}, {shards} of FSDP, {group.size()} ranks")


@pytest.mark.parametrize("kind", KINDS)
def test_verify_boxes_are_where_the_shards_are(kind: str, pool: Pool) -> None:
    for shards, tp in ((0, 3), (2, 2), (0, 4)):
        pool.run(fill, max(shards, 1) * tp, kind, shards, deadline=240)


def without_stretches(group: dist.ProcessGroup) -> list[str]:
    """Gate and up taken for one stretch: the ranks' parts no longer make up the tensor."""
    model = sharded("experts", group, 0)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    place = weights.places(model)[name]
    right = {name: weights.as_pieces(place)}
    wrong = {name: weights.as_pieces(dataclasses.replace(place, stretches=1))}
    assert fingerprint(right, group) == fingerprint({name: dict(stock("experts").named_parameters())[name].detach()})
    with pytest.raises(PlanError, match="gate_up_proj") as error:
        fingerprint(wrong, group)
    return [str(error.value)]


def test_verify_one_stretch_is_refused(pool: Pool) -> None:
    assert pool.run(without_stretches, 2, deadline=120)


def test_verify_frozen_weights_are_refused() -> None:
    model = tbik.freeze(sharded("qwen2", None, 0))
    with pytest.raises(PlanError, match=r"tbik\.unfreeze"):
        weights.places(model)
