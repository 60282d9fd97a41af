"""Text from files, such as names, as a terminal may show it."""

from __future__ import annotations

import re

_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)
"""C0 and C1 control characters, halves of surrogate pairs, and what turns the direction of text."""


def printable(text: str) -> str:
    """The text with an escape such as ``\\x1b`` for every character that would steer a terminal."""
    return _CONTROLS.sub(lambda match: ascii(match[0])[1:-1], text)
