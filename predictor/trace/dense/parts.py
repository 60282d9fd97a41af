"""Which ops of a traced step belong to the dense part, and to which of its phases.

Lookups, the distribution of ids and outputs, and collectives are known by the annotations of
TorchRec's modules and train pipelines (distributed/types.py, embeddingbag.py, train_pipelines.py),
or by the names of FBGEMM's and c10d's ops. Their backward is known by the sequence number that a
node of autograd shares with the op that created it (torch/csrc/autograd/profiler_python.cpp).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from predictor.trace.events import HostEvent, RankTrace

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
