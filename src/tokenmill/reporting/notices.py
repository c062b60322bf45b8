"""Every warning of a run, told once: those that differ in their numbers only are one, with how often and when."""

import re
from dataclasses import dataclass, field

import msgspec

from tokenmill.core.audit import FindingKind
from tokenmill.events import Event

FINDINGS = frozenset(kind.value for kind in FindingKind)

MOST = 400
"""Different warnings that are kept; a run that has more says the same in ever other words."""

_NUMBERS = re.compile(r"\d[\d,.:]*")


class Notice(msgspec.Struct):
    """`text` is the newest of `count`, between `first` and `last`, Unix time; `server` or `node` as in events."""

    level: str
    kind: str
    server: str
    node: str
    text: str
    fix: str
    lines: tuple[str, ...]
    count: int
    first: float
    last: float


class FindingRow(msgspec.Struct):
    """What the watch found of a server; `ended` is None where it held to the end. See core/audit.py for the kinds."""

    kind: str
    server: str
    text: str
    fix: str
    began: float
    ended: float | None = None


@dataclass
class Notices:
    """Takes in all events, in their order. `left_out` counts warnings that are not among `rows`."""

    findings: list[FindingRow] = field(default_factory=list)
    left_out: int = 0
    _rows: dict[tuple[str, ...], Notice] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Keeps what is a warning, an error, a finding or a finding's end."""
        if event.kind in FINDINGS:
            self._find(event)
        elif event.level in ("warn", "error"):
            self._warn(event)

    @property
    def rows(self) -> list[Notice]:
        """Errors first, then the newest."""
        return sorted(self._rows.values(), key=lambda row: (row.level != "error", -row.last))

    def _find(self, event: Event) -> None:
        if event.level == "warn":
            self.findings.append(FindingRow(event.kind, event.server, event.text, event.fix, event.t))
            return
        for row in self.findings:
            if (row.kind, row.server, row.ended) == (event.kind, event.server, None):
                row.ended = event.t

    def _warn(self, event: Event) -> None:
        key = (event.kind, event.server, event.node, _NUMBERS.sub("#", event.text))
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= MOST:
                self.left_out += 1
                return
            self._rows[key] = Notice(
                level=event.level,
                kind=event.kind,
                server=event.server,
                node=event.node,
                text=event.text,
                fix=event.fix,
                lines=event.lines,
                count=1,
                first=event.t,
                last=event.t,
            )
        else:
            row.text, row.fix, row.lines, row.last = event.text, event.fix, event.lines, event.t
            row.count += 1
