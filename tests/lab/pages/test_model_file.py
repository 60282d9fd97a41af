"""The reference of the model file has every key that its classes take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from lab.pages.model_file import SECTIONS, model_file_text
from predictor.section import Section, keys_of
from shardopt.config.model import ModelFile


def sections_in(kind: Any) -> Iterator[type[Section]]:
    """The sections that an annotation and the keys of those sections hold."""
    if isinstance(kind, type) and issubclass(kind, Section):
        yield kind
        for key in keys_of(kind).values():
            yield from sections_in(key.kind)
    for part in get_args(kind):
        yield from sections_in(part)


def test_every_section_of_a_model_file_is_on_the_page() -> None:
    assert {*sections_in(ModelFile)} <= {section for _, section in SECTIONS}


@pytest.mark.parametrize("section", [section for _, section in SECTIONS], ids=lambda s: s.__name__)
def test_every_key_says_what_it_is(section: type[Section]) -> None:
    assert all(key.about for key in keys_of(section).values())


def test_a_line_has_what_a_key_allows() -> None:
    lines = {line.split(" | ")[0]: line for line in model_file_text().splitlines()}
    assert "`sum`, `mean`, `none` | `sum`" in lines["| `pooling`"]
    assert "| required |" in lines["| `num_embeddings`"]
    assert "number above 0 to 1 |" in lines["| `cache_load_factor`"]
    assert "list: `data_parallel`" in lines["| `sharding_types`"]
    assert "list: whole number, 0 to 10^9; each once" in lines["| `ranks`"]
    assert "| list: mapping below | required |" in lines["| `features`"]
    assert "whole number, 1 to 10^12" in lines["| `num_embeddings`"]
    assert "| one of the three forms below | required |" in lines["| `dense`"]
