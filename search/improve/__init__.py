"""Improvement of placed plans.

`annealing` changes options and ranks on cycle cuts, in a compiled loop (`kernel`); `merges` joins
exchanges; `neighbours` lists the changes of a plan. May import `in_use`,
`partitioner` and the layers below.
"""
