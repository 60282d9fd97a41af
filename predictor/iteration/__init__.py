"""One training iteration: its graph, when it runs, and its critical path.

`plan_scorer` does it for many plans at once; `torchrec` builds the graph. May import `cost`,
`hardware` and `model`.
"""
