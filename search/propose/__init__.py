"""Candidates: annealed plans of the lowest sets of exchanges; on request those of CP-SAT and Optuna.

`searchers` runs the others in turn. May import `bound`, `improve` and what lies below.
"""
