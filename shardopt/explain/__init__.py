"""What there is to explain about a plan: helpful changes, waits, what-if. Renders nothing."""
