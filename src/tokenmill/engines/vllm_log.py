"""vLLM's log, 0.32 and 0.33, both model runners: the phases of its start and the words with which it dies.

From its source. Before the KV cache exists, 0.33 captures some graphs to see what they take, with the same lines as
afterwards; with a draft model, weights and graphs come twice.
"""

import re
from collections.abc import Mapping

from tokenmill.core.server import FailureKind
from tokenmill.engines.logs import (
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

_SHARDS = r"(?:Loading \S+ checkpoint|Multi-thread loading) shards:\s+(\d+)%"

PHASES = PhaseTable(
    (
        PhaseRow(r"Application startup complete|Starting vLLM server", "http", 98),
        PhaseRow(r"init engine \(profile", "engine", 95),
        PhaseRow(r"Graph capturing finished", "draft graphs", 94, since=94),
        PhaseRow(r"Graph capturing finished", "graphs", 94, since=76),
        PhaseRow(r"Capturing (?!CUDA)[\w -]+ CUDA graphs.*?(\d+)%", "draft graphs", 90, 94, since=76),
        PhaseRow(r"Capturing model for .*speculator", "draft graphs", 90, since=76),
        PhaseRow(r"Capturing CUDA graphs \(.*PIECEWISE\):\s*(\d+)%", "graphs", 78, 84, since=76),
        PhaseRow(r"Capturing CUDA graphs.*?:\s*(\d+)%", "graphs", 84, 90, since=76),
        PhaseRow(r"JIT kernel warmup starting|Warming up FlashInfer|Compile and warming up", "kernels", 77, since=76),
        PhaseRow(r"KV cache size:", "memory", 76),
        PhaseRow(r"Available KV cache memory|for KV cache on node", "memory", 75),
        PhaseRow(r"Graph capturing finished|Estimated CUDA graph memory", "profiling", 74),
        PhaseRow(r"Profiling CUDA graph memory|Capturing .*CUDA graphs|Capturing model for", "profiling", 72),
        PhaseRow(r"torch\.compile took|saved AOT compiled|Initial profiling/warmup run|Warming up done", "compile", 70),
        PhaseRow(r"Compiling a graph for|Directly load", "compile", 66),
        PhaseRow(
            r"Starting torch\.compile|Dynamo bytecode|Warming up model for the compilation|for vLLM's torch\.compile",
            "compile",
            60,
        ),
        PhaseRow(r"Model loading took", "compile", 58),  # the first full batch comes next, and compiles
        PhaseRow(r"Loading weights took|Detected (?:MTP|EAGLE) model", "draft weights", 57.5, since=55),
        PhaseRow(_SHARDS, "draft weights", 56, 57, since=55),
        PhaseRow(r"Loading drafter model", "draft weights", 56),
        PhaseRow(r"Loading weights took", "weights", 55),
        PhaseRow(_SHARDS, "weights", 12, 54),
        PhaseRow(r"Starting to load model|Loading model from scratch", "weights", 12),
        PhaseRow(r"rank \d+ in world size", "distributed", 10),
        PhaseRow(r"Initializing a V1 LLM engine", "distributed", 8),
        PhaseRow(r"Resolved architecture", "config", 5),
        PhaseRow(r"non-default args", "arguments", 2),
    )
)

LIMITS: Mapping[str, float] = {
    "distributed": 600.0,  # workers start, import and meet: 12 s seen; its own limit for the whole start is 600 s
    "engine": 300.0,  # only the API server is left to come up: 2 s seen
}
"""No limit: config (packages are imported, from a mount perhaps), weights, compile, memory and graphs."""

_LOWER = "engine.args: lower gpu-memory-utilization, by 0.05, or max-num-seqs"

NO_ROOM_FOR_WEIGHTS = Cause(
    FailureKind.MEMORY_WEIGHTS,
    "out of GPU memory while the weights were loaded: the card is too small for them, or not empty",
    f"{WHO_HOLDS}; else engine.args tensor-parallel-size with fleet.gpus_per_server, or a quantized model",
)
NO_ROOM_FOR_GRAPHS = Cause(
    FailureKind.MEMORY_GRAPHS,
    "out of GPU memory while graphs were captured: weights and KV cache leave too little",
    f"{_LOWER}, or max-cudagraph-capture-size",
)
_NO_ROOM_FOR_A_BATCH = Cause(
    FailureKind.MEMORY,
    "out of GPU memory in the first full batch, before there was a KV cache",
    "engine.args: lower max-num-batched-tokens or max-num-seqs",
)

_OUT_OF_MEMORY = (
    Rule(
        r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDA error: out of memory",
        FailureKind.MEMORY,
        "out of GPU memory while generating",
        _LOWER,
        at={
            **dict.fromkeys(("arguments", "config", "distributed", "weights", "draft weights"), NO_ROOM_FOR_WEIGHTS),
            **dict.fromkeys(("profiling", "compile"), _NO_ROOM_FOR_A_BATCH),
            **dict.fromkeys(("memory", "kernels", "graphs", "draft graphs"), NO_ROOM_FOR_GRAPHS),
        },
    ),
)
"""One text wherever it happens; the phase tells what asked for the memory. The KV cache is made under "memory"; too
much of it is cured as captured graphs are."""

_ROOTS: tuple[Rule, ...] = (
    Rule(
        r"Free memory on device .*on startup .*is less than",
        FailureKind.OCCUPIED,
        "the GPU's memory is held by another process",
        WHO_HOLDS,
    ),
    Rule(
        r"No available memory for the cache blocks|To serve at least one request with the model's max seq len|"
        r"exceeds available Mamba cache blocks",
        FailureKind.MEMORY_KV,
        "the weights leave no memory for the KV cache under gpu-memory-utilization",
        "engine.args: raise gpu-memory-utilization, or lower max-model-len or max-num-seqs",
    ),
    Rule(r"Failed to load model - not enough GPU memory", *NO_ROOM_FOR_WEIGHTS),
    Rule(r"out of memory occurred when warming up (?:sampler|pooler)", *NO_ROOM_FOR_GRAPHS),
    Rule(
        r"weights were not initialized from checkpoint|SafetensorError|Error while deserializing header|"
        r"Cannot find any model weights|does not appear to have a file named (?!generation_config)|Can't load .* for '",
        FailureKind.MODEL,
        "the model folder is not complete",
        f"{DOCTOR}   names the missing files",
    ),
    Rule(
        r"does not recognize this architecture|Model architectures .* are not supported|Unrecognized model in|"
        r"has no vLLM implementation",
        FailureKind.MODEL,
        "this vLLM does not know the model's architecture",
        f"a newer vLLM in engine.python, or another model.path; {DOCTOR}",
    ),
    Rule(
        r"no kernel image is available|not supported for the current GPU",
        FailureKind.GPU_UNSUPPORTED,
        "the installed wheel has no kernels for this GPU",
        "nvidia-smi --query-gpu=name,compute_cap --format=csv; install a vLLM built for it",
    ),
    Rule(
        r"Ninja build failed|Could not find nvcc|Error building extension",
        FailureKind.VERSION,
        "kernels cannot be compiled here",
        "install ninja and the CUDA toolkit of torch's version, or set CUDA_HOME in engine.env",
    ),
    Rule(
        r"validation errors? for \w+Config|ValidationError.*for \w+Config",
        FailureKind.CONFIG,
        "vLLM refuses the config",
        f"the line says which; see engine.args, and {DOCTOR}",
    ),
    Rule(
        r"Timed out waiting for engine core processes to start",
        FailureKind.WATCHDOG,
        "its start took longer than vLLM allows",
        'engine.env = { VLLM_ENGINE_READY_TIMEOUT_S = "1800" }',
    ),
    Rule(
        r"RPC call to \w+ timed out",
        FailureKind.WATCHDOG,
        "a batch took longer than vLLM allows",
        'engine.env = { VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS = "900" }',
    ),
    Rule(r"Assertion `.*` failed|device-side assert", FailureKind.CRASH, "an assertion in a GPU kernel failed"),
)

_EXCEPTIONS = (
    Rule(r"(?:EngineCore|WorkerProc) failed to start", FailureKind.CRASH, "its engine core failed in the start"),
    Rule(
        r"(?:EngineCore|WorkerProc) (?:encountered a fatal error|hit an exception)",
        FailureKind.CRASH,
        "its engine core crashed",
    ),
)

_NOTICED = (
    Rule(
        r"Worker proc .* died unexpectedly \(exit code: -9\)",
        FailureKind.CRASH,
        "a process of it was killed (SIGKILL): by the kernel, short of memory, or by somebody's kill -9",
        KERNEL_LOG,
    ),
    Rule(
        r"Failed core proc\(s\): \{[^}]*-9\b",
        FailureKind.CHILD,
        "its engine core was killed (SIGKILL) in the start: by the kernel, short of memory, or by somebody's kill -9",
        KERNEL_LOG,
    ),
    Rule(
        r"Engine core initialization failed|WorkerProc initialization failed",
        FailureKind.CHILD,
        "its engine core died in the start, without a word",
        f"{PACKAGES}; {KERNEL_LOG}",
    ),
    Rule(
        r"EngineDeadError|EngineCore encountered an issue|engine core exited unexpectedly|died unexpectedly",
        FailureKind.CRASH,
        "its engine core died",
    ),
)

TIERS: Tiers = ((*COMMON_ROOTS, *_ROOTS), _OUT_OF_MEMORY, COMMON_WEAK, _EXCEPTIONS, (*COMMON_NOTICED, *_NOTICED))

# Lines that hold words of failure and mean none; the first is printed where a port is only looked for.
HARMLESS = re.compile(
    r"is already in use, trying port|is used by process|This can cause fd limit errors|non-default args|"
    r"Error with model error=|Chat template rejected the request|resource_tracker: There appear to be"
)
