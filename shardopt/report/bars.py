"""Bars of block characters that also read without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

FULL = "█"
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")


def bar(fraction: float, width: int, style: str = "cyan") -> Text:
    """A bar of ``fraction`` of ``width`` columns, to an eighth of a column."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    if fraction > 0:
        eighths = max(1, eighths)
    return Text(FULL * (eighths // 8) + _EIGHTHS[eighths % 8], style=style)


def stacked(parts: Sequence[tuple[float, str, str]], total: float, width: int) -> Text:
    """Parts side by side on a scale where ``width`` columns are ``total``.

    Args:
        parts: value, character and style of each part.
    """
    text = Text()
    reached, drawn = 0.0, 0
    for value, character, style in parts:
        # round the running sum, not the parts, so that equal sums give equal lengths
        reached += value
        end = round(min(1.0, reached / total) * width) if total > 0 else 0
        text.append(character * (end - drawn), style=style)
        drawn = end
    return text
