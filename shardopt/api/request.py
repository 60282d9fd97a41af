"""Requests for a plan on a machine, as values: from a command line, a script or a plan file.

Imports nothing heavy, because commands derive their flags from these classes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from predictor.errors import InputError, PlanError, did_you_mean
from shardopt.files import refuse_streams

HORIZON = 10_000
"""Default number of steps within which a move must pay for itself."""
SEARCHERS = ("annealing",)
"""Searchers of `all`: CP-SAT and Optuna gain nothing beside it."""
MAX_SEED = 2**31 - 1
MAX_TOP_K = 1000
MADE = "made_by"
"""Key of a plan file for the inputs that made it."""
NEVER_REPLAYED = frozenset(
    [
        *("apply", "tune", "trials", "objectives", "storage", "study"),
        *("replay", "output", "o", "help", "h"),
    ]
)
"""Options that write, connect or run another command. A plan file that sets one is refused; ours
never do."""


@dataclass(frozen=True)
class Machine:
    """Machine to plan for. A field that is None is taken from the cluster file, the plan, the model
    file or the hardware profile, in this order.

    Args:
        gpus: number of ranks.
        gpus_per_node: ranks of one host; ``min(8, gpus)`` if no file has it.
        cluster: cluster file, instead of ``gpus`` and ``gpus_per_node``.
        hardware: name or path of a hardware profile.
        network: kind of network between hosts, instead of that of the cluster file, the plan or
            the profile.
        hbm_gib, ddr_gib: device and host memory per rank.
        reserve: share of device memory kept free, in [0, 1); the default depends on whether
            activations are known.
        batch_size: samples per rank and iteration.
    """

    gpus: int | None = None
    gpus_per_node: int | None = None
    cluster: Path | None = None
    hardware: str | None = None
    network: str | None = None
    hbm_gib: float | None = None
    ddr_gib: float | None = None
    reserve: float | None = None
    batch_size: int | None = None


@dataclass(frozen=True)
class PlanRequest(Machine):
    """Request of ``shardopt plan``: its options by name, as ``--help`` describes them; None for an
    option that was left out."""

    model: Path | None = None
    strict: bool = False
    search: Literal["annealing", "cpsat", "optuna", "all"] = "all"
    seed: int = 0
    effort: float = 1.0
    time_limit: float | None = None
    top_k: int = 3
    tie: float | None = None
    prove: bool = False
    from_: Path | None = None
    renamed: str | None = None
    max_moves: int | None = None
    max_gib: float | None = None
    horizon: int | None = None
    objective: Literal["nominal", "mean", "regret"] = "nominal"
    scenarios: str | None = None
    stats: str | None = None

    @property
    def searchers(self) -> tuple[str, ...]:
        """Searchers that propose plans, as `search.solve.solve` takes them."""
        return SEARCHERS if self.search == "all" else (self.search,)

    @property
    def search_options(self) -> dict[str, Any]:
        """Options of `search.solve.solve`."""
        named = {"top_k": self.top_k, "tolerance": self.tie, "prove": self.prove}
        return {**named, "searchers": self.searchers}

    @property
    def windows(self) -> list[Path]:
        """The stats files."""
        return [Path(name) for name in (self.stats or "").split(",") if name]

    @property
    def inputs(self) -> list[Path]:
        """Files that are read in any case; the model and others may name more."""
        named = (self.model, self.cluster, self.from_)
        return [*(path for path in named if path is not None), *self.windows]

    def check(self) -> None:
        """Refuse options that are out of range or that need another option. Those of `Machine` are
        checked when they are used.

        Raises:
            InputError: says which option, and what is allowed.
        """
        from search.stop import Stop

        check_number("seed", self.seed, 0, MAX_SEED)
        Stop(self.effort, self.time_limit)
        check_number("top_k", self.top_k, 1, MAX_TOP_K)
        check_number("tie", self.tie, 0, 1)
        if self.renamed is not None and self.from_ is None:
            raise InputError(
                "renamed says which tables of a plan in use have other names now; give that plan, "
                "too",
                inputs=("renamed", "from"),
            )
        for name, low in (("max_moves", 0), ("max_gib", 0), ("horizon", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            if self.from_ is None:
                raise InputError(
                    f"{name} limits the changes to a plan in use; give that plan, too",
                    inputs=(name, "from"),
                )
            if not low <= value < math.inf:
                raise InputError(f"{name} is {value}; it must be at least {low}", inputs=(name,))

    def settings(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, in the form of `read_request`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = [field.name for field in fields(self) if values[field.name] != field.default]
        order = sorted(changed, key=lambda name: name != "model")
        plain = {name: str(v) if isinstance(v := values[name], Path) else v for name in order}
        return {name.rstrip("_"): value for name, value in plain.items()}


def read_request(
    settings: Mapping[str, Any], where: str, model: Path | None = None
) -> tuple[PlanRequest, list[str]]:
    """Read a request from a file that may come from anybody.

    Only options of `PlanRequest` with values of their types are accepted; nothing in the file is
    run as a command line.

    Args:
        settings: name -> value.
        where: the file, for messages.
        model: path of the model file, if it differs from the one in ``settings``.

    Returns:
        The request, and the names that are not options, which are ignored.

    Raises:
        PlanError: a value has the wrong type, there is no model, or an option is one that a plan
            file must not set.
        InputError: a file is a FIFO or a device.
    """
    from pydantic import TypeAdapter, ValidationError

    names = {field.name.rstrip("_"): field.name for field in fields(PlanRequest)}
    values: dict[str, Any] = {}
    left_out = []
    for name, value in settings.items():
        if name.strip("-").replace("-", "_") in NEVER_REPLAYED:
            raise PlanError(
                f"{where}: its settings contain '{name}', which no plan file may set; plan again "
                "with the options that you trust"
            )
        if name not in names:
            left_out.append(f"{name}{did_you_mean(name, names)}")
        else:
            values[names[name]] = value
    if model is not None:
        values["model"] = str(model)
    elif "model" not in values:
        raise PlanError(f"{where}: does not say which model file it was made from; give MODEL")
    try:
        # JSON, in which a path is a string; strict, so that a string is never read as a number
        request = TypeAdapter(PlanRequest).validate_json(json.dumps(values), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).rstrip("_")
        raise PlanError(
            f"{where}: its setting {name} is {first['input']!r}; {first['msg'].lower()}"
        ) from None
    for path in (request.hardware, request.scenarios, *request.inputs):
        if path is not None and path != model:
            refuse_streams(Path(path), "file")
    return request, left_out


def check_number(name: str, value: float | None, low: float, high: float) -> None:
    """Refuse a value outside ``low`` to ``high``; None, an option that was not given, passes.

    Args:
        name: name of the option, with underscores.
    """
    if value is not None and not low <= value <= high:
        raise InputError(
            f"{name} is {value}; it must be at least {low} and at most {high}", inputs=(name,)
        )
