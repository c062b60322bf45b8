"""Logs, metrics and pages of real engines (tests/data), read by the plug-ins: phases, capacity, load, ends."""

import json
import re
from itertools import groupby

import pytest

from tests.contract import recorded
from tests.contract.samples import LLAMA, SAMPLES, SGLANG, VLLM, engine, spec
from tokenmill.core.capacity import Limits, in_flight
from tokenmill.core.lifecycle import step
from tokenmill.core.server import FailureKind, Launch, PhaseSeen, Server
from tokenmill.engines.logs import Phase
from tokenmill.machine.logtail import KEPT_LINES

SOURCE = "from-source"

HEALTHY = {
    f"{SGLANG}/plain.log": "sglang",
    f"{SGLANG}/ngram.log": "sglang",
    f"{SGLANG}/hybrid-mtp-reference-flags.log": "sglang",
    f"{SOURCE}/sglang-0.5.23-plain.log": "sglang",
    f"{SOURCE}/sglang-0.5.23-mtp.log": "sglang",
    f"{VLLM}/eager.log": "vllm",
    f"{VLLM}/compile.log": "vllm",
    f"{VLLM}/ngram.log": "vllm",
    f"{SOURCE}/vllm-0.33-v1-mtp.log": "vllm",
    f"{SOURCE}/vllm-0.33-v2-mtp.log": "vllm",
    f"{SOURCE}/vllm-0.33-v2-plain.log": "vllm",
    f"{LLAMA}/serving.log": "llamacpp",
    f"{SOURCE}/llamacpp-draft.log": "llamacpp",
}
"""Servers that came up and worked; three of them were killed in the end, none for a reason of theirs."""

every_healthy_log = pytest.mark.parametrize(("name", "kind"), HEALTHY.items())


def phases(name: str, kind: str) -> list[Phase]:
    """All that a log tells, line by line, as one life sees it."""
    found: list[Phase] = []
    for line in recorded.lines(name):
        if phase := engine(kind).phase(line, found[-1].percent if found else 0.0):
            found.append(phase)
    return found


def brief(seen: list[Phase]) -> str:
    """Each phase with the percents that it went through, rounded: "weights 6 33 60"."""
    blocks = (
        f"{name} {' '.join(dict.fromkeys(f'{phase.percent:.4g}' for phase in block))}"
        for name, block in groupby(seen, key=lambda phase: phase.name)
    )
    return "; ".join(blocks)


PHASES = dict(line.split("\t") for line in recorded.text("phases.tsv").splitlines()[1:])


# -- phases ------------------------------------------------------------------------------------------------------------
@every_healthy_log
def test_a_start_is_told_phase_by_phase(name: str, kind: str) -> None:
    assert brief(phases(name, kind)) == PHASES[name]


@every_healthy_log
def test_percent_never_falls_and_a_start_ends_at_its_last_phase(name: str, kind: str) -> None:
    seen = phases(name, kind)
    percents = [phase.percent for phase in seen]
    assert percents == sorted(percents)
    assert (seen[-1].name, seen[-1].percent) == {"sglang": ("warm", 99)}.get(kind, ("http", 98))


@every_healthy_log
def test_what_a_user_sees_of_a_start_is_what_the_log_tells(name: str, kind: str) -> None:
    server = step(Server(0), Launch(), 0.0)[0]
    for phase in phases(name, kind):
        server = step(server, PhaseSeen(phase.name, phase.percent), 1.0)[0]
        assert (server.phase, server.percent) == (phase.name, phase.percent)


@every_healthy_log
def test_target_and_draft_are_told_apart_in_every_block(name: str, kind: str) -> None:
    """A draft model's phases carry its name; a log without one has none, and each of them comes once."""
    blocks = [block for block, _ in groupby(phase.name for phase in phases(name, kind))]
    drafts = [block for block in blocks if block.startswith("draft")]
    assert bool(drafts) == ("mtp" in name or "draft" in name or name == f"{VLLM}/ngram.log")
    assert len(drafts) == len(set(drafts))
    again = {block for block in blocks if blocks.count(block) > 1}
    assert again <= {"memory"}, "0.5.23 loads the draft between the target's weights and the pools of both"


def test_a_log_read_twice_from_its_start_tells_the_same() -> None:
    """An adopted server's log is read again."""
    name = f"{SGLANG}/hybrid-mtp-reference-flags.log"
    assert phases(name, "sglang") == phases(name, "sglang")


@pytest.mark.parametrize(
    ("line", "reached", "wanted"),
    [
        ("Load weight begin. avail mem=69.56 GB", 0, ("weights", 6)),
        ("Load weight begin. avail mem=69.56 GB", 78, ("draft weights", 82)),
        ("Load weight begin. avail mem=69.56 GB", 65, ("draft weights", 82)),
        ("Load weight begin. avail mem=69.56 GB", 60, ("draft weights", 60.5)),
        ("Multi-thread loading shards:  50% Completed | 2/4", 82, ("draft weights", 82.5)),
        ("Capturing batches (bs=1 avail_mem=36.01 GB):  50%|", 84, ("draft graphs", 85.5)),
        ("Load weight end. Committed real weights after CUDA graph capture in 9.20 s", 92, ("weights", 92)),
    ],
)
def test_sglang_one_line_means_another_phase_by_what_was_reached(
    line: str, reached: float, wanted: tuple[str, float]
) -> None:
    phase = engine("sglang").phase(line, reached)
    assert phase is not None
    assert (phase.name, phase.percent) == wanted


@every_healthy_log
@pytest.mark.parametrize("reached", [0.0, 99.0])
def test_requests_at_work_are_no_phase_of_a_start(name: str, kind: str, reached: float) -> None:
    steady = [line for line in recorded.lines(name) if re.search(r"HTTP/1\.1|Decode batch|I slot ", line)]
    assert [line for line in steady if engine(kind).phase(line, reached)] == []


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
@every_healthy_log
def test_a_working_server_that_is_killed_at_any_moment_is_started_again(name: str, kind: str) -> None:
    """Whatever stands in a good server's log by then, kill -9 must never look like a mistake in the config."""
    lines = recorded.lines(name)
    kinds = {
        engine(kind).diagnose(lines[max(0, end - KEPT_LINES) : end], -9).kind for end in range(0, len(lines) + 1, 7)
    }
    assert kinds == {FailureKind.CRASH}


@every_healthy_log
def test_a_start_that_ends_anywhere_without_a_word_is_not_taken_for_a_mistake(name: str, kind: str) -> None:
    """Exit code 1 and a healthy log so far: nothing may be told of it but that it died."""
    lines = recorded.lines(name)
    up = max(place for place, line in enumerate(lines) if engine(kind).phase(line))
    found = {engine(kind).diagnose(lines[:end], 1).kind for end in range(0, up + 1, 5)}
    assert found == {FailureKind.UNKNOWN}


def test_sglang_a_missing_file_of_the_model_is_named_and_never_tried_again() -> None:
    failure = engine("sglang").diagnose(recorded.tail(f"{SGLANG}/missing-processor-exit1.log"), 1)
    assert failure.kind is FailureKind.MODEL
    assert any("preprocessor_config.json" in line for line in failure.lines)
    assert "doctor" in failure.fix


def test_sglang_a_taken_port_is_named_though_the_server_never_ends() -> None:
    failure = engine("sglang").diagnose(recorded.tail(f"{SGLANG}/http-port-taken.log"), -9)
    assert (failure.kind, failure.cause) == (FailureKind.PORT, "its HTTP port was taken by another process")
    assert "14150" in failure.lines[0]


def test_sglang_a_killed_scheduler_is_named() -> None:
    failure = engine("sglang").diagnose(recorded.tail(f"{SGLANG}/hybrid-mtp-reference-flags.log"), -9)
    assert failure.kind is FailureKind.CRASH
    assert failure.cause.startswith("a process of it was killed (SIGKILL)")
    assert "dmesg" in failure.fix
    assert "crashed with exit code -9" in failure.lines[0]


def test_sglang_an_assertion_in_a_kernel_is_quoted() -> None:
    failure = engine("sglang").diagnose(recorded.tail(f"{SGLANG}/scheduler-assert.log"), -9)
    assert (failure.kind, failure.cause) == (FailureKind.CRASH, "an assertion in a GPU kernel failed")
    assert "probability tensor contains either `inf`, `nan` or element < 0" in failure.lines[0]


def test_sglang_a_scheduler_that_was_killed_is_told_as_that() -> None:
    failure = engine("sglang").diagnose(recorded.tail(f"{SGLANG}/scheduler-killed.log"), -9)
    assert failure.kind is FailureKind.CRASH
    assert failure.cause.startswith("a process of it was killed (SIGKILL)")
    assert "Subprocess scheduler_0 (pid=1293) crashed with exit code -9" in failure.lines[0]


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
        ("file-cut-exit1", FailureKind.MODEL, "data is not within the file bounds"),
        ("no-gguf-exit1", FailureKind.MODEL, "invalid magic"),
        ("port-taken-exit1", FailureKind.PORT, "couldn't bind HTTP server socket"),
        ("context-too-large-exit1", FailureKind.MEMORY_KV, "bad_alloc"),
    ],
)
def test_llamacpp_a_start_that_fails_is_explained(name: str, kind: FailureKind, words: str) -> None:
    failure = engine("llamacpp").diagnose(recorded.tail(f"{LLAMA}/{name}.log"), 1)
    assert failure.kind is kind
    assert any(words in line for line in failure.lines)
