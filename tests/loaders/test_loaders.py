"""What trainers' own loaders make of our exports (tests/loaders/setup.sh): pytest -m loaders, or `make loaders`.

Records are made by TRL's copies of Qwen's chat templates and a real BPE tokenizer, as an engine would have made them:
prompt ids by the template, output ids by the model, which writes an end token or is cut off. A loader that tokenizes
text again must come to the same ids and the same mask.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.exports import raw, rows_of, stored
from tests.unit.make import record
from tokenmill import vocabmap
from tokenmill.core import judge
from tokenmill.core.judge import Reading, Rules
from tokenmill.core.records import Completion, Parts, Record
from tokenmill.export import chosen, export
from tokenmill.folder import RunFolder
from tokenmill.render import load_tokenizer

ENV = Path(__file__).parent / "env"
MODEL = ENV / "model"
DEADLINE_S = 20.0
"""For the other process to end, once its input has."""

pytestmark = [pytest.mark.loaders, pytest.mark.timeout(600)]

Row = tuple[list[int], list[int]]
"""Ids and mask."""

ALL = 1 << 20
"""A maximum length that cuts nothing."""


@dataclass(frozen=True)
class Mode:
    """A template of TRL's, the thinking switch, and SpecForge's name of the header that the answer follows."""

    template: str
    thinking: bool
    header: str


MODES = [
    Mode("qwen3", True, "qwen3-thinking"),
    Mode("qwen3", False, "qwen3-instruct"),
    Mode("qwen3_5_think", True, "qwen3.5"),
    Mode("qwen3_5_think", False, "qwen3-instruct"),
    Mode("qwen3_6", True, "qwen3.5"),
    Mode("qwen3_6", False, "qwen3-instruct"),
]
every_mode = pytest.mark.parametrize("mode", MODES, ids=lambda mode: f"{mode.template}-{mode.thinking}")

SYSTEM = {"role": "system", "content": "You are a careful assistant."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}

PROMPTS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "How many legs have seven spiders? 🕷"}],
    "two": [
        {"role": "user", "content": "Wie heißt die Hauptstadt von Frankreich?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And how many people live there?"},
    ],
    "tools": [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
    ],
}
THOUGHT = "The user asks for a number, so I count: first one, then the other,\n\nand check it → 模型."
ANSWER = "There are **56** of them.\n\n```python\nprint(7 * 8)\n```\n\n- done"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    assert (MODEL / "tokenizer.json").exists(), f"first: tests/loaders/setup.sh {ENV}"
    return load_tokenizer(MODEL)


def template(name: str) -> Path:
    (found,) = ENV.glob(f"v/lib/python3.*/site-packages/trl/chat_templates/{name}.jinja")
    return found


def ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def made(tokenizer: Any, mode: Mode, name: str, place: int, cut: str = "") -> Record:
    """A record of a prompt; `cut` says where the output was cut off: in the thought, in the answer, or nowhere."""
    messages, tools = [SYSTEM, *PROMPTS[name]], TOOLS if name == "tools" else None
    prompt = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=template(mode.template).read_text(encoding="utf-8"),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=mode.thinking,
    )
    opened = prompt.rstrip().endswith("<think>")
    thought = f"{THOUGHT} {place}."
    text = f"{'' if opened else '<think>' + chr(10)}{thought}\n</think>\n\n{ANSWER}" if mode.thinking else ANSWER
    text = {"": text, "thought": text[:90], "answer": text[:-12]}[cut]
    output = ids(tokenizer, text) + ([] if cut else [tokenizer.eos_token_id])
    finish = "length" if cut else "stop"
    reading = Reading(mode.thinking, opened, frozenset({str(tokenizer.eos_token_id).encode()}))
    completion = Completion(text, finish, output_ids=raw(*output), output_tokens=len(output))
    measured = judge.measure(completion, reading, Rules())
    return record(
        f"{name} {place}/{cut or 'whole'}",
        place,
        messages=msgspec.Raw(msgspec.json.encode(messages)),
        tools=msgspec.Raw(msgspec.json.encode(tools)),
        prompt_ids=raw(*ids(tokenizer, prompt)),
        output_ids=completion.output_ids,
        text=text,
        parts=measured.parts,
        finish_reason=finish,
        prompt_tokens=len(ids(tokenizer, prompt)),
        output_tokens=len(output),
        reasoning_tokens=measured.reasoning_tokens,
        thinking=mode.thinking,
        labels=measured.labels,
    )


def records(tokenizer: Any, mode: Mode) -> list[Record]:
    """One turn and two, tools, whole ones and cut ones."""
    found = [made(tokenizer, mode, name, place) for place, name in enumerate([*PROMPTS] * 3)]
    cuts = ["thought", "answer"] if mode.thinking else ["answer"]
    return found + [made(tokenizer, mode, "one", 10 + place, cut) for place, cut in enumerate(cuts)]


def by_hand(own: Record) -> Row:
    """Prompt and output as recorded; zeros for the first, ones for the second."""
    prompt, output = (msgspec.json.decode(bytes(part)) for part in (own.prompt_ids, own.output_ids))
    return prompt + output, [0] * len(prompt) + [1] * len(output)


Peer = Callable[..., Any]
"""peer(NAME, …): what the environment's code answers."""


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    folder = tmp_path_factory.mktemp("peer")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    with (folder / "stderr").open("w+") as told:
        command = [str(ENV / "v/bin/python"), "-W", "ignore", str(Path(__file__).parent / "peer.py")]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=told, text=True, env=env
        )
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(do: str, **words: Any) -> Any:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps({"do": do, **words}, default=str), file=process.stdin, flush=True)
            line = process.stdout.readline()
            told.seek(0)
            answer = json.loads(line) if line else {"error": "it ended"}
            assert "error" not in answer, told.read()[-3000:] + answer["error"]
            return answer["answer"]

        yield ask
        process.stdin.close()
        process.stdout.close()
        process.wait(DEADLINE_S)


def pairs(found: Any) -> list[Row]:
    return sorted((ids, mask) for ids, mask in found)


def exported(tmp_path: Path, run: RunFolder, form: str, **choice: Any) -> Path:
    out = tmp_path / f"{form}-{len(list(tmp_path.iterdir()))}"
    export(run, form, out, Rules(), samples=1, choice=chosen(**choice))
    return out


# -- token ids ---------------------------------------------------------------------------------------------------------
@every_mode
def test_specforge_takes_our_ids_as_they_are(peer: Peer, tokenizer: Any, tmp_path: Path, mode: Mode) -> None:
    own = records(tokenizer, mode)
    out = exported(tmp_path, stored(tmp_path, own), "specforge")
    (file,) = (out / "train").iterdir()
    assert peer("specforge", file=file, length=ALL) == [list(by_hand(each)) for each in own]


def test_specforge_and_speculators_cut_as_we_do(peer: Peer, tokenizer: Any, tmp_path: Path) -> None:
    own = records(tokenizer, MODES[4])
    run = stored(tmp_path, own)
    length = len(by_hand(own[0])[0]) - 5
    for form in ("specforge", "speculators"):
        whole, cut = exported(tmp_path, run, form), exported(tmp_path, run, form, max_length=length)
        ours = [(row["input_ids"], row["loss_mask"]) for row in rows_of(cut)]
        assert any(len(row[0]) == length for row in ours)
        assert len(ours) < len(own), "the long prompt leaves no room"
        if form == "specforge":
            found = [peer("specforge", file=next((out / "train").iterdir()), length=length) for out in (whole, cut)]
        else:
            found = [
                peer("speculators", folder=out / "train", length=length, model=MODEL, out=tmp_path / f"p-{out.name}")
                for out in (whole, cut)
            ]
        assert pairs(found[1]) == pairs(ours), "none is dropped, none is cut again"
        enough = [(row, mask) for row, mask in found[0] if sum(mask) >= 8]
        assert pairs(enough) == pairs(ours), "and of whole rows it would have made the same"


@every_mode
def test_speculators_takes_our_ids_as_they_are(peer: Peer, tokenizer: Any, tmp_path: Path, mode: Mode) -> None:
    own = records(tokenizer, mode)
    out = exported(tmp_path, stored(tmp_path, own), "speculators", validation=0.3)
    held = [row["id"] for row in rows_of(out / "validation")]
    found = peer("speculators", folder=out / "train", length=ALL, model=MODEL, out=tmp_path / "prepared")
    assert pairs(found) == pairs(by_hand(each) for each in own if each.key not in held)
    assert len(found) + len(held) == len(own)


def test_the_vocabulary_maps_are_the_trainers_own(peer: Peer, tokenizer: Any, tmp_path: Path) -> None:
    own = records(tokenizer, MODES[4])
    run, whole = stored(tmp_path, own), len(tokenizer)
    counts = vocabmap.count(iter(own), Rules(), whole)
    seen = np.sort(counts[counts > 0])[::-1]
    untied = int(np.flatnonzero(seen[:-1] != seen[1:])[-1]) + 1
    for size in (untied, 500):  # SpecForge cuts ties in the order of their coming; and more than were seen
        vocabmap.write(run, tmp_path / f"map{size}", Rules(), size=size, vocabulary=whole)
        ours = [np.load(tmp_path / f"map{size}" / f"{name}-{size}.npy").astype(int).tolist() for name in ("d2t", "t2d")]
        found = peer("vocabulary", rows=[by_hand(each) for each in own], size=size, whole=whole)
        assert found["speculators"] == ours
        assert found["specforge"] == ours


# -- conversations -----------------------------------------------------------------------------------------------------
def closed(tokenizer: Any, own: Record) -> Row:
    """With the newline that templates write behind the end token: readers supervise it, though no model writes it."""
    row, mask = by_hand(own)
    return row + ids(tokenizer, "\n"), [*mask, 1]


def finished(own: list[Record]) -> list[Record]:
    return [each for each in own if each.finish_reason == "stop"]


@every_mode
def test_specforge_renders_our_talks_to_the_same_ids(peer: Peer, tokenizer: Any, tmp_path: Path, mode: Mode) -> None:
    own = records(tokenizer, mode)
    out = exported(tmp_path, stored(tmp_path, own), "specforge-chat")
    (file,) = (out / "train").iterdir()
    words = {"model": MODEL, "template": template(mode.template), "header": mode.header}
    found = peer("specforge", file=file, length=ALL, **words)
    assert pairs(found) == pairs(closed(tokenizer, each) for each in finished(own))


@pytest.mark.parametrize("mode", MODES[::2], ids=lambda mode: mode.template)
def test_speculators_renders_our_talks_to_the_same_ids(peer: Peer, tokenizer: Any, tmp_path: Path, mode: Mode) -> None:
    """A row for each assistant's turn with something in front of it: those of the history are its own doing. It renders
    as if thinking were on, whatever a row is like: what was made without goes to it as ids."""
    own = records(tokenizer, mode)
    out = exported(tmp_path, stored(tmp_path, own), "specforge-chat")
    words = {"model": MODEL, "template": template(mode.template), "out": tmp_path / "prepared"}
    found = [(row, mask) for row, mask in peer("speculators", folder=out / "train", length=ALL, **words)]
    wanted = [closed(tokenizer, each) for each in finished(own)]
    assert all(row in found for row in wanted)


@every_mode
def test_trl_renders_our_messages_to_the_same_ids(peer: Peer, tokenizer: Any, tmp_path: Path, mode: Mode) -> None:
    """By the boundary the mask is ours. TRL's training templates keep the scaffold of a thought in history, too, and
    supervise all that follows the header: what the prompt held already (`<think>`, an empty block) is in their mask."""
    own = records(tokenizer, mode)
    out = exported(tmp_path, stored(tmp_path, own), "messages")
    training = template(f"{mode.template}_training")
    found = peer("trl", folder=out, model=MODEL, template=template(mode.template), training=training)
    assert [row["id"] for row in found] == [each.key for each in own]
    header = ids(tokenizer, "<|im_start|>assistant\n")
    for row, each in zip(found, own, strict=True):
        if row["finish_reason"] != "stop":
            continue  # a template would invent its end; the column says so
        prompt = msgspec.json.decode(bytes(each.prompt_ids))
        whole, mask = closed(tokenizer, each)
        assert row["boundary"][0] == whole
        assert row["boundary"][1][len(prompt) :] == mask[len(prompt) :]
        if each.key.startswith("one"):
            start = max(at for at in range(len(prompt)) if prompt[at : at + len(header)] == header) + len(header)
            marked, marks = row["marked"]
            assert marked == whole
            assert marks == [0] * start + [1] * (len(whole) - start - 1) + [marks[-1]]


def test_an_export_of_the_same_name_is_not_read_as_the_one_before(peer: Peer, tokenizer: Any, tmp_path: Path) -> None:
    """`datasets` caches by the folder's name and the card's text alone."""
    for number, own in enumerate((records(tokenizer, MODES[4]), records(tokenizer, MODES[5]))):
        run = stored(tmp_path / str(number), own)
        export(run, "messages", tmp_path / str(number) / "out", Rules(), samples=1)
        (rows,) = peer("loaded", folder=tmp_path / str(number) / "out").values()
        assert [plain(row["messages"]) for row in rows] == [
            row["messages"] for row in rows_of(tmp_path / str(number) / "out")
        ]


# -- datasets ----------------------------------------------------------------------------------------------------------
def plain(value: Any) -> Any:
    """Without what `datasets` adds to unlike objects: None for a field that only others have."""
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items() if inner is not None}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("form", ["specforge", "specforge-chat", "speculators", "messages", "openai-batch"])
def test_datasets_reads_every_split_as_it_was_written(peer: Peer, tokenizer: Any, tmp_path: Path, form: str) -> None:
    own = records(tokenizer, MODES[4])
    out = exported(tmp_path, stored(tmp_path, own), form, validation=0.3)
    found = peer("loaded", folder=out)
    written = [row for row in rows_of(out) if "custom_id" not in row or row["error"] is None]
    assert set(found) == {"train", "validation"}
    rows = [row for split in found.values() for row in split]
    name = "custom_id" if form == "openai-batch" else "id"
    assert {row[name]: plain(row) for row in rows} == {row[name]: plain(row) for row in written}
    assert len(rows) == len(written) == len(own if form != "specforge-chat" else finished(own))


def test_datasets_reads_our_parquet(peer: Peer, tokenizer: Any, tmp_path: Path) -> None:
    own = records(tokenizer, MODES[4])
    out = exported(tmp_path, stored(tmp_path, own), "parquet", validation=0.3)
    found = peer("loaded", folder=out)
    rows = {row["key"]: (row["prompt_ids"], row["output_ids"]) for split in found.values() for row in split}
    assert rows == {
        each.key: tuple(msgspec.json.decode(bytes(part)) for part in (each.prompt_ids, each.output_ids)) for each in own
    }


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("form", ["messages", "specforge-chat"])
def test_datasets_reads_tools_that_come_late(
    peer: Peer, tokenizer: Any, tmp_path: Path, form: str, thinking: bool
) -> None:
    """It takes a file's form from its first 10 MB."""
    long = [{"role": "user", "content": "x" * 20_000}]
    early = [
        record(
            f"p{n}",
            n,
            messages=msgspec.Raw(msgspec.json.encode(long)),
            thinking=thinking,
            **({} if thinking else {"text": "Hi", "parts": Parts(0, 0, 0, 2), "reasoning_tokens": 0}),
        )
        for n in range(700)
    ]
    late = made(tokenizer, Mode("qwen3_6", thinking, ""), "tools", 900)
    out = exported(tmp_path, stored(tmp_path, [*early, late]), form)
    (rows,) = peer("loaded", folder=out).values()
    assert len(rows) == 701
    assert json.loads(rows[-1]["tools"]) == TOOLS
