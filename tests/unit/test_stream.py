"""Server-sent events out of bytes that were cut anywhere."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core.stream import Events

WIRE = (
    b': a comment\r\n\r\nevent: message\r\nid: 7\r\ndata: {"a":"\xc3\xbc"}\r\n\r\n'
    b'data:{"b":\ndata: 2}\n\n: keep-alive\n\nretry: 3000\n\ndata: [DONE]'
)
FOUND = [b'{"a":"\xc3\xbc"}', b'{"b":\n2}', b"[DONE]"]


@given(cuts=st.lists(st.integers(0, len(WIRE)), max_size=12))
def test_events_are_the_same_however_they_were_cut(cuts: list[int]) -> None:
    """Inside a character, between \\r and \\n, without the last empty line."""
    events, found, places = Events(), list[bytes](), sorted({0, *cuts, len(WIRE)})
    for start, end in pairwise(places):
        found += events.feed(WIRE[start:end])
    assert [*found, *events.end()] == FOUND


def test_bytes_one_by_one_give_the_same_events() -> None:
    events = Events()
    assert [event for at in range(len(WIRE)) for event in events.feed(WIRE[at : at + 1])] + events.end() == FOUND
