"""The fingerprint of the weights that vLLM's ranks hold, to compare with a trainer's after a reload.

    digest(model, group) = tbik.fingerprint of the checkpoint's tensors, put together from the ranks' layers

It is read from the layers' own parameters, behind all loading, splitting and merging: qkv_proj is q, k and v again,
gate_up_proj gate and up; padding rows of the vocabulary do not count. Names are those of Hugging Face's model.
Errors: PlanError for a layer with parameters of another kind. Layout-invariant
(tests/test_rl.py::test_verify_vllm_holds_what_the_trainer_published).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tbik import fingerprint
from tbik.errors import PlanError
from tbik.integrity.pieces import Piece


def digest(model: Any, group: dist.ProcessGroup | None) -> str:
    """16 hexadecimal digits, the same on all ranks; collective over the tensor-parallel group."""
    return f"{fingerprint(dict(pieces(model)), group):016x}"


def pieces(model: Any) -> Iterator[tuple[str, Piece]]:
    """(name in the checkpoint, this rank's piece). A tied head is left out."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {key: parameter for key, parameter in module.named_parameters(recurse=False) if id(parameter) not in seen}
        seen |= {id(parameter) for parameter in own.values()}
        if not own or (isinstance(module, ParallelLMHead) and "weight" not in own):
            continue
        if isinstance(module, VocabParallelEmbedding):
            first, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
            local = own["weight"].data[: end - first]
            yield f"{name}.weight", Piece.box(local, (module.org_vocab_size, local.shape[1]), (first, 0))
        elif isinstance(module, QKVParallelLinear):
            yield from _qkv(name.removesuffix("qkv_proj"), module, own)
        elif isinstance(module, MergedColumnParallelLinear):
            if not name.endswith("gate_up_proj"):
                raise PlanError(f"weight_digest: {name}: expected gate_up_proj, got another merged layer")
            rows = [size // module.tp_size for size in module.output_sizes]
            for key, parameter in own.items():
                for part, local, whole in zip(
                    ("gate", "up"), torch.split(parameter.data, rows), module.output_sizes, strict=True
                ):
                    yield (
                        f"{name.removesuffix('gate_up_proj')}{part}_proj.{key}",
                        _rows_of(local, whole, module.tp_rank * local.shape[0]),
                    )
        elif isinstance(module, RowParallelLinear):
            local = own["weight"].data
            shape, offset = (local.shape[0], module.input_size), (0, module.tp_rank * local.shape[1])
            yield f"{name}.weight", Piece.box(local, shape, offset)
        elif isinstance(module, RoutedExperts):
            yield from _experts(name.rpartition(".experts")[0], module, own)
        else:
            for key, parameter in own.items():
                if not (type(module).__name__.endswith("Norm") or isinstance(module, GateLinear)):
                    raise PlanError(f"weight_digest: {name}.{key} belongs to a {type(module).__name__}, not known here")
                yield f"{name}.{key}", _rows_of(parameter.data, parameter.shape[0], 0)


def _qkv(prefix: str, module: Any, own: dict[str, Tensor]) -> Iterator[tuple[str, Piece]]:
    dim, q, kv = module.head_size, module.num_heads, module.num_kv_heads
    first_kv = module.tp_rank // module.num_kv_head_replicas * kv
    parts = (
        ("q", q, module.tp_rank * q, module.total_num_heads),
        ("k", kv, first_kv, module.total_num_kv_heads),
        ("v", kv, first_kv, module.total_num_kv_heads),
    )
    for key, parameter in own.items():
        locals_ = torch.split(parameter.data, [heads * dim for _, heads, _, _ in parts])
        for (part, _, first, total), local in zip(parts, locals_, strict=True):
            yield f"{prefix}{part}_proj.{key}", _rows_of(local, total * dim, first * dim)


def _experts(prefix: str, module: Any, own: dict[str, Tensor]) -> Iterator[tuple[str, Piece]]:
    """The stacks of all experts: gate_up_proj [E, 2I, H], gate before up, and down_proj [E, H, I]."""
    parallel = module.moe_config.moe_parallel_config
    gate_up, down = own["w13_weight"].data, own["w2_weight"].data
    (experts, _, hidden), columns = gate_up.shape, down.shape[2]
    inner, first = columns * parallel.tp_size, columns * parallel.tp_rank
    apart = Piece.box(gate_up.view(experts, 2, columns, hidden), (experts, 2, inner, hidden), (0, 0, first, 0))
    yield f"{prefix}.experts.gate_up_proj", replace(apart, shape=(experts, 2 * inner, hidden))
    yield f"{prefix}.experts.down_proj", Piece.box(down, (experts, hidden, inner), (0, 0, first))


def _rows_of(local: Tensor, rows: int, first: int) -> Piece:
    rest = tuple(local.shape[1:])
    return Piece.box(local, (rows, *rest), (first, *(0,) * len(rest)))
