"""Traces of a few events each, written as what happens on threads and streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from predictor.trace.events import CollectiveCall, DeviceEvent, HostEvent, RankTrace, TraceStep

MAIN, AUTOGRAD = 1, 2
PAGEABLE = "Memcpy DtoH (Device -> Pageable)"


class Recorder:
    """Collects events; times in microseconds from the trace's start."""

    def __init__(self) -> None:
        self.host: list[HostEvent] = []
        self.device: list[DeviceEvent] = []
        self.steps: list[TraceStep] = []

    def op(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.host.append(HostEvent(name, "op", thread, start, end))

    def call(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.host.append(HostEvent(name, "runtime", thread, start, end))

    def launch(
        self,
        call: tuple[float, float],
        work: tuple[float, float],
        *,
        name: str = "kernel",
        stream: int = 7,
        thread: int = MAIN,
        runtime: str = "cudaLaunchKernel",
        collective: CollectiveCall | None = None,
        waves: float | None = None,
    ) -> None:
        number = len(self.device) + 1
        self.host.append(HostEvent(runtime, "runtime", thread, *call, number))
        kind = "memcpy" if name.startswith("Memcpy") else "kernel"
        self.device.append(
            DeviceEvent(name, kind, stream, *work, number, collective=collective, waves=waves)
        )

    def step(self, start: float, end: float) -> None:
        self.steps.append(TraceStep(f"ProfilerStep#{len(self.steps)}", start, end))

    def trace(self, rank: int = 0, world_size: int = 1, device: str = "Some GPU") -> RankTrace:
        return RankTrace(
            f"rank{rank}.json",
            rank,
            world_size,
            device,
            tuple(sorted(self.host, key=lambda e: e.start_us)),
            tuple(sorted(self.device, key=lambda e: e.start_us)),
            tuple(self.steps),
        )


def longer(
    trace: RankTrace, name: str, factor: float, *, since_us: float = float("-inf")
) -> RankTrace:
    """The trace with kernels whose name contains ``name`` so many times as long, starts as is."""
    device = tuple(
        replace(e, end_us=e.start_us + factor * (e.end_us - e.start_us))
        if name in e.name and e.start_us >= since_us
        else e
        for e in trace.device
    )
    return replace(trace, device=device)


def joined(recorders: Sequence[Recorder]) -> list[RankTrace]:
    """Ranks of one job."""
    return [r.trace(rank, len(recorders)) for rank, r in enumerate(recorders)]
