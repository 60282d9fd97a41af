"""Answers of the commands.

A module makes the `View` of one command: its answer, whose fields are the keys of ``--json``, and
its report as a list of blocks that `console` and `html` draw.

Nothing here searches or predicts: what is shown is computed before, by `shardopt.explain`,
`shardopt.bench` and the like.
"""
