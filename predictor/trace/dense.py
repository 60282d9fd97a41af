"""What the dense part of a traced job took: the measured form of a model file's ``dense``.

Where a device was traced, its kernels count, by the ops that launched them; else the time of the
host's main thread. Lookups, collectives and the preparation of batches are left out of both.

Lookups, the distribution of ids and outputs, and collectives are known by the annotations of
TorchRec's modules and train pipelines (distributed/types.py, embeddingbag.py, train_pipelines.py),
or by the names of FBGEMM's and c10d's ops. Their backward is known by the sequence number that a
node of autograd shares with the op that created it (torch/csrc/autograd/profiler_python.cpp).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from predictor.errors import InputError
from predictor.model.workload import MeasuredDense
from predictor.trace.breakdown import Intervals, breakdown
from predictor.trace.comms import info_of_host
from predictor.trace.events import HostEvent, RankTrace, TraceStep
from predictor.units import us

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
NODE = "autograd::engine::evaluate_function: "
BACKWARD = re.compile(r"## backward|autograd::engine::evaluate_function")
OPTIMIZER = re.compile(r"## optimizer|## zero_grad|Optimizer\.(step|zero_grad)#")


@dataclass(frozen=True)
class Part:
    """What a host event belongs to.

    Args:
        event: itself.
        phase: of the step.
        dense: False for embedding modules, collectives and the preparation of batches.
    """

    event: HostEvent
    phase: Phase
    dense: bool


def parts_of(trace: RankTrace) -> list[Part]:
    """Every op, annotation and runtime call, thread by thread, each thread in order of start."""
    threads: dict[int, list[HostEvent]] = defaultdict(list)
    for event in trace.host:
        if not event.name.startswith("ProfilerStep#"):
            threads[event.thread].append(event)
    nested = [part for events in threads.values() for part in _nested(events, frozenset())]
    sparse = _sparse_sequences(nested)
    return [part for events in threads.values() for part in _nested(events, sparse)]


def _nested(events: Sequence[HostEvent], sparse: frozenset[int]) -> Iterable[Part]:
    """The events of one thread; what nests belongs to what is around it."""
    around: list[Part] = []
    for event in events:
        while around and around[-1].event.end_us <= event.start_us:
            around.pop()
        above = around[-1] if around else None
        part = Part(
            event,
            above.phase if above and above.phase != "forward" else _phase(event),
            (above is None or above.dense) and not _is_sparse(event, sparse),
        )
        around.append(part)
        yield part


def _phase(event: HostEvent) -> Phase:
    if OPTIMIZER.match(event.name):
        return "optimizer"
    return "backward" if BACKWARD.match(event.name) else "forward"


def _is_sparse(event: HostEvent, sequences: frozenset[int]) -> bool:
    if not event.name.startswith(NODE):
        return SPARSE.match(event.name) is not None
    return event.sequence in sequences or SPARSE_NODE.search(event.name) is not None


def _sparse_sequences(parts: Iterable[Part]) -> frozenset[int]:
    """Sequence numbers of nodes that ops of embedding modules created.

    An op that creates no node has the number of the next one that does: the last op counts.
    """
    last: dict[int, Part] = {}
    for part in parts:
        number = part.event.sequence
        if number is None or part.phase != "forward":
            continue
        if number not in last or last[number].event.start_us <= part.event.start_us:
            last[number] = part
    return frozenset(number for number, part in last.items() if not part.dense)


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
        measured: medians over ranks and steps.
        steps: how many.
        notes: how it was found out, and what is missing.
    """

    measured: MeasuredDense
    steps: int
    notes: tuple[str, ...]


def traced_dense(traces: Sequence[RankTrace], batch_size: int | None = None) -> TracedDense:
    """The dense part of a job by the traces of its ranks.

    Args:
        traces: of one rank or more; steps without a backward are left out.
        batch_size: samples per rank; None: by the shapes of the loss.

    Raises:
        InputError: no step has a forward and a backward, or nothing says the batch size.
    """
    readers = [_Steps(trace) for trace in traces]
    found = [step for reader in readers for step in reader.steps()]
    if not found:
        raise InputError(
            "no step of these traces holds the forward and the backward of a dense part; record "
            "training steps with ProfilerActivity.CPU (and CUDA on a GPU)"
        )
    notes: list[str] = []
    if batch_size is None:
        batch_size, how = _batch_size(readers)
        notes.append(how)
    gradients = [s.gradient_bytes for s in found if s.gradient_bytes is not None]
    if not gradients:
        notes.append("no size of a gradient all-reduce is known, so gradient_mib is 0; set it")
    activations = [s.activation_bytes for s in found if s.activation_bytes is not None]
    if not activations:
        notes.append("activation_gib is left out: record the trace with profile_memory=True")
    forward, backward, optimizer = (us(median(s.times[p] for s in found)) for p in PHASES)
    measured = MeasuredDense(
        batch_size=batch_size,
        forward_ms=forward,
        backward_ms=backward,
        optimizer_ms=optimizer,
        gradient_bytes=round(median(gradients)) if gradients else 0,
        activation_bytes=round(median(activations)) if activations else None,
        optimizer=_optimizer(readers, notes),
    )
    return TracedDense(measured, len(found), (*notes, *_doubts(traces, readers)))


@dataclass(frozen=True)
class _Step:
    """Times in us; sizes None where the trace does not say."""

    times: dict[Phase, float]
    gradient_bytes: int | None
    activation_bytes: int | None


class _Steps:
    """The steps of one rank."""

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace
        self.parts = parts_of(trace)
        self.launched = {
            part.event.correlation: part
            for part in self.parts
            if part.event.correlation is not None
        }

    def steps(self) -> Iterable[_Step]:
        """Those with a forward and a backward."""
        for step in self.trace.steps:
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
            by_phase = self._on_device(step) if self.trace.device else _on_host(inside, windows)
            if by_phase["forward"] > 0 and by_phase["backward"] > 0:
                sizes = self._gradient_bytes(inside, step)
                yield _Step(by_phase, sizes, self._activation_bytes(inside, *windows["forward"]))

    def _on_device(self, step: TraceStep) -> dict[Phase, float]:
        """Kernels by the phase of the ops that launched them; copies within the device count."""
        times = dict.fromkeys(PHASES, 0.0)
        for event in self.trace.device:
            part = self.launched.get(event.correlation) if event.correlation is not None else None
            crosses = event.kind == "memcpy" and "DtoD" not in event.name
            if part is None or not part.dense or crosses or event.collective is not None:
                continue
            if step.start_us <= part.event.start_us < step.end_us:
                times[part.phase] += event.end_us - event.start_us
        return times

    def _gradient_bytes(self, inside: Sequence[Part], step: TraceStep) -> int | None:
        """All-reduces that the backward starts."""
        sizes: list[int | None] = []
        for event in self.trace.device:
            part = self.launched.get(event.correlation) if event.correlation is not None else None
            call = event.collective
            if call is None or part is None or call.op != "all_reduce" or part.phase != "backward":
                continue
            if step.start_us <= part.event.start_us < step.end_us:
                sizes.append(call.size_bytes)
        if not self.trace.device:
            turn = min(p.event.start_us for p in inside if p.phase == "backward")
            sizes += [
                info_of_host(p.event).size_bytes
                for p in inside
                if p.event.name == "gloo:all_reduce" and p.event.start_us >= turn
            ]
        known = [size for size in sizes if size is not None]
        return sum(known) if known and len(known) == len(sizes) else None

    def _activation_bytes(
        self, inside: Sequence[Part], start_us: float, end_us: float
    ) -> int | None:
        """Most that dense ops of the forward have allocated and not freed."""
        if not self.trace.memory:
            return None
        sparse: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for part in inside:
            if not part.dense:
                sparse[part.event.thread].append((part.event.start_us, part.event.end_us))
        left_out = {thread: Intervals.merged(pairs) for thread, pairs in sparse.items()}
        live: dict[int, int] = {}
        held = most = 0
        for event in self.trace.memory:
            if not start_us <= event.time_us < end_us:
                continue
            if event.size_bytes < 0:
                held -= live.pop(event.address, 0)
            elif not left_out.get(event.thread, Intervals.merged(())).within(
                event.time_us, event.time_us + 1e-3
            ):
                live[event.address] = event.size_bytes
                held += event.size_bytes
            most = max(most, held)
        return most


def _on_host(
    inside: Sequence[Part], windows: dict[Phase, tuple[float, float]]
) -> dict[Phase, float]:
    """Time of the main thread, Python between the ops included, without what is not dense."""
    main = _main_thread(inside)
    own = [p for p in inside if p.event.thread == main]
    other = Intervals.merged((p.event.start_us, p.event.end_us) for p in own if not p.dense)
    step = Intervals.merged(
        (p.event.start_us, p.event.end_us) for p in own if p.phase == "optimizer"
    )
    times: dict[Phase, float] = {"optimizer": float((step.ends - step.starts).sum())}
    for phase, window in windows.items():
        left = Intervals.merged([window]) - (other | step)
        times[phase] = float((left.ends - left.starts).sum())
    return times


def _main_thread(inside: Sequence[Part]) -> int:
    """The one that runs the forward."""
    count = Counter(p.event.thread for p in inside if p.event.sequence is not None)
    return count.most_common(1)[0][0]


def _batch_size(readers: Iterable[_Steps]) -> tuple[int, str]:
    """By the first dimension of what the loss reads, or else of most layers' inputs."""
    losses: Counter[int] = Counter()
    layers: Counter[int] = Counter()
    for reader in readers:
        for part in reader.parts:
            event = part.event
            if part.phase != "forward" or not part.dense or not event.shapes:
                continue
            shape = next((s for s in event.shapes if len(s) > 1), event.shapes[0])
            if shape and shape[0] > 1:
                found = losses if LOSS.match(event.name) else layers
                found[shape[0]] += bool(LOSS.match(event.name) or LAYER.match(event.name))
    for counts, what in ((+losses, "loss"), (+layers, "layers")):
        if counts:
            size = counts.most_common(1)[0][0]
            return size, f"batch size {size} by the shapes of the {what}; give it if it is another"
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
    waits = [s.host_bound_ms / s.measured_ms for t in traces if t.device for s in breakdown(t)]
    if waits and median(waits) > HOST_BOUND:
        yield (
            f"the device waits for the host in {median(waits):.0%} of a step, which times of "
            "kernels do not show"
        )
    names = {part.event.name for reader in readers for part in reader.parts}
    if any("dense_embedding" in name for name in names):
        yield "tables were data-parallel: gradient_mib holds their gradients too"
