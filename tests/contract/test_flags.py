"""Flags that an installed engine knows, read from its own sources: excerpts of real ones stand in tests/data/flags.

A real flag that is refused stops a run that would have worked, so that is what most of these are about.
"""

import pytest

from tests.contract import recorded
from tests.contract.samples import engine, spec
from tests.reference import ARGS as REFERENCE
from tokenmill import configfile, plugins
from tokenmill.checks.base import Context, Finding
from tokenmill.checks.engine import check_engine
from tokenmill.engines.base import Engine, normal
from tokenmill.folder import RunFolder
from tokenmill.machine.packages import Package

OLD, NEW = "mamba-scheduler-strategy", "mamba-radix-cache-strategy"


def excerpts(*names: str) -> str:
    return "\n".join(recorded.text(f"flags/{name}.txt") for name in names)


SOURCES = {
    "sglang-0.5.11": {
        "sglang/srt/server_args.py": excerpts("sglang-0.5.11.server_args.1", "sglang-0.5.11.server_args.2"),
    },
    "sglang-0.5.23": {
        "sglang/srt/server_args.py": excerpts("sglang-0.5.23.server_args"),
        **{
            f"sglang/srt/arg_groups/fields/{name}.py": excerpts(f"sglang-0.5.23.fields.{name.strip('_')}")
            for name in ("spec", "exec_", "schedule", "model", "parallel")
        },
    },
    "vllm-0.32": {
        "vllm/engine/arg_utils.py": excerpts("vllm-0.32.arg_utils"),
        "vllm/entrypoints/launchers/cli_args.py": excerpts("vllm-0.32.cli_args"),
    },
}


def known(version: str) -> frozenset[str]:
    return of(version).flags(SOURCES[version])


def of(version: str) -> Engine:
    return engine(version.partition("-")[0])


def test_sglang_0_5_11_knows_all_flags_of_the_reference_run() -> None:
    assert REFERENCE.keys() <= known("sglang-0.5.11")
    assert {"tp-size", "tensor-parallel-size", "record-nolora-graph"} <= known("sglang-0.5.11")


def test_sglang_0_5_23_knows_all_but_the_renamed_one() -> None:
    assert REFERENCE.keys() - known("sglang-0.5.23") == {OLD}
    assert {"tp-size", "tensor-parallel-size", "sampling-backend", "disable-cuda-graph"} <= known("sglang-0.5.23")
    assert "fp8-gemm-backend" in known("sglang-0.5.23")


def test_sglang_a_renamed_flag_has_its_successor_in_either_direction() -> None:
    assert engine("sglang").successor(OLD, known("sglang-0.5.23")) == NEW
    assert engine("sglang").successor(NEW, known("sglang-0.5.11")) == OLD
    assert engine("sglang").successor("no-such-flag", known("sglang-0.5.11")) == ""


def test_vllm_knows_the_flags_of_both_its_parsers() -> None:
    """The engine's are declared one by one, the server's are the fields of a class."""
    assert {"speculative-config", "max-model-len", "max-num-seqs", "enable-prefix-caching"} <= known("vllm-0.32")
    assert {"gpu-memory-utilization", "device-memory-utilization", "enforce-eager"} <= known("vllm-0.32")
    assert {"chat-template", "enable-auto-tool-choice", "host", "port"} <= known("vllm-0.32")


@pytest.mark.parametrize("version", SOURCES)
def test_a_mistyped_flag_is_unknown(version: str) -> None:
    assert not {"speculative-algoritm", "max-model-length", "context-lenght", "help-me", ""} & known(version)


@pytest.mark.parametrize("version", SOURCES)
def test_sources_that_tell_nothing_give_no_flags_so_that_nothing_is_refused(version: str) -> None:
    assert of(version).flags({}) == frozenset()
    assert of(version).flags(dict.fromkeys(SOURCES[version], "")) == frozenset()


@pytest.mark.parametrize(
    ("version", "flag"),
    [
        ("vllm-0.32", "no-enable-prefix-caching"),
        ("vllm-0.32", "no-enforce-eager"),
        ("vllm-0.32", "no-enable-auto-tool-choice"),
        ("sglang-0.5.11", "no-record-nolora-graph"),
        ("sglang-0.5.23", "no-enable-tf32-matmul"),
    ],
)
def test_a_switch_can_be_turned_off(version: str, flag: str) -> None:
    assert flag in known(version)


# -- what the doctor makes of them -------------------------------------------------------------------------------------
def context_for(**engine: object) -> Context:
    data = {"model": {"path": "/models/qwen", "name": "qwen"}, "prompts": {"path": "p.jsonl"}, "engine": engine}
    made = configfile.validate(data, "test")
    return Context(made, RunFolder(made.folder), [])


def refused(version: str, args: dict[str, object]) -> list[Finding]:
    """What the doctor says of the arguments that it refuses, where this version is installed."""
    kind = version.partition("-")[0]
    context = context_for(kind=kind, args=args)
    launched = [word for word in of(version).command(spec(kind)).argv if word.startswith("--")]
    left_out = {"left out of the excerpts": " ".join(f'"{flag}"' for flag in launched)}
    installed = Package(version.partition("-")[2], {**SOURCES[version], **left_out})
    context.read_package = lambda *_: installed
    context.read_gpus = list
    return [finding for finding in check_engine(context) if finding.level == "fail"]


def complaints(version: str, args: dict[str, object]) -> dict[str, str]:
    """Refused arguments and the fix for each."""
    return {finding.subject.removeprefix("engine.args."): finding.fix for finding in refused(version, args)}


def test_the_doctor_lets_the_reference_run_pass_and_names_the_successor_elsewhere() -> None:
    assert complaints("sglang-0.5.11", dict(REFERENCE)) == {}
    assert complaints("sglang-0.5.23", dict(REFERENCE)) == {OLD: f"use {NEW}"}
    assert complaints("sglang-0.5.11", {NEW: "extra_buffer"}) == {NEW: f"use {OLD}"}


def test_the_doctor_takes_underscores_for_dashes() -> None:
    assert complaints("sglang-0.5.11", {"context_length": 8192, "mem_fraction_static": 0.9}) == {}


@pytest.mark.parametrize("flag", ["tp", "speculative-algo", "context-len"])
@pytest.mark.parametrize("version", ["sglang-0.5.11", "sglang-0.5.23"])
def test_the_doctor_lets_a_shortened_flag_pass_as_the_engine_does(version: str, flag: str) -> None:
    """SGLang's own messages say `--tp`, which no source declares: argparse completes what is unique."""
    assert complaints(version, {flag: 1}) == {}


@pytest.mark.parametrize(
    ("version", "flag"), [("sglang-0.5.11", "speculative"), ("sglang-0.5.23", "speculative-num"), ("vllm-0.32", "max")]
)
def test_the_doctor_refuses_a_beginning_of_several_flags_as_the_engine_does(version: str, flag: str) -> None:
    assert complaints(version, {flag: 1}).keys() == {flag}


def test_the_doctor_lets_a_dotted_flag_of_vllm_pass() -> None:
    assert complaints("vllm-0.32", {"speculative-config.method": "ngram"}) == {}
    assert complaints("vllm-0.32", {"speculativ-config.method": "ngram"}).keys() == {"speculativ-config.method"}


@pytest.mark.parametrize(
    ("version", "flag", "decides"),
    [
        ("sglang-0.5.11", "host", "loopback"),
        ("sglang-0.5.11", "port", "fleet.port"),
        ("sglang-0.5.11", "nccl_port", "fleet.port"),
        ("sglang-0.5.11", "weight-version", "identity"),
        ("sglang-0.5.11", "model-path", "model.path"),
        ("vllm-0.32", "host", "loopback"),
        ("vllm-0.32", "port", "fleet.port"),
        ("vllm-0.32", "served_model_name", "model.name"),
    ],
)
def test_the_doctor_refuses_what_tokenmill_sets_itself_and_says_what_decides_it(
    version: str, flag: str, decides: str
) -> None:
    """An address, a port or an identity of the user's own would make every server look like a stranger."""
    (finding,) = refused(version, {flag: "x"})
    assert finding.subject == f"engine.args.{flag}"
    assert decides in finding.message


IDENTITY = {"--host", "--port", "--nccl-port", "--model", "--model-path", "--alias"}
IDENTITY |= {"--served-model-name", "--weight-version"}


@pytest.mark.parametrize("kind", plugins.names("engines"))
def test_where_an_engine_listens_and_what_it_goes_by_is_not_the_users_to_set(kind: str) -> None:
    made = engine(kind)
    launched = {normal(word) for word in IDENTITY.intersection(made.command(spec(kind)).argv)}
    assert not made.package or launched == made.own_flags.keys() & launched
    assert all(flag == normal(flag) for flag in made.own_flags), "the doctor looks them up by their usual spelling"


@pytest.mark.parametrize("flag", ["weight-ver", "hos", "served-model"])
def test_the_doctor_refuses_a_beginning_of_what_tokenmill_sets_itself(flag: str) -> None:
    """argparse completes it, and the last one counts: the user's."""
    assert complaints("sglang-0.5.11", {flag: "x"}).keys() == {flag}


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "fake", "args": {"slots": 4}},
        {"kind": "openai", "addresses": ["http://127.0.0.1:8000"]},
        {"kind": "openai", "command": ["my-server", "--port", "{port}"], "python": "/no/such/python"},
        {"kind": "llamacpp", "command": ["llama-server"], "python": "/no/such/python"},
    ],
)
def test_the_doctor_asks_no_environment_for_an_engine_that_does_not_come_from_one(settings: dict[str, object]) -> None:
    assert [finding for finding in check_engine(context_for(**settings)) if finding.level == "fail"] == []
