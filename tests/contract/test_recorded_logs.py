"""Logs, metrics and pages of real engines (tests/data), read by the plug-ins: phases, capacity, load, ends."""

import json
from itertools import pairwise

import pytest

from tests.contract import recorded
from tests.contract.samples import LLAMA, SAMPLES, SGLANG, VLLM, engine, spec
from tokenmill.core.capacity import Limits, in_flight
from tokenmill.core.lifecycle import step
from tokenmill.core.server import FailureKind, Launch, PhaseSeen, Server
from tokenmill.engines.base import Phase
from tokenmill.machine.logtail import KEPT_LINES

HEALTHY = {
    f"{SGLANG}/plain.log": "sglang",
    f"{SGLANG}/ngram.log": "sglang",
    f"{SGLANG}/hybrid-mtp-reference-flags.log": "sglang",
    f"{VLLM}/eager.log": "vllm",
    f"{VLLM}/compile.log": "vllm",
    f"{VLLM}/ngram.log": "vllm",
    f"{LLAMA}/serving.log": "llamacpp",
}
"""Servers that came up and worked; three of them were killed in the end, none for a reason of theirs."""


def phases(name: str, kind: str) -> list[Phase]:
    found = (engine(kind).phase(line) for line in recorded.lines(name))
    return [phase for phase in found if phase is not None]


def names(name: str, kind: str) -> list[str]:
    """The phases in the order in which they were first seen."""
    return list(dict.fromkeys(phase.name for phase in phases(name, kind)))


def drops(seen: list[Phase]) -> list[tuple[Phase, Phase]]:
    """Where the percent runs backwards."""
    return [(one, two) for one, two in pairwise(seen) if two.percent < one.percent]


# -- phases ------------------------------------------------------------------------------------------------------------
def test_sglang_a_plain_start_is_told_phase_by_phase() -> None:
    wanted = ["arguments", "distributed", "weights", "memory", "graphs", "prefill graphs", "capacity", "http", "warm"]
    assert names(f"{SGLANG}/plain.log", "sglang") == wanted
    assert names(f"{SGLANG}/ngram.log", "sglang") == wanted


def test_sglang_target_and_draft_are_told_apart() -> None:
    seen = names(f"{SGLANG}/hybrid-mtp-reference-flags.log", "sglang")
    assert seen == [
        *("arguments", "distributed", "weights", "memory", "graphs", "draft weights", "draft graphs"),
        *("capacity", "http", "warm"),
    ]
    told = {line: phase for line in recorded.lines(f"{SGLANG}/hybrid-mtp-reference-flags.log") if (phase := tell(line))}
    by_words = {
        words: [p.name for line, p in told.items() if words in line] for words in ("type=Qwen3_5For", "Capture")
    }
    assert by_words["type=Qwen3_5For"] == ["weights", "draft weights"]
    assert by_words["Capture"] == ["graphs", "graphs", "draft graphs", "draft graphs", "draft graphs", "draft graphs"]


def tell(line: str) -> Phase | None:
    return engine("sglang").phase(line)


@pytest.mark.parametrize("name", [f"{SGLANG}/plain.log", f"{SGLANG}/ngram.log"])
def test_sglang_percent_never_goes_back_without_a_draft_model(name: str) -> None:
    assert drops(phases(name, "sglang")) == []


def test_sglang_percent_goes_back_only_where_the_draft_repeats_the_target() -> None:
    seen = phases(f"{SGLANG}/hybrid-mtp-reference-flags.log", "sglang")
    draft_begins = [n for n, phase in enumerate(seen) if phase.name == "distributed"][2]  # begin and end, then again
    draft_ends = max(n for n, phase in enumerate(seen) if phase.name == "draft graphs")
    assert drops(seen[:draft_begins]) == []
    assert drops(seen[draft_ends:]) == []
    known = {phase.name for phase in seen[:draft_begins]} | {"draft graphs"}
    assert {two.name for _, two in drops(seen[draft_begins - 1 : draft_ends + 1])} <= known


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("eager", ["arguments", "config", "engine", "weights", "memory", "http"]),
        ("compile", ["arguments", "config", "engine", "weights", "compile", "memory", "http"]),
        ("ngram", ["arguments", "config", "engine", "weights", "draft weights", "memory", "http"]),
    ],
)
def test_vllm_a_start_is_told_phase_by_phase_and_never_runs_backwards(name: str, wanted: list[str]) -> None:
    assert names(f"{VLLM}/{name}.log", "vllm") == wanted
    assert drops(phases(f"{VLLM}/{name}.log", "vllm")) == []


def test_llamacpp_a_start_is_told_phase_by_phase_and_never_runs_backwards() -> None:
    assert names(f"{LLAMA}/serving.log", "llamacpp") == ["weights", "slots", "loaded", "http"]
    assert drops(phases(f"{LLAMA}/serving.log", "llamacpp")) == []


@pytest.mark.parametrize(("name", "kind"), HEALTHY.items())
def test_what_a_user_sees_of_a_start_never_falls_back(name: str, kind: str) -> None:
    """Where a draft model prints the target's lines again, what was reached stays reached."""
    server, shown = step(Server(0), Launch(), 0.0)[0], []
    for phase in phases(name, kind):
        server = step(server, PhaseSeen(phase.name, phase.percent), 1.0)[0]
        shown.append(server.percent)
    assert shown == sorted(shown)
    assert shown[-1] >= 97.0


SGLANG_23 = {
    "server_args={'model_path': '/m'}": "arguments",
    "Memory baseline taken. mem usage=0.09 GB": "distributed",
    "Load weight begin. avail mem=139.13 GB": "weights",
    "Multi-thread loading shards:  42% Completed | 6/14 [00:10<00:14,  1.72s/it]": "weights",
    "Load weight end. elapsed=9.25 s, type=Qwen3_5ForConditionalGeneration, avail mem=84.00 GB": "weights",
    "Load weight end. Committed real weights after CUDA graph capture in 9.20 s": "weights",
    "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size: 1.00 GB, V size: 1.00 GB": "memory",
    "KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 4096": "memory",
    "Memory pool end. avail mem=30.00 GB": "memory",
    "Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=30.00 GB": "graphs",
    "Capturing batches (bs=16 avail_mem=30.06 GB):  37%|###7      | 3/8 [00:10<00:14,  1.72s/it]": "graphs",
    "Capture target verify CUDA graph end. bs=[1, 2], elapsed=61.78 s": "graphs",
    "Load weight end. elapsed=0.01 s, type=Qwen3_5ForCausalLMMTP, avail mem=29.00 GB": "draft weights",
    "Capture draft decode CUDA graph begin. backend=full, avail mem=29.00 GB": "draft graphs",
    "Capture draft extend CUDA graph end. elapsed=5.44 s": "draft graphs",
    "max_total_num_tokens=17564, chunked_prefill_size=8192, max_running_requests=16, context_len=8192": "capacity",
    "INFO:     Uvicorn running on http://127.0.0.1:30000 (Press CTRL+C to quit)": "http",
    "The server is fired up and ready to roll!": "warm",
}
"""The same start in 0.5.23, by the texts of its source: not recorded."""


@pytest.mark.parametrize("line", SGLANG_23)
def test_sglang_0_5_23_says_the_same_in_other_words(line: str) -> None:
    phase = tell(f"[2026-11-29 17:15:38] {line}")
    assert phase is not None
    assert phase.name == SGLANG_23[line]


@pytest.mark.parametrize(("name", "kind"), HEALTHY.items())
def test_requests_at_work_are_no_phase_of_a_start(name: str, kind: str) -> None:
    steady = [line for line in recorded.lines(name) if "HTTP/1.1" in line or "Decode batch" in line or "slot " in line]
    assert [line for line in steady if engine(kind).phase(line) and "initializing" not in line] == []


# -- what a running server says ----------------------------------------------------------------------------------------
def test_sglang_the_mamba_cache_limits_the_reference_run_to_16() -> None:
    info = engine("sglang").info(spec("sglang"), recorded.page(f"{SGLANG}/hybrid-mtp.server_info.json"))
    assert info.limits == Limits(16, "max-mamba-cache-size", 17_564_392, 256, "the largest captured batch")
    assert in_flight(info.limits, None, 8192) == (16, "max-mamba-cache-size")
    assert in_flight(info.limits, 448, 8192) == (16, "max-mamba-cache-size")
    assert (info.context, info.reserve, info.version) == (8192, 4, "0.5.11")


def test_sglang_speculation_limits_an_ngram_server_to_48() -> None:
    info = engine("sglang").info(spec("sglang"), recorded.page(f"{SGLANG}/ngram.server_info.json"))
    assert info.limits == Limits(48, "speculation's own default of 48", 1_446_738, 128, "the largest captured batch")
    assert in_flight(info.limits, None, 4096) == (48, "speculation's own default of 48")
    assert (info.context, info.version) == (4096, "0.5.11")


def test_sglang_a_batch_beyond_the_captured_graphs_is_only_kept_where_it_is_asked_for() -> None:
    page = json.loads(recorded.page(f"{SGLANG}/ngram.server_info.json"))
    page |= {"max_running_requests": 4096, "speculative_algorithm": None, "internal_states": []}
    plain = engine("sglang").info(spec("sglang"), json.dumps(page).encode()).limits
    assert in_flight(plain, None, 4096) == (128, "the largest captured batch")
    assert in_flight(plain, 448, 4096) == (448, "generation.concurrency")
    without = engine("sglang").info(spec("sglang"), json.dumps(page | {"disable_cuda_graph": True}).encode()).limits
    assert in_flight(without, None, 4096) == (353, "KV cache tokens ÷ tokens of a request")


def test_vllm_its_settings_or_its_cache_limit_what_it_runs() -> None:
    page = b'{"data":[{"id":"smollm2","max_model_len":2048}]}'
    log = recorded.text(f"{VLLM}/eager.log")
    asked = engine("vllm").info(spec("vllm", args={"max-num-seqs": 16}), page, log)
    assert (asked.limits.running, asked.limits.kv_tokens, asked.context) == (16, 46_592, 2048)
    assert in_flight(asked.limits, None, 2048) == (16, "max-num-seqs")
    cache = engine("vllm").info(spec("vllm"), page, log)
    assert in_flight(cache.limits, None, 2048) == (22, "KV cache tokens ÷ tokens of a request")
    assert in_flight(cache.limits, 64, 2048) == (64, "generation.concurrency"), "the cache cuts no wish"


def test_vllm_a_default_that_its_log_tells_is_taken_and_else_256_are_kept_in_flight() -> None:
    log = "DEBUG [arg_utils.py:2797] Defaulting max_num_seqs to 1024 for OPENAI_API_SERVER usage context.\n"
    told = engine("vllm").info(spec("vllm"), SAMPLES["vllm"].info, log)
    assert in_flight(told.limits, None, 2048) == (1024, "max-num-seqs")
    silent = engine("vllm").info(spec("vllm"), SAMPLES["vllm"].info)
    assert in_flight(silent.limits, None, 2048)[0] == 256


def test_vllm_a_default_that_is_only_assumed_does_not_cut_what_is_asked_for() -> None:
    """It is 1,024 on an H100 or H200 (get_batch_defaults), and no line of a usual log tells."""
    silent = engine("vllm").info(spec("vllm"), SAMPLES["vllm"].info, recorded.text(f"{VLLM}/eager.log"))
    assert in_flight(silent.limits, 448, 100) == (448, "generation.concurrency")


def test_llamacpp_says_its_slots_its_template_and_its_end_token() -> None:
    info = engine("llamacpp").info(spec("llamacpp"), recorded.reply(f"{LLAMA}/replies.json", "props"))
    assert in_flight(info.limits, None, 2048) == (4, "parallel")
    assert (info.context, info.end_token) == (2048, "<|im_end|>")
    assert "add_generation_prompt" in info.template


@pytest.mark.parametrize(
    ("kind", "page", "running", "tokens", "accept_length"),
    [
        ("sglang", f"{SGLANG}/hybrid-mtp.metrics.txt", 16, 40968 + 4880, 1.0),
        ("sglang", f"{SGLANG}/ngram.metrics.txt", 1, 114696 + 290, pytest.approx(1.29, abs=0.01)),
        ("sglang", f"{SGLANG}/plain.metrics.txt", 0, 696328, None),
        ("vllm", f"{VLLM}/eager.metrics.txt", 0, 8, None),
        ("llamacpp", f"{LLAMA}/metrics.txt", 0, 103 + 39, None),
    ],
)
def test_a_metrics_page_tells_load_tokens_and_speculation(
    kind: str, page: str, running: int, tokens: float, accept_length: float | None
) -> None:
    load = engine(kind).load(recorded.text(page))
    assert (load.running, load.queued, load.tokens) == (running, 0, tokens)
    assert load.accept_length == accept_length


def test_sglang_answers_who_it_is_before_it_can_generate() -> None:
    """Why identity and health are two pages: columns are /health, /model_info, …, /health_generate, /v1/models."""
    rows = [line.split()[1:6] for line in recorded.lines(f"{SGLANG}/readiness-timeline.txt") if ":" in line]
    window = [row for row in rows if row[1] == "200" and row[4] == "503"]
    assert len(window) >= 3
    probes = engine("sglang").probes(spec("sglang"))
    assert (probes.identity, probes.health) == ("/model_info", "/health_generate")


# -- ends --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "kind"), HEALTHY.items())
def test_a_working_server_that_is_killed_at_any_moment_is_started_again(name: str, kind: str) -> None:
    """Whatever stands in a good server's log by then, kill -9 must never look like a mistake in the config."""
    lines = recorded.lines(name)
    kinds = {
        engine(kind).diagnose(lines[max(0, end - KEPT_LINES) : end], -9).kind for end in range(0, len(lines) + 1, 7)
    }
    assert kinds == {FailureKind.CRASH}


def test_sglang_a_missing_file_of_the_model_is_named_and_never_tried_again() -> None:
    failure = engine("sglang").diagnose(recorded.tail(f"{SGLANG}/missing-processor-exit1.log"), 1)
    assert failure.kind is FailureKind.CONFIG
    assert any("preprocessor_config.json" in line for line in failure.lines)
    assert "doctor" in failure.fix


def test_sglang_a_killed_scheduler_is_named() -> None:
    failure = engine("sglang").diagnose(recorded.tail(f"{SGLANG}/hybrid-mtp-reference-flags.log"), -9)
    assert (failure.kind, failure.cause) == (FailureKind.CRASH, "its scheduler crashed")
    assert "crashed with exit code -9" in failure.lines[0]


def test_sglang_an_assertion_in_a_kernel_is_quoted() -> None:
    failure = engine("sglang").diagnose(recorded.tail(f"{SGLANG}/scheduler-assert.log"), -9)
    assert (failure.kind, failure.cause) == (FailureKind.CRASH, "an assertion in a GPU kernel failed")
    assert "probability tensor contains either `inf`, `nan` or element < 0" in failure.lines[0]


def test_sglang_a_crash_is_told_with_its_exception() -> None:
    """The line that says that it crashed ends in `Traceback`: alone it helps nobody. (Seen with llguidance.)"""
    tail = [
        "[2026-11-30 02:39:00] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "python/sglang/srt/managers/scheduler.py", line 3934, in run_scheduler_process',
        "    scheduler.run_event_loop()",
        'ValueError: Parser Error: token ">" does not satisfy the grammar',
        "<state>",
        "[2026-11-30 02:39:00] SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
    ]
    failure = engine("sglang").diagnose(tail, -9)
    assert (failure.cause, failure.lines) == ("its scheduler crashed", (tail[0], tail[3]))


@pytest.mark.parametrize("name", ["kill-worker", "kill-enginecore"])
def test_vllm_a_killed_engine_core_or_worker_is_named(name: str) -> None:
    failure = engine("vllm").diagnose(recorded.tail(f"{VLLM}/{name}.log"), None)
    assert (failure.kind, failure.cause) == (FailureKind.CRASH, "its engine core died")
    assert failure.lines


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("file-cut-exit1", FailureKind.CONFIG, "data is not within the file bounds"),
        ("no-gguf-exit1", FailureKind.CONFIG, "invalid magic"),
        ("port-taken-exit1", FailureKind.PORT, "couldn't bind HTTP server socket"),
        ("context-too-large-exit1", FailureKind.MEMORY, "bad_alloc"),
    ],
)
def test_llamacpp_a_start_that_fails_is_explained(name: str, kind: FailureKind, words: str) -> None:
    failure = engine("llamacpp").diagnose(recorded.tail(f"{LLAMA}/{name}.log"), 1)
    assert failure.kind is kind
    assert any(words in line for line in failure.lines)
