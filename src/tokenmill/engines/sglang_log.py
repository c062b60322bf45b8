"""SGLang's log, 0.5.11 to 0.5.23: the phases of its start and the words with which it dies. From the source of both.

0.5.11 loads and captures the target, then the draft model; 0.5.23 loads both, makes both pools, then captures both.
Only a phase's name tells what is under way: `Load weight end` begins the memory pools.
"""

import re
from collections.abc import Mapping

from tokenmill.core.server import FailureKind
from tokenmill.engines.logs import (
    CARD_LOG,
    COMMON_NOTICED,
    COMMON_ROOTS,
    COMMON_WEAK,
    DOCTOR,
    KERNEL_LOG,
    PACKAGES,
    WHO_HOLDS,
    Cause,
    PhaseRow,
    PhaseTable,
    Rule,
    Tiers,
)

_BEGUN = r"Init torch distributed|Memory baseline taken|Load weight begin"
_SHARDS = r"(?:Loading safetensors checkpoint|Multi-thread loading) shards:\s+(\d+)%"
_POOL = r"(?:KV|Mamba) Cache (?:is allocated|VA upper bound)|Memory pool end"

PHASES = PhaseTable(
    (
        PhaseRow(r"The server is fired up and ready to roll", "warm", 99),
        PhaseRow(r"Uvicorn running on", "http", 97),
        PhaseRow(r"Application startup complete", "http", 96),
        PhaseRow(r"max_total_num_tokens=\d+, chunked_prefill_size=", "capacity", 94),
        PhaseRow(r"Load weight end\. Committed", "weights", 60),  # 0.5.23, overlapped: after the graphs
        PhaseRow(r"Capture .*draft extend.* end\b", "draft graphs", 92),
        PhaseRow(r"Capture .*draft extend.* begin\b", "draft graphs", 88),
        PhaseRow(r"Capture .*draft.* end\b", "draft graphs", 87),
        PhaseRow(r"Capture .*draft.* begin\b", "draft graphs", 84),
        PhaseRow(r"Capturing batches.*?(\d+)%", "draft graphs", 88, 91, since=88),
        PhaseRow(r"Capturing (?:batches|prefill shape).*?(\d+)%", "draft graphs", 84, 87, since=84),
        PhaseRow(_POOL, "draft memory", 83.5, since=83),
        PhaseRow(r"Load weight end", "draft memory", 83, since=82),
        PhaseRow(_SHARDS, "draft weights", 82, 83, since=82),
        PhaseRow(_BEGUN, "draft weights", 82, since=65),
        PhaseRow(r"Capture piecewise .*graph end", "prefill graphs", 81),
        PhaseRow(r"(?:Capturing num tokens|\[BCG\] Capturing).*?(\d+)%", "prefill graphs", 79.5, 81),
        PhaseRow(r"Compiling num tokens.*?(\d+)%", "prefill graphs", 78, 79.5),
        PhaseRow(r"Capture piecewise .*graph begin", "prefill graphs", 78),
        PhaseRow(r"Capture target prefill .*graph begin", "prefill graphs", 65),  # 0.5.23: before the others
        PhaseRow(r"Capturing prefill shape.*?(\d+)%", "prefill graphs", 65, 66),
        PhaseRow(r"Capture target prefill .*graph end", "prefill graphs", 66),
        PhaseRow(r"Capture .*graph end", "graphs", 78),
        PhaseRow(r"Capturing batches.*?(\d+)%", "graphs", 66, 78),
        PhaseRow(r"Capture .*graph begin", "graphs", 66),
        PhaseRow(r"Memory pool end", "memory", 65),
        PhaseRow(_POOL, "memory", 62),
        PhaseRow(r"Load weight end", "memory", 61, since=60.5),  # 0.5.23: the draft model's, before any pool
        PhaseRow(_SHARDS, "draft weights", 60.5, 61, since=60.5),
        PhaseRow(_BEGUN, "draft weights", 60.5, since=60),
        PhaseRow(r"Load weight end", "memory", 60),
        PhaseRow(_SHARDS, "weights", 6, 60),
        PhaseRow(r"Load weight begin", "weights", 6),
        PhaseRow(r"Init torch distributed|Memory baseline taken", "distributed", 5),
        PhaseRow(r"server_args=", "arguments", 2),
    )
)

LIMITS: Mapping[str, float] = {
    "distributed": 300.0,  # one process: 0.3 s seen; with several, NCCL spins for ever where one is missing
    "capacity": 300.0,  # only the tokenizer's process and the HTTP server are left to come up: 1 s seen
    # Its warm-up ends it after 120 + 600 s, or 120 + 1,800 where SGLANG_WARMUP_TIMEOUT is as its source advises.
    "http": 1980.0,
}
"""No limit: arguments (packages are imported, from a mount perhaps), weights, memory and graphs (kernels compile)."""

_LOWER = f"engine.args: lower mem-fraction-static, by 0.05; {WHO_HOLDS}"

NO_ROOM_FOR_WEIGHTS = Cause(
    FailureKind.MEMORY_WEIGHTS,
    "out of GPU memory while the weights were loaded: the card is too small for them, or not empty",
    f"{WHO_HOLDS}; else engine.args tensor-parallel-size with fleet.gpus_per_server, or a quantized model",
)
NO_ROOM_FOR_GRAPHS = Cause(
    FailureKind.MEMORY_GRAPHS,
    "out of GPU memory while CUDA graphs were captured: weights and KV cache leave too little",
    "engine.args: lower mem-fraction-static, by 0.05, or cuda-graph-max-bs (0.5.23: cuda-graph-max-bs-decode)",
)
_NO_ROOM_FOR_POOLS = Cause(
    FailureKind.MEMORY_GRAPHS,
    "out of GPU memory while the KV cache was made: mem-fraction-static gives it more than is free",
    _LOWER,
)

_OUT_OF_MEMORY = (
    Rule(
        r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA error: out of memory|"
        r"Triton Error \[CUDA\]: out of memory",
        FailureKind.MEMORY,
        "out of GPU memory while generating",
        "engine.args: lower mem-fraction-static, by 0.05, or chunked-prefill-size; or generation.concurrency",
        at={
            **dict.fromkeys(("arguments", "distributed", "weights", "draft weights"), NO_ROOM_FOR_WEIGHTS),
            **dict.fromkeys(("memory", "draft memory"), _NO_ROOM_FOR_POOLS),
            **dict.fromkeys(("graphs", "prefill graphs", "draft graphs"), NO_ROOM_FOR_GRAPHS),
        },
    ),
)
"""One text wherever it happens; the phase tells what asked for the memory, and the cures are opposite."""

CAPTURE_FAILED = Rule(r"Capture .*failed:.*out of memory", *NO_ROOM_FOR_GRAPHS)

_ROOTS: tuple[Rule, ...] = (
    CAPTURE_FAILED,
    Rule(
        r"Not enough memory\. Please try to increase --mem-fraction-static|leave no GPU memory for the KV cache|"
        r"state cache is too small|Not enough GPU memory for hybrid",
        FailureKind.MEMORY_KV,
        "the weights leave no GPU memory for the KV cache under mem-fraction-static",
        "engine.args: raise mem-fraction-static, or lower max-mamba-cache-size, max-running-requests, context-length",
    ),
    Rule(
        r"(?:Decode|Prefill) out of memory|alloc_req_slots runs out of memory",
        FailureKind.MEMORY,
        "its KV cache ran full while generating",
        "engine.args: raise mem-fraction-static; or lower generation.concurrency",
    ),
    Rule(
        r"is installed with version .*less than the minimum required",
        FailureKind.VERSION,
        "a kernel package is older than this SGLang needs",
        f"pip install the version in the line, with engine.python's pip; {DOCTOR}   names all that do not fit",
    ),
    Rule(
        r"Ninja build failed|Could not find nvcc|Error building extension|CUDA_HOME environment variable is not set",
        FailureKind.VERSION,
        "kernels cannot be compiled here",
        "install ninja and the CUDA toolkit of torch's version, or set CUDA_HOME in engine.env",
    ),
    Rule(
        r"no kernel image is available|Could not load any common_ops library|"
        r"is not supported for the current GPU",
        FailureKind.GPU_UNSUPPORTED,
        "the installed kernels were not built for this GPU",
        "nvidia-smi --query-gpu=name,compute_cap --format=csv; install an SGLang with kernels for it",
    ),
    Rule(
        r"shard file\(s\) missing|SafetensorError|Error while deserializing header|MetadataIncompleteBuffer|"
        r"does not appear to have a file named (?!generation_config)|Can't load .* for '|Can't load image processor|"
        r"Cannot find any model weights|No model weights found|Missing keys .* in loaded state",
        FailureKind.MODEL,
        "the model folder is not complete",
        f"{DOCTOR}   names the missing files",
    ),
    Rule(
        r"does not recognize this architecture|Model architectures .* are not supported|Unrecognized model in|"
        r"Unsupported architectures",
        FailureKind.MODEL,
        "this SGLang does not know the model's architecture",
        f"a newer SGLang in engine.python, or another model.path; {DOCTOR}",
    ),
    Rule(r"memory leak detected!", FailureKind.CRASH, "SGLang found its own token pool inconsistent"),
    Rule(
        r"is not compatible with radix cache when using|(?:ValueError|AssertionError): .*(?:speculative|mamba|--)",
        FailureKind.CONFIG,
        "two flags contradict each other",
        f"the line says which; see engine.args, and {DOCTOR}",
    ),
    Rule(
        r"watchdog timeout .*soft=False",
        FailureKind.WATCHDOG,
        "its own watchdog found a batch that made no step for watchdog-timeout seconds",
        f"engine.args watchdog-timeout, if batches are that slow; {CARD_LOG}",
    ),
    Rule(
        r"Read timed out\. \(read timeout=\d{3,}",
        FailureKind.WATCHDOG,
        "its warm-up request took longer than SGLang allows",
        'engine.env = { SGLANG_WARMUP_TIMEOUT = "1800" }',
    ),
    Rule(r"Assertion `.*` failed|device-side assert", FailureKind.CRASH, "an assertion in a GPU kernel failed"),
)

_EXCEPTIONS = (
    Rule(r"Scheduler hit an exception", FailureKind.CRASH, "its scheduler crashed"),
    Rule(r"Detokenizer\w* hit an exception", FailureKind.CRASH, "its detokenizer crashed"),
    Rule(r"\w+ hit an exception: Traceback", FailureKind.CRASH, "a process of it crashed"),
    Rule(r"Initialization failed\. warmup error", FailureKind.CRASH, "its own warm-up request failed"),
)

_NOTICED = (
    Rule(
        r"died during initialization \(exit code: -9\)",
        FailureKind.CHILD,
        "its scheduler was killed (SIGKILL) in the start: by the kernel, short of memory, or by somebody's kill -9",
        KERNEL_LOG,
    ),
    Rule(
        r"died during initialization|Received sigquit from a child|Initialization failed\. Please see",
        FailureKind.CHILD,
        "its scheduler died in the start, without a word",
        f"{PACKAGES}; {CARD_LOG}",
    ),
    Rule(
        r"Subprocess \w+ .*crashed with exit code -9\b",
        FailureKind.CRASH,
        "a process of it was killed (SIGKILL): by the kernel, short of memory, or by somebody's kill -9",
        KERNEL_LOG,
    ),
    Rule(r"Subprocess \w+ .*crashed with exit code", FailureKind.CRASH, "a process of it crashed in native code"),
    Rule(r"SIGQUIT received", FailureKind.CRASH, "its scheduler crashed"),
)

TIERS: Tiers = ((*COMMON_ROOTS, *_ROOTS), _OUT_OF_MEMORY, COMMON_WEAK, _EXCEPTIONS, (*COMMON_NOTICED, *_NOTICED))

# Lines that hold words of failure and mean none, or that stand last in a killed server's log and tell nothing: a model
# class that cannot be imported, a client's own bad request, answered requests, what is left to clean up.
HARMLESS = re.compile(
    r"Ignore import error when loading|Can not initialize OpenAIServingResponses|libtorchcodec|"
    r"Failed to load generation config|\[http_server\] Error|Using custom SIGQUIT handler|Error in request:|"
    r"server_args=|is already in use, trying port|HTTP/1\.\d\" \d{3}|resource_tracker: "
)

DUMP = ("[start of libtorchcodec loading traceback]", "[end of libtorchcodec loading traceback]")
"""Five tracebacks that every start without FFmpeg prints."""
