"""C13: an engine that says it is dead is left alone; its prompts go to the others at once, uncharged."""

from tests.harness import Case, answered_prompts, assert_whole


def test_prompts_of_a_dead_engine_go_elsewhere(case: Case) -> None:
    log = case.folder / "requests.jsonl"
    # Each life of a server answers its canary of 4 and 12 prompts more, then says that its engine is dead.
    args = {"slots": 4, "error-after": 16, "then-close": True, "requests": str(log), "latency-ms": 20}
    case.write(engine={"args": args})
    assert case.run() == 0
    assert_whole(case, {f"p{n}" for n in range(40)})
    assert all(record.attempt == 1 for record in case.records())
    assert "engine is dead" in case.output()
    assert max(answered_prompts(log).values()) <= 4
