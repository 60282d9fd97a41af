"""Workload -> model.yaml, and copies of model files in which features have measured statistics."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from predictor.errors import InputError
from predictor.model.captured import CapturedDense
from predictor.model.workload import Dense, DenseArch, MeasuredDense, Table, Workload
from predictor.section import SCHEMA_VERSION, Section, as_data
from shardopt.config.model import load_model
from shardopt.config.ops_file import ops_text, with_ops_digest
from shardopt.config.tables_csv import changed_csv
from shardopt.files import atomic_write_text, decode, read_bytes

ALL_UNIFORM = "index_distribution of every feature is uniform"
"""A note in files that are written from a module; no longer true once statistics are filled in."""
SOME_UNIFORM = "index_distribution of features without statistics is uniform"
_TRAILING = re.compile(r"[ \t]+#[^\n]*")


def model_text(workload: Workload, notes: Sequence[str] = ()) -> str:
    """The model file that `load_model` reads as this workload.

    Args:
        notes: comments at the top of the file, a line each.

    The digest of the file is no part of the file: `with_digest` gives the workload that a reader
    finds, with its `sha256`.

    Raises:
        InputError: a feature's index distribution lies in a file of its own.
    """
    for feature in (f for table in workload.tables for f in table.features):
        kind = type(feature.distribution)
        if not issubclass(kind, Section):
            raise InputError(
                f"feature '{feature.name}': {kind.__name__} indices cannot be written into a model "
                "file; they lie in an .npz file of their own: copy the model file instead"
            )
    data = {
        "schema": SCHEMA_VERSION,
        **as_data(workload, leave_out=("dense", "tables")),
        "dense": dense_section(workload.dense),
        "tables": [as_data(table) for table in workload.tables],
    }
    # lists and mappings of scalars stand in a line, as tables make a model file long
    text: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
    return "".join(f"# {note}\n" for note in notes) + text


def dense_text(dense: DenseArch | MeasuredDense, notes: Sequence[str] = ()) -> str:
    """The ``dense`` section alone, to be put into a model file.

    Args:
        notes: comments at the top, a line each.
    """
    text: str = yaml.safe_dump({"dense": dense_section(dense)}, sort_keys=False, width=100)
    return "".join(f"# {note}\n" for note in notes) + text


def with_digest(workload: Workload, notes: Sequence[str] = ()) -> Workload:
    """The workload as a reader of its model file finds it."""
    dense = workload.dense
    if isinstance(dense, CapturedDense):
        dense = replace(dense, captured=with_ops_digest(dense.captured))
        workload = replace(workload, dense=dense)
    content = model_text(workload, notes).encode("utf-8") + _ops_text(workload).encode("utf-8")
    return replace(workload, sha256=hashlib.sha256(content).hexdigest())


def write_model(path: Path, workload: Workload, notes: Sequence[str] = ()) -> None:
    """Write the model file and the ops file that it names, or replace them."""
    if isinstance(workload.dense, CapturedDense):
        atomic_write_text(path.parent / workload.dense.file, _ops_text(workload))
    atomic_write_text(path, model_text(workload, notes))


def _ops_text(workload: Workload) -> str:
    dense = workload.dense
    return ops_text(dense.captured) if isinstance(dense, CapturedDense) else ""


def dense_section(dense: Dense, *, full: bool = False) -> dict[str, Any]:
    """The ``dense`` section that is read as this dense part.

    Args:
        full: with keys that are as if they were left out.
    """
    ops = {"ops": dense.file} if isinstance(dense, CapturedDense) else {}
    return {**ops, **as_data(dense, full=full, leave_out=("ops",))}


DISTRIBUTION = "index_distribution"
NAMES_FILES = ("file", "files", "ops", "csv")
"""Keys whose values are paths, relative to the file."""


Edit = tuple[int, int, str]
"""Start and end of what is replaced, and the text that takes its place."""


def fill_model(
    text: str, values: Mapping[str, Mapping[str, object]], source: Path, target: Path
) -> str:
    """The text of the copy.

    Args:
        text: of a valid model file.
        values: feature -> what `shardopt.stats.result.model_values` gives for it; other features
            stay as they are.
        source: the model file.
        target: where the copy will lie; paths in it become relative to its folder.

    Raises:
        InputError: the tables are in a CSV file, whose rows have no such keys.
    """
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    tables = _get(root, "tables")
    if not isinstance(tables, SequenceNode):
        raise InputError(
            f"{source}: its tables are in a CSV file, which is not copied; write them into a model "
            "file, or give the distributions in the CSV file",
            inputs=("model",),
        )
    edits: list[Edit] = []
    features = list(_features(tables))
    for feature in features:
        name = _get(feature, "name")
        new = values.get(name.value) if isinstance(name, ScalarNode) else None
        edits += _moved(feature, source, target) if new is None else _replaced(feature, new, text)
    text = _edited(text, edits)
    whole = all(getattr(_get(node, "name"), "value", None) in values for node in features)
    rest = "" if whole else rf"\g<1>{SOME_UNIFORM}\n"
    return re.sub(rf"^(#\s*){ALL_UNIFORM}\n", rest, text, flags=re.MULTILINE) if values else text


def _edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with all edits; those that add at one place stand in their order."""
    by_start: dict[int, tuple[int, str]] = {}
    for start, end, new in edits:
        adds = start == end == by_start.get(start, (-1, ""))[0]
        by_start[start] = end, by_start[start][1] + new if adds else new
    for start, (end, new) in sorted(by_start.items(), reverse=True):
        text = text[:start] + new + text[end:]
    return text


def apply_changes(source: Path, before: Workload, after: Workload, target: Path) -> None:
    """Copy a model file with other settings; its comments, order and form stay.

    A CSV file of tables is copied too, where tables change, beside the copy.

    Args:
        before: what the file holds.
        after: the same tables, with other settings.

    Raises:
        InputError: a file cannot be written, or aliases of YAML stand in the way.
    """
    text = decode(read_bytes(source, "model file"), source)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    tables, dense = _get(root, "tables"), _get(root, "dense")
    assert isinstance(root, MappingNode)
    edits = list(_moved(root, source, target))
    pairs = list(zip(before.tables, after.tables, strict=True))
    csv = _get(tables, "csv")
    if isinstance(csv, ScalarNode) and before.tables != after.tables:
        path = target.with_name(f"{target.stem}_tables.csv")
        rows = changed_csv(source.parent / csv.value, dict(_table_changes(pairs)), path.parent)
        atomic_write_text(path, rows)
        edits = [edit for edit in edits if edit[0] != csv.start_mark.index]
        edits.append((csv.start_mark.index, csv.end_mark.index, path.name))
    elif isinstance(tables, SequenceNode):
        changes = dict(_table_changes(pairs))
        for node, (table, _) in zip(tables.value, pairs, strict=True):
            changed_keys = dict(changes.get((table.module, table.name), {}))
            constraints = changed_keys.pop("constraints", {})
            inner = _get(node, "constraints")
            if constraints and isinstance(inner, MappingNode) and inner.value:
                edits += _replaced(inner, constraints, text)
            elif constraints:
                changed_keys["constraints"] = constraints
            features = _get(node, "features")
            order = changed_keys.pop("id_order", None)
            for feature in features.value if isinstance(features, SequenceNode) and order else ():
                edits += _replaced(feature, {"id_order": order}, text)
            edits += _replaced(node, changed_keys, text)
    # additions at one place stand from the innermost part to the outermost
    if isinstance(dense, MappingNode):
        changed = _changed(*(dense_section(w.dense, full=True) for w in (before, after)))
        edits += _replaced(dense, changed, text)
    edits += _replaced(root, _changed(_head(before), _head(after)), text)
    atomic_write_text(target, _edited(text, edits))
    written = load_model(target)
    unwritten = list(_table_changes(zip(written.tables, after.tables, strict=True)))
    if unwritten or _head(written) != _head(after):
        raise InputError(
            f"{source}: a part that changes is used several times (a YAML alias), so {target} "
            "would not hold the change that was asked for; write that part out in full",
            inputs=("apply",),
        )


def _head(workload: Workload) -> dict[str, Any]:
    return as_data(workload, full=True, leave_out=("name", "dense", "tables"))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in after.items() if before.get(key) != value}


def _table_changes(
    pairs: Iterable[tuple[Table, Table]],
) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Keys of the model file that changed, by module and name of the table."""
    for before, after in pairs:
        others = ("features", "constraints")
        keys = _changed(*(as_data(table, full=True, leave_out=others) for table in (before, after)))
        constraints = _changed(
            *(as_data(table.constraints, full=True) for table in (before, after))
        )
        if constraints:
            keys["constraints"] = constraints
        order = after.features[0].id_order
        if any(feature.id_order != order for feature in before.features):
            keys["id_order"] = order
        if keys:
            yield (after.module, after.name), keys


def _features(tables: SequenceNode) -> Iterator[MappingNode]:
    for table in tables.value:
        features = _get(table, "features")
        if isinstance(features, SequenceNode):
            yield from (node for node in features.value if isinstance(node, MappingNode))


def _replaced(feature: MappingNode, values: Mapping[str, object], text: str) -> Iterator[Edit]:
    """New values in place of those that are there; the others behind the last one.

    A comment behind an old value goes with it.
    """
    added = ""
    for key, value in values.items():
        line = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
        plain = line.removesuffix("...\n").strip()
        old = _get(feature, key)
        if old is not None:
            end = _end(old)
            comment = None if feature.flow_style else _TRAILING.match(text, end)
            yield old.start_mark.index, comment.end() if comment else end, plain
        elif feature.flow_style:
            added += f", {key}: {plain}"
        else:
            added += f"\n{' ' * feature.start_mark.column}{key}: {plain}"
    if added:
        end = _end(feature.value[-1][1])
        yield end, end, added


def _moved(node: Node, source: Path, target: Path) -> Iterator[Edit]:
    """The files that a part of a model file names, seen from the folder of the copy."""
    if isinstance(node, SequenceNode):
        for item in node.value:
            yield from _moved(item, source, target)
    if not isinstance(node, MappingNode):
        return
    for name, value in node.value:
        named = name.value in NAMES_FILES
        if not named or isinstance(value, MappingNode):
            yield from _moved(value, source, target)
            continue
        for file in value.value if isinstance(value, SequenceNode) else [value]:
            if isinstance(file, ScalarNode) and not Path(file.value).is_absolute():
                path = relative(source.parent / file.value, target)
                text = yaml.safe_dump(path, width=10**6).removesuffix("...\n").strip()
                yield file.start_mark.index, file.end_mark.index, text


def relative(path: Path, target: Path) -> str:
    """A path as the file ``target`` names it."""
    return os.path.relpath(path.resolve(), target.resolve().parent)


def _get(node: Node | None, key: str) -> Node | None:
    if not isinstance(node, MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _end(node: Node) -> int:
    """Return where a node ends; a block's own mark lies behind the comments that follow it."""
    if isinstance(node, (MappingNode, SequenceNode)) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)
