"""``--strict``: refusing what leaves the ranges that the profile's constants were fitted in."""

from __future__ import annotations

from collections.abc import Iterable

from predictor.errors import RangeError
from predictor.iteration.ranges import OutOfRange
from shardopt.report.prediction import range_lines


def refuse_outside(found: Iterable[OutOfRange], where: str = "") -> None:
    """What ``--strict`` does.

    Args:
        where: the plan, where there are several.

    Raises:
        RangeError: some cost is asked outside its range; says which and what to do.
    """
    lines = range_lines(found)
    if lines:
        place = f"{where}: " if where else ""
        raise RangeError(
            f"{place}{'; '.join(lines)} (refused by --strict); plan for other ranks or a smaller "
            "--batch-size, use a profile that covers them, or leave --strict out"
        )
