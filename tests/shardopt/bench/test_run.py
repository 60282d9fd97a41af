"""Decisions of `bench run` without any rank: names of plans."""

from pathlib import Path

from shardopt.cli.bench.run import plan_names


def test_plans_are_called_by_their_file_names() -> None:
    paths = [Path("x/a.json"), Path("y/a.json"), Path("b.json"), Path("a.json")]
    assert plan_names(paths) == ["a", "a#2", "b", "a#3"]
