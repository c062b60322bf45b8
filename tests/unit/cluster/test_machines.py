"""Which machines of a Ray cluster get a node, under which names and with how many GPUs."""

from typing import Any

from tokenmill.cluster.machines import fitting


def row(name: str, gpus: float = 0, number: int = 1, *, alive: bool = True) -> dict[str, Any]:
    have = {"CPU": 8.0, **({"GPU": gpus} if gpus else {})}
    address = f"10.0.0.{number}"
    return {"NodeName": name, "NodeID": f"{number:06d}ff", "NodeManagerAddress": address, "Alive": alive} | {
        "Resources": have
    }


ROWS = [row("head"), row("big", 8.0, 2), row("small", 2.0, 3), row("gone", 8.0, 4, alive=False)]


def test_every_machine_gives_all_its_gpus_or_as_many_as_are_named() -> None:
    assert {machine.name: machine.gpus for machine in fitting(ROWS, "all")} == {"big": 8, "small": 2}
    assert {machine.name: machine.gpus for machine in fitting(ROWS, [0, 1, 2])} == {"big": 3}
    assert {machine.name: machine.gpus for machine in fitting(ROWS, "none")} == {"head": 0, "big": 0, "small": 0}


def test_names_are_folders_names_and_each_is_one_machines() -> None:
    twins = [row("gpu/box 1", 1.0, 5), row("gpu/box 1", 1.0, 6), row("", 1.0, 7)]
    assert [machine.name for machine in fitting(twins, "all")] == [
        "gpu_box_1-000005",
        "gpu_box_1-000006",
        "10.0.0.7",
    ]
    odd = [row("..", 0, 8), row(".", 0, 9), row("x" * 300, 0, 10), row("x" * 299, 0, 11)]
    names = [machine.name for machine in fitting(odd, "none")]
    assert names[:2] == ["_.", "_"], "a node's folder would be the run's own"
    assert len(set(names)) == 4
    assert max(map(len, names)) < 255


def test_a_machine_keeps_its_name_when_another_of_that_name_joins() -> None:
    """With a new one it would get a second node, which waits for the GPUs of the first."""
    first, second = row("gpu", 1.0, 5), row("gpu", 1.0, 6)
    known = {machine.id: machine.name for machine in fitting([first], "all")}
    assert list(known.values()) == ["gpu"]
    named = {machine.id: machine.name for machine in fitting([second, first], "all", known)}
    assert named == {first["NodeID"]: "gpu", second["NodeID"]: "gpu-000006"}
    alone = [machine.name for machine in fitting([second, first | {"Alive": False}], "all", named)]
    assert alone == ["gpu-000006"]
