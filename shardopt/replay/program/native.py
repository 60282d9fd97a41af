"""Backward functions in C++ that no op stands for, and the records of collectives."""

from __future__ import annotations

import re
from collections.abc import Sequence

from predictor.trace.execution import COMMS, ExecutionTrace, Node
from shardopt.replay.program.select import ChosenOp, Tree
from shardopt.replay.program.tensors import TensorUse, tensors_of

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
