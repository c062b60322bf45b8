"""SGLang on a GPU, proved end to end: python -m tests.gpu.prove_sglang OUT --model DIR --site DIR

Two real servers on one card, 2,000 prompts; tokenmill is killed (-9) and started again, then a server is killed (-9);
every id must be there once, with exact token ids. Then a stale server answers on our port, and a regex makes the model
think. Prints and keeps what it measured as JSON. Not a test of pytest's: that machine has no network and no pytest.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.harness import Case, assert_whole
from tokenmill import dataset, events
from tokenmill.core.records import Record
from tokenmill.machine import modelfiles
from tokenmill.render import load_tokenizer

PROMPTS = 2000
START_S = 300.0

FLAGS = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "mem-fraction-static": 0.3,
    "context-length": 4096,
    "cuda-graph-max-bs": 64,
}

TOPICS = [
    "tides",
    "bread",
    "glaciers",
    "bridges",
    "violins",
    "maps",
    "bees",
    "harbours",
    "clocks",
    "salt",
    "kites",
    "comets",
    "wells",
    "letters",
    "looms",
]
ASKS = (
    "Explain in a short paragraph how {} work.",
    "Write three sentences about {}.",
    "What do most people get wrong about {}?",
    "Give two facts and one question about {}.",
)


def write_prompts(path: Path, count: int) -> None:
    with path.open("w") as out:
        for n in range(count):
            text = ASKS[n % len(ASKS)].format(TOPICS[n % len(TOPICS)]) + f" Number {n}."
            out.write(json.dumps({"id": f"p{n}", "prompt": text}) + "\n")


def make_case(folder: Path, args: argparse.Namespace, port: int, **overrides: Any) -> Case:
    folder.mkdir(parents=True)
    case = Case(folder, port)
    case.settings = {
        "model": {"path": args.model, "name": "smollm2"},
        "engine": {"kind": "sglang", "args": FLAGS, "env": {"PYTHONPATH": args.site, "HF_HUB_OFFLINE": "1"}},
        "fleet": {"gpus": "none" if args.no_gpu else [0], "stagger": "first", "start_timeout": "5m", "backoff": "1s"},
        "generation": {"max_tokens": 200, "thinking": False},
        "gate": {"cohort": 100, "max_truncated": 1.0},
    }
    case.write(**overrides)
    return case


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


def exactness(records: list[Record], model: Path) -> dict[str, int]:
    """Ids against the model's own tokenizer, record by record; every figure but the first two must be 0."""
    tokenizer = load_tokenizer(model)
    # SGLang stops at the tokenizer's end token, too; transformers 5.6 converts a wrong one from GGUF.
    ends = {*modelfiles.end_tokens(model), tokenizer.eos_token_id}
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


def phases(case: Case) -> list[str]:
    return [
        f"{event.t:.1f} {event.server} {event.kind} {event.text}"
        for event, _ in events.read(case.run_folder.events)
        if event.kind in ("state", "launch", "ready", "adopt", "server", "canary", "leftover")
    ]


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
    old = make_case(folder / "old", args, 31400, fleet={"servers": 1})
    write_prompts(old.folder / "prompts.jsonl", 4)
    assert old.wait(old.command("up", str(old.config)), START_S) == 0, old.output()
    new = make_case(folder / "new", args, 31500, fleet={"servers": 1})
    write_prompts(new.folder / "prompts.jsonl", 40)
    process = new.start()
    while not new.server_pids():
        time.sleep(0.05)
    proxy = Proxy(31500, 31400)
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
        31600,
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--site", required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/prove"))
    parser.add_argument("--no-gpu", action="store_true", help="a rehearsal with a stand-in for the engine")
    parser.add_argument("--only", default="main,stale,thinking")
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    results: dict[str, Any] = {}
    steps = {
        "main": lambda: main_run(make_case(args.work / "main", args, 31200), args),
        "stale": lambda: stale_server(args.work / "stale", args),
        "thinking": lambda: thinking(args.work / "thinking", args),
    }
    for name in args.only.split(","):
        began = time.monotonic()
        try:
            results[name] = steps[name]()
        except AssertionError as error:
            results[name] = {"FAILED": str(error)[-3000:]}
        results[name]["took"] = round(time.monotonic() - began, 1)
        print(name, json.dumps(results[name], indent=1), flush=True)
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
    for log in args.work.rglob("server-*.log"):
        shutil.copy(log, args.out / f"{log.parent.parent.parent.parent.name}-{log.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
