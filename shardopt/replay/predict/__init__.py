"""From a module's ops to predicted time: captured ops, kernel models fitted on replays, a graph.

What evaluates kernel models and graphs is in `predictor`; this room lists the ops of a program or a
step with torch and fits. It imports `shardopt.replay.program` and what is below it.
"""
