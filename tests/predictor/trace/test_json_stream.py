"""Streaming JSON gives what `json` gives, however the text is cut into chunks."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from predictor.errors import InputError
from predictor.trace.files import read_object, text_of

TEXT = st.text(st.characters(exclude_categories=("Cs",)))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def read(content: bytes, size: int) -> tuple[list[object], dict[str, object]]:
    items: list[object] = []
    chunks = (content[i : i + size] for i in range(0, len(content), size))
    rest = read_object(text_of(chunks), {"items": items.append}, "a.json")
    return items, rest


@example([0.5, -1e-05, 12], {}, 1, False)
@given(
    st.lists(VALUES, max_size=6),
    st.dictionaries(TEXT, VALUES, max_size=4),
    st.integers(1, 40),
    st.booleans(),
)
def test_equals_json(items: list[Any], rest: dict[str, Any], size: int, indented: bool) -> None:
    rest.pop("items", None)
    document = {**rest, "items": items, "after": 12345}
    text = json.dumps(document, indent=2 if indented else None, ensure_ascii=False)
    got, others = read(text.encode(), size)
    assert got == items
    assert others == {**document, "items": len(items)}


def test_an_array_alone_counts_as_the_first_member() -> None:
    assert read(b"[1, 2]", 3) == ([1, 2], {"items": 2})


def test_what_is_no_array_is_kept() -> None:
    assert read(b'{"items": 7}', 100) == ([], {"items": 7})


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("plan", "starts with 'p'"),
        ('{"items": [1, 2', "cut off"),
        ('{"items": [1, 2]', "cut off"),
        ('{"items": [{"a": "b', "not JSON"),
        ('{"items": [1 2]}', "expected ',' or ']', at character 13"),
        ('{"items": [1,,2]}', "expected a value"),
        ("{1: 2}", "expected the name of a member"),
        ('{"a" 2}', "expected ':'"),
        ("{} {}", "more text after the end"),
    ],
)
def test_broken(text: str, words: str, size: int) -> None:
    with pytest.raises(InputError, match=words) as caught:
        read(text.encode(), size)
    assert str(caught.value).startswith("a.json: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_what_python_cannot_hold(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(text.encode(), 1 << 18)


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert read(b'{"items": ["\xff\xfea\tb"]}', 4)[0] == ["\ufffd\ufffda\tb"]
