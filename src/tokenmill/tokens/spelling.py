"""Do a completion's ids spell its text? Asked of some rows: it takes 2 to 3 ms of processor time for 7,500 tokens, five
times what all else costs a completion. (Counts, and ids that no output holds, are looked at in every row: judge.py.)

Who asks: an ids engine's tokenizer or that of the model's folder, on a thread that no exit waits for; llama.cpp's own
server, that has the vocabulary. Where nobody can tell, or not in time, nothing is said.
"""

from typing import Protocol

import msgspec
import xxhash

from tokenmill.client import Client
from tokenmill.core import agree
from tokenmill.core.agree import Agreement
from tokenmill.core.records import NULL, Completion, Parts, Prompt
from tokenmill.errors import PluginError, RequestError

ONE_IN = 50
"""Of the rows behind the first cohort, which are all looked at: a server that begins to mix answers up is found within
some hundred rows of its own, and 1,000 rows cost 0.05 s of processor time more."""


class Speller(Protocol):
    """Who knows the vocabulary. `specials` are its special tokens' texts."""

    specials: frozenset[str]

    async def spell(self, ids: msgspec.Raw, client: Client) -> str | None:
        """What ids spell, special tokens included; None where that is not known. Raises PluginError for ids that are
        none of the vocabulary's, RequestError where a server fails."""


def is_due(prompt: Prompt) -> bool:
    """Whether a row is one of those that are looked at: always the same ones, whoever gets them."""
    own = f"{prompt.key}\0{prompt.sample}\0{prompt.turn}".encode("utf-8", "surrogatepass")
    return prompt.cohort == 0 or xxhash.xxh32_intdigest(own) % ONE_IN == 0


async def agreement(completion: Completion, parts: Parts, speller: Speller, client: Client) -> Agreement | None:
    """How text and ids of a completion agree; None where that is not known."""
    if completion.output_ids == NULL:
        return None
    try:
        spelled = await speller.spell(completion.output_ids, client)
    except PluginError:
        return Agreement.OTHER
    except RequestError:
        return None
    if spelled is None:
        return None
    text = completion.text
    pieces = [piece for piece in (text[parts.a : parts.b], text[parts.c : parts.d]) if piece]
    return agree.compare(text, spelled, agree.pattern(speller.specials), pieces)
