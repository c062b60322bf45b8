"""The command tokenmill, also as python -m tokenmill."""

import signal


def main() -> None:
    """The console command: cli.main, whose imports take a quarter of a second in which Ctrl-C shows no traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup and background jobs ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tokenmill import cli

    cli.main()


if __name__ == "__main__":
    main()
