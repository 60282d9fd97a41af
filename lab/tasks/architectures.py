"""Tasks of models whose dense part is no DLRM: built for real, captured, and planned.

Each has TorchRec's plan and ours, and structures that need no search. Ours is searched on the
calibration of the task set, which no measured iteration is part of.

Why: docs/decisions/0012-dense-parts-tested-by-running.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from lab.architecture import Architecture, Sizes
from lab.tasks.draw import Task
from lab.tasks.models import (
    ARCHITECTURES,
    BATCH,
    PIPELINES,
    PRODUCT,
    count,
    log_uniform,
    pick,
    scale_rows,
    uniform,
    whole,
)
from lab.tasks.plans import (
    EFFORT,
    Candidate,
    plan_of,
    structures,
    their_plan,
    without_repeats,
)
from lab.tasks.task_set import TaskSet, task_name
from predictor.errors import InputError
from predictor.model.distribution import Distribution, Uniform, Zipf
from predictor.model.plan_check import RuntimeSetting, find_runtime_problem, in_torchrec_order
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload
from search.problem import Problem
from search.solve import solve
from search.stop import Stop
from shardopt.config.write import with_digest

BYTES = (80e6, 300e6)
AIM = (14.0, 40.0)
"""Between which the count of a model is drawn; a batch comes as near as it can."""
SEQUENCE_BATCH = (32, 64, 128, 256)
SHARE = (0.33, 3.0)
"""Count of the dense part over that of the tables."""
DRAWS = 200
OPTIMIZERS = ("sgd", "sgd", "adagrad", "adam")
IN_FEATURES = 13
SEQUENCES = "ec"
NOTHING = DenseArch(IN_FEATURES, (1,), (1,), "concat")
"""Stands for a dense part that is captured from the built module."""


@dataclass(frozen=True)
class DrawnModel:
    """A model before its dense part is captured.

    Args:
        workload: complete, if it is a DLRM; else its `dense` is `NOTHING` with the optimizer.
        architecture: of the dense part; None: a DLRM.
    """

    workload: Workload
    architecture: Architecture | None


@dataclass(frozen=True)
class Shape:
    """Tables, and how many products of a sample lie on the way through the dense part."""

    tables: Sequence[Table]
    products: float
    architecture: Architecture | None
    dense: DenseArch = NOTHING


def draw_architecture(seed: int) -> DrawnModel:
    """The model of a seed: the same on any machine.

    Raises:
        InputError: a seed below 0.
    """
    if seed < 0:
        raise InputError(f"a task's seed is {seed}; it must be at least 0")
    kinds = (_dlrm, _dcn_v2, _deepfm, _mmoe, _sasrec, _hstu, _two_dims)
    kind = kinds[seed % len(kinds)]
    name = f"{ARCHITECTURES}-{seed:03d}-{kind.__name__[1:]}"
    rng = random.Random(f"shardopt {ARCHITECTURES} {seed}")
    drawn = [_with_batch(name, kind(rng), rng) for _ in range(DRAWS)]
    return next((m for m in drawn if SHARE[0] < _balance(m) < SHARE[1]), drawn[0])[0]


def _with_batch(name: str, shape: Shape, rng: random.Random) -> tuple[DrawnModel, float]:
    """The model with the batch whose count is nearest to one drawn; its products too."""
    aim = log_uniform(rng, *AIM)
    pipeline, optimizer = pick(rng, PIPELINES), pick(rng, OPTIMIZERS)
    tables = scale_rows(shape.tables, log_uniform(rng, *BYTES))
    dense = replace(shape.dense, optimizer=optimizer)
    batches = BATCH if all(t.is_pooled for t in tables) else SEQUENCE_BATCH
    models = [Workload(name, batch, tuple(tables), dense, pipeline) for batch in batches]
    nearest = min(models, key=lambda m: abs(math.log(count(m, shape.products) / aim)))
    return DrawnModel(nearest, shape.architecture), shape.products


def _balance(drawn: tuple[DrawnModel, float]) -> float:
    """Count of the dense part over that of the tables."""
    model, products = drawn
    dense = PRODUCT * products * model.workload.batch_size
    return dense / (count(model.workload, products) - dense)


def _products(*layers: Sequence[int]) -> float:
    """Of the layers of some MLPs, given by their widths."""
    return sum(a * b for mlp in layers for a, b in pairwise(mlp))


def _dlrm(rng: random.Random) -> Shape:
    dim = pick(rng, (16, 32, 64))
    tables = _bags(rng, (8, 16), (dim,))
    bottom, top = pick(rng, ((128,), (256, 128))), pick(rng, ((256,), (512, 256), (512, 512, 256)))
    dense = DenseArch(IN_FEATURES, (*bottom, dim), (*top, 1), pick(rng, ("dot", "concat")))
    vectors = 1 + len(tables)
    width = dim * vectors if dense.interaction == "concat" else dim + vectors * (vectors - 1) // 2
    products = _products((IN_FEATURES, *bottom, dim), (width, *top, 1))
    return Shape(tables, products, None, dense)


def _dcn_v2(rng: random.Random) -> Shape:
    dim = pick(rng, (16, 32, 64))
    tables = _bags(rng, (6, 14), (dim,))
    width = dim * (1 + len(tables))
    layers, rank = whole(rng, 2, 4), pick(rng, (32, 64, 128))
    bottom, top = pick(rng, ((128,), (256, 128))), pick(rng, ((256, 128), (512, 256)))
    products = 2 * layers * rank * width + _products((IN_FEATURES, *bottom, dim), (width, *top, 1))
    sizes: Sizes = {"bottom": bottom, "layers": layers, "low_rank": rank, "top": top}
    return Shape(tables, products, Architecture("dcn_v2", IN_FEATURES, sizes))


def _deepfm(rng: random.Random) -> Shape:
    dim = pick(rng, (16, 32, 64))
    tables = _bags(rng, (8, 16), (dim,))
    hidden, deep = pick(rng, (128, 256, 512)), pick(rng, (256, 512, 1024))
    products = _products((IN_FEATURES, hidden, dim), (dim * (1 + len(tables)), deep))
    sizes: Sizes = {"hidden": hidden, "deep": deep}
    return Shape(tables, products, Architecture("deepfm", IN_FEATURES, sizes))


def _mmoe(rng: random.Random) -> Shape:
    tables = _bags(rng, (6, 12), (16, 32, 64))
    width = IN_FEATURES + sum(t.embedding_dim for t in tables)
    experts, tasks = whole(rng, 3, 6), whole(rng, 2, 4)
    expert = pick(rng, ((128, 64), (256, 128), (192,)))
    tower = pick(rng, ((64,), (64, 32)))
    products = experts * _products((width, *expert)) + tasks * (
        width * experts + experts * expert[-1] + _products((expert[-1], *tower, 1))
    )
    sizes: Sizes = {"experts": experts, "expert": expert, "tasks": tasks, "tower": tower}
    return Shape(tables, products, Architecture("mmoe", IN_FEATURES, sizes))


def _sasrec(rng: random.Random) -> Shape:
    # in and out of attention and the two layers of the network; scores and their products
    return _attention(rng, "sasrec", per_item=12)


def _hstu(rng: random.Random) -> Shape:
    return _attention(rng, "hstu", per_item=5)


def _attention(rng: random.Random, kind: str, per_item: int) -> Shape:
    """Histories and bags.

    Args:
        per_item: products of a block and item over the square of the width, without attention's.
    """
    dim = pick(rng, (32, 64))
    length = whole(rng, 16, 48)
    pooling = round(uniform(rng, 0.6, 0.95) * length, 1)
    histories = whole(rng, 2, 4)
    names = [f"s{i:02d}" for i in range(histories)]
    sequences = [
        _sequence(rng, name, dim, 1.0 if i == histories else pooling)
        for i, name in enumerate([*names, "candidate"])
    ]
    bags = _bags(rng, (3, 8), (16, 32, 64))
    blocks, heads = whole(rng, 1, 3), pick(rng, (1, 2, 4))
    top = pick(rng, ((128,), (256, 128)))
    width = IN_FEATURES + 2 * dim + sum(t.embedding_dim for t in bags)
    of_block = length * (per_item * dim * dim + 2 * length * dim)
    products = blocks * of_block + _products((width, *top, 1))
    sizes: Sizes = {"length": length, "blocks": blocks, "heads": heads, "top": top}
    return Shape([*bags, *sequences], products, Architecture(kind, IN_FEATURES, sizes))


def _two_dims(rng: random.Random) -> Shape:
    narrow, wide = pick(rng, ((16, 64), (32, 128), (16, 128)))
    first = [replace(t, module="user") for t in _bags(rng, (5, 9), (narrow,))]
    second = [
        replace(_named(t, f"w{i:02d}"), module="item")
        for i, t in enumerate(_bags(rng, (3, 6), (wide,)))
    ]
    sizes = {
        "bottom": pick(rng, ((64,), (128, 64))),
        "first": pick(rng, ((256, 128), (512, 128))),
        "second": pick(rng, ((256, 128), (512, 256))),
        "top": pick(rng, ((128,), (256, 128))),
    }
    given = IN_FEATURES, len(first) * narrow, len(second) * wide
    towers = [(n, *sizes[m]) for n, m in zip(given, ("bottom", "first", "second"), strict=True)]
    products = _products(*towers, (sum(t[-1] for t in towers), *sizes["top"], 1))
    return Shape([*first, *second], products, Architecture("two_dims", IN_FEATURES, sizes))


def _bags(rng: random.Random, counts: tuple[int, int], dims: Sequence[int]) -> list[Table]:
    return [
        Table(
            f"t{i:02d}",
            int(log_uniform(rng, 1_000, 500_000)),
            pick(rng, dims),
            (Feature(f"f{i:02d}", round(log_uniform(rng, 1.0, 30.0), 1), distribution=_law(rng)),),
        )
        for i in range(whole(rng, *counts))
    ]


def _sequence(rng: random.Random, name: str, dim: int, pooling: float) -> Table:
    rows = int(log_uniform(rng, 5_000, 300_000))
    feature = Feature(f"{name}_ids", pooling, distribution=_law(rng))
    return Table(name, rows, dim, (feature,), SEQUENCES, pooling="none")


def _law(rng: random.Random) -> Distribution:
    alpha = round(uniform(rng, 0.5, 1.3), 2)
    return Zipf(alpha) if rng.random() < 0.7 else Uniform()


def _named(table: Table, name: str) -> Table:
    (feature,) = table.features
    return replace(table, name=name, features=(replace(feature, name=f"{name}_ids"),))


THEIRS, OURS = "torchrec", "shardopt"
MAX_PLANS = 6
STRUCTURES = (
    *("table_wise_by_lookups", "row_wise", "column_wise", "small_data_parallel"),
    *("mix_table_row_column", "mix_data_table_row", "table_wise_by_bytes", "table_wise_random"),
)
"""In the order in which they are taken until there are `MAX_PLANS`."""


def draw_architecture_task(seed: int, task_set: TaskSet) -> Task:
    """The model and plans of a seed.

    Args:
        task_set: whose calibration our plan is searched on.

    Raises:
        InputError: the seed is negative, or TorchRec's planner finds no plan.
    """
    drawn = draw_architecture(seed)
    workload = with_digest(captured(drawn, f"{task_name(seed)}.ops.json"))
    ranks = task_set.ranks
    ours = solve(
        Problem(workload, ranks, task_set.made.profile), Stop(effort=EFFORT), seed=0
    ).best.plan
    named = {THEIRS: their_plan(drawn.workload, ranks, seed), OURS: ours}
    known = structures(workload, ranks, random.Random(f"shardopt plans {seed}"))
    named |= {
        name: plan_of(workload, ranks, known[name])
        for name in STRUCTURES
        if name in known and _runs(known[name], workload, ranks)
    }
    different = without_repeats(named, workload).items()
    plans = {names[0]: plan for names, plan in islice(different, MAX_PLANS)}
    return Task(seed, task_name(seed), workload, plans, drawn.architecture)


def captured(drawn: DrawnModel, file: str) -> Workload:
    """The model with its dense part as the built module runs it; a DLRM as it is.

    Args:
        file: name of the ops file beside the model file.
    """
    from lab.rankers import RankerBuilder
    from shardopt.torchrec.capture.capture import capture_dense
    from shardopt.training.batch import computed_dense, synthetic_batch

    workload = drawn.workload
    if drawn.architecture is None:
        return workload
    dense = capture_dense(
        RankerBuilder(drawn.architecture)(workload, "meta"),
        workload.tables,
        workload.batch_size,
        example_inputs=synthetic_batch(workload),
        optimizer=computed_dense(workload).optimizer,
    )
    return replace(workload, dense=replace(dense, file=file))


def _runs(plan: Candidate, workload: Workload, ranks: Topology) -> bool:
    """Whether TorchRec runs it: FBGEMM replicates no sequences on CPUs."""
    world, group = ranks.world_size, ranks.intra_group_size
    return not any(
        find_runtime_problem(
            in_torchrec_order(placed),
            RuntimeSetting(
                (table.num_embeddings, table.embedding_dim), table.pooling, world, group, "cpu"
            ),
        )
        for table, placed in zip(workload.tables, plan, strict=True)
    )
