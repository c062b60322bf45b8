"""Records on a node's own disk that no head has taken: a file of journal lines, in which a torn one harms no other."""

from pathlib import Path

import msgspec

from tokenmill import linefile, store
from tokenmill.core.dispatch import Id, id_of
from tokenmill.core.records import Record


class Spool:
    """`rows` grows with every line; what was read at a number of them may go while it stands there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows = len(self.read())

    def append(self, records: list[Record]) -> None:
        """Raises OSError; then they are to come once more, though some of them may be there."""
        linefile.append(self.path, b"".join(map(store.line_of, records)).removesuffix(b"\n"))
        self.rows += len(records)

    def read(self) -> tuple[Record, ...]:
        """Each record once: one that is made anew has its id of the first, and another attempt."""
        if not self.path.exists():
            return ()
        found: dict[tuple[Id, int], Record] = {}
        with self.path.open("rb") as lines:
            for line in filter(store.is_whole, lines):
                record = msgspec.json.decode(store.plain(line), type=Record)
                found[id_of(record), record.attempt] = record
        return tuple(found.values())

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)
        self.rows = 0
