"""tbik.verify and tbik.workers: the claim, what makes it false, and what happens when a rank is lost."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tbik import models
from tbik.errors import IntegrityError, PlanError, TransportError, TransportTimeout
from tbik.verify import Configuration, Job, _Gathered, first_difference, judge, make_job, run
from tbik.workers import Link, Workers

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.random_model("qwen3", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=2, vocab_size=512)


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    job, _ = make_job(folder, tp_sizes=[1, 2, 4], batch_sizes=[1, 3], new_tokens=3)
    steps = []
    outcome = run(job, progress=lambda text, n: steps.append(n))
    assert sum(steps) == 3 * len(job.configurations)
    return outcome


# --- the claim --------------------------------------------------------------------------------------------------------


def test_verify_one_output_with_tbik_layers_and_several_with_stock(result: dict[str, Any]) -> None:
    assert result["claim"], result["reasons"]
    assert result["configurations"] == 6
    assert result["unique"]["tbik"] == 1 and result["unique"]["stock"] > 1
    assert result["max_abs_dlogprob"]["tbik"] == 0 and result["max_abs_dlogprob"]["stock"] > 0
    assert all(record["ranks_agree"] for record in result["records"] if record["mode"] == "tbik")


def test_verify_the_result_is_complete_and_plain_json(result: dict[str, Any]) -> None:
    again = json.loads(json.dumps(result))
    assert again["plan"]["fingerprint"] and json.loads(again["plan"]["key"])["leaves"] == 8
    assert (
        len(again["per_rank"]["parameter_bytes"])
        == len(again["per_rank"]["bytes_sent"])
        == again["per_rank"]["tp"]
        == 4
    )
    for record in again["records"]:
        assert len(record["tokens"]) == len(record["top_bits"]) == len(record["row_digests"]) == 3
        assert all(len(ids) == len(bits) == 5 for ids, bits in zip(record["top_ids"], record["top_bits"], strict=True))
    assert again["environment"]["torch"] == torch.__version__


def test_verify_every_rank_holds_its_share_and_sends(result: dict[str, Any]) -> None:
    for tp, entry in result["per_rank"]["by_tp"].items():
        assert entry["sharded"] and len(entry["parameter_bytes"]) == int(tp)
        assert max(entry["parameter_fraction"]) <= (1 / int(tp) + max(entry["replicated_fraction"])) * 1.1
        assert (min(entry["bytes_sent"]) > 0) == (tp != "1")


def test_verify_a_control_that_finds_nothing_makes_the_claim_false(folder: Path) -> None:
    job, _ = make_job(folder, tp_sizes=[1], batch_sizes=[1], new_tokens=1)
    outcome = run(job)
    assert not outcome["claim"] and "could not have found" in outcome["reasons"][0]


# --- what makes it false, without processes ---------------------------------------------------------------------------


def gathered(folder: Path) -> tuple[Job, _Gathered]:
    """Two configurations that agree, on TP=1 and TP=2."""
    job, _ = make_job(folder, tp_sizes=[1, 2], batch_sizes=[1], new_tokens=2, modes=["tbik"])
    state = _Gathered(job)
    record = {"tokens": [1, 2], "top_ids": [], "top_bits": [], "row_digests": [], "digest": "d", "bytes_sent": 7}
    for tp in (1, 2):
        state.shards[tp] = {rank: {"w": ((8 * rank // tp, 8 * (rank + 1) // tp), 80 // tp)} for rank in range(tp)}
        configuration = Configuration("tbik", tp, 1)
        state.add(0, "rows", configuration, torch.zeros(2, 4).numpy())
        for rank in range(tp):
            state.add(rank, "record", configuration, copy.deepcopy(record))
    return job, state


def test_verify_judge_accepts_agreement(folder: Path) -> None:
    job, state = gathered(folder)
    assert judge(job, state)["claim"]


@pytest.mark.parametrize("broken", ["output", "rank", "bytes", "sent"])
def test_verify_judge_finds(broken: str, folder: Path) -> None:
    job, state = gathered(folder)
    by_rank = state.records[Configuration("tbik", 2, 1)]
    if broken == "output":
        by_rank[0]["digest"] = by_rank[1]["digest"] = "other"
    if broken == "rank":
        by_rank[1]["digest"] = "other"
    if broken == "bytes":
        state.shards[2][0] = {"w": ((0, 5), 50)}
        state.shards[2][1] = {"w": ((5, 8), 30)}
    if broken == "sent":
        by_rank[1]["bytes_sent"] = 0
    reasons = {"output": "unique", "rank": "disagree", "bytes": "sharded", "sent": "sharded"}
    outcome = judge(job, state)
    assert not outcome["claim"] and reasons[broken] in outcome["reasons"][0]


def test_verify_changes_are_measured_while_the_tokens_agree(folder: Path) -> None:
    """Position 1 chose another token from the same text, so it still counts; position 2 does not."""
    job, _ = make_job(folder, tp_sizes=[1], batch_sizes=[1, 2], new_tokens=3, modes=["stock"])
    state = _Gathered(job)
    for batch, tokens, rows in ((1, [5, 6, 7], [0.0, 0.0, 0.0]), (2, [5, 9, 9], [0.25, 0.5, 100.0])):
        configuration = Configuration("stock", 1, batch)
        state.add(0, "rows", configuration, torch.tensor(rows)[:, None].numpy())
        state.add(0, "record", configuration, {"tokens": tokens})
    assert state.deltas[Configuration("stock", 1, 1)] == [0, 0, 0]
    assert state.deltas[Configuration("stock", 1, 2)] == [0.25, 0.5]
    assert first_difference([5, 6, 7], [5, 9, 9]) == 1 and first_difference([1], [1]) is None


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tp_sizes": [1, 16]}, "TP=16"),
        ({"tp_sizes": [0]}, "--tp"),
        ({"tp_sizes": []}, "--tp"),
        ({"batch_sizes": [2, 2]}, "--batch"),
        ({"new_tokens": 0}, "--new-tokens"),
        ({"new_tokens": 3000}, "positions"),
        ({"modes": ["tbik", "other"]}, "--layers"),
        ({"modes": []}, "--layers"),
        ({"prompts": ["one"]}, "--prompts"),
        ({"prompts": ["one", "two", "three"]}, "tokenizer"),
    ],
)
def test_verify_wrong_jobs_are_refused(arguments: dict[str, Any], named: str, folder: Path) -> None:
    with pytest.raises(PlanError, match=named):
        make_job(folder, **{"tp_sizes": [1, 2], "batch_sizes": [1, 3], **arguments})


# --- ranks that are lost ----------------------------------------------------------------------------------------------


def _misbehave(rank: int, link: Link, argument: str) -> None:
    if argument == "sum" or rank != 1:
        value = torch.ones(1)
        torch.distributed.all_reduce(value, group=link.group(3))
        link.send((value.item(), "transformers" in sys.modules, torch.get_num_threads()))
    elif argument == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif argument == "exits":
        os._exit(3)
    elif argument == "raises":
        raise ValueError("a reason")
    elif argument == "refuses":
        raise PlanError("unsupported")
    elif argument == "differs":
        raise IntegrityError("bits differ")
    else:
        time.sleep(60)


def require_small_workers() -> None:
    with Workers(3, _misbehave, "sum") as workers:
        assert sorted(workers.messages()) == [(rank, (3.0, False, 1)) for rank in range(3)]


@pytest.mark.long
def test_verify_workers_add_and_stay_small() -> None:
    """In a process of its own: the server that workers are forked from is one per process, and other tests load it."""
    folder = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import test_verify; test_verify.require_small_workers()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argument", "kind", "named"),
    [
        ("killed", TransportError, "rank 1 of 3 was killed by SIGKILL"),
        ("exits", TransportError, "rank 1 of 3 exited with code 3"),
        ("raises", TransportError, "rank 1 of 3 raised ValueError: a reason"),
        ("refuses", PlanError, "unsupported"),
        ("differs", IntegrityError, "bits differ"),
        ("sleeps", TransportTimeout, "no word from ranks"),
    ],
)
def test_verify_a_lost_rank_is_named_and_leaves_no_orphans(argument: str, kind: type[Exception], named: str) -> None:
    workers = Workers(3, _misbehave, argument, silence_s=4.0 if argument == "sleeps" else 60.0)
    pids = [pid for pid in workers.pids if pid is not None]
    start = time.monotonic()
    with workers, pytest.raises(kind, match=named):
        list(workers.messages())
    assert time.monotonic() - start < 45
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.long
def test_verify_ranks_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\nfrom test_verify import _misbehave\nfrom tbik.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    workers = Workers(3, _misbehave, 'sleeps')\n"
        "    print(*workers.pids, flush=True)\n    time.sleep(60)\n"
    )
    root = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root.parent)])}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3
    time.sleep(1.0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
