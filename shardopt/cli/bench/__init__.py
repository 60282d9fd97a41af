"""The commands of `shardopt bench`, one file each; `group` registers them, `options` and
`benchmark` hold what they share."""
