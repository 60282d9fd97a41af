"""The ops that a generated benchmark runs, without running it: its program over fake tensors.

Run as ``python -P -m shardopt.replay.predict.op_list FOLDER OUT`` with a rank's environment by
`shardopt.replay.predict.iteration`. The program is read as data and goes through PyTorch's
dispatcher with tensors that have shapes, strides and memory but no data; no code of the folder
runs.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from predictor.cost.ops.cpu_ops import BINS, VIEW, kind_and_sizes, reuse_bytes
from predictor.errors import InputError
from predictor.model.op_calls import OpCall, Operand
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

from shardopt.replay.predict.lookups import Lookup, lookup_of
from shardopt.replay.predict.source import read_program
from shardopt.replay.program.values import is_lookup
from shardopt.replay.write import MAIN
from shardopt.torchrec.capture.recorder import RecordedCall, Recorder

OWN = frozenset({"aten", "prim", "prims"})
COMMS = "c10d::"
READS = "aten::item"
"""Reads a number, which there is none of here; it moves no data."""


class _Listing:
    """What the program has done so far.

    `at` is the call of the program that is under way, `outer` that of each op so far, `events` the
    collectives and the waits for them.
    """

    def __init__(self) -> None:
        self.recorder = _Calls(self)
        self.at = -1
        self.outer: list[int] = []
        self.replaced: dict[int, str] = {}
        self.lookups: dict[int, Lookup] = {}
        self.events: list[dict[str, Any]] = []

    def begin(self) -> None:
        """An iteration starts; as of `runtime.collectives.Collectives`."""

    def run(self, kind: str, _: Sequence[Any], group: int) -> Any:
        """A collective starts; as of `runtime.collectives.Collectives`."""
        number = sum("kind" in event for event in self.events)
        self._event({"kind": kind, "group": group, "call": self.at})
        return _Wait(lambda: self._event({"waits_for": number}))

    def read(self) -> None:
        """A number is read from a tensor."""
        self.recorder.recording.calls.append(
            RecordedCall(OpCall("_local_scalar_dense", (), ()), READS)
        )
        self.outer.append(self.at)

    def _event(self, event: dict[str, Any]) -> None:
        self.events.append({"after": self.at, **event})


class _Wait:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class _Calls(Recorder):
    def __init__(self, listing: _Listing) -> None:
        super().__init__()
        self.listing = listing

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = len(self.recording.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.listing.outer += [self.listing.at] * (len(self.recording.calls) - before)
        return result

    def whole(self, name: str, before: int, given: Any, result: Any) -> None:
        """Note a custom op as one call, in place of what its stand-in ran."""
        listing = self.listing
        del self.recording.calls[before:], listing.outer[before:]
        lookup = listing.lookups.get(listing.at)
        inputs = self.operands(given)
        if lookup is not None:
            table = self._operand(lookup.weights)
            rows = replace(table, shape=(lookup.touched,), strides=(1,), offset=0)
            inputs = tuple(rows if of.storage == table.storage else of for of in inputs)
        call = OpCall(name, inputs, self.operands(result), mutates=result is None)
        self.recording.calls.append(RecordedCall(call, name))
        listing.outer.append(listing.at)


class _Program:
    """One rank's program, and what its tensors of whole numbers hold."""

    def __init__(self, replay: Any, mine: dict[str, Any], indices: str) -> None:
        made = mine["made"]
        self.fills = {
            id(replay.template[int(number)]): spec["fill"]
            for number, spec in made.items()
            if "fill" in spec
        }
        self.indices = indices


def _note_calls(op: Any, listing: _Listing, program: _Program) -> Callable[..., Any]:
    """The op's function, which first notes the call of the program that it serves."""
    function = op.function
    name = op.name.rpartition(".")[0]

    def run(*arguments: Any, **keywords: Any) -> Any:
        # the op counts a call before it makes it
        listing.at = op.calls[op.at - 1]
        if name == READS:
            listing.read()
            return 0
        own = name.partition("::")[0] in OWN or name.startswith(COMMS)
        before = len(listing.recorder.recording.calls)
        try:
            result = function(*arguments, **keywords)
        except (AssertionError, AttributeError, KeyError, RuntimeError) as error:
            # so fake tensors refuse ops that they do not know
            if own:
                raise RuntimeError(str(error)) from error
            result = op.stand_in(op.at - 1, arguments)
        if own:
            return result
        if is_lookup(name):
            found = lookup_of(op.name, arguments, keywords, program.fills, program.indices)
            listing.lookups |= {} if found is None else {listing.at: found}
        listing.recorder.whole(name, before, (arguments, keywords), result)
        return result

    return run


def list_ops(folder: Path) -> dict[str, Any]:
    """The calls of one rank's program with their sizes, and its collectives, in order."""
    # our own runtime, on the folder's data; it reads its options and its data when it is imported
    os.environ["BENCHMARK_FOLDER"] = str(folder)
    sys.argv = [str(folder / MAIN), "--device", "cpu"]
    from shardopt.replay.runtime.ops import Ops
    from shardopt.replay.runtime.replay import Replay
    from shardopt.replay.runtime.run import own_data
    from shardopt.replay.runtime.settings import cpu, device, stream

    mine = own_data()
    ops = Ops()
    words = {"device": device, "cpu": cpu, "stream": stream}
    program = read_program(folder / Path(mine["program"]).name, ops, words)
    listing = _Listing()
    with FakeTensorMode(), torch.no_grad():
        replay = Replay(program.iteration, ops, mine)
        ops.collectives = listing  # type: ignore[assignment]
        known = _Program(replay, mine, replay.indices)
        for op in ops.named.values():
            if callable(op.function):
                op.function = _note_calls(op, listing, known)
        with listing.recorder:
            replay.step()
    for op in ops.named.values():
        listing.replaced |= {op.calls[at]: op.name.rpartition(".")[0] for at in op.reasons}
    return {
        "ops": _ops(listing, mine["calls"]),
        "events": listing.events,
        "replaced": sorted(listing.replaced.items()),
        "groups": mine["groups"],
        "calls": [[call["op"], call.get("us"), call.get("bytes")] for call in mine["calls"]],
        "left_out": mine["left_out"],
    }


def _ops(listing: _Listing, program: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What calls do to data, in order; a call that touches none is a view, under its name."""
    calls = [recorded.call for recorded in listing.recorder.recording.calls]
    found: dict[int, list[dict[str, Any]]] = {}
    for at, call, reuse in zip(listing.outer, calls, reuse_bytes(calls), strict=True):
        kind, sizes = kind_and_sizes(call)
        if at in listing.lookups:
            kind, sizes = call.name, listing.lookups[at].sizes
        elif "::" in call.name:
            kind = call.name
            sizes = (_elements(call.outputs), _elements(call.inputs))
        if kind != VIEW:
            row = {"call": at, "kind": kind, "sizes": sizes, "reuse": reuse.tolist()}
            found.setdefault(at, []).append(row)
    for at, made in enumerate(program):
        if at not in found and not made["op"].startswith(COMMS):
            name = made["op"].rpartition("::")[2]
            empty = {"call": at, "kind": f"{VIEW} {name}", "sizes": (), "reuse": [0.0] * BINS}
            found[at] = [empty]
    return [row for _, rows in sorted(found.items()) for row in rows]


def _elements(operands: Sequence[Operand]) -> int:
    return sum(operand.elements for operand in operands)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    target = Path(sys.argv[2])
    try:
        target.write_text(json.dumps(list_ops(Path(sys.argv[1]).absolute())))
    except InputError as error:
        raise SystemExit(str(error)) from None
