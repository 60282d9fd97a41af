"""Which collectives of the ranks belong together, from what each rank says of its collectives."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

IN_PLACE = frozenset({"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"})
ROOTED = frozenset({"broadcast_", "reduce_", "gather_", "scatter_"})

CollectiveCall = dict[str, Any]
"""What a rank says of one of its collectives; see `collectives.describe`."""
Plan = dict[str, Any]
"""How it runs: as recorded if empty; ``skip`` (why it does not), or ``even`` (items of the largest
part, in memory of its own, with ``dtype`` and ``root``)."""


def plans(every: Sequence[Sequence[CollectiveCall]]) -> list[list[Plan]]:
    """How the collectives of each rank run, in their order.

    They meet in the order in which the ranks of a group have them. What meets nothing is not run,
    so that no rank waits for one that does not come.

    Args:
        every: of each rank, its collectives in order.
    """
    found: list[list[Plan]] = [[{} for _ in of] for of in every]
    groups = sorted({tuple(call["group"]) for of in every for call in of})
    for group in groups:
        members = group or tuple(range(len(every)))
        own = [
            [at for at, call in enumerate(every[rank]) if tuple(call["group"]) == group]
            for rank in members
        ]
        pairs = list(zip(members, own, strict=True))
        kept = _align([[every[rank][at]["kind"] for at in places] for rank, places in pairs])
        met = [[places[i] for i in of] for places, of in zip(own, kept, strict=True)]
        for (rank, places), meeting in zip(pairs, met, strict=True):
            for at in set(places) - set(meeting):
                found[rank][at] = {"skip": "other ranks of its group run none at its place"}
        for column in zip(*met, strict=True):
            here = list(zip(members, column, strict=True))
            told = [every[rank][at] for rank, at in here]
            plan = {} if fits(told) else _plan_even_parts(told)
            for rank, at in here:
                found[rank][at] = plan
    return found


def _align(kinds: Sequence[Sequence[str]]) -> list[list[int]]:
    """Of each rank, the positions of those that all ranks have in this order."""
    common = list(kinds[0])
    for other in kinds[1:]:
        if common != list(other):
            matcher = SequenceMatcher(None, common, other, autojunk=False)
            blocks = matcher.get_matching_blocks()
            common = [common[block.a + i] for block in blocks for i in range(block.size)]
    found: list[list[int]] = []
    for of in kinds:
        at = -1
        found.append([at := of.index(kind, at + 1) for kind in common])
    return found


def fits(every: Sequence[CollectiveCall]) -> bool:
    """Whether what the ranks of a group give and take in one collective goes together."""
    first, ranks = every[0], len(every)
    if any(of["dtype"] != first["dtype"] or of["root"] != first["root"] for of in every):
        return False
    kind = first["kind"]
    if kind == "alltoall_base_":
        return _all_to_all_fits(every)
    if kind == "alltoall_":
        if any(len(of["sent"]) != ranks or len(of["got"]) != ranks for of in every):
            return False
        sizes = [(of["got"], of["sent"]) for of in every]
        return all(sizes[j][0][i] == sizes[i][1][j] for i in range(ranks) for j in range(ranks))
    if kind in ("gather_", "scatter_"):
        return _rooted_fits(every, first["root"])
    if any(of["sent"] != first["sent"] for of in every):
        return False
    if kind in IN_PLACE or not first["sent"]:
        return True
    return all(of["got"] == _received_sizes(kind, first["sent"], ranks) for of in every)


def _received_sizes(kind: str, sent: list[int], ranks: int) -> list[int]:
    """Items of the tensors that a rank receives into where all send alike."""
    if kind == "reduce_scatter_":
        alike = len(sent) == ranks and len(set(sent)) == 1
        return sent[:1] if alike else [-1]
    if "reduce_scatter" in kind:
        return [size // ranks if size % ranks == 0 else -1 for size in sent]
    if kind in ("allgather_", "allgather_coalesced_"):
        return sent * ranks
    return [size * ranks for size in sent]


def _rooted_fits(every: Sequence[CollectiveCall], root: int) -> bool:
    """Of a gather and of a scatter: the root has a part a rank, the others have none."""
    if root >= len(every):
        return False
    many, one = ("got", "sent") if every[0]["kind"] == "gather_" else ("sent", "got")
    size = every[0][one]
    return all(
        of[one] == size and of[many] == (size * len(every) if rank == root else [])
        for rank, of in enumerate(every)
    )


def _all_to_all_fits(every: Sequence[CollectiveCall]) -> bool:
    ranks = len(every)
    table = []
    for of in every:
        got, given = of["splits"]
        given = given or [sum(of["sent"]) // ranks] * ranks
        got = got or [sum(of["got"]) // ranks] * ranks
        if len(given) != ranks or len(got) != ranks:
            return False
        table.append((got, given))
    return all(table[j][0][i] == table[i][1][j] for i in range(ranks) for j in range(ranks))


def _plan_even_parts(every: Sequence[CollectiveCall]) -> Plan:
    """As many items as the rank with the most has, in parts of one size."""
    kind, ranks = every[0]["kind"], len(every)
    largest = max(sum(of["sent"]) for of in every)
    if kind == "scatter_":
        largest = max(largest, *(sum(of["got"]) * ranks for of in every))
    divided = "scatter" in kind or "alltoall" in kind
    return {
        "even": -(-largest // ranks) if divided else largest,
        "dtype": every[0]["dtype"],
        "root": every[0]["root"] % len(every),
    }
