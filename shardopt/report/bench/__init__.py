"""Reports of `shardopt bench`."""
