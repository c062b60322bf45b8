"""What each event means in each state of a server: every pair is defined here, and lifecycle.step obeys. Pure."""

from collections.abc import Mapping
from typing import Literal

from tokenmill.core.server import (
    FINAL,
    LIVE,
    SERVING,
    WAITING,
    Adopt,
    Answered,
    CanaryPassed,
    Failed,
    Gone,
    Healthy,
    Hold,
    Launch,
    PhaseSeen,
    ProbeFailed,
    ProbePassed,
    Progress,
    Release,
    State,
    Stop,
    Tick,
    Trouble,
)
from tokenmill.errors import TokenmillError

Meaning = Literal["taken", "late", "illegal"]

_ALL = frozenset(State)
_BEGUN = _ALL - {State.PENDING}
_STARTING = frozenset({State.STARTING, State.ANSWERING})

_TAKEN: Mapping[type, frozenset[State]] = {
    Launch: frozenset({State.PENDING}),
    Adopt: frozenset({State.PENDING}),
    PhaseSeen: _STARTING,
    Progress: LIVE,
    Answered: frozenset({State.STARTING}),
    Healthy: frozenset({State.ANSWERING}),
    CanaryPassed: frozenset({State.CANARY}),
    ProbePassed: frozenset({State.SUSPECT}),
    ProbeFailed: frozenset({State.SUSPECT}),
    Trouble: SERVING,
    Failed: LIVE,
    Tick: _ALL,
    Stop: _ALL - FINAL - {State.STOPPING},
    Gone: _BEGUN - LIVE,
    Hold: WAITING,
    Release: WAITING,
}
_LATE: Mapping[type, frozenset[State]] = {
    PhaseSeen: _BEGUN,
    Progress: _BEGUN,
    Answered: _BEGUN,
    Healthy: _BEGUN - {State.STARTING},
    CanaryPassed: _BEGUN - _STARTING,
    ProbePassed: _BEGUN - _STARTING - {State.CANARY},
    ProbeFailed: _BEGUN - _STARTING - {State.CANARY},
    Trouble: _BEGUN - _STARTING - {State.CANARY},
    Failed: _BEGUN,
    Stop: FINAL | {State.STOPPING},
    Gone: LIVE,
    Hold: _BEGUN,
    Release: _BEGUN,
}


class IllegalEvent(TokenmillError):
    """A bug of ours: an event that cannot happen in this state; carries the server's last events."""


def meaning(state: State, event: type) -> Meaning:
    """What an event means in a state: it is acted on, it comes too late and is ignored, or it cannot happen."""
    if state in _TAKEN[event]:
        return "taken"
    return "late" if state in _LATE.get(event, ()) else "illegal"
