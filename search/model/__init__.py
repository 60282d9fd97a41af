"""Integer models for CP-SAT: one option for every table, a rank for every shard, and the time of a
plan as the largest of its cycle cuts. May import `in_use` and what lies below.

With a few ranks free a model is a neighbourhood of a plan, with a limit on the time it refutes
targets, with memory alone it says what fits.
"""
