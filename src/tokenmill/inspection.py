"""Is this dataset worth training on? Any .jsonl, .jsonl.zst or .parquet, ours or others', or a run folder; as a stream.

Rows hold `messages` (or `conversations`), or `input_ids` with `loss_mask`. What a completion shows is judged by the
same rules as in a run; thinking is taken to be on where a row has a thought or think tags, empty ones included.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tokenmill import dataset
from tokenmill.core import judge
from tokenmill.core.judge import CLOSE, OPEN, Reading, Rules, Verdict
from tokenmill.core.records import FAILURES, NULL, Completion, Record
from tokenmill.engines.base import as_ids, text_of_fields
from tokenmill.errors import UsageError
from tokenmill.prompts import UNREADABLE
from tokenmill.rows import files, rows

SHORT_MASK = 16
"""Supervised tokens below which a row teaches next to nothing: an empty thought, "OK." and the end token are 6."""

FAIL_SHARE, WARN_SHARE = 0.2, 0.05
"""Of rows with a fault: what [gate] allows of rejected and of failed ones by default."""

EXAMPLES = 3
EXAMPLE_CHARS = 300

BOUNDS = (0, 1, 8, 16, 64, 256, 1024, 2048, 4096, 8192, 1 << 30)


class Inspection(msgspec.Struct, frozen=True):
    """`supervised_tokens` holds p1, p50, p99 and a histogram {"0-0": rows, …}; null where no row tells."""

    rows: int
    labels: dict[str, int]
    supervised_tokens: dict[str, Any] | None
    verdict: Literal["pass", "warn", "fail"]
    reasons: list[str]
    examples: list[dict[str, str]]


@dataclass
class _Findings:
    rules: Rules
    rows: int = 0
    bad: int = 0
    labels: Counter[str] = field(default_factory=Counter)
    sums: "array[int]" = field(default_factory=lambda: array("I"))
    examples: list[dict[str, str]] = field(default_factory=list)
    shown: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, labels: tuple[str, ...], shown: str, supervised: int | None) -> None:
        self.rows += 1
        if supervised is not None:
            self.sums.append(supervised)
        self.labels.update(labels)
        bad = [label for label in labels if label in self.rules.reject or label in FAILURES]
        self.bad += bool(bad)
        if bad and self.shown[bad[0]] < EXAMPLES:
            self.shown[bad[0]] += 1
            self.examples.append({"id": name, "label": bad[0], "text": shown[:EXAMPLE_CHARS]})


def inspect(path: Path, rules: Rules | None = None) -> Inspection:
    """Reads all rows once. Raises UsageError where there is nothing to read or no row has a known form."""
    findings = _Findings(rules or Rules())
    if dataset.is_run(path):
        _inspect_records(dataset.records(path / "data"), findings)
    elif ours := _own_parts(path):
        _inspect_records((record for part in ours for record in dataset.part_records(part)), findings)
    else:
        for raw in rows(path, _Row.__struct_fields__):
            _inspect_row(raw.place, raw.data, findings)
    if not findings.rows:
        raise UsageError(f"{path} holds no row")
    return _conclude(findings)


def _own_parts(path: Path) -> list[Path]:
    """The files of a Parquet export or of a run's data folder: they hold records, which say more than messages."""
    found = [file for file in files(path) if file.suffix == ".parquet"]
    if not found:
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = {"key", "labels", "output_ids", "parts"}
    try:
        return [file for file in found if wanted <= set(pq.read_schema(file).names)]
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path} holds a damaged Parquet file: {error}") from error


def _inspect_records(records: Iterable[Record], findings: _Findings) -> None:
    """A run's ended records: accepted, rejected and failed."""
    for record in records:
        verdict, labels = judge.judged(record, findings.rules)
        if verdict is Verdict.FAILED:
            findings.add(record.key, labels, record.error, None)
        else:
            findings.add(record.key, labels, record.text, record.output_tokens)


class _Row(msgspec.Struct):
    id: Any = None
    messages: list[dict[str, Any]] | None = None
    conversations: list[dict[str, Any]] | None = None
    input_ids: msgspec.Raw = NULL
    loss_mask: msgspec.Raw = NULL
    finish_reason: str | None = None


_row = msgspec.json.Decoder(_Row)


def _inspect_row(place: str, data: bytes, findings: _Findings) -> None:
    try:
        row = _row.decode(data)
    except UNREADABLE as error:
        findings.add(place, ("bad_prompt",), f"not readable: {error}", None)
        return
    name = place if row.id is None else str(row.id)
    if row.input_ids != NULL and row.loss_mask != NULL:
        ids, (entries, supervised) = as_ids(row.input_ids), _mask(row.loss_mask)
        tokens = 0 if ids == NULL else bytes(ids).count(b",") + 1
        labels: tuple[str, ...] = ("empty",) if supervised == 0 else ("short_mask",) if supervised < SHORT_MASK else ()
        if tokens != entries:
            findings.add(name, ("bad_prompt",), f"{tokens} ids and {entries} mask entries", supervised)
        else:
            findings.add(name, labels, f"{supervised} supervised tokens of {tokens}", supervised)
        return
    turns = row.messages or row.conversations
    last = turns[-1] if turns else {}
    if last.get("role", last.get("from")) not in ("assistant", "gpt"):
        findings.add(name, ("bad_prompt",), "the last turn is no assistant's", None)
        return
    findings.add(name, *_judge_turn(last, row.finish_reason or "stop", findings.rules), None)


def _mask(raw: msgspec.Raw) -> tuple[int, int]:
    """A mask's entries and how many of them are on; no entries where it holds anything but 0 and 1, true and false.

    Counted in the bytes, since 8,000 entries take 0.3 ms as numbers.
    """
    data = bytes(as_ids(raw))
    if data == b"null":
        return 0, 0
    data = data.replace(b"true", b"1").replace(b"false", b"0")
    return (0, 0) if data.translate(None, b"[],01") else (data.count(b",") + 1, data.count(b"1"))


def _judge_turn(turn: dict[str, Any], finish: str, rules: Rules) -> tuple[tuple[str, ...], str]:
    content = turn.get("content", turn.get("value"))
    content = content if isinstance(content, str) else ""
    fields = [turn.get(name) for name in ("reasoning_content", "reasoning", "thinking") if name in turn]
    thought = next((value for value in fields if isinstance(value, str) and value), "")
    text = text_of_fields(thought, content, finish)
    thinking = bool(fields) or OPEN in text or CLOSE in text
    # Without a tokenizer a token is taken for four bytes: enough to tell an empty thought from a short one.
    completion = Completion(text, finish, output_tokens=len(text.encode("utf-8", "replace")) // 4)
    return judge.measure(completion, Reading(thinking, opened=None), rules).labels, text


def _conclude(found: _Findings) -> Inspection:
    share = found.bad / found.rows
    reasons = [
        f"{count:,} of {found.rows:,} rows ({count / found.rows:.1%}) are {label}"
        for label, count in found.labels.most_common()
        if label in found.rules.reject or label in FAILURES
    ]
    sums = np.array(found.sums, dtype=np.int64)
    if len(sums):
        value, count = Counter(sums.tolist()).most_common(1)[0]
        if value < SHORT_MASK and count > FAIL_SHARE * found.rows:
            reasons.insert(0, f"{count / found.rows:.0%} of the rows train exactly {value} tokens")
    verdict: Literal["pass", "warn", "fail"] = (
        "fail" if share > FAIL_SHARE else "warn" if share > WARN_SHARE else "pass"
    )
    return Inspection(found.rows, dict(found.labels.most_common()), _spread(sums), verdict, reasons, found.examples)


def _spread(sums: "np.ndarray[Any, np.dtype[np.int64]]") -> dict[str, Any] | None:
    if not len(sums):
        return None
    counts = np.histogram(sums, BOUNDS)[0].tolist()
    names = [f"{low}-{high - 1}" if high < BOUNDS[-1] else f"{low}-" for low, high in pairwise(BOUNDS)]
    p1, p50, p99 = (int(q) for q in np.percentile(sums, [1, 50, 99]))
    return {"p1": p1, "p50": p50, "p99": p99, "histogram": dict(zip(names, counts, strict=True))}


def shown(found: Inspection) -> Iterator[str]:
    """The verdict for a person: reasons, labels with their shares, examples."""
    yield f"{found.verdict.upper()}: {found.rows:,} rows"
    yield from (f"  {reason}" for reason in found.reasons)
    for label, count in found.labels.items():
        yield f"  {label:24}{count:>12,}  {count / found.rows:.1%}"
    if found.supervised_tokens:
        spread = found.supervised_tokens
        yield f"  supervised tokens        p1 {spread['p1']:,}  p50 {spread['p50']:,}  p99 {spread['p99']:,}"
    for example in found.examples:
        yield f"  {example['label']}  {example['id']}: {example['text']!r}"
