"""Plans measured against predictions: run, generated as tasks, and compared with other planners."""
