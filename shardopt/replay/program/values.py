"""Legal values for tensors of whole numbers such as ids, offsets and lengths, so that ops can run.

A trace holds no values. Each entry of `ROLES` says which values an op needs in an argument; the
tensor is then made up front with such values. Where an op of the program gives the tensor and does
not make legal values by itself (`CONSISTENT`), the reader gets a substitute made up front.
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
"""Arguments by name: shapes of tensors, lists of shapes, and other values as they are."""
Maker = Callable[[Named], Fill]


def _below(kind: str, high: Callable[[Named], Any]) -> Maker:
    """Make whole numbers from 0; ``ids`` are drawn as the user asks, ``rows`` uniformly."""
    return lambda args: {"kind": kind, "high": max(int(high(args)), 1)}


def _total(tensor: str, kind: str) -> Maker:
    return lambda args: {"kind": kind, "total": prod(args[tensor])}


def _constant(fill: Fill) -> Maker:
    return lambda _: fill


def _list_of(make: Callable[[Named], list[int]]) -> Maker:
    return lambda args: {"kind": "list", "values": make(args)}


def _classes(args: Named) -> int:
    shape: Shape = args["self"]
    return shape[1 if len(shape) > 1 else 0]


def _bag_offsets(args: Named) -> Fill:
    last = bool(args.get("include_last_offset"))
    return {"kind": "offsets" if last else "starts", "total": prod(args["indices"])}


def _row_sums(args: Named) -> list[int]:
    """Return sums for the rows of lengths that give the permuted rows their recorded sum."""
    total, rows = prod(args["values"]), max(args["lengths"][0], 1)
    entries = prod(args["permute"])
    permuted = args.get("permuted_lengths_sum")
    permuted = total if permuted is None or entries == rows else int(permuted)
    if entries > rows:
        twice = min(entries - rows, rows)
        times = -(-(entries - rows) // twice)
        extra = (permuted - total) // times
        head, tail = _split_evenly(extra, twice), _split_evenly(total - extra, rows - twice)
    else:
        head = _split_evenly(permuted, entries)
        tail = _split_evenly(total - permuted, rows - entries)
    return [*head, *tail]


def _split_evenly(total: int, parts: int) -> list[int]:
    if parts <= 0:
        return []
    marks = [max(total, 0) * i // parts for i in range(parts + 1)]
    return [after - before for before, after in pairwise(marks)]


def _permutation_of_rows(args: Named) -> list[int]:
    """Return all rows in order, and again from the first where there are more entries."""
    rows = max(args["lengths"][0], 1)
    return [i % rows for i in range(prod(args["permute"]))]


def _even_widths(offsets: str) -> Maker:
    """Make the cumulated widths of concatenated pooled vectors of one width."""
    return _list_of(
        lambda args: _cumulate(_split_evenly(args["pooled_embs"][-1], prod(args[offsets]) - 1))
    )


_PERMUTATION = _constant({"kind": "permutation"})
_LARGE = _constant({"kind": "constant", "value": 1 << 30})
"""More rows than any table has: no id is out of bounds, and hashing keeps ids as they are."""
_IDS_OF_WEIGHT = _below("ids", lambda args: (args["weight"] or (1,))[0])
_IDS_OF_ROWS = _below("ids", lambda args: args["num_weights"])

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
        {"index": _below("rows", lambda args: (args["self"] or (1,))[args["dim"]])},
    ),
    (
        "aten index_select_backward",
        {"index": _below("rows", lambda args: args["self_sizes"][args["dim"]])},
    ),
    ("aten one_hot", {"self": _below("ids", lambda args: args["num_classes"])}),
    (
        "aten nll_loss nll_loss_nd nll_loss_forward nll_loss_backward nll_loss2d "
        "nll_loss2d_forward nll_loss2d_backward cross_entropy_loss",
        {"target": _below("rows", _classes)},
    ),
    (
        "aten max_pool2d_with_indices_backward",
        {"indices": _below("rows", lambda args: prod(args["self"][-2:]))},
    ),
    (
        "fbgemm permute_2D_sparse_data permute_1D_sparse_data",
        {
            "lengths": lambda args: {"kind": "row_lengths", "rows": _row_sums(args)},
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
"""Op -> argument -> maker of the values it must hold."""
INDEXED = ops_of("aten index index_put_ _index_put_impl_ index_put")
IDS_ANYWHERE = ops_of(
    "fbgemm permute_2D_sparse_data permute_1D_sparse_data block_bucketize_sparse_features "
    "invert_permute asynchronous_complete_cumsum"
)
"""Ops that pass on legal lengths and offsets, but ids of any size."""
CONSISTENT = IDS_ANYWHERE | ops_of(
    "aten arange argmax argmin topk sort argsort max min max_pool2d_with_indices "
    "adaptive_max_pool2d randint randperm nonzero zeros zeros_like"
)
"""Ops whose outputs are legal inputs of every op that read them in the trace."""
PASSING = ops_of(
    "aten view reshape contiguous clone to flatten _to_copy unsqueeze squeeze detach alias "
    "lift_fresh expand _unsafe_view _reshape_alias long t transpose permute type_as"
)
"""Ops whose first input has the values of their output."""


def roles_of(op: str, arguments: Named) -> dict[str, Fill]:
    """Return the values that an op needs in its arguments, by their names."""
    makers = ROLES.get(op) or (LOOKUP if is_lookup(op) else {})
    fills = {}
    for name, make in makers.items():
        if arguments.get(name) is None:
            continue
        try:
            fills[name] = make(arguments)
        except (KeyError, IndexError, TypeError, ValueError):
            continue
    if op in INDEXED:
        fills |= _index_fills(arguments)
    return fills


def has_roles(op: str) -> bool:
    """Return True if the op runs only with legal values in some argument."""
    return op in ROLES or op in INDEXED or is_lookup(op)


def is_lookup(op: str) -> bool:
    """Return True for FBGEMM's lookups of many tables and their backward ops."""
    return op.startswith("fbgemm::") and "embedding" in op and "codegen" in op


def lookup_kind(op: str) -> str:
    """Return the optimizer that a lookup's backward function runs; ``dense`` for none."""
    match = LOOKUP_KIND.search(op)
    return match[1] if match else "dense"


def _index_fills(args: Named) -> dict[str, Fill]:
    """Return the positions along each dimension in `x[i, j]`, by place in the list of indices."""
    shape = args.get("self") or ()
    fills: dict[str, Fill] = {}
    for at, index in enumerate(args.get("indices") or ()):
        if index is not None and at < len(shape):
            fills[f"indices.{at}"] = {"kind": "rows", "high": max(shape[at], 1)}
    return fills


def _tables(args: Named) -> LookupTables:
    """Return the tables of a lookup; alike without a summary, as the trace has only sums."""
    summary: LookupTables | None = args.get("tables")
    if summary is not None:
        return summary
    count, total = features_of(args), args.get("total_D")
    widths = [int(args.get("D") or args.get("max_D") or 4)] * count
    if total is not None:
        each, over = divmod(int(total) // 4, count)
        widths = [4 * (each + (at < over)) for at in range(count)]
    weights = _first_shape(args, "dev_weights", "host_weights", "weights")
    rows = max(prod(weights) // max(sum(widths), 1), 1)
    return join_tables([(rows, width, [(1.0, "")]) for width in widths], with_ids=False)


def _first_shape(args: Named, *names: str) -> Shape:
    """Return the shape of the first of these arguments present, or of a list's first tensor."""
    shape = next((value for name in names if (value := args.get(name))), (0,))
    if isinstance(shape, list):
        shape = next((item for item in shape if item and prod(item)), (0,))
    return tuple(shape)


def _cumulate(counts: list[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _first_rows(args: Named) -> list[int]:
    tables = _tables(args)
    return [*tables.first_rows, tables.total_rows]


def _state_offsets(args: Named) -> list[int]:
    """Return the offsets of an optimizer's state: one entry a row, or one a weight."""
    tables = _tables(args)
    state = prod(_first_shape(args, "momentum1_dev", "momentum1_host", "momentum1"))
    return tables.first_elements if state >= tables.elements else tables.first_rows


def _lookup_ids(args: Named) -> Fill:
    tables = _tables(args)
    fill: Fill = {"kind": "table_ids", "rows": tables.rows}
    if not tables.skews:
        return fill
    skews = [skew for at, skew in enumerate(tables.skews) if skew not in tables.skews[:at]]
    places = [skews.index(skew) for skew in tables.skews]
    return fill | {"shares": tables.shares, "laws": skews, "law": places}


def _lookup_offsets(args: Named) -> Fill:
    total, shares = prod(args["indices"]), _tables(args).shares
    if not shares:
        return {"kind": "offsets", "total": total}
    return {"kind": "table_offsets", "total": total, "shares": shares}


_ZEROS = _constant({"kind": "zeros"})
LOOKUP: dict[str, Maker] = {
    "indices": _lookup_ids,
    "offsets": _lookup_offsets,
    "D_offsets": _list_of(lambda args: _cumulate(_tables(args).widths)),
    "hash_size_cumsum": _list_of(_first_rows),
    "weights_offsets": _list_of(lambda args: _tables(args).first_elements),
    "momentum1_offsets": _list_of(_state_offsets),
    "momentum2_offsets": _list_of(_state_offsets),
    "weights_placements": _ZEROS,
    "momentum1_placements": _ZEROS,
    "momentum2_placements": _ZEROS,
}
"""Arguments of a lookup by FBGEMM's names (`codegen/training/`); lists are taken apart."""
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
"""Op that writes only to ids and offsets that are out of bounds; lookups write no whole numbers."""
POSITIVE = "positive"
SUMS = "fbgemm::asynchronous_complete_cumsum"
"""Op that makes offsets of lengths."""
IDS = frozenset({"ids", "table_ids", "rows"})
OF_TABLES = "table_offsets"
"""Offsets by the shares of a table summary, which no op before the lookup gives."""


class LegalValues:
    """Values of the tensors made up front.

    `fills` has them by number; a tensor without a fill holds plain numbers or zeros. `pinned`
    counts the substitutes for tensors that ops give.

    Args:
        tables: summary of the tables that lookups read, if given.
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
        """Return the call with tensors that hold the values its op needs."""
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
        """Return the values that arguments must hold, by name; items of lists are ``name.i``."""
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
            weights = (n for name in ("weights", *WEIGHTS) for n in slots(terms.get(name)))
            specs = (self.tensors.specs[n] for n in weights)
            memory = next(((s.storage, s.offset) for s in specs if prod(s.shape)), (0, call.node))
            named["tables"] = self.tables.of(call.op, memory, named)
        roles = roles_of(call.op, named)
        return {places.get(name, name): fill for name, fill in roles.items()}

    def _plain(self, term: Term) -> Any:
        """Return the shape of a tensor, a value, or a list of such."""
        if isinstance(term, tuple):
            return [self._plain(item) for item in term]
        if isinstance(term, Slot):
            return self.tensors.specs[term.number].shape
        return None if isinstance(term, Word) else term

    def _number(self, number: int, fill: Fill) -> int:
        """Return the tensor to take for ``number`` so that it holds the values the op needs."""
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
        passes_on = consistent is not None and fill["kind"] != OF_TABLES
        if passes_on and (consistent or fill["kind"] not in IDS):
            return number
        if root not in self._instead:
            self._instead[root] = self.tensors.fresh(spec)
            self._set_fill(self._instead[root], fill)
            self.pinned += 1
        substitute = self._instead[root]
        if self.tensors.specs[substitute].shape != spec.shape:
            substitute = self.tensors.fresh(spec)
            self._set_fill(substitute, fill)
        return substitute

    def note_outputs(self, call: Call, written: Sequence[Term] = ()) -> None:
        """Remember which tensors' values the outputs of an op have.

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
        """Mark received tensors: their values are unknown, so readers may get substitutes."""
        self._overwritten.update(slots(call.arguments[:1]))

    def _add_up(self, offsets: int, total: int) -> None:
        """Let lengths made up front, of which an op makes offsets, sum to the number of ids."""
        lengths = self._lengths.get(offsets)
        if lengths in self.tensors.made and lengths not in self._overwritten:
            self._set_fill(lengths, {"kind": "lengths", "total": total})

    def _set_fill(self, number: int, fill: Fill) -> None:
        if fill["kind"] == OF_TABLES:
            self.fills[number] = fill
        current = self.fills.setdefault(number, fill)
        if current["kind"] == fill["kind"] and "high" in fill and fill["high"] < current["high"]:
            self.fills[number] = fill


def fills_of(program: RankProgram, tables: TableSummary | None = None) -> dict[int, Fill]:
    """Return the values of all tensors of a program that are made up front.

    Args:
        tables: summary of the tables that its lookups read, if given.
    """
    tensors = Tensors()
    tensors.specs, tensors.made = program.specs(), program.made
    legal = LegalValues(tensors, program.rank, tables)
    for call in program.calls:
        legal.settle(call)
        legal.note_outputs(call)
    return legal.fills
