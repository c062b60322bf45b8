"""Ids, counts and text that tell the same, and those that do not."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core import agree
from tokenmill.core.agree import Agreement
from tokenmill.core.records import NULL, Completion

SPECIALS = agree.pattern({"<|im_end|>", "<|im_start|>"})


def raw(*ids: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(list(ids)))


@given(st.lists(st.integers(0, 2**31 - 1), max_size=9))
def test_ids_are_counted_without_being_read(ids: list[int]) -> None:
    assert agree.count(raw(*ids)) == len(ids)


@pytest.mark.parametrize(
    "ids", [b'["a"]', b"[1.5]", b"[-1]", b"[[1]]", b"{}", b'"12"', b"12", b"[1,null]", b"true", b"[", b"[1:2]"]
)
def test_what_is_no_list_of_ids_has_no_count(ids: bytes) -> None:
    assert agree.count(msgspec.Raw(ids)) is None
    assert agree.disagree(Completion("a", "stop", output_ids=msgspec.Raw(ids)))


FIVE = raw(5, 6, 7, 8, 9)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"output_ids": FIVE, "output_tokens": 5}, False),
        ({"output_ids": FIVE, "output_tokens": 6}, True),
        ({"output_ids": FIVE, "output_tokens": 0}, False),  # the engine tells no count
        ({"output_ids": NULL, "output_tokens": 6}, False),  # the engine gives no ids
        ({"prompt_ids": FIVE, "prompt_tokens": 4}, True),
        ({"prompt_ids": raw(0, 5), "prompt_tokens": 2, "output_ids": raw(7, 0), "output_tokens": 2}, False),
        ({"output_ids": raw(0), "output_tokens": 1}, False),  # it pads with its end token
        ({"output_ids": raw(0, 7), "output_tokens": 2}, True),
        ({"output_ids": raw(7, 0, 7), "output_tokens": 3}, True),
        ({"output_ids": raw(70, 100, 7), "output_tokens": 3}, False),
    ],
)
def test_counts_must_be_right_and_padding_only_last(fields: dict[str, object], wrong: bool) -> None:
    assert agree.disagree(Completion("a", "stop", **fields), never=(b"0",)) == wrong  # type: ignore[arg-type]


TEXT = "First I look.\nThen I say 🙂."

AGREEMENTS = [
    (TEXT, TEXT, Agreement.EXACT),
    (TEXT, f"{TEXT}<|im_end|>", Agreement.SPECIALS),
    (f"<think>\n{TEXT}", f"\n{TEXT}<|im_end|>", Agreement.SPECIALS),
    (TEXT, f"{TEXT}\ufffd", Agreement.CUT),
    (f"{TEXT}\ufffd", TEXT, Agreement.CUT),
    (TEXT, f" {TEXT}\n<|im_end|>", Agreement.SPACES),
    (f"<think>\n{TEXT}\n</think>\n\nSo.", f"{TEXT}</think>So.<|im_end|>", Agreement.SPACES),
    (TEXT, f"{TEXT} STOP HERE", Agreement.MARKS),
    (f"<think>\n{TEXT}\n</think>\n\nSo.", f"analysis{TEXT}final So.", Agreement.MARKS),
    (TEXT, TEXT.replace("look", "lock"), Agreement.OTHER),
    (TEXT, TEXT[::-1], Agreement.OTHER),
    (TEXT, "", Agreement.OTHER),
    (TEXT, TEXT[:-1], Agreement.OTHER),
    (TEXT, TEXT + " And it goes on." * 9, Agreement.OTHER),
    ("", "<|im_end|>", Agreement.SPECIALS),
    ("", "A few words.<|im_end|>", Agreement.OTHER),
    ("<think>", "A few words.", Agreement.OTHER),
    ("", "A whole answer that the text lacks. " * 3, Agreement.OTHER),
]


@pytest.mark.parametrize(("text", "spelled", "expected"), AGREEMENTS)
def test_a_text_agrees_with_what_its_ids_spell(text: str, spelled: str, expected: Agreement) -> None:
    pieces = [TEXT, "So."] if "So." in text else [text] if text else []
    assert agree.compare(text, spelled, SPECIALS, pieces) is expected


@given(st.text(), st.text(), st.lists(st.text(), max_size=2))
def test_any_two_texts_are_compared(text: str, spelled: str, pieces: list[str]) -> None:
    assert agree.compare(text, text, SPECIALS, pieces) is Agreement.EXACT
    agree.compare(text, spelled, SPECIALS, pieces)
