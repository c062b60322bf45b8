"""Ids are the truth, end to end: what a canary proves of them, what holds a run to its template, what audits find."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import bytewise
from tests.chaos.conftest import Command, Here
from tests.conftest import write_prompts
from tests.exports import rows_of
from tests.harness import Case, scripted_server
from tokenmill import quickstart


def scripted(here: Here, **args: Any) -> Path:
    """A scripted fleet of one with a model folder whose tokens are its own."""
    model = bytewise.folder(here.case.folder / "model")
    here.case.settings = {
        "model": {"path": str(model), "name": "m"},
        "engine": {"args": {"slots": 4, **args}},
        "fleet": {"servers": 1},
    }
    return model


def test_right_ids_pass_and_an_audit_agrees_with_all_of_them(here: Here) -> None:
    scripted(here)
    code, said = here()
    assert code == 0, said
    assert "prompts: held to chat template " in said
    assert "do not spell" not in said
    code, said = here.command("audit", here.case.config)
    assert code == 0, said
    assert "ids and text: specials 40" in said
    assert "prompts rendered again: 40 of 40 give the same ids" in said
    assert "outputs tokenised again: 40 of 40 give the same ids" in said
    code, said = here.command("audit", here.case.run_path, "--json", "--sample", 10)
    found = json.loads(said)
    assert (code, found["rows"], found["output"], found["verdict"]) == (
        0,
        10,
        {"compared": 10, "exact": 10, "kinds": {}},
        "agree",
    )


def test_ids_of_another_text_are_not_used(here: Here) -> None:
    scripted(here, ids="another's")
    code, said = here()
    assert code == 4, said
    assert "the output ids of 4 of 4 canary completions do not spell their text" in said
    assert here.case.records() == []


def test_counts_that_are_off_and_missing_ids_are_told_at_the_start_and_in_the_report(here: Here) -> None:
    scripted(here, **{"no-ids": True})
    code, said = here()
    assert code == 0, said
    assert "it gives no token ids: rows are stored as text" in said
    report = json.loads((here.case.run_path / "report.json").read_text())
    assert any("it gives no token ids" in found["text"] for found in report["warnings"])
    assert {bytes(record.output_ids) for record in here.case.records()} == {b"null"}
    code, said = here.command("audit", here.case.run_path)
    assert (code, "40 have no token ids" in said) == (0, True)
    out = here.case.folder / "out"
    code, said = here.command("export", here.case.run_path, "specforge", out)
    assert (code, "--retokenise" in said) == (5, True)
    code, said = here.command("export", here.case.run_path, "specforge", out, "--retokenise")
    assert code == 0, said
    assert "Mismatch: not known" in said
    assert len(rows_of(out)) == 40


def test_a_count_that_is_off_is_told(here: Here) -> None:
    scripted(here, ids="uncounted")
    here.case.settings["gate"] = {"max_rejected": 1.0}
    _, said = here()
    assert "4 of 4 have other output ids than it counts" in said


def test_a_server_that_renders_otherwise_than_the_others_gets_no_prompt(here: Here) -> None:
    case = here.case
    addresses = [f"http://127.0.0.1:{case.port + number}" for number in range(2)]
    case.settings = {"model": {"name": "m"}}
    case.write(engine={"kind": "openai", "args": {}, "addresses": addresses}, generation={"concurrency": 2})
    with (
        scripted_server(case.port, model="m", latency_ms=300),
        scripted_server(case.port + 1, model="m", latency_ms=300, prompt_mark="You are a helpful assistant. "),
    ):
        code, said = here.command("run", case.config)
    assert code == 0, said
    assert "renders prompts otherwise than the run's first server" in said
    assert len({record.server for record in case.records()}) == 1


def test_a_run_is_not_continued_with_another_template_or_tokenizer(here: Here) -> None:
    model = scripted(here)
    assert here()[0] == 0
    write_prompts(here.case.folder / "prompts.jsonl", 10, start=40)
    (model / "chat_template.jinja").write_text(bytewise.PLAIN + "!")
    code, said = here()
    assert code == 2, said
    assert "chat template, sha256: was " in said
    assert "bring the old files back" in said
    bytewise.folder(model, merges=(("t", "h"),))
    code, said = here()
    assert code == 2, said
    assert "tokenizer, sha256: was " in said
    bytewise.folder(model)
    assert here()[0] == 0
    assert len(here.case.records()) == 50


def test_a_first_prompt_that_comes_back_otherwise_ends_the_run_before_a_prompt_is_sent(here: Here) -> None:
    """The same files, and a server that renders otherwise: only its ids tell."""
    scripted(here)
    assert here()[0] == 0
    write_prompts(here.case.folder / "prompts.jsonl", 10, start=40)
    here.case.settings["engine"]["args"]["prompt-mark"] = "You are a helpful assistant, and always were. "
    code, said = here()
    assert code == 2, said
    assert "the ids of the first prompt differ from number 0 on" in said
    assert len(here.case.records()) == 40


# -- llama.cpp ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    path.write_text("{% for m in messages %}" + turn + "{% endfor %}<|im_start|>assistant\n")
    return path


def test_a_real_server_is_held_to_its_own_template_and_its_ids_to_their_text(
    llama: Case, tokenmill: Command, template: Path, gguf: Path
) -> None:
    rows = [json.dumps({"id": f"p{number}", "prompt": f"Say {number}"}) for number in range(6)]
    (llama.folder / "prompts.jsonl").write_text("\n".join(rows[:4]) + "\n")
    own = llama.folder / "template.jinja"
    shutil.copy(template, own)
    args = {**llama.settings["engine"]["args"], "chat-template-file": str(own)}
    llama.write(
        fleet={"servers": 1},
        engine={"args": args},
        generation={"thinking": True, "max_tokens": 60, "extra": {"grammar": quickstart.GRAMMAR}},
        judge={"min_reasoning_tokens": 1},
    )
    code, said = tokenmill("run", llama.config)
    assert code == 0, said
    code, said = tokenmill("audit", llama.config)
    assert code == 0, said
    assert "the ids of all 4 rows spell their texts" in said
    assert "outputs tokenised again: 0 of 4 give the same ids (0.00%)" in said, (
        "a grammar makes it write <think> in parts"
    )
    assert "differ first in: BPE split" in said

    (llama.folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    own.write_text(template.read_text().replace("assistant\n", "assistant\nWell, "))
    code, said = tokenmill("run", llama.config)
    assert code == 2, said
    assert "chat template, sha256: was " in said
    assert "the first prompt, rendered again, differs from character " in said
    assert len(llama.records()) == 4
    assert llama.ended()
