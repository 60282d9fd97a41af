"""Runtime of a generated benchmark.

`write` copies this folder into each benchmark, where it needs torch alone: it imports nothing of
shardopt.
"""
