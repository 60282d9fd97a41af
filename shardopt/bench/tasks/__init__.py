"""Random sharding tasks, measured one after the other."""
