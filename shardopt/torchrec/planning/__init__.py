"""What plugs into TorchRec's planning: planner, estimator, performance model, provider.

Also runs TorchRec's own planner for comparison. Imports all other rooms and `search`.
"""
