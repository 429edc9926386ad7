"""Ordinary safetensors out of a sharded model, and where its shards stand in the whole.

    save_checkpoint(model, folder)       one tensor at a time, put together, written by rank 0 under its stock name
    pieces(model)                        {stock name: Piece}: tbik.fingerprint of it is that of the stock state dict

Errors: PlanError. Bits: bytes move, nothing is computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tbik.collectives import all_gather_bytes
from tbik.errors import PlanError
from tbik.huggingface.modules import CausalModel, Setting
from tbik.huggingface.parallelize import EXPERT_NAMES, Part, expert_tensors
from tbik.integrity.pieces import Piece, is_dtensor
from tbik.packing import FrozenWeight

SHARD_BYTES = 4 << 30


def pieces(model: torch.nn.Module, *, gradients: bool = False) -> dict[str, Piece]:
    """{name in a stock checkpoint: this rank's part of the parameter, or of its .grad}.

    Of a KV head that several ranks hold, the first answers; whole tensors that every rank holds are given by rank 0
    alone. Pass it to tbik.fingerprint with the model's group. A tied weight stands under both names.
    """
    setting, parts = _require(model)
    found = {}
    for name, part in parts.items():
        value = _value(model, name, part, gradients)
        if value is None:
            continue
        lo, hi, first = counted_range(setting, part)
        local = part.apart(value).narrow(part.apart_axis, lo, hi - lo)
        shape = part.apart(torch.empty(part.shape, device="meta")).shape
        offset = [0] * len(shape)
        offset[part.apart_axis] = first
        found[name] = replace(Piece.box(local, shape, offset), shape=part.shape)
    return found


def whole(model: torch.nn.Module, name: str, *, gradient: bool = False) -> Tensor:
    """The parameter (or its gradient) of a stock name, put together on every rank; all ranks make the same call."""
    setting, parts = _require(model)
    if name not in parts:
        raise PlanError(f"checkpoint.whole: the model has no parameter {name!r}")
    part = parts[name]
    value = _value(model, name, part, gradient)
    if value is None:
        raise PlanError(f"checkpoint.whole: {name} has no gradient")
    value = value.detach().contiguous()
    if part.held is None or setting.size == 1:
        return value
    value, axis = part.apart(value), part.apart_axis
    widths = [hi - lo for lo, hi in part.held]
    largest = list(value.shape)
    largest[axis] = max(widths)
    padded = value.new_zeros(largest)
    padded.narrow(axis, 0, value.shape[axis]).copy_(value)
    gathered = all_gather_bytes(padded.view(-1).view(torch.uint8), setting.group, "checkpoint")
    result = value.new_empty(part.shape)
    for rank, (lo, hi) in enumerate(part.held):
        own = gathered[rank].view(value.dtype).view(largest).narrow(axis, 0, hi - lo)
        part.apart(result).narrow(axis, lo, hi - lo).copy_(own)
    return result


def save_checkpoint(model: torch.nn.Module, folder: Path | str, *, write: bool = True) -> None:
    """config.json (with tbik_plan), generation_config.json and model*.safetensors, as stock transformers reads them.

    All ranks call it; rank 0 writes, unless `write` is False (another replica does). Every rank holds one whole tensor
    at a time. lm_head is left out if it is tied.
    """
    from safetensors.torch import save_file

    setting, parts = _require(model)
    config: Any = model.config
    left_out = {"lm_head.weight"} if config.tie_word_embeddings else set()
    names = [name for name in parts if name not in left_out]
    files: list[list[str]] = [[]]
    size = 0
    for name in names:
        parameter = model.get_parameter(parts[name].parameter)
        nbytes = torch.Size(parts[name].shape).numel() * parameter.element_size()
        if files[-1] and size + nbytes > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise PlanError(f"save_pretrained: expected a folder, found a file: {folder}")
    weight_map: dict[str, str] = {}
    total = 0
    writes = write and setting.rank == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    for number, members in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {}
        for name in members:
            value = whole(model, name)
            if writes:
                total += value.nbytes
                for stored, tensor in _as_stored(name, value, parts[name]):
                    tensors[stored] = tensor
                    weight_map[stored] = file
        if writes:
            save_file(tensors, str(folder / file), metadata={"format": "pt"})
    if not writes:
        return
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config.architectures = [type(model).__name__]
    config.dtype = next(model.parameters()).dtype
    config.save_pretrained(folder)
    cast(Any, model).generation_config.save_pretrained(folder)


def _as_stored(name: str, value: Tensor, part: Part) -> Iterator[tuple[str, Tensor]]:
    """What files have for a parameter: itself; for a stack of experts a matrix for each of them."""
    if not name.endswith(EXPERT_NAMES):
        yield name, value
        return
    for expert, rows in enumerate(value):
        for of, matrix in zip(expert_tensors(name), rows.chunk(part.stretches), strict=True):
            yield of.format(expert), matrix.contiguous()


def _require(model: torch.nn.Module) -> tuple[Setting, dict[str, Part]]:
    if not isinstance(model, CausalModel):
        raise PlanError(f"checkpoint: expected a model that tbik.parallelize made, got {type(model).__name__}")
    return model.setting, cast(Any, model).tbik_parts


def _value(model: torch.nn.Module, name: str, part: Part, gradient: bool) -> Tensor | None:
    parameter = model.get_parameter(part.parameter)
    if isinstance(parameter, FrozenWeight):
        raise PlanError(f"checkpoint: {name} is frozen; call tbik.unfreeze(model) first")
    value = parameter.grad if gradient else parameter.detach()
    if value is not None and is_dtensor(value):  # cut over the data ranks, which all make this call
        whole: Tensor = cast(Any, value).full_tensor()
        return whole
    return value


def counted_range(setting: Setting, part: Part) -> tuple[int, int, int]:
    """[lo, hi) of the local tensor's axis that this rank answers for, and where it begins in the whole."""
    if part.held is None or part.counted is None:
        return 0, part.shape[part.axis] if setting.rank == 0 else 0, 0
    (held, _), (lo, hi) = part.held[setting.rank], part.counted[setting.rank]
    return lo - held, hi - held, lo
