"""What a collective kernel of a Kineto trace exchanged.

Since 2024 the arguments of the kernel say it ("Collective name", "In msg nelems", ...); before that
the host events around its launch do: `record_param_comms`, `nccl:all_to_all` and the like,
`c10d::alltoall_base_`. For each field the first source that has it counts.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, reduce
from math import prod
from typing import Any

from predictor.trace.events import CollectiveCall, DeviceEvent, HostEvent, said_around

KERNEL = re.compile(r"(void )?(nccl|rccl|mscclKernel)", re.IGNORECASE)
HOST_NAME = re.compile(r"record_param_comms$|c10d::|nccl:")

KINDS = (
    ("alltoall", "all_to_all"),
    ("allreduce", "all_reduce"),
    ("barrier", "all_reduce"),
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("broadcast", "broadcast"),
    ("send", "send_recv"),
    ("recv", "send_recv"),
    ("reduce", "reduce"),
)
"""Part of a name without underscores -> `CollectiveCall.op`; the first that fits counts."""

ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "int64", "float64", "complex<float>"), 8),
    **dict.fromkeys(("float", "int", "int32", "float32", "unsigned int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int", "int16", "float16"), 2),
    **dict.fromkeys(("byte", "char", "bool", "signed char", "unsigned char", "int8", "uint8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
}
"""Type as C++ or ATen spells it, in lower case and without ``c10::`` -> bytes of an item."""


MAX_RANKS = 1 << 16


NOTHING = CollectiveCall()


def item_bytes(name: object) -> int | None:
    """Bytes of one item of a type; None if it is not known."""
    if not isinstance(name, str):
        return None
    return ITEM_BYTES.get(name.lower().removeprefix("c10::"))


def collective_kind(name: str) -> str:
    """`CollectiveCall.op` of a kernel, op or "Collective name"."""
    plain = name.lower().replace("_", "")
    return next((kind for part, kind in KINDS if part in plain), "other")


def is_collective(name: str, args: Mapping[str, Any]) -> bool:
    """True for a kernel that exchanges data between ranks."""
    return KERNEL.match(name) is not None or "Collective name" in args


def info_of_args(args: Mapping[str, Any]) -> CollectiveCall | None:
    """From the arguments that kernels and `record_param_comms` carry since 2024."""
    name = args.get("Collective name")
    if not isinstance(name, str):
        return None
    item = item_bytes(args.get("dtype"))
    group_name = args.get("Process Group Name")
    return CollectiveCall(
        collective_kind(name),
        _bytes(args.get("In msg nelems"), item),
        _group(args),
        output_bytes=_bytes(args.get("Out msg nelems"), item),
        send_bytes=_splits(args.get("In split size"), item),
        receive_bytes=_splits(args.get("Out split size"), item),
        group_name=group_name if isinstance(group_name, str) else None,
    )


def info_of_host(event: HostEvent) -> CollectiveCall:
    """From the name and the shape of the first input of a host event."""
    kind = collective_kind(event.name)
    op = "" if kind == "other" else kind
    if not event.shapes or not event.dtypes or not event.shapes[0]:
        return CollectiveCall(op)
    item = item_bytes(event.dtypes[0])
    # the c10d ops that write into a given output take it first
    if event.name.startswith("c10d::"):
        return CollectiveCall(op)
    return CollectiveCall(op, None if item is None else item * prod(event.shapes[0]))


def size_notes(device: Iterable[DeviceEvent]) -> tuple[str, ...]:
    """A note on how many collectives have no size, if any."""
    count = sum(e.collective is not None and e.collective.size_bytes is None for e in device)
    if not count:
        return ()
    return (f"{count:,} collectives without a size; record shapes, or give execution traces",)


def groups_of(config: object) -> dict[str, tuple[int, ...]]:
    """Name of a process group -> its ranks, from the list that describes a job's groups.

    Args:
        config: ``pg_config`` of Kineto's ``distributedInfo``, or the input of the node
            ``## process_group:init ##`` of an execution trace. A group without ranks has the
            first ranks of the job, as many as its size.
    """
    found: dict[str, tuple[int, ...]] = {}
    for group in config if isinstance(config, list) else []:
        if not isinstance(group, dict) or not isinstance(group.get("pg_name"), str):
            continue
        size = group.get("pg_size", group.get("group_size"))
        ranks = int_list(group.get("ranks"))
        if not ranks and isinstance(size, int) and 0 < size <= MAX_RANKS:
            ranks = _every(0, 1, size)
        if ranks:
            found[group["pg_name"]] = ranks
    return found


def in_group(info: CollectiveCall, groups: Mapping[str, tuple[int, ...]]) -> CollectiveCall:
    """With the ranks of its group, where only the name is known."""
    if info.group is not None or info.group_name is None:
        return info
    return replace(info, group=groups.get(info.group_name))


def _bytes(count: object, item: int | None) -> int | None:
    if item is None or isinstance(count, bool) or not isinstance(count, int) or count < 0:
        return None
    return count * item


def _group(args: Mapping[str, Any]) -> tuple[int, ...] | None:
    ranks = int_list(args.get("Process Group Ranks"))
    size = args.get("Group size")
    if ranks and (not isinstance(size, int) or len(ranks) == size):
        return ranks
    # long lists are cut off with "..."
    start, stride = args.get("Global rank start"), args.get("Global rank stride")
    if not (isinstance(start, int) and isinstance(stride, int) and isinstance(size, int)):
        return None
    if start < 0 or stride < 1 or not 0 < size <= MAX_RANKS:
        return None
    return _every(start, stride, size)


@cache
def _every(start: int, stride: int, size: int) -> tuple[int, ...]:
    """Cached, because thousands of events share a few groups."""
    return tuple(range(start, start + stride * size, stride))


def _splits(given: object, item: int | None) -> tuple[int, ...] | None:
    sizes = int_list(given)
    if not sizes or item is None or min(sizes) < 0:
        return None
    return tuple(size * item for size in sizes)


def int_list(given: object) -> tuple[int, ...] | None:
    """A list of integers, or the text of one; None for anything else."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    if not isinstance(given, list):
        return None
    if any(isinstance(x, bool) or not isinstance(x, int) for x in given):
        return None
    return tuple(given)


def infos_around(
    host: Iterable[HostEvent], described: Iterable[tuple[HostEvent, CollectiveCall]]
) -> Mapping[int | None, CollectiveCall]:
    """Correlation of a launch -> what the host events around it say, the innermost first.

    Args:
        host: by start; events of a thread nest.
        described: those of them that describe a collective.
    """
    infos = {id(event): info for event, info in described}
    around = said_around(host, infos)
    return {launch: reduce(CollectiveCall.or_else, said) for launch, said in around.items()}


def with_order(
    device: Iterable[tuple[DeviceEvent, CollectiveCall]], launched: Mapping[int, HostEvent]
) -> list[DeviceEvent]:
    """Collective kernels with their calls, counted per group in the order the host launched them.

    All ranks launch the collectives of a group in one order; kernels may start in another. Those
    launched before the trace began, which may be more on one rank than on another, count
    backwards from -1.
    """
    inside: list[tuple[float, DeviceEvent, CollectiveCall]] = []
    before: list[tuple[float, DeviceEvent, CollectiveCall]] = []
    for event, info in device:
        call = launched.get(event.correlation) if event.correlation is not None else None
        if call is None and launched:
            before.append((-event.start_us, event, info))
        else:
            inside.append((call.start_us if call else event.start_us, event, info))
    return [*_number_calls(before, False), *_number_calls(inside, True)]


def _number_calls(
    device: list[tuple[float, DeviceEvent, CollectiveCall]], forwards: bool
) -> Iterator[DeviceEvent]:
    counts: dict[object, int] = defaultdict(int)
    for _, event, info in sorted(device, key=lambda found: (found[0], found[1].start_us)):
        key = info.group_name or info.group
        order = counts[key] if forwards else -1 - counts[key]
        counts[key] += 1
        op = info.op or collective_kind(event.name)
        yield replace(event, collective=replace(info, op=op, order=order))
