"""Events: the last of a long file without reading it, torn lines, filters, and following a run to its end."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenmill import cli
from tokenmill.errors import UsageError
from tokenmill.events import Event, EventLog, last, read
from tokenmill.folder import RunFolder
from tokenmill.linefile import BLOCK


def made(path: Path, *events: Event) -> RunFolder:
    folder = RunFolder(path / "run")
    folder.create()
    folder.write_state(folder.state())
    log = EventLog(folder.events)
    for event in events:
        log.add(event)
    return folder


def shown(folder: RunFolder, *words: str) -> str:
    """What `tokenmill events` prints; raises the error that it would end with."""
    line = ["events", str(folder.path), *words]
    done = CliRunner().invoke(cli.app, line, catch_exceptions=False, standalone_mode=False)
    return done.stdout


def test_the_last_events_are_those_of_a_plain_reading(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in range(20):
        path = tmp_path / f"{number}.jsonl"
        log = EventLog(path)
        for n in range(rng.randrange(0, 40)):
            log.say("x", f"{n} " + "é" * rng.choice((1, 100, BLOCK)), rng.choice(("info", "warn")))
        if rng.random() < 0.5:
            with path.open("a") as out:
                out.write(rng.choice(("half", '{"no": "event"}\n', "\n\n")))
        plain = [event for event, _ in read(path)]
        count = rng.randrange(1, 50)
        assert last(path, count) == plain[-count:]
        assert last(path, None) == plain
        warned = [event for event in plain if event.level == "warn"]
        assert last(path, 3, wanted=lambda event: event.level == "warn") == warned[-3:]


def test_a_tail_of_a_long_file_reads_its_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as out:
        out.truncate(100_000_000)  # a hole: whoever read it whole would read 100 MB of one line
        out.seek(0, 2)
        out.write(b"\n")
    log = EventLog(path)
    for n in range(300):
        log.say("x", f"{n}")
    before = int(Path("/proc/self/io").read_text().split()[1])
    assert [event.text for event in last(path, 50)] == [str(n) for n in range(250, 300)]
    assert int(Path("/proc/self/io").read_text().split()[1]) - before < 4 * BLOCK


def test_filters_and_plain_words(tmp_path: Path) -> None:
    now = time.time()
    folder = made(
        tmp_path,
        Event(now - 9000, "run", "long ago", "", "error"),
        Event(now - 60, "state", "starting → ready", "3"),
        Event(now - 50, "launch", "started as pid 1", "3"),
        Event(now - 40, "server", "it died\033[31m of \u202eX", "3", "warn", "dmesg", ("last words \x07",)),
        Event(now - 30, "launch", "started as pid 2", "13"),
    )
    texts = [line.split(" ", 2)[2] for line in shown(folder).splitlines() if line[0] == "2"]
    assert texts == [
        "ERROR: long ago",
        "server 3: started as pid 1",
        "WARN: server 3: it died of �X",
        "server 13: started as pid 2",
    ]
    said = shown(folder, "--level", "warn", "--since", "1h")
    assert [line.partition(" WARN")[1] or line for line in said.splitlines()] == [
        " WARN",
        "    last words �",
        "    fix: dmesg",
    ]
    found = [json.loads(line) for line in shown(folder, "--server", "3", "--json").splitlines()]
    assert [one["kind"] for one in found] == ["state", "launch", "server"]
    assert found[2]["text"] == "it died\033[31m of \u202eX"
    assert "\u202e" not in shown(folder, "--json")
    assert len(shown(folder, "-n", "1").splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "told"), [(("--level", "loud"), "one of info, warn, error"), (("--since", "yesterday"), "--since 2h")]
)
def test_wrong_words_are_usage_errors(tmp_path: Path, words: tuple[str, ...], told: str) -> None:
    with pytest.raises(UsageError) as caught:
        shown(made(tmp_path), *words)
    assert told in caught.value.fix


def test_following_ends_with_the_run(tmp_path: Path) -> None:
    folder = made(tmp_path, Event(1.0, "run", "before"))
    log = EventLog(folder.events)
    with folder.own("run"):
        command = [sys.executable, "-m", "tokenmill", "events", str(folder.path), "--follow"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().endswith(" before\n")
            log.say("run", "while it is followed")
            assert process.stdout.readline().endswith(" while it is followed\n")
            assert process.poll() is None
            log.say("run", "its last words")
            folder._write_owner(None)
            assert process.stdout.read().endswith(" its last words\n")
            assert process.wait(20) == 0
