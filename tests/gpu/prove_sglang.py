"""SGLang on a GPU, proved end to end: python -m tests.gpu.prove_sglang OUT --model DIR --site DIR

Two real servers on one card, 2,000 prompts; tokenmill is killed (-9) and started again, then a server is killed (-9);
every id must be there once, with exact token ids. Then a stale server answers on our port, and a regex makes the model
think. Prints and keeps what it measured as JSON. Not a test of pytest's: that machine has no network and no pytest.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.gpu.prove import FLAGS, START_S, make_case, phases, prove, write_prompts
from tests.harness import Case, assert_whole
from tokenmill import dataset
from tokenmill.core.records import Record
from tokenmill.machine import modelfiles
from tokenmill.render import load_tokenizer

PROMPTS = 2000


def main_run(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """2,000 prompts over one SIGKILL of tokenmill and one of a server."""
    write_prompts(case.folder / "prompts.jsonl", PROMPTS)
    began = time.monotonic()
    first = case.start()
    case.until_done(300, first, START_S)
    first.kill()
    first.wait()
    stored, generating = case.done(), time.monotonic()
    pids = case.server_pids()
    second = case.start()
    case.until_done(stored + 300, second, START_S)
    adopted = time.monotonic() - generating
    victim = max(case.server_pids().items())
    os.kill(victim[1], signal.SIGKILL)
    code = case.wait(second, START_S)
    took = time.monotonic() - began
    assert code == 0, case.output()
    assert_whole(case, {f"p{n}" for n in range(PROMPTS)})
    records = case.records()
    return {
        "seconds": round(took, 1),
        "stored at the kill of tokenmill": stored,
        "seconds from restart to 300 more rows": round(adopted, 1),
        "same servers after the restart": "adopts pid" in case.output() and pids is not None,
        "killed server": victim[0],
        "exact": exactness(records, Path(args.model)),
        "tokens": sum(record.output_tokens for record in records),
        "phases": phases(case),
    }


def end_ids(model: Path) -> set[int]:
    """Tokens at which SGLang stops: also at the tokenizer's; transformers 5.6 converts a wrong one from GGUF."""
    return {*modelfiles.end_tokens(model), load_tokenizer(model).eos_token_id}


def render(prompts: Path, model: Path) -> list[list[int]]:
    """The prompts' token ids, in the file's order."""
    tokenizer = load_tokenizer(model)
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()]
    chats = [[{"role": "user", "content": text}] for text in texts]
    rendered = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered]


def exactness(records: list[Record], model: Path) -> dict[str, int]:
    """Ids against the model's own tokenizer, record by record; every figure but the first two must be 0."""
    tokenizer, ends = load_tokenizer(model), end_ids(model)
    wrong = dict.fromkeys(("prompt ids differ", "text differs", "count differs", "no end token after stop"), 0)
    stops = 0
    for record in records:
        messages = json.loads(bytes(record.messages))
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = json.loads(bytes(record.output_ids))
        wrong["prompt ids differ"] += tokenizer(text, add_special_tokens=False)["input_ids"] != json.loads(
            bytes(record.prompt_ids)
        )
        wrong["text differs"] += (
            tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) != record.text
        )
        wrong["count differs"] += len(ids) != record.output_tokens
        if record.finish_reason == "stop":
            stops += 1
            wrong["no end token after stop"] += ids[-1] not in ends
    return {"records": len(records), "finished with stop": stops, **wrong}


class Proxy:
    """A stale server on our port: forwards it to another server, so that a right-looking /model_info answers there."""

    def __init__(self, port: int, target: int) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self._target = target
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server:
            client.settimeout(5)
            server.settimeout(5)
            try:
                server.sendall(client.recv(65536))
                while data := server.recv(65536):
                    client.sendall(data)
            except OSError:
                pass

    def close(self) -> None:
        self._socket.close()


def stale_server(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`up` leaves a server; another run's port answers with it while its own is still loading: it must be refused."""
    old = make_case(folder / "old", args, args.port, fleet={"servers": 1})
    write_prompts(old.folder / "prompts.jsonl", 4)
    assert old.wait(old.command("up", str(old.config)), START_S) == 0, old.output()
    new = make_case(folder / "new", args, args.port + 100, fleet={"servers": 1})
    write_prompts(new.folder / "prompts.jsonl", 40)
    process = new.start()
    while not new.server_pids():
        time.sleep(0.05)
    proxy = Proxy(args.port + 100, args.port)
    code = new.wait(process, START_S)
    proxy.close()
    told = [line for line in new.output().splitlines() if "is taken" in line]
    assert code == 0, new.output()
    assert told, new.output()
    assert_whole(new, {f"p{n}" for n in range(40)})
    old.wait(old.command("down", str(old.run_path)), 120)
    return {"told": told[0], "up said": old.output().splitlines()[-3:], "events": phases(new)}


def thinking(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A regex makes the small model write a think block: judged and stored as a thought."""
    regex = r"<think>\n[^<]{40,160}\n</think>\n\n[^<]{40,160}"
    case = make_case(
        folder,
        args,
        args.port + 200,
        fleet={"servers": 1},
        engine={"args": {**FLAGS, "grammar-backend": "llguidance"}},  # with xgrammar, an assertion ends it
        generation={"thinking": True, "extra": {"regex": regex}},
        judge={"min_reasoning_tokens": 4},
    )
    write_prompts(case.folder / "prompts.jsonl", 100)
    code = case.run(timeout_s=START_S)
    assert code == 0, case.output()
    records = list(dataset.records(case.run_path / "data"))
    return {
        "records": len(records),
        "with a thought": sum(bool(record.reasoning) for record in records),
        "labels": sorted({label for record in records for label in record.labels}),
        "exact": exactness(records, Path(args.model)),
        "one of them": records[0].text,
    }


if __name__ == "__main__":
    sys.exit(
        prove(
            {
                "main": lambda folder, args: main_run(make_case(folder, args, args.port, fleet={"servers": 2}), args),
                "stale": stale_server,
                "thinking": thinking,
            }
        )
    )
