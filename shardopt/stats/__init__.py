"""Pooling factors and index distributions of a data sample, as `shardopt stats` estimates them."""
