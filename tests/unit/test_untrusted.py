"""Texts of others: what hides, or is obeyed, is shown for what it is: on a terminal, on the page, in a report."""

import json
import random
import unicodedata

import pytest

from tokenmill.untrusted import coloured, cut, escaped, harmless, log_line, pieces, visible


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
        ("no\u200bwidth\xad \U000e0041", "no�width� �"),
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


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("\033[32mINFO\033[0m ready", "\033[32mINFO\033[0m ready\033[0m"),
        ("\033[1;38;5;9mred \033[2J\033]0;title\007gone", "\033[1;38;5;9mred gone\033[0m"),
        ("no colour, \033[Aa cursor\u202e", "no colour, a cursor�"),
        ("plain", "plain"),
    ],
)
def test_a_log_on_a_terminal_keeps_its_colours_only(line: str, shown: str) -> None:
    assert coloured(line) == shown


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain\n\ttext, ünïcode, 👩‍🚀, العربية", "plain\n\ttext, ünïcode, 👩‍🚀, العربية"),
        ("a\x00b\x07c\rd\x7fe", "a␀b␇c␍d␡e"),
        ("user\u202egpj.exe", "user⟨U+202E⟩gpj.exe"),
        ("a\u2066b\u2069\u200f\u061c", "a⟨U+2066⟩b⟨U+2069⟩⟨U+200F⟩⟨U+061C⟩"),
        ("no\u200bwidth\ufeff", "no⟨U+200B⟩width⟨U+FEFF⟩"),
        ("\x9b31m", "⟨U+009B⟩31m"),
        ("hidden\U000e0041\U000e007f", "hidden⟨U+E0041⟩⟨U+E007F⟩"),
        ("half \ud83d a pair", "half ⟨U+D83D⟩ a pair"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
    ],
)
def test_what_hides_is_shown(text: str, seen: str) -> None:
    assert visible(text) == seen


def test_a_cut_text_says_how_long_it_is() -> None:
    assert cut("x" * 5, 5) == "xxxxx"
    assert cut("a" * 1000 + "b" * 1234, 6) == "aaaa [… 2,228 characters …] bb"
    assert cut("one\ntwo\nthree", 6) == "one\n\n\n[… 7 characters …]\n\nee"


def test_a_log_on_the_page_loses_what_a_terminal_obeys() -> None:
    assert log_line("\x1b[32mINFO\x1b[0m ready \x1b]0;title\x07", 100) == "INFO ready "


def test_what_cannot_be_seen_is_named_and_joiners_stay() -> None:
    assert pieces("a\u200bb") == [("a", ""), ("U+200B", "ZERO WIDTH SPACE"), ("b", "")]
    family = "👩\u200d👩\u200d👧 ❤\ufe0f שלום\tx\n"
    assert pieces(family) == [(family, "")]
    assert [words for words, name in pieces("\x1b[31m\x00\ud800") if name] == ["U+001B", "U+0000", "U+D800"]
