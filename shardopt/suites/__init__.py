"""Suites of `shardopt validate` that also need plans made by `search`."""
