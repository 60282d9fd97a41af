"""One rank of a benchmark: its tensors, its ops and one iteration of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from .checks import parts_of, refuse
from .ops import Op, Ops
from .settings import COMMS, data, device, is_selected, rank, settings
from .tensors import like, make_all


class Replay:
    """One rank of a benchmark."""

    def __init__(self, iteration: Sequence[Any], ops: Ops, mine: dict[str, Any]) -> None:
        self.ops, self.mine = ops, mine
        self.calls = mine["calls"]
        self.parts = [part for part in parts_of(iteration, mine) if is_wanted(part)]
        if not self.parts:
            names = sorted({name for names, _ in iteration for name in names})
            refuse(
                f"--from-annotation {settings.from_annotation!r}: no part has this name; there "
                f"are: {', '.join(names)}"
            )
        self.ran = [at for _, (start, end) in self.parts for at in range(start, end)]
        self.indices = settings.indices or data["indices"]
        self.template = make_all(
            mine["made"], mine["tensors"], device, self.indices, settings.seed + rank
        )
        self._complete()
        self._prepare()

    def _complete(self) -> None:
        """A part alone reads tensors that parts before it would have given."""
        specs: dict[int, Any] = {}
        for call in self.calls:
            for number, spec in zip(call.get("gives", ()), _flat(call), strict=False):
                specs.setdefault(number, spec)
        given: set[int] = set()
        for at in self.ran:
            for number in self.calls[at].get("reads", ()):
                if self.template[number] is None and number not in given and number in specs:
                    self.template[number] = like(specs[number], device)
            given.update(self.calls[at].get("gives", ()))

    def _prepare(self) -> None:
        of: dict[tuple[str, str], list[int]] = defaultdict(list)
        for at in self.ran:
            of[self.calls[at]["op"], self.calls[at].get("overload", "")].append(at)
        for key, op in self.ops.named.items():
            op.calls = of.get(key, [])
            op.recorded = [self.calls[at].get("outputs") for at in op.calls]
            op.skipped = not is_selected(op.name)

    def step(self) -> None:
        """One iteration."""
        t, c = list(self.template), self.mine["c"]
        work: list[Any] = []
        if self.ops.collectives is not None:
            self.ops.collectives.begin()
        for op in self.ops.named.values():
            op.at = 0
        # values are not the trace's: where they fade away, products would be slow for nothing
        torch.set_flush_denormal(True)
        for (_, part), _ in self.parts:
            part(t, c, work)
        torch.set_flush_denormal(False)

    def try_ops(self) -> None:
        """The first iterations: find out what can run, and bind it.

        With collectives one comes first that exchanges nothing: it tells which there are.
        """
        if self.ops.collectives is not None:
            self.step()
            self.ops.collectives.agree([at for at in self.ran if self._exchanges(at)])
            for op in self.ops.named.values():
                op.forget()
        self.step()
        if settings.last_op is not None:
            settings.last_op.unlink(missing_ok=True)
        for (_, part), _ in self.parts:
            names = part.__globals__
            for name, value in list(names.items()):
                if isinstance(value, Op):
                    names[name] = value.settle()

    def coverage(self) -> dict[str, Any]:
        """Which ops of the trace ran, by count and by their recorded time."""
        counted = [at for at in self.ran if self._counts(at)]
        failed = {
            op.calls[at]: (op.name, why)
            for op in self.ops.named.values()
            for at, why in op.reasons.items()
            if at < len(op.calls)
        }
        if self.ops.collectives is not None:
            for kind, nth, why in self.ops.collectives.not_run:
                op = self.ops.named[COMMS + kind, ""]
                failed[op.calls[nth]] = (op.name, why)
        left_out = self.mine["left_out"] if settings.from_annotation is None else []
        times = [self.calls[at].get("us") for at in counted]
        total_us = sum(us or 0 for us in times) + sum(item["us"] or 0 for item in left_out)
        ran = [at for at in counted if at not in failed]
        reasons: dict[str, int] = defaultdict(int)
        for name, why in failed.values():
            reasons[f"{name}: {why}"] += 1
        for item in left_out:
            reasons[f"{item['op']}: {item['reason']}"] += 1
        return {
            "total": len(counted) + len(left_out),
            "replayed": len(ran),
            "us": sum(self.calls[at].get("us") or 0 for at in ran),
            "total_us": total_us,
            "reasons": dict(reasons),
        }

    def _exchanges(self, at: int) -> bool:
        return self.calls[at]["op"].startswith(COMMS) and self._counts(at)

    def _counts(self, at: int) -> bool:
        call = self.calls[at]
        return is_selected(f"{call['op']}.{call.get('overload', '')}")


def is_wanted(part: Any) -> bool:
    """Whether a part of the iteration is one of those asked for."""
    (names, _), _ = part
    asked = settings.from_annotation
    return asked is None or asked in names or asked in [name.strip("# ") for name in names]


def _flat(call: dict[str, Any]) -> list[Any]:
    """Specs of the outputs that have a number, in order; as many as are known."""
    found: list[Any] = []
    for spec in call.get("outputs", ()):
        if spec is not None and not isinstance(spec[-1], str):
            found.extend(spec)
        else:
            found.append(spec)
    return found
