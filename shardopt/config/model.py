"""model.yaml -> Workload: every problem of the file in one message."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from predictor.document import KeyPath, Problems, parse_yaml, shown
from predictor.errors import InputError
from predictor.model.captured import CapturedDense
from predictor.model.distribution import Distribution, Empirical, EmpiricalByRange
from predictor.model.length_shares import LengthShares
from predictor.model.plan import STORED, ShardingType
from predictor.model.plan_json import SCHEMA as PLAN_SCHEMA
from predictor.model.topology import ReplicaGroups
from predictor.model.workload import (
    INTEGERS,
    Constraints,
    DcnV2,
    DenseArch,
    Feature,
    MeasuredDense,
    Optimizer,
    QComm,
    Table,
    Workload,
)
from predictor.units import gib, mib
from shardopt.config.distributions import DistributionReader, check_windows, window_names
from shardopt.config.ops_file import other_model, read_ops
from shardopt.config.schema import (
    TRAINING,
    CsvSection,
    DcnSection,
    DenseSection,
    FeatureSection,
    LengthSharesSection,
    MeasuredDenseSection,
    ModelSection,
    OpsSection,
    TableSection,
    check,
    nearest,
)
from shardopt.config.tables_csv import read_tables_csv
from shardopt.files import decode, read_bytes, refuse_streams
from shardopt.formatting import listed


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
        raise InputError(f"{path}: is a plan, not a model file; the model comes first, then plans")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch size is {batch_size}; it must be at least 1 per rank")
    directory = Path(path).parent
    dense: Dense | None = None
    ops = csv = b""
    if raw.get("dense") is not None:
        dense, ops = read_dense(raw["dense"], directory, problems)
    if isinstance(raw.get("tables"), dict):
        section = check(CsvSection, raw["tables"], ("tables",), problems)
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
        self.dense, self.sha256, self.problems = dense, sha256, problems
        self.distributions = DistributionReader(directory, problems)
        top = check(ModelSection, raw, (), problems)
        if batch_size is None and raw.get("batch_size") is None:
            advice = "missing; give the samples per rank and iteration"
            problems.add(("batch_size",), advice, inputs=("batch_size",))
        self.groups = None
        if top is not None and top.replica_groups is not None:
            try:
                self.groups = ReplicaGroups(**top.replica_groups.values())
            except InputError as error:  # settings that exclude each other
                problems.add(("replica_groups",), str(error))
        tables = raw.get("tables")
        tables = tables if isinstance(tables, list) else []
        self.given = list(_features(tables))
        _check_names(tables, problems)
        self.found = self._distributions(0)
        if top is not None:
            check_consistency(top.tables, dense, problems)
            _check_mode(top, problems)
        if self.distributions.left_out:
            missing, total = self.distributions.left_out, self.distributions.total
            problems.notes.append(
                f"{problems.file}: index_distribution is missing for {missing} of {total} "
                "features, which count as uniform; real ids are skewed, which makes lookups faster"
            )
        batch = batch_size or (top.batch_size if top else None)
        if isinstance(dense, MeasuredDense) and batch and batch != dense.batch_size:
            problems.notes.append(
                f"{problems.file}: the dense part was measured at a batch of "
                f"{dense.batch_size}; at {batch} its times are scaled in proportion, which is an "
                "extrapolation"
            )
        problems.raise_if_any()
        assert top is not None
        assert batch is not None
        self.top, self.batch = top, batch

    def _distributions(self, window: int) -> dict[KeyPath, Distribution]:
        """Index distributions by the path of their features."""
        self.distributions.window = window
        return {
            path: self.distributions.read(
                raw.get("index_distribution"), (*path, "index_distribution"), str(raw.get("name"))
            )
            for path, _, raw in self.given
        }

    def workload(self, window: int) -> Workload:
        """Return the workload of a window; ask for the first window first.

        Raises:
            InputError: every problem of its stats files, or the ops are of another batch.
        """
        if window:
            self.found = self._distributions(window)
            self.problems.raise_if_any()
        top, problems = self.top, self.problems
        assert self.dense is not None
        tables = []
        for i, table in enumerate(top.tables):
            limits = table.constraints.values()
            if limits["sharding_types"]:
                limits["sharding_types"] = tuple(map(ShardingType, limits["sharding_types"]))
            features = tuple(
                self._feature(feature, self.found["tables", i, "features", j])
                for j, feature in enumerate(table.features)
            )
            own = {**table.values(), "features": features, "constraints": Constraints(**limits)}
            tables.append(Table(**{**own, "optimizer": table.optimizer or top.optimizer}))
        workload = Workload(
            name=top.name or Path(problems.file).stem,
            batch_size=self.batch,
            tables=tuple(tables),
            dense=self.dense,
            train_pipeline=top.train_pipeline,
            training=top.mode == TRAINING,
            stash_optimizer_state=top.stash_optimizer_state,
            balance_batches=top.balance_batches,
            qcomm=QComm(**top.qcomm.values()),
            replica_groups=self.groups,
            sha256=self.sha256,
        )
        if isinstance(self.dense, CapturedDense):
            # ops are made for the workload's batch once here, where their file can be named
            try:
                self.dense.program(workload)
            except InputError as error:
                problems.add(("dense", "ops"), str(error), inputs=error.inputs)
                problems.raise_if_any()
        return workload

    def _feature(self, section: FeatureSection, distribution: Distribution) -> Feature:
        values = section.values()
        raw = values.pop("index_distribution")
        mean = section.pooling_factor * self.distributions.pooling_ratio(raw, section.name)
        values["pooling_factor"] = mean
        measured = isinstance(distribution, Empirical | EmpiricalByRange)
        if measured:
            lengths = self.distributions.lengths(raw, section.name, mean)
            values |= {k: v for k, v in lengths.items() if values[k] is None}
        values["length_correlation"] = values["length_correlation"] or 0.0
        return Feature(**values, distribution=distribution)


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


INTERACTIONS = ("dot", "concat", "dcn_v2")
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
        form = check(MeasuredDenseSection, raw, ("dense",), problems)
        if form is None:
            return None, b""
        values = {**form.values(), **form.measured.values()}
        activations = values.pop("activation_gib")
        del values["measured"]
        return MeasuredDense(
            length_shares=_length_shares(values.pop("length_shares")),
            gradient_bytes=mib(values.pop("gradient_mib")),
            activation_bytes=None if activations is None else gib(activations),
            **values,
        ), b""
    section = check(DenseSection, raw, ("dense",), problems)
    interaction = None
    if isinstance(raw, dict):
        interaction = _interaction(raw.get("interaction"), ("dense", "interaction"), problems)
    if section is None or interaction is None:
        return None, b""
    values = section.values()
    shares = _length_shares(values["length_shares"])
    return DenseArch(**{**values, "interaction": interaction, "length_shares": shares}), b""


def _length_shares(section: LengthSharesSection | None) -> LengthShares | None:
    return LengthShares(**section.values()) if section else None


def _captured(
    raw: dict[str, object], directory: Path, problems: Problems
) -> tuple[CapturedDense | None, bytes]:
    section = check(OpsSection, raw, ("dense",), problems)
    if section is None:
        return None, b""
    try:
        refuse_streams(directory / section.ops, "ops file")
        captured, content = read_ops(directory / section.ops)
    except InputError as error:
        problems.add(("dense", "ops"), str(error))
        return None, b""
    if section.optimizer not in (None, captured.optimizer_name):
        problems.add(
            ("dense", "optimizer"),
            f"got {shown(section.optimizer)}, but the ops in {section.ops} are those of "
            f"{captured.optimizer_name}; run to_yaml with dense_optimizer={section.optimizer!r}",
        )
    values = section.values()
    del values["ops"], values["optimizer"]
    values["length_shares"] = _length_shares(values["length_shares"])
    return CapturedDense(captured, file=section.ops, **values), content


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


def check_consistency(
    tables: Sequence[TableSection], dense: Dense | None, problems: Problems
) -> None:
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
        "index_dedup, which TorchRec keeps in modules of their own; give each kind a 'module'"
        for module, rough in kinds.items()
        if len(rough) > 1
    )
    rough = variable_batches(tables) + rough_lookups(tables)
    problems.notes.extend(f"{problems.file}: {note}" for note in rough)


SERVED_PIPELINES = ("base", "sparse_dist")


def _check_mode(top: ModelSection, problems: Problems) -> None:
    """Record what only training has of a model for inference, and types of weights that the mode
    cannot have."""
    training = top.mode == TRAINING
    trained = [(table.optimizer or top.optimizer, table) for table in top.tables]
    found = untaken_types(
        ((table.name, table.data_type, kind) for kind, table in trained), training=training
    )
    problems.notes.extend(f"{problems.file}: {what}" for what in found)
    if training:
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


def rough_lookups(tables: Sequence[Table | TableSection]) -> list[str]:
    """Say how far the prices of dynamicemb and key-value tables can be trusted, a sentence each;
    nothing without them."""
    notes = []
    hashed = [f"'{table.name}'" for table in tables if table.storage == "dynamicemb"]
    if hashed:
        notes.append(
            f"lookups in dynamicemb ({listed(hashed)}) are priced with constants derived from "
            "public rows, good to a factor of 2; rows that are new, and admission, are not priced"
        )
    stored = [f"'{table.name}'" for table in tables if _may_be_stored(table.constraints)]
    if stored:
        notes.append(
            f"key-value tables ({listed(stored)}) are priced with TorchRec's bandwidth of an "
            "SSD and derived constants, good to a factor of 5; eviction by score or age, "
            "and what the store takes of the host, are not priced"
        )
    return notes


def _may_be_stored(wants: Any) -> bool:
    offered = {kernel for _, kernel in getattr(wants, "offered", None) or ()}
    return not {*(wants.compute_kernels or ()), *offered}.isdisjoint(STORED)


def variable_batches(tables: Sequence[Table | TableSection]) -> list[str]:
    """Say what is not priced of features with a batch of their own (VBE); nothing without them."""
    names = [f.name for t in tables for f in t.features if f.num_poolings != 1]
    if not names:
        return []
    return [
        f"variable batches of {listed(names)} (num_poolings) are priced by their ids, bags and "
        "outputs; what TorchRec adds, the exchange of strides and the outputs put back in the "
        "order of the samples, is not"
    ]


def _one_dim(tables: Sequence[TableSection], dense: DenseArch, problems: Problems) -> None:
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


def _same_model(tables: Sequence[TableSection], dense: CapturedDense, problems: Problems) -> None:
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
                f"{problems.file}: feature '{feature.name}' has {ids:g} ids a sample, but "
                f"{dense.file} is of {there:g}, from which its tensors cannot be scaled: the dense "
                "part is priced as captured; run to_yaml with the new pooling factor"
            )
