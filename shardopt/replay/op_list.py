"""The ops that a generated benchmark runs, without running it: its data over fake tensors.

Run as ``python -P -m shardopt.replay.op_list FOLDER OUT`` by
`shardopt.replay.predict`. It reads `rank*.json` alone: no program is parsed or run. The
ops that the data names go through PyTorch's dispatcher with tensors that have shapes, strides and
memory but no data.
"""

from __future__ import annotations

import json
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
from predictor.model.op_calls import OpCall
from shardopt.extras import needs_torchrec
from shardopt.files import decode, read_bytes

with needs_torchrec():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

from shardopt.replay.program.schema import find_op, word_value
from shardopt.replay.program.values import is_lookup
from shardopt.replay.runtime.checks import COMMS, BadDataError, common_data, number_of, rank_data
from shardopt.replay.runtime.tensors import ON_CPU, difference, like, make_all, shared_out
from shardopt.torchrec.capture.recorder import RecordedCall, Recorder

OWN = ("aten::", "prim::", "prims::")
BACKWARD = "backward of "
READS = "aten::item"
"""Reads a number, which there is none of here; it moves no data."""
FAILS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""How fake tensors refuse ops that they do not know."""
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

    `calls` has what the op graph needs of each, `events` the collectives and the waits for them,
    `replaced` the calls that cannot run.

    Args:
        data: of the rank's file.
        indices: how ids are drawn where nothing else says it.
    """

    def __init__(self, data: dict[str, Any], indices: str) -> None:
        super().__init__()
        self.data, self.indices = data, indices
        self.tensors = make_all(data["made"], data["tensors"], CPU, indices, 0)
        self.fills = {
            id(self.tensors[int(number)]): spec["fill"]
            for number, spec in data["made"].items()
            if "fill" in spec
        }
        self.kept: list[Any] = list(self.tensors)
        self.events: list[dict[str, Any]] = []
        self.replaced: set[int] = set()
        self.lookups: dict[int, Lookup] = {}

    def run(self) -> list[list[Any]]:
        """All calls in order.

        Returns:
            Of each: how many events come before it, its op, its recorded time, and what it does to
            data as (kind, sizes, reuse); None for a collective, nothing for one that cannot run.
        """
        places = []
        with self:
            for at, call in enumerate(self.data["calls"]):
                before, start = len(self.events), len(self.recording.calls)
                result = self._call(at, call)
                places.append((before, start, len(self.recording.calls)))
                if targets := call.get("targets"):
                    self._place(targets[0] if len(targets) == 1 else targets, result)
                del result
                for number in call.get("frees", ()):
                    self.tensors[number] = None
                self.events += [{"waits_for": number} for number in call.get("waits", ())]
        recorded = [of.call for of in self.recording.calls]
        reuse = [bins.tolist() for bins in reuse_bytes(recorded)]
        found: list[list[Any]] = []
        for at, (before, start, end) in enumerate(places):
            ops = zip(recorded[start:end], reuse[start:end], strict=True)
            name, us = self.data["calls"][at]["op"], self.data["calls"][at].get("us")
            rows = [row for op, bins in ops if (row := self._row(at, op, bins))[0] != VIEW]
            if name.startswith(COMMS):
                found.append([before, name, us, None])
            elif at in self.replaced:
                found.append([before, name, us, []])
            else:
                # a call that touches no data is a view, under its name
                view = f"{VIEW} {name.rpartition('::')[2]}", (), [0.0] * BINS
                found.append([before, name, us, rows or [view]])
        return found

    def _row(self, at: int, call: OpCall, reuse: list[float]) -> tuple[str, Any, list[float]]:
        kind, sizes = kind_and_sizes(call)
        if at in self.lookups:
            kind, sizes = call.name, self.lookups[at].sizes
        elif "::" in call.name:
            # kernel models of lookups go by tables: without them there is none
            kind = f"unsplit {call.name}" if is_lookup(call.name) else call.name
            sizes = tuple(sum(of.elements for of in side) for side in (call.outputs, call.inputs))
        return kind, sizes, reuse

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
            group, size = self.data["groups"][keywords["group"]], call.get("bytes") or 0
            kind = name.removeprefix(COMMS)
            self.events.append({"kind": kind, "bytes": size, "group": group})
            return None
        op = find_op(name, call["overload"])
        if op is None:
            return self._replace(at, call)
        result = self._op(at, call, op, arguments, keywords)
        return (result, (result, arguments[0])) if call.get("with_grad") else result

    def _value(self, of: Any) -> Any:
        if isinstance(of, list):
            return [self._value(item) for item in of]
        number = number_of(of)
        if number is not None:
            return self.tensors[number]
        return word_value(of) if isinstance(of, str) else of

    def _op(
        self, at: int, call: dict[str, Any], op: Any, arguments: list[Any], keywords: dict[str, Any]
    ) -> Any:
        name, before = call["op"], len(self.recording.calls)
        if name == READS:
            self._record(OpCall("_local_scalar_dense", (), ()), READS)
            return 0
        own = name.startswith(OWN)
        try:
            result = ON_CPU.get(name, ("", op))[1](*arguments, **keywords)
        except FAILS:
            if own:
                return self._replace(at, call)
            result = self._stand_in(call)
        if not own:
            lookup = self._lookup(op, arguments, keywords) if is_lookup(name) else None
            # one call in place of what its stand-in ran
            del self.recording.calls[before:]
            inputs = self.operands((arguments, keywords))
            if lookup is not None:
                self.lookups[at] = lookup
                table = self._operand(lookup.weights)
                rows = replace(table, shape=(lookup.touched,), strides=(1,), offset=0)
                inputs = tuple(rows if of.storage == table.storage else of for of in inputs)
            self._record(OpCall(name, inputs, self.operands(result), mutates=result is None), name)
        return self._replace(at, call) if difference(result, call.get("outputs")) else result

    def _record(self, call: OpCall, name: str) -> None:
        self.recording.calls.append(RecordedCall(call, name))

    def _replace(self, at: int, call: dict[str, Any]) -> Any:
        self.replaced.add(at)
        return self._stand_in(call)

    def _stand_in(self, call: dict[str, Any]) -> Any:
        """Tensors as the call gave them in the trace; a replay makes them once and keeps them."""
        made = [like(spec, CPU) for spec in call.get("outputs", ())]
        self.kept.append(made)
        return made[0] if len(made) == 1 else made

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
        skews = [drawn["laws"][at] for at in drawn["law"]] if "laws" in drawn else [self.indices]
        distinct = [
            _distribution(skews[at % len(skews)]).bins(rows[at]).unique(n) if n else 0.0
            for at, n in enumerate(ids)
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


def _distribution(of: Any) -> Distribution:
    """Of ids that `shardopt.replay.runtime.tensors.draw_by` draws."""
    if not isinstance(of, str):
        return Empirical(tuple(of["counts"]), tuple(of["weights"]))
    return Uniform() if of == "uniform" else Zipf(float(of.partition(":")[2]))


def _read(path: Path, check: Callable[[Any], None]) -> dict[str, Any]:
    """A data file of a benchmark, once it has passed the check that the benchmark itself makes."""
    try:
        data: Any = json.loads(decode(read_bytes(path, "benchmark's data"), path))
        check(data)
    except (ValueError, BadDataError, RecursionError) as error:
        raise InputError(f"{path}: {error}; {REMEDY}") from None
    return dict(data)


def list_ops(folder: Path) -> list[dict[str, Any]]:
    """Of each rank its calls (`_Listing.run`), its events in order, and what the trace has besides.

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
                calls = listing.run()
        except (*FAILS, OverflowError, MemoryError) as error:
            raise InputError(f"{path}: is no data of ops: {error}; {REMEDY}") from None
        left_out = [[item["op"], item["us"]] for item in data["left_out"]]
        found.append({"calls": calls, "events": listing.events, "left_out": left_out})
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    target = Path(sys.argv[2])
    try:
        target.write_text(json.dumps(list_ops(Path(sys.argv[1]).absolute())))
    except InputError as error:
        raise SystemExit(str(error)) from None
