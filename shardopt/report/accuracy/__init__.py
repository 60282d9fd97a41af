"""Reports of `shardopt validate`."""
