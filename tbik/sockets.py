"""One connected stream per pair of ranks, each end sure of the other: what csrc/transport_tcp moves bytes over.

    listener = Listener()                            a port; listener.offer goes to every rank, by the group's store
    connect(listener, offers, rank, peers, ...)      file descriptors, [p] = stream to rank p, -1 for the others

Rank r calls the peers below r and is called by those above. Caller and called prove that they read the same store: the
caller sends the called one's nonce, which is answered with the caller's own. Whoever else finds the port is turned
away. Nothing is encrypted: as with gloo, the network between the ranks is trusted.

Addresses: that of GLOO_SOCKET_IFNAME if set, and only there a rank listens; else all of this host, tried in turn.
Errors: TransportError, TransportTimeout naming the ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from tbik.errors import PlanError, TransportError, TransportTimeout

_MAGIC = b"tbik"
_NONCE_BYTES = 16
_HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES + 4
_ANSWER_BYTES = len(_MAGIC) + _NONCE_BYTES
_ONE_ADDRESS_S = 5.0  # for a connection to one of several addresses
_HELLO_S = 5.0  # for the first bytes of someone who has connected
_SIOCGIFADDR = 0x8915


class Listener:
    """A port that peers can call until close()."""

    def __init__(self) -> None:
        """Errors: PlanError where GLOO_SOCKET_IFNAME names no interface with an address; TransportError."""
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        chosen = [_address_of(name) for name in names]
        if names and None in chosen:
            raise PlanError(f"tbik: GLOO_SOCKET_IFNAME={','.join(names)}: expected interfaces with an IPv4 address")
        addresses = [address for address in chosen if address is not None][:1] or _own_addresses()
        both = not names and socket.has_dualstack_ipv6()
        try:
            self.socket = socket.create_server(
                (addresses[0] if names else "", 0),
                family=socket.AF_INET6 if both else socket.AF_INET,
                dualstack_ipv6=both,
                backlog=1024,
            )
        except OSError as error:
            raise TransportError(
                f"tbik: cannot listen on {addresses[0] if names else 'any address'}: {error}"
            ) from error
        self.nonce = secrets.token_bytes(_NONCE_BYTES)
        self.offer: dict[str, Any] = {
            "addresses": addresses,
            "port": self.socket.getsockname()[1],
            "nonce": self.nonce.hex(),
        }

    def close(self) -> None:
        self.socket.close()


def connect(
    listener: Listener, offers: Sequence[dict[str, Any]], rank: int, peers: Sequence[int], timeout_s: float
) -> list[int]:
    """File descriptors of the streams to `peers`, at their ranks; -1 elsewhere. The caller owns them.

    offers: every rank's Listener.offer. Errors: TransportError where no address of a peer answers, TransportTimeout
    where a peer does not come; nothing stays open.
    """
    end = time.monotonic() + timeout_s
    streams: dict[int, socket.socket] = {}
    try:
        for peer in (p for p in peers if p < rank):
            streams[peer] = _call(offers[peer], rank, peer, end)
        for peer, stream in streams.items():
            answer = _read(stream, _ANSWER_BYTES, end)
            if answer != _MAGIC + listener.nonce:
                raise TransportError(f"tbik: rank {rank}: rank {peer} closed the connection instead of answering")
        waited = {p for p in peers if p > rank}
        while waited:
            listener.socket.settimeout(max(0.0, end - time.monotonic()))
            try:
                stream, _ = listener.socket.accept()
            except (TimeoutError, BlockingIOError):
                raise TransportTimeout(
                    f"tbik: making a group, phase 'connections', rank {rank} of {len(offers)}: waited "
                    f"{timeout_s:.1f} s for the call of rank{'s' if len(waited) > 1 else ''} {sorted(waited)}"
                ) from None
            caller = _caller(stream, listener.nonce, end)
            if caller in waited:
                streams[caller] = stream
                waited.discard(caller)
                stream.sendall(_MAGIC + bytes.fromhex(offers[caller]["nonce"]))
            else:
                stream.close()
    except BaseException:
        for stream in streams.values():
            stream.close()
        raise
    for stream in streams.values():
        stream.settimeout(None)
    return [streams[p].detach() if p in streams else -1 for p in range(len(offers))]


def _call(offer: dict[str, Any], rank: int, peer: int, end: float) -> socket.socket:
    failures = []
    hello = _MAGIC + bytes.fromhex(offer["nonce"]) + struct.pack("<I", rank)
    for address in offer["addresses"]:
        left = end - time.monotonic()
        try:
            stream = socket.create_connection((address, offer["port"]), timeout=max(0.01, min(left, _ONE_ADDRESS_S)))
        except OSError as error:
            failures.append(f"{address}: {error}")
            continue
        try:
            if stream.getsockname() == stream.getpeername():  # a port of our own that met itself
                raise OSError("connected to itself")
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.sendall(hello)
            return stream
        except OSError as error:
            failures.append(f"{address}: {error}")
            stream.close()
    raise TransportError(
        f"tbik: rank {rank} reaches rank {peer} at none of its addresses, port {offer['port']} "
        f"({'; '.join(failures)}). GLOO_SOCKET_IFNAME chooses the interface; TBIK_TRANSPORT=gloo uses gloo's own"
    )


def _caller(stream: socket.socket, nonce: bytes, end: float) -> int | None:
    """The rank that calls, if it knows the nonce."""
    hello = _read(stream, _HELLO_BYTES, min(end, time.monotonic() + _HELLO_S))
    if len(hello) < _HELLO_BYTES or not secrets.compare_digest(hello[:-4], _MAGIC + nonce):
        return None
    return int(struct.unpack("<I", hello[-4:])[0])


def _read(stream: socket.socket, size: int, end: float) -> bytes:
    """`size` bytes, or fewer where the stream or the time ends."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < size:
            stream.settimeout(max(0.001, end - time.monotonic()))
            part = stream.recv(size - len(data))
            if not part:
                break
            data += part
    return data


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return None


def _own_addresses() -> list[str]:
    """That of the host's name first, then those of all interfaces, loopback last."""
    found = []
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    found += [address for _, name in socket.if_nameindex() if (address := _address_of(name)) is not None]
    found.append("127.0.0.1")
    return sorted(dict.fromkeys(found), key=lambda address: address.startswith("127.") or address == "::1")
