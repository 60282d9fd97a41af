"""The ops that a generated benchmark runs, without running it: its data over fake tensors.

Run as ``python -P -m shardopt.replay.op_list FOLDER OUT`` by
`shardopt.replay.predict`. It reads `rank*.json` alone: no program is parsed or run. The
ops that the data names go through PyTorch's dispatcher with tensors that have shapes, strides and
memory but no data.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from predictor.cost.ops.cpu_ops import BINS, VIEW, kind_and_sizes, reuse_bytes
from predictor.errors import InputError
from predictor.model.distribution import Distribution, Empirical, Uniform, Zipf
from predictor.model.op_calls import OpCall, Operand
from shardopt.extras import needs_torchrec
from shardopt.files import decode, read_bytes

with needs_torchrec():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

from shardopt.replay.program.schema import find_op, word_value
from shardopt.replay.program.values import is_lookup
from shardopt.replay.runtime.checks import BadDataError, common_data, rank_data
from shardopt.replay.runtime.tensors import ON_CPU, difference, like, make_all, shared_out
from shardopt.torchrec.capture.recorder import RecordedCall, Recorder

OWN = ("aten::", "prim::", "prims::")
COMMS = "c10d::"
BACKWARD = "backward of "
READS = "aten::item"
"""Reads a number, which there is none of here; it moves no data."""
FAILS = (
    *(AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError, IndexError),
)
"""How fake tensors refuse ops that they do not know."""
TENSOR = re.compile(r"t\[(\d+)\]")
CPU = torch.device("cpu")
REMEDY = "generate the benchmark again from its trace with `shardopt bench generate`"


@dataclass(frozen=True)
class Lookup:
    """A forward or backward op of FBGEMM on a CPU.

    Args:
        weights: of all tables.
        touched: elements of its distinct rows.
        sizes: tables, ids, elements of all bags, elements gathered, distinct rows.
    """

    weights: Any
    touched: int
    sizes: tuple[int, ...]


class _Listing(Recorder):
    """Runs one rank's calls on fake tensors and notes what they do.

    `at` is the call that is under way, `outer` that of each op so far, `events` the collectives and
    the waits for them, `replaced` the calls that cannot run.

    Args:
        data: of the rank's file.
        indices: how ids are drawn where nothing else says it.
    """

    def __init__(self, data: dict[str, Any], indices: str) -> None:
        super().__init__()
        self.calls, self.indices = data["calls"], indices
        self.tensors = make_all(data["made"], data["tensors"], CPU, indices, 0)
        self.fills = {
            id(self.tensors[int(number)]): spec["fill"]
            for number, spec in data["made"].items()
            if "fill" in spec
        }
        self.kept: list[Any] = list(self.tensors)
        self.at, self.started = -1, 0
        self.outer: list[int] = []
        self.events: list[dict[str, Any]] = []
        self.replaced: dict[int, str] = {}
        self.lookups: dict[int, Lookup] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = len(self.recording.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.outer += [self.at] * (len(self.recording.calls) - before)
        return result

    def run(self) -> None:
        """All calls in order."""
        with self:
            for at, call in enumerate(self.calls):
                result = self._call(at, call)
                if targets := call.get("targets"):
                    self._place(targets[0] if len(targets) == 1 else targets, result)
                del result
                for number in call.get("frees", ()):
                    self.tensors[number] = None
                for number in call.get("waits", ()):
                    self.events.append({"after": self.at, "waits_for": number})

    def _place(self, target: Any, of: Any) -> None:
        """Keep what a call gives under the number, or the nested numbers, that it has."""
        if isinstance(target, list):
            for pair in zip(target, of, strict=False):
                self._place(*pair)
        elif target is not None:
            self.tensors[target] = of

    def _call(self, at: int, call: dict[str, Any]) -> Any:
        name = call["op"]
        if name.startswith(BACKWARD):
            return None
        arguments = [self._value(of) for of in call["arguments"]]
        keywords = {key: self._value(of) for key, of in call.get("keywords", {}).items()}
        if name.startswith(COMMS):
            self.at = at
            event = {"kind": name.removeprefix(COMMS), "group": keywords["group"], "call": at}
            self.events.append({"after": at, **event})
            return None
        result = self._op(at, call, arguments, keywords)
        return (result, (result, arguments[0])) if call.get("with_grad") else result

    def _value(self, of: Any) -> Any:
        if isinstance(of, list):
            return [self._value(item) for item in of]
        if not isinstance(of, str):
            return of
        match = TENSOR.fullmatch(of)
        return word_value(of) if match is None else self.tensors[int(match[1])]

    def _op(
        self, at: int, call: dict[str, Any], arguments: list[Any], keywords: dict[str, Any]
    ) -> Any:
        name = call["op"]
        op = find_op(name, call["overload"])
        if op is None:
            return self._replace(at, call)
        self.at = at
        if name == READS:
            recorded = RecordedCall(OpCall("_local_scalar_dense", (), ()), READS)
            self.recording.calls.append(recorded)
            self.outer.append(at)
            return 0
        before = len(self.recording.calls)
        own = name.startswith(OWN)
        try:
            result = ON_CPU.get(name, ("", op))[1](*arguments, **keywords)
        except FAILS:
            if own:
                return self._replace(at, call)
            result = self._stand_in(call)
        if not own:
            if is_lookup(name):
                found = self._lookup(op, arguments, keywords)
                self.lookups |= {} if found is None else {at: found}
            self._whole(name, before, (arguments, keywords), result)
        return self._replace(at, call) if difference(result, call.get("outputs")) else result

    def _replace(self, at: int, call: dict[str, Any]) -> Any:
        self.replaced[at] = call["op"]
        return self._stand_in(call)

    def _stand_in(self, call: dict[str, Any]) -> Any:
        """Tensors as the call gave them in the trace; a replay makes them once and keeps them."""
        made = [like(spec, CPU) for spec in call.get("outputs", ())]
        self.kept.append(made)
        return made[0] if len(made) == 1 else made

    def _whole(self, name: str, before: int, given: Any, result: Any) -> None:
        """Note a custom op as one call, in place of what its stand-in ran."""
        del self.recording.calls[before:], self.outer[before:]
        lookup = self.lookups.get(self.at)
        inputs = self.operands(given)
        if lookup is not None:
            table = self._operand(lookup.weights)
            rows = replace(table, shape=(lookup.touched,), strides=(1,), offset=0)
            inputs = tuple(rows if of.storage == table.storage else of for of in inputs)
        call = OpCall(name, inputs, self.operands(result), mutates=result is None)
        self.recording.calls.append(RecordedCall(call, name))
        self.outer.append(self.at)

    def _lookup(self, op: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Lookup | None:
        """What a lookup goes through; None where the data do not say how the tables are split."""
        names = [of.name for of in op._schema.arguments]
        named = dict(zip(names, arguments, strict=False)) | keywords
        marks = self.fills.get(id(named.get("D_offsets")), {}).get("values", ())
        widths = [after - before for before, after in pairwise(marks)]
        drawn = self.fills.get(id(named["indices"]), {})
        rows = drawn.get("rows", ())
        weights = named["weights"][0] if "weights" in named else named.get("host_weights")
        if not widths or len(rows) != len(widths) or weights is None:
            return None
        count, bags = named["indices"].numel(), named["offsets"].numel() - 1
        tables = len(widths)
        ids = shared_out(count, drawn.get("shares", [1.0] * tables))
        skews = [self.indices] * tables
        if "laws" in drawn:
            skews = [drawn["laws"][at] for at in drawn["law"]]
        distinct = [
            _distribution(skew).bins(of).unique(n) if n else 0.0
            for skew, of, n in zip(skews, rows, ids, strict=True)
        ]
        touched = sum(n * width for n, width in zip(distinct, widths, strict=True))
        sizes = (
            tables,
            count,
            bags // tables * sum(widths),
            sum(n * width for n, width in zip(ids, widths, strict=True)),
            round(sum(distinct)),
        )
        return Lookup(weights, round(touched), sizes)

    def ops(self) -> list[dict[str, Any]]:
        """What calls do to data, in order; a call that touches none is a view, under its name."""
        calls = [recorded.call for recorded in self.recording.calls]
        found: dict[int, list[dict[str, Any]]] = {}
        for at, call, reuse in zip(self.outer, calls, reuse_bytes(calls), strict=True):
            kind, sizes = kind_and_sizes(call)
            if at in self.lookups:
                kind, sizes = call.name, self.lookups[at].sizes
            elif "::" in call.name:
                kind = call.name
                sizes = (_elements(call.outputs), _elements(call.inputs))
            if kind != VIEW:
                row = {"call": at, "kind": kind, "sizes": sizes, "reuse": reuse.tolist()}
                found.setdefault(at, []).append(row)
        for at, made in enumerate(self.calls):
            if at not in found and not made["op"].startswith(COMMS):
                name = made["op"].rpartition("::")[2]
                empty = {"call": at, "kind": f"{VIEW} {name}", "sizes": (), "reuse": [0.0] * BINS}
                found[at] = [empty]
        return [row for _, rows in sorted(found.items()) for row in rows]


def _distribution(of: Any) -> Distribution:
    """Of ids that `shardopt.replay.runtime.tensors.draw_by` draws."""
    if not isinstance(of, str):
        return Empirical(tuple(of["counts"]), tuple(of["weights"]))
    return Uniform() if of == "uniform" else Zipf(float(of.partition(":")[2]))


def _elements(operands: Sequence[Operand]) -> int:
    return sum(operand.elements for operand in operands)


def _read(path: Path, check: Callable[[Any, str], None]) -> dict[str, Any]:
    """A data file of a benchmark, once it has passed the check that the benchmark itself makes."""
    try:
        data: Any = json.loads(decode(read_bytes(path, "benchmark's data"), path))
        check(data, "")
    except (ValueError, BadDataError, RecursionError) as error:
        raise InputError(f"{path}: {error}; {REMEDY}") from None
    return dict(data)


def list_ops(folder: Path) -> list[dict[str, Any]]:
    """Of each rank, the calls of its program with their sizes, and its collectives, in order.

    Raises:
        InputError: the folder holds no data that ops can be listed from.
    """
    common = _read(folder / "data.json", common_data)
    recorded = common["ranks"]
    found = []
    for rank in range(common["world_size"]):
        # a rank without a recording of its own runs another's
        at = recorded.index(rank) if rank in recorded else rank % len(recorded)
        path = folder / f"rank{at}.json"
        data = _read(path, rank_data)
        if any("arguments" not in call for call in data["calls"]):
            raise InputError(f"{path}: has no arguments of ops, as shardopt wrote once; {REMEDY}")
        try:
            with FakeTensorMode(), torch.no_grad():
                listing = _Listing(data, common["indices"])
                listing.run()
        except (*FAILS, OverflowError, MemoryError) as error:
            raise InputError(f"{path}: is no data of ops: {error}; {REMEDY}") from None
        calls = [[call["op"], call.get("us"), call.get("bytes")] for call in data["calls"]]
        found.append(
            {
                "ops": listing.ops(),
                "events": listing.events,
                "replaced": sorted(listing.replaced.items()),
                "calls": calls,
                "groups": data["groups"],
                "left_out": data["left_out"],
            }
        )
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    target = Path(sys.argv[2])
    try:
        target.write_text(json.dumps(list_ops(Path(sys.argv[1]).absolute())))
    except InputError as error:
        raise SystemExit(str(error)) from None
