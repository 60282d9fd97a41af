"""Runs plans and planners for real and keeps what they took.

`run` times plans side by side (`worker` is one rank of it), `tasks` does so for sets of random
tasks, `planners` compares planners, `transformers` times transformers. Imports `calibrate`,
`replay`, `measure` and `ranks`; `lab.validate` holds predictions against its rows.
"""
