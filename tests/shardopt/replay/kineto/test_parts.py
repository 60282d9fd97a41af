"""Parts of reading a Kineto trace alone: the iteration, nesting, schemas, values, waits, damage."""

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")

from predictor.errors import InputError
from predictor.trace.events import CollectiveCall
from predictor.trace.read import load_traces
from shardopt.replay.generate import generate, programs_of
from shardopt.replay.kineto.arguments import Arguments
from shardopt.replay.kineto.inputs import (
    Autograd,
    UnreadableError,
    derive_value,
    fitting,
    read_inputs,
    value_of,
)
from shardopt.replay.kineto.items import Reader, last_step, spans
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from tests.predictor.trace.handmade import Recorder


def inputs(dims: list, types: list, values: list | None = None, strides: list | None = None):
    args = {"Input Dims": dims, "Input type": types}
    if values is not None:
        args["Concrete Inputs"] = values
    if strides is not None:
        args["Input Strides"] = strides
    return read_inputs(args)


def event(name: str, start: float, end: float, thread: int = 1, cat: str = "cpu_op", **args):
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, "ts": start,
        "dur": end - start, "args": args,
    }  # fmt: skip


def op(name: str, start: float, end: float, dims: list, types: list, values: list, **more):
    known = {"Input Dims": dims, "Input type": types, "Concrete Inputs": values}
    return event(name, start, end, **known, **more)


def relu(start: float, *shape: int):
    return op("aten::relu", start, start + 2, [list(shape)], ["float"], [""])


def program(folder: Path, events: list, **more) -> RankProgram:
    path = folder / "rank0.json"
    path.write_text(json.dumps({"traceEvents": events, **more}))
    (made,) = programs_of(load_traces([path], keep_args=True), Annotations())
    return made


def mark(number: int, start: float, end: float):
    return event(f"ProfilerStep#{number}", start, end, cat="user_annotation")


def test_the_last_whole_iteration(tmp_path: Path) -> None:
    """One that the end of the trace cuts off does not count."""
    events = [mark(n, 100 * n, 100 * n + 90) for n in range(4)]
    events += [relu(100 * n + 3 * i, n + 1) for n in range(4) for i in range(20 if n < 3 else 5)]
    made = program(tmp_path, events)
    assert {spec.shape for spec in made.made.values()} == {(3,)}
    assert len(made.calls) == 20
    assert any("ProfilerStep#2, of 4 steps" in note for note in made.notes)


@pytest.mark.parametrize(
    ("name", "given", "overload"),
    [
        ("aten::add", inputs([[2], [2], []], ["float", "float", "Scalar"]), "Tensor"),
        ("aten::add", inputs([[2], [], []], ["float", "Scalar", "Scalar"]), "Scalar"),
        ("aten::mean", inputs([[2], []], ["float", ""]), "default"),
        ("aten::mean", inputs([[2], [], [], []], ["float", "", "Scalar", ""]), "dim"),
        ("aten::view", inputs([[2], []], ["float", "ScalarList"], ["", "[2]"]), "default"),
        ("aten::view", inputs([[2], []], ["float", "Scalar"], ["", "3"]), "dtype"),
        ("aten::pow", inputs([[2], []], ["float", "Scalar"], ["", "2"]), "Tensor_Scalar"),
        ("aten::pow", inputs([[2], [2]], ["float", "float"]), "Tensor_Tensor"),
        ("aten::zeros", inputs([[]] * 5, ["", "", "", "", "Scalar"]), "default"),
        (
            "aten::to",
            inputs(
                [[2], *[[]] * 4], ["float", *["Scalar"] * 3, ""], ["", "7", "False", "False", ""]
            ),
            "dtype",
        ),
        (
            "aten::max",
            inputs([[2], [], []], ["float", "Scalar", "Scalar"], ["", "0", "True"]),
            "dim",
        ),
        ("aten::index", inputs([[4], []], ["float", ""]), "Tensor"),
        (
            "aten::split",
            inputs([[4], [], []], ["float", "ScalarList", "Scalar"], ["", "[1, 3]", "0"]),
            "sizes",
        ),
    ],
)
def test_overloads(name: str, given, overload: str) -> None:
    schema = fitting(name, given)
    assert schema is not None
    assert schema.overload == overload


def test_no_overload_takes_what_is_none_of_its_own() -> None:
    assert fitting("aten::mm", inputs([[2, 2], []], ["float", "Scalar"])) is None
    assert fitting("aten::mm", inputs([[2, 2]] * 4, ["float"] * 4)) is None
    assert fitting("aten::relu", inputs([[2, 2]], ["TensorList"])) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1.", 1.0), ("True", True), ("[1, -2]", (1, -2)), ("[]", ()),
        ("[True, False]", (True, False)), ("-0.5", -0.5), ("1e-05", 1e-05),
        ("", None), ("[1, x]", None), ("tanh", None), (3, None),
    ],
)  # fmt: skip
def test_values(text: object, value: object) -> None:
    assert value_of(text) == value
    assert type(value_of(text)) is type(value)


@pytest.mark.parametrize(
    "args",
    [
        {"Input Dims": [[-1]], "Input type": ["float"]},
        {"Input Dims": [[2.5]], "Input type": ["float"]},
        {"Input Dims": [[True]], "Input type": ["float"]},
        {"Input Dims": [[1] * 65], "Input type": ["float"]},
        {"Input Dims": [[1 << 30, 1 << 30]], "Input type": ["float"]},
        {"Input Dims": [[2, 2]], "Input type": ["float"], "Input Strides": [[1 << 60, 1]]},
        {"Input Dims": [[2]], "Input type": ["float", "float"]},
        {"Input Dims": 3, "Input type": ["float"]},
        {"Input Dims": [[2]], "Input type": ["Corp::Secret"]},
        {"Input Dims": ["x"], "Input type": ["float"]},
        {"Input Dims": [[[2], ["x"]]], "Input type": ["TensorList"]},
    ],
)
def test_sizes_that_no_tensor_has(args: dict) -> None:
    with pytest.raises(UnreadableError):
        read_inputs(args)


def test_values_that_shapes_force() -> None:
    def of(op: str, parameter: str, kind: str = "int", other: Autograd | None = None, **shapes):
        named = {name: inputs([list(s)], ["float"])[0] for name, s in shapes.items()}
        return derive_value(op, parameter, kind, named, other or Autograd())

    bias = Autograd({(16,), (8, 4), (4, 16)}, (8, 16))
    assert of("aten::sum", "dim", "int[1]?", bias, self=(8, 16)) == (0,)
    assert of("aten::sum", "dim", "int[1]?", Autograd({(1, 16)}), self=(8, 16)) == (0,)
    assert of("aten::sum", "dim", "int[1]?", Autograd({(8, 4)}, (8, 1)), self=(8, 4)) == (1,)
    assert of("aten::sum", "dim", "int[1]?", Autograd({(8, 4)}, (8,)), self=(8, 4)) == (1,)
    assert of("aten::sum", "dim", "int[1]?", Autograd({(8,)}, (8, 8)), self=(8, 8)) == (0,)
    assert of("aten::sum", "dim", "int[1]?", Autograd({(4, 4)}, (4,)), self=(4, 4)) is None
    assert of("aten::sum", "dim", "int[1]?", self=(8, 16)) is None
    assert of("aten::gather", "dim", self=(8, 16), index=(8, 3)) == 1
    assert of("aten::gather", "dim", self=(8, 16), index=(8, 16)) is None
    assert of("aten::gather", "dim", self=(8,), index=(2,)) == 0
    assert of("aten::index_add_", "dim", self=(8, 16), index=(3,), source=(8, 3)) == 1
    assert of("aten::index_copy_", "dim", self=(8, 8), index=(8,), source=(8, 8)) is None
    assert of("aten::native_layer_norm", "normalized_shape", "SymInt[]", weight=(5,)) == (5,)
    assert of("aten::convolution_backward", "output_mask", "bool[3]") == (True,) * 3
    assert of("aten::_softmax", "dim", self=(8, 16)) is None


def test_an_op_without_values_is_opened(tmp_path: Path) -> None:
    """A trace of 2022: `zeros` holds no size, what it calls does; `clamp` any number serves."""
    events = [
        event("aten::zeros", 0, 9, **{"Input Dims": [[]] * 5, "Input type": [""] * 5}),
        event("aten::empty", 1, 3, **{"Input Dims": [[]] * 6, "Input type": [""] * 6}),
        event("aten::zero_", 4, 8, **{"Input Dims": [[7]], "Input type": ["float"]}),
        event(
            "aten::clamp", 10, 12,
            **{"Input Dims": [[7], [], []], "Input type": ["float", "Scalar", ""]},
        ),
        event("aten::view", 13, 14, **{"Input Dims": [[7], []], "Input type": ["float", ""]}),
        event("aten::_softmax", 15, 17,
              **{"Input Dims": [[7, 2], [], []], "Input type": ["float", "Scalar", "Scalar"]}),
    ]  # fmt: skip
    made = program(tmp_path, events)
    assert [call.op for call in made.calls] == ["aten::zero_", "aten::clamp"]
    assert [(item.op, item.us) for item in made.left_out] == [("aten::_softmax", 2.0)]
    assert any("2 ops that move no data" in note for note in made.notes)


@pytest.mark.parametrize(
    ("copied", "places"),
    [("", ["cuda:0", "cuda:0"]), ("HtoD", ["cuda:0", "cpu"]), ("DtoH", ["cpu", "cuda:0"])],
)
def test_copies_from_and_to_the_host(copied: str, places: list[str]) -> None:
    given = inputs([[2], [2], []], ["float", "float", "Scalar"])
    schema = fitting("aten::copy_", given)
    assert schema is not None
    made, _ = Arguments(True, {}).of(schema, given, Autograd(), False, copied)
    assert [t.device for argument in made for t in argument.tensors()] == places


def test_clocks_of_whole_microseconds_nest() -> None:
    """A child may seem to end after its caller, and two may start at once."""
    recorder = Recorder()
    recorder.op("aten::linear", 10, 15)
    recorder.op("aten::addmm", 12, 16)
    recorder.op("aten::mul", 16, 16)
    recorder.step(0, 20)
    trace = recorder.trace()
    found = spans(trace, last_step(trace))
    assert [(s.event.name, len(s.children)) for s in found] == [
        ("aten::linear", 1),
        ("aten::mul", 0),
    ]


def exchange(start: float, name: str, **args):
    info = {"Collective name": name, "dtype": "Float", "Process Group Name": "7", **args}
    return event("record_param_comms", start, start + 5, **info)


GROUPS = {
    "distributedInfo": {
        "rank": 0, "world_size": 8,
        "pg_config": [{"pg_name": "7", "pg_size": 2, "ranks": [0, 4]}],
    }
}  # fmt: skip


def test_collectives_by_their_records(tmp_path: Path) -> None:
    listed = {"Process Group Ranks": "[0, 4]"}
    sizes = {"In msg nelems": 6, "Out msg nelems": 6, **listed}
    splits = {"In split size": "[2, 4]", "Out split size": "[3, 3]"}
    events = [
        exchange(0, "all_to_allv", **sizes, **splits),
        exchange(10, "_allgather_base", **{**sizes, "Out msg nelems": 12}),
        exchange(20, "allreduce", **sizes),
        exchange(30, "wait", **listed),
        exchange(40, "allreduce", **listed),
    ]
    made = program(tmp_path, events, **GROUPS)
    calls = [call for call in made.calls if call.is_collective]
    assert [c.op for c in calls] == [
        "c10d::alltoall_base_", "c10d::_allgather_base_", "c10d::allreduce_",
    ]  # fmt: skip
    assert [c.bytes for c in calls] == [24, 24, 24]
    assert made.groups[1] == (0, 4)
    assert calls[0].arguments[2:] == ((3, 3), (2, 4))
    shapes = [made.made[n].shape for n in calls[1].reads()]
    assert shapes == [(12,), (6,)]
    # each has memory of its own
    assert len({n for c in calls for n in c.reads()}) == 5
    assert [item.reason for item in made.left_out] == [
        "the trace does not hold a size of it that can be"
    ]


def test_an_op_that_holds_a_collective_is_opened(tmp_path: Path) -> None:
    told = {"Process Group Ranks": "[0, 4]", "In msg nelems": 6, "Out msg nelems": 6}
    events = [
        event("corp::sum_over_ranks", 0, 20),
        relu(1, 3),
        {**exchange(5, "allreduce", **told), "tid": 1},
    ]
    made = program(tmp_path, events, **GROUPS)
    assert [c.op for c in made.calls] == ["aten::relu", "c10d::allreduce_"]
    assert not made.left_out


def test_waits_keep_the_overlap_that_was_seen(tmp_path: Path) -> None:
    """A product ran beside the sum, another began after it."""
    recorder = Recorder()
    call = CollectiveCall("all_reduce", 400, None, 0)
    recorder.op("nccl:all_reduce", 10, 20)
    recorder.launch((12, 14), (15, 60), name="ncclKernel", stream=20, collective=call)
    recorder.op("aten::first", 21, 30)
    recorder.launch((22, 24), (25, 50))
    recorder.op("aten::second", 31, 40)
    recorder.launch((32, 34), (61, 70))
    recorder.step(0, 100)
    trace = recorder.trace()
    from shardopt.replay.kineto.imitate import _waits
    from shardopt.replay.kineto.items import Item

    items = [Item(span) for span in spans(trace, last_step(trace))]
    assert [item.span.event.name for item in items] == [
        "nccl:all_reduce", "aten::first", "aten::second",
    ]  # fmt: skip
    items[0] = Item(items[0].span, group=())
    assert _waits(items, ()) == {2: [0]}
    assert Reader(trace, [item.span for item in items]).on_gpu


def test_damaged_traces_are_read_or_refused(traces: Path, tmp_path: Path) -> None:
    """Whatever an op's inputs are, it is rebuilt or left out by name."""
    data = json.loads((traces / "rank0.kineto.json").read_text())
    ops = [e for e in data["traceEvents"] if e.get("cat") == "cpu_op"]
    odd = [
        None,
        -1,
        1 << 70,
        "x",
        [],
        [[]],
        {},
        [None],
        [-3],
        [[1, 2], [3]],
        ["Scalar"],
        True,
        1e99,
    ]
    keys = ("Input Dims", "Input type", "Input Strides", "Concrete Inputs", "Sequence number")
    for seed in range(15):
        chance = random.Random(seed)
        changed = json.loads(json.dumps(ops))
        for each in chance.sample(changed, 40):
            key = chance.choice(keys)
            known = each["args"].get(key)
            way = chance.randrange(4)
            if way == 0:
                each["args"].pop(key, None)
            elif way == 1 or not isinstance(known, list) or not known:
                each["args"][key] = chance.choice(odd)
            elif way == 2:
                known[chance.randrange(len(known))] = chance.choice(odd)
            else:
                each["name"] = chance.choice(
                    ["aten::no_such_op", "c10d::allreduce_", "nccl:x", "::"]
                )
        path = tmp_path / "rank0.json"
        path.write_text(json.dumps({"traceEvents": changed}))
        made = generate([path], tmp_path / "b")
        assert made.ops_total > 50
        assert all(item.op and item.reason for p in made.programs for item in p.left_out)


def test_traces_without_anything_to_rebuild(traces: Path, tmp_path: Path) -> None:
    text = (traces / "rank0.kineto.json").read_text()
    path = tmp_path / "rank0.json"
    path.write_text(text[: len(text) // 2])
    with pytest.raises(InputError, match=r"rank0\.json"):
        generate([path], tmp_path / "b")
    path.write_text(json.dumps({"traceEvents": [event("aten::relu", 0, 2)]}))
    with pytest.raises(InputError, match="record_shapes=True"):
        generate([path], tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_calls_take_tensors_in_turn_while_these_are_small(tmp_path: Path) -> None:
    """As the n-th layer would; what fills a cache anyway is one tensor."""
    large = 1 << 26
    events = [relu(0, 3), relu(10, 3), relu(20, large), relu(30, large)]
    events.append({**relu(40, 3), "name": "aten::sigmoid"})
    made = program(tmp_path, events)
    first, second, third, fourth, other = (call.reads()[0] for call in made.calls)
    assert len({first, second, third}) == 3
    assert fourth == third
    assert other == first


def test_what_events_say_is_kept_only_if_asked_for(traces: Path) -> None:
    """And once for all that say the same."""
    path = traces / "rank0.kineto.json"
    plain, kept = (load_traces([path], keep_args=keep).traces[0].host for keep in (False, True))
    assert all(e.args is None for e in plain)
    roots = [e.args for e in kept if e.name == "aten::sqrt" and e.args]
    assert all("Input Dims" in args for args in roots)
    assert len({id(args) for args in roots}) < len(roots)
