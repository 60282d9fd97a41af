"""``shardopt diff``: what differs between two plans."""

from __future__ import annotations

from pathlib import Path

from shardopt.report.blocks import View


def diff(a: Path, b: Path) -> View:
    """Show which tables two plans shard or place differently.

    Arguments:
        a (A): Plan file (JSON).
        b (B): Plan file (JSON).
    """
    from predictor.model.plan_json import load_plan
    from shardopt.report.diff import diff_view

    return diff_view((str(a), str(b)), load_plan(a), load_plan(b))
