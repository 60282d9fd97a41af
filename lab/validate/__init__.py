"""The suites of `python -m lab validate`: predictions compared with measurements.

`suites` is the registry, `report` what every suite returns. A suite may import every package but
`shardopt.report` and `shardopt.cli`; it never fits a constant on a row that it reports.
"""
