"""One reader of data files a format; `shardopt.stats.source` says what they share."""
