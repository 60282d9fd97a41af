"""Matches two recordings of one program by the names of what ran."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

GRAM = 8
"""Names in a row that must agree before a place counts as the same."""
COMMON = 512
"""Grams with more places than this are too common to help."""
LOOK_AHEAD = 64
"""Most names that one side may have in addition at one place."""
KEPT = 3
"""Names in a row that must agree after such a place."""


def align(short: Sequence[str], long: Sequence[str]) -> list[tuple[int, int]]:
    """Places where ``short`` occurs in ``long``, which may hold it several times.

    Args:
        short: say, the ops of one iteration.
        long: say, those of several.

    Returns:
        Pairs of positions with equal names, in the order of ``long``; each position of ``long`` at
        most once, each of ``short`` at most once in one occurrence.
    """
    size = min(GRAM, len(short), len(long))
    if size == 0:
        return []
    votes = _votes(short, long, size)
    if not votes:
        return []
    taken: list[int] = []
    found: list[tuple[int, int]] = []
    most = max(votes.values())
    for shift, count in sorted(votes.items(), key=lambda v: (-v[1], v[0])):
        if 2 * count < most:
            break
        if all(abs(shift - other) >= len(short) for other in taken):
            taken.append(shift)
            found += _walk(short, long, shift)
    once: dict[int, int] = {}
    for i, j in found:
        once.setdefault(j, i)
    return sorted(((i, j) for j, i in once.items()), key=lambda pair: pair[1])


def _votes(short: Sequence[str], long: Sequence[str], size: int) -> Counter[int]:
    """How many grams agree under a shift of ``short`` against ``long``."""
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for j in range(len(long) - size + 1):
        places[tuple(long[j : j + size])].append(j)
    votes: Counter[int] = Counter()
    for i in range(len(short) - size + 1):
        found = places.get(tuple(short[i : i + size]), [])
        if len(found) <= COMMON:
            votes.update(j - i for j in found)
    return votes


def _walk(short: Sequence[str], long: Sequence[str], shift: int) -> list[tuple[int, int]]:
    """Pairs from a shift on, skipping names that only one side has."""
    i, j = max(0, -shift), max(0, shift)
    pairs = []
    while i < len(short) and j < len(long):
        if short[i] == long[j]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
            continue
        step = _resume(short[i : i + LOOK_AHEAD], long[j : j + LOOK_AHEAD])
        if step is None:
            i, j = i + 1, j + 1
        else:
            i, j = i + step[0], j + step[1]
    return pairs


def _resume(short: Sequence[str], long: Sequence[str]) -> tuple[int, int] | None:
    """The fewest names to skip on both sides until they agree again."""
    places: dict[tuple[str, ...], int] = {}
    for b in range(len(long)):
        places.setdefault(tuple(long[b : b + KEPT]), b)
    grams = [tuple(short[a : a + KEPT]) for a in range(len(short))]
    steps = [(a, places[gram]) for a, gram in enumerate(grams) if gram in places]
    return min(steps, key=sum, default=None)
