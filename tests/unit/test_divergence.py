"""Where two lists of ids part, one hand-made pair for each kind and for each way into it."""

import random

import pytest

from tokenmill.core import divergence
from tokenmill.core.divergence import Divergence, Kind

PIECES = [
    "<end>",
    "<think>",
    "</think>",
    "\n",
    "\n\n",
    " ",
    "wh",
    "at",
    "what",
    " is",
    "it",
    "<user>",
    "system",
    "<eos>",
]
ENDS = frozenset({PIECES.index("<end>"), PIECES.index("<eos>")})
EMOJI = "🙂".encode()


def decode(ids: divergence.Ids) -> str:
    """Tokens are pieces; from 100 on, single bytes."""
    raw = b"".join(bytes([number - 100]) if number >= 100 else PIECES[number].encode() for number in ids)
    return raw.decode("utf-8", "replace")


def ids(*pieces: str) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def bytewise(text: str) -> list[int]:
    return [byte + 100 for byte in text.encode()]


CASES = [
    # end token: lacking, another one, twice, in the middle where the other goes on
    (ids("what", " is"), ids("what", " is", "<end>"), 2, Kind.END_TOKEN),
    (ids("what", "<end>"), ids("what", "<eos>"), 1, Kind.END_TOKEN),
    (ids("what", "<end>", "<end>"), ids("what", "<end>"), 2, Kind.END_TOKEN),
    (ids("what", "<end>", "<user>"), ids("what", "it", "<user>"), 1, Kind.END_TOKEN),
    # think prefix: opened on one side only, closed at once on one side only
    (ids("<user>", "<think>", "\n"), ids("<user>"), 1, Kind.THINK_PREFIX),
    (ids("what", "</think>", "it"), ids("<think>", "\n", "what", "</think>", "it"), 0, Kind.THINK_PREFIX),
    (ids("<think>", "\n"), ids("<think>", "\n\n", "</think>", "\n\n"), 1, Kind.THINK_PREFIX),
    (ids("\n", "<think>", "it"), ids("it"), 0, Kind.THINK_PREFIX),
    # white space: cut otherwise, more of it, lacking at the end
    (ids("it", "\n\n", "it"), ids("it", "\n", "\n", "it"), 1, Kind.WHITESPACE),
    (ids("it", "\n", "it"), ids("it", "\n\n", "it"), 1, Kind.WHITESPACE),
    (ids("it", "\n"), ids("it"), 1, Kind.WHITESPACE),
    (ids("it", " ", "what"), ids("it", "what"), 1, Kind.WHITESPACE),
    # the same text, cut otherwise; also within a character, and far from the end
    (ids("what", "it"), ids("wh", "at", "it"), 0, Kind.SPLIT),
    (ids("it", "wh", "at", " is", "<end>"), ids("it", "what", " is", "<end>"), 1, Kind.SPLIT),
    (ids("what", " is", *["it"] * 200, "it"), ids("wh", "at", " is", *["it"] * 200, "system"), 0, Kind.SPLIT),
    (bytewise("a🙂b"), [*bytewise("a"), 100 + EMOJI[0], *bytewise("x")], 2, Kind.OTHER),
    # other text
    (ids("system", "what"), ids("<user>", "what"), 0, Kind.OTHER),
    (ids("what", " is", "it"), ids("what", " is"), 2, Kind.OTHER),
    ([], ids("what"), 0, Kind.OTHER),
]


@pytest.mark.parametrize(("one", "other", "at", "kind"), CASES)
def test_each_kind_is_told_and_in_both_directions(one: list[int], other: list[int], at: int, kind: Kind) -> None:
    assert divergence.classify(one, other, decode, ENDS) == Divergence(at, kind)
    assert divergence.classify(other, one, decode, ENDS) == Divergence(at, kind)


def test_equal_lists_do_not_part() -> None:
    assert divergence.classify(ids("what"), ids("what"), decode, ENDS) is None
    assert divergence.classify([], [], decode, ENDS) is None


def test_any_two_cuts_of_one_text_are_splits_or_white_space() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        text = "".join(rng.choices(["what", "it", " ", "\n\n", "🙂", " is"], k=rng.randint(1, 12)))
        one, other = _cut(text, rng), _cut(text, rng)
        found = divergence.classify(one, other, decode, ENDS)
        assert decode(one) == decode(other) == text
        assert (found is None) == (one == other)
        assert found is None or found.kind in (Kind.SPLIT, Kind.WHITESPACE), (text, one, other)


def _cut(text: str, rng: random.Random) -> list[int]:
    """A text as pieces or bytes, at random."""
    found: list[int] = []
    while text:
        fits = [piece for piece in PIECES if text.startswith(piece)]
        piece = rng.choice([*fits, text[0]])
        found += ids(piece) if piece in PIECES and rng.random() < 0.8 else bytewise(piece)
        text = text[len(piece) :]
    return found
