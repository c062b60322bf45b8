"""A run's status as Prometheus metrics, by its conventions: base units, `_total` for what only grows, few labels.

What may go down, if seldom (rows of a server that had gone bad are made anew, [judge] may change), is a gauge.
"""

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from tokenmill import __version__
from tokenmill.core.efficiency import PARTS
from tokenmill.core.server import State
from tokenmill.core.status import ENDED, NODE_STATES, STEPS, NodeRow, RunStatus, ServerStatus

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

RUN_STATES = (*STEPS, *ENDED, "up", "killed")

PER_SERVER: tuple[tuple[str, str, Callable[[ServerStatus], float | None]], ...] = (
    ("in_flight_requests", "Requests that the server works on", lambda server: server.in_flight),
    ("capacity_requests", "Requests that the server runs at once, 0 before it is known", lambda s: s.capacity),
    ("tokens_per_second", "Output tokens a second over the last minute", lambda server: server.tokens_per_s),
    ("accept_length_tokens", "Tokens a step of speculation yields", lambda server: server.accept_length),
    ("start_progress_ratio", "How far the server's start is", lambda server: server.percent / 100),
)

PER_NODE: tuple[tuple[str, str, Callable[[NodeRow], float]], ...] = (
    ("servers", "Servers of the node", lambda node: node.servers),
    ("servers_ready", "Servers of the node that serve", lambda node: node.ready),
    ("in_flight_requests", "Requests that the node works on", lambda node: node.in_flight),
    ("capacity_requests", "Requests that the node runs at once", lambda node: node.capacity),
    ("tokens_per_second", "Output tokens a second over the last minute", lambda node: node.tokens_per_s),
    ("findings", "What its doctor warned of", lambda node: len(node.findings)),
)


def text(status: RunStatus | None) -> bytes:
    """The page that Prometheus reads; empty where the run has said nothing yet."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(status))
    return generate_latest(registry)


class _Collected:
    def __init__(self, status: RunStatus | None) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        if self._status is not None:
            yield from _of_run(self._status)
            yield from _of_servers(self._status.servers)
            if self._status.nodes:
                yield from _of_nodes(self._status.nodes)


def _of_run(status: RunStatus) -> Iterator[Metric]:
    yield InfoMetricFamily("tokenmill_run", "Which run this is", value={"run": status.run, "version": __version__})
    counts = {name: getattr(status.prompts, name) for name in ("accepted", "rejected", "failed", "pending")}
    yield _each("prompts", "Completions asked for, by what became of them", "verdict", counts)
    yield _each("labels", "Records with this label", "label", dict(sorted(status.labels.items())))
    states = {name: int(name == status.state) for name in (*RUN_STATES, *_new(status.state, RUN_STATES))}
    yield _each("run_state", "1 for the step that the run is in", "state", states)
    yield CounterMetricFamily("tokenmill_output_tokens", "Output tokens since this start", value=status.tokens)
    yield CounterMetricFamily("tokenmill_generating_seconds", "Generating since this start", value=status.seconds)
    readings = {
        ("tokens_per_second", "Output tokens a second, of all servers"): status.tokens_per_s,
        ("slots_busy_ratio", "Mean share of slots that worked, since this start"): status.slots_busy,
        ("eta_seconds", "Time to go at the present rate"): status.eta_s,
        ("findings", "Things to know of servers that work"): len(status.findings),
        ("event_loop_lag_seconds", "Longest delay of tokenmill's own loop lately"): status.loop_lag_s,
        ("journal_age_seconds", "Since the newest record was stored"): _age(status.written),
        ("copy_age_seconds", "Since the newest whole copy in output.copy_to"): _age(status.copied),
        ("status_age_seconds", "Since tokenmill renewed this status"): _age(status.updated),
    }
    if (found := status.efficiency) is not None:
        readings["efficiency_ratio", "Share of the servers' own peak, since this start"] = found.share
        readings["peak_tokens_per_second", "The servers' own peak, all full"] = found.peak_tokens_per_s or None
        missing = {name: round(found.missing.get(name, 0.0), 6) for name in PARTS} if found.share is not None else {}
        yield _each("missing_ratio", "Of the servers' own peak, by what it went to", "cause", missing)
    for (name, words), value in readings.items():
        if value is not None:
            yield GaugeMetricFamily(f"tokenmill_{name}", words, value=value)


def _of_servers(servers: tuple[ServerStatus, ...]) -> Iterator[Metric]:
    """With a label for the node where there are several."""
    own = ["server", "node"] if any(server.node for server in servers) else ["server"]
    marks = [[server.name, server.node][: len(own)] for server in servers]
    states = GaugeMetricFamily("tokenmill_server_state", "1 for the state the server is in", labels=[*own, "state"])
    restarts = CounterMetricFamily("tokenmill_server_restarts", "Restarts since this start", labels=own)
    for mark, server in zip(marks, servers, strict=True):
        for state in (*State, *_new(server.state, tuple(State))):
            states.add_metric([*mark, str(state)], int(server.state == state))
        restarts.add_metric(mark, server.restarts)
    yield states
    yield restarts
    for suffix, words, read in PER_SERVER:
        found = GaugeMetricFamily(f"tokenmill_server_{suffix}", words, labels=own)
        for mark, server in zip(marks, servers, strict=True):
            if (value := read(server)) is not None:
                found.add_metric(mark, value)
        yield found


def _of_nodes(nodes: tuple[NodeRow, ...]) -> Iterator[Metric]:
    states = GaugeMetricFamily("tokenmill_node_state", "1 for the state the node is in", labels=["node", "state"])
    records = CounterMetricFamily("tokenmill_node_records", "Records that it gave since this start", labels=["node"])
    for node in nodes:
        for state in (*NODE_STATES, *_new(node.state, NODE_STATES)):
            states.add_metric([node.node, state], int(node.state == state))
        records.add_metric([node.node], node.records)
    yield states
    yield records
    for suffix, words, read in PER_NODE:
        found = GaugeMetricFamily(f"tokenmill_node_{suffix}", words, labels=["node"])
        for node in nodes:
            found.add_metric([node.node], read(node))
        yield found


def _each(name: str, words: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    found = GaugeMetricFamily(f"tokenmill_{name}", words, labels=[label])
    for value, count in values.items():
        found.add_metric([value], count)
    return found


def _age(moment: float) -> float | None:
    return round(max(time.time() - moment, 0.0), 3) if moment else None


def _new(state: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """A state that this list does not know yet is told all the same."""
    return (state,) if state and state not in known else ()
