"""A copy of a model file in which features have measured statistics; all other text stays.

The file is edited in place of its values rather than written anew, so that comments, order and
constraints of the original are kept.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from predictor.errors import InputError

DISTRIBUTION, POOLING = "index_distribution", "pooling_factor"


@dataclass(frozen=True)
class _Edit:
    """Text that replaces what lies between two places."""

    start: int
    end: int
    text: str


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
    edits: dict[int, _Edit] = {}
    for feature in _features(tables):
        name = _get(feature, "name")
        new = values.get(name.value) if isinstance(name, ScalarNode) else None
        made = _moved(feature, source, target) if new is None else _replaced(feature, new, text)
        edits |= {edit.start: edit for edit in made}
    for start in sorted(edits, reverse=True):
        edit = edits[start]
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def _features(tables: SequenceNode) -> Iterator[MappingNode]:
    for table in tables.value:
        features = _get(table, "features")
        if isinstance(features, SequenceNode):
            yield from (node for node in features.value if isinstance(node, MappingNode))


def _replaced(feature: MappingNode, values: Mapping[str, object], text: str) -> Iterator[_Edit]:
    """New values in place of those that are there; the others behind the last one."""
    added = ""
    for key, value in values.items():
        line = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
        plain = line.removesuffix("...\n").strip()
        old = _get(feature, key)
        if old is not None:
            yield _Edit(old.start_mark.index, _end(old), plain)
        elif feature.flow_style:
            added += f", {key}: {plain}"
        else:
            added += f"\n{' ' * feature.start_mark.column}{key}: {plain}"
    if added:
        end = _end(feature.value[-1][1])
        yield _Edit(end, end, added)


def _moved(feature: MappingNode, source: Path, target: Path) -> Iterator[_Edit]:
    """A distribution that lies in another file, seen from the folder of the copy."""
    file = _get(_get(feature, DISTRIBUTION), "file")
    if isinstance(file, ScalarNode) and not Path(file.value).is_absolute():
        path = relative(source.parent / file.value, target)
        text = yaml.safe_dump(path, width=10**6).removesuffix("...\n").strip()
        yield _Edit(file.start_mark.index, file.end_mark.index, text)


def relative(path: Path, target: Path) -> str:
    """A path as the file ``target`` names it."""
    return os.path.relpath(path.resolve(), target.resolve().parent)


def _get(node: Node | None, key: str) -> Node | None:
    if not isinstance(node, MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _end(node: Node) -> int:
    """Where a node ends; a block's own mark lies behind the comments that follow it."""
    if isinstance(node, (MappingNode, SequenceNode)) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)
