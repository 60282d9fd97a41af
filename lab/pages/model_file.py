"""docs/model_file.md: every key of the model file, from its schema (`shardopt.config.schema`).

model_file.md beside this file has the words around the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.pages.tables import table_head
from shardopt.config.distributions import KINDS
from shardopt.config.schema import (
    ConstraintsSection,
    CsvSection,
    DcnSection,
    DenseSection,
    FeatureSection,
    HistogramSection,
    LengthSharesSection,
    MeasuredDenseSection,
    MeasuredSection,
    ModelSection,
    OpsSection,
    QCommSection,
    ReplicaGroupsSection,
    Section,
    StatsSection,
    TableSection,
    WindowsSection,
    ZipfSection,
    allowed_words,
    known_keys,
)

SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("The file", ModelSection),
    ("`tables`: a list", TableSection),
    ("`tables: {csv: tables.csv}`", CsvSection),
    ("`features` of a table: a list", FeatureSection),
    ("`constraints` of a table", ConstraintsSection),
    ("`index_distribution: {zipf: ...}`", ZipfSection),
    ("`index_distribution: {file: ...}`", StatsSection),
    ("`index_distribution: {files: ...}`", WindowsSection),
    ("`index_distribution: {reuse_histogram: ...}`", HistogramSection),
    ("`dense`: a DLRM", DenseSection),
    ("`interaction: {dcn_v2: ...}`", DcnSection),
    ("`dense: {ops: ...}`", OpsSection),
    ("`dense: {measured: ...}`", MeasuredDenseSection),
    ("`measured`", MeasuredSection),
    ("`length_shares` of `dense`", LengthSharesSection),
    ("`qcomm`", QCommSection),
    ("`replica_groups`", ReplicaGroupsSection),
)
"""Every mapping of a model file, in the order of the page."""
FORMS = {
    "index_distribution": KINDS,
    "interaction": "dot, concat, {dcn_v2: {layers: 3, low_rank_dim: 512}}",
    "dense": "one of the three forms below",
}
"""Keys whose form decides which section they are, and the forms."""


def model_file_text() -> str:
    """Return the page."""
    head = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    lines = (line for title, section in SECTIONS for line in _section(title, section))
    return "\n".join([head, *lines]).rstrip("\n") + "\n"


def _section(title: str, section: type[Section]) -> Iterator[str]:
    yield f"## {title}\n"
    yield f"{' '.join((section.__doc__ or '').split())}\n"
    yield from table_head("key", "allowed", "default", "what it is")
    fields = zip(known_keys(section), section.model_fields.values(), strict=True)
    for key, info in fields:
        words = info.description or section.about[key]
        allowed = FORMS.get(key) or allowed_words(info.annotation, info.metadata)
        yield f"| `{key}` | {allowed} | {_default(info)} | {_sentence(words)} |"
    yield ""


def _default(info: Any) -> str:
    if info.is_required():
        return "required"
    value = info.default
    if value is None or isinstance(value, Section):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _sentence(words: str) -> str:
    return words[:1].upper() + words[1:]
