"""Which samples count, and what is in one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardopt.measure.sampling import (
    FEWEST,
    MOST,
    MOST_WRITES,
    CudaTimer,
    Samples,
    choose_samples,
    interleave,
    needs_more,
    sample_stages,
)


def test_disturbed_samples_are_left_out_where_enough_remain() -> None:
    samples = [(1.0, True), (9.0, False), (1.1, True), (1.2, True)]
    assert choose_samples(samples).seconds == (1.0, 1.1, 1.2)
    assert choose_samples(samples[:3]).seconds == (1.0, 9.0, 1.1)


def test_a_point_ends_when_its_time_is_spent_and_a_busy_machine_only_delays_it() -> None:
    clean, dirty = [(1.0, True)] * FEWEST, [(1.0, False)] * FEWEST
    assert needs_more(clean, spent=0.5, seconds=1.0)
    assert not needs_more(clean, spent=1.5, seconds=1.0)
    assert needs_more(clean[:-1], spent=1.5, seconds=1.0)
    assert needs_more(dirty, spent=1.5, seconds=1.0), "patience first"
    assert not needs_more(dirty, spent=3.5, seconds=1.0)
    assert needs_more(dirty[:-1], spent=3.5, seconds=1.0), "a few in any case"
    assert not needs_more([(1.0, False)] * MOST, spent=0.0, seconds=1.0)


class Machine:
    """A host and a device with clocks of their own; stands in for ``torch.cuda``.

    A kernel starts when it is issued and the one before it is done.
    """

    def __init__(self, flush_s: float) -> None:
        self.host_s = self.device_s = 0.0
        self.flush_s, self.issued = flush_s, 0
        self.Event = lambda enable_timing: Event(self)

    def launch(self, seconds: float) -> None:
        self.device_s = max(self.device_s, self.host_s) + seconds
        self.issued += 1

    def fill_(self, value: float) -> None:
        self.launch(self.flush_s)

    def sum(self) -> None:
        self.launch(self.flush_s)

    def synchronize(self) -> None:
        self.host_s = max(self.host_s, self.device_s)


class Event:
    """Is reached when the device has done all that was issued before it."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.at_s = machine, 0.0

    def record(self) -> None:
        self.at_s = max(self.machine.device_s, self.machine.host_s)

    def query(self) -> bool:
        return self.at_s <= self.machine.host_s

    def elapsed_time(self, later: Event) -> float:
        return (later.at_s - self.at_s) * 1e3


def kernels(machine: Machine, count: int, host_s: float, device_s: float) -> Callable[[], None]:
    """A call that launches kernels, each after some host code."""

    def call() -> None:
        for _ in range(count):
            machine.host_s += host_s
            machine.launch(device_s)

    return call


@pytest.mark.parametrize("host_us", [1.0, 80.0, 400.0])
def test_a_device_is_timed_without_the_host_however_slow_that_is(host_us: float) -> None:
    machine = Machine(flush_s=50e-6)
    timer = CudaTimer(machine, machine)
    call = kernels(machine, 3, host_us * 1e-6, 5e-6)
    samples: list[tuple[float, bool]] = []
    for _ in range(20):
        timer.flush()
        samples.append(timer.sample(call))
    assert choose_samples(samples).seconds == pytest.approx((15e-6,) * sum(c for _, c in samples))
    assert sum(clean for _, clean in samples) >= 14
    slow = [seconds for seconds, clean in samples if not clean]
    assert all(seconds > 15e-6 for seconds in slow), "these are not clean for a reason"


def test_a_call_that_waits_for_its_device_is_never_clean_and_counts_as_it_is() -> None:
    machine = Machine(flush_s=50e-6)
    timer = CudaTimer(machine, machine)

    def call() -> None:
        machine.launch(5e-6)
        machine.synchronize()
        machine.host_s += 30e-6
        machine.launch(5e-6)

    samples = []
    for _ in range(20):
        timer.flush()
        samples.append(timer.sample(call))
    assert not any(clean for _, clean in samples)
    assert choose_samples(samples).seconds == pytest.approx((40e-6,) * 20)
    assert timer.writes == MOST_WRITES, "and flushes no longer than that"


def test_every_stage_is_timed_after_a_flush_and_gets_what_the_one_before_made() -> None:
    machine = Machine(flush_s=1e-3)
    calls: list[tuple[int, object]] = []

    def stage(name: str, device_s: float) -> Callable[[int, object], str]:
        def run(repeat: int, argument: object) -> str:
            calls.append((repeat, argument))
            machine.launch(device_s)
            return f"{name}{repeat}"

        return run

    stages = (stage("a", 1e-6), stage("b", 2e-6), stage("c", 3e-6))
    spent = sample_stages(CudaTimer(machine, machine), stages, seconds=0.0)
    assert [s.median_s for s in spent] == pytest.approx([1e-6, 2e-6, 3e-6])
    assert {len(s.seconds) for s in spent} == {FEWEST}
    assert calls[:4] == [(0, None), (0, "a0"), (0, "b0"), (1, None)]
    # a write, a read, a kernel
    assert machine.issued == 3 * len(calls)


def test_rounds_measure_everything_and_start_with_another_one_each() -> None:
    order: list[tuple[str, int]] = []
    samples = interleave(
        {"a": lambda: 1.0, "b": lambda: 2.0}, 3, lambda name, round_: order.append((name, round_))
    )
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]
    assert samples == {"a": Samples((1.0,) * 3), "b": Samples((2.0,) * 3)}


@pytest.mark.parametrize(
    ("seconds", "stable"),
    [((1.0,), None), ((1.0, 1.05, 1.1), True), ((1.0, 1.3), False), ((1.0,) * 30 + (1.6,), False)],
)
def test_stable(seconds: tuple[float, ...], stable: bool | None) -> None:
    assert Samples(seconds).stable is stable


def test_median_and_overlap() -> None:
    assert Samples((3.0, 1.0, 2.0)).median_s == 2
    assert Samples((1.0, 2.0)).overlaps(Samples((2.0, 5.0)))
    assert Samples((1.0, 9.0)).overlaps(Samples((2.0, 3.0)))
    assert not Samples((1.0, 2.0)).overlaps(Samples((2.1, 5.0)))
