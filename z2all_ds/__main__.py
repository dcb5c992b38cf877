"""The command `z2all`, also as `python -m z2all_ds`."""

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command. Ctrl-C while it still imports its modules ends it without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from z2all_ds import cli

    signal.signal(signal.SIGINT, handler)
    cli.main()


if __name__ == "__main__":
    main()
