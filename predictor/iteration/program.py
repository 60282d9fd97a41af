"""The event program of an iteration: when operations start, and the state that they leave behind.

After Lin et al. 2024, Algorithm 1, with any number of host threads, streams and collectives in
flight. The threads of a rank issue operations in program order; streams run theirs in order; a
collective starts when its last rank arrives. So every time is a maximum over earlier times plus
constants and costs (Baccelli et al. 1992, Synchronization and Linearity, chapter 2). The program is
generic in the type of a time: `timeline` runs it on numbers, `steady_state` on symbols.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from predictor.iteration.graph import MAIN, Dep, Graph, Op

T = TypeVar("T")
ISSUE, RUN, LAUNCH = "issue", "run", "launch"


class Program(ABC, Generic[T]):
    """Threads and streams of all ranks in one iteration, generic in the type of a time.

    Attributes:
        threads, streams: time at which each is next free.
        begin: start of the first iteration; nothing happens before it.
    """

    threads: dict[str, T]
    streams: dict[str, T]
    begin: T

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def run(self, index: int, op: Op) -> tuple[T, T, T, T]:
        """Issue and execute one operation; returns (issue, ready, start, end).

        An operation that a plan lacks leaves its stream and its thread as they were. Its dependents
        wait for its dependencies instead.
        """
        host, stream = self.threads[op.thread], self.streams[op.stream]
        latency, inline = self.graph.launch_latency_ms, op.stream in self.graph.inline_streams
        deps = [self.end_of(dep) for dep in op.deps]
        issue = self.spend(host, ISSUE, index, op)
        if inline:
            ready = self.latest(issue, *deps)
        else:
            first = self.later(host, op.host_ms / op.kernels + latency)
            ready = self.latest(first, stream, *deps)
        ready = self.queue(ready, index, op)
        start = self.meet(ready, index, op)
        end = self.spend(start, RUN, index, op)
        if op.kernels > 1 and not inline:
            end = self.latest(end, self.spend(self.later(issue, latency), LAUNCH, index, op))
        waits = inline or op.blocks_host
        if self.exists_always(index, op):
            self.streams[op.stream], self.threads[op.thread] = end, end if waits else issue
        else:
            self.streams[op.stream] = self.latest(end, stream)
            self.threads[op.thread] = self.latest(end, issue) if waits else issue
            end = self.latest(end, self.begin, *deps)
        return issue, ready, start, end

    @abstractmethod
    def end_of(self, dep: Dep) -> T:
        """Return the end of an operation of this iteration, or of an earlier one."""

    @abstractmethod
    def exists_always(self, index: int, op: Op) -> bool:
        """Tell whether all plans have the operation on all ranks."""

    @abstractmethod
    def later(self, time: T, ms: float) -> T:
        """Return a time plus a constant."""

    @abstractmethod
    def latest(self, *times: T) -> T:
        """Return the maximum."""

    @abstractmethod
    def spend(self, time: T, cost: str, index: int, op: Op) -> T:
        """Add the operation's host time (`ISSUE`), its cost (`RUN`) or nothing (`LAUNCH`).

        Where a plan lacks the operation, issuing it takes no time. Its run and its launch return
        minus infinity, so that no maximum depends on them.
        """

    @abstractmethod
    def meet(self, ready: T, index: int, op: Op) -> T:
        """Return the last arrival among the ranks that an operation joins."""

    def queue(self, ready: T, index: int, op: Op) -> T:
        """Return when an operation that is ready gets the device."""
        return ready


def thread_names(graph: Graph) -> list[str]:
    """Return the host threads that issue operations, the main one first."""
    return [*dict.fromkeys((MAIN, *(op.thread for op in graph.ops)))]
