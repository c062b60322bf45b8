"""The nodes of a run that is dead, as they are seen from outside: which live on, until when, and how they are ended.

What lies on other machines is known by the run's last status alone.
"""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from tokenmill import configfile
from tokenmill.cluster.base import needs_ray
from tokenmill.config import Config
from tokenmill.core.status import ENDED, NodeRow, RunStatus
from tokenmill.errors import TokenmillError
from tokenmill.events import Event, EventLog, now
from tokenmill.folder import RunFolder, ServerEntry
from tokenmill.leftovers import survivors


def nodes_here(folder: RunFolder) -> dict[str, RunFolder]:
    """The folders of a cluster's nodes that lie on this machine, by the nodes' names."""
    return {path.name: RunFolder(path) for path in sorted((folder.path / "nodes").glob("*")) if path.is_dir()}


def servers(folder: RunFolder) -> list[ServerEntry]:
    """Those that live on this machine."""
    return [entry for own in nodes_here(folder).values() for entry in survivors(own)]


def rows(folder: RunFolder, last: RunStatus) -> tuple[NodeRow, ...]:
    """The nodes without their run: alone (it goes on for a while), gone, or unknown; or as they ended with it."""
    here = nodes_here(folder)
    return tuple(_row(row, here.get(row.node), folder, last) for row in last.nodes)


def _row(row: NodeRow, own: RunFolder | None, folder: RunFolder, last: RunStatus) -> NodeRow:
    calm = replace(row, ready=0, servers=0, in_flight=0, capacity=0, tokens_per_s=0.0, step=None)
    if own is not None and own.owner() is not None:
        return replace(calm, state="alone", note=f"without its run: {_when(folder, last)}")
    if last.state in ENDED or row.state in ("ended", "lost", "failed"):
        return calm
    if own is not None:
        return replace(calm, state="gone", note="")
    return replace(calm, state="unknown", note=f"on its own machine; if it lives, {_when(folder, last)}")


def _when(folder: RunFolder, last: RunStatus) -> str:
    """When a node without a run ends."""
    try:
        patience_s = configfile.load(folder.config).fleet.wait_for_head
    except TokenmillError:
        return "it ends its servers and itself after fleet.wait_for_head"
    end = last.updated + patience_s
    if end < time.time():
        return "it is to end its servers and itself about now"
    clock = time.strftime("%H:%M:%S", time.localtime(end))
    return f"it ends its servers and itself at {clock}, unless the run is started again"


def end(folder: RunFolder, log: EventLog) -> list[str]:
    """Asks the cluster to end the nodes of a dead run, if it is one of a cluster; returns those that have ended. Where
    it cannot be asked, it is told what lives on, and until when."""
    config = _config(folder)
    last = folder.status()
    if config is None or config.fleet.cluster == "local":
        return []
    living = [row for row in (rows(folder, last) if last else ()) if row.state in ("alone", "unknown")]
    if not living:
        return []
    try:
        with needs_ray():
            from tokenmill.cluster.visit import dismissed
        found = dismissed(config)
    except TokenmillError as error:
        log.add(Event(now(), "down", f"the nodes cannot be asked to end: {error}", level="warn", fix=error.fix))
        _tell(log, living)
        return []
    for name, why in found.items():
        words = (
            f"has not ended: {why}" if why else "has ended with its servers; what they made is kept for the next run"
        )
        log.add(Event(now(), "down", words, level="warn" if why else "info", node=name))
    _tell(log, [row for row in living if row.node not in found and row.state == "alone"])
    return [name for name, why in found.items() if not why]


def _tell(log: EventLog, living: Sequence[NodeRow]) -> None:
    for row in living:
        log.add(Event(now(), "down", row.note, level="warn", node=row.node))


def _config(folder: RunFolder) -> Config | None:
    try:
        return configfile.load(folder.config)
    except TokenmillError:
        return None
