"""More embedding modules: the sparse part of programs several times, each on its own tensors.

The program is that of a model with more embedding collections, except that the dense part reads the
outputs of the first collection alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from predictor.errors import InputError
from shardopt.replay.program.program import (
    WHOLE,
    Call,
    RankProgram,
    TensorSpec,
    free_when_dead,
    slots,
)
from shardopt.replay.program.schema import find_op, ops_of
from shardopt.replay.program.values import is_lookup

LISTED = 5
Nth = tuple[tuple[int, ...], int]
"""A collective: the ranks of its group, and its place among the group's."""


def repeat_tables(programs: Sequence[RankProgram], times: int) -> list[RankProgram]:
    """Return the programs of all ranks with `times` embedding modules in the place of each.

    A copy of a call comes right after it, in the same order on all ranks. Tables of the dense
    optimizer are looked up `times` times too, but their gradients are those of the first lookup.

    Raises:
        InputError: there are no lookups, or the traces do not tell which calls belong to them.
    """
    slices = [SparseSlice(program) for program in programs]
    if not any(part.lookups for part in slices):
        raise InputError(
            "tables cannot be added: the traces have no lookup of embeddings (of FBGEMM, "
            "aten::embedding or aten::embedding_bag)",
            inputs=("scale",),
        )
    slices = _agree(slices)
    problems = {
        f"rank {part.program.rank}: {problem}": None
        for part in slices
        for problem in part.problems()
    }
    if problems:
        raise InputError(
            f"tables cannot be added: the traces do not tell what belongs to the lookups; "
            f"{len(problems)} reasons: {'; '.join(list(problems)[:LISTED])}",
            inputs=("scale",),
        )
    return [_repeat(part, times) for part in slices]


def _agree(slices: Sequence[SparseSlice]) -> list[SparseSlice]:
    """Add to each rank the sparse collectives of the others, which a rank without tables runs."""
    orders = [_order(part.program) for part in slices]
    pairs = list(zip(slices, orders, strict=True))
    sparse = {nth for part, order in pairs for at, nth in order.items() if at in part.calls}
    return [
        SparseSlice(part.program, {at for at, nth in order.items() if nth in sparse} - part.calls)
        for part, order in pairs
    ]


def _order(program: RankProgram) -> dict[int, Nth]:
    """Map the position of each collective to its identity, the same on all ranks."""
    counts: Counter[tuple[int, ...]] = Counter()
    order = {}
    for at, call in enumerate(program.calls):
        if call.is_collective:
            ranks = program.groups[call.group]
            order[at] = (ranks, counts[ranks])
            counts[ranks] += 1
    return order


def _repeat(part: SparseSlice, times: int) -> RankProgram:
    program, sparse = part.program, [part.program.calls[at] for at in sorted(part.calls)]
    outputs = [n for call in sparse for n in call.gives()]
    read = sorted({n for call in sparse for n in call.reads() if n in program.made})
    first = 1 + max(program.numbers(), default=-1)
    stores = 1 + max((spec.storage for spec in program.made.values()), default=-1)
    up_front, fills = dict(program.made), dict(program.fills)
    copies: list[dict[int, int]] = []
    for nth in range(1, times):
        numbers = {n: first + i for i, n in enumerate([*outputs, *read])}
        first += len(numbers)
        for n in read:
            storage = program.made[n].storage + nth * stores
            up_front[numbers[n]] = replace(program.made[n], storage=storage)
        fills |= {numbers[n]: program.fills[n] for n in read if n in program.fills}
        copies.append(numbers)
    calls: list[Call] = []
    places: list[range] = []
    count = 0
    for at, call in enumerate(program.calls):
        repeated = copies if at in part.calls else []
        if call.is_collective:
            places.append(range(count, count + 1 + len(repeated)))
            count += 1 + len(repeated)
        # collectives are waited for after the last copy
        waits = tuple(n for nth in call.waits for n in places[nth])
        call = replace(call, waits=())
        calls += [call, *map(call.renumber, repeated)]
        calls[-1] = replace(calls[-1], waits=waits)
    return replace(program, calls=free_when_dead(calls, up_front), made=up_front, fills=fills)


FORWARD = ops_of("aten embedding embedding_bag _embedding_bag _embedding_bag_forward_only")
BACKWARD = ops_of(
    "aten embedding_backward embedding_dense_backward embedding_sparse_backward "
    "_embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_sparse_backward"
)
LIKE = ops_of("aten empty_like zeros_like new_empty new_zeros new_empty_strided")
"""Ops that read only the shape of a tensor."""
EXCHANGES = ("alltoall", "reduce_scatter", "_reduce_scatter", "allgather", "_allgather")
"""Name prefixes of collectives that move ids, results of lookups and their gradients."""


class SparseSlice:
    """The sparse part of one rank's program.

    `calls` are the positions of its calls, `lookups` those of its lookups. For each call, `needs`
    are the calls whose results it takes, `users` the reverse, `writes` the memories that it writes
    in place. `memory` names the memory of a tensor, the same for its views. `touched` are the calls
    that take or give a memory.

    Args:
        also: positions of collectives that belong to the sparse part on other ranks.
    """

    def __init__(self, program: RankProgram, also: Iterable[int] = ()) -> None:
        self.program, self.specs = program, program.specs()
        calls = program.calls
        self.needs: list[set[int]] = []
        self.users: list[set[int]] = [set() for _ in calls]
        self.writes: list[set[Any]] = []
        self.memory: dict[int, Any] = {n: ("made", s.storage) for n, s in program.made.items()}
        self.touched: dict[Any, set[int]] = defaultdict(set)
        self._follow()
        fused = {at for at, call in enumerate(calls) if is_lookup(call.op)}
        self.backward = {
            at
            for at, call in enumerate(calls)
            if call.op.startswith("backward of ")
            or call.op in BACKWARD
            or (at in fused and "backward" in call.op)
        }
        self.lookups = {at for at, call in enumerate(calls) if call.op in FORWARD}
        self.lookups |= fused - self.backward
        self.exchanges = {
            at for at, call in enumerate(calls) if call.collective.startswith(EXCHANGES)
        }
        ids = {at for at in self.exchanges if self._whole(at)}
        self.ends = self.lookups | ids | set(also)
        self.calls = self._of_ids() | self.ends | self.backward
        self.calls |= self._results()
        self.calls |= self._gradients()
        self.calls |= self._buffers()

    def _follow(self) -> None:
        """Follow the tensors through the program, and set `needs`, `users` and `writes`."""
        memory = self.memory
        last: dict[Any, int] = {}
        viewed: dict[int, int] = {}
        for at, call in enumerate(self.program.calls):
            written, whole = _aliases(call)
            reads = call.reads()
            needs = {last[memory[n]] for n in reads if memory.get(n) in last}
            needs |= {viewed[n] for n in reads if n in viewed}
            writes = {memory[n] for n in written if n in memory}
            for number in call.gives():
                if whole:
                    memory[number] = memory.get(whole[0], ("given", whole[0]))
                    viewed[number] = at
                else:
                    memory[number] = ("given", number)
                    last[memory[number]] = at
            last |= dict.fromkeys(writes, at)
            for name in {memory[n] for n in (*reads, *call.gives()) if n in memory}:
                self.touched[name].add(at)
            for need in needs:
                self.users[need].add(at)
            self.needs.append(needs)
            self.writes.append(writes)

    def _of_ids(self) -> set[int]:
        """Return the calls that distribute ids.

        They feed nothing but lookups, or no call outside shares their tensors.
        """
        calls = self.program.calls
        feeding = _closure(self.ends, self.needs, lambda at: not calls[at].is_collective)
        feeding -= self.backward
        # within the span of ids alone: counters of the dense part are whole numbers, too
        span = sorted(feeding | self.ends)
        candidates = feeding | {
            at
            for at in range(*((span[0], span[-1]) if span else (0,)))
            if self._whole(at) and not calls[at].is_collective
        }
        for at, needs in enumerate(self.needs):
            if needs and needs <= candidates - self.lookups and self._made_whole(at):
                candidates.add(at)
        while True:
            inside = candidates | self.ends
            foreign = {
                at
                for at in candidates - self.ends
                if not self.users[at] <= inside | self.backward
                or (at not in feeding and not self._alone(at, inside))
            }
            if not foreign:
                return candidates
            candidates -= foreign

    def _alone(self, at: int, inside: set[int]) -> bool:
        """Return True if no call outside takes or gives any memory that a call takes or gives."""
        call = self.program.calls[at]
        names = {self.memory.get(n) for n in (*call.reads(), *call.gives())}
        return all(self.touched[name] <= inside | self.backward for name in names)

    def _results(self) -> set[int]:
        """Return the calls from the lookups to the collectives that return their results."""
        calls = self.program.calls
        reached = set(self.lookups)
        last: set[int] = set()
        for at, needs in enumerate(self.needs):
            own = needs & (reached - last)
            rest = all(n in self.calls or _is_new(calls[n]) for n in needs - own)
            if at in self.calls or not own or not rest:
                continue
            if at in self.exchanges:
                last.add(at)
            elif not any(n in self.program.made for n in calls[at].reads()):
                reached.add(at)
        before = _closure(last, self.needs, lambda at: at in reached)
        return before | last

    def _gradients(self) -> set[int]:
        """Return the calls from the first collective of the gradients to the backward lookups."""
        calls = self.program.calls
        path: set[int] = set()
        for at in reversed(range(len(calls))):
            ahead = self.users[at] & (path | self.backward)
            if at in self.calls or not ahead or not self.users[at] <= path | self.calls:
                continue
            if not all(user in self.exchanges for user in ahead):
                path.add(at)
        first = path & self.exchanges
        after = _closure(first, self.users, lambda at: at in path)
        return first | after

    def _buffers(self) -> set[int]:
        """Return the calls that allocate tensors which only the sparse part fills."""
        return {
            at
            for at, call in enumerate(self.program.calls)
            if _is_new(call) and self.users[at] and self.users[at] <= self.calls
        }

    def problems(self) -> Iterable[str]:
        """Yield the reasons why the sparse part cannot be separated."""
        calls = self.program.calls
        for at in sorted(self.exchanges - self.calls):
            if not calls[at].collective.startswith("alltoall"):
                continue
            nth = sum(call.is_collective for call in calls[: at + 1])
            yield (
                f"{calls[at].op} (collective {nth}) carries floats that do not follow "
                "from a lookup, nor lead to its backward op"
            )
        own = {("given", n) for at in self.calls for n in calls[at].gives()}
        for at in sorted(self.calls):
            if any(name[0] == "given" and name not in own for name in self.writes[at]):
                yield f"{calls[at].op} writes a tensor that the dense part gives"

    def _whole(self, at: int) -> bool:
        """Return True if a call takes and gives tensors of whole numbers alone, at least one."""
        call = self.program.calls[at]
        specs = (self.specs.get(n) for n in (*call.reads(), *call.gives()))
        types = ["" if spec is None else spec.dtype for spec in specs]
        types += [spec.dtype for spec in call.specs if isinstance(spec, TensorSpec)]
        return bool(types) and all(dtype in WHOLE for dtype in types)

    def _made_whole(self, at: int) -> bool:
        up_front = self.program.made
        reads = self.program.calls[at].reads()
        return all(up_front[n].dtype in WHOLE for n in reads if n in up_front)


def _closure(start: set[int], edges: list[set[int]], goes_on: Callable[[int], bool]) -> set[int]:
    """Return the calls reachable along ``edges`` from ``start``, without ``start``."""
    reached: set[int] = set()
    pending = [n for at in start for n in edges[at]]
    while pending:
        at = pending.pop()
        if at not in reached and at not in start and goes_on(at):
            reached.add(at)
            pending.extend(edges[at])
    return reached


def _is_new(call: Call) -> bool:
    """Return True if a call gives a tensor whose values depend on no other."""
    return not call.reads() or call.op in LIKE


def _aliases(call: Call) -> tuple[list[int], list[int]]:
    """Return the tensors that a call writes in place, and those its outputs may be views of."""
    named = call.named()
    if call.is_collective:
        own = ("output", "tensors")
        return [n for name, term in named.items() if name.startswith(own) for n in slots(term)], []
    op = find_op(call.op, call.overload)
    if op is None:
        return slots(call.arguments[:1]) if call.op.endswith("_") else [], []
    written: list[int] = []
    viewed: list[int] = []
    for argument in op._schema.arguments:
        if argument.alias_info is not None:
            numbers = written if argument.alias_info.is_write else viewed
            numbers.extend(slots(named.get(argument.name)))
    gives_views = any(returned.alias_info is not None for returned in op._schema.returns)
    return written, [*viewed, *written] if gives_views else []
