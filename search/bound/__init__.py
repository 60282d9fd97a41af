"""Lower bounds on the predicted iteration time of every plan in a space.

`lower_bound` is the entrance; `additive` bounds TorchRec's rating instead. May import `objective`,
`space` and `problem`.
"""
