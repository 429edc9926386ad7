"""tbik.cli: exit statuses, one clear message per error, files written."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tbik import __version__, cli, models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.random_model("qwen3", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=2, vocab_size=512)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["tbik", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


@pytest.mark.multiprocess
def test_verify_command_writes_what_it_says(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result, page = tmp_path / "result.json", tmp_path / "report.html"
    files = ("--json", result, "--report", page)
    assert (
        call(monkeypatch, "verify", "--model", folder, "--tp", "1,2,4", "--batch", "1,3", "--new-tokens", 2, *files)
        == 0
    )
    last = capsys.readouterr().out.strip().splitlines()[-1]
    values = json.loads(result.read_text())
    assert values["claim"] and last.startswith("tbik: 1 unique output of 6; stock: ")
    assert values["plan"]["fingerprint"] in page.read_text()


@pytest.mark.multiprocess
def test_verify_false_claim_is_exit_status_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "verify", "--model", folder, "--tp", 1, "--batch", 1, "--new-tokens", 1) == 1
    assert "not shown: stock layers gave one unique output too" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "no/such/model"], "no/such/model"),
        (["--model", "FOLDER", "--tp", "1,16"], "TP=16"),
        (["--model", "FOLDER", "--tp", "1;2"], "separated by commas"),
        (["--model", "FOLDER", "--tp", "1", "--dtype", "int8"], "dtype"),
        (["--model", "FOLDER", "--tp", "1", "--prompts", "no-such-file"], "no-such-file"),
        (["--model", "FOLDER", "--tp", "1", "--json", "no/such/folder/x.json"], "found no folder"),
        (["--model", "FOLDER", "--tp", "1", "--layers", "fast"], "--layers"),
    ],
)
def test_verify_errors_are_one_message_and_exit_status_2(
    arguments: list[str],
    named: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, "verify", *(str(folder) if a == "FOLDER" else a for a in arguments)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("tbik: ") and named in printed.err
    assert "Traceback" not in printed.err and printed.out == ""


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small enough to train."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 96, "num_hidden_layers": 1}
    return models.random_model("qwen3", tmp_path_factory.mktemp("tied"), tie_word_embeddings=True, **sizes)


@pytest.mark.long
@pytest.mark.multiprocess
def test_verify_train_command_writes_what_it_says(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "train.json", tmp_path / "train.html"
    job = ("--layouts", "single,fsdp2:m2", "--steps", 3, "--samples", 8, "--kill-after", 1, "--dropout", 0.1)
    assert call(monkeypatch, "verify", "--train", "--model", tied, *job, "--json", file, "--report", page) == 0
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    assert printed.strip().splitlines()[-1] == "tbik: 1 unique digest of 4; stock: 2 unique digests of 2"
    assert values["claim"] and values["kind"] == "training" and values["environment"]["commit"]
    digest = values["records"][0]["digest"]
    assert len(digest) == 16 and digest in page.read_text()
    # without a control that differs nothing has been shown
    alone = ("--layouts", "single", "--steps", 1, "--samples", 2)
    assert call(monkeypatch, "verify", "--train", "--model", tied, *alone) == 1
    assert "not shown: stock gave one digest too" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--layouts", "fsdp5"], "5 data ranks do not divide 24"),
        (["--layouts", "flat2", "--steps", "3", "--kill-after", "1"], "FSDP1 has no checkpoint"),
        (["--layouts", "single", "--control", "fsdp2"], "--control"),
        (["--layouts", "single", "--dtype", "float16"], "--dtype"),
        (["--layouts", "single", "--timeout", "0"], "--timeout"),
        (["--layouts", "single", "--steps", "1", "--timeout", "0.01"], "for 0 s"),  # no rank speaks so soon
    ],
)
def test_verify_train_errors_are_exit_status_2(
    arguments: list[str],
    named: str,
    tied: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, "verify", "--train", "--model", tied, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("tbik: ") and named in printed.err and printed.out == ""


@pytest.mark.long
@pytest.mark.multiprocess
def test_verify_demo_rl_writes_what_it_says(
    tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_resolve", lambda name: tied)
    file, page = tmp_path / "rl.json", tmp_path / "rl.html"
    job = ("--steps", 1, "--engine", "builtin", "--json", file, "--report", page)
    assert call(monkeypatch, "demo", "rl", *job) == 0
    printed, values = capsys.readouterr().out, json.loads(file.read_text())
    assert printed.strip().splitlines()[-1].startswith("tbik: 0 of 384 log-probabilities differ; stock: ")
    assert values["claim"] and values["job"]["tp"] == 4 and values["environment"]["commit"]
    assert page.read_text().count("<svg") == 3
    assert call(monkeypatch, "demo", "rl", "--engine", "abacus") == 2
    assert "abacus" in capsys.readouterr().err


def test_verify_demo_is_the_main_job(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(cli, "_verify", lambda model, **arguments: seen.update(model=model, **arguments))
    assert call(monkeypatch, "demo") == 0
    assert (seen["model"], seen["tp_sizes"], seen["batch_sizes"], seen["new_tokens"]) == (
        "smollm2",
        [1, 2, 3, 9],
        [1, 3, 8],
        12,
    )
    assert call(monkeypatch, "demo", "--quick") == 0
    assert seen["tp_sizes"] == [1, 3]


def test_verify_doctor_shows_paths_and_shards(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "doctor", "--model", folder, "--tp", "1,2") == 0
    text = capsys.readouterr().out
    for named in (__version__, "cpu paths", "portable", "matches", "gloo", "8 query heads", "0..256", "vocab rows"):
        assert named in text
    assert call(monkeypatch, "doctor", "--model", folder, "--tp", "16") == 2


GROUP = [sys.executable, "-m", "tbik", "doctor", "--group"]


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.long
@pytest.mark.multiprocess
def test_verify_doctor_shows_the_group(tmp_path: Path, folder: Path) -> None:
    """Three ranks as torchrun starts them; rank 0 prints who is where and writes it as JSON."""
    port, file = free_port(), tmp_path / "group.json"
    words = [*GROUP, "--timeout", "60", "--json", str(file), "--model", str(folder), "--tp", "1,2"]
    ranks = [
        subprocess.Popen(
            words, env=rank_environment(r, 3, port), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for r in range(3)
    ]
    results = [process.communicate(timeout=150) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0, 0], results
    assert results[1][0] == results[2][0] == ""
    for named in (
        "group of 3, started by torchrun",
        "transport",
        "one_shot up to 65536 bytes",
        "plan",
        "60.0 s",
        "shm",
    ):
        assert named in results[0][0], results[0][0]
    report = json.loads(file.read_text())
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2]
    assert [row["pid"] for row in report["ranks"]] == [process.pid for process in ranks]
    assert report["transport"] == "shm" and report["nodes"] == 1 and report["timeout_s"] == 60


@pytest.mark.multiprocess
def test_verify_doctor_shows_a_process_alone() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(GROUP, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0 and "group of 1, started by nobody" in done.stdout, done.stderr


@pytest.mark.long
@pytest.mark.multiprocess
def test_verify_doctor_names_the_rank_that_does_not_come() -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [*GROUP, "--timeout", "5"],
            env=rank_environment(r, 3, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in (0, 2)
    ]
    results = [process.communicate(timeout=150) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2], results
    assert "waited 5.0 s for rank [1]" in results[0][1], results
    # the store ends with rank 0, whose limit may be over first
    assert re.search(r"waited 5.0 s for rank \[1\]|the store cannot be reached", results[1][1]), results
    assert not any("Traceback" in errors for _, errors in results), results


@pytest.mark.multiprocess
def test_verify_doctor_refuses_ranks_that_disagree() -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [*GROUP, "--timeout", "60"],
            env=rank_environment(r, 2, port) | {"TBIK_PLACEMENT": placement},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r, placement in enumerate(("one_shot", "two_shot"))
    ]
    results = [process.communicate(timeout=150) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2], results
    assert all("placement: one_shot on ranks [0]; two_shot on ranks [1]" in errors for _, errors in results), results


def test_verify_help_and_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert "tbik verify --model" in text and "doctor" in text
    assert call(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith(f"tbik {__version__} ")
    assert call(monkeypatch, "verify", "--help") == 0
    assert "--new-tokens" in capsys.readouterr().out


def test_verify_module_runs_and_starts_without_torch() -> None:
    """`python -m tbik --version` is quick: neither torch nor transformers is imported."""
    code = "import sys, tbik.cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]
    run = subprocess.run([sys.executable, "-m", "tbik", "--version"], capture_output=True, text=True, check=True)
    assert __version__ in run.stdout
