"""Programs as source: what the written lines call when they run."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.trace.read import TraceSet
from shardopt.replay.program.program import Call, RankProgram, Slot, TensorSpec, Term, Word
from shardopt.replay.write import HEADER, MAX_LINES, source_of, write

WORDS = {"torch.float32": "float32", "device": "the device", "cpu": "the host", "'sum'": "sum"}
Made = tuple[Any, ...]


class Recorder:
    """Stands for the runtime's ops: notes each call and gives what the program says it gives."""

    def __init__(self, program: RankProgram) -> None:
        self.calls: list[Made] = []
        self.gives = iter([call.outputs for call in program.calls])

    def _run(self, *arguments: Any, **keywords: Any) -> Any:
        self.calls.append((*arguments, keywords))
        outputs = tuple(map(_given, next(self.gives)))
        return outputs[0] if len(outputs) == 1 else outputs

    def __call__(self, name: str, overload: str) -> Any:
        return lambda *arguments, **kw: self._run(name, overload, list(arguments), **kw)

    def collective(self, kind: str) -> Any:
        return lambda *arguments, group: mock.Mock(
            wait=lambda: self.calls.append(("wait", kind)),
            sent=self._run(kind, "", list(arguments), group=group),
        )

    def forward(self, op: Any, *arguments: Any) -> Any:
        return op(*arguments)

    def backward(self, saved: Any, gradient: Any) -> Any:
        return self._run("backward", saved, gradient)


def _given(output: Any) -> Any:
    if isinstance(output, tuple):
        return [_given(item) for item in output]
    return f"tensor {output}"


def value_of(term: Term) -> Any:
    """Return the value of a term when the source runs."""
    if isinstance(term, tuple):
        return [value_of(item) for item in term]
    if isinstance(term, Slot):
        return f"tensor {term.number}"
    return WORDS[term.text] if isinstance(term, Word) else term


def wanted(program: RankProgram) -> list[Made]:
    return [
        (
            call.op,
            call.overload,
            [value_of(term) for term in call.arguments],
            {k: value_of(v) for k, v in call.keywords.items()},
        )
        for call in program.calls
    ]


def program_of(*calls: Call, tensors: int = 0) -> RankProgram:
    specs = {n: TensorSpec((2,), (1,), "float32", n) for n in range(tensors)}
    return RankProgram(0, list(calls), specs, {}, [], [])


def call(op: str, *terms: Term, gives: Made = (), overload: str = "default", **fields: Any) -> Call:
    section = fields.pop("section", ())
    return Call(op, overload, terms, fields.pop("keywords", {}), gives, section, 1, **fields)


def run(program: RankProgram) -> tuple[list[Made], dict[int, Any]]:
    """The calls that a written file makes, and the tensors that are left."""
    recorder = Recorder(program)
    names = {"": {}, "ops": {"Ops": lambda: recorder}, "run": {"main": None}}
    settings = {"cpu": "the host", "device": "the device", "stream": "the stream"}
    modules: dict[str, ModuleType] = {"torch": ModuleType("torch")}
    modules["torch"].float32 = "float32"  # type: ignore[attr-defined]
    for name, members in {**names, "settings": settings}.items():
        module = ModuleType(f"runtime.{name}".strip("."))
        vars(module).update(members)
        modules[module.__name__] = module
    space: dict[str, Any] = {"__name__": "written"}
    text = HEADER.format(who="rank 0", ranks=1) + source_of(program).body
    with mock.patch.dict(sys.modules, modules):
        exec(compile(text, "benchmark.py", "exec"), space)
    tensors = {n: f"tensor {n}" for n in program.made}
    works: dict[int, Any] = {}
    for section, part in space["ITERATION"]:
        assert section in {call_.section for call_ in program.calls}
        part(tensors, works)
    return recorder.calls, tensors


SECTIONS = [(), ("forward",), ("forward", "x²/y"), ('a "quoted" name',), ("tail\\", "two\nlines")]
"""Annotations, some of which Python reads otherwise."""


@st.composite
def programs(draw: st.DrawFn) -> RankProgram:
    """Ops on tensors that are there, in sections, freed after their last use."""
    live = [0, 1, 2]
    count = 3
    calls = []
    names = st.sampled_from(["aten::mm", "aten::add_Tensor", "corp::my_op", "aten::add"])
    texts = st.sampled_from(sorted(WORDS))
    for _ in range(draw(st.integers(1, 8))):
        simple = st.one_of(
            st.sampled_from(live).map(Slot),
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.booleans(),
            texts.map(Word),
            st.none(),
        )
        terms = st.one_of(simple, st.lists(simple, max_size=3).map(tuple))
        shape = draw(st.sampled_from([(), ("a",), ("a", "b"), (("a", "b"),), ("a", ("b", "c"))]))
        gives: list[Any] = []
        for item in shape:
            inner = len(item) if isinstance(item, tuple) else 1
            numbers = [count + i if draw(st.booleans()) else None for i in range(inner)]
            count += inner
            live += [n for n in numbers if n is not None]
            gives.append(tuple(numbers) if isinstance(item, tuple) else numbers[0])
        drawn = call(
            draw(names),
            *draw(st.lists(terms, max_size=4)),
            gives=tuple(gives),
            overload=draw(st.sampled_from(["default", "Tensor", "out"])),
            keywords=draw(st.dictionaries(st.sampled_from(["alpha", "dtype"]), terms)),
            section=draw(st.sampled_from(SECTIONS)),
        )
        freed = [n for n in live if n > 2 and draw(st.booleans())]
        drawn = replace(drawn, frees=tuple(freed))
        live = [n for n in live if n not in freed]
        calls.append(drawn)
    return program_of(*calls, tensors=3)


@given(programs())
@settings(max_examples=40)
def test_a_file_makes_the_calls_of_its_program(program: RankProgram) -> None:
    calls, tensors = run(program)
    assert calls == wanted(program)
    freed = {n for call_ in program.calls for n in call_.frees}
    given_ = {n for call_ in program.calls for n in call_.gives()} | set(program.made)
    assert {n for n, tensor in tensors.items() if tensor is not None} == given_ - freed


def test_sections_and_parts_count_ops() -> None:
    calls = [call("aten::mm", Slot(0), gives=(None,), section=("a",)) for _ in range(MAX_LINES + 5)]
    calls.append(call("aten::mm", Slot(0), gives=(None,), section=("b",)))
    source = source_of(program_of(*calls, tensors=1))
    assert [line[4:12] for line in source.body.splitlines() if line.startswith("    ((")] == [
        "(('a',),",
        "(('a',),",
        "(('b',),",
    ]
    last = MAX_LINES + 5
    assert source.parts == ((0, MAX_LINES), (MAX_LINES, last), (last, last + 1))


def test_collectives_are_waited_for_where_the_program_says() -> None:
    sent = call("c10d::allreduce_", (Slot(0),), overload="", keywords={"group": 0})
    product = call("aten::mm", Slot(0), gives=(1,), waits=(0,))
    program = program_of(sent, product, tensors=1)
    assert source_of(program).parts == ((0, 2),)
    calls, _ = run(program)
    assert calls == [
        ("allreduce_", "", [["tensor 0"]], {"group": 0}),
        ("aten::mm", "default", ["tensor 0"], {}),
        ("wait", "allreduce_"),
    ]


def test_backward_functions_take_what_the_forward_op_kept() -> None:
    program = program_of(
        call("fbgemm::lookup", Slot(0), gives=(1, 2), with_grad=True),
        call("backward of fbgemm::lookup", Slot(2), Slot(1), gives=(3,), overload=""),
        tensors=1,
    )
    calls, tensors = run(program)
    assert calls[1] == ("backward", "tensor 2", "tensor 1", {})
    assert tensors[3] == "tensor 3"


def test_ranks_of_one_program_share_a_file(tmp_path: Path) -> None:
    def rank(index: int, size: int) -> RankProgram:
        recorded = program_of(call("aten::view", Slot(0), (size, 2), gives=(1,)), tensors=1)
        return replace(recorded, rank=index)

    job = TraceSet((), ())
    names = write(tmp_path, [rank(0, 3), rank(1, 4), rank(2, 3)], [job], "uniform")
    assert names == ["benchmark.py", "benchmark_1.py"]
    assert "ranks 0, 2 of" in (tmp_path / "benchmark.py").read_text()
    files = [json.loads((tmp_path / f"rank{i}.json").read_text())["program"] for i in range(3)]
    assert files == ["benchmark.py", "benchmark_1.py", "benchmark.py"]
