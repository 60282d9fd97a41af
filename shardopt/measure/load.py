"""How busy the machine is with something else, told apart from the ranks' own work."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat: user, nice, system, irq, softirq, steal."""


@dataclass(frozen=True)
class Usage:
    """Seconds since some start.

    Args:
        busy_s: of all cores together, by anyone; None where the system does not tell.
        own_s: of this process with its threads.
    """

    wall_s: float
    busy_s: float | None
    own_s: float


def usage() -> Usage:
    """As of now."""
    spent = os.times()
    return Usage(time.monotonic(), _busy_seconds(), spent.user + spent.system)


def other_cores(before: Usage, after: Usage, own_s: float) -> float | None:
    """Mean number of cores that were busy with other work between two moments.

    Args:
        own_s: seconds that all ranks on this machine worked in between.
    """
    if before.busy_s is None or after.busy_s is None:
        return None
    others = after.busy_s - before.busy_s - own_s
    # interrupts for the ranks count as other work, and the kernel counts in ticks
    return round(max(0.0, others) / max(after.wall_s - before.wall_s, 1e-9), 3)


def _busy_seconds() -> float | None:
    try:
        columns = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
        return sum(int(columns[i]) for i in _BUSY) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
