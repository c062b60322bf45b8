"""A seeded storm: many short runs, each under harms at random moments, and what must hold after each of them.

    python -m tests.chaos.storm --runs 200 [--seed N] [--engine mixed|scripted|llamacpp] [--harms NAME,NAME] [--jobs 2]

After each run: every id once and on its own row, no attempt charged for a server's fault, nothing left (process, port,
TMPDIR), each harm told by its right name in time and nothing else told, exit code 0, no traceback. A run that fails
prints its seed and the command that repeats it.
"""

import argparse
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.conftest import FAST, SLOTS, write_short_prompts
from tests.chaos.harms import DIED, HARMS, STALL_S, TAKEN, Harm, OverError, Scene
from tests.conftest import free_port, write_prompts
from tests.harness import Case, last_turn
from tokenmill import events, launch, quickstart
from tokenmill.events import Event
from tokenmill.machine import ports
from tokenmill.testing.script import fingerprint

ROOT = Path(__file__).parents[2]
SERVERS = 2
PROMPTS = {"scripted": 80, "llamacpp": 40}
"""About two seconds of work without harm."""

PATIENCE_S = 30.0
"""For a run; one of 10 s takes longer where the machine has other work."""

REAL_SHARE = 0.15
"""Of runs with llama.cpp's servers in a mixed storm."""

MORE_SHARE = 0.4
"""Of runs with a second harm."""

_ports = threading.Lock()


@dataclass
class Outcome:
    """What became of one run. `told` holds seconds from a harm to its event, `wrong` what must not be."""

    seed: int
    engine: str
    harms: list[str]
    told: list[tuple[str, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    lost: int = 0
    double: int = 0
    orphans: int = 0
    misnamed: int = 0


class Brisk(Case):
    """The command with a short grace, see brisk.py."""

    def command(self, *words: str, **_: Any) -> "subprocess.Popen[str]":
        with (self.folder / "output.txt").open("a") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.brisk", *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            )


def run_one(seed: int, engine: str, chosen: Sequence[str]) -> Outcome:
    """One run under harms that its seed decides."""
    rng = random.Random(seed)
    kind = engine if engine != "mixed" else "llamacpp" if rng.random() < REAL_SHARE else "scripted"
    usable = [HARMS[name] for name in chosen if kind == "scripted" or HARMS[name].real]
    harms = [rng.choice(usable)]
    quick = [harm for harm in usable if harm.quick]
    if quick and rng.random() < MORE_SHARE:
        harms.append(rng.choice(quick))
    outcome = Outcome(seed, kind, [harm.name for harm in harms])
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="storm-") as folder, ExitStack() as stack:
        with _ports:
            case = Brisk(Path(folder), free_port())
        try:
            _suffer(case, rng, harms, outcome, stack)
        except (AssertionError, OSError, StopIteration) as error:
            outcome.wrong.append(f"{type(error).__name__}: {error}")
        finally:
            if outcome.wrong:
                outcome.wrong.append(case.output()[-4000:])
            case.cleanup()
    outcome.seconds = time.monotonic() - began
    return outcome


def _suffer(case: Brisk, rng: random.Random, harms: Sequence[Harm], outcome: Outcome, stack: ExitStack) -> None:
    server = rng.randrange(SERVERS)
    args = harms[0].args(rng, server) if harms[0].args else {}
    once, there = case.folder / "hit", case.folder / "away"
    if args and not harms[0].strike and harms[0].words + harms[0].told_by(args) and not harms[0].fleet:
        args |= {"once": str(once)}
    if args and harms[0].fleet and harms[0].strike:
        there.touch()
        args |= {"while-there": str(there)}
    if args and not harms[0].fleet:
        args |= {"number": "{index}", "only": server}
    keys = _write(case, outcome.engine, args)
    process = case.start()
    scene = Scene(case, rng, process, case.start, stack, args)
    struck: list[tuple[Harm, int, float, str]] = []
    for harm in harms:
        words = harm.words or harm.told_by(args)
        try:
            at = _strike(scene, harm, server, len(keys), once)
        except (OverError, ProcessLookupError):
            break  # too late for it
        struck.append((harm, server, at, words))
        if words:
            _until_told(scene, harm, server, at, words, outcome)
        server = 1 - server
    code = case.wait(scene.process, PATIENCE_S)
    if code != 0:
        outcome.wrong.append(f"exit code {code}")
    _judge(case, keys, struck, outcome)


def _write(case: Brisk, kind: str, args: dict[str, Any]) -> set[str]:
    fleet = {"stall_timeout": f"{STALL_S[kind]}s", "backoff": "500ms", "restarts_per_hour": 100, "start_timeout": "12s"}
    if kind == "scripted":
        write_prompts(case.folder / "prompts.jsonl", PROMPTS[kind])
        case.write(engine={"args": {"slots": 4, "latency-ms": 200, "child": True, **args}}, fleet=fleet)
        return {f"p{number}" for number in range(PROMPTS[kind])}
    model = {"path": str(quickstart.find_model(lambda text: None)), "name": "smollm2"}
    slots = {"parallel": SLOTS, "ctx-size": 256 * SLOTS, "threads": 1, "threads-batch": 1, "threads-http": 2}
    gate = {"max_rejected": 1.0, "max_truncated": 1.0}
    case.write(model=model, engine={"kind": kind, "args": slots}, generation=FAST, gate=gate, fleet=fleet)
    return write_short_prompts(case.folder / "prompts.jsonl", PROMPTS[kind])


def _strike(scene: Scene, harm: Harm, server: int, prompts: int, once: Path) -> float:
    """Waits for the harm's moment and does it; returns when it hit."""
    if harm.strike is None:
        deadline = time.monotonic() + PATIENCE_S
        while "once" in scene.settings and harm.args and not _written(once):
            assert time.monotonic() < deadline, f"{harm.name} did not hit"
            time.sleep(0.02)
        return _written(once) or time.time()
    if harm.name == "kill tokenmill" and scene.rng.random() < 0.5:
        time.sleep(scene.rng.uniform(0.0, 2.0))  # in the start, too
    elif not harm.fleet:
        scene.wait(lambda: _has_work(scene, server))
        scene.case.until_done(scene.rng.randrange(1, prompts // 3), scene.process)
    return harm.strike(scene, server)


def _written(path: Path) -> float:
    try:
        return float(path.read_text() or 0)
    except OSError:
        return 0.0


def _has_work(scene: Scene, server: int) -> bool:
    status = scene.case.run_folder.status()
    if status is None or status.updated < scene.began:
        return False  # what an earlier tokenmill wrote
    return any(row.index == server and row.in_flight > 0 for row in status.servers)


def _until_told(scene: Scene, harm: Harm, server: int, at: float, words: str, outcome: Outcome) -> None:
    limit = harm.limit_s(outcome.engine)
    try:
        event = scene.wait(lambda: scene.told(server, at, words), PATIENCE_S)
    except OverError:
        found = scene.told(server, at, words)
        if found is None and time.time() - at < limit:
            return  # the run was over before anybody had to know
        event = found or Event(time.time(), "", "")
    seconds = max(0.0, event.t - at)
    outcome.told.append((harm.name, seconds))
    if seconds > limit or not event.text:
        outcome.misnamed += 1
        outcome.wrong.append(
            f"{harm.name}: told {event.text!r} after {seconds:.1f} s, not {words!r} within {limit:.1f}"
        )


# -- what must hold ----------------------------------------------------------------------------------------------------
def _judge(case: Case, keys: set[str], struck: Sequence[tuple[Harm, int, float, str]], outcome: Outcome) -> None:
    records = case.records()
    seen = Counter(record.key for record in records)
    outcome.lost = len(keys - set(seen))
    outcome.double = sum(count - 1 for count in seen.values())
    strange = set(seen) - keys
    swapped = [r.key for r in records if "ANSWER" in r.text and fingerprint(last_turn(r)) not in r.answer]
    charged = [record.key for record in records if record.attempt != 1]
    for words, found in (("on another's row", swapped), ("unknown", strange), ("charged to a prompt", charged)):
        if found:
            outcome.wrong.append(f"{len(found)} {words}: {sorted(found)[:5]}")
    if outcome.lost or outcome.double:
        outcome.wrong.append(f"{outcome.lost} lost, {outcome.double} double")
    if re.search(r"^Traceback", case.output(), re.MULTILINE):  # a server's own is told behind the time
        outcome.wrong.append("a traceback")
    _judge_leftovers(case, outcome)
    _judge_names(case, struck, outcome)


def _judge_leftovers(case: Case, outcome: Outcome) -> None:
    left = [] if case.ended(3.0) else case.leftovers()
    tmp = [path for number in range(SERVERS) if (path := launch.tmp_folder(case.run_path, number)).exists()]
    begun = [event.text for event, _ in events.read(case.run_folder.events) if event.kind == "launch"]
    used = {int(found[1]) for text in begun if (found := re.search(r"on port (\d+)", text))}
    held = [port for port in used if (pid := ports.listener(port)) is not None and pid in left]
    outcome.orphans = len(left) + len(tmp)
    if left or tmp or held:
        outcome.wrong.append(f"left: {left} {tmp} ports {held}")


def _judge_names(case: Case, struck: Sequence[tuple[Harm, int, float, str]], outcome: Outcome) -> None:
    """No failure but those that were done. A thief takes a port whose server was killed for it."""
    names = [words for _, _, _, words in struck if words]
    names += [DIED for harm, *_ in struck if harm.words == TAKEN]
    for event, _ in events.read(case.run_folder.events):
        if event.kind != "server" or event.level != "warn":
            continue
        if not any(re.search(words, event.text) for words in names):
            outcome.misnamed += 1
            outcome.wrong.append(f"told, and not done: server {event.server}: {event.text}")


# -- many runs ---------------------------------------------------------------------------------------------------------
def storm(seed: int, runs: int, engine: str, chosen: Sequence[str], jobs: int) -> list[Outcome]:
    """Runs with the seeds from `seed` on; prints each as it ends."""
    done: list[Outcome] = []
    with ThreadPoolExecutor(jobs) as pool:
        for outcome in pool.map(lambda number: run_one(seed + number, engine, chosen), range(runs)):
            done.append(outcome)
            told = ", ".join(f"{seconds:.2f} s" for _, seconds in outcome.told)
            state = "WRONG" if outcome.wrong else "ok"
            harms = " + ".join(outcome.harms)
            print(f"{outcome.seed} {outcome.engine} {harms}: {state} in {outcome.seconds:.1f} s  {told}", flush=True)
            if outcome.wrong:
                print("  " + "\n  ".join(outcome.wrong), flush=True)
                print(f"  again: {_again(outcome, engine, chosen)}", flush=True)
    return done


def _again(outcome: Outcome, engine: str, chosen: Sequence[str]) -> str:
    words = ["python", "-m", "tests.chaos.storm", "--runs", "1", "--seed", str(outcome.seed), "--engine", engine]
    return shlex.join(words if list(chosen) == _usual() else [*words, "--harms", ",".join(chosen)])


def _usual() -> list[str]:
    return list(HARMS)


def table(done: Sequence[Outcome]) -> str:
    """A row per harm, then the sums."""
    counts = Counter(name for outcome in done for name in outcome.harms)
    told: dict[str, list[float]] = defaultdict(list)
    for outcome in done:
        for name, seconds in outcome.told:
            told[name].append(seconds)
    lines = [f"{'harm':24}{'times':>6}{'told':>6}{'p50 s':>8}{'max s':>8}{'limit':>8}"]
    for name, count in counts.most_common():
        times = sorted(told[name])
        spread = (
            f"{times[len(times) // 2]:8.2f}{times[-1]:8.2f}{max(map(HARMS[name].limit_s, STALL_S)):8.1f}"
            if times
            else ""
        )
        lines.append(f"{name:24}{count:6}{len(times):6}{spread}")
    sums = {name: sum(getattr(outcome, name) for outcome in done) for name in ("lost", "double", "orphans", "misnamed")}
    bad = sum(bool(outcome.wrong) for outcome in done)
    longest = max((outcome.seconds for outcome in done), default=0.0)
    lines.append(
        f"{len(done)} runs, {bad} wrong, longest {longest:.1f} s: " + ", ".join(f"{v} {k}" for k, v in sums.items())
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.storm")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--engine", choices=("mixed", "scripted", "llamacpp"), default="mixed")
    parser.add_argument("--harms", default="", help="names, with commas; default: all that are on")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args(argv)
    chosen = asked.harms.split(",") if asked.harms else _usual()
    print(f"seed {asked.seed}")
    done = storm(asked.seed, asked.runs, asked.engine, chosen, asked.jobs)
    print(table(done))
    return int(any(outcome.wrong for outcome in done))


if __name__ == "__main__":
    sys.exit(main())
