"""The ports: are the servers' own free, HTTP and internal, and outside the kernel's own range?"""

from collections.abc import Iterator

from tokenmill.checks.base import Context, Finding
from tokenmill.core.capacity import servers_for
from tokenmill.machine import ports, processes


def check_ports(context: Context) -> Iterator[Finding]:
    """The servers' first ports are free; one that is not costs a warning, since a server moves."""
    config = context.config
    if config.engine.addresses:
        return
    fleet = config.fleet
    count = fleet.servers or servers_for(len(context.cards), fleet.gpus_per_server, 0)
    mine = {
        port
        for entry in context.ours
        for port in (entry.port, *range(entry.internal_port, entry.internal_port + ports.BLOCK))
    }
    inner = range(fleet.port + ports.INTERNAL_OFFSET, fleet.port + ports.INTERNAL_OFFSET + count * ports.BLOCK)
    outer = range(fleet.port, fleet.port + count)
    for port in (*outer, *inner):
        if port not in mine and not ports.is_free(port):
            what = "port" if port in outer else "internal port"
            pid = ports.listener(port)
            holder = processes.describe(pid) if pid else "another process"
            words = f"{what} {port} is taken by {holder}; a server moves to another port"
            yield Finding("ports", "warn", str(port), words, f"ss -ltnp 'sport = :{port}'")
    low, high = ports.ephemeral()
    if low <= fleet.port + count - 1 and fleet.port <= high:
        words = f"fleet.port = {fleet.port} lies in the kernel's own range {low}-{high}: connections may take it"
        yield Finding("ports", "warn", str(fleet.port), words, f"fleet.port = {min(30000, low - 2000)}")
    try:
        assigned = ports.assign(fleet.port, max(1, count), frozenset(mine))
    except OSError as error:
        yield Finding("ports", "fail", str(fleet.port), str(error), "lower fleet.port")
        return
    first = assigned[0].http
    words = f"{count} server{'s' if count > 1 else ''} from port {first} on"
    yield Finding("ports", "ok", str(first), words)
