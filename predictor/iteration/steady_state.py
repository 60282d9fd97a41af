"""The period of a repeated iteration for many plans at once: a compiled `timeline.simulate`.

One iteration of a graph is a short max-plus program. Every time in `predictor.iteration.timeline`
is a maximum over earlier times plus constants and costs. An operation that adds only constants is
folded into its users, and a wait that another one implies is dropped. What remains are operations
whose costs differ between plans, and collectives. An operation that a plan does not have costs
minus infinity there. The results equal those of `timeline.simulate` up to rounding (Baccelli et al.
1992, Synchronization and Linearity, chapter 2, has the algebra).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.iteration.graph import Dep, Graph, Op
from predictor.iteration.program import ISSUE, LAUNCH, RUN, Program, thread_names
from predictor.iteration.timeline import MAX_ITERATIONS, PERIOD_TOLERANCE

Form = dict[int, float]
"""Variable -> offset: the maximum over all variables, each with its offset added."""
State = tuple[str, str | int, int]
"""State carried from one iteration to the next: the time of a thread or stream, or the end of an
operation some iterations ago."""


COST = "cost"
Cost = tuple[str, int]
"""Kind and operation index of a cost that differs between plans.

``cost``: its execution. For one that some plans do not have, ``run``: its execution, ``launch``:
nothing, or ``issue``: its time on the host. Where it does not exist, nothing can follow from its
having run or been launched (minus infinity), and issuing it takes no time.
"""


class Instruction(NamedTuple):
    """``variable = maximum of the terms``, then met by ``scope``, then plus a cost."""

    variable: int
    terms: tuple[tuple[int, float], ...]
    scope: str | None
    cost: Cost | None


class Trace(Program[Form]):
    """One iteration, recorded symbolically.

    Args:
        whole: all plans have all operations.
        alike: state that is the same on all ranks at the start of every iteration.
    """

    def __init__(self, graph: Graph, whole: bool, alike: Set[State]) -> None:
        super().__init__(graph)
        self.begin, self.whole = {}, whole
        self.instructions: list[Instruction] = []
        self.inputs: dict[State, int] = {}
        self.alike: list[bool] = []
        self.least: list[Form] = []
        """Variable -> lower bounds on it: other variables, each with an offset."""
        self._met: dict[tuple[int, str], int] = {}
        for state in _states(graph):
            self.inputs[state] = self._variable(state in alike, {})
        now: dict[str, dict[str, Form]] = {"thread": {}, "stream": {}}
        for (kind, name, _), variable in self.inputs.items():
            if kind != "end":
                now[kind][str(name)] = {variable: 0.0}
        self.threads, self.streams = now["thread"], now["stream"]
        self.ends: list[Form] = []
        for index, op in enumerate(graph.ops):
            self.ends.append(self.run(index, op)[-1])
        self.after = {state: self._after(*state) for state in self.inputs}

    def _variable(self, alike: bool, least: Form) -> int:
        self.alike.append(alike)
        self.least.append(least)
        return len(self.alike) - 1

    def alike_after(self) -> set[State]:
        """Return the state that the iteration leaves the same on all ranks."""
        return {state for state, form in self.after.items() if self._alike(form)}

    def end_of(self, dep: Dep) -> Form:
        return {self.inputs["end", dep.op, dep.lag]: 0.0} if dep.lag else self.ends[dep.op]

    def exists_always(self, index: int, op: Op) -> bool:
        return self.whole or op.active is None

    def later(self, time: Form, ms: float) -> Form:
        return {variable: offset + ms for variable, offset in time.items()}

    def latest(self, *times: Form) -> Form:
        """Return the maximum, without terms that others imply."""
        terms = _join(*times)
        if len(terms) == 1:
            return terms
        for variable, offset in [*terms.items()]:
            for other, more in terms.items():
                if other > variable:  # lower bounds are variables that are older
                    implied = self.least[other].get(variable)
                    if implied is not None and implied + more >= offset:
                        del terms[variable]
                        break
        return terms

    def meet(self, ready: Form, index: int, op: Op) -> Form:
        """Return the last arrival, variable by variable: offsets are the same on all ranks."""
        if op.scope is None:
            return ready
        arrivals: Form = {}
        for variable, offset in ready.items():
            if not self.alike[variable]:
                key = variable, str(op.scope)
                if key not in self._met:
                    alike = op.scope == "world"
                    self._met[key] = self._record({variable: 0.0}, alike, scope=str(op.scope))
                variable = self._met[key]
            arrivals = _join(arrivals, {variable: offset})
        return self.latest(arrivals)

    def spend(self, time: Form, cost: str, index: int, op: Op) -> Form:
        alike = self._alike(time) and (cost != RUN or op.cost_ms.shape[-1] == 1)
        if not self.exists_always(index, op):
            variable = self._record(time, alike, cost=(cost, index))
            if cost != ISSUE:
                self.least[variable] = {}
            return {variable: 0.0}
        if cost != RUN:
            return self.later(time, op.host_ms) if cost == ISSUE else time
        # a collective of constant cost keeps its place in critical cycles
        if op.cost_ms.shape == (1,) and op.scope is None:
            return self.later(time, float(op.cost_ms[0]))
        return {self._record(time, alike, cost=(COST, index)): 0.0}

    def _alike(self, form: Form) -> bool:
        return all(self.alike[variable] for variable in form)

    def _record(
        self, form: Form, alike: bool, *, scope: str | None = None, cost: Cost | None = None
    ) -> int:
        """Record a new variable; costs are never negative, so it is at least its terms."""
        least = dict(form)
        for variable, offset in form.items():
            for other, more in self.least[variable].items():
                if more + offset > least.get(other, -np.inf):
                    least[other] = more + offset
        variable = self._variable(alike, least)
        # terms that differ by rank come first: the others are then maximised into them
        terms = sorted(form.items(), key=lambda term: (self.alike[term[0]], term))
        self.instructions.append(Instruction(variable, tuple(terms), scope, cost))
        return variable

    def _after(self, kind: str, name: str | int, lag: int) -> Form:
        """Return the state that the next iteration starts from."""
        if kind != "end":
            return (self.threads if kind == "thread" else self.streams)[str(name)]
        assert isinstance(name, int)
        return self.end_of(Dep(name, lag - 1))

    def finish(self) -> dict[State, int]:
        """Return the variables that hold the state at the end."""
        recorded: dict[tuple[tuple[int, float], ...], int] = {}
        variables = {}
        for state, form in self.after.items():
            key = tuple(sorted(form.items()))
            if key not in recorded:
                alone = len(key) == 1 and not key[0][1]
                alike = self._alike(form)
                recorded[key] = key[0][0] if alone else self._record(form, alike)
            variables[state] = recorded[key]
        return variables


def steady(graph: Graph, whole: bool) -> Trace:
    """Record the iteration with the state that is alike on all ranks at the start of every one.

    At time zero all state is alike; state that an iteration keeps alike stays alike.
    """
    alike = set(_states(graph))
    while not (after := (trace := Trace(graph, whole, alike)).alike_after()) >= alike:
        alike &= after
    return trace


def _states(graph: Graph) -> list[State]:
    """List the state that one iteration leaves to the next."""
    streams = dict.fromkeys(op.stream for op in graph.ops)
    longest: dict[int, int] = {}
    for dep in (dep for op in graph.ops for dep in op.deps):
        longest[dep.op] = max(dep.lag, longest.get(dep.op, 0))
    return [
        *(("thread", thread, 0) for thread in thread_names(graph)),
        *(("stream", stream, 0) for stream in streams),
        *(("end", op, lag) for op, most in longest.items() for lag in range(1, most + 1)),
    ]


def _join(*forms: Form) -> Form:
    """Return the maximum of forms."""
    joined: Form = {}
    for form in forms:
        for variable, offset in form.items():
            if offset > joined.get(variable, -np.inf):
                joined[variable] = offset
    return joined


Array = NDArray[np.float64]


class CompiledTimeline:
    """Program that repeats the iterations of graphs with the same structure.

    Args:
        graph: one of them, without operations that only some ranks have. A cost given as a single
            number must be the same in all graphs that the program runs.
        whole: all plans have all operations.
    """

    def __init__(self, graph: Graph, *, whole: bool) -> None:
        for op in graph.ops:
            if op.ranks is not None or op.fills or isinstance(op.scope, tuple):
                raise ValueError(f"operation '{op.name}' is not the same on all ranks")
        trace = steady(graph, whole)
        self.world_size, self.width = graph.world_size, graph.intra_group_size
        self.ranks = Graph(self.world_size, self.width)
        self.alike = trace.alike
        last = trace.finish()
        self.instructions = trace.instructions
        self.costs = [i.cost for i in trace.instructions if i.cost is not None]
        self.inputs, self.outputs = [*trace.inputs.values()], [*last.values()]
        # state that advances together by construction is compared once
        paced = dict.fromkeys(v for s, v in last.items() if s[0] != "end")
        self.paced = [self.outputs.index(v) for v in paced]
        self.steps = [(i[0], *i.terms[0], i.terms[1:], i.scope, i.cost) for i in self.instructions]
        self.made = {i.variable: i for i in self.instructions}
        self.before = dict(zip(self.inputs, self.outputs, strict=True))
        issuing = dict.fromkeys(thread_names(graph), 0.0)
        for op in graph.ops:
            issuing[op.thread] += op.host_ms
        self.issuing_ms = max(issuing.values())

    def iteration_ms(self, graph: Graph, plans: int) -> Array:
        """Predict the iteration time in ms, ``[plans]``; equals `timeline.simulate`."""
        costs = {cost: _cost(cost[0], graph.ops[cost[1]]) for cost in self.costs}
        state = self._begin()
        past = [[state[i] for i in self.paced]]
        advances: list[list[Array]] = []
        settled = np.full(plans, np.nan)
        for iteration in range(MAX_ITERATIONS):
            values = self._iterate(state, costs)
            state = [values[variable] for variable in self.outputs]
            past.append([state[i] for i in self.paced])
            advances.append(_advances(past[-2], past[-1]))
            if iteration > 1:
                period = _most(advances[-1])
                off = _most([np.abs(d) for d in _advances(advances[-2], advances[-1])])
                now = np.where(off <= PERIOD_TOLERANCE * period, period, np.nan)
                settled = np.where(np.isnan(settled), now, settled)
                if not np.isnan(settled).any():
                    return settled
        half = len(past) // 2
        mean = _most(_advances(past[half], past[-1])) / (len(past) - 1 - half)
        return np.where(np.isnan(settled), mean, settled)

    def critical_cycle(self, costs: Sequence[Array | float]) -> tuple[list[int], float, int]:
        """Return a closed chain that sets the period of one plan.

        The result is its operations that are collectives or whose costs differ between plans, last
        first; its length in ms; and its iterations.

        Length divided by iterations is a lower bound of the period at any costs (the cycle mean of
        a max-plus system); at these costs it equals the period.

        Args:
            costs: of every operation, ``[ranks or 1, 1]`` or a number.
        """
        alone = all(self.alike)  # then plain numbers are several times as fast as arrays
        numbers: dict[Cost, Any] = {cost: costs[cost[1]] for cost in self.costs}
        state: list[Any] = self._begin()
        if alone:
            numbers = {cost: _number(ms) for cost, ms in numbers.items()}
            state = [0.0] * len(state)
        history: list[list[Array]] = []
        advances, now = [np.zeros(1)], np.zeros(1)
        while len(history) < MAX_ITERATIONS:
            values = self._iterate(state, numbers, max if alone else np.maximum)
            history.append(values)
            state = [values[variable] for variable in self.outputs]
            paced = [state[i] for i in self.paced]
            before, now = now, np.array(paced) if alone else np.concatenate(paced).ravel()
            advances.append(now - before)
            if len(history) > 2:
                off = np.abs(advances[-1] - advances[-2]).max()
                if off <= PERIOD_TOLERANCE * advances[-1].max():
                    break
        places = [
            (self.outputs[i], rank)
            for i in self.paced
            for rank in range(1 if self.alike[self.outputs[i]] else self.world_size)
        ]
        # the last of the times that advance most
        behind = advances[-1] < advances[-1].max() * (1 - PERIOD_TOLERANCE)
        return self._walk(history, *places[int(np.where(behind, -1.0, now).argmax())])

    def _walk(
        self, history: Sequence[Sequence[Array]], variable: int, rank: int
    ) -> tuple[list[int], float, int]:
        """Go back from a time at the end of the last iteration until the chain closes."""
        visited: dict[tuple[int, int], tuple[int, int]] = {}
        path: list[int] = []
        iteration = len(history) - 1
        while iteration >= 0:
            place = variable, 0 if self.alike[variable] else rank
            values = history[iteration]
            if place in visited:
                position, first = visited[place]
                length = _at(history[first][variable], rank) - _at(values[variable], rank)
                return path[position:], length, first - iteration
            visited[place] = len(path), iteration
            if variable in self.before:
                variable, iteration = self.before[variable], iteration - 1
                continue
            _, terms, scope, cost = self.made[variable]
            if cost is not None:
                path.append(cost[1])
            if scope is not None:
                ranks = self.ranks.members(scope, rank)
                rank = int(ranks[values[terms[0][0]][ranks].argmax()])
            # on a tie, the latest variable of the program
            variable = max((_at(values[term], rank) + ms, term) for term, ms in terms)[1]
        return [], self.issuing_ms, 1  # nothing ever blocks the host: it only issues work

    def _begin(self) -> list[Array]:
        shapes = [(1 if self.alike[v] else self.world_size, 1) for v in self.inputs]
        return [np.zeros(shape) for shape in shapes]

    def _iterate(
        self,
        state: list[Array],
        costs: Mapping[Cost, Array],
        maximum: Callable[[Array, Array], Array] = np.maximum,
    ) -> list[Array]:
        """Compute all variables of an iteration that starts from a state."""
        values: list[Array] = [_NONE] * len(self.alike)
        for variable, time in zip(self.inputs, state, strict=True):
            values[variable] = time
        for variable, first, offset, terms, scope, cost in self.steps:
            value = values[first] + offset if offset else values[first]
            for other, offset in terms:
                value = maximum(value, values[other] + offset if offset else values[other])
            if scope is not None:
                value = self._last(value, scope)
            values[variable] = value if cost is None else value + costs[cost]
        return values

    def _last(self, arrival: Array, scope: str) -> Array:
        """Return the last arrivals ``[ranks or 1, plans]`` of arrivals ``[ranks or 1, plans]``."""
        if scope == "world" or len(arrival) == 1:
            return np.asarray(arrival.max(axis=0, keepdims=True))
        grouped = arrival.reshape(-1, self.width, arrival.shape[-1])
        last = grouped.max(axis=1 if scope == "intra" else 0, keepdims=True)
        return np.broadcast_to(last, grouped.shape).reshape(arrival.shape)


def compile_timeline(graph: Graph, *, whole: bool) -> CompiledTimeline:
    """Return the program of a graph; graphs that differ only in costs by rank or plan share it.

    Settings of a model often change such costs alone, and compiling takes longer than running.
    """
    ops = tuple(
        (
            *(op.thread, op.stream, op.host_ms, op.kernels, op.deps, op.scope, op.blocks_host),
            *(op.active is None, op.ranks, op.fills, _constant(op), op.cost_ms.shape[-1] == 1),
        )
        for op in graph.ops
    )
    about = (graph.world_size, graph.intra_group_size, graph.inline_streams)
    return _compiled(_Structure((whole, *about, graph.launch_latency_ms, *ops), graph))


def _constant(op: Op) -> float | None:
    """Return an operation's cost if all plans and ranks share it, so that it is folded in."""
    constant = op.cost_ms.shape == (1,) and op.scope is None
    return float(op.cost_ms[0]) if constant else None


@dataclass(frozen=True)
class _Structure:
    """Cache key of a graph: all that its program depends on."""

    same: tuple[Hashable, ...]
    graph: Graph = field(compare=False)


@lru_cache(maxsize=128)
def _compiled(structure: _Structure) -> CompiledTimeline:
    return CompiledTimeline(structure.graph, whole=bool(structure.same[0]))


_NONE = np.zeros((1, 1))


def _number(value: Array | float) -> float:
    return value if isinstance(value, float) else value.item()


def _at(value: Array, rank: int) -> float:
    """Return a time ``[ranks or 1, 1]``, or a plain number, on one rank."""
    return value if isinstance(value, float) else float(value[min(rank, len(value) - 1), 0])


def _cost(kind: str, op: Op) -> Array:
    """Return a cost ``[ranks or 1, plans or 1]`` in ms."""
    if kind == COST or op.active is None:
        return np.atleast_2d(op.cost_ms).T
    if kind == ISSUE:
        return np.where(op.active, op.host_ms, 0.0)[None]
    if kind == LAUNCH:
        return np.where(op.active, 0.0, -np.inf)[None]
    return np.where(op.active, np.atleast_2d(op.cost_ms).T, -np.inf)


def _advances(before: list[Array], after: list[Array]) -> list[Array]:
    return [b - a for a, b in zip(before, after, strict=True)]


def _most(times: list[Array]) -> Array:
    """Return the largest over all arrays ``[ranks or 1, plans or 1]``, by plan."""
    most: Array = times[0].max(axis=0)
    for other in times[1:]:
        most = np.maximum(most, other.max(axis=0))
    return most
