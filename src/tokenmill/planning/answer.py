"""What `plan` answers, as `plan --json` prints it."""

import msgspec


class Range(msgspec.Struct, frozen=True):
    low: int | float
    high: int | float


class NodePlan(msgspec.Struct, frozen=True):
    """One machine's part of a plan, as it says itself; `cards` in words, `trouble` why it can have no node."""

    node: str
    servers: int = 0
    running_per_server: int = 0
    limited_by: str = ""
    context: int | None = None
    kv_tokens_per_server: int | None = None
    cards: str = ""
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    trouble: str = ""


class Plan(msgspec.Struct, frozen=True):
    """`running_per_server` requests really run at once; `waiting_per_server` are asked for beyond that.

    `tokens` and `hours` are of what is still to be generated, `disk_bytes` of the whole run, at most;
    `lost_with_the_machine_s` is null where all is lost. `tokens_from` and `hours_from` say how they are known, or why
    they are not. `nodes` are the machines of a cluster that was asked: `servers` are theirs, what holds of a server is
    the mean of them, or the least; `nodes_from` is why none was asked.
    """

    servers: int
    running_per_server: int
    limited_by: str
    waiting_per_server: int
    tokens: Range | None
    hours: Range | None
    disk_bytes: dict[str, int]
    lost_with_the_machine_s: float | None
    changes: list[str]
    completions: int
    pending: int
    tokens_from: str
    hours_from: str
    prompt_tokens: dict[str, int] | None
    prompt_tokens_from: str
    context: int | None
    kv_tokens_per_server: int | None
    disk_free_bytes: int
    hidden_states_bytes: Range | None
    notes: list[str]
    nodes: tuple[NodePlan, ...] = ()
    nodes_from: str = ""
