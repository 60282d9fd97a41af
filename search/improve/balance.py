"""Evens out the phases of a placed plan: single shards move or swap ranks, options stay.

An iteration waits for the slowest rank in every phase (`search.surrogate`), and greedy placement
balances one sum at the expense of the others. Here all phases count at once, each by the 16-norm of
its ranks' times, which is smooth where their maximum is flat: it also rewards what makes the second
slowest rank faster. Moves and swaps that touch a rank which is slowest in some phase are scored
together; the best is taken until none helps, then a few shards are shaken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from search.objective import Assignment, Objective
from search.surrogate import BACKWARD, FORWARD, IDS, OUTPUTS, Surrogate

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

NORM = 16
SHAKEN = 6
"""Shards that change places to leave a local optimum."""
GAIN = 1e-6
"""A smaller relative gain is none."""
MAX_STEPS = 4000


@dataclass(frozen=True)
class Balanced:
    """A placement and its sum of phase maxima in ms."""

    assignment: Assignment
    surrogate_ms: float


class Balancer:
    """Balances assignments of one problem."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective = objective
        self.surrogate = surrogate

    def balance(self, assignment: Assignment, seed: int, restarts: int) -> Balanced:
        """The same options on better ranks.

        Args:
            assignment: fits, and so does the result.
            restarts: times that the best placement is shaken and descended from again.
        """
        state = _State(self.objective, self.surrogate, assignment)
        if not len(state.owners):
            return Balanced(assignment, state.slowest_ms(state.ranks))
        rng = np.random.default_rng(seed)
        best = state.descend(state.ranks)
        for _ in range(restarts):
            shaken = best.copy()
            some = rng.choice(len(shaken), min(SHAKEN, len(shaken)), replace=False)
            shaken[some] = rng.permutation(shaken[some])
            if state.fits(shaken):
                found = state.descend(shaken)
                best = min(best, found, key=state.slowest_ms)
        return Balanced(state.assignment(best), state.slowest_ms(best))


class _State:
    """The movable shards of an assignment: those that may lie on any of several single ranks.

    Attributes:
        work: phase times of every shard over the mean rank's, ``[shards, phases]``; lookups
            forward and backward are one phase each, ids and outputs one an exchange.
        scale: the mean rank's phase times in ms, ``[phases]``.
        memory: ``[shards, hbm or ddr]`` in bytes.
        allowed: ``[shards, ranks]``.
    """

    def __init__(self, objective: Objective, surrogate: Surrogate, assignment: Assignment) -> None:
        self.objective = objective
        self.before = assignment
        world = objective.problem.topology.world_size
        exchanges = sorted({surrogate.exchange(option) for option, _ in assignment})
        tied = {table for group in objective.space.co_locate for table in group}
        fixed = np.zeros((world, 2 + 2 * len(exchanges)))
        self.room = objective.caps.T.copy()
        self.owners: list[tuple[int, int]] = []
        work, memory, ranks, allowed = [], [], [], []
        for table, (option, where) in enumerate(assignment):
            phases = np.zeros((len(where), fixed.shape[1]))
            found = surrogate.phases(option)
            at = 2 + 2 * exchanges.index(surrogate.exchange(option))
            phases[:, [0, 1, at, at + 1]] = found[:, [FORWARD, BACKWARD, IDS, OUTPUTS]]
            legal = objective.legal(option)
            free = all(len(unit) > 1 and len(unit[0]) == 1 for unit in legal.units)
            if not free or legal.same_group or table in tied:
                np.add.at(fixed, list(where), phases)
                self.room -= objective.footprint(option, where).T
                continue
            for shard, rank in enumerate(where):
                self.owners.append((table, shard))
                work.append(phases[shard])
                need = option.memory[shard]
                memory.append([need.hbm_bytes, need.ddr_bytes])
                ranks.append(rank)
                allowed.append(np.isin(np.arange(world), [a[0] for a in legal.units[shard]]))
        self.ranks = np.array(ranks, dtype=np.int64)
        self.work = np.array(work).reshape(-1, fixed.shape[1])
        self.memory = np.array(memory, dtype=np.float64).reshape(-1, 2)
        self.allowed = np.array(allowed, dtype=bool).reshape(-1, world)
        self.fixed = fixed
        self.scale = self.loads(self.ranks).mean(axis=0)
        self.scale[self.scale <= 0] = 1.0
        self.fixed, self.work = self.fixed / self.scale, self.work / self.scale

    def loads(self, ranks: Ints) -> Array:
        """Phase times of every rank, ``[ranks, phases]``, in units of the work."""
        loads = self.fixed.copy()
        np.add.at(loads, ranks, self.work)
        return loads

    def used(self, ranks: Ints) -> Array:
        """Bytes of the movable shards, ``[ranks, hbm or ddr]``."""
        used = np.zeros_like(self.room)
        np.add.at(used, ranks, self.memory)
        return used

    def fits(self, ranks: Ints) -> bool:
        """Within the caps, and where every shard may lie."""
        here = self.allowed[np.arange(len(ranks)), ranks].all()
        return bool(here and (self.used(ranks) <= self.room).all())

    def slowest_ms(self, ranks: Ints) -> float:
        """Sum over the phases of the slowest rank's time."""
        return float(self.loads(ranks).max(axis=0) @ self.scale)

    def assignment(self, ranks: Ints) -> Assignment:
        """The assignment with its movable shards on these ranks."""
        placed = [list(where) for _, where in self.before]
        for (table, shard), rank in zip(self.owners, ranks.tolist(), strict=True):
            placed[table][shard] = rank
        return tuple(
            (option, tuple(where)) for (option, _), where in zip(self.before, placed, strict=True)
        )

    def descend(self, start: Ints) -> Ints:
        """To where no move or swap of a shard on a slowest rank helps."""
        ranks = start.copy()
        loads, used = self.loads(ranks), self.used(ranks)
        for _ in range(MAX_STEPS):
            now = float(self._norm(_power(loads).sum(axis=0)))
            changes = self._improvements(ranks, loads, used, now * (1 - GAIN))
            if not changes:
                break
            joint = {shard: rank for change in changes for shard, rank in change.items()}
            after = self._applied(joint, ranks)
            if self._norm(_power(self.loads(after)).sum(axis=0)) >= now * (1 - GAIN):
                after = self._applied(changes[0], ranks)
            ranks = after
            loads, used = self.loads(ranks), self.used(ranks)
        return ranks

    def _applied(self, change: dict[int, int], ranks: Ints) -> Ints:
        after = ranks.copy()
        after[list(change)] = list(change.values())
        return after

    def _improvements(
        self, ranks: Ints, loads: Array, used: Array, below: float
    ) -> list[dict[int, int]]:
        """The best change of every shard on a slowest rank, as shard -> new rank; best first, and
        no two touch one rank, so that each fits beside the others."""
        powers = _power(loads)
        total = powers.sum(axis=0)
        mine = np.flatnonzero(np.isin(ranks, np.argmax(loads, axis=0)))
        moves = self._moves(mine, ranks, loads, used, powers, total)
        swaps = self._swaps(mine, ranks, loads, used, powers, total)
        both = np.concatenate([moves, swaps], axis=1)
        best = both.argmin(axis=1)
        values = both[np.arange(len(mine)), best]
        found: list[dict[int, int]] = []
        touched: set[int] = set()
        for row in np.argsort(values, kind="stable"):
            if values[row] >= below:
                break
            one, target, worlds = int(mine[row]), int(best[row]), moves.shape[1]
            change = {one: target}
            if target >= worlds:
                two = target - worlds
                change = {one: int(ranks[two]), two: int(ranks[one])}
            where = {int(ranks[one]), *change.values()}
            if touched.isdisjoint(where):
                touched |= where
                found.append(change)
        return found

    def _norm(self, total: Array) -> Array:
        """Sum over the phases of the norm over ranks, from the summed powers ``[..., phases]``."""
        return np.asarray(np.maximum(total, 0.0) ** (1 / NORM) @ self.scale)

    def _moves(
        self, mine: Ints, ranks: Ints, loads: Array, used: Array, powers: Array, total: Array
    ) -> Array:
        """Norm after each move, ``[len(mine), ranks]``; infinite where it is none."""
        here, work = ranks[mine], self.work[mine]
        left = total - powers[here] + _power(loads[here] - work)
        found = self._norm(left[:, None] - powers + _power(loads + work[:, None]))
        found[np.arange(len(mine)), here] = np.inf
        over = (used + self.memory[mine][:, None] > self.room).any(axis=-1)
        found[over | ~self.allowed[mine]] = np.inf
        return found

    def _swaps(
        self, mine: Ints, ranks: Ints, loads: Array, used: Array, powers: Array, total: Array
    ) -> Array:
        """Norm after each swap with any shard, ``[len(mine), shards]``."""
        here = ranks[mine]
        change = self.work - self.work[mine][:, None]
        after = _power(loads[here][:, None] + change) + _power(loads[ranks] - change)
        found = self._norm(total - powers[here][:, None] - powers[ranks] + after)
        moved = self.memory - self.memory[mine][:, None]
        over = (used[here][:, None] + moved > self.room[here][:, None]).any(axis=-1)
        over |= (used[ranks] - moved > self.room[ranks]).any(axis=-1)
        over |= here[:, None] == ranks
        over |= ~self.allowed[mine][:, ranks] | ~self.allowed[:, here].T
        found[over] = np.inf
        return found


def _power(loads: Array) -> Array:
    """To the 16th; four products are an order of magnitude faster than a power."""
    for _ in range(4):
        loads = loads * loads
    return loads
