"""Suites of `shardopt validate`: each reads public measurements and predicts them."""
