"""Builds the program of a rank from the chosen ops of its trace.

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
"""Name of an op, or of a backward function in C++."""
DROPPED = frozenset({"pin_memory", "generator"})
"""Arguments that are left to their defaults: neither changes anything that a replay compares."""


def build(
    trace: ExecutionTrace,
    chosen: Sequence[ChosenOp],
    us: Mapping[int, float],
    annotations: Annotations,
    tables: TableSummary | None = None,
) -> RankProgram:
    """Build the program of one rank.

    Args:
        us: id of a node -> its recorded microseconds.
        tables: summary of the tables that its lookups read, if given.

    Raises:
        UnmatchedError: no `tables` fit a lookup.
    """
    builder = _Builder(trace, us, annotations, tables, chosen)
    waits = sorted(_recorded_waits(trace).items())
    for op in chosen:
        while waits and waits[0][0] < op.node.id:
            builder.wait(waits.pop(0)[1])
        try:
            builder.add(op)
        except UnmatchedError:
            raise
        except (UnwritableError, InputError) as error:
            builder.leave_out(op.node, str(error))
    return builder.program()


class _Builder:
    """Builder that adds calls one by one.

    `pairs` ties backward functions to lookups, `handles` are the numbers of the lookups' autograd
    graphs, `open` the collectives that no recorded wait has ended so far.
    """

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
        """Return the program of all calls that were added."""
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
                "up front: the trace does not hold what the ops before them gave"
            )
        if self.numbers:
            notes.append(f"{self.numbers} Python numbers without a recorded value are 1")
        return notes

    def leave_out(self, node: Node, why: str) -> None:
        """Note an op that is not replayed; a name of another kind may be private."""
        name = node.name if NAME.fullmatch(node.name) else "an op without a name"
        self.left_out.append(LeftOut(name, why, self.us.get(node.id)))

    def wait(self, sequence: int) -> None:
        """Let a collective end before the next op."""
        nth = self.open.pop(sequence, None)
        if nth is not None:
            self.calls[-1] = replace(self.calls[-1], waits=(*self.calls[-1].waits, nth))

    def add(self, op: ChosenOp) -> None:
        """Add an op, a collective or a backward function.

        Raises:
            UnwritableError: the trace does not hold its arguments.
            InputError: its schema cannot be read.
        """
        if op.native:
            self.calls.append(self._backward(op))
            return
        schema = parse_schema(op.node.schema)
        if schema.name.startswith(COLLECTIVES):
            self.calls.append(self._collective(op, schema))
            return
        names, arguments, keywords = self._arguments(op.node, schema)
        call = self._call(op, schema.name, arguments, overload=schema.overload, names=names)
        call = self.legal.settle(replace(call, keywords=keywords))
        call = replace(call, outputs=self._outputs(op.node))
        if op.node.id in self.forward:
            handle = self.handles[op.node.id] = self.tensors.handle()
            call = replace(call, outputs=(*call.outputs, handle), with_grad=True)
        terms = call.named()
        written = [terms[p.name] for p in schema.parameters if p.written and p.name in terms]
        self.legal.note_outputs(call, written)
        self.calls.append(call)

    def _call(self, op: ChosenOp, name: str, arguments: Iterable[Term], **more: Any) -> Call:
        section = tuple(map(self.annotations, op.section))
        specs = tuple(map(_specs, op.node.outputs))
        call = Call(name, "", tuple(arguments), {}, (), section, op.node.id, specs=specs)
        return replace(call, us=self.us.get(op.node.id), **more)

    def _arguments(
        self, node: Node, schema: Schema
    ) -> tuple[tuple[str, ...], list[Term], dict[str, Term]]:
        """Return the names of the positional arguments, their terms, and the keyword arguments."""
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
        uses = tensors_of(argument)
        if isinstance(argument.value, tuple):
            return tuple(map(self._tensor, uses))
        if isinstance(argument.value, str):
            raise UnwritableError(f"`{parameter.name}` is an object that the trace does not hold")
        if isinstance(argument.value, (bool, int, float)):
            return 1
        return self._tensor(uses[0] if uses else None)

    def _tensor(self, use: TensorUse | None) -> Term:
        return None if use is None else Slot(self.tensors.take(use))

    def _outputs(self, node: Node) -> tuple[Any, ...]:
        inputs: dict[int, dict[int, TensorSpec]] = defaultdict(dict)
        for use in (use for argument in node.inputs for use in tensors_of(argument)):
            if use is not None:
                inputs[use.tensor.storage][use.tensor.id] = use.spec
        outputs = []
        for argument in node.outputs:
            numbers = tuple(
                None if use is None else self.tensors.give(use, inputs)
                for use in tensors_of(argument)
            )
            listed = isinstance(argument.value, tuple)
            outputs.append(numbers if listed else (numbers[0] if numbers else None))
        return tuple(outputs)

    def _collective(self, op: ChosenOp, schema: Schema) -> Call:
        group, sequence = recorded_collective(self.tree, op.node)
        if group not in self.groups:
            self.groups.append(group)
        kind = schema.name.removeprefix(COLLECTIVES)
        arguments, size = collective_call(op.node, schema, self._tensor)
        call = self._call(
            op,
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

    def _backward(self, op: ChosenOp) -> Call:
        forward = self.pairs.get(op.node.id)
        handle = None if forward is None else self.handles.get(forward.id)
        if forward is None or handle is None:
            raise UnwritableError("a backward function whose forward op is not in the trace")
        grad = self._tensor(tensors_of(op.node.inputs[0])[0])
        gradient = gradient_of(self.tree, op.node, forward)
        outputs = () if gradient is None else (self.tensors.give(gradient, {}),)
        specs = () if gradient is None else (gradient.spec,)
        name = f"backward of {forward.name}"
        return self._call(op, name, (Slot(handle), grad), outputs=outputs, specs=specs)


def _specs(argument: Argument) -> Any:
    specs = [None if use is None else use.spec for use in tensors_of(argument)]
    return tuple(specs) if isinstance(argument.value, tuple) else (specs[0] if specs else None)


def _recorded_waits(trace: ExecutionTrace) -> dict[int, int]:
    """Map the ids of nodes that wait for a collective to the collective's number."""
    return {
        node.id: number
        for node in trace.nodes
        if node.name == COMMS and any(a.value == "wait" for a in node.inputs)
        if isinstance(number := node.inputs[0].value, int)
    }


def _add_waits(calls: Sequence[Call], tensors: Tensors, unended: set[int]) -> list[Call]:
    """Let calls wait before the first op that touches the tensors of a collective under way.

    Args:
        unended: the collectives whose wait the trace does not show.
    """
    waiting: list[Call] = []
    pending: dict[int, set[int]] = {}
    nth = 0
    for call in calls:
        touched = {tensors.storage_of.get(n, -n) for n in (*call.reads(), *call.gives())}
        _end(waiting, pending, [n for n, stores in pending.items() if stores & touched])
        if call.is_collective:
            if nth in unended:
                pending[nth] = touched
            nth += 1
        waiting.append(call)
    _end(waiting, pending, [*pending])
    return waiting


def _end(calls: list[Call], pending: dict[int, set[int]], ended: Sequence[int]) -> None:
    for nth in ended:
        del pending[nth]
        calls[-1] = replace(calls[-1], waits=(*calls[-1].waits, nth))


def _drop_unused(calls: Sequence[Call]) -> list[Call]:
    """Return the calls without numbers for outputs that nothing reads."""
    read = {number for call in calls for number in call.reads()}
    return [
        replace(call, outputs=nested(lambda n: n if n in read else None, call.outputs))
        for call in calls
    ]


KIND = re.compile(r"Split(?:NoBag)?LookupFunction_(\w+?)_Op")


def pair_lookups(chosen: Iterable[ChosenOp]) -> dict[int, Node]:
    """Map the ids of backward functions to their lookups: the last one that fits."""
    pairs: dict[int, Node] = {}
    lookups: list[Node] = []
    for op in chosen:
        if is_lookup(op.node.name) and "lookup" in op.node.name:
            lookups.append(op.node)
        elif op.native:
            node = next((n for n in reversed(lookups) if _fits(n, op.node)), None)
            if node is not None:
                lookups.remove(node)
                pairs[op.node.id] = node
    return pairs


def _fits(lookup: Node, backward: Node) -> bool:
    match = KIND.search(backward.name)
    if match is None or not lookup.outputs or not backward.inputs:
        return False
    same = lookup.outputs[0].shape == backward.inputs[0].shape
    return same and lookup_kind(lookup.name) == match[1].lower()


def gradient_of(tree: Tree, backward: Node, lookup: Node) -> TensorUse | None:
    """Return the gradient of a lookup's first argument if its backward function made one."""
    outputs = (out for child in tree.below(backward) for out in child.outputs)
    uses = (use for out in outputs for use in tensors_of(out) if use)
    shape = lookup.inputs[0].shape
    return next((use for use in uses if use.spec.shape == shape and use.tensor.numel), None)


def recorded_collective(tree: Tree, node: Node) -> tuple[tuple[int, ...], int | None]:
    """Return the ranks of a collective's group (none: all), and its number in records of waits."""
    records = [child for child in tree.below(node) if child.name == COMMS]
    group = next((record.comm.group for record in records if record.comm and record.comm.group), ())
    value = next((record.inputs[1].value for record in records if len(record.inputs) > 1), None)
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
    """Return the arguments of a collective, and the bytes that this rank sends.

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
            tensor_terms = tuple(map(tensor, tensors_of(argument)))
            terms.append(tensor_terms if isinstance(value, tuple) else tensor_terms[0])
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
    """Names under which annotations are written; private ones become numbers.

    Args:
        keep: names that the user asks to keep.
    """

    def __init__(self, keep: Iterable[str] = ()) -> None:
        self.keep = frozenset(keep)
        self._numbered: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        if name in self.keep or PUBLIC.match(name):
            return name
        return self._numbered.setdefault(name, f"annotation {len(self._numbered) + 1}")

    @property
    def replaced(self) -> int:
        """Number of names that were replaced."""
        return len(self._numbered)
