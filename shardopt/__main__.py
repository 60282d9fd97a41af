"""`python -m shardopt`, and the script `shardopt`: the command."""

from __future__ import annotations

import os
import signal
import sys

from shardopt.cli.interrupts import MESSAGES, end_at_interrupts


def main() -> int:
    """Run one command; Ctrl-C and SIGTERM end it with its message while its imports run, too."""
    _leave_working_directory()
    end_at_interrupts()
    from shardopt.cli import app

    code = app.main()
    if code in MESSAGES:  # one more, while Python shuts down, would kill the process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return code


def _leave_working_directory() -> None:
    """`python -m` looks for modules there first: a file `numpy.py` would run. Only where shardopt
    itself lies there is it meant."""
    here, packages = os.getcwd(), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.orig_argv[1:2] == ["-m"] and sys.path[:1] == [here] and here != packages:
        del sys.path[0]


if __name__ == "__main__":
    raise SystemExit(main())
