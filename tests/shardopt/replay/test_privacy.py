"""Nothing of a user's is in a benchmark: planted wherever a trace has free text or numbers."""

import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from predictor.trace.execution import COMMS, GROUPS, ROOTS
from shardopt.replay.generate import Generated, generate
from tests.shardopt.replay.captured import SECRETS, capture, small_step

NUMBER = 4815162342
LEAK = re.compile(rf"leak\d+|{NUMBER // 100_000}\d{{5}}")
STRUCTURE = frozenset({"Input type", "Input Dims", "Input Strides", "Collective name", "dtype"})
"""Arguments of Kineto's events that say what an op takes."""


class Sower:
    """Gives each place a secret of its own, and counts them."""

    def __init__(self) -> None:
        self.numbers = count()

    def __call__(self) -> str:
        return f"/srv/leak{next(self.numbers)}/alice@node17"

    def all_of(self, value: Any, plain: frozenset[str] = frozenset()) -> Any:
        """A document with secrets for all its texts but those under the names that are kept."""
        if isinstance(value, str):
            return self()
        if isinstance(value, list):
            return [self.all_of(item, plain) for item in value]
        if isinstance(value, dict):
            return {k: v if k in plain else self.all_of(v, plain) for k, v in value.items()}
        return value

    def execution(self, data: dict[str, Any]) -> dict[str, Any]:
        data = self.all_of(data, frozenset({"nodes", "schema"})) | {self(): self(), "host": self()}
        data["schema"] += self()
        for node in data["nodes"]:
            self._node(node)
        return data

    def _node(self, node: dict[str, Any]) -> None:
        attrs = {a["name"]: a for a in node["attrs"]}
        for name, attr in attrs.items():
            if attr["type"] == "string" and name not in ("op_schema", "collective_name", "dtype"):
                attr["value"] = self()
        # Kineto names ops by this number: the same in both files
        attrs["rf_id"]["value"] += NUMBER
        node["attrs"].append({"name": self(), "type": "string", "value": self()})
        node["comment"] = self()
        op = bool(attrs["op_schema"]["value"])
        if node["name"] == GROUPS:
            config = json.loads(node["inputs"]["values"][0])
            node["inputs"]["values"][0] = json.dumps(self.all_of(config))
        elif node["name"] == COMMS:
            inputs = node["inputs"]
            texts = [i for i, kind in enumerate(inputs["types"]) if kind == "String"]
            # the first says which collective it is
            for i in texts[1:]:
                inputs["values"][i] = self()
        elif not op and not ROOTS.match(node["name"]):
            node["name"] = self()
        elif op:
            self._arguments(node)

    def _arguments(self, node: dict[str, Any]) -> None:
        inputs = node["inputs"]
        for i, kind in enumerate(inputs["types"]):
            if kind == "Device" and inputs["values"][i] != "<None>":
                inputs["values"][i] += ":" + self()
        (schema,) = (a for a in node["attrs"] if a["name"] == "op_schema")
        match node["name"]:
            case "aten::add_":
                inputs["values"][2] = NUMBER
            case "aten::item":
                node["outputs"]["values"] = [NUMBER]
            case "aten::detach":
                for name, value in (("values", self()), ("shapes", []), ("types", "String")):
                    inputs[name].append(value)
                inputs["strides"].append([])
            case "aten::ones":
                inputs["values"][1], inputs["types"][1] = self(), "String"
            case "aten::sqrt":
                schema["value"] = self()
            case "aten::lerp_":
                node["name"], schema["value"] = self(), f"not a schema of {self()}"

    def kineto(self, data: dict[str, Any]) -> dict[str, Any]:
        events = data.pop("traceEvents")
        data = self.all_of(data) | {"host_name": self(), "traceName": self()}
        data["distributedInfo"] = {
            **{"backend": self(), "rank": 0, "world_size": 1, "nccl_version": self()},
            "pg_config": [{"pg_name": self(), "pg_desc": self(), "ranks": [0]}],
        }
        for event in events:
            arguments = event.get("args", {})
            if "Record function id" in arguments:
                arguments["Record function id"] += NUMBER
            for key, value in arguments.items():
                if event["ph"] == "M" or (key not in STRUCTURE and key != "Concrete Inputs"):
                    arguments[key] = self.all_of(value)
            if event.get("cat") == "user_annotation":
                event["name"] = self()
            if event.get("cat") in ("cpu_op", "user_annotation"):
                arguments["Call stack"] = arguments["Host"] = self()
        frame = {"ph": "X", "cat": "python_function", "name": f"{self()}.py(7): {self()}"}
        started = next(e for e in events if e.get("cat") == "cpu_op")
        events.append({**frame, **{k: started[k] for k in ("pid", "tid", "ts", "dur")}, "args": {}})
        return {**data, "traceEvents": events}


@pytest.fixture(scope="module")
def step_of_a_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A step with collectives, on a group of one."""
    step = small_step()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def exchanging() -> None:
        step()
        sent, received = torch.ones(8), torch.empty(8)
        dist.all_reduce(sent)
        dist.all_to_all_single(received, sent)

    try:
        yield capture(exchanging, tmp_path_factory.mktemp("rank"))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def planted(step_of_a_rank: Path, tmp_path: Path) -> list[Path]:
    """The traces with secrets, in a place with secrets in its name."""
    sow, home = Sower(), tmp_path / "leak99"
    home.mkdir()
    execution = sow.execution(json.loads((step_of_a_rank / "rank0.et.json").read_text()))
    kineto = sow.kineto(json.loads((step_of_a_rank / "rank0.kineto.json").read_text()))
    paths = [home / f"leak98.{kind}.rank0.json" for kind in ("et", "kineto")]
    for path, data in zip(paths, (execution, kineto), strict=True):
        path.write_text(json.dumps(data))
    return paths


def assert_private(generated: Generated, folder: Path, *words: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        text = f"{path.relative_to(folder)} {path.read_text()}"
        assert not LEAK.search(text), (path.name, LEAK.findall(text)[:5])
        assert not [word for word in (*words, "alice", "node17") if word in text], path.name
    assert not [note for note in generated.notes if LEAK.search(note)]


def test_no_secret_of_a_trace_is_written(
    step_of_a_rank: Path, planted: list[Path], tmp_path: Path
) -> None:
    generated = generate(planted, tmp_path / "b")
    assert_private(generated, tmp_path / "b", *SECRETS, str(tmp_path))
    # the rest is there: what is planted leaves out no more than the ops whose texts it spoils
    unplanted = generate([step_of_a_rank], tmp_path / "whole")
    reasons = {item.reason for item in generated.programs[0].left_out}
    assert reasons == {
        "more arguments than its schema has",
        "not the schema of an op",
        "an enumeration with a value that is not known",
    }
    assert generated.ops_total == unplanted.ops_total
    (program,) = generated.programs
    assert {"c10d::allreduce_", "c10d::alltoall_base_"} <= {call.op for call in program.calls}
    assert program.groups == unplanted.programs[0].groups
    timed = sum(call.us is not None for call in program.calls)
    assert timed + len(program.left_out) >= sum(
        call.us is not None for call in unplanted.programs[0].calls
    )
    sections = {name for call in program.calls for name in call.section}
    assert sections
    assert all(re.fullmatch(r"annotation \d+", name) for name in sections)


def test_a_name_is_kept_only_if_asked(
    step_of_a_rank: Path, planted: list[Path], tmp_path: Path
) -> None:
    before, after = (
        {node["id"]: node["name"] for node in json.loads(path.read_text())["nodes"]}
        for path in (step_of_a_rank / "rank0.et.json", planted[0])
    )
    (annotation,) = (after[number] for number, name in before.items() if name == SECRETS[3])
    generate(planted, tmp_path / "b", keep_annotations=[annotation])
    text = (tmp_path / "b" / "benchmark.py").read_text()
    assert annotation in text
    assert set(LEAK.findall(text)) == set(LEAK.findall(annotation))
