"""How prompts become token ids: what decides it, and one rendered prompt as a proof. Pure.

A run is one way of rendering. Template and tokenizer are known by their hashes where their files or a server tell them;
where neither does, the ids of the first prompt are all that can be compared.
"""

import hashlib
from typing import NamedTuple

import msgspec

from tokenmill.core.records import NULL

HASH_CHARS = 16
"""Of a sha256 in a message: enough to tell two files apart, and to look one up."""

AROUND = 40
"""Characters shown in front of and behind the place where two rendered prompts part."""

CLOCK = "strftime_now"
"""In a template: it writes the date of today, so that a later day's prompt differs, and nothing is wrong."""

MOST_DATED = 8
"""Ids in which two prompts of one length may differ for it to be a date."""

_ids = msgspec.json.Decoder(list[int])


class Rendering(msgspec.Struct, frozen=True):
    """Texts are empty and `ids` null where they are not known. `messages` are those of the first prompt, as JSON,
    `prompt` that prompt as text and `ids` its token ids."""

    template: str = ""
    template_sha256: str = ""
    tokenizer_sha256: str = ""
    messages: str = ""
    prompt: str = ""
    ids: msgspec.Raw = NULL

    @property
    def told(self) -> str:
        """What is known, in a line; what is not known cannot be watched."""
        hashes = (("chat template", self.template_sha256), ("tokenizer", self.tokenizer_sha256))
        known = [f"{name} {value[:HASH_CHARS]}" for name, value in hashes if value]
        unknown = [name for name, value in hashes if not value]
        if self.ids != NULL or self.prompt:
            known.append("the first prompt")
        lacking = f"nobody tells {' and '.join(unknown)} here" if unknown else ""
        watched = f"held to {', '.join(known)}" if known else "a change of them would go unseen"
        return "prompts: " + "; ".join(filter(None, (lacking, watched)))


class Difference(NamedTuple):
    """`dated`: it is, as far as can be seen, another date in the prompt."""

    text: str
    dated: bool = False


def sha256_of(text: str) -> str:
    """Empty for an empty text: nothing is known of it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest() if text else ""


def differences(old: Rendering, new: Rendering) -> list[Difference]:
    """All in which two renderings differ; what one of them does not know is not compared."""
    found = [
        Difference(f"{name}, sha256: was {was[:HASH_CHARS]}, is {now[:HASH_CHARS]}")
        for name, was, now in (
            ("chat template", old.template_sha256, new.template_sha256),
            ("tokenizer", old.tokenizer_sha256, new.tokenizer_sha256),
        )
        if was and now and was != now
    ]
    if old.messages == new.messages and (prompt := _prompt(old, new)):
        found.append(prompt)
    return found


def _prompt(old: Rendering, new: Rendering) -> Difference | None:
    if old.prompt and new.prompt:
        if old.prompt == new.prompt:
            return None if NULL in (old.ids, new.ids) else _by_ids(old, new)
        at = _first(old.prompt, new.prompt)
        was, now = (text[max(0, at - AROUND) : at + AROUND] for text in (old.prompt, new.prompt))
        words = f"the first prompt, rendered again, differs from character {at} on: was {was!r}, is {now!r}"
        return Difference(words, dated=CLOCK in (new.template or old.template))
    return None if NULL in (old.ids, new.ids) else _by_ids(old, new)


def _by_ids(old: Rendering, new: Rendering) -> Difference | None:
    was, now = _ids.decode(old.ids), _ids.decode(new.ids)
    if was == now:
        return None
    at = _first(was, now)
    words = f"the ids of the first prompt differ from number {at} on: was {was[at : at + 8]}, is {now[at : at + 8]}"
    template = new.template or old.template
    alike = len(was) == len(now) and sum(one != other for one, other in zip(was, now, strict=True)) <= MOST_DATED
    return Difference(words, dated=alike and (CLOCK in template or not template) and not old.prompt)


def _first(one: "str | list[int]", other: "str | list[int]") -> int:
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)
