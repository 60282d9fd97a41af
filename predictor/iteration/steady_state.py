"""The period of a repeated iteration for many plans at once: a compiled `timeline.simulate`.

One iteration of a graph is a short max-plus program. Every time in `predictor.iteration.timeline`
is a maximum over earlier times plus constants and costs. An operation that adds only constants is
folded into its users, and a wait that another one implies is dropped. What remains are operations
whose costs differ between plans, and collectives. An operation that a plan does not have costs
minus infinity there. The results equal those of `timeline.simulate` up to rounding (Baccelli et al.
1992, Synchronization and Linearity, chapter 2, has the algebra).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.iteration.graph import MAIN, Dep, Graph, Op
from predictor.iteration.timeline import MAX_ITERATIONS, PERIOD_TOLERANCE

Form = dict[int, float]
"""Variable -> offset: the maximum over all variables, each with its offset added."""
State = tuple[str, str | int, int]
"""State carried from one iteration to the next: the time of a thread or stream, or the end of an
operation some iterations ago."""


Cost = tuple[str, int]
"""What an operation, given by its index, adds for each plan.

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


class Trace:
    """One iteration, recorded symbolically.

    Args:
        alike: state that is the same on all ranks at the start of every iteration.
    """

    def __init__(self, graph: Graph, whole: bool, alike: Set[State]) -> None:
        self.graph = graph
        self.whole = whole
        self.instructions: list[Instruction] = []
        self.inputs: dict[State, int] = {}
        self.alike: list[bool] = []
        self.least: list[Form] = []
        """Variable -> lower bounds on it: other variables, each with an offset."""
        self._met: dict[tuple[int, str], int] = {}
        for state in _states(graph):
            self.inputs[state] = self._variable(state in alike, {})
        self.now: dict[State, Form] = {
            state: {self.inputs[state]: 0.0} for state in self.inputs if state[0] != "end"
        }
        self.ends: list[Form] = []
        for index, op in enumerate(graph.ops):
            self._run(index, op)
        self.after = {state: self._after(state) for state in self.inputs}

    def _variable(self, alike: bool, least: Form) -> int:
        self.alike.append(alike)
        self.least.append(least)
        return len(self.alike) - 1

    def _run(self, index: int, op: Op) -> None:
        """As `timeline._Clock.run`."""
        host: State = ("thread", op.thread, 0)
        stream: State = ("stream", op.stream, 0)
        inline = op.stream in self.graph.inline_streams
        issue = _shift(self.now[host], op.host_ms)
        launch = self.graph.launch_latency_ms
        ready = issue
        if not inline:
            first = _shift(self.now[host], op.host_ms / op.kernels + launch)
            ready = _join(first, self.now[stream])
        for dep in op.deps:
            ready = _join(ready, self._end(dep))
        start = self._meet(self._reduce(ready), op.scope)
        launched = _shift(issue, launch) if op.kernels > 1 and not inline else {}
        waits = inline or op.blocks_host
        if op.active is None or self.whole:
            ran = self._plus(start, index, op)
            end = self._reduce(_join(ran, launched))
            self.now[stream], self.now[host] = end, end if waits else issue
        else:
            ran = self._if_there(start, ("run", index), op.cost_ms.shape[-1] == 1)
            if launched:
                ran = _join(ran, self._if_there(launched, ("launch", index)))
            self.now[stream] = self._reduce(_join(ran, self.now[stream]))
            issued = self._record(self.now[host], self._alike(issue), cost=("issue", index))
            self.now[host] = {issued: 0.0}
            if waits:
                self.now[host] = self._reduce(_join(ran, self.now[host]))
            # a dependant of an absent operation waits for what the absent one would have waited
            end = self._reduce(_join(ran, *(self._end(dep) for dep in op.deps)))
        self.ends.append(end)

    def _end(self, dep: Dep) -> Form:
        return {self.inputs["end", dep.op, dep.lag]: 0.0} if dep.lag else self.ends[dep.op]

    def _alike(self, form: Form) -> bool:
        return all(self.alike[variable] for variable in form)

    def _plus(self, start: Form, index: int, op: Op) -> Form:
        if op.cost_ms.ndim == 1 and op.cost_ms.size == 1:
            return _shift(start, float(op.cost_ms[0]))
        alike = op.cost_ms.shape[-1] == 1 and self._alike(start)
        return {self._record(start, alike, cost=("cost", index)): 0.0}

    def _if_there(self, form: Form, cost: Cost, alike: bool = True) -> Form:
        """A time in the plans that have the operation, and nothing at all in the others."""
        variable = self._record(form, alike and self._alike(form), cost=cost)
        self.least[variable] = {}
        return {variable: 0.0}

    def _record(
        self, form: Form, alike: bool, *, scope: str | None = None, cost: Cost | None = None
    ) -> int:
        """A new variable; costs are never negative, so it is at least its terms."""
        least = dict(form)
        for variable, offset in form.items():
            for other, more in self.least[variable].items():
                if more + offset > least.get(other, -np.inf):
                    least[other] = more + offset
        variable = self._variable(alike, least)
        # those that differ by rank first: the others are then put on top of them
        terms = sorted(form.items(), key=lambda term: (self.alike[term[0]], term))
        self.instructions.append(Instruction(variable, tuple(terms), scope, cost))
        return variable

    def _meet(self, form: Form, scope: str | tuple[int, ...] | None) -> Form:
        """The last arrival: of each variable, since offsets are the same on all ranks."""
        if scope is None:
            return form
        met: Form = {}
        for variable, offset in form.items():
            if not self.alike[variable]:
                key = variable, str(scope)
                if key not in self._met:
                    alike = scope == "world"
                    self._met[key] = self._record({variable: 0.0}, alike, scope=str(scope))
                variable = self._met[key]
            met = _join(met, {variable: offset})
        return self._reduce(met)

    def _reduce(self, form: Form) -> Form:
        """Without terms that others imply."""
        if len(form) == 1:
            return form
        left, least = dict(form), self.least
        for variable, offset in form.items():
            for other, more in left.items():
                if other > variable:  # what a variable is at least is older
                    implied = least[other].get(variable)
                    if implied is not None and implied + more >= offset:
                        del left[variable]
                        break
        return left

    def _after(self, state: State) -> Form:
        """The state that the next iteration starts from, as a form."""
        if state[0] != "end":
            return self.now[state]
        _, op, lag = state
        assert isinstance(op, int)
        return self.ends[op] if lag == 1 else {self.inputs["end", op, lag - 1]: 0.0}

    def finish(self) -> dict[State, int]:
        """Variables that hold the state at the end."""
        known: dict[tuple[tuple[int, float], ...], int] = {}
        found = {}
        for state, form in self.after.items():
            key = tuple(sorted(form.items()))
            if key not in known:
                alone = len(key) == 1 and not key[0][1]
                alike = self._alike(form)
                known[key] = key[0][0] if alone else self._record(form, alike)
            found[state] = known[key]
        return found


def steady(graph: Graph, whole: bool) -> Trace:
    """The iteration, given what is alike at the start of all of them: at time zero all state is,
    and what every iteration keeps so stays so."""
    alike = set(_states(graph))
    while not (after := alike_after(graph, whole, alike)) >= alike:
        alike &= after
    return Trace(graph, whole, alike)


def alike_after(graph: Graph, whole: bool, alike: Set[State]) -> set[State]:
    """State that an iteration leaves the same on all ranks: what can be said without its times.

    Args:
        alike: state that is the same at its start.
    """
    states = _states(graph)
    now = {state: state in alike for state in states if state[0] != "end"}
    ends: list[bool] = []
    for op in graph.ops:
        host: State = ("thread", op.thread, 0)
        stream: State = ("stream", op.stream, 0)
        inline = op.stream in graph.inline_streams
        there = op.active is None or whole
        issued = now[host]
        deps = all(
            ("end", dep.op, dep.lag) in alike if dep.lag else ends[dep.op] for dep in op.deps
        )
        ready = issued and deps and (inline or now[stream])
        ran = (ready or op.scope == "world") and op.cost_ms.shape[-1] == 1
        if op.kernels > 1 and not inline:
            ran = ran and issued
        now[stream] = ran and (there or now[stream])
        if inline or op.blocks_host:
            now[host] = ran and (there or issued)
        ends.append(ran and (there or deps))

    def same(state: State) -> bool:
        kind, op, lag = state
        if kind != "end":
            return now[state]
        assert isinstance(op, int)
        return ends[op] if lag == 1 else ("end", op, lag - 1) in alike

    return set(filter(same, states))


def _states(graph: Graph) -> list[State]:
    """Everything that one iteration leaves to the next."""
    threads = dict.fromkeys((MAIN, *(op.thread for op in graph.ops)))
    streams = dict.fromkeys(op.stream for op in graph.ops)
    longest: dict[int, int] = {}
    for dep in (dep for op in graph.ops for dep in op.deps):
        longest[dep.op] = max(dep.lag, longest.get(dep.op, 0))
    return [
        *(("thread", thread, 0) for thread in threads),
        *(("stream", stream, 0) for stream in streams),
        *(("end", op, lag) for op, most in longest.items() for lag in range(1, most + 1)),
    ]


def _shift(form: Mapping[int, float], offset: float) -> Form:
    return {variable: more + offset for variable, more in form.items()}


def _join(*forms: Form) -> Form:
    """Their maximum."""
    found: Form = {}
    for form in forms:
        for variable, offset in form.items():
            if offset > found.get(variable, -np.inf):
                found[variable] = offset
    return found


Array = NDArray[np.float64]


class CompiledTimeline:
    """Repeats the iterations of graphs that have the same structure.

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
        self.alike = [trace.alike[v] for v in trace.inputs.values()]
        last = trace.finish()
        self.instructions = trace.instructions
        self.costs = [i.cost for i in trace.instructions if i.cost is not None]
        self.inputs, self.outputs = [*trace.inputs.values()], [*last.values()]
        self.size = len(trace.alike)
        # state that advances together by construction is compared once
        paced = dict.fromkeys(v for s, v in last.items() if s[0] != "end")
        self.paced = [self.outputs.index(v) for v in paced]

    def iteration_ms(self, graph: Graph, plans: int) -> Array:
        """Predicted iteration time in ms, ``[plans]``; as `timeline.simulate`."""
        costs = {cost: _cost(cost[0], graph.ops[cost[1]]) for cost in self.costs}
        state = [np.zeros((1 if alike else self.world_size, 1)) for alike in self.alike]
        past = [[state[i] for i in self.paced]]
        advances: list[list[Array]] = []
        settled = np.full(plans, np.nan)
        for iteration in range(MAX_ITERATIONS):
            state = self._iterate(state, costs)
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

    def _iterate(self, state: list[Array], costs: Mapping[Cost, Array]) -> list[Array]:
        values: list[Array] = [_NONE] * self.size
        for variable, given in zip(self.inputs, state, strict=True):
            values[variable] = given
        for variable, terms, scope, cost in self.instructions:
            (first, offset), *others = terms
            value = values[first] + offset if offset else values[first]
            for other, offset in others:
                value = np.maximum(value, values[other] + offset if offset else values[other])
            if scope is not None:
                value = self._last(value, scope)
            values[variable] = value if cost is None else value + costs[cost]
        return [values[variable] for variable in self.outputs]

    def _last(self, arrival: Array, scope: str) -> Array:
        """Last arrivals ``[ranks or 1, plans]`` of arrivals ``[ranks or 1, plans]``."""
        if scope == "world" or len(arrival) == 1:
            return np.asarray(arrival.max(axis=0, keepdims=True))
        grouped = arrival.reshape(-1, self.width, arrival.shape[-1])
        last = grouped.max(axis=1 if scope == "intra" else 0, keepdims=True)
        return np.broadcast_to(last, grouped.shape).reshape(arrival.shape)


_NONE = np.zeros((1, 1))


def _cost(kind: str, op: Op) -> Array:
    """A cost ``[ranks or 1, plans or 1]`` in ms."""
    if kind == "cost" or op.active is None:
        return np.atleast_2d(op.cost_ms).T
    if kind == "issue":
        return np.where(op.active, op.host_ms, 0.0)[None]
    if kind == "launch":
        return np.where(op.active, 0.0, -np.inf)[None]
    return np.where(op.active, np.atleast_2d(op.cost_ms).T, -np.inf)


def _advances(before: list[Array], after: list[Array]) -> list[Array]:
    return [b - a for a, b in zip(before, after, strict=True)]


def _most(found: list[Array]) -> Array:
    """The largest over all arrays ``[ranks or 1, plans or 1]``, by plan."""
    most: Array = found[0].max(axis=0)
    for other in found[1:]:
        most = np.maximum(most, other.max(axis=0))
    return most
