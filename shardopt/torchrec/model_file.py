"""A model file written from a real module, to plan where the module is not available."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from predictor.document import Problems
from predictor.errors import InputError
from predictor.model.captured import CapturedDense
from predictor.model.workload import Dense, Table, Workload
from shardopt.config import load_model
from shardopt.config.distributions import read_stats
from shardopt.config.model import read_dense
from shardopt.config.write import (
    ALL_UNIFORM,
    DISTRIBUTION,
    fill_model,
    relative,
    with_digest,
    write_model,
)
from shardopt.extras import needs_torchrec
from shardopt.files import atomic_write_text
from shardopt.formatting import listed
from shardopt.logs import silence_torchrec
from shardopt.torchrec.capture.capture import capture_dense
from shardopt.torchrec.capture.step import GIVEN, DenseOptimizer, name_of_optimizer
from shardopt.torchrec.pipelines import Assumed, priced_as
from shardopt.torchrec.read_module import (
    UserInputs,
    by_module,
    not_priced,
    read_workload,
    tables_of,
)

with needs_torchrec():
    from torch import nn
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.distributed.types import ModuleSharder


def to_yaml(
    module: nn.Module,
    path: str | PathLike[str],
    *,
    batch_size: int,
    stats: str | PathLike[str] | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
    default_pooling_factor: float | None = None,
    train_pipeline: Any = None,
    dense_data_type: str | None = None,
    dense_optimizer: DenseOptimizer | None = None,
    example_inputs: Any = None,
    compute_device: str = "cuda",
    dense: Mapping[str, Any] | None = None,
) -> Workload:
    """Write the model file of a module and the ops file beside it, or replace them.

    The module's training step runs once on fake tensors, and its ops are kept in
    ``<name>.ops.json``: nothing is computed, and the module is left as it is.

    What no module holds and nobody gives is guessed, and the file begins with a comment on each
    guess. Index distributions that no stats file has are written as uniform.

    Args:
        module: unsharded, on any device, ``meta`` too.
        batch_size: samples per rank.
        stats: a file of `shardopt stats` on data of the model. Its pooling factors hold where no
            constraint gives one, the module is captured at them, and the model file names its index
            distributions.
        constraints: TorchRec's, by table name; they carry pooling factors.
        sharders: TorchRec's default ones unless given.
        default_pooling_factor: of features for which no constraint gives one.
        train_pipeline: ``base``, ``sparse_dist``, ``prefetch_sparse_dist``, ``semi_sync``, or a
            train pipeline of TorchRec, its class or the name of that; the file says what is left
            out of it.
        dense_data_type: of the products: ``fp32``, ``tf32``, or ``bf16`` for a forward that runs
            under autocast.
        dense_optimizer: of the dense layers: ``sgd``, ``adagrad`` or ``adam``, which step all
            parameters at once on GPUs; or what makes one of a list of parameters, such as
            ``functools.partial(torch.optim.AdamW, fused=True)``.
        example_inputs: what the module's forward takes: a tuple, a mapping by parameter, or the
            only argument, on any device and of any batch size. None to make it from the features.
        compute_device: ``cuda`` or ``cpu``, where it is to run: attention with dropout is one op on
            GPUs alone.
        dense: the ``dense`` section of the file, for a module that cannot be captured.

    Returns:
        The workload as a reader of the file finds it.

    Raises:
        InputError: a fact is missing, a value is not allowed, the module holds what shardopt does
            not plan, or it cannot be captured; then the op and the line of the model are named.
    """
    assumed = Assumed("base") if train_pipeline is None else priced_as(train_pipeline)
    _check("dense_data_type", dense_data_type, ("fp32", "tf32", "bf16"))
    if dense_optimizer is not None:
        name_of_optimizer(dense_optimizer)
    _check("compute_device", compute_device, ("cuda", "cpu"))
    constraint_of = dict(constraints or {})
    chosen = list(get_default_sharders() if sharders is None else sharders)
    with silence_torchrec():
        one_gpu = TorchRecTopology(world_size=1, compute_device="cuda")
        # the file is for any device: one that a constraint asks for is checked when it is planned
        any_device = {
            name: replace(item, device_group=None) for name, item in constraint_of.items()
        }
        options = EmbeddingEnumerator(one_gpu, batch_size, any_device).enumerate(module, chosen)
    measured = {} if stats is None else read_stats(Path(stats))
    inputs = UserInputs(
        batch_size,
        constraint_of,
        None,
        default_pooling_factor,
        strict=True,
        measured=measured,
        train_pipeline=assumed,
    )

    def dense_of(tables: Sequence[Table]) -> Dense:
        if dense is not None:
            return _given_dense(dense)
        captured = capture_dense(
            module,
            tables,
            batch_size,
            example_inputs=example_inputs,
            optimizer=dense_optimizer or "sgd",
            data_type=dense_data_type or "fp32",
            device=compute_device,
        )
        return replace(captured, file=f"{Path(path).stem}.ops.json")

    workload = read_workload(module, chosen, options, inputs, dense_of)
    # with the user's constraints alone, not with all that a sharder offers
    tables = tuple(
        replace(table, constraints=replace(table.constraints, offered=None))
        for table in workload.tables
    )
    written = replace(workload, tables=tables)
    guessed: dict[str, object] = {
        f"train_pipeline is {written.train_pipeline}": train_pipeline,
        **_guessed_dense(workload.dense, dense_data_type, dense_optimizer, example_inputs),
        ALL_UNIFORM: None,
    }
    defaults = [t for t in tables_of(options, by_module(chosen)) if not t.names_optimizer]
    if defaults:
        names = listed(dict.fromkeys(table.option.name for table in defaults))
        guessed[f"optimizer is exact_sgd, FBGEMM's default, of {names}"] = None
    notes = ["Written from a module. Guessed, so correct what is otherwise:"]
    notes += [f"  {note}" for note, source in guessed.items() if source is None]
    left_out = [assumed.leaves_out] if assumed.leaves_out else []
    notes += [f"Not priced: {note}." for note in (*left_out, *not_priced(module, tables))]
    write_model(Path(path), written, notes)
    if stats is None:
        return with_digest(written, notes)
    named = relative(Path(stats), Path(path))
    values = {name: {DISTRIBUTION: {"file": named, "feature": name}} for name in measured}
    text = fill_model(Path(path).read_text(encoding="utf-8"), values, Path(path), Path(path))
    atomic_write_text(Path(path), text)
    return load_model(Path(path))


def _given_dense(section: Mapping[str, Any]) -> Dense:
    problems = Problems("dense=")
    section_dense, _ = read_dense(dict(section), Path(), problems)
    problems.raise_if_any()
    assert section_dense is not None
    return section_dense


def _guessed_dense(
    dense: Dense, data_type: str | None, optimizer: DenseOptimizer | None, example: Any
) -> dict[str, object]:
    """Notes on the dense part, and what would have said it."""
    if not isinstance(dense, CapturedDense):
        return {}
    captured = dense.captured
    whole_loss, any_batch = captured.loss == GIVEN, captured.scales or None
    return {
        "dense.data_type is fp32: no TF32, and no autocast around the module": data_type,
        f"dense.optimizer is {dense.optimizer}": optimizer,
        "the inputs of forward were made from the features": example,
        f"the loss is {captured.loss}": whole_loss or None,
        f"the ops are those of a batch of {captured.batch_size} and no other": any_batch,
    }


def _check(name: str, value: str | None, allowed: Collection[str]) -> None:
    if value is not None and value not in allowed:
        raise InputError(f"{name} is {value!r}; allowed are {', '.join(allowed)}")
