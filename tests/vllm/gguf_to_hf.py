"""Rewrites a GGUF file as a Hugging Face model folder (bf16 safetensors), so that SGLang and vLLM can load it.

transformers 5.19 and later leave the weights packed unless GgufConfig(dequantize=True) says otherwise.

usage: gguf_to_hf.py MODEL.gguf OUT_DIR      needs transformers, gguf, accelerate, torch
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

source, out = Path(sys.argv[1]), Path(sys.argv[2])
where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
AutoTokenizer.from_pretrained(**where).save_pretrained(out)
model = AutoModelForCausalLM.from_pretrained(
    **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(out)
print(*sorted(path.name for path in out.iterdir()))
