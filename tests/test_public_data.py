"""The excerpts of public tables: small, and what their script cuts out of the full tables."""

from __future__ import annotations

from tests.data.excerpt import excerpts
from tests.public_data import EXCERPTS, FULL, needs_public_data

MOST_BYTES = 480_000


def test_the_excerpts_are_small_and_their_sources_are_named() -> None:
    readme = (EXCERPTS.parent / "README.md").read_text(encoding="utf-8")
    files = sorted(EXCERPTS.iterdir())
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    assert not [path.name for path in files if f"`{path.name}`" not in readme]


@needs_public_data
def test_the_excerpts_are_cut_from_the_full_tables() -> None:
    found = excerpts(FULL)
    assert {path.name for path in EXCERPTS.iterdir()} == set(found)
    for name, text in found.items():
        assert (EXCERPTS / name).read_text(encoding="utf-8") == text, name
