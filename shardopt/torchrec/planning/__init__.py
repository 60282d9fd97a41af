"""The planner hook, and what else plugs into TorchRec's planner."""
