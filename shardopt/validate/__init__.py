"""Predictions held against measurements: every suite of `shardopt validate`."""
