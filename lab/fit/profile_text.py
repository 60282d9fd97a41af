"""The text of a profile: what a fit computes takes its place among what people wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class FlowLists(yaml.SafeDumper):
    """Lists of plain values on one line, as in the files written by hand."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> Any:
        return super().represent_sequence(tag, sequence, flow_style=True)


def set_key(text: str, path: Sequence[str], value: Any, after: str | None = None) -> str:
    """``text`` with one key of a block mapping set to ``value``; comments and layout stay.

    Args:
        path: keys from the outermost mapping to the one to set; the mapping must be there.
        value: plain data; None or an empty list takes the key out.
        after: key behind which a new one goes; at the end of the mapping without it.
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
    """Line after the value of a key; items of a list may stand in the key's own column."""
    for index in range(first + 1, len(lines)):
        stripped = lines[index].lstrip()
        indent = len(lines[index]) - len(stripped)
        if not stripped or indent < column or (indent == column and not stripped.startswith("- ")):
            return index
    return len(lines)


def _written(name: str, value: Any, column: int) -> list[str]:
    """Lines of ``name: value``; mappings of lists stand on one line, as people write them."""
    flat = isinstance(value, dict) and all(isinstance(v, list) for v in value.values())
    if flat:
        inner = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=1000)
        made = f"{name}: {inner}"
    else:
        dumper = FlowLists if isinstance(value, dict) else yaml.SafeDumper
        made = yaml.dump({name: value}, Dumper=dumper, sort_keys=False, width=96 - column)
    return [" " * column + line for line in made.splitlines()]
