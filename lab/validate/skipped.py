"""Why rows of a file of measurements are left out."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from predictor.hardware.device_names import PROFILES
from predictor.hardware.loader import DEFAULT_HARDWARE


def merged_lines(problems: Sequence[str]) -> list[str]:
    """Problems ``file:line: why``, those of lines that follow one another for the same reason as
    one, ``file:first-last: why``."""
    merged: list[tuple[str, int, int, str]] = []
    for text in problems:
        name, line, why = text.split(":", 2)
        file, first, last, same = merged[-1] if merged else ("", 0, 0, "")
        if (file, last + 1, same) == (name, int(line), why):
            merged[-1] = (file, first, last + 1, why)
        else:
            merged.append((name, int(line), int(line), why))
    return [
        f"{file}:{first}{f'-{last}' if last > first else ''}:{why}"
        for file, first, last, why in merged
    ]


def no_profile(name: str, column: str = "gpu") -> str:
    """Why rows of a device are left out: the nearest profile by name, and how to write one.

    Args:
        column: of the table that names the device.
    """
    known = {profile: profile for _, profile in PROFILES}
    known |= {words[0].lower(): profile for words, profile in reversed(PROFILES)}
    words = [word.lower() for word in name.replace("-", " ").split()]
    near = [known[hit] for word in words for hit in get_close_matches(word, known, 1, 0.65)]
    given = (
        f"{column} is '{name}', which no profile describes" if name else f"{column} is not given"
    )
    return (
        f"{given}; the nearest is {near[0] if near else DEFAULT_HARDWARE}: "
        f"name it as `base:` of a file with the groups that differ (CONTRIBUTING.md)"
    )
