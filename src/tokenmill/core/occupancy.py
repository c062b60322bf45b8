"""What a server's slots do, in seconds of that server: levels that change, and the areas under them. Pure.

Each second is shared out among the slots: at the server, with tokenmill, waiting for the store, empty for want of a
prompt, or of no use since the server is in doubt. What is shared out adds up to the time that passed, always.
"""

import msgspec

from tokenmill.core.peak import Peak, Stretches


class Work(msgspec.Struct, frozen=True):
    """Seconds of a server: `served` its slots worked, `client` is tokenmill's own time between answer and next request,
    `store` waiting for room there, `idle` empty for want of a prompt, `away` not serving or in doubt, `failed` spent
    on requests that brought no answer. `late`, out of `served`: answers lay there unread, tokenmill's loop was late.

    `slots` are slot-seconds of `served`; `answers` of `tokens` took `spent` slot-seconds; `context` is that of each,
    times its seconds.
    """

    served: float = 0.0
    client: float = 0.0
    store: float = 0.0
    idle: float = 0.0
    away: float = 0.0
    failed: float = 0.0
    late: float = 0.0
    slots: float = 0.0
    answers: int = 0
    tokens: int = 0
    spent: float = 0.0
    context: float = 0.0

    def plus(self, other: "Work", times: int = 1) -> "Work":
        """Both together; with `times` = -1, this without the other."""
        names = self.__struct_fields__
        return Work(*(getattr(self, name) + times * getattr(other, name) for name in names))

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.served + self.client + self.store + self.idle + self.away + self.failed


class Slots:
    """Those of one life of a server, from `now` on. Levels are set by `until`, then `asked`, `served`, `stored`
    and `refused` (empty until the server takes more) change.

    Nothing counts any more once it is closed: what ends later was cut.
    """

    def __init__(self, now: float, stretch_s: float, peak: Peak | None = None) -> None:
        self.asked = self.served = self.stored = self.refused = 0
        self.stretches = Stretches(stretch_s, now, peak) if stretch_s else None
        self._began = self._last = now
        self._asked_at = 0.0
        self._at = self._client = self._store = self._idle = self._away = self._failed = self._late = self._slots = 0.0
        self._answers = self._tokens = self._noted = 0
        self._spent = self._context = 0.0
        self._lateness = 0.0
        self._capacity = 1
        self._closed = False

    def until(self, now: float, capacity: int, held: bool) -> None:
        """Shares out the time since the last call; `held`: the server is in doubt and gets nothing."""
        passed, self._last = now - self._last, now
        if self._closed or not capacity or passed <= 0:
            return
        share = passed / max(capacity, self.asked)
        self._at += self.served * share
        self._slots += self.served * passed
        self._store += self.stored * share
        self._client += (self.asked - self.served - self.stored) * share
        empty = max(capacity - self.asked, 0)
        refused = empty if held else min(self.refused, empty)
        self._away += refused * share
        self._idle += (empty - refused) * share
        if capacity != self._capacity and self.stretches is not None:
            self.stretches.restart(now, self._at, self._late)
        self._capacity = capacity

    def begins(self, now: float) -> None:
        """A request goes to the server; `until` was called."""
        self.served += 1
        self._asked_at += now

    def ends(self, now: float, asked: float, *, lost: bool) -> None:
        """A request that began at `asked` is over; `lost`: without an answer."""
        self.served -= 1
        self._asked_at -= asked
        if lost and not self._closed:
            self._lose(now - asked)

    def answer(self, now: float, asked: float, tokens: int, context: float) -> None:
        """It brought one, of `tokens`."""
        if self._closed:
            return
        self._answers += 1
        self._tokens += tokens
        self._spent += now - asked
        self._context += context * (now - asked)
        if self.stretches is not None:
            self.stretches.note(now, asked, tokens, context)
            self.stretches.look(now, self._capacity, self._at, self._late)

    def look(self, lateness: float, usual: float) -> None:
        """At every look of tokenmill's, which come each `usual` seconds: this one came late by `lateness`.

        Answers wait for tokenmill's loop as long as its looks do. A longer pause is seen by the looks before the
        answers are: those come in the next one.
        """
        came, self._noted = self._answers - self._noted, self._answers
        mean = self._spent / self._answers if self._answers else 0.0
        pause = waited(self._lateness, mean) if self._lateness >= usual else lateness if lateness < usual else 0.0
        self._late = min(self._late + came * pause / self._capacity, self._at)
        self._lateness = lateness

    def close(self) -> None:
        """The server is gone; what is in flight is lost with it. `until` was called."""
        if not self._closed:
            self._lose(self.served * self._last - self._asked_at)
            self._closed = True

    def _lose(self, seconds: float) -> None:
        lost = min(seconds / self._capacity, self._at)
        self._at -= lost
        self._failed += lost
        self._slots -= seconds

    @property
    def work(self) -> Work:
        """All of it until the last call of `until`."""
        areas = (self._at, self._client, self._store, self._idle, self._away, self._failed, self._late, self._slots)
        return Work(*areas, self._answers, self._tokens, self._spent, self._context)


def waited(pause: float, mean: float) -> float:
    """How long an answer that came within a pause lay unread, on average: answers take `mean` seconds, all slots were
    full when the pause began, and none is asked for again before it ends."""
    return pause / 2 if pause < mean else pause - mean / 2
