"""Prompt rows: reading them as a stream, their keys, and what is sent of them.

A prompt set is one file or a folder of files: .jsonl, .jsonl.zst, .parquet. It is read three times and never held: for
keys and digests (`scan`), for the first cohort, for the rest. Row numbers count rows over all files, from 0; blank
lines are no rows. Memory: 21 bytes a row.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from tokenmill.core.records import NULL
from tokenmill.errors import BadPromptError, UsageError

MAX_LINE = 64 << 20
"""Bytes of one row. No model reads so much; without a limit a file without a newline would fill the memory."""

_BLOCK = 1 << 16
"""Bytes read at once: larger buffers are mapped and unmapped at every turn, which takes longer than the reading."""

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int32]

_EMPTY = msgspec.Raw(b"")


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


class RawReader(Protocol):
    """A file, or what unpacks one."""

    def read(self, size: int, /) -> bytes | None: ...


class _Body(msgspec.Struct):
    messages: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY


class RawRow(NamedTuple):
    """One row as it stands: its place for messages, its bytes."""

    row: int
    place: str
    data: bytes


_row = msgspec.json.Decoder(_Row)
_body = msgspec.json.Decoder(_Body)
_any = msgspec.json.Decoder()


def files(path: Path) -> list[Path]:
    """The files of a prompt set, in reading order; raises UsageError where there are none."""
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file() and _reader(p) is not None)
        if not found:
            raise UsageError(f"prompts.path = {path} holds no .jsonl, .jsonl.zst or .parquet file")
        return found
    if not path.is_file():
        raise UsageError(f"prompts.path = {path}: no such file or folder")
    if _reader(path) is None:
        raise UsageError(
            f"prompts.path = {path}: not a .jsonl, .jsonl.zst or .parquet file", fix="one JSON object a line"
        )
    return [path]


def rows(path: Path) -> Iterator[RawRow]:
    """All rows in order, as a stream."""
    number = 0
    for file in files(path):
        for first, block in _blocks(file):
            for line, data in enumerate(block, first):
                if data and not data.isspace():
                    yield RawRow(number, f"{file.name}:{line}", data)
                    number += 1


Block = tuple[int, list[bytes]]
"""The number of the first line (or record), and the lines: a generator step a line would cost as much as its JSON."""

Reader = Callable[[Path], Iterator[Block]]


def _blocks(file: Path) -> Iterator[Block]:
    reader = _reader(file)
    assert reader is not None
    return reader(file)


def _reader(path: Path) -> Reader | None:
    if path.name.endswith(".jsonl"):
        return _read_jsonl
    if path.name.endswith((".jsonl.zst", ".jsonl.zstd")):
        return _read_zst
    return _read_parquet if path.suffix == ".parquet" else None


def _read_jsonl(path: Path) -> Iterator[Block]:
    with path.open("rb", buffering=0) as stream:
        yield from _lines(stream)


def _read_zst(path: Path) -> Iterator[Block]:
    with path.open("rb") as packed:
        yield from _lines(zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True))


def _lines(stream: RawReader) -> Iterator[Block]:
    number, rest, skipping = 1, b"", False
    first = True
    while block := stream.read(_BLOCK):
        if first:
            block, first = block.removeprefix(b"\xef\xbb\xbf"), False
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        if skipping and lines:
            lines[0], skipping = b"", False
        if lines:
            yield number, lines
            number += len(lines)
        if len(rest) > MAX_LINE:
            if not skipping:
                yield number, [rest]
            rest, skipping = b"", True
    if rest and not skipping:
        yield number, [rest]


def _read_parquet(path: Path) -> Iterator[Block]:
    import pyarrow.parquet as pq

    number = 1
    known = set(_Row.__struct_fields__)
    with pq.ParquetFile(path) as table:
        columns = [name for name in table.schema_arrow.names if name in known]
        for batch in table.iter_batches(batch_size=1024, columns=columns):
            records = batch.to_pylist()
            yield number, [msgspec.json.encode({k: v for k, v in r.items() if v is not None}) for r in records]
            number += len(records)


# -- keys --------------------------------------------------------------------------------------------------------------
class Identity(NamedTuple):
    """A row's own id (its content's hash where it has none) and the hash of its content."""

    key: str
    digest: str


def identity(data: bytes) -> Identity:
    """What a row is called and what it says. A row that is no JSON object is called by its bytes."""
    try:
        row = _row.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        digest = xxhash.xxh3_64_hexdigest(data)
        return Identity(digest, digest)
    digest = xxhash.xxh3_64_hexdigest(_content(row))
    return Identity(_own_id(row) or digest, digest)


def _content(row: _Row) -> "msgspec.Raw | bytes":
    if row.messages is not _EMPTY:
        content = row.messages
    elif row.conversations is not _EMPTY:
        content = row.conversations
    else:
        content = row.body if row.prompt is _EMPTY else row.prompt
    return content if row.tools is _EMPTY else bytes(content) + b"\0" + bytes(row.tools)


def _own_id(row: _Row) -> str:
    for value in (row.id, row.custom_id, row.uuid):
        if value is not None and value != "":
            return str(value)
    return ""


@dataclass
class Index:
    """What is known of every row: hashes of its final key and of its content, and which repeat of its id it is.

    `ordinals` are 0 for a row whose id is its own, else 2, 3, …; `duplicates` tells of the first few, for a message.
    """

    keys: Hashes
    digests: Hashes
    ordinals: Numbers
    duplicates: list[str] = field(default_factory=list)
    duplicate_count: int = 0

    def __len__(self) -> int:
        return len(self.keys)

    def key(self, row: int, own: str) -> str:
        """A row's final key: the first row with an id has it, a later one gets id~2, id~3 …"""
        ordinal = int(self.ordinals[row])
        return f"{own}~{ordinal}" if ordinal else own

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


def scan(path: Path, limit: int = 0, progress: Callable[[int], None] = lambda count: None) -> Index:
    """Reads the whole set once for its keys; `progress` is told the rows so far.

    902,087 rows of 1 KB take 2 to 3 s of processor time.
    """
    keys, digests = array("Q"), array("Q")
    for file in files(path):
        for _, block in _blocks(file):
            for data in block:
                if data and not data.isspace():
                    key, digest = _hashes(data)
                    keys.append(key)
                    digests.append(digest)
            progress(len(keys))
            if limit and len(keys) >= limit:
                break
    del keys[limit or len(keys) :], digests[limit or len(digests) :]
    index = Index(np.array(keys), np.array(digests), np.zeros(len(keys), dtype=np.int32))
    _number_repeats(index, path)
    return index


def _hashes(data: bytes) -> tuple[int, int]:
    """The hashes of a row's own key and of its content: `identity` without making strings of the usual case."""
    try:
        row = _row.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        digest = _hash(data)
        return _hash(b"%016x" % digest), digest
    digest = _hash(_content(row))
    own = row.id
    if own.__class__ is str and own:
        return _hash(own.encode()), digest
    return key_hash(_own_id(row) or f"{digest:016x}"), digest


def _number_repeats(index: Index, path: Path) -> None:
    """Gives later rows of one id their number. Ids repeat rarely, so a second reading for their texts is cheap.

    A number already taken (a row whose own id is "a~2") is passed over; the later row always yields.
    """
    _, first, counts = np.unique(index.keys, return_index=True, return_counts=True)
    repeated_hashes = set(index.keys[first[counts > 1]].tolist())
    if not repeated_hashes:
        return
    original = index.keys.copy()
    taken = set(original[first].tolist())
    firsts = set(first.tolist())
    next_number: dict[int, int] = {}
    for raw in rows(path):
        if raw.row >= len(index):
            break
        own_hash = int(original[raw.row])
        if own_hash not in repeated_hashes or raw.row in firsts:
            continue
        own = identity(raw.data)
        number = next_number.get(own_hash, 2)
        while key_hash(f"{own.key}~{number}") in taken:
            number += 1
        next_number[own_hash] = number + 1
        index.ordinals[raw.row] = number
        index.keys[raw.row] = key_hash(f"{own.key}~{number}")
        taken.add(int(index.keys[raw.row]))
        index.duplicate_count += 1
        if len(index.duplicates) < SHOWN_DUPLICATES:
            index.duplicates.append(f"{raw.place}: id {own.key!r} is taken, so it is {own.key}~{number}")


# -- messages ----------------------------------------------------------------------------------------------------------
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
_KEPT = ("reasoning_content", "tool_calls", "tool_call_id", "name")


def messages(data: bytes) -> tuple[msgspec.Raw, msgspec.Raw]:
    """What is sent of a row: its messages up to the last user or tool turn, and its tools. Raises BadPromptError."""
    try:
        row = _row.decode(data)
        tools = bytes(row.tools) or b"null"
        content = row.messages if row.messages is not _EMPTY else row.conversations
        if content is _EMPTY and row.body is not _EMPTY:
            body = _body.decode(bytes(row.body))
            content, tools = body.messages, bytes(body.tools) or b"null"
        turns = _prompt(bytes(row.prompt)) if content is _EMPTY else _any.decode(bytes(content))
        _any.decode(tools)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadPromptError(_why_not_json(data, error)) from error
    normal = [_message(turn) for turn in _list_of(turns)]
    while normal and normal[-1]["role"] == "assistant":
        normal.pop()  # the answer that is to be written anew
    if not any(turn["role"] == "user" for turn in normal):
        raise BadPromptError("no user turn")
    if not (normal[-1]["content"] or "").strip():
        raise BadPromptError("the last turn is empty")
    return msgspec.Raw(msgspec.json.encode(normal)), msgspec.Raw(tools) if tools != b"null" else NULL


def _prompt(raw: bytes) -> list[dict[str, str]]:
    if not raw:
        raise BadPromptError("none of the fields messages, conversations, prompt, body")
    return [{"role": "user", "content": _any.decode(raw)}]


def _list_of(turns: Any) -> list[Any]:
    if not isinstance(turns, list):
        raise BadPromptError(f"messages are no list but {type(turns).__name__}")
    return turns


def _message(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadPromptError(f"a turn is no object but {type(turn).__name__}")
    role = turn.get("role", turn.get("from"))
    role = _ROLES.get(str(role), role)
    if role not in _KNOWN_ROLES:
        raise BadPromptError(f"a turn with the role {role!r}; known: {', '.join(sorted(_KNOWN_ROLES))}")
    content = _text(turn.get("content", turn.get("value")), may_lack=bool(turn.get("tool_calls")))
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
