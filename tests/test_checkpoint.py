"""tbik.checkpoint and tbik.weights: a run goes on in any other layout, and nothing that decides bits may be missing."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import wide_exponents
from hypothesis import given
from hypothesis import strategies as st
from long_cases import long_cases
from spawn import Pool, RankDied
from torch.distributed.checkpoint import filesystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tbik
from tbik import checkpoint, models, weights
from tbik.checkpoint import ITEMS, MANIFEST, Run
from tbik.data import StepSampler
from tbik.errors import IntegrityError, PlanError, TransportError
from tbik.integrity.fingerprint import fingerprint, text_hash

pytestmark = pytest.mark.multiprocess

PLAN = tbik.TreePlan()
SHAPES = {"matrix": (7, 5), "vector": (3,), "cube": (2, 3, 4), "number": (1,)}


class Small(torch.nn.Module):
    """Rows that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            self.register_parameter(name, torch.nn.Parameter(wide_exponents(shape, torch.float32, seed=i, spread=8)))


def make_small(shards: int, tp: int) -> torch.nn.Module:
    model = Small()
    if shards:
        fully_shard(model, mesh=init_device_mesh("cpu", (shards,)))
    return model


def make_qwen(folder: str, shards: int, tp: int) -> torch.nn.Module:
    """A parallelized model, TP inside FSDP2."""
    from transformers import AutoModelForCausalLM

    mesh = init_device_mesh("cpu", (max(shards, 1), tp), mesh_dim_names=("shard", "tp")) if shards or tp > 1 else None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plan = tbik.TreePlan.for_model(model.config, (1, 2, 4))
    group = mesh["tp"].get_group() if mesh is not None and tp > 1 else None
    tbik.parallelize(model, group, plan, compute_dtype=torch.bfloat16)
    if shards:
        assert mesh is not None
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    return model


def make_run(model: torch.nn.Module, kind: type = torch.optim.AdamW, **options: Any) -> Run:
    optimizer = kind(model.parameters(), **{"lr": 0.01, **options})
    data = StepSampler(20, samples_per_step=4, seed=3)
    return Run(model, optimizer, getattr(getattr(model, "setting", None), "plan", PLAN), data, seed=11)


def step(run: Run, number: int) -> None:
    """An optimizer step whose gradients are a function of name and step, the same in every layout."""
    for name, place in run.places.items():
        whole = wide_exponents(place.shape, torch.float32, seed=text_hash(f"{name} {number}") % 2**31, spread=10)
        grad = torch.zeros_like(place.parameter)
        for box in place.boxes(grad):
            box.view.copy_(whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.view.shape))])
        place.parameter.grad = grad
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.data.finish_step()


def digest_of(run: Run, group: dist.ProcessGroup | None) -> int:
    """Weights and optimizer state."""
    values = {n: weights.as_pieces(place, of) for n, (place, of) in checkpoint._tensors(run)}
    return fingerprint(values, group)


def train(
    group: dist.ProcessGroup | None,
    make: Callable[..., torch.nn.Module],
    arguments: tuple[Any, ...],
    folder: str,
    first: int,
    end: int,
    save_at: int | None,
    into: str | None = None,
) -> tuple[int, list[float]]:
    """Steps first..end-1, resumed from `folder` if first > 0; digest and some random numbers that follow."""
    torch.manual_seed(5)
    random.seed(5)
    run = make_run(make(*arguments))
    if first:
        torch.manual_seed(99)
        assert checkpoint.load(folder, run, group) == run.data.step == first
    drawn = []
    for number in range(first, end):
        step(run, number)
        drawn = [float(torch.rand(())), random.random()]
        if number + 1 == save_at:
            checkpoint.save(into or folder, run, group)
    return digest_of(run, group), drawn


# --- another layout ---------------------------------------------------------------------------------------------------


def chain(make: Any, arguments: tuple[Any, ...], layouts: list[tuple[int, int]], path: Path) -> None:
    """One step on one rank, then one on each layout, each resumed from the one before; as the straight run on one rank.

    layouts: (ranks of FSDP2, or 0 without it; TP), all of the same number of ranks.
    """
    alone = (*arguments, 0, 1)
    straight, drawn = train(None, make, alone, "", 0, len(layouts) + 2, None)
    train(None, make, alone, str(path / "1"), 0, 1, 1)
    with Pool(max(layouts[0][0], 1) * layouts[0][1], timeout=60.0) as ranks:
        for done, layout in enumerate(layouts, 1):
            folders = str(path / f"{done}"), str(path / f"{done + 1}")
            ranks.run(train_between, ranks.world, make, (*arguments, *layout), folders, done)
    done = len(layouts) + 1
    assert train(None, make, alone, str(path / f"{done}"), done, done + 1, None) == (straight, drawn)


def train_between(
    group: dist.ProcessGroup, make: Any, arguments: tuple[Any, ...], folders: tuple[str, str], done: int
) -> None:
    train(group, make, arguments, folders[0], done, done + 1, done + 1, folders[1])


def test_verify_fsdp2_goes_on_with_other_ranks(tmp_path: Path) -> None:
    chain(make_small, (), [(3, 1)], tmp_path)


@pytest.mark.long
def test_verify_any_layout_goes_on_as_any_other(tmp_path: Path) -> None:
    folder = models.random_model(
        "qwen3", tmp_path / "qwen3", num_hidden_layers=1, hidden_size=64, intermediate_size=96, vocab_size=130,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    chain(make_qwen, (str(folder),), [(2, 2), (0, 4), (4, 1), (1, 4)], tmp_path)


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "NAdam", "Rprop", "RMSprop", "ASGD", "Adadelta"])
def test_verify_the_state_of_other_optimizers(kind: str, tmp_path: Path) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    run = make_run(Small(), getattr(torch.optim, kind), **options)
    for number in range(2):
        step(run, number)
    checkpoint.save(tmp_path / "run", run)
    step(run, 2)
    again = make_run(Small(), getattr(torch.optim, kind), **options)
    assert checkpoint.load(tmp_path / "run", again) == 2
    step(again, 2)
    assert digest_of(again, None) == digest_of(run, None)


# --- what may not be missing ------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run = make_run(Small())
    step(run, 0)
    return checkpoint.save(tmp_path / "run", run)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest["items"])
    manifest["sha256"] = checkpoint._sha256(manifest["items"])
    (folder / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("item", ITEMS)
def test_verify_a_resume_without_an_item_fails_with_its_name(item: str, saved: Path) -> None:
    rewrite(saved, lambda items: items.pop(item))
    with pytest.raises(PlanError, match=f"lacks the item '{item}'"):
        checkpoint.load(saved, make_run(Small()))


@pytest.mark.parametrize("tensor", ["model.matrix", "optimizer.cube.exp_avg", "optimizer.vector.step"])
def test_verify_a_resume_without_a_tensor_fails_with_its_name(tensor: str, saved: Path) -> None:
    def without(items: dict[str, Any]) -> None:
        del items["tensors"][tensor]

    rewrite(saved, without)
    with pytest.raises(PlanError, match=tensor):
        checkpoint.load(saved, make_run(Small()))


@pytest.mark.parametrize("lost", ["data", "scheduler", "seed", "plan", "form", "versions", "settings"])
def test_verify_a_run_that_is_another_one_is_refused(lost: str, saved: Path) -> None:
    run = make_run(Small(), foreach=lost == "form")
    if lost == "data":
        run.data.seed = 4
    if lost == "scheduler":
        run.scheduler = torch.optim.lr_scheduler.ConstantLR(run.optimizer)
    if lost == "seed":
        run.seed = 12
    if lost == "plan":
        run.plan = tbik.TreePlan(leaves=9)
    if lost == "versions":
        rewrite(saved, lambda items: items["versions"].update(torch="1.0"))
    if lost == "settings":
        rewrite(saved, lambda items: items["optimizer"]["groups"][0]["parameters"].pop())
    named = {"data": "seed = 3", "form": "AdamW.*foreach", "versions": "versions: torch", "settings": "groups"}
    with pytest.raises(PlanError, match=named.get(lost, lost)):
        checkpoint.load(saved, run)
    if lost == "versions":
        assert checkpoint.load(saved, run, other_versions=True) == 1


def test_verify_a_scheduler_and_changed_settings_come_back(tmp_path: Path) -> None:
    def scheduled() -> Run:
        run = make_run(Small())
        run.scheduler = torch.optim.lr_scheduler.LinearLR(run.optimizer, total_iters=10)
        return run

    run = scheduled()
    for number in range(3):
        step(run, number)
        run.scheduler.step()
    checkpoint.save(tmp_path / "run", run)
    again = scheduled()
    checkpoint.load(tmp_path / "run", again)
    for of in (run, again):
        step(of, 3)
        of.scheduler.step()
        step(of, 4)
    assert again.optimizer.param_groups[0]["lr"] == run.optimizer.param_groups[0]["lr"]
    assert digest_of(again, None) == digest_of(run, None)


# --- damage -----------------------------------------------------------------------------------------------------------


def places_in_file(folder: Path) -> dict[str, tuple[Path, int, int]]:
    """{tensor: (file, first byte, length)} as torch's metadata says."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(folder).read_metadata()
    return {
        index.fqn: (folder / info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
    }


@pytest.mark.parametrize("name", ["model.matrix", "optimizer.cube.exp_avg_sq"])
def test_verify_a_flipped_byte_is_refused_naming_the_tensor(name: str, saved: Path) -> None:
    """The bytes of its values are found in the file, and one bit of them is flipped."""
    run = make_run(Small())
    checkpoint.load(saved, run)
    values = dict(checkpoint._tensors(run))[name][1].flatten().numpy().tobytes()
    file, offset, length = places_in_file(saved)[name]
    data = bytearray(file.read_bytes())
    at = data.index(values, offset, offset + length) + 5
    data[at] ^= 0x10
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match=name):
        checkpoint.load(saved, make_run(Small()))


def test_verify_any_flipped_byte_of_a_file_is_refused_or_harmless(saved: Path) -> None:
    """Headers and padding included: the load raises, or the weights are those that were saved."""
    run = make_run(Small())
    checkpoint.load(saved, run)
    expected = digest_of(run, None)
    file, offset, length = places_in_file(saved)["model.cube"]
    data = file.read_bytes()
    refused = 0
    for at in range(offset, offset + length, 37):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
        run = make_run(Small())
        try:
            checkpoint.load(saved, run)
        except IntegrityError as error:
            assert "model.cube" in str(error)
            refused += 1
        else:
            assert digest_of(run, None) == expected
    assert refused


def test_verify_a_changed_manifest_and_a_lost_file_are_refused(saved: Path) -> None:
    text = (saved / MANIFEST).read_text()
    (saved / MANIFEST).write_text(text.replace('"step": 1', '"step": 2'))
    with pytest.raises(IntegrityError, match="SHA-256"):
        checkpoint.load(saved, make_run(Small()))
    (saved / MANIFEST).write_text(text)
    for file in saved.glob("*.distcp"):
        file.unlink()
    with pytest.raises(IntegrityError, match=r"model\.matrix cannot be read"):
        checkpoint.load(saved, make_run(Small()))
    with pytest.raises(PlanError, match="found no file"):
        checkpoint.load(saved / "nowhere", make_run(Small()))


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 2, "items": {}}', '{"format": 1, "items": 3}', "17"])
def test_verify_another_format_is_refused(content: str, saved: Path) -> None:
    (saved / MANIFEST).write_text(content)
    with pytest.raises(PlanError, match="expected format 1"):
        checkpoint.load(saved, make_run(Small()))
    (saved / MANIFEST).write_text(content[:-1] + "\x00")
    with pytest.raises(IntegrityError, match="damaged"):
        checkpoint.load(saved, make_run(Small()))


def test_verify_a_damaged_list_of_files_is_refused_or_harmless(saved: Path) -> None:
    """torch's own metadata, byte after byte: the load raises, or what has arrived is what was saved."""
    run = make_run(Small())
    checkpoint.load(saved, run)
    expected = digest_of(run, None)
    file = saved / ".metadata"
    data = file.read_bytes()
    refused = 0
    for at in range(0, len(data), max(1, len(data) // 60)):
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x15]) + data[at + 1 :])
        run = make_run(Small())
        try:
            checkpoint.load(saved, run)
        except IntegrityError:
            refused += 1
        else:
            assert digest_of(run, None) == expected
    assert refused


def test_verify_an_interrupted_save_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the tensors and the manifest; the next save is whole."""

    def stop(*arguments: Any) -> None:
        raise KeyboardInterrupt

    run = make_run(Small())
    step(run, 0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoint.os, "replace", stop)
        checkpoint.save(tmp_path / "run", run)
    with pytest.raises(PlanError, match="found no file"):
        checkpoint.load(tmp_path / "run", make_run(Small()))
    checkpoint.save(tmp_path / "run", run)
    again = make_run(Small())
    assert checkpoint.load(tmp_path / "run", again) == 1 and digest_of(again, None) == digest_of(run, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


KILLED: dict[str, tuple[int, str, str]] = {
    # point: (the rank that is killed, before which operation, on a path that ends so)
    "before rank 0's tensors": (0, "open", "__0_0.distcp"),
    "before rank 1's tensors": (1, "open", "__1_0.distcp"),
    "inside rank 0's tensors": (0, "write", ""),
    "inside rank 1's tensors": (1, "write", ""),
    "between tensors and their list": (0, "open", ".metadata.tmp"),
    "inside the list": (0, "half", ".metadata.tmp"),
    "between list and manifest": (0, "open", MANIFEST),
    "inside the manifest": (0, "half", MANIFEST),
    "before the folder has its name": (0, "os.rename", ".partial"),
    "after the folder has its name": (0, "replaced", ""),
    "rank 1 when all is written": (1, "returned", ""),
}
WHOLE = ("after the folder has its name", "rank 1 when all is written")


def _die_at(operation: str, end: str) -> None:
    """SIGKILL to this process before that operation of the save; "half": when half of the file is written."""

    def die(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def after(function: Any) -> Any:
        return lambda *arguments, **options: (function(*arguments, **options), die())

    def half_a_tensor(value: Any, stream: Any) -> None:
        whole = io.BytesIO()
        save(value, whole)
        stream.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        stream.flush()
        die()

    save = torch.save
    if operation == "write":
        filesystem.torch.save = half_a_tensor
    elif operation == "replaced":
        os.replace = after(os.replace)
    elif operation == "returned":
        checkpoint.state_dict_saver.save = after(checkpoint.state_dict_saver.save)
    elif operation == "half" and end == MANIFEST:
        # everything after the file is whole is the rename, so half of it and no rename is what a kill leaves
        sys.addaudithook(
            lambda event, args: (
                _cut_and(die, Path(str(args[0])) / MANIFEST)
                if event == "os.rename" and str(args[0]).endswith(".partial")
                else None
            )
        )
    elif operation == "half":
        sys.addaudithook(
            lambda event, args: (
                _cut_and(die, Path(str(args[0]))) if event == "os.rename" and str(args[0]).endswith(end) else None
            )
        )
    else:
        sys.addaudithook(lambda event, args: die() if event == operation and str(args[0]).endswith(end) else None)


def _cut_and(die: Callable[[], None], file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)
    die()


def _save_and_die(group: dist.ProcessGroup, folder: str, victim: int, operation: str, end: str) -> None:
    torch.manual_seed(5)
    random.seed(5)
    run = make_run(make_small(2, 1))
    step(run, 0)
    checkpoint.save(Path(folder) / "1", run, group)
    step(run, 1)
    if group.rank() == victim:
        _die_at(operation, end)
    checkpoint.save(Path(folder) / "2", run, group)


SHORT = ("inside rank 1's tensors", "inside the manifest", "before the folder has its name")


@pytest.mark.parametrize("point", [*SHORT, *long_cases(point for point in KILLED if point not in SHORT)])
def test_verify_a_rank_killed_in_a_save_leaves_no_half(point: str, tmp_path: Path) -> None:
    """The checkpoint before loads; the one that was broken off is refused by name, or whole where it has its name."""
    victim, operation, end = KILLED[point]
    run = make_run(Small())
    step(run, 0)
    first = digest_of(run, None)
    step(run, 1)
    second = digest_of(run, None)

    def loaded(name: str) -> tuple[int, int]:
        again = make_run(Small())
        return checkpoint.load(tmp_path / name, again), digest_of(again, None)

    with Pool(2) as ranks:
        results = ranks.outcomes(_save_and_die, 2, str(tmp_path), victim, operation, end, grace=20.0)
    assert isinstance(results[victim].error, RankDied), results[victim]
    other = results[1 - victim].error
    assert isinstance(other, TransportError) and "checkpoint" in str(other), results[1 - victim]
    assert loaded("1") == (1, first)
    if point in WHOLE:
        assert loaded("2") == (2, second)
        return
    with pytest.raises(PlanError, match="found no file .*2/manifest.json"):
        loaded("2")
    # what lies beside it, under a name that nobody gave: refused, or all there
    half = ".2.partial"
    if point == "before the folder has its name":
        assert loaded(half) == (2, second)
    else:
        refusal = (IntegrityError, "manifest.json is no JSON") if end == MANIFEST and operation == "half" else None
        kind, named = refusal or (PlanError, "found no file .*manifest.json")
        with pytest.raises(kind, match=named):
            loaded(half)
    again = make_run(Small())
    checkpoint.load(tmp_path / "1", again)
    step(again, 1)
    checkpoint.save(tmp_path / "2", again)
    assert loaded("2") == (2, second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def _disk_full_on_rank_1(group: dist.ProcessGroup, folder: str) -> str:
    torch.manual_seed(5)
    random.seed(5)
    run = make_run(make_small(2, 1))

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TransportError) as caught:
        if group.rank() == 1:
            patch.setattr(filesystem.torch, "save", full)
        checkpoint.save(Path(folder) / "1", run, group)
    return str(caught.value)


def test_verify_a_full_disk_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    with Pool(2) as ranks:
        for message in ranks.run(_disk_full_on_rank_1, 2, str(tmp_path)):
            assert "rank 1: OSError: [Errno 28] No space left" in message and "earlier ones" in message
    with pytest.raises(PlanError, match="found no file"):
        checkpoint.load(tmp_path / "1", make_run(Small()))


def _load_and_die(group: dist.ProcessGroup, folder: str) -> None:
    run = make_run(make_small(2, 1))
    if group.rank() == 1:
        _die_at("open", "__0_0.distcp")
    checkpoint.load(folder, run, group)


def test_verify_a_rank_killed_in_a_load_is_not_called_a_damaged_file(saved: Path) -> None:
    with Pool(2) as ranks:
        results = ranks.outcomes(_load_and_die, 2, str(saved), grace=20.0)
    assert isinstance(results[1].error, RankDied)
    assert isinstance(results[0].error, TransportError), results[0]


def test_verify_nothing_is_overwritten_and_foreign_parameters_are_refused(saved: Path) -> None:
    with pytest.raises(PlanError, match="exists"):
        checkpoint.save(saved, make_run(Small()))
    with pytest.raises(PlanError, match="not the model's"):
        Run(Small(), torch.optim.AdamW(Small().parameters()), PLAN, StepSampler(4, samples_per_step=2))
    with pytest.raises(PlanError, match="Muon"):
        model = torch.nn.Linear(3, 3, bias=False)
        Run(model, torch.optim.Muon(model.parameters()), PLAN, StepSampler(4, samples_per_step=2))


def _differing(group: dist.ProcessGroup, folder: str) -> str:
    torch.manual_seed(group.rank())
    run = make_run(make_small(2, 1))
    step(run, 0)
    with pytest.raises(PlanError) as caught:
        checkpoint.save(folder, run, group)
    return str(caught.value)


def test_verify_generators_that_differ_over_ranks_are_refused(tmp_path: Path) -> None:
    with Pool(2) as ranks:
        for message in ranks.run(_differing, 2, str(tmp_path / "run")):
            assert "random generators (torch) of ranks [1]" in message


def _flat(group: dist.ProcessGroup, folder: str) -> list[str]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(Small(), process_group=group, use_orig_params=True, device_id=torch.device("cpu"))
    messages = []
    for action in (lambda: make_run(model), lambda: weights.digest(model, group)):
        with pytest.raises(PlanError) as caught:
            action()
        messages.append(str(caught.value))
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        assert weights.digest(model, group) == weights.digest(Small())
    return messages


def test_verify_flat_shards_are_refused_by_name(tmp_path: Path) -> None:
    with Pool(2) as ranks:
        for messages in ranks.run(_flat, 2, str(tmp_path / "run")):
            assert all("FSDP1" in message and "summon_full_params" in message for message in messages)


# --- boxes ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(0, 10**6), st.integers(0, 10**6))
def test_verify_flat_ranges_are_boxes(shape: list[int], a: int, b: int) -> None:
    whole = torch.arange(torch.Size(shape).numel())
    first, end = sorted((a % (len(whole) + 1), b % (len(whole) + 1)))
    flat = whole[first:end]
    rebuilt = torch.full(shape, -1)
    for offset, sizes, before in weights.flat_boxes(first, end, shape):
        count = torch.Size(sizes).numel()
        rebuilt[tuple(slice(o, o + n) for o, n in zip(offset, sizes))] = flat[before : before + count].view(sizes)
    held = rebuilt.flatten()
    assert held[first:end].equal(flat) and bool((held[:first] == -1).all()) and bool((held[end:] == -1).all())
