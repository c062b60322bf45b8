"""What keeps a process out of a Ray cluster, and what helps. Knows nothing of Ray."""

from tokenmill.errors import PluginError, PreflightError
from tokenmill.machine.ports import answers

REFUSALS = {
    "AuthToken": "RAY_AUTH_MODE=token here, and the ~/.ray/auth_token of its head on every machine",
    "ersion mismatch": "the same Ray and the same Python on every machine",
}
"""What Ray says to a process that it does not let in, and what helps."""

WANTED = "fleet.address = HOST:PORT of Ray's head, where `ray status --address HOST:PORT` answers; or auto"
"""Where nobody answers: ray://… and a name alone are no such addresses."""


def knock(address: str) -> None:
    """Raises PreflightError where nobody answers; "auto" finds out by itself."""
    if address != "auto" and not answers(address):
        raise PreflightError(f"nobody answers at fleet.address = {address!r}", fix=WANTED)


def refused(error: PluginError) -> PreflightError:
    """Ray does not let this process in."""
    fix = next((fix for words, fix in REFUSALS.items() if words in str(error)), "ray status")
    return PreflightError(str(error), fix=fix)
