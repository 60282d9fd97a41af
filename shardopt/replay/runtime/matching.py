"""Matches the collectives of the ranks, from the descriptions that each rank gives."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

IN_PLACE = frozenset({"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"})
ROOTED = frozenset({"broadcast_", "reduce_", "gather_", "scatter_"})

CollectiveCall = dict[str, Any]
"""Description of a collective by one rank; see `collectives.describe`."""
Plan = dict[str, Any]
"""Way to run a collective: as recorded if empty; ``skip`` (reason not to), or ``even`` (items of
the largest part, in memory of its own, with ``dtype`` and ``root``)."""


def plans(every: Sequence[Sequence[CollectiveCall]]) -> list[list[Plan]]:
    """Plan the collectives of each rank, in their order.

    Collectives meet in the order in which the ranks of a group have them. A collective without a
    match is not run, so that no rank waits for another that never comes.

    Args:
        every: the collectives of each rank in order.
    """
    plan_of: list[list[Plan]] = [[{} for _ in calls] for calls in every]
    groups = sorted({tuple(call["group"]) for calls in every for call in calls})
    for group in groups:
        members = group or tuple(range(len(every)))
        own = [
            [at for at, call in enumerate(every[rank]) if tuple(call["group"]) == group]
            for rank in members
        ]
        pairs = list(zip(members, own, strict=True))
        common = _align([[every[rank][at]["kind"] for at in places] for rank, places in pairs])
        matched = [[places[i] for i in calls] for places, calls in zip(own, common, strict=True)]
        for (rank, places), meeting in zip(pairs, matched, strict=True):
            for at in set(places) - set(meeting):
                plan_of[rank][at] = {"skip": "other ranks of its group run none at its place"}
        for column in zip(*matched, strict=True):
            here = list(zip(members, column, strict=True))
            descriptions = [every[rank][at] for rank, at in here]
            plan = {} if fits(descriptions) else _plan_even_parts(descriptions)
            for rank, at in here:
                plan_of[rank][at] = plan
    return plan_of


def _align(kinds: Sequence[Sequence[str]]) -> list[list[int]]:
    """Return for each rank the positions of the collectives that all ranks have in one order."""
    common = list(kinds[0])
    for other in kinds[1:]:
        if common != list(other):
            matcher = SequenceMatcher(None, common, other, autojunk=False)
            blocks = matcher.get_matching_blocks()
            common = [common[block.a + i] for block in blocks for i in range(block.size)]
    positions: list[list[int]] = []
    for rank_kinds in kinds:
        at = -1
        positions.append([at := rank_kinds.index(kind, at + 1) for kind in common])
    return positions


def fits(every: Sequence[CollectiveCall]) -> bool:
    """Return True if the sizes that the ranks of a group give and take in a collective agree."""
    first, ranks = every[0], len(every)
    if any(call["dtype"] != first["dtype"] or call["root"] != first["root"] for call in every):
        return False
    kind = first["kind"]
    if kind == "alltoall_base_":
        return _all_to_all_fits(every)
    if kind == "alltoall_":
        if any(len(call["sent"]) != ranks or len(call["got"]) != ranks for call in every):
            return False
        sizes = [(call["got"], call["sent"]) for call in every]
        return all(sizes[j][0][i] == sizes[i][1][j] for i in range(ranks) for j in range(ranks))
    if kind in ("gather_", "scatter_"):
        return _rooted_fits(every, first["root"])
    if any(call["sent"] != first["sent"] for call in every):
        return False
    if kind in IN_PLACE or not first["sent"]:
        return True
    return all(call["got"] == _received_sizes(kind, first["sent"], ranks) for call in every)


def _received_sizes(kind: str, sent: list[int], ranks: int) -> list[int]:
    """Return the items of the tensors that a rank receives into where all send alike."""
    if kind == "reduce_scatter_":
        alike = len(sent) == ranks and len(set(sent)) == 1
        return sent[:1] if alike else [-1]
    if "reduce_scatter" in kind:
        return [size // ranks if size % ranks == 0 else -1 for size in sent]
    if kind in ("allgather_", "allgather_coalesced_"):
        return sent * ranks
    return [size * ranks for size in sent]


def _rooted_fits(every: Sequence[CollectiveCall], root: int) -> bool:
    """Check a gather or scatter: the root has a part a rank, the others have none."""
    if root >= len(every):
        return False
    many, single = ("got", "sent") if every[0]["kind"] == "gather_" else ("sent", "got")
    size = every[0][single]
    return all(
        call[single] == size and call[many] == (size * len(every) if rank == root else [])
        for rank, call in enumerate(every)
    )


def _all_to_all_fits(every: Sequence[CollectiveCall]) -> bool:
    ranks = len(every)
    table = []
    for call in every:
        received, sent = call["splits"]
        sent = sent or [sum(call["sent"]) // ranks] * ranks
        received = received or [sum(call["got"]) // ranks] * ranks
        if len(sent) != ranks or len(received) != ranks:
            return False
        table.append((received, sent))
    return all(table[j][0][i] == table[i][1][j] for i in range(ranks) for j in range(ranks))


def _plan_even_parts(every: Sequence[CollectiveCall]) -> Plan:
    """Plan an exchange in parts of one size, as large as the rank with the most items needs."""
    kind, ranks = every[0]["kind"], len(every)
    largest = max(sum(call["sent"]) for call in every)
    if kind == "scatter_":
        largest = max(largest, *(sum(call["got"]) * ranks for call in every))
    divided = "scatter" in kind or "alltoall" in kind
    return {
        "even": -(-largest // ranks) if divided else largest,
        "dtype": every[0]["dtype"],
        "root": every[0]["root"] % len(every),
    }
