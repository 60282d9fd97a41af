"""Candidates: plans for the local search to start from.

`searchers` runs the others in turn. May import `bound`, `improve` and what lies below.
"""
