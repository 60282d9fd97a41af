"""`shardopt bench`, a file a command."""
