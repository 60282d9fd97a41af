"""What is called from Python: `plan`, `predict` and `explain`, from a model file or a module to an
answer that a notebook shows. The same work as the commands of these names, by the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from predictor.errors import InputError, did_you_mean
from predictor.model.plan import ShardingPlan
from shardopt.api import answer, given_plans
from shardopt.api.cache import ResultCache, versions
from shardopt.api.request import MADE, Machine, PlanRequest
from shardopt.api.setting import Setting
from shardopt.explain.explanation import Explanation, PredictedPlan, explain_plan
from shardopt.extras import require_packages
from shardopt.files import atomic_write_text
from shardopt.plan import LoadedPlan
from shardopt.report.explain import explain_object
from shardopt.report.html.nodes import node, text_of
from shardopt.report.html.page import page
from shardopt.report.objects import plan_object, predict_object

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    Model: TypeAlias = str | PathLike[str] | nn.Module

FilePath = str | PathLike[str]
Rows = list[dict[str, Any]]


class _Shown:
    """What an answer can be turned into.

    Attributes:
        rows: the lines of its table.
        iteration_ms: of the first plan.
    """

    setting: Setting
    rows: Rows

    @property
    def iteration_ms(self) -> float:
        """Predicted time of an iteration of the first plan, in ms."""
        return float(self.rows[0]["iteration_ms"])

    def to_frame(self) -> pd.DataFrame:
        """`rows` as a pandas DataFrame.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        require_packages("pandas")
        import pandas as pd

        return pd.DataFrame(self.rows)

    def _explained(self) -> Explanation:
        raise NotImplementedError

    def to_html(self) -> str:
        """The page that ``shardopt explain --html`` writes: one file, without a network."""
        return page(self.setting, self._explained(), versions())

    def _repr_html_(self) -> str:
        """`rows`, as Jupyter shows them."""
        head = node("tr", *(node("th", name) for name in self.rows[0]))
        lines = (node("tr", *(node("td", _shown(v)) for v in row.values())) for row in self.rows)
        return text_of(node("table", head, *lines))


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)


@dataclass(frozen=True, repr=False)
class Planned(_Shown):
    """The plans that a search found.

    Args:
        answer: all that there is to say of them.
        rows: the ranking, and TorchRec's plan: ``found_by``, ``iteration_ms``, and for those that
            were found ``low_ms`` and ``high_ms`` (90 %) and ``hbm_bytes`` of the fullest rank.
    """

    answer: answer.Answer
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        found = self.answer
        pairs = zip(found.result.plans, found.predictions, strict=True)
        rows = [_row("found_by", ranked.found_by, prediction) for ranked, prediction in pairs]
        rows += [
            {"found_by": name, "iteration_ms": ms} for name, ms in found.result.baselines.items()
        ]
        object.__setattr__(self, "rows", [{**dict.fromkeys(rows[0]), **row} for row in rows])

    @property
    def setting(self) -> Setting:  # type: ignore[override]
        """The model on the machine."""
        return self.answer.setting

    @property
    def plan(self) -> LoadedPlan:
        """The best plan; ``.to_torchrec(module)`` gives TorchRec's."""
        best = self.answer.result.best.plan
        return LoadedPlan(
            best.tables, best.world_size, best.local_world_size, dict(self.answer.head)
        )

    def save(self, path: FilePath) -> None:
        """Write the best plan as ``shardopt plan -o`` does."""
        atomic_write_text(Path(path), self.answer.plan_text())

    def to_dict(self) -> dict[str, Any]:
        """What ``shardopt plan --json`` prints."""
        return plan_object(self.answer)

    def _explained(self) -> Explanation:
        best = PredictedPlan("the best plan", self.answer.result.best.plan, self.answer.best)
        return explain_plan(self.setting.problem(), [best])


@dataclass(frozen=True, repr=False)
class Predicted(_Shown):
    """Predictions of given plans, in the order given.

    Args:
        rows: a plan each: ``plan``, ``iteration_ms``, ``low_ms`` and ``high_ms`` (90 %) and
            ``hbm_bytes`` of the fullest rank.
    """

    setting: Setting
    plans: Sequence[PredictedPlan]

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        return [_row("plan", given.name, given.prediction) for given in self.plans]

    def to_dict(self) -> dict[str, Any]:
        """What ``shardopt predict --json`` prints."""
        pairs = [(given.name, given.prediction) for given in self.plans]
        return predict_object(pairs, self.setting.facts())

    def _explained(self) -> Explanation:
        return explain_plan(self.setting.problem(), self.plans)


@dataclass(frozen=True, repr=False)
class Explained(_Shown):
    """Where the time of a plan goes, and what would help.

    Args:
        rows: the plan as it is (``change`` is empty), then what would change its time: ``change``,
            ``iteration_ms``.
    """

    setting: Setting
    explanation: Explanation

    @property
    def rows(self) -> Rows:  # type: ignore[override]
        found = self.explanation
        changes = [(one.words, one.iteration_ms) for one in found.changes.found]
        changes += [(one.change, one.iteration_ms) for one in found.what_if]
        given = [("", found.given.prediction.iteration_ms), *changes]
        return [{"change": words, "iteration_ms": ms} for words, ms in given]

    def to_dict(self) -> dict[str, Any]:
        """What ``shardopt explain --json`` prints."""
        return explain_object(self.explanation, self.setting.facts())

    def _explained(self) -> Explanation:
        return self.explanation


def plan(
    model: Model,
    gpus: int | None = None,
    *,
    stats: FilePath | Sequence[FilePath] = (),
    capture: dict[str, Any] | None = None,
    cache: bool = True,
    **options: Any,
) -> Planned:
    """The sharding plan with the shortest predicted iteration.

    Args:
        model: a model file, or the module that is trained, unsharded; then ``batch_size`` is
            needed, and the module is captured as by `shardopt.torchrec.to_yaml`.
        gpus: number of ranks.
        stats: files of ``shardopt stats``, whose pooling factors and index distributions count;
            several are windows of data.
        capture: further arguments of `to_yaml` for a module, such as ``dense_optimizer``,
            ``dense_data_type``, ``example_inputs``, ``train_pipeline`` or ``constraints``.
        cache: take the answer to the same input from the user's cache, and keep it there.
        options: those of ``shardopt plan`` by their names, such as ``hardware``, ``cluster``,
            ``batch_size``, ``effort``, ``time_limit`` (s), ``top_k`` and ``objective``.

    Raises:
        InputError: something given cannot be used; says what is allowed.
        InfeasibleError: no plan fits.
    """
    _known(options, PlanRequest)
    files = [stats] if isinstance(stats, str | PathLike) else list(stats)
    with TemporaryDirectory() as folder:
        path = _model_file(model, Path(folder), files, options.get("batch_size"), capture)
        windows = files if isinstance(model, str | PathLike) or len(files) > 1 else []
        request = PlanRequest(
            **{**_as_paths(options), "model": path, "gpus": gpus},
            stats=",".join(map(str, windows)) or None,
        )
        kept = ResultCache.of_user() if cache else None
        found = answer.plan(request, cache=kept)
    if isinstance(model, str | PathLike):
        return Planned(found)
    # the file that was written of the module is gone, so nobody can plan from it again
    made = found.head[MADE]
    settings = {name: value for name, value in made["settings"].items() if name != "model"}
    return Planned(replace(found, head={**found.head, MADE: {**made, "settings": settings}}))


def predict(
    model: Model,
    plans: FilePath | ShardingPlan | Planned | Sequence[FilePath | ShardingPlan],
    gpus: int | None = None,
    *,
    stats: FilePath | None = None,
    capture: dict[str, Any] | None = None,
    **options: Any,
) -> Predicted:
    """The predicted iteration of one plan or several.

    Args:
        model, gpus, stats, capture: as in `plan`.
        plans: plan files, loaded plans, what `plan` gave, or what `from_torchrec` made.
        options: ``hardware``, ``cluster``, ``batch_size`` and the like, as in `plan`; ranks and
            hardware are those of the first plan unless they say otherwise.

    Raises:
        InputError: a plan does not fit the model or the machine.
    """
    _known(options, Machine)
    several: Sequence[Any] = plans if isinstance(plans, list | tuple) else [plans]
    given = [one.plan if isinstance(one, Planned) else one for one in several]
    with TemporaryDirectory() as folder:
        files = [] if stats is None else [stats]
        path = _model_file(model, Path(folder), files, options.get("batch_size"), capture)
        machine = Machine(**{**_as_paths(options), "gpus": gpus})
        found = given_plans.predict_plans(
            path,
            [one if isinstance(one, ShardingPlan) else Path(one) for one in given],
            machine,
            stats=[Path(file) for file in files] if isinstance(model, str | PathLike) else [],
        )
    return Predicted(*found)


def explain(
    model: Model,
    plans: FilePath | ShardingPlan | Planned | Sequence[FilePath | ShardingPlan],
    gpus: int | None = None,
    **options: Any,
) -> Explained:
    """Where the time of a plan goes and what would help; further plans are compared with it.

    Arguments and errors are those of `predict`.
    """
    found = predict(model, plans, gpus, **options)
    return Explained(found.setting, found._explained())


def _row(key: str, name: str, prediction: Any) -> dict[str, Any]:
    low, high = prediction.interval_ms
    used = max(rank.hbm_bytes for rank in prediction.memory)
    times = {"iteration_ms": prediction.iteration_ms, "low_ms": low, "high_ms": high}
    return {key: name, **times, "hbm_bytes": used}


def _known(options: dict[str, Any], kind: type[Machine]) -> None:
    allowed = set(kind.__dataclass_fields__) - {"model", "gpus", "stats"}
    for name in options:
        if name not in allowed:
            raise InputError(
                f"there is no option {name}{did_you_mean(name, allowed)}; options are "
                f"{', '.join(sorted(allowed))}"
            )


def _as_paths(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: Path(value) if name in ("cluster", "from_") and value is not None else value
        for name, value in options.items()
    }


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
