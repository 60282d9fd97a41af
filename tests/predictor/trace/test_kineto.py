"""Kineto traces of several schema versions."""

import json
import tracemalloc
from pathlib import Path

import pytest

from predictor.errors import InputError
from tests.predictor.trace.synthetic import OLD, OLDEST, RECENT, kineto, read_kineto, write


@pytest.mark.parametrize("schema", [RECENT, OLD, OLDEST])
@pytest.mark.parametrize("start", [1_694_128_201_429_795, 4458676522690.655])
@pytest.mark.parametrize("name", ["rank1.json", "worker1.pt.trace.json.gz"])
def test_every_schema_says_the_same(tmp_path: Path, schema: str, start: float, name: str) -> None:
    trace = read_kineto(write(tmp_path, name, kineto(1, schema=schema, start_us=start)))
    assert (trace.rank, trace.world_size) == (1, None if schema == OLDEST else 2)
    assert trace.device_name == "Some GPU"
    assert [s.name for s in trace.steps] == ["ProfilerStep#3", "ProfilerStep#4"]
    assert trace.steps[0].end_us == trace.steps[1].start_us
    assert [e.name for e in trace.device if e.kind == "memcpy"] == ["Memcpy DtoH"] * 2
    assert [e.size_bytes for e in trace.device if e.kind == "memcpy"] == [64, 64]
    calls = [e.collective for e in trace.device if e.collective]
    assert [(c.op, c.size_bytes, c.order) for c in calls] == [
        ("all_reduce", 4000, 0),
        ("all_reduce", 4000, 1),
    ]
    assert {c.group for c in calls} == ({(0, 1)} if schema == RECENT else {None})
    launches = {e.correlation for e in trace.host if e.kind == "runtime"}
    assert launches == {e.correlation for e in trace.device}
    product = next(e for e in trace.host if e.name == "aten::mm")
    assert product.shapes == ((10, 10), (10, 10))
    assert product.dtypes == ("float", "float")


@pytest.mark.parametrize(
    "name",
    [
        "et_3.json",
        "dlrm_eg_3.json",
        "x_rank3.json",
        "worker3_step_12.1694.pt.trace.json",
        "Rank-3.json",
    ],
)
def test_rank_from_the_name(tmp_path: Path, name: str) -> None:
    assert read_kineto(write(tmp_path, name, kineto(schema=OLDEST))).rank == 3


def test_launched_before_the_trace_count_backwards(tmp_path: Path) -> None:
    document = kineto(schema=OLD)
    first = next(e for e in document["traceEvents"] if e["name"].startswith("ncclKernel"))
    launch = first["args"]["correlation"]
    document["traceEvents"] = [
        e
        for e in document["traceEvents"]
        if e.get("cat") != "cuda_runtime" or e["args"]["correlation"] != launch
    ]
    trace = read_kineto(write(tmp_path, "a.json", document))
    assert [e.collective.order for e in trace.device if e.collective] == [-1, 0]
    assert any("1 collectives without a size" in note for note in trace.notes)


def test_groups_from_the_description_of_the_job(tmp_path: Path) -> None:
    document = kineto()
    document["distributedInfo"]["pg_config"] = [
        {"pg_name": "9", "pg_size": 2, "ranks": [4, 6]},
        {"pg_name": "0", "pg_size": 3, "ranks": []},
        {"pg_name": ["odd"]},
        7,
    ]
    for number, event in enumerate(document["traceEvents"]):
        args = event.get("args", {})
        if "Process Group Ranks" in args:
            del args["Process Group Ranks"]
            args["Process Group Name"] = "9" if number < 16 else "0"
    trace = read_kineto(write(tmp_path, "a.json", document))
    assert [e.collective.group for e in trace.device if e.collective] == [(4, 6), (0, 1, 2)]


def test_uneven_splits(tmp_path: Path) -> None:
    document = kineto()
    for event in document["traceEvents"]:
        if "Collective name" in event.get("args", {}):
            event["args"] |= {
                "Collective name": "all_to_allv",
                "In split size": "[900, 100]",
                "Out split size": "[900, 5]",
                "Out msg nelems": 905,
            }
    trace = read_kineto(write(tmp_path, "a.json", document))
    call = next(e.collective for e in trace.device if e.collective)
    assert call.op == "all_to_all"
    assert (call.send_bytes, call.receive_bytes) == ((3600, 400), (3600, 20))
    assert (call.size_bytes, call.output_bytes) == (4000, 3620)


def test_memory_stays_below_that_of_the_document(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", kineto(steps=300))
    peaks = []
    for reader in (read_kineto, lambda p: json.loads(p.read_bytes())):
        tracemalloc.start()
        events = reader(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert events
    assert peaks[0] < 0.7 * peaks[1]  # the records and the text, never the events as JSON


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"traceEvents": []}, "no host or device events among 0"),
        ({"traceEvents": {}}, "no host or device events"),
        ([], "no host or device events"),
    ],
)
def test_nothing_to_use(tmp_path: Path, document: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_kineto(write(tmp_path, "a.json", document))
