"""One rank of tests/test_two_hosts.py: bits first, then a counted stretch between two stops. Prints a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from assertions import assert_bitwise_equal
from cases import wide_exponents

import tbik  # noqa: F401 - registers the backend
from tbik import _C_dist, reference
from tbik.backend import bytes_per_link, bytes_sent, group_info

LIMIT = timedelta(seconds=60)


def stop() -> None:
    """Tell the test that nothing moves any more, wait for its word."""
    print("ready", flush=True)
    sys.stdin.readline()


def group_of(transport: str, placement: str) -> Any:
    os.environ |= {"TBIK_TRANSPORT": transport, "TBIK_PLACEMENT": placement}
    return dist.new_group(backend="tbik", timeout=LIMIT)


def main() -> None:
    count, calls = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    asked = dict(os.environ)
    dist.init_process_group("tbik", timeout=LIMIT)
    rank, world = dist.get_rank(), dist.get_world_size()
    info = group_info()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    equal = True
    for size in (0, 1, 1000, 4097, 100_003, 1_000_007):
        for dtype in (torch.float32, torch.bfloat16):
            values = [wide_exponents((size,), dtype, 1000 * size + r) for r in range(world)]
            x = values[rank].clone()
            dist.all_reduce(x)
            assert_bitwise_equal(x, reference.all_reduce(values), f"{dtype} {size} over {info['transport']}")
    values = [wide_exponents((100_003,), torch.float32, r) for r in range(world)]
    for placement in ("one_shot", "two_shot"):
        other = group_of("gloo", placement)
        x = values[rank].clone()
        dist.all_reduce(x, group=other)
        assert_bitwise_equal(x, reference.all_reduce(values), f"{placement} over gloo")
        dist.destroy_process_group(other)
    os.environ |= {name: asked.get(name, "auto") for name in ("TBIK_TRANSPORT", "TBIK_PLACEMENT")}

    x = torch.ones(count)
    dist.all_reduce(x)
    dist.barrier()
    here = [entry["host"] for entry in info["ranks"]]
    away = [r for r in range(world) if here[r] != here[rank]]
    counted = info["transport"] != "gloo"
    before = bytes_sent() if counted else [0] * world
    stop()
    for _ in range(calls):
        dist.all_reduce(x)
    after = bytes_sent() if counted else [0] * world
    stop()
    placement = backend.placement(4 * count)
    rows = bytes_per_link(
        "all_reduce",
        count,
        world_size=world,
        node_size=info["node_size"],
        placement=placement,
        transport=info["transport"],
    )
    predicted = calls * rows[rank]["between_nodes"]
    if info["node_size"] == 0:  # hosts of different sizes are no nodes: two_shot, equal pieces to every rank
        predicted = calls * (rows[rank]["within_node"] // (world - 1)) * len(away)
    dist.barrier()
    dist.destroy_process_group()
    report = {
        "rank": rank,
        "equal": equal,
        "transport": info["transport"],
        "node_size": info["node_size"],
        "placement": placement,
        "sent_between_hosts": sum(after[r] - before[r] for r in away),
        "predicted": predicted,
        "headers": calls * rows[rank]["rounds"] * len(away) * _C_dist.FRAME_HEADER_BYTES,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
