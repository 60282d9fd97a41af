"""What must hold between the sections of a model file, beyond each section by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from predictor.document import KeyPath, Problems
from predictor.model.captured.dense import CapturedDense
from predictor.model.measured_dense import MeasuredDense
from predictor.model.workload import DenseArch, Table
from shardopt.config.ops_file import other_model

IndexedTables = Sequence[tuple[int, Table]]


def check_consistency(
    raw_tables: Sequence[Any],
    tables: IndexedTables,
    dense: DenseArch | CapturedDense | MeasuredDense | None,
    problems: Problems,
) -> None:
    """Record what does not fit together.

    Args:
        raw_tables: all tables as written; names are compared even where the rest has problems.
        tables: the good ones with their place in the list.
        dense: the dense part, None if it has problems.
        problems: where errors and notes go.
    """
    _unique("table", _table_names(raw_tables), problems)
    _unique("feature", _feature_names(raw_tables), problems)
    if isinstance(dense, DenseArch) and dense.interaction == "dot":
        _one_dim(tables, dense, problems)
    if isinstance(dense, CapturedDense):
        _same_model(tables, dense, problems)
    for index, table in tables:
        if table.weighted and not table.is_pooled:
            problems.add(
                ("tables", index, "weighted"),
                "got True with pooling none; per-sample weights need pooling sum or mean",
            )
        for at, feature in enumerate(table.features):
            if feature.position_weights and not table.weighted:
                problems.add(
                    ("tables", index, "features", at, "position_weights"),
                    f"got {feature.position_weights}, but the table is not weighted; a feature "
                    "processor needs weighted: true for all tables of its module",
                )
        if table.index_dedup and table.is_pooled:
            problems.add(
                ("tables", index, "index_dedup"),
                f"got True with pooling {table.pooling}; TorchRec deduplicates the ids of "
                "EmbeddingCollections only, tables with pooling none",
            )
    _note_mixed_modules(tables, problems)
    found = variable_batches([table for _, table in tables])
    problems.notes.extend(f"{problems.file}: {what}" for what in found)


def variable_batches(tables: Sequence[Table]) -> list[str]:
    """What is not priced of features with a batch of their own (VBE), in a sentence; none if there
    are none."""
    names = [f.name for t in tables for f in t.features if f.num_poolings != 1]
    if not names:
        return []
    return [
        f"variable batches of {', '.join(names)} (num_poolings) are priced by their ids, bags and "
        "outputs; what TorchRec adds, the exchange of strides and the outputs put back in the "
        "order of the samples, is not"
    ]


def _table_names(raw_tables: Sequence[Any]) -> Iterator[tuple[KeyPath, str, str]]:
    for i, raw in enumerate(raw_tables):
        if isinstance(raw, dict) and isinstance(raw.get("name"), str):
            yield ("tables", i, "name"), str(raw.get("module") or "ebc"), raw["name"]


def _feature_names(raw_tables: Sequence[Any]) -> Iterator[tuple[KeyPath, str, str]]:
    for i, raw in enumerate(raw_tables):
        features = raw.get("features") if isinstance(raw, dict) else None
        for j, feature in enumerate(features if isinstance(features, list) else []):
            if isinstance(feature, dict) and isinstance(feature.get("name"), str):
                module = str(raw.get("module") or "ebc")
                yield ("tables", i, "features", j, "name"), module, feature["name"]


def _unique(what: str, names: Iterator[tuple[KeyPath, str, str]], problems: Problems) -> None:
    first: dict[tuple[str, str], KeyPath] = {}
    for path, module, name in names:
        if (module, name) not in first:
            first[module, name] = path
            continue
        problems.add(
            path,
            f"duplicate {what} '{name}' in module '{module}', first at "
            f"{problems.place(first[module, name])}; rename one or put it into another module",
        )


def _one_dim(tables: IndexedTables, dense: DenseArch, problems: Problems) -> None:
    """``dot`` takes the product of every pair of vectors, so all have one width."""
    if not tables:
        return
    width = dense.bottom_mlp[-1]
    dims = list(dict.fromkeys(table.embedding_dim for _, table in tables))
    if len(dims) > 1:
        odd = next(table for _, table in tables if table.embedding_dim != dims[0])
        problems.add(
            ("dense", "interaction"),
            f"dot needs one embedding_dim for all tables, but '{tables[0][1].name}' has {dims[0]} "
            f"and '{odd.name}' has {odd.embedding_dim}; make them equal or use concat",
        )
    elif width != dims[0]:
        problems.add(
            ("dense", "bottom_mlp"),
            f"the last width is {width}, but interaction dot needs the tables' embedding_dim, "
            f"{dims[0]} ('{tables[0][1].name}'); make them equal or use concat",
        )


def _same_model(tables: IndexedTables, dense: CapturedDense, problems: Problems) -> None:
    features: dict[str, list[str]] = {}
    for _, table in tables:
        features.setdefault(table.module, []).extend(f.name for f in table.features)
    difference = other_model(dense.captured, features)
    if difference:
        problems.add(
            ("dense", "ops"), f"{dense.file}: {difference}; run to_yaml on this model's module"
        )
    problems.notes.extend(
        f"{problems.file}: feature '{feature.name}' has {feature.lookups_per_sample:g} ids a "
        f"sample, but {dense.file} is of {there:g}, from which its tensors cannot be scaled: the "
        "dense part is priced as captured; run to_yaml with the new pooling factor"
        for _, table in tables
        if not table.is_pooled
        for feature in table.features
        if (there := dense.captured.tied_ids.get(feature.name, feature.lookups_per_sample))
        != feature.lookups_per_sample
    )


def _note_mixed_modules(tables: IndexedTables, problems: Problems) -> None:
    """TorchRec pools, or weights, all tables of a module or none."""
    kinds: dict[str, set[tuple[bool, ...]]] = {}
    for _, table in tables:
        kind = table.is_pooled, table.weighted, table.index_dedup
        kinds.setdefault(table.module, set()).add(kind)
    for module, found in kinds.items():
        if len(found) > 1:
            problems.notes.append(
                f"{problems.file}: module '{module}' mixes tables with and without pooling, "
                "weights or index_dedup, which TorchRec keeps in modules of their own; "
                "give each kind a 'module'"
            )
