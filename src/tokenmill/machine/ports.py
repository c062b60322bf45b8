"""Ports: disjoint blocks for servers, checked by binding, outside the range that the kernel hands out by itself.

Each server has one HTTP port (base + index) and a block of ten internal ports (NCCL, rendezvous, RPC): engines that
pick their own at random hit each other.
"""

import socket
from pathlib import Path
from typing import NamedTuple

import psutil

from tokenmill.errors import PreflightError

BLOCK = 10
INTERNAL_OFFSET = 1000
"""Internal blocks begin this far above the first HTTP port: 100 servers fit between."""


class Ports(NamedTuple):
    http: int
    internal: int


def taken(where: Ports) -> set[int]:
    """All ports of one server."""
    return {where.http, *range(where.internal, where.internal + BLOCK)}


def answers(address: str, timeout_s: float = 3.0) -> bool:
    """Whether anybody accepts connections at host:port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether the port can be bound here and now, the way a server will."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def ephemeral() -> tuple[int, int]:
    """The range from which the kernel takes ports for outgoing connections."""
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
    return int(low), int(high)


def assign(first: int, count: int, avoid: frozenset[int] = frozenset()) -> list[Ports]:
    """Blocks for `count` servers from `first` on, taken and avoided ports passed over.

    The kernel's own range is passed over too, unless `first` lies in it: then that is what was asked for. Raises
    PreflightError where the machine has no room.
    """
    low, high = ephemeral()
    if low <= first <= high:
        low, high = 0, 0
    internal = first + INTERNAL_OFFSET
    http = first
    result: list[Ports] = []
    used = set(avoid)
    while len(result) < count:
        while http in used or low <= http <= high or not is_free(http):
            http += 1
        while not _block_free(internal, used, low, high):
            internal += BLOCK
        if max(http, internal + BLOCK) > 65535:
            words = f"no free ports for {count} servers from fleet.port = {first} on, each with {BLOCK} internal ones"
            raise PreflightError(words, fix="set fleet.port lower")
        used |= {http, *range(internal, internal + BLOCK)}
        result.append(Ports(http, internal))
    return result


def _block_free(start: int, used: set[int], low: int, high: int) -> bool:
    block = range(start, start + BLOCK)
    if start + BLOCK > 65535:
        return True  # the caller says that the machine has no room
    return used.isdisjoint(block) and not (start <= high and start + BLOCK > low) and all(map(is_free, block))


def listener(port: int) -> int | None:
    """The pid that listens on a port of this machine; None where nobody does or where we may not know."""
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return None
    return next(
        (c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid),
        None,
    )
