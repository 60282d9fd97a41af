"""Which command measures a group of a profile."""

from __future__ import annotations

ONLY = {
    "overheads": "host",
    "embedding": "embedding",
    "gemm": "gemm",
    "collectives": "collectives",
}
"""Group -> what ``shardopt calibrate --only`` calls it; all others take a whole calibration."""
SOON = {"overheads": " in less than a minute"}
"""How long that takes, where it is known."""


def measuring_command(group: str, device: str) -> str:
    """What measures a group: as little as there is a command for.

    Args:
        device: ``cuda`` or ``cpu``, of the profile.
    """
    backend = "" if device == "cpu" else " --backend nccl"
    only = f" --only {ONLY[group]}" if group in ONLY else ""
    return f"shardopt calibrate{backend}{only}"


def measuring_words(group: str, device: str) -> str:
    """The same in words, with the time that it takes where that is known."""
    return f"`{measuring_command(group, device)}` measures it{SOON.get(group, '')}"
