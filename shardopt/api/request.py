"""What ``shardopt plan`` is asked for, as a value: by a command line or by a plan file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from predictor.errors import InputError, PlanError, did_you_mean
from predictor.units import gib
from search.stop import Stop
from shardopt.api.setting import Machine
from shardopt.files import refuse_streams

HORIZON = 10_000
"""Steps over which a move must pay for itself unless the request says otherwise."""
MAX_SEED = 2**31 - 1
MAX_TOP_K = 1000
MADE = "made_by"
"""Key of a plan file that says what made it."""
CHOICES = {
    "search": ("rounding", "cpsat", "optuna", "all"),
    "objective": ("nominal", "mean", "regret"),
}
"""Texts that the options with a fixed list of values take."""
NEVER_REPLAYED = frozenset(
    ["tune", "trials", "objectives", "storage", "study", "replay", "output", "o", "help", "h"]
)
"""Options that write, connect to something or are another command: no plan file of ours names one,
and one that does is refused whole."""
FILES = ("model", "cluster", "hardware", "scenarios", "from")
"""Settings that may name a file."""


@dataclass(frozen=True)
class PlanRequest:
    """All that decides the answer of ``shardopt plan``, by the names of its options; None where an
    option was left out. `Machine` says what the first ones mean.

    Args:
        model: path of the model file.
        search: who proposes plans, one of `CHOICES`.
        effort: work of the search, as a multiple of the default.
        time_limit: in seconds.
        top_k: number of plans to keep.
        from_: path of the plan in use, to start from.
        max_moves: tables that may differ from it.
        max_gib: weights and optimizer state that may move from it, in GiB.
        horizon: steps over which a move from it must pay for itself.
        objective: what is minimised, one of `CHOICES`.
        scenarios: a number, ``none`` or a file.
        stats: paths of stats files of windows of data, with commas between them.
    """

    model: str
    gpus: int | None = None
    gpus_per_node: int | None = None
    cluster: str | None = None
    hardware: str | None = None
    hbm_gib: float | None = None
    ddr_gib: float | None = None
    reserve: float | None = None
    batch_size: int | None = None
    strict: bool = False
    search: str = "all"
    seed: int = 0
    effort: float = 1.0
    time_limit: float | None = None
    top_k: int = 3
    from_: str | None = None
    max_moves: int | None = None
    max_gib: float | None = None
    horizon: int | None = None
    objective: str = "nominal"
    scenarios: str | None = None
    stats: str | None = None

    @property
    def machine(self) -> Machine:
        """What is planned for."""
        return Machine(
            self.gpus,
            self.gpus_per_node,
            None if self.cluster is None else Path(self.cluster),
            self.hardware,
            self.hbm_gib,
            self.ddr_gib,
            self.reserve,
            self.batch_size,
        )

    @property
    def searchers(self) -> tuple[str, ...]:
        """Who proposes plans, as `search.solve.solve` takes them."""
        return CHOICES["search"][:-1] if self.search == "all" else (self.search,)

    @property
    def windows(self) -> list[Path]:
        """The stats files."""
        return [Path(name) for name in (self.stats or "").split(",") if name]

    @property
    def inputs(self) -> list[Path]:
        """The files that are read for certain; the model and others may name more."""
        named = [Path(of) for of in (self.model, self.cluster, self.from_) if of is not None]
        return [*named, *self.windows]

    @property
    def max_bytes(self) -> float | None:
        """Bytes that may move from the plan in use."""
        return None if self.max_gib is None else gib(self.max_gib)

    def check(self) -> None:
        """Refuse options that are out of range or say nothing without another.

        Raises:
            InputError: says which option, and what is allowed.
        """
        check_number("--seed", self.seed, 0, MAX_SEED)
        Stop(self.effort, self.time_limit)
        check_number("--top-k", self.top_k, 1, MAX_TOP_K)
        for flag, value, low, hint in (
            ("--max-moves", self.max_moves, 0, " (0 only predicts it)"),
            ("--max-gib", self.max_gib, 0, ""),
            ("--horizon", self.horizon, 1, ""),
        ):
            if value is None:
                continue
            if self.from_ is None:
                raise InputError(
                    f"{flag} limits the changes to the plan of --from; give --from FILE too"
                )
            if not low <= value < math.inf:
                raise InputError(f"{flag} is {value}; it must be at least {low}{hint}")

    def settings(self) -> dict[str, Any]:
        """The options that are not as they are by default, as `read_request` takes them."""
        found = {of.name.rstrip("_"): getattr(self, of.name) for of in fields(self)}
        default = {of.name.rstrip("_"): of.default for of in fields(self)}
        return {name: value for name, value in found.items() if value != default[name]}


def read_request(
    settings: Mapping[str, Any], where: str, model: str | None = None
) -> tuple[PlanRequest, list[str]]:
    """A request out of a file that may come from anybody.

    Only the options of `PlanRequest` are taken, by their names and of their types: no word of the
    file is a command line.

    Args:
        settings: name -> value.
        where: the file, for messages.
        model: of the model file, if it is not where ``settings`` say.

    Returns:
        The request, and the names that are no options of it, which were left out.

    Raises:
        PlanError: a value has the wrong type, there is no model, or an option is one that a plan
            file must not set.
        InputError: a value is out of range, or a file is a FIFO or a device.
    """
    kinds = {name.rstrip("_"): kind for name, kind in get_type_hints(PlanRequest).items()}
    given = {} if model is None else {"model": model}
    left_out = []
    for name, value in settings.items():
        if name.strip("-").replace("-", "_") in NEVER_REPLAYED:
            raise PlanError(
                f"{where}: its settings hold '{name}', which no plan file may set; plan again with "
                "the options that you trust"
            )
        if name not in kinds:
            left_out.append(f"{name}{did_you_mean(name, kinds)}")
        elif not _fits(value, kinds[name]) or value not in CHOICES.get(name, (value,)):
            raise PlanError(f"{where}: its setting {name} is {value!r}; give {_allowed(name)}")
        else:
            given.setdefault(name, value)
    if "model" not in given:
        raise PlanError(f"{where}: does not say which model file it was made from; give MODEL")
    for name in FILES:
        if name != "model" or model is None:
            refuse_streams(Path(given.get(name) or ""), name)
    made = PlanRequest(**{"from_" if name == "from" else name: given[name] for name in given})
    for path in made.windows:
        refuse_streams(path, "stats file")
    made.check()
    return made, left_out


def _fits(value: object, kind: Any) -> bool:
    """Whether a value of JSON has the type of an option; ``true`` is no number."""
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int) and isinstance(0.0, kind):
        return abs(value) <= 2**53
    return value is not None and isinstance(value, kind)


def _allowed(name: str) -> str:
    if name in CHOICES:
        return f"one of {', '.join(CHOICES[name])}"
    kind = str(get_type_hints(PlanRequest)["from_" if name == "from" else name])
    words = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
    return next(word for key, word in words.items() if key in kind)


def check_number(flag: str, value: float, low: int, high: int) -> None:
    """Refuse a value outside ``low`` to ``high``."""
    if not low <= value <= high:
        raise InputError(f"{flag} is {value}; it must be at least {low} and at most {high}")
