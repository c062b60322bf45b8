"""How `tune` ends where its own folder takes nothing any more."""

from pathlib import Path

import pytest

from tests.unit.test_settings import config
from tokenmill import plugins, tune
from tokenmill.core.trials import Trial
from tokenmill.core.variants import Setup
from tokenmill.errors import NoServerError
from tokenmill.events import EventLog
from tokenmill.folder import RunFolder
from tokenmill.trying.bench import Watch
from tokenmill.trying.notes import Notes
from tokenmill.tune import Order


def test_why_nothing_was_measured_is_told_though_it_cannot_be_noted(tmp_path: Path) -> None:
    own, folder, told = config(), RunFolder(tmp_path / "gone"), list[str]()
    notes = Notes("", (Setup("a", "speculation", {}),), (Trial("a", 1, failure="it ran out of memory", fix="less"),))
    engine, log, watch = plugins.load("engines", "fake")(), EventLog(folder.events), Watch(told.append)
    desk = tune._Desk(Order(own), own, engine, folder, log, told.append, watch, [], notes, 1.0)
    with pytest.raises(NoServerError, match="no setup could be measured: it ran out of memory") as caught:
        tune._ended(desk)
    assert caught.value.fix == "less"
    [words] = told
    assert words.startswith(f"{folder.path} cannot be written: No such file or directory")
