"""Shards of two ranks divided between them: as good as trying every way, and within the caps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.improve.shard_moves import DIVIDED, Neighbourhood, Occupancy, Shards


def squares(loads: np.ndarray) -> np.ndarray:
    return (loads * loads).sum(axis=-1)


def a_neighbourhood(
    work: list[float], memory: list[float], ranks: list[int], room: float, world: int = 2
) -> Neighbourhood:
    count = len(work)
    shards = Shards(
        np.arange(count),
        np.zeros(count, dtype=np.int64),
        np.array(ranks),
        np.array(work)[:, None],
        np.column_stack([memory, np.zeros(count)]),
        np.ones((count, world), dtype=bool),
    )
    now = Occupancy(
        np.bincount(ranks, work, world)[:, None],
        np.column_stack([np.bincount(ranks, memory, world), np.zeros(world)]),
        np.full((world, 2), room),
    )
    return Neighbourhood(shards, now, squares, np.arange(count))


def after(near: Neighbourhood, change: dict[int, int]) -> tuple[float, float]:
    """Cost and largest memory with a change, counted anew."""
    ranks = near.shards.ranks.copy()
    for shard, rank in change.items():
        ranks[shard] = rank
    loads = np.bincount(ranks, near.shards.work[:, 0], len(near.now.loads))
    used = np.bincount(ranks, near.shards.memory[:, 0], len(near.now.loads))
    return float((loads * loads).sum()), float(used.max())


@settings(deadline=None, max_examples=60)
@given(data=st.data(), count=st.integers(1, 7), world=st.integers(2, 3))
def test_no_other_division_of_two_ranks_is_better(
    data: st.DataObject, count: int, world: int
) -> None:
    sizes = st.lists(st.integers(0, 9).map(float), min_size=count, max_size=count)
    work, memory = data.draw(sizes), data.draw(sizes)
    ranks = data.draw(st.lists(st.integers(0, world - 1), min_size=count, max_size=count))
    room = max(np.bincount(ranks, memory)) + data.draw(st.integers(0, 3))
    near = a_neighbourhood(work, memory, ranks, float(room), world)
    cost, change = near.divisions(0, np.random.default_rng(0))
    assert after(near, change)[0] == pytest.approx(cost)
    assert after(near, change)[1] <= room
    for other in range(1, world):
        both = [i for i, rank in enumerate(ranks) if rank in (0, other)]
        for placed in itertools.product((0, other), repeat=len(both)):
            found, used = after(near, dict(zip(both, placed, strict=True)))
            assert used > room or found >= cost - 1e-9


def test_full_ranks_exchange_several_shards_where_none_can_move_or_swap() -> None:
    """One shard of two units of memory goes where two of one unit each come from."""
    work, memory = [5.0, 5.0, 1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    near = a_neighbourhood(work, memory, [0, 0, 1, 1, 1, 1], 4.0)
    single = np.concatenate([near.moves(), near.swaps()], axis=1)
    cost, change = near.divisions(0, np.random.default_rng(0))
    assert np.isinf(single).all()
    assert after(near, change) == (cost, 4.0) == (7.0**2 + 7.0**2, 4.0)


def test_of_many_shards_some_are_divided() -> None:
    count = 5 * DIVIDED
    work = [float(i % 7 + 1) for i in range(count)]
    near = a_neighbourhood(work, [1.0] * count, [0] * count, float(count))
    cost, change = near.divisions(0, np.random.default_rng(0))
    assert 0 < len(change) <= DIVIDED
    assert cost == pytest.approx(after(near, change)[0])
    assert cost < after(near, {})[0]


def test_shards_stay_where_they_must() -> None:
    near = a_neighbourhood([5.0, 4.0, 1.0], [1.0] * 3, [0, 0, 1], 9.0)
    near.shards.allowed[0, 1] = near.shards.allowed[1, 1] = False
    cost, change = near.divisions(0, np.random.default_rng(0))
    assert cost == pytest.approx(after(near, {})[0] if not change else after(near, change)[0])
    assert set(change) <= {2}
