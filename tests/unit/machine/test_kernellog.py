"""Xids in the kernel's log, and the one form of a PCI address."""

from pathlib import Path

import pytest

from tokenmill.machine import kernellog

LOG = """\
6,1,100,-;usb 1-1: new high-speed USB device
3,2,200,-;NVRM: Xid (PCI:0000:17:00): 79, pid=1234, name=python, GPU has fallen off the bus.
3,3,300,-;NVRM: Xid (PCI:0000:A1:00): 13, Graphics SM Warp Exception
3,4,400,-;NVRM: Xid (PCI:0000:a1:00): 154
"""


def test_xids_of_cards_are_found_with_their_address() -> None:
    found = [(xid.bus, xid.number) for xid in kernellog.xids(LOG)]
    assert found == [("0000:17:00", 79), ("0000:a1:00", 154)]


@pytest.mark.parametrize("bus", ["00000000:A1:00.0", "0000:a1:00", "0:A1:00.0"])
def test_an_address_is_the_same_however_it_is_written(bus: str) -> None:
    assert kernellog.address(bus) == "0000:a1:00"


def test_a_log_that_may_not_be_read_is_none(tmp_path: Path) -> None:
    assert kernellog.read(tmp_path / "none") is None
    (tmp_path / "log").write_text(LOG)
    assert kernellog.read(tmp_path / "log") == LOG
