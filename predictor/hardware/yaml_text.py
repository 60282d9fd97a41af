"""The YAML text of a hardware profile as plain data, with the line of every key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from predictor.errors import ProfileError

MAX_NODES = 20_000
"""Limit against aliases that multiply; the largest shipped profile has 700 nodes."""
MAX_BYTES = 2**20
"""Longest text; the largest shipped profile has 60 kB."""
MAX_DEPTH = 30
"""Limit on nesting; profiles have six levels."""

Keys = Sequence[int | str]
_TIMESTAMP = "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """Loads plain data; dates stay text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [(tag, pattern) for tag, pattern in known if tag != _TIMESTAMP]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True)
class ProfileDocument:
    """A profile file: a mapping, and where its keys stand.

    Args:
        origin: the file as messages name it.
    """

    origin: str
    data: dict[Any, Any]
    root: yaml.Node

    def place(self, keys: Keys) -> str:
        """``file:line`` of the deepest part of ``keys`` that the file has."""
        line, node = 1, self.root
        for key in keys:
            found = _child(node, key)
            if found is None:
                break
            line, node = found
        return f"{self.origin}:{line}"


def read_document(text: str, origin: str) -> ProfileDocument:
    """The mapping in a YAML text.

    Raises:
        ProfileError: the text is not YAML, or not a mapping.
    """
    if text.count("\n") + text.count(",") > MAX_NODES or len(text) > MAX_BYTES:
        raise ProfileError(f"{origin}: is too long to be a hardware profile")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_size(root, origin)
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ProfileError(f"{_place(origin, error)}: not YAML: {_what(error)}") from error
    except RecursionError:
        raise ProfileError(f"{origin}: its values are nested too deeply") from None
    except (ValueError, OverflowError) as error:  # numbers too large for Python
        raise ProfileError(f"{origin}: not YAML: {error}") from error
    if root is None or not isinstance(data, dict):
        raise ProfileError(f"{origin}: a hardware profile must be a mapping of keys")
    return ProfileDocument(origin, data, root)


def _check_size(root: yaml.Node | None, origin: str) -> None:
    """Refuse aliases that contain themselves or multiply beyond memory."""
    waiting, seen = [(root, 1)] if root is not None else [], 0
    while waiting:
        node, depth = waiting.pop()
        seen += 1
        if seen > MAX_NODES or depth > MAX_DEPTH:
            place = f"{origin}:{node.start_mark.line + 1}"
            raise ProfileError(f"{place}: values are nested too deeply, or aliases multiply them")
        if isinstance(node, yaml.SequenceNode):
            waiting += [(item, depth + 1) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            waiting += [(part, depth + 1) for pair in node.value for part in pair]


def _place(origin: str, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return origin if mark is None else f"{origin}:{mark.line + 1}"


def _what(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or error).strip()


def _child(node: yaml.Node, key: int | str) -> tuple[int, yaml.Node] | None:
    """Line and value of one key of a mapping, or one item of a list."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == str(key):
                return name.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        item = node.value[key]
        return item.start_mark.line + 1, item
    return None
