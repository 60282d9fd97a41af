"""model.yaml -> Workload: every problem of the file in one message."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from predictor.document import KeyPath, Problems, parse_yaml, shown
from predictor.errors import InputError
from predictor.model.captured import CapturedDense
from predictor.model.distribution import Empirical, EmpiricalByRange
from predictor.model.plan import ShardingType
from predictor.model.plan_json import SCHEMA as PLAN_SCHEMA
from predictor.model.topology import ReplicaGroups
from predictor.model.workload import (
    Constraints,
    DcnV2,
    DenseArch,
    Feature,
    MeasuredDense,
    QComm,
    Table,
    Workload,
)
from predictor.units import gib, mib
from shardopt.config.distributions import DistributionReader, check_windows, window_names
from shardopt.config.ops_file import other_model, read_ops
from shardopt.config.schema import (
    AnySection,
    ConstraintsSection,
    CsvSection,
    DcnSection,
    DenseSection,
    FeatureSection,
    MeasuredDenseSection,
    MeasuredSection,
    ModelSection,
    OpsSection,
    QCommSection,
    ReplicaGroupsSection,
    TableSection,
    check,
    nearest,
)
from shardopt.config.tables_csv import read_tables_csv
from shardopt.files import decode, read_bytes, refuse_streams


def load_model(path: str | Path, *, batch_size: int | None = None) -> Workload:
    """The workload that a model file describes; see `read_model`."""
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
        raise InputError(f"{path}: is a plan, not a model file; the model comes first, then plans")
    reader = _Reader(Path(path).parent, problems)
    workload = reader.read(raw, content, batch_size)
    problems.raise_if_any()
    assert workload is not None
    notes = list(problems.notes)
    windows: dict[str, Workload] = {}
    names = window_names(reader.distributions.windows)
    for number, name in enumerate(names):
        of_window: Workload | None = workload
        if number:
            reader = _Reader(Path(path).parent, problems)
            reader.distributions.window = number
            of_window = reader.read(raw, content, batch_size)
            problems.raise_if_any()
        assert of_window is not None
        windows[name] = of_window
    check_windows(windows)
    return workload, notes, windows


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
        precision = self._check(QCommSection, raw.get("qcomm"), ("qcomm",))
        qcomm = QComm(**precision.values()) if precision else None
        groups = self._replica_groups(raw.get("replica_groups"))
        dense = None
        if raw.get("dense") is not None:
            dense, ops = read_dense(raw["dense"], self.directory, self.problems)
            self.content += ops
        raw_tables = self._raw_tables(raw.get("tables"))
        tables = [self._table(item, ("tables", i)) for i, item in enumerate(raw_tables)]
        good = [(i, table) for i, table in enumerate(tables) if table is not None]
        check_consistency(raw_tables, good, dense, self.problems)
        self._note_guesses(dense, batch)
        if top is None or batch is None or qcomm is None or dense is None:
            return None
        if len(good) < len(tables) or self.problems.found:
            return None
        workload = Workload(
            name=top.name or Path(self.problems.file).stem,
            batch_size=batch,
            tables=tuple(table for _, table in good),
            dense=dense,
            train_pipeline=top.train_pipeline,
            qcomm=qcomm,
            replica_groups=groups,
            sha256=hashlib.sha256(self.content).hexdigest(),
        )
        if isinstance(dense, CapturedDense):
            # ops are made for the workload's batch once here, where their file can be named
            try:
                dense.program(workload)
            except InputError as error:
                self.problems.add(("dense", "ops"), str(error), inputs=error.inputs)
        return workload

    def _check(self, section: type[AnySection], raw: object, path: KeyPath) -> AnySection | None:
        """As `check`, of a section that may be left out."""
        return check(section, {} if raw is None else raw, path, self.problems)

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
            return ReplicaGroups(**section.values()) if section else None
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
        parts = {"features": features, "constraints": constraints}
        return Table(
            **{**section.values(), **parts, "optimizer": section.optimizer or self.optimizer}
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
        values = section.values()
        del values["index_distribution"]
        values["pooling_factor"] = mean = section.pooling_factor * ratio
        if section.pooling_factor_std is None and isinstance(
            distribution, Empirical | EmpiricalByRange
        ):
            values["pooling_factor_std"] = self.distributions.deviation(given, name, mean)
        return Feature(**values, distribution=distribution)

    def _constraints(self, raw: object, path: KeyPath) -> Constraints | None:
        section = self._check(ConstraintsSection, raw, path)
        if section is None:
            return None
        values = section.values()
        if section.sharding_types:
            values["sharding_types"] = tuple(map(ShardingType, section.sharding_types))
        return Constraints(**values)

    def _note_guesses(self, dense: object, batch: int | None) -> None:
        """What the answer will rest on that nobody has measured."""
        if self.distributions.left_out:
            missing, total = self.distributions.left_out, self.distributions.total
            self.problems.notes.append(
                f"{self.problems.file}: index_distribution is missing for {missing} of {total} "
                "features, which count as uniform; real ids are skewed, which makes lookups faster"
            )
        if isinstance(dense, MeasuredDense) and batch and batch != dense.batch_size:
            self.problems.notes.append(
                f"{self.problems.file}: the dense part was measured at a batch of "
                f"{dense.batch_size}; at {batch} its times are scaled in proportion, which is an "
                "extrapolation"
            )


INTERACTIONS = ("dot", "concat", "dcn_v2")
PATH: KeyPath = ("dense",)


Dense = DenseArch | CapturedDense | MeasuredDense


def read_dense(raw: object, directory: Path, problems: Problems) -> tuple[Dense | None, bytes]:
    """The dense part in the form that its keys show, None when it has problems; and the content
    of the file that it names.

    Args:
        directory: that of the model file.
    """
    if isinstance(raw, dict) and "ops" in raw:
        return _captured(raw, directory, problems)
    if isinstance(raw, dict) and "measured" in raw:
        return _measured(raw, problems), b""
    if isinstance(raw, dict) and "linears" in raw:
        problems.add(
            (*PATH, "linears"),
            "is no longer read: it counted each linear layer once a sample and nothing else; run "
            "to_yaml on the module again, which writes 'ops', or give in_features, bottom_mlp and "
            "top_mlp",
        )
        return None, b""
    return _layers(raw, problems), b""


def _captured(
    raw: dict[str, object], directory: Path, problems: Problems
) -> tuple[CapturedDense | None, bytes]:
    section = check(OpsSection, raw, PATH, problems)
    if section is None:
        return None, b""
    try:
        refuse_streams(directory / section.ops, "ops file")
        captured, content = read_ops(directory / section.ops)
    except InputError as error:
        problems.add((*PATH, "ops"), str(error))
        return None, b""
    if section.optimizer not in (None, captured.optimizer_name):
        problems.add(
            (*PATH, "optimizer"),
            f"got {shown(section.optimizer)}, but the ops in {section.ops} are those of "
            f"{captured.optimizer_name}; run to_yaml with dense_optimizer={section.optimizer!r}",
        )
    values = section.values()
    del values["ops"], values["optimizer"]
    return CapturedDense(captured, file=section.ops, **values), content


def _measured(raw: dict[str, object], problems: Problems) -> MeasuredDense | None:
    form = check(MeasuredDenseSection, raw, PATH, problems)
    section = check(MeasuredSection, raw["measured"], (*PATH, "measured"), problems)
    if form is None or section is None:
        return None
    values = {**form.values(), **section.values()}
    activations = values.pop("activation_gib")
    del values["measured"]
    return MeasuredDense(
        gradient_bytes=mib(values.pop("gradient_mib")),
        activation_bytes=None if activations is None else gib(activations),
        **values,
    )


def _layers(raw: object, problems: Problems) -> DenseArch | None:
    section = check(DenseSection, raw, PATH, problems)
    interaction = None
    if isinstance(raw, dict):
        interaction = _interaction(raw.get("interaction"), (*PATH, "interaction"), problems)
    if section is None or interaction is None:
        return None
    return DenseArch(**{**section.values(), "interaction": interaction})


def _interaction(raw: object, path: KeyPath, problems: Problems) -> str | DcnV2 | None:
    if raw is None:
        return "dot"
    if isinstance(raw, str) and raw in ("dot", "concat"):
        return raw
    if isinstance(raw, dict) and list(raw) == ["dcn_v2"]:
        section = check(DcnSection, raw["dcn_v2"], (*path, "dcn_v2"), problems)
        return DcnV2(**section.values()) if section else None
    word = raw if isinstance(raw, str) else next(iter(raw), "") if isinstance(raw, dict) else ""
    problems.add(
        path,
        f"got {shown(raw)}; allowed: dot, concat, {{dcn_v2: {{layers: 3, low_rank_dim: 512}}}}"
        f"{nearest(str(word), INTERACTIONS)}",
    )
    return None


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
    read = [table for _, table in tables]
    found = variable_batches(read) + hash_tables(read)
    problems.notes.extend(f"{problems.file}: {what}" for what in found)


def hash_tables(tables: Sequence[Table]) -> list[str]:
    """How far the prices of dynamicemb tables can be trusted, in a sentence; none without them."""
    names = [f"'{table.name}'" for table in tables if table.storage == "dynamicemb"]
    if not names:
        return []
    return [
        f"lookups in dynamicemb ({', '.join(names)}) are priced with constants derived from public "
        "rows, good to a factor of 2; rows that are new, and admission, are not priced"
    ]


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
