"""Models timed against their replays, and the replays that kernel models are fitted on.

Imports all of `shardopt.replay`.
"""
