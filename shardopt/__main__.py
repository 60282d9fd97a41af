"""`python -m shardopt`, and the script `shardopt`: the command."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """Run one command; Ctrl-C ends it with its message while its imports run, too."""
    _leave_working_directory()
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _end)
    from shardopt.cli import app

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return app.main()


def _leave_working_directory() -> None:
    """`python -m` looks for modules there first: a file `numpy.py` would run. Only where shardopt
    itself lies there is it meant."""
    here, packages = os.getcwd(), os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if sys.orig_argv[1:2] == ["-m"] and sys.path[:1] == [here] and here != packages:
        del sys.path[0]


def _end(*_: object) -> None:
    # an exception would be taken for a failure of whatever is just being imported
    os.write(2, b"shardopt: error: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    raise SystemExit(main())
