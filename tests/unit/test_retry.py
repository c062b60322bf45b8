"""What --retry asks for: its words, its number, and the accounts while its ids are pending once more."""

import asyncio
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.unit import test_settings
from tests.unit.test_ledger import REJECTED, briefs, counts, index_of, stored
from tokenmill import cli, configfile, retry, settings
from tokenmill.core.gate import Gate, Limits
from tokenmill.core.judge import Rules, Verdict
from tokenmill.errors import UsageError
from tokenmill.feed import Feed
from tokenmill.ledger import Ledger
from tokenmill.retry import Retry
from tokenmill.settings import Settings

WORDS = ("empty_answer",)
BASE = test_settings.of(test_settings.config())


def longer(tokens: int = 200) -> Settings:
    return test_settings.of(test_settings.config(generation={"max_tokens": tokens}))


def recorded(*rows: Settings) -> list[Settings]:
    return [test_settings.recorded(row) for row in rows]


def test_words_are_labels_groups_and_verdicts() -> None:
    assert retry.parse("truncated, empty_answer") == ("empty_answer", "truncated_in_answer", "truncated_in_thinking")
    assert retry.parse("rejected,failed") == ("failed", "rejected")
    with pytest.raises(UsageError, match="no label named truncatd, x") as caught:
        retry.parse("x,truncatd,empty")
    assert "truncated_in_thinking" in caught.value.fix
    with pytest.raises(UsageError, match="names no label"):
        retry.parse(" , ")


def test_the_shell_completes_the_word_behind_the_last_comma() -> None:
    assert cli._retry_words("tr") == ["truncated_in_thinking", "truncated_in_answer", "truncated"]
    assert cli._retry_words("empty,rej") == ["empty,rejected"]
    assert "empty,empty" not in cli._retry_words("empty,")


def test_the_same_command_goes_on_until_it_has_ended(tmp_path: Path) -> None:
    own, first = retry.begin(longer(), WORDS, recorded(BASE))
    assert (own.retry, own.labels, first.number, first.made) == (1, WORDS, 1, frozenset({own.id}))
    assert own.id not in (BASE.id, longer().id)
    settings.guard(own, recorded(BASE))
    settings.guard(BASE, recorded(BASE, own))
    again, same = retry.begin(longer(), WORDS, recorded(BASE, own))
    assert (again, same) == (own, first)
    # Another version of the engine: a row of its own, and the same retry.
    newer = test_settings.of(test_settings.config(generation={"max_tokens": 200}), version="2")
    other, still = retry.begin(newer, WORDS, recorded(BASE, own))
    assert (still.number, still.made) == (1, frozenset({own.id, other.id}))
    for words, row in ((("empty",), longer()), (WORDS, longer(300))):
        assert retry.begin(row, words, recorded(BASE, own))[1].number == 2
    assert retry.unfinished(recorded(BASE, own)) is not None
    for row in (BASE, own):
        settings.keep(tmp_path, row)
    settings.end_retry(tmp_path, 1)
    assert [row.ended for row in settings.read(tmp_path)] == [False, True]
    assert retry.unfinished(settings.read(tmp_path)) is None
    assert retry.begin(longer(), WORDS, settings.read(tmp_path))[1].number == 2


def test_how_to_go_on_is_told_as_a_person_would_type_it() -> None:
    own, _ = retry.begin(longer(), WORDS, recorded(BASE))
    assert retry.flags(own, recorded(BASE, own)) == "--retry empty_answer --set generation.max_tokens=200"


def test_the_same_dice_are_told() -> None:
    for row, told in ((BASE, True), (longer(), False)):
        own, _ = retry.begin(row, WORDS, recorded(BASE))
        assert retry.is_in_vain(own, recorded(BASE)) is told


def test_ids_made_again_are_pending_in_their_cohort_until_they_are_made_or_settled(tmp_path: Path) -> None:
    old = [stored(0), stored(1, cohort=3, **REJECTED), stored(2, cohort=1, **REJECTED), stored(3, settings="new")]
    gate, rules = Gate(Limits(cohort=2)), Rules()
    ledger = Ledger(index_of(tmp_path), 1, (0, 1), Retry(1, frozenset(WORDS), frozenset({"new"})))
    found = ledger.load(briefs(old), rules, gate)
    assert (ledger.left, found.redone, found.cohorts) == (2, 1, {0: 2, 1: 1, 3: 1})
    assert counts(ledger) == (6, 2, 0, 0, 4)
    assert [ledger.pending_samples(row) for row in range(6)] == [[], [0], [0], [], [], []]
    assert [ledger.again(row, 0) for row in range(6)] == [{}, {0: 3}, {0: 1}, {}, {}, {}]
    assert list(ledger.rows_pending()) == [False, True, True, False, False, False]
    assert ledger.labels == {}
    assert set(gate.tallies) == {0}
    ledger.mark(stored(1, cohort=3, settings="new"), Verdict.ACCEPTED)
    assert (ledger.left, counts(ledger)) == (1, (6, 3, 0, 0, 3))
    ledger.settle(briefs(old, [stored(1, cohort=3, settings="new")]), rules, gate)
    assert counts(ledger) == (6, 3, 1, 0, 2)
    assert ledger.labels == {"empty_answer": 1}
    assert (gate.tallies[1].rejected, set(gate.tallies)) == (1, {0, 1})
    plain = Ledger(index_of(tmp_path), 1)
    plain.load(briefs(old, [stored(1, cohort=3, settings="new")]), rules, Gate(Limits()))
    assert (plain.counts(), plain.labels, plain.tokens) == (ledger.counts(), ledger.labels, ledger.tokens)


def test_what_a_retry_made_counts_for_the_next_one_as_any_record(tmp_path: Path) -> None:
    ledger = Ledger(index_of(tmp_path), 1, (0, 1), Retry(2, frozenset({"rejected"}), frozenset({"second"})))
    ledger.load(briefs([stored(0, **REJECTED)], [stored(0, settings="first", **REJECTED)]), Rules(), Gate(Limits()))
    assert ledger.left == 1
    ledger = Ledger(index_of(tmp_path), 1, (0, 1), Retry(2, frozenset({"rejected"}), frozenset({"second"})))
    ledger.load(briefs([stored(0, **REJECTED)], [stored(0, settings="second", **REJECTED)]), Rules(), Gate(Limits()))
    assert (ledger.left, counts(ledger)) == (0, (6, 0, 1, 0, 5))


def test_a_cohort_of_which_some_is_made_again_keeps_its_size(tmp_path: Path) -> None:
    """Else the gate would judge a cohort of 200 by the few that were made again."""
    ledger = Ledger(index_of(tmp_path), 1, (0, 1), Retry(1, frozenset(WORDS), frozenset()))
    ledger.load(briefs([stored(1, cohort=3, **REJECTED), stored(2, cohort=3)]), Rules(), Gate(Limits(cohort=2)))
    feed = Feed(tmp_path / "prompts.jsonl", ledger, "s", cohort=1, held={3: 2}, dedup=False)
    [item] = asyncio.run(feed.take(2))
    feed.close()
    assert (item.key, item.cohort, feed.ended) == ("k1", 3, True)
    assert feed.final_sizes() == {}, "other rows have no record yet: they may fill the cohort"


def test_a_command_to_go_on_is_read_as_what_was_given(tmp_path: Path) -> None:
    """Of any sampling there is: --set reads it from a shell's words, and it is the same again."""
    odd = {
        "grammar": 'root ::= "a b" [^"]*',
        "stop": ["x y", "'"],
        "ignore_eos": True,
        "logit_bias": {"5": 1, "a b": []},
    }
    given = {"temperature": 0.5, "top_k": 3, "seed": 7, "max_tokens": 99, "extra": odd}
    own, _ = retry.begin(test_settings.of(test_settings.config(generation=given)), WORDS, recorded(BASE))
    words = shlex.split(retry.flags(own, recorded(BASE, own)))
    assert words[:2] == ["--retry", "empty_answer"]
    assert words[2::2] == ["--set"] * len(words[3::2])
    path = tmp_path / "run.toml"
    path.write_text('[engine]\nkind = "fake"\n[prompts]\npath = "p"\n')
    read = configfile.load(path, words[3::2]).generation
    assert {name: getattr(read, name) for name in given} == given


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prompts": {"limit": 5}}, "prompts.limit was 0, is 5"),
        ({"prompts": {"shard": "0/2"}}, "prompts.shard was '0/1', is '0/2'"),
        ({"generation": {"samples": 3}}, "generation.samples was 1, is 3"),
    ],
)
def test_a_retry_asks_for_no_other_prompts_than_the_run(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        retry.of_run(test_settings.config(), test_settings.config(**changed))


def test_a_retry_leaves_the_runs_config_but_for_the_rules() -> None:
    run = test_settings.config()
    asked = test_settings.config(generation={"max_tokens": 5}, judge={"min_reasoning_tokens": 3})
    assert retry.of_run(run, asked) == run.model_copy(update={"judge": asked.judge})
