"""What `audit` finds: each kind of divergence of hand-made rows, and a contradiction where ids are another text's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import bytewise, thinker
from tests.exports import raw, stored
from tests.unit.make import record
from tokenmill.core.judge import Reading, split
from tokenmill.core.records import NULL, Record
from tokenmill.errors import UsageError
from tokenmill.folder import RunFolder
from tokenmill.render import Vocabulary, load_tokenizer
from tokenmill.testing.script import END_ID
from tokenmill.tokens import agreement
from tokenmill.tokens.agreement import Audit
from tokenmill.tokens.retokenise import Retokeniser, model_of

THOUGHT, ANSWER = "It is a greeting", "Hello there"
WRITTEN = f"{THOUGHT}\n</think>\n\n{ANSWER}"
"""As a model writes it whose prompt opens the thought."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinker.folder(tmp_path_factory.mktemp("thinker"), [f"hi {WRITTEN}"])


def served(model: Path, key: str, row: int, **fields: Any) -> Record:
    """A row as an engine of this model makes it."""
    tokenizer = Retokeniser(model)
    text = fields.get("text", WRITTEN)
    base = record(key, row, text=text, parts=split(text, "stop", Reading(thinking=True, opened=True)))
    (again,) = tokenizer.again([base])
    ids = {"prompt_ids": raw(*again.prompt), "output_ids": raw(*again.output)}
    counts = {"prompt_tokens": len(again.prompt), "output_tokens": len(again.output)}
    made = {**ids, **counts, "text": text, "parts": base.parts, **fields}
    return record(key, row, **made)


def audited(path: Path, model: Path, records: Sequence[Record], **asked: Any) -> Audit:
    return agreement.audit(stored(path, records), model, several=False, **asked)


def ids_of(own: Record) -> list[int]:
    return list(json.loads(bytes(own.output_ids)))


def test_rows_as_an_engine_makes_them_come_back_whole(tmp_path: Path, model: Path) -> None:
    found = audited(tmp_path, model, [served(model, f"k{n}", n) for n in range(40)])
    assert (found.rows, found.verdict, found.spelled) == (40, "agree", {"specials": 40})
    assert (found.prompt.exact, found.output.exact, found.output.compared) == (40, 40, 40)
    assert (found.counts_differ, found.no_end, found.inside, found.examples) == (0, 0, 0, [])
    assert "outputs tokenised again: 40 of 40 give the same ids (100.00%)" in list(agreement.lines(found))


def test_each_way_of_parting_is_told_with_the_tokens_around_it(tmp_path: Path, model: Path) -> None:
    whole = served(model, "whole", 0)
    ids, prompt = ids_of(whole), list(json.loads(bytes(whole.prompt_ids)))
    words = thinker.words([f"hi {WRITTEN}"])
    newline, blank, there, opening = (words.index(word) for word in ("\n", "\n\n", "there", "<think>"))
    at = ids.index(blank)
    rows = [
        whole,
        served(model, "spaces", 1, output_ids=raw(*ids[:at], newline, newline, *ids[at + 1 :])),
        served(model, "endless", 2, output_ids=raw(*ids[:-1])),
        served(model, "opened", 3, output_ids=raw(opening, newline, *ids)),
        served(model, "header", 4, prompt_ids=raw(there, *prompt)),
        served(model, "shut", 5, prompt_ids=raw(*prompt[:-1], blank, words.index("</think>"), blank)),
        served(model, "bare", 6, prompt_ids=NULL, output_ids=NULL),
    ]
    found = audited(tmp_path, model, rows)
    assert (found.rows, found.without_ids, found.verdict) == (7, 1, "agree")
    assert found.output.kinds == {"whitespace": 1, "end token": 1, "think prefix": 1}
    assert found.prompt.kinds == {"template or other text": 1, "think prefix": 1}
    assert (found.output.exact, found.prompt.exact, found.no_end) == (3, 4, 1)
    told = "\n".join(agreement.lines(found))
    assert f"output of spaces, whitespace, from token {at}:" in told
    assert f"{newline}:'\\n' {newline}:'\\n'" in told
    assert "1 have no token ids: their engine gave none" in told
    assert "1 ended by themselves, and their last id is no end token" in told


def test_a_split_that_the_model_chose_is_a_fact_and_no_fault(tmp_path: Path) -> None:
    model = bytewise.folder(tmp_path / "model", merges=(("t", "h"), ("h", "e")))
    text = "then the"
    ids = [300, *b"en the", END_ID]
    row = record(text=text, parts=(0, 0, 0, 8), prompt_ids=raw(*b"hi"), output_ids=raw(*ids), prompt_tokens=2)
    found = audited(tmp_path, model, [row])
    assert (found.verdict, found.output.kinds) == ("agree", {"BPE split": 1})
    (example,) = found.examples
    assert (example.at, example.recorded[4], example.again[4]) == (4, (116, "t"), (300, "th"))


def test_ids_of_another_text_are_a_contradiction(tmp_path: Path, model: Path) -> None:
    other = served(model, "other", 1, text=f"{THOUGHT}\n</think>\n\nhi hi hi")
    swapped = served(model, "swapped", 2, output_ids=other.output_ids)
    found = audited(tmp_path, model, [served(model, "good", 0), other, swapped])
    assert (found.verdict, found.spelled["other"]) == ("contradict", 1)
    (shown,) = found.contradictions
    assert (shown.id, shown.text[-11:], shown.spelled[-18:]) == ("swapped", ANSWER, "hi hi hi<|im_end|>")
    assert list(agreement.lines(found))[-1].startswith("contradict: of 3 rows, 1 have ids that spell another text")


@pytest.mark.parametrize("number", [5000, 2**32 - 1, 2**40, 10**30, -1])
def test_an_id_of_no_token_contradicts_and_ends_no_audit(tmp_path: Path, model: Path, number: int) -> None:
    """A tokenizer passes over it without a word, or fails."""
    good = served(model, "good", 0)
    odd = [
        served(model, "odd", 1, output_ids=raw(number, *ids_of(good))),
        served(model, "odd2", 2, prompt_ids=raw(number)),
    ]
    found = audited(tmp_path, model, [good, *odd])
    assert (found.verdict, found.rows, found.spelled["other"]) == ("contradict", 3, 1)
    assert found.contradictions[0].spelled.startswith(f"<no token {number}>{THOUGHT}")
    assert found.prompt.exact == 2


def test_padding_inside_and_counts_that_are_off_are_told(tmp_path: Path) -> None:
    model = bytewise.folder(tmp_path / "model")
    row = record(text="ab", parts=(0, 0, 0, 2), prompt_ids=raw(*b"hi"), output_ids=raw(97, END_ID + 1, 98, END_ID))
    found = audited(tmp_path, model, [row])
    assert (found.inside, found.counts_differ, found.spelled) == (1, 1, {"specials": 1})


def test_a_sample_is_the_same_rows_every_time(tmp_path: Path, model: Path) -> None:
    folder = stored(tmp_path, [served(model, f"k{n}", n, output_ids=raw(n)) for n in range(30)])
    taken = [agreement.audit(folder, model, several=False, sample=7) for _ in range(2)]
    assert [found.rows for found in taken] == [7, 7]
    assert [row.id for row in taken[0].contradictions] == [row.id for row in taken[1].contradictions]
    assert agreement.audit(folder, model, several=False, sample=100).rows == 30


def test_a_template_that_refuses_a_prompt_leaves_the_outputs_to_be_compared(tmp_path: Path, model: Path) -> None:
    broken = bytewise.folder(tmp_path / "model", template="{{ raise_exception('no such role') }}")
    row = record(text="ab", parts=(0, 0, 0, 2), prompt_ids=raw(*b"hi"), output_ids=raw(97, 98, END_ID))
    found = audited(tmp_path, broken, [row])
    assert (found.without_prompt, found.prompt.compared, found.output.exact) == (1, 0, 1)
    assert "no such role" in found.why


def test_without_a_tokenizer_the_fix_is_told(tmp_path: Path) -> None:
    for path, given in (("", None), ("hub/name", None), ("", tmp_path / "gone")):
        with pytest.raises(UsageError) as caught:
            model_of(path, given)
        assert "--model PATH" in caught.value.fix
    (tmp_path / "no.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="its tokenizer cannot be read") as caught:
        Retokeniser(tmp_path / "no.gguf")
    assert "--model PATH" in caught.value.fix


def test_an_empty_run_says_so(tmp_path: Path, model: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    found = agreement.audit(folder, model, several=False)
    assert list(agreement.lines(found))[-1] == "nothing could be compared"


def test_an_id_behind_a_gap_in_the_vocabulary_is_a_token(tmp_path: Path) -> None:
    """A tokenizer's length is less than its greatest id then."""
    model = bytewise.folder(tmp_path / "model", merges=(("t", "h"),))
    assert Vocabulary(load_tokenizer(model)).spell(raw(300)) == "th"
