"""Answers of every engine, damaged at random: a record, a retry (BrokenError) or nothing; never a crash, never ids that
are none, never a count that is not theirs. CI takes some thousand of them, `--long` a hundred thousand an engine.

Libraries for this exist (atheris, run by hand, found no more): these are the mutations that a broken server, proxy or
memory makes of an answer, with a seed.
"""

import json
import random
from collections.abc import Callable

import msgspec
import pytest

from tests.contract.samples import SAMPLES, engine
from tests.contract.test_streams import WHOLE, wire
from tests.unit.make import record
from tokenmill import plugins
from tokenmill.core import agree, judge
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import Completion, Record
from tokenmill.engines import chat
from tokenmill.errors import BrokenError
from tokenmill.seal import to_table
from tokenmill.store import is_whole, line_of, plain

READING = Reading(thinking=True, end_ids=frozenset({b"2"}), close_id=b"5", never=(b"0",))
NUMBERS = (
    b"-1",
    b"0",
    b"9999999999",
    b"1e309",
    b"1.5",
    b"null",
    b'"7"',
    b"[]",
    b"{}",
    b"true",
    b"18446744073709551616",
)
PIECES = (
    b"<think>",
    b"</think>",
    b"\\u0000",
    b"\\ud83d",
    b"\xff",
    b"\xe2\x82",
    b'"',
    b"\\",
    b"}",
    b"]",
    b",",
    b" ",
    b"\n",
)


def mutated(good: bytes, rng: random.Random) -> bytes:
    """One to three changes: a bit, a cut, a piece dropped, doubled, moved or put in, a number made another value."""
    data = good
    for _ in range(rng.randint(1, 3)):
        at, size = rng.randrange(len(data) + 1), rng.randint(1, 30)
        match rng.randrange(7):
            case 0:
                place = rng.randrange(max(1, len(data)))
                data = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :] if data else data
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + data[at + size :]
            case 3:
                data = data[: at + size] + data[at:]
            case 4:
                data = data[:at] + rng.choice(PIECES) + data[at:]
            case 5:
                data = number_changed(data, rng)
            case _:
                other = rng.randrange(len(data) + 1)
                data = data[:at] + data[other : other + size] + data[at:]
    return data


def number_changed(data: bytes, rng: random.Random) -> bytes:
    starts = [place for place in range(1, len(data)) if data[place : place + 1].isdigit() and data[place - 1] in b":,["]
    if not starts:
        return data
    start = rng.choice(starts)
    end = start
    while data[end : end + 1].isdigit():
        end += 1
    return data[:start] + rng.choice(NUMBERS) + data[end:]


def check(completion: Completion) -> None:
    """What the attempt does with an answer, and what must hold of it then."""
    if completion.finish_reason not in ("stop", "length"):
        return  # the attempt makes a BrokenError of it
    measured = judge.measure(completion, READING, Rules())
    counts = [agree.count(ids) for ids in (completion.output_ids, completion.prompt_ids)]
    if None in counts:
        assert "ids_disagree" in measured.labels
        return  # a BrokenError, too
    if "ids_disagree" not in measured.labels:
        assert not counts[0] or completion.output_tokens in (0, counts[0])
    stored = record(
        output_ids=completion.output_ids,
        prompt_ids=completion.prompt_ids,
        text=completion.text,
        parts=measured.parts,
        labels=measured.labels,
        **{
            name: getattr(completion, name)
            for name in ("finish_reason", "prompt_tokens", "output_tokens", "accept_length")
        },
    )
    line = line_of(stored)
    assert is_whole(line)
    assert msgspec.json.decode(plain(line), type=Record) == stored
    (kept,) = to_table([stored])["output_ids"].to_pylist()
    ids = json.loads(bytes(stored.output_ids))
    assert kept == (None if ids is None or max(ids) >= 2**31 else ids)


def fuzz(good: bytes, read: Callable[[bytes], Completion], seed: int, rounds: int) -> int:
    """How many of the damaged answers were read as answers."""
    rng = random.Random(seed)
    came = 0
    for _ in range(rounds):
        damaged = mutated(good, rng)
        try:
            completion = read(damaged)
        except BrokenError:
            continue
        came += 1
        try:
            check(completion)
        except Exception:
            print(f"seed {seed}, {damaged!r}")
            raise
    return came


def streamed(data: bytes) -> Completion:
    _, stream = chat.streamed(b"{}", lambda: None)
    stream.feed(data)
    return stream.completion()


Readers = dict[str, tuple[bytes, Callable[[bytes], Completion]]]

READERS: Readers = {kind: (SAMPLES[kind].reply, engine(kind).decode) for kind in plugins.names("engines")}
READERS["streamed"] = (wire(WHOLE), streamed)


@pytest.mark.parametrize("kind", READERS)
def test_a_damaged_answer_is_a_record_or_broken(kind: str) -> None:
    seed = random.SystemRandom().randrange(2**32)
    assert fuzz(*READERS[kind], seed, 600) > 50, "most are to be damaged, not all broken"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", READERS)
def test_a_hundred_thousand_damaged_answers_are_records_or_broken(kind: str) -> None:
    seed = random.SystemRandom().randrange(2**32)
    fuzz(*READERS[kind], seed, 100_000)
