"""What a planner found, and its line."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torchrec")


from tests.shardopt.torchrec.hook_models import (
    SHARDERS,
    Model,
    factors,
    planner,
)


def test_what_callbacks_change_is_in_what_was_found() -> None:
    def to_rank_0(options: list[Any]) -> list[Any]:
        for option in options:
            if option.name == "a":
                option.sharding_type, option.partition_by = "table_wise", "device"
                option.shards = option.shards[:1]
                option.shards[0].size, option.shards[0].offset = [100_000, 64], [0, 0]
                option.shards[0].rank = 0
        return options

    told = factors(a=20.0, b=2.0)
    told["a"].sharding_types = ["row_wise"]
    made = planner(constraints=told, callbacks=[to_rank_0])
    made.plan(Model(), SHARDERS)
    found = made.found
    assert found.changed == ("a",)
    assert found.plan.tables["a"].sharding_type == "table_wise"
    assert found.prediction.iteration_ms != found.result.best.iteration_ms


@pytest.mark.slow
def test_without_logging_set_up_one_line_says_what_was_found() -> None:
    script = (
        "from tests.shardopt.torchrec.hook_models import SHARDERS, Model, planner\n"
        "planner().plan(Model(), SHARDERS)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
    )
    (line,) = [x for x in done.stderr.splitlines() if "predicted" in x]
    assert re.search(
        r"predicted [\d.]+ ms per iteration on 4 x a100-80gb \(90 %: .* ms\); "
        r"TorchRec's plan takes [\d.]+ ms \([\d.]+x slower\); "
        r"(at most [\d.]+|less than 0\.1) % from the best possible; constants: \w+",
        line,
    )


def test_the_second_planner_takes_the_answer_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, made = planner(), planner()
    plan = str(first.plan(Model(), SHARDERS))
    monkeypatch.setattr("shardopt.torchrec.planning.setting.solve", None)
    assert str(made.plan(Model(), SHARDERS)) == plan
    assert made.found is not None
    assert first.found is not None
    assert made.found.result == first.found.result
