"""Published planners, and the suite that compares them with ours."""
