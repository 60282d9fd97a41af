"""Improvement of placed plans.

`annealing` changes options and ranks on cycle cuts, in a compiled loop (`kernel`); `merges` joins
exchanges; `local_search` searches ties and scenarios on the full timeline. May import `in_use`,
`partitioner` and the layers below.
"""
