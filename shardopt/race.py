"""Which of several plans is the fastest, measured in rounds: successive elimination.

Every round times all plans that are left within seconds of each other. Drift of the machine is in
all of them, so plans are compared round by round. A plan is out once the interval of its ratio to
the leader lies above 1 (Even-Dar, Mannor and Mansour 2006). The error that is allowed in all is
shared among plans and looks, so that looking often drops no good plan.

TorchRec's plan is never out: every other plan is compared with it over all rounds that both ran.

The rounds that choose a plan flatter it, as the luckiest of several looks the fastest (the
optimizer's curse, Smith and Winkler 2006). So the last rounds are of the chosen plan and TorchRec's
alone, and the gain is theirs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from predictor.errors import InfeasibleError, InputError
from shardopt.formatting import ms, points

CONFIDENCE = 0.95
MINUTES, PLANS = 3.0, 4
"""Default limit in minutes of a measurement, and the number of plans that it measures."""
TORCHREC = "torchrec"
"""Name of the plan of TorchRec's planner."""
THEIRS = "TorchRec's planner"
"""Finder of TorchRec's plan."""
FINAL_SHARE, FINAL_SESSIONS = 0.25, 2
"""Share of the time for the chosen plan and TorchRec's alone, and its sessions; each plan is built
first once."""
SHORTEST_S = 15.0
"""A session is not worth its start below this time."""

Times = dict[tuple[int, int], float]
"""Session and round in it -> ms of an iteration."""


@dataclass(frozen=True)
class Ratio:
    """A plan's time over another's.

    Args:
        value: median of the rounds' ratios; drift between rounds is in both parts.
        interval: for that median, from the order of the rounds alone; None where there are too few
            rounds for any.
    """

    value: float
    interval: tuple[float, float] | None

    @property
    def significant(self) -> bool:
        """Tell if the interval leaves out 1."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


def ratio_of(
    rounds: Sequence[float], first: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio:
    """Ratio by round, as both were measured within seconds of each other."""
    ratios = sorted(a / b for a, b in zip(rounds, first, strict=True))
    return Ratio(statistics.median(ratios), median_interval(ratios, confidence))


def median_interval(
    ordered: Sequence[float], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """The narrowest interval of order statistics that holds the median often enough.

    Args:
        ordered: ascending.

    Returns:
        None where even the whole range is not sure enough: below 6 values at 95 %.
    """
    n = len(ordered)
    tail, cut = 0.0, -1
    while cut + 1 < n // 2:
        tail += math.comb(n, cut + 1) / 2**n
        if 2 * tail > 1 - confidence:
            break
        cut += 1
    return None if cut < 0 else (ordered[cut], ordered[n - 1 - cut])


@dataclass(frozen=True)
class Entrant:
    """A plan that is to be measured, and who found it.

    Args:
        content: the plan compared with others: two alike run once. ``plan`` itself if None.
    """

    plan: Any
    found_by: str
    content: Any = None

    def same_as(self, other: Entrant) -> bool:
        """Tell if both do the same."""
        ours, theirs = (e.plan if e.content is None else e.content for e in (self, other))
        return bool(ours == theirs)


@dataclass(frozen=True)
class Confirmed:
    """A plan as measured.

    Args:
        median_ms, interval_ms: over rounds, see `Race.median_ms`; None where it was never timed, or
            too briefly.
        dropped_after: rounds after which it was out; None if it stayed.
        why: it was out, where it could not run.
        predicted_ms, predicted_interval_ms: by the profile; None where it was not predicted.
    """

    name: str
    plan: Any
    found_by: str
    median_ms: float | None
    interval_ms: tuple[float, float] | None
    dropped_after: int | None
    why: str | None = None
    predicted_ms: float | None = None
    predicted_interval_ms: tuple[float, float] | None = None

    @property
    def factor(self) -> float | None:
        """Measured time over the predicted one, where it lies outside the predicted interval."""
        if self.median_ms is None or not self.predicted_ms or self.predicted_interval_ms is None:
            return None
        low, high = self.predicted_interval_ms
        return None if low <= self.median_ms <= high else self.median_ms / self.predicted_ms


@dataclass(frozen=True)
class Confirmation:
    """Measured plans.

    Args:
        best: the fastest measured plan; never one that was slower than TorchRec's.
        gain: of it over TorchRec's plan, a share of the iteration: value, low, high, from rounds
            that did not choose it where there was time for some; None where TorchRec's planner has
            no plan or it was not timed, bounds None after too few rounds.
        interrupted: the user ended it.
    """

    plans: tuple[Confirmed, ...]
    best: Confirmed
    gain: tuple[float, float | None, float | None] | None
    notes: tuple[str, ...]
    interrupted: bool = False

    @property
    def is_theirs(self) -> bool:
        """True if the fastest measured plan is that of TorchRec's planner."""
        return self.best.name == TORCHREC or THEIRS in self.best.found_by

    @property
    def verdict(self) -> str:
        """Recommendation of the measurement, in a sentence."""
        best, time = self.best, ms(self.best.median_ms or 0.0)
        if self.is_theirs:
            return f"Keep TorchRec's plan: at {time} measured it is the fastest."
        if self.gain is None:
            return (
                f"Use {best.name}: at {time} it is the fastest measured; TorchRec's was not timed."
            )
        value, low, high = self.gain
        if low is None or high is None:
            return (
                f"{best.name[0].upper()}{best.name[1:]} was the fastest, {time}, by "
                f"{points(value)} %; too few rounds to be sure."
            )
        words = f"{points(value)} % ({points(low)} to {points(high)})"
        if low > 0:
            return f"Use {best.name}: measured, it gains {words} over TorchRec's plan."
        return f"Keep TorchRec's plan: measured, {best.name} gains {words}, which may be nothing."


class Sessions(Protocol):
    """Runs plans; each session builds them anew."""

    def now(self) -> float:
        """Seconds on a clock; all ranks that ask see the same."""

    def run(
        self, race: Race, session: int, order: Sequence[str], until: float
    ) -> Mapping[str, str]:
        """Build plans in this order, time them in turns until then, and add the rounds.

        Returns:
            Plans that could not run, each with why.

        Raises:
            InfeasibleError: they do not fit into memory together; no rank runs any.
        """


def run_session(
    sessions: Sessions, race: Race, session: int, order: Sequence[str], until: float
) -> Mapping[str, str]:
    """Run a session, in halves where its plans do not fit into memory together; a plan that does
    not fit alone is out."""
    if not order:
        return {}
    try:
        return sessions.run(race, session, order, until)
    except InfeasibleError as error:
        if len(order) == 1:
            return {order[0]: str(error)}
    half, now = len(order) // 2, sessions.now()
    first = run_session(sessions, race, session, order[:half], now + (until - now) / 2)
    return {**first, **run_session(sessions, race, session, order[half:], until)}


class Race:
    """Plans with their times. The fastest one is dropped at all with a probability of at most
    ``1 - CONFIDENCE``."""

    def __init__(self) -> None:
        self.entrants: dict[str, Entrant] = {}
        self.times: dict[str, Times] = {}
        self.theirs: str | None = None
        """The name under which TorchRec's plan runs."""
        self.dropped: dict[str, int] = {}
        """Plan that is out -> the rounds that it ran."""
        self.why: dict[str, str] = {}
        self.notes: list[str] = []
        self.sessions = 0
        self.chosen: str | None = None
        """The plan of the final rounds, which begin with session `final`."""
        self.final = 0
        self.interrupted = False

    def enter(self, entrants: Mapping[str, Entrant]) -> dict[str, str]:
        """Add plans; one that is there under another name takes part once.

        Returns:
            The name under which each runs.
        """
        names = {}
        for name, new in entrants.items():
            same = next((n for n, e in self.entrants.items() if e.same_as(new)), None)
            names[name] = same or name
            by = new.found_by if same is None else f"{self.entrants[same].found_by}, {new.found_by}"
            self.entrants[names[name]] = Entrant(new.plan, by, new.content)
            self.times.setdefault(names[name], {})
        self.theirs = names.get(TORCHREC, self.theirs)
        return names

    @property
    def left(self) -> list[str]:
        """Plans that are not out."""
        return [name for name in self.times if name not in self.dropped]

    @property
    def reference(self) -> str | None:
        """The plan that others are compared with: TorchRec's, else that with most rounds."""
        if self.theirs is not None and self.times[self.theirs]:
            return self.theirs
        timed = [name for name in self.times if self.times[name]]
        return max(timed, key=lambda n: len(self.times[n]), default=None)

    @property
    def leader(self) -> str | None:
        """The fastest plan; of those that are out only where no other was timed."""
        timed = [name for name in self.left if self.times[name]]
        timed = timed or [name for name, times in self.times.items() if times]
        return min(timed, key=lambda n: self.median_ms(n) or math.inf, default=None)

    def median_ms(self, name: str) -> float | None:
        """The reference's median times the ratio to it: plans that ran at different times are told
        apart without the drift between them. None if it was never timed."""
        middle = statistics.median(self.times[name].values()) if self.times[name] else None
        reference = self.reference
        ratio = None if reference is None else self.ratio(name, reference)
        if ratio is None or reference is None:
            return middle
        return statistics.median(self.times[reference].values()) * ratio.value

    def interval_ms(self, name: str) -> tuple[float, float] | None:
        """Return the interval of `median_ms`; the reference's is of its own rounds."""
        reference = self.reference
        if reference in (None, name):
            return median_interval(sorted(self.times[name].values()))
        ratio = self.ratio(name, reference)
        if ratio is None or ratio.interval is None:
            return None
        middle = statistics.median(self.times[reference].values())
        return middle * ratio.interval[0], middle * ratio.interval[1]

    def ratio(
        self, name: str, to: str, confidence: float = CONFIDENCE, since: int = 0
    ) -> Ratio | None:
        """Return one plan's time over another's in the rounds that both ran, from a session on;
        None without any."""
        ours, theirs = self.times[name], self.times[to]
        both = [key for key in ours if key in theirs and key[0] >= since]
        if not both:
            return None
        return ratio_of([ours[key] for key in both], [theirs[key] for key in both], confidence)

    def add(self, key: tuple[int, int], times: Mapping[str, float]) -> None:
        """A round: plan -> its time in ms."""
        for name, time in times.items():
            self.times[name][key] = time

    def drop(self, name: str, why: str | None = None) -> None:
        """Take a plan out."""
        self.dropped[name] = len(self.times[name])
        if why is not None:
            self.why[name] = why
            self.notes.append(f"{name} is out: {why}")

    def slower(self, looks: int) -> list[str]:
        """Plans that are left and clearly slower than the leader.

        Args:
            looks: how often this will be asked at most.
        """
        leader = self.leader
        confidence = 1 - (1 - CONFIDENCE) / max(1, (len(self.times) - 1) * looks)
        slower_plans = []
        for name in self.left:
            ratio = None if leader in (None, name) else self.ratio(name, leader, confidence)
            if ratio is not None and ratio.interval is not None and ratio.interval[0] > 1:
                slower_plans.append(name)
        return slower_plans

    def confirmation(self) -> Confirmation:
        """Return the measurements so far.

        Raises:
            InputError: nothing.
        """
        best = self._best
        if best is None:
            raise InputError("no plan could be timed" + "".join(f"; {note}" for note in self.notes))
        plans = {
            name: Confirmed(
                name,
                entrant.plan,
                entrant.found_by,
                self.median_ms(name),
                self.interval_ms(name),
                self.dropped.get(name),
                self.why.get(name),
            )
            for name, entrant in self.entrants.items()
        }
        interrupted = ("interrupted: the best plan measured so far",) if self.interrupted else ()
        return Confirmation(
            tuple(plans.values()),
            plans[best],
            self._gain(best),
            (*self.notes, *interrupted),
            self.interrupted,
        )

    @property
    def _best(self) -> str | None:
        """The chosen plan unless it was slower than TorchRec's in the final rounds; the leader
        where there were none."""
        if self.chosen is None or self.theirs is None or self.chosen in self.dropped:
            return self.leader
        last = self.ratio(self.chosen, self.theirs, since=self.final)
        return self.theirs if last is not None and last.value > 1 else self.chosen

    def _gain(self, best: str) -> tuple[float, float | None, float | None] | None:
        theirs = self.theirs
        if theirs is None or not self.times[theirs]:
            return None
        if best == theirs:
            return 0.0, 0.0, 0.0
        last = self.ratio(best, theirs, since=self.final) if best == self.chosen else None
        ratio = last or self.ratio(best, theirs)
        if ratio is None:  # they never ran in the same round
            ours_ms, theirs_ms = (statistics.median(self.times[n].values()) for n in (best, theirs))
            return 1 - ours_ms / theirs_ms, None, None
        if ratio.interval is None:
            return 1 - ratio.value, None, None
        return 1 - ratio.value, 1 - ratio.interval[1], 1 - ratio.interval[0]


def deadlines(now: float, minutes: float) -> tuple[float, float]:
    """Return the times to choose a plan, with `FINAL_SHARE` of the minutes left, and to end."""
    return now + 60 * (1 - FINAL_SHARE) * minutes, now + 60 * minutes


def run_race(
    race: Race,
    sessions: Sessions,
    deadline: float,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run sessions until the best plan is told apart or time is over.

    Every session begins with another plan, so that each is built in every place.

    Args:
        deadline: on the clock of the sessions; the first session runs in any case.

    Raises:
        KeyboardInterrupt: before any plan was timed; later it ends the race with what is there.
    """
    looks = len(race.left) + 1
    started = sessions.now()
    try:
        for look in range(2 * looks):
            now = sessions.now()
            if len(race.left) < 2 and any(race.times[name] for name in race.left):
                break
            if not race.left or (look and deadline - now < SHORTEST_S):
                break
            turn = look % len(race.left)
            order = race.left[turn:] + race.left[:turn]
            say(f"measuring {', '.join(order)}; {max(deadline - now, 0):.0f} s left")
            until = min(deadline, now + max(SHORTEST_S, (deadline - started) / looks))
            race.sessions += 1
            for name, reason in run_session(sessions, race, race.sessions, order, until).items():
                race.drop(name, reason)
                say(race.notes[-1])
            slower = race.slower(2 * looks)
            for name in slower:
                if name != race.theirs:
                    race.drop(name)
                    say(f"{name} is clearly slower after {race.dropped[name]} rounds")
            if {*race.left} <= {race.leader, *slower}:
                break
    except KeyboardInterrupt:
        if race.leader is None:
            raise
        race.interrupted = True


def run_final(
    race: Race,
    sessions: Sessions,
    deadline: float,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Time the fastest plan and TorchRec's alone, where there are both and time for it.

    Args:
        deadline: on the clock of the sessions.
    """
    leader, theirs, started = race.leader, race.theirs, sessions.now()
    if race.interrupted or leader is None or theirs is None or not race.times[theirs]:
        return
    if leader == theirs or deadline - started < SHORTEST_S:
        return
    # few rounds make the luckiest plan look the fastest
    ms = {name: race.median_ms(name) or math.inf for name in race.left}
    faster = [n for n in ms if ms[n] < ms[theirs] and race.interval_ms(n) is not None]
    best = min(faster, key=ms.__getitem__, default=leader)
    race.chosen, race.final = best, race.sessions + 1
    try:
        for i in range(FINAL_SESSIONS):
            now = sessions.now()
            if i and deadline - now < SHORTEST_S:
                break
            order = [theirs, best] if i % 2 else [best, theirs]
            say(f"measuring {' and '.join(order)} alone; {max(deadline - now, 0):.0f} s left")
            race.sessions += 1
            until = started + (deadline - started) * (i + 1) / FINAL_SESSIONS
            for name, reason in run_session(sessions, race, race.sessions, order, until).items():
                race.drop(name, reason)
                say(race.notes[-1])
                return
    except KeyboardInterrupt:
        race.interrupted = True
