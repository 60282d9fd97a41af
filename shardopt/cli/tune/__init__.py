"""``shardopt plan --tune``: its flags, how their text is read, and the run itself."""
