"""Edits of the text of a profile that keep its comments and layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class FlowLists(yaml.SafeDumper):
    """Lists of plain values on one line, as in the files written by hand."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        return super().represent_sequence(tag, sequence, flow_style=True)


def set_key(text: str, path: Sequence[str], value: Any, after: str | None = None) -> str:
    """Set one key of a block mapping in ``text``; comments and layout stay.

    Args:
        path: keys from the outermost mapping to the key to set; the mapping must exist.
        value: plain data; None or an empty list removes the key.
        after: key after which a new one is inserted; the end of the mapping if None.
    """
    lines = text.splitlines()
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in path[:-1]:
        node = next(v for k, v in node.value if k.value == key)
    keys = {k.value: k.start_mark.line for k, _ in node.value}
    name, column = path[-1], node.start_mark.column
    first = keys.get(name, keys[after or list(keys)[-1]])
    end = _end(lines, first, column)
    new = [] if value in (None, []) else _written(name, value, column)
    lines[first if name in keys else end : end] = new
    return "\n".join(lines) + "\n"


def _end(lines: Sequence[str], first: int, column: int) -> int:
    """Return the line after the value of a key; list items may start in the key's column."""
    for index in range(first + 1, len(lines)):
        stripped = lines[index].lstrip()
        indent = len(lines[index]) - len(stripped)
        if not stripped or indent < column or (indent == column and not stripped.startswith("- ")):
            return index
    return len(lines)


def _written(name: str, value: Any, column: int) -> list[str]:
    """Return the lines of ``name: value``; a mapping of lists is one line, as people write it."""
    flat = isinstance(value, dict) and all(isinstance(v, list) for v in value.values())
    if flat:
        inner = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=1000)
        written = f"{name}: {inner}"
    else:
        dumper = FlowLists if isinstance(value, dict) else yaml.SafeDumper
        written = yaml.dump({name: value}, Dumper=dumper, sort_keys=False, width=96 - column)
    return [" " * column + line for line in written.splitlines()]
