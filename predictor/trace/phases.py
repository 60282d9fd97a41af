"""Times of the phases of a traced job: lookups, exchanges and the dense part, rank by rank.

`measured_phases` gives the times that `predictor.learn` compares with a prediction; `traced_dense`
gives the measured form of a model file's ``dense``. Where a device was traced, its kernels count,
by the ops that launched them. Else the time of the host's main thread counts; its dense part leaves
out lookups, collectives and the preparation of batches.

An exchange takes as long as on the rank that came last to it, which waited for nobody. Where it
overlaps other work on the same core, the trace cannot divide the time: the overlap is its error.

Lookups, the distribution of ids and outputs, and collectives are known by the annotations of
TorchRec's modules and train pipelines (distributed/types.py, embeddingbag.py, train_pipelines.py),
or by the names of FBGEMM's and c10d's ops. Their backward is known by the sequence number that a
node of autograd shares with the op that created it (torch/csrc/autograd/profiler_python.cpp).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from predictor.errors import InputError
from predictor.model.plan import ShardingType
from predictor.model.workload import DenseTimes, MeasuredDense
from predictor.trace.breakdown import Intervals, breakdown
from predictor.trace.comms import info_of_host
from predictor.trace.events import HostEvent, RankTrace, TraceStep
from predictor.units import GIB, MIB, us

Phase = Literal["forward", "backward", "optimizer"]

SPARSE = re.compile(
    r"\[\w+\]_\[.*\]_\["  # [lookup]_[module]_[sharding type]
    r"|## .*wait\(\) ##|## .*(sparse_data_dist|all2all|reduce_scatter|all_gather|prefetch"
    r"|embedding_lookup|copy_batch|load.batch|next_batch|wait_for_batch)"
    r"|c10d::|record_param_comms|nccl:|gloo:"
    r"|fbgemm::\w*(lookup|bucketize|permute|bounds_check|cache|expand_into_jagged|recat)"
    r"|aten::_?embedding_bag"
)
"""Work of embedding modules and collectives, with all that nests in it."""
SPARSE_NODE = re.compile(
    r"All2All|AllToAll|ReduceScatter|AllGather|AllReduce|Lookup\w*Function|EmbeddingBagBackward"
)
"""Nodes of autograd that are their backward."""
LOOKUP = re.compile(r"\[lookup\]_\[(.*)\]_\[(\w+)\]")
"""TorchRec's annotation of the fused lookups of a module and sharding type."""
INPUT_DIST = re.compile(r".*(kjt|sparse_data_dist|\[splits_dist\]|\[input_dist\])", re.IGNORECASE)
NODE = "autograd::engine::evaluate_function: "
BACKWARD = re.compile(r"## backward|autograd::engine::evaluate_function")
OPTIMIZER = re.compile(r"## optimizer|## zero_grad|Optimizer\.(step|zero_grad)#")


@dataclass(frozen=True)
class Part:
    """A host event with the phase and the part of the model that it belongs to.

    Args:
        dense: False for embedding modules, collectives and the preparation of batches.
        lookup: path of the embedding module and sharding type whose lookup contains the event.
        outermost: the event is the outermost of that lookup.
        ids: the event belongs to the distribution of ids.
    """

    event: HostEvent
    phase: Phase
    dense: bool
    lookup: tuple[str, str] | None = None
    outermost: bool = False
    ids: bool = False


def parts_of(trace: RankTrace) -> list[Part]:
    """Classify every op, annotation and runtime call, thread by thread in order of start."""
    threads: dict[int, list[HostEvent]] = defaultdict(list)
    for event in trace.host:
        if not event.name.startswith("ProfilerStep#"):
            threads[event.thread].append(event)
    nested = [part for events in threads.values() for part in _nested(events, {})]
    sparse = _sparse_sequences(nested)
    return [part for events in threads.values() for part in _nested(events, sparse)]


def _nested(
    events: Sequence[HostEvent], sparse: Mapping[int, tuple[str, str] | None]
) -> Iterable[Part]:
    """Classify the events of one thread; a nested event belongs to the part around it."""
    around: list[Part] = []
    for event in events:
        while around and around[-1].event.end_us <= event.start_us:
            around.pop()
        above = around[-1] if around else None
        within = above.lookup if above else None
        lookup = within or _lookup_of(event, sparse)
        part = Part(
            event,
            above.phase if above and above.phase != "forward" else _phase(event),
            (above is None or above.dense) and not _is_sparse(event, sparse),
            lookup,
            lookup is not None and within is None,
            bool(above and above.ids) or INPUT_DIST.match(event.name) is not None,
        )
        around.append(part)
        yield part


def _phase(event: HostEvent) -> Phase:
    if OPTIMIZER.match(event.name):
        return "optimizer"
    return "backward" if BACKWARD.match(event.name) else "forward"


def _lookup_of(
    event: HostEvent, sparse: Mapping[int, tuple[str, str] | None]
) -> tuple[str, str] | None:
    if event.name.startswith(NODE):
        return None if event.sequence is None else sparse.get(event.sequence)
    match = LOOKUP.match(event.name)
    return None if match is None else (match[1], match[2])


def _is_sparse(event: HostEvent, sequences: Container[int]) -> bool:
    if not event.name.startswith(NODE):
        return SPARSE.match(event.name) is not None
    return event.sequence in sequences or SPARSE_NODE.search(event.name) is not None


def _sparse_sequences(parts: Iterable[Part]) -> dict[int, tuple[str, str] | None]:
    """Map the sequence numbers of autograd nodes of embedding modules to their lookups.

    An op that creates no node has the number of the next op that does: the last op counts.
    """
    last: dict[int, Part] = {}
    for part in parts:
        number = part.event.sequence
        if number is None or part.phase != "forward":
            continue
        if number not in last or last[number].event.start_us <= part.event.start_us:
            last[number] = part
    return {number: part.lookup for number, part in last.items() if not part.dense}


PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
LOSS = re.compile(r"aten::\w*(loss|cross_entropy)")
LAYER = re.compile(r"aten::(linear|addmm|mm)$")
OPTIMIZERS = {"SGD": "sgd", "Adagrad": "adagrad", "Adam": "adam", "AdamW": "adam"}
STEPPED = re.compile(r"Optimizer\.step#(\w+)\.step")
HOST_BOUND = 0.1
"""Share of a step in which the device waits for the host, above which a note says so."""


@dataclass(frozen=True)
class TracedDense:
    """The dense part of a traced job.

    Args:
        dense: medians over ranks and steps.
        steps: their number.
        notes: sources of the figures, and missing data.
    """

    dense: MeasuredDense
    steps: int
    notes: tuple[str, ...]


def traced_dense(traces: Sequence[RankTrace], batch_size: int | None = None) -> TracedDense:
    """Measure the dense part of a job from the traces of its ranks.

    Args:
        traces: of one rank or more; steps without a backward are left out.
        batch_size: samples per rank; None: by the shapes of the loss.
    """
    readers = [_Steps(trace) for trace in traces]
    steps = [step for reader in readers for step in reader.steps()]
    if not steps:
        raise InputError(
            "no step of these traces holds the forward and the backward of a dense part; record "
            "training steps with ProfilerActivity.CPU (and CUDA on a GPU)"
        )
    notes: list[str] = []
    if batch_size is None:
        batch_size, how = _batch_size(readers)
        notes.append(how)
    gradients = [s.gradient_bytes for s in steps if s.gradient_bytes is not None]
    if not gradients:
        notes.append("no size of a gradient all-reduce is known, so gradient_mib is 0; set it")
    activations = [s.activation_bytes for s in steps if s.activation_bytes is not None]
    if not activations:
        notes.append("activation_gib is left out: record the trace with profile_memory=True")
    forward, backward, optimizer = (us(median(s.times[p] for s in steps)) for p in PHASES)
    times = DenseTimes(
        batch_size=batch_size,
        forward_ms=forward,
        backward_ms=backward,
        optimizer_ms=optimizer,
        gradient_mib=round(median(gradients)) / MIB if gradients else 0.0,
        activation_gib=round(median(activations)) / GIB if activations else None,
    )
    dense = MeasuredDense(times, optimizer=_optimizer(readers, notes))
    return TracedDense(dense, len(steps), (*notes, *_doubts(traces, readers)))


@dataclass(frozen=True)
class _Call:
    """A collective of a rank, in us; ``beside``: share of it in which its core also computed."""

    kind: str
    us: float
    beside: float = 0.0


@dataclass
class _Step:
    """Times in us; sizes None where the trace does not say.

    Args:
        index: of the step in the trace.
        lookups: direction, module and sharding type -> time; no module for work of embedding
            modules that no annotation calls a lookup.
        calls: collectives in the order in which they began, named as
            `predictor.iteration.graph.part_of` names them.
        rest: of the main thread of a host that computes, neither lookup nor dense, nor waiting.
        gradients: sizes of the all-reduces that the backward starts.
    """

    index: int
    us: float
    times: dict[Phase, float]
    lookups: dict[tuple[Phase, str, str], float]
    calls: list[_Call]
    gradients: list[int | None]
    rest: float = 0.0
    activation_bytes: int | None = None

    @property
    def gradient_bytes(self) -> int | None:
        sizes = [size for size in self.gradients if size is not None]
        return sum(sizes) if sizes and len(sizes) == len(self.gradients) else None


class _Steps:
    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace
        self.parts = parts_of(trace)
        self.launched: dict[int | None, Part] = {
            part.event.correlation: part
            for part in self.parts
            if part.event.correlation is not None
        }

    def steps(self) -> Iterator[_Step]:
        """Yield the steps with a forward and a backward."""
        for index, step in enumerate(self.trace.steps):
            inside = [p for p in self.parts if step.start_us <= p.event.start_us < step.end_us]
            backward = [p.event for p in inside if p.phase == "backward"]
            recorded = [
                p.event.start_us
                for p in inside
                if p.phase == "forward"
                and (p.event.sequence is not None or p.event.name.startswith("## forward"))
            ]
            if not backward or not recorded:
                continue
            turn = min(e.start_us for e in backward)
            windows: dict[Phase, tuple[float, float]] = {
                "forward": (min(recorded), turn),
                "backward": (turn, max(e.end_us for e in backward)),
            }
            step_us = step.end_us - step.start_us
            totals = _Step(index, step_us, dict.fromkeys(PHASES, 0.0), defaultdict(float), [], [])
            if self.trace.device:
                self._add_device(totals, step)
            else:
                self._add_host(totals, step, inside, windows)
            if totals.times["forward"] > 0 and totals.times["backward"] > 0:
                totals.activation_bytes = self._activation_bytes(inside, *windows["forward"])
                yield totals

    def _add_device(self, totals: _Step, step: TraceStep) -> None:
        """Add device work by the ops that launched it; copies within the device count as dense."""
        for event in self.trace.device:
            part = self.launched.get(event.correlation)
            if part is None or not step.start_us <= part.event.start_us < step.end_us:
                continue
            duration_us, call = event.end_us - event.start_us, event.collective
            if call is not None:
                backward = part.phase == "backward"
                kind = self._exchange(call.op, call.size_bytes, backward, part.ids)
                totals.calls.append(_Call(kind, duration_us))
                if call.op == "all_reduce" and backward:
                    totals.gradients.append(call.size_bytes)
            elif not part.dense:
                totals.lookups[part.phase, *(part.lookup or ("", ""))] += duration_us
            elif event.kind != "memcpy" or "DtoD" in event.name:
                totals.times[part.phase] += duration_us

    def _add_host(
        self,
        totals: _Step,
        step: TraceStep,
        inside: Sequence[Part],
        windows: Mapping[Phase, tuple[float, float]],
    ) -> None:
        """Add the host's dense time, lookups and gloo collectives.

        Dense time is that of the main thread, Python between the ops included, less the events of
        other parts.
        """
        sequences = Counter(p.event.thread for p in inside if p.event.sequence is not None)
        main = sequences.most_common(1)[0][0]  # it runs the forward
        own = [p for p in inside if p.event.thread == main]
        other = _union(p for p in own if not p.dense)
        counted = _union(p for p in own if p.phase == "optimizer")
        totals.times["optimizer"] = counted.length
        for phase, window in windows.items():
            dense = Intervals.merged([window]) - (other | counted)
            totals.times[phase] = dense.length
            counted = counted | dense
        working = _union(p for p in own if re.match(r"aten::|fbgemm::", p.event.name))
        calls = [p.event for p in inside if p.event.name.startswith("gloo:")]
        waiting = Intervals.merged((e.start_us, e.end_us) for e in calls) - working
        counted = counted | waiting | _union(p for p in own if p.outermost)
        totals.rest = totals.us - counted.within(step.start_us, step.end_us)
        for part in inside:
            ran = part.event
            duration_us = ran.end_us - ran.start_us
            if part.outermost and part.lookup is not None:
                totals.lookups[part.phase, *part.lookup] += duration_us
            if not ran.name.startswith("gloo:"):
                continue
            duration_us = _shared_us(ran, calls)
            info, backward = info_of_host(ran), ran.start_us >= windows["backward"][0]
            ids = "int" in (ran.dtypes or ("",))[0].lower()
            kind = self._exchange(info.op or ran.name, info.size_bytes, backward, ids)
            whole = ran.end_us - ran.start_us
            beside = working.within(ran.start_us, ran.end_us) / whole if whole > 0 else 1.0
            totals.calls.append(_Call(kind, duration_us, beside))
            if ran.name == "gloo:all_reduce" and backward:
                totals.gradients.append(info.size_bytes)

    def _exchange(self, op: str, size: int | None, backward: bool, ids: bool) -> str:
        """Name the exchange of TorchRec that a collective is, or else the collective itself."""
        if op == "all_to_all" and ids:
            announces = size and size <= SPLITS_BYTES * (self.trace.world_size or 1)
            return "exchanges.splits" if announces else "exchanges.ids"
        if op == "all_to_all":
            return f"exchanges.{'backward' if backward else 'forward'}.all_to_all"
        if backward and op in ("all_reduce", "all_gather"):
            return "exchanges.gradients" if op == "all_reduce" else "exchanges.backward.gather"
        # gloo reduces all and keeps a part
        if not backward and op in ("all_reduce", "reduce_scatter"):
            return "exchanges.forward.reduce"
        return op

    def _activation_bytes(
        self, inside: Sequence[Part], start_us: float, end_us: float
    ) -> int | None:
        """Return the most bytes that dense ops of the forward have allocated and not freed."""
        if not self.trace.memory:
            return None
        sparse: dict[int, list[Part]] = defaultdict(list)
        for part in inside:
            if not part.dense:
                sparse[part.event.thread].append(part)
        left_out = {thread: _union(parts) for thread, parts in sparse.items()}
        live: dict[int, int] = {}
        allocated = most = 0
        for event in self.trace.memory:
            if not start_us <= event.time_us < end_us:
                continue
            if event.size_bytes < 0:
                allocated -= live.pop(event.address, 0)
            elif not left_out.get(event.thread, Intervals.merged(())).within(
                event.time_us, event.time_us + 1e-3
            ):
                live[event.address] = event.size_bytes
                allocated += event.size_bytes
            most = max(most, allocated)
        return most


def _shared_us(call: HostEvent, calls: Sequence[HostEvent]) -> float:
    """Return the time of a collective where all collectives in flight share the link equally."""
    cuts = {t for c in calls for t in (c.start_us, c.end_us) if call.start_us <= t <= call.end_us}
    at = sorted(cuts)
    return sum(
        (end - start) / sum(c.start_us <= start and end <= c.end_us for c in calls)
        for start, end in pairwise(at)
    )


def _union(parts: Iterable[Part]) -> Intervals:
    return Intervals.merged((p.event.start_us, p.event.end_us) for p in parts)


EXCHANGE_ERROR = 0.2
"""Least relative error of an exchange: no trace says when its bytes were on the wire."""
REST = "rest"
"""Time of a computing host outside lookups, dense part and exchanges."""
SPLITS_BYTES = 8 * 8 * 3
"""Bytes per rank up to which an exchange of ids announces their lengths: three numbers for each of
the seven sharding types. The ids of a batch are more."""


@dataclass(frozen=True)
class Measured:
    """One measured time of a job's steps.

    Args:
        what: ``lookups.WAY MODULE.TYPE``, a name of `predictor.iteration.graph.part_of`, ``step``,
            or `REST`.
        rank: None: of all ranks, such as an exchange without its waiting.
        ms: median over steps.
        noise: 1-sigma relative error of that median.
    """

    what: str
    rank: int | None
    ms: float
    noise: float = 0.0


@dataclass(frozen=True)
class TracedPhases:
    """The phases of a traced job, medians over ``steps`` steps."""

    measured: tuple[Measured, ...]
    steps: int
    notes: tuple[str, ...]


def measured_phases(
    traces: Sequence[RankTrace], modules: Sequence[str], batch_size: int | None = None
) -> TracedPhases:
    """Measure the phases of each rank.

    Args:
        modules: names of the model's embedding modules, which end the paths in the traces.
        batch_size: samples per rank in the model file; None: not compared.
    """
    readers = {trace.rank: _Steps(trace) for trace in traces}
    steps = {rank: {s.index: s for s in reader.steps()} for rank, reader in readers.items()}
    common = sorted(set.intersection(*map(set, steps.values()))) if steps else []
    if not common:
        raise InputError(
            "no step of these traces holds a forward and a backward on every rank; record whole "
            "training steps with ProfilerActivity.CPU (and CUDA on a GPU)"
        )
    if batch_size is not None:
        _check_batch(readers.values(), batch_size)
    common = _agreed(steps, common)
    measured: list[Measured] = []
    for rank, rank_steps in steps.items():
        rows = [rank_steps[i] for i in common]
        for way, module, kind in dict.fromkeys(key for row in rows for key in row.lookups):
            name = f"lookups.{way} {_module(module, modules)}.{_short(kind)}"
            if not module:
                name = f"other {way} of embedding modules"
            measured.append(
                _median(name, rank, [r.lookups.get((way, module, kind), 0) for r in rows])
            )
        for phase in PHASES:
            measured.append(_median(f"dense.{phase}", rank, [row.times[phase] for row in rows]))
        measured.append(_median(REST, rank, [row.rest for row in rows]))
    measured += _exchanges(steps, common)
    slowest = [max(rank_steps[i].us for rank_steps in steps.values()) for i in common]
    measured.append(_median("step", None, slowest))
    notes: tuple[str, ...] = ()
    ranks = max((t.world_size or 1 for t in traces), default=1)
    if len(traces) < ranks:
        notes = (
            f"traces of {len(traces)} of {ranks} ranks: the time that an exchange waits for a rank "
            "without a trace counts as its own",
        )
    return TracedPhases(tuple(m for m in measured if m.ms > 0), len(common), notes)


def _agreed(steps: Mapping[int, Mapping[int, _Step]], common: Sequence[int]) -> list[int]:
    """Return the steps in which all ranks traced the same exchanges; others were cut off.

    Raises:
        InputError: no step qualifies.
    """
    agreed, first = [], ""
    for index in common:
        counts_of = {
            rank: Counter(call.kind for call in rank_steps[index].calls)
            for rank, rank_steps in steps.items()
        }
        for kind in dict.fromkeys(kind for counts in counts_of.values() for kind in counts):
            if len({counts[kind] for counts in counts_of.values()}) > 1:
                listed = ", ".join(f"{n[kind]} on rank {rank}" for rank, n in counts_of.items())
                first = first or f"ranks disagree on step {index}: {kind} was traced {listed}"
                break
        else:
            agreed.append(index)
    if not agreed:
        raise InputError(f"{first}; give traces of the same steps of one run")
    return agreed


def _exchanges(steps: Mapping[int, Mapping[int, _Step]], common: Sequence[int]) -> list[Measured]:
    """Time every exchange by its shortest call: that of the rank that came last."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(common))
    beside: dict[str, list[float]] = defaultdict(list)
    for place, index in enumerate(common):
        by_kind: dict[str, dict[int, list[_Call]]] = defaultdict(lambda: {r: [] for r in steps})
        for rank, rank_steps in steps.items():
            for call in rank_steps[index].calls:
                by_kind[call.kind][rank].append(call)
        for kind, of_ranks in by_kind.items():
            for calls in zip(*of_ranks.values(), strict=True):
                last = min(calls, key=lambda call: call.us)
                times[kind][place] += last.us
                beside[kind].append(last.beside)
    return [
        _median(kind, None, us_of, EXCHANGE_ERROR + sum(beside[kind]) / len(beside[kind]))
        for kind, us_of in times.items()
    ]


def _median(name: str, rank: int | None, times_us: Sequence[float], more: float = 0.0) -> Measured:
    """Return the median with its error.

    Args:
        more: relative error beside that of a median of so many times.
    """
    middle = median(times_us)
    spread = median(abs(t - middle) for t in times_us) / middle if middle > 0 else 0.0
    noise = MEDIAN_ERROR * spread / math.sqrt(len(times_us))
    return Measured(name, rank, us(middle), math.hypot(noise, more))


MEDIAN_ERROR = 1.4826 * 1.2533
"""Error of a median of one normal time over the median absolute deviation: the standard deviation
is 1.4826 of it, and a median's error is 1.2533 of a mean's."""


def _module(path: str, modules: Sequence[str]) -> str:
    """Return the model's module at a path of the traced model."""
    return next((m for m in modules if path == m or path.endswith(f".{m}")), path)


def _short(kind: str) -> str:
    try:
        return ShardingType(kind).short
    except ValueError:
        return kind


def _check_batch(readers: Iterable[_Steps], batch_size: int) -> None:
    try:
        traced, _ = _batch_size(readers)
    except InputError:
        return  # the traces have no shapes to compare
    if traced != batch_size:
        raise InputError(
            f"the traces are of {traced} samples per rank, by the shapes of the loss, but the "
            f"model has {batch_size}; give the batch size of the traced job",
            inputs=("batch_size",),
        )


def _batch_size(readers: Iterable[_Steps]) -> tuple[int, str]:
    """Read the batch size from the first dimension of the loss's inputs, or of most layers'."""
    losses: Counter[int] = Counter()
    layers: Counter[int] = Counter()
    for reader in readers:
        for part in reader.parts:
            event = part.event
            if part.phase != "forward" or not part.dense or not event.shapes:
                continue
            shape = next((s for s in event.shapes if len(s) > 1), event.shapes[0])
            if shape and shape[0] > 1:
                sizes = losses if LOSS.match(event.name) else layers
                sizes[shape[0]] += bool(LOSS.match(event.name) or LAYER.match(event.name))
    for counts, source in ((+losses, "loss"), (+layers, "layers")):
        if counts:
            size = counts.most_common(1)[0][0]
            return (
                size,
                f"batch size {size} by the shapes of the {source}; give it if it is another",
            )
    raise InputError(
        "the traces do not say the batch size: record them with record_shapes=True, or give it",
        inputs=("batch_size",),
    )


def _optimizer(readers: Iterable[_Steps], notes: list[str]) -> str:
    for reader in readers:
        for part in reader.parts:
            match = STEPPED.match(part.event.name)
            if match and match[1] in OPTIMIZERS:
                return OPTIMIZERS[match[1]]
    notes.append("no step of a known optimizer of PyTorch was found, so it is given as sgd")
    return "sgd"


def _doubts(traces: Iterable[RankTrace], readers: Iterable[_Steps]) -> Iterable[str]:
    waits = [
        s.parts["host_bound"] / s.measured_ms for t in traces if t.device for s in breakdown(t)
    ]
    if waits and median(waits) > HOST_BOUND:
        yield (
            f"the device waits for the host in {median(waits):.0%} of a step, which times of "
            "kernels do not show"
        )
    names = {part.event.name for reader in readers for part in reader.parts}
    if any("dense_embedding" in name for name in names):
        yield "tables were data-parallel: gradient_mib holds their gradients too"
