"""Candidates: annealed plans of the lowest sets of exchanges; on request CP-SAT's and Optuna's.

`searchers` runs the others in turn. May import `bound`, `improve` and what lies below.
"""
