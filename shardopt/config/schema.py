"""The keys of model.yaml, section by section, and the kinds of values that they take.

docs/model_file.md is made of this module: of the descriptions of keys, their defaults, and what
`allowed_words` says of their kinds.

`check` takes a mapping with all that is in it; `shardopt.config.model` makes a workload of it. YAML
1.1 reads ``1e6`` as text and ``40_000_000`` as a number, so text that is a
decimal number counts as one; a boolean never does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from predictor.csv_rows import MOST_RANKS
from predictor.document import KeyPath, Problems, shown
from predictor.errors import did_you_mean
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import DEFAULT, STRATEGIES
from predictor.model.workload import WEIGHT_BITS, Optimizer

_DECIMAL = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]{1,4})?\Z")
_LONGEST = 300

SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "tf32x3": "tf32",
    "tensorfloat32": "tf32",
    "tw": "table_wise",
    "cw": "column_wise",
    "rw": "row_wise",
    "dp": "data_parallel",
    "twrw": "table_row_wise",
    "twcw": "table_column_wise",
    "grid": "grid_shard",
    "adagrad": "exact_adagrad",
    "rowwise_adagrad": "exact_row_wise_adagrad",
    "row_wise_adagrad": "exact_row_wise_adagrad",
    "cat": "concat",
    "quant": "fused",
    "quant_uvm": "fused_uvm",
    "quant_uvm_caching": "fused_uvm_caching",
    "fp8": "nfp8",
    "uint8": "int8",
    "dcn": "dcn_v2",
    "dcnv2": "dcn_v2",
}
"""Other names people know the values by; a hint, never accepted in silence."""


def refuse(value: object, rule: str) -> PydanticCustomError:
    """The error of a value that breaks ``rule``, a sentence that starts with a verb."""
    return PydanticCustomError("shardopt", "{text}", {"text": f"got {shown(value)}; {rule}"})


def nearest(name: str, allowed: Iterable[str]) -> str:
    """``did_you_mean`` that also knows other spellings."""
    names = list(allowed)
    spelling = SPELLINGS.get(name.lower())
    if spelling in names:
        return f" (did you mean '{spelling}'?)"
    return did_you_mean(name, names)


def as_number(value: object) -> float | int | None:
    """A finite number from a number or decimal text; None for anything else, booleans too."""
    if isinstance(value, str) and len(value) <= _LONGEST and _DECIMAL.match(value.strip()):
        text = value.strip().replace("_", "")
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def whole(minimum: int, maximum: int) -> BeforeValidator:
    """An integer of ``minimum..maximum``; integral floats and scientific notation count."""

    def check(value: object) -> int:
        number = as_number(value)
        if number is None or number != int(number):
            raise refuse(value, f"it must be a whole number, at least {minimum}")
        if not minimum <= number <= maximum:
            raise refuse(value, f"it must be at least {minimum} and at most {maximum}")
        return int(number)

    return _kind(check, f"whole number, {minimum} to {_short(maximum)}")


def real(low: float, high: float, *, above: bool = False) -> BeforeValidator:
    """A number of ``low..high``, both included unless ``above`` leaves out the lower one."""
    words = f"{'more than' if above else 'at least'} {low:g} and at most {high:g}"

    def check(value: object) -> float:
        number = as_number(value)
        if number is None or not low <= number <= high or (above and number == low):
            raise refuse(value, f"it must be a number, {words}")
        return float(number)

    ends = f"{'above' if above else 'from'} {low:g} to {_short(high)}"
    return _kind(check, f"number {ends}")


def choice(allowed: Iterable[str]) -> BeforeValidator:
    """One of some words."""
    names = [str(name) for name in allowed]

    def check(value: object) -> str:
        if isinstance(value, str) and value in names:
            return value
        hint = nearest(value, names) if isinstance(value, str) else ""
        raise refuse(value, f"allowed: {', '.join(names)}{hint}")

    return _kind(check, ", ".join(f"`{name}`" for name in names))


def text(*, forbidden: Mapping[str, str] | None = None) -> BeforeValidator:
    """Non-empty text.

    Args:
        forbidden: characters that must not occur, each with the reason.
    """

    def check(value: object) -> str:
        if not isinstance(value, str):
            hint = "give one word"
            if isinstance(value, bool):
                hint = "YAML reads yes, no, on, off, true, false as booleans unless they are quoted"
            elif isinstance(value, int | float):
                hint = f'write it in quotes: "{value}"'
            raise refuse(value, f"it must be text; {hint}")
        if not value.strip():
            raise refuse(value, "it must not be empty")
        for letter, why in (forbidden or {}).items():
            if letter in value:
                raise refuse(value, f"it must not contain '{letter}': {why}")
        return value

    without = "".join(f" without '{letter}'" for letter in forbidden or ())
    return _kind(check, f"text{without}")


def _kind(check: Callable[[object], Any], words: str) -> BeforeValidator:
    """A validator that says what it allows."""
    check.__doc__ = words
    return BeforeValidator(check)


def _short(number: float) -> str:
    """A bound as people write it: 1,000 or 10^9."""
    power = round(math.log10(number)) if number > 0 else 0
    exact = power > 4 and number == 10**power
    return f"10^{power}" if exact else f"{number:,.10g}"


def allowed_words(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """Say in a few words what a key's kind of value allows; empty where its section says it.

    Args:
        kind: the annotation of a field, or a part of it.
        metadata: validators that pydantic has taken off the annotation.
    """
    if get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Section):
        return "mapping below"
    rules = [item.func.__doc__ or "" for item in metadata if hasattr(item, "func")]
    inner = [item for item in get_args(kind) if item is not type(None)]
    if get_origin(kind) is list:
        rules.insert(0, f"list: {allowed_words(inner[0])}")
    else:
        rules += map(allowed_words, inner)
    return "; ".join(filter(None, rules))


def _flag(value: object) -> Any:
    """`true`, `false`"""
    if isinstance(value, bool):
        return value
    raise refuse(value, "allowed: true, false")


SCHEMA_VERSION = 1

MAX_ROWS = 10**12
MAX_WIDTH = 2**20
MAX_COUNT = 10**9
MAX_WINDOWS = 256
"""Most windows of data; each is read with the whole model."""

Rows = Annotated[int, whole(1, MAX_ROWS)]
Width = Annotated[int, whole(1, MAX_WIDTH)]
Count = Annotated[int, whole(1, MAX_COUNT)]
Name = Annotated[str, text()]
TableName = Annotated[str, text(forbidden={".": "a torch module cannot have such a name"})]
Milliseconds = Annotated[float, real(0, 1e7)]
Flag = Annotated[bool, BeforeValidator(_flag)]
EmbeddingType = Annotated[str, choice(WEIGHT_BITS)]
WireType = Annotated[str, choice(["fp32", "fp16", "bf16"])]
EmbeddingOptimizer = Annotated[str, choice(Optimizer)]

DENSE_OPTIMIZERS = ("sgd", "adagrad", "adam")
STORAGES = ("torchrec", "dynamicemb")
MODES = TRAINING, INFERENCE = ("training", "inference")
PIPELINES = ("base", "sparse_dist", "prefetch_sparse_dist", "semi_sync")


def _version(value: Any) -> int:
    """`1`"""
    if isinstance(value, bool) or value != SCHEMA_VERSION:
        raise refuse(value, f"this shardopt reads schema {SCHEMA_VERSION}: write 'schema: 1'")
    return SCHEMA_VERSION


SchemaVersion = Annotated[Any, AfterValidator(_version)]


def _ends_in_one(widths: list[int]) -> list[int]:
    """the last is 1"""
    if widths[-1] != 1:
        raise refuse(widths, "the last layer must have width 1, the logit of the click")
    return widths


def _distinct(values: list[Any]) -> list[Any]:
    """each once"""
    if len(set(values)) != len(values):
        raise refuse(values, "it must name each only once")
    return values


def known_keys(section: type[Section]) -> list[str]:
    """The keys a section takes, in their order."""
    return list(_fields(section))


@cache
def _fields(section: type[Section]) -> Mapping[str, FieldInfo]:
    return {info.alias or name: info for name, info in section.model_fields.items()}


class Section(BaseModel):
    """A mapping with known keys only; a key without a value counts as left out."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    refused: ClassVar[Mapping[str, str]] = {}
    """Keys that a user may expect, each with what to say of it."""
    about: ClassVar[Mapping[str, str]] = {}
    """Keys that may be left out -> what they are, with their unit. Of the others the description
    of the field says it, which an error quotes."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, raw: Any) -> dict[str, Any]:
        keys = known_keys(cls)
        if not isinstance(raw, dict):
            raise refuse(raw, f"it must be a mapping with {', '.join(keys)}")
        return {k: v for k, v in raw.items() if v is not None or k not in keys}

    def values(self) -> dict[str, Any]:
        """Its values by attribute, lists as tuples."""
        attributes = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {
            name: tuple(value) if isinstance(value, list) else value for name, value in attributes
        }


class FeatureSection(Section):
    """A sparse feature that reads a table."""

    about = {
        "num_poolings": "poolings per sample: objects of a sample that have ids of their own",
        "index_distribution": "how ids spread over the rows of the table; left out: uniform",
        "id_order": "`frequency`: low ids are the hot ones, so the first row-wise shard is hot",
        "pooling_factor_std": "standard deviation of the ids per sample and pooling; left out: "
        "each sample has the floor or the ceiling of their mean, or what a stats file says",
        "pooling_factor_max": "most ids per sample and pooling, as where histories are cut; left "
        "out: no limit, or what a stats file says",
        "length_correlation": "how far the lengths of a sample's features go together: two of them "
        "correlate by the product of theirs; left out: not at all, or what a stats file says",
        "position_weights": "weights that a feature processor learns, one for each position in a "
        "bag; 0: there is none",
    }

    name: Name = Field(description="the feature's key in the KeyedJaggedTensor")
    pooling_factor: Annotated[float, real(0, 1e6)] = Field(
        description="mean ids per sample over the data; it is never assumed to be 1"
    )
    num_poolings: Annotated[float, real(0, 1e6, above=True)] = 1.0
    index_distribution: Any = None
    id_order: Annotated[str, choice(["random", "frequency"])] = "random"
    pooling_factor_std: Annotated[float, real(0, 1e9)] | None = None
    pooling_factor_max: Annotated[float, real(0, 1e9, above=True)] | None = None
    length_correlation: Annotated[float, real(0, 1)] | None = None
    position_weights: Annotated[int, whole(0, MAX_COUNT)] = 0

    @model_validator(mode="after")
    def _possible_lengths(self) -> FeatureSection:
        """Numbers from 0 to a largest one that have a mean vary most at the two ends."""
        mean, most = self.pooling_factor, self.pooling_factor_max
        if most is None:
            return self
        if most < mean:
            raise refuse(most, f"pooling_factor_max is below the pooling_factor, {mean:g}")
        largest = math.sqrt(mean * (most - mean))
        if (self.pooling_factor_std or 0.0) > largest * (1 + 1e-6):
            raise refuse(
                self.pooling_factor_std,
                f"ids between 0 and {most:g} with a mean of {mean:g} have a pooling_factor_std of "
                f"at most {largest:.6g}",
            )
        return self


class ConstraintsSection(Section):
    """Limits on the sharding of a table; every key may be left out."""

    about = {
        "sharding_types": "types that the table may have",
        "compute_kernels": "kernels that the table may have",
        "min_partition": "columns of a column-wise shard, at least",
        "cache_load_factor": "share of a `fused_uvm_caching` table's rows in the device's cache",
        "enforce_hbm": "FBGEMM's flag for tables in host memory",
        "ranks": "ranks that the table's shards may lie on, from 0",
        "co_locate": "tables with the same word lie on the same ranks",
        "device_group": "kind of devices that the table lies on, where the model has both",
        "max_l1_cache_size": "MiB on the device, at most, for the cache of a key-value table",
        "l2_cache_size": "GiB of the host for the cache of a key-value table",
    }

    sharding_types: (
        Annotated[list[Annotated[str, choice(ShardingType)]], Field(min_length=1)] | None
    ) = None
    compute_kernels: (
        Annotated[list[Annotated[str, choice(ComputeKernel)]], Field(min_length=1)] | None
    ) = None
    min_partition: Width | None = None
    cache_load_factor: Annotated[float, real(0, 1, above=True)] | None = None
    enforce_hbm: Flag | None = None
    ranks: (
        Annotated[
            list[Annotated[int, whole(0, MAX_COUNT)]],
            Field(min_length=1),
            AfterValidator(_distinct),
        ]
        | None
    ) = None
    co_locate: Name | None = None
    device_group: Annotated[str, choice(["cuda", "cpu"])] | None = None
    max_l1_cache_size: Annotated[int, whole(0, MAX_COUNT)] | None = None
    l2_cache_size: Annotated[int, whole(0, MAX_COUNT)] | None = None


class TableSection(Section):
    """An embedding table."""

    about = {
        "module": "module that the table belongs to; each has its own lookups and all-to-alls",
        "data_type": "type of the weights; rows of `int8` and `int4`, which are for "
        "`mode: inference`, have scale and bias, and are padded to 16 bytes",
        "pooling": "`none`: an EmbeddingCollection, which gives a row for each id",
        "weighted": "ids have weights of their own (per-sample weights)",
        "optimizer": "what trains the table, in place of the model's",
        "index_dedup": "every rank sends its distinct ids alone; for tables with pooling none",
        "storage": "`dynamicemb`: a hash table of `num_embeddings` rows",
        "stash_weights": "weights are on the host between lookup and backward",
        "constraints": "what the table's sharding must obey",
    }

    name: TableName = Field(description="the table's name")
    module: Name = "ebc"
    num_embeddings: Rows = Field(description="the table's rows")
    embedding_dim: Width = Field(
        description="the table's columns; a multiple of 4 for every kernel but dense"
    )
    data_type: EmbeddingType = "fp32"
    pooling: Annotated[str, choice(["sum", "mean", "none"])] = "sum"
    weighted: Flag = False
    optimizer: EmbeddingOptimizer | None = None
    index_dedup: Flag = False
    storage: Annotated[str, choice(STORAGES)] = "torchrec"
    stash_weights: Flag = False
    features: Annotated[list[FeatureSection], Field(min_length=1)] = Field(
        description="a list of the sparse features that read this table"
    )
    constraints: ConstraintsSection = ConstraintsSection()


class QCommSection(Section):
    """Precision of pooled embeddings and their gradients on the wire."""

    about = {
        "forward": "type of the embeddings that ranks exchange",
        "backward": "type of their gradients",
    }

    forward: WireType = "fp32"
    backward: WireType = "fp32"


class ReplicaGroupsSection(Section):
    """2D sparse parallelism: tables are sharded over some ranks, and copied to the others."""

    about = {
        "sync_interval": "steps between two averagings of the copies",
        "use_inter_host_allreduce": "a group has ranks in a row, as `DMPCollection` understands it",
        "sharding_strategy": "`fully_sharded`: weights are averaged in every step, and "
        "`sync_interval` is left out",
    }

    refused = {
        "modules": "a group size of its own for a module (DMPCollectionConfig) is not modelled; "
        "give one size for the whole model"
    }

    size: Annotated[int, whole(1, MOST_RANKS)] = Field(
        description="the ranks that a copy of the tables is sharded over"
    )
    sync_interval: Count = 1
    use_inter_host_allreduce: Flag = False
    sharding_strategy: Annotated[str, choice(STRATEGIES)] = DEFAULT


def _tables(value: object) -> object:
    """or `{csv: tables.csv}`"""
    if isinstance(value, list):
        return value
    raise refuse(value, "it must be a list of tables or {csv: tables.csv}")


class ModelSection(Section):
    """The file itself."""

    about = {
        "name": "name of the model; that of the file unless given",
        "batch_size": "samples per rank and iteration; must be given here or with the command, "
        "which overrides it",
        "mode": "`inference`: forward alone, without gradients and optimizer states; tables are "
        "sharded as TorchRec's inference sharding can, table-wise, column-wise and row-wise",
        "optimizer": "what trains every sharded table that names no other; data-parallel tables "
        "are stepped by the dense optimizer",
        "train_pipeline": "TorchRec's train pipeline",
        "balance_batches": "samples are shared out so that every rank's batch has as many ids",
        "stash_optimizer_state": "states of the tables' optimizer are on the host between steps",
        "qcomm": "precision on the wire",
        "replica_groups": "2D sparse parallelism; left out: every table is sharded over all ranks",
    }

    schema_: SchemaVersion = Field(
        alias="schema", description="the version of this file format: 'schema: 1'"
    )
    name: Name | None = None
    batch_size: Count | None = None
    mode: Annotated[str, choice(MODES)] = TRAINING
    optimizer: EmbeddingOptimizer = str(Optimizer.ROWWISE_ADAGRAD)
    train_pipeline: Annotated[str, choice(PIPELINES)] = "base"
    stash_optimizer_state: Flag = False
    balance_batches: Flag = False
    qcomm: QCommSection = QCommSection()
    replica_groups: ReplicaGroupsSection | None = None
    tables: Annotated[list[TableSection], BeforeValidator(_tables)] = Field(
        description="a list of embedding tables, or {csv: tables.csv}"
    )
    dense: Any = Field(description="the dense layers: in_features, bottom_mlp, top_mlp")


class LengthSharesSection(Section):
    """Shares of forward and backward that grow with a sample's length; both together at most 1."""

    about = {
        "linear": "share that grows with the ids of a sample",
        "square": "share that grows with their square, as attention does",
    }

    linear: Annotated[float, real(0, 1)] = 0.0
    square: Annotated[float, real(0, 1)] = 0.0

    @model_validator(mode="after")
    def _within_all(self) -> LengthSharesSection:
        if self.linear + self.square > 1:
            shares = {"linear": self.linear, "square": self.square}
            raise refuse(shares, "linear and square are shares of one time, at most 1 together")
        return self


LENGTH_SHARES = "what grows with the lengths of samples; left out: "


class DenseSection(Section):
    """A DLRM by its layers; each is Linear then ReLU, but for the last of `top_mlp`."""

    about = {
        "interaction": "how bottom output and embeddings are joined",
        "data_type": "type of the dense part's products; bf16 by autocast",
        "optimizer": "what trains the dense part and data-parallel tables",
        "bucket_cap_mb": "MiB of dense gradients that one all-reduce carries",
        "compiled": "forward and backward are compiled (`torch.compile`)",
        "cuda_graphs": "the device runs them as captured CUDA graphs",
        "length_shares": LENGTH_SHARES + "as the ops say",
        "pairs": "how `dot` takes pairs out of all products: by `index` as TorchRec's DLRM, by "
        "`gather`, or `all` of them; the last two pad to a multiple of 8 columns",
    }

    refused = {
        "linears": "is no longer read: it counted each linear layer once a sample and nothing "
        "else; run to_yaml on the module again, which writes 'ops', or give in_features, "
        "bottom_mlp and top_mlp"
    }

    in_features: Width = Field(description="the number of dense inputs of a sample")
    bottom_mlp: Annotated[list[Width], Field(min_length=1)] = Field(
        description="a list of layer widths, e.g. [512, 256, 128]"
    )
    interaction: Any = "dot"
    top_mlp: Annotated[list[Width], Field(min_length=1), AfterValidator(_ends_in_one)] = Field(
        description="a list of layer widths that ends in 1, e.g. [512, 256, 1]"
    )
    data_type: Annotated[str, choice(["fp32", "tf32", "bf16"])] = "fp32"
    optimizer: Annotated[str, choice(DENSE_OPTIMIZERS)] = "sgd"
    bucket_cap_mb: Annotated[float, real(0, 1e6, above=True)] = 25.0
    compiled: Flag = False
    cuda_graphs: Flag = False
    pairs: Annotated[str, choice(["index", "gather", "all"])] = "index"
    length_shares: LengthSharesSection | None = None


class OpsSection(Section):
    """A dense part that `to_yaml` captured from a module."""

    about = {
        "data_type": "type of its products of fp32 tensors, bf16 by autocast; ops that were "
        "captured under autocast stay as they are",
        "optimizer": "that of the capture, which it must agree with",
        "bucket_cap_mb": "MiB of dense gradients that one all-reduce carries",
        "compiled": "forward and backward are compiled (`torch.compile`)",
        "cuda_graphs": "the device runs them as captured CUDA graphs",
        "length_shares": LENGTH_SHARES + "as the ops say",
    }

    ops: Name = Field(description="the ops file that to_yaml wrote, relative to this one")
    data_type: Annotated[str, choice(["fp32", "tf32", "bf16"])] = "fp32"
    optimizer: Annotated[str, choice(DENSE_OPTIMIZERS)] | None = None
    bucket_cap_mb: Annotated[float, real(0, 1e6, above=True)] = 25.0
    compiled: Flag = False
    cuda_graphs: Flag = False
    length_shares: LengthSharesSection | None = None


class MeasuredSection(Section):
    """Measured times of one rank's dense part, without lookups and collectives."""

    about = {"activation_gib": "GiB of activations at their peak; left out: not known"}

    batch_size: Count = Field(description="the samples per rank when it was measured")
    forward_ms: Milliseconds = Field(description="the time of its forward kernels")
    backward_ms: Milliseconds = Field(description="the time of its backward kernels")
    optimizer_ms: Milliseconds = Field(description="the time of its optimizer step")
    gradient_mib: Annotated[float, real(0, 1e8)] = Field(
        description="the MiB of all dense gradients, which are all-reduced"
    )
    activation_gib: Annotated[float, real(0, 1e5)] | None = None


class MeasuredDenseSection(Section):
    """A dense part by what it took, as `shardopt trace FILE --dense OUT.yaml` writes it."""

    about = {
        "in_features": "dense inputs of a sample, which are copied to the device",
        "optimizer": "what trains data-parallel tables",
        "bucket_cap_mb": "MiB of dense gradients that one all-reduce carries",
        "length_shares": LENGTH_SHARES + "nothing",
    }

    measured: MeasuredSection = Field(description="the times and sizes that were measured")
    in_features: Annotated[int, whole(0, MAX_WIDTH)] = 0
    optimizer: Annotated[str, choice(DENSE_OPTIMIZERS)] = "sgd"
    bucket_cap_mb: Annotated[float, real(0, 1e6, above=True)] = 25.0
    length_shares: LengthSharesSection | None = None


class DcnSection(Section):
    """The low-rank cross network of DCN v2."""

    layers: Annotated[int, whole(1, 1000)] = Field(description="the number of cross layers")
    low_rank_dim: Width = Field(description="the rank of each cross layer")


class ZipfSection(Section):
    """The k-th most frequent id has a probability proportional to (k + q)^-alpha."""

    about = {"q": "how flat the hottest ids are"}

    alpha: Annotated[float, real(0, 20)] = Field(description="the skew; 0 is uniform")
    q: Annotated[float, real(-1, 1e9, above=True)] = 0.0


class HistogramSection(Section):
    """Histogram of how often the distinct ids of a sample repeat."""

    lookups: Annotated[float, real(0, 1e15, above=True)] = Field(
        description="the number of ids in the sample"
    )
    fractions: Annotated[list[Annotated[float, real(0, 1e15)]], Field(min_length=1)] = Field(
        description="the shares of distinct ids that occur (0, 1], (1, 2], (2, 4], ... times"
    )


class StatsSection(Section):
    """Bins measured from data, in an .npz file that `shardopt stats` wrote."""

    about = {"feature": "name of the feature in the file; its own unless given"}

    file: Name = Field(description="an .npz file with <feature>.counts and <feature>.weights")
    feature: Name | None = None


class WindowsSection(Section):
    """Bins measured from data of several windows in order of time, a file each."""

    about = {"feature": "name of the feature in the files; its own unless given"}

    files: Annotated[list[Name], Field(max_length=MAX_WINDOWS)] = Field(
        description="two or more .npz files, one for each window"
    )
    feature: Name | None = None


class CsvSection(Section):
    """Tables from a CSV file: a row for each feature, columns with the names of these keys."""

    csv: Name = Field(description="the file, relative to this one")


AnySection = TypeVar("AnySection", bound=Section)


def check(
    section: type[AnySection], raw: object, path: KeyPath, problems: Problems
) -> AnySection | None:
    """A mapping as a section, or None when it has problems, which are then recorded."""
    try:
        return section.model_validate(raw)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            where = item["loc"]
            problems.add((*path, *where), _message(dict(item), _inside(section, where[:-1])))
        return None


def _inside(section: type[Section], where: Sequence[str | int]) -> type[Section]:
    """The section that a key path inside a section leads to."""
    for part in where:
        info = _fields(section).get(str(part))
        for kind in (info.annotation, *get_args(info.annotation)) if info else ():
            if isinstance(kind, type) and issubclass(kind, Section):
                section = kind
    return section


def _message(item: dict[str, Any], section: type[Section]) -> str:
    """A pydantic error in our words; the section is the one that has the key."""
    kind, value = item["type"], item["input"]
    if kind == "missing":
        info = _fields(section).get(str(item["loc"][-1]))
        return f"missing; give {info.description}" if info and info.description else "missing"
    if kind == "extra_forbidden":
        key, keys = str(item["loc"][-1]), known_keys(section)
        unknown_key = f"unknown key{nearest(key, keys)}; known: {', '.join(keys)}"
        return section.refused.get(key, unknown_key)
    if kind == "list_type":
        hint = f"; write [{value}]" if isinstance(value, str | int | float) else ""
        return f"got {shown(value)}; it must be a list{hint}"
    return "got an empty list; give at least one" if kind == "too_short" else str(item["msg"])
