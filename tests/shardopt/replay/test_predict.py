"""Predictions of generated benchmarks: listed ops, what has no kernel model, ranks."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torchrec")

from torch._subclasses.fake_tensor import FakeTensorMode

import shardopt.replay
from predictor.cost.collectives import Collectives
from predictor.cost.ops.cpu_ops import VIEW, Caches, OpModels, OpRow, kind_and_sizes, reuse_bytes
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.iteration.op_graph import op_graph, rank_times
from predictor.iteration.timeline import simulate
from predictor.model.op_calls import OpCall
from predictor.model.topology import Topology
from shardopt.replay.generate import generate
from shardopt.replay.op_list import list_ops
from shardopt.replay.predict import collective_ms, group_calls, list_ranks, predict, stored_models
from shardopt.torchrec.capture.recorder import Recorder
from tests.quick import quick_first
from tests.shardopt.replay.captured import capture, transformer_step

MODELS = OpModels({"relu c>1": np.array([0.5, *[0.0] * 6])}, Caches(1e6, 1e7), op_ms=0.25)


RELU = ["relu c>1", [1, 8, 8, 0], [64.0, *[0.0] * 11]]
GELU = ["gelu c>1", *RELU[1:]]


def listed(calls: list[list[Any]], *events: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Of a rank; calls as (events before, op, recorded us, ops)."""
    return {"calls": calls, "events": [*events], "left_out": [], **more}


def test_recorded_times_are_used_for_calls_without_a_model() -> None:
    view = [f"{VIEW} t", [], [0.0] * 12]
    of = listed(
        [
            [0, "aten::relu", 9.0, [RELU]],
            [0, "aten::gelu", 7000.0, [GELU, RELU]],
            [1, "corp::op", None, []],
            [1, "aten::relu", 1.0, [RELU]],
            [1, "aten::t", 500.0, [view]],
        ],
        {"kind": "barrier", "group": [], "bytes": 0},
        left_out=[["aten::gone", 2000.0]],
    )
    times = rank_times(group_calls(of), MODELS)
    assert times.segments_ms == pytest.approx((0.75 + 7.0, 0.75 + 0.5))
    assert times.recorded_ms == 7.5
    found = {name: us for name, _, us in times.without_model}
    assert found == {"aten::gelu": 7000.0, "corp::op": None, "aten::gone": 2000.0, "aten::t": 500.0}


def test_equal_calls_lie_together_and_keep_their_times() -> None:
    of = listed([[0, "aten::relu", 9.0, [ops]] for ops in (RELU, RELU, GELU)])
    rank = group_calls(of, [4000.0, 2000.0, 1000.0])
    assert [(call.count, call.us, call.ms) for call in rank.calls] == [
        (2, 18.0, 6.0),
        (1, 9.0, 1.0),
    ]
    assert rank.calls[0].rows[0].count == 2
    assert rank.calls[0].rows[0].reuse[0] == 128.0


def two_ranks(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> tuple[Any, Any]:
    """The graph of ranks of one call of 0.75 ms before, and one after their events."""
    ranks = []
    for events, extra in ((first, 0), (second, 4)):
        calls = [[0, "aten::relu", 1.0, [RELU] * (1 + extra)], [0, "c10d::x", 1.0, None]]
        calls.append([len(events), "aten::relu", 1.0, [RELU]])
        ranks.append(group_calls(listed(calls, *events)))
    topology = Topology.uniform(2, hbm_bytes=1 << 30, ddr_bytes=1 << 30)
    collectives = Collectives(load_hardware("cpu-gloo"), topology)
    times = [rank_times(of, MODELS) for of in ranks]
    graph = op_graph(times, ranks, lambda starts: collective_ms(starts, collectives), 2)
    return graph, collectives


def test_ranks_meet_in_collectives() -> None:
    sent = {"kind": "allreduce_", "group": [], "bytes": 4096}
    (graph, missing), collectives = two_ranks([sent, {"waits_for": 0}], [sent])
    assert not missing
    sync = float(collectives.all_reduce(np.float64(4096)))
    # the first rank waits for the second, of five times as many ops, before its last op
    assert simulate(graph).iteration_ms[0] == pytest.approx(5 * 0.75 + sync + 0.75)
    (graph, missing), _ = two_ranks([sent | {"kind": "barrier"}], [sent | {"kind": "barrier"}])
    assert missing == {"barrier": 1}
    with pytest.raises(InputError, match="same collectives"):
        two_ranks([sent], [sent, sent])


@pytest.mark.slow
def test_ops_are_those_of_the_step(tmp_path: Path) -> None:
    """A benchmark of a step, listed over fake tensors, has the ops of the step's own list."""
    generate([capture(transformer_step(), tmp_path / "traces")], tmp_path / "b")
    result = predict(tmp_path / "b", "cpu-gloo")
    assert result["without_law"] == {}
    assert result["recorded_share"] == 0
    models = stored_models(1)
    with FakeTensorMode():
        step = transformer_step()
        with Recorder() as recorder:
            step()
    recorded = [of.call for of in recorder.recording.calls]
    listed = [
        OpRow(*kind_and_sizes(call), tuple(reuse))
        for call, reuse in zip(recorded, reuse_bytes(recorded), strict=True)
    ]
    own = [row for row in listed if row.kind != VIEW]
    rank = group_calls(list_ranks(tmp_path / "b")[0])
    calls = [row for call in rank.calls for row in call.rows if not row.kind.startswith(VIEW)]
    assert sum(row.count for row in calls) == sum(row.count for row in own)
    assert models.rows_ms(calls) == pytest.approx(models.rows_ms(own), rel=0.05)


def test_profiles_of_gpus_and_folders_without_data(tmp_path: Path, traces: Path) -> None:
    generate([traces], tmp_path / "b")
    with pytest.raises(InputError, match="give cpu-gloo"):
        predict(tmp_path / "b", "h100-sxm")
    with pytest.raises(InputError, match="no benchmark"):
        predict(tmp_path, "cpu-gloo")


@pytest.mark.slow
def test_convolutions_and_pooling_have_models(tmp_path: Path, traces: Path) -> None:
    generate([traces], tmp_path / "b")
    result = predict(tmp_path / "b", "cpu-gloo")
    # `EmbeddingBag` is in no calibration model
    assert {name for name in result["without_law"] if "embedding_bag" not in name} == set()


def test_a_number_that_is_read_costs_a_call() -> None:
    assert not OpCall("_local_scalar_dense", (), ()).moves


SPY = "import pathlib; pathlib.Path({marker!r}).write_text('ran')\n"


@pytest.mark.slow
def test_no_code_of_the_folder_or_the_working_directory_runs(
    tmp_path: Path, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, marker = tmp_path / "b", tmp_path / "marker"
    generate([traces], folder)
    before = predict(folder, "cpu-gloo")
    spy = SPY.format(marker=str(marker))
    for name in ("numpy", "torch", "json", "runtime"):
        (tmp_path / f"{name}.py").write_text(spy)
        (folder / f"{name}.py").write_text(spy)
    for path in (folder / "benchmark.py", *(folder / "runtime").iterdir()):
        path.write_text(spy)
    monkeypatch.chdir(folder)
    assert predict(folder, "cpu-gloo") == before
    (folder / "benchmark.py").unlink()
    monkeypatch.chdir(tmp_path)
    assert predict(folder, "cpu-gloo") == before
    assert not marker.exists()


def test_a_program_alone_is_refused_with_how_to_get_the_data(tmp_path: Path, traces: Path) -> None:
    generate([traces], tmp_path)
    data = json.loads((tmp_path / "rank0.json").read_text())
    for call in data["calls"]:
        del call["arguments"]
    (tmp_path / "rank0.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match="bench generate"):
        list_ops(tmp_path)
    (tmp_path / "rank0.json").unlink()
    with pytest.raises(InputError, match=r"rank0\.json"):
        list_ops(tmp_path)
    (tmp_path / "data.json").unlink()
    with pytest.raises(InputError, match="bench generate"):
        predict(tmp_path, "cpu-gloo")


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """All that nested data hold, each as its container and its place there."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(items):
        yield data, key
        if isinstance(value, (dict, list)):
            yield from places(value)


@pytest.mark.parametrize(
    "attack", quick_first(2, ["torch.os.system('touch {}')", "t[10**9]", "device.type", -1])
)
def test_data_that_was_not_generated_is_refused_or_harmless(
    tmp_path: Path, traces: Path, attack: Any
) -> None:
    marker = tmp_path / "marker"
    generate([traces], tmp_path)
    path = tmp_path / "rank0.json"
    data = json.loads(path.read_text())
    data["calls"] = [call for call in data["calls"] if "keywords" in call][:2]
    assert data["calls"]
    data["parts"] = []
    if isinstance(attack, str):
        attack = attack.format(marker)
    for place, key in places(data["calls"]):
        before, place[key] = place[key], attack
        path.write_text(json.dumps(data))
        with suppress(InputError):
            list_ops(tmp_path)
        place[key] = before
    assert not marker.exists()


def test_nothing_evaluates_text() -> None:
    """The generated program is one that its user runs; no other text of a user's is."""
    wrong = re.compile(r"(?<![\w.])(?:exec|eval|compile)\(|pickle|marshal")
    sources = Path(shardopt.replay.__path__[0]).rglob("*.py")
    assert [path.name for path in sources if wrong.search(path.read_text())] == []
