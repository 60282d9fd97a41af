"""Reader of YAML files that keeps the line of every key and reports all problems of a file at once.

Model, cluster and scenario files and hardware profiles are read here. Scalars are read as YAML 1.2
readers expect: ``010`` and ``1:30`` stay text instead of becoming octal and sexagesimal numbers,
and dates stay text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from predictor.errors import InputError

KeyPath = tuple[str | int, ...]

MOST_SHOWN, MOST_ALIKE = 100, 3
"""Largest number of problems in a message, and of those that differ only in their place: a key that
is wrong in one table is wrong in hundreds."""
POSITION = re.compile(r"\[\d+\]")
"""Position of an entry in a list."""
MAX_NODES = 500_000
"""Most YAML nodes of a file; more come from aliases that multiply."""
MAX_BYTES = 2**25
"""Longest text: libyaml keeps several copies of it."""
MAX_DEPTH = 50
"""Most levels of nesting; a model file needs seven."""
SUSPECT_DEPTH = 200
"""Levels of nesting that a text may seem to have: libyaml's loader recurses on the C stack."""

SAFE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BRACKET = re.compile(r"[][{}]")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]{0,300})\Z")
_TAG = "tag:yaml.org,2002:"


def key_text(path: KeyPath) -> str:
    """Format a key path as people write it: ``tables[3].features[0].pooling_factor``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def shown(value: object) -> str:
    """Format a given value for a message, cut where it gets long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Place:
    """Place in a file where a value was written.

    Args:
        file: path as the user gave it.
        line: counted from 1; 0 when the file has no lines to speak of.
        column: name of a CSV column, for files that have them.
    """

    file: str
    line: int = 0
    column: str = ""

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}" if self.line else self.file
        return f"{text}: column {self.column}" if self.column else text


@dataclass
class Problems:
    """Problems of one configuration and the places of its keys.

    Args:
        file: the main file; problems without a better place refer to it.
        places: place of each key path.
        notes: remarks that are no problems, but worth one line on the console.
    """

    file: str
    places: dict[KeyPath, Place] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    _found: dict[tuple[Place, str], None] = field(default_factory=dict)
    _inputs: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        return bool(self._found)

    def place(self, path: KeyPath) -> Place:
        """Return the place of a key, or of the nearest one around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return Place(self.file)

    def add(self, path: KeyPath, message: str, *, inputs: Iterable[str] = ()) -> None:
        """Record a problem with the value at ``path``.

        Args:
            inputs: options that could give the value too: `ShardoptError.inputs`.
        """
        self._inputs += inputs
        key = key_text(path)
        self.add_at(self.place(path), f"{key}: {message}" if key else message)

    def add_at(self, place: Place, message: str) -> None:
        """Record a problem at a place that no key leads to."""
        self._found[place, message] = None

    def fail(self, path: KeyPath, message: str) -> NoReturn:
        self.add(path, message)
        self.raise_if_any()
        raise AssertionError

    def raise_if_any(self) -> None:
        """Raise one `InputError` with a line for each problem, in the order of the file."""
        if not self._found:
            return
        order = sorted(self._found, key=lambda p: (p[0].file != self.file, p[0].file, p[0].line))
        lines: list[str] = []
        alike: Counter[str] = Counter()
        for place, message in order:
            kind = POSITION.sub("[]", message)
            alike[kind] += 1
            if alike[kind] <= MOST_ALIKE and len(lines) < MOST_SHOWN:
                lines.append(f"{place}: {message}")
        if len(order) == 1:
            raise InputError(lines[0], self._inputs)
        if len(order) > len(lines):
            lines.append(f"and {len(order) - len(lines)} more like these")
        text = "\n  ".join([f"{self.file}: {len(order)} problems", *lines])
        raise InputError(text, self._inputs)


def parse_yaml(text: str, problems: Problems) -> Any:
    """Parse a YAML document; fill ``problems.places`` and report duplicate keys.

    Keys of the result are always text.
    """
    # before libyaml makes a node of a kilobyte for each value
    if len(text) > MAX_BYTES or text.count("\n") + text.count(",") > MAX_NODES:
        raise InputError(
            f"{problems.file}: is too long; at most {MAX_NODES:,} lines and {MAX_BYTES >> 20} MiB"
        )
    node = _compose(text, problems.file)
    if node is None:
        raise InputError(f"{problems.file}: the file is empty")
    return _Builder(problems).build(node, ())


def _compose(text: str, file: str) -> Node | None:
    if _depth_bound(text) > SUSPECT_DEPTH:
        raise InputError(f"{file}: its values are nested too deeply to be meant")
    loader = None
    try:
        loader = SAFE_LOADER(text)
        return loader.get_single_node()
    except yaml.YAMLError as error:
        parts = [getattr(error, name, None) for name in ("context", "problem", "reason")]
        reason = ", ".join(str(part) for part in parts if part) or str(error)
        if "tab character" in reason or "'\\t'" in reason:
            reason += " (indent with spaces, not tabs)"
        raise InputError(f"{_yaml_place(error, text, file)}: not YAML: {reason}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _depth_bound(text: str) -> int:
    """Return a cheap upper bound of the levels to which values of ``text`` are nested."""
    flow = deepest = 0
    for match in _BRACKET.finditer(text):
        flow = max(flow + (1 if match[0] in "[{" else -1), 0)
        deepest = max(deepest, flow)
    block = 0
    for line in text.splitlines():
        words = line.lstrip()
        if not words.startswith("#"):
            block = max(block, len(line) - len(words) + line.count("- ") + line.count("? "))
    return deepest + block


def _yaml_place(error: yaml.YAMLError, text: str, file: str) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is not None:
        return f"{file}:{mark.line + 1}:{mark.column + 1}"
    position = getattr(error, "position", None)
    if isinstance(position, int):
        return f"{file}:{text.count(chr(10), 0, position) + 1}"
    return file


class _Builder:
    """Builder that turns nodes into data and records the place of each key."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self.nodes = 0
        self.open: set[int] = set()

    def build(self, node: Node, path: KeyPath) -> Any:
        self.problems.places.setdefault(path, self._place(node))
        self.nodes += 1
        if self.nodes > MAX_NODES or id(node) in self.open:
            raise InputError(f"{self._place(node)}: aliases that contain themselves or multiply")
        if len(path) > MAX_DEPTH:
            raise InputError(f"{self._place(node)}: values are nested too deeply to be meant")
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        self.open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
            assert isinstance(node, MappingNode)
            return self._mapping(node, path)
        finally:
            self.open.discard(id(node))

    def _place(self, node: Node) -> Place:
        return Place(self.problems.file, node.start_mark.line + 1)

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        merged: list[Node] = []
        first_line: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                merged.append(value_node)
                continue
            if not isinstance(key_node, ScalarNode):
                self.problems.add_at(self._place(key_node), "a key must be a word, not a list")
                continue
            key, line = key_node.value, key_node.start_mark.line + 1
            if key in first_line:
                self.problems.add_at(
                    Place(self.problems.file, line),
                    f"{key_text((*path, key))}: the key appears twice, first on line "
                    f"{first_line[key]}; remove one",
                )
                continue
            first_line[key] = line
            # the line of a key helps more than that of a value below it
            self.problems.places[(*path, key)] = self._place(key_node)
            data[key] = self.build(value_node, (*path, key))
        for value_node in merged:
            self._merge(value_node, path, data)
        return data

    def _merge(self, node: Node, path: KeyPath, data: dict[str, Any]) -> None:
        """Apply YAML's ``<<``: take keys of other mappings that this one does not have."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, MappingNode):
                self.problems.add_at(self._place(source), "'<<' merges mappings only")
                continue
            if id(source) in self.open:
                raise InputError(f"{self._place(source)}: aliases that contain themselves")
            for key_node, value_node in source.value:
                if isinstance(key_node, ScalarNode) and key_node.value not in data:
                    key = key_node.value
                    self.problems.places.setdefault((*path, key), self._place(key_node))
                    data[key] = self.build(value_node, (*path, key))

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        tag, text = node.tag.removeprefix(_TAG), node.value
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() in ("yes", "true", "on")
        if tag == "int" and _INTEGER.match(text):
            return int(text.replace("_", ""))
        if tag == "float":
            return _float(text)
        if tag in ("str", "int", "timestamp", "value"):
            return text
        self.problems.add(path, f"got the YAML tag {shown(node.tag)}; write a plain value")
        return text


def _float(text: str) -> float | str:
    plain = text.replace("_", "").lower()
    for word in ("inf", "nan"):
        plain = plain.replace(f".{word}", word)
    try:
        return float(plain)
    except ValueError:  # sexagesimal, or a lone point
        return text
