"""A cluster's nodes: who they are, what became of them, and that terminal, page, metrics and report say so alike."""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.make import record
from tests.unit.test_report import run_folder
from tests.unit.test_screen import drawn
from tests.unit.test_screen import server as one
from tokenmill import configfile, environment, linefile, report, survey
from tokenmill.cluster import left
from tokenmill.core.environment import Environment, unlike
from tokenmill.core.roll import Roll, found
from tokenmill.core.status import Finding, NodeStatus, PromptCounts, RunStatus, ServerStatus, Step, row_of, together
from tokenmill.doctor import NODE_CHECKS
from tokenmill.environment import Census
from tokenmill.errors import UsageError
from tokenmill.events import EventLog
from tokenmill.folder import RunFolder
from tokenmill.logs import elsewhere, logs
from tokenmill.servers import status_lines, status_of
from tokenmill.steps import step_words
from tokenmill.view import line
from tokenmill.web import metrics

H200 = Environment(
    1.0, "1", "3.11", "sglang", "0.5.11", "", "", "cpu", 8, 1, "570.1", "12.8", ("8 × NVIDIA H200",), "n0"
)
STAGED = Step("copying", 3 * 10**9, 10**10, "bytes", 1e9)
SLOW = Finding("places", "", "the mount is slow", "another mount")


def servers(node: str, state: str, count: int = 8) -> tuple[ServerStatus, ...]:
    return tuple(one(n, state, node=node, last_error="it died" if state == "backoff" else "") for n in range(count))


def node(name: str, state: str, count: int = 8) -> NodeStatus:
    own = servers(name, state, count)
    flight = sum(s.in_flight for s in own), sum(s.capacity for s in own)
    return NodeStatus(name, own, 0, *flight, 0, 100, records=1200, environment=replace(H200, node=name), doctor=(SLOW,))


NODES = (
    node("n0", "ready"),
    node("n1", "backoff"),
    NodeStatus("n2", (), step=STAGED),
    NodeStatus("n3", (), state="lost", note="it cannot be reached", records=77),
)


def run_of(nodes: Sequence[NodeStatus]) -> RunStatus:
    every = together(nodes)
    rows = tuple(map(row_of, nodes))
    counts = PromptCounts(9000, 4000, 20, 3, 4977)
    return RunStatus("r", "generating", counts, every.servers, 1.0, None, None, updated=time.time(), nodes=rows)


# -- who they are ------------------------------------------------------------------------------------------------------
def test_a_nodes_state_is_that_of_its_servers_unless_something_else_is_known() -> None:
    states = [row_of(each).state for each in (*NODES, node("n4", "starting"), NodeStatus("n5", (), state="joining"))]
    assert states == ["ready", "backoff", "staging", "lost", "starting", "joining"]
    mixed = replace(node("n", "backoff"), servers=(*servers("n", "backoff", 7), *servers("n", "suspect", 1)))
    assert row_of(mixed).state == "ready"


def test_what_a_node_gave_stays_when_it_is_lost_and_comes_again() -> None:
    roll = Roll()
    roll.coming("n0", "10.0.0.7")
    assert [(x.node, x.state, x.at) for x in roll.whole([])] == [("n0", "joining", "10.0.0.7")]
    first = replace(NODES[0], tokens=100, records=10)
    roll.gone(first, "lost", "it cannot be reached")
    (lost,) = roll.whole([])
    assert (lost.state, lost.note, lost.tokens, lost.records, lost.servers) == (
        *("lost", "it cannot be reached"),
        *(100, 10, ()),
    )
    roll.coming("n0", "10.0.0.8")
    second = replace(first, tokens=5, records=1)
    (again,) = roll.whole([second])
    assert (again.state, again.at, again.tokens, again.records) == ("", "10.0.0.8", 105, 11)
    roll.gone(second, "ended", "")
    assert [(x.state, x.tokens, x.records) for x in roll.whole([])] == [("ended", 105, 11)]


def test_a_step_of_one_of_several_is_not_the_runs() -> None:
    assert together(NODES).step is None
    assert together([NodeStatus("", (), step=STAGED)]).step == STAGED
    assert together(NODES).tokens == 200


def test_unlike_nodes_are_named_and_every_environment_is_kept_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    told: list[str] = []
    log = EventLog(folder.events, lambda event: told.append(event.sentence))
    census = Census(folder, log)
    odd = replace(H200, node="n1", driver="550.9", gpus=("8 × NVIDIA H100",), kernel="other")
    every = [NodeStatus(row.node, (), environment=row) for row in (H200, odd, replace(H200, node="n2", t=9.0))]
    for _ in range(3):
        census.note([*every, NodeStatus("n9", ()), NodeStatus("", (), environment=replace(H200, node=""))])
    words = "cards 8 × NVIDIA H100, not 8 × NVIDIA H200; driver 550.9, not 570.1"
    assert told == [f"node n1: unlike node n0: {words}"]
    assert unlike(H200, replace(H200, gpus=(), driver="")) == (
        "cards 8 × NVIDIA H200, not none; driver 570.1, not none; processor none, not 8 × cpu"
    )
    Census(folder, log).note(every)
    assert [row.node for row in environment.read(folder.environment)] == ["n0", "n1", "n2"]


# -- where they are shown ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50)])
def test_the_screen_shows_every_node_and_the_servers_in_trouble(width: int, height: int) -> None:
    text = drawn(run_of(NODES), width, height)
    for words in ("n0    ready", "8/8", "1,200", "n1    backoff", "0/8", "n2    staging", "n3    lost", "n1/0", "16 "):
        assert words in text
    assert "copying 3" in text
    assert "it cannot be reached" in text
    many = run_of([node(f"node-{n}", "ready", 2) for n in range(40)] + [NODES[3]])
    text = drawn(many, width, height)
    assert "n3 " in text, "trouble comes first"
    assert "(40/41 nodes ready)" in text or height > 24


def test_lines_and_status_say_the_same() -> None:
    status = run_of(NODES)
    assert "1/4 nodes, 8/16 servers ready" in line(status)
    assert f"node n2 staging ({step_words(STAGED)})" in line(status)
    assert "node n3 lost" in line(status)
    text = "\n".join(status_lines(status))
    assert text.startswith("r: generating, 1/4 nodes, 8/16 servers ready")
    assert "node n0  ready" in text
    assert "8 × NVIDIA H200; sglang 0.5.11; driver 570.1" in text
    assert "  nodes n0, n1: places: the mount is slow\n    fix: another mount" in text
    assert [whose for whose, _ in found([row_of(node(f"n{n}", "ready")) for n in range(9)])] == ["every node"]


def test_metrics_have_a_label_for_the_node_where_there_are_several() -> None:
    families = {each.name: each for each in text_string_to_metric_families(metrics.text(run_of(NODES)).decode())}
    names = {"n0", "n1", "n2", "n3"}
    assert {s.labels["node"] for s in families["tokenmill_node_records"].samples} == names
    ready = {s.labels["node"]: s.value for s in families["tokenmill_node_servers_ready"].samples}
    assert ready == {"n0": 8, "n1": 0, "n2": 0, "n3": 0}
    states = {s.labels["node"] for s in families["tokenmill_node_state"].samples if s.value}
    assert states == names
    assert families["tokenmill_server_in_flight_requests"].samples[0].labels == {"server": "n0/0", "node": "n0"}


def test_a_report_has_its_nodes_and_names_those_unlike_the_others(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", [record(f"k{n}", n, server=f"n{n % 3}/{n % 2}") for n in range(30)])
    rows = [
        replace(H200, node=""),
        *(replace(H200, node=f"n{n}", driver=f"{550 if n == 2 else 570}.1") for n in range(3)),
    ]
    linefile.append(folder / "environment.jsonl", b"\n".join(map(msgspec.json.encode, rows)))
    page = report.write(RunFolder(folder), report.Ending("done", 30)).read_text()
    told = msgspec.json.decode((folder / "report.json").read_bytes())
    assert [(x["name"], x["servers"], x["completions"]) for x in told["nodes"]] == [
        *(("n0", 2, 10), ("n1", 2, 10), ("n2", 2, 10))
    ]
    assert "Node n2 is unlike the others: driver 550.1, not 570.1." in told["notable"]
    assert '<section id="nodes">' in page
    assert "Environment of n0, n1" in page
    alone = run_folder(tmp_path / "alone", [record("k0", 0, server="0")])
    assert '<section id="nodes">' not in report.write(RunFolder(alone), report.Ending("done", 1)).read_text()


# -- without their run -------------------------------------------------------------------------------------------------
def test_logs_of_nodes_are_found_by_name_and_those_elsewhere_are_told_of(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    for name in ("n0", "n1"):
        own = RunFolder(tmp_path / "nodes" / name)
        own.create()
        own.log(0).write_text(f"hello of {name}\n")
    status = run_of([*NODES[:3], replace(NODES[3], at="10.0.0.7")])
    folder.write_status(status)
    assert list(logs(folder, None, follow=False)) == [("n0/0", "hello of n0"), ("n1/0", "hello of n1")]
    assert list(logs(folder, "n1", follow=False)) == list(logs(folder, "n1/0", follow=False))
    assert [name for name, _ in elsewhere(folder)] == ["n2", "n3"]
    with pytest.raises(UsageError, match=r"n3 lie on its machine, 10\.0\.0\.7") as caught:
        list(logs(folder, "n3/0", follow=False))
    assert caught.value.fix.startswith("there: tokenmill logs ")


def test_nodes_of_a_dead_run_are_told_with_the_time_of_their_end(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create()
    (tmp_path / "config.toml").write_text(
        '[model]\npath = "m"\n[engine]\nkind = "fake"\n[prompts]\npath = "p"\n'
        '[fleet]\ngpus = "none"\ncluster = "ray"\naddress = "127.0.0.1:1"\nwait_for_head = "10m"\n'
    )
    folder.write_status(run_of(NODES))
    told: list[str] = []
    with RunFolder(tmp_path / "nodes" / "n0").own("node"):
        RunFolder(tmp_path / "nodes" / "n1").create()
        rows = {row.node: row for row in status_of(folder).nodes}
        assert {name: row.state for name, row in rows.items()} == {
            "n0": "alone",
            "n1": "gone",
            "n2": "unknown",
            "n3": "lost",
        }
        assert "it ends its servers and itself at " in rows["n0"].note
        assert "on its own machine; if it lives" in rows["n2"].note
        assert left.end(folder, EventLog(folder.events, lambda event: told.append(event.sentence))) == []
    assert told[0] == "the nodes cannot be asked to end: nobody answers at fleet.address = '127.0.0.1:1'"
    assert [words.partition(":")[0] for words in told[1:]] == ["node n0", "node n2"]
    (said,) = survey.examined(configfile.load(folder.config), tuple(NODE_CHECKS), told.append)
    assert (said.level, said.message.rpartition(": ")[2]) == (
        "fail",
        "nobody answers at fleet.address = '127.0.0.1:1'",
    )
