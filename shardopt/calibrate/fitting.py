"""Fits constants to rows, for all families.

A profile is made family after family, see `CalibratedProfile`. `non_negative` fits constants in
which times are linear; `fit_free` fits those of any other cost model, which it calls with changed
profiles. A constant that the rows do not determine keeps its value in the initial profile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor.hardware.schema import HardwareProfile, KnownError, Provenance
from shardopt.calibrate.rows import Measurement, Origin, times_ms

Array = NDArray[np.float64]
Predict = Callable[[HardwareProfile], Array]
"""Times ``[rows]`` in ms under a profile."""

NS = 1e-6
"""One nanosecond in ms."""
FEWEST = 6
"""Fewest fit rows of a family for a fit."""
REWEIGHTINGS = 20
"""Steps from least squares towards least absolute errors: timings have a one-sided tail."""
TRUSTED_ERROR = 0.01
"""Relative errors below it count as equally good in a reweighted fit."""
MIN_REL_ERROR, MAX_REL_ERROR = 0.01, 2.0
GMAE_FLOOR = 1e-4
"""Added to every error in `gmae`, as Lin et al. add 4e-4 (owensgroup/ml_perf_model)."""
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


def mape(errors: ArrayLike) -> float:
    """Return the mean of the absolute errors; NaN without errors."""
    size = np.abs(np.asarray(errors, dtype=np.float64))
    return float(size.mean()) if size.size else math.nan


def gmae(errors: ArrayLike) -> float:
    """Return the geometric mean of absolute errors as Lin et al. 2022 define it.

    A floor is added to every error; NaN without errors.
    """
    size = np.abs(np.asarray(errors, dtype=np.float64))
    return float(np.exp(np.mean(np.log(size + GMAE_FLOOR)))) if size.size else math.nan


@dataclass(frozen=True)
class HeldOut:
    """Relative errors ``predicted / measured - 1`` of rows that are in no fit.

    Args:
        fitted: number of rows in the fit.
        times: of the rows, in any unit, as weights; None: equal weights.
    """

    errors: Array
    fitted: int
    times: Array | None = None

    @property
    def n(self) -> int:
        """Rows held out."""
        return len(self.errors)

    @property
    def mape(self) -> float:
        return mape(self.errors)

    @property
    def gmae(self) -> float:
        return gmae(self.errors)

    @property
    def bias(self) -> float:
        """Median error, signed."""
        return float(np.median(self.errors)) if self.n else math.nan

    @property
    def rms(self) -> float:
        """Root of the mean square, by time: the 1-sigma error of a profile's group.

        Long kernels dominate the time of an iteration, so they dominate its error too.
        """
        if not self.n:
            return math.nan
        return float(np.sqrt(np.average(self.errors**2, weights=self.times)))

    def __str__(self) -> str:
        if not self.n:
            return "none"
        return f"mean absolute error {self.mape:.1%}, bias {self.bias:+.1%}, n {self.n}"


def total(errors: Sequence[HeldOut]) -> HeldOut:
    """Join the errors of several parts, at least one."""
    times = [np.ones(part.n) if part.times is None else part.times for part in errors]
    together = np.concatenate([part.errors for part in errors])
    return HeldOut(together, sum(part.fitted for part in errors), np.concatenate(times))


@dataclass(frozen=True)
class Wiring:
    """Wiring of the ranks whose collectives are fitted.

    Args:
        ranks: on all hosts.
        hosts: all with as many ranks.
        link_gbit_s: of the emulated link between hosts of one rank; None: there is none.
    """

    ranks: int
    hosts: int = 1
    link_gbit_s: float | None = None

    @property
    def local(self) -> int:
        """Ranks of one host."""
        return 1 if self.link_gbit_s is not None else self.ranks // self.hosts


@dataclass(frozen=True)
class CalibratedProfile:
    """A profile in the making: each family of rows replaces the groups that it determines.

    A group without enough rows keeps the base profile's constants and its provenance.

    Args:
        rows: rows for the fits, one of each point and part.
        base: the profile that the calibration starts from.
        profile: the profile so far.
        errors: held-out error of every family that was fitted.
        shipped: errors of the base profile on the same rows, for families that hold rows out.
        groups: measured groups, as `HardwareProfile.groups` names them.
    """

    rows: Sequence[Measurement]
    origin: Origin
    wiring: Wiring
    base: HardwareProfile
    profile: HardwareProfile
    errors: Mapping[str, HeldOut] = field(default_factory=dict)
    shipped: Mapping[str, HeldOut] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    groups: frozenset[str] = frozenset()

    def of(self, family: str, part: str = "", test: bool | None = None) -> list[Measurement]:
        """Return the rows of one family, fit or test or both."""
        return [
            row
            for row in self.rows
            if (row.point.family, row.part) == (family, part) and test in (None, row.point.test)
        ]

    def fit_and_test(self, family: str, part: str = "") -> tuple[list[Measurement], ...]:
        """Return the rows of one family that are fitted, and those that are held out."""
        return self.of(family, part, test=False), self.of(family, part, test=True)

    def update(self, **groups: Any) -> CalibratedProfile:
        """Replace groups, or other values, of the profile."""
        return replace(self, profile=self.profile.model_copy(update=groups))

    def constants(self, group: str, **values: Any) -> CalibratedProfile:
        """Replace constants in one group of the profile."""
        return self.update(**{group: getattr(self.profile, group).model_copy(update=values)})

    def error(
        self, label: str, held_out: HeldOut, shipped: Array | None = None
    ) -> CalibratedProfile:
        """Add one more error; ``shipped`` are the base profile's on the same rows."""
        draft = replace(self, errors={**self.errors, label: held_out})
        if shipped is None:
            return draft
        return replace(draft, shipped={**self.shipped, label: HeldOut(shipped, 0)})

    def score(
        self,
        label: str,
        fitted: Sequence[Measurement],
        test: Sequence[Measurement],
        predict: Callable[[HardwareProfile, Sequence[Measurement]], Array],
    ) -> CalibratedProfile:
        """Add the errors on rows held out, of the current profile and of its base."""
        ms = times_ms(test)
        mine, theirs = (
            predict(hw, test) / ms - 1.0 if len(test) else np.zeros(0)
            for hw in (self.profile, self.base)
        )
        return self.error(label, HeldOut(mine, len(fitted), ms), theirs)

    def measured(
        self,
        name: str,
        fitted: Sequence[Measurement],
        held_out: HeldOut,
        ranges: Mapping[str, Iterable[float]] | None = None,
        also: str = "",
    ) -> CalibratedProfile:
        """Set the provenance and the error of a group whose constants are in the profile.

        Args:
            name: of the group, as `HardwareProfile.groups` has it.
            ranges: values of the rows, by quantity.
            also: text after the error, such as constants that stay as they were.
        """
        group, known_error = self.profile.groups[name], None
        spans = {key: [float(value) for value in values] for key, values in (ranges or {}).items()}
        rms = held_out.rms if held_out.n else group.rel_error
        if held_out.n:
            known_error = KnownError(
                suite="calibrate",
                rows="points left out of the fit",
                n=held_out.n,
                mean=round(held_out.mape, 4),
                geomean=round(held_out.gmae, 4),
            )
        provenance = Provenance(
            kind="measured",
            source=f"{source_on(self.origin.machine)}held-out rows: {held_out}{also}",
            versions=self.origin.versions,
            date=max(row.date for row in fitted)[:10],
            n=len(fitted),
            range={key: (min(values), max(values)) for key, values in spans.items()},
            error=known_error,
        )
        error = round(float(np.clip(rms, MIN_REL_ERROR, MAX_REL_ERROR)), 4)
        group = group.model_copy(update={"provenance": provenance, "rel_error": error})
        draft = replace(self, groups=self.groups | {name})
        outer, _, inner = name.partition(".")
        return draft.constants(outer, **{inner: group}) if inner else draft.update(**{outer: group})

    def take(self, fit: FittedProfile) -> CalibratedProfile:
        """Take the profile of a fit, with a note on each part of it that was refused."""
        refused = (
            f"{name}: the constants of {self.base.name} stay, which predict the points held out "
            f"within {theirs:.1%}, fitted ones within {mine:.1%}"
            for name, mine, theirs in fit.worse
        )
        return replace(self, profile=fit.hw, notes=(*self.notes, *refused))

    def kept(self, name: str) -> CalibratedProfile:
        """Add a note that a family or group has too few rows."""
        return replace(self, notes=(*self.notes, kept_words(name)))


def rows_of(predict: Callable[..., Array], rows: Sequence[Measurement]) -> tuple[Predict, Array]:
    """Return the function that predicts these rows, and their times."""
    return partial(predict, rows=rows), times_ms(rows)


def kept_words(name: str) -> str:
    """Write the note on a family or group that has too few rows."""
    return f"{name}: too few rows are left; the base profile's constants stay"


def source_on(machine: str) -> str:
    """Write the beginning of the source of a measured group."""
    return f"shardopt calibrate on {machine}; "


def non_negative(columns: Any, time: Array) -> Array:
    """Fit coefficients >= 0 of ``columns [rows, terms]`` by least absolute relative errors."""
    relative = np.asarray(columns, dtype=np.float64) / time[:, None]
    return least_errors(relative, np.ones_like(time))


def least_errors(
    columns: Array, target: Array, penalty: Array | None = None, reweightings: int = REWEIGHTINGS
) -> Array:
    """Fit coefficients >= 0 of ``columns [rows, terms]`` to a ``target [rows]``.

    Args:
        penalty: further rows ``[any, terms]`` with target 0 and constant weight.
        reweightings: 0 for least squares; a dozen come close to least absolute errors.
    """
    from scipy.optimize import nnls

    penalty = np.zeros((0, columns.shape[1])) if penalty is None else penalty
    targets, weight = np.append(target, np.zeros(len(penalty))), np.ones_like(target)
    for remaining in range(reweightings, -1, -1):
        matrix = np.vstack((columns * weight[:, None], penalty))
        scale = np.abs(matrix).max(axis=0)
        scale[scale == 0] = 1.0
        targets[: len(target)] = target * weight
        solution = nnls(matrix / scale, targets)[0] / scale
        if remaining:
            off = np.abs(columns @ solution - target)
            weight = 1.0 / np.sqrt(np.maximum(off, TRUSTED_ERROR))
            weight /= np.sqrt((weight**2).mean())
    return np.asarray(solution)


def after_call(
    draft: CalibratedProfile, label: str, rows: Sequence[Measurement], columns: Any
) -> tuple[CalibratedProfile, Array | None]:
    """Fit coefficients of ``columns [rows, terms]``, beside a call of code that lies in no cache.

    Each row holds such a call, but ops of an iteration do not. The fit has a constant for it and
    drops it.

    Returns:
        The profile with their held-out error, and the coefficients in ms; None for these where the
        rows are too few.
    """
    test = np.array([row.point.test for row in rows], dtype=bool)
    terms = [[1.0, *row] for row in columns]
    if not terms or (~test).sum() < max(FEWEST, FEWEST_PER_CONSTANT * len(terms[0])):
        return (draft.kept(label) if terms else draft), None
    table, time = np.array(terms), times_ms(rows)
    coefficients = non_negative(table[~test], time[~test])
    errors = table @ coefficients / time - 1.0
    return draft.error(label, HeldOut(errors[test], int((~test).sum()))), coefficients[1:]


@dataclass(frozen=True)
class FreeConstant:
    """A constant to fit: its place in the profile, and its bounds.

    Args:
        group: of the profile.
        key: in the group; ``tflops.fp32`` for an entry of a mapping.
        low, high: both > 0, in the key's unit.
    """

    group: str
    key: str
    low: float
    high: float

    def value(self, hw: HardwareProfile) -> float:
        name, _, part = self.key.partition(".")
        entry = getattr(getattr(hw, self.group), name)
        if part:
            entry = {str(key): value for key, value in entry.items()}.get(part)
        return 0.0 if entry is None else float(entry)

    def put(self, hw: HardwareProfile, value: float) -> HardwareProfile:
        group = getattr(hw, self.group)
        name, _, part = self.key.partition(".")
        entry: Any = value
        if part:
            entry = {str(key): old for key, old in getattr(group, name).items()} | {part: value}
        return hw.model_copy(update={self.group: group.model_copy(update={name: entry})})


@dataclass(frozen=True)
class FittedProfile:
    """A profile with fitted constants.

    Args:
        fitted: constants that the rows determine.
        kept: the other constants, with their values from before.
        worse: for each refused fit its name, its held-out error, and that of the profile before it.
    """

    hw: HardwareProfile
    fitted: tuple[FreeConstant, ...]
    kept: tuple[FreeConstant, ...]
    worse: tuple[tuple[str, float, float], ...] = ()

    @property
    def kept_text(self) -> str:
        """Text of the provenance on constants that the rows do not determine."""
        if not self.kept:
            return ""
        names = ", ".join(sorted(f"{c.group}.{c.key}" for c in self.kept))
        return f"; as in the base profile, as the rows do not tell: {names}"

    def unless_worse(
        self, name: str, before: HardwareProfile, predict: Predict, time_ms: Array
    ) -> FittedProfile:
        """Return the fit, or the profile before it if that predicts held-out rows better.

        Args:
            name: of the fit, for a note.
            predict: times of the held-out rows.
            time_ms: of these rows; without any the fit stands.
        """
        if not self.fitted or not len(time_ms):
            return self
        mine, theirs = (mape(predict(hw) / time_ms - 1.0) for hw in (self.hw, before))
        if mine <= theirs:
            return self
        return FittedProfile(before, (), self.fitted + self.kept, ((name, mine, theirs),))

    def then(self, later: FittedProfile) -> FittedProfile:
        """Join with a later fit that began with this one's profile."""
        fitted, kept = self.fitted + later.fitted, self.kept + later.kept
        return FittedProfile(later.hw, fitted, kept, self.worse + later.worse)


def fit_free(
    hw: HardwareProfile, free: Sequence[FreeConstant], predict: Predict, time_ms: Array
) -> FittedProfile:
    """Minimise the squares of ``log(predicted / measured)`` over the logs of the free constants.

    The least certain constant goes back to its value in ``hw`` until the rows determine all
    remaining ones. Standard errors come from the Jacobian at the solution and the residuals.

    Args:
        predict: times ``[rows]`` in ms under a profile.
        time_ms: measured, > 0.
    """
    candidates = list(free)
    log_time = np.log(time_ms)
    while candidates:
        if len(time_ms) < FEWEST_PER_CONSTANT * len(candidates):
            candidates.pop()
            continue
        solution, unsure = _solve(hw, candidates, predict, log_time)
        worst = int(np.argmax(unsure))
        if unsure[worst] <= UNSURE:
            fixed = tuple(constant for constant in free if constant not in candidates)
            return FittedProfile(solution, tuple(candidates), fixed)
        candidates.pop(worst)
    return FittedProfile(hw, (), tuple(free))


def _solve(
    hw: HardwareProfile, free: Sequence[FreeConstant], predict: Predict, log_time: Array
) -> tuple[HardwareProfile, Array]:
    """Return the best profile, and the standard error of the log of every constant."""
    from scipy.optimize import least_squares

    low, high = np.log([f.low for f in free]), np.log([f.high for f in free])
    margin = 1e-3 * (high - low)
    start = np.log([f.value(hw) or math.sqrt(f.low * f.high) for f in free])

    def at(x: Array) -> HardwareProfile:
        changed = hw
        for constant, value in zip(free, np.exp(x), strict=True):
            changed = constant.put(changed, float(np.clip(value, constant.low, constant.high)))
        return changed

    last: list[tuple[Array, Array]] = []

    def off(x: Array) -> Array:
        # the solver asks for the gradient where it has just evaluated the errors
        if not last or not np.array_equal(last[0][0], x):
            times = np.maximum(predict(at(x)), SHORTEST_MS)
            last[:] = [(x.copy(), np.log(times) - log_time)]
        return last[0][1].copy()  # the solver scales it in place

    def gradient(x: Array) -> Array:
        """Return the Jacobian ``[rows, constants]`` by a step up, or down near the upper bound."""
        here, columns = off(x), []
        for i in range(len(x)):
            there = x.copy()
            there[i] += STEP if x[i] + STEP <= high[i] else -STEP
            columns.append((off(there) - here) / (there[i] - x[i]))
        return np.stack(columns, axis=1)

    solution = least_squares(
        off,
        np.clip(start, low + margin, high - margin),
        jac=gradient,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=USUAL_ERROR,
        xtol=TOLERANCE,
        ftol=TOLERANCE,
        max_nfev=60,
    )
    spread = float(np.median(np.abs(off(solution.x)))) / 0.6745
    return at(solution.x), _standard_errors(gradient(solution.x), max(spread, 1e-3))


def _standard_errors(jacobian: Array, spread: float) -> Array:
    """Return the standard error of every constant; infinite where no row depends on it."""
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
