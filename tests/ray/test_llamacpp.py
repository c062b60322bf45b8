"""Real llama.cpp servers on a real Ray cluster, and a machine that is killed in mid-run. A long form."""

from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.harness import Case, assert_whole
from tests.ray.raylets import clean_up, raylets, wait_for
from tests.unit.make import jsonl
from tokenmill.quickstart import find_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROWS = 400
NODES = ("n0", "n1", "n2", "n3")


def test_four_nodes_of_real_servers_and_one_that_dies(tmp_path: Path) -> None:
    jsonl(tmp_path / "prompts.jsonl", [{"id": f"k{n}", "prompt": f"Say the number {n}."} for n in range(ROWS)])
    case = Case(tmp_path, free_port())
    with raylets(*NODES) as cluster:
        case.write(
            model={"path": str(find_model(print))},
            engine={"kind": "llamacpp", "args": {"parallel": 4, "ctx-size": 4096, "threads": 1}},
            fleet={"cluster": "ray", "address": cluster.address, "servers": 1, "start_timeout": "120s"},
            generation={"thinking": False, "max_tokens": 12},
            gate={"cohort": 20, "max_rejected": 1.0, "max_truncated": 1.0},
        )
        try:
            run = case.start()
            wait_for(lambda: any(record.server == "n2/0" for record in case.records()), 200.0)
            cluster.kill("n2", case)
            lost = case.done()
            assert case.wait(run, 350.0) == 0
            assert lost < ROWS, "it was over before the machine was lost"
            assert_whole(case, {f"k{n}" for n in range(ROWS)})
        finally:
            print(case.output())
            clean_up(case, *NODES)
