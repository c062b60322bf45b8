"""A plan for a run on a cluster: each machine is asked for its own part; where none answers, it is for this one."""

from msgspec.structs import replace

from tokenmill import plan
from tokenmill.config import Config
from tokenmill.errors import PreflightError
from tokenmill.planning.answer import NodePlan, Plan


def of_cluster(config: Config, tokens_per_s: float | None = None) -> Plan:
    """As plan.build."""
    try:
        nodes = _asked(config)
    except PreflightError as error:
        alone = plan.build(config, tokens_per_s=tokens_per_s)
        words = f"one, this machine ({error}); each machine of the cluster adds as much again"
        return replace(alone, nodes_from=words)
    return plan.build(config, tokens_per_s=tokens_per_s, nodes=nodes)


def _asked(config: Config) -> list[NodePlan]:
    try:
        from tokenmill.cluster.visit import plans
    except ModuleNotFoundError as error:
        raise PreflightError(f"{error.name} is not installed here", fix="pip install 'tokenmill[ray]'") from error
    return sorted(plans(config), key=lambda found: found.node)
