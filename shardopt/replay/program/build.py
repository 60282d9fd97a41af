"""From the chosen ops of a rank's trace to its program.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

import keyword
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from predictor.errors import InputError
from predictor.trace.execution import COMMS, Argument, ExecutionTrace, Node
from shardopt.replay.program.program import (
    WITH_GRAD,
    Call,
    LeftOut,
    Number,
    RankProgram,
    Slot,
    Term,
    nested,
)
from shardopt.replay.program.schema import (
    Parameter,
    Schema,
    UnwritableError,
    literal,
    parse_schema,
    python_number,
)
from shardopt.replay.program.select import ChosenOp, Tree
from shardopt.replay.program.tables import MatchedTables, UnmatchedError
from shardopt.replay.program.tensors import Key, Tensors, TensorUse, tensors_of
from shardopt.replay.program.values import LegalValues

COLLECTIVES = "c10d::"
NAME = re.compile(r"\w+(?:::[\w<>.]+)+", re.ASCII)
"""Of an op, or of a backward function in C++."""
DROPPED = frozenset({"pin_memory", "generator"})
"""Arguments that are left to their defaults: both change nothing that a replay compares."""


def build(
    trace: ExecutionTrace,
    chosen: Sequence[ChosenOp],
    us: Mapping[int, float],
    annotations: Annotations,
    tables: MatchedTables | None = None,
) -> RankProgram:
    """The program of one rank.

    Args:
        us: id of a node -> its recorded microseconds.
        tables: that its lookups read, where a summary of them is given.

    Raises:
        UnmatchedError: `tables` are not those of a lookup.
    """
    return _Builder(trace, chosen, us, annotations, tables).run()


class _Builder:
    def __init__(
        self,
        trace: ExecutionTrace,
        chosen: Sequence[ChosenOp],
        us: Mapping[int, float],
        annotations: Annotations,
        tables: MatchedTables | None,
    ) -> None:
        self.trace, self.chosen, self.us, self.annotations = trace, chosen, us, annotations
        self.tensors = Tensors()
        self.legal = LegalValues(self.tensors, tables)
        self.native = NativePairs(chosen, trace)
        self.calls: list[Call] = []
        self.left_out: list[LeftOut] = []
        self.groups: list[tuple[int, ...]] = [()]
        self.numbers = 0
        self.waited = _waits(trace)
        self.sent: dict[int, int] = {}

    def run(self) -> RankProgram:
        waits = sorted(self.waited.items())
        for of in self.chosen:
            while waits and waits[0][0] < of.node.id:
                self._wait(waits.pop(0)[1])
            try:
                self._add(of)
            except UnmatchedError:
                raise
            except (UnwritableError, InputError) as error:
                # a name of another kind may be private
                public = NAME.fullmatch(of.node.name)
                name = of.node.name if public else "an op without a name"
                self.left_out.append(LeftOut(name, str(error), self.us.get(of.node.id)))
        calls = list(_add_waits(self.calls, self.tensors, set(self.sent.values())))
        return RankProgram(
            self.trace.rank,
            list(_free_when_dead(_drop_unused(calls), self.tensors)),
            self.tensors.made,
            self.legal.fills,
            self.left_out,
            self._notes(),
            self.groups,
        )

    def _notes(self) -> list[str]:
        notes = []
        if self.tensors.hidden_views:
            notes.append(
                f"{self.tensors.hidden_views} tensors that the trace shows only once they are read "
                "are made up front, apart from the memory they shared"
            )
        if self.legal.pinned:
            notes.append(
                f"{self.legal.pinned} tensors of ids, offsets or lengths are read from ones made "
                "up front: what the ops before them would give is not in the trace"
            )
        if self.numbers:
            notes.append(f"{self.numbers} Python numbers without a recorded value are 1")
        return notes

    def _add(self, of: ChosenOp) -> None:
        if of.native:
            self.calls.append(self._backward(of))
            return
        schema = parse_schema(of.node.schema)
        if schema.name.startswith(COLLECTIVES):
            self._collective(of, schema)
            return
        names, arguments, keywords = self._arguments(of.node, schema)
        call = self._call(of, schema.name, schema.overload, arguments, keywords, names=names)
        call = self.legal.settle(call)
        outputs = self._outputs(of.node)
        call = replace(call, outputs=outputs)
        if of.node.id in self.native.forward:
            handle = self.tensors.handle()
            self.native.handles[of.node.id] = handle
            call = replace(call, outputs=(*outputs, handle), collective=WITH_GRAD)
        terms = call.named()
        written = [terms[p.name] for p in schema.parameters if p.written and p.name in terms]
        self.legal.note_outputs(call, written)
        self.calls.append(call)

    def _call(
        self,
        of: ChosenOp,
        name: str,
        overload: str,
        arguments: Sequence[Term],
        keywords: Mapping[str, Term],
        outputs: tuple[Any, ...] = (),
        names: tuple[str, ...] = (),
    ) -> Call:
        return Call(
            name,
            overload,
            tuple(arguments),
            keywords,
            outputs,
            tuple(map(self.annotations, of.section)),
            of.node.id,
            self.us.get(of.node.id),
            specs=tuple(map(_specs, of.node.outputs)),
            names=names,
        )

    def _arguments(
        self, node: Node, schema: Schema
    ) -> tuple[tuple[str, ...], list[Term], dict[str, Term]]:
        """Names of the positional arguments, these, and the others."""
        if len(node.inputs) > len(schema.parameters):
            raise UnwritableError("more arguments than its schema has")
        names: list[str] = []
        positional: list[Term] = []
        keywords: dict[str, Term] = {}
        for parameter, argument in zip(schema.parameters, node.inputs, strict=False):
            number = python_number(parameter, argument)
            term = self._term(parameter, argument, schema) if number is None else number
            self.numbers += number is not None
            if not parameter.keyword:
                names.append(parameter.name)
                positional.append(term)
            elif keyword.iskeyword(parameter.name):
                raise UnwritableError(f"Python takes no argument called `{parameter.name}`")
            elif term is not None and parameter.name not in DROPPED:
                keywords[parameter.name] = term
        return tuple(names), positional, keywords

    def _term(self, parameter: Parameter, argument: Argument, schema: Schema) -> Term:
        if "Tensor" not in parameter.base:
            return literal(argument.value, parameter, schema.name)
        found = tensors_of(argument)
        if isinstance(argument.value, tuple):
            return tuple(map(self._tensor, found))
        if isinstance(argument.value, str):
            raise UnwritableError(f"`{parameter.name}` is an object that the trace does not hold")
        if isinstance(argument.value, (bool, int, float)):
            return Number(1)
        return self._tensor(found[0] if found else None)

    def _tensor(self, of: TensorUse | None) -> Term:
        return None if of is None else Slot(self.tensors.take(of))

    def _outputs(self, node: Node) -> tuple[Any, ...]:
        taken: dict[int, dict[int, Key]] = defaultdict(dict)
        for of in (of for argument in node.inputs for of in tensors_of(argument) if of is not None):
            taken[of.tensor.storage][of.tensor.id] = of.key
        found = []
        for argument in node.outputs:
            numbers = tuple(
                None if of is None else self.tensors.give(of, taken) for of in tensors_of(argument)
            )
            listed = isinstance(argument.value, tuple)
            found.append(numbers if listed else (numbers[0] if numbers else None))
        return tuple(found)

    def _collective(self, of: ChosenOp, schema: Schema) -> None:
        group = self.native.tree_comm(of.node)
        if group not in self.groups:
            self.groups.append(group)
        kind = schema.name.removeprefix(COLLECTIVES)
        arguments, size = collective_call(of.node, schema, self._tensor)
        keywords = {"group": Number(self.groups.index(group))}
        call = replace(
            self._call(of, schema.name, "", arguments, keywords, names=KNOWN[kind]),
            collective=kind,
            bytes=size,
        )
        self.legal.note_received(call)
        sequence = self.native.sequence(of.node)
        # a collective without a number cannot be named by a wait
        self.sent[-len(self.calls) - 1 if sequence is None else sequence] = len(self.calls)
        self.calls.append(call)

    def _wait(self, sequence: int) -> None:
        """The recorded wait for a collective comes before the next op."""
        at = self.sent.pop(sequence, None)
        if at is not None:
            self.calls.append(_wait_for(at, self.calls[at]))

    def _backward(self, of: ChosenOp) -> Call:
        handle = self.native.handle_of(of)
        if handle is None:
            raise UnwritableError("a backward function whose forward op is not in the trace")
        grad = self._tensor(tensors_of(of.node.inputs[0])[0])
        given = self.native.gradient(of)
        output = None if given is None else self.tensors.give(given, {})
        call = self._call(of, self.native.name_of(of), "", (Slot(handle), grad), {}, (output,))
        return replace(call, specs=())


def _specs(argument: Argument) -> Any:
    found = [None if of is None else of.spec for of in tensors_of(argument)]
    return tuple(found) if isinstance(argument.value, tuple) else (found[0] if found else None)


def _waits(trace: ExecutionTrace) -> dict[int, int]:
    """Id of a node that waits for a collective -> the collective's number."""
    found = {}
    for node in trace.nodes:
        if node.name == COMMS and any(a.value == "wait" for a in node.inputs):
            number = node.inputs[0].value
            if isinstance(number, int):
                found[node.id] = number
    return found


def _add_waits(calls: Sequence[Call], tensors: Tensors, open_ends: set[int]) -> Iterator[Call]:
    """Add a wait before the first op that reads what a collective sends or receives.

    Args:
        open_ends: positions of the collectives whose wait the trace does not show.
    """
    pending: dict[int, tuple[int, set[int]]] = {}
    moved: dict[int, int] = {}
    count = 0
    for at, call in enumerate(calls):
        touched = {tensors.storage_of.get(n, -n) for n in (*call.reads(), *call.gives())}
        for work in [work for work, (_, stores) in pending.items() if stores & touched]:
            yield _wait_for(pending.pop(work)[0], call)
            count += 1
        if call.op == "wait":
            target = call.arguments[0]
            assert isinstance(target, Number)
            call = replace(call, arguments=(Number(moved[int(target.value)]),))
        elif call.is_collective:
            moved[at] = count
            if at in open_ends:
                pending[at] = (count, touched)
        yield call
        count += 1
    for work, _ in pending.values():
        yield _wait_for(work, calls[-1])


def _wait_for(at: int, before: Call) -> Call:
    return Call("wait", "", (Number(at),), {}, (), before.section, -1)


def _drop_unused(calls: Sequence[Call]) -> list[Call]:
    """The calls without numbers for outputs that nothing reads."""
    read = {number for call in calls for number in call.reads()}
    return [
        replace(call, outputs=nested(lambda n: n if n in read else None, call.outputs))
        for call in calls
    ]


def _free_when_dead(calls: Sequence[Call], tensors: Tensors) -> Iterator[Call]:
    """The calls, each of which frees the tensors that ops gave and that it is the last to use."""
    last: dict[int, int] = {}
    for at, call in enumerate(calls):
        for number in (*call.reads(), *call.gives()):
            last[number] = at
    frees: dict[int, list[int]] = defaultdict(list)
    for number, at in sorted(last.items()):
        if number not in tensors.made:
            frees[at].append(number)
    for at, call in enumerate(calls):
        yield replace(call, frees=tuple(frees[at])) if at in frees else call


KIND = re.compile(r"Split(?:NoBag)?LookupFunction_(\w+?)_Op")


class NativePairs:
    """Ties a backward function to the lookup that it belongs to.

    `forward` has the nodes of those lookups; `handles`, once a lookup is in the program, the number
    under which its autograd graph is kept.
    """

    def __init__(self, chosen: Sequence[ChosenOp], trace: ExecutionTrace) -> None:
        self.tree = Tree(trace)
        self.forward: dict[int, Node] = {}
        self.handles: dict[int, int] = {}
        self._of: dict[int, Node] = {}
        open_lookups: list[Node] = []
        for of in chosen:
            if "lookup_function" in of.node.name or "_lookup_" in of.node.name:
                open_lookups.append(of.node)
            elif of.native:
                node = next((n for n in reversed(open_lookups) if _fits(n, of.node)), None)
                if node is not None:
                    open_lookups.remove(node)
                    self.forward[node.id] = node
                    self._of[of.node.id] = node

    def handle_of(self, of: ChosenOp) -> int | None:
        """The number of the lookup's autograd graph."""
        node = self._of.get(of.node.id)
        return None if node is None else self.handles.get(node.id)

    def name_of(self, of: ChosenOp) -> str:
        """What the backward function is called in a program."""
        return f"backward of {self._of[of.node.id].name}"

    def gradient(self, of: ChosenOp) -> TensorUse | None:
        """The gradient of the lookup's first argument, where an op inside made it."""
        shape = self._of[of.node.id].inputs[0].shape
        for child in self.tree.below(of.node):
            for argument in child.outputs:
                for found in tensors_of(argument):
                    if found is not None and found.spec.shape == shape and found.tensor.numel:
                        return found
        return None

    def tree_comm(self, node: Node) -> tuple[int, ...]:
        """Ranks of a collective's group; none: all."""
        for child in self.tree.below(node):
            if child.name == COMMS and child.comm is not None and child.comm.group:
                return child.comm.group
        return ()

    def sequence(self, node: Node) -> int | None:
        """The number by which waits name a collective."""
        for child in self.tree.below(node):
            if child.name == COMMS and len(child.inputs) > 1:
                value = child.inputs[1].value
                return value if isinstance(value, int) else None
        return None


def _fits(lookup: Node, backward: Node) -> bool:
    match = KIND.search(backward.name)
    if match is None or not lookup.outputs or not backward.inputs:
        return False
    if lookup.outputs[0].shape != backward.inputs[0].shape:
        return False
    kind = match[1].lower()
    return f"lookup_{kind}_function" in lookup.name or (
        kind == "dense" and "::dense" in lookup.name
    )


KNOWN: dict[str, tuple[str, ...]] = {
    "alltoall_base_": ("output", "input", "output_split_sizes", "input_split_sizes"),
    "alltoall_": ("output_tensors", "input_tensors"),
    "allreduce_": ("tensors",),
    "allreduce_coalesced_": ("tensors",),
    "broadcast_": ("tensors", "root_rank"),
    "reduce_": ("tensors", "root_rank"),
    "allgather_": ("output_tensors", "input_tensors"),
    "_allgather_base_": ("output_tensor", "input_tensor"),
    "allgather_into_tensor_coalesced_": ("outputs", "inputs"),
    "reduce_scatter_": ("output_tensors", "input_tensors"),
    "_reduce_scatter_base_": ("output_tensor", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("outputs", "inputs"),
    "allgather_coalesced_": ("output_lists", "input_list"),
    "gather_": ("output_tensors", "input_tensors", "root_rank"),
    "scatter_": ("output_tensors", "input_tensors", "root_rank"),
    "send": ("tensors", "dst", "tag"),
    "recv_": ("tensors", "src", "tag"),
    "recv_any_source_": ("tensors", "tag"),
    "barrier": (),
    "monitored_barrier_": (),
}
"""Collective -> the arguments that `torch.distributed` takes, by c10d's names (`Ops.cpp`)."""
SENT = ("input", "input_tensor", "input_tensors", "inputs", "input_list", "tensors")
RECEIVED = frozenset({"recv_", "recv_any_source_"})
"""Those whose ``tensors`` other ranks send."""


def collective_call(
    node: Node, schema: Schema, tensor: Callable[[TensorUse | None], Term]
) -> tuple[tuple[Term, ...], int]:
    """Arguments of a collective, and the bytes that this rank gives it.

    Raises:
        UnwritableError: `torch.distributed` has no call for it.
    """
    kind = schema.name.partition("::")[2]
    if kind not in KNOWN:
        raise UnwritableError("no call of torch.distributed is known for this collective")
    named = dict(zip((p.name for p in schema.parameters), node.inputs, strict=False))
    terms: list[Term] = []
    for name in KNOWN[kind]:
        argument = named.get(name)
        if argument is None:
            raise UnwritableError(f"the trace does not hold its `{name}`")
        value = argument.value
        if any(True for _ in argument.tensors()):
            found = tuple(map(tensor, tensors_of(argument)))
            terms.append(found if isinstance(value, tuple) else found[0])
        elif isinstance(value, tuple):
            terms.append(tuple(Number(size) for size in value if isinstance(size, int)))
        elif isinstance(value, int):
            terms.append(Number(value))
        else:
            raise UnwritableError(f"the trace does not hold its `{name}`")
    sent = (named[name] for name in SENT if name in named and kind not in RECEIVED)
    size = sum(t.size_bytes for argument in sent for t in argument.tensors())
    return tuple(terms), size


OPTIMIZERS = (
    "ASGD|Adadelta|Adafactor|Adagrad|Adam|AdamW|Adamax|LBFGS|NAdam|RAdam|RMSprop|Rprop|SGD|"
    "SparseAdam|Muon"
)
AWAITED = (
    "KJTList|KJTListSplits|KJTAllToAllTensors|KJTAllToAllSplits|SplitsAllToAll|PooledEmbeddings|"
    "EmbeddingBagCollection|EmbeddingCollection|SequenceEmbeddings|SequenceEmbeddingsAllToAll"
)
WORD = (
    "zero_grad|copy_batch_to_gpu|wait_for_batch|forward|backward|optimizer|sparse_data_dist|"
    "wait_sparse_data_dist|init_data_dist|prefetch|load_batch|loss|"
    "all2all_data:(?:kjt splits|kjt lengths|kjt values|recat_values|recat_permute_gen)|"
    "alltoall_(?:fwd|bwd)_single|alltoall_seq_embedding_(?:fwd|bwd)_single|"
    "reduce_scatter(?:_base)?(?:_v)?_(?:fwd|bwd)|All2All_Seq_(?:fwd|bwd)_permute|"
    f"(?:NoWait|Request|(?:{AWAITED})Awaitable) wait\\(\\)"
)
PUBLIC = re.compile(
    rf"(?:## (?:{WORD}) ##|ProfilerStep#\d+|DistributedDataParallel\.forward|"
    rf"Optimizer\.(?:step|zero_grad)#(?:{OPTIMIZERS})\.(?:step|zero_grad))$"
)


class Annotations:
    """Gives each annotation the name under which it is written.

    Args:
        kept: names that the user asks to keep.
    """

    def __init__(self, kept: Iterable[str] = ()) -> None:
        self.kept = frozenset(kept)
        self._numbered: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        if name in self.kept or PUBLIC.match(name):
            return name
        return self._numbered.setdefault(name, f"annotation {len(self._numbered) + 1}")

    @property
    def replaced(self) -> int:
        """How many names were replaced."""
        return len(self._numbered)
