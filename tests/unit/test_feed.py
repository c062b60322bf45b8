"""The order of dispatch: the first cohort spread over the set and first, then the rest, numbered cohort by cohort."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.unit.make import jsonl
from tests.unit.test_ledger import load
from tokenmill import prompts
from tokenmill.core.judge import Verdict
from tokenmill.core.records import Parts, Prompt, Record, failed
from tokenmill.errors import UsageError
from tokenmill.feed import BATCH, Begun, Feed, Item
from tokenmill.ledger import Ledger


def rows(count: int) -> list[Any]:
    return [{"id": f"k{n}", "prompt": f"q{n}"} for n in range(count)]


def ledger_of(path: Path, samples: int = 1, shard: tuple[int, int] = (0, 1), limit: int = 0) -> Ledger:
    return Ledger(prompts.scan(path, limit), samples, shard)


async def taken(feed: Feed, count: int = 7) -> list[Item]:
    """All that a feed gives, so many at a time."""
    found: list[Item] = []
    while not feed.ended:
        items = await feed.take(count)
        assert len(items) == count or feed.ended
        found += items
    feed.close()
    return found


def feed(
    path: Path,
    ledger: Ledger,
    *,
    cohort: int = 4,
    held: Mapping[int, int] | None = None,
    dedup: bool = False,
    begun: Begun | None = None,
) -> Feed:
    return Feed(path, ledger, "settings", cohort=cohort, held=held or {}, dedup=dedup, begun=begun)


def all_of(path: Path, ledger: Ledger, **options: Any) -> list[Item]:
    async def whole() -> list[Item]:
        return await taken(feed(path, ledger, **options))

    return asyncio.run(whole())


def numbers(items: Iterable[Item]) -> list[tuple[int, int]]:
    return [(item.row, item.cohort) for item in items]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "prompts.jsonl", rows(12))


def test_the_first_cohort_is_spread_over_the_set_and_goes_first(path: Path) -> None:
    first = [(0, 0), (3, 0), (6, 0), (9, 0)]
    rest = [(1, 1), (2, 1), (4, 1), (5, 1), (7, 2), (8, 2), (10, 2), (11, 2)]
    assert numbers(all_of(path, ledger_of(path))) == first + rest


def test_every_prompt_carries_what_its_record_needs(path: Path) -> None:
    prompt = all_of(path, ledger_of(path))[1]
    assert isinstance(prompt, Prompt)
    own = prompts.identity(b'{"id": "k3", "prompt": "q3"}')
    assert (prompt.key, prompt.row, prompt.digest, prompt.attempt) == ("k3", 3, own.digest, 1)
    assert bytes(prompt.messages) == b'[{"role":"user","content":"q3"}]'


def test_samples_of_a_prompt_follow_each_other_and_fill_the_cohort(path: Path) -> None:
    items = all_of(path, ledger_of(path, samples=2))
    assert [(item.row, item.sample, item.cohort) for item in items[:6]] == [
        *((0, 0, 0), (0, 1, 0), (6, 0, 0), (6, 1, 0)),
        *((1, 0, 1), (1, 1, 1)),
    ]
    assert len({(item.key, item.sample) for item in items}) == 24


def test_what_is_done_is_not_asked_again(path: Path) -> None:
    ledger = ledger_of(path, samples=2)
    done = all_of(path, ledger)[::2]
    for item in done:
        assert isinstance(item, Prompt)
        ledger.mark(failed(item, "aborted", "", settings=""), Verdict.FAILED)
    again = all_of(path, ledger, held={4: 4})
    assert {(item.row, item.sample) for item in again} == {(row, 1) for row in range(12)}
    assert numbers(again)[:4] == [(0, 0), (6, 0), (1, 5), (2, 5)]


def test_what_was_in_flight_when_a_run_died_is_judged_with_those_it_began_with(tmp_path: Path) -> None:
    """The longest answers are in flight the longest: alone in a cohort, they would stop a good run."""
    path = jsonl(tmp_path / "prompts.jsonl", rows(100))
    begun = all_of(path, ledger_of(path), cohort=20)
    long = {item.row for item in begun if item.row % 5 == 4}
    ledger = ledger_of(path)
    found = load(ledger, *(said(item) for item in begun[:90] if item.row not in long))
    again = all_of(path, ledger, cohort=20, held=found.cohorts)
    assert long < {item.row for item in again}
    assert Counter(item.cohort for item in again) + found.cohorts == dict.fromkeys(range(5), 20)


def test_a_finished_set_gives_nothing(path: Path) -> None:
    ledger = ledger_of(path)
    for item in all_of(path, ledger):
        assert isinstance(item, Prompt)
        ledger.mark(failed(item, "aborted", "", settings=""), Verdict.FAILED)
    assert all_of(path, ledger) == []
    assert feed(path, ledger).first_cohort_pending == 0


@pytest.mark.parametrize(("shard", "limit"), [((0, 2), 0), ((1, 2), 0), ((0, 1), 5), ((1, 3), 8)])
def test_only_this_runs_part_is_asked_for(path: Path, shard: tuple[int, int], limit: int) -> None:
    ledger = ledger_of(path, 1, shard, limit)
    items = all_of(path, ledger)
    assert sorted(item.row for item in items) == ledger.rows_asked().tolist()


def test_rows_that_cannot_be_used_come_out_as_failed_records(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", [b"not json", {"id": "a", "prompt": " "}, {"id": "b", "prompt": "hi"}])
    bad, empty, good = all_of(path, ledger_of(path))
    assert isinstance(bad, Record)
    assert isinstance(empty, Record)
    assert isinstance(good, Prompt)
    assert (bad.labels, bad.settings, bad.cohort) == (("bad_prompt",), "settings", 0)
    assert "p.jsonl:1: not a JSON object" in bad.error
    assert (empty.key, empty.error) == ("a", "p.jsonl:2: the last turn is empty")


@pytest.mark.parametrize("dedup", [False, True])
def test_equal_content_is_left_out_where_asked_for(tmp_path: Path, dedup: bool) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"id": n, "prompt": text} for n, text in enumerate(["x", "y", "x"])])
    items = all_of(path, ledger_of(path), dedup=dedup)
    repeated = [item for item in items if isinstance(item, Record)]
    assert [(item.key, item.labels) for item in repeated] == ([("2", ("duplicate",))] if dedup else [])
    assert len(items) == 3


def test_of_equal_content_one_is_asked_for_whatever_shards_there_are(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"id": n, "prompt": f"x{n % 5}"} for n in range(30)])
    index = prompts.scan(path)
    items = [item for i in range(4) for item in all_of(path, Ledger(index, 1, (i, 4)), dedup=True)]
    assert sorted(item.row for item in items if isinstance(item, Prompt)) == [0, 1, 2, 3, 4]
    assert len(items) == 30


def test_repeated_ids_have_their_numbers(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"id": "a", "prompt": text} for text in "xyz"])
    assert [item.key for item in all_of(path, ledger_of(path))] == ["a", "a~2", "a~3"]


@pytest.mark.parametrize(
    ("held", "sizes"),
    [
        ({}, {1: 5, 2: 2}),
        ({1: 3, 2: 2}, {1: 5, 2: 5, 3: 2}),
        ({1: 1, 2: 2, 3: 1}, {1: 5, 2: 5, 3: 1}),  # what a killed run had in flight goes to those it left short
        ({-1: 9, 1: 5, 2: 1}, {1: 5, 2: 5, 3: 3}),
    ],
)
def test_every_cohort_has_its_size_once_nothing_more_can_be_asked_for(
    path: Path, held: dict[int, int], sizes: dict[int, int]
) -> None:
    async def known() -> list[dict[int, int]]:
        opened = feed(path, ledger_of(path), cohort=5, held=held)
        found = [opened.final_sizes()]
        while not opened.ended:
            await opened.take(12)
            found.append(opened.final_sizes())
        opened.close()
        return [*found, opened.final_sizes()]

    *before, last, told = asyncio.run(known())
    assert (last, told) == (sizes, {})
    assert not any(before)


def test_a_finished_set_has_its_cohorts_sizes_at_once(path: Path) -> None:
    ledger = ledger_of(path)
    found = load(ledger, *(said(item) for item in all_of(path, ledger, cohort=5)))
    opened = feed(path, ledger, cohort=5, held=found.cohorts)
    opened.close()
    assert opened.final_sizes() == {1: 5, 2: 2}


def test_a_set_smaller_than_a_cohort_is_one_cohort(path: Path) -> None:
    assert {item.cohort for item in all_of(path, ledger_of(path), cohort=200)} == {0}


def test_more_than_is_read_ahead_comes_in_order(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", rows(3 * BATCH))
    items = all_of(path, ledger_of(path), cohort=1)
    assert [item.row for item in items] == list(range(3 * BATCH))


def test_a_feed_can_be_closed_half_way(path: Path) -> None:
    async def half() -> int:
        opened = feed(path, ledger_of(path))
        items = await opened.take(3)
        opened.close()
        return len(items)

    assert asyncio.run(half()) == 3


def test_rows_appended_while_it_runs_are_left_for_the_next_start(path: Path) -> None:
    ledger = ledger_of(path)
    jsonl(path, rows(20))
    assert sorted(item.row for item in all_of(path, ledger)) == list(range(12))


# -- every turn of a conversation
def talks(folder: Path, *turns: int) -> Path:
    rows = [
        {"id": f"k{row}", "messages": [{"role": "user", "content": f"q{row}.{turn}"} for turn in range(count)]}
        for row, count in enumerate(turns)
    ]
    return jsonl(folder / "prompts.jsonl", rows)


def every_turn(path: Path, samples: int = 1) -> Ledger:
    return Ledger(prompts.scan(path, every_turn=True), samples)


def said(item: Item, text: str = "fine", **fields: Any) -> Record:
    """The record of a prompt's answer."""
    own = {name: getattr(item, name) for name in ("key", "sample", "turn", "row", "cohort", "digest", "messages")}
    whole = {"text": text, "parts": Parts(0, 0, 0, len(text)), "finish_reason": "stop", "settings": "s"}
    return Record(**{**own, **whole, **fields})


def contents(prompt: Prompt) -> list[str]:
    return [message["content"] for message in msgspec.json.decode(prompt.messages)]


def test_a_turn_is_asked_for_once_the_one_before_it_has_its_record_and_before_another_conversation(
    tmp_path: Path,
) -> None:
    path = talks(tmp_path, 3, 1, 2)
    opened = feed(path, every_turn(path), cohort=2)

    async def go() -> None:
        first, second = await opened.take(2)
        assert [(item.key, item.turn, item.cohort) for item in (first, second)] == [("k0", 0, 0), ("k1", 0, 0)]
        opened.answered(said(first, "one"))
        opened.answered(said(second))  # it has no more turns
        third, fourth = await opened.take(2)
        assert isinstance(third, Prompt)
        assert (third.key, third.turn, contents(third)) == ("k0", 1, ["q0.0", "one", "q0.1"])
        assert (fourth.key, fourth.turn) == ("k2", 0)
        assert await opened.take(5) == []
        assert not opened.ended
        broken = opened.broken_off(said(third), "why")
        assert [(one.key, one.turn, one.cohort, one.labels, one.error) for one in broken] == [
            ("k0", 2, -1, ("broken_off",), "why")
        ]
        assert bytes(broken[0].messages) == b"null"
        opened.answered(said(fourth))
        assert not opened.ended
        [last] = await opened.take(5)
        assert (last.key, last.turn, opened.ended, opened.final_sizes()) == ("k2", 1, True, {1: 2, 2: 1})

    asyncio.run(go())
    opened.close()


def test_a_conversation_of_an_earlier_life_goes_on_from_its_last_record(tmp_path: Path) -> None:
    path = talks(tmp_path, 3, 3, 3)
    ledger = every_turn(path)
    firsts = all_of_firsts(path, ledger)
    begun: dict[tuple[int, int], tuple[Record, str]] = {}
    for item, why in zip(firsts[:2], ("", "turn 0 was cut off"), strict=True):
        record = said(item, "one", row=99)  # rows may have moved since
        ledger.mark(said(item), Verdict.ACCEPTED)
        begun[item.row, 0] = record, why
    opened = feed(path, ledger, held={4: 4}, begun=begun)
    items = asyncio.run(opened.take(9))
    opened.close()
    assert [(item.key, item.turn, type(item).__name__, item.cohort) for item in items] == [
        *(("k0", 1, "Prompt", 5), ("k1", 1, "Record", -1), ("k1", 2, "Record", -1), ("k2", 0, "Prompt", 0))
    ]
    assert isinstance(items[0], Prompt)
    assert contents(items[0]) == ["q0.0", "one", "q0.1"]
    opened.answered(said(items[0], "two"))
    [after] = asyncio.run(opened.take(1))
    assert isinstance(after, Prompt)
    assert contents(after) == ["q0.0", "one", "q0.1", "two", "q0.2"]


def all_of_firsts(path: Path, ledger: Ledger) -> list[Item]:
    """All first turns."""
    opened = feed(path, ledger)
    items = asyncio.run(opened.take(99))
    opened.close()
    return items


def test_a_conversation_that_cannot_be_used_fails_with_every_turn(tmp_path: Path) -> None:
    row = {"id": "a", "messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": [{"type": "image"}]}]}
    path = jsonl(tmp_path / "p.jsonl", [row])
    found = all_of(path, every_turn(path, samples=2))
    assert [(item.sample, item.turn, item.cohort) for item in found] == [(0, 0, 0), (0, 1, -1), (1, 0, 0), (1, 1, -1)]
    assert {item.labels for item in found if isinstance(item, Record)} == {("bad_prompt",)}


def test_a_set_that_was_changed_since_its_keys_were_read_is_named(path: Path) -> None:
    """Its rows would be counted as others': each line is as long as it was."""
    ledger = ledger_of(path)
    jsonl(path, list(reversed(rows(10))) + rows(12)[10:])
    with pytest.raises(UsageError, match=r"prompts\.jsonl:1 was changed while it was being read"):
        all_of(path, ledger)
