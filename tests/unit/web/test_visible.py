"""What plain text can do to its reader, shown for what it is."""

import pytest

from tokenmill.web.visible import cut, log_line, visible


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
        ("half \ud83d a pair", "half ? a pair"),
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),
    ],
)
def test_what_hides_is_shown(text: str, seen: str) -> None:
    assert visible(text) == seen


def test_a_cut_text_says_how_long_it_is() -> None:
    assert cut("x" * 5, 5) == "xxxxx"
    assert cut("x" * 1234, 3) == "xxx … (1,234 characters)"


def test_a_log_loses_its_colours_only() -> None:
    assert log_line("\x1b[32mINFO\x1b[0m ready \x1b]0;title\x07", 100) == "INFO ready ␛]0;title␇"
