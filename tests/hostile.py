"""Values that do not belong where they are put; documents and bytes that are damaged by them."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

NUMBERS = (
    0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, -(2**70), 10**59, 0.5, -0.5, 1e-300, 1e300, math.inf,
    -math.inf, math.nan, True, False,
)  # fmt: skip
TEXTS = (
    "", "x", " ", "\x00", "\x1b[31m", "\x9b", "\u202e", "\ud800", "a" * 5000, "é", "名", "main",
    "ops", "lambda", "t", "work", "torch", "__name__", "../x", "/dev/zero", "-1", "nan", "1e999",
    "a\nb", "a\rb", '"', "'''", '"""', "\\", "{", "%s", "{x}", "<b>", "[red]x[/red]", "aten::add",
    "fused_uvm_caching", "row_wise", "data_parallel", "column_wise", "grid_shard", "ebc/users",
)  # fmt: skip


def scalar(rng: random.Random) -> Any:
    """A number, a text or nothing."""
    return rng.choice((rng.choice(NUMBERS), rng.choice(TEXTS), None))


def junk(rng: random.Random) -> Any:
    """A value that does not belong where it is put."""
    kind = rng.randrange(6)
    if kind == 0:
        return [scalar(rng) for _ in range(rng.randrange(4))]
    if kind == 1:
        return {str(rng.choice(TEXTS)): scalar(rng) for _ in range(rng.randrange(3))}
    return scalar(rng)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in list(items):
        yield value, key
        yield from places(inner)


def mutate(
    rng: random.Random,
    document: Any,
    most: int = 3,
    value: Callable[[random.Random], Any] = junk,
) -> Any:
    """The document after a few replacements, deletions, copies and renamings."""
    document = copy.deepcopy(document)
    for _ in range(rng.randint(1, most)):
        found = list(places(document))
        if not found:
            return value(rng)
        where, key = rng.choice(found)
        how = rng.randrange(5)
        if how == 0:
            del where[key]
        elif how == 1 and isinstance(where, list):
            where.append(copy.deepcopy(where[key]))
        elif how == 1:
            where[str(rng.choice(TEXTS))] = where.pop(key)
        else:
            where[key] = value(rng)
    return document


def damage(rng: random.Random, content: bytes, head: int) -> bytes:
    """Some bytes replaced, put in or cut off, mostly in the head."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(min(len(content), head) if rng.random() < 0.8 else len(content))
        some = rng.randbytes(rng.randint(1, 4))
        new = rng.choice((some, b"9" * 19, b"(", b"'", b"-", b"\n", b""))
        keep = at if rng.random() < 0.3 else at + len(new)
        content = content[:at] + new + content[keep:] or b"x"
        if rng.random() < 0.1:
            content = content[: rng.randrange(len(content)) + 1]
    return content
