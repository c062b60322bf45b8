"""The run in numbers, over time."""

from pathlib import Path

from tokenmill import history
from tokenmill.core.status import PromptCounts, RunStatus, ServerStatus
from tokenmill.history import History

SERVER = ServerStatus("", 0, "0", 30000, 1, "ready", "", 100.0, 12, 16, 4000.0, 2.9, 1, "")


def status(state: str = "generating", done: int = 0) -> RunStatus:
    counts = PromptCounts(100, done, 0, 0, 100 - done)
    return RunStatus("run", state, counts, (SERVER,), 4000.0, None, 0.9, labels={"empty": 1}, updated=1000.0 + done)


def test_a_line_at_each_change_of_state_and_none_between_when_it_is_too_early(tmp_path: Path) -> None:
    kept = History(tmp_path / "history.jsonl", every_s=3600.0)
    for name in ("starting", "starting", "generating", "generating", "sealing"):
        kept.note(status(name))
    assert [moment.state for moment, _ in history.read(tmp_path / "history.jsonl")] == [
        "starting",
        "generating",
        "sealing",
    ]


def test_a_moment_tells_what_charts_need(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    History(path, every_s=0.0).note(status(done=7))
    ((moment, _),) = history.read(path)
    assert (moment.accepted, moment.pending, moment.slots_busy, moment.labels) == (7, 93, 0.75, {"empty": 1})
    assert moment.servers[0] == history.ServerMoment("0", "ready", 12, 16, 4000.0, 2.9, 1)


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    History(path, every_s=0.0).note(status(done=1))
    with path.open("ab") as out:
        out.write(b'\n{"t":12,"sta')
    History(path, every_s=0.0).note(status(done=2))
    assert [moment.accepted for moment, _ in history.read(path)] == [1, 2]


def test_thinned_history_keeps_the_newest_moment(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    kept = History(path, every_s=0.0)
    for done in range(25):
        kept.note(status(done=done))
    found = [moment.accepted for moment in history.thinned(path, points=10)]
    assert found[-1] == 24
    assert len(found) <= 10
    assert found == sorted(found)
