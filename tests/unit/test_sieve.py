"""The sieve: which records go out, in which order of checks, and what is told of the others."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.unit.make import record
from tokenmill import plugins, sieve
from tokenmill.core.judge import Rules
from tokenmill.core.records import NULL, Record, count_ids
from tokenmill.errors import GateError
from tokenmill.formats.base import Format, first_ids, tokens
from tokenmill.sieve import Choice, Sieve, Tally, split_of

TRUNCATED: dict[str, Any] = {"labels": ("truncated_in_thinking",), "finish_reason": "length"}


def form(name: str = "specforge") -> Format:
    made: Format = plugins.load("formats", name)(several=False)
    return made


def ids(count: int, first: int = 0) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(list(range(first, first + count))))


def row(key: str, prompt: int, output: int, **fields: Any) -> Record:
    return record(key, prompt_ids=ids(prompt), output_ids=ids(output, 1000), **fields)


def through(records: list[Record], name: str = "specforge", **choice: Any) -> tuple[list[Record], dict[str, int]]:
    """What goes out, and the reasons of the rest; surveyed first where there are caps, as an export does."""
    made = Sieve(form(name), Rules(), Choice(**choice))
    if made.choice.caps:
        made.survey(records)
    return list(made.sieve(records)), dict(made.reasons)


def keys(records: list[Record]) -> list[str]:
    return [own.key for own in records]


# -- ids ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("raw", "count"), [(b"[]", 0), (b"[1]", 1), (b"[1,2,3]", 3), (b"null", 0)])
def test_ids_are_counted_without_being_read(raw: bytes, count: int) -> None:
    assert count_ids(msgspec.Raw(raw)) == count


def test_the_first_ids_of_a_list() -> None:
    assert [bytes(first_ids(msgspec.Raw(b"[10,11,12]"), count)) for count in range(5)] == [
        *(b"[]", b"[10]", b"[10,11]", b"[10,11,12]", b"[10,11,12]")
    ]


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 1), (3, 2), (2, 0), (0, 0)])
def test_ids_and_mask_at_the_edges(prompt: int, output: int) -> None:
    made = tokens(row("a", prompt, output))
    assert msgspec.json.decode(made.input_ids) == [*range(prompt), *range(1000, 1000 + output)]
    assert msgspec.json.decode(made.loss_mask) == [0] * prompt + [1] * output


# -- lengths -----------------------------------------------------------------------------------------------------------
def test_the_cut_comes_first_and_then_the_question_whether_enough_is_left() -> None:
    found, reasons = through([row("a", 10, 20), row("b", 56, 20), row("c", 57, 20), row("d", 64, 20)], length=64)
    assert keys(found) == ["a", "b"]
    assert bytes(found[1].output_ids) == bytes(ids(8, 1000))
    assert [own.finish_reason for own in found] == ["stop", "cut"]
    assert reasons == {"fewer than 8 tokens": 1, "no answer within --max-length": 1}


def test_a_row_that_just_fits_is_not_cut() -> None:
    (found,), _ = through([row("a", 44, 20)], length=64)
    assert found.finish_reason == "stop"
    assert count_ids(found.output_ids) == 20


def test_limits_count_supervised_tokens() -> None:
    records = [row(str(output), 5, output) for output in (1, 2, 9, 10, 11)]
    assert through(records)[1] == {"fewer than 2 tokens": 1}
    found, reasons = through(records, least=9, most=10)
    assert keys(found) == ["9", "10"]
    assert reasons == {"fewer than 9 tokens": 2, "more than 10 tokens": 1}


def test_text_formats_take_the_engines_count_and_have_no_least_of_their_own() -> None:
    records = [record(str(count), output_tokens=count) for count in (1, 5, 50)]
    assert keys(through(records, "messages")[0]) == ["1", "5", "50"]
    assert keys(through(records, "messages", least=5, most=40)[0]) == ["5"]


# -- labels ------------------------------------------------------------------------------------------------------------
def test_reasons_name_the_label_that_decides() -> None:
    records = [
        record("failed", labels=("bad_prompt",)),
        record("rejected", labels=("truncated_in_answer", "empty_answer")),
        record("short", reasoning_tokens=3),
        record("cut", **TRUNCATED),
        record("bare", prompt_ids=NULL),
        row("none", 3, 0),
        row("good", 3, 9),
    ]
    found, reasons = through(records, drop=frozenset({"truncated"}))
    assert keys(found) == ["good"]
    assert reasons == {
        "failed: bad_prompt": 1,
        "rejected: empty_answer": 1,
        "rejected: empty_reasoning": 1,
        "dropped: truncated": 1,
        "no token ids": 1,
        "no supervised token": 1,
    }


def test_failed_records_are_handed_on() -> None:
    failures: list[Record] = []
    made = Sieve(form("openai-batch"), Rules(), Choice())
    records = [record("a"), record("b", labels=("aborted",)), record("c", labels=("empty",))]
    assert keys(list(made.sieve(records, failures.append))) == ["a"]
    assert keys(failures) == ["b"]


# -- equal rows --------------------------------------------------------------------------------------------------------
def test_rows_are_equal_by_prompt_and_output_not_by_key() -> None:
    records = [row("a", 3, 5), row("b", 3, 5), row("c", 4, 5), row("d", 3, 6), row("e", 3, 5, text="other text")]
    assert keys(through(records, dedup=True)[0]) == ["a", "c", "d"]
    bare: dict[str, Any] = {"prompt_ids": NULL, "output_ids": NULL}
    texts = [record("a", **bare), record("b", **bare), record("c", text="other", **bare)]
    assert keys(through(texts, "messages", dedup=True)[0]) == ["a", "c"]


def test_hashes_are_found_again_across_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sieve, "RECENT", 7)
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    values = [rng.choice((rng.randrange(50), rng.randrange(1 << 64))) for _ in range(2000)]
    seen, known = sieve._Seen(), set[int]()
    for value in values:
        assert seen.add(value) == (value not in known), f"seed {seed}"
        known.add(value)


# -- caps --------------------------------------------------------------------------------------------------------------
def test_caps_hold_whatever_the_labels_are_and_no_more_goes_than_must() -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    for _ in range(50):
        names = ["truncated_in_thinking", "truncated_in_answer"]
        caps = {name: rng.choice([0.0, 0.1, 0.3, 0.9]) for name in names}
        weights = [rng.random() for _ in range(4)]
        sets: list[tuple[str, ...]] = [(), (names[0],), (names[1],), tuple(names)]
        records = [row(str(n), 2, 5, labels=rng.choices(sets, weights)[0]) for n in range(rng.randrange(1, 80))]
        found, reasons = through(records, caps=caps)
        for name, share in caps.items():
            assert sum(name in own.labels for own in found) <= share * len(found) + 1e-6, f"seed {seed}"
        assert len(found) + sum(reasons.values()) == len(records)
        assert all(own in found for own in records if not own.labels), f"seed {seed}"


def test_below_its_share_a_label_loses_nothing_wherever_its_rows_stand() -> None:
    records = [row(str(n), 2, 5, **(TRUNCATED if n < 10 else {})) for n in range(100)]
    assert len(through(records, caps={"truncated": 0.1})[0]) == 100
    found, reasons = through(records, caps={"truncated": 0.05})
    assert sum(bool(own.labels) for own in found) == 4, "4 of 94; 5 would be of 95, more than a twentieth"
    assert reasons == {"over the cap of truncated": 6}


# -- splits ------------------------------------------------------------------------------------------------------------
def test_a_keys_split_depends_on_nothing_but_its_key_and_grows_with_the_share() -> None:
    names = [f"p{n}" for n in range(2000)]
    tenth = {name for name in names if split_of(name, 0.1) == "validation"}
    fifth = {name for name in names if split_of(name, 0.2) == "validation"}
    assert tenth < fifth
    assert 140 < len(tenth) < 270
    assert {name for name in names if split_of(name, 0.0) == "validation"} == set()


# -- the gate ----------------------------------------------------------------------------------------------------------
def tallied(records: list[Record], **choice: Any) -> tuple[Sieve, Tally]:
    made = Sieve(form(), Rules(reject=frozenset()), Choice(**choice))
    tally = Tally(made.form)
    for own in made.sieve(records):
        tally.add(own)
    return made, tally


def test_shares_are_of_what_stands_in_the_row() -> None:
    _, tally = tallied([row("a", 10, 30), row("b", 60, 20)], length=70)
    assert list(tally.lengths) == [30, 10]
    np.testing.assert_allclose(tally.shares, [30 / 40, 10 / 70])


def test_accept_length_is_tokens_by_steps() -> None:
    rows = [row("a", 1, 9, output_tokens=100, accept_length=2.0), row("b", 1, 9, output_tokens=300, accept_length=4.0)]
    _, tally = tallied([*rows, row("c", 1, 9)])
    assert tally.accept_length == pytest.approx(400 / 125)


def test_a_few_rows_without_an_answer_are_left_out_and_many_are_an_error() -> None:
    good = [row(str(n), 3, 9) for n in range(198)]
    made, tally = tallied([*good, row("none", 3, 0)])
    tally.gate(made)
    made, tally = tallied([*good, *(row(f"none {n}", 3, 0) for n in range(3))])
    with pytest.raises(GateError, match="3 of 201 rows have no supervised token"):
        tally.gate(made)
