"""Names of public classes are nouns made of words that the glossary explains, or of plain ones."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("predictor", "search", "shardopt")

PLAIN = """
additive alternative annotation answer arch argument array assignment autograd balancer bandwidth
bench bound budget by byte calibration call case cause cell change choice chunk clock column
command comparison compute config console constant constraint cost count cpu csv cuda curve data
dep device diff difference dist document embedding empirical error escaping event excess
explanation fact factor feasibility feature file fit flag flow format goal greedy hardware head
hint home host id imitation index indices info input instruction inter item job kernel key kind
layer line linear list liveness lookup machine mapping match matrix measurement member memory
minimum model module mover neighbourhood node number occupancy of op operand optimizer oracle
origin out outcome output overhead package packer pair parameter partition path piece place
placement pool prediction problem program progress random rank ratio reader reading recommender
record recorder recording repeat report result role room row rule run sample sampler saver scale
scaling schema score scorer searcher section selection server setting shape shardopt size slot
solution source span spec split start state statistic stop storage subset sum summary swap system
table tensor time timer to total training transpose tree tuning type uniform usage user value
variant view visit wait watch weight word work
"""
"""Plain nouns of English and of programming, which mean in a name what they mean elsewhere."""
ADJECTIVES = """
allowed bad balanced calibrated captured chosen compared compiled costed died distinct drawn
ended every fastest fitted fixed free given growing hot infeasible joined known last left legal
limited loaded local low made matched measured missing native no outstanding parsed picked placed
predicted pruned ranked rated read readable recorded ruled saved shared simulated strict symbolic
traced tune tuned undecided uniform unmatched unreadable untimed untried unwritable without
"""
"""They need a noun: `LoadedPlan` says what it is, `Loaded` would not."""


def class_names() -> Iterator[tuple[str, str]]:
    """Public classes of the three packages: where, and name."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    yield path.relative_to(ROOT).as_posix(), node.name


def glossary_words() -> set[str]:
    """Every word of the first columns of the glossary's tables."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE)
    return {word for term in terms for word in [*words_of(term), *re.findall(r"\w+", term.lower())]}


def words_of(name: str) -> list[str]:
    """`HBMCap` is hbm and cap, `LookupGroups` is lookup and groups."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def forms(word: str) -> set[str]:
    """The word, and what it may be the plural of."""
    return {word, word.removesuffix("s"), word.removesuffix("es")}


def test_names_of_classes_are_nouns_that_are_explained() -> None:
    adjectives = set(ADJECTIVES.split())
    nouns = glossary_words() - adjectives | set(PLAIN.split())
    wrong = {}
    for place, name in class_names():
        words = [forms(word) for word in words_of(name)]
        if unknown := [min(word) for word in words if not word & (nouns | adjectives)]:
            wrong[f"{place}: {name}"] = f"unknown: {', '.join(unknown)}"
        elif not any(word & nouns for word in words):
            wrong[f"{place}: {name}"] = "needs a noun"
    assert not wrong, (
        "choose a noun, explain its words in docs/glossary.md, or add plain English to PLAIN:"
        f" {wrong}"
    )
