"""What one rank can hold of every table, and what that takes in the segments of a cycle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.bound.choices import BoundChoice
from search.bound.rank_excess import ONE_A_RANK
from search.bound.relaxation import Cut

Array = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True)
class RankItems:
    """Items that a rank can hold: some shards of one option of a table; and the cycle they slow.

    A cycle takes ``constant``, plus ``rest`` of all tables, plus what the slowest rank has in every
    segment. Where a rank holds several shards, the least of the option count.

    Args:
        table: of every item, ``[items]``, rising; tables are numbered from 0.
        part: share of its table, ``[items]``.
        memory: share of a rank's memory, ``[items, kinds]``.
        work: in every segment in ms, ``[items, segments]``.
        rest: what its part of the table adds to the cycle elsewhere in ms, ``[items]``.
        constant: of the cycle in ms.
        most: up to where the work of a segment counts, ``[segments]``.
        adds_up: segments in which a rank works; in the others it receives a message,
            ``[segments]``.
        least: what the slowest rank takes at least in every segment, ``[segments]``.
        least_rest: what all tables add elsewhere at least.
    """

    table: Ints
    part: Array
    memory: Array
    work: Array
    rest: Array
    constant: float
    most: Array
    adds_up: NDArray[np.bool_]
    least: Array
    least_rest: float

    @property
    def tables(self) -> int:
        """Number of tables."""
        return int(self.table[-1]) + 1


def rank_items(
    choices: Sequence[BoundChoice],
    shards_of: Callable[[BoundChoice], Array],
    group: Ints,
    loads: Array,
    cut: Cut,
    ceiling: Array,
    caps: Array,
) -> RankItems:
    """The items of a set of exchanges under a cut.

    Args:
        choices: table by table.
        shards_of: least loads of a choice's shards, ``[shards, COLUMNS]``.
        group: position of every choice's lookup group in the slopes of the cut, ``[choices]``.
        loads: mean of every choice over the ranks, ``[choices, COLUMNS]``.
        ceiling: up to where the slopes of messages hold, ``[groups, COLUMNS]``.
        caps: bytes of the roomiest rank, ``[kinds]``.
    """
    slopes = np.concatenate([cut.segments, cut.messages])
    adds_up = np.arange(len(slopes)) < len(cut.segments)
    means = np.einsum("nc,snc->ns", loads, slopes[:, group])
    other = cut.slope - cut.uneven.sum(axis=0)
    rest = np.einsum("nc,nc->n", loads, other[group]) - means.sum(axis=1)
    tables = np.unique([c.table for c in choices], return_inverse=True)[1]
    first = np.flatnonzero(np.diff([-1, *tables]))
    found: dict[tuple[float, ...], None] = {}
    longest = np.zeros((len(choices), len(slopes)))
    for i, choice in enumerate(choices):
        shards = shards_of(choice)
        work = np.maximum(0.0, np.einsum("hc,sc->hs", shards, slopes[:, group[i]]))
        memory = np.array([(m.hbm_bytes, m.ddr_bytes) for m in choice.option.memory])
        memory = memory / np.maximum(caps, 0.5)  # no byte fits where there are none
        longest[i] = work.max(axis=0)
        most = 1 if choice.option.sharding_type in ONE_A_RANK else len(shards)
        least = np.sort(np.hstack([memory, work]), axis=0).cumsum(axis=0)[:most]
        for j, row in enumerate(least, start=1):
            part = j / len(shards)
            found[float(tables[i]), part, part * float(rest[i]), *row.tolist()] = None
    rows = np.array(list(found))
    least_mean = np.minimum.reduceat(np.maximum(0.0, means), first).sum(axis=0)
    most_ms = np.full(len(slopes), np.inf)
    for s in np.flatnonzero(~adds_up):
        # a message of one exchange: the tangent holds up to the ceiling of each of its columns
        tops = (slopes[s].max(axis=0) * (ceiling * (slopes[s] > 0)).sum(axis=0))[
            slopes[s].any(axis=0)
        ]
        most_ms[s] = tops.min(initial=np.inf)
    return RankItems(
        table=rows[:, 0].astype(np.intp),
        part=rows[:, 1],
        memory=rows[:, 3 : 3 + len(caps)],
        work=rows[:, 3 + len(caps) :],
        rest=rows[:, 2],
        constant=cut.constant,
        most=most_ms,
        adds_up=adds_up,
        least=np.minimum(
            most_ms, np.maximum(least_mean, np.minimum.reduceat(longest, first).max(axis=0))
        ),
        least_rest=float(np.minimum.reduceat(rest, first).sum()),
    )
