"""Fits some constants of a profile to measured times, for any cost model.

The model is called with a changed profile; least squares on the logs of the times find the free
constants within their bounds. A constant that the rows do not determine keeps its value in the
profile that the fit starts from, and is listed as kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.hardware.schema import HardwareProfile

Array = NDArray[np.float64]
Predict = Callable[[HardwareProfile], Array]

UNSURE = 0.3
"""Standard error of a constant's log above which the rows do not determine it."""
USUAL_ERROR = 0.1
"""Log error beyond which a row counts linearly: some rows run a kernel that the model lacks."""
STEP = 2e-3
"""Step of finite differences in logs, large enough for hits and tiles, which change in jumps."""
TOLERANCE = 1e-4
"""Relative tolerance of the loss and the logs of constants; times scatter far more."""
SHORTEST_MS = 1e-12
FEWEST_PER_CONSTANT = 2
"""Fewest rows for each free constant."""


@dataclass(frozen=True)
class FreeConstant:
    """A constant to fit: its place in the profile, and its bounds.

    Args:
        group: of the profile.
        key: in the group; for an entry of a mapping such as ``tflops.fp32``.
        low, high: both > 0, in the key's unit.
    """

    group: str
    key: str
    low: float
    high: float

    def value(self, hw: HardwareProfile) -> float:
        """Its value in a profile."""
        name, _, part = self.key.partition(".")
        held = getattr(getattr(hw, self.group), name)
        if part:
            held = {str(key): value for key, value in held.items()}.get(part)
        return 0.0 if held is None else float(held)

    def put(self, hw: HardwareProfile, value: float) -> HardwareProfile:
        """The profile with another value."""
        group = getattr(hw, self.group)
        name, _, part = self.key.partition(".")
        held: Any = value
        if part:
            held = {str(key): old for key, old in getattr(group, name).items()} | {part: value}
        return hw.model_copy(update={self.group: group.model_copy(update={name: held})})


@dataclass(frozen=True)
class FittedProfile:
    """A profile with fitted constants.

    Args:
        fitted: constants that the rows determine.
        kept: the others, which keep their value from before.
    """

    hw: HardwareProfile
    fitted: tuple[FreeConstant, ...]
    kept: tuple[FreeConstant, ...]


def fit_free(
    hw: HardwareProfile, free: Sequence[FreeConstant], predict: Predict, time_ms: Array
) -> FittedProfile:
    """Least squares of ``log(predicted / measured)`` in the logs of the free constants.

    The least certain constant goes back to its value in ``hw`` until the rows determine all that
    are left. Standard errors come from the Jacobian at the solution and the remaining errors.

    Args:
        predict: times ``[rows]`` in ms under a profile.
        time_ms: measured, > 0.
    """
    left = list(free)
    log_time = np.log(time_ms)
    while left:
        if len(time_ms) < FEWEST_PER_CONSTANT * len(left):
            left.pop()
            continue
        found, unsure = _solve(hw, left, predict, log_time)
        worst = int(np.argmax(unsure))
        if unsure[worst] <= UNSURE:
            kept = tuple(constant for constant in free if constant not in left)
            return FittedProfile(found, tuple(left), kept)
        left.pop(worst)
    return FittedProfile(hw, (), tuple(free))


def _solve(
    hw: HardwareProfile, free: Sequence[FreeConstant], predict: Predict, log_time: Array
) -> tuple[HardwareProfile, Array]:
    """The best profile, and the standard error of the log of every constant."""
    from scipy.optimize import least_squares

    low, high = np.log([f.low for f in free]), np.log([f.high for f in free])
    margin = 1e-3 * (high - low)
    known = np.log([f.value(hw) or math.sqrt(f.low * f.high) for f in free])

    last: list[tuple[Array, Array]] = []

    def off(x: Array) -> Array:
        if not last or not np.array_equal(last[0][0], x):
            times = np.maximum(predict(_with_values(hw, free, x)), SHORTEST_MS)
            last[:] = [(x.copy(), np.log(times) - log_time)]
        return last[0][1].copy()  # the solver scales it in place

    def gradient(x: Array) -> Array:
        # the solver has just evaluated the errors here
        return _differences(off, x, off(x), high)

    solution = least_squares(
        off,
        np.clip(known, low + margin, high - margin),
        jac=gradient,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=USUAL_ERROR,
        xtol=TOLERANCE,
        ftol=TOLERANCE,
        max_nfev=60,
    )
    spread = float(np.median(np.abs(off(solution.x)))) / 0.6745
    return _with_values(hw, free, solution.x), _standard_errors(
        gradient(solution.x), max(spread, 1e-3)
    )


def _differences(off: Callable[[Array], Array], x: Array, here: Array, high: Array) -> Array:
    """Jacobian ``[rows, constants]`` by a step up, or down where the bound is near."""
    columns = []
    for i in range(len(x)):
        there = x.copy()
        there[i] += STEP if x[i] + STEP <= high[i] else -STEP
        columns.append((off(there) - here) / (there[i] - x[i]))
    return np.stack(columns, axis=1)


def _standard_errors(jacobian: Array, spread: float) -> Array:
    """Standard error of every constant; infinite where no row depends on it."""
    information = jacobian.T @ jacobian / spread**2
    size = np.sqrt(np.diag(information))
    silent = size < 1e-9
    size[silent] = 1.0
    scaled = information / np.outer(size, size)
    inverse = np.linalg.pinv(scaled, rcond=1e-8)
    # the rows do not determine a direction that pinv leaves out
    missing = 1.0 - np.diag(inverse @ scaled)
    errors = np.sqrt(np.maximum(np.diag(inverse), 0.0)) / size
    return np.where(silent | (missing > 1e-3), math.inf, errors)


def _with_values(hw: HardwareProfile, free: Sequence[FreeConstant], x: Array) -> HardwareProfile:
    for constant, value in zip(free, np.exp(x), strict=True):
        hw = constant.put(hw, float(np.clip(value, constant.low, constant.high)))
    return hw
