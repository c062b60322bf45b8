"""The wheel's llama.cpp server as a process of its own: python llamacpp_server.py --model FILE --port N

Takes llama-server's flags, as far as they are named here, so that a config runs with either. It runs in the engine's
own environment and imports nothing of tokenmill.
"""

import argparse
import signal
import sys
from functools import reduce
from pathlib import Path
from typing import Any

# flag → attribute of xllamacpp.CommonParams, type
FLAGS: dict[str, tuple[str, Any]] = {
    "ctx-size": ("n_ctx", int),
    "parallel": ("n_parallel", int),
    "batch-size": ("n_batch", int),
    "ubatch-size": ("n_ubatch", int),
    "threads": ("cpuparams.n_threads", int),
    "threads-batch": ("cpuparams_batch.n_threads", int),
    "threads-http": ("n_threads_http", int),
    "n-gpu-layers": ("n_gpu_layers", int),
    "main-gpu": ("main_gpu", int),
    "chat-template": ("chat_template", str),
    "cache-ram": ("cache_ram_mib", int),
    "spec-draft-model": ("speculative.draft.mparams.path", str),
    "spec-draft-n-max": ("speculative.draft.n_max", int),
    "spec-draft-n-min": ("speculative.draft.n_min", int),
    "spec-draft-p-min": ("speculative.draft.p_min", float),
    "spec-draft-ngl": ("speculative.draft.n_gpu_layers", int),
    "spec-ngram-simple-size-n": ("speculative.ngram_simple.size_n", int),
    "spec-ngram-simple-size-m": ("speculative.ngram_simple.size_m", int),
    "spec-ngram-simple-min-hits": ("speculative.ngram_simple.min_hits", int),
    "spec-ngram-mod-n-match": ("speculative.ngram_mod.n_match", int),
    "spec-ngram-mod-n-min": ("speculative.ngram_mod.n_min", int),
    "spec-ngram-mod-n-max": ("speculative.ngram_mod.n_max", int),
}

SPEC_TYPES = (
    *("none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash"),
    *("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"),
)
"""How it speculates, as llama-server names them. A draft model alone does nothing (arg.cpp, common/speculative.cpp)."""


def arguments(argv: list[str]) -> argparse.Namespace:
    """Reads the command line; an unknown flag ends the process with exit code 2, before any model is loaded."""
    parser = argparse.ArgumentParser(
        prog="llamacpp_server", allow_abbrev=False, description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--chat-template-file", type=Path)
    parser.add_argument("--spec-type", choices=SPEC_TYPES)
    for flag, (_, kind) in FLAGS.items():
        parser.add_argument(f"--{flag}", type=kind)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Loads the model and serves until SIGTERM; 1 where the wheel or the file is missing."""
    args = arguments(argv)
    try:
        import xllamacpp
    except ImportError as error:
        sys.stderr.write(f"ImportError: {error}; pip install '.[quickstart]' in tokenmill's checkout\n")
        return 1
    if not Path(args.model).is_file():
        sys.stderr.write(f"failed to open GGUF file {args.model}: no such file\n")
        return 1
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.model_alias = {name for name in args.alias.split(",") if name}
    params.hostnames = [args.host]
    params.port = args.port
    params.endpoint_metrics = args.metrics
    if args.chat_template_file is not None:
        params.chat_template = args.chat_template_file.read_text(encoding="utf-8")
    for flag, (attribute, _) in FLAGS.items():
        value = getattr(args, flag.replace("-", "_"))
        if value is not None:
            *owners, name = attribute.split(".")
            setattr(reduce(getattr, owners, params), name, value)
    if args.spec_type is not None:
        kind = f"COMMON_SPECULATIVE_TYPE_{args.spec_type.upper().replace('-', '_')}"
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
    server = xllamacpp.Server(params)  # returns once the model is loaded; the port listens before
    signal.pause()  # SIGTERM ends the process; the object must live until then
    del server
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
