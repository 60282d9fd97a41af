"""Calls in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from predictor.errors import InputError
from shardopt.ranks.calls import CallError, CallServer, OutOfTime

LIMITED = CallServer([])


def refuse() -> None:
    raise InputError("not this")


@pytest.mark.slow
def test_it_answers_from_another_process() -> None:
    assert LIMITED.call(60.0, os.getpid) != os.getpid()
    assert LIMITED.call(None, divmod, 7, 2) == (3, 1)


def test_out_of_time() -> None:
    with pytest.raises(OutOfTime, match=r"no answer in 0\.2 s"):
        LIMITED.call(0.2, time.sleep, 3600)


def test_errors_come_back() -> None:
    with pytest.raises(InputError, match="not this") as caught:
        LIMITED.call(60.0, _input_error)
    assert str(caught.value) == "not this"
    with pytest.raises(CallError, match="ZeroDivisionError"):
        LIMITED.call(60.0, divmod, 1, 0)
    with pytest.raises(CallError, match="exit code 7"):
        LIMITED.call(60.0, os._exit, 7)


def test_a_call_may_have_processes_of_its_own() -> None:
    assert not LIMITED.call(60.0, _is_daemon)


def _is_daemon() -> bool:
    return multiprocessing.current_process().daemon


def _input_error() -> None:
    refuse()
