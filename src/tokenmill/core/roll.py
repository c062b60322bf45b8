"""The roll of a run's nodes: those that answer, and those that come or have gone, which cannot speak for themselves."""

from collections.abc import Sequence

from msgspec.structs import replace

from tokenmill.core.status import Finding, NodeRow, NodeStatus

NAMED = 4
"""Nodes that a line names one by one."""


class Roll:
    """A node that comes again under its name goes on with what it had given before."""

    def __init__(self) -> None:
        self._absent: dict[str, NodeStatus] = {}
        self._at: dict[str, str] = {}

    def coming(self, name: str, at: str, note: str = "") -> None:
        """A machine is to get a node; `at` is its address, `note` why it has none yet."""
        self._at[name] = at
        before = self._absent.get(name, NodeStatus(name, ()))
        self._absent[name] = replace(before, state="joining", note=note)

    def gone(self, last: NodeStatus, state: str, note: str) -> None:
        """As it was last known; it is `lost`, `failed` or has `ended`."""
        self._absent[last.node] = self._added(away(last, state, note))

    def whole(self, present: Sequence[NodeStatus]) -> list[NodeStatus]:
        """All nodes by name: `present` are those that the run has in hand."""
        found = {name: replace(status, at=self._at.get(name, "")) for name, status in self._absent.items()}
        for status in present:
            found[status.node] = replace(self._added(status), at=self._at.get(status.node, ""))
        return [found[name] for name in sorted(found)]

    def _added(self, status: NodeStatus) -> NodeStatus:
        before = self._absent.get(status.node)
        if before is None:
            return status
        return replace(status, tokens=status.tokens + before.tokens, records=status.records + before.records)


def away(last: NodeStatus, state: str, note: str) -> NodeStatus:
    """A node that was, as it was last known: what it gave stays, what it did is no more."""
    return replace(
        last, servers=(), queued=0, in_flight=0, capacity=0, credits=0, findings=(), step=None, state=state, note=note
    )


def found(nodes: Sequence[NodeRow]) -> list[tuple[str, Finding]]:
    """What doctors found, each once, with the nodes that it holds for in words."""
    holders: dict[Finding, list[str]] = {}
    for node in nodes:
        for finding in node.findings:
            holders.setdefault(finding, []).append(node.node)
    return [(named(names, len(nodes)), finding) for finding, names in holders.items()]


def named(names: Sequence[str], count: int) -> str:
    """Some of `count` nodes, in words."""
    if len(names) == count > 1:
        return "every node"
    told = list(names[: NAMED if len(names) <= NAMED else NAMED - 1])
    rest = len(names) - len(told)
    return f"node{'s' * (len(names) > 1)} {', '.join(told)}{f' and {rest} more' if rest else ''}"
