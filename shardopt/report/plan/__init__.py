"""Reports on plans: plan, predict, explain, diff, tune."""
