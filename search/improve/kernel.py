"""Inner loop of annealing, compiled by numba: moves are proposed, scored, then accepted or undone.

All sums are in double precision and in one order, nothing reads a clock, and the random generator
is its own, so a seed gives the same plan on any machine. Importing this module compiles it, or
reads the compiled code from numba's cache beside this file (a tenth of the time).

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np

from search.model.shard_costs import Ints, ShardCosts, ShardSpace

NORMAL = 1 << 16
"""Number of moves after which loads are summed anew, so that rounding errors do not grow."""
LOST = 1e-6
"""Fraction of a sum of powers below which a difference is rounding, so the sum is computed anew."""
TRIES = 24
"""Number of random draws of ranks or tables before giving up."""
MOVES, SWAPS = 0.3, 0.35
"""Fractions of proposals that move one shard or block, and that swap two; the others choose another
option of a table, or place it anew."""

HOMEWARD = 0.15
"""Fraction of proposals that return a table to its place in the plan in use, if moves are limited.
"""

OPTIONS: dict[str, Any] = {"error_model": "numpy", "forceinline": True, "_nrt": False}
"""Options of the compiler. Without the last, references to arrays are counted by atomic increments,
which take three quarters of a move's time; nothing here allocates. numba has no documented option
for that."""
LN_2 = 0.6931471805599453


def compiled(function: Any) -> Any:
    """Compile a function with numba; cached code is read from beside this file or the user's cache,
    unless neither can be written."""
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no place for a cache
        return numba.njit(**OPTIONS)(function)


@compiled
def _draw(state: Any) -> Any:
    """Draw the next random number in [0, 1) (xorshift64*, Vigna 2016)."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return ((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def _below(state: Any, count: int) -> Any:
    """Draw a random integer below a count."""
    return min(int(_draw(state) * count), count - 1)


@compiled
def _patience(state: Any) -> Any:
    """Draw a number that is exponential up to linear interpolation between halvings.

    Products and sums alone give the same result on every machine.
    """
    patience = 0.0
    while _draw(state) < 0.5:
        patience += LN_2
    return patience + LN_2 * _draw(state)


@compiled
def _list_unit(
    space: Any, option: int, unit: int, alternative: int, sign: int, changes: Any, count: int
) -> int:
    """Append the shards of a unit at an alternative to the changes: shard, rank, group, and whether
    it comes (1) or goes (-1); return their number."""
    pool = space.pool[option]
    width = space.width[pool]
    shard, at = space.first_shard[option] + unit * width, space.first_rank[pool]
    for i in range(width):
        changes[count, 0] = space.distinct[shard + i]
        changes[count, 1] = space.ranks[at + alternative * width + i]
        changes[count, 2], changes[count, 3] = space.group[option], sign
        count += 1
    return count


@compiled
def _list_move(
    space: Any, now: int, here: Any, begin: int, option: int, there: Any, changes: Any, count: int
) -> int:
    """Append what changes if a table moves: its units from ``begin`` on in ``here`` go, those of an
    option in ``there`` come. A unit that stays where it is does not change."""
    for unit in range(space.units[now]):
        if now != option or here[begin + unit] != there[unit]:
            count = _list_unit(space, now, unit, here[begin + unit], -1, changes, count)
    for unit in range(space.units[option]):
        if now != option or here[begin + unit] != there[unit]:
            count = _list_unit(space, option, unit, there[unit], 1, changes, count)
    return count


@compiled
def _change(
    space: Any, cost: Any, loads: Any, used: Any, shard_counts: Any, changes: Any, count: int
) -> None:
    """Add the shards that come to their ranks, and remove those that go."""
    columns = loads.shape[1]
    for i in range(count):
        shard, rank, group, sign = changes[i]
        before = shard_counts[rank, group]
        shard_counts[rank, group] = before + sign
        row, work = loads[rank], cost.work[shard]
        for c in range(columns):
            row[c] += sign * work[c]
        if (before == 0) != (before + sign == 0):
            for c in range(columns):
                row[c] += sign * cost.floors[c, group]
        used[rank, 0] += sign * space.memory[shard, 0]
        used[rank, 1] += sign * space.memory[shard, 1]


@compiled
def _copy(source: Any, row: int, target: Any, to: int) -> None:
    """Copy a row of loads, powers, shard counts and bytes."""
    loads, powers, shard_counts, used = source
    to_loads, to_powers, to_counts, to_used = target
    for c in range(loads.shape[1]):
        to_loads[to, c] = loads[row, c]
        to_powers[to, c] = powers[row, c]
    for group in range(shard_counts.shape[1]):
        to_counts[to, group] = shard_counts[row, group]
    to_used[to, 0], to_used[to, 1] = used[row, 0], used[row, 1]


@compiled
def _powered(loads: Any, scale: Any, squares: int, powers: Any, rank: int) -> None:
    """Compute the powers of a rank's loads.

    The inner loops run over columns, so that they compile to vector instructions.
    """
    row, load = powers[rank], loads[rank]
    for c in range(len(row)):
        row[c] = max(0.0, load[c]) * scale[c]
    for _ in range(squares):
        for c in range(len(row)):
            row[c] *= row[c]


@compiled
def _over(space: Any, used: Any, rank: int) -> float:
    """Return the fraction by which a rank exceeds its memory."""
    over = 0.0
    for kind in range(2):
        most = space.caps[rank, kind]
        if used[rank, kind] > most:
            over += (used[rank, kind] - most) / max(most, space.unit) + 1e-3
    return over


@compiled
def _beyond(space: Any, moved: int, moved_bytes: float) -> float:
    """Return the moved tables above the limit, plus the fraction by which their bytes exceed it."""
    beyond = float(max(0, moved - space.max_moves))
    if space.max_bytes >= 0.0 and moved_bytes > space.max_bytes * (1 + 1e-9) + 1e-3:
        beyond += 0.1 + (moved_bytes - space.max_bytes) / max(space.max_bytes, space.unit)
    return beyond


@compiled
def _energy(cost: Any, sums: Any, scale: Any, squares: int, even: Any, norms: Any) -> float:
    """Return the largest of the cuts, with norms in place of maxima."""
    for c in range(len(sums)):
        norms[c] = max(sums[c], 0.0)
    for _ in range(squares):
        for c in range(len(sums)):
            norms[c] = math.sqrt(norms[c])
    for c in range(len(sums)):
        norms[c] /= scale[c]
    most = -1e300
    for k in range(len(even)):
        now = cost.constants[k] + even[k]
        for c in range(len(sums)):
            now += cost.member[k, c] * norms[c]
        most = max(most, now)
    return most


@compiled
def _count(
    space: Any,
    cost: Any,
    chosen: Any,
    where: Any,
    loads: Any,
    used: Any,
    shard_counts: Any,
    even: Any,
    changes: Any,
) -> None:
    """Compute loads, bytes, shard counts and even parts of a plan."""
    loads[:], used[:], shard_counts[:], even[:] = 0.0, 0.0, 0, 0.0
    for table in range(len(chosen)):
        option, at, count = chosen[table], space.first_unit[table], 0
        for unit in range(space.units[option]):
            count = _list_unit(space, option, unit, where[at + unit], 1, changes, count)
        _change(space, cost, loads, used, shard_counts, changes, count)
        even += cost.even[option]


@compiled
def _away(space: Any, table: int, option: int, where: Any, at: int) -> bool:
    """Return True if a table is moved from its place in the plan in use; its units begin at ``at``
    in ``where``."""
    if option != space.home[table]:
        return bool(space.home[table] > -2)
    first = space.first_unit[table]
    for unit in range(space.units[option]):
        if where[at + unit] != space.home_where[first + unit]:
            return True
    return False


@compiled
def _lighter(space: Any, loads: Any, state: Any, pool: int, host: int, looks: int) -> Any:
    """Draw an alternative, on a host if that is not negative; prefer a low load in a random
    column."""
    first, count = space.first_rank[pool], space.alternatives[pool]
    width, column = space.width[pool], _below(state, loads.shape[1])
    best, least = -1, 0.0
    for _ in range(looks + TRIES):
        alternative = _below(state, count)
        rank = space.ranks[first + alternative * width]
        if host >= 0 and rank // space.local != host:
            continue
        if best < 0 or loads[rank, column] < least:
            best, least = alternative, loads[rank, column]
        looks -= 1
        if looks < 0:
            break
    return best


@compiled
def _place(space: Any, loads: Any, state: Any, option: int, where: Any) -> bool:
    """Place all units of an option at random; return False if no place was found."""
    pool, units = space.pool[option], space.units[option]
    width, first = space.width[pool], space.first_rank[pool]
    host = -1
    if space.together[option]:
        alternative = _below(state, space.alternatives[pool])
        host = space.ranks[first + alternative * width] // space.local
    looks = _below(state, 5)
    for unit in range(units):
        for attempt in range(TRIES):
            alternative = _lighter(space, loads, state, pool, host, looks)
            if alternative < 0:
                return False
            is_taken = False
            for before in range(unit):
                is_taken = is_taken or where[before] == alternative
            where[unit] = alternative
            if not is_taken or (units > space.alternatives[pool] and attempt > 0):
                break
            if attempt == TRIES - 1:
                return False
    return True


@compiled
def _on_busy(space: Any, chosen: Any, where: Any, loads: Any, state: Any) -> Any:
    """Draw a table; half of the time one on a busy rank."""
    tables, ranks = len(space.free), loads.shape[0]
    table = space.free[_below(state, tables)]
    if _draw(state) < 0.5:
        return table
    column, busy = _below(state, loads.shape[1]), _below(state, ranks)
    for _ in range(6):
        rank = _below(state, ranks)
        if loads[rank, column] > loads[busy, column]:
            busy = rank
    for _ in range(4 * ranks):
        candidate = space.free[_below(state, tables)]
        option = chosen[candidate]
        pool = space.pool[option]
        if space.alternatives[pool] < 2:
            continue
        width, first, at = space.width[pool], space.first_rank[pool], space.first_unit[candidate]
        for unit in range(space.units[option]):
            start = space.ranks[first + where[at + unit] * width]
            if start <= busy < start + width:
                return candidate
    return table


@compiled
def _can_lie(space: Any, option: int, where: Any, unit: int, alternative: int) -> bool:
    """Return True if a unit of an option may move to an alternative while the others stay."""
    if alternative < 0:
        return False
    pool, units = space.pool[option], space.units[option]
    first, width = space.first_rank[pool], space.width[pool]
    for other in range(units):
        if other == unit:
            continue
        if where[other] == alternative and units <= space.alternatives[pool]:
            return False
        if space.together[option]:
            rank, mine = (
                space.ranks[first + where[other] * width],
                space.ranks[first + alternative * width],
            )
            if rank // space.local != mine // space.local:
                return False
    return True


def anneal(
    space: ShardSpace,
    cost: ShardCosts,
    chosen: Ints,
    where: Ints,
    moves: int,
    heat: float,
    squares: int,
    wall: float,
    seed: int,
) -> tuple[float, Ints, Ints]:
    """Anneal a plan in place.

    Args:
        chosen: option of every table.
        where: alternative of every unit, those of a table from ``space.first_unit`` on.
        moves: number of proposals.
        heat: temperature in ms: mean increase of an accepted change.
        squares: the order of the norms is 2 to this power.
        wall: penalty in ms of a rank at twice its memory limit, and of a table moved beyond the
            limit.
        seed: seed of the random generator.

    Returns:
        The final energy in ms, and the best plan on the way within all limits, as ``chosen`` and
        ``where``; ``chosen[0]`` is -1 if there was none.
    """
    ranks, columns, groups = len(space.caps), cost.work.shape[1], cost.floors.shape[1]
    best, best_where = np.full_like(chosen, -1), where.copy()
    first = (seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**64
    state = np.array([first], dtype=np.uint64)
    most = int(space.units.max())
    ints = np.zeros((5, max(ranks, most)), dtype=np.int64)
    on_ranks = np.zeros((4, ranks, columns))
    of_columns = np.zeros((4, columns))
    used, shard_counts = np.zeros((2, ranks, 2)), np.zeros((2, ranks, groups), dtype=np.int64)
    of_cuts = np.zeros((2, len(cost.constants)))
    shards = int((space.units * space.width[space.pool]).max())
    changes = np.zeros((4 * shards, 4), dtype=np.int64)
    arrays = ints, on_ranks, of_columns, used, shard_counts, of_cuts, changes
    energy = _anneal(
        space, cost, chosen, where, best, best_where, state, arrays, moves, heat, squares, wall
    )
    return float(energy), best, best_where


@compiled
def _anneal(
    space: Any,
    cost: Any,
    chosen: Any,
    where: Any,
    best: Any,
    best_where: Any,
    state: Any,
    arrays: Any,
    moves: int,
    heat: float,
    squares: int,
    wall: float,
) -> float:
    """Run the loop of `anneal` in preallocated arrays."""
    ints, on_ranks, of_columns, used_twice, counts_twice, of_cuts, changes = arrays
    mine, other, touched, mark = ints[0], ints[1], ints[2], ints[3]
    now_on_ranks = on_ranks[0], on_ranks[1], counts_twice[0], used_twice[0]
    before_on_ranks = on_ranks[2], on_ranks[3], counts_twice[1], used_twice[1]
    loads, powers, shard_counts, used = now_on_ranks
    old_powers = on_ranks[3]
    sums, norms, scale, new_sums = of_columns[0], of_columns[1], of_columns[2], of_columns[3]
    even, new_even = of_cuts[0], of_cuts[1]
    ranks, columns = loads.shape
    limited = space.max_moves < len(chosen) or space.max_bytes >= 0.0
    for _ in range(8):
        _draw(state)
    energy, over, best_energy = 0.0, 0.0, math.inf
    moved, moved_bytes = 0, 0.0
    for move in range(moves):
        if move % NORMAL == 0:
            _count(space, cost, chosen, where, loads, used, shard_counts, even, changes)
            for c in range(columns):
                most = 0.0
                for rank in range(ranks):
                    most = max(most, loads[rank, c])
                scale[c] = 1.0 / max(most, 1e-9)
                sums[c] = 0.0
            over = 0.0
            for rank in range(ranks):
                _powered(loads, scale, squares, powers, rank)
                for c in range(columns):
                    sums[c] += powers[rank, c]
                over += _over(space, used, rank)
            moved, moved_bytes = 0, 0.0
            for table in range(len(chosen)):
                if limited and _away(space, table, chosen[table], where, space.first_unit[table]):
                    moved += 1
                    moved_bytes += space.arriving[chosen[table]]
            energy = _energy(cost, sums, scale, squares, even, norms)
            energy += wall * (over + _beyond(space, moved, moved_bytes))
            best_energy = math.inf
        # propose
        table = _on_busy(space, chosen, where, loads, state)
        at, now = space.first_unit[table], chosen[table]
        option, second, now2, at2, sort = now, -1, -1, 0, _draw(state)
        pool, count = space.pool[now], space.units[now]
        for unit in range(count):
            mine[unit] = where[at + unit]
        if limited and sort >= 1.0 - HOMEWARD:
            if space.home[table] < 0 or not _away(space, table, now, where, at):
                continue
            option = space.home[table]
            for unit in range(space.units[option]):
                mine[unit] = space.home_where[at + unit]
        elif sort < MOVES + SWAPS and space.alternatives[pool] > 1:
            unit = _below(state, count)
            if sort < MOVES:
                host = -1
                if space.together[now] and count > 1:
                    first = space.ranks[space.first_rank[pool] + mine[unit] * space.width[pool]]
                    host = first // space.local
                place = _lighter(space, loads, state, pool, host, _below(state, 5))
                if place < 0 or place == mine[unit] or not _can_lie(space, now, mine, unit, place):
                    continue
                mine[unit] = place
            else:
                second = space.free[_below(state, len(space.free))]
                now2 = chosen[second]
                pool2, count2 = space.pool[now2], space.units[now2]
                if second == table or space.alternatives[pool2] < 2:
                    continue
                if space.width[pool] != space.width[pool2]:
                    continue
                at2 = space.first_unit[second]
                for unit2 in range(count2):
                    other[unit2] = where[at2 + unit2]
                unit2 = _below(state, count2)
                width = space.width[pool]
                rank = space.ranks[space.first_rank[pool] + mine[unit] * width]
                rank2 = space.ranks[space.first_rank[pool2] + other[unit2] * width]
                if rank == rank2:
                    continue
                place, place2 = space.at_rank[pool, rank2], space.at_rank[pool2, rank]
                if not (
                    _can_lie(space, now, mine, unit, place)
                    and _can_lie(space, now2, other, unit2, place2)
                ):
                    continue
                mine[unit], other[unit2] = place, place2
        else:
            first, last = space.first_option[table], space.first_option[table + 1]
            option = first + _below(state, last - first)
            if not _place(space, loads, state, option, mine):
                continue
            if option == now:
                same = True
                for unit in range(count):
                    same = same and mine[unit] == where[at + unit]
                if same:
                    continue
        listed = _list_move(space, now, where, at, option, mine, changes, 0)
        if second >= 0:
            listed = _list_move(space, now2, where, at2, now2, other, changes, listed)
        # remember the ranks that change
        count = 0
        for i in range(listed):
            rank = changes[i, 1]
            if mark[rank] != move + 1:
                mark[rank] = move + 1
                touched[count] = rank
                _copy(now_on_ranks, rank, before_on_ranks, count)
                count += 1
        new_over = over
        for i in range(count):
            new_over -= _over(space, used, touched[i])
        # make the change
        _change(space, cost, loads, used, shard_counts, changes, listed)
        for k in range(len(even)):
            new_even[k] = even[k] + cost.even[option, k] - cost.even[now, k]
        for c in range(columns):
            new_sums[c] = sums[c]
        for i in range(count):
            rank = touched[i]
            _powered(loads, scale, squares, powers, rank)
            new_over += _over(space, used, rank)
            for c in range(columns):
                new_sums[c] += powers[rank, c] - old_powers[i, c]
        for c in range(columns):
            if new_sums[c] < LOST * sums[c]:
                new_sums[c] = 0.0
                for rank in range(ranks):
                    new_sums[c] += powers[rank, c]
        if new_over < 1e-9:
            new_over = 0.0
        new_moved, new_bytes = moved, moved_bytes
        if limited:
            for which in range(4):
                if which > 1 and second < 0:
                    break
                which_option = now if which == 0 else option if which == 1 else now2
                which_table, units, begin = table, where, at
                if which == 1:
                    units, begin = mine, 0
                elif which == 2:
                    which_table, begin = second, at2
                elif which == 3:
                    which_table, units, begin = second, other, 0
                if _away(space, which_table, which_option, units, begin):
                    sign = 1 if which % 2 else -1
                    new_moved += sign
                    new_bytes += sign * space.arriving[which_option]
        outside = new_over + _beyond(space, new_moved, new_bytes)
        new_energy = _energy(cost, new_sums, scale, squares, new_even, norms) + wall * outside
        if new_energy <= energy or new_energy - energy < heat * _patience(state):
            energy, over, moved, moved_bytes = new_energy, new_over, new_moved, new_bytes
            for c in range(columns):
                sums[c] = new_sums[c]
            for k in range(len(even)):
                even[k] = new_even[k]
            chosen[table] = option
            for unit in range(space.units[option]):
                where[at + unit] = mine[unit]
            if second >= 0:
                for unit in range(space.units[now2]):
                    where[at2 + unit] = other[unit]
            if outside == 0.0 and energy < best_energy:
                best_energy = energy
                for i in range(len(chosen)):
                    best[i] = chosen[i]
                for i in range(len(where)):
                    best_where[i] = where[i]
        else:
            for i in range(count):
                _copy(before_on_ranks, i, now_on_ranks, touched[i])
    return energy
