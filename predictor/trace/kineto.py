"""Reads traces of PyTorch's profiler (Kineto), whose schema has no reliable version number.

Categories began with capitals (``Operator``, ``Kernel``) until 2022; times are whole or fractions
of microseconds; ops and kernels have gained arguments over the years.
An event is one JSON object: ``ph: X``, ``cat``, ``name``, ``pid``, ``tid``, ``ts`` and ``dur`` in
microseconds, ``args`` (kineto `libkineto/src/output_json.cpp`). A runtime call and the device work
that it launched share ``correlation``.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from predictor.errors import InputError
from predictor.trace.comms import (
    HOST_NAME,
    NOTHING,
    groups_of,
    in_group,
    info_of_args,
    info_of_host,
    infos_around,
    is_collective,
    size_notes,
    with_order,
)
from predictor.trace.events import (
    CollectiveCall,
    DeviceEvent,
    DeviceKind,
    HostEvent,
    HostKind,
    MemoryEvent,
    RankTrace,
    TraceStep,
)
from predictor.trace.files import rank_of

HOST_KINDS: dict[str, HostKind] = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "runtime": "runtime",
}
DEVICE_KINDS: dict[str, DeviceKind] = {
    "kernel": "kernel",
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
}
STEP = re.compile(r"ProfilerStep#(\d+)$")

TRACE_EVENTS = "traceEvents"
TAKEN = object()
"""Placeholder of an event in the document after it was read."""
MEMORY = "[memory]"
"""Name of the events that ``profile_memory`` adds (torch/csrc/profiler/kineto_shim.cpp)."""

Args = Mapping[str, Any]


RECORDING = "shardopt"
"""Key of a trace's metadata for the measurements that a recording made beside the trace."""


class KinetoReader:
    """Reader that takes the events of a document one by one, as they are parsed."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.host: list[HostEvent] = []
        self.device: list[DeviceEvent] = []
        self.comms: list[tuple[DeviceEvent, CollectiveCall]] = []
        self.host_comms: list[tuple[HostEvent, CollectiveCall]] = []
        self.launched: dict[int, HostEvent] = {}
        self.threads: dict[str, int] = {}
        self.interned: dict[Any, Any] = {}
        self.devices: set[int] = set()
        self.memory: dict[bool, list[MemoryEvent]] = {True: [], False: []}
        self.unreadable = 0
        self.total = 0

    def take(self, item: dict[str, Any]) -> object:
        """Read an event and return `TAKEN`; return any other object of the document as it is."""
        if "ph" not in item:
            return item
        category = item.get("cat")
        try:
            if item["ph"] == "i" and item.get("name") == MEMORY:
                self._memory(item)
            elif item["ph"] == "X" and isinstance(category, str):
                category = category.lower()
                if category in HOST_KINDS:
                    self._host(item, HOST_KINDS[category])
                elif category in DEVICE_KINDS:
                    self._device(item, DEVICE_KINDS[category])
        except (KeyError, TypeError, ValueError, OverflowError):
            self.unreadable += 1
        return TAKEN

    def _memory(self, event: Args) -> None:
        args = _args(event)
        size, address = _whole(args, "Bytes"), _whole(args, "Addr")
        if size is None or address is None:
            raise TypeError
        memory_event = MemoryEvent(self._thread(event["tid"]), _times(event)[0], size, address)
        self.memory[_whole(args, "Device Type") != 0].append(memory_event)

    def _host(self, event: Args, kind: HostKind) -> None:
        args, name = _args(event), _name(event)
        start, end = _times(event)
        runtime, shapes, dtypes = kind == "runtime", None, None
        if not runtime:
            dims, types = args.get("Input Dims", args.get("Input dims")), args.get("Input type")
            shapes = self._once(tuple(map(tensor_shape, dims)) if isinstance(dims, list) else ())
            dtypes = self._once(tuple(map(str, types)) if isinstance(types, list) else ())
        host_event = HostEvent(
            name,
            "annotation" if STEP.match(name) else kind,
            self._thread(event["tid"]),
            start,
            end,
            _whole(args, "correlation") if runtime else None,
            shapes,
            dtypes,
            _whole(args, "Sequence number"),
            external=None if runtime else _whole(args, "External id", "external id"),
            record=_whole(args, "Record function id"),
        )
        self.host.append(host_event)
        if host_event.correlation is not None:
            self.launched[host_event.correlation] = host_event
        elif HOST_NAME.match(name):
            self.host_comms.append((host_event, info_of_args(args) or info_of_host(host_event)))

    def _once(self, value: tuple[Any, ...]) -> Any:
        """Share one object among equal values, as a few occur thousands of times.

        Returns:
            None for an empty value.
        """
        return self.interned.setdefault(value, value) or None

    def _device(self, event: Args, kind: DeviceKind) -> None:
        args, name = _args(event), _name(event)
        start, end = _times(event)
        stream, device = _whole(args, "stream"), _whole(args, "device", "Device")
        device_event = DeviceEvent(
            name,
            kind,
            int(event["tid"]) if stream is None else stream,
            start,
            end,
            _whole(args, "correlation"),
            _whole(args, "bytes"),
            waves=_waves(args),
        )
        if device is not None:
            self.devices.add(device)
        if kind == "kernel" and is_collective(name, args):
            self.comms.append((device_event, info_of_args(args) or NOTHING))
        else:
            self.device.append(device_event)

    def _thread(self, tid: object) -> int:
        """Return the number of a thread; tracks that a tool named get negative ones."""
        if isinstance(tid, int):
            return tid
        return self.threads.setdefault(str(tid), -1 - len(self.threads))

    def finish(self, document: Mapping[str, object]) -> RankTrace:
        """Return the trace, once all events were taken.

        Args:
            document: its array of events holds `TAKEN`, and items that are no events.
        """
        events = document[TRACE_EVENTS]
        rest = events if isinstance(events, list) else []
        self.total = len(rest)
        self.unreadable += sum(e is not TAKEN and not isinstance(e, dict) for e in rest)
        self.host.sort(key=lambda e: (e.start_us, -e.end_us))
        around = infos_around(self.host, self.host_comms)
        distributed = document.get("distributedInfo")
        groups = groups_of(distributed.get("pg_config") if isinstance(distributed, dict) else None)
        described = [
            (event, in_group(info.or_else(around.get(event.correlation, NOTHING)), groups))
            for event, info in self.comms
        ]
        device = [*self.device, *with_order(described, self.launched)]
        device.sort(key=lambda e: (e.start_us, e.end_us))
        if not self.host and not device:
            raise InputError(
                f"{self.source}: no host or device events among {self.total:,}; record the trace "
                "with torch.profiler and activities CPU and CUDA"
            )
        rank, world_size, rank_notes = rank_of(self.source, distributed)
        steps, step_notes = _steps(self.host, device)
        return RankTrace(
            source=self.source,
            rank=rank,
            world_size=world_size,
            device_name=_device_name(document.get("deviceProperties"), self.devices),
            host=tuple(self.host),
            device=tuple(device),
            steps=steps,
            notes=(*rank_notes, *step_notes, *self._notes(device)),
            memory=tuple(sorted(self.memory[bool(device)], key=lambda e: e.time_us)),
            untraced_step_ms=_untraced_step_ms(document.get(RECORDING)),
        )

    def _notes(self, device: Sequence[DeviceEvent]) -> Iterator[str]:
        if not device:
            yield (
                "no device events (record those of a GPU with ProfilerActivity.CUDA): ops of the "
                "host count as compute"
            )
        if not self.host:
            yield "no host events: which op launched a kernel, and when, is not known"
        if self.unreadable:
            yield f"{self.unreadable:,} of {self.total:,} events could not be read and are left out"
        if len(self.devices) > 1:
            yield f"{len(self.devices)} devices in one process; they are taken for one"
        yield from size_notes(device)


def _args(event: Args) -> Args:
    args = event.get("args", {})
    return args if isinstance(args, dict) else {}


def _name(event: Args) -> str:
    name = event["name"]
    if not isinstance(name, str):
        raise TypeError
    # a few names occur thousands of times
    return sys.intern(name)


def _times(event: Args) -> tuple[float, float]:
    start, duration = float(event["ts"]), float(event.get("dur", 0))
    if not math.isfinite(start + duration) or duration < 0:
        raise ValueError
    return start, start + duration


WARPS_PER_SM = 64
"""Most warps on one multiprocessor (CUDA C++ Programming Guide, compute capabilities; 7.5 and 8.6
hold fewer, so that waves come out smaller there)."""


def _waves(args: Args) -> float | None:
    """Return a kernel's blocks over the blocks that fit on the device at once.

    ``warps per SM`` counts all blocks, ``est. achieved occupancy %`` the resident ones (kineto
    `libkineto/src/CuptiActivity.cpp`).
    """
    warps, occupancy = args.get("warps per SM"), args.get("est. achieved occupancy %")
    if not isinstance(warps, int | float) or not isinstance(occupancy, int | float):
        return None
    return warps / (WARPS_PER_SM * occupancy / 100) if occupancy > 0 else None


def _whole(args: Args, *names: str) -> int | None:
    """Return the first of these arguments that is present; older schemas use other names."""
    for name in names:
        value = args.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def tensor_shape(shape: object) -> tuple[int, ...]:
    """Return the shape of a tensor, or of the only tensor of a list; empty for anything else."""
    if isinstance(shape, list | tuple):
        if len(shape) == 1 and isinstance(shape[0], list | tuple):
            shape = shape[0]
        if all(isinstance(size, int) and size >= 0 for size in shape):
            return tuple(shape)
    return ()


def _device_name(properties: object, used: Iterable[int]) -> str | None:
    named = {}
    for device in properties if isinstance(properties, list) else []:
        if isinstance(device, dict) and isinstance(device.get("name"), str):
            named[str(device.get("id"))] = device["name"]
    used_names = [named[str(d)] for d in sorted(used) if str(d) in named]
    return next(iter([*used_names, *named.values()]), None)


def _steps(
    host: list[HostEvent], device: list[DeviceEvent]
) -> tuple[tuple[TraceStep, ...], tuple[str, ...]]:
    """Return the steps by their markers; the whole trace if it has no markers."""
    markers: dict[str, HostEvent] = {}
    for event in host:
        if STEP.match(event.name):
            markers.setdefault(event.name, event)
    ordered = sorted(markers.values(), key=lambda e: e.start_us)
    if not ordered:
        events: list[HostEvent | DeviceEvent] = [*host, *device]
        start, end = min(e.start_us for e in events), max(e.end_us for e in events)
        return (TraceStep("whole trace", start, end),), (
            "no ProfilerStep markers (call profiler.step() after each iteration): "
            "the whole trace counts as one step",
        )
    ends = [*(e.start_us for e in ordered[1:]), ordered[-1].end_us]
    return tuple(
        TraceStep(e.name, e.start_us, end) for e, end in zip(ordered, ends, strict=True)
    ), ()


def _untraced_step_ms(recording: object) -> float | None:
    """Read the time of a step without the profiler, as `shardopt.torchrec.record` wrote it."""
    step_ms = recording.get("step_ms") if isinstance(recording, dict) else None
    if isinstance(step_ms, bool) or not isinstance(step_ms, int | float):
        return None
    return float(step_ms) if 0 < step_ms < math.inf else None
