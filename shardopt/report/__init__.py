"""Renders results: on the console, as JSON (`objects`), as Markdown and as one HTML page.

A module holds the report of one command. Nothing here searches, predicts or analyses: what a report
shows is computed before, by `shardopt.explain`, `shardopt.bench` and `lab.validate`.
"""
