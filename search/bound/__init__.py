"""Lower bounds on the predicted iteration time of every plan in a space."""
