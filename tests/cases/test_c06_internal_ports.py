"""C06: servers' internal ports never hit each other: planned apart, outside the kernel's range, tried before, moved."""

import socket
import sys
from itertools import combinations
from pathlib import Path

import pytest

from tests.doctoring import context, told
from tests.harness import Case, assert_whole
from tokenmill.checks.ports import check_ports
from tokenmill.folder import ServerEntry
from tokenmill.machine import ports, processes


def blocks(assigned: list[ports.Ports]) -> list[set[int]]:
    return [{where.http, *range(where.internal, where.internal + ports.BLOCK)} for where in assigned]


def test_the_ports_of_eight_servers_are_apart_and_below_the_kernels_own(port: int) -> None:
    planned = blocks(ports.assign(port, 8))
    low, high = ports.ephemeral()
    assert all(not a & b for a, b in combinations(planned, 2))
    assert not any(low <= number <= high for block in planned for number in block)


@pytest.mark.parametrize("inner", [False, True], ids=["an HTTP port", "an internal port"])
def test_a_port_that_is_taken_is_passed_over_and_told(tmp_path: Path, port: int, inner: bool) -> None:
    taken = port + 1 if not inner else port + ports.INTERNAL_OFFSET + ports.BLOCK + 3
    found = context(tmp_path, fleet={"port": port, "gpus": "none", "servers": 3}, engine={"kind": "fake"})
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", taken))
        holder.listen()
        assert not any(taken in block for block in blocks(ports.assign(port, 3)))
        (message,) = told(check_ports, found)
        assert message.startswith(f"{'internal ' if inner else ''}port {taken} is taken by pid ")
    assert told(check_ports, found) == []


def test_a_restart_takes_the_ports_of_its_own_living_servers_for_its_own(tmp_path: Path, port: int) -> None:
    me = processes.identify(1)
    assert me is not None
    inner = port + ports.INTERNAL_OFFSET
    ours = [ServerEntry("", 0, me, 1, port, inner, "none", "tm-x", {})]
    fleet, engine = {"port": port, "gpus": "none", "servers": 1}, {"kind": "fake"}
    with socket.socket() as outer, socket.socket() as other:
        outer.bind(("127.0.0.1", port))
        other.bind(("127.0.0.1", inner + 4))
        assert told(check_ports, context(tmp_path, ours, fleet=fleet, engine=engine)) == []
        assert len(told(check_ports, context(tmp_path, fleet=fleet, engine=engine))) == 2


LAUNCHER = """
import pathlib, subprocess, sys
port, internal, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
with (folder / "tried").open("a") as tried:
    tried.write(port + "\\n")
if len((folder / "tried").read_text().split()) == 1:
    sys.exit("torch.distributed.DistNetworkError: [Errno 98] Address already in use, EADDRINUSE")
sys.exit(subprocess.call([sys.executable, "-m", "tokenmill.testing.server", "--port", port, "--model", "m"]))
"""


def test_a_server_that_lost_a_port_meanwhile_is_started_again_with_others(case: Case) -> None:
    (case.folder / "launcher.py").write_text(LAUNCHER)
    command = [sys.executable, str(case.folder / "launcher.py"), "{port}", "-", str(case.folder)]
    case.write(model={"name": "m"}, engine={"kind": "openai", "args": {}, "command": command}, fleet={"servers": 1})
    assert case.run() == 0, case.output()
    assert_whole(case, {f"p{n}" for n in range(40)})
    first, second = (case.folder / "tried").read_text().split()
    assert first != second
