"""Proposers of candidates: annealing in the exchange sets of lowest bound; CP-SAT and Optuna on
request; any plan that fits if nothing else finds one. May import `state`, `bound` and the layers
below.
"""
