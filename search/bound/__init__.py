"""Lower bounds on the predicted iteration time of every plan in a space; `lower_bound` is the
entrance. May import `objective`, `space`, `problem` and `model`.
"""
