"""The reference of the model file has every key that its schema takes."""

from __future__ import annotations

import pytest

from lab.pages.model_file import SECTIONS, model_file_text
from shardopt.config import schema
from shardopt.config.schema import Section, TableSection, known_keys


def test_every_section_of_the_schema_is_on_the_page() -> None:
    sections = {
        kind
        for kind in vars(schema).values()
        if isinstance(kind, type) and issubclass(kind, Section)
    }
    assert sections - {Section} == {section for _, section in SECTIONS}


@pytest.mark.parametrize("section", [of for _, of in SECTIONS], ids=lambda of: of.__name__)
def test_every_key_says_what_it_is(section: type[Section]) -> None:
    described = {
        key: info.description or section.about.get(key)
        for key, info in zip(known_keys(section), section.model_fields.values(), strict=True)
    }
    assert all(described.values())
    assert section.about.keys() <= described.keys()


def test_a_line_has_what_the_schema_allows() -> None:
    lines = {line.split(" | ")[0]: line for line in model_file_text().splitlines()}
    assert "`sum`, `mean`, `none` | `sum`" in lines["| `pooling`"]
    assert "| required |" in lines["| `num_embeddings`"]
    assert "number above 0 to 1 |" in lines["| `cache_load_factor`"]
    assert "list: `data_parallel`" in lines["| `sharding_types`"]
    assert "list: whole number, 0 to 10^9; each once" in lines["| `ranks`"]
    assert "| list: mapping below | required |" in lines["| `features`"]
    assert "whole number, 1 to 10^12" in lines["| `num_embeddings`"]
    assert TableSection.about["module"][1:] in lines["| `module`"]
