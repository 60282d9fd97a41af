"""Fitting the constants of Megatron's software: ``python -m lab fit megatron --data DIR``.

The rows are the hundred of vTrain's one-node table whose configurations have the smallest SHA-256.
Least squares of the log errors with a soft L1 loss, since no constants predict a few configurations
to within 20 %. It prints the content of `predictor/hardware/runtimes/megatron.yaml`, and the error
on the rows left out. Rows are sums of timings (decision 0017), so it also leaves out every timing
in turn, with all rows that are sums of it; this takes minutes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from lab.runtimes.megatron import CONSTANTS, MegatronRuntime, MegatronStep
from lab.statistics import relative_errors
from lab.validate.transformers import Measured, Timing, read_steps, timing_of
from predictor.hardware.loader import load_hardware
from shardopt.calibrate.fitting import Array, mape

HARDWARE = "a100-40gb"
FIT_ROWS = 100
START = MegatronRuntime(70.0, 1.5, 1.5, 3.0, 1.4, 13.0)
LOWEST = MegatronRuntime(5.0, 1.0, 1.0, 1.0, 1.0, 1.0)
HIGHEST = MegatronRuntime(400.0, 6.0, 6.0, 30.0, 4.0, 200.0)
SOFT = 0.05
"""Log errors beyond this count linearly."""
STEP = 3e-3
"""Relative step of the derivatives: the maximum of launches and kernels has corners."""


def split_rows(rows: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Split into rows to fit, of the smallest SHA-256 of their integers, and held-out rows."""

    def digest(row: Measured) -> str:
        return hashlib.sha256(",".join(map(str, row[0])).encode()).hexdigest()

    ordered = sorted(rows, key=digest)
    return ordered[:FIT_ROWS], ordered[FIT_ROWS:]


def predicted(step: MegatronStep, rows: Sequence[Measured]) -> Array:
    """Return the predicted iteration times in ms, ``[rows]``."""
    return step.iteration_ms([model for _, model, _ in rows])


def measured(rows: Sequence[Measured]) -> Array:
    """Return the measured iteration times in ms, ``[rows]``."""
    return np.array([time for _, _, time in rows])


def fit(step: MegatronStep, rows: Sequence[Measured]) -> MegatronRuntime:
    """Fit the constants to the rows."""
    from scipy.optimize import least_squares

    target = np.log(measured(rows))

    def residuals(logs: Array) -> Array:
        step.use(_runtime(np.exp(logs)))
        return np.asarray(np.log(predicted(step, rows)) - target)

    result = least_squares(
        residuals,
        np.log(_values(START)),
        bounds=(np.log(_values(LOWEST)), np.log(_values(HIGHEST))),
        loss="soft_l1",
        f_scale=SOFT,
        diff_step=np.full(len(CONSTANTS), STEP),
    )
    return _runtime([float(f"{value:.4g}") for value in np.exp(result.x)])


def timings_left_out(step: MegatronStep, rows: Sequence[Measured]) -> dict[Timing, Array]:
    """Return timing -> relative errors of its rows under constants fitted without them."""
    chosen, _ = split_rows(rows)
    default = fit(step, chosen)
    errors = {}
    for timing in dict.fromkeys(timing_of(configuration) for configuration, _, _ in rows):
        timing_rows = [row for row in rows if timing_of(row[0]) == timing]
        remaining = [row for row in chosen if timing_of(row[0]) != timing]
        step.use(default if len(remaining) == len(chosen) else fit(step, remaining))
        errors[timing] = relative_errors(measured(timing_rows), predicted(step, timing_rows))
    return errors


def _values(runtime: MegatronRuntime) -> Array:
    return np.array([getattr(runtime, name) for name in CONSTANTS])


def _runtime(values: Iterable[float]) -> MegatronRuntime:
    return MegatronRuntime(*(float(value) for value in values))


def run(data: Path) -> Iterator[str]:
    """Yield the constants, their errors, and the fitted configurations, as lines of YAML."""
    every = read_steps(data).rows
    rows, held_out = split_rows(every)
    step = MegatronStep(load_hardware(HARDWARE), START)
    runtime = fit(step, rows)
    step.use(runtime)
    for name, part in (("fit", rows), ("held out", held_out)):
        error = mape(relative_errors(measured(part), predicted(step, part)))
        yield f"# {name}: {len(part)} rows, MAPE {error:.2%}"
    errors = list(timings_left_out(step, every).values())
    over_rows, over_timings = mape(np.concatenate(errors)), np.mean([mape(e) for e in errors])
    yield f"# timings left out one by one: {len(every)} rows, MAPE {over_rows:.2%}"
    yield f"# the same over {len(errors)} timings: {over_timings:.2%}"
    yield "constants:"
    yield from (f"  {name}: {getattr(runtime, name)}" for name in CONSTANTS)
    yield "fit_rows:"
    yield from (f"  - {list(configuration)}" for configuration, _, _ in rows)
