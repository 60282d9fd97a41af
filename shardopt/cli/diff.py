"""``shardopt diff``: what differs between two plans."""

from __future__ import annotations

from pathlib import Path


def diff(a: Path, b: Path, json: bool = False) -> None:
    """Show which tables two plans shard or place differently.

    Arguments:
        a (A): Plan file (JSON).
        b (B): Plan file (JSON).
    """
    from predictor.model.plan_json import load_plan
    from shardopt.cli.output import print_json
    from shardopt.report.console import make_console
    from shardopt.report.diff import diff_object, show_diff

    plans = (load_plan(a), load_plan(b))
    if json:
        print_json(diff_object(*plans))
    else:
        show_diff(make_console(), (str(a), str(b)), *plans)
