"""Descents that turn a placed plan into a better one.

`local_search` works on the full timeline, `neighbourhoods` on cycle cuts with CP-SAT. `balance` and
`packing` lower sums of maxima over the ranks (`placed_plan`). May import `in_use`, `partitioner`
and what lies below.
"""
