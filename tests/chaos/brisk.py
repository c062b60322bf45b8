"""tokenmill with 2 s instead of 20 from SIGTERM to SIGKILL: python -m tests.chaos.brisk WORDS…"""

from tokenmill import cli, supervise

GRACE_S = 2.0
"""A storm has processes that ignore SIGTERM, and runs of 10 s."""

if __name__ == "__main__":
    supervise.STOP_GRACE_S = GRACE_S  # before the command imports what takes it as a default
    cli.main()
