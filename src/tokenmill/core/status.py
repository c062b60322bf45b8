"""What a node says of itself and its servers: `status --json`, the live view and the page are drawn from this."""

from collections.abc import Sequence

import msgspec

from tokenmill.core.efficiency import Efficiency
from tokenmill.core.environment import Environment
from tokenmill.core.occupancy import Work
from tokenmill.core.peak import Peak
from tokenmill.core.server import SERVING, State

STEPS = ("preflight", "staging", "starting", "generating", "draining", "sealing", "stopping")
ENDED = ("done", "stopped", "failed")
"""A run's states while it goes on, and those that it leaves."""


def name_of(node: str, index: int) -> str:
    """A server's name: its number, with its node in front where there are several."""
    return f"{node}/{index}" if node else str(index)


def by_name(name: str) -> tuple[str, int, str]:
    """Sorts servers' names: node by node, their numbers as numbers."""
    node, _, index = name.rpartition("/")
    return (node, int(index) if index.isdecimal() else -1, index)


class ServerStatus(msgspec.Struct, frozen=True):
    """One server. `percent` is of the whole start; rates are tokens a second over the last minute; times in seconds.

    `eta_s` is until it is ready, if this start goes as the last one did. `doing`: what a silent one does, in words.
    `last_error` is why it does not serve, `last_problem` also what it has got over. `work` is what it has done since
    this tokenmill knows it, `peak` the fastest that it has been seen.
    """

    node: str
    index: int
    gpu: str
    port: int
    pid: int | None
    state: str
    phase: str
    percent: float
    in_flight: int
    capacity: int
    tokens_per_s: float
    accept_length: float | None
    restarts: int
    last_error: str
    eta_s: float | None = None
    doing: str = ""
    last_problem: str = ""
    work: Work | None = None
    peak: Peak | None = None

    @property
    def name(self) -> str:
        """As the server is called everywhere."""
        return name_of(self.node, self.index)


class Finding(msgspec.Struct, frozen=True):
    """Something that a person should know of a server that works: a `kind` to filter by, values in `text`, a fix."""

    kind: str
    server: str
    text: str
    fix: str = ""


class Step(msgspec.Struct, frozen=True):
    """A long step that goes on: `done` of `total` units (0: nobody knows), `per_s` of the last seconds, None unknown.

    `unit` is a plural, or "bytes".
    """

    what: str
    done: int
    total: int
    unit: str
    per_s: float | None = None
    note: str = ""


class NodeStatus(msgspec.Struct, frozen=True):
    """`queued` are prompts that no server has begun, `credits` how many more the node can use now, `doctor` its
    machine's findings. `environment` is None until it knows.

    Where there are several, their run adds: `records`, and `tokens` are those that it has from it since this start;
    `at`, its address; `state` and `note`, what it is and why, where its servers do not tell (core/roll.py).
    """

    node: str
    servers: tuple[ServerStatus, ...]
    queued: int = 0
    in_flight: int = 0
    capacity: int = 0
    credits: int = 0
    tokens: int = 0
    findings: tuple[Finding, ...] = ()
    step: Step | None = None
    environment: Environment | None = None
    doctor: tuple[Finding, ...] = ()
    records: int = 0
    at: str = ""
    state: str = ""
    note: str = ""


def together(nodes: Sequence[NodeStatus]) -> NodeStatus:
    """All nodes as one: their servers side by side, everything else added up. What a node of several stages is its
    own: the others may generate."""
    return NodeStatus(
        node="",
        servers=tuple(server for node in nodes for server in node.servers),
        queued=sum(node.queued for node in nodes),
        in_flight=sum(node.in_flight for node in nodes),
        capacity=sum(node.capacity for node in nodes),
        credits=sum(node.credits for node in nodes),
        tokens=sum(node.tokens for node in nodes),
        findings=tuple(finding for node in nodes for finding in node.findings),
        step=next((node.step for node in nodes if node.step is not None and not node.node), None),
    )


NODE_STATES = ("joining", "doctor", "staging", "starting", "ready", "backoff", "draining", "ended", "lost", "failed")
"""Of a node of several, in the order of its life. `backoff`: no server of it serves, and none is starting."""


class NodeRow(msgspec.Struct, frozen=True):
    """One of several nodes, as it is shown: `state` is one of NODE_STATES ("alone", "gone" or "unknown" where its run
    is dead), `ready` of its `servers` serve, `tokens` and `records` came since this start, rates are tokens a second of
    the last minute. `note` is why it is so, `made_of` its cards and engine in words, `findings` are its doctor's."""

    node: str
    state: str
    at: str
    servers: int
    ready: int
    in_flight: int
    capacity: int
    tokens_per_s: float
    tokens: int
    records: int
    step: Step | None = None
    note: str = ""
    made_of: str = ""
    findings: tuple[Finding, ...] = ()


def row_of(node: NodeStatus) -> NodeRow:
    """What is shown of a node."""
    return NodeRow(
        node=node.node,
        state=_state(node),
        at=node.at,
        servers=len(node.servers),
        ready=sum(server.state in SERVING for server in node.servers),
        in_flight=node.in_flight,
        capacity=node.capacity,
        tokens_per_s=round(sum(server.tokens_per_s for server in node.servers), 1),
        tokens=node.tokens,
        records=node.records,
        step=node.step,
        note=node.note,
        made_of=node.environment.made_of if node.environment else "",
        findings=node.doctor,
    )


_RESTING = frozenset({State.BACKOFF, State.QUARANTINED, State.FAILED, State.STOPPED})


def _state(node: NodeStatus) -> str:
    if node.state:
        return node.state
    if not node.servers:
        return "staging"
    if any(server.state in SERVING for server in node.servers):
        return "ready"
    return "backoff" if all(server.state in _RESTING for server in node.servers) else "starting"


class PromptCounts(msgspec.Struct, frozen=True):
    """Ids by what became of them: accepted + rejected + failed + pending = total, always."""

    total: int = 0
    accepted: int = 0
    rejected: int = 0
    failed: int = 0
    pending: int = 0

    @property
    def done(self) -> int:
        """Ids that have a record."""
        return self.total - self.pending

    @property
    def verdicts(self) -> str:
        """In words."""
        return f"{self.accepted:,} accepted, {self.rejected:,} rejected, {self.failed:,} failed"


class GateShare(msgspec.Struct, frozen=True):
    """What the gate counts: `what` is rejected, failed or truncated, `share` of all that ended, `allowed` of a cohort,
    `worst` the highest that any cohort has for certain."""

    what: str
    share: float
    allowed: float
    worst: float


class RunStatus(msgspec.Struct, frozen=True):
    """`state` is one of STEPS or ENDED; "up" where servers go on alone; "killed" by those who find it so.

    `tokens` came in `seconds` of generating since this start; `tokens_per_s` is of the last minute, and their quotient
    once servers have stopped. `copied` is the Unix time of the newest whole copy in output.copy_to, 0 without one;
    `written` that of the newest record in the journal. `loop_lag_s` is the longest of the last seconds that tokenmill
    itself was late by, doing other things. `eta_s` is likely, `eta_low_s` to `eta_high_s` honest (core/eta); None where
    unknown, or where nothing bounds it. `efficiency` is None where it is not measured. `nodes` is empty where the run
    has but one, on this machine.
    """

    run: str
    state: str
    prompts: PromptCounts
    servers: tuple[ServerStatus, ...]
    tokens_per_s: float
    eta_s: float | None
    slots_busy: float | None
    tokens: int = 0
    seconds: float = 0.0
    labels: dict[str, int] = {}
    message: str = ""
    updated: float = 0.0
    copied: float = 0.0
    findings: tuple[Finding, ...] = ()
    written: float = 0.0
    loop_lag_s: float = 0.0
    eta_low_s: float | None = None
    eta_high_s: float | None = None
    gate: tuple[GateShare, ...] = ()
    step: Step | None = None
    efficiency: Efficiency | None = None
    nodes: tuple[NodeRow, ...] = ()
