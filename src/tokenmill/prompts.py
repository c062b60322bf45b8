"""Prompt rows: their keys, and what is sent of them.

A prompt set is read for keys and digests (`scan`), for the first cohort and for the rest (these seek in plain files),
and never held. Memory: 21 bytes a row, 2 more where turns are counted, 24 for each 64 KB of plain files.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill import rows as files
from tokenmill.core.records import NULL
from tokenmill.core.turns import segments
from tokenmill.errors import BadPromptError
from tokenmill.rows import MAX_LINE, Marks, Mask, RawRow

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int32]
Counts = npt.NDArray[np.uint16]

_EMPTY, _NOTHING = msgspec.Raw(b""), msgspec.Raw(b"[]")


class _Row(msgspec.Struct, gc=False):
    """The fields that tell the forms of a row apart; everything else is skipped."""

    id: str | int | float | None = None
    custom_id: str | int | float | None = None
    uuid: str | int | float | None = None
    messages: msgspec.Raw = _EMPTY
    conversations: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    body: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY


class _Body(msgspec.Struct):
    messages: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY


class _Speaker(msgspec.Struct, gc=False):
    """Of a message, who says it."""

    role: str | None = None
    sender: str | None = msgspec.field(name="from", default=None)


COLUMNS = _Row.__struct_fields__
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What a row that is no JSON object raises; nested a thousand deep, it is none that anybody means."""

_row = msgspec.json.Decoder(_Row)
_loose = msgspec.json.Decoder(dict[str, msgspec.Raw])
_IDS = {"id", "custom_id", "uuid"}
_body = msgspec.json.Decoder(_Body)
_any = msgspec.json.Decoder()
_speakers = msgspec.json.Decoder(list[_Speaker])


def rows(path: Path, wanted: Mask | None = None, marks: Mapping[Path, Marks] | None = None) -> Iterator[RawRow]:
    """The rows of a prompt set as a stream: all, or those at which `wanted` is true."""
    return files.rows(path, COLUMNS, wanted, marks)


# -- keys --------------------------------------------------------------------------------------------------------------
class Identity(NamedTuple):
    """A row's own id (its content's hash where it has none) and the hash of its content."""

    key: str
    digest: str


def identity(data: bytes) -> Identity:
    """What a row is called and what it says. A row that is no JSON object is called by its bytes."""
    try:
        row = _read(data)
    except UNREADABLE:
        digest = xxhash.xxh3_64_hexdigest(data)
        return Identity(digest, digest)
    digest = xxhash.xxh3_64_hexdigest(_content(row))
    return Identity(_own_id(row) or digest, digest)


def _content(row: _Row) -> "msgspec.Raw | bytes":
    content = _given(row.messages, row.conversations, row.prompt, row.body)
    tools = _given(row.tools)
    return content if tools is _EMPTY else bytes(content) + b"\0" + bytes(tools)


def _given(*fields: msgspec.Raw) -> msgspec.Raw:
    """The first field that is there, not null and not an empty list."""
    for raw in fields:
        if raw is not _EMPTY and raw != NULL and raw != _NOTHING:
            return raw
    return _EMPTY


def _read(data: bytes) -> _Row:
    """A row; an id that is neither text nor number is none, and the row is called by its content."""
    try:
        return _row.decode(data)
    except msgspec.ValidationError:
        loose = _loose.decode(data)
        fields: dict[str, Any] = {name: loose[name] for name in COLUMNS if name in loose and name not in _IDS}
        return _Row(**fields)


def _own_id(row: _Row) -> str:
    for value in (row.id, row.custom_id, row.uuid):
        if value is not None and value != "":
            return str(value)
    return ""


@dataclass
class Index:
    """What is known of every row: hashes of its final key and of its content, and which repeat of its id it is.

    `ordinals` are 0 for a row whose id is its own, else 2, 3, …; `duplicates` tells of the first few, for a message.
    `turns` are the answers that each row asks for, None where one is asked of every row; `marks` are of plain files.
    """

    keys: Hashes
    digests: Hashes
    ordinals: Numbers
    duplicates: list[str] = field(default_factory=list)
    duplicate_count: int = 0
    turns: Counts | None = None
    marks: dict[Path, Marks] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, row: int, own: str) -> str:
        """A row's final key: the first row with an id has it, a later one gets id~2, id~3 …"""
        ordinal = int(self.ordinals[row])
        return f"{own}~{ordinal}" if ordinal else own

    def find(self, key: str) -> int | None:
        """The row of a final key; a look at all of them, 0.5 ms for a million."""
        found = np.flatnonzero(self.keys == np.uint64(key_hash(key)))
        return int(found[0]) if len(found) else None

    def repeats_content(self) -> npt.NDArray[np.bool_]:
        """True for rows whose content an earlier row has."""
        _, first = np.unique(self.digests, return_index=True)
        repeated = np.ones(len(self.digests), dtype=np.bool_)
        repeated[first] = False
        return repeated


_hash = xxhash.xxh3_64_intdigest


def key_hash(key: str) -> int:
    return int(_hash(key.encode("utf-8", "surrogatepass")))


SHOWN_DUPLICATES = 5


MOST_TURNS = 65_535
"""Answers asked of one row: what 16 bits count. No context holds as many."""


def scan(
    path: Path,
    limit: int = 0,
    progress: Callable[[int], None] = lambda count: None,
    *,
    every_turn: bool = False,
) -> Index:
    """Reads the whole set once for its keys, and with `every_turn` for the answers that each row asks for; `progress`
    is told the rows so far.

    902,087 rows of 1 KB take 2 to 3 s of processor time, and 8 s more where turns are counted.
    """
    keys, digests, counts = array("Q"), array("Q"), array("H")
    marks: dict[Path, Marks] = {}
    for block in files.marked(path, COLUMNS, marks, keys.__len__):
        for data in block:
            if data and not data.isspace():
                key, digest = _hashes(data)
                keys.append(key)
                digests.append(digest)
                if every_turn:
                    counts.append(min(count_turns(data), MOST_TURNS))
        progress(len(keys))
        if limit and len(keys) >= limit:
            break
    del keys[limit or len(keys) :], digests[limit or len(digests) :], counts[limit or len(counts) :]
    index = Index(np.array(keys), np.array(digests), np.zeros(len(keys), dtype=np.int32), marks=marks)
    index.turns = np.array(counts) if every_turn else None
    _number_repeats(index, path)
    return index


def _hashes(data: bytes) -> tuple[int, int]:
    """The hashes of a row's own key and of its content: `identity` without making strings of the usual case."""
    try:
        row = _read(data)
    except UNREADABLE:
        digest = _hash(data)
        return _hash(b"%016x" % digest), digest
    digest = _hash(_content(row))
    own = row.id
    if own.__class__ is str and own:
        return _hash(own.encode()), digest
    return key_hash(_own_id(row) or f"{digest:016x}"), digest


def _number_repeats(index: Index, path: Path) -> None:
    """Gives rows whose key an earlier row has their number: a later row always yields, so appending changes no key.

    Ids repeat rarely, so a second reading for their texts is cheap.
    """
    values, first = np.unique(index.keys, return_index=True)
    if len(values) == len(index):
        return
    own_hashes = index.keys.copy()
    is_first = np.zeros(len(index), dtype=np.bool_)
    is_first[first] = True
    made: set[int] = set()
    next_number: dict[int, int] = {}

    def is_taken(key: int, row: int) -> bool:
        place = int(np.searchsorted(values, np.uint64(key)))
        own = place < len(values) and int(values[place]) == key and int(first[place]) < row
        return own or key in made

    for raw in rows(path):
        if raw.row >= len(index):
            break
        own_hash = int(own_hashes[raw.row])
        if is_first[raw.row] and own_hash not in made:
            continue
        own = identity(raw.data)
        number = next_number.get(own_hash, 2)
        while is_taken(key := key_hash(f"{own.key}~{number}"), raw.row):
            number += 1
        next_number[own_hash] = number + 1
        made.add(key)
        index.ordinals[raw.row], index.keys[raw.row] = number, key
        index.duplicate_count += 1
        if len(index.duplicates) < SHOWN_DUPLICATES:
            what = "the content of an earlier row" if own.key == own.digest else f"id {own.key!r} is taken"
            index.duplicates.append(f"{raw.place}: {what}, so its key is {own.key}~{number}")


# -- messages ----------------------------------------------------------------------------------------------------------
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_KEPT = ("reasoning_content", "tool_calls", "tool_call_id", "name")


class Conversation(NamedTuple):
    """What is asked at each turn, as JSON lists: the messages that are new in front of each answer; and the tools."""

    turns: list[msgspec.Raw]
    tools: msgspec.Raw


def messages(data: bytes) -> tuple[msgspec.Raw, msgspec.Raw]:
    """What is sent of a row: its messages up to the last user or tool turn, and its tools. Raises BadPromptError."""
    normal, tools = _normal(data)
    while normal and normal[-1]["role"] not in ("user", "tool"):
        normal.pop()  # the answer that is to be written anew
    if not any(turn["role"] == "user" for turn in normal):
        raise BadPromptError("no user turn")
    if _asks_nothing(normal[-1]):
        raise BadPromptError("the last turn is empty")
    return msgspec.Raw(msgspec.json.encode(normal)), tools


def conversation(data: bytes) -> Conversation:
    """A row whose answers are all to be written anew (core/turns.py); raises BadPromptError where one cannot be."""
    normal, tools = _normal(data)
    found = segments([message["role"] for message in normal])
    if not found:
        raise BadPromptError("no user turn")
    for number, own in enumerate(found):
        if _asks_nothing(normal[own[-1]]):
            raise BadPromptError(f"what turn {number} is to answer is empty")
    asked = [msgspec.Raw(msgspec.json.encode([normal[place] for place in own])) for own in found]
    return Conversation(asked, tools)


def _asks_nothing(turn: dict[str, Any]) -> bool:
    """A user who says nothing. A tool that returns nothing has done so: many commands do."""
    return turn["role"] != "tool" and not (turn["content"] or "").strip()


def as_given(data: bytes) -> list[tuple[msgspec.Raw, msgspec.Raw]]:
    """What each turn would be asked with, and the tools, were the row's own answers the model's: about as long as what
    will be. Raises BadPromptError."""
    normal, tools = _normal(data)
    found = segments([message["role"] for message in normal])
    return [(msgspec.Raw(msgspec.json.encode(normal[: own[-1] + 1])), tools) for own in found]


def count_turns(data: bytes) -> int:
    """The answers that a row asks for, by its roles alone; 1 of a row that cannot be used: it has one record then."""
    try:
        roles = [speaker.role or speaker.sender or "" for speaker in _speakers.decode(_given_turns(data).content)]
    except (*UNREADABLE, BadPromptError):
        return 1
    return max(1, len(segments([_ROLES.get(role, role) for role in roles])))


class _Given(NamedTuple):
    """JSON: a row's turns, and its tools; `bare`: the turns may be a text, the user's only one."""

    content: msgspec.Raw
    tools: bytes
    bare: bool


def _given_turns(data: bytes) -> _Given:
    """Where a row's turns stand, whatever its form; raises UNREADABLE, and BadPromptError where there are none."""
    row = _read(data)
    content, tools = _given(row.messages, row.conversations), bytes(_given(row.tools)) or b"null"
    prompt = _given(row.prompt)
    if content is _EMPTY and prompt is _EMPTY and _given(row.body) is not _EMPTY:
        body = _body.decode(bytes(row.body))
        content, tools = _given(body.messages), bytes(_given(body.tools)) or b"null"
    if content is _EMPTY and prompt is _EMPTY:
        raise BadPromptError("none of the fields messages, conversations, prompt, body holds anything")
    return _Given(prompt, tools, True) if content is _EMPTY else _Given(content, tools, False)


def _normal(data: bytes) -> tuple[list[dict[str, Any]], msgspec.Raw]:
    """A row's messages as chat templates want them, and its tools; raises BadPromptError."""
    try:
        given = _given_turns(data)
        content = _any.decode(given.content)
        _any.decode(given.tools)
    except UNREADABLE as error:
        raise BadPromptError(_why_not_json(data, error)) from error
    if given.bare and not isinstance(content, list):
        content = [{"role": "user", "content": content}]
    tools = msgspec.Raw(given.tools) if given.tools != b"null" else NULL
    return [_message(turn) for turn in _list_of(content)], tools


def _list_of(turns: Any) -> list[Any]:
    if not isinstance(turns, list):
        raise BadPromptError(f"messages are no list but {type(turns).__name__}")
    return turns


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadPromptError(f"a turn is no object but {type(turn).__name__}")
    role = turn.get("role", turn.get("from"))
    role = _ROLES.get(role, role) if isinstance(role, str) else role
    if not isinstance(role, str) or role not in _KNOWN_ROLES:
        raise BadPromptError(f"a turn with the role {role!r}; known: {', '.join(sorted(_KNOWN_ROLES))}")
    content = _text(turn.get("content", turn.get("value")), may_lack=role == "assistant")
    if content is None and not turn.get("tool_calls"):
        content = ""  # an answer that was lost, as of a model that only thought: mostly the one to be written anew
    return {"role": role, "content": content, **{name: turn[name] for name in _KEPT if turn.get(name)}}


def _text(content: Any, *, may_lack: bool) -> str | None:
    if content is None and may_lack:
        return None
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if any(not isinstance(part, str) for part in parts):
            raise BadPromptError("a turn with content that is not text")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise BadPromptError(f"a turn whose content is no text but {type(content).__name__}")
    if "\0" in content:
        raise BadPromptError("a turn that holds a NUL character")
    return content


def _why_not_json(data: bytes, error: Exception) -> str:
    if len(data) >= MAX_LINE:
        return f"longer than {MAX_LINE >> 20} MiB"
    try:
        text = data.decode()
    except UnicodeDecodeError as bad:
        return f"not UTF-8: {bad.reason} at byte {bad.start}"
    if "\\ud" in text.lower():
        return "not valid text: half of a surrogate pair"
    return f"not a JSON object: {error}"
