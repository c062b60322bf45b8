"""A streamed chat answer is the same Completion as a whole one, or none at all."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.samples import NONCE, SAMPLES, engine, spec
from tests.harness import scripted_server
from tokenmill.client import Client
from tokenmill.core.records import NULL, Completion
from tokenmill.engines import chat
from tokenmill.engines.base import Rendered, Sampling
from tokenmill.errors import BrokenError
from tokenmill.testing.streams import chunks

WHOLE = SAMPLES["vllm"].reply


def wire(reply: bytes, pieces: int = 5, **changes: Any) -> bytes:
    """A whole answer as vLLM streams it, with the message's fields changed; no piece is cut inside a character."""
    tree = json.loads(reply)
    tree["choices"][0]["message"] |= changes
    part, last = chunks(tree, True)
    found = [chunk for step in range(pieces) for chunk in part(step, pieces)] + last
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in found) + b"data: [DONE]\n\n"


def changed(reply: bytes, **changes: Any) -> bytes:
    tree = json.loads(reply)
    tree["choices"][0]["message"] |= changes
    return json.dumps(tree).encode()


def read(data: bytes, cuts: tuple[int, ...] = ()) -> tuple[Completion, int]:
    """The answer and how often tokens were seen."""
    seen: list[None] = []
    _, stream = chat.streamed(b"{}", lambda: seen.append(None))
    places = sorted({0, *cuts, len(data)})
    for start, end in pairwise(places):
        stream.feed(data[start:end])
    return stream.completion(), len(seen)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"content": "naïve 模型 🙂 — fin"},
        {"reasoning": "It is Paris."},
        {"reasoning_content": "It is Paris.", "content": None},
        {"content": ""},
    ],
    ids=repr,
)
@given(cuts=st.lists(st.integers(0, 4000), max_size=6))
@settings(max_examples=40, deadline=None)
def test_pieces_are_put_together_to_the_whole_answer(changes: dict[str, Any], cuts: list[int]) -> None:
    data = wire(WHOLE, **changes)
    whole = chat.decode(changed(WHOLE, **changes))
    found, seen = read(data, tuple(cut % len(data) for cut in cuts))
    assert found == whole
    assert seen >= 5


@pytest.mark.parametrize("mode", ["inline", "reasoning_content", "reasoning", "all_in_reasoning"])
def test_a_server_gives_the_same_answer_whole_and_streamed(port: int, mode: str) -> None:
    async def ask() -> tuple[Completion, Completion, list[None]]:
        client, seen = Client(f"http://127.0.0.1:{port}"), list[None]()
        one = engine("openai")
        messages = Rendered(messages=msgspec.Raw('[{"role":"user","content":"Grüße, Γειά"}]'.encode()))
        request = one.encode(spec("openai"), messages, Sampling(99), request_id="a", thinking=True, seed=None)
        asked, stream = chat.streamed(request.body, lambda: seen.append(None))
        try:
            whole = chat.decode(await client.post(request.path, request.body, timeout_s=10))
            assert await client.post(request.path, asked, timeout_s=10, take=stream.feed) == b""
        finally:
            await client.close()
        return whole, stream.completion(), seen

    with scripted_server(port, mode=mode):
        whole, pieces, seen = asyncio.run(ask())
    assert pieces == whole
    assert len(seen) >= 8


def test_a_stream_that_ends_before_its_answer_is_broken_wherever_it_was_cut() -> None:
    data = wire(WHOLE)
    whole = chat.decode(WHOLE)
    for end in range(len(data)):
        try:
            found, _ = read(data[:end])
        except BrokenError:
            continue
        assert found == whole, f"cut after {end} of {len(data)} bytes"


def test_without_done_or_without_usage_an_answer_with_an_end_is_whole() -> None:
    done = b"data: [DONE]\n\n"
    assert read(wire(WHOLE).removesuffix(done))[0] == chat.decode(WHOLE)
    no_usage = b"\n\n".join(event for event in wire(WHOLE).split(b"\n\n") if b'"choices": []' not in event)
    found, _ = read(no_usage)
    assert (found.text, found.finish_reason, found.output_tokens) == (SAMPLES["vllm"].text, "stop", 0)


def test_an_error_in_the_middle_is_broken_and_tells_that_the_engine_is_dead() -> None:
    error = b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\n'
    with pytest.raises(BrokenError) as broken:
        read(wire(WHOLE)[:900].rpartition(b"\n\n")[0] + b"\n\n" + error)
    assert engine("openai").lost(broken.value.body)


def test_keep_alives_are_no_tokens() -> None:
    seen: list[None] = []
    _, stream = chat.streamed(b"{}", lambda: seen.append(None))
    stream.feed(b': waiting\n\ndata: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}\n\n')
    stream.feed(b'data: {"choices": []}\n\n: waiting\n\n')
    assert seen == []
    stream.feed(b'data: {"choices": [{"index": 0, "delta": {"tool_calls": [{}]}}]}\n\n')
    assert len(seen) == 1


@pytest.mark.parametrize("calls", [b'[{"function":{"name":"look"}}]', b"[]", b"null"])
def test_an_answer_whose_tool_calls_were_taken_out_is_known_by_them(calls: bytes) -> None:
    """Whatever the server calls its end: some say "stop"."""
    expected = "tool_calls" if len(calls) > 4 else "stop"
    whole = b'{"choices":[{"message":{"content":"I look.","tool_calls":%b},"finish_reason":"stop"}],"usage":{}}' % calls
    assert chat.decode(whole).finish_reason == expected
    pieces = (
        b'data: {"choices":[{"delta":{"content":"I look.","tool_calls":%b}}]}\n\n'
        b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    ) % calls
    assert read(pieces)[0].finish_reason == expected


def test_an_answer_that_came_whole_is_read_as_whole() -> None:
    assert read(b"\n " + WHOLE, cuts=(1, 300)) == (chat.decode(WHOLE), 0)


def test_ids_that_stand_in_some_pieces_only_are_none() -> None:
    events = wire(WHOLE).split(b"\n\n")
    place = next(n for n, event in enumerate(events) if b'"token_ids"' in event and b"prompt" not in event)
    events[place] = events[place].replace(b'"token_ids"', b'"other"')
    found, _ = read(b"\n\n".join(events))
    assert (found.text, found.output_ids) == (SAMPLES["vllm"].text, NULL)


@given(data=st.one_of(st.binary(max_size=80), st.integers(0, 900).map(lambda n: wire(WHOLE)[n:])))
def test_junk_is_broken(data: bytes) -> None:
    for begin in (b"", b"data: ", b'data: {"choices": [{"delta": {"content": '):
        try:
            read(begin + data)
        except BrokenError:
            pass


# -- counters of whatever stands behind an address ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["sglang", "vllm", "llamacpp"])
def test_the_counters_of_a_known_engine_are_understood_behind_an_address(kind: str) -> None:
    page = SAMPLES[kind].metrics
    assert engine("openai").load(page) == engine(kind).load(page)
    assert engine("openai").load(page).tokens is not None


@pytest.mark.parametrize("page", ["", "<html>404</html>", "# TYPE my_tokens counter\nmy_tokens_total 7\n"])
def test_a_page_without_known_counters_tells_nothing(page: str) -> None:
    assert engine("openai").load(page).tokens is None


def test_a_request_for_pieces_is_the_same_request_but_for_that() -> None:
    one = engine("openai")
    request = one.encode(
        spec("openai", nonce=NONCE),
        Rendered(messages=msgspec.Raw(b"[]")),
        Sampling(5, extra={"stop": ["}"]}),
        request_id="a",
        thinking=True,
        seed=7,
    )
    asked = json.loads(chat.streamed(request.body, lambda: None)[0])
    assert asked.pop("stream") is True
    assert asked.pop("stream_options") == {"include_usage": True}
    assert asked == json.loads(request.body)
