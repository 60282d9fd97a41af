"""From a user's module to the workload that the search takes."""
