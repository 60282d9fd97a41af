"""The ops that a generated benchmark runs, without running it: its program over fake tensors.

Run as ``python -m shardopt.replay.op_list FOLDER OUT`` with a rank's environment by
`shardopt.replay.predict`; the program goes through PyTorch's dispatcher with tensors that have
shapes, strides and memory but no data.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from predictor.kernels.cpu_ops import kind_and_sizes
from predictor.op_calls import OpCall
from predictor.reuse import reuse_bytes
from shardopt.torchrec.install import needs_torchrec

with needs_torchrec():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

from shardopt.bench.transformers_ops import Recorded, Recorder

OWN = frozenset({"aten", "prim", "prims"})
READS = "aten::item"
"""Reads a number, which there is none of here; it moves no data."""


class _Listing:
    """What the program has done so far.

    `at` is the call of the program that is under way, `starts` the ops before each, `events` the
    collectives and the waits for them.
    """

    def __init__(self) -> None:
        self.recorder = _Calls(self)
        self.at = -1
        self.outer: list[int] = []
        self.foreign: dict[int, str] = {}
        self.events: list[dict[str, Any]] = []
        self.agreed = False
        self.notes: list[str] = []
        self.bytes: list[int] = []

    def begin(self) -> None:
        """An iteration starts; as of `runtime.collectives.Collectives`."""

    def run(self, kind: str, _: Sequence[Any], group: int) -> Any:
        """A collective starts; as of `runtime.collectives.Collectives`."""
        number = sum("kind" in event for event in self.events)
        self._event({"kind": kind, "group": group, "call": self.at})
        return _Wait(lambda: self._event({"waits_for": number}))

    def read(self) -> None:
        """A number is read from a tensor."""
        self.recorder.recording.calls.append(Recorded(OpCall("_local_scalar_dense", (), ()), READS))
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
        listing = self.listing
        if func.namespace not in OWN:
            listing.foreign[listing.at] = str(func._schema.name)
        before = len(self.recording.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        listing.outer += [listing.at] * (len(self.recording.calls) - before)
        return result


def _noted(op: Any, listing: _Listing) -> Callable[..., Any]:
    """The op's function, which first says that it is its turn."""
    function = op.function

    def run(*arguments: Any, **keywords: Any) -> Any:
        # the op counts a call before it makes it
        listing.at = op.calls[op.at - 1]
        if op.name.rpartition(".")[0] == READS:
            listing.read()
            return 0
        try:
            return function(*arguments, **keywords)
        except (AssertionError, AttributeError, KeyError) as error:
            # so fake tensors refuse ops that they do not know; the op is then replaced
            raise RuntimeError(str(error)) from error

    return run


def listed(folder: Path) -> dict[str, Any]:
    """The calls of one rank's program with their sizes, and its collectives, in order."""
    sys.path.insert(0, str(folder))
    sys.argv = [str(folder / "benchmark.py"), "--device", "cpu"]
    runtime = importlib.import_module("runtime.run")
    mine = runtime.own_data()
    program = importlib.import_module(Path(mine["program"]).stem)
    listing = _Listing()
    with FakeTensorMode(), torch.no_grad():
        replay = runtime.Replay(program.ITERATION, program.ops, mine)
        program.ops.collectives = listing
        for op in program.ops.named.values():
            if callable(op.function):
                op.function = _noted(op, listing)
        with listing.recorder:
            replay.step()
    for op in program.ops.named.values():
        listing.foreign |= {op.calls[at]: op.name.rpartition(".")[0] for at in op.reasons}
    calls = [recorded.call for recorded in listing.recorder.recording.calls]
    return {
        "ops": [
            {"call": at, "kind": kind, "sizes": sizes, "reuse": reuse.tolist()}
            for at, (kind, sizes), reuse in zip(
                listing.outer, map(kind_and_sizes, calls), reuse_bytes(calls), strict=True
            )
        ],
        "events": listing.events,
        "foreign": sorted(listing.foreign.items()),
        "groups": mine["groups"],
        "calls": [[call["op"], call.get("us"), call.get("bytes")] for call in mine["calls"]],
        "left_out": mine["left_out"],
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    Path(sys.argv[2]).write_text(json.dumps(listed(Path(sys.argv[1]).absolute())))
