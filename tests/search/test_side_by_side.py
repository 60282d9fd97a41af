"""Pieces of work in processes: the same results as one after the other, whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest

from search import side_by_side as module
from search.problem import Result
from search.side_by_side import side_by_side, usable_cores
from search.solve import solve
from search.stop import Stop
from tests.search.problems import several_lookups

HERE = os.getpid()
SHARED = [object(), object()]


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def use(count: int) -> None:
        monkeypatch.setattr(module, "usable_cores", lambda: count)

    return use


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_come_in_order_and_share_what_both_sides_know(
    cores: Callable[[int], None], count: int
) -> None:
    cores(count)
    first, ended = os.pipe()

    def piece(number: int) -> tuple[int, object]:
        if number == 1:
            os.write(ended, b"x")
        if number == 0 and count > 1:
            os.read(first, 1)  # ends after the second one
        return number, SHARED[number % 2]

    results = list(side_by_side([partial(piece, number) for number in range(4)], SHARED))
    for pipe in (first, ended):
        os.close(pipe)
    assert [number for number, _ in results] == [0, 1, 2, 3]
    assert all(shared is SHARED[number % 2] for number, shared in results)


def test_pieces_run_in_other_processes_where_there_are_cores(
    cores: Callable[[int], None],
) -> None:
    cores(2)
    assert HERE not in set(side_by_side([os.getpid] * 3, ()))
    cores(1)
    assert set(side_by_side([os.getpid] * 3, ())) == {HERE}


def test_the_piece_of_a_process_that_dies_runs_here(cores: Callable[[int], None]) -> None:
    def piece() -> int:
        if os.getpid() != HERE:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    cores(2)
    assert list(side_by_side([piece] * 5, ())) == [HERE] * 5


def test_an_error_is_raised_here(cores: Callable[[int], None]) -> None:
    def piece() -> int:
        raise ValueError("of this piece")

    cores(2)
    with pytest.raises(ValueError, match="of this piece"):
        list(side_by_side([piece, os.getpid], ()))


@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_comes_after_the_results_so_far(cores: Callable[[int], None], count: int) -> None:
    """The second piece sends it once the first has answered; the others never do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    results: list[int] = []

    def piece(number: int) -> int:
        if number == 1:
            os.kill(HERE, signal.SIGINT)
        if number:
            time.sleep(10)
        return number

    cores(count)
    try:
        with pytest.raises(KeyboardInterrupt):
            results.extend(side_by_side([partial(piece, number) for number in range(4)], ()))
    finally:
        signal.signal(signal.SIGINT, before)
    assert results in ([], [0])  # the first may not have been read yet
    assert results == [0] or count > 1


def test_nothing_is_forked_from_a_process_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert usable_cores() == 1


def test_nothing_is_forked_from_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    config = vars(multiprocessing.current_process())["_config"]
    monkeypatch.setitem(config, "daemon", True)
    assert usable_cores() == 1


def test_a_search_finds_the_same_on_any_number_of_cores(cores: Callable[[int], None]) -> None:
    def found(count: int) -> Result:
        cores(count)
        return solve(several_lookups(3), Stop(effort=0.002), 0)

    one_core, two_cores = found(1), found(2)
    assert one_core.plans == two_cores.plans
    assert one_core.lower_bound_ms == two_cores.lower_bound_ms
    assert one_core.evaluations == two_cores.evaluations
    assert one_core.stopped_by == two_cores.stopped_by
