"""What all engines share: flags, unreadable answers, less memory, thought and answer put together."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core import judge
from tokenmill.core.judge import Reading
from tokenmill.core.records import NULL
from tokenmill.engines.base import as_ids, decode_json, flags, lower_fraction, normal, text_of_fields
from tokenmill.engines.metrics import values
from tokenmill.errors import BrokenError


@pytest.mark.parametrize(
    ("args", "argv"),
    [
        ({"enable-x": True}, ["--enable-x"]),
        ({"enable_x": False}, []),
        ({"tp_size": 2, "fraction": 0.90}, ["--tp-size", "2", "--fraction", "0.9"]),
        ({"name": "a b"}, ["--name", "a b"]),
        ({"empty": ""}, ["--empty", ""]),
        ({"zero": 0}, ["--zero", "0"]),
        ({"loras": ["a=1", 2]}, ["--loras", "a=1", "2"]),
        ({"spec": {"method": "mtp", "n": 1, "on": True}}, ["--spec", '{"method": "mtp", "n": 1, "on": true}']),
    ],
)
def test_args_become_flags(args: dict[str, Any], argv: list[str]) -> None:
    assert flags(args) == argv


def test_a_flags_name_is_one_however_it_is_spelled() -> None:
    assert {normal("max_model_len"), normal("--max-model-len"), normal("max-model-len")} == {"max-model-len"}


# -- answers -----------------------------------------------------------------------------------------------------------
class Reply(msgspec.Struct):
    text: str
    ids: msgspec.Raw = NULL


DECODER = msgspec.json.Decoder(Reply)


@pytest.mark.parametrize(
    ("body", "text", "damaged"),
    [
        (b'{"text":"plain"}', "plain", False),
        (b'{"text":"\\ud83d\\ude42"}', "🙂", False),
        (b'{"text":"a \\ud835 b"}', "a \ufffd b", True),
        (b'{"text":"\\ude42\\ud83d"}', "\ufffd\ufffd", True),
        (b'{"text":"\\ud83d\\ude42 and \\udc00"}', "🙂 and \ufffd", True),
        (b'{"text":"a\xff b"}', "a\ufffd b", True),
        (b'{"text":"\xed\xa0\xbd x"}', "\ufffd\ufffd\ufffd x", True),
        (b'{"text":"a\\u0000b"}', "a\0b", False),
        (b'{"text":"\xe2\x80\xa8"}', "\u2028", False),
    ],
)
def test_half_characters_are_replaced_and_reported(body: bytes, text: str, damaged: bool) -> None:
    reply, was_damaged = decode_json(body, DECODER)
    assert (reply.text, was_damaged) == (text, damaged)
    reply.text.encode()


def test_the_rest_of_a_damaged_answer_is_kept() -> None:
    reply, _ = decode_json(b'{"text":"\\ud835","ids":[1, 2],"more":{"a":null}}', DECODER)
    assert as_ids(reply.ids) == msgspec.Raw(b"[1,2]")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>502</html>",
        b'{"text":"half',
        b'{"text":5}',
        b"[]",
        b'{"no":"text"}',
        b'{"text":NaN}',
        b'{"text":"a","more":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_an_answer_that_cannot_be_read_is_the_servers_fault(body: bytes) -> None:
    with pytest.raises(BrokenError, match="cannot be read"):
        decode_json(body, DECODER)


@pytest.mark.parametrize(
    ("raw", "ids"),
    [
        (b"[1,2]", b"[1,2]"),
        (b"[ 1,\n  2 ]", b"[1,2]"),
        (b"[]", b"null"),
        (b"[ ]", b"null"),
        (b"null", b"null"),
        (b"", b"null"),
    ],
)
def test_ids_stand_without_spaces_and_no_ids_are_null(raw: bytes, ids: bytes) -> None:
    assert bytes(as_ids(msgspec.Raw(raw))) == ids


@pytest.mark.parametrize(
    ("reasoning", "content", "finish", "text"),
    [
        ("", "Hello", "stop", "Hello"),
        ("\nhm\n", "\n\nHello", "stop", "<think>\nhm\n</think>\n\nHello"),
        ("hm", "", "stop", "<think>\nhm\n</think>\n\n"),
        ("hm, ", "", "length", "<think>\nhm, "),
        ("hm", "Hel", "length", "<think>\nhm\n</think>\n\nHel"),
        ("", "", "length", ""),
    ],
)
def test_thought_and_answer_are_put_together_with_their_tags(
    reasoning: str, content: str, finish: str, text: str
) -> None:
    assert text_of_fields(reasoning, content, finish) == text


WORDS = st.text(st.characters(exclude_characters="<>", codec="utf-8"), max_size=20).map(str.strip)


@given(reasoning=WORDS.filter(bool), content=WORDS, finish=st.sampled_from(["stop", "length"]))
def test_what_is_put_together_is_found_again(reasoning: str, content: str, finish: str) -> None:
    text = text_of_fields(reasoning, content, finish)
    a, b, c, d = judge.split(text, finish, Reading(thinking=True))
    assert (text[a:b], text[c:d]) == (reasoning, content)


# -- less memory -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "usual", "wanted", "words"),
    [
        ({"fraction": 0.9}, 0.92, {"fraction": 0.85}, "fraction 0.90 → 0.85"),
        ({"fraction": "0.9", "x": 1}, 0.92, {"fraction": 0.85, "x": 1}, "fraction 0.90 → 0.85"),
        ({"fraction": 0.875}, None, {"fraction": 0.82}, "fraction 0.875 → 0.82"),
        ({}, 0.92, {"fraction": 0.87}, "fraction 0.92 → 0.87"),
        ({}, None, {"fraction": 0.7}, "fraction the engine's own choice → 0.70"),
        ({"fraction": 0.75}, None, {"fraction": 0.7}, "fraction 0.75 → 0.70"),
    ],
)
def test_a_fraction_is_lowered_by_a_step(
    args: dict[str, Any], usual: float | None, wanted: dict[str, Any], words: str
) -> None:
    assert lower_fraction(args, "fraction", usual) == (wanted, words)


@pytest.mark.parametrize("given", [0.70, 0.5, "much", None, 8, [0.9], float("nan")])
def test_a_fraction_that_is_low_or_none_is_left_alone(given: Any) -> None:
    assert lower_fraction({"fraction": given}, "fraction", usual=0.92) is None


def test_a_flag_is_lowered_as_it_is_spelled() -> None:
    assert lower_fraction({"mem_fraction": 0.9}, "mem-fraction", 1.0) == (
        {"mem_fraction": 0.85},
        "mem-fraction 0.90 → 0.85",
    )


def test_metrics_are_summed_over_label_sets() -> None:
    page = '# TYPE a gauge\na{x="1"} 2\na{x="2"} 3.5\nab 7\n# junk\nb_total 1e3\n'
    assert values(page, "a", "b_total", "c") == {"a": 5.5, "b_total": 1000.0}
