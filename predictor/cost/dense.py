"""The dense part of an iteration as priced segments: ops between two events, and the events.

A segment is what one rank computes without meeting a lookup, a full bucket of gradients or the
outputs of a lookup that it must wait for. Segments are few however many ops there are, so that a
plan is scored as fast. Where the host issues ops more slowly than the device runs them, the last
kernel of a segment ends when

    max over i of (issued_i + sum of the kernels from i on)

after its start; the segment is parted at that i, which makes the graph say just this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor.cost.elementwise import memory_ms
from predictor.cost.ops.op_time import CONCATENATIONS, OpCost, OpTimes, fused_chains, outer_bytes
from predictor.hardware.schema import HardwareProfile
from predictor.model.dense_settings import DENSE_STATES
from predictor.model.op_calls import DenseProgram, Event, Gradient, Lookup, LookupBackward, OpCall
from predictor.model.workload import MeasuredDense
from predictor.units import mib

Array = NDArray[np.float64]

UNSEEN = frozenset(("detach", "alias", "lift_fresh"))
"""Views that only a recorder sees: autograd makes them without the dispatcher."""
HostCost = Callable[[int, int, int], float]
"""Kernels, views and casts -> host time in ms."""


@dataclass(frozen=True)
class DenseSegment:
    """Run of consecutive ops.

    Args:
        name: of the op that takes most of its time, after the part of the model if that is known.
        cost_ms, host_ms: on the device, and to issue it.
        kernels: launches, at least 1.
        resource: profile group that most of its time comes from.
        waits: embedding modules whose outputs its first op is the first to read.
    """

    name: str
    cost_ms: float
    host_ms: float
    kernels: int
    resource: str
    waits: tuple[str, ...] = ()


@dataclass(frozen=True)
class LookupCall:
    """Call of an embedding module."""

    module: str


@dataclass(frozen=True)
class GradientReturn:
    """Return of the gradients of a module's outputs to the ranks that hold its tables."""

    module: str


@dataclass(frozen=True)
class TableUpdate:
    """Backward of a module's lookups."""

    module: str


@dataclass(frozen=True)
class Bucket:
    """Dense gradients that are all-reduced together."""

    bytes: int


DenseStep = DenseSegment | LookupCall | GradientReturn | TableUpdate | Bucket


@dataclass(frozen=True)
class DenseWork:
    """Dense work of one rank in an iteration, without lookups and exchanges.

    Args:
        forward, backward: in order.
        optimizer: the step of the dense optimizer.
        parameters: tensors that it steps.
        products: m, n and k of single matrix products.
        by_bytes: ops without a kernel model, which were counted by their bytes: name -> calls.
        by_module: path of a module -> device time in ms of its forward and its backward.
    """

    forward: tuple[DenseStep, ...]
    backward: tuple[DenseStep, ...]
    optimizer: DenseSegment
    parameters: int
    products: frozenset[tuple[int, int, int]] = frozenset()
    by_bytes: dict[str, int] = field(default_factory=dict)
    by_module: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def segments_ms(self) -> float:
        """Device time of forward and backward."""
        steps = (*self.forward, *self.backward)
        return sum(step.cost_ms for step in steps if isinstance(step, DenseSegment))


def optimizer_ms(hardware: HardwareProfile, optimizer: str, parameters: ArrayLike) -> Array:
    """Return the time in ms of one optimizer step over fp32 elements, in their shape; 0 for none.

    It reads parameter, gradient and states, and writes all but the gradient.
    """
    passes = 3 + 2 * DENSE_STATES[optimizer]
    size = passes * 4 * np.asarray(parameters, dtype=np.float64)
    return np.where(size > 0, memory_ms(hardware, size), 0.0)


@dataclass(frozen=True)
class Execution:
    """Execution mode of a dense part.

    Args:
        host_ms: host time of ops of the dense part.
        compiled: a compiler joins memory-bound ops (`predictor.cost.ops.op_time`); no view is run.
        cuda_graphs: each segment is one launch.
        bucket_cap_mb: MiB of gradients at which a bucket is full.
    """

    host_ms: HostCost
    compiled: bool = False
    cuda_graphs: bool = False
    bucket_cap_mb: float = 25.0


def price(
    program: DenseProgram, modules: Sequence[str], times: OpTimes, execution: Execution
) -> DenseWork:
    """Price a program on a profile and part it into segments.

    Args:
        modules: those with tables. One that the program does not call is looked up before it and
            updated after it.
    """
    pricer = _Pricer(times, execution)
    called = [event.module for event in program.forward if isinstance(event, Lookup)]
    absent = [module for module in modules if module not in called]
    forward = pricer.forward(program.forward)
    backward = pricer.backward(program.backward, _issue_points(program))
    uncalled = [
        m for m in modules if LookupCall(m) not in forward or GradientReturn(m) not in backward
    ]
    return DenseWork(
        (*map(LookupCall, absent), *forward),
        (*backward, *(step(m) for m in uncalled[::-1] for step in (GradientReturn, TableUpdate))),
        pricer.optimizer([e for e in program.optimizer if isinstance(e, OpCall)]),
        sum(isinstance(event, Gradient) for event in program.backward),
        frozenset(pricer.products),
        dict(pricer.by_bytes),
        {path: (forward, backward) for path, (forward, backward) in pricer.by_module.items()},
    )


def measured_work(dense: MeasuredDense, modules: Sequence[str]) -> DenseWork:
    """Turn measured times into segments.

    Lookups come before them and gradients of tables after them. Buckets of dense gradients are full
    after equal parts of the backward.
    """
    forward = DenseSegment("measured", dense.measured.forward_ms, 0.0, 1, "gemm", tuple(modules))
    cap, gradient_bytes = mib(dense.bucket_cap_mb), dense.gradient_bytes
    sizes = [cap] * int(gradient_bytes // cap)
    sizes += [round(gradient_bytes - sum(sizes))] if gradient_bytes > sum(sizes) else []
    part = DenseSegment("measured", dense.measured.backward_ms / max(1, len(sizes)), 0.0, 1, "gemm")
    parts: list[DenseStep] = [step for size in sizes for step in (part, Bucket(size))] or [part]
    returns: list[DenseStep] = [GradientReturn(module) for module in reversed(modules)]
    updates: list[DenseStep] = [TableUpdate(module) for module in reversed(modules)]
    return DenseWork(
        (*map(LookupCall, modules), forward),
        (*parts, *returns, *updates),
        DenseSegment("step", dense.measured.optimizer_ms, 0.0, 1, "elementwise"),
        0,
    )


class _Pricer:
    """Pricer of ops that records which products and modules they belong to."""

    def __init__(self, times: OpTimes, execution: Execution) -> None:
        self.times = times
        self.execution = execution
        self.products: set[tuple[int, int, int]] = set()
        self.by_bytes: Counter[str] = Counter()
        self.by_module: dict[str, list[float]] = {}

    def forward(self, events: Sequence[Event]) -> tuple[DenseStep, ...]:
        """Part the forward where a module is called, and where an op first reads its outputs."""
        steps: list[DenseStep] = []
        calls: list[OpCall] = []
        pending: dict[int, str] = {}
        waits: tuple[str, ...] = ()
        called: set[str] = set()
        for event in events:
            if isinstance(event, Lookup):
                if event.module in called:
                    continue
                called.add(event.module)
                steps += self.segments(calls, waits)
                calls, waits = [], ()
                steps.append(LookupCall(event.module))
                pending |= {operand.storage: event.module for operand in event.outputs}
            elif isinstance(event, OpCall):
                read = {pending[o.storage] for o in event.inputs if o.storage in pending}
                if read:
                    if any(call.moves for call in calls):
                        steps += self.segments(calls, waits)
                        calls, waits = [], ()
                    waits = (*waits, *sorted(read))
                    pending = {s: m for s, m in pending.items() if m not in read}
                calls.append(event)
        return (*steps, *self.segments(calls, waits))

    def backward(
        self, events: Sequence[Event], points: dict[str, frozenset[int]]
    ) -> tuple[DenseStep, ...]:
        """Part the backward into segments.

        It is parted where the gradients of a module are complete, where the backward of its lookups
        has its turn, and where a bucket is full.
        """
        steps: list[DenseStep] = []
        calls: list[OpCall] = []
        returned: list[str] = []
        cap, gathered = mib(self.execution.bucket_cap_mb), 0

        def flush(*more: DenseStep) -> None:
            nonlocal calls
            steps.extend(self.segments(calls, backward=True))
            calls = []
            steps.extend(more)

        for event in _as_completed(events):
            if isinstance(event, OpCall):
                used = {operand.storage for operand in event.inputs}
                ready = [m for m in returned if points[m] & used]
                if ready and event.moves:
                    flush(*map(TableUpdate, ready))
                    returned = [m for m in returned if m not in ready]
                calls.append(event)
            elif isinstance(event, LookupBackward) and event.module in points:
                if GradientReturn(event.module) in steps:
                    continue
                flush(GradientReturn(event.module))
                returned.append(event.module)
            elif isinstance(event, Gradient):
                gathered += event.elements * event.item_bytes
                if gathered >= cap:
                    flush(Bucket(gathered))
                    gathered = 0
        flush(*map(TableUpdate, returned), *([Bucket(gathered)] if gathered else []))
        return tuple(steps)

    def optimizer(self, calls: Sequence[OpCall]) -> DenseSegment:
        """Price all optimizer steps as one segment, whose host time is the runtime's.

        A rank that computes on its host steps one parameter after the other, in its caches.
        """
        costs = [self._cost(call) for call in calls]
        ms, hardware = sum(cost.ms for cost in costs), self.times.hardware
        if calls and hardware.inline:
            ms = float(memory_ms(hardware, outer_bytes(calls)))
        kernels = max(1, sum(cost.kernels for cost in costs))
        return DenseSegment("step", ms, 0.0, kernels, "elementwise")

    def segments(
        self, calls: Sequence[OpCall], waits: tuple[str, ...] = (), *, backward: bool = False
    ) -> Iterator[DenseSegment]:
        """Yield the ops as one segment, or as two where the host is slower (see the module)."""
        priced = [*self._priced(calls)]
        for call, cost in priced:
            if call.path:
                self.by_module.setdefault(part_of(call.path), [0.0, 0.0])[backward] += cost.ms
        if not priced:
            return
        if self.execution.cuda_graphs and not self.times.hardware.inline:
            yield replace(_segment(priced, self.execution.host_ms(1, 0, 0), waits), kernels=1)
            return
        host = [self._issue_ms(call.name, cost) for call, cost in priced]
        tails = np.cumsum([cost.ms for _, cost in priced][::-1])[::-1]
        at = 0 if self.times.hardware.inline else int(np.argmax(np.cumsum(host) + tails))
        at = at if tails[0] > tails[at] else 0
        for part in (slice(0, at), slice(at, len(priced))):
            if priced[part]:
                yield _segment(priced[part], sum(host[part]), waits)
                waits = ()

    def _priced(self, calls: Sequence[OpCall]) -> Iterator[tuple[OpCall, OpCost]]:
        """Yield each op with its cost.

        In compiled code the first op of each chain, renamed ``fused``, stands for the chain.
        """
        if not self.execution.compiled:
            yield from ((call, self._cost(call)) for call in calls)
            return
        for chain in fused_chains(calls):
            if len(chain) == 1:
                yield chain[0], self._cost(chain[0], compiled=True)
            else:
                yield replace(chain[0], name="fused"), self.times.cost_of_chain(chain)

    def _issue_ms(self, name: str, cost: OpCost) -> float:
        if name in UNSEEN:
            return 0.0
        casts = int(name == "_to_copy" and cost.kernels > 0)
        return self.execution.host_ms(cost.kernels, int(not cost.kernels), casts)

    def _cost(self, call: OpCall, *, compiled: bool = False) -> OpCost:
        cost = self.times.cost(call, compiled=compiled)
        if cost.product is not None:
            self.products.add(cost.product)
        if not cost.modelled:
            self.by_bytes[call.name] += 1
        return cost


def part_of(path: str) -> str:
    """Return the part of a model that a module belongs to, as people speak of it.

    ``encoder.layers.0.linear1`` gives ``encoder.layers.0``, and ``over._mlp.0`` gives ``over``.
    """
    words = path.split(".")
    private = next((i for i, word in enumerate(words) if word.startswith("_")), len(words))
    layer = next((i + 1 for i, word in enumerate(words) if word.isdigit()), 2)
    return ".".join(words[: max(1, min(private, layer))])


def _segment(
    priced: Sequence[tuple[OpCall, OpCost]], host_ms: float, waits: tuple[str, ...]
) -> DenseSegment:
    names: Counter[str] = Counter()
    groups: Counter[str] = Counter()
    for call, cost in priced:
        name = f"{part_of(call.path)} {call.name}" if call.path else call.name
        names[name] += cost.ms  # type: ignore[assignment]
        groups[cost.resource] += cost.ms  # type: ignore[assignment]
    (name, _), (resource, _) = names.most_common(1)[0], groups.most_common(1)[0]
    costs = [cost for _, cost in priced]
    kernels = sum(cost.kernels for cost in costs)
    return DenseSegment(name, sum(c.ms for c in costs), host_ms, max(1, kernels), resource, waits)


def _as_completed(events: Sequence[Event]) -> list[Event]:
    """Move the backward of each lookup to where its gradients have been written."""
    written: dict[int, int] = {}
    places: list[tuple[int, int, Event]] = []
    for at, event in enumerate(events):
        place = at
        if isinstance(event, OpCall):
            written |= {operand.storage: at for operand in event.outputs}
        elif isinstance(event, LookupBackward):
            place = max((written.get(g.storage, 0) for g in event.gradients), default=at)
        places.append((place, at, event))
    return [event for *_, event in sorted(places, key=lambda item: item[:2])]


def _issue_points(program: DenseProgram) -> dict[str, frozenset[int]]:
    """Map each module to memory that ops used before its call and that no later op uses.

    Concatenations do not count as later uses: they save nothing for their backward. Autograd runs
    the latest record first. The backward of a lookup is recorded when its module is called, so it
    runs before the first op of the backward that uses such memory.
    """
    before: dict[str, set[int]] = {}
    used: set[int] = set()
    for event in program.forward:
        if isinstance(event, Lookup):
            before.setdefault(event.module, set(used))
        elif isinstance(event, OpCall):
            used |= {operand.storage for operand in (*event.inputs, *event.outputs)}
    after: set[int] = set()
    points: dict[str, frozenset[int]] = {}
    for event in reversed(program.forward):
        if isinstance(event, Lookup):
            points[event.module] = frozenset(before[event.module] - after)
        elif isinstance(event, OpCall) and event.moves and event.name not in CONCATENATIONS:
            after |= {operand.storage for operand in (*event.inputs, *event.outputs)}
    return points
