"""Programs as source: what the written lines call when they run."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardopt.replay.program.program import (
    WITH_GRAD,
    Call,
    Number,
    RankProgram,
    Slot,
    TensorSpec,
    Term,
    Word,
)
from shardopt.replay.write import MAX_CALLS, Source, file_of, source_of

WORDS = {"torch.float32": "float32", "device": "the device", "cpu": "the host", "'sum'": "sum"}
Made = tuple[Any, ...]


class Recorder:
    """Stands for the runtime's ops: notes each call and gives what the program says it gives."""

    def __init__(self, program: RankProgram) -> None:
        self.calls: list[Made] = []
        self.gives = iter([call.outputs for call in program.calls if call.op != "wait"])

    def _run(self, *what: Any, **keywords: Any) -> Any:
        self.calls.append((*what, keywords))
        given = tuple(map(_given, next(self.gives)))
        return given[0] if len(given) == 1 else given

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
    """What a term is when the source runs."""
    if isinstance(term, tuple):
        return [value_of(item) for item in term]
    if isinstance(term, Slot):
        return f"tensor {term.number}"
    if isinstance(term, Word):
        return WORDS[term.text]
    return None if term is None else term.value


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


def program_of(*calls: Call, made: int = 0) -> RankProgram:
    specs = {n: TensorSpec((2,), (1,), "float32", n) for n in range(made)}
    return RankProgram(0, list(calls), specs, {}, [], [])


def call(op: str, *terms: Term, gives: Made = (), overload: str = "default", **kept: Any) -> Call:
    section = kept.pop("section", ())
    return Call(op, overload, terms, kept.pop("keywords", {}), gives, section, 1, **kept)


def run(
    program: RankProgram, source: Source, varying: dict[int, int], constants: list[Any]
) -> tuple[list[Made], dict[int, Any]]:
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
    with mock.patch.dict(sys.modules, modules):
        exec(compile(file_of(source, varying, "Title", 1), "benchmark.py", "exec"), space)
    tensors = {n: f"tensor {n}" for n in program.made}
    works: list[Any] = []
    for _, part in space["ITERATION"]:
        part(tensors, constants, works)
    return recorder.calls, tensors


@st.composite
def programs(draw: st.DrawFn) -> RankProgram:
    """Ops on tensors that are there, in sections, freed after their last use."""
    live = [0, 1, 2]
    count = 3
    calls = []
    names = st.sampled_from(["aten::mm", "aten::add_", "corp::my_op", "aten::add"])
    texts = st.sampled_from(sorted(WORDS))
    for _ in range(draw(st.integers(1, 8))):
        simple = st.one_of(
            st.sampled_from(live).map(Slot),
            st.integers().map(Number),
            st.floats(allow_nan=False, allow_infinity=False).map(Number),
            st.booleans().map(Number),
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
        made = call(
            draw(names),
            *draw(st.lists(terms, max_size=4)),
            gives=tuple(gives),
            overload=draw(st.sampled_from(["default", "Tensor", "out"])),
            keywords=draw(st.dictionaries(st.sampled_from(["alpha", "dtype"]), terms)),
            section=draw(st.sampled_from([(), ("forward",), ("forward", "x²/y")])),
        )
        freed = [n for n in live if n > 2 and draw(st.booleans())]
        made = replace(made, frees=tuple(freed))
        live = [n for n in live if n not in freed]
        calls.append(made)
    return program_of(*calls, made=3)


@given(programs(), st.data())
@settings(max_examples=40)
def test_a_file_makes_the_calls_of_its_program(program: RankProgram, data: st.DataObject) -> None:
    source = source_of(program)
    numbers = source.numbers
    positions = range(len(numbers))
    moved = data.draw(st.lists(st.sampled_from(positions), unique=True) if numbers else st.just([]))
    varying = {position: place for place, position in enumerate(sorted(moved))}
    constants = [numbers[position] for position in sorted(moved)]
    calls, tensors = run(program, source, varying, constants)
    assert calls == wanted(program)
    freed = {n for of in program.calls for n in of.frees}
    given_ = {n for of in program.calls for n in of.gives()} | set(program.made)
    assert {n for n, held in tensors.items() if held is not None} == given_ - freed


def test_sections_and_parts_count_ops() -> None:
    calls = [call("aten::mm", Slot(0), gives=(None,), section=("a",)) for _ in range(MAX_CALLS + 5)]
    calls.append(call("aten::mm", Slot(0), gives=(None,), section=("b",)))
    source = source_of(program_of(*calls, made=1))
    assert [names for names, _ in source.sections] == [("a",), ("a",), ("b",)]
    last = MAX_CALLS + 5
    assert source.parts == ((0, MAX_CALLS), (MAX_CALLS, last), (last, last + 1))


def test_names_of_ops_that_look_alike_stay_apart() -> None:
    program = program_of(
        call("my::add_Tensor", Slot(0), gives=(None,)),
        call("my::add", Slot(0), gives=(None,), overload="Tensor"),
        call("my::add_Tensor", Slot(0), gives=(None,)),
        made=1,
    )
    calls, _ = run(program, source_of(program), {}, [])
    assert calls == wanted(program)


def test_collectives_are_waited_for_where_the_program_says() -> None:
    sent = call(
        "c10d::allreduce_",
        (Slot(0),),
        overload="",
        collective="allreduce_",
        keywords={"group": Number(0)},
    )
    wait = call("wait", Number(0), overload="")
    program = program_of(sent, call("aten::mm", Slot(0), gives=(1,)), wait, made=1)
    source = source_of(program)
    assert source.parts == ((0, 2),)
    calls, _ = run(program, source, {}, [])
    assert calls == [
        ("allreduce_", "", [["tensor 0"]], {"group": 0}),
        ("aten::mm", "default", ["tensor 0"], {}),
        ("wait", "allreduce_"),
    ]


def test_backward_functions_take_what_the_forward_op_kept() -> None:
    program = program_of(
        call("fbgemm::lookup", Slot(0), gives=(1, 2), collective=WITH_GRAD),
        call("backward of fbgemm::lookup", Slot(2), Slot(1), gives=(3,), overload=""),
        made=1,
    )
    calls, tensors = run(program, source_of(program), {}, [])
    assert calls[1] == ("backward", "tensor 2", "tensor 1", {})
    assert tensors[3] == "tensor 3"


def test_ranks_of_one_pattern_differ_in_numbers_alone() -> None:
    def source(size: Number, op: str = "aten::view") -> Source:
        return source_of(program_of(call(op, Slot(0), (size, Number(2)), gives=(1,)), made=1))

    assert source(Number(3)).pattern == source(Number(4)).pattern
    assert source(Number(3)).numbers == (3, 2)
    # a type of a number is no number: True is written, 1 may be read from a file
    for other in (source(Number(True)), source(Number(3.0)), source(Number(3), "aten::reshape")):
        assert source(Number(3)).pattern != other.pattern


@pytest.mark.parametrize("name", ['a "quoted" name', "back\\slash", "tail\\", "zwei\nlines", "x²"])
def test_names_of_annotations_make_legal_source(name: str) -> None:
    program = program_of(call("aten::mm", Slot(0), gives=(1,), section=(name,)), made=1)
    text = file_of(source_of(program), {}, "Title", 1)
    compile(text, "benchmark.py", "exec")
    assert f"{(name,)!r}" in text
