"""The metrics' names and values, by what reads them: Prometheus' parser, the dashboard, a port of a run."""

import json
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT
from tests.harness import Case, wait_until
from tokenmill.core.efficiency import PARTS, Efficiency
from tokenmill.core.status import Finding, PromptCounts, RunStatus, ServerStatus
from tokenmill.errors import UsageError
from tokenmill.web import metrics
from tokenmill.web.exporter import exposed

SERVERS = (
    ServerStatus("", 0, "0", 1, 2, "ready", "", 100.0, 60, 64, 900.5, 2.9, 1, ""),
    ServerStatus("", 1, "1", 1, 2, "starting", "weights", 40.0, 0, 0, 0.0, None, 0, ""),
)
STATUS = RunStatus(
    run='a "run"\n',
    state="generating",
    prompts=PromptCounts(100, 60, 5, 1, 34),
    servers=SERVERS,
    tokens_per_s=900.5,
    eta_s=12.0,
    slots_busy=0.9,
    tokens=12345,
    seconds=60.0,
    labels={"empty": 3},
    updated=1.0,
    copied=1.0,
    findings=(Finding("slow", "0", "it is slow"),),
    written=1.0,
    loop_lag_s=0.002,
    efficiency=Efficiency(0.95, 0.96, 1000.0, missing={"client": 0.04, "store": 0.01}),
)
DASHBOARD = ROOT / "docs" / "grafana.json"


def families(status: RunStatus | None = STATUS) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.text(status).decode())}


def values(name: str, label: str, **wanted: str) -> dict[str, float]:
    samples = families()[name].samples
    return {s.labels[label]: s.value for s in samples if wanted.items() <= s.labels.items()}


def test_values_are_the_status() -> None:
    assert values("tokenmill_prompts", "verdict") == {"accepted": 60, "rejected": 5, "failed": 1, "pending": 34}
    assert values("tokenmill_labels", "label") == {"empty": 3}
    missing = values("tokenmill_missing_ratio", "cause")
    assert (missing["client"], missing["store"], missing["queue"], len(missing)) == (0.04, 0.01, 0.0, len(PARTS))
    assert families()["tokenmill_efficiency_ratio"].samples[0].value == 0.95
    assert families()["tokenmill_peak_tokens_per_second"].samples[0].value == 1000.0
    assert families()["tokenmill_run_info"].samples[0].labels["run"] == 'a "run"\n'
    assert families()["tokenmill_output_tokens"].samples[0].value == 12345
    assert values("tokenmill_server_in_flight_requests", "server") == {"0": 60, "1": 0}
    assert values("tokenmill_server_accept_length_tokens", "server") == {"0": 2.9}
    assert values("tokenmill_server_start_progress_ratio", "server")["1"] == 0.4
    states = values("tokenmill_server_state", "state", server="1")
    assert [state for state, value in states.items() if value] == ["starting"]
    assert sum(values("tokenmill_run_state", "state").values()) == 1
    assert families()["tokenmill_event_loop_lag_seconds"].samples[0].value == 0.002
    assert families()["tokenmill_journal_age_seconds"].samples[0].value > 1e9


def test_names_follow_the_conventions() -> None:
    for name, family in families().items():
        assert re.fullmatch(r"tokenmill_[a-z0-9_]+", name)
        assert family.documentation
        assert not re.search(r"_(ms|millis|percent|minutes|count)$", name)
        assert all(s.name.endswith("_total") == (family.type == "counter") for s in family.samples), name


def test_a_state_that_is_new_is_told_all_the_same() -> None:
    status = RunStatus("r", "dreaming", PromptCounts(), (), 0.0, None, None)
    states = {s.labels["state"]: s.value for s in families(status)["tokenmill_run_state"].samples}
    assert states["dreaming"] == 1


def test_series_are_few() -> None:
    assert sum(len(family.samples) for family in families().values()) < 80


def test_a_run_that_said_nothing_has_no_metrics() -> None:
    assert families(None) == {}


# -- the dashboard -----------------------------------------------------------------------------------------------------
def expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    told = {sample.name for family in families().values() for sample in family.samples}
    asked = {name for expression in expressions() for name in re.findall(r"\btokenmill_\w+", expression)}
    assert asked <= told
    assert told - asked <= {"tokenmill_run_info", "tokenmill_tokens_per_second", "tokenmill_generating_seconds_total"}


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 36
    assert (board["id"], board["uid"]) == (None, "tokenmill")
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] in ("stat", "timeseries", "state-timeline", "bargauge")
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "two panels lie on each other"
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "instance"]


# -- the port of a run -------------------------------------------------------------------------------------------------
def get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_port_tells_what_was_published_last(port: int) -> None:
    now: list[RunStatus | None] = [None]
    with exposed(port, lambda: now[0]):
        assert get(port) == (200, "")
        now[0] = STATUS
        assert "tokenmill_output_tokens_total 12345.0" in get(port)[1]
        assert get(port, "/")[0] == 404
        assert get(port, Host="evil.example")[0] == 403
        assert get(port, Host="localhost:1")[0] == 200
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", data=b"x", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=10)
        refused.value.close()
        assert refused.value.code == 405
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 1.0)


def test_a_port_that_is_taken_is_said_before_anything_begins(port: int) -> None:
    taken, raises = socket.create_server(("127.0.0.1", port)), pytest.raises(UsageError, match=f"127.0.0.1:{port}")
    with taken, raises as refused, exposed(port, lambda: None):
        pytest.fail("it began")
    assert str(port) in refused.value.fix


def test_a_run_tells_its_numbers_and_a_taken_port_costs_it_nothing(case: Case, port: int) -> None:
    metrics_port = port + 7
    with socket.create_server(("127.0.0.1", metrics_port)):
        assert case.run("--metrics", str(metrics_port)) == 2
    assert f"metrics cannot be served on 127.0.0.1:{metrics_port}" in case.output()
    assert not case.run_folder.log(0).exists()
    case.write(
        engine={"args": {"slots": 2, "latency-ms": 400, "quick-canary": True}}, generation={"calibrate": "300ms"}
    )
    running = case.start("--metrics", str(metrics_port))
    wait_until(lambda: 'tokenmill_prompts{verdict="accepted"}' in _scraped(metrics_port), running)
    wait_until(lambda: _accepted(_scraped(metrics_port)) >= 10, running)
    wait_until(lambda: "tokenmill_efficiency_ratio" in _scraped(metrics_port), running)
    text = _scraped(metrics_port)
    assert 'tokenmill_server_state{server="0",state="ready"} 1.0' in text
    assert 'tokenmill_run_state{state="generating"} 1.0' in text
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {"tokenmill_event_loop_lag_seconds", "tokenmill_journal_age_seconds"} <= names
    running.terminate()
    running.terminate()
    case.wait(running)


def _scraped(port: int) -> str:
    try:
        return get(port)[1]
    except OSError:
        return ""


def _accepted(text: str) -> float:
    found = re.search(r'tokenmill_prompts\{verdict="accepted"\} (\S+)', text)
    return float(found[1]) if found else 0.0


def test_the_docs_name_every_metric() -> None:
    page = Path(ROOT / "docs" / "page.md").read_text()
    told = {sample.name for family in families().values() for sample in family.samples}
    assert {name for name in told if f"`{name}" not in page} == set()
