"""docs/model_file.md: every key of the model file, from the classes that read it.

model_file.md beside this file has the words around the tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lab.pages.tables import table_head
from predictor.model.captured import CapturedDense
from predictor.model.dense_settings import LengthShares
from predictor.model.distribution import ReuseHistogram, Zipf
from predictor.model.topology import ReplicaGroups
from predictor.model.workload import (
    Constraints,
    DcnV2,
    DenseArch,
    DenseTimes,
    Feature,
    MeasuredDense,
    QComm,
    Table,
)
from predictor.section import Key, Section, keys_of
from shardopt.config.distributions import StatsFile, StatsWindows
from shardopt.config.model import ModelFile
from shardopt.config.tables_csv import CsvFile

SECTIONS: tuple[tuple[str, type[Section]], ...] = (
    ("The file", ModelFile),
    ("`tables`: a list", Table),
    ("`tables: {csv: tables.csv}`", CsvFile),
    ("`features` of a table: a list", Feature),
    ("`constraints` of a table", Constraints),
    ("`index_distribution: {zipf: ...}`", Zipf),
    ("`index_distribution: {file: ...}`", StatsFile),
    ("`index_distribution: {files: ...}`", StatsWindows),
    ("`index_distribution: {reuse_histogram: ...}`", ReuseHistogram),
    ("`dense`: a DLRM", DenseArch),
    ("`interaction: {dcn_v2: ...}`", DcnV2),
    ("`dense: {ops: ...}`", CapturedDense),
    ("`dense: {measured: ...}`", MeasuredDense),
    ("`measured`", DenseTimes),
    ("`length_shares` of `dense`", LengthShares),
    ("`qcomm`", QComm),
    ("`replica_groups`", ReplicaGroups),
)
"""Every mapping of a model file, in the order of the page."""


def model_file_text() -> str:
    """Return the page."""
    head = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    lines = (line for title, section in SECTIONS for line in _section(title, section))
    return "\n".join([head, *lines]).rstrip("\n") + "\n"


def _section(title: str, section: type[Section]) -> Iterator[str]:
    yield f"## {title}\n"
    first_paragraph = (section.__doc__ or "").split("\n\n")[0]
    yield f"{' '.join(first_paragraph.split())}\n"
    yield from table_head("key", "allowed", "default", "what it is")
    for name, key in sorted(keys_of(section).items(), key=lambda item: not item[1].required):
        yield f"| `{name}` | {key.allowed} | {_default(key)} | {key.about.rstrip('.')} |"
    yield ""


def _default(key: Key) -> str:
    if key.required:
        return "required"
    value = key.default
    if value in (None, "") or isinstance(value, Section):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
