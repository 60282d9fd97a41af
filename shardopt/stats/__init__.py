"""How the ids of a data sample spread over the rows: what `shardopt stats` counts and estimates."""
