"""`shardopt plan --tune`."""
