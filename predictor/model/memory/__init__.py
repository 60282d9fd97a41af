"""Memory per rank: what shards need (`ranks`), and what a rank has at once (`peak`).

`iteration` says in what order blocks are taken and given and how large those of embedding modules
are, `blocks` what they add up to. May import what `model` may.
"""
