"""The ports: are the servers' own free?"""

from collections.abc import Iterator

from tokenmill.checks.base import Context, Finding
from tokenmill.core.capacity import servers_for
from tokenmill.machine import ports, processes


def check_ports(context: Context) -> Iterator[Finding]:
    """The servers' first ports are free; one that is not costs a warning, since a server moves."""
    config = context.config
    if config.engine.addresses:
        return
    mine = {entry.port for entry in context.ours}
    count = config.fleet.servers or (1 if config.fleet.gpus == "none" else servers_for(len(context.cards), 1, 0))
    for port in range(config.fleet.port, config.fleet.port + count):
        if port not in mine and not ports.is_free(port):
            pid = ports.listener(port)
            holder = processes.describe(pid) if pid else "another process"
            yield Finding(
                "ports", "warn", str(port), f"port {port} is taken by {holder}; a server moves to another port"
            )
