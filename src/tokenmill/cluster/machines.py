"""The machines of a Ray cluster as nodes: names, and how many GPUs each node takes. Pure: Ray's own rows come in."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

NAME = 100
"""Characters of a name: a folder's has 255 at most, and paths below it some hundred more."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One that fits: `id` and `address` are Ray's, `gpus` is how many its node takes of Ray."""

    name: str
    id: str
    address: str
    gpus: int


def fitting(
    rows: Iterable[Mapping[str, Any]], gpus: str | Sequence[int | str], known: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Machine]:
    """The living ones of `ray.nodes()` that have what `fleet.gpus` asks for: "none", "all" that Ray has there, or as
    many as are named. `known` are names given before, by id: a machine keeps its own when another of that name joins,
    or it would get a second node."""
    living = [row for row in rows if row["Alive"]]
    new = [row for row in living if row["NodeID"] not in known]
    names = Counter([*map(_name, new), *(known[row["NodeID"]] for row in living if row["NodeID"] in known)])
    for row in living:
        name, there = _name(row), int(row["Resources"].get("GPU", 0))
        wanted = {"none": 0, "all": there}[gpus] if isinstance(gpus, str) else len(gpus)
        if gpus == "none" or 0 < wanted <= there:
            unique = known.get(row["NodeID"]) or (name if names[name] == 1 else f"{name}-{row['NodeID'][:6]}")
            yield Machine(unique, row["NodeID"], row["NodeManagerAddress"], wanted)


def _name(row: Mapping[str, Any]) -> str:
    """Ray's name of a machine, its address where nobody gave it one, as a folder's name: "..", too, is none."""
    return re.sub(r"^\.|[^A-Za-z0-9._-]", "_", row["NodeName"] or row["NodeManagerAddress"])[:NAME]
