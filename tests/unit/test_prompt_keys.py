"""Keys of prompt rows: unique, stable while the file grows, the same in a scan as row by row."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.make import jsonl
from tokenmill import prompts
from tokenmill.prompts import Index


def row(key: Any, prompt: str = "hi") -> bytes:
    return json.dumps({"id": key, "prompt": prompt}).encode()


def keys_of(index: Index, path: Path) -> list[str]:
    """The final key of every row, as the feed names them."""
    return [index.key(raw.row, prompts.identity(raw.data).key) for raw in islice(prompts.rows(path), len(index))]


def scanned(rows: Sequence[Any], **options: Any) -> tuple[Index, list[str]]:
    with TemporaryDirectory() as folder:
        path = jsonl(Path(folder) / "a.jsonl", rows)
        index = prompts.scan(path, **options)
        return index, keys_of(index, path)


@pytest.mark.parametrize(
    ("rows", "keys"),
    [
        ([row("a"), row("b")], ["a", "b"]),
        ([row("a"), row("a", "other"), row("a")], ["a", "a~2", "a~3"]),
        ([row("a~2"), row("a"), row("a")], ["a~2", "a", "a~3"]),
        ([row("a"), row("a~2"), row("a"), row("a~2")], ["a", "a~2", "a~3", "a~2~2"]),
        ([row(1), row("1"), row(1.5)], ["1", "1~2", "1.5"]),
        ([b'{"custom_id":"c","body":{}}', b'{"uuid":"u"}', b'{"id":"","uuid":"v"}'], ["c", "u", "v"]),
        ([b'{"id":"i","custom_id":"c","uuid":"u"}'], ["i"]),
    ],
)
def test_the_first_row_with_an_id_has_it_and_later_ones_a_number(rows: list[bytes], keys: list[str]) -> None:
    index, found = scanned(rows)
    assert found == keys
    assert index.duplicate_count == sum(key not in data.decode() for key, data in zip(keys, rows, strict=True))


def test_rows_without_an_id_are_called_by_their_content() -> None:
    _, (first, other, again, bad, bad_again) = scanned(
        [{"prompt": "hi"}, {"prompt": "ho"}, {"prompt": "hi", "id": None}, b"not json", b"not json"]
    )
    assert (again, bad_again) == (f"{first}~2", f"{bad}~2")
    assert len({first, other, bad}) == 3


def test_repeated_ids_are_told_with_their_lines_a_few_of_them() -> None:
    index, _ = scanned([row("a")] * 9)
    assert index.duplicate_count == 8
    assert index.duplicates[0] == "a.jsonl:2: id 'a' is taken, so its key is a~2"
    assert len(index.duplicates) == prompts.SHOWN_DUPLICATES


@pytest.mark.parametrize("limit", [1, 3, 5, 9])
def test_a_limit_cuts_the_set(limit: int) -> None:
    rows = [row("a"), b"", row("a"), row("b"), row("a"), row("c")]
    index, found = scanned(rows, limit=limit)
    assert found == ["a", "a~2", "b", "a~3", "c"][:limit]
    assert len(index) == min(limit, 5)


def test_rows_with_the_content_of_an_earlier_one_are_known() -> None:
    rows = [row("a", "x"), row("b", "y"), row("c", "x"), {"messages": "x", "id": 4}, row("e", "y"), {"prompt": "x"}]
    index, _ = scanned(rows)
    assert index.repeats_content().tolist() == [False, False, True, True, True, True]


def test_tools_are_part_of_the_content() -> None:
    plain, tooled = (prompts.identity(data) for data in (b'{"prompt":"a"}', b'{"prompt":"a","tools":[1]}'))
    assert plain.digest != tooled.digest


def test_a_scan_tells_how_far_it_is(tmp_path: Path) -> None:
    for name in ("a", "b"):
        jsonl(tmp_path / f"{name}.jsonl", [row(n) for n in range(3)])
    told: list[int] = []
    prompts.scan(tmp_path, progress=told.append)
    assert told[-1] == 6


# -- laws --------------------------------------------------------------------------------------------------------------
IDS = st.lists(st.sampled_from(["a", "b", "a~2", "a~3", "b~2", "a~2~2", "", 1, "1", 1.0, None, "模", "é"]), max_size=12)
FEW = settings(max_examples=60, deadline=None)


@FEW
@given(ids=IDS)
@example(ids=["a", "a", "a~2", "a~2", "a~2~2", "a"])
def test_keys_are_unique_for_any_ids(ids: list[Any]) -> None:
    index, keys = scanned([row(key) for key in ids])
    assert len(set(keys)) == len(set(index.keys.tolist())) == len(ids)
    assert [prompts.key_hash(key) for key in keys] == index.keys.tolist()


@FEW
@given(ids=IDS, more=IDS)
@example(ids=["a", "a"], more=["a~2"])
def test_appending_rows_never_changes_earlier_keys(ids: list[Any], more: list[Any]) -> None:
    before = scanned([row(key) for key in ids])[1]
    after = scanned([row(key) for key in [*ids, *more]])[1]
    assert after[: len(ids)] == before


ROWS = st.lists(
    st.one_of(
        st.binary(max_size=20).filter(lambda data: b"\n" not in data),
        st.fixed_dictionaries(
            {},
            optional={
                "id": st.one_of(
                    st.text(max_size=3), st.integers(), st.none(), st.booleans(), st.floats(allow_nan=False)
                ),
                "custom_id": st.text(max_size=3),
                "prompt": st.text(max_size=5),
                "messages": st.one_of(st.none(), st.lists(st.integers(), max_size=2)),
                "tools": st.none(),
            },
        ).map(lambda fields: json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    ),
    max_size=8,
)


@FEW
@given(rows=ROWS)
def test_a_scan_agrees_with_the_identity_of_every_row(rows: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        path = jsonl(Path(folder) / "a.jsonl", rows)
        index = prompts.scan(path)
        found = list(prompts.rows(path))
        assert len(index) == len(found)
        for raw in found:
            own = prompts.identity(raw.data)
            assert int(own.digest, 16) == int(index.digests[raw.row])
            assert prompts.key_hash(index.key(raw.row, own.key)) == int(index.keys[raw.row])
