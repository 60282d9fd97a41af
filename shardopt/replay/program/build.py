"""From the chosen ops of a rank's trace to its program.

Why: docs/decisions/0020-benchmarks-from-traces.md.
"""

from __future__ import annotations

import keyword
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from predictor.errors import InputError
from predictor.trace.execution import COMMS, Argument, ExecutionTrace, Node
from shardopt.replay.program.program import (
    COLLECTIVES,
    Call,
    LeftOut,
    RankProgram,
    Slot,
    TensorSpec,
    Term,
    free_when_dead,
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
from shardopt.replay.program.tables import TableSummary, UnmatchedError
from shardopt.replay.program.tensors import Tensors, TensorUse, tensors_of
from shardopt.replay.program.values import LegalValues, is_lookup, lookup_kind

NAME = re.compile(r"\w+(?:::[\w<>.]+)+", re.ASCII)
"""Of an op, or of a backward function in C++."""
DROPPED = frozenset({"pin_memory", "generator"})
"""Arguments that are left to their defaults: both change nothing that a replay compares."""


def build(
    trace: ExecutionTrace,
    chosen: Sequence[ChosenOp],
    us: Mapping[int, float],
    annotations: Annotations,
    tables: TableSummary | None = None,
) -> RankProgram:
    """The program of one rank.

    Args:
        us: id of a node -> its recorded microseconds.
        tables: a summary of those that its lookups read, where there is one.

    Raises:
        UnmatchedError: `tables` are not those of a lookup.
    """
    builder = _Builder(trace, us, annotations, tables, chosen)
    waits = sorted(_recorded_waits(trace).items())
    for of in chosen:
        while waits and waits[0][0] < of.node.id:
            builder.wait(waits.pop(0)[1])
        try:
            builder.add(of)
        except UnmatchedError:
            raise
        except (UnwritableError, InputError) as error:
            builder.leave_out(of.node, str(error))
    return builder.program()


class _Builder:
    """Adds calls one by one. `pairs` ties backward functions to lookups, `handles` are the numbers
    of the lookups' autograd graphs, `open` the collectives that no recorded wait ended so far."""

    def __init__(
        self,
        trace: ExecutionTrace,
        us: Mapping[int, float],
        annotations: Annotations,
        tables: TableSummary | None,
        chosen: Sequence[ChosenOp],
    ) -> None:
        self.rank, self.us, self.annotations = trace.rank, us, annotations
        self.tree = Tree(trace)
        self.tensors = Tensors()
        self.legal = LegalValues(self.tensors, trace.rank, tables)
        self.pairs = pair_lookups(chosen)
        self.forward = {node.id for node in self.pairs.values()}
        self.handles: dict[int, int] = {}
        self.calls: list[Call] = []
        self.left_out: list[LeftOut] = []
        self.groups: list[tuple[int, ...]] = [()]
        self.numbers = 0
        self.collectives = 0
        self.open: dict[int, int] = {}

    def program(self) -> RankProgram:
        """The program of all that was added."""
        calls = _add_waits(self.calls, self.tensors, set(self.open.values()))
        return RankProgram(
            self.rank,
            free_when_dead(_drop_unused(calls), self.tensors.made),
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

    def leave_out(self, node: Node, why: str) -> None:
        """Note an op that is not replayed; a name of another kind may be private."""
        name = node.name if NAME.fullmatch(node.name) else "an op without a name"
        self.left_out.append(LeftOut(name, why, self.us.get(node.id)))

    def wait(self, sequence: int) -> None:
        """A collective ends before the next op."""
        nth = self.open.pop(sequence, None)
        if nth is not None:
            self.calls[-1] = replace(self.calls[-1], waits=(*self.calls[-1].waits, nth))

    def add(self, of: ChosenOp) -> None:
        """An op, a collective or a backward function.

        Raises:
            UnwritableError: the trace does not hold what it takes.
            InputError: its schema cannot be read.
        """
        if of.native:
            self.calls.append(self._backward(of))
            return
        schema = parse_schema(of.node.schema)
        if schema.name.startswith(COLLECTIVES):
            self.calls.append(self._collective(of, schema))
            return
        names, arguments, keywords = self._arguments(of.node, schema)
        call = self._call(of, schema.name, arguments, overload=schema.overload, names=names)
        call = self.legal.settle(replace(call, keywords=keywords))
        call = replace(call, outputs=self._outputs(of.node))
        if of.node.id in self.forward:
            handle = self.handles[of.node.id] = self.tensors.handle()
            call = replace(call, outputs=(*call.outputs, handle), with_grad=True)
        terms = call.named()
        written = [terms[p.name] for p in schema.parameters if p.written and p.name in terms]
        self.legal.note_outputs(call, written)
        self.calls.append(call)

    def _call(self, of: ChosenOp, name: str, arguments: Iterable[Term], **more: Any) -> Call:
        section = tuple(map(self.annotations, of.section))
        specs = tuple(map(_specs, of.node.outputs))
        made = Call(name, "", tuple(arguments), {}, (), section, of.node.id, specs=specs)
        return replace(made, us=self.us.get(of.node.id), **more)

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
            return 1
        return self._tensor(found[0] if found else None)

    def _tensor(self, of: TensorUse | None) -> Term:
        return None if of is None else Slot(self.tensors.take(of))

    def _outputs(self, node: Node) -> tuple[Any, ...]:
        taken: dict[int, dict[int, TensorSpec]] = defaultdict(dict)
        for of in (of for argument in node.inputs for of in tensors_of(argument) if of is not None):
            taken[of.tensor.storage][of.tensor.id] = of.spec
        found = []
        for argument in node.outputs:
            numbers = tuple(
                None if of is None else self.tensors.give(of, taken) for of in tensors_of(argument)
            )
            listed = isinstance(argument.value, tuple)
            found.append(numbers if listed else (numbers[0] if numbers else None))
        return tuple(found)

    def _collective(self, of: ChosenOp, schema: Schema) -> Call:
        group, sequence = recorded_collective(self.tree, of.node)
        if group not in self.groups:
            self.groups.append(group)
        kind = schema.name.removeprefix(COLLECTIVES)
        arguments, size = collective_call(of.node, schema, self._tensor)
        call = self._call(
            of,
            schema.name,
            arguments,
            keywords={"group": self.groups.index(group)},
            names=KNOWN[kind],
            bytes=size,
        )
        self.legal.note_received(call)
        # a collective without a number cannot be named by a wait
        self.open[-self.collectives - 1 if sequence is None else sequence] = self.collectives
        self.collectives += 1
        return call

    def _backward(self, of: ChosenOp) -> Call:
        forward = self.pairs.get(of.node.id)
        handle = None if forward is None else self.handles.get(forward.id)
        if forward is None or handle is None:
            raise UnwritableError("a backward function whose forward op is not in the trace")
        grad = self._tensor(tensors_of(of.node.inputs[0])[0])
        given = gradient_of(self.tree, of.node, forward)
        outputs = () if given is None else (self.tensors.give(given, {}),)
        specs = () if given is None else (given.spec,)
        name = f"backward of {forward.name}"
        return self._call(of, name, (Slot(handle), grad), outputs=outputs, specs=specs)


def _specs(argument: Argument) -> Any:
    found = [None if of is None else of.spec for of in tensors_of(argument)]
    return tuple(found) if isinstance(argument.value, tuple) else (found[0] if found else None)


def _recorded_waits(trace: ExecutionTrace) -> dict[int, int]:
    """Id of a node that waits for a collective -> the collective's number."""
    return {
        node.id: number
        for node in trace.nodes
        if node.name == COMMS and any(a.value == "wait" for a in node.inputs)
        if isinstance(number := node.inputs[0].value, int)
    }


def _add_waits(calls: Sequence[Call], tensors: Tensors, unended: set[int]) -> list[Call]:
    """Let calls wait before the first op that reads what a collective sends or receives.

    Args:
        unended: the collectives whose wait the trace does not show.
    """
    made: list[Call] = []
    pending: dict[int, set[int]] = {}
    nth = 0
    for call in calls:
        touched = {tensors.storage_of.get(n, -n) for n in (*call.reads(), *call.gives())}
        _end(made, pending, [of for of, stores in pending.items() if stores & touched])
        if call.is_collective:
            if nth in unended:
                pending[nth] = touched
            nth += 1
        made.append(call)
    _end(made, pending, [*pending])
    return made


def _end(made: list[Call], pending: dict[int, set[int]], ended: Sequence[int]) -> None:
    for nth in ended:
        del pending[nth]
        made[-1] = replace(made[-1], waits=(*made[-1].waits, nth))


def _drop_unused(calls: Sequence[Call]) -> list[Call]:
    """The calls without numbers for outputs that nothing reads."""
    read = {number for call in calls for number in call.reads()}
    return [
        replace(call, outputs=nested(lambda n: n if n in read else None, call.outputs))
        for call in calls
    ]


KIND = re.compile(r"Split(?:NoBag)?LookupFunction_(\w+?)_Op")


def pair_lookups(chosen: Iterable[ChosenOp]) -> dict[int, Node]:
    """Id of a backward function -> the lookup that it belongs to: the last one that fits."""
    found: dict[int, Node] = {}
    lookups: list[Node] = []
    for of in chosen:
        if is_lookup(of.node.name) and "lookup" in of.node.name:
            lookups.append(of.node)
        elif of.native:
            node = next((n for n in reversed(lookups) if _fits(n, of.node)), None)
            if node is not None:
                lookups.remove(node)
                found[of.node.id] = node
    return found


def _fits(lookup: Node, backward: Node) -> bool:
    match = KIND.search(backward.name)
    if match is None or not lookup.outputs or not backward.inputs:
        return False
    same = lookup.outputs[0].shape == backward.inputs[0].shape
    return same and lookup_kind(lookup.name) == match[1].lower()


def gradient_of(tree: Tree, backward: Node, lookup: Node) -> TensorUse | None:
    """The gradient of a lookup's first argument, where an op in its backward function made it."""
    made = (of for child in tree.below(backward) for out in child.outputs for of in tensors_of(out))
    shape = lookup.inputs[0].shape
    return next((of for of in made if of and of.spec.shape == shape and of.tensor.numel), None)


def recorded_collective(tree: Tree, node: Node) -> tuple[tuple[int, ...], int | None]:
    """Ranks of a collective's group (none: all), and the number by which waits name it."""
    records = [child for child in tree.below(node) if child.name == COMMS]
    group = next((of.comm.group for of in records if of.comm and of.comm.group), ())
    value = next((of.inputs[1].value for of in records if len(of.inputs) > 1), None)
    return group, value if isinstance(value, int) else None


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
    "barrier": (),
    "monitored_barrier_": (),
}
"""Collective -> the arguments that `torch.distributed` takes, by c10d's names (`Ops.cpp`)."""
SENT = ("input", "input_tensor", "input_tensors", "inputs", "input_list", "tensors")


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
            terms.append(tuple(size for size in value if isinstance(size, int)))
        elif isinstance(value, int):
            terms.append(value)
        else:
            raise UnwritableError(f"the trace does not hold its `{name}`")
    sent = (named[name] for name in SENT if name in named)
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
