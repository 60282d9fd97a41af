"""What turns a placed plan into a better one.

`annealing` changes options and ranks on cycle cuts, in a compiled loop (`kernel`); `merges` joins
exchanges; `local_search` looks among plans that tie and over scenarios, on the full timeline. May
import `in_use`, `partitioner` and what lies below.
"""
