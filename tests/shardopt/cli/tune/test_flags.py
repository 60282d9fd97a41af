"""The texts of ``--tune`` and ``--objectives``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.errors import InputError
from search.tune.knobs import KNOBS
from shardopt.cli.options import Objectives
from shardopt.cli.plan import refuse_with_tune
from shardopt.cli.tune.flags import MAX_VALUES, TuneFlags, read_goals, read_knobs


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("batch_size=2048:16384", (2048, 4096, 8192, 16384)),
        ("batch_size=3:16", (3, 6, 12, 16)),
        ("batch_size=4096:16384:4096", (4096, 8192, 12288, 16384)),
        ("batch_size=100:250:100", (100, 200, 250)),
        ("batch_size=512/64", (64, 512)),
        ("hosts=4", (4,)),
        ("cache_ratio=0.1:0.3:0.1", (0.1, 0.2, 0.3)),
        ("bucket=12.5:50", (12.5, 25.0, 50.0)),
        ("qcomm=fp32/bf16", ("fp32", "bf16")),
    ],
)
def test_values(text: str, values: tuple[Any, ...]) -> None:
    name = text.partition("=")[0]
    found = read_knobs(text)
    assert found == {name: values}
    assert [type(v) for v in found[name] or ()] == [KNOBS[name].kind] * len(values)


def test_several_knobs_and_their_defaults() -> None:
    found = read_knobs("batch_size=64:128, qcomm ,pipeline=base/sparse_dist")
    assert found == {
        "batch_size": (64, 128),
        "qcomm": None,
        "pipeline": ("base", "sparse_dist"),
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batchsize", r"unknown knob 'batchsize' \(did you mean 'batch_size'\?\); there are"),
        ("", "unknown knob ''"),
        ("qcomm,,hosts", "unknown knob ''"),
        ("batch_size,batch_size=3", "is given twice"),
        ("batch_size=", "'' is not allowed"),
        ("qcomm=", "names no values"),
        ("batch_size=2k", "'2k' is not allowed"),
        ("batch_size=1.5:4", "'1.5' is not allowed"),
        ("cache_ratio=nan", "'nan' is not allowed"),
        ("bucket=1:inf", "'inf' is not allowed"),
        ("batch_size=8:4", "not end before it begins"),
        ("batch_size=0:4", "begin above 0"),
        ("batch_size=1:4:0", "a step above 0"),
        ("batch_size=1:4:1:1", "doubles from A to B"),
        ("batch_size=1:1000:1", "has 1000 values, at most 64"),
        ("batch_size=4/8/4", "has a value twice"),
    ],
)
def test_what_cannot_be_read(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_knobs(text)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**5) | st.none())
def test_a_range_begins_and_ends_where_it_says(low: int, more: int, step: int | None) -> None:
    high = low + more
    text = f"batch_size={low}:{high}" + ("" if step is None else f":{step}")
    try:
        values = read_knobs(text)["batch_size"]
    except InputError:
        assert step is not None
        assert more / step > MAX_VALUES - 2
        return
    assert values is not None
    assert (values[0], values[-1]) == (low, high)
    assert list(values) == sorted(set(values), key=float)


def test_objectives() -> None:
    names = [goal.name for goal in read_goals("memory,time", {})]
    assert names == ["memory", "time"]
    assert [g.name for g in read_goals(None, {"batch_size": None})] == ["time"]
    assert [g.name for g in read_goals(None, {"hosts": None})] == ["gpu_hours"]
    with pytest.raises(InputError, match=r"unknown objective 'tim' \(did you mean 'time'\?\)"):
        read_goals("tim", {})
    with pytest.raises(InputError, match="names an objective twice"):
        read_goals("time,time", {})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"trials": 3}, "--trials is for tuning"),
        ({"storage": "a.log"}, "--storage is for tuning"),
        ({"tune": "qcomm", "trials": 0}, "--trials is 0"),
        ({"tune": "qcomm", "study": "s"}, "--study names a study in a storage"),
        ({"tune": "qcomm", "study": "", "storage": "a.log"}, "--study is empty"),
        ({"tune": "qcomm", "from_": "plan.json"}, "cannot be used together"),
    ],
)
def test_flags_that_do_not_go_together(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        TuneFlags(**flags).check()


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (("regret", None, None), "--objective"),
        (("nominal", "none", None), "--scenarios"),
        (("nominal", None, "mon.npz,tue.npz"), "--stats"),
    ],
)
def test_scenarios_are_of_one_setting(given: tuple[str, str | None, str | None], flag: str) -> None:
    objective, scenarios, stats = given
    with pytest.raises(InputError, match=f"{flag} is about one setting"):
        refuse_with_tune(Objectives(objective), scenarios, stats)
