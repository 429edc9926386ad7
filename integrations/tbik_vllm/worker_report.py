"""What a rank of vLLM says about itself: its plan, the share of each weight that it holds, the bytes it sent.

Loaded into vLLM's worker class by its own setting worker_extension_cls; `collective_rpc("tbik_report")` reads it.
Shares come from the layers' own sizes, not from tensors: packing replaces the weights after they are loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

# vLLM 0.32 on CPU runs AMX tile instructions in its attention without asking the kernel for them first: without oneDNN
# having asked by chance, a worker dies of SIGILL at its first request (seen on a Xeon with amx_bf16, Linux 6.18)
if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()

Piece = tuple[str, tuple[int, int], int]
"""(weight, the units [lo, hi) of it that this rank holds, their bytes)."""


class WorkerReport:
    """Mixin of vLLM's worker."""

    def tbik_report(self) -> dict[str, Any]:
        """rank; plan: fingerprint or None; shards: name -> ((lo, hi), bytes); bytes_sent since the last report.

        bytes_sent: what this rank gave to tbik's tensor-parallel sums.
        """
        import vllm

        worker: Any = self
        status = _status()
        model = worker.model_runner.get_model()
        tied = bool(getattr(worker.model_config.hf_text_config, "tie_word_embeddings", False))
        itemsize = worker.model_config.dtype.itemsize
        return {
            "rank": worker.rank,
            "plan": status.get("fingerprint"),
            "bytes_sent": status.get("bytes_sent", 0),
            "environment": {"engine": f"vllm {vllm.__version__}", "transport": "vllm's"},
            "logprobs_mode": worker.model_config.logprobs_mode,
            "shards": {name: [list(run), size] for name, run, size in pieces(model, itemsize, tied)},
        }

    def tbik_weights(self) -> str:
        """The fingerprint of the weights as they are now, of all ranks; collective. "unknown" where the plug-in is off.

        Without it vLLM's own CPU layers keep their weights packed.
        """
        from vllm.distributed import get_tp_group

        from tbik_vllm.weight_digest import digest

        if os.environ.get("TBIK") != "1":
            return "unknown"
        group = get_tp_group()
        worker: Any = self
        return digest(worker.model_runner.get_model(), group.cpu_group if group.world_size > 1 else None)


def _status() -> dict[str, Any]:
    """Of the plug-in in this process; empty where it is off."""
    if os.environ.get("TBIK") != "1":
        return {}
    from tbik_vllm.plugin import status

    return status()


def pieces(model: Any, itemsize: int, tied: bool) -> Iterator[Piece]:
    """The weights of a vLLM model as this rank holds them; biases and norms with them."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        LinearBase,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {
            parameter_name: parameter
            for parameter_name, parameter in module.named_parameters(recurse=False)
            if id(parameter) not in seen
        }
        seen |= {id(parameter) for parameter in own.values()}
        if isinstance(module, ParallelLMHead) and tied:
            continue
        if isinstance(module, VocabParallelEmbedding):
            size = module.num_embeddings_per_partition * module.embedding_dim * itemsize
            yield name, _share(module.tp_rank, module.tp_size), size
        elif isinstance(module, QKVParallelLinear):
            rank, row = module.tp_rank, module.input_size * itemsize
            heads, kv = module.num_heads, module.num_kv_heads
            first = rank // module.num_kv_head_replicas * kv
            yield f"{name}.q", (rank * heads, (rank + 1) * heads), heads * module.head_size * row
            for part in ("k", "v"):
                yield f"{name}.{part}", (first, first + kv), kv * module.head_size * row
        elif isinstance(module, ColumnParallelLinear):
            size = module.input_size * module.output_size_per_partition * itemsize
            yield name, _share(module.tp_rank, module.tp_size), size
        elif isinstance(module, RowParallelLinear):
            size = module.input_size_per_partition * module.output_size * itemsize
            yield name, _share(module.tp_rank, module.tp_size), size
        elif isinstance(module, RoutedExperts):  # w13 and w2
            parallel, columns = module.moe_config.moe_parallel_config, module.intermediate_size_per_partition
            size = 3 * module.local_num_experts * columns * module.hidden_size * itemsize
            yield name, _share(parallel.tp_rank, parallel.tp_size), size
        elif isinstance(module, LinearBase):
            yield name, (0, 1), module.input_size * module.output_size * itemsize
        else:
            for parameter_name, parameter in own.items():
                size = parameter.numel() * parameter.element_size()
                if size:
                    yield f"{name}.{parameter_name}", (0, 1), size


def _share(rank: int, size: int) -> tuple[int, int]:
    return (rank, rank + 1) if size > 1 else (0, 1)
