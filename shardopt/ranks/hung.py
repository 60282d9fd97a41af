"""Which of several ranks that report nothing is the one that the others wait for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SAMPLE_S = 1.0
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waits for a device"}
"""State of a process in /proc/PID/stat that shows why it does not answer (man 5 proc)."""


def hung_words(pids: Sequence[int], silence_s: float) -> str:
    """What to say of ranks of which none reported anything for so long.

    A rank that is stopped is named; else one that computes while the others wait.
    """
    before, states = _ticks(pids), _states(pids)
    head = f"no rank reported anything for {silence_s:g} s"
    named = [f"rank {rank} is {STATES[s]}" for rank, s in states.items() if s in STATES]
    if not named:
        time.sleep(SAMPLE_S)
        after = _ticks(pids)
        busy = [rank for rank, ticks in after.items() if ticks > before.get(rank, ticks)]
        if len(busy) < len(pids):
            named = [f"rank {rank} computes without an end" for rank in busy]
    return f"{head}; {'; '.join(named) or 'every rank waits for another'}"


def _states(pids: Sequence[int]) -> Mapping[int, str]:
    return {rank: fields[0] for rank, fields in _stats(pids).items()}


def _ticks(pids: Sequence[int]) -> Mapping[int, int]:
    """Rank -> processor time so far."""
    return {rank: int(fields[11]) + int(fields[12]) for rank, fields in _stats(pids).items()}


def _stats(pids: Sequence[int]) -> Mapping[int, list[str]]:
    """Rank -> fields of /proc/PID/stat after the name, from the state on."""
    found = {}
    for rank, pid in enumerate(pids):
        with suppress(OSError):
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
            found[rank] = text.rpartition(")")[2].split()
    return found
