"""Ports: disjoint blocks, checked by binding, outside the range that the kernel hands out (cases C06)."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from tokenmill.errors import PreflightError
from tokenmill.machine import ports
from tokenmill.machine.ports import BLOCK, Ports

LOW, HIGH = ports.ephemeral()


@contextmanager
def taken(port: int, host: str = "127.0.0.1") -> Iterator[None]:
    with closing(socket.socket()) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, port))
        holder.listen()
        yield


def all_of(assigned: list[Ports]) -> list[int]:
    return [port for one in assigned for port in (one.http, *range(one.internal, one.internal + BLOCK))]


@pytest.mark.parametrize("count", [1, 8, 100])
def test_blocks_are_disjoint_and_outside_the_kernels_range(port: int, count: int) -> None:
    assigned = ports.assign(port, count)
    found = all_of(assigned)
    assert len(assigned) == count
    assert len(found) == len(set(found)) == count * (1 + BLOCK)
    assert not [number for number in found if LOW <= number <= HIGH]
    assert assigned[0].http >= port


def test_eight_servers_from_30000_on_stay_below_the_kernels_range() -> None:
    found = all_of(ports.assign(30000, 8))
    assert max(found) < 33000
    assert len(set(found)) == 88


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_passed_over(port: int, host: str) -> None:
    before = ports.assign(port, 2)
    with taken(before[0].http, host), taken(before[1].internal + 3, host):
        after = ports.assign(port, 2)
        assert not {before[0].http, before[1].internal + 3} & set(all_of(after))
        assert not ports.is_free(before[0].http)
    assert ports.is_free(before[0].http)


def test_ports_of_servers_that_live_are_passed_over(port: int) -> None:
    before = ports.assign(port, 2)
    after = ports.assign(port, 2, frozenset(all_of(before)))
    assert not set(all_of(before)) & set(all_of(after))


def test_a_first_port_in_the_kernels_range_is_what_was_asked_for() -> None:
    first = LOW + 1000
    assert ports.assign(first, 1)[0].http - first < 100


def test_http_ports_jump_over_the_kernels_range() -> None:
    assigned = ports.assign(LOW - 3, 12)
    assert not [number for number in all_of(assigned) if LOW <= number <= HIGH]


def test_a_machine_without_room_says_so() -> None:
    with pytest.raises(PreflightError, match=r"no free ports for 50 servers from fleet\.port = 64500 on"):
        ports.assign(64500, 50)


def test_who_listens_is_known(port: int) -> None:
    assert ports.listener(port) is None
    with taken(port):
        assert ports.listener(port) == os.getpid()
