"""What turns a placed plan into a better one.

`annealing` changes options and ranks on cycle cuts, in a compiled loop (`kernel`); `balance` evens
out phases with the same loop. `local_search` works on the full timeline, `neighbourhoods` on cycle
cuts with CP-SAT, on request. May import `in_use`, `partitioner` and what lies below.
"""
