"""What shows that shardopt is right: suites, measurements, other planners. Not shipped."""
