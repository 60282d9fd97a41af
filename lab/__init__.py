"""Laboratory: validation suites, measurements and other planners. Not shipped."""
