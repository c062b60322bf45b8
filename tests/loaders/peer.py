"""What the trainers' own loading code makes of a file: run by the environment of setup.sh. Of each line of
JSON on stdin, {"do": NAME, …}, the answer goes as a line to stdout: imports take half a minute, so it lives long.

Rows are [input_ids, loss_mask], in the loader's order.
"""

import contextlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

Rows = list[list[list[int]]]


def specforge(file: str, length: int, model: str = "", header: str = "", template: str = "") -> Rows:
    """SpecForge 0.2's prompts for online training; `header` is its own name of a template, for conversations."""
    from specforge.data.loss_mask import has_consecutive_supervised_tokens
    from specforge.data.prompt_builder import prepare_prompt_tasks

    tasks = prepare_prompt_tasks(
        file,
        tokenizer(model, template) if model else None,
        chat_template=header or None,
        max_length=length,
        is_preformatted=False,
        train_only_last_turn=True,
        cache_dir=None,
        cache_key=None,
        num_proc=None,
        min_loss_tokens=2,
        loss_mask_filter=None if header else has_consecutive_supervised_tokens,
    )
    rows = [[task["payload"]["input_ids"], task["payload"]["loss_mask"]] for task in tasks]
    assert all(has_consecutive_supervised_tokens(mask) for _, mask in rows)
    return rows


def speculators(folder: str, length: int, model: str, out: str, template: str = "") -> Rows:
    """`speculators prepare-data`; with `template` its rows of conversations, which it has rendered by a vLLM server:
    here by the model's tokenizer, as that server does."""
    from datasets import load_from_disk
    from speculators.cli.prepare_data import prepare_data
    from speculators.data_generation import preprocessing

    words: dict[str, Any] = {"model": model, "data": [folder], "output": out, "seq_length": length}
    if template:
        own = tokenizer(model, template)

        def rendered(endpoint: str, messages: Any, *, add_generation_prompt: bool, tools: Any, **cut: Any) -> list[int]:
            text = own.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            ids: list[int] = own(text, add_special_tokens=False)["input_ids"]
            return ids[: cut["truncate_prompt_tokens"]]

        preprocessing.render_conversation = rendered
        words["render_endpoint"] = "none"
    prepare_data(**words, num_preprocessing_workers=1)
    found = load_from_disk(out)
    return [[row["input_ids"].tolist(), row["loss_mask"].tolist()] for row in found]


def trl(folder: str, model: str, template: str, training: str) -> list[dict[str, Any]]:
    """TRL's two ways to a mask (trainer/sft_trainer.py, tokenize_fn): by the boundary of prompt and completion, and by
    the marks of its own training template."""
    from datasets import load_dataset
    from trl.data_utils import is_conversational

    own = tokenizer(model, template)
    found = []
    for row in load_dataset(folder, split="train"):
        assert is_conversational(row)
        tools = json.loads(row["tools"]) or None
        prompt = ids_of(own, row["messages"][:-1], tools, add_generation_prompt=True)
        whole = ids_of(own, row["messages"], tools)
        marked = own.apply_chat_template(
            row["messages"],
            tools=tools,
            chat_template=Path(training).read_text(encoding="utf-8"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        same = next((n for n, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        found.append(
            {
                "id": row["id"],
                "finish_reason": row["finish_reason"],
                "boundary": [whole, [0] * same + [1] * (len(whole) - same)],
                "marked": [marked["input_ids"], marked["assistant_masks"]],
            }
        )
    return found


def loaded(folder: str) -> dict[str, list[Any]]:
    """`datasets.load_dataset`: its splits."""
    from datasets import load_dataset

    return {split: list(rows) for split, rows in load_dataset(folder).items()}


def vocabulary(rows: Rows, size: int, whole: int) -> dict[str, list[list[int]]]:
    """The draft vocabularies that both trainers would choose by these rows: d2t and t2d."""
    from collections import Counter

    import torch
    from specforge.data.preprocessing import process_token_dict_to_mappings
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    counts = Counter(token for ids, mask in rows for token, on in zip(ids, mask, strict=True) if on)
    made = {
        "specforge": process_token_dict_to_mappings(Counter(counts), size, whole),
        "speculators": build_vocab_mappings_from_distribution(counts, size, whole),
    }
    return {name: [pair[0].tolist(), pair[1].to(torch.int).tolist()] for name, pair in made.items()}


def tokenizer(model: str, template: str) -> Any:
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(model)
    made.chat_template = Path(template).read_text(encoding="utf-8")
    return made


def ids_of(own: Any, messages: Any, tools: Any, *, add_generation_prompt: bool = False) -> list[int]:
    text = own.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt)
    ids: list[int] = own(text, add_special_tokens=False)["input_ids"]
    return ids


DEEDS: dict[str, Any] = {
    "specforge": specforge,
    "speculators": speculators,
    "trl": trl,
    "loaded": loaded,
    "vocabulary": vocabulary,
}

if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                answer = {"answer": DEEDS[asked.pop("do")](**asked)}
        except Exception:  # noqa: BLE001, a test of the other side fails by it
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer, default=str), flush=True)
