"""C22: a row for each turn, as it was served: its own thought is supervised, its history has none."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.exports import raw, rows_of, stored
from tests.unit.make import record
from tokenmill.core.judge import Rules
from tokenmill.core.records import Parts
from tokenmill.export import export

USER, OPEN, CLOSE, END = 1, 90, 91, 99


def _turns() -> list[Any]:
    """Thoughts 11, 12 and 21; answers 13 and 22. The second prompt has the first answer, and not its thought."""
    texts = ["first thought\n</think>\n\none", "second thought\n</think>\n\ntwo"]
    parts = [Parts(0, 13, 24, 27), Parts(0, 14, 25, 28)]
    history = [
        [{"role": "user", "content": "1?"}],
        [
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": "2?"},
        ],
    ]
    prompts = [raw(USER, OPEN), raw(USER, 13, END, USER, OPEN)]
    outputs = [raw(11, 12, CLOSE, 13, END), raw(21, CLOSE, 22, END)]
    return [
        record(
            turn=turn,
            messages=msgspec.Raw(msgspec.json.encode(history[turn])),
            prompt_ids=prompts[turn],
            output_ids=outputs[turn],
            text=texts[turn],
            parts=parts[turn],
        )
        for turn in range(2)
    ]


@pytest.mark.parametrize("form", ["specforge", "speculators"])
def test_each_turn_supervises_its_own_thought_its_tag_its_answer_and_its_end(tmp_path: Path, form: str) -> None:
    assert export(stored(tmp_path, _turns()), form, tmp_path / "out", Rules(), samples=1) == 2
    first, second = rows_of(tmp_path / "out")
    assert [first["id"], second["id"]] == ["k#0.0", "k#0.1"]
    supervised = [
        [number for number, on in zip(row["input_ids"], row["loss_mask"], strict=True) if on] for row in (first, second)
    ]
    assert supervised == [[11, 12, CLOSE, 13, END], [21, CLOSE, 22, END]]
    assert not {11, 12} & set(second["input_ids"])


@pytest.mark.parametrize(("form", "field"), [("messages", "messages"), ("specforge-chat", "conversations")])
def test_conversations_keep_the_thought_of_the_turn_and_the_history_as_served(
    tmp_path: Path, form: str, field: str
) -> None:
    export(stored(tmp_path, _turns()), form, tmp_path / "out", Rules(), samples=1)
    first, second = (row[field] for row in rows_of(tmp_path / "out"))
    thoughts = [(turns[-1]["content"], turns[-1]["reasoning_content"]) for turns in (first, second)]
    assert thoughts == [("one", "first thought"), ("two", "second thought")]
    assert second[1] == {"role": "assistant", "content": "one"}
