"""Evens out the phases of a placed plan: single shards move or swap ranks, options stay.

An iteration waits for the slowest rank in every phase (`search.surrogate`), and greedy placement
balances one sum at the expense of the others. Here all phases count at once, each by the 16-norm of
its ranks' times, which is smooth where their maximum is flat: it also rewards what makes the second
slowest rank faster. Moves and swaps that touch a rank which is slowest in some phase are scored
together; the best is taken until none helps, then a few shards are shaken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from search.improve.shard_moves import (
    Array,
    Ints,
    Neighbourhood,
    Occupancy,
    RankCost,
    Shards,
    pick_apart,
)
from search.objective import Assignment, Objective
from search.surrogate import BACKWARD, FORWARD, IDS, OUTPUTS, Surrogate

SQUARES = 4
"""Of the loads: the 16th power, whose root is the norm."""
FILL_SQUARES = 3
"""Of the loads where shards are placed one by one: the 8th power. Early ranks are far from full,
where the 16th sees no difference."""
SHAKEN = 6
"""Shards that change places to leave a local optimum."""
GAIN = 1e-6
"""Relative gain below which a change does not count."""
MAX_STEPS = 4000


@dataclass(frozen=True)
class BalancedAssignment:
    """A placement and its sum of phase maxima in ms."""

    assignment: Assignment
    surrogate_ms: float


class Balancer:
    """Balances assignments of one problem."""

    def __init__(self, objective: Objective, surrogate: Surrogate) -> None:
        self.objective = objective
        self.surrogate = surrogate

    def refill(self, assignment: Assignment) -> Assignment:
        """The same options with every movable shard placed anew, the largest first, where it raises
        the norms least; the assignment itself where that is no better or does not fit."""
        state = _State(self.objective, self.surrogate, assignment)
        return state.assignment(state.filled())

    def balance(
        self,
        assignment: Assignment,
        seed: int,
        restarts: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> BalancedAssignment:
        """The same options on better ranks.

        Args:
            assignment: fits, and so does the result.
            restarts: times that the best placement is shaken and descended from again.
            stop: asked before every step; what is reached then is the result.
        """
        state = _State(self.objective, self.surrogate, assignment)
        start = state.filled()
        if not len(start):
            return BalancedAssignment(assignment, state.slowest_ms(start))
        rng = np.random.default_rng(seed)
        best = state.descend(start, stop)
        for _ in range(restarts):
            if stop():
                break
            shaken = best.copy()
            some = rng.choice(len(shaken), min(SHAKEN, len(shaken)), replace=False)
            shaken[some] = rng.permutation(shaken[some])
            if state.fits(shaken):
                found = state.descend(shaken, stop)
                best = min(best, found, key=state.slowest_ms)
        return BalancedAssignment(state.assignment(best), state.slowest_ms(best))


class _State:
    """The movable shards of an assignment, and what the others put on the ranks.

    Phase times are over the mean rank's: lookups forward and backward are one phase each, ids and
    outputs one an exchange.

    Attributes:
        scale: the mean rank's phase times in ms, ``[phases]``.
        fixed: loads of what does not move, ``[ranks, phases]``.
    """

    def __init__(self, objective: Objective, surrogate: Surrogate, assignment: Assignment) -> None:
        self.before = assignment
        world = objective.problem.topology.world_size
        exchanges = sorted({surrogate.exchange(option) for option, _ in assignment})
        tied = {table for group in objective.space.co_locate for table in group}
        self.fixed = np.zeros((world, 2 + 2 * len(exchanges)))
        self.room = objective.caps.T.copy()
        free: list[int] = []
        work: list[Array] = [np.zeros((0, self.fixed.shape[1]))]
        for table, (option, where) in enumerate(assignment):
            phases = np.zeros((len(where), self.fixed.shape[1]))
            at = 2 + 2 * exchanges.index(surrogate.exchange(option))
            order = [FORWARD, BACKWARD, IDS, OUTPUTS]
            phases[:, [0, 1, at, at + 1]] = surrogate.phases(option)[:, order]
            if objective.placed(option).allowed is None or table in tied:
                np.add.at(self.fixed, list(where), phases)
                self.room -= objective.footprint(option, where).T
            else:
                free.append(table)
                work.append(phases)
        counts = [len(assignment[t][1]) for t in free]
        memory = [np.zeros((0, 2)), *(objective.placed(assignment[t][0]).memory for t in free)]
        allowed = [objective.movable(*assignment[t]) for t in free]
        self.shards = Shards(
            np.repeat(np.array(free, dtype=np.int64), counts),
            np.array([i for n in counts for i in range(n)], dtype=np.int64),
            np.array([r for t in free for r in assignment[t][1]], dtype=np.int64),
            np.concatenate(work),
            np.concatenate(memory),
            np.repeat(np.array(allowed, dtype=bool).reshape(-1, world), counts, axis=0),
        )
        self.scale = self.occupancy(self.shards.ranks).loads.mean(axis=0)
        self.scale[self.scale <= 0] = 1.0
        self.fixed = self.fixed / self.scale
        self.shards = replace(self.shards, work=self.shards.work / self.scale)
        self.cost = RankCost(_power, self._norm)

    def occupancy(self, ranks: Ints) -> Occupancy:
        """Loads and bytes with the movable shards on these ranks."""
        loads, used = self.fixed.copy(), np.zeros_like(self.room)
        np.add.at(loads, ranks, self.shards.work)
        np.add.at(used, ranks, self.shards.memory)
        return Occupancy(loads, used, self.room)

    def fits(self, ranks: Ints) -> bool:
        """Within the caps, and where every shard may lie."""
        here = self.shards.allowed[np.arange(len(ranks)), ranks].all()
        return bool(here and (self.occupancy(ranks).used <= self.room).all())

    def slowest_ms(self, ranks: Ints) -> float:
        """Sum over the phases of the slowest rank's time."""
        return float(self.occupancy(ranks).loads.max(axis=0) @ self.scale)

    def assignment(self, ranks: Ints) -> Assignment:
        """The assignment with its movable shards on these ranks."""
        placed = [list(where) for _, where in self.before]
        rows = zip(self.shards.table, self.shards.position, ranks.tolist(), strict=True)
        for table, position, rank in rows:
            placed[table][position] = rank
        return tuple(
            (option, tuple(where)) for (option, _), where in zip(self.before, placed, strict=True)
        )

    def filled(self) -> Ints:
        """Every movable shard placed anew, the largest first, each where it raises the sum of
        powers least; as they lie where that is no better, or leaves a shard without room."""
        shards, before = self.shards, self.shards.ranks
        ranks, now = np.zeros_like(before), self.occupancy(before)
        loads, used = self.fixed.copy(), now.used.copy()
        np.subtract.at(used, before, shards.memory)
        powers = _square(loads, FILL_SQUARES)
        for shard in np.argsort(-(shards.work @ self.scale), kind="stable").tolist():
            need = shards.memory[shard]
            raised = _square(loads + shards.work[shard], FILL_SQUARES)
            cost = (raised - powers) @ self.scale
            over = used + need > self.room
            cost[~shards.allowed[shard] | over[:, 0] | over[:, 1]] = np.inf
            rank = int(cost.argmin())
            if cost[rank] == np.inf:
                return before
            ranks[shard] = rank
            loads[rank] += shards.work[shard]
            powers[rank] = raised[rank]
            used[rank] += need
        return min(before, ranks, key=self._norm_of)

    def _norm_of(self, ranks: Ints) -> float:
        return float(self._norm(_power(self.occupancy(ranks).loads).sum(axis=0)))

    def descend(self, start: Ints, stop: Callable[[], bool]) -> Ints:
        """To where no move or swap of a shard on a slowest rank helps."""
        ranks = start
        for _ in range(MAX_STEPS):
            if stop():
                break
            now = self.occupancy(ranks)
            norm = float(self._norm(_power(now.loads).sum(axis=0)))
            changes = self._find_improvements(ranks, now, norm * (1 - GAIN))
            if not changes:
                break
            joint = {shard: rank for change in changes for shard, rank in change.items()}
            after = _apply(joint, ranks)
            if self._norm_of(after) >= norm * (1 - GAIN):
                after = _apply(changes[0], ranks)
            ranks = after
        return ranks

    def _find_improvements(self, ranks: Ints, now: Occupancy, below: float) -> list[dict[int, int]]:
        """The best change of every shard on a slowest rank, as shard -> new rank; best first."""
        mine = np.flatnonzero(np.isin(ranks, np.argmax(now.loads, axis=0)))
        near = Neighbourhood(replace(self.shards, ranks=ranks), now, self.cost, mine)
        costs = np.concatenate([near.moves(), near.swaps()], axis=1)
        best = costs.argmin(axis=1)
        least = costs[np.arange(len(mine)), best]
        changes = (
            (float(least[row]), near.placements(int(mine[row]), int(best[row])))
            for row in np.argsort(least, kind="stable")
        )
        return pick_apart(
            ((cost, c, {*ranks[list(c)].tolist(), *c.values()}) for cost, c in changes), below
        )

    def _norm(self, total: Array) -> Array:
        """Sum over the phases of the norm over ranks, from the summed powers ``[..., phases]``."""
        root = np.maximum(total, 0.0)
        for _ in range(SQUARES):  # an order of magnitude faster than a power
            root = np.sqrt(root, out=root)
        return np.asarray((root * self.scale).sum(axis=-1))


def _apply(change: dict[int, int], ranks: Ints) -> Ints:
    after = ranks.copy()
    after[list(change)] = list(change.values())
    return after


def _power(loads: Array) -> Array:
    """To the 16th; four products are an order of magnitude faster than a power."""
    return _square(loads, SQUARES)


def _square(loads: Array, times: int) -> Array:
    """Squared so many times."""
    loads = loads * loads
    for _ in range(times - 1):
        loads *= loads
    return loads
