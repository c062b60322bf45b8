"""Conversations whose answers are all written anew, one after the other: where an answer is due, and what each is asked
with. Pure.

A turn is one answer to write. What a row gives as answers is left out, and the model's own stand in their place; a tool
call that tool results follow is history and stays as given, since a call written anew would not match its results.
"""

from collections.abc import Sequence

import msgspec

from tokenmill.core import judge
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.records import Record


def segments(roles: Sequence[str]) -> list[list[int]]:
    """For each turn, which of the messages with these roles are new in front of its answer.

    An answer is due where the row gives one, and behind each user's message and the last tool result that nobody
    answers. Before the first user's message nothing is due: what an assistant says there stays.
    """
    found: list[list[int]] = []
    own: list[int] = []
    asked = due = False
    for place, role in enumerate(roles):
        if role == "assistant" and roles[place + 1 : place + 2] != ["tool"]:
            if due:
                found.append(own)
                own, due = [], False
            elif not found:
                own.append(place)
            continue  # a second answer in a row is none that anybody asked for
        if role == "user" and due:
            found.append(own)
            own = []
        own.append(place)
        asked = asked or role == "user"
        due = due or (asked and role in ("user", "tool"))
    while due and roles[own[-1]] not in ("user", "tool"):
        own.pop()  # what stands behind the last question is nothing to answer
    return [*found, own] if due else found


def answer(record: Record) -> dict[str, str]:
    """The assistant's message that was generated, its thought in `reasoning_content`, where chat templates look."""
    said = {"role": "assistant", "content": record.answer}
    return {**said, "reasoning_content": record.reasoning} if record.reasoning else said


def following(record: Record, new: msgspec.Raw) -> msgspec.Raw:
    """What the next turn is asked with: what this one was, its answer, and the new messages (JSON lists)."""
    said = msgspec.json.encode(answer(record))
    return msgspec.Raw(b"%b,%b,%b" % (bytes(record.messages)[:-1], said, bytes(new)[1:]))


def goes_on(verdict: Verdict, finish_reason: str) -> bool:
    """Whether a conversation can go on after a turn: one that was rejected or cut off is no history to build on."""
    return verdict is Verdict.ACCEPTED and finish_reason == "stop"


def why_broken_off(record: Record, rules: Rules) -> str:
    """Why the turns after this one cannot be written; empty where they can."""
    verdict, labels = judge.judged(record, rules)
    if goes_on(verdict, record.finish_reason):
        return ""
    what = {Verdict.ACCEPTED: "was cut off", Verdict.REJECTED: "was rejected", Verdict.FAILED: "has failed"}[verdict]
    return f"turn {record.turn} of this conversation {what}: {', '.join(labels)}"
