"""The machine is lost in mid-run, with its run folder: the next one restores the copy and pays for nothing in it again.

On a folder, and on a real FUSE mount that can do what an object store can (tests/objectstore.py). Where there is no
/dev/fuse the mount's tests are skipped and the terminal says so; where it is there and broken, they fail.
"""

import errno
import fcntl
import mmap
import os
import random
import shutil
import signal
import subprocess
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from tests import bynumber, objectstore
from tests.chaos.conftest import Here
from tests.conftest import write_prompts
from tests.harness import DEADLINE_S, Case, answered_prompts, assert_whole, last_turn
from tests.objectstore import Mount
from tokenmill import dataset, environment, events, history
from tokenmill.backup import keeper, layout, restore
from tokenmill.backup.layout import Holder, Lease, Manifest
from tokenmill.backup.restore import TOLD
from tokenmill.folder import RunFolder
from tokenmill.machine.processes import ProcessId

PROMPTS = 100
KEYS = {f"p{number}" for number in range(PROMPTS)}


@pytest.fixture
def bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Mount]:
    """A mount that behaves like an object store's."""
    if not objectstore.DEVICE.exists() or os.geteuid():
        with capsys.disabled():
            print(f"\nNO {objectstore.DEVICE}, or not root: COPIES ARE NOT TESTED ON AN OBJECT STORE'S MOUNT")
        pytest.skip(f"no {objectstore.DEVICE}, or not root")
    with objectstore.mounted(tmp_path / "mount") as mount:
        yield mount


@pytest.fixture(params=["object store", pytest.param("folder", marks=pytest.mark.long)])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where copies go."""
    if request.param == "folder":
        (tmp_path / "copies").mkdir()
        return tmp_path / "copies"
    mount: Mount = request.getfixturevalue("bucket")
    return mount.point


def prepare(case: Case, target: Path, prompts: int = 40) -> Path:
    """A run on a scripted fleet, with rounds all the time; returns the servers' own notes."""
    write_prompts(case.folder / "prompts.jsonl", prompts - 40, start=40)
    log = case.folder / "requests.jsonl"
    case.write(
        engine={"args": {"slots": 4, "latency-ms": 250, "requests": str(log)}},
        output={"copy_to": str(target), "copy_every": "200ms", "segment": "60KB"},
    )
    return log


def newest(target: Path) -> Manifest | None:
    folder = target / "case"
    return next(layout.whole(folder, layout.listing(folder)), None)


def lose_the_machine(case: Case, process: "subprocess.Popen[str]") -> None:
    """All of it ends at once, and its disk is gone."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    bynumber.signal_all(case.leftovers(), signal.SIGKILL)
    if case.run_path.exists():
        shutil.rmtree(case.run_path)


def copied_prompts(target: Path, aside: Path) -> set[str]:
    """The prompts whose records are in the newest copy, as a restore elsewhere finds them."""
    folder = RunFolder(aside / "case")
    folder.create()
    names = layout.listing(target / "case")
    restore.restore(target / "case", names, folder, lambda text: None, lambda: None)
    found = {last_turn(record) for record in dataset.records(folder.data)}
    shutil.rmtree(aside)
    return found


def until(what: Callable[[], object], process: "subprocess.Popen[str]", case: Case) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert process.poll() is None, case.output()
        assert time.monotonic() < deadline, case.output()
        time.sleep(0.02)


def told(case: Case, level: str = "info") -> list[str]:
    return [
        event.text for event, _ in events.read(case.run_folder.events) if (event.kind, event.level) == ("copy", level)
    ]


def test_a_lost_machine_costs_what_came_after_its_last_copy(
    case: Case, target: Path, request: pytest.FixtureRequest
) -> None:
    log = prepare(case, target, PROMPTS)
    for rows in (20, 55):
        process = case.start()
        until(lambda rows=rows: _rows(target) >= rows, process, case)  # type: ignore[misc]
        lose_the_machine(case, process)
        assert not case.run_path.exists()
    paid, asked = copied_prompts(target, case.folder / "aside"), answered_prompts(log)
    assert len(paid) >= 55
    assert case.run() == 0, case.output()
    assert_whole(case, KEYS)
    again = answered_prompts(log)
    assert {prompt: again[prompt] for prompt in paid} == {prompt: asked[prompt] for prompt in paid}
    (restored,) = [text for text in told(case) if text.startswith("restored from copy")][-1:]
    assert "verified" in restored
    assert told(case)[-1].startswith("the copy is whole")
    final = newest(target)
    assert final is not None
    sources = {file.source for file in final.files}
    assert {"config.toml", "data/settings.jsonl", "report.html", "report.json", *TOLD} - {"notified.json"} <= sources
    assert not any(source.startswith("data/journal") for source in sources)
    if "object store" in request.node.name:
        mount: Mount = request.getfixturevalue("bucket")
        assert mount.refused() == [], "something was asked that an object store has not"
    before = again.total()
    shutil.rmtree(case.run_path)
    assert case.run() == 0, case.output()
    assert_whole(case, KEYS)
    assert answered_prompts(log).total() == before
    states = [moment.state for moment, _ in history.read(case.run_folder.history)]
    assert (states.count("preflight"), states.count("done")) == (4, 2), (
        "each life's history is there, the lost ones', too"
    )
    assert len(environment.read(case.run_folder.environment)) == 1


@pytest.mark.long
@pytest.mark.timeout(600)
def test_lost_or_killed_again_and_again_at_random_moments_nothing_copied_is_paid_for_twice(
    case: Case, target: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    log = prepare(case, target, 3 * PROMPTS)
    bills = []
    for _ in range(10):
        process = case.start()
        with suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.2, 6.0))
        if process.poll() is not None:
            break
        if rng.random() < 0.7:
            lose_the_machine(case, process)
        else:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        if newest(target):
            bills.append((copied_prompts(target, case.folder / "aside"), answered_prompts(log)))
    assert case.run() == 0, case.output()
    assert_whole(case, {f"p{number}" for number in range(3 * PROMPTS)})
    final = answered_prompts(log)
    for paid, asked in bills:
        assert {prompt: final[prompt] for prompt in paid} == {prompt: asked[prompt] for prompt in paid}, f"seed {seed}"
    print(f"copied at each death: {[len(paid) for paid, _ in bills]}; asked in all: {final.total()}")


def _rows(target: Path) -> int:
    """Journal lines in the newest copy, by a glance, and a part's as what a segment holds."""
    found = newest(target)
    data = [file for file in found.files if file.source.startswith("data/")] if found else []
    parts = sum("part-" in file.source for file in data)
    return parts * 15 + sum(file.size for file in data if "journal-" in file.source) // 4000


def test_the_mount_of_these_tests_can_do_no_more_than_an_object_store(bucket: Mount) -> None:
    path, other = bucket.point / "file", bucket.point / "other"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(handle, b"bytes")
    assert list(bucket.point.iterdir()) == [], "it is there once it is closed"
    os.close(handle)
    assert path.read_bytes() == b"bytes"
    new = os.open(other, os.O_RDWR | os.O_CREAT)
    os.write(new, b"bytes")
    read = os.open(path, os.O_RDONLY)
    tries: list[Callable[[], object]] = [
        lambda: path.rename(other),
        lambda: os.link(path, other),
        lambda: path.open("ab"),
        lambda: path.open("wb"),
        lambda: os.truncate(path, 0),
        lambda: os.pwrite(new, b"x", 0),
        lambda: fcntl.flock(read, fcntl.LOCK_EX),
        lambda: fcntl.lockf(read, fcntl.LOCK_SH),
        lambda: mmap.mmap(new, 5),
    ]
    try:
        for attempt in tries:
            with pytest.raises(OSError) as caught:
                attempt()
            assert caught.value.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENODEV, errno.EEXIST)
    finally:
        os.close(new)
        os.close(read)
    path.unlink()
    assert not path.exists()


# -- a mount that fails ------------------------------------------------------------------------------------------------
def test_a_mount_that_fails_ends_nothing_is_told_and_tried_again(case: Case, bucket: Mount) -> None:
    prepare(case, bucket.point, 60)
    process = case.start()
    until(lambda: newest(bucket.objects), process, case)
    bucket.fail(errno.EIO)
    until(lambda: told(case, "warn"), process, case)
    bucket.fail(0)
    assert case.wait(process) == 0, case.output()
    assert_whole(case, {f"p{number}" for number in range(60)})
    warnings = told(case, "warn")
    assert all(f"cannot copy to {bucket.point}/case: " in text for text in warnings)
    assert "Input/output error; the last whole copy is " in warnings[0]
    assert "Traceback" not in case.output()
    found = newest(bucket.objects)
    assert found is not None
    assert {file.source for file in found.files} >= {"report.html"}


def test_a_mount_that_hangs_holds_up_no_run(here: Here, bucket: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "STALL_S", 1.0)
    case = here.case
    prepare(case, bucket.point)
    settings = tomllib.loads(case.config.read_text())

    over = threading.Event()

    def hang() -> None:
        while newest(bucket.objects) is None:
            time.sleep(0.02)
        bucket.process.send_signal(signal.SIGSTOP)
        over.wait(30)
        bucket.process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=hang)
    thread.start()
    try:
        code, said = here(engine=settings["engine"], output=settings["output"])
    finally:
        over.set()
        thread.join()
    assert code == 0, said
    assert any("no sign of life for 1 s" in text for text in told(case, "warn"))
    assert_whole(case, {f"p{number}" for number in range(40)})
    code, said = here.command("run", case.config)
    assert code == 0, said
    shutil.rmtree(case.run_path)
    code, said = here.command("run", case.config)
    assert code == 0, said
    assert_whole(case, {f"p{number}" for number in range(40)})


def test_an_empty_run_is_not_begun_where_the_copy_cannot_be_asked(here: Here, bucket: Mount) -> None:
    bucket.fail(errno.EIO)
    code, said = here(output={"copy_to": str(bucket.point)})
    assert code == 3
    assert "is empty, and cannot be restored from" in said
    assert "Input/output error" in said
    assert "--set output.copy_to=''" in said
    code, said = here.command("run", here.case.config, "--set", "output.copy_to=''")
    assert code == 0, said


# -- how a run ends ----------------------------------------------------------------------------------------------------
@contextmanager
def interrupted(case: Case) -> Iterator[None]:
    """Ctrl-C once something is stored."""

    def press() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while case.done() < 10 and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    yield
    thread.join()


def test_a_run_that_is_stopped_leaves_a_copy_of_all_that_is_stored(here: Here, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    with interrupted(here.case):
        code, said = here(
            engine={"args": {"slots": 4, "latency-ms": 300}},
            output={"copy_to": str(tmp_path / "copies"), "copy_every": "1h"},
        )
    assert code == 130, said
    _assert_the_copy_has_all(here, tmp_path)


def test_a_run_that_the_gate_stops_leaves_a_copy_of_all_that_is_stored(here: Here, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    code, said = here(
        engine={"args": {"slots": 4, "empty-reasoning": 1.0}},
        output={"copy_to": str(tmp_path / "copies"), "copy_every": "1h"},
    )
    assert code == 5, said
    _assert_the_copy_has_all(here, tmp_path)


def _assert_the_copy_has_all(here: Here, tmp_path: Path) -> None:
    stored = {last_turn(record) for record in here.case.records()}
    assert len(stored) >= 5
    assert copied_prompts(tmp_path / "copies", tmp_path / "aside") == stored
    code, said = here.command("status", here.case.run_path)
    assert code == 0
    assert "the last whole copy is " in said


# -- whose copy it is --------------------------------------------------------------------------------------------------
def test_a_run_that_another_machine_has_is_refused_before_it_costs_anything(here: Here, tmp_path: Path) -> None:
    folder = tmp_path / "copies" / "case"
    folder.mkdir(parents=True)
    holder = Holder("ffffffff", "gpu-7", ProcessId(4711, 1, "deadbeef-1"))
    lease = Lease(1, holder, "f", time.time() + 1800)
    (folder / layout.lease_name(lease)).write_bytes(msgspec.json.encode(lease))
    code, said = here(output={"copy_to": str(tmp_path / "copies")})
    assert code == 2
    assert "is in use by tokenmill pid 4711 on gpu-7" in said
    assert "server 0" not in said
    remove = Path(said.partition("at once after: rm ")[2].split()[0])
    remove.unlink()
    code, said = here.command("run", here.case.config)
    assert code == 0, said


def test_a_copy_of_other_settings_is_refused(here: Here, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    output = {"copy_to": str(tmp_path / "copies")}
    code, said = here(output=output)
    assert code == 0, said
    shutil.rmtree(here.case.run_path)
    code, said = here(output=output, generation={"temperature": 0.5})
    assert code == 2
    assert "records made with other settings" in said
