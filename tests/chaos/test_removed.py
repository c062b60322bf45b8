"""The run folder removed or moved away in mid-run: the run says so, and claims no rows that are nowhere."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.conftest import Command
from tests.harness import Case, assert_whole


def _remove_journal(run: Path) -> None:
    for path in (run / "data").glob("journal-*.jsonl"):
        path.unlink()


def _move(run: Path) -> None:
    run.rename(run.with_name("elsewhere"))


@pytest.mark.parametrize(
    "harm",
    [
        _remove_journal,
        pytest.param(shutil.rmtree, marks=pytest.mark.long),
        pytest.param(_move, marks=pytest.mark.long),
    ],
)
def test_a_journal_that_is_gone_ends_the_run(case: Case, harm: Callable[[Path], None], tokenmill: Command) -> None:
    case.write(engine={"args": {"slots": 8, "latency-ms": 100}}, fleet={"servers": 1})
    process = case.start()
    case.until_done(8, process)
    assert process.poll() is None
    harm(case.run_path)
    assert case.wait(process) == 6, case.output()
    assert "journal-000001.jsonl" in case.output().partition("tokenmill: ")[2]
    assert "done: 40 accepted" not in case.output()
    assert "Traceback" not in case.output()
    assert case.leftovers() == []
    code, said = tokenmill("run", case.config)
    assert code == 0, said
    assert_whole(case, {f"p{n}" for n in range(40)})
