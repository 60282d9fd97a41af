"""Checks that a plan fits a model: each table is planned once and tiled exactly by its shards.

`find_runtime_problem` says what TorchRec's runtime cannot run of the plans that shardopt can write.
The block sizes are those of TorchRec's `calculate_shard_sizes_and_offsets`; the ranks are those its
sharding classes assume (`BaseRwEmbeddingSharding._shard` and its siblings), which mostly read the
shards by position and would go wrong silently, or fail deep inside, on anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from predictor.errors import PlanError, did_you_mean
from predictor.model.memory.ranks import is_averaged
from predictor.model.plan import (
    ROW_SPLITS,
    SERVED,
    ComputeKernel,
    Shard,
    ShardingPlan,
    ShardingType,
    TablePlan,
    TablePlans,
)
from predictor.model.topology import Topology
from predictor.model.workload import Workload


def check_plan(plan: ShardingPlan, workload: Workload, *, where: str = "plan") -> ShardingPlan:
    """Return the plan under the workload's own table keys and module names, if it fits.

    Plans made from a module carry the module's path where the model file has a name, so tables are
    found by name, and by module only where two modules have tables of one name.

    Args:
        where: the plan's file, for messages.
    """
    homes = [(t.module, t.name) for t in workload.tables]
    planned: dict[int, TablePlan] = {}
    for key, index in assign_tables(plan, homes, where=where, what=workload.name).items():
        table = workload.tables[index]
        problem = table_problem(
            plan.tables[key], (table.num_embeddings, table.embedding_dim), plan.world_size
        )
        if problem:
            raise PlanError(f"{where}: table '{key}': {problem}")
        planned[index] = replace(plan.tables[key], module=table.module)
    tables = {key: planned[i] for i, key in enumerate(workload.keys)}
    return replace(plan, tables=tables)


def match_plan(workload: Workload, topology: Topology, plan: ShardingPlan) -> TablePlans:
    """Return the sharding of every table of the workload, in the workload's order.

    Args:
        plan: keyed like the workload's tables, as by `check_plan`.
    """
    if plan.world_size != topology.world_size:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, the topology has {topology.world_size}"
        )
    for keys, allowed, message in (
        (workload.keys, plan.tables, "the plan does not place table '{}'{}"),
        (plan.tables, workload.keys, "the plan places '{}', which the model does not have{}"),
    ):
        absent = next((key for key in keys if key not in allowed), None)
        if absent is not None:
            raise PlanError(message.format(absent, did_you_mean(absent, allowed)))
    for key, table in plan.tables.items():
        outside = [r for r in table.ranks if not 0 <= r < topology.world_size]
        if outside:
            raise PlanError(
                f"table '{key}' has a shard on rank {outside[0]}; "
                f"ranks are 0 to {topology.world_size - 1}"
            )
        averaged = is_averaged(table.sharding_type, table.compute_kernel)
        if topology.job is not None and not averaged:
            raise PlanError(
                f"table '{key}' has the kernel {table.compute_kernel}, which replica groups do "
                "not average; use fused, or data_parallel"
            )
    return tuple(plan.tables[key] for key in workload.keys)


def model_mismatch(plan: ShardingPlan, workload: Workload) -> str | None:
    """Return a warning if the plan was made for another model, or names none."""
    model = plan.meta.get("model")
    model = model if isinstance(model, Mapping) else {}
    name, digest = model.get("name") or "?", model.get("sha256") or ""
    if not digest:
        return f"the plan does not say which model file it was made for (checked: {workload.name})"
    if digest != workload.sha256:
        return (
            f"the plan was made for another version of the model: '{name}' {str(digest)[:12]}, "
            f"not '{workload.name}' {workload.sha256[:12] or '(built in code)'}; "
            "its times are for that version"
        )
    return None


def assign_tables(
    plan: ShardingPlan, homes: Sequence[tuple[str, str]], *, where: str, what: str
) -> dict[str, int]:
    """Return plan key -> index of its table among `homes`, the (module, table) of a model.

    Args:
        where, what: the plan's file and the model's name, for messages.
    """
    result: dict[str, int] = {}
    key_of: dict[int, str] = {}
    for key, table in plan.tables.items():
        index = find_table(key, table.module, homes, where, what)
        if index in key_of:
            raise PlanError(
                f"{where}: '{key_of[index]}' and '{key}' both plan {_show(homes[index])} of "
                f"{what}; remove one"
            )
        key_of[index] = key
        result[key] = index
    missing = [home for i, home in enumerate(homes) if i not in key_of]
    if missing:
        names = ", ".join(_show(home) for home in missing[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise PlanError(
            f"{where}: no shards for {names}{more} of {what}; a plan places every table of its "
            "model: add them, or plan again"
        )
    return result


def find_table(
    key: str, module: str, homes: Sequence[tuple[str, str]], where: str, what: str
) -> int:
    """Return the index of a plan key's table among `homes`, the (module, table) of a model.

    Args:
        module: module that the plan names beside the key; empty if none.
        where, what: the plan's file and the model's name, for messages.

    Raises:
        PlanError: the key matches no table, or several.
    """
    prefix, _, last = key.rpartition("/")
    for name in (key, last):
        matches = [i for i, home in enumerate(homes) if home[1] == name]
        if matches:
            break
    else:
        names = sorted({home[1] for home in homes})
        raise PlanError(
            f"{where}: table '{key}' is not in {what}{did_you_mean(last, names)}; "
            f"it has {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    for hint in (module, prefix):
        if len(matches) > 1 and hint:
            matches = _narrow(matches, hint, homes)
    if len(matches) > 1:
        raise PlanError(
            f"{where}: table '{key}' may mean {' or '.join(_show(homes[i]) for i in matches)} of "
            f"{what}; write the key as 'module/{last}'"
        )
    return matches[0]


def _narrow(matches: list[int], hint: str, homes: Sequence[tuple[str, str]]) -> list[int]:
    exact = [i for i in matches if homes[i][0] == hint]
    suffix = [
        i for i in matches if homes[i][0].endswith(f".{hint}") or hint.endswith(f".{homes[i][0]}")
    ]
    return exact or suffix or matches


def _show(home: tuple[str, str]) -> str:
    return f"'{home[0]}/{home[1]}'" if home[0] else f"'{home[1]}'"


def table_problem(table: TablePlan, shape: tuple[int, int], world_size: int) -> str | None:
    """Return the problem with the shards of a table of `shape` (rows, columns), or None."""
    kind, shards = table.sharding_type, table.shards
    ranks = f"ranks are 0..{world_size - 1}"
    for i, shard in enumerate(shards):
        if not 0 <= shard.rank < world_size:
            return f"shards[{i}] is on rank {shard.rank}; {ranks}"
    if kind is ShardingType.DATA_PARALLEL:
        for i, shard in enumerate(shards):
            if shard.offset != (0, 0) or shard.size != shape:
                return (
                    f"shards[{i}] has offset {list(shard.offset)} and size {list(shard.size)}; "
                    "data_parallel keeps the whole table, offset [0, 0] and size "
                    f"{list(shape)}, on every rank"
                )
        if sorted(table.ranks) != list(range(world_size)):
            return (
                f"data_parallel needs one shard on each rank ({ranks}), but the shards are on "
                f"{list(table.ranks)}"
            )
        return None
    for i, shard in enumerate(shards):
        rows, columns = shard.size
        if columns == 0 or (rows == 0 and kind not in ROW_SPLITS):
            return (
                f"shards[{i}] has size {list(shard.size)}: only the last shards of a row split "
                "may be empty, with 0 rows; remove it"
            )
    if kind is ShardingType.TABLE_WISE and len(shards) != 1:
        return f"table_wise keeps the table whole on one rank, but there are {len(shards)} shards"
    if kind in _WHOLE_SIDE:
        axis, side = _WHOLE_SIDE[kind]
        for i, shard in enumerate(shards):
            if shard.size[axis] != shape[axis]:
                return (
                    f"shards[{i}] has {shard.size[axis]} {side}, but a {kind} shard has all "
                    f"{shape[axis]}"
                )
    return tiling_problem(shards, shape)


_WHOLE_SIDE = {
    ShardingType.COLUMN_WISE: (0, "rows"),
    ShardingType.TABLE_COLUMN_WISE: (0, "rows"),
    ShardingType.ROW_WISE: (1, "columns"),
    ShardingType.TABLE_ROW_WISE: (1, "columns"),
}
"""Axis along which a sharding type does not split."""


def tiling_problem(shards: Sequence[Shard], shape: tuple[int, int]) -> str | None:
    """Return the first gap, overlap or excess of the shards of a table of `shape`, or None."""
    for i, shard in enumerate(shards):
        ends = (shard.offset[0] + shard.size[0], shard.offset[1] + shard.size[1])
        if ends[0] > shape[0] or ends[1] > shape[1]:
            return (
                f"shards[{i}] ends at row {ends[0]}, column {ends[1]}, outside the table of "
                f"{shape[0]} rows and {shape[1]} columns; correct offset or size"
            )
    # Coverage is constant between neighbouring edges of shards, so one count per cell is enough
    filled = [s for s in shards if s.size[0] and s.size[1]]
    edges = [
        sorted({0, shape[d], *(e for s in filled for e in (s.offset[d], s.offset[d] + s.size[d]))})
        for d in (0, 1)
    ]
    at = [{edge: i for i, edge in enumerate(side)} for side in edges]
    count = np.zeros((len(edges[0]) - 1, len(edges[1]) - 1), dtype=np.int32)
    for s in filled:
        (r0, c0), (r1, c1) = s.offset, (s.offset[0] + s.size[0], s.offset[1] + s.size[1])
        count[at[0][r0] : at[0][r1], at[1][c0] : at[1][c1]] += 1
    if (count == 1).all():
        return None
    row, column = (int(i) for i in np.argwhere(count != 1)[0])
    times = int(count[row, column])
    return (
        f"rows {edges[0][row]}..{edges[0][row + 1] - 1}, columns {edges[1][column]}.."
        f"{edges[1][column + 1] - 1} lie in {f'{times} shards' if times else 'no shard'}; "
        "the shards of a table must cover each row and column exactly once"
    )


UNPOOLED_TYPES = (
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.ROW_WISE,
)
"""Sharding types of an EmbeddingCollection."""

FUSED_WIDTH = 4
"""FBGEMM's fused kernels take widths in multiples of this (`construct_split_state`)."""


@dataclass(frozen=True)
class RuntimeSetting:
    """Table and ranks that shards are checked against.

    Args:
        shape: rows and columns of the table in the module.
        pooling: sum, mean, or none for a table of an EmbeddingCollection.
        group: ranks among which TWRW, TWCW and GRID split a table.
        device: type of the device it will run on.
        training: False where it is sharded for inference.
    """

    shape: tuple[int, int]
    pooling: str
    world_size: int
    group: int
    device: str
    training: bool = True

    @property
    def pooled(self) -> bool:
        return self.pooling != "none"


def row_blocks(rows: int, ranks: int) -> list[tuple[int, int]]:
    """(offset, size) of the row blocks TorchRec makes: ceil(rows / ranks) each, the last less."""
    block = -(-rows // ranks)
    starts = [min(i * block, rows) for i in range(ranks)]
    return [(start, min(block, rows - start)) for start in starts]


def in_torchrec_order(table: TablePlan) -> TablePlan:
    """Return the shards column by column from the left, each from the top, empty ones last.

    TorchRec reads the shards of row splits by their position in the list.
    """
    if table.sharding_type is ShardingType.DATA_PARALLEL:
        shards = sorted(table.shards, key=lambda s: s.rank)
    else:
        shards = sorted(table.shards, key=lambda s: (s.offset[1], s.size[0] == 0, s.offset[0]))
    return replace(table, shards=tuple(shards))


def find_runtime_problem(table: TablePlan, setting: RuntimeSetting) -> str | None:
    """Return why TorchRec cannot run these shards, given in its order, and the remedy; or None."""
    kind = table.sharding_type
    if not setting.training and kind not in SERVED:
        return (
            f"for inference TorchRec does not shard a table {kind}; "
            f"use {', '.join(SERVED[:-1])} or {SERVED[-1]}"
        )
    if not setting.pooled and kind not in UNPOOLED_TYPES:
        return (
            f"an EmbeddingCollection cannot be sharded {kind}; "
            f"use {', '.join(UNPOOLED_TYPES[:-1])} or {UNPOOLED_TYPES[-1]}"
        )
    return (
        table_problem(table, setting.shape, setting.world_size)
        or _kernel_problem(table, setting)
        or _placement_problem(table, setting)
    )


def find_mean_problems(plan: ShardingPlan, workload: Workload) -> list[str]:
    """Return what `find_mean_problem` says of each module of a plan, keyed as the workload is."""
    modules: dict[str, dict[str, tuple[ShardingType, str]]] = {}
    for key, table in zip(workload.keys, workload.tables, strict=True):
        placed = plan.tables[key].sharding_type, table.pooling
        modules.setdefault(table.module, {})[table.name] = placed
    return [problem for module in modules.values() if (problem := find_mean_problem(module))]


def find_mean_problem(module: Mapping[str, tuple[ShardingType, str]]) -> str | None:
    """Return why TorchRec would compute wrong means in a module, and the remedy; or None.

    Row splits sum what is to be averaged and divide afterwards by the bag lengths. That divisor is
    applied to every output of the module, and only the summed tables that are row-split themselves
    are exempt (`_create_mean_pooling_divisor`; torchrec 1.7 to 1.9, seen in training).

    Args:
        module: sharding type and pooling of each table of an EmbeddingBagCollection.
    """
    split = (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
    means = [
        name for name, (kind, pooling) in module.items() if pooling == "mean" and kind in split
    ]
    unsplit = [name for name, (kind, _) in module.items() if kind not in split]
    if not means or not unsplit:
        return None
    mean, other = means[0], unsplit[0]
    return (
        f"table '{mean}' has pooling mean and is {module[mean][0]}, so TorchRec would divide the "
        f"output of '{other}' ({module[other][0]}) by its bag lengths as well; use table_wise or "
        "column_wise for tables with pooling mean, row_wise or table_row_wise for all tables of "
        "the module, or a module of its own for mean"
    )


def _kernel_problem(table: TablePlan, setting: RuntimeSetting) -> str | None:
    kernel, kind = table.compute_kernel, table.sharding_type
    if kernel.is_hashed and (kind is not ShardingType.ROW_WISE or setting.device != "cuda"):
        return f"the kernel {kernel} runs row_wise on GPUs only, not {kind} on {setting.device}"
    if kernel.is_stored and setting.device != "cuda":
        return f"the kernel {kernel} runs on GPUs only, not on {setting.device}"
    if kind is ShardingType.DATA_PARALLEL and kernel is not ComputeKernel.DENSE:
        return f"data_parallel runs with compute_kernel dense only, not {kernel}; set dense"
    if kernel is ComputeKernel.DENSE:
        # FBGEMM's dense CPU kernel ignores PoolingMode.NONE and pools: a wrong shape, far from here
        if not setting.pooled and setting.device == "cpu":
            return (
                "the dense kernel cannot look up an EmbeddingCollection on CPU (FBGEMM pools what "
                "should stay apart); use table_wise or row_wise with the fused kernel, or "
                "device='cuda'"
            )
        return None
    for i, shard in enumerate(table.shards):
        # FBGEMM's lookups for inference pad their rows
        if setting.training and shard.size[1] % FUSED_WIDTH:
            return (
                f"shards[{i}] is {shard.size[1]} columns wide; the {kernel} kernel takes multiples "
                f"of {FUSED_WIDTH}: split the columns elsewhere, or use the dense kernel"
            )
    return None


def _placement_problem(table: TablePlan, setting: RuntimeSetting) -> str | None:
    """Return the problem of a sharding type with the ranks of its shards, or None."""
    shards, group, kind = table.shards, setting.group, table.sharding_type
    if kind is ShardingType.ROW_WISE:
        return _block_problem(shards, 0, setting.world_size, setting, kind)
    if kind is ShardingType.TABLE_ROW_WISE:
        return _block_problem(shards, shards[0].rank // group * group, group, setting, kind)
    if kind is ShardingType.GRID_SHARD:
        return _grid_problem(shards, setting)
    widths, hosts = {shard.size[1] for shard in shards}, {shard.rank // group for shard in shards}
    if kind is ShardingType.COLUMN_WISE and not setting.pooled and len(widths) > 1:
        return (
            f"column_wise shards of {sorted(widths)} columns; an EmbeddingCollection needs one "
            "width for all shards: split the columns evenly"
        )
    if kind is ShardingType.TABLE_COLUMN_WISE and len(hosts) > 1:
        return (
            f"table_column_wise shards lie on hosts {sorted(hosts)} ({group} ranks each); it "
            "splits columns within one host: move them to one, or use column_wise"
        )
    return None


def _grid_problem(shards: Sequence[Shard], setting: RuntimeSetting) -> str | None:
    if setting.pooling == "mean":
        # ShardedEmbeddingBagCollection divides by the lengths for row_wise and table_row_wise only
        return (
            "TorchRec adds up the means of the row blocks under grid_shard, which is wrong for "
            "pooling mean; use table_row_wise or column_wise"
        )
    for column in sorted({shard.offset[1] for shard in shards}):
        block = [shard for shard in shards if shard.offset[1] == column]
        host = block[0].rank // setting.group
        title = f"grid_shard (columns from {column})"
        problem = _block_problem(block, host * setting.group, setting.group, setting, title)
        if problem:
            return problem
    return None


def _block_problem(
    shards: Sequence[Shard], first: int, ranks: int, setting: RuntimeSetting, title: str
) -> str | None:
    expected_ranks = list(range(first, first + ranks))
    actual_ranks = [shard.rank for shard in shards]
    if actual_ranks != expected_ranks:
        return (
            f"{title} shards are on ranks {actual_ranks} from top to bottom; TorchRec runs them on "
            f"{expected_ranks} in that order only (a row split over other ranks can be predicted, "
            "not run)"
        )
    blocks = row_blocks(setting.shape[0], ranks)
    # the start of an empty shard is arbitrary
    actual_blocks = [
        (s.offset[0], s.size[0]) if s.size[0] else (setting.shape[0], 0) for s in shards
    ]
    for i, (have, want) in enumerate(zip(actual_blocks, blocks, strict=True)):
        if have != want:
            return (
                f"the {title} shard on rank {expected_ranks[i]} has {have[1]} rows from row "
                f"{have[0]}; TorchRec splits {setting.shape[0]} rows over {ranks} ranks in blocks "
                f"of {blocks[0][1]}, here {want[1]} rows from row {want[0]}: use that split"
            )
    return None
