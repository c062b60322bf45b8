"""What `plan` foretells, against what real llama.cpp servers then say of themselves."""

from typing import Any

import pytest

from tests.chaos.conftest import write_short_prompts
from tests.harness import Case
from tokenmill import configfile, events, plan


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("args", "concurrency", "running"),
    [
        pytest.param({"parallel": 3}, "auto", 3, id="slots given"),
        pytest.param({}, 2, 2, id="slots from what is asked for", marks=pytest.mark.long),
    ],
)
def test_a_run_is_as_planned(llama: Case, args: dict[str, Any], concurrency: Any, running: int) -> None:
    write_short_prompts(llama.folder / "prompts.jsonl", 4)
    args = {"ctx-size": 512 * running, "threads": 1, "threads-batch": 1, "threads-http": 2, **args}
    path = llama.write(engine={"args": args}, fleet={"servers": 1}, generation={"concurrency": concurrency})
    found = plan.build(configfile.load(path))
    assert (found.servers, found.running_per_server, found.context) == (1, running, 512)
    assert llama.run() == 0, llama.output()
    told = [event for event, _ in events.read(llama.run_folder.events)]
    assert [event for event in told if event.kind == "plan"] == []
    [ready] = [event.text for event in told if event.kind == "ready"]
    assert ready.endswith(f": it takes {running} requests at once, limited by {found.limited_by}")
    assert plan.build(configfile.load(path)).pending == 0
