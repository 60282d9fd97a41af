"""Calls from Python: `plan`, `predict` and `explain` do what the commands of these names do, for a
model file or a module. Their answers show as tables in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias, get_type_hints

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from predictor.errors import InputError, did_you_mean
from predictor.model.plan import ShardingPlan
from shardopt import formatting
from shardopt.api import answer
from shardopt.api.cache import ResultCache, versions
from shardopt.api.document import ExplainAnswer, GivenPlan, PlanAnswer, PredictAnswer, PredictedPlan
from shardopt.api.explanation import explain_plans
from shardopt.api.given_plans import predict_plans
from shardopt.api.request import MADE, Machine, PlanRequest
from shardopt.api.setting import Setting
from shardopt.extras import require_packages
from shardopt.files import atomic_write_text
from shardopt.plan import LoadedPlan
from shardopt.report.blocks import TextTable
from shardopt.report.html.nodes import fragment_of, grid
from shardopt.report.html.page import page

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    Model: TypeAlias = str | PathLike[str] | nn.Module

FilePath = str | PathLike[str]
Rows = list[dict[str, Any]]


@dataclass(frozen=True, repr=False)
class Answered:
    """Answer of a call, which converts to rows, JSON and a page.

    Args:
        document: what ``--json`` of the command prints.
        rows: the lines of its table; every function says what they are.
        explained: the plans of the answer, explained.
    """

    document: PlanAnswer | PredictAnswer | ExplainAnswer
    rows: Rows
    explained: Callable[[], ExplainAnswer]

    @property
    def setting(self) -> Setting:
        """Model on the machine."""
        return self.document.setting

    @property
    def iteration_ms(self) -> float:
        """Predicted time of an iteration of the first plan, in ms."""
        return float(self.rows[0]["iteration_ms"])

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` of the command prints."""
        return self.document.to_dict()

    def to_frame(self) -> pd.DataFrame:
        """`rows` as a pandas DataFrame.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        require_packages("pandas")
        import pandas as pd

        return pd.DataFrame(self.rows)

    def to_html(self) -> str:
        """The page that ``shardopt explain --html`` writes: one file, without a network."""
        return page(self.explained(), versions())

    def __repr__(self) -> str:
        ranks, hardware = self.setting.topology.world_size, self.setting.hardware.name
        best = formatting.ms(self.iteration_ms)
        return f"<{type(self).__name__}: {best} per iteration on {ranks} x {hardware}>"

    def __str__(self) -> str:
        """`rows` as a table."""
        lines = [list(self.rows[0]), *self._cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def _repr_html_(self) -> str:
        """`rows`, as Jupyter shows them."""
        return fragment_of(grid(TextTable([f"<{name}" for name in self.rows[0]], self._cells())))

    def _cells(self) -> list[list[str]]:
        return [
            [
                f"{v:.4g}" if isinstance(v, float) else str("" if v is None else v)
                for v in row.values()
            ]
            for row in self.rows
        ]


@dataclass(frozen=True, repr=False)
class Planned(Answered):
    """The plans that a search found."""

    answer: answer.Answer

    @property
    def plan(self) -> LoadedPlan:
        """The best plan; ``.to_torchrec(module)`` gives TorchRec's."""
        best = self.answer.result.best.plan
        return LoadedPlan(
            best.tables, best.world_size, best.local_world_size, self.answer.file_head
        )

    def save(self, path: FilePath) -> None:
        """Write the best plan as ``shardopt plan -o`` does."""
        atomic_write_text(Path(path), self.answer.plan_text())


def plan(
    model: Model,
    gpus: int | None = None,
    *,
    stats: FilePath | Sequence[FilePath] = (),
    capture: dict[str, Any] | None = None,
    cache: bool = True,
    **options: Any,
) -> Planned:
    """Search for the sharding plan with the shortest predicted iteration time.

    The rows of the answer are the ranked plans, then those of other methods. All have ``found_by``
    and ``iteration_ms``; ranked plans also have the 90 % interval ``low_ms`` to ``high_ms``, and
    ``hbm_bytes`` of the fullest rank.

    Args:
        model: a model file, or the unsharded module that is trained. A module needs ``batch_size``
            and is captured as by `shardopt.torchrec.to_yaml`.
        gpus: number of ranks.
        stats: files of ``shardopt stats`` with pooling factors and index distributions; several
            files are windows of data.
        capture: further arguments of `to_yaml` for a module, such as ``dense_optimizer``,
            ``dense_data_type``, ``example_inputs``, ``train_pipeline`` or ``constraints``.
        cache: keep the answer in the user's cache, and reuse it for the same input.
        options: options of ``shardopt plan`` by name, such as ``hardware``, ``cluster``,
            ``batch_size``, ``effort``, ``time_limit`` (s), ``top_k`` and ``objective``.

    Raises:
        InputError: an argument cannot be used; the message says what is allowed.
        InfeasibleError: no plan fits.
    """
    given = _checked({"gpus": gpus, **options}, PlanRequest)
    files = [stats] if isinstance(stats, str | PathLike) else list(stats)
    with TemporaryDirectory() as folder:
        path = _model_file(model, Path(folder), files, options.get("batch_size"), capture)
        windows = files if isinstance(model, str | PathLike) or len(files) > 1 else []
        request = PlanRequest(
            **{**given, "model": path},
            stats=",".join(map(str, windows)) or None,
        )
        result_cache = ResultCache.of_user() if cache else None
        planned = answer.plan(request, cache=result_cache)
    if not isinstance(model, str | PathLike):
        # the temporary model file is gone, so the plan cannot be reproduced from it
        made_by = planned.head[MADE]
        settings = {name: value for name, value in made_by["settings"].items() if name != "model"}
        planned = replace(planned, head={**planned.head, MADE: {**made_by, "settings": settings}})
    document = planned.document()
    rows = [_row("found_by", found.found_by, found) for found in document.plans]
    rows += [{"found_by": name, "iteration_ms": ms} for name, ms in document.baselines.items()]
    best = GivenPlan.of(
        document.best.sharding_plan,
        document.best.prediction,
        plan="the best plan",
        # with a plan in use the bound holds only for plans near it
        bound_ms=None if document.from_ is not None else document.lower_bound_ms or None,
        constraints=document,
    )
    return Planned(
        document,
        [{**dict.fromkeys(rows[0]), **row} for row in rows],
        lambda: explain_plans(planned.setting, [best]),
        planned,
    )


def predict(
    model: Model,
    plans: FilePath | ShardingPlan | Planned | Sequence[FilePath | ShardingPlan],
    gpus: int | None = None,
    *,
    stats: FilePath | None = None,
    capture: dict[str, Any] | None = None,
    **options: Any,
) -> Answered:
    """Predict the iteration time of one plan or several.

    The answer has a row for each plan, in the order given: ``plan``, ``iteration_ms``, the 90 %
    interval ``low_ms`` to ``high_ms``, and ``hbm_bytes`` of the fullest rank.

    Args:
        model, gpus, stats, capture: as in `plan`.
        plans: plan files, loaded plans, or results of `plan` or `from_torchrec`.
        options: ``hardware``, ``cluster``, ``batch_size`` and others, as in `plan`; by default
            ranks and hardware are those of the first plan.

    Raises:
        InputError: a plan does not fit the model or the machine.
    """
    given = _checked({"gpus": gpus, **options}, Machine)
    several: Sequence[Any] = plans if isinstance(plans, list | tuple) else [plans]
    inputs = [_given_plan(item) for item in several]
    with TemporaryDirectory() as folder:
        files = [] if stats is None else [stats]
        path = _model_file(model, Path(folder), files, options.get("batch_size"), capture)
        machine = Machine(**given)
        document = predict_plans(
            path,
            inputs,
            machine,
            stats=[Path(file) for file in files] if isinstance(model, str | PathLike) else [],
        )
    plans_given = document.predictions
    return Answered(
        document,
        [_row("plan", item.plan, item) for item in plans_given],
        lambda: explain_plans(document.setting, plans_given),
    )


def explain(
    model: Model,
    plans: FilePath | ShardingPlan | Planned | Sequence[FilePath | ShardingPlan],
    gpus: int | None = None,
    **options: Any,
) -> Answered:
    """Explain where the time of a plan goes and what would help; compare further plans with it.

    The rows of the answer, ``change`` and ``iteration_ms``, are the plan ``as it is``, then changes
    that would affect its time. Arguments and errors are those of `predict`.
    """
    document = predict(model, plans, gpus, **options).explained()
    changes = [("as it is", document.iteration_ms)]
    changes += [(change.change, change.iteration_ms) for change in document.changes.found]
    changes += [(change.change, change.iteration_ms) for change in document.sensitivity]
    rows = [{"change": words, "iteration_ms": ms} for words, ms in changes]
    return Answered(document, rows, lambda: document)


def _given_plan(plan: Any) -> ShardingPlan | Path:
    """Return a plan that `predict` was given, or the path of its file."""
    if isinstance(plan, Planned):
        return plan.plan
    if isinstance(plan, ShardingPlan):
        return plan
    if isinstance(plan, str | PathLike):
        return Path(plan)
    raise InputError(
        f"a plan is given as a {type(plan).__name__}; give a plan file, a result of plan or "
        "load_plan, or convert a plan of TorchRec with shardopt.from_torchrec(plan, module)"
    )


def _row(key: str, name: str, plan: PredictedPlan) -> dict[str, Any]:
    low, high = plan.interval_ms
    used = max(rank.hbm_bytes for rank in plan.memory)
    times = {"iteration_ms": plan.iteration_ms, "low_ms": low, "high_ms": high}
    return {key: name, **times, "hbm_bytes": used}


def _checked(options: dict[str, Any], kind: type[Machine]) -> dict[str, Any]:
    """Return options by name with the types that a request has.

    Raises:
        InputError: there is no such option, or its value is of another type.
    """
    hints = get_type_hints(kind)
    allowed = set(hints) - {"model", "stats"}
    checked = {}
    for name, value in options.items():
        if name not in allowed:
            raise InputError(
                f"there is no option {name}{did_you_mean(name, allowed)}; options are "
                f"{', '.join(sorted(allowed))}"
            )
        plain = value.item() if isinstance(value, np.generic) else value
        plain = fspath(plain) if isinstance(plain, PathLike) else plain
        option = TypeAdapter(hints[name], config=ConfigDict(coerce_numbers_to_str=True))
        try:
            checked[name] = option.validate_python(plain)
        except ValidationError as error:
            why = error.errors()[0]["msg"].lower()
            raise InputError(f"{name} is {value!r}; {why}", inputs=(name,)) from None
    return checked


def _model_file(
    model: Model,
    folder: Path,
    stats: Sequence[FilePath],
    batch_size: int | None,
    capture: dict[str, Any] | None,
) -> Path:
    """The model file, or one that is written of a module."""
    if isinstance(model, str | PathLike):
        if capture:
            raise InputError(
                f"capture is for a module; {model} says {', '.join(capture)} itself: change the "
                "file, or give the module"
            )
        return Path(model)
    if batch_size is None:
        raise InputError("a module does not say its batch size; give batch_size, samples per rank")
    from shardopt.torchrec.model_file import to_yaml

    path = folder / f"{type(model).__name__}.yaml"
    first = stats[0] if stats else None
    to_yaml(model, path, batch_size=batch_size, stats=first, **(capture or {}))
    return path
