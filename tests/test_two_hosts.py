"""Two hosts: network namespaces with names of their own, joined by a veth pair; rendezvous by a TCPStore on the first.

Ranks of one host share memory, the hosts talk by sockets; the kernel's counters of the veth say what really crossed it.
Needs root and the right to make namespaces; elsewhere the tests are skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from long_cases import long_cases

ROOT = Path(__file__).parent.parent
ADDRESSES = ("10.213.77.1", "10.213.77.2")
COUNT = 1 << 21  # elements of the message whose bytes are counted; fp32: 8 MiB
CALLS = 5
DEADLINE_S = 240
# A frame of Ethernet, IP and TCP with timestamps carries at most 1448 of 1514 bytes; segments may leave smaller.
PROTOCOL = 1514 / 1448
# Acknowledgements of what the other direction carries, window updates, the rendezvous.
SLACK = 0.10

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo"),
]


def command(*words: str, check: bool = True) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    if check and done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass
class Hosts:
    names: tuple[str, str]
    links: tuple[str, str]

    def bytes_out(self) -> list[int]:
        """What each host has sent over its end of the pair, protocol headers included."""
        rows = [
            json.loads(command("ip", "-n", n, "-s", "-j", "link", "show", v)) for n, v in zip(self.names, self.links)
        ]
        return [int(row[0]["stats64"]["tx"]["bytes"]) for row in rows]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs ip (iproute2) and unshare (util-linux)")
    tag = uuid.uuid4().hex[:6]
    made = Hosts((f"tbik-{tag}-a", f"tbik-{tag}-b"), (f"tb{tag}a", f"tb{tag}b"))
    try:
        try:
            for name in made.names:
                command("ip", "netns", "add", name)
            command("ip", "link", "add", made.links[0], "type", "veth", "peer", "name", made.links[1])
            for name, link, address in zip(made.names, made.links, ADDRESSES, strict=True):
                command("ip", "link", "set", link, "netns", name)
                command("ip", "-n", name, "address", "add", f"{address}/24", "dev", link)
                command("ip", "-n", name, "link", "set", link, "up")
                command("ip", "-n", name, "link", "set", "lo", "up")
            command("ip", "netns", "exec", made.names[0], "unshare", "--uts", "true")
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield made
    finally:
        for name in made.names:
            command("ip", "netns", "delete", name, check=False)
        command("ip", "link", "delete", made.links[0], check=False)


def run_world(hosts: Hosts, per_host: tuple[int, int], **environment: str) -> list[dict[str, Any]]:
    """What every rank of tests/two_hosts_program.py reports; host a has the first ranks. No process outlives this."""
    world = sum(per_host)
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(world):
            host = 0 if rank < per_host[0] else 1
            variables = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": "29477",
                "GLOO_SOCKET_IFNAME": hosts.links[host],
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            }
            variables |= environment
            program = f'hostname {hosts.names[host]} && exec "$0" "$@"'
            words = ["ip", "netns", "exec", hosts.names[host], "unshare", "--uts", "--kill-child=KILL", "--fork"]
            words += ["sh", "-c", program, sys.executable, str(ROOT / "tests" / "two_hosts_program.py")]
            words += [str(COUNT), str(CALLS)]
            ranks.append(
                subprocess.Popen(
                    words,
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return _conversation(hosts, ranks)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.communicate()


def _conversation(hosts: Hosts, ranks: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    """The ranks stop before and after what is counted, so that the counters can be read while nothing moves."""
    counters = []
    for _ in range(2):
        for rank, process in enumerate(ranks):
            assert process.stdout is not None
            line = process.stdout.readline()
            if line.strip() != "ready":
                for other in ranks:
                    other.kill()
                errors = "\n".join(f"rank {r}: {p.communicate()[1][-1500:]}" for r, p in enumerate(ranks))
                raise AssertionError(f"rank {rank} said {line!r}\n{errors}")
        counters.append(hosts.bytes_out())
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
    reports = []
    for rank, process in enumerate(ranks):
        text, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, f"rank {rank}: {errors[-3000:]}"
        reports.append(json.loads(text.strip().splitlines()[-1]))
    for report in reports:
        report["on_the_wire"] = [after - before for before, after in zip(*counters, strict=True)]
    return reports


@pytest.mark.parametrize(
    ("per_host", "placement", "node_size"),
    [((2, 2), "two_level", 2), *long_cases([((2, 2), "auto", 2), ((2, 2), "two_shot", 2), ((3, 1), "auto", 0)])],
)
def test_verify_two_hosts_give_the_same_bits_and_bytes_as_predicted(
    hosts: Hosts, per_host: tuple[int, int], placement: str, node_size: int
) -> None:
    """Bits = reference = one_shot and two_shot over gloo; bytes on the veth = the dry run's, plus protocol.

    2 + 2 ranks: two_level by itself, half of the message per rank each way (n/G). 3 + 1 ranks: hosts differ in size, so
    placements are flat; memory is still shared by the three.
    """
    reports = run_world(hosts, per_host, TBIK_PLACEMENT=placement)
    for report in reports:
        assert report["equal"], report
        assert report["transport"] == "tcp+shm" and report["node_size"] == node_size
        expected = "two_shot" if placement == "two_shot" or node_size == 0 else "two_level"
        assert report["placement"] == expected
        # What a rank counts at its sockets is what the dry run says, byte by byte.
        assert report["sent_between_hosts"] == report["predicted"], report
    for host, ranks in enumerate((reports[: per_host[0]], reports[per_host[0] :])):
        predicted = sum(report["predicted"] + report["headers"] for report in ranks)
        measured = reports[0]["on_the_wire"][host]
        assert predicted <= measured <= predicted * PROTOCOL * (1 + SLACK), (predicted, measured)
        n = 4 * COUNT * CALLS
        print(
            f"{per_host} ranks, {reports[0]['placement']}: host {host} sent {measured} bytes over the veth, predicted "
            f"{predicted} (factor {measured / predicted:.4f}); {predicted / len(ranks) / n:.3f} n per rank"
        )


@pytest.mark.long
def test_verify_two_hosts_may_be_forced_to_gloo(hosts: Hosts) -> None:
    """The same bits by gloo's own connections; how many more bytes those take is printed."""
    reports = run_world(hosts, (2, 2), TBIK_TRANSPORT="gloo")
    assert all(report["equal"] and report["transport"] == "gloo" for report in reports)
    for host in range(2):
        predicted = sum(report["predicted"] for report in reports[2 * host : 2 * host + 2])
        measured = reports[0]["on_the_wire"][host]
        assert predicted <= measured <= predicted * PROTOCOL * (1 + 2 * SLACK), (predicted, measured)
        print(f"gloo's movement: host {host} sent {measured} bytes, payload {predicted} ({measured / predicted:.4f})")


def test_verify_two_hosts_refuse_shared_memory(hosts: Hosts) -> None:
    """TBIK_TRANSPORT=shm across hosts: an error at once, on every rank."""
    with pytest.raises(AssertionError, match="TBIK_TRANSPORT=shm, but the ranks run on 2 hosts"):
        run_world(hosts, (1, 1), TBIK_TRANSPORT="shm")
