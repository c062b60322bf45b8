"""C29: the limit of open files is raised as far as it may be; below that, concurrency is lowered and nothing fails."""

import pytest

from tests.conftest import write_prompts
from tests.harness import Case, answered_prompts, assert_whole, most_at_once

PROMPTS = 160


def _run(case: Case, soft: int, hard: int, servers: int) -> int:
    """A run under these limits that wants 200 requests in flight; returns how many there were at once."""
    write_prompts(case.folder / "prompts.jsonl", PROMPTS - 40, start=40)
    log = case.folder / "requests.jsonl"
    case.write(
        engine={"args": {"slots": 200, "latency-ms": 300, "tokens": 10, "requests": str(log)}},
        fleet={"servers": servers},
        generation={"concurrency": 200},
    )
    limits = f'ulimit -S -n {soft} && ulimit -H -n {hard} && exec "$@"'
    assert case.wait(case.start(under=["sh", "-c", limits, "sh"])) == 0, case.output()
    assert_whole(case, {f"p{n}" for n in range(PROMPTS)})
    assert {record.labels for record in case.records()} == {()}
    assert {record.attempt for record in case.records()} == {1}
    assert set(answered_prompts(log).values()) == {1}, "sent in vain"
    assert case.output().count(": started as pid") == servers
    return most_at_once(log)


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.long), 3])
def test_with_too_few_open_files_fewer_requests_are_in_flight_and_all_succeed(case: Case, servers: int) -> None:
    assert 12 <= _run(case, 64, 64, servers) < 64
    assert case.output().count("only 64 files may be open") == 1


def test_a_low_soft_limit_is_raised_without_a_word(case: Case) -> None:
    assert _run(case, 64, 4096, servers=1) > 100
    assert "files may be open" not in case.output()
