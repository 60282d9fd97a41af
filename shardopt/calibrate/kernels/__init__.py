"""Times one kind of kernel in each module. Only ranks import it, as all of it needs torch."""
