"""tbik.launch: worlds made by MPI and torchrun, and the all-reduce of numpy arrays against the reference, in bits.

The ranks run tests/mpi_program.py.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from long_cases import long_cases

from tbik import PlanError, TransportError, launch
from tbik.mpi_movement import Clock, Wire

PROGRAM = Path(__file__).parent / "mpi_program.py"
DEADLINE_S = 120
START_S = 30  # of a job, on a busy machine
STARTERS = (*launch._TORCHRUN, *launch._MPI_STARTED)

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
    pytest.mark.skipif(sys.platform != "linux", reason="the backend's shared memory is for Linux"),
]


@functools.cache
def mpiexec() -> tuple[list[str], str]:
    """The command that starts ranks, or why there is none. The one beside the interpreter belongs to its wheels."""
    if importlib.util.find_spec("mpi4py") is None:
        return [], "mpi4py is not installed: pip install tbik[mpi]"
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        return [], "there is no mpiexec: pip install mpich, or the system's MPI"
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60).stdout
    flags = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version or "OpenRTE" in version else []
    return [program, *flags], ""


@pytest.fixture
def mpi() -> list[str]:
    command, reason = mpiexec()
    if reason:
        pytest.skip(reason)
    return command


def clean_environment(**more: str) -> dict[str, str]:
    """As if nobody had started ranks."""
    kept = {name: value for name, value in os.environ.items() if name not in STARTERS}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROGRAM.parent.parent)} | more


def run(command: list[str], *, succeeds: bool = True, **more: str) -> str:
    """The output; the whole process group dies at the deadline."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(**more),
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{command} did not end within {DEADLINE_S} s:\n{output[-4000:]}")
    assert process.returncode == 0 or not succeeds, f"{command} ended with {process.returncode}:\n{output[-4000:]}"
    return output


@pytest.mark.mpi
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("world", [3, *long_cases([1, 2, 4, 5, 6])])
def test_verify_mpi_allreduce_equals_reference(mpi: list[str], world: int) -> None:
    """Bits, refusals, a late rank; for some worlds also MPI as the mover of a process group."""
    names = ["bits", "refusals", "world"]
    names += ["deadline"] if world in (2, 3) else []
    names += ["refusals_mpi", "movement"] if world in (2, 3, 4) else []
    output = run([*mpi, "-n", str(world), sys.executable, "-m", "mpi4py", str(PROGRAM), *names])
    assert all(f"passed {name}" in output for name in names), output


@pytest.mark.mpi
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["killed", "killed_mpi"])
def test_verify_killed_rank_ends_the_job(mpi: list[str], name: str) -> None:
    """mpiexec ends the other ranks, or they raise an error that names it; nobody waits for the limit."""
    start = time.monotonic()
    run([*mpi, "-n", "3", sys.executable, str(PROGRAM), name], succeeds=False)
    assert time.monotonic() - start < 30 + START_S


def test_verify_dead_process_is_named() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    wire = Wire.__new__(Wire)
    wire.pids = [0, os.getpid(), process.pid]
    clock = Clock(60.0)
    clock.turns = 64 * 100
    wire.require_alive([0, 1], clock, "all_reduce")
    with pytest.raises(TransportError, match=rf"waited .* for ranks 0, 2; process {process.pid} of rank 2 is gone"):
        wire.require_alive([0, 2], clock, "all_reduce")


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.slow
def test_verify_torchrun_needs_no_mpi() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = run([sys.executable, *torchrun, str(PROGRAM), "torchrun"])
    assert "rank 0 passed torchrun" in output and "rank 1 passed torchrun" in output


@pytest.mark.mpi
@pytest.mark.multiprocess
def test_verify_another_mpi_is_refused(mpi: list[str]) -> None:
    """A foreign mpiexec: every rank would be a world of its own."""
    code = "import tbik.launch\ntry: tbik.launch.init()\nexcept tbik.PlanError as error: print(error)"
    name = "MV2_COMM_WORLD_SIZE"  # of an MPI that is none of those tested here
    output = run([sys.executable, "-c", code], **{name: "3"})
    assert f"started 3 ranks ({name}), but mpi4py sees a world of 1: it has loaded another MPI" in output


# --- error texts, without ranks ----------------------------------------------------------------


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that neither torchrun nor MPI has started, without mpi4py."""
    for name in STARTERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    return monkeypatch


def test_verify_init_without_a_launcher(nobody: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"neither torchrun's environment nor an MPI job") as caught:
        launch.init()
    assert "torchrun --nproc-per-node 4" in str(caught.value) and 'pip install "tbik[mpi]"' in str(caught.value)
    nobody.setenv("RANK", "0")
    nobody.setenv("WORLD_SIZE", "1")
    with pytest.raises(PlanError, match=r"RANK, WORLD_SIZE set, MASTER_ADDR, MASTER_PORT not"):
        launch.init()


@pytest.mark.parametrize("name", launch._MPI_STARTED)
def test_verify_init_without_mpi4py(nobody: pytest.MonkeyPatch, name: str) -> None:
    nobody.setenv(name, "2")
    with pytest.raises(PlanError, match=r'launch.init: mpi4py does not load .*pip install "tbik\[mpi\]"'):
        launch.init()


def test_verify_allreduce_without_mpi4py(nobody: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r'launch.allreduce: mpi4py does not load .*pip install "tbik\[mpi\]"'):
        launch.allreduce(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), True, "30"])
def test_verify_init_refuses_timeouts(nobody: pytest.MonkeyPatch, timeout_s: object) -> None:
    with pytest.raises(PlanError, match="timeout_s must be a number of seconds"):
        launch.init(timeout_s=timeout_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["tbic", "cpu:tbik,cuda:", "", None])
def test_verify_init_refuses_backends(nobody: pytest.MonkeyPatch, backend: object) -> None:
    with pytest.raises(PlanError, match=r"expected backends of .*gloo.*tbik.*, got"):
        launch.init(backend)  # type: ignore[arg-type]


def test_verify_init_from_a_wrong_environment(nobody: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "two", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        nobody.setenv(name, value)
    with pytest.raises(PlanError, match="WORLD_SIZE must be an integer >= 0, got 'two'"):
        launch.init()
    nobody.setenv("WORLD_SIZE", "2")
    with pytest.raises(TransportError, match=r"rank 1 of 2, started by torchrun: the rendezvous failed"):
        launch.init(timeout_s=1)  # nobody listens there
    assert not dist.is_initialized()
