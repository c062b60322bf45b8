"""The servers of a node together: what is said of outside, and what is not."""

from dataclasses import replace
from pathlib import Path

from tests import living
from tokenmill.core.server import Failure, FailureKind, State
from tokenmill.fleet import Fleet
from tokenmill.launch import Place
from tokenmill.machine.ports import Ports
from tokenmill.supervise import Supervisor

NOWHERE = Ports(0, 0)
AWAY = Failure(FailureKind.UNREACHABLE, "it cannot be reached")


def made(folder: Path, states: dict[int, State]) -> tuple[Fleet, list[Supervisor], list[str]]:
    """Servers that have failed once, all of the same; what is said of them."""
    addresses = [f"http://127.0.0.1:{index + 1}" for index in states]
    of = living.job_of(folder, {"kind": "openai", "addresses": addresses})
    supervisors, said = list[Supervisor](), list[str]()
    fleet = Fleet(of.config, of.folder, supervisors, lambda *words: said.append(words[1]))
    for index, state in states.items():
        supervisor = Supervisor(of, Place(index, ()), NOWHERE, lambda: NOWHERE, fleet.moved)
        supervisor.server = replace(supervisor.server, state=state, failure=AWAY)
        supervisors.append(supervisor)
    return fleet, supervisors, said


def test_one_cause_on_all_servers_is_said_once(tmp_path: Path) -> None:
    fleet, supervisors, said = made(tmp_path, {0: State.BACKOFF, 1: State.BACKOFF, 2: State.BACKOFF})
    assert [fleet.moved(supervisor, State.READY) for supervisor in supervisors] == [False, True, True]
    assert [words.partition(";")[0] for words in said] == ["one cause on 2 servers at once: it cannot be reached"]


def test_servers_that_stop_as_asked_have_no_trouble_of_outside_though_they_once_failed(tmp_path: Path) -> None:
    fleet, supervisors, said = made(tmp_path, {0: State.STOPPED, 1: State.STOPPED})
    assert [fleet.moved(supervisor, State.READY) for supervisor in supervisors] == [False, False]
    assert said == []


def test_a_place_that_cannot_be_used_leaves_its_turn_to_the_next(tmp_path: Path) -> None:
    fleet, supervisors, _ = made(tmp_path, {0: State.BACKOFF, 1: State.BACKOFF})
    for supervisor in supervisors:
        fleet.moved(supervisor, State.READY)
    quarantined = supervisors[0]
    quarantined.server = replace(quarantined.server, state=State.QUARANTINED)
    assert not fleet.moved(quarantined, State.BACKOFF)
    assert fleet._surroundings.waiting == (1,)
