"""Which rank a trace is of."""

from __future__ import annotations

import re
from collections.abc import Mapping

IN_NAME = re.compile(r"(?:rank|worker|(?:^|[-_.])e[gt])[-_]?(\d{1,7})", re.IGNORECASE)
OF_IN_NAME = re.compile(r"rank[-_]?\d+[-_]?of[-_]?(\d{1,7})", re.IGNORECASE)


def rank_of(
    source: str, distributed: object, *, name_first: bool = False
) -> tuple[int, int | None, tuple[str, ...]]:
    """Rank, world size (None: unknown), and notes on what had to be guessed.

    Args:
        source: path of the file, whose name often holds the rank.
        distributed: what the document says, such as Kineto's ``distributedInfo``.
        name_first: prefer the rank in the name.
    """
    name = re.split(r"[/\\:]", source)[-1]
    said = distributed if isinstance(distributed, Mapping) else {}
    rank, world_size = _count(said.get("rank"), 0), _count(said.get("world_size"), 1)
    if world_size is None and (match := OF_IN_NAME.search(name)):
        world_size = int(match[1]) or None
    match = IN_NAME.search(name)
    if match and (rank is None or name_first):
        return int(match[1]), world_size, ()
    if rank is not None:
        return rank, world_size, ()
    return 0, world_size, ("no rank in the trace or its name; taken for rank 0",)


def _count(value: object, least: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return None
    return value
