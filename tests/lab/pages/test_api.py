"""The index of the Python API has every name that users import."""

from __future__ import annotations

import ast

import pytest

import shardopt
from lab.pages.api import PACKAGES, api_text, definition, public_names

NAMES = [(package, name) for package in PACKAGES for name in public_names(package)]


def test_the_names_are_those_of_the_package() -> None:
    assert {*public_names("shardopt"), "__version__"} == {*shardopt.__all__}


@pytest.mark.parametrize(("package", "name"), NAMES, ids=lambda part: part)
def test_every_name_is_described(package: str, name: str) -> None:
    definition_ = definition(public_names(package)[name], name)
    words = ast.get_docstring(definition_)
    assert words
    text = api_text()
    _, own, entry = text.partition(f"### {package}.{name}\n")
    if own:
        assert words.splitlines()[0].replace("``", "`") in entry.partition("\n### ")[0]
    else:
        assert f"`{name}`: as `shardopt.{name}`." in text


def test_a_call_has_its_parameters_and_what_they_are() -> None:
    _, _, entry = api_text().partition("### shardopt.plan\n")
    entry = entry.partition("\n### ")[0]
    assert "    gpus: int | None=None,\n" in entry
    assert "- `gpus`: number of ranks." in entry
    assert "- `InfeasibleError`: no plan fits." in entry
