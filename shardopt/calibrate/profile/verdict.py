"""What a calibration is worth, judged by its own rows.

Why: docs/decisions/0038.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from predictor.fit.held_out import HeldOut
from predictor.hardware.schema import Verdict
from shardopt.calibrate.accepted import Accepted
from shardopt.calibrate.design.phases import TOGETHER
from shardopt.calibrate.design.points import COLLECTIVE_OPS
from shardopt.calibrate.rows import Measurement

MOST_REFUSED = 0.05
"""Share of the rows of a quiet calibration that are refused, of those that one rank measures and
of those that all measure."""
MOST_DRIFT = 0.10
"""How far the reference kernels of a quiet calibration move."""
BUSY = 0.5
"""Load average of other work above which times are disturbed."""
MOST_WORSE = 0.1
"""Share by which held-out errors may exceed those of the shipped profile."""


def judge(
    accepted: Accepted,
    drift: Mapping[str, float],
    errors: Mapping[str, HeldOut],
    shipped: Mapping[str, HeldOut],
    ranks_of_host: int,
) -> Verdict:
    """The verdict, with what stands against a better one.

    Args:
        drift: by how much each reference kernel moved meanwhile, as a share.
        errors: of each family on rows held out.
        shipped: of the profile that the calibration started from, on the same rows. Kernels and
            collectives count apart: many good rows of the one would hide bad ones of the other.
        ranks_of_host: whose own work is part of the load.
    """
    worse = []
    for what, together in (("kernels", False), ("collectives", True)):
        names = [name for name in shipped if name.startswith(COLLECTIVE_OPS) == together]
        mine, theirs = (_mean([of[name] for name in names]) for of in (errors, shipped))
        if mine > (1 + MOST_WORSE) * theirs:
            worse.append(f"held-out error of {what} {mine:.1%}, of the shipped one {theirs:.1%}")
    doubts = _unquiet(accepted, drift, ranks_of_host)
    if worse:
        return Verdict(quality="worse than the shipped one", why=(*worse, *doubts))
    return Verdict(quality="usable" if doubts else "quiet", why=tuple(doubts))


def _mean(errors: Sequence[HeldOut]) -> float:
    known = [of.mape for of in errors if of.n]
    return statistics.fmean(known) if known else 0.0


def _unquiet(accepted: Accepted, drift: Mapping[str, float], ranks_of_host: int) -> list[str]:
    doubts = []
    for who, together, ranks in (("one rank", False, 1), ("all ranks", True, ranks_of_host)):
        good, bad = (_of(rows, together) for rows in (accepted.rows, accepted.refused))
        if len(bad) > MOST_REFUSED * len(good + bad):
            doubts.append(f"{len(bad)} of {len(good + bad)} rows of {who} were refused")
        other = statistics.median([row.load for row in good + bad] or [0.0]) - ranks
        if other > BUSY:
            doubts.append(f"load average of other work {other:.1f} while {who} measured")
    if drift and max(drift.values()) > MOST_DRIFT:
        kernel = max(drift, key=lambda name: drift[name])
        doubts.append(f"reference {kernel} moved by {drift[kernel]:.0%}")
    return doubts


def _of(rows: Sequence[Measurement], together: bool) -> list[Measurement]:
    return [row for row in rows if (row.point.family in TOGETHER) == together]
