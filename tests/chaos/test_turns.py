"""Conversations, every turn on the model's own history: killed at random moments, every id is there once, and what each
turn was asked with holds the stored answers of the turns before it."""

import json
import os
import random
import signal
import urllib.request
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.chaos.conftest import SLOTS
from tests.exports import rows_of
from tests.harness import Case, requests
from tokenmill.core import judge, turns
from tokenmill.core.judge import Rules, Verdict
from tokenmill.core.records import Record
from tokenmill.export import export

CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "It is 5."}
KEEPS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def write_conversations(path: Path, rng: random.Random, count: int) -> dict[str, int]:
    """Conversations of one to five turns, with and without answers, some with tools; returns the turns of each key."""
    asked: dict[str, int] = {}
    with path.open("w") as out:
        for number in range(count):
            messages: list[dict[str, Any]] = [{"role": "system", "content": "Be short."}] if rng.random() < 0.3 else []
            tools = rng.random() < 0.3
            asked[f"c{number}"] = rng.randint(1, 5)
            for turn in range(asked[f"c{number}"]):
                messages.append({"role": "user", "content": f"Question {turn} of {number}"})
                messages += [CALL, RESULT] if tools and rng.random() < 0.5 else []
                if rng.random() < 0.7:
                    messages.append({"role": "assistant", "content": "An old answer", "reasoning_content": "old"})
            row = {"id": f"c{number}", "messages": messages, **({"tools": TOOLS} if tools else {})}
            out.write(json.dumps(row) + "\n")
    return asked


def assert_conversations(records: list[Record], asked: dict[str, int], rules: Rules, samples: int = 1) -> None:
    """Every id once, in order; each turn's messages are those of the turn before, its answer, and what the row says."""
    wanted = [(key, sample, turn) for key, count in asked.items() for sample in range(samples) for turn in range(count)]
    assert [(record.key, record.sample, record.turn) for record in records] == wanted
    by_conversation: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in records:
        by_conversation[record.key, record.sample].append(record)
    for own in by_conversation.values():
        for before, record in pairwise(own):
            verdict, _ = judge.judged(before, rules)
            if verdict is not Verdict.ACCEPTED or before.finish_reason != "stop":
                assert record.labels == ("broken_off",)
                assert f"turn {min(turn.turn for turn in own if turn.labels)} of this" in record.error
                continue
            history, sent = (msgspec.json.decode(one.messages) for one in (before, record))
            assert sent[: len(history) + 1] == [*history, turns.answer(before)]
            new = sent[len(history) + 1 :]
            assert new[0] == {"role": "user", "content": f"Question {record.turn} of {record.key[1:]}"}
            assert new[1:] in ([], [CALL, RESULT])


def test_killed_in_mid_conversation_every_turn_is_there_once_on_the_answers_stored(case: Case) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    asked = write_conversations(case.folder / "prompts.jsonl", rng, 40)
    log, total = case.folder / "requests.jsonl", 2 * sum(asked.values())
    args = {"slots": 3, "latency-ms": 60, "sigma": 1.0, "bad": 0.1, "requests": str(log)}
    case.write(
        engine={"args": args},
        generation={"turns": "all", "samples": 2},
        gate={"max_rejected": 1.0},
        output={"segment": "64KiB"},
    )
    for share in sorted(rng.uniform(0.05, 0.8) for _ in range(2)):
        process = case.start()
        case.until_done(int(share * total), process)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert case.run() == 0, case.output()
    records = case.records()
    assert_conversations(records, asked, Rules(), samples=2)
    broken_off = [record for record in records if record.labels == ("broken_off",)]
    assert broken_off, "the script has bad answers"
    assert {record.cohort for record in broken_off} == {-1}
    begun = sum("begin" in entry and entry["prompt"].startswith(("Question", "It is")) for entry in requests(log))
    assert begun <= total - len(broken_off) + 2 * 2 * 3, f"seed {seed}: more was asked again than was in flight"
    report = json.loads((case.run_path / "report.json").read_text())
    assert f"of {total} completions" in report["verdict"], report["verdict"]
    status = case.run_folder.status()
    assert status is not None
    assert (status.prompts.total, status.prompts.pending) == (total, 0)


@pytest.mark.timeout(180)
def test_a_real_model_is_sent_its_own_words(llama: Case) -> None:
    """On llama.cpp, with a template that keeps thoughts: the ids of every prompt are those of the history as the server
    renders it, the thoughts of earlier turns in it, and exports hold what was sent."""
    asked = write_conversations(llama.folder / "prompts.jsonl", random.Random(16), 5)
    grammar = 'root ::= "<think>" [a-z]{6,12} " " [a-z]{3,6} "</think>" [A-Z] [a-z]{3,12} "."'
    args = {**llama.settings["engine"]["args"], "chat-template": KEEPS_THOUGHTS}
    llama.write(
        generation={"turns": "all", "thinking": True, "max_tokens": 60, "extra": {"grammar": grammar}},
        judge={"min_reasoning_tokens": 1},
        engine={"args": {**args, "ctx-size": 1024 * SLOTS}},
        fleet={"servers": 1, "keep_servers": "always"},
    )
    assert llama.run(timeout_s=150) == 0, llama.output()
    records, rules = llama.records(), Rules(min_reasoning_tokens=1)
    assert any(b"tool_calls" in bytes(record.messages) for record in records)
    assert {record.labels for record in records} == {()}
    assert all(record.reasoning for record in records)
    assert_conversations(records, asked, rules)
    port = llama.run_folder.state().servers[0].port
    for record in records:
        body = {"messages": record.messages, "chat_template_kwargs": {"enable_thinking": True}}
        offered = {} if bytes(record.tools) == b"null" else {"tools": record.tools}
        text = ask(port, "/apply-template", {**body, **offered})["prompt"]
        ids = ask(port, "/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
        assert msgspec.json.decode(record.prompt_ids) == ids
        for turn in msgspec.json.decode(record.messages):
            if turn.get("reasoning_content"):
                assert f"<think>{turn['reasoning_content']}</think>{turn['content']}<|im_end|>" in text
    for form, field in (("messages", "messages"), ("specforge-chat", "conversations")):
        out = llama.folder / form
        assert export(llama.run_folder, form, out, rules, samples=1, turns="all") == len(records)
        rows = rows_of(out)
        assert [row["id"] for row in rows] == [f"{one.key}#0.{one.turn}" for one in records]
        for row, record in zip(rows, records, strict=True):
            sent = msgspec.json.decode(record.messages)
            assert [(turn["role"], turn["content"]) for turn in row[field][:-1]] == [
                (turn["role"], turn["content"]) for turn in sent
            ]
            assert row[field][-1]["content"] == record.answer


def ask(port: int, path: str, body: dict[str, Any]) -> Any:
    """One request to a server, by nobody's code but the standard library's."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", msgspec.json.encode(body), headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


@pytest.mark.timeout(180)
def test_a_retry_makes_the_bad_turns_again_and_the_conversations_go_on(case: Case) -> None:
    """A turn is asked once more with the history that it had; what it had broken off is written then, no more."""
    rng = random.Random(5)
    asked = write_conversations(case.folder / "prompts.jsonl", rng, 30)
    case.write(
        engine={"args": {"slots": 4, "quick-canary": True, "empty-reasoning": 0.25}},
        generation={"turns": "all"},
        gate={"max_rejected": 1.0},
    )
    assert case.run() == 0, case.output()
    before = {(record.key, record.turn): record for record in case.records()}
    bad = {place for place, record in before.items() if "empty_reasoning" in record.labels}
    broken_off = {place for place, record in before.items() if record.labels == ("broken_off",)}
    assert len(bad) > 3
    assert broken_off
    case.write(
        engine={"args": {"slots": 4, "quick-canary": True}}, generation={"turns": "all"}, gate={"max_rejected": 1.0}
    )
    assert case.run("--retry", "empty_reasoning", "--set", "generation.max_tokens=800") == 0, case.output()
    records = case.records()
    assert_conversations(records, asked, Rules())
    assert [record.key for record in records if record.labels] == []
    made = {(record.key, record.turn) for record in records if record.started > before[record.key, record.turn].started}
    assert made == bad | broken_off
