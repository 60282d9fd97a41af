"""model.yaml -> Workload: every problem of the file in one message."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from predictor.document import KeyPath, Problems, parse_yaml, shown
from predictor.errors import InputError
from predictor.model.captured import CapturedDense
from predictor.model.distribution import Distribution, Uniform
from predictor.model.plan import STORED
from predictor.model.plan_json import SCHEMA as PLAN_SCHEMA
from predictor.model.workload import (
    INTEGERS,
    Constraints,
    Dense,
    DenseArch,
    EmbeddingOptimizer,
    Feature,
    MeasuredDense,
    Optimizer,
    Table,
    Workload,
    dense_form,
)
from predictor.section import Count, Name, SchemaVersion, check
from shardopt.config.distributions import (
    DistributionReader,
    check_windows,
    names_files,
    window_names,
)
from shardopt.config.ops_file import other_model, read_ops
from shardopt.config.tables_csv import CsvFile, read_tables_csv
from shardopt.files import decode, read_bytes, refuse_streams
from shardopt.formatting import listed


@dataclass(frozen=True, kw_only=True)
class ModelFile(Workload):
    """The file itself."""

    schema_: SchemaVersion
    """The version of this file format: 'schema: 1'."""
    name: Name = ""
    """Name of the model; that of the file unless given."""
    batch_size: Count | None = None  # type: ignore[assignment]
    """Samples per rank and iteration; must be given here or with the command, which overrides
    it."""
    optimizer: EmbeddingOptimizer = Optimizer.ROWWISE_ADAGRAD
    """Optimizer of every sharded table that names no other; data-parallel tables are stepped by the
    dense optimizer."""

    def __post_init__(self) -> None:
        """Leave names to `_check_names`, which knows their lines."""

    def workload(self, **changes: Any) -> Workload:
        """Return the workload, with what the file itself does not hold."""
        values = {f.name: getattr(self, f.name) for f in fields(Workload)}
        return Workload(**{**values, **changes})


def load_model(path: str | Path, *, batch_size: int | None = None) -> Workload:
    """Load the workload that a model file describes; see `read_model`."""
    return read_model(path, batch_size=batch_size)[0]


def read_model(
    path: str | Path, *, batch_size: int | None = None
) -> tuple[Workload, list[str], dict[str, Workload]]:
    """The workload that a model file describes, notes for its user, and its windows of data.

    Args:
        path: a model.yaml, schema 1. Files that it names (a CSV of tables, .npz statistics) are
            relative to it.
        batch_size: samples per rank per iteration, >= 1; overrides the file.

    Returns:
        The workload, whose ``sha256`` is the hex digest of the file's bytes followed by those of
        the ops file and the CSV if there are such; notes for the console, such as that features
        without ``index_distribution`` count as uniform; and the workloads of the windows whose
        stats files are named as ``files``, in their order, empty where none are. The first is the
        workload itself. Pooling factors change from window to window as the stats files say.

    Raises:
        InputError: a file cannot be read or used, or a window is of other features or tables. The
            message has a line for every problem, each with file, line, key, what was given and what
            is allowed.
    """
    content = read_bytes(path, "model file")
    problems = Problems(str(path))
    raw = parse_yaml(decode(content, path), problems)
    if not isinstance(raw, dict):
        raise InputError(
            f"{path}:1: got {shown(raw)}; a model file is a mapping that starts with 'schema: 1'"
        )
    if raw.get("schema") == PLAN_SCHEMA:
        raise InputError(f"{path}: is a plan, not a model file; give the model first, then plans")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch size is {batch_size}; it must be at least 1 per rank")
    directory = Path(path).parent
    dense: Dense | None = None
    ops = csv = b""
    if raw.get("dense") is not None:
        dense, ops = read_dense(raw["dense"], directory, problems)
    if isinstance(raw.get("tables"), dict):
        section = check(CsvFile, raw["tables"], ("tables",), problems)
        tables, csv = read_tables_csv(directory / section.csv, problems) if section else ([], b"")
        raw = {**raw, "tables": tables}
    elif raw.get("tables") == []:
        problems.add(("tables",), "the list is empty; give at least one table")
    sha256 = hashlib.sha256(content + ops + csv).hexdigest()
    reader = _Reader(raw, batch_size, directory, dense, sha256, problems)
    workload = reader.workload(0)
    notes = list(problems.notes)
    names = window_names(reader.distributions.windows)
    windows = {n: reader.workload(i) if i else workload for i, n in enumerate(names)}
    check_windows(windows)
    return workload, notes, windows


class _Reader:
    """Makes workloads of one file.

    Args:
        raw: the file, its tables as a list.
        dense: None if it has problems.
        sha256: of all files.

    Raises:
        InputError: every problem of the file.
    """

    def __init__(
        self,
        raw: dict[str, Any],
        batch_size: int | None,
        directory: Path,
        dense: Dense | None,
        sha256: str,
        problems: Problems,
    ) -> None:
        self.sha256, self.problems = sha256, problems
        self.distributions = DistributionReader(directory, problems)
        tables = raw.get("tables")
        tables = tables if isinstance(tables, list) else []
        features = list(_features(tables))
        self.measured = {
            path: feature
            for path, _, feature in features
            if names_files(feature.get("index_distribution"))
        }
        if batch_size is None and raw.get("batch_size") is None:
            advice = "missing; give the samples per rank and iteration"
            problems.add(("batch_size",), advice, inputs=("batch_size",))
        loaded: dict[str, Any] = {}
        if raw.get("dense") is not None:
            loaded["dense"] = dense or _UNREAD
        if self.measured:
            loaded["tables"] = [_without_files(table) for table in tables]
        file = check(ModelFile, raw | loaded, (), problems)
        _check_names(tables, problems)
        self.distribution_of = self._distributions(0)
        if file is not None:
            named = [isinstance(t, dict) and t.get("optimizer") is not None for t in tables]
            own = zip(file.tables, named, strict=True)
            resolved = (t if has else replace(t, optimizer=file.optimizer) for t, has in own)
            file = replace(file, tables=tuple(resolved))
            check_consistency(file.tables, dense, problems)
            _check_mode(file, problems)
        left_out = sum(raw.get("index_distribution") is None for _, _, raw in features)
        if left_out:
            problems.notes.append(
                f"{problems.file}: index_distribution is missing for {left_out} of {len(features)} "
                "features, which count as uniform; real ids are skewed, which makes lookups faster"
            )
        batch = batch_size or (file.batch_size if file else None)
        if isinstance(dense, MeasuredDense) and batch and batch != dense.measured.batch_size:
            problems.notes.append(
                f"{problems.file}: the dense part was measured at a batch of "
                f"{dense.measured.batch_size}; at {batch} its times are scaled in proportion, "
                "which is an extrapolation"
            )
        problems.raise_if_any()
        assert file is not None
        assert batch is not None
        self.file, self.batch = file, batch

    def _distributions(self, window: int) -> dict[KeyPath, Distribution]:
        """Read index distributions that lie in files, by the path of their features."""
        self.distributions.window = window
        return {
            path: self.distributions.read(
                raw["index_distribution"], (*path, "index_distribution"), str(raw.get("name"))
            )
            for path, raw in self.measured.items()
        }

    def workload(self, window: int) -> Workload:
        """Return the workload of a window; ask for the first window first.

        Raises:
            InputError: every problem of its stats files, or the ops are of another batch.
        """
        if window:
            self.distribution_of = self._distributions(window)
            self.problems.raise_if_any()
        tables = tuple(
            replace(
                table,
                features=tuple(
                    self._feature(feature, ("tables", i, "features", j))
                    for j, feature in enumerate(table.features)
                ),
            )
            if self.measured
            else table
            for i, table in enumerate(self.file.tables)
        )
        workload = self.file.workload(
            name=self.file.name or Path(self.problems.file).stem,
            batch_size=self.batch,
            tables=tables,
            sha256=self.sha256,
        )
        if isinstance(workload.dense, CapturedDense):
            # ops are made for the workload's batch once here, where their file can be named
            try:
                workload.dense.program(workload)
            except InputError as error:
                self.problems.add(("dense", "ops"), str(error), inputs=error.inputs)
                self.problems.raise_if_any()
        return workload

    def _feature(self, feature: Feature, path: KeyPath) -> Feature:
        """Return a feature with what a stats file says, where its own keys do not."""
        if path not in self.measured:
            return feature
        keys = self.measured[path]
        raw = keys["index_distribution"]
        mean = feature.pooling_factor * self.distributions.pooling_ratio(raw, feature.name)
        lengths = self.distributions.lengths(raw, feature.name, mean)
        return replace(
            feature,
            pooling_factor=mean,
            distribution=self.distribution_of[path],
            **{k: v for k, v in lengths.items() if keys.get(k) is None},  # type: ignore[arg-type]
        )


_UNREAD = DenseArch(1, (1,), (1,), "concat")
"""In place of a dense part with problems, which are told once."""


def _without_files(table: Any) -> Any:
    """Return a table whose features are uniform where stats files hold their distributions."""
    features = table.get("features") if isinstance(table, dict) else None
    if not isinstance(features, list):
        return table
    read = [
        {**f, "index_distribution": Uniform()}
        if isinstance(f, dict) and names_files(f.get("index_distribution"))
        else f
        for f in features
    ]
    return {**table, "features": read}


def _features(tables: Sequence[Any]) -> Iterator[tuple[KeyPath, str, dict[str, Any]]]:
    """Path, module and text of all features, whatever is wrong with their tables."""
    for i, table in enumerate(tables):
        features = table.get("features") if isinstance(table, dict) else None
        for j, feature in enumerate(features if isinstance(features, list) else []):
            if isinstance(feature, dict):
                yield ("tables", i, "features", j), str(table.get("module") or "ebc"), feature


def _check_names(tables: Sequence[Any], problems: Problems) -> None:
    """Names of tables are unique in their modules, those of features in their tables."""
    named: list[tuple[str, KeyPath, str, dict[str, Any]]] = [
        ("table", ("tables", i), str(table.get("module") or "ebc"), table)
        for i, table in enumerate(tables)
        if isinstance(table, dict)
    ]
    named += [("feature", *feature) for feature in _features(tables)]
    first: dict[tuple[object, ...], KeyPath] = {}
    for kind, path, module, raw in named:
        name, at = raw.get("name"), (*path, "name")
        # several tables may read one feature, but each of them once
        key = (kind, module, path[1] if kind == "feature" else None, name)
        if not isinstance(name, str) or first.setdefault(key, at) == at:
            continue
        problems.add(
            at,
            f"duplicate {kind} '{name}' in module '{module}', first at "
            f"{problems.place(first[key])}; rename one or put it into another "
            f"{'table' if kind == 'feature' else 'module'}",
        )


def read_dense(raw: object, directory: Path, problems: Problems) -> tuple[Dense | None, bytes]:
    """The dense part in the form that its keys show, None when it has problems; and the content
    of the file that it names.

    Args:
        directory: that of the model file.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("ops"), str):
        return check(dense_form(raw), raw, ("dense",), problems), b""
    file, optimizer = raw["ops"], raw.get("optimizer")
    try:
        refuse_streams(directory / file, "ops file")
        program, content = read_ops(directory / file)
    except InputError as error:
        problems.add(("dense", "ops"), str(error))
        return None, b""
    dense = check(CapturedDense, {**raw, "ops": program}, ("dense",), problems)
    if dense is not None and optimizer not in (None, program.optimizer_name):
        problems.add(
            ("dense", "optimizer"),
            f"got {shown(optimizer)}, but the ops in {file} are those of "
            f"{program.optimizer_name}; run to_yaml with dense_optimizer={optimizer!r}",
        )
    return dense and replace(dense, file=file), content


def check_consistency(tables: Sequence[Table], dense: Dense | None, problems: Problems) -> None:
    """Record what does not fit together; ``dense`` is None if it has problems."""
    if isinstance(dense, DenseArch) and dense.interaction == "dot":
        _one_dim(tables, dense, problems)
    if isinstance(dense, CapturedDense):
        _same_model(tables, dense, problems)
    for index, table in enumerate(tables):
        pooled = table.pooling != "none"
        if table.weighted and not pooled:
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
        if table.index_dedup and pooled:
            problems.add(
                ("tables", index, "index_dedup"),
                f"got True with pooling {table.pooling}; TorchRec deduplicates the ids of "
                "EmbeddingCollections only, tables with pooling none",
            )
    # TorchRec pools, or weights, all tables of a module or none
    kinds: dict[str, set[tuple[bool, ...]]] = {}
    for table in tables:
        kind = table.pooling == "none", table.weighted, table.index_dedup
        kinds.setdefault(table.module, set()).add(kind)
    problems.notes.extend(
        f"{problems.file}: module '{module}' mixes tables with and without pooling, weights or "
        "index_dedup, which TorchRec keeps in separate modules; give each kind its own 'module'"
        for module, rough in kinds.items()
        if len(rough) > 1
    )
    rough = variable_batches(tables) + rough_lookups(tables)
    problems.notes.extend(f"{problems.file}: {note}" for note in rough)


SERVED_PIPELINES = ("base", "sparse_dist")


def _check_mode(top: ModelFile, problems: Problems) -> None:
    """Record what only training has of a model for inference, and types of weights that the mode
    cannot have."""
    kinds = ((table.name, table.data_type, table.optimizer) for table in top.tables)
    notes = untaken_types(kinds, training=top.training)
    problems.notes.extend(f"{problems.file}: {note}" for note in notes)
    if top.training:
        return
    why = "with mode inference; leave it out, or set mode: training"
    if top.train_pipeline not in SERVED_PIPELINES:
        allowed = ", ".join(SERVED_PIPELINES)
        problems.add(
            ("train_pipeline",),
            f"got {top.train_pipeline} with mode inference; allowed there: {allowed}",
        )
    for key in ("replica_groups", "stash_optimizer_state"):
        if getattr(top, key):
            problems.add((key,), f"is set {why}")
    for index, table in enumerate(top.tables):
        path = ("tables", index)
        if table.storage != "torchrec":
            problems.add((*path, "storage"), f"got {table.storage} {why}")
        problems_of = [key for key in ("index_dedup", "stash_weights") if getattr(table, key)]
        for key in problems_of:
            problems.add((*path, key), f"got True {why}")


ADAGRAD = (Optimizer.ADAGRAD, Optimizer.ROWWISE_ADAGRAD)


def untaken_types(tables: Iterable[tuple[str, str, str]], *, training: bool = True) -> list[str]:
    """Types of weights that FBGEMM's lookups do not take, a sentence each.

    For training see ``_apply_cache_state`` and ``init_embedding_weights_uniform`` in fbgemm_gpu's
    split_table_batched_embeddings_ops_training.py, for inference `unpadded_row_size_in_bytes`.

    Args:
        tables: name, type of the weights and optimizer of each.
    """
    trained, served = "FBGEMM does not train", "FBGEMM's lookups for inference do not have"
    names: dict[tuple[str, str], list[str]] = {}
    for name, kind, optimizer in tables:
        why = ""
        if training and kind in INTEGERS:
            why = trained
        elif training and kind == "nfp8" and optimizer not in ADAGRAD:
            why = "FBGEMM trains with Adagrad alone"
        elif not training and kind in ("bf16", "nfp8"):
            why = served
        if why:
            names.setdefault((kind, why), []).append(f"'{name}'")
    return [
        f"{listed(found)} {'has' if len(found) == 1 else 'have'} {kind} weights, which {why}; "
        "they are priced by their bytes"
        for (kind, why), found in names.items()
    ]


def rough_lookups(tables: Sequence[Table]) -> list[str]:
    """Say how far the prices of dynamicemb and key-value tables can be trusted, a sentence each;
    nothing without them."""
    notes = []
    hashed = [f"'{table.name}'" for table in tables if table.storage == "dynamicemb"]
    if hashed:
        notes.append(
            f"lookups in dynamicemb ({listed(hashed)}) are priced with constants derived from "
            "public rows, good to a factor of 2; the cost of new rows and of admission is left out"
        )
    stored = [f"'{table.name}'" for table in tables if _may_be_stored(table.constraints)]
    if stored:
        notes.append(
            f"key-value tables ({listed(stored)}) are priced with TorchRec's bandwidth of an "
            "SSD and derived constants, good to a factor of 5; eviction by score or age, "
            "and the host time of the store, are left out"
        )
    return notes


def _may_be_stored(wants: Constraints) -> bool:
    offered = {kernel for _, kernel in wants.offered or ()}
    return not {*(wants.compute_kernels or ()), *offered}.isdisjoint(STORED)


def variable_batches(tables: Sequence[Table]) -> list[str]:
    """Say what is not priced of features with a batch of their own (VBE); nothing without them."""
    names = [f.name for t in tables for f in t.features if f.num_poolings != 1]
    if not names:
        return []
    return [
        f"variable batches of {listed(names)} (num_poolings) are priced by their ids, bags and "
        "outputs; the exchange of strides and the reordering of outputs to samples, which TorchRec "
        "adds, are left out"
    ]


def _one_dim(tables: Sequence[Table], dense: DenseArch, problems: Problems) -> None:
    """``dot`` takes the product of every pair of vectors, so all have one width."""
    if not tables:
        return
    width, first = dense.bottom_mlp[-1], tables[0]
    odd = next((table for table in tables if table.embedding_dim != first.embedding_dim), None)
    if odd is not None:
        problems.add(
            ("dense", "interaction"),
            f"dot needs one embedding_dim for all tables, but '{first.name}' has "
            f"{first.embedding_dim} and '{odd.name}' has {odd.embedding_dim}; make them equal or "
            "use concat",
        )
    elif width != first.embedding_dim:
        problems.add(
            ("dense", "bottom_mlp"),
            f"the last width is {width}, but interaction dot needs the tables' embedding_dim, "
            f"{first.embedding_dim} ('{first.name}'); make them equal or use concat",
        )


def _same_model(tables: Sequence[Table], dense: CapturedDense, problems: Problems) -> None:
    features: dict[str, list[str]] = {}
    for table in tables:
        features.setdefault(table.module, []).extend(f.name for f in table.features)
    difference = other_model(dense.captured, features)
    if difference:
        problems.add(
            ("dense", "ops"), f"{dense.file}: {difference}; run to_yaml on this model's module"
        )
    for feature in (f for table in tables if table.pooling == "none" for f in table.features):
        ids = feature.pooling_factor * feature.num_poolings
        there = dense.captured.tied_ids.get(feature.name, ids)
        if there != ids:
            problems.notes.append(
                f"{problems.file}: feature '{feature.name}' has {ids:g} ids per sample, but "
                f"{dense.file} was captured with {there:g}, and its tensors cannot be scaled: the "
                "dense part is priced as captured; run to_yaml with the new pooling factor"
            )
