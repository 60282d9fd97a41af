"""Sizes and groups of the collective kernels of a Kineto trace.

Since 2024 the kernel's own arguments hold them ("Collective name", "In msg nelems", ...). Before,
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

from predictor.trace.events import CollectiveCall, DeviceEvent, HostEvent, values_around

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
    """Return the bytes of one item of a type; None for an unknown type."""
    if not isinstance(name, str):
        return None
    return ITEM_BYTES.get(name.lower().removeprefix("c10::"))


def collective_kind(name: str) -> str:
    """Return the `CollectiveCall.op` of a kernel, op or "Collective name"."""
    plain = name.lower().replace("_", "")
    return next((kind for part, kind in KINDS if part in plain), "other")


def is_collective(name: str, args: Mapping[str, Any]) -> bool:
    """Return True for a kernel that exchanges data between ranks."""
    return KERNEL.match(name) is not None or "Collective name" in args


def info_of_args(args: Mapping[str, Any]) -> CollectiveCall | None:
    """Read a collective from the arguments of kernels and `record_param_comms` since 2024."""
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
    """Read a collective from the name and first input shape of a host event."""
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
    """Return a note on the number of collectives without a size, if there are any."""
    count = sum(e.collective is not None and e.collective.size_bytes is None for e in device)
    if not count:
        return ()
    return (f"{count:,} collectives without a size; record shapes, or give execution traces",)


def groups_of(config: object) -> dict[str, tuple[int, ...]]:
    """Map the names of process groups to their ranks, from the list of a job's groups.

    Args:
        config: ``pg_config`` of Kineto's ``distributedInfo``, or the input of the node
            ``## process_group:init ##`` of an execution trace. A group without ranks has the
            first ranks of the job, as many as its size.
    """
    groups: dict[str, tuple[int, ...]] = {}
    for group in config if isinstance(config, list) else []:
        if not isinstance(group, dict) or not isinstance(group.get("pg_name"), str):
            continue
        size = group.get("pg_size", group.get("group_size"))
        ranks = int_list(group.get("ranks"))
        if not ranks and isinstance(size, int) and 0 < size <= MAX_RANKS:
            ranks = _every(0, 1, size)
        if ranks:
            groups[group["pg_name"]] = ranks
    return groups


def in_group(info: CollectiveCall, groups: Mapping[str, tuple[int, ...]]) -> CollectiveCall:
    """Return the call with the ranks of its group, where only the group's name is known."""
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
    """Return evenly spaced ranks; cached, because thousands of events share a few groups."""
    return tuple(range(start, start + stride * size, stride))


def _splits(value: object, item: int | None) -> tuple[int, ...] | None:
    sizes = int_list(value)
    if not sizes or item is None or min(sizes) < 0:
        return None
    return tuple(size * item for size in sizes)


def int_list(value: object) -> tuple[int, ...] | None:
    """Return a list of integers, given as such or as text; None for anything else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list):
        return None
    if any(isinstance(x, bool) or not isinstance(x, int) for x in value):
        return None
    return tuple(value)


def infos_around(
    host: Iterable[HostEvent], described: Iterable[tuple[HostEvent, CollectiveCall]]
) -> Mapping[int | None, CollectiveCall]:
    """Map the correlation of a launch to the collective that the host events around it describe.

    Where they disagree the innermost event counts.

    Args:
        host: by start; events of a thread nest.
        described: the host events that describe a collective.
    """
    infos = {id(event): info for event, info in described}
    around = values_around(host, infos)
    return {launch: reduce(CollectiveCall.or_else, calls) for launch, calls in around.items()}


def with_order(
    device: Iterable[tuple[DeviceEvent, CollectiveCall]], launched: Mapping[int, HostEvent]
) -> list[DeviceEvent]:
    """Number the collective kernels of each group in the order of their launches.

    All ranks launch the collectives of a group in one order; kernels may start in another.
    Collectives launched before the trace began count backwards from -1, because their number may
    differ between ranks.
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
    for _, event, info in sorted(device, key=lambda entry: (entry[0], entry[1].start_us)):
        key = info.group_name or info.group
        order = counts[key] if forwards else -1 - counts[key]
        counts[key] += 1
        op = info.op or collective_kind(event.name)
        yield replace(event, collective=replace(info, op=op, order=order))
