"""Speculation that does not pay, servers unlike the others, servers that fall behind: told with values, or not."""

import random
from itertools import pairwise

import pytest

from tokenmill.auditing import expected
from tokenmill.core import speculation
from tokenmill.core.audit import LASTED_S, Audit, Expected
from tokenmill.core.status import Finding

EAGLE = Expected("EAGLE", 4.0, "the drafter is a LlamaForCausalLMEagle3, the flags say EAGLE")


def audit(servers: int = 1, asked: Expected = EAGLE, *, tells: bool = True) -> Audit:
    made = Audit(asked)
    for server in range(servers):
        made.begin(server, f"s{server}", tells=tells)
    return made


def answers(
    made: Audit, server: int, count: int, *, tokens: int = 400, rate: float = 40.0, length: float | None = None
) -> None:
    for _ in range(count):
        made.answer(server, tokens, tokens / rate, length)


def kinds(made: Audit) -> list[tuple[str, str]]:
    return [(finding.kind, finding.server) for finding in made.findings()]


# -- one server --------------------------------------------------------------------------------------------------------
def test_speculation_asked_for_and_never_seen_is_absent() -> None:
    made = audit()
    answers(made, 0, 49)
    assert kinds(made) == []
    answers(made, 0, 10, tokens=31)
    assert kinds(made) == [], "short answers tell nothing"
    answers(made, 0, 1)
    assert kinds(made) == [("speculation_absent", "s0")]
    assert "EAGLE" in made.findings()[0].text
    made.report(0, [2.5])
    assert kinds(made) == []


def test_an_engine_that_tells_no_accept_length_is_not_blamed_for_it() -> None:
    for made in (audit(tells=False), audit(asked=Expected())):
        answers(made, 0, 200)
        assert kinds(made) == []


@pytest.mark.parametrize(("length", "useless"), [(1.0, True), (1.14, True), (1.16, False), (2.9, False)])
@pytest.mark.parametrize("source", ["answers", "reports"])
def test_an_accept_length_of_about_one_is_told_with_the_drafter(length: float, useless: bool, source: str) -> None:
    made = audit()
    if source == "answers":
        answers(made, 0, 49, length=length)
        assert kinds(made) == []
        answers(made, 0, 1, length=length)
    else:
        made.report(0, [length] * 199)
        assert kinds(made) == []
        made.report(0, [length])
    assert kinds(made) == ([("speculation_useless", "s0")] if useless else [])
    if useless:
        (found,) = made.findings()
        assert f"accept length {length:.2f} over" in found.text
        assert "LlamaForCausalLMEagle3, the flags say EAGLE" in found.text
        assert "doctor" in found.fix


def test_a_finding_at_its_limit_does_not_come_and_go() -> None:
    made = audit()
    seen = []
    for step in range(400):
        made.report(0, [1.13 + 0.05 * (step // 20 % 2)] * 25)
        seen.append(bool(kinds(made)))
    assert sum(one != other for one, other in pairwise(seen)) == 1
    made.report(0, [1.4] * 500)
    assert kinds(made) == []


@pytest.mark.parametrize(("length", "maximal"), [(3.95, True), (3.85, False)])
def test_an_accept_length_that_is_too_good_is_told_after_a_whole_window(length: float, maximal: bool) -> None:
    made = audit()
    answers(made, 0, 199, length=length)
    assert kinds(made) == []
    answers(made, 0, 1, length=length)
    assert kinds(made) == ([("speculation_maximal", "s0")] if maximal else [])


# -- against the others ------------------------------------------------------------------------------------------------
def test_one_server_unlike_the_others_is_named_also_where_it_is_better() -> None:
    for odd in (1.9, 4.2):
        made = audit(4, Expected("EAGLE", 8.0))
        for server in range(4):
            answers(made, server, 50, length=odd if server == 2 else 2.9)
        assert kinds(made) == [("speculation_unlike", "s2")]
        assert made.findings()[0].text == f"accept length {odd:.2f} over 50 answers, the other servers' median is 2.90"


def test_of_two_servers_the_lower_one_is_named() -> None:
    made = audit(2)
    answers(made, 0, 50, length=3.0)
    answers(made, 1, 50, length=1.8)
    assert kinds(made) == [("speculation_unlike", "s1")]


def test_a_sound_fleet_whose_prompts_get_harder_has_no_finding() -> None:
    """Accept lengths and rates of single answers vary by half; all drift together; one card is twice as fast."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    made = audit(8)
    found: list[Finding] = []
    for step in range(40_000):
        server = rng.randrange(8)
        hard = step / 40_000
        rate = (60 - 30 * hard) * (2.0 if server == 3 else 1.0) * rng.lognormvariate(0, 0.3)
        tokens = int(rng.lognormvariate(6, 1))
        made.answer(server, tokens, tokens / rate, min(4.0, max(1.0, rng.gauss(3.2 - 1.2 * hard, 0.5))))
        if step % 100 == 0:
            found += made.findings()
            assert made.fallen(step * 10.0) == []
    assert found == []


# -- a server that falls behind ----------------------------------------------------------------------------------------
def test_an_unlike_card_is_told_and_never_restarted() -> None:
    made = audit(3, Expected())
    for hour in range(10):
        for server in range(3):
            answers(made, server, 100, rate=10.0 if server == 1 else 40.0)
        assert kinds(made) == [("server_slow", "s1")]
        assert made.findings()[0].text == "10.0 tokens a second in a slot, the other servers' median is 40.0"
        assert made.fallen(hour * 3600.0) == []


@pytest.mark.parametrize("figure", ["tokens a second", "accept length"])
def test_a_server_that_was_like_the_others_and_falls_far_below_has_gone_bad_once_that_lasts(figure: str) -> None:
    def work(sick: bool) -> None:
        for server in range(3):
            low = sick and server == 1
            rate = 10.0 if low and figure == "tokens a second" else 40.0
            answers(made, server, 200, rate=rate, length=1.5 if low and figure == "accept length" else 3.0)

    made = audit(3)
    work(sick=False)
    assert made.fallen(0.0) == []
    work(sick=True)
    assert made.fallen(100.0) == made.fallen(100.0 + LASTED_S - 1) == []
    ((server, cause),) = made.fallen(100.0 + LASTED_S)
    assert server == 1
    assert figure in cause
    # It is restarted; that it is low in its next lives, too, is its nature: told, and no more.
    for life in (1, 2):
        made.begin(1, "s1", tells=True)
        work(sick=False)
        assert made.fallen(10_000.0 * life) == []
        work(sick=True)
        assert made.fallen(10_000.0 * life + 1) == made.fallen(10_000.0 * life + 2 * LASTED_S) == []


def test_a_frozen_machine_is_no_server_that_falls_behind() -> None:
    made = audit(3, Expected())
    for server in range(3):
        answers(made, server, 100)
    made.fallen(0.0)
    answers(made, 1, 100, rate=1.0)
    assert made.fallen(1.0) == []
    answers(made, 1, 100)
    assert made.fallen(300.0) == []
    answers(made, 1, 100, rate=1.0)
    assert made.fallen(2.0 + LASTED_S) == []


# -- what the flags and the log say ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "algorithm", "longest"),
    [
        ({"speculative-algorithm": "EAGLE", "speculative-num-steps": 3}, "EAGLE", 4.0),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}, "NGRAM", 8.0),
        ({"speculative-config": {"method": "mtp", "num_speculative_tokens": 2}}, "MTP", 3.0),
        ({"speculative-config": '{"method": "mtp", "num_speculative_tokens": 2}'}, "MTP", 3.0),
        ({"spec-type": "draft-mtp", "spec-draft-n-max": 5}, "draft-mtp", 6.0),
        ({"model-draft": "small.gguf"}, "a draft model", None),
        ({"spec-type": "none"}, "", None),
        ({"parallel": 4}, "", None),
    ],
)
def test_the_flags_say_what_to_expect(args: dict[str, object], algorithm: str, longest: float | None) -> None:
    found = expected(args)
    assert (found.algorithm, found.longest) == (algorithm, longest)


@pytest.mark.parametrize(
    ("line", "length"),
    [
        ("[t] Decode batch, #running-req: 40, mamba usage: 0.80, accept len: 3.13, accept rate: 0.71", 3.13),
        ("INFO SpecDecoding metrics: Mean acceptance length: 2.40, Accepted throughput: 9.10 tokens/s", 2.4),
        ("slot 0 | draft acceptance = 0.61000 (   61 accepted /   100 generated), mean len =  2.83", 2.83),
        ("Decode batch, #running-req: 40, token usage: 0.74, cuda graph: True, #queue-req: 0", None),
        ("a line that says acceptance of nothing", None),
    ],
)
def test_a_log_line_tells_an_accept_length(line: str, length: float | None) -> None:
    assert speculation.told(line) == length
