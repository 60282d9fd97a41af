"""Suites of the search benchmark: the file, what is run, and what is not run again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from lab.planners.instances import Instance
from lab.planners.rows import KILLED, NO_PLAN, RATED, SEARCH_ROWS, SHARDOPT, sources_of
from lab.planners.run import Outcome, PlannerSettings, run_planner
from lab.planners.suite import SuiteSelection, check_planners, load_suite, run_suite
from predictor.errors import InputError
from search.prefer import TOLERANCE
from shardopt.measure.store import read_rows
from shardopt.ranks.calls import CallError, CallServer, OutOfTime

ROOT = Path(__file__).parents[3]
HEAD = "schema: 1\ntorchrec_limit_s: 30\nvariant_limit_s: 20\nrival_limit_s: 10\ninstances:\n"
SMALL = HEAD + "  - {tables: 4, gpus: 2, fill: 0.4, seeds: [1, 2]}\n"
Calls = list[tuple[str, str, PlannerSettings]]


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "instances.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls are noted and answered at once."""
    recorded: Calls = []

    def call(
        self: CallServer,
        limit_s: float | None,
        function: Callable[..., Outcome],
        planner: str,
        instance: Instance,
        settings: PlannerSettings,
    ) -> Outcome:
        recorded.append((instance.name, planner, settings))
        if planner == "hugectr":
            raise OutOfTime("late")
        if planner == "neuroshard":
            return Outcome(0.1)
        return Outcome(2.0, 3.0, True, 4.0, True, None, "done", ((0.5, 3.0),))

    monkeypatch.setattr(CallServer, "call", call)
    return recorded


def test_the_committed_suite_has_small_and_large_tight_and_packed_instances() -> None:
    suite = load_suite(ROOT / "configs/bench/search/instances.yaml")
    instances = suite.instances
    assert len(instances) >= 40
    assert (min(i.tables for i in instances), max(i.tables for i in instances)) == (20, 1000)
    assert (min(i.gpus for i in instances), max(i.gpus for i in instances)) == (8, 128)
    assert {i.memory for i in instances} == {"loose", "tight", "packed"}
    assert all(i.fill >= 0.99 for i in instances if i.packed)


def test_rows_are_taken_up_again(suite: Path, calls: Calls, tmp_path: Path) -> None:
    rows, messages = tmp_path / "rows.csv", list[str]()
    first = run_suite(
        load_suite(suite), rows, SuiteSelection(planners=("torchrec",)), messages.append
    )
    assert [(r.instance, r.planner) for r in first] == [
        ("4x2-fill40-1", "torchrec"),
        ("4x2-fill40-2", "torchrec"),
    ]
    assert messages[0] == "1 of 2: 4x2-fill40-1, torchrec"
    assert len(calls) == 2
    again = run_suite(load_suite(suite), rows, SuiteSelection(only="*-2"), messages.append)
    assert len(calls) == 2 + 9
    assert ("4x2-fill40-2", "torchrec") not in [call[:2] for call in calls[2:]]
    assert again == read_rows(rows, SEARCH_ROWS)
    assert len(again) == 11


def test_rows_of_other_code_are_run_again(
    suite: Path, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours after a change of the search, and random plans, which get the time that ours took."""
    rows, all_of = tmp_path / "rows.csv", SuiteSelection(only="*-1")
    first = run_suite(load_suite(suite), rows, all_of, lambda text: None)
    assert {r.planner: r.sources for r in first} == {
        r.planner: sources_of(r.planner) for r in first
    }
    runs = len(calls)
    run_suite(load_suite(suite), rows, all_of, lambda text: None)
    assert len(calls) == runs
    monkeypatch.setattr(
        "lab.planners.suite.sources_of",
        lambda planner: sources_of(planner) if planner.startswith("torchrec") else "changed",
    )
    messages: list[str] = []
    waiting = SuiteSelection(only="*-1", planners=("random",))
    run_suite(load_suite(suite), rows, waiting, messages.append)
    assert SHARDOPT in messages[0]
    again = run_suite(load_suite(suite), rows, all_of, lambda text: None)
    assert {planner for _, planner, _ in calls[runs:]} == {
        r.planner for r in first if not r.planner.startswith("torchrec")
    }
    assert len(again) == len(first)
    assert read_rows(rows, SEARCH_ROWS) == again


def test_who_is_given_how_long(suite: Path, calls: Calls, tmp_path: Path) -> None:
    run_suite(
        load_suite(suite), tmp_path / "rows.csv", SuiteSelection(only="*-1"), lambda text: None
    )
    limits = {
        planner: (settings.limit_s, settings.rating_limit_s) for _, planner, settings in calls
    }
    assert limits["torchrec"] == (30.0, None)
    assert limits["torchrec dynamic"] == limits["torchrec balanced"] == (20.0, None)
    assert limits["neuroshard"] == limits["hugectr"] == (10.0, 10.0)
    assert limits[SHARDOPT] == limits[RATED] == (None, None)
    assert limits["random"] == (2.0, 2.0)
    assert [planner for _, planner, _ in calls][-2:] == [SHARDOPT, "random"]


def test_no_plan_and_no_answer_are_rows(suite: Path, calls: Calls, tmp_path: Path) -> None:
    selection, messages = (
        SuiteSelection(only="*-1", planners=("neuroshard", "hugectr")),
        list[str](),
    )
    rows = run_suite(load_suite(suite), tmp_path / "rows.csv", selection, messages.append)
    assert {r.planner: r.ended for r in rows} == {"neuroshard": NO_PLAN, "hugectr": KILLED}
    assert all(r.time_ms is r.rated_ms is None for r in rows)


def test_a_planner_that_breaks_is_named(
    suite: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def call(*args: object) -> Outcome:
        raise CallError("Traceback\nZeroDivisionError: division by zero")

    monkeypatch.setattr(CallServer, "call", call)
    with pytest.raises(InputError, match=r"4x2-fill40-1: .*ZeroDivisionError"):
        run_suite(load_suite(suite), tmp_path / "rows.csv", SuiteSelection(), lambda text: None)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("tables: 4", "tables: 0", "instances[0]: got 0 tables"),
        ("fill: 0.4", "fill: 1.5", "1.5"),
        ("fill: 0.4", "fil: 0.4", "'fil'"),
        ("seeds: [1, 2]", "seeds: [1, 1]", "4x2-fill40-1"),
        ("gpus: 2", "gpus: 12", "hosts of 8"),
        ("gpus: 2", "gpus: 2, packed: true, sharding_types: [row_wise]", "table_wise"),
        ("torchrec_limit_s: 30\n", "", "torchrec_limit_s"),
        ("  - {", "  - 7\n  - {", "instances[0]"),
        ("schema: 1", "schema: 2", "schema: 1"),
        ("instances:", "instances: [", "line"),
    ],
)
def test_a_bad_instances_file(suite: Path, old: str, new: str, words: str) -> None:
    assert old in SMALL
    suite.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_suite(suite)
    assert words in str(caught.value)
    assert str(suite) in str(caught.value)


def test_unknown_names() -> None:
    with pytest.raises(InputError, match=r"no planner 'neurshard' .did you mean 'neuroshard'"):
        check_planners(["neurshard"])
    assert check_planners(["random", "torchrec"]) == ("torchrec", "random")


def test_nothing_matches(suite: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="4x2-fill40-1"):
        run_suite(
            load_suite(suite), tmp_path / "r.csv", SuiteSelection(only="9*"), lambda text: None
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "instance",
    [
        pytest.param(Instance(8, 2, 5, 0.5), marks=pytest.mark.slow),
        Instance(8, 2, 6, 0.99, packed=True),
    ],
)
def test_every_planner_against_ours(instance: Instance) -> None:
    """Under each judge ours is never worse, and nothing lies below the bound."""
    settings = PlannerSettings(2.0, 1.0, 0.2, 0)
    rated = run_planner(RATED, instance, PlannerSettings(effort=0.1))
    ours = run_planner(SHARDOPT, instance, PlannerSettings(effort=0.1))
    assert ours.fits
    assert rated.rating_fits
    fastest = ours.incumbents[-1][1]
    assert ours.iteration_ms is not None
    assert fastest * (1 - 1e-9) <= ours.iteration_ms <= fastest * (1 + TOLERANCE)
    for planner in ("torchrec", "torchrec balanced", "neuroshard", "hugectr", "random"):
        row = run_planner(planner, instance, settings)
        assert row.seconds > 0
        if row.fits and ours.iteration_ms and row.iteration_ms:
            assert ours.bound_ms <= row.iteration_ms * (1 + 1e-9)
        if row.rating_fits:
            assert rated.rating_ms <= row.rating_ms * (1 + 1e-9)
            assert rated.bound_ms <= row.rating_ms * (1 + 1e-9)
