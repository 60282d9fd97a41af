"""Pages that are generated from the results of the suites."""
