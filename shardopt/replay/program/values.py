"""What tensors of whole numbers must hold so that ops can run: ids, offsets, lengths and the like.

A trace holds no values. Each entry of `ROLES` says what an op needs of an argument; the tensor is
then made up front with such values. Where an op of the program gives the tensor, and that op does
not make legal values by itself (`CONSISTENT`), it reads one that was made in its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

from shardopt.replay.program.program import WHOLE, Call, RankProgram, Slot, Term, Word, slots
from shardopt.replay.program.schema import ops_of
from shardopt.replay.program.tables import (
    WEIGHTS,
    LookupTables,
    MatchedTables,
    TableSummary,
    features_of,
    join_tables,
)
from shardopt.replay.program.tensors import Tensors

LOOKUP_KIND = re.compile(r"lookup_(\w+)_function")
Shape = tuple[int, ...]
Fill = dict[str, Any]
Named = Mapping[str, Any]
"""Arguments by name: shapes of tensors (lists of shapes), plain values of the rest."""
Maker = Callable[[Named], Fill]


def _below(kind: str, high: Callable[[Named], Any]) -> Maker:
    """Whole numbers from 0; ``ids`` are drawn as the user asks, ``rows`` uniformly."""
    return lambda of: {"kind": kind, "high": max(int(high(of)), 1)}


def _total(tensor: str, kind: str) -> Maker:
    return lambda of: {"kind": kind, "total": prod(of[tensor])}


def _constant(fill: Fill) -> Maker:
    return lambda _: fill


def _list_of(make: Callable[[Named], list[int]]) -> Maker:
    return lambda of: {"kind": "list", "values": make(of)}


def _classes(of: Named) -> int:
    shape: Shape = of["self"]
    return shape[1 if len(shape) > 1 else 0]


def _bag_offsets(of: Named) -> Fill:
    last = bool(of.get("include_last_offset"))
    return {"kind": "offsets" if last else "starts", "total": prod(of["indices"])}


def _row_sums(of: Named) -> list[int]:
    """Values in each row of lengths, such that the permuted rows have as many as recorded."""
    total, rows = prod(of["values"]), max(of["lengths"][0], 1)
    entries = prod(of["permute"])
    wanted = of.get("permuted_lengths_sum")
    wanted = total if wanted is None or entries == rows else int(wanted)
    if entries > rows:
        twice = min(entries - rows, rows)
        times = -(-(entries - rows) // twice)
        extra = (wanted - total) // times
        head, tail = _split_evenly(extra, twice), _split_evenly(total - extra, rows - twice)
    else:
        head, tail = _split_evenly(wanted, entries), _split_evenly(total - wanted, rows - entries)
    return [*head, *tail]


def _split_evenly(total: int, parts: int) -> list[int]:
    if parts <= 0:
        return []
    marks = [max(total, 0) * i // parts for i in range(parts + 1)]
    return [after - before for before, after in pairwise(marks)]


def _permutation_of_rows(of: Named) -> list[int]:
    """All rows in order; then from the first again where there are more entries than rows."""
    rows = max(of["lengths"][0], 1)
    return [i % rows for i in range(prod(of["permute"]))]


def _even_widths(offsets: str) -> Maker:
    """Cumulated widths of pooled vectors that are concatenated; all have one width."""
    return _list_of(
        lambda of: _cumulate(_split_evenly(of["pooled_embs"][-1], prod(of[offsets]) - 1))
    )


_PERMUTATION = _constant({"kind": "permutation"})
_LARGE = _constant({"kind": "constant", "value": 1 << 30})
"""More rows than any table: nothing is out of bounds, and hashing keeps ids as they are."""
_IDS_OF_WEIGHT = _below("ids", lambda of: (of["weight"] or (1,))[0])
_IDS_OF_ROWS = _below("ids", lambda of: of["num_weights"])

_ROLES: list[tuple[str, Mapping[str, Maker]]] = [
    ("aten sqrt sqrt_ rsqrt log", {"self": _constant({"kind": "positive"})}),
    ("aten embedding", {"indices": _IDS_OF_WEIGHT}),
    (
        "aten embedding_dense_backward embedding_backward _embedding_bag_dense_backward",
        {"indices": _IDS_OF_ROWS},
    ),
    (
        "aten embedding_bag _embedding_bag _embedding_bag_forward_only",
        {"indices": _IDS_OF_WEIGHT, "offsets": _bag_offsets},
    ),
    ("aten _embedding_bag_backward", {"indices": _IDS_OF_ROWS, "offsets": _bag_offsets}),
    (
        "aten index_select index_add_ index_add index_copy_ index_fill_ gather gather_backward "
        "scatter scatter_ scatter_add scatter_add_",
        {"index": _below("rows", lambda of: (of["self"] or (1,))[of["dim"]])},
    ),
    (
        "aten index_select_backward",
        {"index": _below("rows", lambda of: of["self_sizes"][of["dim"]])},
    ),
    ("aten one_hot", {"self": _below("ids", lambda of: of["num_classes"])}),
    (
        "aten nll_loss nll_loss_nd nll_loss_forward nll_loss_backward nll_loss2d "
        "nll_loss2d_forward nll_loss2d_backward cross_entropy_loss",
        {"target": _below("rows", _classes)},
    ),
    (
        "aten max_pool2d_with_indices_backward",
        {"indices": _below("rows", lambda of: prod(of["self"][-2:]))},
    ),
    (
        "fbgemm permute_2D_sparse_data permute_1D_sparse_data",
        {
            "lengths": lambda of: {"kind": "row_lengths", "rows": _row_sums(of)},
            "permute": _list_of(_permutation_of_rows),
        },
    ),
    (
        "fbgemm permute_pooled_embs permute_pooled_embs_split permute_pooled_embs_auto_grad "
        "permute_pooled_embs_auto_grad_split",
        {
            "offset_dim_list": _even_widths("offset_dim_list"),
            "permute_list": _PERMUTATION,
            "inv_offset_dim_list": _even_widths("inv_offset_dim_list"),
            "inv_permute_list": _PERMUTATION,
        },
    ),
    ("fbgemm invert_permute", {"permute": _PERMUTATION}),
    (
        "fbgemm block_bucketize_sparse_features",
        {"lengths": _total("indices", "lengths"), "block_sizes": _LARGE},
    ),
    (
        "fbgemm bounds_check_indices",
        {"rows_per_table": _LARGE, "offsets": _total("indices", "offsets")},
    ),
]
ROLES = {op: makers for ops, makers in _ROLES for op in ops_of(ops)}
"""Op -> argument -> what it must hold."""
INDEXED = ops_of("aten index index_put_ _index_put_impl_ index_put")
IDS_ANYWHERE = ops_of(
    "fbgemm permute_2D_sparse_data permute_1D_sparse_data block_bucketize_sparse_features "
    "invert_permute asynchronous_complete_cumsum"
)
"""Ops that pass on lengths and offsets that fit, but ids of any size."""
CONSISTENT = IDS_ANYWHERE | ops_of(
    "aten arange argmax argmin topk sort argsort max min max_pool2d_with_indices "
    "adaptive_max_pool2d randint randperm nonzero zeros zeros_like"
)
"""Ops whose outputs are legal wherever the trace passed them on."""
PASSING = ops_of(
    "aten view reshape contiguous clone to flatten _to_copy unsqueeze squeeze detach alias "
    "lift_fresh expand _unsafe_view _reshape_alias long t transpose permute type_as"
)
"""Ops whose first input has the values of their output."""


def roles_of(op: str, arguments: Named) -> dict[str, Fill]:
    """What an op needs its arguments to hold, by their names."""
    makers = ROLES.get(op) or (LOOKUP if is_lookup(op) else {})
    found = {}
    for name, make in makers.items():
        if arguments.get(name) is None:
            continue
        try:
            found[name] = make(arguments)
        except (KeyError, IndexError, TypeError, ValueError):
            continue
    if op in INDEXED:
        found |= _index_fills(arguments)
    return found


def has_roles(op: str) -> bool:
    """Whether what some argument of the op holds decides if it runs."""
    return op in ROLES or op in INDEXED or is_lookup(op)


def is_lookup(op: str) -> bool:
    """FBGEMM's lookups of many tables and their backward ops."""
    return op.startswith("fbgemm::") and "embedding" in op and "codegen" in op


def lookup_kind(op: str) -> str:
    """Of a lookup: the optimizer that its backward function runs; ``dense`` for none."""
    match = LOOKUP_KIND.search(op)
    return match[1] if match else "dense"


def _index_fills(of: Named) -> dict[str, Fill]:
    """Of `x[i, j]`: positions a dimension; a list has roles by place."""
    shape = of.get("self") or ()
    found: dict[str, Fill] = {}
    for at, index in enumerate(of.get("indices") or ()):
        if index is not None and at < len(shape):
            found[f"indices.{at}"] = {"kind": "rows", "high": max(shape[at], 1)}
    return found


def _tables(of: Named) -> LookupTables:
    """The tables of a lookup; without a summary alike, as the trace has only sums."""
    given: LookupTables | None = of.get("tables")
    if given is not None:
        return given
    count, total = features_of(of), of.get("total_D")
    widths = [int(of.get("D") or of.get("max_D") or 4)] * count
    if total is not None:
        each, over = divmod(int(total) // 4, count)
        widths = [4 * (each + (at < over)) for at in range(count)]
    weights = _first_shape(of, "dev_weights", "host_weights", "weights")
    rows = max(prod(weights) // max(sum(widths), 1), 1)
    return join_tables([(rows, width, [(1.0, "")]) for width in widths], known=False)


def _first_shape(of: Named, *names: str) -> Shape:
    """Of the first of these arguments that is there; of a list, of its first tensor."""
    shape = next((given for name in names if (given := of.get(name))), (0,))
    if isinstance(shape, list):
        shape = next((item for item in shape if item and prod(item)), (0,))
    return tuple(shape)


def _cumulate(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _first_rows(of: Named) -> list[int]:
    tables = _tables(of)
    return [*tables.first_rows, tables.total_rows]


def _state_offsets(of: Named) -> list[int]:
    """Of an optimizer's state: one entry a row, or as many as the weights."""
    tables = _tables(of)
    state = prod(_first_shape(of, "momentum1_dev", "momentum1_host", "momentum1"))
    return tables.first_elements if state >= tables.elements else tables.first_rows


def _lookup_ids(of: Named) -> Fill:
    tables = _tables(of)
    fill: Fill = {"kind": "table_ids", "rows": tables.rows}
    if not tables.skews:
        return fill
    skews = [skew for at, skew in enumerate(tables.skews) if skew not in tables.skews[:at]]
    places = [skews.index(skew) for skew in tables.skews]
    return fill | {"shares": tables.shares, "laws": skews, "law": places}


def _lookup_offsets(of: Named) -> Fill:
    total, shares = prod(of["indices"]), _tables(of).shares
    if not shares:
        return {"kind": "offsets", "total": total}
    return {"kind": "table_offsets", "total": total, "shares": shares}


_ZEROS = _constant({"kind": "zeros"})
LOOKUP: dict[str, Maker] = {
    "indices": _lookup_ids,
    "offsets": _lookup_offsets,
    "D_offsets": _list_of(lambda of: _cumulate(_tables(of).widths)),
    "hash_size_cumsum": _list_of(_first_rows),
    "weights_offsets": _list_of(lambda of: _tables(of).first_elements),
    "momentum1_offsets": _list_of(_state_offsets),
    "momentum2_offsets": _list_of(_state_offsets),
    "weights_placements": _ZEROS,
    "momentum1_placements": _ZEROS,
    "momentum2_placements": _ZEROS,
}
"""Of a lookup: arguments by FBGEMM's names (`codegen/training/`); lists are taken apart."""
LISTS: dict[str, dict[int, list[str]]] = {
    "weights": {
        3: ["dev_weights", "weights_placements", "weights_offsets"],
        5: [
            "dev_weights", "uvm_weights", "lxu_cache_weights", "weights_placements",
            "weights_offsets",
        ],
    },
    **{
        name: {
            3: [f"{name}_dev", f"{name}_placements", f"{name}_offsets"],
            4: [f"{name}_dev", f"{name}_uvm", f"{name}_placements", f"{name}_offsets"],
        }
        for name in ("momentum1", "momentum2")
    },
}  # fmt: skip
"""Lists of tensors of newer lookups, by their lengths: 3 on a CPU, more on a GPU."""


CHECKS = "fbgemm::bounds_check_indices"
"""Writes to ids and offsets that are out of bounds alone; lookups write no whole numbers."""
POSITIVE = "positive"
SUMS = "fbgemm::asynchronous_complete_cumsum"
"""Makes offsets of lengths."""
IDS = frozenset({"ids", "table_ids", "rows"})
OF_TABLES = "table_offsets"
"""Shares of ids as a table summary has them, which no op before the lookup gives."""


class LegalValues:
    """Decides what tensors made up front hold.

    `fills` maps their numbers to it; what has none holds plain numbers or zeros. `pinned` counts
    those that stand in for a tensor that an op gives.

    Args:
        tables: a summary of those that lookups read, where there is one.
    """

    def __init__(self, tensors: Tensors, rank: int, tables: TableSummary | None) -> None:
        self.tensors = tensors
        self.tables = None if tables is None else MatchedTables(tables, rank)
        self.fills: dict[int, Fill] = {}
        self.pinned = 0
        self._instead: dict[int, int] = {}
        self._root: dict[int, int] = {}
        self._consistent: dict[int, bool] = {}
        self._overwritten: set[int] = set()
        self._lengths: dict[int, int] = {}

    def settle(self, call: Call) -> Call:
        """The call with tensors that hold what its op needs."""
        fills = self._fills(call)

        def legal(name: str, term: Term) -> Term:
            if isinstance(term, tuple):
                return tuple(legal(f"{name}.{i}", item) for i, item in enumerate(term))
            if isinstance(term, Slot) and name in fills:
                return Slot(self._number(term.number, fills[name]))
            return term

        if not fills:
            return call
        pairs = zip(call.names, call.arguments, strict=True)
        keywords = {name: legal(name, term) for name, term in call.keywords.items()}
        return replace(call, arguments=tuple(legal(*pair) for pair in pairs), keywords=keywords)

    def _fills(self, call: Call) -> dict[str, Fill]:
        """Name of an argument (of items of lists ``name.i``) -> what it must hold."""
        if not has_roles(call.op):
            return {}
        terms = call.named()
        named: dict[str, Any] = {name: self._plain(term) for name, term in terms.items()}
        places: dict[str, str] = {}
        for name, ways in LISTS.items():
            shapes = named[name] if slots(terms.get(name)) else []
            for i, item in enumerate(ways.get(len(shapes), ())):
                named.setdefault(item, shapes[i])
                places[item] = f"{name}.{i}"
        if self.tables is not None and is_lookup(call.op):
            held = (n for name in ("weights", *WEIGHTS) for n in slots(terms.get(name)))
            specs = (self.tensors.specs[n] for n in held)
            memory = next(((s.storage, s.offset) for s in specs if prod(s.shape)), (0, call.node))
            named["tables"] = self.tables.of(call.op, memory, named)
        roles = roles_of(call.op, named)
        return {places.get(name, name): fill for name, fill in roles.items()}

    def _plain(self, term: Term) -> Any:
        """The shape of a tensor, or a value; a list of such."""
        if isinstance(term, tuple):
            return [self._plain(item) for item in term]
        if isinstance(term, Slot):
            return self.tensors.specs[term.number].shape
        return None if isinstance(term, Word) else term

    def _number(self, number: int, fill: Fill) -> int:
        """The tensor that an op takes, such that it holds what the op needs."""
        spec = self.tensors.specs[number]
        whole = spec.dtype in WHOLE
        if whole == (fill["kind"] == POSITIVE):
            return number
        root = self._root.get(number, number)
        if fill["kind"] == POSITIVE:
            if root in self.tensors.made:
                self._set_fill(root, fill)
            return number
        if root in self.tensors.made and root not in self._overwritten:
            self._set_fill(root, fill)
            return number
        if fill["kind"] == "offsets":
            self._add_up(root, fill["total"])
        consistent = self._consistent.get(root)
        known = consistent is not None and fill["kind"] != OF_TABLES
        if known and (consistent or fill["kind"] not in IDS):
            return number
        if root not in self._instead:
            self._instead[root] = self.tensors.fresh(spec)
            self._set_fill(self._instead[root], fill)
            self.pinned += 1
        made = self._instead[root]
        if self.tensors.specs[made].shape != spec.shape:
            made = self.tensors.fresh(spec)
            self._set_fill(made, fill)
        return made

    def note_outputs(self, call: Call, written: Sequence[Term] = ()) -> None:
        """Remember whose values the outputs of an op have.

        Args:
            written: arguments that the op changes.
        """
        name = call.op
        gives = call.gives()
        if not name.startswith(CHECKS) and not is_lookup(name):
            self._overwritten.update(slots(tuple(written)))
        if name == SUMS and isinstance(call.arguments[0], Slot):
            source = call.arguments[0].number
            self._lengths |= dict.fromkeys(gives, self._root.get(source, source))
        if name in CONSISTENT:
            for number in gives:
                self._consistent[number] = name not in IDS_ANYWHERE
        elif name in PASSING and len(gives) == 1 and isinstance(call.arguments[0], Slot):
            source = call.arguments[0].number
            same = self.tensors.specs[source].shape
            if prod(same) == prod(self.tensors.specs[gives[0]].shape):
                self._root[gives[0]] = self._root.get(source, source)

    def note_received(self, call: Call) -> None:
        """What other ranks send is not known: whoever needs legal values gets its own."""
        self._overwritten.update(slots(call.arguments[:1]))

    def _add_up(self, offsets: int, total: int) -> None:
        """Lengths made up front, of which an op makes offsets, are of as many ids as there are."""
        lengths = self._lengths.get(offsets)
        if lengths in self.tensors.made and lengths not in self._overwritten:
            self._set_fill(lengths, {"kind": "lengths", "total": total})

    def _set_fill(self, number: int, fill: Fill) -> None:
        if fill["kind"] == OF_TABLES:
            self.fills[number] = fill
        known = self.fills.setdefault(number, fill)
        if known["kind"] == fill["kind"] and "high" in fill and fill["high"] < known["high"]:
            self.fills[number] = fill


def fills_of(program: RankProgram, tables: TableSummary | None = None) -> dict[int, Fill]:
    """What the tensors made up front of a whole program hold.

    Args:
        tables: a summary of those that its lookups read, where there is one.
    """
    tensors = Tensors()
    tensors.specs, tensors.made = program.specs(), program.made
    legal = LegalValues(tensors, program.rank, tables)
    for call in program.calls:
        legal.settle(call)
        legal.note_outputs(call)
    return legal.fills
