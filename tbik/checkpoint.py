"""A training run on disk: whatever decides its next bits, to go on from in any other layout.

    save(folder, run, group)      torch distributed checkpoint of whole tensors under stock names, and manifest.json
    load(folder, run, group)      every rank reads its boxes, and what has arrived is compared with the manifest

    run = Run(model, optimizer, plan, data=sampler, scheduler=..., seed=...)

manifest.json: the items plan, data (position), step, rng, optimizer (form, settings of its groups), scheduler, versions
and, per tensor of model and optimizer, shape, dtype and fingerprint (ORDER.md F1). Fingerprints ignore the sharding,
so they are checked after resharding, in the memory that training goes on with.

Errors: PlanError naming the item that is missing or another one; IntegrityError naming the tensors whose bits are not
those that were saved, after which the model must not be used. TransportTimeout and TransportError as in
tbik.collectives, and where a rank is lost or cannot write: of a save that was broken off at any point nothing stands
under the folder's name, or all of it (tests/test_checkpoint.py::test_verify_a_rank_killed_in_a_save_leaves_no_half).
Bits: bytes move; layout-invariant (tests/test_checkpoint.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from tbik import ORDER_VERSION, __version__
from tbik.collectives import all_gather_bytes
from tbik.data import StepSampler
from tbik.errors import IntegrityError, PlanError, TransportError
from tbik.integrity.fingerprint import fingerprint_each
from tbik.optimizers import OptimizerForm
from tbik.plan import TreePlan
from tbik.weights import Box, Place, as_pieces, places

FORMAT = 1
MANIFEST = "manifest.json"
ITEMS = ("tensors", "plan", "optimizer", "data", "step", "rng", "scheduler", "seed", "versions")
"""What a manifest holds; a resume without one of them is refused."""


@dataclass
class Run:
    """What a training run consists of. seed: of counter-based dropout, None without. scheduler: or None.

    model: of plain, FSDP2 (DTensor) or tbik.parallelize parameters, or any mix. Errors: PlanError, at construction, for
    an optimizer that tbik.optimizers refuses or whose parameters are not the model's.
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    plan: TreePlan
    data: StepSampler
    scheduler: Any = None
    seed: int | None = None

    def __post_init__(self) -> None:
        where = "checkpoint.Run"
        if not isinstance(self.plan, TreePlan):
            raise PlanError(f"{where}: plan is a tbik.TreePlan, got {type(self.plan).__name__}")
        if not isinstance(self.data, StepSampler):
            raise PlanError(f"{where}: data is a tbik.data.StepSampler, got {type(self.data).__name__}")
        self.form = OptimizerForm.of(self.optimizer)
        self.places = places(self.model)
        known = {id(place.parameter): name for name, place in self.places.items()}
        self.groups: list[list[str]] = []
        for group in self.optimizer.param_groups:
            foreign = [p for p in group["params"] if id(p) not in known]
            if foreign:
                raise PlanError(
                    f"{where}: the optimizer has a parameter {list(foreign[0].shape)} that is not the model's; make "
                    "the optimizer after fully_shard and parallelize"
                )
            self.groups.append([known[id(p)] for p in group["params"]])


def save(folder: Path | str, run: Run, group: dist.ProcessGroup | None = None) -> Path:
    """Write the run into a new folder, which appears whole or not at all. Collective over `group`, all training ranks.

    Call it between steps: no gradients are stored. Errors: PlanError where a rank's random generators differ from rank
    0's (what draws from them depends on the layout), and for state that has no form on disk; TransportError where a
    rank is lost or its disk refuses.
    """
    folder = Path(folder)
    rank, size = _ranks(group)
    if folder.exists():
        raise PlanError(f"checkpoint.save: {folder} exists; expected a new folder")
    values = dict(_tensors(run))
    rng = _rng_state()
    for name, state in rng.items():
        _require_equal_over_ranks(f"random generators ({name})", state, group)
    fingerprints = fingerprint_each({name: as_pieces(place, of) for name, (place, of) in values.items()}, group)
    items: dict[str, Any] = {
        "tensors": {
            name: {
                "shape": list(place.shape),
                "dtype": str(of.dtype).removeprefix("torch."),
                "fingerprint": f"{fingerprints[name]:016x}",
            }
            for name, (place, of) in values.items()
        },
        "plan": run.plan.key(),
        "optimizer": _optimizer_item(run),
        "data": run.data.state_dict(),
        "step": run.data.step,
        "rng": rng,
        "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
        "seed": run.seed,
        "versions": _versions(),
    }
    _require_equal_over_ranks("items of the checkpoint", items, group)
    staging = folder.with_name(f".{folder.name}.partial")
    if rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    _meet(group)
    boxes = {name: _Boxes(place, of, counted=True) for name, (place, of) in values.items()}
    try:
        with _quiet():
            state_dict_saver.save(
                dict(boxes), checkpoint_id=staging, planner=_SavePlanner(), process_group=group, no_dist=size == 1
            )
    except (CheckpointException, RuntimeError) as error:  # the first is a BaseException, which few programs catch
        raise TransportError(
            f"checkpoint.save: rank {rank} of {size}: {folder} was not written: {_cause(error)}. No "
            "checkpoint has that name; earlier ones are as they were"
        ) from error
    if rank == 0:
        text = json.dumps({"format": FORMAT, "items": items, "sha256": _sha256(items)}, indent=1)
        _write_through(staging / MANIFEST, text + "\n")
        os.replace(staging, folder)  # the one step that makes it a checkpoint
    _meet(group)
    return folder


def load(
    folder: Path | str,
    run: Run,
    group: dist.ProcessGroup | None = None,
    *,
    other_versions: bool = False,
) -> int:
    """Read a checkpoint into the run, in place, on any layout; returns the number of the next step. Collective.

    other_versions: go on although torch or tbik is another version than when it was saved. Errors: see the module.
    """
    where = "checkpoint.load"
    folder = Path(folder)
    size = _ranks(group)[1]
    items = read_manifest(folder)
    _require_equal(where, "plan", items["plan"], run.plan.key())
    versions = _versions()
    for name in items["versions"] if other_versions else sorted({*items["versions"], *versions}):
        if name == "order" or not other_versions:
            _require_equal(where, f"versions: {name}", items["versions"].get(name), versions.get(name))
    _require_equal(where, "seed", items["seed"], run.seed)
    _require_equal(where, "scheduler", items["scheduler"] is not None, run.scheduler is not None)
    _require_equal(where, "step", items["step"], items["data"].get("next_sample", -1) // run.data.samples_per_step)
    position = run.data.next_sample
    run.data.load_state_dict(items["data"])
    run.data.next_sample = position  # set last, like everything that load changes
    _prepare_optimizer(where, items["optimizer"], run)
    values = dict(_tensors(run))
    _require_same_tensors(where, items["tensors"], values)
    _read(where, folder, values, group, size)
    _verify(where, items["tensors"], values, group)
    for group_settings, saved in zip(run.optimizer.param_groups, items["optimizer"]["groups"], strict=True):
        group_settings.update({key: _from_json(value) for key, value in saved["settings"].items()})
    if run.scheduler is not None:
        run.scheduler.load_state_dict(items["scheduler"])
    _set_rng_state(items["rng"])
    run.data.load_state_dict(items["data"])
    return int(items["step"])


def read_manifest(folder: Path | str) -> dict[str, Any]:
    """The items of a checkpoint. PlanError naming one that is missing, IntegrityError for a changed manifest."""
    where, path = "checkpoint.load", Path(folder) / MANIFEST
    if not path.is_file():
        raise PlanError(f"{where}: expected a checkpoint that tbik.checkpoint.save wrote, found no file {path}")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise IntegrityError(f"{where}: {path} is no JSON ({error}); the checkpoint is damaged") from error
    items = manifest.get("items") if isinstance(manifest, dict) else None
    found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
    if not isinstance(items, dict) or found != FORMAT:
        raise PlanError(f"{where}: {path}: expected format {FORMAT} with its items, got {found!r}")
    for name in ITEMS:
        if name not in items:
            raise PlanError(f"{where}: {path} lacks the item {name!r}; without it the next step has other bits")
    if manifest.get("sha256") != _sha256(items):
        raise IntegrityError(f"{where}: {path} does not have the SHA-256 it was written with; it was changed")
    return items


# --- tensors ----------------------------------------------------------------------------------------------------------


def _tensors(run: Run) -> Iterator[tuple[str, tuple[Place, Tensor]]]:
    """(name, (where it stands, this rank's tensor)) of weights and optimizer state."""
    for name, place in run.places.items():
        yield f"model.{name}", (place, place.parameter.detach())
    for name, place in run.places.items():
        for key, value in sorted(run.optimizer.state.get(place.parameter, {}).items()):
            if not isinstance(value, Tensor):
                continue
            if value.dim() == 0 and place.parameter.dim() != 0:
                yield f"optimizer.{name}.{key}", (Place(value, ()), value)
            elif value.shape == place.parameter.shape:
                yield f"optimizer.{name}.{key}", (place, value.detach())
            else:
                raise PlanError(
                    f"checkpoint: the optimizer's {key} of {name} is {list(value.shape)}, the parameter "
                    f"{list(place.parameter.shape)}; expected state per element, or one number"
                )


def _optimizer_item(run: Run) -> dict[str, Any]:
    """Form, settings and parameters of each group, and the keys of the state; tensors stand under "tensors"."""
    state: dict[str, dict[str, Any]] = {}
    for name, place in run.places.items():
        of = run.optimizer.state.get(place.parameter, {})
        state[name] = {
            key: {"tensor": str(value.dtype).removeprefix("torch."), "scalar": value.dim() == 0 < place.parameter.dim()}
            if isinstance(value, Tensor)
            else {"value": _to_json(f"optimizer state {key} of {name}", value)}
            for key, value in sorted(of.items())
        }
    return {
        "form": list(run.form),
        "state": state,
        "groups": [
            {
                "parameters": names,
                "settings": {
                    key: _to_json(f"optimizer setting {key}", value) for key, value in group.items() if key != "params"
                },
            }
            for group, names in zip(run.optimizer.param_groups, run.groups, strict=True)
        ],
    }


def _prepare_optimizer(where: str, item: Mapping[str, Any], run: Run) -> None:
    """Empty state of the shapes that were saved, to be read into. PlanError for another form or other groups."""
    _require_equal(where, "optimizer: form", item["form"], list(run.form))
    _require_equal(where, "optimizer: groups", [g["parameters"] for g in item["groups"]], run.groups)
    _require_equal(where, "optimizer: state", sorted(item["state"]), sorted(run.places))
    for name, entries in item["state"].items():
        parameter = run.places[name].parameter
        state: dict[str, Any] = {}
        for key, entry in entries.items():
            if "value" in entry:
                state[key] = _from_json(entry["value"])
            elif entry["scalar"]:
                state[key] = torch.zeros((), dtype=getattr(torch, entry["tensor"]))
            else:
                state[key] = torch.zeros_like(parameter.detach(), dtype=getattr(torch, entry["tensor"]))
        if state or parameter in run.optimizer.state:
            run.optimizer.state[parameter] = state


def _require_same_tensors(where: str, saved: Mapping[str, Any], values: Mapping[str, tuple[Place, Tensor]]) -> None:
    for name in sorted({*saved, *values}):
        if name not in saved:
            raise PlanError(f"{where}: the checkpoint lacks the tensor {name}")
        if name not in values:
            raise PlanError(f"{where}: the checkpoint has a tensor {name}, this run has none of that name")
        place, of = values[name]
        mine = [list(place.shape), str(of.dtype).removeprefix("torch.")]
        _require_equal(where, name, [saved[name]["shape"], saved[name]["dtype"]], mine)


def _read(
    where: str,
    folder: Path,
    values: Mapping[str, tuple[Place, Tensor]],
    group: dist.ProcessGroup | None,
    size: int,
) -> None:
    """Fill the tensors. IntegrityError naming the one that cannot be read."""

    def fill(names: Mapping[str, tuple[Place, Tensor]]) -> None:
        boxes = {name: _Boxes(place, of, counted=False) for name, (place, of) in names.items()}
        with _quiet():
            state_dict_loader.load(
                dict(boxes), checkpoint_id=folder, planner=_LoadPlanner(boxes), process_group=group, no_dist=size == 1
            )

    # CheckpointException is a BaseException; damaged files raise whatever the parser of that place raises
    damaged = (CheckpointException, RuntimeError, ValueError, KeyError, EOFError, OSError)
    try:
        fill(values)
        return
    except damaged as error:
        if size > 1 and isinstance(error, RuntimeError):  # what a rank meets in a file comes as CheckpointException
            raise TransportError(
                f"{where}: {folder}: the ranks could not agree on what to read: {_cause(error)}. The model holds "
                "a part of it; load again before going on"
            ) from error
        whole = error
    for name, value in values.items():
        try:
            fill({name: value})
        except damaged as error:
            raise IntegrityError(
                f"{where}: {folder}: {name} cannot be read: {_cause(error)}; the file is damaged or incomplete. The "
                "run must not go on"
            ) from error
    raise IntegrityError(f"{where}: {folder} cannot be read: {_cause(whole)}") from whole


def _verify(
    where: str,
    saved: Mapping[str, Any],
    values: Mapping[str, tuple[Place, Tensor]],
    group: dist.ProcessGroup | None,
) -> None:
    arrived = fingerprint_each({name: as_pieces(place, of) for name, (place, of) in values.items()}, group)
    wrong = [name for name in saved if f"{arrived[name]:016x}" != saved[name]["fingerprint"]]
    if wrong:
        shown = ", ".join(
            f"{name} ({arrived[name]:016x}, saved with {saved[name]['fingerprint']})" for name in wrong[:4]
        )
        raise IntegrityError(
            f"{where}: {len(wrong)} of {len(saved)} tensors do not have the bits that were saved: {shown}"
            f"{' ...' if len(wrong) > 4 else ''}. The file was changed or damaged; the run must not go on"
        )


class _Boxes:
    """One tensor of the checkpoint, as torch's planners see it: the boxes that this rank writes or reads."""

    def __init__(self, place: Place, of: Tensor, *, counted: bool) -> None:
        self._shape = torch.Size(place.shape)
        self._dtype = of.dtype
        self._boxes = {torch.Size(box.offset): box for box in place.boxes(of, counted=counted)}

    def view(self, index: MetadataIndex) -> Tensor:
        box: Box = self._boxes[index.offset if index.offset is not None else torch.Size([0] * len(self._shape))]
        return box.view

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offset, sizes=box.view.shape),
                    properties=TensorProperties(dtype=self._dtype),
                    size=self._shape,
                ),
            )
            for offset, box in self._boxes.items()
        ]

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offset, sizes=box.view.shape) for offset, box in self._boxes.items()]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].view(index)


class _LoadPlanner(DefaultLoadPlanner):
    """torch's own set-up drops values that are no tensors, so the boxes are kept here."""

    def __init__(self, boxes: dict[str, _Boxes]) -> None:
        super().__init__()
        self._boxes = boxes

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, boxes in self._boxes.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise ValueError(f"the file's own list has no tensor {name}")
            items += create_read_items_for_chunk_list(name, stored, boxes.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._boxes[index.fqn].view(index)


# --- everything else --------------------------------------------------------------------------------------------------


def _write_through(path: Path, text: str) -> None:
    """On the disk before anything is renamed, as torch's writer does with the tensors: power may fail in between."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _versions() -> dict[str, Any]:
    return {"order": ORDER_VERSION, "tbik": __version__, "torch": torch.__version__.split("+")[0]}


def _rng_state() -> dict[str, Any]:
    """The generators of torch (CPU), Python and numpy."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)  # a tuple with legacy=True
    return {
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
        "python": [version, list(words), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }


def _set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch"])), dtype=torch.uint8))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def _to_json(what: str, value: Any) -> Any:
    """Numbers, strings, None, lists of them, and tensors of one number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return {"tensor": value.item(), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [_to_json(what, item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise PlanError(f"checkpoint: {what} is a {type(value).__name__}; expected numbers, strings, None or lists of them")


def _from_json(value: Any) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))
    return tuple(_from_json(item) for item in value) if isinstance(value, list) else value


def _require_equal(where: str, what: str, saved: Any, mine: Any) -> None:
    if saved != mine:
        raise PlanError(f"{where}: {what}: the checkpoint has {_short(saved)}, this run {_short(mine)}")


def _require_equal_over_ranks(what: str, value: Any, group: dist.ProcessGroup | None) -> None:
    size = _ranks(group)[1]
    if size == 1:
        return
    mine = torch.frombuffer(bytearray.fromhex(_sha256(value)), dtype=torch.uint8)
    rows = all_gather_bytes(mine, group, "checkpoint.save")
    other = [r for r in range(size) if not torch.equal(rows[r], rows[0])]
    if other:
        raise PlanError(
            f"checkpoint.save: the {what} of ranks {other} are not those of rank 0; a checkpoint that another layout "
            "can resume has one for all ranks. Seed every rank alike (transformers.set_seed does), and let nothing "
            "draw by rank"
        )


def _meet(group: dist.ProcessGroup | None) -> None:
    """All ranks are here. TransportError after the group's timeout."""
    if _ranks(group)[1] > 1:
        all_gather_bytes(torch.zeros(1, dtype=torch.uint8), group, "checkpoint")


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that one process alone is one process alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _cause(error: BaseException) -> str:
    """What a rank raised, out of the exception in which torch's checkpoint wraps it."""
    where = ""
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        where = f"rank {rank}: "
    return f"{where}{type(error).__name__}: {_short(error)}"


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."
