"""A node's spool: whatever tore a line, the others come back, each record once."""

from pathlib import Path

from tests.unit.make import record
from tokenmill.spool import Spool
from tokenmill.store import line_of


def test_a_line_that_a_full_disk_or_a_death_tore_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "spool.jsonl"
    whole, torn, later = (record(f"k{n}", n) for n in range(3))
    path.write_bytes(line_of(whole) + line_of(torn)[:40])
    spool = Spool(path)
    spool.append([whole, torn])  # as after a write that failed half-way
    spool.append([later])
    assert spool.read() == Spool(path).read() == (whole, torn, later)
    anew = record("k0", 0, attempt=2)
    spool.append([anew])
    assert spool.read() == (whole, torn, later, anew), "what is made anew stands for itself"
    spool.clear()
    assert spool.rows == Spool(path).rows == len(spool.read()) == 0
