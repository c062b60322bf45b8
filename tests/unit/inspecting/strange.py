"""Rows as nobody should write them, for tests that nothing is a crash."""

from hypothesis import strategies as st

ANSWER = {"role": "assistant", "content": "Yes."}

LEAVES = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8)
ANYTHING = st.recursive(
    LEAVES, lambda more: st.lists(more, max_size=3) | st.dictionaries(st.text(max_size=4), more, max_size=3)
)
IDS = st.lists(st.integers(0, 9), max_size=6)
TURN = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "gpt"]) | LEAVES,
        "from": st.sampled_from(["human", "gpt"]) | LEAVES,
        "content": st.sampled_from(["", "<think>", "</think>", "a</think>b"]) | ANYTHING,
        "value": ANYTHING,
        "reasoning_content": ANYTHING,
        "tool_calls": ANYTHING,
    },
)
TURNS = st.lists(TURN, max_size=3) | ANYTHING
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "id": ANYTHING,
        "custom_id": st.text(max_size=2) | ANYTHING,
        "input_ids": IDS | ANYTHING,
        "loss_mask": st.lists(st.integers(0, 1), max_size=6) | ANYTHING,
        "labels": st.lists(st.sampled_from([-100, 3]), max_size=6) | ANYTHING,
        "messages": TURNS,
        "conversations": TURNS,
        "prompt": TURNS | st.text(max_size=3),
        "completion": TURNS | st.text(max_size=3),
        "response": st.fixed_dictionaries({"body": st.fixed_dictionaries({"choices": ANYTHING, "usage": ANYTHING})})
        | ANYTHING,
        "finish_reason": st.sampled_from(["stop", "length"]) | ANYTHING,
        "metadata": ANYTHING,
        "tools": ANYTHING,
        "text": ANYTHING,
    },
)
