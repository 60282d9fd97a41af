"""Windows of data: the same model with the index statistics of several days or hours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from predictor.errors import InputError, did_you_mean
from predictor.model.distribution import EmpiricalByRange
from predictor.model.workload import Feature, Workload
from shardopt.config.distributions import read_stats


def window_names(files: Sequence[str | Path]) -> list[str]:
    """Names of windows: those of their files, without folders where these differ."""
    stems = [Path(file).stem for file in files]
    return stems if len({*stems}) == len(stems) else [str(file) for file in files]


def workloads_of_stats(workload: Workload, files: Sequence[Path]) -> dict[str, Workload]:
    """The workload with the pooling factors and index distributions of each stats file.

    Args:
        files: as `shardopt stats` writes them, two or more; all have the same features.

    Raises:
        InputError: there are fewer than two, one cannot be read, has no feature of the model, or
            has other features or another table than the others.
    """
    if len(files) < 2:
        raise InputError(
            f"{files[0] if files else 'nothing'} is one window; give two or more stats files, or "
            "name one in the model file",
            inputs=("stats",),
        )
    names = window_names(files)
    if len({*names}) < len(names):
        raise InputError(f"{', '.join(names)}: a window is given twice", inputs=("stats",))
    measured = [read_stats(file) for file in files]
    known = {f.name for table in workload.tables for f in table.features}
    inside = [known & {*found} for found in measured]
    for file, mine in zip(files, inside, strict=True):
        _check_features(file, mine, files[0], inside[0], known)
    found = {
        name: _with_stats(workload, of_window)
        for name, of_window in zip(names, measured, strict=True)
    }
    check_windows(found)
    return found


def _check_features(
    file: Path, mine: set[str], first: Path, others: set[str], known: set[str]
) -> None:
    if not mine:
        raise InputError(
            f"{file} has none of the model's features ({', '.join(sorted(known)[:10])}); "
            "give statistics of this model's data",
            inputs=("stats",),
        )
    if mine != others:
        name = min(mine ^ others)
        one, other = (file, first) if name in mine else (first, file)
        hint = did_you_mean(name, sorted(mine & others))
        raise InputError(
            f"{other} has no feature '{name}', which {one} has{hint}; windows are of the same "
            "features",
            inputs=("stats",),
        )


def _with_stats(workload: Workload, measured: Mapping[str, Feature]) -> Workload:
    def known(feature: Feature) -> Feature:
        found = measured.get(feature.name)
        if found is None:
            return feature
        return replace(
            feature,
            pooling_factor=found.pooling_factor,
            pooling_factor_std=found.pooling_factor_std,
            distribution=found.distribution,
        )

    tables = (replace(t, features=tuple(map(known, t.features))) for t in workload.tables)
    return replace(workload, tables=tuple(tables))


def move_pooling(workload: Workload, base: Workload, first: Workload, window: Workload) -> Workload:
    """A workload with the pooling factors of ``base``, moved as much as from one window to another.

    Args:
        workload, base: of the same tables.
        first, window: with the features by which they move; others stay.
    """
    before, now = (
        {f.name: f.pooling_factor for table in of.tables for f in table.features}
        for of in (first, window)
    )

    def moved(feature: Feature, own: Feature) -> Feature:
        by = now[feature.name] / before[feature.name] if feature.name in before else 1.0
        return replace(feature, pooling_factor=own.pooling_factor * by)

    tables = (
        replace(table, features=tuple(map(moved, table.features, own.features)))
        for table, own in zip(workload.tables, base.tables, strict=True)
    )
    return replace(workload, tables=tuple(tables))


def check_windows(windows: Mapping[str, Workload]) -> None:
    """Refuse windows of larger tables than the model has.

    Raises:
        InputError: names window, feature and table.
    """
    for name, workload in windows.items():
        for table in workload.tables:
            for feature in table.features:
                found = feature.distribution
                rows = found.table_rows if isinstance(found, EmpiricalByRange) else 0
                if rows > table.num_embeddings:
                    raise InputError(
                        f"window {name}: feature '{feature.name}' was measured on a table of "
                        f"{rows:,} rows, but '{table.name}' has {table.num_embeddings:,}; windows "
                        "are of the model's own tables",
                        inputs=("stats",),
                    )
