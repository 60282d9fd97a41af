"""The dense part of an iteration as the ops that one rank runs, with the lookups among them.

Made at one batch size from a captured module or from the layers of a model file. What it costs is
said by `predictor.cost.dense`, what it keeps in memory by `predictor.model.memory`.

Why: docs/decisions/0050.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictor.model.op_calls import OpCall, Operand


@dataclass(frozen=True)
class Lookup:
    """An embedding module is called here.

    Args:
        module: its name in the workload's tables.
        outputs: what it gives back; the first op that reads one of these waits for the module.
    """

    module: str
    outputs: tuple[Operand, ...]


@dataclass(frozen=True)
class LookupBackward:
    """The gradients of an embedding module's outputs are complete."""

    module: str
    gradients: tuple[Operand, ...]


@dataclass(frozen=True)
class Gradient:
    """The gradient of a dense parameter is complete, of so many elements and bytes each."""

    elements: int
    item_bytes: int = 4


Event = OpCall | Lookup | LookupBackward | Gradient


@dataclass(frozen=True)
class DenseProgram:
    """What one rank runs in an iteration apart from the embedding modules and collectives.

    The numbers of storages are shared by all three parts. Memory that an op frees is gone before
    the next event.

    Args:
        batch_size: samples of the rank.
        forward, backward, optimizer: in the order in which they are issued; the backward is that
            of autograd, recomputation included.
        resident: storages that are there before the forward and stay: parameters and buffers.
        state_bytes: of the dense optimizer.
    """

    batch_size: int
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    optimizer: tuple[Event, ...]
    resident: tuple[Operand, ...] = ()
    state_bytes: int = 0

    def with_parameters(self, lengths: Sequence[int], states: int) -> DenseProgram:
        """With parameters that embedding modules hold but the dense optimizer steps.

        Args:
            lengths: elements of each, of 4 bytes; their gradients come last.
            states: of the optimizer, as large as the parameters.
        """
        if not lengths:
            return self
        parts = (self.forward, self.backward, self.optimizer)
        events = [event for part in parts for event in part]
        used = [o.storage for e in events for o in operands_of(e)]
        first = 1 + max([*used, *(o.storage for o in self.resident)], default=0)
        made = tuple(
            Operand(first + at, 4 * n, 0, (n,), (1,), 4, "fp32")
            for at, n in enumerate((*lengths, *lengths))
        )
        parameters = made[: len(lengths)]
        return replace(
            self,
            backward=(*self.backward, *map(Gradient, lengths)),
            optimizer=(*self.optimizer, OpCall("_foreach_add_", made, (), mutates=True)),
            resident=(*self.resident, *parameters),
            state_bytes=self.state_bytes + states * 4 * sum(lengths),
        )

    @property
    def gradient_bytes(self) -> int:
        """Of all dense parameters."""
        return sum(e.elements * e.item_bytes for e in self.backward if isinstance(e, Gradient))


def operands_of(event: Event) -> tuple[Operand, ...]:
    """All tensors of an event."""
    if isinstance(event, OpCall):
        return (*event.inputs, *event.outputs)
    if isinstance(event, Lookup):
        return event.outputs
    return event.gradients if isinstance(event, LookupBackward) else ()
