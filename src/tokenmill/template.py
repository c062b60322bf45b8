"""The commented config that `tokenmill init` prints: every key with its default, for one engine."""

from importlib import resources

from tokenmill import plugins
from tokenmill.errors import UsageError

_HF_MODEL = """path = "/models/Qwen3.6-27B"       # required: a model folder, or a hub id such as "Qwen/Qwen3.6-27B"
# name = "Qwen3.6-27B"             # the name it is served under; default: the folder's
# revision = "main"                # of a hub id: a branch, tag or commit"""

_GGUF_MODEL = """path = "/models/model.gguf"        # required: a .gguf file
# name = "my-model"                # the name it is served under; default: the file's"""

_NAMED_MODEL = """name = "my-model"                  # required: the name the servers know the model by"""

_PYTHON = """# python = "/root/venv/bin/python" # the engine's own environment; default: tokenmill's
env = {{}}                           # "{{index}}" in a value becomes the server's number"""

_ENGINES: dict[str, tuple[str, str, str]] = {
    "sglang": (
        _HF_MODEL,
        'kind = "sglang"                    # sglang | vllm | llamacpp | openai | fake\n'
        "args = {{ context-length = 16384 }} # as flags: true → --flag, list → repeated values, table → JSON\n"
        "# for a model with an MTP head:\n"
        '# args = {{ context-length = 16384, speculative-algorithm = "EAGLE", speculative-num-steps = 3, '
        "speculative-eagle-topk = 1, speculative-num-draft-tokens = 4 }}\n" + _PYTHON,
        '"all"',
    ),
    "vllm": (
        _HF_MODEL,
        'kind = "vllm"                      # sglang | vllm | llamacpp | openai | fake\n'
        "args = {{ max-model-len = 16384 }}  # as flags: true → --flag, list → repeated values, table → JSON\n"
        + _PYTHON,
        '"all"',
    ),
    "llamacpp": (
        _GGUF_MODEL,
        'kind = "llamacpp"                  # sglang | vllm | llamacpp | openai | fake\n'
        "args = {{ parallel = 4, ctx-size = 32768 }}   # ctx-size is the total over all slots\n"
        '# command = ["llama-server"]       # a system llama-server instead of the wheel xllamacpp\n' + _PYTHON,
        '"none"',
    ),
    "openai": (
        _NAMED_MODEL,
        'kind = "openai"                    # any OpenAI-compatible server\n'
        'addresses = ["http://127.0.0.1:8000"]   # servers that run already: used, never restarted\n'
        '# command = ["my-server", "--port", "{{port}}", "--model", "{{model}}"]   # or tokenmill launches it\n'
        '# api_key_env = "MY_KEY"           # the variable that holds the key; never the key itself',
        '"none"',
    ),
    "fake": (
        '# path = ""                       # the scripted server needs no model',
        'kind = "fake"                      # a scripted server that ships with tokenmill, to try a config\n'
        "args = {{ latency-ms = 200, slots = 16 }}",
        '"none"',
    ),
}


def template(engine: str) -> str:
    """The config's text for an engine; a plug-in's engine gets the OpenAI one with its own name."""
    if engine not in plugins.names("engines"):
        raise UsageError(f"no engine named {engine!r}", fix=f"one of: {', '.join(plugins.names('engines'))}")
    model, lines, gpus = _ENGINES.get(engine, _ENGINES["sglang"])
    text = resources.files("tokenmill").joinpath("data/init.toml").read_text(encoding="utf-8")
    return text.format(model=model.format(), engine=lines.format(), gpus=gpus)
