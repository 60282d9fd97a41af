"""Report of a plan through TorchRec's statistics."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shardopt.torchrec import ShardoptPlanReporter, ShardoptStats
from tests.shardopt.torchrec.hook_models import SHARDERS, Model, planner

TABLE = "torchrec.distributed.planner.stats"
"""Logger of TorchRec's table."""


class Writer:
    """In the place of TensorBoard's."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
        self.scalars[tag] = scalar_value


def test_the_log_of_torchrecs_table_has_the_prediction_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = planner(scenarios="none")
    with caplog.at_level(logging.INFO, TABLE):
        hook.plan(Model(), SHARDERS)
    rows = [record.message for record in caplog.records if record.name == TABLE]
    torchrec_row = next(i for i, row in enumerate(rows) if "Planner Statistics" in row)
    our_row = next(i for i, row in enumerate(rows) if "shardopt" in row)
    assert torchrec_row < our_row
    prediction, text = hook.found.prediction, "\n".join(rows[our_row:])
    throughput = f"{4 * 512 / prediction.iteration_ms * 1e3:,.0f}"
    for words in (throughput, "a100-80gb", *prediction.breakdown):
        assert words in text
    assert len({len(row) for row in rows[our_row - 1 :]}) == 1, "one box, as TorchRec draws it"


def test_a_writer_takes_the_numbers() -> None:
    writer = Writer()
    hook = planner(stats=ShardoptStats(writer), scenarios="none")
    hook.plan(Model(), SHARDERS)
    prediction, scalars = hook.found.prediction, writer.scalars
    assert scalars["planner/iteration_ms"] == prediction.iteration_ms
    assert scalars["planner/samples_per_s"] == pytest.approx(
        4 * 512 / prediction.iteration_ms * 1e3
    )
    parts = {name: value for name, value in scalars.items() if "critical_path" in name}
    assert sum(parts.values()) == pytest.approx(prediction.iteration_ms)
    assert scalars["planner/lower_bound_ms"] <= prediction.iteration_ms
    assert 0 < scalars["planner/peak_memory_bytes"] < 80 * 2**30


def test_the_reporter_of_a_session_makes_new_statistics_for_every_sku() -> None:
    writers: dict[str, Any] = {}

    def writer_of(sku: str) -> Any:
        return writers.setdefault(sku, Writer())

    reporter = ShardoptPlanReporter(writer_of)
    stats = {sku: reporter.build_stats(None, sku) for sku in ("H100", "B200")}
    for sku, (ours,) in stats.items():
        assert isinstance(ours, ShardoptStats)
        assert ours.writer is writers[sku]
    assert stats["H100"] != stats["B200"]
