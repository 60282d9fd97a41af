"""Candidates: annealed plans of the lowest sets of exchanges; on request CP-SAT's and Optuna's; any
plan that fits where nothing else finds one. May import `state`, `bound` and what lies below.
"""
