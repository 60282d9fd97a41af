"""One rank that trains a module with a feature processor: `feature_processor_worker JOB`, with the
model in `JOB/model.yaml` and the plan in `JOB/plan.json`.

`JOB/found.RANK.json` holds the ops of the processor in a step, before ids are sent, on what is
looked up and backward: their number and bytes; and the ids of each exchange.
"""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed import fp_embeddingbag
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from predictor.model.plan_json import load_plan
from shardopt.config import load_model
from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.distributed.ranks import join_group, leave_group

LARGE = 2000
"""Elements from which an operand is one of ids or outputs, not of parameters or splits."""


def tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values if isinstance(values, list | tuple) else [values]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


class Ops(TorchDispatchMode):
    """Counts ops that are no views, and the bytes of their large operands."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}
        self.part = ""
        self.moved: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given, out = [*tensors(args)], [*tensors(made)]
        before = {t.untyped_storage().data_ptr() for t in given}
        fresh = {t.untyped_storage().data_ptr() for t in out} - before
        name = func.name().split("::")[1].split(".")[0]
        if func.namespace == "c10d":
            moved = given[1] if name == "alltoall_base_" else given[0]
            self.moved.append((name, str(moved.dtype), moved.numel()))
        if self.part and (fresh or name.endswith("_")) and not name.startswith("empty"):
            written = given[:1] if name.endswith("_") else out
            read = given[1:] if name == "copy_" else [] if name == "zeros_like" else given
            large = [t for t in (*read, *written) if t.numel() >= LARGE]
            part = self.found.setdefault(self.part, {"bytes": 0, "ops": []})
            part["bytes"] += sum(t.numel() * t.element_size() for t in large)
            part["ops"].append(name)
        return made

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        before, self.part = self.part, part
        yield
        self.part = before


def short(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """With lengths of 4 bytes, as TorchRec's own data sets have."""
    return KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths().int())


def watch(ops: Ops, ids: dict[str, list[int]]) -> None:
    """Note what TorchRec's functions for feature processors run."""
    sharded: Any = ShardedFeatureProcessedEmbeddingBagCollection
    prepare, weigh = (
        fp_embeddingbag.modify_input_for_feature_processor,
        sharded.apply_feature_processors_to_kjt_list,
    )
    spread = sharded.add_fp_params_grad_sync_callback

    def prepared(features: Any, *args: Any, **more: Any) -> Any:
        ids["local"] = [features.values().numel()]
        with ops.during("prepare"):
            return prepare(features, *args, **more)

    def weighed(self: Any, given: Any) -> Any:
        ids["looked up"] = [features.values().numel() for features in given]
        ids["features"] = [len(features.keys()) for features in given]
        with ops.during("weigh"):
            return weigh(self, given)

    def spreading(self: Any, awaitable: Any) -> Any:
        with ops.during("spread"):
            found = spread(self, awaitable)
        (add,) = found.callbacks[-1:]

        def added(kt: Any) -> Any:
            with ops.during("spread"):
                return add(kt)

        found.callbacks[-1] = added
        return found

    fp_embeddingbag.modify_input_for_feature_processor = prepared
    sharded.apply_feature_processors_to_kjt_list = weighed
    sharded.add_fp_params_grad_sync_callback = spreading


def main(job: Path) -> None:
    logging.disable(logging.WARNING)
    rank = join_group(job)
    workload = load_model(job / "model.yaml")
    ring = [
        replace(batch, sparse={"fp": short(batch.sparse["fp"])})
        for batch in batch_ring(workload, rank=rank, size=4)
    ]
    training = Training(workload, load_plan(job / "plan.json"), torch.device("cpu"), ring)
    ops, ids = Ops(), dict[str, list[int]]()
    watch(ops, ids)
    training.step()
    ops.found.clear()
    with ops:
        backward = torch.Tensor.backward

        def back(self: torch.Tensor, *args: Any, **more: Any) -> None:
            with ops.during("backward"):
                backward(self, *args, **more)

        torch.Tensor.backward = back  # type: ignore[method-assign]
        training.step()
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    found = {"parts": ops.found, "ids": ids, "moved": ops.moved}
    (job / f"found.{rank}.json").write_text(json.dumps(found))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
