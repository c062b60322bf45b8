"""Times and sizes as people say them, and texts of others that a terminal does not obey."""

import json
import random
import unicodedata

import pytest

from tokenmill.plain import duration, escaped, harmless, span


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "–"),
        (0, "0 s"),
        (42.4, "42 s"),
        (300, "5 min"),
        (12_000, "3 h 20 min"),
        (7_200, "2 h 00 min"),
        (352_800, "4 d 2 h"),
    ],
)
def test_times_are_said_as_people_say_them(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


def test_ranges_are_said_as_people_say_them() -> None:
    assert span(11_100, 13_800) == "3 h 05 min to 3 h 50 min"
    assert span(11_100, None) == "at least 3 h 05 min"
    assert span(11_100, 11_110) == "3 h 05 min"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\033[31mred\033[0m", "red"),
        ("\033[2J\033[H\033[?1049lgone", "gone"),
        ("\033]0;a title\007after", "after"),
        ("\033]8;;http://x\033\\link\033]8;;\033\\", "link"),
        ("\033]52;c;c3RvbGVu\007", ""),
        ("\033Pq#0\033\\sixel", "sixel"),
        ("\x9b31mC1", "C1"),
        ("\033(0lines\033c", "lines"),
        ("bell\007 back\b null\0", "bell� back� null�"),
        ("two\nlines\r\nand\ta tab", "two lines and a tab"),
        ("right\u202eleft\u2066", "right�left�"),
        ("half \ud83d pair", "half � pair"),
        ("plain, 漢字 and 🙂 – stay", "plain, 漢字 and 🙂 – stay"),
        ("cut \033[", "cut "),
        ("cut \033", "cut "),
    ],
)
def test_nothing_that_a_terminal_obeys_is_left(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_no_text_at_all_leaves_anything_that_a_terminal_obeys() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    alphabet = "\033\033\033[]\\P?;0123mHJ\007\x9b\x9d\x9c\u202e\ud83dab\n\t é漢"
    for _ in range(3000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(1, 30)))
        for lines in (False, True):
            shown = harmless(text, lines=lines)
            left = {char for char in shown if unicodedata.category(char) in ("Cc", "Cs", "Cf")}
            assert left <= ({"\n"} if lines else set()), repr(text)
        assert json.loads(escaped(json.dumps(text, ensure_ascii=False))) == text
        assert all(unicodedata.category(char) != "Cc" for char in escaped(json.dumps(text, ensure_ascii=False)))
