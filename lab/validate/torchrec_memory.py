"""Peak memory of the fullest rank of TorchRec's pipeline benchmark, from its ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from lab.validate.tables import ranks_of
from predictor.hardware.loader import context_bytes, load_hardware
from predictor.model.dlrm_program import OpWriter
from predictor.model.memory.peak import PeakMemory
from predictor.model.op_calls import (
    DenseProgram,
    Lookup,
    LookupBackward,
    OpCall,
    Operand,
    free_after_last_use,
)
from predictor.model.plan import ShardingPlan
from predictor.model.workload import Table, Workload

MAX_SEQUENCE = 20
"""Length to which `TestMixedEmbeddingSparseArch` pads a sequence, in ids."""


class StepMemory(NamedTuple):
    """Predicted peaks of the fullest rank, and its GPU's memory less the CUDA context; bytes."""

    allocated: float
    reserved: float
    capacity: float


def memory_of(workload: Workload, profile: str, ranks: int, plan: ShardingPlan) -> StepMemory:
    """Predict the memory of the fullest rank of a run."""
    hardware = load_hardware(profile)
    program = _Benchmark(workload).write()
    topology = ranks_of(hardware, ranks, ranks)
    peaks = PeakMemory(workload, topology, hardware.device, program).peaks(plan)
    return StepMemory(
        max(peak.allocated_bytes for peak in peaks),
        max(peak.reserved_bytes for peak in peaks),
        hardware.hbm_bytes - context_bytes(hardware),
    )


Backward = Callable[[Operand], Operand]


class _Benchmark(OpWriter):
    """Writer of the ops of one rank of the benchmark, at the workload's batch size."""

    def __init__(self, workload: Workload) -> None:
        super().__init__("fp32")
        self.workload = workload
        self.batch = workload.batch_size
        self.module_outputs = {m: self._outputs(m) for m in workload.modules}

    def write(self) -> DenseProgram:
        features = self.tensor((self.batch, self.workload.dlrm.in_features))
        mixed = bool(self.workload.dlrm.linears)
        dims = self.workload.dlrm.linears[:1] if mixed else ()
        widths = [o for _, o in dims] if mixed else self.workload.dlrm.bottom_mlp
        sparse, frame, sparse_back = self._mixed() if mixed else self._regrouped()
        dense, dense_back = self._layers(features, widths, swish=False)
        joined = self.op("cat", [dense, *sparse], self._wide(dense, *sparse))
        over = [o for _, o in self.workload.dlrm.linears[1:]] or self.workload.dlrm.top_mlp
        out, over_back = self._layers(joined, over, swish=not mixed)
        self.events.append(OpCall("frame", (*sparse, *frame), ()))
        forward, self.events = self.events, []
        grad = over_back(self.op("mean_backward", [out], self.like(out)))
        dense_back(self.columns(grad, 0, dense.shape[-1]))
        sparse_back(self.columns(grad, dense.shape[-1], joined.shape[-1] - dense.shape[-1]))
        backward, self.events = self.events, []
        self.each("_foreach_add_", self.parameters, self.gradients)
        lasting = [*self.parameters, features]
        parts = free_after_last_use((forward, backward, self.events), lasting)
        first, second, step = parts
        # the unsharded model stays in memory beside the sharded one (`runner` of the benchmark)
        whole = [self.like(parameter) for parameter in self.parameters]
        return DenseProgram(self.batch, first, second, step, (*self.parameters, *whole))

    def _tables(self, module: str) -> list[Table]:
        return [t for t in self.workload.tables if t.module == module]

    def _outputs(self, module: str) -> tuple[Operand, ...]:
        tables = self._tables(module)
        if tables[0].is_pooled:
            return (self.tensor((self.batch, sum(t.embedding_dim for t in tables))),)
        ids = [round(self.batch * t.lookups_per_sample) for t in tables]
        # one tensor for all features; each uses a part of it
        return (self.tensor((sum(ids), tables[0].embedding_dim)),)

    def _wide(self, *parts: Operand) -> Operand:
        return self.tensor((self.batch, sum(p.shape[-1] for p in parts)))

    def _layers(
        self, x: Operand, widths: Sequence[int], *, swish: bool
    ) -> tuple[Operand, Backward]:
        backs: list[Backward] = []
        for out in widths:
            x, back = self._linear(x, out)
            backs.append(back)
            if swish:
                x, back = self._swish(x)
                backs.append(back)

        def backward(grad: Operand) -> Operand:
            for back in reversed(backs):
                grad = back(grad)
            return grad

        return x, backward

    def _linear(self, x: Operand, out: int) -> tuple[Operand, Backward]:
        weight, take = self.parameter(out, x.shape[-1])
        y = self.op("addmm", [x, weight], self.tensor((self.batch, out)))

        def backward(grad: Operand) -> Operand:
            of_input = self.op("mm", [grad, weight], self.like(x))
            of_weight = self.op("mm", [grad, x], self.like(weight))
            take(of_weight)
            return of_input

        return y, backward

    def _swish(self, x: Operand) -> tuple[Operand, Backward]:
        normal = self.op("native_layer_norm", [x], self.like(x))
        gate = self.op("sigmoid", [normal], self.like(x))
        y = self.op("mul", [x, gate], self.like(x))

        def backward(grad: Operand) -> Operand:
            of_gate = self.op("mul", [grad, x], self.like(x))
            of_x = self.op("mul", [grad, gate], self.like(x))
            of_normal = self.op("sigmoid_backward", [of_gate, gate], self.like(x))
            of_norm = self.op("native_layer_norm_backward", [of_normal, x], self.like(x))
            return self.op("add", [of_x, of_norm], self.like(x))

        return y, backward

    def _regrouped(self) -> tuple[list[Operand], list[Operand], Callable[[Operand], None]]:
        """Write the modules' outputs side by side, then one tensor for each group."""
        modules = self.workload.modules
        self.events += [Lookup(m, self.module_outputs[m]) for m in modules]
        values = [self.module_outputs[m][0] for m in modules]
        widths = [v.shape[-1] for v in values]
        whole = self.op("cat", values, self._wide(*values))
        groups = [self.like(v) for v in values]
        self.events.append(OpCall("permute_multi_embedding", (whole,), tuple(groups)))

        def backward(grad: Operand) -> None:
            parts = self.side_by_side(grad, widths)
            copies = [self.op("clone", [part], self.like(part)) for part in parts]
            self.events.append(OpCall("permute", tuple(copies), (of_whole := self.like(whole),)))
            returned = zip(modules, self.side_by_side(of_whole, widths), strict=True)
            self.events += [LookupBackward(m, (part,)) for m, part in reversed([*returned])]

        return groups, [whole], backward

    def _mixed(self) -> tuple[list[Operand], list[Operand], Callable[[Operand], None]]:
        """Write pooled outputs beside padded sequences."""
        pooled = [m for m in self.workload.modules if self._tables(m)[0].is_pooled]
        sequences = [m for m in self.workload.modules if m not in pooled]
        parts, backs = [], []
        for module in pooled:
            self.events.append(Lookup(module, self.module_outputs[module]))
            parts.append(self.view("values", self.module_outputs[module][0]))
        for module in sequences:
            self.events.append(Lookup(module, self.module_outputs[module]))
            values, tables = self.module_outputs[module][0], self._tables(module)
            shape = (self.batch, MAX_SEQUENCE * tables[0].embedding_dim)
            padded = [self.op("to_dense", [values], self.tensor(shape)) for _ in tables]
            parts.append(self.op("cat", padded, self._wide(*padded)))
            backs.append((module, values, padded))
        whole = self.op("cat", parts, self._wide(*parts))
        self.events.append(OpCall("frame", tuple(p for _, v, ps in backs for p in (v, *ps)), ()))

        def backward(grad: Operand) -> None:
            first = sum(self.module_outputs[m][0].shape[-1] for m in pooled)
            for module, values, padded in backs:
                jagged = []
                for part in padded:
                    gradient = self.columns(grad, first, part.shape[-1])
                    share = self.tensor((values.shape[0] // len(padded), values.shape[1]))
                    copied = self.op("clone", [gradient], self.like(part))
                    jagged.append(self.op("to_jagged", [copied], share))
                    first += part.shape[-1]
                joined = self.op("cat", jagged, self.like(values))
                self.events.append(LookupBackward(module, (joined,)))
            first = 0
            for module in pooled:
                width = self.module_outputs[module][0].shape[-1]
                part = self.columns(grad, first, width)
                self.events.append(LookupBackward(module, (part,)))
                first += width

        return [whole], [], backward
