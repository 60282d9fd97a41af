"""model.yaml -> Workload: every problem of the file in one message."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from predictor.document import KeyPath, Problems, parse_yaml, shown
from predictor.errors import InputError
from predictor.model.captured.dense import CapturedDense
from predictor.model.distribution import Empirical, EmpiricalByRange
from predictor.model.measured_dense import MeasuredDense
from predictor.model.plan import ShardingType
from predictor.model.plan_json import SCHEMA as PLAN_SCHEMA
from predictor.model.topology import ReplicaGroups
from predictor.model.workload import Constraints, Feature, QComm, Table, Workload
from shardopt.config.consistency import check_consistency
from shardopt.config.dense import Dense, read_dense
from shardopt.config.distributions import DistributionReader
from shardopt.config.schema import (
    ConstraintsSection,
    CsvSection,
    FeatureSection,
    ModelSection,
    QCommSection,
    ReplicaGroupsSection,
    TableSection,
    check,
)
from shardopt.config.tables_csv import read_tables_csv
from shardopt.config.windows import check_windows, window_names
from shardopt.files import decode, read_bytes


def load_model(path: str | Path, *, batch_size: int | None = None) -> Workload:
    """The workload that a model file describes; see `load_model_with_notes`."""
    return load_model_with_notes(path, batch_size=batch_size)[0]


def load_model_with_notes(
    path: str | Path, *, batch_size: int | None = None
) -> tuple[Workload, list[str]]:
    """The workload that a model file describes, and notes for its user.

    Args:
        path: a model.yaml, schema 1. Files that it names (a CSV of tables, .npz statistics) are
            relative to it.
        batch_size: samples per rank per iteration, >= 1; overrides the file.

    Returns:
        The workload, whose ``sha256`` is the hex digest of the file's bytes followed by those of
        the ops file and the CSV if there are such; and notes for the console, such as that
        features without ``index_distribution`` count as uniform.

    Raises:
        InputError: the file cannot be read or used. The message has a line for every problem, each
            with file, line, key, what was given and what is allowed.
    """
    content = read_bytes(path, "model file")
    problems = Problems(str(path))
    raw = parse_yaml(decode(content, path), problems)
    if not isinstance(raw, dict):
        raise InputError(
            f"{path}:1: got {shown(raw)}; a model file is a mapping that starts with 'schema: 1'"
        )
    if raw.get("schema") == PLAN_SCHEMA:
        raise InputError(f"{path}: is a plan, not a model file; the model comes first, then plans")
    reader = _Reader(Path(path).parent, problems)
    workload = reader.read(raw, content, batch_size)
    problems.raise_if_any()
    assert workload is not None
    return workload, problems.notes


def load_windows(path: str | Path, *, batch_size: int | None = None) -> dict[str, Workload]:
    """The workloads of the windows whose stats files a model file names as ``files``, in their
    order; the first is that of `load_model`. Empty where it names none.

    Pooling factors change from window to window as the stats files say.

    Raises:
        InputError: as `load_model`; or a window is of other features or tables.
    """
    problems = Problems(str(path))
    content = read_bytes(path, "model file")
    raw = parse_yaml(decode(content, path), problems)
    if not isinstance(raw, dict) or b"files" not in content:
        return {}
    found: dict[str, Workload] = {}
    names, window = [""], 0
    while window < len(names):
        reader = _Reader(Path(path).parent, problems)
        reader.distributions.window = window
        workload = reader.read(raw, content, batch_size)
        problems.raise_if_any()
        assert workload is not None
        if not reader.distributions.windows:
            return {}
        names = window_names(reader.distributions.windows)
        found[names[window]] = workload
        window += 1
    check_windows(found)
    return found


class _Reader:
    """Walks one file, section by section; a section with problems leaves None behind."""

    def __init__(self, directory: Path, problems: Problems) -> None:
        self.directory = directory
        self.problems = problems
        self.distributions = DistributionReader(directory, problems)
        self.optimizer = ""
        self.content = b""

    def read(self, raw: dict[str, Any], content: bytes, batch_size: int | None) -> Workload | None:
        """The workload, or None when something is wrong."""
        self.content = content
        top = check(ModelSection, raw, (), self.problems)
        if top is not None:
            self.optimizer = top.optimizer
        batch = self._batch_size(raw, top, batch_size)
        qcomm = self._qcomm(raw.get("qcomm"))
        groups = self._replica_groups(raw.get("replica_groups"))
        dense = self._dense(raw.get("dense"))
        raw_tables = self._raw_tables(raw.get("tables"))
        tables = [self._table(item, ("tables", i)) for i, item in enumerate(raw_tables)]
        good = [(i, table) for i, table in enumerate(tables) if table is not None]
        check_consistency(raw_tables, good, dense, self.problems)
        self._note_uniform()
        self._note_extrapolated(dense, batch)
        if top is None or batch is None or qcomm is None or dense is None:
            return None
        workload = (
            Workload(
                name=top.name or Path(self.problems.file).stem,
                batch_size=batch,
                tables=tuple(table for _, table in good),
                dense=dense,
                train_pipeline=top.train_pipeline,
                qcomm=qcomm,
                replica_groups=groups,
                sha256=hashlib.sha256(self.content).hexdigest(),
            )
            if len(good) == len(tables) and not self.problems.found
            else None
        )
        if workload is not None:
            self._check_sizes(workload)
        return workload

    def _check_sizes(self, workload: Workload) -> None:
        """Ops are made for the workload's batch once here, where their file can be named."""
        if isinstance(workload.dense, CapturedDense):
            try:
                workload.dense.program(workload)
            except InputError as error:
                self.problems.add(("dense", "ops"), str(error), inputs=error.inputs)

    def _dense(self, raw: object) -> Dense | None:
        if raw is None:
            return None
        dense, content = read_dense(raw, self.directory, self.problems)
        self.content += content
        return dense

    def _batch_size(
        self, raw: dict[str, Any], top: ModelSection | None, override: int | None
    ) -> int | None:
        if override is not None:
            if override < 1:
                raise InputError(f"batch size is {override}; it must be at least 1 per rank")
            return override
        if raw.get("batch_size") is None:
            self.problems.add(
                ("batch_size",),
                "missing; give the samples per rank and iteration",
                inputs=("batch_size",),
            )
        return top.batch_size if top else None

    def _qcomm(self, raw: object) -> QComm | None:
        section = check(QCommSection, {} if raw is None else raw, ("qcomm",), self.problems)
        return QComm(section.forward, section.backward) if section else None

    def _replica_groups(self, raw: object) -> ReplicaGroups | None:
        if raw is None:
            return None
        if isinstance(raw, dict) and "modules" in raw:
            self.problems.add(
                ("replica_groups", "modules"),
                "a group size of its own for a module (DMPCollectionConfig) is not modelled; give "
                "one size for the whole model",
            )
            return None
        section = check(ReplicaGroupsSection, raw, ("replica_groups",), self.problems)
        try:
            return ReplicaGroups(**section.model_dump()) if section else None
        except InputError as error:  # settings that exclude each other
            self.problems.add(("replica_groups",), str(error))
            return None

    def _raw_tables(self, raw: object) -> list[Any]:
        if isinstance(raw, dict):
            section = check(CsvSection, raw, ("tables",), self.problems)
            if section is None:
                return []
            rows, content = read_tables_csv(self.directory / section.csv, self.problems)
            self.content += content
            return rows
        if isinstance(raw, list):
            if not raw:
                self.problems.add(("tables",), "the list is empty; give at least one table")
            return raw
        if raw is not None:
            self.problems.add(
                ("tables",), f"got {shown(raw)}; it must be a list of tables or {{csv: tables.csv}}"
            )
        return []

    def _table(self, raw: Any, path: KeyPath) -> Table | None:
        section = check(TableSection, raw, path, self.problems)
        if not isinstance(raw, dict):
            return None
        features = self._features(raw.get("features"), (*path, "features"))
        constraints = self._constraints(raw.get("constraints"), (*path, "constraints"))
        if section is None or features is None or constraints is None:
            return None
        return Table(
            name=section.name,
            num_embeddings=section.num_embeddings,
            embedding_dim=section.embedding_dim,
            features=features,
            module=section.module,
            data_type=section.data_type,
            pooling=section.pooling,
            weighted=section.weighted,
            optimizer=section.optimizer or self.optimizer,
            constraints=constraints,
            index_dedup=section.index_dedup,
        )

    def _features(self, raw: object, path: KeyPath) -> tuple[Feature, ...] | None:
        if raw is None:
            return None
        if not isinstance(raw, list) or not raw:
            self.problems.add(path, f"got {shown(raw)}; it must be a list of at least one feature")
            return None
        features = [self._feature(item, (*path, i)) for i, item in enumerate(raw)]
        good = tuple(feature for feature in features if feature is not None)
        return good if len(good) == len(features) else None

    def _feature(self, raw: Any, path: KeyPath) -> Feature | None:
        section = check(FeatureSection, raw, path, self.problems)
        if not isinstance(raw, dict):
            return None
        given, name = raw.get("index_distribution"), str(raw.get("name"))
        distribution = self.distributions.read(given, (*path, "index_distribution"), name)
        ratio = self.distributions.pooling_ratio(given, name)
        if section is None:
            return None
        mean, deviation = section.pooling_factor * ratio, section.pooling_factor_std
        if deviation is None and isinstance(distribution, Empirical | EmpiricalByRange):
            deviation = self.distributions.deviation(given, name, mean)
        return Feature(
            section.name,
            mean,
            section.num_poolings,
            distribution,
            section.id_order,
            deviation,
            section.position_weights,
        )

    def _constraints(self, raw: object, path: KeyPath) -> Constraints | None:
        section = check(ConstraintsSection, {} if raw is None else raw, path, self.problems)
        if section is None:
            return None
        types, kernels, ranks = section.sharding_types, section.compute_kernels, section.ranks
        return Constraints(
            sharding_types=tuple(ShardingType(t) for t in types) if types else None,
            compute_kernels=tuple(kernels) if kernels else None,
            min_partition=section.min_partition,
            cache_load_factor=section.cache_load_factor,
            enforce_hbm=section.enforce_hbm,
            ranks=tuple(ranks) if ranks else None,
            co_locate=section.co_locate,
            device_group=section.device_group,
        )

    def _note_uniform(self) -> None:
        if self.distributions.left_out:
            missing, total = self.distributions.left_out, self.distributions.total
            self.problems.notes.append(
                f"{self.problems.file}: index_distribution is missing for {missing} of {total} "
                "features, which count as uniform; real ids are skewed, which makes lookups faster"
            )

    def _note_extrapolated(self, dense: object, batch: int | None) -> None:
        if isinstance(dense, MeasuredDense) and batch and batch != dense.batch_size:
            self.problems.notes.append(
                f"{self.problems.file}: the dense part was measured at a batch of "
                f"{dense.batch_size}; at {batch} its times are scaled in proportion, which is an "
                "extrapolation"
            )
