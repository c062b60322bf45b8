"""What completions prove of ids: a server that read another prompt than was sent is not used; odd counts are told."""

import asyncio
from typing import Any

import msgspec

from tests.exports import raw
from tests.unit.make import MESSAGES, completion
from tokenmill.client import Client
from tokenmill.core.judge import Reading
from tokenmill.core.records import NULL
from tokenmill.core.speculation import first_words
from tokenmill.engines.base import Rendered
from tokenmill.render import ChatRenderer
from tokenmill.tokens.proof import NO_IDS, Asked, Proof, prove

READING = Reading(thinking=True, end_ids=frozenset({b"9"}), never=(b"7",))


def asked(sent: msgspec.Raw = NULL, **fields: Any) -> Asked:
    text = "<think>\nSo it is.\n</think>\n\nYes."
    base: dict[str, Any] = {"output_ids": raw(4, 5, 9), "prompt_ids": raw(1, 2), "prompt_tokens": 2, "tokens": 3}
    return Asked(Rendered(MESSAGES, ids=sent), completion(text, **{**base, **fields}))


def proven(*answers: Asked) -> Proof:
    async def ask() -> Proof:
        client = Client("http://127.0.0.1:9")
        try:
            return await prove(answers, READING, ChatRenderer(None, True), client)
        finally:
            await client.close()

    return asyncio.run(ask())


def test_ids_that_are_as_sent_and_as_counted_prove_well() -> None:
    assert proven(asked(raw(1, 2)), asked()) == Proof()


def test_a_server_that_read_another_prompt_is_not_used() -> None:
    found = proven(asked(raw(1, 2)), asked(raw(3, 1, 2)))
    assert found.failure is not None
    assert "it was sent a prompt of 3 ids and says that it read 2 others" in found.failure.cause
    assert found.failure.lines == ("sent [3,1,2]", "read [1,2]")


def test_what_is_odd_is_told() -> None:
    found = proven(
        asked(tokens=5),
        asked(prompt_tokens=1),
        asked(output_ids=raw(7, 5, 9)),
        asked(output_ids=raw(4, 5, 6)),
    )
    assert found.failure is None
    told = "\n".join(found.warnings)
    assert "1 of 4 have other output ids than it counts: 3, not 5" in told
    assert "1 of 4 have other prompt ids than it counts: 2, not 1" in told
    assert "1 of 4 hold padding or a mask inside the output" in told
    assert "1 of 4 that ended by themselves have no end token" in told


def test_a_server_that_tells_its_answers_ids_alone_is_used() -> None:
    assert proven(asked(prompt_ids=NULL)) == Proof()


def test_a_server_without_ids_is_told_of() -> None:
    assert proven(asked(output_ids=NULL, prompt_ids=NULL)) == Proof(warnings=(NO_IDS,))


def test_the_canarys_accept_length_is_told_and_one_that_is_useless_is_warned_of() -> None:
    assert first_words("EAGLE", 2.61) == ("EAGLE: accept length 2.61 in the canary", "info")
    assert first_words("EAGLE", 1.0)[1] == "warn"
    assert first_words("EAGLE", None) == ("EAGLE: no accept length is told yet", "info")
