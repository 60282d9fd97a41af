"""Messages to the user, on stderr: stdout belongs to the result."""

from __future__ import annotations

import sys
from collections.abc import Iterable


def warn(text: str) -> None:
    """Something that may make the result wrong; shown even under ``--quiet``."""
    print(f"shardopt: warning: {text}", file=sys.stderr)


def note(texts: Iterable[str], *, quiet: bool) -> None:
    """What is good to know; nothing under ``--quiet``."""
    if not quiet:
        for text in texts:
            print(f"shardopt: {text}", file=sys.stderr)
