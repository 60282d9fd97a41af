"""One iteration of a graph as a short max-plus program.

Every time in `predictor.iteration.timeline` is a maximum over earlier times plus constants and
costs. An operation that adds only constants is folded into its users, and a wait that another one
implies is dropped. What remains are operations whose costs differ between plans, and collectives.
An operation that a plan does not have costs minus infinity there. The results equal those of
`timeline.simulate` up to rounding (Baccelli et al. 1992, Synchronization and Linearity, chapter 2,
has the algebra).

Why: docs/decisions/0022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from predictor.iteration.graph import MAIN, Dep, Graph, Op

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


@dataclass
class Facts:
    """What holds at the start of every iteration for any costs.

    Args:
        alike: state that is the same on all ranks.
        least: state ``a`` -> ``b`` -> offset: ``a`` is at least ``b`` plus the offset, <= 0.
    """

    alike: set[State] = field(default_factory=set)
    least: dict[State, dict[State, float]] = field(default_factory=dict)


class Trace:
    """One iteration, recorded symbolically."""

    def __init__(self, graph: Graph, whole: bool, facts: Facts) -> None:
        self.graph = graph
        self.whole = whole
        self.instructions: list[Instruction] = []
        self.inputs: dict[State, int] = {}
        self.alike: list[bool] = []
        self.least: list[Form] = []
        """Variable -> lower bounds on it: other variables, each with an offset."""
        self._met: dict[tuple[int, str], int] = {}
        for state in _states(graph):
            self.inputs[state] = self._variable(state in facts.alike, {})
        for state, others in facts.least.items():
            least = {self.inputs[other]: offset for other, offset in others.items()}
            self.least[self.inputs[state]] = least
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
        left = dict(form)
        for variable, offset in form.items():
            for other, more in left.items():
                implied = self.least[other].get(variable)
                if implied is not None and implied + more >= offset and other != variable:
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

    def facts(self) -> Facts:
        """What this iteration leaves behind, which holds at time zero, too."""
        found = Facts({s for s, form in self.after.items() if self._alike(form)})
        for state, form in self.after.items():
            offsets = {
                other: self._least_of(form, wanted)
                for other, wanted in self.after.items()
                if other != state
            }
            found.least[state] = {o: min(w, 0.0) for o, w in offsets.items() if w > -np.inf}
        return found

    def _least_of(self, form: Form, wanted: Form) -> float:
        """The largest offset such that ``form`` is at least ``wanted`` plus it."""
        return min(
            max(
                offset + (0.0 if v == w else self.least[v].get(w, -np.inf)) - more
                for v, offset in form.items()
            )
            for w, more in wanted.items()
        )

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
    """The iteration, given what holds at the start of all of them.

    At time zero all state is alike and at least all other; what every iteration keeps so stays so.
    """
    facts = Facts(alike=set(_states(graph)))
    while True:
        found = Trace(graph, whole, facts).facts()
        if found.alike >= facts.alike:
            return Trace(graph, whole, Facts(facts.alike, found.least))
        facts = Facts(facts.alike & found.alike)


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
