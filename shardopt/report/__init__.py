"""What commands answer: a module makes the `View` of one command, which has its JSON and its report
as a list of blocks; `console` and `html` draw these.

Nothing here searches or predicts: what is shown is computed before, by `shardopt.explain`,
`shardopt.bench` and the like.
"""
