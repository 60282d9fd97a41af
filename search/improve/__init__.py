"""Descents that turn a placed plan into a better one.

`local_search` works on the full timeline. `balance` and `packing` work on sums of maxima over the
ranks and share `shard_moves`; `additive_moves` works on TorchRec's rating. May import `in_use`,
`partitioner` and what lies below.
"""
