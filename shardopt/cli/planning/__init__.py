"""What ``shardopt plan`` does beside searching: answers that are known, plans made again."""
