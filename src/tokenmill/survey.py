"""What a cluster's machines say before a run, each of its own part: doctor's findings, and a plan. Starts no node.

Where no cluster answers, it is said, and this machine stands for the others.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from tokenmill import plan
from tokenmill.checks.base import Context, Finding
from tokenmill.cluster.base import needs_ray
from tokenmill.config import Config
from tokenmill.core.roll import named
from tokenmill.doctor import NODE_CHECKS, examine
from tokenmill.errors import TokenmillError, UnreachedError
from tokenmill.folder import RunFolder
from tokenmill.leftovers import survivors
from tokenmill.planning.answer import Plan
from tokenmill.steps import Tell


def planned(config: Config, tokens_per_s: float | None = None) -> Plan:
    """As plan.build."""
    try:
        with needs_ray():
            from tokenmill.cluster.visit import plans
        nodes = sorted(plans(config), key=lambda found: found.node)
    except TokenmillError as error:
        alone = plan.build(config, tokens_per_s=tokens_per_s)
        words = f"one, this machine ({error}); each machine of the cluster adds as much again"
        return replace(alone, nodes_from=words)
    return plan.build(config, tokens_per_s=tokens_per_s, nodes=nodes)


def examined(config: Config, skip: Sequence[str], tell: Tell) -> list[Finding]:
    """What doctors find on the machines: each finding once, with the nodes that it holds for as its subject."""
    wanted = tuple(name for name in skip if name in NODE_CHECKS)
    try:
        with needs_ray():
            from tokenmill.cluster.visit import findings
        told = findings(config, wanted)
    except TokenmillError as error:
        words = f"the machines of the cluster are not examined, but for this one: {error}"
        folder = RunFolder(config.folder)
        own = examine(Context(config, folder, survivors(folder)), wanted, checks=NODE_CHECKS, tell=tell)
        starts = isinstance(error, UnreachedError)  # no cluster runs: a run starts one of this machine
        return [Finding("nodes", "unknown" if starts else "fail", "", words, error.fix), *own]
    held: dict[tuple[str, ...], list[str]] = {}
    first: dict[tuple[str, ...], Finding] = {}
    for node, found in sorted(told.items()):
        for each in found:
            key = (each.check, each.level, each.subject, each.message)
            held.setdefault(key, []).append(node)
            first.setdefault(key, each)
    every = [(named(nodes, len(told)), first[key]) for key, nodes in held.items()]
    return [replace(found, subject=whose, message=found.text) for whose, found in every]
