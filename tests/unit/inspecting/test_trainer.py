"""With the model's tokenizer: what a trainer makes of a row, to the token, thought and answer apart."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests import thinker
from tests.unit.inspecting.strange import ROWS
from tests.unit.make import jsonl
from tokenmill.core.judge import Rules
from tokenmill.errors import UsageError
from tokenmill.inspecting.measuring import Found, measure
from tokenmill.inspecting.shapes import Talk, Tokens, read
from tokenmill.inspecting.trainer import Trainer
from tokenmill.inspecting.verdict import Inspection
from tokenmill.inspection import inspect

ASK = {"role": "user", "content": "hi"}
THOUGHT = "one two three four five six seven eight nine"
LONG = " ".join([THOUGHT, THOUGHT])
TEXTS = [THOUGHT, "hi", "Yes.", "OK.", *(f"{n}" for n in range(100))]
OPEN, CLOSE, END = (thinker.SPECIAL.index(word) for word in ("<think>", "</think>", "<|im_end|>"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinker.folder(tmp_path_factory.mktemp("model"), TEXTS)


@pytest.fixture(scope="module")
def trainer(model: Path) -> Trainer:
    return Trainer(model)


def talk(
    content: str = "Yes.", thought: str | None = LONG, turns: list[dict[str, Any]] | None = None, **fields: Any
) -> Talk:
    last = {"role": "assistant", "content": content} | ({} if thought is None else {"reasoning_content": thought})
    return Talk("r", [*(turns or [ASK]), last], content, thought, **fields)


def found(row: Talk | Tokens, trainer: Trainer) -> Found:
    return measure([row], Rules(), trainer)[0]


WORDS = 2 * 9 * 2 - 1
"""Words of LONG, and a space between two of them: tokens of its own."""

TAIL = ["\n", "</think>", "\n\n", "Yes", ".", "<|im_end|>"]


def test_a_conversation_trains_thought_closing_tag_answer_and_end_token(trainer: Trainer) -> None:
    made, kept = trainer.tokens([talk()])[0]
    assert isinstance(made, Tokens)
    assert kept
    assert int(made.mask.sum()) == WORDS + len(TAIL)
    before = [
        "<|im_start|>",
        "user",
        "\n",
        "hi",
        "<|im_end|>",
        "\n",
        "<|im_start|>",
        "assistant",
        "\n",
        "<think>",
        "\n",
    ]
    assert made.mask.tolist() == [False] * len(before) + [True] * (WORDS + len(TAIL)) + [False]
    output = trainer.output(made)
    assert output.text == f"{LONG}\n</think>\n\nYes."
    assert (output.ended, output.opened, output.thought_tokens) == (True, True, WORDS + 1)
    one = found(talk(), trainer)
    assert (one.shape, one.labels, one.thought, one.length) == ("conversation", (), "closed", 11 + WORDS + 6 + 1)
    assert (one.supervised, one.thought_tokens) == (WORDS + 6, WORDS + 1)


def test_an_answer_without_a_thought_gets_an_empty_block_and_trains_hardly_anything(trainer: Trainer) -> None:
    one = found(talk("OK.", None), trainer)
    assert one.supervised == 5  # </think>, two newlines, OK, the full stop, the end token
    assert one.thought == "empty"
    assert set(one.labels) == {"short_mask", "empty_reasoning"}
    assert one.shown == "</think>\n\nOK."


def test_each_answer_of_a_conversation_is_judged_as_the_template_leaves_it(trainer: Trainer) -> None:
    turns = [ASK, {"role": "assistant", "content": "Yes.", "reasoning_content": THOUGHT}, ASK]
    made, _ = trainer.tokens([talk(turns=turns)])[0]
    assert isinstance(made, Tokens)
    assert THOUGHT not in trainer.output(made).text.replace(LONG, "")
    assert int(made.mask.sum()) == WORDS + 6  # of the last answer only
    assert "thought_in_history" in found(talk(turns=turns, earlier=True), trainer).labels


def test_a_thought_that_the_template_does_not_render_is_told(tmp_path: Path) -> None:
    deaf = thinker.folder(tmp_path, TEXTS, thinker.PLAIN.replace("m.reasoning_content or ''", "''"))
    one = found(talk(), Trainer(deaf))
    assert set(one.labels) == {"thought_dropped", "short_mask", "empty_reasoning"}
    bare = thinker.folder(tmp_path, TEXTS, "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}")
    assert "thought_dropped" in found(talk(f"<think>{LONG}</think>Yes.", None), Trainer(bare)).labels


def test_a_cut_off_answer_gets_an_end_token_that_nobody_wrote(trainer: Trainer) -> None:
    assert "invented_end_token" in found(talk(finish="length"), trainer).labels


def test_turns_that_the_template_refuses_are_a_bad_row(tmp_path: Path) -> None:
    strict = thinker.folder(tmp_path, TEXTS, "{{ raise_exception('no system turn') }}")
    one = found(talk(), Trainer(strict))
    assert one.labels == ("bad_row",)
    assert "no system turn" in one.shown


def ids(*words: str) -> "np.ndarray[Any, np.dtype[np.int32]]":
    pieces = [piece for word in words for piece in thinker.PIECES.findall(word)]
    known = {word: number for number, word in enumerate(thinker.words(TEXTS))}
    return np.array([known[piece] for piece in pieces], dtype=np.int32)


def tokenised(prompt: str, output: str, finish: str | None = None) -> Tokens:
    before, behind = ids(prompt), ids(output)
    mask = np.array([False] * len(before) + [True] * len(behind))
    return Tokens("t", np.concatenate([before, behind]), mask, finish)


OPENED = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("prompt", "output", "finish", "thought", "labels"),
    [
        (OPENED, f"{LONG}</think>Yes.<|im_end|>", "stop", "closed", set()),
        (OPENED, f"{LONG}</think>Yes.", "stop", "closed", {"missing_end_token"}),
        (OPENED, f"{LONG}</think>Yes.", "length", "closed", {"truncated_in_answer"}),
        (OPENED, f"{LONG}</think>Yes.", None, "closed", {"truncated_in_answer"}),
        (OPENED, LONG, None, "open", {"truncated_in_thinking"}),
        (OPENED, "\n</think>\n\nOK.<|im_end|>", None, "empty", {"short_mask", "empty_reasoning"}),
        ("hi", f"<think>{LONG}</think>Yes.<|im_end|>", None, "closed", set()),
        ("hi", f"{LONG}<|im_end|>", None, "none", set()),
        ("hi", f"<think>{LONG}</think></think>Yes.<|im_end|>", None, "closed", {"orphan_think_tag"}),
    ],
)
def test_pretokenised_rows_are_judged_by_the_text_behind_their_mask(
    trainer: Trainer, prompt: str, output: str, finish: str | None, thought: str, labels: set[str]
) -> None:
    one = found(tokenised(prompt, output, finish), trainer)
    assert (one.thought, set(one.labels)) == (thought, labels)


@pytest.mark.parametrize(
    ("behind", "lost"), [("<|im_end|>", True), ("<|im_end|>\n", True), ("<|im_end|><|im_end|>", False)]
)
def test_an_end_token_right_behind_the_mask_was_lost_unless_it_is_padding(
    trainer: Trainer, behind: str, lost: bool
) -> None:
    row = tokenised(OPENED, f"{LONG}</think>Yes.")
    more = ids(behind)
    longer = Tokens(
        "t", np.concatenate([row.ids, more]), np.concatenate([row.mask, np.zeros(len(more), dtype=np.bool_)])
    )
    assert set(found(longer, trainer).labels) == {"missing_end_token" if lost else "truncated_in_answer"}


def test_an_answer_without_its_prompt_is_judged_by_its_text(trainer: Trainer) -> None:
    row = Talk("b", [{"role": "assistant", "content": "Yes."}], "Yes.", LONG, tokens=44)
    one = found(row, trainer)
    assert (one.labels, one.supervised, one.length, one.characters) == ((), 44, None, len(LONG) + 23)


@settings(deadline=None, max_examples=100)
@given(ROWS)
def test_no_row_is_a_crash(trainer: Trainer, fields: dict[str, Any]) -> None:
    row = read("f:1", json.dumps(fields).encode("utf-8", "surrogatepass"))
    one = measure([row], Rules(), trainer)[0]
    assert one.supervised is None or one.length is None or 0 <= one.supervised <= one.length


# -- sets --------------------------------------------------------------------------------------------------------------
def looked(folder: Path, rows: Iterable[Any], model: Path) -> Inspection:
    return inspect(jsonl(folder / "data.jsonl", rows), model=model)


def messages(number: int, **answer: Any) -> dict[str, Any]:
    return {"messages": [ASK, {"role": "assistant", **answer, "content": f"{number}."}]}


def test_conversations_are_counted_in_tokens(tmp_path: Path, model: Path) -> None:
    rows = [messages(n, reasoning_content=LONG) for n in range(30)]
    seen = looked(tmp_path, rows, model)
    assert seen.verdict == "pass"
    assert seen.supervised_tokens is not None
    assert seen.supervised_tokens["p50"] == WORDS + 6
    assert seen.thought_tokens == {"p1": WORDS + 1, "p50": WORDS + 1, "p99": WORDS + 1}
    assert seen.answer_tokens == {"p1": 5, "p50": 5, "p99": 5}
    assert (seen.closed_thoughts, seen.thoughts) == (1.0, {"closed": 30})


def test_lost_end_tokens_fail_from_one_in_two_hundred_on(tmp_path: Path, model: Path) -> None:
    def row(number: int, end: str) -> dict[str, Any]:
        made = tokenised(OPENED, f"{LONG}</think>{number % 100}.{number // 100}{end}")
        return {"input_ids": made.ids.tolist(), "loss_mask": made.mask.astype(int).tolist(), "finish_reason": "stop"}

    good = [row(number, "<|im_end|>") for number in range(199)]
    assert looked(tmp_path, [*good, row(199, "")], model).verdict == "pass"
    seen = looked(tmp_path, [*good, row(199, ""), row(200, "")], model)
    assert (seen.verdict, seen.reasons) == ("fail", ["2 of 201 finished rows (1.0%) have lost their end token"])


def test_a_folder_without_a_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, why in (("none", "no such folder"), ("empty", "loading the tokenizer")):
        with pytest.raises(UsageError, match=why) as caught:
            looked(tmp_path, [messages(1)], tmp_path / name)
        assert "tokenizer.json" in caught.value.fix
