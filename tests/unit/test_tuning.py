"""What servers are launched with after one of them ran out of memory: less, once, for all alike."""

from collections.abc import Mapping
from typing import Any

from tokenmill.engines.fake import Fake
from tokenmill.tuning import Tuning


class Halving(Fake):
    """Lowers its fraction by 0.05."""

    def less_memory(self, args: Mapping[str, Any]) -> tuple[Mapping[str, Any], str] | None:
        fraction = args.get("fraction")
        if fraction is None:
            return None
        lowered = round(fraction - 0.05, 2)
        return {**args, "fraction": lowered}, f"fraction {fraction} → {lowered}"


def test_the_first_that_runs_out_lowers_it_for_all() -> None:
    tuning, kept = Tuning(Halving(), {"fraction": 0.9, "context": 8192}), list[dict[str, Any]]()
    tuning.recall({}, kept.append)
    assert tuning.lower({}) == "fraction 0.9 → 0.85"
    assert tuning.lower({}) == "fraction 0.9 → 0.85", "another that was launched before the change"
    assert (tuning.args, kept) == ({"fraction": 0.85}, [{"fraction": 0.85}])


def test_what_is_not_enough_then_is_for_a_person() -> None:
    tuning = Tuning(Halving(), {"fraction": 0.9})
    tuning.lower({})
    assert tuning.lower({"fraction": 0.85}) == ""


def test_a_later_start_does_not_run_out_of_it_again() -> None:
    tuning = Tuning(Halving(), {"fraction": 0.9})
    tuning.recall({"fraction": 0.85}, lambda changed: None)
    assert tuning.args == {"fraction": 0.85}
    assert tuning.lower({"fraction": 0.85}) == ""


def test_an_engine_that_has_nothing_to_lower_says_so() -> None:
    assert Tuning(Halving(), {}).lower({}) == ""
