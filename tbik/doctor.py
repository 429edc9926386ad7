"""Make the group that a job's ranks form and look at it: who is where, how bytes move, whether the sum is right.

Every rank calls inspect_group(); rank 0 gets the report. Errors: TransportTimeout and TransportError naming ranks that
do not come, PlanError where they disagree (versions, settings, plans), IntegrityError where an all-reduce is wrong.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from tbik import _C, launch, reference
from tbik.backend import ONE_SHOT_BYTES, group_info
from tbik.collectives import _require_same
from tbik.errors import IntegrityError, PlanError, TransportError
from tbik.plan import TreePlan

_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PROBE_ELEMENTS = 1024
PROBE_CALLS = 20


def inspect_group(plan: TreePlan | None = None, timeout_s: float = 60.0) -> dict[str, Any] | None:
    """What the ranks started by torchrun or mpiexec form together, on rank 0; None elsewhere.

    Without a launcher: this process alone. The group is destroyed again. timeout_s: of every wait.
    """
    started_by = _launcher()
    limit = timedelta(seconds=timeout_s)
    if started_by == "mpiexec":
        launch.init(timeout_s=timeout_s)
    else:
        # Nobody waits for all ranks here: the backend does, and says which of them are missing.
        store, rank, world = _store(started_by, limit)
        dist.init_process_group("tbik", store=store, rank=rank, world_size=world, timeout=limit)
    try:
        return _inspect(plan, timeout_s, started_by)
    finally:
        dist.destroy_process_group()


def _launcher() -> str:
    if all(os.environ.get(name) for name in _TORCHRUN):
        return "torchrun"
    if any(name in os.environ for name in launch._MPI_STARTED):
        return "mpiexec"
    return "nobody"


def _store(started_by: str, limit: timedelta) -> tuple[Any, int, int]:
    """(store, rank, world size) as torchrun's environment has them; of this process alone without it."""
    if started_by == "nobody":
        return HashStore(), 0, 1
    numbers = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if not all(number.isdecimal() for number in numbers):
        raise PlanError(f"doctor: RANK, WORLD_SIZE and MASTER_PORT must be integers >= 0, got {', '.join(numbers)}")
    rank, world, port = map(int, numbers)
    address = os.environ["MASTER_ADDR"]
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(address, port, world, is_master=serves, timeout=limit, wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError(f"doctor: rank {rank} of {world}: no store at {address}:{port}: {error}") from error
    return PrefixStore(f"tbik-doctor-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/", store), rank, world


def _inspect(plan: TreePlan | None, timeout_s: float, started_by: str) -> dict[str, Any] | None:
    rank, world = dist.get_rank(), dist.get_world_size()
    info = group_info()
    own = {
        "terms": [["plan", "none" if plan is None else plan.fingerprint()], ["timeout", str(timeout_s)]],
        "refusal": "",
        "threads": torch.get_num_threads(),
        "cpu_path": _C.default_path("float32"),
    }
    records: list[Any] = [None] * world
    dist.all_gather_object(records, own)
    _require_same("doctor", records)
    # Magnitudes whose sum shows its order
    values = [
        torch.randn(PROBE_ELEMENTS, generator=torch.Generator().manual_seed(r)) * 10.0 ** (3 * (r % 3))
        for r in range(world)
    ]
    expected = reference.all_reduce(values)
    x = values[rank].clone()
    dist.all_reduce(x)
    wrong = torch.tensor([int(not torch.equal(x.view(torch.int32), expected.view(torch.int32)))])
    dist.all_reduce(wrong)
    if int(wrong) != 0:
        raise IntegrityError(f"doctor: an all-reduce of {PROBE_ELEMENTS} values has wrong bits on {int(wrong)} ranks")
    start = time.perf_counter()
    for _ in range(PROBE_CALLS):
        dist.all_reduce(x.zero_())
    seconds = (time.perf_counter() - start) / PROBE_CALLS
    if rank != 0:
        return None
    hosts = list(dict.fromkeys(row["node"] for row in info["ranks"]))
    larger = "two_level" if info["node_size"] else "two_shot"
    return {
        **{key: info[key] for key in ("world_size", "transport", "reason", "placement", "node_size", "tbik", "torch")},
        "order_version": info["order_version"],
        "started_by": started_by,
        "nodes": len(hosts),
        "placements": [f"one_shot up to {ONE_SHOT_BYTES} bytes", f"{larger} above"]
        if info["placement"] == "auto"
        else [f"{info['placement']} where it can be served"],
        "plan": None if plan is None else f"{plan.fingerprint()} {plan.key()}",
        "timeout_s": timeout_s,
        "all_reduce_us": 1e6 * seconds,
        "ranks": [
            row | {"threads": record["threads"], "cpu_path": record["cpu_path"]}
            for row, record in zip(info["ranks"], records, strict=True)
        ],
    }
