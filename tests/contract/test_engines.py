"""Every engine plug-in keeps to engines/base.py: what it launches, asks and understands; junk never breaks it."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import recorded
from tests.contract.samples import NONCE, SAMPLES, Sample, engine, sglang_reply, spec
from tokenmill import configfile, launch, plugins
from tokenmill.core.records import NULL
from tokenmill.core.server import Failure
from tokenmill.engines import llamacpp, sglang_log, vllm_log
from tokenmill.engines.base import Rendered, Sampling
from tokenmill.engines.logs import NO_PHASES
from tokenmill.errors import BrokenError
from tokenmill.launch import Place

every_engine = pytest.mark.parametrize("kind", plugins.names("engines"))
many = settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

RENDERED = Rendered(
    messages=msgspec.Raw(b'[{"role":"user","content":"hi"}]'),
    tools=msgspec.Raw(b'[{"type":"function","function":{"name":"f"}}]'),
    ids=msgspec.Raw(b"[1,2,3]"),
    tokens=3,
)


# -- launching ---------------------------------------------------------------------------------------------------------
@every_engine
def test_a_server_listens_on_loopback_and_on_its_own_port(kind: str) -> None:
    argv = engine(kind).command(spec(kind, port=30017)).argv
    assert "30017" in argv
    if "--host" in argv:
        assert argv[argv.index("--host") + 1] == "127.0.0.1"
    assert not {"0.0.0.0", "::"} & set(argv)  # the scripted server has no --host: it knows no other address


@every_engine
def test_arguments_reach_the_command_line(kind: str) -> None:
    args = {"max-things": 80, "on": True, "off": False, "several": [1, 2], "a-table": {"method": "mtp"}}
    argv = engine(kind).command(spec(kind, args=args)).argv
    assert argv[-8:] == ("--max-things", "80", "--on", "--several", "1", "2", "--a-table", '{"method": "mtp"}')
    assert "--off" not in argv


def made_of(kind: str, *, gpu: int = 0, files: str = "", **fields: Any) -> dict[str, str]:
    made = configfile.validate({"model": {"path": "/m", "name": "qwen"}, "prompts": {"path": "p"}}, "test")
    one = spec(kind, **fields)
    return launch.made_of(engine(kind), one, made, Place(0, (gpu,)), files)


@every_engine
def test_a_launch_is_known_again_whatever_its_ports_and_identity(kind: str) -> None:
    first = made_of(kind, args={"context": 8192})
    assert made_of(kind, port=30021, internal_port=31070, nonce="tm-ba9876543210", args={"context": 8192}) == first
    assert made_of(kind, port=8192, args={"context": 8192}) == first, "a number of the arguments is no port"
    assert launch.unlike(first, made_of(kind, args={"context": 4096})) == "flag context"
    assert launch.unlike(first, made_of(kind, args={"context": 8192, "seed": 1}, gpu=1)) == "cards, flag seed"
    assert launch.unlike(first, made_of(kind, args={"context": 8192}, files="another template")) == "model"


@every_engine
def test_the_pages_to_ask_are_paths(kind: str) -> None:
    probes = engine(kind).probes(spec(kind))
    assert all(path.startswith("/") for path in (probes.identity, probes.health, probes.info))
    assert probes.metrics == "" or probes.metrics.startswith("/")


# -- who answers -------------------------------------------------------------------------------------------------------
@every_engine
def test_the_right_server_is_no_stranger_and_a_wrong_one_is_named(kind: str) -> None:
    sample = SAMPLES[kind]
    assert engine(kind).stranger(spec(kind), sample.identity(NONCE)) == ""
    assert sample.other in engine(kind).stranger(spec(kind), sample.wrong)


@pytest.mark.parametrize("kind", [kind for kind in plugins.names("engines") if kind != "openai"])
def test_an_earlier_life_of_the_same_server_is_a_stranger(kind: str) -> None:
    assert engine(kind).stranger(spec(kind), SAMPLES[kind].identity("tm-ffffffffffff")) != ""


# -- junk --------------------------------------------------------------------------------------------------------------
words = st.text(max_size=40)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**63), st.floats(allow_nan=False), st.text(max_size=5),
    st.just([]), st.just({}), st.lists(st.integers(), max_size=2), st.just([{}]), st.just([None]),
)  # fmt: skip


@st.composite
def spoilt(draw: st.DrawFn, good: bytes) -> bytes:
    """A good page with one value replaced, cut, or overwritten in a place."""
    how = draw(st.sampled_from(["value", "cut", "bytes"]))
    at = draw(st.integers(0, len(good)))
    if how == "cut":
        return good[:at]
    if how == "bytes":
        return good[:at] + draw(st.binary(max_size=12)) + good[at + draw(st.integers(0, 12)) :]
    try:
        tree = json.loads(good)
    except ValueError:
        return good[at:]
    node, key = tree, draw(st.sampled_from(sorted(tree)))
    while isinstance(node[key], dict | list) and node[key] and draw(st.integers(0, 4)):
        node = node[key]
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
    node[key] = draw(leaves)
    return json.dumps(tree).encode()


def junk(good: bytes) -> st.SearchStrategy[bytes]:
    return st.one_of(st.binary(max_size=200), spoilt(good), spoilt(good))


@every_engine
@settings(many, max_examples=300)
@given(data=st.data())
def test_a_junk_page_is_a_stranger_and_at_worst_a_broken_answer(kind: str, data: st.DataObject) -> None:
    sample, one = SAMPLES[kind], engine(kind)
    page = data.draw(junk(data.draw(st.sampled_from([sample.identity(NONCE), sample.info, sample.reply]))))
    assert isinstance(one.stranger(spec(kind), page), str)
    for read in (lambda: one.info(spec(kind), page), lambda: one.decode(page)):
        try:
            read()
        except BrokenError:
            pass


@every_engine
@many
@given(tail=st.lists(words, max_size=8), exit_code=st.one_of(st.none(), st.integers(-64, 255)), percent=st.integers(0))
def test_junk_in_a_log_never_raises_and_any_end_has_a_diagnosis(
    kind: str, tail: list[str], exit_code: int | None, percent: int
) -> None:
    one, text = engine(kind), "\n".join(tail)
    failure = one.diagnose(tail, exit_code)
    assert isinstance(failure, Failure)
    assert failure.cause
    for line in (*tail, f"Loading safetensors checkpoint shards: {percent}%"):
        for reached in (0.0, 60.0, 99.0):
            phase = one.phase(line, reached)
            assert phase is None or reached <= phase.percent <= 100
    one.info(spec(kind), SAMPLES[kind].info, text)
    assert one.load(text).tokens is None
    assert one.too_long(text) in (True, False)
    assert one.lost(text) in (True, False)


DEEP = b'{"other":' + b"[" * 100_000


@every_engine
def test_an_answer_nested_without_end_is_broken(kind: str) -> None:
    with pytest.raises(BrokenError):
        engine(kind).decode(DEEP)


@every_engine
def test_a_page_nested_without_end_is_a_strangers(kind: str) -> None:
    assert engine(kind).stranger(spec(kind), DEEP) != ""


@pytest.mark.parametrize("number", ["", ".", "1.2.3", "none", "46,592"])
def test_vllm_a_garbled_log_beside_the_info_page_never_raises(number: str) -> None:
    log = f"KV cache size: {number} tokens\nDefaulting max_num_seqs to {number} for LLM_CLASS usage context."
    said = engine("vllm").info(spec("vllm"), SAMPLES["vllm"].info, log)
    assert said.limits.kv_tokens == (46_592 if number == "46,592" else None)


def test_vllm_commas_alone_are_no_number() -> None:
    said = engine("vllm").info(spec("vllm"), SAMPLES["vllm"].info, "KV cache size: , tokens")
    assert said.limits.kv_tokens is None


with_metrics = pytest.mark.parametrize(
    "kind", [kind for kind in plugins.names("engines") if engine(kind).probes(spec(kind)).metrics]
)


def gauges(kind: str) -> str:
    """The lines of a metrics page that an engine reads, without labels for brevity."""
    return re.sub(r"\{[^}]*\}", "", "".join(re.findall(rf"^(?:{NAMES}).*\n", SAMPLES[kind].metrics, re.MULTILINE)))


NAMES = r"\w+:(?:num_\w*(?:running|queue|waiting)\w*|\w*tokens_total|n_decode_total|running|requests_processing)\b"


@with_metrics
def test_a_metrics_page_that_was_cut_never_raises(kind: str) -> None:
    page = gauges(kind)
    assert engine(kind).load(page).tokens is not None
    for end in range(len(page)):
        engine(kind).load(page[:end])


@with_metrics
@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_a_gauge_that_is_no_number_is_no_evidence_of_work(kind: str, value: str) -> None:
    load = engine(kind).load(re.sub(r" \S+$", f" {value}", gauges(kind), flags=re.MULTILINE))
    assert (load.tokens, load.accept_length) == (None, None)
    assert not load.running
    assert not load.queued


# -- starts and retries ------------------------------------------------------------------------------------------------
TABLES = {"sglang": sglang_log.PHASES, "vllm": vllm_log.PHASES, "llamacpp": llamacpp.PHASES}
every_table = pytest.mark.parametrize("kind", TABLES)


@every_table
def test_a_row_holds_from_what_was_reached_to_what_it_tells(kind: str) -> None:
    for row in TABLES[kind].rows:
        assert row.since <= row.start <= (row.end or row.start) <= 100, row
        assert (row.end is not None) == bool(re.compile(row.pattern).groups), row


@every_table
def test_of_rows_for_one_line_the_later_pass_comes_first(kind: str) -> None:
    rows = TABLES[kind].rows
    for pattern in {row.pattern for row in rows}:
        since = [row.since for row in rows if row.pattern == pattern]
        assert since == sorted(set(since), reverse=True), pattern


@every_engine
def test_limits_are_for_phases_that_there_are(kind: str) -> None:
    limits = engine(kind).phase_limits
    names = {row.name for row in TABLES.get({"fake": "vllm"}.get(kind, kind), NO_PHASES).rows}
    assert set(limits) <= names
    assert all(limit >= 60 for limit in limits.values())
    assert not {name for name in limits if any(word in name for word in ("weights", "graphs", "compile", "memory"))}


SGLANG_FLAG, VLLM_FLAG = "mem-fraction-static", "gpu-memory-utilization"


@pytest.mark.parametrize(
    ("kind", "args", "wanted", "words"),
    [
        ("sglang", {SGLANG_FLAG: 0.9}, {SGLANG_FLAG: 0.85}, "mem-fraction-static 0.90 → 0.85"),
        ("sglang", {"mem_fraction_static": 0.9}, {"mem_fraction_static": 0.85}, "mem-fraction-static 0.90 → 0.85"),
        ("sglang", {"x": 1}, {"x": 1, SGLANG_FLAG: 0.7}, "mem-fraction-static the engine's own choice → 0.70"),
        ("vllm", {VLLM_FLAG: 0.8}, {VLLM_FLAG: 0.75}, "gpu-memory-utilization 0.80 → 0.75"),
        ("vllm", {}, {VLLM_FLAG: 0.87}, "gpu-memory-utilization 0.92 → 0.87"),
        ("fake", {SGLANG_FLAG: 0.9}, {SGLANG_FLAG: 0.85}, "mem-fraction-static 0.90 → 0.85"),
    ],
)
def test_less_memory_is_a_step_and_said_in_words(
    kind: str, args: dict[str, Any], wanted: dict[str, Any], words: str
) -> None:
    given = dict(args)
    assert engine(kind).less_memory(args) == (wanted, words)
    assert args == given, "what was given is left as it is"


@every_engine
def test_less_memory_ends(kind: str) -> None:
    args: Mapping[str, Any] = {}
    for _ in range(10):
        less = engine(kind).less_memory(args)
        if less is None:
            return
        args = less[0]
    raise AssertionError(args)


def test_an_engine_without_a_fraction_has_no_less() -> None:
    assert engine("llamacpp").less_memory({"ctx-size": 8192}) is None
    assert engine("openai").less_memory({"mem-fraction-static": 0.9}) is None
    assert engine("fake").less_memory({}) is None
    assert engine("vllm").less_memory({"kv-cache-memory-bytes": 10**10}) is None, "it overrides the share"


# -- requests ----------------------------------------------------------------------------------------------------------
def at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def request(kind: str, sampling: Sampling, *, thinking: bool = True, seed: int | None = None) -> Any:
    made = engine(kind).encode(spec(kind), RENDERED, sampling, request_id="tm-1-7", thinking=thinking, seed=seed)
    assert made.path.startswith("/")
    return json.loads(made.body)


@every_engine
def test_a_request_carries_all_sampling(kind: str) -> None:
    sample: Sample = SAMPLES[kind]
    wanted: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "presence_penalty": 1.5}
    body = request(kind, Sampling(777, extra={"repetition_penalty": 1.05, "stop": ["x"]}, **wanted))
    assert at(body, sample.max_tokens) == 777
    fields = at(body, sample.sampling)
    assert {**wanted, "repetition_penalty": 1.05, "stop": ["x"]}.items() <= fields.items()


@every_engine
def test_sampling_that_nobody_asked_for_is_left_to_the_server(kind: str) -> None:
    body = request(kind, Sampling(777))
    fields = at(body, SAMPLES[kind].sampling)
    assert not {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed", "sampling_seed"} & set(fields)


@pytest.mark.parametrize("kind", [kind for kind in plugins.names("engines") if engine(kind).renders == "chat"])
def test_the_thoughts_of_earlier_turns_go_along_under_both_names_that_servers_read(kind: str) -> None:
    said = {"role": "assistant", "content": "5", "reasoning_content": "two and three"}
    asked = [{"role": "user", "content": "2 + 3?"}, said, {"role": "user", "content": "and 1?"}]
    rendered = Rendered(msgspec.Raw(msgspec.json.encode(asked)), NULL)
    made = engine(kind).encode(spec(kind), rendered, Sampling(9), request_id="r", thinking=True, seed=None)
    sent = json.loads(made.body)["messages"]
    assert sent == [asked[0], {**said, "reasoning": "two and three"}, asked[2]]


@pytest.mark.parametrize("kind", [kind for kind in plugins.names("engines") if engine(kind).renders != "ids"])
def test_a_request_asks_for_the_runs_thinking_mode(kind: str) -> None:
    """Where tokenmill renders, the mode stands in the ids; else the request must carry it."""
    for thinking in (True, False):
        if engine(kind).renders == "server":
            made = engine(kind).template_request(RENDERED.messages, RENDERED.tools, thinking)
            body = json.loads(made.body)
        else:
            body = request(kind, Sampling(10), thinking=thinking)
        assert body["chat_template_kwargs"] == {"enable_thinking": thinking}
        assert body["tools"] == [{"type": "function", "function": {"name": "f"}}]


@every_engine
def test_a_seed_reaches_the_request(kind: str) -> None:
    assert "4242" in json.dumps(request(kind, Sampling(10), seed=4242))


# -- answers -----------------------------------------------------------------------------------------------------------
@every_engine
def test_a_good_answer_gives_text_ids_and_counts(kind: str) -> None:
    sample = SAMPLES[kind]
    completion = engine(kind).decode(sample.reply)
    assert (completion.text, completion.finish_reason) == (sample.text, sample.finish)
    assert json.loads(bytes(completion.output_ids)) == sample.ids
    assert (completion.prompt_tokens, completion.output_tokens) == (sample.prompt_tokens, sample.output_tokens)
    assert not completion.damaged


@every_engine
def test_ids_have_no_spaces_however_the_server_prints_them(kind: str) -> None:
    sample = SAMPLES[kind]
    loose = json.dumps(json.loads(sample.reply), indent=1).encode()
    assert bytes(engine(kind).decode(loose).output_ids) == json.dumps(sample.ids, separators=(",", ":")).encode()


@every_engine
def test_an_answer_that_was_cut_anywhere_is_broken(kind: str) -> None:
    reply = SAMPLES[kind].reply
    for end in range(len(reply)):
        with pytest.raises(BrokenError):
            engine(kind).decode(reply[:end])


@every_engine
def test_half_a_surrogate_pair_is_replaced_and_told(kind: str) -> None:
    sample = SAMPLES[kind]
    odd = json.dumps(json.loads(sample.reply)).replace("Paris", "Pa\\ud83dris").encode()
    completion = engine(kind).decode(odd)
    assert completion.damaged
    assert completion.text == sample.text.replace("Paris", "Pa\ufffdris")
    assert json.loads(bytes(completion.output_ids)) == sample.ids


@every_engine
def test_an_error_page_is_no_answer(kind: str) -> None:
    for body in (b"{}", b"[]", b"null", b"", b"<html></html>", b'{"error":{"message":"Loading model"}}'):
        try:
            completion = engine(kind).decode(body)
        except BrokenError:
            continue
        assert completion.finish_reason not in ("stop", "length")


# -- single engines ----------------------------------------------------------------------------------------------------
def test_sglang_an_aborted_answer_with_status_200_is_broken() -> None:
    body = sglang_reply({"type": "abort", "message": "Abort in waiting queue", "status_code": 503})
    with pytest.raises(BrokenError, match="Abort in waiting queue"):
        engine("sglang").decode(body)


def test_sglang_sends_the_ids_as_they_are_and_an_id_to_abort_by() -> None:
    body = request("sglang", Sampling(10))
    assert (body["input_ids"], body["rid"]) == ([1, 2, 3], "tm-1-7")
    abort = engine("sglang").abort("tm-1-7")
    assert abort is not None
    assert (abort.path, json.loads(abort.body)) == ("/abort_request", {"rid": "tm-1-7"})


def test_sglang_tells_the_accept_length_of_an_answer() -> None:
    assert engine("sglang").decode(SAMPLES["sglang"].reply).accept_length == 3.13


def test_vllm_gives_the_prompts_ids_back() -> None:
    assert bytes(engine("vllm").decode(SAMPLES["vllm"].reply).prompt_ids).startswith(b"[1,9690,198,2683,")


def test_vllm_a_thought_inside_the_content_is_kept_as_it_is() -> None:
    completion = engine("vllm").decode(recorded.reply("vllm-0.32-cpu/replies.json", "thinking_inline"))
    assert completion.text.startswith("<think>2 + 2 = 4")
    assert completion.text.endswith("</think> answer 20")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_a_thought_in_a_field_of_its_own_is_put_back_before_the_answer(kind: str, field: str) -> None:
    tree = json.loads(SAMPLES[kind].reply)
    tree["choices"][0]["message"][field] = "It is Paris."
    assert engine(kind).decode(json.dumps(tree).encode()).text == f"<think>\nIt is Paris.\n</think>\n\n{CAPITAL}"


CAPITAL = SAMPLES["vllm"].text


def test_a_dead_vllm_says_so_in_its_answer() -> None:
    assert engine("vllm").lost(recorded.reply("vllm-0.32-cpu/replies.json", "engine_dead").decode())
    assert not engine("vllm").lost(recorded.reply("vllm-0.32-cpu/replies.json", "wrong_model").decode())


SGLANG_TOO_LONG = next(
    line for line in recorded.lines("sglang-0.5.11-h200/hybrid-mtp-reference-flags.log") if "Requested token" in line
)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("sglang", SGLANG_TOO_LONG),
        ("vllm", recorded.reply("vllm-0.32-cpu/replies.json", "too_long").decode()),
        ("llamacpp", recorded.reply("llamacpp-cpu/replies.json", "too_long").decode()),
    ],
)
def test_a_prompt_that_is_too_long_is_told_from_other_refusals(kind: str, body: str) -> None:
    assert engine(kind).too_long(body)
    assert not engine(kind).too_long(recorded.reply("vllm-0.32-cpu/replies.json", "wrong_model").decode())


def test_llamacpp_renders_through_the_server() -> None:
    replies = "llamacpp-cpu/replies.json"
    text = engine("llamacpp").read_template(recorded.reply(replies, "apply_template"))
    assert text.endswith("<|im_start|>assistant\n")
    ids = engine("llamacpp").read_tokens(recorded.reply(replies, "tokenize"))
    assert bytes(ids).startswith(b"[1,9690,198,")
    assert json.loads(engine("llamacpp").ids_request(text).body)["content"] == text


@pytest.mark.parametrize("page", [b"", b"{}", b"null", b'{"prompt":null}', b"<html></html>"])
def test_llamacpp_a_junk_rendering_is_a_broken_answer(page: bytes) -> None:
    with pytest.raises(BrokenError):
        engine("llamacpp").read_template(page)
    with pytest.raises(BrokenError):
        engine("llamacpp").read_tokens(page)


def test_sglang_counts_its_own_rendering() -> None:
    """0.5.11 gives no ids of a chat prompt and counts them; 0.5.23 gives both."""
    old = {"choices": [{"index": 0, "message": {"content": "x"}}], "usage": {"prompt_tokens": 37, "total_tokens": 38}}
    new = {**old, "choices": [{"index": 0, "prompt_token_ids": [1, 2, 3]}]}
    assert engine("sglang").read_own_rendering(json.dumps(old).encode()) == (NULL, 37)
    assert engine("sglang").read_own_rendering(json.dumps(new).encode()) == (msgspec.Raw(b"[1,2,3]"), 37)


@pytest.mark.parametrize("tools", [RENDERED.tools, NULL])
def test_vllm_renders_tools_and_leaves_the_calls_in_the_text(tools: msgspec.Raw) -> None:
    """By "auto", its default, it refuses them without a parser, and with one takes the calls out (serving_chat.py)."""
    asked = Rendered(RENDERED.messages, tools)
    made = engine("vllm").encode(spec("vllm"), asked, Sampling(9), request_id="r", thinking=True, seed=None)
    body = json.loads(made.body)
    assert (body.get("tool_choice"), "tools" in body) == ((None, False) if tools == NULL else ("none", True))
    own = Sampling(9, extra={"tool_choice": "auto"})
    made = engine("vllm").encode(spec("vllm"), asked, own, request_id="r", thinking=True, seed=None)
    assert json.loads(made.body)["tool_choice"] == "auto"
